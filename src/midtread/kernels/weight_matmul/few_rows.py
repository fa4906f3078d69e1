"""Few rows against a stored weight on NVIDIA GPUs: a plan for one of two kernels, or why not.

    plan_hopper    hopper_decode/: stored [K, N] as Flax does, from bfloat16, in whole blocks
    plan_triton    triton.py: any extents and zero points, and from float16 too; and stored
                   [N, K] (a tied head), of 8-bit codes

Codes are read where they lie: no weight is prepared or moved for a kernel.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from midtread.kernels import decoding, pending
from midtread.kernels.candidates import Refusal
from midtread.kernels.environment import Env, here
from midtread.kernels.layout import WeightArrays, WeightMatmul
from midtread.kernels.partition import as_function
from midtread.kernels.weight_matmul import (
    HOPPER,
    MAX_ROWS,
    TRITON,
    triton,
    triton_tuned,
    values_of,
    why_not_format,
)
from midtread.kernels.weight_matmul.hopper_decode import kernel as hopper_kernel
from midtread.kernels.weight_matmul.hopper_decode import tuned
from midtread.numerics.formats import Format, dtype_bits


def _why_not(a: WeightMatmul, taken, dtypes: tuple[str, ...]) -> str | None:
    """Says what both kernels refuse, of which one takes the formats `taken`."""
    (x, w), stored = a.sides, a.weight
    reason = why_not_format(w.format, taken)
    if reason is not None:
        return reason
    if x.dtype.name not in dtypes:
        return f"the other operand is {x.dtype}, not {' or '.join(dtypes)}"
    if not 0 < stored.num_rows <= MAX_ROWS:
        return f"{stored.num_rows} rows: the kernel is for {MAX_ROWS} at most"
    is_whole = stored.shape[1] % decoding.num_planes(w.format) == 0
    if stored.summed == 0 and not (
        is_whole and stored.counts[1] in (1, stored.shape[1])
    ):
        return f"scales of extents {stored.counts} on {stored.shape} codes"
    return None


class Hopper(NamedTuple):
    """By hopper_decode/, which scales columns in float32 and groups in their own type."""

    fmt: Format
    dtype: np.dtype  # of the result
    is_grouped: bool
    planned: tuple[int, tuple[int, int], Any]  # rows, codes, and their blocks
    has_zeros: bool = False  # of groups
    is_interpreted: bool = False

    def run(self, a: WeightMatmul) -> jax.Array:
        is_plain = a.weight.side == "rhs" and list(a.weight.order) == sorted(a.weight.order)  # fmt: skip
        if pending.is_wanted() and is_plain and here().is_alone:
            return self.leave(a)
        return a.result(self.multiply(a.arrays()))

    def leave(self, a: WeightMatmul) -> jax.Array:
        """Returns the result, and notes how to compute it from what the kernel writes."""
        of, gated = a.arrays(), None
        given = of.x_MK, of.codes, *self._scales(of)
        left = _parts_call(self, of.last is not None)(*given)
        gate, blocks = pending.gate_wanted(), self.planned[2]
        if gate is not None and blocks.split == blocks.cluster and self.dtype == jnp.bfloat16:  # fmt: skip
            gated = _parts_call(self, of.last is not None, gate)(*given).total()
        out = a.result(left.total().astype(self.dtype))
        is_left = left.parts.dtype == jnp.float32
        pending.note(out, pending=left if is_left else None, gated=gated)
        return out

    def multiply(self, a: WeightArrays) -> jax.Array:
        """Returns [M, N], scaled."""
        call = _hopper_call(self._replace(dtype=self.kernel_dtype), a.last is not None)
        return call(a.x_MK, a.codes, *self._scales(a)).astype(self.dtype)

    @property
    def kernel_dtype(self) -> np.dtype:
        """What the kernel writes."""
        return self.dtype if self.dtype == jnp.bfloat16 else np.dtype(np.float32)

    def _scales(self, a: WeightArrays) -> list[jax.Array]:
        """Scales of groups, scales of columns, zero points: those that there are."""
        num_n, scales = a.codes.shape[1], []
        if a.inner is not None:
            scales = [readable(jnp.broadcast_to(a.inner, (a.inner.shape[0], num_n)))]
        if a.last is not None:
            scales.append(readable(jnp.broadcast_to(a.last, (num_n,))))
        if self.has_zeros:
            scales.append(a.zero)
        return scales


def plan_hopper(a: WeightMatmul, env: Env) -> Hopper | Refusal:
    (_, w), stored = a.sides, a.weight
    reason = _why_not(a, HOPPER, ("bfloat16",)) or why_not_zeros(a)
    if reason is not None:
        return Refusal(reason)
    if stored.summed != 0:
        return Refusal("it is stored with its summed axis innermost")
    size = stored.num_rows, stored.shape
    blocks = tuned.decode_blocks(w.format, *size, stored.group)
    if blocks is None:
        what = f"{stored.shape} codes in groups of {stored.group}"
        return Refusal(f"{what} do not divide into blocks")
    kinds = stored.has_inner, (*size, blocks), w.zero_point is not None
    return Hopper(w.format, np.dtype(a.matmul.dtype), *kinds, env.is_interpreted)


def why_not_zeros(a: WeightMatmul) -> str | None:
    """Says why Hopper's kernels do not take the zero points of a weight; None if they do."""
    w = a.sides[1]
    if w.zero_point is None:
        return None
    if not a.weight.has_inner or w.zero_point.shape != w.scale.shape:
        return "its zero points are not those of groups"
    if a.weight.counts[1] == 1 or w.zero_point.dtype != w.qvalue.dtype:
        return (
            f"its zero points, {w.zero_point.dtype}, are not codes, one for each column"
        )
    return None


