"""Folders that we export, loaded by transformers with compressed-tensors, and by mlx-lm;
and a model that transformers save through torchao, loaded here.

Their logits are ours on the same codes: the model that `convert.load` makes of the folder.
"""

import contextlib

import jax.numpy as jnp
import numpy as np
import peer
import pytest
from flax import nnx

from midtread.interop import export
from midtread.interop.huggingface import Folder
from midtread.lm import convert, settings

torch, transformers, _ = peer.load(
    "compressed-tensors", "0.20.0", "torch", "transformers", "compressed_tensors"
)
pytestmark = pytest.mark.filterwarnings("ignore")  # of others
TOKENS = np.random.default_rng(0).integers(0, 96, (2, 12))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A Llama with random weights and norms, written by transformers."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=96, hidden_size=256, intermediate_size=512, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
        tie_word_embeddings=False, initializer_range=0.06,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).float()
    for name, weight in model.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(weight, 0.5, 1.5)
    path = tmp_path_factory.mktemp("llama") / "float"
    model.save_pretrained(path)
    return Folder(path)


def ours(path) -> np.ndarray:
    ((_, config),) = settings.load_checkpoints([str(path), "dtype=float32"])
    model = convert.load(config, str(path))
    return np.asarray(
        nnx.jit(lambda m, t: m(t).logits)(model, jnp.asarray(TOKENS, jnp.int32))
    )


# NVFP4 and MXFP4 are unpacked to bfloat16 by compressed-tensors, whatever the model is in
TOLERANCE = {"nvfp4": 6e-3, "mxfp4": 6e-3}


@pytest.mark.parametrize(
    "name",
    ["w4a16", "w4a16_asym", "w8a16", "w8a8", "fp8", "fp8_block", "nvfp4", "mxfp4"],
)
def test_transformers_give_our_logits(folder, tmp_path, name):
    path = export.export(folder, tmp_path / name, name)
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    ids = torch.from_numpy(TOKENS)
    with contextlib.suppress(
        RuntimeError
    ):  # weights are unpacked before the first run,
        model(
            ids
        )  # four-bit floats to bfloat16 whatever the model is in: a RuntimeError
    torch.nn.Module.float(model)
    with torch.no_grad():
        want = model(ids).logits.float().numpy()
    got = ours(path)
    most = TOLERANCE.get(name, 1e-3)
    if name == "w8a8":
        most = 2 * moved(model, ids, want)
    assert np.linalg.norm(got - want) / np.linalg.norm(want) < most


def moved(model, ids, want) -> float:
    """How far the peer's own logits move when its embeddings change in the fifth digit:
    a rounded activation that goes the other way takes others along (seen: 0.025)."""
    rows = model.model.embed_tokens(ids)
    rows = rows * (1 + 1e-5 * torch.randn_like(rows))
    with torch.no_grad():
        other = model(inputs_embeds=rows).logits.numpy()
    return np.linalg.norm(other - want) / np.linalg.norm(want)


def test_mlx_lm_gives_our_logits(folder, tmp_path):
    mx, loading, _ = peer.load("mlx-lm", "0.32.2", "mlx.core", "mlx_lm.utils", "mlx_lm")
    path = export.export(folder, tmp_path / "mlx", "mlx4")
    model, _ = loading.load_model(path)
    want = np.array(model(mx.array(TOKENS)).astype(mx.float32))
    got = ours(path)
    assert np.linalg.norm(got - want) / np.linalg.norm(want) < 1e-3


@pytest.mark.parametrize("kind", ["int8", "int4", "int3-asymmetric"])
def test_what_torchao_saves_gives_its_logits(folder, tmp_path, kind):
    peer.load("torchao", "0.18.0", "torchao")
    from tests.interop.fixtures.make_layouts import torchao_models

    given = transformers.TorchAoConfig(torchao_models()[kind])
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder.path, dtype=torch.float32, quantization_config=given
    )
    model.save_pretrained(tmp_path / "out", max_shard_size="1MB")
    with torch.no_grad():
        want = model(torch.from_numpy(TOKENS)).logits.numpy()
    np.testing.assert_allclose(
        ours(tmp_path / "out"), want, atol=2e-5 * np.abs(want).max()
    )
