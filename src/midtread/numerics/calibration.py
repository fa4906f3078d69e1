"""Calibration: how wide a window to quantize.

A method looks at the elements that share a scale and returns the range to keep, as a
dict in the scale's shape: {"absmax"} for a window symmetric around zero, {"min", "max"}
for any other. Values beyond the window saturate.

    absmax[,f]        max |x| * f                nothing saturates; one outlier costs all
    minmax[,f]        [min(x, 0), max(x, 0)] * f     asymmetric: needs a zero point
    rms,f             sqrt(mean x^2) * f
    percentile,p      the p-th percentile of |x|
    mse[,n]           the window with the least squared rounding error of n (32) tried
    fixed,a           [-a, a]; fixed,lo,hi for any window holding 0. Always per tensor
    delayed[,m]       max of earlier steps' |x|, which the caller hands in, times 2^m

A NaN makes the range NaN, and so the scale, and so every element that shares that scale: it
cannot be lost on the way. (A `fixed` or a static range does not come from the data: there a
NaN becomes code 0, or NaN in a format that has one.)

Static ranges come from statistics gathered over many batches. A `Statistic` is pure: state in,
state out.

    mean              the mean of all ranges      Qwix's; clips about half of the batches
    max               the widest                  clips nothing that was seen
    ema,d             a mean that forgets         by a factor of d per batch: while training
    percentile,p      of the last 256 batches     an odd batch in a hundred does not count
"""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import ClassVar

import jax
import jax.numpy as jnp

from midtread.numerics.platforms import platform

