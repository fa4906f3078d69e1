"""Many rows against a stored weight on Hopper: decoded on the way into the tensor cores.

    out_MN  =  s_N  sum_k x_Mk value(code_kN)                   one scale for each column
    out_MN  =  sum_k x_Mk bf16(s_gN value(code_kN))             one for each group g of k

The weight is the left operand of wgmma, out^T = w^T x^T, and goes from codes in shared
memory to registers to tensor cores: no decoded copy of it exists anywhere. Scales of groups
are multiplied in between and rounded to bfloat16, which gives the numbers that decoding the
whole weight first would. (Scaling the sums of each group instead has the tensor cores wait
for every group: 0.92x of bfloat16 at 8,192 rows of int4.)

With many rows the tensor cores are what counts, so a program stays for good, one to a
multiprocessor, and walks over blocks of the result. One warpgroup fetches, two multiply,
each 64 columns by all rows of a block: while one decodes, the tensor cores work for the
other. The ring of buffers runs on across blocks of the result, so the next block's codes
arrive while this one's sums are written.

    Registers.  wgmma reads its left operand while the threads go on. So what is decoded
    next goes into other registers, and waits until the ones before are done: two decodings
    in a row, 128 of k, are the body of the loop, and one wgmma is in flight at a time.

    The last round.  1,024 rows by 14,336 columns are 448 blocks for 132 programs: three
    rounds and 52 blocks. These are cut in two, so that the last round takes half as long.

Results leave by the copy engine, turned back in shared memory; where programs share a sum
they are float32 parts, which XLA adds up.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from midtread.kernels import decode_ptx, mixed_lanes_gpu
from midtread.kernels.matmul_gpu import in_order
from midtread.kernels.pallas_compat import (
    alike,
    interpreter,
    lane_params,
    num_cores,
    pl,
    plgpu,
    transposed,
)
from midtread.numerics.formats import Format, dtype_bits

GROUPS = 2  # warpgroups that multiply
COLUMNS = 64 * GROUPS  # of the result, in a block
INNER, STEP = 64, 128  # of k: in one wgmma, in the body of the loop
OUT_ROWS, OUT_COLUMNS = 32, 64  # of the result, written at a time
WIDTH = 8  # of the walk
SHARED = 226 * 1024  # bytes of shared memory; 1 kB more is for barriers


@dataclasses.dataclass(frozen=True)
class Blocks:
    rows: int = 256  # of the result, 256 at most
    k: int = 64  # of the sum, in one buffer
    stages: int = 5  # buffers
    split: int = 1  # programs that share a sum
    pair: bool = False  # two programs, side by side, fetch x once for both
    halves: bool = False  # cut the blocks of the last round in two

    def most_stages(self, fmt: Format, group: int | None, dtype) -> int:
        """Buffers that shared memory has room for."""
        out_size = jnp.dtype(dtype).itemsize if self.split == 1 else 4
        left = SHARED - GROUPS * 2 * OUT_ROWS * OUT_COLUMNS * out_size
        left -= 0 if fmt.table is None else decode_ptx.TABLE_BYTES
        scales = max(1, self.k // group) * COLUMNS * 2 if group else 0
        width = COLUMNS * dtype_bits(fmt.dtype) // 8
        return min(8, left // (self.k * (width + self.rows * 2) + scales))

    def programs(self) -> int:
        """That run at once; a pair counts as one."""
        return num_cores() // (2 if self.pair else 1)


@dataclasses.dataclass(frozen=True)
class Plan:
    """What the body needs to know beside its arguments."""

    fmt: Format
    blocks: Blocks
    group: int | None  # rows of the weight under one scale; None: all
    chunks: int  # buffers full, of one program's part of the sum
    grid: tuple[int, int]  # blocks of the result; of pairs along columns
    whole: int  # blocks of all rows
    halves: int  # of half of them
    native: bool


# --- who does what ----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Rings:
    x: Any
    w: Any
    full: Any
    empty: Any
    scale: Any = None
    table: Any = None
    ready: Any = None
    held: Any = None


def _body(*refs, plan: Plan):
    """x [M, K], bytes [K, B], scale [G, N] -> out [split, M, N]."""
    blocks, refs = plan.blocks, list(refs)
    looks_up = plan.fmt.table is not None and plan.native
    inputs = [refs.pop(0) for _ in range(4 if looks_up else 3)]
    out_gmem, out_smem = refs.pop(0), refs.pop(0)
    rings = _Rings(*(refs.pop(0) for _ in range(4)))
    if plan.group:
        rings = dataclasses.replace(rings, scale=refs.pop(0))
    if looks_up:
        rings = dataclasses.replace(rings, table=refs.pop(0), ready=refs.pop(0))
    if not plan.native:
        rings = dataclasses.replace(rings, held=refs.pop(0))
    wg, me = lax.axis_index("wg"), lax.axis_index("sm")
    num_programs = lax.axis_size("sm")
    turns = lambda count: lax.div(count - me + num_programs - 1, num_programs)

    def over_blocks(visit, carry):
        """Calls `visit(rows, part of the sum, first row, block of columns, carry)`."""

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

        carry = lax.fori_loop(
            0, turns(plan.whole), functools.partial(one, cut=1), carry
        )
        if plan.halves:
            step = functools.partial(one, cut=2)
            carry = lax.fori_loop(0, turns(plan.halves), step, carry)
        return carry

    @pl.when(wg == GROUPS)
    def _():
        plgpu.set_max_registers(40, action="decrease")
        fetch = functools.partial(_fetch, plan, inputs, rings)
        count = over_blocks(fetch, jnp.int32(0))
        # stays until all have left the buffers: a neighbour, too, fills and reads them
        leave = lambda n, _: plgpu.barrier_wait(
            rings.empty.at[lax.rem(n, blocks.stages)]
        )
        lax.fori_loop(lax.max(count - blocks.stages, 0), count, leave, None)

    @pl.when(wg < GROUPS)
    def _():
        plgpu.set_max_registers(232, action="increase")
        if looks_up:
            copy = (inputs[3], rings.table, rings.ready)
            pl.when(wg == 0)(lambda: plgpu.copy_gmem_to_smem(*copy))
            plgpu.barrier_wait(rings.ready)

        def multiply(rows, part, row, j, first):
            total = _sums(plan, rings, wg, first, rows)
            if not plan.group:
                columns = pl.ds(j * COLUMNS, COLUMNS)
                s = _scales(inputs[2].at[0, columns], plan, wg)
                total = total * lax.broadcast_in_dim(s, total.shape, [0])
            corner = part, row, j * COLUMNS + wg * 64
            _send(total, corner, out_smem.at[wg], out_gmem, plan)
            return first + plan.chunks

        over_blocks(multiply, jnp.int32(0))
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _fetch(plan: Plan, inputs, rings: _Rings, rows, part, row, j, count):
    """Brings all that a block of the result needs; returns how many buffers it filled."""
    blocks = plan.blocks
    together = {"collective_axes": "pair"} if blocks.pair else {}

    def chunk(c, count):
        slot = lax.rem(count, blocks.stages)
        pl.when(count >= blocks.stages)(
            lambda: plgpu.barrier_wait(rings.empty.at[slot])
        )
        start = (part * plan.chunks + c) * blocks.k
        some, full = pl.ds(start, blocks.k), rings.full.at[slot]
        x, w = inputs[0].at[pl.ds(row, rows), some], inputs[1]
        width = rings.w.shape[2]
        w = w.at[some, pl.ds(j * width, width)]
        plgpu.copy_gmem_to_smem(w, rings.w.at[slot], full)
        if plan.group:
            groups = pl.ds(lax.div(start, plan.group), rings.scale.shape[1])
            scale = inputs[2].at[groups, pl.ds(j * COLUMNS, COLUMNS)]
            plgpu.copy_gmem_to_smem(scale, rings.scale.at[slot], full)
        ring = rings.x.at[slot, pl.ds(0, rows)]
        plgpu.copy_gmem_to_smem(x, ring, full, **together)
        return count + 1

    return lax.fori_loop(0, plan.chunks, chunk, count)


# --- sums -------------------------------------------------------------------------------------


def _sums(plan: Plan, rings: _Rings, wg, first, rows: int):
    """[64, rows]: a warpgroup's columns of a block, over the program's part of the sum."""
    blocks, per_step = plan.blocks, STEP // plan.blocks.k
    slot_of = lambda count: lax.rem(count, blocks.stages)

    def step(acc, t):
        for u, start in [
            (u, start) for u in range(per_step) for start in range(0, blocks.k, INNER)
        ]:
            count = first + t * per_step + u
            slot = slot_of(count)
            if start == 0:
                plgpu.barrier_wait(rings.full.at[slot])
            w = _decoded(plan, rings, wg, slot, start)
            if not plan.native:  # the interpreter's wgmma takes no registers
                rings.held[wg] = w
                w = rings.held.at[wg]
            x = rings.x.at[slot, pl.ds(0, rows), pl.ds(start, INNER)]
            plgpu.wgmma(acc, w, transposed(x))
            plgpu.wgmma_wait(1)  # the one before is done with its registers and buffer
            if start == 0:
                pl.when(count > first)(
                    lambda count=count: plgpu.barrier_arrive(
                        rings.empty.at[slot_of(count - 1)]
                    )
                )

    def over_all(acc):
        lax.fori_loop(0, plan.chunks // per_step, lambda t, _: step(acc, t), None)
        return acc[...]

    total = pl.run_scoped(over_all, plgpu.ACC((64, rows), jnp.float32))
    plgpu.barrier_arrive(rings.empty.at[slot_of(first + plan.chunks - 1)])
    return total


def _decoded(plan: Plan, rings: _Rings, wg, slot, start: int):
    """[64, INNER] values of the columns of a warpgroup, scaled if scales are of groups."""
    block, scale = rings.w.at[slot, pl.ds(start, INNER)], None
    if plan.group:
        count = max(1, INNER // plan.group)
        scale = rings.scale.at[slot, pl.ds(start // plan.group, count)]
    if plan.native:
        code, bits = decode_ptx.code(plan.fmt), dtype_bits(plan.fmt.dtype)
        return mixed_lanes_gpu.decoded(block, code, bits, rings.table, scale)
    values = decode_ptx.values(block[...], plan.fmt)
    if scale is not None:
        s = jnp.repeat(scale[...].astype(jnp.float32), INNER // count, axis=0)
        values = (values.astype(jnp.float32) * s).astype(values.dtype)
    return lax.dynamic_slice_in_dim(values.T, wg * 64, 64, 0)


def _scales(ref, plan: Plan, wg):
    """Of a warpgroup's columns, from those of a program."""
    if plan.native:
        return mixed_lanes_gpu.scales(ref)
    return lax.dynamic_slice_in_dim(ref[...], wg * 64, 64)


