"""Choose: which implementation runs a contraction, by device, shapes and formats.

    weight_only(...)    float x codes: an array, or None for the plain path in ops/engine.py

A choice changes the time, never the meaning: what a kernel does not take (zero points,
odd layouts, sharded arrays) is left to XLA.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

from midtread.kernels import cpu, xla
from midtread.numerics import views
from midtread.numerics.dtypes import is_wide
from midtread.numerics.qarray import QArray

Labels = tuple[str, ...]


def weight_only(
    lhs_labels: Labels, rhs_labels: Labels, out_labels: Labels, lhs, rhs, precision=None
) -> jax.Array | None:
    """A float operand times a QArray, scaled, in float32 and in the order of `out_labels`."""
    x, w, x_labels, w_labels = lhs, rhs, lhs_labels, rhs_labels
    if isinstance(lhs, QArray):
        x, w, x_labels, w_labels = rhs, lhs, rhs_labels, lhs_labels
    if xla.platform() != "cpu" or not _is_plain_weight(x, w):
        return None
    summed = tuple(a for a, label in enumerate(w_labels) if label not in out_labels)
    kept = tuple(a for a in range(w.ndim) if a not in summed)
    matrix = cpu.stored(w.qvalue.shape, summed)
    if not summed or matrix is None or any(w_labels[a] in x_labels for a in kept):
        return None
    x_MK = cpu.rows(x, tuple(x_labels.index(w_labels[a]) for a in summed))
    scale = w.scale.astype(jnp.float32)
    if w.global_scale is not None:
        scale = scale * w.global_scale.astype(jnp.float32)

    inner = None  # the part of the scale that must be applied before the sum
    if any(scale.shape[a] > 1 for a in summed):
        inner = _as_matrix(scale, w.qvalue.shape, summed, kept)
        if inner is None:
            return None
    counts = (1, 1) if inner is None else inner.shape
    if not cpu.supports(w.format, matrix[0], x_MK.shape[0], counts):
        return None
    codes_RC = w.qvalue.reshape(matrix[0])
    how = {"fmt": w.format, "summed": matrix[1], "precision": precision}
    out = cpu.dot(x_MK, codes_RC, inner, **how)

    extents = [w.qvalue.shape[a] for a in kept]
    if inner is None:
        counts = [scale.shape[a] for a in kept]
        scale = (
            views.expand(scale.reshape(counts), extents) if scale.size > 1 else scale
        )
        out = out * scale.reshape(1, -1)
    alone = [a for a, label in enumerate(x_labels) if label in out_labels]
    labels = [x_labels[a] for a in alone] + [w_labels[a] for a in kept]
    out = out.reshape(*(x.shape[a] for a in alone), *extents)
    return out.transpose([labels.index(label) for label in out_labels])


def _is_plain_weight(x, w) -> bool:
    """Codes and scales alone, against a float array on the same device."""
    if isinstance(x, QArray) or not isinstance(w, QArray) or not is_wide(x.dtype):
        return False
    if w.zero_point is not None or w.pre_scale is not None:
        return False
    doubles = np.dtype(np.float64) in (x.dtype, w.scale.dtype)
    return not doubles and cpu.is_local(x, w.qvalue, w.scale)


def _as_matrix(scale, shape, summed, kept) -> jax.Array | None:
    """[r, c]: a scale of the weight's rank over the axes of its matrix; None if tiles of
    several axes do not merge into one run."""
    if any(scale.shape[a] > 1 for a in kept):
        full = [n if a in kept else scale.shape[a] for a, n in enumerate(shape)]
        scale = views.expand(scale, full)
    partial = [a for a in summed if scale.shape[a] < shape[a]]
    if any(scale.shape[a] > 1 for a in summed if partial and a > partial[0]):
        return None
    sides = [math.prod(scale.shape[a] for a in axes) for axes in (summed, kept)]
    return scale.reshape(sides if 0 in summed else sides[::-1])
