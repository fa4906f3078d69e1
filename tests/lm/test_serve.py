"""Checkpoints quantized, read back, judged; text from them; caches in few bits."""

import dataclasses
import json
import pathlib
import re
import shlex
import shutil
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import midtread as mt
from midtread import cli
from midtread.interop import orbax as interop
from midtread.kernels.environment import implementation, watched
from midtread.lm import (
    build,
    cache,
    calibrate,
    convert,
    data,
    decode,
    model,
    room,
    settings,
)
from midtread.lm import eval as evals
from midtread.lm.config import Model, section
from midtread.lm.decode import Sampling, choose
from midtread.lm.generate import Pieces, generate, stop_tokens
from midtread.lm.manual import manual_quantize
from midtread.lm.tokenizer import Tokenizer
from midtread.lm.train import train
from midtread.lm.usage import UsageError
from midtread.report import run as report

WORDS = [
    "tiny",
    "num_decoder_layers=1",
    "steps=8",
    "learning_rate=0.01",
    "max_new_tokens=12",
]


@nnx.jit
def call(net, tokens, positions=None, cache=None):
    return net(tokens, positions, cache=cache)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    words = [*WORDS, f"base_output_directory={folder}", "run_name=a"]
    return str(train(settings.load(words)).folder)


@pytest.mark.parametrize(
    "value", ["int4w", pytest.param("int8", marks=pytest.mark.slow)]
)
def test_a_quantized_checkpoint_is_quantizing_in_memory(run, value):
    ((_, config),) = settings.load_checkpoints([run, f"quantization={value}"])
    folder = convert.quantize(config, run, say=lambda text: None)
    codec = data.tokenizer(config)
    ((_, own),) = settings.load_checkpoints([str(folder)])
    assert own.quantization == value  # the checkpoint knows
    stored = convert.load(own, str(folder))
    in_memory = convert.load(config, run)
    assert isinstance(stored.decoder.layers.mlp.wo.kernel, mt.WithAux)
    both = [generate(m, codec, config) for m in (stored, in_memory)]
    np.testing.assert_array_equal(both[0].tokens, both[1].tokens)
    tokens = jnp.asarray([codec.encode("import os")])
    np.testing.assert_array_equal(
        call(stored, tokens).logits, call(in_memory, tokens).logits
    )


@pytest.mark.parametrize(
    "algorithm",
    [
        "gptq",
        *(
            pytest.param(x, marks=pytest.mark.slow)
            for x in ("awq,gptq", "clip,learn", "rotate,gptq")
        ),
    ],
)
def test_a_calibrated_checkpoint_is_calibrating_in_memory(run, tmp_path, algorithm):
    words = [run, "quantization=int4w", "calibration_batches=2"]
    words += [f"algorithm={algorithm}"]
    words += [f"save_quantized_params_path={tmp_path / 'q'}"]
    assert cli.main(["quantize", *words]) == 0
    assert (
        f"weights by {algorithm.replace(',', ' + ')}"
        in (tmp_path / "q" / "calibration.txt").read_text()
    )
    assert not (tmp_path / "q.solved").exists()
    ((_, own),) = settings.load_checkpoints([str(tmp_path / "q")])
    ((_, config),) = settings.load_checkpoints(words)
    floats = convert.load(dataclasses.replace(config, quantization=""), run)
    made, report = calibrate.calibrated(config, floats, tmp_path / "again", print)
    tokens = jnp.arange(8)[None]
    stored = convert.load(own, str(tmp_path / "q"))
    np.testing.assert_array_equal(
        call(stored, tokens).logits, call(made, tokens).logits
    )
    assert all(row.cost <= row.rounded for row in report.rows)
    if algorithm == "gptq":
        assert cli.main(["report", str(tmp_path / "q")]) == 0
        page = (tmp_path / "q" / "report.html").read_text()
        assert "KL, nats per token" in page and "Nothing: every weight was" in page
        assert page.count("Among the worst") == 5 and page.count("<svg") == 5


def test_a_stack_whose_inputs_are_rotated_is_served(tmp_path, capsys):
    """What docs/four-bits.md advises for int8: layers are a stack, each with its signs."""
    words = ["tiny", "num_decoder_layers=2", "steps=1", "eval_interval=0"]
    words.append(f"base_output_directory={tmp_path}")
    path = str(train(settings.load(words)).folder)
    asked = ["quantization=int8", "algorithm=rotate,round", "calibration_batches=2"]
    assert cli.main(["quantize", path, *asked]) == 0
    assert cli.main(["eval", f"{path}-int8"]) == 0, capsys.readouterr().err
    ((_, config),) = settings.load_checkpoints([f"{path}-int8"])
    served = convert.load(config, f"{path}-int8")
    signs = served.decoder.layers.mlp.wo.kernel.array.pre_rotation
    assert signs.shape[0] == 2 and not jnp.array_equal(*signs)


