"""Choose: which implementation runs a contraction, by device, shapes and formats.

    scaled(...)         codes x codes, scales on kept axes: an array, or None for the plain
                        path in ops/engine.py
    grouped(...)        the same for rows in groups, each with its own matrix
    grouped_weight(...) float x codes for rows in groups
    attend(...)         one token a sequence against a cache of codes
    quantize(...)       a float operand to codes, in the memory order its matmuls want
    quantize_twice(...) the same for two matmuls from one read, or None: one at a time

An operation has an ordered list of candidates, and the first that takes the operands is chosen:

    env = environment.here()                              # once per operation
    choice = first("attend", CANDIDATES, operands, env)   # plan(operands, env) of each in turn
    out = choice.plan.run(operands) if choice.plan else ...     # else the plain path

`operands` is one record with all arrays and options. `plan` looks at shapes, dtypes and the
environment alone: it emits no operations, and returns a Plan, a record of what it found out
(block sizes, matrices), or a Refusal with the reason as text. `run` uses what the Plan holds and
does not find it out again. Reasons are data: `explain` prints them, for devices that are not
there too.

(float x codes is in choose_weights.py.) A choice changes the time, never the meaning: what a
kernel does not take (zero points, odd layouts, sharded arrays) is left to XLA. The user may
overrule it: `implementation` in environment.py.
"""

import dataclasses
import functools
import importlib
import math
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from midtread.kernels import choose_weights, wanted
from midtread.kernels.environment import Env
from midtread.numerics import rounding, views
from midtread.numerics.calibration import Range
from midtread.numerics.qarray import (
    QArray,
    calibrate,
    quantize_to_range,
    quantize_to_scale,
    scales_of,
)
from midtread.numerics.spec import Spec

Labels = tuple[str, ...]


# --- choosing ---------------------------------------------------------------------------------


class Refusal(NamedTuple):
    """Why a candidate does not take some operands, as the end of a sentence about them."""

    reason: str


class Plan(Protocol):
    """What was found out in order to choose: facts, and no arrays."""

    def run(self, operands: Any) -> Any:
        """Computes it, by the facts of this plan."""
        ...


class Candidate(NamedTuple):
    """One implementation of an operation.

    Attributes:
        name: what `explain` calls it.
        needs: the device, as in `Env.why_not`.
        plan: `plan(operands, env) -> Plan | Refusal`, or where that is, as "module:name":
            it is imported when a device has what the candidate needs, and not before,
            since Pallas is large.
        is_interpreted: whether it is taken under implementation("interpret") too.
    """

    name: str
    needs: str
    plan: Callable[[Any, Env], Plan | Refusal] | str
    is_interpreted: bool = True


class Choice(NamedTuple):
    """The first candidate that has a plan, None if all refused, and why those before did."""

    name: str | None
    plan: Any
    refused: tuple[tuple[str, str], ...]


def first(
    operation: str,
    candidates: Sequence[Candidate],
    operands: Any,
    env: Env,
    what: str | None = None,
) -> Choice:
    """The first of the candidates that takes these operands here.

    Args:
        operation: its name, for those who watch (`environment.watched`).
        what: the operands in words. With them, implementation("gpu") is an error where all
            candidates refuse, which tells the reasons.
    """
    refused = []
    choice = None
    for candidate in candidates:
        plan = _plan(candidate, operands, env)
        if not isinstance(plan, Refusal):
            choice = Choice(candidate.name, plan, tuple(refused))
            break
        refused.append((candidate.name, plan.reason))
    choice = choice or Choice(None, None, tuple(refused))
    if env.watch is not None:
        env.watch(operation, operands, choice)
    if choice.name is None and what is not None and env.asked == "gpu":
        reasons = dict.fromkeys(reason for _, reason in refused)
        raise ValueError(
            f"implementation='gpu' cannot run {what}: {'; '.join(reasons)}. "
            "Write implementation(None) to leave the choice to Midtread."
        )
    return choice


def _plan(candidate: Candidate, operands: Any, env: Env) -> Any:
    reason = env.why_not(candidate.needs)
    if reason is not None:
        return Refusal(reason)
    if env.is_interpreted and not candidate.is_interpreted:
        return Refusal("it is not interpreted")
    plan = candidate.plan
    return (_imported(plan) if isinstance(plan, str) else plan)(operands, env)


