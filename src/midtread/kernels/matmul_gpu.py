"""Scaled matmul on Hopper: 8-bit codes in, scaled bfloat16 or float32 out.

    out_MN  =  sa_M sb_N  sum_k a_MK b_NK          wgmma in int32 or float32

One pass: the sum never leaves the registers unscaled, so no int32 array is written, read
and written again. Both operands lie with the summed axis innermost, as 8-bit wgmma wants
them; a caller that has it otherwise transposes, and XLA merges that with the quantizing.

Each of the GPU's multiprocessors runs one program for good. One warpgroup fetches blocks
with the copy engine (TMA) into a ring of buffers, two others multiply: the ring hides the
memory, and the walk over output blocks (a snake, `width` blocks wide) shares what L2 holds.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax

from midtread.kernels.pallas_compat import (
    interpreter,
    load_slice,
    num_cores,
    pl,
    plgpu,
    transposed,
    warpgroup_params,
)

OUT = 64  # the result is written in squares of this side


@dataclasses.dataclass(frozen=True)
class Blocks:
    """What one program holds. `m`, `n`: of one warpgroup; two stand along `split`."""

    m: int = 128
    n: int = 128
    k: int = 128
    stages: int = 4
    split: str = "m"  # the axis that the two multiplying warpgroups divide
    width: int = 8  # of the walk
    minor: int = 0  # axis that the walk runs along first: 0 is m
    delay: int = 0  # blocks still being multiplied when the next ones start
    pair: bool = False  # two programs, one below the other, fetch b once for both

    @property
    def cta(self) -> tuple[int, int]:
        return self.m * (2 if self.split == "m" else 1), self.n * (
            2 if self.split == "n" else 1
        )


def in_order(columns: int, dtype) -> tuple:
    """The order of a block in shared memory that wgmma and TMA agree on."""
    bits = jnp.dtype(dtype).itemsize * 8
    swizzle = plgpu.find_swizzle(columns * bits)
    return (
        plgpu.TilingTransform((8, swizzle * 8 // bits)),
        plgpu.SwizzleTransform(swizzle),
    )


def _body(a_gmem, b_gmem, sa_gmem, sb_gmem, out_gmem, *, blocks: Blocks):
    m, k = a_gmem.shape
    n, _ = b_gmem.shape
    cta_m, cta_n = blocks.cta
    num_paired = 2 if blocks.pair else 1
    grid = pl.cdiv(m, cta_m * num_paired), pl.cdiv(n, cta_n)
    integer = jnp.issubdtype(a_gmem.dtype, jnp.integer)

    def pipeline(body, context):
        spec = lambda rows, dtype, shared=(): plgpu.BlockSpec(
            (rows, blocks.k),
            lambda i: (0, i),
            transforms=in_order(blocks.k, dtype),
            memory_space=plgpu.SMEM,
            delay_release=blocks.delay,
            collective_axes=shared,
        )
        shared = ("pair",) if blocks.pair else ()
        return plgpu.emit_pipeline_warp_specialized(
            body,
            grid=(pl.cdiv(k, blocks.k),),
            memory_registers=40,
            in_specs=[spec(cta_m, a_gmem.dtype), spec(cta_n, b_gmem.dtype, shared)],
            wg_axis="wg",
            num_compute_wgs=2,
            max_concurrent_steps=blocks.stages,
            compute_context=context,
        )

    nothing = lambda *_, **__: None

    @functools.partial(
        pl.run_scoped,
        ring=pipeline(nothing, nothing).get_allocations(a_gmem, b_gmem),
        out_smem=plgpu.SMEM(
            (2, 2, OUT, OUT),
            out_gmem.dtype,
            transforms=in_order(OUT, out_gmem.dtype),
        ),
        collective_axes="wg",
    )
    def _(ring, out_smem):
        wg = lax.axis_index("wg")

        @plgpu.nd_loop((grid[0] * grid[1],), collective_axes="sm")
        def _(loop):
            i, j = plgpu.planar_snake(loop.index[0], grid, blocks.minor, blocks.width)
            if blocks.pair:
                i = i * 2 + lax.axis_index("pair")
            rows, columns = pl.ds(i * cta_m, cta_m), pl.ds(j * cta_n, cta_n)
            first = i * cta_m, j * cta_n
            if blocks.split == "m":
                mine = pl.ds(wg * blocks.m, blocks.m), pl.ds(0, blocks.n)
                first = first[0] + wg * blocks.m, first[1]
            else:
                mine = pl.ds(0, blocks.m), pl.ds(wg * blocks.n, blocks.n)
                first = first[0], first[1] + wg * blocks.n

            def multiply(_, a_smem, b_smem, acc):
                plgpu.wgmma(acc, a_smem.at[mine[0]], transposed(b_smem.at[mine[1]]))
                plgpu.wgmma_wait(blocks.delay)
                return acc

            def compute(run):
                @functools.partial(
                    pl.run_scoped,
                    acc=plgpu.ACC(
                        (blocks.m, blocks.n), jnp.int32 if integer else jnp.float32
                    ),
                )
                def _(acc):
                    run(acc)
                    _write(
                        acc[...],
                        first,
                        sa_gmem,
                        sb_gmem,
                        out_smem.at[wg],
                        out_gmem,
                        blocks,
                    )

            pipeline(multiply, compute)(
                a_gmem.at[rows], b_gmem.at[columns], allocations=ring
            )

    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _write(acc, first, sa_gmem, sb_gmem, out_smem, out_gmem, blocks: Blocks):
    """Scales a warpgroup's block and sends it off, a few columns at a time."""
    row, column = first
    out = acc.astype(jnp.float32)
    sa = load_slice(sa_gmem, row, blocks.m, plgpu.Layout.WGMMA.reduce(1))
    sb = load_slice(sb_gmem, column, blocks.n, plgpu.Layout.WGMMA.reduce(0))
    out = out * lax.broadcast_in_dim(sa, out.shape, [0])
    out = out * lax.broadcast_in_dim(sb, out.shape, [1])
    send(out, first, out_smem, out_gmem)


