"""Export: a model, quantized on the way or quantized already, into a folder of others.

    export(source, path, "w4a16")         compressed-tensors, for vLLM and transformers
    export(source, path, "awq")           AWQ's layout      "gptq"  GPTQ's      "mlx4"  MLX
    export(source, path, "q4_k")          a .gguf file, see gguf_export.py

A source is anything with the names of a Hugging Face folder (interop/huggingface.py): such a
folder, a quantized one, a .gguf file, or a tree of ours under a table of names. A float
matrix is rounded to nearest, in the format that targets.py has under the target's name. What
is quantized already keeps its codes: it is written as it is, or refused.

First everything is looked at: what the target cannot say is refused, or listed, before a
byte is written. Then tensor after tensor is read, quantized and put into files of half a
gigabyte, so memory is that and one tensor. All this happens in `<path>.partial`; what is
done is noted there, so that the same command goes on after a kill, and the folder gets its
name when it is whole.
"""

import contextlib
import dataclasses
import json
import os
import pathlib
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from midtread.interop import (
    compressed_tensors,
    gguf_blocks,
    huggingface,
    layouts,
    mlx,
)
from midtread.interop import safetensors as files
from midtread.interop.huggingface import as_floats
from midtread.interop.targets import (
    COMPRESSED,
    HALF_SCALES,
    ROWS,
    Groups,
    Target,
    config_of,
    quantized,
    scheme_and_tensors,
    spec_of,
    target_of,
    tile_words,
)
from midtread.numerics.formats import FORMATS, dtype_bits
from midtread.numerics.qarray import QArray

FILE_BYTES = 500_000_000  # of a file, and so of what waits to be written
_STATE = "export.json"
_DTYPES = {"bfloat16": np.dtype(jnp.bfloat16), "float16": np.dtype(np.float16)}
# matrices that are looked up or choose experts, and the head: left as they are
LEFT = r".*embed_tokens.*|.*\.wte\..*|lm_head\..*|.*\.(mlp\.gate|gate|router)\.weight|.*norm.*"


# --- the plan --------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Plan:
    """What will be done with each tensor.

    Args:
        weights: names that become codes, in the order of the source.
        plain: names that are copied.
        notes: sentences about what is left in float, and why.
    """

    weights: tuple[str, ...]
    plain: tuple[str, ...]
    notes: tuple[str, ...]


def plan(source: Any, target: Target, skip: Sequence[str] = ()) -> Plan:
    """Looks at every tensor of a source before anything is written.

    Args:
        source: see the top of this file.
        target: from `target_of`.
        skip: regular expressions for names that are left in float.

    Raises:
        ValueError: a weight cannot be said in the target's layout.
    """
    left = re.compile("|".join([LEFT, *skip]))
    weights, plain, several, tables, seen = [], [], [], [], {}
    half = HalfScales()
    for name, about in source.tensors.items():
        is_weight = name.endswith(".weight") and len(about.shape) == 2
        is_left = left.fullmatch(name) is not None
        if is_quantized(source, name):
            if is_left and target.layout != "MLX":
                plain.append(name)
                tables.append(name)
                continue
            seen.setdefault(_check_codes(source, name, target), name)
            if target.layout in HALF_SCALES:
                half.look_at(source, name, 1, target.qtype)
            weights.append(name)
        elif is_weight and not is_left:
            _check_groups(source, name, about.shape, target)
            if target.layout in HALF_SCALES:
                half.look_at(source, name, int(target.tile), target.qtype)
            weights.append(name)
        else:
            plain.append(name)
            if len(about.shape) == 3:
                several.append(name)
    kinds = {
        (s.bits, s.size): name for s, name in seen.items() if isinstance(s, Groups)
    }
    if len(kinds) > 1 and target.layout in ("GPTQ", "AWQ"):
        (one, a), (other, b), *_ = kinds.items()
        raise ValueError(
            f"{source.name}: {a!r} has {one[0]} bits in groups of {one[1]}, {b!r} {other[0]} "
            f"in groups of {other[1]}; {target.layout} has one kind for all."
        )
    if not weights:
        raise ValueError(f"{source.name} holds no matrix that {target.name} is for.")
    notes = half.notes()
    if several:
        notes.append(
            f"{len(several)} tensors of several matrices stay in float ({several[0]}, ...): "
            f"{target.layout} holds matrices one by one."
        )
    if tables:
        notes.append(
            f"{', '.join(tables)}: codes become floats, {target.layout} has layers' alone."
        )
    return Plan(tuple(weights), tuple(plain), tuple(notes))


