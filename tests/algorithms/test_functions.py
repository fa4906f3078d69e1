"""Plain functions of their parameters: calibrated as models are."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import midtread as mt
from midtread.algorithms.calibrate import calibrate
from midtread.model import flaxlib
from tests.algorithms.test_calibrate import FLAT, D, F, Nnx, rules


def mlp(params, x):
    with jax.named_scope("up"):
        x = jnp.tanh(x @ params["up"]["kernel"] + params["up"]["bias"])
    with jax.named_scope("down"):
        return x @ params["down"]["kernel"] + params["down"]["bias"]


@pytest.fixture(scope="module")
def batches():
    draw = lambda seed: jax.random.normal(jax.random.key(seed), (40, D)) + 0.5
    return [draw(0), draw(1)]


def test_a_function_gets_the_codes_of_the_module(batches):
    model = Nnx()
    params = nnx.to_pure_dict(nnx.state(model))
    named = {"algorithms": ["correct", "gptq", "bias"], "options": FLAT}
    ours = calibrate(model, rules(), batches, **named)
    theirs = calibrate(mlp, rules(), batches, params=params, **named)
    for name in ("up", "down"):
        one = flaxlib.unbox(getattr(ours.model, name).kernel).array
        other = theirs.params[name]["kernel"]
        assert isinstance(other, mt.QArray)
        np.testing.assert_array_equal(one.qvalue, other.qvalue)
        bias = getattr(ours.model, name).bias[...]
        np.testing.assert_allclose(theirs.params[name]["bias"], bias, atol=1e-6)
    got = theirs.model(theirs.params, batches[0])
    np.testing.assert_allclose(ours.model(batches[0]), got, rtol=1e-5, atol=1e-5)
    assert isinstance(params["up"]["kernel"], jax.Array)  # as it was


def stacked(params, x):
    def layer(x, p):
        return jnp.tanh(x @ p["w"]), None

    x, _ = jax.lax.scan(layer, x, params["layers"])
    return jnp.einsum("td,hde->the", x, params["heads"])


def test_layers_that_a_scan_goes_over(batches, key):
    params = {
        "layers": {"w": jax.random.normal(key, (3, D, D)) / 4},
        "heads": jax.random.normal(key, (2, D, F)) / 4,
    }
    made = calibrate(stacked, rules(), batches, params=params, options=FLAT)
    codes = made.params["layers"]["w"]
    assert codes.qvalue.shape == (3, D, D) and codes.scale.shape == (3, 1, D)
    far = lambda p: float(jnp.mean(jnp.square(stacked(p, batches[0]) - stacked(params, batches[0]))))  # fmt: skip
    floats = jax.tree.map(
        mt.dequantize, made.params, is_leaf=lambda x: isinstance(x, mt.QArray)
    )
    out = made.model(made.params, batches[0])
    np.testing.assert_allclose(out, stacked(floats, batches[0]), rtol=1e-4, atol=1e-4)
    plain = {
        "layers": {"w": mt.dequantize(mt.quantize(params["layers"]["w"], "int4", channelwise_axes=[0, 2]))},
        "heads": mt.dequantize(mt.quantize(params["heads"], "int4", channelwise_axes=[0, 2])),
    }  # fmt: skip
    assert far(floats) < far(plain)
    assert [row.name for row in made.report.rows] == [
        "layers/w[0]", "layers/w[1]", "layers/w[2]", "heads",
    ]  # fmt: skip
    table = mt.sensitivity(stacked, batches, "int4", params=params)
    assert {c.weight for c in table.choices} == {"layers/w", "heads"}


def test_what_a_function_lacks_is_said(batches):
    params = nnx.to_pure_dict(nnx.state(Nnx()))
    for named, message in (
        ({}, "a function needs its parameters"),
        ({"params": params, "method": "encode"}, "a function has no method 'encode'"),
    ):
        with pytest.raises(ValueError, match=message):
            calibrate(mlp, rules(), batches, **named)
    with pytest.raises(ValueError, match="rules that matched nothing: rule 0"):
        calibrate(mlp, rules(module_path="side"), batches, params=params)
    made = calibrate(mlp, rules(), batches, params=params, algorithms=["round"])
    with pytest.raises(ValueError, match="down/kernel is quantized already"):
        calibrate(mlp, rules(), batches, params=made.params)
    with pytest.raises(TypeError, match="functions of their parameters, not a int"):
        calibrate(3, rules(), batches)


def test_parameters_beside_a_module_that_holds_its_own_are_refused(batches):
    model = Nnx()
    params = nnx.to_pure_dict(nnx.state(model))
    with pytest.raises(ValueError, match="an NNX module holds its parameters"):
        calibrate(model, rules(), batches, params=params)
    with pytest.raises(ValueError, match="an NNX module holds its parameters"):
        mt.sensitivity(model, batches, params=params)
    with pytest.raises(ValueError, match="leave out other_params"):
        mt.bisect(model, batches, other=model, other_params=params)
