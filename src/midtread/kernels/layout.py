"""Layout: from labelled axes to the matrices that kernels know, once, for every device.

A contraction names the axes of its operands and of its result (ops/contraction.py); a kernel
multiplies matrices, and wants to know where they lie in memory. `Matmul` is the record that
kernels are chosen by and run on. Its axes are examined once, from shapes alone:

    matrices    sorts labels by what they do: kept from lhs (m), kept from rhs (n), summed (k)
    Weight      one operand as the matrix [R, C] that is stored, the other as rows
    as_matrix   a scale as a matrix that on either side has 1, all, or one per TILE

M, N, K are the extents of these matrices. R and C are those of stored codes: one is K and the
other N.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from midtread.numerics import views
from midtread.numerics.dtypes import is_wide
from midtread.numerics.platforms import is_explicit
from midtread.numerics.qarray import QArray

Labels = tuple[str, ...]
TILE = 128  # elements that share a scale, for the kernels that know tiles

SYMBOLIC = "an extent is not known: jax.export with symbolic shapes is left to XLA"
EXPLICIT = "its operands are laid out over a mesh with explicit axes"


class Groups(NamedTuple):
    """Rows that come in groups, each with its own matrix."""

    rows: str  # the label of the axis of rows
    group: str  # the label of the axis of groups
    sizes: Any  # how many rows each group has


class Matrices(NamedTuple):
    """Labels by what they do: m are kept from lhs, n are kept from rhs, k are summed."""

    m: Labels
    n: Labels
    k: Labels


@dataclasses.dataclass(frozen=True, eq=False)
class Matmul:
    """The two operands of a matmul and what is wanted of it.

    Attributes:
        labels: the labels of lhs, of rhs and of the result.
        lhs, rhs: arrays or QArrays.
        dtype: the dtype of the result.
        tiles: the number of tiles of each summed label that scales vary along.
        stored: the sides, "lhs" or "rhs", that lie in memory as their labels say. Others
            were written for this matmul, with the summed axis innermost.
        groups: given where rows come in groups, each with its own matrix.
    """

    labels: tuple[Labels, Labels, Labels]
    lhs: Any
    rhs: Any
    dtype: Any
    tiles: dict[str, int] = dataclasses.field(default_factory=dict)
    stored: tuple[str, ...] = ()
    precision: Any = None
    groups: Groups | None = None

    @functools.cached_property
    def matrices(self) -> Matrices | None:
        """The labels by what they do. It is None where axes are shared by both operands and
        the result, or interleaved."""
        if self.groups is None:
            return matrices(*self.labels)
        return grouped_matrices(*self.labels, self.groups.rows, self.groups.group)

    @functools.cached_property
    def codes(self) -> tuple[jax.Array, jax.Array]:
        """The codes of lhs and of rhs."""
        return codes_of(self.lhs), codes_of(self.rhs)

    @functools.cached_property
    def extents(self) -> dict[str, int]:
        extents = dict(zip(self.labels[0], self.codes[0].shape))
        extents.update(zip(self.labels[1], self.codes[1].shape))
        if self.groups is not None:
            extents.setdefault(self.groups.group, len(self.groups.sizes))
        return extents

    @functools.cached_property
    def sizes(self) -> tuple[int, int, int]:
        """The extents M, N and K."""
        assert self.matrices is not None
        m, n, k = self.matrices
        return self.extent(m), self.extent(n), self.extent(k)

    @functools.cached_property
    def why_not_here(self) -> str | None:
        """The reason why kernels cannot take operands that are laid out so, if there is one."""
        sizes = () if self.groups is None else (self.groups.sizes,)
        return why_not_here(self.lhs, self.rhs, *sizes)

    def extent(self, labels: Labels) -> int:
        return math.prod(map(self.extents.__getitem__, labels))

    def result(self, out: jax.Array) -> jax.Array:
        """Gives a matrix [M, N] the axes of the result."""
        return out.reshape([*map(self.extents.__getitem__, self.labels[2])])


@functools.lru_cache(maxsize=4096)
def matrices(lhs: Labels, rhs: Labels, out: Labels) -> Matrices | None:
    """Sorts labels by what they do; None where all three share an axis, or axes interleave."""
    if any(x in rhs and x in out for x in lhs):
        return None
    k = tuple(x for x in lhs if x in rhs)
    m = tuple(x for x in out if x in lhs)
    n = tuple(x for x in out if x in rhs)
    if not k or out not in (m + n, n + m):
        return None
    return Matrices(m, n, k)


@functools.lru_cache(maxsize=4096)
def grouped_matrices(
    lhs: Labels, rhs: Labels, out: Labels, rows: str, group: str
) -> Matrices | None:
    """Sorts the labels besides rows and groups; None where axes are shared, interleaved or
    swapped. If rows are kept, [r k] x [g k n] -> [r n], there is no m; if they are summed,
    [r m] x [r n] -> [g m n], there is no k."""
    own = rows, group
    k = tuple(x for x in lhs if x in rhs and x not in own)
    m = tuple(x for x in out if x in lhs and x not in own)
    n = tuple(x for x in out if x in rhs and x not in own)
    if rows in out:
        forms = {*k, rows}, {*k, *n, group}, (rows, *n)
        fits = k and not m
    else:
        forms = {*m, rows}, {*n, rows}, (group, *m, *n)
        fits = m and not k
    same = set(lhs) == forms[0] and set(rhs) == forms[1] and out == forms[2]
    return Matrices(m, n, k) if fits and n and same else None


# --- arrays -----------------------------------------------------------------------------------


def codes_of(x: Any) -> jax.Array:
    """Returns the codes of a QArray, or an array as it is."""
    return x.qvalue if isinstance(x, QArray) else x


def parts_of(x: Any) -> list[jax.Array]:
    """Returns the arrays that an operand consists of."""
    if not isinstance(x, QArray):
        return [x]
    return jax.tree.leaves(x)


def is_static(*arrays: Any) -> bool:
    """Whether all extents are known numbers. In jax.export some may be symbols."""
    kinds: set[type] = set()
    for x in arrays:
        kinds.update(map(type, x.shape))
    return kinds <= {int}


def why_not_here(*operands: Any) -> str | None:
    """Says why kernels cannot take operands that are laid out as these are; None if they can."""
    parts = [part for x in operands for part in parts_of(x)]
    if not is_static(*parts):
        return SYMBOLIC
    return EXPLICIT if is_explicit(*parts) else None


def round_up(extent: int, multiple: int) -> int:
    """Rounds an extent up to a multiple. The copy engine wants whole rows of its pattern, and
    what is added is filled with zeros."""
    return -(-extent // multiple) * multiple


# --- scales as matrices -----------------------------------------------------------------------


class Fit(NamedTuple):
    """How a part of an array, such as its scale, becomes a matrix over rows and columns."""

    shape: tuple[int, ...]  # the shape to broadcast it to first
    matrix: tuple[int, int]  # its extents: on either side 1, all, or one per TILE


@functools.lru_cache(maxsize=4096)
def fit(extents: tuple[int, ...], shape: tuple[int, ...], first: int) -> Fit | None:
    """Fits a part with these extents to an array of `shape`, seen as a matrix whose columns
    begin with axis `first`. None if tiles of several axes do not follow one another."""
    wide, matrix = [], []
    for axes in (slice(first), slice(first, None)):
        own, full = list(extents[axes]), list(shape[axes])
        if all(n == 1 for n in own):
            wide += own
            matrix.append(1)
            continue
        if own[-1] not in (1, full[-1]):
            if own[-1] * TILE != full[-1]:
                return None
            full[-1] = own[-1]
        if any(n not in (1, m) for n, m in zip(own, full)):
            return None
        wide += full
        matrix.append(math.prod(full))
    return Fit(tuple(wide), (matrix[0], matrix[1]))


def as_matrix(part: jax.Array, shape: Sequence[int], first: int) -> jax.Array:
    """Makes a part that `fit` fits a matrix [r, c] over rows and columns."""
    fitted = fit(part.shape, tuple(shape), first)
    assert fitted is not None, (part.shape, shape)
    return jnp.broadcast_to(part, fitted.shape).reshape(fitted.matrix)


# --- a stored weight --------------------------------------------------------------------------


def stored(shape, summed: tuple[int, ...]) -> tuple[tuple[int, int], int] | None:
    """Sees a weight as a matrix: ((R, C), which of the two is summed), or None if its axes
    interleave.

    >>> stored((32, 4, 8), (0,)), stored((4, 8, 32), (2,)), stored((4, 32, 8), (1,))
    (((32, 32), 0), ((32, 32), 1), None)
    """
    ndim, num = len(shape), len(summed)
    if set(summed) == set(range(num)):
        return (math.prod(shape[:num]), math.prod(shape[num:])), 0
    if set(summed) == set(range(ndim - num, ndim)):
        return (math.prod(shape[:-num]), math.prod(shape[-num:])), 1
    return None


def rows(x: jax.Array, summed: tuple[int, ...]) -> jax.Array:
    """Arranges x as a matrix [M, K], with K in the order of `summed`."""
    kept = [a for a in range(x.ndim) if a not in summed]
    num = math.prod(map(x.shape.__getitem__, kept))
    return x.transpose(*kept, *summed).reshape(num, -1)


class Weight(NamedTuple):
    """A stored weight as a matrix of codes, and the rows that it is multiplied by.

    The scale is a vector over columns, applied after the sum, or a matrix over groups of the
    sum and columns, applied within it.
    """

    side: str  # which operand the weight is
    num_rows: int  # M
    x_summed: tuple[int, ...]  # summed axes of x, in the order of the weight's
    shape: tuple[int, int]  # the extents [R, C] of the codes
    summed: int  # which of the two is summed
    w_kept: tuple[int, ...]  # kept axes of the weight
    counts: tuple[int, int]  # extents of the scale within the sum, (1, 1) for none
    has_inner: bool  # whether there is a scale within the sum
    order: tuple[int, ...]  # from the kept axes of x and the weight to the result's

    @property
    def group(self) -> int | None:
        """How many neighbours along the sum of codes [K, N] share a scale; None if all do."""
        return None if self.counts[0] == 1 else self.shape[0] // self.counts[0]


def part_extents(w: QArray) -> tuple[int, ...]:
    """Returns extents of which each is a multiple of the scale's and of the zero point's."""
    if w.zero_point is None:
        return w.scale.shape
    return tuple(map(math.lcm, w.scale.shape, w.zero_point.shape))


def why_not_zero(w: QArray) -> str | None:
    """Says why a kernel without zero points does not take this weight; None if it does."""
    return None if w.zero_point is None else "its weight has a zero point"


def why_not_weight(x: Any, w: Any) -> str | None:
    """Says why this is not a float array by codes that our kernels know; None if it is."""
    if isinstance(x, QArray) or not isinstance(w, QArray) or not is_wide(x.dtype):
        return "it is not a matmul of floats by codes"
    if w.pre_scale is not None or w.pre_rotation is not None:
        return "its weight has a factor along the sum"
    if np.dtype(np.float64) in (x.dtype, w.scale.dtype):
        return "it is in float64"
    return None


@functools.lru_cache(maxsize=4096)
def _weight(side, x_labels, w_labels, out, x_shape, shape, scale) -> Weight | str:
    summed = tuple(a for a, label in enumerate(w_labels) if label not in out)
    kept = tuple(a for a in range(len(shape)) if a not in summed)
    matrix = stored(shape, summed)
    if not summed or matrix is None or any(w_labels[a] in x_labels for a in kept):
        return "it has batch axes, or its weight interleaves kept and summed axes"
    inner = None
    if any(scale[a] != 1 for a in summed):
        inner = _inner_counts(scale, shape, summed, kept)
        if inner is None:
            return "tiles of several summed axes do not follow one another"
    x_summed = tuple(x_labels.index(w_labels[a]) for a in summed)
    alone = [a for a in range(len(x_labels)) if a not in x_summed]
    got = [*(x_labels[a] for a in alone), *(w_labels[a] for a in kept)]
    return Weight(
        side,
        math.prod(x_shape[a] for a in alone),
        x_summed,
        *matrix,
        kept,
        inner or (1, 1),
        inner is not None,
        tuple(got.index(label) for label in out),
    )


def _inner_counts(scale, shape, summed, kept) -> tuple[int, int] | None:
    """Returns the extents [r, c] of a scale over the axes of the weight's matrix, or None if
    tiles of several axes do not merge into one run."""
    varies = any(scale[a] != 1 for a in kept)
    partial = [a for a in summed if scale[a] < shape[a]]
    if any(scale[a] != 1 for a in summed if partial and a > partial[0]):
        return None
    sides = (
        math.prod(scale[a] for a in summed),
        math.prod(shape[a] for a in kept) if varies else 1,
    )
    return sides if 0 in summed else sides[::-1]


class WeightArrays(NamedTuple):
    """What a kernel for a stored weight multiplies."""

    x_MK: jax.Array
    codes: jax.Array  # [R, C]
    inner: jax.Array | None  # the scale within the sum, of extents `Weight.counts`
    last: jax.Array | None  # the scale after the sum, of columns or of everything
    zero: jax.Array | None = None  # subtracted from codes; its shape is the scale's


@dataclasses.dataclass(frozen=True, eq=False)
class WeightMatmul:
    """A Matmul of floats by codes, and what is known of its weight."""

    matmul: Matmul
    weight: Weight

    @property
    def why_not_here(self) -> str | None:
        return self.matmul.why_not_here

    @property
    def sides(self) -> tuple[jax.Array, QArray]:
        """The operand that is rows, and the one that is the weight."""
        a = self.matmul
        return (a.lhs, a.rhs) if self.weight.side == "rhs" else (a.rhs, a.lhs)

    @property
    def scale_dtype(self) -> np.dtype:
        w = self.sides[1]
        return np.dtype(np.float32) if w.global_scale is not None else w.scale.dtype

    def arrays(self) -> WeightArrays:
        """Arranges the operands as matrices."""
        (x, w), weight = self.sides, self.weight
        x_MK, codes = rows(x, weight.x_summed), w.qvalue.reshape(weight.shape)
        scale, last = w.scale, None
        if w.global_scale is not None:
            factor = w.global_scale.astype(jnp.float32)
            if weight.has_inner and factor.size == 1:
                last = factor.reshape(1)
            else:
                scale = scale.astype(jnp.float32) * factor
        zero = None if w.zero_point is None else self._over_columns(w.zero_point)
        scale = self._over_columns(scale)
        if weight.has_inner:
            return WeightArrays(x_MK, codes, scale, last, zero)
        return WeightArrays(x_MK, codes, None, scale, zero)

    def _over_columns(self, part: jax.Array) -> jax.Array:
        """Arranges a scale or zero point over groups of the sum and columns, or over columns."""
        w, weight = self.sides[1], self.weight
        shape, full = w.qvalue.shape, list(part_extents(w))
        if not weight.has_inner:
            counts = [part.shape[axis] for axis in weight.w_kept]
            extents = [shape[axis] for axis in weight.w_kept]
            return views.expand(part.reshape(counts), extents).reshape(-1)
        if any(full[axis] != 1 for axis in weight.w_kept):
            for axis in weight.w_kept:
                full[axis] = shape[axis]
        part = part if part.shape == tuple(full) else views.expand(part, full)
        return part.reshape(weight.counts)

    def result(self, out: jax.Array) -> jax.Array:
        """Gives a matrix [M, N] the axes of the result."""
        (x, w), weight = self.sides, self.weight
        alone = [n for axis, n in enumerate(x.shape) if axis not in weight.x_summed]
        kept = [w.qvalue.shape[axis] for axis in weight.w_kept]
        return out.reshape(*alone, *kept).transpose(weight.order)


def weight_matmul(a: Matmul) -> WeightMatmul | str:
    """Sees one operand as a stored weight, or says why `a` is not such a matmul."""
    side = "lhs" if isinstance(a.lhs, QArray) else "rhs"
    x, w, x_labels, w_labels = a.lhs, a.rhs, a.labels[0], a.labels[1]
    if side == "lhs":
        x, w, x_labels, w_labels = w, x, w_labels, x_labels
    reason = why_not_weight(x, w)
    if reason is not None:
        return reason
    if not is_static(x, w.qvalue, w.scale):
        return SYMBOLIC
    shape, scale = w.qvalue.shape, part_extents(w)
    weight = _weight(side, x_labels, w_labels, a.labels[2], x.shape, shape, scale)
    return weight if isinstance(weight, str) else WeightMatmul(a, weight)
