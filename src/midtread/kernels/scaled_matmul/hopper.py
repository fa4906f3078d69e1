"""Scaled matmul on Hopper: 8-bit codes in, scaled bfloat16 or float32 out.

    out_MN  =  sa_M sb_N  sum_k a_MK b_NK          wgmma in int32 or float32

One pass: the sum never leaves the registers unscaled, so no int32 array is written, read
and written again. Both operands lie with the summed axis innermost, as 8-bit wgmma wants
them; a caller that has it otherwise transposes, and XLA merges that with the quantizing.

Each of the GPU's multiprocessors runs one program for good (`over_blocks`). One warpgroup
fetches blocks with the copy engine (TMA) into a ring of buffers, the others multiply: the
ring hides the memory, and the walk over output blocks (a snake, `width` blocks wide) shares
what L2 has. hopper_tiled.py and hopper_grouped.py walk the same way to other blocks.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from midtread.kernels.hopper.shared_memory import swizzled
from midtread.kernels.pallas_compat import (
    consumed,
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
class ScaledBlocks:
    """The block of one program. One of its two multiplying warpgroups has [m, n]; the two are
    neighbours along `split`."""

    m: int = 128
    n: int = 128
    k: int = 128
    stages: int = 4
    split: str = "m"  # the axis that the two multiplying warpgroups divide
    width: int = 8  # how many blocks wide the walk over the result is
    minor: int = 0  # the axis that the walk takes first: 0 is m
    delay: int = 0  # blocks still being multiplied when the next ones start
    pair: bool = False  # two programs, one below the other, fetch b once for both

    @property
    def cta(self) -> tuple[int, int]:
        return self.m * (2 if self.split == "m" else 1), self.n * (
            2 if self.split == "n" else 1
        )

    @property
    def rows(self) -> int:
        """The rows of the result of one program, or of a pair."""
        return self.cta[0] * (2 if self.pair else 1)

    def walk(self, index, grid) -> tuple[Any, Any]:
        """Returns the row and the column of the block at an index of the walk; a pair has
        two rows."""
        i, j = plgpu.planar_snake(index, grid, self.minor, self.width)
        return (i * 2 + lax.axis_index("pair") if self.pair else i), j

    def mine(self, wg) -> tuple[Any, Any]:
        """Returns the rows and columns of a program's block that a warpgroup multiplies."""
        if self.split == "m":
            return pl.ds(wg * self.m, self.m), pl.ds(0, self.n)
        return pl.ds(0, self.m), pl.ds(wg * self.n, self.n)


# --- the frame --------------------------------------------------------------------------------


class Job(NamedTuple):
    """How one block of the result is computed."""

    inputs: list  # what to fetch from, in global memory
    specs: list  # BlockSpecs of what a step fetches
    steps: Any  # how many there are; None in an example if that differs from job to job
    step: Callable  # (index, *blocks in shared memory, carry) -> carry
    finish: (
        Callable  # (run, out_smem): makes a carry, runs the steps, writes the result
    )


