"""Models of transformers, by their logits: tests/interop/fixtures/make_huggingface.py."""

import dataclasses
import functools
import json
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from midtread import cli
from midtread.interop import huggingface as hf
from midtread.lm import (
    architectures,
    config_json,
    convert,
    data,
    huggingface,
    rope,
    settings,
)
from midtread.lm import cache as kv
from midtread.lm import eval as evals
from midtread.lm.config import Model
from midtread.lm.generate import generate
from midtread.lm.tokenizer import tokenizer
from midtread.lm.usage import UsageError

ROOT = pathlib.Path(__file__).parents[1] / "interop" / "fixtures" / "huggingface"
NAMES = sorted(p.name for p in ROOT.iterdir() if p.is_dir())


def load(name, *words):
    ((path, config),) = settings.load_checkpoints([str(ROOT / name), *words])
    return config, convert.load(config, path)


@functools.partial(jax.jit, static_argnums=0)
def two_ways(graph, state, tokens, cache):
    """Logits of all tokens at once, and from a cache: eight at once, then one by one."""
    anew = lambda: nnx.merge(graph, jax.tree.map(lambda x: x, state))
    net = lambda *a, **k: anew()(*a, **k)
    B, T = tokens.shape
    at = lambda first, last: jnp.broadcast_to(
        jnp.arange(first, last), (B, last - first)
    )
    begun = net(tokens[:, :8], at(0, 8), cache=cache)

    def one(cache, i):
        here = jax.lax.dynamic_slice_in_dim(tokens, i, 1, axis=1)
        out = net(here, jnp.full((B, 1), i), cache=cache)
        return out.cache, out.logits[:, 0]

    _, rest = jax.lax.scan(one, begun.cache, jnp.arange(8, T))
    return net(tokens).logits, jnp.concatenate([begun.logits, rest.swapaxes(0, 1)], 1)


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_transformers(name):
    known = np.load(ROOT / name / "expected.npz")
    config, net = load(name, "max_target_length=16")
    tokens = jnp.asarray(known["tokens"], jnp.int32)
    for got in two_ways(*nnx.split(net), tokens, kv.make(config, *tokens.shape)):
        np.testing.assert_allclose(got, known["logits"], atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("name", NAMES)
def test_a_model_knows_its_architecture(name):
    """From config.json to keys and back; the names of the one hold the other's arrays."""
    config = json.loads((ROOT / name / "config.json").read_text())
    m = Model(**config_json.settings_of(config, name))
    arch, again = config_json.config_of(m)
    assert arch.model_type in (config["model_type"], "llama")
    assert Model(**config_json.settings_of(again, name)) == m or name == "phi3"


@pytest.mark.parametrize("name", ["qwen2", "deepseek_v3", "gpt_oss"])
def test_import_and_export_keep_every_bit(name, tmp_path, monkeypatch, capsys):
    """A folder becomes a run and a folder again; a list of layers reads the same."""
    monkeypatch.chdir(tmp_path)
    assert cli.main(["import", str(ROOT / name)]) == 0
    assert cli.main(["export", f"runs/{name}", "export_path=out"]) == 0
    assert "tensors" in capsys.readouterr().out
    before, after = hf.Folder(ROOT / name), hf.Folder("out")
    assert before.tensors == after.tensors
    for tensor in before.tensors:
        np.testing.assert_array_equal(before.read(tensor), after.read(tensor))
    shutil.move(f"runs/{name}", "elsewhere")
    ((path, config),) = settings.load_checkpoints(["elsewhere", "scan_layers=false"])
    _, scanned = load(name)
    listed = convert.load(config, path)
    tokens = jnp.arange(6)[None]
    np.testing.assert_allclose(
        listed(tokens).logits, scanned(tokens).logits, atol=1e-5, rtol=1e-5
    )


def changed(tmp_path, name, change):
    """A folder whose config.json says something else."""
    path = tmp_path / name
    shutil.copytree(ROOT / name, path)
    about = hf.read_json(path / "config.json")
    about = {k: v for k, v in about.items() if k not in {"rope_parameters", *change}}
    (path / "config.json").write_text(json.dumps({**about, **change}))
    return path


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("llama2", {}),
        ("qwen2", {"use_sliding_window": False}),
        ("qwen3", {}),
        ("qwen3_moe", {"norm_topk_prob": True}),
        ("phi3", {"partial_rotary_factor": 0.5}),
        ("gemma2", {"query_pre_attn_scalar": 8}),
        (
            "gemma3",
            {"query_pre_attn_scalar": 8, "layer_types": ["sliding_attention"] * 3},
        ),
    ],
)
def test_a_gguf_file_says_what_the_folder_says(name, change, tmp_path, capsys):
    path, file = changed(tmp_path, name, change), tmp_path / "a.gguf"
    words = ["format=q8_0", f"export_path={file}"]
    assert cli.main(["export", str(path), *words]) == 0
    folder, again = (
        Model(**config_json.settings_of(huggingface.open_model(p).config, str(p)))
        for p in (path, file)
    )
    assert again == folder


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("qwen2", {}, "use_sliding_window=True has no place in GGUF"),
        ("qwen3_moe", {"norm_topk_prob": False}, "norm_topk_prob=False has no place"),
        ("gemma2", {"query_pre_attn_scalar": 12}, "llama.cpp's gemma2 has 8"),
        ("gemma2", {"query_pre_attn_scalar": 8, "attn_logit_softcapping": None},
         "attn_logit_softcapping=None has no place"),
        ("gemma3", {"query_pre_attn_scalar": 8}, "layer_types="),
        ("gemma3", {"query_pre_attn_scalar": 8, "layer_types": ["sliding_attention"] * 3,
                    "rope_parameters": {
                        "full_attention": {"rope_type": "linear", "factor": 8.0},
                        "sliding_attention": {"rope_type": "default"}}},
         "rope_type 'linear' is not written"),
        ("llama2", {"hidden_act": "gelu_pytorch_tanh"}, "hidden_act='gelu_pytorch_tanh'"),
    ],
)  # fmt: skip
def test_what_llama_cpp_has_otherwise_is_refused(
    name, change, message, tmp_path, capsys
):
    path, file = changed(tmp_path, name, change), tmp_path / "a.gguf"
    assert cli.main(["export", str(path), "format=q8_0", f"export_path={file}"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and message in said
    assert not list(tmp_path.glob("a.gguf*"))


def test_null_switches_caps_off():
    """Gemma 2's are 50 and 30 where config.json does not name them, and off with null."""
    config = hf.read_json(ROOT / "gemma2" / "config.json")
    caps = ("attn_logit_softcapping", "final_logit_softcapping")
    for given, want in ((dict.fromkeys(caps), (0, 0)), ({}, (50, 30))):
        rest = {k: v for k, v in config.items() if k not in caps}
        got = config_json.settings_of({**rest, **given}, "gemma2")
        assert (got["attn_logits_soft_cap"], got["final_logits_soft_cap"]) == want
    m = Model(**config_json.settings_of({**config, **dict.fromkeys(caps)}, "gemma2"))
    arch, about = config_json.config_of(m)
    assert arch.model_type == "gemma2" and about[caps[0]] is about[caps[1]] is None


def test_the_docs_list_every_architecture():
    page = (pathlib.Path(__file__).parents[2] / "docs/bring-your-model.md").read_text()
    rows = [f"| `{a.model_type}` | {a.models} |" for a in architectures.ARCHITECTURES]
    assert "\n".join(rows) in page


def test_others_are_refused_with_the_nearest():
    with pytest.raises(UsageError, match=r"'gemma3' is not among.*gemma3_text"):
        config_json.settings_of({"model_type": "gemma3"}, "a folder")
    llama = json.loads((ROOT / "llama2" / "config.json").read_text())
    for wrong, words in (
        ({"hidden_act": "relu"}, "hidden_act='relu'; known are silu"),
        ({"rope_parameters": {"rope_type": "dynamic"}}, "rope_type='dynamic'"),
        ({"num_key_value_heads": 3}, "is not a multiple of"),
        ({"partial_rotary_factor": 0.5}, "turns whole heads of Llama"),
        ({"model_type": "mistral", "sliding_window": "8"}, "sliding_window='8', which"),
        ({"model_type": "mistral", "sliding_window": True}, "be a whole number"),
    ):
        with pytest.raises(UsageError, match=words):
            config_json.settings_of({**llama, **wrong}, "a folder")


def test_a_model_that_turns_parts_of_heads_is_a_phi3():
    """Transformers turns whole heads of a Llama, whatever its config.json says."""
    llama = json.loads((ROOT / "llama2" / "config.json").read_text())
    m = Model(**config_json.settings_of(llama, "llama2"), partial_rotary_factor=0.5)
    arch, about = config_json.config_of(m)
    assert arch.model_type == "phi3" and about["pad_token_id"] is None
    assert Model(**config_json.settings_of(about, "again")) == m


def test_one_mscale_alone_is_not_used():
    """Transformers takes mscale and mscale_all_dim together, or neither."""
    config = json.loads((ROOT / "deepseek_v3" / "config.json").read_text())
    yarn = {"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 32}

    def turns(**given):
        about = {**config, "rope_parameters": {"rope_theta": 1e4, **yarn, **given}}
        return rope.of(Model(**config_json.settings_of(about, "a folder")))

    plain = 0.1 * np.log(4) + 1
    for given in ({}, {"mscale": 0.7}, {"mscale_all_dim": 0.7}):
        assert turns(**given).gain == pytest.approx(plain)
    both = turns(mscale=0.7, mscale_all_dim=0.4).gain
    assert both == pytest.approx((0.07 * np.log(4) + 1) / (0.04 * np.log(4) + 1))


def test_what_is_no_model_is_answered(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "models"
    shutil.copytree(ROOT / "qwen3", folder / "qwen3")
    for words, message in (
        (["import", "models"], "/models/qwen3?"),
        (["import", "models/qwen3/config.json"], "no such run or checkpoint"),
    ):
        assert cli.main(words) == 2
        assert message in capsys.readouterr().err
    (folder / "qwen3" / "model.safetensors").rename(folder / "qwen3" / "a.bin")
    assert cli.main(["import", "models/qwen3"]) == 2
    assert "a.bin, a pickle" in capsys.readouterr().err
    shutil.rmtree(folder / "qwen3")
    assert cli.main(["generate", "models"]) == 2
    assert "a published model a config.json" in capsys.readouterr().err
    assert cli.main(["import", str(ROOT / "qwen3")]) == 0
    assert "has no tokenizer.json" in capsys.readouterr().out


@pytest.fixture
def talker(tmp_path):
    """A folder with a tokenizer of words, a beginning, and a template."""
    tokenizers = pytest.importorskip(
        "tokenizers", reason="tokenizer.json is its format"
    )
    folder = tmp_path / "talker"
    shutil.copytree(ROOT / "llama2", folder)
    words = ["<s>", "</s>", "<|user|>", "<|reply|>", *"abcdefghijklmnopqrstuvwxyz .,?!"]
    made = tokenizers.Tokenizer(
        tokenizers.models.BPE({w: i for i, w in enumerate(words)}, [])
    )
    made.add_special_tokens(words[:4])
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    made.save(str(folder / "tokenizer.json"))
    template = (
        "{{ bos_token }}{% for m in messages %}<|user|>{{ m['content'] }}{% endfor %}"
        "{% if add_generation_prompt %}<|reply|>{% endif %}"
    )
    says = {"bos_token": "<s>", "eos_token": {"content": "</s>"}}
    about = json.dumps({**says, "chat_template": template})
    (folder / "tokenizer_config.json").write_text(about)
    return folder


def test_a_folder_without_a_tokenizer_takes_one(talker, capsys):
    words = ["generate", str(ROOT / "llama2"), "prompt=hi", "max_new_tokens=2"]
    assert cli.main(words) == 2
    assert "whose folder has no tokenizer.json takes" in capsys.readouterr().err
    path = talker / "tokenizer.json"
    more = ["tokenizer_type=huggingface", f"tokenizer_path={path}"]
    assert cli.main([*words, *more]) == 0
    assert capsys.readouterr().out.startswith("hi")


def test_an_end_mark_of_an_unusual_name_is_known_by_its_number(talker, capsys):
    """config.json has 2 as its eos_token_id, and none of the usual names is there."""
    file = talker / "tokenizer.json"
    file.write_text(file.read_text().replace("</s>", "<end>"))
    (talker / "tokenizer_config.json").unlink()
    ((_, config),) = settings.load_checkpoints([str(talker)])
    assert tokenizer(config).end == 2
    about = hf.read_json(talker / "config.json") | {"eos_token_id": None}
    (talker / "config.json").write_text(json.dumps(about))
    assert cli.main(["generate", str(talker), "prompt=hi"]) == 2
    assert "Name it as eos_token in a tokenizer_config" in capsys.readouterr().err


def test_a_trained_run_says_what_ends_a_text(talker):
    """In config.json, once exported; a run of bytes has no tokenizer.json beside it."""
    ((_, config),) = settings.load_checkpoints([str(talker)])
    assert huggingface._ends(config) == {"eos_token_id": [1, 2]}
    bytes_ = dataclasses.replace(config, tokenizer_type="byte", tokenizer_path="")
    assert huggingface._ends(bytes_) == {}


def test_a_model_is_asked_by_its_template_and_judged_by_windows(talker, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("a bit of text, to be judged by. " * 3)
    words = [str(talker), f"dataset_path={text}", "max_target_length=16", "prompt=hi"]
    ((path, config),) = settings.load_checkpoints(words)
    codec = tokenizer(config)
    assert codec.begin == (0,) and codec.stops == (1, 2)  # eos_token; config.json's
    assert codec.asked("hi") == "<s><|user|>hi<|reply|>"
    net = convert.load(config, path)
    made = generate(net, codec, dataclasses.replace(config, max_new_tokens=2))
    assert made.texts[0].startswith("hi\n")
    (judged,) = evals.evaluate([(path, config)])
    assert judged.window == 16 and judged.tokens == 96
    batches, _ = data.windows(config)
    rows = np.concatenate([b["inputs"] for b in batches])
    np.testing.assert_array_equal(rows[:6, 0], 0)  # each begins with <s>
    logits = [net(b["inputs"], b["positions"]).logits for b in batches]
    nats = [
        -jnp.take_along_axis(jax.nn.log_softmax(x), b["targets"][..., None], -1)[..., 0]
        * b["mask"]
        for x, b in zip(logits, batches)
    ]
    np.testing.assert_allclose(judged.loss, sum(map(jnp.sum, nats)) / 96, rtol=1e-5)


def test_a_template_cannot_reach_out(talker):
    about = json.loads((talker / "tokenizer_config.json").read_text())
    about["chat_template"] = "{{ messages.__class__.__mro__ }}"
    (talker / "tokenizer_config.json").write_text(json.dumps(about))
    ((_, config),) = settings.load_checkpoints([str(talker)])
    with pytest.raises(UsageError, match="its chat template does not run"):
        tokenizer(config).asked("hi")
