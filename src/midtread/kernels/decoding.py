"""Decoding: what stored codes stand for, for every kind of kernel.

There is a row for each container of codes and a column for each kind of kernel that decodes
them. Adding a format is adding a row; a kernel takes every format whose row fills its column
(`formats`).

    plain     bytes -> values in plain JAX, on a CPU and where a kernel is interpreted
    words     PTX for Triton: two 16-bit words -> two float16, one plane of codes at a time
    bytes     PTX for Triton: four bytes -> four 16-bit floats, one plane of codes at a time;
              or CAST, where Triton itself casts a code of 8 bits
    rows      PTX for Hopper: 16 bits of two rows -> two columns of bfloat16 pairs

A plane is one array of values for each code that a byte or a word holds, in order of memory.
Formats that are looked up have two more rows, for tables of 16 entries in codes of 4 bits, and of
2 or 4 entries in codes of 2 bits.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from midtread.numerics.formats import FORMATS, Format, dtype_bits

# --- plain JAX --------------------------------------------------------------------------------


def _unsigned(p):
    return lax.bitcast_convert_type(p, jnp.uint8)


def _signed_nibbles(p):
    return (p << 4) >> 4, p >> 4


def _nibbles(p):
    u = _unsigned(p)
    return u & 15, u >> 4


def _signed_crumbs(p):
    return tuple((p << 6 - shift) >> 6 for shift in (0, 2, 4, 6))


def _crumbs(p):
    u = _unsigned(p)
    return tuple(u >> shift & 3 for shift in (0, 2, 4, 6))


def _float16(bits, unit):
    return lax.bitcast_convert_type(bits, jnp.float16).astype(jnp.float32) * unit


def _e4m3(p):
    p = p.astype(jnp.int16)  # the sign fills bits 7 to 15
    bits = p << 7 & ~(1 << 14)
    bits = jnp.where(p & 0x7F == 0x7F, jnp.int16(0x7E00), bits)  # its only NaN
    return _float16(bits, 2.0**8)


def _e5m2(p):
    return _float16(p.astype(jnp.int16) << 8, 1.0)


def _e2m1(u):
    u = u.astype(jnp.int16)
    return _float16((u & 8) << 12 | (u & 7) << 9, 2.0**14)


def look_up(u, table):
    """Returns table[u] by selects: bit 0 of u chooses within pairs, bit 1 among pairs of
    pairs, ..."""
    values = [jnp.float32(v) for v in table]
    for bit in range(len(table).bit_length() - 1):
        is_odd = (u & (1 << bit)) != 0
        values = [jnp.where(is_odd, b, a) for a, b in zip(values[::2], values[1::2])]
    return values[0]


# --- PTX for Triton, by words -----------------------------------------------------------------

# Each turns two words, $1, into the float16 values of one plane, $0. A code in the low bits
# of 1024 is 1024 + code: what was added is subtracted again. Signed codes have their sign
# bit flipped, which adds half of their range.
_WORDS_BYTES = """
    .reg .b32 p, off;
    mov.b32 off, {off};
    xor.b32 p, $1, {flip};
    prmt.b32 p, p, 0x64646464, {bytes};
    sub.f16x2 $0, p, off;
"""
_WORDS_PACKED = """
    .reg .b32 p, one, off;
    mov.b32 one, {one}; mov.b32 off, {off};
    shr.u32 p, $1, {shift};
    lop3.b32 p, p, {mask}, {magic}, 0x6a;
    fma.rn.f16x2 $0, p, one, off;
"""  # lop3 0x6a: (p & mask) ^ magic
# A code is a sign, two bits of exponent and one of mantissa. Put where float16 has them it is
# its value times 2^-14, subnormals included.
_WORDS_E2M1 = """
    .reg .b32 p, q, one, off;
    mov.b32 one, 0x74007400; mov.b32 off, 0x80008000;
    shr.u32 p, $1, {shift};
    shl.b32 q, p, 12;
    shl.b32 p, p, 9;
    and.b32 q, q, 0x80008000;
    lop3.b32 p, p, 0x0e000e00, q, 0xea;
    fma.rn.f16x2 $0, p, one, off;
