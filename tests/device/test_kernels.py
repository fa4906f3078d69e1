"""Every GPU kernel against the engine in plain XLA, on a real GPU.

JAX_PLATFORMS=cuda,cpu python -m pytest -m gpu tests/device/test_kernels.py
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import midtread as mt
from midtread.kernels import choose
from midtread.kernels.attention import Ranged
from midtread.kernels.decode_attention import Cached
from midtread.kernels.weight_matmul import few_codes
from tests.device.programs import (
    assert_near,
    by_choice,
    by_kernel,
    by_xla,
    compiled,
    dot,
    each,
    exactly,
    quantize,
    quantize_each,
    values,
)
from tests.kernels import test_attention as flash
from tests.kernels.plans import error, random, wide
from tests.kernels.test_grouped import attention

pytestmark = pytest.mark.gpu


def floats(seed, *shape):
    """Numbers in float32 that a test changes before it uses them."""
    return np.random.RandomState(seed).randn(*shape).astype(np.float32)


def test_rows_of_tiles_have_the_same_values():
    """Said in another way for XLA's sake: what is multiplied must not change."""
    spec = mt.Spec("int8", channelwise_axes=(0,), tiled_axes={1: 128})
    codes = lambda x: few_codes._values(choose.quantize(x, spec, summed=(1,))[0])
    cases = {}
    for rows in (1, 8, 16, 64):
        x = floats(rows, rows, 4096)
        x[0, :128], x[-1, 200] = 0, np.nan
        cases[rows] = (jnp.asarray(x, jnp.bfloat16),)
    run = each(lambda x: codes(jax.nn.relu(x)))
    ours, want = by_choice(run, cases), by_xla(run, cases)
    for rows in cases:
        np.testing.assert_array_equal(
            wide(ours[rows]), wide(want[rows]), f"{rows} rows"
        )


@pytest.mark.parametrize(
    ("name", "tile"), [("int8", None), ("int4", 32), ("nf4", 64), ("e4m3", 128)]
)
def test_any_number_of_rows_is_as_near_to_float64(name, tile):
    """The law of tests/kernels/test_any_rows.py, through every kernel that takes these."""
    tiles = {0: tile} if tile else {}
    w = quantize(random(1, 1024, 512), name, channelwise_axes=[1], tiled_axes=tiles)
    all_rows = (1, 2, 3, 8, 9, 16, 17, 32, 64, 65, 128, 300, 1000)
    cases = {rows: (random(2, rows, 1024), w) for rows in all_rows}
    far = {}
    for rows, got in by_kernel(each(mt.dot), cases).items():
        want = exactly(*cases[rows])
        distance = np.linalg.norm(wide(got) - want, axis=1)
        far[rows] = np.max(distance / np.linalg.norm(want, axis=1))
    assert not {rows: d for rows, d in far.items() if not d < 4e-3}


SHAPES = [(128, 128, 128), (200, 272, 328), (1000, 4096, 520), (4096, 1024, 2056)]


@pytest.mark.parametrize(("m", "k", "n"), SHAPES)
@pytest.mark.parametrize("pair", ["int8 int8", "e4m3 e4m3", "e4m3 e5m2"])
def test_scaled_matmul(pair, m, k, n):
    left, right = pair.split()
    x = jnp.asarray(100 * floats(m, m, k), jnp.bfloat16)
    q = quantize_each(
        {
            "x": (x, left, {"channelwise_axes": [0]}),
            "w": (random(n, k, n), right, {"channelwise_axes": [1]}),
        }
    )

    def run(x, w):
        of = lambda dtype: {
            equation: mt.einsum(equation, x, w, preferred_element_type=dtype)
            for equation in ("mk,kn->mn", "mk,kn->nm")
        }
        return of(jnp.float32), of(jnp.bfloat16)

    is_exact = pair == "int8 int8"
    if is_exact:
        product = exactly(values(q["x"]), q["w"])
        want = ({"mk,kn->mn": product, "mk,kn->nm": product.T},) * 2
    else:
        want = by_xla(run, q["x"], q["w"])
    # fp8 tensor cores add in fewer bits than float32
    limits = 1e-6 if is_exact else 3e-3, 3e-3
    for one, other, limit in zip(by_kernel(run, q["x"], q["w"]), want, limits):
        assert_near(one, other, limit)


