"""Interception: calls of JAX's functions reach the active provider.

JAX's functions are changed once, on first use, and for good: each asks whether this
thread is running a quantized model, and if not does what it always did. A plain function
gets new code, so that every alias of it is caught (nnx.Linear keeps one). Functions that
JAX wraps in jit (jnp.dot, jnp.matmul, ...) are replaced in their module by one that, while
a model runs, calls what they wrap: then lax.dot_general sees the caller's own arrays.

    active(provider, ...)    inside, a provider's handlers apply on this thread (running.py)
    dispatch(name, ...)      what each of JAX's functions now calls
    watch(path)              catches the function at a dotted path as well
    unwrap(x), made_by(x)    read tracers: the value inside, and the equation that made it

Which functions these are is the table in caught.py; spellings.py turns the other names of a
matmul into dot_general, eager.py notes what is done to arrays outside of a trace, guards.py
answers where JAX refuses a derivative. All that has to reach into JAX (the classes of arrays,
the fields of tracers, functions that it does not export) is done in this file alone, so that
a new JAX breaks one file; tests/model/test_intercept.py and test_guards.py say so when it does.
"""

import contextlib
import functools
import inspect
import sys
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import lax
from jax.experimental import pallas as pl

from midtread.model import flaxlib, running, spellings
from midtread.model.caught import (
    BEHIND_JIT,
    CAST,
    JITTED,
    OPS,
    RULE,
    of_kind,
)
from midtread.numerics.dtypes import is_wide
from midtread.numerics.qarray import QArray
from midtread.ops.context import here

_NAMES = {op.path: name for name, op in OPS.items() if op.kind != BEHIND_JIT}
_CASTS = of_kind(CAST)
_PROMOTIONS = {"promote_dtype": list, "promote_dtype_nnx": tuple}  # what they return
# The functions inside those jits are caught too, because somebody may have imported the jitted
# function before it was replaced: then boxes among its arguments are seen here.
_INSIDE_JIT = {f"jnp.{name}": name for name in JITTED if OPS[name].numbers}

_originals: dict[str, Callable] = {}
_install_lock = threading.Lock()


def active(
    provider: Any, handlers: dict[str, Callable], model: Any = None
) -> contextlib.AbstractContextManager:
    """Makes a provider's handlers apply inside, in a call of `model`."""
    install()
    here_now = lambda: trace_of(lax.full((), 0.0))
    call = running.Call(provider, handlers, model, here_now(), trace_here=here_now)
    return running.active(call)


def current_module() -> Any:
    """Returns the innermost module whose method is running, of a quantized model, or else the
    Linen module that calls a provider itself. Flax's stack of bound modules is private."""
    module = running.entered_module()
    if module is None:
        module = nn.module._context.module_stack[-1]
    if module is None:
        raise ValueError(
            "Current module is not known: no quantized model is running on this thread."
        )
    return module


def dispatch(name: str, args: tuple, kwargs: dict) -> Any:
    """Does what JAX's function `name` does now: asks providers first, if a model runs."""
    if not here.active or here.engine or here.closed:
        return _originals[name](*args, **kwargs)
    if name in ("lax_dot", "tensordot") and running.any_enabled():
        spelled = spellings.as_dot_general(name, *args, **kwargs)
        if spelled is not None:
            with running.late(name == "lax_dot"):
                return dispatch("dot_general", *spelled)
    if name in _INSIDE_JIT and any(map(is_boxed, args)) and running.any_enabled():
        return spellings.multiply_boxes(_INSIDE_JIT[name], args, kwargs)
    if name in here.names:
        out = running.offer(name, *args, **kwargs)
        if out is not NotImplemented:
            return out
    if name in _CASTS:
        return _cast(name, args, kwargs)
    return _originals[name](*args, **kwargs)


