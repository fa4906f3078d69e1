"""What single threads of a warpgroup do in mixed_gpu: who holds which column, and how.

    decoded    bytes in shared memory -> the left operand of wgmma, in registers
    turned     the same of 8-bit codes as they are
    scales     the numbers that belong to the columns of an accumulator
    lay        an accumulator -> shared memory, turned, as the copy engine wants it

Lane (warp w, g, c) of warpgroup j holds columns 64 j + 16 w + 2 g + (0, 1) of a program's
128, and of every 8 rows of the weight rows 2c and 2c + 1. To wgmma the two columns are rows
g and g + 8 of its warp's 16: which column is which is free, as long as all agree.

Codes that are turned have four neighbours along the sum in a register: of every 16 rows lane c
holds 4c to 4c + 3.

lanes_gpu.py, which does the same for stream_gpu, has the words for single threads.
"""

from typing import Any

import jax
import jax.numpy as jnp

from midtread.kernels.decode_ptx import Code
from midtread.kernels.lanes_gpu import (
    address_of,
    array,
    flipped,
    matrices,
    modulo,
    moved,
    plus,
    pure,
    shifted,
    terms,
    times,
    twice,
    value,
    word_type,
)
from midtread.kernels.matmul_gpu import in_order
from midtread.kernels.pallas_compat import arith, ir, llvm, mgpu, plgpu


def _lane() -> tuple[Any, Any]:
    """(first column, c) of this thread; its second column is the next one."""
    thread = mgpu.thread_idx()
    part = lambda shift, power: modulo(shifted(thread, shift), power)
    c, g, w, j = part(0, 4), part(2, 8), part(5, 4), part(7, 4)
    return plus(times(j, 64), times(w, 16), times(g, 2)), c


def _places(ref, byte, c, line: int) -> list:
    """Where a byte of rows 2c and 2c + 1 lies: tiles of 8 rows of `line` bytes, in which
    units of 16 trade places by row."""
    box = times(arith.divui(byte, value(line)), 8 * line)
    within, found = modulo(byte, line), []
    for odd in (0, 1):
        row = plus(times(c, 2), odd)
        unit = flipped(within, times(row if line == 128 else c, 16))
        found.append(address_of(ref, plus(box, unit, times(row, line))))
    return found


