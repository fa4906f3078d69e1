"""Decode attention on a GPU: one new token per sequence against a cache of floats or codes.

    out_qh  =  sum_s w_qs v_sh / sum_s p_qs       p = exp(q k_s), w = p times v's scale

A decoder reads its whole cache for one token, so time is bytes over bandwidth, and codes
of 8 bits should take half of bfloat16's time. Triton, as flash-decoding does it: the
context is split over programs, each keeps the running maximum, the sum and the weighted
values of its part, and a second kernel merges the parts. Parts that lie outside of what a
sequence sees are not read.

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
from midtread.numerics.qarray import QArray

ROWS = 16  # query heads of a program, g of them real: the least for a tensor core
BLOCK = 64  # slots read at once
PROGRAMS = 1024  # at least so many, if the context is long enough
PARTS, WIDTH = 16, 32  # parts, and numbers of a head, that are merged at once
LOWEST = -1e30  # below every logit
LOG2E = np.float32(math.log2(math.e))  # a GPU's exponential is that of 2
FORMATS = ("int8", "float8_e4m3fn", "float8_e5m2", "int4")  # of a cache of codes
FLOATS = ("bfloat16", "float16")  # of a cache of floats


def split_length(batch: int, heads: int, length: int, programs: int, block: int) -> int:
    """Slots of one program."""
    parts = max(1, min(programs // (batch * heads), -(-length // block)))
    return -(-length // (parts * block)) * block


def _count_parts(slots: int, part: int) -> int:
    """Parts of a context, rounded up to what `_merge_body` reads at once."""
    parts = -(-slots // part)
    if parts > PARTS:
        return -(-parts // PARTS) * PARTS
    return 1 << (parts - 1).bit_length()


def _body(
    first_ref, stop_ref, q_ref, *refs,
    fmt: Format | None, gain: float, block: int, slots: int, softcap: float | None,
    native: bool,
):  # fmt: skip
    """One part: q [P, ROWS, h / P] and for codes its factors qs [ROWS], k and v [part, h / P],
    each followed by its scales [part] for codes."""
    is_coded = fmt is not None
    if is_coded:
        qs_ref, k_ref, ks_ref, v_ref, vs_ref = refs[:5]
    else:
        k_ref, v_ref = refs[:2]
    out_ref, top_ref, sum_ref = refs[-3:]
    num_planes, num_rows, width = q_ref.shape
    part = k_ref.shape[0]
    begin = pl.program_id(2) * part
    low = jnp.clip(first_ref[0] - begin, 0, part)
    high = jnp.clip(jnp.minimum(stop_ref[0], slots) - begin, 0, part)
    q = [q_ref[p] for p in range(num_planes)] if num_rows == ROWS else [_padded(q_ref)]
    factor = qs_ref[:][:, None] * gain if is_coded else gain

    def values(ref, at, inside):
        block = pltriton.load(ref.at[at, :], mask=inside[:, None], other=0)
        return triton_words.planes(block, fmt, native) if is_coded else [block]

    def scale(ref, at, inside):
        factors = pltriton.load(ref.at[at], mask=inside, other=1.0)
        return factors.astype(jnp.float32)[None, :]

    def body(i, carry):
        top, total, out = carry
        at = pl.ds(i * block, block)
        slot = i * block + lax.broadcasted_iota(jnp.int32, (block,), 0)
        inside = (slot >= low) & (slot < high)
        keys = values(k_ref, at, inside)
        logits = sum(pltriton.dot(x, y.T).astype(jnp.float32) for x, y in zip(q, keys))
        logits = logits * factor
        shift = 0.0
        if is_coded:
            logits = logits * scale(ks_ref, at, inside)
            shift = jnp.log2(scale(vs_ref, at, inside))
        if softcap is not None:
            cap = np.float32(softcap) * LOG2E
            logits = cap * jnp.tanh(logits / cap)
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
    top, total, out = lax.fori_loop(
        low // block, (high + block - 1) // block, body, start
    )
    top_ref[:], sum_ref[:] = top, total
    for p in range(num_planes):
        out_ref[p] = out[p]


def _padded(q_ref) -> jax.Array:
    """ROWS rows, of which the reference has the first few; the others are zero."""
    # This is row 0, but Pallas must not know: it refuses to read beyond the end.
    start = pl.program_id(0) * 0
    exists = lax.broadcasted_iota(jnp.int32, (ROWS, 1), 0) < q_ref.shape[1]
    return pltriton.load(q_ref.at[0, pl.ds(start, ROWS), :], mask=exists, other=0)


def _merge_body(part_ref, top_ref, sum_ref, *refs, chunk: int):
    """All parts [N, g, w] of one head, and the sinks [g] if there are any, as one [g, w]."""
    *sinks_ref, out_ref = refs
    parts, rows, width = part_ref.shape

    def body(i, carry):
        top, total, out = carry
        at = pl.ds(i * chunk, chunk)
        tops = top_ref[at, :]
        new = jnp.maximum(top, jnp.max(tops, axis=0))
        fade, share = jnp.exp2(top - new), jnp.exp2(tops - new[None, :])
        out = out * fade[:, None] + jnp.sum(
            part_ref[at, :, :] * share[:, :, None], axis=0
        )
        return new, total * fade + jnp.sum(sum_ref[at, :] * share, axis=0), out

    start = (
        jnp.full((rows,), LOWEST, jnp.float32),
        jnp.zeros((rows,), jnp.float32),
        jnp.zeros((rows, width), jnp.float32),
    )
    top, total, out = lax.fori_loop(0, parts // chunk, body, start)
    if sinks_ref:  # a logit that takes weight and has no value
        sink = sinks_ref[0][:] * LOG2E
        new = jnp.maximum(top, sink)
        fade = jnp.exp2(top - new)
        total, out = total * fade + jnp.exp2(sink - new), out * fade[:, None]
    out_ref[:, :] = (out / total[:, None]).astype(out_ref.dtype)


def decode_attention(
    q_BKgh: jax.Array,
    k: tuple[jax.Array, jax.Array | None],
    v: tuple[jax.Array, jax.Array | None],
    first_B: jax.Array,
    stop_B: jax.Array,
    sinks_Kg: jax.Array | None = None,
    *,
    fmt: Format | None,
    dtype=jnp.float32,
    gain: float = 1.0,
    softcap: float | None = None,
    block: int = BLOCK,
    programs: int = PROGRAMS,
    warps: int = 4,
    stages: int = 3,
    interpret: bool = False,
) -> jax.Array:
    """[B, K, g, h] in `dtype`: softmax(gain q k / sqrt(h)) v over the slots from `first` to
    before `stop`.

    Args:
        k, v: ([B, S, K, h] codes, [B, S, K or 1] scales in float32), or floats in q's
            dtype and None, and then `fmt` is None.
    """
    batch, heads, group, width = q_BKgh.shape
    slots = k[0].shape[1]
    q, planes, args = q_BKgh, 1, [first_B, stop_B]
    if fmt is not None or interpret:
        q = jnp.pad(q, ((0, 0), (0, 0), (0, ROWS - group), (0, 0)))
    if fmt is None:
        args.append(q.astype(k[0].dtype)[:, :, None])
    else:
        planes = triton_words.num_planes(fmt)
        q, qs = triton_words.fitted(q)
        k, v = ((triton_words.as_words(codes, fmt), s) for codes, s in (k, v))
        q = q.reshape(batch, heads, ROWS, width // planes, planes)
        args += [q.transpose(0, 1, 4, 2, 3), qs[..., 0]]

    part = split_length(batch, heads, slots, programs, block)
    lead = (batch, heads, _count_parts(slots, part))
    one = lambda *block: pl.BlockSpec((None, None, *block), lambda b, j, i: (b, j, *[0] * len(block)))  # fmt: skip
    cache = pl.BlockSpec((None, part, None, width // planes), lambda b, j, i: (b, i, j, 0))  # fmt: skip

    def of_scale(s):
        shared = s.shape[2] == 1
        return pl.BlockSpec((None, part, None), lambda b, j, i: (b, i, 0 if shared else j))  # fmt: skip

    specs = [pl.BlockSpec((1,), lambda b, j, i: (b,))] * 2
    specs += [one(*x.shape[2:]) for x in args[2:]]
    for codes, scale in (k, v):
        args += [codes] if scale is None else [codes, scale]
        specs += [cache] if scale is None else [cache, of_scale(scale)]
    own = lambda *block: pl.BlockSpec((None, None, None, *block), lambda b, j, i: (b, j, i, *[0] * len(block)))  # fmt: skip
    parts, top, total = pl.pallas_call(
        functools.partial(
            _body, fmt=fmt, gain=float(gain / math.sqrt(width) * LOG2E),
            block=block, slots=slots, softcap=softcap, native=not interpret,
        ),
        grid=lead,
        in_specs=specs,
        out_specs=[own(planes, ROWS, width // planes), own(ROWS), own(ROWS)],
        out_shape=[
            result((*lead, planes, ROWS, width // planes), jnp.float32, q),
            result((*lead, ROWS), jnp.float32, q),
            result((*lead, ROWS), jnp.float32, q),
        ],
        compiler_params=triton_params(warps, stages),
        interpret=interpret,
    )(*args)  # fmt: skip
    return _merge(parts, top, total, sinks_Kg, group, dtype, interpret)


def _merge(parts, top, total, sinks, group: int, dtype, interpret: bool) -> jax.Array:
    """The parts [B, K, N, P, ROWS, h / P] of a context as one [B, K, g, h]."""
    batch, heads, num, planes, _, width = parts.shape
    rows = 1 << (group - 1).bit_length()  # a block's extents are powers of two
    cut = min(width, WIDTH)
    count = width // cut  # programs of a plane
    of_plane = pl.BlockSpec(
        (None, None, num, None, rows, cut),
        lambda b, j, i: (b, j, 0, i // count, 0, i % count),
    )
    of_head = pl.BlockSpec((None, None, num, rows), lambda b, j, i: (b, j, 0, 0))
    args, specs = [parts, top, total], [of_plane, of_head, of_head]
    if sinks is not None:
        args.append(jnp.pad(sinks.astype(jnp.float32), ((0, 0), (0, rows - group))))
        specs.append(pl.BlockSpec((None, rows), lambda b, j, i: (j, 0)))
    out = pl.pallas_call(
        functools.partial(_merge_body, chunk=min(num, PARTS)),
        grid=(batch, heads, planes * count),
        in_specs=specs,
        out_specs=pl.BlockSpec(
            (None, None, None, rows, cut),
            lambda b, j, i: (b, j, i // count, 0, i % count),
        ),
        out_shape=result((batch, heads, planes, rows, width), dtype, parts),
        compiler_params=triton_params(4, 1),
        interpret=interpret,
    )(*args)
    out = out[:, :, :, :group].transpose(0, 1, 3, 4, 2)  # planes are neighbours
    return out.reshape(*out.shape[:3], -1)


# --- from a model's arrays to a plan, or the reason why not -----------------------------------


class Triton(NamedTuple):
    is_interpreted: bool

    def run(self, a: Cached) -> jax.Array:
        """[B, 1, H, h] in q's dtype."""
        (batch, _, heads, width), of_cache = a.q.shape, a.k.shape[2]
        grouped = a.q.reshape(batch, of_cache, heads // of_cache, width)
        arrays, names = [grouped], ["b k g h"]
        for x, other in ((a.k, "x"), (a.v, "y")):
            if isinstance(x, QArray):
                scale = x.scale[..., 0].astype(jnp.float32)
                arrays += [x.qvalue, scale]
                names += ["b s k h", f"b s {'k' if scale.shape[2] != 1 else other}"]
            else:
                arrays, names = [*arrays, x], [*names, "b s k h"]
        arrays, names = [*arrays, a.first, a.stop], [*names, "b", "b"]
        if a.sinks is not None:
            arrays.append(a.sinks.reshape(grouped.shape[1:3]))
            names.append("k g")
        fmt = a.k.format if isinstance(a.k, QArray) else None
        formula = a.gain, a.softcap, a.q.dtype
        call = _call(fmt, tuple(names), *formula, self.is_interpreted)
        return call(*arrays).reshape(a.q.shape)


def plan(a: Cached, env: Env) -> Triton | Refusal:
    q, k, v = a.q, a.k, a.v
    for x in (k, v):
        if reason := _why_not_cache(x):
            return Refusal(reason)
    (_, tokens, heads, width), of_cache = q.shape, k.shape[2]
    if k.shape != v.shape or _name(k) != _name(v):
        return Refusal("keys and values differ in width or format")
    if tokens != 1:
        return Refusal(f"{tokens} tokens at once: the kernel is for one")
    if heads // of_cache > ROWS:
        what = f"{heads // of_cache} query heads read one head"
        return Refusal(f"{what}: {ROWS} at most can")
    planes = triton_words.num_planes(k.format) if isinstance(k, QArray) else 1
    least = 16 * planes  # a tensor core's least, of each plane
    if width & (width - 1) or not least <= width <= 256:
        what = f"heads of {width} in {_name(k)}"
        return Refusal(f"{what}: powers of two from {least} to 256 have a kernel")
    return Triton(env.is_interpreted)


def _name(x: jax.Array | QArray) -> str:
    return x.format.name if isinstance(x, QArray) else x.dtype.name


def _why_not_cache(x: jax.Array | QArray) -> str | None:
    if not isinstance(x, QArray):
        names = ", ".join(FLOATS)
        return None if _name(x) in FLOATS else f"{_name(x)} caches have no kernel: {names} have"  # fmt: skip
    if x.format.name not in FORMATS:
        return f"{x.format.name} caches have no kernel: {', '.join(FORMATS)} have"
    if x.zero_point is not None or x.global_scale is not None:
        return "its cache has zero points or scales of two levels"
    if x.scale.shape[:2] != x.shape[:2] or x.scale.shape[3] != 1:
        return f"scales {x.scale.shape} are not one per token, or per head of it"
    return None


@functools.cache
def _call(
    fmt: Format | None,
    names: tuple[str, ...],
    gain: float,
    softcap: float | None,
    dtype: np.dtype,
    interpret: bool,
) -> Callable:
    """The kernel as a function of q, k, v, each with its scale where there are codes, first,
    stop, and sinks where `names` has them."""

    def apart(args):
        q, *rest = args
        size = 1 if fmt is None else 2
        k, v, rest = rest[:size], rest[size : 2 * size], rest[2 * size :]
        pair = lambda x: (x[0], None) if fmt is None else tuple(x)
        return q, pair(k), pair(v), *rest

    def plain(*args):
        q, k, v, first, stop, *sinks = apart(args)
        wide = lambda x, scale: x.astype(jnp.float32) * (1 if scale is None else scale[..., None])  # fmt: skip
        k, v = wide(*k), wide(*v)
        logits = jnp.einsum("bkgh,bskh->bkgs", q.astype(jnp.float32), k)
        logits = logits * (gain * q.shape[-1] ** -0.5)
        if softcap is not None:
            logits = softcap * jnp.tanh(logits / softcap)
        slots = jnp.arange(k.shape[1])
        inside = (slots >= first[:, None]) & (slots < stop[:, None])
        logits = jnp.where(inside[:, None, None], logits, LOWEST)
        sink = [jnp.broadcast_to(s.astype(jnp.float32)[..., None], (*logits.shape[:3], 1)) for s in sinks]  # fmt: skip
        weights = jax.nn.softmax(jnp.concatenate([logits, *sink], -1))
        out = jnp.einsum("bkgs,bskh->bkgh", weights[..., : k.shape[1]], v)
        return out.astype(dtype)

    def kernel(*args):
        options = {"gain": gain, "softcap": softcap, "interpret": interpret}
        return decode_attention(*apart(args), fmt=fmt, dtype=dtype, **options)

    axes = f"{', '.join(names)} -> b k g h"
    whole = ("g", "h", "s", *(x for x in "xy" if f"b s {x}" in names))
    return as_function(kernel, plain, axes, whole)
