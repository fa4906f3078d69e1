"""QArray: codes, and what they are codes of.

    x  ~  (value(qvalue) - zero_point) * scale        [* global_scale] [* pre_scale], and
          turned by [pre_rotation]

`scale` has the rank of `qvalue`, and each of its extents divides qvalue's: a scale of
extent N/t stands for t neighbours. Per tensor, per channel, sub-channel and 2-D blocks
are this one rule, and views, sharding and matmuls follow from it. `zero_point` has its
own extents under the same rule; it is a code, or a fraction in a float dtype where others
store a tile's least value beside its scale (GGUF, MLX).

Optional parts, None unless asked for:
    global_scale    second level of an nvfp4 array whose `scale` is kept in e4m3
    pre_scale       factors along summed axes that the other operand of a matmul is
                    multiplied by before it is quantized (SmoothQuant, AWQ)
    pre_rotation    signs of a Hadamard rotation that the other operand goes through first
    logical         extents before padding to whole tiles; None on axes never padded.
                    Counted from the right, so that leading axes may come and go (scan)
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from midtread.numerics import formats, hadamard, rounding, views
from midtread.numerics.calibration import Range, fixed_range, largest, measure
from midtread.numerics.dtypes import is_wide, wide_dtype
from midtread.numerics.platforms import is_explicit
from midtread.numerics.scales import Scales, compute_scales
from midtread.numerics.spec import Spec

_PARTS = (
    "qvalue",
    "scale",
    "zero_point",
    "global_scale",
    "pre_scale",
    "pre_rotation",
)


class _NotAnArray:
    """JAX is given this for a QArray where it expects an array.

    JAX does not multiply this type, so `x @ q` is left to QArray.__rmatmul__; jnp.dot and
    the like print it in their error, and it says what to write.
    """

    def __init__(self, array: "QArray"):
        self._array = array

    def __array__(self, *_, **__):
        raise TypeError(repr(self))

    def __repr__(self) -> str:
        return (
            f"{self._array!r} is not an array: mt.dot, mt.einsum and the like take it, "
            "and mt.dequantize makes an array of it."
        )


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=list(_PARTS),
    meta_fields=["qtype", "logical"],
)
@dataclasses.dataclass(frozen=True, eq=False)
class QArray:
    """A quantized array: codes, and what they are codes of.

    x ~ (value(qvalue) - zero_point) * scale. `scale` has the rank of the codes, and each of
    its extents divides theirs. It has `shape`, `ndim`, `dtype`, `reshape`, `transpose`,
    slices and `astype` as arrays have them, is a pytree, and shards as one.

    >>> q = quantize(jnp.ones((256, 64)), "int4", channelwise_axes=[1], tiled_axes={0: 128})
    >>> q.shape, q.qvalue.dtype.name, q.scale.shape
    ((256, 64), 'int4', (2, 64))

    Args:
        qvalue: the codes, in the storage dtype of their format.
        scale: one per tensor, channel, tile or block.
        zero_point: subtracted from the codes first; None for symmetric formats.
        qtype: the format; None for that of the codes' dtype.
        global_scale: the second level of an nvfp4 array whose `scale` is kept in e4m3.
        pre_scale: factors along summed axes, by which the other operand of a matmul is
            multiplied before it is quantized (SmoothQuant, AWQ).
        pre_rotation: signs, n along one summed axis: the other operand is multiplied by
            them in runs of n, and every run by the Hadamard matrix of size n, before all
            else. n is a power of two; a stack of layers has n for each.
        logical: extents before padding to whole tiles, counted from the right; None where
            an axis was never padded.
    """

    # These annotations are written as Qwix writes them, because Tokamax reads them.
    # Placeholders (shapes, shardings, block specs, Flax's boxes) may stand in for arrays.
    qvalue: jax.Array
    scale: jax.Array
    zero_point: jax.Array | None = None
    qtype: jax.typing.DTypeLike = None  # pyright: ignore[reportAssignmentType]
    global_scale: jax.Array | None = None
    pre_scale: jax.Array | None = None
    pre_rotation: jax.Array | None = None
    logical: tuple[int | None, ...] | None = None

    def __post_init__(self):
        if self.qtype is None and hasattr(self.qvalue, "dtype"):
            object.__setattr__(self, "qtype", self.qvalue.dtype)
        elif self.qtype is not None:
            object.__setattr__(self, "qtype", _canonical(self.qtype))

    # From outside it looks like an array of the scale's dtype.
    @property
    def shape(self) -> tuple[int, ...]:
        padded = tuple(self.qvalue.shape)
        if self.logical is None:
            return padded
        known = (None,) * len(padded) + self.logical
        return tuple(
            k if k is not None else n for n, k in zip(padded, known[-len(padded) :])
        )

    @property
    def ndim(self) -> int:
        return self.qvalue.ndim

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def dtype(self):
        return self.scale.dtype if is_wide(self.scale.dtype) else jnp.dtype("float32")

    @property
    def format(self) -> formats.Format:
        return _format_of(self.qtype)

    @property
    def nbytes(self) -> int:
        """The bytes that it takes in this backend's memory."""
        return sum(_bytes_in_memory(part) for part in jax.tree.leaves(self))

    @property
    def scale_tile_shape(self) -> tuple[int, ...]:
        return tuple(n // s for n, s in zip(self.qvalue.shape, self.scale.shape))

    @property
    def zero_point_tile_shape(self) -> tuple[int, ...] | None:
        if self.zero_point is None:
            return None
        return tuple(n // s for n, s in zip(self.qvalue.shape, self.zero_point.shape))

    def replace(self, **changes) -> "QArray":
        return dataclasses.replace(self, **changes)

    def astype(self, dtype) -> "QArray":
        """Returns the same codes under a scale of another dtype."""
        return self.replace(scale=self.scale.astype(dtype))

    def map(self, fn: Callable, **changes) -> "QArray":
        """Applies `fn` to every array part."""
        before = {name: getattr(self, name) for name in _PARTS}
        parts = {k: fn(v) for k, v in before.items() if v is not None}
        if changes or self.qtype is None:
            return self.replace(**parts, **changes)
        if all(part is before[name] for name, part in parts.items()):
            return self
        # `replace` does the same in three times the time: nothing is left to check.
        new = object.__new__(QArray)
        vars(new).update(vars(self), **parts)
        return new

    # Views have the same elements, differently arranged.
    def transpose(self, *axes) -> "QArray":
        return views.transpose(self, axes)

    def swapaxes(self, axis1: int, axis2: int) -> "QArray":
        return views.swapaxes(self, axis1, axis2)

    T = property(lambda self: self.transpose())
    mT = property(lambda self: self.swapaxes(-1, -2))

    def reshape(self, *shape) -> "QArray":
        return views.reshape(self, shape)

    def __getitem__(self, index) -> "QArray":
        return views.take(self, index)

    def dequantize(self, dtype: Any = None) -> jax.Array:
        """Returns the float array that the codes stand for, as `mt.dequantize` does."""
        return dequantize(self, dtype)

    __array_ufunc__ = None  # NumPy's arrays then leave @ and == to us

    def __eq__(self, other: object) -> Any:
        """Compares what the codes stand for element by element, as arrays compare.
        Placeholders (shapes, block specs) are equal as a whole or not."""
        if not isinstance(self.qvalue, jax.Array | np.ndarray):
            return isinstance(other, QArray) and self._fields() == other._fields()
        return dequantize(self) == (
            dequantize(other) if isinstance(other, QArray) else other
        )

    def __hash__(self) -> int:
        return hash(self._fields())  # arrays have none

    def _fields(self) -> tuple[Any, ...]:
        return tuple(getattr(self, f.name) for f in dataclasses.fields(self))

    def shardings(self, sharding: jax.sharding.NamedSharding) -> "QArray":
        """Returns the NamedSharding of each part when the values have `sharding`. A scale is
        cut along with its values where its extent allows, and is whole elsewhere."""
        return self.map(lambda part: views.part_sharding(sharding, part.shape))

    def __array__(self, *_, **__):
        raise TypeError(repr(_NotAnArray(self)))

    def __jax_array__(self) -> "_NotAnArray":
        return _NotAnArray(self)

    def __repr__(self) -> str:
        if hasattr(self.qvalue, "get_value"):  # NNX: its parts are Variables
            return repr(self.map(lambda part: part.get_value()))
        if not isinstance(
            self.qvalue, jax.Array | np.ndarray
        ):  # abstract, or somebody's placeholder
            shown = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
            body = ", ".join(f"{k}={v!r}" for k, v in shown.items() if v is not None)
            return f"QArray({body})"
        tile = "x".join(str(t) for t in self.scale_tile_shape if t != 1)
        per = f"/{tile}" if views.tiled_axes(self) else ""
        size = (
            f" {_megabytes(self)}"
            if not isinstance(self.qvalue, jax.core.Tracer)
            else ""
        )
        name = self.qtype if _is_wide(self.qtype) else self.format.name
        return f"QArray({name}{per} {list(self.shape)}{size})"


_format_of = functools.cache(formats.as_format)


@functools.cache
def _canonical(qtype: Any) -> Any:
    """Returns what a format calls itself (`Format.qtype`); a wide float stays as it is."""
    return qtype if _is_wide(qtype) else formats.as_format(qtype).qtype


def _is_wide(qtype: Any) -> bool:
    """Whether the codes are wide floats, as gradients or averages of codes are."""
    return not isinstance(qtype, str) and is_wide(qtype)


def _bytes_in_memory(part: Any) -> int:
    if isinstance(part, jax.Array) and not isinstance(part, jax.core.Tracer):
        if formats.dtype_bits(part.dtype) < 8:
            return part.on_device_size_in_bytes()
        return part.nbytes
    return math.ceil(math.prod(part.shape) * formats.stored_bits(part.dtype) / 8)


def _megabytes(q: QArray) -> str:
    was = q.size * q.dtype.itemsize
    if was < 1e3:
        return f"{q.nbytes} B (was {was})"
    unit, name = (1e6, "MB") if was >= 1e6 else (1e3, "kB")
    return f"{q.nbytes / unit:.1f} {name} (was {was / unit:.1f})"


def validate(q: QArray) -> None:
    """Raises a ValueError if the parts do not belong together; placeholders pass."""
    if not isinstance(q.qvalue, jax.Array):
        return
    for name in _PARTS[1:]:
        part = getattr(q, name)
        if part is None:
            continue
        if part.ndim != q.qvalue.ndim:
            raise ValueError(
                f"{name} {part.shape} should have the same rank as qvalue {q.qvalue.shape}."
            )
        for n, s in zip(q.qvalue.shape, part.shape):
            if n and (s == 0 or n % s):
                raise ValueError(
                    f"{name} {part.shape} should be broadcastable to qvalue "
                    f"{q.qvalue.shape}: every extent must divide."
                )
    if q.pre_rotation is not None:
        shape = q.pre_rotation.shape
        axis = hadamard.axis_of(shape) or 0
        is_stack = all(n in (1, m) for n, m in zip(shape[:axis], q.qvalue.shape))
        if not is_stack or shape[axis] & (shape[axis] - 1):
            raise ValueError(
                f"pre_rotation {shape} should have one axis of signs, as many as a power of "
                "two, behind those of a stack."
            )
    if q.qvalue.dtype != q.format.dtype:
        raise ValueError(
            f"{q.qvalue.dtype} is not a valid type for qvalue of {q.format.name}."
        )
    if not is_wide(q.scale.dtype) and q.scale.dtype not in (
        jnp.float8_e8m0fnu,
        jnp.float8_e4m3fn,
    ):
        raise ValueError(f"{q.scale.dtype} is not a valid type for scale.")
    zero = q.zero_point
    if zero is not None and zero.dtype != q.qvalue.dtype and not is_wide(zero.dtype):
        raise ValueError(
            f"Zero point {zero.dtype} should have the same dtype as qvalue "
            f"{q.qvalue.dtype}, or be a float."
        )


# --- quantize and dequantize ------------------------------------------------------------------


def calibrate(x: jax.Array, spec: Spec) -> dict[str, jax.Array]:
    """Returns the range each scale should cover, in the scale's shape and x's dtype."""
    _check_input(x)
    if spec.method == "fixed":
        return fixed_range(spec.calibration, x.ndim, x.dtype)
    shape = x.shape
    padded, counts = spec.layout(shape)
    _check_shards(x, counts)
    x = views.pad_to(x, padded)
    if spec.method == "mse":
        return {"absmax": _least_squares_window(x, spec, counts)}
    split, axes = views.split(padded, counts)
    real = None
    if padded != shape:  # padding must not count in a mean or a percentile
        real = views.pad_to(jnp.ones(shape, bool), padded, False).reshape(split)
    seen = measure(
        x.reshape(split), axes, spec.calibration, spec.format.statistic, real
    )
    return {k: v.reshape(counts) for k, v in seen.items()}


def _check_shards(x: jax.Array, counts: tuple[int, ...]) -> None:
    """Refuses tiles that straddle shards, where shardings are part of the type."""
    if not isinstance(x, jax.Array) or not is_explicit(x):  # NumPy's, or a Variable
        return
    sharding = jax.typeof(x).sharding
    for axis, names in enumerate(sharding.spec):
        names = (names,) if isinstance(names, str) else names or ()
        shards = math.prod(sharding.mesh.shape[name] for name in names)
        extent, count = x.shape[axis], counts[axis]
        if count > 1 and count % shards:
            raise ValueError(
                f"tiles of {-(-extent // count)} straddle the {shards} shards of axis {axis} of "
                f"{jax.typeof(x)}: take a tile that divides {extent // shards}, shard another "
                "axis, or jax.sharding.reshard the array first."
            )


def _least_squares_window(
    x: jax.Array, spec: Spec, counts: tuple[int, ...]
) -> jax.Array:
    """Returns, for each tile, the window of least squared error among f * absmax with
    f = 1, (n-1)/n, ..., 1/n."""
    num = int(spec.calibration.args[0]) if spec.calibration.args else 32
    split, axes = views.split(x.shape, counts)
    absmax = largest(jnp.abs(x.reshape(split)), axes).reshape(counts)
    nearest = dataclasses.replace(spec, rounding="nearest")

    def better(best, factor):
        window, least = best
        trial = absmax * factor.astype(absmax.dtype)
        q = quantize_to_range(x, nearest, {"absmax": trial})
        error = jnp.square(x.astype(jnp.float32) - dequantize(q).astype(jnp.float32))
        loss = jnp.sum(error.reshape(split), axis=axes).reshape(counts)
        wins = loss < least
        return (jnp.where(wins, trial, window), jnp.where(wins, loss, least)), None

    start = (absmax, jnp.full(counts, jnp.inf, jnp.float32))
    factors = jnp.arange(num, 0, -1, dtype=jnp.float32) / num
    return jax.lax.scan(better, start, factors)[0][0]


def quantize_to_range(
    x: jax.Array, spec: Spec, range_: Range, key=None, site=(), origin=None
) -> QArray:
    """Quantizes with a range that is known: static, delayed, or `calibrate`'s."""
    _check_input(x)
    scales = scales_of(range_, spec)
    padded = _whole_tiles(x.shape, spec, scales.scale.shape)
    logical = None
    if padded != x.shape:
        logical = tuple(n if n != p else None for n, p in zip(x.shape, padded))
    noise = rounding.make_noise(spec.rounding, key, site, origin, spec.noise_axes)
    q = quantize_to_scale(
        views.pad_to(x, padded), spec.format, scales.scale, scales.zero_point,
        spec.rounding, noise,
    )  # fmt: skip
    return store_scale(q.replace(logical=logical), spec, scales.global_scale)


def quantize_to_scale(
    x: jax.Array,
    fmt: formats.Format,
    scale: jax.Array,
    zero_point: jax.Array | None = None,
    method: str = "nearest",
    noise: rounding.Noise | None = None,
) -> QArray:
    """Quantizes with a scale that is known, and that is kept in x's dtype."""
    scale = settled(scale.astype(x.dtype))
    # This is done in float32 whatever x is, since a bfloat16 quotient has too few bits to be
    # rounded twice; and by reciprocal, because XLA divides by a broadcast scale that way in
    # some contexts and the codes must be the same in all.
    inverse = 1 / scale.astype(jnp.float32)
    units = views.broadcast_with(jnp.multiply, x.astype(jnp.float32), inverse)
    if zero_point is not None:
        units = views.broadcast_with(jnp.add, units, zero_point.astype(jnp.float32))
    codes = rounding.encode(units, fmt, method, noise)
    return QArray(codes, scale, zero_point, fmt.qtype)


def scales_of(range_: Range, spec: Spec) -> Scales:
    """Turns a range into the scales that `spec` asks for."""
    if spec.method == "delayed" and spec.calibration.args:
        margin = 2.0 ** spec.calibration.args[0]  # headroom for what is to come
        range_ = {k: v * jnp.asarray(margin, v.dtype) for k, v in range_.items()}
    return compute_scales(range_, spec.format, spec.scale_rule)


def settled(scale: jax.Array) -> jax.Array:
    """Rounds a bfloat16 scale for certain: XLA may otherwise go on with the float32."""
    if scale.dtype != jnp.bfloat16:
        return scale
    exact = jax.lax.reduce_precision(scale.astype(jnp.float32), 8, 7)
    return exact.astype(jnp.bfloat16)


def _whole_tiles(shape, spec: Spec, counts) -> tuple[int, ...]:
    """Pads `shape` to whole tiles on the axes where the scale has more than one."""
    padded, _ = spec.layout(shape)
    return tuple(p if s != 1 else n for n, p, s in zip(shape, padded, counts))


def store_scale(q: QArray, spec: Spec, global_scale) -> QArray:
    """Stores the scale in the dtype asked for; in e4m3 the tensor's level stands apart."""
    if spec.scale_dtype is None:
        return q
    if spec.scale_dtype.name == "float8_e4m3fn":
        block = (q.scale.astype(jnp.float32) / global_scale).astype(spec.scale_dtype)
        return q.replace(scale=block, global_scale=global_scale)
    return q.astype(spec.scale_dtype)


def quantize_by_spec(
    x: jax.Array, spec: Spec, key=None, site=(), origin=None
) -> QArray:
    """Calibrates, then quantizes."""
    return quantize_to_range(x, spec, calibrate(x, spec), key, site, origin)


def quantize(
    array: jax.Array,
    qtype: Any,
    *,
    channelwise_axes: Sequence[int] = (),
    tiled_axes: Mapping[int, int | float] | None = None,
    calibration_method: str = "absmax",
    scale_dtype: Any = None,
    rounding: str = "nearest",
    scale_rule: str | None = None,
    key: jax.Array | None = None,
) -> QArray:
    """Quantizes a float array.

    x[i] ~ (qvalue[i] - zero_point) * scale, one scale per channel, tile or tensor.

    >>> x = jnp.array([[0.9, -0.5, 0.1, 0.01]])
    >>> quantize(x, "int8", channelwise_axes=[0]).qvalue.tolist()
    [[127, -71, 14, 1]]

    Args:
        array: a float array.
        qtype: a format, by any name that `as_format` takes.
        channelwise_axes: axes where each index has its own scale.
        tiled_axes: {axis: t}, one scale per t neighbours; a float t is a fraction.
        calibration_method: how the range is found, see `numerics/calibration.py`.
        scale_dtype: the dtype of the stored scale, and so of the dequantized array.
        rounding: 'nearest', or 'stochastic' with a `key`.
        scale_rule: how scales are rounded, see `numerics/scales.py`; None: as the format
            says.
        key: a PRNG key, for stochastic rounding.

    Returns:
        A QArray of the shape of `array`.

    Raises:
        ValueError: An unknown format, calibration or rounding; tiles that the format does
            not allow; stochastic rounding without a key; an array that is empty or not of
            floats.
        TypeError: An array that is quantized already.
    """
    spec = Spec(
        format=qtype,
        channelwise_axes=channelwise_axes,
        tiled_axes=tiled_axes or {},
        calibration=calibration_method,
        rounding=rounding,
        scale_dtype=scale_dtype,
        scale_rule=scale_rule,
    )
    return quantize_by_spec(array, spec, key)


def dequantize(array: QArray, dtype: Any = None) -> jax.Array:
    """Returns the float array that the codes stand for.

    >>> q = quantize(jnp.array([1.0, 0.5]), "int4")
    >>> dequantize(q).tolist()
    [0.9333333969116211, 0.5333333611488342]

    Args:
        array: a QArray, or a quantized parameter of a model.
        dtype: the dtype of the result; None for the dtype of the scale.

    Returns:
        An array of the shape that was quantized.

    Raises:
        TypeError: An array that is not quantized.
        ValueError: A QArray whose codes, scales and shapes do not belong together.
    """
    if getattr(type(array), "is_boxed", False):  # a parameter of a model
        array = array.value.array
    if not isinstance(array, QArray):
        dtype = getattr(array, "dtype", None)
        what = f"a {type(array).__name__}" if dtype is None else f"an array of {dtype}"
        raise TypeError(
            f"dequantize takes a QArray or a quantized parameter, not {what}: "
            "mt.quantize makes a QArray of an array."
        )
    validate(array)
    wide = wide_dtype(array.dtype)
    value = rounding.decode(array.qvalue, array.format).astype(wide)
    if array.zero_point is not None:
        zero = rounding.unpacked(array.zero_point).astype(wide)
        value = views.broadcast_with(jnp.subtract, value, zero)
    for factor in (array.scale, array.global_scale, array.pre_scale):
        if factor is not None:
            value = views.broadcast_with(jnp.multiply, value, factor.astype(wide))
    value = views.crop_to(value, array.shape)
    if array.pre_rotation is not None:
        value = hadamard.turn_back(value, array.pre_rotation)
    return value.astype(dtype or array.dtype)


def is_float(x: Any) -> bool:
    """Whether `x` is a plain array of a float that can be quantized."""
    is_array = hasattr(x, "ndim") and not isinstance(x, QArray)
    return is_array and hasattr(x, "dtype") and is_wide(x.dtype)


def _check_input(x: Any) -> None:
    if isinstance(x, QArray):
        raise TypeError("this array is quantized already: dequantize it first.")
    if not hasattr(x, "dtype") or not is_wide(x.dtype):
        raise ValueError(
            f"Refuse to quantize: {getattr(x, 'dtype', type(x).__name__)}. "
            "Only bfloat16, float16, float32 and float64 arrays can be."
        )
    if 0 in x.shape:
        raise ValueError(f"Refuse to quantize an empty array: its shape is {x.shape}.")
