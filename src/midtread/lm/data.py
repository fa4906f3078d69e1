"""Data: documents become rows of tokens, in an order that a seed decides.

    documents -> tokens -> rows [T] -> shuffled, repeated, batched by grain -> batches

A row is a window of T tokens of all documents strung together, each ended by the
tokenizer's end mark; tokens know their document and their place in it, so that none looks
at, or is predicted from, another document. Rows can be had by number, which is what makes
the order a function of the seed and a run resumable: grain's iterator says where it
stands in one number.

The embedded corpus is the source code of Python's own standard library, there on every
machine: .py files sorted by name, without folders of tests. Its digest is printed and
kept with the run, since it differs from one Python to the next.
"""

import dataclasses
import glob
import hashlib
import json
import os
import pathlib
import sysconfig
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from midtread.lm.config import Config, UsageError, require

Batch = dict[str, np.ndarray]  # inputs, targets, positions, segments, mask: [B, T]
NO_TESTS = {"test", "tests", "idle_test", "__pycache__", "site-packages"}


# --- tokenizers -------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Tokenizer:
    """Text to numbers and back."""

    name: str
    size: int
    end: int  # the mark after a document
    encode: Any  # str -> sequence of int
    decode: Any  # sequence of int -> str


def _bytes(path: str) -> Tokenizer:
    encode = lambda text: np.frombuffer(text.encode("utf-8", "replace"), np.uint8)
    plain = lambda ids: bytes(i for i in map(int, ids) if i < 256)
    return Tokenizer(
        "byte", 257, 256, encode, lambda i: plain(i).decode(errors="replace")
    )


END_MARKS = ("</s>", "<|endoftext|>", "<|end_of_text|>", "<eos>", "<|eos|>", "[SEP]")


def _huggingface(path: str) -> Tokenizer:
    tokenizers = _need("tokenizers", "tokenizer_type=huggingface")
    try:
        held = tokenizers.Tokenizer.from_file(path)
    except Exception as error:  # noqa: BLE001  a bare Exception is what the library raises
        raise UsageError(
            f"tokenizer_path={path} is no tokenizer.json: {error}."
        ) from None
    ends = [held.token_to_id(mark) for mark in END_MARKS]
    end = next((i for i in ends if i is not None), None)
    require(
        end is not None,
        f"tokenizer_path={path} has no end mark: none of {', '.join(END_MARKS)}.",
    )
    encode = lambda text: held.encode(text, add_special_tokens=False).ids
    return Tokenizer(
        path, held.get_vocab_size(), end, encode, lambda ids: held.decode(list(ids))
    )


def _sentencepiece(path: str) -> Tokenizer:
    library = _need("sentencepiece", "tokenizer_type=sentencepiece")
    try:
        held = library.SentencePieceProcessor(model_file=path)
    except (RuntimeError, OSError):
        raise UsageError(f"tokenizer_path={path} is no sentencepiece model.") from None
    decode = lambda ids: held.decode([int(i) for i in ids])
    return Tokenizer(path, held.vocab_size(), held.eos_id(), held.encode, decode)


TOKENIZERS = {
    "byte": _bytes,
    "huggingface": _huggingface,
    "sentencepiece": _sentencepiece,
}


def tokenizer(config: Config) -> Tokenizer:
    path = config.tokenizer_path
    if config.tokenizer_type != "byte":
        require(os.path.isfile(path), f"tokenizer_path={path}: no such file.")
    made = TOKENIZERS[config.tokenizer_type](path)
    require(
        made.size <= config.vocab_size,
        f"the tokenizer {made.name} has {made.size} tokens, but vocab_size="
        f"{config.vocab_size}: write vocab_size={-(-made.size // 8) * 8}.",
    )
    return made


def _need(module: str, what: str) -> Any:
    import importlib

    try:
        return importlib.import_module(module)
    except ImportError:
        raise UsageError(f"{what} needs the package {module}: install it.") from None


# --- documents --------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Documents:
    """Texts, and what to call them."""

    texts: Sequence[str]
    about: dict[str, Any]  # files, bytes, digest


def _files(paths: Sequence[pathlib.Path], names: Sequence[str]) -> Documents:
    digest, texts, size = hashlib.sha256(), [], 0
    for path, name in zip(paths, names):
        content = path.read_bytes()
        digest.update(name.encode() + b"\0" + content)
        size += len(content)
        texts.append(content.decode("utf-8", "replace"))
    about = {"files": len(texts), "bytes": size, "sha256": digest.hexdigest()}
    return Documents(texts, about)


