"""Decode attention on a GPU: one new token per sequence against a cache of 8- or 4-bit codes.

    out_qh  =  sum_s w_qs v_sh / sum_s p_qs       p = exp(q k_s), w = p times v's scale

A decoder reads its whole cache for one token, so time is bytes over bandwidth, and codes
of 8 bits should take half of bfloat16's time. Triton, as flash-decoding does it: the
context is split over programs, each keeps the running maximum, the sum and the weighted
values of its part, and XLA merges the parts.

Codes are multiplied as they are (triton_words.py) and scales applied to what comes out: k's to
the logits, v's to the weights. The maximum is that of log(p) + log(scale of v), so that
weights in float16 never exceed 1, whatever the scales are.

B sequences, K heads of the cache, each read by g query heads, S slots, h numbers a head.
"""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from midtread.kernels import triton_words
from midtread.kernels.candidates import Refusal
from midtread.kernels.decode_attention import Cached
from midtread.kernels.environment import Env
from midtread.kernels.pallas_compat import pl, pltriton, result, triton_params
from midtread.kernels.partition import as_function
from midtread.numerics.formats import Format

ROWS = 16  # query heads of a program, g of them real: the least for a tensor core
BLOCK = 64  # slots read at once
PROGRAMS = 1024  # at least so many, if the context is long enough
LOWEST = -1e30  # below every logit
FORMATS = ("int8", "float8_e4m3fn", "float8_e5m2", "int4")  # of a cache