def _cast(name: str, args: tuple, kwargs: dict) -> Any:
    """Casts as JAX's or Flax's function `name` does, and notes what was cast."""
    # jnp.asarray may be given its array by name.
    sources = args[0] if name == "promote_dtype_nnx" else args or (kwargs.get("a"),)
    if name in _PROMOTIONS:
        if any(map(is_boxed, sources)):
            return _PROMOTIONS[name](_beside_boxes(name, sources, kwargs))
        if share_a_dtype(sources, **kwargs):
            return _PROMOTIONS[name](sources)
    elif any(map(is_boxed, sources)):
        return noted(_originals[name](*args, **kwargs), sources)
    # A cast of arrays makes other casts, which need not be noted too. Who handles every op has
    # to see them: a tracer of grad is another after a cast to the dtype that it has.
    closes = "bind" not in here.names
    here.closed += closes
    try:
        out = _originals[name](*args, **kwargs)
    finally:
        here.closed -= closes
    return noted(out, sources)


def _beside_boxes(name: str, sources: Sequence, kwargs: dict) -> list:
    """Promotes boxes, and the arrays that a layer has beside them. Boxes stay as they are where
    no dtype is asked for."""
    dtype = kwargs.get("dtype")
    if len(sources) == 1:  # a table to be looked up
        return [x if dtype is None else x.astype(dtype) for x in sources]
    floats = [None if is_boxed(x) else x for x in sources]
    plain = _cast(name, (floats,) if name == "promote_dtype_nnx" else floats, kwargs)
    return [_promoted(x, dtype) if is_boxed(x) else p for x, p in zip(sources, plain)]


def _promoted(box: Any, dtype: Any) -> Any:
    """Gives a box the dtype that its product shall have. Scales of 8 bits stay, because they
    widen no product."""
    if dtype is None or box.dtype == dtype:
        return box
    codes = flaxlib.unbox(getattr(box, "array", box))
    return box.astype(dtype) if is_wide(codes.scale.dtype) else box


def share_a_dtype(arrays: Sequence[Any], dtype: Any = None, **options: Any) -> bool:
    """Whether all arrays (None is left out) have the one float dtype that Flax would promote
    them to. It would take as long to find that out as to trace a matmul."""
    wanted = None if dtype is None else jnp.dtype(dtype)
    for x in arrays:
        if x is None:
            continue
        if not isinstance(x, jax.Array) or x.weak_type:
            return False
        wanted = wanted or x.dtype
        if x.dtype != wanted:
            return False
    return not options and wanted is not None and is_wide(wanted)


def is_boxed(x: Any) -> bool:
    """Whether `x` is a quantized array, or a parameter that holds one."""
    return isinstance(x, QArray) or getattr(type(x), "is_boxed", False)


# --- installing -------------------------------------------------------------------------------


def install() -> None:
    """Changes JAX's functions, once."""
    if _originals:
        return
    from midtread.model import eager  # which reads tracers with what is below

    with _install_lock:
        if _originals:
            return
        plain = [n for n, op in OPS.items() if op.kind not in (BEHIND_JIT, RULE)]
        originals = {name: _catch(name, OPS[name].path) for name in plain}
        for name, spelling in _INSIDE_JIT.items():
            originals[name] = _swap_code(name, inspect.unwrap(_function(spelling)))
        for name in JITTED:
            setattr(jnp, name, _without_jit(getattr(jnp, name)))
        for name in ("matmul", "vecdot"):  # that of linalg has its own copy of the jit
            others = getattr(jnp.linalg, name), getattr(jnp, name)
            setattr(jnp.linalg, name, _while_running(*others))
        concrete, tracers = array_classes()
        eager.install(concrete, _evaluator())
        _catch_operators(concrete)
        _catch_operators(tracers)
        pl.pallas_call = _opaque(pl.pallas_call)
        pl.kernel = _opaque(pl.kernel)
        _originals.update(originals)
        _catch_refusals()
        _leave_rules_alone()


def swapped(name: str, fn: Any) -> Callable[[], None]:
    """Changes a function as `_swap_code` does, and returns what changes it back."""
    before = vars(fn).copy()  # the signature, if it was changed already
    original = _originals[name] = _swap_code(name, fn)

    def undo() -> None:
        fn.__code__ = original.__code__
        fn.__defaults__ = original.__defaults__
        fn.__kwdefaults__ = original.__kwdefaults__
        del fn.__signature__
        vars(fn).update(before)

    return undo


