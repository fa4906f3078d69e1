"""QtProvider: quantization-aware training and quantized training.

At every matched site the rule and the roles of the operands (weight or activation) make a
Recipe, and the engine trains under it. With `act_static_scale` the ranges of activations
are averaged over the batches seen, in `quant_stats`.
"""

import dataclasses
import functools
from collections.abc import Mapping
from types import MappingProxyType

import jax
import jax.numpy as jnp
from flax import nnx

from midtread.model import flaxlib, intercept
from midtread.model.provider import OPS, QuantizationProvider
from midtread.model.quantize import abstract_call
from midtread.model.rules import QtRule, QuantizationRule
from midtread.model.weights import find_param
from midtread.numerics.calibration import Average
from midtread.numerics.dtypes import is_wide
from midtread.numerics.formats import as_format
from midtread.numerics.qarray import QArray, calibrate
from midtread.numerics.spec import Spec
from midtread.ops.api import Ops
from midtread.ops.einsum import in_jax_order
from midtread.ops.lookup import learn_look_up, table_spec
from midtread.ops.recipe import Recipe
from midtread.ops.training import Ranges, train
from midtread.providers.qtconfig import QtConfig


class QtProvider(QuantizationProvider):
    """Trains under rules: QAT without `bwd_qtype`, QT with it."""

    rule_type = QtRule
    ops = (*OPS, "take", "getitem")
    _streams: dict | None = None  # while an NNX model is prepared: who wants a key
    # path of a module that rounds at random -> extents of the stack of layers it is
    _stacks: Mapping[tuple, tuple[int, ...]] = MappingProxyType({})
    _root: nnx.Module | None = None

    def _init_rule(self, rule: QuantizationRule) -> QtRule:
        if not isinstance(rule, QtRule):
            rule = QtRule(
                **{f.name: getattr(rule, f.name) for f in dataclasses.fields(rule)}
            )
        return super()._init_rule(rule)

    def _run(self, name: str, plain, args, kwargs) -> jax.Array:
        rule, op_id = self._get_current_rule_and_op_id(name)
        if rule is None or _leaves_alone(rule):
            return plain(*args, **kwargs)
        kwargs.pop("_dot_general", None)
        if name == "einsum":
            args = in_jax_order(*args)
        ops = Ops(functools.partial(self._train, rule, op_id))
        return getattr(ops, name)(*args, **kwargs)

    def _train(self, rule: QtRule, op_id: str, c, lhs, rhs) -> jax.Array:
        module = intercept.current_module()
        weights = tuple(
            not isinstance(x, QArray) and find_param(module, x) for x in (lhs, rhs)
        )
        recipe = recipe_of(rule, bool(weights[0]), bool(weights[1]), c.name)
        ranges, key = Ranges(), None
        if self._keeps_ranges(rule):
            ranges = Ranges(*(
                self._range(rule, op_id, c, side, spec, x, weight)
                if spec is not None and not isinstance(x, QArray) and is_wide(x.dtype)
                else None
                for side, spec, x, weight in zip(
                    ("lhs", "rhs"), (recipe.fwd.lhs, recipe.fwd.rhs), (lhs, rhs), weights)
            ))  # fmt: skip
        if recipe.is_random:
            key = self._key(module)
        site = f"{flaxlib.path_of(module)}/{op_id}"
        return train(c, recipe, lhs, rhs, ranges, key, site)

    def take(self, a, indices, axis=None, out=None, **options) -> jax.Array:
        """A look-up: the table of an embedding, where a rule names it."""
        rule, _ = self._get_current_rule_and_op_id("take")
        is_table = axis is not None and find_param(intercept.current_module(), a)
        if rule is None or rule.weight_qtype is None or not is_table:
            return jnp.take(a, indices, axis, out, **options)
        axis = axis % a.ndim
        spec = table_spec(rule, a.ndim, axis)
        if rule.disable_channelwise_axes:
            spec = dataclasses.replace(spec, channelwise_axes=())
        return learn_look_up(a, spec, indices, axis, **options)

    def _keeps_ranges(self, rule: QtRule) -> bool:
        return bool(rule.act_static_scale)

    def _range(self, rule: QtRule, op_id: str, c, side: str, spec: Spec, x, weight):
        """Of an activation the average so far; the current one until there is an
        average. None, that of the data, for a weight."""
        if weight:
            return None
        module, name = intercept.current_module(), f"{op_id}_{side}"
        spec = c.place(spec, side)
        axes = tuple(a % x.ndim for a in rule.act_batch_axes)
        seen = calibrate(jax.lax.stop_gradient(x), spec)
        seen = {k: jnp.mean(v, axis=axes, keepdims=True) for k, v in seen.items()}
        average = Average()
        stat = flaxlib.variable(module, "quant_stats", name, lambda: average.init(seen))
        if flaxlib.can_update(module):
            flaxlib.write(stat, average.update(flaxlib.read(stat), seen))
        return average.range(flaxlib.read(stat), seen)

    # Random numbers. Linen splits a stream over the layers of a scan. In NNX a module that
    # rounds at random holds Rngs; one that stands for a stack of layers holds a stack.

    def _key(self, module) -> jax.Array:
        if self._streams is not None and isinstance(module, nnx.Module):
            self._streams[module._path] = flaxlib.stacked_by(self._root, module)
            return jax.random.key(0)  # only shapes count now
        return flaxlib.make_rng(module, "stochastic_rounding")

    def process_model_inputs(self, model, model_args, model_kwargs):
        if self is not None and any(self._stacks.values()):
            flaxlib.stack_rngs(model, self._stacks)
        call = QuantizationProvider.process_model_inputs
        return call(self, model, model_args, model_kwargs)

    def prepare_nnx(self, model: nnx.Module, method, inputs, kwargs, rngs) -> None:
        """Adds the statistics that a first run would, at zero."""
        flaxlib.set_on_all(model, **{flaxlib.RNGS: None})
        self._streams, self._root = {}, model
        try:
            after = abstract_call(model, method, inputs, kwargs)
        finally:
            self._stacks, self._streams, self._root = self._streams, None, None
        flaxlib.set_on_all(model, **{flaxlib.RNGS: rngs})
        if any(self._stacks.values()):
            flaxlib.stack_rngs(model, self._stacks)
        wanted = {path: m for path, m in nnx.iter_modules(after)}
        for path, module in nnx.iter_modules(model):
            for name, var in vars(wanted[path]).items():
                if isinstance(var, flaxlib.QuantStat) and not hasattr(module, name):
                    zeros = jax.tree.map(
                        lambda a: jnp.zeros(a.shape, a.dtype), flaxlib.read(var)
                    )
                    setattr(module, name, flaxlib.QuantStat(zeros))


