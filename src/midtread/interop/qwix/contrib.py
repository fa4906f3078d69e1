"""Qwix's contrib: calibrated PTQ in two passes, on Midtread's algorithms.

    1. the float model runs on data under a `...CalibrationProvider`, which keeps statistics
       of every weight's inputs in the collection `quant_stats`, as `<weight>_gptq` and so on
    2. `quantize_params(params, abstract, stats)` solves for the weights that have some, and
       rounds the others; the result runs under PtqProvider

    gptq            codes by error feedback             stat: the mean of X X^T over calls
    awq             a factor per input, by a grid       stat: the mean of mean |x|
    smooth_quant    a factor per input, by ranges       stat: the means of them and of 1 / them

Where Qwix keeps factors in boxes of their own and divides the dequantized weight at every
call, here they are the QArray's `pre_scale`, so its inference providers are PtqProvider.
Contractions over several axes are taken too; batched ones and convolutions have no
statistics and are rounded, as with Qwix. `mt.calibrate` does all of this in one call, layer
by layer, for any contraction.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from midtread.algorithms import smooth
from midtread.algorithms.weight import Axes, over_inputs
from midtread.interop.qwix.solvers import published_gptq, solved_params
from midtread.model import flaxlib, intercept
from midtread.model.boxes import WithAux
from midtread.model.provider import QuantizationProvider
from midtread.model.rules import QuantizationRule, field_names
from midtread.model.weights import find_param, turn_of
from midtread.numerics.calibration import Average
from midtread.numerics.formats import as_format
from midtread.numerics.qarray import QArray, is_float, quantize_by_spec
from midtread.ops.api import Ops
from midtread.ops.einsum import in_jax_order
from midtread.ops.engine import contract


@dataclasses.dataclass(frozen=True, kw_only=True)
class GptqRule(QuantizationRule):
    """Where GPTQ's statistics are kept."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class AwqRule(QuantizationRule):
    """Where AWQ's statistics are kept.

    Args:
        n_grid: ratios to try. `quantize_params` takes its own, as Qwix's does.
    """

    n_grid: int = 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class SqRule(QuantizationRule):
    """Where SmoothQuant's statistics are kept.

    Args:
        alpha: how much of the inputs' range moves to the weights.
    """

    alpha: float = 0.5


class CalibrationProvider(QuantizationProvider):
    """Runs a model in float and keeps statistics of the inputs of matched weights.

    A subclass says which: `compute_stats(x)` of x [K, tokens], and `get_stats_suffix`.
    """

    rule_type: type = QuantizationRule
    suffix = ""

    def get_rule_type(self) -> type:
        return self.rule_type

    def get_stats_suffix(self) -> str:
        if not self.suffix:
            raise NotImplementedError
        return self.suffix

    def compute_stats(self, lhs: jax.Array) -> dict[str, jax.Array]:
        raise NotImplementedError

    def _run(self, name: str, plain: Callable, args: tuple, kwargs: dict) -> Any:
        rule, _ = self._get_current_rule_and_op_id(name)
        if rule is None or rule.weight_qtype is None:
            return plain(*args, **kwargs)
        if name == "einsum":
            args = in_jax_order(*args)
        kwargs.pop("_dot_general", None)
        module = intercept.current_module()
        names = {id(a): find_param(module, a) for a in args if is_float(a)}

        def execute(c, lhs, rhs):
            for side, w, x in (("rhs", rhs, lhs), ("lhs", lhs, rhs)):
                weight = names.get(id(w))
                if weight is not None and c.name == "dot_general" and not c.batch:
                    self._keep(rule, c, side, weight, w, x)
                    break
            return contract(c, lhs, rhs)

        return getattr(Ops(execute), name)(*args, **kwargs)

    def _keep(self, rule, c, side: str, weight: str, w, x) -> None:
        module = intercept.current_module()
        turn = turn_of(module, weight, w)
        if turn is None:
            return
        labels = c.labels(side)
        stored = [labels[turn.index(a)] for a in range(len(turn))]
        summed = [label for label in stored if label in c.summed]
        others = c.labels("lhs" if side == "rhs" else "rhs")
        alone = [label for label in others if label not in summed]
        order = [others.index(label) for label in (*summed, *alone)]
        size = [n for label, n in zip(others, x.shape) if label in summed]
        rows = x.transpose(order).reshape(math.prod(size), -1)
        back = [labels.index(label) for label in (*summed, *(n for n in stored if n not in summed))]  # fmt: skip
        self._weight = w.transpose(back).reshape(rows.shape[0], -1)
        self._rule = rule
        found = self.compute_stats(jax.lax.stop_gradient(rows).astype(jnp.float32))
        name = f"{weight}{self.get_stats_suffix()}"
        stat = flaxlib.variable(
            module, "quant_stats", name, lambda: Average().init(found)
        )
        if flaxlib.can_update(module):
            flaxlib.write(stat, Average().update(flaxlib.read(stat), found))


