"""PtqProvider: weights quantized once, activations as they come.

A model under this provider holds `WithAux` boxes where its float parameters were. They get
there in one of three ways: `init` of a Linen model makes them (under jax.eval_shape only
their shapes); `quantize_params` fills that tree from a float checkpoint, a part at a time if
need be; an NNX model is quantized parameter by parameter, after an abstract run that finds
out which and how.

Gradients flow straight through quantized activations, so that adapters can be trained.
"""

import contextlib
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import flax
import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx

from midtread.model import caught, flaxlib, intercept, running
from midtread.model.boxes import WithAux
from midtread.model.intercept import is_boxed
from midtread.model.moves import PLAIN, Move, as_seen, follow, stored, trail
from midtread.model.provider import QuantizationProvider, like_by_rules
from midtread.model.quantize import abstract_call
from midtread.model.rules import QtRule, QuantizationRule, field_names, recipe_of
from midtread.model.weights import is_argument, note_given
from midtread.numerics.calibration import statistic, statistic_of
from midtread.numerics.qarray import (
    QArray,
    calibrate,
    dequantize,
    is_float,
    quantize_by_spec,
)
from midtread.numerics.scales import compute_scales
from midtread.numerics.spec import Spec
from midtread.ops import witness
from midtread.ops.api import Ops
from midtread.ops.einsum import in_jax_order
from midtread.ops.lookup import look_up, number_table_axes
from midtread.ops.recipe import Fwd
from midtread.ops.training import Ranges, serve
from midtread.providers.float_weights import FloatWeights, param_path
from midtread.providers.params import check_data, quantize_like

# Linen modules that give the layer inside them functions of its parameters.
REWRITES = (nn.WeightNorm, nn.SpectralNorm)


class Source(NamedTuple):
    """A parameter, and the moves that make an operand of it."""

    owner: Any  # the module that it belongs to
    name: str
    moves: list[Move]