@functools.cache
def _imported(name: str) -> Callable:
    module, function = name.split(":")
    return getattr(importlib.import_module(module), function)


# --- operations -------------------------------------------------------------------------------


def _kernels() -> ModuleType:
    """Imported on use: Pallas is large, and of no use without a GPU."""
    from midtread.kernels.scaled_matmul import adapter as scaled_adapter

    return scaled_adapter


def _quantizing() -> ModuleType:
    from midtread.kernels.quantize import adapter as quantize_adapter

    return quantize_adapter


def _ragged_kernels() -> ModuleType:
    from midtread.kernels.scaled_matmul import grouped_adapter

    return grouped_adapter


def _few_groups_kernels() -> ModuleType:
    from midtread.kernels.weight_matmul import few_groups

    return few_groups


def scaled(
    labels: tuple[Labels, Labels, Labels],
    lhs,
    rhs,
    tiles: dict[str, int],
    dtype,
    stored: tuple[str, ...] = (),
) -> jax.Array | None:
    """Codes times codes, scaled, in `dtype`.

    Args:
        tiles: the number of tiles of each summed label that scales vary along.
        stored: the sides that were not quantized for this contraction (scaled_matmul/adapter.py).
    """
    out = choose_weights.few_rows(labels, lhs, rhs, dtype)
    if out is not None:
        return out
    reason = why_not_scaled(labels, lhs, rhs, tiles)
    if not wanted.taken(reason, "this matmul of codes"):
        return None
    how = (labels, lhs, rhs, dtype, wanted.is_interpreted())
    return _kernels().blocked(*how) if tiles else _kernels().scaled(*how, stored)


def why_not_scaled(labels, lhs, rhs, tiles: dict[str, int]) -> str | None:
    reason = wanted.why_no_gpu(hopper=True) or wanted.why_not_here(lhs, rhs)
    if reason is not None:
        return reason
    if tiles:
        return _kernels().why_not_blocked(labels, lhs, rhs, tiles)
    return _kernels().why_not_scaled(labels, lhs, rhs)


def grouped(
    labels: tuple[Labels, Labels, Labels], groups: tuple, lhs, rhs, tiles, dtype
) -> jax.Array | None:
    """`scaled` for rows in groups: (the label of rows, that of groups, their sizes)."""
    out = _few_grouped(labels, groups, lhs, rhs, dtype)
    if out is not None:
        return out
    reason = why_not_grouped(labels, groups, lhs, rhs, tiles)
    if not wanted.taken(reason, "this grouped matmul of codes"):
        return None
    kernels = _ragged_kernels()
    of = kernels.Groups(*groups)
    return kernels.grouped(labels, of, lhs, rhs, dtype, wanted.is_interpreted())


def _few_grouped(labels, groups: tuple, lhs, rhs, dtype) -> jax.Array | None:
    """`choose_weights.few_rows` for rows in groups."""
    if not (isinstance(lhs, QArray) and isinstance(rhs, QArray)):
        return None
    x, (rows, group, _) = lhs.qvalue, groups
    if lhs.zero_point is not None:
        return None
    if any(n != 1 and label != rows for label, n in zip(labels[0], lhs.scale.shape)):
        return None
    if not choose_weights.bears_bfloat16(labels, lhs, rhs, dtype, group):
        return None
    few = x.astype(jnp.bfloat16)
    if not choose_weights.is_plain_weight(few, rhs):
        return None
    if why_not_grouped_weight(labels, groups, few, rhs) is not None:
        return None
    out = _by_grouped_weight(labels, groups, few, rhs)
    scale = lhs.scale.astype(jnp.float32).reshape(-1, *[1] * (out.ndim - 1))
    return views.broadcast_with(jnp.multiply, out, scale)


def grouped_weight(labels, groups: tuple, x, w) -> jax.Array | None:
    """`weight_only` for rows in groups."""
    if not choose_weights.is_plain_weight(x, w):
        return None
    reason = why_not_grouped_weight(labels, groups, x, w)
    if not wanted.taken(reason, f"these rows by grouped weights of {w.format.name}"):
        return None
    return _by_grouped_weight(labels, groups, x, w)


