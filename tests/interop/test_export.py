"""Models into the folders and files of others, tensor by tensor, and back."""

import importlib.util
import json
import os
import pathlib
import shutil
import sys
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import midtread as mt
from midtread.interop import export, gguf_export, huggingface, quantized, targets
from midtread.interop.huggingface import Folder, Row, write_tensors
from midtread.numerics.qarray import QArray

CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 256,
    "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 96, "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0, "max_position_embeddings": 128, "tie_word_embeddings": False,
}  # fmt: skip


def tensors(seed=0, dtype=np.float32):
    """A Llama of two layers, by Hugging Face's names."""
    shapes = {"model.embed_tokens.weight": (96, 256), "model.norm.weight": (256,),
              "lm_head.weight": (96, 256)}  # fmt: skip
    for n in range(2):
        layer = f"model.layers.{n}"
        shapes |= {
            f"{layer}.input_layernorm.weight": (256,),
            f"{layer}.post_attention_layernorm.weight": (256,),
            f"{layer}.self_attn.q_proj.weight": (256, 256),
            f"{layer}.self_attn.k_proj.weight": (128, 256),
            f"{layer}.self_attn.v_proj.weight": (128, 256),
            f"{layer}.self_attn.o_proj.weight": (256, 256),
            f"{layer}.mlp.gate_proj.weight": (512, 256),
            f"{layer}.mlp.up_proj.weight": (512, 256),
            f"{layer}.mlp.down_proj.weight": (256, 512),
        }
    rng = np.random.default_rng(seed)
    return {k: (rng.normal(size=s) / 16).astype(dtype) for k, s in shapes.items()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("llama") / "float"
    write_tensors(path, tensors(), CONFIG, shard_bytes=1_000_000)
    return Folder(path)


def values(q) -> np.ndarray:
    if not isinstance(q, QArray):
        return np.asarray(q, np.float32)
    return np.asarray(mt.dequantize(q.map(jnp.asarray), jnp.float32))


UP = "model.layers.1.mlp.up_proj.weight"
MOST = {
    "int4": 0.14,
    "int8": 0.011,
    "float8_e4m3fn": 0.04,
    "nvfp4": 0.12,
    "mxfp4": 0.16,
}


@pytest.mark.parametrize("name", list(targets.TARGETS))
def test_a_float_folder_is_exported(folder, tmp_path, name):
    said = []
    path = export.export(folder, tmp_path / "out", name, say=said.append)
    source = quantized.open_model(path)
    target = targets.TARGETS[name]
    assert dict.fromkeys(source.tensors) == dict.fromkeys(folder.tensors)
    for tensor in (UP, "model.layers.0.self_attn.q_proj.weight"):
        q = source.read(tensor)
        assert isinstance(q, QArray) and q.format.name == target.qtype
        want = folder.read(tensor)
        loss = np.linalg.norm(values(q) - want) / np.linalg.norm(want)
        assert loss < MOST[target.qtype]
        # what quantizing in memory gives, up to scales that the layout rounds to float16
        exact = values(targets.quantized(want, targets.spec_of(target)))
        np.testing.assert_allclose(values(q), exact, rtol=2**-10, atol=1e-6)
    np.testing.assert_array_equal(
        source.read("lm_head.weight"), folder.read("lm_head.weight")
    )
    assert "MB/s" in said[-1]
    assert not list(tmp_path.glob("*.partial"))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, np.float16])
@pytest.mark.parametrize("name", list(targets.TARGETS))
def test_a_folder_of_16_bits_is_exported(tmp_path, name, dtype):
    """Most models are published so, and nvfp4's scales need more than bfloat16."""
    write_tensors(tmp_path / "in", tensors(dtype=dtype), CONFIG)
    source = Folder(tmp_path / "in")
    again = quantized.open_model(export.export(source, tmp_path / "out", name))
    want = source.read(UP).astype(np.float32)
    loss = np.linalg.norm(values(again.read(UP)) - want) / np.linalg.norm(want)
    assert loss < MOST[targets.TARGETS[name].qtype]


