"""Operands: what a contraction multiplies, as `explain` tells it.

operand(...)      format and tile of one side, from its QArray or from a Spec
slot(...)         the same for what the backward meets of it
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

# Where XLA does not multiply float8 as it is, and the dtype that it takes instead; None:
# that of the sum. Of CPUs read in optimised HLO (jax 0.10.2 and 0.12); NVIDIA's GPUs have
# float8 from Ada on, and before it XLA widens to float16, by its sources.
FLOAT8_AS = {"cpu": None, "gpu before Ada": jnp.float16}


@dataclasses.dataclass(frozen=True)
class Operand:
    text: str
    quantized: bool
    nbytes: int = 0
    dtype: str = ""  # that its codes are multiplied in where nothing is emulated


def operand(
    x: Any, spec: Any, c: Contraction, side: str, tiled: bool = False
) -> Operand:
    """What an operand is multiplied as; `tiled` if codes are known to come in tiles."""
    size = math.prod(x.shape)
    if isinstance(x, QArray):
        fmt = x.format
        tiled = tiled or bool(fmt.tile or views.tiled_axes(x))
        tile = _tile(x.qvalue.shape, x.scale.shape) if tiled else ()
    elif spec is not None and is_float(x):
        fmt, tile = spec.format, _placed_tile(spec, x.shape, c, side)
    else:
        return Operand(dtype_text(x.dtype), False, size * dtype_bits(x.dtype) // 8)
    text = format_text(fmt, tile)
    return Operand(text, True, _packed(size, fmt), dtype_text(fmt.dtype))


def _placed_tile(spec: Any, shape: tuple, c: Contraction, side: str) -> tuple:
    """The tile of a Spec on the axes of a contraction, () without one."""
    if not spec.tiles:
        return ()
    try:
        return _tile(*c.number_axes(spec, side).layout(shape))
    except ValueError:  # a backward that has no such axis: training will say so
        return tuple(spec.tiles.values())


def _tile(held: tuple[int, ...], scale: tuple[int, ...]) -> tuple[int, ...]:
    """How many elements share a scale along each axis."""
    return tuple(n // max(s, 1) for n, s in zip(held, scale))


def _packed(size: int, fmt: Format) -> int:
    return math.ceil(size * fmt.bits / 8)


def is_emulated(pair: tuple[Operand, Operand], runs: str) -> bool:
    """Codes on both sides, but other dtypes are multiplied."""
    if not all(o.quantized for o in pair) or runs.startswith("kernel"):
        return False
    return sorted(o.dtype for o in pair) != sorted(runs.split(" x "))


def multiplied(f: jaxprs.Found) -> str:
    """The dtypes that this platform multiplies for an equation."""
    where, dtypes = _kind(_device()), f.dtypes
    is_float8 = all(np.dtype(d).name.startswith("float8") for d in dtypes)
    if is_float8 and where in FLOAT8_AS:
        dtypes = (FLOAT8_AS[where] or f.out.dtype,) * 2
    return " x ".join(map(dtype_text, dtypes))


def _device() -> Any:
    """What a program that is traced here will run on."""
    device = jax.config.jax_default_device
    named = device is None or isinstance(device, str)
    return jax.devices(device)[0] if named else device


def _kind(device: Any) -> str:
    """'cpu', 'gpu before Ada', 'gpu' or 'tpu'."""
    capability = str(getattr(device, "compute_capability", ""))
    number = re.fullmatch(r"(\d+)\.(\d+)", capability)  # of NVIDIA's: 8.9 is Ada
    is_old = number is not None and (int(number[1]), int(number[2])) < (8, 9)
    return "gpu before Ada" if is_old else device.platform


def slot(x: Any, spec: Any, c: Contraction, side: str, forward: Operand) -> Operand:
    """What the backward meets of an operand of the forward."""
    if spec is REUSE or isinstance(x, QArray):
        return forward
    return operand(x, spec, c, side)


def texts(pair: Any) -> tuple[str, str] | None:
    return None if pair is None else (pair[0].text, pair[1].text)


def any_quantized(pair: Any) -> bool:
    return pair is not None and any(o.quantized for o in pair)
