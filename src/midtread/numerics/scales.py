"""Scales: from a range to a scale and a zero point.

    symmetric    scale = absmax / bound                       x ~ code * scale
    asymmetric   scale = (max - min) / (high - low)           x ~ (code - zero_point) * scale
                 zero_point = round(low - min / scale)

A format may ask for scales that are numbers of a smaller system. `SCALE_RULES` holds
the ways to get there; `Spec.scale_rule` picks another than the format's own.

    pow2_ceil    2^ceil(log2 s)           nothing saturates (Qwix 0.1.8)
    pow2_floor   2^(floor(log2 absmax) - floor(log2 bound))    OCP MX 1.0, section 6.3
    pow2_biased  2^floor(log2(c s)), c = 60/31 or 12/7         later Qwix: fewer unused codes
    two_level    e4m3 per tile times one float32 per tensor    NVFP4
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from midtread.numerics.calibration import Range
from midtread.numerics.formats import Format
from midtread.numerics.rounding import encode

_E4M3_MAX = 448.0


class Scales(NamedTuple):
    scale: jax.Array
    zero_point: jax.Array | None = None
    global_scale: jax.Array | None = None  # two_level only: scale = block level * this


def compute_scales(range_: Range, fmt: Format, rule: str | None = None) -> Scales:
    """Scales in the range's own dtype and shape."""
    if "absmax" not in range_:
        return _asymmetric(range_, fmt)
    absmax = range_["absmax"]
    scale = absmax / jnp.asarray(fmt.bound, absmax.dtype)
    rule = rule or fmt.scale
    if rule is None:
        return Scales(_alive(scale, absmax, fmt.bound))
    if rule == "two_level":
        return _two_level(absmax, fmt)
    return Scales(SCALE_RULES[rule](_alive(scale, absmax, fmt.bound), fmt))


def _alive(scale: jax.Array, absmax: jax.Array, bound: float) -> jax.Array:
    """A dead tile has scale 1: 0 would give nan. float16 has few exponents, so there a
    small scale is rounded up to its next subnormal instead of being given up."""
    if scale.dtype == jnp.float16:
        exact = absmax.astype(jnp.float32) / bound
        subnormal = (jnp.ceil(exact * 2.0**24) * 2.0**-24).astype(jnp.float16)
        scale = jnp.where(exact < 2.0**-14, subnormal, scale)
        return jnp.where(scale == 0, jnp.ones_like(scale), scale)
    tiny = jnp.sqrt(jnp.finfo(scale.dtype).tiny).astype(scale.dtype)
    return jnp.where(scale < tiny, jnp.ones_like(scale), scale)


def _asymmetric(range_: Range, fmt: Format) -> Scales:
    if fmt.codes is None:
        raise ValueError(
            f"{fmt.name} doesn't support asymmetric quantization: only integers have a "
            "zero point. Use a symmetric calibration such as 'absmax'."
        )
    low, high = fmt.codes
    span = range_["max"] - range_["min"]
    scale = _alive(span / jnp.asarray(high - low, span.dtype), span, high - low)
    zero_point = low - range_["min"].astype(jnp.float32) / scale.astype(jnp.float32)
    return Scales(scale, encode(zero_point, fmt))


def _exponent(x: jax.Array) -> jax.Array:
    """floor(log2 x), exactly."""
    return jnp.frexp(x.astype(jnp.float32))[1] - 1


def _power(exponent: jax.Array, dtype) -> jax.Array:
    return jnp.ldexp(jnp.ones(exponent.shape, jnp.float32), exponent).astype(dtype)


def _pow2_ceil(scale, fmt):
    mantissa, exponent = jnp.frexp(scale.astype(jnp.float32))  # mantissa in [1/2, 1)
    exponent = exponent - (mantissa == 0.5).astype(exponent.dtype)
    return _keep_nonfinite(_power(exponent, scale.dtype), scale)


def _pow2_floor(scale, fmt):
    # absmax = scale * bound; their exponents differ from the scale's by a carry
    absmax = scale.astype(jnp.float32) * fmt.bound
    exponent = _exponent(absmax) - int(_exponent(jnp.float32(fmt.bound)))
    return _keep_nonfinite(_power(exponent, scale.dtype), scale)


def _pow2_biased(scale, fmt):
    bias = 12 / 7 if fmt.bits == 4 else 60 / 31
    biased = (scale * jnp.asarray(bias, scale.dtype)).astype(jnp.bfloat16)
    return _keep_nonfinite(_power(_exponent(biased), scale.dtype), scale)


def _keep_nonfinite(power, scale):
    return jnp.where(jnp.isfinite(scale), power, scale)


def _two_level(absmax: jax.Array, fmt: Format) -> Scales:
    """Block scales in e4m3 over one float32 scale that uses their whole range."""
    absmax32 = absmax.astype(jnp.float32)
    top = _alive(
        jnp.max(absmax32, keepdims=True) / (fmt.bound * _E4M3_MAX), absmax32, 1.0
    )
    block = absmax32 / fmt.bound / top
    smallest = 2.0**-9  # e4m3's least subnormal: a live tile must not get scale 0
    block = jnp.where(absmax32 > 0, jnp.clip(block, smallest, _E4M3_MAX), 1.0)
    block = jnp.where(jnp.isfinite(absmax32), block, absmax32)
    block = block.astype(jnp.float8_e4m3fn).astype(jnp.float32)
    return Scales((block * top).astype(absmax.dtype), None, top)


SCALE_RULES = {
    "pow2_ceil": _pow2_ceil,
    "pow2_floor": _pow2_floor,
    "pow2_biased": _pow2_biased,
    "two_level": _two_level,
}
