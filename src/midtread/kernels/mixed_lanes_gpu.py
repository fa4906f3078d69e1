"""What single threads of a warpgroup do in mixed_gpu: who holds which column, and how.

    decoded    bytes in shared memory -> the left operand of wgmma, in registers
    scales     the numbers that belong to the columns of an accumulator
    lay        an accumulator -> shared memory, turned, as the copy engine wants it

Lane (warp w, g, c) of warpgroup j holds columns 64 j + 16 w + 2 g + (0, 1) of a program's
128, and of every 8 rows of the weight rows 2c and 2c + 1. To wgmma the two columns are rows
g and g + 8 of its warp's 16: which column is which is free, as long as all agree.

Pallas has no word for "this register of this thread": inline_mgpu takes functions that
build Mosaic's own arrays, from MLIR. That is as private as jaxlib's MLIR is.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from midtread.kernels.pallas_compat import arith, ir, llvm, mgpu, plgpu


def _const(value: int):
    return mgpu.c(value, ir.IntegerType.get_signless(32))


def _plus(*terms):
    total, *rest = terms
    for term in rest:
        total = arith.addi(total, term)
    return total


def _times(value, by: int):
    return arith.muli(value, _const(by))


def _lane() -> tuple[Any, Any]:
    """(first column, c) of this thread; its second column is the next one."""
    thread = mgpu.thread_idx()
    bits = lambda shift, mask: arith.andi(
        arith.shrui(thread, _const(shift)), _const(mask)
    )
    c, g, w, j = bits(0, 3), bits(2, 7), bits(5, 3), bits(7, 3)
    return _plus(_times(j, 64), _times(w, 16), _times(g, 2)), c


def _address(ref, *offset):
    i8 = ir.IntegerType.get_signless(8)
    return mgpu.utils.getelementptr(mgpu.utils.memref_ptr(ref), list(offset), i8)


def _moved(pointer, by: int):
    return mgpu.utils.getelementptr(pointer, [by], ir.IntegerType.get_signless(8))


def _pattern(line: int) -> tuple:
    """Tiles of 8 rows of `line` bytes, in which units of 16 bytes trade places by row."""
    return plgpu.TilingTransform((8, line)), plgpu.SwizzleTransform(line)


def _places(ref, byte, c, line: int) -> list:
    """Where a byte of rows 2c and 2c + 1 lies, in such a pattern."""
    box = _times(arith.divui(byte, _const(line)), 8 * line)
    within, found = arith.andi(byte, _const(line - 1)), []
    for odd in (0, 1):
        row = _plus(_times(c, 2), _const(odd))
        moved = arith.xori(within, _times(row if line == 128 else c, 16))
        found.append(_address(ref, _plus(box, moved, _times(row, line))))
    return found


def decoded(
    ref: Any,
    code: tuple[str, int],
    bits: int,
    table: Any = None,
    scale: Any = None,
) -> jax.Array:
    """[64, rows] in bfloat16 of bytes [rows, width] in shared memory.

    Args:
        code: PTX that makes two registers of the words of two rows, and the permute that
            selects the first bytes of a word (decode_ptx.py).
        table: [.., 32] words in shared memory, a column per lane; `code` gets its address.
        scale: [groups of these rows, columns of the program] in bfloat16.
    """
    rows, width = ref.shape
    line = min(128, width)
    group = rows if scale is None else rows // scale.shape[0]
    result = plgpu.ShapeDtypeStruct((64, rows), jnp.bfloat16, layout=plgpu.Layout.WGMMA)
    beside = [x for x in (table, scale) if x is not None]
    kinds = plgpu.RefType(_pattern(line)), *[plgpu.RefType() for _ in beside]

    @plgpu.inline_mgpu(arg_types=kinds, return_type=result)
    def decode(ctx, ref, *beside):
        del ctx
        beside = list(beside)
        i32 = ir.IntegerType.get_signless(32)
        pair = ir.VectorType.get((2,), ir.BF16Type.get())
        both = llvm.StructType.get_literal([i32, i32])
        column, c = _lane()
        byte = column if bits == 8 else arith.shrui(column, _const(1))
        which = arith.andi(byte, _const(3))  # of the bytes of a word
        step = 0x1111 if table is None else 1
        given = [_plus(_times(which, step), _const(code[1]))]
        if table is not None:
            lane = arith.andi(mgpu.thread_idx(), _const(31))
            given.append(llvm.ptrtoint(i32, _address(beside.pop(0), _times(lane, 4))))
        factors = [_twice(s) for s in _words(beside[0], column)] if beside else []
        starts = _places(ref, arith.xori(byte, which), c, line)
        registers = []
        for tile in range(rows // 8):
            words = [llvm.load(i32, _moved(at, tile * 8 * width)) for at in starts]
            words += given
            kind = "=r,=r" + ",r" * len(words)
            made = llvm.inline_asm(both, words, code[0], kind, asm_dialect=0)
            for h in (0, 1):
                value = mgpu.utils.bitcast(llvm.extractvalue(i32, made, [h]), pair)
                if factors:
                    value = arith.mulf(value, factors[tile * 8 // group][h])
                registers.append(value)
        return _array(registers, mgpu.WGMMA_LAYOUT, (64, rows))

    return decode(ref, *beside)


def _words(ref, column) -> list:
    """Of each row of [.., columns] in bfloat16: this thread's two, in one register."""
    i32 = ir.IntegerType.get_signless(32)
    count, columns = ref.type.shape
    start = _address(ref, _times(column, 2))
    return [llvm.load(i32, _moved(start, i * columns * 2)) for i in range(count)]


