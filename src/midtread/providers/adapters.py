"""Adapters as a tree of their own: take them out, put them in, merge them, keep them.

    merge_lora                  makes W, A and B one weight, W + A B alpha / rank
    lora_params, with_lora      take the adapters of a model, give a model other adapters
    save_lora, load_lora        write and read a file of adapters, checked against the model

A "tree" is a nested dict of Linen parameters, or of variables with 'params' on top, or an
NNX model.
"""

import json
import math
import warnings
import zipfile
from collections.abc import Sequence
from typing import Any

import flax
import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax import nnx

from midtread.model import adopt, flaxlib
from midtread.model.boxes import WithAux
from midtread.model.rules import QuantizationRule, field_names
from midtread.model.weights import ADAPTERS
from midtread.numerics.qarray import dequantize
from midtread.providers.lora import LoraProvider, as_lora_variable, join
from midtread.providers.lora_factors import Factors
from midtread.providers.params import quantize_like
from midtread.providers.ptq import PtqProvider

_KIND, _HEADER = "midtread lora", "header"


def lora_params(tree: Any) -> dict:
    """Returns the adapters of a model alone.

    >>> adapters = {"kernel": jnp.ones((4, 3)), "kernel_lora_a": jnp.ones((4, 1))}
    >>> list(lora_params(adapters))
    ['kernel_lora_a']

    Args:
        tree: Linen parameters, or variables with 'params' on top, or an NNX model.

    Returns:
        A nested dict of arrays, named as in the model.
    """
    adapters = {p: v for p, v in _flat(tree).items() if str(p[-1]).endswith(ADAPTERS)}
    if isinstance(tree, nnx.Module):
        adapters = {p: flaxlib.unbox(v) for p, v in adapters.items()}
    return flax.traverse_util.unflatten_dict(adapters)


def with_lora(tree: Any, adapters: Any) -> Any:
    """Gives a model these adapters, instead of its own or beside weights without any.

    >>> adapters = {"kernel_lora_a": jnp.ones((4, 1)), "kernel_lora_b": jnp.ones((1, 3))}
    >>> sorted(with_lora({"kernel": jnp.ones((4, 3))}, adapters))
    ['kernel', 'kernel_lora_a', 'kernel_lora_b']

    Args:
        tree: Linen parameters, or variables with 'params' on top, or an NNX model.
        adapters: what `lora_params` gave.

    Returns:
        A tree or model like the first, which is left as it was.

    Raises:
        ValueError: An adapter of a weight that the model does not have, or of another shape.
    """
    flat, changes = _flat(tree), {}
    paths = {_key(path): path for path in flat}
    for path, value in _flat(adapters).items():
        key = _key(path)
        weight = key.removesuffix(ADAPTERS[0]).removesuffix(ADAPTERS[1])
        if weight == key or weight not in paths:
            raise ValueError(f"{key} is not an adapter of this model's.")
        target = paths.get(key, (*paths[weight][:-1], path[-1]))
        own = flat.get(target)
        if own is None:
            base = flat[paths[weight]]
            base = base.array.qvalue if isinstance(base, WithAux) else base
            unnamed = (None,) * value.ndim
            changes[target] = as_lora_variable(flaxlib.like(base, value, unnamed))
            continue
        _check_shape(key, value, flaxlib.unbox(own))
        is_boxed = isinstance(value, nn.meta.AxisMetadata)
        changes[target] = value if is_boxed else flaxlib.like(own, value)
    return _changed(tree, changes)


