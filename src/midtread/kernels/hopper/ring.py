"""The ring of buffers through which a stored weight reaches the tensor cores.

Two kernels read stored weights on Hopper: weight_matmul/hopper_decode for few rows and
weight_matmul/hopper_prefill for many. They divide their work differently and share this:

    References    every array and buffer that a kernel was given, by name
    Plan          what both kernels know about their weight
    ring_buffers  the shared memory of a ring
    fetch_*       the copy engine fills a buffer with codes, scales or rows
    Piece         some rows of a buffer, which are decoded at a time

A ring is a number of buffers. Each holds a block of the weight's codes, the part of x that
meets it, and the scales of its groups. A buffer has two barriers: `full` says that all parts
of it have arrived, and `empty` that every warpgroup has read it.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from midtread.kernels.decoding import as_bytes
from midtread.kernels.hopper import decoding, lanes
from midtread.kernels.hopper.shared_memory import swizzled
from midtread.kernels.pallas_compat import pl, plgpu
from midtread.numerics.formats import Format, dtype_bits


@dataclasses.dataclass(frozen=True)
class References:
    """What the body of a kernel reads and writes; None for what this kernel does not have.

    A kernel names its operands and its buffers where it makes them (`named`), so that no
    order of arguments has to be known anywhere else.
    """

    # in global memory
    x: Any = None  # rows [M, K]
    codes: Any = None  # bytes of the weight [K, B]
    group_scales: Any = None  # [G, N]
    group_zeros: Any = None  # [G, B]: zero points, which are codes too
    column_scales: Any = None  # [1, N], or [G, N] where rows come in groups
    row_scales: Any = None  # [M], where the rows are codes too
    table: Any = None  # the values of a format that is looked up
    out: Any = None
    # in shared memory
    x_ring: Any = None
    codes_ring: Any = None
    scale_ring: Any = None
    zero_ring: Any = None
    full: Any = None
    empty: Any = None
    table_smem: Any = None
    table_arrived: Any = None  # a barrier
    out_smem: Any = None  # results on their way to global memory
    received: Any = None  # sums that other programs of the cluster send
    signal: Any = None  # the barrier that says they have arrived
    exchange: Any = None  # where sums change hands while the rings are still in use
    left_operands: Any = None  # the interpreter's wgmma takes no registers


def named(names: tuple[str, ...], refs) -> References:
    """Names the references that Pallas passes to a body, in the order they were made."""
    return References(**dict(zip(names, refs, strict=True)))


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a kernel's body knows about the weight beside its references."""

    fmt: Format
    group: int | None  # rows of the weight that share a scale; None if all of them do
    native: bool  # False where the kernel is interpreted
    zero_bits: int  # of a zero point of a group and column; 0 if there are none

    @property
    def looks_up(self) -> bool:
        """Whether codes are decoded by a table in shared memory."""
        return self.fmt.table is not None and self.native

    def table_operand(self) -> dict:
        """Returns the table as a named operand, if there is one."""
        if not self.looks_up:
            return {}
        return {"table": jnp.asarray(decoding.pairs(self.fmt.table))}

    def table_buffers(self) -> dict:
        """Returns shared memory for the table, if there is one."""
        if not self.looks_up:
            return {}
        table = plgpu.SMEM(decoding.TABLE, jnp.int32)
        return {"table_smem": table, "table_arrived": plgpu.Barrier()}


