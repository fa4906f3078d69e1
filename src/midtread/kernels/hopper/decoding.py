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

from midtread.kernels import decoding
from midtread.numerics.formats import Format

as_bytes = decoding.as_bytes
TABLE = (256, 32)  # words of `pairs`, 4 bytes each
TABLE_BYTES = 256 * 32 * 4


def pairs(table) -> np.ndarray:
    """[256, 32]: the bfloat16 values of both codes of a byte, the low one first."""
    bits = np.asarray(table, np.float32).astype(jnp.bfloat16).view(np.uint16)
    low, high = np.meshgrid(bits.astype(np.uint32), bits.astype(np.uint32))
    words = (low | high << 16).reshape(256, 1).view(np.int32)
    return np.ascontiguousarray(np.broadcast_to(words, TABLE))


class Code(NamedTuple):
    text: str
    lines: tuple[tuple[float, float], ...] = ()  # slope and start for $0 and for $1


def power(fmt: Format, is_scaled: bool) -> int:
    """Values come out times 2**-power; `is_scaled` where slopes and starts are."""
    if not _row(fmt).units:
        return 0
    # with scales half of the exponents; else a slope of 2**127, the largest
    return 45 if is_scaled else 6


def code(fmt: Format, is_scaled: bool = False) -> Code:
    """The instructions, and for integers (slope, start) of both columns."""
    row = _row(fmt)
    if fmt.table is not None:
        return Code("{" + row.rows + "}")
    one, zero = 2.0 ** -power(fmt, is_scaled), 2.0 ** (fmt.bits - 1)
    lines = tuple((2.0**133 / unit * one, -zero * one) for unit in row.units)
    return Code("{.reg .b32 p; mov.b32 p, $2;" + row.rows + "}", lines)


def _row(fmt: Format) -> decoding.Decoder:
    row = decoding.decoder(fmt)
    assert row is not None and row.rows is not None, fmt
    return row


def values(bytes_KB: jax.Array, fmt: Format) -> jax.Array:
    """[K, N] in bfloat16: what the bytes of a block stand for, without PTX."""
    planes = decoding.planes(bytes_KB, fmt, jnp.bfloat16)
    return jnp.stack(planes, -1).reshape(bytes_KB.shape[0], -1)
