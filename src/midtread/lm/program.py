"""Program: a function that is compiled with the options of the device that it runs on.

A table, `OPTIONS`, says what each kind of device is given. An option that this XLA has not is
left out, and one that XLA_FLAGS names keeps the value that it has there.
"""

import functools
import os
from collections.abc import Callable, Mapping
from typing import Any

import jax

from midtread.kernels import environment

# XLA's "dynamic slice fusion" puts the slicing of a layer's weights out of their stack into one
# call with a matmul and runs that matmul twice: without it a step takes 253.1 ms in place of 281.6
# (8 scanned layers of Llama-8B), and 1,007 in place of 1,137 (all 32, fp8; H200, jax 0.11.2).
OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "gpu": {"xla_gpu_enable_dynamic_slice_fusion": False},
}


def options() -> dict[str, Any]:
    """Returns the options that a program for this device is compiled with."""
    wanted = OPTIONS.get(environment.here().platform, {})
    flags = os.environ.get("XLA_FLAGS", "")
    return {k: v for k, v in wanted.items() if k not in flags and _is_known(k, v)}


@functools.cache
def _is_known(name: str, value: Any) -> bool:
    """Returns whether this XLA has such an option: to name another is an error."""
    try:
        jax.jit(lambda: 0, compiler_options={name: value}).lower().compile()
    except jax.errors.JaxRuntimeError:
        return False
    return True


def _is_part(args: tuple) -> bool:
    """Returns whether something is being traced, of which this call is a part."""
    return any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(args))


class Program:
    """A function that is compiled as `jax.jit(run, **arguments)` does it, with `options()`.

    Within another program it is a part of that, whose own options count.

    Attributes:
        plain: the same, compiled as XLA does it when nothing is said.
    """

    def __init__(self, run: Callable, **arguments: Any):
        self.plain = jax.jit(run, **arguments)
        self._with = functools.cache(
            lambda chosen: jax.jit(run, compiler_options=dict(chosen), **arguments)
        )

    def __call__(self, *args):
        run = self._here()
        return (self.plain if run is not self.plain and _is_part(args) else run)(*args)

    def trace(self, *args) -> jax.stages.Traced:
        """Returns the program for arguments like these, not yet lowered."""
        return self._here().trace(*args)

    def lower(self, *args) -> jax.stages.Lowered:
        """Returns the program for arguments like these, not yet compiled."""
        return self._here().lower(*args)

    def _here(self):
        chosen = options()
        return self._with(tuple(chosen.items())) if chosen else self.plain
