"""Kernels for rows in groups, and those that read codes in words, without a GPU: values in
the interpreter, and all of them lowered for CUDA. On a GPU: tests/device/test_kernels.py."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import midtread as mt
from midtread.kernels import choose, triton_words
from midtread.kernels.decode_attention import Cached
from midtread.kernels.decode_attention import triton as attention_triton
from midtread.kernels.environment import here, implementation, pretended
from midtread.kernels.hopper.shared_memory import SHARED
from midtread.kernels.scaled_matmul import grouped_adapter, hopper_grouped
from midtread.kernels.scaled_matmul import tuned as scaled_tuned
from midtread.kernels.scaled_matmul.hopper import ScaledBlocks
from midtread.kernels.weight_matmul import (
    few_codes,
    few_groups,
    triton_grouped,
    triton_tuned,
)
from midtread.kernels.weight_matmul.hopper_decode import grouped as decode_grouped
from midtread.kernels.weight_matmul.hopper_decode import tuned as decode_tuned
from midtread.kernels.weight_matmul.hopper_decode.grouped import Cut, Walk
from midtread.kernels.weight_matmul.hopper_decode.kernel import DecodeBlocks
from midtread.numerics.formats import as_format
from tests.kernels.plans import (
    ADA,
    GROUPED,
    H200,
    INTERPRETED,
    coded,
    floats,
    matmul,
    reason,
)
from tests.kernels.test_gpu import (
    SHAPE,
    error,
    interpreted,
    lower,
    needs_interpreter,
    over_four,
    random,
    uses_kernel,
    wide,
)

pytestmark = pytest.mark.filterwarnings("ignore:The Pallas Triton backend")
SIZES = [3, 62, 1, 164]  # two and three groups within 8 rows; 26 rows left over


def ragged(x, w, sizes):
    """Rows by their group's matrix; zeros beyond all groups."""
    out, end = np.zeros((len(x), w.shape[2]), np.float32), 0
    for matrix, size in zip(wide(w), sizes):
        out[end : end + size] = wide(x)[end : end + size] @ matrix
        end += size
    return out


def ragged_sums(x, g, sizes):
    parts = np.split(np.arange(len(x)), np.cumsum(sizes))[:-1]
    return np.stack([wide(x)[rows].T @ wide(g)[rows] for rows in parts])


# --- codes by codes ---------------------------------------------------------------------------


@needs_interpreter
def test_rows_of_groups():
    x = mt.quantize(random(1, 256, 144), "int8", channelwise_axes=[0])
    w = mt.quantize(random(2, 4, 144, 136), "int8", channelwise_axes=[0, 2])
    run = functools.partial(mt.ragged_dot, preferred_element_type=jnp.float32)
    got = interpreted(run, x, w, jnp.array(SIZES))
    want = ragged(mt.dequantize(x, jnp.float32), mt.dequantize(w, jnp.float32), SIZES)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-4)
    assert np.all(wide(got)[sum(SIZES) :] == 0)


@needs_interpreter
def test_training_through_groups():
    """Forward and both gradients, fp8, per-channel scales, against the same by XLA."""
    ops = mt.learn(mt.recipe("qwix_fp8_full"))
    x, w, g = random(1, 256, 128), random(2, 4, 128, 128), random(3, 256, 128)
    sizes = jnp.array([100, 0, 29, 127])

    def step(x, w, g):
        out, vjp = jax.vjp(lambda x, w: ops.ragged_dot(x, w, sizes), x, w)
        return out, *vjp(g)

    by_kernel, by_xla = interpreted(step, x, w, g), jax.jit(step)(x, w, g)
    for got, want in zip(by_kernel, by_xla):
        assert error(got, want) < 2e-2


@needs_interpreter
def test_a_neighbours_nan_stays_there():
    x = random(1, 256, 128, dtype=jnp.float32).at[70].set(jnp.nan)
    x = mt.quantize(x, "e4m3", channelwise_axes=[0])
    w = mt.quantize(random(2, 2, 128, 128), "e4m3")
    out = interpreted(mt.ragged_dot, x, w, jnp.array([100, 156]))
    assert np.isnan(wide(out)[70]).all()
    assert np.isfinite(np.delete(wide(out), 70, axis=0)).all()


