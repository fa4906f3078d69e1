"""Explain: which contractions of a model are quantized, how, and why the others are not.

The model is traced once under the provider, on shapes alone, and nothing is run. Three
sources are put together, each the authority on its own question:

    the provider     which rule it chose for an op, and the op's id
    the engine       the Contraction, the Recipe and the operands it was given
    the jaxpr        how often that runs (scan, vmap, branches), in which dtypes it is
                     multiplied, and what ran that neither of them knows of

They are tied together by marks: a witness (ops/witness.py) opens a numbered scope for
every module, op and contraction, and gives every contraction's result a name; the walk
over the jaxpr finds them again, after vmap and scan did what they do. So a row is in the
program or it is not in the table.

FLOPs are those of the mathematics (2 per product): what a format costs beyond (padding,
zero points, tiles) is not counted as work.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any

import flax
import jax
from flax import linen as nn
from flax import nnx

from midtread.kernels.environment import device_named, here, implementation
from midtread.model import adopt, donation, flaxlib
from midtread.model.boxes import WithAux
from midtread.model.clipping import clipped
from midtread.model.coverage import Coverage, Param
from midtread.model.function import quantize_function
from midtread.model.ledger import Ledger, Witness
from midtread.model.provider import QuantizationProvider, check_provider
from midtread.model.quantize import quantize_model, split_arrays
from midtread.numerics.formats import dtype_bits
from midtread.numerics.qarray import QArray
from midtread.ops import witness


def explain(
    model: Any,
    provider: QuantizationProvider,
    *inputs: Any,
    method: str = "__call__",
    kernels: bool = False,
    device: str | None = None,
    data: Iterable[Any] | None = None,
    variables: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> Coverage:
    """Lists every contraction of a model under a provider; the result prints as a table.

    Shapes are enough: inputs may be jax.ShapeDtypeStructs, an NNX model may come from
    nnx.eval_shape.

    >>> import jax.numpy as jnp
    >>> from midtread.model.rules import QtRule
    >>> from midtread.providers.qt import QtProvider
    >>> rules = [QtRule(weight_qtype="int8", act_qtype="int8")]
    >>> explain(nn.Dense(64), QtProvider(rules), jnp.ones((8, 128))).totals.flops
    131072

    Args:
        model: a Linen or NNX module, or a function whose first argument holds its
            parameters, as `quantize_function` takes it.
        provider: what `quantize_model` would be given.
        inputs, kwargs: what the method is called with.
        method: the method that is explained.
        kernels: whether to say which kernel each contraction takes, forward and backward,
            and why those before it refused.
        device: for which device to say that, such as "h200" or "l40s"; None: this one.
        data: batches to run the model on, each its input or a tuple of its inputs: how
            much of them every static range clips is told below the table.
        variables: with `data`, for a Linen model: what `apply` of the quantized model takes.

    Returns:
        A Coverage: one record per contraction, and totals of FLOPs and bytes.

    Raises:
        ValueError: A rule matches nothing; the message has the paths nearest to it. Or
            `device` is not known, or given without `kernels`; or `data` without a static
            range, or `variables` without `data`.
        TypeError: A model or a provider that is none.
    """
    if variables is not None and data is None:
        raise ValueError("variables are for data: give both, or neither.")
    if device is not None and not kernels:
        raise ValueError(f"device={device!r} is for kernels=True: write both.")
    if device is not None:
        device_named(device)
    check_provider(provider, "mt.explain(model, {}, x)")
    if not inputs and not kwargs:
        raise ValueError(
            "explain needs the model's inputs: arrays, or jax.ShapeDtypeStruct(shape, "
            "dtype) for each."
        )
    provider, seen = provider.fresh(), Witness()
    trace = (
        _trace_linen
        if isinstance(model, nn.Module)
        else _trace_nnx
        if isinstance(model, nnx.Module)
        else _trace_function
    )
    # The kernels of a GPU would hide the contractions.
    with implementation("xla" if here().platform == "gpu" else None):
        jaxpr, params = trace(model, provider, method, inputs, kwargs, seen)
    text = provider.unused_rules_text()
    if text:
        raise ValueError(text)
    on = (device,) if kernels else ()
    coverage = Ledger(provider, seen, params, on).coverage(jaxpr)
    if data is None:
        return coverage
    shares = clipped(model, provider.fresh(), method, data, variables)
    return dataclasses.replace(coverage, clipped=shares)


# --- tracing ----------------------------------------------------------------------------------


def _trace_linen(model, provider, method, inputs, kwargs, seen):
    arrays, rebuild = split_arrays(inputs, kwargs)
    key = jax.eval_shape(lambda: jax.random.key(0))

    def init(module, key, arrays):
        args, named = rebuild(arrays)
        return module.init({"params": key}, *args, method=method, **named)

    quantized = adopt.adopt_linen(model, provider, (method,))
    before = jax.eval_shape(lambda *a: init(model, *a), key, arrays)
    after = jax.eval_shape(lambda *a: init(quantized, *a), key, arrays)

    def apply(variables, key, arrays):
        args, named = rebuild(arrays)
        others = [name for name in variables if name != "params"]
        with witness.watched(seen):
            return quantized.apply(
                variables,
                *args,
                method=method,
                rngs={"params": key},
                mutable=others,
                **named,
            )

    jaxpr = jax.make_jaxpr(apply)(after, key, arrays).jaxpr
    return jaxpr, _params(*(_sizes(_flat_params(tree)) for tree in (before, after)))


def _trace_nnx(model, provider, method, inputs, kwargs, seen):
    arrays, rebuild = split_arrays(inputs, kwargs)
    graph, state = nnx.split(model)
    sizes = []

    def run(state, arrays):
        merged = donation.rebind(model, nnx.merge(graph, state))
        args, named = rebuild(arrays)
        sizes.append(_sizes(_flat_module(merged)))
        merged = quantize_model(
            merged,
            provider,
            *args,
            methods=(method,),
            donate=True,
            rngs=nnx.Rngs(0) if provider.needs_rngs() else None,
            **named,
        )
        sizes.append(_sizes(_flat_module(merged)))
        with witness.watched(seen):
            getattr(merged, method)(*args, **named)

    jaxpr = jax.make_jaxpr(run)(state, arrays).jaxpr
    return jaxpr, _params(*sizes[-2:])


def _trace_function(fn, provider, method, inputs, kwargs, seen):
    if not callable(fn):
        raise TypeError(
            f"model should be a flax.linen or flax.nnx module, or a function, not {fn!r}."
        )
    if method != "__call__":
        raise ValueError(f"a function has no method {method!r}: pass it itself.")
    arrays, rebuild = split_arrays(inputs, kwargs)
    quantized = quantize_function(fn, provider)

    is_leaf = lambda x: isinstance(x, QArray)
    flat = lambda params: {
        jax.tree_util.keystr(path): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(params, is_leaf=is_leaf)
    }

    def run(arrays):
        args, named = rebuild(arrays)
        for name, leaf in flat(args[0]).items():
            if is_leaf(leaf):
                seen.known[id(leaf.qvalue)] = name
        with witness.watched(seen):
            return quantized(*args, **named)

    sizes = _sizes(flat(inputs[0]))
    return jax.make_jaxpr(run)(arrays).jaxpr, _params(sizes, sizes)


def _flat_params(variables: Any) -> dict[str, Any]:
    """Returns {path: array or box} of the parameters of a Linen model."""
    params = flax.core.unfreeze(variables.get("params", {}))
    flat = flax.traverse_util.flatten_dict(params, sep="/")
    return {path: flaxlib.unbox(param) for path, param in flat.items()}


def _flat_module(model: nnx.Module) -> dict[str, Any]:
    flat, inside = {}, set()
    for path, node in nnx.iter_graph(model):
        if isinstance(node, WithAux):
            flat[path] = flaxlib.unbox(node)
        elif isinstance(node, nnx.Param):
            inside.add(path)
            flat[path] = flaxlib.unbox(node)
    boxes = [p for p in flat if p not in inside]
    within = lambda p: any(p[: len(b)] == b and p != b for b in boxes)
    return {"/".join(map(str, p)): v for p, v in flat.items() if not within(p)}


def _sizes(flat: dict[str, Any]) -> dict[str, tuple[tuple[int, ...], int]]:
    return {
        k: (tuple(getattr(v, "shape", ())), sum(map(_nbytes, jax.tree.leaves(v))))
        for k, v in flat.items()
    }


def _nbytes(x: Any) -> int:
    return math.ceil(math.prod(x.shape) * dtype_bits(x.dtype) / 8)


def _params(before: dict, after: dict) -> dict[str, Param]:
    """Returns the parameters that the float model has too; it has no adapters and no static
    scales."""
    return {
        k: Param(shape, nbytes, after.get(k, (shape, nbytes))[1])
        for k, (shape, nbytes) in before.items()
    }
