"""Seen: which earlier tokens each token of a batch looks at.

What a query sees is a range of keys: from where its document begins, or its window, to
itself; in a cache, from the first slot or the window's to its own. Ranges are two numbers a
query, where a mask is as many as there are keys, so documents packed into a row stay apart in
every implementation of attention (`lm/attend.py`).

Letters: B batch, T queries, S keys.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class Place(NamedTuple):
    """Where each token of a batch stands."""

    positions: jax.Array  # [B, T] in its document
    starts: jax.Array | None = None  # [B, T] where in the row its document begins
    is_local: jax.Array | None = None  # [] whether this layer of a scan has a window


def document_starts(segments: jax.Array) -> jax.Array:
    """Where each token's document begins, from which document it belongs to, both [B T].

    A document is a run of equal numbers.

    >>> document_starts(jnp.array([[1, 1, 2, 2, 2, 0]]))
    Array([[0, 0, 2, 2, 2, 5]], dtype=int32)
    """
    T = segments.shape[1]
    index = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), segments.shape)
    begins = jnp.pad(segments[:, 1:] != segments[:, :-1], ((0, 0), (1, 0)))
    return jax.lax.cummax(jnp.where(begins, index, 0), axis=1)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["first", "stop"],
    meta_fields=["is_causal", "is_packed", "window"],
)
@dataclasses.dataclass(frozen=True)
class Seen:
    """The keys first <= s < stop that each query [B, T] sees; it sees one at least."""

    first: jax.Array
    stop: jax.Array
    is_causal: bool = False  # as many keys as queries, and stop is the query's next
    is_packed: bool = False  # first depends on more than the window
    window: int | None = None

    def mask(self, S: int) -> jax.Array:
        """The same as booleans [B, T, S]."""
        slots = jnp.arange(S)
        return (slots >= self.first[..., None]) & (slots < self.stop[..., None])


def seen_by(
    place: Place, cache: Any = None, window: int | jax.Array | None = None
) -> Seen:
    """What each token sees: its document up to itself, or the cache up to its slot.

    Args:
        window: tokens that it looks at, itself among them; None: all before it. An array
            where layers of a scan differ.
    """
    index = place.positions.astype(jnp.int32)
    if cache is None:
        T = place.positions.shape[1]
        index = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), index.shape)
    first = jnp.zeros_like(index)
    is_packed = cache is None and place.starts is not None
    if is_packed:
        first = place.starts
    if window is not None:
        first = jnp.maximum(first, index - (window - 1))
    if isinstance(window, jax.Array):  # known when it runs: ranges say it, not a number
        return Seen(first, index + 1, cache is None, is_packed=True)
    return Seen(first, index + 1, cache is None, is_packed, window)
