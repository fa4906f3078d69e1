"""What the warpgroups of this kernel do: fetch, decode or transpose, multiply, write.

hopper/ring.py has the buffers. One warpgroup fills them, block after block of the result, without
a pause; two others multiply, 64 columns each.

    Registers.  wgmma reads its left operand while the threads continue. So the next piece is
    decoded into other registers, and one wgmma runs at a time: the body of the loop decodes
    two pieces.

    The last round.  1,024 rows by 14,336 columns are 448 blocks for 132 programs: three
    rounds and 52 blocks. These are cut in two, so that the last round takes half as long.
"""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
from jax import lax

from midtread.kernels.hopper import decoding, lanes, ring
from midtread.kernels.hopper.ring import References
from midtread.kernels.hopper.shared_memory import SHARED
from midtread.kernels.pallas_compat import (
    load_slice,
    num_cores,
    pl,
    plgpu,
    transposed,
)
from midtread.kernels.weight_matmul.hopper_prefill import registers
from midtread.numerics.formats import Format, dtype_bits

GROUPS = 2  # warpgroups that multiply
COLUMNS = 64 * GROUPS  # columns of the result in a block
OUT_ROWS, OUT_COLUMNS = 32, 64  # the part of the result that is written at a time
WIDTH = 8  # how many blocks wide the walk over the result is


def inner(dtype) -> int:
    """How much of the sum one wgmma takes for rows of this dtype: 128 bytes of a row."""
    return 128 // jnp.dtype(dtype).itemsize


def step(dtype) -> int:
    """How much of the sum the body of the loop takes."""
    return 2 * inner(dtype)


