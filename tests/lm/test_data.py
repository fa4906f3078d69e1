"""Documents become rows, in an order that can be gone on with, and none is read too early."""

import json
import struct

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from midtread.lm import data, model, settings, stream
from midtread.lm.config import Model
from midtread.lm.train import Metrics, _from_json
from midtread.lm.usage import UsageError

TEXTS = [f"document {i}: " + "some more words " * (i % 5) for i in range(60)]


def test_rows_keep_documents_apart():
    tokens = np.array([1, 2, 9, 3, 4, 5, 9, 6, 9])
    rows = data.Rows(tokens, np.array([0, 3, 7]), 4, packed=True)
    assert len(rows) == 2
    first = {k: v.tolist() for k, v in rows[0].items()}
    assert first["inputs"] == [1, 2, 9, 3] and first["targets"] == [2, 9, 3, 4]
    assert first["segments"] == [1, 1, 1, 2] and first["positions"] == [0, 1, 2, 0]
    assert first["mask"] == [1, 1, 0, 1]  # 9 -> 3 crosses into another document
    padded = data.Rows(tokens, np.array([0, 3, 7]), 4, packed=False)
    assert [r["inputs"].tolist() for r in (padded[0], padded[1])] == [
        [1, 2, 0, 0], [3, 4, 5, 0]]  # fmt: skip
    assert padded[0]["mask"].tolist() == [1, 1, 0, 0]


def test_packing_changes_no_prediction():
    """A document's logits are the same alone and behind another."""
    net = model.create(Model(dtype="float32", num_decoder_layers=2))
    call = nnx.jit(lambda net, *a, **k: net(*a, **k))
    alone = call(net, jnp.array([[5, 6, 7, 8]])).logits
    both = call(
        net,
        jnp.array([[1, 2, 5, 6, 7, 8]]),
        positions=jnp.array([[0, 1, 0, 1, 2, 3]]),
        segments=jnp.array([[1, 1, 2, 2, 2, 2]]),
    ).logits
    np.testing.assert_allclose(both[:, 2:], alone, atol=1e-5)


def test_the_corpus_is_the_standard_library():
    documents = data.corpus()
    assert documents.about["files"] > 300
    assert not any(
        "def test_" in t and "unittest.TestCase" in t for t in documents.texts[:50]
    )
    assert documents.about["sha256"] == data.corpus().about["sha256"]


def test_files_of_text(tmp_path, capsys):
    lines = [
        f"line {i} of a text that is long enough to be cut\n" * 3 for i in range(40)
    ]
    (tmp_path / "a.txt").write_text("".join(lines))
    (tmp_path / "b.jsonl").write_text(
        "".join(json.dumps({"text": x}) + "\n" for x in lines)
    )
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"text": lines}), tmp_path / "c.parquet")
    for kind, name in (
        ("text", "a.txt"),
        ("jsonl", "b.jsonl"),
        ("parquet", "c.parquet"),
    ):
        c = settings.load(
            ["tiny", f"dataset_type={kind}", f"dataset_path={tmp_path / name}"]
        )
        splits = data.splits(c)
        assert splits.about["bytes"] == sum(map(len, lines))
        text = bytes(splits.train[0]["inputs"][:20].tolist()).decode()
        assert text.startswith("line 0 of a text")
    words = ["tiny", "dataset_type=jsonl", f"dataset_path={tmp_path / 'b.jsonl'}"]
    with pytest.raises(UsageError, match="no field text_field=body; it has text"):
        data.splits(settings.load([*words, "text_field=body"]))
    for kind, content, expected in (
        ("jsonl", '{"text": "a"}\n\n[1]\n', "record 1 has no fields: it is \\[1\\]"),
        ("jsonl", "\xff", "bad.jsonl is not text: byte 0"),
        ("jsonl", "\n", "bad.jsonl has no text: 0 records"),
        ("parquet", "PAR1 no more", "does not read as parquet"),
        ("text", None, "no such file"),
    ):
        path = tmp_path / f"bad.{kind}"
        if content is not None:
            path.write_bytes(content.encode("latin-1"))
        with pytest.raises(UsageError, match=expected):
            kind = f"dataset_type={kind}"
            data.splits(settings.load(["tiny", kind, f"dataset_path={path}"]))
    (tmp_path / "folder").mkdir()
    for kind, expected in (("text", "no text files"), ("jsonl", "no .jsonl files")):
        words = [f"dataset_type={kind}", f"dataset_path={tmp_path / 'folder'}"]
        with pytest.raises(UsageError, match=f"this folder has {expected}"):
            data.splits(settings.load(["tiny", *words]))


