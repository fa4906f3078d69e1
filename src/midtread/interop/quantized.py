"""Quantized models of others, opened: a folder or a .gguf file that says QArray.

`open_model(path)` looks at what a path is and gives a `Source` of interop/huggingface.py,
with the names that the float model's tensors have: whatever reads a float folder reads a
quantized one the same way, and gets codes with their scales where those are.

    source = open_model("Qwen3-8B-AWQ")
    source.config                          config.json
    source.read("model.layers.0.mlp.up_proj.weight")        QArray(int4/128 ...)
    source.read("model.norm.weight")                        an array
    source.notes                           what the folder asks for and is not done here

Which layout a folder is in, its config.json says. `ROWS` is the table of all of them, and
the documentation's table is made from it.
"""

import os
import pathlib
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from midtread.interop import (
    bitsandbytes,
    compressed_tensors,
    gptq,
    huggingface,
    layouts,
    mlx,
    published,
    torchao,
)
from midtread.interop.layouts import Found
from midtread.numerics.qarray import QArray


class Layout(NamedTuple):
    """One layout of safetensors folders.

    Args:
        key: of config.json, that says how it is quantized.
        method: `quant_method` there; "" where there is only one.
        find: the weights it finds in a folder.
        formats: what its codes are here.
        writes: whether we write it.
    """

    name: str
    key: str
    method: str
    find: Callable[[huggingface.Folder, Mapping[str, Any]], Found]
    formats: tuple[str, ...]
    writes: bool


def _by_names(find: Callable) -> Callable:
    return lambda folder, config: find(folder.tensors, config)


def _with_tensors(find: Callable) -> Callable:
    return lambda folder, config: find(folder.tensors, config, folder.read)


_CONFIG = "quantization_config"
ROWS = [
    #      name                  key            method                find                                        formats  writes
    Layout("compressed-tensors", _CONFIG, "compressed-tensors", _by_names(compressed_tensors.find),
           ("int2", "int3", "int4", "int5", "int6", "int7", "int8", "float8_e4m3fn", "nvfp4", "mxfp4"), True),
    Layout("GPTQ", _CONFIG, "gptq", _by_names(gptq.find_gptq), ("int2", "int3", "int4", "int8"), True),
    Layout("AWQ", _CONFIG, "awq", _by_names(gptq.find_awq), ("int4",), True),
    Layout("DeepSeek fp8", _CONFIG, "fp8", _by_names(published.find_fp8), ("float8_e4m3fn",), False),
    Layout("gpt-oss mxfp4", _CONFIG, "mxfp4", _by_names(published.find_mxfp4), ("mxfp4",), False),
    Layout("bitsandbytes", _CONFIG, "bitsandbytes", _with_tensors(bitsandbytes.find), ("nf4", "int8"), False),
    Layout("torchao", _CONFIG, "torchao", torchao.find,
           ("int2", "int3", "int4", "int5", "int6", "int7", "int8", "float8_e4m3fn", "mxfp8", "mxfp4", "nvfp4"), False),
    Layout("MLX", "quantization", "", _by_names(mlx.find),
           ("int2", "int3", "int4", "int5", "int6", "int8", "mxfp4"), True),
]  # fmt: skip


