"""The tensor cores' instruction for single warps, with which few rows are multiplied.

    mma.sync  m16n8k16     [16 columns of the weight, 16 of k] x [16 of k, 8 rows]

wgmma multiplies for four warps at once and runs on its own: with 16 rows or fewer it has
little to do, and what it reads must stay in place meanwhile. This one a warp waits for, so
that the compiler may decode the next values in between. Operands and sums lie in registers
as those of wgmma do, in each warp 16 columns of 64; x comes from shared memory.
"""

from typing import Any

import jax
import jax.numpy as jnp

from midtread.kernels.hopper.shared_memory import swizzled
from midtread.kernels.hopper.threads import (
    array,
    by_threads,
    matrices,
    modulo,
    plus,
    pure,
    shifted,
    unit_address,
    value,
    word_type,
    words_of,
)
from midtread.kernels.pallas_compat import ir, llvm, mgpu, plgpu

SWIZZLED = swizzled(64, jnp.bfloat16)  # the order of x in shared memory

_MMA = """mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32
    {$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};"""


def multiplied(
    sums: list[jax.Array] | None, ws: list[jax.Array], x: Any, start: int
) -> list[jax.Array]:
    """Adds w^T x^T to the sums of each left operand w^T, [64, k].

    Args:
        sums: [64, M] of each, None for zeros.
        x: [M, K] in shared memory, of which columns from `start` on are taken.
    """
    rows, (padded, k) = ws[0].shape[1], x.shape
    one = plgpu.ShapeDtypeStruct((64, padded), jnp.float32, layout=plgpu.Layout.WGMMA)
    types: list[Any] = [plgpu.RefType(SWIZZLED)]
    types += [plgpu.Layout.WGMMA] * (len(ws) + len(sums or []))

    @by_threads(types, [one] * len(ws))
    def run(x, *arrays):
        f32 = ir.F32Type.get()
        lefts = [
            [mgpu.utils.bitcast(r, word_type()) for r in w.registers.flat]
            for w in arrays[: len(ws)]
        ]
        totals = [words_of(s) for s in arrays[len(ws) :]]
        totals = totals or [[mgpu.c(0.0, f32)] * (padded // 2) for _ in ws]
        part = modulo(shifted(mgpu.thread_idx(), 3), 4)
        starts = [unit_address(x, plus(part, 4 * half)) for half in (0, 1)]
        for first in range(start, start + rows, 32):
            for t in range(padded // 8):
                offset = (t * (k // 64) + first // 64) * 1024
                right = matrices(starts[first // 32 % 2], offset)
                for step in (0, 1):
                    at = (first - start) // 4 + 4 * step
                    for left, words in zip(lefts, totals):
                        given = left[at : at + 4] + right[2 * step : 2 * step + 2]
                        given += words[4 * t : 4 * t + 4]
                        words[4 * t : 4 * t + 4] = pure(_MMA, [f32] * 4, given)
        return [array(_pairs(s), (64, padded), mgpu.WGMMA_LAYOUT) for s in totals]

    return run(x, *ws, *(sums or []))


def _pairs(words: list) -> list:
    pair = ir.VectorType.get((2,), ir.F32Type.get())
    out = []
    for low, high in zip(words[::2], words[1::2]):
        both = llvm.insertelement(llvm.mlir_undef(pair), low, value(0))
        out.append(llvm.insertelement(both, high, value(1)))
    return out


def meet() -> None:
    """Waits until all threads of a warpgroup are here."""
    by_threads()(mgpu.warpgroup_barrier)()
