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
    delayed[,m]       max of earlier steps' |x|, handed in (`AmaxHistory`), times 2^m

A NaN among the elements that share a scale is the range, the scale and so all of them: it
cannot be lost on the way. (A `fixed` or a static range is not found in the data: there a NaN
is code 0, or NaN in a format that has one.)

Ranges can also come from statistics gathered over many batches: a `Statistic` for static
ranges, `AmaxHistory` for delayed scaling. Both are pure: state in, state out.

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
        """Some data may lie outside the window, so gradients there are masked."""
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
    """Reads a method string; says what is wrong with a bad one.

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
    _check_window(text, method, args)
    if method == "fixed":
        low, high = args if len(args) == 2 else (-args[0], args[0])
        args = (high,) if low + high == 0 else (low, high)
    return Calibration(method, args)


def _check_window(text: str, method: str, args: tuple[float, ...]) -> None:
    if method == "fixed":
        low, high = args if len(args) == 2 else (-args[0], args[0])
        if not (low <= 0 <= high and low < high):
            raise ValueError(
                f"calibration {text!r}: the range must contain 0 and be non-empty."
            )
    elif method == "percentile" and not 0 < args[0] <= 100:
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
    how: Calibration,
    statistic: str,
    real: jax.Array | None = None,
) -> dict:
    """The range of `x` over `axes`, which are kept with extent 1. Where `real` is given
    and False, `x` holds padding zeros.

    All methods but mse, which needs the format: see `quantize`.
    """
    keep = functools.partial(dict, axis=axes, keepdims=True)
    if how.method == "minmax":
        low, high = -largest(-x, axes), largest(x, axes)
        factor = jnp.asarray(how._factor, x.dtype)
        return {
            "min": jnp.minimum(low, 0) * factor,
            "max": jnp.maximum(high, 0) * factor,
        }
    if how.method == "absmax":
        if statistic == "absmean":
            amax = jnp.mean(jnp.abs(x), where=real, **keep())
        else:
            amax = largest(jnp.abs(x), axes)
        return {
            "absmax": amax * jnp.asarray(how._factor, x.dtype) if how.args else amax
        }
    wide = x.astype(jnp.float32)
    if how.method == "rms":
        size = jnp.sqrt(jnp.mean(jnp.square(wide), where=real, **keep())) * how.args[0]
    elif how.method == "percentile":
        size = _percentile(jnp.abs(wide), how.args[0], real, keep())
    else:
        raise ValueError(
            f"calibration {how} takes its range from earlier steps, and none was given. "
            "Pass ranges=..., or use a provider that keeps the history."
        )
    return {"absmax": size.astype(x.dtype)}


def largest(x: jax.Array, axes: tuple[int, ...] | None = None) -> jax.Array:
    """max x over `axes` (all of them), which are kept with extent 1; NaN where x has one.

    XLA's own maximum says NaN as well, but on a CPU, where one of 64 x 64 float32 and more
    drops it (jax 0.10 to 0.12). Other platforms keep the plain maximum and its fusions.
    """
    axes = tuple(range(x.ndim)) if axes is None else axes
    found = jnp.max(x, axis=axes, keepdims=True)
    if platform() != "cpu":
        return found
    has_nan = jnp.any(jnp.isnan(x), axis=axes, keepdims=True)
    return jnp.where(has_nan, jnp.asarray(jnp.nan, x.dtype), found)


def _percentile(size: jax.Array, p: float, real: jax.Array | None, keep: dict):
    if real is None:
        return jnp.percentile(size, p, **keep)
    inside = jnp.nanpercentile(jnp.where(real, size, jnp.nan), p, **keep)
    return jnp.where(jnp.any(jnp.isnan(size), **keep), jnp.nan, inside)


def fixed_range(how: Calibration, ndim: int, dtype) -> dict:
    """The constant window of `fixed`: one for the whole tensor, whatever the axes."""
    fill = functools.partial(jnp.full, (1,) * ndim, dtype=dtype)
    if how.is_asymmetric:
        return {"min": fill(how.args[0]), "max": fill(how.args[1])}
    return {"absmax": fill(how.args[0])}


# --- statistics over time ---------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Statistic:
    """Static ranges: what the ranges of many batches come to, one subclass per way.

    State is {"count": int32, "<what>_of_<part>": float32}, all zeros at first; its keys say
    how it was gathered (`statistic_of`). Until more than `bootstrap_steps` ranges were seen,
    the current one is used instead.
    """

    bootstrap_steps: int = 0

    @property
    def what(self) -> str:
        """How keys of its state begin."""
        raise NotImplementedError

    def _shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of state for ranges of this shape."""
        return shape

    def _add(self, part: str, held, value, count) -> jax.Array:
        """State after a batch, the `count`-th."""
        raise NotImplementedError

    def _read(self, part: str, held, count) -> jax.Array:
        """The range that state stands for."""
        del part, count
        return held

    def within(self, seen: Range, axes: tuple[int, ...]) -> dict[str, jax.Array]:
        """One range for a batch that has many, over the axes it lies along."""
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
            held = state[f"{self.what}_of_{name}"]
            if held.shape != self._shape(value.shape):
                raise ValueError(
                    f"range {name!r} now has shape {value.shape}, but the statistics were "
                    f"gathered with {held.shape}. Name the axes that vary in act_batch_axes."
                )
            added = self._add(name, held, value.astype(jnp.float32), new["count"])
            new[f"{self.what}_of_{name}"] = added
        return new

    def range(
        self, state: Mapping[str, jax.Array], default: Range | None = None
    ) -> dict:
        parts = {k.split("_of_")[-1]: v for k, v in state.items() if k != "count"}
        found = {k: self._read(k, v, state["count"]) for k, v in parts.items()}
        if default is None:
            return found
        _check_same_parts(state, default)
        seen = state["count"] > self.bootstrap_steps
        return {
            k: jnp.where(seen, found[k].astype(v.dtype), v) for k, v in default.items()
        }


