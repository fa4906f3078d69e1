"""Weights: which operand of a matmul is a parameter, of the module it happens in or of another.

This is known by identity: the operand is a parameter, or was made from one by casts, reshapes
and sharding constraints. A jit trace records those, and outside of one we do. An argument of
a jit inside the model has lost its origin: there, and only there, an operand of the shape of
a float parameter counts as that parameter.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
from flax import linen as nn
from flax import nnx

from midtread.model import flaxlib, intercept, running
from midtread.model.boxes import WithAux
from midtread.model.moves import Move, ancestors, trail
from midtread.numerics.qarray import QArray, is_float

# what makes an activation, whatever it multiplies
PRODUCTS = (
    "dot_general",
    "conv_general_dilated",
    "ragged_dot_general",
    "custom_vjp_call",
)
ADAPTERS = ("_lora_a", "_lora_b")  # parameters beside a weight that no rule is about


def find_param(module: Any, x: Any) -> str | None:
    """Returns the name of the parameter that `x` is, or is a transpose of, or None."""
    params = flaxlib.params_of(module)
    arrays = {name: intercept.unwrap(param) for name, param in params.items()}
    alike = [k for k, v in params.items() if getattr(v, "shape", None) == x.shape]
    # Casts, reshapes and transposes leave the number of elements as it is.
    size = intercept.unwrap(x).size
    if not alike and all(getattr(v, "size", None) != size for v in arrays.values()):
        return None
    by_id = {id(array): name for name, array in arrays.items()}
    last = x
    for last, _ in ancestors(flaxlib.unbox(x)):
        name = by_id.get(id(last))
        if name is not None and hasattr(params[name], "shape"):
            return name
    if not origin_is_hidden(last, params):
        return None
    return next((name for name in alike if _is_plain(name, params[name])), None)


def find_part(call: Any, module: Any, x: Any) -> tuple[Any, str, list[Move]] | None:
    """Returns (the module that holds it, its name, moves) of the float parameter that the
    moves make `x` a part of, or None. It may be another module's than that which multiplies."""
    known = params_near(call, module)
    for ancestor, moves in trail(flaxlib.unbox(x)):
        for params in known:
            if id(ancestor) not in params:
                continue
            _, owner, name = params[id(ancestor)]
            param = flaxlib.params_of(owner).get(name)
            if param is not None and is_float(param) and _is_plain(name, param):
                return owner, name, moves
    return None


def note_given(call: Any, module: Any, name: str, param: Any) -> None:
    """Notes a parameter that Linen gives to a layer, which may pass it on to another."""
    array = intercept.unwrap(flaxlib.unbox(param))
    if hasattr(array, "dtype"):
        call.notes.setdefault("given", {})[id(array)] = array, module, name
        intercept.remember(array)


def params_near(call: Any, module: Any) -> list[dict[int, tuple[Any, Any, str]]]:
    """Returns {id: (array, module that holds it, name)} of what a model can multiply by: what
    Linen gave out in this call, the module's own, and all that an NNX model holds."""
    own = _params_by_id(module, flaxlib.params_of(module))
    known = [call.notes.get("given", {}), own]
    modules: Mapping[int, Any] = {}
    if isinstance(call.model, nnx.Module):
        _, modules, params = _inside(call, call.model)
        known.append(params)
    if id(module) not in modules and isinstance(module, nnx.Module):
        known.append(_inside(call, module).params)  # nobody's, or a transform's
    return known


def holds(call: Any, x: Any) -> bool:
    """Whether an array is a parameter that the NNX model of this call holds."""
    is_nnx = isinstance(call.model, nnx.Module)
    return is_nnx and id(x) in _inside(call, call.model).params


class _Inside(NamedTuple):
    """What an NNX module holds. It keeps the module: the id() of one gone is used again."""

    root: nnx.Module
    modules: dict[int, nnx.Module]
    params: dict[int, tuple[Any, Any, str]]


def _inside(call: Any, root: nnx.Module) -> _Inside:
    """Returns what a module held when this call of the model first asked."""
    asked = call.notes.setdefault("inside", {})
    if id(root) not in asked:
        modules = {id(module): module for module in flaxlib.modules_in(root)}
        params = {}
        for module in modules.values():
            params |= _params_by_id(module, flaxlib.params_in_containers(module))
            params |= _params_by_id(module, flaxlib.params_of(module))
        asked[id(root)] = _Inside(root, modules, params)
    return asked[id(root)]


