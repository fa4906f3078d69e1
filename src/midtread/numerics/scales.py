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

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from midtread.numerics.calibration import Range
from midtread.numerics.dtypes import wide_dtype
from midtread.numerics.formats import Format, as_format
from midtread.numerics.rounding import encode

_E4M3_MAX = 448.0


class Scales(NamedTuple):
    """What turns codes into values."""

    scale: jax.Array
    zero_point: jax.Array | None = None
    global_scale: jax.Array | None = None  # two_level only: scale = block level * this


def compute_scales(range_: Range, fmt: Format, rule: str | None = None) -> Scales:
    """Turns a range into scales of its own dtype and shape."""
    dtype = next(iter(range_.values())).dtype
    if dtype == jnp.float16:  # too few exponents for max - min, and for small scales
        range_ = {k: v.astype(jnp.float32) for k, v in range_.items()}
    if "absmax" not in range_:
        return _asymmetric(range_, fmt, dtype)
    absmax = range_["absmax"]
    rule = rule or fmt.scale
    if rule == "two_level":
        return _two_level(absmax, fmt, dtype)
    raw = _over(absmax, fmt.bound)
    scale = _alive(raw)
    if rule is not None:
        power = SCALE_RULES[rule](scale, absmax, fmt)
        scale = jnp.where((scale == raw) & jnp.isfinite(raw), power, scale)
    return Scales(_narrow(scale, dtype))


def _over(x: jax.Array, divisor: float) -> jax.Array:
    """Divides by multiplying with the reciprocal. XLA does so in some contexts (a broadcast
    or constant divisor) and not in others, and a scale's bits must not depend on that."""
    wide = wide_dtype(x.dtype)
    return (x.astype(wide) * np.asarray(1 / divisor, wide)).astype(x.dtype)


def _alive(scale: jax.Array) -> jax.Array:
    """Gives a tile of zeros scale 1, because 0 / 0 would be nan."""
    tiny = jnp.sqrt(jnp.finfo(scale.dtype).tiny).astype(scale.dtype)
    return jnp.where(scale < tiny, jnp.ones_like(scale), scale)


def _narrow(scale: jax.Array, dtype) -> jax.Array:
    """Casts to the array's dtype. A scale that is subnormal in float16 is rounded up: as 0 it
    would lose the tile, and rounded down it would saturate the tile."""
    if dtype == jnp.float16:
        subnormal = jnp.ceil(scale * 2.0**24) * 2.0**-24
        scale = jnp.where(scale < 2.0**-14, subnormal, scale)
    return scale.astype(dtype)


def _asymmetric(range_: Range, fmt: Format, dtype) -> Scales:
    if fmt.codes is None:
        raise ValueError(
            f"{fmt.name} doesn't support asymmetric quantization: only integers have a "
            "zero point. Use a symmetric calibration such as 'absmax'."
        )
    low, high = fmt.codes
    span = range_["max"] - range_["min"]
    scale = _narrow(_alive(_over(span, high - low)), dtype)
    zero_point = low - range_["min"].astype(jnp.float32) / scale.astype(jnp.float32)
    return Scales(scale, encode(zero_point, fmt))


def _exponent(x: jax.Array) -> jax.Array:
    """Returns floor(log2 x), exactly."""
    return jnp.frexp(x.astype(jnp.float32))[1] - 1


def _power(exponent: jax.Array, dtype) -> jax.Array:
    return jnp.ldexp(jnp.ones_like(exponent, jnp.float32), exponent).astype(dtype)


def _pow2_ceil(scale, absmax, fmt):
    # log2 of a rounded quotient would not be exact; comparing mantissas in [1/2, 1) is.
    mantissa, exponent = jnp.frexp(absmax.astype(jnp.float32))
    bound_mantissa, bound_exponent = math.frexp(fmt.bound)
    carry = (mantissa > bound_mantissa).astype(exponent.dtype)
    return _power(exponent - bound_exponent + carry, scale.dtype)


def _pow2_floor(scale, absmax, fmt):
    exponent = _exponent(absmax) - (math.frexp(fmt.bound)[1] - 1)
    return _power(exponent, scale.dtype)


def _pow2_biased(scale, absmax, fmt):
    bias = 12 / 7 if fmt.bits == 4 else 60 / 31
    biased = (scale * jnp.asarray(bias, scale.dtype)).astype(jnp.bfloat16)
    return _power(_exponent(biased), scale.dtype)


def _two_level(absmax: jax.Array, fmt: Format, dtype) -> Scales:
    """Gives each block a scale in e4m3, and all of them one float32 scale, chosen so that
    the largest block scale is e4m3's largest number."""
    absmax = absmax.astype(jnp.float32)
    finite = jnp.isfinite(absmax)  # a tile with a nan must not make the tensor nan
    largest = jnp.max(jnp.where(finite, absmax, 0.0), keepdims=True)
    top = _alive(_over(largest, fmt.bound * _E4M3_MAX))
    block = _over(absmax, fmt.bound) / top
    smallest = 2.0**-9  # e4m3's least subnormal; with scale 0 a tile would be lost
    block = jnp.where(absmax > 0, jnp.clip(block, smallest, _E4M3_MAX), 1.0)
    block = jnp.where(finite, block, jnp.nan)
    block = encode(block, as_format("e4m3")).astype(jnp.float32)
    return Scales(_narrow(block * top, dtype), None, top)


SCALE_RULES = {
    "pow2_ceil": _pow2_ceil,
    "pow2_floor": _pow2_floor,
    "pow2_biased": _pow2_biased,
    "two_level": _two_level,
}
