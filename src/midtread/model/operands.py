"""Operands: what a contraction multiplies, as `explain` prints it.

operand(...)      format and tile of one side, from its QArray or from a Spec
slot(...)         the same for what the backward multiplies of it
multiplied(...)   the dtypes that this platform takes for an equation
"""

import dataclasses
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from midtread.model import jaxprs
from midtread.model.coverage import dtype_text, format_text
from midtread.numerics import views
from midtread.numerics.formats import Format, dtype_bits
from midtread.numerics.qarray import QArray, is_float
from midtread.ops.contraction import Contraction
from midtread.ops.recipe import REUSE

# The platforms where XLA does not multiply float8, and the dtype that it takes instead; None
# means that of the sum. For CPUs this was read in optimised HLO (jax 0.10.2 and 0.12).
# NVIDIA's GPUs have float8 from Ada on; before it XLA widens to float16, by its sources.
FLOAT8_AS = {"cpu": None, "gpu before Ada": jnp.float16}


@dataclasses.dataclass(frozen=True)
class Operand:
    """One operand of a contraction: what `explain` prints of it, and what it takes."""

    text: str
    quantized: bool
    nbytes: int = 0
    dtype: str = ""  # the dtype its codes are multiplied in where nothing is emulated


def operand(
    x: Any, spec: Any, c: Contraction, side: str, tiled: bool = False
) -> Operand:
    """Describes an operand as it is multiplied; `tiled` if its codes are known to have tiles."""
    size = math.prod(x.shape)
    if isinstance(x, QArray):
        fmt = x.format
        tiled = tiled or bool(fmt.tile or views.tiled_axes(x))
        tile = _tile(x.qvalue.shape, x.scale.shape) if tiled else ()
    elif spec is not None and is_float(x):
        fmt, tile = spec.format, _tile_of_spec(spec, x.shape, c, side)
    else:
        return Operand(dtype_text(x.dtype), False, size * dtype_bits(x.dtype) // 8)
    text = format_text(fmt, tile)
    return Operand(text, True, _packed(size, fmt), dtype_text(fmt.dtype))


def _tile_of_spec(spec: Any, shape: tuple, c: Contraction, side: str) -> tuple:
    """Returns the tile of a Spec on the axes of a contraction, () without one."""
    if not spec.tiles:
        return ()
    try:
        return _tile(*c.number_axes(spec, side, shape).layout(shape))
    except ValueError:  # the backward has no such axis, and training will say so
        return tuple(spec.tiles.values())


def _tile(shape: tuple[int, ...], scale: tuple[int, ...]) -> tuple[int, ...]:
    """Counts how many elements share a scale along each axis."""
    return tuple(n // max(s, 1) for n, s in zip(shape, scale))


def _packed(size: int, fmt: Format) -> int:
    return math.ceil(size * fmt.bits / 8)


def is_emulated(pair: tuple[Operand, Operand], runs: str) -> bool:
    """Whether both sides are codes, but other dtypes than theirs are multiplied."""
    if not all(o.quantized for o in pair) or runs.startswith("kernel"):
        return False
    return sorted(o.dtype for o in pair) != sorted(runs.split(" x "))


def multiplied(f: jaxprs.Equation) -> str:
    """Names the dtypes that this platform multiplies for an equation."""
    where, dtypes = _kind(_device()), f.dtypes
    is_float8 = all(np.dtype(d).name.startswith("float8") for d in dtypes)
    if is_float8 and where in FLOAT8_AS:
        dtypes = (FLOAT8_AS[where] or f.out.dtype,) * 2
    return " x ".join(map(dtype_text, dtypes))


def _device() -> Any:
    """Returns the device that a program traced here will run on."""
    device = jax.config.jax_default_device
    named = device is None or isinstance(device, str)
    return jax.devices(device)[0] if named else device


def _kind(device: Any) -> str:
    """Names the kind of a device: 'cpu', 'gpu before Ada', 'gpu' or 'tpu'."""
    capability = str(getattr(device, "compute_capability", ""))
    number = re.fullmatch(r"(\d+)\.(\d+)", capability)  # NVIDIA's Ada has 8.9
    is_old = number is not None and (int(number[1]), int(number[2])) < (8, 9)
    return "gpu before Ada" if is_old else device.platform


def slot(x: Any, spec: Any, c: Contraction, side: str, forward: Operand) -> Operand:
    """Describes what the backward multiplies of an operand of the forward."""
    if spec is REUSE or isinstance(x, QArray):
        return forward
    return operand(x, spec, c, side)


def texts(pair: Any) -> tuple[str, str] | None:
    return None if pair is None else (pair[0].text, pair[1].text)


def any_quantized(pair: Any) -> bool:
    return pair is not None and any(o.quantized for o in pair)
