"""Dtypes: the few questions we ask of one."""

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np

_WIDE = tuple(map(np.dtype, (jnp.bfloat16, jnp.float16, jnp.float32, jnp.float64)))


@functools.cache
def is_wide(dtype: Any) -> bool:
    """A float that can be quantized, and that scales normally come in."""
    return np.dtype(dtype) in _WIDE


def wide_dtype(dtype: Any) -> np.dtype:
    """What arithmetic on `dtype` is done in: float32, or float64 for itself."""
    return np.dtype(np.float64 if np.dtype(dtype) == np.float64 else np.float32)
