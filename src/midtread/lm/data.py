"""Data: documents become rows of tokens, in an order that a seed decides.

    documents -> tokens -> rows [T] -> shuffled, repeated, batched by grain -> batches

A row is a window of T tokens of all documents strung together, each ended by the
tokenizer's end mark; tokens know their document and their place in it, so that none looks
at, or is predicted from, another document (`lm/rows.py`). Rows can be had by number, which
is what makes the order a function of the seed and a run resumable: grain's iterator says
where it stands. Documents of a library, or of files of more than `dataset_memory_mb`, may be
too many to hold: those are had by number, and become rows on the way (`lm/stream.py`).

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

from midtread.lm import files, stream
from midtread.lm.config import Config
from midtread.lm.rows import HELD_OUT, Batch, Rows, row, stack
from midtread.lm.tokenizer import need, tokenizer
from midtread.lm.usage import UsageError, require

# Practically without end; grain's own endless repeat overflows in batches of 1.
EPOCHS = 2**31
NO_TESTS = {"test", "tests", "idle_test", "__pycache__", "site-packages"}


# --- documents --------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Documents:
    """Texts, and facts about them that identify them."""

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
    """Returns the source of Python's standard library."""
    root = pathlib.Path(sysconfig.get_paths()["stdlib"])
    paths = []
    for folder, inside, here in os.walk(root):
        inside[:] = sorted(d for d in inside if d not in NO_TESTS)
        paths += [pathlib.Path(folder, f) for f in here if f.endswith(".py")]
    names = {p.relative_to(root).as_posix(): p for p in paths}
    order = sorted(names)
    return _files([names[n] for n in order], order)


def _paths(config: Config, suffix: str) -> list[pathlib.Path]:
    """Returns the files that `dataset_path` names, and refuses a path that names none."""
    path = pathlib.Path(config.dataset_path)
    paths = sorted(path.rglob(f"*{suffix}")) if path.is_dir() else [
        pathlib.Path(p) for p in sorted(glob.glob(config.dataset_path))
    ]  # fmt: skip
    paths = [p for p in paths if p.is_file()]
    what = (
        f"this folder has no {suffix or 'text'} files"
        if path.is_dir()
        else "no such file"
    )
    require(paths, f"dataset_path={config.dataset_path}: {what}.")
    return paths


def _text(config: Config) -> Documents:
    paths = _paths(config, "")
    for path in paths:
        files.require_ends(path)
        files.require_text(path, path.read_bytes())
    return _files(paths, [p.name for p in paths])


def _rows_of(config: Config, records: Iterator[Any], where: str) -> Documents:
    """Returns the texts of records of named fields."""
    texts, digest = [], hashlib.sha256()
    for number, record in enumerate(records):
        text = stream.text_of(record, config.text_field, f"{where}: record {number}")
        texts.append(text)
        digest.update(text.encode("utf-8", "replace") + b"\0")
    size = sum(len(t.encode("utf-8", "replace")) for t in texts)
    require(size, f"{where} has no text: {len(texts)} records, and nothing in them.")
    return Documents(
        texts, {"files": len(texts), "bytes": size, "sha256": digest.hexdigest()}
    )


def _jsonl(config: Config) -> Documents:
    def records():
        for path in _paths(config, ".jsonl"):
            files.require_ends(path)
            content = path.read_bytes()
            files.require_text(path, content)
            text = content.decode("utf-8-sig", "replace")
            for number, line in enumerate(text.split("\n")):
                try:
                    if line.strip():
                        yield json.loads(line)
                except json.JSONDecodeError:
                    raise UsageError(
                        f"{path}, line {number + 1} does not read as JSON: mend it, or "
                        "take it out."
                    ) from None

    return _rows_of(config, records(), config.dataset_path)


