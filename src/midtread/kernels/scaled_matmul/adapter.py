"""NVIDIA GPUs: from a contraction of codes to a kernel call, or the reason why not.

A matmul kernel knows matrices with the summed axis innermost, a contraction has labelled
axes in any order. Here labels become matrices (a transpose, which XLA drops where a
quantizing kernel has written the codes in that order already), and kernels become
functions that JAX can transform (partition.py).
"""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from midtread.kernels.pallas_compat import MIXES_FLOAT8
from midtread.kernels.partition import as_function
from midtread.kernels.quantize.triton import TILE
from midtread.kernels.scaled_matmul import hopper as scaled_hopper
from midtread.kernels.scaled_matmul import hopper_tiled
from midtread.kernels.scaled_matmul import tuned as scaled_tuned
from midtread.kernels.weight_matmul import many_rows
from midtread.kernels.weight_matmul.few_rows import MAX_ROWS
from midtread.numerics import views
from midtread.numerics.qarray import QArray

Labels = tuple[str, ...]
FLOAT8 = ("float8_e4m3fn", "float8_e5m2")


class Matrices(NamedTuple):
    """Labels by what they do: kept from lhs, kept from rhs, summed."""

    m: Labels
    n: Labels
    k: Labels


def matrices(lhs: Labels, rhs: Labels, out: Labels) -> Matrices | None:
    """None where an axis is shared by both operands and the result."""
    if any(x in rhs and x in out for x in lhs):
        return None
    k = tuple(x for x in lhs if x in rhs)
    m = tuple(x for x in out if x in lhs)
    n = tuple(x for x in out if x in rhs)
    if not k or out not in (m + n, n + m):
        return None
    return Matrices(m, n, k)


def why_not_scaled(labels, lhs, rhs) -> str | None:
    """Why the scaled matmul kernel cannot run this contraction; None if it can."""
    found = matrices(*labels)
    if found is None:
        return "it has batch axes, or interleaves the axes of its operands"
    reason = why_not_codes(lhs, rhs)
    if reason is not None:
        return reason
    extents = _extents(labels, lhs, rhs)
    m, n, k = (math.prod(extents[x] for x in axes) for axes in found)
    if min(m, n) <= MAX_ROWS or k < 128:
        return f"{m}x{k}x{n} is smaller than a block"
    return None


def why_not_codes(lhs, rhs) -> str | None:
    """Why wgmma cannot multiply these operands' codes; None if it can."""
    pair = [codes_of(x).dtype.name for x in (lhs, rhs)]
    is_float8 = all(d in FLOAT8 for d in pair)
    if pair != ["int8", "int8"] and not is_float8:
        return f"it multiplies {pair[0]} by {pair[1]}: int8 by int8 or float8 by float8 are"
    if pair[0] != pair[1] and not MIXES_FLOAT8:
        return f"{pair[0]} by {pair[1]} needs jax 0.11"
    for x in (lhs, rhs):
        if isinstance(x, QArray) and x.zero_point is not None:
            return "an operand has a zero point"
    return None


def codes_of(x) -> jax.Array:
    return x.qvalue if isinstance(x, QArray) else x


def _extents(labels, lhs, rhs) -> dict[str, int]:
    left = dict(zip(labels[0], codes_of(lhs).shape))
    return left | dict(zip(labels[1], codes_of(rhs).shape))