def split_length(batch: int, heads: int, length: int, programs: int, block: int) -> int:
    """Slots of one program."""
    parts = max(1, min(programs // (batch * heads), -(-length // block)))
    return -(-length // (parts * block)) * block


def _body(
    length_ref, q_ref, qs_ref, k_ref, *refs, fmt: Format | None, block, slots, native
):
    """q [P, ROWS, h / P], qs [ROWS], k and v [part, h / P], scales [part]."""
    is_coded = fmt is not None
    if is_coded:
        ks_ref, v_ref, vs_ref = refs[:3]
    else:
        (v_ref,) = refs[:1]
    out_ref, top_ref, sum_ref = refs[-3:]
    num_planes, _, width = q_ref.shape
    part = k_ref.shape[0]
    first = pl.program_id(2) * part
    length = jnp.minimum(length_ref[0], slots)
    count = jnp.clip(length - first, 0, part)
    q = [q_ref[p] for p in range(num_planes)]
    qs = qs_ref[:][:, None]

    def values(ref, at, inside):
        block = pltriton.load(ref.at[at, :], mask=inside[:, None], other=0)
        return triton_words.planes(block, fmt, native) if is_coded else [block]

    def scale(ref, at, inside):
        factors = pltriton.load(ref.at[at], mask=inside, other=1.0)
        return factors.astype(jnp.float32)[None, :]

    def body(i, carry):
        top, total, out = carry
        at = pl.ds(i * block, block)
        inside = i * block + lax.broadcasted_iota(jnp.int32, (block,), 0) < count
        keys = values(k_ref, at, inside)
        logits = sum(pltriton.dot(x, y.T).astype(jnp.float32) for x, y in zip(q, keys))
        logits = logits * qs
        shift = 0.0
        if is_coded:
            logits = logits * scale(ks_ref, at, inside)
            shift = jnp.log2(scale(vs_ref, at, inside))
        logits = jnp.where(inside[None, :], logits, LOWEST)
        new = jnp.maximum(top, jnp.max(logits + shift, axis=1))
        fade = jnp.exp2(top - new)
        p = jnp.exp2(logits - new[:, None])
        weights = jnp.exp2(logits + shift - new[:, None]).astype(q[0].dtype)
        added = [
            pltriton.dot(weights, v).astype(jnp.float32)
            for v in values(v_ref, at, inside)
        ]
        out = [o * fade[:, None] + a for o, a in zip(out, added)]
        return new, total * fade + jnp.sum(p, axis=1), out

    start = (
        jnp.full((ROWS,), LOWEST, jnp.float32),
        jnp.zeros((ROWS,), jnp.float32),
        [jnp.zeros((ROWS, width), jnp.float32)] * num_planes,
    )
    top, total, out = lax.fori_loop(0, (count + block - 1) // block, body, start)
    top_ref[:], sum_ref[:] = top, total
    for p in range(num_planes):
        out_ref[p] = out[p]


def decode_attention(
    q_BKgh: jax.Array,
    k: tuple[jax.Array, jax.Array | None],
    v: tuple[jax.Array, jax.Array | None],
    lengths_B: jax.Array,
    fmt: Format | None,
    *,
    gain: float = 1.0,
    block: int = BLOCK,
    programs: int = PROGRAMS,
    warps: int = 4,
    stages: int = 3,
    interpret: bool = False,
) -> jax.Array:
    """[B, K, g, h] in float32: softmax(gain q k / sqrt(h)) v over the first `lengths` slots.

    Args:
        k, v: ([B, S, K, h] codes, [B, S, K or 1] scales in float32), or values in q's
            dtype and None, and then `fmt` is None.
    """
    batch, heads, group, width = q_BKgh.shape
    slots = k[0].shape[1]
    q = jnp.pad(q_BKgh, ((0, 0), (0, 0), (0, ROWS - group), (0, 0)))
    planes = 1
    if fmt is None:
        q, qs = q.astype(k[0].dtype), jnp.ones((*q.shape[:3], 1), jnp.float32)
    else:
        planes = triton_words.num_planes(fmt)
        q, qs = triton_words.fitted(q)
        k, v = ((triton_words.as_words(codes, fmt), s) for codes, s in (k, v))
    q = q.reshape(batch, heads, ROWS, width // planes, planes)
    q = q.transpose(0, 1, 4, 2, 3)
    qs = qs[..., 0] * np.float32(gain * math.log2(math.e) / math.sqrt(width))

    part = split_length(batch, heads, slots, programs, block)
    num_parts = -(-slots // part)
    one = lambda *block: pl.BlockSpec((None, None, *block), lambda b, j, i: (b, j, *[0] * len(block)))  # fmt: skip
    cache = pl.BlockSpec((None, part, None, width // planes), lambda b, j, i: (b, i, j, 0))  # fmt: skip

    def of_scale(s):
        shared = s.shape[2] == 1
        return pl.BlockSpec((None, part, None), lambda b, j, i: (b, i, 0 if shared else j))  # fmt: skip

    args = [lengths_B, q, qs]
    specs = [pl.BlockSpec((1,), lambda b, j, i: (b,))]
    specs += [one(planes, ROWS, width // planes), one(ROWS)]
    for codes, scale in (k, v):
        args += [codes] if scale is None else [codes, scale]
        specs += [cache] if scale is None else [cache, of_scale(scale)]
    parts = lambda *block: pl.BlockSpec((None, None, None, *block), lambda b, j, i: (b, j, i, *[0] * len(block)))  # fmt: skip
    lead = (batch, heads, num_parts)
    out, top, total = pl.pallas_call(
        functools.partial(
            _body, fmt=fmt, block=block, slots=slots, native=not interpret
        ),
        grid=lead,
        in_specs=specs,
        out_specs=[parts(planes, ROWS, width // planes), parts(ROWS), parts(ROWS)],
        out_shape=[
            result((*lead, planes, ROWS, width // planes), jnp.float32, q),
            result((*lead, ROWS), jnp.float32, q),
            result((*lead, ROWS), jnp.float32, q),
        ],
        compiler_params=triton_params(warps, stages),
        interpret=interpret,
    )(*args)
    return _merge(out, top, total, group)


def _merge(out, top, total, group: int) -> jax.Array:
    """The parts [B, K, parts, P, ROWS, h / P] of a context as one [B, K, g, h]."""
    out, top, total = out[:, :, :, :, :group], top[..., :group], total[..., :group]
    share = jnp.exp2(top - jnp.max(top, axis=2, keepdims=True))
    out = jnp.sum(out * share[:, :, :, None, :, None], axis=2)
    out = out / jnp.sum(total * share, axis=2)[:, :, None, :, None]
    out = out.transpose(0, 1, 3, 4, 2)  # planes are neighbours
    return out.reshape(*out.shape[:3], -1)


# --- from a model's arrays to a plan, or the reason why not -----------------------------------


class Triton(NamedTuple):
    is_interpreted: bool

    def run(self, a: Cached) -> jax.Array:
        """[B, 1, H, h] in q's dtype."""
        (batch, _, heads, width), of_cache = a.q.shape, a.k.shape[2]
        grouped = a.q.reshape(batch, of_cache, heads // of_cache, width)
        scales = [x.scale[..., 0].astype(jnp.float32) for x in (a.k, a.v)]
        per_head = scales[0].shape[2] != 1, scales[1].shape[2] != 1
        call = _call(a.k.format, per_head, a.gain, self.is_interpreted)
        out = call(grouped, a.k.qvalue, scales[0], a.v.qvalue, scales[1], a.lengths)
        return out.reshape(a.q.shape).astype(a.q.dtype)


def plan(a: Cached, env: Env) -> Triton | Refusal:
    q, k, v = a.q, a.k, a.v
    for x in (k, v):
        name = x.format.name
        if name not in FORMATS:
            return Refusal(f"{name} caches have no kernel: {', '.join(FORMATS)} have")
        if x.zero_point is not None or x.global_scale is not None:
            return Refusal("its cache has zero points or scales of two levels")
        if x.scale.shape[:2] != x.shape[:2] or x.scale.shape[3] != 1:
            what = f"scales {x.scale.shape} are not one per token"
            return Refusal(f"{what}, or per head of it")
    (_, tokens, heads, width), of_cache = q.shape, k.shape[2]
    if k.shape != v.shape or k.format is not v.format:
        return Refusal("keys and values differ in width or format")
    if tokens != 1:
        return Refusal(f"{tokens} tokens at once: the kernel is for one")
    if heads // of_cache > ROWS:
        what = f"{heads // of_cache} query heads read one head"
        return Refusal(f"{what}: {ROWS} at most can")
    least = 16 * triton_words.num_planes(
        k.format
    )  # a tensor core's least, of each plane
    if width & (width - 1) or not least <= width <= 256:
        what = f"heads of {width} in {k.format.name}"
        return Refusal(f"{what}: powers of two from {least} to 256 have a kernel")
    return Triton(env.is_interpreted)


@functools.cache
def _call(
    fmt: Format, per_head: tuple[bool, bool], gain: float, interpret: bool
) -> Callable:
    def plain(q, k, ks, v, vs, lengths):
        k, v = (x.astype(jnp.float32) * s[..., None] for x, s in ((k, ks), (v, vs)))
        logits = jnp.einsum("bkgh,bskh->bkgs", q.astype(jnp.float32), k)
        inside = jnp.arange(k.shape[1]) < lengths[:, None]
        logits = logits * (gain * q.shape[-1] ** -0.5)
        logits = jnp.where(inside[:, None, None], logits, LOWEST)
        return jnp.einsum("bkgs,bskh->bkgh", jax.nn.softmax(logits), v)

    def kernel(q, k, ks, v, vs, lengths):
        how = {"gain": gain, "interpret": interpret}
        return decode_attention(q, (k, ks), (v, vs), lengths, fmt, **how)

    ks, vs = ("b s k" if own else f"b s {one}" for own, one in zip(per_head, "xy"))
    axes = f"b k g h, b s k h, {ks}, b s k h, {vs}, b -> b k g h"
    whole = ("g", "h", "s", *(one for own, one in zip(per_head, "xy") if not own))
    return as_function(kernel, plain, axes, whole)
