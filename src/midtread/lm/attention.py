"""Attention: which earlier tokens each token looks at, and what it takes from them.

    out = softmax(softcap(scale q k^T)) v       over the keys that each query sees

What a query sees is a range of keys (`Seen`): from where its document begins, or its
window, to itself; in a cache, from the first slot or the window's to its own. Ranges are
two numbers a query, where a mask is as many as there are keys, so documents packed into a
row stay apart in every implementation. `attend` has these, and takes the first that can:

    decode      NVIDIA, one query against a cache       kernels/decode_attention/triton.py
    flash       Hopper, documents, soft caps, sinks     kernels/attention/triton.py
    tokamax     Hopper, ranges, soft caps               the package tokamax, if installed
    cudnn       NVIDIA, bfloat16; documents as a mask   jax.nn.dot_product_attention
    plain       the formula as it stands, where its logits are one block, or where a rule
                quantizes them: the only one whose matmuls a provider can see
    blockwise   anything, anywhere                      lm/blockwise.py

All compute the same up to rounding: in float32 within 1e-5 of the plain formula, in
bfloat16 within 2e-2 of the largest value (tests/lm/test_attention.py). The key `attention`
insists on one of them. They are candidates as kernels are (kernels/candidates.py): each plans
or refuses, so what one cannot take goes to the next, and `midtread explain` prints the reasons.

Letters: B batch, T queries, S keys, D emb_dim, H query heads, K kv heads, G = H / K,
h head_dim.
"""

import dataclasses
import functools
import importlib.util
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from midtread.kernels import choose
from midtread.kernels.attention import LOWEST, SAVED, Ranged
from midtread.kernels.candidates import Candidate, Choice, Refusal, first
from midtread.kernels.decode_attention import Cached
from midtread.kernels.environment import Env, here
from midtread.kernels.layout import SYMBOLIC, is_static
from midtread.kernels.pending import Pending
from midtread.kernels.write_cache import Token
from midtread.lm import blockwise, rope
from midtread.lm import cache as kv
from midtread.lm.config import Model, UsageError
from midtread.lm.layers import (
    Linear,
    collect_in_a_step,
    cut,
    norm,
    side_by_side,
    vector,
)
from midtread.model.provider import get_current_rule
from midtread.model.running import disable_interceptions
from midtread.numerics.qarray import QArray
from midtread.ops import witness

FEW = 128  # queries: fewer do not fill a kernel's block
NO_SINKS = "it has no sinks"
ALONE = "it runs on one device, and XLA cannot partition it"
OF_RULES = "a rule quantizes attention's matmuls, which only the plain formula shows"


# --- what is seen -----------------------------------------------------------------------------


class Place(NamedTuple):
    """Where each token of a batch stands."""

    positions: jax.Array  # [B, T] in its document
    starts: jax.Array | None = None  # [B, T] where in the row its document begins
    is_local: jax.Array | None = None  # [] whether this layer of a scan has a window


def document_starts(segments: jax.Array) -> jax.Array:
    """Where each token's document begins, from which document it belongs to, both [B T].

    A document is a run of equal numbers.

    >>> document_starts(jnp.array([[1, 1, 2, 2, 2, 0]]))
    Array([[0, 0, 2, 2, 2, 5]], dtype=int32)
    """
    T = segments.shape[1]
    index = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), segments.shape)
    begins = jnp.pad(segments[:, 1:] != segments[:, :-1], ((0, 0), (1, 0)))
    return jax.lax.cummax(jnp.where(begins, index, 0), axis=1)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["first", "stop"],
    meta_fields=["is_causal", "is_packed", "window"],
)
@dataclasses.dataclass(frozen=True)
class Seen:
    """The keys first <= s < stop that each query [B, T] sees; it sees one at least."""

    first: jax.Array
    stop: jax.Array
    is_causal: bool = False  # as many keys as queries, and stop is the query's next
    is_packed: bool = False  # first depends on more than the window
    window: int | None = None

    def mask(self, S: int) -> jax.Array:
        """The same as booleans [B, T, S]."""
        slots = jnp.arange(S)
        return (slots >= self.first[..., None]) & (slots < self.stop[..., None])


