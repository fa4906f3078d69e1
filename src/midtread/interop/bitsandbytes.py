"""bitsandbytes: NormalFloat4 in blocks of the flattened weight, and int8 by row.

    nf4    `x.weight` u8: two codes to a byte, the first in the high half;
           `x.weight.absmax` a scale per block, `x.weight.quant_map` the sixteen levels,
           `x.weight.quant_state.bitsandbytes__nf4` JSON: block size, shape, dtype
           Scales of scales (`bnb_4bit_use_double_quant`): absmax is then u8, and
           scale = nested_quant_map[absmax] * nested_absmax + nested_offset
    int8   `x.weight` i8, `x.SCB` the largest magnitude of each row: x = code * SCB / 127

Scales of scales are computed, once, in float32, as bitsandbytes does on every use: it is the
codes that take the memory. Blocks run over the whole weight; where a row is not a number of
blocks they would cross rows, and that is refused.
"""

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from midtread.interop import layouts
from midtread.interop.layouts import Arrays, Found, Weight
from midtread.numerics.formats import FORMATS, NF4
from midtread.numerics.packing import unpack_bits
from midtread.numerics.qarray import QArray

STATE = ".quant_state.bitsandbytes__"
_ROLES = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")
_DTYPES = {"weight": ("uint8",), **dict.fromkeys(_ROLES, layouts.FLOATS)}


def find(tensors: Mapping[str, Any], config: Mapping[str, Any], read_tensor) -> Found:
    """Weights in bitsandbytes' layout.

    Args:
        tensors: shapes by name.
        config: the folder's quantization_config.
        read_tensor: a tensor by its name: shapes are inside small ones.
    """
    weights, unused = {}, set()
    for name in tensors:
        if STATE in name:
            weight, _, kind = name.partition(STATE)
            if kind != "nf4":
                raise layouts.refuse(
                    weight, f"bitsandbytes' {kind} is not read; nf4 and int8 are"
                )
            weights[weight] = _four_bits(tensors, weight, read_tensor(name), name)
            unused.add(name)  # it is read here
        elif name.endswith(".SCB"):
            module = name.removesuffix(".SCB")
            weights[f"{module}.weight"] = _eight_bits(tensors, module)
            unused.add(f"{module}.weight_format")
    return Found(weights, frozenset(unused & {*tensors}))


def _four_bits(tensors, weight: str, raw: np.ndarray, state: str) -> Weight:
    try:
        about = json.loads(bytes(raw))
        shape = tuple(about["shape"])
        size, nested = about["blocksize"], about.get("nested_blocksize")
        numbers = all(type(n) is int and n > 0 for n in (*shape, size))
        offset = float(about.get("nested_offset", 0.0))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise layouts.refuse(state, f"does not read: {error}") from None
    if not numbers or len(shape) != 2:
        raise layouts.refuse(state, f"says shape {list(shape)} in blocks of {size}")
    if shape[1] % size:
        raise layouts.refuse(
            weight,
            f"blocks of {size} cross its rows of {shape[1]}. Quantize it again with a block "
            "size that divides them",
        )
    roles = _ROLES if nested else _ROLES[:2]
    names = {"weight": weight} | {role: f"{weight}.{role}" for role in roles}
    count = shape[0] * shape[1]
    wanted = {"weight": -(-count // 2), "absmax": count // size, "quant_map": 16}
    for role, name in names.items():
        if name not in tensors:
            raise layouts.refuse(weight, f"has no {role}")
        elements = int(np.prod(tensors[name].shape))
        layouts.expect(name, "size", elements, wanted.get(role, elements))
    if nested and int(np.prod(tensors[names["nested_quant_map"]].shape)) != 256:
        raise layouts.refuse(weight, "its nested_quant_map has not 256 levels")
    read = lambda arrays: read_nf4(arrays, shape, size, nested, offset, weight)
    dtypes = {**_DTYPES, "absmax": ("uint8",)} if nested else _DTYPES
    return Weight(shape, names, read, dtypes)


def read_nf4(
    arrays: Arrays,
    shape: tuple[int, int],
    size: int,
    nested: int | None = None,
    offset: float = 0.0,
    where: str = "a weight",
) -> QArray:
    """Reads a weight from its tensors: weight, absmax, quant_map, and the nested ones.

    Args:
        size: of a block.
        nested: size of a block of scales, where they are quantized themselves.
        offset: added to such scales.
    """
    levels = arrays["quant_map"].astype(np.float32).ravel()
    if not np.array_equal(levels, np.array(NF4, np.float32)):
        raise layouts.refuse(where, "its quant_map is not NormalFloat4's")
    halves = unpack_bits(arrays["weight"].reshape(-1, 1), 4, 2)[:, ::-1]
    codes = np.ascontiguousarray(halves).reshape(-1)[: shape[0] * shape[1]]
    scale = arrays["absmax"].ravel()
    if nested:
        inner = np.repeat(arrays["nested_absmax"].astype(np.float32).ravel(), nested)
        if len(inner) < len(scale) or scale.dtype != np.uint8:
            raise layouts.refuse(
                where, "its nested_absmax are not enough for its absmax"
            )
        scale = arrays["nested_quant_map"].astype(np.float32).ravel()[scale]
        scale = scale * inner[: len(scale)] + np.float32(offset)
    fmt = FORMATS["nf4"]
    tiles = (shape[0], shape[1] // size)
    codes = codes.view(fmt.dtype).reshape(shape)
    return QArray(codes, scale.astype(np.float32).reshape(tiles), None, fmt.qtype)


def _eight_bits(tensors, module: str) -> Weight:
    names = {"weight": f"{module}.weight", "SCB": f"{module}.SCB"}
    if names["weight"] not in tensors or len(tensors[names["weight"]].shape) != 2:
        raise layouts.refuse(module, "has an SCB, but no matrix of codes")
    shape = tuple(tensors[names["weight"]].shape)
    layouts.expect(module, "SCB", tuple(tensors[names["SCB"]].shape), shape[:1])
    dtypes = {"weight": ("int8",), "SCB": layouts.FLOATS}
    return Weight(shape, names, read_int8, dtypes)


def read_int8(arrays: Arrays) -> QArray:
    """Reads a weight from its tensors: weight and SCB."""
    scale = arrays["SCB"].astype(np.float32)[:, None] / np.float32(127)
    return layouts.integers(arrays["weight"].astype(np.int8), scale, None, 8)
