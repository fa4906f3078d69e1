"""Shared memory of a Hopper multiprocessor: how much there is, and in which order it is used.

The copy engine (TMA) and the tensor cores agree on tiles of 8 rows in which units of 16 bytes
are permuted by row, so that reading along either axis meets every memory bank once.
"""

import functools

import jax.numpy as jnp

from midtread.kernels.pallas_compat import plgpu

SHARED = 226 * 1024  # bytes that a program may use; 1 kB more is for barriers


@functools.cache
def swizzled(columns: int, dtype) -> tuple:
    """Returns the transforms of a block that the copy engine writes and tensor cores read."""
    bits = jnp.dtype(dtype).itemsize * 8
    swizzle = plgpu.find_swizzle(columns * bits)
    return (
        plgpu.TilingTransform((8, swizzle * 8 // bits)),
        plgpu.SwizzleTransform(swizzle),
    )
