"""What others published in few bits runs, is judged, is asked, and takes adapters (QLoRA).

One model has every format that is read, as its maker wrote it (tests/interop/fixtures): two
weights of a layer are of two folders, a third is of a kind of GGUF. DeepSeek-V3 in fp8 blocks
and gpt-oss in mxfp4 are folders of their own, laid out as they are published.
"""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import midtread as mt
from midtread import cli
from midtread.interop import gguf, quantized
from midtread.interop import huggingface as hf
from midtread.lm import architectures, codes, config_json, convert, settings
from midtread.lm import eval as evals
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
        base = jax.tree.map(lambda x: x, base)  # variables of this trace
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


# --- DeepSeek-V3 and gpt-oss as they are published --------------------------------------------

SMALL = {"vocab_size": 264, "hidden_size": 160, "max_position_embeddings": 64,
         "num_hidden_layers": 2, "num_attention_heads": 4}  # fmt: skip
CONFIGS = {
    "deepseek_v3": {
        **SMALL, "intermediate_size": 192, "first_k_dense_replace": 1, "q_lora_rank": 32,
        "num_key_value_heads": 4, "kv_lora_rank": 32, "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16, "v_head_dim": 32, "n_routed_experts": 4,
        "num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 2, "topk_group": 1,
        "moe_intermediate_size": 144, "norm_topk_prob": True,
        "quantization_config": {"quant_method": "fp8", "activation_scheme": "dynamic",
                                "fmt": "e4m3", "weight_block_size": [128, 128]},
    },
    "gpt_oss": {
        **SMALL, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 96,
        "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 4,
        "rope_parameters": {"rope_type": "default", "rope_theta": 150000.0},
        "quantization_config": {"quant_method": "mxfp4"},
    },
}  # fmt: skip


def in_blocks(name, w):
    """A matrix as DeepSeek has it: e4m3, and a scale for every 128 x 128."""
    if w.ndim != 2 or any(part in name for part in ("embed", "lm_head", "mlp.gate.")):
        return {name: w}, {name: w}
    whole = np.pad(w, [(0, -n % 128) for n in w.shape])
    tiles = whole.reshape(len(whole) // 128, 128, -1, 128)
    scale = (np.abs(tiles).max((1, 3)) / 448).astype(np.float32)
    wide = np.repeat(np.repeat(scale, 128, 0), 128, 1)[: w.shape[0], : w.shape[1]]
    codes = (w / wide).astype(jnp.float8_e4m3fn)
    stands_for = codes.astype(np.float32) * wide
    return {name: codes, f"{name}_scale_inv": scale}, {name: stands_for}


def in_mxfp4(name, w):
    """Experts [experts, in, out] as gpt-oss has them: e2m1 and exponents per 32."""
    if w.ndim != 3:
        return {name: w}, {name: w}
    x = w.swapaxes(1, 2).reshape(len(w), w.shape[2], -1, 32)
    power = np.floor(np.log2(np.abs(x).max(-1, keepdims=True))) - 2
    codes = (x / 2.0**power).astype(jnp.float4_e2m1fn)
    stands_for = (codes.astype(np.float32) * 2.0**power).reshape(x.shape[:2] + (-1,))
    nibbles = codes.view(np.uint8)
    blocks = nibbles[..., ::2] | nibbles[..., 1::2] << 4
    scales = (power[..., 0] + 127).astype(np.uint8)
    stands_for = np.ascontiguousarray(stands_for.swapaxes(1, 2), np.float32)
    return {f"{name}_blocks": blocks, f"{name}_scales": scales}, {name: stands_for}


PACKED = {"deepseek_v3": in_blocks, "gpt_oss": in_mxfp4}


@pytest.fixture(params=list(CONFIGS), scope="module")
def published(request, tmp_path_factory):
    """A folder as it is published, and one of what its codes stand for."""
    name, place = request.param, tmp_path_factory.mktemp(request.param)
    about = {"model_type": name, **CONFIGS[name]}
    m = Model(**config_json.settings_of(about, name))
    table = architectures.table(m, architectures.BY_TYPE[name])
    rng, tree = np.random.default_rng(2), {}
    for path, shape in architectures.shapes(m).items():
        drawn = rng.normal(size=shape.shape).astype(np.float32)
        is_scale = path.endswith("scale")
        tree[path] = 1 + drawn / 9 if is_scale else drawn * shape.shape[-1] ** -0.5
    source = hf.Tree(tree, table)
    coded, floats = {}, {}
    for tensor in source.tensors:
        one, other = PACKED[name](tensor, source.read(tensor))
        coded |= {k: np.ascontiguousarray(v) for k, v in one.items()}
        floats |= other
    hf.write_tensors(place / "coded", coded, about)
    del about["quantization_config"]
    hf.write_tensors(place / "float", floats, about)
    return place


WORDS = ("dtype=float32", "max_target_length=16")


def load(path):
    ((_, config),) = settings.load_checkpoints([str(path), *WORDS])
    return convert.load(config, str(path))


def test_a_published_model_runs_and_takes_adapters(published):
    model, ids = load(published / "coded"), tokens(264)
    want = nnx.jit(lambda net, ids: net(ids).logits)(load(published / "float"), ids)
    formats = {"float8_e4m3fn"} if "deepseek" in str(published) else {"mxfp4"}
    assert {*codes.formats(model)} == formats
    got, before, after, _ = adapted(model, ".*self_attention.*", ids)
    np.testing.assert_allclose(got, want, atol=2e-4 * np.abs(want).max())
    assert after < before


def test_a_published_model_is_judged_and_asked(
    published, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    pathlib.Path("text.txt").write_text("It is judged by a text of its own. " * 8)
    words = ["dataset_path=text.txt", "eval_steps=1", "batch_size=2", *WORDS]
    paths = [str(published / kind) for kind in ("coded", "float")]
    one, other = evals.evaluate(settings.load_checkpoints([*paths, *words]))
    assert one.quantization in ("float8_e4m3fn", "mxfp4")
    assert one.weight_bytes < 0.7 * other.weight_bytes
    np.testing.assert_allclose(one.loss, other.loss, rtol=1e-4)
    asked = ["generate", paths[0], "prompt=a text", "max_new_tokens=3", *WORDS]
    assert cli.main(asked) == 0
    assert "tokens/s" in capsys.readouterr().out
