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

Ranges can also come from statistics gathered over many batches: `Average` for static
ranges, `AmaxHistory` for delayed scaling. Both are pure: state in, state out.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping

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
class Average:
    """Static ranges: the mean of every range seen.

    State is {"count": int32, "sum_of_absmax": float32} or sums of min and max. Until more
    than `bootstrap_steps` ranges were seen, the current one is used instead.
    """

    bootstrap_steps: int = 0

    def init(self, first: Range) -> dict[str, jax.Array]:
        sums = {
            f"sum_of_{k}": jnp.zeros(v.shape, jnp.float32) for k, v in first.items()
        }
        return {"count": jnp.zeros((), jnp.int32), **sums}

    def update(
        self, state: Mapping[str, jax.Array], seen: Range
    ) -> dict[str, jax.Array]:
        _check_same_parts(state, seen)
        new = {"count": state["count"] + 1}
        for name, value in seen.items():
            total = state[f"sum_of_{name}"]
            if total.shape != value.shape:
                raise ValueError(
                    f"range {name!r} now has shape {value.shape}, but the statistics were "
                    f"gathered with {total.shape}. Name the axes that vary in act_batch_axes."
                )
            new[f"sum_of_{name}"] = total + value.astype(jnp.float32)
        return new

    def range(
        self, state: Mapping[str, jax.Array], default: Range | None = None
    ) -> dict:
        count = jnp.maximum(state["count"], 1).astype(jnp.float32)
        mean = {
            k.removeprefix("sum_of_"): v / count
            for k, v in state.items()
            if k != "count"
        }
        if default is None:
            return mean
        _check_same_parts(state, default)
        seen = state["count"] > self.bootstrap_steps
        return {
            k: jnp.where(seen, mean[k].astype(v.dtype), v) for k, v in default.items()
        }


def _check_same_parts(state: Mapping[str, jax.Array], seen: Range) -> None:
    """Refuses a range of another kind than the statistics are of."""
    held = {k.removeprefix("sum_of_") for k in state if k != "count"}
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
