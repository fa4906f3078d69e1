"""How Hopper decodes stored weights: PTX that turns bytes of two rows into pairs of bfloat16.

The instructions are in the table of kernels/decoding.py. Their registers mean:

    $0 $1    results: two columns, each a pair of neighbours along the sum
    $2       16 bits of each of two rows, in one word, as ldmatrix transposes them
    $3 $4    the slope and the start of the first column, for integers and e2m1
    $5 $6    the slope and the start of the second column

and for a format that is looked up in a table:

    $2 $3    four bytes of one row of the weight, and of the next row
    $4       the permute that selects one of them
    $5       the address at which this lane's column of the table starts

Every value is exact in bfloat16 but those of a table, whose entries are rounded. On an H200 logic
runs at half the rate of arithmetic, so the number of instructions matters: int4 takes 4 of them
for 4 values, 2 of which are logic; int8 takes 5; nf4 takes 5 and two loads where a thread needs
whole words (13 by permutes alone, which took 24 us instead of 19).

    Integers.  A byte in the low half of a bfloat16 is that byte times 2**-133: subnormals go on
    into the smallest normals without a gap. So one multiply-add makes a value of it,

        value 2**-power  =  bits slope + start        slope 2**(133 - power), start -128 2**-power

    where the start takes away what flipping the sign bit has added: 128, or 8 of int4, whose
    upper nibble has a slope of a sixteenth. 2**133 is beyond bfloat16: values come out times
    2**-power, and so do sums, which are multiplied in the end.

    A zero point is one more that the start takes away: start -(128 + zero) 2**-power. It is
    made of the zero point's own bits, whose sign bit is flipped too, by the same multiplication.

    e2m1 (mxfp4, nvfp4) is a float of 4 bits. Its exponent and mantissa, put where bfloat16 has
    the lowest of its own, are its value times 2**-126, and the slope makes up for that.

    A scale in bfloat16 can be in slope and start, and the product is rounded once, as if the two
    had been multiplied. Slopes have room for scales up to 2**40 (beyond, results are not
    finite), and what is smaller than 2**-81, a scaled value or its product with x, loses bits.

Where a kernel is interpreted, `values` decodes the same bytes without PTX.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from midtread.kernels import decoding
from midtread.numerics.formats import Format, dtype_bits

TABLE = (256, 32)  # the shape of what `pairs` returns, in words of 4 bytes
TABLE_BYTES = 256 * 32 * 4


def pairs(table) -> np.ndarray:
    """Returns [256, 32]: for each byte and lane, the bfloat16 values of its low and its high
    code."""
    bits = np.asarray(table, np.float32).astype(jnp.bfloat16).view(np.uint16)
    low, high = np.meshgrid(bits.astype(np.uint32), bits.astype(np.uint32))
    words = (low | high << 16).reshape(256, 1).view(np.int32)
    return np.ascontiguousarray(np.broadcast_to(words, TABLE))


class Code(NamedTuple):
    """Instructions, and the numbers that they multiply and add."""

    text: str
    lines: tuple[tuple[float, float], ...] = ()  # slope and start for $0 and for $1
    bits: int = 8  # of a code
    offset: int = 0  # by which a zero point's bits are flipped
    unit: float = 0.0  # the slope that makes a value of a zero point's bits


def power(fmt: Format, is_scaled: bool) -> int:
    """Decoded values are smaller than the codes by 2**power; `is_scaled` says whether scales of
    groups are in the slopes and starts."""
    if not _row(fmt).units:
        return 0
    # 45 leaves half of the exponents to a scale; 6 makes the slope 2**127, the largest.
    return 45 if is_scaled else 6


def code(fmt: Format, is_scaled: bool = False) -> Code:
    """Returns the instructions that decode a format, and (slope, start) of both columns
    where it has them."""
    row, bits = _row(fmt), dtype_bits(fmt.dtype)
    if fmt.table is not None:
        return Code("{" + (row.rows or "") + "}", bits=bits)
    one = 2.0 ** -power(fmt, is_scaled)
    lines = tuple((2.0**133 / unit * one, -row.offset * one) for unit in row.units)
    text = "{.reg .b32 p; mov.b32 p, $2;" + (row.rows or "") + "}"
    return Code(text, lines, bits, row.offset, 2.0**133 * one)


def _row(fmt: Format) -> decoding.Decoder:
    row = decoding.decoder(fmt)
    assert row is not None and row.rows, f"{fmt} has no decoding for Hopper"
    return row


def is_small_float(fmt: Format) -> bool:
    """Whether codes are e2m1, which a scale in bfloat16 leaves almost always exact."""
    return fmt.dtype == jnp.float4_e2m1fn


def values(bytes_KB: jax.Array, fmt: Format) -> jax.Array:
    """Returns [K, N] in bfloat16: what the bytes of a block stand for, for the interpreter."""
    planes = decoding.planes(bytes_KB, fmt, jnp.bfloat16)
    return jnp.stack(planes, -1).reshape(bytes_KB.shape[0], -1)
