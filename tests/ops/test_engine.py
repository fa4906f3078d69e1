"""`contract` computes what dequantizing both operands and multiplying in float64 would."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import midtread as mt
from midtread.numerics import hadamard
from midtread.numerics.formats import FORMATS

NUMBERS = (((1,), (0,)), ((), ()))


def exact(x):
    return np.asarray(mt.dequantize(x) if isinstance(x, mt.QArray) else x, np.float64)


def assert_contracts(out, *operands, equation="mk,kn->mn", tolerance=3e-6):
    expected = np.einsum(equation, *map(exact, operands))
    assert out.shape == expected.shape
    error = np.abs(np.asarray(out, np.float64) - expected).max()
    assert error <= tolerance * np.abs(expected).max(), error


@pytest.fixture
def operands(key):
    return jax.random.normal(key, (6, 256)), jax.random.normal(key, (256, 10))


def _spec(name, tile, axis, **fields):
    tile = FORMATS[name].tile or tile
    tiles = {axis: tile} if tile else {}
    return dict(channelwise_axes=(1 - axis,), tiled_axes=tiles, **fields)


@pytest.mark.parametrize("tile", [None, 32, 128, 100])
@pytest.mark.parametrize("name", FORMATS)
def test_every_format_against_every_partner(name, tile, operands):
    lhs, rhs = operands
    ql = mt.quantize(lhs, name, **_spec(name, tile, 1))
    qr = mt.quantize(rhs, name, **_spec(name, tile, 0))
    for pair in ((ql, qr), (lhs, qr), (ql, rhs)):
        assert_contracts(mt.dot_general(*pair, NUMBERS), *pair)


MIXED = ["int8", "int4", "uint8", "int16", "e4m3", "e5m2", "fp4", "nf4"]


@pytest.mark.parametrize("pair", list(itertools.permutations(MIXED, 2)), ids="-".join)
def test_mixed_formats(pair, operands):
    ql = mt.quantize(operands[0], pair[0], channelwise_axes=[0])
    qr = mt.quantize(operands[1], pair[1], channelwise_axes=[1])
    assert_contracts(mt.dot(ql, qr), ql, qr)


@pytest.mark.parametrize("tile", [None, 128])
@pytest.mark.parametrize(
    "methods", list(itertools.product(["absmax", "minmax"], repeat=2)), ids="-".join
)
def test_zero_points_on_either_side(methods, tile, operands):
    lhs, rhs = operands[0] + 1, operands[1] - 0.5
    ql = mt.quantize(
        lhs, "int8", **_spec("int8", tile, 1, calibration_method=methods[0])
    )
    qr = mt.quantize(
        rhs, "int4", **_spec("int4", tile, 0, calibration_method=methods[1])
    )
    assert_contracts(mt.dot(ql, qr), ql, qr)


def test_blocks_and_broadcast_tiles(operands):
    lhs, rhs = operands
    rhs = jnp.tile(rhs, (1, 13))[:, :128]
    ql = mt.quantize(lhs, "e4m3", channelwise_axes=[0], tiled_axes={1: 128})
    qr = mt.quantize(rhs, "e4m3", tiled_axes={0: 128, 1: 64})
    assert_contracts(mt.dot(ql, qr), ql, qr)
    per_tensor = mt.quantize(lhs, "int8")
    tiled = mt.quantize(
        rhs, "int8", tiled_axes={0: 128, 1: 100}
    )  # pads a kept axis too
    assert_contracts(mt.dot(per_tensor, tiled), per_tensor, tiled)


def test_two_tile_sizes_cannot_meet(operands):
    ql = mt.quantize(operands[0], "int8", tiled_axes={1: 128})
    qr = mt.quantize(operands[1], "int8", tiled_axes={0: 64})
    with pytest.raises(
        ValueError, match="tiled with the same tile size.*128 and of 64|64 and of 128"
    ):
        mt.dot(ql, qr)


def test_int16_does_not_overflow():
    big = mt.quantize(
        jnp.full((1, 4096), 32000.0), "int16", calibration_method="fixed,32768"
    )
    ones = mt.quantize(jnp.ones((4096, 2)), "int16")
    # float32 sums of 4096 equal terms: int32 would wrap after two of them
    assert_contracts(mt.dot(big, ones), big, ones, tolerance=1e-4)


def test_long_sums_of_int8_do_not_overflow():
    long = mt.quantize(jnp.ones((1, 2**18)), "int8")
    np.testing.assert_allclose(mt.dot(long, long.T), 2.0**18, rtol=0.01)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_epilogue_is_float32(dtype, key):
    """One rounding at the end: the error is that of the result's dtype."""
    lhs, rhs = (jax.random.normal(key, (64, 64), dtype) for _ in range(2))
    ql = mt.quantize(lhs, "int8", channelwise_axes=[0])
    qr = mt.quantize(rhs, "int8", channelwise_axes=[1])
    out = mt.dot(ql, qr)
    assert out.dtype == dtype
    expected = exact(ql.astype(jnp.float32)) @ exact(qr.astype(jnp.float32))
    np.testing.assert_array_equal(out, jnp.asarray(expected, jnp.float32).astype(dtype))
    assert mt.dot(ql, qr, preferred_element_type=jnp.float32).dtype == jnp.float32


