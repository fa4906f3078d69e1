"""Folders that are damaged or hostile: refused by name, or read as they should be.

500 seeded mutations of headers, shapes, dtypes, offsets, indices and configs of the folders
that transformers wrote. Each is opened as the command line opens a folder: config.json as
keys, every name and shape held against the model, one array read. What comes out must be a
UsageError that names the folder, or the right shapes; nothing else, and fast.
"""

import copy
import functools
import json
import pathlib
import random
import shutil

import numpy as np
import pytest

from midtread.interop import huggingface as hf
from midtread.lm import architectures, huggingface
from midtread.lm.config import Model
from midtread.lm.usage import UsageError

ROOT = pathlib.Path(__file__).parent / "fixtures" / "huggingface"
FOLDERS = ("llama31", "qwen2", "mixtral", "gemma3", "deepseek_v3")
STRANGE = [
    None, -1, 0, 1, 3, 7, 2**31, 2**63, 10**30, 1.5, -0.0, 1e308, True, False, "", "8",
    "float32", [], [1], ["x"], {}, {"rope_type": "yarn"}, {"factor": -1}, "../x", "\0",
]  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def shapes_once():
    """Shapes of a model are traced once for every model that comes up."""
    real = architectures.shapes
    architectures.shapes = functools.cache(real)
    yield
    architectures.shapes = real


def change(rng: random.Random, value):
    """A value, or something in it, replaced."""
    if isinstance(value, dict) and value and rng.random() < 0.8:
        key = rng.choice(sorted(value))
        if rng.random() < 0.2:
            return {k: v for k, v in value.items() if k != key}
        if rng.random() < 0.1:
            return {(f"{k}x" if k == key else k): v for k, v in value.items()}
        return {**value, key: change(rng, value[key])}
    if isinstance(value, list) and value and rng.random() < 0.7:
        at = rng.randrange(len(value))
        out = copy.copy(value)
        out[at] = change(rng, out[at])
        return out[: rng.randrange(len(out) + 1)] if rng.random() < 0.2 else out
    if type(value) is int and rng.random() < 0.6:
        return value + rng.choice([-8, -1, 1, 8, 2**40])
    return rng.choice(STRANGE)


def config(rng, folder):
    file = folder / "config.json"
    file.write_text(json.dumps(change(rng, json.loads(file.read_text()))))


def index(rng, folder):
    file = folder / hf.INDEX
    if file.is_file():
        file.write_text(json.dumps(change(rng, json.loads(file.read_text()))))
    else:
        file.write_text(json.dumps({"weight_map": change(rng, {"a": "b", "c": "d"})}))


def shard(rng, folder):
    return rng.choice(sorted(folder.glob("*.safetensors")))


def header(rng, folder):
    file = shard(rng, folder)
    data = file.read_bytes()
    size = int.from_bytes(data[:8], "little")
    text = json.dumps(change(rng, json.loads(data[8 : 8 + size]))).encode()
    if rng.random() < 0.3:  # a length that is not its own
        size = rng.choice([0, 1, len(text) - 1, len(text) + 1, 2**40, 2**63])
    else:
        size = len(text)
    rest = data[8 + int.from_bytes(data[:8], "little") :]
    file.write_bytes(size.to_bytes(8, "little") + text + rest)


def raw(rng, folder):
    """Bytes of any file flipped, cut off or repeated."""
    file = rng.choice([folder / "config.json", shard(rng, folder)])
    data = bytearray(file.read_bytes())
    at = rng.randrange(min(len(data), 2000))
    kind = rng.randrange(3)
    if kind == 0:
        data[at] ^= 1 << rng.randrange(8)
    elif kind == 1:
        del data[at:]
    else:
        data[at:at] = data[: rng.randrange(64)]
    file.write_bytes(bytes(data))


def files(rng, folder):
    """A file that is missing, doubled, or a pickle."""
    kind, file = rng.randrange(3), shard(rng, folder)
    if kind == 0:
        file.unlink()
    elif kind == 1:
        shutil.copy(file, folder / "another.safetensors")
    else:
        file.rename(folder / "pytorch_model.bin")


MUTATIONS = (config, config, header, header, index, raw, files)


@pytest.mark.parametrize("block", range(5))
def test_500_mutations(block, tmp_path):
    counts = {"refused": 0, "read": 0}
    for number in range(block * 100, block * 100 + 100):
        rng = random.Random(number)
        folder = tmp_path / f"m{number}"
        shutil.copytree(ROOT / rng.choice(FOLDERS), folder)
        mutate = rng.choice(MUTATIONS)
        mutate(rng, folder)
        try:
            says = huggingface.keys_of(folder)
            m = Model(**{k: v for k, v in says.items() if hasattr(Model, k)})
            found = huggingface.arrays(folder, m)
            path = rng.choice(sorted(found))
            array = found[path]
        except UsageError as error:
            assert str(folder) in str(error), (number, mutate.__name__, error)
            counts["refused"] += 1
        else:
            assert array.shape == architectures.shapes(m)[path].shape, number
            assert np.asarray(array).dtype.kind in "fV", number
            counts["read"] += 1
        shutil.rmtree(folder)
    assert counts["refused"] > 40 and counts["read"] > 5, counts