@pytest.mark.parametrize("sizes", [SIZES, [0, 0], [256], [8, 248], [300, 5]])
def test_row_blocks_cover_every_row_once(sizes):
    groups = hopper_grouped.group_bounds(jnp.array(sizes), 256)
    *table, counts = np.asarray(hopper_grouped.row_blocks(groups, 256, 64)).T
    assert counts[0] <= len(table)
    seen = np.zeros(256, int)
    for group, first, start, end in table[: counts[0]]:
        assert first % 8 == 0 and group <= len(sizes)
        rows = np.arange(max(first, start), min(first + 64, end))
        assert len(rows)
        seen[rows] += 1
    assert np.all(seen == 1)


def test_a_ragged_kernel_says_what_it_does_not_take():
    x = mt.quantize(random(1, 256, 128), "int8", channelwise_axes=[0])
    w = mt.quantize(random(2, 2, 128, 128), "int8")

    def why(rhs, labels=GROUPED, num_groups=2):
        a = matmul(x, rhs, labels, sizes=jnp.zeros(num_groups, jnp.int32))
        return reason(grouped_adapter.plan(a, H200))

    assert why(w) is None
    assert "axes besides" in why(w, (("r", "k"), ("g", "k", "n"), ("n", "r")))
    assert "int8 by float8" in why(mt.quantize(random(2, 2, 128, 128), "e4m3"))
    small = mt.quantize(random(2, 2, 128, 64), "int8")
    assert "smaller than a block" in why(small)
    assert "not one per group" in why(w, num_groups=8)
    eight = mt.quantize(random(2, 8, 128, 128), "int8")
    assert "32 rows a group" in why(eight, num_groups=8)
    with implementation("gpu"), pytest.raises(ValueError, match="not an NVIDIA"):
        mt.ragged_dot(x, w, jnp.array([100, 156]))


# --- a few rows of each group -----------------------------------------------------------------

WEIGHTS = [
    ("int8", None),
    ("e4m3", None),
    ("int4", 32),
]  # test_triton_words.py has the others


@pytest.mark.parametrize(("name", "tile"), WEIGHTS)
def test_few_rows_of_groups(name, tile):
    tiles = {1: tile} if tile else {}
    w = mt.quantize(random(1, 3, 128, 128), name, channelwise_axes=[0, 2], tiled_axes=tiles)  # fmt: skip
    x, sizes = random(2, 40, 128), [17, 0, 20]
    got = interpreted(mt.ragged_dot, x, w, jnp.array(sizes))
    assert error(got, ragged(x, mt.dequantize(w, jnp.float32), sizes)) < 4e-3
    assert np.all(wide(got)[37:] == 0)


def test_few_rows_of_codes_and_gradient():
    w = mt.quantize(random(1, 2, 128, 64), "int8", channelwise_axes=[0, 2])
    x, sizes = random(2, 20, 128), jnp.array([9, 11])
    codes = mt.quantize(x, "int8", channelwise_axes=[0])
    matrix = mt.dequantize(w, jnp.float32)
    want = ragged(mt.dequantize(codes, jnp.float32), matrix, [9, 11])
    assert error(interpreted(mt.ragged_dot, codes, w, sizes), want) < 4e-3
    tiled = mt.quantize(random(1, 2, 128, 64), "int4", channelwise_axes=[0, 2], tiled_axes={1: 32})  # fmt: skip
    few = lambda w, dtype: few_codes.plan(
        matmul(codes, w, GROUPED, dtype, sizes), INTERPRETED
    )
    assert not reason(few(tiled, jnp.bfloat16)) and not reason(few(w, jnp.float32))
    assert "would be rounded" in reason(few(tiled, jnp.float32))
    c = random(3, 20, 64)
    loss = lambda x: jnp.sum(c * mt.ragged_dot(x, w, sizes))
    want = ragged(c, matrix.swapaxes(1, 2), [9, 11])
    assert error(interpreted(jax.grad(loss), x), want) < 1e-2


STREAMED = [  # several rings, a sum that programs share; scales of columns, of tiles
    ("int8", None, Cut(8, 1, DecodeBlocks(32, 2, wide=2))),
    ("int4", 32, Cut(8, 1, DecodeBlocks(32, 2, wide=4, deep=4))),
    ("nf4", 64, Cut(16, 1, DecodeBlocks(64, 2))),
]


