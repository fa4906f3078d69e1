"""Packing: codes at their own width, for files.

In memory a code sits in the next container, and XLA may give it a whole byte. On disk every
format takes the bits it has: codes are laid end to end, the first in the lowest bits.

    int4  two to a byte     int3  eight in three bytes     int1  eight to a byte
"""

import math

import numpy as np

from midtread.numerics.formats import Format


def pack(codes: np.ndarray, fmt: Format) -> np.ndarray:
    """Codes as bytes: ceil(number of codes * bits / 8) of them.

    >>> from midtread.numerics.formats import FORMATS
    >>> pack(np.array([1, -1, 2], np.int8), FORMATS["int4"]).tolist()
    [241, 2]
    """
    codes = np.ascontiguousarray(codes).ravel()
    raw = codes.view(np.uint16 if fmt.bits == 16 else np.uint8)
    bits = raw[:, None] >> np.arange(fmt.bits, dtype=raw.dtype) & 1
    return np.packbits(bits.astype(np.uint8), bitorder="little")


def unpack(packed: np.ndarray, fmt: Format, shape: tuple[int, ...]) -> np.ndarray:
    """The codes again, in the format's container."""
    count = math.prod(shape)
    expected = math.ceil(count * fmt.bits / 8)
    if packed.dtype != np.uint8 or packed.size != expected:
        raise ValueError(
            f"{count} codes of {fmt.name} take {expected} bytes, but there are "
            f"{packed.size} of {packed.dtype}."
        )
    bits = np.unpackbits(packed, count=count * fmt.bits, bitorder="little")
    wide = np.uint16 if fmt.bits == 16 else np.uint8
    weights = (1 << np.arange(fmt.bits)).astype(np.int64)
    raw = bits.reshape(count, fmt.bits) @ weights
    if fmt.codes is not None and fmt.codes[0] < 0:  # two's complement of `bits` bits
        raw = np.where(raw >= 1 << (fmt.bits - 1), raw - (1 << fmt.bits), raw)
        return (
            raw.astype(np.int16 if fmt.bits == 16 else np.int8)
            .astype(fmt.dtype)
            .reshape(shape)
        )
    return raw.astype(wide).view(fmt.dtype).reshape(shape)
