"""Files of any size: records by number, orders that can be gone on with, bad files by name."""

import dataclasses
import gzip
import json
import tracemalloc

import numpy as np
import pytest

from midtread.lm import data, files, settings, stream
from midtread.lm.stream import Documents
from midtread.lm.train import _from_json
from midtread.lm.usage import UsageError

TEXTS = [f"document {i}: " + "some more wörds " * (i % 7) for i in range(90)]


@pytest.fixture
def folder(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    lines = [json.dumps({"text": t, "id": i}) for i, t in enumerate(TEXTS)]
    lines[30] += "\n"  # a blank line
    (tmp_path / "a.jsonl").write_text("\n".join(lines[:50]) + "\n")
    (tmp_path / "b.jsonl").write_text("\n".join(lines[50:]))  # no last line's end
    table = pa.table({"id": list(range(90)), "text": TEXTS})
    pq.write_table(table.slice(0, 60), tmp_path / "a.parquet", row_group_size=25)
    pq.write_table(table.slice(60), tmp_path / "b.parquet", row_group_size=25)
    return tmp_path


def config(folder, kind, *words):
    path = folder if kind != "text" else folder / "*.txt"
    values = {"dataset_memory_mb": 0, "eval_steps": 1}
    values |= {"dataset_type": kind, "dataset_path": path}
    values |= dict(word.split("=") for word in words)
    return settings.load(["tiny", *(f"{k}={v}" for k, v in values.items())])


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_record_is_had_by_its_number(folder, kind):
    records = data._records(config(folder, kind))
    assert [r["text"] for r in map(records.__getitem__, range(len(records)))] == TEXTS


def test_a_large_text_is_cut_where_lines_end(tmp_path, monkeypatch):
    text = "".join(f"line {i} with some wörds\n" for i in range(400))
    (tmp_path / "a.txt").write_text(text)
    (tmp_path / "b.txt").write_text("short")
    monkeypatch.setattr(files, "PIECE", 1000)
    records = data._records(config(tmp_path, "text"))
    pieces = [records[i]["text"] for i in range(len(records))]
    assert "".join(pieces[:-1]) == text and pieces[-1] == "short"
    assert max(map(len, pieces)) < 1100 and all(p.endswith("\n") for p in pieces[:-1])


@pytest.mark.parametrize("end", ["\n", " "])
def test_a_text_of_any_size_is_cut_often_enough_to_hold_some_out(tmp_path, end):
    """Also one that is a single line, whose letters stay whole."""
    text = "".join(f"line {i} with some wörds€{end}" for i in range(400))
    (tmp_path / "a.txt").write_text(text)
    records = data._records(config(tmp_path, "text"))
    pieces = [records[i]["text"] for i in range(len(records))]
    assert "".join(pieces) == text and len(pieces) >= 40
    data.splits(config(tmp_path, "text"))


def test_bytes_that_are_no_text_stop_a_run_where_they_are(tmp_path):
    """The beginning and the end of a large file are read before it begins."""
    lines = [b"a line of text\n"] * 20_000
    lines[10_000] = b"\xff\xfe of something else\n"
    (tmp_path / "a.txt").write_bytes(b"".join(lines))
    wrong = config(tmp_path, "text")
    with pytest.raises(UsageError, match="a.txt is not text: byte 150000 of it"):
        batches = data.batches(data.splits(wrong).train, wrong)
        for _ in range(4000):
            next(batches)


@pytest.mark.parametrize("megabytes", [0, 512])
def test_a_mark_of_byte_order_is_no_part_of_a_record(folder, megabytes):
    content = (folder / "a.jsonl").read_bytes()
    (folder / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + content)
    marked = config(folder, "jsonl", f"dataset_memory_mb={megabytes}")
    assert len(data.splits(marked).held_out)


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_batches_go_on_from_where_they_stood(folder, kind):
    made = config(folder, kind, "packing=true")
    split = data.splits(made)
    assert "sha256" in split.about and split.about["documents"] == 90
    batches = data.batches(split.train, made)
    for _ in range(3):
        next(batches)
    state = json.loads(json.dumps(batches.get_state()))
    want = [next(batches) for _ in range(3)]
    again = data.batches(data.splits(made).train, made)
    again.set_state(_from_json(state))
    for a, b in zip(want, (next(again) for _ in range(3)), strict=True):
        np.testing.assert_array_equal(a["inputs"], b["inputs"])


def test_groups_are_shuffled_and_nothing_is_lost(folder):
    records = data._records(config(folder, "parquet"))
    documents = Documents(records, "text", 20)
    order = files.Shuffled(documents, seed=3)
    epochs = [[order[e * len(documents) + i] for i in range(len(documents))] for e in (0, 1)]  # fmt: skip
    kept = [t for i, t in enumerate(TEXTS) if i % 20 != 19]
    assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(kept)
    assert epochs[0] != epochs[1] and epochs[0] != kept
    group = lambda text: np.searchsorted(
        records.starts, TEXTS.index(text), side="right"
    )
    changes = sum(group(a) != group(b) for a, b in zip(epochs[0], epochs[0][1:]))
    assert changes == len(records.files) - 1  # each group is read once


def test_a_row_costs_nothing_that_grows_with_its_group():
    """pyarrow writes a million rows to a group, if nobody says otherwise."""

    class Records:
        starts = np.array([0, 2**20, 2**21])
        __len__ = lambda self: int(self.starts[-1])
        __getitem__ = lambda self, number: {"text": str(number)}

    order = files.Shuffled(Documents(Records(), "text", 20), seed=0)
    assert order[0] != order[1]
    tracemalloc.start()
    assert len({order[i] for i in range(50)}) == 50
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**20, peak


@pytest.mark.parametrize("megabytes,most", [(0, 1), (512, files.GROUPS)])
def test_groups_that_are_held_are_few_and_fit(folder, megabytes, most):
    files._held.clear()
    records = data._records(config(folder, "parquet", f"dataset_memory_mb={megabytes}"))
    for number in (0, 30, 55, 62, 85, 0):
        assert records[number]["text"] == TEXTS[number]
    assert len(files._held) == most


def test_held_out_documents_are_read_group_by_group(tmp_path, monkeypatch):
    import pyarrow as pa
    import pyarrow.parquet as pq

    texts = [f"document {i}" for i in range(4000)]
    table = pa.table({"text": texts})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=400)
    files._held.clear()
    reads, read = [], files._read_group
    monkeypatch.setattr(files, "_read_group", lambda *a: reads.append(a) or read(*a))
    made = config(tmp_path, "parquet", "eval_steps=10")
    held_out = data.splits(made).held_out
    count = len(held_out.starts)
    assert count > 90 and len(reads) < 50
    first = int(stream.GOLDEN % 1 * 200)  # the second document, which was 0
    text = bytes(held_out.tokens[held_out.starts[1] : held_out.starts[2] - 1].tolist())
    assert text.decode() == texts[20 * first + 19]