def corpus() -> Documents:
    """The standard library's source."""
    root = pathlib.Path(sysconfig.get_paths()["stdlib"])
    found = []
    for folder, inside, files in os.walk(root):
        inside[:] = sorted(d for d in inside if d not in NO_TESTS)
        found += [pathlib.Path(folder, f) for f in files if f.endswith(".py")]
    names = {p.relative_to(root).as_posix(): p for p in found}
    order = sorted(names)
    return _files([names[n] for n in order], order)


def _paths(config: Config, suffix: str) -> list[pathlib.Path]:
    path = pathlib.Path(config.dataset_path)
    found = sorted(path.rglob(f"*{suffix}")) if path.is_dir() else [
        pathlib.Path(p) for p in sorted(glob.glob(config.dataset_path))
    ]  # fmt: skip
    found = [p for p in found if p.is_file()]
    require(found, f"dataset_path={config.dataset_path}: no such file.")
    return found


def _text(config: Config) -> Documents:
    paths = _paths(config, "")
    return _files(paths, [p.name for p in paths])


def _rows_of(config: Config, records: Iterator[Any], where: str) -> Documents:
    texts, digest = [], hashlib.sha256()
    for number, record in enumerate(records):
        require(
            config.text_field in record,
            f"{where}: record {number} has no field text_field={config.text_field}; it "
            f"has {', '.join(map(str, record))}.",
        )
        text = record[config.text_field]
        text = text.decode("utf-8", "replace") if isinstance(text, bytes) else str(text)
        texts.append(text)
        digest.update(text.encode("utf-8", "replace") + b"\0")
    size = sum(len(t.encode("utf-8", "replace")) for t in texts)
    return Documents(
        texts, {"files": len(texts), "bytes": size, "sha256": digest.hexdigest()}
    )


def _jsonl(config: Config) -> Documents:
    def records():
        for path in _paths(config, ".jsonl"):
            for number, line in enumerate(path.read_text().splitlines()):
                try:
                    yield json.loads(line)
                except json.JSONDecodeError:
                    raise UsageError(
                        f"{path}, line {number + 1} does not read as JSON."
                    ) from None

    return _rows_of(config, records(), config.dataset_path)


def _parquet(config: Config) -> Documents:
    parquet = _need("pyarrow.parquet", "dataset_type=parquet")

    def records():
        for path in _paths(config, ".parquet"):
            table = parquet.read_table(path)
            yield from table.to_pylist()

    return _rows_of(config, records(), config.dataset_path)


def _hf(config: Config) -> Documents:
    datasets = _need("datasets", "dataset_type=hf")
    try:
        held = datasets.load_dataset(
            config.dataset_path, config.dataset_name or None, split="train"
        )
    except Exception as error:  # noqa: BLE001  many kinds, all about what was asked for
        raise UsageError(
            f"dataset_type=hf, dataset_path={config.dataset_path}: "
            f"{str(error).splitlines()[0]}"
        ) from None
    return _rows_of(config, iter(held), config.dataset_path)


def _tfds(config: Config) -> Documents:
    library = _need("tensorflow_datasets", "dataset_type=tfds")
    name = config.dataset_name or "c4/en:3.1.0"
    try:
        held = library.data_source(
            name, split="train", data_dir=config.dataset_path or None
        )
    except Exception as error:  # noqa: BLE001  many kinds, all about what was asked for
        raise UsageError(
            f"dataset_type=tfds, dataset_name={name}: {str(error).splitlines()[0]}"
        ) from None
    return _rows_of(config, iter(held), name)


SOURCES = {
    "corpus": lambda config: corpus(),
    "text": _text,
    "jsonl": _jsonl,
    "parquet": _parquet,
    "hf": _hf,
    "tfds": _tfds,
}


# --- rows -------------------------------------------------------------------------------------


