"""LoRA: a frozen model, and corrections of low rank that are trained beside it.

    out = op(x, W) + op(x, A B) * alpha / rank

W is float, or quantized as PtqProvider does (QLoRA); A and B are float parameters
`<weight>_lora_a` and `<weight>_lora_b` beside it, in its dtype. They share out the axes of
W: those it has in common with x go to A, the rest to B, and both get one of extent `rank`.

    einsum  'btd,dnh->btnh'      A  'dr'                 B  'rnh'
    dot_general                  A  [batch.., in, r]     B  [batch.., r, out]
    convolution, channels last   A  [window.., in, r]    B  [r, out]

Gradients reach A, B and x. Afterwards: `merge_lora` makes one weight of the three,
`lora_params` takes the adapters alone, `save_lora` and `load_lora` move them.
"""

import contextlib
import dataclasses
import json
import math
import numbers
import string
import warnings
import zipfile
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import flax
import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax import nnx
from jax.nn import initializers
from jax.sharding import NamedSharding, PartitionSpec

from midtread.model import flaxlib, intercept
from midtread.model.boxes import WithAux
from midtread.model.quantize import quantize_model
from midtread.model.rules import QuantizationRule
from midtread.model.weights import ADAPTERS, find_param, origin_is_hidden
from midtread.numerics.dtypes import is_wide
from midtread.numerics.qarray import QArray, dequantize
from midtread.ops import einsum as einsum_
from midtread.providers.ptq import PtqProvider, _open, _quantize_like

HE_UNIFORM = initializers.he_uniform()


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoraRule(QuantizationRule):
    """A rule for adapters. With `weight_qtype` the weight under them is quantized.

    Args:
        rank: extent of the axis between A and B.
        alpha: the correction is multiplied by alpha / rank.
        dropout: share of x that the correction does not see; random stream 'dropout'.
        lora_a_initializer, lora_b_initializer: as in jax.nn.initializers.
    """

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
        if not is_number(self.dropout) or not 0 <= self.dropout < 1:
            raise ValueError(f"dropout should be in [0, 1), not {self.dropout!r}.")
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


@dataclasses.dataclass(frozen=True)
class _Factors:
    """How A and B share out the axes of a weight. A string per axis of A and B: the
    weight's labels that are flattened into it, or the rank's."""

    weight: str
    a: tuple[str, ...]
    b: tuple[str, ...]
    extents: Mapping[str, int]
    scale: float
    groups: int = 1  # of a grouped convolution

    def shape(self, axes: Sequence[str]) -> tuple[int, ...]:
        return tuple(math.prod(self.extents[x] for x in axis) for axis in axes)

    def split(self, x: jax.Array, axes: Sequence[str]) -> jax.Array:
        """One axis per label; axes in front (stacked layers) stay."""
        stacked = x.shape[: x.ndim - len(axes)]
        return x.reshape(*stacked, *(self.extents[label] for label in "".join(axes)))

    def origins(self, axes: Sequence[str]) -> tuple[int | None, ...]:
        """The weight's axis that each one is sharded like; XLA finds the others."""
        places = {label: i for i, label in enumerate(self.weight)}
        return tuple(places.get(axis[:1]) for axis in axes)

    def delta(self, a: jax.Array, b: jax.Array) -> jax.Array:
        """What the adapters add to the weight, in float32."""
        a, b = (
            self.split(jnp.float32(x), axes) for x, axes in ((a, self.a), (b, self.b))
        )
        product = f"...{''.join(self.a)},...{''.join(self.b)}->...{self.weight}"
        return jnp.einsum(product, a, b, precision="highest") * self.scale


