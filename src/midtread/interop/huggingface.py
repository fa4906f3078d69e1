"""Weights of Hugging Face folders into any tree, and a tree back into such a folder.

What leads from one set of names to the other is a table with one `Row` per array of the tree:

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

The folders themselves, `Folder` and `write_tensors`, are in interop/folders.py, and have their
names here too.
"""

import dataclasses
import itertools
import re
import string
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from midtread.interop import trees
from midtread.interop.folders import (
    INDEX,
    SHARD_BYTES,
    Folder,
    Tensor,
    is_folder,
    read_json,
    write_json,
    write_tensors,
)
from midtread.numerics.qarray import QArray, dequantize

__all__ = [
    "INDEX", "SHARD_BYTES", "Arrays", "Floats", "Folder", "Row", "Source", "Table",
    "Tensor", "Tree", "as_floats", "is_folder", "read", "read_json", "write",
    "write_json", "write_tensors",
]  # fmt: skip


class Source(Protocol):
    """What `read` reads from: names with shapes, and the arrays one by one."""

    name: str  # to call it by, in errors

    @property
    def tensors(self) -> Mapping[str, Tensor]: ...

    def read(self, name: str) -> Any:
        """Returns the tensor: an array, or a QArray of the same shape."""
        ...


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
        """Yields (tensor, path, where in the stack) for every tensor of this row."""
        words, inside = _words(self.name), _words(self.path)
        for numbers in itertools.product(*(self.counts[word] for word in words)):
            at = dict(zip(words, numbers))
            outside = [w for w in words if w not in inside]
            index = tuple(at[w] - self.counts[w][0] for w in outside)
            yield self.name.format(**at), self.path.format(**at), index

    def take(self, tensor: Any) -> Any:
        """Returns what of a tensor goes into the array, transposed as it is there."""
        if self.part is not None:
            index = [slice(None)] * len(tensor.shape)
            index[self.axis] = self.part
            tensor = tensor[tuple(index)]
        return tensor.swapaxes(-1, -2) if self.turned else tensor

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape of what is taken of a tensor of `shape`."""
        out = list(shape)
        if self.part is not None:
            out[self.axis] = len(range(*self.part.indices(out[self.axis])))
        if self.turned:
            out[-2:] = out[-1], out[-2]
        return tuple(out)


def _words(text: str) -> list[str]:
    """Returns the words in braces, in order."""
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
        """Returns the tensors that an array is made of."""
        return [name for _, name, _ in self._places[path]]

    def __getitem__(self, path: str) -> Any:
        """Returns an array of the host, or a QArray: of one tensor, or a stack filled one by
        one."""
        return _array(self.source, self._places[path])


def read(
    source: Source,
    table: Table,
    target: Mapping[str, Any] | None = None,
    *,
    ignored: Sequence[str] = (),
) -> dict[str, Any]:
    """Returns all arrays that a table makes of a folder, on the device; see `Arrays`.

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
    """Returns the array of one path: of one tensor, or a stack that is filled one by one."""
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
        files: that the tree was read from; an export that was killed goes on where they are
            the same.

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
        files: Sequence[Any] = (),
    ):
        self.tree, self.name, self.config, self.notes = tree, name, config or {}, ()
        self.files = files
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
        is_coded = lambda row: isinstance(tree[row[1]], QArray)
        self.weights = {
            k for k, rows in self.places.items() if any(map(is_coded, rows))
        }

    def _about(self, tensor: str) -> Tensor:
        places = self.places[tensor]
        shapes = [self._shape(*where) for where in places]
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
        """Returns the tensor, [out, in], as arrays of the host: parts of it are joined."""
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
    """Returns codes end to end along an axis, with their scales."""

    def own(q: QArray) -> QArray:
        """Returns codes with a scale for every element of the axis, where all shared one."""
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
        """Returns shape and dtype; nothing is read."""
        shape, dtype = self.source.tensors[name]
        return Tensor(shape, self.dtype or dtype)

    def __getitem__(self, name: str) -> np.ndarray:
        return as_floats(self.source.read(name), self.about(name).dtype)


def as_floats(array: Any, dtype: Any) -> np.ndarray:
    """Returns an array in a dtype; codes as what they stand for."""
    if isinstance(array, QArray):
        array = np.asarray(dequantize(jax.tree.map(jnp.asarray, array), jnp.float32))
    return np.asarray(array).astype(dtype)
