"""Static ranges by name: gathered under QtProvider, served under PtqProvider."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import midtread as mt

BATCHES = (
    jax.random.normal(jax.random.key(0), (6, 4, 8))
    * jnp.arange(1.0, 7.0)[:, None, None]
)


def rules(over):
    fields = {"weight_qtype": "int8", "act_qtype": "int8", "act_static_scale": over}
    return [mt.QtRule(**fields)]


def ends(over):
    """The end of the range that serving uses, in Linen and in NNX."""
    model = mt.quantize_model(nn.Dense(4), mt.QtProvider(rules(over)))
    variables = model.init(jax.random.key(1), BATCHES[0])
    variables["quant_stats"] = jax.tree.map(jnp.zeros_like, variables["quant_stats"])
    net = nnx.Linear(8, 4, rngs=nnx.Rngs(0))
    net = mt.quantize_model(net, mt.QtProvider(rules(over)), BATCHES[0])
    for x in BATCHES:
        variables |= model.apply(variables, x, mutable="quant_stats")[1]
        net(x)
    provider = mt.PtqProvider(rules(over))
    _, made = mt.quantize_variables(nn.Dense(4), provider, variables, BATCHES[0])
    served = mt.quantize_model(net, mt.PtqProvider(rules(over)), BATCHES[0])
    scales = made["params"]["dot_general0_lhs_scale"], served.dot_general0_lhs_scale
    return [float(jnp.max(box.value.array)) * 127.5 for box in scales]


def test_names_say_which_range_is_served():
    largest = np.abs(BATCHES).max((1, 2))
    wanted = {
        True: np.abs(BATCHES).max(2).mean(),
        "max": largest.max(),
        "percentile,50": np.percentile(largest, 50),
    }
    for over, end in wanted.items():
        np.testing.assert_allclose(ends(over), end, rtol=1e-5, err_msg=str(over))


def test_a_name_is_checked_and_refused_where_it_is_not_honoured():
    with pytest.raises(ValueError, match="write True or one of 'mean', 'max'"):
        rules("widest")
    with pytest.raises(ValueError, match="LiteRT's static ranges are means"):
        fields = {"weight_qtype": "int8", "act_qtype": "int8"}
        mt.OdmlQatProvider([mt.QuantizationRule(**fields, act_static_scale="max")])


def test_explain_shows_what_a_range_clips():
    rule = lambda kind: mt.QtRule(
        weight_qtype="int8", act_qtype="int8", act_static_scale=kind
    )
    model = nnx.Linear(8, 4, rngs=nnx.Rngs(0))
    sizes = jnp.asarray([1.0, 1.0, 1.0, 5.0])  # one batch of four lies beyond the mean
    data = jnp.ones((4, 2, 8)) * sizes[:, None, None]
    shares = {}
    for kind in ("mean", "max"):
        provider = mt.QtProvider([rule(kind)])
        trained = mt.quantize_model(model, provider, data[0])
        for x in data:
            trained(x)
        coverage = mt.explain(trained, provider, data[0], data=data)
        shares[kind] = coverage.clipped["dot_general0_lhs"]
        assert f"{100 * shares[kind]:.3g}%" in str(coverage)
    assert shares == {"mean": 0.25, "max": 0.0}
    served = mt.PtqProvider([rule("mean")])
    found = mt.explain(trained, served, data[0], data=[(x,) for x in data]).clipped
    assert found == {"dot_general0_lhs": 0.0}  # gathered by "max", which stays


def test_explain_of_linen_takes_variables_for_data():
    rules = [mt.QtRule(weight_qtype="int8", act_qtype="int8", act_static_scale=True)]
    model, x = nn.Dense(4), jnp.ones((2, 8))
    variables = mt.quantize_model(model, mt.QtProvider(rules)).init(
        jax.random.key(0), x
    )
    data = [x, 3 * x]
    explain = lambda **more: mt.explain(model, mt.QtProvider(rules), x, **more)
    with pytest.raises(ValueError, match="variables=variables"):
        explain(data=data)
    with pytest.raises(ValueError, match="give both"):
        explain(variables=variables)
    with pytest.raises(ValueError, match="no rule that matches asks for one"):
        dynamic = mt.QtProvider([mt.QtRule(weight_qtype="int8", act_qtype="int8")])
        mt.explain(model, dynamic, x, data=data, variables=variables)
    _, seen = mt.quantize_model(model, mt.QtProvider(rules)).apply(
        variables, x, mutable="quant_stats"
    )
    shares = explain(data=data, variables=variables | seen).clipped
    assert shares == {"dot_general0_lhs": 0.5}


class Wrapped(nn.Module):
    """Multiplies inside a transform of JAX's own."""

    transform: object

    @nn.compact
    def __call__(self, x):
        w = self.param("w", nn.initializers.normal(), (x.shape[-1], 4))
        return self.transform(lambda x: x @ w)(x)


@pytest.mark.parametrize("transform", [jax.jit, jax.vmap, jax.checkpoint])
def test_a_range_that_could_not_leave_a_transform_is_refused(transform):
    rule = mt.QtRule(weight_qtype="int8", act_qtype="int8", act_static_scale=True)
    model = mt.quantize_model(Wrapped(transform), mt.QtProvider([rule]))
    with pytest.raises(ValueError, match="'': dot_general0 runs inside a jax.jit"):
        model.init(jax.random.key(0), jnp.ones((3, 8)))


@pytest.mark.parametrize("how", [True, "max", "ema,0.9", "percentile,99"])
def test_ranges_of_layers_in_a_scan_become_scales(how):
    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return jnp.tanh(nn.Dense(8)(x)), None

    axes = {"params": 0, "quant_stats": 0}
    scan = nn.scan(Layer, variable_axes=axes, split_rngs={"params": True}, length=3)
    rule = mt.QtRule(weight_qtype="int8", act_qtype="int8", act_static_scale=how)
    model = mt.quantize_model(scan(), mt.QtProvider([rule]))
    x = jax.random.normal(jax.random.key(0), (4, 8))
    state = model.init(jax.random.key(1), x, None)
    for factor in (1, 2):
        state |= model.apply(state, factor * x, None, mutable="quant_stats")[1]
    served, variables = mt.quantize_variables(
        scan(), mt.PtqProvider([rule]), state, x, None
    )
    trained = model.apply(state, x, None)[0]
    np.testing.assert_allclose(served.apply(variables, x, None)[0], trained, rtol=1e-6)


def test_a_weight_that_is_multiplied_by_twice_is_no_activation():
    class Twice(nn.Module):
        @nn.compact
        def __call__(self, x):
            w = self.param("w", nn.initializers.normal(), (8, 8))
            return jnp.tanh(x @ w) @ w

    model = mt.quantize_model(Twice(), mt.QtProvider(rules(True)))
    state = model.init(jax.random.key(0), BATCHES[0])
    state |= model.apply(state, BATCHES[0], mutable="quant_stats")[1]
    served, variables = mt.quantize_variables(
        Twice(), mt.PtqProvider(rules(True)), state, BATCHES[0]
    )
    scales = {"dot_general0_lhs_scale", "dot_general1_lhs_scale"}
    assert variables["params"].keys() == {"w"} | scales
    trained = model.apply(state, BATCHES[0])
    np.testing.assert_allclose(served.apply(variables, BATCHES[0]), trained, rtol=1e-6)
