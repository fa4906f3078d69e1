"""torchao: tensor subclasses, taken apart into safetensors by transformers.

A weight `x.weight` of class Int8Tensor is saved as the tensors `x._weight_qdata`,
`x._weight_scale`, ...; what class it was, and its blocks, is JSON in the file's own
`__metadata__`, under the name of the weight. These classes are plain, rows out, columns in:

    class                       qdata                       scale                    x =
    Int8Tensor                  i8                          per block                (code - zero) * scale
    IntxUnpackedToInt8Tensor    i8, of 1 to 8 bits          per block                (code - zero) * scale
    Float8Tensor                e4m3                        per block                code * scale
    Int4Tensor                  two to a byte, signed       [groups, rows]           code * scale + zero
    MXTensor                    e4m3, or e2m1 two to a byte e8m0, per 32             code * scale
    NVFP4Tensor                 e2m1 two to a byte          e4m3, per 16             code * scale * per_tensor

Scales of the last two may lie as Blackwell's tensor cores want them (`is_swizzled_scales`):
in tiles of 128 x 4, rows 32 apart side by side. They are put in order here.

The other classes are laid out for one kernel of one device, and refused with what to save
instead.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from midtread.interop import layouts
from midtread.interop.layouts import E4M3, Arrays, Found, Weight, e2m1
from midtread.numerics.formats import FORMATS
from midtread.numerics.packing import unpack_bits
from midtread.numerics.qarray import QArray

_ROLES = ("qdata", "scale", "zero_point", "per_tensor_scale")
# of calibrated activations, whose range is found anew here
_UNUSED = ("act_quant_scale", "act_quant_zero_point", "act_per_tensor_scale")
_FLOAT = "Tensor"
_ZEROS = ("int8", *layouts.NUMBERS, *layouts.FLOATS)


class _Class(NamedTuple):
    """One class of torchao.

    Args:
        dtypes: what its qdata may be stored as, and how many codes an element of it holds.
        read: the QArray, from arrays by role, the attributes of the class, and the name of
            the weight.
        scales: what its scales may be stored as.
    """

    dtypes: Mapping[str, int]
    read: Callable[[Arrays, Mapping[str, Any], str], QArray]
    scales: Sequence[str] = layouts.FLOATS


def find(folder: Any, config: Mapping[str, Any]) -> Found:
    """Weights that torchao's metadata describe; `config` is quantization_config."""
    described = _described(folder.metadata)
    weights: dict[str, Weight] = {}
    activations: dict[str, tuple[str, int | None]] = {}
    unused, notes = [], {}
    for name, about in described.items():
        if about.get("_type") == _FLOAT:
            continue
        parts = _parts(folder.tensors, name, about)
        unused += [parts.pop(role) for role in _UNUSED if role in parts]
        weights[name] = _weight(folder.tensors, name, about, parts)
        kind, note = _activations(about["_data"])
        if kind is not None:
            activations[name] = kind
        if note:
            notes[note] = None
    if unused:
        notes["Activations were calibrated; here their range is found anew."] = None
    return Found(weights, frozenset(unused), tuple(notes), activations)


def _described(metadata: Mapping[str, str]) -> dict[str, Mapping[str, Any]]:
    """Returns what the metadata of all files say of each tensor."""
    described = {}
    for name in _json("tensor_names", metadata.get("tensor_names"), list):
        about = _json(name, metadata.get(name), dict)
        kind = about.get("_type")
        if kind != _FLOAT and kind not in CLASSES:
            raise layouts.refuse(
                str(name),
                f"is torchao's {kind}, which is not read; {', '.join(CLASSES)} are. Save "
                "it with another packing format, int4_packing_format='plain' for int4",
            )
        if kind != _FLOAT and not isinstance(about.get("_data"), Mapping):
            raise layouts.refuse(name, f"has no attributes of {kind} in the metadata")
        described[name] = about
    return described


def _json(name: Any, text: Any, kind: type) -> Any:
    try:
        value = json.loads(text) if isinstance(text, str) else None
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, kind):
        raise layouts.refuse(
            "__metadata__",
            f"{name!r} is not described, as torchao's safetensors have it",
        )
    return value


