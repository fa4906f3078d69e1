"""Every GPU kernel against the engine in plain XLA, on a real GPU.

JAX_PLATFORMS=cuda,cpu python -m pytest -m gpu tests/device/test_kernels.py
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import midtread as mt
from midtread.kernels import choose
from midtread.kernels.attention import Ranged
from midtread.kernels.decode_attention import Cached
from midtread.kernels.environment import implementation
from midtread.kernels.weight_matmul import few_codes
from tests.kernels import test_attention as flash
from tests.kernels.plans import error, random, wide
from tests.kernels.test_grouped import attention

pytestmark = pytest.mark.gpu


def quantize(x, name, **how):
    """mt.quantize in one program: operation by operation a GPU would compile a dozen."""
    return jax.jit(lambda x: mt.quantize(x, name, **how))(x)


def dot(x, w):
    """By NumPy, which compiles nothing."""
    return wide(x) @ wide(mt.dequantize(w, jnp.float32))


def run_as(name, fn, *args):
    """Without XLA's search for the fastest matmul, for nothing is timed here; but without it
    XLA's own int8 x int8 gives twice the sum (jax 0.11.2, H200)."""
    with implementation(name):
        lowered = jax.jit(fn).lower(*args)
    has_int8 = "xi8>" in lowered.as_text()
    options = {} if has_int8 else {"xla_gpu_autotune_level": 0}
    return lowered.compile(compiler_options=options)(*args)


def by_kernel(fn, *args):
    """`fn` through our kernels; an error if one does not take it."""
    return run_as("gpu", fn, *args)


def by_xla(fn, *args):
    return run_as("xla", fn, *args)


@pytest.mark.parametrize("rows", [1, 8, 16, 64])
def test_rows_of_tiles_have_the_same_values(rows):
    """Said in another way for XLA's sake: what is multiplied must not change."""
    spec = mt.Spec("int8", channelwise_axes=(0,), tiled_axes={1: 128})
    values = lambda x: few_codes._values(choose.quantize(x, spec, summed=(1,))[0])
    x = random(rows, rows, 4096).at[0, :128].set(0).at[-1, 200].set(jnp.nan)
    run = lambda x: values(jax.nn.relu(x))
    ours = jax.jit(run)(x)
    np.testing.assert_array_equal(wide(ours), wide(by_xla(run, x)))


@pytest.mark.parametrize(
    ("name", "tile"), [("int8", None), ("int4", 32), ("nf4", 64), ("e4m3", 128)]
)
def test_any_number_of_rows_is_as_near_to_float64(name, tile):
    """The law of tests/kernels/test_any_rows.py, through every kernel that takes these."""
    tiles = {0: tile} if tile else {}
    w = quantize(random(1, 1024, 512), name, channelwise_axes=[1], tiled_axes=tiles)
    values = wide(mt.dequantize(w, jnp.float32)).astype(np.float64)
    for rows in (1, 2, 3, 8, 9, 16, 17, 32, 64, 65, 128, 300, 1000):
        x = random(2, rows, 1024)
        want = wide(x).astype(np.float64) @ values
        got = wide(by_kernel(mt.dot, x, w)).astype(np.float64)
        distance = np.linalg.norm(got - want, axis=1) / np.linalg.norm(want, axis=1)
        assert np.max(distance) < 4e-3, (rows, np.max(distance))


SHAPES = [(128, 128, 128), (200, 272, 328), (1000, 4096, 520), (4096, 1024, 2056)]


@pytest.mark.parametrize(("m", "k", "n"), SHAPES)
@pytest.mark.parametrize("pair", ["int8 int8", "e4m3 e4m3", "e4m3 e5m2"])
def test_scaled_matmul(pair, m, k, n):
    left, right = pair.split()
    x = quantize(random(m, m, k) * 100, left, channelwise_axes=[0])
    w = quantize(random(n, k, n), right, channelwise_axes=[1])
    for equation in ("mk,kn->mn", "mk,kn->nm"):
        for dtype in (jnp.float32, jnp.bfloat16):
            run = functools.partial(mt.einsum, equation, preferred_element_type=dtype)
            # fp8 tensor cores add in fewer bits than float32
            limit = 1e-6 if pair == "int8 int8" and dtype == jnp.float32 else 3e-3
            assert error(by_kernel(run, x, w), by_xla(run, x, w)) < limit


