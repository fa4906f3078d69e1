"""Stream: documents of a library, or of large files, read where they are, as they are
needed.

    text, jsonl, parquet      files of any size: `lm/files.py`
    hf      `datasets`: a name, a folder of files, or a dataset that was saved to disk
    tfds    TensorFlow Datasets, prepared as array_record, which can be read by number

All give a record by its number. So the order is a permutation of numbers that the seed
decides, and nothing is held but a few batches:

    numbers, shuffled -> text -> tokens -> rows [T] -> batches

Packed, tokens of documents in that order are strung together and cut at T + 1 by grain;
else every document is cut by itself. Grain's iterator says where it stands: which document,
and how far into it. Every so manyth document is held out; of those as many are read as an
evaluation needs, spread over all of them.
"""

import dataclasses
import hashlib
import pathlib
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

import numpy as np

from midtread.lm import files
from midtread.lm.config import Config
from midtread.lm.rows import HELD_OUT, Batch, Rows, row
from midtread.lm.tokenizer import Tokenizer, need
from midtread.lm.usage import UsageError, first_line, require

# --- libraries --------------------------------------------------------------------------------


def _hf(config: Config) -> Any:
    datasets = need("datasets", "dataset_type=hf")
    path, name = config.dataset_path, config.dataset_name or None
    require(path, "dataset_type=hf needs dataset_path: a name, or a folder.")
    saved = [pathlib.Path(path, f) for f in ("state.json", "dataset_dict.json")]
    try:
        if not any(file.is_file() for file in saved):
            return datasets.load_dataset(path, name, split="train")
        dataset = datasets.load_from_disk(path)
        return dataset["train"] if isinstance(dataset, dict) else dataset
    except Exception as error:  # noqa: BLE001  many kinds, all about what was asked for
        raise UsageError(
            f"dataset_type=hf, dataset_path={path}: {_line(error)}"
        ) from None


def _tfds(config: Config) -> Any:
    library = need("tensorflow_datasets", "dataset_type=tfds")
    name = config.dataset_name or "c4/en:3.1.0"
    folder = config.dataset_path or None
    try:
        return library.data_source(name, split="train", data_dir=folder, download=False)
    except Exception as error:  # noqa: BLE001  many kinds, all about what was asked for
        raise UsageError(
            f"dataset_type=tfds, dataset_name={name}, dataset_path={folder}: "
            f"{_line(error)} It is to be prepared with file_format=array_record."
        ) from None


def _line(error: Exception) -> str:
    """Returns the first line of what an error says, as a sentence."""
    text = first_line(error)[:200]
    return text if text.endswith(".") else f"{text}."


LIBRARIES = {"hf": _hf, "tfds": _tfds}


@dataclasses.dataclass(frozen=True)
class Documents:
    """The texts of a library, training or held-out ones, by number: a source for grain.

    The last of every `every` documents is held out.
    """

    records: Any
    field: str
    every: int
    held_out: bool = False

    def __len__(self) -> int:
        num_held_out = len(self.records) // self.every
        return num_held_out if self.held_out else len(self.records) - num_held_out

    def __getitem__(self, number: Any) -> str:
        number = int(number)
        if self.held_out:
            index = number * self.every + self.every - 1
        else:
            index = number + number // (self.every - 1)
        record = self.records[index]
        is_file = _is_files(self.records)
        where = self.records.where(index) if is_file else f"record {index}"
        return text_of(record, self.field, where)


def text_of(record: Any, field: str, where: str) -> str:
    """Returns the text of a record of named fields."""
    require(
        isinstance(record, Mapping), f"{where} has no fields: it is {record!r:.40}."
    )
    require(
        field in record,
        f"{where} has no field text_field={field}; it has {', '.join(map(str, record))}.",
    )
    text = record[field]
    require(
        isinstance(text, str | bytes),
        f"{where} has text_field={field} {text!r:.40}, which is not text.",
    )
    return text.decode("utf-8", "replace") if isinstance(text, bytes) else text


