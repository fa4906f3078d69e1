"""Static ranges per axis: what is noted, and that training with it is what one does by hand."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

from midtread.model.flaxlib import QuantStat, read
from midtread.model.quantize import quantize_model
from midtread.model.rules import QtRule
from midtread.providers.static import StaticProvider

RULE = QtRule(
    weight_qtype="e4m3", act_qtype="e4m3", bwd_qtype="e5m2",
    weight_calibration_method="absmax,2", act_calibration_method="absmax,2",
)  # fmt: skip
SIZES = np.array([5, 12, 7])


class Block(nnx.Module):
    def __init__(self, w, experts):
        self.w, self.experts = nnx.Param(w), nnx.Param(experts)

    def __call__(self, x):
        """x [B, T, K] through a projection, then each row through its expert."""
        y = jax.lax.dot_general(x, self.w[...], (((2,), (0,)), ((), ())))
        rows, sizes = y.reshape(-1, y.shape[-1]), jnp.asarray(SIZES, jnp.int32)
        return jax.lax.ragged_dot(rows, self.experts[...], sizes)


def draw(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


X, W, EXPERTS, G = draw(4, 6, 16), draw(16, 32), draw(3, 32, 8), draw(24, 8, seed=1)


@pytest.fixture(scope="module")
def noted() -> dict:
    """The ranges of a run that saw X and half of X."""
    net = block(measuring=True)
    for batch in (X, X / 2):
        net(jnp.asarray(batch))
    return {path: read(var) for path, var in nnx.to_flat_state(nnx.state(net, QuantStat))}  # fmt: skip


def block(measuring: bool) -> nnx.Module:
    net = Block(jnp.asarray(W), jnp.asarray(EXPERTS))
    shape = jax.ShapeDtypeStruct(X.shape, jnp.float32)
    return quantize_model(net, StaticProvider([RULE], measuring=measuring), shape)


def test_the_largest_of_each_axis_is_noted(noted):
    found = {path[-1]: value for path, value in noted.items()}
    assert set(found) == {"w_range", "experts_range", "dot_general0_lhs", "ragged_dot0_lhs"}  # fmt: skip
    assert all(value["count"] == 2 for value in found.values())
    close = np.testing.assert_array_equal
    close(found["w_range"]["absmax"], 2 * np.abs(W).max(0, keepdims=True))
    per_channel = 2 * np.abs(EXPERTS).max((0, 1), keepdims=True)  # of all experts
    close(found["experts_range"]["absmax"], per_channel)
    per_position = 2 * np.abs(X).max((0, 2), keepdims=True)  # the larger batch's
    close(found["dot_general0_lhs"]["absmax"], per_position)
    assert found["ragged_dot0_lhs"]["absmax"].shape == (1, 1)


# --- by hand, in float64 ----------------------------------------------------------------------


def coded(x, absmax, dtype=ml_dtypes.float8_e4m3fn, bound=448):
    scale = np.float64(np.asarray(absmax, np.float32) / np.float32(bound))
    return np.clip(x / scale, -bound, bound).astype(dtype).astype(np.float64) * scale


def dynamic(g, axis):
    return coded(g, np.abs(g).max(axis, keepdims=True), ml_dtypes.float8_e5m2, 57344)


def test_training_is_what_one_does_by_hand(noted):
    net = block(measuring=False)
    state = nnx.state(net, QuantStat)
    for path, var in nnx.to_flat_state(state):
        var.set_value(noted[path])
    nnx.update(net, state)
    graph, params, rest = nnx.split(net, nnx.Param, ...)
    run = lambda params, x: nnx.merge(graph, params, rest)(x)
    larger = np.float32(1.3) * X  # beyond what was seen, within the headroom
    out, back = jax.vjp(run, params, jnp.asarray(larger))
    grads, dx = back(jnp.asarray(G))

    range_ = {path[-1]: np.asarray(v["absmax"]) for path, v in noted.items()}
    qx = coded(np.float64(larger), range_["dot_general0_lhs"]).reshape(24, 16)
    qw = coded(np.float64(W), range_["w_range"])
    hidden = coded(np.float64(np.float32(qx @ qw)), range_["ragged_dot0_lhs"])
    qe = coded(np.float64(EXPERTS), range_["experts_range"])
    ends = np.cumsum(SIZES)
    spans = [slice(b - n, b) for b, n in zip(ends, SIZES)]
    close = lambda a, b: np.testing.assert_allclose(
        np.float64(a), b, rtol=0, atol=1e-5 * np.abs(b).max()
    )
    close(out, np.concatenate([hidden[s] @ qe[e] for e, s in enumerate(spans)]))

    # a weight's scale varies along what dlhs sums, so it goes into g before g is rounded
    scales = range_["experts_range"] / np.float32(448)
    folded, codes = dynamic(np.float64(G) * scales[0], 1), qe / scales
    dhidden = np.concatenate([folded[s] @ codes[e].T for e, s in enumerate(spans)])
    columns = dynamic(np.float64(G), 0)
    close(grads["experts"][...], np.stack([hidden[s].T @ columns[s] for s in spans]))
    dhidden = np.float64(np.float32(dhidden))
    w_scale = range_["w_range"] / np.float32(448)
    close(dx, (dynamic(dhidden * w_scale, 1) @ (qw / w_scale).T).reshape(X.shape))
    # and an activation's, per position, into the g of the weight's gradient
    x_scale = np.tile(
        range_["dot_general0_lhs"].reshape(-1, 1) / np.float32(448), (4, 1)
    )
    close(grads["w"][...], (qx / x_scale).T @ dynamic(dhidden * x_scale, 0))


def test_a_method_that_is_no_largest_is_refused():
    rule = QtRule(weight_qtype="e4m3", weight_calibration_method="fixed,-1,1")
    with pytest.raises(ValueError, match="static ranges are the largest"):
        StaticProvider([rule], measuring=True)