def scaled(labels, lhs, rhs, out_dtype, interpret: bool, stored=()) -> jax.Array:
    """sum_k lhs rhs, scaled, in the order of the output's labels.

    Args:
        stored: the sides, "lhs" or "rhs", that lie in memory as their labels say. Others
            were written for this contraction, with the summed axis innermost.
    """
    found = matrices(*labels)
    left, right = (labels[0], lhs, found.m), (labels[1], rhs, found.n)
    is_swapped = labels[2] != found.m + found.n  # the result comes out transposed
    if is_swapped:
        left, right = right, left
    if ("lhs" if is_swapped else "rhs") in stored and right[0] == found.k + right[2]:
        out = _by_columns(left, right, found.k, out_dtype, interpret)
        if out is not None:
            extents = _extents(labels, lhs, rhs)
            return out.reshape([extents[x] for x in labels[2]])
    operands = [_as_rows(x, of, kept, found.k) for of, x, kept in (left, right)]
    scales = [_scales(x, of, kept, found.k) for of, x, kept in (left, right)]
    vectors = [
        s.reshape(-1) if s.size == 1 else _spread(s, (v.shape[0], 1)).reshape(-1)
        for s, v in zip(scales, operands)
    ]
    sizes = [v.shape[0] for v in operands]
    shapes = [
        (max(up(v.shape[0], by), 128), up(v.shape[1], 128))
        for v, by in zip(operands, (8, 64))
    ]
    operands = [views.pad_to(v, shape) for v, shape in zip(operands, shapes)]
    vectors = [
        v if v.size == 1 else views.pad_to(v, shape[:1])
        for v, shape in zip(vectors, shapes)
    ]
    single = vectors[0].size == 1, vectors[1].size == 1
    out = _scaled_call(out_dtype, single, interpret)(*operands, *vectors)
    out = views.crop_to(out, sizes)
    extents = _extents(labels, lhs, rhs)
    return out.reshape([extents[x] for x in labels[2]])


def _by_columns(left, right, summed: Labels, dtype, interpret) -> jax.Array | None:
    """`scaled` of (labels, operand, labels that are kept) where the right codes are stored
    with the summed axes first; None if their kernel does not take them."""
    rows = _as_rows(left[1], left[0], left[2], summed)
    columns = codes_of(right[1]).reshape(rows.shape[1], -1)
    one, other = (
        _spread(_scales(x, of, kept, summed), (extent, 1)).reshape(-1)
        for (of, x, kept), extent in ((left, rows.shape[0]), (right, columns.shape[1]))
    )
    return many_rows.codes(rows, columns, one, other, dtype, interpret)


