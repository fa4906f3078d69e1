"""What is to be quantized, and the two ways that XLA does it on any device.

plan_plain       range, scales, codes: numerics/qarray.py, fused as XLA likes
plan_one_read    the same codes and scales, said so that XLA makes one kernel of all that
                 stands between two matmuls
"""

import dataclasses
import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from midtread.kernels.candidates import Refusal
from midtread.kernels.environment import Env
from midtread.kernels.layout import is_static, why_not_here
from midtread.kernels.weight_matmul import MAX_ROWS
from midtread.numerics.calibration import Range
from midtread.numerics.qarray import (
    QArray,
    calibrate,
    quantize_to_range,
    quantize_to_scale,
    scales_of,
)
from midtread.numerics.spec import Spec


class Quantized(NamedTuple):
    """Codes for a matmul, and for another that sums over the other axes."""

    codes: QArray
    again: QArray
    largest: jax.Array | None = None  # max |x|, where it was found on the way


@dataclasses.dataclass(frozen=True, eq=False)
class Operand:
    """`x * factor`, to be quantized for a matmul that sums over `summed`.

    Attributes:
        range_: found earlier; None: from the data, now.
        key, site: where noise starts from, if rounding is by chance.
        both: whether once more for a matmul that sums over the other axes. The two differ
            in memory order alone.
        factor: of x's rank, broadcast.
        largest: whether max |x| is wanted.
    """

    x: jax.Array
    spec: Spec
    range_: Range | None = None
    key: jax.Array | None = None
    site: tuple = ()
    summed: tuple[int, ...] = ()
    both: bool = False
    factor: jax.Array | None = None
    largest: bool = False

    @functools.cached_property
    def layout(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The shape of whole tiles, and that of the scale."""
        return self.spec.layout(self.x.shape)

    @property
    def is_absmax(self) -> bool:
        """Whether scales are found from all of the data, as kernels find them."""
        spec = self.spec
        return (
            spec.method == "absmax"
            and not spec.calibration.args
            and self.range_ is None
        )

    @functools.cached_property
    def has_few_rows(self) -> bool:
        """Whether a matmul sums over the last axis, for so few rows that weight_matmul/
        mostly turns their codes into bfloat16, or multiplies their values."""
        x, summed = self.x, self.summed
        if summed != (x.ndim - 1,) or not is_static(x):
            return False
        return math.prod(x.shape[:-1]) <= MAX_ROWS

    def scaled(self) -> jax.Array:
        return self.x if self.factor is None else self.x * self.factor


class Plain(NamedTuple):
    def run(self, a: Operand) -> Quantized:
        x = a.scaled()
        range_ = calibrate(x, a.spec) if a.range_ is None else a.range_
        q = quantize_to_range(x, a.spec, range_, a.key, a.site)
        return Quantized(q, q)


def plan_plain(a: Operand, env: Env) -> Plain:
    return Plain()


class OneRead(NamedTuple):
    """XLA fuses a maximum with what follows only where that meets the maximum's operand at
    once, as in a softmax (jax 0.11.2, for an H200): so a scale is computed for every element,
    from max(|x|, absmax) = absmax, and one of a tile is kept. Extents of 1 are left out: XLA
    drops some of them, and no longer sees the pattern."""

    def run(self, a: Operand) -> Quantized:
        x, (_, counts) = a.scaled(), a.layout
        wide = [n for n in counts[:-1] if n != 1] + [counts[-1]]
        tiles = x.reshape(*wide, x.shape[-1] // counts[-1])
        each = tuple(range(len(wide)))
        spec = dataclasses.replace(a.spec, channelwise_axes=each, tiled_axes={})
        absmax = jnp.maximum(jnp.abs(tiles), calibrate(tiles, spec)["absmax"])
        scale = scales_of({"absmax": absmax}, spec).scale
        q = quantize_to_scale(tiles, spec.format, scale)
        scale = jnp.max(q.scale, axis=-1).reshape(counts)
        q = q.replace(qvalue=q.qvalue.reshape(x.shape), scale=scale)
        return Quantized(q, q)


def plan_one_read(a: Operand, env: Env) -> OneRead | Refusal:
    """For few rows of integers whose scales vary within the sum: for results in bfloat16 it is
    their values that are multiplied, so that codes and scales need not be written. (Codes in
    float8 are written: rounding.py keeps XLA from undoing a cast to them.)"""
    spec, fmt, x = a.spec, a.spec.format, a.x
    reason = why_not_here(x)
    if reason is not None:
        return Refusal(reason)
    if not a.is_absmax or spec.rounding != "nearest":
        return Refusal("it is for scales from the data now, and codes to the nearest")
    if fmt.codes is None or fmt.tile or fmt.scale or spec.scale_rule:
        return Refusal(f"{fmt.name} is written out")
    if spec.scale_dtype is not None or spec.calibration.is_asymmetric:
        return Refusal("it is for scales as they come, and no zero points")
    padded, counts = a.layout
    if not a.has_few_rows or padded != x.shape or counts[:-1] != x.shape[:-1]:
        return Refusal(f"it is for {MAX_ROWS} rows at most, with scales of their own")
    num_rows = math.prod(x.shape[:-1])
    if num_rows == 0 or (num_rows > 8 and num_rows % 8):
        return Refusal(f"{num_rows} rows are padded next")  # by hopper_decode/
    if not 1 < counts[-1] < x.shape[-1]:
        return Refusal("its scales do not vary within a row")
    return OneRead()


@dataclasses.dataclass(frozen=True, eq=False)
class Twice:
    """x, to be quantized for two matmuls from one read, each under its own Spec.

    Attributes:
        summed: the axes either matmul sums over.
        range_: found earlier, the same for both.
        largest: whether max |x| is wanted, if it is found on the way.
    """

    x: jax.Array
    specs: tuple[Spec, Spec]
    summed: tuple[tuple[int, ...], tuple[int, ...]]
    range_: Range | None = None
    largest: bool = False

    @functools.cached_property
    def operands(self) -> tuple[Operand, Operand]:
        one, two = (
            Operand(
                self.x, spec, self.range_, summed=axes, both=True, largest=self.largest
            )
            for spec, axes in zip(self.specs, self.summed)
        )
        return one, two


def why_not_twice(a: Twice) -> str | None:
    if any(spec.rounding != "nearest" for spec in a.specs):
        return "rounding by chance needs a noise for either"
    if sorted(a.summed[0] + a.summed[1]) != list(range(a.x.ndim)):
        return "the two matmuls do not sum over all axes"
    return None