def send(out, place, out_smem, out_gmem):
    """Writes a warpgroup's block through two buffers, a square at a time."""
    row, column = place
    out = out.astype(out_gmem.dtype)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    m, n = out.shape
    parts = [(r, c) for r in range(0, m, OUT) for c in range(0, n, OUT)]
    for count, (r, c) in enumerate(parts):
        slot = out_smem.at[count % 2]
        plgpu.wait_smem_to_gmem(1, wait_read_only=True)
        slot[...] = out[r : r + OUT, c : c + OUT]
        plgpu.commit_smem()
        target = out_gmem.at[pl.ds(row + r, OUT), pl.ds(column + c, OUT)]
        plgpu.copy_smem_to_gmem(slot, target)


def scaled_matmul(
    a_MK: jax.Array,
    b_NK: jax.Array,
    sa_M: jax.Array,
    sb_N: jax.Array,
    out_dtype,
    blocks: Blocks,
    interpret: bool = False,
) -> jax.Array:
    """[M, N] of codes and float32 scales. Edges of blocks that stick out read as zeros."""
    m, n = a_MK.shape[0], b_NK.shape[0]
    if interpret:  # the interpreter has no clusters
        blocks = dataclasses.replace(blocks, pair=False)
    cta_m, cta_n = blocks.cta
    sa_M = jnp.pad(sa_M, (0, -m % (2 * cta_m)))
    sb_N = jnp.pad(sb_N, (0, -n % cta_n))
    extra = interpreter() if interpret else {}
    if blocks.pair:
        extra |= {"cluster": (2,), "cluster_names": ("pair",)}
    kernel = plgpu.kernel(
        functools.partial(_body, blocks=blocks),
        out_type=jax.ShapeDtypeStruct((m, n), out_dtype),
        grid=(num_cores() // (2 if blocks.pair else 1),),
        grid_names=("sm",),
        num_threads=3,
        thread_name="wg",
        compiler_params=warpgroup_params(),
        **extra,
    )
    return kernel(a_MK, b_NK, sa_M, sb_N)