def _twice(word) -> list:
    """Both halves of a register, each as a pair of itself."""
    i32 = ir.IntegerType.get_signless(32)
    pair = ir.VectorType.get((2,), ir.BF16Type.get())
    made = [
        llvm.inline_asm(i32, [word], f"prmt.b32 $0, $1, 0, {s};", "=r,r", asm_dialect=0)
        for s in ("0x1010", "0x3232")
    ]
    return [mgpu.utils.bitcast(x, pair) for x in made]


def _array(registers: list, layout, shape: tuple[int, ...]):
    laid = np.array(registers, dtype=object).reshape(layout.registers_shape(shape))
    return mgpu.FragmentedArray(_registers=laid, _layout=layout, _is_signed=None)


def scales(ref: Any) -> jax.Array:
    """[64] of a program's float32 numbers, one for each column, in any memory."""
    layout = plgpu.Layout.WGMMA.reduce(1)
    result = plgpu.ShapeDtypeStruct((64,), jnp.float32, layout=layout)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=result)
    def load(ctx, ref):
        del ctx
        one = ir.VectorType.get((1,), ir.F32Type.get())
        start = _address(ref, _times(_lane()[0], 4))
        registers = [llvm.load(one, _moved(start, 4 * h)) for h in (0, 1)]
        return _array(registers, mgpu.WGMMA_ROW_LAYOUT, (64,))

    run: Any = load
    return run(ref)


def lay(ref: Any, value: jax.Array) -> None:
    """Writes [64, M] into [M, 64] in shared memory, float32 or bfloat16."""
    size = jnp.dtype(ref.dtype).itemsize
    columns = 128 // size
    tiled = plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(128)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(tiled), plgpu.Layout.WGMMA))
    def store(ctx, ref, value):
        del ctx
        both = ir.VectorType.get((2,), ir.F32Type.get())
        narrow = ir.VectorType.get((2,), ir.BF16Type.get())
        column, c = _lane()
        byte = _times(arith.andi(column, _const(63)), size)
        starts = _places(ref, byte, c, 128)
        for tile, pair in enumerate(value.registers.reshape(-1, 2)):  # [8 rows, column]
            for odd, start in enumerate(starts):
                packed = llvm.mlir_undef(both)
                for at, register in enumerate(pair):
                    element = llvm.extractelement(register, _const(odd))
                    packed = llvm.insertelement(packed, element, _const(at))
                if size == 2:
                    packed = arith.truncf(narrow, packed)
                llvm.store(packed, _moved(start, tile * 1024 * (64 // columns)))

    run: Any = store
    run(ref, value)