@needs_interpreter
@pytest.mark.parametrize(("name", "tile", "cut"), STREAMED)
def test_streamed_groups(name, tile, cut, monkeypatch):
    """Hopper's kernel: two blocks of one group, an empty group, two groups within 8 rows,
    rows beyond all."""
    monkeypatch.setattr(decode_tuned, "grouped_cuts", lambda *_: (cut,))
    tiles = {1: tile} if tile else {}
    w = mt.quantize(random(1, 3, 128, 256), name, channelwise_axes=[0, 2], tiled_axes=tiles)  # fmt: skip
    x, sizes = random(2, 20, 128), [11, 0, 6]

    def run(x, w):
        a = matmul(x, w, GROUPED, sizes=jnp.array(sizes))
        return few_groups.plan_hopper(a, INTERPRETED).run(a)

    got = jax.jit(run)(x, w)
    assert error(got, ragged(x, mt.dequantize(w, jnp.float32), sizes)) < 4e-3
    assert np.all(wide(got)[17:] == 0)


def test_a_shard_too_narrow_to_stream_in_groups():
    """A device's part of weights: the same numbers by XLA, and their gradient."""
    w = mt.quantize(random(1, 2, 128, 128), "int4", channelwise_axes=[0, 2])
    x, c, sizes = random(2, 3, 20, 128), random(3, 20, 128), jnp.array([9, 11])
    whole = coded("int4", (2, 128, 256), (0, 2))
    plan = few_groups.plan_hopper(matmul(x[0], whole, GROUPED, sizes=sizes), H200)
    call = few_groups._hopper_call(plan)
    run = lambda x: call(x, w.qvalue, w.scale, sizes)
    matrix = mt.dequantize(w, jnp.float32)
    want = np.stack([ragged(rows, matrix, [9, 11]) for rows in x])
    assert error(jax.vmap(run)(x), want) < 4e-3
    (got,) = jax.vjp(run, x[0])[1](c.astype(jnp.float32))
    assert error(got, ragged(c, matrix.swapaxes(1, 2), [9, 11])) < 4e-3


@pytest.mark.parametrize("sizes", [SIZES, [0, 0], [256], [8, 248], [300, 5]])
def test_streamed_blocks_cover_the_rows_of_groups_once(sizes):
    walks = [Walk(i, m, len(sizes), 3, 1, 1, 2) for i, m in enumerate((16, 32))]
    groups = decode_grouped.by_xla(jnp.array(sizes), 256, walks)
    ends = np.minimum(np.cumsum(sizes), 256)
    for walk in walks:
        seen = np.zeros((256, 3), int)
        for item in range(3 * int(groups.blocks[walk.number, -1])):
            group, row, tile = (int(v) for v in groups.find(walk, item))
            assert row % 8 == 0
            first = max(row, ends[group] - sizes[group])
            seen[first : min(row + walk.rows, ends[group]), tile] += 1
        assert np.all(seen == (np.arange(256) < sum(sizes))[:, None])


def test_what_is_not_streamed_in_groups():
    sizes = jnp.array([1, 2])

    def why(shape, tile=None, dtype=jnp.bfloat16):
        w = coded("int4", shape, (0, 2), {1: tile} if tile else {})
        a = matmul(floats(20, shape[1], dtype=dtype), w, GROUPED, sizes=sizes)
        return reason(few_groups.plan_hopper(a, H200))

    assert why((2, 256, 256)) is None
    assert "not bfloat16" in why((2, 256, 256), dtype=jnp.float16)
    for shape, tile in [
        ((2, 256, 192), None),
        ((2, 160, 256), None),
        ((2, 256, 256), 8),
    ]:
        assert "do not divide" in why(shape, tile)
    w = mt.quantize(random(2, 2, 128, 256), "nf4", channelwise_axes=[0, 2], tiled_axes={1: 64})  # fmt: skip
    a = matmul(floats(4, 128), w, GROUPED, sizes=sizes)
    assert reason(few_groups.plan_hopper(a, H200)) is None
    assert "does not decode nf4" in reason(few_groups.plan_triton(a, ADA))


