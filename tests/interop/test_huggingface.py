"""Hugging Face folders as a library: any names, any tree, nothing left over."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

import midtread as mt
from midtread.interop import huggingface as hf

LAYERS = {"n": range(3)}
TABLE = [
    hf.Row("embed.weight", "embedder/table"),
    hf.Row("h.{n}.qkv.weight", "layers/q/kernel", LAYERS, True, slice(0, 4)),
    hf.Row("h.{n}.qkv.weight", "layers/kv/kernel", LAYERS, True, slice(4, 6)),
    hf.Row("h.{n}.norm.weight", "layers/{n}/norm/scale", LAYERS),
    hf.Row("h.{n}.x.{e}.w", "layers/experts", {**LAYERS, "e": range(2)}, turned=True),
    hf.Row("h.{n}.both", "layers/even", LAYERS, part=slice(0, None, 2), axis=1),
    hf.Row("h.{n}.both", "layers/odd", LAYERS, part=slice(1, None, 2), axis=1),
]


def tensors():
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32)
    out = {"embed.weight": draw(7, 5)}
    for n in range(3):
        out |= {f"h.{n}.qkv.weight": draw(6, 5), f"h.{n}.norm.weight": draw(5)}
        out |= {f"h.{n}.x.{e}.w": draw(2, 5) for e in range(2)}
        out[f"h.{n}.both"] = draw(3, 4)
    return out


@pytest.fixture
def folder(tmp_path):
    hf.write_tensors(tmp_path / "a", tensors(), {"model_type": "x"}, shard_bytes=300)
    return tmp_path / "a"


def test_shards_become_a_tree_and_come_back_the_same(folder, tmp_path):
    assert len(list(folder.glob("*.safetensors"))) > 2
    source, given = hf.Folder(folder), tensors()
    tree = hf.read(source, TABLE)
    shapes = {k: v.shape for k, v in tree.items()}
    assert shapes["layers/q/kernel"] == (3, 5, 4)
    assert shapes["layers/experts"] == (3, 2, 5, 2)
    assert shapes["layers/1/norm/scale"] == (5,)
    np.testing.assert_array_equal(
        tree["layers/kv/kernel"][2], given["h.2.qkv.weight"][4:].T
    )
    np.testing.assert_array_equal(tree["layers/odd"][1], given["h.1.both"][:, 1::2])
    hf.write(tmp_path / "b", tree, TABLE, source.config)
    again = hf.Folder(tmp_path / "b")
    assert again.tensors == source.tensors and again.config == source.config
    for name, array in given.items():
        np.testing.assert_array_equal(again.read(name), array)


def test_a_reader_of_codes_plugs_in(folder):
    class Codes:
        name, real = "codes", hf.Folder(folder)
        tensors = real.tensors

        def read(self, name):
            x = jnp.asarray(self.real.read(name))
            is_weight = name.endswith("qkv.weight")
            return mt.quantize(x, "int8", channelwise_axes=(0,)) if is_weight else x

    tree, floats = hf.read(Codes(), TABLE), hf.read(Codes.real, TABLE)
    kernel = tree["layers/q/kernel"]
    assert isinstance(kernel, mt.QArray) and kernel.scale.shape == (3, 1, 4)
    error = jnp.abs(mt.dequantize(kernel) - floats["layers/q/kernel"])
    assert float(error.max()) < 0.02


def test_leftovers_are_refused_in_both_directions(folder, tmp_path):
    source = hf.Folder(folder)
    with pytest.raises(ValueError, match=r"'h.0.both', which nothing is made of"):
        hf.read(source, TABLE[:-2])
    with pytest.raises(ValueError, match=r"is not cut into layers/even: row 1"):
        hf.read(source, TABLE[:-1])
    with pytest.raises(ValueError, match=r"no tensor 'h.3.extra'.*near it"):
        hf.read(source, [*TABLE, hf.Row("h.{n}.extra", "b", {"n": range(3, 4)})])
    target = hf.read(source, TABLE)
    with pytest.raises(ValueError, match=r"the target does not have it"):
        hf.read(source, TABLE, {k: v for k, v in target.items() if "even" not in k})
    with pytest.raises(ValueError, match=r"no row makes 'more'"):
        hf.read(source, TABLE, {**target, "more": target["layers/odd"]})
    wrong = {**target, "layers/odd": np.zeros((3, 3, 3))}
    with pytest.raises(ValueError, match=r"'h.0.both'.*target has \[3, 3, 3\]"):
        hf.read(source, TABLE, wrong)
    with pytest.raises(ValueError, match=r"'layers/odd' is missing from the tree"):
        hf.write(
            tmp_path / "b",
            {k: v for k, v in target.items() if "odd" not in k},
            TABLE,
            {},
        )
    assert not (tmp_path / "b").exists()
    assert hf.read(source, TABLE[:-2], ignored=[r"h\.\d\.both"])


def test_folders_that_are_none_say_why(folder, tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(ValueError, match=r"has no config.json"):
        hf.Folder(empty)
    (empty / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"has no .safetensors"):
        hf.Folder(empty)
    (empty / "pytorch_model.bin").write_bytes(b"cos\nsystem\n")
    with pytest.raises(
        ValueError, match=r"a pickle.*runs whatever code.*save_pretrained"
    ):
        hf.Folder(empty)
    index = json.loads((folder / hf.INDEX).read_text())
    for wrong, words in (
        ("../x.safetensors", "not the name"),
        ("y.safetensors", "lacks"),
    ):
        changed = {**index["weight_map"], "embed.weight": wrong}
        (folder / hf.INDEX).write_text(json.dumps({"weight_map": changed}))
        with pytest.raises(ValueError, match=words):
            hf.Folder(folder)
    (folder / hf.INDEX).unlink()
    with pytest.raises(ValueError, match=r"but no model.safetensors.index.json"):
        hf.Folder(folder)
