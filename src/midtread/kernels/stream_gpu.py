"""Few rows against a stored weight on Hopper: codes go from memory into tensor cores.

    out_MN  =  sum_g s_gN  sum_{k in g} x_Mk value(code_kN)         M = 1 .. 64, Mosaic

The weight is the left operand of wgmma, which may come from registers, and x the right
one, from shared memory: out^T = w^T x^T. So a decoded weight never leaves the thread that
decoded it, and 64 rows cost as many instructions as one.

A program owns 256 columns of the weight (as Flax stores it, [k, n] with n along the
memory) and a part of the sum. The copy engine brings blocks of `k` rows into a ring of
buffers; four warpgroups read them, each 64 of the columns. wgmma wants pairs of
neighbours along k in one register, and they lie in two rows: a byte permute takes one
byte of each. Which 64 columns a warpgroup takes is free, so it takes those that this
permute yields: every fourth pair. `order` tells which they were.

    lane (warp w, g, c) of warpgroup j holds, of every 8 rows, rows 2c and 2c + 1 of
    4 bits   columns  64 w + 8 g + 2 j + (0, 1)                 one byte of each row
    8 bits   columns  128 (j / 2) + 32 w + 4 g + 2 (j % 2) + (0, 1)

Each group of a scale is a sum of its own in the tensor cores, scaled and added in float32.
Programs that share a column write float32 parts, which XLA adds up in whatever it does next.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax

from midtread.kernels import decode_ptx
from midtread.kernels.decode_gpu import select
from midtread.kernels.pallas_compat import (
    alike,
    fragments,
    interpreter,
    lane_params,
    pl,
    plgpu,
    row_pairs,
    store_turned,
    transposed,
)
from midtread.numerics.formats import Format, dtype_bits

COLUMNS, GROUPS = 256, 4
TABLE_BYTES = 256 * 32 * 4


@dataclasses.dataclass(frozen=True)
class Blocks:
    k: int = 128  # rows of the weight in one buffer
    stages: int = 6  # buffers
    split: int = 1  # programs that share a sum
    ahead: bool = False  # decode the next rows before the sums of these are waited for

    @property
    def least(self) -> int:
        """Buffers that it takes: one is refilled a block after it was left, and `ahead`
        wants the next one by then."""
        return 3 if self.ahead else 2


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


def _values(p, fmt: Format):
    """[K, 256] of the bytes of a block, interpreted."""
    if dtype_bits(fmt.dtype) == 8:
        return lax.bitcast_convert_type(p, fmt.dtype).astype(jnp.bfloat16)
    low = (p << 4) >> 4 if fmt.dtype.name == "int4" else p & 15
    high = p >> 4 if fmt.dtype.name == "int4" else (p >> 4) & 15
    codes = jnp.stack([low, high], -1).reshape(p.shape[0], -1)
    if fmt.table is None:
        return codes.astype(jnp.bfloat16)
    return select(codes.astype(jnp.int32), fmt.table).astype(jnp.bfloat16)


# --- the kernel -------------------------------------------------------------------------------


def _body(*refs, fmt: Format, blocks: Blocks, group, num_chunks: int, native: bool):
    """x [M, K], bytes [K, B], scale [G, N] -> out [split, M, N]."""
    num_in = 3 if group else 2
    looks_up = fmt.table is not None and native
    inputs, rest = refs[:num_in], list(refs[num_in:])
    table_gmem = rest.pop(0) if looks_up else None
    out_gmem, *rings = rest
    w_ring, x_ring = rings[:2]
    full, empty, *rest = rings[num_in:]
    table, ready = (rest.pop(0), rest.pop(0)) if looks_up else (None, None)
    bits, stages = dtype_bits(fmt.dtype), blocks.stages
    num_rows, width = x_ring.shape[1], w_ring.shape[2]
    tile, part = lax.axis_index("tile"), lax.axis_index("part")
    wg = lax.axis_index("wg")
    step = min(blocks.k, group or blocks.k)  # rows under one scale
    inner = min(64, step)  # rows of one wgmma call
    held = None if native else rest[0]

    def fetch(chunk, slot):
        row = (part * num_chunks + chunk) * blocks.k
        rows = pl.ds(row, blocks.k)
        barrier = full.at[slot]
        source = inputs[1].at[rows, pl.ds(tile * width, width)]
        plgpu.copy_gmem_to_smem(source, w_ring.at[slot], barrier)
        plgpu.copy_gmem_to_smem(inputs[0].at[:, rows], x_ring.at[slot], barrier)
        if group:
            some = pl.ds(lax.div(row, group), rings[2].shape[1])
            source = inputs[2].at[some, pl.ds(tile * COLUMNS, COLUMNS)]
            plgpu.copy_gmem_to_smem(source, rings[2].at[slot], barrier)

    for slot in range(stages):
        pl.when(wg == slot % GROUPS)(functools.partial(fetch, slot, slot))

    def refill(chunk):
        """The buffer that all have left, one block ago, is filled again. A barrier knows
        one waiter: the warpgroup that a buffer belongs to."""
        slot = lax.rem(chunk, stages)

        @pl.when((chunk + stages < num_chunks) & (wg == lax.rem(slot, GROUPS)))
        def _():
            plgpu.barrier_wait(empty.at[slot])
            fetch(chunk + stages, slot)

    if looks_up:
        pl.when(wg == 0)(lambda: plgpu.copy_gmem_to_smem(table_gmem, table, ready))
        plgpu.barrier_wait(ready)

    def decoded(slot, start):
        block = w_ring.at[slot, pl.ds(start, inner)]
        if native:
            return fragments(block, *decode_ptx.code(fmt), bits, table)
        return _mine(_values(block[...], fmt), bits, wg)

    def multiply(acc, w, slot, start):
        if held is not None:  # the interpreter's wgmma takes no registers
            held[wg] = w
            w = held.at[wg]
        plgpu.wgmma(acc, w, transposed(x_ring.at[slot, :, pl.ds(start, inner)]))

    def whole(chunk, acc):
        slot = lax.rem(chunk, stages)
        plgpu.barrier_wait(full.at[slot])
        for start in range(0, blocks.k, inner):
            multiply(acc, decoded(slot, start), slot, start)
            # One may still run. Two may not: the next decoding could write the registers
            # that the older one reads.
            plgpu.wgmma_wait(1)
            if start == 0:  # all of the last block is done

                @pl.when(chunk > 0)
                def _():
                    plgpu.barrier_arrive(empty.at[lax.rem(chunk - 1, stages)])

        pl.when(chunk > 0)(lambda: refill(chunk - 1))

    def scaled(chunk, carry):
        total, *w = carry
        slot = lax.rem(chunk, stages)
        if not blocks.ahead:
            plgpu.barrier_wait(full.at[slot])
        for g in range(blocks.k // step):

            def one_group(acc, g=g, w=w):
                for start in range(g * step, (g + 1) * step, inner):
                    multiply(acc, w[0] if w else decoded(slot, start), slot, start)
                    more = w and start + inner < blocks.k
                    w = [decoded(slot, start + inner)] if more else []
                if blocks.ahead and (g + 1) * step == blocks.k:
                    w = [first_of(chunk + 1)]
                return acc[...], w

            accumulator = plgpu.ACC((64, num_rows), jnp.float32)
            sums, w = pl.run_scoped(one_group, accumulator)
            s = _scales(rings[2].at[slot, g], bits, wg, native)
            total = total + sums * lax.broadcast_in_dim(s, sums.shape, [0])
        plgpu.barrier_arrive(empty.at[slot])
        pl.when(chunk > 0)(lambda: refill(chunk - 1))
        return total, *w

    def first_of(chunk):
        """The first rows of a block, decoded once they are there; old ones at the end."""
        slot = lax.rem(chunk, stages)
        pl.when(chunk < num_chunks)(lambda: plgpu.barrier_wait(full.at[slot]))
        return decoded(slot, 0)

    if group:
        zero = jnp.zeros((64, num_rows), jnp.float32)
        if native:
            zero = plgpu.layout_cast(zero, plgpu.Layout.WGMMA)
        first = [first_of(jnp.int32(0))] if blocks.ahead else []
        total, *_ = lax.fori_loop(0, num_chunks, scaled, (zero, *first))
    else:

        def over_all(acc):
            lax.fori_loop(0, num_chunks, lambda i, _: whole(i, acc), None)
            return acc[...]

        total = pl.run_scoped(over_all, plgpu.ACC((64, num_rows), jnp.float32))
    if native:
        columns = pl.ds(tile * COLUMNS, COLUMNS)
        store_turned(out_gmem.at[part, :, columns], total, bits)
    else:
        out_gmem[part, tile, wg] = total


def _scales(ref, bits: int, wg, native: bool):
    """This warpgroup's 64 scales of a program's 256, in float32."""
    if native:
        return row_pairs(ref, bits)
    return _mine(ref[...].astype(jnp.float32)[None], bits, wg)[:, 0]


def stream_matmul(
    x_MK: jax.Array,
    bytes_KB: jax.Array,
    scale_GN: jax.Array | None,
    *,
    fmt: Format,
    blocks: Blocks,
    interpret: bool = False,
) -> jax.Array:
    """[M, N] in float32: x times the codes' values, group scales applied."""
    (m, k), bits = x_MK.shape, dtype_bits(fmt.dtype)
    assert k % (blocks.k * blocks.split) == 0, (k, blocks)
    num_n = bytes_KB.shape[1] * 8 // bits
    group = None if scale_GN is None else k // scale_GN.shape[0]
    padded = -(-m // 8) * 8
    x_MK = jnp.pad(x_MK, ((0, padded - m), (0, 0)))
    tiles = num_n // COLUMNS
    num_chunks = k // (blocks.k * blocks.split)
    stages = min(blocks.stages, num_chunks)
    assert stages >= min(num_chunks, blocks.least), (num_chunks, blocks)
    blocks = dataclasses.replace(blocks, stages=stages)
    inner = min(64, blocks.k, group or 64)  # columns of x in a row of its pattern
    in_order = lambda columns, swizzle: (
        plgpu.TilingTransform((8, columns)),
        plgpu.SwizzleTransform(swizzle),
    )
    width, x_order = COLUMNS * bits // 8, in_order(inner, inner * 2)
    scratch = [
        plgpu.SMEM((stages, blocks.k, width), jnp.int8, transforms=in_order(128, 128)),
        plgpu.SMEM((stages, padded, blocks.k), x_MK.dtype, transforms=x_order),
    ]
    args = [x_MK, bytes_KB]
    if group:
        count = max(1, blocks.k // group)
        scratch.append(plgpu.SMEM((stages, count, COLUMNS), scale_GN.dtype))
        args.append(scale_GN)
    scratch += [
        plgpu.Barrier(num_arrivals=len(args), num_barriers=stages),
        plgpu.Barrier(num_arrivals=GROUPS, num_barriers=stages),
    ]
    if fmt.table is not None and not interpret:
        args.append(jnp.asarray(decode_ptx.pairs(fmt.table)))
        scratch += [plgpu.SMEM((256, 32), jnp.int32), plgpu.Barrier()]
    out, extra = (blocks.split, padded, num_n), {}
    if interpret:
        scratch.append(plgpu.SMEM((GROUPS, 64, inner), x_MK.dtype))
        out, extra = (blocks.split, tiles, GROUPS, 64, padded), interpreter()
    how = {"fmt": fmt, "blocks": blocks, "group": group, "num_chunks": num_chunks}
    kernel = plgpu.kernel(
        functools.partial(_body, **how, native=not interpret),
        out_type=jax.ShapeDtypeStruct(out, jnp.float32),
        grid=(tiles, blocks.split),
        grid_names=("tile", "part"),
        num_threads=GROUPS,
        thread_name="wg",
        scratch_types=scratch,
        compiler_params=lane_params(),
        **extra,
    )
    out = jnp.sum(kernel(*alike(*args)), 0)
    return (_in_order(out, bits) if interpret else out)[:m]


def _in_order(out, bits: int):
    """[M, N] of [N / 256, 4, 64, M], which the interpreted kernel writes."""
    tiles, padded = out.shape[0], out.shape[-1]
    extents, axes = order(bits)
    out = out.reshape(tiles, *(extents[a] for a in axes), padded)
    back = [1 + axes.index(a) for a in range(len(axes))]
    return out.transpose(out.ndim - 1, 0, *back).reshape(padded, -1)
