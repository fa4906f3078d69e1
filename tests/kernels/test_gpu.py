"""GPU kernels without a GPU: Triton interpreted, Mosaic interpreted where JAX can (0.12),
all of them lowered for CUDA. On a GPU: tests/device/test_kernels.py."""

import dataclasses
import functools
import importlib.util
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import midtread as mt
from midtread.kernels import choose
from midtread.kernels.candidates import first
from midtread.kernels.environment import here, implementation, pretended
from midtread.kernels.hopper import lanes
from midtread.kernels.hopper.shared_memory import SHARED
from midtread.kernels.pallas_compat import pretend_gpu
from midtread.kernels.quantize import triton as quantize_triton
from midtread.kernels.quantize.operand import Operand
from midtread.kernels.scaled_matmul import adapter as scaled_adapter
from midtread.kernels.scaled_matmul import hopper as scaled_hopper
from midtread.kernels.scaled_matmul import hopper_tiled
from midtread.kernels.scaled_matmul import tuned as scaled_tuned
from midtread.kernels.weight_matmul import few_codes, few_rows, triton_tuned
from midtread.kernels.weight_matmul import triton as weight_triton
from midtread.kernels.weight_matmul.hopper_decode import kernel as decode_kernel
from midtread.kernels.weight_matmul.hopper_decode import tuned as decode_tuned
from midtread.numerics.formats import as_format
from midtread.ops.recipe import Fwd, Recipe
from tests.kernels.plans import (
    H200,
    INTERPRETED,
    by_weight,
    coded,
    error,
    floats,
    matmul,
    needs_interpreter,
    random,
    reason,
    wide,
)

pytestmark = pytest.mark.filterwarnings("ignore:The Pallas Triton backend")
SHAPE = jax.ShapeDtypeStruct


def uses_kernel(fn, *args):
    text = str(jax.make_jaxpr(fn)(*args))
    names = "pallas_call[", "mpmd_map[", "core_map[", "custom_partitioning["
    return any(name in text for name in names)


def interpreted(fn, *args):
    """`fn` by kernels, in the interpreter."""
    with implementation("interpret"):
        assert uses_kernel(fn, *args)
        return jax.jit(fn)(*args)


# --- few rows ---------------------------------------------------------------------------------

WEIGHTS = [("int8", None), ("int8", 64), ("e4m3", None), ("int4", 32), ("nf4", 64)]


@pytest.mark.parametrize(
    ("name", "tile", "rows"),
    [(*weight, 19) for weight in WEIGHTS] + [("int8", None, 1), ("nf4", 64, 1)],
)
def test_weight_only(name, tile, rows):
    tiles = {0: tile} if tile else {}
    w = mt.quantize(random(1, 256, 192), name, channelwise_axes=[1], tiled_axes=tiles)
    x = random(2, rows, 256)
    exact = jnp.dot(x.astype(jnp.float32), mt.dequantize(w, jnp.float32))
    assert error(interpreted(mt.dot, x, w), exact) < 4e-3  # one rounding to bfloat16


STREAMED = [  # format, tile, and blocks: refilled buffers, a shared sum, several rings
    ("int8", None, decode_kernel.DecodeBlocks(64, 2)),
    ("nf4", 64, decode_kernel.DecodeBlocks(128, 2, split=2, cluster=2)),
    ("int4", 32, decode_kernel.DecodeBlocks(32, 2, wide=4, deep=4)),
    ("int4", 64, decode_kernel.DecodeBlocks(64, 2, wide=4, deep=3)),
    ("int8", None, decode_kernel.DecodeBlocks(32, 2, wide=2, deep=2, split=2)),
    ("int8", None, decode_kernel.DecodeBlocks(32, 2, split=3, cluster=3)),
    ("int8", None, decode_kernel.DecodeBlocks(32, 5, ahead=2)),
]