def test_scales_of_any_size_and_nan():
    x = np.random.RandomState(0).randn(256, 256).astype(np.float32)
    x[0], x[1], x[2, 3] = x[0] * 1e30, x[1] * 1e-30, np.nan
    q = quantize(jnp.asarray(x), "e4m3", channelwise_axes=[0])
    w = quantize(random(1, 256, 256, dtype=jnp.float32), "e4m3", channelwise_axes=[1])
    got, want = (
        wide(run(mt.dot, q, w)).astype(np.float64) for run in (by_kernel, by_xla)
    )
    assert np.isnan(got[2]).all() and np.isnan(want[2]).all()
    for row in (0, 1, *range(3, 256)):
        assert np.linalg.norm(got[row] - want[row]) <= 3e-3 * np.linalg.norm(want[row])


@pytest.mark.parametrize("equation", ["mk,kn->mn", "mk,nk->mn", "km,kn->mn"])
def test_block_scaled_matmul(equation):
    left, right = equation.split("->")[0].split(",")
    spec = lambda term, block: {
        "channelwise_axes": ()
        if block
        else [term.index("m") if "m" in term else term.index("n")],
        "tiled_axes": dict.fromkeys((0, 1), 128) if block else {term.index("k"): 128},
    }
    for block in (True, False):
        x = quantize(random(1, 1024, 1024), "e4m3", **spec(left, False))
        w = quantize(random(2, 1024, 1024), "e4m3", **spec(right, block))
        run = functools.partial(mt.einsum, equation)
        assert error(by_kernel(run, x, w), by_xla(run, x, w)) < 4e-3


@pytest.mark.parametrize(("m", "n", "k"), [(4096, 3968, 512), (384, 640, 384)])
def test_block_scaled_sizes(m, n, k):
    """Many blocks to a program or fewer than programs; the last pair half outside."""
    x = quantize(random(1, m, k), "e4m3", channelwise_axes=[0], tiled_axes={1: 128})
    for kept, tiles in (((), {0: 128, 1: 128}), ((1,), {0: 128})):
        w = random(2, k, n)
        w = quantize(w, "e4m3", channelwise_axes=kept, tiled_axes=tiles)
        assert error(by_kernel(mt.dot, x, w), by_xla(mt.dot, x, w)) < 4e-3


@pytest.mark.parametrize(("m", "n", "k"), [(4096, 3968, 512), (300, 520, 384)])
def test_one_scale_for_all(m, n, k):
    x, w = quantize(random(1, m, k), "e4m3"), quantize(random(2, k, n), "e4m3")
    assert error(by_kernel(mt.dot, x, w), by_xla(mt.dot, x, w)) < 4e-3


FORMATS = [
    ("int8", None),
    ("int8", 128),
    ("e4m3", None),
    ("e5m2", None),
    ("int4", None),
]
FORMATS += [("int4", 32), ("int4", 64), ("int4", 128), ("nf4", 64)]


# Multiples of 256 columns in bfloat16 are streamed on Hopper: the sum in clusters of every
# size (of 8, 6, 8, 5 and 3 with 8 bits, and int4 up to 16 rows), in pairs and parts. The others
# go by Triton.
@pytest.mark.parametrize(
    ("dtype", "k", "columns"),
    [
        (jnp.bfloat16, 2048, 768),
        (jnp.bfloat16, 1792, 4096),
        (jnp.bfloat16, 7168, 512),
        (jnp.bfloat16, 1792, 5120),
        (jnp.bfloat16, 1792, 8192),
        (jnp.bfloat16, 2048, 896),
        (jnp.float16, 2048, 896),
    ],
)
@pytest.mark.parametrize(("name", "tile"), FORMATS)
def test_few_rows(name, tile, dtype, k, columns):
    tiles = {0: tile} if tile else {}
    w = random(1, k, columns, dtype=dtype)
    w = quantize(w, name, channelwise_axes=[1], tiled_axes=tiles)
    for rows in (1, 2, 3, 16, 17, 64):
        x = random(rows, rows, k, dtype=dtype)
        assert error(by_kernel(mt.dot, x, w), dot(x, w)) < 5e-3


