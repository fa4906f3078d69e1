"""GPTQ and AWQ: eight 4-bit codes to a 32-bit word, columns first.

Both keep a weight transposed, [columns in, rows out], groups along the columns that are
summed, and say  x = (code - zero) * scale  with unsigned codes. They differ in where codes
and zeros lie:

              GPTQ (AutoGPTQ, GPTQModel)          AWQ (AutoAWQ, "gemm")
    qweight   [in * bits / 32, out], along in     [in, out / 8], along out
    qzeros    [groups, out * bits / 32]           [groups, out / 8]
    scales    [groups, out]                       [groups, out]
    g_idx     the group of each column            none
    order     0 1 2 3 4 5 6 7 in a word           0 2 4 6 1 3 5 7 in a word
    zeros     stored less one ("gptq"), or as     as they are
              they are ("gptq_v2")

With `desc_act` the groups of GPTQ are not neighbours, and g_idx says which column is in
which; `layouts.by_column` has them then.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from midtread.interop import layouts
from midtread.interop.layouts import Arrays, Found, Weight
from midtread.numerics.qarray import QArray

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # of AWQ: the column that each nibble of a word holds
_ENDS = (".qweight", ".qzeros", ".scales", ".g_idx")
_DTYPES = {"qweight": layouts.WORDS, "qzeros": layouts.WORDS, "scales": layouts.FLOATS,
           "g_idx": layouts.NUMBERS}  # fmt: skip


# --- GPTQ ------------------------------------------------------------------------------------


def find_gptq(tensors: Mapping[str, Any], config: Mapping[str, Any]) -> Found:
    """Weights in GPTQ's layout; `config` is the folder's quantization_config."""
    bits = _bits(config, (2, 3, 4, 8))
    kind = config.get("checkpoint_format", "gptq")
    if kind not in ("gptq", "gptq_v2"):
        raise layouts.refuse(
            "quantization_config",
            f"checkpoint_format {kind!r} is not read; 'gptq' and 'gptq_v2' are",
        )
    stored_less = 1 if kind == "gptq" else 0
    weights = {}
    for module in _modules(tensors):
        words, out = _matrix(tensors, f"{module}.qweight")
        groups, columns = _matrix(tensors, f"{module}.scales")
        count = words * 32 // bits
        layouts.expect(module, "number of columns", columns, out)
        zeros = (groups, layouts.num_words(out, bits))
        layouts.expect(module, "qzeros", _matrix(tensors, f"{module}.qzeros"), zeros)
        _check_groups(module, config, groups, count)
        names = {end[1:]: f"{module}{end}" for end in _ENDS}
        if names["g_idx"] not in tensors:
            if config.get("desc_act") is True:
                raise layouts.refuse(module, "has no g_idx, though desc_act is true")
            del names["g_idx"]
        else:
            layouts.expect(
                module, "g_idx", tuple(tensors[names["g_idx"]].shape), (count,)
            )
        read = lambda arrays, n=count, w=module: read_gptq(
            arrays, bits, n, stored_less, w
        )
        weights[f"{module}.weight"] = Weight((out, count), names, read, _DTYPES)
    notes = (layouts.SCATTERED,) if config.get("desc_act") is True else ()
    return Found(weights, notes=notes)


def read_gptq(
    arrays: Arrays, bits: int, count: int, stored_less: int, where: str = "a weight"
) -> QArray:
    """Reads a weight [out, in] from its tensors.

    Args:
        arrays: qweight, qzeros, scales and perhaps g_idx.
        bits: of a code.
        count: of columns that are summed (in).
        stored_less: what zeros are stored less: 1 in version 1, 0 in version 2.
        where: the module, to call it by in errors.
    """
    scales = arrays["scales"]
    groups, out = scales.shape
    raw = layouts.unpack_words(arrays["qweight"], bits, count, axis=0)
    zeros = layouts.unpack_words(arrays["qzeros"], bits, out)
    # 15 is stored for a zero of 0: less one, it wraps round
    zeros = zeros + np.uint8(stored_less) & np.uint8((1 << bits) - 1)
    q = layouts.integers(
        np.ascontiguousarray(layouts.signed(raw, bits).T),
        np.ascontiguousarray(scales.T),
        np.ascontiguousarray(layouts.signed(zeros, bits).T),
        bits,
    )
    group_of = arrays.get("g_idx")
    if group_of is None or (
        count % groups == 0 and layouts.is_in_order(group_of, count // groups)
    ):
        return q
    if group_of.min() < 0 or group_of.max() >= groups:
        raise layouts.refuse(
            where, f"g_idx names a group beyond the {groups} there are"
        )
    return layouts.by_column(q, group_of)


def write_gptq(q: QArray, where: str = "a weight") -> dict[str, np.ndarray]:
    """Returns the tensors of a weight [out, in], in version 1: qweight, qzeros, scales, g_idx.

    Raises:
        ValueError: GPTQ's layout cannot say this array.
    """
    bits = _check_writable(q, where, "GPTQ", (2, 4, 8))
    size = layouts.group_size(q, where)
    out, count = q.shape
    if count * bits % 32 or out * bits % 32:
        raise layouts.refuse(where, f"{q.shape} codes of {bits} bits do not fill words")
    raw = layouts.unsigned(np.asarray(q.qvalue), bits)
    zeros = _zeros(q, bits).astype(np.int16) - 1
    if zeros.min() < 0:
        raise layouts.refuse(
            where, "a zero point at the lowest code cannot be stored less one"
        )
    return {
        "qweight": layouts.pack_words(raw.T, bits, axis=0),
        "qzeros": layouts.pack_words(zeros.astype(np.uint8).T, bits),
        "scales": layouts.in_half(np.ascontiguousarray(_scale(q).T), where),
        "g_idx": (np.arange(count) // size).astype(np.int32),
    }


def gptq_config(bits: int, size: int, is_symmetric: bool) -> dict[str, Any]:
    """Returns what AutoGPTQ and its readers want in config.json. A size of 0 means one group."""
    return {
        "quant_method": "gptq", "bits": bits, "group_size": size or -1, "sym": is_symmetric,
        "desc_act": False, "checkpoint_format": "gptq", "damp_percent": 0.0,
        "lm_head": False, "true_sequential": False,
    }  # fmt: skip


# --- AWQ -------------------------------------------------------------------------------------


def find_awq(tensors: Mapping[str, Any], config: Mapping[str, Any]) -> Found:
    """Weights in AWQ's layout; `config` is the folder's quantization_config."""
    _bits(config, (4,))
    version = str(config.get("version", "gemm")).lower()
    if version != "gemm":
        raise layouts.refuse(
            "quantization_config",
            f"version {version!r} of AWQ is not read. Save it again with version='gemm'",
        )
    weights = {}
    for module in _modules(tensors):
        count, words = _matrix(tensors, f"{module}.qweight")
        groups, out = _matrix(tensors, f"{module}.scales")
        layouts.expect(module, "number of words", words, layouts.num_words(out, 4))
        _check_groups(module, config, groups, count)
        names = {end[1:]: f"{module}{end}" for end in _ENDS[:3]}
        if names["qzeros"] in tensors:
            got = _matrix(tensors, names["qzeros"])
            layouts.expect(module, "qzeros", got, (groups, words))
        elif config.get("zero_point", True):
            raise layouts.refuse(module, "has no qzeros, though zero_point is true")
        else:
            del names["qzeros"]
        weights[f"{module}.weight"] = Weight((out, count), names, read_awq, _DTYPES)
    return Found(weights)


def read_awq(arrays: Arrays) -> QArray:
    """Reads a weight [out, in] from its tensors: qweight, scales and perhaps qzeros."""
    out = arrays["scales"].shape[1]
    codes = lambda words: layouts.signed(_in_order(words, out), 4)
    zeros = arrays.get("qzeros")
    return layouts.integers(
        np.ascontiguousarray(codes(arrays["qweight"]).T),
        np.ascontiguousarray(arrays["scales"].T),
        None if zeros is None else np.ascontiguousarray(codes(zeros).T),
        4,
    )


def write_awq(q: QArray, where: str = "a weight") -> dict[str, np.ndarray]:
    """Returns the tensors of a weight [out, in]: qweight, qzeros, scales.

    Raises:
        ValueError: AWQ's layout cannot say this array.
    """
    _check_writable(q, where, "AWQ", (4,))
    layouts.group_size(q, where)
    if q.shape[0] % 8:
        raise layouts.refuse(where, f"{q.shape[0]} rows do not fill words of eight")
    words = lambda raw: layouts.pack_words(
        _by_word(raw)[..., ORDER].reshape(raw.shape), 4
    )
    return {
        "qweight": words(layouts.unsigned(np.asarray(q.qvalue), 4).T),
        "qzeros": words(_zeros(q, 4).T),
        "scales": layouts.in_half(np.ascontiguousarray(_scale(q).T), where),
    }


def awq_config(size: int) -> dict[str, Any]:
    """Returns what AutoAWQ and its readers want in config.json."""
    return {"quant_method": "awq", "bits": 4, "group_size": size, "zero_point": True,
            "version": "gemm", "modules_to_not_convert": None}  # fmt: skip


def _by_word(raw: np.ndarray) -> np.ndarray:
    return raw.reshape(*raw.shape[:-1], -1, 8)


def _in_order(words: np.ndarray, count: int) -> np.ndarray:
    raw = _by_word(layouts.unpack_words(words, 4, words.shape[-1] * 8))
    return raw[..., np.argsort(ORDER)].reshape(*words.shape[:-1], -1)[..., :count]


# --- both ------------------------------------------------------------------------------------


def _modules(tensors: Mapping[str, Any]) -> list[str]:
    modules = [n.removesuffix(".qweight") for n in tensors if n.endswith(".qweight")]
    for module in modules:
        if f"{module}.scales" not in tensors:
            raise layouts.refuse(module, "has a qweight, but no scales")
    return modules


def _matrix(tensors: Mapping[str, Any], name: str) -> tuple[int, int]:
    if name not in tensors:
        raise layouts.refuse(name, "is missing")
    shape = tuple(tensors[name].shape)
    if len(shape) != 2 or 0 in shape:
        raise layouts.refuse(name, f"has shape {list(shape)}, and should be a matrix")
    return shape


def _bits(config: Mapping[str, Any], known: tuple[int, ...]) -> int:
    bits = config.get("bits")
    if bits not in known:
        raise layouts.refuse(
            "quantization_config",
            f"bits is {bits!r}; read are {', '.join(map(str, known))}",
        )
    return bits


def _check_groups(
    module: str, config: Mapping[str, Any], groups: int, count: int
) -> None:
    size = config.get("group_size", -1)
    if type(size) is not int or size < -1 or size == 0:
        raise layouts.refuse("quantization_config", f"group_size is {size!r}")
    wanted = 1 if size == -1 else -(-count // size)
    if groups != wanted or count % groups:
        raise layouts.refuse(
            module,
            f"{count} columns in groups of {size} should have {wanted} scales each, and "
            f"have {groups}",
        )


def _check_writable(q: QArray, where: str, whose: str, known: tuple[int, ...]) -> int:
    fmt = q.format
    if not layouts.is_signed(fmt, known):
        names = ", ".join(f"int{bits}" for bits in known)
        raise layouts.refuse(
            where, f"{fmt.name} has no place in {whose}'s layout; {names} do"
        )
    return fmt.bits


def _scale(q: QArray) -> np.ndarray:
    scale = np.asarray(q.scale)
    return np.broadcast_to(scale, (q.shape[0], scale.shape[1]))


def _zeros(q: QArray, bits: int) -> np.ndarray:
    """Returns unsigned zeros [out, groups]; half the range where there are none."""
    if q.zero_point is None:
        return np.full(_scale(q).shape, 1 << (bits - 1), np.uint8)
    zero = np.asarray(q.zero_point)
    if zero.dtype != np.asarray(q.qvalue).dtype:
        raise ValueError("a fractional zero point has no place in this layout.")
    return np.broadcast_to(layouts.unsigned(zero, bits), _scale(q).shape)
