"""Weights as their makers published them: DeepSeek's fp8 blocks and gpt-oss's mxfp4 experts.

DeepSeek   quant_method "fp8": `x.weight` e4m3 with one float32 for every block of 128 x
           128, `x.weight_scale_inv` (which multiplies, its name notwithstanding)
gpt-oss    quant_method "mxfp4": of all experts together, `x_blocks` u8 [experts, out, in
           / 32, 16], two codes to a byte, and `x_scales` u8 [experts, out, in / 32],
           exponents; the float tensor `x` would be [experts, in, out]
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from midtread.interop import layouts
from midtread.interop.compressed_tensors import whole_blocks
from midtread.interop.layouts import E4M3, Arrays, Found, Weight
from midtread.numerics.qarray import QArray

_INVERSE = "_scale_inv"


def find_fp8(tensors: Mapping[str, Any], config: Mapping[str, Any]) -> Found:
    """Weights in fp8 blocks; `config` is the folder's quantization_config."""
    block = config.get("weight_block_size")
    is_size = lambda n: type(n) is int and n > 0
    if not isinstance(block, list) or [*map(is_size, block)] != [True, True]:
        raise layouts.refuse(
            "quantization_config",
            f"weight_block_size is {block!r}, not [rows, columns]",
        )
    weights = {}
    for name in tensors:
        if not name.endswith(_INVERSE):
            continue
        weight = name.removesuffix(_INVERSE)
        if weight not in tensors or np.dtype(tensors[weight].dtype) != E4M3:
            raise layouts.refuse(name, "scales a weight that is missing or not in e4m3")
        shape = tuple(tensors[weight].shape)
        wanted = tuple(-(-n // b) for n, b in zip(shape, block))
        layouts.expect(name, "shape", tuple(tensors[name].shape), wanted)
        read = lambda arrays, w=weight: read_fp8(arrays, tuple(block), w)
        names = {"weight": weight, "scale": name}
        dtypes = {"weight": (E4M3.name,), "scale": layouts.FLOATS}
        weights[weight] = Weight(shape, names, read, dtypes)
    notes: tuple[str, ...] = ()
    if scheme := config.get("activation_scheme"):
        note = (
            f"Activations stay in float; activation_scheme={scheme!r} rounds them too."
        )
        notes = (note,)
    unused = frozenset(n for n in tensors if n.endswith(".input_scale"))
    return Found(weights, unused, notes)


def read_fp8(arrays: Arrays, block: tuple[int, ...], where: str = "a weight") -> QArray:
    """Reads a weight from its tensors: weight and scale."""
    codes, scale = arrays["weight"], arrays["scale"]
    return QArray(codes, whole_blocks(scale, codes.shape, block, where), None, E4M3)


def find_mxfp4(tensors: Mapping[str, Any], config: Mapping[str, Any]) -> Found:
    """Experts in mxfp4, as gpt-oss has them."""
    weights = {}
    for name in tensors:
        if not name.endswith("_blocks"):
            continue
        weight = name.removesuffix("_blocks")
        names = {"blocks": name, "scales": f"{weight}_scales"}
        if names["scales"] not in tensors:
            raise layouts.refuse(name, "has no scales")
        shape = tuple(tensors[name].shape)
        if len(shape) != 4 or shape[-1] != 16:
            raise layouts.refuse(
                name, f"has shape {list(shape)}, not [experts, out, n, 16]"
            )
        layouts.expect(
            names["scales"], "shape", tuple(tensors[names["scales"]].shape), shape[:-1]
        )
        experts, out, tiles, _ = shape
        dtypes = {"blocks": ("uint8",), "scales": ("uint8",)}
        whole = (experts, tiles * 32, out)
        weights[weight] = Weight(whole, names, read_mxfp4, dtypes)
    return Found(weights)


def read_mxfp4(arrays: Arrays) -> QArray:
    """Reads all experts [experts, in, out] from blocks and scales."""
    blocks, scales = arrays["blocks"], arrays["scales"]
    codes = layouts.e2m1(blocks).reshape(*blocks.shape[:2], -1)
    return layouts.mxfp4(codes, scales).swapaxes(-1, -2)
