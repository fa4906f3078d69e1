"""Qwix 0.1.8, training: dot_general_qt, conv_general_qt and ragged_dot_qt against
`learn(Recipe)`: the output and both gradients.

Data is `planted`: scales are powers of two and codes stay away from ties, so in float32
only the order of a sum may differ. Random data checks the rest, one tie looser.
"""

import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import peer
import pytest
from peer import chunks, data, planted, sample
from tolerances import assert_values

import midtread as mt

dot_general_qt, conv_general_qt, ragged_dot_qt, noise, qwix_einsum_info = peer.load(
    "qwix",
    "0.1.8",
    "qwix._src.core.dot_general_qt",
    "qwix._src.core.conv_general_qt",
    "qwix._src.core.ragged_dot_qt",
    "qwix._src.core.stochastic_rounding",
    "qwix._src.core.einsum_info",
)

F32, BF16 = "float32", "bfloat16"
INT8, E4M3, E5M2 = "int8", "float8_e4m3fn", "float8_e5m2"
NO_BATCH = ((), ())
DOTS = [
    #  lhs           rhs           dimension numbers
    ((16, 32),      (32, 8),      (((1,), (0,)), NO_BATCH)),
    ((32, 16),      (8, 32),      (((0,), (1,)), NO_BATCH)),
    ((2, 16, 32),   (2, 32, 8),   (((2,), (1,)), ((0,), (0,)))),
    ((16, 2, 32),   (32, 8, 2),   (((2,), (0,)), ((1,), (2,)))),
    ((4, 16, 32),   (32, 8),      (((2,), (0,)), NO_BATCH)),
    ((4, 16, 4, 8), (8, 4, 8),    (((2, 3), (1, 0)), NO_BATCH)),
]  # fmt: skip
EINSUMS = [
    #  subscripts           shapes
    ("btd,dnh->btnh",       (2, 8, 32), (32, 4, 8)),
    ("btnh,nhd->btd",       (2, 8, 4, 8), (4, 8, 16)),
    ("bqhd,bkhd->bhqk",     (2, 8, 4, 16), (2, 8, 4, 16)),
    ("bhqk,bkhd->bqhd",     (2, 4, 8, 16), (2, 16, 4, 8)),
    ("btd,df->fbt",         (2, 8, 32), (32, 16)),
]  # fmt: skip
FORMATS = [
    #  lhs    rhs    g
    (INT8,  INT8,  INT8),
    (E4M3,  E4M3,  E4M3),
    (E4M3,  E4M3,  E5M2),
    (INT8,  INT8,  None),
    ("int4", "int4", None),
    (None,  INT8,  None),
    (None,  "nf4", None),
    (None,  "int4", None),
    (None,  INT8,  INT8),
    (INT8,  "int4", INT8),
]  # fmt: skip
METHODS = [
    #  lhs           rhs            g
    ("absmax",      "absmax",      "absmax"),
    ("absmax,0.5",  "absmax,0.25", "absmax"),
    ("fixed,1.75",  "absmax,0.5",  "absmax"),
    ("rms,2",       "rms,3",       "absmax"),
    ("absmax",      "absmax",      "fixed,0.4375"),
]  # fmt: skip


class Train(NamedTuple):
    geometry: Any
    formats: tuple
    methods: tuple
    drhs_tile: Any = None
    per_tensor: bool = False
    masked: bool = True
    dtype: str = F32


def qwix_type(name):
    return name if name in (None, "nf4") else getattr(jnp, name)


def recipe_of(case, rounding="nearest") -> mt.Recipe:
    """Our words for what `config_of` says in Qwix's."""
    channels = () if case.per_tensor else ("kept",)

    def spec(fmt, method, **fields):
        if fmt is None:
            return None
        return mt.Spec(fmt, channelwise_axes=channels, calibration=method, **fields)

    (lhs, rhs, g), (lhs_how, rhs_how, g_how) = case.formats, case.methods
    tiles = {"summed": case.drhs_tile} if case.drhs_tile else {}
    reuse = mt.REUSE if g is not None else None
    return mt.Recipe(
        mt.Fwd(spec(lhs, lhs_how), spec(rhs, rhs_how)),
        mt.Dlhs(spec(g, g_how, rounding=rounding), reuse),
        mt.Drhs(reuse, spec(g, g_how, rounding=rounding, tiled_axes=tiles)),
        mask_clipped=case.masked,
    )