def seen_by(
    place: Place, cache: Any = None, window: int | jax.Array | None = None
) -> Seen:
    """What each token sees: its document up to itself, or the cache up to its slot.

    Args:
        window: tokens that it looks at, itself among them; None: all before it. An array
            where layers of a scan differ.
    """
    index = place.positions.astype(jnp.int32)
    if cache is None:
        T = place.positions.shape[1]
        index = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), index.shape)
    first = jnp.zeros_like(index)
    is_packed = cache is None and place.starts is not None
    if is_packed:
        first = place.starts
    if window is not None:
        first = jnp.maximum(first, index - (window - 1))
    if isinstance(window, jax.Array):  # known when it runs: ranges say it, not a number
        return Seen(first, index + 1, cache is None, is_packed=True)
    return Seen(first, index + 1, cache is None, is_packed, window)


# --- the formula ------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of `attend`: what an implementation decides on, and runs."""

    q: jax.Array
    k: jax.Array | QArray
    v: jax.Array | QArray
    seen: Seen
    scale: float
    softcap: float | None = None
    sinks: jax.Array | None = None

    @property
    def sizes(self) -> tuple[int, int]:
        """T and S."""
        return self.q.shape[1], self.k.shape[1]

    def restored(self) -> "Call":
        """The same with keys and values as arrays."""
        k, v = (kv.restore(x, self.q.dtype) for x in (self.k, self.v))
        return dataclasses.replace(self, k=k, v=v)


def attend(
    q: jax.Array,
    k: jax.Array | QArray,
    v: jax.Array | QArray,
    seen: Seen,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: jax.Array | None = None,
    implementation: str = "auto",
) -> jax.Array:
    """softmax(softcap(scale q k^T)) v over the keys that each query sees.

    Shapes: q [B T H h], k [B S K h], v [B S K w] -> [B T H w]; K divides H.

    Args:
        k: keys as an array, or as codes of a cache; v likewise.
        seen: `seen_by(place)`.
        scale: of logits; None: 1 / sqrt(h).
        softcap: c tanh(logit / c) in place of each logit (Gemma 2).
        sinks: [H] a logit of each head that takes weight and has no value (gpt-oss).
        implementation: one of CANDIDATES by name, or "auto".

    Returns:
        [B, T, H, w] in q's dtype.

    Raises:
        UsageError: the implementation asked for cannot do this.

    >>> x = jnp.ones((1, 4, 2, 8))
    >>> place = Place(jnp.arange(4)[None])
    >>> attend(x, x, x, seen_by(place, window=2)).shape
    (1, 4, 2, 8)
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    call = Call(q, k, v, seen, scale, softcap, sinks)
    if witness.key() is not None:  # explain asks for ops, and computes nothing
        return plain(call)
    choice = choose_for(call, implementation)
    if choice.plan is None:
        raise UsageError(
            f"attention={implementation} cannot run: {choice.refused[-1][1]}. "
            "Write attention=auto to leave the choice to Midtread."
        )
    return choice.plan.run(call)


def choose_for(call: Call, asked: str = "auto") -> Choice:
    """The implementation that runs a call, and why those before it do not."""
    if asked == "plain":  # which is refused for its cost alone
        return Choice(asked, Runs(plain), ())
    candidates = [c for c in CANDIDATES if asked in ("auto", c.name)]
    return first("attention", candidates, call, here())


class Runs(NamedTuple):
    """The plan of an implementation that has nothing to work out beforehand."""

    run: Callable[[Call], jax.Array]


def plain(call: Call) -> jax.Array:
    """The formula as it stands, all logits in memory."""
    q, seen = call.q, call.seen
    B, T, H, h = q.shape
    k_codes, k_scale = kv.codes(call.k, q.dtype)
    v_codes, v_scale = kv.codes(call.v, q.dtype)
    K = k_codes.shape[2]
    q = q.reshape(B, T, K, H // K, h)
    wide = {"preferred_element_type": jnp.float32}
    logits = jnp.einsum("btkgh,bskh->bkgts", q, k_codes, **wide) * call.scale
    if k_scale is not None:  # [B S K 1]: of the codes that were summed over h
        logits *= k_scale.transpose(0, 2, 3, 1)[:, :, None]
    if call.softcap is not None:
        logits = call.softcap * jnp.tanh(logits / call.softcap)
    mask = seen.mask(k_codes.shape[1])
    logits = jnp.where(mask[:, None, None], logits, LOWEST)
    if call.sinks is not None:
        sinks = call.sinks.astype(jnp.float32).reshape(1, K, -1, 1, 1)
        sinks = jnp.broadcast_to(sinks, (*logits.shape[:-1], 1))
        logits = jnp.concatenate([logits, sinks], -1)
    weights = jax.nn.softmax(logits, axis=-1)
    if call.sinks is not None:
        weights = weights[..., :-1]
    if v_scale is not None:  # varies along the sum over s: goes into the weights
        weights *= v_scale.transpose(0, 2, 3, 1)[:, :, None]
    out = jnp.einsum("bkgts,bskh->btkgh", weights.astype(q.dtype), v_codes)
    return out.reshape(B, T, H, v_codes.shape[-1])


def _is_one_block(call: Call) -> bool:
    T, S = call.sizes
    return T * S <= blockwise.BLOCK**2


def _rule_of_logits() -> bool:
    """Whether a rule quantizes attention's own two matmuls, both of activations."""
    rule = get_current_rule("einsum")
    return bool(rule and (rule.act_qtype or getattr(rule, "recipe", None)))


