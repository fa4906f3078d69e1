"""Files: text, jsonl and parquet of any size, read where they lie, a record by its number.

    text      a document is a file, or of a large one a piece of about PIECE bytes that ends
              with a line, or within one that is as long; of a smaller one a smaller piece
    jsonl     a document is a line; where lines begin is found in one pass over the bytes,
              eight bytes of memory for each
    parquet   a document is a row; row groups are read whole, and up to GROUPS are held, of
              dataset_memory_mb together

So a run can begin anywhere: its place in the data is a number. Of parquet the groups are
shuffled, and the rows within each (`Shuffled`): a shuffle of all rows would read a group for
every row. What cannot be read is refused by name before anything is trained: a file that is
empty, that ends within a line or a record, or whose bytes are not text.
"""

import collections
import contextlib
import dataclasses
import functools
import hashlib
import json
import pathlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from midtread.lm.config import Config
from midtread.lm.rows import HELD_OUT
from midtread.lm.tokenizer import need
from midtread.lm.usage import UsageError, first_line, require

PIECE = 2**18  # bytes of a document that is cut from a large text
CHUNK = 2**24  # bytes that are read in one go
GROUPS = 4  # row groups that are held
EPOCHS = 1000  # passes that `Shuffled` has an order for
#  how a compressed file begins, and what compressed it
COMPRESSED = {
    b"\x1f\x8b": "gzip",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"BZh": "bzip2",
    b"\xfd7zXZ": "xz",
    b"PK\x03\x04": "zip",
}


# --- what is refused --------------------------------------------------------------------------


def require_text(path: pathlib.Path, content: bytes, start: int = 0) -> None:
    """Refuses bytes that are not UTF-8 text, naming the first. A letter that the end of
    `content` cuts off is allowed."""
    zero = content.find(b"\0")
    try:
        content.decode("utf-8")
        wrong = zero
    except UnicodeDecodeError as error:
        is_cut = error.reason == "unexpected end of data"
        wrong = zero if is_cut else error.start if zero < 0 else min(zero, error.start)
    if wrong < 0:
        return
    for beginning, program in COMPRESSED.items():
        require(
            start or not content.startswith(beginning),
            f"{path} is compressed by {program}, and files are read as they are: unpack it, "
            "and give what was inside.",
        )
    raise UsageError(
        f"{path} is not text: byte {start + wrong} of it is no UTF-8. Give text in "
        "UTF-8 (`iconv -f latin1 -t utf-8` turns Latin-1 into it), or dataset_type=parquet "
        "for a parquet file.",
    )


def require_not_empty(path: pathlib.Path) -> None:
    """Refuses a file of no bytes."""
    size = path.stat().st_size
    require(size, f"{path} is empty: remove it, or give another dataset_path.")


@contextlib.contextmanager
def reading_parquet(path: pathlib.Path) -> Iterator[None]:
    """Turns what pyarrow says about a damaged file into one line that names it."""
    try:
        yield
    except (ValueError, OSError) as error:
        raise UsageError(
            f"{path} does not read as parquet, it may be cut off or damaged: "
            f"{first_line(error)[:200].rstrip('.')}."
        ) from None


def require_ends(path: pathlib.Path) -> None:
    """Refuses a file that is empty, or whose first or last bytes are not text."""
    require_not_empty(path)
    size = path.stat().st_size
    with path.open("rb") as file:
        require_text(path, file.read(2**16))
        start = max(size - 2**16, 0)
        file.seek(start)
        last = file.read()
    skip = 0 if not start else next(i for i, b in enumerate(last) if b & 0xC0 != 0x80)
    require_text(path, last[skip:], start + skip)
    try:
        last[skip:].decode("utf-8")
    except UnicodeDecodeError:
        raise UsageError(f"{path} is cut off within its last letter.") from None


