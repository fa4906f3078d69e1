"""NVIDIA GPUs: from a float operand to a quantizing kernel call, or the reason why not.

A kernel of triton.py knows a matrix, an operand has axes of which a matmul sums over
some, the first or the last. Here it becomes [rows, columns], its scales and a factor likewise
(`laid` in scaled_matmul/adapter.py), and one of three kernels writes codes in the order its matmuls want:

    rows     a scale for each row that fits a program: found and applied in one read
    tiles    one for each TILE of a row, likewise; and, if wanted, for the other matmul from
             the same read, with known scales in tiles of a column
    cast     any other, with scales known before: codes in either order, or both
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from midtread.kernels.quantize import triton as quantize_triton
from midtread.kernels.quantize.triton import TILE
from midtread.kernels.scaled_matmul.adapter import FLOAT8, as_matrix, laid
from midtread.numerics.qarray import QArray, calibrate, scales_of, settled
from midtread.numerics.rounding import hashed, mix


class Sides(NamedTuple):
    """An array as [rows, columns], and which of the two a matmul sums over."""

    rows: int
    columns: int
    num_leading: int
    sums_columns: bool


def _sides(shape, summed: tuple[int, ...]) -> Sides | None:
    ndim, num = len(shape), len(summed)
    if not 0 < num < ndim:
        return None
    if summed == tuple(range(ndim - num, ndim)):
        first, sums_columns = ndim - num, True
    elif summed == tuple(range(num)):
        first, sums_columns = num, False
    else:
        return None
    return Sides(
        math.prod(shape[:first]), math.prod(shape[first:]), first, sums_columns
    )


def why_not_quantize(x, spec, summed, factor) -> str | None:
    if spec.format.dtype.name not in ("int8", *FLOAT8) or spec.format.scale is not None:
        return f"{spec.format.name} has no kernel: int8, e4m3 and e5m2 have"
    if x.dtype.name not in ("bfloat16", "float16", "float32"):
        return f"{x.dtype} has no kernel"
    if spec.rounding not in ("nearest", "stochastic") or spec.scale_rule is not None:
        return f"{spec.rounding} rounding or special scales have no kernel"
    if spec.calibration.is_asymmetric or spec.scale_dtype is not None:
        return "zero points and scale dtypes have no kernel"
    sides = _sides(x.shape, summed)
    if sides is None:
        return "its summed axes are neither its first nor its last"
    if spec.rounding != "nearest" and x.ndim - sides.num_leading > 1:
        return "noise along several axes of columns has no kernel"
    padded, counts = spec.layout(x.shape)
    unit = TILE if spec.tiled_axes else quantize_triton.BLOCK
    if sides.rows % unit or sides.columns % unit or padded != x.shape:
        return f"{sides.rows}x{sides.columns} is not whole blocks of {unit}"
    for extents in (counts,) if factor is None else (counts, factor.shape):
        if laid(extents, x.shape, sides.num_leading) is None:
            return f"a scale of extents {tuple(extents)} does not fit {x.shape} as a matrix"
    return None


class Quantized(NamedTuple):
    """Codes for a matmul, and for another that sums over the other axes."""

    codes: QArray
    again: QArray
    largest: jax.Array | None  # max |x|, where it was found on the way


def _is_absmax(spec, range_) -> bool:
    """Whether scales are found from all of the data, as kernels find them."""
    return spec.method == "absmax" and not spec.calibration.args and range_ is None


def quantize(
    x, spec, range_, seed, *, summed, both, factor, interpret, largest=False
) -> Quantized:
    """`seed`: the hash that noise starts from, where rounding is by chance."""
    sides = _sides(x.shape, summed)
    first = sides.num_leading
    how = {"interpret": interpret, "noise": None}
    if spec.rounding != "nearest":
        index = lax.iota(jnp.uint32, sides.columns)
        how["noise"] = hashed(seed, x.shape[:first]).reshape(-1), mix(index)
    matrix = x.reshape(sides.rows, sides.columns)
    _, counts = spec.layout(x.shape)
    along = None if factor is None else as_matrix(factor, x.shape, first)
    copies = ("plain", "transposed") if sides.sums_columns else ("transposed", "plain")
    copies = copies if both else copies[:1]
    fitted = laid(counts, x.shape, first)
    is_rows = fitted is not None and fitted[1] == [sides.rows, 1]
    fits = sides.columns * x.dtype.itemsize <= quantize_triton.MAX_ROW
    maxima = []
    if is_rows and _is_absmax(spec, range_) and fits:
        codes, scale = quantize_triton.rows(matrix, spec.format, factor=along, **how)
        found = {"plain": codes, "transposed": codes}  # XLA turns them where needed
        scale = scale.reshape(counts)
    elif (
        factor is None
        and copies == ("plain",)
        and _has_row_tiles(x, spec, range_, first)
    ):
        codes, scale = quantize_triton.tiles(matrix, spec.format, interpret=interpret)
        found, scale = {"plain": codes}, scale.T.reshape(counts)
    else:
        if range_ is None:
            range_ = calibrate(x if factor is None else x * factor, spec)
        scale = _known(range_, spec, x.dtype)
        inverse = 1 / as_matrix(scale.astype(jnp.float32), x.shape, first)
        written = quantize_triton.cast(
            matrix, inverse, spec.format, copies, factor=along, largest=largest, **how
        )
        found = {k: v.T if k == "transposed" else v for k, v in zip(copies, written)}
        maxima = written[len(copies) :]
    arrays = [
        QArray(found[c].reshape(x.shape), scale, None, spec.format.qtype)
        for c in copies
    ]
    of_all = quantize_triton.as_float(jnp.max(maxima[0]), x.dtype) if maxima else None
    return Quantized(arrays[0], arrays[-1], of_all)


def _has_row_tiles(x, spec, range_, first: int) -> bool:
    """Whether `tiles` finds the scales: the largest magnitude of TILE neighbours in a row."""
    if not _is_absmax(spec, range_) or spec.rounding != "nearest":
        return False
    found = laid(spec.layout(x.shape)[1], x.shape, first)
    rows, columns = (math.prod(part) for part in (x.shape[:first], x.shape[first:]))
    is_settled = x.dtype.name != "float16"  # its scales are rounded otherwise
    return is_settled and found is not None and found[1] == [rows, columns // TILE]


def _known(range_, spec, dtype) -> jax.Array:
    return settled(scales_of(range_, spec).scale.astype(dtype))


def why_not_tiles(x, specs, summed: tuple[int, ...]) -> str | None:
    """Why one read does not do for codes under two specs, the first for a sum over
    `summed`, the second for one over the other axes; both have kernels by themselves."""
    sides = _sides(x.shape, summed)
    assert sides is not None  # or why_not_quantize had said so
    by_row, by_column = specs if sides.sums_columns else specs[::-1]
    if by_row.format != by_column.format:
        return "two formats at once have no kernel"
    first = sides.num_leading
    found = laid(by_column.layout(x.shape)[1], x.shape, first)
    is_column = found is not None and found[1] == [sides.rows // TILE, sides.columns]
    if not is_column or not _has_row_tiles(x, by_row, None, first):
        return f"its scales are not one per {TILE} of a row, and of a column"
    if by_column.rounding != "nearest":
        return "rounding by chance needs a noise for either"
    return None


def quantize_tiles(x, specs, *, summed, interpret) -> Quantized:
    """x under two specs that `why_not_tiles` has nothing against."""
    sides = _sides(x.shape, summed)
    by_row, by_column = specs if sides.sums_columns else specs[::-1]
    columns = _known(calibrate(x, by_column), by_column, x.dtype)
    inverse = 1 / as_matrix(columns.astype(jnp.float32), x.shape, sides.num_leading)
    matrix, fmt = x.reshape(sides.rows, sides.columns), by_row.format
    plain, rows, turned = quantize_triton.tiles(
        matrix, fmt, inverse, interpret=interpret
    )
    rows = rows.T.reshape(by_row.layout(x.shape)[1])
    one, two = (
        QArray(codes.reshape(x.shape), scale, None, fmt.qtype)
        for codes, scale in ((plain, rows), (turned.T, columns))
    )
    return Quantized(*((one, two) if sides.sums_columns else (two, one)), largest=None)