def merge_lora(tree: Any, provider: LoraProvider, *, requantize: bool = False) -> Any:
    """Merges each weight and its adapters into one weight, W + A B alpha / rank.

    >>> from midtread.providers.lora import apply_lora_to_model
    >>> provider = LoraProvider(rank=1, alpha=1.0)
    >>> model = apply_lora_to_model(nn.Dense(3, use_bias=False), provider)
    >>> variables = model.init(jax.random.key(0), jnp.ones((1, 4)))
    >>> list(merge_lora(variables, provider)["params"])
    ['kernel']

    Args:
        tree: Linen parameters, or variables with 'params' on top, or an NNX model.
        provider: has run the model (init, apply or apply_lora_to_model); it knows which
            axes are whose, and alpha.
        requantize: quantize merged weights as they were before; else they are float.

    Returns:
        A tree or model without adapters.

    Warns:
        UserWarning: A weight with adapters is also a table that is looked up.

    Raises:
        ValueError: `requantize` where no weight with adapters is quantized, or a provider
            that has not run this model.
    """
    flat, changes, any_boxed = _flat(tree), {}, False
    for path, a, b in _pairs(flat):
        box, factors = flat[path], _known(provider, path)
        delta = factors.delta(flaxlib.unbox(flat[a]), flaxlib.unbox(flat[b]))
        any_boxed |= isinstance(box, WithAux)
        changes |= {path: _plus(box, delta, requantize), a: None, b: None}
    tables = [_key(p) for p, _, _ in _pairs(flat) if _key(p) in provider._looked_up]
    if tables:
        warnings.warn(
            f"{', '.join(tables)}: adapters correct what it is multiplied by, not its rows that "
            "are looked up, and the merged table does both. Serve it with the adapters beside "
            "it, or leave it out with module_path when training.",
            stacklevel=2,
        )
    if requantize and not any_boxed:
        raise ValueError("requantize=True, but no weight with adapters is quantized.")
    out = _changed(tree, changes)
    if isinstance(out, nnx.Module):
        _release(out, provider)
    return out


def unmerge_lora(tree: Any, adapters: Any, provider: LoraProvider) -> Any:
    """Undoes `merge_lora` for float weights, up to their rounding.

    >>> from midtread.providers.lora import apply_lora_to_model
    >>> provider = LoraProvider(rank=1, alpha=1.0)
    >>> model = apply_lora_to_model(nn.Dense(3, use_bias=False), provider)
    >>> params = model.init(jax.random.key(0), jnp.ones((1, 4)))["params"]
    >>> merged = merge_lora(params, provider)
    >>> sorted(unmerge_lora(merged, lora_params(params), provider))
    ['kernel', 'kernel_lora_a', 'kernel_lora_b']

    Args:
        tree: what `merge_lora` gave.
        adapters: those that were merged.
        provider: the one they were merged under.

    Returns:
        A tree or model with weights and adapters apart.

    Raises:
        ValueError: A weight that was quantized after it was merged.
    """
    flat, changes = _flat(tree), {}
    paths = {_key(path): path for path in flat}
    own = _flat(adapters)
    for path, a, b in _pairs(own, paths):
        box = flat[path]
        if isinstance(box, WithAux):
            raise ValueError(  # noqa: TRY004
                f"{_key(path)} is quantized: what was added to it cannot be taken away. "
                "Keep the weight it was merged from."
            )
        delta = _known(provider, path).delta(
            flaxlib.unbox(own[a]), flaxlib.unbox(own[b])
        )
        changes[path] = _plus(box, -delta, False)
    out = with_lora(_changed(tree, changes), adapters)
    if isinstance(out, nnx.Module):
        adopt.adopt_nnx(out, provider, provider._method)
        flaxlib.set_on_all(out, **{flaxlib.RNGS: None})
    return out


def save_lora(path: Any, tree: Any, provider: LoraProvider) -> None:
    """Writes the adapters to a .npz file, with their ranks and alphas.

    >>> import os, tempfile
    >>> from midtread.providers.lora import apply_lora_to_model
    >>> provider = LoraProvider(rank=1, alpha=1.0)
    >>> model = apply_lora_to_model(nn.Dense(3), provider)
    >>> variables = model.init(jax.random.key(0), jnp.ones((1, 4)))
    >>> file = os.path.join(tempfile.mkdtemp(), "adapters.npz")
    >>> save_lora(file, variables, provider)
    >>> sorted(lora_params(load_lora(file, variables, provider)["params"]))
    ['kernel_lora_a', 'kernel_lora_b']

    Args:
        path: the file.
        tree: Linen parameters, or variables with 'params' on top, or an NNX model.
        provider: has run the model; it knows alpha.

    Raises:
        ValueError: A model that the provider has not run yet, or an adapter without its
            other half.
    """
    flat = _flat(lora_params(tree))
    arrays = {_key(p): np.asarray(flaxlib.unbox(v)) for p, v in flat.items()}
    header = {
        "kind": _KIND,
        "version": 1,
        "dtypes": {name: x.dtype.name for name, x in arrays.items()},
        "scales": {_key(p): _known(provider, p).scale for p, _, _ in _pairs(flat, {})},
    }
    # NumPy would write a bfloat16 as two bytes without a type.
    plain = {k: x.view(f"uint{8 * x.itemsize}") for k, x in arrays.items()}
    text = np.frombuffer(json.dumps(header).encode(), np.uint8)
    with open(path, "wb") as file:
        np.savez(file, **{_HEADER: text}, **plain)


