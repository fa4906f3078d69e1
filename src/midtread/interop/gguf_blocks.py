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

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from midtread.interop import layouts
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
        encode: bytes [blocks, nbytes] of float32 values [blocks, size], to the nearest;
            None for kinds that are read alone.
    """

    name: str
    number: int
    size: int
    nbytes: int
    tile: int
    qtype: str
    read: Callable[[np.ndarray], Parts]
    encode: Callable[[np.ndarray], np.ndarray] | None = None


# --- bits ------------------------------------------------------------------------------------


def _half(raw: np.ndarray) -> np.ndarray:
    """Returns two bytes of each block as a float32 [blocks, 1]."""
    return np.ascontiguousarray(raw).view("<f2").astype(np.float32)


def _planes(raw: np.ndarray, bits: int) -> np.ndarray:
    """Returns bytes [..., n] as [..., 8 / bits, n]: the lowest bits of all of them come
    first."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    return raw[..., None, :] >> shifts & np.uint8((1 << bits) - 1)


def _flat(code: np.ndarray) -> np.ndarray:
    return code.reshape(len(code), -1).astype(np.int8)


# --- blocks of 32 ----------------------------------------------------------------------------


def _read_32(raw: np.ndarray, bits: int, is_affine: bool) -> Parts:
    """Reads a scale, perhaps an offset, the fifth bits of all codes, and then the low four."""
    scale, rest = _half(raw[:, :2]), raw[:, 4 if is_affine else 2 :]
    code = _flat(_planes(rest[:, -16:], 4))
    if bits == 5:
        code |= _flat(np.unpackbits(rest[:, :4], axis=1, bitorder="little")) << 4
    if is_affine:
        return Parts(code, scale, _half(raw[:, 2:4]))
    return Parts(code - np.int8(1 << (bits - 1)), scale)


def _read_q8_0(raw: np.ndarray) -> Parts:
    return Parts(raw[:, 2:].view(np.int8), _half(raw[:, :2]))


def _read_mxfp4(raw: np.ndarray) -> Parts:
    code = _planes(raw[:, 1:], 4).reshape(len(raw), 32).view(ml_dtypes.float4_e2m1fn)
    return Parts(code, np.ldexp(np.float32(1), raw[:, :1].astype(np.int32) - 127))


# --- blocks of 256: scales are themselves integers, under one or two float16 -----------------


