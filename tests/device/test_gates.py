"""Matmuls whose columns gate each other, on a real GPU against float64.

JAX_PLATFORMS=cuda,cpu python -m pytest -m gpu tests/device/test_gates.py
"""

import functools

import numpy as np
import pytest

from midtread.kernels.gates import STRIP
from tests.device.test_kernels import by_kernel, quantize
from tests.kernels.plans import error, random, wide
from tests.kernels.test_gates import WITH_CODE, by_gate

pytestmark = pytest.mark.gpu


def exactly(name: str, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The formula in float64."""
    inner = a if name == "silu" else 2 * (2 / np.pi) ** 0.5 * (a + 0.044715 * a**3)
    return a * b / (1 + np.exp(-np.clip(inner, -700, None)))


# One program has the whole sum of a column, or two add up in a cluster.
@pytest.mark.parametrize("shape", [(256, 28672), (1024, 16384)], ids=str)
@pytest.mark.parametrize(
    ("fmt", "tiles"), [("int8", {}), ("int4", {0: 128}), ("nf4", {0: 64})], ids=str
)
@pytest.mark.parametrize("name", WITH_CODE)
def test_a_gate(name, fmt, tiles, shape):
    w = quantize(random(1, *shape), fmt, channelwise_axes=[1], tiled_axes=tiles)
    values = wide(w.dequantize()).astype(np.float64)
    for rows in (1, 3, 16, 17, 32, 64):
        x = random(rows, rows, shape[0])
        y, gated, _ = by_kernel(functools.partial(by_gate, name), x, w)
        exact = wide(x).astype(np.float64) @ values
        strips = exact.reshape(rows, -1, 2, STRIP)
        want = exactly(name, *(strips[:, :, i].reshape(rows, -1) for i in (0, 1)))
        assert error(y, exact) < 4e-3, rows
        assert gated is not None and error(gated, want) < 8e-3, rows
