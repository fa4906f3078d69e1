"""What the warpgroups of this kernel do with the blocks of a weight: fetch, decode, add up.

    fill      the first blocks of every ring go into its buffers
    sums      [64 columns, rows] of each accumulator, over the blocks of a ring: by wgmma, or
              by mma.sync where a warpgroup has a ring to itself (hopper/mma.py)

hopper/ring.py has the buffers. Every warpgroup of a ring refills the buffers of its own
number, once all have read them. A warpgroup that is alone with its ring needs no barrier for
that.

Scales of groups are applied to decoded values, and the products are rounded to bfloat16: the
result is that of decoding first. With mma.sync they are applied to the sums of groups, in
float32, unless groups are short or codes are floats of 4 bits, which scales leave exact. hopper/lanes.py says which warpgroup takes which column, also for the interpreter.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from midtread.kernels.hopper import decoding, lanes, mma, ring
from midtread.kernels.hopper.lanes import COLUMNS
from midtread.kernels.hopper.ring import References
from midtread.kernels.hopper.shared_memory import swizzled
from midtread.kernels.pallas_compat import pl, plgpu, transposed
from midtread.kernels.weight_matmul.hopper_decode import exchange
from midtread.numerics.formats import Format, dtype_bits


@dataclasses.dataclass(frozen=True)
class DecodeBlocks:
    k: int = 64  # rows of the weight in one buffer
    stages: int = 4  # buffers of a ring, 2 or more
    ahead: int | None = None  # blocks under way at most; there may be more buffers
    wide: int = 1  # of a program's four accumulators, how many a warpgroup has
    deep: int = 1  # rings, each with its own warpgroups
    split: int = 1  # programs that share a sum
    cluster: int = 1  # of them that add up among themselves, 8 at most

    @property
    def lag(self) -> int:
        """How many blocks are begun after a buffer's own before it is filled again."""
        return max(1, self.stages - (self.ahead or self.stages))

    def division(self, bits: int) -> lanes.Division:
        return lanes.Division(bits, self.wide, self.deep)

    def num_bytes(self, fmt: Format, rows: int, group: int | None) -> int:
        """The shared memory that the rings and a table take; there is room for zero points."""
        padded = -(-rows // 8) * 8
        num_scales = max(1, self.k // (group or self.k))
        size = self.k * (COLUMNS * dtype_bits(fmt.dtype) // 8 + padded * 2)
        size += COLUMNS * (4 + 1) * num_scales
        beside = 0 if fmt.table is None else decoding.TABLE_BYTES
        return size * self.stages * self.deep + beside

    def exchanged(self, rows: int) -> int:
        """Bytes in which sums change hands; once the rings are done, they may be theirs."""
        return self.deep * COLUMNS * -(-rows // 8) * 8 * 4

    def received(self, rows: int) -> int:
        """Bytes for the sums that the other programs of a cluster send, and 1 kB, which is
        what every allocation takes at least, for the barrier that announces them."""
        shape = exchange.received_shape(self.cluster, rows)
        return math.prod(shape) * 4 + 1024 if self.cluster > 1 else 0

    def is_ample(self, fmt: Format, rows: int) -> bool:
        """Whether sums may change hands in the ring of codes or in that of x."""
        width = COLUMNS * dtype_bits(fmt.dtype) // 8
        largest = max(width, -(-rows // 8) * 8 * 2)
        return self.stages * self.deep * self.k * largest >= self.exchanged(rows)


@dataclasses.dataclass(frozen=True)
class Plan(ring.Plan):
    """What the body needs to know beside its references."""

    blocks: DecodeBlocks
    num_chunks: int  # blocks of the whole sum
    gate: str | None = None  # by which half of the columns gates the other

    @property
    def division(self) -> lanes.Division:
        return self.blocks.division(dtype_bits(self.fmt.dtype))

    @property
    def by_warps(self) -> bool:
        """Whether each warp multiplies for itself, by mma.sync."""
        return self.native and self.division.across == 1

    @property
    def scales_sums(self) -> bool:
        """Whether scales of groups are applied to the sums of groups, not to values."""
        is_long = self.group is not None and self.group >= self.inner
        return self.by_warps and is_long and not decoding.is_small_float(self.fmt)

    @property
    def inner(self) -> int:
        """Rows that are decoded at a time: what registers bear, half a block at most."""
        if self.by_warps:
            return 32
        return min(64, self.blocks.k // 2)

    @property
    def x_columns(self) -> int:
        """Columns of x that are swizzled together."""
        return 64 if self.by_warps else self.inner

    def spare(self, refs: References) -> tuple[Any, Any]:
        """The larger ring, in which sums change hands once blocks are read, and its transforms."""
        width = refs.codes_ring.shape[-1]
        if width >= 2 * refs.x_ring.shape[1]:
            return refs.codes_ring, swizzled(min(128, width), jnp.int8)
        return refs.x_ring, swizzled(self.x_columns, jnp.bfloat16)

    @property
    def is_clustered(self) -> bool:
        return self.native and self.blocks.cluster > 1

    def buffers(self, rows: int, scale) -> dict:
        """Rings for `rows` rows of x and for scales of groups, and the table."""
        blocks, division = self.blocks, self.division
        count, width = blocks.stages * blocks.deep, COLUMNS * division.bits // 8
        buffers = ring.ring_buffers(
            self, count, blocks.k, rows, COLUMNS, width,
            x_columns=self.x_columns,
            scale_dtype=None if scale is None else scale.dtype,
        )  # fmt: skip
        if not self.by_warps:
            barrier = {"num_arrivals": division.across, "num_barriers": count}
            buffers["empty"] = plgpu.Barrier(**barrier)
        return buffers | self.table_buffers()

    def interpreter_buffers(self) -> dict:
        each = self.division.groups * self.blocks.wide, 64, self.inner
        return {"left_operands": plgpu.SMEM(each, jnp.bfloat16)}


class BlockAddress(NamedTuple):
    """Where a block of the weight, and what meets it, lies in global memory."""

    row: Any  # of the weight, and with it of its scales
    tile: Any  # of its columns
    x_row: Any
    x_column: Any


class Warpgroup(NamedTuple):
    """One warpgroup of a program, and the blocks it reads."""

    number: Any
    ring: Any
    within: Any  # its number among those of its ring
    count: Any  # how many blocks its ring reads
    span: tuple[Any, Any]  # of them, those of the present sum
    address: Callable[[Any], BlockAddress]  # of a block of the ring


def this_warpgroup(plan: Plan, count: Callable, address: Callable) -> Warpgroup:
    """A ring reads `count(ring)` blocks; block `i` lies at `address(ring, i)`."""
    wg, across = lax.axis_index("wg"), plan.division.across
    number, within = lax.div(wg, across), lax.rem(wg, across)
    num = count(number)
    find = functools.partial(address, number)
    return Warpgroup(wg, number, within, num, (0, num), find)


def _fetch(plan: Plan, refs: References, me: Warpgroup, i, slot):
    """Brings block `i` of a ring into one of its buffers."""
    k, num_rows = plan.blocks.k, refs.x_ring.shape[1]
    block, at = me.address(i), me.ring * plan.blocks.stages + slot
    ring.fetch_codes(refs, at, block.row, block.tile)
    source = refs.x.at[pl.ds(block.x_row, num_rows), pl.ds(block.x_column, k)]
    plgpu.copy_gmem_to_smem(source, refs.x_ring.at[at], refs.full.at[at])
    ring.fetch_scales(plan, refs, at, block.row, block.tile)


def fill(plan: Plan, refs: References, me: Warpgroup):
    """Fills all buffers for the first time, and brings the table that is looked up."""
    for slot in range(plan.blocks.stages):
        is_mine = (me.within == slot % plan.division.across) & (slot < me.count)
        pl.when(is_mine)(functools.partial(_fetch, plan, refs, me, slot, slot))
    ring.fetch_table(plan, refs, me.number)


def _refill(plan: Plan, refs: References, me: Warpgroup, i):
    """Fills the buffer of block `i`, which all have read, with a later one. A barrier knows
    one waiter: the warpgroup that the buffer belongs to."""
    stages = plan.blocks.stages
    slot = lax.rem(i, stages)

    @pl.when(
        (i + stages < me.count) & (me.within == lax.rem(slot, plan.division.across))
    )
    def _():
        plgpu.barrier_wait(refs.empty.at[me.ring * stages + slot])
        _fetch(plan, refs, me, i + stages, slot)


# --- sums -------------------------------------------------------------------------------------


def _multiply(plan: Plan, refs: References, me: Warpgroup, accs, at, start, lines):
    """Adds to each accumulator its columns of a piece of a buffer, times x; `lines` as in
    `Piece.decoded`."""
    x = transposed(refs.x_ring.at[at, :, pl.ds(start, plan.inner)])
    piece = ring.piece(plan, refs, at, start, plan.inner)
    is_folded = _is_folded(plan, refs)
    options = {"is_folded": is_folded, "lines": lines}
    ws = piece.decoded(plan, refs, plan.division, me.number, **options)
    for a, (acc, w) in enumerate(zip(accs, ws)):
        here = me.number, a, plan.blocks.wide
        plgpu.wgmma(acc, ring.as_left_operand(plan, refs, w, *here), x)


def _is_folded(plan: Plan, refs: References) -> bool:
    """Whether scales of groups are in the slopes of the decoding, if the format has any."""
    if plan.scales_sums or plan.zero_bits or not plan.group:
        return False
    return refs.scale_ring.dtype == jnp.bfloat16


def _shared_rows(plan: Plan, refs: References) -> int | None:
    """How many rows have slopes and starts in common, where they are several pieces."""
    group = plan.group
    if not plan.native or group is None or group <= plan.inner:
        return None
    is_shared = _is_folded(plan, refs) and decoding.code(plan.fmt, True).lines
    return group if is_shared else None


def sums(plan: Plan, refs: References, me: Warpgroup) -> list[jax.Array]:
    """[64, rows] of each accumulator, over the blocks of a ring that are one sum."""
    totals = (_sums_by_warps if plan.by_warps else _sums)(plan, refs, me)
    power = decoding.power(plan.fmt, _is_folded(plan, refs)) if plan.native else 0
    return [one * 2.0**power for one in totals] if power else totals


def _sums(plan: Plan, refs: References, me: Warpgroup) -> list[jax.Array]:
    """By wgmma, which reads what was decoded while the next piece is being decoded."""
    stages, lag = plan.blocks.stages, plan.blocks.lag
    shared_rows = _shared_rows(plan, refs)

    def block(i, accs):
        at, lines = me.ring * stages + lax.rem(i, stages), None
        plgpu.barrier_wait(refs.full.at[at])
        for start in range(0, plan.blocks.k, plan.inner):
            if shared_rows and start % shared_rows == 0:
                first = ring.piece(plan, refs, at, start, plan.inner)
                lines = first.lines(plan, plan.division)
            _multiply(plan, refs, me, accs, at, start, lines)
            # Nothing may still read the registers that the next piece is decoded into.
            plgpu.wgmma_wait(plan.blocks.wide)
            if start == 0:  # so all of the block before this one is done

                @pl.when(i > 0)
                def _():
                    last = lax.rem(i - 1, stages)
                    plgpu.barrier_arrive(refs.empty.at[me.ring * stages + last])

        pl.when(i >= lag)(lambda: _refill(plan, refs, me, i - lag))

    def over_all(*accs):
        lax.fori_loop(*me.span, lambda i, _: block(i, accs), None)
        return [acc[...] for acc in accs]

    one = plgpu.ACC((64, refs.x_ring.shape[1]), jnp.float32)
    return pl.run_scoped(over_all, *[one] * plan.blocks.wide)


def _sums_by_warps(plan: Plan, refs: References, me: Warpgroup) -> list[jax.Array]:
    """By mma.sync, which warps wait for. Each group of scales is a sum of its own, if scales
    are applied to sums."""
    stages, k, division = plan.blocks.stages, plan.blocks.k, plan.division
    step = min(k, plan.group or k) if plan.scales_sums else k  # rows under one scale
    options = {"is_folded": _is_folded(plan, refs)}

    def block(i, totals):
        slot = lax.rem(i, stages)
        at = me.ring * stages + slot
        plgpu.barrier_wait(refs.full.at[at])
        for first in range(0, k, step):
            sums = None if plan.scales_sums else totals
            for start in range(first, first + step, plan.inner):
                is_scaled = not plan.scales_sums
                piece = ring.piece(plan, refs, at, start, plan.inner, is_scaled=is_scaled)  # fmt: skip
                w = piece.decoded(plan, refs, division, me.number, **options)
                sums = mma.multiplied(sums, w, refs.x_ring.at[at], start)
            if plan.scales_sums:
                scales = lanes.scales(refs.scale_ring.at[at, first // step], division)
                sums = [
                    total + one * lax.broadcast_in_dim(s, one.shape, [0])
                    for total, one, s in zip(totals, sums, scales)
                ]
            totals = sums

        @pl.when(i + stages < me.count)
        def _():
            mma.meet()  # all threads have read the buffer
            _fetch(plan, refs, me, i + stages, slot)

        return totals

    zero = jnp.zeros((64, refs.x_ring.shape[1]), jnp.float32)
    zero = plgpu.layout_cast(zero, plgpu.Layout.WGMMA)
    return lax.fori_loop(*me.span, block, [zero] * plan.blocks.wide)
