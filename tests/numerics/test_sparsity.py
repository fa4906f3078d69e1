"""N:M masks against a slow reference, and against Qwix."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from midtread.numerics.sparsity import Sparsity
from tests.support import f64

CASES = [
    Sparsity(2, 4),
    Sparsity(1, 4),
    Sparsity(4, 4),
    Sparsity(3, 8),
    Sparsity(2, 4, order="C"),
    Sparsity(2, 4, block_size=2),
    Sparsity(1, 2, block_size=4, order="C"),
    Sparsity(2, 4, offset=4),
    Sparsity(1, 2, offset=8, order="C"),
    Sparsity(1, 2, offset=2, block_size=2),
]
every_case = pytest.mark.parametrize("how", CASES, ids=str)


def slow_mask(x, how):
    """Every group by hand, for 2-D arrays whose rows hold whole groups."""
    if how.order == "C":
        return slow_mask(x.T, Sparsity(how.n, how.m, "R", how.block_size, how.offset)).T
    size, apart = max(how.block_size, 1), max(how.offset, 1)
    mask = np.zeros(x.shape, bool)
    for row, kept in zip(np.abs(x), mask):
        score = [row[i : i + size].sum() for i in range(0, len(row), size)]
        for start in range(0, len(score), how.m * apart):
            for lane in range(apart):
                group = [start + lane + apart * i for i in range(how.m)]
                for best in sorted(group, key=lambda i: -score[i])[: how.n]:
                    kept[best * size : (best + 1) * size] = True
    return mask


@every_case
def test_mask_matches_the_slow_reference(how, key):
    x = jax.random.normal(key, (32, 32))
    mask = how.mask(x)
    np.testing.assert_array_equal(mask, slow_mask(f64(x), how))
    np.testing.assert_array_equal(f64(how.apply(x)), np.where(mask, f64(x), 0))
    assert mask.mean() == how.n / how.m


@every_case
@pytest.mark.parametrize("shape", [(32, 32), (2, 16, 16)], ids=str)
def test_mask_equals_qwix(how, shape, key):
    theirs = pytest.importorskip(
        "qwix._src.core.sparsity", reason="qwix, the peer, is not installed"
    )
    x = jax.random.normal(key, shape)
    want = theirs.get_sparsity_mask(
        x, how.n, how.m, how.order, how.block_size, how.offset
    )
    np.testing.assert_array_equal(how.mask(x), want)


def test_groups_that_do_not_fit_a_row_run_over_the_flat_array():
    x = jnp.array([[1.0, 5.0, 2.0, 6.0, 3.0, 4.0]] * 2)  # 6 is no multiple of 4
    kept = Sparsity(1, 4).mask(x).ravel()
    assert np.flatnonzero(kept).tolist() == [3, 7, 9]


def test_ties_keep_the_earlier():
    assert Sparsity(2, 4).mask(jnp.ones((1, 4))).tolist() == [
        [True, True, False, False]
    ]


def test_schedule():
    """Nothing before step 2, then a new mask at 2, 5, 8 and the old one in between."""
    how = Sparsity(1, 2, start_step=2, update_step=3)
    refresh = jax.jit(how.refresh)
    mask, seen = jnp.ones((1, 2), bool), []
    for step in range(7):
        left_is_larger = step % 2 == 0
        x = jnp.array([[2.0, 1.0]]) if left_is_larger else jnp.array([[1.0, 2.0]])
        mask = refresh(mask, x, jnp.int32(step))
        seen.append(mask[0].tolist())
    both, left, right = [True, True], [True, False], [False, True]
    assert seen == [both, both, left, left, left, right, right]


@pytest.mark.parametrize(
    "bad, advice",
    [
        ({"n": 5, "m": 4}, "must not exceed"),
        ({"n": 0, "m": 4}, "nor be 0"),
        ({"n": 2, "m": 4, "order": "X"}, "write 'R'"),
        ({"n": 2, "m": 4, "offset": -1}, "offset=-1"),
        ({"n": 2, "m": 4, "update_step": 0}, "update_step=0"),
    ],
)
def test_bad_rules_are_refused(bad, advice):
    with pytest.raises(ValueError, match=advice):
        Sparsity(**bad)


@pytest.mark.parametrize(
    "how, shape",
    [
        (Sparsity(2, 4), (3, 5)),
        (Sparsity(2, 4, block_size=3), (4, 8)),
        (Sparsity(2, 4, order="C"), (8,)),
    ],
)
def test_shapes_that_do_not_divide_are_refused(how, shape):
    with pytest.raises(ValueError, match="divi|axes"):
        how.mask(jnp.ones(shape))
