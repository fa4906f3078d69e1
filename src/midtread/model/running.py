"""Running: the quantized model at work on this thread.

    active(call)              inside, a provider's handlers apply: its model was called
    entered(module)           inside, a method of this module runs, which decides on the rule
    offer(name, ...)          returns what a handler makes of an op, or NotImplemented
    disabled()                inside, nothing is intercepted: for handlers and kernels
    call_of(provider)         returns what a provider has noted in this call of its model

All of it is kept in one record, ops/context.py's `here`, whose frozen part is in jit's cache
key: modules that match different rules never share a trace. Nor do providers, but for those
of one class and equal rules whose models were never seen to trace anything inside
themselves: there jit caches JAX's own small functions alone, and the second of two equal
models need not compile them again.
"""

import collections
import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax.extend
from flax import linen as nn

from midtread.model.caught import CONTRACTIONS
from midtread.ops import witness
from midtread.ops.context import Key, here, keyed

_numbers = itertools.count(1)
LOCATED = frozenset(CONTRACTIONS) | {"take", "getitem"}  # ops whose errors say where


@dataclasses.dataclass(eq=False)
class Call:
    """One call of a model that a provider has quantized.

    `model` is None if only functions were wrapped. `entry` is the trace it was called in.
    `counters` maps the id of a module to the module and the ops seen in it: without a
    reference to the module its id might be used again. `notes` are the provider's own.
    """

    provider: Any
    handlers: dict[str, Callable] = dataclasses.field(default_factory=dict)
    model: Any = None  # that was called; None if only functions were wrapped
    entry: Any = None  # the trace it was called in
    state: Any = dataclasses.field(default_factory=lambda: trace_state())
    trace_here: Callable[[], Any] = lambda: None  # the trace that jit would keep
    is_enabled: bool = True
    counters: dict[int, tuple[Any, collections.Counter]] = dataclasses.field(
        default_factory=dict
    )
    notes: dict[str, Any] = dataclasses.field(default_factory=dict)


def cache_number(provider: Any) -> int:
    """Returns a number that is this provider's alone; an id() may be used again."""
    if not hasattr(provider, "_cache_number"):
        provider._cache_number = next(_numbers)
    return provider._cache_number


def keep_no_trace(provider: Any) -> None:
    """Has jit use none of the traces made for a provider so far, that under way included: it
    reads arrays of the model which are not among its arguments and may be others next time."""
    provider._cache_number = next(_numbers)


def trace_state() -> Any:
    """Returns something that is equal in one and the same trace."""
    return jax.extend.core.get_opaque_trace_state(convention="flax")


_kinds: dict[Any, int] = {}  # what equal providers have in common -> a number for it
_shared: dict[int, int] = {}  # that number -> the one in their key


def _key_number(provider: Any) -> int:
    """Returns the provider's number in jit's key."""
    kind = _kind_of(provider)
    if kind is None or not provider._initial_run_complete or provider.traces_inside:
        return cache_number(provider)
    return _shared.setdefault(kind, next(_numbers))


def _kind_of(provider: Any) -> int | None:
    if not hasattr(provider, "_kind"):
        likeness = provider.likeness()
        known = None if likeness is None else _kinds.setdefault(likeness, len(_kinds))
        provider._kind = known
    return provider._kind


def _note_trace(call: Call) -> None:
    """A handler is about to run. In a trace begun inside the model it may read the model's
    own arrays, so that no other model's may be the same; nor this one's, which jit is
    about to keep under the number they share."""
    provider = call.provider
    if provider.traces_inside or trace_state() == call.state:
        return
    if call.trace_here() is not call.entry:  # not so for vmap and grad alone
        provider.traces_inside = True
        forget_shared(_kind_of(provider))


def forget_shared(kind: int | None = None) -> None:
    """Lets providers of a kind, or all, share nothing with those before them."""
    for known in [*_shared] if kind is None else [kind]:
        _shared.pop(known, None)


def call_of(provider: Any) -> Call:
    """Returns the call that a provider is at work in, or else its record on this thread."""
    for call in here.active:
        if call.provider is provider:
            return call
    return here.alone.setdefault(cache_number(provider), Call(provider))


def is_active(provider: Any) -> bool:
    """Whether a model of this provider is running."""
    return any(call.provider is provider for call in here.active)


@contextlib.contextmanager
def active(call: Call) -> Iterator[None]:
    """Makes the handlers of a call apply inside."""
    outer = here.modules, here.closed, here.names, [c.is_enabled for c in here.active]
    if here.closed:  # The calls around this one are closed, this one is not.
        for around in here.active:
            around.is_enabled = False
    here.modules, here.closed = [], 0
    here.active.append(call)
    here.names = here.names | call.handlers.keys()
    try:
        with call.provider.surroundings(), keyed(_key()):
            yield
    finally:
        here.active.pop()
        here.modules, here.closed, here.names, enabled = outer
        for around, was_enabled in zip(here.active, enabled):
            around.is_enabled = was_enabled
        if not here.active:
            here.casts.clear()