def load_lora(path: Any, tree: Any, provider: LoraProvider) -> Any:
    """Gives a model the adapters of a file, in the dtypes of its own.

    Args:
        path: a file that `save_lora` wrote; its docstring has an example.
        tree: Linen parameters, or variables with 'params' on top, or an NNX model.
        provider: has run the model; it knows alpha.

    Returns:
        A tree or model like the one given.

    Raises:
        ValueError: Names, shapes or alpha / rank that are not those of the model; a file of
            another kind.
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
    for own_path, value in own.items():
        new = saved[_key(own_path)]
        _check_shape(_key(own_path), new, flaxlib.unbox(value))
        loaded[own_path] = jnp.asarray(new).astype(flaxlib.unbox(value).dtype)
    return with_lora(tree, flax.traverse_util.unflatten_dict(loaded))


def _flat(tree: Any) -> dict[tuple, Any]:
    """Returns {path: parameter in its box}."""
    if isinstance(tree, nnx.Module):
        return {
            (*path, name): value
            for path, module in nnx.iter_modules(tree)
            for name, value in vars(module).items()
            if isinstance(value, nnx.Variable | WithAux)
        }
    return flax.traverse_util.flatten_dict(flax.core.unfreeze(tree))


def _key(path: Sequence[Any]) -> str:
    return join(*path).removeprefix("params/")


def _changed(tree: Any, changes: dict[tuple, Any]) -> Any:
    """Returns a tree with other values at some paths; None takes one out."""
    if not isinstance(tree, nnx.Module):
        flat = {**_flat(tree), **changes}
        kept = {path: v for path, v in flat.items() if v is not None}
        return flax.traverse_util.unflatten_dict(kept)
    model = nnx.clone(tree)
    modules = dict(nnx.iter_modules(model))
    for (*path, name), value in changes.items():
        module = modules[tuple(path)]
        delattr(module, name) if value is None else setattr(module, name, value)
    return model


def _pairs(flat: dict, weights: dict | None = None):
    """Yields (path of a weight, of its A, of its B), for every A."""
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


def _known(provider: LoraProvider, path: Sequence[Any]) -> Factors:
    factors = provider._factors.get(_key(path))
    if factors is None:
        raise ValueError(
            f"{_key(path)}: this provider has not seen the model yet. Run its init or "
            "apply first; jax.eval_shape will do."
        )
    if factors.turn is None:
        raise ValueError(
            f"{_key(path)} reaches its matmul as a reshape of a transpose: which element "
            "of it a correction belongs to is not known."
        )
    if factors.groups > 1:
        raise ValueError(
            f"{_key(path)}: adapters of a grouped convolution mix its groups, which no "
            "single kernel does."
        )
    return factors


def _plus(box: Any, delta: jax.Array, requantize: bool) -> Any:
    """Adds delta to a weight, in the weight's box."""
    if not isinstance(box, WithAux):
        weight = flaxlib.unbox(box)
        total = weight.astype(jnp.float32) + delta.reshape(weight.shape)
        return flaxlib.like(box, total.astype(weight.dtype))
    array = flaxlib.unbox(box.array)
    total = dequantize(array).astype(jnp.float32) + delta.reshape(array.shape)
    total = total.astype(array.dtype)
    codes = box.array.qvalue
    if not requantize:
        return flaxlib.like(codes, total)
    quantized = WithAux(quantize_like(box, total), box.how)
    return jax.tree.map(lambda v: flaxlib.like(codes, v), quantized)


def _check_shape(name: str, new: Any, own: Any) -> None:
    if tuple(new.shape) != tuple(own.shape):
        raise ValueError(
            f"{name} has shape {tuple(own.shape)} in the model, but {tuple(new.shape)} "
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
        names = field_names(QuantizationRule) - {"weight_qtype", "act_static_scale"}
        rules = [
            QuantizationRule(
                act_static_scale=rule.act_static_scale or None,
                **{name: getattr(rule, name) for name in names},
            )
            for rule in provider._rules
        ]
        adopt.adopt_nnx(model, PtqProvider(rules), provider._method)
