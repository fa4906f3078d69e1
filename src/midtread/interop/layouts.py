"""Layouts: how others lay one quantized weight into several tensors, and what they share.

A weight `x.weight` [rows, columns] that someone has quantized is a handful of tensors
(`x.weight_packed`, `x.weight_scale`, ...). Every layout is a file of this folder with

    find(tensors, config)   which weights a folder holds in this layout, as `Weight`s: the
                            tensors each needs, its shape, and how to make a QArray of them
    write(q)                the tensors of a QArray, by the ends of their names
    config(...)             what others want to read in config.json about them

Nothing is dequantized on the way: a code stays the code it is. Two habits keep the number
of kinds small. Unsigned codes become signed by subtracting half their range, from a zero
point as well, so that int4 is one format whoever wrote it. And a zero point that is 0
everywhere after that is none.

Groups whose members are not neighbours (`desc_act`, `g_idx`) have a scale for every column:
see `by_column`. In memory that is 2 bytes of scale for 4 bits of code, more than bfloat16
takes, and whoever imports such a folder is told so.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from midtread.numerics.formats import FORMATS, Format
from midtread.numerics.packing import pack_bits, unpack_bits
from midtread.numerics.qarray import QArray

Arrays = Mapping[str, np.ndarray]


class Weight(NamedTuple):
    """A quantized weight of a folder.

    Args:
        shape: of its values, as the float weight would have it.
        tensors: what it is made of, by role: {"packed": "x.weight_packed", ...}.
        read: the QArray, from arrays by role.
        dtypes: what each of these may be stored as, by role.
    """

    shape: tuple[int, ...]
    tensors: dict[str, str]
    read: Callable[[Arrays], QArray]
    dtypes: Mapping[str, Sequence[str]]

    def check_dtypes(self, stored: Mapping[str, Any]) -> None:
        """Raises a ValueError that names the first tensor that is stored as something else.

        Args:
            stored: the folder's tensors, by name.
        """
        for role, name in self.tensors.items():
            dtype, wanted = np.dtype(stored[name].dtype).name, self.dtypes[role]
            if dtype not in wanted:
                raise refuse(name, f"is {dtype}, and should be {' or '.join(wanted)}")


# of scales, of 32-bit words of codes, and of numbers of groups, wherever they are
FLOATS = ("float16", "bfloat16", "float32", "float64")
WORDS = ("int32",)
NUMBERS = ("int32", "int64")


class Found(NamedTuple):
    """What a layout finds in a folder.

    Args:
        weights: by the name that the float tensor would have.
        unused: tensors that say nothing about weights (scales of activations).
        notes: sentences for whoever imports: what the folder asks for and is not done.
        activations: by weight, the format that its other operand is to be quantized to in
            every batch, and the columns that share a scale there (None: all).
    """

    weights: dict[str, Weight]
    unused: frozenset[str] = frozenset()
    notes: tuple[str, ...] = ()
    activations: Mapping[str, tuple[str, int | None]] = {}


def refuse(where: str, what: str) -> ValueError:
    return ValueError(f"{where}: {what}.")


def expect(where: str, name: str, got: Any, want: Any) -> None:
    """Raises a ValueError if two shapes or dtypes differ."""
    if got != want:
        raise refuse(where, f"its {name} is {got}, and should be {want}")


# --- floats of four bits ---------------------------------------------------------------------

E4M3, E2M1 = np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float4_e2m1fn)


def e2m1(packed: np.ndarray) -> np.ndarray:
    """Returns codes of four bits, two to a byte, the first in the low bits."""
    return unpack_bits(packed, 4, packed.shape[-1] * 2).view(E2M1)


def mxfp4(codes: np.ndarray, exponents: np.ndarray) -> QArray:
    """Returns a QArray of e2m1 codes under biased exponents in uint8."""
    scale = exponents.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    return QArray(codes, scale, None, "mxfp4")


def exponents(scale: np.ndarray, where: str) -> np.ndarray:
    """Powers of two as biased exponents in uint8.

    Raises:
        ValueError: a scale is no power of two.
    """
    raw = scale.astype(ml_dtypes.float8_e8m0fnu)
    if not np.array_equal(raw.astype(np.float32), scale):
        raise refuse(where, "its scales are not powers of two")
    return raw.view(np.uint8)


# --- integers --------------------------------------------------------------------------------


def is_signed(fmt: Format, bits: Any) -> bool:
    """Whether a format is signed integers of one of these numbers of bits."""
    return fmt.codes is not None and fmt.codes[0] < 0 and fmt.bits in bits


def unpack_words(words: np.ndarray, bits: int, count: int, axis: int = -1):
    """Returns codes, as unsigned numbers, from 32-bit words along `axis`: the first in the
    lowest bits, and across words where the bits do not divide 32."""
    words = np.ascontiguousarray(np.moveaxis(words, axis, -1)).view(np.uint8)
    return np.moveaxis(unpack_bits(words, bits, count), -1, axis)


def pack_words(raw: np.ndarray, bits: int, axis: int = -1) -> np.ndarray:
    """Returns unsigned codes as int32 words along `axis`; the last word is filled up with
    zeros."""
    raw = np.moveaxis(raw, axis, -1)
    packed = pack_bits(raw, bits)
    missing = -packed.shape[-1] % 4
    packed = np.pad(packed, [(0, 0)] * (packed.ndim - 1) + [(0, missing)])
    words = np.ascontiguousarray(packed).view("<i4")
    return np.ascontiguousarray(np.moveaxis(words, -1, axis))


def num_words(count: int, bits: int) -> int:
    """Returns how many 32-bit words `pack_words` makes of `count` codes."""
    return -(-count * bits // 32)


def signed(raw: np.ndarray, bits: int) -> np.ndarray:
    """Returns unsigned codes, less half their range, in the container of int<bits>."""
    codes = (raw ^ np.uint8(1 << (bits - 1))) << np.uint8(8 - bits)
    return (codes.view(np.int8) >> np.int8(8 - bits)).astype(
        FORMATS[f"int{bits}"].dtype
    )


def unsigned(codes: np.ndarray, bits: int) -> np.ndarray:
    """Returns signed codes, plus half their range, in uint8."""
    half = np.uint8(1 << (bits - 1))
    return (codes.view(np.uint8) + half) & np.uint8((1 << bits) - 1)


def integers(codes, scale, zero_point, bits: int) -> QArray:
    """Returns a QArray of signed codes; a zero point that is 0 everywhere is left out."""
    if zero_point is not None and not np.any(zero_point.astype(np.float32)):
        zero_point = None
    return QArray(codes, scale, zero_point, FORMATS[f"int{bits}"].qtype)


def affine(raw, scale, offset, bits: int) -> QArray:
    """Returns a QArray that says  x = scale * raw + offset  with unsigned codes `raw`.

    The offset becomes the zero point -offset / scale, a fraction.

    Args:
        raw: uint8 [..., columns].
        scale: [..., groups].
        offset: like `scale`.
        bits: of a code.
    """
    wide, offset = scale.astype(np.float32), offset.astype(np.float32)
    # A group of scale 0 is its offset alone, which no zero point says: let its codes be 0
    # and its scale the offset, so that (0 - -1) * offset.
    flat = (wide == 0) & (offset != 0)
    size = raw.shape[-1] // scale.shape[-1]
    raw = np.where(np.repeat(flat, size, axis=-1), np.uint8(0), raw)
    wide = np.where(flat, offset, wide)
    zero = np.divide(-offset, wide, out=np.zeros_like(wide), where=wide != 0)
    zero = zero - np.float32(1 << (bits - 1))
    scale = np.where(flat, offset.astype(scale.dtype), scale)
    return integers(signed(raw, bits), scale, zero, bits)


# --- scales in float16 -----------------------------------------------------------------------

LARGEST = float(np.finfo(np.float16).max)
COARSE = 3e-6  # below it, float16 is wrong by a hundredth and more; below 3e-8 it is 0
_MAGNITUDES = {2: np.uint16(0x7FFF), 4: np.uint32(0x7FFFFFFF)}


def in_half(scale: np.ndarray, where: str) -> np.ndarray:
    """Returns scales in float16, where a layout has them so.

    Raises:
        ValueError: a scale is beyond its largest number.
    """
    most = float(np.abs(scale.astype(np.float32)).max())
    if not most <= LARGEST:
        raise refuse(where, f"its scale {most:.3g} is beyond float16, which has scales")
    return scale.astype(np.float16)


def num_coarse(scale: np.ndarray) -> int:
    """How many scales float16 rounds coarsely, or to 0."""
    small = np.abs(scale.astype(np.float32))
    return int(np.count_nonzero((small > 0) & (small < COARSE)))


def largest_of_groups(x: np.ndarray, size: int) -> np.ndarray:
    """Returns the largest magnitude of every `size` neighbours, in float32.

    Bits of a float without its sign are in the order of magnitudes, and numpy compares
    integers much faster than bfloat16.
    """
    if x.dtype.itemsize not in _MAGNITUDES:
        return np.abs(x.reshape(-1, size)).max(1).astype(np.float32)
    mask = _MAGNITUDES[x.dtype.itemsize]
    bits = np.ascontiguousarray(x).view(mask.dtype).reshape(-1, size) & mask
    return bits.max(1).view(x.dtype).astype(np.float32)


# --- groups ----------------------------------------------------------------------------------


def is_in_order(group_of: np.ndarray, size: int) -> bool:
    """Whether groups are runs of `size` columns, the first first."""
    return np.array_equal(group_of, np.arange(len(group_of)) // size)


SCATTERED = (
    "Groups of columns are no neighbours here (desc_act, actorder): in memory every weight "
    "has a scale of its own, 2 bytes or 4 beside its code. Without it there is one for a group."
)


def by_column(q: QArray, group_of: np.ndarray) -> QArray:
    """Returns a scale (and zero point) for every column, where groups are not neighbours.

    Args:
        q: codes [rows, columns] whose parts have [rows, groups].
        group_of: the group of each column.
    """
    take = lambda part: None if part is None else part[:, group_of]
    return q.replace(scale=take(q.scale), zero_point=take(q.zero_point))


def asks_of_inputs(q: QArray) -> bool:
    """Whether its inputs are multiplied by something before it, which no layout can say."""
    return q.pre_scale is not None or q.pre_rotation is not None


def group_size(q: QArray, where: str) -> int:
    """How many columns share a scale, in an array whose rows each have their own.

    Raises:
        ValueError: the array is not a matrix with scales of that kind.
    """
    if q.ndim != 2 or q.logical is not None or asks_of_inputs(q):
        raise refuse(
            where,
            f"{q!r} is no plain matrix: padded, pre-scaled and rotated ones stay here",
        )
    rows, columns = q.scale_tile_shape
    if rows != 1 and q.shape[0] != 1:
        raise refuse(
            where,
            f"one scale is for {rows} rows and {columns} columns; this layout has a scale "
            "for every row",
        )
    return columns
