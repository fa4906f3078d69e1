"""PTX that decodes weights: bytes of two rows to pairs of bfloat16, in registers.

    $0 $1    two columns, each a pair of neighbours along the sum, as tensor cores want them

made of

    $2       a word of two rows' 16 bits (`paired`), as ldmatrix turns them; or
    $2 $3    four bytes of one row of the weight and of the next (`code`), and
    $4       the permute that takes this warpgroup's bytes of them

Every value is exact in bfloat16 but a table's, whose entries are rounded. Integers are put
into the mantissa of a float and the float is subtracted again. Logic runs at half the rate
of arithmetic on an H200, so instructions are counted: beside the permute int4 takes 5 for 4
values, of which 2 are logic, int8 7, nf4 5 and two loads where a thread wants whole words (13
by permutes alone: 24 us, not 19).

Where a kernel is interpreted, `values` decodes the same bytes without PTX.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from midtread.kernels import decode_gpu
from midtread.numerics.formats import Format, dtype_bits

TABLE = (256, 32)  # words of `pairs`, 4 bytes each
TABLE_BYTES = 256 * 32 * 4

# Bodies find in `p` two codes of a row in its lower half, and those of the next row above.

# A nibble in the low mantissa bits of 128 is 128 + u; signed codes flip their sign bit, which
# adds 8, and both are subtracted again. The upper nibble is the middle of a float16's mantissa:
# 2 (1 + 16 u / 1024), of which a multiplication makes 2 (1 + u / 1024), and these bits are
# (128 + u) / 64 to a bfloat16. That saves a shift, which is logic.
_INT4 = """
    .reg .b32 q, one, off, sixteenth, rest, sixty_four;
    mov.b32 one, 0x3f803f80; mov.b32 off, 0xc308c308; mov.b32 sixty_four, 0x42804280;
    mov.b32 sixteenth, 0x2c002c00; mov.b32 rest, 0x3f803f80;
    lop3.b32 q, p, 0x00f000f0, 0x40804080, 0x6a;
    lop3.b32 p, p, 0x000f000f, 0x43084308, 0x6a;
    fma.rn.f16x2 q, q, sixteenth, rest;
    fma.rn.bf16x2 $0, p, one, off;
    fma.rn.bf16x2 $1, q, sixty_four, off;
"""  # lop3 0x6a: (a & b) ^ c; rest: 1.875 in float16

# Seven bits in the mantissa of 128, minus 128, or minus 256 under a sign.
_INT8 = """
    .reg .b32 q, a, b, one;
    mov.b32 one, 0x3f803f80;
    shr.u32 q, p, 8;
    lop3.b32 a, p, 0x007f007f, 0x43004300, 0xea;
    lop3.b32 p, p, 0x00800080, 0xc300c300, 0xea;
    lop3.b32 b, q, 0x007f007f, 0x43004300, 0xea;
    lop3.b32 q, q, 0x00800080, 0xc300c300, 0xea;
    fma.rn.bf16x2 $0, a, one, p;
    fma.rn.bf16x2 $1, b, one, q;
"""  # lop3 0xea: (a & b) | c

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
# lane, so that no two lanes want the same bank. $5 is where the lane's own column starts. The
# low nibbles of both rows are put into one word and the high ones into another, which is done
# once for the four bytes of a word where a thread wants them all.
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


_BODIES = {  # and the permute of the first bytes, which later ones are added to
    "int4": (_INT4, 0x4400),
    "int8": (_INT8, 0x5410),
    "float8_e4m3fn": (_E4M3, 0x5410),
    "float8_e5m2": (_E5M2, 0x5410),
}


def code(fmt: Format) -> tuple[str, int]:
    """The instructions for words of two rows, and their first permute."""
    if fmt.table is not None:
        return "{" + _TABLE + "}", 0x4440
    body, first = _BODIES[fmt.dtype.name]
    return "{.reg .b32 p; prmt.b32 p, $2, $3, $4;" + body + "}", first


def paired(fmt: Format) -> str:
    """The instructions for a word that holds two rows; a table's want rows all the same."""
    if fmt.table is not None:
        return code(fmt)[0]
    return "{.reg .b32 p; mov.b32 p, $2;" + _BODIES[fmt.dtype.name][0] + "}"


def as_bytes(codes_KN: jax.Array) -> jax.Array:
    """[K, B]: codes as they lie in memory, two of 4 bits in a byte."""
    k, n = codes_KN.shape
    shape = (k, n) if dtype_bits(codes_KN.dtype) == 8 else (k, n // 2, 2)
    return lax.bitcast_convert_type(codes_KN.reshape(shape), jnp.int8)


def values(bytes_KB: jax.Array, fmt: Format) -> jax.Array:
    """[K, N] in bfloat16: what the bytes of a block stand for."""
    if dtype_bits(fmt.dtype) == 8:
        bytes_KB = lax.bitcast_convert_type(bytes_KB, fmt.dtype)
    found = decode_gpu.unpacked(bytes_KB, fmt, jnp.bfloat16, native=False)
    return jnp.stack(found, -1).reshape(bytes_KB.shape[0], -1)
