"""Every algorithm for one weight against its paper in plain NumPy, and the laws they share."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from midtread.algorithms import clip, collect, correct, gptq, hqq, smooth
from midtread.algorithms.weight import Axes, Grid
from midtread.numerics.qarray import dequantize, quantize_by_spec
from midtread.numerics.spec import Spec
from midtread.ops.api import dot
from tests.support import every_format

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
SPECS = {
    "int4": Spec("int4", (1,)),
    "int4/16": Spec("int4", (1,), {0: 16}),
    "uint4/16 with zero points": Spec("uint4", (1,), {0: 16}, calibration="minmax"),
    "mxfp4": Spec("mxfp4", (1,), {0: 32}),
    "nvfp4": Spec("nvfp4", (1,), {0: 16}),
    "nf4/32": Spec("nf4", (1,), {0: 32}),
    "e4m3": Spec("fp8", (1,)),
    "int4, padded tiles": Spec("int4", (1,), {0: 24}),
}
every_spec = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
PAPER = gptq.GptqOptions(scales="spec", order="given", rounds=0, block=16)


@pytest.fixture(scope="module")
def layer():
    """A weight [64, 12], and second moments of inputs that have much in common."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(400, 64)) @ (np.tri(64) * 0.2 + np.eye(64))
    w = rng.normal(size=(64, 12)).astype(np.float32)
    return jnp.asarray(w), jnp.asarray((x.T @ x).astype(np.float32))


def cost(q, w, H):
    error = np.asarray(dequantize(q), np.float64) - np.asarray(w, np.float64)
    return np.sum(error * (np.asarray(H, np.float64) @ error))


def levels(q):
    """What each element may be rounded to: [levels, K, N]."""
    name = q.format.name
    if q.format.is_integer:
        low, high = q.format.codes
        values = np.arange(low, high + 1, dtype=np.float64)
    else:
        values = np.concatenate([-E2M1[::-1], E2M1]) if name != "nf4" else None
        values = np.array(q.format.table) if values is None else values
    spread = lambda part: np.repeat(
        np.asarray(part, np.float64), q.qvalue.shape[0] // part.shape[0], axis=0
    )
    zero = 0 if q.zero_point is None else spread(q.zero_point)
    return (values[:, None, None] - zero) * spread(q.scale)


def reference_gptq(w, H, grid, order, damping=0.01):
    """Frantar et al. 2022, algorithm 1, without its blocks, in float64."""
    w, H = np.array(w, np.float64), np.array(H, np.float64)
    H += np.eye(len(H)) * damping * np.mean(np.diag(H))
    back = np.argsort(order)
    w, H, grid = w[order], H[np.ix_(order, order)], grid[:, order]
    U = np.linalg.cholesky(np.linalg.inv(H)).T
    out = np.zeros_like(w)
    for k in range(len(w)):
        nearest = np.abs(grid[:, k] - w[k]).argmin(0)
        out[k] = grid[nearest, k, np.arange(w.shape[1])]
        w[k:] -= np.outer(U[k, k:], (w[k] - out[k]) / U[k, k])
    return out[back]


@pytest.mark.parametrize("order", ["given", "activation"])
@pytest.mark.parametrize("name", ["uint4/16 with zero points", "mxfp4", "nf4/32"])
def test_gptq_is_the_papers(layer, name, order):
    w, H = layer
    options = gptq.GptqOptions(scales="spec", order=order, rounds=0, block=16)
    made = gptq.solve(w, SPECS[name], H, options=options).array
    rows = np.arange(64) if order == "given" else np.argsort(-np.diag(H), kind="stable")
    wanted = reference_gptq(w, H, levels(quantize_by_spec(w, SPECS[name])), rows)
    # A tie that float32 breaks the other way changes all rows after it.
    assert np.mean(np.abs(np.asarray(dequantize(made)) - wanted) > 1e-5) < 0.01


def reference_by_groups(w, H, spec, size, block=1, damping=0.01):
    """The same paper's groups: scales of a group's rows as they are when it is reached, or when
    its block is."""
    w, H = np.array(w, np.float64), np.array(H, np.float64)
    H += np.eye(len(H)) * damping * np.mean(np.diag(H))
    U = np.linalg.cholesky(np.linalg.inv(H)).T
    out = np.zeros_like(w)
    for k in range(len(w)):
        if k % block == 0:
            at_block = w.copy()
        if k % size == 0:
            group = jnp.asarray(at_block[k : k + size], jnp.float32)
            grid = levels(quantize_by_spec(group, spec))
        nearest = np.abs(grid[:, k % size] - w[k]).argmin(0)
        out[k] = grid[nearest, k % size, np.arange(w.shape[1])]
        w[k:] -= np.outer(U[k, k:], (w[k] - out[k]) / U[k, k])
    return out


