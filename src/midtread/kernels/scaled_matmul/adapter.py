"""Codes times codes on Hopper: from a Matmul to one of three kernels, or the reason why not.

A kernel takes matrices with the summed axis innermost, and a contraction has labelled axes in any
order (layout.py). Codes are transposed to rows; XLA drops that transpose where a quantizing kernel
has written them in that order already. Kernels are functions that JAX can transform (partition.py).

    plan             a scale for each row and column            hopper.py
    plan_columns     the same, of a weight stored [K, N]        weight_matmul/many_rows.py
    plan_tiled       scales in tiles of the sum too             hopper_tiled.py
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from midtread.kernels.candidates import Refusal
from midtread.kernels.environment import Env
from midtread.kernels.layout import (
    TILE,
    Labels,
    Matmul,
    as_matrix,
    codes_of,
    fit,
    round_up,
)
from midtread.kernels.pallas_compat import MIXES_FLOAT8
from midtread.kernels.partition import as_function
from midtread.kernels.scaled_matmul import FLOAT8, hopper, hopper_tiled, tuned
from midtread.kernels.weight_matmul import MAX_ROWS, many_rows
from midtread.numerics import views
from midtread.numerics.qarray import QArray


class _Side(NamedTuple):
    """One operand as a matrix [kept, summed]."""

    labels: Labels  # of all its axes
    x: Any
    kept: Labels  # those of its rows
    summed: Labels

    @property
    def order(self) -> list[int]:
        return [*map(self.labels.index, (*self.kept, *self.summed))]

    @property
    def codes(self) -> jax.Array:
        codes = codes_of(self.x).transpose(self.order)
        return codes.reshape(math.prod(codes.shape[: len(self.kept)]), -1)

    @property
    def scales(self) -> jax.Array:
        """Scales in float32 [r, t], over rows and tiles of their sums."""
        if not isinstance(self.x, QArray):
            return jnp.ones((1, 1), jnp.float32)
        order = self.order
        shape = [*map(self.x.qvalue.shape.__getitem__, order)]
        scale = self.x.scale.astype(jnp.float32).transpose(order)
        return as_matrix(scale, shape, len(self.kept))


def _sides(a: Matmul) -> tuple[_Side, _Side, bool]:
    """Returns the left side, the right side, and whether lhs is the right side because the
    result is wanted transposed."""
    assert a.matrices is not None
    m, n, k = a.matrices
    left, right = _Side(a.labels[0], a.lhs, m, k), _Side(a.labels[1], a.rhs, n, k)
    is_swapped = a.labels[2] != m + n
    return (right, left, True) if is_swapped else (left, right, False)


def why_not_codes(a: Matmul) -> str | None:
    """Says why wgmma cannot multiply these operands' codes; None if it can."""
    left, right = a.codes[0].dtype.name, a.codes[1].dtype.name
    is_float8 = left in FLOAT8 and right in FLOAT8
    if (left, right) != ("int8", "int8") and not is_float8:
        return f"it multiplies {left} by {right}: int8 by int8 or float8 by float8 are"
    if left != right and not MIXES_FLOAT8:
        return f"{left} by {right} needs jax 0.11"
    for x in (a.lhs, a.rhs):
        if isinstance(x, QArray) and x.zero_point is not None:
            return "an operand has a zero point"
    return None


def _why_not(a: Matmul) -> str | None:
    if a.matrices is None:
        return "it has batch axes, or interleaves the axes of its operands"
    reason = why_not_codes(a)
    if reason is not None:
        return reason
    m, n, k = a.sizes
    if min(m, n) <= MAX_ROWS or k < 128:
        return f"{m}x{k}x{n} is smaller than a block"
    return None


class Rows(NamedTuple):
    """The plan to multiply both operands as rows, by hopper.py."""

    is_interpreted: bool

    def run(self, a: Matmul) -> jax.Array:
        left, right, _ = _sides(a)
        operands, scales = (left.codes, right.codes), (left.scales, right.scales)
        arrays, vectors, singles = [], [], []
        for codes, scale, unit in zip(operands, scales, (8, 64)):
            extent, num_k = codes.shape
            padded = max(round_up(extent, unit), 128), round_up(num_k, 128)
            is_single = scale.size == 1
            scale = scale if is_single else views.expand(scale, (extent, 1))
            scale = scale.reshape(-1)
            arrays.append(views.pad_to(codes, padded))
            vectors.append(scale if is_single else views.pad_to(scale, padded[:1]))
            singles.append(is_single)
        call = _scaled_call(a.dtype, (*singles,), self.is_interpreted)
        out = call(*arrays, *vectors)
        return a.result(views.crop_to(out, [len(codes) for codes in operands]))


def plan(a: Matmul, env: Env) -> Rows | Refusal:
    if a.tiles:
        return Refusal("its scales vary within the sum")
    reason = _why_not(a)
    return Rows(env.is_interpreted) if reason is None else Refusal(reason)


class Columns(NamedTuple):
    """The plan for right codes that are stored with their summed axes first, by
    weight_matmul/many_rows.py."""

    planned: many_rows.ManyRows

    def run(self, a: Matmul) -> jax.Array:
        left, right, _ = _sides(a)
        rows = left.codes
        columns = codes_of(right.x).reshape(rows.shape[1], -1)
        vectors = [
            views.expand(side.scales, (n, 1)).reshape(-1)
            for side, n in ((left, rows.shape[0]), (right, columns.shape[1]))
        ]
        return a.result(self.planned.multiply_codes(rows, columns, *vectors))


