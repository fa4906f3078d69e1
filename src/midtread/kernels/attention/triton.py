"""Flash attention on a GPU over ranges of keys, forward and backward.

    out = softmax(softcap(scale q k^T)) v       over the keys first <= s < stop of each query

Documents packed into a row, windows and causal order are all ranges, two numbers a query. A
program reads the least `first` and the largest `stop` of its block of queries and visits the
keys in between, so what stands in other documents costs nothing, in the backward either. That
is why this exists: tokamax's backward visits every earlier key (6.5 ms for 4 x 4,096 tokens in
documents of a thousand, 32 heads of 128, NVIDIA H200, where this one takes 1.9), and cuDNN
wants documents as a mask (9.4 ms).

The forward keeps log2 of each softmax's sum; the backward computes logits again from it:

    p = exp2(logit - log2_z),  dv = p^T g,  ds = p (g v^T - sum(g out)),  dq = ds k,  dk = ds^T q

in two kernels: one walks over keys for a block of queries and sums dq; the other walks over
the queries of all heads that share a block of keys, and sums dk and dv. Logits are in base 2
(a GPU's exponential is that of 2), sums are float32, and p and ds are multiplied in q's dtype.

Letters: B batch, T queries, S keys, H query heads, K kv heads, G = H / K, h width of a query
or key, w width of a value, t and s places in a block of queries and of keys.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from midtread.kernels.attention import LOWEST, SAVED, Ranged
from midtread.kernels.candidates import Refusal
from midtread.kernels.environment import Env
from midtread.kernels.pallas_compat import pl, pltriton, result, triton_params

LOG2E = np.float32(math.log2(math.e))
START = -1e20  # below every logit, and above LOWEST: nothing was seen yet


class Blocks(NamedTuple):
    """What a program loads at once, and how it is compiled."""

    queries: int
    keys: int
    warps: int
    stages: int


class Kernels(NamedTuple):
    """The blocks of all three kernels, for heads up to some width."""

    forward: Blocks
    dq: Blocks
    dkv: Blocks

    @property
    def whole(self) -> int:
        """Tokens are padded to a multiple of this."""
        return math.lcm(*(n for blocks in self for n in blocks[:2]))


# By the widest head. For 128 the best of 8, 9 and 11 kinds of blocks on an H200, 4 x 4,096 tokens
# in documents of a thousand: 0.70, 0.78 and 1.13 ms. The others are derived from it.
KERNELS = {
    128: Kernels(Blocks(64, 64, 4, 3), Blocks(64, 64, 4, 2), Blocks(64, 64, 4, 2)),
    256: Kernels(Blocks(64, 32, 4, 2), Blocks(64, 32, 8, 2), Blocks(32, 64, 8, 2)),
}


class Formula(NamedTuple):
    """What is computed besides the arrays."""

    scale: float
    softcap: float | None
    kernels: Kernels
    is_interpreted: bool


# --- the kernels ------------------------------------------------------------------------------


def _span(first, stop, num_keys: int):
    """Returns the blocks of keys, from and to, that some query of a block sees."""
    is_empty = stop <= first
    low = jnp.min(jnp.where(is_empty, jnp.iinfo(jnp.int32).max - num_keys, first))
    high = jnp.max(jnp.where(is_empty, 0, stop))
    return low // num_keys, (high + num_keys - 1) // num_keys


def _logits(formula: Formula, dots, seen):
    """Logits in base 2 of products q k, and the slope of the cap."""
    slope = None
    if formula.softcap is None:
        logits = dots * (np.float32(formula.scale) * LOG2E)
    else:
        bent = jnp.tanh(dots * np.float32(formula.scale / formula.softcap))
        logits, slope = bent * (np.float32(formula.softcap) * LOG2E), 1 - bent * bent
    return jnp.where(seen, logits, LOWEST), slope


def _forward_body(
    first_ref, stop_ref, q_ref, k_ref, v_ref, *refs, formula: Formula, num_keys: int
):
    """Computes one block of queries [t, h] of one head, against k [S, h] and v [S, w]."""
    *sink_ref, out_ref, log2_z_ref = refs
    q, first, stop = q_ref[:, :], first_ref[:], stop_ref[:]

    def body(j, carry):
        m, total, out = carry
        at = pl.ds(j * num_keys, num_keys)
        slot = j * num_keys + lax.broadcasted_iota(jnp.int32, (1, num_keys), 1)
        seen = (slot >= first[:, None]) & (slot < stop[:, None])
        dots = pltriton.dot(q, k_ref[at, :], trans_b=True)
        logits, _ = _logits(formula, dots, seen)
        new = jnp.maximum(m, jnp.max(logits, axis=1))
        p = jnp.exp2(logits - new[:, None])
        shrink = jnp.exp2(m - new)
        more = pltriton.dot(p.astype(q.dtype), v_ref[at, :])
        return new, total * shrink + jnp.sum(p, axis=1), out * shrink[:, None] + more

    num_queries, width = q.shape[0], v_ref.shape[1]
    m = jnp.full((num_queries,), START, jnp.float32)
    total = jnp.zeros((num_queries,), jnp.float32)
    if sink_ref:
        m, total = m * 0 + sink_ref[0][0] * LOG2E, total + 1
    out = jnp.zeros((num_queries, width), jnp.float32)
    span = _span(first, stop, num_keys)
    m, total, out = lax.fori_loop(*span, body, (m, total, out))
    safe = jnp.where(total > 0, total, 1)
    out_ref[:, :] = (out / safe[:, None]).astype(out_ref.dtype)
    log2_z_ref[:] = jnp.where(total > 0, m + jnp.log2(safe), 0)


def _dq_body(
    first_ref, stop_ref, q_ref, k_ref, v_ref, g_ref, log2_z_ref, delta_ref, dq_ref, *,
    formula: Formula, num_keys: int,
):  # fmt: skip
    """Computes dq of one block of queries [t, h] of one head."""
    q, g, first, stop = q_ref[:, :], g_ref[:, :], first_ref[:], stop_ref[:]
    log2_z, delta = log2_z_ref[:], delta_ref[:]

    def body(j, dq):
        at = pl.ds(j * num_keys, num_keys)
        slot = j * num_keys + lax.broadcasted_iota(jnp.int32, (1, num_keys), 1)
        seen = (slot >= first[:, None]) & (slot < stop[:, None])
        k = k_ref[at, :]
        logits, slope = _logits(formula, pltriton.dot(q, k, trans_b=True), seen)
        p = jnp.exp2(logits - log2_z[:, None])
        ds = p * (pltriton.dot(g, v_ref[at, :], trans_b=True) - delta[:, None])
        ds = ds if slope is None else ds * slope
        return dq + pltriton.dot(ds.astype(q.dtype), k)

    dq = lax.fori_loop(
        *_span(first, stop, num_keys), body, jnp.zeros(q.shape, jnp.float32)
    )
    dq_ref[:, :] = (dq * np.float32(formula.scale)).astype(dq_ref.dtype)


def _dkv_body(
    begin_ref, end_ref, first_ref, stop_ref, q_ref, k_ref, v_ref, g_ref, log2_z_ref,
    delta_ref, dk_ref, dv_ref, *, formula: Formula, num_queries: int,
):  # fmt: skip
    """Computes dk and dv of one block of keys [s, h] of one head, which the queries q [T, G,
    h] of G heads see; logits are [s, t]."""
    k, v = k_ref[:, :], v_ref[:, :]
    num_keys, heads = k.shape[0], q_ref.shape[1]
    begin = begin_ref[0]
    count = end_ref[0] - begin  # blocks of queries, of each head
    slot = pl.program_id(0) * num_keys
    slot += lax.broadcasted_iota(jnp.int32, (num_keys, 1), 0)

    def body(i, carry):
        dk, dv = carry
        head, block = lax.div(i, count), begin + lax.rem(i, count)
        at = pl.ds(block * num_queries, num_queries)
        q, g = q_ref[at, head, :], g_ref[at, head, :]
        first, stop = first_ref[at], stop_ref[at]
        seen = (slot >= first[None, :]) & (slot < stop[None, :])
        logits, slope = _logits(formula, pltriton.dot(k, q, trans_b=True), seen)
        p = jnp.exp2(logits - log2_z_ref[head, at][None, :])
        dv += pltriton.dot(p.astype(k.dtype), g)
        ds = pltriton.dot(v, g, trans_b=True) - delta_ref[head, at][None, :]
        ds = p * ds if slope is None else p * ds * slope
        return dk + pltriton.dot(ds.astype(k.dtype), q), dv

    start = jnp.zeros(k.shape, jnp.float32), jnp.zeros(v.shape, jnp.float32)
    dk, dv = lax.fori_loop(0, count * heads, body, start)
    dk_ref[:, :] = (dk * np.float32(formula.scale)).astype(dk_ref.dtype)
    dv_ref[:, :] = dv.astype(dv_ref.dtype)


# --- calls ------------------------------------------------------------------------------------


def _of_queries(q: jax.Array, k: jax.Array, blocks: Blocks):
    """Returns the grid of a kernel with a program for each block of queries, and the blocks
    of [B T], [B T H .], [B S K .], [B H T] arrays that one of them sees. The last queries of
    a row see most, so they come first."""
    (B, T, H, _), K = q.shape, k.shape[2]
    num, size, group = T // blocks.queries, blocks.queries, H // K
    token = pl.BlockSpec((None, size), lambda i, h, b: (b, num - 1 - i))
    row = lambda width: pl.BlockSpec(
        (None, size, None, width), lambda i, h, b: (b, num - 1 - i, h, 0)
    )
    cache = lambda x: pl.BlockSpec(
        (None, x.shape[1], None, x.shape[3]), lambda i, h, b: (b, 0, h // group, 0)
    )
    number = pl.BlockSpec((None, None, size), lambda i, h, b: (b, h, num - 1 - i))
    return (num, H, B), token, row, cache, number


@functools.partial(jax.jit, static_argnums=0)
def _run_forward(formula: Formula, q, k, v, first, stop, sinks):
    blocks = formula.kernels.forward
    grid, token, row, cache, number = _of_queries(q, k, blocks)
    B, T, H, _ = q.shape
    args = [first, stop, q, k, v]
    specs = [token, token, row(q.shape[3]), cache(k), cache(v)]
    if sinks is not None:
        args.append(sinks)
        specs.append(pl.BlockSpec((1,), lambda i, h, b: (h,)))
    return pl.pallas_call(
        functools.partial(_forward_body, formula=formula, num_keys=blocks.keys),
        grid=grid,
        in_specs=specs,
        out_specs=[row(v.shape[3]), number],
        out_shape=[
            result((B, T, H, v.shape[3]), q.dtype, q),
            result((B, H, T), jnp.float32, q),
        ],
        compiler_params=triton_params(blocks.warps, blocks.stages),
        interpret=formula.is_interpreted,
        name="flash_forward",
    )(*args)


@functools.partial(jax.jit, static_argnums=0)
def _run_backward(formula: Formula, q, k, v, first, stop, log2_z, delta, g):
    options: dict[str, Any] = {"interpret": formula.is_interpreted}
    blocks = formula.kernels.dq
    grid, token, row, cache, number = _of_queries(q, k, blocks)
    h, w = k.shape[3], v.shape[3]
    dq = pl.pallas_call(
        functools.partial(_dq_body, formula=formula, num_keys=blocks.keys),
        grid=grid,
        in_specs=[token, token, row(h), cache(k), cache(v), row(w), number, number],
        out_specs=row(h),
        out_shape=result(q.shape, q.dtype, q),
        compiler_params=triton_params(blocks.warps, blocks.stages),
        name="flash_dq",
        **options,
    )(first, stop, q, k, v, g, log2_z, delta)
    blocks = formula.kernels.dkv
    (B, T, H, _), (_, S, K, _) = q.shape, k.shape
    begin, end = _queries_of_keys(first, stop, S, blocks)
    own = lambda width: pl.BlockSpec(
        (None, blocks.keys, None, width), lambda j, h, b: (b, j, h, 0)
    )
    bound = pl.BlockSpec((None, 1), lambda j, h, b: (b, j))
    tokens = pl.BlockSpec((None, T), lambda j, h, b: (b, 0))
    rows = lambda width: pl.BlockSpec(
        (None, T, H // K, width), lambda j, h, b: (b, 0, h, 0)
    )
    numbers = pl.BlockSpec((None, H // K, T), lambda j, h, b: (b, h, 0))
    dk, dv = pl.pallas_call(
        functools.partial(_dkv_body, formula=formula, num_queries=blocks.queries),
        grid=(S // blocks.keys, K, B),
        in_specs=[
            bound, bound, tokens, tokens, rows(h), own(h), own(w), rows(w), numbers,
            numbers,
        ],
        out_specs=[own(h), own(w)],
        out_shape=[result(k.shape, k.dtype, q), result(v.shape, v.dtype, q)],
        compiler_params=triton_params(blocks.warps, blocks.stages),
        name="flash_dkv",
        **options,
    )(begin, end, first, stop, q, k, v, g, log2_z, delta)  # fmt: skip
    return dq, dk, dv


def _queries_of_keys(first, stop, S: int, blocks: Blocks):
    """Returns the blocks of queries, from and to, some of which see a block of keys: [B, S /
    s] each."""
    cut = lambda x: x.reshape(x.shape[0], -1, blocks.queries)
    is_empty = stop <= first
    low = cut(jnp.where(is_empty, S, first)).min(-1)
    high = cut(jnp.where(is_empty, 0, stop)).max(-1)
    keys = jnp.arange(0, S, blocks.keys, dtype=jnp.int32)
    sees = (low[:, None] < keys[:, None] + blocks.keys) & (
        high[:, None] > keys[:, None]
    )
    number = jnp.arange(sees.shape[-1], dtype=jnp.int32)
    begin = jnp.where(sees, number, sees.shape[-1]).min(-1)
    return begin, jnp.where(sees, number + 1, begin[..., None]).max(-1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(formula: Formula, q, k, v, first, stop, sinks):
    return _run_forward(formula, q, k, v, first, stop, sinks)[0]


def _forward(formula: Formula, q, k, v, first, stop, sinks):
    out, log2_z = _run_forward(formula, q, k, v, first, stop, sinks)
    out, log2_z = map(checkpoint_name, (out, log2_z), SAVED)
    return out, (q, k, v, first, stop, sinks, out, log2_z)


def _backward(formula: Formula, kept, g):
    q, k, v, first, stop, sinks, out, log2_z = kept
    delta = jnp.sum(g.astype(jnp.float32) * out.astype(jnp.float32), -1)
    delta = delta.transpose(0, 2, 1)
    grads = _run_backward(formula, q, k, v, first, stop, log2_z, delta, g)
    dsinks = None
    if sinks is not None:
        weight = jnp.exp2(sinks[:, None] * LOG2E - log2_z)
        dsinks = -jnp.sum(weight * delta, (0, 2))
    return *grads, None, None, dsinks


_attend.defvjp(_forward, _backward)


# --- from a model's arrays to a plan, or the reason why not -----------------------------------


class Triton(NamedTuple):
    kernels: Kernels
    is_interpreted: bool

    def run(self, a: Ranged) -> jax.Array:
        """Returns [B, T, H, w] in q's dtype."""
        T, width = a.q.shape[1], a.v.shape[-1]
        whole = self.kernels.whole

        def padded(x: jax.Array) -> jax.Array:
            """Pads tokens to whole blocks, and heads to the width of a power of two."""
            spare = [(0, 0), (0, -x.shape[1] % whole)] + [(0, 0)] * (x.ndim - 2)
            if x.ndim == 4:
                spare[-1] = (0, _wide(x.shape[-1]) - x.shape[-1])
            return jnp.pad(x, spare) if any(n for _, n in spare) else x

        arrays = map(padded, (a.q, a.k, a.v, a.first, a.stop))
        sinks = None if a.sinks is None else a.sinks.astype(jnp.float32)
        formula = Formula(a.scale, a.softcap, self.kernels, self.is_interpreted)
        out: Any = _attend(formula, *arrays, sinks)
        return out[:, :T, :, :width]


def _wide(width: int) -> int:
    """Returns the least power of two that a head fits into, and a tensor core's least."""
    return max(16, 1 << (width - 1).bit_length())


def plan(a: Ranged, env: Env) -> Triton | Refusal:
    dtypes = {x.dtype for x in (a.q, a.k, a.v)}
    if len(dtypes) > 1 or a.q.dtype not in (jnp.bfloat16, jnp.float16):
        return Refusal(f"it is for bfloat16 or float16, not {a.q.dtype}")
    widest = max(a.q.shape[-1], a.v.shape[-1])
    width = _wide(widest)
    if width > max(KERNELS):
        return Refusal(f"heads of {widest}: {max(KERNELS)} at most have a kernel")
    kernels = next(k for most, k in KERNELS.items() if width <= most)
    return Triton(kernels, env.is_interpreted)
