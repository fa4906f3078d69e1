"""Embedding look-ups: quantized where a rule names `take`, and nowhere else."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import midtread as mt

IDS = jnp.array([[1, 5, 2], [6, 1, 0]])


class Model(nn.Module):
    @nn.compact
    def __call__(self, ids):
        return nn.Dense(4)(nn.Embed(7, 32, name="table")(ids))


class ModelNnx(nnx.Module):
    def __init__(self, rngs):
        self.table = nnx.Embed(7, 32, rngs=rngs)

    def __call__(self, ids):
        return self.table(ids)


def table(params):
    return params["params"]["table"]["embedding"]


def rule(**fields):
    return mt.QtRule(op_names=("take",), **fields)


@pytest.mark.parametrize("how", [
    {"weight_qtype": "int8"},
    {"weight_qtype": "int4", "tile_size": 8},
    {"weight_qtype": "mxfp4"},
    {"weight_qtype": "int4", "tile_size": 12},
    {"weight_qtype": "int8", "disable_channelwise_axes": True},
    {"weight_qtype": "int4", "weight_calibration_method": "absmax,0.5"},
], ids=str)  # fmt: skip
def test_training_rounds_the_rows(how):
    model = mt.quantize_model(nn.Embed(7, 32), mt.QtProvider([rule(**how)]))
    params = model.init(jax.random.key(0), IDS)
    w = params["params"]["embedding"]
    tile = how.get("tile_size") or (32 if how["weight_qtype"] == "mxfp4" else None)
    axes = [] if how.get("disable_channelwise_axes") else [0]
    method = how.get("weight_calibration_method", "absmax")
    q = mt.quantize(
        w, how["weight_qtype"], channelwise_axes=axes,
        tiled_axes={1: tile} if tile else None, calibration_method=method,
    )  # fmt: skip
    out = model.apply(params, IDS)
    np.testing.assert_array_equal(out, mt.dequantize(q)[IDS])
    assert not np.array_equal(out, w[IDS])

    g = jax.grad(lambda p: jnp.sum(model.apply(p, IDS) * 2))(params)
    g = g["params"]["embedding"]
    assert float(g[1].max()) == 4.0 and float(jnp.abs(g[3]).max()) == 0.0
    assert bool((g[1] == 0).any()) == (method != "absmax")  # clipped: no gradient


def test_a_rule_without_op_names_passes_look_ups_by():
    for provider in (
        mt.QtProvider([mt.QtRule(weight_qtype="int4")]),
        mt.PtqProvider([mt.QuantizationRule(weight_qtype="int4")]),
    ):
        model = mt.quantize_model(Model(), provider)
        params = model.init(jax.random.key(0), IDS)
        assert isinstance(table(params), jax.Array)
    seen = mt.quantize_model(
        nn.Embed(7, 32), mt.QtProvider([mt.QtRule(weight_qtype="int4")])
    )
    with pytest.warns(UserWarning, match=r"write op_names=\('take',\)"):
        seen.init(jax.random.key(0), IDS)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_serving_from_codes(dtype):
    rules = [rule(weight_qtype="nf4", tile_size=16)]
    provider = mt.PtqProvider([*rules, mt.QuantizationRule(weight_qtype="int8")])
    float_params = Model().init(jax.random.key(0), IDS)
    model = mt.quantize_model(Model(), provider)
    shapes = jax.eval_shape(model.init, jax.random.key(0), IDS)
    params = mt.quantize_params(float_params["params"], shapes["params"])
    box = params["table"]["embedding"]
    assert box.array.qtype == "nf4" and box.array.scale.shape == (7, 2)

    served = mt.quantize_model(nn.Embed(7, 32, dtype=dtype), mt.PtqProvider(rules))
    out = jax.jit(served.apply)({"params": params["table"]}, IDS)
    assert out.dtype == dtype
    exact = mt.dequantize(box.array)[IDS]
    np.testing.assert_allclose(np.float32(out), exact, rtol=2.0**-6, atol=1e-6)
    model.apply({"params": params}, IDS)
    again = model.init(jax.random.key(0), IDS)["params"]
    jax.tree.map(np.testing.assert_array_equal, again, params)


def test_nnx():
    provider = mt.PtqProvider([rule(weight_qtype="int4")])
    model = mt.quantize_model(ModelNnx(nnx.Rngs(0)), provider, IDS)
    assert isinstance(model.table.embedding, mt.WithAux)
    exact = mt.dequantize(
        mt.quantize(
            ModelNnx(nnx.Rngs(0)).table.embedding[...], "int4", channelwise_axes=[0]
        )
    )
    np.testing.assert_array_equal(model(IDS), exact[IDS])
    outside = model(jnp.array([7]))
    assert np.isnan(np.asarray(outside)).all()  # as jnp.take has it


class Indexed(nn.Module):
    @nn.compact
    def __call__(self, ids):
        table = self.param("table", nn.initializers.normal(), (7, 32))
        return table[ids] @ table.T


@pytest.mark.parametrize("jit", [False, True])
def test_indexing_is_a_look_up_too(jit):
    wrap = jax.jit if jit else lambda f: f
    model = mt.quantize_model(Indexed(), mt.QtProvider([rule(weight_qtype="int4")]))
    params = model.init(jax.random.key(0), IDS)
    table = params["params"]["table"]
    rounded = mt.dequantize(mt.quantize(table, "int4", channelwise_axes=[0]))
    for ids in (IDS, IDS - 7):
        out = wrap(model.apply)(params, ids)
        np.testing.assert_allclose(out, rounded[IDS] @ table.T, atol=1e-6)


@pytest.mark.parametrize("jit", [False, True])
def test_a_tied_table_is_served_both_ways(jit):
    """Quantized for the head, which multiplies by its transpose; looked up as it is."""
    wrap = jax.jit if jit else lambda f: f
    provider = mt.PtqProvider([mt.QuantizationRule(weight_qtype="int8")])
    model = mt.quantize_model(Indexed(), provider)
    params = wrap(model.init)(jax.random.key(0), IDS)
    table = params["params"]["table"].array
    assert table.shape == (7, 32) and table.scale.shape == (7, 1)
    exact = mt.dequantize(table)
    out = wrap(model.apply)(params, IDS)
    np.testing.assert_allclose(out, exact[IDS] @ exact.T, atol=1e-5)


def test_adapters_are_refused_by_name():
    with pytest.raises(ValueError, match="take gets no adapters"):
        mt.LoraRule(rank=2, alpha=1.0, op_names=("take",))
