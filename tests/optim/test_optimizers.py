"""Optimizers with few bits: they follow float32's, and small second moments stay small."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import midtread as mt
from midtread import optim
from midtread.optim import moments, optimizers, slices

SHAPE = (32, 256)


@pytest.fixture(autouse=True, scope="module")
def usual_promotion():
    with jax.numpy_dtype_promotion("standard"):  # optax mixes dtypes
        yield


def followed(tx, dtype=jnp.float32, steps=200):
    """The loss of a small regression after some steps, one jit for all of them."""
    keys = jax.random.split(jax.random.key(0), 4)
    x = jax.random.normal(keys[0], (256, 32)) * jnp.exp(jnp.linspace(-3, 1, 32))
    y = x @ jax.random.normal(keys[1], SHAPE)
    y += jax.random.normal(keys[3], y.shape) / 4
    params = {"w": jnp.zeros(SHAPE, dtype), "embedding": jnp.zeros(SHAPE, dtype)}

    def loss(params, rows):
        w = (params["w"] + params["embedding"]).astype(jnp.float32)
        return jnp.mean((x[rows] @ w - y[rows]) ** 2)

    @jax.jit
    def run(params):
        def step(carry, key):
            params, state = carry
            rows = jax.random.randint(key, (64,), 0, 256)
            grads = jax.grad(loss)(params, rows)
            updates, state = tx.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), None

        carry, _ = jax.lax.scan(
            step, (params, tx.init(params)), jax.random.split(keys[2], steps)
        )
        return loss(carry[0], jnp.arange(256)), carry[1]

    return run(params)


def rate(steps=200):
    return optax.cosine_decay_schedule(0.1, steps)


@pytest.mark.parametrize("states", ["int8", "fp8", "int4"])
def test_adamw_follows_float32(states):
    want, _ = followed(optim.adamw(rate(), b2=0.99, states="float32"))
    got, state = followed(optim.adamw(rate(), b2=0.99, states=states))
    assert abs(got / want - 1) < 0.02, (float(got), float(want))
    assert isinstance(state[0].first["w"], mt.QArray)
    assert state[0].second["embedding"].dtype == jnp.float32  # kept whole


@pytest.mark.parametrize("make", [optim.lion, optim.adafactor])
def test_others_follow_float32(make):
    want, _ = followed(make(rate(), states="float32"))
    got, _ = followed(make(rate(), states="int8"))
    assert abs(got / want - 1) < 0.02, (float(got), float(want))


def test_float32_is_optaxs():
    ours, theirs = (
        followed(tx, steps=5)[0]
        for tx in (optim.adamw(0.1, states="float32"), optax.adamw(0.1))
    )
    assert float(ours) == float(theirs)


def test_bfloat16_parameters_need_their_chance():
    """Steps too small for the nearest bfloat16 are not lost."""
    tx = optim.adamw(rate(), b2=0.99)
    want, _ = followed(tx)
    chance, _ = followed(optax.chain(tx, optim.stochastic_rounding()), jnp.bfloat16)
    nearest, _ = followed(tx, jnp.bfloat16)
    assert abs(chance - want) < abs(nearest - want)
    small = optax.chain(optax.scale(-1.0), optim.stochastic_rounding())
    params = jnp.ones((64, 256), jnp.bfloat16)

    @jax.jit
    def run(params, state):
        def step(carry, _):
            params, state = carry
            g = jnp.full(params.shape, -1e-4)
            updates, state = small.update(g, state, params)
            return (optax.apply_updates(params, updates), state), None

        return jax.lax.scan(step, (params, state), length=100)[0][0]

    moved = run(params, small.init(params)).astype(jnp.float32)
    np.testing.assert_allclose(moved.mean(), 1.01, atol=1e-3)
    assert set(np.unique(moved)) > {1.0}


@pytest.mark.parametrize("name", ["int8", "fp8", "int4"])
def test_a_moment_is_its_mean(name, key):
    """Written and read often, its mean is what was written; no second moment is lost."""
    kind = moments.STATES[name]
    x = jax.random.normal(key, (64, 256)) * 10.0 ** jnp.linspace(-3, 0, 64)[:, None]
    like = moments.zeros(kind.first, "w", x, moments.is_embedding)

    @jax.jit
    def mean(keys):
        one = lambda k: jax.random.bits(k, x.shape, jnp.uint32) & 255
        read = lambda k: moments.read(
            moments.write(x, like, kind.first, one(k)), kind.first
        )
        return jnp.mean(jax.lax.map(read, keys), 0)

    got = mean(jax.random.split(key, 400))
    step = jnp.abs(x).max(1, keepdims=True) / {"int8": 127, "fp8": 8, "int4": 7}[name]
    assert float(jnp.abs((got - x) / step).max()) < 0.2
    squares = jnp.exp(jnp.linspace(-18, 0, 256))[None].repeat(64, 0)
    root = moments.zeros(kind.second, "w", squares, moments.is_embedding)
    kept = moments.write(squares, root, kind.second, jnp.zeros((64, 256), jnp.uint32))
    back = moments.read(kept, kind.second)
    assert bool((back > 0).all())
    np.testing.assert_allclose(back[:, 128:], squares[:, 128:], rtol=0.3)


def test_bytes():
    params = {"w": jnp.zeros((1024, 1024), jnp.bfloat16), "bias": jnp.zeros(1024)}
    tx = optim.adamw(1e-3)
    state = jax.eval_shape(tx.init, params)
    per = optim.nbytes(state) / (1024 * 1024)
    assert per < 2.1, per
    assert optim.nbytes(jax.eval_shape(optim.adamw(1e-3, states="int4").init, params)) < 1.6 * 2**20  # fmt: skip


def test_rounding_is_the_same_on_a_mesh(key):
    """Eight devices, rows cut: the same codes."""
    devices = jax.make_mesh((8,), ("x",))
    where = jax.NamedSharding(devices, jax.P("x", None))
    g = jax.random.normal(key, (64, 512))
    tx = optimizers.scale_by_adam(states="int8")

    @functools.partial(jax.jit, static_argnums=1)
    def step(g, steps):
        state = tx.init({"w": g})
        for _ in range(steps):
            _, state = tx.update({"w": g}, state)
        return state

    one, many = step(g, 2), step(jax.device_put(g, where), 2)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(many), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("states", ["int8", "int4"])
def test_slices_of_a_stack_move_as_the_stack_does(states, key):
    """Codes, scales and bfloat16 parameters, bit for bit."""
    w = jax.random.normal(key, (3, 32, 256)).astype(jnp.bfloat16)
    tx = optax.chain(optim.adamw(1e-2, states=states), optim.stochastic_rounding())

    @jax.jit
    def step(params, state):
        for _ in range(2):
            updates, state = tx.update(params, state, params)
            params = optax.apply_updates(params, updates)
        return params, state

    state = tx.init({"w": w})
    want, want_state = step({"w": w}, state)
    cut = lambda m: {"w": slices.cut(m["w"])}
    first = state[0][0]._replace(
        first=cut(state[0][0].first), second=cut(state[0][0].second)
    )
    got, got_state = step({"w": slices.cut(w)}, ((first, *state[0][1:]), *state[1:]))
    np.testing.assert_array_equal(slices.stack(got["w"]), want["w"])
    moments_of = lambda s: (s[0][0].first["w"], s[0][0].second["w"])
    for ours, theirs in zip(moments_of(got_state), moments_of(want_state)):
        ours = slices.stack(ours)
        np.testing.assert_array_equal(ours.qvalue, theirs.qvalue)
        np.testing.assert_array_equal(ours.scale, theirs.scale)


def test_hyperparameters_can_be_injected():
    make = optax.inject_hyperparams(optim.adamw, static_args=("states",))
    params = {"w": jnp.ones((64, 256)), "embed": jnp.ones((64, 256))}
    tx, plain = make(learning_rate=1e-3, states="int8"), optim.adamw(1e-3)
    got, want = (t.update(params, t.init(params), params)[0] for t in (tx, plain))
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5)
    jax.tree.map(close, got, want)  # rates are arrays, and multiplied elsewhere


def test_what_cannot_be_is_refused():
    with pytest.raises(ValueError, match="states='int7': there are float32, int8"):
        optim.adamw(1e-3, states="int7")
    tx = optim.stochastic_rounding()
    with pytest.raises(ValueError, match="needs params"):
        tx.update(jnp.ones(2), tx.init(jnp.ones(2)))


@pytest.mark.parametrize("qtype", ["int8", "float8_e4m3fn"])
def test_codes_are_refused_with_what_to_write(qtype):
    params = {"kernel": mt.quantize(jnp.ones((4, 4)), qtype)}
    with pytest.raises(ValueError, match="kernel/qvalue holds codes .* mt.QtProvider"):
        optim.adamw(1e-3).init(params)
