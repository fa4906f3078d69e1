"""jax.export with a batch of unknown size: no decision may depend on it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jax import export

import midtread as mt

CASES = {
    "tiled": (mt.PtqProvider, {"weight_qtype": "int8", "act_qtype": "int8", "tile_size": 16}),
    "weights": (mt.PtqProvider, {"weight_qtype": "nf4", "tile_size": 16}),
    "mx": (mt.QtProvider, {"weight_qtype": "mxfp8", "act_qtype": "mxfp8"}),
}  # fmt: skip


@pytest.mark.parametrize(("provider", "rule"), CASES.values(), ids=list(CASES))
def test_symbolic_batch(provider, rule):
    kind = mt.QtRule if provider is mt.QtProvider else mt.QuantizationRule
    net = mt.quantize_model(nn.Dense(5), provider([kind(**rule)]))
    x = jnp.asarray(np.random.default_rng(0).normal(size=(3, 32)), jnp.float32)
    params = net.init(jax.random.key(0), x)
    (batch,) = export.symbolic_shape("b")
    shape = jax.ShapeDtypeStruct((batch, 32), jnp.float32)
    leaves, tree = jax.tree.flatten(params)  # a box is no type that export could store
    apply = lambda leaves, x: net.apply(jax.tree.unflatten(tree, leaves), x)
    exported = export.export(jax.jit(apply))(leaves, shape)
    assert exported.out_avals[0].shape == (batch, 5)
    np.testing.assert_allclose(
        exported.call(leaves, x), net.apply(params, x), rtol=1e-5, atol=1e-5
    )
