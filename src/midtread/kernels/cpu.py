"""Small matmuls against big stored weights on XLA:CPU: decode in blocks, then multiply.

A decoder reads every weight once per token, so the weight's bytes are the bound. XLA's
CPU backend reaches it for float32, but not for codes (all of this was seen on a 2-core
x86 with AVX-512, jax 0.10.2 and 0.12.0):

    a decoded copy of 32 MiB     makes a call 10x as slow as float32's, all formats alike.
                                 Hence a loop over blocks of about 2^20 codes; the same
                                 blocks unrolled are as slow as one copy. A weight that
                                 fits the cache is one block: against a float32 of
                                 cache speed, smaller ones were slower still
    int4, float8 converts        cost 3x to 10x. Hence bytes and integer ops:
        int4                     a byte is two codes: one matmul for the low nibbles and
                                 one for the high, the small operand is what is shuffled
        e4m3, e5m2, e2m1         moved to where float16 keeps sign, exponent and
                                 mantissa; a power of two repairs the exponent's bias
        16-entry lookups         a tree of selects, no gather
    int8 x int8 of one row       misses the matrix library, up to 13x: two rows, one of
                                 them zeros, are fast; but [K, N] is repacked, beyond
                                 the cache at twice float32's time: in blocks at half

    out_MN  =  sum_k x_mk w_kn,      w stored as [K, N] (summed=0) or [N, K] (summed=1)

Blocks run along the stored major axis: over K they add up, over N they stand side by side.
R and C are the stored axes, one of which is K and the other N; P planes of codes share a byte.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from midtread.kernels import decoding
from midtread.kernels.candidates import Refusal
from midtread.kernels.environment import Env
from midtread.kernels.layout import (
    WeightMatmul,
    is_static,
    rows,
    stored,
    why_not_zero,
)
from midtread.numerics import formats, views
from midtread.numerics.formats import Format

BLOCK = 2**20  # codes decoded at a time
MIN_ROWS = (
    8  # rows of a block, however wide it is, since each block adds to all of [M, N]
)
MIN_SIZE = 2**16  # codes of a weight; at 2^14 float8 was 5% slower than the plain path
MAX_WHOLE = 2**22  # int8 codes [K, N] that XLA's own matmul repacks in the cache
MAX_ROWS = 256  # rows of x; at 512 the plain path was within 1.2x of float32
INTEGERS = ("int8", "int4", "uint4", "int2", "uint2")  # formats whose values int8 has


def is_local(*arrays: jax.Array) -> bool:
    """Whether extents are known, and no array is laid out over a mesh, where slices of a
    sharded weight would be gathered."""
    if not is_static(*arrays):
        return False
    return all(jax.typeof(x).sharding.mesh.empty for x in arrays)


class Blocks(NamedTuple):
    """The plan to decode a stored weight in blocks."""

    fmt: Format

    def run(self, a: WeightMatmul) -> jax.Array:
        x_MK, codes, inner, last, _ = a.arrays()
        inner = None if inner is None else inner.astype(jnp.float32)
        options = {"summed": a.weight.summed, "precision": a.matmul.precision}
        out = dot(x_MK, codes, inner, fmt=self.fmt, **options)
        out = out if last is None else out * last.astype(jnp.float32)
        return a.result(out.astype(a.matmul.dtype))


def plan(a: WeightMatmul, env: Env) -> Blocks | Refusal:
    (x, w), weight = a.sides, a.weight
    if not is_local(x, w.qvalue, w.scale):
        return Refusal("its operands are laid out over a mesh")
    reason = why_not_zero(w)
    if reason is not None:
        return Refusal(reason)
    if not supports(w.format, weight.shape, weight.num_rows, weight.counts):
        what = f"{weight.num_rows} rows by {w.format.name} {weight.shape}"
        return Refusal(f"{what} gain nothing by it")
    return Blocks(w.format)


def supports(
    fmt: Format,
    shape: tuple[int, int],
    rows: int,
    counts: tuple[int, int] = (1, 1),
) -> bool:
    """Whether `dot` takes this weight, and gains by it.

    >>> supports(formats.as_format("int4"), (4096, 4096), rows=1)
    True
    >>> supports(formats.as_format("fp6"), (4096, 4096), rows=1)
    False

    Args:
        shape: the extents of the codes as stored, [R, C].
        rows: how many rows x has.
        counts: the extents of the scale that `dot` is to apply, (1, 1) for none.
    """
    if decoding.decoder(fmt) is None:
        return False
    if not 0 < rows <= MAX_ROWS or math.prod(shape) < MIN_SIZE:
        return False
    if shape[1] % decoding.num_planes(fmt) or shape[1] * MIN_ROWS > 8 * BLOCK:
        return False
    return _block_rows(shape, counts[0]) > 0


def _block_rows(shape: tuple[int, int], count: int) -> int:
    """Returns the rows of a block: whole tiles, or a whole part of one; 0 if neither fits."""
    num_rows = min(max(BLOCK // shape[1], MIN_ROWS), shape[0])
    tile = shape[0] // count
    if count == 1:
        return num_rows
    if tile <= num_rows:
        return num_rows // tile * tile
    parts = (n for n in range(num_rows, num_rows // 4, -1) if tile % n == 0)
    return next(parts, 0)


def dot(
    x_MK: jax.Array,
    codes_RC: jax.Array,
    scale: jax.Array | None = None,
    *,
    fmt: Format,
    summed: int = 0,
    precision=None,
) -> jax.Array:
    """Multiplies x by the values of the codes: [M, N] in float32, or int32 if x is integer.

    Args:
        scale: [r, c], broadcast by tiles over the codes before they are summed. A scale
            that does not vary along the summed axis is cheaper applied to the result.
        summed: the axis of the codes that is summed.
    """
    step = _block_rows(codes_RC.shape, 1 if scale is None else scale.shape[0])
    return _dot(x_MK, codes_RC, scale, fmt, summed, precision, step)


# This is jitted, because each call outside of jit would otherwise compile the loop anew.
@functools.partial(jax.jit, static_argnums=(3, 4, 5, 6))
def _dot(x_MK, codes_RC, scale, fmt: Format, summed: int, precision, step: int):
    integer = jnp.issubdtype(x_MK.dtype, jnp.integer)
    dtype, total = (jnp.int8, jnp.int32) if integer else (jnp.float32, jnp.float32)
    shape = codes_RC.shape
    num_planes = decoding.num_planes(fmt)
    bytes_RC = decoding.as_bytes(codes_RC)
    x_MK = x_MK.astype(dtype)
    x_planes = [x_MK[:, i::num_planes] if summed else x_MK for i in range(num_planes)]
    scales = _scale_planes(scale, shape, num_planes)

    def multiply(x, w):
        numbers = (((1,), (summed,)), ((), ()))
        return lax.dot_general(x, w, numbers, precision, total)

    def block(start, size):
        """Returns [M, size] if rows of codes are columns of the result, else [M, C / P, P]."""
        some = lax.dynamic_slice_in_dim(bytes_RC, start, size)
        values = decoding.planes(some, fmt, dtype)
        if scale is not None:
            values = [
                views.broadcast_with(jnp.multiply, v, _rows(s, start, size, shape[0]))
                for v, s in zip(values, scales)
            ]
        if summed:
            return sum(map(multiply, x_planes, values))
        part = lax.dynamic_slice_in_dim(x_MK, start, size, 1)
        return jnp.stack([multiply(part, v) for v in values], -1)

    # The backward pass decodes again, so that float weights are never kept for it.
    block = jax.checkpoint(block, prevent_cse=False, static_argnums=(1,))

    def add(start, size, out):
        if not summed:
            return out + block(start, size)
        return lax.dynamic_update_slice_in_dim(out, block(start, size), start, 1)

    whole, rest = divmod(shape[0], step)
    if whole == 1 and not rest:
        out = block(0, step)
    else:
        kept = (shape[0],) if summed else (shape[1] // num_planes, num_planes)
        out = jnp.zeros((x_MK.shape[0], *kept), total)
        out = lax.fori_loop(0, whole, lambda i, out: add(i * step, step, out), out)
        out = add(whole * step, rest, out) if rest else out
    return out.reshape(x_MK.shape[0], -1)


def _scale_planes(scale, shape, num_planes: int) -> list:
    """Returns the scale of each plane, whose columns are every num_planes-th of the codes'."""
    if scale is None:
        return []
    scale = scale.astype(jnp.float32)
    if scale.shape[1] == 1 or shape[1] // scale.shape[1] % num_planes == 0:
        return [scale] * num_planes
    scale = views.expand(scale, (scale.shape[0], shape[1]))
    return [scale[:, i::num_planes] for i in range(num_planes)]


