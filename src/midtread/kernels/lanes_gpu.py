"""What single threads of a warpgroup do in stream_gpu: who holds which column, and how.

    decoded    bytes in shared memory -> left operands of wgmma, in registers
    scales     the numbers that belong to the columns of an accumulator

Pallas has no word for "this register of this thread": inline_mgpu takes functions that build
Mosaic's own arrays, from MLIR. That is as private as jaxlib's MLIR is.

A program's 256 columns are four accumulators of 64. Lane (warp w, g, c) holds of every 8 rows
of the weight rows 2c and 2c + 1, and of accumulator j

    4 bits   columns  64 w + 8 g + 2 j + (0, 1)                 one byte of each row
    8 bits   columns  128 (j / 2) + 32 w + 4 g + 2 (j % 2) + (0, 1)

A warpgroup computes `wide` accumulators in a row; `deep` sets of warpgroups, 1 or `wide`, share
the sum.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from midtread.kernels.matmul_gpu import in_order
from midtread.kernels.pallas_compat import arith, ir, llvm, mgpu, plgpu

COLUMNS, ACCUMULATORS = 256, 4
SWIZZLED = in_order(128, jnp.int8)


@dataclasses.dataclass(frozen=True)
class Division:
    """Of a program's work among its warpgroups."""

    bits: int
    wide: int = 1  # accumulators of a warpgroup
    deep: int = 1  # sets of warpgroups, each with its own rows

    @property
    def across(self) -> int:
        """Warpgroups that read the same rows."""
        return ACCUMULATORS // self.wide

    @property
    def groups(self) -> int:
        return self.across * self.deep

    def mine(self) -> list[Any]:
        """This thread's accumulators: numbers where they are known, else MLIR values."""
        if self.across == 1:
            return list(range(self.wide))
        q = modulo(shifted(mgpu.thread_idx(), 7), self.across)
        return [plus(times(q, self.wide), a) for a in range(self.wide)]

    def place(self, j):
        """(first column, first byte in a row, byte pair in its word) of accumulator j."""
        thread = mgpu.thread_idx()
        g, w = modulo(shifted(thread, 2), 8), modulo(shifted(thread, 5), 4)
        word = plus(times(w, 32), times(g, 4))  # 32 lanes along 128 bytes
        if self.bits == 4:
            return plus(times(word, 2), times(j, 2)), word, j
        half, pair = shifted(j, 1), modulo(j, 2)
        byte = plus(word, times(half, 128))
        return plus(byte, times(pair, 2)), byte, pair


# --- numbers that may be known ----------------------------------------------------------------


def word_type():
    return ir.IntegerType.get_signless(32)


def value(v):
    return mgpu.c(v, word_type()) if isinstance(v, int) else v


def _by(known, op):
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
    return _masked(a, power - 1)


def address_of(ref, offset):
    """The address of a byte of a ref."""
    i8 = ir.IntegerType.get_signless(8)
    return mgpu.utils.getelementptr(mgpu.utils.memref_ptr(ref), [value(offset)], i8)


def moved(address, by: int):
    """The address that lies so many bytes on."""
    return mgpu.utils.getelementptr(address, [by], ir.IntegerType.get_signless(8))


def asm(results: list, code: str, given: list, kinds: str):
    """Inline PTX with an effect on memory; its results."""
    kind = ir.Type.parse("!llvm.void")
    if results:
        kind = results[0] if len(results) == 1 else llvm.StructType.get_literal(results)
    kinds += ",~{memory}" if kinds else "~{memory}"
    how = {"has_side_effects": True, "asm_dialect": 0}
    out = llvm.inline_asm(kind, given, code, kinds, **how)
    if len(results) < 2:
        return [out]
    return [llvm.extractvalue(t, out, [i]) for i, t in enumerate(results)]


# --- decoding ---------------------------------------------------------------------------------