# --- records by number ------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Lines:
    """Records of text or jsonl files, by the positions where they begin."""

    paths: tuple[pathlib.Path, ...]
    # [records + files] For each file, where its records begin, and then its size.
    starts: np.ndarray
    firsts: np.ndarray  # [files + 1] where in `starts` a file's part begins
    is_json: bool

    def __len__(self) -> int:
        return len(self.starts) - len(self.paths)

    @functools.cached_property
    def numbers(self) -> np.ndarray:
        """The number of the first record of each file."""
        return self.firsts[:-1] - np.arange(len(self.paths))

    def _span(self, number: Any) -> tuple[pathlib.Path, int, int]:
        """Returns the file of a record, where it begins and where it ends."""
        file = int(np.searchsorted(self.numbers, number, side="right")) - 1
        at = int(self.firsts[file] + number - self.numbers[file])
        begin, end = map(int, self.starts[at : at + 2])
        return self.paths[file], begin, end

    def where(self, number: Any) -> str:
        """Names a record, for messages."""
        path, begin, _ = self._span(number)
        return f"{path}, the line at byte {begin},"

    def __getitem__(self, number: Any) -> dict[str, Any]:
        path, begin, end = self._span(number)
        with path.open("rb") as file:
            file.seek(begin)
            content = file.read(end - begin)
        if not self.is_json:
            require_text(path, content, begin)
            return {"text": content.decode("utf-8", "replace")}
        try:
            return json.loads(content)
        except (json.JSONDecodeError, UnicodeDecodeError):
            where = self.where(number)
            raise UsageError(
                f"{where} does not read as JSON: mend it, or take it out."
            ) from None


def _line_starts(path: pathlib.Path) -> np.ndarray:
    """Returns where the lines that are not blank begin, and the size of the file last."""
    starts_of_chunks, position = [np.zeros(1, np.int64)], 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            ends = np.flatnonzero(np.frombuffer(chunk, np.uint8) == 10)
            starts_of_chunks.append(ends + position + 1)
            position += len(chunk)
    starts = np.concatenate(starts_of_chunks)
    starts = starts if starts[-1] == position else np.append(starts, position)
    is_record = np.diff(starts) > 2  # a line of two bytes or less is blank
    return starts[np.append(is_record, True)]


def _pieces(path: pathlib.Path, piece: int) -> np.ndarray:
    """Returns where pieces of about `piece` bytes begin, each after the end of a line if one
    ends soon, and the size of the file last."""
    size, cuts = path.stat().st_size, [0]
    with path.open("rb") as file:
        while cuts[-1] + piece < size:
            file.seek(cuts[-1] + piece)
            rest = file.readline(piece)
            end = min(cuts[-1] + piece + len(rest), size)
            if not rest.endswith(b"\n") and end < size:  # not within a letter
                whole = (i for i, b in enumerate(reversed(rest), 1) if b & 0xC0 != 0x80)
                end -= next(whole, 0)
            cuts.append(end)
    return np.array([*cuts, size] if cuts[-1] < size else cuts, np.int64)


