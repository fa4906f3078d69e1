"""Provider: what happens at a matched site.

A provider owns rules, and methods named like the ops it handles. While a model runs,
JAX's `lax.dot_general(...)` becomes `provider.dot_general(...)` with the same arguments;
the method asks `_get_current_rule_and_op_id` what applies where it stands, and is free to
call JAX itself: inside a handler nothing is intercepted. Write a subclass to do something
of your own at matched sites.

An op id is the op's name and a number, counted per module and call: "dot_general0" is a
module's first matmul, whether or not a rule matches it. Statistics are stored under it. A
`lax.dot`, which Qwix does not see, is counted from LATE on, so that the names of the
others are those that Qwix gives them.
"""

import collections
import contextlib
import copy
import dataclasses
import difflib
import functools
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx

from midtread.model import caught, flaxlib, intercept, running
from midtread.model.moves import Move
from midtread.model.rules import QuantizationRule, as_rules, recipe_of
from midtread.model.weights import find_param, find_part
from midtread.ops import witness
from midtread.ops.context import here

LATE = 100  # the first number of a matmul that Qwix does not count

# Methods that a subclass of Qwix's providers may override, and what to do here instead.
_NOT_HOOKS = {
    "_create_dot_general_qt_config": "give rules additional_qt_config or a recipe",
    "_create_conv_general_qt_config": "give rules a recipe",
    "_create_ragged_dot_qt_config": "give rules a recipe",
    "_update_and_get_quant_stat": "override dot_general and einsum",
    "get_interceptors": "override get_intercept_map",
    "nn_param": "override param",
    "dot": "override dot_general, which jnp.dot ends in",
}


