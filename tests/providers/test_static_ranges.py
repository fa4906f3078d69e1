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
