"""Few rows against a stored weight on NVIDIA GPUs: which kernel, or the reason why not.

    stored [K, N] as Flax does     hopper_decode on Hopper, from bfloat16 and in whole blocks;
                                   else triton.py, by Triton
    stored [N, K] (a tied head)    triton.py, 8-bit codes

Codes are read where they lie: no weight is prepared or moved for a kernel.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from midtread.kernels.hopper import decoding
from midtread.kernels.partition import as_function
from midtread.kernels.weight_matmul import triton as weight_triton
from midtread.kernels.weight_matmul import triton_tuned
from midtread.kernels.weight_matmul.hopper_decode import kernel as decode_kernel
from midtread.kernels.weight_matmul.hopper_decode import tuned as decode_tuned
from midtread.numerics import views
from midtread.numerics.formats import dtype_bits
from midtread.numerics.rounding import decode

WEIGHTS = ("int8", "float8_e4m3fn", "float8_e5m2", "int4", "nf4")
MAX_ROWS = 64


def why_not_weight(
    fmt, shape, summed: int, rows: int, counts, dtype, hopper: bool = False
) -> str | None:
    """Why the kernels for few rows cannot take this weight; None if one can.

    Args:
        shape: of the codes as a matrix; `summed` is the axis that is summed.
        counts: extents of the scale within the sum, (1, 1) for none.
        hopper: whether the device has wgmma.
    """
    if fmt.name not in WEIGHTS:
        return f"{fmt.name} has no kernel: {', '.join(WEIGHTS)} have"
    if np.dtype(dtype).name not in ("bfloat16", "float16"):
        return f"the other operand is {np.dtype(dtype)}, not bfloat16 or float16"
    if not 0 < rows <= MAX_ROWS:
        return f"{rows} rows: the kernel is for {MAX_ROWS} at most"
    if summed != 0:
        if dtype_bits(fmt.dtype) < 8 or tuple(counts) != (1, 1):
            return "4-bit or tiled, and stored with its summed axis innermost"
        if weight_triton.transposed_blocks(rows, shape) is None:
            return f"{shape} codes do not divide into blocks"
        return None
    planes = 8 // dtype_bits(fmt.dtype)
    if shape[1] % planes or counts[1] not in (1, shape[1]):
        return f"scales of extents {counts} on {shape} codes"
    if hopper and why_not_stream(fmt, shape, rows, counts, dtype) is None:
        return None
    group = None if counts[0] == 1 else shape[0] // counts[0]
    stored = shape[0], shape[1] // planes
    if triton_tuned.weight_blocks(fmt, rows, stored, group) is None:
        return f"{shape} codes do not divide into blocks"
    return None


def why_not_stream(fmt, shape, rows: int, counts, dtype) -> str | None:
    """Why Hopper's kernel cannot take a weight [K, N] of a known format."""
    if np.dtype(dtype).name != "bfloat16":
        return f"the other operand is {np.dtype(dtype)}, not bfloat16"
    group = None if counts[0] == 1 else shape[0] // counts[0]
    if decode_tuned.decode_blocks(fmt, rows, shape, group) is None:
        return f"{shape} codes in groups of {group} do not divide into blocks"
    return None


def weight(
    x_MK, codes_KN, inner, last, fmt, summed: int, dtype, interpret: bool, hopper=False
) -> jax.Array:
    """[M, N] in `dtype`, scaled: by columns in float32, by groups as the kernel does it.

    Args:
        inner: the scale within the sum, [groups, N or 1].
        last: the scale after the sum, [N]; one of the two at most.
    """
    counts = (1, 1) if inner is None else inner.shape
    how = (fmt, codes_KN.shape, x_MK.shape[0], counts, x_MK.dtype)
    if summed == 0 and hopper and why_not_stream(*how) is None:
        is_grouped, is_scaled = inner is not None, last is not None
        if is_grouped:
            inner = jnp.broadcast_to(inner, (inner.shape[0], codes_KN.shape[1]))
        scales = [readable(s) for s in (inner, last) if s is not None]
        dtype = np.dtype(dtype)
        kernel_dtype = dtype if dtype == jnp.bfloat16 else np.dtype(np.float32)
        call = _stream_call(fmt, is_grouped, is_scaled, kernel_dtype, interpret)
        return call(x_MK, codes_KN, *scales).astype(dtype)
    out = _by_triton(x_MK, codes_KN, inner, fmt, summed, interpret)
    return (out if last is None else out * last.astype(jnp.float32)).astype(dtype)


