"""What single threads of a warpgroup do in stream_gpu: who holds which column, and how.

    decoded    bytes in shared memory -> left operands of tensor cores, in registers
    scales     the numbers that belong to the columns of an accumulator

Pallas has no word for "this register of this thread": inline_mgpu takes functions that build
Mosaic's own arrays, from MLIR. That is as private as jaxlib's MLIR is.

A program's 256 columns are four accumulators of 64. Lane (warp w, g, c) holds of every 8 rows
of the weight rows 2c and 2c + 1, and of accumulator j

    4 bits   columns  64 w + 32 (j / 2) + 4 g + 2 (j % 2) + (0, 1)
    8 bits   columns  64 j + 16 w + 2 g + (0, 1)

for ldmatrix turns blocks of 8 rows by 16 bytes: a lane gets two bytes of two rows in a word.

A warpgroup computes `wide` accumulators in a row; `deep` sets of warpgroups share the sum.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from midtread.kernels.decode_ptx import Code
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

    @property
    def shared(self) -> int:
        """Accumulators whose columns lie in the same bytes."""
        return 8 // self.bits

    def place(self, j):
        """(first column, first byte of a strip of 16, byte pair in it) of accumulator j."""
        thread = mgpu.thread_idx()
        g, w = modulo(shifted(thread, 2), 8), modulo(shifted(thread, 5), 4)
        if self.bits == 4:
            strip, pair = plus(times(w, 32), times(shifted(j, 1), 16)), modulo(j, 2)
            return plus(times(strip, 2), times(g, 4), times(pair, 2)), strip, pair
        strip = plus(times(j, 64), times(w, 16))
        return plus(strip, times(g, 2)), strip, 0


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


def pure(code: str, results: list, given: list) -> list:
    """Results of inline PTX that has no effect beside them, on words and float32."""
    letter = lambda t: "f" if t == ir.F32Type.get() else "r"
    kinds = [f"={letter(t)}" for t in results] + [letter(v.type) for v in given]
    kind = results[0] if len(results) == 1 else llvm.StructType.get_literal(results)
    out = llvm.inline_asm(kind, given, code, ",".join(kinds), asm_dialect=0)
    return _each(out, results)


def _each(out, types: list) -> list:
    if len(types) < 2:
        return [out]
    return [llvm.extractvalue(t, out, [i]) for i, t in enumerate(types)]


def asm(results: list, code: str, given: list, kinds: str):
    """Inline PTX with an effect on memory; its results."""
    kind = ir.Type.parse("!llvm.void")
    if results:
        kind = results[0] if len(results) == 1 else llvm.StructType.get_literal(results)
    kinds += ",~{memory}" if kinds else "~{memory}"
    how = {"has_side_effects": True, "asm_dialect": 0}
    return _each(llvm.inline_asm(kind, given, code, kinds, **how), results)


# --- decoding ---------------------------------------------------------------------------------


def decoded(
    ref: Any, code: Code, division: Division, table: Any = None, scale: Any = None
) -> list[jax.Array]:
    """Left operands, [64, rows] in bfloat16 for each accumulator of this warpgroup, from
    bytes [rows, width] in shared memory.

    Args:
        code: makes two registers of a word, or of the words of two rows with a table.
        table: [.., 32] words in shared memory, a column per lane; `code` gets its address.
        scale: [groups of these rows, 256], float32 or bfloat16; a product is rounded once.
            In bfloat16, the slopes of `code` are scaled, if it has any.
    """
    rows, width = ref.shape
    one = plgpu.ShapeDtypeStruct((64, rows), jnp.bfloat16, layout=plgpu.Layout.WGMMA)
    beside = [r for r in (table, scale) if r is not None]
    order = in_order(min(128, width), jnp.int8)
    types = [plgpu.RefType(order), *(plgpu.RefType() for _ in beside)]
    tiles = 0 if scale is None else rows // 8 // scale.shape[0]  # of 8 rows, to a group
    size = 0 if scale is None else jnp.dtype(scale.dtype).itemsize

    @plgpu.inline_mgpu(arg_types=types, return_type=[one] * division.wide)
    def run(ctx, ref, *beside):
        del ctx
        beside = list(beside)
        table_here = None if table is None else beside.pop(0)
        pair = ir.VectorType.get((2,), ir.BF16Type.get())
        out, words = [], []
        for a, j in enumerate(division.mine()):
            column, byte, half = division.place(j)
            if a % division.shared == 0 or division.wide == 1:
                words = _turned(ref, byte, rows, width)
            given = _given(words, half, table_here)
            factors = [_factors(at, size) for at in _starts(beside, column, size)]
            factors = factors or [None]
            is_folded = size == 2 and code.lines
            lines = [terms(code, f if is_folded else None) for f in factors]
            registers = []
            for tile, these in enumerate(given):
                which = tile // tiles if tiles else 0
                both = pure(code.text, [word_type()] * 2, [*these, *lines[which]])
                for h, made in enumerate(both):
                    made = mgpu.utils.bitcast(made, pair)
                    if factors[which] and not is_folded:
                        made = _product(made, factors[which][h])
                    registers.append(made)
            out.append(array(registers, (64, rows), mgpu.WGMMA_LAYOUT))
        return out

    return run(ref, *beside)


def _given(words: list, half, table) -> list[list]:
    """What `code` gets for every 8 rows: a word with the columns of an accumulator in front,
    or, with a table, 32 bits of two rows, which of their bytes is wanted, and the table."""
    if table is None:
        return [[value(shifted(word, times(half, 8)))] for word in words]
    lane = modulo(mgpu.thread_idx(), 32)
    start = llvm.ptrtoint(word_type(), address_of(table, times(lane, 4)))
    code = "prmt.b32 $0, $2, $3, 0x5410; prmt.b32 $1, $2, $3, 0x7632;"
    given = []
    for two in zip(words[::2], words[1::2]):
        by_rows = pure(code, [word_type()] * 2, list(two))
        bytes_ = [value(plus(half, 0x4440 + 2 * tile)) for tile in (0, 1)]
        given += [[*by_rows, byte, start] for byte in bytes_]
    return given


def _starts(refs: list, column, size: int) -> list:
    """The addresses of a thread's two scales, one for each group."""
    if not refs:
        return []
    (ref,) = refs
    start = address_of(ref, times(column, size))
    count, columns = ref.type.shape
    return [moved(start, i * columns * size) for i in range(count)]