@dataclasses.dataclass(frozen=True)
class PrefillBlocks:
    rows: int = 256  # of the result, 256 at most
    k: int = 64  # of the sum, in one buffer
    stages: int = 5  # buffers
    split: int = 1  # programs that share a sum
    pair: bool = False  # two programs, side by side, fetch x once for both
    halves: bool = False  # cut the blocks of the last round in two

    def most_stages(self, fmt: Format, group: int | None, dtypes) -> int:
        """How many buffers fit into shared memory, for the `dtypes` of the rows and the result."""
        x_size, out_size = (jnp.dtype(d).itemsize for d in dtypes)
        out_size = out_size if self.split == 1 else 4
        left = SHARED - GROUPS * 2 * OUT_ROWS * OUT_COLUMNS * out_size
        left -= 0 if fmt.table is None else decoding.TABLE_BYTES
        scales = (
            max(1, self.k // group) * COLUMNS * 3 if group else 0
        )  # and zero points
        width = COLUMNS * dtype_bits(fmt.dtype) // 8
        return min(8, left // (self.k * (width + self.rows * x_size) + scales))

    def programs(self) -> int:
        """Returns how many programs run at once; a pair counts as one."""
        return num_cores() // (2 if self.pair else 1)


@dataclasses.dataclass(frozen=True)
class Plan(ring.Plan):
    """What the body needs to know beside its references."""

    blocks: PrefillBlocks
    dtype: np.dtype  # of the rows: bfloat16, or that of codes
    chunks: int  # blocks of the weight in one program's part of the sum
    grid: tuple[int, int]  # blocks of the result; of pairs along columns
    whole: int  # how many blocks of the result have all rows
    halves: int  # how many have half of them

    @property
    def is_codes(self) -> bool:
        return self.dtype.itemsize == 1

    @property
    def is_folded(self) -> bool:
        """Whether scales of groups are in the slopes of the decoding, if the format has any."""
        return self.group is not None and not self.zero_bits

    @property
    def unit(self) -> float:
        """The power of two that sums are to be multiplied by (hopper/decoding.py)."""
        if self.is_codes or not self.native:
            return 1.0
        return 2.0 ** decoding.power(self.fmt, self.is_folded)

    @property
    def inner(self) -> int:
        return inner(self.dtype)

    @property
    def lanes(self) -> registers.Lanes:
        return registers.Lanes(dtype_bits(self.fmt.dtype))

    @property
    def wide(self):
        """The dtype that tensor cores add up in."""
        is_integer = jnp.issubdtype(self.dtype, jnp.integer)
        return jnp.int32 if is_integer else jnp.float32


def body(*given, plan: Plan, names: tuple[str, ...]):
    refs, wg = ring.named(names, given), lax.axis_index("wg")

    @pl.when(wg == GROUPS)
    def _():
        plgpu.set_max_registers(40, action="decrease")
        stages, fetch = plan.blocks.stages, functools.partial(_fetch, plan, refs)
        count = _over_blocks(plan, fetch)
        # It stays until all have left the buffers, which a neighbour fills and reads too.
        leave = lambda n, _: plgpu.barrier_wait(refs.empty.at[lax.rem(n, stages)])
        lax.fori_loop(lax.max(count - stages, 0), count, leave, None)

    @pl.when(wg < GROUPS)
    def _():
        plgpu.set_max_registers(232, action="increase")
        ring.fetch_table(plan, refs, wg)
        _over_blocks(plan, functools.partial(_multiply, plan, refs, wg))
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _over_blocks(plan: Plan, visit):
    """Calls `visit(rows, part of the sum, first row, block of columns, carry)` for this
    program's blocks. The carry starts as 0; the last one is returned."""
    blocks, me = plan.blocks, lax.axis_index("sm")
    num_programs = lax.axis_size("sm")
    turns = lambda count: lax.div(count - me + num_programs - 1, num_programs)

    def one(turn, carry, cut):
        index = me + turn * num_programs
        half = lax.rem(index, cut)
        index = lax.div(index, cut) + (plan.whole if cut == 2 else 0)
        part = lax.rem(index, blocks.split)
        index = lax.div(index, blocks.split)
        i, j = plgpu.planar_snake(index, plan.grid, 0, WIDTH)
        j = j * 2 + lax.axis_index("pair") if blocks.pair else j
        rows = blocks.rows // cut
        return visit(rows, part, i * blocks.rows + half * rows, j, carry)

    whole, half = (functools.partial(one, cut=cut) for cut in (1, 2))
    carry = lax.fori_loop(0, turns(plan.whole), whole, jnp.int32(0))
    if plan.halves:
        carry = lax.fori_loop(0, turns(plan.halves), half, carry)
    return carry


def _fetch(plan: Plan, refs: References, rows, part, row, j, count):
    """Brings all that a block of the result needs; returns how many buffers it filled."""
    blocks = plan.blocks
    together = {"collective_axes": "pair"} if blocks.pair else {}

    def chunk(c, count):
        slot = lax.rem(count, blocks.stages)
        pl.when(count >= blocks.stages)(lambda: plgpu.barrier_wait(refs.empty.at[slot]))
        start = (part * plan.chunks + c) * blocks.k
        ring.fetch_codes(refs, slot, start, j)
        ring.fetch_scales(plan, refs, slot, start, j)
        x = refs.x.at[pl.ds(row, rows), pl.ds(start, blocks.k)]
        target = refs.x_ring.at[slot, pl.ds(0, rows)]
        plgpu.copy_gmem_to_smem(x, target, refs.full.at[slot], **together)
        return count + 1

    return lax.fori_loop(0, plan.chunks, chunk, count)


# --- sums -------------------------------------------------------------------------------------


def _multiply(plan: Plan, refs: References, wg, rows, part, row, j, first):
    """Computes and writes a block of the result; returns how many buffers were read so far."""
    total, s = _sums(plan, refs, wg, first, rows), None
    if not plan.group:
        columns = refs.column_scales.at[0, pl.ds(j * COLUMNS, COLUMNS)]
        s = _scales(columns, plan, wg) * plan.unit
    _send(plan, refs, wg, total, s, (part, row, j * COLUMNS + wg * 64))
    return first + plan.chunks


def _sums(plan: Plan, refs: References, wg, first, rows: int):
    """[64, rows]: a warpgroup's columns of a block, summed over the program's part of k."""
    blocks, per_step = plan.blocks, step(plan.dtype) // plan.blocks.k
    slot_of = lambda count: lax.rem(count, blocks.stages)
    starts = range(0, blocks.k, plan.inner)

    def one(acc, t):
        for u, start in [(u, start) for u in range(per_step) for start in starts]:
            count = first + t * per_step + u
            slot = slot_of(count)
            if start == 0:
                plgpu.barrier_wait(refs.full.at[slot])
            w = _operand(plan, refs, wg, slot, start)
            w = ring.as_left_operand(plan, refs, w, wg)
            x = refs.x_ring.at[slot, pl.ds(0, rows), pl.ds(start, plan.inner)]
            plgpu.wgmma(acc, w, transposed(x))
            plgpu.wgmma_wait(1)  # the one before is done with its registers and buffer
            if start == 0:
                pl.when(count > first)(
                    lambda count=count: plgpu.barrier_arrive(
                        refs.empty.at[slot_of(count - 1)]
                    )
                )

    def over_all(acc):
        lax.fori_loop(0, plan.chunks // per_step, lambda t, _: one(acc, t), None)
        return acc[...]

    total = pl.run_scoped(over_all, plgpu.ACC((64, rows), plan.wide))
    plgpu.barrier_arrive(refs.empty.at[slot_of(first + plan.chunks - 1)])
    return total


def _operand(plan: Plan, refs: References, wg, slot, start: int):
    """[64, inner] of a warpgroup's columns: codes, or values, which are scaled if scales are
    of groups."""
    piece = ring.piece(plan, refs, slot, start, plan.inner)
    if not plan.is_codes:
        is_folded = plan.is_folded
        return piece.decoded(plan, refs, plan.lanes, wg, is_folded=is_folded)[0]
    if plan.native:
        return registers.turned(piece.codes, plan.fmt.dtype)
    values = lax.bitcast_convert_type(piece.codes[...], plan.fmt.dtype)
    return plan.lanes.interpreted(values, wg)[0]


def _scales(ref, plan: Plan, wg):
    """Returns the scales of a warpgroup's 64 columns, from those of a program's 128."""
    if plan.native:
        return lanes.scales(ref, plan.lanes)[0]
    return lax.dynamic_slice_in_dim(ref[...], wg * 64, 64)


# --- results ----------------------------------------------------------------------------------


def _send(plan: Plan, refs: References, wg, total, s, corner):
    """Writes a warpgroup's [64, rows] as rows of the result, through two buffers. It is
    multiplied by the scales `s` of its columns, if there are any, and by those of rows, if
    the rows are codes."""
    part, row, column = corner
    for count, r in enumerate(range(0, total.shape[1], OUT_ROWS)):
        slot = refs.out_smem.at[wg, count % 2]
        piece = total[:, r : r + OUT_ROWS].astype(jnp.float32)
        if s is not None:
            piece = piece * lax.broadcast_in_dim(s, piece.shape, [0])
        elif plan.unit != 1:
            piece = piece * plan.unit
        if plan.is_codes:
            layout = plgpu.Layout.WGMMA.reduce(0)
            mine = load_slice(refs.row_scales, row + r, OUT_ROWS, layout)
            piece = piece * lax.broadcast_in_dim(mine, piece.shape, [1])
        plgpu.wait_smem_to_gmem(1, wait_read_only=True)
        if plan.native:
            registers.lay(slot, piece, plan.lanes)
        else:
            slot[...] = piece.T.astype(slot.dtype)
        plgpu.commit_smem()
        rows, columns = pl.ds(row + r, OUT_ROWS), pl.ds(column, OUT_COLUMNS)
        plgpu.copy_smem_to_gmem(slot, refs.out.at[part, rows, columns])
