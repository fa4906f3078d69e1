"""From a range to a scale: guards, powers of two, two levels, and how they are stored."""

from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from midtread.numerics.formats import FORMATS
from midtread.numerics.qarray import dequantize
from midtread.numerics.scales import compute_scales
from tests.support import f64
from tests.support import quantize_in_jit as quantize

DTYPES = [jnp.float32, jnp.bfloat16, jnp.float16]
MX = [f for f in FORMATS.values() if f.scale == "pow2_ceil"]


def scales(absmax, fmt, rule=None, dtype=jnp.float32):
    return f64(compute_scales({"absmax": jnp.asarray(absmax, dtype)}, fmt, rule).scale)


def relative_error(x, q):
    return np.linalg.norm(f64(dequantize(q)) - f64(x)) / np.linalg.norm(f64(x))


# --- guards -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("qtype", ["int8", "float8_e4m3fn", "nf4", "mxfp4", "nvfp4"])
def test_a_dead_tile_has_scale_one(qtype, dtype):
    fmt = FORMATS[qtype]
    q = quantize(
        jnp.zeros((2, 64), dtype),
        qtype,
        channelwise_axes=[0],
        tiled_axes={1: fmt.tile or 32},
    )
    assert (f64(q.scale) == 1).all()
    assert (f64(dequantize(q)) == 0).all()


@pytest.mark.parametrize("power", [-12, 30])
@pytest.mark.parametrize("qtype", ["int8", "float8_e4m3fn", "float8_e5m2", "nf4"])
def test_error_is_relative_over_forty_decades(qtype, power, key):
    x = jax.random.normal(key, (64, 64))
    big = x * jnp.float32(10.0**power)
    here = relative_error(big, quantize(big, qtype, channelwise_axes=[0]))
    at_one = relative_error(x, quantize(x, qtype, channelwise_axes=[0]))
    assert here == pytest.approx(at_one, rel=0.05)


def test_below_the_guard_everything_is_zero(key):
    """The documented floor of float32: a scale under 2^-63 counts as a dead tile."""
    x = jax.random.normal(key, (64,)) * 1e-30
    q = quantize(x, "int8")
    assert q.scale == 1 and not f64(q.qvalue).any()


@pytest.mark.parametrize("size", [1e-6, 1e-5, 1e-4, 1e-3, 1e-2])
@pytest.mark.parametrize("qtype", ["int8", "int4", "float8_e4m3fn", "mxfp8", "nvfp4"])
def test_small_float16_numbers_quantize_as_well_as_float32(qtype, size, key):
    tiles = {1: FORMATS[qtype].tile or 64}
    x = (jax.random.normal(key, (16, 64)) * size).astype(jnp.float16)
    x32 = x.astype(jnp.float32)
    how = {"channelwise_axes": [0], "tiled_axes": tiles}
    half = relative_error(x, quantize(x, qtype, **how))
    wide = relative_error(x32, quantize(x32, qtype, **how))
    # the result is float16 again, and a subnormal scale may be up to twice too coarse
    assert half <= 1.25 * wide + 2**-10


def test_a_wide_float16_span_does_not_overflow():
    x = jnp.array([-6e4, -1.0, 3.0, 6e4], jnp.float16)  # max - min is beyond float16
    q = quantize(x, "int8", calibration_method="minmax")
    np.testing.assert_allclose(f64(dequantize(q)), f64(x), atol=6e4 / 127)


# --- powers of two ----------------------------------------------------------------------------


def exact_exponent(value: Fraction) -> int:
    """floor(log2 value)."""
    exponent = value.numerator.bit_length() - value.denominator.bit_length()
    return exponent if Fraction(2) ** exponent <= value else exponent - 1


def ceil_rule(absmax, fmt):
    value = absmax / Fraction(fmt.bound)
    floor = exact_exponent(value)
    return floor if value == Fraction(2) ** floor else floor + 1


def floor_rule(absmax, fmt):
    return exact_exponent(absmax) - exact_exponent(Fraction(fmt.bound))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fmt", MX, ids=repr)
@pytest.mark.parametrize(
    "rule, exponent", [("pow2_ceil", ceil_rule), ("pow2_floor", floor_rule)]
)
def test_pow2_scales_are_exact(fmt, rule, exponent, dtype):
    """At, just below and just above every power of two and every power times the bound."""
    lowest = -3 if dtype == jnp.float16 else -20  # float16 scales end at 2^-24
    powers = 2.0 ** np.arange(lowest, 8)
    at = np.concatenate([powers, powers * fmt.bound / 2.0**8]).astype(dtype)
    big = np.array(np.inf, dtype)
    absmax = np.concatenate([at, np.nextafter(at, big), np.nextafter(at, -big)])
    got = scales(absmax, fmt, rule, dtype)
    want = [exponent(Fraction(float(a)), fmt) for a in absmax]
    np.testing.assert_array_equal(
        got, np.maximum(np.exp2(want), 2.0**-24 * (dtype == jnp.float16))
    )


