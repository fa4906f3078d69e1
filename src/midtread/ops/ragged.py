"""Ragged: matmuls over groups of rows, lax.ragged_dot and ragged_dot_general.

Rows labelled r come in groups of `sizes` rows; g labels the groups (experts). Three
contractions, and the gradients of each are among them:

    rows kept      [.. r .. k] x [g .. k .. n] -> [.. r .. n]    forward: row r meets group(r)
    rows summed    [.. r .. k] x [.. r .. n]   -> [g .. k .. n]  weight gradient
    rows batched   [r ..]      x [r ..]        -> [r ..]         grouping changes nothing

A scale that differs by group becomes a scale per row on its way to the output.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from midtread.numerics import views
from midtread.ops.contraction import META, Contraction, dot


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["sizes"],
    meta_fields=[*META, "num_rows", "rows", "group"],
)
@dataclasses.dataclass(frozen=True)
class Ragged(Contraction):
    """A matmul over groups of rows, as the table above has it."""

    sizes: Any = None
    num_rows: int = 0
    rows: str = "r"
    group: str = "g"

    name = "ragged_dot"
    is_matmul = True

    @property
    def looped(self):
        # Rows are summed within their groups, and a tile of rows may belong to two.
        return tuple(x for x in self.summed if x != self.rows)

    def groups(self, side):
        return tuple(x for x in self.labels(side) if x == self.group)

    def lay(self, part, side, over):
        labels = self.labels(side)
        if self.group in labels and self.group not in over:
            axis = labels.index(self.group)
            labels = tuple(self.rows if x == self.group else x for x in labels)
            if part.shape[axis] != 1:
                part = jnp.take(part, self._group_of_row(), axis=axis)
        return views.lay_over(part, labels, over)

    def ones(self, operand, side):
        """Returns ones for every row: rows of different groups meet different matrices."""
        few = super().ones(operand, side)
        shape = [
            n if x == self.rows else m
            for x, n, m in zip(self.labels(side), operand.shape, few.shape)
        ]
        return jnp.ones(shape, operand.dtype)

    def _group_of_row(self) -> jax.Array:
        """Returns the group of each row; rows beyond all groups count to the last."""
        ends = jnp.cumsum(self.sizes)
        row = jnp.arange(self.num_rows, dtype=ends.dtype)
        return jnp.minimum(jnp.searchsorted(ends, row, side="right"), len(ends) - 1)

    @property
    def grouping(self):
        return self.rows, self.group, self.sizes

    def run(self, lhs, rhs, accumulate=None, by: Any = lax):
        labels = self.lhs, self.rhs
        if self.group in self.lhs:  # lax wants the groups on the right
            lhs, rhs, labels = rhs, lhs, (self.rhs, self.lhs)
        left, right = labels
        pairs = [x for x in left if x in right]
        summed = [x for x in pairs if x not in self.out]
        batch = [x for x in pairs if x in self.out]
        axes = lambda of, chosen: tuple(of.index(x) for x in chosen)
        numbers = lax.RaggedDotDimensionNumbers(
            dot_dimension_numbers=(
                (axes(left, summed), axes(right, summed)),
                (axes(left, batch), axes(right, batch)),
            ),
            lhs_ragged_dimensions=[left.index(self.rows)],
            rhs_group_dimensions=axes(right, [x for x in right if x == self.group]),
        )
        out = by.ragged_dot_general(
            lhs,
            rhs,
            self.sizes,
            numbers,
            precision=self.precision,
            preferred_element_type=accumulate or self.preferred,
            out_sharding=self.out_sharding,
        )
        alone = [x for x in (*left, *right) if x not in pairs and x != self.group]
        got = [*([self.group] if self.group in self.out else []), *batch, *alone]
        return out.transpose([got.index(x) for x in self.out])

    def transposed(self, lhs, rhs, out, alone):
        fields = {k: getattr(self, k) for k in ("sizes", "num_rows", "rows", "group")}
        alone = [x for x in alone if x != self.group]
        return super().transposed(lhs, rhs, out, alone, **fields)


def ragged(numbers, lhs_shape, rhs_shape, sizes, **options) -> Ragged:
    """Builds the contraction that lax.ragged_dot_general's dimension numbers describe."""
    (lhs_sum, _), _ = numbers.dot_dimension_numbers
    (rows,) = numbers.lhs_ragged_dimensions
    plain = dot(numbers.dot_dimension_numbers, len(lhs_shape), len(rhs_shape))
    names = {plain.lhs[rows]: "r"}
    groups = list(numbers.rhs_group_dimensions)
    if groups:
        names[plain.rhs[groups[0]]] = "g"
    rename = lambda labels: tuple(names.get(x, x) for x in labels)
    lhs, rhs, out = rename(plain.lhs), rename(plain.rhs), rename(plain.out)
    out = tuple(x for x in out if x != "g")
    if rows in lhs_sum:
        out = ("g", *out)
    tiled = rename(plain.tiled) if plain.tiled[0] else plain.tiled
    return Ragged(
        lhs, rhs, out, tiled, sizes=sizes, num_rows=lhs_shape[rows], **options
    )
