"""qwix.contrib's two passes, on Midtread's algorithms."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

import midtread as mt
from midtread.interop.qwix import contrib
from midtread.numerics.qarray import dequantize


class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.tanh(nn.Dense(24, name="up")(x))
        w = self.param("heads", nn.initializers.lecun_normal(), (2, 24, 4))
        return jnp.einsum("td,hde->the", x, w)


CASES = {
    "gptq": (contrib.GptqRule, contrib.GptqCalibrationProvider, contrib.gptq_quantize_params),
    "awq": (contrib.AwqRule, contrib.AwqCalibrationProvider, contrib.awq_quantize_params),
    "sq": (contrib.SqRule, contrib.SqCalibrationProvider, contrib.sq_quantize_params),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_two_passes(name, key):
    rule, provider, quantize_params = CASES[name]
    x = jax.random.normal(key, (64, 16)) @ (jnp.tri(16) * 0.5) * jnp.linspace(1, 9, 16)
    params = Model().init(key, x)["params"]
    seen = mt.quantize_model(Model(), provider([rule(weight_qtype="int4")]))
    stats = {}
    for half in (x[:32], x[32:]):
        apply = jax.jit(lambda v, x: seen.apply(v, x, mutable=["quant_stats"]))
        out, held = apply({"params": params, **stats}, half)
        stats = {"quant_stats": held["quant_stats"]}
        np.testing.assert_allclose(
            out, Model().apply({"params": params}, half), rtol=1e-3, atol=1e-4
        )
    kept = stats["quant_stats"]["up"][f"kernel_{name}"]
    assert int(kept["count"]) == 2
    if name == "gptq":
        np.testing.assert_allclose(
            kept["sum_of_hessian"], x.T @ x, rtol=1e-4, atol=1e-2
        )

    formats = {"weight_qtype": "int4"}
    if name == "sq":
        formats = {"weight_qtype": "int8", "act_qtype": "int8"}
    served = mt.quantize_model(
        Model(), mt.PtqProvider([mt.QuantizationRule(**formats)])
    )
    shapes = jax.eval_shape(served.init, key, x)["params"]
    made = quantize_params(params, shapes, stats["quant_stats"])
    plain = mt.quantize_params(params, shapes)
    wanted = Model().apply({"params": params}, x)
    error = lambda p: float(jnp.sum((served.apply({"params": p}, x) - wanted) ** 2))
    if name == "gptq":
        assert error(made) < error(plain)
        return
    # Factors of inputs change nothing but the rounding.
    q, w = made["up"]["kernel"].array, params["up"]["kernel"]
    assert q.pre_scale.shape == (16, 1)
    assert error(made) < 0.05 * float(jnp.sum(wanted**2))
    if name == "awq":  # what its grid minimises; a ratio of 0 is rounding
        size = jnp.mean(jnp.abs(x), axis=0)[:, None]
        cost = lambda q: float(jnp.sum((size * (dequantize(q) - w)) ** 2))
        assert cost(q) <= cost(plain["up"]["kernel"].array)


def test_names_are_where_qwix_has_them():
    from midtread.interop.qwix import _ours
    from midtread.interop.qwix.table import MODULES

    for module in ("gptq", "awq", "smooth_quant", "padded_ptq", "calibration"):
        for name, row in MODULES[f"qwix.contrib.{module}"].items():
            assert _ours(row, f"qwix.contrib.{module}.{name}") is not None
