"""Many rows against a stored weight on Hopper: decoded on the way into the tensor cores.

    out_MN  =  sum_g s_gN  sum_{k in g} x_Mk value(code_kN)         M > 64, Mosaic

As in stream_gpu the weight is the left operand of wgmma, out^T = w^T x^T, and goes from
codes in shared memory to registers to tensor cores: no decoded copy of it exists anywhere.
With many rows the tensor cores are what counts, so a program is as in matmul_gpu: for
good, one to a multiprocessor, walking over blocks of the result. One warpgroup fetches,
two multiply, each 64 `wide` columns by all `rows` rows of a block: while one decodes, the
tensor cores work for the other. The ring of buffers runs on across blocks of the result,
so the next block's codes arrive while this one's sums are written.

Scales within the sum. A second set of sums, one for each group, would not fit: the first
fills half of the registers. Instead the sum is kept in units of the present group's scale,

    t_g  =  t_(g-1) s_(g-1) / s_g  +  sum_{k in g} x_Mk value(code_kN),        out = t s

which costs as many multiplications as adding scaled sums, one rounding to float32 for each
group, and no registers. A scale below 1e-30 counts as 1e-30: a group of zeros would
otherwise make all others infinite.

Results leave by the copy engine, turned back in shared memory; where programs share a sum
they are float32 parts, which XLA adds up.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from midtread.kernels import decode_ptx
from midtread.kernels.matmul_gpu import in_order
from midtread.kernels.pallas_compat import (
    alike,
    fragments,
    interpreter,
    lane_params,
    lay_turned,
    num_cores,
    pl,
    plgpu,
    row_pairs,
    transposed,
)
from midtread.kernels.stream_gpu import _values
from midtread.numerics.formats import Format, dtype_bits

GROUPS = 2  # warpgroups that multiply
OUT_ROWS, OUT_COLUMNS = 32, 64  # of the result, written at a time
LEAST_SCALE = 1e-30


@dataclasses.dataclass(frozen=True)
class Blocks:
    rows: int = 256  # of the result; `rows * wide` is 256 at most
    wide: int = 1  # 64 columns, of one warpgroup
    k: int = 64  # of the sum, in one buffer
    stages: int = 5  # buffers
    split: int = 1  # programs that share a sum
    width: int = 8  # of the walk
    minor: int = 0  # axis that the walk runs along first: 0 is rows
    pair: bool = False  # two programs, side by side, fetch x once for both

    @property
    def columns(self) -> int:
        return 64 * self.wide * GROUPS

    def shared(self, bits: int, scale_bytes: int, out_bytes: int) -> int:
        """Bytes of shared memory."""
        stage = self.k * (self.columns * bits // 8 + self.rows * 2) + scale_bytes
        return self.stages * stage + GROUPS * 2 * OUT_ROWS * OUT_COLUMNS * out_bytes


@dataclasses.dataclass(frozen=True)
class Plan:
    """What the body needs to know beside its arguments."""

    fmt: Format
    blocks: Blocks
    group: int  # rows of the weight under one scale
    chunks: int  # buffers full, of one program's part of the sum
    grid: tuple[int, int]  # blocks of the result; of pairs along columns
    native: bool

    @property
    def inner(self) -> int:
        return inner_rows(self.blocks, self.group)

    @property
    def count(self) -> int:
        return self.grid[0] * self.grid[1] * self.blocks.split


def inner_rows(blocks: Blocks, group: int) -> int:
    """Of the sum, in one call of wgmma."""
    return min(64, blocks.k, group)


# --- who does what ----------------------------------------------------------------------------


def _body(*refs, plan: Plan):
    """x [M, K], bytes [K, B], scale [G, N] -> out [split, M, N]."""
    is_grouped, blocks = plan.group < plan.blocks.k * plan.chunks * plan.blocks.split, plan.blocks
    looks_up = plan.fmt.table is not None and plan.native
    refs = list(refs)
    inputs = [refs.pop(0) for _ in range(3)]
    table_gmem = refs.pop(0) if looks_up else None
    out_gmem, x_ring, w_ring = refs.pop(0), refs.pop(0), refs.pop(0)
    s_ring = refs.pop(0) if is_grouped else None
    out_smem, full, empty = refs.pop(0), refs.pop(0), refs.pop(0)
    table, ready = (refs.pop(0), refs.pop(0)) if looks_up else (None, None)
    held = None if plan.native else refs.pop(0)
    wg, me, stages = lax.axis_index("wg"), lax.axis_index("sm"), blocks.stages
    num_programs = lax.axis_size("sm")
    turns = lax.div(plan.count - me + num_programs - 1, num_programs)

    def place(turn):
        """(rows, columns, part of the sum) of a block, each as a number of blocks."""
        index = me + turn * num_programs
        part = lax.rem(index, blocks.split)
        index = lax.div(index, blocks.split)
        i, j = plgpu.planar_snake(index, plan.grid, blocks.minor, blocks.width)
        return i, (j * 2 + lax.axis_index("pair") if blocks.pair else j), part

    def fetch():
        def chunk(c, count, i, j, part):
            slot = lax.rem(count, stages)
            pl.when(count >= stages)(lambda: plgpu.barrier_wait(empty.at[slot]))
            row = (part * plan.chunks + c) * blocks.k
            some, width = pl.ds(row, blocks.k), w_ring.shape[2]
            copy = lambda source, ring, **how: plgpu.copy_gmem_to_smem(
                source, ring.at[slot], full.at[slot], **how
            )
            together = {"collective_axes": "pair"} if blocks.pair else {}
            copy(inputs[1].at[some, pl.ds(j * width, width)], w_ring)
            rows = pl.ds(i * blocks.rows, blocks.rows)
            copy(inputs[0].at[rows, some], x_ring, **together)
            if is_grouped:
                scales = pl.ds(lax.div(row, plan.group), s_ring.shape[1])
                columns = pl.ds(j * blocks.columns, blocks.columns)
                copy(inputs[2].at[scales, columns], s_ring)
            return count + 1

        def block(turn, count):
            how = dict(zip("i j part".split(), place(turn)))
            step = functools.partial(chunk, **how)
            return lax.fori_loop(0, plan.chunks, step, count)

        count = lax.fori_loop(0, turns, block, jnp.int32(0))

        # a program stays until its neighbour has left its buffers, too
        def leave(n, _):
            plgpu.barrier_wait(empty.at[lax.rem(n, stages)])

        if blocks.pair:
            lax.fori_loop(lax.max(count - stages, 0), count, leave, None)

    def multiply():
        if looks_up:
            pl.when(wg == 0)(lambda: plgpu.copy_gmem_to_smem(table_gmem, table, ready))
            plgpu.barrier_wait(ready)
        rings = _Rings(x_ring, w_ring, s_ring, full, empty, table, held)

        def block(turn, _):
            i, j, part = place(turn)
            first = turn * plan.chunks
            total, s = (_grouped if is_grouped else _whole)(plan, rings, wg, first)
            if not is_grouped:
                columns = pl.ds(j * blocks.columns, blocks.columns)
                s = _scales(inputs[2].at[0, columns], plan, wg)
            total = total * lax.broadcast_in_dim(s, total.shape, [0])
            column = j * blocks.columns + wg * 64 * blocks.wide
            corner = part, i * blocks.rows, column
            _send(total, corner, out_smem.at[wg], out_gmem, plan)

        lax.fori_loop(0, turns, block, None)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    @pl.when(wg == GROUPS)
    def _():
        plgpu.set_max_registers(40, action="decrease")
        fetch()

    @pl.when(wg < GROUPS)
    def _():
        plgpu.set_max_registers(232, action="increase")
        multiply()


@dataclasses.dataclass(frozen=True)
class _Rings:
    x: Any
    w: Any
    s: Any
    full: Any
    empty: Any
    table: Any
    held: Any


# --- sums -------------------------------------------------------------------------------------


def _decoded(plan: Plan, rings: _Rings, wg, slot, start):
    """[64 wide, inner] values of the columns of a warpgroup."""
    bits, wide = dtype_bits(plan.fmt.dtype), plan.blocks.wide
    block = rings.w.at[slot, pl.ds(start, plan.inner)]
    if plan.native:
        code = decode_ptx.code(plan.fmt)
        return fragments(block, *code, bits, rings.table, wide)
    values = _values(block[...], plan.fmt)
    return lax.dynamic_slice_in_dim(values.T, wg * 64 * wide, 64 * wide, 0)


def _multiply(acc, w, plan: Plan, rings: _Rings, wg, slot, start):
    if not plan.native:  # the interpreter's wgmma takes no registers
        rings.held[wg] = w
        w = rings.held.at[wg]
    x = rings.x.at[slot, :, pl.ds(start, plan.inner)]
    plgpu.wgmma(acc, w, transposed(x))


def _scales(ref, plan: Plan, wg):
    """Of a warpgroup's columns, in float32, from those of a program."""
    if plan.native:
        return row_pairs(ref, dtype_bits(plan.fmt.dtype), plan.blocks.wide)
    size = 64 * plan.blocks.wide
    return lax.dynamic_slice_in_dim(ref[...].astype(jnp.float32), wg * size, size)


