"""Learned codes: the steps against plain NumPy, and what whole models gain by them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import midtread as mt
from midtread.algorithms import learn
from midtread.algorithms.calibrate import CalibrationOptions, calibrate
from midtread.algorithms.learn import LearnOptions
from midtread.numerics.qarray import dequantize, quantize, quantize_by_spec
from midtread.numerics.spec import Spec
from tests.algorithms.test_solve import SPECS, every_spec, layer

__all__ = ["layer"]  # a fixture


def test_a_step_is_adams_on_what_rounding_hides():
    """Two steps on int4 in tiles of 4, written out."""
    rng = np.random.default_rng(0)
    w = rng.normal(size=(8, 3)).astype(np.float32)
    q = quantize(jnp.asarray(w), "int4", channelwise_axes=[1], tiled_axes={0: 4})
    scale = np.repeat(np.asarray(q.scale), 4, axis=0)
    code = np.asarray(q.qvalue, np.float32)
    u = code + 0.5 * (np.clip(w / scale, -8.5, 7.5) - code)
    c, m, v = np.zeros((2, 3)), [0.0, 0.0], [0.0, 0.0]
    state = learn.start(jnp.asarray(w), q)
    np.testing.assert_allclose(state.units, u, atol=2e-3)  # eight halvings of a border
    u = np.asarray(state.units)
    for number in (1, 2):
        g = rng.normal(size=w.shape).astype(np.float32)
        by_c = (g * scale * np.clip(np.round(u), -8, 7)).reshape(2, 4, 3).sum(1)
        steps = []
        for i, (slope, rate) in enumerate(((g * scale, 0.3), (by_c, 0.01))):
            m[i] = 0.9 * m[i] + 0.1 * slope
            v[i] = 0.99 * v[i] + 0.01 * slope**2
            mean, size = m[i] / (1 - 0.9**number), v[i] / (1 - 0.99**number)
            steps.append(rate * mean / np.sqrt(size))
        u, c = np.clip(u - steps[0], -8.5, 7.5), c - steps[1]
        state = learn.step(state, q, jnp.asarray(g), number, (0.3, 0.01))
    np.testing.assert_allclose(state.units, u, atol=1e-5)
    np.testing.assert_allclose(state.gain, c, atol=1e-5)
    found = learn.codes(state, q)
    np.testing.assert_allclose(found.scale, np.asarray(q.scale) * np.exp(c), rtol=1e-5)
    assert (np.asarray(found.qvalue) == np.clip(np.round(u), -8, 7)).all()


@every_spec
def test_latents_begin_as_the_codes_they_were_given(layer, spec):
    w, _ = layer
    q = quantize_by_spec(w + 0.3, spec)  # codes that are not the nearest of w
    state = jax.jit(learn.start)(w, q)
    again = learn.codes(state, q)
    np.testing.assert_array_equal(dequantize(again), dequantize(q))


class Deep(nnx.Module):
    def __init__(self):
        self.layers = nnx.List([nnx.Linear(16, 16, rngs=nnx.Rngs(i)) for i in range(3)])

    def __call__(self, x):
        for one in self.layers:
            x = nnx.tanh(one(x))
        return x


@pytest.mark.parametrize(
    "qtype, distance", [("int3", "squares"), ("nvfp4", "divergence")]
)
def test_learning_brings_outputs_nearer_on_inputs_it_did_not_see(qtype, distance):
    model = Deep()
    data = lambda seed: jax.random.normal(jax.random.key(seed), (64, 16)) @ jnp.tri(16)
    batches = [data(seed) for seed in range(4)]
    provider = lambda: mt.PtqProvider([mt.QuantizationRule(weight_qtype=qtype)])
    options = CalibrationOptions(
        learn=LearnOptions(steps=80, rate=0.01, distance=distance)
    )
    plain = calibrate(model, provider(), batches)
    best = calibrate(
        model, provider(), batches, algorithms=["gptq", "learn"], options=options
    )
    far = lambda made: float(
        learn.distance(distance, [made.model(data(9))], [model(data(9))])
    )
    assert far(best) < 0.9 * far(plain)
    before, after = best.report.distances
    assert after < before
    assert f"from {before:.3g} to {after:.3g}" in str(best.report)


def test_what_learns_nothing_stays_as_it_was():
    model, x = Deep(), jax.random.normal(jax.random.key(0), (64, 16))
    provider = lambda: mt.PtqProvider([mt.QuantizationRule(weight_qtype="int4")])
    wild = CalibrationOptions(learn=LearnOptions(steps=2, rate=50.0))
    plain = calibrate(model, provider(), [x])
    same = calibrate(model, provider(), [x], algorithms=["gptq", "learn"], options=wild)
    for one, other in zip(plain.model.layers, same.model.layers):
        np.testing.assert_array_equal(
            one.kernel.array.qvalue, other.kernel.array.qvalue
        )
    before, after = same.report.distances
    assert before == after


class Words(nnx.Module):
    def __init__(self):
        self.table = nnx.Embed(20, 16, rngs=nnx.Rngs(0))
        self.deep = Deep()

    def __call__(self, tokens):
        x = self.table(tokens)
        return self.deep(jnp.cumsum(x, axis=1) / 3)


def test_batches_are_mixed_where_they_are_tokens():
    draw = lambda seed, rows=4: jax.random.randint(jax.random.key(seed), (rows, 9), 0, 20)  # fmt: skip
    batches = [draw(seed) for seed in range(3)]
    (rows,) = learn.mixed([batches[0]], [batches[1]], jax.random.key(3))
    begins = (np.asarray(rows) == np.roll(batches[1], 1, axis=0)).all(0)
    ends = (np.asarray(rows) == np.asarray(batches[0])).all(0)
    at = int(ends.argmax())
    assert 0 < at < 9 and begins[:at].all() and ends[at:].all()

    rule = mt.QuantizationRule(module_path="deep/.*", weight_qtype="int3")

    def weight(batches, model=Words, **fields):
        options = LearnOptions(steps=30, **fields)
        made = calibrate(
            model(), mt.PtqProvider([rule]), batches, algorithms=["gptq", "learn"],
            options=CalibrationOptions(learn=options),
        )  # fmt: skip
        before, after = made.report.distances
        assert after < before
        return np.asarray(dequantize(made.model.deep.layers[0].kernel.array))

    one = weight(batches, mix=True)
    np.testing.assert_array_equal(one, weight(batches, mix=True))  # no chance in it
    assert (one != weight(batches)).any()
    with pytest.raises(ValueError, match=r"mix=True recombines inputs .*float32"):
        weight([jax.random.normal(jax.random.key(0), (40, 16))], Masked, mix=True)
    with pytest.raises(ValueError, match="recombines rows, and there is one"):
        weight([draw(0, rows=1)], mix=True)


class Masked(nnx.Module):
    """Logits of which some can never happen."""

    def __init__(self):
        self.deep = Deep()

    def __call__(self, x):
        return jnp.where(jnp.arange(16) < 9, self.deep(x), -jnp.inf)


def test_outputs_that_are_not_finite_are_told_from_those_that_cannot_happen():
    x = jax.random.normal(jax.random.key(0), (64, 16))
    provider = lambda: mt.PtqProvider([mt.QuantizationRule(weight_qtype="int3")])

    def distances(distance, rate=0.01):
        options = LearnOptions(steps=20, distance=distance, rate=rate)
        made = calibrate(
            Masked(), provider(), [x], algorithms=["gptq", "learn"],
            options=CalibrationOptions(learn=options),
        )  # fmt: skip
        return made.report.distances

    before, after = distances("divergence")
    assert 0 < after < before
    before, after = distances("divergence", rate=float("inf"))  # to nan: as it was
    assert 0 < after == before
    with pytest.raises(ValueError, match="nan from the float model's by distance='squ"):
        distances("squares")


@pytest.mark.parametrize(
    "asked, message",
    [
        ({"steps": 0}, "steps lie above 0"),
        ({"steps": 1.5}, "steps lie above 0 and are whole"),
        ({"rate": float("nan")}, "rate and scale_rate are not below 0"),
        ({"start": 1.0}, "start=1.0 lies between 0 and 1"),
        ({"distance": "far"}, "distance='far' should be one of"),
    ],
)
def test_options_of_learning_are_checked(asked, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(learn.DEFAULT, **asked)


def test_scales_of_formats_stay_what_the_format_allows():
    assert learn.is_free(SPECS["int4/16"])
    assert not learn.is_free(SPECS["mxfp4"])
    assert not learn.is_free(SPECS["nvfp4"])
    assert not learn.is_free(Spec("int4", (1,), calibration="fixed,-1,1"))
