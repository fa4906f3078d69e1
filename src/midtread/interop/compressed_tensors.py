"""compressed-tensors: what llm-compressor writes, and vLLM and transformers read.

`quantization_config` of config.json has groups of modules with a scheme each, and one of
these formats; a module's weight is then the tensors below, rows out, columns in.

    format                  tensors                                      x =
    pack-quantized          weight_packed i32, weight_scale, weight_shape,
                            [weight_zero_point i32, weight_g_idx]        (code - zero) * scale
    int-quantized           weight i8, weight_scale, [weight_zero_point] (code - zero) * scale
    float-quantized         weight e4m3, weight_scale                    code * scale
    naive-quantized         as either of the two above
    nvfp4-pack-quantized    weight_packed u8, weight_scale e4m3,
                            weight_global_scale                          code * scale / global
    mxfp4-pack-quantized    weight_packed u8, weight_scale u8            code * 2^(scale - 127)

Scales are one number, one per row [rows, 1], per group [rows, groups] or per block
[rows / h, columns / w]. Packed integers have half their range added and lie end to end in
32-bit words along a row; zero points do the same along a column.

Blocks that do not divide a weight (576 rows of 128) are read as smaller ones that do, each
with its block's scale: 64 rows. NVFP4's two scales are read as their quotient, which is the
float32 that compressed-tensors multiplies by; to write it again the global scale is found
from the quotients, see `_two_levels`.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from midtread.interop import layouts
from midtread.interop.layouts import E4M3, Arrays, Found, Weight
from midtread.numerics.formats import FORMATS
from midtread.numerics.packing import pack_bits
from midtread.numerics.qarray import QArray

PACKED = "pack-quantized"
PLAIN = ("int-quantized", "float-quantized", "naive-quantized")
FOUR_BITS = {"nvfp4-pack-quantized": 16, "mxfp4-pack-quantized": 32}
_ENDS = ("weight_packed", "weight_scale", "weight_shape", "weight_zero_point",
         "weight_g_idx", "weight_global_scale")  # fmt: skip
_SCALES = {"weight_scale": layouts.FLOATS, "weight_global_scale": layouts.FLOATS}
_CODES = {
    **_SCALES, "weight": ("int8", "float8_e4m3fn"),
    "weight_zero_point": ("int8", "float8_e4m3fn"),
}  # fmt: skip
_DTYPES = {
    PACKED: {
        **_SCALES, "weight_packed": layouts.WORDS, "weight_zero_point": layouts.WORDS,
        "weight_shape": layouts.NUMBERS, "weight_g_idx": layouts.NUMBERS,
    },
    **{kind: _CODES for kind in PLAIN},
    "nvfp4-pack-quantized": {
        **_SCALES, "weight_packed": ("uint8",), "weight_scale": ("float8_e4m3fn",)},
    "mxfp4-pack-quantized": {"weight_packed": ("uint8",), "weight_scale": ("uint8",)},
}  # fmt: skip
_ACTIVATIONS = re.compile(r".*\.(input|output|k|v|q)_(scale|zero_point|global_scale)")


# --- reading ---------------------------------------------------------------------------------


def find(tensors: Mapping[str, Any], config: Mapping[str, Any]) -> Found:
    """Weights in this layout; `config` is the folder's quantization_config."""
    for key in ("sparsity_config", "transform_config"):
        given = config.get(key)
        if (
            given
            and given.get("format", "transform") != "dense"
            and given != {"config_groups": {}}
        ):
            raise layouts.refuse(
                "quantization_config", f"{key} is not read: {json.dumps(given)[:100]}"
            )
    groups = _groups(config)
    weights, notes, activations = {}, [], {}
    for name in tensors:
        if not name.endswith(".weight_scale"):
            continue
        module = name.removesuffix(".weight_scale")
        group = _group_of(module, groups)
        weights[f"{module}.weight"] = _weight(tensors, module, group, config)
        kind = _activations(group.get("input_activations"))
        if kind is not None:
            activations[f"{module}.weight"] = kind
    unused = frozenset(n for n in tensors if _ACTIVATIONS.fullmatch(n))
    if any(_is_static(g.get("input_activations")) for g in groups):
        notes.append(
            "Activations were calibrated (input_scale); here their range is found anew in "
            "every batch."
        )
    if config.get("kv_cache_scheme"):
        notes.append("kv_cache_scheme is not taken over: write quantize_kvcache=true.")
    if any(g.get("input_activations") for g in groups) and not activations:
        notes.append(
            "Activations stay as they are: their format is for weights alone here."
        )
    if any(g["weights"].get("actorder") in ("group", True) for g in groups):
        notes.append(layouts.SCATTERED)
    return Found(weights, unused, tuple(notes), activations)