def config_of(case, noise_fn=None):
    lhs, rhs, g = map(qwix_type, case.formats)
    return dot_general_qt.DotGeneralQtConfig(
        lhs_qtype=lhs,
        rhs_qtype=rhs,
        lhs_calibration_method=case.methods[0],
        rhs_calibration_method=case.methods[1],
        lhs_disable_channelwise_axes=case.per_tensor,
        rhs_disable_channelwise_axes=case.per_tensor,
        dlhs_grad_qtype=g,
        drhs_grad_qtype=g,
        dlhs_grad_calibration_method=case.methods[2],
        drhs_grad_calibration_method=case.methods[2],
        dlhs_grad_disable_channelwise_axes=case.per_tensor,
        drhs_grad_disable_channelwise_axes=case.per_tensor,
        dlhs_stochastic_rounding_noise_fn=noise_fn,
        drhs_stochastic_rounding_noise_fn=noise_fn,
        drhs_tile_size=case.drhs_tile,
        disable_gradient_clipping=not case.masked,
        use_original_residuals=g is None,
    )


def draw(case, lhs, rhs):
    """Planted where both sides then have exact scales, else random."""
    if row_of(case) != "f32_sum":
        rng = np.random.default_rng(2)
        return data(rng, lhs, case.dtype), data(rng, rhs, case.dtype)
    bounds = [mt.as_format(f or INT8).bound for f in case.formats]
    return planted(1, lhs, bounds[0]), planted(2, rhs, bounds[1])


def row_of(case) -> str:
    if case.dtype != F32:
        return "bf16_training"
    inexact = any(how.startswith(("rms", "fixed")) for how in case.methods)
    if not inexact and case.drhs_tile != 1:
        return "f32_sum"
    return "ties_4_bits" if "int4" in case.formats else "ties"


def step(run, lhs, rhs, g_format=None):
    """Output, dlhs and drhs for a fixed, planted cotangent."""
    out = jax.eval_shape(run, lhs, rhs)
    g = planted(3, out.shape, mt.as_format(g_format or INT8).bound).astype(out.dtype)

    @jax.jit
    def all_three(lhs, rhs, g):
        out, pull = jax.vjp(run, lhs, rhs)
        return out, *pull(g)

    return all_three(lhs, rhs, g)


def compare(case, ours, theirs, lhs, rhs, row=None):
    mine = step(ours, lhs, rhs, case.formats[2])
    with peer.manners():
        yours = step(theirs, lhs, rhs, case.formats[2])
    for name, a, b in zip(("out", "dlhs", "drhs"), mine, yours):
        if name != "out" and case.masked and case.dtype == BF16:
            a, b = without_edges(a, b, f"{name} of {case}")
        assert_values(a, b, row or row_of(case), f"{name} of {case}")


def without_edges(ours, theirs, context):
    """Both with 0 where only one of them is masked: Qwix's range has 8 bits, so a few
    elements lie between its edge and ours, and the whole gradient of one is the error."""
    only_one = np.asarray((ours == 0) != (theirs == 0))
    assert only_one.mean() <= 0.01, f"{context}: {only_one.sum()} masked by one alone"
    return (jnp.where(only_one, 0, x) for x in (ours, theirs))


def one_scale(case) -> bool:
    """Some operand has one scale for all: 'fixed' always does."""
    return case.per_tensor or any("fixed" in how for how in case.methods[:2])


def dot_cases(geometries):
    options = (FORMATS, METHODS, (None, 0.25, 1, 4), (False, True), (True, False), (F32, F32, BF16))  # fmt: skip
    for geometry, case in itertools.product(geometries, itertools.product(*options)):
        case = Train(geometry, *case)
        if qwix_runs(case):
            yield case


def qwix_runs(case) -> bool:
    lhs, rhs, g = case.formats
    if case.drhs_tile is not None and g is None:
        return False
    if "fixed" in case.methods[2] and one_scale(case):
        return False  # see test_window_of_g
    if (lhs, rhs) == ("int4", "int4"):
        return False  # not on a CPU: see test_four_bits
    return not ("nf4" in (lhs, rhs) and g)


def check_dot(case, row=None):
    *shapes, numbers = case.geometry
    ops, config = mt.learn(recipe_of(case)), config_of(case)
    compare(
        case,
        lambda x, y: ops.dot_general(x, y, numbers),
        lambda x, y: dot_general_qt.dot_general_qt(x, y, numbers, config),
        *draw(case, *shapes),
        row,
    )


def check_einsum(case):
    text, *shapes = case.geometry
    ops, config = mt.learn(recipe_of(case)), config_of(case)
    info = qwix_einsum_info.EinsumInfo.parse(text)

    def theirs(x, y):
        out = dot_general_qt.dot_general_qt(x, y, info.dimension_numbers, config)
        return out if info.output_perm is None else out.transpose(info.output_perm)

    compare(case, lambda x, y: ops.einsum(text, x, y), theirs, *draw(case, *shapes))


