"""Eager: outside of a trace, what a layer makes of its parameters is noted.

A provider has to know that the operand of a matmul is a parameter, though the layer has cast
it, transposed it or taken a part of it first. Inside jit the trace records every such step. A
concrete array has no record, so that while a model runs the functions that move arrays make
one (`intercept.remember`), in the terms in which a trace would have written it:

    transpose, swapaxes, x.T ...      a transpose, by the axes that NumPy's function would give
    astype, reshape, jnp.array ...    a cast, or a reshape
    x[i], jnp.split, lax.slice ...    a jit of that function, traced when it is called

The tracers of grad and vmap wrap concrete arrays there. What is done to a tracer is done to
the array that it wraps by one of JAX's primitives, which is noted as it is.

Only parameters, and what was made of them, are noted. The same functions are given boxes, as
quantized parameters are kept in a model: then they arrange the codes of the box anew.
"""

import functools
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from midtread.model import intercept, running, weights
from midtread.model.caught import COPIES, VIEWS
from midtread.model.intercept import Equation, is_boxed
from midtread.model.moves import ACTS
from midtread.ops.context import here

# Where a function that turns an array is kept, and NumPy's function for it. The methods of
# concrete arrays are turned by those of np.ndarray.
_TURNS = (
    (jnp, "transpose", np.transpose),
    (jnp, "swapaxes", np.swapaxes),
    (jnp, "moveaxis", np.moveaxis),
    (jnp, "permute_dims", np.transpose),
    (jnp, "matrix_transpose", lambda a: np.swapaxes(a, -1, -2)),
    (lax, "transpose", np.transpose),
)
_RESHAPES = ((jnp, "reshape"), (jnp, "ravel"), (lax, "reshape"))
_METHODS = ("astype", "reshape", "ravel", "flatten", "copy")
_MOVES = frozenset({*ACTS, "jit", "pjit"})  # primitives that may move a parameter


def install(concrete: type, evaluator: type) -> None:
    """Replaces the functions that move arrays, methods of the class of concrete arrays, and
    that of the class by which primitives are evaluated. A trace of jit records the methods of
    its own arrays."""
    evaluator.process_primitive = _evaluating(evaluator.process_primitive)
    methods = [(concrete, n, getattr(np.ndarray, n)) for n in ("transpose", "swapaxes")]
    for owner, name, turn in (*methods, *_TURNS):
        setattr(owner, name, _noting(getattr(owner, name), turn))
    methods = [(concrete, name) for name in _METHODS]
    for owner, name in (*methods, *_RESHAPES, *COPIES):
        setattr(owner, name, _noting(getattr(owner, name)))
    for name in ("T", "mT"):
        turn = operator.attrgetter(name)
        setattr(concrete, name, property(_noting(getattr(concrete, name).fget, turn)))
    concrete.__neg__ = _viewing(concrete.__neg__, operator.neg)
    concrete.squeeze = _viewing(concrete.squeeze, jnp.squeeze)
    concrete.repeat = _viewing(concrete.repeat, jnp.repeat)
    concrete.__getitem__ = _viewing(concrete.__getitem__, operator.getitem)
    concrete.__iter__ = _iterating(concrete.__iter__)
    for library, names in VIEWS.items():
        for name in names.split():
            if hasattr(library, name):
                setattr(library, name, _viewing(getattr(library, name)))


# --- casts, reshapes and transposes -----------------------------------------------------------


def _noting(original: Callable, turn: Callable | None = None) -> Callable:
    """Makes `original` note what its result was made from; `turn` is NumPy's version of it."""

    @functools.wraps(original)
    def wrapper(a, *args, **kwargs):
        if here.engine:  # it moves no boxes
            return original(a, *args, **kwargs)
        if is_boxed(a):
            return _move_box(original.__name__, turn, a, *args, **kwargs)
        out = original(a, *args, **kwargs)
        if not here.active or isinstance(out, jax.core.Tracer):
            return out
        axes = None if turn is None else _axes_of(turn, a.ndim, args, kwargs)
        return intercept.noted(out, (a,), axes)

    return wrapper


def _move_box(name: str, turn: Callable | None, box: Any, *args, **kwargs) -> Any:
    """Does to a box what jnp.transpose and the like do: it rearranges the same codes."""
    if turn is not None:
        return box.transpose(_axes_of(turn, box.ndim, args, kwargs))
    if name in ("astype", "convert_element_type"):
        dtype = args[0] if args else kwargs.get("dtype", kwargs.get("new_dtype"))
        return box.astype(dtype)
    if name == "array":
        dtype = args[0] if args else kwargs.get("dtype")
        return box if dtype is None else box.astype(dtype)
    if name in ("reshape", "ravel"):
        same_shape = np.broadcast_to(0, box.shape)
        reshape = getattr(np, name)
        return box.reshape(reshape(same_shape, *args, *kwargs.values()).shape)
    return box


def _axes_of(turn: Callable, ndim: int, args: tuple, kwargs: dict) -> tuple[int, ...]:
    """Returns the order in which `turn` puts the axes of a NumPy array."""
    marked = np.broadcast_to(0, range(2, 2 + ndim))  # axis i has extent i + 2
    return tuple(n - 2 for n in turn(marked, *args, **kwargs).shape)


# --- parts ------------------------------------------------------------------------------------


def _viewing(original: Callable, view: Callable | None = None) -> Callable:
    """Makes `original`, one of VIEWS, note what it makes of a parameter outside of a trace.
    `view` does the same to a tracer, where `original` is a method of concrete arrays."""

    @functools.wraps(original)
    def wrapper(a, *args, **kwargs):
        if not here.active or here.engine:
            return original(a, *args, **kwargs)
        a = a.__jax_array__() if getattr(type(a), "is_boxed", False) else a
        out = original(a, *args, **kwargs)
        if not isinstance(a, jax.core.Tracer) and _is_of_a_parameter(a):
            _remember_parts(view or original, out, a, args, kwargs)
        return out

    return intercept.with_methods_of(original, wrapper)


def _remember_parts(
    view: Callable, out: Any, a: Any, args: tuple, kwargs: dict
) -> None:
    """Remembers of the parts of a parameter how they were taken, as jit would."""
    with running.disabled():
        params = {"jaxpr": jax.make_jaxpr(lambda a: view(a, *args, **kwargs))(a)}
    for index, part in enumerate(jax.tree.leaves(out)):
        intercept.remember(part, Equation("jit", params, [a], index))


def _iterating(original: Callable) -> Callable:
    """Makes `a, b = stack` take an index at a time, each of which is noted."""

    @functools.wraps(original)
    def wrapper(self):
        if here.active and self.ndim and _is_of_a_parameter(self):
            return (self[i] for i in range(len(self)))
        return original(self)

    return wrapper


# --- primitives -------------------------------------------------------------------------------


def _evaluating(original: Callable) -> Callable:
    """Makes the evaluation of a primitive note what it makes of a parameter."""

    @functools.wraps(original)
    def wrapper(self, primitive, args, params, /):
        out = original(self, primitive, args, params)
        if not here.active or here.engine or primitive.name not in _MOVES:
            return out
        if any(map(_is_of_a_parameter, args)):
            for index, part in enumerate(out if primitive.multiple_results else [out]):
                equation = Equation(primitive.name, params, list(args), index)
                intercept.remember(part, equation)
        return out

    return wrapper


def _is_of_a_parameter(x: Any) -> bool:
    """Whether a concrete array is a parameter or was made from one. Those that Linen gives
    out are noted; an NNX model holds its own."""
    return id(x) in here.casts or any(weights.holds(call, x) for call in here.active)
