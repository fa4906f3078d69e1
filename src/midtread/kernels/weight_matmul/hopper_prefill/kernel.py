"""Many rows against a stored weight on Hopper: decoded on the way into the tensor cores.

    out_MN  =  s_N  sum_k x_Mk value(code_kN)                   one scale for each column
    out_MN  =  sum_k x_Mk bf16(s_gN value(code_kN))             one for each group g of k
    out_MN  =  t_M s_N  sum_k code_Mk code_kN                   rows of codes, 8 bits both

The kernel computes out^T = w^T x^T. The weight is the left operand of wgmma and goes from codes in
shared memory to registers to tensor cores, so that no decoded copy of it exists anywhere. Scales of groups
are multiplied in between and rounded to bfloat16, which gives the numbers that decoding the
whole weight first would. (Scaling the sums of each group instead has the tensor cores wait
for every group: 0.92x of bfloat16 at 8,192 rows of int4.)

Codes by codes need no decoding. But wgmma needs neighbours along the sum in one register, and in a
weight [k, n] they are a row apart. Shared memory can transpose 16-bit elements only, so pairs of
bytes are transposed on the way to registers and byte permutes finish it.
(scaled_matmul/hopper.py takes weights [n, k], which training writes when it quantizes.)

With many rows the tensor cores are the limit. So there is one program for each multiprocessor,
which goes through many blocks of the result. One warpgroup fetches and two multiply, each 64
columns by all rows of a block: while one decodes, the tensor cores work for the other. Fetching
continues across blocks of the result, so the next block's codes arrive while the sums of this one
are written (pipeline.py).

Results are transposed back in shared memory and copied out from there. Where programs share a sum
they write float32 parts, which XLA adds up.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from midtread.kernels.hopper.ring import ring_buffers, zero_points
from midtread.kernels.hopper.shared_memory import swizzled
from midtread.kernels.pallas_compat import alike, interpreter, lane_params, pl, plgpu
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
    zeros_GN: jax.Array | None = None,
    *,
    fmt: Format,
    dtype,
    blocks: PrefillBlocks,
    interpret: bool = False,
) -> jax.Array:
    """Returns [M, N] in `dtype`, bfloat16 or float32: x times the codes' values, scaled.

    Args:
        scale_GN: [1, N] in float32, or one for each group of k, in bfloat16.
        rows_M: scales of the rows in float32, where these are codes.
        zeros_GN: zero points of groups, codes of the same type.
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
    group = k // scale_GN.shape[0] if scale_GN.shape[0] > 1 else None
    zeros = None
    if zeros_GN is not None and group:
        zeros = zero_points(zeros_GN, COLUMNS, max(1, blocks.k // group))
    plan = Plan(
        fmt=fmt, blocks=blocks, dtype=x_MK.dtype, native=not interpret, grid=grid,
        zero_bits=zeros.shape[1] * 8 // n if zeros is not None else 0,
        group=group,
        chunks=k // (blocks.k * blocks.split), whole=count - last, halves=2 * last,
    )  # fmt: skip
    out_dtype = jnp.dtype(dtype) if blocks.split == 1 else jnp.dtype(jnp.float32)
    scales = "group_scales" if plan.group else "column_scales"
    operands = {"x": x_MK, "codes": bytes_KB, scales: scale_GN}
    if zeros is not None:
        operands["group_zeros"] = zeros
    if rows_M is not None:
        operands["row_scales"] = jnp.pad(rows_M, (0, grid[0] * blocks.rows - m))
    operands |= plan.table_operand()
    buffers = _buffers(plan, out_dtype)
    extra = interpreter() if interpret else {}
    if blocks.pair:
        extra |= {"cluster": (2,), "cluster_names": ("pair",)}
    names = (*operands, "out", *buffers)
    kernel = plgpu.kernel(
        functools.partial(prefill_pipeline.body, plan=plan, names=names),
        out_type=jax.ShapeDtypeStruct((blocks.split, m + -m % 8, n), out_dtype),
        grid=(min(max(plan.whole, plan.halves), blocks.programs()),),
        grid_names=("sm",),
        num_threads=GROUPS + 1,
        thread_name="wg",
        scratch_types=list(buffers.values()),
        compiler_params=lane_params(),
        **extra,
    )
    parts = kernel(*alike(*operands.values()))
    out = parts[0] if blocks.split == 1 else jnp.sum(parts, 0)
    return out[:m].astype(dtype)


def _buffers(plan: Plan, out_dtype) -> dict:
    """Shared memory, by its names in References."""
    blocks, width = plan.blocks, COLUMNS * dtype_bits(plan.fmt.dtype) // 8
    ring = ring_buffers(
        plan, blocks.stages, blocks.k, blocks.rows, COLUMNS, width,
        x_dtype=plan.dtype, x_columns=plan.inner,
    )  # fmt: skip
    order = swizzled(128 // out_dtype.itemsize, out_dtype)
    shape = GROUPS, 2, OUT_ROWS, OUT_COLUMNS
    count = {"num_arrivals": GROUPS, "num_barriers": blocks.stages}
    if blocks.pair:
        empty = plgpu.ClusterBarrier(collective_axes=("pair",), **count)
    else:
        empty = plgpu.Barrier(**count)
    buffers = {"out_smem": plgpu.SMEM(shape, out_dtype, transforms=order)}
    buffers |= {name: ring[name] for name in ("x_ring", "codes_ring", "full")}
    buffers |= {"empty": empty} | ring | plan.table_buffers()
    if not plan.native:
        operand = plan.fmt.dtype if plan.is_codes else jnp.bfloat16
        buffers["left_operands"] = plgpu.SMEM((GROUPS, 64, plan.inner), operand)
    return buffers
