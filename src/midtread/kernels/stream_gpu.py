"""Few rows against a stored weight on Hopper: codes go from memory into tensor cores.

    out_MN  =  sum_g s_gN  sum_{k in g} x_Mk value(code_kN)         M = 1 .. 64, Mosaic

The weight is the left operand of wgmma, which may come from registers, and x the right
one, from shared memory: out^T = w^T x^T. So a decoded weight never leaves the thread that
decoded it, and 64 rows cost as many instructions as one.

A program owns 256 columns of the weight (as Flax stores it, [k, n] with n along the
memory) and a part of the sum. The copy engine brings blocks of `k` rows into rings of
buffers. The columns are four accumulators of 64; a warpgroup has `wide` of them, and `deep`
sets of warpgroups take turns at the blocks, each with a ring of its own:

    wide 1, deep 1    four warpgroups read every block, each for 64 columns
    wide 4, deep 4    four rings; a word that is read once gives all its columns, and no
                      warpgroup waits for another: best for 4 bits and a few rows

wgmma wants pairs of neighbours along k in one register, and they lie in two rows: a byte
permute takes one byte of each. Which 64 columns an accumulator takes is free, so it takes
those that this permute yields (lanes_gpu.py); `order` tells which they were.

wgmma is asynchronous and reads its registers when it comes to it. So nothing may be decoded
into registers of a multiplication that was not waited for: a block is decoded in two pieces
at least, and when one is begun only the piece before it may be under way.

Each group of a scale is a sum of its own in the tensor cores, scaled and added in float32.
Programs that share a column go in clusters of two, which read each other's shared memory to
add up, scale, cast and write the result. Larger ones do not all run at once on an H200, whose
multiprocessors sit in groups of 16 or 18 less some: 16 clusters of 8 took twice the time.
Where more than two share a column, pairs write float32 parts, which XLA adds up in whatever
it does next.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from midtread.kernels import decode_ptx, lanes_gpu, turn_gpu
from midtread.kernels.matmul_gpu import in_order
from midtread.kernels.pallas_compat import (
    alike,
    interpreter,
    lane_params,
    pl,
    plgpu,
    transposed,
)
from midtread.numerics.formats import Format, dtype_bits

COLUMNS, GROUPS = lanes_gpu.COLUMNS, 4
FILLED = 8  # up to so many rows the copy engine fills up; more are padded to eights


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


# --- whose columns are whose ------------------------------------------------------------------


def order(bits: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Extents of a program's 256 columns, and the axes in the order (j, row of wgmma)."""
    if bits == 4:
        return (4, 8, 4, 2), (2, 0, 3, 1)  # w g j h -> j w h g
    return (2, 4, 8, 2, 2), (0, 3, 1, 4, 2)  # j1 w g j0 h -> j1 j0 w h g


def _mine(values, bits: int, j):
    """[64, K] of a block of values [K, 256]: what warpgroup `j` takes; interpreted."""
    split, axes = order(bits)
    k = values.shape[0]
    parts = values.reshape(k, *split).transpose(*(1 + a for a in axes), 0)
    return lax.dynamic_index_in_dim(parts.reshape(GROUPS, 64, k), j, 0, keepdims=False)


# --- the kernel -------------------------------------------------------------------------------