def watch(path: str) -> str:
    """Catches the function at a dotted path, and returns the name that its handlers have."""
    name = _NAMES.get(path, path)
    if "." not in name:  # a function of the table, which is caught already
        return name
    install()
    with _install_lock:
        if name in _originals:
            return name
        _originals[name] = _catch(name, path)
    return name


def _catch(name: str, path: str) -> Callable:
    """Makes the function at a path dispatch, and returns one that does as it did."""
    parent, attribute = resolve(path)
    fn = getattr(parent, attribute)
    if isinstance(fn, types.FunctionType) and not fn.__closure__:
        return _swap_code(name, fn)
    # An object that jit made, or a function that another library wrapped: then aliases of it
    # are not caught.
    setattr(parent, attribute, _dispatching(name, fn))
    return fn


def resolve(path: str) -> tuple[Any, str]:
    """Splits "jax.numpy.sin" into the module jax.numpy and the name "sin"."""
    root, *parts = path.split(".")
    if root not in sys.modules or not parts:
        raise AttributeError(f"there is no function {path!r}: {root} is not imported.")
    owner = sys.modules[root]
    for part in parts[:-1]:
        owner = getattr(owner, part)
    getattr(owner, parts[-1])
    return owner, parts[-1]


def _function(name: str) -> Any:
    """Returns the function of JAX or Flax for an op of the table."""
    return getattr(*resolve(OPS[name].path))


def _dispatching(name: str, fn: Any) -> Callable:
    @functools.wraps(fn)
    def wrapper(*args, **kwargs):
        return dispatch(name, args, kwargs)

    return with_methods_of(fn, wrapper)


def _swap_code(name: str, fn: Any) -> Callable:
    """Gives a plain function code that dispatches, and returns a function with the old code."""
    return _give_code(fn, _dispatching_code.__code__, here, dispatch, name)


def _give_code(fn: Any, code: types.CodeType, *helpers: Any) -> Callable:
    """Gives a plain function other code, and returns a function with the old code. The new
    code runs with the globals of JAX's module, so that it is handed what it needs (helpers and
    the old function) as an argument that has a default."""
    original = types.FunctionType(
        fn.__code__, fn.__globals__, fn.__name__, fn.__defaults__, fn.__closure__
    )
    original.__kwdefaults__ = fn.__kwdefaults__
    fn.__signature__ = inspect.signature(fn)
    name = fn.__name__  # as a traceback shows it
    fn.__code__ = code.replace(
        co_name=name, co_qualname=name, co_filename=f"<midtread: jax {name}>"
    )
    fn.__defaults__, fn.__kwdefaults__ = None, {"_midtread": (*helpers, original)}
    return original


def _dispatching_code(*args, _midtread, **kwargs):
    """The code of functions that dispatch. It leaves at once where there is nothing to
    dispatch, because it runs for every call."""
    here, dispatch, name, original = _midtread
    if here.active and not here.engine and not here.closed:
        return dispatch(name, args, kwargs)
    return original(*args, **kwargs)


def _guarded_code(*args, _midtread, **kwargs):
    """The code of functions that guards.py answers for."""
    guard, original = _midtread
    return guard(original, *args, **kwargs)


def _untouched_code(*args, _midtread, **kwargs):
    """The code of functions inside which nothing is intercepted."""
    disable, original = _midtread
    return disable(original)(*args, **kwargs)


def _without_jit(jitted: Any) -> Callable:
    name = jitted.__name__
    plain = spellings.vecdot if name == "vecdot" else jitted.__wrapped__
    return _while_running(jitted, plain)


def _while_running(original: Any, other: Callable) -> Callable:
    """Makes a function do what `other` does while a model runs."""

    @functools.wraps(original)
    def wrapper(*args, **kwargs):
        run = other if running.any_enabled() else original
        return run(*args, **kwargs)

    return with_methods_of(original, wrapper)


def with_methods_of(fn: Any, wrapper: Callable) -> Callable:
    """Gives `wrapper` what `fn` has beyond a plain function: lower, trace, eval_shape ..."""
    for name in set(dir(fn)) - set(dir(wrapper)):
        if not name.startswith("__"):
            setattr(wrapper, name, getattr(fn, name))
    return wrapper


def array_classes() -> tuple[type, type]:
    """Returns the classes of concrete arrays and of tracers. The former is private in JAX."""
    from jax._src.array import ArrayImpl

    return ArrayImpl, jax.core.Tracer


