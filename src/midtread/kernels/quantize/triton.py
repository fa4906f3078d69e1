"""Fused quantizing on a GPU: absmax, scale and codes in one pass over the data, Triton.

    rows(x)            one scale for each row; x is read once
    few_rows(x)        the same for few rows, and their codes in bfloat16 too
    cast(x, inverse)   codes for scales that are known: in the order of x, transposed, or both
                       from one read. 8-bit matmuls need the summed axis innermost, and the
                       backward pass sums over another axis than the forward. It can also
                       return max |x|, from which delayed scaling makes the next scale
    tiles(x)           one scale for each TILE of a row; x is read once. The same read can give
                       transposed codes for other scales, which are known

`rows` and `cast` may multiply x by a factor first: the backward pass folds the forward's scales into
g. They may round stochastically, with the noise of numerics/rounding.py: a hash of the key and of
an element's position. A kernel gets the hashes of rows and of columns and mixes them, so its codes
are the same.

The numbers are those of numerics/: absmax and product are rounded to x's dtype, scale = absmax *
(1 / bound), and codes use the reciprocal of the scale. A NaN makes its scale NaN, because
magnitudes are compared as bit patterns, among which NaN is larger than infinity.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from midtread.kernels.layout import TILE
from midtread.kernels.pallas_compat import (
    alike,
    pl,
    pltriton,
    result,
    triton_params,
)
from midtread.numerics.formats import Format
from midtread.numerics.rounding import as_uniform, mix

BLOCK = 64  # both extents of x are multiples of this
MAX_ROW = 2**15  # the longest row that `rows` takes, in bytes


def magnitude(x):
    """Returns the bits of |x| as an integer, which orders as |x| does."""
    kind = jnp.int16 if np.dtype(x.dtype).itemsize == 2 else jnp.int32
    bits = lax.bitcast_convert_type(x, kind) & jnp.iinfo(kind).max
    return bits.astype(jnp.int32)


def as_float(magnitude, dtype):
    """Returns |x|, from the integer that `magnitude` gives."""
    kind = jnp.int16 if np.dtype(dtype).itemsize == 2 else jnp.int32
    return lax.bitcast_convert_type(magnitude.astype(kind), dtype)


def scale_of(largest, dtype, fmt: Format):
    """Computes the scale of numerics/scales.py from the largest magnitude's bits, in float32."""
    absmax = as_float(largest, dtype).astype(jnp.float32)
    raw = absmax * np.float32(1 / fmt.bound)
    if np.dtype(dtype) == jnp.bfloat16:
        raw = raw.astype(dtype).astype(jnp.float32)
    tiny = np.sqrt(float(jnp.finfo(jnp.float32).tiny))
    return jnp.where(raw < np.float32(tiny), jnp.float32(1), raw)


def codes_of(x, inverse, fmt: Format, native: bool, noise=None):
    """Returns the codes of x for scales of which `inverse` is the reciprocal."""
    if fmt.codes is not None and noise is None:
        return integers(x, inverse, fmt, native).astype(fmt.dtype)
    units = x.astype(jnp.float32) * inverse
    if noise is not None:
        return _codes_by_chance(units, fmt, noise)
    largest = fmt.grid.largest
    kept = jnp.minimum(jnp.maximum(units, -largest), largest)
    return jnp.where(jnp.isnan(units), units, kept).astype(fmt.dtype)


def integers(x, inverse, fmt: Format, native: bool):
    """Returns the codes of an integer format as int32."""
    assert fmt.codes is not None, fmt
    low, high = fmt.codes
    units = x.astype(jnp.float32) * inverse
    units = jnp.minimum(jnp.maximum(units, float(low)), float(high))
    return _nearest(units, native)


