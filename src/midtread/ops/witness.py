"""Witness: an object that is called whenever a contraction runs, so that it can report on it.

`mt.explain` is one: while it traces a model, these methods of it are called. As a rule there
is no witness, and then each function below costs one look at the thread's context.

    inside(path)                      a method of the module at this path is running
    handle(name, handler, ...)        an op was intercepted
    rule(...)                         the provider chose this rule for it
    contraction(c, recipe, ...)       the engine was asked to compute this
    range(name, x, range)             this static range is used for an activation

`inside`, `handle` and `contraction` surround what they report, so that a witness can mark the
equations that are traced meanwhile.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

from midtread.ops.context import here

PREFIX = "midtread#"  # the names of scopes that a witness opens begin with it

_numbers = itertools.count(1)


@contextlib.contextmanager
def watched(by: Any) -> Iterator[None]:
    """Makes `by` the witness of all that this thread runs inside."""
    before = here.witness, here.watched
    here.witness, here.watched = by, next(_numbers)
    try:
        yield
    finally:
        here.witness, here.watched = before


def key() -> int | None:
    """Returns the number of the witness, None if there is none."""
    return here.watched


def handle(name: str, handler: Callable, args: tuple, kwargs: dict) -> Any:
    """Calls the handler of an intercepted op, and lets the witness surround the call."""
    if here.witness is None:
        return handler(*args, **kwargs)
    return here.witness.handle(name, handler, args, kwargs)


def rule(index: int | None, op_id: str | None) -> None:
    """Reports which rule the provider chose for the op at hand."""
    if here.witness is not None:
        here.witness.rule(index, op_id)


def contraction(c: Any, recipe: Any, lhs: Any, rhs: Any, run: Callable) -> Any:
    """Runs a contraction, and lets the witness surround the run."""
    if here.witness is None:
        return run()
    return here.witness.contraction(c, recipe, lhs, rhs, run)


def range_used(name: str, x: Any, range_: Any) -> Any:
    """Returns `range_`, which is used for the activation `x` of that name in its module."""
    if here.witness is not None:
        here.witness.range(name, x, range_)
    return range_
