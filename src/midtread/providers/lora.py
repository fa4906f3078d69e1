"""LoRA: a frozen model, and corrections of low rank that are trained beside it.

    out = op(x, W) + op(x, A B) * alpha / rank

W is float, or quantized as PtqProvider does (QLoRA); A and B are float parameters
`<weight>_lora_a` and `<weight>_lora_b` beside it, in its dtype. They share out the axes of
W: those it has in common with x go to A, the rest to B, and both get one of extent `rank`
(lora_factors.py).

    einsum  'btd,dnh->btnh'      A  'dr'                 B  'rnh'
    dot_general                  A  [batch.., in, r]     B  [batch.., r, out]
    convolution, channels last   A  [window.., in, r]    B  [r, out]

Gradients reach A, B and x. adapters.py says what can be done with the adapters afterwards.
"""

import contextlib
import dataclasses
import math
import numbers
import string
import warnings
from collections.abc import Callable, Collection, Sequence
from typing import Any, ClassVar

import flax
import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx
from jax.nn import initializers
from jax.sharding import NamedSharding, PartitionSpec

from midtread.model import flaxlib, intercept, running
from midtread.model.boxes import WithAux
from midtread.model.moves import ancestors
from midtread.model.quantize import quantize_model
from midtread.model.rules import QuantizationRule, field_names, named_fields
from midtread.model.weights import (
    ADAPTERS,
    codes_in,
    is_argument,
    is_left_behind,
    origin_is_hidden,
    turn_of,
)
from midtread.numerics.dtypes import is_wide
from midtread.numerics.qarray import QArray
from midtread.ops import einsum as einsum_
from midtread.providers.lora_factors import Factors
from midtread.providers.ptq import PtqProvider, _open

HE_UNIFORM = initializers.he_uniform()


@named_fields
@dataclasses.dataclass(frozen=True, kw_only=True)
class LoraRule(QuantizationRule):
    """A rule for adapters. With `weight_qtype` the weight under them is quantized (QLoRA).

    >>> LoraRule(module_path=".*mlp.*", rank=8, alpha=16.0, weight_qtype="nf4").scale
    2.0

    It has the fields of a QuantizationRule, and these:

    Args:
        rank: the extent of the axis between A and B.
        alpha: the correction is multiplied by alpha / rank.
        dropout: the share of x that the correction does not see; it needs the random stream
            'dropout'.
        lora_a_initializer, lora_b_initializer: as in jax.nn.initializers.

    Raises:
        ValueError: A rank below 1, a dropout outside its range, or an op that gets none.
    """

    made_for: ClassVar[str] = "LoraProvider"

    rank: int
    alpha: float
    dropout: float = 0.0
    lora_a_initializer: Callable[..., jax.Array] = HE_UNIFORM
    lora_b_initializer: Callable[..., jax.Array] = initializers.zeros

    def __post_init__(self):
        super().__post_init__()
        is_number = lambda x: isinstance(x, numbers.Real) and not isinstance(x, bool)
        if not is_number(self.rank) or self.rank != int(self.rank) or self.rank < 1:
            raise ValueError(f"rank should be a positive integer, not {self.rank!r}.")
        if not is_number(self.alpha) or not math.isfinite(self.alpha):
            raise ValueError(f"alpha should be a number, not {self.alpha!r}.")
        if not is_number(self.dropout) or not 0 <= self.dropout <= 1:
            raise ValueError(f"dropout should be in [0, 1], not {self.dropout!r}.")
        without = ("ragged_dot", "ragged_dot_general", "take")
        refused = [op for op in self.op_names if op in without]
        if refused:
            raise ValueError(
                f"{refused[0]} gets no adapters, but op_names has it. There are: "
                "dot_general, einsum, conv_general_dilated."
            )

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