def _parts(tensors: Mapping[str, Any], name: str, about: Mapping) -> dict[str, str]:
    """Returns the tensors of a weight, by role."""
    module, _, end = name.rpartition(".")
    roles = about.get("_tensor_data_names")
    if not isinstance(roles, list) or not {"qdata", "scale"} <= {*map(str, roles)}:
        raise layouts.refuse(name, "the metadata do not say what it is made of")
    parts = {str(role): f"{module}._{end}_{role}".lstrip(".") for role in roles}
    for role, tensor in parts.items():
        if role not in (*_ROLES, *_UNUSED):
            raise layouts.refuse(name, f"has {role}, which is not read")
        if tensor not in tensors:
            raise layouts.refuse(name, f"tensor {tensor!r} is missing")
    return parts


def _weight(tensors, name: str, about: Mapping, parts: dict[str, str]) -> Weight:
    kind, data = CLASSES[about["_type"]], about["_data"]
    stored = tensors[parts["qdata"]]
    dtype = np.dtype(stored.dtype).name
    if dtype not in kind.dtypes or len(stored.shape) != 2 or 0 in stored.shape:
        raise layouts.refuse(
            name, f"its qdata are {dtype}{list(stored.shape)}, not {about['_type']}'s"
        )
    rows, columns = stored.shape
    read = lambda arrays: kind.read(arrays, data, name)
    dtypes = {"qdata": (dtype,), "scale": kind.scales, "zero_point": _ZEROS,
              "per_tensor_scale": layouts.FLOATS}  # fmt: skip
    return Weight((rows, columns * kind.dtypes[dtype]), parts, read, dtypes)


# --- activations -----------------------------------------------------------------------------


def _activations(data: Mapping) -> tuple[tuple[str, int | None] | None, str]:
    """Returns format and tile of activations that are quantized in every batch, and a
    sentence about what is asked for and not done."""
    given = data.get("act_quant_kwargs") or data.get("activation_quantization")
    if not given and _value(data.get("activation_dtype")) in (None, "bfloat16"):
        return None, ""
    asked = given if isinstance(given, Mapping) else {}
    qtype, inside = _ACTIVATIONS.get(str(asked.get("_type"))), _value(asked)
    if qtype is None or not isinstance(inside, Mapping):
        return (
            None,
            "Activations stay as they are: their format is for weights alone here.",
        )
    if _value(inside.get("mapping_type")) == "ASYMMETRIC":
        return None, "Activations stay as they are: here they have no zero points."
    granularity = inside.get("granularity")
    if isinstance(granularity, Mapping) and granularity.get("_type") == "PerTensor":
        return (
            qtype,
            None,
        ), "Activations have a scale for every token, not one for all."
    return (qtype, None), ""


def _value(attribute: Any) -> Any:
    """Returns an attribute; of a dtype or an enum its name."""
    return attribute.get("_data") if isinstance(attribute, Mapping) else attribute


_ACTIVATIONS = {
    "QuantizeTensorToInt8Kwargs": "int8",
    "QuantizeTensorToFloat8Kwargs": "float8_e4m3fn",
}


# --- classes ---------------------------------------------------------------------------------


def read_integers(arrays: Arrays, data: Mapping, where: str) -> QArray:
    """Reads an Int8Tensor or IntxUnpackedToInt8Tensor: qdata, scale and perhaps zero_point."""
    target = _value(data.get("target_dtype", "int8"))
    if target not in [f"int{bits}" for bits in range(2, 9)]:
        raise layouts.refuse(where, f"codes of {target!r} are not read")
    fmt, codes = FORMATS[target], arrays["qdata"]
    half = 1 << (fmt.bits - 1)
    if codes.min() < -half or codes.max() >= half:
        raise layouts.refuse(where, f"its codes are not of {target}")
    scale = _in_blocks(arrays["scale"], codes.shape, data, where)
    zero = arrays.get("zero_point")
    if zero is not None:
        zero = _in_blocks(zero, codes.shape, data, where)
        if zero.dtype == np.int8 and zero.min() >= -half and zero.max() < half:
            zero = zero.astype(fmt.dtype)
        else:  # a fraction, or beyond the codes
            zero = zero.astype(np.float32)
    return layouts.integers(codes.astype(fmt.dtype), scale, zero, fmt.bits)


def read_float8(arrays: Arrays, data: Mapping, where: str) -> QArray:
    """Reads a Float8Tensor: qdata and scale."""
    codes = arrays["qdata"]
    scale = _in_blocks(arrays["scale"], codes.shape, data, where)
    return QArray(codes, scale, None, E4M3)