"""  # lop3 0xea: (p & mask) | q
_WORDS_FLOAT8 = """
    .reg .b32 p;
    .reg .b16 low, high;
    prmt.b32 p, $1, 0, {bytes};
    mov.b32 {{low, high}}, p;
    cvt.rn.f16x2.{kind} $0, low;
"""
_WORD_BYTES = ("0x4240", "0x4341")


def _twice(word: int) -> str:
    """Returns a 16-bit number in both halves of a register."""
    return f"0x{word << 16 | word:08x}"


def _f16(value: float) -> str:
    return _twice(int(np.float16(value).view(np.uint16)))


def _byte_words(is_signed: bool) -> Callable[[int], str]:
    half = 128 if is_signed else 0
    numbers = {"off": _f16(1024 + half), "flip": _twice(half << 8 | half)}
    return lambda plane: _WORDS_BYTES.format(bytes=_WORD_BYTES[plane], **numbers)


def _packed_words(bits: int, is_signed: bool) -> Callable[[int], str]:
    """Codes of an upper nibble stay there, in units of 16, and are multiplied down."""

    def text(plane: int) -> str:
        byte, bit = divmod(plane * bits, 8)
        unit = 16 if bit >= 4 else 1
        shift, half = 8 * byte + bit - (4 if unit > 1 else 0), 1 << bits - 1
        flipped = half * unit * is_signed
        return _WORDS_PACKED.format(
            shift=shift,
            mask=_twice((2 * half - 1) * unit),
            magic=_twice(0x6400 | flipped),
            one=_f16(1 / unit),
            off=_f16(-(1024 + flipped) / unit),
        )

    return text


def _e2m1_words(plane: int) -> str:
    return _WORDS_E2M1.format(shift=4 * plane)


def _float8_words(kind: str) -> Callable[[int], str]:
    bytes_ = ("0x4420", "0x4431")
    return lambda plane: _WORDS_FLOAT8.format(bytes=bytes_[plane], kind=kind)


# --- PTX for Triton, by bytes -----------------------------------------------------------------

# Four bytes in $2, the code of each at `shift` to two pairs of 16-bit floats, $0 and $1.
_BYTES_PACKED = """
    .reg .b32 p, a, b, one, off;
    mov.b32 one, {one}; mov.b32 off, {off};
    shr.u32 p, $2, {shift};
    prmt.b32 a, p, 0, 0x4140;
    prmt.b32 b, p, 0, 0x4342;
    lop3.b32 a, a, {mask}, {magic}, 0x6a;
    lop3.b32 b, b, {mask}, {magic}, 0x6a;
    fma.rn.{kind} $0, a, one, off;
    fma.rn.{kind} $1, b, one, off;
"""  # lop3 0x6a: (a & mask) ^ magic
# A code u in the low mantissa bits of 128 (bfloat16) or 1024 (float16) is 128 + u: the
# offset is subtracted again. Signed codes flip their sign bit, which adds half their range.
_BASES = {"bfloat16": ("bf16x2", 128.0), "float16": ("f16x2", 1024.0)}

# e2m1 as above: in bfloat16, times 2^-126, and in float16, times 2^-14.
_BYTES_E2M1 = """
    .reg .b32 p, a, b, c, d, one, off;
    mov.b32 one, {one}; mov.b32 off, 0x80008000;
    shr.u32 p, $2, {shift};
    prmt.b32 a, p, 0, 0x4140;
    prmt.b32 b, p, 0, 0x4342;
    shl.b32 c, a, 12;
    shl.b32 d, b, 12;
    shl.b32 a, a, {exponent};
    shl.b32 b, b, {exponent};
    and.b32 c, c, 0x80008000;
    and.b32 d, d, 0x80008000;
    lop3.b32 a, a, {mask}, c, 0xea;
    lop3.b32 b, b, {mask}, d, 0xea;
    fma.rn.{kind} $0, a, one, off;
    fma.rn.{kind} $1, b, one, off;
