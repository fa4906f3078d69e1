"""Decode attention on a GPU: one new token per sequence against a cache of floats or codes.

    out_qh  =  sum_s w_qs v_sh / sum_s p_qs       p = exp(q k_s), w = p times v's scale

A decoder reads its whole cache for one token, so time is bytes over bandwidth, and codes
of 8 bits should take half of bfloat16's time. Triton, as flash-decoding does it: a program keeps
the running maximum, the sum and the weighted values of what it has read. Where there are too few
heads to occupy the GPU, what a sequence sees is shared by several programs, and a second kernel
merges their parts (`num_parts`). Blocks outside of what a sequence sees are not read.

Codes are multiplied as they are (triton_words.py) and scales applied to what comes out: k's to
the logits, v's to the weights. The maximum is that of log(p) + log(scale of v), so that
weights in float16 never exceed 1, whatever the scales are. Scales are read a block ahead. A
word of codes holds neighbours of a head, which become the same column of several planes;
queries are read in planes too.

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
from midtread.kernels.pallas_compat import (
    num_cores,
    pl,
    pltriton,
    result,
    triton_params,
)
from midtread.kernels.partition import as_function
from midtread.kernels.quantize.triton import magnitude
from midtread.numerics.formats import Format
from midtread.numerics.qarray import QArray

ROWS = 16  # query heads of a program, g of them real: the least for a tensor core
BLOCK = 64  # slots read at once
PROGRAMS = 256  # at most so many share contexts, or LONG ones with SHARE slots each
LONG, SHARE = 1024, 256
CORE_RATE = 18e3  # numbers that a multiprocessor of an H200 takes in a microsecond
MERGE = 3.5  # microseconds of a second kernel, seen on an H200
PARTS, WIDTH = 16, 32  # parts, and numbers of a head, that are merged at once
LOWEST = -1e30  # below every logit
LOG2E = np.float32(math.log2(math.e))  # a GPU's exponential is that of 2
FORMATS = ("int8", "float8_e4m3fn", "float8_e5m2", "int4")  # of a cache of codes
FLOATS = ("bfloat16", "float16")  # of a cache of floats


def num_parts(pairs: int, slots: int, numbers: int, cores: int) -> int:
    """Returns how many programs share the context of one head of one sequence.

    One, if the multiprocessor that has most to read then needs no longer than it would take to
    read an even share and merge. Otherwise as many as occupy the GPU, with a block each.

    Args:
        pairs: of a sequence and a head of the cache.
        slots: of the cache, all of which might be seen.
        numbers: of one slot of one head, keys and values. Codes are fewer bytes but take as
            long: int8 and bfloat16 were both read at 70 slots of 256 numbers a microsecond.
        cores: multiprocessors.
    """
    in_excess = -(-pairs // cores) - pairs / cores  # contexts more than an even share
    if in_excess * slots * numbers <= MERGE * CORE_RATE:
        return 1
    few, many = (programs // pairs for programs in (PROGRAMS, LONG))
    return max(1, min(max(few, min(many, slots // SHARE)), -(-slots // BLOCK)))


def _rounded(parts: int) -> int:
    """Rounds a number of parts up to what `_merge_body` reads at once."""
    if parts > PARTS:
        return -(-parts // PARTS) * PARTS
    return 1 << (parts - 1).bit_length()


def _body(
    first_ref, stop_ref, q_ref, *refs,
    fmt: Format | None, gain: float, block: int, slots: int, parts: int,
    softcap: float | None, has_sinks: bool, native: bool,
):  # fmt: skip
    """One part: q [g, h], k and v [S, h / P], each followed by its scales [S] for codes."""
    k_ref, v_ref = refs[:: 1 if fmt is None else 2][:2]
    num_planes = 1 if fmt is None else triton_words.num_planes(fmt)
    width = q_ref.shape[1] // num_planes
    low, high = first_ref[0], jnp.minimum(stop_ref[0], slots)
    begin, end = low // block, (high + block - 1) // block
    if parts > 1:
        share = (end - begin + parts - 1) // parts
        begin = begin + pl.program_id(2) * share
        end = jnp.minimum(begin + share, end)
    q, factor = _queries(q_ref, num_planes, width)
    if fmt is None:
        q, factor = [x.astype(k_ref.dtype) for x in q], 1.0
    factor = factor * gain

    def values(ref, at, inside):
        block = pltriton.load(ref.at[at, :], mask=inside[:, None], other=0)
        return [block] if fmt is None else triton_words.planes(block, fmt, native)

    def slots_of(i):
        """Block i's slots, and which of them are seen."""
        slot = i * block + lax.broadcasted_iota(jnp.int32, (block,), 0)
        return pl.ds(i * block, block), (slot >= low) & (slot < high)

    def scales(i):
        """Those of keys and of values in block i."""
        at, inside = slots_of(i)
        return [pltriton.load(ref.at[at], mask=inside, other=1.0).astype(jnp.float32) for ref in refs[1:4:2]]  # fmt: skip

    def body(i, carry):
        top, total, out, of_block = carry
        # Triton's pipeline is for what dots read, so scales are fetched ahead here.
        of_next = [] if fmt is None else scales(i + 1)
        at, inside = slots_of(i)
        keys = values(k_ref, at, inside)
        logits = sum(pltriton.dot(x, y.T).astype(jnp.float32) for x, y in zip(q, keys))
        logits = logits * factor
        shift = 0.0
        if fmt is not None:
            logits = logits * of_block[0][None, :]
            shift = jnp.log2(of_block[1])[None, :]
        if softcap is not None:
            cap = np.float32(softcap) * LOG2E
            logits = cap * jnp.tanh(logits / cap)
        logits = jnp.where(inside[None, :], logits, LOWEST)
        new = jnp.maximum(top, jnp.max(logits + shift, axis=1))
        fade = jnp.exp2(top - new)
        p = jnp.exp2(logits - new[:, None])
        weights = (p if fmt is None else p * of_block[1][None, :]).astype(q[0].dtype)
        added = [
            pltriton.dot(weights, v).astype(jnp.float32)
            for v in values(v_ref, at, inside)
        ]
        out = [o * fade[:, None] + a for o, a in zip(out, added)]
        return new, total * fade + jnp.sum(p, axis=1), out, of_next

    start = (
        jnp.full((ROWS,), LOWEST, jnp.float32),
        jnp.zeros((ROWS,), jnp.float32),
        [jnp.zeros((ROWS, width), jnp.float32)] * num_planes,
        [] if fmt is None else scales(begin),
    )
    top, total, out, _ = lax.fori_loop(begin, end, body, start)
    out_ref = refs[-1 if parts == 1 else -3]
    row, column = (lax.broadcasted_iota(jnp.int32, (ROWS, width), i) for i in (0, 1))
    inside = row < out_ref.shape[0]
    if parts == 1:
        sink = None
        if has_sinks:
            heads = lax.broadcasted_iota(jnp.int32, (ROWS,), 0)
            sink = pltriton.load(refs[-2].at[heads], mask=heads < out_ref.shape[0], other=0)  # fmt: skip
        out = _finished(top, total, out, sink)
    else:
        heads = lax.broadcasted_iota(jnp.int32, (ROWS,), 0)
        for ref, x in zip(refs[-2:], (top, total)):
            pltriton.store(ref.at[heads], x, mask=heads < out_ref.shape[0])
    for p in range(num_planes):
        at = row, column * num_planes + p
        pltriton.store(out_ref.at[at], out[p].astype(out_ref.dtype), mask=inside)


