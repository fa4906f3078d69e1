"""Many rows against a stored weight on Hopper: decoded on the way into the tensor cores.

    out_MN  =  s_N  sum_k x_Mk value(code_kN)                   one scale for each column
    out_MN  =  sum_k x_Mk bf16(s_gN value(code_kN))             one for each group g of k
    out_MN  =  t_M s_N  sum_k code_Mk code_kN                   rows of codes, 8 bits both

The weight is the left operand of wgmma, out^T = w^T x^T, and goes from codes in shared
memory to registers to tensor cores: no decoded copy of it exists anywhere. Scales of groups
are multiplied in between and rounded to bfloat16, which gives the numbers that decoding the
whole weight first would. (Scaling the sums of each group instead has the tensor cores wait
for every group: 0.92x of bfloat16 at 8,192 rows of int4.)

Codes by codes need no decoding. But wgmma wants neighbours along the sum in one register,
and in memory, unless it is told of 16 bits, and a weight [k, n] has them a row apart: they are
turned on the same way, by byte permutes. (scaled_matmul/hopper.py takes weights that lie the other way, as
in training, where quantizing writes them so.)

With many rows the tensor cores are what counts, so a program stays for good, one to a
multiprocessor, and walks over blocks of the result. One warpgroup fetches, two multiply,
each 64 columns by all rows of a block: while one decodes, the tensor cores work for the
other. The ring of buffers runs on across blocks of the result, so the next block's codes
arrive while this one's sums are written (pipeline.py).

Results leave by the copy engine, turned back in shared memory; where programs share a sum
they are float32 parts, which XLA adds up.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from midtread.kernels.hopper import decoding
from midtread.kernels.pallas_compat import alike, interpreter, lane_params, pl, plgpu
from midtread.kernels.scaled_matmul.hopper import in_order
from midtread.kernels.weight_matmul.hopper_prefill import pipeline as prefill_pipeline
from midtread.kernels.weight_matmul.hopper_prefill.pipeline import (
    COLUMNS,
    GROUPS,
    OUT_COLUMNS,
    OUT_ROWS,
    Plan,
    PrefillBlocks,
)
from midtread.numerics.formats import Format, dtype_bits


def prefill_matmul(
    x_MK: jax.Array,
    bytes_KB: jax.Array,
    scale_GN: jax.Array,
    rows_M: jax.Array | None = None,
    *,
    fmt: Format,
    dtype,
    blocks: PrefillBlocks,
    interpret: bool = False,
) -> jax.Array:
    """[M, N] in `dtype`, bfloat16 or float32: x times the codes' values, scaled.

    Args:
        scale_GN: [1, N] in float32, or one for each group of k, in bfloat16.
        rows_M: scales of the rows in float32, where these are codes.
    """
    (m, k), n = x_MK.shape, scale_GN.shape[1]
    # the copy engine moves 8 rows at a time
    x_MK = jnp.pad(x_MK, ((0, -m % 8), (0, 0)))
    if interpret:  # the interpreter has no clusters
        blocks = dataclasses.replace(blocks, pair=False)
    across, step = (
        COLUMNS * (2 if blocks.pair else 1),
        prefill_pipeline.step(x_MK.dtype),
    )
    assert k % (step * blocks.split) == 0 and n % across == 0, (k, n, blocks)
    grid = pl.cdiv(m, blocks.rows), n // across
    count = grid[0] * grid[1] * blocks.split
    last = count % blocks.programs() if blocks.halves else 0
    plan = Plan(
        fmt=fmt, blocks=blocks, dtype=x_MK.dtype, native=not interpret, grid=grid,
        group=k // scale_GN.shape[0] if scale_GN.shape[0] > 1 else None,
        chunks=k // (blocks.k * blocks.split), whole=count - last, halves=2 * last,
    )  # fmt: skip
    out_dtype = jnp.dtype(dtype) if blocks.split == 1 else jnp.dtype(jnp.float32)
    args = [x_MK, bytes_KB, scale_GN]
    if rows_M is not None:
        args.append(jnp.pad(rows_M, (0, grid[0] * blocks.rows - m)))
    if plan.looks_up:
        args.append(jnp.asarray(decoding.pairs(fmt.table)))
    extra = interpreter() if interpret else {}
    if blocks.pair:
        extra |= {"cluster": (2,), "cluster_names": ("pair",)}
    kernel = plgpu.kernel(
        functools.partial(prefill_pipeline.body, plan=plan),
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
    """Shared memory, in the order of prefill_pipeline.Refs."""
    blocks, width = plan.blocks, COLUMNS * dtype_bits(plan.fmt.dtype) // 8
    ring = lambda shape, dtype, columns: plgpu.SMEM(
        (blocks.stages, *shape), dtype, transforms=in_order(columns, dtype)
    )
    line = in_order(128 // out_dtype.itemsize, out_dtype)
    how = {"num_arrivals": GROUPS, "num_barriers": blocks.stages}
    scratch: list[Any] = [
        plgpu.SMEM((GROUPS, 2, OUT_ROWS, OUT_COLUMNS), out_dtype, transforms=line),
        ring((blocks.rows, blocks.k), plan.dtype, plan.inner),
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
    if plan.looks_up:
        scratch += [plgpu.SMEM(decoding.TABLE, jnp.int32), plgpu.Barrier()]
    if not plan.native:
        operand = plan.fmt.dtype if plan.is_codes else jnp.bfloat16
        scratch.append(plgpu.SMEM((GROUPS, 64, plan.inner), operand))
    return scratch
