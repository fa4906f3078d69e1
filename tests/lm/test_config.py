"""Every key is typed, documented and strict; what is wrong is one line and exit code 2."""

import os
import pathlib
import subprocess
import sys

import jax
import pytest

import midtread as mt
from midtread import cli
from midtread.lm import contradictions, settings
from midtread.lm.config import Config, Model, keys
from midtread.lm.usage import UsageError


def test_keys_are_few_and_documented():
    assert len(keys()) <= 136  # docs/notes/architecture-keys.md says why so many
    assert all(field.metadata["meaning"] for field in keys().values())
    help_text = settings.help_text()
    assert all(f"  {name}=" in help_text for name in keys())


def test_the_manual_is_the_defaults():
    """configs/base.yml lists every key at its default: `settings.manual()` writes it."""
    path = settings.SHIPPED / "base.yml"
    assert path.read_text() == settings.manual()
    assert settings.load([str(path)]) == Config()


def test_files_then_words_are_merged_and_typed(tmp_path):
    path = tmp_path / "mine.yml"
    path.write_text("steps: 7\nrun_name: a\nbase_output_directory: out/${run_name}\n")
    config = settings.load(
        [str(path), "steps=9", "learning_rate=1e-4", "use_qwix_quantization=True",
         "quantize_kvcache=true", "prompt=x: {y", "weight_sparsity_n=null"]
    )  # fmt: skip
    assert (config.steps, config.learning_rate) == (9, 1e-4)
    assert config.base_output_directory == "out/a"
    assert config.use_qwix_quantization is True and config.quantize_kvcache is True
    assert config.prompt == ("x: {y",) and config.weight_sparsity_n is None


def test_a_saved_config_comes_back(tmp_path):
    config = settings.load(["tiny", "prompt=[a, b]", "quant=[{weight_qtype: int8}]"])
    settings.save(config, tmp_path / "config.yml")
    assert settings.load([str(tmp_path / "config.yml")]) == config


@pytest.mark.parametrize("name", settings.shipped())
def test_shipped_configs_load(name):
    assert settings.load([name]) == settings.load([f"model_name={name}"]).__class__(
        **{**vars(settings.load([f"model_name={name}"])), "model_name": ""}
    )


