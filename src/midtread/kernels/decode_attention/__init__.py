"""One new token a sequence against a cache of floats or codes.

triton.py    the kernel, and from a model's arrays to a plan for it, or why not
"""

import dataclasses

import jax

from midtread.kernels.layout import why_not_here
from midtread.numerics.qarray import QArray


@dataclasses.dataclass(frozen=True, eq=False)
class Cached:
    """q [B, 1, H, h] against a cache [B, S, K, h] of which each sequence sees the slots from
    `first` to before `stop`, both [B]."""

    q: jax.Array
    k: jax.Array | QArray
    v: jax.Array | QArray
    first: jax.Array
    stop: jax.Array
    gain: float = 1.0  # logits are gain q k / sqrt(h)
    softcap: float | None = None  # c tanh(logit / c) in place of each logit
    sinks: jax.Array | None = None  # [H] a logit that takes weight and has no value

    @property
    def why_not_here(self) -> str | None:
        return why_not_here(self.q, self.k, self.v)
