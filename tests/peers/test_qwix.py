"""Qwix 0.1.8, serving: quantize, dequantize and the six ops on quantized operands.

A seeded generator draws cases from the tables below. Ops get the very same codes and
scales, so that a difference is the op's own.
"""

import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import peer
import pytest
from jax import lax
from peer import chunks, data, sample
from tolerances import assert_codes, assert_values

import midtread as mt

qwix_array, qwix_dot_general, qwix_dot, qwix_einsum, qwix_conv, qwix_ragged = peer.load(
    "qwix",
    "0.1.8",
    "qwix._src.core.qarray",
    "qwix._src.core.dot_general",
    "qwix._src.core.dot",
    "qwix._src.core.einsum",
    "qwix._src.core.conv_general",
    "qwix._src.core.ragged_dot",
)

F32, BF16, F16 = "float32", "bfloat16", "float16"
DTYPES = [F32, F32, BF16, F16]
INTS = ["int2", "int3", "int4", "int5", "int6", "int7", "int8", "uint2", "uint4", "uint8"]  # fmt: skip
FLOATS = [
    "float8_e4m3fn", "float8_e5m2", "float8_e4m3", "float8_e4m3b11fnuz",
    "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e3m4", "float4_e2m1fn",
]  # fmt: skip
MICROSCALED = ["mxfp8", "mxfp4"]
FORMATS = [*INTS, *FLOATS, *MICROSCALED, "nf4"]
SYMMETRIC = ["absmax", "absmax,0.8", "absmax,1.3", "rms,3", "fixed,2", "fixed,-1.5,1.5"]
ASYMMETRIC = ["minmax", "minmax,0.9", "fixed,-1,3"]
LAYOUTS = [
    #     channelwise  tiled, of a [64, 96]
    ((), {}),
    ((0,), {}),
    ((1,), {}),
    ((0, 1), {}),
    ((), {0: 16}),
    ((1,), {0: 32}),
    ((0,), {1: 32}),
    ((0,), {1: 0.25}),
    ((), {0: 16, 1: 32}),
    ((), {0: 1, 1: 1.0}),
]


def qwix_type(name):
    """What Qwix calls a format: a string where it emulates, else a dtype."""
    emulated = ("int3", "int5", "int6", "int7", "nf4", "nvfp4", *MICROSCALED)
    return name if name in emulated else getattr(jnp, name)


def levels(name) -> np.ndarray:
    """Every value that a code can have, sorted."""
    fmt = mt.as_format(name)
    if fmt.codes:
        return np.arange(fmt.codes[0], fmt.codes[1] + 1, dtype=np.float32)
    if not fmt.is_linear:
        return np.arange(len(fmt.table), dtype=np.float32)
    bits = np.arange(2 ** min(fmt.bits, 8), dtype=np.uint8)
    values = bits.view(fmt.dtype) if fmt.bits == 8 else bits.astype(np.int8)
    if fmt.bits == 4:
        values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
        values = np.concatenate([-values, values])
    values = values.astype(np.float32)
    return np.unique(values[np.isfinite(values)])


def as_qwix(q):
    """The same codes and scales as a Qwix array."""
    if not isinstance(q, mt.QArray):
        return q
    qtype = q.format.name if q.format.name in ("nf4", *MICROSCALED) else q.qvalue.dtype
    return qwix_array.QArray(q.qvalue, q.scale, q.zero_point, qtype)


# --- quantize and dequantize ------------------------------------------------------------------


class Quantize(NamedTuple):
    fmt: str
    layout: Any
    calibration: str
    dtype: str


def quantize_cases():
    for fmt, layout, dtype in itertools.product(FORMATS, LAYOUTS, DTYPES[1:]):
        methods = SYMMETRIC + (ASYMMETRIC if fmt in ("int4", "int8") else [])
        tile = mt.as_format(fmt).tile
        if tile and (not layout[1] or set(layout[1].values()) != {tile}):
            continue
        for method in methods:
            if dtype != F16 or _is_sane_in_float16(layout, method):
                yield Quantize(fmt, layout, method, dtype)