# --- results ----------------------------------------------------------------------------------


def _send(total, corner, out_smem, out_gmem, plan: Plan):
    """Writes a warpgroup's [64, rows] as rows of the result, through two buffers."""
    part, row, column = corner
    for count, r in enumerate(range(0, total.shape[1], OUT_ROWS)):
        slot = out_smem.at[count % 2]
        plgpu.wait_smem_to_gmem(1, wait_read_only=True)
        piece = total[:, r : r + OUT_ROWS]
        if plan.native:
            mixed_lanes_gpu.lay(slot, piece)
        else:
            slot[...] = piece.T.astype(slot.dtype)
        plgpu.commit_smem()
        rows, columns = pl.ds(row + r, OUT_ROWS), pl.ds(column, OUT_COLUMNS)
        plgpu.copy_smem_to_gmem(slot, out_gmem.at[part, rows, columns])


def mixed_matmul(
    x_MK: jax.Array,
    bytes_KB: jax.Array,
    scale_GN: jax.Array,
    *,
    fmt: Format,
    dtype,
    blocks: Blocks,
    interpret: bool = False,
) -> jax.Array:
    """[M, N] in `dtype`, bfloat16 or float32: x times the codes' values, scaled.

    Args:
        scale_GN: [1, N] in float32, or one for each group of k, in bfloat16.
    """
    (m, k), n = x_MK.shape, scale_GN.shape[1]
    x_MK = jnp.pad(
        x_MK, ((0, -m % 8), (0, 0))
    )  # the copy engine moves 8 rows at a time
    if interpret:  # the interpreter has no clusters
        blocks = dataclasses.replace(blocks, pair=False)
    across = COLUMNS * (2 if blocks.pair else 1)
    assert k % (STEP * blocks.split) == 0 and n % across == 0, (k, n, blocks)
    grid = pl.cdiv(m, blocks.rows), n // across
    count = grid[0] * grid[1] * blocks.split
    last = count % blocks.programs() if blocks.halves else 0
    plan = Plan(
        fmt=fmt, blocks=blocks, native=not interpret, grid=grid,
        group=k // scale_GN.shape[0] if scale_GN.shape[0] > 1 else None,
        chunks=k // (blocks.k * blocks.split), whole=count - last, halves=2 * last,
    )  # fmt: skip
    out_dtype = jnp.dtype(dtype) if blocks.split == 1 else jnp.dtype(jnp.float32)
    args = [x_MK, bytes_KB, scale_GN]
    if fmt.table is not None and not interpret:
        args.append(jnp.asarray(decode_ptx.pairs(fmt.table)))
    extra = interpreter() if interpret else {}
    if blocks.pair:
        extra |= {"cluster": (2,), "cluster_names": ("pair",)}
    kernel = plgpu.kernel(
        functools.partial(_body, plan=plan),
        out_type=jax.ShapeDtypeStruct((blocks.split, m + -m % 8, n), out_dtype),
        grid=(min(max(plan.whole, plan.halves), blocks.programs()),),
        grid_names=("sm",),
        num_threads=GROUPS + 1,
        thread_name="wg",
        scratch_types=_scratch(plan, out_dtype),
        compiler_params=lane_params(),
        **extra,
    )
    parts = kernel(*alike(*args))
    out = parts[0] if blocks.split == 1 else jnp.sum(parts, 0)
    return out[:m].astype(dtype)