class QuantizationProvider:
    """Rules, and handlers for the ops they match: the base of every provider.

    A subclass has a method for each op it handles, called as JAX's function is, and names in
    `honours` the rule fields it acts on; others are refused by name.

    Args:
        rules: of the provider's `rule_type`, or dicts of their fields. The first that matches
            decides.
        disable_jit: taken because Qwix has it; nothing here depends on it.
        strict: a rule that matched nothing is an error instead of a warning.

    Raises:
        TypeError: Rules that are not a list, or a subclass that overrides what is never called.
        ValueError: A rule with a field that this provider does not honour.
    """

    rule_type: type = QuantizationRule
    # The fields of our rules that it acts on. Others are refused by name, and `refusal` says
    # why and what to write. None leaves that to a subclass with rules of its own.
    honours: frozenset[str] | None = None
    traces_inside = False  # whether a model of its own was seen to trace inside itself
    refusal = "{field} is for {made_for}: leave it out, or use mt.{made_for}"
    ops: tuple[str, ...] = caught.CONTRACTIONS
    # {path of a weight that stays float though a rule is about it: why}
    stays_float: Mapping[str, str] = MappingProxyType({})
    # A rule matches these ops only if its op_names have them.
    named_only: tuple[str, ...] = ("take",)

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        for name in _NOT_HOOKS.keys() & vars(cls).keys():
            raise TypeError(
                f"{cls.__name__} overrides {name}, which is never called here: "
                f"{_NOT_HOOKS[name]}."
            )

    def __init__(
        self, rules: Sequence[Any], *, disable_jit: bool = False, strict: bool = False
    ):
        self._rules = [
            self._init_rule(rule) for rule in as_rules(rules, self.rule_type)
        ]
        self._rule_matches = [0] * len(self._rules)
        self._paths: dict[str, set[str]] = {}  # every path seen, in order, and its ops
        self._rule_at: dict[tuple[str, str], int | None] = {}  # what `rule_at` has said
        self._initial_run_complete = False
        self.disable_jit = disable_jit
        self.strict = strict

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._rules})"

    def _init_rule(self, rule: QuantizationRule) -> QuantizationRule:
        """Fills in defaults and refuses what makes no sense."""
        self._refuse_fields(rule)
        if rule.act_qtype is None and rule.act_static_scale is not None:
            raise ValueError(
                f"Invalid rule: act_static_scale is set to {rule.act_static_scale} but act_qtype "
                "is None. Either unset act_static_scale, or set act_qtype to quantize "
                f"activations. (Rule: {rule})"
            )
        static = rule.act_static_scale
        return dataclasses.replace(
            rule,
            act_static_scale=static if isinstance(static, str) else bool(static),
            act_calibration_method=rule.act_calibration_method or "absmax",
        )

    def _refuse_fields(self, rule: QuantizationRule) -> None:
        """Refuses fields of our rules that this provider would not look at."""
        if self.honours is None:
            return
        ours = {  # a subclass's own fields are its own business
            name: kind.made_for
            for kind in type(rule).__mro__
            if "made_for" in vars(kind)
            for name in kind.__annotations__
        }
        for field in dataclasses.fields(rule):
            value = getattr(rule, field.name)
            is_refused = field.name in ours and field.name not in self.honours
            if is_refused and value and value != field.default:
                why = self.refusal.format(field=field.name, made_for=ours[field.name])
                raise ValueError(
                    f"rule {rule.module_path!r}: {field.name}={value!r}, but {why}."
                )

    def needs_rngs(self) -> bool:
        """Whether a model under this provider draws random numbers for it."""
        return any(recipe_of(rule, False, True).is_random for rule in self._rules)

    def likeness(self) -> Any:
        """Returns what providers have in common whose handlers do the same; None to be alone."""
        return None

    def handlers(self) -> dict[str, Callable]:
        """Returns the methods that replace JAX's functions, by the ops' names."""
        paths = self.get_intercept_map().items()
        return {intercept.watch(path): handler for path, handler in paths}

    def get_intercept_map(self) -> dict[str, Callable]:
        """Returns {"jax.lax.dot_general": self.dot_general, ...}. A subclass may add others:
        `return super().get_intercept_map() | {"jax.numpy.tanh": self.tanh}`."""
        path = lambda name: caught.OPS[name].path if name in caught.OPS else name
        methods = {path(n): getattr(self, n) for n in self.ops if hasattr(self, n)}
        return {**methods, path("current_rule"): self._rule_for}

    def prepare_nnx(self, model: Any, method: str, inputs, kwargs, rngs: Any) -> None:
        """Adds to an NNX model what its first run would, as it is before that run."""
        from midtread.model.quantize import abstract_call  # which imports this file

        flaxlib.set_on_all(model, **{flaxlib.RNGS: rngs})
        self.add_state(model, abstract_call(model, method, inputs, kwargs))

    def add_state(self, model: Any, after: Any) -> None:
        """Adds to an NNX model what `after`, the model after an abstract run, has besides."""
        modules = dict(nnx.iter_modules(after))
        for path, module in list(nnx.iter_modules(model)):
            for name, value in vars(modules[path]).items():
                first = None if hasattr(module, name) else self.before_first(value)
                if first is not None:
                    setattr(module, name, first)

    def before_first(self, value: Any) -> Any:
        """Returns what an attribute that a first run added is before it, from its shapes; None
        for what is not the provider's. Here these are the statistics, at zero."""
        if not isinstance(value, flaxlib.QuantStat):
            return None
        zeros = lambda a: jnp.zeros(a.shape, a.dtype)
        return flaxlib.QuantStat(jax.tree.map(zeros, flaxlib.read(value)))

    def surroundings(self) -> contextlib.AbstractContextManager:
        """Returns a context that is entered around every call of the model."""
        return contextlib.nullcontext()

    # JAX's functions become these. A subclass changes all of them in `_run`, or one by name.

    def dot_general(self, *args, **kwargs) -> jax.Array:
        return self._run("dot_general", jax.lax.dot_general, args, kwargs)

    def einsum(self, *args, **kwargs) -> jax.Array:
        return self._run("einsum", jnp.einsum, args, kwargs)

    def conv_general_dilated(self, *args, **kwargs) -> jax.Array:
        return self._run(
            "conv_general_dilated", jax.lax.conv_general_dilated, args, kwargs
        )

    def ragged_dot(self, *args, **kwargs) -> jax.Array:
        return self._run("ragged_dot", jax.lax.ragged_dot, args, kwargs)

    def ragged_dot_general(self, *args, **kwargs) -> jax.Array:
        return self._run("ragged_dot_general", jax.lax.ragged_dot_general, args, kwargs)

    def getitem(self, table: Any, ids: jax.Array) -> Any:
        """Handles `table[ids]` as a look-up where a rule names those."""
        if self._rule_for("take") is None:
            return NotImplemented
        ids = jnp.where(ids < 0, ids + table.shape[0], ids)
        return self.take(table, ids, 0, mode="clip")

    def _run(self, name: str, plain: Callable, args: tuple, kwargs: dict) -> Any:
        """Runs an op that was intercepted; `plain` is JAX's own function."""
        self._get_current_rule_and_op_id(name)
        return plain(*args, **kwargs)

    # These say which rule applies.

    def rules_here(self) -> tuple[int, ...]:
        """Returns the rules that could match in the current module, for jit's cache key."""
        module = running.entered_module()
        if module is None:
            return ()
        return _matching(self._patterns, flaxlib.path_of(module))

    @functools.cached_property
    def _patterns(self) -> tuple[str, ...]:
        return tuple(rule.module_path for rule in self._rules)

    def _rule_for(self, op_name: str):
        return self._get_current_rule_and_op_id(op_name, only_rule=True)[0]

    def _get_current_rule_and_op_id(
        self, op_name: str, *, only_rule: bool = False, repeated_call: bool = False
    ) -> tuple[Any, str | None]:
        """Returns the first rule that matches the current module and op, and the op's id."""
        module = intercept.current_module()
        path = flaxlib.path_of(module)
        index = self.match(path, op_name)
        rule = None if index is None else self._rules[index]
        if only_rule:
            return rule, None
        counter, late = self._counter(module), here.is_late
        if not repeated_call:
            counter[op_name, late] += 1
        op_id = f"{op_name}{counter[op_name, late] - 1 + LATE * late}"
        witness.rule(index, op_id)
        return rule, op_id

    def match(self, path: str, op_name: str) -> int | None:
        """Returns what `rule_at` does, and notes it for the report of unused rules."""
        self._paths.setdefault(path, set()).add(op_name)
        index = self.rule_at(path, op_name)
        if index is not None:
            self._rule_matches[index] += 1
        return index

    def _matching_rules(self, path: str, op_name: str) -> Iterator[int]:
        """Yields the rules that match an op of a module; the first of them applies."""
        for i, rule in enumerate(self._rules):
            named = op_name in rule.op_names or op_name not in self.named_only
            if named and rule.matches(path, op_name):
                yield i

    def rule_at(self, path: str, op_name: str) -> int | None:
        """Returns the number of the rule that applies to an op of a module, None for none."""
        site = path, op_name
        if site not in self._rule_at:
            self._rule_at[site] = next(self._matching_rules(path, op_name), None)
        return self._rule_at[site]

    def _counter(self, module: Any) -> collections.Counter:
        """Returns the counts of ops in a module in this call. Linen modules that share a scope
        share the counts."""
        owner = module.scope if isinstance(module, nn.Module) else module
        counters = running.call_of(self).counters
        if id(owner) not in counters:
            counters[id(owner)] = owner, collections.Counter()
        return counters[id(owner)][1]

    def find_param(self, module: Any, x: Any) -> str | None:
        """Returns the name of the parameter that an operand is, None for an activation."""
        return find_param(module, x)

    def find_part(self, module: Any, x: Any) -> tuple[Any, str, list[Move]] | None:
        """Returns (module, name, moves) of the parameter, of this module or of another, that
        an operand is a part of; None for an activation."""
        return find_part(running.call_of(self), module, x)

    # These are called around a call of the model.

    def begin_call(self, model: Any) -> None:
        """Called when a model starts to run, before its inputs are looked at."""

    def process_model_inputs(
        self, model: Any, model_args: Sequence[Any], model_kwargs: dict[str, Any]
    ):
        """Called before the model; may change what it is called with."""
        return model, model_args, model_kwargs

    def process_model_output(self, method_name: str, model_output: Any) -> Any:
        """Called after the model; may change what it returns."""
        first = not self._initial_run_complete
        self._initial_run_complete = True
        if first:
            self._report_unused()
        return model_output

    def _report_unused(self) -> None:
        texts = self.unused_rules_text(), self.float_weights_text()
        text = ". ".join(filter(None, texts))
        if text and self.strict:
            raise ValueError(text)
        if text:
            warnings.warn(text, stacklevel=2)

    def unused_rules_text(self) -> str:
        """Returns a message about the rules that matched no op, '' if there are none."""
        lines = []
        for i, (rule, count) in enumerate(zip(self._rules, self._rule_matches)):
            if count:
                continue
            ops = f" with op_names={tuple(rule.op_names)}" if rule.op_names else ""
            line = f"rule {i}, module_path={rule.module_path!r}{ops}"
            lines.append(f"{line}; {self._why_unused(i)}")
        return "rules that matched nothing: " + "; ".join(lines) if lines else ""

    def float_weights_text(self) -> str:
        """Returns a message about weights that stay float though rules are about them, '' if
        there are none. `explain` shows them as rows instead."""
        return ""

    def _why_unused(self, index: int) -> str:
        """Names the rule that hides this one, or else the ops where its path matches, or else
        paths near it."""
        rule, there = self._rules[index], set()
        for path, ops in self._paths.items():
            for op in ops:
                matching = list(self._matching_rules(path, op))
                if index in matching:
                    return f"rule {matching[0]} comes first wherever it would match"
            if re.fullmatch(rule.module_path, path):
                there |= ops
        if there and rule.op_names:
            return f"ops there: {', '.join(sorted(there))}"
        if there:
            return f"ops there go by name only: write op_names={tuple(sorted(there))}"
        if not self._paths:
            return (
                "no op that a rule is about was run: no matmul, convolution or look-up"
            )
        kinds: dict[str, str] = {}  # with numbers left out -> the first such path
        for path in self._paths:
            kinds.setdefault(re.sub(r"(?<![^/])\d+(?![^/])", "#", path), path)
        paths = list(kinds.values())
        near = difflib.get_close_matches(rule.module_path, paths, 3, 0.3)
        shown = [*near] or paths[:3]
        is_root = " ('' is the model itself)" if "" in shown else ""
        return f"paths near it: {shown}{is_root}"

    def fresh(self) -> "QuantizationProvider":
        """Returns a copy with the same rules that has seen no model and gives no warnings."""
        new = copy.copy(self)
        for name, value in vars(self).items():
            if isinstance(value, dict | list):  # what it learns of a model
                setattr(new, name, copy.copy(value))
        new._rule_matches, new._paths = [0] * len(self._rules), {}
        new._initial_run_complete = True
        for name in ("_cache_number", "_kind"):
            new.__dict__.pop(name, None)
        return new

    def get_unused_rules(self) -> list[Any]:
        """Returns the rules that have matched no op so far."""
        if not self._initial_run_complete:
            raise ValueError(
                "Quantization is not completed yet. Please call `quantize_model` before calling "
                "`get_unused_rules`, and for a Linen model its init or apply."
            )
        return [r for r, count in zip(self._rules, self._rule_matches) if not count]


