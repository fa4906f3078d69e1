"""Blockwise: attention that never writes its logits to memory.

    out = softmax(softcap(scale q k^T)) v       over the keys that each query sees

The softmax is taken one block of keys at a time (arXiv 2112.05682, 2205.14135): a block of
queries keeps the largest logit so far, m, the sum of exp(logit - m), and its weighted
values, and rescales them when m grows. What a query sees is a range of keys, first <= s <
stop, so blocks outside every range of a block of queries are not visited: those after a
causal query, before its window, or in another document.

The backward computes each block of logits again from log Z = m + log(sum), which is all
that is kept besides the inputs and the output:

    p = exp(logit - log Z),  dv = p^T g,  ds = p (g v^T - sum(g out)),  dq = ds k,  dk = ds^T q

Sums are float32; p and ds are multiplied in the dtype of q, as the plain formula
multiplies them. A sink is one more logit of a head, which takes weight and has no value.

Letters: B batch, T queries, S keys, K kv heads, G query heads of one kv head, h width of a
query or key, w width of a value, t and s places in a block of queries and of keys.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from midtread.kernels.attention import LOWEST, SAVED
from midtread.model.running import disable_interceptions

BLOCK = 512  # queries of a block, and keys
LOGITS = 2**26  # at most so many in memory at once, over all heads and rows


class Formula(NamedTuple):
    """What is computed besides the arrays, and in which blocks."""

    scale: float
    softcap: float | None
    num_queries: int  # of a block
    num_keys: int


def attend(q, k, v, first, stop, scale, softcap=None, sinks=None) -> jax.Array:
    """Returns attention of q [B T H h] over the keys `first` <= s < `stop` [B T] of k [B S K h].

    Args:
        v: [B, S, K, w].
        softcap: c tanh(logit / c) in place of a logit, or None.
        sinks: one logit [H] of each head, or None.

    Returns:
        [B, T, H, w] in q's dtype; zeros for a query that sees no key.
    """
    (B, T, H, h), (_, S, K, w) = q.shape, v.shape
    formula = Formula(scale, softcap, *_blocks(T, S, B * H))

    def pad(x: jax.Array, to: int) -> jax.Array:
        """Pads tokens to whole blocks."""
        return jnp.pad(x, [(0, 0), (0, -x.shape[1] % to)] + [(0, 0)] * (x.ndim - 2))

    q_BTKGh = pad(q.reshape(B, T, K, H // K, h), formula.num_queries)
    first, stop = (pad(x, formula.num_queries) for x in (first, stop))
    k, v = (pad(x, formula.num_keys) for x in (k, v))
    sinks = jnp.full((H,), LOWEST) if sinks is None else sinks.astype(jnp.float32)
    out: Any = _attend(formula, q_BTKGh, k, v, first, stop, sinks.reshape(K, H // K))
    return out[:, :T].reshape(B, T, H, w)


def _blocks(T: int, S: int, rows: int) -> tuple[int, int]:
    """Returns the queries and keys of a block; `rows` is the number of rows and heads."""
    even = lambda n: -(-math.ceil(n / math.ceil(n / BLOCK)) // 8) * 8
    queries, keys = even(T), even(S)
    while queries > 64 and rows * queries * keys > LOGITS:
        queries = even(queries // 2)
    return queries, keys


def _cut(x: jax.Array, size: int) -> jax.Array:
    """Cuts [B T ...] into blocks [n B t ...]."""
    x = x.reshape(x.shape[0], -1, size, *x.shape[2:])
    return jnp.moveaxis(x, 1, 0)


def _joined(x: jax.Array) -> jax.Array:
    """Puts blocks together again."""
    x = jnp.moveaxis(x, 0, 1)
    return x.reshape(x.shape[0], -1, *x.shape[3:])


def _spans(first, stop, formula: Formula):
    """Returns the blocks of keys [from, to) that each block of queries [n B t] may see."""
    is_empty = stop <= first
    low = jnp.where(is_empty, jnp.iinfo(jnp.int32).max, first).min((1, 2))
    high = jnp.where(is_empty, 0, stop).max((1, 2))
    return low // formula.num_keys, -(-high // formula.num_keys)


def _logits(formula: Formula, q, k, first, stop, j):
    """Returns the logits [B K G t s] of one block of queries [B t K G h] and block j of
    keys, which of them are seen, and the slope of the cap."""
    wide = {"preferred_element_type": jnp.float32}
    logits = jnp.einsum("btkgh,bskh->bkgts", q, k, **wide) * formula.scale
    slope = None
    if formula.softcap is not None:
        bent = jnp.tanh(logits / formula.softcap)
        logits, slope = formula.softcap * bent, 1 - bent**2
    slots = j * formula.num_keys + jnp.arange(formula.num_keys)
    seen = (slots >= first[..., None]) & (slots < stop[..., None])
    return logits, seen[:, None, None], slope


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(formula: Formula, q, k, v, first, stop, sinks):
    return _forward(formula, q, k, v, first, stop, sinks)[0]


@disable_interceptions
def _forward(formula: Formula, q, k, v, first, stop, sinks):
    num = formula.num_keys
    first_n, stop_n = (_cut(x, formula.num_queries) for x in (first, stop))

    def of_queries(block):
        q, first, stop, low, high = block
        B, t, K, G, _ = q.shape

        def of_keys(j, carry):
            m, total, out = carry
            at = lambda x: lax.dynamic_slice_in_dim(x, j * num, num, axis=1)
            logits, seen, _ = _logits(formula, q, at(k), first, stop, j)
            new = jnp.maximum(m, jnp.where(seen, logits, LOWEST).max(-1))
            p = jnp.where(seen, jnp.exp(logits - new[..., None]), 0)
            shrink = jnp.exp(m - new)
            more = jnp.einsum(
                "bkgts,bskw->bkgtw", p.astype(q.dtype), at(v),
                preferred_element_type=jnp.float32,
            )  # fmt: skip
            return new, total * shrink + p.sum(-1), out * shrink[..., None] + more

        m = jnp.broadcast_to(sinks[None, :, :, None], (B, K, G, t))
        # Where there is a sink, m is the sink, and exp(sink - m) = 1.
        total = (m > LOWEST).astype(jnp.float32)
        out = jnp.zeros((B, K, G, t, v.shape[-1]))
        m, total, out = lax.fori_loop(low, high, of_keys, (m, total, out))
        safe = jnp.where(total > 0, total, 1)
        out = jnp.moveaxis(out / safe[..., None], 3, 1)
        return out.astype(q.dtype), m + jnp.log(safe)

    spans = _spans(first_n, stop_n, formula)
    blocks = (_cut(q, formula.num_queries), first_n, stop_n, *spans)
    out_n, log_z_n = lax.map(of_queries, blocks)
    out = checkpoint_name(_joined(out_n), SAVED[0])
    log_z_n = checkpoint_name(log_z_n, SAVED[1])
    return out, (q, k, v, first, stop, sinks, out, log_z_n)


@disable_interceptions
def _backward(formula: Formula, kept, g):
    q, k, v, first, stop, sinks, out, log_z_n = kept
    cut = functools.partial(_cut, size=formula.num_queries)
    delta = jnp.sum(g.astype(jnp.float32) * out.astype(jnp.float32), -1)
    delta_n = jnp.moveaxis(cut(delta), 2, 4)  # [n B K G t], as log Z
    q_n, g_n, first_n, stop_n = map(cut, (q, g, first, stop))
    low_n, high_n = _spans(first_n, stop_n, formula)
    num_blocks = len(q_n)
    wide = {"preferred_element_type": jnp.float32}

    def of_keys(dq_n, block):
        j, k, v = block

        def of_queries(i, carry):
            dq_n, dk, dv = carry
            q, g = q_n[i], g_n[i]
            logits, seen, slope = _logits(formula, q, k, first_n[i], stop_n[i], j)
            p = jnp.where(seen, jnp.exp(logits - log_z_n[i][..., None]), 0)
            dp = jnp.einsum("btkgw,bskw->bkgts", g, v, **wide)
            ds = p * (dp - delta_n[i][..., None]) * formula.scale
            ds = (ds if slope is None else ds * slope).astype(q.dtype)
            p = p.astype(q.dtype)
            dv += jnp.einsum("bkgts,btkgw->bskw", p, g, **wide)
            dk += jnp.einsum("bkgts,btkgh->bskh", ds, q, **wide)
            dq = jnp.einsum("bkgts,bskh->btkgh", ds, k, **wide)
            return dq_n.at[i].add(dq), dk, dv

        sees = (low_n <= j) & (j < high_n)
        begin = jnp.argmax(sees)
        end = jnp.where(sees.any(), num_blocks - jnp.argmax(sees[::-1]), begin)
        start = (dq_n, jnp.zeros(k.shape), jnp.zeros(v.shape))
        dq_n, dk, dv = lax.fori_loop(begin, end, of_queries, start)
        return dq_n, (dk.astype(k.dtype), dv.astype(v.dtype))

    k_n, v_n = (_cut(x, formula.num_keys) for x in (k, v))
    blocks = (jnp.arange(len(k_n)), k_n, v_n)
    dq_n, (dk_n, dv_n) = lax.scan(of_keys, jnp.zeros(q_n.shape), blocks)
    weight = jnp.exp(sinks[None, None, :, :, None] - log_z_n)
    dsinks = -jnp.sum(weight * delta_n, (0, 1, 4))
    dq = _joined(dq_n).astype(q.dtype)
    return dq, _joined(dk_n), _joined(dv_n), None, None, dsinks


_attend.defvjp(_forward, _backward)