@needs_interpreter
@pytest.mark.parametrize(("name", "tile", "blocks"), STREAMED)
def test_streamed_weights(name, tile, blocks, monkeypatch):
    """Hopper's kernel for few rows, which decodes without its PTX here."""
    monkeypatch.setattr(decode_tuned, "decode_blocks", lambda *_: blocks)
    tiles = {0: tile} if tile else {}
    w = mt.quantize(random(1, 256, 256), name, channelwise_axes=[1], tiled_axes=tiles)
    x = random(2, 9, 256)
    a = by_weight(x, w)
    out = few_rows.plan_hopper(a, INTERPRETED).run(a)
    exact = jnp.dot(x.astype(jnp.float32), mt.dequantize(w, jnp.float32))
    assert out.dtype == jnp.bfloat16
    assert error(out, exact) < 4e-3  # of bfloat16, and nf4's table is rounded


@pytest.mark.parametrize(("tile", "times"), [(64, 4), (128, 2), (256, 1)])
def test_a_group_makes_its_slopes_once(tile, times, monkeypatch):
    """A block of 256 rows is decoded in four pieces by warpgroups of two accumulators."""
    made, scaling = [], lanes._scaling

    def counted(code, start, *args):
        made.extend([] if start is None else [start])
        return scaling(code, start, *args)

    monkeypatch.setattr(lanes, "_scaling", counted)
    blocks = decode_kernel.DecodeBlocks(256, 2, wide=2)
    monkeypatch.setattr(decode_tuned, "decode_blocks", lambda *_: blocks)
    w = coded("int4", (512, 256), (1,), {0: tile})
    assert w.scale.dtype == jnp.bfloat16
    with pretended("h200"), pretend_gpu():
        traced = jax.jit(lambda x, w: mt.dot(x, w)).trace(floats(32, 512), w)
        traced.lower(lowering_platforms=("cuda",))
    assert len(made) == 2 * times


def test_streamed_blocks_fit():
    """Buffers that fit, a part of the sum for each program, clusters that run at once."""
    for name, tile in [("int8", None), ("int8", 256), ("int4", 128), ("nf4", 64)]:
        for rows, k, n in [(1, 4096, 14336), (16, 14336, 4096), (64, 128, 256)]:
            fmt, group = as_format(name), min(tile or k, k)
            with pretend_gpu():
                blocks = decode_tuned.decode_blocks(fmt, rows, (k, n), group)
            assert blocks.stages >= 2
            size = blocks.num_bytes(fmt, rows, group) + blocks.received(rows)
            assert size <= SHARED and blocks.is_ample(fmt, rows)
            assert k % blocks.k == 0 and blocks.split <= k // blocks.k
            assert blocks.split % blocks.cluster == 0
            assert blocks.split * n // decode_kernel.COLUMNS <= 132
            is_clustered = name != "nf4" and n == 4096
            assert blocks.cluster == (6 if is_clustered else 1 if k == 128 else 2)


def test_what_is_not_streamed():
    def why(shape, tile=None, dtype=jnp.bfloat16):
        w = coded("int4", shape, (1,), {0: tile} if tile else {})
        a = by_weight(floats(4, shape[0], dtype=dtype), w)
        return reason(few_rows.plan_hopper(a, H200))

    assert why((256, 256)) is None
    assert "not bfloat16" in why((256, 256), dtype=jnp.float16)
    for shape, tile in [((256, 192), None), ((160, 256), None), ((256, 256), 8)]:
        assert "do not divide" in why(shape, tile)


def test_a_shard_too_narrow_to_stream():
    """A device's part of a weight that is streamed as a whole: the same numbers by XLA."""
    w = mt.quantize(random(1, 256, 128), "int8", channelwise_axes=[1])
    x = random(2, 4, 256)
    whole = coded("int8", (256, 256), (1,))
    plan = few_rows.plan_hopper(by_weight(x, whole, dtype=jnp.float32), H200)
    out = plan.run(by_weight(x, w))
    exact = jnp.dot(x.astype(jnp.float32), mt.dequantize(w, jnp.float32))
    assert error(out, exact) < 1e-5


@pytest.mark.parametrize(("name", "rows"), [("int8", 1), ("e4m3", 19)])
def test_a_tied_head(name, rows):
    """A weight [N, K], as an embedding is stored."""
    w = mt.quantize(random(1, 128, 256), name, channelwise_axes=[0])
    x, run = random(2, rows, 256), functools.partial(mt.einsum, "mk,nk->mn")
    exact = jnp.dot(x.astype(jnp.float32), mt.dequantize(w, jnp.float32).T)
    assert error(interpreted(run, x, w), exact) < 4e-3