def _codes_by_chance(units, fmt: Format, noise):
    """Computes the stochastic codes of numerics/rounding.py; `noise` is in [0, 1)."""
    if fmt.codes is not None:
        low, high = fmt.codes
        is_nan = jnp.isnan(units)
        units = jnp.minimum(jnp.maximum(units, low - 1.0), high + 1.0)
        units = jnp.where(is_nan, 0.0, _up_or_down(units, noise))
        units = jnp.minimum(jnp.maximum(units, float(low)), float(high))
        return units.astype(jnp.int32).astype(fmt.dtype)
    grid = fmt.grid
    kept = jnp.minimum(jnp.maximum(units, -grid.largest), grid.largest)
    kept = jnp.where(jnp.isnan(units), 0.0, kept)
    bits = lax.bitcast_convert_type(kept, jnp.int32)
    exponent = ((bits >> 23) & 255) - 127  # the binade's; subnormals share the lowest
    exponent = jnp.maximum(exponent, grid.min_exponent) - grid.mantissa
    power = lambda e: lax.bitcast_convert_type((e + 127) << 23, jnp.float32)
    kept = _up_or_down(kept * power(-exponent), noise) * power(exponent)
    kept = jnp.minimum(jnp.maximum(kept, -grid.largest), grid.largest)
    return jnp.where(jnp.isnan(units), units, kept).astype(fmt.dtype)


def _up_or_down(x, noise):
    below = jnp.floor(x)
    return below + (noise < x - below).astype(jnp.float32)


def _noise(refs):
    """Computes the noise of a block from the hashes of its rows and columns."""
    rows, columns = refs
    return as_uniform(mix(rows[:][:, None] ^ columns[:][None, :]))


def _nearest(units, native: bool):
    """Rounds to the nearest integer; ties go to the even one and NaN to 0."""
    if not native:
        units = jnp.round(units)
        return jnp.where(jnp.isnan(units), 0.0, units).astype(jnp.int32)
    return pltriton.elementwise_inline_asm(
        "cvt.rni.s32.f32 $0, $1;",  # Pallas has no rounding for Triton
        args=[units],
        constraints="=r,f",
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(units.shape, jnp.int32)],
    )[0]


def _times(x, factor):
    return (x.astype(jnp.float32) * factor.astype(jnp.float32)).astype(x.dtype)


# --- one scale per row ------------------------------------------------------------------------


def _rows_body(x_ref, *refs, fmt, columns, native, by_chance):
    *refs, codes_ref, scale_ref = refs
    noise = None
    if by_chance:
        *refs, of_rows, of_columns = refs
        noise = _noise((of_rows, of_columns))
    block = x_ref.shape
    mask = other = None
    if block[1] != columns:
        mask, other = lax.broadcasted_iota(jnp.int32, block, 1) < columns, 0
    x = pltriton.load(x_ref.at[:, :], mask=mask, other=other)
    if refs:
        narrow = refs[0].shape[1] == 1
        factor = refs[0].at[:, :]
        factor = pltriton.load(
            factor, mask=None if narrow else mask, other=None if narrow else other
        )
        x = _times(x, factor)
    scale = scale_of(jnp.max(magnitude(x), axis=1), x.dtype, fmt)
    codes = codes_of(x, (1 / scale)[:, None], fmt, native, noise)
    pltriton.store(codes_ref.at[:, :], codes, mask=mask)
    scale_ref[:] = scale.astype(scale_ref.dtype)