def test_scales_of_any_size_and_nan():
    x = floats(0, 256, 256)
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
    q = quantize_each(
        {
            "x": (random(1, 1024, 1024), "e4m3", spec(left, False)),
            "blocks": (random(2, 1024, 1024), "e4m3", spec(right, True)),
            "tiles": (random(2, 1024, 1024), "e4m3", spec(right, False)),
        }
    )
    cases = {name: (q["x"], q[name]) for name in ("blocks", "tiles")}
    run = each(functools.partial(mt.einsum, equation))
    assert_near(by_kernel(run, cases), by_xla(run, cases), 4e-3)


@pytest.mark.parametrize(("m", "n", "k"), [(4096, 3968, 512), (384, 640, 384)])
def test_block_scaled_sizes(m, n, k):
    """Many blocks to a program or fewer than programs; the last pair half outside."""
    rows, w = {"channelwise_axes": [0], "tiled_axes": {1: 128}}, random(2, k, n)
    columns = {"channelwise_axes": [1], "tiled_axes": {0: 128}}
    q = quantize_each(
        {
            "x": (random(1, m, k), "e4m3", rows),
            "blocks": (w, "e4m3", {"tiled_axes": {0: 128, 1: 128}}),
            "tiles": (w, "e4m3", columns),
        }
    )
    cases = {name: (q["x"], q[name]) for name in ("blocks", "tiles")}
    assert_near(by_kernel(each(mt.dot), cases), by_xla(each(mt.dot), cases), 4e-3)


@pytest.mark.parametrize(("m", "n", "k"), [(4096, 3968, 512), (300, 520, 384)])
def test_one_scale_for_all(m, n, k):
    q = quantize_each(
        {"x": (random(1, m, k), "e4m3", {}), "w": (random(2, k, n), "e4m3", {})}
    )
    got, want = (run(mt.dot, q["x"], q["w"]) for run in (by_kernel, by_xla))
    assert error(got, want) < 4e-3


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
    xs = {rows: random(rows, rows, k, dtype=dtype) for rows in (1, 2, 3, 16, 17, 64)}
    _assert_rows_by(w, xs, 5e-3)


def _assert_rows_by(w, xs, limit):
    """{case: x} by one weight."""
    want, exact = {}, values(w)
    for case, x in xs.items():
        want[case] = wide(x) @ exact
    got = by_kernel(lambda xs, w: {case: mt.dot(x, w) for case, x in xs.items()}, xs, w)
    assert_near(got, want, limit)


@pytest.mark.parametrize("name", ["int8", "int4", "nf4"])
def test_few_rows_by_scales_in_float32(name):
    """They are not rounded: what is left is the rounding of products and of the result."""
    w = random(1, 2048, 768, dtype=jnp.float32)
    w = quantize(w, name, channelwise_axes=[1], tiled_axes={0: 128})
    assert w.scale.dtype == jnp.float32
    xs = {rows: random(rows, rows, 2048) for rows in (1, 16, 17, 64)}
    _assert_rows_by(w, xs, 2.6e-3)


@pytest.mark.parametrize(("name", "tile"), FORMATS)
def test_many_rows(name, tile):
    """Hopper: blocks that are not full, sums that programs share, and again the same bits."""
    options = {"channelwise_axes": [1], "tiled_axes": {0: tile} if tile else {}}
    columns = {65: 512, 300: 768, 1000: 512}
    w = quantize_each(
        {rows: (random(1, 1152, n), name, options) for rows, n in columns.items()}
    )
    cases = {rows: (random(rows, rows, 1152), w[rows]) for rows in columns}
    program = compiled("gpu", each(mt.dot), cases)
    got, again = program(cases), program(cases)
    assert_near(got, {rows: dot(*case) for rows, case in cases.items()}, 4e-3)
    for rows in cases:
        np.testing.assert_array_equal(
            wide(got[rows]), wide(again[rows]), f"{rows} rows"
        )


def test_many_rows_in_pairs_and_halves():
    """More blocks than multiprocessors: rounds, and a last one that is cut."""
    w = random(1, 256, 14336)
    w = quantize(w, "int4", channelwise_axes=[1], tiled_axes={0: 128})
    cases = {rows: (random(2, rows, 256), w) for rows in (1024, 8192)}
    assert_near(by_kernel(each(mt.dot), cases), by_xla(each(mt.dot), cases), 1e-3)