@pytest.mark.parametrize(("act", "name", "tile"), [("int8", "int8", None), ("int8", "int4", 128)])  # fmt: skip
def test_few_rows_of_codes(act, name, tile):
    tiles = lambda axis: {axis: tile} if tile else {}
    x = mt.quantize(random(1, 3, 256), act, channelwise_axes=[0], tiled_axes=tiles(1))
    w = mt.quantize(random(2, 256, 64), name, channelwise_axes=[1], tiled_axes=tiles(0))
    exact = jnp.dot(mt.dequantize(x, jnp.float32), mt.dequantize(w, jnp.float32))
    assert error(interpreted(mt.dot, x, w), exact) < 5e-3


IN_FULL = [  # rows, and tiles along the sum
    ("int8", {}, None),
    ("int16", {}, None),
    ("int8", {}, 128),
    ("int8", {"calibration_method": "minmax"}, None),
]


@pytest.mark.parametrize(("act", "how", "tile"), IN_FULL)
def test_few_rows_in_float32_are_not_rounded(act, how, tile):
    """bfloat16 holds codes of 8 bits, but neither their values nor those of 16."""
    tiles = lambda axis: {axis: tile} if tile else {}
    x, w = (random(i, *shape, dtype=jnp.float32) for i, shape in enumerate([(3, 256), (256, 64)]))  # fmt: skip
    x = mt.quantize(x, act, channelwise_axes=[0], tiled_axes=tiles(1), **how)
    w = mt.quantize(w, "int8", channelwise_axes=[1], tiled_axes=tiles(0))
    exact = wide(mt.dequantize(x)) @ wide(mt.dequantize(w))
    with implementation("interpret"):
        assert error(mt.dot(x, w), exact) < 1e-6


def test_few_rows_under_grad_and_vmap():
    w = mt.quantize(
        random(1, 256, 64), "int4", channelwise_axes=[1], tiled_axes={0: 128}
    )
    x = random(2, 2, 4, 256)
    c = random(3, 2, 4, 64)
    loss = lambda x: jnp.sum(c * jax.vmap(lambda x: mt.dot(x, w))(x))
    exact = jnp.einsum("vmn,kn->vmk", *(wide(v) for v in (c, mt.dequantize(w))))
    assert error(interpreted(jax.grad(loss), x), exact) < 1e-2


def test_rows_are_split_over_devices():
    """A sharded model under jit: every device runs the kernel on its own columns."""
    mesh = jax.make_mesh((4,), ("x",), (jax.sharding.AxisType.Auto,))
    w = mt.quantize(random(1, 256, 256), "int8", channelwise_axes=[1])
    x = random(2, 4, 256)
    spec = jax.sharding.PartitionSpec(None, "x")
    placed = jax.device_put(w, w.shardings(jax.NamedSharding(mesh, spec)))
    out = interpreted(mt.dot, x, placed)
    assert error(out, mt.dot(x, w)) < 4e-3
    assert out.sharding.spec[1] == "x"


def over_four(fn, *in_specs, **how):
    mesh = jax.make_mesh((4,), ("x",), (jax.sharding.AxisType.Auto,))
    return jax.shard_map(fn, mesh=mesh, in_specs=in_specs, out_specs=in_specs[0], **how)


def test_inside_shard_map():
    w = mt.quantize(random(1, 256, 64), "int8", channelwise_axes=[1])
    x = random(2, 8, 256)
    spec = jax.sharding.PartitionSpec
    run = over_four(mt.dot, spec("x"), spec(), check_vma=False)
    assert error(interpreted(run, x, w), mt.dot(x, w)) < 4e-3


@pretended("h200")
def test_shard_map_with_its_checks_takes_kernels():
    """The interpreter does not know which axes vary, so this is traced and no more."""
    spec = jax.sharding.PartitionSpec
    w = mt.quantize(random(1, 256, 64), "int8", channelwise_axes=[1])
    run = over_four(mt.dot, spec("x"), spec())
    assert uses_kernel(run, random(2, 8, 256), w)
    w = mt.quantize(
        random(1, 256, 256), "nf4", channelwise_axes=[1], tiled_axes={0: 64}
    )
    assert uses_kernel(run, random(2, 8, 256), w)
    ops = mt.learn(mt.recipe("qwix_int8"))
    step = lambda x, w: jax.grad(lambda x: jnp.sum(ops.dot(x, w)))(x)
    run = over_four(step, spec("x"), spec())
    assert uses_kernel(run, random(2, 1024, 256), random(3, 256, 256))


