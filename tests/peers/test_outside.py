"""Models from outside, quantized without an edit.

Published packages: GPT-2 of transformers 4.48 (Linen; its kernels are stored transposed,
its head applies a Dense by hand to the embedding's transpose) and Llama 3 of google-tunix
0.1.7 (NNX; einsums, remat, a tied head). And Flax's own examples, rebuilt from its layers.
Tunix brings much along, so it is not among our test dependencies:

    pip install google-tunix==0.1.7 && pytest tests/peers/test_outside.py
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import midtread as mt

IDS = jnp.arange(16)[None] % 7
TRAIN = [mt.QtRule(weight_qtype="int8", act_qtype="int8", bwd_qtype="int8")]
SERVE = [mt.QuantizationRule(weight_qtype="int8")]


@pytest.fixture(autouse=True)
def loose():
    with jax.numpy_dtype_promotion("standard"):
        yield


def distance(a, b):
    return float(jnp.linalg.norm(a - b) / jnp.linalg.norm(b))


def check_linen(model, args, out=lambda y: y, boxes=0, **init):
    variables = model.init(jax.random.key(0), *args, **init)
    exact = out(model.apply(variables, *args))

    trained = mt.quantize_model(model, mt.QtProvider(TRAIN))
    loss = lambda v: jnp.mean(out(trained.apply(v, *args)) ** 2)
    grads = jax.jit(jax.grad(loss))(variables)["params"]
    assert all(bool(jnp.isfinite(g).all()) for g in jax.tree.leaves(grads))
    assert 0 < distance(out(trained.apply(variables, *args)), exact) < 0.1

    served = mt.quantize_model(model, mt.PtqProvider(SERVE))
    shapes = jax.eval_shape(lambda: served.init(jax.random.key(0), *args, **init))
    params = mt.quantize_params(variables["params"], shapes["params"])
    is_box = lambda x: isinstance(x, mt.WithAux)
    assert sum(map(is_box, jax.tree.leaves(params, is_leaf=is_box))) == boxes
    quantized = {**variables, "params": params}
    got = out(jax.jit(served.apply)(quantized, *args))
    assert 0 < distance(got, exact) < 0.05


def check_nnx(make, args, boxes, out=lambda y: y):
    exact = out(make()(*args))

    trained = mt.quantize_model(make(), mt.QtProvider(TRAIN), *args)
    grads = nnx.grad(lambda m: jnp.mean(out(m(*args)) ** 2))(trained)
    assert all(bool(jnp.isfinite(g).all()) for g in jax.tree.leaves(grads))
    assert 0 < distance(out(trained(*args)), exact) < 0.1

    served = mt.quantize_model(make(), mt.PtqProvider(SERVE), *args)
    held = [v for _, m in nnx.iter_modules(served) for v in vars(m).values()]
    assert sum(isinstance(v, mt.WithAux) for v in held) == boxes
    assert 0 < distance(out(served(*args)), exact) < 0.05


def test_gpt2_of_transformers():
    pytest.importorskip("transformers", reason="transformers==4.48.3 has Flax models")
    gpt2 = pytest.importorskip(
        "transformers.models.gpt2.modeling_flax_gpt2",
        reason="this transformers has no Flax models: pip install transformers==4.48.3",
    )
    from transformers import GPT2Config

    config = GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2)
    args = (IDS, jnp.ones_like(IDS), jnp.arange(16)[None])
    check_linen(
        gpt2.FlaxGPT2LMHeadModule(config), args, lambda y: y["logits"], boxes=8,
        return_dict=False,
    )  # fmt: skip


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # its own
def test_llama3_of_tunix():
    llama = pytest.importorskip(
        "tunix.models.llama3.model", reason="pip install google-tunix==0.1.7"
    )
    for remat in (llama.RematConfig.NONE, llama.RematConfig.BLOCK):
        config = llama.ModelConfig(
            num_layers=2, vocab_size=64, embed_dim=32, hidden_dim=64, num_heads=4,
            head_dim=8, num_kv_heads=2, rope_theta=10_000, norm_eps=1e-5,
            weight_tying=True, remat_config=remat,
        )  # fmt: skip
        make = lambda config=config: llama.Llama3(config, rngs=nnx.Rngs(0))
        mask = jnp.tril(jnp.ones((1, 16, 16), bool))
        args = (IDS, jnp.arange(16)[None], None, mask)
        check_nnx(make, args, boxes=2 * 7 + 1, out=lambda y: y[0].astype(jnp.float32))


# --- Flax's examples ---------------------------------------------------------------------------


class Lm(nn.Module):
    """lm1b: attention, a tied head"""

    @nn.compact
    def __call__(self, ids):
        embed = nn.Embed(16, 32)
        x = embed(ids)
        for _ in range(2):
            mask = nn.make_causal_mask(ids)
            x += nn.MultiHeadDotProductAttention(num_heads=2)(
                nn.LayerNorm()(x), mask=mask
            )
            x += nn.Dense(32)(nn.gelu(nn.Dense(64)(nn.LayerNorm()(x))))
        return embed.attend(nn.LayerNorm()(x))


class Seq2seq(nn.Module):
    """seq2seq: an LSTM under nn.RNN, which scans"""

    @nn.compact
    def __call__(self, x):
        carry, _ = nn.RNN(nn.LSTMCell(8), return_carry=True, name="encoder")(x)
        y = nn.RNN(nn.LSTMCell(8), name="decoder")(x, initial_carry=carry)
        return nn.Dense(4)(y)


class NnxLm(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(16, 32, rngs=rngs)
        attention = lambda: nnx.MultiHeadAttention(2, 32, decode=False, rngs=rngs)
        self.layers = nnx.List([attention() for _ in range(2)])
        self.norm = nnx.LayerNorm(32, rngs=rngs)

    def __call__(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = x + layer(x, mask=nnx.make_causal_mask(ids))
        return self.embed.attend(self.norm(x))


class NnxRnn(nnx.Module):
    def __init__(self, rngs):
        self.rnn = nnx.RNN(nnx.LSTMCell(4, 8, rngs=rngs), rngs=rngs)
        self.head = nnx.Linear(8, 4, rngs=rngs)

    def __call__(self, x):
        return self.head(self.rnn(x))


STEPS = np.random.RandomState(0).randn(2, 5, 4).astype(np.float32)


@pytest.mark.parametrize("model, x, boxes", [
    (Lm(), IDS, 2 * 6 + 1),
    pytest.param(Seq2seq(), STEPS, 17, marks=pytest.mark.slow),
], ids=["lm1b", "seq2seq"])  # fmt: skip
def test_flax_examples_linen(model, x, boxes):
    check_linen(model, (jnp.asarray(x),), boxes=boxes)


@pytest.mark.parametrize("cls, x, boxes", [
    pytest.param(NnxLm, IDS, 2 * 4 + 1, marks=pytest.mark.slow), (NnxRnn, STEPS, 9),
], ids=["lm1b", "rnn"])  # fmt: skip
def test_flax_examples_nnx(cls, x, boxes):
    check_nnx(lambda: cls(nnx.Rngs(0)), (jnp.asarray(x),), boxes)
