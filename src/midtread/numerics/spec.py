"""Spec: how one array is quantized.

Which elements share a scale is said per axis, by the shape of the scale (N is the
axis's extent):

    not mentioned            1        one scale along the axis
    channelwise_axes         N        one scale per index
    tiled_axes {axis: t}     N / t    one scale per t neighbours (t a float: N * t of them)

so for an array [4096, 14336]:

    Spec("int8")                                      scale [1, 1]        per tensor
    Spec("int8", channelwise_axes=(1,))               scale [1, 14336]    per channel
    Spec("int4", channelwise_axes=(1,), tiled_axes={0: 128})   [32, 14336]    sub-channel
    Spec("fp8", tiled_axes={0: 128, 1: 128})          scale [32, 112]     2-D blocks

An extent that its tile does not divide is padded with zeros to whole tiles.

In a Recipe an axis has no number yet; there "kept" stands for every axis the matmul keeps
and "summed" for the whole of its sum: where it sums several axes ([heads, width, out]), a
tile is a run of neighbours in all of them, seen as one axis (`place_tile`). "summed_last"
and "summed_first" are one of them alone. "group" is the axis of experts, which has one scale
per index or one for all. `Contraction.number_axes` replaces these names by numbers.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from midtread.numerics import calibration as calibration_
from midtread.numerics.dtypes import is_wide
from midtread.numerics.formats import Format, as_format
from midtread.numerics.rounding import ROUNDINGS
from midtread.numerics.scales import SCALE_RULES

SYMBOLS = ("kept", "summed", "summed_last", "summed_first", "group")
_SMALL_SCALES = {"e8m0": jnp.float8_e8m0fnu, "e4m3": jnp.float8_e4m3fn}


@dataclasses.dataclass(frozen=True)
class Spec:
    """The format, sharing, calibration and rounding of one operand, checked when built.

    >>> Spec("int4", channelwise_axes=("kept",), tiled_axes={"summed": 128}).format.name
    'int4'

    Args:
        format: a Format, or any name that `as_format` takes.
        channelwise_axes: axes where each index has its own scale: numbers, or "kept".
        tiled_axes: {axis: t}, one scale per t neighbours; a float t is a fraction. It is kept
            as sorted pairs.
        calibration: how the range is found, such as "absmax" or "percentile,99.9".
        rounding: 'nearest' or 'stochastic'.
        noise_axes: axes where each index has its own noise, in Qwix's two stochastic methods.
        scale_dtype: the dtype of the stored scale; None for the dtype of the array.
        scale_rule: how scales are rounded; None for the format's own rule.

    Raises:
        ValueError: Fields that contradict each other or the format.
        TypeError: Axes that are no sequence, or tiles that are no mapping.
    """

    format: Format
    channelwise_axes: tuple[int | str, ...] = ()
    tiled_axes: Any = ()  # given as a mapping, kept as sorted pairs
    calibration: Any = "absmax"  # kept as a Calibration
    rounding: str = "nearest"
    noise_axes: tuple[int, ...] = (0,)
    scale_dtype: np.dtype | None = None
    scale_rule: str | None = None

    def __post_init__(self):
        put = lambda name, value: object.__setattr__(self, name, value)
        put("format", as_format(self.format))
        if not isinstance(self.calibration, calibration_.Calibration):
            put("calibration", calibration_.parse(self.calibration))
        if isinstance(self.channelwise_axes, int | str):
            raise TypeError(
                f"channelwise_axes takes several axes: write [{self.channelwise_axes!r}]."
            )
        put("channelwise_axes", tuple(self.channelwise_axes))
        try:
            tiles = dict(self.tiled_axes or {})
        except TypeError:
            raise TypeError(
                f"tiled_axes={self.tiled_axes!r} is not a mapping: write {{0: 128}}, for one "
                "scale of 128 neighbours along axis 0."
            ) from None
        put("tiled_axes", tuple(sorted(tiles.items(), key=str)))
        if self.scale_dtype is not None:
            put("scale_dtype", as_scale_dtype(self.scale_dtype))
        self._check(tiles)

    def _check(self, tiles: Mapping) -> None:
        fmt = self.format
        for axis in (*self.channelwise_axes, *tiles):
            if isinstance(axis, str) and axis not in SYMBOLS:
                raise ValueError(f"unknown axis {axis!r}: write a number or {SYMBOLS}.")
        if "group" in tiles:
            raise ValueError(
                "experts share a scale or have one each, so axis 'group' has no tiles: "
                "write it in channelwise_axes."
            )
        for axis, tile in tiles.items():
            if not tile > 0:
                raise ValueError(f"tile {tile} of axis {axis} must be above 0.")
        if fmt.tile and not tiles:
            raise ValueError(
                f"Format {fmt.name} requires `tiled_axes` to be specified: "
                f"tiled_axes={{axis: {fmt.tile}}}."
            )
        for axis, tile in tiles.items():
            if fmt.tile and tile != fmt.tile:
                raise ValueError(
                    f"Format {fmt.name} requires a tile size of {fmt.tile}, "
                    f"but axis {axis} got {tile}."
                )
        if self.calibration.is_asymmetric and not fmt.is_integer:
            raise ValueError(
                f"{fmt.name} doesn't support asymmetric quantization, so not "
                f"{str(self.calibration)!r}. Use 'absmax', or an integer format."
            )
        if self.rounding not in ROUNDINGS:
            raise ValueError(
                f"unknown rounding {self.rounding!r}. There are: {', '.join(ROUNDINGS)}."
            )
        if self.scale_rule is not None and self.scale_rule not in SCALE_RULES:
            raise ValueError(
                f"unknown scale_rule {self.scale_rule!r}. There are: "
                f"{', '.join(SCALE_RULES)}."
            )
        self._check_small_scales()

    def _check_small_scales(self) -> None:
        rule = self.scale_rule or self.format.scale or "none"
        needs = {"float8_e8m0fnu": "pow2", "float8_e4m3fn": "two_level"}
        wanted = needs.get(self.scale_dtype.name) if self.scale_dtype else None
        if wanted and not rule.startswith(wanted):
            raise ValueError(
                f"scales of {self.format.name} do not fit {self.scale_dtype}: they follow "
                f"the rule {rule!r}. Choose a {wanted} scale_rule, or a wider scale_dtype."
            )

    @property
    def tiles(self) -> dict:
        return dict(self.tiled_axes)

    # Two fields by the names that Qwix gives them, for code that reads `WithAux.how`.
    @property
    def qtype(self) -> Any:
        return self.format.qtype

    @property
    def calibration_method(self) -> str:
        return str(self.calibration)

    @property
    def method(self) -> str:
        return self.calibration.method

    def transposed(self, axes: tuple[int, ...]) -> "Spec":
        """Returns the Spec of x.transpose(axes), given that this is the Spec of x.

        >>> Spec("int4", (0,), {1: 32}).transposed((1, 0)).channelwise_axes
        (1,)
        """
        ndim = len(axes)
        tiles = {axes.index(a % ndim): tile for a, tile in self.tiled_axes}
        channelwise = sorted(axes.index(a % ndim) for a in self.channelwise_axes)
        return dataclasses.replace(
            self, channelwise_axes=tuple(channelwise), tiled_axes=tiles
        )

    def layout(self, shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Returns (shape padded to whole tiles, shape of the scale).

        >>> Spec("int4", channelwise_axes=(-1,), tiled_axes={0: 128}).layout((300, 8))
        ((384, 8), (3, 8))
        """
        channelwise = {_axis(a, shape) for a in self.channelwise_axes}
        tiles = {_axis(a, shape): t for a, t in self.tiled_axes}
        if len(tiles) < len(self.tiled_axes) or channelwise & tiles.keys():
            raise ValueError(
                f"The same axis cannot be both channelwise and tiled, nor tiled twice: "
                f"channelwise_axes={self.channelwise_axes}, tiled_axes={self.tiles}."
            )
        padded, counts = [], []
        for axis, extent in enumerate(shape):
            tile = 1 if axis in channelwise else tiles.get(axis, extent)
            if isinstance(tile, float):
                tile = round(extent * tile)
            if tile <= 0:
                raise ValueError(f"{shape} cannot be tiled as {self.tiles}.")
            count = -(-extent // tile)
            counts.append(count)
            padded.append(count * tile if axis in tiles else extent)
        return tuple(padded), tuple(counts)


def place_tile(
    tile: float, axes: Sequence[int], shape: Sequence[int], is_exact: bool
) -> tuple[dict[int, float], list[int]]:
    """Divides a tile of several axes, seen as one, among them.

    A tile is a run of at most so many neighbours that ends where an axis ends: a part of the
    last axis, or all of it for as many indices of the axes before as fit and divide them.

    >>> place_tile(128, [0, 1], (8, 256, 10), False), place_tile(128, [0, 1], (8, 64, 10), False)
    (({1: 128}, [0]), ({0: 2}, []))
    >>> place_tile(128, [0, 1], (12, 96, 10), False), place_tile(128, [0], (96, 10), False)
    (({}, [0]), ({0: 128}, []))

    Args:
        tile: a number of neighbours; a float is a fraction of them all.
        axes: their numbers, the innermost one last. One axis has the tile as it is.
        shape: the shape of the array.
        is_exact: whether no smaller tile will do, as in an MX format: then it is one of the
            last axis, which is padded to it.

    Returns:
        (the Spec's tiled_axes, axes to add to its channelwise_axes)
    """
    *outer, last = axes
    if not outer or is_exact:
        return {last: tile}, outer
    if isinstance(tile, float):
        tile = max(1, round(tile * math.prod(shape[a] for a in axes)))
    tiles, each = ({last: tile} if tile < shape[last] else {}), []
    left = tile // shape[last]  # indices of the axes before that fit
    for axis in reversed(outer):
        extent = shape[axis]
        fitting = range(1, max(1, min(left, extent)) + 1)
        span = max(n for n in fitting if extent % n == 0)
        if span == 1:
            each.append(axis)
        elif span < extent:
            tiles[axis] = span
        left = left // extent if span == extent else 1
    return tiles, each


def _axis(axis: int | str, shape: tuple[int, ...]) -> int:
    if isinstance(axis, str):
        raise TypeError(
            f"axis {axis!r} has a meaning inside a matmul only; here give its number."
        )
    if not -len(shape) <= axis < len(shape):
        raise ValueError(f"axis {axis} is out of range for an array of shape {shape}.")
    return axis % len(shape)


def as_scale_dtype(dtype: Any) -> np.dtype:
    """Returns the dtype of a scale: a wide float, or one of the two 8-bit scale types."""
    known = isinstance(dtype, str) and dtype in _SMALL_SCALES
    dtype = np.dtype(_SMALL_SCALES[dtype] if known else dtype)
    if not is_wide(dtype) and dtype not in map(np.dtype, _SMALL_SCALES.values()):
        raise ValueError(
            f"{dtype} is not a valid type for scale: use bfloat16, float16, float32 or "
            "float64; 'e8m0' for mx formats and 'e4m3' for nvfp4."
        )
    return dtype
