"""NVIDIA GPUs: from a float operand to a plan for a quantizing kernel, or the reason why not.

A kernel of triton.py takes a matrix, and an operand has axes, of which a matmul sums over the
first or the last. Here the operand becomes a matrix [rows, columns], and so do its scales and a
factor (`fit` in layout.py). One of these kernels writes codes in the order its matmuls want:

    rows     a scale for each row; a program reads a row once, and computes and applies its scale
    tiles    a scale for each TILE of a row, in one read too; if wanted, the same read also gives
             codes for the other matmul, with known scales in tiles of a column
    few      a scale for each of few rows, as `rows`; it writes codes in bfloat16 too
    cast     all other scales, which are known before: codes in either order, or both
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from midtread.kernels import pending
from midtread.kernels.candidates import Refusal
from midtread.kernels.environment import Env
from midtread.kernels.layout import (
    SYMBOLIC,
    TILE,
    Fit,
    as_matrix,
    fit,
    is_static,
    stored,
)
from midtread.kernels.quantize import triton
from midtread.kernels.quantize.operand import Operand, Quantized, Twice
from midtread.kernels.scaled_matmul import FLOAT8
from midtread.numerics.qarray import QArray, calibrate, scales_of, settled
from midtread.numerics.rounding import hashed, mix, seed


class Sides(NamedTuple):
    """An array as [rows, columns], and which of the two a matmul sums over."""

    rows: int
    columns: int
    num_leading: int
    sums_columns: bool


@functools.lru_cache(maxsize=1024)
def _sides(shape: tuple[int, ...], summed: tuple[int, ...]) -> Sides | None:
    ndim, num = len(shape), len(summed)
    matrix = stored(shape, summed) if 0 < num < ndim else None
    if matrix is None:
        return None
    sizes, axis = matrix
    return Sides(*sizes, ndim - num if axis == 1 else num, axis == 1)


class Triton(NamedTuple):
    """The plan to run one of the kernels of triton.py on one operand."""

    detail: str  # "rows", "tiles" or "cast"
    sides: Sides
    copies: tuple[str, ...]  # the orders that codes are written in
    is_interpreted: bool

    def run(self, a: Operand) -> Quantized:
        x, spec, (rows, columns, first, _) = a.x, a.spec, self.sides
        options: dict[str, Any] = {"interpret": self.is_interpreted, "noise": None}
        if spec.rounding != "nearest":
            start = seed(a.key, a.site)
            index = lax.iota(jnp.uint32, columns)
            options["noise"] = hashed(start, x.shape[:first]).reshape(-1), mix(index)
        matrix, counts, maxima = x.reshape(rows, columns), a.layout[1], []
        along = None if a.factor is None else as_matrix(a.factor, x.shape, first)
        if self.detail == "rows":
            codes, scale = triton.rows(matrix, spec.format, factor=along, **options)
            by_order = dict.fromkeys(
                ("plain", "transposed"), codes
            )  # XLA transposes them
            scale = scale.reshape(counts)
        elif self.detail == "tiles":
            interpret = self.is_interpreted
            codes, scale = triton.tiles(matrix, spec.format, interpret=interpret)
            by_order, scale = {"plain": codes}, scale.T.reshape(counts)
        else:
            range_ = calibrate(a.scaled(), spec) if a.range_ is None else a.range_
            scale = _known(range_, spec, x.dtype)
            inverse = 1 / as_matrix(scale.astype(jnp.float32), x.shape, first)
            options |= {"factor": along, "largest": a.largest}
            written = triton.cast(matrix, inverse, spec.format, self.copies, **options)
            pairs = zip(self.copies, written)
            by_order = {k: v.T if k == "transposed" else v for k, v in pairs}
            maxima = written[len(self.copies) :]
        arrays = [
            QArray(by_order[c].reshape(x.shape), scale, None, spec.format.qtype)
            for c in self.copies
        ]
        largest = triton.as_float(jnp.max(maxima[0]), x.dtype) if maxima else None
        return Quantized(arrays[0], arrays[-1], largest)


class Few(NamedTuple):
    """The plan to quantize few rows of a decoding step, one kernel for reading, scaling and
    casting."""

    is_interpreted: bool

    def run(self, a: Operand) -> Quantized:
        matrix = a.x.reshape(-1, a.x.shape[-1])
        call = _few_call(a.spec.format, self.is_interpreted)
        codes, wide, scale = (part.reshape(shape) for part, shape in zip(call(matrix), (a.x.shape, a.x.shape, a.layout[1])))  # fmt: skip
        pending.note(codes, wide=wide)
        q = QArray(codes, scale, None, a.spec.format.qtype)
        return Quantized(q, q)


@functools.cache
def _few_call(fmt, interpret: bool):
    return jax.jit(functools.partial(triton.few_rows, fmt=fmt, interpret=interpret))


def plan_few(a: Operand, env: Env) -> Few | Refusal:
    """Takes few rows in a decoding step, where kernels of ours stand before and behind: XLA,
    which quantizes by two, has nothing to put that into."""
    x, spec = a.x, a.spec
    fmt = spec.format
    if not env.is_alone or not a.has_few_rows:
        return Refusal("it is for few rows on one device")
    if a.both or a.factor is not None or spec.rounding != "nearest" or not a.is_absmax:
        return Refusal("it is for scales from the data now, and codes to the nearest")
    if fmt.dtype.name not in ("int8", *FLOAT8) or fmt.scale is not None or fmt.tile:
        return Refusal(f"{fmt.name} has no kernel: int8, e4m3 and e5m2 have")
    if spec.scale_rule is not None or spec.scale_dtype is not None or spec.calibration.is_asymmetric:  # fmt: skip
        return Refusal("zero points, special scales and scale dtypes have no kernel")
    if x.dtype.name not in ("bfloat16", "float32"):
        return Refusal(f"{x.dtype} has no kernel")
    padded, counts = a.layout
    is_row = padded == x.shape and tuple(counts) == (*x.shape[:-1], 1)
    if not is_row or x.size == 0 or x.shape[-1] * x.dtype.itemsize > triton.MAX_ROW:
        return Refusal("it is for one scale a row, of rows that a program can hold")
    return Few(env.is_interpreted)


def plan(a: Operand, env: Env) -> Triton | Refusal:
    x, spec = a.x, a.spec
    fmt, calibration = spec.format, spec.calibration
    if not env.is_alone:
        return Refusal(
            "a model over several devices is quantized by XLA, which can partition it"
        )
    is_nearest = spec.rounding == "nearest"
    if not is_nearest and a.key is None:
        return Refusal("rounding by chance needs a key")
    is_single = not a.both and a.factor is None
    if is_single and is_nearest and fmt.codes is not None and a.has_few_rows:
        return Refusal(
            "few rows are mostly cast to bfloat16 next, and XLA does all of that at once"
        )
    if fmt.dtype.name not in ("int8", *FLOAT8) or fmt.scale is not None:
        return Refusal(f"{fmt.name} has no kernel: int8, e4m3 and e5m2 have")
    if x.dtype.name not in ("bfloat16", "float16", "float32"):
        return Refusal(f"{x.dtype} has no kernel")
    if spec.rounding not in ("nearest", "stochastic") or spec.scale_rule is not None:
        return Refusal(f"{spec.rounding} rounding or special scales have no kernel")
    if calibration.is_asymmetric or spec.scale_dtype is not None:
        return Refusal("zero points and scale dtypes have no kernel")
    if not is_static(x):
        return Refusal(SYMBOLIC)
    sides = _sides(x.shape, a.summed)
    if sides is None:
        return Refusal("its summed axes are neither its first nor its last")
    if not is_nearest and x.ndim - sides.num_leading > 1:
        return Refusal("noise along several axes of columns has no kernel")
    padded, counts = a.layout
    unit = TILE if spec.tiled_axes else triton.BLOCK
    if sides.rows % unit or sides.columns % unit or padded != x.shape:
        return Refusal(f"{sides.rows}x{sides.columns} is not whole blocks of {unit}")
    scale = fit(counts, x.shape, sides.num_leading)
    factor = scale
    if a.factor is not None:
        factor = fit(a.factor.shape, x.shape, sides.num_leading)
    if scale is None or factor is None:
        extents = tuple(counts) if scale is None else a.factor.shape
        what = f"a scale of extents {extents} does not fit {x.shape}"
        return Refusal(f"{what} as a matrix")
    copies = ("plain", "transposed") if sides.sums_columns else ("transposed", "plain")
    copies = copies if a.both else copies[:1]
    detail = _kernel(a, sides, scale, copies)
    return Triton(detail, sides, copies, env.is_interpreted)


def _kernel(a: Operand, sides: Sides, scale: Fit, copies: tuple[str, ...]) -> str:
    fits = sides.columns * a.x.dtype.itemsize <= triton.MAX_ROW
    if scale.matrix == (sides.rows, 1) and a.is_absmax and fits:
        return "rows"
    is_single = a.factor is None and copies == ("plain",)
    return "tiles" if is_single and _has_row_tiles(a, sides, scale) else "cast"


def _has_row_tiles(a: Operand, sides: Sides, scale: Fit | None) -> bool:
    """Whether scales are those that `tiles` computes: of the largest of TILE neighbours in a
    row."""
    if not a.is_absmax or a.spec.rounding != "nearest":
        return False
    is_settled = a.x.dtype.name != "float16"  # float16's scales are rounded otherwise
    matrix = (sides.rows, sides.columns // TILE)
    return is_settled and scale is not None and scale.matrix == matrix


def _known(range_, spec, dtype) -> jax.Array:
    return settled(scales_of(range_, spec).scale.astype(dtype))


# --- for two matmuls, from one read -----------------------------------------------------------


class Same(NamedTuple):
    """The plan for two matmuls under the same Spec: one kernel writes both orders."""

    one: Triton

    @property
    def detail(self) -> str:
        return self.one.detail

    def run(self, a: Twice) -> Quantized:
        return self.one.run(a.operands[0])


class Tiles(NamedTuple):
    """The plan for scales in tiles of a row for one matmul, and of a column for the other."""

    sides: Sides
    is_interpreted: bool
    detail: str = "tiles"

    def run(self, a: Twice) -> Quantized:
        x, (rows, columns, first, sums_columns) = a.x, self.sides
        by_row, by_column = a.specs if sums_columns else a.specs[::-1]
        known = _known(calibrate(x, by_column), by_column, x.dtype)
        inverse = 1 / as_matrix(known.astype(jnp.float32), x.shape, first)
        matrix, fmt = x.reshape(rows, columns), by_row.format
        interpret = self.is_interpreted
        plain, scale, turned = triton.tiles(matrix, fmt, inverse, interpret=interpret)
        scale = scale.T.reshape(by_row.layout(x.shape)[1])
        one, two = (
            QArray(codes.reshape(x.shape), scale, None, fmt.qtype)
            for codes, scale in ((plain, scale), (turned.T, known))
        )
        return Quantized(*((one, two) if sums_columns else (two, one)))


def plan_twice(a: Twice, env: Env) -> Same | Tiles | Refusal:
    if any(spec.rounding != "nearest" for spec in a.specs):
        return Refusal("rounding by chance needs a noise for either")
    if sorted(a.summed[0] + a.summed[1]) != list(range(a.x.ndim)):
        return Refusal("the two matmuls do not sum over all axes")
    plans = [plan(operand, env) for operand in a.operands]
    for each in plans:
        if isinstance(each, Refusal):
            return each
    if a.specs[0] == a.specs[1]:
        return Same(plans[0])
    if a.range_ is not None:
        return Refusal("two kinds of scales under one range have no kernel")
    sides = plans[0].sides
    by_row, by_column = a.operands if sides.sums_columns else a.operands[::-1]
    if by_row.spec.format != by_column.spec.format:
        return Refusal("two formats at once have no kernel")
    of_row, of_column = (
        fit(each.layout[1], a.x.shape, sides.num_leading)
        for each in (by_row, by_column)
    )
    columns = (sides.rows // TILE, sides.columns)
    is_column = of_column is not None and of_column.matrix == columns
    if not is_column or not _has_row_tiles(by_row, sides, of_row):
        return Refusal(f"its scales are not one per {TILE} of a row, and of a column")
    return Tiles(sides, env.is_interpreted)