def _rows(scale, start, size: int, num_rows: int):
    """Takes the rows of the scale that belong to `size` rows of codes."""
    if scale.shape[0] == 1:
        return scale
    tile = num_rows // scale.shape[0]
    return lax.dynamic_slice_in_dim(scale, start // tile, max(size // tile, 1))


def dot_codes(lhs: jax.Array, rhs: jax.Array, numbers) -> jax.Array | None:
    """Multiplies integer codes into int32, or returns None where lax.dot_general is as good."""
    (left, right), (batch, _) = numbers
    dtypes = {lhs.dtype.name, rhs.dtype.name}
    if batch or not left or not dtypes <= set(INTEGERS) or not is_local(lhs, rhs):
        return None
    sizes = [
        x.size // max(math.prod(x.shape[a] for a in axes), 1)
        for x, axes in ((lhs, left), (rhs, right))
    ]
    is_swapped = sizes[1] < sizes[0]
    x, w, x_sum, w_sum = (
        (rhs, lhs, right, left) if is_swapped else (lhs, rhs, left, right)
    )
    num_rows = min(sizes)
    x_sum, w_sum = zip(*sorted(zip(x_sum, w_sum), key=lambda pair: pair[1]))
    matrix = stored(w.shape, w_sum)
    fmt = formats.as_format(w.dtype)
    if matrix is None or not supports(fmt, matrix[0], num_rows):
        return None
    if w.dtype == jnp.int8 and num_rows > 1 and not is_swapped:
        return None
    x_MK = rows(x, x_sum).astype(jnp.int8)
    x_MK = views.pad_to(x_MK, (max(num_rows, 2), x_MK.shape[1]))
    if w.dtype == jnp.int8 and (matrix[1] == 1 or w.size <= MAX_WHOLE):
        contracted = (((1,), (matrix[1],)), ((), ()))
        w_RC = w.reshape(matrix[0])
        out = lax.dot_general(x_MK, w_RC, contracted, None, jnp.int32)
    else:
        out = dot(x_MK, w.reshape(matrix[0]), fmt=fmt, summed=matrix[1])
    out = out[:num_rows]
    free = [
        tuple(n for a, n in enumerate(v.shape) if a not in axes)
        for v, axes in ((lhs, left), (rhs, right))
    ]
    return (out.T if is_swapped else out).reshape(free[0] + free[1])