def _whole(plan: Plan, rings: _Rings, wg, first):
    """The sum over a program's part where nothing is scaled within."""
    blocks = plan.blocks

    def chunk(acc, c):
        slot = lax.rem(first + c, blocks.stages)
        plgpu.barrier_wait(rings.full.at[slot])
        for start in range(0, blocks.k, plan.inner):
            w = _decoded(plan, rings, wg, slot, start)
            _multiply(acc, w, plan, rings, wg, slot, start)
            plgpu.wgmma_wait(1)  # the ones before are done
            if start == 0:

                @pl.when(c > 0)
                def _():
                    before = lax.rem(first + c - 1, blocks.stages)
                    plgpu.barrier_arrive(rings.empty.at[before])

    def over_all(acc):
        lax.fori_loop(0, plan.chunks, lambda c, _: chunk(acc, c), None)
        return acc[...]

    shape = 64 * blocks.wide, blocks.rows
    total = pl.run_scoped(over_all, plgpu.ACC(shape, jnp.float32))
    last = lax.rem(first + plan.chunks - 1, blocks.stages)
    plgpu.barrier_arrive(rings.empty.at[last])
    return total, None


def _grouped(plan: Plan, rings: _Rings, wg, first):
    """The sum in units of the last group's scale, and that scale."""
    blocks, shape = plan.blocks, (64 * plan.blocks.wide, plan.blocks.rows)
    per_group = max(1, plan.group // blocks.k)  # buffers
    units = [(u, start) for u in range(per_group) for start in range(0, blocks.k, plan.inner)]

    def add(acc, g, s_before):
        """Adds the buffers of a group, or the groups of a buffer."""
        at = first + g * per_group
        for u, start in units:
            slot = lax.rem(at + u, blocks.stages)
            if start == 0:
                plgpu.barrier_wait(rings.full.at[slot])
            w = _decoded(plan, rings, wg, slot, start)
            if (u * blocks.k + start) % plan.group == 0:
                s = _scales(rings.s.at[slot, start // plan.group], plan, wg)
                s = jnp.where(jnp.abs(s) < LEAST_SCALE, LEAST_SCALE, s)
                acc = _rescaled(acc, s_before / s, plan)
                s_before = s
                is_waited = plan.native
            else:
                is_waited = False
            acc = _added(acc, w, plan, rings, wg, slot, start)
            if not is_waited:
                plgpu.wgmma_wait(1)
            if start == 0:

                @pl.when(at + u > first)
                def _():
                    before = lax.rem(at + u - 1, blocks.stages)
                    plgpu.barrier_arrive(rings.empty.at[before])

        return acc, s_before

    one = jnp.ones((shape[0],), jnp.float32)
    count = plan.chunks // per_group
    if plan.native:
        one = plgpu.layout_cast(one, plgpu.Layout.WGMMA.reduce(1))

        def over_all(acc):
            step = lambda g, s: add(acc, g, s)[1]
            s = lax.fori_loop(0, count, step, one)
            return acc[...], s

        total, s = pl.run_scoped(over_all, plgpu.ACC(shape, jnp.float32))
    else:
        start = jnp.zeros(shape, jnp.float32), one
        total, s = lax.fori_loop(0, count, lambda g, carry: add(carry[0], g, carry[1]), start)
    last = lax.rem(first + plan.chunks - 1, blocks.stages)
    plgpu.barrier_arrive(rings.empty.at[last])
    return total, s


def _rescaled(acc, ratio, plan: Plan):
    """Sums in units of another scale: in place, in the registers of wgmma. Waits for it."""
    if not plan.native:  # the interpreter cannot write accumulators: they are arrays
        return acc * lax.broadcast_in_dim(ratio, acc.shape, [0])
    acc[...] = acc[...] * lax.broadcast_in_dim(ratio, acc.shape, [0])
    return acc


def _added(acc, w, plan: Plan, rings: _Rings, wg, slot, start):
    rest = (w, plan, rings, wg, slot, start)
    if plan.native:
        _multiply(acc, *rest)
        return acc

    def alone(fresh):
        _multiply(fresh, *rest)
        return fresh[...]

    return acc + pl.run_scoped(alone, plgpu.ACC(acc.shape, jnp.float32))


# --- results ----------------------------------------------------------------------------------


def _send(total, corner, out_smem, out_gmem, plan: Plan):
    """Writes a warpgroup's [64 wide, rows] as rows of the result, through two buffers."""
    part, row, column = corner
    places = [
        (r, c)
        for c in range(0, total.shape[0], OUT_COLUMNS)
        for r in range(0, total.shape[1], OUT_ROWS)
    ]
    for count, (r, c) in enumerate(places):
        slot = out_smem.at[count % 2]
        plgpu.wait_smem_to_gmem(1, wait_read_only=True)
        piece = total[c : c + OUT_COLUMNS, r : r + OUT_ROWS]
        if plan.native:
            lay_turned(slot, piece)
        else:
            slot[...] = piece.T.astype(slot.dtype)
        plgpu.commit_smem()
        rows, columns = pl.ds(row + r, OUT_ROWS), pl.ds(column + c, OUT_COLUMNS)
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
    """[M, N] in `dtype`, bfloat16 or float32: x times the codes' values, scaled."""
    (m, k), bits = x_MK.shape, dtype_bits(fmt.dtype)
    n = bytes_KB.shape[1] * 8 // bits
    x_MK = jnp.pad(x_MK, ((0, -m % 8), (0, 0)))  # the copy engine moves 8 rows at a time
    if interpret:  # the interpreter has no clusters
        blocks = dataclasses.replace(blocks, pair=False)
    across = blocks.columns * (2 if blocks.pair else 1)
    assert k % (blocks.k * blocks.split) == 0 and n % across == 0, (k, n, blocks)
    group, chunks = k // scale_GN.shape[0], k // (blocks.k * blocks.split)
    is_grouped = group < k
    plan = Plan(
        fmt=fmt, blocks=dataclasses.replace(blocks, stages=min(blocks.stages, chunks)),
        group=group, chunks=chunks, grid=(pl.cdiv(m, blocks.rows), n // across),
        native=not interpret,
    )  # fmt: skip
    out_dtype = jnp.dtype(dtype) if blocks.split == 1 else jnp.dtype(jnp.float32)
    args = [x_MK, bytes_KB, scale_GN]
    scratch = _scratch(plan, args, out_dtype)
    if fmt.table is not None and not interpret:
        args.append(jnp.asarray(decode_ptx.pairs(fmt.table)))
    extra = interpreter() if interpret else {}
    if blocks.pair:
        extra |= {"cluster": (2,), "cluster_names": ("pair",)}
    kernel = plgpu.kernel(
        functools.partial(_body, plan=plan),
        out_type=jax.ShapeDtypeStruct((blocks.split, m + -m % 8, n), out_dtype),
        grid=(min(plan.count, num_cores() // (2 if blocks.pair else 1)),),
        grid_names=("sm",),
        num_threads=GROUPS + 1,
        thread_name="wg",
        scratch_types=scratch,
        compiler_params=lane_params(),
        **extra,
    )
    parts = kernel(*alike(*args))
    out = parts[0] if blocks.split == 1 else jnp.sum(parts, 0)
    return out[:m].astype(dtype)


def _scratch(plan: Plan, args: list, out_dtype) -> list:
    """Shared memory, in the order of `_body`'s references."""
    blocks, bits = plan.blocks, dtype_bits(plan.fmt.dtype)
    x_MK, _, scale_GN = args
    stages, width = blocks.stages, blocks.columns * bits // 8
    ring = lambda shape, dtype, columns: plgpu.SMEM(
        (stages, *shape), dtype, transforms=in_order(columns, dtype)
    )
    scratch: list[Any] = [
        ring((blocks.rows, blocks.k), x_MK.dtype, plan.inner),
        ring((blocks.k, width), jnp.int8, min(128, width)),
    ]
    copies = 2
    if scale_GN.shape[0] > 1:
        num_scales = max(1, blocks.k // plan.group)
        scratch.append(plgpu.SMEM((stages, num_scales, blocks.columns), scale_GN.dtype))
        copies += 1
    line = 128 // out_dtype.itemsize
    outs = GROUPS, 2, OUT_ROWS, OUT_COLUMNS
    scratch.append(plgpu.SMEM(outs, out_dtype, transforms=in_order(line, out_dtype)))
    scratch.append(plgpu.Barrier(num_arrivals=copies, num_barriers=stages))
    how = {"num_arrivals": GROUPS, "num_barriers": stages}
    if blocks.pair:
        scratch.append(plgpu.ClusterBarrier(collective_axes=("pair",), **how))
    else:
        scratch.append(plgpu.Barrier(**how))
    if plan.fmt.table is not None and plan.native:
        scratch += [plgpu.SMEM((256, 32), jnp.int32), plgpu.Barrier()]
    if not plan.native:
        held = GROUPS, 64 * blocks.wide, plan.inner
        scratch.append(plgpu.SMEM(held, x_MK.dtype))
    return scratch
