"""Attend: what each token takes from those it looks at.

    out = softmax(softcap(scale q k^T)) v       over the keys that each query sees

What a query sees is a range of keys (`lm/seen.py`). `attend` has these implementations, and
takes the first that can:

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

Letters: B batch, T queries, S keys, H query heads, K kv heads, G = H / K, h head_dim.
"""

import dataclasses
import importlib.util
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from midtread.kernels import choose
from midtread.kernels.attention import LOWEST, SAVED, Ranged
from midtread.kernels.candidates import Candidate, Chosen, Refusal, first
from midtread.kernels.decode_attention import Cached
from midtread.kernels.environment import Env, here
from midtread.kernels.layout import SYMBOLIC, is_static
from midtread.lm import blockwise
from midtread.lm import cache as kv
from midtread.lm.config import Model
from midtread.lm.seen import Seen
from midtread.lm.usage import UsageError
from midtread.model.provider import get_current_rule
from midtread.model.running import disable_interceptions
from midtread.numerics.qarray import QArray
from midtread.ops import witness

FEW = 128  # queries: fewer do not fill a kernel's block
NO_SINKS = "it has no sinks"
ALONE = "it runs on one device, and XLA cannot partition it"
OF_RULES = "a rule quantizes attention's matmuls, which only the plain formula shows"


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
        """Returns the same with keys and values as arrays."""
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
    """Computes softmax(softcap(scale q k^T)) v over the keys that each query sees.

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

    >>> from midtread.lm.seen import Place, seen_by
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


def choose_for(call: Call, asked: str = "auto") -> Chosen:
    """Returns the implementation that runs a call, and why those before it do not."""
    if asked == "plain":  # which is refused for its cost alone
        return Chosen(asked, Runs(plain), ())
    candidates = [c for c in CANDIDATES if asked in ("auto", c.name)]
    return first("attention", candidates, call, here())


class Runs(NamedTuple):
    """The plan of an implementation that has nothing to work out beforehand."""

    run: Callable[[Call], jax.Array]


def plain(call: Call) -> jax.Array:
    """Computes the formula as it stands, with all logits in memory."""
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
    """Returns whether a rule quantizes attention's own two matmuls, both of activations."""
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
    """Says what no flash kernel takes."""
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
    return Runs(lambda call: kernel.plan.run(_ranged(_within(call.restored()))))


def _within(call: Call) -> Call:
    """Ends ranges at the end of a cache, behind which the kernel would read other memory: what
    fills up a prompt's last chunk may stand there."""
    if call.seen.is_causal:
        return call
    stop = jnp.minimum(call.seen.stop, call.sizes[1])
    return dataclasses.replace(call, seen=dataclasses.replace(call.seen, stop=stop))


def _ranged(call: Call) -> Ranged:
    seen, arrays = call.seen, (call.q, call.k, call.v)
    formula = call.scale, call.softcap, call.sinks
    return Ranged(*arrays, seen.first, seen.stop, *formula)


def _why_it_fails(run: Callable, call: Call) -> str | None:
    """Returns what a library says when it traces this, backward too; None if it can."""
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
    """Makes values as wide as keys, for kernels that know one width (MLA has two)."""
    spare = call.k.shape[-1] - call.v.shape[-1]
    v = jnp.pad(call.v, [(0, 0)] * 3 + [(0, spare)]) if spare else call.v
    return dataclasses.replace(call, v=v)


def _kept(run: Callable[[Call], jax.Array]) -> Callable[[Call], jax.Array]:
    """Wraps `run` so that a remat policy can save its output and residuals (SAVED).

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

    seen = call.seen
    window = None  # of every query, how far back it looks
    if seen.is_packed or seen.window is not None:
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
    seen, width = call.seen, call.v.shape[-1]
    call = _as_wide_as_keys(call)
    mask = window = None
    is_causal = seen.is_causal and not seen.is_packed
    if not is_causal:
        mask = seen.mask(call.sizes[1])[:, None]
    elif seen.window is not None:
        window = (seen.window - 1, 0)
    arrays: Any = call.q, call.k, call.v  # `_kept` has made arrays of codes
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
    """Makes the `plan` of an implementation that takes every call it has no reason against."""

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
    """Says what computes attention of a training step here, and why what is tried before does
    not, in one line."""
    T, K = m.max_target_length, m.num_kv_heads
    widths = m.head_dim, m.head_dim
    if m.attention_type == "mla":
        widths = m.qk_nope_head_dim + m.qk_rope_head_dim, m.v_head_dim
        K = m.num_query_heads
    of = lambda heads, width: jax.ShapeDtypeStruct(
        (batch, T, heads, width), jnp.dtype(m.dtype)
    )
    bounds = jax.ShapeDtypeStruct((batch, T), jnp.int32)
    seen: Any = Seen(bounds, bounds, is_causal=True, is_packed=True)
    q: Any = of(m.num_query_heads, widths[0])
    k: Any = of(K, widths[0])
    v: Any = of(K, widths[1])
    sinks: Any = jnp.zeros(m.num_query_heads) if m.attention_sink else None
    call = Call(q, k, v, seen, 1.0, m.attn_logits_soft_cap or None, sinks)
    choice = choose_for(call, m.attention)
    reasons = "; ".join(f"{other}: {why}" for other, why in choice.refused)
    return f"attention: {choice.name or 'none'}" + (f" ({reasons})" if reasons else "")
