"""Weights: which operand of a matmul is a parameter of the module it happens in.

By identity: the operand is a parameter, or was made from one by casts, reshapes and
sharding constraints, which a jit trace records. Where neither can be seen (eager casts,
arguments of a nested jit) an operand of the shape of a float parameter counts as one.
"""

from typing import Any

import jax

from midtread.model import flaxlib, intercept

ADAPTERS = ("_lora_a", "_lora_b")  # parameters beside a weight that no rule is about


def find_param(module: Any, x: Any) -> str | None:
    """The name of the parameter that `x` is, or None for an activation."""
    params = {k: v for k, v in flaxlib.params_of(module).items() if hasattr(v, "shape")}
    by_id = {id(v): name for name, v in params.items()}
    last = x
    for last in intercept.ancestors(flaxlib.unbox(x)):
        if id(last) in by_id:
            return by_id[id(last)]
    if not _origin_is_hidden(last):
        return None
    alike = [name for name, v in params.items() if v.shape == x.shape]
    alike = [
        name
        for name in alike
        if not getattr(params[name], "is_boxed", False) and not name.endswith(ADAPTERS)
    ]
    return alike[0] if alike else None


def _origin_is_hidden(x: Any) -> bool:
    """Nothing says where it came from: concrete, or an argument of some trace."""
    if not isinstance(x, jax.core.Tracer):
        return True
    return getattr(x, "parent", None) is None
