"""QtProvider: quantization-aware training and quantized training.

At every matched site the rule and the roles of the operands (weight or activation) make a
Recipe, and the engine trains under it. With `act_static_scale` the ranges of activations
are averaged over the batches seen, in `quant_stats`.
"""

import functools
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx

from midtread.model import caught, flaxlib, intercept, running
from midtread.model.provider import QuantizationProvider, like_by_rules
from midtread.model.quantize import abstract_call
from midtread.model.rules import QtRule, QuantizationRule, field_names, recipe_of
from midtread.model.weights import is_left_behind, note_given
from midtread.numerics.calibration import statistic
from midtread.numerics.qarray import QArray, calibrate, is_float
from midtread.numerics.spec import Spec
from midtread.ops import witness
from midtread.ops.api import Ops
from midtread.ops.einsum import in_jax_order
from midtread.ops.lookup import learn_look_up, number_table_axes
from midtread.ops.recipe import Recipe
from midtread.ops.training import Ranges, train


class QtProvider(QuantizationProvider):
    """Trains under rules: quantization-aware (QAT) without `bwd_qtype`, quantized (QT) with it.

    >>> from flax import linen as nn
    >>> from midtread.model.quantize import quantize_model
    >>> rules = [QtRule(weight_qtype="int8", act_qtype="int8", bwd_qtype="int8")]
    >>> model, x = quantize_model(nn.Dense(4), QtProvider(rules)), jnp.ones((2, 8))
    >>> variables = model.init(jax.random.key(0), x)
    >>> grads = jax.grad(lambda v: model.apply(v, x).sum())(variables)
    >>> grads["params"]["kernel"].shape
    (8, 4)

    Args:
        rules: QtRules or QuantizationRules, or dicts of their fields.
        disable_jit: taken because Qwix has it; nothing here depends on it.
        strict: a rule that matched nothing is an error instead of a warning.

    Raises:
        ValueError: A rule whose fields contradict each other.
    """

    rule_type = QtRule
    honours = field_names(QtRule)
    ops = (*caught.CONTRACTIONS, "take", "getitem", "param")
    _streams: dict | None = None  # the modules that want a key, while NNX is prepared
    # path of a module that rounds at random -> extents of the stack of layers that it is
    _stacks: Mapping[tuple, tuple[int, ...]] = MappingProxyType({})
    _root: nnx.Module | None = None

    def _init_rule(self, rule: QuantizationRule) -> QtRule:
        self._refuse_fields(rule)
        if not isinstance(rule, QtRule):
            fields = field_names(QuantizationRule)
            rule = QtRule(**{name: getattr(rule, name) for name in fields})
        return super()._init_rule(rule)

    def likeness(self) -> Any:
        return like_by_rules(self, QtProvider)

    def _run(self, name: str, plain, args, kwargs) -> jax.Array:
        rule, op_id = self._get_current_rule_and_op_id(name)
        if rule is None or rule.leaves_alone:
            return plain(*args, **kwargs)
        kwargs.pop("_dot_general", None)
        if name == "einsum":
            args = in_jax_order(*args)
        ops = Ops(functools.partial(self._train, rule, op_id))
        return getattr(ops, name)(*args, **kwargs)

    def recipe_for(
        self, rule: QtRule, op: str, lhs_is_weight: bool, rhs_is_weight: bool
    ) -> Recipe:
        """Returns what a rule means for an op of this name. Here it is the same for all."""
        del op
        return recipe_of(rule, lhs_is_weight, rhs_is_weight)

    def _train(self, rule: QtRule, op_id: str, c, lhs, rhs) -> jax.Array:
        module = intercept.current_module()
        weights = self._weight_of(module, lhs), self._weight_of(module, rhs)
        recipe = self.recipe_for(rule, c.name, bool(weights[0]), bool(weights[1]))
        ranges, key = Ranges(), None
        if self._keeps_ranges(rule):
            ranges = Ranges(*(
                self._range(rule, op_id, c, side, spec, x, weight)
                if spec is not None and is_float(x)
                else None
                for side, spec, x, weight in zip(
                    ("lhs", "rhs"), (recipe.fwd.lhs, recipe.fwd.rhs), (lhs, rhs), weights)
            ))  # fmt: skip
        site = ""
        if recipe.is_random:
            key, site = self._key(module), f"{flaxlib.path_of(module)}/{op_id}"
        return train(c, recipe, lhs, rhs, ranges, key, site)

    def _weight_of(self, module, x: Any) -> str | None:
        """Returns the name of the parameter that an operand is, or is a part of: one layer of
        a stack, say. None for an activation."""
        if isinstance(x, QArray):
            return None
        name = self.find_param(module, x)
        part = self.find_part(module, x) if name is None else None
        return name if part is None else part[1]

    def param(self, module: nn.Module, name: str, *args, **kwargs) -> Any:
        """Gives out a parameter, which counts as a weight in other modules too."""
        param = nn.Module.param(module, name, *args, **kwargs)
        note_given(running.call_of(self), module, name, param)
        return param

    def take(self, a, indices, axis=None, out=None, **options) -> jax.Array:
        """Looks up rows of an embedding's table, where a rule names look-ups."""
        rule, _ = self._get_current_rule_and_op_id("take")
        is_table = axis is not None and self.find_param(intercept.current_module(), a)
        spec = None if rule is None else recipe_of(rule, False, True).fwd.rhs
        if spec is None or not is_table or out is not None:
            return jnp.take(a, indices, axis, out, **options)
        axis = axis % a.ndim
        spec = number_table_axes(spec, a.shape, axis)
        return learn_look_up(a, spec, indices, axis, **options)

    def _keeps_ranges(self, rule: QtRule) -> bool:
        return bool(rule.act_static_scale)

    def _range(self, rule: QtRule, op_id: str, c, side: str, spec: Spec, x, weight):
        """Returns the range of an activation: that of earlier batches, or the current one until
        there are some. It is None for a weight, which is measured."""
        if weight or 0 in x.shape:
            return None
        module, name = intercept.current_module(), f"{op_id}_{side}"
        spec = c.number_axes(spec, side, x.shape)
        axes = tuple(a % x.ndim for a in rule.act_batch_axes)
        seen = calibrate(jax.lax.stop_gradient(x), spec)
        over_batches = statistic(rule.act_static_scale)
        seen = over_batches.within(seen, axes)
        if _is_written(module, name) and any(
            is_left_behind(module, x) for x in jax.tree.leaves(seen)
        ):
            raise ValueError(
                f"{flaxlib.path_of(module)!r}: {op_id} runs inside a jax.jit (or scan, vmap, "
                "cond or checkpoint) of the model's own, which no range that it sees can "
                "leave. Use Flax's transforms there (nn.scan, nn.vmap, nn.remat; nnx.scan ..), "
                "or drop act_static_scale for this layer by a rule before."
            )
        stat = flaxlib.variable(
            module, "quant_stats", name, lambda: over_batches.init(seen)
        )
        if flaxlib.can_update(module):
            flaxlib.write(stat, over_batches.update(flaxlib.read(stat), seen))
        range_ = over_batches.range(flaxlib.read(stat), seen)
        return witness.range_used(name, x, range_)

    # Linen splits a random stream over the layers of a scan. In NNX a module that rounds at
    # random has Rngs, and one that stands for a stack of layers has a stack of them.

    def _key(self, module) -> jax.Array:
        if self._streams is not None and isinstance(module, nnx.Module):
            self._streams[module._path] = flaxlib.stacked_by(self._root, module)
            return jax.random.key(0)  # the model runs on shapes, so any key will do
        return flaxlib.make_rng(module, "stochastic_rounding")

    def begin_call(self, model: Any) -> None:
        if isinstance(model, nnx.Module) and any(self._stacks.values()):
            flaxlib.stack_rngs(model, self._stacks)

    def prepare_nnx(self, model: nnx.Module, method, inputs, kwargs, rngs) -> None:
        flaxlib.set_on_all(model, **{flaxlib.RNGS: None})
        self._streams, self._root = {}, model
        try:
            after = abstract_call(model, method, inputs, kwargs)
        finally:
            self._stacks, self._streams, self._root = self._streams, None, None
        flaxlib.set_on_all(model, **{flaxlib.RNGS: rngs})
        self.begin_call(model)
        self.add_state(model, after)


def _is_written(module: Any, name: str) -> bool:
    """Whether a call writes the statistics `name`, or makes them."""
    if flaxlib.can_update(module):
        return True
    is_linen = isinstance(module, nn.Module)
    return is_linen and not module.has_variable("quant_stats", name)
