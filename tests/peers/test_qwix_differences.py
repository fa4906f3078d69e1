"""Qwix 0.1.8, where we differ on purpose: each test shows that ours is the better one."""

import jax
import jax.numpy as jnp
import numpy as np
import peer
import pytest
from jax import lax
from peer import data

import midtread as mt

qwix_array, qwix_dot_general, qwix_ragged = peer.load(
    "qwix",
    "0.1.8",
    "qwix._src.core.qarray",
    "qwix._src.core.dot_general",
    "qwix._src.core.ragged_dot",
)
ROWS_BY_COLUMNS = (((1,), (0,)), ((), ()))


def error(approximate, exact) -> float:
    approximate, exact = (np.asarray(x, np.float64) for x in (approximate, exact))
    return float(np.linalg.norm(approximate - exact) / np.linalg.norm(exact))


def round_trips(x, fmt, qwix_type=None, **how):
    """Errors of quantize and dequantize: ours, theirs."""
    ours = mt.dequantize(mt.quantize(x, fmt, **how))
    with peer.manners():
        q = qwix_array.quantize_api(x, qwix_type or fmt, **how)
        theirs = qwix_array.dequantize(q)
    return error(ours, x), error(theirs, x)


@pytest.mark.parametrize("size", [1e-4, 1e4])
def test_nvfp4_has_two_levels(size):
    """Without a scale per tensor, e4m3 block scales underflow or saturate."""
    x = data(np.random.default_rng(0), (32, 64), "float32", size)
    ours, theirs = round_trips(x, "nvfp4", tiled_axes={1: 16})
    assert ours < 0.12 and theirs > 0.7


def test_float16_scales():
    """Qwix takes scale 1 where absmax / 127.5 is below 2^-7."""
    x = data(np.random.default_rng(1), (32, 64), "float16", 0.1)
    ours, theirs = round_trips(x, "int8", jnp.int8)
    assert ours < 0.02 and theirs > 0.5


def test_float16_rms():
    """Qwix squares in float16."""
    x = data(np.random.default_rng(2), (32, 64), "float16", 1000)
    ours = mt.quantize(x, "int8", calibration_method="rms,3")
    with peer.manners():
        theirs = qwix_array.quantize_api(x, jnp.int8, calibration_method="rms,3")
    assert jnp.isfinite(ours.scale).all() and not jnp.isfinite(theirs.scale).any()


def test_float16_sums():
    """Qwix brings an int32 sum to float16 before it is scaled back."""
    rng = np.random.default_rng(3)
    x, w = data(rng, (4, 256), "float16"), data(rng, (256, 8), "float16")
    ours = mt.quantize(jnp.abs(x), "int8"), mt.quantize(jnp.abs(w), "int8")
    theirs = [qwix_array.QArray(q.qvalue, q.scale) for q in ours]
    with peer.manners():
        lost = qwix_dot_general.dot_general(*theirs, ROWS_BY_COLUMNS)
    kept = mt.dot_general(*ours, ROWS_BY_COLUMNS)
    assert jnp.isfinite(kept).all() and not jnp.isfinite(lost).all()


def test_nan_is_not_lost():
    """XLA's maximum of many elements drops a NaN on a CPU, and so does Qwix's scale."""
    x = data(np.random.default_rng(5), (128, 128), "float32").at[3, 5].set(jnp.nan)
    ours = jax.jit(lambda x: mt.dequantize(mt.quantize(x, "int8")))(x)
    with peer.manners():
        theirs = jax.jit(
            lambda x: qwix_array.dequantize(qwix_array.quantize_api(x, jnp.int8))
        )(x)
    assert jnp.isnan(ours).all() and not jnp.isnan(theirs).any()


def test_one_bit():
    """Qwix's int1 is all zeros; ours is the sign, at the mean magnitude."""
    x = data(np.random.default_rng(4), (32, 64), "float32")
    ours, theirs = round_trips(x, "int1", jnp.int1 if hasattr(jnp, "int1") else "int1")
    assert ours < 0.65 and theirs > 0.99


@pytest.mark.parametrize("fmt", ["int8", "float8_e4m3fn"])
def test_float32_epilogue(fmt):
    """bfloat16 models: one rounding of the result against one per scale."""
    rng = np.random.default_rng(5)
    x, w = data(rng, (64, 256), "bfloat16"), data(rng, (256, 64), "bfloat16")
    ours = [mt.quantize(x, fmt, channelwise_axes=[0]), mt.quantize(w, fmt, channelwise_axes=[1])]  # fmt: skip
    exact = np.matmul(*(np.asarray(mt.dequantize(q, "float32"), np.float64) for q in ours))  # fmt: skip
    with peer.manners():
        theirs = qwix_dot_general.dot_general(
            *(qwix_array.QArray(q.qvalue, q.scale) for q in ours), ROWS_BY_COLUMNS
        )
    ours = mt.dot_general(*ours, ROWS_BY_COLUMNS)
    assert error(ours, exact) < 0.8 * error(theirs, exact)


def test_nf4_in_ragged_dot():
    """Qwix multiplies indices of the table."""
    rng = np.random.default_rng(6)
    x, w = data(rng, (8, 32), "float32"), data(rng, (2, 32, 4), "float32")
    sizes = jnp.array([3, 5], jnp.int32)
    ours = [mt.quantize(x, "nf4", channelwise_axes=[0]), mt.quantize(w, "nf4", channelwise_axes=[2])]  # fmt: skip
    with peer.manners():
        parts = [qwix_array.QArray(q.qvalue, q.scale, None, "nf4") for q in ours]
        theirs = qwix_ragged.ragged_dot(*parts, sizes)
    exact = lax.ragged_dot(*map(mt.dequantize, ours), sizes)
    assert error(mt.ragged_dot(*ours, sizes), exact) < 1e-5
    assert error(theirs, exact) > 1


def test_asymmetric_operands_meet():
    """Two zero points, which Qwix refuses."""
    rng = np.random.default_rng(7)
    x, w = data(rng, (8, 32), "float32"), data(rng, (32, 4), "float32")
    ours = [mt.quantize(v, "int8", calibration_method="minmax") for v in (x, w)]
    with peer.manners(), pytest.raises(ValueError, match="asymmetric"):
        parts = [qwix_array.QArray(q.qvalue, q.scale, q.zero_point) for q in ours]
        qwix_dot_general.dot_general(*parts, ROWS_BY_COLUMNS)
    exact = np.matmul(*(np.asarray(mt.dequantize(q), np.float64) for q in ours))
    assert error(mt.dot_general(*ours, ROWS_BY_COLUMNS), exact) < 1e-6
