"""Choose: which implementation runs a contraction, by device, shapes and formats.

    weight_only(...)    float x codes: an array, or None for the plain path in ops/engine.py
    scaled(...)         codes x codes, scales on kept axes: an array, or None likewise
    grouped(...)        the same for rows in groups, each with its own matrix
    grouped_weight(...) float x codes for rows in groups
    attend(...)         one token a sequence against a cache of codes
    quantize(...)       a float operand to codes, in the memory order its matmuls want
    quantize_twice(...) the same for two matmuls from one read, or None: one at a time

A choice changes the time, never the meaning: what a kernel does not take (zero points,
odd layouts, sharded arrays) is left to XLA. `implementation` overrides it:

    None          whatever is fastest; never fails
    "xla"         no kernels of ours
    "gpu"         our GPU kernel, or an error that says why not
    "interpret"   our GPU kernels, interpreted on any device: for tests; slow
"""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Iterator
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType

from midtread.kernels import cpu, xla
from midtread.numerics import formats, rounding, views
from midtread.numerics.calibration import Range
from midtread.numerics.dtypes import is_wide
from midtread.numerics.qarray import (
    QArray,
    calibrate,
    dequantize,
    quantize_to_range,
    quantize_to_scale,
    scales_of,
)
from midtread.numerics.spec import Spec

Labels = tuple[str, ...]
IMPLEMENTATIONS = (None, "xla", "gpu", "interpret")

SYMBOLIC = "an extent is not known: jax.export with symbolic shapes is left to XLA"

_wanted = jax.make_user_context(default_value=None)  # part of jit's cache key


@contextlib.contextmanager
def implementation(name: str | None) -> Iterator[None]:
    """Within it, quantized contractions run as `name` says.

    >>> with implementation("xla"):
    ...     wanted()
    'xla'
    """
    if name not in IMPLEMENTATIONS:
        known = ", ".join(map(repr, IMPLEMENTATIONS))
        raise ValueError(f"unknown implementation {name!r}. There are: {known}.")
    with _wanted(name):
        yield


def wanted() -> str | None:
    return _wanted.value


def _kernels() -> ModuleType:
    """Imported on use: Pallas is large, and of no use without a GPU."""
    from midtread.kernels import gpu

    return gpu


def _few_rows() -> ModuleType:
    from midtread.kernels import few_rows_gpu

    return few_rows_gpu


def _many_rows_kernels() -> ModuleType:
    from midtread.kernels import many_rows_gpu

    return many_rows_gpu


def _ragged_kernels() -> ModuleType:
    from midtread.kernels import ragged_gpu

    return ragged_gpu


@functools.cache
def _capability(device) -> tuple[int, int] | None:
    """Of an NVIDIA GPU, (9, 0) for Hopper; None of any other device."""
    if device.platform != "gpu" or "NVIDIA" not in device.device_kind:
        return None
    major, minor = str(device.compute_capability).split(".")
    return int(major), int(minor)


def _why_no_gpu(hopper: bool) -> str | None:
    """Why our kernels cannot run where this is being traced for; None if they can."""
    if wanted() == "interpret":
        return None
    if wanted() == "xla":
        return "implementation='xla' was asked for"
    device = jax.config.jax_default_device
    if device is None or isinstance(device, str):
        device = jax.devices(device)[0]
    capability = _capability(device)
    if capability is None:
        return f"the device is {device.device_kind}, not an NVIDIA GPU"
    if hopper and capability[0] != 9:
        return f"it needs wgmma, and {device.device_kind} is not a Hopper GPU"
    return None


def _taken(reason: str | None, what: str) -> bool:
    """Whether to take a kernel; an explicit wish that cannot be met is an error."""
    if reason is not None and wanted() == "gpu":
        raise ValueError(
            f"implementation='gpu' cannot run {what}: {reason}. "
            "Write implementation(None) to leave the choice to Midtread."
        )
    return reason is None


