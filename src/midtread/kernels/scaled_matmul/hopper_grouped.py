"""Grouped matmuls on Hopper, for experts: rows come in groups, each with its own matrix.

    grouped_rows    out_Rn  =  sa_R sb_gn  sum_k a_Rk b_gnk       g = group of row R
    grouped_sums    out_gmn =  sa_m sb_n   sum_{R in g} a_mR b_nR

The first is the forward pass and the gradient of its rows, the second the gradient of the
matrices. Only the device knows the sizes of groups. XLA makes a small table of row blocks from
them (`row_blocks`), and programs go through it as hopper.py goes through its grid.

The copy engine moves whole patterns of 8 rows and 128 codes. So blocks of rows start at a multiple
of 8. The 8 rows in which two groups meet are written to a side array, and XLA moves them to where
they belong (`_with_edges`); these are at most 16 rows of a group. A sum starts and ends at a
multiple of 128, and codes of neighbouring groups are overwritten with zeros before they are
multiplied. Rows beyond all groups come out as zeros, as in lax.ragged_dot, and are not multiplied.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from midtread.kernels.pallas_compat import pl, plgpu
from midtread.kernels.scaled_matmul.hopper import (
    OUT,
    Job,
    ScaledBlocks,
    code_specs,
    launch,
    multiplying,
    nothing,
    over_blocks,
    scaled_by,
    send,
    squares,
)

STRIP = 8  # rows of the copy engine's pattern


class GroupBounds(NamedTuple):
    """The first row of each group and the first row after it. One more group, the last, has the
    rows beyond all groups."""

    starts: jax.Array
    ends: jax.Array


def group_bounds(sizes: jax.Array, num_rows: int) -> GroupBounds:
    """Computes where groups of these sizes start and end."""
    ends = jnp.minimum(jnp.cumsum(sizes.astype(jnp.int32)), num_rows)
    ends = jnp.append(ends, num_rows).astype(jnp.int32)
    return GroupBounds(jnp.append(0, ends[:-1]).astype(jnp.int32), ends)


def row_blocks(groups: GroupBounds, num_rows: int, block: int) -> jax.Array:
    """Returns int32 [4, blocks + 1]. Each block has a column: its group, its first row, and the
    start and end of the group. The last column has the number of blocks."""
    starts, ends = groups
    first = starts // STRIP * STRIP
    counts = jnp.where(ends > starts, -((first - ends) // block), 0)
    until = jnp.cumsum(counts)
    num_groups = len(starts)
    most = (num_rows + (STRIP - 1) * num_groups) // block + num_groups
    index = jnp.arange(most, dtype=jnp.int32)
    group = jnp.sum(index[:, None] >= until, axis=1)
    group = jnp.minimum(group, num_groups - 1)
    row = first[group] + (index - (until - counts)[group]) * block
    table = jnp.stack([group, row, starts[group], ends[group]])
    return jnp.append(table, jnp.full((4, 1), until[-1]), axis=1).astype(jnp.int32)


# --- rows kept --------------------------------------------------------------------------------


def _rows_body(
    table_gmem,
    a_gmem,
    b_gmem,
    sa_gmem,
    sb_gmem,
    out_gmem,
    edge_gmem,
    *,
    blocks: ScaledBlocks,
):
    num_groups, n, k = b_gmem.shape
    cta_m, cta_n = blocks.cta
    grid = table_gmem[0, table_gmem.shape[1] - 1], pl.cdiv(n, cta_n)
    specs = code_specs(a_gmem, b_gmem, blocks)

    def find(index):
        i, j = plgpu.planar_snake(index, grid, blocks.minor, blocks.width)
        group, first, start, end = (table_gmem[p, i] for p in range(4))
        if blocks.pair:
            first = first + lax.axis_index("pair") * cta_m
        first = pl.multiple_of(first, STRIP)
        own = jnp.minimum(group, num_groups - 1)
        wg = lax.axis_index("wg")
        rows, columns = blocks.mine(wg)
        row, column = first + rows.start, j * cta_n + columns.start

        def write(out, out_smem):
            out = scaled_by(out, sa_gmem, row, sb_gmem.at[own], column)
            corner = pl.multiple_of(row, STRIP), column
            edges = group * 2 * STRIP
            _send_within(
                out, corner, (start, end), out_smem, out_gmem, edge_gmem, edges
            )

        inputs = [
            a_gmem.at[pl.ds(first, cta_m)],
            b_gmem.at[own, pl.ds(j * cta_n, cta_n)],
        ]
        steps = jnp.where(group < num_groups, pl.cdiv(k, blocks.k), 0)
        return Job(inputs, specs, steps, *multiplying(blocks, a_gmem.dtype, wg, write))

    example = Job([a_gmem, b_gmem.at[0]], specs, None, nothing, nothing)
    over_blocks(
        find, grid[0] * grid[1], example, out_gmem.dtype, groups=2, stages=blocks.stages
    )


def _send_within(out, corner, span, out_smem, out_gmem, edge_gmem, edges):
    """Writes the rows of a block that lie in whole strips of `span` to the result, and strips
    that the span cuts to the rows `edges` of a side array."""
    (row, column), (start, end) = corner, span
    low = lax.div(start + STRIP - 1, STRIP) * STRIP
    high = lax.div(end, STRIP) * STRIP
    for (r, c), slot in squares(out, out_smem, out_gmem.dtype):
        top = row + r
        columns = pl.ds(column + c, OUT)

        def copy(at, num, target, to, slot=slot, columns=columns):
            source = slot.at[pl.ds(pl.multiple_of(at, STRIP), num)]
            target = target.at[pl.ds(pl.multiple_of(to, STRIP), num), columns]
            plgpu.copy_smem_to_gmem(source, target, commit_group=False)

        at = jnp.clip(low - top, 0, OUT)
        count = jnp.maximum(jnp.clip(high - top, 0, OUT) - at, 0)

        @pl.when(count == OUT)
        def _(slot=slot, top=top, columns=columns):
            plgpu.copy_smem_to_gmem(
                slot,
                out_gmem.at[pl.ds(top, OUT), columns],
                commit_group=False,
            )

        for num in (OUT // 2, OUT // 4, STRIP):

            @pl.when((count != OUT) & (count & num != 0))
            def _(copy=copy, top=top, at=at, num=num):
                copy(at, num, out_gmem, top + at)

            at = at + (count & num)
        for side, cut in enumerate((start, end)):
            strip = lax.div(cut, STRIP) * STRIP
            is_here = (cut != strip) & (strip >= top) & (strip < top + OUT)

            @pl.when(is_here)
            def _(copy=copy, top=top, strip=strip, side=side):
                copy(strip - top, STRIP, edge_gmem, edges + side * STRIP)


def _with_edges(out: jax.Array, edges: jax.Array, groups: GroupBounds) -> jax.Array:
    """Puts the rows of strips that two groups share, which are in the side array, into `out`."""
    cuts = jnp.stack(groups, axis=1)[:, :, None]  # [groups, 2, 1]
    rows = cuts // STRIP * STRIP + jnp.arange(STRIP, dtype=jnp.int32)
    starts, ends = (part[:, None, None] for part in groups)
    # A group that lies within one strip has the same strip on both sides.
    apart = starts // STRIP != ends // STRIP
    once = jnp.append(apart, jnp.ones_like(apart), axis=1)
    inside = (rows >= starts) & (rows < ends) & (cuts % STRIP != 0) & once
    beyond = out.shape[0] + jnp.arange(rows.size, dtype=jnp.int32)
    index = jnp.where(inside.reshape(-1), rows.reshape(-1), beyond)
    return out.at[index].set(edges, mode="drop", unique_indices=True)


def grouped_rows(
    a_RK: jax.Array,
    b_GNK: jax.Array,
    sa_R: jax.Array,
    sb_GN: jax.Array,
    sizes_G: jax.Array,
    out_dtype,
    blocks: ScaledBlocks,
    interpret: bool = False,
) -> jax.Array:
    """Returns [R, N] of codes and float32 scales: each row times its group's matrix."""
    num_rows, (num_groups, n, _) = a_RK.shape[0], b_GNK.shape
    if interpret:
        blocks = dataclasses.replace(blocks, pair=False)
    groups = group_bounds(sizes_G, num_rows)
    table = row_blocks(groups, num_rows, blocks.rows)
    sa_R = jnp.pad(sa_R, (0, blocks.rows))
    sb_GN = jnp.pad(sb_GN, ((0, 0), (0, -n % blocks.cta[1])))
    out, edges = launch(
        functools.partial(_rows_body, blocks=blocks),
        [
            jax.ShapeDtypeStruct((num_rows, n), out_dtype),
            jax.ShapeDtypeStruct(((num_groups + 1) * 2 * STRIP, n), out_dtype),
        ],
        (table, a_RK, b_GNK, sa_R, sb_GN),
        groups=2, pair=blocks.pair, interpret=interpret,
    )  # fmt: skip
    return _with_edges(out, edges, groups)


