"""Smooth: a factor per input, taken from the inputs and given to the weight, or back.

    x W = (x * p) (W / p)          p of every input, the QArray's pre_scale, or folded

The codes are those of W / p, and a matmul multiplies its other operand by p before that is
quantized, or used. Two ways to choose p:

    smooth   1 / (max|x|^alpha / max|w|^(1 - alpha)): inputs lose range to the weight, so
             that both have some (Xiao et al. 2022, SmoothQuant). For quantized inputs
    awq      1 / rms(x)^ratio, with the ratio of a grid that leaves the least error of the
             layer's output: rows that large inputs meet are rounded more finely (Lin et
             al. 2023, AWQ). For inputs in float

Weights that read the same input may share their factors (fold.py says where that is worth
it): then ranges are those of all of them, and errors are added. Inputs that are tied, because
they come from one output, share a factor as well.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from midtread.algorithms.weight import MATRIX, Axes, as_matrices, over_inputs
from midtread.numerics.qarray import dequantize, quantize_by_spec
from midtread.numerics.spec import Spec


def smooth(
    w: jax.Array, largest: jax.Array, axes: Axes = MATRIX, alpha: float = 0.5
) -> jax.Array:
    """SmoothQuant's factors, [E, K].

    >>> w = jnp.array([[1.0, -0.5], [0.25, 0.25]])
    >>> smooth(w, jnp.array([[16.0, 1.0]])).tolist()
    [[0.25, 0.5]]

    Args:
        w: a weight.
        largest: [E, K], the largest |x| of every input.
        alpha: how much of the inputs' range moves to the weight.

    Returns:
        What inputs are multiplied by; 1 where an input or its row is always 0.
    """
    return smooth_together([w], largest, (axes,), alpha)


@functools.partial(jax.jit, static_argnames=("axes", "alpha"))
def smooth_together(
    weights: Sequence[jax.Array],
    largest: jax.Array,
    axes: tuple[Axes, ...],
    alpha: float = 0.5,
    ties: jax.Array | None = None,
) -> jax.Array:
    """SmoothQuant's factors of weights that share their input.

    Args:
        weights, axes: of every weight.
        largest, alpha: as for `smooth`.
        ties: [K], inputs with the same number have the same factor.
    """
    rows = [
        jnp.max(jnp.abs(as_matrices(w.astype(jnp.float32), a)), axis=-1)
        for w, a in zip(weights, axes)
    ]
    rows = functools.reduce(jnp.maximum, rows)
    rows, largest = (_tied(x, ties, jax.ops.segment_max) for x in (rows, largest))
    usable = (largest > 0) & (rows > 0)
    safe = lambda x: jnp.where(usable, x, 1.0)
    move = safe(largest) ** alpha / safe(rows) ** (1 - alpha)
    return jnp.where(usable, 1 / jnp.clip(move, 1e-5, 1e5), 1.0)


def awq(
    w: jax.Array,
    spec: Spec,
    H: jax.Array,
    axes: Axes = MATRIX,
    num: int = 20,
    *,
    to_one: bool = False,
) -> jax.Array:
    """AWQ's factors, [E, K]: the ratio of 0, 1/num, ... that leaves the least error.

    Args:
        w: a weight.
        spec: how w / p will be quantized.
        H: second moments of the inputs, [E, G, K, K].
        num: how many ratios are tried.
        to_one: ratios end with 1, as Qwix's do, instead of before it.

    Returns:
        What inputs are multiplied by; 1 for all where nothing is better.
    """
    return awq_together([w], (spec,), [H], (axes,), num, to_one=to_one)


@functools.partial(jax.jit, static_argnames=("specs", "axes", "num", "to_one"))
def awq_together(
    weights: Sequence[jax.Array],
    specs: tuple[Spec, ...],
    moments: Sequence[jax.Array],
    axes: tuple[Axes, ...],
    num: int = 20,
    ties: jax.Array | None = None,
    to_one: bool = False,
) -> jax.Array:
    """AWQ's factors of weights that share their input: errors are those of all outputs.

    Args:
        weights, specs, moments, axes: of every weight, as for `awq`.
        num, to_one: which ratios are tried, as for `awq`.
        ties: [K], inputs with the same number have the same factor.
    """
    moments = [H.mean(1) for H in moments]
    squares = jnp.diagonal(moments[0], axis1=-2, axis2=-1)
    size = jnp.sqrt(_tied(squares, ties, jax.ops.segment_max))
    size = jnp.where(size > 0, size, jnp.max(size, axis=-1, keepdims=True))

    def factors(ratio):
        p = size ** (-ratio)  # balanced around 1, as in the paper
        p = p / jnp.sqrt(jnp.max(p, -1, keepdims=True) * jnp.min(p, -1, keepdims=True))
        return jnp.where(jnp.isfinite(p) & (p > 0), p, 1.0)

    def cost(ratio):
        total = jnp.float32(0)
        for w, spec, H, own in zip(weights, specs, moments, axes):
            p = over_inputs(factors(ratio), own, w.shape)
            q = quantize_by_spec((w / p).astype(w.dtype), spec)
            error = as_matrices(dequantize(q).astype(jnp.float32) * p - w, own)
            total += jnp.sum(error * (H @ error))
        return total

    ratios = jnp.arange(num, dtype=jnp.float32) / (num - to_one)
    return factors(ratios[jnp.argmin(jax.lax.map(cost, ratios))])


def _tied(x: jax.Array, ties: jax.Array | None, pool) -> jax.Array:
    """`x` [E, K] with what is tied pooled."""
    if ties is None:
        return x
    return jax.vmap(lambda row: pool(row, ties, num_segments=len(row))[ties])(x)
