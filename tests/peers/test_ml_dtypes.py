"""ml_dtypes: every float format casts as its numpy dtype does, specials included."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import midtread as mt
from midtread.numerics.rounding import decode, encode

FLOATS = [row for row in mt.FORMATS.values() if row.grid is not None]


def peer_dtype(fmt):
    """The ml_dtypes type with this grid; float6 and mx rows hold codes of one."""
    widths = {"float6_e2m3fn": "float6_e2m3fn", "mxfp6": "float6_e2m3fn"}
    widths |= {"float6_e3m2fn": "float6_e3m2fn", "mxfp6_e3m2": "float6_e3m2fn"}
    return getattr(ml_dtypes, widths.get(fmt.name, fmt.dtype.name))


def numbers(fmt) -> np.ndarray:
    """Random magnitudes over the whole range and beyond, every value, every tie."""
    rng = np.random.default_rng(0)
    low, high = np.log2(fmt.bound) - 40, np.log2(fmt.bound) + 4
    spread = 2.0 ** rng.uniform(low, high, 20_000) * rng.choice([-1, 1], 20_000)
    uniform = rng.uniform(-fmt.bound, fmt.bound, 20_000)
    codes = np.arange(2**fmt.bits, dtype=np.uint8).view(peer_dtype(fmt))
    values = np.sort(codes.astype(np.float64))
    values = values[np.isfinite(values)]
    ties = (values[1:] + values[:-1]) / 2
    edges = np.concatenate([values, ties, np.nextafter(ties, 1e9), [0.0, -0.0]])
    return np.concatenate([spread, uniform, edges]).astype(np.float32)


@pytest.mark.parametrize("fmt", FLOATS, ids=str)
def test_cast(fmt):
    """Saturating: ml_dtypes overflows to inf or nan, so it gets the clipped numbers."""
    x = numbers(fmt)
    clipped = np.clip(x, -fmt.bound, fmt.bound)
    theirs = clipped.astype(peer_dtype(fmt)).astype(np.float32)
    ours = decode(encode(jnp.asarray(x), fmt), fmt).astype(jnp.float32)
    np.testing.assert_array_equal(np.asarray(ours), theirs)


@pytest.mark.parametrize("fmt", FLOATS, ids=str)
def test_specials(fmt):
    """Infinities saturate; nan stays nan where the format has one."""
    ours = decode(encode(jnp.array([np.inf, -np.inf, np.nan]), fmt), fmt)
    ours = np.asarray(ours, np.float32)
    assert ours[0] == fmt.bound and ours[1] == -fmt.bound
    has_nan = fmt.bits == 8
    assert np.isnan(ours[2]) if has_nan else np.isfinite(ours[2])


@pytest.mark.parametrize("fmt", FLOATS, ids=str)
def test_every_code_decodes(fmt):
    """Code for code, the value is ml_dtypes'."""
    dtype = peer_dtype(fmt)
    bits = np.arange(2**fmt.bits, dtype=np.uint8)
    theirs = bits.view(dtype).astype(np.float32)
    codes = jnp.asarray(bits) if not fmt.is_linear else jnp.asarray(bits.view(dtype))
    ours = np.asarray(decode(codes, fmt).astype(jnp.float32))
    np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("fmt", FLOATS, ids=str)
def test_bound_is_the_largest(fmt):
    assert float(ml_dtypes.finfo(peer_dtype(fmt)).max) == fmt.bound


@pytest.mark.parametrize("name", ["int2", "int4", "uint2", "uint4"])
def test_small_integers(name):
    """Integers round half to even and saturate; ml_dtypes wraps, so numpy clips for it."""
    fmt = mt.as_format(name)
    x = np.random.default_rng(1).uniform(-20, 20, 10_000).astype(np.float32)
    x = np.concatenate([x, np.arange(-20, 20, 0.5, np.float32), [np.inf, -np.inf]])
    theirs = np.clip(np.round(x), *fmt.codes).astype(getattr(ml_dtypes, name))
    ours = encode(jnp.asarray(x), fmt)
    np.testing.assert_array_equal(np.asarray(ours).astype(int), theirs.astype(int))
