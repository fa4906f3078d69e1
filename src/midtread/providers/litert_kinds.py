"""Kinds of LiteRT ops: what a provider does at each, whether it trains or converts.

Every method takes a row of the table (providers/litert_ops.py), JAX's own function and
its arguments, and returns what the model gets instead. They say which edges have a
range; what a range is made of, and how an array is quantized to it, is for the provider:

    _quantized(x, rule, name)       x on a grid of its own; `name` is where its range is kept
    _output(out, rule)              `out`, to be quantized by whoever consumes it
    _constant(x, rule), _number(c)  a constant on a grid that its own values make
    _affine(x, gain, shift)         gain * x + shift per channel, one integer kernel
"""

import dataclasses
import inspect
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from midtread.model import flaxlib
from midtread.numerics.qarray import is_float
from midtread.providers.litert_ops import (
    KEEP_FUSION,
    Row,
    to_multiples,
)


class Kinds:
    """The handlers; a provider inherits them."""

    # --- kinds that several ops share ---------------------------------------------------

    def both(self, row: Row, call, args, kwargs):
        rule, op_id = self._get_current_rule_and_op_id(row.name)
        self._check_int16(row, rule)
        args = self._inputs(row, args, rule, op_id)
        return self._output(call(*args, **kwargs), rule, row.fixed)

    def input(self, row: Row, call, args, kwargs):
        rule, op_id = self._get_current_rule_and_op_id(row.name)
        args = self._inputs(row, args, rule, op_id)
        edge = self._edges[args[row.inputs[0]]]
        out = call(*args, **kwargs)
        return self._output(out, edge.rule, on_grid=edge.on_grid)

    def again(self, row: Row, call, args, kwargs):
        """Does what `input` does, and annotates the output for the converter as well."""
        return self._on_same_grid(self.input(row, call, args, kwargs))

    def output(self, row: Row, call, args, kwargs):
        rule, _ = self._get_current_rule_and_op_id(row.name)
        if not self._is_static(rule):
            rule = self._edges[args[row.inputs[0]]].rule
        return self._output(call(*args, **kwargs), rule)

    def carry(self, row: Row, call, args, kwargs):
        edges = [self._edges[x] for x in args]
        acts = [e for e, x in zip(edges, args) if e.is_activation and is_float(x)]
        out = call(*args, **kwargs)
        if not acts:
            return self._output(out, None)
        keeps = row.name in KEEP_FUSION
        return self._output(
            out,
            acts[-1].rule,
            acts[-1].fixed,
            fuses=acts[-1].fuses if keeps else 0,
            sums=acts[0].sums if len(acts) == 1 else None,
            on_grid=_shared(e.on_grid for e in acts),
        )

    def float(self, row: Row, call, args, kwargs):
        rule, op_id = self._get_current_rule_and_op_id(row.name)
        if self._is_static(rule):
            self._note(row.name, "LiteRT has no integer kernel for it")
        return self._left_float(op_id, call, args, kwargs)

    def unknown(self, name: str, call, args, kwargs):
        """Handles an op that is in no table."""
        rule, op_id = self._get_current_rule_and_op_id(name)
        wanted = self._is_static(rule) or any(
            self._edges[x].rule is not None for x in args
        )
        if wanted and self.strict_ops:
            path = flaxlib.path_of(self._module())
            raise ValueError(
                f"{path!r}: {name} is not among the ops that can be integer in LiteRT. "
                "Write it with others (providers/litert_ops.py has the table), give it "
                f"to a rule without formats (op_names=({name!r},)), or pass "
                "strict=False to leave it in float."
            )
        if wanted:
            self._note(name, "it is not in the table of ops")
        return self._left_float(op_id, call, args, kwargs)

    def _left_float(self, op_id: str, call, args, kwargs):
        flat = [i for i, x in enumerate(args) if self._edges[x].rule is not None]
        args = list(args)
        for i in flat:  # the producer's kernel is integer all the same
            args[i] = self._quantized(args[i], None, f"{op_id}_input{i}")
        return self._output(call(*args, **kwargs), None)

    def _inputs(self, row: Row, args, rule, op_id: str) -> list:
        suffixes = ("",) if len(row.inputs) == 1 else ("_lhs", "_rhs")
        args = list(args)
        for i, suffix in zip(row.inputs, suffixes):
            if not hasattr(args[i], "dtype"):
                args[i] = self._number(args[i], rule)
            else:
                args[i] = self._quantized(args[i], rule, op_id + suffix)
        return args

    # --- arithmetic ---------------------------------------------------------------------

    def add(self, row: Row, call, args, kwargs):
        """Adds. A constant added to a matmul's result is its bias, and nothing is quantized in
        between."""
        for x, other in (args[:2], args[1::-1]):
            if _is_bias(self._edges[x].fuses, other) and not (
                self._edges[other].is_activation
            ):
                return self._bias(row, call, x, other)
        if not all(self._edges[x].is_activation for x in args[:2]):
            row = dataclasses.replace(row, has_int16=False)
        return self.both(row, call, args, kwargs)

    def _bias(self, row: Row, call, x, bias):
        rule, _ = self._get_current_rule_and_op_id(row.name)
        edge, scaled = self._edges[x], None
        if edge.scaled is not None:
            scaled = lambda gain: edge.scaled(gain) + self._value(bias) * gain
        out = call(x, to_multiples(bias, edge.unit))
        rule = rule if self._is_static(rule) else edge.rule
        return self._output(out, rule, fuses=edge.fuses, scaled=scaled)

    def negative(self, row: Row, call, args, kwargs):
        rule, op_id = self._get_current_rule_and_op_id(row.name)
        (x,) = self._inputs(row, args[:1], rule, op_id)
        return self._output(x * self._number(-1.0, rule), rule)

    def divide(self, row: Row, call, args, kwargs):
        """LiteRT's int8 DIV returns garbage; a product with the inverse does not."""
        rule, op_id = self._get_current_rule_and_op_id(row.name)
        lhs, rhs = args[:2]
        if not self._is_static(rule):
            args = self._inputs(row, (lhs, rhs), rule, op_id)
            return self._output(call(*args, **kwargs), rule)
        if self._edges[rhs].is_activation:
            self._note(row.name, "LiteRT has no integer division: 1/x is float")
            rhs = self._quantized(rhs, rule, f"{op_id}_rhs")
            inverse = self._output(1.0 / rhs, rule)
            inverse = self._quantized(inverse, rule, f"{op_id}_inverse")
        elif not hasattr(rhs, "dtype") or rhs.size == 1:
            inverse = self._number(1.0 / self._value(rhs), rule)
        else:
            inverse = self._constant(rhs, rule, lambda x: 1.0 / x)
        if not hasattr(lhs, "dtype"):
            lhs = self._number(lhs, rule)
        elif self._edges[lhs].is_activation:
            lhs = self._quantized(lhs, rule, f"{op_id}_lhs")
        else:
            lhs = self._constant(lhs, rule)
        return self._output(lhs * inverse, rule)

    def extreme(self, row: Row, call, args, kwargs):
        """Handles maximum and minimum, where input and output must share a range: if the input
        had none of its own, the output's would be imposed on its other consumers too."""
        _, rhs = args[:2]
        is_relu = row.name == "maximum" and not hasattr(rhs, "dtype") and rhs == 0
        return (self.output if is_relu else self.both)(row, call, args, kwargs)

    def select(self, row: Row, call, args, kwargs):
        """Handles where(mask, x, c): c is rounded to x's grid, so that -1e9 means the lowest
        value there is."""
        rule, op_id = self._get_current_rule_and_op_id(row.name)
        which, *cases = args
        acts = [x for x in cases if self._edges[x].is_activation]
        if len(acts) != 1 or not is_float(acts[0]):
            return self._output(call(*args, **kwargs), rule)
        x = self._quantized(acts[0], rule, op_id)
        edge = self._edges[x]
        if edge.on_grid is None:
            return self._output(call(*args, **kwargs), edge.rule)
        cases = [x if c is acts[0] else edge.on_grid(c) for c in cases]
        out = call(which, *cases, **kwargs)
        return self._output(out, edge.rule, on_grid=edge.on_grid)

    # --- ops with more to them ----------------------------------------------------------

    def average(self, row: Row, call, args, kwargs):
        """Handles avg_pool, which is rounded to the grid of its input, as the kernel does. Zeros
        that count are padded first, because the kernel leaves them out."""
        bound = inspect.signature(call).bind(*args, **kwargs)
        bound.apply_defaults()
        x, window, strides, padding, counted = bound.arguments.values()
        strides = strides or (1,) * len(window)
        if counted and padding != "VALID":
            if isinstance(padding, str):
                sizes = x.shape[-1 - len(window) : -1]
                padding = jax.lax.padtype_to_pads(sizes, window, strides, padding)
            pads = [(0, 0)] * (x.ndim - len(window) - 1) + [*padding, (0, 0)]
            pool = lambda x: call(jnp.pad(x, pads), window, strides, "VALID")
        else:
            pool = lambda x: call(x, window, strides, padding, counted)
        return self._on_same_grid(self.input(row, pool, (x,), {}), ties_away=True)

    def _on_same_grid(self, out, **options):
        edge = self._edges[out]
        if edge.on_grid is not None:
            out = edge.on_grid(out, **options)
            self._edges[out] = edge
        return out

    def softmax(self, row: Row, call, args, kwargs):
        """Computes softmax over the last axis, as the kernel does."""
        bound = inspect.signature(jax.nn.softmax).bind(*args, **kwargs).arguments
        x, axis = bound["x"], bound.get("axis", -1)
        if not isinstance(axis, int) or bound.keys() - {"x", "axis"}:
            return self.unknown(row.name, call, args, kwargs)
        if axis % x.ndim == x.ndim - 1:
            return self.both(row, call, (x,), {})
        over_last = lambda x: jnp.moveaxis(call(jnp.moveaxis(x, axis, -1)), -1, axis)
        return self.both(row, over_last, (x,), {})

    def gelu(self, row: Row, call, args, kwargs):
        approximate = kwargs.get("approximate", args[1] if len(args) > 1 else True)
        one = lambda x: self._as_one_op(
            "aten.gelu.default",
            lambda x: call(x, approximate=approximate),
            x,
            approximate="tanh" if approximate else "none",
        )
        return self.both(row, one, args[:1], {})

    def silu(self, row: Row, call, args, kwargs):
        rule, op_id = self._get_current_rule_and_op_id(row.name)
        x = self._quantized(args[0], rule, op_id)
        gate = self._output(jax.nn.sigmoid(x), rule, "unit")
        gate = self._quantized(gate, rule, f"{op_id}_sigmoid")
        return self._output(x * gate, rule)

    def resize(self, row: Row, call, args, kwargs):
        bound = inspect.signature(jax.image.resize).bind(*args, **kwargs).arguments
        image, shape, method = (bound[k] for k in ("image", "shape", "method"))
        method = str(getattr(method, "name", method)).lower()
        if method == "nearest":
            return self.input(row, call, args, kwargs)
        changed = [a for a in range(image.ndim) if image.shape[a] != shape[a]]
        grows = all(shape[a] > image.shape[a] for a in changed)  # no antialiasing
        images = image.ndim == 4 and set(changed) <= {1, 2}
        if method not in ("bilinear", "linear", "triangle") or not (grows and images):
            return self.unknown(row.name, call, args, kwargs)
        one = lambda x: self._as_one_op(
            "odml.upsample_bilinear2d",
            lambda x: call(x, shape, method),
            x,
            size=np.asarray(shape[1:3], np.int64),
            align_corners=False,
            is_nchw_op=False,
        )
        return self._on_same_grid(self.input(row, one, (image,), {}))

    def concatenate(self, row: Row, call, args, kwargs):
        """All inputs and the output share a range: that of the output."""
        rule, op_id = self._get_current_rule_and_op_id(row.name)
        arrays, *rest = args
        self._check_int16(row, rule)
        known = {self._edges[x].fixed for x in arrays}
        if not self._is_static(rule):
            arrays = [
                self._quantized(x, rule, f"{op_id}_input{i}")
                for i, x in enumerate(arrays)
            ]
        on_grid = _shared(self._edges[x].on_grid for x in arrays)
        out = call(arrays, *rest, **kwargs)
        fixed = known.pop() if len(known) == 1 else None
        return self._output(out, rule, fixed, on_grid=on_grid)

    def take(self, row: Row, call, args, kwargs):
        """Looks up rows of an activation, or of a table that is a parameter."""
        rule, op_id = self._get_current_rule_and_op_id(row.name)
        table, *rest = args
        if self._edges[table].weight is not None and rule is not None:
            self._check_table(rule)
        table = self._quantized(table, rule, op_id)
        edge = self._edges[table]
        if row.name == "take" and self._is_static(rule):
            kwargs.setdefault("fill_value", 0)  # there is no nan to fill with
        out = call(table, *rest, **kwargs)
        on_grid = edge.on_grid if self._is_static(rule) else None
        return self._output(out, edge.rule or rule, on_grid=on_grid)

    # --- modules ------------------------------------------------------------------------

    def dropout(self, row: Row, run, module, args, kwargs):
        out = run(*args, **kwargs)
        if out is not args[0]:
            self._edges[out] = dataclasses.replace(self._edges[args[0]], twin=None)
        return out

    def batch_norm(self, row: Row, run, module, args, kwargs):
        """After a matmul it becomes part of it; elsewhere it is gain * x + shift."""
        x, *rest = args
        edge = self._edges[x]
        if edge.fuses:
            out = self._folded(module, run, x, rest, kwargs)
            return self._output(out, edge.rule, fuses=edge.fuses)
        rule, op_id = self._get_current_rule_and_op_id(row.name)
        x = self._quantized(x, rule, op_id)
        out = self._standing_alone(module, run, x, rest, kwargs, rule)
        return self._output(out, rule)

    def norm(self, row: Row, run, module, args, kwargs):
        """Computes LayerNorm, RMSNorm and GroupNorm by ops that LiteRT has in int8."""
        rule, op_id = self._get_current_rule_and_op_id(row.name)
        self._check_int16(row, rule)
        x, *rest = args
        axes = _norm_axes(module, x.ndim)
        is_plain = not rest and not kwargs and axes is not None
        if not self._is_static(rule) or not is_plain:
            if self._is_static(rule):
                self._note(row.name, "masks and feature axes but the last are float")
            x = self._quantized(x, rule, op_id)
            return self._output(run(x, *rest, **kwargs), rule)
        run(x)  # makes the parameters, on the first call
        x = self._quantized(x, rule, op_id)
        q = lambda y, name: self._put_on_grid(y, rule, f"{op_id}_{name}")
        out = self._affine(_normal(self, module, x, axes, q, rule), module, rule)
        return self._output(out, rule)


