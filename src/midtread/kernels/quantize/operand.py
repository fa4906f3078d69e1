"""Operand: what is to be quantized, and the two ways that XLA does it on any device.

plan_plain       range, scales and codes as numerics/qarray.py computes them
plan_one_read    the same codes and scales, written so that XLA makes one kernel of all
                 that stands between two matmuls
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
    """Codes for a matmul, and codes for another one that sums over the other axes."""

    codes: QArray
    again: QArray
    largest: jax.Array | None = None  # max |x|, where a kernel computed it


@dataclasses.dataclass(frozen=True, eq=False)
class Operand:
    """`x * factor`, to be quantized for a matmul that sums over `summed`.

    Attributes:
        range_: a range that is known; None to measure the data.
        key, site: where noise starts from, if rounding is by chance.
        both: whether codes are also wanted for a matmul that sums over the other axes. The
            two differ in memory order alone.
        factor: an array of x's rank, which is broadcast.
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
        """Whether scales come from the largest magnitudes in the data, as in our kernels."""
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
        """Returns `x * factor`."""
        return self.x if self.factor is None else self.x * self.factor


class Plain(NamedTuple):
    """The plan to quantize as numerics/qarray.py does."""

    def run(self, a: Operand) -> Quantized:
        x = a.scaled()
        range_ = calibrate(x, a.spec) if a.range_ is None else a.range_
        q = quantize_to_range(x, a.spec, range_, a.key, a.site)
        return Quantized(q, q)


def plan_plain(a: Operand, env: Env) -> Plain:
    return Plain()


class OneRead(NamedTuple):
    """The plan to quantize in one fused kernel of XLA's.

    XLA fuses a maximum with what follows only where that uses the maximum's operand at once,
    as in a softmax (jax 0.11.2, for an H200). So a scale is computed for every element, from
    max(|x|, absmax) = absmax, and one for each tile is kept. Extents of 1 are left out, because
    XLA drops some of them and no longer sees the pattern."""

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
    """Takes few rows of integers whose scales vary within the sum. For results in bfloat16 their
    values are multiplied, so that codes and scales need not be written. (For codes in float8
    that was not measured.)"""
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
        return Refusal(f"{num_rows} rows are padded next")  # hopper_decode/ does that
    if not 1 < counts[-1] < x.shape[-1]:
        return Refusal("its scales do not vary within a row")
    return OneRead()


@dataclasses.dataclass(frozen=True, eq=False)
class Twice:
    """x, to be quantized for two matmuls from one read, each under its own Spec.

    Attributes:
        summed: the axes that each of the two matmuls sums over.
        range_: a range that is known, the same for both; None to measure the data.
        largest: whether max |x| is wanted, if the kernel computes it.
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