@pytest.mark.parametrize(
    "qtype, absmax, want",
    [
        ("mxfp4", 6.5, 1.0),
        ("mxfp4", 7.5, 2.0),
        ("mxfp8", 460, 1.0),
        ("mxfp8", 465, 2.0),
    ],
)
def test_biased_rule_matches_published_values(qtype, absmax, want):
    assert scales([absmax], FORMATS[qtype], "pow2_biased") == want


@pytest.mark.parametrize("fmt", MX, ids=repr)
def test_ceil_never_saturates_and_floor_wastes_nothing(fmt, key):
    absmax = jnp.exp(jax.random.normal(key, (4096,)) * 5)
    ceil, floor = (
        f64(absmax) / scales(absmax, fmt, r) for r in ("pow2_ceil", "pow2_floor")
    )
    assert (ceil <= fmt.bound).all() and (ceil > fmt.bound / 2).all()
    binade = 2.0 ** exact_exponent(Fraction(fmt.bound))
    assert (floor >= binade).all() and (floor < 2 * binade).all()


# --- two levels -------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1e-6, 1e-3, 1.0, 1e3, 1e6])
def test_nvfp4_error_over_twelve_decades(size, key):
    x = jax.random.normal(key, (64, 64)) * jnp.float32(size)
    q = quantize(x, "nvfp4", channelwise_axes=[0], tiled_axes={1: 16})
    assert relative_error(x, q) <= 0.12


def test_nvfp4_levels_multiply_to_the_scale(key):
    x = jax.random.normal(key, (8, 64)) * jnp.exp2(jnp.arange(8.0))[:, None]
    how = {"channelwise_axes": [0], "tiled_axes": {1: 16}}
    wide = quantize(x, "nvfp4", **how)
    two = quantize(x, "nvfp4", scale_dtype="e4m3", **how)
    assert two.scale.dtype == jnp.float8_e4m3fn and two.global_scale.shape == (1, 1)
    assert f64(two.scale).max() == 448  # the whole range of the block level is used
    np.testing.assert_array_equal(
        f64(two.scale.astype(jnp.float32) * two.global_scale), f64(wide.scale)
    )
    np.testing.assert_array_equal(f64(two.qvalue), f64(wide.qvalue))
    np.testing.assert_allclose(f64(dequantize(two)), f64(dequantize(wide)), rtol=3e-7)


def test_a_poisoned_tile_does_not_reach_the_global_scale():
    absmax = jnp.array([6.0, np.nan, np.inf, 3.0])
    got = scales(absmax, FORMATS["nvfp4"])
    assert np.isnan(got[1:3]).all() and np.isfinite(got[[0, 3]]).all()


# --- storage ----------------------------------------------------------------------------------


@pytest.mark.parametrize("qtype", ["mxfp8", "mxfp6", "mxfp4"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_e8m0_scales_lose_nothing(qtype, dtype, key):
    x = (jax.random.normal(key, (4, 64)) * 1e-3).astype(dtype)
    how = {"channelwise_axes": [0], "tiled_axes": {1: 32}}
    wide, small = (
        quantize(x, qtype, **how),
        quantize(x, qtype, scale_dtype="e8m0", **how),
    )
    assert (
        small.scale.dtype == jnp.float8_e8m0fnu
        and small.scale.nbytes == small.scale.size
    )
    np.testing.assert_array_equal(
        f64(dequantize(small, jnp.float32)), f64(dequantize(wide, jnp.float32))
    )


@pytest.mark.parametrize(
    "qtype, scale_dtype",
    [("int8", "e8m0"), ("mxfp8", "e4m3"), ("nvfp4", "e8m0"), ("int8", jnp.int8)],
)
def test_scales_that_do_not_fit_are_refused(qtype, scale_dtype):
    tiles = {0: FORMATS[qtype].tile or 16}
    with pytest.raises(ValueError, match="scale"):
        quantize(jnp.ones(32), qtype, tiled_axes=tiles, scale_dtype=scale_dtype)


# --- zero points ------------------------------------------------------------------------------


def test_asymmetric_uses_every_code():
    x = jnp.arange(256, dtype=jnp.float32) / 255
    q = quantize(x, "int8", calibration_method="minmax")
    assert f64(q.qvalue).tolist() == list(range(-128, 128))
    assert f64(q.zero_point) == -128
    assert q.zero_point.dtype == jnp.int8


@pytest.mark.parametrize("qtype", ["int2", "int4", "int7", "uint4", "uint8", "int16"])
def test_zero_is_a_code_of_an_asymmetric_range(qtype, key):
    x = (jax.random.uniform(key, (256,)) + 0.5).at[0].set(0)
    q = quantize(x, qtype, calibration_method="minmax")
    assert dequantize(q)[0] == 0
    step = float(q.scale[0])
    np.testing.assert_allclose(f64(dequantize(q)), f64(x), atol=0.501 * step)


@pytest.mark.parametrize("qtype", ["float8_e4m3fn", "nf4", "int1", "float6_e2m3fn"])
def test_only_integers_have_a_zero_point(qtype):
    with pytest.raises(ValueError, match="doesn't support asymmetric"):
        quantize(jnp.ones(4), qtype, calibration_method="minmax")
    with pytest.raises(ValueError, match="doesn't support asymmetric"):
        compute_scales({"min": -jnp.ones(1), "max": jnp.ones(1)}, FORMATS[qtype])