"""  # lop3 0xea: (a & mask) | c
_E2M1_PLACES = {"bfloat16": (6, 2.0**126), "float16": (9, 2.0**14)}  # exponent, unit

# By a table of up to 16 values: their low bytes are in l0 .. l3, their high bytes in h0 .. h3.
_BYTES_TABLE = """
    .reg .b32 s, t, m, x, y, l, h;
    shr.u32 s, $2, {shift};
    and.b32 s, s, {mask};
    shr.u32 t, s, 4;
    or.b32 t, s, t;
    prmt.b32 t, t, 0, 0x4420;
    and.b32 t, t, 0x7777;
    shl.b32 m, s, 4;
    prmt.b32 m, m, 0, 0xba98;
    prmt.b32 x, l0, l1, t;
    prmt.b32 y, l2, l3, t;
    lop3.b32 l, m, y, x, 0xca;
    prmt.b32 x, h0, h1, t;
    prmt.b32 y, h2, h3, t;
    lop3.b32 h, m, y, x, 0xca;
    prmt.b32 $0, l, h, 0x5140;
    prmt.b32 $1, l, h, 0x7362;
"""  # lop3 0xca: m ? y : x


# Four signed bytes in $4 to float32: 128 + b in the low bits of 2^23, subtracted again.
_BYTES_INT8 = """
    .reg .b32 p, a, b, c, d;
    xor.b32 p, $4, 0x80808080;
    prmt.b32 a, p, 0x4b000000, 0x7440;
    prmt.b32 b, p, 0x4b000000, 0x7441;
    prmt.b32 c, p, 0x4b000000, 0x7442;
    prmt.b32 d, p, 0x4b000000, 0x7443;
    sub.f32 $0, a, 0f4B000080;
    sub.f32 $1, b, 0f4B000080;
    sub.f32 $2, c, 0f4B000080;
    sub.f32 $3, d, 0f4B000080;
"""


def _bits16(value: float, dtype: np.dtype) -> int:
    return int(np.asarray(value, np.float32).astype(dtype).view(np.uint16))


def _packed_bytes(bits: int, is_signed: bool) -> Callable:
    half = 1 << bits - 1

    def text(fmt: Format, dtype: np.dtype, shift: int) -> str:
        kind, base = _BASES[dtype.name]
        start = base + half * is_signed
        return _BYTES_PACKED.format(
            kind=kind,
            shift=shift,
            mask=_twice(2 * half - 1),
            magic=_twice(_bits16(start, dtype)),
            one=_twice(_bits16(1, dtype)),
            off=_twice(_bits16(-start, dtype)),
        )

    return text


def _e2m1_bytes(fmt: Format, dtype: np.dtype, shift: int) -> str:
    exponent, unit = _E2M1_PLACES[dtype.name]
    return _BYTES_E2M1.format(
        kind=_BASES[dtype.name][0],
        shift=shift,
        exponent=exponent,
        mask=_twice(7 << exponent),
        one=_twice(_bits16(unit, dtype)),
    )


def _table_bytes(fmt: Format, dtype: np.dtype, shift: int) -> str:
    assert fmt.table is not None
    values = np.resize(np.asarray(fmt.table, np.float32), 16)  # a smaller one, repeated
    bits = values.astype(dtype).view(np.uint16)
    parts = {"l": (bits & 255).astype(np.uint8), "h": (bits >> 8).astype(np.uint8)}
    words = {
        f"{k}{i}": w for k, v in parts.items() for i, w in enumerate(v.view("<u4"))
    }
    regs = f".reg .b32 {', '.join(words)};"
    load = "".join(f"mov.b32 {name}, 0x{word:08x};" for name, word in words.items())
    mask = (1 << dtype_bits(fmt.dtype)) - 1
    mask = _twice(mask << 8 | mask)
    return regs + load + _BYTES_TABLE.format(shift=shift, mask=mask)


# --- PTX for Hopper, by two rows; hopper/decoding.py says what $0 to $6 are -------------------

# Bodies find in `p` two codes of a row in its lower half, and those of the next row above.

_ROWS_PACKED = """
    .reg .b32 q;
    lop3.b32 q, p, {high}, {high_flip}, 0x6a;
    lop3.b32 p, p, {low}, {low_flip}, 0x6a;
    fma.rn.bf16x2 $0, p, $3, $4;
    fma.rn.bf16x2 $1, q, $5, $6;