# --- quantizing -------------------------------------------------------------------------------


def extremes(dtype):
    x = np.random.RandomState(0).randn(64, 192).astype(np.float32)
    x[3], x[4, 5], x[5, 6], x[6] = 0, np.nan, np.inf, x[6] * 1e30
    return jnp.asarray(x, dtype)


def same(a, b):
    a, b = wide(a), wide(b)
    return bool(np.all((a == b) | (np.isnan(a) & np.isnan(b))))


@pytest.mark.parametrize("name", ["int8", "e4m3", "e5m2"])
def test_rows_have_the_same_codes(name):
    x = extremes(jnp.bfloat16)
    want = mt.quantize(x, name, channelwise_axes=[0])
    codes, scale = quantize_triton.rows(x, as_format(name), interpret=True)
    assert same(codes, want.qvalue)
    assert same(scale, want.scale[:, 0])


TILES = mt.Spec("int8", channelwise_axes=(0,), tiled_axes={1: 64})


def is_read_once(x, spec=TILES, summed=(1,)):
    operand = Operand(x, spec, summed=summed)
    choice = first("quantize", choose.QUANTIZE[1:], operand, here())
    return choice.name == "xla_one_read"


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("rows", [1, 7, 64])
def test_rows_of_tiles_have_the_same_codes(rows, dtype):
    x = extremes(dtype)[-rows:] if rows == 1 else extremes(dtype)[:rows]
    if dtype == jnp.float32:  # of which XLA on a CPU may overlook a NaN
        x = jnp.where(jnp.isnan(x), 1, x)
    run = functools.partial(choose.quantize, spec=TILES, summed=(1,))
    with implementation("interpret"):
        assert is_read_once(x)
        got, _ = jax.jit(run)(x)
        values = jax.jit(few_codes._values)(got)
        mapped = jax.jit(jax.vmap(lambda x: run(x)[0]))(x[:, None])
    want = mt.quantize(x, "int8", channelwise_axes=[0], tiled_axes={1: 64})
    assert (got.qtype, got.logical, got.dtype) == (want.qtype, None, want.dtype)
    assert same(got.qvalue, want.qvalue) and same(got.scale, want.scale)
    assert same(mapped.qvalue[:, 0], want.qvalue) and same(mapped.scale[:, 0], want.scale)  # fmt: skip
    assert same(values, mt.dequantize(want, jnp.bfloat16))


def test_rows_of_tiles_are_integers_and_few():
    x = random(1, 16, 192)
    change = functools.partial(dataclasses.replace, TILES)
    with implementation("interpret"):
        ours = is_read_once
        assert ours(x) and ours(x[:3])
        for rows in (
            x[:12],
            jnp.tile(x, (8, 1)),
            x[:, :96],
        ):  # padded, many, half a tile
            assert not ours(rows)
        for spec in (
            change(format="e4m3"),
            change(tiled_axes={}),
            change(calibration="absmax,0.9"),
            change(calibration="minmax"),
            change(scale_dtype="float32"),
            change(channelwise_axes=()),
        ):
            assert not ours(x, spec=spec)
        assert not ours(x, summed=(0,))
    assert not ours(x)  # on a CPU


def test_few_rows_of_integers_are_quantized_by_xla():
    """They are cast once more at once; float8 cannot be in the same kernel."""
    for name, rows, is_ours in (("int8", 64, False), ("e4m3", 64, True), ("int8", 128, True)):  # fmt: skip
        spec = mt.Spec(name, channelwise_axes=(0,))
        run = functools.partial(choose.quantize, spec=spec, summed=(1,))
        with implementation("interpret"):
            assert uses_kernel(run, random(1, rows, 128)) == is_ours