@pytest.mark.parametrize("name", ["int8", "int4", "nf4"])
def test_few_rows_by_scales_in_float32(name):
    """They are not rounded: what is left is the rounding of products and of the result."""
    w = random(1, 2048, 768, dtype=jnp.float32)
    w = quantize(w, name, channelwise_axes=[1], tiled_axes={0: 128})
    assert w.scale.dtype == jnp.float32
    for rows in (1, 16, 17, 64):
        x = random(rows, rows, 2048)
        assert error(by_kernel(mt.dot, x, w), dot(x, w)) < 2.6e-3


@pytest.mark.parametrize(("name", "tile"), FORMATS)
def test_many_rows(name, tile):
    """Hopper: blocks that are not full, sums that programs share, and again the same bits."""
    tiles = {0: tile} if tile else {}
    for rows, columns in [(65, 512), (300, 768), (1000, 512)]:
        w = random(1, 1152, columns)
        w = quantize(w, name, channelwise_axes=[1], tiled_axes=tiles)
        x = random(rows, rows, 1152)
        got = by_kernel(mt.dot, x, w)
        assert error(got, dot(x, w)) < 4e-3
        assert (got == by_kernel(mt.dot, x, w)).all()


def test_many_rows_in_pairs_and_halves():
    """More blocks than multiprocessors: rounds, and a last one that is cut."""
    w = quantize(
        random(1, 256, 14336), "int4", channelwise_axes=[1], tiled_axes={0: 128}
    )
    for rows in (1024, 8192):
        x = random(2, rows, 256)
        assert error(by_kernel(mt.dot, x, w), by_xla(mt.dot, x, w)) < 1e-3


@pytest.mark.parametrize("pair", ["int8 int8", "e4m3 e4m3", "e4m3 e5m2"])
def test_codes_by_a_stored_weight(pair):
    """Turned on the way, on Hopper: parts of a sum, edges, pairs, a last round that is cut."""
    left, right = pair.split()
    for m, k, n in [
        (65, 512, 128),
        (300, 1280, 768),
        (1024, 256, 14336),
        (8192, 256, 14336),
    ]:
        x = quantize(random(1, m, k), left, channelwise_axes=[0])
        w = quantize(random(2, k, n), right, channelwise_axes=[1])
        x = x.replace(scale=x.scale.at[3].set(0).at[-1].set(jnp.nan))
        want, got = (wide(run(mt.dot, x, w)) for run in (by_xla, by_kernel))
        assert np.isnan(got[-1]).all() and (got[3] == 0).all()
        assert error(got[:-1], want[:-1]) < 4e-3
    w = quantize(random(2, k, 512), right)  # one scale for all
    got = by_kernel(mt.dot, x[:100], w)
    assert error(got, by_xla(mt.dot, x[:100], w)) < 4e-3


