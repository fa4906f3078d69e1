"""Codes times codes of rows in groups on Hopper: from a Matmul to a plan, or the reason why not.

adapter.py does this for plain contractions. Here one axis has the rows of all groups, and another
one, of an operand or of the result, has the groups (ops/ragged.py):

    rows kept      [r k] x [g k n] -> [r n]      forward, and the gradient of the rows
    rows summed    [r m] x [r n]   -> [g m n]    the gradient of the matrices

Each of k, m and n may be several axes, in any order. Rows are not split over devices, since
where a group starts depends on all sizes before it; columns are.
"""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from midtread.kernels.candidates import Refusal
from midtread.kernels.environment import Env
from midtread.kernels.layout import Labels, Matmul, codes_of, round_up
from midtread.kernels.partition import as_function
from midtread.kernels.scaled_matmul import hopper_grouped, tuned
from midtread.kernels.scaled_matmul.adapter import why_not_codes
from midtread.kernels.weight_matmul import MAX_ROWS
from midtread.numerics import views
from midtread.numerics.qarray import QArray


class Grouped(NamedTuple):
    """The plan to multiply rows in groups, by hopper_grouped.py."""

    are_rows_kept: bool
    is_interpreted: bool

    @property
    def detail(self) -> str:
        return "rows kept" if self.are_rows_kept else "rows summed"

    def run(self, a: Matmul) -> jax.Array:
        run = _rows if self.are_rows_kept else _sums
        return a.result(run(a, self.is_interpreted))


def plan(a: Matmul, env: Env) -> Grouped | Refusal:
    matrices, groups = a.matrices, a.groups
    assert groups is not None
    if a.tiles:
        return Refusal("its scales vary within the sum")
    if matrices is None:
        return Refusal("it has axes besides rows, groups and those of two matrices")
    reason = why_not_codes(a)
    if reason is not None:
        return Refusal(reason)
    if groups.sizes.shape != (a.extents[groups.group],):
        return Refusal(f"sizes {groups.sizes.shape} are not one per group")
    rows, (m, n, k) = a.extents[groups.rows], a.sizes
    if rows < 128 or n < 128 or (k if matrices.k else m) < 128:
        return Refusal(f"{rows} rows of {m * k} by {n} are smaller than a block")
    per_group = rows / groups.sizes.shape[0]
    if matrices.k and per_group < MAX_ROWS:  # turning the weights would outweigh it
        what = f"{per_group:.0f} rows a group"
        return Refusal(f"{what}: the kernel is for {MAX_ROWS} at least")
    return Grouped(bool(matrices.k), env.is_interpreted)


def _rows(of: Matmul, interpret: bool) -> jax.Array:
    assert of.groups is not None and of.matrices is not None
    rows, group, (_, n, k) = (of.groups.rows,), (of.groups.group,), of.matrices
    a, sa = _laid(of.lhs, of.labels[0], (rows, k))
    b, sb = _laid(of.rhs, of.labels[1], (group, n, k))
    sizes = a.shape[0], b.shape[1]
    num_rows, num_n = max(round_up(sizes[0], 8), 128), max(round_up(sizes[1], 64), 128)
    num_k = round_up(a.shape[1], 128)
    a, b = views.pad_to(a, (num_rows, num_k)), views.pad_to(b, (len(b), num_n, num_k))
    sa, sb = views.pad_to(sa[:, 0], (num_rows,)), views.pad_to(sb[:, :, 0], b.shape[:2])
    out = _rows_call(of.dtype, interpret)(a, b, sa, sb, of.groups.sizes)
    return views.crop_to(out, sizes)


def _sums(of: Matmul, interpret: bool) -> jax.Array:
    assert of.groups is not None and of.matrices is not None
    rows = (of.groups.rows,)
    a, sa = _laid(of.lhs, of.labels[0], (of.matrices.m, rows))
    b, sb = _laid(of.rhs, of.labels[1], (of.matrices.n, rows))
    m, n, num_k = a.shape[0], b.shape[0], round_up(a.shape[1], 128)
    a = views.pad_to(a, (max(round_up(m, 8), 128), num_k))
    b = views.pad_to(b, (max(round_up(n, 64), 128), num_k))
    sa, sb = (views.pad_to(s[:, 0], v.shape[:1]) for s, v in ((sa, a), (sb, b)))
    out = _sums_call(of.dtype, interpret)(a, b, sa, sb, of.groups.sizes)
    return views.crop_to(out, (out.shape[0], m, n))


def _laid(x, labels: Labels, sides: tuple[Labels, ...]):
    """Returns (codes, scales in float32) with an axis for each of `sides`. Scales vary along all
    of them but the last."""
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
        blocks = tuned.grouped_blocks(out_dtype, a.shape[0] // len(sizes), b.shape[1])
        return hopper_grouped.grouped_rows(a, b, sa, sb, sizes, out_dtype, blocks, interpret)  # fmt: skip

    axes, whole = "r k, g n k, r, g n, g -> r n", ("r", "k", "g")
    return as_function(kernel, plain, axes, whole, can_partition=not interpret)


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
        blocks = tuned.scaled_blocks(out_dtype, (a.shape[0], b.shape[0]))
        return hopper_grouped.grouped_sums(a, b, sa, sb, sizes, out_dtype, blocks, interpret)  # fmt: skip

    axes, whole = "m r, n r, m, n, g -> g m n", ("r", "g")
    return as_function(kernel, plain, axes, whole, can_partition=not interpret)