class LoraProvider(PtqProvider):
    """Adapters at every matched weight on the right of a matmul or a convolution.

    >>> LoraProvider(module_path=".*mlp.*", rank=8, alpha=16.0)._rules[0].rank
    8
    """

    rule_type = LoraRule

    def __init__(
        self,
        rules: Sequence[Any] | None = None,
        *,
        disable_jit: bool = False,
        strict: bool = False,
        **fields: Any,
    ):
        """Rules, or the fields of a single one."""
        if rules is not None and fields:
            raise ValueError(
                f"Only one of rules and a rule's own fields can be given, not {fields}."
            )
        rules = [fields] if rules is None else rules
        super().__init__(rules, disable_jit=disable_jit, strict=strict)
        self._factors: dict[str, _Factors] = {}  # by the weight's path
        self._plan: dict | None = None  # adapters to make, while a model is prepared
        self._method = "__call__"

    def needs_rngs(self) -> bool:
        return True  # to make the adapters

    def dot_general(
        self,
        lhs: Any,
        rhs: Any,
        dimension_numbers: Any,
        precision: Any = None,
        preferred_element_type: Any = None,
        out_sharding: Any = None,
    ) -> jax.Array:
        how = {
            "precision": precision,
            "preferred_element_type": preferred_element_type,
            "out_sharding": out_sharding,
        }
        found = self._find("dot_general", rhs)
        if found is None:
            return super().dot_general(lhs, rhs, dimension_numbers, **how)
        out = super().dot_general(lhs, _frozen(rhs), dimension_numbers, **how)
        (lhs_sum, rhs_sum), (lhs_batch, rhs_batch) = dimension_numbers
        labels = string.ascii_lowercase[: rhs.ndim]
        batch = tuple(labels[i] for i in rhs_batch)
        summed = "".join(labels[i] for i in rhs_sum)
        rest = "".join(x for x in labels if x not in (*batch, *summed))
        factors = _factors(
            found[0], labels, rhs.shape, (*batch, summed, "r"), (*batch, "r", rest), "r"
        )
        front = tuple(range(len(batch)))
        inner = tuple(range(len(batch), len(batch) + len(summed)))

        def delta(x, a, b):
            a, b = factors.split(a, factors.a), factors.split(b, factors.b)
            axes = (lhs_sum, inner), (lhs_batch, front)
            x = jax.lax.dot_general(x, a, axes, precision)
            axes = ((x.ndim - 1,), (len(batch),)), (front, front)
            return jax.lax.dot_general(x, b, axes, **how)

        return self._add_delta(out, lhs, *found, factors, delta)

    def einsum(self, subscripts: Any, /, *operands: Any, **kwargs) -> jax.Array:
        base = super().einsum
        if len(operands) != 2 or not isinstance(subscripts, str):
            terms, output, arrays = einsum_.parse(subscripts, operands)
            if len(arrays) == 2:  # einsum(x, [0, 1], w, [1, 2], [0, 2])
                return self.einsum(f"{','.join(terms)}->{output}", *arrays, **kwargs)
            if any(self._find("einsum", x) for x in arrays):
                raise ValueError(
                    f"{self._here()}: adapters need an einsum of two operands, not "
                    f"{subscripts!r}. Split it, or leave it out with module_path or op_names."
                )
            return base(subscripts, *operands, **kwargs)
        lhs, rhs = operands
        found = self._find("einsum", rhs)
        if found is None:
            return base(subscripts, lhs, rhs, **kwargs)
        out = base(subscripts, lhs, _frozen(rhs), **kwargs)
        kwargs.pop("_dot_general", None)
        (left, right), output, _ = einsum_.parse(subscripts, operands)
        free = sorted(set(string.ascii_letters) - {*left, *right})
        rank = "r" if "r" in free else free[0]
        shared = tuple(x for x in right if x in left)
        rest = tuple(x for x in right if x not in left)
        factors = _factors(
            found[0], right, rhs.shape, (*shared, rank), (rank, *rest), rank
        )
        text = f"{left},{''.join(factors.a)},{''.join(factors.b)}->{output}"
        module, name = intercept.current_module(), f"{found[1]}_lora_einsum_str"
        if isinstance(module, nnx.Module) and not hasattr(module, name):
            with contextlib.suppress(flax.errors.TraceContextError):
                setattr(module, name, text)  # for people to look at

        def delta(x, a, b):
            return jnp.einsum(text, x, a, b, **kwargs)

        return self._add_delta(out, lhs, *found, factors, delta)

    def conv_general_dilated(self, lhs: Any, rhs: Any, *args, **kwargs) -> jax.Array:
        base = super().conv_general_dilated
        found = self._find("conv_general_dilated", rhs)
        if found is None:
            return base(lhs, rhs, *args, **kwargs)
        names = ("window_strides", "padding", "lhs_dilation", "rhs_dilation",
                 "dimension_numbers", "feature_group_count", "batch_group_count",
                 "precision", "preferred_element_type", "out_sharding")  # fmt: skip
        how = {**dict(zip(names, args)), **kwargs}
        spec = jax.lax.conv_dimension_numbers(
            lhs.shape, rhs.shape, how.get("dimension_numbers")
        )
        if (spec.rhs_spec[0], spec.out_spec[1]) != (rhs.ndim - 1, lhs.ndim - 1):
            raise ValueError(
                f"{self._here()}: adapters need a convolution whose output channels come "
                f"last, in kernel and output, not {spec}."
            )
        out = base(lhs, _frozen(rhs), **how)
        labels = string.ascii_lowercase[: rhs.ndim]
        groups = how.get("feature_group_count", 1) * how.get("batch_group_count", 1)
        factors = _factors(
            found[0], labels, rhs.shape, (*labels[:-1], "r"), ("r", labels[-1]), "r"
        )
        factors = dataclasses.replace(factors, groups=groups)

        def delta(x, a, b):
            last = {k: how.get(k) for k in ("precision", "preferred_element_type")}
            first = {k: v for k, v in how.items() if k != "out_sharding"}
            x = jax.lax.conv_general_dilated(x, a, **first)
            axes = (((x.ndim - 1,), (0,)), ((), ()))
            last["out_sharding"] = how.get("out_sharding")
            return jax.lax.dot_general(x, b.astype(x.dtype), axes, **last)

        return self._add_delta(out, lhs, *found, factors, delta)

    def _here(self) -> str:
        return repr(flaxlib.path_of(intercept.current_module()))

    def _find(self, op: str, x: Any) -> tuple[LoraRule, str] | None:
        """The rule and the weight's name, where there are to be adapters."""
        rule = self._rule_for(op)
        if not isinstance(rule, LoraRule):
            return None
        name = _weight_name(intercept.current_module(), x)
        return None if name is None else (rule, name)

    def _add_delta(
        self, out: jax.Array, x: Any, rule, name: str, factors: _Factors, delta
    ) -> jax.Array:
        module, x = intercept.current_module(), _open(x)
        if isinstance(x, QArray):  # two weights
            return out
        self._factors[_join(flaxlib.path_of(module), name)] = factors
        a, b = (
            self._adapter(module, rule, name, suffix, factors, axes, init)
            for suffix, axes, init in zip(
                ADAPTERS,
                (factors.a, factors.b),
                (rule.lora_a_initializer, rule.lora_b_initializer),
            )
        )
        x = x.astype(x.dtype if is_wide(x.dtype) else a.dtype)
        x = self._drop(module, rule, x)
        correction = delta(x, a.astype(x.dtype), b.astype(x.dtype)) * rule.scale
        return out + correction.astype(out.dtype)

    def _drop(self, module: Any, rule: LoraRule, x: jax.Array) -> jax.Array:
        first = self._plan is not None or (
            isinstance(module, nn.Module) and module.is_initializing()
        )
        off = getattr(module, "deterministic", False) is True  # model.eval() in NNX
        if not rule.dropout or first or off:
            return x
        keep = 1 - rule.dropout
        kept = jax.random.bernoulli(flaxlib.make_rng(module, "dropout"), keep, x.shape)
        return jnp.where(kept, x / keep, 0)

    def _adapter(self, module, rule, weight, suffix, factors, axes, init) -> jax.Array:
        """The adapter beside a weight, made if it is not there."""
        name, shape = weight + suffix, factors.shape(axes)
        held = _variable(module, name)
        if held is None:
            base = _variable(module, weight)
            dtype = (
                base.dtype if isinstance(base, WithAux) else flaxlib.unbox(base).dtype
            )
            make = _Maker(rule, weight, init, shape, dtype, factors.origins(axes))
            if isinstance(module, nn.Module):
                held = module.scope.param(name, lambda key: make(key, base))
            elif self._plan is not None:  # only shapes count now
                self._plan.setdefault((*module._path, name), make)
                held = make(jax.random.key(0), base)
                with contextlib.suppress(flax.errors.TraceContextError):
                    setattr(
                        module, name, held
                    )  # not from inside a jit of the model's own
            else:
                held = make(flaxlib.make_rng(module, "params"), base)
                setattr(module, name, held)
        held = flaxlib.unbox(held)
        if held.shape != shape:
            raise ValueError(
                f"{_join(flaxlib.path_of(module), name)} has shape {held.shape}, but the "
                f"rule's rank {rule.rank} asks for {shape}."
            )
        return held

    # NNX: adapters are made where an abstract run wants them, in the order it does.

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
                    f"no random numbers to make {_join(*path, name)} with: pass "
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
        """`shape` may have axes in front: layers under scan, each with its own key."""
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
        held = flaxlib.unbox(base)
        sharding = None if isinstance(held, jax.core.Tracer) else held.sharding
        if isinstance(sharding, NamedSharding):
            names: dict[Any, Any] = dict(enumerate(sharding.spec))  # may be fewer
            spec = PartitionSpec(*(names.get(o) for o in origins))
            value = jax.device_put(value, NamedSharding(sharding.mesh, spec))
        return _lora_variable(flaxlib.like(base, value, origins))


