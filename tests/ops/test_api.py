"""JAX's own signatures: plain arrays give JAX's results, QArrays those of their values."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import midtread as mt

PEERS = {
    "dot_general": lax.dot_general,
    "dot": jnp.dot,
    "einsum": jnp.einsum,
    "conv_general_dilated": lax.conv_general_dilated,
    "ragged_dot": lax.ragged_dot,
    "ragged_dot_general": lax.ragged_dot_general,
}


@pytest.mark.parametrize("name", PEERS)
def test_signatures_are_jaxs(name):
    ours, theirs = (
        inspect.signature(f).parameters for f in (getattr(mt, name), PEERS[name])
    )
    theirs = {k: p for k, p in theirs.items() if not k.startswith("_")}
    assert list(ours) == list(theirs)
    for parameter, other in zip(ours.values(), theirs.values()):
        assert (parameter.kind, parameter.default) == (other.kind, other.default)


EINSUMS = {
    "mk,kn": [(3, 4), (4, 5)],
    "btd,dnh->btnh": [(2, 3, 4), (4, 5, 6)],
    "bqnh,bknh->bnqk": [(2, 3, 4, 5), (2, 6, 4, 5)],
    "...d,df->...f": [(2, 3, 4), (4, 5)],
    "...ij,...jk": [(2, 3, 4), (4, 5)],
    "ij,kj->ki": [(3, 4), (5, 4)],
    "ij,k->ik": [(3, 4), (5,)],
    "ij,jk,kl->il": [(3, 4), (4, 5), (5, 6)],
    "ij,jk,kl,lm->im": [(3, 4), (4, 5), (5, 6), (6, 2)],
    "bij,bjk->bik": [(1, 3, 4), (2, 4, 5)],
    "ij->ji": [(3, 4)],
    "ij->": [(3, 4)],
    "ij,ij->": [(3, 4), (3, 4)],
    "i,j->ij": [(3,), (4,)],
}


@pytest.mark.parametrize("equation", EINSUMS)
def test_einsum(equation, key):
    arrays = [
        jax.random.normal(jax.random.fold_in(key, i), s)
        for i, s in enumerate(EINSUMS[equation])
    ]
    np.testing.assert_allclose(
        mt.einsum(equation, *arrays), jnp.einsum(equation, *arrays), atol=1e-5
    )
    quantized = [mt.quantize(x, "int8", channelwise_axes=[0]) for x in arrays]
    expected = jnp.einsum(equation, *map(mt.dequantize, quantized))
    ours = mt.einsum(equation, *quantized)
    np.testing.assert_allclose(ours, expected, rtol=1e-6, atol=1e-5)


def test_einsum_forms(key):
    x, w = jax.random.normal(key, (3, 4)), jax.random.normal(key, (4, 5))
    expected = jnp.einsum("ij,jk->ki", x, w)
    np.testing.assert_allclose(
        mt.einsum(x, [0, 1], w, [1, 2], [2, 0]), expected, atol=1e-6
    )
    np.testing.assert_allclose(mt.einsum(" ij , jk -> ki ", x, w), expected, atol=1e-6)
    chain = [x, w, jax.random.normal(key, (5, 2))]
    for optimize in ("optimal", "greedy", False):
        out = mt.einsum("ij,jk,kl->il", *chain, optimize=optimize)
        np.testing.assert_allclose(out, chain[0] @ chain[1] @ chain[2], atol=1e-5)


def test_einsum_repeats_tiles_of_a_shared_axis(key):
    """An extent that divides its partner's is repeated by tiles, scales included."""
    x, w = jax.random.normal(key, (2, 8)), jax.random.normal(key, (4, 5))
    q = mt.quantize(w, "int8", channelwise_axes=[0, 1])
    expected = jnp.einsum("ij,jk->ik", x, jnp.repeat(mt.dequantize(q), 2, axis=0))
    np.testing.assert_allclose(mt.einsum("ij,jk->ik", x, q), expected, atol=1e-5)


@pytest.mark.parametrize(
    "bad, message",
    [
        (lambda x, w: mt.einsum("ij,jk,kl", x, w), "names 3 operands, got 2"),
        (lambda x, w: mt.einsum("ijk,jk->i", x, w), "does not fit its operand's rank"),
        (lambda x, w: mt.einsum("ij,jk->iz", x, w), "unknown or repeated labels"),
    ],
)
def test_einsum_errors(bad, message):
    with pytest.raises(ValueError, match=message):
        bad(jnp.ones((3, 4)), jnp.ones((4, 5)))
    with pytest.raises(NotImplementedError, match="diagonal"):
        mt.einsum("ii->i", jnp.ones((3, 3)))
    with pytest.raises(NotImplementedError, match="immutable"):
        mt.einsum("ij->j", jnp.ones((3, 3)), out=jnp.ones(3))


