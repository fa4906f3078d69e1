"""Chosen: which kernels a contraction takes, and why those before them refused.

What the engine was asked to compute is traced once more on shapes, forward and backward, while
a function of ours notes every choice (`environment.watched`), for this device or for one that
is pretended. Nothing is compiled or run.
"""

import contextlib
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from midtread.kernels import environment
from midtread.kernels.layout import codes_of
from midtread.numerics.qarray import QArray
from midtread.numerics.spec import Spec
from midtread.ops.engine import contract
from midtread.ops.training import Ranges, train


@dataclasses.dataclass(frozen=True)
class Kernel:
    """The kernel that was chosen for one operation.

    Attributes:
        phase: "forward" or "backward".
        operation: such as "scaled matmul" or "quantize", and the shapes of its operands.
        name: the name of the candidate that was chosen; "XLA" where every one refused.
        refused: the names of those before it, with their reasons.
    """

    phase: str
    operation: str
    name: str
    refused: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        reasons = "".join(f"\n      not {name}: {why}" for name, why in self.refused)
        return f"  {self.phase:<8}  {self.operation}: {self.name}{reasons}"


def kernels_of(
    c: Any, recipe: Any, operands: tuple, trains: bool, device: str | None
) -> tuple[Kernel, ...]:
    """Returns the kernels that one contraction takes.

    Args:
        recipe: None if it serves.
        operands: arrays or QArrays; their shapes are all that counts.
        trains: whether its backward runs too.
        device: a key of `environment.DEVICES`; None for this device.
    """
    choices, phase = [], ["forward"]

    def note(operation, operands, choice):
        what = f"{operation} {_shapes(operands)}"
        choices.append(Kernel(phase[0], what, str(choice), choice.refused))

    def run(c, lhs, rhs, key):
        if recipe is None:
            return contract(c, lhs, rhs)
        learn = lambda lhs, rhs: train(c, recipe, lhs, rhs, _ranges(recipe, c), key)
        floats = [not isinstance(x, QArray) for x in (lhs, rhs)]
        if not trains or not any(floats):
            return learn(lhs, rhs)
        chosen = [x for x, is_float in zip((lhs, rhs), floats) if is_float]
        merge = lambda *xs: xs if all(floats) else (xs[0], rhs) if floats[0] else (lhs, xs[0])  # fmt: skip
        out, vjp = jax.vjp(lambda *xs: learn(*merge(*xs)), *chosen)
        phase[0] = "backward"
        return vjp(jnp.ones_like(out))

    shape = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype)
    key = jax.eval_shape(lambda: jax.random.key(0))
    with contextlib.ExitStack() as stack:
        if device is not None:
            stack.enter_context(environment.pretended(device))
        stack.enter_context(environment.watched(note))
        jax.eval_shape(run, *jax.tree.map(shape, (c, *operands)), key)
    return tuple(dict.fromkeys(choices))  # jax may trace a forward twice


def _ranges(recipe: Any, c: Any) -> Ranges:
    """Returns ranges of the right shapes for those that a provider would have learned."""

    def of(spec: Spec | None, labels: tuple) -> dict | None:
        if spec is None or spec.method != "delayed":
            return None
        return {"absmax": jnp.ones((1,) * len(labels))}

    fwd, g = recipe.fwd, recipe.dlhs.g
    g = g if isinstance(g, Spec) else None
    return Ranges(of(fwd.lhs, c.lhs), of(fwd.rhs, c.rhs), of(g, c.out))


def _shapes(operands: Any) -> str:
    """Writes shapes as '[1024,512] x [512,768]'."""
    operands = getattr(operands, "matmul", operands)
    if hasattr(operands, "lhs"):
        parts = codes_of(operands.lhs), codes_of(operands.rhs)
    else:
        parts = (operands.x,)
    return " x ".join(f"[{','.join(map(str, x.shape))}]" for x in parts)
