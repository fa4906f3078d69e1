"""Which thread holds which column in the kernel for many rows.

    Lanes      which thread that is; hopper/lanes.py decodes its bytes and finds its scales
    turned     8-bit codes in shared memory -> left operands of wgmma, not decoded
    lay        an accumulator -> its transpose in shared memory, from where it is copied out

A program's 128 columns are two accumulators of 64, one for each warpgroup. Lane (warp w, g, c)
holds of every 8 rows of the weight rows 2c and 2c + 1, and of accumulator j

    2 bits   columns  64 j + 8 g + 2 w + (0, 1)
    4 bits   columns  64 j + 32 (w / 2) + 4 g + 2 (w % 2) + (0, 1)
    8 bits   columns  64 j + 16 w + 2 g + (0, 1)

To wgmma the two columns are rows g and g + 8 of its warp's 16. Any assignment of columns to rows
would do, as long as decoding, scales and results use the same one.

A register of codes that are not decoded holds four neighbours along the sum: of every 16 rows
lane c holds rows 4c to 4c + 3.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from midtread.kernels.hopper.lanes import Division
from midtread.kernels.hopper.shared_memory import swizzled
from midtread.kernels.hopper.threads import (
    address_of,
    array,
    by_threads,
    flipped,
    matrices,
    modulo,
    moved,
    plus,
    pure,
    shifted,
    times,
    value,
    word_type,
)
from midtread.kernels.pallas_compat import arith, ir, llvm, mgpu, plgpu


class Lanes(NamedTuple):
    """Which thread holds which column, as lanes.decoded asks for it."""

    bits: int
    wide: int = 1
    shared: int = 1

    def accumulators(self) -> list[Any]:
        """Returns the one accumulator of this thread: that of its warpgroup."""
        return [modulo(shifted(mgpu.thread_idx(), 7), 2)]

    def location(self, j):
        """Returns where this thread's columns of accumulator j lie, as in lanes.Division."""
        if self.bits == 8:
            return Division(8).location(j)
        thread = mgpu.thread_idx()
        g, w = modulo(shifted(thread, 2), 8), modulo(shifted(thread, 5), 4)
        if self.bits == 2:
            column = plus(times(j, 64), times(g, 8), times(w, 2))
            return column, times(j, 16), w
        strip, pair = plus(times(j, 2), shifted(w, 1)), modulo(w, 2)
        column = plus(times(strip, 32), times(g, 4), times(pair, 2))
        return column, times(strip, 16), pair

    def interpreted(self, values, wg) -> list:
        """Returns [64, K] for a warpgroup, of values [K, 128]; for the interpreter."""
        return [lax.dynamic_slice_in_dim(values.T, wg * 64, 64, 0)]


def _addresses(ref, byte) -> list:
    """The addresses of a byte of rows 2c and 2c + 1, in swizzled tiles of 8 rows of 128 bytes."""
    c, box = modulo(mgpu.thread_idx(), 4), times(shifted(byte, 7), 1024)
    rows = [plus(times(c, 2), odd) for odd in (0, 1)]
    within = [flipped(modulo(byte, 128), times(row, 16)) for row in rows]
    return [
        address_of(ref, plus(box, unit, times(row, 128)))
        for row, unit in zip(rows, within)
    ]


def turned(ref: Any, dtype) -> jax.Array:
    """Returns [64, rows]: 8-bit codes [rows, 128] in shared memory as a left operand of wgmma."""
    rows, width = ref.shape
    layout = plgpu.Layout.WGMMA_8BIT
    result = plgpu.ShapeDtypeStruct((64, rows), dtype, layout=layout)
    is_signed = True if dtype == jnp.int8 else None

    @by_threads([plgpu.RefType(swizzled(width, jnp.int8))], result)
    def turn(ref):
        four = ir.VectorType.get((4,), mgpu.utils.dtype_to_ir_type(dtype))
        lane = modulo(mgpu.thread_idx(), 32)
        # Lane (g, c) gets bytes 2g and 2g + 1 of two rows in a word, and needs four rows of
        # every 16, so it needs two words. Which of the two comes first differs between lanes,
        # so that no two rows are in the same bank.
        part, row_of_8 = shifted(lane, 3), modulo(lane, 8)
        pair = shifted(row_of_8, 1)
        half = flipped(modulo(part, 2), shifted(pair, 1))
        row = plus(
            times(shifted(part, 1), 16),
            times(pair, 4),
            times(half, 2),
            modulo(row_of_8, 2),
        )
        start = _unit_of_warp(ref, row)
        is_swapped = shifted(modulo(lane, 4), 1)
        registers = []
        for at in range(0, rows, 32):
            words = matrices(start, at * width, ".trans")
            for two in (words[:2], words[2:]):
                for first in (0x6420, 0x7531):
                    given = [*two, flipped(times(is_swapped, 0x4444), first)]
                    (word,) = pure("prmt.b32 $0, $1, $2, $3;", [word_type()], given)
                    registers.append(mgpu.utils.bitcast(word, four))
        return array(registers, (64, rows), mgpu.WGMMA_LAYOUT_8BIT, is_signed)

    return turn(ref)


def _unit_of_warp(ref, row):
    """The address of this warp's 16 bytes of a row, in swizzled tiles of 8 rows of 128 bytes."""
    thread = mgpu.thread_idx()
    unit = modulo(shifted(thread, 5), 8)  # 4 warps in each of 2 warpgroups
    within = modulo(row, 8)
    offset = plus(times(shifted(row, 3), 1024), times(within, 128))
    offset = plus(offset, times(flipped(unit, within), 16))
    return llvm.ptrtoint(word_type(), address_of(ref, offset))


def lay(ref: Any, sums: jax.Array, lanes: Lanes) -> None:
    """Writes the transpose of [64, M] to [M, 64] in shared memory, in float32 or bfloat16. For
    weights of 4 bits two lanes use the same bank."""
    size = jnp.dtype(ref.dtype).itemsize
    columns = 128 // size
    tiled = swizzled(columns, ref.dtype)

    @by_threads([plgpu.RefType(tiled), plgpu.Layout.WGMMA])
    def store(ref, sums):
        both = ir.VectorType.get((2,), ir.F32Type.get())
        narrow = ir.VectorType.get((2,), ir.BF16Type.get())
        column = lanes.location(*lanes.accumulators())[0]
        byte = times(modulo(column, 64), size)
        starts = _addresses(ref, byte)
        for tile, pair in enumerate(sums.registers.reshape(-1, 2)):  # [8 rows, column]
            for odd, start in enumerate(starts):
                packed = llvm.mlir_undef(both)
                for at, register in enumerate(pair):
                    element = llvm.extractelement(register, value(odd))
                    packed = llvm.insertelement(packed, element, value(at))
                if size == 2:
                    packed = arith.truncf(narrow, packed)
                llvm.store(packed, moved(start, tile * 1024 * (64 // columns)))

    store(ref, sums)
