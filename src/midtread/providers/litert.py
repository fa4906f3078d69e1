"""Providers for LiteRT: train with a file's integers, and write it.

    OdmlQatProvider          every edge is fake-quantized; ranges are averaged in quant_stats
    OdmlConversionProvider   the same edges, annotated with constant scales, which LiteRT's
                             converter turns into integers (providers/litert_convert.py)

Rules are about tensors: `weight_qtype` is the format of an op's weights, `act_qtype` that
of its output. Which edges get a range is decided by the same code for both providers
(providers/litert_kinds.py), so that a file computes what was trained.

    weights        int8, int4, int2; one scale per output channel; codes -127..127, ...
    activations    int8 with a zero point, or int16 without; one scale per tensor
    act_static_scale=False    dynamic range: matmuls with weights quantize their input
    act_qtype=None            weights only
"""

import dataclasses
import functools
import operator
import re
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from midtread.kernels import xla
from midtread.model import everyop, flaxlib, intercept, running
from midtread.model.provider import QuantizationProvider
from midtread.model.rules import QuantizationRule, field_names, recipe_of
from midtread.numerics.calibration import Average
from midtread.numerics.formats import as_format
from midtread.numerics.qarray import calibrate, is_float
from midtread.numerics.spec import Spec
from midtread.providers import litert_ops as table
from midtread.providers import litert_own
from midtread.providers.litert_kinds import Kinds
from midtread.providers.litert_matmuls import Matmuls
from midtread.providers.litert_ops import Edge, Edges, grid_of
from midtread.providers.litert_rules import as_range, check_activations, check_rule

CALLS = {**everyop.FUNCTIONS, "take": jnp.take, "getitem": operator.getitem}


