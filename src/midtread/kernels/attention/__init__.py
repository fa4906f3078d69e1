"""Attention of many queries, each over a range of keys, forward and backward.

triton.py    the kernels, and from arrays to a plan for them, or why not
"""

import dataclasses

import jax

from midtread.kernels.layout import why_not_here

# What a rematerialized layer may keep, so that the forward need not run once more.
SAVED = ("attention_out", "attention_log_z")
LOWEST = -1e30  # the logit of a key that no query sees


@dataclasses.dataclass(frozen=True, eq=False)
class Ranged:
    """q [B, T, H, h] over the keys first <= s < stop, both [B, T], of k [B, S, K, h]."""

    q: jax.Array
    k: jax.Array
    v: jax.Array  # [B, S, K, w]
    first: jax.Array
    stop: jax.Array
    scale: float  # of the logits
    softcap: float | None = None  # c tanh(logit / c) in place of each logit
    sinks: jax.Array | None = None  # [H] a logit that takes weight and has no value

    @property
    def why_not_here(self) -> str | None:
        return why_not_here(self.q, self.k, self.v)
