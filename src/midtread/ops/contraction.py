"""Contractions: what a matmul does to the axes of its operands.

A contraction names every axis of lhs, rhs and out with a label. Where a label stands
decides what a scale along it can do:

    in one operand (or both) and in out   "kept": the scale moves to the output
    in both operands, not in out          "summed": one scale per tile; tiles are summed
    anything else (conv windows)          "stuck": no scale may vary along it

The two gradients of a contraction are contractions of the cotangent g with the other
operand, so the family is closed under `dlhs` and `drhs`:

    out = c.run(lhs, rhs)      dlhs = c.dlhs.run(g, rhs)      drhs = c.drhs.run(lhs, g)

`Dot` is lax.dot_general with the output in any order; `Ragged` its grouped form
(ops/ragged.py), `Conv` a convolution (ops/conv.py).
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from midtread.numerics import views
from midtread.numerics.spec import Spec, place_tile

Labels = tuple[str, ...]
Shape = Sequence[int]
META = ("lhs", "rhs", "out", "tiled", "stuck", "precision", "preferred", "out_sharding", "stored")  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Contraction:
    """The labels of a contraction, and how the caller wants it run.

    `tiled` is the last summed label, for lhs and for rhs; None where a tile size has none.
    `stored` are the sides whose codes existed before, so that their layout in memory cannot be
    chosen.
    """

    lhs: Labels
    rhs: Labels
    out: Labels
    tiled: tuple[str | None, str | None] = (None, None)
    stuck: frozenset[str] = frozenset()
    precision: Any = None
    preferred: Any = None  # dtype of the result; None for that of the operands
    out_sharding: Any = None
    stored: tuple[str, ...] = ("lhs", "rhs")

    name = "contraction"
    can_tile = True
    is_matmul = False  # whether it multiplies matrices, for which there are kernels

    @functools.cached_property
    def summed(self) -> Labels:
        return _summed(self.lhs, self.rhs, self.out, self.stuck)

    @property
    def looped(self) -> Labels:
        """The summed labels whose tiles can be visited one at a time."""
        return self.summed

    def labels(self, side: str) -> Labels:
        return getattr(self, side)

    def summed_axes(self, side: str) -> tuple[int, ...]:
        """Returns the numbers of the summed axes of this operand."""
        labels = enumerate(getattr(self, side))
        return tuple([axis for axis, label in labels if label in self.summed])

    def kept(self, side: str) -> Labels:
        """Returns the labels along which this operand's scale can move to the output."""
        return _kept(getattr(self, side), self.out, self.stuck)

    def number_axes(self, spec: Spec | None, side: str, shape: Shape) -> Spec | None:
        """Replaces the names of axes in `spec` by axis numbers of this side.

        Args:
            spec: a Spec with names of axes, numbers, or both; None stays None.
            side: "lhs" or "rhs".
            shape: that of the operand. Tiles of a sum over several axes depend on it.
        """
        if spec is None:
            return None
        labels, kept = self.labels(side), self.kept(side)
        tiles, channelwise = {}, []
        for axis, tile in spec.tiled_axes:
            if not isinstance(axis, str):
                tiles[axis] = tile
                continue
            axes = [labels.index(x) for x in self._tiled_labels(axis, side, spec)]
            if not axes and not spec.format.tile:
                continue  # An axis that is not there has extent 1, which is one tile.
            if not labels:
                return None  # A number is no tile: it stays as it is.
            # A format that comes in tiles has those of the last axis then.
            axes = axes or [len(labels) - 1]
            own, each = place_tile(tile, axes, shape, bool(spec.format.tile))
            tiles |= own
            channelwise += each
        self._check_tiles(spec, tiles, labels)
        # A tile of the last kept axis leaves the others (batch, experts) one scale each.
        if any(axis == "kept" for axis, _ in spec.tiled_axes):
            channelwise += [labels.index(x) for x in kept]
        for axis in spec.channelwise_axes:
            if axis == "kept":
                channelwise += [labels.index(x) for x in kept]
            elif axis == "group":
                channelwise += [labels.index(x) for x in self.groups(side)]
            else:
                channelwise.append(axis)
        channelwise = tuple(a for a in dict.fromkeys(channelwise) if a not in tiles)
        # A tile of 1.0 is not a tile of 1, though the cache takes them for equal.
        kinds = tuple(map(type, tiles.values()))
        return _with_axes(spec, channelwise, tuple(tiles.items()), kinds)

    def _tiled_labels(self, axis: str, side: str, spec: Spec) -> list[str]:
        """Returns the labels that a tile spans, the innermost one last."""
        last = self.tiled[side == "rhs"] if self.can_tile else None
        candidates: list[str] = [] if last is None else [last]
        if axis == "kept":
            candidates = list(self.kept(side))[-1:]
        elif axis == "summed_first":
            candidates = list(self.summed[:1])  # the same one on both sides
        elif axis == "summed" and last in self.looped:
            candidates = [x for x in self.rhs if x in self.looped]
        if not candidates and not self.can_tile:
            raise ValueError(
                f"{self.name} has no {axis!r} axis to tile on its {side}, but {spec.format.name} "
                f"asks for tiles {spec.tiles}. Drop the tile size for one scale per output "
                "channel, or limit the rule with op_names=('dot_general', 'einsum')."
            )
        return candidates

    def _check_tiles(self, spec, tiles, labels) -> None:
        for axis in tiles:
            if labels[axis] in self.stuck or (
                labels[axis] in self.summed and not self.can_tile
            ):
                raise ValueError(
                    f"{self.name} cannot tile axis {axis} ({labels[axis]!r}), but the rule asks "
                    f"for tiles {spec.tiles}. Drop the tile size for one scale per output "
                    "channel, or limit the rule with op_names=('dot_general', 'einsum')."
                )

    def groups(self, side: str) -> Labels:
        """Returns the label of the axis of experts, where there is one."""
        return ()

    @property
    def grouping(self) -> Any:
        """(the label of rows in groups, that of the groups, their sizes), or None."""
        return None

    def align(self, part: jax.Array, side: str) -> jax.Array:
        """Lays a scale (or zero point) of one operand over the axes of the output."""
        return self.lay(part, side, self.out)

    def lay(self, part: jax.Array, side: str, over: Labels) -> jax.Array:
        """Lays a part of one operand over axes with these labels."""
        return views.lay_over(part, self.labels(side), over)

    def ones(self, operand: jax.Array, side: str) -> jax.Array:
        """Returns as few ones as it takes, in place of `operand`, to sum the other operand."""
        other = self.labels("lhs" if side == "rhs" else "rhs")
        alone = [x in self.out and x not in other for x in self.labels(side)]
        shape = [1 if single else n for single, n in zip(alone, operand.shape)]
        return jnp.ones(shape, operand.dtype)

    def transposed(
        self, lhs: Labels, rhs: Labels, out: Labels, alone: Sequence[str], **fields
    ):
        """Returns a gradient of this contraction, with these labels. `alone` are those that it
        sums and that one operand alone has here; tiles lie along the last of them."""
        tiled = alone[-1] if alone else None
        fields = {"stuck": self.stuck, "precision": self.precision, **fields}
        return type(self)(lhs, rhs, out, (tiled, tiled), **fields)

    @property
    def dlhs(self) -> "Contraction":
        """The contraction of g with rhs that gives the gradient of lhs."""
        alone = [x for x in self.rhs if x in self.out and x not in self.lhs]
        return self.transposed(self.out, self.rhs, self.lhs, alone)

    @property
    def drhs(self) -> "Contraction":
        """The contraction of lhs with g that gives the gradient of rhs."""
        alone = [x for x in self.lhs if x in self.out and x not in self.rhs]
        return self.transposed(self.lhs, self.out, self.rhs, alone)

    def run(
        self, lhs: jax.Array, rhs: jax.Array, accumulate: Any = None, by: Any = lax
    ) -> jax.Array:
        """Contracts two plain arrays.

        Args:
            accumulate: the type of the sum; None for `preferred`.
            by: a module that multiplies with the functions of jax.lax: lax itself, or
                `kernels.xla`, which takes every pair of types on every backend.
        """
        raise NotImplementedError


