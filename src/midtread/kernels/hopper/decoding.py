"""PTX that decodes weights: bytes of two rows to pairs of bfloat16, in registers.

    $0 $1    two columns, each a pair of neighbours along the sum, as tensor cores want them

made of

    $2       a word of two rows' 16 bits, as ldmatrix turns them
    $3 $4    slope and start of the first column, for integers
    $5 $6    of the second

or, with a table, of

    $2 $3    four bytes of one row of the weight and of the next
    $4       the permute that takes one of them
    $5       where the table starts, for this lane

Every value is exact in bfloat16 but a table's, whose entries are rounded. Logic runs at half the
rate of arithmetic on an H200, so instructions are counted: int4 takes 4 for 4 values, of which 2
are logic, int8 5, nf4 5 and two loads where a thread wants whole words (13 by permutes alone:
24 us, not 19).

    Integers.  A byte in the low half of a bfloat16 is that byte times 2**-133: subnormals go on
    into the smallest normals without a gap. So one multiply-add makes a value of it,

        value 2**-power  =  bits slope + start        slope 2**(133 - power), start -128 2**-power

    where the start takes away what flipping the sign bit has added: 128, or 8 of int4, whose
    upper nibble has a slope of a sixteenth. 2**133 is beyond bfloat16: values come out times
    2**-power, and so do sums, which are multiplied in the end.

    A scale in bfloat16 can be in slope and start, and the product is rounded once, as if the two
    had been multiplied. Slopes have room for scales up to 2**40 (beyond, results are not
    finite), and what is smaller than 2**-81, a scaled value or its product with x, loses bits.

Where a kernel is interpreted, `values` decodes the same bytes without PTX.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from midtread.kernels.weight_matmul import triton as weight_triton
from midtread.numerics.formats import Format, dtype_bits

TABLE = (256, 32)  # words of `pairs`, 4 bytes each
TABLE_BYTES = 256 * 32 * 4

# Bodies find in `p` two codes of a row in its lower half, and those of the next row above.

_INT4 = """
    .reg .b32 q;
    lop3.b32 q, p, 0x00f000f0, 0x00800080, 0x6a;
    lop3.b32 p, p, 0x000f000f, 0x00080008, 0x6a;
    fma.rn.bf16x2 $0, p, $3, $4;
    fma.rn.bf16x2 $1, q, $5, $6;
"""  # lop3 0x6a: (a & b) ^ c

_INT8 = """
    .reg .b32 q;
    shr.u32 q, p, 8;
    lop3.b32 p, p, 0x00ff00ff, 0x00800080, 0x6a;
    lop3.b32 q, q, 0x00ff00ff, 0x00800080, 0x6a;
    fma.rn.bf16x2 $0, p, $3, $4;
    fma.rn.bf16x2 $1, q, $5, $6;
"""

# By float16, which holds either float8, and float32. e5m2 is the upper byte of a float16.
_E4M3 = """
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
_E5M2 = """
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
_TABLE = """
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


def pairs(table) -> np.ndarray:
    """[256, 32]: the bfloat16 values of both codes of a byte, the low one first."""
    bits = np.asarray(table, np.float32).astype(jnp.bfloat16).view(np.uint16)
    low, high = np.meshgrid(bits.astype(np.uint32), bits.astype(np.uint32))
    words = (low | high << 16).reshape(256, 1).view(np.int32)
    return np.ascontiguousarray(np.broadcast_to(words, TABLE))


_BODIES = {
    "int4": _INT4,
    "int8": _INT8,
    "float8_e4m3fn": _E4M3,
    "float8_e5m2": _E5M2,
}
_UNITS = {"int4": (1, 16), "int8": (1, 1)}  # of an integer's bits, in $0 and in $1


class Code(NamedTuple):
    text: str
    lines: tuple[tuple[float, float], ...] = ()  # slope and start for $0 and for $1


def power(fmt: Format, is_scaled: bool) -> int:
    """Values come out times 2**-power; `is_scaled` where slopes and starts are."""
    if fmt.dtype.name not in _UNITS or fmt.table is not None:
        return 0
    return (
        45 if is_scaled else 6
    )  # half of the exponents; a slope of 2**127, the largest


def code(fmt: Format, is_scaled: bool = False) -> Code:
    """The instructions, and for integers (slope, start) of both columns."""
    if fmt.table is not None:
        return Code("{" + _TABLE + "}")
    one, zero = 2.0 ** -power(fmt, is_scaled), 2.0 ** (fmt.bits - 1)
    units = _UNITS.get(fmt.dtype.name, ())
    lines = tuple((2.0**133 / unit * one, -zero * one) for unit in units)
    text = ".reg .b32 p; mov.b32 p, $2;" + _BODIES[fmt.dtype.name]
    return Code("{" + text + "}", lines)


def as_bytes(codes_KN: jax.Array) -> jax.Array:
    """[K, B]: codes as they lie in memory, two of 4 bits in a byte."""
    k, n = codes_KN.shape
    shape = (k, n) if dtype_bits(codes_KN.dtype) == 8 else (k, n // 2, 2)
    return lax.bitcast_convert_type(codes_KN.reshape(shape), jnp.int8)


def values(bytes_KB: jax.Array, fmt: Format) -> jax.Array:
    """[K, N] in bfloat16: what the bytes of a block stand for."""
    if dtype_bits(fmt.dtype) == 8:
        bytes_KB = lax.bitcast_convert_type(bytes_KB, fmt.dtype)
    found = weight_triton.unpacked(bytes_KB, fmt, jnp.bfloat16, native=False)
    return jnp.stack(found, -1).reshape(bytes_KB.shape[0], -1)
