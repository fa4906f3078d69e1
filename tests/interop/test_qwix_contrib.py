"""qwix.contrib's two passes, on Midtread's algorithms."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import midtread as mt
from midtread.interop.qwix import contrib, qep
from midtread.numerics.qarray import dequantize
from tests.peers import peer


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


@pytest.mark.parametrize("name", CASES)
def test_two_passes_of_an_nnx_model(name, key):
    rule, provider, quantize_params = CASES[name]
    formats = {"weight_qtype": "int4", "act_qtype": "int8" if name == "sq" else None}
    x = jax.random.normal(key, (64, 16)) * jnp.linspace(1, 9, 16)
    model = nnx.Linear(16, 8, rngs=nnx.Rngs(0))
    seen = mt.quantize_model(model, provider([rule(**formats)]), x)
    assert int(getattr(seen, f"kernel_{name}")["count"]) == 0
    np.testing.assert_allclose(seen(x), model(x), rtol=1e-3, atol=1e-4)
    stats = nnx.to_pure_dict(nnx.state(seen, mt.QuantStat))
    assert int(stats[f"kernel_{name}"]["count"]) == 1

    served = mt.quantize_model(
        model, mt.PtqProvider([mt.QuantizationRule(**formats)]), x
    )
    plain = served(x)
    params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    made = quantize_params(params, served, stats)["kernel"]
    if name == "sq":  # a box; the others are dicts
        served.kernel = made
    elif name == "awq":
        assert made["array"]["pre_scale"].shape == (16, 1)
        return
    else:
        nnx.update(served, {"kernel": made})
    error = lambda y: float(jnp.sum((y - model(x)) ** 2))
    assert error(served(x)) < (error(plain) if name == "gptq" else 2 * error(plain))


def test_names_are_where_qwix_has_them():
    from midtread.interop.qwix import _ours
    from midtread.interop.qwix.table import MODULES

    for module in ("gptq", "awq", "smooth_quant", "padded_ptq", "calibration"):
        for name, row in MODULES[f"qwix.contrib.{module}"].items():
            assert _ours(row, f"qwix.contrib.{module}.{name}") is not None


def test_qep_corrects_for_the_layers_before(key):
    x = jax.random.normal(key, (64, 16)) @ (jnp.tri(16) * 0.5)
    variables = Model().init(key, x)
    wanted = Model().apply(variables, x)
    errors = {}
    for strength in (0.0, 0.5):
        result = qep.quantize(
            Model(),
            lambda: [{"inputs": x}],
            [qep.QepRule(weight_qtype="int3", correction_factor=strength)],
            variables=variables,
            batch_adapter=lambda batch: ((batch["inputs"],), {}),
        )
        got = result.model.apply({"params": result.params}, x)
        errors[strength] = float(jnp.sum((got - wanted) ** 2))
        assert [stage.param_paths for stage in result.stages] == [
            (("up", "kernel"),), (("heads",),)
        ]  # fmt: skip
    assert errors[0.5] < errors[0.0]


@pytest.mark.parametrize(
    "asked, message",
    [
        ({"variables": None}, "needs variables"),
        ({"calibration_data": []}, "at least one batch"),
        ({"methods": ("a", "b")}, "one method"),
        ({"abstract_quantized": {}}, "leave out abstract_quantized"),
        ({"gptq_damping_factor": 0.1}, "write the same number twice"),
    ],
)
def test_what_qep_cannot_do_is_refused(asked, message):
    given = {"calibration_data": [jnp.ones((4, 16))], "variables": {"params": {}}}
    given |= {"rules": [qep.QepRule(weight_qtype="int4")], **asked}
    with pytest.raises(ValueError, match=message):
        qep.quantize(Model(), **given)


@pytest.mark.parametrize("flips", [(True, True), (False, True), (False, False)])
def test_a_rotated_product_is_the_product_and_the_peers(flips, key):
    x, w = jax.random.normal(key, (5, 16)), jax.random.normal(key, (3, 16))
    words = {"row_sign_flip": flips[0], "col_sign_flip": flips[1]}
    words |= {"lhs_reduction_dim": 1, "rhs_reduction_dim": 1}
    ours = qep.hadamard_rotate_inputs(x, w, key, **words)
    np.testing.assert_allclose(ours[0] @ ours[1].T, x @ w.T, rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="a power of 2"):
        qep.hadamard_rotate_inputs(x[:, :6], w[:, :6], key, **words)
    with pytest.raises(ValueError, match="lhs_reduction_dim is .0, 1., but one axis"):
        qep.hadamard_rotate_inputs(x, w, key, **words | {"lhs_reduction_dim": (0, 1)})
    (theirs,) = peer.load("qwix", "0.1.8", "qwix.contrib.hadamard_rot")
    with peer.manners():
        wanted = theirs.hadamard_rotate_inputs(x, w, key, **words)
    for a, b in zip(ours[:2], wanted):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    assert (jax.random.key_data(ours[2]) == jax.random.key_data(wanted[2])).all()
