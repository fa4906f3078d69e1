"""Qwix's contrib for one weight: its `gptq_core`, `awq_core`, `qep_core`, and padding.

Its weights are [rows, columns], columns being the inputs that are summed; ours are the other
way round, and any number of axes, so these functions say which axis is which and hand over
to `midtread.algorithms`. Where GPTQ's codes cost more than rounding to nearest, these are taken.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import flax
import jax
import jax.numpy as jnp
from flax import nnx

from midtread.algorithms import correct, gptq, smooth
from midtread.algorithms.weight import Axes, over_inputs
from midtread.interop.qwix import arrays
from midtread.interop.qwix.arrays import HowToQuantize
from midtread.model import flaxlib
from midtread.model.boxes import WithAux
from midtread.numerics import views
from midtread.numerics.calibration import Average
from midtread.numerics.qarray import QArray, dequantize, quantize_by_spec
from midtread.numerics.spec import Spec
from midtread.ops.engine import Operand
from midtread.providers.params import quantize_params as rounded_params

COLUMNS = Axes((), (1,), (0,))  # of a weight [rows, columns]
MaybeQArray = Operand
QARRAY_KEEP_PADDED_SHAPE = True  # always: codes are kept padded to whole tiles


def _spec(how: HowToQuantize | Spec) -> Spec:
    return how if isinstance(how, Spec) else how.spec


# --- gptq_core --------------------------------------------------------------------------------


def compute_hessian(X: jax.Array) -> jax.Array:
    """Second moments of inputs [columns, samples]."""
    return X @ X.T


def cholesky_inverse(L: jax.Array) -> jax.Array:
    """(L L^T)^-1."""
    return jax.scipy.linalg.cho_solve((L, True), jnp.eye(len(L)))


def find_params(w: jax.Array, how: Any) -> tuple[jax.Array, jax.Array | None]:
    """(scale, zero point) of a group of columns."""
    how = how if isinstance(how, HowToQuantize) else arrays.how_of(how)
    range_ = arrays.calibrate(w, how)
    return arrays.compute_scale_zero_point(range_, how.qtype)


def quantize_column(
    w: jax.Array, qtype: Any, scale: jax.Array, zero_point: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """(codes, what they stand for)."""
    q = arrays.quantize_with_scale_zero_point(w, qtype, scale, zero_point)
    return q.qvalue, dequantize(q)


def published_gptq(
    w: jax.Array, spec: Spec, H: jax.Array, axes: Axes, block: int, damping: float
) -> QArray:
    """Codes by GPTQ as Qwix does it: inputs that are always 0 have weights of 0, and a block's
    groups are scaled when it is reached, if they have scales of their own."""
    options = gptq.GptqOptions(
        damping=damping, block=block, order="given", scales="spec", rounds=0,
        static_groups="block" if gptq.has_own_scales(spec, axes, w.shape) else True,
    )  # fmt: skip
    is_alive = over_inputs(jnp.diagonal(H)[None] != 0, axes, w.shape)
    w = jnp.where(is_alive, w, jnp.zeros_like(w))
    return gptq.solve(w, spec, H, axes, options).array


def gptq_quantize_weight(
    W: jax.Array,
    H: jax.Array,
    how: Any,
    blocksize: int = 128,
    percdamp: float = 0.01,
) -> tuple[QArray, jax.Array]:
    """(codes by GPTQ as published, losses of every element).

    Errors of columns are fed back by the factor U of the damped H^-1, W - Q = E U, and an
    element's loss is half the square of its E.
    """
    q = published_gptq(W, _spec(how), H, COLUMNS, blocksize, percdamp)
    diagonal = jnp.diag(H)
    W = jnp.where(diagonal == 0, 0.0, W)
    damped = H + jnp.diag(
        jnp.where(diagonal == 0, 1.0, 0.0) + percdamp * jnp.mean(diagonal)
    )
    inverse = cholesky_inverse(jnp.linalg.cholesky(damped))
    U = jnp.linalg.cholesky(inverse, upper=True)
    errors = jax.scipy.linalg.solve_triangular(U.T, (W - dequantize(q)).T, lower=True).T
    return q, jnp.square(errors) / 2


# --- awq_core and smooth_quant ----------------------------------------------------------------


def compute_act_scale(x: jax.Array, axis: int = 0) -> jax.Array:
    """The mean magnitude of every channel, over the samples along `axis`."""
    return jnp.mean(jnp.abs(x), axis=axis)


def search_optimal_scales(
    w: jax.Array,
    activation_scales: jax.Array,
    how: Any,
    n_grid: int = 20,
    min_scale: float = 1e-4,
) -> jax.Array:
    """What columns are multiplied by before rounding, [1, columns]."""
    size = activation_scales / (jnp.max(activation_scales) + 1e-8)
    size = jnp.clip(size, min=min_scale)
    H = jnp.diag(jnp.square(size))[None, None]
    return 1 / smooth.awq(w, _spec(how), H, COLUMNS, n_grid, to_one=True)


def awq_quantize_weight(
    w: jax.Array, activation_scales: jax.Array, how: Any, n_grid: int = 20
) -> tuple[QArray, jax.Array]:
    """(codes of w * scales, scales [1, columns])."""
    scales = search_optimal_scales(w, activation_scales, how, n_grid)
    return quantize_by_spec(w * scales, _spec(how)), scales


def compute_scales_ratio(
    act_stats: jax.Array, weight_stats: jax.Array, alpha: float
) -> jax.Array:
    """SmoothQuant's scales: what inputs are divided by."""
    scales = act_stats**alpha / weight_stats ** (1 - alpha)
    return jnp.clip(scales, min=1e-5).astype(weight_stats.dtype)