def _is_sane_in_float16(layout, method):
    """Qwix gives up on float16 scales below 2^-7, and squares overflow: see test_qwix_differences."""
    return method.startswith(("absmax", "minmax")) and layout[0] != (0, 1)


def code_row(case) -> str:
    if case.dtype == F32:
        return "reciprocal"
    if case.calibration in ASYMMETRIC:
        return "zero_point"
    if case.calibration.startswith("rms"):
        return "bf16_rms"
    return "bf16_quotient" if case.dtype == BF16 else "f16_quotient"


def scale_row(case) -> str:
    if case.fmt in MICROSCALED:
        return "exp2_scale"
    if case.calibration.startswith("rms") and case.dtype != F32:
        return "bf16_rms"
    return "reciprocal" if case.dtype == F32 else "scale_16"


@pytest.mark.parametrize("cases", chunks(sample(quantize_cases(), 1100), 50))
def test_quantize(cases):
    rng = np.random.default_rng(0)
    for case in cases:
        x = data(rng, (64, 96), case.dtype, 1000 if case.dtype == F16 else 1)
        how = {"channelwise_axes": case.layout[0], "tiled_axes": case.layout[1]}
        how["calibration_method"] = case.calibration
        ours = mt.quantize(x, case.fmt, **how)
        with peer.manners():
            theirs = qwix_array.quantize_api(x, qwix_type(case.fmt), **how)
        if case.fmt in MICROSCALED and case.dtype != F32:
            ours, theirs = _where_scales_agree(ours, theirs, case)
        assert_values(ours.scale, theirs.scale, scale_row(case), case)
        share = assert_codes(
            ours.qvalue,
            theirs.qvalue,
            code_row(case),
            levels(case.fmt),
            case,
            ours.scale.size / x.size,
        )
        if share and code_row(case).endswith("quotient"):
            assert_nearer(x, ours, theirs, case)
        with peer.manners():
            back = qwix_array.dequantize(as_qwix(ours))
        assert_values(mt.dequantize(ours), back, dequantize_row(case), case)


def dequantize_row(case) -> str:
    return "nf4_table" if case.fmt == "nf4" and case.dtype != F32 else "bitwise"


def _where_scales_agree(ours, theirs, context):
    """Qwix rounds log2 to 8 bits before it takes the ceiling, so that some scales come out
    half as large and their tiles saturate. Ours never do."""
    ratio = np.asarray(ours.scale, np.float32) / np.asarray(theirs.scale, np.float32)
    assert set(np.unique(ratio)) <= {1.0, 2.0}, context
    same = jnp.asarray(ratio == 1)
    full = jnp.asarray(np.kron(ratio == 1, np.ones(ours.scale_tile_shape, bool)))
    keep = lambda q: q.replace(
        qvalue=jnp.where(full, q.qvalue, jnp.zeros_like(q.qvalue)),
        scale=jnp.where(same, q.scale, jnp.ones_like(q.scale)),
    )
    return keep(ours), keep(theirs)


def assert_nearer(x, ours, theirs, context):
    """Where codes differ, ours is the one nearer to the exact quotient."""
    scale = np.asarray(mt.dequantize(ours.replace(qvalue=jnp.ones_like(ours.qvalue))))
    units = np.asarray(x, np.float64) / scale.astype(np.float64)
    value = lambda q: np.asarray(q.qvalue, np.float64)
    if not ours.format.is_linear:
        return
    far, near = np.abs(value(theirs) - units), np.abs(value(ours) - units)
    assert (near <= far * (1 + 1e-6)).all(), context


# --- ops --------------------------------------------------------------------------------------