def _params_by_id(
    module: Any, params: Mapping[str, Any]
) -> dict[int, tuple[Any, Any, str]]:
    """Returns {id: (array, module, name)} of parameters of a module that are no boxes."""
    return {
        id(array): (array, module, name)
        for name, param in params.items()
        if hasattr(array := intercept.unwrap(param), "dtype") and _is_plain(name, param)
    }


def computed_from(call: Any, known: list[dict[int, tuple]], x: Any) -> list[tuple]:
    """Returns the parameters, as those of `known` have them by id, that `x` is a function
    of, and of nothing else but constants; none if an input of the model or a product is
    among it."""
    # id -> (array, what it is made of)
    memo = call.notes.setdefault("computed_from", {})

    def look(x: Any) -> dict[int, tuple] | None:
        x = intercept.unwrap(x)
        for params in known:
            if id(x) in params:
                return {id(x): params[id(x)]}
        if id(x) in memo:
            return memo[id(x)][1]
        memo[id(x)] = x, None  # until it is known
        equation, sources = intercept.made_by(x), {}
        if equation is None:
            sources = None if isinstance(x, jax.core.Tracer) else {}
        elif _is_product(equation.primitive, equation.params):
            sources = None
        else:
            for operand in equation.operands:
                part = look(operand)
                if part is None:
                    sources = None
                    break
                sources |= part
        memo[id(x)] = x, sources
        return sources

    return list((look(flaxlib.unbox(x)) or {}).values())


def _is_product(primitive: str, params: Mapping[str, Any]) -> bool:
    """Whether an equation multiplies, itself or in the function that it calls."""
    if primitive not in ("jit", "pjit"):
        return primitive in PRODUCTS
    inner = params["jaxpr"].jaxpr.eqns
    return any(_is_product(eqn.primitive.name, eqn.params) for eqn in inner)


def turn_of(module: Any, name: str, x: Any) -> tuple[int, ...] | None:
    """Returns axes, for an operand that is the parameter `name`: the operand's axis i is the
    parameter's axes[i]. None means that this is not known (a reshape of a transpose)."""
    param = intercept.unwrap(flaxlib.params_of(module)[name])
    for ancestor, axes in ancestors(flaxlib.unbox(x)):
        if ancestor is param:
            return axes
    return tuple(range(x.ndim))  # it was taken for the parameter because of its shape


def _is_plain(name: str, param: Any) -> bool:
    return not getattr(param, "is_boxed", False) and not name.endswith(ADAPTERS)


def codes_in(module: Any) -> dict[str, QArray]:
    """Returns {name: codes} of the quantized parameters of a module."""
    boxes = {k: v for k, v in vars(module).items() if isinstance(v, WithAux)}  # NNX
    return codes_among({**flaxlib.params_of(module), **boxes})


def codes_among(params: Mapping[str, Any]) -> dict[str, QArray]:
    """Returns {name: codes} of those parameters that are quantized."""
    opened = {name: flaxlib.unbox(param) for name, param in params.items()}
    arrays = {k: v.array if isinstance(v, WithAux) else v for k, v in opened.items()}
    return {name: q for name, q in arrays.items() if isinstance(q, QArray)}


def origin_is_hidden(x: Any, params: Mapping[str, Any]) -> bool:
    """Whether `x` is an argument of a trace that began inside the model."""
    if not isinstance(x, jax.core.Tracer) or getattr(x, "parent", None) is not None:
        return False
    traces = [running.entry_trace(), *map(intercept.trace_of, params.values())]
    return not any(intercept.trace_of(x) is trace for trace in traces)


def is_left_behind(module: Any, x: Any) -> bool:
    """Whether `x` was computed in a jit, scan or vmap that a Linen module began by itself. What
    the module kept of it would outlive the trace that it belongs to."""
    scope = module.scope if isinstance(module, nn.Module) else None
    if scope is None or scope.trace_level == running.trace_state():
        return False
    if next(intercept.mapped(x), None) is not None:
        return True
    params = flaxlib.params_of(module).values()
    known = [None, running.entry_trace(), *map(intercept.trace_of, params)]
    return all(intercept.trace_of(x) is not trace for trace in known)


def is_argument(module: Any, weight: Any) -> bool:
    """Whether a weight of a module, in codes or not, came into a jit inside the model as an
    argument: what else of the module is read there, the jit's trace would keep."""
    array = flaxlib.unbox(getattr(weight, "array", weight))
    *_, (first, _) = ancestors(getattr(array, "qvalue", array))
    return origin_is_hidden(first, flaxlib.params_of(module))
