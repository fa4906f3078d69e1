"""Few rows for each expert against stored weights on a GPU, by Triton.

    out_RN  =  sum_t s_gtN  sum_{k in t} x_Rk (value(code_gkN) - z_gtN)    g = group of row R

Weights are [groups, k, n] with n along the memory, codes of 8 bits or fewer, and are read in
words (triton_words.py). The rows of a group are cut into blocks of `m`. XLA makes the table of
these blocks from the sizes, and programs whose block does not exist end at once. Rows beyond all
groups are treated as a group without weights, and come out as zeros.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax

from midtread.kernels import triton_words
from midtread.kernels.pallas_compat import (
    alike,
    pl,
    pltriton,
    result,
    triton_params,
)
from midtread.kernels.scaled_matmul.hopper_grouped import group_bounds
from midtread.kernels.weight_matmul.triton import readable_scale, scale_values
from midtread.numerics.formats import Format


@dataclasses.dataclass(frozen=True)
class ExpertBlocks:
    """How much of the rows and weights a program reads at a time."""

    m: int = 16  # rows
    n: int = 64  # words
    k: int = 128
    split: int = 2  # programs that share a sum
    warps: int = 4
    stages: int = 4


def row_blocks(sizes: jax.Array, num_rows: int, block: int) -> jax.Array:
    """[blocks, 4] int32: for each block its group, its first row, and, twice, the end of its
    rows. Blocks that are not used are empty."""
    starts, ends = group_bounds(sizes, num_rows)
    counts = -((starts - ends) // block)
    until = jnp.cumsum(counts)
    most = num_rows // block + len(starts)
    index = jnp.arange(most, dtype=jnp.int32)
    group = jnp.sum(index[:, None] >= until, axis=1)
    is_used, group = group < len(starts), jnp.minimum(group, len(starts) - 1)
    first = starts[group] + (index - (until - counts)[group]) * block
    end = jnp.where(is_used, jnp.minimum(ends[group], first + block), first)
    return jnp.stack([group, first, end, end], axis=1).astype(jnp.int32)


def _body(
    table_ref, x_ref, w_ref, s_ref, *refs, fmt, blocks: ExpertBlocks, native
):  # fmt: skip
    """Gets whole arrays: x [R, K], w [G, K, N / P] in words, s [G, T, N / P, P], zero points
    like them where there are any, and out [P, R, N / P]."""
    *zeros, out_ref = refs
    num_groups, num_k, _ = w_ref.shape
    num_tiles = s_ref.shape[1]
    group, first, end = (table_ref[p] for p in range(3))
    column = pl.program_id(1) * blocks.n
    share = num_k // blocks.split
    start = pl.program_id(2) * share
    row = first + lax.broadcasted_iota(jnp.int32, (blocks.m,), 0)
    inside = row < end
    own = jnp.minimum(group, num_groups - 1)
    columns = pl.ds(column, blocks.n)
    has_sum = (
        bool(zeros) and num_tiles == 1
    )  # x is summed for the zero points of a column

    def factor(ref, plane, tile):
        return pltriton.load(ref.at[own, tile, columns, jnp.int32(plane)])[None, :]

    def scaled(part, of_x, plane, tile):
        for z_ref in zeros:
            part = part - of_x * factor(z_ref, plane, tile).astype(jnp.float32)
        return part * scale_values(factor(s_ref, plane, tile))

    def body(i, total):
        at = pl.ds(start + i * blocks.k, blocks.k)
        words = pltriton.load(w_ref.at[own, at, columns])
        x = pltriton.load(x_ref.at[pl.ds(first, blocks.m), at], mask=inside[:, None], other=0)  # fmt: skip
        added, of_x = [], 0.0
        if zeros:
            of_x = jnp.sum(x.astype(jnp.float32), axis=1)[:, None]
        for p, values in enumerate(triton_words.planes(words, fmt, native)):
            part = pltriton.dot(x, values).astype(jnp.float32)
            if num_tiles > 1:
                tile = (start + i * blocks.k) // (num_k // num_tiles)
                part = scaled(part, of_x, p, tile)
            added.append(part)
        if not has_sum:
            return [a + b for a, b in zip(total, added)]
        return [*(a + b for a, b in zip(total, added)), total[-1] + of_x]

    @pl.when(end > first)
    def _():
        zero = jnp.zeros((blocks.m, blocks.n), jnp.float32)
        steps = (group < num_groups).astype(jnp.int32) * (share // blocks.k)
        count = out_ref.shape[0]
        sums = [jnp.zeros((blocks.m, 1), jnp.float32)] * has_sum
        total = lax.fori_loop(0, steps, body, [zero] * count + sums)
        for p in range(count):
            out = total[p]
            if num_tiles == 1:
                out = scaled(out, total[-1], p, jnp.int32(0))
            target = out_ref.at[jnp.int32(p), pl.ds(first, blocks.m), columns]
            pltriton.store(target, out, mask=inside[:, None])


def grouped_matmul(
    x_RK: jax.Array,
    words_GKB: jax.Array,
    scale_GTBP: jax.Array,
    sizes_G: jax.Array,
    zero_GTBP: jax.Array | None = None,
    *,
    fmt: Format,
    blocks: ExpertBlocks,
    interpret: bool = False,
) -> jax.Array:
    """[R, B, P] in float32: rows times the values of their group's codes, scaled for each of
    T tiles of the sum; column b P + p of the result is in word b. Zero points are of the
    scale's shape, in a type that is no smaller than a byte."""
    num_rows, num_b = x_RK.shape[0], words_GKB.shape[2]
    x, size = triton_words.fitted(x_RK)
    planes = triton_words.num_planes(fmt)
    table = row_blocks(sizes_G, num_rows, blocks.m)
    whole = lambda x: pl.BlockSpec(x.shape, lambda r, j, i: (0,) * x.ndim)
    zeros = [] if zero_GTBP is None else [zero_GTBP]
    args = alike(x, words_GKB, readable_scale(scale_GTBP), *zeros)
    out = pl.pallas_call(
        functools.partial(_body, fmt=fmt, blocks=blocks, native=not interpret),
        grid=(table.shape[0], num_b // blocks.n, blocks.split),
        in_specs=[
            pl.BlockSpec((None, 4), lambda r, j, i: (r, 0)),
            *(whole(x) for x in args),
        ],
        out_specs=pl.BlockSpec(
            (None, planes, num_rows, num_b), lambda r, j, i: (i, 0, 0, 0)
        ),
        out_shape=result((blocks.split, planes, num_rows, num_b), jnp.float32, x_RK),
        compiler_params=triton_params(blocks.warps, blocks.stages),
        interpret=interpret,
    )(table, *args)
    return jnp.sum(out, axis=0).transpose(1, 2, 0) * size[:, :, None]
