"""The block-by-block matmul on CPUs gives what dequantizing first gives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import midtread as mt
from midtread.kernels import choose, cpu, decoding
from midtread.numerics.formats import as_format

FORMATS = ["int8", "int5", "int4", "int3", "uint8", "uint4", "nf4"]
FORMATS += ["float8_e4m3fn", "float8_e5m2", "float4_e2m1fn"]
K, N = 256, 70


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Weights of a few kB take the lowering, in several blocks with a remainder."""
    monkeypatch.setattr(cpu, "MIN_SIZE", 1)
    monkeypatch.setattr(cpu, "BLOCK", 2**12)


@pytest.fixture
def taken(monkeypatch):
    """Outcomes of the choice: True where the lowering was taken."""
    outcomes, original = [], choose.weight

    def spy(*args):
        out = original(*args)
        outcomes.append(out is not None)
        return out

    monkeypatch.setattr(choose, "weight", spy)
    return outcomes


def weight(key, qtype, stored="kn", tile=None, k=K, n=N):
    extents = {"k": k, "n": n}
    w = jax.random.normal(key, [extents[x] for x in stored])
    how = {"tiled_axes": {stored.index("k"): tile}} if tile else {}
    if qtype.startswith("u"):
        w = jnp.abs(w)
    return mt.quantize(w, qtype, channelwise_axes=[stored.index("n")], **how)


def exact(equation, *operands):
    values = (mt.dequantize(x) if isinstance(x, mt.QArray) else x for x in operands)
    return np.einsum(equation, *(np.asarray(v, np.float64) for v in values))


def assert_close(out, expected, tolerance=1e-6):
    assert out.shape == expected.shape
    error = np.abs(np.asarray(out, np.float64) - expected).max()
    assert error <= tolerance * np.abs(expected).max()


@pytest.mark.parametrize("tile", [None, 128])
@pytest.mark.parametrize("stored", ["kn", "nk"])
@pytest.mark.parametrize("qtype", FORMATS)
def test_values_are_those_of_dequantizing(key, taken, qtype, stored, tile):
    w = weight(key, qtype, stored, tile)
    equation = f"mk,{stored}->mn"
    run = jax.jit(lambda x, w: mt.einsum(equation, x, w))
    for rows in (1, 2, 8):
        x = jax.random.normal(key, (rows, K))
        assert_close(run(x, w), exact(equation, x, w))
    assert taken == [True] * 3


@pytest.mark.parametrize(
    "qtype, tile", [("mxfp8", 32), ("mxfp8_e5m2", 32), ("mxfp4", 32), ("nvfp4", 16)]
)
@pytest.mark.parametrize("stored", ["kn", "nk"])
def test_formats_with_a_tile_of_their_own(key, taken, qtype, tile, stored):
    w, x = weight(key, qtype, stored, tile), jax.random.normal(key, (2, K))
    equation = f"mk,{stored}->mn"
    assert_close(mt.einsum(equation, x, w), exact(equation, x, w))
    assert taken == [True]


@pytest.mark.parametrize("name", [n for n in decoding.DECODERS if " " not in n])
def test_every_code_decodes(name):
    """NaN and infinite codes too."""
    bits = np.arange(256, dtype=np.int8 if name == "int8" else np.uint8)
    width = 8 // decoding.num_planes(as_format(name))
    is_byte, half = width == 8, 1 << width - 1
    bytes_ = bits.view(np.int8) * jnp.int8(1)
    planes = decoding.planes(bytes_, as_format(name), jnp.float32)
    shifts = range(0, 8, width)
    codes = bits if is_byte else np.stack([bits >> s & 2 * half - 1 for s in shifts])
    if is_byte:
        expected = codes.view(np.dtype(name)).astype(np.float32)
    else:
        is_signed = name.startswith("int")
        signed = (codes.astype(np.int8) ^ half) - half if is_signed else codes
        is_float = name.startswith("float")
        grid = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
        expected = np.concatenate([grid, -grid])[codes] if is_float else signed
    np.testing.assert_array_equal(np.stack(planes).reshape(expected.shape), expected)


def test_nan_codes_reach_the_output(key, taken):
    w = weight(key, "float8_e4m3fn")
    w = w.replace(qvalue=w.qvalue.at[3, 5].set(jnp.nan))
    out = mt.dot(jnp.ones((1, K)), w)
    assert taken == [True] and np.flatnonzero(np.isnan(out)).tolist() == [5]


@pytest.mark.parametrize("k, n", [(33, 34), (34, 33), (1, 64), (64, 1), (512, 1030)])
@pytest.mark.parametrize("qtype", ["int8", "int4"])
def test_odd_sizes(key, taken, qtype, k, n):
    x = jax.random.normal(key, (3, k))
    for stored in ("kn", "nk"):
        w, equation = weight(key, qtype, stored, k=k, n=n), f"mk,{stored}->mn"
        assert_close(mt.einsum(equation, x, w), exact(equation, x, w), 2e-6)
    odd_rows = qtype == "int4" and (n % 2 == 1, k % 2 == 1)
    assert taken == ([not odd for odd in odd_rows] if odd_rows else [True, True])


