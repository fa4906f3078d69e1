"""Guards: what JAX and Flax would let pass, or refuse in words of their own.

Codes are not trained, and a quantized matmul has no forward-mode derivative. JAX finds out
late, far from the line at fault, or never; so these functions look first, once a model has
been quantized, and say what to write:

    jax.grad, jax.value_and_grad    with respect to quantized parameters
    nnx.Optimizer                   over quantized parameters
    jax.jvp, jax.jacfwd             of a quantized model behind a jit

Everything else passes through them as it is.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from flax import nnx

from midtread.model.boxes import WithAux
from midtread.ops.training import FORWARD_MODE

_installed: list[bool] = []

OURS = "name=_train"  # the engine, in the text of a jaxpr
CODES = (
    "{where} quantized parameters ({what}), and codes are not trained: train under "
    "mt.QtProvider and quantize what comes of it, or train adapters beside the codes "
    "(mt.apply_lora_to_model, and {instead})."
)


def install() -> None:
    """Puts the guards into JAX's and Flax's names, once."""
    if _installed:
        return
    _installed.append(True)
    jax.grad, jax.value_and_grad = map(_of_floats, (jax.grad, jax.value_and_grad))
    jax.jvp, jax.jacfwd = _jvp(jax.jvp), _jacfwd(jax.jacfwd)
    nnx.Optimizer.__init__ = _optimizer(nnx.Optimizer.__init__)


def _of_floats(original: Callable) -> Callable:
    """jax.grad: not with respect to a box."""

    @functools.wraps(original)
    def transform(fun, argnums=0, *options, **named):
        made = original(fun, argnums, *options, **named)
        takes_codes = named.get("allow_int") or (len(options) > 2 and options[2])

        @functools.wraps(made)
        def wrapper(*args, **kwargs):
            numbers = argnums if isinstance(argnums, Sequence) else (argnums,)
            wanted = [args[i] for i in numbers if -len(args) <= i < len(args)]
            boxes = [] if takes_codes else _boxes(wanted)
            if boxes:
                where = "jax.grad is asked for the gradient of"
                instead = "jax.grad over these alone"
                raise TypeError(_refusal(where, boxes, instead))
            try:
                return made(*args, **kwargs)
            except TypeError as error:  # from nnx.grad, which hands over bare arrays
                if "real- or complex-valued" not in str(error):
                    raise
                instead = "nnx.grad(..., argnums=nnx.DiffState(0, nnx.LoRAParam))"
                why = CODES.format(
                    where="These may be", what="integers", instead=instead
                )
                raise TypeError(f"{error} {why}") from None

        return wrapper

    return transform


def _optimizer(original: Callable) -> Callable:
    """nnx.Optimizer: not over the Variables of a box."""

    @functools.wraps(original)
    def __init__(self, model, *args, **kwargs):
        original(self, model, *args, **kwargs)
        wrt = kwargs.get("wrt", args[1] if len(args) > 1 else nnx.Param)
        known = {
            id(v)
            for v in jax.tree.leaves(nnx.variables(model, wrt), is_leaf=_is_variable)
        }
        boxes = [box for _, box in nnx.iter_graph(model) if isinstance(box, WithAux)]
        inside = lambda box: jax.tree.leaves(box.array, is_leaf=_is_variable)
        held = [box for box in boxes if known & {id(v) for v in inside(box)}]
        if held:
            instead = "nnx.Optimizer(model, tx, wrt=nnx.LoRAParam)"
            raise ValueError(_refusal("nnx.Optimizer is given", held, instead))

    return __init__


def _is_variable(x: Any) -> bool:
    return isinstance(x, nnx.Variable)


def _boxes(tree: Any) -> list[WithAux]:
    leaves = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, WithAux))
    return [leaf for leaf in leaves if isinstance(leaf, WithAux)]


def _refusal(where: str, boxes: list[WithAux], instead: str) -> str:
    shown = [f"{b.how.format.name} {list(b.shape)}" for b in boxes[:3]]
    what = ", ".join(shown) + (f" and {len(boxes) - 3} more" if boxes[3:] else "")
    return CODES.format(where=where, what=what, instead=instead)


def _jvp(original: Callable) -> Callable:
    @functools.wraps(original)
    def jvp(fun, primals, tangents, **options):
        run = functools.partial(original, fun, **options)
        return _forward_mode(run, fun, primals, (primals, tangents))

    return jvp


def _jacfwd(original: Callable) -> Callable:
    @functools.wraps(original)
    def jacfwd(fun, *args, **kwargs):
        made = original(fun, *args, **kwargs)

        @functools.wraps(made)
        def wrapper(*primals, **named):
            run, inner = (functools.partial(f, **named) for f in (made, fun))
            return _forward_mode(run, inner, primals, primals)

        return wrapper

    return jacfwd


def _forward_mode(run: Callable, fun: Callable, primals: Any, args: Any) -> Any:
    """`run(*args)`, a forward-mode derivative of fun(*primals); whose matmul it was that
    has none, where JAX tells that it found one. Inside a jit it would tell later."""
    refusal = TypeError(FORWARD_MODE)
    if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(primals)):
        text = str(jax.make_jaxpr(run)(*args))
        if "custom_lin[" in text and OURS in text:
            raise refusal
    try:
        return run(*args)
    except TypeError as error:
        if "forward-mode" in str(error) and OURS in str(jax.make_jaxpr(fun)(*primals)):
            raise refusal from None
        raise
