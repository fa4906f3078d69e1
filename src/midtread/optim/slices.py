"""Slices: a stacked array, as its slices along the first axis, each an array of its own.

A program whose layers are compiled one by one slices every stack of weights and
concatenates their gradients again: reads and writes of all of it that compute nothing. With
slices in the place of the stack (nodes of a tree, like lists) each layer's weight, gradient
and moments are arrays of their own, and an update of one is one pass over it.

A slice keeps the axis, with an extent of 1, so names, tiles and shapes are those of the
stack. An optimizer sees slices as leaves of their own; its random numbers are those of the
stack (`without_slices`, `origin_of`), so a run can be gone on with either way.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class SliceKey:
    """The step of a path that leads to one slice."""

    index: int

    def __str__(self) -> str:
        return f"[{self.index}:{self.index + 1}]"


@jax.tree_util.register_pytree_with_keys_class
class Slices:
    """The slices of an array, or of a tree of arrays (a QArray) that share the axis."""

    def __init__(self, parts: tuple[Any, ...]):
        self.parts = tuple(parts)

    def tree_flatten_with_keys(self):
        return [(SliceKey(i), part) for i, part in enumerate(self.parts)], None

    @classmethod
    def tree_unflatten(cls, _, parts):
        return cls(parts)

    def __repr__(self) -> str:
        return f"Slices({', '.join(map(repr, self.parts))})"


@jax.jit
def cut(stacked: Any) -> Slices:
    """Returns the slices of an array, or of every array of a tree.

    >>> cut(jnp.ones((3, 5))).parts[0].shape
    (1, 5)
    """
    (count,) = {x.shape[0] for x in jax.tree.leaves(stacked)}
    one = lambda i: jax.tree.map(lambda x: x[i : i + 1], stacked)
    return Slices(tuple(map(one, range(count))))


@jax.jit
def stack(slices: Slices) -> Any:
    """Returns what was cut.

    >>> stack(cut(jnp.arange(6).reshape(3, 2))).ravel().tolist()
    [0, 1, 2, 3, 4, 5]
    """
    return jax.tree.map(lambda *parts: jnp.concatenate(parts), *slices.parts)


def without_slices(path: tuple) -> tuple:
    """Returns the path of the stack that a path leads into."""
    return tuple(key for key in path if not isinstance(key, SliceKey))


def origin_of(path: tuple, ndim: int) -> tuple[int, ...] | None:
    """Returns where the slice that a path leads to begins in its stack, or None without
    slices."""
    first = [key.index for key in path if isinstance(key, SliceKey)]
    return (*first, *[0] * (ndim - 1)) if first else None
