"""Choose weights: rows against a stored weight, by the kernel for so many of them.

    weight_only(...)   float x codes: an array, or None for the plain path in ops/engine.py
    few_rows(...)      codes x codes, where few rows may as well be in bfloat16

A weight is seen as a matrix as it lies in memory, and its scale as a vector over columns or
as a matrix over groups of the sum. Then it depends on the platform and on the rows:

    a CPU                cpu.py
    up to MAX_ROWS       weight_matmul/few_rows.py, on NVIDIA GPUs
    more                 weight_matmul/many_rows.py, on Hopper
"""

import math
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np

from midtread.kernels import cpu, wanted, xla
from midtread.numerics import formats, views
from midtread.numerics.dtypes import is_wide
from midtread.numerics.qarray import QArray, dequantize

Labels = tuple[str, ...]


def _for_few() -> ModuleType:
    """Imported on use: Pallas is large, and of no use without a GPU."""
    from midtread.kernels.weight_matmul import few_rows

    return few_rows


def _for_many() -> ModuleType:
    from midtread.kernels.weight_matmul import many_rows

    return many_rows


def is_few(num_rows: int) -> bool:
    """Whether a GPU's kernels for few rows take so many."""
    return num_rows <= _for_few().MAX_ROWS


def weight_only(
    lhs_labels: Labels,
    rhs_labels: Labels,
    out_labels: Labels,
    lhs,
    rhs,
    precision=None,
    dtype=jnp.float32,
) -> jax.Array | None:
    """A float operand times a QArray, scaled in float32, in `dtype` and in the order of
    `out_labels`."""
    x, w, x_labels, w_labels = lhs, rhs, lhs_labels, rhs_labels
    if isinstance(lhs, QArray):
        x, w, x_labels, w_labels = rhs, lhs, rhs_labels, lhs_labels
    if not is_plain_weight(x, w):
        return None
    summed = tuple(a for a, label in enumerate(w_labels) if label not in out_labels)
    kept = tuple(a for a in range(w.ndim) if a not in summed)
    matrix = cpu.stored(w.qvalue.shape, summed)
    if not summed or matrix is None or any(w_labels[a] in x_labels for a in kept):
        return None
    x_MK = cpu.rows(x, tuple(x_labels.index(w_labels[a]) for a in summed))
    scale = w.scale
    if w.global_scale is not None:
        scale = scale.astype(jnp.float32) * w.global_scale.astype(jnp.float32)

    inner = None  # the part of the scale that must be applied before the sum
    if any(scale.shape[a] != 1 for a in summed):
        inner = _as_matrix(scale, w.qvalue.shape, summed, kept)
        if inner is None:
            return None
    extents, last = [w.qvalue.shape[a] for a in kept], None
    if inner is None:
        counts = [scale.shape[a] for a in kept]
        last = views.expand(scale.reshape(counts), extents).reshape(-1)
    out = _weight_dot(x_MK, w, matrix, inner, last, precision, dtype)
    if out is None:
        return None
    alone = [a for a, label in enumerate(x_labels) if label in out_labels]
    labels = [x_labels[a] for a in alone] + [w_labels[a] for a in kept]
    out = out.reshape(*(x.shape[a] for a in alone), *extents)
    return out.transpose([labels.index(label) for label in out_labels])


def _weight_dot(
    x_MK, w: QArray, matrix, inner, last, precision, dtype
) -> jax.Array | None:
    """Rows times a weight seen as a matrix, by this platform's kernel.

    Args:
        inner: the scale within the sum, as a matrix; None for none.
        last: that of columns after it, likewise.
    """
    out = _many_rows(x_MK, w, matrix, inner, last, dtype)
    if out is not None:
        return out
    (shape, summed), fmt = matrix, w.format
    counts = (1, 1) if inner is None else inner.shape
    codes = w.qvalue.reshape(shape)
    if xla.platform() == "cpu" and wanted.name() in (None, "xla"):
        if wanted.name() == "xla" or not cpu.is_local(x_MK, w.qvalue, w.scale):
            return None
        if not cpu.supports(fmt, shape, x_MK.shape[0], counts):
            return None
        how = {"fmt": fmt, "summed": summed, "precision": precision}
        inner = None if inner is None else inner.astype(jnp.float32)
        out = cpu.dot(x_MK, codes, inner, **how)
        return (out if last is None else out * last.astype(jnp.float32)).astype(dtype)
    reason = wanted.why_no_gpu(hopper=False) or wanted.why_not_here(x_MK, w.qvalue)
    hopper = not wanted.is_interpreted() and wanted.why_no_gpu(hopper=True) is None
    if reason is None:
        how = (fmt, shape, summed, x_MK.shape[0], counts, x_MK.dtype, hopper)
        reason = _for_few().why_not_weight(*how)
    if not wanted.taken(reason, f"these rows by a weight of {fmt.name}"):
        return None
    how = (fmt, summed, dtype, wanted.is_interpreted(), hopper)
    return _for_few().weight(x_MK, codes, inner, last, *how)


