"""Rotations keep inner products and spread outliers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from midtread.numerics.hadamard import matrix, rotate
from tests.support import f64


@pytest.mark.parametrize("size", [1, 2, 8, 64])
def test_matrix_is_orthogonal(size):
    h = matrix(size)
    assert set(np.unique(h)) <= {-1.0, 1.0}
    np.testing.assert_array_equal(h @ h.T, size * np.eye(size))


@pytest.mark.parametrize("size", [0, 3, 12, -4])
def test_matrix_refuses_what_is_no_power_of_two(size):
    with pytest.raises(ValueError, match=f"power of two, not {size}"):
        matrix(size)


@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("extent", [64, 40], ids=["whole", "padded"])
def test_inner_products_survive(axis, extent, key):
    shape = [6, 6]
    shape[axis] = extent
    x, y = jax.random.normal(key, (2, *shape))
    rx, ry = rotate(x, 16, key, axis), rotate(y, 16, key, axis)
    assert rx.shape[axis] == -(-extent // 16) * 16
    np.testing.assert_allclose(
        f64((rx * ry).sum(axis)), f64((x * y).sum(axis)), rtol=1e-4, atol=1e-4
    )


def test_an_outlier_is_spread_evenly(key):
    x = jnp.zeros((1, 64)).at[0, 5].set(8.0)
    np.testing.assert_allclose(np.abs(rotate(x, 64, key)), 1.0, rtol=1e-6)


def test_keys_and_sites_choose_other_signs(key):
    x = jax.random.normal(key, (64,))
    turns = [
        rotate(x, 64, key),
        rotate(x, 64, key, site=("a",)),
        rotate(x, 64, jax.random.fold_in(key, 1)),
    ]
    assert len({t.tobytes() for t in map(np.asarray, turns)}) == 3


def test_dtype_is_kept(key):
    assert rotate(jnp.ones((2, 8), jnp.bfloat16), 8, key).dtype == jnp.bfloat16
