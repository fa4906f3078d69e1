"""Witness: who wants to know which contractions run, and how.

Nobody, as a rule, and then each question below costs one look at a thread's variable.
`mt.explain` does: while it traces a model, it is told

    place(path)                       which module's method is running
    handle(name, handler, ...)        that an op was intercepted
    rule(...)                         which rule the provider found for it
    contraction(c, recipe, ...)       what the engine was asked to compute

The last three wrap what they are told of, so that a witness can mark its equations.
"""

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any

PREFIX = "midtread#"  # of the names of scopes that a witness opens


class _Watched(threading.local):
    by: Any = None
    number: int | None = None


_watched = _Watched()
_numbers = itertools.count(1)


@contextlib.contextmanager
def watched(by: Any) -> Iterator[None]:
    """`by` is told of all that runs inside, on this thread."""
    before = _watched.by, _watched.number
    _watched.by, _watched.number = by, next(_numbers)
    try:
        yield
    finally:
        _watched.by, _watched.number = before


def key() -> int | None:
    """Part of jit's cache key: a trace made unwatched has no marks."""
    return _watched.number


def place(path: Callable[[], str]) -> contextlib.AbstractContextManager:
    if _watched.by is None:
        return contextlib.nullcontext()
    return _watched.by.place(path())


def handle(name: str, handler: Callable, args: tuple, kwargs: dict) -> Any:
    if _watched.by is None:
        return handler(*args, **kwargs)
    return _watched.by.handle(name, handler, args, kwargs)


def rule(index: int | None, op_id: str | None) -> None:
    if _watched.by is not None:
        _watched.by.rule(index, op_id)


def contraction(c: Any, recipe: Any, lhs: Any, rhs: Any, run: Callable) -> Any:
    if _watched.by is None:
        return run()
    return _watched.by.contraction(c, recipe, lhs, rhs, run)