def decoded(
    ref: Any, code: str, first: int, division: Division, table: Any = None
) -> list[jax.Array]:
    """Left operands of wgmma, [64, rows] in bfloat16 for each accumulator of this warpgroup,
    from bytes [rows, width] in shared memory: `code` is PTX that makes two registers of the
    words of two rows.

    Args:
        first: the permute that selects the first bytes of a word.
        table: [.., 32] words in shared memory, a column per lane; `code` gets its address.
    """
    rows, width = ref.shape
    one = plgpu.ShapeDtypeStruct((64, rows), jnp.bfloat16, layout=plgpu.Layout.WGMMA)
    refs = [ref] if table is None else [ref, table]
    types = (plgpu.RefType(SWIZZLED), plgpu.RefType())[: len(refs)]
    bits = division.bits

    @plgpu.inline_mgpu(arg_types=types, return_type=[one] * division.wide)
    def run(ctx, ref, *table):
        del ctx
        i32, pair = word_type(), ir.VectorType.get((2,), ir.BF16Type.get())
        both = llvm.StructType.get_literal([i32, i32])
        step = (0x1111 if bits == 4 else 0x2222) if not table else 1
        start = []
        if table:
            lane = modulo(mgpu.thread_idx(), 32)
            start = [llvm.ptrtoint(i32, address_of(table[0], times(lane, 4)))]
        places = [division.place(j) for j in division.mine()]
        selects = [value(plus(times(p, step), first)) for _, _, p in places]
        shared = ACCUMULATORS if bits == 4 else 2  # accumulators of one word
        firsts = [
            [_row(ref, places[a][1], odd) for odd in (0, 1)]
            for a in range(0, division.wide, shared)
        ]
        registers = [[] for _ in places]
        for tile in range(rows // 8):
            words = [
                [llvm.load(i32, moved(p, tile * 8 * width)) for p in pointers]
                for pointers in firsts
            ]
            for a, select in enumerate(selects):
                given = [*words[a // shared], select, *start]
                kinds = "=r,=r" + ",r" * len(given)
                made = llvm.inline_asm(both, given, code, kinds, asm_dialect=0)
                registers[a] += [
                    mgpu.utils.bitcast(llvm.extractvalue(i32, made, [h]), pair)
                    for h in (0, 1)
                ]
        return [array(r, (64, rows), mgpu.WGMMA_LAYOUT) for r in registers]

    return run(*refs)


def _row(ref, byte, odd: int):
    """The address of a byte in row 2c + odd of a block that is swizzled by 128 bytes: a tile
    of 8 rows and 128 bytes is 1024 bytes, and units of 16 trade places by row."""
    box = times(shifted(byte, 7), 1024)
    row = plus(times(modulo(mgpu.thread_idx(), 4), 2), odd)
    unit = flipped(modulo(byte, 128), times(row, 16))
    return address_of(ref, plus(plus(box, unit), times(row, 128)))


def array(registers: list, shape: tuple[int, ...], layout, is_signed=None):
    """Mosaic's own, of what this thread holds; `is_signed` of integers."""
    shape = layout.registers_shape(shape)
    return mgpu.FragmentedArray(
        _registers=np.array(registers, dtype=object).reshape(shape),
        _layout=layout,
        _is_signed=is_signed,
    )


def scales(ref: Any, division: Division) -> list[jax.Array]:
    """Of 256 numbers in shared memory the 64 of each accumulator, in float32."""
    row = plgpu.Layout.WGMMA.reduce(1)
    one = plgpu.ShapeDtypeStruct((64,), jnp.float32, layout=row)
    size = jnp.dtype(ref.dtype).itemsize

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=[one] * division.wide)
    def load(ctx, ref):
        del ctx
        vector = ir.VectorType.get((1,), ir.F32Type.get())
        out = []
        for j in division.mine():
            start = address_of(ref, times(division.place(j)[0], size))
            words = [mgpu.utils.bitcast(w, vector) for w in two_of(start, size)]
            out.append(array(words, (64,), mgpu.WGMMA_ROW_LAYOUT))
        return out

    run: Any = load  # its first argument comes from Pallas
    return run(ref)


def two_of(start, size: int):
    """Two neighbours in bfloat16 (`size` 2) or float32, as the bits of float32."""
    if size == 4:
        i32 = word_type()
        return [
            llvm.load(i32, mgpu.utils.getelementptr(start, [h], i32)) for h in (0, 1)
        ]
    both = llvm.load(word_type(), start)  # bfloat16 is the upper half of a float32
    return [arith.shli(both, value(16)), arith.andi(both, value(-65536))]
