"""Donation: the result has the Variables, and what was given says so when it is used."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import midtread as mt
from midtread.model import flaxlib

X = jax.random.normal(jax.random.key(0), (4, 8))
INT8_WEIGHTS = mt.QuantizationRule(weight_qtype="int8")


class Bound(nnx.Module):
    """A method and a partial as attributes, which Flax keeps as they are when it rebuilds."""

    def __init__(self, rngs):
        self.up = nnx.Linear(8, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.first = self.raised
        self.second = functools.partial(self.up)
        self.scales = nnx.data({"out": nnx.Param(jnp.ones(8))})

    def raised(self, x):
        return nnx.relu(self.up(x))

    def __call__(self, x):
        return self.second(self.norm(self.first(x))) * self.scales["out"][...]


DONATED = {
    "call": lambda model: model(X),
    "method": lambda model: model.raised(X),
    "split": nnx.split,
    "state": nnx.state,
    "parameter": lambda model: model.up.kernel[...],
    "set": lambda model: setattr(model, "up", None),
    "ask": lambda model: hasattr(model, "up"),
    "jit": lambda model: nnx.jit(lambda m: m(X))(model),
    "leaves": jax.tree.leaves,
    "clone": nnx.clone,
    "eval": lambda model: model.eval(),
    "explain": lambda model: mt.explain(model, mt.PtqProvider([]), X),
    "again": lambda model: mt.quantize_model(model, mt.PtqProvider([]), X, donate=True),
    "optimizer": lambda model: nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param),
}


@pytest.fixture(scope="module")
def donated():
    """(a model that was used up, a module that was inside it)"""
    model = Bound(nnx.Rngs(0))
    inside = model.up
    mt.quantize_model(model, mt.PtqProvider([INT8_WEIGHTS]), X, donate=True)
    return model, inside


@pytest.mark.parametrize("use", DONATED.values(), ids=DONATED)
def test_a_donated_model_is_not_used_again(donated, use):
    model, inside = donated
    with pytest.raises(ValueError, match="this Bound was given to .*donate=True"):
        use(model)
    with pytest.raises(ValueError, match="this Linear was given to .*donate=True"):
        inside(X)
    assert isinstance(model, Bound) and "used up" in f"{model} {model!r}"


@pytest.mark.parametrize("provider", [
    mt.PtqProvider([INT8_WEIGHTS]), mt.QtProvider([mt.QtRule(weight_qtype="int8", act_qtype="int8")]), mt.LoraProvider(rank=2, alpha=1.0)
], ids=["ptq", "qt", "lora"])  # fmt: skip
def test_donation_takes_variables_over_and_gives_the_same_model(provider):
    make = lambda: Bound(nnx.Rngs(0))
    kept = mt.quantize_model(make(), provider, X, rngs=nnx.Rngs(1))
    model = make()
    bias, mean = model.up.bias, model.norm.mean
    quantized = mt.quantize_model(model, provider, X, rngs=nnx.Rngs(1), donate=True)
    assert quantized.up.bias is bias and quantized.norm.mean is mean
    assert (
        quantized.first.__self__ is quantized and quantized.second.func is quantized.up
    )
    np.testing.assert_array_equal(quantized(X), kept(X))


@pytest.mark.parametrize("inputs, provider, words", [
    (jnp.ones((2, 7)), mt.PtqProvider([INT8_WEIGHTS]), "extent 7"),
    (X, mt.PtqProvider([mt.QuantizationRule(module_path="nowhere", weight_qtype="int8")], strict=True), "nowhere"),
])  # fmt: skip
def test_a_model_that_could_not_be_quantized_is_not_used_up(inputs, provider, words):
    model = Bound(nnx.Rngs(0))
    inside, before = model.up, model(X)
    with pytest.raises((TypeError, ValueError), match=words):
        mt.quantize_model(model, provider, inputs, donate=True)
    np.testing.assert_array_equal(model(X), before)
    assert model.up is inside and flaxlib.provider_of(model) is None