def _lora_variable(box: Any) -> Any:
    if not isinstance(box, nnx.Variable):
        return box
    return nnx.LoRAParam.from_metadata(box.get_raw_value(), box.get_metadata())


def _factors(rule, labels, shape, a, b, rank) -> _Factors:
    extents = {**dict(zip(labels, shape)), rank: int(rule.rank)}
    return _Factors("".join(labels), tuple(a), tuple(b), extents, rule.scale)


def _frozen(x: Any) -> Any:
    return x if isinstance(x, WithAux) else jax.lax.stop_gradient(flaxlib.unbox(x))


def _variable(module: Any, name: str) -> Any:
    if isinstance(module, nn.Module):
        return module.get_variable("params", name)
    return getattr(module, name, None)


def _weight_name(module: Any, x: Any) -> str | None:
    """The name of the parameter that `x` is, in a box or not."""
    if not isinstance(x, WithAux):
        return find_param(module, x) if hasattr(x, "shape") else None
    in_linen = isinstance(module, nn.Module)
    held = module.variables.get("params", {}) if in_linen else vars(module)
    held = {k: flaxlib.unbox(v) for k, v in held.items() if isinstance(v, WithAux)}
    codes = {name: v.array.qvalue for name, v in held.items() if _is_weight(v)}
    by_id = {id(intercept.unwrap(v)): name for name, v in codes.items()}
    last = None
    for last in intercept.ancestors(flaxlib.unbox(x).array.qvalue):
        if id(last) in by_id:
            return by_id[id(last)]
    if not origin_is_hidden(last, codes):
        return None
    return next((name for name in codes if held[name].shape == x.shape), None)


