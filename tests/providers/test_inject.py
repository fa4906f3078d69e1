"""Injection: train, convert, serve, and the float weights gone."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

import midtread as mt
from midtread.providers.inject import (
    QuantizedDotGeneral,
    QuantizedEinsum,
    remove_float_params,
)

INT8 = mt.recipe("qwix_int8")


class Net(nn.Module):
    recipe: mt.Recipe = INT8
    mode: str = "train"

    @nn.compact
    def __call__(self, x):
        how = {"recipe": self.recipe, "mode": self.mode}
        cls = functools.partial(QuantizedDotGeneral, **how)
        x = nn.Dense(16, dot_general_cls=cls, name="up")(x)
        heads = nn.DenseGeneral(
            (4, 4), use_bias=False, dot_general_cls=cls, name="heads"
        )
        x = heads(nn.relu(x))
        w = self.param("w", nn.initializers.lecun_normal(), (4, 4, 8))
        return QuantizedEinsum(**how)("bhd,hdf->bf", x, w)


def cycle(recipe, key):
    """(params, quantized, x, output of convert)."""
    x = jax.random.normal(key, (4, 8))
    params = Net(recipe).init(key, x)["params"]
    convert = Net(recipe, "convert")
    out, made = jax.jit(functools.partial(convert.apply, mutable=["quantized"]))(
        {"params": params}, x
    )
    return params, made["quantized"], x, out


@pytest.mark.parametrize("name", ["qwix_int8", "aqt_int4w", "qat_fp8", "te_mxfp8"])
def test_serve_gives_what_convert_gave(name, key):
    recipe = mt.recipe(name)
    params, quantized, x, out = cycle(recipe, key)
    served = remove_float_params(params, quantized)
    assert sum(v.ndim > 1 for v in jax.tree.leaves(served)) == 0  # biases are left
    serve = jax.jit(Net(recipe, "serve").apply)
    got = serve({"params": served, "quantized": quantized}, x)
    np.testing.assert_array_equal(got, out)
    zeros = jax.tree.map(lambda v: v if v.ndim == 1 else jnp.zeros_like(v), params)
    np.testing.assert_array_equal(
        serve({"params": zeros, "quantized": quantized}, x), out
    )
    trained = jax.jit(Net(recipe).apply)({"params": params}, x)
    np.testing.assert_allclose(out, trained, rtol=1e-5, atol=1e-5)


def test_an_abstract_serving_tree_has_the_shapes_of_the_converted(key):
    _, quantized, x, _ = cycle(INT8, key)
    abstract = jax.eval_shape(Net(INT8, "serve").init, key, x)
    shapes = lambda tree: jax.tree.map(lambda v: (v.shape, v.dtype), tree)
    assert shapes(abstract["quantized"]) == shapes(quantized)


def test_training_is_the_recipe_everywhere_it_is_injected(key):
    """A class, an op of `learn`, and the provider's rules: the same numbers."""
    x = jax.random.normal(key, (4, 8))
    cls = functools.partial(QuantizedDotGeneral, recipe=INT8)
    layers = [
        nn.Dense(6, dot_general_cls=cls),
        nn.Dense(6, dot_general=mt.learn(INT8).dot_general),
        mt.quantize_model(nn.Dense(6), mt.QtProvider([mt.QtRule(recipe=INT8)])),
    ]
    params = layers[0].init(key, x)
    grads = [
        jax.grad(lambda p, f=f: (f.apply(p, x) ** 2).sum())(params) for f in layers
    ]
    for other in grads[1:]:
        jax.tree.map(np.testing.assert_array_equal, grads[0], other)


def test_layers_in_a_scan(key):
    class Layer(nn.Module):
        mode: str

        @nn.compact
        def __call__(self, x, _):
            cls = functools.partial(QuantizedDotGeneral, recipe=INT8, mode=self.mode)
            return nn.Dense(8, dot_general_cls=cls)(x), None

    axes = {"params": 0, "quantized": 0}
    stack = lambda mode: nn.scan(Layer, axes, split_rngs={"params": True}, length=3)(
        mode
    )
    x = jax.random.normal(key, (4, 8))
    params = stack("train").init(key, x, None)["params"]
    (out, _), made = stack("convert").apply(
        {"params": params}, x, None, mutable=["quantized"]
    )
    params = remove_float_params(params, made["quantized"])
    got, _ = stack("serve").apply({"params": params, **made}, x, None)
    np.testing.assert_array_equal(got, out)


def test_noise_needs_its_stream(key):
    x = jax.random.normal(key, (4, 8))
    cls = functools.partial(QuantizedDotGeneral, recipe=mt.recipe("aqt_int8"))
    layer = nn.Dense(6, dot_general_cls=cls)
    streams = dict(zip(("params", "stochastic_rounding"), jax.random.split(key)))
    params = layer.init(streams, x)

    def grad(seed):
        rngs = {"stochastic_rounding": jax.random.key(seed)}
        loss = lambda p: (layer.apply(p, x, rngs=rngs) ** 2).sum()
        return jax.grad(loss)(params)["params"]["kernel"]

    assert np.array_equal(grad(0), grad(0)) and not np.array_equal(grad(0), grad(1))


def test_same_shaped_weights_of_one_module(key):
    quantized = {
        f"QuantizedDotGeneral_{i}": {"rhs": mt.quantize(jnp.ones((4, 4)), "int8")}
        for i in range(2)
    }
    params = {"q": jnp.ones((4, 4)), "k": jnp.ones((4, 4)), "bias": jnp.ones(4)}
    left = remove_float_params({"a": params}, {"a": quantized})
    assert [v.shape for v in jax.tree.leaves(left)] == [(4,)]
    with pytest.raises(ValueError, match="'a': 2 quantized weights .* 3 parameters"):
        more = {"a": params | {"v": jnp.ones((4, 4))}}
        remove_float_params(more, {"a": quantized})


@pytest.mark.parametrize(
    "mode, recipe, message",
    [
        ("deploy", INT8, "unknown mode 'deploy'"),
        ("convert", INT8, "mutable="),
        ("convert", mt.Recipe(mt.Fwd(mt.per_channel("int8"))), "nothing to convert"),
        ("serve", INT8, "mode='convert'"),
    ],
)
def test_refusals(mode, recipe, message):
    params = {"kernel": jnp.ones((4, 2))}
    with pytest.raises(ValueError, match=message):
        cls = functools.partial(QuantizedDotGeneral, recipe=recipe, mode=mode)
        layer = nn.Dense(2, use_bias=False, dot_general_cls=cls)
        layer.apply({"params": params}, jnp.ones((3, 4)))
