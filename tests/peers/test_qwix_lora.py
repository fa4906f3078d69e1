"""Qwix 0.1.8, LoRA and QLoRA: the same adapters from the same random numbers, the same
outputs, the same gradients."""

import contextlib
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import peer
import pytest
from flax import linen as nn
from flax import nnx
from jax.nn import initializers
from tolerances import assert_values

from midtread.providers.adapters import lora_params, with_lora
from midtread.providers.lora import LoraProvider, apply_lora_to_model

(qwix,) = peer.load("qwix", "0.1.8", "qwix")

QTYPES = [None, "int8", "nf4"]


@contextlib.contextmanager
def manners():
    """Qwix also uses what newer versions of Flax have renamed."""
    with peer.manners(), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        yield


def fields(qtype):
    b = initializers.normal(0.1)  # zero would hide the gradient of A
    return {"rank": 4, "alpha": 6.0, "weight_qtype": qtype, "lora_b_initializer": b}


def data(shape=(5, 16)):
    return peer.data(np.random.default_rng(0), shape, jnp.float32)


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.gelu(nn.DenseGeneral((4, 8))(x))
        x = nn.DenseGeneral(16, axis=(-2, -1))(x)
        return nn.Dense(6)(x)


class Nnx(nnx.Module):
    def __init__(self, rngs):
        self.proj = nnx.LinearGeneral(16, (4, 8), rngs=rngs)
        self.mix = nnx.Einsum("bnh,nhd->bd", (4, 8, 16), rngs=rngs)
        self.layers = nnx.List([nnx.Linear(16, 16, rngs=rngs) for _ in range(2)])

    def __call__(self, x):
        x = self.mix(nnx.gelu(self.proj(x)))
        for layer in self.layers:
            x = nnx.gelu(layer(x))
        return x


def their_adapters(params):
    return {
        layer: {k: v for k, v in held.items() if "_lora_" in k}
        for layer, held in params.items()
    }


def assert_trees(ours, theirs, tolerance):
    ours, theirs = (
        dict(jax.tree_util.tree_flatten_with_path(x)[0]) for x in (ours, theirs)
    )
    assert ours.keys() == theirs.keys()
    for path in ours:
        assert_values(ours[path], theirs[path], tolerance, path)


@pytest.mark.parametrize("qtype", QTYPES)
def test_linen(qtype):
    x, key = data(), jax.random.key(0)
    model = apply_lora_to_model(Linen(), LoraProvider(**fields(qtype)))
    params = model.init(key, x)["params"]  # Qwix's by jit has no adapters of int8

    def run(adapters, x):
        return model.apply({"params": with_lora(params, adapters)}, x)

    def measure(run, adapters):
        loss = lambda a, x: (jnp.sum((out := run(a, x)) ** 2), out)
        grads, out = jax.jit(jax.grad(loss, (0, 1), has_aux=True))(adapters, x)
        return out, grads

    adapters = lora_params(params)
    out, grads = measure(run, adapters)
    with manners():
        other = qwix.apply_lora_to_model(Linen(), qwix.LoraProvider(**fields(qtype)))
        held = other.init(key, x)["params"]

        def their_run(adapters, x):
            both = {k: {**v, **adapters[k]} for k, v in held.items()}
            return other.apply({"params": both}, x)

        theirs = their_adapters(held)
        their_out, their_grads = measure(their_run, theirs)
    assert_trees(adapters, theirs, "bitwise")
    assert_values(out, their_out, "f32_sum")
    assert_trees(grads, their_grads, "f32_sum")


@pytest.mark.parametrize("qtype", QTYPES)
def test_nnx(qtype):
    x, plain = data(), Nnx(nnx.Rngs(0))

    def measure(model):
        graph, lora, rest = nnx.split(model, nnx.LoRAParam, ...)
        loss = lambda lora, x: (
            jnp.sum((out := nnx.merge(graph, lora, rest)(x)) ** 2),
            out,
        )
        (grads, dx), out = jax.jit(jax.grad(loss, (0, 1), has_aux=True))(lora, x)
        return nnx.to_pure_dict(lora), out, nnx.to_pure_dict(grads), dx

    provider = LoraProvider(**fields(qtype))
    model = apply_lora_to_model(plain, provider, x, rngs=nnx.Rngs(7))
    ours = measure(model)
    with manners():
        provider = qwix.LoraProvider(**fields(qtype))
        other = qwix.apply_lora_to_model(plain, provider, x, rngs=nnx.Rngs(7))
        theirs = measure(other)
    assert_trees(ours[0], theirs[0], "bitwise")
    assert_trees(ours[1:], theirs[1:], "f32_sum")
    assert model.mix.kernel_lora_einsum_str == other.mix.kernel_lora_einsum_str


@pytest.mark.parametrize("qtype", [None, "int8"])
def test_convolution(qtype):
    x, key = data((2, 8, 8, 3)), jax.random.key(0)
    both = {**fields(qtype), "act_qtype": qtype}  # Qwix has no weight-only convolution
    conv = nn.Conv(6, (3, 3), strides=2)
    model = apply_lora_to_model(conv, LoraProvider(**both))
    params = model.init(key, x)
    out = model.apply(params, x)
    with manners():
        other = qwix.apply_lora_to_model(conv, qwix.LoraProvider(**both))
        held = other.init(key, x)
        their_out = other.apply(held, x)
    theirs = {k: v for k, v in held["params"].items() if "_lora_" in k}
    assert_trees(lora_params(params)["params"], theirs, "bitwise")
    assert_values(out, their_out, "f32_sum")


def test_dropout_draws_the_same():
    x, key = data(), jax.random.key(0)
    both, rngs = {**fields(None), "dropout": 0.3}, {"dropout": jax.random.key(5)}
    model = apply_lora_to_model(nn.Dense(6), LoraProvider(**both))
    params = model.init(key, x)
    out = model.apply(params, x, rngs=rngs)
    with manners():
        other = qwix.apply_lora_to_model(nn.Dense(6), qwix.LoraProvider(**both))
        their_out = other.apply(params, x, rngs=rngs)
    assert_values(out, their_out, "f32_sum")


def test_missing_rngs_warns_and_uses_the_same_seed():
    x, plain = data(), Nnx(nnx.Rngs(0))
    with pytest.warns(UserWarning, match="rngs"):
        ours = apply_lora_to_model(plain, LoraProvider(**fields(None)), x)
    with pytest.warns(UserWarning, match="rngs"), manners():
        theirs = qwix.apply_lora_to_model(plain, qwix.LoraProvider(**fields(None)), x)
    assert_trees(
        nnx.to_pure_dict(nnx.state(ours, nnx.LoRAParam)),
        nnx.to_pure_dict(nnx.state(theirs, nnx.LoRAParam)),
        "bitwise",
    )
