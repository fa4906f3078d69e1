"""Variables: a Linen model and its variables under PtqProvider, in one call."""

from collections.abc import Mapping
from typing import Any

import flax
import jax
from flax import linen as nn

from midtread.model.quantize import quantize_model, split_arrays
from midtread.providers.params import quantize_params
from midtread.providers.ptq import PtqProvider


def quantize_variables(
    model: nn.Module,
    provider: PtqProvider,
    variables: Mapping[str, Any],
    *model_inputs: Any,
    method: str = "__call__",
    **model_inputs_kwargs: Any,
) -> tuple[nn.Module, dict[str, Any]]:
    """Quantizes a Linen model and its variables in one call.

    It is `quantize_model`, `init` on shapes alone and `quantize_params`, which remain for a
    checkpoint that is read in parts. An NNX model needs `quantize_model` alone.

    >>> import jax.numpy as jnp
    >>> from midtread.model.rules import QuantizationRule
    >>> model, x = nn.Dense(4), jnp.ones((2, 8))
    >>> variables = model.init(jax.random.key(0), x)
    >>> provider = PtqProvider([QuantizationRule(weight_qtype="int8")])
    >>> served, variables = quantize_variables(model, provider, variables, x)
    >>> served.apply(variables, x).shape, variables["params"]["kernel"].array.qtype.name
    ((2, 4), 'int8')

    Args:
        model: a Linen module.
        provider: its rules say which parameters become codes, and which.
        variables: {"params": float parameters, ...} as `init` gives them and `apply` takes
            them. "quant_stats" of a model under QtProvider become static scales; other
            collections stay as they are.
        model_inputs: inputs as the method takes them; shapes are enough.
        method: the method that runs quantized.
        model_inputs_kwargs: further inputs by name.

    Returns:
        (the model under the provider, variables for its `apply`)

    Raises:
        TypeError: The model is no Linen module, or the provider does not serve.
        ValueError: No "params" among the variables, parameters that do not fit the model
            or are missing, or no statistics for a static scale.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"quantize_variables takes a Linen module, not {type(model).__name__}: for an NNX "
            "model write mt.quantize_model(model, provider, *inputs), which holds its own."
        )
    if not isinstance(provider, PtqProvider):
        raise TypeError(
            f"{type(provider).__name__} keeps float parameters: give a PtqProvider, or write "
            "mt.quantize_model(model, provider) and use the variables as they are."
        )
    if "params" not in variables:
        raise ValueError(
            f"the variables have {sorted(variables)} and no 'params': pass all of them, "
            "{'params': ...}, not the parameters alone."
        )
    served = quantize_model(model, provider, methods=(method,))
    arrays, rebuild = split_arrays(model_inputs, model_inputs_kwargs)

    def init(key: jax.Array, arrays: list) -> Any:
        args, named = rebuild(arrays)
        return served.init({"params": key}, *args, method=method, **named)

    shapes = jax.eval_shape(init, jax.random.key(0), arrays)["params"]
    stats = variables.get("quant_stats")
    params = quantize_params(variables["params"], shapes, stats)
    missing = _paths(shapes) - _paths(params)
    if missing:
        raise ValueError(
            f"the variables lack parameters of the model: {', '.join(sorted(missing))}."
        )
    kept = {k: v for k, v in variables.items() if k != "quant_stats"}
    return served, {**kept, "params": params}


def _paths(params: Mapping[str, Any]) -> set[str]:
    """Returns the paths of a tree's parameters, 'encoder/kernel'."""
    flat = flax.traverse_util.flatten_dict(flax.core.unfreeze(params), sep="/")
    return set(flat)