NO_BATCH = ((), ())
DOTS = [
    #  lhs           rhs           dimension numbers
    ((8, 256),      (256, 6),     (((1,), (0,)), NO_BATCH)),
    ((256, 8),      (6, 256),     (((0,), (1,)), NO_BATCH)),
    ((2, 4, 256),   (2, 256, 6),  (((2,), (1,)), ((0,), (0,)))),
    ((4, 2, 256),   (256, 6, 2),  (((2,), (0,)), ((1,), (2,)))),
    ((4, 8, 256),   (256, 8, 6),  (((1, 2), (1, 0)), NO_BATCH)),
    ((4, 8, 256),   (256, 8, 6),  (((2, 1), (0, 1)), NO_BATCH)),
    ((256,),        (256, 6),     (((0,), (0,)), NO_BATCH)),
    ((8,),          (6,),         (((), ()), NO_BATCH)),
]  # fmt: skip
JNP_DOTS = [((8, 256), (256, 6)), ((2, 8, 256), (3, 256, 6)), ((256,), (256, 6))]
EINSUMS = [
    #  subscripts             shapes
    ("ij,jk->ik",             (8, 256), (256, 6)),
    ("ij,jk",                 (8, 256), (256, 6)),
    ("ij,kj->ki",             (8, 256), (6, 256)),
    ("btd,dnh->btnh",         (2, 4, 256), (256, 3, 2)),
    ("btnh,nhd->btd",         (2, 4, 2, 128), (2, 128, 6)),
    ("bqhd,bkhd->bhqk",       (2, 4, 3, 128), (2, 5, 3, 128)),
    ("bhqk,bkhd->bqhd",       (2, 3, 4, 128), (2, 128, 3, 6)),
    ("...d,df->...f",         (2, 4, 256), (256, 6)),
    ("...d,df",               (2, 4, 256), (256, 6)),
    ("abc,cbd->da",           (4, 2, 128), (128, 2, 6)),
    ("bd,bdf->bf",            (4, 256), (1, 256, 6)),
    ("bmk,bkn->bmn",          (1, 4, 256), (3, 256, 6)),
    ("i,j->ij",               (8,), (6,)),
    ("abk,kc->ac",            (4, 2, 256), (256, 6)),
    ("ab,bc,cd->ad",          (4, 256), (256, 128), (128, 6)),
    ("btd,dnh,nhk->btk",      (2, 4, 256), (256, 2, 64), (2, 64, 6)),
]  # fmt: skip
NWC, NHWC = ("NWC", "WIO", "NWC"), ("NHWC", "HWIO", "NHWC")
CONVS = [
    #  lhs            rhs           strides padding           lhs dil. rhs dil. layout groups
    ((2, 16, 8),     (3, 8, 6),     (1,),   "SAME",            None,   None,   NWC,   1, 1),
    ((2, 16, 8),     (3, 8, 6),     (2,),   "VALID",           None,   (2,),   NWC,   1, 1),
    ((2, 8, 16),     (6, 8, 3),     (2,),   [(1, 2)],          None,   None,   None,  1, 1),
    ((2, 9, 8, 4),   (3, 2, 4, 6),  (2, 1), [(1, 0), (2, 1)],  None,   None,   NHWC,  1, 1),
    ((2, 9, 8, 4),   (3, 3, 4, 6),  (1, 2), "SAME",            None,   (2, 1), NHWC,  1, 1),
    ((2, 5, 6, 4),   (3, 3, 4, 6),  (1, 1), [(2, 2), (2, 2)],  (2, 2), None,   NHWC,  1, 1),
    ((2, 9, 8, 4),   (3, 3, 2, 6),  (1, 1), "SAME",            None,   None,   NHWC,  2, 1),
    ((2, 9, 8, 4),   (3, 3, 1, 8),  (1, 1), "SAME",            None,   None,   NHWC,  4, 1),
]  # fmt: skip
ROWS_KEPT = lax.RaggedDotDimensionNumbers((((1,), (1,)), NO_BATCH), [0], [0])
ROWS_SUMMED = lax.RaggedDotDimensionNumbers((((0,), (0,)), NO_BATCH), [0], [])
RAGGED = [
    #  lhs        rhs            numbers      kept axes of lhs and rhs; summed
    ((12, 256),  (3, 256, 6),   None,         ((0,), (2,)), (1, 1)),
    ((12, 256),  (3, 256, 6),   None,         ((0,), (0, 2)), (1, 1)),
    ((12, 256),  (3, 256, 6),   ROWS_KEPT,    ((0,), (2,)), (1, 1)),
    ((12, 8),    (12, 6),       ROWS_SUMMED,  ((1,), (1,)), None),
]  # fmt: skip
SIZES = jnp.array([5, 0, 7], jnp.int32)
# Pairs of operand formats; None is a float array.
PAIRS = [
    ("int8", "int8"), ("int8", "int4"), ("int4", "int4"), ("int6", "int8"), ("int3", "int5"), ("int2", "int2"),
    ("uint8", "int8"), ("uint4", "uint4"), ("float8_e4m3fn", "float8_e4m3fn"), ("float8_e5m2", "float8_e4m3fn"),
    ("float8_e4m3fnuz", "float8_e4m3fnuz"), ("float8_e3m4", "float8_e3m4"), ("float8_e4m3b11fnuz", "float8_e4m3b11fnuz"),
    ("float4_e2m1fn", "float4_e2m1fn"), ("float8_e4m3fn", "float4_e2m1fn"), ("int8", "float8_e4m3fn"), ("nf4", "nf4"),
    ("int8", "nf4"), ("mxfp8", "mxfp8"), ("mxfp4", "mxfp4"), ("mxfp8", "mxfp4"), ("mxfp8", None),
    *((None, fmt) for fmt in FORMATS), ("int8", None), ("nf4", None),
]  # fmt: skip