class LoraProvider(PtqProvider):
    """Puts adapters at every matched weight on the right of a matmul or a convolution.

    >>> LoraProvider(module_path=".*mlp.*", rank=8, alpha=16.0)._rules[0].rank
    8

    Args:
        rules: LoraRules; or None, and the fields of a single rule as keywords.
        disable_jit: runs ops eagerly, for debugging.
        strict: a rule that matched nothing is an error instead of a warning.
        fields: the fields of the single rule.

    Raises:
        ValueError: Rules and fields of one rule together, or a field's value that LoraRule
            refuses.
        TypeError: Rules that are no LoraRules, or a field that it has not.
    """

    rule_type = LoraRule
    honours = field_names(LoraRule)

    def __init__(
        self,
        rules: Sequence[Any] | None = None,
        *,
        disable_jit: bool = False,
        strict: bool = False,
        **fields: Any,
    ):
        if rules is not None and fields:
            raise ValueError(
                f"Only one of rules and a rule's own fields can be given, not {fields}."
            )
        rules = [fields] if rules is None else rules
        super().__init__(rules, disable_jit=disable_jit, strict=strict)
        self._factors: dict[str, Factors] = {}  # by the weight's path
        self._looked_up: dict[
            str, bool
        ] = {}  # the paths of tables of which rows were taken
        self._plan: dict | None = None  # adapters to make, while a model is prepared
        self._method = "__call__"

    def needs_rngs(self) -> bool:
        return True  # the adapters are initialized at random

    def _check_format(self, box: WithAux, spec: Any) -> None:
        """Adapters leave a weight that is quantized already as it is stored."""

    def dot_general(
        self,
        lhs: Any,
        rhs: Any,
        dimension_numbers: Any,
        precision: Any = None,
        preferred_element_type: Any = None,
        out_sharding: Any = None,
    ) -> jax.Array:
        options = {
            "precision": precision,
            "preferred_element_type": preferred_element_type,
            "out_sharding": out_sharding,
        }
        match = self._find("dot_general", rhs)
        if match is None:
            return super().dot_general(lhs, rhs, dimension_numbers, **options)
        out = super().dot_general(lhs, _frozen(rhs), dimension_numbers, **options)
        (lhs_sum, rhs_sum), (lhs_batch, rhs_batch) = dimension_numbers
        labels = string.ascii_lowercase[: rhs.ndim]
        batch = tuple(labels[i] for i in rhs_batch)
        summed = "".join(labels[i] for i in rhs_sum)
        rest = "".join(x for x in labels if x not in (*batch, *summed))
        factors = Factors.of(
            match[0], labels, rhs.shape, (*batch, summed, "r"), (*batch, "r", rest)
        )
        front = tuple(range(len(batch)))
        inner = tuple(range(len(batch), len(batch) + len(summed)))

        def by_factors(x, a, b):
            a, b = factors.split(a, factors.a), factors.split(b, factors.b)
            axes = (lhs_sum, inner), (lhs_batch, front)
            x = jax.lax.dot_general(x, a, axes, precision)
            axes = ((x.ndim - 1,), (len(batch),)), (front, front)
            return jax.lax.dot_general(x, b, axes, **options)

        def by_weight(x, w):
            return jax.lax.dot_general(x, w, dimension_numbers, **options)

        return self._correct(out, lhs, match, factors, by_factors, by_weight)

    def einsum(self, subscripts: Any, /, *operands: Any, **kwargs) -> jax.Array:
        base = super().einsum
        if len(operands) != 2 or not isinstance(subscripts, str):
            terms, output, arrays = einsum_.parse(subscripts, operands)
            if len(arrays) == 2:  # einsum(x, [0, 1], w, [1, 2], [0, 2])
                return self.einsum(f"{','.join(terms)}->{output}", *arrays, **kwargs)
            if len(arrays) > 2 and any(self._find("einsum", x) for x in arrays):
                raise ValueError(
                    f"{self._here()}: adapters need an einsum of two operands, not "
                    f"'{','.join(terms)}->{output}'. Split it, or leave it out with module_path "
                    "or op_names."
                )
            return base(subscripts, *operands, **kwargs)
        lhs, rhs = operands
        match = self._find("einsum", rhs)
        if match is None:
            return base(subscripts, lhs, rhs, **kwargs)
        out = base(subscripts, lhs, _frozen(rhs), **kwargs)
        kwargs.pop("_dot_general", None)
        (left, right), output, _ = einsum_.parse(subscripts, operands)
        free = sorted(set(string.ascii_letters) - {*left, *right})
        rank = "r" if "r" in free else free[0]
        shared = tuple(x for x in right if x in left)
        rest = tuple(x for x in right if x not in left)
        factors = Factors.of(
            match[0], right, rhs.shape, (*shared, rank), (rank, *rest), rank
        )
        text = f"{left},{''.join(factors.a)},{''.join(factors.b)}->{output}"
        module, name = intercept.current_module(), f"{match[1]}_lora_einsum_str"
        if isinstance(module, nnx.Module) and not hasattr(module, name):
            with contextlib.suppress(flax.errors.TraceContextError):
                setattr(module, name, text)  # people may want to look at it

        def by_factors(x, a, b):
            return jnp.einsum(text, x, a, b, **kwargs)

        def by_weight(x, w):
            return jnp.einsum(subscripts, x, w, **kwargs)

        return self._correct(out, lhs, match, factors, by_factors, by_weight)

    def take(self, a, indices, axis=None, out=None, **options) -> jax.Array:
        """Looks up rows as they are; `merge_lora` warns where the table has adapters."""
        module = intercept.current_module()
        weight = _weight_of(self, module, a)
        if weight is not None:
            self._looked_up[join(flaxlib.path_of(module), weight[0])] = True
        return super().take(a, indices, axis, out, **options)

    def conv_general_dilated(self, lhs: Any, rhs: Any, *args, **kwargs) -> jax.Array:
        base = super().conv_general_dilated
        match = self._find("conv_general_dilated", rhs)
        if match is None:
            return base(lhs, rhs, *args, **kwargs)
        names = ("window_strides", "padding", "lhs_dilation", "rhs_dilation",
                 "dimension_numbers", "feature_group_count", "batch_group_count",
                 "precision", "preferred_element_type", "out_sharding")  # fmt: skip
        options = {**dict(zip(names, args)), **kwargs}
        spec = jax.lax.conv_dimension_numbers(
            lhs.shape, rhs.shape, options.get("dimension_numbers")
        )
        if (spec.rhs_spec[0], spec.out_spec[1]) != (rhs.ndim - 1, lhs.ndim - 1):
            raise ValueError(
                f"{self._here()}: adapters need a convolution whose output channels come "
                f"last, in kernel and output, not {spec}."
            )
        out = base(lhs, _frozen(rhs), **options)
        labels = string.ascii_lowercase[: rhs.ndim]
        counts = ("feature_group_count", "batch_group_count")
        groups = math.prod(options.get(name, 1) for name in counts)
        if match[0].rank % groups:
            raise ValueError(
                f"{self._here()}: a convolution of {groups} groups needs a rank that they "
                f"divide, not {match[0].rank}. Write rank={groups} for it in a rule before, or "
                "leave it out with module_path or op_names."
            )
        factors = Factors.of(
            match[0], labels, rhs.shape, (*labels[:-1], "r"), ("r", labels[-1])
        )
        factors = dataclasses.replace(factors, groups=groups)

        def by_factors(x, a, b):
            last = {k: options.get(k) for k in ("precision", "preferred_element_type")}
            first = {k: v for k, v in options.items() if k != "out_sharding"}
            x = jax.lax.conv_general_dilated(x, a, **first)
            axes = (((x.ndim - 1,), (0,)), ((), ()))
            last["out_sharding"] = options.get("out_sharding")
            return jax.lax.dot_general(x, b.astype(x.dtype), axes, **last)

        def by_weight(x, w):
            return jax.lax.conv_general_dilated(x, w, **options)

        return self._correct(out, lhs, match, factors, by_factors, by_weight)

    def _here(self) -> str:
        return repr(flaxlib.path_of(intercept.current_module()))

    def _find(self, op: str, x: Any) -> tuple[LoraRule, str, Any] | None:
        """Returns the rule, the weight's name and its `Factors.turn`, or None if `x` gets no
        adapters."""
        rule = self._rule_for(op)
        if not isinstance(rule, LoraRule):
            return None
        module = intercept.current_module()
        weight = _weight_of(self, module, x)
        if weight is None:
            return None
        if is_argument(module, x):  # adapters are none
            running.keep_no_trace(self)
        return rule, *weight

    def _correct(
        self,
        out: jax.Array,
        x: Any,
        match: tuple[LoraRule, str, Any],
        factors: Factors,
        by_factors: Callable,
        by_weight: Callable,
    ) -> jax.Array:
        """Adds the correction of one use of a weight. `by_factors(x, a, b)` multiplies by the
        small matrices. A weight that is used in two forms, as it is and transposed say, has
        adapters for the first of them; `by_weight(x, w)` multiplies by what they add to it."""
        rule, name, turn = match
        module, x = intercept.current_module(), _open(x)
        if isinstance(x, QArray):  # both operands are weights
            return out
        factors = dataclasses.replace(factors, turn=turn)
        path = join(flaxlib.path_of(module), name)
        first_uses = running.call_of(self).notes.setdefault("factors", {})
        known = self._factors[path] = first_uses.setdefault(path, factors)
        a, b = (
            self._adapter(module, rule, name, suffix, known, axes, init)
            for suffix, axes, init in zip(
                ADAPTERS,
                (known.a, known.b),
                (rule.lora_a_initializer, rule.lora_b_initializer),
            )
        )
        x = x.astype(x.dtype if is_wide(x.dtype) else a.dtype)
        x = self._drop(module, rule, x)
        if known.parts == factors.parts:
            correction = by_factors(x, a.astype(x.dtype), b.astype(x.dtype))
            correction = correction * rule.scale
        elif known.turn is None or factors.turn is None:
            raise ValueError(
                f"{path} is multiplied by in two forms, one of them a reshape of a transpose: "
                "adapters of one cannot correct the other. Leave one of the two out with "
                "module_path or op_names."
            )
        else:
            correction = by_weight(x, factors.seen(known.delta(a, b)).astype(x.dtype))
        return out + correction.astype(out.dtype)

    def _drop(self, module: Any, rule: LoraRule, x: jax.Array) -> jax.Array:
        first = self._plan is not None or (
            isinstance(module, nn.Module) and module.is_initializing()
        )
        off = getattr(module, "deterministic", False) is True  # model.eval() in NNX
        if not rule.dropout or first or off:
            return x
        keep = 1 - rule.dropout
        if not keep:
            return jnp.zeros_like(x)
        kept = jax.random.bernoulli(flaxlib.make_rng(module, "dropout"), keep, x.shape)
        return jnp.where(kept, x / keep, 0)

    def _adapter(self, module, rule, weight, suffix, factors, axes, init) -> jax.Array:
        """Returns the adapter beside a weight, made if it is not there."""
        name, shape = weight + suffix, factors.shape(axes)
        adapter = _variable(module, name)
        if adapter is None:
            base = _variable(module, weight)
            dtype = (
                base.dtype if isinstance(base, WithAux) else flaxlib.unbox(base).dtype
            )
            make = _Maker(rule, weight, init, shape, dtype, factors.origins(axes))
            if isinstance(module, nn.Module):
                adapter = self._linen_adapter(module, name, make, base)
            elif self._plan is not None:  # only shapes count now
                self._plan.setdefault((*module._path, name), make)
                adapter = make(jax.random.key(0), base)
                with contextlib.suppress(flax.errors.TraceContextError):
                    setattr(
                        module, name, adapter
                    )  # not from inside a jit of the model's own
            else:
                adapter = make(flaxlib.make_rng(module, "params"), base)
                setattr(module, name, adapter)
        adapter = flaxlib.unbox(adapter)
        if adapter.shape != shape:
            raise ValueError(
                f"{join(flaxlib.path_of(module), name)} has shape {adapter.shape}, but the "
                f"rule's rank {rule.rank} asks for {shape}."
            )
        return adapter

    def _linen_adapter(self, module: nn.Module, name: str, make, base: Any) -> Any:
        is_new = not module.has_variable("params", name)
        if is_new and is_left_behind(module, jnp.full((), 0.0)):
            raise ValueError(
                f"{flaxlib.path_of(module)!r}: {make.weight} is multiplied by inside a jax.jit "
                "(or scan, or checkpoint) of the model's own, or of JAX's, which no adapter made "
                "there can leave. Use nn.jit and its like, or leave the layer out with "
                "module_path."
            )
        try:
            return module.scope.param(name, lambda key: make(key, base))
        except flax.errors.ScopeParamNotFoundError:
            path = join(flaxlib.path_of(module), name)
            raise ValueError(
                f"the parameters have no {path}. `init` of this model makes adapters: "
                "mt.with_lora(params, mt.lora_params(model.init(key, x)['params'])) puts "
                "them beside the weights that you have."
            ) from None

    # In NNX adapters are made where an abstract run wants them, in the order of that run.

    def prepare_nnx(self, model: nnx.Module, method, inputs, kwargs, rngs) -> None:
        self._plan, self._method, self._rngs = {}, method, rngs
        try:
            super().prepare_nnx(model, method, inputs, kwargs, None)
        finally:
            self._plan = self._rngs = None

    def _add_params(self, model: nnx.Module, after: dict) -> None:
        modules = dict(nnx.iter_modules(model))
        for (*path, name), make in (self._plan or {}).items():
            if self._rngs is None:
                raise ValueError(
                    f"no random numbers to make {join(*path, name)} with: pass "
                    "rngs=nnx.Rngs(...)."
                )
            module, key = modules[tuple(path)], self._rngs.params()
            shape = getattr(getattr(after[tuple(path)], name, None), "shape", ())
            value = make(key, getattr(module, make.weight), shape)
            setattr(module, name, value)
            if make.rule.dropout and not hasattr(module, "deterministic"):
                module.deterministic = False  # what model.eval() and train() set
        for path, module in modules.items():
            for name, text in vars(after[path]).items():
                if name.endswith("_lora_einsum_str"):
                    setattr(module, name, text)


