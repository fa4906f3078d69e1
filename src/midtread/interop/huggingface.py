"""Hugging Face folders: their weights into any tree, and a tree back into such a folder.

A folder is `config.json` and safetensors, in one file or in shards with an index:

    config.json                        what the model is
    model.safetensors                  the weights, or
    model-00001-of-00002.safetensors   shards of them, and
    model.safetensors.index.json       which shard has which tensor

`Folder` opens one: it reads headers alone, and maps one tensor at a time into memory. What
leads from one set of names to the other is a table with one `Row` per array of the tree:

    Row("embed.weight", "token_embedder/embedding")
    Row("layers.{n}.q.weight", "layers/query/kernel", {"n": range(32)}, turned=True)
    Row("layers.{n}.qkv.weight", "layers/key/kernel", {"n": range(32)}, turned=True,
        part=slice(64, 96))

A word in braces counts. Where the path has it too, every number is an array of its own;
where it has not, the arrays are stacked, in the order of the words in the name: the second
row makes one array [32, in, out]. `turned` exchanges the last two axes: torch keeps
[out, in], Flax [in, out]. `part` takes some rows of a tensor; all rows of the table that
name a tensor must take all of it between them.

`read` goes from a folder to a tree, array by array, `write` back (`Arrays` and `Tree` do
it on demand, so that nothing is in memory twice). A tensor that no row
names, a row without its tensor, and a tensor that is taken in part are refused by name, in
both directions. Anything with `tensors` and `read` is a folder to them, so a reader of
quantized files plugs in here: it says QArray where a folder says array, and codes are
turned, cut and stacked with their scales.

Nothing is ever unpickled: `.bin` and `.pt` files are refused, with what to do about them.
"""

import dataclasses
import itertools
import json
import os
import pathlib
import re
import string
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from midtread.interop import safetensors, trees
from midtread.numerics.qarray import QArray, dequantize

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
PICKLED = (".bin", ".pt", ".pth", ".ckpt")
_MOST_JSON = 100_000_000
SHARD_BYTES = 5_000_000_000  # of one file, as transformers has it


class Tensor(NamedTuple):
    """What a folder says of one of its tensors."""

    shape: tuple[int, ...]
    dtype: np.dtype


class Source(Protocol):
    """What `read` reads from: names with shapes, and the arrays one by one."""

    name: str  # to call it by, in errors

    @property
    def tensors(self) -> Mapping[str, Tensor]: ...

    def read(self, name: str) -> Any:
        """The tensor: an array, or a QArray of the same shape."""
        ...


# --- folders ----------------------------------------------------------------------------------


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
        """One tensor, mapped into memory: its bytes are fetched where they are used."""
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
    """An object in a JSON file; what does not read as one is refused by name."""
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
    """Tensor to file of the index; {} where there is none."""
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


