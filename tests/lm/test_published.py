"""What others published in few bits runs, is judged, is asked, and takes adapters (QLoRA).

One model has every format that is read, as its maker wrote it (tests/interop/fixtures): two
weights of a layer are of two folders, a third is of a kind of GGUF. DeepSeek-V3 in fp8 blocks
and gpt-oss in mxfp4 are folders of their own, laid out as they are published.
"""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import midtread as mt
from midtread.interop import gguf, quantized
from midtread.interop import huggingface as hf
from midtread.lm import architectures, codes, settings
from midtread.lm.config import Model, section
from midtread.model.boxes import WithAux
from midtread.numerics.qarray import QArray

FIXTURES = pathlib.Path(__file__).parents[1] / "interop" / "fixtures"
SHAPE = (32, 64)


def tokens(vocabulary):
    drawn = np.random.default_rng(0).integers(0, vocabulary, (2, 8))
    return jnp.asarray(drawn, jnp.int32)


# --- every format in one model ----------------------------------------------------------------


def folders():
    """The weights [32, 64] that others wrote, by folder, and the notes of their tensors."""
    opened = {}
    for path in sorted(FIXTURES.iterdir()):
        if (path / "config.json").is_file():
            q = quantized.open_model(path).read("a.weight")
            if q.shape == SHAPE:
                opened[path.name] = q
    return opened


def kinds():
    """Weights [64, 256] of every kind of block that llama.cpp wrote."""
    file = gguf.GGUF(FIXTURES / "kinds.gguf")
    rows = lambda part: None if part is None else np.tile(part, (SHAPE[1] // 2, 1))
    coded = {name: file[name] for name in file if isinstance(file[name], QArray)}
    return {
        name: q.replace(
            qvalue=rows(q.qvalue), scale=rows(q.scale), zero_point=rows(q.zero_point)
        )
        for name, q in coded.items()
    }


class Assembled:
    """A source whose tensors are codes of several makers, and floats drawn at random."""

    name, notes, activations = "assembled", (), {}

    def __init__(self, m: Model, weights: dict[str, QArray]):
        rng, self.weights = np.random.default_rng(1), weights
        rows = architectures.table(m, architectures.BY_TYPE["llama"])
        shapes = architectures.shapes(m)
        self.arrays, self.tensors = {}, {}
        for row in rows:
            (name, *_), shape = next(row.places()), shapes[row.path].shape
            shape = shape[::-1] if row.turned else shape
            drawn = 1 + rng.normal(size=shape) / 9 if len(shape) == 1 else rng.normal(
                size=shape) * shape[-1] ** -0.5  # fmt: skip
            self.arrays[name] = drawn.astype(np.float32)
            self.tensors[name] = hf.Tensor(shape, np.dtype(np.float32))
        self.table, self.shapes = rows, shapes

    def read(self, name):
        return self.weights.get(name, self.arrays[name])

    def found(self):
        return hf.Arrays(self, self.table, self.shapes)

    def as_floats(self):
        """The same, with what the codes stand for."""
        for name, q in self.weights.items():
            self.arrays[name] = hf.as_floats(q, np.float32)
        self.weights = {}
        return self


def adapted(model, where, ids):
    """Logits, the loss before and after a step of adapters on a model, and the step."""
    provider = mt.LoraProvider(module_path=where, rank=2, alpha=4.0)
    model = mt.apply_lora_to_model(model, provider, ids, rngs=nnx.Rngs(0))
    graph, lora, base = nnx.split(model, nnx.LoRAParam, ...)

    def loss(lora, base):
        logits = nnx.merge(graph, lora, base)(ids).logits
        picked = jnp.take_along_axis(
            jax.nn.log_softmax(logits[:, :-1]), ids[:, 1:, None], -1
        )
        return -picked.mean(), logits

    run = jax.jit(jax.value_and_grad(loss, has_aux=True))
    (before, logits), grads = run(lora, base)
    after = run(jax.tree.map(lambda p, g: p - 0.3 * g, lora, grads), base)[0][0]
    return logits, float(before), float(after), grads


def test_every_format_runs_and_takes_adapters():
    """Logits are those of what the codes stand for; every adapter on them learns."""
    weights, blocks = folders(), list(kinds().items())
    pairs = [*zip(list(weights)[::2], list(weights)[1::2], strict=True)]
    words = ["vocab_size=48", "emb_dim=64", "mlp_dim=256", "num_query_heads=4",
             "num_kv_heads=4", "head_dim=8", f"num_decoder_layers={len(pairs)}",
             "scan_layers=false", "embedding_gain=1.0", "dtype=float32",
             "logits_via_embedding=false", "remat_policy=none"]  # fmt: skip
    config = settings.load(words)
    m = section(config, Model)
    placed = {}
    for i, (one, other) in enumerate(pairs):
        layer = f"model.layers.{i}"
        placed[f"{layer}.self_attn.q_proj.weight"] = weights[one]
        placed[f"{layer}.self_attn.v_proj.weight"] = weights[other]
        placed[f"{layer}.mlp.down_proj.weight"] = blocks[i % len(blocks)][1]
    assert len(pairs) >= len(blocks)  # all kinds have a place
    source, ids = Assembled(m, placed), tokens(48)
    model = codes.load(config, source.found())
    boxes = [n for _, n in nnx.iter_graph(model) if isinstance(n, WithAux)]
    assert len(boxes) == len(placed)
    got, before, after, grads = adapted(model, ".*(query|value|wo)", ids)
    model = codes.load(config, source.as_floats().found())
    want = nnx.jit(lambda net, ids: net(ids).logits)(model, ids)
    np.testing.assert_allclose(got, want, atol=2e-4 * np.abs(want).max())
    assert after < before
    learned = {path: g for path, g in nnx.to_flat_state(grads) if "lora_b" in path[-1]}
    assert len(learned) == len(placed)
    for path, g in learned.items():
        assert np.isfinite(g.get_value()).all() and np.any(g.get_value()), path
