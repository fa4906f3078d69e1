"""Many rows against a stored weight on Hopper: a plan for hopper_prefill, or why not.

A weight [K, N], as Flax stores it, is decoded on the way into the tensor cores. XLA would
decode all of it first: 70 us for int8 [4096, 14336] on an H200, where 128 rows in bfloat16
take 31. Scales are applied inside and the result leaves in the caller's dtype: with many
rows another pass over it would cost more than the decoding.

    plan           rows in bfloat16
    plan_codes     rows of codes by codes, 8 bits both
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from midtread.kernels import decoding
from midtread.kernels.candidates import Refusal
from midtread.kernels.environment import Env
from midtread.kernels.layout import WeightArrays, WeightMatmul
from midtread.kernels.partition import as_function
from midtread.kernels.weight_matmul import (
    HOPPER,
    MAX_ROWS,
    values_of,
    why_not_format,
)
from midtread.kernels.weight_matmul.few_rows import (
    readable,
    readable_type,
    why_not_zeros,
)
from midtread.kernels.weight_matmul.hopper_prefill import tuned
from midtread.kernels.weight_matmul.hopper_prefill.kernel import prefill_matmul
from midtread.numerics.formats import Format, as_format


class ManyRows(NamedTuple):
    """By hopper_prefill/; rows are bfloat16, or codes with a scale each."""

    fmt: Format
    dtypes: tuple[np.dtype, np.dtype]  # of the rows and of the result
    is_grouped: bool
    planned: tuple[int, tuple[int, int], Any]  # rows, codes, and their blocks
    has_zeros: bool = False  # of groups
    is_interpreted: bool = False

    def run(self, a: WeightMatmul) -> jax.Array:
        return a.result(self.multiply(a.arrays()))

    def multiply(self, a: WeightArrays) -> jax.Array:
        """Returns [M, N], scaled."""
        if a.inner is None:
            scale = a.last.reshape(1, -1).astype(jnp.float32)
        else:
            scale = readable(a.inner)
        scale = jnp.broadcast_to(scale, (scale.shape[0], a.codes.shape[1]))
        args = (a.x_MK, a.codes, scale, *([a.zero] if self.has_zeros else []))
        if a.inner is None or a.last is None:
            return _call(self)(*args)
        wide = self._replace(dtypes=(self.dtypes[0], np.dtype(np.float32)))
        return (_call(wide)(*args) * a.last).astype(self.dtypes[1])

    def multiply_codes(self, x_MK, w_KN, rows_M, columns_N) -> jax.Array:
        """Returns [M, N] of codes and their scales in float32."""
        return _codes_call(self)(x_MK, w_KN, rows_M, columns_N)

    def blocks(self, num_rows: int, shape: tuple[int, int], group: int | None):
        """As planned; a device's part of sharded arrays has its own, or None."""
        if (num_rows, shape) == self.planned[:2]:
            return self.planned[2]
        return tuned.prefill_blocks(self.fmt, num_rows, shape, group, self.dtypes)


def plan(a: WeightMatmul, env: Env) -> ManyRows | Refusal:
    (x, w), weight = a.sides, a.weight
    reason = why_not_format(w.format, HOPPER) or why_not_zeros(a)
    if reason is not None:
        return Refusal(reason)
    if weight.num_rows <= MAX_ROWS:
        return Refusal(
            f"{weight.num_rows} rows: the kernel is for more than {MAX_ROWS}"
        )
    dtypes = np.dtype(x.dtype), np.dtype(a.matmul.dtype)
    if dtypes[0].name != "bfloat16":
        return Refusal(f"the other operand is {dtypes[0]}, not bfloat16")
    if dtypes[1].name not in ("bfloat16", "float32"):
        return Refusal(f"the result is {dtypes[1]}, not bfloat16 or float32")
    if weight.summed != 0:
        return Refusal("more than 64 rows, and stored with its summed axis innermost")
    group = weight.group
    if group and readable_type(w.scale.dtype) != jnp.bfloat16:
        return Refusal(
            f"scales of groups are {w.scale.dtype}: the kernel has bfloat16 ones"
        )
    if group and weight.counts[1] not in (1, weight.shape[1]):
        return Refusal(f"scales of extents {weight.counts} on {weight.shape} codes")
    size = weight.num_rows, weight.shape
    blocks = tuned.prefill_blocks(w.format, *size, group, dtypes)
    if blocks is None:
        what = f"{weight.shape} codes in groups of {group}"
        return Refusal(f"{what} do not divide into blocks")
    kinds = group is not None, (*size, blocks), w.zero_point is not None
    return ManyRows(w.format, dtypes, *kinds, env.is_interpreted)


