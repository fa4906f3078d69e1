"""Look-ups: rows of a quantized table.

    look_up(q, ids)            rows of codes and of their scales, dequantized afterwards
    learn_look_up(x, ids)      rows of a float table, rounded on the way out

A table has one scale per row (the axis looked up); tiles lie along the row. A row's scale
is its own, so rounding the rows that were asked for gives the same numbers as rounding the
table, at the cost of those rows. The gradient passes straight through, but not where a
calibration clips; a look-up's backward adds rows up, there is no matmul in it.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from midtread.numerics.qarray import (
    QArray,
    calibrate,
    dequantize,
    quantize_to_range,
)
from midtread.numerics.spec import Spec
from midtread.ops.contraction import dot
from midtread.ops.training import is_inside


def number_table_axes(spec: Spec, shape: Sequence[int], axis: int) -> Spec:
    """Puts axis numbers into `spec`, for a table of this shape looked up along `axis`.

    "kept" is the axis that is looked up, and "summed" are the row's axes.

    >>> number_table_axes(Spec("int4", ("kept",), {"summed": 32}), (100, 64), axis=0).tiles
    {1: 32}
    """
    # These are the axes of a table that is the right operand of a matmul over its rows.
    row = tuple(a for a in range(len(shape)) if a != axis)
    numbers = (tuple(range(len(row))), row), ((), ())
    c = dot(numbers, len(row), len(shape))
    return c.number_axes(spec, "rhs", shape)


def look_up(q: QArray, indices, axis: int = 0, **options) -> jax.Array:
    """Does what jnp.take does, from a quantized table."""
    extent = q.qvalue.shape[axis]
    tiled = any(p.shape[axis] not in (1, extent) for p in jax.tree.leaves(q))
    is_rotated = q.pre_rotation is not None
    if tiled or is_rotated or q.shape[axis] != extent or q.global_scale is not None:
        return jnp.take(dequantize(q), indices, axis, **options)
    indices = jnp.asarray(indices)

    def rows(part):
        if part.shape[axis] == extent:
            return jnp.take(part, indices, axis, **options)
        ones = (1,) * indices.ndim
        return part.reshape(*part.shape[:axis], *ones, *part.shape[axis + 1 :])

    logical = q.logical
    if logical is not None:
        free = (None,) * indices.ndim
        logical = (*logical[:axis], *free, *logical[axis + 1 :])
    return dequantize(q.map(rows, logical=logical))


def learn_look_up(table, spec: Spec, indices, axis: int = 0, **options) -> jax.Array:
    """Does what jnp.take does, from a float table that is rounded as `spec` says."""
    if axis not in spec.channelwise_axes:
        return jnp.take(_rounded(table, spec), indices, axis, **options)
    rows = jnp.take(table, indices, axis, **options)
    num = jnp.ndim(indices)
    moved = lambda a: a if a < axis else a + num - 1
    tiles = {moved(a % table.ndim): t for a, t in spec.tiled_axes}
    own = Spec(spec.format, range(axis, axis + num), tiles, spec.calibration)
    return _rounded(rows, own)


def _rounded(x: jax.Array, spec: Spec) -> jax.Array:
    fixed = jax.lax.stop_gradient(x)
    range_ = calibrate(fixed, spec)
    value = dequantize(quantize_to_range(fixed, spec, range_))
    inside = is_inside(fixed, range_) if spec.calibration.clips else None
    return _straight_through(x, value, inside)


@jax.custom_jvp
def _straight_through(x, value, inside):
    return value


@_straight_through.defjvp
def _pass_on(primals, tangents):
    _, value, inside = primals
    slope = tangents[0]
    return value, slope if inside is None else jnp.where(inside, slope, 0)