class Call(NamedTuple):
    op: str
    geometry: Any
    formats: tuple
    tile: Any
    calibration: str
    dtype: str
    per_tensor: bool


def call_cases(op, geometries, tiles=(None,), methods=("absmax",)):
    options = (geometries, PAIRS, tiles, methods, DTYPES, (False, True))
    for geometry, pair, tile, method, dtype, per_tensor in itertools.product(*options):
        needs = {mt.as_format(f).tile for f in pair if f} - {None}
        if needs and (tile not in needs or per_tensor):
            continue
        if method == "minmax" and pair[0] not in ("int8", "int4"):
            continue
        if dtype == F16 and None not in pair:
            continue  # Qwix overflows: see test_qwix_differences
        yield Call(op, geometry, pair, tile, method, dtype, per_tensor)


def draw(rng, shape, fmt, channelwise, tiles, dtype, is_asymmetric=False):
    """A quantized array made of random codes and scales, without a compiler at work; None
    where a tile does not divide."""
    if fmt is None:
        return jnp.asarray(rng.normal(size=shape).astype(jnp.dtype(dtype)))
    row = mt.as_format(fmt)
    counts = [n if a in channelwise else 1 for a, n in enumerate(shape)]
    for axis, tile in tiles.items():
        tile = round(tile * shape[axis]) if isinstance(tile, float) else tile
        if shape[axis] % tile:
            return None
        counts[axis] = shape[axis] // tile
    values = levels(fmt)
    near = np.searchsorted(values, rng.normal(size=shape) * (row.bound / 3))
    codes = values[np.clip(near, 0, len(values) - 1)]
    if not row.is_linear:
        codes = rng.integers(0, len(values), shape)
    scale = rng.uniform(0.5, 1.5, counts) / row.bound
    if row.scale:
        scale = 2.0 ** np.round(np.log2(scale))
    scale = jnp.asarray(scale.astype(jnp.dtype(dtype)))
    zero = None
    if is_asymmetric:
        zero = jnp.asarray(rng.integers(*row.codes, counts).astype(row.dtype))
    return mt.QArray(jnp.asarray(codes.astype(row.dtype)), scale, zero, fmt)


def exactly(x) -> np.ndarray:
    """The float64 array that an operand stands for."""
    if not isinstance(x, mt.QArray):
        return np.asarray(x, np.float64)
    grow = lambda part: np.kron(
        np.asarray(part, np.float64), np.ones(np.floor_divide(x.shape, part.shape))
    )
    value = np.asarray(x.qvalue).astype(np.float64)
    if not x.format.is_linear:
        value = np.asarray(x.format.table, np.float64)[value.astype(int)]
    if x.zero_point is not None:
        value = value - grow(x.zero_point)
    return value * grow(x.scale)


def qwix_runs(case, ours) -> bool:
    """XLA:CPU does not multiply two arrays of one type below 8 bits, nor convolve mixed
    ones. Qwix's convolution multiplies indices of nf4, and its einsum fails when one
    operand alone is summed."""
    if case.geometry[0] == "abk,kc->ac":
        return False
    if any(not isinstance(x, mt.QArray) for x in ours):
        return True
    if not all(x.format.is_linear for x in ours):
        return case.op != "conv"
    if case.tile not in (None, 128, 0.5):
        return True
    left, right = (np.dtype(x.qvalue.dtype) for x in ours[:2])
    if case.op == "ragged":
        return left != right or "8" in left.name or case.geometry[2] is not ROWS_SUMMED
    return "8" in left.name if left == right else case.op != "conv"