def _documents(paths: Sequence[pathlib.Path]) -> list[np.ndarray]:
    """Returns where the pieces of text files begin, in enough pieces for some to be held
    out."""
    size = sum(path.stat().st_size for path in paths)
    large, small = PIECE, max(size // (4 * HELD_OUT), 64)
    pieces = [_pieces(path, large) for path in paths]
    if sum(len(starts) - 1 for starts in pieces) >= HELD_OUT or large <= small:
        return pieces
    return [_pieces(path, small) for path in paths]


def _lines(paths: Sequence[pathlib.Path], is_json: bool) -> Lines:
    for path in paths:
        require_ends(path)
    starts_of_files = [_line_starts(p) for p in paths] if is_json else _documents(paths)
    for path, starts in zip(paths, starts_of_files if is_json else ()):
        require(len(starts) > 1, f"{path} has no records: remove it.")
        require_last_record(path, starts)
    firsts = np.cumsum([0, *map(len, starts_of_files)])
    return Lines(tuple(paths), np.concatenate(starts_of_files), firsts, is_json)


def require_last_record(path: pathlib.Path, starts: np.ndarray) -> None:
    """Refuses a file whose last line was not written to its end."""
    with path.open("rb") as file:
        file.seek(int(starts[-2]))
        line = file.read()
    if not line.endswith(b"\n"):
        try:
            json.loads(line)
        except (json.JSONDecodeError, UnicodeDecodeError):
            raise UsageError(
                f"{path} is cut off within its last line, at byte {starts[-2]}, which does "
                "not read as JSON: jsonl has one whole record to a line."
            ) from None


@dataclasses.dataclass(frozen=True)
class Groups:
    """Rows of parquet files, read in row groups."""

    # For each group, its file and its number in it.
    files: tuple[tuple[pathlib.Path, int], ...]
    starts: np.ndarray  # [groups + 1] the first row of each group
    column: str
    memory: int  # bytes of groups that may be held

    def __len__(self) -> int:
        return int(self.starts[-1])

    def _row(self, number: Any) -> tuple[int, int]:
        """Returns the group of a row, and its number in it."""
        group = int(np.searchsorted(self.starts, number, side="right")) - 1
        return group, int(number - self.starts[group])

    def where(self, number: Any) -> str:
        """Names a row, for messages."""
        group, row = self._row(number)
        path, number = self.files[group]
        return f"{path}, row {row} of row group {number},"

    def __getitem__(self, number: Any) -> dict[str, Any]:
        group, row = self._row(number)
        rows = _group(*self.files[group], self.column, self.memory)
        return {self.column: rows[row].as_py()}


_held: collections.OrderedDict[tuple, Any] = collections.OrderedDict()
_lock = threading.Lock()


def _group(path: pathlib.Path, number: int, column: str, memory: int) -> Any:
    """Returns one column of a row group. The last few are held, as far as they fit."""
    group = (path, number, column)
    with _lock:
        if group not in _held:
            _held[group] = _read_group(*group)
            size = lambda: sum(rows.nbytes for rows in _held.values())
            while len(_held) > 1 and (len(_held) > GROUPS or size() > memory):
                _held.popitem(last=False)
        _held.move_to_end(group)
        return _held[group]


def _read_group(path: pathlib.Path, number: int, column: str) -> Any:
    parquet = need("pyarrow.parquet", "dataset_type=parquet")
    with reading_parquet(path), parquet.ParquetFile(path) as file:
        return file.read_row_group(number, columns=[column]).column(0)


def _groups(paths: Sequence[pathlib.Path], column: str, memory: int) -> Groups:
    parquet = need("pyarrow.parquet", "dataset_type=parquet")
    files, sizes = [], [0]
    for path in paths:
        require_not_empty(path)
        with reading_parquet(path), parquet.ParquetFile(path) as file:
            about, names = file.metadata, file.schema_arrow.names
        require(
            column in names,
            f"{path} has no field text_field={column}; it has {', '.join(names)}.",
        )
        files += [(path, i) for i in range(about.num_row_groups)]
        sizes += [about.row_group(i).num_rows for i in range(about.num_row_groups)]
    return Groups(tuple(files), np.cumsum(sizes), column, memory)


OPEN = {
    "text": lambda config, paths: _lines(paths, is_json=False),
    "jsonl": lambda config, paths: _lines(paths, is_json=True),
    "parquet": lambda config, paths: _groups(
        paths, config.text_field, config.dataset_memory_mb * 2**20
    ),
}


def open_records(config: Config, paths: Sequence[pathlib.Path]) -> Lines | Groups:
    """Returns the records of these files by number; only the positions where they begin are
    in memory."""
    return OPEN[config.dataset_type](config, paths)


def digest(records: Lines | Groups) -> str:
    """Returns a hash of the files' names and of where their records begin."""
    names = (
        records.paths if isinstance(records, Lines) else [p for p, _ in records.files]
    )
    sha256 = hashlib.sha256(records.starts.tobytes())
    for path in names:
        sha256.update(path.name.encode() + b"\0")
    return sha256.hexdigest()


# --- order ------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Shuffled:
    """Documents in an order that a seed decides and that keeps row groups together: a
    source for grain.

    Each of EPOCHS passes has its own order of groups, and of rows within each.
    """

    documents: Any  # stream.Documents over Groups
    seed: int

    def __len__(self) -> int:
        return EPOCHS * len(self.documents)

    def __getitem__(self, number: Any) -> str:
        epoch, position = divmod(int(number), len(self.documents))
        order, ends = _order(self.seed, epoch, self._sizes)  # of groups
        rank = int(np.searchsorted(ends, position, side="right"))
        within = position - int(ends[rank - 1] if rank else 0)
        group = int(order[rank])
        rows = _permutation(self.seed, (epoch, group), self._sizes[group])
        return self.documents[self._begins[group] + int(rows[within])]

    @functools.cached_property
    def _begins(self) -> tuple[int, ...]:
        """The number of the first document of each group, among those that are not held
        out."""
        starts = self.documents.records.starts
        return tuple((starts - starts // self.documents.every).tolist())

    @functools.cached_property
    def _sizes(self) -> tuple[int, ...]:
        return tuple(np.diff(self._begins).tolist())


@functools.lru_cache(maxsize=8)
def _order(seed: int, epoch: int, sizes: tuple[int, ...]):
    """Returns a random permutation, and the running sum of `sizes` in its order."""
    order = _permutation(seed, (epoch,), len(sizes))
    return order, np.cumsum(np.asarray(sizes)[order])


@functools.lru_cache(maxsize=8)
def _permutation(seed: int, salt: tuple[int, ...], count: int) -> np.ndarray:
    rng = np.random.default_rng([seed, *salt, len(salt)])
    return rng.permutation(count)
