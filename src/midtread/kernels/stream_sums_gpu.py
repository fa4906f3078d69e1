"""What the warpgroups of stream_gpu do with the blocks of a weight: fetch, decode, add up.

    fetch    block i of a ring -> a buffer of it, by the copy engine
    sums     [64 columns, rows] of each accumulator, over the blocks of a ring; where each
             group of rows has a scale, of scaled sums of groups

A ring is `stages` buffers, each with two barriers: `full`, when all of its parts have come,
and `empty`, when all warpgroups of the ring have left it. Each of them fills the buffers of
its own number. Who takes which column (lanes_gpu.py) is told again by `order`, for where the
kernel is interpreted.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from midtread.kernels import decode_ptx, lanes_gpu, turn_gpu
from midtread.kernels.lanes_gpu import ACCUMULATORS, COLUMNS
from midtread.kernels.pallas_compat import pl, plgpu, transposed
from midtread.numerics.formats import Format, dtype_bits


@dataclasses.dataclass(frozen=True)
class Blocks:
    k: int = 64  # rows of the weight in one buffer
    stages: int = 4  # buffers of a ring, 2 or more
    wide: int = 1  # of a program's four accumulators, how many a warpgroup has
    deep: int = 1  # rings, each with its own warpgroups: 1 or `wide`
    split: int = 1  # programs that share a sum
    cluster: int = 1  # of them that add up among themselves

    def division(self, bits: int) -> lanes_gpu.Division:
        return lanes_gpu.Division(bits, self.wide, self.deep)

    def piece(self, group: int | None) -> int:
        """Rows that are decoded at a time: what registers bear, half a block at most."""
        return min(64 if self.wide < 4 else 32, group or self.k // 2, self.k)

    def num_bytes(self, fmt: Format, rows: int, group: int | None) -> int:
        """Of shared memory."""
        padded = -(-rows // 8) * 8
        num_scales = max(1, self.k // (group or self.k))
        size = self.k * (COLUMNS * dtype_bits(fmt.dtype) // 8 + padded * 2)
        size += COLUMNS * 4 * num_scales
        beside = 0 if fmt.table is None else decode_ptx.TABLE_BYTES
        return size * self.stages * self.deep + beside + padded * turn_gpu.PITCH * 4

    def exchanged(self, rows: int) -> int:
        """Bytes in which sets of warpgroups add up what they have."""
        return 0 if self.deep == 1 else self.deep * COLUMNS * rows * 4


@dataclasses.dataclass(frozen=True)
class Plan:
    """What the body needs to know beside its arguments."""

    fmt: Format
    blocks: Blocks
    group: int | None  # rows of the weight under one scale; None: all
    num_chunks: int  # blocks of one program's part of the sum
    is_scaled: bool  # by columns, in the kernel
    native: bool
    walks: bool = False  # from sum to sum (stream_groups_gpu.py)

    @property
    def division(self) -> lanes_gpu.Division:
        return self.blocks.division(dtype_bits(self.fmt.dtype))

    @property
    def inner(self) -> int:
        return self.blocks.piece(self.group)

    @property
    def looks_up(self) -> bool:
        return self.fmt.table is not None and self.native

    @property
    def running(self) -> int:
        """Multiplications under way while the next piece is decoded."""
        return self.blocks.wide if self.blocks.wide < 4 else 0


class Refs(NamedTuple):
    """In memory: x [M, K], bytes [K, B], scales [G, N], a table, scale [1, N], out [.., m, N].
    Then, in shared memory, rings and their barriers, the table, and what sums pass through:
    `aside`, and where rings are in use to the end, `spare`."""

    x: Any
    w: Any
    scale: Any
    table: Any
    last: Any
    out: Any
    w_ring: Any
    x_ring: Any
    scale_ring: Any
    full: Any
    empty: Any
    table_here: Any
    ready: Any
    aside: Any
    spare: Any


def refs_of(plan: Plan, given) -> Refs:
    group, looks_up = plan.group, plan.looks_up
    held = [True, True, group, looks_up, plan.is_scaled, True, True, True, group]
    held += [True, True, looks_up, looks_up, True]
    held += [plan.walks and plan.native and plan.division.deep > 1]
    rest = list(given)
    return Refs(*(rest.pop(0) if is_held else None for is_held in held))


class Spot(NamedTuple):
    """Where a block lies in memory."""

    row: Any  # of the weight, and with it of its scales
    tile: Any  # of its columns
    x_row: Any
    x_column: Any


class Place(NamedTuple):
    """Where this warpgroup stands."""

    wg: Any
    ring: Any
    within: Any  # its number among those of its ring
    count: Any  # blocks of its ring
    span: tuple[Any, Any]  # of them, those of this sum
    find: Callable[[Any], Spot]  # of a block


def place(plan: Plan, count: Callable, find: Callable) -> Place:
    """Of blocks `count(ring)`, where `find(ring, i)` says."""
    wg, across = lax.axis_index("wg"), plan.division.across
    ring, within = lax.div(wg, across), lax.rem(wg, across)
    num = count(ring)
    return Place(wg, ring, within, num, (0, num), functools.partial(find, ring))


def fetch(plan: Plan, refs: Refs, me: Place, i, slot):
    """Block `i` of a ring into a buffer of it."""
    k, (num_rows, width) = plan.blocks.k, (refs.x_ring.shape[1], refs.w_ring.shape[2])
    spot, at = me.find(i), me.ring * plan.blocks.stages + slot
    barrier = refs.full.at[at]
    source = refs.w.at[pl.ds(spot.row, k), pl.ds(spot.tile * width, width)]
    plgpu.copy_gmem_to_smem(source, refs.w_ring.at[at], barrier)
    source = refs.x.at[pl.ds(spot.x_row, num_rows), pl.ds(spot.x_column, k)]
    plgpu.copy_gmem_to_smem(source, refs.x_ring.at[at], barrier)
    if plan.group:
        some = pl.ds(lax.div(spot.row, plan.group), refs.scale_ring.shape[1])
        source = refs.scale.at[some, pl.ds(spot.tile * COLUMNS, COLUMNS)]
        plgpu.copy_gmem_to_smem(source, refs.scale_ring.at[at], barrier)


def start(plan: Plan, refs: Refs, me: Place):
    """Fills all buffers for the first time, and brings the table that is looked up."""
    for slot in range(plan.blocks.stages):
        is_mine = (me.within == slot % plan.division.across) & (slot < me.count)
        pl.when(is_mine)(functools.partial(fetch, plan, refs, me, slot, slot))
    if plan.looks_up:
        copy = (refs.table, refs.table_here, refs.ready)
        pl.when(me.wg == 0)(lambda: plgpu.copy_gmem_to_smem(*copy))
        plgpu.barrier_wait(refs.ready)


def _refill(plan: Plan, refs: Refs, me: Place, i):
    """The buffer that all have left, one block ago, is filled again. A barrier knows one
    waiter: the warpgroup that a buffer belongs to."""
    stages = plan.blocks.stages
    slot = lax.rem(i, stages)

    @pl.when(
        (i + stages < me.count) & (me.within == lax.rem(slot, plan.division.across))
    )
    def _():
        plgpu.barrier_wait(refs.empty.at[me.ring * stages + slot])
        fetch(plan, refs, me, i + stages, slot)


# --- sums -------------------------------------------------------------------------------------


def _decoded(plan: Plan, refs: Refs, me: Place, at, start):
    """A piece of a block as left operands, one for each accumulator."""
    block, division = refs.w_ring.at[at, pl.ds(start, plan.inner)], plan.division
    if plan.native:
        code = decode_ptx.code(plan.fmt)
        return lanes_gpu.decoded(block, *code, division, refs.table_here)
    values = decode_ptx.values(block[...], plan.fmt)
    mine = [me.within * division.wide + a for a in range(division.wide)]
    return [mine_of(values, division.bits, j) for j in mine]


def _multiply(plan: Plan, refs: Refs, me: Place, accs, at, start):
    x = transposed(refs.x_ring.at[at, :, pl.ds(start, plan.inner)])
    for a, (acc, w) in enumerate(zip(accs, _decoded(plan, refs, me, at, start))):
        if not plan.native:  # the interpreter's wgmma takes no registers
            place = me.wg * plan.blocks.wide + a
            refs.aside[place] = w
            w = refs.aside.at[place]
        plgpu.wgmma(acc, w, x)


def _accumulators(plan: Plan, refs: Refs) -> list:
    shape = 64, refs.x_ring.shape[1]
    return [plgpu.ACC(shape, jnp.float32)] * plan.blocks.wide


def sums(plan: Plan, refs: Refs, me: Place) -> list[jax.Array]:
    """[64, rows] of each accumulator, over the blocks of a ring that are one sum."""
    if plan.group:
        return _sums_of_groups(plan, refs, me)
    stages = plan.blocks.stages

    def block(i, accs):
        at = me.ring * stages + lax.rem(i, stages)
        plgpu.barrier_wait(refs.full.at[at])
        for start in range(0, plan.blocks.k, plan.inner):
            _multiply(plan, refs, me, accs, at, start)
            plgpu.wgmma_wait(plan.running)  # nothing reads registers of the next piece
            if start == 0:  # all of the last block is done

                @pl.when(i > 0)
                def _():
                    last = lax.rem(i - 1, stages)
                    plgpu.barrier_arrive(refs.empty.at[me.ring * stages + last])

        pl.when(i > 0)(lambda: _refill(plan, refs, me, i - 1))

    def over_all(*accs):
        lax.fori_loop(*me.span, lambda i, _: block(i, accs), None)
        return [acc[...] for acc in accs]

    return pl.run_scoped(over_all, *_accumulators(plan, refs))


def _sums_of_groups(plan: Plan, refs: Refs, me: Place) -> list[jax.Array]:
    """The same, where every group is scaled before it is added."""
    stages, accumulators = plan.blocks.stages, _accumulators(plan, refs)
    assert plan.group is not None
    step = min(plan.blocks.k, plan.group)  # rows under one scale

    def one_group(*accs, at, first):
        for start in range(first, first + step, plan.inner):
            _multiply(plan, refs, me, accs, at, start)
            plgpu.wgmma_wait(plan.running)
        return [acc[...] for acc in accs]

    def block(i, totals):
        at = me.ring * stages + lax.rem(i, stages)
        plgpu.barrier_wait(refs.full.at[at])
        for g in range(plan.blocks.k // step):
            run = functools.partial(one_group, at=at, first=g * step)
            sums = pl.run_scoped(run, *accumulators)
            some = scales(refs.scale_ring.at[at, g], plan, me)
            totals = [
                total + one * lax.broadcast_in_dim(s, one.shape, [0])
                for total, one, s in zip(totals, sums, some)
            ]
        plgpu.barrier_arrive(refs.empty.at[at])
        pl.when(i > 0)(lambda: _refill(plan, refs, me, i - 1))
        return totals

    zero = jnp.zeros(accumulators[0].shape, jnp.float32)
    if plan.native:
        zero = plgpu.layout_cast(zero, plgpu.Layout.WGMMA)
    return lax.fori_loop(*me.span, block, [zero] * plan.blocks.wide)


def scales(ref, plan: Plan, me: Place):
    """A warpgroup's 64 scales for each of its accumulators, in float32."""
    division = plan.division
    if plan.native:
        return lanes_gpu.scales(ref, division)
    values = ref[...].astype(jnp.float32)[None]
    mine = [me.within * division.wide + a for a in range(division.wide)]
    return [mine_of(values, division.bits, j)[:, 0] for j in mine]


# --- whose columns are whose ------------------------------------------------------------------


def order(bits: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Extents of a program's 256 columns, and the axes in the order (j, row of wgmma)."""
    if bits == 4:
        return (4, 8, 4, 2), (2, 0, 3, 1)  # w g j h -> j w h g
    return (2, 4, 8, 2, 2), (0, 3, 1, 4, 2)  # j1 w g j0 h -> j1 j0 w h g


def mine_of(values, bits: int, j):
    """[64, K] of a block of values [K, 256]: what warpgroup `j` takes; interpreted."""
    split, axes = order(bits)
    k = values.shape[0]
    parts = values.reshape(k, *split).transpose(*(1 + a for a in axes), 0)
    return lax.dynamic_index_in_dim(
        parts.reshape(ACCUMULATORS, 64, k), j, 0, keepdims=False
    )