def scaled(
    labels: tuple[Labels, Labels, Labels], lhs, rhs, tiles: dict[str, int], dtype
) -> jax.Array | None:
    """Codes times codes, scaled, in `dtype`.

    Args:
        tiles: the number of tiles of each summed label that scales vary along.
    """
    out = few_rows(labels, lhs, rhs, dtype)
    if out is not None:
        return out
    reason = why_not_scaled(labels, lhs, rhs, tiles)
    if not _taken(reason, "this matmul of codes"):
        return None
    run = _kernels().blocked if tiles else _kernels().scaled
    return run(labels, lhs, rhs, dtype, _interpret())


def why_not_scaled(labels, lhs, rhs, tiles: dict[str, int]) -> str | None:
    reason = _why_no_gpu(hopper=True) or _why_not_here(lhs, rhs)
    if reason is not None:
        return reason
    if tiles:
        return _kernels().why_not_blocked(labels, lhs, rhs, tiles)
    return _kernels().why_not_scaled(labels, lhs, rhs)


def grouped(
    labels: tuple[Labels, Labels, Labels], groups: tuple, lhs, rhs, tiles, dtype
) -> jax.Array | None:
    """`scaled` for rows in groups: (the label of rows, that of groups, their sizes)."""
    out = _few_grouped(labels, groups, lhs, rhs)
    if out is not None:
        return out
    reason = why_not_grouped(labels, groups, lhs, rhs, tiles)
    if not _taken(reason, "this grouped matmul of codes"):
        return None
    kernels = _ragged_kernels()
    of = kernels.Groups(*groups)
    return kernels.grouped(labels, of, lhs, rhs, dtype, _interpret())


def _few_grouped(labels, groups: tuple, lhs, rhs) -> jax.Array | None:
    """`few_rows` for rows in groups."""
    if not (isinstance(lhs, QArray) and isinstance(rhs, QArray)):
        return None
    x, (rows, _, _) = lhs.qvalue, groups
    if lhs.zero_point is not None or formats.dtype_bits(x.dtype) > 8:
        return None
    if any(n != 1 and label != rows for label, n in zip(labels[0], lhs.scale.shape)):
        return None
    few = x.astype(jnp.bfloat16)
    if not _is_plain_weight(few, rhs):
        return None
    if why_not_grouped_weight(labels, groups, few, rhs) is not None:
        return None
    out = _by_grouped_weight(labels, groups, few, rhs)
    scale = lhs.scale.astype(jnp.float32).reshape(-1, *[1] * (out.ndim - 1))
    return views.broadcast_with(jnp.multiply, out, scale)


def grouped_weight(labels, groups: tuple, x, w) -> jax.Array | None:
    """`weight_only` for rows in groups."""
    if not _is_plain_weight(x, w):
        return None
    reason = why_not_grouped_weight(labels, groups, x, w)
    if not _taken(reason, f"these rows by grouped weights of {w.format.name}"):
        return None
    return _by_grouped_weight(labels, groups, x, w)


def _by_grouped_weight(labels, groups: tuple, x, w) -> jax.Array:
    kernels = _ragged_kernels()
    return kernels.weight(labels, kernels.Groups(*groups), x, w, _interpret())


def why_not_grouped_weight(labels, groups: tuple, x, w: QArray) -> str | None:
    reason = _why_no_gpu(hopper=False) or _why_not_here(x, w, groups[2])
    if reason is not None:
        return reason
    kernels = _ragged_kernels()
    return kernels.why_not_weight(labels, kernels.Groups(*groups), x, w)


def attend(
    q: jax.Array, k: QArray, v: QArray, lengths: jax.Array, gain: float = 1.0
) -> jax.Array | None:
    """softmax(gain q k / sqrt(h)) v of one token a sequence, q [B, 1, H, h], against a cache
    [B, S, K, h] of which each sequence sees its first `lengths` slots; None likewise."""
    reason = why_not_attend(q, k, v)
    if not _taken(reason, "attention over this cache"):
        return None
    from midtread.kernels import attention_gpu

    return attention_gpu.attend(q, k, v, lengths, gain, _interpret())