def test_result_dtype_and_small_scales(key):
    x = jax.random.normal(key, (4, 64), jnp.bfloat16)
    w = jax.random.normal(key, (64, 8))
    small = mt.quantize(
        w, "mxfp8", tiled_axes={0: 32}, channelwise_axes=[1], scale_dtype="e8m0"
    )
    assert mt.dot(x, small).dtype == jnp.bfloat16  # an 8-bit scale has no say
    two_level = mt.quantize(
        w, "nvfp4", tiled_axes={0: 16}, channelwise_axes=[1], scale_dtype="e4m3"
    )
    assert two_level.scale.dtype == jnp.float8_e4m3fn
    assert_contracts(mt.dot(x.astype(jnp.float32), two_level), x, two_level)


def test_raw_codes_count_as_values():
    codes = jnp.array([[1, -2, 3]], jnp.int8)
    out = mt.dot(codes, codes.T)
    assert out.dtype == jnp.int32 and out.tolist() == [[14]]
    w = mt.quantize(jnp.ones((3, 2)), "int8")
    np.testing.assert_allclose(mt.dot(codes, w), [[2.0, 2.0]], rtol=0.01)


def test_pre_scale_reaches_the_other_operand(key):
    x, w = jax.random.normal(key, (4, 16)), jax.random.normal(key, (16, 8))
    factor = jnp.exp2(jnp.arange(16) % 3).astype(jnp.float32)[:, None]
    plain = mt.quantize(w / factor, "int8", channelwise_axes=[1])
    smooth = plain.replace(pre_scale=factor)
    assert_contracts(mt.dot(x, smooth), x, smooth)
    xq = mt.quantize(x, "int8", channelwise_axes=[0])
    assert_contracts(mt.dot(xq, smooth), xq, smooth)
    with pytest.raises(ValueError, match="varies along an axis that dot_general keeps"):
        mt.dot(x, plain.replace(pre_scale=jnp.ones((1, 8))))


def test_inputs_are_rotated_before_anything_else(key):
    x, w = jax.random.normal(key, (4, 24)), jax.random.normal(key, (24, 8))
    signs = jnp.where(jnp.arange(8) % 3 == 0, -1.0, 1.0)[:, None]
    R = np.kron(np.eye(3), np.asarray(signs) * hadamard.matrix(8) / np.sqrt(8))
    factor = jnp.linspace(0.5, 2, 24)[:, None]
    codes = mt.quantize(R.T @ w / factor, "int8", channelwise_axes=[1])
    rotated = codes.replace(pre_scale=factor, pre_rotation=signs)
    plain = np.asarray(mt.dequantize(codes))
    np.testing.assert_allclose(
        mt.dequantize(rotated), R @ (factor * plain), rtol=1e-5, atol=1e-6
    )
    np.testing.assert_allclose(
        mt.dequantize(rotated.T), (R @ (factor * plain)).T, rtol=1e-5, atol=1e-6
    )
    assert_contracts(mt.dot(x, rotated), x, rotated)
    xq = mt.quantize(x, "int8", channelwise_axes=[0])
    assert_contracts(mt.dot(xq, rotated), xq, rotated)
    # A provider quantizes inputs after both, where their outliers are gone.
    rule = mt.QuantizationRule(weight_qtype="int8", act_qtype="int8")
    run = mt.quantize_function(lambda q, x: x @ q, mt.PtqProvider([rule]))
    inputs = mt.quantize((x @ R) * factor.T, "int8", channelwise_axes=[0])
    got, wanted = run(rotated, x), mt.dot(inputs, codes)
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="inputs are rotated along"):
        rotated.reshape(3, 8, 8)
    with pytest.raises(ValueError, match="inputs are rotated along it"):
        rotated[:8]
    with pytest.raises(ValueError, match="as many as a power of two"):
        mt.dequantize(codes.replace(pre_rotation=jnp.ones((12, 1))))


def test_layers_of_a_stack_are_rotated_each_by_its_own(key):
    w = jax.random.normal(key, (8, 8, 4))
    codes = mt.quantize(w, "int8", channelwise_axes=[0, 2])
    signs = jax.random.rademacher(key, (8, 8, 1), jnp.float32)
    stack = codes.replace(pre_rotation=signs)
    layers = [codes[i].replace(pre_rotation=signs[i]) for i in range(8)]
    each = jnp.stack([mt.dequantize(layer) for layer in layers])
    np.testing.assert_array_equal(mt.dequantize(stack), each)
    np.testing.assert_array_equal(mt.dequantize(stack[3]), each[3])
    turned = mt.dequantize(stack.swapaxes(1, 2))
    np.testing.assert_array_equal(turned, each.swapaxes(1, 2))
    for wrong in (
        lambda: stack.T,
        lambda: stack[:, :4],
        lambda: stack.transpose(1, 0, 2),
    ):
        with pytest.raises(ValueError, match="inputs are rotated"):
            wrong()
    with pytest.raises(ValueError, match="behind those of a stack"):
        mt.dequantize(codes.replace(pre_rotation=signs[:4]))


def test_tiles_are_not_all_held_at_once():
    """[tiles, M, N] would be 192 MiB here (seen in Qwix 0.1.8); untiled takes 12 to 32."""

    def temp(tile):
        def f(x, w):
            ql = mt.quantize(x, "int8", channelwise_axes=[0], tiled_axes={1: tile})
            qr = mt.quantize(w, "int8", channelwise_axes=[1], tiled_axes={0: tile})
            return mt.dot(ql, qr)

        shapes = ((1024, 4096), (4096, 1024))
        arrays = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in shapes]
        return jax.jit(f).lower(*arrays).compile().memory_analysis().temp_size_in_bytes

    assert temp(128) <= 1.5 * temp(4096)
