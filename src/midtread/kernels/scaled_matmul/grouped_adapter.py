"""NVIDIA GPUs: from a contraction over groups of rows to a kernel, or the reason why not.

adapter.py does this for plain contractions. Here one axis holds the rows of all groups, and
another, of one operand or of the result, the groups (ops/ragged.py):

    rows kept      [r k] x [g k n] -> [r n]      forward, and the gradient of the rows
    rows summed    [r m] x [r n]   -> [g m n]    the gradient of the matrices

Each of k, m and n may be several axes, in any order. Rows are not split over devices, since
where a group starts depends on all sizes before it; columns are.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from midtread.kernels.partition import as_function
from midtread.kernels.scaled_matmul import hopper_grouped
from midtread.kernels.scaled_matmul import tuned as scaled_tuned
from midtread.kernels.scaled_matmul.adapter import codes_of, up, why_not_codes
from midtread.numerics import views
from midtread.numerics.qarray import QArray

Labels = tuple[str, ...]
MAX_ROWS = 64  # of a group, on average, for the kernels of few rows


class Groups(NamedTuple):
    """The label of the axis that is grouped, that of the groups, and their sizes."""

    rows: str
    group: str
    sizes: Any


class Sides(NamedTuple):
    """Labels kept from lhs and from rhs, besides rows and groups, and those summed."""

    m: Labels
    n: Labels
    k: Labels


def sides(labels, groups: Groups) -> Sides | None:
    """None where axes are shared, interleaved or swapped."""
    lhs, rhs, out = labels
    own = (groups.rows, groups.group)
    k = tuple(x for x in lhs if x in rhs and x not in own)
    m = tuple(x for x in out if x in lhs and x not in own)
    n = tuple(x for x in out if x in rhs and x not in own)
    if groups.rows in out:
        forms = {*k, groups.rows}, {*k, *n, groups.group}, (groups.rows, *n)
        fits = k and not m
    else:
        forms = {*m, groups.rows}, {*n, groups.rows}, (groups.group, *m, *n)
        fits = m and not k
    same = set(lhs) == forms[0] and set(rhs) == forms[1] and out == forms[2]
    return Sides(m, n, k) if fits and n and same else None


def why_not_grouped(labels, groups: Groups, lhs, rhs) -> str | None:
    """Why the grouped kernels cannot run this contraction; None if they can."""
    found = sides(labels, groups)
    if found is None:
        return "it has axes besides rows, groups and those of two matrices"
    reason = why_not_codes(lhs, rhs)
    if reason is not None:
        return reason
    extents = extents_of(labels, lhs, rhs)
    if groups.sizes.shape != (extents.get(groups.group, len(groups.sizes)),):
        return f"sizes {groups.sizes.shape} are not one per group"
    rows = extents[groups.rows]
    m, n, k = (math.prod(extents[x] for x in axes) for axes in found)
    if rows < 128 or n < 128 or (k if found.k else m) < 128:
        return f"{rows} rows of {m * k} by {n} are smaller than a block"
    per_group = rows / groups.sizes.shape[0]
    if found.k and per_group < MAX_ROWS:  # turning the weights would outweigh it
        return f"{per_group:.0f} rows a group: the kernel is for {MAX_ROWS} at least"
    return None


def extents_of(labels, lhs, rhs) -> dict[str, int]:
    left = dict(zip(labels[0], codes_of(lhs).shape))
    return left | dict(zip(labels[1], codes_of(rhs).shape))


def grouped(labels, groups: Groups, lhs, rhs, out_dtype, interpret: bool) -> jax.Array:
    """The contraction of codes, scaled, in the order of the output's labels."""
    found = sides(labels, groups)
    assert found is not None  # or why_not_grouped had said so
    kept = groups.rows in labels[2]
    run = _rows if kept else _sums
    out = run(labels, groups, found, lhs, rhs, out_dtype, interpret)
    extents = extents_of(labels, lhs, rhs) | {groups.group: groups.sizes.shape[0]}
    return out.reshape([extents[x] for x in labels[2]])


