"""Tiles of a sum over several axes, as in the output of every attention block of Flax's.

The sum over [heads, width] counts as one axis of heads * width elements: a tile is a run of
neighbours there, and what is trained is what is served.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import midtread as mt
from midtread.interop.qwix.models import hook
from midtread.numerics.spec import place_tile

RULE = {"weight_qtype": "int4", "act_qtype": "int8", "tile_size": 16}
X = jax.random.normal(jax.random.key(1), (2, 3, 32))
SCALES = {"query": (2, 4, 8), "out": (2, 1, 32)}  # of [32, 4, 8] and [4, 8, 32]


@pytest.mark.parametrize(
    "tile,shape,scale",
    [
        (128, (8, 256), (8, 2)),  # parts of a head
        (128, (8, 64), (4, 1)),  # two heads
        (128, (12, 96), (12, 1)),  # a head: two are too many
        (128, (5, 64), (5, 1)),  # two do not divide five
        (128, (2, 4, 32), (2, 1, 1)),  # all of the second axis
        (4096, (8, 64), (1, 1)),
        (0.25, (8, 64), (4, 1)),  # a quarter of all
    ],
)
def test_a_tile_is_a_run_of_neighbours(tile, shape, scale):
    axes = range(len(shape))
    tiles, each = place_tile(tile, list(axes), shape, is_exact=False)
    assert mt.Spec("int8", tuple(each), tiles).layout(shape) == (shape, scale)


def served_nnx():
    model = nnx.MultiHeadAttention(4, 32, decode=False, rngs=nnx.Rngs(0))
    trained = mt.quantize_model(model, mt.QtProvider([mt.QtRule(**RULE)]), X)
    served = mt.quantize_model(model, mt.PtqProvider([mt.QuantizationRule(**RULE)]), X)
    scale = lambda name: getattr(served, name).kernel.array.scale[...]
    return trained(X), served(X), scale


def served_linen():
    model = nn.MultiHeadDotProductAttention(num_heads=4)
    variables = model.init(jax.random.key(0), X)
    trained = mt.quantize_model(model, mt.QtProvider([mt.QtRule(**RULE)]))
    provider = mt.PtqProvider([mt.QuantizationRule(**RULE)])
    served, boxes = mt.quantize_variables(model, provider, variables, X)
    scale = lambda name: boxes["params"][name]["kernel"].array.scale
    return trained.apply(variables, X), served.apply(boxes, X), scale


@pytest.mark.parametrize("library", [served_nnx, served_linen])
def test_attention_is_tiled_and_served_as_trained(library):
    trained, served, scale = library()
    np.testing.assert_allclose(served, trained, rtol=1e-5, atol=1e-6)
    assert {name: scale(name).shape for name in SCALES} == SCALES


def test_the_drop_in_has_the_tiles_of_qwix():
    """Qwix tiles the last of the summed axes, and the others share a scale."""
    hook()
    try:
        _, _, scale = served_linen()
    finally:
        hook(is_installed=False)
    assert scale("out").shape == (1, 1, 32)
    assert served_linen()[2]("out").shape == SCALES["out"]


def test_mx_formats_keep_their_own_tile():
    w = jax.random.normal(jax.random.key(0), (2, 64, 8))
    layer = nn.DenseGeneral(8, axis=(-2, -1), use_bias=False)
    provider = mt.PtqProvider([mt.QuantizationRule(weight_qtype="mxfp8")])
    x = jnp.ones((3, 2, 64))
    _, boxes = mt.quantize_variables(layer, provider, {"params": {"kernel": w}}, x)
    assert boxes["params"]["kernel"].array.scale.shape == (2, 2, 8)


def test_adapters_and_gradients_stand_on_them():
    model = nnx.LinearGeneral((4, 8), 32, axis=(-2, -1), rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(2), (3, 4, 8))
    rule = mt.LoraRule(weight_qtype="int4", tile_size=16, rank=2, alpha=2.0)
    adapted = mt.apply_lora_to_model(
        model, mt.LoraProvider([rule]), x, rngs=nnx.Rngs(1)
    )
    assert adapted.kernel.array.scale.shape == (2, 1, 32)
    served = mt.quantize_model(model, mt.PtqProvider([mt.QuantizationRule(
        weight_qtype="int4", tile_size=16)]), x)  # fmt: skip
    np.testing.assert_allclose(adapted(x), served(x), rtol=1e-5, atol=1e-6)

    rule = mt.QtRule(**RULE, bwd_qtype="int8")
    trained = mt.quantize_model(model, mt.QtProvider([rule]), x)
    square = lambda model: jnp.sum(model(x) ** 2)
    got, wanted = (nnx.grad(square)(m)["kernel"][...] for m in (trained, model))
    assert jnp.linalg.norm(got - wanted) < 0.1 * jnp.linalg.norm(wanted)