@dataclasses.dataclass(frozen=True)
class Average(Statistic):
    """The mean of every range seen; within a batch, too."""

    @property
    def what(self) -> str:
        return "sum"

    def _add(self, part: str, held, value, count) -> jax.Array:
        return held + value

    def _read(self, part: str, held, count) -> jax.Array:
        return held / jnp.maximum(count, 1).astype(jnp.float32)

    def within(self, seen: Range, axes: tuple[int, ...]) -> dict[str, jax.Array]:
        return {k: jnp.mean(v, axis=axes, keepdims=True) for k, v in seen.items()}


@dataclasses.dataclass(frozen=True)
class Widest(Statistic):
    """The widest range seen: nothing of the data it is gathered from is clipped."""

    @property
    def what(self) -> str:
        return "max"

    def _add(self, part: str, held, value, count) -> jax.Array:
        return (jnp.minimum if part == "min" else jnp.maximum)(held, value)


@dataclasses.dataclass(frozen=True)
class Ema(Statistic):
    """An average in which a batch counts `decay` times as much as the one after it. It is
    corrected for its start at zero in every step, so state is the range itself."""

    decay: float = 0.99

    @property
    def what(self) -> str:
        return f"ema,{self.decay:g}"

    def _add(self, part: str, held, value, count) -> jax.Array:
        weight = (1 - self.decay) / (1 - self.decay ** count.astype(jnp.float32))
        return held + weight * (value - held)


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

    def _add(self, part: str, held, value, count) -> jax.Array:
        return held.at[(count - 1) % self.LENGTH].set(value)

    def _read(self, part: str, held, count) -> jax.Array:
        row = jnp.arange(self.LENGTH).reshape(-1, *[1] * (held.ndim - 1))
        is_seen = jnp.broadcast_to(row < jnp.maximum(count, 1), held.shape)
        low = -1 if part == "min" else 1
        return low * _percentile(low * held, self.percent, is_seen, {"axis": 0})


#     over batches   the statistic        what is written      the number lies in
_OVER_BATCHES = {
    "mean":       (Average,    "mean",                     None),
    "max":        (Widest,     "max",                      None),
    "ema":        (Ema,        "ema,<decay>",              (0, 1)),
    "percentile": (Percentile, "percentile,<of batches>",  (0, 100)),
}  # fmt: skip


@functools.cache
def statistic(text: bool | str) -> Statistic:
    """What `act_static_scale` asks for: True and "mean", "max", "ema,0.99", "percentile,99".

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
    """The statistic that a state was gathered by."""
    what = {k.split("_of_")[0] for k in state if k != "count"}
    if len(what) != 1:
        raise ValueError(f"{sorted(state)} are not the parts of one statistic.")
    (name,) = what
    return statistic("mean" if name == Average().what else name)


def _check_same_parts(state: Mapping[str, jax.Array], seen: Range) -> None:
    """Refuses a range of another kind than the statistics are of."""
    held = {k.split("_of_")[-1] for k in state if k != "count"}
    if held != set(seen):
        raise ValueError(
            f"the statistics are of {sorted(held)}, and the range has {sorted(seen)}: they "
            "were gathered with another calibration. Gather them anew, or use that one."
        )


@dataclasses.dataclass(frozen=True)
class AmaxHistory:
    """Delayed scaling: the largest |x| of the last `length` steps sets the next scale.

    State is a float32 vector; the newest is in slot 0, which pushes out slot 1, as Flax has
    it. A history of zeros means nothing was seen.
    """

    length: int = 1024

    def init(self) -> jax.Array:
        return jnp.zeros((self.length,), jnp.float32)

    def update(self, state: jax.Array, amax: jax.Array) -> jax.Array:
        return jnp.roll(state, -1).at[0].set(amax.astype(jnp.float32).reshape(()))

    def range(
        self, state: jax.Array, ndim: int, default: jax.Array | float = 1.0
    ) -> dict:
        amax = jnp.max(state)
        usable = (amax > 0) & jnp.isfinite(amax)
        return {"absmax": jnp.where(usable, amax, default).reshape((1,) * ndim)}