@pytest.mark.parametrize("rows", [96, 288])
def test_the_last_block_may_be_cut_off(tmp_path, rows):
    """DeepSeek-V3 has 576 rows in a matrix, and blocks of 128."""
    name = "model.layers.0.self_attn.kv_a_proj_with_mqa.weight"
    want = np.random.default_rng(0).normal(size=(rows, 256)).astype(np.float32)
    write_tensors(tmp_path / "in", {name: want}, CONFIG)
    path = export.export(Folder(tmp_path / "in"), tmp_path / "out", "fp8_block")
    stored = Folder(path)
    assert stored.tensors[name].shape == (rows, 256)
    assert stored.tensors[f"{name}_scale"].shape == (-(-rows // 128), 2)
    exact = targets.quantized(want, targets.spec_of(targets.TARGETS["fp8_block"]))
    again = values(quantized.open_model(path).read(name))
    np.testing.assert_array_equal(again, values(exact))


@pytest.mark.parametrize("name", list(gguf_export.KINDS))
def test_a_float_folder_becomes_gguf(folder, tmp_path, name):
    path = export.export(folder, tmp_path / "out.gguf", name)
    source = quantized.open_model(path)
    same = {k: CONFIG[k] for k in CONFIG if k not in ("architectures", "rms_norm_eps")}
    assert {k: source.config[k] for k in same} == same
    assert set(source.tensors) == set(folder.tensors)
    for tensor in folder.tensors:  # rows of q and k are back in their order
        want = folder.read(tensor)
        loss = np.linalg.norm(values(source.read(tensor)) - want) / np.linalg.norm(want)
        assert loss < 0.14, tensor
    assert source.file.tensors["blk.0.ffn_up.weight"].kind == gguf_export.KINDS[name]


def test_codes_go_from_layout_to_layout(folder, tmp_path):
    """GPTQ to compressed-tensors to MLX to GGUF: the same codes in all of them."""
    first = export.export(folder, tmp_path / "gptq", "gptq", group_size=32)
    want = quantized.open_model(first).read(UP)
    for name in ("w4a16", "awq", "mlx4", "q4_0"):
        out = tmp_path / (f"{name}.gguf" if name == "q4_0" else name)
        path = export.export(quantized.open_model(first), out, name)
        q = quantized.open_model(path).read(UP)
        np.testing.assert_array_equal(
            q.qvalue.astype(np.int8), want.qvalue.astype(np.int8)
        )
        np.testing.assert_allclose(values(q), values(want), rtol=1e-6)


def test_what_a_target_cannot_say_is_refused_before_a_byte(folder, tmp_path):
    first = export.export(folder, tmp_path / "fp8", "fp8")
    coded = quantized.open_model(first)
    cases = [
        (folder, "w4a17", {}, "'w4a17' is not written; w4a16"),
        (folder, "w4a16", {"group_size": 96}, "Write group_size=256"),
        (folder, "fp8", {"group_size": 64}, "a scale for every row. Drop it"),
        (coded, "awq", {}, "is not awq .* Write format=fp8"),
        (coded, "q8_0", {}, "is in no kind of block"),
        (coded, "mlx4", {}, "is not mlx4 .* Write format=fp8"),
        (folder, "mlx4", {"group_size": 16}, "MLX has groups of 32, 64, 128"),
    ]
    for source, name, options, message in cases:
        path = tmp_path / ("out.gguf" if name == "q8_0" else "out")
        with pytest.raises(ValueError, match=message):
            export.export(source, path, name, **options)
        assert not path.exists() and not path.with_name(f"{path.name}.partial").exists()
    with pytest.raises(ValueError, match="there already"):
        export.export(folder, first, "fp8")


@pytest.mark.parametrize("name", ["gptq", "awq", "q4_0", "q4_k", "q8_0"])
@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
def test_scales_that_float16_lacks_are_refused_or_listed(tmp_path, name, dtype):
    """Before a byte is written."""
    path, said = tmp_path / ("out.gguf" if name.startswith("q") else "out"), []
    weights = tensors()
    weights[UP][3, :128] = 1e7
    write_tensors(
        tmp_path / "large", {k: v.astype(dtype) for k, v in weights.items()}, CONFIG
    )
    with pytest.raises(ValueError, match=f"{UP}: its scale .* is beyond float16"):
        export.export(Folder(tmp_path / "large"), path, name)
    assert not list(tmp_path.glob("out*"))
    weights[UP][3, :256] = 1e-9
    write_tensors(
        tmp_path / "small", {k: v.astype(dtype) for k, v in weights.items()}, CONFIG
    )
    export.export(Folder(tmp_path / "small"), path, name, say=said.append)
    assert f"({UP}, ...): scales are float16 there" in said[0]
    assert not np.any(values(quantized.open_model(path).read(UP))[3])


class Killed(Exception):
    pass


@pytest.mark.parametrize("wrong", [np.nan, -np.inf])
@pytest.mark.parametrize(
    "name", ["w4a16", "nvfp4", "mxfp4", "fp8", "mlx4", "gguf_mxfp4", "q8_0"]
)
def test_numbers_that_are_not_finite_are_refused(tmp_path, name, wrong):
    held = tensors()
    held[UP][3, 5] = wrong
    write_tensors(tmp_path / "float", held, CONFIG)
    path = tmp_path / ("out.gguf" if name in gguf_export.KINDS else "out")
    with pytest.raises(ValueError, match="up_proj.* (NaN|nan|inf)"):
        export.export(Folder(tmp_path / "float"), path, name)
    assert not list(tmp_path.glob("out*"))


@pytest.mark.parametrize("name", ["w4a16", "gptq", "mlx4", "q4_0"])
def test_scales_that_are_not_finite_are_refused(folder, tmp_path, name):
    export.export(folder, tmp_path / "coded", "w4a16", group_size=32)
    coded = Folder(tmp_path / "coded")
    held = {k: coded.read(k).copy() for k in coded.tensors}
    held[f"{UP}_scale"][3, 5] = np.nan
    write_tensors(tmp_path / "damaged", held, coded.config)
    path = tmp_path / ("out.gguf" if name in gguf_export.KINDS else "out")
    with pytest.raises(ValueError, match="up_proj.* (NaN|nan)"):
        export.export(quantized.open_model(tmp_path / "damaged"), path, name)
    assert not list(tmp_path.glob("out*"))


@pytest.mark.parametrize("name", ["gptq", "awq"])
def test_words_that_rows_do_not_fill_are_refused_before_a_byte(tmp_path, name):
    held = {UP: np.ones((20, 256), np.float32)}
    write_tensors(tmp_path / "float", held, CONFIG)
    with pytest.raises(ValueError, match="does not fill the words.* Leave it in float"):
        export.export(Folder(tmp_path / "float"), tmp_path / "out", name)
    assert not list(tmp_path.glob("out*"))


class Dying(Folder):
    """A folder that can be read so many times."""

    left = 1000

    def read(self, name):
        self.left -= 1
        if self.left < 0:
            raise Killed
        return super().read(name)


@pytest.mark.parametrize("name", ["w4a16", "q4_k"])
def test_a_killed_export_goes_on(folder, tmp_path, monkeypatch, name):
    monkeypatch.setattr(export, "FILE_BYTES", 100_000)
    path = tmp_path / ("out.gguf" if name == "q4_k" else "out")
    looks = 16 if name == "q4_k" else 0  # matrices, whose scales are to fit float16
    source = Dying(folder.path)
    source.left = looks + 12
    with pytest.raises(Killed):
        export.export(source, path, name)
    assert not path.exists()  # nothing that looks finished
    said = []
    source = Dying(folder.path)
    export.export(source, path, name, say=said.append)
    assert any("going on after" in text for text in said)
    assert 1000 - source.left < looks + len(folder.tensors)  # it did not begin again
    assert not list(tmp_path.glob("*.partial*"))
    whole = tmp_path / f"whole-{path.name}"
    export.export(folder, whole, name)
    if name == "q4_k":
        assert whole.read_bytes() == path.read_bytes()
        return
    assert json.loads((whole / "config.json").read_text()) == json.loads(
        (path / "config.json").read_text()
    )
    again, once = quantized.open_model(path), quantized.open_model(whole)
    for tensor in folder.tensors:
        np.testing.assert_array_equal(
            values(again.read(tensor)), values(once.read(tensor))
        )


@pytest.mark.parametrize("name", ["w4a16", "q4_k"])
def test_an_export_goes_on_from_the_same_weights_alone(tmp_path, monkeypatch, name):
    """Half of one model and half of another would be neither."""
    monkeypatch.setattr(export, "FILE_BYTES", 100_000)
    path = tmp_path / ("out.gguf" if name == "q4_k" else "out")
    write_tensors(tmp_path / "float", tensors(), CONFIG)
    source = Dying(tmp_path / "float")
    source.left = 28 if name == "q4_k" else 12
    with pytest.raises(Killed):
        export.export(source, path, name)
    shutil.rmtree(tmp_path / "float")
    write_tensors(tmp_path / "float", tensors(seed=1), CONFIG)
    for file in (tmp_path / "float").iterdir():  # as copies have the times of old files
        os.utime(file, ns=(0, 0))
    export.export(Folder(tmp_path / "float"), path, name)
    whole = tmp_path / f"whole-{path.name}"
    export.export(Folder(tmp_path / "float"), whole, name)
    again, once = quantized.open_model(path), quantized.open_model(whole)
    for tensor in once.tensors:
        np.testing.assert_array_equal(
            values(again.read(tensor)), values(once.read(tensor))
        )


def test_what_a_kill_left_is_no_part_of_the_folder(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(export, "FILE_BYTES", 100_000)
    source = Dying(folder.path)
    source.left = 12
    with pytest.raises(Killed):
        export.export(source, tmp_path / "out", "w4a16")
    (tmp_path / "out.partial" / "part-00009.safetensors.x.partial").write_text("begun")
    export.export(folder, tmp_path / "out", "w4a16")
    assert not list((tmp_path / "out").glob("*partial"))


def test_memory_is_one_file_and_one_tensor(tmp_path, monkeypatch):
    """64 MB in eight shards; what is held at once is a fraction of it."""
    rng = np.random.default_rng(0)
    big = {f"model.layers.{i}.mlp.up_proj.weight": rng.normal(size=(1024, 1024))
           .astype(np.float32) for i in range(16)}  # fmt: skip
    write_tensors(tmp_path / "big", big, CONFIG, shard_bytes=8_000_000)
    del big
    source = Folder(tmp_path / "big")
    targets.quantized(source.read("model.layers.0.mlp.up_proj.weight"),
                     targets.spec_of(targets.TARGETS["w4a16"]))  # fmt: skip
    monkeypatch.setattr(export, "FILE_BYTES", 4_000_000)
    tracemalloc.start()
    export.export(source, tmp_path / "out", "w4a16")
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 24e6


def test_a_tree_of_ours_is_exported(tmp_path):
    """Stacked [in, out] kernels of any Flax model, with a table of names."""
    x = jax.random.normal(jax.random.key(0), (2, 64, 32))
    q = mt.quantize(x, "int4", channelwise_axes=[0, 2], tiled_axes={1: 32})
    tree = {"layers/up/kernel": q, "norm/scale": jnp.ones(32)}
    table = [
        Row("layers.{n}.up.weight", "layers/up/kernel", {"n": range(2)}, turned=True),
        Row("norm.weight", "norm/scale"),
    ]
    source = huggingface.Tree(tree, table, {"model_type": "mine"})
    path = export.export(source, tmp_path / "out", "w4a16")
    read = quantized.open_model(path)
    back = huggingface.read(read, table)["layers/up/kernel"]
    np.testing.assert_array_equal(mt.dequantize(back), mt.dequantize(q))
    np.testing.assert_array_equal(back.qvalue, q.qvalue)


@pytest.mark.slow
def test_four_gigabytes_need_less_than_one_and_a_half():
    stream = pathlib.Path(__file__).parents[2] / "benchmarks" / "stream.py"
    spec = importlib.util.spec_from_file_location("stream", stream)
    module = importlib.util.module_from_spec(spec)
    sys.modules["stream"] = module  # for the process that is started
    spec.loader.exec_module(module)
    sys.path.insert(0, str(stream.parent))
    found = module.run(4.0, "w4a16")
    assert found["imported"][1] < 1.5e9 and found["quantized"][1] < 1.5e9
