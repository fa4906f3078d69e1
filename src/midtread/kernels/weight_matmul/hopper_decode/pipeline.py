"""What the warpgroups of hopper_decode do with the blocks of a weight: fetch, decode, add up.

    fetch    block i of a ring -> a buffer of it, by the copy engine
    sums     [64 columns, rows] of each accumulator, over the blocks of a ring: by wgmma, or
             where a warpgroup has a ring to itself by mma.sync (hopper/mma.py)

A ring is `stages` buffers, each with two barriers: `full`, when all of its parts have come,
and `empty`, when all warpgroups of the ring have left it. Each of them fills the buffers of
its own number. A warpgroup that is alone with its ring needs no `empty`.

Scales of groups are applied to decoded values, and the products rounded to bfloat16, which
gives the numbers of decoding first; with mma.sync to the sums of groups, in float32.

Who takes which column is told by hopper/lanes.py, also where the kernel is interpreted.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from midtread.kernels.hopper import decoding, lanes, mma
from midtread.kernels.hopper.lanes import COLUMNS
from midtread.kernels.pallas_compat import pl, plgpu, transposed
from midtread.kernels.weight_matmul.hopper_decode import exchange
from midtread.numerics.formats import Format, dtype_bits


@dataclasses.dataclass(frozen=True)
class DecodeBlocks:
    k: int = 64  # rows of the weight in one buffer
    stages: int = 4  # buffers of a ring, 2 or more
    wide: int = 1  # of a program's four accumulators, how many a warpgroup has
    deep: int = 1  # rings, each with its own warpgroups
    split: int = 1  # programs that share a sum
    cluster: int = 1  # of them that add up among themselves, 8 at most

    def division(self, bits: int) -> lanes.Division:
        return lanes.Division(bits, self.wide, self.deep)

    def num_bytes(self, fmt: Format, rows: int, group: int | None) -> int:
        """Of shared memory."""
        padded = -(-rows // 8) * 8
        num_scales = max(1, self.k // (group or self.k))
        size = self.k * (COLUMNS * dtype_bits(fmt.dtype) // 8 + padded * 2)
        size += COLUMNS * 4 * num_scales
        beside = 0 if fmt.table is None else decoding.TABLE_BYTES
        return size * self.stages * self.deep + beside

    def exchanged(self, rows: int) -> int:
        """Bytes in which sums change hands; afterwards, they may be those of the rings."""
        return self.deep * COLUMNS * -(-rows // 8) * 8 * 4

    def received(self, rows: int) -> int:
        """Bytes for the sums that come from the other programs of a cluster, and 1 kB, which
        the barrier that says so takes as everything does."""
        shape = exchange.received_shape(self.cluster, rows)
        return math.prod(shape) * 4 + 1024 if self.cluster > 1 else 0

    def is_ample(self, fmt: Format, rows: int) -> bool:
        """Whether sums may change hands in the rings."""
        width = COLUMNS * dtype_bits(fmt.dtype) // 8
        return self.stages * self.deep * self.k * width >= self.exchanged(rows)


@dataclasses.dataclass(frozen=True)
class Plan:
    """What the body needs to know beside its arguments."""

    fmt: Format
    blocks: DecodeBlocks
    group: int | None  # rows of the weight under one scale; None: all
    num_chunks: int  # blocks of the whole sum
    is_scaled: bool  # by columns, in the kernel
    native: bool
    walks: bool = False  # from sum to sum (hopper_decode/grouped.py)

    @property
    def division(self) -> lanes.Division:
        return self.blocks.division(dtype_bits(self.fmt.dtype))

    @property
    def by_warps(self) -> bool:
        return self.native and self.division.across == 1

    @property
    def inner(self) -> int:
        """Rows that are decoded at a time: what registers bear, half a block at most."""
        if self.by_warps:
            return 32
        return min(64, self.blocks.k // 2)

    @property
    def is_clustered(self) -> bool:
        return self.native and self.blocks.cluster > 1

    @property
    def looks_up(self) -> bool:
        return self.fmt.table is not None and self.native


class Refs(NamedTuple):
    """In memory: x [M, K], bytes [K, B], scales [G, N], a table, scale [1, N], out [.., m, N].
    Then, in shared memory, rings and their barriers, the table, what comes from other
    programs and says so, where rings are in use to the end what sums pass through, and left
    operands for the interpreter."""

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
    received: Any
    signal: Any
    spare: Any
    aside: Any


def refs_of(plan: Plan, given) -> Refs:
    group, looks_up, clustered = plan.group, plan.looks_up, plan.is_clustered
    held = [True, True, group, looks_up, plan.is_scaled, True, True, True, group]
    held += [True, not plan.by_warps, looks_up, looks_up, clustered, clustered]
    held += [plan.walks and plan.native, not plan.native]
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
    """A piece of a block as left operands, one for each accumulator, scaled by groups."""
    block, division = refs.w_ring.at[at, pl.ds(start, plan.inner)], plan.division
    scale, group = None, min(plan.group or plan.inner, plan.inner)
    if plan.group:
        first = start // plan.group if plan.group < plan.blocks.k else 0
        scale = refs.scale_ring.at[at, pl.ds(first, plan.inner // group)]
    if plan.native:
        code = decoding.code(plan.fmt, _is_folded(plan, refs))
        return lanes.decoded(block, code, division, refs.table_here, scale)
    values = decoding.values(block[...], plan.fmt)
    if scale is not None:
        scales = jnp.repeat(scale[...], group, 0)
        values = (values * scales).astype(values.dtype)
    mine = [me.within * division.wide + a for a in range(division.wide)]
    return [lanes.mine_of(values, division.bits, j) for j in mine]


def _multiply(plan: Plan, refs: Refs, me: Place, accs, at, start):
    x = transposed(refs.x_ring.at[at, :, pl.ds(start, plan.inner)])
    for a, (acc, w) in enumerate(zip(accs, _decoded(plan, refs, me, at, start))):
        if not plan.native:  # the interpreter's wgmma takes no registers
            place = me.wg * plan.blocks.wide + a
            refs.aside[place] = w
            w = refs.aside.at[place]
        plgpu.wgmma(acc, w, x)


def _is_folded(plan: Plan, refs: Refs) -> bool:
    """Whether scales of groups are in the slopes, where a format has any (hopper/decoding.py)."""
    if plan.by_warps or not plan.group:
        return False
    return refs.scale_ring.dtype == jnp.bfloat16


def sums(plan: Plan, refs: Refs, me: Place) -> list[jax.Array]:
    """[64, rows] of each accumulator, over the blocks of a ring that are one sum."""
    found = (_sums_by_warps if plan.by_warps else _sums)(plan, refs, me)
    power = decoding.power(plan.fmt, _is_folded(plan, refs)) if plan.native else 0
    return [one * 2.0**power for one in found] if power else found


def _sums(plan: Plan, refs: Refs, me: Place) -> list[jax.Array]:
    """By wgmma, which reads what is decoded while the next is."""
    stages = plan.blocks.stages

    def block(i, accs):
        at = me.ring * stages + lax.rem(i, stages)
        plgpu.barrier_wait(refs.full.at[at])
        for start in range(0, plan.blocks.k, plan.inner):
            _multiply(plan, refs, me, accs, at, start)
            # nothing reads registers of the next piece
            plgpu.wgmma_wait(plan.blocks.wide)
            if start == 0:  # all of the last block is done

                @pl.when(i > 0)
                def _():
                    last = lax.rem(i - 1, stages)
                    plgpu.barrier_arrive(refs.empty.at[me.ring * stages + last])

        pl.when(i > 0)(lambda: _refill(plan, refs, me, i - 1))

    def over_all(*accs):
        lax.fori_loop(*me.span, lambda i, _: block(i, accs), None)
        return [acc[...] for acc in accs]

    one = plgpu.ACC((64, refs.x_ring.shape[1]), jnp.float32)
    return pl.run_scoped(over_all, *[one] * plan.blocks.wide)


def _sums_by_warps(plan: Plan, refs: Refs, me: Place) -> list[jax.Array]:
    """By instructions that warps wait for. Each group is a sum of its own."""
    stages, k, division = plan.blocks.stages, plan.blocks.k, plan.division
    step = min(k, plan.group or k)  # rows under one scale
    code = decoding.code(plan.fmt)

    def block(i, totals):
        slot = lax.rem(i, stages)
        at = me.ring * stages + slot
        plgpu.barrier_wait(refs.full.at[at])
        for first in range(0, k, step):
            sums = None if plan.group else totals
            for start in range(first, first + step, plan.inner):
                piece = refs.w_ring.at[at, pl.ds(start, plan.inner)]
                w = lanes.decoded(piece, code, division, refs.table_here)
                sums = mma.multiplied(sums, w, refs.x_ring.at[at], start)
            if plan.group:
                scales = lanes.scales(refs.scale_ring.at[at, first // step], division)
                sums = [
                    total + one * lax.broadcast_in_dim(s, one.shape, [0])
                    for total, one, s in zip(totals, sums, scales)
                ]
            totals = sums

        @pl.when(i + stages < me.count)
        def _():
            mma.meet()  # all have read it
            fetch(plan, refs, me, i + stages, slot)

        return totals

    zero = jnp.zeros((64, refs.x_ring.shape[1]), jnp.float32)
    zero = plgpu.layout_cast(zero, plgpu.Layout.WGMMA)
    return lax.fori_loop(*me.span, block, [zero] * plan.blocks.wide)


def scales(ref, plan: Plan, me: Place) -> list:
    """A warpgroup's 64 of 256 scales for each accumulator, in float32; interpreted."""
    values, division = ref[...].astype(jnp.float32)[None], plan.division
    mine = [me.within * division.wide + a for a in range(division.wide)]
    return [lanes.mine_of(values, division.bits, j)[:, 0] for j in mine]
