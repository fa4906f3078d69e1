"""Biases that make up for the mean of an error: the paper's equation, and whole models."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import midtread as mt
from midtread.algorithms import bias, program
from midtread.algorithms.calibrate import calibrate
from midtread.model import flaxlib
from midtread.numerics.qarray import dequantize, quantize
from tests.algorithms.test_calibrate import FLAT, Killed, Linen, Nnx, rules

D = 16


@pytest.fixture(scope="module")
def batches():
    """Inputs whose mean is not 0."""
    draw = lambda seed: jax.random.normal(jax.random.key(seed), (40, D)) + 1.0
    return [draw(0), draw(1)]


def test_the_shift_is_the_papers(key):
    w = jax.random.normal(key, (D, 5))
    q = quantize(w, "int3", channelwise_axes=[1])
    x = np.asarray(jax.random.normal(key, (50, D))) + 0.7
    wanted = x.mean(0) @ (np.asarray(w) - np.asarray(dequantize(q)))
    got = bias.shift(w, q, jnp.asarray(x.mean(0, keepdims=True)))
    np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5)


def test_the_mean_of_the_first_layers_error_is_gone(batches):
    model = Nnx()
    plain = calibrate(model, rules(), batches, algorithms=["round"])
    mended = calibrate(model, rules(), batches, algorithms=["round", "bias"])
    x = jnp.concatenate(batches)

    def error(made):
        up = flaxlib.unbox(made.model.up.kernel).array
        out = x @ dequantize(up) + made.model.up.bias[...]
        return np.abs(np.asarray(out - model.up(x)).mean(0)).max()

    assert error(mended) < 1e-5 < 0.01 * error(plain)
    far = lambda made: float(jnp.sum(jnp.square(made.model(x) - model(x))))
    assert far(mended) < far(plain)
    np.testing.assert_array_equal(model.up.bias[...], Nnx().up.bias[...])


def test_linen_stacks_and_kills_make_no_difference(batches, tmp_path):
    model = Nnx()
    params = {"params": nnx.to_pure_dict(nnx.state(model))}
    named = {"algorithms": ["gptq", "bias"], "options": FLAT}
    ours = calibrate(model, rules(), batches, **named)
    theirs = calibrate(Linen(), rules(), batches, params=params, **named)

    def kill(line):
        if line.startswith("up/kernel"):
            raise Killed

    with pytest.raises(Killed):
        calibrate(model, rules(), batches, folder=tmp_path, progress=kill, **named)
    again = calibrate(model, rules(), batches, folder=tmp_path, **named)
    for name in ("up", "down"):
        one = getattr(ours.model, name).bias[...]
        np.testing.assert_array_equal(getattr(again.model, name).bias[...], one)
        np.testing.assert_allclose(
            theirs.params["params"][name]["bias"], one, rtol=1e-5, atol=1e-6
        )


class Stacked(nnx.Module):
    """Layers in one parameter, one layer without a bias, and a bias that two share."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.layers = nnx.vmap(lambda rngs: nnx.Linear(D, D, rngs=rngs))(rngs.split(2))
        self.bare = nnx.Linear(D, D, use_bias=False, rngs=rngs)
        self.left, self.right = (nnx.Param(jnp.eye(D)) for _ in "ab")
        self.shared = nnx.Param(jnp.zeros(D))

    def __call__(self, x):
        scan = nnx.scan(
            lambda x, layer: jnp.tanh(layer(x)),
            in_axes=(nnx.Carry, 0),
            out_axes=nnx.Carry,
        )
        x = self.bare(scan(x, self.layers))
        y = x @ self.left[...] + self.shared[...]
        return jnp.tanh(y) @ self.right[...] + self.shared[...]


def test_a_bias_is_found_where_it_is_a_layers_own(batches):
    traced, _ = program.trace(Stacked(), batches[0])
    sources = {
        site.name: bias.find(traced, n) for n, site in enumerate(traced.sites)
    }  # fmt: skip
    layers = [(("layers", "bias"), (i,)) for i in range(2)]
    assert [sources[f"layers/kernel[{i}]"] for i in range(2)] == layers
    assert [sources[k] for k in ("bare/kernel", "left", "right")] == [None] * 3
    made = calibrate(Stacked(), rules(), batches, algorithms=["round", "bias"])
    assert (jnp.abs(made.model.layers.bias[...]).max(1) > 1e-4).all()
    notes = {row.name: row.note for row in made.report.rows}
    assert (
        notes["bare/kernel"] == "no bias to correct" and not notes["layers/kernel[0]"]
    )


def test_learning_keeps_corrected_biases(batches):
    options = mt.CalibrationOptions(min_tokens=0.1)
    made = calibrate(
        Nnx(), rules(), batches, algorithms=["round", "bias", "learn"], options=options
    )
    alone = calibrate(Nnx(), rules(), batches, algorithms=["round", "bias"])
    np.testing.assert_array_equal(made.model.down.bias[...], alone.model.down.bias[...])
    before, after = made.report.distances
    x = jnp.concatenate(batches)
    error = jnp.sum(jnp.square(alone.model(x) - Nnx()(x))) / jnp.sum(Nnx()(x) ** 2)
    np.testing.assert_allclose(before, error, rtol=0.2)
    assert after < before