def test_tokenizers(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    trainer = tokenizers.trainers.BpeTrainer(
        special_tokens=["<unk>", "</s>"], vocab_size=60
    )
    made.train_from_iterator(["some words and some more words"], trainer)
    path = str(tmp_path / "tokenizer.json")
    made.save(path)
    words = ["tiny", "tokenizer_type=huggingface", f"tokenizer_path={path}"]
    codec = data.tokenizer(settings.load(words))
    assert codec.end == 1 and "words" in codec.decode(codec.encode("words"))
    with pytest.raises(UsageError, match="vocab_size=8: write vocab_size="):
        data.tokenizer(settings.load([*words, "vocab_size=8"]))
    (tmp_path / "bad.json").write_text("{")
    for bad in ("bad.json", "none.json"):
        with pytest.raises(UsageError, match=bad):
            data.tokenizer(
                settings.load([*words[:2], f"tokenizer_path={tmp_path / bad}"])
            )


def test_sentencepiece(tmp_path):
    library = pytest.importorskip("sentencepiece")
    (tmp_path / "text").write_text("\n".join(TEXTS))
    library.SentencePieceTrainer.train(
        input=str(tmp_path / "text"), model_prefix=str(tmp_path / "small"), vocab_size=32,
        minloglevel=2)  # fmt: skip
    words = [
        "tiny",
        "tokenizer_type=sentencepiece",
        f"tokenizer_path={tmp_path}/small.model",
    ]
    codec = data.tokenizer(settings.load(words))
    ids = codec.encode(TEXTS[3])
    assert codec.decode(ids) == TEXTS[3].strip() and max(ids) < codec.size == 32
    (tmp_path / "a.jsonl").write_text(
        "".join(json.dumps({"text": t}) + "\n" for t in TEXTS)
    )
    files = ["dataset_type=jsonl", f"dataset_path={tmp_path}/a.jsonl", "batch_size=2"]
    row = data.splits(settings.load([*words, *files])).train[0]
    first = row["inputs"][row["segments"] == 1]
    assert first[-1] == codec.end and codec.decode(first[:-1]) == TEXTS[0].strip()
    with pytest.raises(UsageError, match="has 32 tokens, but vocab_size=24"):
        data.tokenizer(settings.load([*words, "vocab_size=24"]))
    (tmp_path / "small.model").write_text("not one")
    with pytest.raises(UsageError, match="is no sentencepiece model"):
        data.tokenizer(settings.load(words))


def test_batches_come_in_the_same_order_and_go_on():
    c = settings.load(["tiny"])
    rows = data.splits(c).train
    first = data.batches(rows, c)
    seen = [next(first)["inputs"] for _ in range(3)]
    state = first.get_state()
    after = next(first)["inputs"]
    again = data.batches(rows, c)
    np.testing.assert_array_equal(next(again)["inputs"], seen[0])
    again.set_state(state)
    np.testing.assert_array_equal(next(again)["inputs"], after)
    assert not np.array_equal(seen[0], seen[1])


@pytest.mark.parametrize("dataset", ["corpus", "synthetic"])
def test_batches_of_one_row_go_on_for_ever(dataset):
    """Grain's own endless repeat has a length that batches of 1 overflow."""
    c = settings.load(["tiny", "batch_size=1", f"dataset_type={dataset}"])
    rows = data.Rows(np.arange(40, dtype=np.uint32), np.zeros(1, int), 8, True)
    found = data.batches(rows, c)
    seen = [tuple(next(found)["inputs"][0]) for _ in range(2 * len(rows) + 1)]
    assert len(set(seen)) == len(rows)


# --- libraries --------------------------------------------------------------------------------


class Records:
    """More than anyone can hold; notes what is asked for."""

    def __init__(self, count):
        self.count, self.asked = count, []

    def __len__(self):
        return self.count

    def __getitem__(self, number):
        self.asked.append(number)
        return {"text": f"record {number}: " + "word " * (number % 30)}


@pytest.mark.parametrize("packing", ["true", "false"])
def test_a_library_is_read_as_it_is_needed(monkeypatch, packing):
    records = Records(10**9)
    monkeypatch.setitem(stream.LIBRARIES, "hf", lambda config: records)
    words = ["tiny", "dataset_type=hf", f"packing={packing}", "max_target_length=24",
             "batch_size=4", "eval_steps=2"]  # fmt: skip
    c = settings.load(words)
    splits = data.splits(c)
    assert len(records.asked) < 20  # 2 evaluations of 4 rows
    assert all(number % 20 == 19 for number in records.asked)
    assert max(records.asked) - min(records.asked) > 10**8
    records.asked.clear()
    it = data.batches(splits.train, c)
    seen = [next(it) for _ in range(6)]
    assert 0 < len(records.asked) < 200  # and what is fetched ahead
    assert not any(number % 20 == 19 for number in records.asked)
    state = _from_json(json.loads(json.dumps(it.get_state())))
    after = [next(it) for _ in range(3)]
    again = data.batches(splits.train, c)
    _same(next(again), seen[0])
    again.set_state(state)
    for batch in after:
        _same(next(again), batch)
    other = data.batches(splits.train, settings.load([*words, "seed=1"]))
    assert not np.array_equal(next(other)["inputs"], seen[0]["inputs"])
    _check_rows(seen, packing == "true")


def _same(a, b):
    for name in b:
        np.testing.assert_array_equal(a[name], b[name])


def _check_rows(batches, is_packed):
    """Every row reads as text, document by document."""
    for row in (r for b in batches for r in zip(*(b[k] for k in ("inputs", "targets",
                "positions", "segments", "mask")))):  # fmt: skip
        inputs, targets, positions, segments, mask = row
        assert (targets[:-1][segments[1:] > 0] == inputs[1:][segments[1:] > 0]).all()
        assert (segments > 0).all() or not is_packed
        for segment in set(segments) - {0}:
            inside = segments == segment
            assert (positions[inside] == np.arange(inside.sum())).all()
            assert is_packed or segment == 1
        ends = inputs == 256
        assert not mask[ends].any() and (mask[~ends & (segments > 0)] == 1).all()


def test_the_smallest_library(monkeypatch):
    monkeypatch.setitem(stream.LIBRARIES, "hf", lambda config: Records(19))
    with pytest.raises(UsageError, match="19 documents, and one of every 20"):
        data.splits(settings.load(["tiny", "dataset_type=hf"]))
    monkeypatch.setitem(stream.LIBRARIES, "hf", lambda config: Records(20))
    with pytest.raises(UsageError, match="no field text_field=body; it has text"):
        data.splits(settings.load(["tiny", "dataset_type=hf", "text_field=body"]))


def _texts_of(words):
    """The words' first batches, as sets of documents, train and held out."""
    c = settings.load(["tiny", *words, "packing=false", "max_target_length=100"])
    splits = data.splits(c)
    assert splits.about["documents"] == len(TEXTS)
    it, decode = data.batches(splits.train, c), data.tokenizer(c).decode
    rows = [row for _ in range(60 // c.batch_size + 8) for row in next(it)["inputs"]]
    kept = {decode(row[row < 256]).rstrip("\0") for row in rows}
    held = {
        decode(row[row < 256]).rstrip("\0")
        for row in (splits.held_out[i]["inputs"] for i in range(len(splits.held_out)))
    }
    return kept, held


@pytest.mark.parametrize("kind", ["saved", "files"])
def test_hugging_face_datasets(tmp_path, monkeypatch, kind):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "mine"
    if kind == "saved":
        datasets.Dataset.from_dict({"text": TEXTS}).save_to_disk(folder)
    else:
        folder.mkdir()
        lines = "".join(json.dumps({"text": t}) + "\n" for t in TEXTS)
        (folder / "a.jsonl").write_text(lines)
    kept, held = _texts_of(["dataset_type=hf", f"dataset_path={folder}"])
    assert held == set(TEXTS[19::20]) and kept == set(TEXTS) - held
    with pytest.raises(UsageError, match="dataset_path=.*nowhere") as error:
        data.splits(
            settings.load(
                ["tiny", "dataset_type=hf", f"dataset_path={tmp_path}/nowhere"]
            )
        )
    assert "\n" not in str(error.value)


def test_tensorflow_datasets(tmp_path):
    tfds = pytest.importorskip("tensorflow_datasets")

    class Midtread(tfds.core.GeneratorBasedBuilder):
        VERSION = tfds.core.Version("1.0.0")

        def _info(self):
            return self.dataset_info_from_configs(
                features=tfds.features.FeaturesDict({"text": tfds.features.Text()}),
                disable_shuffling=True,
            )

        def _split_generators(self, manager):
            return {"train": self._generate_examples()}

        def _generate_examples(self):
            return ((i, {"text": text}) for i, text in enumerate(TEXTS))

    Midtread(data_dir=tmp_path, file_format="array_record").download_and_prepare()
    words = ["dataset_type=tfds", "dataset_name=midtread", f"dataset_path={tmp_path}"]
    kept, held = _texts_of(words)
    assert held == set(TEXTS[19::20]) and kept == set(TEXTS) - held
    with pytest.raises(UsageError, match="dataset_name=c4/en:3.1.0.*array_record"):
        data.splits(settings.load(["tiny", words[0], words[2]]))


# --- what is written --------------------------------------------------------------------------


def test_tensorboard_reads_what_was_written(tmp_path):
    """The event file, record by record: a length, its sum, an event, its sum."""
    events = pytest.importorskip("tensorboardX.proto.event_pb2")
    metrics = Metrics(tmp_path, 0, tensorboard=True)
    for i in range(3):
        metrics.write({"step": i, "loss": 3.0 - i, "step_seconds": 0.5})
    metrics.close()
    (file,) = (tmp_path / "tensorboard").iterdir()
    content, found = file.read_bytes(), {}
    while content:
        (size,) = struct.unpack("<Q", content[:8])
        event = events.Event.FromString(content[12 : 12 + size])
        found |= {(v.tag, event.step): v.simple_value for v in event.summary.value}
        content = content[16 + size :]
    losses = {("learning/loss", i): 3.0 - i for i in range(3)}
    assert found == losses | {("perf/step_seconds", i): 0.5 for i in range(3)}
