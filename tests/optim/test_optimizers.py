"""Optimizers with few bits: they follow float32's, and small second moments stay small."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

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


MAKES = [optim.adamw, optim.lion, optim.adafactor]


@pytest.mark.parametrize("make", MAKES)
def test_a_first_moment_that_is_injected_is_there(make):
    params = {"w": jnp.ones((64, 256))}
    tx = optax.inject_hyperparams(make)(learning_rate=1e-3)
    got, _ = jax.jit(tx.update)(params, tx.init(params), params)
    plain = make(1e-3)
    want, _ = jax.jit(plain.update)(params, plain.init(params), params)
    np.testing.assert_allclose(got["w"], want["w"], rtol=1e-5)


@pytest.mark.parametrize("make", MAKES)
def test_nothing_to_move(make):
    """A label that no parameter has, and a mask that leaves none."""
    params = {"w": jnp.ones((64, 256))}
    tx = optax.chain(make(1e-3), optim.stochastic_rounding())
    labelled = optax.multi_transform({"a": optax.sgd(1.0), "b": tx}, {"w": "a"})
    updates, _ = labelled.update(params, labelled.init(params), params)
    np.testing.assert_array_equal(updates["w"], -params["w"])
    assert tx.update({}, tx.init({}), {})[0] == {}


def test_every_matrix_has_tiles_if_its_axes_have_divisors():
    bytes_of = lambda *shape: (
        optim.nbytes(jax.eval_shape(optim.adamw(1e-3).init, jnp.zeros(shape)))
        / np.prod(shape)
    )
    for shape in ((1000, 1000), (300, 301), (100, 100)):
        assert bytes_of(*shape) < 2.1, shape
    assert bytes_of(257, 257) > 8  # a prime number
    w = jax.random.normal(jax.random.key(0), (10, 1000))
    kind = moments.STATES["int8"].first
    kept = moments.zeros(kind, "w", w, moments.is_embedding)
    kept = moments.write(w, kept, kind, jnp.full(w.shape, 128, jnp.uint32))
    assert kept.scale.shape == (10, 4)
    np.testing.assert_allclose(moments.read(kept, kind), w, atol=0.04)


@pytest.mark.parametrize("name", ["int8", "fp8", "int4"])
def test_a_moment_that_has_died_down_is_zero(name, key):
    """A scale below the least float has no inverse: 0 times that would be no number."""
    x = jax.random.normal(key, (64, 256)) * 1e-37 * (jnp.arange(256) % 2)
    for kind in moments.STATES[name]:
        kept = moments.zeros(kind, "w", x, moments.is_embedding)
        kept = moments.write(abs(x), kept, kind, jnp.zeros(x.shape, jnp.uint32))
        back = moments.read(kept, kind)
        assert bool(jnp.isfinite(back).all()), kind
        np.testing.assert_allclose(back, 0, atol=1e-36)


@pytest.mark.parametrize("spec", [("x", None), (None, "x")])
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_moments_lie_as_their_parameters_do(kind, spec, key):
    """Also where shardings are part of types and tiles straddle shards."""
    axis_type = getattr(jax.sharding.AxisType, kind)
    mesh = jax.make_mesh((8,), ("x",), axis_types=(axis_type,))
    where = jax.NamedSharding(mesh, jax.P(*spec))
    w = jax.random.normal(key, (64, 512))
    tx = optax.chain(optim.adamw(1e-3), optim.stochastic_rounding())

    @jax.jit
    def step(params):
        state = tx.init(params)
        for _ in range(2):
            updates, state = tx.update(params, state, params)
        return updates, state

    params = {"w": w, "embedding": w.astype(jnp.bfloat16)}
    there = jax.device_put(params, where)
    kept = tx.init(there)[0][0]
    for moment in (*kept.first.values(), *kept.second.values()):
        codes = moment.qvalue if isinstance(moment, mt.QArray) else moment
        assert codes.sharding == where
    with jax.set_mesh(mesh):
        many = step(there)
    for a, b in zip(jax.tree.leaves(step(params)), jax.tree.leaves(many), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


def test_nnx_optimizer(key):
    """It gives back the parts of a QArray by their names."""
    x = jax.random.normal(key, (8, 64))
    model = nnx.Linear(64, 256, rngs=nnx.Rngs(0))
    params = {"kernel": model.kernel[...], "bias": model.bias[...]}
    tx = optim.adamw(1e-2)
    optimizer, state = nnx.Optimizer(model, tx, wrt=nnx.Param), tx.init(params)

    @nnx.jit
    def theirs(model, optimizer):
        grads = nnx.grad(lambda model: jnp.mean(model(x) ** 2))(model)
        optimizer.update(model, grads)

    @jax.jit
    def ours(params, state):
        loss = lambda p: jnp.mean((x @ p["kernel"] + p["bias"]) ** 2)
        updates, state = tx.update(jax.grad(loss)(params), state, params)
        return optax.apply_updates(params, updates), state

    for _ in range(3):
        theirs(model, optimizer)
        params, state = ours(params, state)
    np.testing.assert_allclose(model.kernel[...], params["kernel"], atol=1e-5)


@pytest.mark.parametrize("make", MAKES)
def test_gradients_that_are_not_finite_are_skipped(make, key):
    """In bfloat16, widened as docs/qat-and-qt.md says: a choice is between equal dtypes."""
    widen = optax.stateless_with_tree_map(lambda g, _: g.astype(jnp.float32))
    tx = optax.chain(widen, optax.apply_if_finite(make(1e-3), 3))
    w = jax.random.normal(key, (64, 256), jnp.bfloat16)
    good, state = tx.update({"w": w}, tx.init({"w": w}), {"w": w})
    plain, wide = make(1e-3), {"w": w.astype(jnp.float32)}
    want, _ = plain.update(wide, plain.init({"w": w}), {"w": w})
    # optax's Adafactor has means in the parameters' dtype, which XLA may round less often.
    np.testing.assert_allclose(good["w"], want["w"], rtol=0.01)
    bad, after = tx.update({"w": w * jnp.nan}, state, {"w": w})
    assert not bad["w"].any() and after[1].total_notfinite == 1
    kept = lambda state: jax.tree.leaves(state[1].inner_state)
    assert all(map(np.array_equal, kept(after), kept(state)))


def test_what_cannot_be_is_refused():
    for make in MAKES:
        with pytest.raises(ValueError, match="states='int7': there are float32, int8"):
            make(1e-3, b1=0.0, states="int7")
    with pytest.raises(ValueError, match="steps is int32.*optax.masked"):
        optim.adamw(1e-3).init({"steps": jnp.int32(0)})
    tx = optim.stochastic_rounding()
    with pytest.raises(ValueError, match="needs params"):
        tx.update(jnp.ones(2), tx.init(jnp.ones(2)))


@pytest.mark.parametrize("qtype", ["int8", "float8_e4m3fn"])
def test_codes_are_refused_with_what_to_write(qtype):
    params = {"kernel": mt.quantize(jnp.ones((4, 4)), qtype)}
    with pytest.raises(ValueError, match="kernel/qvalue holds codes .* mt.QtProvider"):
        optim.adamw(1e-3).init(params)