# The largest of a group lies between two codes of int4 by itself, which is a tie.
@pytest.mark.parametrize(
    "name, size, ties",
    [("int4/16", 16, 0.06), ("uint4/16 with zero points", 16, 0.01), ("nf4/32", 32, 0.01)],
)  # fmt: skip
def test_groups_are_scaled_when_they_are_reached(layer, name, size, ties):
    w, H = layer
    options = dataclasses.replace(PAPER, static_groups=False)
    made = gptq.solve(w, SPECS[name], H, options=options).array
    wanted = reference_by_groups(w, H, SPECS[name], size)
    assert np.mean(np.abs(np.asarray(dequantize(made)) - wanted) > 1e-5) < ties
    static = gptq.solve(w, SPECS[name], H, options=PAPER).array
    assert np.mean(np.abs(np.asarray(dequantize(static)) - wanted) > 1e-5) > 0.3
    searched = gptq.GptqOptions(static_groups=False, order="given")
    solved = gptq.solve(w, SPECS[name], H, options=searched)
    assert solved.cost < 0.9 * solved.rounded


@pytest.mark.parametrize("name, size", [("uint4/16 with zero points", 16), ("nf4/32", 32)])  # fmt: skip
def test_groups_of_a_block_are_scaled_together(layer, name, size):
    """As the paper's own code does, and Qwix's: a block of 40 holds two groups of 16, or one."""
    w, H = layer
    options = dataclasses.replace(PAPER, static_groups="block", block=40)
    made = gptq.solve(w, SPECS[name], H, options=options).array
    block = 40 // size * size
    wanted = reference_by_groups(w, H, SPECS[name], size, block)
    assert np.mean(np.abs(np.asarray(dequantize(made)) - wanted) > 1e-5) < 0.01
    alone = reference_by_groups(w, H, SPECS[name], size)
    assert (np.abs(alone - wanted).max() > 1e-3) == (block > size)


def test_groups_without_scales_of_their_own_are_refused(layer):
    w, H = layer
    options = dataclasses.replace(PAPER, static_groups=False)
    with pytest.raises(
        ValueError, match="static_groups=False needs a scale of its own"
    ):
        gptq.solve(w, SPECS["nvfp4"], H, options=options)
    with pytest.raises(ValueError, match="order='given'"):
        gptq.GptqOptions(static_groups=False)


@every_spec
def test_gptq_of_inputs_that_have_nothing_in_common_is_rounding(layer, spec):
    w, _ = layer
    made = gptq.solve(w, spec, jnp.eye(64), options=PAPER).array
    plain = quantize_by_spec(w, spec)
    np.testing.assert_array_equal(made.qvalue, plain.qvalue)
    np.testing.assert_array_equal(made.scale, plain.scale)


def test_feeding_errors_back_is_rounding_where_inputs_have_nothing_in_common(layer):
    """`solve` takes rounding where that is cheaper, so this asks the step before it."""
    w, H = layer
    scale = jnp.max(jnp.abs(w), axis=0, keepdims=True) / 7.5
    grid = Grid(Spec("int4").format, jnp.broadcast_to(scale, w.shape))
    alone = gptq._feed_back(w, jnp.eye(64), grid, options=PAPER)
    np.testing.assert_allclose(alone, grid.nearest(w))
    assert not np.allclose(alone, gptq._feed_back(w, H, grid, options=PAPER))


def test_a_weight_of_zeros_costs_nothing(layer):
    _, H = layer
    solved = gptq.solve(jnp.zeros((64, 8)), SPECS["int4/16"], H)
    assert solved.cost == solved.rounded == 0
    assert not np.asarray(dequantize(solved.array)).any()


@pytest.mark.parametrize(
    "spec",
    [SPECS[k] for k in ("uint4/16 with zero points", "nvfp4", "int4, padded tiles")],
    ids=str,
)
def test_solving_never_costs_more_than_rounding(layer, spec):
    w, H = layer
    plain = cost(quantize_by_spec(w, spec), w, H)
    searched = clip.solve(w, spec, jnp.diagonal(H)[None])
    one = gptq.solve(w, spec, H)
    none = gptq.solve(w, spec, H, options=gptq.GptqOptions(rounds=0))
    assert cost(one.array, w, H) <= cost(none.array, w, H) * 1.001 < plain
    assert cost(searched, w, jnp.diag(jnp.diagonal(H))) <= cost(
        quantize_by_spec(w, spec), w, jnp.diag(jnp.diagonal(H))
    )
    whole = np.sum(np.asarray(w) * (np.asarray(H) @ np.asarray(w)))
    np.testing.assert_allclose(one.cost, cost(one.array, w, H) / whole, rtol=1e-2)