def _is_weight(box: WithAux) -> bool:
    return isinstance(flaxlib.unbox(box.array), QArray)


def _join(*path: Any) -> str:
    return "/".join(str(part) for part in path if part != "")


def apply_lora_to_model(
    model: Any,
    provider: LoraProvider,
    *model_inputs: Any,
    methods: Collection[str] = ("__call__",),
    **model_inputs_kwargs: Any,
) -> Any:
    """`quantize_model`, with `rngs=nnx.Rngs(...)` for the adapters of an NNX model."""
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


# --- adapters as a tree of their own ----------------------------------------------------------
# A "tree" is a nested dict of Linen parameters, or of variables with 'params' on top, or an
# NNX model.


def lora_params(tree: Any) -> dict:
    """The adapters alone: a nested dict of arrays, named as in the model."""
    found = {p: v for p, v in _flat(tree).items() if str(p[-1]).endswith(ADAPTERS)}
    if isinstance(tree, nnx.Module):
        found = {p: flaxlib.unbox(v) for p, v in found.items()}
    return flax.traverse_util.unflatten_dict(found)


def with_lora(tree: Any, adapters: Any) -> Any:
    """The tree with these adapters, in place of its own or beside weights without any."""
    flat, changes = _flat(tree), {}
    places = {_key(path): path for path in flat}
    for path, value in _flat(adapters).items():
        key = _key(path)
        weight = key.removesuffix(ADAPTERS[0]).removesuffix(ADAPTERS[1])
        if weight == key or weight not in places:
            raise ValueError(f"{key} is not an adapter of this model's.")
        place = places.get(key, (*places[weight][:-1], path[-1]))
        held = flat.get(place)
        if held is None:
            base = flat[places[weight]]
            base = base.array.qvalue if isinstance(base, WithAux) else base
            unnamed = (None,) * value.ndim
            changes[place] = _lora_variable(flaxlib.like(base, value, unnamed))
            continue
        _check_shape(key, value, flaxlib.unbox(held))
        is_boxed = isinstance(value, nn.meta.AxisMetadata)
        changes[place] = value if is_boxed else flaxlib.like(held, value)
    return _changed(tree, changes)


