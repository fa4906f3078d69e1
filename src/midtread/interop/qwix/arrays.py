"""Arrays: Qwix's functions on arrays and QArrays, in terms of `midtread.numerics`.

`HowToQuantize` is a `Spec` in Qwix's words. `quantize` is taken apart as it is there,
calibrate -> compute_scale_zero_point -> quantize_with_scale_zero_point, and looks each of
them up in `qwix._src.core.qarray` when it is called, so that outside code can put its own
in their place.
"""

import dataclasses
import functools
import sys
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from midtread.kernels.layout import codes_of
from midtread.numerics import calibration as calibration_
from midtread.numerics import qarray, rounding, views
from midtread.numerics.dtypes import is_wide
from midtread.numerics.formats import FORMATS, NF4, as_format
from midtread.numerics.qarray import QArray
from midtread.numerics.scales import compute_scales
from midtread.numerics.spec import Spec
from midtread.ops.engine import Operand, result_dtype
from midtread.ops.training import is_inside

ShapeT = Sequence[int]
USE_RECIPROCAL_FOR_QUANTIZATION = True  # always: see numerics/qarray.py


def replace_reciprocal(value: Any) -> None:
    if value is False:
        warnings.warn(
            "USE_RECIPROCAL_FOR_QUANTIZATION=False has no effect: Midtread multiplies by "
            "the reciprocal, in float32, everywhere.",
            stacklevel=4,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class HowToQuantize:
    """How one array is quantized. As in Qwix, tiles that a format does not allow are refused
    at once, and what else makes no sense is found out in use."""

    qtype: Any
    channelwise_axes: Collection[int] = ()
    tiled_axes: Mapping[int, int | float] = dataclasses.field(default_factory=dict)
    calibration_method: str = "absmax"
    noise_fn: rounding.Noise | None = None

    def __post_init__(self):
        if isinstance(self.qtype, str) and self.qtype in FORMATS:
            Spec(self.qtype, tiled_axes=dict(self.tiled_axes))

    @property
    def spec(self) -> Spec:
        axes, tiles = tuple(self.channelwise_axes), dict(self.tiled_axes)
        return Spec(self.qtype, axes, tiles, self.calibration_method)


def how_of(spec: Spec, **fields: Any) -> HowToQuantize:
    """A Spec, with axes as numbers, in Qwix's words."""
    given = {"qtype": spec.format.qtype, "calibration_method": str(spec.calibration)}
    axes = sorted(spec.channelwise_axes, key=int)
    return HowToQuantize(
        **{**given, **fields}, channelwise_axes=axes, tiled_axes=spec.tiles
    )


# --- numerics ---------------------------------------------------------------------------------


def _is_wide(qtype: Any) -> bool:
    """Whether Qwix is asked about a float that is no format, which it leaves as it is."""
    return not isinstance(qtype, str) and is_wide(qtype)


def can_dequant_on_output(qtype: Any) -> bool:
    return _is_wide(qtype) or as_format(qtype).is_linear


def get_symmetric_bound(qtype: Any) -> float:
    return as_format(qtype).bound


def get_asymmetric_bound(qtype: Any) -> tuple[float, float]:
    codes = as_format(qtype).codes
    if codes is None:
        raise ValueError(f"{qtype} doesn't support asymmetric quantization.")
    return float(codes[0]), float(codes[1])


def convert_to(
    x: jax.Array, qtype: Any, noise_fn: rounding.Noise | None = None
) -> jax.Array:
    if _is_wide(qtype):
        return x.astype(qtype)
    how = "nearest" if noise_fn is None else "uniform"  # round(x + noise)
    return rounding.encode(x, as_format(qtype), how, noise_fn)


def convert_from(x: jax.Array, qtype: Any) -> jax.Array:
    return x if _is_wide(qtype) else rounding.decode(x, as_format(qtype))


def get_nf4_buckets() -> jax.Array:
    return jnp.array(NF4)


def fp_to_nf4(array: jax.Array) -> jax.Array:
    return convert_to(array, "nf4")


def nf4_to_fp(array: jax.Array) -> jax.Array:
    return convert_from(array, "nf4")


# --- stochastic rounding ----------------------------------------------------------------------


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["key"],
    meta_fields=["method", "channelwise_noise_axes"],
)
@dataclasses.dataclass(frozen=True)
class NoiseFn:
    """Noise of a shape, one value for each index of `channelwise_noise_axes`."""

    key: Any
    method: str
    channelwise_noise_axes: Sequence[int]

    def __call__(self, shape: tuple[int, ...]) -> jax.Array:
        if self.method not in ("uniform", "low_bit_uniform"):
            raise ValueError(f"Unknown method: {self.method}")
        axes = [a for a in self.channelwise_noise_axes if a < len(shape)]
        noise = rounding.make_noise(self.method, self.key, noise_axes=axes)
        assert noise is not None
        return noise(shape)

    def replace(self, **changes: Any) -> "NoiseFn":
        return dataclasses.replace(self, **changes)


