"""Running: the quantized model at work on this thread.

    active(provider, ...)     its handlers apply: a model was called
    entered(module)           a module's method is running, which decides on the rule
    offer(name, ...)          the handlers' answer, for callers that have a plan B
    disabled()                nothing is touched: inside handlers, kernels and engine
    call_of(provider)         what it has noted in this call of its model

All of it is kept in one record, ops/context.py's `here`, whose frozen part is in jit's cache
key: modules that match different rules never share a trace.
"""

import collections
import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

from flax import linen as nn

from midtread.ops import witness
from midtread.ops.context import Key, here, keyed

_numbers = itertools.count(1)


@dataclasses.dataclass(eq=False)
class Call:
    """A provider at work: one call of a model of its own."""

    provider: Any
    handlers: dict[str, Callable] = dataclasses.field(default_factory=dict)
    model: Any = None  # that was called; None if only functions were wrapped
    entry: Any = None  # the trace it was called in
    is_enabled: bool = True
    # id of a module -> (it, ops seen in it); id() of one that is gone may be used again
    counters: dict[int, tuple[Any, collections.Counter]] = dataclasses.field(
        default_factory=dict
    )
    notes: dict[str, Any] = dataclasses.field(
        default_factory=dict
    )  # the provider's own


def cache_number(provider: Any) -> int:
    """A number that is this provider's alone; id() may be used again."""
    if not hasattr(provider, "_cache_number"):
        provider._cache_number = next(_numbers)
    return provider._cache_number


def call_of(provider: Any) -> Call:
    """The call that a provider is at work in; without one, what it notes on this thread."""
    for call in here.active:
        if call.provider is provider:
            return call
    return here.alone.setdefault(cache_number(provider), Call(provider))


def is_active(provider: Any) -> bool:
    return any(call.provider is provider for call in here.active)


@contextlib.contextmanager
def active(call: Call) -> Iterator[None]:
    """Its handlers apply inside."""
    outer = here.modules, here.closed, here.names, [c.is_enabled for c in here.active]
    if here.closed:  # for those outside; this one was called inside
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


class entered:  # entered for every module, so not a generator
    """`with entered(module)`: a method of it is running."""

    def __init__(self, module: Any):
        self._module = module

    def __enter__(self) -> None:
        here.modules.append(self._module)
        self._inner = [keyed(_key())]
        if here.witness is not None:
            self._inner.append(here.witness.inside(path_of(self._module)))
        for inner in self._inner:
            inner.__enter__()

    def __exit__(self, *error: object) -> None:
        for inner in reversed(self._inner):
            inner.__exit__(*error)
        here.modules.pop()


def path_of(module: Any) -> str:
    """'encoder/layers/0'; '' for the root."""
    if isinstance(module, nn.Module):
        return "/".join(module.path)
    return getattr(module, "_path_text", "")


def entered_module() -> Any:
    """The innermost module whose method is running in a quantized model, or None."""
    return here.modules[-1] if here.modules else None


def current_path() -> str:
    """The path of the innermost module, '' if there is none."""
    return path_of(here.modules[-1]) if here.modules else ""


def entry_trace() -> Any:
    """The trace in which the innermost model was called."""
    return here.active[-1].entry if here.active else None


@contextlib.contextmanager
def disabled() -> Iterator[None]:
    """Nothing is intercepted inside, on this thread."""
    here.closed += 1
    try:
        with keyed(_key()):
            yield
    finally:
        here.closed -= 1


def disable_interceptions(fn: Callable) -> Callable:
    """A function that runs as it is written, whatever provider is active around it.

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
    """jit's cache key for the providers enabled now, and the rules that apply here."""
    if not here.active or here.closed:
        return None
    models = tuple(
        (cache_number(call.provider), call.provider.rules_here())
        for call in here.active
        if call.is_enabled
    )
    return Key(models, here.watched) if models else None


@contextlib.contextmanager
def late(is_so: bool = True) -> Iterator[None]:
    """Within it, ops are counted as spelled in a way that Qwix does not see."""
    before, here.is_late = here.is_late, is_so
    try:
        yield
    finally:
        here.is_late = before


def offer(name: str, /, *args: Any, **kwargs: Any) -> Any:
    """What the first handler of that name returns; NotImplemented if there is none."""
    if here.closed or here.engine:
        return NotImplemented
    for call in here.active:
        if call.is_enabled and name in call.handlers:
            call.is_enabled = False
            try:
                with keyed(_key()):
                    out = witness.handle(name, call.handlers[name], args, kwargs)
            finally:
                call.is_enabled = True
            if out is not NotImplemented:
                return out
    return NotImplemented


def any_enabled() -> bool:
    """Whether an op that is called now may reach a provider."""
    if not here.active or here.closed or here.engine:
        return False
    return any(call.is_enabled for call in here.active)


def ask(name: str, *args: Any) -> Any:
    """Asks the outermost active provider; None if there is none."""
    for call in here.active:
        if name in call.handlers:
            return call.handlers[name](*args)
    return None
