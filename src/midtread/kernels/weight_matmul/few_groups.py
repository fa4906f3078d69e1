"""Few rows of each group against stored weights on NVIDIA GPUs: which kernel, or why not.

    hopper_decode/grouped.py    Hopper, from bfloat16 and in whole blocks
    triton_grouped.py       else, by Triton

weight_matmul/few_rows.py does this for one weight. Weights are [g, k, n] as they lie in memory, with a
scale for each column or for each tile of the sum.
"""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from midtread.kernels import triton_words
from midtread.kernels.hopper import decoding
from midtread.kernels.partition import as_function
from midtread.kernels.scaled_matmul.grouped_adapter import (
    MAX_ROWS,
    Groups,
    Sides,
    extents_of,
    sides,
)
from midtread.kernels.weight_matmul import few_rows, triton_grouped, triton_tuned
from midtread.kernels.weight_matmul.hopper_decode import grouped as decode_grouped
from midtread.kernels.weight_matmul.hopper_decode import tuned as decode_tuned
from midtread.numerics import views
from midtread.numerics.qarray import QArray
from midtread.numerics.rounding import decode

MOST_GROUPS = decode_tuned.HELD // 12  # a first row and two first blocks, 4 bytes each


def why_not_weight(
    labels, groups: Groups, x, w: QArray, hopper: bool = False
) -> str | None:
    """Why the kernels for few rows a group cannot take this; None if one can.

    Args:
        hopper: whether the device has wgmma.
    """
    found, fmt = sides(labels, groups), w.format
    if found is None or not found.k:
        return "it has axes besides rows, groups and those of a matrix"
    if fmt.name not in few_rows.WEIGHTS:
        return f"{fmt.name} has no kernel: {', '.join(few_rows.WEIGHTS)} have"
    if x.dtype.name not in ("bfloat16", "float16"):
        return f"the other operand is {x.dtype}, not bfloat16 or float16"
    if labels[1] != (groups.group, *found.k, *found.n):
        return "its weights are not stored as groups, summed axes, columns"
    extents = extents_of(labels, x, w)
    if groups.sizes.shape != (extents[groups.group],):
        return f"sizes {groups.sizes.shape} are not one per group"
    num_rows, num_groups = extents[groups.rows], extents[groups.group]
    if num_rows > MAX_ROWS * num_groups:
        return f"{num_rows / num_groups:.0f} rows a group: the kernel is for {MAX_ROWS} at most"  # fmt: skip
    if any(w.scale.shape[labels[1].index(a)] != 1 for a in found.k[1:]):
        return "its scales vary along several summed axes"
    k, n, tiles = _shape(found, extents, w, labels)
    shape = num_groups, k, n
    if hopper and why_not_stream(fmt, num_rows, shape, tiles, x.dtype) is None:
        return None
    if fmt.name not in triton_words.FORMATS:
        return f"{fmt.name} has a kernel on Hopper alone, from bfloat16 and in whole blocks"  # fmt: skip
    words = k, n // triton_words.num_planes(fmt)
    if (
        triton_tuned.expert_blocks(fmt, num_rows / num_groups, words, k // tiles)
        is None
    ):
        return f"{w.shape} codes do not divide into blocks"
    return None


def why_not_stream(fmt, num_rows: int, shape, tiles: int, dtype) -> str | None:
    """Why Hopper's kernel cannot take weights [g, k, n] of a known format."""
    if np.dtype(dtype).name != "bfloat16":
        return f"the other operand is {np.dtype(dtype)}, not bfloat16"
    if num_rows * shape[2] * decode_grouped.MOST_SLOTS * 4 >= 2**31:
        return f"{num_rows} rows of {shape[2]} are too many bytes for 32 bits"
    if shape[0] >= MOST_GROUPS:
        return f"{shape[0]} groups: their first rows fill the shared memory"
    if not _choices(fmt, num_rows, shape, tiles):
        return f"{shape} codes in {tiles} tiles of the sum do not divide into blocks"
    return None


def _choices(fmt, num_rows: int, shape, tiles: int):
    num_groups, k, n = shape
    group = None if tiles == 1 else k // tiles
    return decode_tuned.grouped_choices(fmt, num_rows / num_groups, (k, n), group)


def _shape(found: Sides, extents, w, labels) -> tuple[int, int, int]:
    """Extents of the sum, of the columns, and the number of tiles of the sum."""
    k, n = (math.prod(extents[x] for x in axes) for axes in (found.k, found.n))
    return k, n, w.scale.shape[labels[1].index(found.k[0])]


def weight(
    labels, groups: Groups, x, w: QArray, interpret: bool, hopper: bool = False
) -> jax.Array:
    """Rows times their group's weight, scaled, in float32."""
    found, fmt = sides(labels, groups), w.format
    assert found is not None  # or why_not_weight had said so
    extents = extents_of(labels, x, w)
    k, n, tiles = _shape(found, extents, w, labels)
    num_groups = extents[groups.group]
    order = [labels[0].index(a) for a in (groups.rows, *found.k)]
    x_RK = x.transpose(order).reshape(-1, k)
    codes = w.qvalue.reshape(num_groups, k, n)
    scale = w.scale
    if w.global_scale is not None:
        scale = scale.astype(jnp.float32) * w.global_scale.astype(jnp.float32)
    full = [s if a in found.k else extents[a] for a, s in zip(labels[1], scale.shape)]
    scale = views.expand(scale, full).reshape(num_groups, tiles, n)
    how = fmt, len(x_RK), codes.shape, tiles, x.dtype
    run = _by_stream if hopper and why_not_stream(*how) is None else _by_triton
    out = run(x_RK, codes, scale, groups.sizes, fmt, interpret)
    return out.reshape([extents[a] for a in labels[2]])


def _by_stream(x_RK, codes_GKN, scale_GTN, sizes, fmt, interpret: bool) -> jax.Array:
    call = _stream_call(fmt, interpret)
    return call(x_RK, codes_GKN, few_rows.readable(scale_GTN), sizes)


def _by_triton(x_RK, codes_GKN, scale_GTN, sizes, fmt, interpret: bool) -> jax.Array:
    num_groups, tiles, n = scale_GTN.shape
    planes, words = triton_words.num_planes(fmt), triton_words.as_words(codes_GKN, fmt)
    scale = scale_GTN.astype(jnp.float32)
    scale = scale.reshape(num_groups, tiles, n // planes, planes).transpose(3, 0, 1, 2)
    return _weight_call(fmt, interpret)(x_RK, words, scale, sizes)


# --- kernels as functions ---------------------------------------------------------------------


@functools.cache
def _stream_call(fmt, interpret: bool) -> Callable:
    def plain(x, codes, scale, sizes):
        values = decode(codes, fmt).astype(jnp.float32)
        scale = scale.astype(jnp.float32)
        values = views.broadcast_with(jnp.multiply, values, scale)
        return lax.ragged_dot(x.astype(jnp.float32), values, sizes)

    def kernel(x, codes, scale, sizes):
        (num_groups, k, n), tiles = codes.shape, scale.shape[1]
        choices = _choices(fmt, len(x), codes.shape, tiles)
        if not choices:  # a device's part of sharded weights may be too narrow
            return plain(x, codes, scale, sizes)
        how = {"fmt": fmt, "choices": choices, "interpret": interpret}
        held = decoding.as_bytes(codes.reshape(num_groups * k, n))
        held = held.reshape(num_groups, k, -1)
        return decode_grouped.grouped_matmul(x, held, scale, sizes, **how)

    axes, whole = "r k, g k n, g t n, g -> r n", ("r", "k", "g", "t")
    return as_function(kernel, plain, axes, whole, can_place=not interpret)


@functools.cache
def _weight_call(fmt, interpret: bool) -> Callable:
    def plain(x, words, scale, sizes):
        num_groups, k, _ = words.shape
        codes = lax.bitcast_convert_type(words, fmt.dtype)
        values = decode(codes, fmt).astype(jnp.float32)
        scale = scale.astype(jnp.float32).transpose(1, 2, 3, 0)
        values = views.broadcast_with(jnp.multiply, values, scale)
        out = lax.ragged_dot(
            x.astype(jnp.float32), values.reshape(num_groups, k, -1), sizes
        )
        return out.reshape(len(x), *values.shape[2:])

    def kernel(x, words, scale, sizes):
        rows, k = x.shape[0] / len(sizes), words.shape[1]
        blocks = triton_tuned.expert_blocks(
            fmt, rows, words.shape[1:], k // scale.shape[2]
        )
        return triton_grouped.grouped_matmul(
            x, words, scale, sizes, fmt=fmt, blocks=blocks, interpret=interpret
        )

    axes, whole = "r k, g k b, p g t b, g -> r b p", ("r", "k", "g", "p", "t")
    return as_function(kernel, plain, axes, whole)