def plan_columns(a: Matmul, env: Env) -> Columns | Refusal:
    if a.tiles:
        return Refusal("its scales vary within the sum")
    if not a.stored:
        return Refusal("its codes were written for this matmul, as rows")
    reason = _why_not(a)
    if reason is not None:
        return Refusal(reason)
    left, right, is_swapped = _sides(a)
    if ("lhs" if is_swapped else "rhs") not in a.stored:
        return Refusal("its codes were written for this matmul, as rows")
    if right.labels != (*right.summed, *right.kept):
        return Refusal("its stored codes do not have their summed axes first")
    dtypes = codes_of(left.x).dtype, codes_of(right.x).dtype, a.dtype
    shape = a.extent(right.summed), a.extent(right.kept)
    planned = many_rows.plan_codes(dtypes, a.extent(left.kept), shape, env)
    return planned if isinstance(planned, Refusal) else Columns(planned)


class Tiled(NamedTuple):
    """The plan for scales that also vary in tiles of the summed axis, by hopper_tiled.py."""

    is_interpreted: bool

    def run(self, a: Matmul) -> jax.Array:
        left, right, _ = _sides(a)
        operands, scales = (left.codes, right.codes), (left.scales, right.scales)
        num_tiles = operands[0].shape[1] // TILE
        sa = views.expand(scales[0], (operands[0].shape[0], num_tiles))
        per_block = scales[1].shape[0] != operands[1].shape[0]
        num_rows = operands[1].shape[0] // (TILE if per_block else 1)
        sb = views.expand(scales[1], (num_rows, num_tiles))
        call = _tiled_call(a.dtype, self.is_interpreted)
        return a.result(call(*operands, sa.T, sb.T))


def plan_tiled(a: Matmul, env: Env) -> Tiled | Refusal:
    if not a.tiles:
        return Refusal("its scales do not vary within the sum")
    reason = _why_not(a)
    if reason is not None:
        return Refusal(reason)
    if codes_of(a.lhs).dtype.name not in FLOAT8:
        return Refusal("scales within the sum have a kernel for float8 alone")
    m, n, k = a.sizes
    if min(m, n) < hopper_tiled.CTA[0]:
        return Refusal(f"{m}x{k}x{n} is smaller than a block")
    left, right, _ = _sides(a)
    *outer, last = left.summed
    is_run = last in a.tiles and all(
        a.tiles.get(x, 1) in (1, a.extents[x]) for x in outer
    )
    if not is_run or k % TILE or m % TILE or n % TILE:
        return Refusal(
            f"its tiles {a.tiles} are not {TILE} neighbours of the last summed axis"
        )
    for side in (left, right):
        x = side.x
        if not isinstance(x, QArray):
            continue
        extents, shape = (
            tuple(map(part.shape.__getitem__, side.order))
            for part in (x.scale, x.qvalue)
        )
        if fit(extents, shape, len(side.kept)) is None:
            return Refusal(
                f"a scale {x.scale.shape} of {x.shape} is not one per {TILE}"
            )
    return Tiled(env.is_interpreted)


# --- kernels as functions ---------------------------------------------------------------------


@functools.cache
def _scaled_call(out_dtype, single: tuple[bool, bool], interpret: bool) -> Callable:
    """Returns the kernel as a function; `single` says of each operand whether all its rows
    share one scale."""

    def plain(a, b, sa, sb):
        numbers = (((1,), (1,)), ((), ()))
        wide = jnp.int32 if jnp.issubdtype(a.dtype, jnp.integer) else jnp.float32
        out = lax.dot_general(a, b, numbers, preferred_element_type=wide)
        return (out.astype(jnp.float32) * sa[:, None] * sb).astype(out_dtype)

    def kernel(a, b, sa, sb):
        blocks = tuned.scaled_blocks(out_dtype, (a.shape[0], b.shape[0]))
        return hopper.scaled_matmul(a, b, sa, sb, out_dtype, blocks, interpret)

    names = [one if is_one else many for is_one, one, many in zip(single, "uv", "mn")]
    axes = f"m k, n k, {names[0]}, {names[1]} -> m n"
    replicated = ("k", *(x for x in names if x in "uv"))
    return as_function(kernel, plain, axes, replicated, can_partition=not interpret)


@functools.cache
def _tiled_call(out_dtype, interpret: bool) -> Callable:
    def plain(a, b, sa, sb):
        sb = views.expand(sb, (sb.shape[0], b.shape[0]))
        a, b = (
            views.broadcast_with(jnp.multiply, v.astype(jnp.float32), s.T)
            for v, s in ((a, sa), (b, sb))
        )
        return lax.dot_general(a, b, (((1,), (1,)), ((), ()))).astype(out_dtype)

    def kernel(a, b, sa, sb):
        return hopper_tiled.tiled_matmul(a, b, sa, sb, out_dtype, interpret)

    axes, replicated = "m k, n k, t m, t c -> m n", ("k", "t", "c", "n")
    return as_function(kernel, plain, axes, replicated, can_partition=not interpret)
