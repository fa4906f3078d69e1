"""XLA: multiplies every pair of operand types on every backend.

lax.dot_general and its kin take a pair of dtypes that the backend may not be able to
multiply (int4 x int4 on a CPU), or multiplies by a detour. Here both operands are cast to a
type that has all of their values and that the backend computes in:

    int4 int2 uint4 uint2   ->  int8          (TPUs multiply int4 as it is)
    float4                  ->  float8_e4m3fn, which contains it
    integer x small float   ->  bfloat16, exact for 8 bits
    code x wide float       ->  the wide float
    int16                   ->  float32 at the highest precision: int32 would overflow

so a result never depends on the detour, only the time does.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from midtread.kernels import cpu
from midtread.numerics.dtypes import is_wide
from midtread.numerics.formats import dtype_bits
from midtread.numerics.platforms import platform
from midtread.numerics.rounding import unpacked


def operand_dtypes(lhs: Any, rhs: Any, mixed: bool = True) -> tuple[np.dtype, np.dtype]:
    """Returns the dtypes to multiply in, exact for both operands; `mixed` if they may differ."""
    pair = np.dtype(lhs), np.dtype(rhs)
    wide = [d for d in pair if is_wide(d)]
    if wide:
        common = max(wide, key=lambda d: d.itemsize)
        if common.itemsize == 2 and is_int16(*pair):
            common = np.dtype(jnp.float32)
        return (common, common) if len(wide) == 1 else pair
    integer = [jnp.issubdtype(d, jnp.integer) for d in pair]
    if any(dtype_bits(d) > 8 for d in pair):
        return (
            (np.dtype(jnp.float32),) * 2
            if is_int16(*pair)
            else (np.dtype(jnp.int32),) * 2
        )
    if all(integer):
        if pair[0] == pair[1] and platform() == "tpu" and dtype_bits(pair[0]) == 4:
            return pair
        narrow = np.dtype(jnp.int32 if np.dtype(jnp.uint8) in pair else jnp.int8)
        return narrow, narrow
    if any(integer):
        return (np.dtype(jnp.bfloat16),) * 2
    fp8 = np.dtype(jnp.float8_e4m3fn)
    left, right = (fp8 if dtype_bits(d) < 8 else d for d in pair)
    if left != right and not mixed:
        return (np.dtype(jnp.bfloat16),) * 2
    return left, right


def is_int16(*dtypes: Any) -> bool:
    return any(np.dtype(d) == jnp.int16 for d in dtypes)


def _prepare(lhs, rhs, precision, accumulate, mixed=True):
    left, right = operand_dtypes(lhs.dtype, rhs.dtype, mixed)
    if platform() == "cpu" and accumulate == jnp.float32 and left.itemsize == 2:
        # bf16 x bf16 -> f32 is not implemented for every layout (jax 0.10.2 to 0.12).
        left = right = np.dtype(jnp.float32)
    if is_int16(lhs.dtype, rhs.dtype):
        precision, accumulate = lax.Precision.HIGHEST, jnp.float32
    lhs, rhs = unpacked(lhs).astype(left), unpacked(rhs).astype(right)
    return lhs, rhs, precision, accumulate


def dot_general(
    lhs, rhs, numbers, *, precision=None, preferred_element_type=None, out_sharding=None
) -> jax.Array:
    """Does what lax.dot_general does, for any two operand types."""
    accumulate = preferred_element_type
    if platform() == "cpu" and accumulate == jnp.int32 and out_sharding is None:
        out = cpu.dot_codes(lhs, rhs, numbers)
        if out is not None:
            return out
    lhs, rhs, precision, accumulate = _prepare(lhs, rhs, precision, accumulate)
    return lax.dot_general(
        lhs, rhs, numbers, precision, accumulate, out_sharding=out_sharding
    )


def _of_one_dtype(op: Callable) -> Callable:
    """Makes of a function of jax.lax one that takes any two operand types, and multiplies both
    in the same type."""

    @functools.wraps(op)
    def run(
        lhs, rhs, *rest, precision=None, preferred_element_type=None, out_sharding=None
    ):
        lhs, rhs, precision, accumulate = _prepare(
            lhs, rhs, precision, preferred_element_type, mixed=False
        )
        return op(
            lhs,
            rhs,
            *rest,
            precision=precision,
            preferred_element_type=accumulate,
            out_sharding=out_sharding,
        )

    return run


ragged_dot_general = _of_one_dtype(lax.ragged_dot_general)
conv_general_dilated = _of_one_dtype(lax.conv_general_dilated)
