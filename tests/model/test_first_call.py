"""The first call outside of jit: what it compiles serves the next model of its kind."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import midtread as mt
from midtread.model import running

X = jnp.ones((3, 8))
COMPILED = "/jax/core/compile/backend_compile_duration"


class Layer(nnx.Module):
    def __init__(self):
        self.norm = nnx.RMSNorm(8, rngs=nnx.Rngs(0))
        self.up = nnx.Linear(8, 8, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return jax.vmap(lambda x: x @ x.T)(self.up(self.norm(x))[None])


@jax.jit
def product(x, w):
    return x @ w


class Jits(nnx.Module):
    """Multiplies inside a jit, where a trace may be kept."""

    def __init__(self):
        self.w = nnx.Param(jnp.ones((8, 8)))

    def __call__(self, x):
        return product(x, self.w[...])


def quantized(make, kind, **rule):
    provider = kind([mt.QtRule(weight_qtype="int8", act_qtype="int8", **rule)])
    return mt.quantize_model(make(), provider, X), provider


@pytest.fixture
def compiled():
    """Counts what XLA compiles."""
    events = []
    listen = lambda name, *_, **__: events.append(name) if name == COMPILED else None
    jax.monitoring.register_event_duration_secs_listener(listen)
    yield events
    jax.monitoring.unregister_event_duration_listener(listen)


@pytest.mark.parametrize("kind", [mt.PtqProvider, mt.QtProvider])
def test_an_equal_model_compiles_nothing(kind, compiled):
    model, _ = quantized(Layer, kind)
    out = model(X)
    assert compiled
    model, _ = quantized(Layer, kind)
    compiled.clear()
    again = model(X)
    assert not compiled
    assert (again == out).all()
    model, _ = quantized(Layer, kind, tile_size=4)  # other rules share nothing
    model(X)
    assert compiled


def test_models_that_trace_inside_share_nothing():
    (first, one), (second, other) = (quantized(Jits, mt.QtProvider) for _ in "ab")
    first(X), second(X)
    assert running._key_number(one) != running._key_number(other)
    assert one.traces_inside and other.traces_inside