# --- the table --------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Row:
    """One array of a tree, and the tensors it is made of.

    Args:
        name: of the tensors; words in braces count: "layers.{layer}.q.weight".
        path: of the array, joined by slashes; its words in braces are among the name's.
        counts: for every word in braces, its numbers: `{"layer": range(32)}`.
        turned: the last two axes of the tensor are exchanged.
        part: what of the tensor's axis `axis` is taken; None: all of it.
        axis: see `part`.

    >>> row = Row("h.{i}.w", "layers/kernel", {"i": range(2)}, turned=True)
    >>> list(row.places())
    [('h.0.w', 'layers/kernel', (0,)), ('h.1.w', 'layers/kernel', (1,))]
    """

    name: str
    path: str
    counts: Mapping[str, range] = dataclasses.field(default_factory=dict)
    turned: bool = False
    part: slice | None = None
    axis: int = 0

    def __post_init__(self):
        words = _words(self.name)
        for word in (*words, *_words(self.path)):
            if word not in self.counts or word not in words:
                raise ValueError(
                    f"{self.name!r} to {self.path!r}: {word!r} needs numbers in counts, "
                    "and a place in the name."
                )

    def places(self) -> Iterator[tuple[str, str, tuple[int, ...]]]:
        """(tensor, path, where in the stack) for every tensor of this row."""
        words, inside = _words(self.name), _words(self.path)
        for numbers in itertools.product(*(self.counts[word] for word in words)):
            at = dict(zip(words, numbers))
            outside = [w for w in words if w not in inside]
            index = tuple(at[w] - self.counts[w][0] for w in outside)
            yield self.name.format(**at), self.path.format(**at), index

    def take(self, tensor: Any) -> Any:
        """What of a tensor goes into the array, turned as it is there."""
        if self.part is not None:
            index = [slice(None)] * len(tensor.shape)
            index[self.axis] = self.part
            tensor = tensor[tuple(index)]
        return tensor.swapaxes(-1, -2) if self.turned else tensor

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Of what is taken of a tensor of `shape`."""
        out = list(shape)
        if self.part is not None:
            out[self.axis] = len(range(*self.part.indices(out[self.axis])))
        if self.turned:
            out[-2:] = out[-1], out[-2]
        return tuple(out)


def _words(text: str) -> list[str]:
    """The words in braces, in order."""
    return [word for _, word, _, _ in string.Formatter().parse(text) if word]


Table = Sequence[Row]


def _check_parts(where: str, name: str, shape: tuple[int, ...], rows: list[Row]):
    """The rows that name a tensor take every element of it once."""
    for row in rows:
        least = max(row.turned * 2, row.part is not None and row.axis + 1)
        if len(shape) < least:
            raise ValueError(
                f"{where}: tensor {name!r} has shape {list(shape)}, but {row.path!r} takes "
                f"it with {least} axes or more."
            )
    if len(rows) == 1 and rows[0].part is None:
        return
    axis = rows[0].axis
    times = np.zeros(shape[axis], int)
    for row in rows:
        times[row.part if row.part is not None else slice(None)] += 1
    if not np.all(times == 1):
        paths = ", ".join(row.path for row in rows)
        raise ValueError(
            f"{where}: tensor {name!r} of shape {list(shape)} is not cut into {paths}: "
            f"row {int(np.argmax(times != 1))} of axis {axis} goes to {int(times[times != 1][0])}"
            " of them."
        )


# --- reading ----------------------------------------------------------------------------------


class Arrays(Mapping):
    """The arrays that a table makes of a folder by path, each read when it is asked for.

    Args:
        source: a Folder, or a reader of quantized files that looks like one.
        table: a Row for every array.
        target: shapes by path; arrays of other shapes, or other paths, are refused.
        ignored: regular expressions for tensors that may be there and are not read.

    Raises:
        ValueError: a name is missing or left over on either side, or a shape differs.

    >>> import tempfile
    >>> place = tempfile.mkdtemp()
    >>> tensors = {f"h.{i}.w": np.full((2, 3), i, np.float32) for i in range(4)}
    >>> write_tensors(place, tensors, {})
    >>> table = [Row("h.{i}.w", "layers/kernel", {"i": range(4)}, turned=True)]
    >>> Arrays(Folder(place), table)["layers/kernel"].shape
    (4, 3, 2)
    """

    def __init__(
        self,
        source: Source,
        table: Table,
        target: Mapping[str, Any] | None = None,
        ignored: Sequence[str] = (),
    ):
        self.source, self._places = source, _by_path(table)
        self._check_names(re.compile("|".join(ignored) or r"(?!)"))
        self._check_paths(self._places if target is None else target)
        for path, places in self._places.items():
            _check_shape(source, path, places, target)

    def _check_names(self, ignored: re.Pattern) -> None:
        """Refuses tensors that no row takes whole, and rows without tensors."""
        tensors, taken = self.source.tensors, {}
        for path, places in self._places.items():
            for row, name, _ in places:
                taken.setdefault(name, []).append(row)
                if name not in tensors:
                    raise ValueError(
                        f"{self.source.name} has no tensor {name!r}, which {path!r} is "
                        f"made of. {trees.near(name, tensors)}"
                    )
        for name, tensor in tensors.items():
            if name in taken:
                _check_parts(self.source.name, name, tensor.shape, taken[name])
            elif not ignored.fullmatch(name):
                raise ValueError(
                    f"{self.source.name} holds tensor {name!r}, which nothing is made of. "
                    f"{trees.near(name, taken)}"
                )

    def _check_paths(self, target: Mapping[str, Any]) -> None:
        for path in self._places:
            if path not in target:
                raise ValueError(
                    f"{path!r} is made of {self.source.name}, but the target does not "
                    f"have it. {trees.near(path, target)}"
                )
        for path in target:
            if path not in self._places:
                raise ValueError(
                    f"no row makes {path!r} of {self.source.name}, and the target has it. "
                    f"{trees.near(path, self._places)}"
                )

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def names(self, path: str) -> list[str]:
        """The tensors that an array is made of."""
        return [name for _, name, _ in self._places[path]]

    def __getitem__(self, path: str) -> Any:
        """An array of the host, or a QArray: of one tensor, or a stack filled one by one."""
        return _array(self.source, self._places[path])


def read(
    source: Source,
    table: Table,
    target: Mapping[str, Any] | None = None,
    *,
    ignored: Sequence[str] = (),
) -> dict[str, Any]:
    """All arrays that a table makes of a folder, on the device; see `Arrays`.

    Returns:
        Arrays (QArrays where the source has them) by path, with slashes.

    >>> import tempfile
    >>> place = tempfile.mkdtemp()
    >>> write_tensors(place, {"w": np.ones((2, 3), np.float32)}, {})
    >>> read(Folder(place), [Row("w", "dense/kernel", turned=True)])["dense/kernel"].shape
    (3, 2)
    """
    arrays = Arrays(source, table, target, ignored)
    return {path: jax.tree.map(jnp.array, array) for path, array in arrays.items()}


Places = list[tuple[Row, str, tuple[int, ...]]]  # row, tensor, index in the stack


def _by_path(table: Table) -> dict[str, Places]:
    by_path: dict[str, Places] = {}
    for row in table:
        for name, path, index in row.places():
            by_path.setdefault(path, []).append((row, name, index))
    for path, places in by_path.items():
        if len({index for *_, index in places}) != len(places):
            raise ValueError(f"two rows of the table make {path!r}.")
    return by_path


def _check_shape(source: Source, path: str, places: Places, target: Any) -> None:
    """Every tensor of a stack has one shape and dtype, and the stack its target's."""
    row, first, _ = places[0]
    shape = row.shape(source.tensors[first].shape)
    for other, name, _ in places:
        here = other.shape(source.tensors[name].shape)
        if here != shape:
            raise ValueError(
                f"{source.name}: tensor {name!r} gives {list(here)} for {path!r}, but "
                f"{first!r} gives {list(shape)}."
            )
        if source.tensors[name].dtype != source.tensors[first].dtype:
            raise ValueError(
                f"{source.name}: tensor {name!r} is {source.tensors[name].dtype}, but "
                f"{first!r}, stacked with it, is {source.tensors[first].dtype}."
            )
    if target is None:
        return
    whole = (*_stack(places), *shape)
    if whole != tuple(target[path].shape):
        raise ValueError(
            f"{source.name}: tensor {first!r} of shape "
            f"{list(source.tensors[first].shape)} makes {path!r} {list(whole)}, but the "
            f"target has {list(target[path].shape)}."
        )