def test_parts_of_the_moments_are_solved_by_themselves(layer, key):
    w, H = layer
    other = H + jnp.diag(jnp.arange(64, dtype=jnp.float32)) * 10
    spec = SPECS["int4/16"]
    both = gptq.solve(w, spec, jnp.stack([H, other])[None], options=PAPER).array
    left = gptq.solve(w[:, :6], spec, H, options=PAPER).array
    right = gptq.solve(w[:, 6:], spec, other, options=PAPER).array
    codes = jnp.concatenate([left.qvalue, right.qvalue], axis=1)
    np.testing.assert_array_equal(both.qvalue, codes)


def test_weights_with_common_inputs_are_solved_as_if_alone(layer):
    w, H = layer
    spec = SPECS["int4/16"]
    ws = [w, 2 * w[:, :5], w[:, ::-1]]
    for alone, beside in zip(ws, gptq.solve_together(ws, spec, H)):
        one = gptq.solve(alone, spec, H)
        np.testing.assert_array_equal(beside.array.qvalue, one.array.qvalue)
        np.testing.assert_allclose(beside.array.scale, one.array.scale, rtol=1e-5)
        np.testing.assert_allclose(beside.cost, one.cost, rtol=1e-4)


def test_rows_written_out_are_the_rows_of_a_loop(layer, monkeypatch):
    """As a GPU has them."""
    w, H = layer
    spec = SPECS["nvfp4"]
    loop = gptq.solve(w, spec, H).array
    gptq._solve_once.clear_cache()
    monkeypatch.setattr(gptq, "UNROLLED", {"cpu": 8})
    out = gptq.solve(w, spec, H).array
    gptq._solve_once.clear_cache()
    np.testing.assert_array_equal(dequantize(out), dequantize(loop))


@pytest.mark.parametrize("K", [20, 515, 1030])
def test_squares_are_second_moments(K, key):
    X = jax.random.normal(key, (2, 16, K))
    wanted = np.einsum("btk,btl->bkl", *[np.asarray(X, np.float64)] * 2)
    np.testing.assert_allclose(collect.squares(X), wanted, atol=1e-4)


def test_stacks_of_matrices_in_any_order_of_axes(layer):
    w, H = layer
    # experts last: a weight [N, K, E]
    stack = jnp.stack([w, -2 * w], axis=-1).transpose(1, 0, 2)
    spec = Spec("int4", (0, 2), {1: 16})
    made = gptq.solve(
        stack, spec, jnp.stack([H, 3 * H])[:, None], Axes((2,), (1,), (0,)), PAPER
    )
    alone = gptq.solve(w, SPECS["int4/16"], H, options=PAPER).array
    np.testing.assert_array_equal(made.array.qvalue[..., 0].T, alone.qvalue)
    other = gptq.solve(-2 * w, SPECS["int4/16"], 3 * H, options=PAPER).array
    np.testing.assert_array_equal(made.array.qvalue[..., 1].T, other.qvalue)
    moments = jnp.stack([H, 3 * H])  # [E, K, K], one for all outputs
    same = gptq.solve(stack, spec, moments, Axes((2,), (1,), (0,)), PAPER)
    np.testing.assert_array_equal(made.array.qvalue, same.array.qvalue)


def test_clip_finds_the_best_window(layer):
    w, H = layer
    weights = np.asarray(jnp.diagonal(H), np.float64)[:, None]
    spec = Spec("int4", (1,))
    made = clip.solve(w, spec, jnp.diagonal(H)[None])
    largest = np.abs(np.asarray(w)).max(0)
    least = np.inf
    for factor in clip.windows(spec.format, None):
        scale = (largest * factor / 7.5).astype(np.float32)
        rounded = np.clip(np.round(np.asarray(w) / scale), -8, 7) * scale
        least = np.minimum(least, np.sum(weights * (rounded - w) ** 2, axis=0))
    error = (np.asarray(dequantize(made)) - np.asarray(w)) ** 2
    np.testing.assert_allclose(np.sum(weights * error, axis=0), least, rtol=1e-5)


@every_format
def test_clip_never_costs_more_than_rounding(layer, fmt):
    """Of weights that lie on the grid rounding costs nothing, and so must clip."""
    weight, H = layer
    spec = Spec(fmt, (1,), {0: fmt.tile or 16})
    diagonal = jnp.diagonal(H)
    for w in (weight, dequantize(quantize_by_spec(weight, spec))):
        error = lambda q, w=w: float(jnp.sum(diagonal[:, None] * (dequantize(q) - w) ** 2))  # fmt: skip
        rounded = error(quantize_by_spec(w, spec))
        assert error(clip.solve(w, spec, diagonal[None])) <= rounded * (1 + 1e-5)


