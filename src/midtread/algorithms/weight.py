"""Weight: the weight of any contraction as a stack of matrices, [E, K, N].

A layer's error is quadratic in the error of its weight, with one K x K matrix per stack
entry: E runs over what the operands share and the output keeps (experts, batch), K over
what is summed (inputs, windows of a convolution), N over the weight's own axes (outputs).

    dot_general   x[m, k] w[k, n]              E = 1    K = k         N = n
    einsum        x[m, d] w[h, d, e]           E = 1    K = d         N = h, e
    ragged_dot    x[m, k] w[g, k, n] by group  E = g    K = k         N = n
    conv          x[b, s, s, c] w[3, 3, c, o]  E = 1    K = 3, 3, c   N = o

Scales follow the weight's own axes, so they are spread over the elements of the weight and
laid out as matrices beside it: an algorithm on matrices sees one scale per element, and
need not know which of them are shared.
"""

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from midtread.numerics import rounding, views
from midtread.numerics.formats import Format
from midtread.numerics.qarray import QArray, quantize_to_scale, store_scale
from midtread.numerics.scales import Scales
from midtread.numerics.spec import Spec


class Axes(NamedTuple):
    """Which axes of a weight are E, K and N."""

    batch: tuple[int, ...]
    summed: tuple[int, ...]
    kept: tuple[int, ...]

    @property
    def order(self) -> tuple[int, ...]:
        return (*self.batch, *self.summed, *self.kept)

    def extents(self, shape: tuple[int, ...]) -> tuple[int, int, int]:
        """(E, K, N) of a weight of this shape."""
        size = lambda axes: math.prod(shape[a] for a in axes)
        return size(self.batch), size(self.summed), size(self.kept)


MATRIX = Axes((), (0,), (1,))  # a weight [inputs, outputs]


def as_matrices(x: jax.Array, axes: Axes) -> jax.Array:
    """[E, K, N] of a weight, or of anything of its shape."""
    return x.transpose(axes.order).reshape(axes.extents(x.shape))


def as_weight(m: jax.Array, axes: Axes, shape: tuple[int, ...]) -> jax.Array:
    """The inverse of `as_matrices`."""
    turned = m.reshape([shape[a] for a in axes.order])
    return turned.transpose([axes.order.index(a) for a in range(len(shape))])


def over_inputs(v: jax.Array, axes: Axes, shape: tuple[int, ...]) -> jax.Array:
    """`v` [E, K], one number per input, as an array that broadcasts over the weight."""
    full = [n if a not in axes.kept else 1 for a, n in enumerate(shape)]
    return as_weight(v[..., None], axes, tuple(full))


@dataclasses.dataclass(frozen=True)
class Grid:
    """One scale, and a zero point where the format has one, per element: [E, K, N]."""

    format: Format
    scale: jax.Array
    zero_point: jax.Array | None = None

    def nearest(self, w: jax.Array) -> jax.Array:
        """The values of the grid that are nearest to `w`."""
        return nearest(w, self.scale, self.zero_point, self.format)


jax.tree_util.register_dataclass(Grid, ["scale", "zero_point"], ["format"])


def nearest(w, scale, zero_point, fmt: Format) -> jax.Array:
    """`w` rounded to the format under a scale per element, still in float32."""
    units = w * (1 / scale)  # as quantize_to_scale divides, to the bit
    if zero_point is not None:
        units = units + zero_point
    value = rounding.nearest_value(units, fmt)
    return (value if zero_point is None else value - zero_point) * scale


def spread(scales: Scales, spec: Spec, axes: Axes, shape: tuple[int, ...]) -> Grid:
    """The grid of a weight of `shape`, padded to whole tiles, under `scales`."""
    lay = lambda part: as_matrices(views.expand(part.astype(jnp.float32), shape), axes)
    zero_point = None if scales.zero_point is None else lay(scales.zero_point)
    return Grid(spec.format, lay(scales.scale), zero_point)


def encode(values: jax.Array, spec: Spec, scales: Scales, shape: tuple) -> QArray:
    """The QArray of `values`, which are padded to whole tiles from `shape`."""
    q = quantize_to_scale(values, spec.format, scales.scale, scales.zero_point)
    logical = tuple(n if n != p else None for n, p in zip(shape, values.shape))
    if any(n is not None for n in logical):
        q = q.replace(logical=logical)
    return store_scale(q, spec, scales.global_scale)