WRONG = {
    "unknown key": (["step=3"], "Did you mean 'steps' (int, now 300)?"),
    "nothing near": (["zzzzqqqq=3"], "--help"),
    "not a number": (["steps=many"], "it takes int (optimizer steps).\n"),
    "a near value": (["quantization=int"], "Did you mean quantization=int"),
    "out of range": (["steps=0"], "at least 1"),
    "no such file": (["nowhere.yml"], "no such file: nowhere.yml"),
    "no such config": (["llama3"], "Did you mean llama3-8b?"),
    "twice": (["steps=1", "steps=2"], "twice"),
    "heads": (["num_query_heads=3"], "num_kv_heads=2"),
    "experts": (["num_experts_per_tok=2"], "num_experts=1"),
    "accumulation": (["gradient_accumulation_steps=3"], "batch_size=16"),
    "rules and a preset": (["quant=[{weight_qtype: int8}]", "quantization=int8"], "both"),
    "tokenizer": (["tokenizer_type=huggingface"], "tokenizer_path"),
    "a file for bytes": (["tokenizer_path=x.json"], "means nothing with tokenizer_type=byte"),
    "a path to nowhere": (["dataset_path=x"], "dataset_type=corpus: it is for text"),
    "a bucket": (["base_output_directory=gs://mine"], "mount the bucket"),
    "a key alone": (["tiny", "steps"], "write steps=<value>"),
    "sparsity": (["weight_sparsity_n=2"], "weight_sparsity_m"),
    "interpolation": (["run_name=${nothing}"], "nothing"),
    "a run elsewhere": (["run_name=../a"], "no folder inside base_output_directory=runs"),
    "a run nowhere": (["run_name="], "no folder inside base_output_directory=runs"),
    "no end": (["learning_rate=inf"], "learning_rate=inf is out of range: it must be a number"),
    "no prompt": (["prompt=[]"], "prompt=[] has no beginning: write prompt=<text>"),
    "no sampling": (["top_k=5", "top_p=0.9"], "top_k=5 and top_p=0.9 mean nothing with temperature=0: write"),
    "no cache": (["kv_quant_dtype=int4"], "means nothing with quantize_kvcache=false: write quantize_kvcache=true"),
    "no algorithm": (["calibration_batches=4"], "means nothing with algorithm='': write algorithm=gptq"),
    "no experts": (["moe_mlp_dim=32"], "means nothing with num_experts=1: write num_experts=8"),
    "no latent": (["kv_lora_rank=32"], "means nothing with attention_type=gqa: write"),
    "no pruning": (["weight_sparsity_start_step=3"], "means nothing with weight_sparsity_n=None"),
    "a format": (["quantization=nf4"], "weight_qtype: nf4}]\"."),
    "a stretched nothing": (["rope_scaling=foo"], "There are: linear, "),
    "served twice": (["serve=2", "serve=3"], "serve is given twice"),
    "a mesh": (["tiny", "mesh=fsdp:7"], "fsdp:7 does not divide emb_dim=32"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_said_in_one_line(case, capsys):
    words, expected = WRONG[case]
    assert cli.main(["explain", *words]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1
    assert expected in error


def test_what_a_verb_would_ignore_is_refused(tmp_path, capsys):
    known = [name for names, _ in contradictions.USED_BY for name in names]
    assert set(known) <= set(keys()) and len(known) == len(set(known))
    assert {verb for _, verbs in contradictions.USED_BY for verb in verbs} <= {
        *cli.VERBS
    }
    for verb, word, expected in (
        ("generate", "learning_rate=1", "train, bench, explain use it. Drop it."),
        ("generate", "dataset_path=x", "import, quantize, eval, report use it"),
        ("eval", "temperature=1", "temperature means nothing to `midtread eval`"),
        ("export", "quantization=int8w", "means nothing to `midtread export`"),
        ("export", "jax_cache_dir=x", "means nothing to `midtread export`"),
        ("export", "algorithm=gptq", "quantize uses it"),
        ("import", "quantization=int8w", "means nothing to `midtread import`"),
        ("quantize", "run_name=b", "train, import use it"),
        (
            "report",
            "steps=3 --seed=1 --opt_type=lion",
            "steps and opt_type mean nothing",
        ),
    ):
        assert cli.main([verb, str(tmp_path), *word.split()]) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ") and error.count("\n") == 1
        assert expected in error
    settings.require_used("train", [f"{name}=1" for name in keys()])


def test_what_is_switched_off_takes_its_keys_along():
    assert settings.load(["demo", "temperature=0"]).top_k == 0
    assert settings.load(["tiny-deepseek", "attention_type=gqa"]).kv_lora_rank == 64
    with pytest.raises(UsageError, match="top_k=5 means nothing with temperature=0"):
        settings.load(["demo", "temperature=0", "top_k=5"])
    with pytest.raises(UsageError, match="temperature=cold is not one of its values"):
        settings.load(["demo", "temperature=cold"])


def test_texts_in_a_list_are_texts():
    config = settings.load(["prompt=[3, yes, def f]", "stop=[1]"])
    assert config.prompt == ("3", "yes", "def f") and config.stop == ("1",)


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert cli.main(["train", "tiny", f"base_output_directory={tmp_path}/file"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "file/run: Not a directory." in error
    with pytest.raises(UsageError, match="jax_cache_dir=file: Not a directory. Write"):
        cli._refuse_cache("file", "Not a directory")
    cli._refuse_cache(Config().jax_cache_dir, "Read-only file system")  # nobody asked


@pytest.mark.parametrize(
    "words,expected",
    [
        (["attention_type=mla"], "means nothing with attention_type=mla"),
        (["layer_pattern=G"], "used by no layer with layer_pattern=G"),
        (["mtp_num_layers=1"], "have no window"),
        (["attention=cudnn"], "attention=cudnn cannot run: the device is"),
    ],
)
def test_a_window_that_cannot_be_honoured_stops_a_run(
    words, expected, tmp_path, capsys
):
    where = f"base_output_directory={tmp_path}/runs"
    assert cli.main(["train", "tiny", "sliding_window_size=8", where, *words]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1
    assert expected in error and not (tmp_path / "runs").exists()


def test_a_broken_file_is_named(tmp_path, capsys):
    path = tmp_path / "broken.yml"
    for text, expected in (
        ("steps: [1", "expected ',' or ']'"),
        ("steps: 1\nsteps: 2", "line 2 does not read as YAML: found duplicate key"),
        ("run_name: \x01", "characters are not allowed."),
        ("run_name: caf\xe9s", "does not read as YAML: invalid continuation byte."),
        ("5", "does not read as YAML: Invalid loaded object type: int."),
        ("stepz: 1", "'steps'"),
        ("- 1", "keys and values"),
    ):
        path.write_text(text, encoding="latin-1")
        assert cli.main(["train", str(path)]) == 2
        error = capsys.readouterr().err
        assert expected in error and error.count("\n") == 1


def test_verbs(capsys):
    assert cli.main(["--help"]) == 0 and "explain" in capsys.readouterr().out
    assert cli.main([]) == 2
    assert cli.main(["trian"]) == 2 and "'train'" in capsys.readouterr().err
    assert cli.main(["train", "--help"]) == 0
    assert "learning_rate=0.003" in capsys.readouterr().out


@pytest.mark.parametrize("unbuffered", ["", "1"])  # written at exit, and at once
@pytest.mark.parametrize(
    "words", [["--help"], ["train", "--help"], ["explain"]], ids=str
)
def test_it_ends_quietly_when_nobody_reads(words, unbuffered):
    ours, theirs = os.pipe()
    os.close(ours)
    ended = subprocess.run(
        [sys.executable, "-m", "midtread", *words], stdout=theirs, check=False,
        stderr=subprocess.PIPE, env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
    )  # fmt: skip
    os.close(theirs)
    assert ended.returncode == 1
    assert b"BrokenPipeError" not in ended.stderr


def test_a_pipe_to_another_process_that_breaks_is_an_error(monkeypatch):
    def broken(words):
        raise BrokenPipeError("a worker is gone")

    monkeypatch.setitem(cli.COMMANDS, "train", broken)
    with pytest.raises(BrokenPipeError, match="a worker is gone"):
        cli.main(["train"])


@pytest.mark.parametrize(
    "missing, extra", [("omegaconf", "train"), ("ai_edge_litert", "litert")]
)
def test_a_missing_package_is_named_with_what_installs_it(
    missing, extra, tmp_path, monkeypatch, capsys
):
    file = tmp_path / "m.tflite"
    file.write_bytes(b"    TFL3")
    monkeypatch.setitem(sys.modules, missing, None)
    monkeypatch.setitem(sys.modules, f"{missing}.schema_py_generated", None)
    words = {"train": ["explain"], "litert": ["report", str(file)]}[extra]
    assert cli.main(words) == 2
    error = capsys.readouterr().err
    assert missing in error and error.count("pip install") == error.count("\n") == 1
    assert f"run `pip install '.[{extra}]'` in Midtread's folder" in error


def test_a_model_can_be_described_alone():
    assert Model(emb_dim=64).emb_dim == 64
    with pytest.raises(UsageError, match="head_dim=7 is odd"):
        Model(head_dim=7)


def test_no_key_hides(tmp_path):
    """Every key is read somewhere outside the file that defines it."""
    root = pathlib.Path(settings.__file__).parents[1]
    files = [*root.glob("lm/*.py"), root / "cli.py"]
    text = "".join(p.read_text() for p in files if p.name != "config.py")
    for name in keys():
        assert f".{name}" in text or f'"{name}"' in text, name


# of MaxText 0.2.5, whatever has to do with quantization
FLAGS = """
    quantization use_qwix_quantization quantization_calibration_method
    bwd_quantization_calibration_method drhs_grad_quantization_calibration_method
    quantization_local_shard_count constant_bound_config replicate_quant_scale quant_cfg_path
    quantize_kvcache kv_quant_axis kv_quant_dtype checkpoint_is_quantized
    save_quantized_params_path use_batch_split_schedule use_manual_quantization
    weight_sparsity_n model_call_mode te_comm_gemm_overlap experimental_sa_quant_q_fp8
    experimental_sa_quant_k_fp8 remat_policy lora.lora_weight_qtype lora.lora_tile_size
    sparse_matmul megablox use_tokamax_gmm use_gmm_v2 use_gmm_v2_heuristic_tiling
    merge_gating_gmm shard_exp_on_fsdp shard_embed_moe_on_fsdp
    moe_quantize_token_all_gather moe_quantize_combine_bwd_method quantize_router_proj
    quantize_logits_proj logits_proj_quant_calibration_method quantize_mtp te_moe_block
    te_gmm_quantization wi_tile_ weight_dtype unquantized_modules weight_block_size
"""


def test_every_flag_of_maxtext_is_on_its_page():
    page = pathlib.Path(__file__).parents[2] / "docs" / "from-maxtext.md"
    text = page.read_text()
    assert [flag for flag in FLAGS.split() if flag not in text] == []


def test_words_as_other_programs_have_them(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"midtread {mt.__version__}\n"
    assert cli._joined(["tiny", "--steps", "5", "--seed=1"]) == [
        "tiny",
        "steps=5",
        "--seed=1",
    ]
    assert cli.main(["train", "tiny", "--stepz", "5"]) == 2
    assert "Did you mean 'steps'" in capsys.readouterr().err


def test_compiled_programs_are_kept_where_a_key_says():
    names = ("jax_compilation_cache_dir", "jax_enable_compilation_cache")
    before = {name: getattr(jax.config, name) for name in names}
    where = lambda: jax.config.jax_compilation_cache_dir
    try:
        for name, value in zip(names, (None, True)):
            jax.config.update(name, value)
        cli._keep_compiled("")
        assert where() is None
        cli._keep_compiled(Config().jax_cache_dir)
        assert where().endswith("/.cache/midtread/jax")
        cli._keep_compiled("/elsewhere")  # what is set stays
        assert where().endswith("/.cache/midtread/jax")
    finally:
        for name, value in before.items():
            jax.config.update(name, value)


def test_quantize_keeps_what_it_compiles(monkeypatch):
    folders, there = [], Config(jax_cache_dir="there")
    monkeypatch.setattr(cli, "_keep_compiled", folders.append)
    monkeypatch.setattr(
        settings, "load_checkpoints", lambda words: [("nowhere", there)]
    )
    assert cli.main(["quantize", "nowhere"]) == 2
    assert folders == ["there"]


COUNTING = """
import sys, jax
from midtread import cli
events = []
jax.monitoring.register_event_listener(lambda name, **_: events.append(name))
assert cli.main(sys.argv[1:]) == 0
print(events.count("/jax/compilation_cache/cache_hits"), "read")
"""


@pytest.mark.slow
def test_a_second_run_reads_what_the_first_compiled(tmp_path):
    words = ["train", "tiny", "num_decoder_layers=1", "steps=2", "max_new_tokens=1"]
    words += [f"base_output_directory={tmp_path}", "enable_checkpointing=false"]
    source = str(pathlib.Path(mt.__file__).parents[1])
    env = {k: v for k, v in os.environ.items() if "COMPILATION_CACHE" not in k}
    # However fast this machine compiles.
    env |= {"PYTHONPATH": source, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    env |= {"HOME": str(tmp_path)}

    def run(name: str, folder) -> int:
        more = [f"run_name={name}", f"jax_cache_dir={folder}"]
        command = [sys.executable, "-c", COUNTING, *words, *more]
        out = subprocess.run(command, env=env, check=True, stdout=subprocess.PIPE)
        return int(out.stdout.split()[-2])

    cache = tmp_path / "cache"
    assert run("a", cache) == 0
    programs = {x.name for x in cache.iterdir()}
    assert any(name.startswith("jit_run-") for name in programs)  # the step
    assert run("b", cache) > 10
    after = {x.name for x in cache.iterdir() if x.name.endswith("-cache")}
    assert after <= programs  # nothing was compiled a second time
    assert run("c", "") == 0
    assert {x.name for x in cache.iterdir() if x.name.endswith("-cache")} == after
    assert not (tmp_path / ".cache" / "midtread").exists()
