"""Generate: text from a model, token by token.

All prompts of a batch are read at once (prefill), each padded on the right; then every
step feeds one token per prompt at the prompt's own position. What a padded slot left in
the cache is overwritten before anyone may look at it, since a token only sees slots up to
its own position. The cache is in the compute dtype or in few bits (`lm/cache.py`).
"""

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from midtread.lm import cache as kv
from midtread.lm.config import Config, require
from midtread.lm.tokenizer import Tokenizer


class Result(NamedTuple):
    texts: list[str]  # prompt and continuation
    tokens: np.ndarray  # [B, max_new_tokens]
    prefill_seconds: float
    tokens_per_second: float
    cache_bytes: int


class Sampling(NamedTuple):
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0


def choose(logits: jax.Array, key: jax.Array, how: Sampling) -> jax.Array:
    """The next token of logits [B, V]."""
    if how.temperature == 0:
        return jnp.argmax(logits, axis=-1)
    logits = logits / how.temperature
    if how.top_k:
        least = jax.lax.top_k(logits, min(how.top_k, logits.shape[-1]))[0][:, -1:]
        logits = jnp.where(logits < least, -jnp.inf, logits)
    if how.top_p < 1:
        ordered = jnp.sort(logits, axis=-1, descending=True)
        before = jnp.cumsum(jax.nn.softmax(ordered), axis=-1) - jax.nn.softmax(ordered)
        count = jnp.sum(before < how.top_p, axis=-1, keepdims=True)  # at least one
        least = jnp.take_along_axis(ordered, count - 1, axis=-1)
        logits = jnp.where(logits < least, -jnp.inf, logits)
    return jax.random.categorical(key, logits)


def cache_format(config: Config) -> tuple[str, str] | None:
    """Format and scales of the cache."""
    if not config.quantize_kvcache:
        return None
    return config.kv_quant_dtype, config.kv_quant_axis


@functools.partial(
    jax.jit, static_argnames=("graph", "sampling"), donate_argnames="cache"
)
def _advance(graph, state, tokens, positions, last, cache, key, *, sampling):
    """Feeds tokens [B, T]; the next token after place `last` of each row."""
    out = nnx.merge(graph, state)(tokens, positions, cache=cache)
    logits = jnp.take_along_axis(out.logits, last[:, None, None], axis=1)[:, 0]
    return choose(logits, key, sampling), out.cache


def generate(
    model: nnx.Module,
    codec: Tokenizer,
    config: Config,
    prompts: Sequence[str] | None = None,
    on_text: Callable[[str], None] | None = None,
) -> Result:
    """Continues every prompt by `max_new_tokens`.

    Args:
        on_text: called with each piece of the first prompt's text as it comes.
    """
    prompts = config.prompt if prompts is None else prompts
    encoded = [np.asarray(codec.encode(p), np.int32) for p in prompts]
    require(all(map(len, encoded)), "prompt is empty: give at least one token.")
    lengths = np.array([len(e) for e in encoded])
    width = int(lengths.max())
    tokens = np.stack([np.pad(e, (0, width - len(e))) for e in encoded])
    total = width + config.max_new_tokens
    cache = kv.make(config, len(prompts), total, cache_format(config))
    cache_bytes = kv.nbytes(cache)
    graph, state = nnx.split(model)
    positions = np.broadcast_to(np.arange(width), tokens.shape)
    key, started = jax.random.key(config.seed), time.perf_counter()
    sampling = Sampling(config.temperature, config.top_k, config.top_p)
    step = functools.partial(_advance, graph, state, sampling=sampling)
    new, cache = step(tokens, positions, lengths - 1, cache, jax.random.fold_in(key, 0))
    made, written = [np.asarray(new)], ""
    prefill = time.perf_counter() - started
    started, zeros = None, np.zeros(len(prompts), np.int32)
    for i in range(1, config.max_new_tokens):
        where = (lengths + i - 1)[:, None]
        new, cache = step(
            made[-1][:, None], where, zeros, cache, jax.random.fold_in(key, i)
        )
        made.append(np.asarray(new))
        started = started or time.perf_counter()  # the first step compiles
        if on_text:
            text = codec.decode([t[0] for t in made])
            if text.startswith(written) and not text.endswith("\ufffd"):
                on_text(text[len(written) :])
                written = text
    seconds = time.perf_counter() - started if started else 0.0
    steps = config.max_new_tokens - 2
    rate = len(prompts) * steps / seconds if started and steps > 0 else 0.0
    out = np.stack(made, 1)
    texts = [p + codec.decode(_until_end(o, codec)) for p, o in zip(prompts, out)]
    return Result(texts, out, prefill, rate, cache_bytes)


def _until_end(tokens: Any, codec: Tokenizer) -> Any:
    ends = np.flatnonzero(tokens == codec.end)
    return tokens[: ends[0]] if len(ends) else tokens
