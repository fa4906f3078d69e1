"""Which thread holds which column of a stored weight, and how it decodes them.

    Division   which warpgroup and which thread hold a column, in the kernel for few rows
    decoded    bytes in shared memory -> left operands of tensor cores, in registers
    scales     the numbers that belong to the columns of an accumulator

The last two serve the kernel for many rows too. Its threads hold other columns
(weight_matmul/hopper_prefill/registers.py).

A program's 256 columns are four accumulators of 64. Lane (warp w, g, c) holds of every 8 rows
of the weight rows 2c and 2c + 1, and of accumulator j

    2 bits   columns  64 w + 8 g + 2 j + (0, 1)
    4 bits   columns  64 w + 32 (j / 2) + 4 g + 2 (j % 2) + (0, 1)
    8 bits   columns  64 j + 16 w + 2 g + (0, 1)

because ldmatrix transposes blocks of 8 rows by 16 bytes: a lane gets two bytes of each of two
rows in one word.

A warpgroup computes `wide` neighbouring accumulators; `deep` sets of warpgroups share the sum.
"""

import dataclasses
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from midtread.kernels.hopper.decoding import Code
from midtread.kernels.hopper.shared_memory import swizzled
from midtread.kernels.hopper.threads import (
    address_of,
    array,
    by_threads,
    doubled_halves,
    flipped,
    load_pair,
    matrices,
    modulo,
    moved,
    plus,
    pure,
    shifted,
    times,
    unit_address,
    value,
    word_type,
)
from midtread.kernels.pallas_compat import arith, ir, llvm, mgpu, plgpu

COLUMNS, ACCUMULATORS = 256, 4
SWIZZLED = swizzled(128, jnp.int8)


class Holders(Protocol):
    """Which thread holds which column: a Division, or the Lanes of hopper_prefill."""

    @property
    def wide(self) -> int: ...
    @property
    def shared(self) -> int: ...
    def accumulators(self) -> list[Any]: ...
    def location(self, j) -> tuple[Any, Any, Any]: ...
    def interpreted(self, values, wg) -> list: ...


@dataclasses.dataclass(frozen=True)
class Division:
    """How a program divides its columns and its sum among its warpgroups."""

    bits: int
    wide: int = 1  # accumulators of a warpgroup
    deep: int = 1  # sets of warpgroups, each with its own rows

    @property
    def across(self) -> int:
        """How many warpgroups read the same rows."""
        return ACCUMULATORS // self.wide

    @property
    def groups(self) -> int:
        return self.across * self.deep

    def accumulators(self) -> list[Any]:
        """Returns the numbers of this thread's accumulators, as MLIR values where they are
        not known."""
        if self.across == 1:
            return list(range(self.wide))
        q = modulo(shifted(mgpu.thread_idx(), 7), self.across)
        return [plus(times(q, self.wide), a) for a in range(self.wide)]

    @property
    def shared(self) -> int:
        """How many accumulators have their columns in the same bytes."""
        return 8 // self.bits

    def location(self, j):
        """Where this thread's columns of accumulator j lie: (the first column, the first byte of
        a strip of 16 bytes, which pair of codes it is of the two bytes in that strip)."""
        thread = mgpu.thread_idx()
        g, w = modulo(shifted(thread, 2), 8), modulo(shifted(thread, 5), 4)
        if self.bits == 2:
            strip = times(w, 16)
            return plus(times(strip, 4), times(g, 8), times(j, 2)), strip, j
        if self.bits == 4:
            strip, pair = plus(times(w, 32), times(shifted(j, 1), 16)), modulo(j, 2)
            return plus(times(strip, 2), times(g, 4), times(pair, 2)), strip, pair
        strip = plus(times(j, 64), times(w, 16))
        return plus(strip, times(g, 2)), strip, 0

    def interpreted(self, values, wg) -> list:
        """Returns [64, K] for each accumulator of a warpgroup, of values [K, 256]; for the
        interpreter."""
        first = lax.rem(wg, self.across) * self.wide
        extents, axes = order(self.bits)
        k = values.shape[0]
        parts = values.reshape(k, *extents).transpose(*(1 + a for a in axes), 0)
        parts = parts.reshape(ACCUMULATORS, 64, k)
        pick = lambda j: lax.dynamic_index_in_dim(parts, j, 0, keepdims=False)
        return [pick(first + a) for a in range(self.wide)]


# --- decoding ---------------------------------------------------------------------------------