@pytest.mark.parametrize("pair", ["int8 int8", "e4m3 e4m3", "e4m3 e5m2"])
def test_codes_by_a_stored_weight(pair):
    """Turned on the way, on Hopper: parts of a sum, edges, pairs, a last round that is cut."""
    left, right = pair.split()
    shapes = [
        (65, 512, 128),
        (300, 1280, 768),
        (1024, 256, 14336),
        (8192, 256, 14336),
    ]
    arrays = {f"{m}x{k}x{n}": (random(1, m, k), random(2, k, n)) for m, k, n in shapes}

    def quantized(x, w):
        x = mt.quantize(x, left, channelwise_axes=[0])
        x = x.replace(scale=x.scale.at[3].set(0).at[-1].set(jnp.nan))
        return x, mt.quantize(w, right, channelwise_axes=[1])

    cases = by_choice(each(quantized), arrays)
    x = jax.tree.map(lambda x: x[:100], cases["8192x256x14336"][0])
    cases["one scale for all"] = x, quantize(random(2, 256, 512), right)
    got = by_kernel(each(mt.dot), cases)
    if pair == "int8 int8":  # sums of integers that float32 holds
        want = {case: dot(values(x), w) for case, (x, w) in cases.items()}
    else:
        want = by_xla(each(mt.dot), cases)
    for case in arrays:
        rows = wide(got[case])
        assert np.isnan(rows[-1]).all() and (rows[3] == 0).all(), case
        got[case], want[case] = rows[:-1], wide(want[case])[:-1]
    assert_near(got, want, 4e-3)


@pytest.mark.parametrize("name", ["int8", "e4m3", "e5m2"])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("summed", [(0,), (1,)])
def test_quantizing_gives_the_same_codes(name, dtype, summed):
    x = floats(0, 256, 4096)
    x[3], x[5] = 0, x[5] * 1e20
    x = jnp.asarray(x, dtype)
    kept = tuple(a for a in (0, 1) if a not in summed)
    specs = {
        "channels": mt.Spec(name, channelwise_axes=kept),
        "one scale": mt.Spec(name),
        "tiles": mt.Spec(name, channelwise_axes=kept, tiled_axes={summed[0]: 128}),
        "blocks": mt.Spec(name, tiled_axes={0: 128, 1: 128}),
    }
    run = lambda x: {
        case: choose.quantize(x, spec=spec, summed=summed, both=True)
        for case, spec in specs.items()
    }
    ours, plain = by_kernel(run, x), by_xla(run, x)
    for case, (want, _) in plain.items():
        for got in ours[case]:
            _assert_same_codes(got, want, case, share=1e-4)


def _assert_same_codes(got, want, case, share):
    """The same scales, and codes but for a share of them."""
    np.testing.assert_array_equal(wide(got.scale), wide(want.scale), case)
    assert np.mean(wide(got.qvalue) != wide(want.qvalue)) < share, case


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_two_matmuls_share_one_read(dtype):
    x = floats(0, 2, 256, 1024)
    x[0, 3], x[1, 5] = 0, x[1, 5] * 1e20
    x, summed = jnp.asarray(x, dtype), ((2,), (0, 1))
    tiles = (
        mt.Spec("e4m3", channelwise_axes=(0, 1), tiled_axes={2: 128}),
        mt.Spec("e4m3", channelwise_axes=(2,), tiled_axes={1: 128}),
    )
    delayed = (mt.Spec("e5m2", calibration="delayed"),) * 2
    window = {"absmax": np.full((1, 1, 1), 3.0, np.float32)}
    cases = {"tiles": (tiles, None), "delayed": (delayed, window)}
    twice = lambda x: {
        case: choose.quantize_twice(x, specs, summed, range_, True)
        for case, (specs, range_) in cases.items()
    }
    plain = lambda x: {
        case: [
            choose.quantize(x, spec=spec, range_=range_, summed=axes)[0]
            for spec, axes in zip(specs, summed)
        ]
        for case, (specs, range_) in cases.items()
    }
    ours, want = by_kernel(twice, x), by_xla(plain, x)
    for case, (*got, largest) in ours.items():
        for q, plainly in zip(got, want[case], strict=True):
            _assert_same_codes(q, plainly, case, share=1e-4)
        assert case == "tiles" or wide(largest) == np.max(np.abs(wide(x)))


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


