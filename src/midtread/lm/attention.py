"""Attention: the module, from the stream to the stream.

    q, k, v = heads(x), turned by their positions;  k and v are written into a cache, if any
    out = attend(q, k, v, what each token sees) @ out

What a token sees is in `lm/seen.py`, how attention itself is computed in `lm/attend.py`, and
DeepSeek's latent attention in `lm/latent.py`.

Letters: B batch, T queries, D emb_dim, H query heads, K kv heads, h head_dim.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from midtread.kernels import choose
from midtread.kernels.environment import here
from midtread.kernels.pending import Pending
from midtread.kernels.write_cache import Token
from midtread.lm import cache as kv
from midtread.lm import rope
from midtread.lm.attend import attend
from midtread.lm.config import Model
from midtread.lm.layers import (
    Linear,
    collect_in_a_step,
    cut,
    norm,
    side_by_side,
    vector,
)
from midtread.lm.seen import Place, seen_by


class Attention(nnx.Module):
    """Grouped-query attention.

    Args:
        is_local: whether this layer has the window; None: the place of its tokens says so,
            as layers of a scan differ.
    """

    def __init__(self, m: Model, rngs: nnx.Rngs, is_local: bool | None = False):
        H, K, h, D = m.num_query_heads, m.num_kv_heads, m.head_dim, m.emb_dim
        inner, outer = m.attention_bias != "none", m.attention_bias == "all"
        self.query = Linear(m, D, H * h, ("embed", "heads"), rngs, inner)
        self.key = Linear(m, D, K * h, ("embed", "kv_heads"), rngs, inner)
        self.value = Linear(m, D, K * h, ("embed", "kv_heads"), rngs, inner)
        self.out = Linear(m, H * h, D, ("heads", "embed"), rngs, outer)
        if m.use_qk_norm:
            each = m.qk_norm_scope == "head"
            self.query_norm = norm(m, h if each else H * h, rngs)
            self.key_norm = norm(m, h if each else K * h, rngs)
        if m.attention_sink:
            self.sinks = vector(m, H, "heads")
        self.shape, self.norms = (H, h), m.use_qk_norm and m.qk_norm_scope
        self.ropes = rope.of(m), rope.of(m, local=True)
        self.scale = (m.query_pre_attn_scalar or h) ** -0.5 * self.ropes[0].logits_gain
        self.softcap = m.attn_logits_soft_cap or None
        self.is_local, self.window = is_local, m.sliding_window_size
        self.has_sinks, self.implementation = m.attention_sink, m.attention

    def __call__(self, x: jax.Array, place: Place, cache: Any):
        (H, h), (B, T, _) = self.shape, x.shape
        with collect_in_a_step(x, cache) as forms:
            heads = self.heads(x)
        seen = seen_by(place, cache, self.window_at(place))
        left = forms.of(heads[0]).pending if len(heads) == 1 else None
        q, k, v, cache = self.placed(heads, left, place, cache)
        out = attend(
            q, k, v, seen,
            scale=self.scale,
            softcap=self.softcap,
            sinks=self.sinks[...] if self.has_sinks else None,
            implementation=self.implementation,
        )  # fmt: skip
        return self.out(out.reshape(B, T, H * h)), cache

    def heads(self, x: jax.Array) -> list[jax.Array]:
        """Returns queries, keys and values [B, T, heads h], not turned yet: three arrays, or
        all of them in one, where one matmul makes them."""
        if not self.norms and self.query.widths is not None:
            return [self.query(x)]
        q, k, v = side_by_side(x, self.query, self.key, self.value)
        if self.norms:
            q, k = self.normed(self.query_norm, q), self.normed(self.key_norm, k)
        return [q, k, v]

    def normed(self, norm: Callable, x: jax.Array) -> jax.Array:
        """Norms queries or keys, together or head by head."""
        if self.norms == "all":
            return norm(x)
        by_head = x.reshape(*x.shape[:2], -1, self.shape[1])
        return norm(by_head).reshape(x.shape)

    def placed(
        self, heads: list[jax.Array], left: Pending | None, place: Place, cache: Any
    ):
        """Returns queries, turned by their positions; the keys and values to look at, which
        are their own or, with these in it, the cache's; and that cache."""
        written = cache is not None and self.written(heads, left, place, cache)
        if written:
            q, cache = written
            return q, cache.rows["k"], cache.rows["v"], cache
        by_head = lambda a: a.reshape(*a.shape[:2], -1, self.shape[1])
        parts = heads if len(heads) == 3 else cut(heads[0], self.query.widths)
        q, k, v = map(by_head, parts)
        q, k = self.turned(q, place), self.turned(k, place)
        if cache is None:
            return q, k, v, None
        cache = cache.write(place.positions, k=k, v=v)
        return q, cache.rows["k"], cache.rows["v"], cache

    def written(
        self,
        heads: list[jax.Array],
        left: Pending | None,
        place: Place,
        cache: kv.Cache,
    ) -> tuple[jax.Array, kv.Cache] | None:
        """Returns turned queries of one token a sequence, and the cache with its keys and
        values, by a kernel that does all of that; None if none does."""
        if heads[0].shape[1] != 1 or here().why_not("nvidia") is not None:
            return None
        all_heads = heads[0] if len(heads) == 1 else jnp.concatenate(heads, -1)
        all_heads = all_heads.reshape(len(all_heads), -1, self.shape[1])
        rotary, frequency = self.rotary(place)
        positions = place.positions[:, 0].astype(jnp.int32)
        turned = rotary.turned(self.shape[1])
        tables = rotary.tables(positions, turned, frequency)
        rows, pairs = (cache.rows["k"], cache.rows["v"]), rotary.is_interleaved
        out = choose.write(Token(all_heads, *tables, positions, *rows, pairs, left))
        if out is None:
            return None
        rows = {"k": out.k, "v": out.v}
        return out.q[:, None], dataclasses.replace(cache, rows=rows)

    def turned(self, x: jax.Array, place: Place) -> jax.Array:
        """Turns queries or keys by their positions."""
        rotary, frequency = self.rotary(place)
        return rotary.rotate(x, place.positions, frequency)

    def rotary(self, place: Place) -> tuple[rope.Rope, jax.Array | None]:
        """Returns the rotary embedding of this layer, and its frequencies where they are
        known only when it runs."""
        far, near = self.ropes
        if self.is_local is not None or far == near:
            return near if self.is_local else far, None
        width = far.turned(self.shape[1])
        both = near.frequencies(width), far.frequencies(width)
        return far, jnp.where(place.is_local, *both)

    def window_at(self, place: Place) -> int | jax.Array | None:
        """Returns how many tokens this layer looks back on; None: all."""
        if self.is_local is None:
            return jnp.where(place.is_local, self.window, jnp.iinfo(jnp.int32).max)
        return self.window if self.is_local else None
