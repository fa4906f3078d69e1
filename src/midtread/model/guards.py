"""Guards: a derivative or an optimizer that cannot be is refused, with what to write instead.

Codes are not trained, and a quantized matmul has no forward-mode derivative. JAX refuses both
in words about integers and custom_vjp, of which the user wrote none; nnx.Optimizer does not
refuse codes at all, and makes states of their shapes in their dtypes. The functions here stand
before those of JAX and Flax, and speak of quantized models where one is meant:

    nnx.Optimizer(model)    with codes among what it would train: by `install`
    jax.grad                of codes: `refuse_gradient_of_codes`, by model/intercept.py
    jax.jvp, jax.jacfwd     of a quantized matmul: `refuse_forward_mode`, by the same
    jax.custom_jvp          whose rule has a quantized matmul: `refuse_transposition`, by the same
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from midtread.model.boxes import WithAux
from midtread.ops import training

_installed: list[bool] = []


def install() -> None:
    """Has nnx.Optimizer look for codes among what it is given, from the first call on."""
    if not _installed:
        _installed.append(True)
        nnx.Optimizer.__init__ = _refuse_to_train_codes(nnx.Optimizer.__init__)


def _refuse_to_train_codes(original: Callable) -> Callable:
    @functools.wraps(original)
    def __init__(self, model, *args, **kwargs):
        original(self, model, *args, **kwargs)
        wrt = kwargs.get("wrt", args[1] if len(args) > 1 else nnx.Param)
        trained = {id(v) for v in _variables(nnx.variables(model, wrt))}
        boxes = [box for _, box in nnx.iter_graph(model) if isinstance(box, WithAux)]
        boxes = [b for b in boxes if trained & {id(v) for v in _variables(b.array)}]
        if boxes:
            shown = [f"{b.how.format.name} {list(b.shape)}" for b in boxes[:3]]
            more = f" and {len(boxes) - 3} more" if boxes[3:] else ""
            raise ValueError(
                f"nnx.Optimizer is given quantized parameters ({', '.join(shown)}{more}), "
                "and codes are not trained: train under mt.QtProvider and quantize what "
                "comes of it, or train adapters beside the codes (mt.apply_lora_to_model, "
                "and nnx.Optimizer(model, tx, wrt=nnx.LoRAParam))."
            )

    return __init__


def _variables(tree: Any) -> list[nnx.Variable]:
    return jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, nnx.Variable))


def refuse_forward_mode(original: Callable, *args, **kwargs):
    """Stands before the function with which JAX refuses the forward mode of a custom_vjp."""
    if _is_ours(kwargs):
        raise TypeError(training.NO_FORWARD_MODE)
    return original(*args, **kwargs)


def refuse_transposition(cotangents: Any, *args, **kwargs):
    """The rule by which JAX transposes a custom_vjp: it has none."""
    del cotangents, args
    message = (
        "Transpose rule (for reverse-mode differentiation) for 'custom_vjp_call' not "
        "implemented"
    )
    if _is_ours(kwargs):
        message += (
            ". A quantized matmul is one: if it stands in the rule of a jax.custom_jvp, or in a "
            "function that is transposed (jax.linear_transpose), write that as a "
            "jax.custom_vjp, or wrap it in mt.disable_interceptions, and it stays in float"
        )
    raise NotImplementedError(f"{message}.")


def _is_ours(params: Any) -> bool:
    """Whether these are the parameters of a custom_vjp of the engine's."""
    source = getattr(params.get("bwd"), "debug_info", None)
    return source is not None and training.__file__ in source.func_src_info


def refuse_gradient_of_codes(original: Callable, *args, **kwargs):
    """Stands before the function with which JAX refuses the gradient of integers."""
    try:
        return original(*args, **kwargs)
    except TypeError as error:
        if getattr(args[-1], "itemsize", 2) > 1:
            raise
        raise TypeError(
            f"{error} If these are the codes of a quantized model, they have no gradient: "
            "take that of its adapters alone (nnx.DiffState(0, nnx.LoRAParam)), or train "
            "the float model under a QtProvider."
        ) from None
