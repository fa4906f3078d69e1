"""Guards: an optimizer over codes is refused when it is made, with what to write.

Codes are not trained. JAX refuses their gradient as that of integers, but nnx.Optimizer
makes its states first, of the codes' shapes and in their dtypes, so it is asked here.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from midtread.model.boxes import WithAux

_installed: list[bool] = []


def install() -> None:
    """Has nnx.Optimizer look for codes among what it is given, from the first call on."""
    if not _installed:
        _installed.append(True)
        nnx.Optimizer.__init__ = _refuse_codes(nnx.Optimizer.__init__)


def _refuse_codes(original: Callable) -> Callable:
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
