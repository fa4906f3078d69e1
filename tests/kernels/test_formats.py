"""Stored weights of every format on a GPU that is not there: values interpreted, PTX run by a
small machine, and programs lowered for CUDA."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import midtread as mt
from midtread.kernels import choose, decoding, weight_matmul
from midtread.kernels.candidates import first
from midtread.kernels.environment import implementation, pretended
from midtread.kernels.pallas_compat import pretend_gpu
from midtread.numerics import platforms
from midtread.numerics.formats import FORMATS, as_format, dtype_bits
from tests.kernels import test_decoding as ptx
from tests.kernels.plans import GROUPED, H200, by_weight, coded, floats, matmul

pytestmark = pytest.mark.filterwarnings("ignore:The Pallas Triton backend")
MINMAX = {"calibration_method": "minmax"}  # asks for zero points


def random(seed, *shape, dtype=jnp.bfloat16):
    return jnp.asarray(np.random.RandomState(seed).randn(*shape), dtype)


def exact(x):
    return np.asarray(x).astype(np.float64)


def interpreted(fn, *args):
    """`fn` by a kernel, in the interpreter."""
    with implementation("interpret"):
        traced = jax.jit(fn).trace(*args)
        assert "pallas_call[" in str(traced.jaxpr)
        return traced.lower().compile()(*args)


def error(got, want):
    return np.linalg.norm(exact(got) - want) / np.linalg.norm(want)


# --- values -----------------------------------------------------------------------------------

# Format, group, rows, columns (fma takes wide weights, dot the others), options. The script
# tests/device/test_formats.py has all products of them, on a GPU.
CASES = [
    ("uint4", 32, 1, 8192, MINMAX),
    ("uint4", 64, 17, 256, MINMAX),
    ("uint4", 128, 3, 192, MINMAX),
    ("uint4", None, 16, 256, MINMAX),
    ("int4", 64, 64, 192, MINMAX),
    ("mxfp4", 32, 2, 8192, {}),
    ("mxfp4", 32, 17, 192, {"scale_dtype": "e8m0"}),
    ("nvfp4", 16, 3, 192, {}),
    ("nvfp4", 16, 1, 8192, {"scale_dtype": "e4m3"}),
    ("int2", 64, 1, 8192, {}),
    ("int2", 64, 16, 256, {}),
    ("uint2", 32, 3, 256, MINMAX),
    ("int1", 64, 3, 256, {}),
    ("int3", 64, 3, 192, {}),
    ("int6", 128, 16, 192, {}),
    ("uint8", 64, 3, 192, MINMAX),
    ("mxfp8", 32, 1, 192, {}),
]


@pytest.mark.parametrize(("name", "group", "rows", "columns", "how"), CASES)
def test_values_are_those_of_float64(name, group, rows, columns, how):
    tiles = {0: group} if group else {}
    w = mt.quantize(random(1, 128, columns), name, channelwise_axes=[1], tiled_axes=tiles, **how)  # fmt: skip
    assert (w.zero_point is None) == (how is not MINMAX)
    x = random(2, rows, 128)
    run = functools.partial(mt.dot, preferred_element_type=jnp.float32)
    got = interpreted(run, x, w)
    assert error(got, exact(x) @ exact(mt.dequantize(w, jnp.float32))) < 1e-6


def test_fractions_as_zero_points_that_vary_less_than_scales():
    """GGUF and HQQ have zero points in float; here one for each group, of all columns."""
    w = mt.quantize(random(1, 128, 64), "uint4", channelwise_axes=[1], tiled_axes={0: 32}, **MINMAX)  # fmt: skip
    w = w.replace(zero_point=random(3, 2, 1, dtype=jnp.float32) + 7.3)
    x = random(2, 3, 128)
    got = interpreted(mt.dot, x, w)
    assert error(got, exact(x) @ exact(mt.dequantize(w, jnp.float32))) < 4e-3


@pytest.mark.parametrize("shape", [(96, 66), (160, 192), (33, 34)])
def test_odd_extents_are_right_by_any_road(shape):
    w = mt.quantize(random(1, *shape), "uint4", channelwise_axes=[1], **MINMAX)
    x = random(2, 3, shape[0])
    with implementation("interpret"):
        got = jax.jit(mt.dot)(x, w)
    assert error(got, exact(x) @ exact(mt.dequantize(w, jnp.float32))) < 8e-3


@pytest.mark.parametrize(
    ("name", "tile", "how"),
    [("uint4", 64, MINMAX), ("uint8", None, MINMAX), ("mxfp4", 32, {})],
)
def test_experts(name, tile, how):
    tiles = {1: tile} if tile else {}
    w = mt.quantize(random(1, 3, 64, 128), name, channelwise_axes=[0, 2], tiled_axes=tiles, **how)  # fmt: skip
    x, sizes = random(2, 40, 64), np.array([17, 0, 20])
    got = interpreted(mt.ragged_dot, x, w, sizes)
    values, want = exact(mt.dequantize(w, jnp.float32)), np.zeros((40, 128))
    for group, (start, size) in enumerate(zip(np.cumsum(sizes) - sizes, sizes)):
        want[start : start + size] = exact(x)[start : start + size] @ values[group]
    assert error(got, want) < 4e-3


# --- choosing ---------------------------------------------------------------------------------


def test_hopper_takes_whole_blocks_and_triton_the_rest():
    """What each of the two kernels for few rows says to a format that Triton takes."""
    for name, group, _, _, how in CASES:
        w = coded(name, (512, 1024), (1,), {0: group} if group else {}, **how)
        choice = first("", choose.FEW_ROWS, by_weight(floats(4, 512), w), H200)
        of_columns = w.zero_point is not None and not group
        if name == "int1" or of_columns:
            assert choice.name == "triton", choice.refused
            (_, reason), *_ = choice.refused
            assert "zero points are not those of groups" in reason or f"does not decode {name}" in reason  # fmt: skip
        else:
            assert choice.name == "hopper_decode", (name, choice.refused)
    odd = coded("uint4", (96, 66), (1,), {0: 32}, **MINMAX)
    choice = first("", choose.FEW_ROWS, by_weight(floats(4, 96), odd), H200)
    assert "do not divide into blocks" in choice.refused[0][1]
    sizes = jax.ShapeDtypeStruct((4,), jnp.int32)
    w = coded("uint4", (4, 512, 1024), (0, 2), {1: 32}, **MINMAX)
    a = matmul(floats(40, 512), w, GROUPED, sizes=sizes)
    choice = first("", choose.GROUPED_WEIGHT, a, H200)
    assert choice.name == "triton_grouped"
    assert "zero point" in choice.refused[0][1]


# --- PTX --------------------------------------------------------------------------------------

PACKED = [n for n in weight_matmul.TRITON if dtype_bits(FORMATS[n].dtype) < 8]


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("name", PACKED)
def test_the_assembly_decodes_every_byte(name, dtype):
    fmt, dtype = as_format(name), np.dtype(dtype)
    data = np.arange(256, dtype=np.uint8)
    codes = jnp.asarray(data.view(np.int8))
    with jax.numpy_dtype_promotion("standard"):
        want = decoding.planes(codes, fmt, dtype)
    for plane, shift in enumerate(range(0, 8, dtype_bits(fmt.dtype))):
        code = decoding.decoder(fmt).bytes(fmt, dtype, shift)
        for at, word in enumerate(data.view(np.uint32)):
            out = ptx.run(code, {}, **{"$2": int(word)})
            got = np.concatenate([ptx.halves(out[r], dtype) for r in ("$0", "$1")])
            start = 4 * at
            np.testing.assert_array_equal(
                got, np.asarray(want[plane][start : start + 4]).astype(np.float32)
            )


# --- lowering ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_lowers_for_cuda(name):
    """Few rows and many, in groups and in whole columns, with zero points where they can be."""
    fmt = FORMATS[name]
    group = fmt.tile or 64
    how = MINMAX if name.startswith("u") else {}
    for tile, rows in [(group, 1), (fmt.tile, 16), (group, 512)]:
        w = coded(name, (256, 1024), (1,), {0: tile} if tile else {}, **how)
        with pretended("h200"), pretend_gpu():
            traced = jax.jit(lambda x, w: mt.dot(x, w)).trace(floats(rows, 256), w)
            text = traced.lower(lowering_platforms=("cuda",)).as_text()
        is_taken = rows <= 64 and name in weight_matmul.TRITON
        assert ("gpu.triton" in text or "mosaic_gpu" in text) >= is_taken


@pytest.mark.parametrize(
    ("name", "how"), [("int2", {}), ("uint2", {"calibration_method": "minmax"})]
)
@pytest.mark.parametrize("tile", [None, 64])
def test_xla_reads_no_2_bit_element_on_a_gpu(name, how, tile):
    """One row by 130 columns, which no kernel takes: XLA's own matmul of them was wrong."""
    tiles = {0: tile} if tile else {}
    w = mt.quantize(random(1, 256, 130), name, channelwise_axes=[1], tiled_axes=tiles, **how)  # fmt: skip
    x = random(2, 1, 256)
    with platforms.pretended("gpu"):
        got = jax.jit(mt.dot)(x, w)
    assert error(got, exact(mt.dot(x, w))) < 1e-2
    with pretended("h200"):
        traced = jax.jit(mt.dot).trace(x, w)
        with pretend_gpu():
            text = traced.lower(lowering_platforms=("cuda",)).as_text()
    narrow = r"stablehlo\.(\w+).*: \(?tensor<[\dx]+u?i2>"
    kinds = {m[1] for line in text.splitlines() if (m := re.search(narrow, line))}
    assert kinds <= {"reshape", "pad", "bitcast_convert"}
    assert "bitcast_convert" in kinds
