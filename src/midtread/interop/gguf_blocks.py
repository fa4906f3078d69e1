"""GGUF blocks: the ways llama.cpp lays codes and their scales into bytes.

A row of a tensor is cut into blocks of 32 or 256 neighbours, and every block is one small
record: scales first or last, codes packed in between. All of them say the same sentence,

    x  =  scale * code  +  offset            one scale (and offset) per `tile` neighbours

and differ in where the bits lie. So a kind of block is one row of `BLOCKS`: its sizes, the
format its codes have here, and a pair of functions between bytes and (code, scale, offset).

    kind   block  bytes  code     scale                      offset
    Q4_0     32     18   -8..7    f16                        none
    Q4_1     32     20   0..15    f16                        f16
    Q5_0     32     22   -16..15  f16                        none
    Q5_1     32     24   0..31    f16                        f16
    Q8_0     32     34   int8     f16                        none
    Q2_K    256     84   0..3     f16 * 4 bits, per 16       -f16 * 4 bits
    Q3_K    256    110   -4..3    f16 * (6 bits - 32), 16    none
    Q4_K    256    144   0..15    f16 * 6 bits, per 32       -f16 * 6 bits
    Q5_K    256    176   0..31    f16 * 6 bits, per 32       -f16 * 6 bits
    Q6_K    256    210   -32..31  f16 * int8, per 16         none
    MXFP4    32     17   e2m1     2^(e - 127)                none

A QArray says (code - zero_point) * scale. Unsigned codes become signed ones by subtracting
half their range, which every kernel for integers takes, and an offset becomes the zero
point -offset / scale: a fraction, kept in float32. That quotient is rounded, so a value of a
block with offsets may differ from llama.cpp's in its last bit; `to_floats` computes as
llama.cpp does, and blocks without offsets agree bit for bit either way.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import ml_dtypes
import numpy as np

from midtread.numerics.formats import FORMATS
from midtread.numerics.qarray import QArray


class Parts(NamedTuple):
    """What blocks hold: x = scale * code + offset.

    Args:
        code: [blocks, size], as the file counts them (0..15 for Q4_1), in int8 or e2m1.
        scale: float32 [blocks, size / tile].
        offset: float32 like `scale`, or None.
    """

    code: np.ndarray
    scale: np.ndarray
    offset: np.ndarray | None = None


@dataclasses.dataclass(frozen=True)
class Block:
    """One kind of block.

    Args:
        number: the file's name for it.
        size: elements in a block.
        nbytes: bytes of a block.
        tile: elements that share a scale.
        qtype: the format that its codes have here.
        read: Parts of blocks, from bytes [blocks, nbytes].
    """

    name: str
    number: int
    size: int
    nbytes: int
    tile: int
    qtype: str
    read: Callable[[np.ndarray], Parts]


# --- bits ------------------------------------------------------------------------------------


def _half(raw: np.ndarray) -> np.ndarray:
    """Two bytes of each block as a float32 [blocks, 1]."""
    return np.ascontiguousarray(raw).view("<f2").astype(np.float32)


def _planes(raw: np.ndarray, bits: int) -> np.ndarray:
    """Bytes [..., n] as [..., 8 / bits, n]: the lowest bits of all of them come first."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    return raw[..., None, :] >> shifts & np.uint8((1 << bits) - 1)


def _flat(code: np.ndarray) -> np.ndarray:
    return code.reshape(len(code), -1).astype(np.int8)


def _fifth_bits(raw: np.ndarray) -> np.ndarray:
    """Four bytes of each block as 32 bits, [blocks, 32]."""
    return np.unpackbits(np.ascontiguousarray(raw), axis=1, bitorder="little")


# --- blocks of 32 ----------------------------------------------------------------------------


def _read_q4_0(raw: np.ndarray) -> Parts:
    return Parts(_flat(_planes(raw[:, 2:], 4)) - np.int8(8), _half(raw[:, :2]))


def _read_q4_1(raw: np.ndarray) -> Parts:
    return Parts(_flat(_planes(raw[:, 4:], 4)), _half(raw[:, :2]), _half(raw[:, 2:4]))


def _five_bits(high: np.ndarray, low: np.ndarray) -> np.ndarray:
    return _flat(_planes(low, 4)) | (_fifth_bits(high).astype(np.int8) << 4)


def _read_q5_0(raw: np.ndarray) -> Parts:
    return Parts(_five_bits(raw[:, 2:6], raw[:, 6:]) - np.int8(16), _half(raw[:, :2]))


def _read_q5_1(raw: np.ndarray) -> Parts:
    code = _five_bits(raw[:, 4:8], raw[:, 8:])
    return Parts(code, _half(raw[:, :2]), _half(raw[:, 2:4]))


def _read_q8_0(raw: np.ndarray) -> Parts:
    return Parts(raw[:, 2:].view(np.int8), _half(raw[:, :2]))


def _read_mxfp4(raw: np.ndarray) -> Parts:
    code = _planes(raw[:, 1:], 4).reshape(len(raw), 32).view(ml_dtypes.float4_e2m1fn)
    return Parts(code, np.ldexp(np.float32(1), raw[:, :1].astype(np.int32) - 127))


# --- blocks of 256: scales are themselves integers, under one or two float16 -----------------