# --- rows -------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Stream:
    """Rows of documents, without end."""

    documents: Documents
    codec: Tokenizer
    length: int
    packed: bool

    def rows(self, seed: int) -> Any:
        """Returns a grain dataset of rows, in the order of `seed`."""
        import grain

        if isinstance(self.documents.records, files.Groups):
            dataset = grain.MapDataset.source(files.Shuffled(self.documents, seed))
        else:
            dataset = grain.MapDataset.source(self.documents).seed(seed).shuffle()
        dataset = dataset.repeat()
        threads = grain.ReadOptions(num_threads=1, prefetch_buffer_size=64)
        tokens = dataset.map(self.tokens).to_iter_dataset(threads)
        if not self.packed:
            return grain.experimental.FlatMapIterDataset(tokens, Cut(self.length))
        whole = tokens.map(lambda t: {"tokens": t})
        strung = grain.experimental.ConcatThenSplitIterDataset(
            whole, length_struct={"tokens": self.length + 1}
        )
        return strung.map(self._row)

    def tokens(self, text: str) -> np.ndarray:
        """Returns the tokens of a document, with its end mark."""
        return np.append(self.codec.encode(text), self.codec.end).astype(np.int32)

    def _row(self, strung: dict[str, np.ndarray]) -> Batch:
        tokens, positions = strung["tokens"], strung["tokens_positions"]
        return row(tokens, positions, strung["tokens_segment_ids"], self.length)


@dataclasses.dataclass(frozen=True)
class Cut:
    """Cuts a document into rows of its own."""

    length: int

    def flat_map(self, tokens: np.ndarray) -> list[Batch]:
        rows = Rows(tokens, np.zeros(1, int), self.length, packed=False)
        return [rows[i] for i in range(len(rows))]


def training(config: Config, codec: Tokenizer, records: Any) -> Stream:
    """Returns what to train on: all records but those that are held out."""
    require(
        len(records) >= HELD_OUT,
        f"dataset_type={config.dataset_type} has {len(records)} documents, and one of every "
        f"{HELD_OUT} is held out: give it more.",
    )
    kept = Documents(records, config.text_field, HELD_OUT)
    return Stream(kept, codec, config.max_target_length, config.packing)


def judged(config: Config, train: Stream) -> list[str]:
    """Returns held-out documents from everywhere, as many as an evaluation needs."""
    tokens = config.eval_steps * config.batch_size * train.length + 1
    return _spread(dataclasses.replace(train.documents, held_out=True), train, tokens)


def splits(
    config: Config, codec: Tokenizer, records: Any
) -> tuple[Stream, Rows, dict[str, Any]]:
    """Returns what to train on, what to be judged by, and facts that identify both."""
    train, length = training(config, codec, records), config.max_target_length
    texts = judged(config, train)
    parts = [train.tokens(text) for text in texts]
    starts = np.cumsum([0, *map(len, parts)])[:-1]
    rows = Rows(np.concatenate(parts), starts, length, config.packing)
    require(
        len(rows),
        f"the held-out split of dataset_type={config.dataset_type} has no row of "
        f"max_target_length={length}: its documents are too short.",
    )
    encoded = [text.encode("utf-8", "replace") for text in texts]
    about = {
        "documents": len(records),
        **({"sha256": files.digest(records)} if _is_files(records) else {}),
        **codec.about,
        "held_out_documents": len(records) // HELD_OUT,
        "held_out_rows": len(rows),
        "held_out_sha256": hashlib.sha256(b"\0".join(encoded)).hexdigest(),
        "bytes_per_token": sum(map(len, encoded)) / sum(map(len, parts)),
    }
    return train, rows, about


def _is_files(records: Any) -> bool:
    return isinstance(records, files.Lines | files.Groups)


# Multiples of the golden ratio, modulo 1, are spread evenly however many there are.
GOLDEN = (5**0.5 - 1) / 2
FEW = 16  # documents that are read at a time


def _spread(documents: Documents, stream: Stream, tokens: int) -> list[str]:
    """Returns documents from everywhere until they have that many tokens, or there are no
    more. They are read some at a time, in the order of the files."""
    texts, size, numbers = [], 0, _numbers(len(documents))
    while size < tokens and (some := list(islice(numbers, max(len(texts), FEW)))):
        in_order = {number: documents[number] for number in sorted(some)}
        for number in some:
            if size < tokens:
                texts.append(in_order[number])
                size += len(stream.tokens(texts[-1]))
    return texts


def _numbers(count: int) -> Iterator[int]:
    """Yields numbers below `count`, spread evenly, each once."""
    seen: set[int] = set()
    for i in range(4 * count):
        number = int(i * GOLDEN % 1 * count)
        if number not in seen:
            seen.add(number)
            yield number