def get_noise_fn(
    method: str, key: jax.Array, channelwise_noise_axes: Sequence[int] = (0,)
) -> NoiseFn:
    return NoiseFn(key, method, channelwise_noise_axes)


def uniform_noise(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return NoiseFn(key, "uniform", range(len(shape)))(shape)


def low_bit_uniform_noise(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return NoiseFn(key, "low_bit_uniform", range(len(shape)))(shape)


# --- quantize, in three steps -----------------------------------------------------------------


def _now(function: Callable) -> Callable:
    """What stands under the function's name in Qwix's module, if that is ours."""
    module = sys.modules.get("qwix._src.core.qarray")
    if module is None or not type(module).__module__.startswith("midtread."):
        return function
    return getattr(module, function.__name__)


def quantize(array: jax.Array, how: HowToQuantize) -> QArray:
    range_ = _now(calibrate)(array, how)
    scale, zero_point = _now(compute_scale_zero_point)(range_, how.qtype)
    return _now(quantize_with_scale_zero_point)(
        array, how.qtype, scale, zero_point, how.noise_fn
    )


def get_scale_shape(array_shape: ShapeT, how: HowToQuantize) -> tuple[int, ...]:
    _refuse_partial_tiles(array_shape, how)
    return how.spec.layout(tuple(array_shape))[1]


def calibrate(array: jax.Array, how: HowToQuantize) -> dict[str, jax.Array]:
    _refuse_partial_tiles(array.shape, how)
    return qarray.calibrate(array, how.spec)


def _refuse_partial_tiles(shape, how: HowToQuantize) -> None:
    """A range alone does not say how many elements its last tile has."""
    if how.spec.layout(tuple(shape))[0] != tuple(shape):
        raise ValueError(
            f"{shape} cannot be tiled as {how.tiled_axes}: in three steps a tile must "
            "divide its axis. qwix.quantize pads to whole tiles."
        )


def compute_scale_zero_point(
    calibration: Mapping[str, jax.Array], qtype: Any
) -> tuple[jax.Array, jax.Array | None]:
    if "absmax" not in calibration and not {"min", "max"} <= calibration.keys():
        raise ValueError(f"Unsupported calibration: {calibration}")
    found = compute_scales(calibration, as_format(qtype))
    return found.scale, found.zero_point


def quantize_with_scale_zero_point(
    array: jax.Array,
    qtype: Any,
    scale: jax.Array,
    zero_point: jax.Array | None,
    noise_fn: rounding.Noise | None = None,
) -> QArray:
    if not is_wide(array.dtype):
        raise ValueError(f"Refuse to quantize: {array.dtype}")
    if zero_point is not None and zero_point.shape != scale.shape:
        raise ValueError(
            f"Expect zero_point shape {scale.shape} but got {zero_point.shape}"
        )
    how, fmt = "nearest" if noise_fn is None else "uniform", as_format(qtype)
    if array.dtype.itemsize > 2:
        return qarray.quantize_to_scale(array, fmt, scale, zero_point, how, noise_fn)
    # Qwix rounds the quotient of 16-bit floats to 16 bits before it rounds it to a code.
    scale = qarray.settled(scale.astype(array.dtype))
    units = views.broadcast_with(jnp.divide, array, scale)
    if zero_point is not None:
        shift = zero_point.astype(array.dtype)
        units = views.broadcast_with(jnp.add, qarray.settled(units), shift)
    units = qarray.settled(units).astype(jnp.float32)
    codes = rounding.encode(units, fmt, how, noise_fn)
    return QArray(codes, scale, zero_point, fmt.qtype)


# --- shapes -----------------------------------------------------------------------------------


def split_axis(array: jax.Array, tiled_axes: Mapping[int, int | float]) -> jax.Array:
    """Each tiled axis as (count, tile)."""
    shape: list[int] = []
    for axis, extent in enumerate(array.shape):
        tile = tiled_axes.get(axis, None)
        if tile is None:
            shape.append(extent)
            continue
        tile = round(extent * tile) if isinstance(tile, float) else tile
        if extent % tile:
            raise ValueError(f"{array.shape} cannot be tiled as {tiled_axes}.")
        shape += [extent // tile, tile]
    return array.reshape(shape)


def broadcast_to(operand: Operand, target_shape: tuple[int, ...]) -> Operand:
    """Repeated by tiles; axes that are missing come in front."""

    def grow(part: jax.Array) -> jax.Array:
        missing = len(target_shape) - part.ndim
        return views.expand(part.reshape((1,) * missing + part.shape), target_shape)

    return operand if operand.shape == target_shape else jax.tree.map(grow, operand)


def transpose_array(array: jax.Array, transpose: Sequence[int | None]) -> jax.Array:
    """jnp.transpose; None is a new axis, and axes of extent 1 may be left out."""
    dropped = [a for a in range(array.ndim) if a not in transpose]
    if any(array.shape[a] > 1 for a in dropped):
        raise ValueError(f"Cannot transpose {array.shape} as {transpose}.")
    out = tuple(f"new{i}" if a is None else str(a) for i, a in enumerate(transpose))
    return views.lay_over(array, tuple(map(str, range(array.ndim))), out)


def reshape(array: QArray, *new_shape: Any) -> QArray:
    return array.reshape(*new_shape)


def rewriting_take(array: QArray, idx: Any) -> QArray:
    return array[tuple(idx) if isinstance(idx, list) else idx]


def get_tiled_axes(array: QArray) -> dict[int, int]:
    return views.tiled_axes(array)


def validate_qarray(array: QArray) -> None:
    qarray.validate(array)


# --- ranges -----------------------------------------------------------------------------------


def _bounds(calibration: Mapping[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
    if {"min", "max"} <= calibration.keys():
        return calibration["min"], calibration["max"]
    if "absmax" in calibration:
        return -calibration["absmax"], calibration["absmax"]
    raise ValueError(f"Unsupported calibration: {calibration}")


def clip_to_calibration(
    array: jax.Array,
    calibration: Mapping[str, jax.Array],
    tiled_axes: Mapping[int, int | float],
) -> jax.Array:
    low, high = _bounds(calibration)
    for axis in tiled_axes:
        if array.shape[axis] % low.shape[axis]:
            raise ValueError(f"{array.shape} cannot be tiled as {tiled_axes}.")
    array = views.broadcast_with(jnp.maximum, array, low)
    return views.broadcast_with(jnp.minimum, array, high)


def clip_gradient_to_calibration(
    g: jax.Array,
    array: jax.Array,
    calibration: Mapping[str, jax.Array],
    calibration_method: str,
) -> jax.Array:
    """g, where the window that was calibrated holds `array`; 0 elsewhere."""
    if not calibration_.parse(calibration_method).clips:
        return g
    _bounds(calibration)
    return jnp.where(is_inside(array, calibration), g, jnp.zeros_like(g))


def get_accumulator_and_result_type(
    *args: Operand, preferred_element_type: Any
) -> tuple[Any, Any]:
    """(int32 for codes that are integers, else the result's; the result's)."""
    result = preferred_element_type
    if result is None:
        result = result_dtype(*args)
    integers = all(jnp.issubdtype(codes_of(x).dtype, jnp.integer) for x in args)
    return (jnp.int32 if integers else result), result