def test_dot_ranks(key):
    for a_shape, b_shape in (
        ((3,), (3,)),
        ((2, 3), (3,)),
        ((3,), (4, 3, 2)),
        ((2, 3), (4, 3, 5)),
        ((), (2, 2)),
    ):
        a, b = jax.random.normal(key, a_shape), jax.random.normal(key, b_shape)
        np.testing.assert_allclose(mt.dot(a, b), jnp.dot(a, b), atol=1e-6)


def test_shapes_that_do_not_meet():
    with pytest.raises(
        TypeError, match=r"axis 1 of lhs \(2, 3\) has extent 3, axis 0 of rhs"
    ):
        mt.dot(jnp.ones((2, 3)), jnp.ones((4, 2)))


CONVS = {
    "plain": {"window_strides": (1, 1), "padding": "SAME"},
    "strided": {"window_strides": (2, 1), "padding": "VALID", "rhs_dilation": (1, 2)},
    "grouped": {"window_strides": (1, 1), "padding": ((1, 1), (0, 2)), "feature_group_count": 4},
    "transposed": {"window_strides": (1, 1), "padding": ((2, 2), (1, 1)), "lhs_dilation": (2, 2)},
}  # fmt: skip


@pytest.mark.parametrize(
    "methods", [("absmax", "absmax"), ("minmax", "absmax"), ("minmax", "minmax")]
)
@pytest.mark.parametrize("case", CONVS)
def test_conv(case, methods, key):
    how = CONVS[case]
    channels = 4 // how.get("feature_group_count", 1)
    numbers = ("NHWC", "HWIO", "NHWC")
    x, w = (
        jax.random.normal(key, (2, 8, 7, 4)) + 0.5,
        jax.random.normal(key, (3, 3, channels, 8)),
    )
    qx = mt.quantize(x, "int8", channelwise_axes=[0], calibration_method=methods[0])
    qw = mt.quantize(w, "int8", channelwise_axes=[3], calibration_method=methods[1])
    for lhs, rhs in ((x, w), (qx, qw), (x, qw), (qx, w)):
        values = [
            mt.dequantize(a) if isinstance(a, mt.QArray) else a for a in (lhs, rhs)
        ]
        expected = lax.conv_general_dilated(*values, **how, dimension_numbers=numbers)
        out = mt.conv_general_dilated(lhs, rhs, **how, dimension_numbers=numbers)
        np.testing.assert_allclose(out, expected, atol=2e-4)


@pytest.mark.parametrize(
    "formats", [("int8", "int4"), ("e4m3", "e5m2"), ("int8", "nf4")]
)
def test_conv_of_mixed_formats(formats, key):
    x, w = jax.random.normal(key, (2, 4, 8, 8)), jax.random.normal(key, (6, 4, 3, 3))
    qx, qw = (mt.quantize(a, f, channelwise_axes=[0]) for a, f in zip((x, w), formats))
    expected = lax.conv_general_dilated(
        mt.dequantize(qx), mt.dequantize(qw), (1, 1), "SAME"
    )
    np.testing.assert_allclose(
        mt.conv_general_dilated(qx, qw, (1, 1), "SAME"), expected, atol=2e-4
    )


@pytest.mark.parametrize("method", ["absmax", "minmax"])
@pytest.mark.parametrize("experts", ["shared", "per expert", "tiled"])
def test_ragged_dot(experts, method, key):
    x, w = jax.random.normal(key, (12, 256)), jax.random.normal(key, (3, 256, 6))
    w = w * jnp.array([1.0, 10.0, 0.1])[:, None, None]
    sizes = jnp.array([5, 4, 3])
    axes = {"shared": [2], "per expert": [0, 2], "tiled": [0, 2]}[experts]
    tiles = {1: 128} if experts == "tiled" else {}
    qx = mt.quantize(x, "int8", channelwise_axes=[0])
    qw = mt.quantize(
        w, "int8", channelwise_axes=axes, tiled_axes=tiles, calibration_method=method
    )
    for lhs in (x, qx):
        value = mt.dequantize(lhs) if lhs is qx else lhs
        expected = lax.ragged_dot(value, mt.dequantize(qw), sizes)
        np.testing.assert_allclose(
            mt.ragged_dot(lhs, qw, sizes), expected, rtol=1e-4, atol=1e-3
        )


@pytest.mark.parametrize("left", ["absmax", "minmax"])
@pytest.mark.parametrize("right", ["absmax", "minmax"])
@pytest.mark.parametrize("axes", [((), ()), ((0,), (0, 2))], ids=["tensor", "channel"])
def test_zero_points_of_a_ragged_dot_meet_their_own_groups(left, right, axes, key):
    x = jax.random.uniform(key, (16, 32)) + 1.0
    w = jax.random.normal(key, (3, 32, 8)) + jnp.arange(3.0)[:, None, None]
    qx = mt.quantize(x, "int8", channelwise_axes=axes[0], calibration_method=left)
    qw = mt.quantize(w, "int8", channelwise_axes=axes[1], calibration_method=right)
    sizes = jnp.array([7, 0, 6])  # three rows are in no group
    expected = lax.ragged_dot(mt.dequantize(qx), mt.dequantize(qw), sizes)
    np.testing.assert_allclose(mt.ragged_dot(qx, qw, sizes), expected, rtol=1e-4, atol=1e-3)  # fmt: skip


