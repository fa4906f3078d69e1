"""One new token a sequence: queries and keys are turned, keys and values go into the cache.

triton.py    the kernel, and from a model's arrays to a plan for it, or why not
"""

import dataclasses
from typing import NamedTuple

import jax

from midtread.kernels.layout import why_not_here
from midtread.kernels.pending import Pending
from midtread.numerics.qarray import QArray


@dataclasses.dataclass(frozen=True, eq=False)
class Token:
    """Heads [B, H + 2 K, h], queries, then keys, then values, of one token a sequence; and the
    cache [B, S, K, h] that it goes into, at the slots `positions` [B].

    Attributes:
        cos, sin: [B, n] in float32: what the n pairs of a head are turned by.
        left: what `heads` is to be computed from, if it is not yet, as rows of (H + 2 K) h.
        is_interleaved: whether a pair is (2 i, 2 i + 1), and not (i, i + n). Turned, it is
            (i, i + n) either way.
    """

    heads: jax.Array
    cos: jax.Array
    sin: jax.Array
    positions: jax.Array
    k: jax.Array | QArray
    v: jax.Array | QArray
    is_interleaved: bool = False
    left: Pending | None = None

    @property
    def num_queries(self) -> int:
        return self.heads.shape[1] - 2 * self.k.shape[2]

    @property
    def why_not_here(self) -> str | None:
        return why_not_here(self.heads, self.k, self.v)


class Written(NamedTuple):
    """Turned queries [B, H, h], and the cache with the new token."""

    q: jax.Array
    k: jax.Array | QArray
    v: jax.Array | QArray