def rows(
    x: jax.Array,
    fmt: Format,
    *,
    factor: jax.Array | None = None,
    noise: tuple[jax.Array, jax.Array] | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Returns ([M, K] codes, [M] scales in x's dtype) for x [M, K].

    Args:
        factor: [M, 1] or [1, K], by which x is multiplied first.
        noise: hashes of rows and of columns, uint32 [M] and [K], to round by chance.
    """
    m, k = x.shape
    padded = 1 << (k - 1).bit_length()
    whole = pl.BlockSpec((1, padded), lambda i: (i, 0))
    parts, specs = [x], [whole]
    if factor is not None:
        x, factor = alike(x, factor)
        parts = [x]
        is_row = factor.shape[0] == 1
        parts.append(factor)
        specs.append(
            pl.BlockSpec((1, padded), lambda i: (0, 0))
            if is_row
            else pl.BlockSpec((1, 1), lambda i: (i, 0))
        )
    if noise is not None:
        parts += noise
        specs += [pl.BlockSpec((1,), lambda i: (i,)), pl.BlockSpec((padded,), lambda i: (0,))]  # fmt: skip
        parts = alike(*parts)
    options = {"columns": k, "native": not interpret, "by_chance": noise is not None}
    out = pl.pallas_call(
        functools.partial(_rows_body, fmt=fmt, **options),
        grid=(m,),
        in_specs=specs,
        out_specs=[whole, pl.BlockSpec((1,), lambda i: (i,))],
        out_shape=[
            result((m, k), fmt.dtype, x),
            result((m,), x.dtype, x),
        ],
        compiler_params=triton_params(num_warps=4, num_stages=1),
        interpret=interpret,
    )(*parts)
    return out[0], out[1]


def _few_body(x_ref, codes_ref, wide_ref, scale_ref, *, fmt, columns, native):
    block = x_ref.shape
    mask = other = None
    if block[1] != columns:
        mask, other = lax.broadcasted_iota(jnp.int32, block, 1) < columns, 0
    x = pltriton.load(x_ref.at[:, :], mask=mask, other=other)
    scale = scale_of(jnp.max(magnitude(x), axis=1), x.dtype, fmt)
    inverse = (1 / scale)[:, None]
    if fmt.codes is not None:
        codes = integers(x, inverse, fmt, native)
    else:
        codes = codes_of(x, inverse, fmt, native)
    wide = codes.astype(jnp.float32).astype(wide_ref.dtype)
    pltriton.store(codes_ref.at[:, :], codes.astype(fmt.dtype), mask=mask)
    pltriton.store(wide_ref.at[:, :], wide, mask=mask)
    scale_ref[:] = scale.astype(scale_ref.dtype)


def few_rows(
    x: jax.Array, fmt: Format, *, interpret: bool = False
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns what `rows` does and, between the two, the codes in bfloat16."""
    m, k = x.shape
    padded = 1 << (k - 1).bit_length()
    whole = pl.BlockSpec((1, padded), lambda i: (i, 0))
    out = pl.pallas_call(
        functools.partial(_few_body, fmt=fmt, columns=k, native=not interpret),
        name="quantize_few_rows",
        grid=(m,),
        in_specs=[whole],
        out_specs=[whole, whole, pl.BlockSpec((1,), lambda i: (i,))],
        out_shape=[
            result((m, k), fmt.dtype, x),
            result((m, k), jnp.bfloat16, x),
            result((m,), x.dtype, x),
        ],
        compiler_params=triton_params(num_warps=min(16, max(1, padded // 512)), num_stages=1),
        interpret=interpret,
    )(x)  # fmt: skip
    return out[0], out[1], out[2]


# --- scales known already ---------------------------------------------------------------------


def _cast_body(x_ref, inverse_ref, *refs, fmt, copies, native, by_chance, num_outputs):
    x, noise = x_ref[:, :], None
    given, written = refs[:-num_outputs], refs[-num_outputs:]
    if by_chance:
        *given, of_rows, of_columns = given
        noise = _noise((of_rows, of_columns))
    if given:
        x = _times(x, given[0][:, :])
    codes = codes_of(x, inverse_ref[:, :], fmt, native, noise)
    for ref, copy in zip(written, copies):
        ref[:, :] = codes if copy == "plain" else codes.T
    if num_outputs > len(copies):
        written[-1][0, 0] = jnp.max(jnp.max(magnitude(x), axis=1))


def _beside(part: tuple[int, int], shape, block) -> pl.BlockSpec:
    """Returns the BlockSpec of `part`, whose extents divide those of `shape`, that goes with a
    block of an array of that shape."""
    sizes, steps = [], []
    for extent, whole, size in zip(part, shape, block):
        per = whole // extent  # neighbours that share a value
        sizes.append(max(size // per, 1))
        steps.append(max(per // size, 1) if extent > 1 else None)
    index_map = lambda *ij: tuple(0 if s is None else i // s for i, s in zip(ij, steps))
    return pl.BlockSpec(tuple(sizes), index_map)


def cast(
    x: jax.Array,
    inverse: jax.Array,
    fmt: Format,
    copies: tuple[str, ...] = ("plain",),
    *,
    factor: jax.Array | None = None,
    noise: tuple[jax.Array, jax.Array] | None = None,
    largest: bool = False,
    interpret: bool = False,
) -> list[jax.Array]:
    """Returns codes of x [M, N] for known scales.

    Args:
        inverse: 1 / scale in float32 [r, c], where r and c are 1, or one per element, or one
            per TILE.
        copies: the orders that codes are wanted in, among "plain" and "transposed".
        factor: by which x is multiplied first, in x's dtype; its extents are as those of
            `inverse`.
        noise: as in `rows`.
        largest: whether to return, last, the largest |x| of each block, as `as_float`
            takes it.
    """
    m, n = x.shape
    block = (BLOCK, TILE if n % TILE == 0 else BLOCK)
    grid = m // block[0], n // block[1]
    orders = {
        "plain": ((m, n), block, lambda i, j: (i, j)),
        "transposed": ((n, m), block[::-1], lambda i, j: (j, i)),
    }
    outputs = [(fmt.dtype, *orders[c]) for c in copies]
    outputs += [(jnp.int32, grid, (1, 1), lambda i, j: (i, j))] * largest
    parts = [inverse] if factor is None else [inverse, factor]
    specs = [_beside(part.shape, x.shape, block) for part in parts]
    if noise is not None:
        parts += noise
        specs += [
            pl.BlockSpec(block[:1], lambda i, j: (i,)),
            pl.BlockSpec(block[1:], lambda i, j: (j,)),
        ]
    options = {"native": not interpret, "by_chance": noise is not None}
    options["num_outputs"] = len(outputs)
    body = functools.partial(_cast_body, fmt=fmt, copies=copies, **options)
    return _over_blocks(body, block, x, parts, specs, outputs, interpret)


def _over_blocks(body, block, x, parts, specs, outputs, interpret: bool):
    """Runs `body` on each block of x, with its share of `parts`.

    Args:
        specs: the BlockSpecs of the parts.
        outputs: (dtype, shape, block, index map) of each result.
    """
    x, *parts = alike(x, *parts)
    return pl.pallas_call(
        body,
        grid=(x.shape[0] // block[0], x.shape[1] // block[1]),
        in_specs=[pl.BlockSpec(block, lambda i, j: (i, j)), *specs],
        out_specs=[pl.BlockSpec(*where) for _, _, *where in outputs],
        out_shape=[result(shape, dtype, x) for dtype, shape, *_ in outputs],
        compiler_params=triton_params(num_warps=4, num_stages=1),
        interpret=interpret,
    )(x, *parts)


# --- a scale per tile of a row, and another per tile of a column ------------------------------


def _tiles_body(x_ref, *refs, fmt, native):
    x = x_ref[:, :]
    if len(refs) == 4:  # transposed codes are asked for, too
        inverse_ref, *refs, turned_ref = refs
        turned_ref[:, :] = codes_of(x, inverse_ref[:, :], fmt, native).T
    codes_ref, scale_ref = refs
    scale = scale_of(jnp.max(magnitude(x), axis=1), x.dtype, fmt)
    codes_ref[:, :] = codes_of(x, (1 / scale)[:, None], fmt, native)
    scale_ref[0, :] = scale.astype(scale_ref.dtype)


def tiles(
    x: jax.Array,
    fmt: Format,
    inverse: jax.Array | None = None,
    *,
    interpret: bool = False,
) -> list[jax.Array]:
    """Returns [M, N] codes and [N / TILE, M] scales, one per TILE of a row of x [M, N], from one
    read. With `inverse`, which is 1 / scale along columns as in `cast`, it also returns [N, M]
    codes for those scales.
    """
    (m, n), block = x.shape, (BLOCK, TILE)
    parts = [] if inverse is None else [inverse]
    specs = [_beside(part.shape, x.shape, block) for part in parts]
    outputs = [
        (fmt.dtype, (m, n), block, lambda i, j: (i, j)),
        (x.dtype, (n // TILE, m), (1, block[0]), lambda i, j: (j, i)),
        (fmt.dtype, (n, m), block[::-1], lambda i, j: (j, i)),
    ][: 2 + len(parts)]
    body = functools.partial(_tiles_body, fmt=fmt, native=not interpret)
    return _over_blocks(body, block, x, parts, specs, outputs, interpret)