def test_calibration_sees_no_batch_twice(run, tmp_path, capsys):
    lines = "".join(f'{{"text": "{number} and some more words"}}\n' * 2 for number in range(50))  # fmt: skip
    (tmp_path / "few.jsonl").write_text(lines)
    words = [run, "quantization=int4w", f"dataset_path={tmp_path}/few.jsonl"]
    words += ["algorithm=clip", f"save_quantized_params_path={tmp_path}/q"]
    assert cli.main(["quantize", *words]) == 0
    note = (
        r"has (\d+) batches of batch_size=4, not calibration_batches=32: all are seen"
    )
    found = re.search(note, " ".join(capsys.readouterr().out.split()))
    assert found and 1 < int(found[1]) < 32


def test_an_fp8_weight_is_served_as_it_is_trained():
    """serve_fp8_weight: one scale per weight, one per token, as in the recipe's forward."""
    words = ["dtype=float32", "quantization=serve_fp8_weight"]
    config = settings.load([*WORDS, *words])
    trained = build.for_training(config, model.create(section(config, Model)))
    served = convert.in_memory(config, model.create(section(config, Model)))
    stored = served.decoder.layers.mlp.wo.kernel.array
    assert stored.qvalue.dtype == jnp.float8_e4m3fn and stored.scale.size == 1
    tokens = jnp.asarray([[1, 2, 3, 4]])
    np.testing.assert_allclose(
        call(trained, tokens).logits, call(served, tokens).logits, atol=1e-5
    )


def test_weights_are_served_from_a_mesh(run):
    """Cut like the float ones; scales too, or whole on every device."""
    base = [run, "quantization=int8w"]
    tokens, logits = jnp.asarray([[1, 2, 3, 4]]), {}
    for words, parts in (([], (1, 1)), (["mesh=fsdp:4,data:2"], (4, 4)),
                         (["mesh=fsdp:4,data:2", "replicate_quant_scale=true"], (4, 1))):  # fmt: skip
        ((_, config),) = settings.load_checkpoints([*base, *words])
        net = convert.load(config, run)
        stored = net.decoder.layers.mlp.wo.kernel.array
        for x, count in zip((stored.qvalue[...], stored.scale[...]), parts):
            assert x.sharding.shard_shape(x.shape)[-1] == x.shape[-1] // count
        if parts != (4, 4):
            logits[parts] = call(net, tokens).logits
    np.testing.assert_allclose(logits[1, 1], logits[4, 1], atol=0.05)


