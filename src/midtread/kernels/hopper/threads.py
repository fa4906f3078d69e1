"""What a single thread of a kernel does: arithmetic on indices, addresses, loads, PTX, registers.

Pallas cannot name one register of one thread. Its inline_mgpu takes functions that build
Mosaic's own arrays from MLIR (`by_threads`), and the functions here write that MLIR. It is as
private as jaxlib's MLIR is.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from midtread.kernels.pallas_compat import arith, ir, llvm, mgpu, plgpu


def by_threads(arg_types: Sequence[Any] = (), return_type: Any = None) -> Callable:
    """Makes a function of Mosaic's arrays and references, which writes what each thread does,
    one of those that a kernel's body has in Pallas; the types are those of inline_mgpu."""
    inline: Any = plgpu.inline_mgpu(arg_types=arg_types, return_type=return_type)
    return lambda write: inline(lambda ctx, *args: write(*args))


# --- numbers, which are Python's where they are known and MLIR's elsewhere --------------------


def word_type():
    """Returns MLIR's type of 32-bit integers."""
    return ir.IntegerType.get_signless(32)


def value(v):
    """Makes a number that Python knows an MLIR value."""
    return mgpu.c(v, word_type()) if isinstance(v, int) else v


def _by(known, op):
    """Makes a function that computes in Python if both numbers are known, else in MLIR."""

    def run(a, b):
        if isinstance(a, int) and isinstance(b, int):
            return known(a, b)
        return op(value(a), value(b))

    return run


_added = _by(lambda a, b: a + b, lambda a, b: arith.addi(a, b))
times = _by(lambda a, b: a * b, lambda a, b: arith.muli(a, b))
shifted = _by(lambda a, b: a >> b, lambda a, b: arith.shrui(a, b))
_masked = _by(lambda a, b: a & b, lambda a, b: arith.andi(a, b))
flipped = _by(lambda a, b: a ^ b, lambda a, b: arith.xori(a, b))


def plus(*terms):
    return functools.reduce(_added, terms)


def modulo(a, power: int):
    """Returns the remainder of a division by a power of two."""
    return _masked(a, power - 1)


# --- memory -----------------------------------------------------------------------------------


def address_of(ref, offset):
    """Returns the address of the byte at `offset` of a reference."""
    i8 = ir.IntegerType.get_signless(8)
    return mgpu.utils.getelementptr(mgpu.utils.memref_ptr(ref), [value(offset)], i8)


def moved(address, by: int):
    """Returns the address that lies `by` bytes after another."""
    return mgpu.utils.getelementptr(address, [by], ir.IntegerType.get_signless(8))


def unit_address(ref, unit, length: int = 128):
    """Returns the address of a unit of 16 bytes in row lane % 8 of a swizzled tile of 8 rows.

    A row has `length` bytes, 128, 64 or 32. The swizzle permutes the units of a row by the
    number of the row, or of the pair or the four of rows that it belongs to.
    """
    row = modulo(mgpu.thread_idx(), 8)
    turn = shifted(row, {128: 0, 64: 1, 32: 2}[length])
    offset = plus(times(row, length), times(flipped(unit, turn), 16))
    return llvm.ptrtoint(word_type(), address_of(ref, offset))


def matrices(start, offset: int, modifier: str = "") -> list:
    """Loads four blocks of 8 by 8 elements of 16 bits; each lane points at one of their rows."""
    code = f"ldmatrix.sync.aligned.m8n8.x4{modifier}.shared.b16"
    code += f" {{$0, $1, $2, $3}}, [$4 + {offset}];"
    return asm([word_type()] * 4, code, [start], "=r,=r,=r,=r,r")


def load_pair(start, size: int):
    """Loads two neighbours, in bfloat16 if `size` is 2 or in float32, as the bits of float32."""
    if size == 4:
        i32 = word_type()
        return [
            llvm.load(i32, mgpu.utils.getelementptr(start, [h], i32)) for h in (0, 1)
        ]
    both = llvm.load(word_type(), start)  # bfloat16 is the upper half of a float32
    return [arith.shli(both, value(16)), arith.andi(both, value(-65536))]


# --- PTX and registers ------------------------------------------------------------------------


def pure(code: str, results: list, given: list) -> list:
    """Runs inline PTX that has no effect but its results, which are words or float32.

    No result shares a register with an operand, because the code may read an operand after
    it has written a result.
    """
    letter = lambda t: "f" if t == ir.F32Type.get() else "r"
    kinds = [f"=&{letter(t)}" for t in results] + [letter(v.type) for v in given]
    kind = results[0] if len(results) == 1 else llvm.StructType.get_literal(results)
    out = llvm.inline_asm(kind, given, code, ",".join(kinds), asm_dialect=0)
    return _each(out, results)


def _each(out, types: list) -> list:
    if len(types) < 2:
        return [out]
    return [llvm.extractvalue(t, out, [i]) for i, t in enumerate(types)]


def asm(results: list, code: str, given: list, kinds: str):
    """Runs inline PTX that reads or writes memory, and returns its results."""
    kind = ir.Type.parse("!llvm.void")
    if results:
        kind = results[0] if len(results) == 1 else llvm.StructType.get_literal(results)
    kinds += ",~{memory}" if kinds else "~{memory}"
    options = {"has_side_effects": True, "asm_dialect": 0}
    return _each(llvm.inline_asm(kind, given, code, kinds, **options), results)


def doubled_halves(word) -> list:
    """Makes a pair of two copies of each half of a register."""
    pair = ir.VectorType.get((2,), ir.BF16Type.get())
    code = "prmt.b32 $0, $2, 0, 0x1010; prmt.b32 $1, $2, 0, 0x3232;"
    return [mgpu.utils.bitcast(w, pair) for w in pure(code, [word_type()] * 2, [word])]


def array(registers: list, shape: tuple[int, ...], layout, is_signed=None):
    """Makes Mosaic's array of what this thread has in `registers`; integers have `is_signed`."""
    shape = layout.registers_shape(shape)
    return mgpu.FragmentedArray(
        _registers=np.array(registers, dtype=object).reshape(shape),
        _layout=layout,
        _is_signed=is_signed,
    )


def words_of(array):
    """Returns the words of [64, M] that this thread has, in the order [M / 8, 2 columns, 2 rows]."""
    return [
        llvm.extractelement(r, value(h)) for r in array.registers.flat for h in (0, 1)
    ]