def test_vmap_and_grad():
    w = quantize(random(1, 256, 256), "int8", channelwise_axes=[1])
    loss = lambda x, w: jnp.sum(
        jnp.square(jax.vmap(lambda x: mt.dot(x, w))(x)).astype(jnp.float32)
    )
    cases = {rows: (random(2, 3, rows, 256), w) for rows in (8, 80)}
    run = each(jax.grad(loss))
    assert_near(by_kernel(run, cases), by_xla(run, cases), 2e-2)


# --- rows in groups ---------------------------------------------------------------------------

UNEVEN = [100, 0, 3, 700, 257, 1, 640, 300]  # 47 rows left over
GROUPS = {
    "qwix_int8": (UNEVEN, [0] * 8),
    "qwix_fp8_full": ([5, 0, 0, 1000, 8, 16, 23, 900], [2048] + [0] * 7),
    "te_fp8_current": (UNEVEN,),
}


@pytest.mark.parametrize("name", GROUPS)
def test_training_through_groups(name):
    """Forward and both gradients; XLA's own ragged_dot wants the rows within groups."""

    def step(sizes, x, w, g):
        ops = mt.learn(mt.recipe(name))
        out, vjp = jax.vjp(lambda x, w: ops.ragged_dot(x, w, sizes), x, w)
        return out, *vjp(g)

    args = random(1, 2048, 520), random(2, 8, 520, 392), random(3, 2048, 392)
    some = jnp.array(GROUPS[name][0])
    ours, plain = (compiled(by, step, some, *args) for by in ("gpu", "xla"))
    wrong = {}
    for sizes in GROUPS[name]:
        inside, parts = sum(sizes), ("out", "dlhs", "drhs")
        results = ours(jnp.array(sizes), *args), plain(jnp.array(sizes), *args)
        assert np.all(wide(results[0][0])[inside:] == 0), sizes
        for part, *both in zip(parts, *results, strict=True):
            got, want = (wide(v) if part == "drhs" else wide(v)[:inside] for v in both)
            norm = np.linalg.norm(want)
            if not np.linalg.norm(got - want) <= 2e-2 * norm:
                wrong[part, str(sizes)] = np.linalg.norm(got - want) / norm
    assert not wrong


def test_groups_with_scales_of_any_size_and_nan():
    x = floats(0, 512, 256)
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
    exact = values(w)
    arguments = lambda sizes: {
        num: (random(num, num, 1024), w, jnp.array(s))
        for num, s in ((128, sizes), (8, [1] * 8), (300, FEW[1]))
    }
    program = compiled("gpu", each(mt.ragged_dot), arguments(FEW[0]))
    for few in FEW:
        cases = arguments(few)
        got, again = program(cases), program(cases)
        for num_rows, (x, _, sizes) in cases.items():
            case, inside = (num_rows, few), int(np.sum(sizes))
            parts = np.split(np.arange(num_rows), np.cumsum(sizes))[:8]
            want = np.concatenate([wide(x)[rows] @ exact[i] for i, rows in enumerate(parts)])  # fmt: skip
            out, norm = wide(got[num_rows]), np.linalg.norm(want)
            assert np.linalg.norm(out[:inside] - want) <= 5e-3 * norm, case
            assert np.all(out[inside:] == 0), case
            np.testing.assert_array_equal(out, wide(again[num_rows]), str(case))


@pytest.mark.parametrize("rows", [8, 24])
def test_codes_in_float32_are_not_rounded(rows):
    """Scales within the sum make values of codes, which bfloat16 does not hold."""
    x = quantize(random(1, 8 * rows, 256, dtype=jnp.float32), "int8", channelwise_axes=[0])  # fmt: skip
    w = random(2, 8, 256, 512, dtype=jnp.float32)
    w = quantize(w, "int4", channelwise_axes=[0, 2], tiled_axes={1: 128})
    sizes, high = jnp.array([rows] * 8), "highest"
    run = lambda x, w, sizes: (mt.ragged_dot(x, w, sizes, precision=high), mt.dot(x[:rows], w[0], precision=high))  # fmt: skip
    groups, one = by_choice(run, x, w, sizes)
    want = [part @ exact for part, exact in zip(np.split(values(x), 8), values(w))]
    assert error(groups, np.concatenate(want)) < 1e-5
    assert error(one, want[0]) < 1e-5