@pytest.mark.parametrize("cases", chunks(sample(dot_cases(DOTS), 100), 25))
def test_dot_general(cases):
    for case in cases:
        check_dot(case)


@pytest.mark.parametrize("cases", chunks(sample(dot_cases(EINSUMS), 40), 20))
def test_einsum(cases):
    for case in cases:
        check_einsum(case)


@pytest.mark.parametrize("method", ["uniform", "low_bit_uniform"])
@pytest.mark.parametrize("g", [INT8, "int4"])
@pytest.mark.parametrize("geometry", DOTS[:5:2], ids=str)
def test_stochastic_rounding(method, g, geometry):
    """The same key, the same noise, the same bits."""
    case = Train(geometry, (INT8, INT8, g), METHODS[0])
    lhs, rhs, numbers = geometry
    key = jax.random.key(5)
    ops = mt.learn(recipe_of(case, rounding=method), key=key)
    config = config_of(case, noise.get_noise_fn(method, key))
    compare(
        case,
        lambda x, y: ops.dot_general(x, y, numbers),
        lambda x, y: dot_general_qt.dot_general_qt(x, y, numbers, config),
        *draw(case, lhs, rhs),
        "bitwise",
    )


def test_int8_is_bitwise():
    """Integers sum exactly, whatever the order: no tolerance at all."""
    for geometry in DOTS:
        check_dot(Train(geometry, (INT8, INT8, INT8), METHODS[0]), "bitwise")


@pytest.mark.parametrize("fmt", ["int4", "float4_e2m1fn"])
def test_four_bits(fmt):
    """Qwix cannot multiply these on a CPU. The codes are the same (tests of quantize), so
    the step must be that of the codes in float64, g folded and quantized on the way."""
    lhs, rhs, numbers = DOTS[0]
    bound = mt.as_format(fmt).bound
    lhs, rhs = planted(1, lhs, bound), planted(2, rhs, bound)
    ops = mt.learn(mt.recipe({"int4": "qwix_int4"}.get(fmt, "qwix_fp4")))
    out, dlhs, drhs = step(lambda x, y: ops.dot_general(x, y, numbers), lhs, rhs, fmt)
    g = planted(3, out.shape, bound)
    q = lambda x, axis: mt.quantize(x, fmt, channelwise_axes=[axis])
    wide = lambda x: np.asarray(mt.dequantize(x), np.float64)
    codes = lambda x: np.asarray(x.qvalue).astype(np.float64)
    ql, qr = q(lhs, 0), q(rhs, 1)
    expected = {
        "out": (out, wide(ql) @ wide(qr)),
        "dlhs": (dlhs, wide(q(g * qr.scale, 0)) @ codes(qr).T),
        "drhs": (drhs, codes(ql).T @ wide(q(g * ql.scale, 1))),
    }
    for name, (ours, exact) in expected.items():
        assert_values(ours, exact.astype(np.float32), "f32_sum", name)


def test_bfloat16_tiles_on_cpu():
    """XLA:CPU has no thunk for a transposed bfloat16 x bfloat16 -> float32 dot."""
    geometry = (DOTS[1], (INT8, INT8, INT8), METHODS[0])
    check_dot(Train(*geometry, drhs_tile=0.25, dtype=BF16))


def test_window_of_g():
    """A window written down for g is a window of g. Qwix applies it to g times the
    per-tensor scale of the other operand, so it takes windows that small."""
    numbers = DOTS[0][2]
    case = Train(
        DOTS[0], (INT8, INT8, INT8), ("absmax", "absmax", "fixed,8"), None, True
    )
    rng = np.random.default_rng(12)
    lhs, rhs = data(rng, DOTS[0][0], F32), data(rng, DOTS[0][1], F32)
    ops, config = mt.learn(recipe_of(case)), config_of(case)
    ours = step(lambda x, y: ops.dot_general(x, y, numbers), lhs, rhs)
    with peer.manners():
        theirs = step(
            lambda x, y: dot_general_qt.dot_general_qt(x, y, numbers, config), lhs, rhs
        )
    exact = step(lambda x, y: jax.lax.dot_general(x, y, numbers), lhs, rhs)
    far = lambda x, y: float(jnp.linalg.norm(x - y) / jnp.linalg.norm(y))
    for a, b, c in zip(ours[1:], theirs[1:], exact[1:]):
        assert far(a, c) < 0.05 < far(b, c), (far(a, c), far(b, c))


