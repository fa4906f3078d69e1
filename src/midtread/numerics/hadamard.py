"""Hadamard rotations: spread an outlier over its neighbours before rounding.

R = H D / sqrt(n), with H the n x n Hadamard matrix of +-1 and D random signs, is
orthogonal: rotating both operands of a matmul along the axis it sums changes nothing
but the rounding, since (R x) . (R y) = x . y.
"""

import jax
import jax.numpy as jnp
import numpy as np

from midtread.numerics.rounding import uniform


def matrix(size: int) -> np.ndarray:
    """Makes Sylvester's Hadamard matrix, [size, size]; `size` is a power of two.

    >>> matrix(2).tolist()
    [[1.0, 1.0], [1.0, -1.0]]
    """
    if size < 1 or size & (size - 1):
        raise ValueError(f"a Hadamard matrix needs a power of two, not {size}.")
    h = np.ones((1, 1), np.float32)
    while len(h) < size:
        h = np.block([[h, h], [h, -h]])
    return h


def rotate(
    x: jax.Array, size: int, key: jax.Array, axis: int = -1, site=()
) -> jax.Array:
    """Rotates `x` along `axis` in runs of `size`, padded with zeros to whole runs."""
    x = jnp.moveaxis(x, axis, -1)
    pad = -x.shape[-1] % size
    runs = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, pad)])
    runs = runs.reshape(*x.shape[:-1], -1, size).astype(jnp.float32)
    signs = jnp.where(uniform(key, (size,), site) < 0.5, -1.0, 1.0)
    rotated = (runs * signs) @ jnp.asarray(matrix(size)) * size**-0.5
    rotated = rotated.reshape(*x.shape[:-1], -1).astype(x.dtype)
    return jnp.moveaxis(rotated, -1, axis)
