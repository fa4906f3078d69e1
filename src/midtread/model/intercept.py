"""Interception: calls to JAX's contractions reach the active provider.

JAX's functions are changed once, on first use, and for good: each asks whether this
thread is running a quantized model, and if not does what it always did. A plain function
gets new code, so that every alias of it is caught (nnx.Linear keeps one). Functions that
JAX wraps in jit (jnp.dot, jnp.matmul, ...) are replaced in their module by one that, while
a model runs, calls what they wrap: then lax.dot_general sees the caller's own arrays.
Which functions these are is the table in caught.py.

    active(provider, ...)    inside, a provider's handlers apply on this thread (running.py)
    dispatch(name, ...)      what each of JAX's functions now calls
    watch(path)              catches the function at a dotted path as well
    ancestors(x)             the arrays that an array was cast or reshaped from
"""

import contextlib
import functools
import inspect
import operator
import sys
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax import lax
from jax.experimental import pallas as pl

from midtread.model import running
from midtread.model.caught import (
    BEHIND_JIT,
    CAST,
    COPIES,
    JITTED,
    OPS,
    RULE,
    VIEWS,
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
_RESHAPES = ("reshape", "ravel")  # a box goes through these, as through COPIES

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
        spelled = _as_dot_general(name, *args, **kwargs)
        if spelled is not None:
            with running.late(name == "lax_dot"):
                return dispatch("dot_general", *spelled)
    if name in _INSIDE_JIT and any(map(_is_boxed, args)) and running.any_enabled():
        return _product_of_boxes(_INSIDE_JIT[name], args, kwargs)
    if name in here.names:
        out = running.offer(name, *args, **kwargs)
        if out is not NotImplemented:
            return out
    if name not in _CASTS:
        return _originals[name](*args, **kwargs)
    # jnp.asarray may be given its array by name.
    sources = args[0] if name == "promote_dtype_nnx" else args or (kwargs.get("a"),)
    if any(map(_is_boxed, sources)):
        return _noted(_originals[name](*args, **kwargs), sources)
    if name in _PROMOTIONS and share_a_dtype(sources, **kwargs):
        return _PROMOTIONS[name](sources)
    here.closed += 1  # a cast of arrays makes other casts, which need not be noted too
    try:
        out = _originals[name](*args, **kwargs)
    finally:
        here.closed -= 1
    return _noted(out, sources)


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


def _product_of_boxes(name: str, args: tuple, kwargs: dict) -> Any:
    """Multiplies boxes, which the function of JAX's called `name` would refuse."""
    spelled = _as_dot_general(name, *args, **kwargs)
    if spelled is None:
        return jnp.einsum("...ij,...jk->...ik", *args, **kwargs)
    return dispatch("dot_general", *spelled)


def _is_boxed(x: Any) -> bool:
    return isinstance(x, QArray) or getattr(type(x), "is_boxed", False)


def _as_dot_general(name: str, a: Any, b: Any, *rest, **options):
    """Translates a call to lax.dot_general's arguments, or returns None to leave it to JAX."""
    if name == "tensordot":
        numbers = _tensordot_numbers(a, b, *rest, axes=options.pop("axes", None))
        return None if numbers is None else ((a, b, numbers), options)
    if name == "matmul" and b.ndim > 2:
        return None
    if name == "lax_dot" and options.pop("dimension_numbers", None) is not None:
        return None
    if a.ndim == 0 or b.ndim == 0 or rest:
        return None
    numbers = OPS[name].numbers
    assert numbers is not None  # only tensordot has none, and it returned above
    return (a, b, numbers(a.ndim, b.ndim)), options


def _tensordot_numbers(a, b, *rest, axes):
    axes = rest[0] if rest else 2 if axes is None else axes
    if isinstance(axes, int):
        lhs, rhs = tuple(range(a.ndim - axes, a.ndim)), tuple(range(axes))
    else:
        lhs, rhs = ((x,) if isinstance(x, int) else tuple(x) for x in axes)
    return (tuple(i % a.ndim for i in lhs), tuple(i % b.ndim for i in rhs)), ((), ())


# --- installing -------------------------------------------------------------------------------


def install() -> None:
    """Changes JAX's functions, once."""
    if _originals:
        return
    with _install_lock:
        if _originals:
            return
        plain = [n for n, op in OPS.items() if op.kind not in (BEHIND_JIT, RULE)]
        originals = {name: _catch(name, OPS[name].path) for name in plain}
        for name, spelling in _INSIDE_JIT.items():
            originals[name] = _swap_code(name, inspect.unwrap(_function(spelling)))
        for name in JITTED:
            setattr(jnp, name, _without_jit(getattr(jnp, name)))
        _catch_operators()
        pl.pallas_call = _opaque(pl.pallas_call)
        if hasattr(pl, "kernel"):
            pl.kernel = _opaque(pl.kernel)
        _originals.update(originals)
        _catch_refusals()


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

    return _with_methods_of(fn, wrapper)


def _copied(fn: types.FunctionType) -> types.FunctionType:
    """Returns a function that does what `fn` does, whatever becomes of that one's code."""
    copy = types.FunctionType(
        fn.__code__, fn.__globals__, fn.__name__, fn.__defaults__, fn.__closure__
    )
    copy.__kwdefaults__ = fn.__kwdefaults__
    return copy


def _swap_code(name: str, fn: Any) -> Callable:
    """Gives a plain function code that dispatches, and returns a function with the old code.
    The new code leaves at once where there is nothing to dispatch: it runs for every call."""
    original = _copied(fn)
    source = (
        f"def {fn.__name__}(*args, _midtread, **kwargs):\n"
        f"    here, dispatch, original = _midtread\n"
        f"    if here.active and not here.engine and not here.closed:\n"
        f"        return dispatch({name!r}, args, kwargs)\n"
        f"    return original(*args, **kwargs)\n"
    )
    scope: dict[str, Any] = {}
    exec(compile(source, f"<midtread: jax {name}>", "exec"), scope)  # noqa: S102
    fn.__signature__ = inspect.signature(fn)
    fn.__code__ = scope[fn.__name__].__code__
    fn.__defaults__, fn.__kwdefaults__ = None, {"_midtread": (here, dispatch, original)}
    return original


def _without_jit(jitted: Any) -> Callable:
    name = jitted.__name__

    @functools.wraps(jitted)
    def wrapper(*args, **kwargs):
        if not running.any_enabled():
            return jitted(*args, **kwargs)
        if OPS[name].numbers and any(map(_is_boxed, args)):
            return _product_of_boxes(name, args, kwargs)
        return jitted.__wrapped__(*args, **kwargs)

    return _with_methods_of(jitted, wrapper)


def _with_methods_of(fn: Any, wrapper: Callable) -> Callable:
    """Gives `wrapper` what `fn` has beyond a plain function: lower, trace, eval_shape ..."""
    for name in set(dir(fn)) - set(dir(wrapper)):
        if not name.startswith("__"):
            setattr(wrapper, name, getattr(fn, name))
    return wrapper


def array_classes() -> tuple[type, type]:
    """Returns the classes of concrete arrays and of tracers. The former is private in JAX."""
    from jax._src.array import ArrayImpl

    return ArrayImpl, jax.core.Tracer


def _catch_operators() -> None:
    """Replaces the operators and methods of arrays and tracers, because `x @ w` does not look
    up jnp.matmul."""
    for cls in array_classes():
        for name in ("__matmul__", "__rmatmul__"):
            setattr(cls, name, _operator(name, getattr(cls, name)))
        cls.dot = _dot_method
        cls.__getitem__ = _indexing(cls.__getitem__)

    concrete, _ = array_classes()
    # A trace records these calls. For concrete arrays only we do.
    for name in ("astype", "reshape"):
        setattr(concrete, name, _noting(getattr(concrete, name)))
    for name in ("transpose", "swapaxes"):
        setattr(
            concrete, name, _noting(getattr(concrete, name), getattr(np.ndarray, name))
        )
    for name in ("transpose", "swapaxes", "moveaxis"):
        setattr(jnp, name, _noting(getattr(jnp, name), getattr(np, name)))
    for library, name, turn in (
        (jnp, "permute_dims", np.transpose),
        (jnp, "matrix_transpose", lambda a: np.swapaxes(a, -1, -2)),
        (lax, "transpose", np.transpose),
        (jnp, "reshape", None),
        (jnp, "ravel", None),
        (lax, "reshape", None),
        *((library, name, None) for library, name in COPIES),
    ):
        setattr(library, name, _noting(getattr(library, name), turn))
    concrete.__neg__ = _viewing(concrete.__neg__, operator.neg)
    concrete.squeeze = _viewing(concrete.squeeze, jnp.squeeze)
    concrete.__iter__ = _iterating(concrete.__iter__)
    for library, names in VIEWS.items():
        for name in names.split():
            if hasattr(library, name):
                setattr(library, name, _viewing(getattr(library, name)))
    for name in ("T", "mT"):
        turn = operator.attrgetter(name)
        setattr(concrete, name, property(_noting(getattr(concrete, name).fget, turn)))


def _catch_refusals() -> None:
    """Gives JAX's words about derivatives that do not exist ours where they are about
    quantized matmuls or codes. No function of ours runs by then: forward mode behind a jit
    is refused when the traced program is lowered, and jax.grad looks at its arguments
    first. Both functions are private; others hold them, so their code is changed. A JAX
    that has none of the name keeps its own words: tests/model/test_guards.py says so."""
    from jax._src import api
    from jax._src.interpreters import ad

    for module, name, ours in (
        (ad, "raise_custom_vjp_error_on_jvp", _refuse_forward_mode),
        (api, "_check_input_dtype_revderiv", _refuse_codes),
    ):
        fn = getattr(module, name, None)
        if not isinstance(fn, types.FunctionType) or fn.__closure__:
            continue
        _originals[ours.__name__] = _copied(fn)
        fn.__code__, fn.__defaults__, fn.__kwdefaults__ = ours.__code__, None, None


# The code of these two runs with the globals of JAX's modules.


def _refuse_forward_mode(*args, **kwargs):
    from midtread.model.intercept import _originals
    from midtread.ops import training

    source = getattr(kwargs.get("bwd"), "debug_info", None)
    if source is not None and training.__file__ in source.func_src_info:
        raise TypeError(training.NO_FORWARD_MODE)
    return _originals["_refuse_forward_mode"](*args, **kwargs)


def _refuse_codes(*args, **kwargs):
    from midtread.model.intercept import _originals

    try:
        return _originals["_refuse_codes"](*args, **kwargs)
    except TypeError as error:
        if getattr(args[-1], "itemsize", 2) > 1:
            raise
        raise TypeError(
            f"{error} If these are the codes of a quantized model, they have no gradient: "
            "take that of its adapters alone (nnx.DiffState(0, nnx.LoRAParam)), or train "
            "the float model under a QtProvider."
        ) from None


def _noting(original: Callable, turn: Callable | None = None) -> Callable:
    """Makes `original` note what its result was made from; `turn` is NumPy's version of it."""

    @functools.wraps(original)
    def wrapper(a, *args, **kwargs):
        if _is_boxed(a):
            return _box_moved(original.__name__, turn, a, *args, **kwargs)
        out = original(a, *args, **kwargs)
        if not here.active or here.engine or isinstance(out, jax.core.Tracer):
            return out
        axes = None if turn is None else _axes_of(turn, a.ndim, args, kwargs)
        return _noted(out, (a,), axes)

    return wrapper


def _viewing(original: Callable, view: Callable | None = None) -> Callable:
    """`original`, one of VIEWS; what it makes of a parameter outside of a trace is noted.
    `view` does the same to a tracer, where `original` is a method of concrete arrays."""

    @functools.wraps(original)
    def wrapper(a, *args, **kwargs):
        if not here.active or here.engine:
            return original(a, *args, **kwargs)
        a = a.__jax_array__() if getattr(type(a), "is_boxed", False) else a
        out = original(a, *args, **kwargs)
        return _noted_view(view or original, out, a, args, kwargs)

    return _with_methods_of(original, wrapper)


def _noted_view(view: Callable, out: Any, a: Any, args: tuple, kwargs: dict) -> Any:
    """Remembers of parts of a parameter how they were taken, as jit would."""
    if id(a) in here.casts and not isinstance(a, jax.core.Tracer):
        with running.disabled():
            made = {"jaxpr": jax.make_jaxpr(lambda a: view(a, *args, **kwargs))(a)}
        for index, part in enumerate(jax.tree.leaves(out)):
            remember(part, Made("jit", made, [a], index))
    return out


def _box_moved(name: str, turn: Callable | None, box: Any, *args, **kwargs) -> Any:
    """Does to a box what jnp.transpose and the like do: it rearranges the same codes."""
    if turn is not None:
        return box.transpose(_axes_of(turn, box.ndim, args, kwargs))
    if name in ("astype", "convert_element_type"):
        dtype = args[0] if args else kwargs.get("dtype", kwargs.get("new_dtype"))
        return box.astype(dtype)
    if name == "array":
        dtype = args[0] if args else kwargs.get("dtype")
        return box if dtype is None else box.astype(dtype)
    if name in _RESHAPES:
        like_it = np.broadcast_to(0, box.shape)
        return box.reshape(getattr(np, name)(like_it, *args, *kwargs.values()).shape)
    return box


def _axes_of(turn: Callable, ndim: int, args: tuple, kwargs: dict) -> tuple[int, ...]:
    """Returns the order in which `turn` puts the axes of a NumPy array."""
    marked = np.broadcast_to(0, range(2, 2 + ndim))  # axis i has extent i + 2
    return tuple(n - 2 for n in turn(marked, *args, **kwargs).shape)


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
        if not here.active or here.engine:
            return original(self, index)
        if running.any_enabled():
            ids = row_indices(index)
            rows = (
                NotImplemented if ids is None else running.offer("getitem", self, ids)
            )
            if rows is not NotImplemented:
                return rows
        return _noted_view(operator.getitem, original(self, index), self, (index,), {})

    return wrapper


def row_indices(index: Any) -> Any:
    """Returns the array of indices if `index` is just one, else None."""
    if isinstance(index, tuple) and len(index) == 1:
        (index,) = index
    is_ids = hasattr(index, "dtype") and jnp.issubdtype(index.dtype, jnp.integer)
    return index if is_ids and index.ndim else None


def _iterating(original: Callable) -> Callable:
    """`a, b = stack`: each of them an index, while a model runs."""

    @functools.wraps(original)
    def wrapper(self):
        if id(self) in here.casts and self.ndim:
            return (self[i] for i in range(len(self)))
        return original(self)

    return wrapper


def _opaque(make: Callable) -> Callable:
    """Makes a maker of kernels whose kernels are never intercepted, now or when they run."""
    untouched = running.disable_interceptions(make)

    @functools.wraps(make)
    def wrapper(*args, **kwargs):
        kernel = untouched(*args, **kwargs)
        return running.disable_interceptions(kernel) if callable(kernel) else kernel

    return wrapper


# --- where an array comes from ----------------------------------------------------------------


def ancestors(x: Any) -> Iterator[Any]:
    """Yields `x`, and what it was made from by functions of one argument (casts, reshapes,
    transposes, sharding constraints)."""
    return (array for array, _ in turned_ancestors(x))


def turned_ancestors(x: Any) -> Iterator[tuple[Any, tuple[int, ...] | None]]:
    """(ancestor, axes): axis i of `x` is axis axes[i] of what the layer reshaped the
    ancestor to, if it did; None where transposes and reshapes mix."""
    axes, is_reshaped = tuple(range(getattr(x, "ndim", 0))), False
    while x is not None:
        x = unwrap(x)
        yield x, axes
        made = made_by(x)
        turns = None if made is None else _turns(made.primitive, made.params)
        if made is None or turns is None or len(made.operands) != 1:
            return
        child, (x,) = x, made.operands
        if np.size(x) != child.size:
            return
        permutation = functools.reduce(lambda p, q: [p[a] for a in q], turns or [None])
        if permutation is not None:
            if axes is not None:
                axes = None if is_reshaped else tuple(permutation[a] for a in axes)
        elif getattr(x, "shape", None) != child.shape:
            is_reshaped = True


class Made(NamedTuple):
    """The equation that made an array."""

    primitive: str
    params: dict[str, Any]
    operands: list[Any]
    index: int = 0  # which of its results the array is


def made_by(x: Any) -> Made | None:
    """The equation that made an array, where somebody recorded it: jit, or we. Private: a
    tracer's `parent` is how jit records its equations, `primal` and `val` are what grad and
    vmap wrap."""
    parent = x.parent if _has(type(x), "parent") else None
    if parent is not None:
        index = next((i for i, v in enumerate(parent.outvars) if v is x.val), 0)
        operands = list(parent.in_tracers)
        return Made(parent.primitive.name, parent.params, operands, index)
    recipe = x.recipe if _has(type(x), "recipe") else None  # of nn.scan's first trace
    if hasattr(recipe, "in_tracers"):
        results = [result() for result in recipe.out_tracer_refs]
        index = next((i for i, result in enumerate(results) if result is x), 0)
        return Made(
            recipe.primitive.name, recipe.params, list(recipe.in_tracers), index
        )
    if _has(type(x), "get_const"):
        const = x.get_const()
        return None if const is None or const is x else Made("copy", {}, [const])
    return here.casts.get(id(x), (None, None))[1]


# Primitives whose result is their operand: cast, reshaped, or laid out otherwise.
MOVES = (
    "convert_element_type", "reshape", "copy", "name", "stop_gradient",
    "optimization_barrier", "sharding_constraint", "device_put",
    "reshard", "mesh_cast", "pvary", "pcast",
)  # fmt: skip


def _turns(primitive: str, params: dict[str, Any]) -> list | None:
    """Returns the permutations that an equation applies to its one operand, or None if it
    computes something instead of moving it."""
    if primitive == "transpose":
        return [params["permutation"]]
    if primitive == "convert_element_type" and not is_wide(params["new_dtype"]):
        return None  # it rounds: what comes of it is a function of the operand
    if primitive in ("jit", "pjit"):
        jaxpr = params["jaxpr"].jaxpr
        if len(jaxpr.outvars) != 1:
            return None
        inner = [
            _turns(e.primitive.name, e.params) if len(e.invars) == 1 else None
            for e in jaxpr.eqns
        ]
        known = [turns for turns in inner if turns is not None]
        return (
            [t for turns in known for t in turns] if len(known) == len(inner) else None
        )
    return [] if primitive in MOVES else None


@functools.cache
def _has(kind: type, name: str) -> bool:
    """Whether a class has an attribute. To ask each of its tracers would take longer."""
    return hasattr(kind, name)


def unwrap(x: Any) -> Any:
    """Returns the value that the tracers of grad and vmap wrap."""
    while (wrapped := _wrapped_in(type(x))) is not None:
        x = getattr(x, wrapped)
    return x


def mapped(x: Any) -> Iterator[Any]:
    """The tracers of vmap among what wraps a value, the outermost first."""
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


def _noted(out: Any, args: tuple, axes: tuple[int, ...] | None = None) -> Any:
    """Remembers which array a cast or transpose was made from, for this call of the model."""
    is_one = not isinstance(out, list | tuple)
    for cast, source in [(out, args[0])] if is_one else zip(out, args):
        if cast is source or not hasattr(cast, "dtype"):
            continue
        if axes is not None:
            made = "transpose", {"permutation": axes}
        elif getattr(source, "shape", None) == cast.shape:
            made = "convert_element_type", {"new_dtype": cast.dtype}
        else:
            made = "reshape", {}
        remember(cast, Made(*made, [unwrap(source)]))
    return out


def remember(x: Any, made: Made | None = None) -> None:
    """Notes what made an array, while a model runs; None of a parameter: what is made of
    one is noted as well."""
    x = unwrap(x)
    if made is None or made.operands[0] is not x:
        here.casts[id(x)] = (x, made)