# --- qep_core ---------------------------------------------------------------------------------


def compute_qep_stats(X_q: jax.Array, X_float: jax.Array) -> dict[str, jax.Array]:
    """Moments of quantized inputs [columns, samples], and of what they lack."""
    return {"hessian": X_q @ X_q.T, "hessian_delta": (X_float - X_q) @ X_q.T}


def weight_correct(
    W: jax.Array,
    H: jax.Array,
    H_delta: jax.Array,
    *,
    correction_factor: float = 0.5,
    damping_factor: float = 0.01,
) -> jax.Array:
    """The weight that makes up for what its inputs lack."""
    dead = jnp.diag(H) == 0
    H = H + jnp.diag(jnp.where(dead, 1.0, 0.0))
    stack = lambda m: m[None, None]
    return correct.target(
        jnp.where(dead, 0.0, W), stack(H), stack(H_delta.T), COLUMNS,
        damping_factor, correction_factor,
    )  # fmt: skip


def qep_quantize_params(
    params: Any,
    abstract_quantized_params: Any,
    qep_quant_stats: Any,
    *,
    allow_extra_params: bool = False,
    gptq_block_size: int = 128,
    gptq_damping_factor: float = 0.01,
    correction_factor: float = 0.5,
    damping_factor: float = 0.01,
    apply_correction: bool = True,
) -> Any:
    """Parameters of a model under PtqProvider from statistics `<weight>_qep`, each the
    average of `compute_qep_stats`."""

    def solve(prepared: CalibratedQuantContext) -> WithAux:
        w, stats = prepared.weight, prepared.calibration_stats
        H = stats["hessian"]
        if apply_correction:
            w = weight_correct(
                w, H, stats["hessian_delta"],
                correction_factor=correction_factor, damping_factor=damping_factor,
            )  # fmt: skip
        q, _ = gptq_quantize_weight(
            w, H, prepared.how, gptq_block_size, gptq_damping_factor
        )
        return prepared.abs_w.replace(array=prepared.restore_shape(q))

    return quantize_params_with_calibration(
        params, abstract_quantized_params, qep_quant_stats, "_qep", solve,
        allow_extra_params=allow_extra_params,
    )  # fmt: skip


# --- calibration ------------------------------------------------------------------------------


def normalize_weight(
    x: jax.Array, contraction_axis: int
) -> tuple[jax.Array, Callable[[Any], Any]]:
    """(x as [rows, columns], the way back for arrays and QArrays of that shape)."""
    order = [a for a in range(x.ndim) if a != contraction_axis] + [contraction_axis]
    moved = x.transpose(order)
    back = [order.index(a) for a in range(x.ndim)]

    def restore_shape(x: Any) -> Any:
        return x.reshape(moved.shape).transpose(back)

    return moved.reshape(-1, moved.shape[-1]), restore_shape


@dataclasses.dataclass(frozen=True)
class CalibratedQuantContext:
    """A weight as [rows, columns], and all that an algorithm needs to quantize it."""

    weight: jax.Array
    how: HowToQuantize
    calibration_stats: dict[str, jax.Array]
    abs_w: WithAux
    contracting_axis: int
    restore_shape: Callable[[Any], Any]
    path: tuple[str, ...]


