"""QArrays through pallas_call: values in interpret mode, lowering for TPU and GPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import triton as plgpu

import midtread as mt
import midtread.pallas as mtp
from midtread.kernels import block_specs

MATMUL = (((1,), (0,)), ((), ()))
ROWS = jax.ShapeDtypeStruct((256, 256), jnp.float32)


def quantized(seed, how, shape=(256, 256), **fields):
    x = jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)
    return mt.quantize(x, "int8", tiled_axes=how, **fields)


def dequantize(q, block=(128, 128), **options):
    def kernel(q, out):
        out[...] = mtp.dequantize(q[...])

    spec = pl.BlockSpec(block, lambda i, j: (i, j))
    grid = tuple(n // b for n, b in zip(q.shape, block))
    shape = jax.ShapeDtypeStruct(q.shape, jnp.float32)
    call = mtp.pallas_call(
        kernel, shape, grid=grid, in_specs=[spec], out_specs=spec, **options
    )
    return call(q)


@pytest.mark.parametrize("how", [{}, {0: 1}, {0: 32, 1: 64}], ids=str)  # fmt: skip
def test_blocks_of_the_scale_follow_those_of_the_values(how):
    q = quantized(0, how)
    np.testing.assert_array_equal(dequantize(q, interpret=True), mt.dequantize(q))


def test_zero_points_come_along():
    q = quantized(1, {1: 128}, calibration_method="minmax")
    np.testing.assert_array_equal(dequantize(q, interpret=True), mt.dequantize(q))


def test_prefetched_scalars_and_plain_arguments():
    def kernel(start, q, x, out):
        out[...] = mtp.dequantize(q[...]) + x[...] + start[0]

    spec = pl.BlockSpec((128, 256), lambda i, start: (i, 0))
    grid = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=1, grid=(2,), in_specs=[spec, spec], out_specs=spec
    )
    q, x = quantized(2, {1: 128}), jnp.ones((256, 256))
    call = mtp.pallas_call(kernel, ROWS, grid_spec=grid, interpret=True)
    out = call(jnp.array([3.0]), q, x)
    np.testing.assert_allclose(out, mt.dequantize(q) + 4, rtol=1e-5, atol=1e-6)


def matmul(x, w, block=128, **options):
    def kernel(x, w, out):
        out[...] = mtp.dot_general(x[...], w[...], MATMUL)

    specs = [
        pl.BlockSpec((block, x.shape[1]), lambda i, j: (i, 0)),
        pl.BlockSpec((w.shape[0], block), lambda i, j: (0, j)),
    ]
    out = pl.BlockSpec((block, block), lambda i, j: (i, j))
    shape = jax.ShapeDtypeStruct((x.shape[0], w.shape[1]), jnp.float32)
    grid = (x.shape[0] // block, w.shape[1] // block)
    call = mtp.pallas_call(
        kernel, shape, grid=grid, in_specs=specs, out_specs=out, **options
    )
    return call(x, w)


@pytest.mark.parametrize("tile", [None, 128])
def test_matmuls_in_a_kernel(tile):
    tiles = {} if tile is None else {"x": {1: tile}, "w": {0: tile}}
    x = quantized(3, tiles.get("x"), channelwise_axes=[0])
    w = quantized(4, tiles.get("w"), channelwise_axes=[1])
    expected = mt.dot_general(x, w, MATMUL)
    np.testing.assert_allclose(
        matmul(x, w, interpret=True), expected, rtol=2e-5, atol=2e-5
    )
    for ours in (
        mtp.dot(x, w),
        mtp.einsum("ab,bc->ac", x, w),
        mtp.dot(mt.dequantize(x), w),
    ):
        np.testing.assert_allclose(ours, expected, rtol=2e-5, atol=2e-5)


def lowered(platform, fn, *args):
    import re

    text = jax.jit(fn).trace(*args).lower(lowering_platforms=(platform,)).as_text()
    return re.findall(r"custom_call @?\"?([\w$.]+)", text)


def test_lowers_for_tpu():
    """Scales of one column, [256, 1], do not fit Mosaic's blocks as they are."""
    x = quantized(3, None, channelwise_axes=[0])
    w = quantized(4, None, channelwise_axes=[1])
    assert "tpu_custom_call" in lowered("tpu", matmul, x, w)
    params = {"compiler_params": pltpu.CompilerParams()}
    assert "tpu_custom_call" in lowered(
        "tpu", functools.partial(dequantize, **params), x
    )


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend")  # jax 0.12
def test_lowers_for_gpu():
    x = quantized(3, None, (64, 64), channelwise_axes=[0])
    w = quantized(4, None, (64, 64), channelwise_axes=[1])
    params = {"compiler_params": plgpu.CompilerParams(num_warps=4, num_stages=1)}
    device = jax.sharding.AbstractDevice(
        device_kind="NVIDIA H100", num_cores=132, platform="gpu"
    )
    mesh = jax.sharding.AbstractMesh(
        (1,), ("x",), (jax.sharding.AxisType.Explicit,), abstract_device=device
    )
    with jax.sharding.use_abstract_mesh(mesh):
        calls = lowered("cuda", functools.partial(matmul, block=32, **params), x, w)
    assert calls and all("triton" in c for c in calls)


@pytest.mark.parametrize(
    ("shape", "block", "fitted"),
    [
        ((4, 4, 128), (None, 4, 128), (None, 4, 128)),
        ((4, 128, 16), (None, 128, 8), (None, 8, 128)),
        ((256, 1), (128, 1), (1, 128)),
        ((32, 32), (8, 8), (1, 1, 1, 64)),
    ],
)
def test_blocks_that_a_tpu_can_load(shape, block, fitted):
    spec, array, restore = block_specs.fit_tpu(
        pl.BlockSpec(block, lambda *i: i), jnp.ones(shape)
    )
    assert spec.block_shape == fitted and block_specs.fits_tpu(fitted, array.shape)
    held = jnp.ones([n for n in fitted if n is not None])
    assert restore(held).shape == tuple(n for n in block if n is not None)


def test_what_is_refused():
    q = quantized(5, {1: 100}, (256, 250))
    with pytest.raises(ValueError, match="padded to whole tiles"):
        dequantize(q, (128, 125), interpret=True)
    with pytest.raises(ValueError, match="cut through the tiles"):
        dequantize(quantized(5, {1: 64}), (128, 32), interpret=True)