class QuantizedFolder:
    """A folder whose weights someone has quantized, by the names of the float model.

    Args:
        folder: the folder, opened.
        findings: what its layout finds in it.
    """

    def __init__(self, folder: huggingface.Folder, findings: Found):
        self.folder, self.name, self.config = folder, folder.name, folder.config
        self.weights, self.notes = findings.weights, findings.notes
        self.activations = findings.activations
        for weight in self.weights.values():
            weight.check_dtypes(folder.tensors)
        used = {n for w in self.weights.values() for n in w.tensors.values()}
        extra = _leftovers(folder.tensors, used | findings.unused)
        if extra:
            raise layouts.refuse(
                folder.name, f"tensor {min(extra)!r} belongs to no weight that is read"
            )
        self.tensors = {
            name: tensor
            for name, tensor in folder.tensors.items()
            if name not in used and name not in findings.unused
        }
        for name, weight in self.weights.items():
            about = huggingface.Tensor(weight.shape, np.dtype(np.float32))
            self.tensors[name] = about

    @property
    def files(self) -> list[pathlib.Path]:
        """The files that hold the weights."""
        return self.folder.files

    def kind(self, name: str) -> Any:
        """Returns what tensors of one format have in common."""
        if name not in self.weights:
            return "float"
        parts = self.weights[name].tensors
        return sorted((role, *self.folder.tensors[n]) for role, n in parts.items())

    def read(self, name: str) -> QArray | np.ndarray:
        """Returns a tensor: a QArray of numpy arrays where it is quantized, an array
        elsewhere."""
        if name not in self.weights:
            return self.folder.read(name)
        weight = self.weights[name]
        arrays = {role: self.folder.read(n) for role, n in weight.tensors.items()}
        try:
            q = weight.read(arrays)
        except (ValueError, TypeError, KeyError, IndexError) as error:
            what = str(error).rstrip(".")
            raise layouts.refuse(f"{self.name}: {name}", what) from error
        layouts.expect(f"{self.name}: {name}", "shape", tuple(q.shape), weight.shape)
        return q


_PARTS = ("weight_packed", "weight_shape", "weight_zero_point", "weight_g_idx",
          "weight_global_scale", "qweight", "qzeros", "absmax", "quant_map",
          "_weight_qdata", "_weight_scale", "_weight_zero_point", "_weight_per_tensor_scale")  # fmt: skip


def _leftovers(tensors: Mapping[str, Any], used: set[str] | frozenset[str]) -> set[str]:
    """Returns parts of quantized weights that no weight is made of."""
    return {n for n in tensors if n.rpartition(".")[2] in _PARTS and n not in used}


def is_mixed(source: Any) -> bool:
    """Whether layers of a source differ in format, so that they cannot be stacked."""
    if not hasattr(source, "kind"):
        return False
    seen: dict[str, Any] = {}
    for name in source.tensors:
        kind = source.kind(name)
        if seen.setdefault(re.sub(r"\.\d+\.", ".*.", name), kind) != kind:
            return True
    return False


def open_model(path: Any) -> Any:
    """Returns a model of others, whatever they wrote it in: a Source of interop/huggingface.py.

    Args:
        path: a Hugging Face folder, float or quantized, or a .gguf file.

    Returns:
        A source with `config`, `tensors`, `read` and `notes`.

    Raises:
        ValueError: the path is neither, or its layout is not known or damaged.
    """
    if os.fspath(path).endswith(".gguf"):
        from midtread.interop.gguf_models import GGUFModel

        return GGUFModel(path)
    return open_quantized(huggingface.Folder(path))


def open_quantized(folder: huggingface.Folder) -> Any:
    """Returns a folder as a Source: itself where it is float."""
    for key in (_CONFIG, "quantization"):
        config = folder.config.get(key)
        if config is None:
            continue
        if not isinstance(config, Mapping):
            raise layouts.refuse(folder.name, f"{key} of config.json is not an object")
        method = str(config.get("quant_method", "")) if key == _CONFIG else ""
        if (
            key == _CONFIG
            and not method
            and "bits" in config
            and "group_size" in config
        ):
            method, key = "", "quantization"  # mlx-lm writes both, the same
        rows = [row for row in ROWS if (row.key, row.method) == (key, method)]
        if not rows:
            known = ", ".join(row.method for row in ROWS if row.method)
            raise layouts.refuse(
                folder.name,
                f"quant_method {method!r} is not read; {known} are, and MLX",
            )
        try:
            return QuantizedFolder(folder, rows[0].find(folder, config))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            if str(error).startswith(folder.name):
                raise
            what = str(error).rstrip(".")
            if not isinstance(error, ValueError):  # not what the key holds elsewhere
                what = f"{key} of config.json does not read: {what}"
            raise layouts.refuse(folder.name, what) from error
    return folder
