"""Hugging Face folders on disk: safetensors, in one file or in shards, and JSON beside them.

    config.json                        what the model is
    model.safetensors                  the weights, or
    model-00001-of-00002.safetensors   shards of them, and
    model.safetensors.index.json       which shard has which tensor

`Folder` opens one: it reads headers alone, holds them against the index, and maps one tensor
at a time into memory. `write_tensors` writes one, tensor after tensor: files get their names
once they are whole, and config.json comes last.

Nothing is ever unpickled: `.bin` and `.pt` files are refused, with what to do about them.
"""

import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from midtread.interop import safetensors, trees

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
PICKLED = (".bin", ".pt", ".pth", ".ckpt")
_MOST_JSON = 100_000_000
SHARD_BYTES = 5_000_000_000  # of one file, as transformers has it


class Tensor(NamedTuple):
    """What a folder says of one of its tensors."""

    shape: tuple[int, ...]
    dtype: np.dtype


# --- reading ----------------------------------------------------------------------------------


class Folder:
    """A folder of safetensors, opened: every header is checked, no tensor is read yet.

    Args:
        path: the folder.

    Raises:
        ValueError: the folder has no weights in safetensors, its config.json or index does
            not read, or a header, the index and the files contradict each other.

    >>> import tempfile
    >>> place = tempfile.mkdtemp()
    >>> write_tensors(place, {"w": np.zeros((2, 3), np.float32)}, {"model_type": "none"})
    >>> folder = Folder(place)
    >>> folder.tensors["w"].shape, folder.config["model_type"]
    ((2, 3), 'none')
    >>> folder.read("w").sum()
    np.float32(0.0)
    """

    def __init__(self, path: Any):
        self.path = pathlib.Path(path)
        self.name = str(path)
        if not self.path.is_dir():
            raise ValueError(f"{path} is not a folder.")
        self.config = read_json(self.path / "config.json")
        self._files = self._open_shards()
        self.tensors: dict[str, Tensor] = {}
        self._shard: dict[str, safetensors.Reader] = {}
        for reader in self._files:
            for name, (dtype, shape, *_) in reader.tensors.items():
                if name in self.tensors:
                    raise ValueError(
                        f"{path}: tensor {name!r} is in two shards, "
                        f"{pathlib.Path(self._shard[name].file).name} and "
                        f"{pathlib.Path(reader.file).name}."
                    )
                self.tensors[name] = Tensor(shape, dtype)
                self._shard[name] = reader
        self._check_index()

    def _open_shards(self) -> list[safetensors.Reader]:
        self._index = read_index(self.path)
        files = sorted(set(self._index.values())) or [_only_file(self.path)]
        return [safetensors.Reader.of(str(self.path / file)) for file in files]

    def _check_index(self) -> None:
        for name, file in self._index.items():
            if name not in self.tensors:
                raise ValueError(
                    f"{self.path}: {INDEX} says that {file} has tensor {name!r}, which it "
                    f"does not. {trees.near(name, self.tensors)}"
                )
            real = pathlib.Path(self._shard[name].file).name
            if real != file:
                raise ValueError(
                    f"{self.path}: {INDEX} says that tensor {name!r} is in {file}, but it "
                    f"is in {real}."
                )
        for name in self.tensors if self._index else ():
            if name not in self._index:
                raise ValueError(
                    f"{self.path}: tensor {name!r} is in a shard, but not in {INDEX}."
                )

    def read(self, name: str) -> np.ndarray:
        """Returns one tensor, mapped into memory: its bytes are fetched where they are used."""
        if name not in self.tensors:
            raise ValueError(
                f"{self.path} has no tensor {name!r}. {trees.near(name, self.tensors)}"
            )
        return self._shard[name].mapped(name)

    @property
    def metadata(self) -> dict[str, str]:
        """What the files say of themselves, taken together."""
        return {k: v for reader in self._files for k, v in reader.metadata.items()}

    @property
    def files(self) -> list[pathlib.Path]:
        """The files that hold the weights, and the index where there is one."""
        files = [pathlib.Path(reader.file) for reader in self._files]
        return [*files, self.path / INDEX] if self._index else files

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        sizes = (np.prod(t.shape) * t.dtype.itemsize for t in self.tensors.values())
        return int(sum(sizes))


def is_folder(path: Any) -> bool:
    """Whether a path looks like a Hugging Face folder: it has a config.json with the kind
    of a model in it. Whether it is a good one is what `Folder` says."""
    file = pathlib.Path(path) / "config.json"
    try:
        config = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError):
        return file.is_file()
    return isinstance(config, dict) and bool(
        {"model_type", "architectures"} & {*config}
    )


