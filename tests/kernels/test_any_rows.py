"""One law for any number of rows: whichever kernel takes them, each row of a result in bfloat16
is within TOLERANCE of float64's, relative to that row's norm.

Which kernel that is changes with the number of rows, and with it where values are rounded. Here
Triton's kernels and XLA take them as the library chooses; Hopper's kernels, which are interpreted
from jax 0.12 on, are called by name. On a GPU: tests/device/test_kernels.py.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import midtread as mt
from midtread.kernels.decoding import as_bytes
from midtread.kernels.environment import implementation
from midtread.kernels.weight_matmul.hopper_decode.kernel import decode_matmul
from midtread.kernels.weight_matmul.hopper_decode.pipeline import DecodeBlocks
from midtread.kernels.weight_matmul.hopper_prefill import pipeline as prefill
from midtread.kernels.weight_matmul.hopper_prefill.kernel import prefill_matmul
from tests.kernels.plans import needs_interpreter, random

pytestmark = pytest.mark.filterwarnings("ignore:The Pallas Triton backend")

TOLERANCE = 4e-3  # one rounding to bfloat16 is 2^-8 = 3.9e-3 of a value at most
WEIGHTS = [("int8", None), ("int4", 32), ("nf4", 64), ("e4m3", 128)]
# with zero points, floats of 4 bits, and 2 bits
WEIGHTS += [("uint4", 128), ("mxfp4", 32), ("nvfp4", 16), ("int2", 64), ("uint2", 32)]
K, N = 256, 256


def operands(name, tile, rows):
    tiles = {0: tile} if tile else {}
    method = "minmax" if name.startswith("uint") else "absmax"
    w = mt.quantize(
        random(1, K, N), name, channelwise_axes=[1], tiled_axes=tiles, calibration_method=method
    )  # fmt: skip
    x = random(2, 130, K)[:rows]
    # a scale is rounded to w's dtype when it is made, so these are the operands themselves
    values = mt.dequantize(w, jnp.float32)
    return x, w, np.asarray(x).astype(np.float64) @ np.asarray(values, np.float64)


def error_of_rows(got, want):
    """The largest, over rows, of |got - want| / |want|."""
    got = np.asarray(got).astype(np.float64)
    return np.max(np.linalg.norm(got - want, axis=1) / np.linalg.norm(want, axis=1))


@pytest.mark.parametrize("rows", [1, 64, 65])
@pytest.mark.parametrize(("name", "tile"), WEIGHTS)
def test_as_the_library_chooses(name, tile, rows):
    x, w, want = operands(name, tile, rows)
    with implementation("interpret"):
        assert error_of_rows(jax.jit(mt.dot)(x, w), want) < TOLERANCE
    assert error_of_rows(jax.jit(mt.dot)(x, w), want) < TOLERANCE


@needs_interpreter
@pytest.mark.parametrize("rows", [1, 64])
@pytest.mark.parametrize(("name", "tile"), WEIGHTS)
def test_few_rows_on_hopper(name, tile, rows):
    x, w, want = operands(name, tile, rows)
    blocks = DecodeBlocks(k=64, stages=2, wide=2, deep=2)
    scales = (w.scale, None) if tile else (None, w.scale[0])
    out = decode_matmul(
        x, as_bytes(w.qvalue), *scales, w.zero_point, fmt=w.format, blocks=blocks,
        dtype=jnp.bfloat16, interpret=True,
    )  # fmt: skip
    assert error_of_rows(out.total(), want) < TOLERANCE


@needs_interpreter
@pytest.mark.parametrize("rows", [65])
@pytest.mark.parametrize(("name", "tile"), WEIGHTS)
def test_many_rows_on_hopper(name, tile, rows, monkeypatch):
    monkeypatch.setattr(prefill, "num_cores", lambda: 2)
    x, w, want = operands(name, tile, rows)
    blocks = prefill.PrefillBlocks(rows=64, k=128, stages=2)
    scale = w.scale if tile else w.scale.astype(jnp.float32)
    out = prefill_matmul(
        x, as_bytes(w.qvalue), scale, None, w.zero_point, fmt=w.format, blocks=blocks,
        dtype=jnp.bfloat16, interpret=True,
    )  # fmt: skip
    assert error_of_rows(out, want) < TOLERANCE
