"""transformers itself: models drawn anew give our logits, and what we export loads there.

The committed fixtures (tests/interop/fixtures/make_huggingface.py) are compared without the
package; here it is run, on other weights than those.
"""

import pathlib
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from midtread import cli
from midtread.lm import cache as kv
from midtread.lm import convert, settings
from midtread.lm.train import train
from tests.interop.fixtures import make_huggingface as made
from tests.lm.test_huggingface import two_ways
from tests.peers import peer

torch, transformers = peer.load("transformers", "5.22.2", "torch", "transformers")


@pytest.fixture
def usual(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with peer.manners():
        yield


def theirs(folder, tokens):
    net = transformers.AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32
    )
    return made.logits(net.eval(), tokens)


def from_cache(net, tokens, begun=8):
    """Their logits: of the first tokens at once, of the others one by one."""
    tokens, parts = torch.asarray(tokens), []
    with torch.no_grad():
        out = net(tokens[:, :begun], use_cache=True)
        parts.append(out.logits)
        for i in range(begun, tokens.shape[1]):
            cache = out.past_key_values
            out = net(tokens[:, i : i + 1], past_key_values=cache, use_cache=True)
            parts.append(out.logits)
    return torch.cat(parts, 1).numpy()


@pytest.mark.parametrize("name", made.MODELS)
def test_new_weights_in_and_out(name, usual):
    """A folder of theirs; our logits of it, all at once and from a cache as theirs are; and
    theirs of what we export of it."""
    tokens = np.random.default_rng(1).integers(3, made.VOCAB, (2, made.LENGTH))
    net = made.make(name, seed=7)
    wanted = made.logits(net, tokens)
    net.save_pretrained("theirs")
    ((path, config),) = settings.load_checkpoints(["theirs", "max_target_length=16"])
    parts = nnx.split(convert.load(config, path))
    cache = kv.make(config, *tokens.shape)
    at_once, decoded = two_ways(*parts, jnp.asarray(tokens, jnp.int32), cache)
    np.testing.assert_allclose(at_once, wanted, atol=2e-5, rtol=2e-5)
    theirs_decoded = from_cache(net, tokens)
    np.testing.assert_allclose(decoded, theirs_decoded, atol=2e-5, rtol=2e-5)
    assert cli.main(["import", "theirs"]) == 0
    assert cli.main(["export", "runs/theirs", "export_path=out"]) == 0
    np.testing.assert_array_equal(theirs("out", tokens), wanted)


def test_a_model_trained_here_loads_there(usual):
    words = ["tiny", "num_decoder_layers=2", "steps=2", "dtype=float32"]
    run = str(train(settings.load(words)).folder)
    assert cli.main(["export", run, "export_path=out"]) == 0
    ((path, config),) = settings.load_checkpoints([run])
    tokens = np.arange(2 * 12).reshape(2, 12) % 200
    ours = nnx.jit(lambda net, x: net(x).logits)(convert.load(config, path), tokens)
    np.testing.assert_allclose(theirs("out", tokens), ours, atol=2e-5, rtol=2e-5)


def test_the_fixtures_are_what_the_script_makes(tmp_path):
    script = pathlib.Path(made.__file__)
    subprocess.run([sys.executable, script, tmp_path], check=True, capture_output=True)
    for file in sorted(tmp_path.glob("*/expected.npz")):
        held = script.parent / "huggingface" / file.parent.name / file.name
        new, old = np.load(file)["logits"], np.load(held)["logits"]
        np.testing.assert_allclose(new, old, atol=1e-6, rtol=1e-6)