class HalfScales:
    """Looks at weights for a layout with scales in float16 before any is written.

    A scale that float16 does not reach is refused. Those that it rounds coarsely, or to 0,
    belong to groups of tiny numbers, which real models have: they are listed.
    """

    def __init__(self) -> None:
        self.coarse: dict[str, int] = {}

    def look_at(self, source: Any, name: str, size: int, qtype: str) -> None:
        """Looks at one weight, that is or will be in groups of `size` columns.

        Raises:
            ValueError: a scale is beyond float16.
        """
        array = source.read(name)
        if isinstance(array, QArray):
            scale = np.asarray(array.scale)
        else:
            bits = dtype_bits(FORMATS[qtype].dtype)
            scale = layouts.largest_of_groups(array, size) / np.float32(1 << (bits - 1))
        layouts.in_half(scale, f"{source.name}: {name}")
        if count := layouts.num_coarse(scale):
            self.coarse[name] = count

    def notes(self) -> list[str]:
        """Returns a sentence about scales that lose, or none."""
        if not self.coarse:
            return []
        first, total = next(iter(self.coarse)), sum(self.coarse.values())
        numbers = f"{total} groups of numbers below {layouts.COARSE * 8:.0e}"
        return [
            f"{numbers} ({first}, ...): scales are float16 there, and coarse for them, or 0."
        ]


def is_quantized(source: Any, name: str) -> bool:
    """Whether a source has a tensor in codes."""
    check = getattr(source, "is_quantized", None)
    return check(name) if check else name in getattr(source, "weights", ())


def _check_groups(
    source: Any, name: str, shape: tuple[int, ...], target: Target
) -> None:
    if target.layout in HALF_SCALES and (shape[0] % 8 or shape[1] % 8):
        raise ValueError(
            f"{source.name}: {name!r} of shape {list(shape)} does not fill the words of "
            f"eight codes that {target.layout} has. {_leave(name)}."
        )
    size = target.tile[1] if isinstance(target.tile, tuple) else target.tile
    if size == "row" or shape[1] % int(size) == 0:
        return
    known = mlx.SIZES if target.layout == "MLX" else (16, 32, 64, 128, 256)
    fits = [n for n in known if shape[1] % n == 0]
    is_fixed = target.qtype in ("nvfp4", "mxfp4") or isinstance(target.tile, tuple)
    hint = f"Write group_size={fits[-1]}" if fits and not is_fixed else _leave(name)
    raise ValueError(
        f"{source.name}: {name!r} has {shape[1]} columns, which are not "
        f"{tile_words(target)}, as {target.name} has them. {hint}."
    )


def _leave(name: str) -> str:
    return f"Leave it in float, skip=[{re.escape(name)!r}] of interop.export, or choose another format"


def _check_codes(source: Any, name: str, target: Target) -> Any:
    """Returns the scheme of a weight that is quantized already, if it is what the target is
    called."""
    q, module = source.read(name), name.removesuffix(".weight")
    if not np.isfinite(np.asarray(q.scale, np.float32)).all():
        raise ValueError(
            f"{source.name}: {name!r} has scales that are NaN or infinite."
        )
    why = f"which is not {target.name} ({target.qtype}, {tile_words(target)})."
    if q.format.name == target.qtype:
        try:
            scheme = scheme_and_tensors(q, target, module)[0]
        except ValueError as error:
            why = f"and {error}"
        else:
            if _is_called(q, target):
                return scheme
    names = [
        row.name for row in ROWS if _is_called(q, row) and _can_hold(q, row, module)
    ]
    size = f" with group_size={q.scale_tile_shape[1]}" if target.name in names else ""
    if kind := gguf_blocks.kind_of(q):
        names.append("gguf_mxfp4" if kind == "MXFP4" else kind.lower())
    raise ValueError(
        f"{source.name}: {name!r} is quantized already, {q!r}, {why} "
        + (f"Write format={' or '.join(names)}{size}" if names else "No format here is")
        + ", or take the float model."
    )


def _is_called(q: QArray, target: Target) -> bool:
    """Whether codes are of the format, and in the groups, that a target's name says."""
    rows, columns = q.scale_tile_shape
    is_row = columns == q.shape[1]
    if q.format.name != target.qtype:
        return False
    if target.layout == COMPRESSED and (q.zero_point is None) != (
        target.calibration == "absmax"
    ):
        return False
    if target.tile == "row":
        return is_row
    if isinstance(target.tile, tuple):
        return rows > 1 and not is_row
    return target.is_free or columns == target.tile