def ring_buffers(
    plan: Plan, count: int, k: int, rows: int, columns: int, width: int, *,
    x_dtype=jnp.bfloat16, x_columns: int, scale_dtype=jnp.bfloat16,
) -> dict:  # fmt: skip
    """Returns `count` buffers for blocks of `k` rows of the weight, and the barriers `full`.

    Args:
        rows: how many rows of x a block meets.
        columns: how many columns of the weight a block has, in `width` bytes.
        x_columns: how many columns of x are swizzled together.
    """
    buffers = {
        "codes_ring": plgpu.SMEM(
            (count, k, width), jnp.int8, transforms=swizzled(min(128, width), jnp.int8)
        ),
        "x_ring": plgpu.SMEM(
            (count, rows, k), x_dtype, transforms=swizzled(x_columns, x_dtype)
        ),
    }
    num_scales = max(1, k // (plan.group or k))
    if plan.group:
        buffers["scale_ring"] = plgpu.SMEM((count, num_scales, columns), scale_dtype)
    if plan.zero_bits:
        zeros = count, num_scales, columns * plan.zero_bits // 8
        buffers["zero_ring"] = plgpu.SMEM(zeros, jnp.int8)
    full = plgpu.Barrier(num_arrivals=len(buffers), num_barriers=count)
    return buffers | {"full": full}


# --- filling a buffer -------------------------------------------------------------------------


def zero_points(zeros_GN: jax.Array, columns: int, groups: int) -> jax.Array:
    """Returns zero points as bytes: packed as they are, or one in a byte where the `groups`
    rows of a block of `columns` would be no whole number of the 128 bytes that are copied at
    a time."""
    bits = dtype_bits(zeros_GN.dtype)
    if columns * bits // 8 * groups % 128 == 0:
        return as_bytes(zeros_GN)
    is_signed = jnp.issubdtype(zeros_GN.dtype, jnp.signedinteger)
    wide = zeros_GN.astype(jnp.int8 if is_signed else jnp.uint8)
    return lax.bitcast_convert_type(wide, jnp.int8)


def fetch_codes(refs: References, slot, row, tile) -> None:
    """Copies the block of codes at this row and tile of columns into a buffer."""
    _, k, width = refs.codes_ring.shape
    source = refs.codes.at[pl.ds(row, k), pl.ds(tile * width, width)]
    plgpu.copy_gmem_to_smem(source, refs.codes_ring.at[slot], refs.full.at[slot])


def fetch_scales(plan: Plan, refs: References, slot, row, tile) -> None:
    """Copies the scales and zero points of that block's groups, if it has any."""
    if not plan.group:
        return
    parts = [(refs.group_scales, refs.scale_ring)]
    parts += [(refs.group_zeros, refs.zero_ring)] if plan.zero_bits else []
    for source, ring in parts:
        _, count, width = ring.shape
        groups = pl.ds(lax.div(row, plan.group), count)
        source = source.at[groups, pl.ds(tile * width, width)]
        plgpu.copy_gmem_to_smem(source, ring.at[slot], refs.full.at[slot])


def fetch_table(plan: Plan, refs: References, wg) -> None:
    """Brings the table that codes are looked up in, and waits for it."""
    if not plan.looks_up:
        return
    copy = (refs.table, refs.table_smem, refs.table_arrived)
    pl.when(wg == 0)(lambda: plgpu.copy_gmem_to_smem(*copy))
    plgpu.barrier_wait(refs.table_arrived)


# --- reading a buffer -------------------------------------------------------------------------


class Piece(NamedTuple):
    """Rows of a buffer that are decoded at a time."""

    codes: Any  # bytes [rows, width] in shared memory
    scales: Any = None  # [groups, columns]
    zeros: Any = None  # bytes [groups, width]

    def lines(self, plan: Plan, holders: lanes.Holders) -> list[jax.Array]:
        """Returns the slopes and starts of the decoding that contain the scale of these rows'
        only group: other pieces of that group need not compute them again."""
        return lanes.lines(self.scales, decoding.code(plan.fmt, True), holders)

    def decoded(self, plan: Plan, refs: References, holders: lanes.Holders, wg, *,
                is_folded: bool, lines: list[jax.Array] | None = None) -> list:  # fmt: skip
        """Returns left operands of the tensor cores: [64, rows] in bfloat16 for each
        accumulator of this warpgroup, multiplied by the scales of groups and rounded once.

        Args:
            is_folded: whether scales are in the slopes of the decoding (decoding.py).
            lines: what `lines` has returned for the group, if it was asked.
        """
        if plan.native:
            code = decoding.code(plan.fmt, is_folded)
            scales = self.scales if lines is None else None
            args = self.codes, code, holders, refs.table_smem, scales, self.zeros
            return lanes.decoded(*args, lines=lines)
        values = decoding.values(self.codes[...], plan.fmt)
        over_rows = lambda part: jnp.repeat(part, values.shape[0] // len(part), axis=0)
        if self.zeros is not None:
            zeros = self.zeros[...]
            if plan.zero_bits < 8:
                zeros = decoding.values(zeros, plan.fmt)
            elif jnp.issubdtype(plan.fmt.dtype, jnp.unsignedinteger):
                zeros = lax.bitcast_convert_type(zeros, jnp.uint8)
            values = values - over_rows(zeros.astype(values.dtype))
        if self.scales is not None:
            factor = over_rows(self.scales[...].astype(jnp.float32))
            values = (values.astype(jnp.float32) * factor).astype(values.dtype)
        return holders.interpreted(values, wg)


def piece(
    plan: Plan, refs: References, slot, start: int, rows: int, *, is_scaled: bool = True
) -> Piece:
    """Returns `rows` rows of a buffer from `start` on, and the scales, if they are wanted,
    and zero points of their groups."""
    codes, parts = refs.codes_ring.at[slot, pl.ds(start, rows)], {}
    if plan.group:
        groups = pl.ds(start // plan.group, max(1, rows // plan.group))
        if is_scaled:
            parts["scales"] = refs.scale_ring.at[slot, groups]
        if plan.zero_bits:
            parts["zeros"] = refs.zero_ring.at[slot, groups]
    return Piece(codes, **parts)


def as_left_operand(plan: Plan, refs: References, values, wg, a: int = 0, wide=1):
    """Returns accumulator `a` of a warpgroup's `wide` as wgmma takes it: from registers, but
    the interpreter's takes it from shared memory."""
    if plan.native:
        return values
    number = wg * wide + a
    refs.left_operands[number] = values
    return refs.left_operands.at[number]
