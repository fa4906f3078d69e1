"""Served: what is quantized in a model, and codes put where it keeps its weights.

quantize(...)        the model rounded to nearest, and the boxes of its weights
chosen_sites(...)    at which contraction of the program each of them is solved for
with_quantized_inputs(...)  which of those quantize the other operand, too
put(...)             solved codes in the model, all layers of a stack together
put_param(...)       another float parameter in its place
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx

from midtread.algorithms import collect
from midtread.algorithms.program import Program, Site, as_call, open_params, trace
from midtread.model import flaxlib
from midtread.model.boxes import WithAux
from midtread.model.function import quantize_function
from midtread.model.quantize import quantize_model
from midtread.model.rules import recipe_of
from midtread.numerics.qarray import QArray, quantize_by_spec
from midtread.providers.params import quantize_like, quantize_params
from midtread.providers.ptq import PtqProvider


def quantize(model, provider, batch, params, method) -> tuple[Any, dict]:
    """(the model rounded to nearest, {path: box} of its quantized weights)."""
    if not isinstance(provider, PtqProvider):
        raise TypeError(
            f"calibrate serves a model: give it a PtqProvider, not {provider!r}."
        )
    args, kwargs = as_call(batch)
    if isinstance(model, nnx.Module):
        quantized = quantize_model(model, provider, *args, methods=(method,), **kwargs)
        boxes = {
            (*path, name): flaxlib.unbox(box)
            for path, module in nnx.iter_modules(quantized)
            for name, box in vars(module).items()
            if isinstance(box, WithAux)
        }
    elif isinstance(model, nn.Module):
        if params is None or "params" not in params:
            raise ValueError(
                "a Linen model needs its variables: params={'params': ...}."
            )
        import flax

        wrapped = quantize_model(model, provider, methods=(method,))
        init = lambda key: wrapped.init(key, *args, method=method, **kwargs)
        shapes = jax.eval_shape(init, jax.random.key(0))
        tree = quantize_params(
            flax.core.unfreeze(flaxlib.unbox(params["params"])), shapes["params"]
        )
        flat = flax.traverse_util.flatten_dict(tree)
        boxes = {p: box for p, box in flat.items() if isinstance(box, WithAux)}
        quantized = (wrapped, {**params, "params": tree})
    else:
        quantized, boxes = _function(model, provider, batch, params, method)
    text = provider.unused_rules_text()
    if text:
        raise ValueError(text)
    boxes = {p: box for p, box in boxes.items() if isinstance(box.array, QArray)}
    if not boxes:
        raise ValueError("the provider's rules quantize no weight of this model.")
    return quantized, boxes


def _function(fn, provider, batch, params, method) -> tuple[Any, dict]:
    """The same of a function of (parameters, inputs), in whose parameters codes take the
    place of weights."""
    program, floats = trace(fn, batch, params=params, method=method)
    boxes: dict[tuple, WithAux] = {}
    for site in program.sites:
        index = provider.match(site.module, site.op)
        if index is None:
            continue
        rule = provider._rules[index]
        asked = recipe_of(rule, site.side == "lhs", site.side == "rhs")
        spec = getattr(asked.fwd, site.side)
        placed = None
        if spec is not None:
            placed = site.c.number_axes(spec, site.side, site.shape)
        if placed is None:
            continue
        back = tuple(site.turn.index(a) for a in range(len(site.turn)))
        spec = placed.transposed(back)
        if site.path in boxes and boxes[site.path].how != spec:
            raise ValueError(
                f"{site.name} meets two contractions that would quantize it in two ways: give "
                "them one rule, or two parameters."
            )
        if site.path not in boxes:
            quantize = functools.partial(quantize_by_spec, spec=spec)
            for _ in site.layer:
                quantize = jax.vmap(quantize)
            w = floats[site.path]
            stacked = w.shape[: len(site.layer)]
            codes = jax.jit(quantize)(w.reshape(*stacked, *site.stored_shape))
            boxes[site.path] = WithAux(codes, spec)
    flat, rebuild = open_params(params)
    codes = {path: box.array for path, box in boxes.items()}
    return (quantize_function(fn, provider), rebuild({**flat, **codes})), boxes


def chosen_sites(
    program: Program, boxes: dict, rounding: str, before
) -> dict[int, Site]:
    """{number: site} of the weights to solve for: each at its first use."""
    by_name = {tuple(map(str, path)): path for path in boxes}
    chosen: dict[int, Site] = {}
    seen = set()
    for number, site in enumerate(program.sites):
        path = by_name.get(tuple(map(str, site.path)))
        if path is None or (path, site.layer) in seen:
            continue
        seen.add((path, site.layer))
        why = collect.why_not(site)
        if why and (before or rounding == "gptq"):
            names = [*before, *[rounding][: rounding == "gptq"]]
            raise ValueError(
                f"{site.name}: {names[0]} cannot take this {site.op}: {why}. Leave it out of "
                "the rules, or calibrate with algorithms=['clip']."
            )
        chosen[number] = dataclasses.replace(site, path=path)
    if not chosen:
        raise ValueError(
            "no quantized weight meets a contraction: only look-ups are quantized here, and "
            "those are rounded to nearest by quantize_model."
        )
    return chosen


def with_quantized_inputs(provider: PtqProvider, chosen: dict[int, Site]) -> set[int]:
    """Numbers of the sites whose other operand is quantized as well."""
    at = lambda site: provider.rule_at(site.module, site.op)
    rules = {n: at(site) for n, site in chosen.items()}
    return {
        n for n, i in rules.items() if i is not None and provider._rules[i].act_qtype
    }


def put(quantized: Any, path: tuple, arrays: list, box: WithAux) -> Any:
    """The model, or (model, variables), with solved codes at `path`."""
    layers = [q for _, q in sorted(arrays, key=lambda pair: pair[0])]
    depth = len(arrays[0][0])
    if depth > 1:
        raise ValueError(f"{path}: layers stacked twice are not calibrated.")
    q = (
        layers[0]
        if not depth
        else jax.tree.map(lambda *parts: jnp.stack(parts), *layers)
    )
    codes = WithAux(q, box.how)
    if not isinstance(quantized, nnx.Module):
        model, variables = quantized
        flat, rebuild = opened(model, variables)
        is_linen = isinstance(model, nn.Module)
        return model, rebuild({**flat, path: codes if is_linen else q})
    module = flaxlib.value_at(quantized, path[:-1])
    is_variable = lambda x: isinstance(x, nnx.Variable)
    first, *_ = jax.tree.leaves(getattr(module, path[-1]), is_leaf=is_variable)
    boxed = jax.tree.map(lambda v: flaxlib.like(first, v), codes)
    setattr(module, path[-1], boxed)
    return quantized


def put_param(quantized: Any, path: tuple, value: jax.Array, boxes: dict) -> Any:
    """The model, or (model, variables), with another float value of the parameter at `path`;
    where that is codes, these are rounded to nearest from the value."""
    if path in boxes:
        q = quantize_like(boxes[path], value)
        return put(quantized, path, [((), q)], boxes[path])
    if isinstance(quantized, nnx.Module):
        variable = flaxlib.value_at(quantized, path)
        flaxlib.write(variable, value.astype(flaxlib.unbox(variable).dtype))
        return quantized
    model, variables = quantized
    flat, rebuild = opened(model, variables)
    dtype = flaxlib.unbox(flat[path]).dtype
    return model, rebuild({**flat, path: value.astype(dtype)})


def opened(model: Any, variables: Any) -> tuple[dict, Callable[[dict], Any]]:
    """({path: leaf} of what a model is called with, and the way back)."""
    if isinstance(model, nn.Module):
        import flax

        flat = flax.traverse_util.flatten_dict(variables["params"])
        unflatten = flax.traverse_util.unflatten_dict
        return flat, lambda flat: {**variables, "params": unflatten(flat)}
    return open_params(variables)
