"""The loss in blocks is the loss: values, gradients, and what it takes in memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from midtread.lm import build, loss, settings, step
from midtread.lm import model as models
from midtread.lm.config import Model, section

WORDS = ["tiny", "dtype=float32", "num_decoder_layers=1", "vocab_size=300"]
WORDS += ["max_target_length=24"]
CASES = {
    "tied": [],
    "own head": ["logits_via_embedding=false"],
    "delayed head": [
        "logits_via_embedding=false", "quantization=te_fp8_delayedscaling",
        "quantize_logits_proj=true",
    ],
}  # fmt: skip
# blocks have ranges of their own: gradients of the weight are rounded by other scales
TOLERANCE = {"delayed head": 0.05}


def gradients(words, key):
    config = settings.load([*WORDS, *words])
    m = section(config, Model)
    parts = step.take_apart(build.for_training(config, models.create(m)))
    shape = (2, m.max_target_length)
    inputs, targets = jax.random.randint(key, (2, *shape), 0, m.vocab_size)
    mask = jax.random.bernoulli(key, 0.8, shape).astype(jnp.int32)
    places = jnp.broadcast_to(jnp.arange(shape[1]), shape)
    batch = {"inputs": inputs, "targets": targets, "mask": mask, "positions": places}
    batch["segments"] = jnp.ones(shape, jnp.int32)

    @jax.jit
    def run(learned):
        def of(learned):
            model = step.Parts(parts.graph, learned, parts.kept, parts.random).whole()
            return step.loss_sums(m, 1e-2, model, batch, jnp.sum(mask))

        return jax.value_and_grad(of, has_aux=True)(learned)

    return run(parts.learned)


@pytest.mark.parametrize("name", CASES)
def test_blocks_are_the_whole(key, name, monkeypatch):
    (whole, whole_nll), want = gradients(CASES[name], key)
    monkeypatch.setattr(loss, "FEW", 0)
    monkeypatch.setattr(loss, "BLOCK", 2 * 300 * 7)  # 4 blocks, the last one padded
    (blocks, blocks_nll), got = gradients(CASES[name], key)
    exact = 1e-6 if name not in TOLERANCE else 2e-3
    np.testing.assert_allclose(blocks, whole, rtol=exact)
    np.testing.assert_allclose(blocks_nll, whole_nll, rtol=exact)
    flat = lambda tree: jax.tree.leaves(nnx.to_pure_dict(tree))
    for a, b in zip(flat(got), flat(want), strict=True):
        bound = TOLERANCE.get(name, 1e-5) * float(jnp.abs(b).max() + 1e-3)
        np.testing.assert_allclose(a, b, atol=bound, rtol=1e-5)


def test_logits_of_a_large_vocabulary_are_megabytes():
    """16,384 tokens of 128,256 words: 8.4 GB of logits, and as much of their gradient."""
    V, D, B, T = 128_256, 8, 4, 4096
    table = nnx.eval_shape(lambda: nnx.Linear(D, V, use_bias=False, rngs=nnx.Rngs(0)))
    graph, params = nnx.split(table)
    x = jax.ShapeDtypeStruct((B, T, D), jnp.float32)
    rows = jax.ShapeDtypeStruct((B, T), jnp.int32)
    mask = jax.ShapeDtypeStruct((B, T), jnp.float32)

    def of(params, x, targets, mask):
        goal = loss.Goal(targets, mask, 1.0)
        head = nnx.merge(graph, params)
        return loss.judge(head, lambda head, x: head(x), V, x, goal).loss

    compiled = jax.jit(jax.grad(of, (0, 1))).lower(params, x, rows, mask).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 3 * 4 * loss.BLOCK
    assert 4 * B * T * V > 5 * 4 * loss.BLOCK


def test_a_head_that_rounds_at_random_is_run_whole():
    head = nnx.Linear(4, 8, rngs=nnx.Rngs(0))
    assert loss.why_whole(head, 2**30) is None
    assert "few" in loss.why_whole(head, 100)
    head.noise = nnx.Rngs(1)
    assert "at random" in loss.why_whole(head, 2**30)