def check_provider(provider: Any, call: str) -> None:
    """Refuses what is no provider, where a function takes one, as `call` shows."""
    if not isinstance(provider, QuantizationProvider):
        is_class = isinstance(provider, type)
        name = (provider if is_class else type(provider)).__name__
        raise TypeError(
            f"provider should be a QuantizationProvider, not {'the class' if is_class else 'a'} "
            f"{name}: write {call.format('mt.PtqProvider(rules)')}, or mt.QtProvider(rules)."
        )


def like_by_rules(provider: QuantizationProvider, cls: type) -> Any:
    """Returns the rules, of a provider that is of this very class and so depends on nothing
    else."""
    if type(provider) is not cls:
        return None
    key = cls, tuple(provider._rules)
    try:
        hash(key)
    except TypeError:  # a rule with a dict or an array in it
        return None
    return key


@functools.lru_cache(maxsize=4096)
def _matching(patterns: tuple[str, ...], path: str) -> tuple[int, ...]:
    return tuple(i for i, p in enumerate(patterns) if re.fullmatch(p, path))


def get_current_rule(op_name: str) -> Any:
    """Returns the rule for an op in the module now running, or None if there is none.

    It is for kernels, which no provider looks into: they ask, and quantize accordingly.

    >>> get_current_rule("dot_general") is None  # no quantized model is running
    True

    Args:
        op_name: such as "dot_general".

    Returns:
        The first rule that matches, or None.
    """
    return running.ask("current_rule", op_name)