def test_few_rows_quantized_on_the_way():
    """Weights of 4 bits, rows of 8, as a provider serves them; gradients pass."""
    w = mt.quantize(
        random(1, 256, 64), "int4", channelwise_axes=[1], tiled_axes={0: 128}
    )
    act = mt.Spec("int8", ("kept",), {"summed": 128})
    x, g = random(2, 1, 4, 256), random(3, 1, 4, 64)
    ops = mt.learn(Recipe(Fwd(act, None), mask_clipped=False))
    out, back = interpreted(lambda x: jax.vjp(lambda x: ops.dot(x, w), x), x)
    rows = mt.quantize(x, "int8", channelwise_axes=[0, 1], tiled_axes={2: 128})
    exact = jnp.dot(mt.dequantize(rows, jnp.float32), mt.dequantize(w, jnp.float32))
    assert error(out, exact) < 5e-3
    assert error(back(g)[0], jnp.dot(g, mt.dequantize(w).T)) < 1e-2


@pytest.mark.parametrize("summed", [(0,), (1,)])
def test_training_operands_have_the_same_codes(summed):
    x = random(0, 128, 256)
    factor = random(1, *(1 if a not in summed else n for a, n in enumerate(x.shape)))
    kept = tuple(a for a in (0, 1) if a not in summed)
    for spec in (
        mt.Spec("int8", channelwise_axes=kept),
        mt.Spec("e4m3"),
        mt.Spec("e4m3", channelwise_axes=kept, tiled_axes={summed[0]: 128}),
        mt.Spec("e4m3", tiled_axes={0: 128, 1: 128}),
    ):
        run = functools.partial(choose.quantize, spec=spec, summed=summed, both=True)
        once, again = interpreted(lambda x, f, run=run: run(x, factor=f), x, factor)
        want, _ = run(x, factor=factor)
        # the product with the factor may be kept unrounded by XLA: codes at ties differ
        for got in (once, again):
            assert np.mean(wide(got.qvalue) != wide(want.qvalue)) < 0.02
            np.testing.assert_allclose(wide(got.scale), wide(want.scale), rtol=1e-2)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_two_matmuls_share_one_read(dtype):
    """Bit for bit what two readings give: one scale and max |x|, or tiles either way."""
    x = jnp.tile(extremes(dtype)[:, :128], (8, 2)).reshape(2, 256, 256)
    if dtype == jnp.float32:  # of which XLA on a CPU may overlook a NaN
        x = jnp.where(jnp.isnan(x), 1, x)
    summed = (2,), (0, 1)
    tiles = (
        mt.Spec("e4m3", channelwise_axes=(0, 1), tiled_axes={2: 128}),
        mt.Spec("e4m3", channelwise_axes=(2,), tiled_axes={1: 128}),
    )
    window = {"absmax": jnp.full((1, 1, 1), 3.0)}
    delayed = mt.Spec("e5m2", calibration="delayed")
    for specs, order, range_ in (
        (tiles, summed, None),
        (tiles[::-1], summed[::-1], None),
        ((mt.Spec("e4m3"),) * 2, summed, None),
        ((delayed,) * 2, summed, window),
    ):
        twice = functools.partial(
            choose.quantize_twice,
            specs=specs,
            summed=order,
            range_=range_,
            largest=True,
        )
        *got, largest = interpreted(twice, x)
        for q, spec, axes in zip(got, specs, order):
            want, _ = choose.quantize(x, spec, range_, summed=axes)
            assert same(q.qvalue, want.qvalue) and same(q.scale, want.scale)
        assert range_ is None or same(largest, jnp.max(jnp.abs(x)))
        assert range_ is None or largest.dtype == dtype
    alone = functools.partial(choose.quantize, spec=tiles[0], summed=(2,))
    want, (got, _) = alone(x)[0], interpreted(alone, x)
    assert same(got.qvalue, want.qvalue) and same(got.scale, want.scale)


def test_who_does_not_share_a_read():
    x = random(0, 256, 256)
    row = mt.Spec("e4m3", channelwise_axes=(0,), tiled_axes={1: 128})
    column = mt.Spec("e4m3", channelwise_axes=(1,), tiled_axes={0: 128})
    noisy = mt.Spec("e4m3", rounding="stochastic")
    twice = lambda *specs, x=x: choose.quantize_twice(x, specs, ((1,), (0,)))
    with implementation("interpret"):
        assert twice(row, column) is not None
        assert twice(noisy, noisy) is None  # each has its own noise
        assert twice(row, mt.Spec("e4m3", channelwise_axes=(1,))) is None
        assert twice(row, column, x=x.astype(jnp.float16)) is None
    assert twice(row, column) is None  # no GPU


