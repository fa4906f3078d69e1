"""Witness: who wants to know which contractions run, and how.

Nobody, as a rule, and then each question below costs one look at the thread's context.
`mt.explain` does: while it traces a model, it is told

    place(path)                       which module's method is running
    handle(name, handler, ...)        that an op was intercepted
    rule(...)                         which rule the provider found for it
    contraction(c, recipe, ...)       what the engine was asked to compute

The last three wrap what they are told of, so that a witness can mark its equations.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

from midtread.ops.context import here

PREFIX = "midtread#"  # of the names of scopes that a witness opens

_numbers = itertools.count(1)


@contextlib.contextmanager
def watched(by: Any) -> Iterator[None]:
    """`by` is told of all that runs inside, on this thread."""
    before = here.witness, here.watched
    here.witness, here.watched = by, next(_numbers)
    try:
        yield
    finally:
        here.witness, here.watched = before


def key() -> int | None:
    """The number of the witness, None if nobody watches."""
    return here.watched


def place(path: Callable[[], str]) -> contextlib.AbstractContextManager:
    if here.witness is None:
        return contextlib.nullcontext()
    return here.witness.place(path())


def handle(name: str, handler: Callable, args: tuple, kwargs: dict) -> Any:
    if here.witness is None:
        return handler(*args, **kwargs)
    return here.witness.handle(name, handler, args, kwargs)


def rule(index: int | None, op_id: str | None) -> None:
    if here.witness is not None:
        here.witness.rule(index, op_id)


def contraction(c: Any, recipe: Any, lhs: Any, rhs: Any, run: Callable) -> Any:
    if here.witness is None:
        return run()
    return here.witness.contraction(c, recipe, lhs, rhs, run)
