"""GGUF export: a model as one file for llama.cpp.

Matrices become blocks of the kind asked for; embedding and head become Q8_0 (Q6_K beside
K-quants), norms and biases F32, routers F32. Matrices whose rows are not a number of blocks
(576 columns and blocks of 256) take the nearest kind of blocks of 32, and are listed. Codes
that are codes already are written as they are where a kind of block holds them, with their
scales rounded to float16, and refused elsewhere.

The header is written first, then tensor after tensor; after a kill the same command goes on
behind the last whole tensor, if the files that it reads are those noted beside the file in the
making. The file has its name when it is whole.
"""

import json
import os
import pathlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from midtread.interop import gguf, gguf_blocks, gguf_models, gguf_tokenizer, layouts
from midtread.interop.export import (
    HalfScales,
    Progress,
    is_quantized,
    nothing_left,
    refused_by_name,
    stamp,
)
from midtread.numerics.qarray import QArray

# the name to ask for -> the kind of block
KINDS = {
    block.name.lower() if block.name != "MXFP4" else "gguf_mxfp4": block.name
    for block in gguf_blocks.ROWS
    if block.encode
}
_SMALLER = {"Q4_K": "Q4_1", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}  # blocks of 32 instead
_FILE_TYPES = {"Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q5_0": 8, "Q5_1": 9, "Q4_K": 14,
               "Q5_K": 16, "Q6_K": 18, "MXFP4": 38}  # fmt: skip
_TABLES = ("token_embd.weight", "output.weight")


def write(
    source: Any,
    path: pathlib.Path,
    format: str,
    skip: Sequence[str],
    about: Mapping[str, Any],
    also: Sequence[Any],
    say: Callable[[str], None],
) -> pathlib.Path:
    """Writes a model as a .gguf file; see `export.export`, whose arguments these are. `about`
    is its config.json."""
    kind = KINDS[format]
    if path.suffix != ".gguf":
        raise ValueError(f"{path}: a file for llama.cpp is called something.gguf.")
    model = gguf_models.BY_TYPE.get(about.get("model_type", ""))
    if model is None:
        known = ", ".join(gguf_models.BY_TYPE)
        raise ValueError(
            f"{source.name}: model_type {about.get('model_type')!r} is not written to GGUF; "
            f"{known} are."
        )
    about = gguf_models.flat(about, source.name)
    gguf_models.check_keys(about, model, source.name)
    names = _names(source, model)
    kinds, odd = _kinds(source, names, kind, skip)
    for note in (*odd, *_half_scales(source, names, kinds)):
        say(note)
    metadata = metadata_of(about, model, source, kind)
    metadata |= gguf_tokenizer.metadata(also, about.get("vocab_size", 0), say)
    head = gguf.header(metadata, kinds)
    partial = path.with_name(f"{path.name}.partial")
    partial.parent.mkdir(parents=True, exist_ok=True)
    notes, read_from = partial.with_name(f"{partial.name}.json"), _files(source)
    if not notes.is_file() or notes.read_bytes() != read_from:
        partial.unlink(missing_ok=True)
        notes.write_bytes(read_from)
    done = _resume(partial, head, kinds)
    if done:
        say(f"{partial}: going on after {done} tensors")
    progress = Progress(done, len(kinds))
    with (
        nothing_left(lambda: [file.unlink() for file in (partial, notes)]),
        open(partial, "r+b" if done else "wb") as file,
    ):
        if not done:
            file.write(head)
        file.seek(0, os.SEEK_END)
        for tensor, (block, shape) in list(kinds.items())[done:]:
            raw, read = _bytes(source, names[tensor], block, model, about)
            assert raw.nbytes == gguf.nbytes(block, shape), tensor
            file.write(raw.reshape(-1).view(np.uint8).data)
            file.write(bytes(-raw.nbytes % 32))
            file.flush()
            progress.done += 1
            progress.read, progress.written = (
                progress.read + read,
                progress.written + raw.nbytes,
            )
            if progress.done % 20 == 0 or progress.done == len(kinds):
                say(f"{progress}")
    os.replace(partial, path)
    notes.unlink()
    return path


def _files(source: Any) -> bytes:
    """Returns name, size and time of the files that a source reads, as they are noted."""
    return json.dumps(stamp(source)).encode()


def _names(source: Any, model: gguf_models.Kind) -> dict[str, list[str]]:
    """Returns llama.cpp's tensors, each with the names it is made of: one, or every expert's."""
    experts_of: dict[str, dict[int, str]] = {}
    for name in source.tensors:
        target = gguf_models.to_tensor(name, model)
        if target is None:
            raise ValueError(
                f"{source.name}: {name!r} has no name in llama.cpp's {model.name}."
            )
        tensor, expert = target
        experts_of.setdefault(tensor, {})[expert or 0] = name
    return {k: [names[e] for e in sorted(names)] for k, names in experts_of.items()}