class Rows:
    """Rows of one split, by number: a source for grain, or for anyone."""

    def __init__(
        self, tokens: np.ndarray, starts: np.ndarray, length: int, packed: bool
    ):
        """`tokens` of all documents, which begin at `starts`."""
        self.tokens, self.starts, self.length = tokens, starts, length
        if packed:
            first = np.arange(max((len(tokens) - 1) // length, 0)) * length
            self.spans = np.stack([first, first + length + 1], 1)
        else:
            ends = np.append(starts[1:], len(tokens))
            cuts = [np.arange(a, b - 1, length) for a, b in zip(starts, ends)]
            spans = [
                np.stack([c, np.minimum(c + length + 1, b)], 1)
                for c, b in zip(cuts, ends)
            ]
            self.spans = np.concatenate(spans) if spans else np.zeros((0, 2), int)

    def __len__(self) -> int:
        return len(self.spans)

    def __getitem__(self, number: Any) -> Batch:
        start, stop = self.spans[int(number)]
        place = np.arange(start, stop)
        document = np.searchsorted(self.starts, place, side="right") - 1
        positions = place - np.maximum(self.starts[document], start)
        segments = document - document[0] + 1
        tokens = self.tokens[start:stop].astype(np.int32)
        inside = segments[1:] == segments[:-1]
        pad = lambda a: np.pad(a, (0, self.length - len(a))).astype(np.int32)
        return {
            "inputs": pad(tokens[:-1]),
            "targets": pad(tokens[1:]),
            "positions": pad(positions[:-1]),
            "segments": pad(segments[:-1]),
            "mask": pad(inside),
        }


@dataclasses.dataclass(frozen=True)
class Splits:
    """What a run trains on, what it is judged by, and what both are."""

    train: Rows
    held_out: Rows
    about: dict[str, Any]


def splits(config: Config) -> Splits:
    if config.dataset_type == "synthetic":
        return _synthetic(config)
    codec = tokenizer(config)
    documents = SOURCES[config.dataset_type](config)
    dtype = np.uint16 if codec.size <= 2**16 else np.uint32
    ended = [
        np.append(codec.encode(t), codec.end).astype(dtype) for t in documents.texts
    ]
    sizes = [len(t.encode("utf-8", "replace")) for t in documents.texts]
    train, held, held_bytes = _hold_out(ended, sizes, config.eval_fraction)
    make = lambda parts: Rows(
        np.concatenate(parts) if parts else np.zeros(0, dtype),
        np.cumsum([0, *map(len, parts)])[:-1],
        config.max_target_length,
        config.packing,
    )
    rows = make(train), make(held)
    for name, split in zip(("training", "held-out"), rows):
        require(
            len(split) >= (config.batch_size if name == "training" else 1),
            f"the {name} split of dataset_type={config.dataset_type} has {len(split)} rows "
            f"of max_target_length={config.max_target_length}: too few for batch_size="
            f"{config.batch_size}.",
        )
    tokens = sum(map(len, held))
    about = {**documents.about, "tokenizer": codec.name, "rows": len(rows[0])}
    about |= {
        "held_out_rows": len(rows[1]),
        "bytes_per_token": held_bytes / max(tokens, 1),
    }
    return Splits(*rows, about)


def _hold_out(
    ended: list, sizes: list[int], fraction: float
) -> tuple[list, list, float]:
    """Every so manyth document; of a single one, the end."""
    every = round(1 / fraction)
    if len(ended) >= every:
        is_held = [i % every == every - 1 for i in range(len(ended))]
        held = [d for d, h in zip(ended, is_held) if h]
        kept = [d for d, h in zip(ended, is_held) if not h]
        return kept, held, sum(s for s, h in zip(sizes, is_held) if h)
    tokens = np.concatenate(ended)
    cut = len(tokens) - max(int(len(tokens) * fraction), 2)
    per_token = sum(sizes) / len(tokens)
    return [tokens[:cut]], [tokens[cut:]], per_token * (len(tokens) - cut)


def _synthetic(config: Config) -> Splits:
    """One batch of random tokens for training, one to be judged by."""
    rng = np.random.default_rng(config.seed)
    count = config.batch_size * config.max_target_length + 1
    draw = lambda: Rows(
        rng.integers(0, config.vocab_size, count).astype(np.uint32),
        np.zeros(1, int),
        config.max_target_length,
        True,
    )
    about = {"rows": config.batch_size, "bytes_per_token": 1.0, "tokenizer": "none"}
    return Splits(draw(), draw(), about)


# --- batches ----------------------------------------------------------------------------------


def stack(rows: Sequence[Batch]) -> Batch:
    return {k: np.stack([r[k] for r in rows]) for k in rows[0]}


def batches(rows: Rows, config: Config) -> Any:
    """Training batches without end: a grain iterator, with get_state and set_state."""
    import grain

    dataset = grain.MapDataset.source(rows).seed(config.seed)
    if config.dataset_type != "synthetic":
        dataset = dataset.shuffle()
    dataset = dataset.repeat().batch(config.batch_size, batch_fn=stack)
    threads = grain.ReadOptions(num_threads=1, prefetch_buffer_size=4)
    return iter(dataset.to_iter_dataset(threads))


def held_out(rows: Rows, config: Config) -> list[Batch]:
    """The same evaluation batches every time, spread over the split."""
    count = min(len(rows), config.eval_steps * config.batch_size)
    chosen = np.linspace(0, len(rows) - 1, count).astype(int)
    parts = [
        chosen[i : i + config.batch_size] for i in range(0, count, config.batch_size)
    ]
    whole = [p for p in parts if len(p) == config.batch_size] or parts[:1]
    return [stack([rows[i] for i in part]) for part in whole]
