"""Origins: which arrays an array is a cast, a reshape or a transpose of.

A layer seldom multiplies by its parameter itself: it casts it to the activations' dtype first,
or transposes it, or constrains its sharding. The result holds the same values, so that rules
for the parameter are rules for it. Starting at the operand, the functions here go back from
each array to the one that it was made from, as long as the equation between the two only moves
values; an equation that computes something ends the walk.

    ancestors(x)            yields x, what x was made from, what that was made from, ...
    turned_ancestors(x)     yields the same, each with the order that x has its axes in
    MOVES                   the primitives, besides transpose, that only move values

What made an array is recorded by jit, or outside of jit by eager.py, and is read with
`intercept.made_by`. Slices and stacks are not followed here but in moves.py, where codes
follow them.
"""

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np

from midtread.model.intercept import made_by, unwrap
from midtread.numerics.dtypes import is_wide

# Primitives whose result is their operand: cast, reshaped, or laid out otherwise.
MOVES = (
    "convert_element_type", "reshape", "copy", "name", "stop_gradient",
    "optimization_barrier", "sharding_constraint", "device_put",
    "reshard", "mesh_cast", "pvary", "pcast",
)  # fmt: skip


def ancestors(x: Any) -> Iterator[Any]:
    """Yields `x`, and what it was made from by functions of one argument (casts, reshapes,
    transposes, sharding constraints)."""
    return (array for array, _ in turned_ancestors(x))


def turned_ancestors(x: Any) -> Iterator[tuple[Any, tuple[int, ...] | None]]:
    """Yields (ancestor, axes): axis i of `x` is axis axes[i] of what the layer reshaped the
    ancestor to, if it did; axes are None where transposes and reshapes mix."""
    axes, is_reshaped = tuple(range(getattr(x, "ndim", 0))), False
    while x is not None:
        x = unwrap(x)
        yield x, axes
        equation = made_by(x)
        if equation is None or len(equation.operands) != 1:
            return
        permutations = _permutations(equation.primitive, equation.params)
        if permutations is None:
            return
        child, (x,) = x, equation.operands
        if np.size(x) != child.size:
            return
        if permutations:
            permutation = functools.reduce(lambda p, q: [p[a] for a in q], permutations)
            if axes is not None:
                axes = None if is_reshaped else tuple(permutation[a] for a in axes)
        elif getattr(x, "shape", None) != child.shape:
            is_reshaped = True


def _permutations(primitive: str, params: dict[str, Any]) -> list | None:
    """Returns the permutations that an equation applies to its one operand, or None if it
    computes something instead of moving it."""
    if primitive == "transpose":
        return [params["permutation"]]
    if primitive == "convert_element_type" and not is_wide(params["new_dtype"]):
        return None  # it rounds: what comes of it is a function of the operand
    if primitive in ("jit", "pjit"):
        return _permutations_inside(params["jaxpr"].jaxpr)
    return [] if primitive in MOVES else None


def _permutations_inside(jaxpr: Any) -> list | None:
    """Returns those of all equations of a function, or None if one of them computes."""
    if len(jaxpr.outvars) != 1:
        return None
    permutations = []
    for equation in jaxpr.eqns:
        if len(equation.invars) != 1:
            return None
        more = _permutations(equation.primitive.name, equation.params)
        if more is None:
            return None
        permutations += more
    return permutations
