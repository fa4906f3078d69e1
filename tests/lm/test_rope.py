"""Rotary embeddings, stretched: the slow pairs, not the fast ones, and by how much."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from midtread.lm import rope, settings
from midtread.lm.attend import attend
from midtread.lm.config import Model
from midtread.lm.seen import Place, seen_by
from midtread.lm.usage import UsageError

YARN = "yarn,factor:40,original_max_position_embeddings:4096,mscale:1,mscale_all_dim:1"
LLAMA = "llama3,factor:8,original_max_position_embeddings:8192"


def of(text, base=10000.0):
    return rope.of(Model(rope_scaling=text, rope_max_timescale=base))


def test_deepseeks_yarn():
    """32 turns in 4096 tokens is pair 10 of 32, one turn pair 23."""
    assert settings.load(["deepseek-v3"]).rope_scaling == YARN
    plain, yarn = of("").frequencies(64), of(YARN).frequencies(64)
    np.testing.assert_allclose(yarn[:11], plain[:11], rtol=1e-6)
    np.testing.assert_allclose(yarn[23:], plain[23:] / 40, rtol=1e-6)
    np.testing.assert_allclose(yarn[16], 0.0055, rtol=1e-6)  # transformers 4.48.3
    assert of(YARN).gain == 1
    np.testing.assert_allclose(of(YARN).logits_gain, 1.8738542070926265)


def test_llama_3_1():
    plain, ours = of("", 5e5).frequencies(128), of(LLAMA, 5e5).frequencies(128)
    turns = 8192 * plain / (2 * np.pi)
    np.testing.assert_allclose(ours[turns > 4], plain[turns > 4], rtol=1e-6)
    np.testing.assert_allclose(ours[turns < 1], plain[turns < 1] / 8, rtol=1e-6)
    np.testing.assert_allclose(ours[30], 0.0013718937, rtol=1e-5)  # transformers 4.48.3
    assert of(LLAMA).gain == of(LLAMA).logits_gain == 1


def test_logits_grow_as_they_should(key):
    """In cos and sin, or after the sum: of a head that is turned whole it is the same."""
    short = "yarn,factor:40,original_max_position_embeddings:4096"
    q, k, v = jax.random.normal(key, (3, 1, 6, 2, 16))
    positions = jnp.arange(6)[None]
    seen = seen_by(Place(positions))
    made = []
    for r in (of(short), of(YARN)):
        turned = (r.rotate(x, positions) for x in (q, k))
        made.append(attend(*turned, v, seen, scale=r.logits_gain / 4))
    np.testing.assert_allclose(made[0], made[1], atol=1e-6)
    plain = attend(q, k, v, seen)
    assert float(jnp.abs(made[0] - plain).max()) > 0.1


@pytest.mark.parametrize(
    "text,expected",
    [
        ("yarm", "Did you mean 'yarn'"),
        ("yarn,factor:4", "lacks original_max_position_embeddings"),
        (f"{YARN},factr:4", "Did you mean 'factor'"),
        (f"{YARN},factor:x", "<name>:<number>"),
        (f"{YARN},factor:0.5", "at least 1"),
        (f"{LLAMA},low_freq_factor:5", "below high_freq_factor"),
    ],
)
def test_what_is_wrong_is_named(text, expected):
    with pytest.raises(UsageError, match=expected):
        of(text)