NWC, NHWC = ("NWC", "WIO", "NWC"), ("NHWC", "HWIO", "NHWC")
CONVS = [
    #  lhs           rhs            strides padding           lhs dil. rhs dil. layout
    ((2, 16, 8),    (3, 8, 6),     (1,),   "SAME",            None,   None,   NWC),
    ((2, 16, 8),    (3, 8, 6),     (2,),   "VALID",           None,   (2,),   NWC),
    ((2, 8, 16),    (6, 8, 3),     (2,),   [(1, 2)],          None,   None,   None),
    ((2, 9, 8, 4),  (3, 2, 4, 6),  (2, 1), [(1, 0), (2, 1)],  None,   None,   NHWC),
    ((2, 5, 6, 4),  (3, 3, 4, 6),  (1, 1), [(2, 2), (2, 2)],  (2, 2), None,   NHWC),
]  # fmt: skip


@pytest.mark.parametrize("per_tensor", [False, True])
@pytest.mark.parametrize(
    "formats", [(INT8,) * 3, (E4M3,) * 3, (INT8, INT8, None)], ids=str
)
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_conv(formats, per_tensor, dtype):
    """Qwix keeps the codes for the backward even when that is not quantized."""
    lhs_type, rhs_type, g_type = map(qwix_type, formats)
    config = conv_general_qt.ConvGeneralQtConfig(
        lhs_qtype=lhs_type,
        rhs_qtype=rhs_type,
        dlhs_grad_qtype=g_type,
        drhs_grad_qtype=g_type,
        lhs_disable_channelwise_axes=per_tensor,
        rhs_disable_channelwise_axes=per_tensor,
        dlhs_grad_disable_channelwise_axes=per_tensor,
        drhs_grad_disable_channelwise_axes=per_tensor,
    )
    for geometry in CONVS if dtype == F32 else CONVS[:2]:
        check_conv(
            Train(geometry, formats, METHODS[0], None, per_tensor, dtype=dtype), config
        )


def check_conv(case, config):
    recipe = recipe_of(case)
    if case.formats[2] is None:
        recipe = mt.Recipe(recipe.fwd, mt.Dlhs(None, mt.REUSE), mt.Drhs(mt.REUSE, None))
    ops = mt.learn(recipe)
    lhs, rhs, *rest = case.geometry
    compare(
        case,
        lambda x, y: ops.conv_general_dilated(x, y, *rest),
        lambda x, y: conv_general_qt.conv_general_qt(x, y, config, *rest),
        *draw(case, lhs, rhs),
    )


@pytest.mark.parametrize(
    "formats", [(INT8,) * 3, (E4M3,) * 3, (E4M3, E4M3, E5M2)], ids=str
)
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("sizes", [(4, 0, 8), (12, 0, 0), (5, 4, 1)], ids=str)
def test_ragged_dot(formats, dtype, sizes):
    lhs_type, rhs_type, g_type = map(qwix_type, formats)
    config = ragged_dot_qt.RaggedDotQtConfig(
        lhs_qtype=lhs_type,
        rhs_qtype=rhs_type,
        dlhs_grad_qtype=g_type,
        drhs_grad_qtype=g_type,
    )
    case = Train(sizes, formats, METHODS[0], dtype=dtype)
    sizes = jnp.array(sizes, jnp.int32)
    ops = mt.learn(recipe_of(case))
    compare(
        case,
        lambda x, y: ops.ragged_dot(x, y, sizes),
        lambda x, y: ragged_dot_qt.ragged_dot_qt(x, y, sizes, config),
        *draw(case, (12, 32), (3, 32, 8)),
    )


@pytest.mark.parametrize("fmt", [INT8, E4M3])
def test_tiled_backward(fmt):
    """Tiled forwards: Qwix goes back to float unless told otherwise. `qt` quantizes the
    backward too, and equals Qwix told otherwise."""
    from midtread.ops.recipe import qt

    lhs, rhs, numbers = (128, 256), (256, 128), (((1,), (0,)), NO_BATCH)
    told = dot_general_qt.DotGeneralQtConfig(
        lhs_qtype=qwix_type(fmt),
        rhs_qtype=qwix_type(fmt),
        tile_size=128,
        dlhs_grad_qtype=qwix_type(fmt),
        drhs_grad_qtype=qwix_type(fmt),
        dlhs_tile_size=128,
        drhs_tile_size=128,
        dlhs_residual_qtype=qwix_type(fmt),
        drhs_residual_qtype=qwix_type(fmt),
    )
    case = Train((lhs, rhs, numbers), (fmt,) * 3, METHODS[0])
    lhs, rhs = draw(case, lhs, rhs)
    ops = mt.learn(qt(fmt, fmt, fmt, tile=128))
    compare(
        case,
        lambda x, y: ops.dot_general(x, y, numbers),
        lambda x, y: dot_general_qt.dot_general_qt(x, y, numbers, told),
        lhs,
        rhs,
    )