def merge_lora(tree: Any, provider: LoraProvider, *, requantize: bool = False) -> Any:
    """W + A B alpha / rank in the place of the three, for a model without adapters.

    Args:
        provider: has run the model (init, apply or apply_lora_to_model); it knows which
            axes are whose, and alpha.
        requantize: quantize merged weights as they were before; else they are float.
    """
    flat, changes, any_boxed = _flat(tree), {}, False
    for path, a, b in _pairs(flat):
        held, factors = flat[path], _known(provider, path)
        delta = factors.delta(flaxlib.unbox(flat[a]), flaxlib.unbox(flat[b]))
        any_boxed |= isinstance(held, WithAux)
        changes |= {path: _plus(held, delta, requantize), a: None, b: None}
    if requantize and not any_boxed:
        raise ValueError("requantize=True, but no weight with adapters is quantized.")
    out = _changed(tree, changes)
    if isinstance(out, nnx.Module):
        _release(out, provider)
    return out


def unmerge_lora(tree: Any, adapters: Any, provider: LoraProvider) -> Any:
    """Undoes merge_lora for float weights, up to their rounding."""
    flat, changes = _flat(tree), {}
    places = {_key(path): path for path in flat}
    own = _flat(adapters)
    for path, a, b in _pairs(own, places):
        held = flat[path]
        if isinstance(held, WithAux):
            raise ValueError(  # noqa: TRY004
                f"{_key(path)} is quantized: what was added to it cannot be taken away. "
                "Keep the weight it was merged from."
            )
        delta = _known(provider, path).delta(
            flaxlib.unbox(own[a]), flaxlib.unbox(own[b])
        )
        changes[path] = _plus(held, -delta, False)
    out = with_lora(_changed(tree, changes), adapters)
    if isinstance(out, nnx.Module):
        flaxlib.adopt_nnx(out, provider, provider._method)
        flaxlib.set_on_all(out, **{flaxlib.RNGS: None})
    return out


def save_lora(path: Any, tree: Any, provider: LoraProvider) -> None:
    """Writes the adapters to a .npz file, with their ranks and alphas."""
    flat = _flat(lora_params(tree))
    arrays = {_key(p): np.asarray(flaxlib.unbox(v)) for p, v in flat.items()}
    header = {
        "kind": _KIND,
        "version": 1,
        "dtypes": {name: x.dtype.name for name, x in arrays.items()},
        "scales": {_key(p): _known(provider, p).scale for p, _, _ in _pairs(flat, {})},
    }
    # numpy would write a bfloat16 as two bytes of nothing in particular
    plain = {k: x.view(f"uint{8 * x.itemsize}") for k, x in arrays.items()}
    text = np.frombuffer(json.dumps(header).encode(), np.uint8)
    with open(path, "wb") as file:
        np.savez(file, **{_HEADER: text}, **plain)


def load_lora(path: Any, tree: Any, provider: LoraProvider) -> Any:
    """The tree with the adapters of a file, in the dtypes of its own.

    Names, shapes and alpha / rank must be those of the model.
    """
    try:
        with open(path, "rb") as raw, np.load(raw, allow_pickle=False) as file:
            header = json.loads(file[_HEADER].tobytes())
            if (header["kind"], header["version"]) != (_KIND, 1):
                raise ValueError(f"a {header['kind']!r}, version {header['version']}")
            saved = {k: file[k].view(d) for k, d in header["dtypes"].items()}
    except (KeyError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path} is not a file of adapters: {error}.") from None
    own = _flat(lora_params(tree))
    names = {_key(p) for p in own}
    for name in sorted(names ^ saved.keys()):
        where = ("the model", path) if name in names else (path, "the model")
        raise ValueError(f"{name} is in {where[0]}, but not in {where[1]}.")
    for weight, scale in header["scales"].items():
        factors = provider._factors.get(weight)
        if factors is not None and not math.isclose(factors.scale, scale):
            raise ValueError(
                f"{weight}: {path} was trained with alpha / rank {scale}, the rule's is "
                f"{factors.scale}."
            )
    loaded = {}
    for place, value in own.items():
        new = saved[_key(place)]
        _check_shape(_key(place), new, flaxlib.unbox(value))
        loaded[place] = jnp.asarray(new).astype(flaxlib.unbox(value).dtype)
    return with_lora(tree, flax.traverse_util.unflatten_dict(loaded))