@dataclasses.dataclass(frozen=True)
class _Maker:
    """Makes an adapter, in a box like that of the weight beside it."""

    rule: LoraRule
    weight: str
    init: Callable
    shape: tuple[int, ...]
    dtype: Any
    origins: tuple[int | None, ...]

    def __call__(self, key: jax.Array, base: Any, shape: Sequence[int] = ()) -> Any:
        """Makes the adapter. `shape` may have axes in front, for layers under scan, each of
        which has its own key."""
        stacked = tuple(shape[: len(shape) - len(self.shape)])
        if stacked:
            keys = jax.random.split(key, math.prod(stacked))
            value = jax.vmap(lambda key: self.init(key, self.shape, self.dtype))(keys)
            value = value.reshape(*stacked, *self.shape)
        else:
            value = self.init(key, self.shape, self.dtype)
        front = tuple(range(len(stacked)))
        origins = (*front, *(o if o is None else o + len(front) for o in self.origins))
        base = base.array.qvalue if isinstance(base, WithAux) else base
        array = flaxlib.unbox(base)
        sharding = None if isinstance(array, jax.core.Tracer) else array.sharding
        if isinstance(sharding, NamedSharding):
            # There may be fewer names than axes.
            names: dict[Any, Any] = dict(enumerate(sharding.spec))
            spec = PartitionSpec(*(names.get(o) for o in origins))
            value = jax.device_put(value, NamedSharding(sharding.mesh, spec))
        return as_lora_variable(flaxlib.like(base, value, origins))


