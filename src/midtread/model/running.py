"""Running: the quantized model at work on this thread.

    active_providers()    whose handlers apply, the outermost first
    entered(module)       a module's method is running: which rule applies depends on it
    offer(name, ...)      the handlers' answer, for callers that have a plan B
    disabled()            nothing is touched: inside handlers, kernels and engine

While a model runs, its provider is part of jit's cache key (jax.make_user_context), so
that a trace of the float model never serves the quantized one, nor the reverse. Modules
that match different rules differ in the key too.
"""

import contextlib
import functools
import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
from flax import linen as nn

from midtread.ops import witness

_numbers = itertools.count(1)
_cache_key = jax.make_user_context(default_value=None)


class _Thread(threading.local):
    def __init__(self):
        self.active: list[Active] = []
        self.modules: list[Any] = []
        self.entries: list[Any] = []  # per active model: the trace it was called in
        # id of a cast array -> (it, what it was made from, how it was turned)
        self.casts: dict[int, Any] = {}
        self.is_late = False


here = _Thread()


class Active:
    """A provider at work on this thread."""

    def __init__(self, provider: Any, handlers: dict[str, Callable]):
        self.provider = provider
        self.handlers = handlers
        self.enabled = True


def cache_number(provider: Any) -> int:
    """A number that is this provider's alone; id() may be used again."""
    if not hasattr(provider, "_cache_number"):
        provider._cache_number = next(_numbers)
    return provider._cache_number


def active_providers() -> list[Any]:
    return [a.provider for a in here.active]


def is_active(provider: Any) -> bool:
    return any(a.provider is provider for a in here.active)


@contextlib.contextmanager
def active(provider: Any, handlers: dict[str, Callable], entry: Any) -> Iterator[None]:
    """`handlers` apply, in a model that was called in the trace `entry`."""
    outer_modules, here.modules = here.modules, []
    here.entries.append(entry)
    here.active.append(Active(provider, handlers))
    try:
        with provider.surroundings(), keyed():
            yield
    finally:
        here.active.pop()
        here.entries.pop()
        here.modules = outer_modules
        if not here.active:
            here.casts.clear()


@contextlib.contextmanager
def entered(module: Any) -> Iterator[None]:
    here.modules.append(module)
    try:
        with keyed(), witness.place(lambda: path_of(module)):
            yield
    finally:
        here.modules.pop()


def path_of(module: Any) -> str:
    """'encoder/layers/0'; '' for the root."""
    linen = isinstance(module, nn.Module)
    return "/".join(map(str, module.path if linen else getattr(module, "_path", ())))


def entered_module() -> Any:
    """The innermost module whose method is running in a quantized model, or None."""
    return here.modules[-1] if here.modules else None


def current_path() -> str:
    """The path of the innermost module, '' if there is none."""
    return path_of(here.modules[-1]) if here.modules else ""


def entry_trace() -> Any:
    """The trace in which the model was called."""
    return here.entries[-1] if here.entries else None


@contextlib.contextmanager
def disabled() -> Iterator[None]:
    """Nothing is intercepted inside, on this thread."""
    before = [a.enabled for a in here.active]
    for a in here.active:
        a.enabled = False
    try:
        with keyed():
            yield
    finally:
        for a, enabled in zip(here.active, before):
            a.enabled = enabled


def disable_interceptions(fn: Callable) -> Callable:
    """`fn`, untouched by whatever provider is active when it runs."""

    @functools.wraps(fn)
    def wrapper(*args, **kwargs):
        with disabled():
            return fn(*args, **kwargs)

    return wrapper


def keyed():
    """jit's cache key for the providers enabled now, and the rules that apply here."""
    key = tuple(
        (cache_number(a.provider), a.provider.rules_here(), witness.key())
        for a in here.active
        if a.enabled
    )
    return _cache_key(key or None)


def is_late() -> bool:
    """Whether the op being handled is spelled in a way that Qwix does not see."""
    return here.is_late


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
    for a in here.active:
        if a.enabled and name in a.handlers:
            a.enabled = False
            try:
                with keyed():
                    out = witness.handle(name, a.handlers[name], args, kwargs)
            finally:
                a.enabled = True
            if out is not NotImplemented:
                return out
    return NotImplemented


def any_enabled() -> bool:
    return any(a.enabled for a in here.active)


def ask(name: str, *args: Any) -> Any:
    """Asks the outermost active provider; None if there is none."""
    for a in here.active:
        if name in a.handlers:
            return a.handlers[name](*args)
    return None