@pytest.mark.parametrize("name", ["int8", "e4m3", "e5m2"])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("summed", [(0,), (1,)])
def test_quantizing_gives_the_same_codes(name, dtype, summed):
    x = np.random.RandomState(0).randn(256, 4096).astype(np.float32)
    x[3], x[5] = 0, x[5] * 1e20
    x = jnp.asarray(x, dtype)
    kept = tuple(a for a in (0, 1) if a not in summed)
    for spec in (
        mt.Spec(name, channelwise_axes=kept),
        mt.Spec(name),
        mt.Spec(name, channelwise_axes=kept, tiled_axes={summed[0]: 128}),
        mt.Spec(name, tiled_axes={0: 128, 1: 128}),
    ):
        run = functools.partial(choose.quantize, spec=spec, summed=summed, both=True)
        want, _ = by_xla(run, x)
        for got in by_kernel(run, x):
            np.testing.assert_array_equal(wide(got.scale), wide(want.scale))
            assert np.mean(wide(got.qvalue) != wide(want.qvalue)) < 1e-4


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_two_matmuls_share_one_read(dtype):
    x = np.random.RandomState(0).randn(2, 256, 1024).astype(np.float32)
    x[0, 3], x[1, 5] = 0, x[1, 5] * 1e20
    x, summed = jnp.asarray(x, dtype), ((2,), (0, 1))
    tiles = (
        mt.Spec("e4m3", channelwise_axes=(0, 1), tiled_axes={2: 128}),
        mt.Spec("e4m3", channelwise_axes=(2,), tiled_axes={1: 128}),
    )
    window = {"absmax": jnp.full((1, 1, 1), 3.0)}
    delayed = (mt.Spec("e5m2", calibration="delayed"),) * 2
    for specs, range_ in ((tiles, None), (delayed, window)):
        run = lambda x, how=(specs, summed, range_, True): choose.quantize_twice(
            x, *how
        )
        *got, largest = by_kernel(run, x)
        for q, spec, axes in zip(got, specs, summed):
            one = functools.partial(choose.quantize, spec=spec, range_=range_)
            want, _ = by_xla(functools.partial(one, summed=axes), x)
            np.testing.assert_array_equal(wide(q.scale), wide(want.scale))
            assert np.mean(wide(q.qvalue) != wide(want.qvalue)) < 1e-4
        assert range_ is None or largest == jnp.max(jnp.abs(x))


RECIPES = ["qwix_int8", "qwix_fp8_full", "te_fp8_current", "deepseek_fp8"]


@pytest.mark.parametrize("name", RECIPES)
def test_training(name):
    ops = mt.learn(mt.recipe(name))

    def step(x, w, g):
        out, vjp = jax.vjp(lambda x, w: ops.einsum("bsk,kn->bsn", x, w), x, w)
        return out, *vjp(g)

    args = random(1, 2, 512, 1024), random(2, 1024, 512), random(3, 2, 512, 512)
    for got, want in zip(by_kernel(step, *args), by_xla(step, *args)):
        assert error(got, want) < 2e-2


@pytest.mark.parametrize("rows", [8, 80])
def test_vmap_and_grad(rows):
    w = quantize(random(1, 256, 256), "int8", channelwise_axes=[1])
    x = random(2, 3, rows, 256)
    run = lambda x: jnp.sum(
        jnp.square(jax.vmap(lambda x: mt.dot(x, w))(x)).astype(jnp.float32)
    )
    assert error(by_kernel(jax.grad(run), x), by_xla(jax.grad(run), x)) < 2e-2


# --- rows in groups ---------------------------------------------------------------------------

UNEVEN = [100, 0, 3, 700, 257, 1, 640, 300]  # 47 rows left over
GROUPS = [
    ("qwix_int8", UNEVEN),
    ("qwix_fp8_full", [5, 0, 0, 1000, 8, 16, 23, 900]),
    ("te_fp8_current", UNEVEN),
    ("qwix_int8", [0] * 8),
    ("qwix_fp8_full", [2048] + [0] * 7),
]


def step_of(ops, sizes):
    def step(x, w, g):
        out, vjp = jax.vjp(lambda x, w: ops.ragged_dot(x, w, sizes), x, w)
        return out, *vjp(g)

    return step


@pytest.mark.parametrize(("name", "sizes"), GROUPS)
def test_training_through_groups(name, sizes):
    """Forward and both gradients; XLA's own ragged_dot wants the rows within groups."""
    step = step_of(mt.learn(mt.recipe(name)), jnp.array(sizes))
    args = random(1, 2048, 520), random(2, 8, 520, 392), random(3, 2048, 392)
    inside = sum(sizes)
    found, expected = by_kernel(step, *args), by_xla(step, *args)
    for i, (got, want) in enumerate(zip(found, expected)):
        got, want = (v if i == 2 else v[:inside] for v in (got, want))
        norm = np.linalg.norm(wide(want))
        assert np.linalg.norm(wide(got) - wide(want)) <= 2e-2 * norm
    assert np.all(wide(found[0])[inside:] == 0)


