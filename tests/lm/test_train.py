"""Runs: they learn, they can be killed, and what they write is whole."""

import dataclasses
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from midtread import cli
from midtread.lm import (
    build,
    checkpoint,
    data,
    model,
    optimizer,
    roofline,
    room,
    settings,
    stacks,
    step,
    stream,
)
from midtread.lm.config import Model, Training, section
from midtread.lm.train import (
    MEMORY,
    Diverged,
    Metrics,
    Watch,
    prepare_folder,
    read,
    settle,
    train,
)
from midtread.lm.usage import UsageError

SMALL = ["tiny", "dtype=float32", "num_decoder_layers=1", "max_new_tokens=4"]


QWIX = "use_qwix_quantization=true"


def config(folder, *words):
    return settings.load([*SMALL, f"base_output_directory={folder}", *words])


def losses(folder):
    return [line["loss"] for line in read(folder / "metrics.jsonl")]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run of 20 steps that nothing happened to."""
    folder = tmp_path_factory.mktemp("whole")
    return train(config(folder, "run_name=a", "learning_rate=0.01"))


def test_a_run_learns_and_leaves_its_files(whole):
    curve = losses(whole.folder)
    assert len(curve) == 20 and curve[-1] < curve[0] - 0.5
    assert whole.eval_loss < curve[0]
    lines = read(whole.folder / "metrics.jsonl")
    assert [x["step"] for x in lines if "eval_loss" in x] == [9, 19]
    about = json.loads((whole.folder / "data.json").read_text())
    assert len(about["sha256"]) == 64 and about["bytes"] > 1e6
    assert (whole.folder / "sample.txt").read_text().startswith("import ")
    assert (whole.folder / "loss.png").read_bytes()[:4] == b"\x89PNG"
    page = (whole.folder / "report.html").read_text()
    assert "<svg" in page and "src=" not in page and 'href="http' not in page
    saved = settings.load([str(whole.folder / "config.yml")])
    assert saved.learning_rate == 0.01
    steps = {p.name for p in (whole.folder / "checkpoints").iterdir()}
    assert steps == {"10", "20"}


def test_the_live_line_has_the_rate_and_the_share_of_the_peak(
    tmp_path, monkeypatch, capsys
):
    """On a device whose peak is pretended; that of a CPU is not known."""
    peaks = roofline.DEVICES[0]._replace(flops={"bf16": 1e12})
    monkeypatch.setattr(roofline, "device_here", lambda: peaks)
    words = ["run_name=a", "steps=2", "enable_checkpointing=false"]
    asked = config(tmp_path, *words)
    result = train(asked)
    second = read(result.folder / "metrics.jsonl")[1]
    tokens = asked.batch_size * asked.max_target_length
    assert second["tokens_per_second"] == tokens / second["step_seconds"]
    flops = roofline.model_flops(asked) / second["step_seconds"]
    share = second["utilization"]
    assert share == pytest.approx(flops / (1e12 * jax.device_count()))
    (shown,) = (x for x in capsys.readouterr().out.splitlines() if "step 2/2" in x)
    assert f"{second['tokens_per_second']:,.0f} tok/s" in shown
    assert f"{100 * share:.1f}% of peak" in shown


def test_int8_ends_where_float_does(whole, tmp_path):
    """In miniature what benchmarks/quality.py measures: same steps, data and seed."""
    words = ["run_name=a", "learning_rate=0.01", "quantization=int8", QWIX]
    int8 = train(config(tmp_path, *words))
    assert abs(int8.eval_loss / whole.eval_loss - 1) < 0.01
    assert losses(int8.folder) != losses(whole.folder)
    assert "int8 x int8" in (int8.folder / "coverage.txt").read_text()


class Stop(Exception):
    pass


def stopped_at(config, number):
    """The run, stopped as by a power cut right after a step."""
    from midtread.report.terminal import Terminal

    class Cut(Terminal):
        def _lines(self, first, last):
            def show(line):
                if line["step"] == number:
                    raise Stop

            return show

    with pytest.raises(Stop):
        train(config, Cut())


def test_a_stopped_run_goes_on_bit_for_bit(whole, tmp_path, capsys):
    again = config(tmp_path, "run_name=a", "learning_rate=0.01")
    stopped_at(again, 13)
    assert len(losses(tmp_path / "a")) == 14
    train(again)
    assert "resumed at step 10" in capsys.readouterr().out
    assert losses(tmp_path / "a") == losses(whole.folder)


def test_more_steps_extend_a_run_and_fewer_are_refused(whole, tmp_path, capsys):
    shutil.copytree(whole.folder, tmp_path / "a")
    words = ["run_name=a", "learning_rate=0.01"]
    with pytest.raises(UsageError, match="holds a run with steps=20, now steps=19"):
        train(config(tmp_path, *words, "steps=19"))
    train(config(tmp_path, *words, "steps=22"))
    assert "resumed at step 20" in capsys.readouterr().out
    after = losses(tmp_path / "a")
    assert len(after) == 22 and after[:20] == losses(whole.folder)


@pytest.mark.slow
@pytest.mark.parametrize("packing", ["true", "false"])
def test_a_run_on_a_library_goes_on_bit_for_bit(tmp_path, monkeypatch, packing):
    records = [{"text": f"record {i}: " + "word " * (i % 30)} for i in range(500)]
    monkeypatch.setitem(stream.LIBRARIES, "hf", lambda config: records)
    words = [
        "run_name=a",
        "dataset_type=hf",
        f"packing={packing}",
        "learning_rate=0.01",
    ]
    train(config(tmp_path / "whole", *words))
    again = config(tmp_path / "cut", *words)
    stopped_at(again, 13)
    train(again)
    assert losses(tmp_path / "cut" / "a") == losses(tmp_path / "whole" / "a")


@pytest.mark.parametrize("damage", ["truncated", "flipped"])
def test_a_damaged_checkpoint_is_put_aside(whole, tmp_path, capsys, damage):
    import shutil

    folder = tmp_path / "a"
    shutil.copytree(whole.folder, folder)
    newest = folder / "checkpoints" / "20"
    files = [p for p in newest.glob("params/**/*") if p.is_file() and p.stat().st_size]
    largest = max(files, key=lambda p: p.stat().st_size)
    content = bytearray(largest.read_bytes())
    if damage == "truncated":
        largest.write_bytes(content[: len(content) // 2])
    else:
        content[len(content) // 2] ^= 0xFF
        largest.write_bytes(content)
    train(config(tmp_path, "run_name=a", "learning_rate=0.01"))
    said = capsys.readouterr().out
    assert "checkpoint 20 is damaged" in said and "resumed at step 10" in said
    assert (folder / "checkpoints" / "broken-20").is_dir()
    assert losses(folder) == losses(whole.folder)


def test_a_checksum_sees_one_bit():
    from midtread.lm.checkpoint import sums

    x = jax.random.normal(jax.random.key(0), (33, 5))
    changed = np.asarray(x).copy()
    changed.view(np.uint32)[3, 2] ^= 1
    assert sums({"x": x}) != sums({"x": jnp.asarray(changed)})
    assert sums({"x": x.astype(jnp.bfloat16)}) == sums({"x": x.astype(jnp.bfloat16)})


def test_a_folder_is_not_overwritten(whole, tmp_path, capsys):
    words = [*SMALL, f"base_output_directory={whole.folder.parent}", "run_name=a"]
    assert cli.main(["train", *words, "learning_rate=0.5"]) == 2
    assert "learning_rate=0.01, now learning_rate=0.5" in capsys.readouterr().err
    about = whole.folder / "data.json"
    before = about.read_text()
    about.write_text(before.replace('"sha256": "', '"sha256": "0'))
    assert cli.main(["train", *words, "learning_rate=0.01"]) == 2
    assert "holds a run on other data: sha256 was 0" in capsys.readouterr().err
    about.write_text(before)
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "mine.txt").write_text("mine")
    assert (
        cli.main(["train", *SMALL, f"base_output_directory={tmp_path}", "run_name=b"])
        == 2
    )
    assert "holds no run" in capsys.readouterr().err


def test_overwriting_loses_nothing_that_was_not_asked_for(whole, tmp_path):
    shutil.copytree(whole.folder, tmp_path / "a")
    own, over = f"load_parameters_path={tmp_path / 'a'}", "overwrite=true"
    with pytest.raises(
        UsageError, match="would delete .*/a, which load_parameters_path"
    ):
        train(config(tmp_path, "run_name=a", own, over))
    assert (tmp_path / "a" / "checkpoints" / "20").is_dir()
    for name, file in (("q", "sizes.json"), ("i", "weights/config.json")):
        (tmp_path / name / file).parent.mkdir(parents=True)
        (tmp_path / name / file).write_text("{}")
        shutil.copy(whole.folder / "config.yml", tmp_path / name)
        with pytest.raises(UsageError, match="which training does not replace"):
            train(config(tmp_path, f"run_name={name}", over))
        assert (tmp_path / name / file).is_file()
    train(config(tmp_path, "run_name=a", over, "steps=1", "eval_interval=0"))
    again = settings.load([str(tmp_path / "a" / "config.yml")])
    assert not again.overwrite  # the file goes on with the run
    (tmp_path / "a" / "config.yml").write_text("steps: 0")
    with pytest.raises(
        UsageError, match=r"a/config.yml of the run that is there: steps=0"
    ):
        train(config(tmp_path, "run_name=a"))


def test_training_starts_from_weights(whole, tmp_path, capsys):
    more = [f"load_parameters_path={whole.folder}", "steps=2", "learning_rate=1e-5",
            "warmup_steps_fraction=0", "run_name=c"]  # fmt: skip
    result = train(config(tmp_path, *more))
    assert abs(result.eval_loss - whole.eval_loss) < 0.01
    words = [*SMALL, f"base_output_directory={tmp_path}", *more[:1], "run_name=d"]
    assert cli.main(["train", *words, "mlp_dim=32"]) == 2
    assert "mlp_dim=64 there, mlp_dim=32 here" in capsys.readouterr().err
    assert not (tmp_path / "d").exists()  # refused before anything is written
    assert cli.main(["train", *words[:-2], "load_parameters_path=/nowhere"]) == 2
    assert "/nowhere" in capsys.readouterr().err


def test_a_run_keeps_the_remat_policy_it_was_begun_with(whole, tmp_path, monkeypatch):
    """`auto` is recorded as what it was settled to; another policy would be other bits."""
    begun = settings.load([str(whole.folder / "config.yml")])
    assert begun.remat_policy == "none"
    words = ["tiny", "run_name=a", f"base_output_directory={tmp_path}"]
    asked = settings.load(words)
    assert asked.remat_policy == "auto"
    assert settle(asked).remat_policy == "none"
    recorded = dataclasses.replace(asked, remat_policy="minimal")
    (tmp_path / "a").mkdir()
    settings.save(recorded, tmp_path / "a" / "config.yml")
    assert settle(asked) == recorded
    full = settings.load([*words, "remat_policy=full"])
    assert settle(full) == full
    anew = settings.load([*words, "overwrite=true"])
    assert settle(anew).remat_policy == "none"
    monkeypatch.setattr(room, "bytes_here", lambda: 1000)
    assert settle(anew).remat_policy == "full"
    assert settle(asked) == recorded


def test_a_run_that_kept_codes_is_served(tmp_path, capsys):
    """Its weights are float, and there are no codes to keep where nothing is trained."""
    words = ["tiny", "steps=1", "run_name=a", f"base_output_directory={tmp_path}"]
    words += ["quantization=fp8_full", "remat_policy=minimal_with_quantization"]
    assert cli.main(["train", *words]) == 0, capsys.readouterr().err
    assert cli.main(["eval", str(tmp_path / "a")]) == 0, capsys.readouterr().err


def test_a_lost_loss_stops_the_run():
    def run(losses, last_good=40):
        watch = Watch(losses[:10])  # before it was resumed
        for number, loss in enumerate(losses[10:], 10):
            watch.see(number, loss, lambda: last_good)

    run([3.0] * 60)
    with pytest.raises(
        Diverged, match="nan at step 60; the last good checkpoint is 40"
    ):
        run([3.0] * 60 + [float("nan")])
    with pytest.raises(Diverged, match="runs away at step 70: 4.650 .* 3.000 at"):
        run([3.0] * 60 + [6.0] * 20)
    with pytest.raises(Diverged, match="no checkpoint yet; try a smaller"):
        run([3.0] * 60 + [6.0] * 20, None)
    run([0.01 * (1 + i % 7) for i in range(60)])  # small numbers may jump


def test_a_loss_is_watched_in_the_time_of_a_step():
    """After a million steps as after a hundred: no list of them is walked."""
    watch = Watch([3.0] * 1_000_000)
    started = time.process_time()
    for number in range(1000):
        watch.see(number, 3.0, lambda: None)
    assert time.process_time() - started < 1
    assert len(watch.last) == MEMORY + 1


def test_a_kill_while_files_are_written_loses_none(tmp_path, monkeypatch):
    text = "".join(json.dumps({"step": i, "loss": 3.0}) + "\n" for i in range(9))
    (tmp_path / "metrics.jsonl").write_text(text)

    def dies(path, text):
        with path.open("w") as file:
            file.write(text[: len(text) // 2])
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(pathlib.Path, "write_text", dies)
        with pytest.raises(KeyboardInterrupt):
            Metrics(tmp_path, 5, False)
        begun = config(tmp_path, "run_name=new")
        with pytest.raises(KeyboardInterrupt):
            prepare_folder(begun, {})
    assert (tmp_path / "metrics.jsonl").read_text() == text
    assert prepare_folder(begun, {}) == tmp_path / "new"


def test_a_kill_while_a_run_is_deleted(tmp_path, monkeypatch):
    """The same command goes on deleting."""
    over = config(tmp_path, "run_name=a", "overwrite=true")
    folder = prepare_folder(over, {})
    (folder / "checkpoints").mkdir()
    (folder / "metrics.jsonl").write_text("")
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", lambda path: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            prepare_folder(over, {})
    assert [p.name for p in prepare_folder(over, {}).iterdir()] == ["config.yml"]


SMALL_STATES = ["optimizer_states=int8", "weight_dtype=bfloat16"]
SMALL_STATES += ["weight_rounding=stochastic", "mlp_dim=256"]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("more", [[], SMALL_STATES], ids=["float32", "int8 states"])
def test_kill_9_at_any_moment(tmp_path, seed, more):
    """Also while a checkpoint is being written: one is, after every second step."""
    more = [*more, "run_name=a", "learning_rate=0.01"]
    whole = train(config(tmp_path / "whole", *more))
    words = [*SMALL, f"base_output_directory={tmp_path}", "checkpoint_period=2"]
    command = [sys.executable, "-m", "midtread", "train", *words, *more]
    rng = np.random.default_rng(seed)
    env = {**os.environ, "PYTHONPATH": str(pathlib.Path("src").resolve())}
    kills = 0
    for _ in range(12):
        process = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL)
        deadline = time.time() + rng.uniform(4, 16)
        while time.time() < deadline and process.poll() is None:
            time.sleep(0.01)
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            kills += 1
        elif process.wait() == 0:
            break
        process.wait()
    subprocess.run(command, env=env, check=True, stdout=subprocess.DEVNULL)
    assert kills and losses(tmp_path / "a") == losses(whole.folder)


# --- the step ---------------------------------------------------------------------------------


def test_parts_of_a_batch_give_the_gradient_of_the_whole(tmp_path):
    """Also with delayed scaling, whose histories take the larger of the parts."""
    found = {}
    for parts in (1, 2):
        c = config(tmp_path, "quantization=fp8", "dataset_type=synthetic",
                   f"gradient_accumulation_steps={parts}", "gradient_clipping_threshold=0")  # fmt: skip
        m, t = section(c, Model), section(c, Training)
        net = build.for_training(c, model.create(m))
        state, pieces = step.initial(net, t)
        batch = data.held_out(data.splits(c).train, c)[0]
        state, metrics = step.make_step(m, t, pieces)(state, batch)
        histories = [
            x for path, x in jax.tree_util.tree_leaves_with_path(state.learned)
            if "input_amax_history" in jax.tree_util.keystr(path)
        ]  # fmt: skip
        found[parts] = (metrics["loss"], metrics["grad_norm"], histories)
    np.testing.assert_allclose(found[1][0], found[2][0], rtol=1e-6)
    np.testing.assert_allclose(found[1][1], found[2][1], rtol=1e-2)
    assert found[1][2]
    for one, two in zip(found[1][2], found[2][2]):
        np.testing.assert_allclose(one[..., 0], two[..., 0], rtol=1e-3)
        assert (np.asarray(one[..., 0]) > 0).all()


def test_only_matrices_decay():
    m = Model(num_decoder_layers=2, attention_bias="all", attention_sink=True,
              mlp_bias=True, num_experts=4, num_experts_per_tok=2)  # fmt: skip
    params = nnx.state(model.abstract(m), nnx.Param)
    decays = nnx.to_flat_state(jax.tree.map(bool, optimizer._decays(params)))
    axes = {path: var.get_metadata()["out_sharding"] for path, var in decays}
    for path, var in decays:
        outside = [n for n in axes[path] if n not in ("layers", "experts")]
        assert bool(var.get_value()) is (len(outside) > 1), path
    assert any("sinks" in path for path, _ in decays)


def test_the_learning_rate_warms_up_and_ends():
    t = Training(steps=100, learning_rate=1.0)
    rate = optimizer.schedule(t)
    assert float(rate(0)) == 0 and float(rate(10)) == 1.0
    np.testing.assert_allclose(float(rate(100)), 0.1, rtol=1e-5)


def test_adamw_is_optax(key):
    t = Training(steps=10, gradient_clipping_threshold=0, adam_weight_decay=0)
    params = {"w": jax.random.normal(key, (4,))}
    tx, ref = optimizer.optimizer(t), optax.adam(optimizer.schedule(t), b2=0.95)
    ours, _ = tx.update(params, tx.init(params), params)
    theirs, _ = ref.update(params, ref.init(params), params)
    np.testing.assert_array_equal(ours["w"], theirs["w"])


def test_weights_know_their_axes():
    net = model.abstract(Model())
    kernel = net.decoder.layers.mlp.wi_0.kernel
    assert kernel.out_sharding == ("layers", "embed", "mlp")
    assert isinstance(kernel, nnx.Param)


def test_moments_in_few_bits_go_on_bit_for_bit(tmp_path):
    """A run in two parts, with 4-bit moments and weights rounded by chance, whose layers are
    arrays of their own while it lasts."""
    words = ["run_name=a", "mlp_dim=256", "optimizer_states=int4", "steps=4"]
    words += [*SMALL[:2], "max_new_tokens=4", "num_decoder_layers=2", "scan_unroll=2"]
    words += [
        "weight_dtype=bfloat16",
        "weight_rounding=stochastic",
        "checkpoint_period=2",
    ]
    halves = settings.load([*words, f"base_output_directory={tmp_path / 'halves'}"])
    whole = shutil.copytree(train(halves).folder, tmp_path / "whole")
    shutil.rmtree(tmp_path / "halves" / "a" / "checkpoints" / "4")
    again = train(halves).folder
    assert losses(again) == losses(whole)
    kept = [
        checkpoint.load_weights(str(run), checkpoint.stored(str(run)))
        for run in (whole, again)
    ]
    for a, b in zip(*map(jax.tree.leaves, kept), strict=True):
        np.testing.assert_array_equal(a, b)


def test_what_keeps_weights_stacked():
    m, t = Model(num_decoder_layers=2, scan_unroll=2), Training()
    assert stacks.why_stacked(m, t) is None
    scanned = dataclasses.replace(m, scan_unroll=1)
    assert "scan_unroll" in stacks.why_stacked(scanned, t)
    other = dataclasses.replace(t, opt_type="adafactor")
    assert "adafactor" in stacks.why_stacked(m, other)
    state, _ = step.initial(model.create(m), t)
    size = sum(x.nbytes for x in jax.tree.leaves(state))
    assert stacks.why_stacked(m, t, room=3 * size, state=state) is None
    assert "no room" in stacks.why_stacked(m, t, room=size, state=state)
    odd = Model(num_decoder_layers=32, scan_unroll=32, emb_dim=262, mlp_dim=262)
    few = dataclasses.replace(t, optimizer_states="int8")
    assert stacks.why_stacked(odd, t) is None
    assert "layers share the scales" in stacks.why_stacked(odd, few)


def test_the_norm_of_bfloat16_gradients_is_float32(key):
    grads = {"w": jax.random.normal(key, (512, 64)).astype(jnp.bfloat16)}
    want = np.linalg.norm(np.asarray(grads["w"], np.float64))
    np.testing.assert_allclose(optimizer.norm(grads), want, rtol=1e-5)
    clipped, _ = optimizer.clip(1.0).update(grads, optax.EmptyState())
    theirs, _ = optax.clip_by_global_norm(1.0).update(
        {"w": grads["w"].astype(jnp.float32)}, optax.EmptyState()
    )
    np.testing.assert_allclose(clipped["w"], theirs["w"], rtol=1e-6)


@pytest.mark.parametrize(
    "words,expected",
    [
        (["weight_rounding=stochastic"], "whose steps are not rounded"),
        (["quantize_embedding_states=true"], "nothing with optimizer_states=float32"),
        (
            ["opt_type=adafactor", "adam_b2=0.9"],
            "means nothing with opt_type=adafactor",
        ),
        (
            ["opt_type=adafactor", "adam_b1=0", "optimizer_states=int8"],
            "which then has no moments",
        ),
        (["adam_b1=1"], "must be below 1"),
        (["optimizer_states=int5"], "it takes float32 | int8 | fp8 | int4"),
    ],
)
def test_optimizer_keys_that_contradict_are_refused(words, expected):
    with pytest.raises(UsageError) as error:
        settings.load(["tiny", *words])
    assert expected in str(error.value)