CHANCES = [("int8", (0, 1), (2,)), ("e4m3", (2,), (0, 1)), ("e5m2", (0, 1), (2,))]


@pytest.mark.parametrize(("name", "axes", "summed"), CHANCES)
def test_chance_has_the_same_codes(name, axes, summed):
    """Bit for bit: a scale per row of a batch, or per column; zeros, NaN and infinity."""
    x = jnp.stack([extremes(jnp.bfloat16), extremes(jnp.bfloat16)[::-1]])
    spec = mt.Spec(name, channelwise_axes=axes, rounding="stochastic")
    noise = {"key": jax.random.key(7), "site": ("layer", "g")}

    def run(x, spec=spec):
        return choose.quantize(x, spec, summed=summed, both=True, **noise)

    want, _ = run(x)
    for got in interpreted(run, x):
        assert same(got.scale, want.scale)
        assert same(got.qvalue, want.qvalue)
    nearest, _ = run(x, mt.Spec(name, channelwise_axes=axes))
    assert not same(want.qvalue, nearest.qvalue)


# --- matmuls of codes -------------------------------------------------------------------------


@needs_interpreter
@pytest.mark.parametrize("equation", ["mk,kn->mn", "mk,kn->nm"])
def test_scaled_matmul(equation):
    """Odd sizes: blocks stick out on every side."""
    x = mt.quantize(random(1, 100, 144), "int8", channelwise_axes=[0])
    w = mt.quantize(random(2, 144, 136), "int8", channelwise_axes=[1])
    run = functools.partial(mt.einsum, equation, preferred_element_type=jnp.float32)
    np.testing.assert_allclose(interpreted(run, x, w), run(x, w), rtol=1e-6)


@needs_interpreter
@pytest.mark.parametrize("num_steps", [3, 4])
def test_several_blocks_to_a_program(num_steps):
    """With whole rounds of the ring, and without; one scale for all rows, or many."""
    blocks = scaled_hopper.ScaledBlocks(64, 128, 128, 4)
    a, b = (random(i, 320, 128 * num_steps).astype(jnp.float8_e4m3fn) for i in (1, 2))
    sa, sb = jnp.full((1,), 0.5), jnp.linspace(1, 2, 320)
    for scales in ((sa, sb), (sb, sa), (sb, sb)):
        got = scaled_hopper.scaled_matmul(a, b, *scales, jnp.float32, blocks, True)
        want = wide(a) @ wide(b).T * wide(scales[0])[:, None] * wide(scales[1])
        assert error(got, want) < 1e-6


@needs_interpreter
@pytest.mark.parametrize("k", [256, 384])
@pytest.mark.parametrize("is_block", [True, False])
def test_block_scaled_matmul(k, is_block):
    x = mt.quantize(
        random(1, 384, k), "e4m3", channelwise_axes=[0], tiled_axes={1: 128}
    )
    tiles = {0: 128, 1: 128} if is_block else {0: 128}
    kept = [] if is_block else [1]
    w = mt.quantize(random(2, k, 384), "e4m3", channelwise_axes=kept, tiled_axes=tiles)
    run = lambda x, w: mt.dot(x, w, preferred_element_type=jnp.float32)
    assert error(interpreted(run, x, w), run(x, w)) < 1e-6


@needs_interpreter
@pytest.mark.parametrize("name", ["te_fp8_delayed", "deepseek_fp8"])
def test_a_training_step_reads_each_operand_once(name):
    window = {"absmax": jnp.full((1, 1), 4.0)} if "delayed" in name else None

    def learn(x, w, seen):
        ranges = mt.Ranges(window, window, seen) if window else None
        return mt.learn(mt.recipe(name), ranges=ranges).dot(x, w)

    def step(x, w, g, seen):
        out, vjp = jax.vjp(learn, x, w, seen)
        return out, *vjp(g)

    args = random(1, 256, 256), random(2, 256, 256), random(3, 256, 256), window
    got, want = (
        jax.tree.leaves(f(*args)) for f in (functools.partial(interpreted, step), step)
    )
    for ours, theirs in zip(got, want):
        assert error(ours, theirs) < 1e-2
    with implementation("interpret"):
        text = str(jax.make_jaxpr(step)(*args))
    assert text.count("] = pallas_call[") == 3  # x, w and g


