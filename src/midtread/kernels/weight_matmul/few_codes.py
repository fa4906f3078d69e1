"""Few rows of codes against stored codes on NVIDIA GPUs, as floats by the kernels for weights.

With few rows a GPU is as busy reading the other side as if the few were in bfloat16, which holds
every code of 8 bits exactly. So they are cast, and their scales applied to the result; where a
scale varies within the sum, it is their values that are multiplied.
"""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from midtread.kernels import choose, layout, pending
from midtread.kernels.candidates import Chosen, Refusal, first
from midtread.kernels.environment import Env
from midtread.kernels.layout import Matmul
from midtread.kernels.weight_matmul import MAX_ROWS
from midtread.numerics import formats, views
from midtread.numerics.platforms import is_explicit
from midtread.numerics.qarray import QArray, dequantize


class FewCodes(NamedTuple):
    """The few side in bfloat16, then the plan of another candidate."""

    side: int  # of the few rows: 0 for lhs, 1 for rhs
    is_scaled_last: bool  # whether their scales are applied to the result
    chosen: Chosen

    @property
    def detail(self) -> str:
        return str(self.chosen.name)

    def run(self, a: Matmul) -> jax.Array:
        few: Any = (a.lhs, a.rhs)[self.side]
        if not self.is_scaled_last:
            x = _values(few) if isinstance(few, QArray) else few.astype(jnp.bfloat16)
            return self.chosen.plan.run(_as_floats(a, self.side, x, a.dtype))
        x = pending.form_of(few.qvalue).wide
        x = few.qvalue.astype(jnp.bfloat16) if x is None else x
        out = self.chosen.plan.run(_as_floats(a, self.side, x, jnp.float32))
        scale = few.scale.astype(jnp.float32)
        factor = views.lay_over(scale, a.labels[self.side], a.labels[2])
        left = pending.form_of(out).pending
        left = None if left is None else left.with_rows(factor)
        out = views.broadcast_with(jnp.multiply, out, factor)
        pending.note(out, pending=left)
        return out


def plan(a: Matmul, env: Env) -> FewCodes | Refusal:
    if a.matrices is not None:
        sizes = a.sizes[:2]
    else:
        sizes = _num_kept(a.lhs, a.labels[0], a), _num_kept(a.rhs, a.labels[1], a)
    side = 0 if a.groups is not None else int(sizes[1] < sizes[0])
    few, other = (a.lhs, a.rhs) if side == 0 else (a.rhs, a.lhs)
    if a.groups is None and sizes[side] > MAX_ROWS:
        return Refusal(f"both sides have more than {MAX_ROWS} rows")
    if not isinstance(other, QArray):
        return Refusal("the other side has no scales")
    if not _bears_bfloat16(a):
        return Refusal("in bfloat16 its values would be rounded")
    is_scaled_last = isinstance(few, QArray) and few.zero_point is None
    if is_scaled_last:
        axes = zip(a.labels[side], few.scale.shape)
        is_scaled_last = all(n == 1 or label in a.labels[2] for label, n in axes)
    if a.groups is not None and not is_scaled_last:
        return Refusal("its rows have zero points, or scales within the sum")
    x = jax.ShapeDtypeStruct(layout.codes_of(few).shape, jnp.bfloat16)
    dtype = jnp.float32 if is_scaled_last else a.dtype
    operands = _as_floats(a, side, x, dtype)
    if isinstance(operands, str):
        return Refusal(operands)
    candidates = choose.FEW_ROWS if a.groups is None else choose.GROUPED_WEIGHT
    chosen = first("", candidates, operands, dataclasses.replace(env, watch=None))
    if chosen.plan is None:
        return Refusal("; ".join(dict.fromkeys(reason for _, reason in chosen.refused)))
    return FewCodes(side, is_scaled_last, chosen)


def _as_floats(a: Matmul, side: int, x: Any, dtype) -> Any:
    """Returns the matmul with `x` for the few codes, or why it is not one of floats by codes."""
    a = dataclasses.replace(a, **{("lhs", "rhs")[side]: x}, dtype=dtype)
    if a.groups is None:
        return layout.weight_matmul(a)
    return layout.why_not_weight(a.lhs, a.rhs) or a


def _num_kept(x: Any, labels, a: Matmul) -> int:
    shape = layout.codes_of(x).shape
    return math.prod(n for n, label in zip(shape, labels) if label in a.labels[2])


def _bears_bfloat16(a: Matmul) -> bool:
    """Whether operands may be multiplied in bfloat16: if they are codes of 8 bits, or else,
    rounded to it, for a result in bfloat16. A zero point makes them values, and so does a
    scale within the sum."""
    operands = a.lhs, a.rhs
    if (
        formats.dtype_bits(a.codes[0].dtype) > 8
        or formats.dtype_bits(a.codes[1].dtype) > 8
    ):
        return False
    if np.dtype(a.dtype) == jnp.bfloat16:
        return True
    kept = a.labels[2] if a.groups is None else (*a.labels[2], a.groups.group)
    for x, labels in zip(operands, a.labels):
        if not isinstance(x, QArray):
            continue
        if x.zero_point is not None:
            return False
        if any(n != 1 and of not in kept for of, n in zip(labels, x.scale.shape)):
            return False
    return True


def _values(x: QArray) -> jax.Array:
    """Returns what codes stand for, without extents of 1 on the way, as `OneRead` does
    (quantize/operand.py)."""
    shape = x.qvalue.shape
    wide = [n for n in shape if n != 1]
    if wide and x.logical is None and not is_explicit(*layout.parts_of(x)):
        x = x.reshape(wide)
    return views.pad_to(dequantize(x, jnp.bfloat16), x.qvalue.shape).reshape(shape)
