"""Smooth: a factor per input, taken from the inputs and given to the weight, or back.

    x W = (x * p) (W / p)          p of every input, kept as the QArray's pre_scale

The codes are those of W / p, and a matmul multiplies its other operand by p before that is
quantized, or used. Two ways to choose p:

    smooth   1 / (max|x|^alpha / max|w|^(1 - alpha)): inputs lose range to the weight, so
             that both have some (Xiao et al. 2022, SmoothQuant). For quantized inputs
    awq      1 / rms(x)^ratio, with the ratio of a grid that leaves the least error of the
             layer's output: rows that large inputs meet are rounded more finely (Lin et
             al. 2023, AWQ). For inputs in float
"""

import functools

import jax
import jax.numpy as jnp

from midtread.algorithms.weight import MATRIX, Axes, as_matrices, over_inputs
from midtread.numerics.qarray import dequantize, quantize_by_spec
from midtread.numerics.spec import Spec


@functools.partial(jax.jit, static_argnames=("axes", "alpha"))
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
    rows = jnp.max(jnp.abs(as_matrices(w.astype(jnp.float32), axes)), axis=-1)
    usable = (largest > 0) & (rows > 0)
    safe = lambda x: jnp.where(usable, x, 1.0)
    move = safe(largest) ** alpha / safe(rows) ** (1 - alpha)
    return jnp.where(usable, 1 / jnp.clip(move, 1e-5, 1e5), 1.0)


@functools.partial(jax.jit, static_argnames=("spec", "axes", "num"))
def awq(
    w: jax.Array,
    spec: Spec,
    H: jax.Array,
    axes: Axes = MATRIX,
    num: int = 20,
) -> jax.Array:
    """AWQ's factors, [E, K]: the ratio of 0, 1/num, ... that leaves the least error.

    Args:
        w: a weight.
        spec: how w / p will be quantized.
        H: second moments of the inputs, [E, G, K, K].

    Returns:
        What inputs are multiplied by; 1 for all where nothing is better.
    """
    H = H.mean(1)
    size = jnp.sqrt(jnp.diagonal(H, axis1=-2, axis2=-1))
    size = jnp.where(size > 0, size, jnp.max(size, axis=-1, keepdims=True))
    W = as_matrices(w.astype(jnp.float32), axes)

    def factors(ratio):
        p = size ** (-ratio)  # balanced around 1, as in the paper
        p = p / jnp.sqrt(jnp.max(p, -1, keepdims=True) * jnp.min(p, -1, keepdims=True))
        return jnp.where(jnp.isfinite(p) & (p > 0), p, 1.0)

    def cost(ratio):
        p = over_inputs(factors(ratio), axes, w.shape)
        q = quantize_by_spec((w / p).astype(w.dtype), spec)
        error = as_matrices(dequantize(q).astype(jnp.float32) * p, axes) - W
        return jnp.sum(error * (H @ error))

    ratios = jnp.arange(num, dtype=jnp.float32) / num
    return factors(ratios[jnp.argmin(jax.lax.map(cost, ratios))])