def _many_rows(x_MK, w: QArray, matrix, inner, last, dtype) -> jax.Array | None:
    """`_weight_dot` by Hopper's kernel for many rows, where that is to take them."""
    (shape, summed), fmt = matrix, w.format
    scale = last.reshape(1, -1) if inner is None else inner
    if wanted.is_interpreted() or wanted.why_no_gpu(hopper=False) is not None:
        return None
    if not wanted.is_static(x_MK) or is_few(x_MK.shape[0]):
        return None
    reason = wanted.why_no_gpu(hopper=True) or wanted.why_not_here(x_MK, w.qvalue)
    if reason is None:
        dtypes = x_MK.dtype, dtype
        how = (fmt, shape, summed, x_MK.shape[0], scale, dtypes)
        reason = _for_many().why_not(*how)
    if not wanted.taken(reason, f"these rows by a weight of {fmt.name}"):
        return None
    codes = w.qvalue.reshape(shape)
    return _for_many().weight(x_MK, codes, scale, fmt, dtype, False)


def few_rows(
    labels: tuple[Labels, Labels, Labels], lhs, rhs, dtype=jnp.float32
) -> jax.Array | None:
    """Codes times codes where one side has few rows: a GPU is as busy reading the other
    side as if the few were in bfloat16, which holds every code of 8 bits exactly."""
    parts = [p for x in (lhs, rhs) for p in jax.tree.leaves(x)]
    if wanted.why_no_gpu(hopper=False) is not None or not wanted.is_static(*parts):
        return None
    sizes = [_num_kept(x, of, labels) for x, of in ((lhs, labels[0]), (rhs, labels[1]))]
    side = int(sizes[1] < sizes[0])
    x, of = (lhs, rhs)[side], labels[side]
    w = (rhs, lhs)[side]
    if not is_few(sizes[side]) or not isinstance(w, QArray):
        return None
    if not bears_bfloat16(labels, lhs, rhs, dtype):
        return None
    factor = None
    if not isinstance(x, QArray):
        few = x.astype(jnp.bfloat16)
    elif x.zero_point is None and all(
        n == 1 or label in labels[2] for label, n in zip(of, x.scale.shape)
    ):
        few, factor = x.qvalue.astype(jnp.bfloat16), x.scale
    else:
        few = _values(x)
    how = {"dtype": dtype if factor is None else jnp.float32}
    out = weight_only(*labels, *((few, w) if side == 0 else (w, few)), **how)
    if out is None or factor is None:
        return out
    order = sorted(
        range(len(of)),
        key=lambda a: labels[2].index(of[a]) if of[a] in labels[2] else -1,
    )
    extent = dict(zip(of, factor.shape))
    laid = factor.transpose(order).reshape([extent.get(a, 1) for a in labels[2]])
    return views.broadcast_with(jnp.multiply, out, laid.astype(jnp.float32))


def bears_bfloat16(labels, lhs, rhs, dtype, group: str = "") -> bool:
    """Whether operands may be multiplied in bfloat16: if they are codes of 8 bits, or else,
    rounded to it, for a result in bfloat16. A zero point makes them values, and so does a
    scale within the sum; `group` is the label of groups of rows."""
    sides = [(x, of) for x, of in zip((lhs, rhs), labels) if isinstance(x, QArray)]
    codes = [x.qvalue if isinstance(x, QArray) else x for x in (lhs, rhs)]
    if any(formats.dtype_bits(code.dtype) > 8 for code in codes):
        return False
    axes = [axis for x, of in sides for axis in zip(of, x.scale.shape)]
    kept = {*labels[2], group}
    is_inner = any(n != 1 and label not in kept for label, n in axes)
    has_zero = any(x.zero_point is not None for x, _ in sides)
    return np.dtype(dtype) == jnp.bfloat16 or not (is_inner or has_zero)


def _values(x: QArray) -> jax.Array:
    """What the codes stand for; without extents of 1 on the way, see choose.py."""
    shape = x.qvalue.shape
    wide = [n for n in shape if n != 1]
    if wide and x.logical is None and not wanted.is_explicit(*jax.tree.leaves(x)):
        x = x.reshape(wide)
    return views.pad_to(dequantize(x, jnp.bfloat16), x.qvalue.shape).reshape(shape)


def _num_kept(x, of: Labels, labels) -> int:
    shape = (x.qvalue if isinstance(x, QArray) else x).shape
    return math.prod(n for n, label in zip(shape, of) if label in labels[2])


def is_plain_weight(x, w) -> bool:
    """Codes and scales alone, against a float array."""
    if isinstance(x, QArray) or not isinstance(w, QArray) or not is_wide(x.dtype):
        return False
    if w.zero_point is not None or w.pre_scale is not None:
        return False
    return np.dtype(np.float64) not in (x.dtype, w.scale.dtype)


def _as_matrix(scale, shape, summed, kept) -> jax.Array | None:
    """[r, c]: a scale of the weight's rank over the axes of its matrix; None if tiles of
    several axes do not merge into one run."""
    if any(scale.shape[a] != 1 for a in kept):
        full = [n if a in kept else scale.shape[a] for a, n in enumerate(shape)]
        scale = views.expand(scale, full)
    partial = [a for a in summed if scale.shape[a] < shape[a]]
    if any(scale.shape[a] != 1 for a in summed if partial and a > partial[0]):
        return None
    sides = [math.prod(scale.shape[a] for a in axes) for axes in (summed, kept)]
    return scale.reshape(sides if 0 in summed else sides[::-1])
