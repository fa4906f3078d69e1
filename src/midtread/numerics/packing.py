"""Packing: codes at their own width, for files.

In memory a code sits in the next container, and XLA may give it a whole byte. On disk every
format takes the bits it has: codes are laid end to end, the first in the lowest bits.

    int4  two to a byte     int3  eight in three bytes     int1  eight to a byte

`pack_bits` and `unpack_bits` do this to every row of an array of small numbers: eight codes
of b bits are b bytes, so eight at a time go through one 64-bit word. `pack` and `unpack` do
it to an array of a format's codes as a whole.
"""

import math

import numpy as np

from midtread.numerics.formats import Format


def pack_bits(raw: np.ndarray, bits: int) -> np.ndarray:
    """Lays the lowest `bits` of each number end to end along the last axis.

    Args:
        raw: uint8 [..., n].
        bits: 1 to 8.

    Returns:
        uint8 [..., ceil(n * bits / 8)].

    >>> pack_bits(np.array([1, 2, 3], np.uint8), 4).tolist()
    [33, 3]
    """
    *rows, count = raw.shape
    mask = np.uint8((1 << bits) - 1)
    per_byte, rest = divmod(8, bits)
    if rest == 0 and count % per_byte == 0:  # the same bytes, many times faster
        out = np.ascontiguousarray(raw & mask)
        while bits < 8:  # two neighbours become one, of twice the bits
            pairs = out.view("<u2")
            out, bits = (
                (pairs | pairs >> np.uint16(8 - bits)).astype(np.uint8),
                2 * bits,
            )
        return out
    words = np.zeros((*rows, -(-count // 8)), "<u8")
    for i in range(min(count, 8)):
        every = raw[..., i::8] & mask
        words[..., : every.shape[-1]] |= every.astype("<u8") << np.uint64(bits * i)
    bytes_of_words = words[..., None].view(np.uint8)[..., :bits]
    return bytes_of_words.reshape(*rows, -1)[..., : math.ceil(count * bits / 8)]


def unpack_bits(packed: np.ndarray, bits: int, count: int) -> np.ndarray:
    """Reads back the first `count` numbers of each row, in uint8.

    Args:
        packed: uint8 [..., at least ceil(count * bits / 8)].
        bits: 1 to 8.
        count: how many numbers a row has.

    >>> unpack_bits(np.array([33, 3], np.uint8), 4, 3).tolist()
    [1, 2, 3]
    """
    *rows, size = packed.shape
    per_byte, rest = divmod(8, bits)
    if rest == 0:  # the same numbers, several times faster
        used = packed[..., : -(-count // per_byte)]
        out = np.empty((*used.shape, per_byte), np.uint8)
        for i in range(per_byte):
            out[..., i] = used >> np.uint8(bits * i) & np.uint8((1 << bits) - 1)
        return out.reshape(*rows, -1)[..., :count]
    num_words = -(-count // 8)
    bytes_of_words = np.zeros((*rows, num_words, 8), np.uint8)
    used = min(size, num_words * bits)
    whole = used // bits
    bytes_of_words[..., :whole, :bits] = packed[..., : whole * bits].reshape(
        *rows, whole, bits
    )
    if used % bits:  # the last word is not whole
        bytes_of_words[..., whole, : used % bits] = packed[..., whole * bits : used]
    words = bytes_of_words.view("<u8")[..., 0]
    out = np.empty((*rows, num_words, 8), np.uint8)
    mask = np.uint64((1 << bits) - 1)
    for i in range(8):
        out[..., i] = words >> np.uint64(bits * i) & mask
    return out.reshape(*rows, num_words * 8)[..., :count]


def pack(codes: np.ndarray, fmt: Format) -> np.ndarray:
    """Packs codes into ceil(number of codes * bits / 8) bytes.

    >>> from midtread.numerics.formats import FORMATS
    >>> pack(np.array([1, -1, 2], np.int8), FORMATS["int4"]).tolist()
    [241, 2]
    """
    raw = np.ascontiguousarray(codes).reshape(-1).view(np.uint8)
    return raw if fmt.bits == 16 else pack_bits(raw, fmt.bits)


def unpack(packed: np.ndarray, fmt: Format, shape: tuple[int, ...]) -> np.ndarray:
    """Reads packed codes back into the format's container."""
    count = math.prod(shape)
    expected = math.ceil(count * fmt.bits / 8)
    if packed.dtype != np.uint8 or packed.size != expected:
        raise ValueError(
            f"{count} codes of {fmt.name} take {expected} bytes, but there are "
            f"{packed.size} of {packed.dtype}."
        )
    if fmt.bits == 16:
        return packed.view(fmt.dtype).reshape(shape)
    raw = unpack_bits(packed.reshape(-1), fmt.bits, count)
    if fmt.codes is not None and fmt.codes[0] < 0:  # two's complement of `bits` bits
        free = np.uint8(8 - fmt.bits)
        raw = (raw << free).view(np.int8) >> free.view(np.int8)
        return raw.astype(fmt.dtype).reshape(shape)
    return raw.view(fmt.dtype).reshape(shape)