class PtqProvider(QuantizationProvider):
    """Serves quantized weights, with activations in float or quantized on the way.

    >>> model, x = nn.Dense(4), jnp.ones((2, 8))
    >>> rules = [QtRule(weight_qtype="int4", tile_size=4)]
    >>> from midtread.model.quantize import quantize_model
    >>> served = quantize_model(model, PtqProvider(rules))
    >>> served.init(jax.random.key(0), x)["params"]["kernel"].array.qvalue.dtype.name
    'int4'

    Args:
        rules: QuantizationRules or QtRules, of which the forward counts, or dicts of their
            fields.
        disable_jit: taken because Qwix has it; nothing here depends on it.
        strict: a rule that matched nothing, or a weight that stays float although a rule is
            about it, is an error instead of a warning.

    Raises:
        ValueError: A rule that serving cannot honour, such as one that prunes.
    """

    honours = field_names(QtRule)  # those of the backward say nothing about serving
    ops = (*caught.CONTRACTIONS, "take", "getitem", "asarray", "param")

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._float = FloatWeights()
        self.stays_float = self._float.reasons

    def _init_rule(self, rule: QuantizationRule) -> QuantizationRule:
        rule = super()._init_rule(rule)
        recipe = recipe_of(rule, False, True)
        if recipe.sparsity is not None:
            raise ValueError(
                f"rule {rule.module_path!r} prunes weights, which serving does not: prune the "
                "parameters first (mt.Sparsity(...).apply) and leave sparsity out of the rule."
            )
        for spec in (recipe.fwd.lhs, recipe.fwd.rhs):
            if spec is not None and spec.rounding != "nearest":
                raise ValueError(
                    f"rule {rule.module_path!r} rounds the forward by {spec.rounding!r}, and "
                    "serving has no random numbers: give its recipe rounding='nearest'."
                )
        return rule

    def likeness(self) -> Any:
        return like_by_rules(self, PtqProvider)

    def _run(self, name: str, plain, args, kwargs) -> jax.Array:
        rule, op_id = self._get_current_rule_and_op_id(name)
        if running.call_of(self).notes.get("opened"):
            args = [self._codes_of(a) for a in args]
        boxed = any(map(is_boxed, args))
        if not boxed and (rule is None or rule.leaves_alone):
            return plain(*args, **kwargs)
        kwargs.pop("_dot_general", None)
        weight = None if rule is None else recipe_of(rule, False, True).fwd.rhs
        for a in args:
            if isinstance(a, WithAux):
                self._check_format(a, weight)
        args = [_open(a) for a in args]
        if name == "einsum":  # sides are named as they are in training
            args = in_jax_order(*args)
        sources = {id(a): self._source(a, not boxed) for a in args if is_float(a)}
        if weight is not None:
            has_weight = boxed or any(sources.values())
            self._note_met(rule, has_weight)
            if not has_weight:  # beside one, what is computed of parameters is an input
                self._note_computed([a for a in args if id(a) in sources])
        ops = Ops(functools.partial(self._serve, rule, op_id, sources))
        return getattr(ops, name)(*args, **kwargs)

    def take(self, a, indices, axis=None, out=None, **options) -> jax.Array:
        """Looks up rows of a box, or of a table that becomes one if a rule names look-ups."""
        rule, _ = self._get_current_rule_and_op_id("take")
        spec = None if rule is None else recipe_of(rule, False, True).fwd.rhs
        a = self._codes_of(a)
        if isinstance(a, WithAux):
            self._check_format(a, spec)
        a = _open(a)
        if axis is None or out is not None:
            return jnp.take(
                dequantize(a) if is_boxed(a) else a, indices, axis, out, **options
            )
        axis = axis % a.ndim
        source = self._source(a) if spec is not None and is_float(a) else None
        if spec is not None:
            self._note_met(rule, is_boxed(a) or source is not None)
        if source is not None:
            axes = number_table_axes(spec, a.shape, axis)
            quantized = self._quantize_param(source, a, axes)
            a = a if quantized is None else quantized
        if not is_boxed(a):
            return jnp.take(a, indices, axis, **options)
        return look_up(a, indices, axis, **options)

    def _serve(self, rule, op_id: str, sources: dict, c, lhs, rhs) -> jax.Array:
        sides = {"lhs": lhs, "rhs": rhs}
        params = {side: sources.get(id(x)) for side, x in sides.items()}
        are_weights = [
            is_boxed(x) or params[side] is not None for side, x in sides.items()
        ]
        asked = Fwd() if rule is None else recipe_of(rule, *are_weights).fwd
        specs, ranges = {}, {}
        for side, x in sides.items():
            spec = getattr(asked, side)
            if spec is None:
                continue
            if params[side] is not None:
                numbered = c.number_axes(spec, side, x.shape)
                codes = self._quantize_param(params[side], x, numbered)
                sides[side] = x if codes is None else codes
            elif is_float(x):
                specs[side] = spec
                if rule.act_static_scale:
                    numbered = c.number_axes(spec, side, x.shape)
                    ranges[side] = static_range(rule, f"{op_id}_{side}", numbered, x)
        fwd = Fwd(**specs, accumulate=asked.accumulate)
        if all(isinstance(x, QArray) for x in sides.values()):
            # Two weights: one of them is quantized for another matmul than this one.
            sides = {side: dequantize(x) for side, x in sides.items()}
        return serve(c, fwd, sides["lhs"], sides["rhs"], Ranges(**ranges))

    def _check_format(self, box: WithAux, spec: Spec | None) -> None:
        """Refuses a weight that is stored in another format than its rule asks for."""
        if spec is not None and box.how.format != spec.format:
            path = flaxlib.path_of(intercept.current_module())
            raise ValueError(
                f"{path!r} holds a weight in {box.how.format.name}, but the rule asks for "
                f"{spec.format.name}: quantize the float model with this rule, or give the "
                "rule the format that the weight has."
            )

    def _codes_of(self, x: Any) -> Any:
        """Returns the codes behind an operand that is made of the values of a box, where they
        can follow; else the operand."""
        opened = running.call_of(self).notes.get("opened")
        if not opened or isinstance(x, WithAux) or not is_float(x):
            return x
        for ancestor, moves in trail(flaxlib.unbox(x)):
            if id(ancestor) in opened:
                box = opened[id(ancestor)][1]
                codes = follow(flaxlib.unbox(box.array), moves)
                return x if codes is None else box.value.replace(array=codes)
        return x

    def _source(self, x: jax.Array, elsewhere: bool = True) -> Source | None:
        """Returns the parameter that x is made of, None for an activation. Where the other
        operand is a weight already, only the module's own parameters are asked, and neither
        parts of them nor those that live `elsewhere`."""
        module = intercept.current_module()
        name = self.find_param(module, x)
        if name is None:
            source = self.find_part(module, x) if elsewhere else None
        else:
            param = intercept.unwrap(flaxlib.params_of(module)[name])
            ways = (moves for a, moves in trail(flaxlib.unbox(x)) if a is param)
            source = module, name, next(ways, [])  # none: it is known by its shape
        if source is None:
            return None
        owner, name, moves = source
        if not self._is_of_model(owner, name):
            if _is_bridged(owner, running.call_of(self).model):
                self._float.note_bridged(owner, name)
            return None
        seen = as_seen(flaxlib.params_of(owner)[name], x, moves)
        return None if seen is None else Source(owner, name, seen)

    def _note_met(self, rule: QuantizationRule, is_met: bool) -> None:
        """Notes whether an op that a weight rule matched has a weight, for the report that is
        made after the first run."""
        if self._initial_run_complete:
            return
        index = next(i for i, known in enumerate(self._rules) if known is rule)
        self._float.note_met(index, is_met, intercept.current_module())

    def _note_computed(self, operands: list[jax.Array]) -> None:
        """Notes the parameters that operands are functions of: these stay float."""
        module = intercept.current_module()
        self._float.note_computed(running.call_of(self), module, operands)

    def _is_of_model(self, module: Any, name: str) -> bool:
        """Whether a box can take the parameter's place in the model. It cannot in a Linen module
        applied by hand to what the model computed, nor in one bridged to NNX, whose variables
        go back to Linen, nor in a layer inside a wrapper that computes with every parameter
        before the layer gets it."""
        root = running.call_of(self).model
        if _is_bridged(module, root):
            return False
        if any(isinstance(outer, REWRITES) for outer in running.here.modules):
            return False
        if not isinstance(module, nn.Module) or module.is_initializing():
            return True
        if root is None:  # called by a module itself, not by a model under the provider
            return True
        inside = module.path[len(root.path) :]
        return (
            flaxlib.value_at(root.variables.get("params"), (*inside, name)) is not None
        )

    def _outer(self, module: Any, name: str) -> Any:
        """Returns the model's own module where `module` is a stand-in for it that a transform
        made, unless it holds one layer of many."""
        if not isinstance(module, nnx.Module):
            return module
        outer = flaxlib.value_at(running.call_of(self).model, module._path)
        theirs, ours = (flaxlib.params_of(m).get(name) for m in (outer, module))
        if theirs is None or ours is None:  # of another model, or a box by now
            return module
        return outer if theirs.shape == ours.shape else module

    def _quantize_param(
        self, source: Source, x: jax.Array, spec: Spec
    ) -> QArray | None:
        """Replaces a float parameter by a quantized one, and returns what the operand is
        made of; None where the operand's codes cannot be the parameter's."""
        module, name, moves = source
        param = flaxlib.params_of(module).get(name)
        if param is None:  # a box by now: met twice in this op
            return quantize_by_spec(x, spec)
        if is_argument(module, x):
            running.keep_no_trace(self)
        kept = stored(spec, param.shape, moves)
        if kept is None:
            self._float.note(module, name, "cuts the tiles or scales of")
            return None
        if isinstance(module, nn.Module) and not module.is_initializing():
            _refuse_float(module, name, moves)
            return None
        shape, stored_spec, moves = kept
        codes = quantize_by_spec(param.reshape(shape).astype(x.dtype), stored_spec)
        self._store(module, name, shape, WithAux(codes, stored_spec))
        operand = follow(codes, moves)
        # None: from an index that is traced inside a jit
        return quantize_by_spec(x, spec) if operand is None else operand

    def _store(self, module: Any, name: str, shape: Sequence[int], box: WithAux):
        """Puts a box in the place of a parameter, which was given `shape` first: at once, or
        when the model is through if this is a trace of its own, which no array may leave."""
        outer = self._outer(module, name)
        trace = intercept.trace_of(box.array.qvalue)
        param = flaxlib.params_of(module)[name]
        if outer is module and (
            trace is intercept.trace_of(param) or trace is running.entry_trace()
        ):
            with contextlib.suppress(flax.errors.TraceContextError):
                flaxlib.replace_param(module, name, box)
                # The layer may hold the float array still, and multiply by it again.
                opened = running.call_of(self).notes.setdefault("opened", {})
                array = intercept.unwrap(flaxlib.unbox(param))
                opened[id(array)] = array, box
                return
        self._later.append((outer, name, shape, box.how))

    @property
    def _later(self) -> list:
        """Parameters to be replaced once the model is through, on this thread."""
        return running.call_of(self).notes.setdefault("later", [])

    def process_model_output(self, method_name: str, model_output: Any) -> Any:
        while self._later:
            module, name, shape, spec = self._later.pop()
            param = flaxlib.params_of(module).get(name)
            if param is not None and not is_boxed(param):
                value = quantize_by_spec(param.reshape(shape), spec)
                flaxlib.replace_param(module, name, WithAux(value, spec))
        return super().process_model_output(method_name, model_output)

    def float_weights_text(self) -> str:
        return self._float.text(running.call_of(self).model, self._rules)

    # What a layer does to its parameter before it multiplies.

    def param(self, module: nn.Module, name: str, *args, **kwargs) -> Any:
        """Gives out a box as it is, because its shapes are not those that init would make."""
        known = module.get_variable("params", name)
        if isinstance(known, WithAux):
            return flaxlib.unbox(known)
        param = nn.Module.param(module, name, *args, **kwargs)
        note_given(running.call_of(self), module, name, param)
        return param

    def asarray(self, a: Any, dtype: Any = None, *args, **kwargs) -> Any:
        """Leaves a box a box, in another dtype if one is asked for, and makes a QArray of an
        nnx.State of its parts."""
        if isinstance(a, nnx.Variable):
            a = a.get_raw_value()
        if isinstance(a, nnx.State) and "array" in a:
            a = a["array"]
        if isinstance(a, nnx.State) and {"qvalue", "scale"} <= set(a):
            a = QArray(**{k: flaxlib.unbox(v) for k, v in a.items()})
        if isinstance(a, WithAux):
            inner = flaxlib.unbox(a.array)
            return a.replace(array=self.asarray(inner, dtype, *args, **kwargs))
        if isinstance(a, QArray):
            return a if dtype is None or a.dtype == dtype else a.astype(dtype)
        return jnp.asarray(a, dtype, *args, **kwargs)

    def prepare_nnx(self, model: nnx.Module, method, inputs, kwargs, rngs) -> None:
        """Quantizes in place, one parameter after the other; nothing else is run."""
        flaxlib.set_on_all(model, **{flaxlib.RNGS: rngs})
        after = dict(nnx.iter_modules(abstract_call(model, method, inputs, kwargs)))
        self._add_params(model, after)
        needs_run, learnt, is_abstract = False, {}, _is_abstract(model)
        for path, module in nnx.iter_modules(model):
            for name, box in vars(after[path]).items():
                param = getattr(module, name, None)
                if not isinstance(box, WithAux) or isinstance(param, WithAux):
                    continue  # not a box, or quantized before: stays as it is
                if is_abstract:
                    setattr(module, name, box)
                elif isinstance(flaxlib.unbox(box.array), QArray):
                    codes = WithAux(quantize_like(box, flaxlib.unbox(param)), box.how)
                    like = functools.partial(flaxlib.like, param)
                    setattr(module, name, jax.tree.map(like, codes))
                else:  # the scale of an activation
                    needs_run = True
                    if box.how.calibration.method != "fixed":
                        stat = getattr(module, name.removesuffix("_scale"), None)
                        learnt[f"{running.path_of(module)}/{name}"] = stat
        if needs_run:
            check_data(learnt, (inputs, kwargs))
            getattr(model, method)(*inputs, **kwargs)

    def _add_params(self, model: nnx.Module, after: dict) -> None:
        """Adds what the abstract run added besides boxes; a subclass knows what that is."""