def plan_codes(dtypes, num_rows: int, shape: tuple[int, int], env: Env):
    """Returns a ManyRows for rows of codes by stored ones, or a Refusal.

    Args:
        dtypes: of the rows, of the stored codes and of the result.
    """
    rows, stored, out = dtypes
    fmt, pair = as_format(stored.name), (rows, jnp.dtype(out))
    blocks = tuned.prefill_blocks(fmt, num_rows, shape, None, pair)
    if blocks is None:
        return Refusal(f"{shape} codes do not divide into blocks")
    planned = num_rows, shape, blocks
    return ManyRows(fmt, pair, False, planned, False, env.is_interpreted)


# --- kernels as functions ---------------------------------------------------------------------


@functools.cache
def _call(plan: ManyRows) -> Callable:
    fmt, is_grouped, dtype = plan.fmt, plan.is_grouped, plan.dtypes[1]

    def plain(x, codes, scale, *zeros):
        values = values_of(codes, fmt, scale if is_grouped else None, *zeros)
        numbers = (((1,), (0,)), ((), ()))
        options = {"preferred_element_type": jnp.float32}
        out = lax.dot_general(x, values.astype(x.dtype), numbers, **options)
        return (out if is_grouped else out * scale).astype(dtype)

    def kernel(x, codes, scale, *zeros):
        group = codes.shape[0] // scale.shape[0] if scale.shape[0] > 1 else None
        blocks = plan.blocks(x.shape[0], codes.shape, group)
        if blocks is None:  # a device's part of a sharded weight may be too narrow
            return plain(x, codes, scale, *zeros)
        options = {"dtype": dtype, "interpret": plan.is_interpreted}
        options |= {"zeros_GN": zeros[0]} if zeros else {}
        codes = decoding.as_bytes(codes)
        return prefill_matmul(x, codes, scale, fmt=fmt, blocks=blocks, **options)

    axes = "m k, k n, g n, g n -> m n" if plan.has_zeros else "m k, k n, g n -> m n"
    return as_function(kernel, plain, axes, ("k", "g"), not plan.is_interpreted)


@functools.cache
def _codes_call(plan: ManyRows) -> Callable:
    fmt, dtype = plan.fmt, plan.dtypes[1]

    def plain(x, w, rows, columns):
        numbers = (((1,), (0,)), ((), ()))
        wide = jnp.int32 if jnp.issubdtype(x.dtype, jnp.integer) else jnp.float32
        out = lax.dot_general(x, w, numbers, preferred_element_type=wide)
        return (out.astype(jnp.float32) * rows[:, None] * columns).astype(dtype)

    def kernel(x, w, rows, columns):
        blocks = plan.blocks(x.shape[0], w.shape, None)
        if blocks is None:  # a device's part of a sharded weight may be too narrow
            return plain(x, w, rows, columns)
        options = {"dtype": dtype, "interpret": plan.is_interpreted}
        arrays = x, decoding.as_bytes(w), columns.reshape(1, -1), rows
        return prefill_matmul(*arrays, fmt=fmt, blocks=blocks, **options)

    can_partition = not plan.is_interpreted
    return as_function(kernel, plain, "m k, k n, m, n -> m n", ("k",), can_partition)