def _kinds(source, names: Mapping[str, list[str]], kind: str, skip: Sequence[str]):
    """Returns kind and shape of every tensor; sentences about those that differ from `kind`."""
    left = re.compile("|".join(skip) or r"(?!)")
    kinds: dict[str, tuple[str, tuple[int, ...]]] = {}
    odd: dict[str, list[str]] = {}
    coded: dict[str, list[str]] = {}
    for tensor, parts in names.items():
        shape = source.tensors[parts[0]].shape
        if tensor.endswith("_exps.weight"):
            shape = (len(parts), *shape)
        wanted = kind
        if tensor in _TABLES:
            wanted = "Q6_K" if kind.endswith("_K") else "Q8_0"
        if len(shape) == 1 or "ffn_gate_inp" in tensor or left.fullmatch(parts[0]):
            kinds[tensor] = ("F32", shape)
            continue
        if is_quantized(source, parts[0]):
            exact = gguf_blocks.kind_of(source.read(parts[0]))
            if exact is None:
                raise layouts.refuse(
                    f"{source.name}: {parts[0]}",
                    f"{source.read(parts[0])!r} is in no kind of block of GGUF. Export the "
                    "float model, or quantize in groups of 32",
                )
            kinds[tensor] = (exact, shape)
            if tensor not in _TABLES:
                coded.setdefault(exact, []).append(tensor)
            continue
        if shape[-1] % gguf_blocks.BLOCKS[wanted].size and wanted in _SMALLER:
            wanted = _SMALLER[wanted]
            odd.setdefault(wanted, []).append(tensor)
        if shape[-1] % gguf_blocks.BLOCKS[wanted].size:
            wanted = "F16"
            odd.setdefault(wanted, []).append(tensor)
        kinds[tensor] = (wanted, shape)
    if coded and kind not in coded:
        first = next(iter(coded))
        name = next(name for name, block in KINDS.items() if block == first)
        raise layouts.refuse(
            f"{source.name}: {names[coded[first][0]][0]}",
            f"its codes go into blocks of {first} as they are, not of {kind}. Write "
            f"format={name}, or take the float model",
        )
    notes = [
        f"{len(tensors)} tensors stay {other}, as their codes are: {tensors[0]}, ..."
        for other, tensors in coded.items()
        if other != kind
    ]
    notes += [
        f"{len(tensors)} tensors become {other}: {shape_words(source, names, tensors[0])}."
        for other, tensors in odd.items()
    ]
    return kinds, notes


def _half_scales(source, names: Mapping[str, list[str]], kinds: Mapping) -> list[str]:
    """Refuses scales that blocks do not hold, and lists those that lose there."""
    half = HalfScales()
    for tensor, (kind, _) in kinds.items():
        block = gguf_blocks.BLOCKS.get(kind)
        if block is not None and kind != "MXFP4":  # its scales are powers of two
            for name in names[tensor]:
                half.look_at(source, name, block.tile, block.qtype)
    return half.notes()


def shape_words(source: Any, names: Mapping[str, list[str]], tensor: str) -> str:
    shape = source.tensors[names[tensor][0]].shape
    return (
        f"{tensor} has rows of {shape[-1]}, which are no number of the blocks asked for"
    )


def _resume(partial: pathlib.Path, head: bytes, kinds: Mapping) -> int:
    """Returns how many whole tensors a file in the making has, and cuts off what follows
    them."""
    if not partial.is_file() or partial.stat().st_size < len(head):
        return 0
    with open(partial, "r+b") as file:
        if file.read(len(head)) != head:
            return 0
        size, end, done = partial.stat().st_size, len(head), 0
        for kind, shape in kinds.values():
            after = end + -(-gguf.nbytes(kind, shape) // 32) * 32
            if after > size:
                break
            end, done = after, done + 1
        file.truncate(end)
    return done


def _bytes(
    source, names: list[str], kind: str, model, config
) -> tuple[np.ndarray, int]:
    """Returns a tensor's bytes, and how many were read for it."""
    pieces, read = [], 0
    for name in names:
        array = source.read(name)
        heads = gguf_models.turned_heads(model, name, config)
        if heads:
            array = gguf.neighbours_turned(array, heads)
        if isinstance(array, QArray) and kind in gguf_blocks.BLOCKS:
            pieces.append(gguf_blocks.write_codes(array))
            read += pieces[-1].nbytes
            continue
        read += np.asarray(array).nbytes
        if model.norm_offset and name.endswith("norm.weight"):
            array = np.asarray(array, np.float32) + np.float32(model.norm_offset)
        with refused_by_name(f"{source.name}: {name!r}"):
            pieces.append(encoded(np.asarray(array), kind))
    return np.concatenate([m.reshape(-1).view(np.uint8) for m in pieces]), read


def encoded(x: np.ndarray, kind: str) -> np.ndarray:
    """Floats as a tensor of some kind; some rows at a time."""
    if kind not in gguf_blocks.BLOCKS:
        return x.astype(next(d for name, d in gguf.PLAIN.values() if name == kind))
    block = gguf_blocks.BLOCKS[kind]
    assert block.encode is not None
    flat = x.reshape(-1, block.size)
    step = gguf_blocks.AT_ONCE // block.size
    pieces = [
        block.encode(flat[i : i + step].astype(np.float32))
        for i in range(0, len(flat), step)
    ]
    return np.concatenate(pieces)


def metadata_of(
    config: Mapping[str, Any], model, source: Any, kind: str
) -> dict[str, Any]:
    """Returns the keys that a config.json amounts to, see `gguf_models.flat`."""
    out: dict[str, Any] = {
        "general.architecture": model.name,
        "general.name": str(
            config.get("_name_or_path") or pathlib.Path(source.name).stem
        ),
        "general.quantization_version": 2,
        "general.file_type": _FILE_TYPES[kind],
    }
    for key, name in gguf_models.CONFIG.items():
        value = config.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool):
            is_float = key in (
                "attention.layer_norm_rms_epsilon",
                "rope.freq_base",
            ) or ("softcapping" in key)
            out[f"{model.name}.{key}"] = float(value) if is_float else int(value)
    size = gguf_models.head_dim(config)
    share = config.get("partial_rotary_factor", 1.0)
    out[f"{model.name}.rope.dimension_count"] = int(size * share)
    out[f"{model.name}.attention.key_length"] = size
    out[f"{model.name}.attention.value_length"] = size
    out[f"{model.name}.vocab_size"] = source.tensors["model.embed_tokens.weight"].shape[
        0
    ]
    return out