"""  # lop3 0x6a: (a & b) ^ c

_ROWS_BYTES = """
    .reg .b32 q;
    shr.u32 q, p, 8;
    lop3.b32 p, p, 0x00ff00ff, {flip}, 0x6a;
    lop3.b32 q, q, 0x00ff00ff, {flip}, 0x6a;
    fma.rn.bf16x2 $0, p, $3, $4;
    fma.rn.bf16x2 $1, q, $5, $6;
"""

# A multiplication copies a nibble to bits 6 to 9, of which exponent and mantissa stay, and to
# bits 12 to 15, of which the sign does: its value times 2**-126, subnormals included.
_ROWS_E2M1 = """
    .reg .b32 q;
    and.b32 q, p, 0x00f000f0;
    and.b32 p, p, 0x000f000f;
    mul.lo.u32 q, q, 0x0104;
    mul.lo.u32 p, p, 0x1040;
    and.b32 q, q, 0x81c081c0;
    and.b32 p, p, 0x81c081c0;
    fma.rn.bf16x2 $0, p, $3, $4;
    fma.rn.bf16x2 $1, q, $5, $6;
"""


def _packed_rows(bits: int, offset: int) -> str:
    """Returns instructions for two codes of `bits` bits; flipping the sign bit of signed
    ones adds `offset`."""
    mask = (1 << bits) - 1
    return _ROWS_PACKED.format(
        low=_twice(mask),
        low_flip=_twice(offset),
        high=_twice(mask << bits),
        high_flip=_twice(offset << bits),
    )


def _byte_rows(offset: int) -> str:
    return _ROWS_BYTES.format(flip=_twice(offset))


# By float16, which holds either float8, and float32. e5m2 is the upper byte of a float16.
_ROWS_E4M3 = """
    .reg .b32 q; .reg .b16 a, b, c, d; .reg .f32 x, y;
    mov.b32 {a, b}, p;
    cvt.rn.f16x2.e4m3x2 p, a;
    cvt.rn.f16x2.e4m3x2 q, b;
    mov.b32 {a, b}, p;
    mov.b32 {c, d}, q;
    cvt.f32.f16 x, a; cvt.f32.f16 y, c;
    cvt.rn.bf16x2.f32 $0, y, x;
    cvt.f32.f16 x, b; cvt.f32.f16 y, d;
    cvt.rn.bf16x2.f32 $1, y, x;
"""
_ROWS_E5M2 = """
    .reg .b32 q; .reg .b16 a, b, c, d; .reg .f32 x, y;
    and.b32 q, p, 0xff00ff00;
    shl.b32 p, p, 8;
    and.b32 p, p, 0xff00ff00;
    mov.b32 {a, b}, p;
    mov.b32 {c, d}, q;
    cvt.f32.f16 x, a; cvt.f32.f16 y, b;
    cvt.rn.bf16x2.f32 $0, y, x;
    cvt.f32.f16 x, c; cvt.f32.f16 y, d;
    cvt.rn.bf16x2.f32 $1, y, x;
"""

# Two codes are the row of a table of pairs in shared memory: 256 rows of 32 words, one for each
# lane, so that no two lanes want the same bank. The low nibbles of both rows are put into one
# word and the high ones into another, which is done once for the four bytes of a word where a
# thread wants them all.
_ROWS_TABLE = """
    .reg .b32 p, q, s;
    shl.b32 s, $3, 4;
    lop3.b32 p, $2, s, 0x0f0f0f0f, 0xe4;
    shr.u32 s, $2, 4;
    lop3.b32 q, s, $3, 0x0f0f0f0f, 0xe4;
    prmt.b32 p, p, 0, $4;
    prmt.b32 q, q, 0, $4;
    mad.lo.u32 p, p, 128, $5;
    mad.lo.u32 q, q, 128, $5;
    ld.shared.b32 $0, [p];
    ld.shared.b32 $1, [q];
