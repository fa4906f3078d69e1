"""Every code of every format, against exact rationals."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from midtread.numerics.formats import (
    ALIASES,
    FORMATS,
    as_format,
    dtype_bits,
    stored_bits,
)
from midtread.numerics.rounding import decode, encode
from tests.support import (
    ELEMENT,
    FLOATS,
    code_values,
    every_format,
    f64,
    levels,
    nearest,
    quantize_in_jit,
)

TINY = np.finfo(np.float32).tiny  # XLA on a CPU takes anything smaller for 0


def codes_of(fmt, codes):
    """Codes as the format's container: floats by their bits, the others by value."""
    if jnp.issubdtype(fmt.dtype, jnp.floating):
        return jnp.asarray(np.asarray(list(codes), np.uint8).view(fmt.dtype))
    return jnp.asarray(list(codes), jnp.int32).astype(fmt.dtype)


def bits_of(codes):
    """The reverse."""
    codes = np.asarray(codes)
    is_float = jnp.issubdtype(codes.dtype, jnp.floating)
    return codes.view(np.uint8) if is_float else codes.astype(np.int32)


def run(x, fmt, encode=encode):
    return f64(decode(encode(jnp.asarray(x), fmt), fmt))


jitted = jax.jit(encode, static_argnums=1)
every_element = pytest.mark.parametrize(
    "fmt", [f for f in FORMATS.values() if f.name not in ELEMENT], ids=repr
)


@pytest.mark.parametrize("name", ELEMENT)
def test_formats_with_shared_elements(name):
    fmt, element = FORMATS[name], FORMATS[ELEMENT[name]]
    for column in ("dtype", "bits", "bound", "grid", "codes", "table"):
        assert getattr(fmt, column) == getattr(element, column)


@every_element
def test_decodes_every_code(fmt):
    want = code_values(fmt)
    np.testing.assert_array_equal(
        f64(decode(codes_of(fmt, want), fmt)), [float(v) for v in want.values()]
    )


@every_element
def test_encodes_every_value_to_its_code(fmt):
    finite = {c: float(v) for c, v in code_values(fmt).items() if np.isfinite(float(v))}
    x = np.array(list(finite.values()), np.float32)
    if fmt.grid and 1 << (fmt.bits - 1) in finite:  # there is a code for -0
        x[list(finite).index(1 << (fmt.bits - 1))] = -0.0
    codes = bits_of(jitted(jnp.asarray(x), fmt))
    np.testing.assert_array_equal(codes, list(finite))


def hard_numbers(fmt):
    """The float32 at, just below and just above each midpoint, and all that saturates."""
    middle = levels(fmt).middles.astype(np.float32)
    beside = [np.nextafter(middle, -np.inf), middle, np.nextafter(middle, np.inf)]
    largest = np.float32(fmt.bound)
    beyond = [np.nextafter(largest, np.inf), largest * 2, np.finfo(np.float32).max]
    x = np.concatenate([*beside, beyond, np.negative(beyond), [np.inf, -np.inf]])
    return np.where(np.abs(x) < TINY, np.sign(x) * TINY, x).astype(np.float32)


@every_element
@pytest.mark.parametrize("encode", [encode, jitted], ids=["eager", "jit"])
def test_rounds_to_nearest_and_saturates(fmt, encode):
    x = hard_numbers(fmt)
    np.testing.assert_array_equal(run(x, fmt, encode), nearest(x, fmt))


@every_element
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_rounds_every_16_bit_number(fmt, dtype):
    bits = np.arange(2**16, dtype=np.uint16)
    exponent = 0x7F80 if dtype == jnp.bfloat16 else 0x7C00
    finite = (bits & exponent != exponent) & (bits & exponent != 0)  # and not subnormal
    x = bits[finite].view(dtype)
    np.testing.assert_array_equal(run(x, fmt, jitted), nearest(x, fmt))


@every_element
def test_nan_is_nan_or_else_code_zero(fmt):
    code = jitted(jnp.array([np.nan, -np.nan], jnp.float32), fmt)
    if any(np.isnan(float(v)) for v in code_values(fmt).values()):
        assert np.isnan(f64(code)).all()
    else:
        assert bits_of(code).tolist() == [0, 0]


@every_element
def test_zero_and_subnormals_round_like_zero(fmt):
    x = np.array([0.0, -0.0, 1e-45, -1e-45, 1e-39, -1e-39], np.float32)
    np.testing.assert_array_equal(run(x, fmt, jitted), nearest(np.zeros(6), fmt))


@pytest.mark.parametrize("name", FLOATS)
def test_the_oracle_agrees_with_ml_dtypes(name):
    """Two definitions of the same number system, neither of them ours."""
    values = list(code_values(FORMATS[name]).values())
    codes = np.arange(len(values), dtype=np.uint8).view(getattr(ml_dtypes, name))
    np.testing.assert_array_equal(codes.astype(np.float64), np.array(values, float))


# --- the table itself -------------------------------------------------------------------------


@every_format
def test_row_agrees_with_its_values(fmt):
    values = levels(fmt).values
    half_a_bucket = 0.5 if fmt.is_integer and fmt.name != "int16" else 0
    assert fmt.bound == values[-1] + half_a_bucket + (fmt.name == "int16")
    assert len(code_values(fmt)) == 2**fmt.bits
    assert fmt.is_emulated == (dtype_bits(fmt.dtype) != fmt.bits)


@pytest.mark.parametrize("name", FORMATS)
def test_as_format_takes_what_qtype_gives(name):
    fmt = FORMATS[name]
    assert as_format(name) is as_format(name.upper()) is as_format(fmt) is fmt
    assert as_format(fmt.qtype) is fmt


@pytest.mark.parametrize(
    "scalar", [jnp.int8, jnp.int4, jnp.uint4, jnp.float8_e4m3fn, jnp.float4_e2m1fn]
)
def test_as_format_takes_dtypes(scalar):
    dtype = np.dtype(scalar)
    assert as_format(scalar) is as_format(dtype) is FORMATS[dtype.name]
    assert as_format(scalar).qtype == scalar
    assert as_format(scalar).qtype == dtype.name


@pytest.mark.parametrize("alias", ALIASES)
def test_aliases_name_rows_and_hide_none(alias):
    assert as_format(alias) is FORMATS[ALIASES[alias]]
    assert alias not in FORMATS


@pytest.mark.parametrize(
    "qtype",
    [jnp.bfloat16, "bfloat16", jnp.int32, bool, "int9", "", None, 8]
    + [jnp.float8_e8m0fnu, "float8_e8m0fnu", ()],
    ids=str,
)
def test_as_format_refuses_the_rest_and_names_what_exists(qtype):
    with pytest.raises(ValueError, match="not a format.*int8.*nvfp4.*nf4.*e4m3fn"):
        as_format(qtype)


@every_format
def test_stored_bits_are_the_devices(fmt):
    held = jnp.zeros(4096, fmt.dtype).on_device_size_in_bytes()
    assert stored_bits(fmt.dtype) == held * 8 // 4096 >= fmt.bits


@pytest.mark.parametrize("qtype", ["int8", "int4", "uint2", "int16", "nf4", "nvfp4"])
def test_nbytes_are_the_devices(qtype, key):
    tiles = {0: FORMATS[qtype].tile or 32}
    q = quantize_in_jit(jax.random.normal(key, (64, 64)), qtype, tiled_axes=tiles)
    held = [part.on_device_size_in_bytes() for part in jax.tree.leaves(q)]
    assert q.nbytes == sum(held)
