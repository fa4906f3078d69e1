"""A program as the chain of its stages: the same values and gradients, less compiling."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import midtread as mt
from midtread.algorithms import program, stages
from midtread.algorithms.calibrate import CalibrationOptions, calibrate
from midtread.algorithms.chain import Chain
from midtread.algorithms.learn import LearnOptions
from tests.algorithms.test_calibrate import Mixed

D = 16


class Block(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.RMSNorm(D, rngs=rngs)
        self.up = nnx.Linear(D, 2 * D, rngs=rngs)
        self.down = nnx.Linear(2 * D, D, rngs=rngs)

    def __call__(self, x):
        return x + self.down(nnx.silu(self.up(self.norm(x))))


class Deep(nnx.Module):
    """Layers that are all alike; the first one's weight is used at the end once more."""

    def __init__(self, num):
        rngs = nnx.Rngs(0)
        self.layers = nnx.List([Block(rngs) for _ in range(num)])

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.layers[0].up(x), jnp.argmax(x, axis=-1)


class Classes(nnx.Module):
    """No float output depends on the weight of `b`."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.a, self.b, self.c = (nnx.Linear(D, D, rngs=rngs) for _ in range(3))

    def __call__(self, x):
        y = self.a(x)
        return jnp.argmax(self.b(y), axis=-1), self.c(y)


@pytest.mark.parametrize(
    "model, x",
    [
        (Deep(3), jax.random.normal(jax.random.key(0), (8, D))),
        (Mixed(nnx.Rngs(0)), jax.random.normal(jax.random.key(0), (1, 8, 8, 3))),
        (Classes(), jax.random.normal(jax.random.key(0), (8, D))),
    ],
    ids=["used twice", "every contraction", "a head of classes"],
)
def test_the_chain_rule_gives_the_gradients_of_the_whole(model, x):
    traced, params = program.trace(model, x)
    moving = range(len(traced.sites) - 1)  # the last one has its own weight
    chain = Chain(traced, params, moving)
    arrays = traced.arrays(x)
    # Somewhere else than at the parameters' own values.
    weight = lambda site: params[site.path][site.layer].reshape(site.stored_shape)
    operands = {n: 1.1 * traced.sites[n].as_operand(weight(traced.sites[n])) for n in moving}  # fmt: skip
    size = lambda outs: sum(jnp.sum(jnp.sin(out)) for out in outs)

    def whole(operands):
        given = {chain.weights[n]: w for n, w in operands.items()}
        outs = stages.outputs(traced, params, arrays, given)
        return size([x for x in outs if jnp.issubdtype(x.dtype, jnp.floating)])

    value, slopes = chain.slopes(operands, arrays, {}, jax.value_and_grad(size))
    want, grads = jax.value_and_grad(whole)(operands)
    np.testing.assert_allclose(value, want, rtol=1e-5)
    assert slopes.keys() == grads.keys() == set(moving)
    for n, grad in grads.items():
        np.testing.assert_allclose(slopes[n], grad, atol=1e-4, err_msg=str(n))
    np.testing.assert_allclose(size(chain.outputs(operands, arrays, {})), want, rtol=1e-5)  # fmt: skip


def test_layers_that_are_alike_share_all_that_is_compiled():
    counts = []

    def listen(name, seconds, **others):
        counts[-1] += name.endswith("backend_compile_duration")

    options = CalibrationOptions(learn=LearnOptions(steps=2))
    provider = lambda: mt.PtqProvider(
        [mt.QuantizationRule(weight_qtype="int4", module_path="layers/.*")]
    )
    x = jax.random.normal(jax.random.key(0), (64, D))
    run = lambda num: calibrate(
        Deep(num),
        provider(),
        [x],
        algorithms=["correct", "gptq", "learn"],
        options=options,
    )
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        for num in (2, 4, 7):
            counts.append(0)
            run(num)
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    # First and last stages differ by what is kept; three layers more compile nothing more.
    assert counts[0] > counts[1] >= counts[2], counts
