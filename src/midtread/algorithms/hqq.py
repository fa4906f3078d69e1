"""HQQ: scales and zero points without data, robust to a few large weights.

Badri & Shaji 2023 choose zero points by  sum |w - rounded(w)|^p  with p < 1: such a norm lets
a few large errors be, where squares would widen the window for them, and so most weights are
rounded more finely. Their half-quadratic solver splits that in two steps that have answers,
with an error e of its own for every weight and scales as they are:

    e = shrink(w - rounded(w))        shrink(x) = sign(x) max(0, |x| - |x|^(p-1) / beta)
    z = mean over the tile of  code - (w - e) / scale        beta grows by 1% a turn

A zero point is then any number, kept as a float beside the codes. Of all turns, each tile takes
the one that has the least of the norm, so that none is worse than it began. Formats without
zero points have their scales searched under the same norm instead (clip.py).
"""

import functools

import jax
import jax.numpy as jnp

from midtread.algorithms import clip
from midtread.algorithms.weight import encode
from midtread.numerics import rounding, views
from midtread.numerics.qarray import QArray, calibrate, scales_of
from midtread.numerics.spec import Spec

BETA, KAPPA, TURNS = 10.0, 1.01, 20  # of the paper


def solve(w: jax.Array, spec: Spec, norm: float = 0.7) -> QArray:
    """`w` under the scales and zero points with the least |error|^norm.

    >>> w = jax.random.normal(jax.random.key(0), (64, 8)).at[3].set(9.0)
    >>> solve(w, Spec("uint4", (1,), {0: 32}, calibration="minmax")).zero_point.shape
    (2, 8)

    Args:
        w: a weight.
        spec: how it is quantized; calibration="minmax" for zero points.
        norm: below 1, the smaller the less large errors count.

    Returns:
        A QArray under `spec`; its zero points are floats.
    """
    padded, _ = spec.layout(w.shape)
    if not spec.calibration.is_asymmetric or spec.method == "fixed":
        scales = clip.search(w, spec, norm=norm)
        return encode(views.pad_to(w, padded), spec, scales, w.shape)
    return _solve(w, spec, norm)


@functools.partial(jax.jit, static_argnames=("spec", "norm"))
def _solve(w: jax.Array, spec: Spec, norm: float) -> QArray:
    padded, _ = spec.layout(w.shape)
    scales = scales_of(calibrate(w, spec), spec)
    scales = scales._replace(scale=scales.scale.astype(w.dtype))
    zero = half_quadratic(w, spec, scales.scale, scales.zero_point, norm)
    scales = scales._replace(zero_point=zero)
    return encode(views.pad_to(w, padded), spec, scales, w.shape)


def half_quadratic(
    w: jax.Array,
    spec: Spec,
    scale: jax.Array,
    zero_point: jax.Array,
    norm: float = 0.7,
    turns: int = TURNS,
) -> jax.Array:
    """The zero points of all tiles, as floats.

    Args:
        scale, zero_point: of every tile, to begin with.
        turns: of the two steps.
    """
    padded, counts = spec.layout(w.shape)
    split, inside = views.split(padded, counts)
    over = lambda part: views.expand(part.astype(jnp.float32), padded)
    sums = lambda x: jnp.sum(x.reshape(split), axis=inside).reshape(counts)
    is_real = views.pad_to(jnp.ones(w.shape), padded)
    w, s = views.pad_to(w.astype(jnp.float32), padded), over(scale)
    fmt = spec.format

    def codes(z):
        coded = rounding.encode(w * (1 / s) + over(z), fmt)
        return rounding.decode(coded, fmt).astype(jnp.float32)

    def size(z):
        error = w - (codes(z) - over(z)) * s
        return sums(is_real * jnp.abs(error) ** norm)

    def turn(number, state):
        z, best, least = state
        q = codes(z)
        error = w - (q - over(z)) * s
        magnitude = jnp.abs(error)
        shrunk = magnitude - jnp.where(magnitude > 0, magnitude, 1.0) ** (norm - 1) / (
            BETA * KAPPA**number
        )
        e = jnp.sign(error) * jnp.maximum(shrunk, 0)
        z = sums(is_real * (q - (w - e) * (1 / s))) / sums(is_real)
        cost = size(z)
        better = cost < least
        return z, jnp.where(better, z, best), jnp.minimum(cost, least)

    z = zero_point.astype(jnp.float32)
    _, best, _ = jax.lax.fori_loop(0, turns, turn, (z, z, size(z)))
    return best
