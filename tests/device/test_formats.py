"""Every format that a weight may be stored in, on a real GPU, against float64.

    formats x groups x zero points x {1, 3, 16, 17, 32, 64, 65, 512} rows x extents

Of the extents, Hopper's kernels take the first, Triton's the second, and XLA decodes the third, whose rows
are no whole number of blocks and, in 2 bits, no whole number of bytes.

JAX_PLATFORMS=cuda,cpu python -m pytest -m gpu tests/device/test_formats.py
"""

import functools

import jax.numpy as jnp
import numpy as np
import pytest

import midtread as mt
from tests.device.programs import assert_near, by_choice, quantize, values
from tests.kernels.plans import random, wide

pytestmark = pytest.mark.gpu

MINMAX = {"calibration_method": "minmax"}  # with zero points
GROUPS = (32, 64, 128)
WEIGHTS = [
    *((name, group, MINMAX) for name in ("uint4", "int4", "uint2", "uint8") for group in GROUPS),
    *((name, group, {}) for name in ("int2", "int3", "int6", "int1", "nf4") for group in GROUPS),
    *((name, None, {}) for name in ("int8", "int4", "int2", "e4m3", "e5m2")),
    ("uint4", None, MINMAX),
    ("uint2", None, MINMAX),
    ("int4", 16, {}),
    ("mxfp4", 32, {}),
    ("mxfp4", 32, {"scale_dtype": "e8m0"}),
    ("nvfp4", 16, {}),
    ("nvfp4", 16, {"scale_dtype": "e4m3"}),
    ("mxfp8", 32, {}),
    *((name, group, {"dtype": jnp.float32}) for name, group in (("mxfp4", 32), ("nvfp4", 16), ("int4", 16), ("int2", 64))),
    ("uint4", 64, {**MINMAX, "dtype": jnp.float32}),
]  # dtype: of the weight, and so of its scales  # fmt: skip
ROWS = (1, 3, 16, 17, 32, 64, 65, 512)
EXTENTS = ((512, 1024), (384, 192), (256, 130))
# nf4's table and its products with scales are both rounded to bfloat16: 2.1e-3.
ROUNDING = 2.5e-3
# What a layer of Llama-3-8B has, where programs share sums in clusters or leave parts of them.
LARGE = [("int8", None, {}), ("int4", 128, {}), ("uint4", 64, MINMAX), ("nvfp4", 16, {}), ("int2", 64, {})]  # fmt: skip
LARGE_EXTENTS = ((4096, 28672), (14336, 4096), (4096, 6144))


@pytest.mark.parametrize("shape", EXTENTS, ids=str)
@pytest.mark.parametrize(("name", "group", "options"), WEIGHTS, ids=str)
def test_rows_by_a_weight(name, group, options, shape):
    _check(name, group, dict(options), shape, ROWS)


@pytest.mark.parametrize("shape", LARGE_EXTENTS, ids=str)
@pytest.mark.parametrize(("name", "group", "options"), LARGE, ids=str)
def test_rows_by_a_large_weight(name, group, options, shape):
    _check(name, group, dict(options), shape, (1, 16, 24, 32, 64))


def _check(name, group, options, shape, all_rows):
    """All numbers of rows in one program, as a user's would be chosen."""
    x = random(1, *shape, dtype=options.pop("dtype", jnp.bfloat16))
    tiles = {0: group} if group else {}
    w = quantize(x, name, channelwise_axes=[1], tiled_axes=tiles, **options)
    exact = values(w).astype(np.float64)
    xs = {rows: random(2, rows, shape[0]) for rows in all_rows}
    dot = functools.partial(mt.dot, preferred_element_type=jnp.float32)
    got = by_choice(lambda xs, w: {rows: dot(x, w) for rows, x in xs.items()}, xs, w)
    want = {rows: wide(x).astype(np.float64) @ exact for rows, x in xs.items()}
    assert_near(got, want, ROUNDING)