def test_streamed_groups_fit():
    """As many buffers as there is shared memory for, beside what sums change hands in."""
    for name, tile in [("int8", None), ("int4", 128), ("nf4", 64)]:
        for rows in (1, 8.5, 16, 20, 64):
            fmt = as_format(name)
            cuts = decode_tuned.grouped_cuts(fmt, rows, (4096, 7168), tile)
            assert len(cuts) == (1 if rows == 64 else 2)
            assert len({c.blocks.division(fmt.bits).groups for c in cuts}) == 1
            for cut in cuts:
                assert cut.rows >= rows and cut.blocks.stages >= 2
                size = cut.blocks.num_bytes(fmt, cut.rows, tile)
                size += cut.blocks.exchanged(cut.rows) + decode_tuned.HELD
                assert size <= SHARED
    (one, more) = decode_tuned.grouped_cuts(as_format("int4"), 4, (1408, 256), 128)
    assert one.blocks.deep == more.blocks.deep == 1  # 1408 is not whole for four rings


@pytest.mark.parametrize("name", triton_words.FORMATS)
def test_words_hold_every_code(name):
    fmt = as_format(name)
    bits = np.arange(2**16, dtype=np.uint16).view(np.int16)
    planes = triton_words.planes(jnp.asarray(bits), fmt, native=False)
    codes = jax.lax.bitcast_convert_type(jnp.asarray(bits), fmt.dtype)
    for p, got in enumerate(planes):
        np.testing.assert_array_equal(wide(got), wide(codes[:, p]))
    again = triton_words.as_words(codes.reshape(-1), fmt)
    np.testing.assert_array_equal(again, bits)


def test_rows_fit_float16():
    x = random(1, 4, 64, dtype=jnp.float32) * jnp.array([[1e30], [1e-30], [0], [1]])
    x = x.astype(jnp.bfloat16)
    small, size = triton_words.fitted(x)
    assert np.all(np.abs(wide(small)) < 1)
    np.testing.assert_allclose(wide(small) * wide(size), wide(x), rtol=1e-3, atol=1e-36)


# --- attention over a cache of codes ----------------------------------------------------------


def cached(seed, name, axes, *shape):
    x = random(seed, *shape, dtype=jnp.float32) * np.exp(random(seed, *shape[:2], 1, 1, dtype=jnp.float32))  # fmt: skip
    return mt.quantize(x, name, channelwise_axes=axes)


def attend(q, k, v, stop, first=None, **options):
    first = jnp.zeros_like(stop) if first is None else first
    return choose.attend(Cached(q, k, v, first, stop, **options))


def attention(q, k, v, stop, first=0, gain=1.0, softcap=None, sinks=None):
    exact = lambda x: wide(mt.dequantize(x, jnp.float32) if isinstance(x, mt.QArray) else x)  # fmt: skip
    k, v = exact(k), exact(v)
    q = wide(q).reshape(len(q), k.shape[2], -1, q.shape[-1])
    logits = np.einsum("bkgh,bskh->bkgs", q, k) * gain * q.shape[-1] ** -0.5
    if softcap is not None:
        logits = softcap * np.tanh(logits / softcap)
    slots = np.arange(k.shape[1])
    inside = (slots >= np.asarray(first)[..., None]) & (slots < np.asarray(stop)[:, None])  # fmt: skip
    weights = np.exp(np.where(inside[:, None, None], logits, -np.inf))
    total = weights.sum(-1, keepdims=True)
    if sinks is not None:
        total += np.exp(wide(sinks)).reshape(1, k.shape[2], -1, 1)
    out = np.einsum("bkgs,bskh->bkgh", weights / total, v)
    return out.reshape(len(q), 1, -1, v.shape[-1])


@pytest.mark.parametrize(
    ("name", "axes", "width"),
    [("int8", (0, 1, 2), 32), ("e4m3", (0, 1), 32), ("int4", (0, 1), 64)],
)
@pytest.mark.parametrize("cores", [2, 132])
def test_attention_over_a_cache(name, axes, width, cores, monkeypatch):
    """A program for a context, or three: `num_parts` chooses by the multiprocessors."""
    monkeypatch.setattr(attention_triton, "num_cores", lambda: cores)
    monkeypatch.setattr(attention_triton, "MERGE", 0.1)
    attention_triton._call.cache_clear()
    k, v = (cached(i, name, axes, 2, 150, 2, width) for i in (1, 2))
    q, lengths = random(3, 2, 1, 4, width), jnp.array([150, 70])
    run = lambda q, lengths: attend(q, k, v, lengths, gain=1.5)
    want = attention(q, k, v, lengths, gain=1.5)
    assert error(interpreted(run, q, lengths), want) < 4e-3


