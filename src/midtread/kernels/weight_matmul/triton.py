"""Few rows against a stored weight on a GPU: read the codes once, decode in registers.

    out_MN  =  sum_g s_gN  sum_{k in g} x_Mk (value(code_kN) - z_gN)      M = 1 .. 256, Triton

A decoder reads every weight for a few rows, so time is bytes over bandwidth: int8 should
take half of bfloat16's time and int4 a quarter. There are two ways to multiply:

    fma    One or two rows: each thread decodes 16 columns and multiplies in float32, and
           threads exchange nothing until the end.
    dot    More rows: a block of decoded weights goes through the tensor cores.

A block of the weight is [k, n] with n along the memory, as Flax stores kernels. Two 4-bit
codes share a byte, so one block of bytes gives the even and the odd columns. The summed
axis is split over programs until the GPU is full; XLA adds their float32 parts, in
whatever it does next. Group scales are applied to the sum of a group, in float32, and a zero
point leaves that sum against the sum of the group's x. Zero points that are codes themselves
lie in memory as the weight does, and are decoded like it.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from midtread.kernels import decoding
from midtread.kernels.pallas_compat import pl, pltriton, result, triton_params
from midtread.numerics.formats import Format, dtype_bits


@dataclasses.dataclass(frozen=True)
class TritonBlocks:
    """How much of a weight a program reads at a time."""

    multiply: str  # "fma" or "dot"
    n: int  # bytes of a row that one program reads
    k: int  # rows of the weight in one load
    loads: int  # how many of them are under way at once
    split: int  # programs that share a sum
    warps: int = 4
    stages: int = 1


# --- decoding: bytes to one array of values per code in the byte ------------------------------


def _asm(body: str, p, dtype, num_out: int = 2):
    """Runs the PTX `body` on every four bytes of `p`."""
    return pltriton.elementwise_inline_asm(
        "{" + body + "}",
        args=[p],
        constraints="=r," * num_out + "r",
        pack=4,
        result_shape_dtypes=[jax.ShapeDtypeStruct(p.shape, dtype)],
    )[0]


def unpacked(p, fmt: Format, dtype, native: bool) -> tuple:
    """The exact values of the codes in the bytes `p`, an array for each code in a byte."""
    dtype, row = np.dtype(dtype), decoding.decoder(fmt)
    assert row is not None, fmt
    if row.bytes == decoding.CAST:
        if native and row.floats is not None and dtype.itemsize == 4:
            return (_asm(row.floats, p, dtype, num_out=4),)
        return (p.astype(dtype),)
    if not native:
        return decoding.planes(p, fmt, dtype)
    assert callable(row.bytes), fmt
    narrow = dtype if dtype.itemsize == 2 else np.dtype(jnp.bfloat16)
    shifts = range(0, 8, dtype_bits(fmt.dtype))
    codes = [_asm(row.bytes(fmt, narrow, shift), p, narrow) for shift in shifts]
    return tuple(v.astype(dtype) for v in codes)


def scale_values(s: jax.Array) -> jax.Array:
    """Scales in float32; bytes are exponents, e8m0."""
    if s.dtype != jnp.uint8:
        return s.astype(jnp.float32)
    bits = s.astype(jnp.int32)
    value = lax.bitcast_convert_type(bits << 23, jnp.float32)
    value = jnp.where(bits == 0, jnp.float32(2.0**-127), value)
    return jnp.where(bits == 255, jnp.float32(jnp.nan), value)


def readable_scale(s: jax.Array) -> jax.Array:
    """Returns a scale as Triton can load it: e8m0 goes as bytes."""
    if s.dtype == jnp.float8_e8m0fnu:
        return lax.bitcast_convert_type(s, jnp.uint8)
    return s


def _factors(s_ref, z_ref, group, plane: int, fmt: Format) -> tuple:
    """Scale and zero point [1, n] of a plane of a group, None for the latter where there is
    none. s [G, n, P]; z [G, n, P], or bytes of codes [G, n]."""
    s = scale_values(s_ref[group, :, plane])[None, :]
    if z_ref is None:
        return s, None
    if len(z_ref.shape) == 2:
        return s, decoding.planes(z_ref[group, :], fmt, jnp.float32)[plane][None, :]
    return s, z_ref[group, :, plane].astype(jnp.float32)[None, :]


# --- kernels ----------------------------------------------------------------------------------
# M rows of x, P codes in a byte, B bytes of a row of the weight, G groups.


def _fma_body(
    x_ref, w_ref, s_ref, z_ref, out_ref, *, fmt, blocks: TritonBlocks, rows, group, native
):  # fmt: skip
    """x [rows, Ks], w [Ks, B], s [Ks / group, B, P] -> out [P, rows, B], where Ks is the part
    of the sum that this program has; z as s, or codes [Ks / group, B]."""
    num_k, num_b = w_ref.shape[0], blocks.n
    planes = out_ref.shape[0]
    step = blocks.k * blocks.loads
    per_group = (group or num_k) // blocks.k

    def body(i, total):
        at = lambda u: pl.ds(i * step + u * blocks.k, blocks.k)
        w = [w_ref[at(u), :] for u in range(blocks.loads)]
        x = [
            [x_ref[r, at(u)].astype(jnp.float32)[:, None] for r in range(rows)]
            for u in range(blocks.loads)
        ]
        part = of_x = None
        for u in range(blocks.loads):
            values = unpacked(w[u], fmt, jnp.float32, native)
            new = [[v * x[u][r] for r in range(rows)] for v in values]
            part = new if part is None else jax.tree.map(jnp.add, part, new)
            of_x = x[u] if of_x is None else jax.tree.map(jnp.add, of_x, x[u])
            if group and (u + 1) % per_group == 0:
                g = (i * step + u * blocks.k) // group
                for p in range(planes):
                    s, z = _factors(s_ref, z_ref, g, p, fmt)
                    if z is not None:
                        part[p] = [v - r * z for v, r in zip(part[p], of_x)]
                    part[p] = [v * s for v in part[p]]
                total, part, of_x = jax.tree.map(jnp.add, total, part), None, None
        return total if part is None else jax.tree.map(jnp.add, total, part)

    zero = jnp.zeros((blocks.k, num_b), jnp.float32)
    start = [[zero] * rows for _ in range(planes)]
    total = lax.fori_loop(0, num_k // step, body, start)
    for p in range(planes):
        for r in range(rows):
            out_ref[p, r, :] = jnp.sum(total[p][r], axis=0)


def _dot_body(
    x_ref, w_ref, s_ref, z_ref, out_ref, *, fmt, blocks: TritonBlocks, rows, group, native
):  # fmt: skip
    """Does the same by tensor cores, for `block_m` rows, of which `rows` exist."""
    num_k, num_b = w_ref.shape[0], blocks.n
    planes, block_m = out_ref.shape[0], x_ref.shape[0]
    mask = other = None
    if rows < block_m:
        inside = lax.broadcasted_iota(jnp.int32, (block_m, blocks.k), 0)
        mask, other = inside < rows, 0
    step = blocks.k * blocks.loads

    def body(i, total):
        starts = [i * step + u * blocks.k for u in range(blocks.loads)]
        at = [pl.ds(start, blocks.k) for start in starts]
        w = [w_ref[a, :] for a in at]  # all loads begin before the first is used
        x = [pltriton.load(x_ref.at[:, a], mask=mask, other=other) for a in at]
        for u, start in enumerate(starts):
            values = unpacked(w[u], fmt, x[u].dtype, native)
            of_x = None
            if z_ref is not None:
                of_x = jnp.sum(x[u].astype(jnp.float32), axis=1)[:, None]
            for p in range(planes):
                part = pltriton.dot(x[u], values[p]).astype(jnp.float32)
                if group:
                    s, z = _factors(s_ref, z_ref, start // group, p, fmt)
                    part = (part if z is None else part - of_x * z) * s
                total = [*total[:p], total[p] + part, *total[p + 1 :]]
        return total

    start = [jnp.zeros((block_m, num_b), jnp.float32)] * planes
    total = lax.fori_loop(0, num_k // step, body, start)
    keep = None
    if rows < block_m:
        keep = lax.broadcasted_iota(jnp.int32, (1, block_m, num_b), 1) < rows
    for p in range(planes):
        pltriton.store(out_ref.at[pl.ds(p, 1)], total[p][None], mask=keep)


def weight_matmul(
    x_MK: jax.Array,
    bytes_KB: jax.Array,
    scale_GBP: jax.Array | None = None,
    zero: jax.Array | None = None,
    *,
    fmt: Format,
    blocks: TritonBlocks,
    interpret: bool = False,
) -> jax.Array:
    """Returns [M, B, P] in float32: x times the codes' values, group scales applied.

    Columns of the result are those of the codes: byte b holds columns b P .. b P + P - 1.

    Args:
        zero: subtracted from the codes: floats [G, B, P], or codes as bytes [G, B].
    """
    m, k = x_MK.shape
    block_m = max(16, 1 << (m - 1).bit_length())
    num_b = bytes_KB.shape[1]
    planes = decoding.num_planes(fmt)
    group = None if scale_GBP is None else k // scale_GBP.shape[0]
    split_k = k // blocks.split
    padded = m if blocks.multiply == "fma" else block_m
    body = _fma_body if blocks.multiply == "fma" else _dot_body
    body = functools.partial(
        body, fmt=fmt, blocks=blocks, rows=m, group=group, native=not interpret
    )
    in_specs = [
        pl.BlockSpec((padded, split_k), lambda i, j: (0, j)),
        pl.BlockSpec((split_k, blocks.n), lambda i, j: (j, i)),
    ]
    args = [x_MK, bytes_KB]
    for part in (scale_GBP, zero):
        if part is not None:
            assert group is not None, (
                "a zero point of the whole sum is not for the kernel"
            )
            block, index = (split_k // group, blocks.n), lambda i, j: (j, i)
            if part.ndim == 3:
                block, index = (*block, planes), lambda i, j: (j, i, 0)
            in_specs.append(pl.BlockSpec(block, index))
            args.append(readable_scale(part))

    def run(x, w, *refs):
        *factors, out = refs
        s, z = (*factors, None, None)[:2]
        body(x, w, s, z, out)

    out = pl.pallas_call(
        run,
        grid=(num_b // blocks.n, blocks.split),
        in_specs=in_specs,
        out_specs=pl.BlockSpec(
            (None, planes, padded, blocks.n), lambda i, j: (j, 0, 0, i)
        ),
        out_shape=result((blocks.split, planes, m, num_b), jnp.float32, x_MK),
        compiler_params=triton_params(blocks.warps, blocks.stages),
        interpret=interpret,
    )(*args)
    out = jnp.sum(out, 0) if blocks.split > 1 else out[0]
    return out.transpose(1, 2, 0)


# --- weights stored with the summed axis innermost --------------------------------------------


def _transposed_body(x_ref, w_ref, out_ref, *, k: int, rows: int):
    """x [rows, Ks], w [n, Ks] -> out [n, block_m]: the weight is the left operand."""
    block_m = x_ref.shape[0]
    mask = other = None
    if rows < block_m:
        mask = lax.broadcasted_iota(jnp.int32, (block_m, k), 0) < rows
        other = 0

    def body(i, total):
        at = pl.ds(i * k, k)
        x = pltriton.load(x_ref.at[:, at], mask=mask, other=other)
        numbers = (((1,), (1,)), ((), ()))
        part = lax.dot_general(
            w_ref[:, at].astype(x.dtype), x, numbers, preferred_element_type=jnp.float32
        )
        return total + part

    zero = jnp.zeros((w_ref.shape[0], block_m), jnp.float32)
    out_ref[:, :] = lax.fori_loop(0, w_ref.shape[1] // k, body, zero)


def transposed_blocks(rows: int, shape: tuple[int, int]) -> TritonBlocks | None:
    """The blocks for `rows` rows by a weight [N, K] of 8-bit codes; None if none divides it."""
    n, k = (32, 256) if rows <= 16 else (128, 128)
    split = next((s for s in (4, 2, 1) if shape[1] % (s * k) == 0), None)
    if shape[0] % n or split is None:
        return None
    return TritonBlocks("dot", n, k, 1, split, warps=4, stages=3)


def transposed_matmul(
    x_MK: jax.Array,
    codes_NK: jax.Array,
    *,
    blocks: TritonBlocks,
    interpret: bool = False,
) -> jax.Array:
    """Returns [M, N] in float32, for a weight [N, K] such as the head of a tied embedding."""
    (m, k), n = x_MK.shape, codes_NK.shape[0]
    block_m = max(16, 1 << (m - 1).bit_length())
    split_k = k // blocks.split
    out = pl.pallas_call(
        functools.partial(_transposed_body, k=blocks.k, rows=m),
        grid=(n // blocks.n, blocks.split),
        in_specs=[
            pl.BlockSpec((block_m, split_k), lambda i, j: (0, j)),
            pl.BlockSpec((blocks.n, split_k), lambda i, j: (i, j)),
        ],
        out_specs=pl.BlockSpec((None, blocks.n, block_m), lambda i, j: (j, i, 0)),
        out_shape=result((blocks.split, n, block_m), jnp.float32, x_MK),
        compiler_params=triton_params(blocks.warps, blocks.stages),
        interpret=interpret,
    )(x_MK, codes_NK)
    return jnp.sum(out, 0)[:, :m].T
