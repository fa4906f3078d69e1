"""MLX: groups of unsigned codes with a scale and a bias, in 32-bit words.

    x = scale * code + bias      `x.weight` u32 [rows, columns * bits / 32], `x.scales` and
                                 `x.biases` [rows, groups], codes end to end along a row

config.json says {"quantization": {"group_size": 64, "bits": 4}}, and may say something else,
or `false`, for a module by its name. With "mode": "mxfp4" codes are e2m1, scales exponents
in u8, and there are no biases.

A bias becomes the zero point -bias / scale, a fraction. Written, a code without zero point
has the bias -2^(bits - 1) * scale, which is exact: files of ours read by MLX are our values.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from midtread.interop import layouts
from midtread.interop.layouts import Arrays, Found, Weight
from midtread.numerics.qarray import QArray

BITS = (2, 3, 4, 5, 6, 8)
SIZES = (32, 64, 128)
_AFFINE = {"weight": ("uint32",), "scales": layouts.FLOATS, "biases": layouts.FLOATS}
_MXFP4 = {"weight": ("uint32",), "scales": ("uint8",)}


def find(tensors: Mapping[str, Any], config: Mapping[str, Any]) -> Found:
    """Weights in MLX's layout; `config` is what config.json has under "quantization"."""
    weights = {}
    for name in tensors:
        if not name.endswith(".scales"):
            continue
        module = name.removesuffix(".scales")
        own = config.get(module, {})
        given = {**config, **own} if isinstance(own, Mapping) else config
        weights[f"{module}.weight"] = _weight(tensors, module, given)
    return Found(weights)


def _weight(
    tensors: Mapping[str, Any], module: str, config: Mapping[str, Any]
) -> Weight:
    mode, size, bits = (config.get(k) for k in ("mode", "group_size", "bits"))
    if mode not in (None, "affine", "mxfp4"):
        raise layouts.refuse(
            module, f"mode {mode!r} of MLX is not read; 'affine' and 'mxfp4' are"
        )
    if bits not in BITS or type(size) is not int or size < 1:
        raise layouts.refuse(
            module, f"{bits!r} bits in groups of {size!r} are not what MLX has"
        )
    ends = ("weight", "scales") if mode == "mxfp4" else ("weight", "scales", "biases")
    names = {end: f"{module}.{end}" for end in ends}
    for name in names.values():
        if name not in tensors or len(tensors[name].shape) < 2:
            raise layouts.refuse(name, "is missing, or no matrix")
    *rows, groups = tensors[names["scales"]].shape
    shape = (*rows, groups * size)
    words = (*rows, layouts.num_words(groups * size, bits))
    layouts.expect(module, "weight", tuple(tensors[names["weight"]].shape), words)
    if mode == "mxfp4":
        return Weight(shape, names, read_mxfp4, _MXFP4)
    layouts.expect(
        module, "biases", tuple(tensors[names["biases"]].shape), (*rows, groups)
    )
    read = lambda arrays: read_affine(arrays, bits, shape[-1])
    return Weight(shape, names, read, _AFFINE)


def read_affine(arrays: Arrays, bits: int, count: int) -> QArray:
    """Reads a weight from its tensors: weight, scales and biases; `count` columns."""
    raw = layouts.unpack_words(arrays["weight"], bits, count)
    return layouts.affine(raw, arrays["scales"], arrays["biases"], bits)


def read_mxfp4(arrays: Arrays) -> QArray:
    """Reads a weight from e2m1 codes and exponents."""
    scales = arrays["scales"]
    raw = layouts.unpack_words(arrays["weight"], 4, scales.shape[-1] * 32)
    return layouts.mxfp4(raw.view(layouts.E2M1), scales)


def write(q: QArray, where: str = "a weight") -> dict[str, np.ndarray]:
    """Returns the tensors of a weight [rows, columns]: weight, scales and, of integers, biases.

    Raises:
        ValueError: MLX's layout cannot say this array.
    """
    size = layouts.group_size(q, where)
    codes = np.asarray(q.qvalue)
    if q.format.name == "mxfp4":
        return {
            "weight": layouts.pack_words(codes.view(np.uint8), 4).view(np.uint32),
            "scales": layouts.exponents(np.asarray(q.scale, np.float32), where),
        }
    fmt = q.format
    if not layouts.is_signed(fmt, BITS):
        raise layouts.refuse(where, f"{fmt.name} has no place in MLX's layout")
    if size not in SIZES:
        raise layouts.refuse(
            where,
            f"groups are of {size} columns, and MLX has {SIZES}: quantize with such a "
            "group_size",
        )
    scale = np.asarray(q.scale)
    zero = np.float32(0) if q.zero_point is None else np.asarray(q.zero_point)
    half = np.float32(1 << (fmt.bits - 1))
    bias = -(zero.astype(np.float32) + half) * scale.astype(np.float32)
    words = layouts.pack_words(layouts.unsigned(codes, fmt.bits), fmt.bits)
    return {
        "weight": words.view(np.uint32),
        "scales": scale,
        "biases": bias.astype(scale.dtype),
    }


def config(bits: int, size: int) -> dict[str, Any]:
    """Returns what mlx-lm wants in config.json."""
    return {"group_size": size, "bits": bits, "mode": "affine"}
