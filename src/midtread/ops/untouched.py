"""Untouched: what the engine itself calls is nobody's to intercept.

A provider's handlers run with interception off. But JAX may trace the engine's forward
later (custom_vjp inside scan), when it is on again; so the engine says when it is at work.
"""

import functools
import threading
from collections.abc import Callable


class _Depth(threading.local):
    value = 0


_depth = _Depth()


def is_running() -> bool:
    return _depth.value > 0


def untouched(fn: Callable) -> Callable:
    @functools.wraps(fn)
    def wrapper(*args, **kwargs):
        _depth.value += 1
        try:
            return fn(*args, **kwargs)
        finally:
            _depth.value -= 1

    return wrapper
