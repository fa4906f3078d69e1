"""LiteRT's ops: which can be integer, and what that takes.

In a LiteRT file scales belong to tensors, the edges of the model, not to ops. What an op
needs is a kind, and every op we know is one row of a table here:

    both      each input and the output have a range of their own        add, mean, gelu
    input     the output has the input's range                           max_pool, take
    output    only the result counts, the input may be wider             relu, clip, pad
    carry     values do not change: what was said of the input still holds    reshape
    float     there is no integer kernel; inputs arrive quantized, the result is float

A kind is the name of a method of the provider (providers/litert.py); ops that fit none
have a method of their own. An op in no table is an error, or float, by `strict`.

What is known of an array while the model runs is its `Edge`. An output is not quantized
when it is made but by its consumer (`Edge.rule`): matmul, bias and relu, which one kernel
computes, must not be torn apart.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax import nnx

from midtread.numerics.calibration import Range
from midtread.numerics.scales import compute_scales
from midtread.numerics.spec import Spec


@dataclasses.dataclass(frozen=True)
class Row:
    """How LiteRT computes one op.

    `name` is what rules call it and its statistics are stored under; `inputs` are the
    positions of its operands. `fixed` is a known range of the result: LiteRT's kernels
    insist on it. Without an int16 kernel an op is refused in an int16 model: the
    converter makes no file of it, or a wrong one.
    """

    name: str
    kind: str
    inputs: tuple[int, ...] = (0,)
    fixed: str | None = None
    has_int16: bool = True


#   JAX's function      name for rules     kind      inputs
FUNCTIONS = {
    "avg_pool":    Row("avg_pool",         "average"),
    "clip":        Row("clip",             "output"),
    "concatenate": Row("concatenate",      "concatenate", has_int16=False),
    "elu":         Row("elu",              "float"),
    "gelu":        Row("gelu",             "gelu", has_int16=False),
    "getitem":     Row("rewriting_take",   "take"),
    "hard_swish":  Row("hard_swish",       "both", has_int16=False),
    "leaky_relu":  Row("leaky_relu",       "both"),
    "log_softmax": Row("log_softmax",      "float"),
    "max_pool":    Row("max_pool",         "input"),
    "mean":        Row("mean",             "both"),
    "pad":         Row("pad",              "output"),
    "repeat":      Row("repeat",           "both"),
    "resize":      Row("resize",           "resize"),
    "silu":        Row("silu",             "silu"),
    "softmax":     Row("softmax",          "softmax", fixed="unit"),
    "sum":         Row("sum",              "both"),
    "take":        Row("take",             "take"),
    "true_divide": Row("truediv",          "divide", (0, 1)),
}  # fmt: skip

UFUNCS = {
    "add":      Row("add",      "add", (0, 1)),
    "subtract": Row("subtract", "both", (0, 1), has_int16=False),
    "multiply": Row("multiply", "both", (0, 1)),
    "negative": Row("negative", "negative"),
    "maximum":  Row("maximum",  "extreme", (0, 1)),
    "minimum":  Row("minimum",  "extreme", (0, 1)),
}  # fmt: skip

CUSTOM_JVP = {jax.nn.relu: Row("relu", "output"), jax.nn.relu6: Row("relu6", "output")}

MODULES: dict[type, Row] = {
    **dict.fromkeys((nn.BatchNorm, nnx.BatchNorm), Row("batch_norm_op", "batch_norm")),
    **dict.fromkeys(
        (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nnx.LayerNorm, nnx.RMSNorm, nnx.GroupNorm),
        Row("norm_op", "norm", has_int16=False),
    ),
    **dict.fromkeys((nn.Dropout, nnx.Dropout), Row("dropout", "dropout")),
}  # fmt: skip

_CARRIED = (
    "reshape", "transpose", "broadcast_in_dim", "slice", "squeeze", "expand_dims",
    "rev", "dynamic_slice", "stop_gradient", "convert_element_type", "copy",
    "copy_p", "gather", "split", "concatenate", "sharding_constraint",
    "optimization_barrier", "stack", "unstack",
)  # fmt: skip
_FLOAT = (
    "sin", "cos", "tan", "asin", "acos", "atan", "atan2", "sinh", "cosh", "erf",
    "erfc", "erf_inv", "floor", "ceil", "round", "sign", "log1p", "expm1", "pow",
    "integer_pow", "cbrt", "rem", "cumsum", "cumprod", "cummax", "cummin", "sort",
    "is_finite", "eq", "ne", "lt", "le", "gt", "ge", "argmax", "argmin",
    "nextafter",
)  # fmt: skip
PRIMITIVES = {
    "abs":         Row("abs",        "both"),
    "add":         UFUNCS["add"],
    "clamp":       Row("clip",       "output", (1,)),
    "div":         Row("div",        "divide", (0, 1)),
    "exp":         Row("exp",        "both"),
    "log":         Row("log",        "both"),
    "logistic":    Row("sigmoid",    "both", fixed="unit"),
    "max":         UFUNCS["maximum"],
    "min":         UFUNCS["minimum"],
    "mul":         UFUNCS["multiply"],
    "neg":         UFUNCS["negative"],
    "pad":         FUNCTIONS["pad"],
    "reduce_max":  Row("reduce_max", "again"),
    "reduce_min":  Row("reduce_min", "again"),
    "reduce_sum":  FUNCTIONS["sum"],
    "rsqrt":       Row("rsqrt",      "both"),
    "select_n":    Row("where",      "select"),
    "sqrt":        Row("sqrt",       "both"),
    "square":      Row("square",     "both"),
    "sub":         UFUNCS["subtract"],
    "tanh":        Row("tanh",       "both", fixed="signed"),
    **{name: Row(name, "carry") for name in _CARRIED},
    **{name: Row(name, "float") for name in _FLOAT},
}  # fmt: skip
# Qwix sees jnp's functions, which we know by what they bind. It has no statistics for other
# primitives: ours are counted from LATE on, so that all other names are those of Qwix.
SEEN_BY_QWIX = ("tanh",)
# A bias that is added after these still becomes the bias of the matmul before them.
KEEP_FUSION = ("convert_element_type", "copy", "copy_p")

# Ranges that LiteRT's kernels insist on, so that scale and zero point come out as wanted.
FIXED = {
    ("unit", "int8"): (0.0, 255 / 256),  # 1/256, -128
    ("unit", "int16"): (-1.0, 1.0),  # 1/32768, 0
    ("signed", "int8"): (-1.0, 127 / 128),  # 1/128, 0
    ("signed", "int16"): (-1.0, 1.0),
}

# format -> what the converter calls it
WEIGHTS = {"int8": "i8", "int4": "i4", "int2": "i2"}
ACTIVATIONS = {"int8": "i8", "int16": "i16"}


@dataclasses.dataclass(frozen=True)
class Edge:
    """What is known of an array while the model runs."""

    is_activation: bool = False  # comes from the model's inputs
    weight: str | None = None  # the parameter it is, by path
    rule: Any = None  # how its producer wants it quantized
    fixed: Any = None  # its range, if that is known: a name in FIXED, or (low, high)
    fuses: int = 0  # how many of its last axes a bias may have, if a matmul made it
    unit: Any = None  # the scale of the matmul's sums, of which a bias is a multiple
    sums: Any = None  # the scales of the two activations that it is a product of
    on_grid: Callable | None = None  # the function that has quantized it already
    twin: Any = None  # (rule, the array quantized under it)
    value: Callable | None = None  # returns a constant's value, while converting
    scaled: Callable | None = None  # gain -> the array with each channel times gain


class Edges:
    """The edges of one call of the model. Arrays are known by identity, and kept alive."""

    def __init__(self):
        self._known: dict[int, tuple[Any, Edge]] = {}

    def __getitem__(self, x: Any) -> Edge:
        return self._known.get(id(x), (None, Edge()))[1]

    def __setitem__(self, x: Any, edge: Edge) -> None:
        self._known[id(x)] = (x, edge)


@dataclasses.dataclass(frozen=True)
class Grid:
    """The scale, the zero point and the code bounds of a LiteRT tensor."""

    format: Any
    scale: jax.Array
    zero_point: jax.Array | None
    is_narrow: bool  # weights: -127..127, so that products fit 15 bits

    def __call__(self, x: jax.Array, ties_away: bool = False, sums=None) -> jax.Array:
        """Rounds `x` to the grid; ties go to the even code, or away from code 0.

        With `sums` (the scales of two activations that were multiplied) it rounds as
        BATCH_MATMUL does: integer sums times a ratio of scales, in fixed point, twice.
        """
        low, high = self.format.codes
        scale = self.scale.astype(jnp.float32)
        offset = 0 if self.zero_point is None else self.zero_point.astype(jnp.float32)
        units = x.astype(jnp.float32) * (1 / scale) + offset
        if sums is not None:
            steps = self._steps(sums)
            once = jnp.round((units - offset) * steps)
            codes = _half_away(once / steps) + offset
        elif ties_away:  # what is meant to be a tie may have been rounded below one
            codes = _half_away(units, 1e-4)
        else:
            codes = jnp.round(units)
        codes = jnp.clip(codes, low + self.is_narrow, high)
        return ((codes - offset) * scale).astype(x.dtype)

    def _steps(self, sums) -> Any:
        """Returns how many steps of the fixed point make a code: 2^bits."""
        if any(isinstance(v, jax.core.Tracer) for v in (*sums, self.scale)):
            _, exponent = jnp.frexp(sums[0] * sums[1] / self.scale)
            return jnp.ldexp(jnp.float32(1), jnp.maximum(-exponent, 0))
        # The converter has no ops for the bits of floats, so this is a number for it.
        _, exponent = np.frexp(float(sums[0]) * float(sums[1]) / float(self.scale))
        return np.float32(2.0 ** max(-int(exponent), 0))


def _half_away(x: jax.Array, slack: float = 0.0) -> jax.Array:
    return jnp.sign(x) * jnp.floor(jnp.abs(x) + (0.5 + slack))


def grid_of(range_: Range, spec: Spec, is_narrow: bool = False) -> Grid:
    """Returns the grid that covers a range."""
    scales = compute_scales(range_, spec.format)
    return Grid(spec.format, scales.scale, scales.zero_point, is_narrow)


def scale_of(edge: Edge) -> jax.Array | None:
    """Returns the scale of an array that is on a grid, None for others."""
    if edge.on_grid is None:
        return None
    return next(part for part in edge.on_grid.args if isinstance(part, Grid)).scale


def to_multiples(x: jax.Array, unit: jax.Array | None) -> jax.Array:
    """Rounds `x` to multiples of `unit`, straight-through."""
    if unit is None:
        return x
    rounded = jnp.round(x * (1 / unit)) * unit
    return x + jax.lax.stop_gradient(rounded - x)


def clipped(x: jax.Array, range_: Range) -> jax.Array:
    """Clips `x` to the range; its gradient is that of the quantized array."""
    low = -range_["absmax"] if "absmax" in range_ else range_["min"]
    high = range_["absmax"] if "absmax" in range_ else range_["max"]
    return jnp.clip(x, low.astype(x.dtype), high.astype(x.dtype))