def _queries(q_ref, num_planes: int, width: int) -> tuple[list[jax.Array], jax.Array]:
    """ROWS rows of queries in planes, of which the reference has the first few, the others are
    zero: each row divided by a power of two so that it fits float16 (`triton_words.fitted`), and
    these powers [ROWS, 1]."""
    row, column = (lax.broadcasted_iota(jnp.int32, (ROWS, width), i) for i in (0, 1))
    exists = row < q_ref.shape[0]
    read = lambda p: pltriton.load(q_ref.at[row, column * num_planes + p], mask=exists, other=0)  # fmt: skip
    q = [read(p) for p in range(num_planes)]
    if num_planes == 1:
        return q, jnp.ones((ROWS, 1), jnp.float32)
    q = [x.astype(jnp.float32) for x in q]
    tops = [jnp.max(magnitude(x), axis=1) for x in q]
    biased = functools.reduce(jnp.maximum, tops) >> 23
    exponent = jnp.where(biased == 255, 1, biased - 126)  # of infinities and NaN, 1
    exponent = jnp.minimum(jnp.maximum(exponent, -100), 120)[:, None]
    power = lambda e: lax.bitcast_convert_type((e + 127) << 23, jnp.float32)
    return [(x * power(-exponent)).astype(jnp.float16) for x in q], power(exponent)