def why_not_attend(q, k: QArray, v: QArray) -> str | None:
    reason = _why_no_gpu(hopper=False) or _why_not_here(q, k, v)
    if reason is not None:
        return reason
    from midtread.kernels import attention_gpu

    return attention_gpu.why_not(q, k, v)


def why_not_grouped(labels, groups: tuple, lhs, rhs, tiles) -> str | None:
    reason = _why_no_gpu(hopper=True) or _why_not_here(lhs, rhs, groups[2])
    if reason is not None:
        return reason
    if tiles:
        return "its scales vary within the sum"
    kernels = _ragged_kernels()
    return kernels.why_not_grouped(labels, kernels.Groups(*groups), lhs, rhs)


def _why_not_here(*operands) -> str | None:
    """Why kernels cannot take operands that are laid out as these are."""
    parts = [p for x in operands for p in jax.tree.leaves(x)]
    if _is_explicit(*parts):
        return "its operands are laid out over a mesh with explicit axes"
    return None if _is_static(*parts) else SYMBOLIC


def quantize(
    x: jax.Array,
    spec: Spec,
    range_: Range | None = None,
    key: jax.Array | None = None,
    site: tuple = (),
    *,
    summed: tuple[int, ...],
    both: bool = False,
    factor: jax.Array | None = None,
) -> tuple[QArray, QArray]:
    """`x * factor` quantized: for a matmul that sums over `summed`, and, if `both`, once
    more for one that sums over the other axes. The two differ in memory order alone.

    Args:
        range_: found earlier; None: from the data, now.
        factor: of x's rank, broadcast.
    """
    is_seeded = spec.rounding == "nearest" or key is not None
    if is_seeded and why_not_quantize(x, spec, summed, factor, both) is None:
        seed = None if spec.rounding == "nearest" else rounding.seed(key, site)
        how = {"summed": summed, "both": both, "factor": factor}
        found = _kernels().quantize(
            x, spec, range_, seed, interpret=_interpret(), **how
        )
        return found.codes, found.again
    if factor is not None:
        x = x * factor
    if range_ is None and _is_rows_of_tiles(x, spec, summed):
        q = _from_one_read(x, spec)
        return q, q
    range_ = calibrate(x, spec) if range_ is None else range_
    q = quantize_to_range(x, spec, range_, key, site)
    return q, q


def _is_few_integers(x, spec: Spec, summed) -> bool:
    """Rows that `few_rows` turns into bfloat16: XLA makes one kernel of that and the cast,
    where codes that a kernel of ours wrote would be read by another."""
    if not _is_static(x) or spec.format.codes is None or spec.rounding != "nearest":
        return False
    kept = [n for a, n in enumerate(x.shape) if a not in summed]
    return math.prod(kept) <= _few_rows().MAX_ROWS and summed == (x.ndim - 1,)


def _is_rows_of_tiles(x, spec: Spec, summed) -> bool:
    """Few rows of integers whose scales vary within the sum: it is their values that
    `few_rows` multiplies, so that a GPU need not write codes and scales. (Codes in float8
    are written: rounding.py keeps XLA from undoing a cast to them.)"""
    if _why_no_gpu(hopper=False) is not None or _why_not_here(x) is not None:
        return False
    if spec.method != "absmax" or spec.calibration.args or spec.rounding != "nearest":
        return False
    fmt = spec.format
    if fmt.codes is None or fmt.tile or fmt.scale or spec.scale_rule:
        return False
    if spec.scale_dtype is not None or spec.calibration.is_asymmetric:
        return False
    padded, counts = spec.layout(x.shape)
    if padded != x.shape or counts[:-1] != x.shape[:-1] or summed != (x.ndim - 1,):
        return False
    num_rows = math.prod(x.shape[:-1])
    if not 0 < num_rows <= _few_rows().MAX_ROWS:
        return False
    is_whole = (
        num_rows <= 8 or num_rows % 8 == 0
    )  # else stream_gpu has them padded next
    return is_whole and 1 < counts[-1] < x.shape[-1]


