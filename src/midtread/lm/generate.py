"""Generate: text from a model.

Prompts become tokens, `lm/decode.py` continues them, and tokens become text again. Up to
`decode_slots` prompts are continued at once; each further one waits for a slot. A text ends
at the tokenizer's end mark, at a token of `stop`, or after `max_new_tokens`. The first
prompt's text is handed out in small pieces as it comes: a piece that ends within a letter
waits for the rest of it.

Some tokenizers drop the space that a text begins with (those of Llama 2, Mistral and Phi-3), so
what follows a prompt is decoded behind the prompt's last tokens.
"""

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from flax import nnx

from midtread.lm import decode
from midtread.lm.config import Config, Model, section
from midtread.lm.tokenizer import Tokenizer
from midtread.lm.usage import require

BEFORE = 16  # tokens of a prompt that what follows is decoded behind


class Result(NamedTuple):
    """Texts, and how fast they came."""

    texts: list[str]  # prompt and continuation
    tokens: np.ndarray  # [B, max_new_tokens], filled up with the end mark
    prefill_seconds: float
    tokens_per_second: float
    cache_bytes: int


def cache_format(config: Config) -> tuple[str, str] | None:
    """Returns the format of the cache and what shares a scale, or None for a float
    cache."""
    if not config.quantize_kvcache:
        return None
    return config.kv_quant_dtype, config.kv_quant_axis


def stop_tokens(config: Config, codec: Tokenizer) -> tuple[int, ...]:
    """Returns the tokenizer's end marks, and every token that is a word of the key `stop`: there
    may be one for the beginning of a text, and another for behind other letters."""
    stops = [*codec.stops]
    unknown = list(codec.encode("\ue000"))  # a letter that no text has
    texts = _texts(codec) if config.stop else {}
    for word in config.stop:
        tokens = list(map(int, codec.encode(word)))
        same = [t for t, text in texts.items() if text == word]
        require(
            same or tokens not in ([], unknown),
            f"stop={word!r} is no token of {codec.name}: write one that is.",
        )
        parts = [texts[t] for t in tokens if t in texts]
        such = f": write one of its tokens, such as stop={parts[-1:]}" if parts else ""
        require(
            same or len(tokens) == 1,
            f"stop={word!r} is {len(tokens)} tokens of {codec.name}, and a stop is one{such}.",
        )
        stops += [*same, *(tokens if len(tokens) == 1 else ())]
    return tuple(dict.fromkeys(stops))


def _texts(codec: Tokenizer) -> dict[int, str]:
    """Returns the text of every token that is one by itself: no mark, and no part of a letter."""
    texts = ((t, codec.decode([t])) for t in range(codec.size))
    return {t: text for t, text in texts if text and "\ufffd" not in text}


def generate(
    model: nnx.Module,
    codec: Tokenizer,
    config: Config,
    prompts: Sequence[str] | None = None,
    on_text: Callable[[str], None] | None = None,
) -> Result:
    """Continues every prompt by up to `max_new_tokens`.

    A model that has a template for conversations is given each prompt as a message in it.

    Args:
        model: what `convert.load` gave; on a GPU pass it through `decode.prepare`.
        on_text: called with each piece of the first prompt's text as it comes.
    """
    prompts = config.prompt if prompts is None else prompts
    is_chat = bool(codec.chat) and config.use_chat_template
    encoded = [encode(codec, p, is_chat) for p in prompts]
    require(all(map(len, encoded)), "prompt is empty: give at least one token.")
    allowed, stops = config.max_new_tokens, stop_tokens(config, codec)
    server = decode.Server(
        model,
        section(config, Model),
        slots=min(len(prompts), config.decode_slots),
        length=max(map(len, encoded)) + allowed,
        sampling=decode.Sampling(config.temperature, config.top_k, config.top_p),
        stops=stops,
        seed=config.seed,
        cache_format=cache_format(config),
        check_memory=config.check_memory,
    )
    server.warm()
    before = [() if is_chat else tokens[-BEFORE:].tolist() for tokens in encoded]
    pieces, clock = Pieces(codec, on_text, before[0]), Clock()

    def on_tokens(number: int, tokens: list[int]) -> None:
        clock.count(len(tokens))
        if number == 0:
            pieces.add(_until_stop(tokens, stops))

    continuations = decode.complete(server, encoded, allowed, on_tokens)
    pieces.end()
    out = np.full((len(continuations), allowed), codec.end)
    for row, tokens in zip(out, continuations):
        row[: len(tokens)] = tokens
    shown = [f"{p}\n" if is_chat else p for p in prompts]
    texts = [
        p + decoded(codec, _until_stop(o, stops), b)
        for p, o, b in zip(shown, continuations, before)
    ]
    return Result(texts, out, clock.prefill, clock.rate, server.cache_bytes)


def encode(codec: Tokenizer, prompt: str, is_chat: bool) -> np.ndarray:
    """Returns the tokens of a prompt: in the model's chat template, or after the
    tokenizer's own beginning."""
    if is_chat:
        return np.asarray(codec.encode(codec.asked(prompt)), np.int32)
    tokens = codec.encode(prompt)
    return np.asarray([*codec.begin, *tokens] if codec.begin else tokens, np.int32)


class Clock:
    """Counts tokens a second from the first token on, so that reading the prompts is not
    counted."""

    def __init__(self):
        self._num_tokens, self._started, self.prefill = 0, time.perf_counter(), 0.0

    def count(self, tokens: int) -> None:
        now = time.perf_counter()
        if not self.prefill:
            self.prefill, self._started = now - self._started, now
            return
        self._num_tokens, self._last = self._num_tokens + tokens, now

    @property
    def rate(self) -> float:
        return (
            self._num_tokens / (self._last - self._started) if self._num_tokens else 0.0
        )


class Pieces:
    """Hands out text as its tokens come, which are decoded behind those `before`."""

    def __init__(
        self,
        codec: Tokenizer,
        on_text: Callable[[str], None] | None,
        before: Sequence[int] = (),
    ):
        self._codec, self._on_text, self._before = codec, on_text, before
        self._tokens, self._num_letters = [], 0

    def add(self, tokens: list[int]) -> None:
        if self._on_text is None:
            return
        self._tokens += tokens
        text = decoded(self._codec, self._tokens, self._before)
        if not text.endswith("\ufffd"):
            self._hand_out(text)

    def end(self) -> None:
        """Hands out a letter that stayed incomplete, since no further token comes."""
        self._hand_out(decoded(self._codec, self._tokens, self._before))

    def _hand_out(self, text: str) -> None:
        """Hands out what is new. Letters that came out otherwise before are not taken back."""
        if self._on_text is not None and len(text) > self._num_letters:
            self._on_text(text[self._num_letters :])
        self._num_letters = len(text)


def decoded(codec: Tokenizer, tokens: Sequence[int], before: Sequence[int]) -> str:
    """Returns the text of tokens that stand behind others."""
    start, text = codec.decode([*before]), codec.decode([*before, *tokens])
    if text.startswith(start):
        return text[len(start) :]
    return codec.decode([*tokens])


def _until_stop(tokens: list[int], stops: tuple[int, ...]) -> list[int]:
    return tokens[:-1] if tokens and tokens[-1] in stops else tokens
