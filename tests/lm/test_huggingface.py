"""Models of transformers, by their logits: tests/interop/fixtures/make_huggingface.py."""

import functools
import json
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from midtread import cli
from midtread.interop import huggingface as hf
from midtread.lm import architectures, convert, settings
from midtread.lm import cache as kv
from midtread.lm.config import Model

ROOT = pathlib.Path(__file__).parents[1] / "interop" / "fixtures" / "huggingface"
NAMES = sorted(p.name for p in ROOT.iterdir() if p.is_dir())


def load(name, *words):
    ((path, config),) = settings.load_checkpoints([str(ROOT / name), *words])
    return config, convert.load(config, path)


@functools.partial(jax.jit, static_argnums=0)
def two_ways(graph, state, tokens, cache):
    """Logits of all tokens at once, and from a cache: eight at once, then one by one."""
    anew = lambda: nnx.merge(graph, jax.tree.map(lambda x: x, state))
    net = lambda *a, **k: anew()(*a, **k)
    B, T = tokens.shape
    at = lambda first, last: jnp.broadcast_to(
        jnp.arange(first, last), (B, last - first)
    )
    begun = net(tokens[:, :8], at(0, 8), cache=cache)

    def one(cache, i):
        here = jax.lax.dynamic_slice_in_dim(tokens, i, 1, axis=1)
        out = net(here, jnp.full((B, 1), i), cache=cache)
        return out.cache, out.logits[:, 0]

    _, rest = jax.lax.scan(one, begun.cache, jnp.arange(8, T))
    return net(tokens).logits, jnp.concatenate([begun.logits, rest.swapaxes(0, 1)], 1)


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_transformers(name):
    known = np.load(ROOT / name / "expected.npz")
    config, net = load(name, "max_target_length=16")
    tokens = jnp.asarray(known["tokens"], jnp.int32)
    for got in two_ways(*nnx.split(net), tokens, kv.make(config, *tokens.shape)):
        np.testing.assert_allclose(got, known["logits"], atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("name", NAMES)
def test_a_model_knows_its_architecture(name):
    """From config.json to keys and back; the names of the one hold the other's arrays."""
    config = json.loads((ROOT / name / "config.json").read_text())
    m = Model(**architectures.settings_of(config, name))
    arch, again = architectures.config_of(m)
    assert arch.model_type in (config["model_type"], "llama")
    assert Model(**architectures.settings_of(again, name)) == m or name == "phi3"


@pytest.mark.parametrize("name", ["qwen2", "deepseek_v3", "gpt_oss"])
def test_import_and_export_keep_every_bit(name, tmp_path, monkeypatch, capsys):
    """A folder becomes a run and a folder again; a list of layers reads the same."""
    monkeypatch.chdir(tmp_path)
    assert cli.main(["import", str(ROOT / name)]) == 0
    assert cli.main(["export", f"runs/{name}", "export_path=out"]) == 0
    assert "tensors" in capsys.readouterr().out
    before, after = hf.Folder(ROOT / name), hf.Folder("out")
    assert before.tensors == after.tensors
    for tensor in before.tensors:
        np.testing.assert_array_equal(before.read(tensor), after.read(tensor))
    shutil.move(f"runs/{name}", "elsewhere")
    ((path, config),) = settings.load_checkpoints(["elsewhere", "scan_layers=false"])
    _, scanned = load(name)
    listed = convert.load(config, path)
    tokens = jnp.arange(6)[None]
    np.testing.assert_allclose(
        listed(tokens).logits, scanned(tokens).logits, atol=1e-5, rtol=1e-5
    )
