"""Weights: which operand of a matmul is a parameter, of the module it happens in or of another.

By identity: the operand is a parameter, or was made from one by casts, reshapes and
sharding constraints; a jit trace records those, and outside of one we do. What comes in as
an argument of a jit inside the model has lost its origin: there, and only there, an operand
of the shape of a float parameter counts as one.
"""

from collections.abc import Mapping
from typing import Any

import jax
from flax import nnx

from midtread.model import flaxlib, intercept, running

ADAPTERS = ("_lora_a", "_lora_b")  # parameters beside a weight that no rule is about


def find_param(module: Any, x: Any) -> str | None:
    """The name of the parameter that `x` is, or a transpose of; None for an activation."""
    params = {k: v for k, v in flaxlib.params_of(module).items() if hasattr(v, "shape")}
    by_id = {id(intercept.unwrap(v)): name for name, v in params.items()}
    last = x
    for last in intercept.ancestors(flaxlib.unbox(x)):
        if id(last) in by_id:
            return by_id[id(last)]
    if not origin_is_hidden(last, params):
        return None
    return next(
        (k for k, v in params.items() if v.shape == x.shape and _is_plain(k, v)), None
    )


def owners(model: Any) -> dict[int, tuple[Any, Any, str]]:
    """{id of a float parameter: (it, the module that holds it, its name)} of an NNX module
    and all that it holds; lists and dicts of parameters are modules as well."""
    return {
        id(array): (array, module, name)
        for _, module in nnx.iter_modules(model)
        for name, param in flaxlib.params_of(module).items()
        if hasattr(array := intercept.unwrap(param), "dtype") and _is_plain(name, param)
    }


def computed_from(module: Any, x: Any) -> str | None:
    """The name of the parameter that `x` is a function of, and of nothing else."""
    params = flaxlib.params_of(module).items()
    names = {id(intercept.unwrap(v)): name for name, v in params}
    found = (names.get(id(a)) for a in intercept.sources(flaxlib.unbox(x)))
    return next(filter(None, found), None)


def turn_of(module: Any, name: str, x: Any) -> tuple[int, ...] | None:
    """For an operand that is the parameter `name`: its axis i is the parameter's axes[i].
    None where that cannot be said (a reshape of a transpose)."""
    param = intercept.unwrap(flaxlib.params_of(module)[name])
    for ancestor, axes in intercept.turned_ancestors(flaxlib.unbox(x)):
        if ancestor is param:
            return axes
    return tuple(range(x.ndim))  # found by its shape


def _is_plain(name: str, param: Any) -> bool:
    return not getattr(param, "is_boxed", False) and not name.endswith(ADAPTERS)


def origin_is_hidden(x: Any, params: Mapping[str, Any]) -> bool:
    """An argument of a trace begun inside the model."""
    if not isinstance(x, jax.core.Tracer) or getattr(x, "parent", None) is not None:
        return False
    traces = [running.entry_trace(), *map(intercept.trace_of, params.values())]
    return not any(intercept.trace_of(x) is trace for trace in traces)
