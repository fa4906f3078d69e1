"""What several test files share: an oracle for every format, and meshes.

The oracle is written from the definitions (OCP 8-bit and MX specifications, the fnuz and
b11 variants as ml_dtypes documents them, QLoRA's table), in exact rationals, and knows
nothing of the implementation.
"""

import functools
import itertools
from fractions import Fraction
from typing import NamedTuple

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh

from midtread.numerics.formats import FORMATS, NF4, Format
from midtread.numerics.qarray import quantize

# name: (exponent bits, mantissa bits, bias, what the top codes mean)
#   ieee    the largest exponent holds inf and NaN
#   fn      only the all-ones code is NaN
#   fnuz    the code of -0 is NaN
#   finite  every code is a number
FLOATS = {
    "float8_e4m3fn": (4, 3, 7, "fn"),
    "float8_e4m3": (4, 3, 7, "ieee"),
    "float8_e4m3b11fnuz": (4, 3, 11, "fnuz"),
    "float8_e4m3fnuz": (4, 3, 8, "fnuz"),
    "float8_e3m4": (3, 4, 3, "ieee"),
    "float8_e5m2": (5, 2, 15, "ieee"),
    "float8_e5m2fnuz": (5, 2, 16, "fnuz"),
    "float4_e2m1fn": (2, 1, 1, "finite"),
    "float6_e2m3fn": (2, 3, 1, "finite"),
    "float6_e3m2fn": (3, 2, 3, "finite"),
}
ELEMENT = {  # formats that share another's elements
    "mxfp8": "float8_e4m3fn",
    "mxfp8_16": "float8_e4m3fn",
    "mxfp8_e5m2": "float8_e5m2",
    "mxfp6": "float6_e2m3fn",
    "mxfp6_e3m2": "float6_e3m2fn",
    "mxfp4": "float4_e2m1fn",
    "nvfp4": "float4_e2m1fn",
}
UNSIGNED = {"uint2": range(4), "uint4": range(16), "uint8": range(256)}
TABLES = {"nf4": NF4, "int1": (-1.0, 1.0)}

every_format = pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)


def shared_variables(a: nnx.Module, b: nnx.Module) -> list[nnx.Variable]:
    """The Variables, random state included, that are objects of both models."""
    found = [dict(nnx.iter_graph(model)).values() for model in (a, b)]
    ids = {id(node) for node in found[0] if isinstance(node, nnx.Variable)}
    return [node for node in found[1] if id(node) in ids]


def float_value(code: int, name: str) -> Fraction | float:
    """The value of a code of a small float; nan and +-inf as Python floats."""
    exponent_bits, mantissa_bits, bias, kind = FLOATS[name]
    sign = -1 if code >> (exponent_bits + mantissa_bits) else 1
    exponent = code >> mantissa_bits & (2**exponent_bits - 1)
    mantissa = code & (2**mantissa_bits - 1)
    if kind == "ieee" and exponent == 2**exponent_bits - 1:
        return float("nan") if mantissa else sign * float("inf")
    magnitude = code & (2 ** (exponent_bits + mantissa_bits) - 1)
    if kind == "fn" and magnitude == 2 ** (exponent_bits + mantissa_bits) - 1:
        return float("nan")
    if kind == "fnuz" and sign < 0 and magnitude == 0:
        return float("nan")
    implicit = min(exponent, 1) * 2**mantissa_bits
    return (
        sign
        * (mantissa + implicit)
        * Fraction(2) ** (max(exponent, 1) - bias - mantissa_bits)
    )


@functools.cache
def code_values(fmt: Format) -> dict[int, Fraction | float]:
    """{code: value}. Integers are their own codes."""
    name = ELEMENT.get(fmt.name, fmt.name)
    if name in FLOATS:
        bits = 1 + sum(FLOATS[name][:2])
        return {code: float_value(code, name) for code in range(2**bits)}
    if name in TABLES:
        return {i: Fraction(float(np.float32(v))) for i, v in enumerate(TABLES[name])}
    half = 2 ** (int(name.strip("uint")) - 1)
    return {i: Fraction(i) for i in UNSIGNED.get(name, range(-half, half))}


class Levels(NamedTuple):
    """All values in order (float64, exact), the midpoints between them, and whether a
    tie goes to the upper one."""

    values: np.ndarray
    middles: np.ndarray
    tie_goes_up: np.ndarray


@functools.cache
def levels(fmt: Format) -> Levels:
    by_value = {}
    for code, value in code_values(fmt).items():
        if isinstance(value, Fraction):
            by_value.setdefault(value, code)
    values = sorted(by_value)
    middles = [(a + b) / 2 for a, b in itertools.pairwise(values)]
    # An even mantissa is an even code; tables send a tie to the lower code.
    up = [by_value[v] % 2 == 0 and fmt.name not in TABLES for v in values[1:]]
    exact = [float(v) for v in (*values, *middles)]
    assert all(Fraction(f) == v for f, v in zip(exact, (*values, *middles)))
    return Levels(
        np.array(exact[: len(values)]), np.array(exact[len(values) :]), np.array(up)
    )


def nearest(x: np.ndarray, fmt: Format) -> np.ndarray:
    """The format's value nearest to each finite or infinite x, exactly."""
    values, middles, tie_goes_up = levels(fmt)
    x = np.asarray(x, np.float64)
    below = np.searchsorted(middles, x, "left")  # middles strictly passed
    inside = np.minimum(below, len(middles) - 1)
    tie = (below < len(middles)) & (middles[inside] == x) & tie_goes_up[inside]
    return values[below + tie]


def f64(x: jax.Array) -> np.ndarray:
    """To numpy, exactly, from whichever narrow dtype."""
    return np.asarray(jax.device_get(x)).astype(np.float64)


def mesh(*shape: int) -> Mesh:
    """A (data, model) mesh over the first devices."""
    count = int(np.prod(shape))
    return Mesh(np.array(jax.devices()[:count]).reshape(shape), ("data", "model"))


def squared_error(x, y) -> float:
    return float(np.sum(np.square(f64(x) - f64(y))))


def quantize_in_jit(x, qtype, **how):
    """One program instead of twenty small ones: tests compile more than they compute."""
    return jax.jit(lambda x: quantize(x, qtype, **how))(x)
