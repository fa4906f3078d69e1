"""Codes that XLA reads wrongly on a GPU are given to it as bytes."""

import jax.numpy as jnp
import numpy as np
import pytest

from midtread.numerics import rounding

CASES = [
    ("int2", (3, 8), True), ("uint2", (5, 130), True), ("int2", (7,), True),
    ("int4", (3, 130), True), ("uint4", (2, 3, 5), True), ("int4", (4, 64), False),
    ("uint4", (1, 24), False), ("int8", (3, 5), False), ("float4_e2m1fn", (3, 6), False),
]  # fmt: skip


@pytest.mark.parametrize(("dtype", "shape", "is_unpacked"), CASES, ids=str)
def test_numbers_are_the_same(dtype, shape, is_unpacked, monkeypatch):
    low, high = {"int2": (-2, 1), "int4": (-8, 7), "uint2": (0, 3), "uint4": (0, 15)}.get(dtype, (0, 6))  # fmt: skip
    numbers = np.random.RandomState(0).randint(low, high + 1, shape)
    codes = jnp.asarray(numbers, jnp.float32).astype(dtype)
    np.testing.assert_array_equal(rounding.unpacked(codes), codes)  # on a CPU
    assert rounding.unpacked(codes).dtype == codes.dtype
    monkeypatch.setattr(rounding, "platform", lambda: "gpu")
    out, as_bytes = rounding.unpacked(codes), jnp.uint8 if dtype[0] == "u" else jnp.int8
    assert out.dtype == (as_bytes if is_unpacked else codes.dtype)
    wide = lambda x: np.asarray(x.astype(jnp.float32))
    np.testing.assert_array_equal(wide(out), wide(codes))