class OdmlQatProvider(Kinds, Matmuls, QuantizationProvider):
    """Trains a model as its LiteRT file will compute it; also calibrates a float model.

    Args:
        rules: QuantizationRules with int8 weights and activations, or int4 weights.
        disable_per_channel_weights: one scale for a whole weight.
        fixed_range_for_inputs: (low, high) of the model's float inputs, if known.
        fixed_range_for_outputs: the same for its outputs.
        strict: an op that cannot be integer, and is not known to be float, is an error.

    Raises:
        ValueError: A rule that a LiteRT file cannot express.
    """

    honours = field_names(QuantizationRule)
    ops = ("dot_general", "einsum", "conv_general_dilated")
    named_only = ()

    def __init__(
        self,
        rules: Sequence[Any],
        *,
        disable_per_channel_weights: bool = False,
        fixed_range_for_inputs: tuple[float, float] | None = None,
        fixed_range_for_outputs: tuple[float, float] | None = None,
        strict: bool = True,
    ):
        self.given = list(rules)  # before defaults: export makes a provider of them
        super().__init__(self.given)
        self.strict_ops = strict
        self.per_channel = not disable_per_channel_weights
        self.fixed_inputs = as_range(fixed_range_for_inputs, "fixed_range_for_inputs")
        self.fixed_outputs = as_range(
            fixed_range_for_outputs, "fixed_range_for_outputs"
        )
        self.left_float: dict[tuple[str, str], str] = {}  # (path, op) -> why
        self._ops = litert_own.get_all_ops()  # to add functions to, as in Qwix

    def _init_rule(self, rule: QuantizationRule) -> QuantizationRule:
        check_rule(rule)
        if rule.act_qtype is not None:
            is_static = rule.act_static_scale is not False
            small = as_format(rule.act_qtype).name == "int8"
            method = "minmax" if small else "absmax"
            rule = dataclasses.replace(
                rule,
                act_static_scale=is_static,
                act_calibration_method=rule.act_calibration_method or method,
            )
            check_activations(rule)
        return super()._init_rule(rule)

    # --- what is intercepted ------------------------------------------------------------

    def surroundings(self):
        return everyop.installed()

    def handlers(self):
        handlers = super().handlers()
        for name, row in table.FUNCTIONS.items():
            handlers[name] = functools.partial(self._function, row, CALLS[name])
        return handlers | {
            "ufunc": self._ufunc,
            "custom_jvp": self._custom_jvp,
            "bind": self._bind,
            "dot": lambda *args, **kwargs: self._run("dot", jnp.dot, args, kwargs),
            "module": self._called,
            "param": self._param,
            **litert_own.handlers(self, self._ops),
        }

    def _function(self, row, call, *args, **kwargs):
        if not self._is_about(row, args):
            return NotImplemented
        return getattr(self, row.kind)(row, call, args, kwargs)

    def _is_about(self, row, args) -> bool:
        if len(args) <= max(row.inputs):
            return False
        inputs = args[0] if row.kind == "concatenate" else [args[i] for i in row.inputs]
        if row.kind == "take":  # a table is taken from by indices that are activations
            inputs = [inputs[0], *jax.tree.leaves(args[1:2])]
        return any(self._edges[x].is_activation for x in inputs)

    def _ufunc(self, ufunc, *args, **kwargs):
        row = table.UFUNCS.get(ufunc.__name__)
        if row is None:
            return NotImplemented
        return self._function(row, ufunc, *args, **kwargs)

    def _custom_jvp(self, fun, *args, **kwargs):
        if not any(self._edges[x].is_activation for x in args):
            return NotImplemented
        row = table.CUSTOM_JVP.get(fun)
        if row is None:
            return self.unknown(
                getattr(fun, "__name__", "custom_jvp"), fun, args, kwargs
            )
        return self.output(row, fun, args, kwargs)

    def _bind(self, primitive, *args, **params):
        call = lambda *args, **_: primitive.bind(*args, **params)
        if not any(self._edges[x].is_activation for x in args):
            out = call(*args)
            self._carry_constant(primitive, args, params, out)
            return out
        name = primitive.name
        if name == "integer_pow" and params["y"] == 2:
            name = "square"
        row = table.PRIMITIVES.get(name)
        if not any(self._edges[x].is_activation and is_float(x) for x in args):
            return self._output(call(*args), None)  # ids and masks are whole numbers
        if row is None:
            return self.unknown(name, call, args, {})
        with running.late(name not in table.SEEN_BY_QWIX):
            return getattr(self, row.kind)(row, call, args, {})

    def _called(self, module, run, args, kwargs):
        row = next((r for c, r in table.MODULES.items() if isinstance(module, c)), None)
        if row is None or not args or not self._edges[args[0]].is_activation:
            return NotImplemented
        return getattr(self, row.kind)(row, run, module, args, kwargs)

    def _param(self, module, name, *args, **kwargs):
        """Tags Linen's parameters where they are made."""
        out = type(module).param(module, name, *args, **kwargs)
        value = flaxlib.unbox(out)
        if hasattr(value, "dtype"):
            self._tag(value, (*flaxlib.path_of(module).split("/"), name))
        return out

    def _tag(self, value: Any, path: tuple) -> None:
        path = tuple(str(p) for p in path if p != "")
        self._edges[value] = Edge(
            weight="/".join(path), value=self._known_weight(path, value)
        )

    # --- around a call of the model -----------------------------------------------------

    @property
    def _edges(self) -> Edges:
        return running.call_of(self).notes.setdefault("edges", Edges())

    def _module(self):
        return intercept.current_module()

    def process_model_inputs(self, model, args, kwargs):
        model, args, kwargs = super().process_model_inputs(model, args, kwargs)
        with running.disabled():
            for path, value in flaxlib.all_params(model):
                self._tag(value, path)
            args, kwargs = jax.tree.map(self._model_input, (args, kwargs))
        return model, args, kwargs

    def _model_input(self, x: Any) -> Any:
        if isinstance(x, np.ndarray):
            x = jnp.asarray(x)
        if isinstance(x, jax.Array):
            fixed = self.fixed_inputs if is_float(x) else None
            self._edges[x] = Edge(is_activation=True, fixed=fixed)
        return x

    def process_model_output(self, method_name: str, output: Any) -> Any:
        name = "final" if method_name == "__call__" else method_name
        with running.disabled():
            output = jax.tree.map(
                functools.partial(self._model_output, f"{name}_output"), output
            )
        return super().process_model_output(method_name, output)

    def _model_output(self, name: str, x: Any) -> Any:
        edge = self._edges[x]
        if self.strict_ops and hasattr(x, "dtype") and not edge.is_activation:
            raise ValueError(
                f"an output of the model, {x.dtype}{list(x.shape)}, does not come from "
                "its inputs by any op that was seen: a kernel or a nested trace hides "
                "how. Pass strict=False to leave it in float."
            )
        _, op_id = self._get_current_rule_and_op_id(name)
        if edge.rule is None or not is_float(x):
            return x
        if self.fixed_outputs is not None:
            self._edges[x] = dataclasses.replace(edge, fixed=self.fixed_outputs)
        return self._quantized(x, None, op_id)

    # --- edges --------------------------------------------------------------------------

    def _is_static(self, rule) -> bool:
        return rule is not None and rule.act_qtype is not None and rule.act_static_scale

    def _check_int16(self, row, rule) -> None:
        if not self._is_static(rule) or row.has_int16:
            return
        if as_format(rule.act_qtype).name == "int16":
            path = flaxlib.path_of(self._module())
            raise ValueError(
                f"{path!r}: LiteRT has no int16 kernel for {row.name}. Use "
                "act_qtype='int8', here and for what is before and after it."
            )

    def _note(self, op: str, why: str) -> None:
        self.left_float[flaxlib.path_of(self._module()), op] = why

    def _output(self, out: Any, rule, fixed=None, **known) -> Any:
        """Notes that `out` is an activation that its consumer will quantize under `rule`."""
        rule = rule if self._is_static(rule) else None
        for x in jax.tree.leaves(out):
            self._edges[x] = Edge(is_activation=True, rule=rule, fixed=fixed, **known)
        return out

    def _quantized(self, x: Any, rule, name: str) -> Any:
        """Quantizes an op's input as its producer wants, or else as this op's rule does."""
        if not is_float(x):
            return x
        edge = self._edges[x]
        if edge.weight is not None:
            return self._constant(x, rule)
        rule = edge.rule or rule
        if not self._is_static(rule) or edge.on_grid is not None:
            return x
        if edge.twin is not None and edge.twin[0] == rule:
            return edge.twin[1]
        if not self._has_range(name):
            op = re.split(r"\d", name)[0]
            self._note(op, "there is no range for it, as Qwix gathers none")
            return x
        out = self._put_on_grid(x, rule, name, edge.fixed)
        self._edges[x] = dataclasses.replace(edge, twin=(rule, out))
        return out

    def _put_on_grid(self, x: jax.Array, rule, name: str, fixed=None) -> jax.Array:
        """Rounds `x` to a grid now, instead of leaving that to its consumer."""
        on_grid = self._grid(x, rule, name, fixed)
        out = on_grid(x, sums=self._edges[x].sums)
        self._edges[out] = Edge(is_activation=True, rule=rule, on_grid=on_grid)
        return out

    def _spec(self, x: jax.Array, rule, fixed) -> Spec:
        spec = recipe_of(rule, False, True).fwd.lhs
        axes = tuple(a for a in rule.act_batch_axes if -x.ndim <= a < x.ndim)
        spec = dataclasses.replace(spec, channelwise_axes=axes)
        if isinstance(fixed, str):
            fixed = table.FIXED[fixed, spec.format.name]
        if fixed is None:
            return spec
        return dataclasses.replace(spec, calibration=f"fixed,{fixed[0]},{fixed[1]}")

    def _weight_spec(self, axes: Sequence[int], rule) -> Spec:
        spec = recipe_of(rule, False, True).fwd.rhs
        axes = tuple(axes) if self.per_channel else ()
        return dataclasses.replace(spec, channelwise_axes=axes)

    def _constant_spec(self, rule) -> Spec | None:
        """Returns the Spec of a constant beside activations: their calibration, and one scale."""
        if rule is None:
            return None
        fwd = recipe_of(rule, False, True).fwd
        spec = fwd.lhs if self._is_static(rule) else fwd.rhs
        if spec is None:
            return None
        method = rule.act_calibration_method
        return dataclasses.replace(spec, channelwise_axes=(), calibration=method)

    def _check_table(self, rule) -> None:
        if rule.weight_qtype is not None and as_format(rule.weight_qtype).bits < 8:
            path = flaxlib.path_of(self._module())
            raise ValueError(
                f"{path!r}: a look-up in a table of {as_format(rule.weight_qtype).name}, "
                "but LiteRT's GATHER takes int8. Put a rule for it first: "
                "QuantizationRule(op_names=('take',), weight_qtype='int8', ...)."
            )

    # --- how training quantizes ---------------------------------------------------------

    def _grid(self, x: jax.Array, rule, name: str, fixed=None):
        """Returns a function that rounds arrays to the grid of `x`, straight-through."""
        spec = self._spec(x, rule, fixed)
        seen = calibrate(jax.lax.stop_gradient(x), spec)
        seen = {k: jnp.mean(v).reshape((1,) * x.ndim) for k, v in seen.items()}
        average, module = Average(), self._module()
        stat = flaxlib.variable(module, "quant_stats", name, lambda: average.init(seen))
        if flaxlib.can_update(module):
            before = (
                average.init(seen) if spec.method == "fixed" else flaxlib.read(stat)
            )
            flaxlib.write(stat, average.update(before, seen))
        range_ = average.range(flaxlib.read(stat), seen)
        range_ = {k: v.reshape(()) for k, v in range_.items()}
        return functools.partial(_straight_through, range_, grid_of(range_, spec))

    def _multiply(self, rule, c, x, w, side: str, gain=None) -> jax.Array:
        if rule is not None and rule.weight_qtype is not None:
            spec = self._weight_spec(self._channels(c, side), rule)
            range_ = calibrate(w, spec)
            w = _straight_through(range_, grid_of(range_, spec, is_narrow=True), w)
        return c.run(x, w, by=xla) if side == "rhs" else c.run(w, x, by=xla)

    def _unit(self, rule, c, x, w, side: str) -> jax.Array | None:
        """Returns the scale of the matmul's integer sums, of which a bias is a multiple."""
        scale = table.scale_of(self._edges[x])
        if scale is None or rule is None or rule.weight_qtype is None:
            return None
        channels = self._channels(c, side)
        spec = self._weight_spec(channels, rule)
        of_weight = grid_of(calibrate(w, spec), spec).scale
        if of_weight.size > 1:
            of_weight = of_weight.reshape([w.shape[a] for a in channels])
        return jax.lax.stop_gradient(scale.reshape(()) * of_weight)

    def _dynamic(self, x: jax.Array, spec: Spec) -> jax.Array:
        # The largest element is at the bound that is made of it: of its gradient one half comes
        # through the clip and the other through the bound.
        range_ = calibrate(x, spec)
        return _straight_through(range_, grid_of(range_, spec), x)

    def _constant(self, x: jax.Array, rule, change=lambda x: x) -> jax.Array:
        spec = self._constant_spec(rule)
        x = change(x)
        if spec is None:
            return x
        range_ = {k: v.reshape(()) for k, v in calibrate(x, spec).items()}
        on_grid = functools.partial(_straight_through, range_, grid_of(range_, spec))
        out = on_grid(x)
        self._edges[out] = Edge(on_grid=on_grid)
        return out

    def _number(self, c: Any, rule) -> Any:
        return c  # any number is on some grid

    def _value(self, x: Any) -> Any:
        return x

    def _known_weight(self, path, value):
        return None

    def _has_range(self, name: str) -> bool:
        return True  # the data is measured now

    def _carry_constant(self, op, args, params, out) -> None:
        """Notes that what is made from one parameter by moving its values is that parameter."""
        names = {self._edges[x].weight for x in args} - {None}
        row = table.PRIMITIVES.get(getattr(op, "name", ""))
        if len(names) == 1 and row is not None and row.kind == "carry":
            for x in jax.tree.leaves(out):
                self._edges[x] = Edge(weight=next(iter(names)))

    def _rsqrt(self, x: jax.Array) -> jax.Array:
        # The variance may be code 0, and inf has no gradient.
        return jax.lax.rsqrt(jnp.maximum(x, 1e-12))

    def _as_one_op(self, name: str, fn, x: jax.Array, **attributes) -> jax.Array:
        return fn(x)

    def _affine(self, x: jax.Array, module, rule) -> jax.Array:
        params = flaxlib.params_of(module)
        gain, bias = params.get("scale", 1.0), params.get("bias")
        out = x * gain
        if bias is None:
            return out
        scale = table.scale_of(self._edges[x])
        assert scale is not None
        unit = scale * jnp.abs(gain) / 127
        return out + table.to_multiples(bias, jnp.where(unit == 0, 1, unit))

    def _folded(self, module, run, x, rest, kwargs) -> jax.Array:
        return run(x, *rest, **kwargs)

    def _standing_alone(self, module, run, x, rest, kwargs, rule) -> jax.Array:
        return run(x, *rest, **kwargs)


def _straight_through(range_, grid, x: jax.Array, **options) -> jax.Array:
    inside = table.clipped(x, range_)
    return inside + jax.lax.stop_gradient(grid(x, **options) - inside)
