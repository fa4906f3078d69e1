"""Unrolled: a contraction inside a Pallas kernel.

`contract` visits tiles in a scan and lets the backend choose how to multiply. A kernel
has neither loops over slices nor a choice: here each tile of the sum is a slice known
while tracing, multiplied by lax.dot_general and scaled at once. What cannot be multiplied
as codes (lookups, zero points) is dequantized first.
"""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from midtread.kernels import xla
from midtread.numerics.dtypes import wide_dtype
from midtread.numerics.qarray import QArray, dequantize
from midtread.ops.api import Ops
from midtread.ops.context import untouched
from midtread.ops.contraction import Dot
from midtread.ops.engine import (
    Operand,
    apply_scales,
    codes_of,
    is_code,
    result_dtype,
    take_tile,
    tile_counts,
)


@untouched
def contract_unrolled(c: Dot, lhs: Operand, rhs: Operand) -> jax.Array:
    """Does what `contract` does, for blocks in a kernel."""
    if not isinstance(c, Dot):
        raise NotImplementedError(f"{c.name} is not for kernels: write dot_general.")
    result = c.preferred or result_dtype(lhs, rhs)
    wide = wide_dtype(result_dtype(lhs, rhs))
    lhs, rhs = _multipliable(lhs), _multipliable(rhs)
    counts = tile_counts(c, lhs, rhs) or {}
    total: Any = 0
    for position in itertools.product(*map(range, counts.values())):
        index = dict(zip(counts, position))
        left = _tile(lhs, c.lhs, index, counts)
        right = _tile(rhs, c.rhs, index, counts)
        scales = [x.scale if isinstance(x, QArray) else None for x in (left, right)]
        out = _multiply(c, codes_of(left), codes_of(right), wide)
        total = total + apply_scales(c, out, wide, *scales)
    return total.astype(result)


def _multipliable(x: Operand) -> Operand:
    if not isinstance(x, QArray) or (is_code(x) and x.zero_point is None):
        return x
    return dequantize(x)


def _tile(x: Operand, labels, index: dict[str, int], counts: dict[str, int]) -> Operand:
    take = functools.partial(take_tile, labels=labels, index=index, tiles=counts)
    return x.map(take) if isinstance(x, QArray) else take(x)


def _multiply(c: Dot, left: jax.Array, right: jax.Array, wide) -> jax.Array:
    dtypes = xla.operand_dtypes(left.dtype, right.dtype)
    integer = all(jnp.issubdtype(d, jnp.integer) for d in dtypes)
    numbers, order = c.dimension_numbers
    out = lax.dot_general(
        left.astype(dtypes[0]),
        right.astype(dtypes[1]),
        numbers,
        precision=c.precision,
        preferred_element_type="int32" if integer else wide,
    )
    return out if order == sorted(order) else out.transpose(order)


_unrolled = Ops(contract_unrolled)
dot_general = _unrolled.dot_general
dot = _unrolled.dot
einsum = _unrolled.einsum