def _turned(ref, byte, rows: int, width: int) -> list:
    """A word for every 8 rows of 16 bytes: bytes 2g, 2g + 1 of row 2c, then of row 2c + 1."""
    assert rows % 32 == 0, rows
    box = times(shifted(byte, 7), 1024)
    tile = modulo(shifted(mgpu.thread_idx(), 3), 4)
    start = line(ref, shifted(modulo(byte, 128), 4), min(128, width))
    start = plus(start, box, times(tile, 8 * width))
    return [
        word
        for row in range(0, rows, 32)
        for word in matrices(start, row * width, ".trans")
    ]


def line(ref, unit, length: int = 128):
    """Where a lane's 16 bytes lie in a tile of 8 rows and 128 or 64 bytes that is swizzled:
    row lane % 8, and units of 16 bytes trade places by row, or by two rows."""
    row = modulo(mgpu.thread_idx(), 8)
    turn = shifted(row, 0 if length == 128 else 1)
    place = plus(times(row, length), times(flipped(unit, turn), 16))
    return llvm.ptrtoint(word_type(), address_of(ref, place))


def matrices(start, offset: int, how: str = "") -> list:
    """Four blocks of 8 by 8 elements of 16 bits, whose rows the lanes point at."""
    code = f"ldmatrix.sync.aligned.m8n8.x4{how}.shared.b16"
    code += f" {{$0, $1, $2, $3}}, [$4 + {offset}];"
    return asm([word_type()] * 4, code, [start], "=r,=r,=r,=r,r")


def twice(word) -> list:
    """Both halves of a register, each as a pair of itself."""
    pair = ir.VectorType.get((2,), ir.BF16Type.get())
    code = "prmt.b32 $0, $2, 0, 0x1010; prmt.b32 $1, $2, 0, 0x3232;"
    return [mgpu.utils.bitcast(w, pair) for w in pure(code, [word_type()] * 2, [word])]


def terms(code: Code, factors: list | None) -> list:
    """Slope and start of both columns, scaled by pairs of bfloat16 if there are any."""
    pair, words = ir.VectorType.get((2,), ir.BF16Type.get()), []
    for h, line in enumerate(code.lines):
        for number in line:
            bits = int(np.float32(number).view(np.int32)) >> 16 & 0xFFFF
            word = value(int(np.uint32(bits << 16 | bits).view(np.int32)))
            if factors is not None:
                made = arith.mulf(factors[h], mgpu.utils.bitcast(word, pair))
                word = mgpu.utils.bitcast(made, word_type())
            words.append(word)
    return words


def _factors(start, size: int) -> list:
    """The scales of a thread's two columns, each as `_product` takes it."""
    if size == 2:
        return twice(llvm.load(word_type(), start))
    return [mgpu.utils.bitcast(w, ir.F32Type.get()) for w in two_of(start, size)]


def _product(pair, factor):
    """Two values in bfloat16 by a scale, a pair of itself in bfloat16 or one float32."""
    if factor.type == pair.type:
        return arith.mulf(pair, factor)
    wide = [
        arith.extf(factor.type, llvm.extractelement(pair, value(i))) for i in (0, 1)
    ]
    made = [arith.mulf(v, factor) for v in wide]
    (both,) = pure("cvt.rn.bf16x2.f32 $0, $2, $1;", [word_type()], made)
    return mgpu.utils.bitcast(both, pair.type)


def array(registers: list, shape: tuple[int, ...], layout, is_signed=None):
    """Mosaic's own, of what this thread holds; `is_signed` of integers."""
    shape = layout.registers_shape(shape)
    return mgpu.FragmentedArray(
        _registers=np.array(registers, dtype=object).reshape(shape),
        _layout=layout,
        _is_signed=is_signed,
    )


def words_of(array):
    """What a thread holds of [64, M]: [M / 8, columns, rows], 2 of both."""
    return [
        llvm.extractelement(r, value(h)) for r in array.registers.flat for h in (0, 1)
    ]


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