def _why_not_plain(call: Call, env: Env) -> str | None:
    if _is_one_block(call) or _rule_of_logits():
        return None
    T, S = call.sizes
    return f"logits of {T} x {S} would be written to memory"


# --- implementations --------------------------------------------------------------------------


def _plan_decode(call: Call, env: Env) -> Runs | Refusal:
    if call.sizes[0] != 1 or call.seen.is_causal:
        return Refusal("it is for one query a sequence, against a cache")
    if not isinstance(call.k, QArray) and _rule_of_logits():
        return Refusal(OF_RULES)
    kernel = choose.plan_attend(_cached(call), env)
    if kernel.plan is None:
        return Refusal(kernel.refused[0][1])
    return Runs(lambda call: kernel.plan.run(_cached(call)))


def _cached(call: Call) -> Cached:
    seen, gain = call.seen, call.scale * call.q.shape[-1] ** 0.5
    ranges = seen.first[:, 0], seen.stop[:, 0]
    return Cached(call.q, call.k, call.v, *ranges, gain, call.softcap, call.sinks)


def _why_not_flash(call: Call) -> str | None:
    """What no flash kernel takes."""
    if _rule_of_logits():
        return OF_RULES
    if call.q.dtype not in (jnp.bfloat16, jnp.float16):
        return f"it is for bfloat16 and float16, not {call.q.dtype}"
    if call.sizes[0] < FEW:
        return f"{call.sizes[0]} queries do not fill a block of {FEW}"
    if not is_static(call.q, *jax.tree.leaves((call.k, call.v))):
        return SYMBOLIC
    return None


def _plan_flash(call: Call, env: Env) -> Runs | Refusal:
    reason = _why_not_flash(call)
    if reason is not None:
        return Refusal(reason)
    is_plain = call.softcap is None and call.sinks is None
    if is_plain and call.seen.is_causal and not call.seen.is_packed:
        return Refusal(
            "no documents are packed, and causal order alone needs no ranges"
        )
    if not env.is_alone:
        return Refusal(ALONE)
    kernel = choose.plan_attend_ranges(_ranged(call), env)
    if kernel.plan is None:
        return Refusal(kernel.refused[0][1])
    return Runs(lambda call: kernel.plan.run(_ranged(call.restored())))


def _ranged(call: Call) -> Ranged:
    seen, arrays = call.seen, (call.q, call.k, call.v)
    formula = call.scale, call.softcap, call.sinks
    return Ranged(*arrays, seen.first, seen.stop, *formula)


def _why_it_fails(run: Callable, call: Call) -> str | None:
    """What a library says when it traces this, backward too; None if it can."""
    call = call.restored()

    def gradients(q, k, v, first, stop):
        seen = dataclasses.replace(call.seen, first=first, stop=stop)
        own = lambda q, k, v: run(dataclasses.replace(call, q=q, k=k, v=v, seen=seen))
        out, vjp = jax.vjp(own, q, k, v)
        return vjp(out)

    seen = call.seen
    arrays = (call.q, call.k, call.v, seen.first, seen.stop)
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays]
    try:
        jax.eval_shape(gradients, *shapes)
    except (
        ImportError,
        NotImplementedError,
        ValueError,
        RuntimeError,
        TypeError,
    ) as error:
        lines = str(error).splitlines() or [type(error).__name__]
        return lines[0].rstrip(".")
    return None


def _as_wide_as_keys(call: Call) -> Call:
    """Values as wide as keys, for kernels that know one width (MLA has two)."""
    spare = call.k.shape[-1] - call.v.shape[-1]
    v = jnp.pad(call.v, [(0, 0)] * 3 + [(0, spare)]) if spare else call.v
    return dataclasses.replace(call, v=v)