def _finished(top, total, out: list, sink) -> list:
    """What was summed over all slots, divided by its weight."""
    if sink is not None:  # a logit that takes weight and has no value
        sink = sink * LOG2E
        new = jnp.maximum(top, sink)
        fade = jnp.exp2(top - new)
        total, out = total * fade + jnp.exp2(sink - new), [o * fade[:, None] for o in out]  # fmt: skip
    return [o / total[:, None] for o in out]


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
    sink = sinks_ref[0][:] if sinks_ref else None
    out_ref[:, :] = _finished(top, total, [out], sink)[0].astype(out_ref.dtype)


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
    parts: int | None = None,
    block: int = BLOCK,
    warps: int | None = None,
    stages: int = 3,
    interpret: bool = False,
) -> jax.Array:
    """[B, K, g, h] in `dtype`: softmax(gain q k / sqrt(h)) v over the slots from `first` to
    before `stop`.

    Args:
        k, v: ([B, S, K, h] codes, [B, S, K or 1] scales in float32), or floats in q's
            dtype and None, and then `fmt` is None.
        parts: programs that share a context; None: as `num_parts` says.
        warps: of a program; None: 2 for floats where every multiprocessor has a context or more
            to itself (which saves 0.7 of 11.5 us), else 4.
    """
    batch, heads, group, width = q_BKgh.shape
    slots, planes = k[0].shape[1], 1
    if fmt is not None:
        planes = triton_words.num_planes(fmt)
        k, v = ((triton_words.as_words(codes, fmt), s) for codes, s in (k, v))
    if parts is None:
        parts = num_parts(batch * heads, slots, 2 * width, num_cores())
    parts = _rounded(parts)
    if warps is None:
        is_full = parts == 1 and batch * heads >= num_cores()
        warps = 2 if fmt is None and is_full else 4
    rows = 1 << (group - 1).bit_length()  # a block's extents are powers of two
    padded = -(-slots // block) * block
    one = lambda *block: pl.BlockSpec((None, None, *block), lambda b, j, i: (b, j, *[0] * len(block)))  # fmt: skip
    cache = pl.BlockSpec((None, padded, None, width // planes), lambda b, j, i: (b, 0, j, 0))  # fmt: skip

    def of_scale(s):
        shared = s.shape[2] == 1
        return pl.BlockSpec((None, padded, None), lambda b, j, i: (b, 0, 0 if shared else j))  # fmt: skip

    args = [first_B, stop_B, q_BKgh]
    specs = [pl.BlockSpec((1,), lambda b, j, i: (b,))] * 2 + [one(group, width)]
    for codes, scale in (k, v):
        args += [codes] if scale is None else [codes, scale]
        specs += [cache] if scale is None else [cache, of_scale(scale)]
    sinks = []
    if sinks_Kg is not None:
        sinks = [jnp.pad(sinks_Kg.astype(jnp.float32), ((0, 0), (0, rows - group)))]
    of_sinks = [pl.BlockSpec((None, rows), lambda b, j, i: (j, 0))] * len(sinks)
    own = lambda *block: pl.BlockSpec((None, None, None, *block), lambda b, j, i: (b, j, i, *[0] * len(block)))  # fmt: skip
    lead, is_whole = (batch, heads, parts), parts == 1
    written = [((rows, width), dtype)]
    if not is_whole:
        written = [((rows, width), jnp.float32), *[((rows,), jnp.float32)] * 2]
    out = pl.pallas_call(
        functools.partial(
            _body, fmt=fmt, gain=float(gain / math.sqrt(width) * LOG2E), block=block,
            slots=slots, parts=parts, softcap=softcap, has_sinks=bool(sinks),
            native=not interpret,
        ),
        name="decode_attention",
        grid=lead,
        in_specs=specs + of_sinks * is_whole,
        out_specs=[own(*shape) for shape, _ in written],
        out_shape=[result((*lead, *shape), kind, q_BKgh) for shape, kind in written],
        compiler_params=triton_params(warps, stages),
        interpret=interpret,
    )(*args, *sinks * is_whole)  # fmt: skip
    if is_whole:
        return out[0][:, :, 0, :group]
    return _merge(out, sinks, of_sinks, dtype, interpret)[:, :, :group]


def _merge(parts, sinks, of_sinks, dtype, interpret: bool) -> jax.Array:
    """The parts [B, K, N, g, h] of a context, their tops and sums, as one [B, K, g, h]."""
    batch, heads, num, rows, width = parts[0].shape
    cut = min(width, WIDTH)
    of_part = pl.BlockSpec((None, None, num, rows, cut), lambda b, j, i: (b, j, 0, 0, i))  # fmt: skip
    of_head = pl.BlockSpec((None, None, num, rows), lambda b, j, i: (b, j, 0, 0))
    return pl.pallas_call(
        functools.partial(_merge_body, chunk=min(num, PARTS)),
        name="merge_parts",
        grid=(batch, heads, width // cut),
        in_specs=[of_part, of_head, of_head, *of_sinks],
        out_specs=pl.BlockSpec((None, None, rows, cut), lambda b, j, i: (b, j, 0, i)),
        out_shape=result((batch, heads, rows, width), dtype, parts[0]),
        compiler_params=triton_params(4, 1),
        interpret=interpret,
    )(*parts, *sinks)


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