def read_int4(arrays: Arrays, data: Mapping, where: str) -> QArray:
    """Reads an Int4Tensor: qdata, scale and zero_point, which is an offset."""
    raw = arrays["qdata"].view(np.uint8)
    raw = unpack_bits(raw, 4, raw.shape[1] * 2) ^ np.uint8(8)  # -8..7 to 0..15
    scale, offset = arrays["scale"].T, arrays["zero_point"].T
    layouts.expect(where, "zero_point", offset.shape, scale.shape)
    size = _block(data, raw.shape, where)[1]
    layouts.expect(where, "scale", scale.shape, (len(raw), raw.shape[1] // size))
    wide = scale.astype(np.float32)
    bias = offset.astype(np.float32) - np.float32(8) * wide
    return layouts.affine(raw, np.ascontiguousarray(wide), bias, 4)


def read_mx(arrays: Arrays, data: Mapping, where: str) -> QArray:
    """Reads an MXTensor: qdata and exponents."""
    codes, qtype = arrays["qdata"], "mxfp8"
    if codes.dtype == np.uint8:
        codes, qtype = e2m1(codes), "mxfp4"
    scale = arrays["scale"]
    if scale.dtype == np.uint8:
        scale = scale.view(ml_dtypes.float8_e8m0fnu)
    layouts.expect(where, "block_size", data.get("block_size"), 32)
    scale = _scales(scale, codes.shape, 32, data, where).astype(np.float32)
    return QArray(codes, scale, None, qtype)


def read_nvfp4(arrays: Arrays, data: Mapping, where: str) -> QArray:
    """Reads an NVFP4Tensor: qdata, scale and perhaps per_tensor_scale."""
    codes = e2m1(arrays["qdata"])
    layouts.expect(where, "block_size", data.get("block_size"), 16)
    scale = _scales(arrays["scale"], codes.shape, 16, data, where).astype(np.float32)
    whole = arrays.get("per_tensor_scale")
    if whole is not None:
        scale = scale * whole.astype(np.float32).reshape(1, 1)
    return QArray(codes, scale, None, "nvfp4")


CLASSES = {
    "Int8Tensor": _Class({"int8": 1}, read_integers),
    "IntxUnpackedToInt8Tensor": _Class({"int8": 1}, read_integers),
    "Float8Tensor": _Class({"float8_e4m3fn": 1}, read_float8),
    "Int4Tensor": _Class({"int8": 2, "uint8": 2}, read_int4),
    "MXTensor": _Class(
        {"float8_e4m3fn": 1, "uint8": 2}, read_mx, ("float8_e8m0fnu", "uint8")
    ),
    "NVFP4Tensor": _Class({"uint8": 2}, read_nvfp4, (E4M3.name,)),
}


def _block(data: Mapping, shape: tuple[int, ...], where: str) -> tuple[int, int]:
    """Returns how many rows and columns share a scale."""
    block = data.get("block_size")
    is_size = lambda b, n: type(b) is int and b > 0 and n % b == 0
    if not isinstance(block, list) or [*map(is_size, block, shape)] != [True, True]:
        raise layouts.refuse(where, f"blocks of {block!r} do not divide {list(shape)}")
    return block[0], block[1]


def _in_blocks(part: np.ndarray, shape, data: Mapping, where: str) -> np.ndarray:
    """Returns scales, or zero points, of the blocks that the attributes name."""
    wanted = tuple(n // b for n, b in zip(shape, _block(data, shape, where)))
    if part.size != wanted[0] * wanted[1]:
        raise layouts.refuse(
            where, f"its scales are {list(part.shape)}, and should be {list(wanted)}"
        )
    return part.reshape(wanted)


def _scales(scale: np.ndarray, shape, size: int, data: Mapping, where: str):
    """Returns scales [rows, groups], in the order of the codes."""
    rows, groups = shape[0], shape[1] // size
    if not data.get("is_swizzled_scales"):
        layouts.expect(where, "scale", scale.shape, (rows, groups))
        return scale
    down, across = -(-rows // 128), -(-groups // 4)
    layouts.expect(where, "number of scales", scale.size, down * across * 512)
    tiles = scale.reshape(down, across, 32, 4, 4).transpose(0, 3, 2, 1, 4)
    return tiles.reshape(down * 128, across * 4)[:rows, :groups]