def _shared(grids: Iterable[Any]) -> Any:
    """Returns the grid that all of them are, or None."""
    first, *others = grids
    return first if all(g is first for g in others) else None


def _is_bias(channels: int, x: Any) -> bool:
    """Whether `x` has one value per channel; those are the last axes of a matmul's result."""
    return channels > 0 and all(n == 1 for n in np.shape(x)[:-channels])


def _norm_axes(module: Any, ndim: int) -> tuple[int, ...] | None:
    """Returns the axes that a norm's moments are taken over; None for other kinds of norms."""
    as_tuple = lambda a: tuple(i % ndim for i in (a if np.iterable(a) else (a,)))
    if _groups(module):
        return tuple(range(1, ndim - 1)) if module.reduction_axes is None else None
    if as_tuple(module.feature_axes) != (ndim - 1,):
        return None
    return as_tuple(module.reduction_axes)


def _groups(module: Any) -> bool:
    return "GroupNorm" in {cls.__name__ for cls in type(module).__mro__}


def _normal(kinds: Kinds, module: Any, x: jax.Array, axes, q, rule) -> jax.Array:
    """Computes (x - mean) / sqrt(variance + epsilon), every step on a grid of its own."""
    shape = x.shape
    if _groups(module):
        size = module.group_size or shape[-1] // module.num_groups
        x = x.reshape(*shape[:-1], shape[-1] // size, size)
        axes = (*axes, x.ndim - 1)
    mean = lambda y: jnp.mean(y, axes, keepdims=True)
    if "RMSNorm" not in {cls.__name__ for cls in type(module).__mro__}:
        x = q(x - q(mean(x), "mean"), "centred")
    variance = q(mean(q(x * x, "square")), "variance")
    variance = q(variance + kinds._number(module.epsilon, rule), "shifted")
    normal = q(x * q(kinds._rsqrt(variance), "inverse"), "normal")
    out = normal.reshape(shape)
    kinds._edges[out] = kinds._edges[normal]
    return out