def _groups(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    groups = config.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise layouts.refuse("quantization_config", "config_groups is missing or empty")
    for name, group in groups.items():
        if not isinstance(group, Mapping) or not isinstance(
            group.get("weights"), Mapping
        ):
            raise layouts.refuse(
                "quantization_config", f"group {name!r} says nothing of weights"
            )
    return list(groups.values())


def _group_of(module: str, groups: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Returns the group that names a module, or else the one for its class."""
    by_name = lambda target: (
        re.match(target[3:], module)
        if target.startswith("re:")
        else module == target or module.endswith(f".{target}")
    )
    for group in groups:
        if any(by_name(t) for t in group.get("targets", ()) if isinstance(t, str)):
            return group
    for group in groups:
        if "Linear" in group.get("targets", ()):
            return group
    raise layouts.refuse(
        module, "is quantized, but no config group has it among its targets"
    )


def _activations(args: Any) -> tuple[str, int | None] | None:
    """Returns format and tile of activations of 8 bits; None for all others."""
    if not isinstance(args, Mapping) or args.get("num_bits") != 8:
        return None
    qtype = "float8_e4m3fn" if args.get("type") == "float" else "int8"
    size = args.get("group_size")
    return qtype, size if type(size) is int and size > 0 else None


def _is_static(activations: Any) -> bool:
    return isinstance(activations, Mapping) and not activations.get("dynamic")


def _weight(tensors, module: str, group, config) -> Weight:
    kind, args = group.get("format") or config.get("format"), group["weights"]
    names = {end: f"{module}.{end}" for end in _ENDS if f"{module}.{end}" in tensors}
    shape_of = lambda end: tuple(tensors[names[end]].shape)
    if kind == PACKED:
        _require(module, names, "weight_packed", "weight_shape")
        bits = args.get("num_bits")
        if bits not in range(2, 9) or args.get("type", "int") != "int":
            raise layouts.refuse(
                module, f"{bits!r} bits of {args.get('type')} are not packed"
            )
        rows, words = _pair(module, shape_of("weight_packed"))
        shape = _columns_of(module, rows, words, bits, shape_of("weight_scale"), args)
        _check_scales(module, names, shape, shape_of("weight_scale"), args)
        read = lambda arrays: read_packed(arrays, bits, module)
        return _of_kind(module, kind, shape, names, read)
    if kind in FOUR_BITS:
        _require(module, names, "weight_packed")
        rows, half = _pair(module, shape_of("weight_packed"))
        tiles = (rows, half * 2 // FOUR_BITS[kind])
        layouts.expect(module, "weight_scale", shape_of("weight_scale"), tiles)
        if kind.startswith("nv"):
            _require(module, names, "weight_global_scale")
        read = read_nvfp4 if kind.startswith("nv") else read_mxfp4
        return _of_kind(module, kind, (rows, half * 2), names, read)
    if kind in PLAIN:
        names["weight"] = f"{module}.weight"
        if names["weight"] not in tensors:
            raise layouts.refuse(module, "has a weight_scale, but no weight")
        shape = _pair(module, shape_of("weight"))
        is_float, bits = args.get("type") == "float", args.get("num_bits", 8)
        wanted = E4M3 if is_float else np.dtype(np.int8)
        layouts.expect(
            module, "dtype", np.dtype(tensors[names["weight"]].dtype), wanted
        )
        if is_float and bits != 8 or bits not in range(2, 9):
            raise layouts.refuse(
                module, f"{bits!r} bits of {args.get('type')} are not read"
            )
        block = args.get("block_structure")
        _check_scales(module, names, shape, shape_of("weight_scale"), args)
        read = lambda arrays: read_plain(arrays, bits, block, module)
        return _of_kind(module, kind, shape, names, read)
    known = ", ".join([PACKED, *PLAIN, *FOUR_BITS])
    raise layouts.refuse(
        module, f"format {kind!r} of compressed-tensors is not read; {known} are"
    )


def _check_scales(module: str, names, shape, scale: tuple[int, ...], args) -> None:
    """Scales, and zero points, are those that the scheme speaks of."""
    rows, columns = shape
    size = args.get("group_size")
    groups = -(-columns // size) if type(size) is int and size > 0 else 1
    wanted = {
        "tensor": ((1,), (1, 1), ()),
        "channel": ((rows, 1), (rows,)),
        "group": ((rows, groups),),
    }.get(args.get("strategy"))
    if wanted is not None and scale not in wanted:
        layouts.expect(module, "weight_scale", scale, wanted[0])
    if args.get("symmetric") is False:
        _require(module, names, "weight_zero_point")


def _of_kind(module: str, kind: str, shape, names: dict[str, str], read) -> Weight:
    """Returns a weight of tensors that belong to its format; another is refused."""
    dtypes = _DTYPES[kind]
    for end in sorted(names.keys() - dtypes.keys()):
        raise layouts.refuse(module, f"has a {end}, which {kind} does not")
    return Weight(shape, names, read, dtypes)


def _require(module: str, names: Mapping[str, str], *ends: str) -> None:
    for end in ends:
        if end not in names:
            raise layouts.refuse(module, f"has no {end}")


def _pair(module: str, shape: tuple[int, ...]) -> tuple[int, int]:
    if len(shape) != 2 or 0 in shape:
        raise layouts.refuse(
            module, f"has a weight of shape {list(shape)}, not a matrix"
        )
    return shape


def _columns_of(module, rows, words, bits, scale, args) -> tuple[int, int]:
    """Returns the shape that a packed weight must have: words alone leave some columns open."""
    size = args.get("group_size")
    columns = words * 32 // bits
    if type(size) is int and size > 0 and len(scale) == 2:
        columns = scale[1] * size
    if layouts.num_words(columns, bits) != words:
        raise layouts.refuse(
            module,
            f"{words} words of {bits}-bit codes in a row are not {columns} columns. Files "
            "of compressed-tensors before 0.12 pad words of 3, 5, 6 and 7 bits: save again",
        )
    return rows, columns


def read_packed(arrays: Arrays, bits: int, where: str = "a weight") -> QArray:
    """Reads a weight from its tensors: weight_packed, weight_scale, weight_shape, and
    perhaps weight_zero_point and weight_g_idx."""
    rows, columns = (int(n) for n in arrays["weight_shape"])
    packed, scale = arrays["weight_packed"], arrays["weight_scale"]
    layouts.expect(where, "weight_shape", rows, packed.shape[0])
    layouts.expect(
        where, "weight_packed", packed.shape[1], layouts.num_words(columns, bits)
    )
    scale = scale.reshape(1, 1) if scale.size == 1 else scale
    codes = layouts.signed(layouts.unpack_words(packed, bits, columns), bits)
    zero = arrays.get("weight_zero_point")
    if zero is not None:
        wanted = (layouts.num_words(rows, bits), scale.shape[1])
        layouts.expect(where, "weight_zero_point", zero.shape, wanted)
        zero = layouts.signed(layouts.unpack_words(zero, bits, rows, axis=0), bits)
    q = layouts.integers(codes, scale, zero, bits)
    group_of = arrays.get("weight_g_idx")
    if group_of is None or group_of.min() < 0:  # -1: not in use
        return _checked(q, where)
    if layouts.is_in_order(group_of, columns // scale.shape[1]):
        return _checked(q, where)
    if group_of.shape != (columns,) or group_of.max() >= scale.shape[1]:
        raise layouts.refuse(where, "weight_g_idx names groups that are not there")
    return layouts.by_column(q, group_of)


def _checked(q: QArray, where: str) -> QArray:
    for part in (q.scale, q.zero_point):
        if part is not None and any(n % s for n, s in zip(q.qvalue.shape, part.shape)):
            raise layouts.refuse(
                where,
                f"scales {list(part.shape)} do not divide a weight {list(q.qvalue.shape)}",
            )
    return q


def read_plain(
    arrays: Arrays, bits: int = 8, block: Any = None, where: str = "a weight"
) -> QArray:
    """Reads a weight from its tensors: weight, weight_scale and perhaps weight_zero_point."""
    codes, scale = arrays["weight"], arrays["weight_scale"]
    zero = arrays.get("weight_zero_point")
    scale = scale.reshape(-1, 1) if scale.ndim < 2 else scale
    if block is not None:
        scale = whole_blocks(scale, codes.shape, tuple(block), where)
    if codes.dtype == E4M3:
        if zero is not None and np.any(zero.astype(np.float32)):
            raise layouts.refuse(where, "its codes are floats, and have zero points")
        return _checked(QArray(codes, scale, None, E4M3), where)
    dtype = FORMATS[f"int{bits}"].dtype
    codes = codes.astype(dtype)
    zero = None if zero is None else zero.reshape(scale.shape).astype(dtype)
    return _checked(layouts.integers(codes, scale, zero, bits), where)


def whole_blocks(
    scale: np.ndarray, shape: tuple[int, ...], block: tuple[int, ...], where: str
) -> np.ndarray:
    """Returns scales of blocks that divide `shape`: of smaller ones where the last is cut off.

    >>> whole_blocks(np.array([[1.0], [2.0]]), (6, 4), (4, 4), "w").tolist()
    [[1.0], [1.0], [2.0]]
    """
    wanted = tuple(-(-n // b) for n, b in zip(shape, block))
    layouts.expect(where, "scale", scale.shape, wanted)
    for axis, (n, b) in enumerate(zip(shape, block)):
        if n > b and n % b:
            tile = math.gcd(n, b)
            scale = np.repeat(scale, b // tile, axis).take(range(n // tile), axis)
    return scale


def read_nvfp4(arrays: Arrays) -> QArray:
    """Reads a weight from its tensors: weight_packed, weight_scale, weight_global_scale."""
    scale = arrays["weight_scale"].astype(np.float32)
    scale = scale / arrays["weight_global_scale"].astype(np.float32).reshape(1, 1)
    return QArray(layouts.e2m1(arrays["weight_packed"]), scale, None, "nvfp4")


def read_mxfp4(arrays: Arrays) -> QArray:
    """Reads a weight from its tensors: weight_packed, weight_scale."""
    return layouts.mxfp4(layouts.e2m1(arrays["weight_packed"]), arrays["weight_scale"])


# --- writing ---------------------------------------------------------------------------------


class Scheme(NamedTuple):
    """How compressed-tensors calls what a weight is in: one group of the config.

    Args:
        format: of the table above.
        weights: its arguments, in JSON.
        activations: the input's arguments, likewise; {} for weights alone.
    """

    format: str
    weights: str
    activations: str = "{}"


def write(
    q: QArray, activations: bool = False, where: str = "a weight"
) -> tuple[Scheme, dict[str, np.ndarray]]:
    """Returns the tensors of a weight [out, in], by the ends of their names, and its scheme.

    Args:
        q: int2 to int8, float8_e4m3fn, nvfp4 or mxfp4.
        activations: whoever runs it quantizes activations too, in every batch anew: int8
            and e4m3 per token (of blocks: per 128 columns), mxfp4 per 32 columns.
        where: the module, to call it by in errors.

    Raises:
        ValueError: compressed-tensors cannot say this array.
    """
    name = q.format.name
    # The last block of e4m3 codes may be cut off, as in DeepSeek's 576 rows of 128.
    has_blocks = name == "float8_e4m3fn" and q.ndim == 2 and min(q.scale_tile_shape) > 1
    is_padded = q.logical is not None and not has_blocks
    if q.ndim != 2 or is_padded or layouts.asks_of_inputs(q):
        raise layouts.refuse(where, f"{q!r} is no plain matrix")
    if name in ("nvfp4", "mxfp4"):
        return _write_four_bits(q, activations, where)
    if name == "float8_e4m3fn":
        scale, args = _shared(q, where, block=True)
        kind = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}
        scheme = Scheme(
            "float-quantized" if activations else "naive-quantized",
            json.dumps(kind | args),
            _dynamic(8, "float", args) if activations else "{}",
        )
        rows, columns = q.shape
        codes = np.ascontiguousarray(np.asarray(q.qvalue)[:rows, :columns])
        return scheme, {"weight": codes, "weight_scale": scale}
    if not layouts.is_signed(q.format, range(2, 9)):
        raise layouts.refuse(
            where,
            f"{name} has no place in compressed-tensors. int2 to int8, float8_e4m3fn, nvfp4 "
            "and mxfp4 do",
        )
    return _write_integers(q, activations, where)


def _write_integers(q: QArray, activations: bool, where: str):
    bits = q.format.bits
    scale, args = _shared(q, where)
    zero = q.zero_point
    if zero is not None and zero.dtype != q.qvalue.dtype:
        raise layouts.refuse(
            where, "its zero points are fractions, and here they are codes"
        )
    kind = {
        "num_bits": bits,
        "type": "int",
        "symmetric": zero is None,
        "dynamic": False,
    }
    scheme = Scheme(
        "int-quantized" if activations and bits == 8 else PACKED,
        json.dumps(kind | args),
        _dynamic(8, "int", args) if activations else "{}",
    )
    codes = np.asarray(q.qvalue)
    if zero is not None:
        zero = np.broadcast_to(np.asarray(zero), scale.shape)
    tensors = {"weight_scale": scale}
    if scheme.format != PACKED:
        tensors["weight"] = codes
        if zero is not None:
            tensors["weight_zero_point"] = np.ascontiguousarray(zero)
        return scheme, tensors
    tensors["weight_packed"] = layouts.pack_words(layouts.unsigned(codes, bits), bits)
    tensors["weight_shape"] = np.array(q.shape, np.int64)
    if zero is not None:
        raw = layouts.unsigned(zero, bits)
        tensors["weight_zero_point"] = layouts.pack_words(raw, bits, axis=0)
    return scheme, tensors


def _shared(q: QArray, where: str, block: bool = False):
    """Returns the scales as they are stored, and the arguments that say who shares one."""
    scale = np.asarray(q.scale)
    rows, columns = q.scale_tile_shape
    if scale.size == 1 and block:
        return scale.reshape(1), {"strategy": "tensor"}
    if rows == 1 or q.shape[0] == 1:
        if columns == q.shape[1]:
            return scale, {"strategy": "channel"}
        return scale, {"strategy": "group", "group_size": columns}
    if not block:
        if columns == q.shape[1]:  # of some rows, or all: each gets its own
            return np.repeat(scale, rows, 0), {"strategy": "channel"}
        raise layouts.refuse(
            where, f"blocks of {rows} x {columns} integers are not read"
        )
    scale, structure = _whole(scale, q.shape, (rows, columns))
    return scale, {"strategy": "block", "block_structure": list(structure)}


def _whole(scale: np.ndarray, shape, tile) -> tuple[np.ndarray, tuple[int, int]]:
    """Blocks of 128 x 128 again, where `whole_blocks` had made smaller ones of them."""
    for axis, (n, t) in enumerate(zip(shape, tile)):
        if t < 128 and n > 128 and 128 % t == 0:
            step = 128 // t
            first = scale.take(range(0, scale.shape[axis], step), axis)
            if not np.array_equal(
                np.repeat(first, step, axis).take(range(n // t), axis), scale
            ):
                return scale, tuple(tile)
            scale, tile = first, (128, tile[1]) if axis == 0 else (tile[0], 128)
        elif t < 128 and n == t:  # one block, cut off
            tile = (128, tile[1]) if axis == 0 else (tile[0], 128)
    return np.ascontiguousarray(scale), tuple(tile)


def _dynamic(bits: int, kind: str, args: Mapping[str, Any]) -> str:
    common = {"num_bits": bits, "type": kind, "symmetric": True, "dynamic": True}
    if args["strategy"] == "block":
        return json.dumps(
            common | {"strategy": "group", "group_size": args["block_structure"][1]}
        )
    return json.dumps(common | {"strategy": "token"})


def _write_four_bits(q: QArray, activations: bool, where: str):
    name, codes = q.format.name, np.asarray(q.qvalue)
    size = layouts.group_size(q, where)
    layouts.expect(where, "group size", size, q.format.tile)
    packed = pack_bits(codes.view(np.uint8), 4)
    scale = np.asarray(q.scale).astype(np.float32)
    args = {"num_bits": 4, "type": "float", "symmetric": True, "dynamic": False,
            "group_size": size}  # fmt: skip
    if name == "mxfp4":
        args |= {"strategy": "group", "scale_dtype": "torch.uint8", "zp_dtype": None}
        inputs = {**args, "dynamic": True} if activations else {}
        tensors = {
            "weight_packed": packed,
            "weight_scale": layouts.exponents(scale, where),
        }
        return Scheme(
            "mxfp4-pack-quantized", json.dumps(args), json.dumps(inputs)
        ), tensors
    if activations:
        raise layouts.refuse(
            where,
            "activations in nvfp4 need a calibrated global scale: leave them in float",
        )
    args |= {"strategy": "tensor_group", "scale_dtype": "torch.float8_e4m3fn"}
    if q.global_scale is not None:
        scale = scale * np.asarray(q.global_scale, np.float32)
    block, whole = _two_levels(scale, where)
    tensors = {
        "weight_packed": packed,
        "weight_scale": block,
        "weight_global_scale": whole,
    }
    return Scheme("nvfp4-pack-quantized", json.dumps(args)), tensors


def _two_levels(scale: np.ndarray, where: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns scales as e4m3 over one float32: scale = block / whole.

    Which e4m3 number the largest scale is has been forgotten; there are 126 of them, and
    with the right one all others are e4m3 numbers too.
    """
    seen = np.unique(scale).astype(np.float64)
    candidates = np.arange(126, 0, -1, dtype=np.uint8).view(E4M3).astype(np.float64)
    for top in candidates:
        exact = seen * (top / seen[-1])
        nearest = exact.astype(np.float32).astype(E4M3).astype(np.float64)
        if np.all(np.abs(nearest - exact) <= 1e-6 * exact):
            whole = np.float32(top / seen[-1])
            block = (scale.astype(np.float64) * (top / seen[-1])).astype(np.float32)
            return block.astype(E4M3), np.array([whole])
    raise layouts.refuse(
        where,
        "its scales are not e4m3 numbers over one float32 (in bfloat16 none are). Export "
        "the float model, or quantize it with weight_dtype=float32",
    )


def config(schemes: Mapping[str, Scheme], left: Sequence[str]) -> dict[str, Any]:
    """Returns `quantization_config` for modules with these schemes; `left` are in float."""
    order = list(dict.fromkeys(schemes.values()))
    groups = {}
    for i, scheme in enumerate(order):
        names = [f"re:^{re.escape(m)}$" for m, s in schemes.items() if s == scheme]
        groups[f"group_{i}"] = {
            "targets": ["Linear"] if len(order) == 1 else names,
            "weights": json.loads(scheme.weights),
            "input_activations": json.loads(scheme.activations) or None,
            "output_activations": None,
            "format": scheme.format,
        }
    formats = {scheme.format for scheme in order}
    return {
        "quant_method": "compressed-tensors",
        "format": formats.pop() if len(formats) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": list(left),
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }
