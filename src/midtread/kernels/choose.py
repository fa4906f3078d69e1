"""Choose: which implementation runs a contraction, by device, shapes and formats.

    weight_only(...)    float x codes: an array, or None for the plain path in ops/engine.py
    scaled(...)         codes x codes, scales on kept axes: an array, or None likewise
    quantize(...)       a float operand to codes, in the memory order its matmuls want

A choice changes the time, never the meaning: what a kernel does not take (zero points,
odd layouts, sharded arrays) is left to XLA. `implementation` overrides it:

    None          whatever is fastest; never fails
    "xla"         no kernels of ours
    "gpu"         our GPU kernel, or an error that says why not
    "interpret"   our GPU kernels, interpreted on any device: for tests; slow
"""

import contextlib
import functools
import math
from collections.abc import Iterator
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType

from midtread.kernels import cpu, xla
from midtread.numerics import views
from midtread.numerics.calibration import Range
from midtread.numerics.dtypes import is_wide
from midtread.numerics.qarray import QArray, calibrate, quantize_to_range
from midtread.numerics.spec import Spec

Labels = tuple[str, ...]
IMPLEMENTATIONS = (None, "xla", "gpu", "interpret")

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
    reason = why_not_scaled(labels, lhs, rhs, tiles)
    if not _taken(reason, "this matmul of codes"):
        return None
    run = _kernels().blocked if tiles else _kernels().scaled
    return run(labels, lhs, rhs, dtype, _interpret())


def why_not_scaled(labels, lhs, rhs, tiles: dict[str, int]) -> str | None:
    reason = _why_no_gpu(hopper=True)
    if reason is not None:
        return reason
    parts = [p for x in (lhs, rhs) for p in jax.tree.leaves(x)]
    if not cpu.is_local(*parts):
        return "its operands are laid out over a mesh with explicit axes"
    if tiles:
        return _kernels().why_not_blocked(labels, lhs, rhs, tiles)
    return _kernels().why_not_scaled(labels, lhs, rhs)


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
    if why_not_quantize(x, spec, summed, factor) is None:
        how = {"summed": summed, "both": both, "factor": factor}
        return _kernels().quantize(x, spec, range_, interpret=_interpret(), **how)
    if factor is not None:
        x = x * factor
    range_ = calibrate(x, spec) if range_ is None else range_
    q = quantize_to_range(x, spec, range_, key, site)
    return q, q


def why_not_quantize(x, spec: Spec, summed, factor=None) -> str | None:
    reason = _why_no_gpu(hopper=False)
    if reason is not None:
        return reason
    if not is_alone():
        return (
            "a model over several devices is quantized by XLA, which can partition it"
        )
    return _kernels().why_not_quantize(x, spec, summed, factor)


def is_alone() -> bool:
    """One device, or inside shard_map: what is seen here is all there is."""
    mesh = jax.sharding.get_abstract_mesh()
    if any(kind == AxisType.Manual for kind in getattr(mesh, "axis_types", ())):
        return True
    return jax.device_count() == 1 or wanted() == "interpret"


def _interpret() -> bool:
    return wanted() == "interpret"


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