def _six_bits(raw: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Twelve bytes as eight scales and eight minima of 6 bits. The first four of either
    are the low bits of bytes 0-3 and 4-7, whose two top bits belong to the last four;
    those have their other bits in bytes 8-11, scales low and minima high."""
    first, second, third = np.split(raw, 3, axis=1)
    scale = np.concatenate([first & 63, third & 15 | first >> 6 << 4], axis=1)
    least = np.concatenate([second & 63, third >> 4 | second >> 6 << 4], axis=1)
    return scale.astype(np.float32), least.astype(np.float32)


def _read_q2_k(raw: np.ndarray) -> Parts:
    scales, codes = raw[:, :16], raw[:, 16:80]
    d, least = _half(raw[:, 80:82]), _half(raw[:, 82:84])
    code = _planes(codes.reshape(-1, 2, 32), 2)
    scale = d * (scales & 15).astype(np.float32)
    return Parts(_flat(code), scale, -(least * (scales >> 4).astype(np.float32)))


def _read_q3_k(raw: np.ndarray) -> Parts:
    mask, codes, scales, d = raw[:, :32], raw[:, 32:96], raw[:, 96:108], raw[:, 108:]
    high = _planes(mask, 1).reshape(-1, 2, 4, 32)  # bit b of byte i is for 32 b + i
    code = _flat(_planes(codes.reshape(-1, 2, 32), 2)) | _flat(high) << 2
    low = _planes(scales[:, :8], 4).reshape(-1, 16)
    top = _planes(scales[:, 8:], 2).reshape(-1, 16)
    scale = (low | top << 4).astype(np.float32) - 32
    return Parts(code - np.int8(4), _half(d) * scale)


def _read_q4_k(raw: np.ndarray) -> Parts:
    scale, least = _six_bits(raw[:, 4:16])
    code = _planes(raw[:, 16:].reshape(-1, 4, 32), 4)
    return Parts(_flat(code), _half(raw[:, :2]) * scale, -(_half(raw[:, 2:4]) * least))


def _read_q5_k(raw: np.ndarray) -> Parts:
    scale, least = _six_bits(raw[:, 4:16])
    high = _flat(_planes(raw[:, 16:48], 1))  # bit b of byte i is for 32 b + i
    code = _flat(_planes(raw[:, 48:].reshape(-1, 4, 32), 4)) | high << 4
    return Parts(code, _half(raw[:, :2]) * scale, -(_half(raw[:, 2:4]) * least))


def _read_q6_k(raw: np.ndarray) -> Parts:
    low = _planes(raw[:, :128].reshape(-1, 2, 64), 4)
    high = _planes(raw[:, 128:192].reshape(-1, 2, 32), 2)
    code = _flat(low) | _flat(high) << 4
    scale = raw[:, 192:208].view(np.int8).astype(np.float32)
    return Parts(code - np.int8(32), _half(raw[:, 208:]) * scale)


ROWS = [
    #     name   number size bytes tile  here    read
    Block("Q4_0",     2,  32,   18,  32, "int4", _read_q4_0),
    Block("Q4_1",     3,  32,   20,  32, "int4", _read_q4_1),
    Block("Q5_0",     6,  32,   22,  32, "int5", _read_q5_0),
    Block("Q5_1",     7,  32,   24,  32, "int5", _read_q5_1),
    Block("Q8_0",     8,  32,   34,  32, "int8", _read_q8_0),
    Block("Q2_K",    10, 256,   84,  16, "int2", _read_q2_k),
    Block("Q3_K",    11, 256,  110,  16, "int3", _read_q3_k),
    Block("Q4_K",    12, 256,  144,  32, "int4", _read_q4_k),
    Block("Q5_K",    13, 256,  176,  32, "int5", _read_q5_k),
    Block("Q6_K",    14, 256,  210,  16, "int6", _read_q6_k),
    Block("MXFP4",   39,  32,   17,  32, "mxfp4", _read_mxfp4),
]  # fmt: skip

BLOCKS = {row.name: row for row in ROWS}


def to_floats(parts: Parts) -> np.ndarray:
    """The values of blocks [blocks, size], rounded where llama.cpp rounds."""
    code = parts.code.astype(np.float32)
    tiles = code.reshape(*parts.scale.shape, -1) * parts.scale[..., None]
    if parts.offset is not None:
        tiles = tiles + parts.offset[..., None]
    return tiles.reshape(code.shape)


def to_qarray(block: Block, parts: Parts, shape: tuple[int, ...]) -> QArray:
    """Blocks as a QArray of numpy arrays, tiled along the last axis of `shape`."""
    tiles = (*shape[:-1], shape[-1] // block.tile)
    code, scale, offset = parts
    fmt = FORMATS[block.qtype]
    if offset is None:
        code = code.astype(fmt.dtype, copy=False)
        return QArray(code.reshape(shape), scale.reshape(tiles), None, fmt.qtype)
    # A tile of scale 0 is its offset alone, which no zero point says: let its codes be 0
    # and its scale the offset, so that (0 - -1) * offset.
    flat = (scale == 0) & (offset != 0)
    code = np.where(np.repeat(flat, block.tile, axis=1), np.int8(0), code)
    scale = np.where(flat, offset, scale)
    zero_point = np.divide(-offset, scale, out=np.zeros_like(scale), where=scale != 0)
    half = 1 << (fmt.bits - 1)
    code = (code - np.int8(half)).astype(fmt.dtype)
    zero_point = (zero_point - np.float32(half)).reshape(tiles)
    return QArray(code.reshape(shape), scale.reshape(tiles), zero_point, fmt.qtype)