def _by_grouped_weight(labels, groups: tuple, x, w) -> jax.Array:
    of = _ragged_kernels().Groups(*groups)
    how = wanted.is_interpreted(), _streams_groups()
    return _few_groups_kernels().weight(labels, of, x, w, *how)


def why_not_grouped_weight(labels, groups: tuple, x, w: QArray) -> str | None:
    reason = wanted.why_no_gpu(hopper=False) or wanted.why_not_here(x, w, groups[2])
    if reason is not None:
        return reason
    of = _ragged_kernels().Groups(*groups)
    return _few_groups_kernels().why_not_weight(labels, of, x, w, _streams_groups())


def _streams_groups() -> bool:
    return not wanted.is_interpreted() and wanted.why_no_gpu(hopper=True) is None


def attend(
    q: jax.Array, k: QArray, v: QArray, lengths: jax.Array, gain: float = 1.0
) -> jax.Array | None:
    """softmax(gain q k / sqrt(h)) v of one token a sequence, q [B, 1, H, h], against a cache
    [B, S, K, h] of which each sequence sees its first `lengths` slots; None likewise."""
    reason = why_not_attend(q, k, v)
    if not wanted.taken(reason, "attention over this cache"):
        return None
    from midtread.kernels.decode_attention import triton as attention

    return attention.attend(q, k, v, lengths, gain, wanted.is_interpreted())


def why_not_attend(q, k: QArray, v: QArray) -> str | None:
    reason = wanted.why_no_gpu(hopper=False) or wanted.why_not_here(q, k, v)
    if reason is not None:
        return reason
    from midtread.kernels.decode_attention import triton as attention

    return attention.why_not(q, k, v)


def why_not_grouped(labels, groups: tuple, lhs, rhs, tiles) -> str | None:
    reason = wanted.why_no_gpu(hopper=True) or wanted.why_not_here(lhs, rhs, groups[2])
    if reason is not None:
        return reason
    if tiles:
        return "its scales vary within the sum"
    kernels = _ragged_kernels()
    return kernels.why_not_grouped(labels, kernels.Groups(*groups), lhs, rhs)


def quantize(
    x: jax.Array,
    spec: Spec,
    range_: Range | None = None,
    key: jax.Array | None = None,
    site: tuple = (),
    *,
    summed: tuple[int, ...],
    both: bool = False,
    factor: jax.Array | None = None,
) -> tuple[QArray, QArray]:
    """`x * factor` quantized: for a matmul that sums over `summed`, and, if `both`, once
    more for one that sums over the other axes. The two differ in memory order alone.

    Args:
        range_: found earlier; None: from the data, now.
        factor: of x's rank, broadcast.
    """
    is_seeded = spec.rounding == "nearest" or key is not None
    if is_seeded and why_not_quantize(x, spec, summed, factor, both) is None:
        seed = None if spec.rounding == "nearest" else rounding.seed(key, site)
        how = {"summed": summed, "both": both, "factor": factor}
        found = _quantizing().quantize(
            x, spec, range_, seed, interpret=wanted.is_interpreted(), **how
        )
        return found.codes, found.again
    if factor is not None:
        x = x * factor
    if range_ is None and _is_rows_of_tiles(x, spec, summed):
        q = _from_one_read(x, spec)
        return q, q
    range_ = calibrate(x, spec) if range_ is None else range_
    q = quantize_to_range(x, spec, range_, key, site)
    return q, q


def _is_few_integers(x, spec: Spec, summed) -> bool:
    """Rows that `choose_weights.few_rows` mostly turns into bfloat16: XLA makes one kernel of
    that and the cast, where codes that a kernel of ours wrote would be read by another."""
    is_integer = spec.format.codes is not None and spec.rounding == "nearest"
    if not is_integer or not wanted.is_static(x):
        return False
    kept = [n for a, n in enumerate(x.shape) if a not in summed]
    return choose_weights.is_few(math.prod(kept)) and summed == (x.ndim - 1,)


