"""Many rows against a stored weight, without a GPU: interpreted where JAX can (0.12), lowered
for CUDA, and chosen. On a GPU: tests/device/test_kernels.py."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import midtread as mt
from midtread.kernels.environment import implementation, pretended
from midtread.kernels.pallas_compat import pretend_gpu
from midtread.kernels.scaled_matmul import adapter as scaled_adapter
from midtread.kernels.weight_matmul import many_rows
from midtread.kernels.weight_matmul.hopper_prefill import pipeline as prefill_pipeline
from midtread.kernels.weight_matmul.hopper_prefill import tuned as prefill_tuned
from midtread.kernels.weight_matmul.hopper_prefill.pipeline import PrefillBlocks
from midtread.numerics.formats import as_format
from tests.kernels.plans import (
    DOT,
    H200,
    INTERPRETED,
    by_weight,
    coded,
    floats,
    matmul,
    needs_interpreter,
    random,
    reason,
)

SHAPE = jax.ShapeDtypeStruct


def error(got, want):
    got, want = (np.asarray(x).astype(np.float64) for x in (got, want))
    return np.linalg.norm(got - want) / np.linalg.norm(want)


def weight(name, tile, shape=(256, 256)):
    how = {"channelwise_axes": [1], "tiled_axes": {0: tile} if tile else {}}
    if name.startswith("uint"):  # with zero points
        how["calibration_method"] = "minmax"
    return mt.quantize(random(1, *shape), name, **how)


CASES = [  # format, tile, columns, programs, and blocks: a deep buffer, a split sum, halves
    ("int8", None, 128, 2, PrefillBlocks(rows=64, stages=2)),
    ("int4", 32, 384, 2, PrefillBlocks(rows=64, stages=2, halves=True)),
    ("nf4", 64, 128, 2, PrefillBlocks(rows=96, k=128, stages=2, split=2)),
]


@needs_interpreter
@pytest.mark.parametrize(("name", "tile", "columns", "programs", "blocks"), CASES)
def test_values(name, tile, columns, programs, blocks, monkeypatch):
    """Decoded without its PTX here; rows that are no whole block, or half of one."""
    monkeypatch.setattr(prefill_tuned, "prefill_blocks", lambda *_: blocks)
    monkeypatch.setattr(prefill_pipeline, "num_cores", lambda: programs)
    w, x = weight(name, tile, (256, columns)), random(2, 66, 256)
    a = by_weight(x, w, dtype=jnp.float32)
    run = many_rows.plan(a, INTERPRETED).run(a)
    values = mt.dequantize(w, jnp.bfloat16 if tile else jnp.float32)
    exact = jnp.dot(x.astype(jnp.float32), values.astype(jnp.float32))
    # as if decoded first; a table's entries are rounded on their own
    assert error(run, exact) < (3e-3 if name == "nf4" else 1e-6)


@needs_interpreter
@pytest.mark.parametrize("name", ["int8", "e4m3"])
def test_codes(name, monkeypatch):
    """Rows of codes by a weight as it is stored; a scale for each row."""
    blocks = PrefillBlocks(rows=64, k=128, stages=2, split=2)
    monkeypatch.setattr(prefill_tuned, "prefill_blocks", lambda *_: blocks)
    monkeypatch.setattr(prefill_pipeline, "num_cores", lambda: 2)
    x = mt.quantize(random(1, 66, 512), name, channelwise_axes=[0])
    w = weight(name, None, (512, 128))
    a = matmul(x, w, dtype=jnp.float32, stored=("rhs",))
    run = scaled_adapter.plan_columns(a, INTERPRETED).run(a)
    exact = jnp.dot(mt.dequantize(x, jnp.float32), mt.dequantize(w, jnp.float32))
    assert error(run, exact) < 1e-6


def test_last_round_is_cut():
    """1,024 rows by 14,336 columns: 3 rounds of 132 and 52 blocks, in halves."""
    dtypes = jnp.bfloat16, jnp.bfloat16
    how = (1024, (4096, 14336), None, dtypes)
    with pretend_gpu():
        assert prefill_tuned.prefill_blocks(as_format("int8"), *how).halves
        how = (1024, (14336, 4096), None, dtypes)
        assert not prefill_tuned.prefill_blocks(
            as_format("int8"), *how
        ).halves  # 128 blocks


@pytest.mark.parametrize(
    ("name", "tile", "rows_in"),
    [
        ("int8", None, "bfloat16"),
        ("int4", 32, "bfloat16"),
        ("nf4", 64, "bfloat16"),
        ("int8", None, "int8"),
    ],
)
def test_blocks_fit(name, tile, rows_in):
    """Whole parts of the sum, and no more shared memory than there is."""
    fmt, dtypes = as_format(name), (jnp.dtype(rows_in), jnp.float32)
    step = prefill_pipeline.step(rows_in)
    for rows in (65, 100, 256, 300, 1000, 8192):
        for k, n in [(4096, 14336), (14336, 4096), (256, 128), (1280, 768)]:
            with pretend_gpu():
                b = prefill_tuned.prefill_blocks(fmt, rows, (k, n), tile, dtypes)
            assert k % (b.split * step) == 0 and b.rows <= 256
            assert b.stages >= 2 and n % (256 if b.pair else 128) == 0
            assert b.rows % (64 if b.halves else 32) == 0


def test_what_it_does_not_take():
    bf16 = jnp.bfloat16

    def why(name="int4", shape=(256, 256), tile=None, turned=False, dtypes=(bf16, bf16), scale=bf16):  # fmt: skip
        tiles = {turned: tile} if tile else {}
        w = coded(name, shape, (1 - turned,), tiles)
        w = w.replace(scale=SHAPE(w.scale.shape, scale))
        labels = (("m", "k"), ("n", "k"), ("m", "n")) if turned else DOT
        x = floats(100, shape[int(turned)], dtype=dtypes[0])
        return reason(many_rows.plan(by_weight(x, w, labels, dtypes[1]), H200))

    assert why() is None
    assert "does not decode int1" in why("int1")
    assert "not bfloat16" in why(dtypes=(jnp.float16, bf16))
    assert "the result is float16" in why(dtypes=(bf16, jnp.float16))
    assert "innermost" in why(turned=True)
    assert "scales of groups are float32" in why(tile=128, scale=jnp.float32)
    assert "do not divide" in why(shape=(256, 192))
    assert "do not divide" in why(shape=(192, 256))
    assert "do not divide" in why(tile=8)


@pytest.fixture
def hopper():
    """As if traced for a Hopper GPU, one of them."""
    with pretended("h200"):
        yield


LOWERED = [
    ("int8", None, 1024),
    ("e5m2", None, 65),
    ("int4", 128, 8192),
    ("nf4", 64, 300),
    ("uint4", 128, 300),
    ("uint4", 64, 65),
    ("nvfp4", 16, 512),
    ("int2", 64, 512),
    # few rows, by the other kernel
    ("uint4", 64, 1),
    ("uint4", 128, 64),
    ("uint2", 128, 1),
    ("int2", 64, 64),
    ("mxfp4", 32, 1),
]


@pytest.mark.parametrize(("name", "tile", "rows"), LOWERED)
def test_chosen_and_lowered_for_cuda(name, tile, rows, hopper):
    w = weight(name, tile, (1152, 768))
    with pretend_gpu(), implementation("gpu"):
        run = jax.jit(mt.dot).trace(SHAPE((rows, 1152), jnp.bfloat16), w)
        text = run.lower(lowering_platforms=("cuda",)).as_text()
    assert "custom_call @mosaic_gpu" in text
    assert "tensor<1152x768xbf16>" not in text  # nothing is decoded beside it


@pytest.mark.parametrize("name", ["int8", "e4m3"])
def test_a_stored_weight_is_not_turned_beside_its_matmul(name, hopper):
    """By a kernel of its own; where quantizing wrote the order, by the plain one."""
    x, w = (
        mt.quantize(random(1, *shape), name, channelwise_axes=[axis])
        for shape, axis in (((100, 512), 0), ((512, 256), 1))
    )
    with pretend_gpu(), implementation("gpu"):
        run = jax.jit(mt.dot).trace(x, w).lower(lowering_platforms=("cuda",)).as_text()
    assert "custom_call @mosaic_gpu" in run
    assert "tensor<256x512x" not in run


def test_what_was_written_for_a_matmul_is_not_turned(hopper, monkeypatch):
    """A stored weight goes by its columns; one that training quantizes lies as it should."""
    seen = []
    spy = lambda plan, a: seen.append(a.rhs.shape) or jnp.zeros((128, 256), a.dtype)
    monkeypatch.setattr(scaled_adapter.Columns, "run", spy)
    x, w = random(1, 128, 512), random(2, 512, 256)
    stored = weight("int8", None, w.shape)
    ops = mt.learn(mt.recipe("qwix_int8"))
    step = lambda x, w: jax.vjp(ops.dot, x, w)[1](jnp.ones((128, 256), x.dtype))
    jax.eval_shape(step, x, w)
    assert seen == []
    jax.eval_shape(ops.dot, x, stored)
    assert seen == [(512, 256)]


def test_asked_for_in_vain(hopper):
    w = mt.quantize(random(1, 256, 192), "int8", channelwise_axes=[1])
    with (
        implementation("gpu"),
        pytest.raises(ValueError, match="do not divide into blocks"),
    ):
        jax.eval_shape(mt.dot, random(2, 100, 256), w)
    out = jax.eval_shape(mt.dot, random(2, 100, 256), w)  # left to XLA
    assert out.shape == (100, 192)


@pytest.mark.parametrize(("name", "tile"), [("int8", None), ("int4", 128)])
def test_grad_and_vmap(name, tile):
    """By a kernel's stand-in: a device's part of a weight may be too narrow for it."""
    w, x, c = weight(name, tile, (256, 64)), random(2, 2, 70, 256), random(3, 2, 70, 64)
    scale = w.scale if tile else w.scale.astype(jnp.float32)
    whole = by_weight(x[0], weight(name, tile, (256, 128)))
    plan = many_rows.plan(whole, H200)
    narrow = lambda x, s: plan.run(by_weight(x, w.replace(scale=s)))
    run = lambda x, s: jax.vmap(lambda x: narrow(x, s))(x)
    loss = lambda x, s: jnp.sum((c * run(x, s)).astype(jnp.float32))
    plain = lambda x, s: jnp.sum(
        (c * mt.dot(x, w.replace(scale=s.astype(w.scale.dtype)))).astype(jnp.float32)
    )
    got, want = (jax.grad(f, (0, 1))(x, scale) for f in (loss, plain))
    assert error(got[0], want[0]) < 1e-2 and error(got[1], want[1]) < 2e-2


def test_inside_shard_map(hopper):
    mesh = jax.make_mesh((4,), ("x",), (jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec
    how = {"mesh": mesh, "in_specs": (spec("x"), spec()), "out_specs": spec("x")}
    run = functools.partial(jax.shard_map, **how)
    with implementation("gpu"):
        text = str(
            jax.make_jaxpr(run(mt.dot))(random(2, 400, 256), weight("int8", None))
        )
    assert "core_map[" in text or "mpmd_map[" in text or "pallas_call[" in text