# --- rows summed ------------------------------------------------------------------------------


def _sums_body(
    spans_gmem, a_gmem, b_gmem, sa_gmem, sb_gmem, out_gmem, *, blocks: ScaledBlocks
):
    num_groups, m, n = out_gmem.shape
    cta_m, cta_n = blocks.cta
    grid = pl.cdiv(m, blocks.rows), pl.cdiv(n, cta_n)
    per_group = grid[0] * grid[1]

    def find(index):
        group = lax.div(index, jnp.int32(per_group))
        i, j = blocks.walk(index - group * per_group, grid)
        start, end = spans_gmem[0, group], spans_gmem[1, group]
        first = lax.div(start, jnp.int32(blocks.k)) * blocks.k
        steps = jnp.where(
            end > start, lax.div(end - first + blocks.k - 1, jnp.int32(blocks.k)), 0
        )
        wg = lax.axis_index("wg")
        rows, columns = blocks.mine(wg)
        row, column = i * cta_m + rows.start, j * cta_n + columns.start

        def edit(t, part):
            at = first + t * blocks.k
            is_whole = (at >= start) & (at + blocks.k <= end)

            @pl.when(jnp.logical_not(is_whole))
            def _():
                code = at + lax.broadcasted_iota(jnp.int32, part.shape, 1)
                kept = (code >= start) & (code < end)
                values = part[...].astype(jnp.float32)
                part[...] = jnp.where(kept, values, 0.0).astype(part.dtype)
                plgpu.commit_smem()

        def write(out, out_smem):
            out = scaled_by(out, sa_gmem, row, sb_gmem, column)
            send(out, (group, row, column), out_smem, out_gmem)

        inputs = [
            a_gmem.at[pl.ds(i * cta_m, cta_m)],
            b_gmem.at[pl.ds(j * cta_n, cta_n)],
        ]
        specs = code_specs(a_gmem, b_gmem, blocks, first)
        step, finish = multiplying(blocks, a_gmem.dtype, wg, write, edit)
        return Job(inputs, specs, steps, step, finish)

    specs = code_specs(a_gmem, b_gmem, blocks, 0)
    example = Job([a_gmem, b_gmem], specs, None, nothing, nothing)
    count = num_groups * per_group
    over_blocks(find, count, example, out_gmem.dtype, groups=2, stages=blocks.stages)


def grouped_sums(
    a_MR: jax.Array,
    b_NR: jax.Array,
    sa_M: jax.Array,
    sb_N: jax.Array,
    sizes_G: jax.Array,
    out_dtype,
    blocks: ScaledBlocks,
    interpret: bool = False,
) -> jax.Array:
    """Returns [G, M, N] of codes and float32 scales: sums over the rows of each group."""
    (m, num_rows), n = a_MR.shape, b_NR.shape[0]
    if interpret:
        blocks = dataclasses.replace(blocks, pair=False)
    assert blocks.split == "m", "each warpgroup zeroes its own rows of a"
    spans = jnp.stack(group_bounds(sizes_G, num_rows))
    sa_M = jnp.pad(sa_M, (0, -m % (2 * blocks.cta[0])))
    sb_N = jnp.pad(sb_N, (0, -n % blocks.cta[1]))
    return launch(
        functools.partial(_sums_body, blocks=blocks),
        jax.ShapeDtypeStruct((sizes_G.shape[0], m, n), out_dtype),
        (spans, a_MR, b_NR, sa_M, sb_N),
        groups=2, pair=blocks.pair, interpret=interpret,
    )  # fmt: skip