def check(case, ours, run_ours, run_theirs, exact):
    """Against Qwix where it runs, and always against float64."""
    out = jax.jit(run_ours)(*ours)
    exact = np.asarray(exact)
    row = {F32: "f32_sum", BF16: "bf16_result", F16: "f16_result"}[case.dtype]
    assert_values(out, exact.astype(out.dtype), row, case)
    if not qwix_runs(case, ours):
        return
    with peer.manners():
        theirs = jax.jit(run_theirs)(*map(as_qwix, ours))
    if case.dtype == F16 and not np.isfinite(theirs).all():
        return  # its float16 sums of codes overflowed: held against float64 alone
    row = {F32: "f32_sum", BF16: "bf16_epilogue", F16: "f16_epilogue"}[case.dtype]
    assert_values(out, theirs, row, case)
    if case.dtype != F32:
        far = lambda x: np.linalg.norm(np.asarray(x, np.float64) - exact)
        assert far(out) <= 1.2 * far(theirs) + 1e-6, (case, far(out), far(theirs))


def run_cases(cases, body):
    rng = np.random.default_rng(1)
    for case in cases:
        body(case, rng)


def dot_in_float64(x, y, numbers):
    """lax.dot_general by numpy."""
    (x_sum, y_sum), (x_batch, y_batch) = numbers
    x_names = {a: f"k{i}" for i, a in enumerate(x_sum)} | {a: f"b{i}" for i, a in enumerate(x_batch)}  # fmt: skip
    y_names = {a: f"k{i}" for i, a in enumerate(y_sum)} | {a: f"b{i}" for i, a in enumerate(y_batch)}  # fmt: skip
    x_names = [x_names.get(a, f"m{a}") for a in range(x.ndim)]
    y_names = [y_names.get(a, f"n{a}") for a in range(y.ndim)]
    index = {name: i for i, name in enumerate(dict.fromkeys(x_names + y_names))}
    out = [f"b{i}" for i in range(len(x_batch))]
    out += [n for n in (*x_names, *y_names) if n[0] in "mn"]
    of = lambda names: [index[n] for n in names]
    return np.einsum(x, of(x_names), y, of(y_names), of(out))


DOT_CASES = list(call_cases("dot", DOTS, (None, 128, 32, 0.5), ("absmax", "minmax")))


@pytest.mark.parametrize("cases", chunks(sample(DOT_CASES, 240), 40))
def test_dot_general(cases):
    def body(case, rng):
        *shapes, numbers = case.geometry
        ours = []
        for side, (shape, fmt) in enumerate(zip(shapes, case.formats)):
            how = qwix_dot_general.get_how_to_quantize(
                dimension_numbers=numbers,
                ndims=tuple(map(len, shapes)),
                for_lhs=side == 0,
                tile_size=case.tile if numbers[0][0] else None,
                qtype="int8",
            )
            kept = () if case.per_tensor else how.channelwise_axes
            asymmetric = side == 0 and case.calibration == "minmax"
            ours.append(
                draw(rng, shape, fmt, kept, how.tiled_axes, case.dtype, asymmetric)
            )
        if any(x is None for x in ours):
            return
        check(
            case,
            ours,
            lambda x, y: mt.dot_general(x, y, numbers),
            lambda x, y: qwix_dot_general.dot_general(x, y, numbers),
            dot_in_float64(*map(exactly, ours), numbers),
        )

    run_cases(cases, body)


JNP_DOT_CASES = list(call_cases("dot", JNP_DOTS))
EINSUM_CASES = list(call_cases("einsum", EINSUMS, (None, 128, 32)))
CONV_CASES = list(call_cases("conv", CONVS, (None,), ("absmax", "minmax")))
RAGGED_CASES = list(call_cases("ragged", RAGGED, (None, 128)))