def _rows(labels, groups, found: Sides, lhs, rhs, out_dtype, interpret):
    rows, group = (groups.rows,), (groups.group,)
    a, sa = _laid(lhs, labels[0], (rows, found.k))
    b, sb = _laid(rhs, labels[1], (group, found.n, found.k))
    sizes = a.shape[0], b.shape[1]
    num_rows, n, k = max(up(sizes[0], 8), 128), max(up(sizes[1], 64), 128), up(a.shape[1], 128)  # fmt: skip
    a, b = views.pad_to(a, (num_rows, k)), views.pad_to(b, (b.shape[0], n, k))
    sa, sb = views.pad_to(sa[:, 0], (num_rows,)), views.pad_to(sb[:, :, 0], b.shape[:2])
    out = _rows_call(out_dtype, interpret)(a, b, sa, sb, groups.sizes)
    return views.crop_to(out, sizes)


def _sums(labels, groups, found: Sides, lhs, rhs, out_dtype, interpret):
    rows = (groups.rows,)
    a, sa = _laid(lhs, labels[0], (found.m, rows))
    b, sb = _laid(rhs, labels[1], (found.n, rows))
    m, n = a.shape[0], b.shape[0]
    shapes = [(max(up(m, 8), 128), up(a.shape[1], 128)), (max(up(n, 64), 128), up(b.shape[1], 128))]  # fmt: skip
    a, b = (views.pad_to(v, shape) for v, shape in zip((a, b), shapes))
    sa, sb = (views.pad_to(s[:, 0], v.shape[:1]) for s, v in ((sa, a), (sb, b)))
    out = _sums_call(out_dtype, interpret)(a, b, sa, sb, groups.sizes)
    return views.crop_to(out, (out.shape[0], m, n))


def _laid(x, labels: Labels, sides: tuple[Labels, ...]):
    """(codes, scales in float32), an axis per side; scales vary along all but the last."""
    order = [labels.index(a) for side in sides for a in side]
    codes = codes_of(x).transpose(order)
    shape = [math.prod(codes_of(x).shape[labels.index(a)] for a in s) for s in sides]
    scale = jnp.ones((1,) * codes.ndim, jnp.float32)
    if isinstance(x, QArray):
        scale = x.scale.astype(jnp.float32).transpose(order)
    num_kept = codes.ndim - len(sides[-1])
    full = [n if a < num_kept else 1 for a, n in enumerate(codes.shape)]
    scale = views.expand(scale, full)
    return codes.reshape(shape), scale.reshape(*shape[:-1], 1)


# --- kernels as functions ---------------------------------------------------------------------


@functools.cache
def _rows_call(out_dtype, interpret: bool) -> Callable:
    def plain(a, b, sa, sb, sizes):
        a = a.astype(jnp.float32) * sa[:, None]
        b = b.astype(jnp.float32) * sb[:, :, None]
        out = lax.ragged_dot(a, b.swapaxes(1, 2), sizes)
        return out.astype(out_dtype)

    def kernel(a, b, sa, sb, sizes):
        blocks = scaled_tuned.grouped_blocks(
            out_dtype, a.shape[0] // len(sizes), b.shape[1]
        )
        return hopper_grouped.grouped_rows(a, b, sa, sb, sizes, out_dtype, blocks, interpret)  # fmt: skip

    axes, whole = "r k, g n k, r, g n, g -> r n", ("r", "k", "g")
    return as_function(kernel, plain, axes, whole, can_place=not interpret)


@functools.cache
def _sums_call(out_dtype, interpret: bool) -> Callable:
    def plain(a, b, sa, sb, sizes):
        a = a.astype(jnp.float32) * sa[:, None]
        b = b.astype(jnp.float32) * sb[:, None]
        numbers = lax.RaggedDotDimensionNumbers(
            dot_dimension_numbers=(((1,), (1,)), ((), ())),
            lhs_ragged_dimensions=[1],
            rhs_group_dimensions=[],
        )
        return lax.ragged_dot_general(a, b, sizes, numbers).astype(out_dtype)

    def kernel(a, b, sa, sb, sizes):
        blocks = scaled_tuned.scaled_blocks(out_dtype, (a.shape[0], b.shape[0]))
        return hopper_grouped.grouped_sums(a, b, sa, sb, sizes, out_dtype, blocks, interpret)  # fmt: skip

    axes, whole = "m r, n r, m, n, g -> g m n", ("r", "g")
    return as_function(kernel, plain, axes, whole, can_place=not interpret)
