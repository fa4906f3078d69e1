"""Rope: the rotary embedding, plain or stretched beyond the length of pretraining.

Pair i of a head of width 2 n is turned by position * w_i, with w_i = base^(-i / n): pair 0
makes a turn in 2 pi tokens, the last ones in more than any text has. A model trained on
`original` tokens has not seen the slow ones come round. Stretching by `factor` slows them:

    llama3    w / factor where a turn takes more than original / low_freq_factor tokens, w
              where less than original / high_freq_factor, between them a mean of both
    linear    w / factor: every pair is slowed alike
    longrope  w / f_i with a factor for each pair, `short_factor` for rows of up to
              `original` tokens (max_target_length), `long_factor` for longer ones; and
              cos and sin grow by sqrt(1 + ln(factor) / ln(original)) (arXiv 2402.13753)
    yarn      w / factor where the original text has fewer than beta_slow turns, w where
              more than beta_fast, between them a ramp over i (arXiv 2309.00071, 3.2); and
              logits grow with the length, since so many tokens share the attention:
              by m(mscale) / m(mscale_all_dim) in cos and sin, and by m(mscale_all_dim)^2
              after the sum, m(s) = 0.1 s ln(factor) + 1; truncate:0 leaves the ends of
              the ramp between pairs, and attention_factor is the gain of cos and sin
              where it is given

Numbers are named as `rope_scaling` of a Hugging Face config names them:

    rope_scaling=yarn,factor:40,original_max_position_embeddings:4096,mscale:1,mscale_all_dim:1

Lists are written with slashes: short_factor:1/1.1/1.25. With `partial_rotary_factor` only
the first pairs of a head are turned, and with `rope_interleave` a pair is (2 i, 2 i + 1) and
not (i, i + n). Layers with a window may have a base of their own (`of(m, local=True)`).
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from midtread.lm.config import Model
from midtread.lm.usage import UsageError, require
from midtread.model.rules import did_you_mean

ORIGINAL = "original_max_position_embeddings"
REQUIRED = {"factor": None, ORIGINAL: None}
#  kind       its numbers and their defaults; one without (None) must be given
KINDS: dict[str, dict[str, Any]] = {
    "": {},
    "linear": {"factor": None},
    "longrope": {
        **REQUIRED,
        "short_factor": None,
        "long_factor": None,
        "attention_factor": 0.0,
    },
    "llama3": {**REQUIRED, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "yarn": {
        **REQUIRED,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 0.0,
        "attention_factor": 0.0,
        "truncate": 1.0,
    },
}
LISTS = ("short_factor", "long_factor")


@dataclasses.dataclass(frozen=True)
class Rope:
    """The rotary embedding of a model: how positions turn queries and keys."""

    base: float
    kind: str = ""
    numbers: tuple[tuple[str, Any], ...] = ()
    share: float = 1.0  # the share of a head that is turned
    is_interleaved: bool = False  # whether pairs are neighbours
    is_long: bool = False  # longrope: whether rows are longer than pretraining's

    def frequencies(self, width: int) -> jax.Array:
        """Returns the radians per token of each pair."""
        half = width // 2
        w = self.base ** (-jnp.arange(half, dtype=jnp.float32) / half)
        if not self.kind:
            return w
        numbers = dict(self.numbers)
        if self.kind == "linear":
            return w / numbers["factor"]
        if self.kind == "longrope":
            factors = numbers["long_factor" if self.is_long else "short_factor"]
            return w / _as_many(factors, half)
        stretch = {"llama3": _llama3, "yarn": _yarn}[self.kind]
        return stretch(w, self.base, width, **numbers)

    def turned(self, width: int) -> int:
        """Returns how many numbers of a head are turned: its first ones."""
        return int(width * self.share)

    def tables(
        self, positions: jax.Array, turned: int, frequency: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """Returns the cos and sin of each pair at positions [..]: [.., turned / 2]."""
        frequency = self.frequencies(turned) if frequency is None else frequency
        angle = positions[..., None].astype(jnp.float32) * frequency
        sin, cos = jnp.sin(angle), jnp.cos(angle)
        if self.gain != 1:
            sin, cos = sin * self.gain, cos * self.gain
        return cos, sin

    def rotate(
        self, x: jax.Array, positions: jax.Array, frequency: jax.Array | None = None
    ) -> jax.Array:
        """Turns the pairs of x [B, T, heads, width], (i, i + width / 2) or neighbours, by
        their positions.

        Args:
            frequency: used in place of `frequencies`, for layers that choose while they run.
        """
        turned = self.turned(x.shape[-1])
        x, rest = x[..., :turned], x[..., turned:]
        cos, sin = self.tables(positions, turned, frequency)
        cos, sin = cos[:, :, None], sin[:, :, None]
        if self.is_interleaved:
            a, b = x[..., 0::2].astype(jnp.float32), x[..., 1::2].astype(jnp.float32)
        else:
            half = turned // 2
            a, b = x[..., :half].astype(jnp.float32), x[..., half:].astype(jnp.float32)
        # Neighbours come out as halves too: in queries and keys alike, so products are the same.
        out = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(
            x.dtype
        )
        return jnp.concatenate([out, rest], -1) if rest.shape[-1] else out

    @property
    def gain(self) -> float:
        """The factor of cos and sin."""
        numbers = dict(self.numbers)
        if numbers.get("attention_factor"):
            return numbers["attention_factor"]
        if self.kind == "longrope":
            long = max(math.log(numbers["factor"]) / math.log(numbers[ORIGINAL]), 0)
            return math.sqrt(1 + long)
        return self._m("mscale") / self._m("mscale_all_dim")

    @property
    def logits_gain(self) -> float:
        """The factor of the logits."""
        return self._m("mscale_all_dim") ** 2

    def _m(self, name: str) -> float:
        if self.kind != "yarn":
            return 1.0
        numbers = dict(self.numbers)
        return max(0.1 * numbers[name] * math.log(numbers["factor"]) + 1, 1.0)


def of(m: Model, local: bool = False) -> Rope:
    """Returns the rotary embedding that a config asks for; `local` is for layers with a
    window."""
    pairs = (m.partial_rotary_factor, m.rope_interleave)
    if local and m.local_rope_max_timescale:
        return Rope(m.local_rope_max_timescale, "", (), *pairs)
    text = m.rope_scaling
    kind, *parts = text.replace(" ", "").split(",")
    require(
        kind in KINDS, f"rope_scaling={text}: {did_you_mean(kind, filter(None, KINDS))}"
    )
    numbers = dict(KINDS[kind])
    for part in parts:
        name, _, number = part.partition(":")
        require(
            name in numbers,
            f"rope_scaling={text}: {kind} has no {name!r}. {did_you_mean(name, numbers)}",
        )
        numbers[name] = _number(text, part, number)
    missing = [name for name, number in numbers.items() if number is None]
    require(
        not missing,
        f"rope_scaling={text} lacks {' and '.join(missing)}: write "
        f"{kind},{','.join(f'{name}:<number>' for name in missing)}.",
    )
    _check(text, numbers)
    is_long = m.max_target_length > numbers.get(ORIGINAL, math.inf)
    return Rope(m.rope_max_timescale, kind, tuple(numbers.items()), *pairs, is_long)


def _as_many(factors: tuple[float, ...], half: int) -> jax.Array:
    """Returns the factors of a list as an array, refusing a list of another length."""
    require(
        len(factors) == half,
        f"rope_scaling has {len(factors)} factors in a list, but a head has {half} pairs.",
    )
    return jnp.asarray(factors, jnp.float32)


def _number(text: str, part: str, number: str) -> Any:
    try:
        if part.startswith(LISTS):
            return tuple(map(float, number.split("/")))
        return float(number)
    except ValueError:
        message = f"rope_scaling={text}: {part} should be <name>:<number>."
        raise UsageError(message) from None


LEAST = {"factor": 1.0, "mscale": 0.0, "mscale_all_dim": 0.0, "attention_factor": 0.0,
         "truncate": 0.0}  # fmt: skip


def _check(text: str, numbers: Mapping[str, Any]) -> None:
    for name, given in numbers.items():
        least = LEAST.get(name, 1e-9)
        for number in given if name in LISTS else (given,):
            require(
                math.isfinite(number) and number >= least,
                f"rope_scaling={text}: {name}:{number:g} is out of range, it must be at "
                f"least {least:g}.",
            )
    for low, high in (
        ("low_freq_factor", "high_freq_factor"),
        ("beta_slow", "beta_fast"),
    ):
        require(
            low not in numbers or numbers[low] < numbers[high],
            f"rope_scaling={text}: {low} must be below {high}.",
        )


def _llama3(w, base, width, *, factor, low_freq_factor, high_freq_factor, **original):
    turns = original[ORIGINAL] * w / (2 * math.pi)  # in a text of the original length
    share = (turns - low_freq_factor) / (high_freq_factor - low_freq_factor)
    share = jnp.clip(share, 0, 1)
    return w * share + w / factor * (1 - share)


def _yarn(w, base, width, *, factor, beta_fast, beta_slow, truncate, **original):
    def pair(turns: float) -> float:
        """Returns which pair turns that often in a text of the original length."""
        tokens = original[ORIGINAL] / (turns * 2 * math.pi)
        return width * math.log(tokens) / (2 * math.log(base))

    first, last = pair(beta_fast), pair(beta_slow)
    if truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, width - 1)
    ramp = (jnp.arange(width // 2) - first) / max(last - first, 1e-3)
    slow = jnp.clip(ramp, 0, 1)
    return w * (1 - slow) + w / factor * slow