@pytest.mark.parametrize("cases", chunks(sample(JNP_DOT_CASES, 40), 20))
def test_dot(cases):
    def body(case, rng):
        kept = lambda shape: tuple(a for a in range(len(shape)) if shape[a] != 256)
        ours = [
            draw(rng, shape, fmt, kept(shape), {}, case.dtype)
            for shape, fmt in zip(case.geometry, case.formats)
        ]
        check(case, ours, mt.dot, qwix_dot.dot, np.dot(*map(exactly, ours)))

    run_cases(cases, body)


@pytest.mark.parametrize("cases", chunks(sample(EINSUM_CASES, 90), 30))
def test_einsum(cases):
    def body(case, rng):
        text, *shapes = case.geometry
        ours = []
        for side, shape in enumerate(shapes):
            fmt = case.formats[min(side, 1)]
            tiles, kept = {}, range(len(shape))
            if len(shapes) == 2:
                how = qwix_einsum.get_how_to_quantize(
                    einsum_str=text,
                    ndims=tuple(map(len, shapes)),
                    for_lhs=side == 0,
                    tile_size=case.tile,
                    qtype="int8",
                )
                tiles, kept = how.tiled_axes, how.channelwise_axes
            elif mt.as_format(fmt or "int8").tile:
                return
            elif side != 0:
                kept = ()
            kept = () if case.per_tensor else kept
            ours.append(draw(rng, shape, fmt, kept, tiles, case.dtype))
        if any(x is None for x in ours):
            return
        check(
            case,
            ours,
            lambda *xs: mt.einsum(text, *xs),
            lambda *xs: qwix_einsum.einsum(text, *xs),
            np.einsum(text, *map(exactly, ours)),
        )

    run_cases(cases, body)


@pytest.mark.parametrize("cases", chunks(sample(CONV_CASES, 140), 35))
def test_conv_general_dilated(cases):
    def body(case, rng):
        lhs, rhs, *geometry = case.geometry
        numbers = lax.conv_dimension_numbers(lhs, rhs, geometry[4])
        asymmetric = case.calibration == "minmax"
        kept = ((numbers.lhs_spec[0],), (numbers.rhs_spec[0],))
        kept = ((), ()) if case.per_tensor else kept
        ours = [
            draw(rng, lhs, case.formats[0], kept[0], {}, case.dtype, asymmetric),
            draw(rng, rhs, case.formats[1], kept[1], {}, case.dtype),
        ]
        wide = [jnp.asarray(exactly(x).astype(np.float32)) for x in ours]
        check(
            case,
            ours,
            lambda x, y: mt.conv_general_dilated(x, y, *geometry),
            lambda x, y: qwix_conv.conv_general_dilated(x, y, *geometry),
            lax.conv_general_dilated(*wide, *geometry, precision="highest"),
        )

    run_cases(cases, body)


@pytest.mark.parametrize("cases", chunks(sample(RAGGED_CASES, 120), 40))
def test_ragged_dot(cases):
    def body(case, rng):
        lhs, rhs, numbers, kept, summed = case.geometry
        if case.tile and summed is None:
            return
        tiles = [{a: case.tile} if case.tile else {} for a in summed or (0, 0)]
        kept = ((), ()) if case.per_tensor else kept
        ours = [
            draw(rng, shape, fmt, channelwise, tile, case.dtype)
            for shape, fmt, channelwise, tile in zip(
                (lhs, rhs), case.formats, kept, tiles
            )
        ]
        if "nf4" in case.formats and None not in case.formats:
            return  # Qwix multiplies indices: see test_qwix_differences
        x, y = map(exactly, ours)
        group = np.repeat(np.arange(3), np.asarray(SIZES))
        if numbers is ROWS_SUMMED:
            exact = np.stack([x[group == g].T @ y[group == g] for g in range(3)])
        else:
            exact = np.einsum("mk,mkn->mn", x, y[group])
        if numbers is None:
            run = lambda ops: lambda x, y: ops.ragged_dot(x, y, SIZES)
        else:
            run = lambda ops: lambda x, y: ops.ragged_dot_general(x, y, SIZES, numbers)
        check(case, ours, run(mt), run(qwix_ragged), exact)

    run_cases(cases, body)