def read_json(file: pathlib.Path) -> dict[str, Any]:
    """Returns an object in a JSON file; what does not read as one is refused by name."""
    if not file.is_file():
        raise ValueError(f"{file.parent} has no {file.name}.")
    if file.stat().st_size > _MOST_JSON:
        raise ValueError(
            f"{file} has {file.stat().st_size} bytes: that is no {file.name}."
        )
    try:
        content = json.loads(
            file.read_bytes().decode(), object_pairs_hook=safetensors.no_duplicates
        )
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} does not read as JSON: {error}.") from None
    if not isinstance(content, dict):
        what = type(content).__name__
        raise ValueError(f"{file} should hold an object, not a {what}.")  # noqa: TRY004
    return content


def read_index(path: pathlib.Path) -> dict[str, str]:
    """Returns the file of each tensor, by the index; {} where there is none."""
    if not (path / INDEX).is_file():
        return {}
    weight_map = read_json(path / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{path / INDEX} has no weight_map from tensors to files.")
    for name, file in weight_map.items():
        plain = isinstance(file, str) and file == os.path.basename(file)
        if not plain or not file.endswith(".safetensors"):
            raise ValueError(
                f"{path / INDEX}: tensor {name!r} is said to be in {file!r}, which is not "
                "the name of a .safetensors file in this folder."
            )
        if not (path / file).is_file():
            raise ValueError(
                f"{path} lacks {file}, which {INDEX} names: fetch it again."
            )
    return weight_map


def _only_file(path: pathlib.Path) -> str:
    if (path / SINGLE).is_file():
        return SINGLE
    files = sorted(p.name for p in path.glob("*.safetensors"))
    if len(files) == 1:
        return files[0]
    if files:
        raise ValueError(
            f"{path} has {len(files)} .safetensors files ({files[0]}, ...), but no {INDEX} "
            "that says what is in which: fetch it too."
        )
    pickled = sorted(p.name for p in path.iterdir() if p.suffix in PICKLED)
    if pickled:
        raise ValueError(
            f"{path} has its weights in {pickled[0]}, a pickle, and reading one runs "
            "whatever code is in it. Take the safetensors of the same model, or convert "
            'it where you trust it: python -c "from transformers import '
            "AutoModelForCausalLM as M; M.from_pretrained('<folder>')"
            ".save_pretrained('<new folder>')\"."
        )
    raise ValueError(f"{path} has no .safetensors file.")


# --- writing ----------------------------------------------------------------------------------


def write_tensors(
    path: Any,
    tensors: Mapping[str, Any],
    config: Mapping[str, Any],
    *,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Writes named arrays as a folder, in shards where they are many.

    Args:
        path: a folder that is not there yet, or is empty.
        tensors: arrays by name. A mapping with a method `about` that gives shape and dtype
            (`Floats`) is asked for one array at a time.
        config: what goes into config.json.
        shard_bytes: the most that one file holds, unless a tensor is larger.
    """
    folder = pathlib.Path(path)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{path} is there already: choose a folder that is not.")
    about = getattr(tensors, "about", None) or (
        lambda name: Tensor(tuple(tensors[name].shape), np.dtype(tensors[name].dtype))
    )
    listed = {name: about(name) for name in tensors}
    folder.mkdir(parents=True, exist_ok=True)
    shards = _shards(listed, shard_bytes)
    weight_map = {}
    for number, names in enumerate(shards):
        count = len(shards)
        file = (
            f"model-{number + 1:05}-of-{count:05}.safetensors" if count > 1 else SINGLE
        )
        safetensors.write(
            folder / file,
            {name: listed[name] for name in names},
            (tensors[name] for name in names),
            {"format": "pt"},
        )
        weight_map |= dict.fromkeys(names, file)
    if len(shards) > 1:
        index = {"metadata": {"total_size": _size(listed.values())}}
        write_json(folder / INDEX, {**index, "weight_map": weight_map})
    write_json(folder / "config.json", dict(config))


def _size(tensors: Any) -> int:
    return sum(int(np.prod(t.shape)) * t.dtype.itemsize for t in tensors)


def _shards(listed: Mapping[str, Tensor], most: int) -> list[list[str]]:
    shards, size = [[]], 0
    for name, tensor in listed.items():
        nbytes = _size([tensor])
        if shards[-1] and size + nbytes > most:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += nbytes
    return shards


def write_json(file: pathlib.Path, content: Mapping[str, Any]) -> None:
    """Writes a JSON file whole, or not at all."""
    with safetensors.replacing(str(file)) as out:
        out.write(f"{json.dumps(content, indent=2)}\n".encode())