def as_lora_variable(box: Any) -> Any:
    if not isinstance(box, nnx.Variable):
        return box
    return nnx.LoRAParam.from_metadata(box.get_raw_value(), box.get_metadata())


def _frozen(x: Any) -> Any:
    boxed = isinstance(x, WithAux | QArray)
    return x if boxed else jax.lax.stop_gradient(flaxlib.unbox(x))


def _variable(module: Any, name: str) -> Any:
    if isinstance(module, nn.Module):
        return module.get_variable("params", name)
    return getattr(module, name, None)


def _weight_of(provider: LoraProvider, module: Any, x: Any) -> tuple[str, Any] | None:
    """Returns (name, turn) of the parameter that `x` is, in a box or not; None if it is none."""
    if not hasattr(x, "shape"):
        return None
    if not isinstance(x, WithAux | QArray):
        name = provider.find_param(module, x)
        if name is not None:
            return name, turn_of(module, name, x)
        # These may be the values of a box, arranged as its codes cannot be.
        opened = running.call_of(provider).notes.get("opened", {})
        for source, turn in ancestors(flaxlib.unbox(x)):
            if id(source) in opened:
                box = opened[id(source)][1]
                weight = _weight_of(provider, module, box)
                if weight is None:
                    return None
                name, box_turn = weight
                is_as_stored = box_turn in ((), tuple(range(box.ndim)))
                return name, turn if is_as_stored else None
        return None
    codes = codes_in(module)
    by_id = {id(intercept.unwrap(q.qvalue)): name for name, q in codes.items()}
    last = None
    for last, turn in ancestors(_open(x).qvalue):
        if id(last) in by_id:
            return by_id[id(last)], turn
    if not origin_is_hidden(last, {name: q.qvalue for name, q in codes.items()}):
        return None
    alike = (name for name, q in codes.items() if q.shape == x.shape)
    return next(((name, ()) for name in alike), None)