@pytest.mark.parametrize("parts", [1, 2, 20])
def test_attention_over_a_cache_of_floats(parts):
    """A window, a soft cap and sinks; three query heads a head, which is no power of two."""
    k, v, q = random(1, 2, 330, 2, 32), random(2, 2, 330, 2, 32), random(3, 2, 1, 6, 32)
    stop, first, sinks = jnp.array([330, 70]), jnp.array([200, 0]), random(4, 6)
    options = {"gain": 1.5, "softcap": 2.0}
    got = attention_triton.decode_attention(
        q.reshape(2, 2, 3, 32), (k, None), (v, None), first, stop, sinks.reshape(2, 3),
        fmt=None, block=16, parts=parts, interpret=True, **options,
    )  # fmt: skip
    want = attention(q, k, v, stop, first, sinks=sinks, **options)
    assert error(got.reshape(q.shape), want) < 4e-3


def test_attention_is_refused_by_name():
    q = random(3, 2, 1, 4, 32)
    why = lambda q, k, v: reason(attention_triton.plan(Cached(q, k, v, q, q), here()))
    k = cached(1, "int8", (0, 1, 2), 2, 16, 2, 32)
    assert why(q, k, k) is None
    assert "2 tokens at once" in why(random(3, 2, 2, 4, 32), k, k)
    four = cached(1, "int4", (0, 1, 2), 2, 16, 2, 32)
    assert "heads of 32 in int4" in why(q, four, four)
    three = cached(1, "int3", (0, 1, 2), 2, 16, 2, 32)
    assert "int3 caches" in why(q, three, three)
    shared = cached(1, "int8", (2,), 2, 16, 2, 32)
    assert "not one per token" in why(q, shared, shared)
    plain = random(1, 2, 16, 2, 32, dtype=jnp.float32)
    assert "float32 caches" in why(q, plain, plain)
    odd = cached(1, "int8", (0, 1, 2), 2, 16, 2, 48)
    assert "heads of 48" in why(random(3, 2, 1, 4, 48), odd, odd)


# --- lowering and partitioning ----------------------------------------------------------------


def test_grouped_kernels_lower_for_cuda():
    vector = lambda *shape: SHAPE(shape, jnp.float32)
    sizes = SHAPE((8,), jnp.int32)
    for dtype, out in ((jnp.int8, jnp.float32), (jnp.float8_e5m2, jnp.bfloat16)):
        codes = lambda *shape, dtype=dtype: SHAPE(shape, dtype)
        for per_group in (128, 2048):
            rows = 8 * per_group
            blocks = scaled_tuned.grouped_blocks(out, per_group, 512)
            lower(
                lambda *a, out=out, b=blocks: hopper_grouped.grouped_rows(*a, out, b),
                codes(rows, 256), codes(8, 512, 256), vector(rows), vector(8, 512), sizes,
            )  # fmt: skip
        blocks = scaled_tuned.scaled_blocks(out, (512, 512))
        lower(
            lambda *a, out=out, b=blocks: hopper_grouped.grouped_sums(*a, out, b),
            codes(512, 1024), codes(512, 1024), vector(512), vector(512), sizes,
        )  # fmt: skip