def readable(scale):
    """In one of the two types that the kernel reads."""
    return scale if scale.dtype == jnp.bfloat16 else scale.astype(jnp.float32)


def _by_triton(x_MK, codes_KN, inner, fmt, summed: int, interpret: bool) -> jax.Array:
    """[M, N] in float32, `inner` applied."""
    if summed != 0:
        return _turned_call(interpret)(x_MK, codes_KN)
    planes = 8 // dtype_bits(fmt.dtype)
    k, n = codes_KN.shape
    if planes > 1:
        pairs = codes_KN.reshape(k, n // planes, planes)
        codes_KN = lax.bitcast_convert_type(pairs, jnp.int8)  # free: the same bytes
    args = [x_MK, codes_KN]
    if inner is not None:
        inner = jnp.broadcast_to(inner, (inner.shape[0], n))
        inner = inner.reshape(-1, n // planes, planes).transpose(2, 0, 1)
        args.append(inner)
    out = _weight_call(fmt, inner is not None, interpret)(*args)
    return out.reshape(-1, n)


@functools.cache
def _turned_call(interpret: bool) -> Callable:
    def plain(x, codes):
        numbers = (((1,), (1,)), ((), ()))
        return lax.dot_general(
            x.astype(jnp.float32), codes.astype(jnp.float32), numbers
        )

    def kernel(x, codes):
        blocks = weight_triton.transposed_blocks(x.shape[0], codes.shape)
        return weight_triton.transposed_matmul(
            x, codes, blocks=blocks, interpret=interpret
        )

    return as_function(kernel, plain, "m k, n k -> m n", ("k",))


@functools.cache
def _stream_call(
    fmt, is_grouped: bool, is_scaled: bool, dtype, interpret: bool
) -> Callable:
    """Of x, codes, and a scale [G, N] of groups or [N] of columns, whichever there is."""
    assert not (is_grouped and is_scaled)

    def plain(x, codes, scale=None):
        values = decode(codes, fmt).astype(jnp.float32)
        if scale is not None:
            scale = scale.astype(jnp.float32).reshape(-1, codes.shape[1])
            values = views.broadcast_with(jnp.multiply, values, scale)
        numbers = (((1,), (0,)), ((), ()))
        out = lax.dot_general(x.astype(jnp.float32), values, numbers)
        return out.astype(dtype)

    def kernel(x, codes, scale=None):
        group = codes.shape[0] // scale.shape[0] if is_grouped else None
        blocks = decode_tuned.decode_blocks(fmt, x.shape[0], codes.shape, group)
        if blocks is None:  # a device's part of a sharded weight may be too narrow
            return plain(x, codes, scale)
        how = {"fmt": fmt, "blocks": blocks, "dtype": dtype, "interpret": interpret}
        scales = (None, scale) if is_scaled else (scale, None)
        return decode_kernel.decode_matmul(x, decoding.as_bytes(codes), *scales, **how)

    scale = ", g n" if is_grouped else ", n" if is_scaled else ""
    axes = f"m k, k n{scale} -> m n"
    replicated = ("k", "g") if is_grouped else ("k",)
    return as_function(kernel, plain, axes, replicated, can_place=not interpret)


@functools.cache
def _weight_call(fmt, is_grouped: bool, interpret: bool) -> Callable:
    planes = 8 // dtype_bits(fmt.dtype)

    def plain(x, codes, scale=None):
        values = codes
        if planes > 1:
            values = lax.bitcast_convert_type(codes, fmt.dtype)
        values = decode(values.reshape(*codes.shape, planes), fmt).astype(jnp.float32)
        if scale is not None:
            values = views.broadcast_with(
                jnp.multiply, values, scale.transpose(1, 2, 0).astype(jnp.float32)
            )
        numbers = (((1,), (0,)), ((), ()))
        return lax.dot_general(x.astype(jnp.float32), values, numbers)

    def kernel(x, codes, scale=None):
        group = None if scale is None else x.shape[1] // scale.shape[1]
        blocks = triton_tuned.weight_blocks(fmt, x.shape[0], codes.shape, group)
        return weight_triton.weight_matmul(
            x, codes, scale, fmt=fmt, blocks=blocks, interpret=interpret
        )

    axes = "m k, k b, p g b -> m b p" if is_grouped else "m k, k b -> m b p"
    replicated = ("k", "g", "p") if is_grouped else ("k",)
    return as_function(kernel, plain, axes, replicated)
