"""Few rows against a stored weight on Hopper: codes go from memory into tensor cores.

    out_MN  =  sum_g s_gN  sum_{k in g} x_Mk value(code_kN)         M = 1 .. 64, Mosaic

The kernel computes out^T = w^T x^T. The weight is the left operand of the tensor cores, which may
come from registers, and x is the right one, from shared memory. So a decoded weight never leaves
the thread that decoded it, and eight rows cost as many instructions as one.

A program owns 256 columns of the weight (as Flax stores it, [k, n] with n along the
memory) and a part of the sum. The copy engine brings blocks of `k` rows into rings of
buffers. The columns are four accumulators of 64; a warpgroup has `wide` of them, and `deep`
sets of warpgroups take turns at the blocks, each with a ring of its own:

    wide 4, deep 3 or 4    Each warpgroup has its own ring: it reads a block once for all columns
                           and waits for no other. This is best for 4 bits and a few rows,
                           whose sums fit into registers. It uses mma.sync (hopper/mma.py).
    wide 1 or 2, deep 1    All warpgroups read every block, each for its columns, by wgmma.

Tensor cores need pairs of neighbours along k in one register, and these lie in two rows.
ldmatrix, which transposes blocks of 16-bit numbers, puts 16 bits of two rows into a word. An
accumulator may take any 64 columns, so it takes those that a thread has then (hopper/lanes.py).

wgmma is asynchronous and reads its registers late. So nothing may be decoded into the registers of
a multiplication that was not waited for: a block is decoded in at least two pieces, and when one
is begun only the multiplication of the piece before it may still run.

Programs that share a column form a cluster, if clusters of that size can run for all columns at
once: they send each other their sums, and scale, cast and write the result (exchange.py).
A cluster must lie within one of the chip's groups of up to 18 multiprocessors, whose sizes differ
from chip to chip; an H200 was seen to run 66 clusters of 2 at once, 30 of 4, 17 of 6 and 15 of 8.
One cluster too many doubles the time. Where more programs must share a column, pairs write
float32 parts, which XLA adds up in whatever it does next.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from midtread.kernels.gates import GATES, unwoven
from midtread.kernels.hopper import lanes
from midtread.kernels.hopper.lanes import COLUMNS
from midtread.kernels.hopper.ring import named, zero_points
from midtread.kernels.pallas_compat import alike, interpreter, lane_params, pl, plgpu
from midtread.kernels.pending import Pending
from midtread.kernels.weight_matmul.hopper_decode import exchange, pipeline
from midtread.kernels.weight_matmul.hopper_decode.pipeline import DecodeBlocks, Plan
from midtread.numerics.formats import Format, dtype_bits

FILLED = (
    8  # the copy engine fills up fewer rows with zeros; more are padded to a multiple
)


def _body(*given, plan: Plan, names: tuple[str, ...]):
    """A warpgroup's share: the sums of its blocks (pipeline.py), which then become rows of
    the result (exchange.py)."""
    refs, deep = named(names, given), plan.division.deep
    tile, share = lax.axis_index("tile"), lax.axis_index("share")
    part = share * plan.blocks.cluster + lax.axis_index("part")
    begin, end = (
        lax.div(p * plan.num_chunks, plan.blocks.split) for p in (part, part + 1)
    )

    def address(ring, i):
        k = (begin + i * deep + ring) * plan.blocks.k
        # This is row 0 of x, but Pallas must not know: it refuses to read beyond the last
        # row, which the copy engine fills up with zeros.
        return pipeline.BlockAddress(k, tile, share * 0, k)

    count = lambda ring: lax.div(end - begin - ring + deep - 1, deep)
    me = pipeline.this_warpgroup(plan, count, address)
    pipeline.fill(plan, refs, me)
    others = (refs.received, refs.signal) if plan.is_clustered else None
    if others:
        exchange.prepare(refs.signal, plan.blocks.cluster, refs.out.shape[1])
    scale, gate = refs.column_scales, plan.gate
    columns = pl.ds(tile * COLUMNS, COLUMNS)
    scale = [] if scale is None else exchange.factors(scale.at[0, columns], gate)
    sums = pipeline.sums(plan, refs, me)
    if plan.native:
        width = COLUMNS if gate is None else COLUMNS // 2
        out = refs.out.at[pl.ds(share, 1), :, pl.ds(tile * width, width)]
        ends = plan.spare(refs), sums, scale, plan.division, others
        exchange.finish(out, *ends, gate=gate)
    else:
        for a, one in enumerate(sums):
            refs.out[part, me.ring, tile, me.within * plan.blocks.wide + a] = one


def decode_matmul(
    x_MK: jax.Array,
    bytes_KB: jax.Array,
    scale_GN: jax.Array | None,
    last_N: jax.Array | None = None,
    zeros_GN: jax.Array | None = None,
    *,
    fmt: Format,
    blocks: DecodeBlocks,
    dtype=jnp.float32,
    gate: str | None = None,
    interpret: bool = False,
) -> Pending:
    """x times the codes' values, scaled: one part [1, M, N] in `dtype`, or parts in float32
    where clusters cannot add up all of them, and then the scales of columns are left too.

    Args:
        scale_GN: of groups of rows, in float32 or bfloat16.
        last_N: of columns, likewise.
        zeros_GN: zero points of groups, codes of the same type.
        dtype: of the result, float32 or bfloat16.
        gate: a name in `gates.GATES`: the columns are woven, and [1, M, N / 2] comes out. Then a
            cluster must have the whole sum.
    """
    (m, k), bits = x_MK.shape, dtype_bits(fmt.dtype)
    assert k % blocks.k == 0 and blocks.split <= k // blocks.k, (k, blocks)
    assert blocks.split % blocks.cluster == 0, blocks
    num_n = bytes_KB.shape[1] * 8 // bits
    shares, tiles = blocks.split // blocks.cluster, num_n // COLUMNS
    group = None if scale_GN is None else k // scale_GN.shape[0]
    padded = -(-m // 8) * 8
    if interpret or m > FILLED:
        x_MK = jnp.pad(x_MK, ((0, padded - m), (0, 0)))
    native = not interpret
    zeros, zero_bits = None, 0
    if zeros_GN is not None and group:
        zeros = zero_points(zeros_GN, COLUMNS, max(1, blocks.k // group))
        zero_bits = zeros.shape[1] * 8 // num_n
    assert gate is None or shares == 1, blocks
    chunks = k // blocks.k
    plan = Plan(fmt, group, native, zero_bits, blocks, num_chunks=chunks, gate=gate)
    operands = {"x": x_MK, "codes": bytes_KB}
    operands |= {} if scale_GN is None else {"group_scales": scale_GN}
    operands |= {} if zeros is None else {"group_zeros": zeros}
    operands |= plan.table_operand()
    in_kernel = last_N is not None and shares == 1 and native
    if in_kernel:
        operands["column_scales"] = last_N.reshape(1, num_n)
    buffers = plan.buffers(padded, scale_GN)
    mesh: dict = {"grid": (tiles, shares), "grid_names": ("tile", "share")}
    if native:
        if plan.is_clustered:
            shape = exchange.received_shape(blocks.cluster, m)
            buffers["received"] = plgpu.SMEM(shape, jnp.float32)
            buffers["signal"] = plgpu.SMEM(exchange.SIGNAL, jnp.int32)
        wide = num_n if gate is None else num_n // 2
        out = (shares, m, wide), dtype if shares == 1 else jnp.float32
        mesh |= {"cluster": (blocks.cluster,), "cluster_names": ("part",)}
    else:  # the interpreter knows no clusters
        buffers |= plan.interpreter_buffers()
        out = (blocks.split, blocks.deep, tiles, 4, 64, padded), jnp.float32
        mesh = {"grid": (tiles, shares, blocks.cluster)}
        mesh |= {"grid_names": ("tile", "share", "part")} | interpreter()
    kernel = plgpu.kernel(
        functools.partial(_body, plan=plan, names=(*operands, "out", *buffers)),
        out_type=jax.ShapeDtypeStruct(*out),
        num_threads=plan.division.groups,
        thread_name="wg",
        scratch_types=list(buffers.values()),
        compiler_params=lane_params(barriers=False),
        **mesh,
    )
    out = kernel(*alike(*operands.values()))
    if interpret:
        out = by_columns(jnp.sum(out, (0, 1)), bits)[None, :m]
        if gate is not None:
            out = Pending(out, last_N).total().astype(jnp.bfloat16).astype(jnp.float32)
            return Pending(GATES[gate].formula(*unwoven(out))[None].astype(dtype))
    return Pending(out, None if in_kernel else last_N)


def by_columns(out, bits: int):
    """[M, N], from the [N / 256, 4, 64, M] that the interpreted kernel writes."""
    tiles, padded = out.shape[0], out.shape[-1]
    extents, axes = lanes.order(bits)
    out = out.reshape(tiles, *(extents[a] for a in axes), padded)
    back = [1 + axes.index(a) for a in range(len(axes))]
    return out.transpose(out.ndim - 1, 0, *back).reshape(padded, -1)