@pytest.mark.parametrize(
    ("name", "tile", "rows"),
    [("int8", None, 16), ("e4m3", None, 64), ("int4", 128, 16), ("nf4", 64, 1)],
)
def test_streamed_groups_lower_for_cuda(name, tile, rows):
    fmt, shape = as_format(name), (4096, 1024)
    cuts = decode_tuned.grouped_cuts(fmt, rows, shape, tile)
    how = {"fmt": fmt, "cuts": cuts}
    run = functools.partial(decode_grouped.grouped_matmul, **how)
    codes = SHAPE((8, 4096, 1024 // (1 if fmt.bits > 4 else 2)), jnp.int8)
    scale = SHAPE((8, 4096 // (tile or 4096), 1024), jnp.bfloat16)
    x = SHAPE((8 * rows, 4096), jnp.bfloat16)
    lower(run, x, codes, scale, SHAPE((8,), jnp.int32))


def test_kernels_that_read_words_lower_for_cuda():
    containers = {as_format(name).dtype for name in triton_words.FORMATS}
    for fmt in map(as_format, sorted(containers, key=str)):
        planes = triton_words.num_planes(fmt)
        blocks = triton_tuned.expert_blocks(fmt, 16, (4096, 7168 // planes), 128)
        run = functools.partial(triton_grouped.grouped_matmul, fmt=fmt, blocks=blocks)
        words = SHAPE((8, 4096, 7168 // planes), jnp.int16)
        for tiles in (1, 32) if fmt.bits == 8 else (32,):
            scale = SHAPE((8, tiles, 7168 // planes, planes), jnp.float32)
            sizes = SHAPE((8,), jnp.int32)
            lower(run, SHAPE((128, 4096), jnp.bfloat16), words, scale, sizes)
    for name in ("int8", "e4m3", "int4", None):
        fmt = name and as_format(name)
        dtype = fmt.dtype if fmt else jnp.bfloat16
        part = SHAPE((2, 1000, 8, 128), dtype), fmt and SHAPE((2, 1000, 8), jnp.float32)
        run = functools.partial(attention_triton.decode_attention, fmt=fmt)
        q = SHAPE((2, 8, 4, 128), jnp.bfloat16)
        lower(run, q, part, part, *[SHAPE((2,), jnp.int32)] * 2)
        capped = functools.partial(run, softcap=30.0)
        sinks = SHAPE((8, 4), jnp.float32)
        lower(capped, q, part, part, *[SHAPE((2,), jnp.int32)] * 2, sinks)


def test_columns_of_experts_are_split_over_devices():
    mesh = jax.make_mesh((4,), ("x",), (jax.sharding.AxisType.Auto,))
    w = mt.quantize(random(1, 2, 128, 512), "int8", channelwise_axes=[0, 2])
    x, sizes = random(2, 20, 128), jnp.array([9, 11])
    spec = jax.sharding.PartitionSpec(None, None, "x")
    placed = jax.device_put(w, w.shardings(jax.NamedSharding(mesh, spec)))
    out = interpreted(mt.ragged_dot, x, placed, sizes)
    assert error(out, mt.ragged_dot(x, w, sizes)) < 4e-3
    assert out.sharding.spec[1] == "x"


@pretended("h200")
def test_inside_shard_map_with_its_checks():
    """Traced and no more: the interpreter does not know which axes vary."""
    spec = jax.sharding.PartitionSpec
    ops, sizes = mt.learn(mt.recipe("qwix_fp8_full")), jnp.full((4, 2), 128)
    loss = lambda x, w, s: jnp.sum(ops.ragged_dot(x, w, s[0]))
    x, w = random(1, 1024, 256), random(2, 2, 256, 256)
    specs = spec("x"), spec(), spec("x")
    assert uses_kernel(over_four(jax.grad(loss), *specs), x, w, sizes)
    k = cached(1, "int8", (0, 1, 2), 4, 64, 2, 32)
    run = lambda q, k, lengths: attend(q, k, k, lengths)
    args = random(3, 4, 1, 4, 32), k, jnp.full(4, 60)
    assert uses_kernel(over_four(run, spec("x"), spec("x"), spec("x")), *args)


def test_attention_under_vmap_and_grad():
    k, v = (cached(i, "int8", (0, 1, 2), 1, 40, 1, 32) for i in (1, 2))
    q, c, lengths = (
        random(3, 2, 1, 1, 2, 32),
        random(4, 2, 1, 1, 2, 32),
        jnp.array([33]),
    )
    run = lambda q: attend(q.astype(jnp.float32), k, v, lengths)
    loss = lambda q: jnp.sum(c.astype(jnp.float32) * jax.vmap(run)(q))
    rows = jnp.concatenate([mt.dequantize(x, jnp.float32) for x in (k, v)])

    def plain(q):
        logits = jnp.einsum("vbtgh,bskh->vgs", q.astype(jnp.float32), rows[:1, :33])
        weights = jax.nn.softmax(logits * 32**-0.5)
        out = jnp.einsum("vgs,bskh->vgh", weights, rows[1:, :33])
        return jnp.sum(c[:, 0, 0].astype(jnp.float32) * out)

    want = jax.grad(plain)(q)
    assert error(interpreted(jax.grad(loss), q), want) < 1e-2


def test_paired_programs_are_for_long_groups():
    assert scaled_tuned.grouped_blocks(jnp.bfloat16, 4096, 7168).pair
    assert not scaled_tuned.grouped_blocks(jnp.bfloat16, 512, 7168).pair
    assert scaled_tuned.grouped_blocks(jnp.bfloat16, 64, 7168) == ScaledBlocks(64, 128)
