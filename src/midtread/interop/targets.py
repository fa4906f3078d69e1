"""Targets: the formats that a model can be written in, and one matrix in each.

    target_of("w4a16")                 a row of the table, with other groups where asked for
    quantized(matrix, spec_of(target))     its codes
    scheme_and_tensors(q, target, ...)     what the target's layout has for them
    config_of(target, schemes, left)       what it says of all of them in config.json

A whole model is export.py's.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from midtread.interop import compressed_tensors, gptq, layouts, mlx
from midtread.numerics.formats import dtype_bits
from midtread.numerics.qarray import QArray, quantize_by_spec
from midtread.numerics.spec import Spec

ROWS_AT_ONCE = 1 << 22  # elements of a large matrix that are quantized together


class Target(NamedTuple):
    """One row of `TARGETS`.

    Args:
        name: to ask for it by.
        layout: whose files these are.
        qtype: the format of codes.
        tile: columns that share a scale, "row" for all of a row, or (rows, columns).
        calibration: how the range of a tile is found.
        activations: whoever runs the model quantizes activations, too.
        words: what it is, for people.
        is_free: nobody asked for groups of that size: codes keep their own.
    """

    name: str
    layout: str
    qtype: str
    tile: int | str | tuple[int, int]
    calibration: str = "absmax"
    activations: bool = False
    words: str = ""
    is_free: bool = True


COMPRESSED = _CT = "compressed-tensors"
HALF_SCALES = ("GPTQ", "AWQ")  # have scales in float16
ROWS = [
    #      name          layout   codes            tile        range     activations
    Target("w4a16",      _CT,     "int4",          128,        words="4-bit weights"),
    Target("w4a16_asym", _CT,     "int4",          128,        "minmax", words="with zero points"),
    Target("w8a16",      _CT,     "int8",          128,        words="8-bit weights"),
    Target("w8a8",       _CT,     "int8",          "row",      "absmax", True, "8-bit integers"),
    Target("fp8",        _CT,     "float8_e4m3fn", "row",      "absmax", True, "8-bit floats"),
    Target("fp8_block",  _CT,     "float8_e4m3fn", (128, 128), "absmax", True, "in blocks"),
    Target("nvfp4",      _CT,     "nvfp4",         16,         words="4-bit floats, NVIDIA's"),
    Target("mxfp4",      _CT,     "mxfp4",         32,         words="4-bit floats, OCP's"),
    Target("gptq",       "GPTQ",  "int4",          128,        words="GPTQ's layout"),
    Target("awq",        "AWQ",   "int4",          128,        "minmax", words="AWQ's layout"),
    Target("mlx4",       "MLX",   "int4",          64,         words="mlx-lm, 4 bits"),
    Target("mlx8",       "MLX",   "int8",          64,         words="mlx-lm, 8 bits"),
]  # fmt: skip
TARGETS = {row.name: row for row in ROWS}


def target_of(name: str, group_size: int | None = None) -> Target:
    """Returns a row of the table, with other groups where asked for.

    Raises:
        ValueError: there is no such target, or its groups are fixed.
    """
    if name not in TARGETS:
        raise ValueError(f"format {name!r} is not written; {', '.join(TARGETS)} are.")
    target = TARGETS[name]
    if group_size is None:
        return target
    if target.qtype in ("nvfp4", "mxfp4") or not isinstance(target.tile, int):
        raise ValueError(
            f"group_size={group_size}: format {name} has {tile_words(target)}. Drop it."
        )
    if group_size < 1:
        raise ValueError(f"group_size={group_size} should be above 0.")
    if target.layout == "MLX" and group_size not in mlx.SIZES:
        sizes = ", ".join(map(str, mlx.SIZES))
        raise ValueError(f"group_size={group_size}: MLX has groups of {sizes}.")
    return target._replace(tile=group_size, is_free=False)


def tile_words(target: Target) -> str:
    if target.tile == "row":
        return "a scale for every row"
    if isinstance(target.tile, tuple):
        return f"blocks of {target.tile[0]} x {target.tile[1]}"
    return f"groups of {target.tile}"


def spec_of(target: Target) -> Spec:
    """How a matrix [rows, columns] is quantized for a target."""
    rows, columns = target.tile if isinstance(target.tile, tuple) else (1, target.tile)
    tiles: dict[int, int] = {}
    if columns != "row":
        tiles[1] = int(columns)
    if rows != 1:
        tiles[0] = rows
    return Spec(
        target.qtype,
        channelwise_axes=() if 0 in tiles else (0,),
        tiled_axes=tiles,
        calibration=target.calibration,
    )


@jax.jit(static_argnums=1)
def _quantize(x: jax.Array, spec: Spec) -> QArray:
    """Codes of four bits come as bytes: XLA would pack them, and numpy unpack them, which
    takes four times as long as all the rest (w4a16 on a CPU)."""
    q = quantize_by_spec(x, spec)
    return q.map(lambda part: part if _is_wide(part) else _nibbles(part))


def _is_wide(part: jax.Array) -> bool:
    return dtype_bits(part.dtype) != 4


def _nibbles(part: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(part, jnp.uint4).astype(jnp.uint8)


def quantized(x: np.ndarray, spec: Spec) -> QArray:
    """Returns a matrix rounded to nearest, in numpy arrays: some rows at a time if it is
    large."""
    step = max(ROWS_AT_ONCE // x.shape[1] // 128, 1) * 128
    if spec.format.scale == "two_level":
        # There is a scale of the whole matrix, and bfloat16 does not hold its multiples.
        step, x = len(x), x.astype(np.float32)
    pieces = [_quantize(x[i : i + step], spec) for i in range(0, len(x), step)]
    join = lambda *parts: np.concatenate([np.asarray(part) for part in parts])
    q = jax.tree.map(join, *pieces)
    if not np.isfinite(q.scale).all():
        raise ValueError("holds numbers that are NaN or infinite.")
    codes = spec.format.dtype
    in_nibbles = lambda part: part.view(codes) if part.dtype == np.uint8 else part
    return q.map(in_nibbles) if dtype_bits(codes) == 4 else q


class Groups(NamedTuple):
    """What GPTQ, AWQ and MLX have to know of a module: bits, columns to a scale, and
    whether zero is in the middle."""

    bits: int
    size: int
    is_symmetric: bool


_WRITERS = {"GPTQ": gptq.write_gptq, "AWQ": gptq.write_awq, "MLX": mlx.write}


def scheme_and_tensors(q: QArray, target: Target, module: str):
    """Returns what the config has to say of a module, and its tensors by their whole names."""
    if target.layout == COMPRESSED:
        scheme, tensors = compressed_tensors.write(q, target.activations, module)
    else:
        tensors = _WRITERS[target.layout](q, module)
        size = layouts.group_size(q, module)
        scheme = Groups(q.format.bits, size, q.zero_point is None)
    return scheme, {f"{module}.{end}": array for end, array in tensors.items()}


def config_of(target: Target, schemes: Mapping[str, Any], left: Sequence[str]):
    """Returns what goes into config.json, by key."""
    if target.layout == COMPRESSED:
        return {"quantization_config": compressed_tensors.config(schemes, left)}
    kinds = list(dict.fromkeys(schemes.values()))
    bits, size, _ = max(kinds, key=list(schemes.values()).count)
    if target.layout == "MLX":
        others = {m: mlx.config(s.bits, s.size) for m, s in schemes.items()
                  if (s.bits, s.size) != (bits, size)}  # fmt: skip
        return {"quantization": {**mlx.config(bits, size), **others}}
    if target.layout == "GPTQ":
        about = gptq.gptq_config(bits, size, all(s.is_symmetric for s in kinds))
    else:
        about = gptq.awq_config(size)
        about["modules_to_not_convert"] = list(left) or None
    return {"quantization_config": about}
