"""Many rows against a stored weight on Hopper: hopper_prefill as a function of JAX, or why not.

A weight [K, N], as Flax stores it, is decoded on the way into the tensor cores. XLA would
decode all of it first: 70 us for int8 [4096, 14336] on an H200, where 128 rows in bfloat16
take 31. Scales are applied inside and the result leaves in the caller's dtype: with many
rows another pass over it would cost more than the decoding.

    weight    rows in bfloat16
    codes     rows of codes by codes, 8 bits both; scaled_matmul/adapter.py says what may be multiplied
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from midtread.kernels.hopper import decoding
from midtread.kernels.partition import as_function
from midtread.kernels.weight_matmul.few_rows import WEIGHTS
from midtread.kernels.weight_matmul.hopper_prefill import tuned as prefill_tuned
from midtread.kernels.weight_matmul.hopper_prefill.kernel import prefill_matmul
from midtread.numerics import views
from midtread.numerics.formats import as_format
from midtread.numerics.rounding import decode


def why_not(fmt, shape, summed: int, rows: int, scale, dtypes) -> str | None:
    """Why the kernel cannot take this weight; None if it can.

    Args:
        shape: of the codes as a matrix; `summed` is the axis that is summed.
        scale: [groups, N], one group where it is the same for the whole sum.
        dtypes: of the other operand and of the result.
    """
    if fmt.name not in WEIGHTS:
        return f"{fmt.name} has no kernel: {', '.join(WEIGHTS)} have"
    if np.dtype(dtypes[0]).name != "bfloat16":
        return f"the other operand is {np.dtype(dtypes[0])}, not bfloat16"
    if np.dtype(dtypes[1]).name not in ("bfloat16", "float32"):
        return f"the result is {np.dtype(dtypes[1])}, not bfloat16 or float32"
    if summed != 0:
        return "more than 64 rows, and stored with its summed axis innermost"
    group = _group(shape, scale)
    if group and scale.dtype != jnp.bfloat16:
        return f"scales of groups are {scale.dtype}: the kernel has bfloat16 ones"
    if group and scale.shape[1] not in (1, shape[1]):
        return f"scales of extents {scale.shape} on {shape} codes"
    if prefill_tuned.prefill_blocks(fmt, rows, shape, group, dtypes) is None:
        return f"{shape} codes in groups of {group} do not divide into blocks"
    return None


def _group(shape, scale) -> int | None:
    return None if scale.shape[0] == 1 else shape[0] // scale.shape[0]


def weight(x_MK, codes_KN, scale, fmt, dtype, interpret: bool) -> jax.Array:
    """[M, N] in `dtype`, scaled; `scale` as in `why_not`."""
    n = codes_KN.shape[1]
    scale = jnp.broadcast_to(scale, (scale.shape[0], n))
    if scale.shape[0] == 1:
        scale = scale.astype(jnp.float32)
    call = _call(fmt, scale.shape[0] > 1, jnp.dtype(dtype), interpret)
    return call(x_MK, codes_KN, scale)


@functools.cache
def _call(fmt, is_grouped: bool, dtype, interpret: bool) -> Callable:

    def plain(x, codes, scale):
        values = decode(codes, fmt).astype(jnp.float32)
        if is_grouped:
            factor = scale.astype(jnp.float32)
            values = views.broadcast_with(jnp.multiply, values, factor)
        numbers = (((1,), (0,)), ((), ()))
        how = {"preferred_element_type": jnp.float32}
        out = lax.dot_general(x, values.astype(x.dtype), numbers, **how)
        return (out if is_grouped else out * scale).astype(dtype)

    def kernel(x, codes, scale):
        group = _group(codes.shape, scale)
        dtypes = x.dtype, dtype
        blocks = prefill_tuned.prefill_blocks(
            fmt, x.shape[0], codes.shape, group, dtypes
        )
        if blocks is None:  # a device's part of a sharded weight may be too narrow
            return plain(x, codes, scale)
        how = {"fmt": fmt, "dtype": dtype, "blocks": blocks, "interpret": interpret}
        return prefill_matmul(x, decoding.as_bytes(codes), scale, **how)

    axes = "m k, k n, g n -> m n"
    return as_function(kernel, plain, axes, ("k", "g"), can_place=not interpret)


def codes(x_MK, w_KN, rows_M, columns_N, dtype, interpret: bool) -> jax.Array | None:
    """[M, N] of codes and their scales in float32; None if no block divides the weight."""
    fmt, dtypes = as_format(w_KN.dtype.name), (x_MK.dtype, jnp.dtype(dtype))
    if (
        prefill_tuned.prefill_blocks(fmt, x_MK.shape[0], w_KN.shape, None, dtypes)
        is None
    ):
        return None
    return _codes_call(fmt, dtypes[1], interpret)(x_MK, w_KN, rows_M, columns_N)


@functools.cache
def _codes_call(fmt, dtype, interpret: bool) -> Callable:

    def plain(x, w, rows, columns):
        numbers = (((1,), (0,)), ((), ()))
        wide = jnp.int32 if jnp.issubdtype(x.dtype, jnp.integer) else jnp.float32
        out = lax.dot_general(x, w, numbers, preferred_element_type=wide)
        return (out.astype(jnp.float32) * rows[:, None] * columns).astype(dtype)

    def kernel(x, w, rows, columns):
        dtypes = x.dtype, dtype
        blocks = prefill_tuned.prefill_blocks(fmt, x.shape[0], w.shape, None, dtypes)
        if blocks is None:  # a device's part of a sharded weight may be too narrow
            return plain(x, w, rows, columns)
        how = {"fmt": fmt, "dtype": dtype, "blocks": blocks, "interpret": interpret}
        scale = columns.reshape(1, -1)
        return prefill_matmul(x, decoding.as_bytes(w), scale, rows, **how)

    axes = "m k, k n, m, n -> m n"
    return as_function(kernel, plain, axes, ("k",), can_place=not interpret)
