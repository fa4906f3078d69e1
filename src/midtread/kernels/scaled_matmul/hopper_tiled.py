"""Block-scaled fp8 matmul on Hopper: scales vary within the sum, in tiles of 128.

    out_MN  =  sum_t  sa_tM sb_tN  sum_{k in t} a_Mk b_Nk

DeepSeek-V3's recipe (arXiv 2412.19437, section 3.3): 1x128 tiles of activations and
gradients, 128x128 blocks of weights. Each tile of the sum starts from zero in the tensor
cores and is scaled and added in float32 outside of them, which also makes up for their
short fp8 accumulators. Weights have one scale per block of columns, so it joins the rows'
scales as a number; two operands in 1x128 tiles (the weight gradient) need it by column.

hopper.py has the walk, the ring of buffers and the writing. Three warpgroups multiply, each with 64
rows: one scales while the tensor cores work for another. They start by turns, because otherwise
all would have their tiles at once and scale at once; with scales by column that gains nothing.
Two neighbouring programs fetch the rows of a once for both.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from midtread.kernels.hopper.shared_memory import swizzled
from midtread.kernels.hopper.threads import asm, by_threads, plus, shifted, value
from midtread.kernels.pallas_compat import (
    arith,
    load_slice,
    mgpu,
    pl,
    plgpu,
    transposed,
)
from midtread.kernels.scaled_matmul.hopper import (
    Job,
    launch,
    nothing,
    over_blocks,
    send,
)

TILE, ROWS, GROUPS, WIDTH = 128, 64, 3, 8
CTA = ROWS * GROUPS, TILE
FREE = 8  # the first barrier that Mosaic does not use; it uses one for each warpgroup


def _turn(action: str) -> None:
    """Makes warpgroups take turns at a barrier: "sync" waits for the one before, and "arrive"
    lets the next one start."""

    @by_threads()
    def run():
        whose = shifted(mgpu.thread_idx(), 7)  # the warpgroup
        if action == "arrive":
            after = plus(whose, 1)
            is_last = arith.cmpi(arith.CmpIPredicate.eq, after, value(GROUPS))
            whose = arith.select(is_last, value(0), after)
        asm([], f"bar.{action} $0, 256;", [plus(whose, FREE)], "r")

    run()


def _body(a_gmem, b_gmem, sa_gmem, sb_gmem, out_gmem, *, stages: int, native: bool):
    (m, k), n = a_gmem.shape, b_gmem.shape[0]
    pair = native
    grid = pl.cdiv(m, CTA[0]), pl.cdiv(n, CTA[1] * (2 if pair else 1))
    by_column = sb_gmem.shape[1] == n
    turn = _turn if native and not by_column else nothing

    codes = lambda rows, dtype, shared: plgpu.BlockSpec(
        (rows, TILE),
        lambda t: (0, t),
        transforms=swizzled(TILE, dtype),
        memory_space=plgpu.SMEM,
        collective_axes=("pair",) if shared else (),
    )
    scales = lambda extent: plgpu.BlockSpec(
        (1, extent), lambda t: (t, 0), memory_space=plgpu.SMEM
    )
    specs = [codes(CTA[0], a_gmem.dtype, pair), codes(CTA[1], b_gmem.dtype, False)]
    specs += [scales(CTA[0])] + [scales(CTA[1])] * by_column

    def inputs(i, j):
        rows, columns = pl.ds(i * CTA[0], CTA[0]), pl.ds(j * CTA[1], CTA[1])
        parts = [a_gmem.at[rows], b_gmem.at[columns], sa_gmem.at[:, rows]]
        return [*parts, sb_gmem.at[:, columns]] if by_column else parts

    def find(index):
        i, j = plgpu.planar_snake(index, grid, 1, WIDTH)
        if pair:
            j = j * 2 + lax.axis_index("pair")
        wg = lax.axis_index("wg")
        mine = pl.ds(wg * ROWS, ROWS)
        tile = lax.min(
            j, n // TILE - 1
        )  # one program of a pair may lie outside altogether

        def step(index, a_smem, b_smem, sa_smem, *rest):
            *sb_smem, total = rest
            # What fits into registers is loaded before this waits for the tensor cores.
            layout = plgpu.Layout.WGMMA
            sa = load_slice(sa_smem.at[0], wg * ROWS, ROWS, layout.reduce(1))
            if not by_column:
                sa = sa * sb_gmem[index[0], tile]
            turn("sync")

            def one_tile(acc):
                plgpu.wgmma(acc, a_smem.at[mine], transposed(b_smem))
                turn("arrive")
                return acc[...]

            part = pl.run_scoped(one_tile, plgpu.ACC((ROWS, TILE), jnp.float32))
            both = lax.broadcast_in_dim(sa, part.shape, [0])
            if by_column:
                sb = load_slice(sb_smem[0].at[0], 0, TILE, layout.reduce(0))
                both = both * lax.broadcast_in_dim(sb, part.shape, [1])
            return total + part * both

        def finish(run, out_smem):
            zero = jnp.zeros((ROWS, TILE), jnp.float32)
            out = run(plgpu.layout_cast(zero, plgpu.Layout.WGMMA))
            corner = i * CTA[0] + wg * ROWS, j * CTA[1]
            send(out, corner, out_smem, out_gmem)

        return Job(inputs(i, j), specs, k // TILE, step, finish)

    example = Job(inputs(0, 0), specs, k // TILE, nothing, nothing)
    count = grid[0] * grid[1]
    pl.when(lax.axis_index("wg") == GROUPS - 1)(lambda: turn("arrive"))  # lets 0 start
    over_blocks(find, count, example, out_gmem.dtype, groups=GROUPS, stages=stages)


def tiled_matmul(
    a_MK: jax.Array,
    b_NK: jax.Array,
    sa_TM: jax.Array,
    sb_TN: jax.Array,
    out_dtype,
    interpret: bool = False,
) -> jax.Array:
    """Returns [M, N] of codes and scales; `sb_TN` may have one entry per 128 columns."""
    stages = 4 if jnp.dtype(out_dtype).itemsize == 2 else 3
    native = not interpret  # the interpreter has no clusters and no single threads
    return launch(
        functools.partial(_body, stages=stages, native=native),
        jax.ShapeDtypeStruct((a_MK.shape[0], b_NK.shape[0]), out_dtype),
        (a_MK, b_NK, sa_TM, sb_TN),
        groups=GROUPS, pair=native, interpret=interpret,
    )  # fmt: skip