def _evaluator() -> type:
    """Returns the class of the trace that evaluates primitives of concrete arrays, which the
    tracers of grad and vmap outside of jit end in. It is private in JAX."""
    from jax._src.core import EvalTrace

    return EvalTrace


def _catch_operators(cls: type) -> None:
    """Replaces the operators and methods of a class of arrays that multiply or look up rows:
    `x @ w` does not look up jnp.matmul."""
    for name in ("__matmul__", "__rmatmul__"):
        setattr(cls, name, _operator(name, getattr(cls, name)))
    cls.dot = _dot_method
    cls.__getitem__ = _indexing(cls.__getitem__)


def _catch_refusals() -> None:
    """Lets guards.py answer for the functions with which JAX refuses a derivative. No function
    of ours runs by then: forward mode behind a jit is refused when the traced program is
    lowered, and jax.grad looks at its arguments first. Both functions are private; others hold
    them, so their code is changed. A JAX that has none of the name keeps its own words:
    tests/model/test_guards.py says so."""
    from jax._src import api
    from jax._src.interpreters import ad

    from midtread.model import guards

    rule = guards.refuse_transposition
    ad.primitive_transposes.setdefault(
        jax.extend.core.primitives.custom_vjp_call_p, rule
    )
    for module, name, guard in (
        (ad, "raise_custom_vjp_error_on_jvp", guards.refuse_forward_mode),
        (api, "_check_input_dtype_revderiv", guards.refuse_gradient_of_codes),
    ):
        fn = getattr(module, name, None)
        if isinstance(fn, types.FunctionType) and not fn.__closure__:
            _give_code(fn, _guarded_code.__code__, guard)


# The primitives whose rules multiply: JAX's own contractions, and its linear algebra.
_MULTIPLYING = frozenset({
    "dot_general", "ragged_dot_general", "conv_general_dilated", "cholesky",
    "cholesky_update", "eig", "eigh", "geqrf", "householder_product", "lu", "ormqr", "qr",
    "schur", "svd", "symmetric_product", "triangular_solve", "tridiagonal_solve",
})  # fmt: skip


def _leave_rules_alone() -> None:
    """Switches interception off in the rules by which JAX differentiates, transposes and batches
    a primitive. They multiply by the functions that are caught, and run while the model does
    if it maps a jit, scan or checkpoint of its own, which was intercepted when it was traced,
    or if a gradient is taken around it: what a rule multiplies is no matmul of the model's.
    Solvers transpose a product that they are given, and a custom_vjp has no transpose. The
    tables of rules are private."""
    from jax._src.interpreters import ad, batching

    for table in (
        ad.primitive_jvps,
        ad.primitive_transposes,
        batching.fancy_primitive_batchers,
    ):
        for primitive, rule in list(table.items()):
            if primitive.name in _MULTIPLYING:
                table[primitive] = running.disable_interceptions(rule)
    solve = inspect.unwrap(lax.custom_linear_solve)
    if isinstance(solve, types.FunctionType) and not solve.__closure__:
        _give_code(solve, _untouched_code.__code__, running.disable_interceptions)


def _operator(name: str, original: Callable) -> Callable:
    @functools.wraps(original)
    def wrapper(self, other):
        if running.any_enabled() and hasattr(other, "shape"):
            pair = (self, other) if name == "__matmul__" else (other, self)
            return jnp.matmul(*pair)
        return original(self, other)

    return wrapper


def _dot_method(self, b, **options):
    """Replaces `x.dot(w)`, which does not look up jnp.dot either."""
    return jnp.dot(self, b, **options)


def _indexing(original: Callable) -> Callable:
    """Makes `table[ids]` reach providers as a look-up."""

    @functools.wraps(original)
    def wrapper(self, index):
        if here.active and not here.engine and (ids := row_indices(index)) is not None:
            rows = running.offer("getitem", self, ids)
            if rows is not NotImplemented:
                return rows
        return original(self, index)

    return wrapper