def _kept(run: Callable[[Call], jax.Array]) -> Callable[[Call], jax.Array]:
    """`run`, whose output and residuals a remat policy can save (`kernels.attention.SAVED`).

    A library's kernel has its own custom_vjp, and what that keeps has no name: under remat
    it would run forward twice.
    """
    name = lambda x: checkpoint_name(x, SAVED[0])

    def wrapper(call: Call) -> jax.Array:
        call, seen = call.restored(), call.seen

        def of(q, k, v, first, stop):
            ranges = dataclasses.replace(seen, first=first, stop=stop)
            return run(dataclasses.replace(call, q=q, k=k, v=v, seen=ranges))

        def forward(q, k, v, first, stop):
            out, pull = jax.vjp(lambda q, k, v: of(q, k, v, first, stop), q, k, v)
            saved = name(out)
            return saved, jax.tree.map(lambda x: saved if x is out else name(x), pull)

        backward = lambda pull, g: (*pull(g), None, None)
        kept = jax.custom_vjp(of)
        kept.defvjp(forward, backward)
        return kept(call.q, call.k, call.v, seen.first, seen.stop)

    return wrapper


def _why_not_tokamax(call: Call, env: Env) -> str | None:
    reason = _why_not_flash(call)
    if reason is not None:
        return reason
    if importlib.util.find_spec("tokamax") is None:
        return "tokamax is not installed (pip install 'midtread[tokamax]')"
    if not call.seen.is_causal:
        return "its ranges are of as many keys as queries"
    if call.sinks is not None:
        return NO_SINKS
    if not env.is_alone:
        return ALONE
    return _why_it_fails(_tokamax, call)


@_kept
@disable_interceptions
def _tokamax(call: Call) -> jax.Array:
    import tokamax  # pyright: ignore[reportMissingImports]

    call, seen = call.restored(), call.seen
    window = None
    if (
        seen.is_packed or seen.window is not None
    ):  # of every query, how far back it looks
        back = jnp.arange(call.sizes[0], dtype=jnp.int32) - seen.first
        window = (back[:, None], 0)
    return tokamax.dot_product_attention(
        call.q,
        call.k,
        call.v,
        scale=call.scale,
        is_causal=True,
        local_window_size=window,
        logits_soft_cap=call.softcap,
        implementation="mosaic",
    )


def _why_not_cudnn(call: Call, env: Env) -> str | None:
    reason = _why_not_flash(call)
    if reason is not None:
        return reason
    if call.softcap is not None:
        return "it has no soft cap"
    if call.sinks is not None:
        return NO_SINKS
    if call.v.shape[-1] > call.k.shape[-1]:
        return "values are wider than keys"
    return _why_it_fails(_cudnn, call)


@_kept
@disable_interceptions
def _cudnn(call: Call) -> jax.Array:
    call, seen, width = call.restored(), call.seen, call.v.shape[-1]
    call = _as_wide_as_keys(call)
    mask = window = None
    is_causal = seen.is_causal and not seen.is_packed
    if not is_causal:
        mask = seen.mask(call.sizes[1])[:, None]
    elif seen.window is not None:
        window = (seen.window - 1, 0)
    arrays: Any = call.q, call.k, call.v  # restored: none of them is codes any more
    out = jax.nn.dot_product_attention(
        *arrays,
        mask=mask,
        scale=call.scale,
        is_causal=is_causal,
        local_window_size=window,
        implementation="cudnn",
    )
    return out[..., :width]


def _why_not_blockwise(call: Call, env: Env) -> str | None:
    if _rule_of_logits():
        return OF_RULES
    if not is_static(call.q, *jax.tree.leaves((call.k, call.v))):
        return SYMBOLIC
    return None


def _blockwise(call: Call) -> jax.Array:
    call, seen = call.restored(), call.seen
    formula = (call.scale, call.softcap, call.sinks)
    return blockwise.attend(call.q, call.k, call.v, seen.first, seen.stop, *formula)


def _unless(why_not: Callable, run: Callable) -> Callable[[Call, Env], Runs | Refusal]:
    """The `plan` of an implementation that takes every call it has no reason against."""

    def plan(call: Call, env: Env) -> Runs | Refusal:
        reason = why_not(call, env)
        return Runs(run) if reason is None else Refusal(reason)

    return plan


CANDIDATES = (
    Candidate("decode", "any", _plan_decode),  # its kernel says what it needs
    Candidate("flash", "hopper", _plan_flash),
    Candidate("tokamax", "hopper", _unless(_why_not_tokamax, _tokamax), False),
    Candidate("cudnn", "nvidia", _unless(_why_not_cudnn, _cudnn), False),
    Candidate("plain", "any", _unless(_why_not_plain, plain)),
    Candidate("blockwise", "any", _unless(_why_not_blockwise, _blockwise)),
)