Range = Mapping[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class Calibration:
    """A parsed method string. `args` are the numbers after its name."""

    method: str
    args: tuple[float, ...] = ()

    @property
    def is_asymmetric(self) -> bool:
        if self.method == "fixed" and len(self.args) == 2:
            return self.args[0] + self.args[1] != 0
        return self.method == "minmax"

    @property
    def clips(self) -> bool:
        """Whether data may lie outside the window, where gradients are then masked."""
        if self.method in ("absmax", "minmax"):
            return self._factor < 1
        return self.method != "delayed"

    @property
    def _factor(self) -> float:
        return self.args[0] if self.args else 1.0

    def __str__(self) -> str:
        return ",".join([self.method, *(f"{a:g}" for a in self.args)])


#          method        numbers it takes   what they are
_GRAMMAR = {
    "absmax":     ((0, 1), "absmax or absmax,<factor>"),
    "minmax":     ((0, 1), "minmax or minmax,<factor>"),
    "rms":        ((1,),   "rms,<factor>: a factor is required"),
    "percentile": ((1,),   "percentile,<between 0 and 100>"),
    "mse":        ((0, 1), "mse or mse,<number of windows to try>"),
    "fixed":      ((1, 2), "fixed,<bound> or fixed,<low>,<high>"),
    "delayed":    ((0, 1), "delayed or delayed,<margin>"),
}  # fmt: skip


@functools.cache
def parse(text: str) -> Calibration:
    """Reads a method string, and raises a ValueError that says what is wrong with it.

    >>> parse("Fixed, -3, 3")
    Calibration(method='fixed', args=(3.0,))
    """
    method, *words = [word.strip() for word in str(text).lower().split(",")]
    if method not in _GRAMMAR:
        known = "; ".join(usage for _, usage in _GRAMMAR.values())
        raise ValueError(f"unknown calibration {text!r}. Write one of: {known}.")
    counts, usage = _GRAMMAR[method]
    try:
        args = tuple(float(word) for word in words)
    except ValueError:
        raise ValueError(f"calibration {text!r} has a bad number: {usage}.") from None
    if len(args) not in counts or not all(map(math.isfinite, args)):
        raise ValueError(f"calibration {text!r} does not read as {usage}.")
    if method == "fixed":
        low, high = args if len(args) == 2 else (-args[0], args[0])
        if not (low <= 0 <= high and low < high):
            raise ValueError(
                f"calibration {text!r}: the range must contain 0 and be non-empty."
            )
        args = (high,) if low + high == 0 else (low, high)
    _check_number(text, method, args)
    return Calibration(method, args)


def _check_number(text: str, method: str, args: tuple[float, ...]) -> None:
    if method == "percentile" and not 0 < args[0] <= 100:
        raise ValueError(f"calibration {text!r}: a percentile lies in (0, 100].")
    elif method == "mse" and args and (args[0] < 2 or args[0] != int(args[0])):
        raise ValueError(
            f"calibration {text!r}: try at least 2 windows, a whole number."
        )
    elif method in ("absmax", "minmax", "rms") and args and args[0] <= 0:
        raise ValueError(f"calibration {text!r}: the factor must be above 0.")


def measure(
    x: jax.Array,
    axes: tuple[int, ...],
    calibration: Calibration,
    statistic: str,
    real: jax.Array | None = None,
) -> dict:
    """Measures the range of `x` over `axes`, which are kept with extent 1.

    This does every method but mse, which needs the format (`qarray.calibrate`).

    Args:
        real: where it is given and False, `x` is a zero of padding.
    """
    keep = functools.partial(dict, axis=axes, keepdims=True)
    if calibration.method == "minmax":
        low, high = -largest(-x, axes), largest(x, axes)
        factor = jnp.asarray(calibration._factor, x.dtype)
        return {
            "min": jnp.minimum(low, 0) * factor,
            "max": jnp.maximum(high, 0) * factor,
        }
    if calibration.method == "absmax":
        if statistic == "absmean":
            amax = jnp.mean(jnp.abs(x), where=real, **keep())
        else:
            amax = largest(jnp.abs(x), axes)
        return {
            "absmax": amax * jnp.asarray(calibration._factor, x.dtype)
            if calibration.args
            else amax
        }
    wide = x.astype(jnp.float32)
    if calibration.method == "rms":
        size = (
            jnp.sqrt(jnp.mean(jnp.square(wide), where=real, **keep()))
            * calibration.args[0]
        )
    elif calibration.method == "percentile":
        size = _percentile(jnp.abs(wide), calibration.args[0], real, keep())
    else:
        raise ValueError(
            f"calibration {calibration} takes its range from earlier steps, and none was given. "
            "Pass ranges=..., or use a provider that keeps the history."
        )
    return {"absmax": size.astype(x.dtype)}


def largest(x: jax.Array, axes: tuple[int, ...] | None = None) -> jax.Array:
    """Returns max x over `axes` (None: all), kept with extent 1, or NaN where x has one.

    XLA's own maximum is NaN there too, except on a CPU, where that of 64 x 64 float32 and
    more drops it (jax 0.10 to 0.12). Other platforms keep the plain maximum and its fusions.
    """
    axes = tuple(range(x.ndim)) if axes is None else axes
    maximum = jnp.max(x, axis=axes, keepdims=True)
    if platform() != "cpu":
        return maximum
    has_nan = jnp.any(jnp.isnan(x), axis=axes, keepdims=True)
    return jnp.where(has_nan, jnp.asarray(jnp.nan, x.dtype), maximum)


def _percentile(size: jax.Array, p: float, real: jax.Array | None, keep: dict):
    if real is None:
        return jnp.percentile(size, p, **keep)
    inside = jnp.nanpercentile(jnp.where(real, size, jnp.nan), p, **keep)
    return jnp.where(jnp.any(jnp.isnan(size), **keep), jnp.nan, inside)


def fixed_range(calibration: Calibration, ndim: int, dtype) -> dict:
    """Returns the constant window of `fixed`, one for the whole tensor."""
    fill = functools.partial(jnp.full, (1,) * ndim, dtype=dtype)
    if calibration.is_asymmetric:
        return {"min": fill(calibration.args[0]), "max": fill(calibration.args[1])}
    return {"absmax": fill(calibration.args[0])}


# --- statistics over time ---------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Statistic:
    """Combines the ranges of many batches into one static range. Each way is a subclass.

    State is {"count": int32, "<what>_of_<part>": float32}, all zeros at first; its keys say
    how it was gathered (`statistic_of`). Until more than `bootstrap_steps` ranges were seen,
    the current one is used instead.
    """

    bootstrap_steps: int = 0

    @property
    def what(self) -> str:
        """The word that the keys of its state begin with."""
        raise NotImplementedError

    def _shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape that state has for ranges of this shape."""
        return shape

    def _add(self, part: str, past, value, count) -> jax.Array:
        """Returns the state after the `count`-th batch, whose range is `value`."""
        raise NotImplementedError

    def _read(self, part: str, past, count) -> jax.Array:
        """Returns the range that this state stands for."""
        del part, count
        return past

    def within(self, seen: Range, axes: tuple[int, ...]) -> dict[str, jax.Array]:
        """Combines the ranges along `axes`, those of one batch, into one range."""
        return {
            k: -largest(-v, axes) if k == "min" else largest(v, axes)
            for k, v in seen.items()
        }

    def init(self, first: Range) -> dict[str, jax.Array]:
        zeros = {
            f"{self.what}_of_{k}": jnp.zeros(self._shape(v.shape), jnp.float32)
            for k, v in first.items()
        }
        return {"count": jnp.zeros((), jnp.int32), **zeros}

    def update(
        self, state: Mapping[str, jax.Array], seen: Range
    ) -> dict[str, jax.Array]:
        _check_same_parts(state, seen)
        new = {"count": state["count"] + 1}
        for name, value in seen.items():
            past = state[f"{self.what}_of_{name}"]
            if past.shape != self._shape(value.shape):
                raise ValueError(
                    f"range {name!r} now has shape {value.shape}, but the statistics were "
                    f"gathered with {past.shape}. Name the axes that vary in act_batch_axes."
                )
            added = self._add(name, past, value.astype(jnp.float32), new["count"])
            new[f"{self.what}_of_{name}"] = added
        return new

    def range(
        self, state: Mapping[str, jax.Array], default: Range | None = None
    ) -> dict:
        parts = {k.split("_of_")[-1]: v for k, v in state.items() if k != "count"}
        gathered = {k: self._read(k, v, state["count"]) for k, v in parts.items()}
        if default is None:
            return gathered
        _check_same_parts(state, default)
        seen = state["count"] > self.bootstrap_steps
        return {
            k: jnp.where(seen, gathered[k].astype(v.dtype), v)
            for k, v in default.items()
        }


@dataclasses.dataclass(frozen=True)
class Average(Statistic):
    """The mean of every range seen, and of the ranges within one batch."""

    @property
    def what(self) -> str:
        return "sum"

    def _add(self, part: str, past, value, count) -> jax.Array:
        return past + value

    def _read(self, part: str, past, count) -> jax.Array:
        return past / jnp.maximum(count, 1).astype(jnp.float32)

    def within(self, seen: Range, axes: tuple[int, ...]) -> dict[str, jax.Array]:
        return {k: jnp.mean(v, axis=axes, keepdims=True) for k, v in seen.items()}


@dataclasses.dataclass(frozen=True)
class Widest(Statistic):
    """The widest range seen: nothing of the data it is gathered from is clipped."""

    @property
    def what(self) -> str:
        return "max"

    def _add(self, part: str, past, value, count) -> jax.Array:
        return (jnp.minimum if part == "min" else jnp.maximum)(past, value)


@dataclasses.dataclass(frozen=True)
class Ema(Statistic):
    """An average in which a batch counts `decay` times as much as the one after it. It is
    corrected for its start at zero in every step, so state is the range itself."""

    decay: float = 0.99

    @property
    def what(self) -> str:
        return f"ema,{self.decay:g}"

    def _add(self, part: str, past, value, count) -> jax.Array:
        weight = (1 - self.decay) / (1 - self.decay ** count.astype(jnp.float32))
        return past + weight * (value - past)


@dataclasses.dataclass(frozen=True)
class Percentile(Statistic):
    """The range that `percent` of the last LENGTH batches keep within."""

    percent: float = 99.0
    LENGTH: ClassVar[int] = 256

    @property
    def what(self) -> str:
        return f"percentile,{self.percent:g}"

    def _shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return self.LENGTH, *shape

    def _add(self, part: str, past, value, count) -> jax.Array:
        return past.at[(count - 1) % self.LENGTH].set(value)

    def _read(self, part: str, past, count) -> jax.Array:
        row = jnp.arange(self.LENGTH).reshape(-1, *[1] * (past.ndim - 1))
        is_seen = jnp.broadcast_to(row < jnp.maximum(count, 1), past.shape)
        sign = -1 if part == "min" else 1
        return sign * _percentile(sign * past, self.percent, is_seen, {"axis": 0})


#     over batches   the statistic        what is written      the number lies in
_OVER_BATCHES = {
    "mean":       (Average,    "mean",                     None),
    "max":        (Widest,     "max",                      None),
    "ema":        (Ema,        "ema,<decay>",              (0, 1)),
    "percentile": (Percentile, "percentile,<of batches>",  (0, 100)),
}  # fmt: skip


@functools.cache
def statistic(text: bool | str) -> Statistic:
    """Reads what `act_static_scale` asks for: True (which is "mean"), "mean", "max",
    "ema,0.99" or "percentile,99".

    >>> statistic("ema,0.9").decay
    0.9
    """
    name, *numbers = ["mean"] if text is True else str(text).lower().split(",")
    usage = ", ".join(f"{written!r}" for _, written, _ in _OVER_BATCHES.values())
    wrong = ValueError(
        f"act_static_scale={text!r}: write True or one of {usage}, which say what the ranges "
        "of many batches come to."
    )
    kind, _, bounds = _OVER_BATCHES.get(name.strip(), (None, None, None))
    if kind is None or len(numbers) != (bounds is not None):
        raise wrong
    if bounds is None:
        return kind()
    try:
        number = float(numbers[0])
    except ValueError:
        raise wrong from None
    if not bounds[0] < number < bounds[1]:
        raise ValueError(
            f"act_static_scale={text!r}: the number lies between {bounds[0]} and {bounds[1]}."
        )
    return kind(0, number)


def statistic_of(state: Mapping[str, jax.Array]) -> Statistic:
    """Returns the statistic that gathered this state."""
    what = {k.split("_of_")[0] for k in state if k != "count"}
    if len(what) != 1:
        raise ValueError(f"{sorted(state)} are not the parts of one statistic.")
    (name,) = what
    return statistic("mean" if name == Average().what else name)


def _check_same_parts(state: Mapping[str, jax.Array], seen: Range) -> None:
    """Refuses a range of another kind than the statistics were gathered from."""
    gathered = {k.split("_of_")[-1] for k in state if k != "count"}
    if gathered != set(seen):
        raise ValueError(
            f"the statistics are of {sorted(gathered)}, and the range has {sorted(seen)}: they "
            "were gathered with another calibration. Gather them anew, or use that one."
        )