def test_a_published_model_is_judged_by_a_part_of_large_files(tmp_path, monkeypatch):
    lines = [json.dumps({"text": f"document {i} " * 9}) + "\n" for i in range(4000)]
    (tmp_path / "a.jsonl").write_text("".join(lines))
    numbers, read = [], files.Lines.__getitem__
    note = lambda self, number: numbers.append(number) or read(self, number)
    monkeypatch.setattr(files.Lines, "__getitem__", note)
    batches, bytes_per_token = data.windows(config(tmp_path, "jsonl"))
    assert bytes_per_token == 1 and batches[0]["inputs"].shape == (4, 32)
    assert 0 < len(numbers) < 100 and {n % 20 for n in numbers} == {19}


BAD = {
    "empty.jsonl": (b"", "is empty"),
    "cut.jsonl": (
        b'{"text": "a"}\n{"text": "b',
        "is cut off within its last line, at byte 14",
    ),
    "latin.txt": (b"caf\xe9s " * 9, "UTF-8 (`iconv -f latin1 -t utf-8` turns"),
    "wrong.jsonl": (b'{"text": "a"}\n\xff\xfe\n', "is not text: byte 14"),
    "cut.txt": ("word ö".encode()[:-1], "is cut off within its last letter"),
    "binary.txt": (b"\x7fELF\0\0\1", "is not text: byte 4"),
    "cut.parquet": (b"PAR1....", "does not read as parquet"),
    "empty.parquet": (b"", "is empty"),
    "gzip.jsonl": (gzip.compress(b'{"text": "a"}\n')[:20], "is compressed by gzip"),
    "null.jsonl": (b'{"text": null}\n' * 40, "text_field=text None, which is not text"),
}


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("megabytes", [0, 512])
def test_bad_files_are_refused_by_name(tmp_path, name, megabytes):
    content, expected = BAD[name]
    (tmp_path / name).write_bytes(content)
    kind = {"txt": "text"}.get(name.rpartition(".")[2], name.rpartition(".")[2])
    words = [f"dataset_type={kind}", f"dataset_path={tmp_path / name}"]
    made = settings.load(["tiny", *words, f"dataset_memory_mb={megabytes}"])
    with pytest.raises(UsageError) as error:
        data.splits(made)
    assert name in str(error.value) and "\n" not in str(error.value)
    is_line = megabytes and name == "cut.jsonl"  # read at once, line by line
    expected = "line 2 does not read as JSON" if is_line else expected
    assert expected in str(error.value)


@pytest.mark.parametrize("megabytes", [0, 512])
def test_a_damaged_row_group_is_named(folder, megabytes):
    import pyarrow.parquet as pq

    column = pq.read_metadata(folder / "a.parquet").row_group(0).column(1)
    begin = column.dictionary_page_offset or column.data_page_offset
    content = bytearray((folder / "a.parquet").read_bytes())
    content[begin : begin + 20] = b"\xff" * 20  # the end of the file still reads
    (folder / "a.parquet").write_bytes(content)
    damaged = config(folder, "parquet")
    damaged = dataclasses.replace(damaged, dataset_memory_mb=megabytes)
    with pytest.raises(UsageError, match="a.parquet.*does not read"):
        batches = data.batches(data.splits(damaged).train, damaged)
        for _ in range(100):
            next(batches)


def test_a_bad_line_among_good_ones_stops_a_run_by_name(folder):
    lines = (folder / "a.jsonl").read_bytes().split(b"\n")
    lines[10] = b'{"text": "never ended'
    (folder / "a.jsonl").write_bytes(b"\n".join(lines))
    wrong = config(folder, "jsonl")
    with pytest.raises(
        UsageError, match=r"a.jsonl, the line at byte \d+, does not read"
    ):
        batches = data.batches(data.splits(wrong).train, wrong)
        for _ in range(100):
            next(batches)