class Triton(NamedTuple):
    """By triton.py: [M, N] in float32, of which columns are scaled afterwards. What is
    subtracted from all codes of a column is so too, times the sum of x."""

    fmt: Format
    dtype: np.dtype
    planned: tuple[int, tuple[int, int], Any]
    is_turned: bool  # stored [N, K]
    is_interpreted: bool

    def run(self, a: WeightMatmul) -> jax.Array:
        return a.result(self.multiply(a.arrays()))

    def multiply(self, a: WeightArrays) -> jax.Array:
        """Returns [M, N], scaled."""
        out = self._sum(a)
        if a.inner is None and a.zero is not None:
            of_x = jnp.sum(a.x_MK.astype(jnp.float32), axis=1, keepdims=True)
            out = out - of_x * a.zero.astype(jnp.float32)
        out = out if a.last is None else out * a.last.astype(jnp.float32)
        return out.astype(self.dtype)

    def _sum(self, a: WeightArrays) -> jax.Array:
        if self.is_turned:
            return _turned_call(self.planned, self.is_interpreted)(a.x_MK, a.codes)
        planes, n = decoding.num_planes(self.fmt), a.codes.shape[1]
        as_bytes = lambda x: decoding.as_bytes(x) if planes > 1 else x  # free
        args, zeros = [a.x_MK, as_bytes(a.codes)], None
        if a.inner is not None:
            by_bytes = lambda x: jnp.broadcast_to(x, (len(x), n)).reshape(-1, n // planes, planes)  # fmt: skip
            args.append(by_bytes(a.inner))
            if a.zero is not None:
                is_codes = planes > 1 and a.zero.dtype == a.codes.dtype
                is_codes = is_codes and a.zero.shape[1] == n
                zeros = "codes" if is_codes else "values"
                zero = as_bytes(a.zero) if is_codes else by_bytes(wide_zero(a.zero))
                args.append(zero)
        options = self.planned, a.inner is not None, zeros, self.is_interpreted
        return _triton_call(self.fmt, *options)(*args).reshape(-1, n)


def plan_triton(a: WeightMatmul, env: Env) -> Triton | Refusal:
    (_, w), stored = a.sides, a.weight
    reason = _why_not(a, TRITON, ("bfloat16", "float16"))
    if reason is not None:
        return Refusal(reason)
    fmt, is_turned = w.format, stored.summed != 0
    if is_turned:
        if dtype_bits(fmt.dtype) < 8 or stored.has_inner:
            return Refusal("4-bit or tiled, and stored with its summed axis innermost")
        size = stored.num_rows, stored.shape
        blocks = triton.transposed_blocks(*size)
    else:
        size = (
            stored.num_rows,
            (stored.shape[0], stored.shape[1] // decoding.num_planes(fmt)),
        )
        blocks = triton_tuned.weight_blocks(fmt, *size, stored.group)
    if blocks is None:
        return Refusal(f"{stored.shape} codes do not divide into blocks")
    dtype = np.dtype(a.matmul.dtype)
    return Triton(fmt, dtype, (*size, blocks), is_turned, env.is_interpreted)


def wide_zero(zero: jax.Array) -> jax.Array:
    """Returns zero points in a type of whole bytes."""
    return zero.astype(jnp.float32) if dtype_bits(zero.dtype) < 8 else zero


def readable(scale: jax.Array) -> jax.Array:
    """Casts scales to one of the two types that Hopper's kernels read."""
    return scale.astype(readable_type(scale.dtype))


def readable_type(dtype) -> np.dtype:
    """Returns that of the two which has all values of a type of scales: those of 8 bits are in
    bfloat16."""
    is_narrow = dtype.itemsize == 1 or dtype == jnp.bfloat16
    return np.dtype(jnp.bfloat16 if is_narrow else jnp.float32)


# --- kernels as functions ---------------------------------------------------------------------
# Blocks were planned for whole arrays. A device's part of sharded ones has blocks of its own.


@functools.cache
def _turned_call(planned, interpret: bool) -> Callable:
    def plain(x, codes):
        numbers = (((1,), (1,)), ((), ()))
        return lax.dot_general(
            x.astype(jnp.float32), codes.astype(jnp.float32), numbers
        )

    def kernel(x, codes):
        size, blocks = (x.shape[0], codes.shape), planned[2]
        blocks = blocks if size == planned[:2] else triton.transposed_blocks(*size)
        return triton.transposed_matmul(x, codes, blocks=blocks, interpret=interpret)

    return as_function(kernel, plain, "m k, n k -> m n", ("k",))


@functools.cache
def _hopper_call(plan: Hopper, has_last: bool) -> Callable:
    """Returns the kernel as a function of x, of codes, and of what there is: scales [G, N] of
    groups, scales [N] of columns, zero points [G, N] of groups."""
    fmt, is_there = plan.fmt, (plan.is_grouped, has_last, plan.has_zeros)

    def parts(given) -> list:
        rest = iter(given)
        return [next(rest) if there else None for there in is_there]

    def plain(x, codes, *given):
        scale, last, zero = parts(given)
        values = values_of(codes, fmt, scale, zero)
        numbers = (((1,), (0,)), ((), ()))
        out = lax.dot_general(x.astype(jnp.float32), values, numbers)
        out = out if last is None else out * last.astype(jnp.float32)
        return out.astype(plan.dtype)

    def kernel(x, codes, *given):
        size, blocks = (x.shape[0], codes.shape), plan.planned[2]
        scale, last, zero = parts(given)
        if size != plan.planned[:2]:
            group = None if scale is None else codes.shape[0] // scale.shape[0]
            blocks = tuned.decode_blocks(fmt, *size, group)
            if blocks is None:  # a part may be too narrow
                return plain(x, codes, *given)
        options = {"dtype": plan.dtype, "interpret": plan.is_interpreted}
        out = hopper_kernel.decode_matmul(
            x, decoding.as_bytes(codes), scale, last, zero, fmt=fmt, blocks=blocks, **options
        )  # fmt: skip
        return out.total().astype(plan.dtype)

    names = [name for name, there in zip(("g n", "n", "g n"), is_there) if there]
    axes = f"m k, k n, {', '.join(names)} -> m n"
    replicated = ("k", "g") if plan.is_grouped else ("k",)
    can_partition = not plan.is_interpreted
    return as_function(kernel, plain, axes, replicated, can_partition=can_partition)


@functools.cache
def _parts_call(plan: Hopper, has_last: bool, gate: str | None = None) -> Callable:
    """Returns the same function for one device, where it may leave sums and scales of columns,
    or gate columns by each other."""
    is_there = plan.is_grouped, has_last, plan.has_zeros

    @jax.jit
    def kernel(x, codes, *given) -> pending.Pending:
        rest = iter(given)
        parts = [next(rest) if there else None for there in is_there]
        options = {"dtype": plan.kernel_dtype, "interpret": plan.is_interpreted}
        options |= {"gate": gate}
        return hopper_kernel.decode_matmul(
            x, decoding.as_bytes(codes), *parts, fmt=plan.fmt, blocks=plan.planned[2], **options
        )  # fmt: skip

    return kernel


@functools.cache
def _triton_call(
    fmt: Format, planned, is_grouped: bool, zeros: str | None, interpret: bool
) -> Callable:
    """Returns the kernel as a function of x, of bytes, and for groups of scales [G, B, P] and
    zero points, which are the same, or bytes too."""

    def plain(x, codes, scale=None, zero=None):
        zero = _codes(zero, fmt) if zeros == "codes" else zero
        values = values_of(_codes(codes, fmt), fmt, scale, zero)
        numbers = (((1,), (0,)), ((), ()))
        return lax.dot_general(x.astype(jnp.float32), values, numbers)

    def kernel(x, codes, *factors):
        size, blocks = (x.shape[0], codes.shape), planned[2]
        if size != planned[:2]:
            group = x.shape[1] // factors[0].shape[0] if factors else None
            blocks = triton_tuned.weight_blocks(fmt, *size, group)
            if blocks is None:  # a part may be too narrow
                return plain(x, codes, *factors)
        options = {"fmt": fmt, "blocks": blocks, "interpret": interpret}
        return triton.weight_matmul(x, codes, *factors, **options)

    parts = {None: "", "codes": ", g b", "values": ", g b p"}[zeros]
    axes = f"m k, k b, g b p{parts} -> m b p" if is_grouped else "m k, k b -> m b p"
    replicated = ("k", "g", "p") if is_grouped else ("k",)
    return as_function(kernel, plain, axes, replicated)


def _codes(bytes_: jax.Array, fmt: Format) -> jax.Array:
    """Returns codes [.., B, P] of bytes [.., B]."""
    planes = decoding.num_planes(fmt)
    codes = lax.bitcast_convert_type(bytes_, fmt.dtype) if planes > 1 else bytes_
    return codes.reshape(*bytes_.shape, planes)
