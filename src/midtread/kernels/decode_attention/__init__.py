"""One new token a sequence against a cache of codes.

triton.py    the kernel, and from a model's arrays to a plan for it, or why not
"""

import dataclasses

import jax

from midtread.kernels.layout import why_not_here
from midtread.numerics.qarray import QArray


@dataclasses.dataclass(frozen=True, eq=False)
class Cached:
    """q [B, 1, H, h] against a cache [B, S, K, h] of which each sequence sees its first
    `lengths` slots."""

    q: jax.Array
    k: QArray
    v: QArray
    lengths: jax.Array
    gain: float = 1.0

    @property
    def why_not_here(self) -> str | None:
        return why_not_here(self.q, self.k, self.v)