@pytest.mark.parametrize(
    "equation, shapes, taken_here",
    [
        ("btk,khd->bthd", ((1, 2, 64), (64, 4, 16)), True),
        ("bthd,hdk->btk", ((1, 2, 4, 16), (4, 16, 64)), True),
        ("hdk,bthd->tkb", ((4, 16, 64), (1, 2, 4, 16)), True),
        ("tk,hkd->thd", ((2, 64), (4, 64, 16)), False),  # the summed axis is inside
        ("btk,bkd->btd", ((4, 2, 64), (4, 64, 16)), False),  # a batch
    ],
)
def test_layouts(key, taken, equation, shapes, taken_here):
    lhs, rhs = (jax.random.normal(key, s) for s in shapes)
    if len(equation.split(",")[0]) == 3 and shapes[0] == (4, 16, 64):
        lhs = mt.quantize(lhs, "int4", channelwise_axes=[2])
    else:
        axis = rhs.ndim - 1
        rhs = mt.quantize(rhs, "int4", channelwise_axes=[axis])
    assert_close(mt.einsum(equation, lhs, rhs), exact(equation, lhs, rhs))
    assert taken == [taken_here]


def test_tiles_over_two_summed_axes_and_over_kept_ones(key, taken):
    x, w = jax.random.normal(key, (2, 4, 32)), jax.random.normal(key, (4, 32, 12))
    equation = "mhk,hkn->mn"
    for tiles in ({0: 1, 1: 8, 2: 3}, {1: 8}):  # the second: runs that do not merge
        q = mt.quantize(w, "int4", tiled_axes=tiles)
        assert_close(mt.einsum(equation, x, q), exact(equation, x, q))
    assert taken == [True, False]


def test_fallbacks(key, taken):
    x = jax.random.normal(key, (2, K))
    affine = mt.quantize(
        jax.random.normal(key, (K, N)), "int8", calibration_method="minmax"
    )
    padded = weight(key, "int4", tile=96)
    for w in (weight(key, "int2"), affine, padded):
        assert_close(mt.dot(x, w), exact("mk,kn->mn", x, w), 2e-6)
    assert taken == [False, False, True]
    many = jnp.zeros((cpu.MAX_ROWS + 1, K))
    mt.dot(many, weight(key, "int8"))
    assert taken[-1] is False


def test_bfloat16_keeps_its_result_dtype(key, taken):
    x = jax.random.normal(key, (2, K), jnp.bfloat16)
    w = weight(key, "int4")
    half = w.astype(jnp.bfloat16)
    assert mt.dot(x, half).dtype == jnp.bfloat16 and mt.dot(x, w).dtype == jnp.float32
    assert_close(mt.dot(x, half), exact("mk,kn->mn", x, half), 2**-8)
    assert all(taken)


@pytest.mark.parametrize("tile", [None, 128])
@pytest.mark.parametrize("stored", ["kn", "nk"])
@pytest.mark.parametrize("qtype", ["int8", "nf4"])
def test_transformations(key, taken, qtype, stored, tile):
    w, equation = weight(key, qtype, stored, tile), f"mk,{stored}->mn"
    x, g = jax.random.normal(key, (2, K)), jax.random.normal(key, (2, N))
    run = lambda x, w: mt.einsum(equation, x, w)
    # grad: with respect to x and to the scale
    plain = lambda x, w: jnp.einsum(equation, x, mt.dequantize(w))
    loss = lambda f: lambda x, s: jnp.sum(g * f(x, w.replace(scale=s)))
    got, expected = (jax.grad(loss(f), (0, 1))(x, w.scale) for f in (run, plain))
    for ours, theirs in zip(got, expected):
        assert_close(ours, np.asarray(theirs, np.float64), 3e-6)
    # vmap, over x, over the weight, over both
    xs, ws = jnp.stack([x, -x]), jax.tree.map(lambda v: jnp.stack([v, v]), w)
    one = exact(equation, x, w)
    assert_close(jax.vmap(run, (0, None))(xs, w), np.stack([one, -one]))
    assert_close(jax.vmap(run, (None, 0))(x, ws), np.stack([one, one]))
    assert_close(jax.vmap(run)(xs, ws), np.stack([one, -one]))
    # scan over stacked layers
    outs = lax.scan(lambda _, layer: (None, run(x, layer)), None, ws)[1]
    assert_close(outs, np.stack([one, one]))
    assert taken and all(taken)


@pytest.mark.parametrize("rhs_type", ["int8", "int4", "uint4"])
@pytest.mark.parametrize("lhs_type", ["int8", "int4"])
@pytest.mark.parametrize("equation", ["mk,kn->mn", "mk,nk->mn", "kn,mk->mn", "nk,k->n"])
def test_integer_codes(key, lhs_type, rhs_type, equation):
    """The same integers, in int32, whichever operand is the small one."""
    extents = {"m": 1, "k": 64, "n": 256}
    for extents["m"] in (1, 2, 8):
        lhs, rhs = (
            jax.random.randint(
                key, [extents[x] for x in labels], low, low + 15, jnp.int8
            )
            for labels, low in zip(equation.split("->")[0].split(","), (-7, 0))
        )
        q = lhs.astype(lhs_type), rhs.astype(rhs_type)
        out = mt.einsum(equation, *q, preferred_element_type=jnp.int32)
        np.testing.assert_array_equal(out, exact(equation, *q))


def test_sharded_weights_are_left_to_xla(key, taken):
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    w = weight(key, "int8", n=64)
    spec = jax.sharding.PartitionSpec(None, "x")
    x = jax.random.normal(key, (1, K))
    expected = exact("mk,kn->mn", x, w)
    sharded = jax.device_put(w, w.shardings(jax.sharding.NamedSharding(mesh, spec)))
    assert_close(jax.jit(mt.dot)(x, sharded), expected)
    assert taken == [False]