def decoded(
    ref: Any,
    code: Code,
    holders: Holders,
    table: Any = None,
    scale: Any = None,
    zeros: Any = None,
    lines: list[jax.Array] | None = None,
) -> list[jax.Array]:
    """Decodes bytes [rows, width] in shared memory to left operands of the tensor cores,
    [64, rows] in bfloat16 for each accumulator of this warpgroup.

    Args:
        code: makes two registers of a word, or of the words of two rows with a table.
        table: [.., 32] words in shared memory, a column per lane; `code` gets its address.
        scale: [groups of these rows, columns], float32 or bfloat16; a product is rounded
            once. In bfloat16, the slopes of `code` are scaled, if it has any.
        zeros: bytes [groups of these rows, ..]: zero points, which are codes too, packed like
            these or one in a byte. Slopes are not scaled then, because a scaled zero point is
            not exact.
        lines: slopes and starts by `lines`, in place of a scale.
    """
    rows, width = ref.shape
    one = plgpu.ShapeDtypeStruct((64, rows), jnp.bfloat16, layout=plgpu.Layout.WGMMA)
    beside = [r for r in (table, scale, zeros) if r is not None]
    order = swizzled(min(128, width), jnp.int8)
    types: list[Any] = [plgpu.RefType(order), *(plgpu.RefType() for _ in beside)]
    types += [plgpu.Layout.WGMMA.reduce(1)] * len(lines or ())
    num_groups = next((r.shape[0] for r in (scale, zeros) if r is not None), 1)
    size = 0 if scale is None else jnp.dtype(scale.dtype).itemsize
    zero_bits = 0 if zeros is None else code.bits * zeros.shape[1] // width

    @by_threads(types, [one] * holders.wide)
    def run(ref, *beside):
        given_here = iter(beside)
        here = [None if r is None else next(given_here) for r in (table, scale, zeros)]
        table_here, scale_here, zeros_here = here
        pair = ir.VectorType.get((2,), ir.BF16Type.get())
        out, words = [], []
        for a, j in enumerate(holders.accumulators()):
            column, byte, half = holders.location(j)
            if a % holders.shared == 0:
                words = _turned(ref, byte, rows, width)
            factors_at = _starts(scale_here, times(column, size), num_groups)
            bit = times(column, zero_bits)
            zeros_at = _starts(zeros_here, shifted(bit, 3), num_groups)
            shift = modulo(bit, 8) if zero_bits == 2 else 0  # within a byte
            own = [
                [] if at is None else _own_starts(code, at, shift, zero_bits)
                for at in zeros_at
            ]
            scaling = [
                _scaling(code, at, size, starts) for at, starts in zip(factors_at, own)
            ]
            if lines:
                own_lines = zip(
                    *(_words(next(given_here)) for _ in ("slopes", "starts"))
                )
                scaling = [([word for line in own_lines for word in line], [])]
            registers = []
            for tile, given in enumerate(_given(words, half, code.bits, table_here)):
                terms, factors = scaling[tile * num_groups // (rows // 8)]
                both = pure(code.text, [word_type()] * 2, [*given, *terms])
                for h, word in enumerate(both):
                    values = mgpu.utils.bitcast(word, pair)
                    if factors:
                        values = _product(values, factors[h])
                    registers.append(values)
            out.append(array(registers, (64, rows), mgpu.WGMMA_LAYOUT))
        return out

    return run(ref, *beside, *(lines or ()))


def lines(scale: Any, code: Code, holders: Holders) -> list[jax.Array]:
    """Returns the slopes, then the starts, of each accumulator's columns, [64]: those of `code`
    times the scale of a group, [1, columns] in bfloat16."""
    row = plgpu.Layout.WGMMA.reduce(1)
    one = plgpu.ShapeDtypeStruct((64,), jnp.float32, layout=row)

    @by_threads([plgpu.RefType()], [one] * (2 * holders.wide))
    def load(scale):
        vector, out = ir.VectorType.get((1,), ir.F32Type.get()), []
        for j in holders.accumulators():
            at = address_of(scale, times(holders.location(j)[0], 2))
            terms, _ = _scaling(code, at, 2, [])
            for part in (terms[0::2], terms[1::2]):
                bits = [mgpu.utils.bitcast(w, vector) for w in part]
                out.append(array(bits, (64,), mgpu.WGMMA_ROW_LAYOUT))
        return out

    return load(scale)


def _words(array) -> list:
    return [mgpu.utils.bitcast(r, word_type()) for r in array.registers.flat]


def _given(words: list, half, bits: int, table) -> list[list]:
    """Returns the operands of `code` for every 8 rows: a word whose low bits hold the
    columns of an accumulator. With a table they are 32 bits of two rows, the byte that is
    wanted of them, and the address of the table."""
    if table is None:
        return [[value(shifted(word, times(half, 2 * bits)))] for word in words]
    lane = modulo(mgpu.thread_idx(), 32)
    start = llvm.ptrtoint(word_type(), address_of(table, times(lane, 4)))
    code = "prmt.b32 $0, $2, $3, 0x5410; prmt.b32 $1, $2, $3, 0x7632;"
    given = []
    for two in zip(words[::2], words[1::2]):
        by_rows = pure(code, [word_type()] * 2, list(two))
        bytes_ = [value(plus(half, 0x4440 + 2 * tile)) for tile in (0, 1)]
        given += [[*by_rows, byte, start] for byte in bytes_]
    return given


def _starts(ref, offset, count: int) -> list:
    """Returns, for each group, the address of what belongs to a thread's two columns, if
    anything does."""
    if ref is None:
        return [None] * count
    start, row = address_of(ref, offset), ref.type.shape[1]
    size = ref.type.element_type.width // 8
    return [moved(start, i * row * size) for i in range(count)]


def _turned(ref, byte, rows: int, width: int) -> list:
    """Returns a word for every 8 rows of a strip of 16 bytes: it holds bytes 2g and 2g + 1
    of row 2c, then those of row 2c + 1."""
    assert rows % 32 == 0, rows
    box = times(shifted(byte, 7), 1024)
    tile = modulo(shifted(mgpu.thread_idx(), 3), 4)
    start = unit_address(ref, shifted(modulo(byte, 128), 4), min(128, width))
    start = plus(start, box, times(tile, 8 * width))
    return [
        word
        for row in range(0, rows, 32)
        for word in matrices(start, row * width, ".trans")
    ]


def _scaling(code: Code, start, size: int, own: list) -> tuple[list, list]:
    """Returns (slopes and starts for both columns of a thread, factors for the decoded
    values). There are no factors where there are no scales, or where the slopes contain
    them.

    Args:
        own: the starts, where there are zero points.
    """
    if start is None:
        return _terms(code, [], own), []
    if size == 4:
        words = load_pair(start, size)
        return _terms(code, [], own), [
            mgpu.utils.bitcast(w, ir.F32Type.get()) for w in words
        ]
    factors = doubled_halves(llvm.load(word_type(), start))
    is_in_slopes = code.lines and not own
    terms = _terms(code, factors if is_in_slopes else [], own)
    return terms, [] if is_in_slopes else factors


def _terms(code: Code, factors: list, own_starts: list) -> list:
    """Returns the slope and the start of each column, multiplied by its factor if it has
    one. A factor is a pair of two equal bfloat16 numbers."""
    pair, words = ir.VectorType.get((2,), ir.BF16Type.get()), []
    for h, numbers in enumerate(code.lines):
        for i, number in enumerate(numbers):
            word = value(_twice(number))
            if factors and number:
                scaled = arith.mulf(factors[h], mgpu.utils.bitcast(word, pair))
                word = mgpu.utils.bitcast(scaled, word_type())
            words.append(own_starts[h] if own_starts and i == 1 else word)
    return words


def _twice(number: float) -> int:
    """Returns the bits of a pair of two equal bfloat16 numbers."""
    return int(np.full(2, number, np.float32).astype(jnp.bfloat16).view(np.int32)[0])


def _own_starts(code: Code, address, shift, zero_bits: int) -> list:
    """Returns the starts of both columns under their zero points, which are the codes at
    `address`."""
    kind = ir.IntegerType.get_signless(max(8, 2 * zero_bits))
    word = shifted(arith.extui(word_type(), llvm.load(kind, address)), shift)
    starts = []
    for h in (0, 1):
        bits = modulo(shifted(word, h * zero_bits), 1 << code.bits)
        both = times(flipped(bits, code.offset), 0x10001)
        given = [both, value(_twice(-code.unit)), value(_twice(-0.0))]
        starts += pure("fma.rn.bf16x2 $0, $1, $2, $3;", [word_type()], given)
    return starts


def _product(pair, factor):
    """Returns two bfloat16 values times a scale, which is a pair of bfloat16 or one float32."""
    if factor.type == pair.type:
        return arith.mulf(pair, factor)
    wide = [
        arith.extf(factor.type, llvm.extractelement(pair, value(i))) for i in (0, 1)
    ]
    products = [arith.mulf(v, factor) for v in wide]
    (both,) = pure("cvt.rn.bf16x2.f32 $0, $2, $1;", [word_type()], products)
    return mgpu.utils.bitcast(both, pair.type)


def scales(ref: Any, holders: Holders) -> list[jax.Array]:
    """Returns the 64 numbers of each accumulator, in float32, of one number for each column."""
    row = plgpu.Layout.WGMMA.reduce(1)
    one = plgpu.ShapeDtypeStruct((64,), jnp.float32, layout=row)
    size = jnp.dtype(ref.dtype).itemsize

    @by_threads([plgpu.RefType()], [one] * holders.wide)
    def load(ref):
        vector = ir.VectorType.get((1,), ir.F32Type.get())
        out = []
        for j in holders.accumulators():
            start = address_of(ref, times(holders.location(j)[0], size))
            words = [mgpu.utils.bitcast(w, vector) for w in load_pair(start, size)]
            out.append(array(words, (64,), mgpu.WGMMA_ROW_LAYOUT))
        return out

    return load(ref)


# --- the same for the interpreter -------------------------------------------------------------


def order(bits: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns (extents that split a program's 256 columns, the order of these axes that
    sorts columns by accumulator and by row of wgmma)."""
    if bits == 2:
        return (4, 8, 4, 2), (2, 0, 3, 1)  # w g j h -> j w h g
    if bits == 4:
        return (4, 2, 8, 2, 2), (1, 3, 0, 4, 2)  # w j1 g j0 h -> j1 j0 w h g
    return (4, 4, 8, 2), (0, 1, 3, 2)  # j w g h -> j w h g
