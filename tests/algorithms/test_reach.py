"""What attention makes of a layer's error, read off the traced program."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import midtread as mt
from midtread.algorithms import program, reach, stages
from midtread.algorithms.calibrate import CalibrationOptions, calibrate

D, T, HEADS, KV, W = 16, 10, 4, 2, 4


class Attention(nnx.Module):
    """Grouped queries, written as in two well-known ways; a bias on the values."""

    def __init__(self, style):
        linear = lambda n, *seed: nnx.Linear(D, n, rngs=nnx.Rngs(*seed))
        self.q, self.k = linear(HEADS * W, 0), linear(KV * W, 1)
        self.v, self.out = linear(KV * W, 2), linear(D, 3)
        self.v.bias[...] = jnp.arange(KV * W, dtype=jnp.float32)
        self.style = style

    def __call__(self, x):
        B = len(x)
        k = self.k(x).reshape(B, T, KV, W)
        v = self.v(x).reshape(B, T, KV, W)
        if self.style == "repeated":
            q = self.q(x).reshape(B, T, HEADS, W).swapaxes(1, 2)
            k, v = (jnp.repeat(y, HEADS // KV, 2).swapaxes(1, 2) for y in (k, v))
            a = jax.nn.softmax(jnp.where(jnp.tri(T) > 0, q @ k.swapaxes(2, 3), -1e9))
            z = (a @ v).swapaxes(1, 2).reshape(B, T, -1)
        else:
            q = self.q(x).reshape(B, T, KV, HEADS // KV, W)
            a = jax.nn.softmax(jnp.einsum("btkgh,bskh->bkgts", q, k))
            z = jnp.einsum("bkgts,bskh->btkgh", a, v).reshape(B, T, -1)
        return self.out(z)


def traced(model, x):
    """(the program, {name: number of a site}, every variable's value)."""
    found, floats = program.trace(model, x)
    env = dict(found.constants)
    env |= {v: floats[path] for path, v in found.params.items()}
    env |= dict(zip(found.inputs, found.arrays(x)))
    stages.evaluate(found.eqns, env)
    return found, {s.name: n for n, s in enumerate(found.sites)}, env


@pytest.mark.parametrize("style", ["repeated", "grouped"])
def test_attention_changes_places_with_the_values_weight(style, key):
    model, x = Attention(style), jax.random.normal(key, (3, T, D))
    found, numbers, env = traced(model, x)
    ways = {name: reach.way_of(found, n) for name, n in numbers.items()}
    assert [name for name, way in ways.items() if way] == ["v/kernel"]
    number, way = numbers["v/kernel"], ways["v/kernel"]
    assert (way.heads, way.width) == (KV, W)
    rows = reach.attended(found.sites[number], way, x, env)
    assert rows.shape == (KV, 3 * T * HEADS // KV, D)
    # Outputs without the bias, which every sum over tokens keeps as it is.
    got = jnp.einsum("gtk,kgd->gtd", rows, model.v.kernel[...].reshape(D, KV, W))
    bias = model.v.bias[...].reshape(KV, 1, W)
    z = env[way.end].reshape(3, T, KV, HEADS // KV, W).transpose(2, 0, 1, 3, 4)
    order = lambda m: np.sort(np.asarray(m).reshape(KV, -1, W), axis=1)
    np.testing.assert_allclose(order(got + bias), order(z), atol=1e-5)


class Gated(nnx.Module):
    """The way from `up` is linear, but something else varies along all its outputs."""

    def __init__(self):
        linear = lambda i, n, seed: nnx.Linear(i, n, rngs=nnx.Rngs(seed))
        self.gate, self.up, self.down = (
            linear(D, 8, 0),
            linear(D, 8, 1),
            linear(8, D, 2),
        )

    def __call__(self, x):
        return self.down(jax.nn.silu(self.gate(x)) * self.up(x)) + x


def test_other_layers_have_no_such_way(key):
    found, numbers, _ = traced(Gated(), jax.random.normal(key, (5, D)))
    assert not any(reach.way_of(found, n) for n in numbers.values())


def test_values_are_solved_for_what_attention_lets_through(key):
    """A huge first token to which nobody attends does not own the values' codes."""
    model = Attention("repeated")
    x = jax.random.normal(key, (8, T, D))
    huge = jax.random.normal(jax.random.key(7), (D,)) * 40
    x = x.at[:, 0].set(huge)
    k = np.array(model.k.kernel[...])
    k -= np.outer(huge, huge @ k) / (huge @ huge)  # its key is that of no input
    model.k.kernel[...] = jnp.asarray(k)
    provider = lambda: mt.PtqProvider([mt.QuantizationRule(module_path="v", weight_qtype="int3")])  # fmt: skip
    error = {}
    for weigh in ("attention", "both", "none"):
        made = calibrate(
            model, provider(), [x], options=CalibrationOptions(weigh=weigh)
        )
        error[weigh] = float(jnp.mean(jnp.square(made.model(x) - model(x))))
        says = "1 weights by what attention makes" in str(made.report)
        assert says == (weigh != "none")
    assert (
        error["both"] == error["attention"] < error["none"]
    )  # values are the only ones


class Causal(nnx.Module):
    def __init__(self):
        self.layers = nnx.List([Attention("repeated") for _ in range(3)])

    def __call__(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x


def test_masks_of_all_layers_are_not_kept_from_the_start():
    found, _ = program.trace(Causal(), jnp.ones((2, T, D)))
    masks = lambda variables: [v for v in variables if v.aval.shape[-2:] == (T, T)]
    assert len(masks(v for e in found.eqns for v in e.outvars)) > 2
    for stage in stages.stages(found):
        assert len(masks(stage.gives)) <= 2, stage.sites
