"""Latent: DeepSeek's MLA, attention whose cache is a narrow latent (arXiv 2405.04434).

Keys and values of every head are read off one latent of R numbers a token, by a matrix
[R, H (n + v)]; beside it a token has one rotary key that all heads share. Both are what a
cache keeps: R + r numbers a token, whatever the number of heads.

    k_shn = sum_r c_sr K_rhn        v_shv = sum_r c_sr V_rhv        [K V] = wkv_b

A training step and a prompt are computed so, all keys and values wide: for many queries that
is the least work. One new token a sequence would make S keys and values of H heads for a
single query. It is computed in the latent space instead, where the same sums are taken in
another order:

    logits_hs = (sum_n q_hn K_rhn) . c_s + q_rope_h . k_rope_s
    out_hv    = sum_r (sum_s p_hs c_sr) V_rhv

A step then reads the cache, S (R + r) numbers, and `wkv_b`, and the widest arrays it makes
are logits [B, H, S] and queries [B, H, R]. The wide form would write and read S H (n + v)
more: for DeepSeek-V3 (R 512, r 64, H 128, n and v 128) and 4,096 tokens in bfloat16, 4.7 MB
of cache a layer and sequence for 268 MB.

What is quantized. `wkv_b` is stored as it was quantized for the wide form, in any format,
with scales of its columns (h, n or v), in tiles of R or not. Both sums above are matmuls of
it, which its rule applies to: V's scales leave the sum; K's lie along the sum over n, so its
values are restored first, and a rule that quantizes activations rounds q_n and the attended
latents where the wide form would round latents. The cache may be codes: their scales go to
logits and weights. An adapter or a static range beside `wkv_b` is about the wide form, and so
is an implementation asked for by name: there a step is computed wide too.

Letters: B batch, T queries, S keys, D emb_dim, H heads, R kv_lora_rank, n qk_nope_head_dim,
r qk_rope_head_dim, v v_head_dim.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from midtread.kernels.attention import LOWEST
from midtread.lm import cache as kv
from midtread.lm import rope
from midtread.lm.attend import attend
from midtread.lm.config import Model
from midtread.lm.layers import Linear, norm
from midtread.lm.seen import Place, Seen, seen_by
from midtread.model.boxes import WithAux
from midtread.numerics.qarray import QArray


class LatentAttention(nnx.Module):
    """Attention over latents: expanded to keys and values of all heads, or as they are."""

    def __init__(self, m: Model, rngs: nnx.Rngs, is_local: bool | None = False):
        del is_local  # a config with windows and MLA is refused
        H, D, R = m.num_query_heads, m.emb_dim, m.kv_lora_rank
        nope, turned, vh = m.qk_nope_head_dim, m.qk_rope_head_dim, m.v_head_dim
        if m.q_lora_rank:
            self.wq_a = Linear(m, D, m.q_lora_rank, ("embed", "q_lora"), rngs)
            self.q_norm = norm(m, m.q_lora_rank, rngs)
        width = m.q_lora_rank or D
        axis = "q_lora" if m.q_lora_rank else "embed"
        self.wq_b = Linear(m, width, H * (nope + turned), (axis, "heads"), rngs)
        self.wkv_a = Linear(m, D, R + turned, ("embed", "kv_lora"), rngs)
        self.kv_norm = norm(m, R, rngs)
        self.wkv_b = Expansion(m, rngs)
        self.out = Linear(m, H * vh, D, ("heads", "embed"), rngs)
        self.sizes, self.rope = (H, R, nope, turned, vh), rope.of(m)
        self.scale = self.rope.logits_gain * (nope + turned) ** -0.5
        self.has_bottleneck = bool(m.q_lora_rank)
        self.implementation = m.attention

    def __call__(self, x: jax.Array, place: Place, cache: Any):
        (H, R, nope, turned, vh), (B, T, _) = self.sizes, x.shape
        low = self.q_norm(self.wq_a(x)) if self.has_bottleneck else x
        q = self.wq_b(low).reshape(B, T, H, nope + turned)
        q, q_rope = q[..., :nope], self.rope.rotate(q[..., nope:], place.positions)
        both = self.wkv_a(x)
        latent = self.kv_norm(both[..., :R])[:, :, None]
        k_rope = self.rope.rotate(both[:, :, None, R:], place.positions)
        seen = seen_by(place, cache)
        if cache is not None:
            cache = cache.write(place.positions, latent=latent, k_rope=k_rope)
            latent, k_rope = cache.rows["latent"], cache.rows["k_rope"]
        is_step = cache is not None and T == 1
        run = self.narrow if is_step and self.can_be_narrow else self.wide
        out = run(q, q_rope, latent, k_rope, seen)
        return self.out(out.reshape(B, T, H * vh)), cache

    def wide(self, q, q_rope, latent, k_rope, seen: Seen) -> jax.Array:
        """Returns attention over keys and values of all heads: [B, T, H, v]."""
        H, _, nope, turned, vh = self.sizes
        latent, k_rope = (kv.restore(x, q.dtype) for x in (latent, k_rope))
        B, S = latent.shape[:2]
        expanded = self.wkv_b(latent[:, :, 0]).reshape(B, S, H, nope + vh)
        k_rope = jnp.broadcast_to(k_rope, (B, S, H, turned))
        return attend(
            jnp.concatenate([q, q_rope], -1),
            jnp.concatenate([expanded[..., :nope], k_rope], -1),
            expanded[..., nope:],
            seen,
            scale=self.scale,
            implementation=self.implementation,
        )

    def narrow(self, q, q_rope, latent, k_rope, seen: Seen) -> jax.Array:
        """Computes the same over the latents themselves."""
        q = self.wkv_b.absorb(q)
        out = attend_latents((q, q_rope), (latent, k_rope), seen, self.scale)
        return self.wkv_b.values(out)

    @property
    def can_be_narrow(self) -> bool:
        """Whether nothing asks for the wide form: neither a parameter beside the weights
        of `wkv_b`, nor an implementation that knows keys and values alone."""
        is_parameter = lambda x: isinstance(x, nnx.Variable | WithAux)
        is_alone = sum(map(is_parameter, vars(self.wkv_b).values())) == 1
        return is_alone and self.implementation in ("auto", "plain")


class Expansion(Linear):
    """Latents [.., R] to keys and values [.., H (n + v)], and both halves of it by
    themselves, with the axes of heads apart."""

    def __init__(self, m: Model, rngs: nnx.Rngs):
        H, R = m.num_query_heads, m.kv_lora_rank
        nope, vh = m.qk_nope_head_dim, m.v_head_dim
        super().__init__(m, R, H * (nope + vh), ("kv_lora", "heads"), rngs)
        self.sizes = (R, H, nope, vh)

    def absorb(self, q: jax.Array) -> jax.Array:
        """Returns sum_n q_bthn K_rhn, what a query looks for in latents: [B, T, H, R]."""
        nope = self.sizes[2]
        return self._by_heads(q, self._kernel()[:, :, :nope], summed=2)

    def values(self, latents: jax.Array) -> jax.Array:
        """Returns sum_r c_bthr V_rhv, the values of attended latents: [B, T, H, v]."""
        nope = self.sizes[2]
        return self._by_heads(latents, self._kernel()[:, :, nope:], summed=0)

    def _kernel(self) -> Any:
        R, H, nope, vh = self.sizes
        return jnp.asarray(self.kernel[...], self.dtype).reshape(R, H, nope + vh)

    def _by_heads(self, x_BTHk: jax.Array, kernel: Any, summed: int) -> jax.Array:
        axes = (((3,), (summed,)), ((2,), (1,)))
        out_HBTn = jax.lax.dot_general(
            x_BTHk, kernel, axes, preferred_element_type=self.dtype
        )
        return jnp.moveaxis(out_HBTn, 0, 2)


def attend_latents(
    queries: tuple[jax.Array, jax.Array],
    rows: tuple[jax.Array | QArray, jax.Array | QArray],
    seen: Seen,
    scale: float,
) -> jax.Array:
    """Returns softmax(scale (q c^T + q_rope k_rope^T)) c over the slots that each query sees.

    Shapes: [B T H R], [B T H r] and [B S 1 R], [B S 1 r] -> [B T H R].

    Args:
        queries: what each head looks for in latents, and in rotary keys.
        rows: latents and rotary keys of a cache, as arrays or as codes.
        seen: `seen_by(place, cache)`.
        scale: of logits.

    Returns:
        Attended latents of each head, in the queries' dtype.
    """
    dtype = queries[0].dtype
    codes, scales = zip(*(kv.codes(x, dtype) for x in rows))
    logits = jnp.zeros((), jnp.float32)
    for q, k, k_scale in zip(queries, codes, scales):
        product = jnp.einsum(
            "bthr,bsr->bhts", q, k[:, :, 0], preferred_element_type=jnp.float32
        )
        logits += product if k_scale is None else product * _along_slots(k_scale)
    mask = seen.mask(codes[0].shape[1])[:, None]
    logits = jnp.where(mask, scale * logits, LOWEST)
    weights = jax.nn.softmax(logits, axis=-1)
    if scales[0] is not None:  # varies along the sum over s: goes into the weights
        weights *= _along_slots(scales[0])
    return jnp.einsum("bhts,bsr->bthr", weights.astype(dtype), codes[0][:, :, 0])


def _along_slots(scale_BS11: jax.Array) -> jax.Array:
    return scale_BS11[:, None, None, :, 0, 0]