@pytest.mark.parametrize("name", ["int8", "e4m3", "e5m2"])
@pytest.mark.parametrize("axes", [(0, 1, 2), (0, 1)])
def test_attention_over_a_cache(name, axes):
    """Contexts that are not whole blocks; scales that differ by 1e20."""
    shape = 3, 1000, 4, 128
    spread = 10.0 ** np.random.RandomState(5).uniform(-10, 10, (3, 1000, 1, 1))
    k = quantize(random(1, *shape, dtype=jnp.float32), name, channelwise_axes=axes)
    v = jnp.asarray(floats(2, *shape) * spread, jnp.float32)
    v = quantize(v, name, channelwise_axes=axes)
    q, lengths = random(3, 3, 1, 20, 128), jnp.array([1000, 1, 130])
    first = jnp.array([0, 0, 0])
    run = lambda *arrays: choose.attend(Cached(*arrays))
    got = by_kernel(run, q, k, v, first, lengths)
    want = attention(q, values(k), values(v), lengths)
    for i in range(3):
        assert error(got[i], want[i]) < 5e-3


@pytest.mark.parametrize("slots", [200, 1000, 20_000])
@pytest.mark.parametrize("options", [{}, {"softcap": 3.0}, {"sinks": 20}], ids=str)
def test_attention_over_a_cache_of_floats(slots, options):
    k, v = random(1, 3, slots, 4, 128), random(2, 3, slots, 4, 128)
    q, stop = random(3, 3, 1, 20, 128), jnp.array([slots, 1, 130])
    first = jnp.array([slots // 2, 0, 129])
    sinks = {"sinks": random(4, options["sinks"])} if "sinks" in options else {}
    softcap = options.get("softcap")
    run = lambda a, sinks: choose.attend(Cached(*a, softcap=softcap, **sinks))
    got = by_kernel(run, (q, k, v, first, stop), sinks)
    want = attention(q, k, v, stop, first, softcap=softcap, **sinks)
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
def test_attention_over_ranges(case, monkeypatch, gpu):
    monkeypatch.setitem(flash.CASES, "this", case)
    with jax.default_device(jax.devices("cpu")[0]):
        a, g = flash.example(jax.random.key(0), "this")
        want = flash.results(lambda *arrays: flash.formula(a, *arrays), a, g)
    moved = {
        k: jax.device_put(v, gpu) for k, v in vars(a).items() if hasattr(v, "ndim")
    }
    a, g = dataclasses.replace(a, **moved), jax.device_put(g, gpu)
    run = lambda q, k, v, sinks: flash.attend(
        Ranged(q, k, v, a.first, a.stop, a.scale, a.softcap, sinks)
    )
    got = flash.results(run, a, g)
    for x, y in zip(got, want, strict=True):
        assert error(x, y) < 6e-3


@pytest.mark.parametrize("name", ["int8", "e4m3", "e5m2"])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_chance_gives_the_same_codes(name, dtype):
    x = floats(0, 2, 128, 1024)
    x[0, 3], x[0, 5], x[1, 2, 3], x[1, 4, 5] = 0, x[0, 5] * 1e20, np.nan, np.inf
    x = jnp.asarray(x, dtype)
    axes = {"rows": ((0, 1), (2,)), "columns": ((2,), (0, 1)), "one": ((), (2,))}
    key, site = jax.random.key(3), ("layer", "g")

    def run(x, key):
        results = {}
        for case, (kept, summed) in axes.items():
            spec = mt.Spec(name, channelwise_axes=kept, rounding="stochastic")
            options = {"summed": summed, "both": True, "key": key, "site": site}
            results[case] = choose.quantize(x, spec=spec, **options)
        return results

    ours, plain = by_kernel(run, x, key), by_xla(run, x, key)
    for case, (want, _) in plain.items():
        for got in ours[case]:
            np.testing.assert_array_equal(wide(got.scale), wide(want.scale), case)
            np.testing.assert_array_equal(wide(got.qvalue), wide(want.qvalue), case)
