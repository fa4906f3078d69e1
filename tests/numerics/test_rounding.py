"""Stochastic rounding: unbiased, only ever to a neighbour, and the same wherever it runs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from midtread.numerics import platforms
from midtread.numerics.formats import FORMATS
from midtread.numerics.qarray import quantize_by_spec
from midtread.numerics.rounding import (
    decode,
    encode,
    make_noise,
    nearest_value,
    uniform,
)
from midtread.numerics.spec import Spec
from tests.support import f64, levels, mesh

QTYPES = ["int8", "int4", "float8_e4m3fn", "float8_e5m2", "float4_e2m1fn"]
QTYPES += ["float6_e3m2fn", "nf4"]
DRAWS = 2048


@functools.partial(jax.jit, static_argnums=(1,))
def draw(x, fmt, key):
    """Each element of x rounded DRAWS times over."""
    x = jnp.broadcast_to(x, (DRAWS, x.size))
    codes = encode(x, fmt, "stochastic", make_noise("stochastic", key))
    return decode(codes, fmt).astype(jnp.float32)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("qtype", QTYPES)
def test_unbiased_between_all_neighbours(qtype, dtype, key):
    values = levels(FORMATS[qtype]).values
    below, above = values[:-1, None], values[1:, None]
    x = jnp.asarray(below + (above - below) * [0.25, 0.5, 0.75], jnp.float32)
    x = x.astype(dtype)  # may move the point; the claim is about where it is now
    got = f64(draw(x.ravel(), FORMATS[qtype], key)).reshape(DRAWS, *x.shape)

    assert ((got == below) | (got == above)).all()
    p = (f64(x) - below) / (above - below)  # of rounding up
    sigma = np.sqrt(p * (1 - p) / DRAWS)
    bias = (got.mean(0) - f64(x)) / (above - below)
    assert (
        np.abs(bias) <= 5 * sigma + 1e-6
    ).all()  # each: 5 sigma, there are up to 765
    assert abs(bias.sum()) <= 4 * np.sqrt((sigma**2).sum()) + 1e-6  # all of them: 4


@pytest.mark.parametrize("qtype", QTYPES)
def test_representable_values_never_move(qtype, key):
    values = levels(FORMATS[qtype]).values
    got = f64(draw(jnp.asarray(values, jnp.float32), FORMATS[qtype], key))
    assert (got == values).all()


def test_saturates(key):
    got = f64(draw(jnp.array([1e9, -1e9, np.inf]), FORMATS["int8"], key))
    assert (got == [127, -128, 127]).all()


# --- the same codes everywhere ----------------------------------------------------------------

SPEC = Spec("int8", channelwise_axes=(0,), rounding="stochastic")


def codes(x, key, site=(), origin=None):
    return quantize_by_spec(x, SPEC, key, site, origin).qvalue


@pytest.fixture
def x(key):
    return jax.random.normal(key, (16, 64))


def test_same_under_jit_and_remat(x, key):
    want = codes(x, key)
    np.testing.assert_array_equal(jax.jit(codes)(x, key), want)

    def loss(x):
        return jnp.sum(codes(x, key).astype(jnp.float32) * x)

    plain, again = (jax.jit(jax.grad(f))(x) for f in (loss, jax.checkpoint(loss)))
    np.testing.assert_array_equal(plain, again)


@pytest.mark.parametrize("shape", [(8, 1), (2, 4), (1, 8)], ids=str)
def test_same_on_every_mesh(x, key, shape):
    split = PartitionSpec("data", "model")
    sharded = jax.device_put(x, NamedSharding(mesh(*shape), split))
    np.testing.assert_array_equal(jax.jit(codes)(sharded, key), codes(x, key))


@pytest.mark.parametrize("shape", [(8, 1), (2, 4), (1, 8)], ids=str)
def test_same_in_shard_map_with_origin(key, shape):
    def block(x, key):
        start = [jax.lax.axis_index(a) * n for a, n in zip(("data", "model"), x.shape)]
        noise = make_noise("stochastic", key, origin=start)
        return encode(x, FORMATS["int4"], "stochastic", noise)

    x = jax.random.normal(key, (16, 64)) * 4
    split = PartitionSpec("data", "model")
    mapped = jax.shard_map(
        block, mesh=mesh(*shape), in_specs=(split, PartitionSpec()), out_specs=split
    )
    want = encode(x, FORMATS["int4"], "stochastic", make_noise("stochastic", key))
    np.testing.assert_array_equal(f64(jax.jit(mapped)(x, key)), f64(want))


def test_scan_over_layers_is_a_loop_over_layers(x, key):
    layers = jnp.stack([x, x, x])
    step = lambda layer, x: (layer + 1, codes(x, key, ("mlp", layer)))
    _, scanned = jax.lax.scan(step, 0, layers)
    for layer in range(3):
        np.testing.assert_array_equal(scanned[layer], codes(x, key, ("mlp", layer)))


def test_every_part_of_the_name_changes_the_noise(key):
    shape = (64, 64)
    draws = [
        uniform(key, shape, *rest)
        for rest in [(), (("a",),), (("b",),), (("a", 0),), (("a", 1),), ((), (64, 0))]
    ]
    draws.append(uniform(jax.random.fold_in(key, 1), shape))
    for i, one in enumerate(draws):
        assert f64(one).mean() == pytest.approx(0.5, abs=0.02)
        for other in draws[:i]:
            assert abs(np.corrcoef(f64(one).ravel(), f64(other).ravel())[0, 1]) < 0.06


def test_noise_is_uniform_and_uncorrelated_with_its_neighbours(key):
    u = f64(uniform(key, (256, 256)))
    counts, _ = np.histogram(u, 64, (0, 1))
    assert (
        (counts - u.size / 64) ** 2 / (u.size / 64)
    ).sum() < 130  # chi2, 63: p ~ 1e-6
    for one, other in [(u[1:], u[:-1]), (u[:, 1:], u[:, :-1]), (u, u.T)]:
        assert abs(np.corrcoef(one.ravel(), other.ravel())[0, 1]) < 0.02


# --- Qwix's noise -----------------------------------------------------------------------------


@pytest.mark.parametrize("axes", [(0,), (1,), (0, 1), (-1,)])
@pytest.mark.parametrize("method", ["uniform", "low_bit_uniform"])
def test_equals_qwix_noise(method, axes, key):
    theirs = pytest.importorskip(
        "qwix._src.core.stochastic_rounding", reason="qwix, the peer, is not installed"
    )
    want = theirs.get_noise_fn(method, key, [a % 2 for a in axes])((8, 16))
    ours = make_noise(method, key, noise_axes=axes)
    np.testing.assert_array_equal(ours((8, 16)), want)


@pytest.mark.parametrize("method", ["uniform", "low_bit_uniform"])
def test_row_noise_rounds_to_a_neighbour(method, key):
    x = jax.random.normal(key, (32, 32)) * 20
    got = f64(encode(x, FORMATS["int8"], method, make_noise(method, key)))
    assert (np.abs(got - f64(x)) < 1).all()
    assert (got != np.round(f64(x))).any()


def test_bad_requests_say_what_to_do(key):
    with pytest.raises(ValueError, match="unknown rounding 'up'.*stochastic"):
        make_noise("up", key)
    with pytest.raises(ValueError, match="needs a random key: pass key="):
        make_noise("stochastic", None)


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
def test_the_nearest_value_is_what_its_code_stands_for(fmt, key):
    """At every level of the formats that have few, at every tie, in between, and beyond."""
    high = fmt.grid.largest if fmt.grid else (fmt.codes or (0, 1))[1]
    x = jax.random.normal(key, (512,)) * high / 2
    if fmt.bits <= 8:
        values = jnp.asarray(levels(fmt).values, jnp.float32)
        x = jnp.concatenate([x, values, (values[1:] + values[:-1]) / 2, 9 * values])
    x = jnp.append(x, jnp.nan)
    wanted = decode(encode(x, fmt), fmt).astype(jnp.float32)
    np.testing.assert_array_equal(nearest_value(x, fmt), wanted)


FLOATS = {name: fmt for name, fmt in FORMATS.items() if fmt.grid and fmt.is_linear}


@pytest.mark.parametrize("fmt", FLOATS.values(), ids=FLOATS)
def test_a_gpu_casts_what_is_rounded_before(fmt):
    """All numbers of bfloat16, and those between them, have the codes of one cast, and XLA may
    undo that: nothing keeps a cast back from being one of equal values."""
    near = np.arange(2**16, dtype=np.uint32)[:, None] << 16
    x = jnp.asarray((near + np.uint32([0, 0x7FFF, 0x8000, 0x8001])).view(np.float32))
    x = x.reshape(-1)
    wanted = encode(x, fmt)
    with platforms.pretended("gpu"):
        got = encode(x, fmt)
        text = jax.jit(lambda x: encode(x, fmt)).lower(x).as_text()
    assert "optimization_barrier" not in text
    np.testing.assert_array_equal(f64(got), f64(wanted))
    np.testing.assert_array_equal(np.signbit(f64(got)), np.signbit(f64(wanted)))