def test_ragged_dot_general_sums_rows(key):
    x, y = jax.random.normal(key, (12, 4)), jax.random.normal(key, (12, 6))
    numbers = lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])
    sizes = jnp.array([5, 4, 3])
    qx, qy = (mt.quantize(a, "int8", channelwise_axes=[1]) for a in (x, y))
    expected = lax.ragged_dot_general(
        mt.dequantize(qx), mt.dequantize(qy), sizes, numbers
    )
    np.testing.assert_allclose(
        mt.ragged_dot_general(qx, qy, sizes, numbers), expected, atol=1e-4
    )
    by_row = mt.quantize(
        x, "int8", channelwise_axes=[0]
    )  # a scale that the sum runs over
    expected = lax.ragged_dot_general(
        mt.dequantize(by_row), mt.dequantize(qy), sizes, numbers
    )
    np.testing.assert_allclose(
        mt.ragged_dot_general(by_row, qy, sizes, numbers), expected, atol=1e-4
    )


def test_group_offset_is_refused():
    with pytest.raises(NotImplementedError, match="slice rhs and group_sizes"):
        mt.ragged_dot(
            jnp.ones((2, 3)),
            jnp.ones((1, 3, 2)),
            jnp.array([2]),
            group_offset=jnp.array([0]),
        )


def test_precision_reaches_the_matmul(key):
    q = mt.quantize(jax.random.normal(key, (8, 8)), "nf4", channelwise_axes=[1])
    f = lambda x, w: mt.dot(x, w, precision=lax.Precision.HIGHEST)
    assert "HIGHEST" in jax.jit(f).lower(jnp.ones((4, 8)), q).as_text()


def test_masks_are_zeros_and_ones(key):
    """A mask by a weight, as dispatching to experts multiplies them, in every op."""
    mask, w = jax.random.bernoulli(key, 0.5, (4, 4)), jax.random.normal(key, (4, 4))
    codes = mt.quantize(w, "int8", channelwise_axes=[1])
    numbers, sizes = (((1,), (0,)), ((), ())), jnp.array([4], jnp.int32)
    window = mt.quantize(w[None, None, :2, :2], "int8")

    @jax.jit
    def products(x):
        return [
            mt.dot(x, codes),
            mt.dot_general(x, codes, numbers),
            mt.einsum("ab,bc->ac", x, codes),
            mt.einsum("bc,ab->ac", codes, x),
            mt.ragged_dot(x, codes.reshape(1, 4, 4), sizes),
            mt.conv_general_dilated(x[None, None], window, (1, 1), "SAME"),
        ]

    for got, wanted in zip(products(mask), products(mask.astype(jnp.float32))):
        np.testing.assert_allclose(got, wanted, rtol=1e-6, atol=1e-6)
    trained = mt.learn(mt.recipe("qwix_int8")).dot
    grad = jax.jit(jax.grad(lambda w: jnp.sum(trained(mask, w))))(w)
    counts = np.broadcast_to(np.sum(mask, 0)[:, None], (4, 4))
    np.testing.assert_allclose(grad, counts, rtol=0.02)
    assert np.array_equal(mt.dot(mask, mask), jnp.dot(mask, mask))


def test_the_operator(key):
    """x @ q and q @ x, of JAX's and of NumPy's arrays, are mt.dot and its batches."""
    w = jax.random.normal(key, (8, 4))
    q, x = mt.quantize(w, "int8", channelwise_axes=[1]), jnp.ones((2, 8))
    np.testing.assert_array_equal(x @ q, mt.dot(x, q))
    np.testing.assert_array_equal(np.asarray(x) @ q, mt.dot(x, q))
    np.testing.assert_array_equal(q.T @ x.T, mt.dot(q.T, x.T))
    stacked = mt.quantize(jnp.stack([w, 2 * w]), "int8", channelwise_axes=[0, 2])
    wanted = jnp.stack([x, x]) @ stacked.dequantize()
    np.testing.assert_allclose(jnp.stack([x, x]) @ stacked, wanted, rtol=1e-6)
    with pytest.raises(ValueError, match="no axis for @"):
        jnp.float32(1) @ q


def test_equal_terms_of_one_letter_are_two_terms(key):
    # Python has one object for each string of one letter.
    x, y = jax.random.normal(key, (2, 64))
    ops = mt.learn(mt.recipe("qwix_int8"))
    for term in ("k,k->", "k,k", "k,k->k"):
        want = jnp.einsum(term, x, y)
        np.testing.assert_allclose(mt.einsum(term, x, y), want, rtol=1e-5)
        np.testing.assert_allclose(ops.einsum(term, x, y), want, atol=0.3)