def test_nvfp4_blocks_may_end_at_four():
    """A block whose values fall on 4, 3, 2 ... of a scale is exact only under that one."""
    block = jnp.tile(jnp.array([4.0, 3.0, 2.0, 1.5] * 4), 2).at[16].set(6.0)[:, None]
    made = clip.solve(block, Spec("nvfp4", (1,), {0: 16}))
    np.testing.assert_allclose(dequantize(made), block, rtol=0.04)


def test_correct_aims_at_the_floats_output():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(500, 16))
    floats = x + 0.1 * rng.normal(size=x.shape) @ rng.normal(size=(16, 16))
    w = rng.normal(size=(16, 4)).astype(np.float32)
    stack = lambda m: jnp.asarray(m.astype(np.float32))[None, None]
    H, C = x.T @ x, x.T @ (floats - x)
    made = correct.target(
        jnp.asarray(w), stack(H), stack(C), damping=1e-6, strength=1.0
    )
    wanted = np.linalg.lstsq(x, floats @ w, rcond=None)[0]
    np.testing.assert_allclose(made, wanted, atol=1e-3)


def test_smooth_is_the_papers(layer):
    w, _ = layer
    largest = np.linspace(0, 9, 64).astype(np.float32)
    factors = smooth.smooth(w, jnp.asarray(largest)[None], alpha=0.7)[0]
    rows = np.abs(np.asarray(w)).max(1)
    np.testing.assert_allclose(
        1 / factors[1:], largest[1:] ** 0.7 / rows[1:] ** 0.3, rtol=1e-5
    )
    assert factors[0] == 1  # an input that is always 0


def test_awq_takes_the_best_ratio(layer):
    w, H = layer
    spec = SPECS["int4/16"]
    H = H * jnp.outer(*[jnp.linspace(1, 8, 64)] * 2)
    size = np.sqrt(np.diag(H))

    def error(p):
        q = quantize_by_spec(w / p[:, None], spec).replace(pre_scale=p[:, None])
        return cost(q, w, H)

    tried = []
    for ratio in np.arange(20) / 20:
        p = size**-ratio
        tried.append(error(jnp.asarray(p / np.sqrt(p.max() * p.min()))))
    found = error(smooth.awq(w, spec, H[None, None])[0])
    # Roundings that flip between two programs let neighbouring ratios change places.
    assert found < 1.1 * min(tried) < tried[0]


def test_factors_of_inputs_change_nothing_in_float(layer, key):
    w, H = layer
    x = jax.random.normal(key, (5, 64))
    p = smooth.awq(w, SPECS["int4/16"], H[None, None])[0][:, None]
    fine = Spec("int16", (1,))
    q = quantize_by_spec(w / p, fine).replace(pre_scale=p)
    np.testing.assert_allclose(dot(x, q), x @ w, rtol=1e-3, atol=2e-3)
    np.testing.assert_allclose(dequantize(q), w, atol=2e-4)


def test_hqq_lets_a_few_large_weights_be(key):
    w = jax.random.normal(key, (64, 6)).at[3].set(8.0)
    size = lambda q, norm: float(jnp.sum(jnp.abs(dequantize(q) - w) ** norm))
    for spec in (Spec("uint4", (1,), calibration="minmax"), Spec("int4", (1,))):
        made, squares = hqq.solve(w, spec), clip.solve(w, spec)
        assert size(made, 0.7) < size(quantize_by_spec(w, spec), 0.7)
        assert size(made, 0.7) < size(squares, 0.7)
        if made.zero_point is None:  # the same grids to choose from
            assert size(made, 2) > size(squares, 2)


def test_moments_that_do_not_fit_are_refused(layer):
    w, H = layer
    with pytest.raises(ValueError, match="do not fit a weight"):
        gptq.solve(w, SPECS["int4"], H[:32, :32])
    with pytest.raises(ValueError, match="do not fit a weight"):
        gptq.solve(w, SPECS["int4"], H[0])
    with pytest.raises(ValueError, match="not finite"):
        gptq.solve(w, SPECS["int4"], H.at[0, 0].set(jnp.nan))
    with pytest.raises(ValueError, match="order='up' should be one of"):
        gptq.GptqOptions(order="up")


@pytest.mark.parametrize(
    "asked, message",
    [
        ({"damping": 0}, "damping=0 should be a number above 0"),
        ({"damping": float("nan")}, "damping=nan should be a number above 0"),
        ({"rounds": -1}, "rounds=-1 should be a whole number from 0 on"),
        ({"rounds": 1.5}, "rounds=1.5 should be a whole number from 0 on"),
        ({"block": 0}, "block=0 should be a whole number from 1 on"),
    ],
)
def test_options_of_gptq_are_checked(asked, message):
    with pytest.raises(ValueError, match=message):
        gptq.GptqOptions(**asked)
