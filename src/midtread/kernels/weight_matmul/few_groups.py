"""Few rows of each group against stored weights on NVIDIA GPUs: a plan for one of two kernels.

    plan_hopper    hopper_decode/grouped.py: from bfloat16 and in whole blocks
    plan_triton    triton_grouped.py

few_rows.py does this for one weight. Weights are [g, k, n] as they lie in memory, with a scale for
each column or for each tile of the sum.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from midtread.kernels import decoding, triton_words
from midtread.kernels.candidates import Refusal
from midtread.kernels.environment import Env
from midtread.kernels.layout import Matmul, part_extents, why_not_zero
from midtread.kernels.partition import as_function
from midtread.kernels.weight_matmul import (
    HOPPER,
    MAX_ROWS,
    triton_grouped,
    triton_tuned,
    values_of,
    why_not_format,
)
from midtread.kernels.weight_matmul.few_rows import readable, wide_zero
from midtread.kernels.weight_matmul.hopper_decode import grouped as hopper_grouped
from midtread.kernels.weight_matmul.hopper_decode import tuned
from midtread.numerics import views
from midtread.numerics.formats import Format

MOST_GROUPS = tuned.HELD // 12  # a first row and two first blocks, 4 bytes each


class Sizes(NamedTuple):
    """Of rows [R, K] and weights [G, K, N] whose scales vary in T tiles of the sum."""

    num_rows: int
    shape: tuple[int, int, int]
    tiles: int

    @property
    def each(self) -> float:
        """Rows of a group, on average."""
        return self.num_rows / self.shape[0]


def _sizes(a: Matmul, taken, dtypes: tuple[str, ...]) -> Sizes | str:
    """What both kernels have to know, or why one that takes the formats `taken` does not
    take this."""
    matrices, groups, fmt = a.matrices, a.groups, a.rhs.format
    assert groups is not None
    if matrices is None or not matrices.k:
        return "it has axes besides rows, groups and those of a matrix"
    reason = why_not_format(fmt, taken)
    if reason is not None:
        return reason
    if a.lhs.dtype.name not in dtypes:
        return f"the other operand is {a.lhs.dtype}, not {' or '.join(dtypes)}"
    if a.labels[1] != (groups.group, *matrices.k, *matrices.n):
        return "its weights are not stored as groups, summed axes, columns"
    num_groups, num_rows = a.extents[groups.group], a.extents[groups.rows]
    if groups.sizes.shape != (num_groups,):
        return f"sizes {groups.sizes.shape} are not one per group"
    if num_rows > MAX_ROWS * num_groups:
        return f"{num_rows / num_groups:.0f} rows a group: the kernel is for {MAX_ROWS} at most"  # fmt: skip
    counts = part_extents(a.rhs)[1 : 1 + len(matrices.k)]
    if any(n != 1 for n in counts[1:]):
        return "its scales vary along several summed axes"
    _, n, k = a.sizes
    return Sizes(num_rows, (num_groups, k, n), counts[0])


class Grouped(NamedTuple):
    """Rows times their group's weight, scaled, in float32."""

    fmt: Format
    sizes: Sizes
    blocks: Any  # of these sizes; a device's part of sharded weights has its own
    is_hopper: bool
    is_interpreted: bool

    def run(self, a: Matmul) -> jax.Array:
        matrices, w, (groups, k, n) = a.matrices, a.rhs, self.sizes.shape
        assert matrices is not None and a.groups is not None
        x_RK = a.lhs.transpose([*map(a.labels[0].index, (a.groups.rows, *matrices.k))])
        x_RK = x_RK.reshape(-1, k)
        codes, scale = w.qvalue.reshape(groups, k, n), w.scale
        if w.global_scale is not None:
            scale = scale.astype(jnp.float32) * w.global_scale.astype(jnp.float32)
        full = [
            s if label in matrices.k else a.extents[label]
            for label, s in zip(a.labels[1], part_extents(w))
        ]
        over = lambda part: views.expand(part, full).reshape(
            groups, self.sizes.tiles, n
        )
        zero = None if w.zero_point is None else over(wide_zero(w.zero_point))
        if self.is_hopper:
            assert zero is None
            out = _hopper_call(self)(x_RK, codes, readable(over(scale)), a.groups.sizes)
        else:
            out = self._by_triton(x_RK, codes, over(scale), zero, a.groups.sizes)
        return a.result(out)

    def _by_triton(self, x_RK, codes_GKN, scale_GTN, zero_GTN, sizes) -> jax.Array:
        planes = triton_words.num_planes(self.fmt)
        words = triton_words.as_words(codes_GKN, self.fmt)
        by_words = lambda x: x.reshape(*x.shape[:2], x.shape[2] // planes, planes)
        zeros = [] if zero_GTN is None else [by_words(zero_GTN)]
        call = _triton_call(self, bool(zeros))
        return call(x_RK, words, by_words(scale_GTN), sizes, *zeros)


def plan_hopper(a: Matmul, env: Env) -> Grouped | Refusal:
    sizes = why_not_zero(a.rhs) or _sizes(a, HOPPER, ("bfloat16",))
    if isinstance(sizes, str):
        return Refusal(sizes)
    (num_groups, _, n), fmt = sizes.shape, a.rhs.format
    if sizes.num_rows * n * hopper_grouped.MOST_SLOTS * 4 >= 2**31:
        return Refusal(f"{sizes.num_rows} rows of {n} are too many bytes for 32 bits")
    if num_groups >= MOST_GROUPS:
        return Refusal(f"{num_groups} groups: their first rows fill the shared memory")
    cuts = _cuts(fmt, sizes)
    if not cuts:
        what = f"{sizes.shape} codes in {sizes.tiles} tiles of the sum"
        return Refusal(f"{what} do not divide into blocks")
    return Grouped(fmt, sizes, cuts, True, env.is_interpreted)


def _cuts(fmt: Format, sizes: Sizes):
    _, k, n = sizes.shape
    group = None if sizes.tiles == 1 else k // sizes.tiles
    return tuned.grouped_cuts(fmt, sizes.each, (k, n), group)


def plan_triton(a: Matmul, env: Env) -> Grouped | Refusal:
    sizes, fmt = _sizes(a, triton_words.FORMATS, ("bfloat16", "float16")), a.rhs.format
    if isinstance(sizes, str):
        return Refusal(sizes)
    (_, k, n), planes = sizes.shape, triton_words.num_planes(fmt)
    tile, blocks = k // sizes.tiles, None
    if n % planes == 0:
        blocks = triton_tuned.expert_blocks(fmt, sizes.each, (k, n // planes), tile)
    if blocks is None:
        return Refusal(f"{a.rhs.shape} codes do not divide into blocks")
    return Grouped(fmt, sizes, blocks, False, env.is_interpreted)


# --- kernels as functions ---------------------------------------------------------------------


@functools.cache
def _hopper_call(plan: Grouped) -> Callable:
    fmt = plan.fmt

    def plain(x, codes, scale, sizes):
        values = values_of(codes, fmt, scale)
        return lax.ragged_dot(x.astype(jnp.float32), values, sizes)

    def kernel(x, codes, scale, sizes):
        num_groups, k, n = codes.shape
        own = Sizes(len(x), codes.shape, scale.shape[1])
        cuts = plan.blocks if own == plan.sizes else _cuts(fmt, own)
        if not cuts:  # a device's part of sharded weights may be too narrow
            return plain(x, codes, scale, sizes)
        options = {"fmt": fmt, "cuts": cuts, "interpret": plan.is_interpreted}
        bytes_GKB = decoding.as_bytes(codes.reshape(num_groups * k, n))
        bytes_GKB = bytes_GKB.reshape(num_groups, k, -1)
        return hopper_grouped.grouped_matmul(x, bytes_GKB, scale, sizes, **options)

    axes, whole = "r k, g k n, g t n, g -> r n", ("r", "k", "g", "t")
    return as_function(
        kernel, plain, axes, whole, can_partition=not plan.is_interpreted
    )


@functools.cache
def _triton_call(plan: Grouped, has_zero: bool) -> Callable:
    fmt = plan.fmt

    def plain(x, words, scale, sizes, *zeros):
        num_groups, k, _ = words.shape
        codes = lax.bitcast_convert_type(words, fmt.dtype)
        values = values_of(codes, fmt, scale, *zeros)
        out = lax.ragged_dot(
            x.astype(jnp.float32), values.reshape(num_groups, k, -1), sizes
        )
        return out.reshape(len(x), *values.shape[2:])

    def kernel(x, words, scale, sizes, *zeros):
        groups, tiles, _, planes = scale.shape
        _, k, num_words = words.shape
        own, blocks = Sizes(len(x), (groups, k, num_words * planes), tiles), plan.blocks
        if own != plan.sizes:
            shape = words.shape[1:]
            blocks = triton_tuned.expert_blocks(fmt, own.each, shape, k // tiles)
        if blocks is None:  # a device's part of sharded weights may be too narrow
            return plain(x, words, scale, sizes, *zeros)
        options = {"fmt": fmt, "blocks": blocks, "interpret": plan.is_interpreted}
        return triton_grouped.grouped_matmul(x, words, scale, sizes, *zeros, **options)

    zero = ", g t b p" if has_zero else ""
    axes, whole = f"r k, g k b, g t b p, g{zero} -> r b p", ("r", "k", "g", "t", "p")
    return as_function(kernel, plain, axes, whole)