def _stack(places: Places) -> tuple[int, ...]:
    """Extents of the stack that rows of one path fill between them."""
    indices = np.array([index for *_, index in places])
    return tuple(int(n) for n in indices.max(axis=0) + 1) if indices.size else ()


def _array(source: Source, places: Places) -> Any:
    """The array of one path: of one tensor, or a stack that is filled one by one."""
    stack = _stack(places)
    row, name, _ = places[0]
    if not stack:
        return row.take(source.read(name))
    out: Any = None
    for row, name, index in places:
        one = row.take(source.read(name))
        if isinstance(one, QArray):  # its parts are stacked, each for itself
            one = one.map(np.asarray)
        if out is None:
            out = jax.tree.map(lambda a: np.empty((*stack, *a.shape), a.dtype), one)
        _put(out, one, index, source.name, name)
    return out


def _put(out: Any, one: Any, index: tuple, where: str, name: str) -> None:
    if jax.tree.structure(out) != jax.tree.structure(one):
        raise ValueError(
            f"{where}: tensor {name!r} is not in the format of those it is stacked with."
        )
    for whole, part in zip(jax.tree.leaves(out), jax.tree.leaves(one)):
        if whole[index].shape != part.shape or whole.dtype != part.dtype:
            raise ValueError(
                f"{where}: tensor {name!r} has {part.dtype}{list(part.shape)} where those "
                f"it is stacked with have {whole.dtype}{list(whole[index].shape)}."
            )
        whole[index] = part


