"""Clipping: how much of some data static ranges cut off.

A static range was found on data, by a mean or a percentile as the rule asks, and what lies
beyond it saturates. How much that is can be seen only by running the model: every static
range that is used tells the witness of it, and the witness counts on the host, so that it
does not matter in which trace, scan or branch of the model that happens.
"""

import contextlib
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx

from midtread.model import donation, running
from midtread.model.quantize import quantize_model, split_arrays
from midtread.numerics.calibration import Range
from midtread.ops import witness
from midtread.ops.training import is_inside


class Counter:
    """A witness of ranges alone."""

    def __init__(self):
        self.seen: dict[str, list[int]] = {}  # op and side -> [clipped, all]

    def inside(self, path: str) -> contextlib.AbstractContextManager:
        return contextlib.nullcontext()

    def handle(self, name: str, handler: Callable, args: tuple, kwargs: dict) -> Any:
        return handler(*args, **kwargs)

    def rule(self, index: int | None, op_id: str | None) -> None:
        pass

    def contraction(self, c, recipe, lhs, rhs, run: Callable) -> Any:
        return run()

    def range(self, name: str, x: jax.Array, range_: Range) -> None:
        name = "/".join(filter(None, (running.current_path(), name)))
        outside = jnp.sum(~is_inside(x, range_), dtype=jnp.float32)
        jax.debug.callback(functools.partial(self._add, name, x.size), outside)

    def _add(self, name: str, size: int, outside: Any) -> None:
        counts = self.seen.setdefault(name, [0, 0])
        counts[0] += int(outside)
        counts[1] += size


def clipped(
    model: Any,
    provider: Any,
    method: str,
    data: Iterable[Any],
    variables: Mapping[str, Any] | None,
) -> dict[str, float]:
    """Returns {"encoder/dot_general0_lhs": share of its values beyond the range}, over
    batches of data, each the input of the method or a tuple of its inputs."""
    batches = [b if isinstance(b, tuple) else (b,) for b in data]
    if not batches:
        raise ValueError("data has no batches: pass some of what the ranges come from.")
    call = _linen if isinstance(model, nn.Module) else _nnx
    run, counter = call(model, provider, method, batches[0], variables), Counter()
    with witness.watched(counter):
        for batch in batches:
            jax.block_until_ready(run(*split_arrays(batch, {})))
        jax.effects_barrier()
    if not counter.seen:
        raise ValueError(
            "data is for static ranges, and no rule that matches asks for one: set "
            "act_static_scale, or leave data out."
        )
    return {name: out / total for name, (out, total) in sorted(counter.seen.items())}


def _linen(model, provider, method, batch, variables) -> Callable:
    del batch  # the variables are there
    if variables is None:
        raise ValueError(
            "to run a Linen model on data give explain what `apply` of the quantized model "
            "takes: explain(..., data=batches, variables=variables)."
        )
    served = quantize_model(model, provider, methods=(method,))

    def run(arrays, rebuild):
        apply = lambda variables, arrays: served.apply(
            variables, *rebuild(arrays)[0], method=method
        )
        return jax.jit(apply)(variables, arrays)

    return run


def _nnx(model, provider, method, batch, variables) -> Callable:
    if variables is not None:
        raise ValueError("an NNX model holds its variables: leave `variables` out.")
    served = quantize_model(model, provider, *batch, methods=(method,))
    served.set_attributes(disable_quant_stats_update=True)
    graph, state = nnx.split(served)

    def run(arrays, rebuild):
        def call(state, arrays):
            again = donation.rebind(served, nnx.merge(graph, state))
            return getattr(again, method)(*rebuild(arrays)[0])

        return jax.jit(call)(state, arrays)

    return run