def _body(
    *refs, fmt: Format, blocks: Blocks, group, num_chunks: int, is_scaled: bool, native: bool
):  # fmt: skip
    """x [M, K], bytes [K, B], scales [G, N], a table, scale [1, N] -> out [m, N]."""
    refs, looks_up = list(refs), fmt.table is not None and native
    take: Any = lambda given: refs.pop(0) if given else None
    x_gmem, w_gmem, scale_gmem = take(True), take(True), take(group)
    table_gmem, last_gmem, out_gmem = take(looks_up), take(is_scaled), take(True)
    w_ring, x_ring, scale_ring = take(True), take(True), take(group)
    full, empty, table, ready = take(True), take(True), take(looks_up), take(looks_up)
    aside = refs.pop(0)
    division, stages = blocks.division(dtype_bits(fmt.dtype)), blocks.stages
    num_rows, width = x_ring.shape[1], w_ring.shape[2]
    tile, wg = lax.axis_index("tile"), lax.axis_index("wg")
    share = lax.axis_index("share")
    part = share * blocks.cluster + lax.axis_index("part")
    across, deep, wide = division.across, division.deep, division.wide
    ring, within = lax.div(wg, across), lax.rem(wg, across)
    mine = lax.div(num_chunks - ring + deep - 1, deep)  # blocks of this ring
    step = min(blocks.k, group or blocks.k)  # rows under one scale
    inner = blocks.piece(group)
    running = wide if wide < 4 else 0  # multiplications while the next piece is decoded

    def fetch(i, slot):
        row = (part * num_chunks + i * deep + ring) * blocks.k
        rows, at = pl.ds(row, blocks.k), ring * stages + slot
        barrier = full.at[at]
        source = w_gmem.at[rows, pl.ds(tile * width, width)]
        plgpu.copy_gmem_to_smem(source, w_ring.at[at], barrier)
        # row 0, but Pallas must not know: it refuses to read beyond the last row, which the
        # copy engine fills up with zeros
        source = x_gmem.at[pl.ds(share * 0, num_rows), rows]
        plgpu.copy_gmem_to_smem(source, x_ring.at[at], barrier)
        if group:
            some = pl.ds(lax.div(row, group), scale_ring.shape[1])
            source = scale_gmem.at[some, pl.ds(tile * COLUMNS, COLUMNS)]
            plgpu.copy_gmem_to_smem(source, scale_ring.at[at], barrier)

    for slot in range(stages):
        is_mine = (within == slot % across) & (slot < mine)
        pl.when(is_mine)(functools.partial(fetch, slot, slot))

    def refill(i):
        """The buffer that all have left, one block ago, is filled again. A barrier knows
        one waiter: the warpgroup that a buffer belongs to."""
        slot = lax.rem(i, stages)

        @pl.when((i + stages < mine) & (within == lax.rem(slot, across)))
        def _():
            plgpu.barrier_wait(empty.at[ring * stages + slot])
            fetch(i + stages, slot)

    if looks_up:
        pl.when(wg == 0)(lambda: plgpu.copy_gmem_to_smem(table_gmem, table, ready))
        plgpu.barrier_wait(ready)

    def decoded(at, start):
        block = w_ring.at[at, pl.ds(start, inner)]
        if native:
            return lanes_gpu.decoded(block, *decode_ptx.code(fmt), division, table)
        values = decode_ptx.values(block[...], fmt)
        return [_mine(values, division.bits, within * wide + a) for a in range(wide)]

    def multiply(accs, at, start):
        x = transposed(x_ring.at[at, :, pl.ds(start, inner)])
        for a, (acc, w) in enumerate(zip(accs, decoded(at, start))):
            if not native:  # the interpreter's wgmma takes no registers
                aside[wg * wide + a] = w
                w = aside.at[wg * wide + a]
            plgpu.wgmma(acc, w, x)

    def whole(i, accs):
        at = ring * stages + lax.rem(i, stages)
        plgpu.barrier_wait(full.at[at])
        for start in range(0, blocks.k, inner):
            multiply(accs, at, start)
            plgpu.wgmma_wait(running)  # nothing reads the registers of the next piece
            if start == 0:  # all of the last block is done

                @pl.when(i > 0)
                def _():
                    last = lax.rem(i - 1, stages)
                    plgpu.barrier_arrive(empty.at[ring * stages + last])

        pl.when(i > 0)(lambda: refill(i - 1))

    def scaled(i, totals):
        at = ring * stages + lax.rem(i, stages)
        plgpu.barrier_wait(full.at[at])
        for g in range(blocks.k // step):

            def one_group(*accs, g=g):
                for start in range(g * step, (g + 1) * step, inner):
                    multiply(accs, at, start)
                    plgpu.wgmma_wait(running)
                return [acc[...] for acc in accs]

            sums = pl.run_scoped(one_group, *accumulators)
            some = _scales(scale_ring.at[at, g], division, within, native)
            totals = [
                total + one * lax.broadcast_in_dim(s, one.shape, [0])
                for total, one, s in zip(totals, sums, some)
            ]
        plgpu.barrier_arrive(empty.at[at])
        pl.when(i > 0)(lambda: refill(i - 1))
        return totals

    accumulators = [plgpu.ACC((64, num_rows), jnp.float32)] * wide
    if group:
        zero = jnp.zeros((64, num_rows), jnp.float32)
        if native:
            zero = plgpu.layout_cast(zero, plgpu.Layout.WGMMA)
        sums = lax.fori_loop(0, mine, scaled, [zero] * wide)
    else:

        def over_all(*accs):
            lax.fori_loop(0, mine, lambda i, _: whole(i, accs), None)
            return [acc[...] for acc in accs]

        sums = pl.run_scoped(over_all, *accumulators)
    if native:
        columns = pl.ds(tile * COLUMNS, COLUMNS)
        last = None if last_gmem is None else last_gmem.at[:, columns]
        out = out_gmem.at[share, :, columns]
        turn_gpu.finish(out, w_ring, aside, sums, last, division, blocks.cluster)
    else:
        for a, one in enumerate(sums):
            out_gmem[part, ring, tile, within * wide + a] = one


def _scales(ref, division, within, native: bool):
    """A warpgroup's 64 scales for each of its accumulators, in float32."""
    if native:
        return lanes_gpu.scales(ref, division)
    values = ref[...].astype(jnp.float32)[None]
    mine = [within * division.wide + a for a in range(division.wide)]
    return [_mine(values, division.bits, j)[:, 0] for j in mine]


def stream_matmul(
    x_MK: jax.Array,
    bytes_KB: jax.Array,
    scale_GN: jax.Array | None,
    last_N: jax.Array | None = None,
    *,
    fmt: Format,
    blocks: Blocks,
    dtype=jnp.float32,
    interpret: bool = False,
) -> jax.Array:
    """[M, N]: x times the codes' values, scaled in float32 and cast once.

    Args:
        scale_GN: of groups of rows, in float32 or bfloat16.
        last_N: of columns, likewise.
        dtype: of the result, float32 or bfloat16.
    """
    (m, k), bits = x_MK.shape, dtype_bits(fmt.dtype)
    assert k % (blocks.k * blocks.split) == 0, (k, blocks)
    assert blocks.split % blocks.cluster == 0, blocks
    num_n = bytes_KB.shape[1] * 8 // bits
    shares, tiles = blocks.split // blocks.cluster, num_n // COLUMNS
    group = None if scale_GN is None else k // scale_GN.shape[0]
    padded = -(-m // 8) * 8
    if interpret or m > FILLED:
        x_MK = jnp.pad(x_MK, ((0, padded - m), (0, 0)))
    args = [x_MK, bytes_KB]
    args += [] if scale_GN is None else [scale_GN]
    scratch = _rings(blocks, fmt, padded, scale_GN, group)
    if fmt.table is not None and not interpret:
        args.append(jnp.asarray(decode_ptx.pairs(fmt.table)))
        scratch += [plgpu.SMEM(decode_ptx.TABLE, jnp.int32), plgpu.Barrier()]
    in_kernel = last_N is not None and shares == 1 and not interpret
    if in_kernel:
        args.append(last_N.reshape(1, num_n))
    division = blocks.division(bits)
    mesh: dict = {"grid": (tiles, shares), "grid_names": ("tile", "share")}
    if interpret:  # which knows no clusters
        each = division.groups * blocks.wide, 64, blocks.piece(group)
        scratch.append(plgpu.SMEM(each, x_MK.dtype))
        out = (blocks.split, blocks.deep, tiles, 4, 64, padded), jnp.float32
        mesh = {"grid": (tiles, shares, blocks.cluster)}
        mesh |= {"grid_names": ("tile", "share", "part")} | interpreter()
    else:
        scratch.append(plgpu.SMEM((padded, turn_gpu.PITCH), jnp.float32))
        out = (shares, m, num_n), dtype if shares == 1 else jnp.float32
        mesh |= {"cluster": (blocks.cluster,), "cluster_names": ("part",)}
    how = {"fmt": fmt, "blocks": blocks, "group": group, "is_scaled": in_kernel}
    how |= {"num_chunks": k // (blocks.k * blocks.split), "native": not interpret}
    kernel = plgpu.kernel(
        functools.partial(_body, **how),
        out_type=jax.ShapeDtypeStruct(*out),
        num_threads=division.groups,
        thread_name="wg",
        scratch_types=scratch,
        compiler_params=lane_params(),
        **mesh,
    )
    out = kernel(*alike(*args))
    out = _in_order(jnp.sum(out, (0, 1)), bits)[None, :m] if interpret else out
    out = out[0] if out.shape[0] == 1 else jnp.sum(out, 0)
    if last_N is not None and not in_kernel:
        out = out * last_N.astype(jnp.float32).reshape(1, num_n)
    return out.astype(dtype)


def _rings(blocks: Blocks, fmt: Format, padded: int, scale, group) -> list:
    """Buffers for the weight, x and scales of groups, and their barriers."""
    bits, inner = dtype_bits(fmt.dtype), blocks.piece(group)
    buffers = blocks.stages * blocks.deep
    ring = lambda shape, dtype, columns: plgpu.SMEM(
        (buffers, *shape), dtype, transforms=in_order(columns, dtype)
    )
    rings: list = [
        ring((blocks.k, COLUMNS * bits // 8), jnp.int8, 128),
        ring((padded, blocks.k), jnp.bfloat16, inner),
    ]
    if scale is not None:
        count = max(1, blocks.k // group)
        rings.append(plgpu.SMEM((buffers, count, COLUMNS), scale.dtype))
    return rings + [
        plgpu.Barrier(num_arrivals=len(rings), num_barriers=buffers),
        plgpu.Barrier(num_arrivals=blocks.division(bits).across, num_barriers=buffers),
    ]


def _in_order(out, bits: int):
    """[M, N] of [N / 256, 4, 64, M], which the interpreted kernel writes."""
    tiles, padded = out.shape[0], out.shape[-1]
    extents, axes = order(bits)
    out = out.reshape(tiles, *(extents[a] for a in axes), padded)
    back = [1 + axes.index(a) for a in range(len(axes))]
    return out.transpose(out.ndim - 1, 0, *back).reshape(padded, -1)