class entered:  # It is entered for every module: a generator would be slow.
    """Inside `with entered(module)`, a method of that module is running."""

    def __init__(self, module: Any):
        self._module = module

    def __enter__(self) -> None:
        here.modules.append(self._module)
        self._keyed, self._reported = keyed(_key()), None
        self._keyed.__enter__()
        if here.witness is not None:
            self._reported = here.witness.inside(path_of(self._module))
            self._reported.__enter__()

    def __exit__(self, *error: object) -> None:
        if self._reported is not None:
            self._reported.__exit__(*error)
        self._keyed.__exit__(*error)
        here.modules.pop()


def path_of(module: Any) -> str:
    """Returns a path such as 'encoder/layers/0', which is '' for the root. That of a Linen
    module inside an NNX one (nnx.bridge.ToNNX) begins with the path of that one."""
    if not isinstance(module, nn.Module):
        return getattr(module, "_path_text", "")
    outer = getattr(bridge(), "_path_text", "")
    return "/".join((outer, *module.path) if outer else module.path)


def bridge() -> Any:
    """Returns the NNX module that the Linen modules entered last are inside of, or None."""
    others = (m for m in reversed(here.modules) if not isinstance(m, nn.Module))
    return next(others, None)


def entered_module() -> Any:
    """Returns the innermost module whose method runs in a quantized model, or None."""
    return here.modules[-1] if here.modules else None


def current_path() -> str:
    """Returns the path of the innermost module, '' if there is none."""
    return path_of(here.modules[-1]) if here.modules else ""


def entry_trace() -> Any:
    """Returns the trace in which the innermost model was called."""
    return here.active[-1].entry if here.active else None


@contextlib.contextmanager
def disabled() -> Iterator[None]:
    """Switches interception off inside, on this thread."""
    here.closed += 1
    try:
        with keyed(_key()):
            yield
    finally:
        here.closed -= 1


def disable_interceptions(fn: Callable) -> Callable:
    """Makes a function run as it is written, whatever provider is active around it.

    >>> import jax.numpy as jnp
    >>> router = disable_interceptions(jnp.dot)  # stays in float under every rule
    >>> router(jnp.ones(2), jnp.ones(2)).item()
    2.0

    Args:
        fn: any function; inside it no op reaches a provider.

    Returns:
        `fn` with the same signature.
    """

    @functools.wraps(fn)
    def wrapper(*args, **kwargs):
        if not here.active:
            return fn(*args, **kwargs)
        with disabled():
            return fn(*args, **kwargs)

    return wrapper


def _key() -> Key | None:
    """Returns jit's cache key for the providers enabled now and the rules that apply."""
    if not here.active or here.closed:
        return None
    models = [
        (_key_number(call.provider), call.provider.rules_here())
        for call in here.active
        if call.is_enabled
    ]
    return Key(tuple(models), here.watched) if models else None


@contextlib.contextmanager
def late(is_late: bool = True) -> Iterator[None]:
    """Says that ops inside are spelled in a way that Qwix does not see."""
    before, here.is_late = here.is_late, is_late
    try:
        yield
    finally:
        here.is_late = before


def offer(name: str, /, *args: Any, **kwargs: Any) -> Any:
    """Returns what the first handler of that name makes of the call, or NotImplemented."""
    if here.closed or here.engine:
        return NotImplemented
    for call in here.active:
        if call.is_enabled and name in call.handlers:
            call.is_enabled = False
            _note_trace(call)
            try:
                with keyed(_key()):
                    out = witness.handle(name, call.handlers[name], args, kwargs)
            except (ValueError, TypeError, NotImplementedError) as error:
                _say_where(error, name)
                raise
            finally:
                call.is_enabled = True
            if out is not NotImplemented:
                return out
    return NotImplemented


def _say_where(error: Exception, name: str) -> None:
    """Has the message of an error begin with the module and the op that it is about, unless it
    names the module already."""
    path, arguments = repr(current_path()), error.args
    is_plain = type(error) in (ValueError, TypeError, NotImplementedError)
    if not is_plain or name not in LOCATED or len(arguments) != 1:
        return
    if path not in str(arguments[0]):
        error.args = (f"{path}, {name}: {arguments[0]}",)


def any_enabled() -> bool:
    """Whether an op that is called now may reach a provider."""
    if not here.active or here.closed or here.engine:
        return False
    return any(call.is_enabled for call in here.active)


def ask(name: str, *args: Any) -> Any:
    """Returns the answer of the outermost active provider, None if there is none."""
    for call in here.active:
        if name in call.handlers:
            return call.handlers[name](*args)
    return None
