"""Whole models, the same rules under Qwix and here: parameters, statistics, outputs and
gradients. Float32, so what differs is the order of sums."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import midtread as mt

qwix = pytest.importorskip("qwix", reason="the peer, qwix==0.1.8, is not installed")
# Qwix uses names that Flax has deprecated since.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


class MLP(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Dense(32)(x))
        return nn.DenseGeneral((2, 8))(x)


class CNN(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Conv(8, (3, 3))(x))
        x = nn.relu(nn.Conv(8, (3, 3), strides=2, padding="VALID")(x))
        return nn.Dense(4)(x.reshape(x.shape[0], -1))


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        h = nn.LayerNorm()(x)
        x = x + nn.MultiHeadDotProductAttention(num_heads=2, qkv_features=16)(h, h)
        h = nn.LayerNorm()(x)
        return x + nn.Dense(16)(nn.gelu(nn.Dense(32)(h))), None


class Transformer(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(11, 16)(tokens)
        layers = nn.scan(
            nn.remat(Layer),
            {"params": 0, "quant_stats": 0},
            split_rngs={"params": True},
            length=2,
        )
        x, _ = layers()(x, None)
        w = self.param("head", nn.initializers.lecun_normal(), (16, 11))
        return jnp.einsum("btd,dv->btv", x, w)


class MoE(nn.Module):
    @nn.compact
    def __call__(self, x):
        w = self.param("experts", nn.initializers.lecun_normal(), (3, 8, 8))
        sizes = jnp.array([5, 7, 4], jnp.int32)
        return nn.Dense(8)(jax.lax.ragged_dot(x, w, sizes))


def normal(*shape):
    return jax.random.normal(jax.random.key(0), shape)


MODELS = {
    "mlp": (MLP(), normal(4, 16)),
    "cnn": (CNN(), normal(2, 8, 8, 3)),
    "transformer": (Transformer(), jnp.arange(12).reshape(2, 6) % 11),
    "moe": (MoE(), normal(16, 8)),
}
RULES = {
    "qat int8": {"weight_qtype": "int8", "act_qtype": "int8"},
    "qat w4": {"weight_qtype": "int4"},
    "qt int8": {"weight_qtype": jnp.int8, "act_qtype": jnp.int8, "bwd_qtype": jnp.int8},
    "qt fp8": {"weight_qtype": jnp.float8_e4m3fn, "act_qtype": jnp.float8_e4m3fn, "bwd_qtype": jnp.float8_e5m2},
    "qat clipped": {"weight_qtype": "int8", "act_qtype": "int8", "act_calibration_method": "absmax,0.8"},
    "static": {"weight_qtype": "int8", "act_qtype": "int8", "act_static_scale": True, "act_batch_axes": (0, 1)},
}  # fmt: skip
PEER_CANNOT = {
    ("qat w4", "moe"): "refuses a weight-only ragged_dot",
    ("qat clipped", "moe"): "ignores the calibration of a ragged_dot",
    ("static", "moe"): "ignores static ranges of a ragged_dot",
    ("qat clipped", "cnn"): "does not mask clipped gradients of a convolution",
    ("static", "cnn"): "averages over an axis that a convolution's scale does not have",
    ("qt fp8", "cnn"): "multiplies e5m2 with e4m3 in a convolution, which lax refuses",
}


def close(ours, theirs, tolerance=2e-5):
    """Against the largest number in the tree: some gradients are zero but for rounding."""
    ours, theirs = (
        [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(tree)]
        for tree in (ours, theirs)
    )
    assert [a.shape for a in ours] == [b.shape for b in theirs]
    largest = max((np.abs(b).max() for b in theirs), default=0)
    for a, b in zip(ours, theirs):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance * largest)


# Without bwd_qtype Qwix takes float operands for the gradient of a dot, and quantized ones
# for that of a convolution or a ragged_dot; ours are float, or Qwix's if they are asked for.
QWIX_GRADIENTS = mt.QtRule(
    op_names=("conv_general_dilated", "ragged_dot"),
    additional_qt_config={"use_original_residuals": False},
)


def train(library, model, x, fields):
    with jax.numpy_dtype_promotion("standard"):
        rules = [library.QtRule(**fields)]
        if library is mt and isinstance(model, CNN | MoE):
            rules.insert(0, dataclasses.replace(QWIX_GRADIENTS, **fields))
        quantized = library.quantize_model(model, library.QtProvider(rules))
        variables = jax.jit(quantized.init)(jax.random.key(1), x)
        stats = variables.get("quant_stats", {})

        def loss(params):
            out, updates = quantized.apply(
                {"params": params, "quant_stats": stats}, x, mutable="quant_stats"
            )
            return jnp.mean(out**2), (out, updates)

        step = jax.jit(jax.value_and_grad(loss, has_aux=True))
        (_, (out, updates)), grads = step(variables["params"])
    return variables, out, updates, grads


# A transformer takes ten seconds: under one rule here, under the others by `-m slow`.
PAIRS = [
    pytest.param(rule, model, marks=[pytest.mark.slow] if is_slow else [])
    for rule in RULES
    for model in MODELS
    for is_slow in [model == "transformer" and rule != "qt int8"]
]


@pytest.mark.parametrize(("rule", "model"), PAIRS)
def test_training(rule, model):
    if (rule, model) in PEER_CANNOT:
        pytest.skip(f"Qwix 0.1.8 {PEER_CANNOT[rule, model]}")
    module, x = MODELS[model]
    ours, theirs = (train(library, module, x, RULES[rule]) for library in (mt, qwix))
    # gradients: a code may sit one apart where sums differ in their last bit
    for a, b, tolerance in zip(ours, theirs, (0, 2e-5, 2e-5, 2e-3)):
        close(a, b, tolerance or 1e-7)


PTQ = {
    "w8a8": {"weight_qtype": "int8", "act_qtype": "int8"},
    "w4 tiled": {"weight_qtype": "int4", "tile_size": 4},
    "nf4": {"weight_qtype": "nf4"},
    "w8a8 minmax": {
        "weight_qtype": "int8",
        "act_qtype": "int8",
        "act_calibration_method": "minmax",
    },
}


def serve(library, model, x, fields):
    with jax.numpy_dtype_promotion("standard"):
        provider = library.PtqProvider([library.QuantizationRule(**fields)])
        quantized = library.quantize_model(model, provider)
        params = jax.jit(model.init)(jax.random.key(1), x)["params"]
        abstract = jax.eval_shape(quantized.init, jax.random.key(1), x)["params"]
        params = library.quantize_params(params, abstract)
        return params, jax.jit(quantized.apply)({"params": params}, x)


@pytest.mark.parametrize("model", ["mlp", "cnn"])
@pytest.mark.parametrize("rule", PTQ)
def test_serving(rule, model):
    if model == "cnn" and rule != "w8a8":
        pytest.skip("Qwix 0.1.8 takes no weight-only, tiled or asymmetric convolution")
    module, x = MODELS[model]
    ours, theirs = (serve(library, module, x, PTQ[rule]) for library in (mt, qwix))
    close(ours, theirs)


class NnxNet(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Linear(16, 32, rngs=rngs)
        self.conv = nnx.Conv(1, 4, (3,), rngs=rngs)
        self.out = nnx.Linear(32 * 4, 8, rngs=rngs)

    def __call__(self, x):
        x = nnx.relu(self.embed(x))
        x = nnx.relu(self.conv(x[..., None]))
        return self.out(x.reshape(x.shape[0], -1))


@pytest.mark.parametrize("provider", ["QtProvider", "PtqProvider"])
@pytest.mark.parametrize("rule", ["qat int8", "qt int8", "qt fp8"])
def test_nnx(rule, provider):
    if provider == "PtqProvider" and rule != "qat int8":
        pytest.skip("gradients are no matter of serving")
    if rule == "qt fp8":
        pytest.skip(f"Qwix 0.1.8 {PEER_CANNOT[rule, 'cnn']}")
    x = normal(4, 16)
    fields = RULES[rule]
    found = []
    for library in (mt, qwix):
        kind = library.QuantizationRule if provider == "PtqProvider" else library.QtRule
        with jax.numpy_dtype_promotion("standard"):
            make = getattr(library, provider)([kind(**fields)])
            model = library.quantize_model(NnxNet(nnx.Rngs(0)), make, x)
            if provider == "PtqProvider":
                found.append((nnx.to_pure_dict(nnx.state(model, nnx.Param)), model(x)))
                continue
            graph, params, rest = nnx.split(model, nnx.Param, ...)
            loss = lambda p, graph=graph, rest=rest: jnp.mean(
                nnx.merge(graph, p, rest)(x) ** 2
            )
            value, grads = jax.value_and_grad(loss)(params)
            found.append((value, nnx.to_pure_dict(grads)))
    close(*found, 2e-3)