def row_indices(index: Any) -> Any:
    """Returns the array of indices if `index` is just one, else None."""
    if isinstance(index, tuple) and len(index) == 1:
        (index,) = index
    is_ids = hasattr(index, "dtype") and jnp.issubdtype(index.dtype, jnp.integer)
    return index if is_ids and index.ndim else None


def _opaque(make: Callable) -> Callable:
    """Makes a maker of kernels whose kernels are never intercepted, now or when they run."""
    untouched = running.disable_interceptions(make)

    @functools.wraps(make)
    def wrapper(*args, **kwargs):
        kernel = untouched(*args, **kwargs)
        return running.disable_interceptions(kernel) if callable(kernel) else kernel

    return wrapper


# --- reading tracers --------------------------------------------------------------------------


def unwrap(x: Any) -> Any:
    """Returns the value that the tracers of grad and vmap wrap."""
    while (wrapped := _wrapped_in(type(x))) is not None:
        x = getattr(x, wrapped)
    return x


def mapped(x: Any) -> Iterator[Any]:
    """Yields the tracers of vmap among what wraps a value, the outermost first."""
    while (wrapped := _wrapped_in(type(x))) is not None:
        if wrapped == "val" and x.batch_dim is not None:
            yield x
        x = getattr(x, wrapped)


@functools.cache
def _wrapped_in(kind: type) -> str | None:
    """Returns the attribute in which tracers of this class (of grad or vmap) keep the value
    that they wrap. A tracer without the attribute would take its time to say so."""
    if not issubclass(kind, jax.core.Tracer):
        return None
    if hasattr(kind, "primal"):
        return "primal"
    return "val" if hasattr(kind, "batch_dim") else None


def trace_of(x: Any) -> Any:
    """Returns the trace of a tracer. It is private, but nothing public tells traces apart."""
    return getattr(unwrap(x), "_trace", None)


class Equation(NamedTuple):
    """The equation that made an array."""

    primitive: str
    params: dict[str, Any]
    operands: list[Any]
    index: int = 0  # which of its results the array is


def made_by(x: Any) -> Equation | None:
    """Returns the equation that made an array, if jit recorded it or `remember` did. How jit
    records its equations is private: a tracer has its equation as `parent`, one of nn.scan's
    first trace as `recipe`."""
    parent = x.parent if _has(type(x), "parent") else None
    if parent is not None:
        index = next((i for i, v in enumerate(parent.outvars) if v is x.val), 0)
        operands = list(parent.in_tracers)
        return Equation(parent.primitive.name, parent.params, operands, index)
    recipe = x.recipe if _has(type(x), "recipe") else None
    if hasattr(recipe, "in_tracers"):
        results = [result() for result in recipe.out_tracer_refs]
        index = next((i for i, result in enumerate(results) if result is x), 0)
        operands = list(recipe.in_tracers)
        return Equation(recipe.primitive.name, recipe.params, operands, index)
    if _has(type(x), "get_const"):
        const = x.get_const()
        return None if const is None or const is x else Equation("copy", {}, [const])
    return here.casts.get(id(x), (None, None))[1]


@functools.cache
def _has(kind: type, name: str) -> bool:
    """Whether a class has an attribute. To ask each of its tracers would take longer."""
    return hasattr(kind, name)


def remember(x: Any, equation: Equation | None = None) -> None:
    """Notes the equation that made an array, until the model has run. A parameter is noted
    with None, so that what is made of it is noted as well (eager.py)."""
    x = unwrap(x)
    if equation is None or equation.operands[0] is not x:
        here.casts[id(x)] = (x, equation)


def noted(out: Any, args: Sequence[Any], axes: tuple[int, ...] | None = None) -> Any:
    """Remembers which array a cast, a reshape or (by `axes`) a transpose was made from, or of
    several results each with its argument, and returns `out`."""
    is_one = not isinstance(out, list | tuple)
    for result, source in [(out, args[0])] if is_one else zip(out, args):
        if result is source or not hasattr(result, "dtype"):
            continue
        if axes is not None:
            primitive, params = "transpose", {"permutation": axes}
        elif getattr(source, "shape", None) == result.shape:
            primitive, params = "convert_element_type", {"new_dtype": result.dtype}
        else:
            primitive, params = "reshape", {}
        remember(result, Equation(primitive, params, [unwrap(source)]))
    return out