# --- choosing ---------------------------------------------------------------------------------


def test_an_explicit_wish_is_met_or_refused():
    w = mt.quantize(random(1, 256, 64), "int8", channelwise_axes=[1])
    with (
        implementation("gpu"),
        pytest.raises(ValueError, match="not an NVIDIA GPU"),
    ):
        mt.dot(random(2, 4, 256), w)
    with pytest.raises(ValueError, match="unknown implementation 'cuda'"):
        implementation("cuda").__enter__()


def test_a_trace_is_not_shared_between_implementations():
    w = mt.quantize(random(1, 256, 64), "int8", channelwise_axes=[1])
    x, run = random(2, 4, 256), jax.jit(mt.dot)
    run(x, w)
    with implementation("interpret"):
        assert "pallas" in run.lower(x, w).as_text(debug_info=True)


def test_a_kernel_says_what_it_does_not_take():
    x, w = (mt.quantize(random(i, 64, 64), "int8") for i in range(2))
    why = lambda *args: reason(scaled_adapter.plan(matmul(*args), H200))
    assert "smaller than a block" in why(x, w)
    batch = ("b", "m", "k"), ("b", "k", "n"), ("b", "m", "n")
    assert "batch axes" in why(x, w, batch)
    mixed = mt.quantize(random(2, 64, 64), "e4m3")
    assert "int8 by float8_e4m3fn" in why(x, mixed)


# --- lowering ---------------------------------------------------------------------------------


def lower(fn, *shapes):
    with pretend_gpu():
        jax.jit(fn).trace(*shapes).lower(lowering_platforms=("cuda",))