def join(*path: Any) -> str:
    return "/".join(str(part) for part in path if part != "")


def apply_lora_to_model(
    model: Any,
    provider: LoraProvider,
    *model_inputs: Any,
    methods: Collection[str] = ("__call__",),
    **model_inputs_kwargs: Any,
) -> Any:
    """Puts adapters beside the weights of a model, which stay frozen.

    >>> provider = LoraProvider(rank=2, alpha=4.0)
    >>> model = apply_lora_to_model(nn.Dense(4), provider)
    >>> x = jnp.ones((1, 8))
    >>> variables = model.init(jax.random.key(0), x)
    >>> sorted(variables["params"])
    ['bias', 'kernel', 'kernel_lora_a', 'kernel_lora_b']

    Args:
        model: a Linen or NNX module.
        provider: which weights get adapters.
        model_inputs: for NNX models: inputs as the method takes them; shapes are enough.
        methods: the methods that run with adapters; one for NNX.
        model_inputs_kwargs: further inputs, and `rngs=nnx.Rngs(...)` for the adapters of
            an NNX model.

    Returns:
        A model of the same kind.

    Raises:
        TypeError: A provider that makes no adapters.
    """
    if not isinstance(provider, LoraProvider):
        raise TypeError(
            f"adapters are a LoraProvider's, not a {type(provider).__name__}'s: write "
            "mt.LoraProvider(rank=8, alpha=16.0), say; with weight_qtype='nf4' the base is "
            "quantized too."
        )
    if isinstance(model, nnx.Module) and "rngs" not in model_inputs_kwargs:
        warnings.warn(
            "rngs must be provided for NNX models to initialize LoRA weights: pass "
            "rngs=nnx.Rngs(...) to apply_lora_to_model. Now nnx.Rngs(10003) is used.",
            stacklevel=2,
        )
        model_inputs_kwargs["rngs"] = nnx.Rngs(10003)
    return quantize_model(
        model, provider, *model_inputs, methods=methods, **model_inputs_kwargs
    )