def _leaves_alone(rule: QtRule) -> bool:
    return rule.recipe is None and rule.weight_qtype is None and rule.act_qtype is None


def _check_tile(rule: QtRule) -> None:
    """Formats with tiles of their own take no other."""
    for qtype in (rule.weight_qtype, rule.act_qtype):
        tile = None if qtype is None else as_format(qtype).tile
        if tile and rule.tile_size and {"summed": tile} != rule.tiles:
            raise ValueError(
                f"Format {as_format(qtype).name} requires a tile size of {tile}, but "
                f"tile_size={rule.tile_size}: leave it out."
            )


def recipe_of(
    rule: QtRule, lhs_is_weight: bool, rhs_is_weight: bool, op: str = "dot_general"
) -> Recipe:
    """What a rule means for operands with these roles.

    Without `bwd_qtype` a dot's gradient is taken with the float operands, that of a
    convolution or a ragged dot with the quantized ones: as Qwix has it.
    """
    if rule.recipe is not None:
        return rule.recipe
    _check_tile(rule)
    qtype = {True: rule.weight_qtype, False: rule.act_qtype}
    method = {True: rule.weight_calibration_method, False: rule.act_calibration_method}
    per_tensor = rule.disable_channelwise_axes
    weight_tile = rule.bwd_weight_grad_tile_size if rule.bwd_qtype is not None else None
    config = QtConfig(
        lhs_qtype=qtype[lhs_is_weight],
        rhs_qtype=qtype[rhs_is_weight],
        tile_size=rule.tile_size,
        lhs_calibration_method=method[lhs_is_weight],
        rhs_calibration_method=method[rhs_is_weight],
        lhs_disable_channelwise_axes=per_tensor,
        rhs_disable_channelwise_axes=per_tensor,
        dlhs_grad_qtype=rule.bwd_qtype,
        dlhs_grad_calibration_method=rule.bwd_calibration_method,
        dlhs_tile_size=weight_tile if lhs_is_weight else None,
        dlhs_grad_disable_channelwise_axes=per_tensor,
        drhs_grad_qtype=rule.bwd_qtype,
        drhs_grad_calibration_method=rule.bwd_calibration_method,
        drhs_tile_size=weight_tile if rhs_is_weight else None,
        drhs_grad_disable_channelwise_axes=per_tensor,
        use_original_residuals=rule.bwd_qtype is None and op == "dot_general",
        rounding=rule.bwd_stochastic_rounding or "nearest",
        noise_axes=tuple(rule.channelwise_noise_axes),
    )
    return config.override(rule.additional_qt_config or {}).recipe()