def _can_hold(q: QArray, target: Target, module: str) -> bool:
    try:
        scheme_and_tensors(q, target, module)
    except ValueError:
        return False
    return True


# --- writing ---------------------------------------------------------------------------------


@dataclasses.dataclass
class Progress:
    """How far an export is, for the terminal."""

    done: int = 0
    total: int = 0
    read: int = 0
    written: int = 0
    started: float = dataclasses.field(default_factory=time.perf_counter)

    def __str__(self) -> str:
        seconds = max(time.perf_counter() - self.started, 1e-9)
        return (
            f"{self.done}/{self.total} tensors, {self.read / 1e6:,.0f} MB read, "
            f"{self.written / 1e6:,.0f} MB written, {self.read / seconds / 1e6:,.0f} MB/s"
        )


def export(
    source: Any,
    path: Any,
    format: str,
    *,
    group_size: int | None = None,
    skip: Sequence[str] = (),
    config: Mapping[str, Any] | None = None,
    also: Sequence[Any] = (),
    say: Callable[[str], None] = lambda text: None,
) -> pathlib.Path:
    """Writes a model quantized, as a folder (or a .gguf file) that others read.

    Args:
        source: a Folder, what `open_model` gives, or anything like it.
        path: of the folder; it must not be there.
        format: a name of `targets.TARGETS`, or a kind of block for GGUF.
        group_size: columns that share a scale, instead of the format's own.
        skip: regular expressions for tensors that stay as they are.
        config: instead of the source's config.json.
        also: files to copy along, such as the tokenizer's.
        say: what is told how far it is.

    Returns:
        The path.

    Raises:
        ValueError: the source, the format or the path is not one this can be done with.
    """
    from midtread.interop import gguf_export

    path, about = pathlib.Path(path), {**(source.config if config is None else config)}
    is_gguf = format in gguf_export.KINDS
    if is_gguf and group_size is not None:
        raise ValueError(
            f"group_size={group_size}: blocks of {format} have a size of their own. Drop it."
        )
    target = None if is_gguf else target_of(format, group_size)
    if path.exists():
        raise ValueError(f"{path} is there already: choose another name.")
    if target is None:
        return gguf_export.write(source, path, format, skip, about, also, say)
    planned = plan(source, target, skip)
    for note in planned.notes:
        say(note)
    left = [
        name.removesuffix(".weight")
        for name in planned.plain
        if name.endswith(".weight") and len(source.tensors[name].shape) == 2
    ]
    partial = path.with_name(f"{path.name}.partial")
    work = _Work.begin(partial, _fingerprint(source, target, planned))
    if work.files:
        say(f"{partial}: going on after {work.num_done} tensors")
    with nothing_left(lambda: shutil.rmtree(partial)):
        schemes = _write_files(source, target, planned, work, say)
    index = work.finish()
    about.pop("quantization_config", None)
    about.pop("quantization", None)
    about |= config_of(target, schemes, left)
    if index:
        huggingface.write_json(partial / huggingface.INDEX, index)
    for file in also:
        if pathlib.Path(file).is_file():
            shutil.copy(file, partial / pathlib.Path(file).name)
    huggingface.write_json(partial / "config.json", about)
    (partial / _STATE).unlink()
    partial.rename(path)
    return path


def _fingerprint(source: Any, target: Target, planned: Plan) -> dict[str, Any]:
    """Returns what must be the same for an export to go on."""
    listed = [f"{n} {t.dtype}{list(t.shape)}" for n, t in source.tensors.items()]
    return {
        "source": source.name,
        "files": stamp(source),
        "target": json.loads(json.dumps(target)),
        "weights": list(planned.weights),
        "tensors": listed,
    }


def stamp(source: Any) -> list[list[Any]]:
    """Returns name, size and time of the files that a source reads."""
    stats = [(str(file), os.stat(file)) for file in getattr(source, "files", ())]
    return [[name, about.st_size, about.st_mtime_ns] for name, about in stats]