def _parquet(config: Config) -> Documents:
    parquet = need("pyarrow.parquet", "dataset_type=parquet")

    def records():
        for path in _paths(config, ".parquet"):
            files.require_not_empty(path)
            with files.reading_parquet(path):
                table = parquet.read_table(path)
            yield from table.to_pylist()

    return _rows_of(config, records(), config.dataset_path)


SOURCES = {
    "corpus": lambda config: corpus(),
    "text": _text,
    "jsonl": _jsonl,
    "parquet": _parquet,
}


SUFFIXES = {"text": "", "jsonl": ".jsonl", "parquet": ".parquet"}


def _is_large(config: Config) -> bool:
    """Returns whether the data are files that are too large to be read all at once."""
    if config.dataset_type not in SUFFIXES:
        return False
    paths = _paths(config, SUFFIXES[config.dataset_type])
    return sum(p.stat().st_size for p in paths) > config.dataset_memory_mb * 2**20


def _records(config: Config) -> files.Lines | files.Groups:
    """Returns the records of the files, to be read one by one as they are needed."""
    return files.open_records(config, _paths(config, SUFFIXES[config.dataset_type]))


# --- splits -----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Splits:
    """What a run trains on, what it is judged by, and facts that identify both."""

    train: Rows | stream.Stream
    held_out: Rows
    about: dict[str, Any]


def splits(config: Config) -> Splits:
    """Returns both splits of the data that a config names."""
    if config.dataset_type == "synthetic":
        return _synthetic(config)
    codec = tokenizer(config)
    if config.dataset_type in stream.LIBRARIES:
        records = stream.LIBRARIES[config.dataset_type](config)
        return Splits(*stream.splits(config, codec, records))
    if _is_large(config):
        return Splits(*stream.splits(config, codec, _records(config)))
    documents = SOURCES[config.dataset_type](config)
    dtype = np.uint16 if codec.size <= 2**16 else np.uint32
    ended = [
        np.append(codec.encode(t), codec.end).astype(dtype) for t in documents.texts
    ]
    sizes = [len(t.encode("utf-8", "replace")) for t in documents.texts]
    train, held_out, held_bytes = _hold_out(ended, sizes)
    make = lambda parts: Rows(
        np.concatenate(parts) if parts else np.zeros(0, dtype),
        np.cumsum([0, *map(len, parts)])[:-1],
        config.max_target_length,
        config.packing,
    )
    rows = make(train), make(held_out)
    for name, split in zip(("training", "held-out"), rows):
        require(
            len(split) >= (config.batch_size if name == "training" else 1),
            f"the {name} split of dataset_type={config.dataset_type} has {len(split)} rows "
            f"of max_target_length={config.max_target_length}: too few for batch_size="
            f"{config.batch_size}. Give more text, or write smaller ones.",
        )
    tokens = sum(map(len, held_out))
    about = {**documents.about, **codec.about, "rows": len(rows[0])}
    about |= {
        "held_out_rows": len(rows[1]),
        "bytes_per_token": held_bytes / max(tokens, 1),
    }
    return Splits(*rows, about)


