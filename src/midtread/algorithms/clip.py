"""Clip: scales by least squared error, each element weighted by what its error costs.

    scale of a tile = argmin over windows f * absmax of  sum weight * (w - rounded(w))^2

With weights from the diagonal of the inputs' second moments (E[x_k^2] for every element of
row k) the sum is the error of the layer's output, as far as one can tell without what
inputs have in common. Without them it is the mean squared error, which spends its care on
rows that hardly matter: on SmolLM2-135M it was worse than absmax per channel.

Windows wider than the largest value are tried as well: four bits of a float have no 5, and
a block whose largest value is put on 4 instead of 6 has finer steps there ("four over
six"). Formats whose scales are powers of two have two or three windows to choose from.
A scale in two levels keeps its upper level, which is of the whole tensor, while the tiles'
own are searched.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from midtread.algorithms.weight import MATRIX, Axes, encode, over_inputs
from midtread.numerics import views
from midtread.numerics.dtypes import wide_dtype
from midtread.numerics.formats import Format, as_format
from midtread.numerics.qarray import (
    QArray,
    calibrate,
    dequantize,
    quantize_to_scale,
    scales_of,
    settled,
)
from midtread.numerics.rounding import encode as to_codes
from midtread.numerics.scales import Scales
from midtread.numerics.spec import Spec

_E4M3 = as_format("e4m3")


def windows(fmt: Format, rule: str | None) -> np.ndarray:
    """Factors of absmax to try: 1 is among them, so that no search does worse than absmax."""
    if (rule or fmt.scale or "").startswith("pow2"):
        return np.array([1.0, 0.5, 2.0, 0.25], np.float32)
    if fmt.grid is not None and fmt.bits <= 6:
        return np.linspace(1.6, 0.5, 34, dtype=np.float32)
    if fmt.bits >= 8:
        return np.linspace(1.0, 0.6, 17, dtype=np.float32)
    return np.append(np.linspace(1.1, 0.35, 38), 1.0).astype(np.float32)


def solve(
    w: jax.Array,
    spec: Spec,
    diagonal: jax.Array | None = None,
    axes: Axes = MATRIX,
) -> QArray:
    """`w` rounded under the scales that lose least.

    >>> from midtread.numerics.qarray import quantize_by_spec
    >>> w = jax.random.normal(jax.random.key(0), (64, 8))
    >>> spec = Spec("int4", channelwise_axes=(1,))
    >>> error = lambda q: float(jnp.sum((w - dequantize(q)) ** 2))
    >>> error(solve(w, spec)) < error(quantize_by_spec(w, spec))
    True

    Args:
        w: a weight.
        spec: how it is to be quantized; its calibration gives the widest window.
        diagonal: [E, K], what an error in each input's row costs; None: all the same.
        axes: which axes of `w` are inputs.

    Returns:
        A QArray under `spec`.
    """
    weights = None if diagonal is None else over_inputs(diagonal, axes, w.shape)
    scales = search(w, spec, weights)
    padded, _ = spec.layout(w.shape)
    return encode(views.pad_to(w, padded), spec, scales, w.shape)


@functools.partial(jax.jit, static_argnames=("spec", "norm"))
def search(
    w: jax.Array, spec: Spec, weights: jax.Array | None = None, norm: float = 2.0
) -> Scales:
    """The scale of every tile with the least weighted error.

    Args:
        w: the weight; `weights` broadcast over it.
        spec: how it is to be quantized.
        norm: an error counts as its magnitude to this power.

    Returns:
        Scales as `spec` stores them, zero points where it has them.
    """
    widest = calibrate(w, spec)
    if spec.method == "fixed":
        return _settle(scales_of(widest, spec), w.dtype)
    padded, counts = spec.layout(w.shape)
    cost = jnp.ones((1,) * w.ndim) if weights is None else weights
    cost = jnp.broadcast_to(cost.astype(jnp.float32), w.shape)
    w, cost = views.pad_to(w, padded), views.pad_to(cost, padded)
    split, inside = views.split(padded, counts)
    factors = windows(spec.format, spec.scale_rule)
    at = functools.partial(_scales_at, spec, widest, float(factors.max()), w.dtype)

    def loss_of(scales: Scales) -> jax.Array:
        q = quantize_to_scale(w, spec.format, scales.scale, scales.zero_point)
        size = jnp.abs(w.astype(jnp.float32) - dequantize(q, jnp.float32))
        error = cost * (jnp.square(size) if norm == 2 else size**norm)
        return jnp.sum(error.reshape(split), axis=inside).reshape(counts)

    def better(best, factor):
        scales = at(factor)
        loss = loss_of(scales)
        wins = loss < best[0]
        pick = lambda new, old: jnp.where(wins, new, old)
        kept = jax.tree.map(pick, (scales.scale, scales.zero_point), best[1:])
        return (pick(loss, best[0]), *kept), None

    first = at(jnp.float32(1.0))
    start = (jnp.full(counts, jnp.inf), first.scale, first.zero_point)
    if first.scale.shape != counts:  # one window for all tiles
        raise ValueError(f"a search for scales needs one window per tile, not {spec}.")
    (loss, scale, zero_point), _ = jax.lax.scan(better, start, jnp.asarray(factors))
    scales = Scales(scale, zero_point, first.global_scale)
    if first.global_scale is None:
        return scales
    # The upper level is another than that of plain rounding, which may be luckier with it.
    plain = _settle(scales_of(widest, spec), w.dtype)
    is_worse = jnp.sum(loss_of(plain)) < jnp.sum(loss)
    return jax.tree.map(lambda a, b: jnp.where(is_worse, b, a), scales, plain)


def _scales_at(spec: Spec, widest: dict, most: float, dtype, factor) -> Scales:
    """Scales for windows of `factor` times the widest; the upper level of two stays."""
    wide = {k: v.astype(wide_dtype(v.dtype)) * factor for k, v in widest.items()}
    if (spec.scale_rule or spec.format.scale) != "two_level":
        return _settle(scales_of(wide, spec), dtype)
    largest = scales_of({k: v * most for k, v in widest.items()}, spec)
    top = largest.global_scale
    assert top is not None
    block = wide["absmax"].astype(jnp.float32) / (spec.format.bound * top)
    block = jnp.where(block > 0, jnp.clip(block, 2.0**-9, 448.0), 1.0)
    block = to_codes(block, _E4M3).astype(jnp.float32)
    return _settle(Scales(block * top, None, top), dtype)


def _settle(scales: Scales, dtype) -> Scales:
    """Scales as they are stored beside an array of `dtype`."""
    return scales._replace(scale=settled(scales.scale.astype(dtype)))