@functools.lru_cache(maxsize=4096)
def _with_axes(spec: Spec, channelwise: tuple, tiles: tuple, kinds: tuple) -> Spec:
    return dataclasses.replace(spec, channelwise_axes=channelwise, tiled_axes=tiles)


@functools.lru_cache(maxsize=4096)
def _summed(lhs: Labels, rhs: Labels, out: Labels, stuck: frozenset) -> Labels:
    shared = (x for x in lhs if x in rhs and x not in out)
    return tuple(x for x in shared if x not in stuck)


@functools.lru_cache(maxsize=4096)
def _kept(labels: Labels, out: Labels, stuck: frozenset) -> Labels:
    return tuple(x for x in labels if x in out and x not in stuck)


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=[], meta_fields=list(META)
)
@dataclasses.dataclass(frozen=True)
class Dot(Contraction):
    """A lax.dot_general whose output has the order of `out`."""

    name = "dot_general"
    is_matmul = True

    @property
    def batch(self) -> Labels:
        return tuple(x for x in self.lhs if x in self.rhs and x in self.out)

    @property
    def dimension_numbers(self):
        """(lax.dot_general's dimension numbers, the order to transpose its output to)."""
        summed = [x for x in self.lhs if x in self.rhs and x not in self.out]
        axes = lambda labels, chosen: tuple(labels.index(x) for x in chosen)
        numbers = (
            (axes(self.lhs, summed), axes(self.rhs, summed)),
            (axes(self.lhs, self.batch), axes(self.rhs, self.batch)),
        )
        alone = [
            x for x in (*self.lhs, *self.rhs) if x not in summed and x not in self.batch
        ]
        got = (*self.batch, *alone)
        return numbers, [got.index(x) for x in self.out]

    def run(self, lhs, rhs, accumulate=None, by: Any = lax):
        numbers, order = self.dimension_numbers
        in_order = order == sorted(order)
        out = by.dot_general(
            lhs,
            rhs,
            numbers,
            precision=self.precision,
            preferred_element_type=accumulate or self.preferred,
            out_sharding=self.out_sharding if in_order else None,
        )
        if in_order:
            return out
        out = out.transpose(order)
        if self.out_sharding is None:
            return out
        return lax.reshape(out, out.shape, out_sharding=self.out_sharding)