_KIND, _HEADER = "midtread lora", "header"


def _flat(tree: Any) -> dict[tuple, Any]:
    """{path: parameter}, in its box."""
    if isinstance(tree, nnx.Module):
        return {
            (*path, name): value
            for path, module in nnx.iter_modules(tree)
            for name, value in vars(module).items()
            if isinstance(value, nnx.Variable | WithAux)
        }
    return flax.traverse_util.flatten_dict(flax.core.unfreeze(tree))


def _key(path: Sequence[Any]) -> str:
    return _join(*path).removeprefix("params/")


def _changed(tree: Any, changes: dict[tuple, Any]) -> Any:
    """A tree with other values at some paths; None takes one out."""
    if not isinstance(tree, nnx.Module):
        flat = {**_flat(tree), **changes}
        kept = {path: v for path, v in flat.items() if v is not None}
        return flax.traverse_util.unflatten_dict(kept)
    model = nnx.merge(*nnx.split(tree))
    modules = dict(nnx.iter_modules(model))
    for (*path, name), value in changes.items():
        module = modules[tuple(path)]
        delattr(module, name) if value is None else setattr(module, name, value)
    return model


def _pairs(flat: dict, weights: dict | None = None):
    """(path of a weight, of its A, of its B), for every A."""
    for a in [path for path in flat if str(path[-1]).endswith(ADAPTERS[0])]:
        name = a[-1].removesuffix(ADAPTERS[0])
        path, b = (*a[:-1], name), (*a[:-1], name + ADAPTERS[1])
        if weights:
            path = weights.get(_key(path), path)
        if b not in flat:
            raise ValueError(f"{_key(a)} has no {_key(b)} beside it.")
        if weights is None and path not in flat:
            raise ValueError(f"{_key(a)} has no weight {_key(path)} beside it.")
        yield path, a, b


def _known(provider: LoraProvider, path: Sequence[Any]) -> _Factors:
    factors = provider._factors.get(_key(path))
    if factors is None:
        raise ValueError(
            f"{_key(path)}: this provider has not seen the model yet. Run its init or "
            "apply first; jax.eval_shape will do."
        )
    if factors.groups > 1:
        raise ValueError(
            f"{_key(path)}: adapters of a grouped convolution mix its groups, which no "
            "single kernel does."
        )
    return factors


def _plus(held: Any, delta: jax.Array, requantize: bool) -> Any:
    """A weight plus delta, in the weight's box."""
    if not isinstance(held, WithAux):
        weight = flaxlib.unbox(held)
        total = weight.astype(jnp.float32) + delta.reshape(weight.shape)
        return flaxlib.like(held, total.astype(weight.dtype))
    array = flaxlib.unbox(held.array)
    total = dequantize(array).astype(jnp.float32) + delta.reshape(array.shape)
    total = total.astype(array.dtype)
    box = held.array.qvalue
    if not requantize:
        return flaxlib.like(box, total)
    made = WithAux(_quantize_like(held, total), held.how)
    return jax.tree.map(lambda v: flaxlib.like(box, v), made)


def _check_shape(name: str, new: Any, held: Any) -> None:
    if tuple(new.shape) != tuple(held.shape):
        raise ValueError(
            f"{name} has shape {tuple(held.shape)} in the model, but {tuple(new.shape)} "
            "is given."
        )


def _release(model: nnx.Module, provider: LoraProvider) -> None:
    """Gives a model its own classes back; one with quantized weights runs under PTQ."""
    boxed = any(isinstance(v, WithAux) for v in _flat(model).values())
    for _, module in nnx.iter_modules(model):
        module.__class__ = getattr(type(module), "_unquantized_type", type(module))
        for name in [k for k in vars(module) if k.endswith("_lora_einsum_str")]:
            delattr(module, name)
    if boxed:
        kept = lambda r: {
            "weight_qtype": None,
            "act_static_scale": r.act_static_scale or None,
        }
        rules = [dataclasses.replace(r, **kept(r)) for r in provider._rules]
        flaxlib.adopt_nnx(model, PtqProvider(rules), provider._method)