def test_triton_kernels_lower_for_cuda():
    x = SHAPE((128, 256), jnp.bfloat16)
    lower(lambda x: quantize_triton.rows(x, as_format("int8")), x)
    lower(
        lambda x, s: quantize_triton.cast(x, s, as_format("e4m3"), ("plain", "transposed")),
        x, SHAPE((1, 256), jnp.float32),
    )  # fmt: skip
    both, inverse = ("plain", "transposed"), SHAPE((1, 1), jnp.float32)
    for dtype in (jnp.bfloat16, jnp.float32):
        of = SHAPE((128, 256), dtype)
        run = functools.partial(
            quantize_triton.cast, fmt=as_format("e5m2"), copies=both
        )
        lower(lambda x, s, run=run: run(x, s, largest=True), of, inverse)
        run = functools.partial(quantize_triton.tiles, fmt=as_format("e4m3"))
        lower(lambda x, s, run=run: run(x, inverse=s), of, inverse)
    noise = SHAPE((128,), jnp.uint32), SHAPE((256,), jnp.uint32)
    for name in ("int8", "e4m3"):
        run = functools.partial(quantize_triton.rows, fmt=as_format(name))
        lower(lambda x, n, run=run: run(x, noise=n), x, noise)
    for name, tile in WEIGHTS:
        for rows in (1, 16):
            fmt = as_format(name)
            planes = 8 // min(fmt.bits, 8)
            codes = SHAPE((4096, 512), jnp.int8 if planes > 1 else fmt.dtype)
            scale = SHAPE((4096 // tile, 512, planes), jnp.bfloat16) if tile else None
            blocks = triton_tuned.weight_blocks(fmt, rows, codes.shape, tile)
            run = functools.partial(weight_triton.weight_matmul, fmt=fmt, blocks=blocks)
            lower(run, SHAPE((rows, 4096), jnp.bfloat16), codes, scale)
    blocks = weight_triton.transposed_blocks(16, (512, 4096))
    run = functools.partial(weight_triton.transposed_matmul, blocks=blocks)
    lower(run, SHAPE((16, 4096), jnp.bfloat16), SHAPE((512, 4096), jnp.int8))


@pytest.mark.parametrize("out", [jnp.bfloat16, jnp.float32])
def test_hopper_kernels_lower_for_cuda(out):
    float8 = SHAPE((512, 1024), jnp.float8_e4m3fn)
    int8 = SHAPE((512, 1024), jnp.int8)
    vector, tiles = SHAPE((512,), jnp.float32), SHAPE((8, 512), jnp.float32)
    blocks = scaled_tuned.scaled_blocks(out, (512, 512))
    for codes in (float8, int8):
        lower(
            lambda a, b, s, t: scaled_hopper.scaled_matmul(a, b, s, t, out, blocks),
            codes, codes, vector, vector,
        )  # fmt: skip
    one = SHAPE((1,), jnp.float32)
    lower(
        lambda a, b, s, t: scaled_hopper.scaled_matmul(a, b, s, t, out, blocks),
        float8, float8, one, one,
    )  # fmt: skip
    for scales in (tiles, SHAPE((8, 4), jnp.float32)):
        lower(
            lambda a, b, s, t: hopper_tiled.tiled_matmul(a, b, s, t, out),
            float8, float8, tiles, scales,
        )  # fmt: skip


@pytest.mark.parametrize(("name", "tile"), WEIGHTS)
def test_streamed_weights_lower_for_cuda(name, tile):
    fmt = as_format(name)
    bits = 4 if fmt.bits <= 4 else 8
    codes = SHAPE((4096, 4096 * bits // 8), jnp.int8)
    scale = SHAPE((4096 // tile, 4096), jnp.bfloat16) if tile else None
    last = None if tile else SHAPE((4096,), jnp.float32)
    for rows, dtype in [(1, jnp.float32), (16, jnp.bfloat16), (64, jnp.bfloat16)]:
        with pretend_gpu():
            blocks = decode_tuned.decode_blocks(fmt, rows, (4096, 4096), tile)
        how = {"fmt": fmt, "blocks": blocks, "dtype": dtype}
        run = functools.partial(decode_kernel.decode_matmul, **how)
        lower(run, SHAPE((rows, 4096), jnp.bfloat16), codes, scale, last)


@pytest.mark.parametrize(("rows", "columns"), [(17, 5120), (24, 8192)])
def test_what_clusters_receive_has_room(rows, columns):
    """Shared memory to the last kB: 8 bits in groups of 32, under scales in float32."""
    fmt = as_format("int8")
    with pretend_gpu():
        blocks = decode_tuned.decode_blocks(fmt, rows, (4096, columns), 32)
    assert blocks is not None and blocks.cluster > 2
    run = functools.partial(decode_kernel.decode_matmul, fmt=fmt, blocks=blocks)
    codes, scale = SHAPE((4096, columns), jnp.int8), SHAPE((128, columns), jnp.float32)
    lower(run, SHAPE((rows, 4096), jnp.bfloat16), codes, scale)


def test_a_streamed_matmul_leaves_nothing_to_others():
    """Columns are scaled and the result cast in the kernel, not by XLA after it."""
    w = coded("int8", (512, 512), (1,)).replace(scale=SHAPE((1, 512), jnp.float32))
    with pretended("h200"), pretend_gpu():
        run = functools.partial(mt.dot, preferred_element_type=jnp.bfloat16)
        traced = jax.jit(run).trace(SHAPE((8, 512), jnp.bfloat16), w)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu" in text and "8x512xbf16" in text
    assert "stablehlo.multiply" not in text and "8x512xf32" not in text


@pretended("h200")
def test_odd_sizes_lower_for_cuda():
    x = mt.quantize(random(1, 200, 272), "int8", channelwise_axes=[0])
    w = mt.quantize(random(2, 272, 328), "int8", channelwise_axes=[1])
    run = lambda x, w: scaled_adapter.Rows(False).run(matmul(x, w))
    with pretend_gpu():
        jax.jit(run).trace(x, w).lower(lowering_platforms=("cuda",))


def test_the_matrix_in_the_docs_is_current():
    path = pathlib.Path(__file__).parents[2] / "benchmarks" / "matrix.py"
    spec = importlib.util.spec_from_file_location("matrix", path)
    matrix = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(matrix)
    assert matrix.PAGE.read_text() == matrix.page()
