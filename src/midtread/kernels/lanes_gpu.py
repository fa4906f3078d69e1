"""What single threads of a warpgroup do in stream_gpu: who holds which column, and how.

    decoded    bytes in shared memory -> left operands of wgmma, in registers
    scales     the numbers that belong to the columns of an accumulator
    finish     accumulators -> the result in memory, summed over warpgroups and programs

Pallas has no word for "this register of this thread": inline_mgpu takes functions that build
Mosaic's own arrays, from MLIR. That is as private as jaxlib's MLIR is.

A program's 256 columns are four accumulators of 64. Lane (warp w, g, c) holds of every 8 rows
of the weight rows 2c and 2c + 1, and of accumulator j

    4 bits   columns  64 w + 8 g + 2 j + (0, 1)                 one byte of each row
    8 bits   columns  128 (j / 2) + 32 w + 4 g + 2 (j % 2) + (0, 1)

A warpgroup computes `wide` accumulators in a row; `deep` sets of warpgroups, 1 or `wide`, share
the sum. In the end a sum changes hands twice, both times in shared memory that the weight has
left: between sets of warpgroups, so that each holds one accumulator whole, and between the
programs of a cluster, each of which adds up and writes its share of the rows.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from midtread.kernels.pallas_compat import arith, ir, llvm, mgpu, plgpu

COLUMNS, ACCUMULATORS = 256, 4
SWIZZLED = (plgpu.TilingTransform((8, 128)), plgpu.SwizzleTransform(128))


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
        q = _modulo(_shifted(mgpu.thread_idx(), 7), self.across)
        return [_plus(_times(q, self.wide), a) for a in range(self.wide)]

    def place(self, j):
        """(first column, first byte in a row, byte pair in its word) of accumulator j."""
        thread = mgpu.thread_idx()
        g, w = _modulo(_shifted(thread, 2), 8), _modulo(_shifted(thread, 5), 4)
        word = _plus(_times(w, 32), _times(g, 4))  # 32 lanes along 128 bytes
        if self.bits == 4:
            return _plus(_times(word, 2), _times(j, 2)), word, j
        half, pair = _shifted(j, 1), _modulo(j, 2)
        byte = _plus(word, _times(half, 128))
        return _plus(byte, _times(pair, 2)), byte, pair


# --- numbers that may be known ----------------------------------------------------------------


def _i32():
    return ir.IntegerType.get_signless(32)


def _value(v):
    return mgpu.c(v, _i32()) if isinstance(v, int) else v


def _by(known, op):
    def run(a, b):
        if isinstance(a, int) and isinstance(b, int):
            return known(a, b)
        return op(_value(a), _value(b))

    return run


_plus = _by(lambda a, b: a + b, lambda a, b: arith.addi(a, b))
_times = _by(lambda a, b: a * b, lambda a, b: arith.muli(a, b))
_shifted = _by(lambda a, b: a >> b, lambda a, b: arith.shrui(a, b))
_masked = _by(lambda a, b: a & b, lambda a, b: arith.andi(a, b))
_flipped = _by(lambda a, b: a ^ b, lambda a, b: arith.xori(a, b))


def _modulo(a, power: int):
    return _masked(a, power - 1)


def _at(ref, offset):
    """The address of a byte of a ref."""
    i8 = ir.IntegerType.get_signless(8)
    return mgpu.utils.getelementptr(mgpu.utils.memref_ptr(ref), [_value(offset)], i8)


def _asm(results: list, code: str, given: list, kinds: str):
    """Inline PTX with an effect on memory; its results."""
    kind = ir.Type.parse("!llvm.void")
    if results:
        kind = results[0] if len(results) == 1 else llvm.StructType.get_literal(results)
    kinds = ",".join([kinds, "~{memory}"]) if kinds else "~{memory}"
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
        i32, pair = _i32(), ir.VectorType.get((2,), ir.BF16Type.get())
        i8 = ir.IntegerType.get_signless(8)
        both = llvm.StructType.get_literal([i32, i32])
        step = (0x1111 if bits == 4 else 0x2222) if not table else 1
        start = []
        if table:
            lane = _modulo(mgpu.thread_idx(), 32)
            start = [llvm.ptrtoint(i32, _at(table[0], _times(lane, 4)))]
        places = [division.place(j) for j in division.mine()]
        selects = [_value(_plus(_times(p, step), first)) for _, _, p in places]
        shared = ACCUMULATORS if bits == 4 else 2  # accumulators of one word
        firsts = [
            [_row(ref, places[a][1], odd) for odd in (0, 1)]
            for a in range(0, division.wide, shared)
        ]
        registers = [[] for _ in places]
        for tile in range(rows // 8):
            words = [
                [
                    llvm.load(i32, mgpu.utils.getelementptr(p, [tile * 8 * width], i8))
                    for p in pointers
                ]
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
        return [_array(r, (64, rows), mgpu.WGMMA_LAYOUT) for r in registers]

    return run(*refs)


def _row(ref, byte, odd: int):
    """The address of a byte in row 2c + odd of a block that is swizzled by 128 bytes: a tile
    of 8 rows and 128 bytes is 1024 bytes, and units of 16 trade places by row."""
    box = _times(_shifted(byte, 7), 1024)
    row = _plus(_times(_modulo(mgpu.thread_idx(), 4), 2), odd)
    moved = _flipped(_modulo(byte, 128), _times(row, 16))
    return _at(ref, _plus(_plus(box, moved), _times(row, 128)))


def _array(registers, shape, layout):
    shape = layout.registers_shape(shape)
    return mgpu.FragmentedArray(
        _registers=np.array(registers, dtype=object).reshape(shape),
        _layout=layout,
        _is_signed=None,
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
            start = _at(ref, _times(division.place(j)[0], size))
            words = [mgpu.utils.bitcast(w, vector) for w in _pair(start, size)]
            out.append(_array(words, (64,), mgpu.WGMMA_ROW_LAYOUT))
        return out

    run: Any = load  # its first argument comes from Pallas
    return run(ref)


def _pair(start, size: int):
    """Two neighbours in bfloat16 (`size` 2) or float32, as the bits of float32."""
    if size == 4:
        i32 = _i32()
        return [
            llvm.load(i32, mgpu.utils.getelementptr(start, [h], i32)) for h in (0, 1)
        ]
    both = llvm.load(_i32(), start)  # bfloat16 is the upper half of a float32
    return [arith.shli(both, _value(16)), arith.andi(both, _value(-65536))]


# --- the result -------------------------------------------------------------------------------

PITCH = (
    COLUMNS + 2
)  # words between rows of the result in shared memory: lanes meet no bank


def finish(
    out: Any, ring: Any, aside: Any, sums: list[jax.Array], scale: Any,
    division: Division, programs: int,
) -> None:  # fmt: skip
    """Adds up what warpgroups and programs of a cluster have, and writes rows [m, 256].

    Args:
        ring: bytes in shared memory that nobody needs any more, for sums to change hands in.
        aside: [rows, PITCH] float32 in shared memory.
        scale: of columns, [1, 256] in memory, float32 or bfloat16; None for none.
        programs: of a cluster.
    """
    refs = [out, ring, aside] + ([] if scale is None else [scale])
    m, stride, padded = out.shape[0], out.ref.shape[-1], aside.shape[0]
    size = jnp.dtype(out.dtype).itemsize
    scale_size = 0 if scale is None else jnp.dtype(scale.dtype).itemsize
    types: list[Any] = [plgpu.RefType() for _ in refs]
    types[1] = plgpu.RefType(SWIZZLED)
    types += [plgpu.Layout.WGMMA] * len(sums)
    total = padded * (COLUMNS // 2)  # pairs of neighbours
    share = -(-total // programs)

    @plgpu.inline_mgpu(arg_types=types)
    def run(ctx, out, ring, aside, *rest):
        del ctx
        scale, sums = rest[: len(refs) - 3], rest[len(refs) - 3 :]
        owned = list(zip(division.mine(), [_words(s) for s in sums]))
        if division.deep > 1:
            needed = division.deep * COLUMNS * padded * 4
            assert math.prod(ring.type.shape) >= needed, (ring.type, needed)
            owned = [_exchange(ring, owned, division)]
        for j, words in owned:
            _put(aside, division.place(j)[0], words, padded)
        (rank,) = _asm([_i32()], "mov.u32 $0, %cluster_ctarank;", [], "=r")
        start = _times(rank, share)
        found = []
        for ahead in range(0, share, division.groups * 128):
            e = _plus(mgpu.thread_idx(), ahead)
            pair = arith.minui(_plus(start, e), _value(total - 1))
            row, column, offset = _element(pair, padded)
            factors = None
            if scale:  # asked for before the others are waited for
                at = _at(scale[0], _times(column, scale_size))
                f32 = ir.F32Type.get()
                factors = [mgpu.utils.bitcast(w, f32) for w in _pair(at, scale_size)]
            found.append((e, row, column, offset, factors))
        _meet()
        for e, row, column, offset, factors in found:
            both = _gather(aside, offset, programs)
            if factors:
                both = [arith.mulf(v, f) for v, f in zip(both, factors)]
            address = _at(out, _times(_plus(_times(row, stride), column), size))
            limits = (row, m), (e, share), (_plus(start, e), total)
            _write(address, both, limits, size)
        if programs > 1:
            _meet()  # nobody leaves while others read its shared memory

    run(*refs, *sums)


def _words(array):
    """What a thread holds of [64, M]: [M / 8, columns, rows], 2 of both."""
    return [
        llvm.extractelement(r, _value(h)) for r in array.registers.flat for h in (0, 1)
    ]


def _meet():
    """All threads of all programs of the cluster."""
    code = (
        "barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;"
    )
    _asm([], code, [], "")


def _exchange(ring, owned, division: Division):
    """Each warpgroup gives the accumulators that are not its own away and adds up the one
    that is: of `wide` that a set of warpgroups has in common, the one of its own number."""
    assert division.deep == division.wide
    f32, (wide, across) = ir.F32Type.get(), (division.wide, division.across)
    thread = mgpu.thread_idx()
    wg, lane = _shifted(thread, 7), _modulo(thread, 128)
    mine, q = _value(_shifted(wg, (across).bit_length() - 1)), _modulo(wg, across)
    count = len(owned[0][1])

    def address(giver, a, i):  # four words of every thread side by side
        block = _plus(_times(_plus(_times(giver, wide), a), across), q)
        unit = _plus(_times(block, count // 4), i)
        return _at(ring, _times(_plus(_times(unit, 128), lane), 16))

    quad = ir.VectorType.get((4,), f32)
    _asm([], "barrier.sync 0;", [], "")
    for a, (_, words) in enumerate(owned):
        for i in range(count // 4):
            packed = llvm.mlir_undef(quad)
            for h in range(4):
                packed = llvm.insertelement(packed, words[4 * i + h], _value(h))
            llvm.store(packed, address(mine, a, i))
    _asm([], "barrier.sync 0;", [], "")
    total = [None] * count
    for giver in range(division.deep):
        for i in range(count // 4):
            packed = llvm.load(quad, address(giver, mine, i))
            for h in range(4):
                word = llvm.extractelement(packed, _value(h))
                at = 4 * i + h
                total[at] = word if giver == 0 else arith.addf(total[at], word)
    return _plus(_times(q, wide), mine), total


def _put(aside, column, words, padded: int):
    """Writes an accumulator's words turned. A thread has rows 8 t + 2 c + odd of two columns
    side by side; even rows lie before odd ones, so that lanes meet no bank."""
    pair = ir.VectorType.get((2,), ir.F32Type.get())
    c = _modulo(mgpu.thread_idx(), 4)
    for t in range(padded // 8):
        for odd in (0, 1):
            packed = llvm.mlir_undef(pair)
            for h in (0, 1):
                word = words[4 * t + 2 * h + odd]
                packed = llvm.insertelement(packed, word, _value(h))
            row = _plus(c, odd * padded // 2 + 4 * t)
            offset = _plus(_times(row, PITCH), column)
            llvm.store(packed, _at(aside, _times(offset, 4)))


def _element(pair, padded: int):
    """(row, column, byte in `aside`) of a pair of neighbours in the result."""
    each, half = COLUMNS // 2, padded // 2
    place = _shifted(pair, each.bit_length() - 1)
    column = _times(_modulo(pair, each), 2)
    odd = arith.extui(_i32(), arith.cmpi(arith.CmpIPredicate.uge, place, _value(half)))
    row = _plus(_times(_plus(place, _times(odd, -half)), 2), odd)
    return row, column, _times(_plus(_times(place, PITCH), column), 4)


_FETCH = """{ .reg .b32 a; mapa.shared::cluster.u32 a, $2, $3;
    ld.shared::cluster.v2.f32 {$0, $1}, [a]; }"""


def _gather(aside, offset, programs: int):
    """Two neighbours, added up over the programs of a cluster."""
    f32 = ir.F32Type.get()
    local = llvm.ptrtoint(_i32(), _at(aside, offset))
    total = None
    for rank in range(programs):
        found = _asm([f32, f32], _FETCH, [local, _value(rank)], "=f,=f,r,r")
        total = found if total is None else [arith.addf(*v) for v in zip(total, found)]
    return total


_STORE = {
    4: "@p st.global.v2.f32 [$0], {$1, $2};",
    2: ".reg .b32 v; cvt.rn.bf16x2.f32 v, $2, $1; @p st.global.b32 [$0], v;",
}


def _write(address, both, limits, size: int):
    """Two neighbours in float32 or bfloat16, if every number is below its limit."""
    (_, m), (_, share), (_, total) = limits
    code = f"""{{ .reg .pred p; setp.lt.u32 p, $3, {m};
        setp.lt.and.u32 p, $4, {share}, p; setp.lt.and.u32 p, $5, {total}, p;
        {_STORE[size]} }}"""
    given = [address, *both, *(_value(number) for number, _ in limits)]
    _asm([], code, given, "l,f,f,r,r,r")
