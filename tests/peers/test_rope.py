"""Stretched rotary embeddings against transformers 4.48.3. What it takes of torch is arange,
clamp and where; without torch NumPy's are put in their place."""

import types

import numpy as np
import pytest

from midtread.lm import rope
from midtread.lm.config import Model
from tests.peers import peer

(theirs,) = peer.load("transformers", "4.48.3", "transformers.modeling_rope_utils")


class Tensor(np.ndarray):
    def float(self):
        return self.astype(np.float32)

    def to(self, device):
        return self


def arange(*args, dtype=None):
    return np.arange(*args, dtype=dtype).view(Tensor)


NUMPY = types.SimpleNamespace(
    arange=arange, clamp=np.clip, where=np.where, float32=np.float32, int64=np.int64
)
#  their config's fields, and ours
DEEPSEEK = {"factor": 40, "original_max_position_embeddings": 4096}
QWEN = {"factor": 4, "original_max_position_embeddings": 32768, "beta_fast": 24}
LLAMA = {"factor": 8, "original_max_position_embeddings": 8192, "low_freq_factor": 1,
         "high_freq_factor": 4}  # fmt: skip
CASES = {
    "deepseek": ("yarn", DEEPSEEK, 10000.0, 64),
    "qwen": ("yarn", QWEN, 1e6, 128),
    "llama": ("llama3", LLAMA, 5e5, 128),
    "small": ("llama3", {**LLAMA, "factor": 32}, 10000.0, 32),
}


@pytest.mark.parametrize("case", CASES)
def test_frequencies_and_gains(case, monkeypatch):
    kind, scaling, base, width = CASES[case]
    if not hasattr(theirs, "torch"):
        monkeypatch.setattr(theirs, "torch", NUMPY, raising=False)
    config = types.SimpleNamespace(
        rope_theta=base, head_dim=width, hidden_size=width, num_attention_heads=1,
        rope_scaling=scaling, partial_rotary_factor=1.0,
        # this version reads yarn's original length from here
        max_position_embeddings=scaling["original_max_position_embeddings"],
    )  # fmt: skip
    frequencies, gain = theirs.ROPE_INIT_FUNCTIONS[kind](config, "cpu")
    words = ",".join(f"{name}:{number}" for name, number in scaling.items())
    ours = rope.of(Model(rope_max_timescale=base, rope_scaling=f"{kind},{words}"))
    np.testing.assert_allclose(
        ours.frequencies(width), np.asarray(frequencies), rtol=2e-6
    )
    assert ours.gain == pytest.approx(gain) and ours.logits_gain == 1