def _from_one_read(x: jax.Array, spec: Spec) -> QArray:
    """The same codes and scales, said so that XLA makes one kernel of all that stands
    between two matmuls (jax 0.11.2, for an H200). It fuses a maximum with what follows only
    where that meets the maximum's operand at once, as in a softmax: so a scale is computed
    for every element, from max(|x|, absmax) = absmax, and one of a tile is kept. Extents
    of 1 are left out: XLA drops some of them, and no longer sees the pattern."""
    _, counts = spec.layout(x.shape)
    wide = [n for n in counts[:-1] if n != 1] + [counts[-1]]
    tiles = x.reshape(*wide, x.shape[-1] // counts[-1])
    each = tuple(range(len(wide)))
    spec = dataclasses.replace(spec, channelwise_axes=each, tiled_axes={})
    absmax = jnp.maximum(jnp.abs(tiles), calibrate(tiles, spec)["absmax"])
    q = quantize_to_scale(tiles, spec.format, scales_of({"absmax": absmax}, spec).scale)
    scale = jnp.max(q.scale, axis=-1).reshape(counts)
    return q.replace(qvalue=q.qvalue.reshape(x.shape), scale=scale)


def quantize_twice(
    x: jax.Array,
    specs: tuple[Spec, Spec],
    summed: tuple[tuple[int, ...], tuple[int, ...]],
    range_: Range | None = None,
    largest: bool = False,
) -> tuple[QArray, QArray, jax.Array | None] | None:
    """x quantized for two matmuls, each under its own Spec, from one read; and max |x|, if
    it is wanted and was found on the way. None if no kernel does that: quantize it twice.

    Args:
        summed: the axes either matmul sums over.
        range_: found earlier, the same for both.
    """
    if any(spec.rounding != "nearest" for spec in specs):
        return None  # either with a noise of its own
    if sorted(summed[0] + summed[1]) != list(range(x.ndim)):
        return None
    both = functools.partial(why_not_quantize, x, both=True)
    if any(both(s, axes) is not None for s, axes in zip(specs, summed)):
        return None
    how = {"summed": summed[0], "interpret": _interpret()}
    if specs[0] == specs[1]:
        how |= {"both": True, "factor": None, "largest": largest}
        return _kernels().quantize(x, specs[0], range_, None, **how)
    if range_ is not None or _kernels().why_not_tiles(x, specs, summed[0]) is not None:
        return None
    return _kernels().quantize_tiles(x, specs, **how)


def why_not_quantize(x, spec: Spec, summed, factor=None, both=False) -> str | None:
    reason = _why_no_gpu(hopper=False)
    if reason is not None:
        return reason
    if not is_alone():
        return (
            "a model over several devices is quantized by XLA, which can partition it"
        )
    if not both and factor is None and _is_few_integers(x, spec, summed):
        return "few rows are cast to bfloat16 next, and XLA does all of that at once"
    return _kernels().why_not_quantize(x, spec, summed, factor)


def _is_static(*arrays) -> bool:
    return all(isinstance(n, int) for x in arrays for n in x.shape)


def _is_explicit(*arrays) -> bool:
    """Laid out over mesh axes that are part of the type, which kernels do not follow."""
    meshes = [jax.typeof(x).sharding.mesh for x in arrays]
    return any(AxisType.Explicit in getattr(m, "axis_types", ()) for m in meshes)


def is_alone() -> bool:
    """One device, or inside shard_map: what is seen here is all there is."""
    mesh = jax.sharding.get_abstract_mesh()
    is_manual = AxisType.Manual in getattr(mesh, "axis_types", ())
    return is_manual or jax.device_count() == 1 or wanted() == "interpret"


def _interpret() -> bool:
    return wanted() == "interpret"


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
    if not _is_plain_weight(x, w):
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
    if xla.platform() == "cpu" and wanted() in (None, "xla"):
        if wanted() == "xla" or not cpu.is_local(x_MK, w.qvalue, w.scale):
            return None
        if not cpu.supports(fmt, shape, x_MK.shape[0], counts):
            return None
        how = {"fmt": fmt, "summed": summed, "precision": precision}
        inner = None if inner is None else inner.astype(jnp.float32)
        out = cpu.dot(x_MK, codes, inner, **how)
        return (out if last is None else out * last.astype(jnp.float32)).astype(dtype)
    reason = _why_no_gpu(hopper=False) or _why_not_here(x_MK, w.qvalue)
    hopper = not _interpret() and _why_no_gpu(hopper=True) is None
    if reason is None:
        how = (fmt, shape, summed, x_MK.shape[0], counts, x_MK.dtype, hopper)
        reason = _few_rows().why_not_weight(*how)
    if not _taken(reason, f"these rows by a weight of {fmt.name}"):
        return None
    how = (fmt, summed, dtype, _interpret(), hopper)
    return _few_rows().weight(x_MK, codes, inner, last, *how)


def _many_rows(x_MK, w: QArray, matrix, inner, last, dtype) -> jax.Array | None:
    """`_weight_dot` where a GPU is to take more rows than its kernels for few do."""
    (shape, summed), fmt = matrix, w.format
    scale = last.reshape(1, -1) if inner is None else inner
    if _interpret() or _why_no_gpu(hopper=False) is not None:
        return None
    if not _is_static(x_MK) or x_MK.shape[0] <= _few_rows().MAX_ROWS:
        return None
    reason = _why_no_gpu(hopper=True) or _why_not_here(x_MK, w.qvalue)
    if reason is None:
        dtypes = x_MK.dtype, dtype
        how = (fmt, shape, summed, x_MK.shape[0], scale, dtypes)
        reason = _many_rows_kernels().why_not(*how)
    if not _taken(reason, f"these rows by a weight of {fmt.name}"):
        return None
    codes = w.qvalue.reshape(shape)
    return _many_rows_kernels().weight(x_MK, codes, scale, fmt, dtype, False)


def few_rows(
    labels: tuple[Labels, Labels, Labels], lhs, rhs, dtype=jnp.float32
) -> jax.Array | None:
    """Codes times codes where one side has few rows: a GPU is as busy reading the other
    side as if the few were in bfloat16, which holds every code of 8 bits exactly."""
    parts = [p for x in (lhs, rhs) for p in jax.tree.leaves(x)]
    if _why_no_gpu(hopper=False) is not None or not _is_static(*parts):
        return None
    sizes = [_num_kept(x, of, labels) for x, of in ((lhs, labels[0]), (rhs, labels[1]))]
    side = int(sizes[1] < sizes[0])
    x, of = (lhs, rhs)[side], labels[side]
    w = (rhs, lhs)[side]
    if sizes[side] > _few_rows().MAX_ROWS or not isinstance(w, QArray):
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


def _values(x: QArray) -> jax.Array:
    """What the codes stand for; without extents of 1 on the way, see `_from_one_read`."""
    shape = x.qvalue.shape
    wide = [n for n in shape if n != 1]
    if wide and x.logical is None and not _is_explicit(*jax.tree.leaves(x)):
        x = x.reshape(wide)
    return views.pad_to(dequantize(x, jnp.bfloat16), x.qvalue.shape).reshape(shape)


def _num_kept(x, of: Labels, labels) -> int:
    shape = (x.qvalue if isinstance(x, QArray) else x).shape
    return math.prod(n for n, label in zip(shape, of) if label in labels[2])


def _is_plain_weight(x, w) -> bool:
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