def test_groups_with_scales_of_any_size_and_nan():
    x = np.random.RandomState(0).randn(512, 256).astype(np.float32)
    x[0], x[1], x[130, 3] = x[0] * 1e30, x[1] * 1e-30, np.nan
    q = quantize(jnp.asarray(x), "e4m3", channelwise_axes=[0])
    w = quantize(random(1, 3, 256, 256), "e4m3", channelwise_axes=[0, 2])
    sizes = jnp.array([129, 200, 183])
    run = lambda q, w: mt.ragged_dot(q, w, sizes, preferred_element_type=jnp.float32)
    got, want = (wide(f(run, q, w)).astype(np.float64) for f in (by_kernel, by_xla))
    assert np.isnan(got[130]).all()
    for row in (0, 1, *range(2, 130), *range(131, 512)):
        assert np.linalg.norm(got[row] - want[row]) <= 3e-3 * np.linalg.norm(want[row])


EXPERTS = [("int8", None), ("e4m3", None), ("e5m2", None), ("int4", None)]
EXPERTS += [("int4", 32), ("int4", 128)]
FEW = [  # in groups: blocks of several sizes, empty groups, rows beyond, one row, none
    [16] * 8,
    [17, 0, 3, 40, 16, 15, 20, 9],
    [0] * 7 + [128],
    [1] + [0] * 7,
    [0] * 8,
]


# Multiples of 256 columns are streamed on Hopper; the others go by Triton, which lacks nf4.
@pytest.mark.parametrize(
    ("name", "tile", "columns"),
    [(*case, 768) for case in [*EXPERTS, ("nf4", 64)]]
    + [(*case, 896) for case in EXPERTS],
)
def test_few_rows_of_groups(name, tile, columns):
    tiles = {1: tile} if tile else {}
    w = quantize(random(1, 8, 1024, columns), name, channelwise_axes=[0, 2], tiled_axes=tiles)  # fmt: skip
    exact = mt.dequantize(w, jnp.float32)
    run = lambda x, w, s: mt.ragged_dot(x, w, s)
    for num_rows, sizes in [(128, sizes) for sizes in FEW] + [(8, [1] * 8), (300, FEW[1])]:  # fmt: skip
        x, inside = random(sizes[0], num_rows, 1024), sum(sizes)
        parts = np.split(np.arange(num_rows), np.cumsum(sizes))[:8]
        want = np.concatenate([wide(x)[rows] @ wide(exact[i]) for i, rows in enumerate(parts)])  # fmt: skip
        got = by_kernel(run, x, w, jnp.array(sizes))
        norm = np.linalg.norm(want)
        assert np.linalg.norm(wide(got)[:inside] - want) <= 5e-3 * norm
        assert np.all(wide(got)[inside:] == 0)
        assert (got == by_kernel(run, x, w, jnp.array(sizes))).all()


@pytest.mark.parametrize("rows", [8, 24])
def test_codes_in_float32_are_not_rounded(rows):
    """Scales within the sum make values of codes, which bfloat16 does not hold."""
    x = quantize(random(1, 8 * rows, 256, dtype=jnp.float32), "int8", channelwise_axes=[0])  # fmt: skip
    w = random(2, 8, 256, 512, dtype=jnp.float32)
    w = quantize(w, "int4", channelwise_axes=[0, 2], tiled_axes={1: 128})
    sizes, high = jnp.full(8, rows), "highest"
    run = jax.jit(lambda x, w: (mt.ragged_dot(x, w, sizes, precision=high), mt.dot(x[:rows], w[0], precision=high)))  # fmt: skip
    (groups, one), exact = run(x, w), mt.dequantize(w)
    want = [wide(mt.dequantize(x[rows * i : rows * (i + 1)])) @ wide(exact[i]) for i in range(8)]  # fmt: skip
    assert error(groups, np.concatenate(want)) < 1e-5
    assert error(one, want[0]) < 1e-5