def _hold_out(ended: list, sizes: list[int]) -> tuple[list, list, float]:
    """Holds out one of every HELD_OUT documents, or the end of the text if there are fewer;
    returns the rest, what was held out, and its bytes."""
    if len(ended) >= HELD_OUT:
        is_held = [i % HELD_OUT == HELD_OUT - 1 for i in range(len(ended))]
        held_out = [d for d, h in zip(ended, is_held) if h]
        kept = [d for d, h in zip(ended, is_held) if not h]
        return kept, held_out, sum(s for s, h in zip(sizes, is_held) if h)
    tokens = np.concatenate(ended)
    cut = len(tokens) - max(len(tokens) // HELD_OUT, 2)
    per_token = sum(sizes) / len(tokens)
    return [tokens[:cut]], [tokens[cut:]], per_token * (len(tokens) - cut)


def _synthetic(config: Config) -> Splits:
    """Returns one batch of random tokens to train on, and one to be judged by."""
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


def batches(rows: Rows | stream.Stream, config: Config) -> Any:
    """Returns training batches without end, as a grain iterator with get_state and
    set_state."""
    import grain

    if isinstance(rows, stream.Stream):
        dataset = rows.rows(config.seed).batch(config.batch_size, batch_fn=stack)
        return iter(_by_workers(dataset, config))
    dataset = grain.MapDataset.source(rows).seed(config.seed)
    if config.dataset_type != "synthetic":
        dataset = dataset.shuffle()
    dataset = dataset.repeat(EPOCHS).batch(config.batch_size, batch_fn=stack)
    threads = grain.ReadOptions(num_threads=1, prefetch_buffer_size=4)
    return iter(_by_workers(dataset.to_iter_dataset(threads), config))


def _by_workers(dataset: Any, config: Config) -> Any:
    """Has batches made by worker processes, if the config asks for some: the same ones, but of
    a stream, where each worker strings together its own share of the documents."""
    if not config.grain_worker_count:
        return dataset
    import grain
    from absl import flags

    if not flags.FLAGS.is_parsed():  # grain's workers read absl's flags
        flags.FLAGS.mark_as_parsed()
    options = grain.MultiprocessingOptions(num_workers=config.grain_worker_count)
    return dataset.mp_prefetch(options)


def held_out(rows: Rows, config: Config) -> list[Batch]:
    """Returns the evaluation batches, the same every time, spread over the split."""
    count = min(len(rows), config.eval_steps * config.batch_size)
    chosen = np.linspace(0, len(rows) - 1, count).astype(int)
    parts = [
        chosen[i : i + config.batch_size] for i in range(0, count, config.batch_size)
    ]
    whole = [p for p in parts if len(p) == config.batch_size] or parts[:1]
    return [stack([rows[i] for i in part]) for part in whole]


def windows(config: Config) -> tuple[list[Batch], float]:
    """Returns batches of all text, to judge a model that was not trained here, and bytes
    per token.

    Each document is cut into windows of max_target_length tokens that do not overlap. If
    there are more than eval_steps * batch_size, that many are taken, spread over the text.
    Files that are too large to be read all at once are judged by documents that a run would
    hold out, spread likewise.
    """
    if config.dataset_type == "synthetic" or config.dataset_type in stream.LIBRARIES:
        split = splits(config)
        return held_out(split.held_out, config), split.about["bytes_per_token"]
    codec, length = tokenizer(config), config.max_target_length
    begin = np.asarray(codec.begin, np.int64)
    rows, num_tokens, num_bytes = [], 0, 0
    if _is_large(config):
        train = stream.training(config, codec, _records(config))
        texts: Sequence[str] = stream.judged(config, train)
    else:
        texts = SOURCES[config.dataset_type](config).texts
    for text in texts:
        tokens = np.asarray(codec.encode(text), np.int64)
        num_tokens += len(tokens)
        num_bytes += len(text.encode("utf-8", "replace"))
        # A row has `length` targets and one more token, less what every text begins with.
        size = length + 1 - len(begin)
        for first in range(0, len(tokens), size):
            piece = np.append(begin, tokens[first : first + size])
            if len(piece) > 1:
                ones = np.ones(len(piece), int)
                rows.append(row(piece, np.arange(len(piece)), ones, length))
    require(rows, f"dataset_path={config.dataset_path} holds no text to be judged by.")
    most = config.eval_steps * config.batch_size
    if len(rows) > most:
        rows = [rows[i] for i in np.linspace(0, len(rows) - 1, most).astype(int)]
    size = min(config.batch_size, len(rows))
    nothing = {k: np.zeros_like(v) for k, v in rows[0].items()}
    rows += [nothing] * (-len(rows) % size)
    batches = [stack(rows[i : i + size]) for i in range(0, len(rows), size)]
    return batches, num_bytes / max(num_tokens, 1)
