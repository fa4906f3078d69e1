"""Served: what is quantized in a model, and codes put where it keeps its weights.

quantize(...)        the model rounded to nearest, and the boxes of its weights
chosen_sites(...)    at which contraction of the program each of them is solved for
put(...)             solved codes in the model, all layers of a stack together
put_bias(...)        a corrected bias in its place
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx

from midtread.algorithms import collect
from midtread.algorithms.program import Program, Site, as_call
from midtread.model import flaxlib
from midtread.model.boxes import WithAux
from midtread.model.quantize import quantize_model
from midtread.numerics.qarray import QArray
from midtread.providers.params import quantize_params
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
        raise TypeError(
            f"calibrate takes flax.linen and flax.nnx modules, not {type(model).__name__}."
        )
    text = provider.unused_rules_text()
    if text:
        raise ValueError(text)
    boxes = {p: box for p, box in boxes.items() if isinstance(box.array, QArray)}
    if not boxes:
        raise ValueError("the provider's rules quantize no weight of this model.")
    return quantized, boxes


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
    if isinstance(quantized, nnx.Module):
        module = flaxlib.value_at(quantized, path[:-1])
        is_variable = lambda x: isinstance(x, nnx.Variable)
        first, *_ = jax.tree.leaves(getattr(module, path[-1]), is_leaf=is_variable)
        boxed = jax.tree.map(lambda v: flaxlib.like(first, v), codes)
        setattr(module, path[-1], boxed)
        return quantized
    import flax

    model, variables = quantized
    flat = flax.traverse_util.flatten_dict(variables["params"])
    flat[path] = codes
    return model, {**variables, "params": flax.traverse_util.unflatten_dict(flat)}


def put_bias(quantized: Any, path: tuple, value: jax.Array) -> Any:
    """The model, or (model, variables), with another value of the parameter at `path`."""
    if isinstance(quantized, nnx.Module):
        variable = flaxlib.value_at(quantized, path)
        flaxlib.write(variable, value.astype(flaxlib.unbox(variable).dtype))
        return quantized
    import flax

    model, variables = quantized
    flat = flax.traverse_util.flatten_dict(variables["params"])
    flat[path] = value.astype(flat[path].dtype)
    return model, {**variables, "params": flax.traverse_util.unflatten_dict(flat)}