def _is_rows_of_tiles(x, spec: Spec, summed) -> bool:
    """Few rows of integers whose scales vary within the sum: for results in bfloat16 it is
    their values that `choose_weights.few_rows` multiplies, so that codes and scales need not
    be written.
    (Codes in float8 are written: rounding.py keeps XLA from undoing a cast to them.)"""
    if wanted.why_no_gpu(hopper=False) or wanted.why_not_here(x):
        return False
    if spec.method != "absmax" or spec.calibration.args or spec.rounding != "nearest":
        return False
    fmt = spec.format
    if fmt.codes is None or fmt.tile or fmt.scale or spec.scale_rule:
        return False
    if spec.scale_dtype is not None or spec.calibration.is_asymmetric:
        return False
    padded, counts = spec.layout(x.shape)
    if padded != x.shape or counts[:-1] != x.shape[:-1] or summed != (x.ndim - 1,):
        return False
    num_rows = math.prod(x.shape[:-1])
    if num_rows == 0 or not choose_weights.is_few(num_rows):
        return False
    is_whole = num_rows <= 8 or num_rows % 8 == 0  # else hopper_decode pads them next
    return is_whole and 1 < counts[-1] < x.shape[-1]


def _from_one_read(x: jax.Array, spec: Spec) -> QArray:
    """The same codes and scales, said so that XLA makes one kernel of all that stands
    between two matmuls (jax 0.11.2, for an H200). It fuses a maximum with what follows only
    where that meets the maximum's operand at once, as in a softmax: so a scale is computed
    for every element, from max(|x|, absmax) = absmax, and one of a tile is kept. Extents
    of 1 are left out: XLA drops some of them, and no longer sees the pattern."""
    _, counts = spec.layout(x.shape)
    wide = [n for n in counts[:-1] if n != 1] + [counts[-1]]
    tiles = x.reshape(*wide, x.shape[-1] // counts[-1])
    each = tuple(range(len(wide)))
    spec = dataclasses.replace(spec, channelwise_axes=each, tiled_axes={})
    absmax = jnp.maximum(jnp.abs(tiles), calibrate(tiles, spec)["absmax"])
    q = quantize_to_scale(tiles, spec.format, scales_of({"absmax": absmax}, spec).scale)
    scale = jnp.max(q.scale, axis=-1).reshape(counts)
    return q.replace(qvalue=q.qvalue.reshape(x.shape), scale=scale)


def quantize_twice(
    x: jax.Array,
    specs: tuple[Spec, Spec],
    summed: tuple[tuple[int, ...], tuple[int, ...]],
    range_: Range | None = None,
    largest: bool = False,
) -> tuple[QArray, QArray, jax.Array | None] | None:
    """x quantized for two matmuls, each under its own Spec, from one read; and max |x|, if
    it is wanted and was found on the way. None if no kernel does that: quantize it twice.

    Args:
        summed: the axes either matmul sums over.
        range_: found earlier, the same for both.
    """
    if any(spec.rounding != "nearest" for spec in specs):
        return None  # either with a noise of its own
    if sorted(summed[0] + summed[1]) != list(range(x.ndim)):
        return None
    both = functools.partial(why_not_quantize, x, both=True)
    if any(both(s, axes) is not None for s, axes in zip(specs, summed)):
        return None
    how = {"summed": summed[0], "interpret": wanted.is_interpreted()}
    if specs[0] == specs[1]:
        how |= {"both": True, "factor": None, "largest": largest}
        return _quantizing().quantize(x, specs[0], range_, None, **how)
    if (
        range_ is not None
        or _quantizing().why_not_tiles(x, specs, summed[0]) is not None
    ):
        return None
    return _quantizing().quantize_tiles(x, specs, **how)


def why_not_quantize(x, spec: Spec, summed, factor=None, both=False) -> str | None:
    reason = wanted.why_no_gpu(hopper=False)
    if reason is not None:
        return reason
    if not wanted.is_alone():
        return (
            "a model over several devices is quantized by XLA, which can partition it"
        )
    if not both and factor is None and _is_few_integers(x, spec, summed):
        return "few rows are mostly cast to bfloat16 next, and XLA does all of that at once"
    return _quantizing().why_not_quantize(x, spec, summed, factor)