def extract_calibrated_quant_context(
    path: tuple[str, ...], weight: jax.Array, abs_w: WithAux, stats: Any
) -> CalibratedQuantContext | None:
    """The context of one weight; None where it does not have one axis that is summed."""
    spec = abs_w.how
    kept = {a % weight.ndim for a in spec.channelwise_axes}
    summed = [a for a in range(weight.ndim) if a not in kept]
    if len(summed) != 1:
        return None
    (axis,) = summed
    matrix, restore_shape = normalize_weight(weight, axis)
    tiles = {a % weight.ndim: tile for a, tile in spec.tiled_axes}
    how = arrays.how_of(
        dataclasses.replace(
            spec,
            channelwise_axes=(0,),
            tiled_axes={1: tiles[axis]} if axis in tiles else {},
        )
    )
    return CalibratedQuantContext(
        matrix, how, dict(Average().range(stats)), abs_w, axis, restore_shape, path
    )


def quantize_params_with_calibration(
    params: Any,
    abstract_quantized_params: Any,
    quant_stats: Any,
    stats_suffix: str,
    quantize_fn: Callable[[CalibratedQuantContext], Any],
    *,
    allow_extra_params: bool = False,
) -> Any:
    """Parameters solved by `quantize_fn` where there are statistics, and rounded elsewhere."""

    def solve(path: tuple[str, ...], w: jax.Array, box: WithAux, stat: Any) -> Any:
        context = extract_calibrated_quant_context(path, w, box, stat)
        return None if context is None else quantize_fn(context)

    return solved_params(
        params, abstract_quantized_params, quant_stats, stats_suffix, solve,
        allow_extra_params,
    )  # fmt: skip


def solved_params(
    params: Any,
    abstract: Any,
    stats: Any,
    suffix: str,
    solve: Callable[[tuple[str, ...], jax.Array, WithAux, Any], Any],
    allow_extra_params: bool,
    of_boxes: bool = False,
) -> Any:
    """Returns what `solve` makes of every parameter that has statistics, and the others
    rounded: those, too, for which it returns None.

    Args:
        suffix: of the statistics' names, after the parameter's.
        of_boxes: an NNX model's parameters stay boxes; else they are taken apart into dicts.
    """
    solved, others = {}, {}
    stats = flax.core.unfreeze(stats)
    for path, w in flax.traverse_util.flatten_dict(flax.core.unfreeze(params)).items():
        box = flaxlib.value_at(abstract, path)
        stat = flaxlib.value_at(stats, (*path[:-1], f"{path[-1]}{suffix}"))
        made = None
        if isinstance(box, WithAux) and stat is not None:
            shape = flaxlib.unbox(box.array).shape
            made = solve(path, jnp.asarray(w).reshape(shape), box, stat)
        if made is None:
            others[path] = w
        else:
            solved[path] = made
    rounded = rounded_params(
        flax.traverse_util.unflatten_dict(others),
        abstract,
        allow_extra_params=allow_extra_params,
    )
    out = {**flax.traverse_util.flatten_dict(rounded), **solved}
    if isinstance(abstract, nnx.Module) and not of_boxes:
        out = nnx.to_pure_dict(nnx.state(out))
    return flax.traverse_util.unflatten_dict(out)


# --- padded_ptq -------------------------------------------------------------------------------


def pad_to_shape(array: jax.Array, target_shape: tuple[int, ...]) -> jax.Array:
    """The array with zeros behind it."""
    return views.pad_to(array, target_shape)


def get_padded_shape(
    original_shape: tuple[int, ...], tiled_axes: Mapping[int, int | float]
) -> tuple[int, ...]:
    """The shape that holds whole tiles; a fraction is that share of the axis."""
    shape = list(original_shape)
    for axis, tile in tiled_axes.items():
        size = tile if isinstance(tile, int) else round(shape[axis] * tile)
        shape[axis] = -(-shape[axis] // size) * size
    return tuple(shape)


def replace_keep_padded(value: Any) -> None:
    if value is False:
        raise ValueError(
            "QARRAY_KEEP_PADDED_SHAPE=False would pad codes again at every call: here they "
            "stay padded, and QArray.shape is the shape without padding."
        )