SinglePassCalibrationProvider = CalibrationProvider


class GptqCalibrationProvider(CalibrationProvider):
    rule_type, suffix = GptqRule, "_gptq"
    honours = field_names(GptqRule)

    def compute_stats(self, lhs: jax.Array) -> dict[str, jax.Array]:
        return {"hessian": lhs @ lhs.T}


class AwqCalibrationProvider(CalibrationProvider):
    rule_type, suffix = AwqRule, "_awq"
    honours = field_names(AwqRule)

    def compute_stats(self, lhs: jax.Array) -> dict[str, jax.Array]:
        return {"act_scale": jnp.mean(jnp.abs(lhs), axis=1)}


class SqCalibrationProvider(CalibrationProvider):
    rule_type, suffix = SqRule, "_sq"
    honours = field_names(SqRule)

    def compute_stats(self, lhs: jax.Array) -> dict[str, jax.Array]:
        largest, rule = jnp.max(jnp.abs(lhs), axis=1)[None], self._rule
        factors = smooth.smooth(self._weight, largest, alpha=rule.alpha)[0]
        if rule.act_qtype is not None:  # Qwix divides scales, not ranges
            x, w = as_format(rule.act_qtype).bound, as_format(rule.weight_qtype).bound
            factors *= x**rule.alpha / w ** (1 - rule.alpha)
        return {"sq_scale": 1 / factors, "inv_sq_scale": factors}


def _calibrated(
    params, abstract, stats, suffix: str, solve: Callable, allow_extra_params: bool
) -> Any:
    """Parameters solved for where there are statistics, and rounded elsewhere: boxes, and of
    an NNX model, except with SmoothQuant, dicts as in Qwix; nnx.update takes GPTQ's."""

    def solved(path: tuple[str, ...], w: jax.Array, box: WithAux, stat: Any) -> WithAux:
        del path
        kept = tuple(a % w.ndim for a in box.how.channelwise_axes)
        summed = tuple(a for a in range(w.ndim) if a not in kept)
        axes = Axes((), summed, kept)
        return box.replace(array=solve(w, box.how, Average().range(stat), axes))

    of_boxes = suffix == "_sq"
    return solved_params(
        params, abstract, stats, suffix, solved, allow_extra_params, of_boxes
    )


def gptq_quantize_params(
    params: Any,
    abstract_quantized_params: Any,
    gptq_quant_stats: Any,
    *,
    allow_extra_params: bool = False,
    gptq_block_size: int = 128,
    gptq_damping_factor: float = 0.01,
) -> Any:
    """Parameters of a model under PtqProvider, by GPTQ as published."""

    def solve(w, spec, stat, axes) -> QArray:
        size, damping = gptq_block_size, gptq_damping_factor
        return published_gptq(w, spec, stat["hessian"], axes, size, damping)

    return _calibrated(
        params, abstract_quantized_params, gptq_quant_stats, "_gptq", solve,
        allow_extra_params,
    )  # fmt: skip


def awq_quantize_params(
    params: Any,
    abstract_quantized_params: Any,
    awq_quant_stats: Any,
    *,
    allow_extra_params: bool = False,
    n_grid: int = 20,
) -> Any:
    """Parameters of a model under PtqProvider, with AWQ's factors as `pre_scale`."""

    def solve(w, spec, stat, axes) -> QArray:
        H = jnp.diag(jnp.square(stat["act_scale"]))[None, None]
        factors = smooth.awq(w, spec, H, axes, n_grid, to_one=True)
        return _with_factors(w, spec, factors, axes)

    return _calibrated(
        params, abstract_quantized_params, awq_quant_stats, "_awq", solve,
        allow_extra_params,
    )  # fmt: skip


def sq_quantize_params(
    params: Any,
    abstract_quantized_params: Any,
    sq_quant_stats: Any,
    *,
    allow_extra_params: bool = False,
) -> Any:
    """Parameters of a model under PtqProvider, with SmoothQuant's factors as `pre_scale`."""

    def solve(w, spec, stat, axes) -> QArray:
        return _with_factors(w, spec, stat["inv_sq_scale"][None], axes)

    return _calibrated(
        params, abstract_quantized_params, sq_quant_stats, "_sq", solve,
        allow_extra_params,
    )  # fmt: skip


def _with_factors(w, spec, factors: jax.Array, axes: Axes) -> QArray:
    spread = over_inputs(factors, axes, w.shape)
    q = quantize_by_spec((w / spread).astype(w.dtype), spec)
    return q.replace(pre_scale=over_inputs(factors, axes, q.qvalue.shape))