def _refuse_float(module: nn.Module, name: str, moves: list[Move]) -> None:
    """Refuses a float parameter of a Linen model in use, unless `init` may have left it so:
    outside of a trace it may not see where a part of a parameter comes from, nor a copy by a
    function that was imported by name."""
    is_whole = all(m.name in (*PLAIN, "transpose") for m in moves)
    boxes = (getattr(p, "array", p) for p in flaxlib.params_of(module).values())
    if not is_whole or any(isinstance(q, QArray) for q in boxes):
        return
    raise ValueError(
        "It seems you're feeding an unquantized param to a quantized model: "
        f"{param_path(module, name)} is float. Pass it through quantize_variables or "
        "quantize_params first."
    )


def _is_abstract(model: nnx.Module) -> bool:
    """Whether nnx.eval_shape made it, with shapes in the place of arrays."""
    leaves = jax.tree.leaves(nnx.state(model))
    return any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves)


def static_range(rule, name: str, spec: Spec, x: jax.Array):
    """Returns the range behind a stored scale, which is a parameter beside the weight."""
    module = intercept.current_module()

    def init():
        stat = getattr(module, name, None) if isinstance(module, nnx.Module) else None
        if isinstance(stat, flaxlib.QuantStat):
            delattr(module, name)
            kept = flaxlib.read(stat)
            seen = statistic_of(kept).range(kept)
        else:
            axes = tuple(a % x.ndim for a in rule.act_batch_axes)
            seen = calibrate(jax.lax.stop_gradient(x), spec)
            seen = statistic(rule.act_static_scale).within(seen, axes)
        return compute_scales(seen, spec.format, spec.scale_rule)

    scale = flaxlib.param(module, f"{name}_scale", lambda: WithAux(init().scale, spec))
    scale = flaxlib.unbox(scale).array.astype(jnp.float32)
    if not spec.calibration.is_asymmetric:
        absmax = (scale * spec.format.bound).astype(x.dtype)
        return witness.range_used(name, x, {"absmax": absmax})
    zero = flaxlib.unbox(
        flaxlib.param(module, f"{name}_zero_point", lambda: init().zero_point)
    )
    assert spec.format.codes is not None  # Spec refused the others
    low, high = spec.format.codes
    at = lambda code: ((code - zero.astype(jnp.float32)) * scale).astype(x.dtype)
    return witness.range_used(name, x, {"min": at(low), "max": at(high)})


def _is_bridged(module: Any, model: Any) -> bool:
    """Whether it is a Linen module that an NNX model holds, or the bridge itself."""
    if isinstance(module, nnx.bridge.ToNNX):
        return True
    return isinstance(module, nn.Module) and isinstance(model, nnx.Module)


def _open(x: Any) -> Any:
    if isinstance(x, tuple | str):  # dimension numbers
        return x
    return flaxlib.unbox(x.array if isinstance(x, WithAux) else x)