@pytest.mark.parametrize("damage", ["flipped", "truncated"])
def test_damaged_float_weights_are_refused(run, damage, tmp_path, capsys):
    folder = tmp_path / "a"
    shutil.copytree(run, folder)
    files = [p for p in folder.glob("checkpoints/8/params/**/*") if p.is_file()]
    largest = max(files, key=lambda p: p.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 0xFF
    largest.write_bytes(content if damage == "flipped" else content[:9000])
    verb = {"flipped": "quantize", "truncated": "generate"}[damage]
    assert cli.main([verb, str(folder), "quantization=int8w"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and f"{folder} is damaged" in error
    assert not list(tmp_path.glob("a-*"))


def test_weights_can_be_kept_in_another_dtype(run):
    ((_, config),) = settings.load_checkpoints([run, "weight_dtype=bfloat16"])
    net = convert.load(config, run)
    kernel = net.decoder.layers.mlp.wo.kernel[...]
    ((_, same),) = settings.load_checkpoints([run])
    exact = convert.load(same, run).decoder.layers.mlp.wo.kernel[...]
    assert kernel.dtype == jnp.bfloat16 and exact.dtype == jnp.float32
    np.testing.assert_array_equal(kernel, exact.astype(jnp.bfloat16))


def test_quantizing_holds_one_float_parameter(run, monkeypatch, tmp_path):
    held, most, real = [], [0], convert.read_one

    def read_one(*args):
        most[0] = max(most[0], sum(ref() is not None for ref in held))
        param = real(*args)
        held.append(weakref.ref(param))
        return param

    monkeypatch.setattr(convert, "read_one", read_one)
    words = [run, "quantization=int4w", f"save_quantized_params_path={tmp_path / 'q'}"]
    ((_, config),) = settings.load_checkpoints(words)
    convert.quantize(config, run, say=lambda text: None)
    floats = 4  # embedding and norms stay as they are
    assert len(held) > 2 * floats and most[0] <= floats


@pytest.mark.parametrize("value,bits", [("int8w", 8), ("int4w", 4)])
def test_bytes_on_disk_are_what_the_format_promises(tmp_path, value, bits):
    """On weights wide enough that names and shapes do not count."""
    config = settings.load(["tiny", "emb_dim=512", "mlp_dim=1024", "num_decoder_layers=1",
                            "head_dim=256", f"quantization={value}"])  # fmt: skip
    net = convert.in_memory(config, model.create(section(config, Model)))
    params = nnx.state(net.decoder.layers.mlp, nnx.Param)
    interop.save(tmp_path / "params", net.decoder.layers.mlp)
    from midtread.lm.checkpoint import nbytes

    weights = 3 * 512 * 1024
    promised = weights * bits / 8 + 4 * (1024 + 1024 + 512)
    assert convert.nbytes(params) == promised
    assert nbytes(tmp_path / "params") < promised * 1.06 + 20_000


def test_eval_generate_report_and_quantize_from_the_command_line(run, capsys):
    assert cli.main(["quantize", run, "quantization=int4w", "overwrite=true"]) == 0
    out = capsys.readouterr().out
    assert "bytes of weights instead of" in out and "int4" in out
    quantized = f"{run}-int4w"
    config = settings.load_checkpoints([run, "quantization=int4w"])[0][1]
    with pytest.raises(UsageError, match="int4w/params"):
        damaged = pathlib.Path(f"{run}-damaged-int4w/params")
        shutil.copytree(quantized, damaged.parent)
        largest = max(damaged.rglob("*"), key=lambda p: p.stat().st_size * p.is_file())
        largest.write_bytes(b"x" + largest.read_bytes()[1:])
        convert.load(config, str(damaged.parent))
    sizes = json.loads(pathlib.Path(quantized, "sizes.json").read_text())
    assert sizes["bytes"] < sizes["float_bytes"] * 0.6  # the embedding is float
    assert cli.main(["eval", run, quantized, "target_loss=9"]) == 0
    table = capsys.readouterr().out
    assert (
        "bits/byte" in table
        and "int4w" in table
        and "target_loss after 8 steps" in table
    )
    assert cli.main(["generate", quantized, "prompt=[def f, class]", "temperature=1",
                     "top_k=5", "quantize_kvcache=true", "kv_quant_dtype=fp8"]) == 0  # fmt: skip
    text = capsys.readouterr().out
    assert "def f" in text and "---\nclass" in text and "tokens/s" in text
    assert cli.main(["report", run, quantized]) == 0
    page = (pathlib.Path(run).parent / "report.html").read_text()
    assert page.count("<svg") == 2 and "a-int4w" in page  # loss, and bytes
    texts = re.findall(r"<h3>(.*?)</h3><pre>(import .*?)</pre>", page, re.DOTALL)
    assert [name for name, _ in texts] == ["a", "a-int4w"]
    assert re.search(r"<td>quantization</td>.*<td[^>]*>int4w</td>", page)
    assert page.count("held-out loss</th>") == 1 and "<details" in page
    assert "Every weight was rounded to nearest" in page
    assert cli.main(["report", "nowhere.tflite"]) == 2
    assert "no such file: nowhere.tflite" in capsys.readouterr().err


TOKENIZER = json.dumps(
    {"version": "1.0", "added_tokens": [], "model": {"type": "WordLevel", "unk_token": "a",
     "vocab": {"a": 0, "</s>": 1}}}
)  # fmt: skip
WRONG = {
    "no checkpoint": (["generate"], "which checkpoint?"),
    "nowhere": (["eval", "load_parameters_path=/nowhere"], "/nowhere"),
    "nothing to do": (["quantize", "{run}"], "quantize needs quantization"),
    "for training": (["quantize", "{run}", "quantization=te_nvfp4"], "is for training"),
    "there already": (["quantize", "{run}", "quantization=int8w"], "overwrite=true"),
    "twice": (["quantize", "{run}-int8w", "quantization=int8w"], "quantized already"),
    "another model": (
        ["generate", "{run}", "emb_dim=64"],
        "emb_dim=32 there, emb_dim=64 here",
    ),
    "vocabulary": (["eval", "{run}", "vocab_size=300"], "vocab_size=264 there"),
    "no such run": (["report", "nowhere"], "no such run or checkpoint: nowhere"),
    "a mesh": (
        ["quantize", "{run}", "quantization=int4w", "mesh=fsdp:8"],
        "one device",
    ),
    "too many devices": (["generate", "{run}", "mesh=fsdp:16"], "there are 8"),
    "another tokenizer": (
        [
            "generate",
            "{run}",
            "tokenizer_type=huggingface",
            "tokenizer_path={run}/t.json",
        ],
        "trained with another tokenizer (byte)",
    ),
    "an algorithm that is none": (
        [
            "quantize",
            "{run}",
            "quantization=int4w",
            "algorithm=gptqq",
            "save_quantized_params_path={run}-apart",
        ],
        "Did you mean 'gptq'?",
    ),
    "an empty prompt": (["generate", "{run}", "prompt="], "prompt is empty"),
    "groups of floats": (["eval", "{run}", "group_size=32"], "of float weights"),
    "groups in training": (
        ["train", "tiny", "quantization=int8w", "group_size=32"],
        "group_size=32 is about stored weights",
    ),
    "a stop of two": (["generate", "{run}", "stop=[ab]"], "a stop is one: write"),
    "one stop, of two": (["generate", "{run}", "stop=ab"], "a stop is one: write"),
    "no such cache": (
        ["generate", "{run}", "quantize_kvcache=true", "kv_quant_dtype=int2"],
        "int8 | int4 | fp8",
    ),
    "a static range": (
        ["generate", "{run}", "quant=[{{act_qtype: int8, act_static_scale: true}}]"],
        "rule 0 ('.*') has act_static_scale",
    ),
    "nothing to make": (
        ["generate", "{run}-int8w", "quantization=int4w"],
        "quantized already, with quantization=int8w: drop quantization=int4w",
    ),
    "other groups": (
        ["eval", "{run}-int8w", "group_size=16"],
        "quantized already, with group_size=0: drop group_size=16",
    ),
    "scales of no mesh": (
        ["eval", "{run}", "replicate_quant_scale=true"],
        "about the devices of a mesh",
    ),
    "a run is no checkpoint": (
        [
            "quantize",
            "{run}",
            "quantization=int4w",
            "save_quantized_params_path={run}",
            "overwrite=true",
        ],
        "{run} is no quantized checkpoint, so overwrite=true does not replace it",
    ),
    "one place for two": (
        [
            "quantize",
            "{run}",
            "{run}",
            "quantization=int4w",
            "save_quantized_params_path={run}-b",
        ],
        "is for one checkpoint, and 2 are given",
    ),
    "no folder to write": (
        ["export", "{run}", "export_path={run}/config.yml/out"],
        "config.yml/out.partial: Not a directory.",
    ),
    "a kind of file": (["export", "{run}", "format=gguf"], "A .gguf file has a kind"),
    "a run of ours": (
        ["import", "{run}", "run_name=b"],
        "{run} is a run already: give it to quantize, eval, generate or export",
    ),
    "a seed beyond 64 bits": (
        ["generate", "{run}", "temperature=1", f"seed={2**63}"],
        "seed=9223372036854775808 is out of range: it must be below",
    ),
    "a name that is no text": (["eval", "{run}\udce9"], "is not text in UTF-8"),
    "a cache without end": (
        ["generate", "{run}", "max_new_tokens=1000000000000"],
        "What would fit: ",
    ),
}


def test_a_command_that_is_stopped_promises_what_is_true(run, capsys, monkeypatch):
    def stop(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("midtread.lm.decode.complete", stop)
    assert cli.main(["generate", run]) == 130
    assert capsys.readouterr().out == "stopped.\n"


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_one_line(run, case, capsys):
    if not convert.is_quantized(f"{run}-int8w"):
        cli.main(["quantize", run, "quantization=int8w"])
        capsys.readouterr()
        pathlib.Path(run, "t.json").write_text(TOKENIZER)
    words, expected = WRONG[case]
    assert cli.main([w.format(run=run) for w in words]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1
    assert expected.format(run=run) in error


def test_the_page_about_a_file_lies_beside_it(run, tmp_path, monkeypatch, capsys):
    file = tmp_path / "a.gguf"
    words = ["format=q8_0", f"export_path={file}"]
    assert cli.main(["export", run, *words]) == 0
    monkeypatch.setattr(evals, "reported", lambda checkpoints: [])
    monkeypatch.setattr(report, "write", lambda runs, path: path)
    assert cli.main(["report", str(file)]) == 0
    assert f"report: {tmp_path / 'report.html'}" in capsys.readouterr().out


def test_a_checkpoint_with_groups_is_reported(run, tmp_path, capsys):
    """Its float run is judged beside it, without the groups."""
    path = str(tmp_path / "groups")
    words = [
        "quantization=int4w",
        "group_size=16",
        f"save_quantized_params_path={path}",
    ]
    assert cli.main(["quantize", run, *words]) == 0
    assert cli.main(["report", path]) == 0, capsys.readouterr().err
    assert "KL, nats per token" in (tmp_path / "groups" / "report.html").read_text()
    capsys.readouterr()
    for damaged in ("{", "[]", "{}"):
        (tmp_path / "groups" / "sizes.json").write_text(damaged)
        for verb in ("generate", "report"):
            assert cli.main([verb, path]) == 2
            assert capsys.readouterr().err == (
                f"error: {path}/sizes.json is damaged: quantize the float run again.\n"
            )


def test_other_data_is_judged_without_what_the_runs_own_needed(tmp_path, capsys):
    lines = [json.dumps({"body": f"line {i} of text " * 9}) for i in range(99)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    own = ["dataset_type=jsonl", f"dataset_path={tmp_path}/a.jsonl", "text_field=body"]
    words = [*WORDS, *own, f"base_output_directory={tmp_path}", "eval_interval=0"]
    path = str(train(settings.load(words)).folder)
    (tmp_path / "prose.txt").write_text("some words\n\n" * 500)
    assert cli.main(["eval", path, f"dataset_path={tmp_path}/prose.txt"]) == 0
    assert cli.main(["eval", path, "dataset_type=synthetic", "target_loss=0.1"]) == 0
    assert "run: no step with target_loss=0.1 in its metrics" in capsys.readouterr().out


def test_a_gguf_file_without_a_tokenizer_is_read_as_bytes(run, tmp_path, capsys):
    file = str(tmp_path / "a.gguf")
    assert cli.main(["export", run, "format=q8_0", f"export_path={file}"]) == 0
    assert cli.main(["eval", run, file]) == 0, capsys.readouterr().err
    where = f"base_output_directory={tmp_path}"
    assert cli.main(["import", file, "run_name=b", where]) == 0
    assert "It has no tokenizer: text is read byte by byte" in capsys.readouterr().out
    assert cli.main(["generate", f"{tmp_path}/b", "prompt=a", "max_new_tokens=2"]) == 0


def test_weights_without_room_are_one_line(run, capsys, monkeypatch):
    monkeypatch.setattr(room, "bytes_free", lambda: 40_000)
    assert cli.main(["generate", run]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: the weights need ") and error.count("\n") == 1
    assert "and cpu has 40.0 kB left" in error and "weight_dtype=bfloat16 (3" in error
    assert (
        f"`midtread quantize {run} quantization=int4w`, and its checkpoint (" in error
    )
    if not convert.is_quantized(f"{run}-int8w"):
        cli.main(["quantize", run, "quantization=int8w"])
    monkeypatch.setattr(room, "bytes_free", lambda: 20_000)
    assert cli.main(["generate", f"{run}-int8w"]) == 2
    assert "fit: mesh=fsdp:-1 with more devices" in capsys.readouterr().err
    monkeypatch.setattr(room, "bytes_free", lambda: 100)  # nor for the cache
    words = ["check_memory=false", "max_new_tokens=2"]
    assert cli.main(["generate", f"{run}-int8w", *words]) == 0, capsys.readouterr().err


def test_memory_that_runs_out_on_the_way_is_one_line(run, capsys, monkeypatch):
    def fail(*args, **kwargs):
        raise jax.errors.JaxRuntimeError(
            "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 12 bytes."
        )

    monkeypatch.setattr("midtread.lm.decode.complete", fail)
    assert cli.main(["generate", run]) == 2
    assert capsys.readouterr().err == (
        "error: Out of memory while trying to allocate 12 bytes. What would help: fewer "
        "decode_slots or max_new_tokens, quantize_kvcache=true, or fewer bits.\n"
    )


# --- caches -----------------------------------------------------------------------------------

SMALL = {
    "dtype": "float32",
    "num_decoder_layers": 2,
    "emb_dim": 32,
    "head_dim": 16,
    "mlp_dim": 32,
}
MLA = {**SMALL, "attention_type": "mla", "num_experts": 4, "num_experts_per_tok": 2,
       "first_num_dense_layers": 1, "moe_mlp_dim": 16, "routed_score_func": "sigmoid",
       "rope_scaling": "yarn,factor:4,original_max_position_embeddings:4,mscale_all_dim:1"}  # fmt: skip


@pytest.mark.parametrize("fields", [SMALL, MLA], ids=["gqa", "mla"])
def test_a_cache_changes_nothing(fields, key):
    m = Model(**fields)
    net = model.create(m)
    tokens = jax.random.randint(key, (2, 8), 0, 256)
    whole = call(net, tokens).logits
    out = call(net, tokens[:, :5], cache=cache.make(m, 2, 8))
    np.testing.assert_allclose(out.logits, whole[:, :5], atol=2e-5)
    for i in range(5, 8):
        out = call(net, tokens[:, i : i + 1], jnp.full((2, 1), i), out.cache)
        np.testing.assert_allclose(out.logits, whole[:, i : i + 1], atol=2e-5)


@pytest.mark.parametrize("axis", ["dkv", "heads_and_dkv"])
@pytest.mark.parametrize("fmt,error", [("int8", 0.02), ("fp8", 0.08), ("int4", 0.35)])
def test_caches_in_few_bits(fmt, axis, error, key):
    m = Model(**SMALL)
    net = model.create(m)
    tokens = jax.random.randint(key, (2, 8), 0, 256)
    made = cache.make(m, 2, 8, (fmt, axis))
    rows = made["layers"].rows["k"]
    heads = m.num_kv_heads if axis == "dkv" else 1
    assert rows.scale.shape == (2, 2, 8, heads, 1)
    assert rows.qvalue.dtype == {"int8": jnp.int8, "int4": jnp.int4}.get(
        fmt, jnp.float8_e4m3fn
    )
    out = call(net, tokens, cache=made).logits
    exact = call(net, tokens).logits
    assert 0 < float(jnp.abs(out - exact).max()) < error * float(jnp.abs(exact).max())
    bits = 4 if fmt == "int4" else 8
    values = 2 * 2 * 2 * 8 * m.num_kv_heads * m.head_dim
    assert cache.nbytes(made) == values * bits // 8 + 2 * 2 * 2 * 8 * heads * 4


# What differs from SMALL, and how the cache is kept.
STEPS = {
    "llama": ({}, ("int8", "dkv")),
    "gemma": ({"norm_scale_offset": True, "use_qk_norm": True, "num_kv_heads": 1,
               "sliding_window_size": 4, "layer_pattern": "LG"},
              ("fp8", "heads_and_dkv")),
    "phi": ({"scan_layers": False, "partial_rotary_factor": 0.5}, ("int8", "dkv")),
}  # fmt: skip


@pytest.mark.parametrize("name", STEPS)
def test_a_token_by_kernels(name, key):
    """What a GPU would run, interpreted: the same logits and cache as by XLA."""
    fields, cache_format = STEPS[name]
    m = Model(**{**SMALL, "head_dim": 32, **fields})
    net, tokens = model.create(m), jax.random.randint(key, (2, 6), 0, 256)
    net = decode.prepare(net) if not m.scan_layers else net
    before = call(net, tokens[:, :5], cache=cache.make(m, 2, 8, cache_format)).cache
    step = lambda: call(net, tokens[:, 5:], jnp.full((2, 1), 5), before)
    want, taken = step(), []
    note = lambda operation, _, choice: taken.append((operation, choice.name))
    with implementation("interpret"), watched(note):
        got = step()
    np.testing.assert_allclose(got.logits, want.logits, atol=5e-3)
    for x, y in zip(jax.tree.leaves(got.cache), jax.tree.leaves(want.cache)):
        x, y = np.float32(x), np.float32(y)
        assert np.linalg.norm(x - y) < 0.02 * np.linalg.norm(y)
    assert {(op, "triton") for op in ("attend", "write", "add and norm")} <= {*taken}


def test_prompts_of_any_length_do_not_disturb_each_other():
    config = settings.load(
        ["tiny", "dtype=float32", "num_decoder_layers=1", "max_new_tokens=6"]
    )
    net, codec = model.create(section(config, Model)), data.tokenizer(config)
    together = generate(net, codec, config, ["a longer prompt", "x"])
    alone = generate(net, codec, config, ["x"])
    np.testing.assert_array_equal(together.tokens[1], alone.tokens[0])


def test_sampling(key):
    logits = jnp.log(jnp.array([[0.5, 0.3, 0.15, 0.05]]))
    draw = lambda how: {
        int(choose(logits, jax.random.split(jax.random.fold_in(key, i), 1), how)[0])
        for i in range(60)
    }
    assert draw(Sampling()) == {0}
    assert draw(Sampling(1.0)) >= {0, 1, 2}
    assert draw(Sampling(1.0, top_k=2)) == {0, 1}
    assert draw(Sampling(1.0, top_p=0.6)) == {0, 1}
    assert draw(Sampling(1.0, top_p=0.01)) == {0}


def test_text_comes_as_it_is_made():
    config = settings.load(["tiny", "num_decoder_layers=1", "max_new_tokens=8"])
    net, codec = model.create(section(config, Model)), data.tokenizer(config)
    pieces = []
    made = generate(net, codec, config, ["ab"], on_text=pieces.append)
    assert made.texts[0].startswith("ab") and len(made.tokens[0]) == 8
    assert made.texts[0] == "ab" + "".join(pieces)
    stop = codec.decode(made.tokens[0][3:4])  # text ends before it, also as it comes
    config, pieces = dataclasses.replace(config, stop=(stop,)), []
    made = generate(net, codec, config, ["ab"], on_text=pieces.append)
    assert made.texts[0] == "ab" + "".join(pieces) and stop not in "".join(pieces)


def spaced():
    """A tokenizer that drops the space at the beginning of a text, as Llama 2's does: words
    have a token with a space, and another for behind other letters."""
    words = [f"{chr(97 + i % 26)}{i}" for i in range(130)] + [";"]
    texts = [*(f" {word}" for word in words), *words, "<end>"]
    encode = lambda text: [words.index(x) for x in text.split() if x in words]
    decode = lambda ids: "".join(texts[i] for i in ids).removeprefix(" ")
    return Tokenizer("spaced", len(texts), len(texts) - 1, encode, decode)


def test_a_text_goes_on_with_its_space():
    words = ["tiny", "num_decoder_layers=1", "max_new_tokens=9", "vocab_size=263"]
    config, codec, pieces = settings.load(words), spaced(), []
    net, prompts = model.create(section(config, Model)), ["a0 b1 c2", "d3"]
    made = generate(net, codec, config, prompts, on_text=pieces.append)
    for text, prompt, tokens in zip(made.texts, prompts, made.tokens):
        assert text == codec.decode([*codec.encode(prompt), *tokens])
    assert made.texts[0] == prompts[0] + "".join(pieces)
    assert " " in made.texts[0].removeprefix(prompts[0])[:1]


def test_a_stop_is_every_token_of_that_text():
    codec = spaced()
    assert stop_tokens(settings.load(["stop=;"]), codec) == (codec.end, 130, 261)


def test_text_that_is_decoded_anew_is_not_lost():
    """A part of a letter may undo the letters before it, which are not taken back."""
    texts = {1: "a", 2: "a\ufffd", 3: "\ufffd\ufffdx"}
    decode = lambda ids: texts.get(len(ids), "")
    pieces: list[str] = []
    out = Pieces(Tokenizer("anew", 9, 8, None, decode), pieces.append)
    for token in (1, 2, 3):
        out.add([token])
    out.end()
    assert pieces == ["a", "\ufffdx"]


def test_text_that_ends_within_a_letter_is_whole():
    codec, pieces = data.tokenizer(settings.load(["tiny"])), []
    out = Pieces(codec, pieces.append)
    for token in (*b"a", 0xC3):
        out.add([token])
    assert pieces == ["a"]
    out.end()
    assert pieces == ["a", "\ufffd"]


# --- experts ----------------------------------------------------------------------------------


def test_experts_are_a_sum_over_the_chosen(key):
    """Against every expert run on every token, in float64's stead: plain matmuls."""
    from midtread.lm.moe import Moe

    m = Model(
        dtype="float32", num_experts=4, num_experts_per_tok=2, emb_dim=16, moe_mlp_dim=8
    )
    moe = Moe(m, nnx.Rngs(0))
    x = jax.random.normal(key, (2, 5, 16))
    got, load = moe(x)
    balance = moe.balance([load])
    weights, chosen, _ = moe.route(x.reshape(10, 16))
    flat, expected = x.reshape(10, 16), np.zeros((10, 16))
    for n in range(10):
        for k in range(2):
            e = int(chosen[n, k])
            hidden = jax.nn.silu(flat[n] @ moe.wi_0[e]) * (flat[n] @ moe.wi_1[e])
            expected[n] += float(weights[n, k]) * np.asarray(hidden @ moe.wo[e])
    np.testing.assert_allclose(got.reshape(10, 16), expected, atol=1e-5)
    np.testing.assert_allclose(weights.sum(1), 1, rtol=1e-6)
    assert 0.9 < float(balance) < 2.5


def test_groups_limit_the_choice(key):
    from midtread.lm.moe import within_best_groups

    m = Model(
        num_experts=8, num_experts_per_tok=2, n_routing_groups=4, topk_routing_group=1
    )
    choice = jnp.array([[0.9, 0.0, 0.6, 0.5, 0.1, 0.2, 0.3, 0.3]])
    kept = within_best_groups(m, choice)
    assert jnp.isfinite(kept).tolist() == [[False, False, True, True, *[False] * 4]]


SIZES = {"llama3-8b": 8_030_261_248, "deepseek-v3": 671_026_419_200,
         "qwen3-moe-30b": 30_532_122_624}  # fmt: skip


@pytest.mark.parametrize("name", SIZES)
def test_real_parameter_counts(name):
    config = settings.load([name])
    net = model.abstract(section(config, Model))
    assert model.parameters(net) == SIZES[name]


def test_explain_of_the_largest(capsys):
    assert cli.main(["explain", "deepseek-v3", "quantization=fp8_full"]) == 0
    out = capsys.readouterr().out
    assert "671,026,419,200 parameters" in out and "76.2% of 3.07 PFLOP" in out


def test_explain_of_a_float_checkpoint_that_is_served(capsys):
    assert cli.main(["explain", "tiny", "serve=16"]) == 0
    assert "quantization: nothing is quantized\n" in capsys.readouterr().out


def test_explain_of_a_checkpoint_that_is_served(capsys):
    words = ["tiny", "num_decoder_layers=1", "quantization=int8w", "kernels=h200"]
    assert cli.main(["explain", *words, "serve=16"]) == 0
    out = capsys.readouterr().out
    assert "faster as it is: 1.61x of bfloat16, with int8 rows 1.33x" in out
    assert "int8w: weights once, for good" in out and "[16,1,32]" in out
    assert cli.main(["explain", *words, "serve=some"]) == 2
    assert "serve=some: a number of sequences" in capsys.readouterr().err


def test_layers_in_a_list_are_the_same_model(key):
    tokens = jax.random.randint(key, (1, 6), 0, 256)
    m = Model(**SMALL)
    scanned = model.create(m)
    listed = model.create(dataclasses.replace(m, scan_layers=False))
    layers = listed.decoder.layers
    stacked = nnx.to_pure_dict(nnx.state(scanned.decoder.layers, nnx.Param))
    for i, layer in enumerate(layers):
        one = nnx.state(layer, nnx.Param)
        nnx.replace_by_pure_dict(one, jax.tree.map(lambda a, i=i: a[i], stacked))
        nnx.update(layer, one)
    listed.token_embedder.embedding[...] = scanned.token_embedder.embedding[...]
    np.testing.assert_allclose(
        call(listed, tokens).logits, call(scanned, tokens).logits, atol=1e-5
    )


@pytest.mark.slow
def test_an_int8_cache_changes_few_tokens(tmp_path):
    """Of the demo model: the likeliest next token, after the same text, for 2% or fewer."""
    words = ["demo", f"base_output_directory={tmp_path}", "run_name=a"]
    folder = str(train(settings.load(words)).folder)
    ((_, config),) = settings.load_checkpoints([folder])
    net, rows = convert.load(config, folder), data.splits(config).held_out
    tokens = data.stack([rows[i] for i in range(0, 1280, 40)])["inputs"]
    greedy = lambda how: jnp.argmax(
        call(net, tokens, cache=cache.make(config, *tokens.shape, how)).logits, -1
    )
    exact = greedy(None)
    for axis in ("dkv", "heads_and_dkv"):
        assert float(jnp.mean(greedy(("int8", axis)) != exact)) < 0.02


@pytest.mark.slow
def test_commands_in_the_guide_run(tmp_path, monkeypatch, capsys):
    """`docs/train.md`, top to bottom."""
    guide = pathlib.Path(__file__).parents[2] / "docs" / "train.md"
    blocks = re.findall(r"```sh\n(.*?)```", guide.read_text(), re.DOTALL)
    commands = [line for block in blocks for line in block.splitlines()]
    assert len(commands) >= 9
    monkeypatch.chdir(tmp_path)
    for command in commands:
        program, *words = shlex.split(command)
        assert program == "midtread" and cli.main(words) == 0, command
    assert "target_loss=9 reached" in capsys.readouterr().out


def test_manual_quantize_is_maxtexts():
    x = jax.random.normal(jax.random.key(0), (64, 32)) * 200
    q = manual_quantize(x, "fixed,-224,224")
    assert q.qvalue.dtype == jnp.float8_e4m3fn and q.scale.shape == (1, 1)
    expected = jnp.clip(x / 0.5, -448, 448).astype(jnp.float8_e4m3fn)
    np.testing.assert_array_equal(
        q.qvalue.astype(jnp.float32), expected.astype(jnp.float32)
    )
    assert float(mt.dequantize(q).max()) == 224.0
    for bad in (None, "absmax", "fixed,3"):
        with pytest.raises(ValueError, match="fixed"):
            manual_quantize(x, bad)
