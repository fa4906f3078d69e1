"""Windows: the grammar, each method against numpy, and statistics over time."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from midtread.numerics.calibration import (
    Average,
    largest,
    parse,
    statistic,
    statistic_of,
)
from midtread.numerics.qarray import calibrate, dequantize
from midtread.numerics.spec import Spec
from tests.support import f64, quantize_in_jit, squared_error

# --- grammar ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text, method, args",
    [
        ("absmax", "absmax", ()),
        ("AbsMax, 0.8", "absmax", (0.8,)),
        ("minmax", "minmax", ()),
        ("minmax,1.5", "minmax", (1.5,)),
        ("rms,7", "rms", (7.0,)),
        ("percentile, 99.9", "percentile", (99.9,)),
        ("mse", "mse", ()),
        ("mse,64", "mse", (64.0,)),
        ("fixed,3", "fixed", (3.0,)),
        ("fixed,-3,3", "fixed", (3.0,)),
        ("fixed,-1,3", "fixed", (-1.0, 3.0)),
        ("fixed,0,6", "fixed", (0.0, 6.0)),
        ("delayed", "delayed", ()),
    ],
)
def test_reads(text, method, args):
    parsed = parse(text)
    assert (parsed.method, parsed.args) == (method, args)
    assert parse(str(parsed)) == parsed


@pytest.mark.parametrize(
    "text, advice",
    [
        ("absmin", "unknown calibration 'absmin'.*absmax,<factor>.*rms,<factor>"),
        ("", "unknown calibration ''"),
        ("rms", "a factor is required"),
        ("absmax,1,2", "absmax or absmax,<factor>"),
        ("absmax,x", "bad number: absmax or absmax,<factor>"),
        ("absmax,nan", "absmax or absmax,<factor>"),
        ("absmax,0", "factor must be above 0"),
        ("rms,-1", "factor must be above 0"),
        ("percentile,0", r"lies in \(0, 100\]"),
        ("percentile,101", r"lies in \(0, 100\]"),
        ("mse,1", "at least 2 windows"),
        ("mse,2.5", "a whole number"),
        ("fixed", "fixed,<bound> or fixed,<low>,<high>"),
        ("fixed,1,2", "must contain 0"),
        ("fixed,2,-2", "must contain 0"),
        ("fixed,0", "non-empty"),
    ],
)
def test_refuses_and_says_what_to_write(text, advice):
    with pytest.raises(ValueError, match=advice):
        parse(text)


def test_bad_method_is_refused_when_the_spec_is_built():
    with pytest.raises(ValueError, match="unknown calibration"):
        Spec("int8", calibration="maxabs")


@pytest.mark.parametrize(
    "text, asymmetric, clips",
    [
        ("absmax", False, False),
        ("absmax,1", False, False),
        ("absmax,0.9", False, True),
        ("minmax", True, False),
        ("minmax,0.9", True, True),
        ("rms,3", False, True),
        ("fixed,3", False, True),
        ("fixed,-1,3", True, True),
        ("delayed", False, False),
    ],
)
def test_what_a_window_implies(text, asymmetric, clips):
    parsed = parse(text)
    assert (parsed.is_asymmetric, parsed.clips) == (asymmetric, clips)


# --- methods ----------------------------------------------------------------------------------

METHODS = {
    "absmax": lambda x: {"absmax": np.abs(x).max()},
    "absmax,0.8": lambda x: {"absmax": np.abs(x).max() * 0.8},
    "minmax": lambda x: {"min": min(x.min(), 0), "max": max(x.max(), 0)},
    "minmax,0.5": lambda x: {"min": min(x.min(), 0) * 0.5, "max": max(x.max(), 0) * 0.5},
    "rms,3": lambda x: {"absmax": np.sqrt(np.mean(x**2)) * 3},
    "percentile,75": lambda x: {"absmax": np.percentile(np.abs(x), 75)},
    "percentile,100": lambda x: {"absmax": np.abs(x).max()},
}  # fmt: skip


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("width", [32, 24], ids=["whole", "ragged"])
def test_matches_numpy_per_tile(method, width, key):
    """24 leaves a last tile of 8: the zeros it is padded with must not count."""
    x = jax.random.normal(key, (3, width)) + 0.5
    spec = Spec("int8", (0,), {1: 16}, calibration=method)
    got = jax.jit(lambda x: calibrate(x, spec))(x)
    for row in range(3):
        for tile in range(2):
            want = METHODS[method](f64(x)[row, 16 * tile : 16 * (tile + 1)])
            assert {k: float(v[row, tile]) for k, v in got.items()} == pytest.approx(
                want, rel=1e-5
            )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("axes", [None, (0,), (1,)])
def test_looking_for_nan_changes_no_maximum(dtype, axes, key):
    """Without a NaN it is the plain maximum, bit for bit, at sizes where XLA drops NaNs."""
    x = jax.random.normal(key, (128, 128), dtype).at[5].set(-jnp.inf)
    got = jax.jit(lambda x: largest(x, axes))(x)
    want = np.asarray(x).max(axis=axes, keepdims=True)
    np.testing.assert_array_equal(np.asarray(got), want, strict=True)


def test_minmax_always_holds_zero():
    got = calibrate(jnp.array([2.0, 3.0]), Spec("int8", calibration="minmax"))
    assert (got["min"].item(), got["max"].item()) == (0, 3)


def test_one_bit_measures_the_mean_magnitude(key):
    x = jax.random.normal(key, (4, 20))
    got = calibrate(x, Spec("int1", (0,), {1: 16}))["absmax"]
    parts = np.split(np.abs(f64(x)), [16], axis=1)
    want = np.concatenate([p.mean(1, keepdims=True) for p in parts], 1)
    np.testing.assert_allclose(f64(got), want, rtol=1e-6)


@pytest.mark.parametrize("qtype", ["int4", "int8", "float4_e2m1fn", "mxfp4", "nf4"])
@pytest.mark.parametrize("heavy", [False, True])
def test_mse_is_never_worse_than_absmax(qtype, heavy, key):
    x = jax.random.normal(key, (8, 96))
    x = x**3 if heavy else x
    errors = {
        method: squared_error(
            x,
            dequantize(
                quantize_in_jit(
                    x,
                    qtype,
                    channelwise_axes=[0],
                    tiled_axes={1: 32},
                    calibration_method=method,
                )
            ),
        )
        for method in ("absmax", "mse")
    }
    assert errors["mse"] <= errors["absmax"]
    if heavy and qtype == "int4":
        assert errors["mse"] < 0.9 * errors["absmax"]  # and here it clearly pays


def test_mse_searches_with_nearest_and_rounds_as_asked(key):
    x = jax.random.normal(key, (64,))
    how = {"calibration_method": "mse,8"}
    plain = quantize_in_jit(x, "int4", **how)
    noisy = quantize_in_jit(x, "int4", rounding="stochastic", key=key, **how)
    assert plain.scale == noisy.scale
    assert (f64(plain.qvalue) != f64(noisy.qvalue)).any()


@pytest.mark.parametrize("method", ["fixed,3", "fixed,-3,3", "fixed,-1,3"])
def test_fixed_is_per_tensor_whatever_the_axes(method, key):
    x = jax.random.normal(key, (4, 32))
    q = quantize_in_jit(
        x,
        "int8",
        channelwise_axes=[0],
        tiled_axes={1: 16},
        calibration_method=method,
    )
    span, codes = (6, 255.0) if method != "fixed,-1,3" else (4, 255)
    assert q.scale.shape == (1, 1)
    assert q.scale.item() == pytest.approx(span / codes)
    assert (q.zero_point is None) == (codes == 255.0 and span == 6)


def test_delayed_needs_its_history():
    with pytest.raises(ValueError, match="none was given.*ranges="):
        calibrate(jnp.ones(4), Spec("float8_e4m3fn", calibration="delayed"))


# --- statistics over time ---------------------------------------------------------------------


@pytest.mark.parametrize("names", [("absmax",), ("min", "max")])
def test_average_is_the_mean_of_what_was_seen(names, key):
    seen = jax.random.normal(key, (5, 1, 8))
    average = Average()
    state = average.init({k: seen[0] for k in names})
    assert state.keys() == {"count", *(f"sum_of_{k}" for k in names)}
    for step in seen:
        state = average.update(state, {k: step.astype(jnp.bfloat16) for k in names})
    assert state["count"] == 5 and state["count"].dtype == jnp.int32
    want = f64(seen.astype(jnp.bfloat16)).mean(0)
    for value in average.range(state).values():
        assert value.dtype == jnp.float32
        np.testing.assert_allclose(f64(value), want, rtol=1e-5, atol=1e-6)


def test_average_uses_the_live_range_until_it_has_seen_enough():
    average = Average(bootstrap_steps=2)
    live = {"absmax": jnp.full((1,), 7, jnp.bfloat16)}
    state = average.init(live)
    got = []
    for _ in range(4):
        got.append(average.range(state, live)["absmax"])
        state = average.update(state, {"absmax": jnp.ones(1)})
    assert [g.item() for g in got] == [7, 7, 7, 1]
    assert {g.dtype for g in got} == {np.dtype(jnp.bfloat16)}


def test_average_refuses_a_range_of_another_shape():
    average = Average()
    state = average.init({"absmax": jnp.ones((1, 8))})
    with pytest.raises(ValueError, match=r"\(1, 4\).*\(1, 8\).*act_batch_axes"):
        average.update(state, {"absmax": jnp.ones((1, 4))})


def test_statistics_of_another_calibration_are_refused():
    one, two = {"absmax": jnp.ones(1)}, {"min": -jnp.ones(1), "max": jnp.ones(1)}
    more = {**one, "max": jnp.ones(1)}
    for first, other in [(one, two), (two, one), (one, more), (more, one)]:
        state = Average().update(Average().init(first), first)
        with pytest.raises(ValueError, match="gathered with another calibration"):
            Average().update(state, other)
        with pytest.raises(ValueError, match="gathered with another calibration"):
            Average().range(state, other)


SEEN = np.array([3.0, 1.0, 2.0, 9.0, 4.0], np.float32)
OVER_BATCHES = {
    "mean": SEEN.mean(),
    "max": 9.0,
    "ema,0.5": (SEEN * 0.5 ** np.arange(5)[::-1]).sum() / (0.5 ** np.arange(5)).sum(),
    "percentile,75": np.percentile(SEEN, 75),
}


@pytest.mark.parametrize("text", OVER_BATCHES)
def test_ranges_over_batches(text):
    """Of a low end the mirror image; state says how it was gathered."""
    how, wanted = statistic(text), OVER_BATCHES[text]
    pair = lambda v: {"min": jnp.full((1, 2), -v), "max": jnp.full((1, 2), v)}
    state = how.init(pair(0.0))
    for v in SEEN:
        state = how.update(state, pair(v))
    assert statistic_of(state) == how
    for default in (None, pair(7.0)):
        found = how.range(state, default)
        np.testing.assert_allclose(found["max"], np.full((1, 2), wanted), rtol=1e-6)
        np.testing.assert_allclose(found["min"], -found["max"], rtol=1e-6)
    fresh = how.range(how.init(pair(0.0)), pair(7.0))
    np.testing.assert_array_equal(fresh["max"], pair(7.0)["max"])


@pytest.mark.parametrize("text", ["max", "ema,0.5", "percentile,75"])
def test_a_batch_counts_by_its_widest_range(text):
    seen = {"min": jnp.array([[-1.0], [-3.0]]), "max": jnp.array([[2.0], [1.0]])}
    found = statistic(text).within(seen, (0,))
    assert (found["min"].item(), found["max"].item()) == (-3.0, 2.0)
    assert statistic(True).within(seen, (0,))["max"].item() == 1.5


@pytest.mark.parametrize(
    "text", ["widest", "max,2", "ema", "ema,1", "percentile,x", "percentile,0"]
)
def test_bad_statistics_are_refused(text):
    with pytest.raises(ValueError, match="act_static_scale="):
        statistic(text)


def test_a_percentile_forgets_and_keeps_nan():
    how = statistic("percentile,50")
    state = how.init({"absmax": jnp.zeros(())})
    step = jax.jit(how.update)
    for v in [100.0] * 3 + [1.0] * how.LENGTH:
        state = step(state, {"absmax": jnp.asarray(v)})
    assert how.range(state)["absmax"].item() == 1.0
    state = step(state, {"absmax": jnp.asarray(jnp.nan)})
    assert jnp.isnan(how.range(state)["absmax"])
