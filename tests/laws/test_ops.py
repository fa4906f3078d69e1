"""Laws of the ops: transformations do not change what is computed."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import midtread as mt
from tests.support import mesh

RECIPES = [
    "qwix_int8",
    "qwix_fp8_full",
    "qat_int4",
    "aqt_int8",
    "te_mxfp8",
    "te_nvfp4",
    "deepseek_fp8",
]


@pytest.fixture
def arrays(key):
    return jax.random.normal(key, (32, 256)), jax.random.normal(key, (256, 64))


def gradients(op):
    return jax.value_and_grad(lambda x, w: jnp.sum(op(x, w) ** 2), argnums=(0, 1))


def assert_same(ours, theirs, tolerance=0.0):
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        np.testing.assert_allclose(
            a, b, rtol=tolerance, atol=tolerance * np.abs(b).max()
        )


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize(
    "transform", [jax.jit, jax.checkpoint, lambda f: jax.jit(jax.checkpoint(f))]
)
def test_jit_and_remat(transform, name, arrays, key):
    op = mt.learn(mt.recipe(name), key=key).dot
    assert_same(gradients(transform(op))(*arrays), gradients(op)(*arrays), 2e-6)


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize(
    "shape",
    [(2, 4), *(pytest.param(s, marks=pytest.mark.slow) for s in [(8, 1), (1, 8)])],
)
def test_any_mesh(shape, name, arrays, key):
    step = jax.jit(gradients(mt.learn(mt.recipe(name), key=key).dot))
    grid = mesh(*shape)
    for spec_x, spec_w in (
        (P("data", None), P(None, "model")),
        (P(None, "model"), P("model", "data")),
    ):
        placed = [
            jax.device_put(a, NamedSharding(grid, s))
            for a, s in zip(arrays, (spec_x, spec_w))
        ]
        assert_same(step(*placed), step(*arrays), 2e-6)


@pytest.mark.parametrize("name", RECIPES)
def test_vmap_is_a_loop(name, arrays, key):
    x, w = arrays
    op = gradients(mt.learn(mt.recipe(name), key=key).dot)
    stacked = jnp.stack([x, 2 * x, -x])
    looped = [op(one, w) for one in stacked]
    expected = jax.tree.map(lambda *leaves: jnp.stack(leaves), *looped)
    assert_same(jax.vmap(op, (0, None))(stacked, w), expected, 2e-6)


@pytest.mark.parametrize("name", RECIPES)
def test_scan_is_a_loop(name, key):
    op = mt.learn(mt.recipe(name), key=key).dot
    x = jax.random.normal(key, (16, 128))
    weights = jax.random.normal(key, (3, 128, 128)) / 12

    def looped(x, weights):
        return jnp.sum(functools.reduce(op, weights, x) ** 2)

    def scanned(x, weights):
        return jnp.sum(jax.lax.scan(lambda x, w: (op(x, w), None), x, weights)[0] ** 2)

    grad = functools.partial(jax.grad, argnums=(0, 1))
    assert_same(grad(scanned)(x, weights), grad(looped)(x, weights), 1e-5)


def test_scan_over_quantized_layers(key):
    weights = jax.random.normal(key, (3, 100, 100))
    q = mt.quantize(weights, "int4", channelwise_axes=[0, 2], tiled_axes={1: 32})
    x = jax.random.normal(key, (4, 100))
    scanned = jax.lax.scan(lambda x, w: (mt.dot(x, w), None), x, q)[0]
    looped = functools.reduce(mt.dot, (q[i] for i in range(3)), x)
    assert_same(scanned, looped, 1e-5)


def test_shard_map(arrays):
    """Rows over devices: every device multiplies its own, scales included."""
    x, w = arrays
    q = mt.quantize(w, "int8", channelwise_axes=[1], tiled_axes={0: 128})
    specs = (P("data", None), P(None, None))
    grid = mesh(8, 1)

    @functools.partial(
        jax.shard_map, mesh=grid, in_specs=specs, out_specs=P("data", None)
    )
    def sharded(x, w):
        return mt.dot(mt.quantize(x, "int8", channelwise_axes=[0]), w)

    assert_same(
        sharded(x, q), mt.dot(mt.quantize(x, "int8", channelwise_axes=[0]), q), 2e-6
    )


@pytest.mark.parametrize("name", ["qwix_int8", "te_mxfp8"])
def test_explicit_shardings(name, arrays, key):
    """Where shardings are part of the type, out_sharding is honoured in both directions."""
    grid = jax.make_mesh(
        (2, 4), ("data", "model"), axis_types=(jax.sharding.AxisType.Explicit,) * 2
    )
    op = mt.learn(mt.recipe(name), key=key).dot
    expected = gradients(op)(*arrays)
    with jax.set_mesh(grid):
        x, w = (
            jax.device_put(a, NamedSharding(grid, s))
            for a, s in zip(arrays, (P("data", "model"), P("model", None)))
        )
        sharded = functools.partial(op, out_sharding=P("data", None))
        value, (dx, dw) = jax.jit(gradients(sharded))(x, w)
    assert dx.sharding.spec == P("data", "model") and dw.sharding.spec == P(
        "model", None
    )
    assert_same((value, (dx, dw)), expected, 2e-6)
