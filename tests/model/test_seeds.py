"""The examples people know, run as they are written, with our name in place of Qwix's."""

import re

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx

import midtread as qwix


class MLP(nn.Module):
    dhidden: int
    dout: int

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(self.dhidden, use_bias=False)(x)
        x = nn.relu(x)
        x = nn.Dense(self.dout, use_bias=False)(x)
        return x


class NnxMLP(nnx.Module):
    def __init__(self, rngs):
        self.linear1 = nnx.Linear(16, 64, rngs=rngs)
        self.linear2 = nnx.Linear(64, 16, rngs=rngs)

    def __call__(self, x):
        return self.linear2(nnx.relu(self.linear1(x)))


model = MLP(64, 16)
model_input = jax.random.uniform(jax.random.key(0), (8, 16))


def flat(text) -> str:
    return re.sub(r"\s+", "", str(text))


def test_post_training_quantization():
    rules = [
        qwix.QuantizationRule(
            module_path=".*",  # this rule matches all modules.
            weight_qtype="int8",  # quantizes weights in int8.
            act_qtype="int8",  # quantizes activations in int8.
        )
    ]
    ptq_model = qwix.quantize_model(model, qwix.PtqProvider(rules))
    shown = jax.eval_shape(ptq_model.init, jax.random.key(0), model_input)["params"]
    for layer, shape in (("Dense_0", (16, 64)), ("Dense_1", (64, 16))):
        head = (
            f"WithAux(array=QArray(qvalue=ShapeDtypeStruct(shape={shape}, dtype=int8), "
            f"scale=ShapeDtypeStruct(shape=(1, {shape[1]}), dtype=float32),"
        )
        assert flat(shown[layer]["kernel"]).startswith(flat(head))

    fp_params = model.init(jax.random.key(0), model_input)["params"]
    abs_ptq_params = jax.eval_shape(ptq_model.init, jax.random.key(0), model_input)[
        "params"
    ]
    ptq_params = qwix.quantize_params(fp_params, abs_ptq_params)
    quantized_model_output = ptq_model.apply({"params": ptq_params}, model_input)
    exact = model.apply({"params": fp_params}, model_input)
    assert 0 < jnp.abs(quantized_model_output - exact).max() < 0.05


def test_training_linen_and_nnx():
    qt_rules = [qwix.QtRule(weight_qtype="int8", act_qtype="int8", bwd_qtype="int8")]
    qat_rules = [qwix.QuantizationRule(weight_qtype="int8", act_qtype="int8")]
    for rules in (qt_rules, qat_rules):
        qt_model = qwix.quantize_model(model, qwix.QtProvider(rules))
        variables = model.init(
            jax.random.key(0), model_input
        )  # checkpoints are exchangeable
        loss = lambda v, m: jnp.mean(m.apply(v, model_input) ** 2)
        ours, exact = (jax.grad(loss)(variables, m) for m in (qt_model, model))
        for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(exact)):
            assert 0 < jnp.linalg.norm(a - b) < 0.1 * jnp.linalg.norm(b)

        fp_model = NnxMLP(nnx.Rngs(0))
        qt_nnx = qwix.quantize_model(fp_model, qwix.QtProvider(rules), model_input)
        assert 0 < jnp.abs(qt_nnx(model_input) - fp_model(model_input)).max() < 0.05
        assert isinstance(qt_nnx, NnxMLP) and isinstance(qt_nnx.linear1, nnx.Linear)


def test_static_range_statistics():
    rules = [qwix.QtRule(weight_qtype="int8", act_qtype="int8", act_static_scale=True)]
    qt_model = qwix.quantize_model(model, qwix.QtProvider(rules))
    shown = qt_model.init(jax.random.key(0), model_input)["quant_stats"]
    entry = (
        "{'dot_general0_lhs': {'count': Array(0, dtype=int32), "
        "'sum_of_absmax': Array([[0.]], dtype=float32)}}"
    )
    assert flat(shown) == flat(f"{{'Dense_0': {entry}, 'Dense_1': {entry}}}")

    nnx_model = qwix.quantize_model(
        NnxMLP(nnx.Rngs(0)), qwix.QtProvider(rules), model_input
    )
    expected = """QuantStat( # 2 (8 B)
      value={'count': Array(0, dtype=int32), 'sum_of_absmax': Array([[0.]], dtype=float32)}
    )"""
    assert flat(nnx_model.linear1.dot_general0_lhs) == flat(expected)

    # Standalone calibration: only the forward pass, where statistics are updated.
    variables = qt_model.init(jax.random.key(0), model_input)
    for _ in range(3):
        _, updated = qt_model.apply(variables, model_input, mutable="quant_stats")
        variables = {**variables, **updated}
        nnx_model(model_input)
    assert variables["quant_stats"]["Dense_0"]["dot_general0_lhs"]["count"] == 3
    assert nnx_model.linear1.dot_general0_lhs.get_value()["count"] == 3

    # From there to serving, scales of activations included.
    ptq = qwix.quantize_model(model, qwix.PtqProvider(rules))
    abstract = jax.eval_shape(ptq.init, jax.random.key(0), model_input)["params"]
    params = qwix.quantize_params(
        variables["params"], abstract, variables["quant_stats"]
    )
    served = ptq.apply({"params": params}, model_input)
    trained = qt_model.apply(variables, model_input)
    assert jnp.abs(served - trained).max() < 1e-5


class NvidaFp8Provider(qwix.QtProvider):
    """Wraps nn.Fp8DirectDotGeneralOp with Qwix's provider interface."""

    def dot_general(self, *args, **kwargs):
        # Here we only check if the rule is None or not.
        rule, op_id = self._get_current_rule_and_op_id("dot_general")
        if rule is None:
            return jax.lax.dot_general(*args, **kwargs)
        return nn.Fp8DirectDotGeneralOp(name=op_id)(*args, **kwargs)

    def einsum(self, *args, **kwargs):
        rule, op_id = self._get_current_rule_and_op_id("einsum")
        if rule is None:
            return jnp.einsum(*args, **kwargs)
        return nn.Fp8Einsum(name=op_id)(*args, **kwargs)


class NANOOFp8Provider(qwix.QtProvider):
    def dot_general(self, *args, **kwargs):
        rule, op_id = self._get_current_rule_and_op_id("dot_general")
        if rule is None:
            return jax.lax.dot_general(*args, **kwargs)
        return nn.NANOOFp8DotGeneralOp(name=op_id)(*args, **kwargs)


def test_providers_that_create_submodules():
    rules = [
        qwix.QtRule(
            module_path="Dense_0",
            weight_qtype=jnp.float8_e4m3fn,
            act_qtype=jnp.float8_e4m3fn,
            bwd_qtype=jnp.float8_e4m3fn,
            bwd_weight_grad_tile_size=1 / 4,
            op_names=("dot_general",),
        )
    ]
    with jax.numpy_dtype_promotion("standard"):
        for provider in (NvidaFp8Provider, NANOOFp8Provider):
            fp8 = qwix.quantize_model(model, provider(rules))
            variables = fp8.init(jax.random.key(0), model_input)
            state = variables["_overwrite_with_gradient"]
            assert list(state) == ["Dense_0"] and list(state["Dense_0"]) == [
                "dot_general0"
            ]
            loss = lambda v, fp8=fp8: jnp.mean(fp8.apply(v, model_input) ** 2)
            grads = jax.jit(jax.grad(loss))(variables)
            history = grads["_overwrite_with_gradient"]["Dense_0"]["dot_general0"]
            assert history["input_amax_history"].max() == model_input.max()