def up(extent: int, multiple: int) -> int:
    """The copy engine wants whole rows of its pattern; the rest is zeros."""
    return -(-extent // multiple) * multiple


def _as_rows(x, labels: Labels, kept: Labels, summed: Labels) -> jax.Array:
    codes = codes_of(x).transpose([labels.index(a) for a in (*kept, *summed)])
    num_rows = math.prod(codes.shape[: len(kept)])
    return codes.reshape(num_rows, -1)


def _scales(x, labels: Labels, kept: Labels, summed: Labels) -> jax.Array:
    """float32 [r, t]: over the rows of `_as_rows`, and over tiles of their sums."""
    order = [labels.index(a) for a in (*kept, *summed)]
    shape = [codes_of(x).shape[a] for a in order]
    if not isinstance(x, QArray):
        return jnp.ones((1, 1), jnp.float32)
    scale = x.scale.astype(jnp.float32).transpose(order)
    return as_matrix(scale, shape, len(kept))


def laid(extents, shape, first: int) -> tuple[list[int], list[int]] | None:
    """How a part of `shape`, with these extents, fits [rows, columns] split at `first`:
    the shape to broadcast it to, and its matrix: 1, all, or one per TILE on either side.
    None if tiles of several axes do not follow one another."""
    wide, matrix = [], []
    for axes in (range(first), range(first, len(shape))):
        own, full = [extents[a] for a in axes], [shape[a] for a in axes]
        if all(n == 1 for n in own):
            wide += own
            matrix.append(1)
            continue
        if own[-1] not in (1, full[-1]):
            if own[-1] * TILE != full[-1]:
                return None
            full[-1] = own[-1]
        if any(n not in (1, m) for n, m in zip(own, full)):
            return None
        wide += full
        matrix.append(math.prod(full))
    return wide, matrix


def as_matrix(part: jax.Array, shape, first: int) -> jax.Array:
    found = laid(part.shape, shape, first)
    assert found is not None, (part.shape, shape)
    return jnp.broadcast_to(part, found[0]).reshape(found[1])


def why_not_blocked(labels, lhs, rhs, tiles: dict[str, int]) -> str | None:
    """Why the kernel for scales that vary in tiles of the sum cannot run this."""
    reason = why_not_scaled(labels, lhs, rhs)
    if reason is not None:
        return reason
    found = matrices(*labels)
    assert found is not None  # or why_not_scaled had said so
    if codes_of(lhs).dtype.name not in FLOAT8:
        return "scales within the sum have a kernel for float8 alone"
    extents = _extents(labels, lhs, rhs)
    m, n, k = (math.prod(extents[x] for x in axes) for axes in found)
    if min(m, n) < hopper_tiled.CTA[0]:
        return f"{m}x{k}x{n} is smaller than a block"
    if set(tiles) != {found.k[-1]} or k % TILE or m % TILE or n % TILE:
        return f"its tiles {tiles} are not {TILE} neighbours of the last summed axis"
    for x, of, kept in ((lhs, labels[0], found.m), (rhs, labels[1], found.n)):
        order = [of.index(a) for a in (*kept, *found.k)]
        if isinstance(x, QArray) and (
            laid([x.scale.shape[a] for a in order], [codes_of(x).shape[a] for a in order], len(kept))
            is None
        ):  # fmt: skip
            return f"a scale {x.scale.shape} of {x.shape} is not one per {TILE}"
    return None


def blocked(labels, lhs, rhs, out_dtype, interpret: bool) -> jax.Array:
    """`scaled`, where scales vary in tiles of the summed axis too."""
    found = matrices(*labels)
    left, right = (labels[0], lhs, found.m), (labels[1], rhs, found.n)
    if labels[2] != found.m + found.n:
        left, right = right, left
    operands = [_as_rows(x, of, kept, found.k) for of, x, kept in (left, right)]
    scales = [_scales(x, of, kept, found.k) for of, x, kept in (left, right)]
    num_tiles = operands[0].shape[1] // TILE
    sa = _spread(scales[0], (operands[0].shape[0], num_tiles))
    per_block = scales[1].shape[0] != operands[1].shape[0]
    rows = operands[1].shape[0] // (TILE if per_block else 1)
    sb = _spread(scales[1], (rows, num_tiles))
    out = _blocked_call(out_dtype, interpret)(*operands, sa.T, sb.T)
    extents = _extents(labels, lhs, rhs)
    return out.reshape([extents[x] for x in labels[2]])


def _spread(part: jax.Array, shape: tuple[int, int]) -> jax.Array:
    """[r, t] repeated to `shape`, by tiles."""
    return views.expand(part, shape)


# --- kernels as functions ---------------------------------------------------------------------


@functools.cache
def _scaled_call(out_dtype, single: tuple[bool, bool], interpret: bool) -> Callable:
    """`single`: whether either operand has one scale for all its rows."""

    def plain(a, b, sa, sb):
        numbers = (((1,), (1,)), ((), ()))
        wide = jnp.int32 if jnp.issubdtype(a.dtype, jnp.integer) else jnp.float32
        out = lax.dot_general(a, b, numbers, preferred_element_type=wide)
        return (out.astype(jnp.float32) * sa[:, None] * sb).astype(out_dtype)

    def kernel(a, b, sa, sb):
        blocks = scaled_tuned.scaled_blocks(out_dtype, (a.shape[0], b.shape[0]))
        return scaled_hopper.scaled_matmul(a, b, sa, sb, out_dtype, blocks, interpret)

    names = [one if is_one else many for is_one, one, many in zip(single, "uv", "mn")]
    axes = f"m k, n k, {names[0]}, {names[1]} -> m n"
    replicated = ("k", *(x for x in names if x in "uv"))
    return as_function(kernel, plain, axes, replicated, can_place=not interpret)


@functools.cache
def _blocked_call(out_dtype, interpret: bool) -> Callable:
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
    return as_function(kernel, plain, axes, replicated, can_place=not interpret)
