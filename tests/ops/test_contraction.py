"""The gradients of a contraction are contractions: one law for every op."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import midtread as mt
from midtread.ops.contraction import Dot, dot
from midtread.ops.conv import conv
from midtread.ops.ragged import ragged

SIZES = jnp.array([4, 0, 5])  # of 10 rows: one group empty, one row in none
GROUPED = lax.RaggedDotDimensionNumbers((((1,), (1,)), ((), ())), [0], [0])


def _dots():
    yield dot((((1,), (0,)), ((), ())), 2, 2), (4, 6), (6, 5)
    yield dot((((2, 1), (1, 0)), ((), ())), 3, 3), (2, 3, 4), (3, 4, 5)
    yield dot((((3,), (1,)), ((0,), (2,))), 4, 3), (2, 3, 5, 4), (6, 4, 2)
    yield dot((((), ()), ((), ())), 1, 2), (3,), (2, 4)
    yield Dot(tuple("btd"), tuple("dnh"), tuple("nbht")), (2, 3, 4), (4, 5, 6)


def _ragged():
    c = ragged(GROUPED, (10, 6), (3, 6, 5), SIZES)
    yield c, (10, 6), (3, 6, 5)
    yield c.dlhs, (10, 5), (3, 6, 5)


def _convs():
    layouts = (None, ("NHWC", "HWIO", "NHWC"))
    for groups, stride, lhs_dilation, rhs_dilation, numbers in itertools.product(
        ((1, 1), (2, 1), (4, 1), (1, 2)), (1, 2), (1, 2), (1, 2), layouts
    ):
        feature, batch = groups
        image = (4, 4, 7, 6) if numbers is None else (4, 7, 6, 4)
        window = (8, 4 // feature, 3, 2) if numbers is None else (3, 2, 4 // feature, 8)
        padding = "SAME" if lhs_dilation == 1 else ((1, 2), (0, 1))
        geometry = (stride, stride), padding, (lhs_dilation,) * 2, (rhs_dilation,) * 2
        yield conv(image, window, *geometry, numbers, feature, batch), image, window


CONTRACTIONS = [*_dots(), *_ragged(), *_convs()]


@pytest.mark.parametrize("case", CONTRACTIONS, ids=lambda case: case[0].name)
def test_gradients_are_transposes(case, key):
    c, *shapes = case

    @jax.jit
    def both(lhs, rhs):
        out, vjp = jax.vjp(c.run, lhs, rhs)
        g = jax.random.normal(key, out.shape)
        return (c.dlhs.run(g, rhs), c.drhs.run(lhs, g)), vjp(g)

    for ours, jaxs in zip(*both(*(jax.random.normal(key, s) for s in shapes))):
        assert ours.shape == jaxs.shape
        np.testing.assert_allclose(ours, jaxs, atol=2e-4)


def test_ragged_is_closed_under_transposition(key):
    """JAX has no gradient of the weight gradient; a one-hot matmul shows what it is."""
    lhs, rhs = (jax.random.normal(key, s) for s in ((10, 6), (10, 5)))
    c = ragged(GROUPED, (10, 6), (3, 6, 5), SIZES).drhs
    row = jnp.arange(10)
    ends = jnp.cumsum(SIZES)
    member = (row[None] < ends[:, None]) & (row[None] >= (ends - SIZES)[:, None])
    dense = lambda x, y: jnp.einsum("gm,mk,mn->gkn", member.astype(x.dtype), x, y)
    out, vjp = jax.vjp(dense, lhs, rhs)
    np.testing.assert_allclose(c.run(lhs, rhs), out, atol=1e-5)
    g = jax.random.normal(key, out.shape)
    for ours, theirs in zip((c.dlhs.run(g, rhs), c.drhs.run(lhs, g)), vjp(g)):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)


def test_bad_dimension_numbers_are_named():
    with pytest.raises(ValueError, match="do not fit a rhs of rank 2"):
        dot((((1,), (2,)), ((), ())), 2, 2)
    with pytest.raises(ValueError, match="pair axes unevenly"):
        dot((((1,), ()), ((), ())), 2, 2)
    with pytest.raises(ValueError, match="has no meaning with lhs_dilation"):
        conv((1, 1, 4), (1, 1, 2), (1,), "SAME", (2,), (1,), None, 1, 1)


def test_experts_have_scales_of_their_own():
    """Axis "group": one scale for all experts, or one for each."""
    x, w, sizes = jnp.ones((8, 4)), jnp.ones((3, 4, 5)), jnp.array([2, 3, 3])
    w = w.at[1].multiply(10)
    c = ragged(GROUPED, x.shape, w.shape, sizes)
    shape = lambda *axes: mt.Spec("int8", axes)
    assert c.number_axes(shape("kept"), "rhs", w.shape).channelwise_axes == (2,)
    each = c.number_axes(shape("kept", "group"), "rhs", w.shape)
    assert each.channelwise_axes == (2, 0)
    ops = mt.learn(mt.Recipe(mt.Fwd(shape("kept"), shape("kept", "group"))))
    np.testing.assert_allclose(ops.ragged_dot(x, w, sizes)[:, 0], [4] * 2 + [40] * 3 + [4] * 3, rtol=1e-2)  # fmt: skip
    with pytest.raises(ValueError, match="'group' has no tiles"):
        mt.Spec("int8", tiled_axes={"group": 2})