def dot(dimension_numbers, lhs_ndim: int, rhs_ndim: int, **options) -> Dot:
    """Builds the contraction that lax.dot_general's dimension numbers describe."""
    try:
        return _dot(dimension_numbers, lhs_ndim, rhs_ndim, **options)
    except TypeError:  # there are lists among them, which no cache takes
        return _dot(_tuples(dimension_numbers), lhs_ndim, rhs_ndim, **options)


def _tuples(dimension_numbers) -> tuple:
    return tuple(
        tuple(tuple(map(int, axes)) for axes in pair) for pair in dimension_numbers
    )


@functools.lru_cache(maxsize=1024)  # because layers look alike
def _dot(dimension_numbers, lhs_ndim: int, rhs_ndim: int, **options) -> Dot:
    dimension_numbers = _tuples(dimension_numbers)
    (lhs_sum, rhs_sum), (lhs_batch, rhs_batch) = dimension_numbers
    _check_numbers(dimension_numbers, lhs_ndim, rhs_ndim)
    lhs = {a: f"k{i}" for i, a in enumerate(lhs_sum)} | {
        a: f"b{i}" for i, a in enumerate(lhs_batch)
    }
    rhs = {a: f"k{i}" for i, a in enumerate(rhs_sum)} | {
        a: f"b{i}" for i, a in enumerate(rhs_batch)
    }
    lhs_labels = tuple(lhs.get(a, f"m{a}") for a in range(lhs_ndim))
    rhs_labels = tuple(rhs.get(a, f"n{a}") for a in range(rhs_ndim))
    batch = tuple(f"b{i}" for i in range(len(lhs_batch)))
    alone = tuple(x for x in (*lhs_labels, *rhs_labels) if x[0] in "mn")
    last = f"k{len(lhs_sum) - 1}" if len(lhs_sum) else None
    return Dot(lhs_labels, rhs_labels, batch + alone, (last, last), **options)


def _check_numbers(dimension_numbers, lhs_ndim: int, rhs_ndim: int) -> None:
    for numbers in dimension_numbers:
        if len(numbers[0]) != len(numbers[1]):
            raise ValueError(
                f"dimension_numbers {dimension_numbers} pair axes unevenly."
            )
    for side, ndim, axes in (
        ("lhs", lhs_ndim, (*dimension_numbers[0][0], *dimension_numbers[1][0])),
        ("rhs", rhs_ndim, (*dimension_numbers[0][1], *dimension_numbers[1][1])),
    ):
        if any(not 0 <= a < ndim for a in axes) or len(set(axes)) < len(axes):
            raise ValueError(
                f"dimension_numbers {dimension_numbers} do not fit a {side} of rank {ndim}."
            )
