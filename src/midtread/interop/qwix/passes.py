"""Passes: the forward and the backward pass of Qwix's training ops, each by itself.

Qwix builds its ops of them with jax.custom_vjp, and so may others. What goes from one to
the other, Qwix's residuals, is here the backward pass itself, a pytree that only the
function of the same op can read.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax

from midtread.interop.qwix import matmuls

Calibration = dict[str, jax.Array] | None
Vjp = Callable[[jax.Array], tuple[jax.Array, jax.Array]]


def dot_general_qt_fwd(
    lhs: jax.Array,
    rhs: jax.Array,
    lhs_calibration: Calibration,
    rhs_calibration: Calibration,
    dimension_numbers: Any,
    config: matmuls.DotGeneralQtConfig,
) -> tuple[jax.Array, Vjp]:
    """An operand without a calibration is not quantized, as in Qwix."""
    for side, range_ in (("lhs", lhs_calibration), ("rhs", rhs_calibration)):
        given: dict[str, Any] = {f"{side}_qtype": None}
        if range_ is not None:
            given = {f"{side}_collect_quant_stat": lambda _, range_=range_: range_}
        config = dataclasses.replace(config, **given)
    run = lambda lhs, rhs: matmuls.dot_general_qt(lhs, rhs, dimension_numbers, config)
    return jax.vjp(run, lhs, rhs)


def dot_general_qt_bwd(
    fwd_dimension_numbers: Any, residuals: Vjp, g: jax.Array
) -> tuple[jax.Array, jax.Array, None, None, None]:
    return *residuals(g), None, None, None


def dot_general_qt_fwd_bwd(*args: Any, **kwargs: Any) -> jax.Array:
    """The op that both make up."""
    return dot_general_qt_fwd(*args, **kwargs)[0]


def conv_general_qt_fwd(
    lhs: jax.Array,
    rhs: jax.Array,
    config: matmuls.ConvGeneralQtConfig,
    window_strides: Sequence[int],
    padding: str | Sequence[tuple[int, int]],
    lhs_dilation: Sequence[int] | None,
    rhs_dilation: Sequence[int] | None,
    dimension_numbers: Any,
    feature_group_count: int,
    batch_group_count: int,
    out_sharding: Any = None,
) -> tuple[jax.Array, Vjp]:
    def run(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        return matmuls.conv_general_qt(
            lhs, rhs, config, window_strides, padding, lhs_dilation, rhs_dilation,
            dimension_numbers, feature_group_count, batch_group_count, out_sharding,
        )  # fmt: skip

    return jax.vjp(run, lhs, rhs)


def conv_general_qt_bwd(
    config: matmuls.ConvGeneralQtConfig,
    window_strides: Sequence[int],
    padding: str | Sequence[tuple[int, int]],
    lhs_dilation: Sequence[int] | None,
    rhs_dilation: Sequence[int] | None,
    dimension_numbers: Any,
    feature_group_count: int,
    batch_group_count: int,
    out_sharding: Any,
    res: Vjp,
    g: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    return res(g)


def ragged_dot_qt_fwd(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    config: matmuls.RaggedDotQtConfig,
    precision: Any = None,
    preferred_element_type: Any = None,
    group_offset: jax.Array | None = None,
) -> tuple[jax.Array, Vjp]:
    def run(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        return matmuls.ragged_dot_qt(
            lhs, rhs, group_sizes, config, precision, preferred_element_type,
            group_offset,
        )  # fmt: skip

    return jax.vjp(run, lhs, rhs)


def ragged_dot_qt_bwd(
    config: matmuls.RaggedDotQtConfig,
    precision: Any,
    preferred_element_type: Any,
    group_offset: jax.Array | None,
    residuals: Vjp,
    g: jax.Array,
) -> tuple[jax.Array, jax.Array, None]:
    return *residuals(g), None