def decoded(
    ref: Any,
    code: Code,
    bits: int,
    table: Any = None,
    scale: Any = None,
) -> jax.Array:
    """[64, rows] in bfloat16 of bytes [rows, width] in shared memory.

    Args:
        code: makes two registers of the words of two rows.
        table: [.., 32] words in shared memory, a column per lane; `code` gets its address.
        scale: [groups of these rows, columns of the program] in bfloat16; the slopes of
            `code` are scaled, if it has any.
    """
    rows, width = ref.shape
    line = min(128, width)
    group = rows if scale is None else rows // scale.shape[0]
    result = plgpu.ShapeDtypeStruct((64, rows), jnp.bfloat16, layout=plgpu.Layout.WGMMA)
    beside = [x for x in (table, scale) if x is not None]
    kinds = plgpu.RefType(in_order(line, jnp.int8)), *[plgpu.RefType() for _ in beside]

    @plgpu.inline_mgpu(arg_types=kinds, return_type=result)
    def decode(ctx, ref, *beside):
        del ctx
        beside = list(beside)
        i32 = word_type()
        pair = ir.VectorType.get((2,), ir.BF16Type.get())
        column, c = _lane()
        byte = column if bits == 8 else shifted(column, 1)
        which = modulo(byte, 4)  # of the bytes of a word
        step = 0x1111 if table is None else 1
        given = [plus(times(which, step), code.first)]
        if table is not None:
            lane = modulo(mgpu.thread_idx(), 32)
            given.append(llvm.ptrtoint(i32, address_of(beside.pop(0), times(lane, 4))))
        factors = [twice(s) for s in _words(beside[0], column)] if beside else [None]
        folded = [terms(code, f) for f in factors]
        starts = _places(ref, flipped(byte, which), c, line)
        registers = []
        for tile in range(rows // 8):
            words = [llvm.load(i32, moved(at, tile * 8 * width)) for at in starts]
            factor, more = (found[tile * 8 // group] for found in (factors, folded))
            for h, made in enumerate(pure(code.text, [i32] * 2, words + given + more)):
                made = mgpu.utils.bitcast(made, pair)
                if factor and not more:
                    made = arith.mulf(made, factor[h])
                registers.append(made)
        return array(registers, (64, rows), mgpu.WGMMA_LAYOUT)

    return decode(ref, *beside)


def turned(ref: Any, dtype) -> jax.Array:
    """[64, rows] of 8-bit codes, whose bytes [rows, 128] lie in shared memory."""
    rows, width = ref.shape
    layout = plgpu.Layout.WGMMA_8BIT
    result = plgpu.ShapeDtypeStruct((64, rows), dtype, layout=layout)
    is_signed = True if dtype == jnp.int8 else None

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(in_order(width, jnp.int8)),), return_type=result
    )
    def turn(ctx, ref):
        del ctx
        four = ir.VectorType.get((4,), mgpu.utils.dtype_to_ir_type(dtype))
        lane = modulo(mgpu.thread_idx(), 32)
        # Lane (g, c) gets bytes 2g and 2g + 1 of two rows in a word, and wants four of 16
        # rows, so two words. Which two come first differs between lanes, so that no two rows
        # meet in a bank.
        part, place = shifted(lane, 3), modulo(lane, 8)
        pair = shifted(place, 1)
        half = flipped(modulo(part, 2), shifted(pair, 1))
        row = plus(
            times(shifted(part, 1), 16),
            times(pair, 4),
            times(half, 2),
            modulo(place, 2),
        )
        start = _line(ref, row)
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

    run: Any = turn
    return run(ref)


def _line(ref, row):
    """Where this warp's 16 bytes of a row lie, in tiles of 8 rows of 128 bytes."""
    thread = mgpu.thread_idx()
    unit = modulo(shifted(thread, 5), 8)  # 4 warps in each of 2 warpgroups
    within = modulo(row, 8)
    place = plus(times(shifted(row, 3), 1024), times(within, 128))
    place = plus(place, times(flipped(unit, within), 16))
    return llvm.ptrtoint(word_type(), address_of(ref, place))


def _words(ref, column) -> list:
    """Of each row of [.., columns] in bfloat16: this thread's two, in one register."""
    i32 = word_type()
    count, columns = ref.type.shape
    start = address_of(ref, times(column, 2))
    return [llvm.load(i32, moved(start, i * columns * 2)) for i in range(count)]


def scales(ref: Any) -> jax.Array:
    """[64] of a program's float32 numbers, one for each column, in any memory."""
    layout = plgpu.Layout.WGMMA.reduce(1)
    result = plgpu.ShapeDtypeStruct((64,), jnp.float32, layout=layout)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=result)
    def load(ctx, ref):
        del ctx
        one = ir.VectorType.get((1,), ir.F32Type.get())
        start = address_of(ref, times(_lane()[0], 4))
        registers = [llvm.load(one, moved(start, 4 * h)) for h in (0, 1)]
        return array(registers, (64,), mgpu.WGMMA_ROW_LAYOUT)

    run: Any = load
    return run(ref)


def lay(ref: Any, sums: jax.Array) -> None:
    """Writes [64, M] into [M, 64] in shared memory, float32 or bfloat16."""
    size = jnp.dtype(ref.dtype).itemsize
    columns = 128 // size
    tiled = in_order(columns, ref.dtype)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(tiled), plgpu.Layout.WGMMA))
    def store(ctx, ref, sums):
        del ctx
        both = ir.VectorType.get((2,), ir.F32Type.get())
        narrow = ir.VectorType.get((2,), ir.BF16Type.get())
        column, c = _lane()
        byte = times(modulo(column, 64), size)
        starts = _places(ref, byte, c, 128)
        for tile, pair in enumerate(sums.registers.reshape(-1, 2)):  # [8 rows, column]
            for odd, start in enumerate(starts):
                packed = llvm.mlir_undef(both)
                for at, register in enumerate(pair):
                    element = llvm.extractelement(register, value(odd))
                    packed = llvm.insertelement(packed, element, value(at))
                if size == 2:
                    packed = arith.truncf(narrow, packed)
                llvm.store(packed, moved(start, tile * 1024 * (64 // columns)))

    run: Any = store
    run(ref, sums)