def _write_files(source, target: Target, planned: Plan, work: "_Work", say):
    """Writes tensor after tensor, and returns the scheme of each module where the layout has
    one."""
    order = list(source.tensors)
    spec, weights = spec_of(target), frozenset(planned.weights)
    stored = source.config.get("dtype", source.config.get("torch_dtype"))
    dtype = _DTYPES.get(str(stored), np.dtype(np.float32))
    progress = Progress(work.num_done, len(order))
    schemes: dict[str, Any] = {m: _scheme(s) for m, s in work.schemes.items()}
    waiting: dict[str, np.ndarray] = {}
    pending: dict[str, Any] = {}
    done = work.num_done
    for i, name in enumerate(order[done:], done + 1):
        array = source.read(name)
        progress.read += sum(np.asarray(x).nbytes for x in jax.tree.leaves(array))
        if name in weights:
            module = name.removesuffix(".weight")
            with refused_by_name(f"{source.name}: {name!r}"):
                q = array if isinstance(array, QArray) else quantized(array, spec)
            scheme, tensors = scheme_and_tensors(q, target, module)
            waiting |= tensors
            pending[module] = scheme
            del q, tensors
        else:
            is_code = isinstance(array, QArray)
            waiting[name] = as_floats(array, dtype) if is_code else np.asarray(array)
        del array
        progress.done = i
        size = sum(a.nbytes for a in waiting.values())
        if size >= FILE_BYTES or i == len(order):
            work.write(waiting, i, pending)
            progress.written += size
            schemes |= pending
            waiting, pending = {}, {}
            say(f"{progress}")
    return schemes


@contextlib.contextmanager
def refused_by_name(where: str) -> Iterator[None]:
    """Puts the name of a tensor before what is wrong with it."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{where} {error}") from None


@contextlib.contextmanager
def nothing_left(remove: Callable[[], None]) -> Iterator[None]:
    """Removes what was begun, if it is refused: it can never be whole. After a kill it stays,
    to go on from."""
    try:
        yield
    except ValueError:
        remove()
        raise


def _scheme(fields: list) -> Any:
    """Returns a scheme again, from JSON."""
    is_groups = isinstance(fields[0], int)
    return Groups(*fields) if is_groups else compressed_tensors.Scheme(*fields)


class _Work:
    """The folder in the making, and its notes of what is done."""

    def __init__(self, folder: pathlib.Path, state: dict[str, Any]):
        self.folder, self.state = folder, state

    @classmethod
    def begin(cls, folder: pathlib.Path, fingerprint: dict[str, Any]) -> "_Work":
        """Where an export of the same was cut off, or a new one."""
        try:
            state = json.loads((folder / _STATE).read_text())
        except (OSError, ValueError):
            state = {}
        if state.get("of") != fingerprint or not all(
            (folder / file).is_file() for file, _ in state.get("files", ())
        ):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            state = {"of": fingerprint, "files": [], "done": 0, "schemes": {}}
        whole = {_STATE, *(file for file, _ in state["files"])}
        for file in folder.iterdir():
            if file.name not in whole:  # what a kill had left of the next one
                file.unlink()
        return cls(folder, state)

    @property
    def files(self) -> list:
        return self.state["files"]

    @property
    def num_done(self) -> int:
        return self.state["done"]

    @property
    def schemes(self) -> dict[str, Any]:
        return self.state["schemes"]

    def write(self, arrays: Mapping[str, np.ndarray], done: int, schemes) -> None:
        file = f"part-{len(self.files) + 1:05}.safetensors"
        about = {k: huggingface.Tensor(a.shape, a.dtype) for k, a in arrays.items()}
        files.write(self.folder / file, about, arrays.values(), {"format": "pt"})
        self.files.append([file, {k: a.nbytes for k, a in arrays.items()}])
        self.state |= {"done": done, "schemes": {**self.schemes, **schemes}}
        huggingface.write_json(self.folder / _STATE, self.state)

    def finish(self) -> dict[str, Any]:
        """Gives the files the names that others look for; the index, {} for one file."""
        count = len(self.files)
        name = lambda i: f"model-{i:05}-of-{count:05}.safetensors"
        names = (
            [name(i) for i in range(1, count + 1)]
            if count > 1
            else ["model.safetensors"]
        )
        weight_map, total = {}, 0
        for (file, sizes), new in zip(self.files, names):
            if (self.folder / file).exists():
                os.replace(self.folder / file, self.folder / new)
            weight_map |= dict.fromkeys(sizes, new)
            total += sum(sizes.values())
        if count == 1:
            return {}
        return {"metadata": {"total_size": total}, "weight_map": weight_map}