def _scratch(plan: Plan, out_dtype) -> list:
    """Shared memory, in the order of `_body`'s references."""
    blocks, width = plan.blocks, COLUMNS * dtype_bits(plan.fmt.dtype) // 8
    ring = lambda shape, dtype, columns: plgpu.SMEM(
        (blocks.stages, *shape), dtype, transforms=in_order(columns, dtype)
    )
    line = in_order(128 // out_dtype.itemsize, out_dtype)
    how = {"num_arrivals": GROUPS, "num_barriers": blocks.stages}
    scratch: list[Any] = [
        plgpu.SMEM((GROUPS, 2, OUT_ROWS, OUT_COLUMNS), out_dtype, transforms=line),
        ring((blocks.rows, blocks.k), jnp.bfloat16, INNER),
        ring((blocks.k, width), jnp.int8, min(128, width)),
        plgpu.Barrier(num_arrivals=3 if plan.group else 2, num_barriers=blocks.stages),
        plgpu.ClusterBarrier(collective_axes=("pair",), **how)
        if blocks.pair
        else plgpu.Barrier(**how),
    ]
    if plan.group:
        num_scales = max(1, blocks.k // plan.group)
        shape = blocks.stages, num_scales, COLUMNS
        scratch.append(plgpu.SMEM(shape, jnp.bfloat16))
    if plan.fmt.table is not None and plan.native:
        scratch += [plgpu.SMEM(decode_ptx.TABLE, jnp.int32), plgpu.Barrier()]
    if not plan.native:
        scratch.append(plgpu.SMEM((GROUPS, 64, INNER), jnp.bfloat16))
    return scratch
