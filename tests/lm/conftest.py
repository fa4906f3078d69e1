"""optax and orbax mix dtypes: here promotion is JAX's usual."""

import jax
import pytest


@pytest.fixture(autouse=True, scope="module")
def usual_promotion():
    with jax.numpy_dtype_promotion("standard"):
        yield
