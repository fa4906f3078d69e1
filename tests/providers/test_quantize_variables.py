"""One call quantizes a Linen model and its variables."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import midtread as mt

X = jax.random.normal(jax.random.key(1), (4, 8))
STATIC = mt.QuantizationRule(
    weight_qtype="int8", act_qtype="int8", act_static_scale=True
)


class Net(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        x = nn.BatchNorm(use_running_average=not train)(nn.Dense(16)(x))
        return nn.Dense(4)(nn.Dropout(0.5, deterministic=not train)(x))


def test_weights_become_codes_and_the_rest_stays():
    provider = mt.PtqProvider([mt.QuantizationRule(weight_qtype="int8")])
    variables = Net().init(jax.random.key(0), X, train=False)
    served, made = mt.quantize_variables(Net(), provider, variables, X, train=False)
    assert made["batch_stats"] is variables["batch_stats"]
    assert isinstance(made["params"]["Dense_0"]["kernel"], mt.WithAux)
    wanted = Net().apply(variables, X, train=False)
    np.testing.assert_allclose(served.apply(made, X, train=False), wanted, atol=0.05)


def test_statistics_become_static_scales():
    model = mt.quantize_model(nn.Dense(4), mt.QtProvider([STATIC]))
    variables = model.init(jax.random.key(0), X)
    _, stats = model.apply(variables, X, mutable="quant_stats")
    provider = mt.PtqProvider([STATIC])
    _, made = mt.quantize_variables(nn.Dense(4), provider, {**variables, **stats}, X)
    assert set(made) == {"params"} and "dot_general0_lhs_scale" in made["params"]
    with pytest.raises(ValueError, match="found from statistics"):
        params = {"params": variables["params"]}
        mt.quantize_variables(nn.Dense(4), provider, params, X)


def test_refusals_say_what_to_write():
    provider, model = mt.PtqProvider([{"weight_qtype": "int8"}]), nn.Dense(4)
    params = model.init(jax.random.key(0), X)["params"]
    with pytest.raises(ValueError, match="no 'params': pass all of them"):
        mt.quantize_variables(model, provider, params, X)
    with pytest.raises(ValueError, match="lack parameters of the model: bias"):
        part = {"params": {"kernel": params["kernel"]}}
        mt.quantize_variables(model, provider, part, X)
    with pytest.raises(TypeError, match="mt.quantize_model"):
        other = nnx.Linear(8, 4, rngs=nnx.Rngs(0))
        mt.quantize_variables(other, provider, {"params": params}, X)  # pyright: ignore
    with pytest.raises(TypeError, match="keeps float parameters"):
        qt = mt.QtProvider([{"weight_qtype": "int8"}])
        mt.quantize_variables(model, qt, {"params": params}, X)  # pyright: ignore


def test_shapes_are_enough_for_inputs():
    provider, model = mt.PtqProvider([{"weight_qtype": "int8"}]), nn.Dense(4)
    shape = jax.ShapeDtypeStruct(X.shape, jnp.float32)
    variables = model.init(jax.random.key(0), X)
    served, made = mt.quantize_variables(model, provider, variables, shape)
    assert served.apply(made, X).shape == (4, 4)
