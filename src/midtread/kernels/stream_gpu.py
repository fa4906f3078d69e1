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
those that this permute yields (lanes_gpu.py).

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

import functools

import jax
import jax.numpy as jnp
from jax import lax

from midtread.kernels import decode_ptx, stream_sums_gpu, turn_gpu
from midtread.kernels.lanes_gpu import COLUMNS
from midtread.kernels.matmul_gpu import in_order
from midtread.kernels.pallas_compat import alike, interpreter, lane_params, pl, plgpu
from midtread.kernels.stream_sums_gpu import Blocks, Plan
from midtread.numerics.formats import Format, dtype_bits

FILLED = 8  # up to so many rows the copy engine fills up; more are padded to eights


def _body(*given, plan: Plan):
    """A warpgroup's share: sums of its blocks (stream_sums_gpu.py), which then change hands
    (turn_gpu.py)."""
    refs, deep = stream_sums_gpu.refs_of(plan, given), plan.division.deep
    tile, share = lax.axis_index("tile"), lax.axis_index("share")
    part = share * plan.blocks.cluster + lax.axis_index("part")

    def find(ring, i):
        k = (part * plan.num_chunks + i * deep + ring) * plan.blocks.k
        # row 0 of x, but Pallas must not know: it refuses to read beyond the last row,
        # which the copy engine fills up with zeros
        return stream_sums_gpu.Spot(k, tile, share * 0, k)

    count = lambda ring: lax.div(plan.num_chunks - ring + deep - 1, deep)
    me = stream_sums_gpu.place(plan, count, find)
    stream_sums_gpu.start(plan, refs, me)
    sums = stream_sums_gpu.sums(plan, refs, me)
    if plan.native:
        columns = pl.ds(tile * COLUMNS, COLUMNS)
        last = None if refs.last is None else refs.last.at[:, columns]
        out, cluster = refs.out.at[pl.ds(share, 1), :, columns], plan.blocks.cluster
        between = refs.w_ring, refs.aside
        turn_gpu.finish(out, *between, sums, last, plan.division, cluster)
    else:
        for a, one in enumerate(sums):
            refs.out[part, me.ring, tile, me.within * plan.blocks.wide + a] = one


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
    scratch = rings(blocks, fmt, padded, scale_GN, group)
    if fmt.table is not None and not interpret:
        args.append(jnp.asarray(decode_ptx.pairs(fmt.table)))
        scratch += [plgpu.SMEM(decode_ptx.TABLE, jnp.int32), plgpu.Barrier()]
    in_kernel = last_N is not None and shares == 1 and not interpret
    if in_kernel:
        args.append(last_N.reshape(1, num_n))
    num_chunks = k // (blocks.k * blocks.split)
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
    plan = Plan(fmt, blocks, group, num_chunks, in_kernel, native=not interpret)
    kernel = plgpu.kernel(
        functools.partial(_body, plan=plan),
        out_type=jax.ShapeDtypeStruct(*out),
        num_threads=division.groups,
        thread_name="wg",
        scratch_types=scratch,
        compiler_params=lane_params(),
        **mesh,
    )
    out = kernel(*alike(*args))
    out = in_order_of(jnp.sum(out, (0, 1)), bits)[None, :m] if interpret else out
    out = out[0] if out.shape[0] == 1 else jnp.sum(out, 0)
    if last_N is not None and not in_kernel:
        out = out * last_N.astype(jnp.float32).reshape(1, num_n)
    return out.astype(dtype)


def rings(blocks: Blocks, fmt: Format, padded: int, scale, group) -> list:
    """Buffers for the weight, x and scales of groups, and their barriers."""
    bits, inner = dtype_bits(fmt.dtype), blocks.piece(group)
    buffers = blocks.stages * blocks.deep
    ring = lambda shape, dtype, columns: plgpu.SMEM(
        (buffers, *shape), dtype, transforms=in_order(columns, dtype)
    )
    found: list = [
        ring((blocks.k, COLUMNS * bits // 8), jnp.int8, 128),
        ring((padded, blocks.k), jnp.bfloat16, inner),
    ]
    if scale is not None:
        count = max(1, blocks.k // group)
        found.append(plgpu.SMEM((buffers, count, COLUMNS), scale.dtype))
    return found + [
        plgpu.Barrier(num_arrivals=len(found), num_barriers=buffers),
        plgpu.Barrier(num_arrivals=blocks.division(bits).across, num_barriers=buffers),
    ]


def in_order_of(out, bits: int):
    """[M, N] of [N / 256, 4, 64, M], which the interpreted kernel writes."""
    tiles, padded = out.shape[0], out.shape[-1]
    extents, axes = stream_sums_gpu.order(bits)
    out = out.reshape(tiles, *(extents[a] for a in axes), padded)
    back = [1 + axes.index(a) for a in range(len(axes))]
    return out.transpose(out.ndim - 1, 0, *back).reshape(padded, -1)