"""  # lop3 0xe4: c ? a : b

# --- the table --------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Decoder:
    """How one container of codes is decoded; None for a kind of kernel that cannot."""

    plain: Callable  # bytes in int8 -> a tuple of planes
    words: Callable[[int], str] | None = None  # the number of a plane -> PTX
    bytes: Callable[[Format, np.dtype, int], str] | str | None = None  # dtype, shift -> PTX, or CAST  # fmt: skip
    floats: str | None = None  # PTX for Triton: four bytes -> four float32
    rows: str | None = None
    units: tuple[int, ...] = ()  # what a code of 1 is worth in $0, $1, times 2**-133
    offset: int = 0  # what flipping the sign bit adds to a code there


CAST = "cast"
TABLE_OF_16, TABLE_OF_4 = "a table of 16", "a table of 4"
DECODERS = {
    "int8": Decoder(
        lambda p: (p,), _byte_words(True), CAST, _BYTES_INT8, _byte_rows(128), (1, 1), 128
    ),
    "float8_e4m3fn": Decoder(
        lambda p: (_e4m3(p),), _float8_words("e4m3x2"), CAST, rows=_ROWS_E4M3
    ),
    "float8_e5m2": Decoder(
        lambda p: (_e5m2(p),), _float8_words("e5m2x2"), CAST, rows=_ROWS_E5M2
    ),
    "int4": Decoder(
        _signed_nibbles, _packed_words(4, True), _packed_bytes(4, True),
        rows=_packed_rows(4, 8), units=(1, 16), offset=8,
    ),
    TABLE_OF_16: Decoder(_nibbles, bytes=_table_bytes, rows=_ROWS_TABLE),
    "uint8": Decoder(
        lambda p: (_unsigned(p),), _byte_words(False), CAST, rows=_byte_rows(0), units=(1, 1)
    ),
    "uint4": Decoder(
        _nibbles, _packed_words(4, False), _packed_bytes(4, False),
        rows=_packed_rows(4, 0), units=(1, 16),
    ),
    "float4_e2m1fn": Decoder(
        lambda p: tuple(map(_e2m1, _nibbles(p))), _e2m1_words, _e2m1_bytes,
        rows=_ROWS_E2M1, units=(128, 128),
    ),
    "int2": Decoder(
        _signed_crumbs, _packed_words(2, True), _packed_bytes(2, True),
        rows=_packed_rows(2, 2), units=(1, 4), offset=2,
    ),
    "uint2": Decoder(
        _crumbs, _packed_words(2, False), _packed_bytes(2, False),
        rows=_packed_rows(2, 0), units=(1, 4),
    ),
    TABLE_OF_4: Decoder(_crumbs, bytes=_table_bytes),
}  # fmt: skip


def decoder(fmt: Format) -> Decoder | None:
    """Returns the row that decodes a format; None if there is none."""
    if fmt.table is None:
        return DECODERS.get(fmt.dtype.name)
    tables = {(4, 16): TABLE_OF_16, (2, 2): TABLE_OF_4, (2, 4): TABLE_OF_4}
    return DECODERS.get(tables.get((dtype_bits(fmt.dtype), len(fmt.table)), ""))


def formats(kind: str) -> tuple[str, ...]:
    """Returns the formats that a kind of kernel takes: those whose row fills this column.

    >>> [name for name in formats("words") if name.startswith("uint")]
    ['uint8', 'uint4', 'uint2']
    """
    rows = [row for row in DECODERS.values() if getattr(row, kind) is not None]
    return tuple(
        fmt.name for row in rows for fmt in FORMATS.values() if decoder(fmt) is row
    )


def num_planes(fmt: Format) -> int:
    """Returns how many codes share a byte."""
    return 8 // dtype_bits(fmt.dtype)


def planes(bytes_: jax.Array, fmt: Format, dtype) -> tuple[jax.Array, ...]:
    """Returns the values of the codes in some bytes, exact, in `dtype`: an array for each
    code that a byte holds."""
    values = decoder(fmt).plain(bytes_)
    if fmt.table is not None:
        values = tuple(look_up(u, fmt.table) for u in values)
    return tuple(v.astype(dtype) for v in values)


def as_bytes(codes: jax.Array) -> jax.Array:
    """Returns codes [.., N] as they lie in memory, int8 [.., N / planes]."""
    count = 8 // dtype_bits(codes.dtype)
    if count > 1:
        codes = codes.reshape(*codes.shape[:-1], codes.shape[-1] // count, count)
    return lax.bitcast_convert_type(codes, jnp.int8)
