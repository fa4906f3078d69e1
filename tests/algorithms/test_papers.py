"""Algorithms against plain NumPy written from their papers: HQQ, AWQ, learned rounding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from midtread.algorithms import clip, correct, hqq, learn, smooth
from midtread.numerics.qarray import dequantize, quantize_by_spec
from midtread.numerics.spec import Spec

# --- HQQ: Badri & Shaji 2023 ------------------------------------------------------------------


def shrink(x, beta, p):
    magnitude = np.abs(x)
    with np.errstate(divide="ignore"):
        less = np.where(magnitude > 0, magnitude ** (p - 1), 0) / beta
    return np.sign(x) * np.maximum(magnitude - less, 0)


def reference_hqq(w, scale, zero, p=0.7, beta=10.0, kappa=1.01, turns=20):
    """Zero points of groups w [groups, inside, N], all in float64; the best turn of each."""
    size = lambda z: np.sum(np.abs(w - (codes(z) - z) * scale) ** p, axis=1)
    codes = lambda z: np.clip(np.round(w / scale + z), 0, 15)
    best, least = zero.copy(), size(zero)
    for turn in range(turns):
        q = codes(zero)
        e = shrink(w - (q - zero) * scale, beta * kappa**turn, p)
        zero = np.mean(q - (w - e) / scale, axis=1, keepdims=True)
        better = (size(zero) < least)[:, None]
        best, least = np.where(better, zero, best), np.minimum(size(zero), least)
    return best


@pytest.mark.parametrize("outlier", [0.0, 6.0])
def test_hqq_is_the_papers(outlier, key):
    w = jax.random.normal(key, (64, 6)) + 0.3
    w = w.at[3].add(outlier)
    spec = Spec("uint4", (1,), {0: 16}, calibration="minmax")
    start = quantize_by_spec(w, spec)
    made = hqq.solve(w, spec)
    groups = np.asarray(w, np.float64).reshape(4, 16, 6)
    part = lambda x: np.asarray(x, np.float64)[:, None]
    zero = reference_hqq(groups, part(start.scale), part(start.zero_point))
    # A tie that float32 breaks the other way moves the mean of its group by a sixteenth.
    gap = np.abs(np.asarray(made.zero_point) - zero[:, 0])
    assert np.mean(gap > 1e-4) <= 0.05, gap
    np.testing.assert_array_equal(made.scale, start.scale)
    size = lambda q: np.sum(np.abs(np.asarray(dequantize(q) - w)) ** 0.7)
    assert size(made) < size(start)
    # Served as it is: real zero points are multiplied like any.
    x = jax.random.normal(key, (3, 64))
    from midtread.ops.api import dot

    np.testing.assert_allclose(dot(x, made), x @ dequantize(made), rtol=1e-4, atol=1e-4)


# --- AWQ: Lin et al. 2023 ---------------------------------------------------------------------


def test_awq_is_the_papers(key):
    # Positive, since the largest of a group lies on a tie if it is negative.
    w = np.abs(np.asarray(jax.random.normal(key, (32, 6))))
    x = np.asarray(jax.random.normal(key, (80, 32))) * np.geomspace(0.1, 10, 32)
    H = (x.T @ x).astype(np.float32)
    got = smooth.awq(jnp.asarray(w), Spec("int4", (1,), {0: 16}), jnp.asarray(H)[None, None])[0]  # fmt: skip
    size, best = np.sqrt(np.diag(H)), (np.inf, None)
    for ratio in np.arange(20) / 20:
        p = size ** np.float32(-ratio)
        p = p / np.sqrt(p.max() * p.min())
        groups = (w / p[:, None]).reshape(2, 16, 6)
        scale = np.abs(groups).max(1, keepdims=True) / np.float32(7.5)
        codes = np.clip(np.round(groups * (1 / scale)), -8, 7)
        error = (codes * scale).reshape(w.shape) * p[:, None] - w
        cost = np.sum(error * (H.astype(np.float64) @ error))
        best = min(best, (cost, tuple(p)))
    np.testing.assert_allclose(got, best[1], rtol=1e-5)


# --- four over six: the better of two scales of a block of nvfp4 ------------------------------

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
E2M1 = np.concatenate([-E2M1[:0:-1], E2M1])


def test_blocks_of_nvfp4_take_the_better_of_their_scales(key):
    """No block is worse than with its largest value on 6, nor on 4, both scales in e4m3."""
    w = jax.random.normal(key, (64, 8))
    spec = Spec("nvfp4", (1,), {0: 16})
    got = np.asarray(dequantize(clip.solve(w, spec)), np.float64)
    blocks = lambda m: np.asarray(m, np.float64).reshape(4, 16, 8)
    # The upper level is chosen so that the widest window fits under e4m3's largest number.
    factors = clip.windows(spec.format, None)
    top = np.abs(w).max() * factors.max() / (6 * 448)
    error = lambda m: np.sum((blocks(m) - blocks(w)) ** 2, axis=1)
    for end in (6, 4):
        scale = np.abs(blocks(w)).max(1, keepdims=True) / end
        scale = np.asarray(jnp.asarray(scale / top).astype(jnp.float8_e4m3fn), np.float64) * top  # fmt: skip
        units = blocks(w) / scale
        nearest = E2M1[np.abs(units[..., None] - E2M1).argmin(-1)] * scale
        # A window of the grid lies within a sixtieth of either.
        assert (error(got) <= 1.05 * error(nearest)).all()


# --- corrections: Arai & Ichikawa 2025, equation 5 --------------------------------------------


def test_correct_is_the_papers():
    rng = np.random.default_rng(1)
    x = rng.normal(size=(200, 12))
    floats = x + 0.2 * rng.normal(size=x.shape)
    w = rng.normal(size=(12, 5))
    H, C = x.T @ x, x.T @ (floats - x)
    damped = H + 0.01 * np.mean(np.diag(H)) * np.eye(12)
    wanted = w + 0.5 * np.linalg.inv(damped) @ C @ w
    stack = lambda m: jnp.asarray(m, jnp.float32)[None, None]
    got = correct.target(jnp.asarray(w, jnp.float32), stack(H), stack(C))
    np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5)


# --- learned rounding: latents that cross over, by Adam's steps -------------------------------


def test_learned_codes_are_those_of_plain_steps(key):
    w = np.asarray(jax.random.normal(key, (8, 3)), np.float64)
    q = quantize_by_spec(jnp.asarray(w, jnp.float32), Spec("int4", (1,)))
    scale = np.asarray(q.scale, np.float64)
    x = np.asarray(jax.random.normal(jax.random.key(5), (40, 8)), np.float64)
    x = x @ (np.tri(8) + 0.1)
    H = x.T @ x / len(x)
    codes = np.asarray(q.qvalue, np.float64)
    # Latents begin half the way to the weight.
    edge = np.clip(w / scale, codes - 0.5, codes + 0.5)
    units = codes + 0.5 * (edge - codes)
    state = learn.start(jnp.asarray(w, jnp.float32), q)
    np.testing.assert_allclose(state.units, units, atol=5e-3)
    units = np.asarray(state.units, np.float64)
    gain, mean, square = np.zeros((1, 3)), [0, 0], [0, 0]
    for number in range(1, 31):
        rounded = np.clip(np.round(units), -8, 7)
        g = 2 * H @ (rounded * scale * np.exp(gain) - w)
        state = learn.step(state, q, jnp.asarray(g, jnp.float32), number, (0.05, 0.002))
        slopes = g * scale, np.sum(g * scale * rounded, axis=0, keepdims=True)
        for i, slope in enumerate(slopes):
            mean[i] = 0.9 * mean[i] + 0.1 * slope
            square[i] = 0.99 * square[i] + 0.01 * slope**2
        sizes = [np.sqrt(s / (1 - 0.99**number)) for s in square]
        steps = [m / (1 - 0.9**number) / s for m, s in zip(mean, sizes)]
        units = np.clip(units - 0.05 * steps[0], -8.5, 7.5)
        gain = gain - 0.002 * steps[1]
    np.testing.assert_allclose(state.units, units, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(state.gain, gain, rtol=1e-3, atol=1e-5)
    made = learn.codes(state, q)
    np.testing.assert_array_equal(
        np.asarray(made.qvalue, np.float64), np.clip(np.round(units), -8, 7)
    )