# --- writing ----------------------------------------------------------------------------------


def write(
    path: Any,
    tree: Mapping[str, Any],
    table: Table,
    config: Mapping[str, Any],
    *,
    dtype: Any = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Writes a tree as a folder, by the table that reads it.

    Tensors are written one by one; files get their names once they are whole, and
    config.json comes last: a folder without it is not a folder yet.

    Args:
        path: a folder that is not there yet, or is empty.
        tree: arrays by path, with slashes.
        table: a Row for every array.
        config: what goes into config.json.
        dtype: of all tensors; None: each keeps its own.
        shard_bytes: the most that one file holds, unless a tensor is larger.

    Raises:
        ValueError: a path is missing or left over on either side, or an array is quantized.
    """
    source = Tree(tree, table, config)
    for name in source.weights:
        path = source.places[name][0][1]
        raise ValueError(
            f"{path!r} is quantized ({tree[path].qtype}): a plain folder holds floats."
        )
    write_tensors(path, Floats(source, dtype), config, shard_bytes=shard_bytes)


class Tree:
    """A tree of arrays and QArrays as a source: the tensors that a table makes of it, each
    made when it is asked for.

    Args:
        tree: arrays by path, with slashes: [in, out] kernels, stacks of layers.
        table: a Row for every array.
        config: config.json of the model.
        name: to call it by, in errors.

    Raises:
        ValueError: a path is missing or left over on either side, or rows that share a tensor
            do not make all of it.

    >>> table = [Row("h.{i}.w", "layers/kernel", {"i": range(4)}, turned=True)]
    >>> tree = Tree({"layers/kernel": np.zeros((4, 3, 2), np.float32)}, table)
    >>> tree.tensors["h.3.w"].shape, tree.read("h.3.w").shape
    ((2, 3), (2, 3))
    """

    def __init__(
        self,
        tree: Mapping[str, Any],
        table: Table,
        config: Mapping[str, Any] | None = None,
        name: str = "the tree",
    ):
        self.tree, self.name, self.config, self.notes = tree, name, config or {}, ()
        by_path = _by_path(table)
        for path in sorted({*by_path} ^ {*tree}):
            where = "table" if path in tree else "tree"
            raise ValueError(
                f"{path!r} is missing from the {where}. "
                f"{trees.near(path, by_path if path in tree else tree)}"
            )
        self.places: dict[str, Places] = {}  # row, path and index of each tensor
        for row in table:
            for tensor, path, index in row.places():
                self.places.setdefault(tensor, []).append((row, path, index))
        self.tensors = {tensor: self._about(tensor) for tensor in self.places}
        is_coded = lambda place: isinstance(tree[place[1]], QArray)
        self.weights = {
            k for k, rows in self.places.items() if any(map(is_coded, rows))
        }

    def _about(self, tensor: str) -> Tensor:
        places = self.places[tensor]
        shapes = [self._shape(*place) for place in places]
        row, path, _ = places[0]
        if row.part is not None:
            shapes[0][row.axis] = sum(shape[row.axis] for shape in shapes)
            _check_parts(self.name, tensor, tuple(shapes[0]), [r for r, *_ in places])
        return Tensor(tuple(shapes[0]), np.dtype(self.tree[path].dtype))

    def _shape(self, row: Row, path: str, index: tuple[int, ...]) -> list[int]:
        shape = list(self.tree[path].shape[len(index) :])
        if row.turned:
            shape[-2:] = shape[-1], shape[-2]
        return shape

    def read(self, name: str) -> Any:
        """The tensor, [out, in], as arrays of the host: parts of it are joined."""
        if name in self.weights:
            return self._codes(name)
        about, places = self.tensors[name], self.places[name]
        out = np.empty(about.shape, about.dtype)
        for row, path, index in places:
            piece = np.asarray(self.tree[path][index] if index else self.tree[path])
            row.take(out)[...] = piece  # a view of `out`, turned as the piece is
        return out

    def _codes(self, name: str) -> QArray:
        parts = []
        for row, path, index in self.places[name]:
            q = self.tree[path][index] if index else self.tree[path]
            q = (q.swapaxes(-1, -2) if row.turned else q).map(np.asarray)
            parts.append((row, q))
        if len(parts) == 1:
            return parts[0][1]
        if any(row.part.step not in (None, 1) for row, _ in parts):
            raise ValueError(f"{name}: its parts take turns; codes are not joined so.")
        parts.sort(key=lambda part: part[0].part.start or 0)
        return _joined(name, [q for _, q in parts], parts[0][0].axis)


def _joined(name: str, parts: list[QArray], axis: int) -> QArray:
    """Codes end to end along an axis, with their scales."""

    def own(q: QArray) -> QArray:
        """A scale that is shared by all of the axis, as one for every element of it."""
        if q.scale.shape[axis] != 1:
            return q
        repeat = lambda x: None if x is None else x.repeat(q.shape[axis], axis)
        return q.replace(scale=repeat(q.scale), zero_point=repeat(q.zero_point))

    parts = [own(q) for q in parts]
    if len({(q.qtype, q.scale_tile_shape, jax.tree.structure(q)) for q in parts}) > 1:
        raise ValueError(
            f"{name}: its parts are not in one format, and cannot be joined."
        )
    return jax.tree.map(lambda *arrays: np.concatenate(arrays, axis), *parts)


class Floats(Mapping):
    """Tensors of a source as floats, each read when it is asked for; codes as what they
    stand for.

    Args:
        source: a Folder, a Tree, or a reader of quantized files.
        dtype: of all tensors; None: each keeps its own, and codes are float32.
    """

    def __init__(self, source: Source, dtype: Any = None):
        self.source, self.dtype = source, None if dtype is None else np.dtype(dtype)

    def __iter__(self) -> Iterator[str]:
        return iter(self.source.tensors)

    def __len__(self) -> int:
        return len(self.source.tensors)

    def about(self, name: str) -> Tensor:
        """Shape and dtype; nothing is read."""
        shape, dtype = self.source.tensors[name]
        return Tensor(shape, self.dtype or dtype)

    def __getitem__(self, name: str) -> np.ndarray:
        return as_floats(self.source.read(name), self.about(name).dtype)


def as_floats(array: Any, dtype: Any) -> np.ndarray:
    """An array in a dtype; codes as what they stand for."""
    if isinstance(array, QArray):
        array = np.asarray(dequantize(jax.tree.map(jnp.asarray, array), jnp.float32))
    return np.asarray(array).astype(dtype)


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
    """Written beside its place, and moved there whole."""
    partial = file.with_name(f"{file.name}.partial")
    partial.write_text(json.dumps(content, indent=2) + "\n")
    os.replace(partial, file)
