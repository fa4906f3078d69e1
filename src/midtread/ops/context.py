"""Context: what is under way on this thread, in one record.

    here.active      the quantized models that are running, the outermost first
    here.names       the ops that some of them handle
    here.modules     the modules whose methods are running, in the innermost of them
    here.casts       which array another was cast from, while a model runs
    here.engine      how often the engine has been entered and not left
    here.closed      how often interception was switched off and not on again
    here.witness     the object that reports contractions (ops/witness.py)
    here.watched     its number
    here.is_late     whether the op at hand is spelled in a way that Qwix does not see
    here.scopes      the named scopes that a quantized function has opened
    here.alone       the counts of a provider that is called without a model of its own
    here.key         the frozen part, `Key`

`Key` lies in jit's cache key, so that a trace of the float model never serves the quantized
one, nor the reverse. Nor does a trace for some rules serve others, or one that was made
without a witness serve a witness, who would miss its marks.

A provider's handlers run with interception off. But JAX may trace the engine's forward
later (custom_vjp inside scan), when it is on again; so the engine says when it is at work,
and whoever intercepts leaves at once.
"""

import functools
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import jax


class Key(NamedTuple):
    """What a trace depends on besides its arguments."""

    models: tuple[Any, ...] = ()  # (provider's number, rules that apply) of each model
    watched: int | None = None  # the number of the witness


class Context(threading.local):
    """The record of one thread; its fields are explained above."""

    def __init__(self):
        self.active: list[Any] = []
        self.names: frozenset[str] = frozenset()
        self.modules: list[Any] = []
        self.casts: dict[int, Any] = {}
        self.engine = 0
        self.closed = 0
        self.witness: Any = None
        self.watched: int | None = None
        self.is_late = False
        self.scopes: list[Any] = []
        self.alone: dict[int, Any] = {}
        self.key: Key | None = None


here = Context()
_in_jit_key = jax.make_user_context(default_value=None)


class keyed:  # It is entered for every module and op: a generator would be slow.
    """Inside `with keyed(key)`, traces are made and used for that key alone."""

    def __init__(self, key: Key | None):
        self._key, self._inner = key, None

    def __enter__(self) -> None:
        self._before = here.key
        if self._key != self._before:
            self._inner = _in_jit_key(self._key)
            self._inner.__enter__()
            here.key = self._key

    def __exit__(self, *error: object) -> None:
        if self._inner is not None:
            here.key = self._before
            self._inner.__exit__(*error)


def is_running() -> bool:
    """Whether the engine itself is at work."""
    return here.engine > 0


def untouched(fn: Callable) -> Callable:
    """Makes `fn` a part of the engine: nothing that it calls is intercepted."""

    @functools.wraps(fn)
    def wrapper(*args, **kwargs):
        here.engine += 1
        try:
            return fn(*args, **kwargs)
        finally:
            here.engine -= 1

    return wrapper
