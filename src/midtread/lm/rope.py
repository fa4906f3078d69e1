"""Rope: the rotary embedding, plain or stretched beyond the length of pretraining.

Pair i of a head of width 2 n is turned by position * w_i, with w_i = base^(-i / n): pair 0
makes a turn in 2 pi tokens, the last ones in more than any text has. A model trained on
`original` tokens has not seen the slow ones come round. Stretching by `factor` slows them:

    llama3    w / factor where a turn takes more than original / low_freq_factor tokens, w
              where less than original / high_freq_factor, between them a mean of both
    yarn      w / factor where the original text has fewer than beta_slow turns, w where
              more than beta_fast, between them a ramp over i (arXiv 2309.00071, 3.2); and
              logits grow with the length, since so many tokens share the attention:
              by m(mscale) / m(mscale_all_dim) in cos and sin, and by m(mscale_all_dim)^2
              after the sum, m(s) = 0.1 s ln(factor) + 1

Numbers are named as `rope_scaling` of a Hugging Face config names them:

    rope_scaling=yarn,factor:40,original_max_position_embeddings:4096,mscale:1,mscale_all_dim:1
"""

import dataclasses
import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from midtread.lm.config import Model, UsageError, require
from midtread.model.rules import did_you_mean

ORIGINAL = "original_max_position_embeddings"
REQUIRED = {"factor": None, ORIGINAL: None}
#  kind       its numbers; None: must be given
KINDS: dict[str, dict[str, float | None]] = {
    "": {},
    "llama3": {**REQUIRED, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "yarn": {
        **REQUIRED,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 0.0,
    },
}


@dataclasses.dataclass(frozen=True)
class Rope:
    """How positions turn queries and keys."""

    base: float
    kind: str = ""
    numbers: tuple[tuple[str, float], ...] = ()

    def frequencies(self, width: int) -> jax.Array:
        """Radians per token of each pair."""
        half = width // 2
        w = self.base ** (-jnp.arange(half, dtype=jnp.float32) / half)
        if not self.kind:
            return w
        stretch = {"llama3": _llama3, "yarn": _yarn}[self.kind]
        return stretch(w, self.base, width, **dict(self.numbers))

    def rotate(self, x: jax.Array, positions: jax.Array) -> jax.Array:
        """x [B, T, heads, width]: pairs (i, i + width / 2) are turned."""
        half = x.shape[-1] // 2
        frequency = self.frequencies(x.shape[-1])
        angle = positions[:, :, None, None].astype(jnp.float32) * frequency
        sin, cos = jnp.sin(angle), jnp.cos(angle)
        if self.gain != 1:
            sin, cos = sin * self.gain, cos * self.gain
        a, b = x[..., :half].astype(jnp.float32), x[..., half:].astype(jnp.float32)
        turned = [a * cos - b * sin, b * cos + a * sin]
        return jnp.concatenate(turned, -1).astype(x.dtype)

    @property
    def gain(self) -> float:
        """Times cos and sin."""
        return self._m("mscale") / self._m("mscale_all_dim")

    @property
    def logits_gain(self) -> float:
        """Times the logits."""
        return self._m("mscale_all_dim") ** 2

    def _m(self, name: str) -> float:
        if self.kind != "yarn":
            return 1.0
        numbers = dict(self.numbers)
        return max(0.1 * numbers[name] * math.log(numbers["factor"]) + 1, 1.0)


def of(m: Model) -> Rope:
    """The one that a config asks for."""
    text = m.rope_scaling
    kind, *parts = text.replace(" ", "").split(",")
    require(kind in KINDS, f"rope_scaling={text}: {did_you_mean(kind, KINDS)}")
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
    return Rope(m.rope_max_timescale, kind, tuple(numbers.items()))


def _number(text: str, part: str, number: str) -> float:
    try:
        return float(number)
    except ValueError:
        message = f"rope_scaling={text}: {part} should be <name>:<number>."
        raise UsageError(message) from None


def _check(text: str, numbers: Mapping[str, float]) -> None:
    for name, number in numbers.items():
        least = {"factor": 1.0, "mscale": 0.0, "mscale_all_dim": 0.0}.get(name, 1e-9)
        require(
            math.isfinite(number) and number >= least,
            f"rope_scaling={text}: {name}:{number:g} is out of range, it must be at least "
            f"{least:g}.",
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


def _yarn(w, base, width, *, factor, beta_fast, beta_slow, mscale, mscale_all_dim,
          **original):  # fmt: skip
    def pair(turns: float) -> float:
        """Which pair turns that often in a text of the original length."""
        tokens = original[ORIGINAL] / (turns * 2 * math.pi)
        return width * math.log(tokens) / (2 * math.log(base))

    first = max(math.floor(pair(beta_fast)), 0)
    last = min(math.ceil(pair(beta_slow)), width - 1)
    ramp = (jnp.arange(width // 2) - first) / max(last - first, 1e-3)
    slow = jnp.clip(ramp, 0, 1)
    return w * (1 - slow) + w / factor * slow
