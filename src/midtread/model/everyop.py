"""Every op: interception for providers that handle more than contractions.

A fixed-point file needs a range on every edge of the model, so its provider (whose
`surroundings` are `installed()`) must see additions, softmaxes and reshapes as well. It sees
them at three levels, from the outside in, and the first level that handles a call ends it:

    modules      LayerNorm, BatchNorm, Dropout: whole Flax modules   handlers["module"]
    functions    softmax, gelu, avg_pool, x[...], x + y, ...         handlers[name]
    primitives   all that is left: lax.reshape, lax.exp, ...         handlers["bind"]

A handler that returns NotImplemented leaves the call as it was, and what happens inside
it is looked at in turn. JAX's functions are changed while such a provider runs and put
back when the last one has ended: others pay nothing. Meanwhile jit is off inside the
model (not around it), for inside a jit an array is not the array it was outside.
"""

import contextlib
import inspect
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.extend.core import Primitive

from midtread.model import intercept, running

FUNCTIONS: dict[str, Callable] = {
    "avg_pool": nn.avg_pool,
    "max_pool": nn.max_pool,
    "clip": jnp.clip,
    "concatenate": jnp.concatenate,
    "dot": jnp.dot,
    "elu": jax.nn.elu,
    "gelu": jax.nn.gelu,
    "hard_swish": jax.nn.hard_swish,
    "leaky_relu": jax.nn.leaky_relu,
    "log_softmax": jax.nn.log_softmax,
    "mean": jnp.mean,
    "pad": jnp.pad,
    "repeat": jnp.repeat,
    "resize": jax.image.resize,
    "silu": jax.nn.silu,
    "softmax": jax.nn.softmax,
    "sum": jnp.sum,
    "true_divide": jnp.true_divide,
}
# Ufuncs are add, subtract, multiply, ...; relu and others are a custom_jvp.
METHODS = {
    "ufunc": (jnp.ufunc, "__call__"),
    "custom_jvp": (jax.custom_jvp, "__call__"),
    "bind": (Primitive, "bind"),
}

_lock = threading.Lock()
_running = 0
_undo: list[Callable[[], None]] = []


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """Makes every op reach providers inside, where no jit hides one."""
    global _running
    with _lock:
        _running += 1
        if _running == 1:
            _install()
    try:
        with jax.disable_jit():
            yield
    finally:
        with _lock:
            _running -= 1
            while not _running and _undo:
                _undo.pop()()


def _install() -> None:
    for name, fn in FUNCTIONS.items():
        _undo.append(intercept.swapped(name, inspect.unwrap(fn)))
    for name, (owner, method) in METHODS.items():
        _replace(name, owner, method)
    for cls in intercept.array_classes():
        _replace("getitem", cls, "__getitem__")


def _replace(name: str, owner: type, method: str) -> None:
    original = getattr(owner, method)

    def replacement(self: Any, *args: Any, **kwargs: Any) -> Any:
        out = running.offer(name, self, *args, **kwargs)
        return original(self, *args, **kwargs) if out is NotImplemented else out

    setattr(owner, method, replacement)
    _undo.append(lambda: setattr(owner, method, original))
