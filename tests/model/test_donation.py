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


class Holder(nnx.Module):
    """A layer that is also reached by something else that this module holds."""

    def __init__(self, hold, rngs):
        self.layer = nnx.Linear(8, 8, rngs=rngs)
        self.held = hold(self)

    def __call__(self, x):
        return self.layer(x) + self.held(x)


def through(call):
    return lambda x: call(x)


HELD = {
    "method": lambda m: m.layer.__call__,
    "partial": lambda m: functools.partial(m.layer),
    "partial of a list": lambda m: functools.partial(lambda ls, x: ls[0](x), [m.layer]),
    "lambda": lambda m: lambda x: m.layer(x),
    "function of a function": lambda m: through(lambda x: m.layer(x)),
    "method by default": lambda m: functools.partial(lambda x, f: f(x), f=m.layer.__call__),
}  # fmt: skip
STATIC = mt.QtRule(weight_qtype="int8", act_qtype="int8", act_static_scale=True)
FP8 = mt.QtRule(weight_qtype="fp8", act_qtype="fp8", bwd_qtype="e5m2")


@pytest.mark.parametrize("hold", HELD.values(), ids=HELD)
@pytest.mark.parametrize("provider", [
    mt.PtqProvider([INT8_WEIGHTS], strict=True), mt.QtProvider([STATIC]), mt.DelayedFp8Provider([FP8])
], ids=["ptq", "static", "delayed"])  # fmt: skip
def test_what_a_model_holds_calls_the_new_modules(hold, provider):
    model = Holder(hold, nnx.Rngs(0))
    before = model(X)
    quantized = mt.quantize_model(model, provider, X)
    served = quantized(X)
    np.testing.assert_allclose(served, before, atol=0.3)
    quantized.layer.bias[...] += 8.0  # both uses of it see this, and no old layer
    np.testing.assert_allclose(quantized(X), served + 16.0, atol=1e-4)
    np.testing.assert_array_equal(model(X), before)
    taken = mt.quantize_model(model, provider, X, donate=True)
    np.testing.assert_array_equal(taken(X), served)


def test_a_function_that_calls_itself_is_bound_anew():
    def hold(module):
        def apply(x, depth=1):
            return apply(x, depth - 1) if depth else module.layer(x)

        return apply

    model = Holder(hold, nnx.Rngs(0))
    before = model(X)
    quantized = mt.quantize_model(model, mt.PtqProvider([INT8_WEIGHTS]), X)
    np.testing.assert_allclose(quantized(X), before, atol=0.1)


def test_modules_in_a_tuple():
    class Pair(nnx.Module):
        def __init__(self, rngs):
            layers = [nnx.Linear(8, 8, rngs=rngs) for _ in range(2)]
            self.layers = nnx.data(tuple(layers))

        def __call__(self, x):
            return self.layers[1](self.layers[0](x))

    model = Pair(nnx.Rngs(0))
    quantized = mt.quantize_model(model, mt.PtqProvider([INT8_WEIGHTS], strict=True), X)
    assert all(isinstance(m.kernel, mt.WithAux) for m in quantized.layers)
    np.testing.assert_allclose(quantized(X), model(X), atol=0.1)
