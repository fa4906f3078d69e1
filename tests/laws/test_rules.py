"""The law of rules: what was trained is what is served.

For every field of a rule, every op, Linen and NNX: the forward under PtqProvider equals the
forward under QtProvider, for the same rule and parameters, or the field is refused.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from jax import lax

import midtread as mt
from midtread.model.rules import field_names

SIZES = jnp.array([3, 5], jnp.int32)
#   op                     (what it computes, shape of the weight, shape of x or ids)
OPS = {
    "dot_general": (lambda x, w: jnp.dot(x, w), (16, 8), (4, 16)),
    "einsum": (  # it sums two axes
        lambda x, w: jnp.einsum("hdo,bhd->bo", w, x), (4, 4, 8), (4, 4, 4)),
    "conv_general_dilated": (
        lambda x, w: lax.conv_general_dilated(x, w, (1,), "SAME"), (8, 4, 3), (2, 4, 6)),
    "ragged_dot": (lambda x, w: lax.ragged_dot(x, w, SIZES), (2, 16, 8), (8, 16)),
    "take": (lambda x, w: jnp.take(w, x, 0), (9, 16), None),
}  # fmt: skip
IDS = jnp.array([[1, 5, 2], [8, 1, 0]])
FORMATS = {"weight_qtype": "int4", "act_qtype": "int8"}
BACKWARD = {**FORMATS, "bwd_qtype": "int8"}
SPARSITY = mt.Sparsity(2, 4)
SQUARES = mt.Recipe(mt.Fwd(mt.per_channel("int8", 8), mt.blocks("int4", 8)))
#   field                    rules that have it; those of the forward change what comes out
FIELDS = {
    "module_path": [{**FORMATS, "module_path": ""}],
    "op_names": [FORMATS],
    "weight_qtype": [{"weight_qtype": "int8"}],
    "act_qtype": [{"act_qtype": "int8"}],
    "tile_size": [{**FORMATS, "tile_size": t} for t in (8, 1.0)],
    "act_static_scale": [{**FORMATS, "act_static_scale": True}],
    "act_batch_axes": [{**FORMATS, "act_static_scale": True, "act_batch_axes": (0, 1)}],
    "weight_calibration_method": [{**FORMATS, "weight_calibration_method": "rms,2"}],
    "act_calibration_method": [
        {**FORMATS, "act_calibration_method": m} for m in ("minmax", "absmax,0.7")],
    "bwd_qtype": [BACKWARD],
    "bwd_calibration_method": [{**BACKWARD, "bwd_calibration_method": "absmax,0.9"}],
    "bwd_weight_grad_tile_size": [{**BACKWARD, "bwd_weight_grad_tile_size": 2}],
    "bwd_stochastic_rounding": [{**BACKWARD, "bwd_stochastic_rounding": "uniform"}],
    "channelwise_noise_axes": [{**BACKWARD, "channelwise_noise_axes": (1,)}],
    "disable_channelwise_axes": [{**FORMATS, "disable_channelwise_axes": True}],
    "additional_qt_config": [
        {**FORMATS, "additional_qt_config": {name: value}}
        for name, value in (
            ("rhs_qtype", "int2"), ("rhs_calibration_method", "absmax,0.5"),
            ("lhs_qtype", "int2"), ("rhs_disable_channelwise_axes", True),
            ("tile_size", 4), ("sparsity_rule", SPARSITY))],
    "recipe": [{"recipe": r} for r in (
        "qwix_int8", "aqt_int8w", "aqt_fp8", "aqt_fp8_full", SQUARES,
        mt.Recipe(SQUARES.fwd, sparsity=SPARSITY))],
}  # fmt: skip
FORWARD = field_names(mt.QtRule) - {"module_path", "op_names"}
FORWARD -= {name for name in FIELDS if "bwd" in name or "noise" in name}


def initial(key, shape):
    """Weights whose largest is positive: a negative one is at a tie between two codes."""
    w = jax.random.normal(key, shape).clip(-3, 3).at[0].set(4.0).at[..., 0].set(4.0)
    rows = jnp.linspace(1, 1.2, shape[0]).reshape(-1, *(1,) * (len(shape) - 1))
    return w * rows * jnp.linspace(1, 1.2, shape[-1])  # each channel has its own scale


class Linen(nn.Module):
    op: str

    @nn.compact
    def __call__(self, x):
        run, shape, _ = OPS[self.op]
        return run(x, self.param("w", initial, shape))


class Nnx(nnx.Module):
    def __init__(self, op):
        self.op = op
        self.w = nnx.Param(initial(jax.random.key(1), OPS[op][1]))

    def __call__(self, x):
        return OPS[self.op][0](x, self.w[...])


def linen(op, rule, x):
    """(what training computes, what serving does); ValueError where a field is refused."""
    key, float_model = jax.random.key(1), Linen(op)
    params = float_model.init(key, x)["params"]
    model = mt.quantize_model(float_model, mt.QtProvider([rule]))
    rngs = {"params": key, "stochastic_rounding": key}
    stats = model.init(rngs, x).get("quant_stats", {})
    apply = lambda stats, **more: model.apply(
        {"params": params, "quant_stats": stats}, x, rngs=rngs, **more
    )
    if stats:
        stats = apply(stats, mutable="quant_stats")[1]["quant_stats"]
    served = mt.quantize_model(float_model, mt.PtqProvider([rule]))
    shapes = jax.eval_shape(served.init, key, x)["params"]
    quantized = mt.quantize_params(params, shapes, stats)
    return apply(stats), served.apply({"params": quantized}, x)


def in_nnx(op, rule, x):
    model = mt.quantize_model(
        Nnx(op), mt.QtProvider([rule]), x, rngs=nnx.Rngs(stochastic_rounding=0)
    )
    if rule.act_static_scale:
        model(x)  # statistics, and then of the same data again
    trained = model(x)
    return trained, mt.quantize_model(model, mt.PtqProvider([rule]), x)(x)


def test_every_field_is_here():
    assert set(FIELDS) == field_names(mt.QtRule)


@pytest.mark.filterwarnings("ignore:rules that matched nothing")
@pytest.mark.parametrize("library", [linen, in_nnx])
@pytest.mark.parametrize("op", OPS)
def test_serving_computes_what_training_did(op, library):
    x = IDS if op == "take" else jax.random.normal(jax.random.key(2), OPS[op][2])
    cases = [(name, fields) for name, rules in FIELDS.items() for fields in rules]
    refused = []

    @jax.jit
    def everything(x):
        pairs = {}
        for i, (_, fields) in enumerate(cases):
            try:
                pairs[i] = library(op, mt.QtRule(op_names=(op,), **fields), x)
            except ValueError as error:
                refused.append((i, str(error)))
        return pairs

    pairs = everything(x)
    plain = pairs[[name for name, _ in cases].index("op_names")][0]
    for i, (trained, served) in pairs.items():
        name, fields = cases[i]
        largest = float(jnp.abs(trained).max())
        np.testing.assert_allclose(
            served, trained, rtol=2e-6, atol=2e-6 * largest, err_msg=f"{fields}"
        )
        is_seen = name in FORWARD and "act" not in name and 1.0 not in fields.values()
        if is_seen and "lhs_qtype" not in str(fields):
            assert not np.allclose(trained, plain, 1e-4), fields
    for i, text in refused:
        name, fields = cases[i]
        words = ("tile", "prunes", "rotates", "axis")
        assert any(word in text for word in words), (fields, text)
    kinds = {cases[i][0] for i, _ in refused}
    tiled = {"tile_size"} if op == "conv_general_dilated" else set()
    assert kinds <= {"recipe", "additional_qt_config", "act_batch_axes", *tiled}, kinds


@pytest.mark.parametrize("op", [op for op in OPS if op != "take"])
def test_gradients_of_qat_are_those_of_the_float_op(op):
    """One meaning for every op: quantized forward, float operands backward."""
    x, model = jax.random.normal(jax.random.key(2), OPS[op][2]), Linen(op)
    params = model.init(jax.random.key(1), x)
    rule = mt.QtRule(weight_qtype="int4", act_qtype="int4")
    qat = mt.quantize_model(model, mt.QtProvider([rule]))

    @jax.jit
    def both(params, x):
        (out, pull), (exact, exact_pull) = (
            jax.vjp(m.apply, params, x) for m in (qat, model)
        )
        g = jnp.cos(jnp.arange(out.size, dtype=out.dtype)).reshape(out.shape)
        return out, exact, pull(g), exact_pull(g)

    out, exact, ours, floats = both(params, x)
    assert not np.allclose(out, exact, 1e-3)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(floats), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * np.abs(b).max())