def _six_bits(raw: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns twelve bytes as eight scales and eight minima of 6 bits. The first four of
    either are the low bits of bytes 0-3 and 4-7, whose two top bits belong to the last four;
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


# --- writing: the nearest code under scales that are chosen first ----------------------------

_TINY = np.float32(1e-30)


def _inverse(d: np.ndarray) -> np.ndarray:
    return np.divide(1, d, out=np.zeros_like(d), where=d != 0)


def _halves(*numbers: np.ndarray) -> np.ndarray:
    """Numbers [blocks, 1] as bytes of float16, side by side."""
    joined = np.concatenate([n.reshape(-1, 1) for n in numbers], axis=1)
    return np.clip(joined, -65504, 65504).astype("<f2").view(np.uint8)


def _packed(code: np.ndarray, bits: int, *planes: int) -> np.ndarray:
    """Returns what `_planes` undoes: codes [blocks, n] as bytes, [*planes] runs to a block."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    code = code.astype(np.uint8) & np.uint8((1 << bits) - 1)
    code = code.reshape(len(code), *planes, 8 // bits, -1) << shifts
    return np.bitwise_or.reduce(code, axis=-2).reshape(len(code), -1)


def _away(x: np.ndarray) -> np.ndarray:
    """Rounds to whole numbers, halves away from zero, as C's roundf does."""
    return np.trunc(x + np.copysign(0.5, x))


def _packed_32(code: np.ndarray, bits: int, *heads: np.ndarray) -> np.ndarray:
    """Returns what `_read_32` undoes, of unsigned codes, and `_read_q8_0`, of signed ones."""
    if bits == 8:
        return np.concatenate([_halves(*heads), code.view(np.uint8)], axis=1)
    fifth = [np.packbits(code >> 4 & 1, axis=1, bitorder="little")]
    parts = [_halves(*heads), *(fifth if bits == 5 else []), _packed(code, 4)]
    return np.concatenate(parts, axis=1)


def _encode_symmetric(x: np.ndarray, bits: int) -> np.ndarray:
    """Returns blocks of 32 without offsets: the value of largest magnitude gets the lowest
    code."""
    largest = np.take_along_axis(x, np.abs(x).argmax(-1, keepdims=True), -1)
    half = 1 << (bits - 1)
    d = largest / np.float32(-half)
    units = x.astype(np.float64) * _inverse(d).astype(np.float64)
    code = np.trunc(units + (half + 0.5)).clip(0, 2 * half - 1).astype(np.uint8)
    return _packed_32(code, bits, d)


def _encode_affine(x: np.ndarray, bits: int) -> np.ndarray:
    """Returns blocks of 32 with offsets: the lowest value gets code 0, the highest the last."""
    low, high = x.min(-1, keepdims=True), x.max(-1, keepdims=True)
    d = (high - low) / np.float32((1 << bits) - 1)
    units = (x - low).astype(np.float64) * _inverse(d).astype(np.float64)
    code = np.trunc(units + 0.5).clip(0, (1 << bits) - 1).astype(np.uint8)
    return _packed_32(code, bits, d, low)


def _encode_q8_0(x: np.ndarray) -> np.ndarray:
    d = np.abs(x).max(-1, keepdims=True) / np.float32(127)
    return _packed_32(_away(x * _inverse(d)).astype(np.int8), 8, d)


def _encode_mxfp4(x: np.ndarray) -> np.ndarray:
    largest = np.abs(x).max(-1, keepdims=True)
    if not np.isfinite(largest).all():
        raise ValueError("holds numbers that are NaN or infinite.")
    exponent = np.frexp(largest)[1] - 1 - 2  # 2^2 is the largest power of e2m1
    exponent = np.where(largest > 0, exponent, -127).clip(-127, 127)
    units = x / np.ldexp(np.float32(1), exponent)
    code = np.zeros(x.shape, np.uint8)
    for middle in (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0):  # a tie goes to the smaller
        code += np.abs(units) > np.float32(middle)
    code |= ((units < 0) & (code > 0)).astype(np.uint8) << 3
    head = (exponent + 127).astype(np.uint8)
    return np.concatenate([head, _packed(code, 4)], axis=1)


AT_ONCE = 1 << 17  # elements, which stay in a CPU's cache while they are searched


def _searched(search: Callable, x: np.ndarray, bits: int) -> list[np.ndarray]:
    """Applies `search` to blocks [n, 256], compiled for `AT_ONCE` elements: the last are
    filled up."""
    whole = np.zeros((AT_ONCE // 256, 256), np.float32)
    whole[: len(x)] = x
    return [np.asarray(part)[: len(x)] for part in search(whole, bits)]


def _over(a: jax.Array, b: jax.Array) -> jax.Array:
    """Returns a / b, and 0 where b is."""
    return jnp.where(b != 0, a / jnp.where(b != 0, b, 1), 0)


def _as_half(d: jax.Array) -> jax.Array:
    """Returns a number as it will be read."""
    return jnp.clip(d, -65504, 65504).astype(jnp.float16).astype(jnp.float32)


def _fit_affine(x: jax.Array, most: int, steps: int = 8):
    """Returns scale and minimum of tiles [..., t], x ~ scale * code - least, least >= 0.

    Of several windows around the values' own, each refitted by least squares to the codes
    that it gives, the one that loses least; large values weigh more.
    """
    add = lambda part: part.sum(-1, keepdims=True)
    weight = jnp.abs(x) + jnp.sqrt((x * x).mean(-1, keepdims=True))
    low = jnp.minimum(x.min(-1, keepdims=True), 0)
    span = x.max(-1, keepdims=True) - low
    best = (span / most, -low)
    least_loss = jnp.full(low.shape, jnp.inf)
    total, sum_x = add(weight), add(weight * x)
    for step in np.linspace(-0.9, 0.9, steps + 1, dtype=np.float32):
        units = (x - low) * (most + step) / jnp.maximum(span, _TINY)
        code = jnp.clip(jnp.round(units), 0, most)
        sum_l, sum_l2 = add(weight * code), add(weight * code * code)
        sum_xl = add(weight * x * code)
        spread = total * sum_l2 - sum_l * sum_l
        ok = spread > 0
        scale = _over(total * sum_xl - sum_x * sum_l, jnp.where(ok, spread, 1))
        floor = _over(sum_l2 * sum_x - sum_l * sum_xl, jnp.where(ok, spread, 1))
        alone = _over(sum_xl, sum_l2)  # where the minimum would be > 0
        scale, floor = jnp.where(floor > 0, alone, scale), jnp.minimum(floor, 0)
        loss = add(weight * (scale * code + floor - x) ** 2)
        wins = ok & (scale > 0) & (loss < least_loss)
        best = (jnp.where(wins, scale, best[0]), jnp.where(wins, -floor, best[1]))
        least_loss = jnp.where(wins, loss, least_loss)
    return best


def _six_packed(scale: np.ndarray, least: np.ndarray) -> np.ndarray:
    """Returns twelve bytes of eight scales and eight minima of 6 bits: `_six_bits` undoes it."""
    first = scale[:, :4] | scale[:, 4:] >> 4 << 6
    second = least[:, :4] | least[:, 4:] >> 4 << 6
    third = scale[:, 4:] & 15 | (least[:, 4:] & 15) << 4
    return np.concatenate([first, second, third], axis=1)


@jax.jit(static_argnums=1)
def _search_six_bits(x: jax.Array, bits: int):
    """Returns d, dmin [blocks, 1], scales and minima [blocks, 8], codes [blocks, 256]."""
    most = (1 << bits) - 1
    tiles = x.reshape(-1, 8, 32)
    scale, least = (part[..., 0] for part in _fit_affine(tiles, most))
    d = _as_half(scale.max(-1, keepdims=True) / 63)
    dmin = _as_half(least.max(-1, keepdims=True) / 63)
    sixth = lambda part, unit: jnp.clip(jnp.round(_over(part, unit)), 0, 63)
    scale, least = sixth(scale, d), sixth(least, dmin)
    units = _over(tiles + (dmin * least)[..., None], (d * scale)[..., None])
    code = jnp.clip(jnp.round(units), 0, most).astype(jnp.uint8).reshape(-1, 256)
    return d, dmin, scale.astype(jnp.uint8), least.astype(jnp.uint8), code


def _encode_six_bits(x: np.ndarray, bits: int):
    """Returns codes [blocks, 256], and the sixteen bytes before them, of Q4_K and Q5_K."""
    d, dmin, scale, least, code = _searched(_search_six_bits, x, bits)
    return code, np.concatenate([_halves(d, dmin), _six_packed(scale, least)], axis=1)


def _encode_q4_k(x: np.ndarray) -> np.ndarray:
    code, heads = _encode_six_bits(x, 4)
    return np.concatenate([heads, _packed(code, 4, 4)], axis=1)


def _encode_q5_k(x: np.ndarray) -> np.ndarray:
    code, heads = _encode_six_bits(x, 5)
    high = _packed(code >> 4, 1)
    return np.concatenate([heads, high, _packed(code, 4, 4)], axis=1)


@jax.jit(static_argnums=1)
def _search_q6_k(x: jax.Array, bits: int):
    """Returns d [blocks, 1], scales [blocks, 16], codes [blocks, 256]."""
    half = 1 << (bits - 1)
    tiles = x.reshape(-1, 16, 16)
    add = lambda part: part.sum(-1, keepdims=True)
    high, low = tiles.max(-1, keepdims=True), tiles.min(-1, keepdims=True)
    largest = jnp.where(high >= -low, high, low)
    weight = tiles * tiles
    best = largest / -half
    most = jnp.full(best.shape, -jnp.inf)
    for step in np.linspace(-0.9, 0.9, 10, dtype=np.float32):
        code = jnp.round(_over(tiles * -(half + step), largest)).clip(-half, half - 1)
        sum_xl, sum_l2 = add(weight * tiles * code), add(weight * code * code)
        gain = _over(sum_xl * sum_xl, sum_l2)  # what the best scale takes off the loss
        wins = gain > most
        best = jnp.where(wins, _over(sum_xl, sum_l2), best)
        most = jnp.where(wins, gain, most)
    best = best[..., 0]
    top = jnp.abs(best).argmax(-1, keepdims=True)
    d = _as_half(jnp.take_along_axis(best, top, -1) / -128)
    scale = jnp.round(_over(best, d)).clip(-128, 127)
    code = jnp.round(_over(tiles, (d * scale)[..., None])).clip(-half, half - 1) + half
    return d, scale.astype(jnp.int8), code.astype(jnp.uint8).reshape(-1, 256)


def _encode_q6_k(x: np.ndarray) -> np.ndarray:
    d, scale, code = _searched(_search_q6_k, x, 6)
    low = _packed(code, 4, 2)
    high = _packed(code >> 4, 2, 2)
    return np.concatenate([low, high, scale.view(np.uint8), _halves(d)], axis=1)


def _of_32(bits: int, is_affine: bool) -> tuple[Callable, Callable]:
    """Returns reader and writer of blocks of 32 codes of 4 or 5 bits."""
    encode = _encode_affine if is_affine else _encode_symmetric
    return (
        lambda raw: _read_32(raw, bits, is_affine),
        lambda x: encode(x, bits),
    )


ROWS = [
    #     name   number size bytes tile  here     read        write
    Block("Q4_0",     2,  32,   18,  32, "int4",  *_of_32(4, is_affine=False)),
    Block("Q4_1",     3,  32,   20,  32, "int4",  *_of_32(4, is_affine=True)),
    Block("Q5_0",     6,  32,   22,  32, "int5",  *_of_32(5, is_affine=False)),
    Block("Q5_1",     7,  32,   24,  32, "int5",  *_of_32(5, is_affine=True)),
    Block("Q8_0",     8,  32,   34,  32, "int8",  _read_q8_0, _encode_q8_0),
    Block("Q2_K",    10, 256,   84,  16, "int2",  _read_q2_k),
    Block("Q3_K",    11, 256,  110,  16, "int3",  _read_q3_k),
    Block("Q4_K",    12, 256,  144,  32, "int4",  _read_q4_k, _encode_q4_k),
    Block("Q5_K",    13, 256,  176,  32, "int5",  _read_q5_k, _encode_q5_k),
    Block("Q6_K",    14, 256,  210,  16, "int6",  _read_q6_k, _encode_q6_k),
    Block("MXFP4",   39,  32,   17,  32, "mxfp4", _read_mxfp4, _encode_mxfp4),
]  # fmt: skip

BLOCKS = {row.name: row for row in ROWS}


def to_floats(parts: Parts) -> np.ndarray:
    """Returns the values of blocks [blocks, size], rounded where llama.cpp rounds."""
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
    q = layouts.affine(code.view(np.uint8), scale, offset, fmt.bits)
    return q.map(lambda x: x.reshape(shape if x.shape == code.shape else tiles))


# QArrays whose codes a kind of block holds as they are: format, with a zero point or not
EXACT = {
    ("int4", False): "Q4_0", ("int4", True): "Q4_1", ("int5", False): "Q5_0",
    ("int5", True): "Q5_1", ("int8", False): "Q8_0", ("mxfp4", False): "MXFP4",
}  # fmt: skip


def kind_of(q: QArray) -> str | None:
    """Returns the kind of block that holds a QArray's codes as they are; None without one."""
    is_tiled = q.ndim >= 2 and q.scale_tile_shape[-1] == 32
    if not is_tiled or any(t != 1 for t in q.scale_tile_shape[:-1]):
        return None
    return EXACT.get((q.format.name, q.zero_point is not None))


def write_codes(q: QArray) -> np.ndarray:
    """Returns bytes [blocks, nbytes] of a QArray that `kind_of` has a kind for: the same
    codes, and scales (and offsets) rounded to float16."""
    name = kind_of(q)
    assert name is not None
    codes = np.asarray(q.qvalue).reshape(-1, 32)
    scale = np.asarray(q.scale, np.float32).reshape(-1, 1)
    if name == "MXFP4":
        head = scale.astype(ml_dtypes.float8_e8m0fnu).view(np.uint8)
        return np.concatenate([head, _packed(codes.view(np.uint8), 4)], axis=1)
    bits, heads = q.format.bits, [scale]
    if bits < 8:
        codes = (codes.astype(np.int8) + np.int8(1 << (bits - 1))).astype(np.uint8)
    if q.zero_point is not None:
        zero = np.asarray(q.zero_point).astype(np.float32).reshape(-1, 1)
        heads.append(-(zero + (1 << (bits - 1))) * scale)
    return _packed_32(codes, bits, *heads)
