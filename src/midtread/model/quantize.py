"""quantize_model: makes a Flax model run under a provider, without editing its code.

A Linen module is copied and given a subclass whose methods switch the provider on. An NNX
module gets new Variables over the same arrays (nothing is copied) and subclasses that know
their paths; then one abstract run finds out what the provider adds to it. The model that
was passed in stays as it was, or with donate=True is used up.
"""

import inspect
from collections.abc import Callable, Collection
from typing import Any

import jax
from flax import linen as nn
from flax import nnx

from midtread.model import adopt, donation, guards
from midtread.model.provider import QuantizationProvider, check_provider


def quantize_model(
    model: Any,
    provider: QuantizationProvider,
    *model_inputs: Any,
    methods: Collection[str] = ("__call__",),
    donate: bool = False,
    **model_inputs_kwargs: Any,
) -> Any:
    """Makes a model run under a provider; its code is not edited.

    >>> import jax, jax.numpy as jnp
    >>> from midtread.model.rules import QtRule
    >>> from midtread.providers.qt import QtProvider
    >>> provider = QtProvider([QtRule(weight_qtype="int8", act_qtype="int8")])
    >>> model, x = quantize_model(nn.Dense(4), provider), jnp.ones((2, 8))
    >>> model.apply(model.init(jax.random.key(0), x), x).shape
    (2, 4)

    Args:
        model: a Linen module, or an NNX module with its parameters.
        provider: what happens at the ops that its rules match.
        model_inputs: for NNX models: inputs as the method takes them; shapes are enough.
        methods: the methods that run quantized; one for NNX.
        donate: for NNX models: the result takes over the Variables of `model`, which is used
            up: each float parameter is freed as soon as its quantized one is there, and a
            later use of `model`, or of a module inside it, is a ValueError. Without it, no
            Variable is shared: neither model sees what is done to the other.
        model_inputs_kwargs: further inputs by name; `rngs` for what draws random numbers,
            which the method gets too if it has an argument of that name.

    Returns:
        A model of the same kind.

    Raises:
        TypeError: The model is neither, or the provider is none.
        ValueError: Inputs for a Linen model, or none for an NNX model; under a provider
            with strict=True, a rule that matched nothing.
    """
    check_provider(provider, "mt.quantize_model(model, {}, ...)")
    methods = (methods,) if isinstance(methods, str) else methods
    guards.install()
    if isinstance(model, nn.Module):
        if model_inputs or model_inputs_kwargs:
            raise ValueError(
                "Model inputs must not be provided for linen models: `init` and `apply` of "
                "the model that is returned take them."
            )
        if donate:
            raise ValueError(
                "donate is for NNX models. A Linen model holds no parameters: drop each "
                "part of the float tree after quantize_params has turned it."
            )
        return adopt.adopt_linen(model, provider, methods)
    if isinstance(model, nnx.Module):
        if not model_inputs and not model_inputs_kwargs:
            raise ValueError(
                "Model inputs must be provided for nnx models: write "
                "mt.quantize_model(model, provider, x). Shapes are enough, "
                "jax.ShapeDtypeStruct(shape, dtype)."
            )
        if len(methods) != 1:
            raise ValueError("Only one method is supported for nnx models.")
        (method,) = methods
        call = (provider, method, model_inputs, model_inputs_kwargs)
        if not donate:  # new Variables over the same arrays
            return _quantize_nnx(donation.copy(model), *call)
        taken = donation.Donation(model)
        try:
            return _quantize_nnx(taken.model, *call)
        except BaseException:
            taken.take_back()
            raise
    if isinstance(model, type) and issubclass(model, nn.Module | nnx.Module):
        raise ValueError(  # noqa: TRY004
            f"Unsupported model type: {model.__name__} is a class. Give an instance of it."
        )
    raise ValueError(
        f"Unsupported model type: {type(model)}. Midtread quantizes flax.linen and flax.nnx "
        "modules; for plain functions use quantize_function."
    )


def _quantize_nnx(model, provider, method, inputs, kwargs):
    rngs = kwargs.pop("rngs", None)
    if rngs is not None and not isinstance(rngs, nnx.Rngs):
        raise ValueError("Rngs must be an nnx.Rngs instance.")
    call = inspect.signature(getattr(model, method))
    by_position = {} if rngs is None else call.bind_partial(*inputs).arguments
    if rngs is not None and "rngs" in call.parameters and "rngs" not in by_position:
        kwargs["rngs"] = rngs
    skip = kwargs.pop("skip_nnx_init", False)
    model = adopt.adopt_nnx(model, provider, method)
    if not skip:
        provider.prepare_nnx(model, method, inputs, kwargs, rngs)
    return model


def abstract_call(model: nnx.Module, method: str, inputs: tuple, kwargs: dict):
    """Runs the model on shapes alone, and returns it, with all that was added, as shapes.

    Python objects among the inputs stay as they are; arrays become shapes.
    """
    arrays, rebuild = split_arrays(inputs, kwargs)
    graph, state = nnx.split(model)

    def run(state, arrays):
        again = donation.rebind(model, nnx.merge(graph, state))
        args, named = rebuild(arrays)
        getattr(again, method)(*args, **named)
        graph_out, state_out = nnx.split(again)
        run.graph = graph_out
        return state_out

    abstract = jax.eval_shape(run, state, arrays)
    return nnx.merge(run.graph, abstract)


def split_arrays(inputs: tuple, kwargs: dict) -> tuple[list, Callable[[list], Any]]:
    """Returns (the arrays or shapes among a call's arguments, a function that puts others in
    their positions)."""
    is_array = lambda x: (
        isinstance(x, jax.Array | jax.ShapeDtypeStruct) or hasattr(x, "__array__")
    )
    leaves, tree = jax.tree.flatten((inputs, kwargs))
    arrays = [x if is_array(x) else None for x in leaves]

    def rebuild(arrays: list) -> tuple[tuple, dict]:
        mixed = [x if a is None else a for x, a in zip(leaves, arrays)]
        return jax.tree.unflatten(tree, mixed)

    return arrays, rebuild
