"""Every test runs on eight virtual CPU devices, under strict dtype promotion.

JAX_PLATFORMS=cuda in the environment lets the tests marked `gpu` have theirs.
"""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
_EIGHT = "--xla_force_host_platform_device_count=8"
if _EIGHT not in os.environ.get("XLA_FLAGS", ""):  # read when jax starts its backend
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_EIGHT}"

import jax
import pytest

jax.config.update("jax_numpy_dtype_promotion", "strict")


@pytest.fixture
def key():
    return jax.random.key(0)
