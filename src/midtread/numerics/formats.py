"""Formats: every low-bit number system we know, one row each.

A format maps a real number, already divided by its scale, to a code and back. There are three ways to do that, and a
row says which by the column it fills:

    codes    integers          code = round(x), kept within [low, high]; the code is the value
    grid     small floats      code = x rounded to `mantissa` bits, subnormal below 2^min_exponent, saturating
    table    lookups           code = index of the nearest entry; the value is table[code]

`bound` turns a range into a scale: scale = absmax / bound. Integers use half a bucket more than their largest code
(127.5 for int8), so that the outermost bucket is as wide as the others; floats use their largest value.

`bits` is the information in one element and `dtype` the container that holds it. A format without a container of its
own lives in the next one (int3 in int4, float6 in uint8 codes): `is_emulated` says so. How many bits the container
takes is the backend's business: `stored_bits` measures it.
"""

import dataclasses
import difflib
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# The 16 levels of NormalFloat4: Dettmers et al. 2023 (QLoRA), appendix E.
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
    -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Grid:
    """The non-negative values k * 2^(e - mantissa), e >= min_exponent, up to `largest`."""

    mantissa: int
    min_exponent: int
    largest: float

    def exponent(self, x: jax.Array) -> jax.Array:
        """Returns the exponent of x's binade (float32); subnormals and 0 are in the lowest."""
        _, exponent = jnp.frexp(x)  # |x| in [2^(e-1), 2^e), but e = 0 for 0
        lowest = jnp.abs(x) < 2.0**self.min_exponent
        return jnp.where(lowest, self.min_exponent, exponent - 1)

    def step(self, x: jax.Array) -> jax.Array:
        """Returns the distance between neighbours of the grid around `x` (float32)."""
        return jnp.ldexp(jnp.ones_like(x), self.exponent(x) - self.mantissa)


@dataclasses.dataclass(frozen=True)
class Format:
    """One number system: one row of `FORMATS`.

    >>> as_format("int4").bound, as_format("mxfp8").tile
    (7.5, 32)

    Args:
        name: what it is called.
        dtype: the dtype that codes are stored in.
        bits: how many of them mean something.
        bound: the magnitude that the scale maps the largest value to.
        codes: the least and the largest code of an integer format, else None.
        grid: mantissa bits, least exponent and largest value of a float format, else None.
        table: the value of each code of a format that is looked up, else None.
        tile: the only tile the format allows; None for any.
        scale: how scales are rounded, a name in `numerics/scales.py`; None for not at all.
        statistic: what the calibration 'absmax' measures.
    """

    name: str
    dtype: np.dtype
    bits: int
    bound: float
    codes: tuple[int, int] | None = None
    grid: Grid | None = None
    table: tuple[float, ...] | None = None
    tile: int | None = None  # the only tile the format allows
    scale: str | None = None  # how scales are rounded: see numerics/scales.py
    statistic: str = "absmax"  # what the 'absmax' calibration measures

    @functools.cached_property
    def qtype(self) -> Any:
        """What a QArray calls this format: the dtype itself where there is one, else the name.

        np.dtype equals its own name and the jnp scalar type, so `q.qtype == "int8"` and `q.qtype == jnp.int8` both hold.
        """
        return self.dtype if self.dtype.name == self.name else self.name

    @property
    def is_emulated(self) -> bool:
        """Whether the container is wider than the format."""
        return dtype_bits(self.dtype) > self.bits

    @property
    def is_linear(self) -> bool:
        """Whether codes are the values, so that matmuls may run on them and scale afterwards."""
        return self.table is None

    @property
    def has_nan(self) -> bool:
        """Whether it has a NaN: small floats of 8 bits do, those of 4 and 6 do not."""
        return self.grid is not None and self.bits == 8

    @property
    def is_integer(self) -> bool:
        return self.codes is not None

    def __repr__(self) -> str:
        return f"Format({self.name})"


def _integer(name, container, low, high, bound=None):
    bits = int(name.lstrip("uint"))
    return Format(
        name, np.dtype(container), bits, bound or high + 0.5, codes=(low, high)
    )


def _float(name, mantissa, min_exponent, largest, bits=8, dtype=None, **columns):
    dtype = np.dtype(dtype or getattr(jnp, name))
    return Format(
        name,
        dtype,
        bits,
        largest,
        grid=Grid(mantissa, min_exponent, largest),
        **columns,
    )