def describe(m: Model, batch: int) -> str:
    """What computes attention of a training step here, and why what is tried before does
    not, in one line."""
    T, K = m.max_target_length, m.num_kv_heads
    widths = m.head_dim, m.head_dim
    if m.attention_type == "mla":
        widths = m.qk_nope_head_dim + m.qk_rope_head_dim, m.v_head_dim
        K = m.num_query_heads
    of = lambda heads, width: jax.ShapeDtypeStruct(
        (batch, T, heads, width), jnp.dtype(m.dtype)
    )
    place = jax.ShapeDtypeStruct((batch, T), jnp.int32)
    seen: Any = Seen(place, place, is_causal=True, is_packed=True)
    q: Any = of(m.num_query_heads, widths[0])
    k: Any = of(K, widths[0])
    v: Any = of(K, widths[1])
    sinks: Any = jnp.zeros(m.num_query_heads) if m.attention_sink else None
    call = Call(q, k, v, seen, 1.0, m.attn_logits_soft_cap or None, sinks)
    choice = choose_for(call, m.attention)
    reasons = "; ".join(f"{other}: {why}" for other, why in choice.refused)
    return f"attention: {choice.name or 'none'}" + (f" ({reasons})" if reasons else "")


# --- modules ----------------------------------------------------------------------------------


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
        with collect_in_a_step(x, cache) as left:
            heads = self.heads(x)
        by_head = lambda a: a.reshape(B, T, -1, h)
        seen = seen_by(place, cache, self.window_at(place))
        written = None
        if cache is not None:
            whole = left.of(heads[0]) if len(heads) == 1 else None
            written = self.written(heads, whole, place, cache)
        if written is None:
            parts = heads if len(heads) == 3 else cut(heads[0], self.query.widths)
            q, k, v = map(by_head, parts)
            q, k = self.turned(q, place), self.turned(k, place)
        else:
            q, cache = written
        if cache is not None:
            if written is None:
                cache = cache.write(place.positions, k=k, v=v)
            k, v = cache.rows["k"], cache.rows["v"]
        out = attend(
            q, k, v, seen,
            scale=self.scale,
            softcap=self.softcap,
            sinks=self.sinks[...] if self.has_sinks else None,
            implementation=self.implementation,
        )  # fmt: skip
        return self.out(out.reshape(B, T, H * h)), cache

    def heads(self, x: jax.Array) -> list[jax.Array]:
        """Queries, keys and values [B, T, heads h], not turned yet: three arrays, or all of
        them in one, where one matmul makes them."""
        if not self.norms and self.query.widths is not None:
            return [self.query(x)]
        q, k, v = side_by_side(x, self.query, self.key, self.value)
        if self.norms:
            q, k = self.normed(self.query_norm, q), self.normed(self.key_norm, k)
        return [q, k, v]

    def normed(self, norm: Callable, x: jax.Array) -> jax.Array:
        """Queries or keys, normed together or head by head."""
        if self.norms == "all":
            return norm(x)
        by_head = x.reshape(*x.shape[:2], -1, self.shape[1])
        return norm(by_head).reshape(x.shape)

    def written(
        self,
        heads: list[jax.Array],
        left: Pending | None,
        place: Place,
        cache: kv.Cache,
    ) -> tuple[jax.Array, kv.Cache] | None:
        """Turned queries of one token a sequence, and the cache with its keys and values,
        by a kernel that does all of that; None if none does."""
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
        """Queries or keys, turned by their positions."""
        rotary, frequency = self.rotary(place)
        return rotary.rotate(x, place.positions, frequency)

    def rotary(self, place: Place) -> tuple[rope.Rope, jax.Array | None]:
        """The rotary embedding of this layer, and its frequencies where they are known
        only when it runs."""
        far, near = self.ropes
        if self.is_local is not None or far == near:
            return near if self.is_local else far, None
        width = far.turned(self.shape[1])
        both = near.frequencies(width), far.frequencies(width)
        return far, jnp.where(place.is_local, *both)

    def window_at(self, place: Place) -> int | jax.Array | None:
        """Tokens that this layer looks back on; None: all."""
        if self.is_local is None:
            return jnp.where(place.is_local, self.window, jnp.iinfo(jnp.int32).max)
        return self.window if self.is_local else None