@pytest.mark.parametrize("name", ["int8", "e4m3", "e5m2"])
@pytest.mark.parametrize("axes", [(0, 1, 2), (0, 1)])
def test_attention_over_a_cache(name, axes):
    """Contexts that are not whole blocks; scales that differ by 1e20."""
    shape = 3, 1000, 4, 128
    spread = 10.0 ** np.random.RandomState(5).uniform(-10, 10, (3, 1000, 1, 1))
    k = quantize(random(1, *shape, dtype=jnp.float32), name, channelwise_axes=axes)
    v = random(2, *shape, dtype=jnp.float32) * jnp.asarray(spread, jnp.float32)
    v = quantize(v, name, channelwise_axes=axes)
    q, lengths = random(3, 3, 1, 20, 128), jnp.array([1000, 1, 130])
    run = lambda q: choose.attend(Cached(q, k, v, 0 * lengths, lengths))
    got = by_kernel(run, q)
    k, v = (mt.dequantize(x, jnp.float32) for x in (k, v))
    rows = q.astype(jnp.float32).reshape(3, 4, 5, 128)
    high = {"precision": "highest"}
    logits = jnp.einsum("bkgh,bskh->bkgs", rows, k, **high) * 128**-0.5
    inside = jnp.arange(1000) < lengths[:, None]
    weights = jax.nn.softmax(jnp.where(inside[:, None, None], logits, -jnp.inf))
    want = jnp.einsum("bkgs,bskh->bkgh", weights, v, **high).reshape(q.shape)
    for i in range(3):
        assert error(got[i], want[i]) < 5e-3


@pytest.mark.parametrize("slots", [200, 1000, 20_000])
@pytest.mark.parametrize("options", [{}, {"softcap": 3.0}, {"sinks": 20}], ids=str)
def test_attention_over_a_cache_of_floats(slots, options):
    k, v = random(1, 3, slots, 4, 128), random(2, 3, slots, 4, 128)
    q, stop = random(3, 3, 1, 20, 128), jnp.array([slots, 1, 130])
    first = jnp.array([slots // 2, 0, 129])
    if options.get("sinks"):
        options = {"sinks": random(4, 20)}
    run = lambda q: choose.attend(Cached(q, k, v, first, stop, **options))
    got = by_kernel(run, q)
    want = attention(q, k, v, stop, first, **options)
    for i in range(3):
        assert error(got[i], want[i]) < 5e-3


@pytest.mark.parametrize(
    "case",
    [
        (2, 700, 700, 8, 2, 128, 128, {}),
        (1, 300, 300, 4, 4, 96, 64, {"window": 100, "softcap": 2.0, "sinks": True}),
        (2, 130, 1000, 8, 2, 64, 64, {"offset": 800}),
        (1, 600, 600, 4, 1, 256, 256, {"blind": 77}),
    ],
    ids=str,
)
def test_attention_over_ranges(case, monkeypatch):
    monkeypatch.setitem(flash.CASES, "this", case)
    a, g = flash.example(jax.random.key(0), "this")
    run = lambda q, k, v, sinks: flash.attend(
        Ranged(q, k, v, a.first, a.stop, a.scale, a.softcap, sinks)
    )
    got = flash.results(run, a, g)
    with jax.default_matmul_precision("highest"):
        want = flash.results(lambda *arrays: flash.formula(a, *arrays), a, g)
    for x, y in zip(got, want, strict=True):
        assert error(x, y) < 6e-3


@pytest.mark.parametrize("name", ["int8", "e4m3", "e5m2"])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_chance_gives_the_same_codes(name, dtype):
    x = np.random.RandomState(0).randn(2, 128, 1024).astype(np.float32)
    x[0, 3], x[0, 5], x[1, 2, 3], x[1, 4, 5] = 0, x[0, 5] * 1e20, np.nan, np.inf
    x = jnp.asarray(x, dtype)
    for axes, summed in (((0, 1), (2,)), ((2,), (0, 1)), ((), (2,))):
        spec = mt.Spec(name, channelwise_axes=axes, rounding="stochastic")
        run = functools.partial(choose.quantize, spec=spec, summed=summed, both=True)
        run = functools.partial(run, key=jax.random.key(3), site=("layer", "g"))
        want, _ = by_xla(run, x)
        for got in by_kernel(run, x):
            np.testing.assert_array_equal(wide(got.scale), wide(want.scale))
            np.testing.assert_array_equal(wide(got.qvalue), wide(want.qvalue))