def _grid_values(grid: Grid, bits: int) -> tuple[float, ...]:
    """Returns the value of each code of a sign-magnitude float without a dtype (float6)."""
    per_binade = 2**grid.mantissa
    positive = []
    for code in range(2 ** (bits - 1)):
        exponent = max(code // per_binade - 1, 0)
        mantissa = code - exponent * per_binade
        positive.append(
            mantissa * 2.0 ** (exponent + grid.min_exponent - grid.mantissa)
        )
    return tuple(positive) + tuple(-v for v in positive)


def _float6(name, mantissa, min_exponent, largest, **columns):
    # Codes are in uint8, because jax 0.10.2 aborts when it traces a float6 dtype.
    table = _grid_values(Grid(mantissa, min_exponent, largest), 6)
    return _float(
        name, mantissa, min_exponent, largest, 6, np.uint8, table=table, **columns
    )


_E4M3, _E2M1 = jnp.float8_e4m3fn, jnp.float4_e2m1fn

ROWS = [
    #        name      container    low     high
    _integer("int2",   jnp.int2,      -2,     1),
    _integer("int3",   jnp.int4,      -4,     3),
    _integer("int4",   jnp.int4,      -8,     7),
    _integer("int5",   jnp.int8,     -16,    15),
    _integer("int6",   jnp.int8,     -32,    31),
    _integer("int7",   jnp.int8,     -64,    63),
    _integer("int8",   jnp.int8,    -128,   127),
    _integer("int16",  jnp.int16, -32768, 32767, bound=32768.0),
    _integer("uint2",  jnp.uint2,      0,     3),
    _integer("uint4",  jnp.uint4,      0,    15),
    _integer("uint8",  jnp.uint8,      0,   255),
    #      name                 mantissa  2^min  largest
    _float("float8_e4m3fn",            3,    -6,   448.0),
    _float("float8_e4m3",              3,    -6,   240.0),
    _float("float8_e4m3b11fnuz",       3,   -10,    30.0),
    _float("float8_e4m3fnuz",          3,    -7,   240.0),
    _float("float8_e3m4",              4,    -2,    15.5),
    _float("float8_e5m2",              2,   -14, 57344.0),
    _float("float8_e5m2fnuz",          2,   -15, 57344.0),
    _float("float4_e2m1fn",            1,     0,     6.0, bits=4),
    _float6("float6_e2m3fn",           3,     0,     7.5),
    _float6("float6_e3m2fn",           2,    -2,    28.0),
    # These share power-of-two scales (OCP microscaling) or have NVIDIA's two-level scales.
    _float("mxfp8",                    3,    -6,   448.0, dtype=_E4M3, tile=32, scale="pow2_ceil"),
    _float("mxfp8_e5m2",               2,   -14, 57344.0, dtype=jnp.float8_e5m2, tile=32, scale="pow2_ceil"),
    _float("mxfp8_16",                 3,    -6,   448.0, dtype=_E4M3, tile=16, scale="pow2_ceil"),
    _float6("mxfp6",                   3,     0,     7.5, tile=32, scale="pow2_ceil"),
    _float6("mxfp6_e3m2",              2,    -2,    28.0, tile=32, scale="pow2_ceil"),
    _float("mxfp4",                    1,     0,     6.0, bits=4, dtype=_E2M1, tile=32, scale="pow2_ceil"),
    _float("nvfp4",                    1,     0,     6.0, bits=4, dtype=_E2M1, tile=16, scale="two_level"),
    # These are lookups. One bit is a sign, whose best scale is the mean magnitude, not the largest.
    Format("nf4",  np.dtype(jnp.uint4), 4, 1.0, table=NF4),
    Format("int1", np.dtype(jnp.uint2), 1, 1.0, table=(-1.0, 1.0), statistic="absmean"),
]  # fmt: skip

FORMATS = {row.name: row for row in ROWS}

ALIASES = {
    "fp8": "float8_e4m3fn", "e4m3": "float8_e4m3fn", "e4m3fn": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn",
    "e5m2": "float8_e5m2", "fp8_e5m2": "float8_e5m2", "e4m3fnuz": "float8_e4m3fnuz", "e5m2fnuz": "float8_e5m2fnuz",
    "e4m3b11fnuz": "float8_e4m3b11fnuz", "e3m4": "float8_e3m4", "fp4": "float4_e2m1fn", "e2m1": "float4_e2m1fn",
    "e2m1fn": "float4_e2m1fn", "fp6": "float6_e2m3fn", "e2m3": "float6_e2m3fn", "e3m2": "float6_e3m2fn",
    "mxfp6_e2m3": "mxfp6", "mxfp8_e4m3": "mxfp8",
}  # fmt: skip


def as_format(qtype: Any) -> Format:
    """Finds the row of `FORMATS` for a name, an alias, a dtype, a jnp scalar type, or a Format.

    >>> as_format("fp8") == as_format(jnp.float8_e4m3fn)
    True

    Args:
        qtype: such as "int4", jnp.int8, "fp8", "e5m2" or "nvfp4".

    Returns:
        A Format.

    Raises:
        ValueError: No format is called so; the message lists those there are.
    """
    if isinstance(qtype, Format):
        return qtype
    name = qtype.lower() if isinstance(qtype, str) else _dtype_name(qtype)
    row = FORMATS.get(ALIASES.get(name, name))
    if row is None:
        near = difflib.get_close_matches(name, [*FORMATS, *ALIASES], 1, 0.5)
        hint = f"Did you mean {near[0]!r}? " if near else ""
        raise ValueError(
            f"{qtype!r} is not a format to quantize to. {hint}There are: "
            f"{', '.join(FORMATS)}; and as short names {', '.join(ALIASES)}."
        )
    return row


def _dtype_name(qtype: Any) -> str:
    try:
        return _name_of(qtype)
    except TypeError:  # not a dtype, or nothing that can be hashed
        return repr(qtype)


@functools.cache
def _name_of(dtype: Any) -> str:
    """Returns a dtype's name, which NumPy computes anew whenever it is asked."""
    return np.dtype(dtype).name


@functools.cache
def dtype_bits(dtype: Any) -> int:
    """Returns the bits of one element by the dtype's definition."""
    dtype = np.dtype(dtype)
    if jnp.issubdtype(dtype, jnp.floating):
        return int(jnp.finfo(dtype).bits)
    return int(jnp.iinfo(dtype).bits)


@functools.cache
def stored_bits(dtype: Any) -> int:
    """Returns the bits that one element really takes in the default device's memory.

    An int4 takes four on a GPU; on a CPU it took a whole byte until jax 0.12.
    """
    if dtype_bits(dtype) >= 8:
        return dtype_bits(dtype)
    probe = jnp.zeros(64, dtype)
    return probe.on_device_size_in_bytes() * 8 // 64
