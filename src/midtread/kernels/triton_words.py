"""Words: codes of 8 or 4 bits, read 16 bits at a time and decoded to float16, Triton.

A tensor core wants neighbours along the sum in one register, and a weight or a cache often
has neighbours along another axis in memory. The GPU's shared memory can turn such blocks
for elements of 16 bits, not for smaller ones: bytes go one by one, and that, not their
number, decides the time. So two codes of 8 bits (four of 4) travel as one word, words are
turned, and each word gives one value to each of several planes:

    [k, n / 2] words  ->  2 planes [k, n / 2]: the even and the odd columns of [k, n]

float16 holds every code exactly. What multiplies it has to fit, too: `fitted` divides rows
by a power of two.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from midtread.kernels.pallas_compat import pltriton
from midtread.numerics.formats import Format, dtype_bits

FORMATS = ("int8", "int4", "float8_e4m3fn", "float8_e5m2")


def num_planes(fmt: Format) -> int:
    return 16 // dtype_bits(fmt.dtype)


def as_words(codes: jax.Array, fmt: Format) -> jax.Array:
    """Codes [.., n] as int16 [.., n / planes]: the same bytes."""
    planes = num_planes(fmt)
    split = codes.reshape(*codes.shape[:-1], codes.shape[-1] // planes, planes)
    return lax.bitcast_convert_type(split, jnp.int16)


def fitted(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(x / s in float16, s): s is a power of two for each row, so nothing is rounded but
    what lies 2^24 below the row's largest. Infinities and NaN stay what they are."""
    x = x.astype(jnp.float32)
    largest = jnp.max(jnp.abs(x), axis=-1, keepdims=True)
    _, exponent = jnp.frexp(jnp.where(jnp.isfinite(largest), largest, 1.0))
    exponent = jnp.clip(exponent, -100, 120)
    return jnp.ldexp(x, -exponent).astype(jnp.float16), jnp.ldexp(1.0, exponent)


# Each turns two words, $1, into the float16 values of one plane, $0. A code in the low bits
# of 1024 is 1024 + code: what was added is subtracted again. Signed codes have their sign
# bit flipped, which adds half of their range.
_INT8 = """
    .reg .b32 p, off;
    mov.b32 off, 0x64806480;
    xor.b32 p, $1, 0x80808080;
    prmt.b32 p, p, 0x64646464, {bytes};
    sub.f16x2 $0, p, off;
"""
_INT4 = """
    .reg .b32 p, one, off;
    mov.b32 one, {one}; mov.b32 off, {off};
    shr.u32 p, $1, {shift};
    lop3.b32 p, p, {mask}, {magic}, 0x6a;
    fma.rn.f16x2 $0, p, one, off;
"""  # lop3 0x6a: (p & mask) ^ magic
_FLOAT8 = """
    .reg .b32 p;
    .reg .b16 low, high;
    prmt.b32 p, $1, 0, {bytes};
    mov.b32 {{low, high}}, p;
    cvt.rn.f16x2.{kind} $0, low;
"""
_BYTES = ("0x4240", "0x4341")
_NIBBLES = {  # of a byte: mask, 1024 + half the range, scale, what to subtract
    0: ("0x000f000f", "0x64086408", "0x3c003c00", "0xe408e408"),
    1: ("0x00f000f0", "0x64806480", "0x2c002c00", "0xd480d480"),
}


def assembly(fmt: Format, plane: int) -> str:
    name = fmt.dtype.name
    if name == "int8":
        return _INT8.format(bytes=_BYTES[plane])
    if name == "int4":
        mask, magic, one, off = _NIBBLES[plane % 2]
        shift = 8 * (plane // 2)
        return _INT4.format(mask=mask, magic=magic, one=one, off=off, shift=shift)
    kind = "e4m3x2" if name == "float8_e4m3fn" else "e5m2x2"
    return _FLOAT8.format(bytes=("0x4420", "0x4431")[plane], kind=kind)


def planes(words: jax.Array, fmt: Format, native: bool) -> list[jax.Array]:
    """float16 values of each plane of the words of a block."""
    count = num_planes(fmt)
    if not native:
        return [_plain(words, fmt, plane) for plane in range(count)]
    shape = jax.ShapeDtypeStruct(words.shape, jnp.float16)
    return [
        pltriton.elementwise_inline_asm(
            "{" + assembly(fmt, plane) + "}",
            args=[words],
            constraints="=r,r",
            pack=2,
            result_shape_dtypes=[shape],
        )[0]
        for plane in range(count)
    ]


def _plain(words, fmt: Format, plane: int):
    bits = dtype_bits(fmt.dtype)
    shifted = words << np.int16(16 - bits * (plane + 1))
    if jnp.issubdtype(fmt.dtype, jnp.integer):
        return (shifted >> np.int16(16 - bits)).astype(jnp.float16)
    byte = lax.shift_right_logical(shifted, np.int16(8)).astype(jnp.uint8)
    return lax.bitcast_convert_type(byte, fmt.dtype).astype(jnp.float16)
