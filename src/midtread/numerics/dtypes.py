"""Dtypes: which floats can be quantized, and what arithmetic on them is done in."""

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np

_WIDE = tuple(map(np.dtype, (jnp.bfloat16, jnp.float16, jnp.float32, jnp.float64)))


@functools.cache
def is_wide(dtype: Any) -> bool:
    """Whether the dtype is a float that can be quantized, and that scales come in."""
    return np.dtype(dtype) in _WIDE


def wide_dtype(dtype: Any) -> np.dtype:
    """Arithmetic is done in float32, except on float64, where it is done in float64."""
    return np.dtype(np.float64 if np.dtype(dtype) == np.float64 else np.float32)
