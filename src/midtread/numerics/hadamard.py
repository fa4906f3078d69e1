"""Hadamard rotations: spread an outlier over its neighbours before rounding.

R = H D / sqrt(n), with H the n x n Hadamard matrix of +-1 and D random signs, is
orthogonal: rotating both operands of a matmul along the axis it sums changes nothing
but the rounding, since (R x) . (R y) = x . y.

    rotate(x, size, key)    with random signs, in runs of `size`: for gradients
    turn(x, signs)          with signs that are given, as a served weight keeps them
    turn_back(w, signs)     its inverse, along the weight's axis
"""

from collections.abc import Callable, Sequence

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


def axis_of(shape: Sequence[int]) -> int | None:
    """Returns the axis along which signs of this shape run: the last one with several. Those
    before it count the layers of a stack, each with signs of its own.

    >>> axis_of((1, 8, 1)), axis_of((3, 8, 1)), axis_of((1, 1))
    (1, 1, None)
    """
    return max((axis for axis, n in enumerate(shape) if n > 1), default=None)


def turn(x: jax.Array, signs: jax.Array) -> jax.Array:
    """Multiplies `x` by diag(signs) H / sqrt(n), in runs of n along the axis (`axis_of`)
    where `signs`, of x's rank, has n elements.

    >>> turn(jnp.array([1.0, 0.0]), jnp.array([1.0, -1.0])).round(3).tolist()
    [0.7070000171661377, 0.7070000171661377]
    """
    return _runs(x, signs, lambda runs, signs: _transform(runs * signs))


def turn_back(x: jax.Array, signs: jax.Array) -> jax.Array:
    """Inverts `turn`: it multiplies by H diag(signs) / sqrt(n)."""
    return _runs(x, signs, lambda runs, signs: _transform(runs) * signs)


def _runs(x: jax.Array, signs: jax.Array, turned: Callable) -> jax.Array:
    axis = axis_of(signs.shape)
    if axis is None:
        return x * signs.astype(x.dtype)
    moved, size = jnp.moveaxis(x, axis, -1), signs.shape[axis]
    runs = moved.reshape(*moved.shape[:-1], -1, size).astype(jnp.float32)
    each = jnp.moveaxis(signs, axis, -1)[..., None, :]
    out = turned(runs, each.astype(jnp.float32))
    return jnp.moveaxis(out.reshape(moved.shape).astype(x.dtype), -1, axis)


def _transform(x: jax.Array) -> jax.Array:
    """Returns H x / sqrt(n) along the last axis, by log2(n) rounds of sums and differences."""
    shape, width = x.shape, 1
    size = shape[-1]
    while width < size:
        pairs = x.reshape(*shape[:-1], -1, 2, width)
        a, b = pairs[..., 0, :], pairs[..., 1, :]
        x = jnp.stack([a + b, a - b], axis=-2).reshape(shape)
        width *= 2
    return x * size**-0.5


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