def over_blocks(find: Callable, count, example: Job, out_dtype, *, groups, stages):
    """Runs the jobs `find(0) .. find(count - 1)`, which all programs share.

    Args:
        find: returns the job at an index; every warpgroup calls it.
        example: a job whose inputs and specs are like those of all jobs.
        groups: how many warpgroups multiply.
    """
    # Where every job uses each buffer of the ring equally often, the fetching warpgroup need
    # not wait for a job's end: it begins the next one while the others write their results.
    goes_on = isinstance(example.steps, int) and example.steps % stages == 0
    goes_on &= all(spec.delay_release == 0 for spec in example.specs)

    def pipeline(job: Job, finish):
        return plgpu.emit_pipeline_warp_specialized(
            job.step,
            grid=(stages if job.steps is None else job.steps,),
            memory_registers=40,
            in_specs=job.specs,
            wg_axis="wg",
            num_compute_wgs=groups,
            max_concurrent_steps=stages,
            compute_context=finish,
            pipeline_state=plgpu.PipelinePipeline.STEADY if goes_on else None,
        )

    @functools.partial(
        pl.run_scoped,
        ring=pipeline(example, example.finish).get_allocations(*example.inputs),
        out_smem=plgpu.SMEM(
            (groups, 2, OUT, OUT), out_dtype, transforms=swizzled(OUT, out_dtype)
        ),
        collective_axes="wg",
    )
    def _(ring, out_smem):
        wg = lax.axis_index("wg")
        mine = out_smem.at[wg]
        free = consumed(ring) if goes_on else None

        @pl.when(wg < groups)
        def _():  # at the beginning all buffers are free
            for slot in range(stages if goes_on else 0):
                plgpu.barrier_arrive(free.at[slot])

        @plgpu.nd_loop((count,), collective_axes="sm")
        def _(loop):
            job = find(loop.index[0])
            finish = functools.partial(job.finish, out_smem=mine)
            pipeline(job, finish)(*job.inputs, allocations=ring)

        @pl.when(wg == groups)
        def _():  # at the end it waits until they are free again
            for slot in range(stages if goes_on else 0):
                plgpu.barrier_wait(free.at[slot])

    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def launch(body, out_type, args, *, groups: int, pair=False, interpret=False):
    """Runs `body` on all multiprocessors, with `groups` warpgroups and one that fetches."""
    extra = interpreter() if interpret else {}
    if pair:
        extra |= {"cluster": (2,), "cluster_names": ("pair",)}
    kernel = plgpu.kernel(
        body,
        out_type=out_type,
        grid=(num_cores() // (2 if pair else 1),),
        grid_names=("sm",),
        num_threads=groups + 1,
        thread_name="wg",
        compiler_params=warpgroup_params(),
        **extra,
    )
    return kernel(*args)


def send(out, corner, out_smem, out_gmem):
    """Writes a warpgroup's block through two buffers, a square at a time."""
    *lead, row, column = corner
    for (r, c), slot in squares(out, out_smem, out_gmem.dtype):
        at = (*lead, pl.ds(row + r, OUT), pl.ds(column + c, OUT))
        plgpu.copy_smem_to_gmem(slot, out_gmem.at[at], commit_group=False)


def squares(out, out_smem, dtype):
    """Yields each square of a block: where it belongs, and the buffer in shared memory that
    holds it. The caller starts its copies before it asks for the next square."""
    out = out.astype(dtype)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    m, n = out.shape
    parts = [(r, c) for r in range(0, m, OUT) for c in range(0, n, OUT)]
    for count, (r, c) in enumerate(parts):
        slot = out_smem.at[count % 2]
        plgpu.wait_smem_to_gmem(1, wait_read_only=True)
        slot[...] = out[r : r + OUT, c : c + OUT]
        plgpu.commit_smem()
        yield (r, c), slot
        plgpu.commit_smem_to_gmem_group()


# --- the matmul -------------------------------------------------------------------------------


def code_specs(a_gmem, b_gmem, blocks: ScaledBlocks, first=None) -> list:
    """Returns the BlockSpecs of both operands; sums start at column `first`, by default 0."""
    shared = ("pair",) if blocks.pair else ()
    width, index_map = blocks.k, lambda i: (0, i)
    if first is not None:
        width = pl.Element(blocks.k)
        index_map = lambda i: (0, pl.multiple_of(first + i * blocks.k, blocks.k))
    return [
        plgpu.BlockSpec(
            (rows, width),
            index_map,
            transforms=swizzled(blocks.k, dtype),
            memory_space=plgpu.SMEM,
            delay_release=blocks.delay,
            collective_axes=axes,
        )
        for rows, dtype, axes in (
            (blocks.cta[0], a_gmem.dtype, ()),
            (blocks.cta[1], b_gmem.dtype, shared),
        )
    ]


def multiplying(blocks: ScaledBlocks, dtype, wg, write: Callable, edit=None):
    """Returns (step, finish) of a job that sums products of codes and calls `write(sum,
    out_smem)`.

    Args:
        edit: called with the index of a step and the part of a_smem that this warpgroup is
            about to multiply.
    """
    wide = jnp.int32 if jnp.issubdtype(dtype, jnp.integer) else jnp.float32
    rows, columns = blocks.mine(wg)

    def step(index, a_smem, b_smem, acc):
        if edit is not None:
            edit(index[0], a_smem.at[rows])
        plgpu.wgmma(acc, a_smem.at[rows], transposed(b_smem.at[columns]))
        plgpu.wgmma_wait(blocks.delay)
        return acc

    def finish(run, out_smem):
        @functools.partial(pl.run_scoped, acc=plgpu.ACC((blocks.m, blocks.n), wide))
        def _(acc):
            run(acc)
            write(acc[...].astype(jnp.float32), out_smem)

    return step, finish


def scaled_by(out, sa_gmem, row, sb_gmem, column):
    """Multiplies a warpgroup's block by the scales of its rows and columns, or by one scale."""
    for axis, scales, start in ((0, sa_gmem, row), (1, sb_gmem, column)):
        if scales.shape[0] == 1:
            out = out * scales[0]
            continue
        layout = plgpu.Layout.WGMMA.reduce(1 - axis)
        part = load_slice(scales, start, out.shape[axis], layout)
        out = out * lax.broadcast_in_dim(part, out.shape, [axis])
    return out


def _body(a_gmem, b_gmem, sa_gmem, sb_gmem, out_gmem, *, blocks: ScaledBlocks):
    (m, k), n = a_gmem.shape, b_gmem.shape[0]
    cta_m, cta_n = blocks.cta
    grid = pl.cdiv(m, blocks.rows), pl.cdiv(n, cta_n)

    def job(i, j):
        wg = lax.axis_index("wg")
        rows, columns = blocks.mine(wg)
        row, column = i * cta_m + rows.start, j * cta_n + columns.start

        def write(out, out_smem):
            out = scaled_by(out, sa_gmem, row, sb_gmem, column)
            send(out, (row, column), out_smem, out_gmem)

        inputs = [
            a_gmem.at[pl.ds(i * cta_m, cta_m)],
            b_gmem.at[pl.ds(j * cta_n, cta_n)],
        ]
        specs = code_specs(a_gmem, b_gmem, blocks)
        step, finish = multiplying(blocks, a_gmem.dtype, wg, write)
        return Job(inputs, specs, pl.cdiv(k, blocks.k), step, finish)

    find = lambda index: job(*blocks.walk(index, grid))
    example = Job(
        [a_gmem, b_gmem], code_specs(a_gmem, b_gmem, blocks), pl.cdiv(k, blocks.k),
        nothing, nothing,
    )  # fmt: skip
    over_blocks(
        find, grid[0] * grid[1], example, out_gmem.dtype, groups=2, stages=blocks.stages
    )


def nothing(*_, **__):
    """Does nothing: it stands for the functions of an example, of which only the blocks count."""


def scaled_matmul(
    a_MK: jax.Array,
    b_NK: jax.Array,
    sa_M: jax.Array,
    sb_N: jax.Array,
    out_dtype,
    blocks: ScaledBlocks,
    interpret: bool = False,
) -> jax.Array:
    """Returns [M, N] of codes and float32 scales, one for each row and column, or one for all.
    Blocks that reach beyond the edge read zeros there."""
    m, n = a_MK.shape[0], b_NK.shape[0]
    if interpret:  # the interpreter has no clusters
        blocks = dataclasses.replace(blocks, pair=False)
    cta_m, cta_n = blocks.cta
    sa_M, sb_N = (
        s if s.shape[0] == 1 else jnp.pad(s, (0, -extent % multiple))
        for s, extent, multiple in ((sa_M, m, 2 * cta_m), (sb_N, n, cta_n))
    )
    return launch(
        functools.partial(_body, blocks=blocks),
        jax.ShapeDtypeStruct((m, n), out_dtype),
        (a_MK, b_NK, sa_M, sb_N),
        groups=2, pair=blocks.pair, interpret=interpret,
    )  # fmt: skip
