"""Train: a run, from a config to a report.

    <base_output_directory>/<run_name>/
        config.yml  data.json  coverage.txt     what was asked for, and what it reached
        static.npz                              ranges, with static=measure
        metrics.jsonl                           one line per step
        checkpoints/                            to go on from
        sample.txt  loss.png  report.html       when it is done

The same command again goes on from the newest checkpoint that is whole; metrics after it
are dropped, so that the curve is the one an uninterrupted run would have drawn. A loss
that is not a number, or runs away, stops the run and says what to try.
"""

import dataclasses
import json
import math
import pathlib
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, get_args, get_type_hints

import jax
from flax import nnx

from midtread.lm import (
    build,
    checkpoint,
    convert,
    data,
    huggingface,
    processes,
    ranges,
    roofline,
    room,
    settings,
    stacks,
    step,
)
from midtread.lm import model as models
from midtread.lm.config import Config, Decoding, Model, Training, keys, section
from midtread.lm.generate import generate
from midtread.lm.mesh import Layout, layout_of
from midtread.lm.usage import UsageError, require
from midtread.report.run import read
from midtread.report.terminal import Terminal

# Keys that may differ from those a run was begun with. Also `steps`, if it is raised: the
# learning rate goes on by the schedule of the longer run.
FREE = {
    *keys(Decoding), "overwrite", "enable_tensorboard", "eval_interval", "eval_steps",
    "target_loss", "async_checkpointing", "checkpoint_period",
    "max_num_checkpoints_to_keep", "enable_checkpointing", "base_output_directory",
    "run_name", "model_name", "remat_policy", "attention", "mesh", "jax_cache_dir",
    "scan_unroll",
    "check_memory",
}  # fmt: skip
MEMORY = 20  # steps of the means that show whether a loss runs away
STRIDE = 5  # steps from one such mean to the next
PARTLY = "partly-"  # how the name of a file begins that is being written


class Result(NamedTuple):
    """What a run leaves."""

    folder: pathlib.Path
    eval_loss: float
    steps: int
    sample: str


class Diverged(UsageError):
    """The loss is not a number, or runs away."""


def folder_of(config: Config) -> pathlib.Path:
    """Returns the folder of a run."""
    return pathlib.Path(config.base_output_directory) / config.run_name


def prepare_folder(config: Config, about: dict[str, Any]) -> pathlib.Path:
    """Returns the run's folder, refusing one that holds another run or a run on other
    data."""
    folder = folder_of(config)
    config_file = folder / "config.yml"
    _require_trained_here(folder)
    if config.overwrite and config_file.exists():
        _require_apart(folder, config.load_parameters_path)
        _empty(folder)
    if config_file.exists():
        before = _begun(config_file)
        for name in keys():
            was, now = getattr(before, name), getattr(config, name)
            is_extended = name == "steps" and now > was
            require(
                was == now or name in FREE or is_extended,
                f"{folder} holds a run with {name}={was}, now {name}={now}: choose "
                "another run_name, or write overwrite=true to start over.",
            )
        _require_same_data(folder, about)
    elif folder.exists() and any(not _is_partly(p) for p in folder.iterdir()):
        raise UsageError(
            f"{folder} is not empty and holds no run: choose another run_name."
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{folder}: {error.strerror}.") from None
    # `midtread train <folder>/config.yml` goes on, and does not start over once more.
    goes_on = dataclasses.replace(config, overwrite=False)
    _write(config_file, lambda path: settings.save(goes_on, path))
    return folder


def _write(path: pathlib.Path, write: Callable[[pathlib.Path], Any]) -> None:
    """Writes a file in one move: a kill leaves the one before, or the new one."""
    partly = path.with_name(f"{PARTLY}{path.name}")
    write(partly)
    partly.replace(path)


def _is_partly(path: pathlib.Path) -> bool:
    return path.name.startswith(PARTLY)


def _empty(folder: pathlib.Path) -> None:
    """Deletes what a run left, and last of all what says that it was one."""
    for path in sorted(folder.iterdir(), key=lambda path: path.name == "config.yml"):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def _begun(config_file: pathlib.Path) -> Config:
    """Returns the config that a run was begun with."""
    try:
        return settings.load([str(config_file)])
    except UsageError as error:
        raise UsageError(
            f"{config_file} of the run that is there: {error} Choose another run_name, or "
            "write overwrite=true to start over."
        ) from None


def _require_trained_here(folder: pathlib.Path) -> None:
    """Refuses a folder of a model that was not trained there."""
    for is_one, what in (
        (convert.is_quantized(str(folder)), "a quantized checkpoint"),
        ((folder / huggingface.WEIGHTS).is_dir(), "an imported model"),
    ):
        require(
            not is_one,
            f"{folder} holds {what}, which training does not replace: choose another "
            "run_name.",
        )


def _require_apart(folder: pathlib.Path, path: str) -> None:
    """Refuses to delete the weights that a run is to start from."""
    start = pathlib.Path(path).resolve()
    require(
        not path or folder.resolve() not in (start, *start.parents),
        f"overwrite=true would delete {folder}, which load_parameters_path={path} starts "
        "from: choose another run_name.",
    )


def _require_same_data(folder: pathlib.Path, about: dict[str, Any]) -> None:
    before = checkpoint.read_about(folder / "data.json")
    for name in ("sha256", "documents", "tokenizer_sha256"):
        was, now = before.get(name), about.get(name)
        require(
            was == now or not before,
            f"{folder} holds a run on other data: {name} was {was}, is {now}. Choose "
            "another run_name, or write overwrite=true to start over.",
        )


class Metrics:
    """Writes metrics.jsonl, and TensorBoard's files if asked for.

    Attributes:
        past: the lines of the steps before the first.
    """

    def __init__(self, folder: pathlib.Path, first: int, tensorboard: bool):
        path = folder / "metrics.jsonl"
        self.past: list[dict[str, Any]] = []
        self.file = self.board = None
        if not processes.is_first():  # only the first process writes
            return
        self.past = [x for x in read(path) if x["step"] < first]
        text = "".join(json.dumps(x) + "\n" for x in self.past)
        _write(path, lambda path: path.write_text(text))
        self.file = path.open("a")
        if tensorboard:
            from tensorboardX import SummaryWriter

            self.board = SummaryWriter(str(folder / "tensorboard"))

    def write(self, line: dict[str, Any]) -> None:
        if self.file is None:
            return
        self.file.write(json.dumps(line) + "\n")
        self.file.flush()
        for name, value in line.items():
            if self.board and name != "step":
                kind = "perf" if "second" in name else "learning"
                self.board.add_scalar(f"{kind}/{name}", value, line["step"])

    def close(self) -> None:
        if self.file:
            self.file.close()
        if self.board:
            self.board.close()


class Watch:
    """Stops a run whose loss is not a number, or runs away: whose mean is far above the
    least mean before. It takes the same time after any number of steps."""

    def __init__(self, losses: Iterable[float] = ()):
        self.count, self.best = 0, math.inf
        self.last: deque[float] = deque(maxlen=MEMORY + 1)
        for loss in losses:
            self._note(loss)

    def _note(self, loss: float) -> None:
        self.last.append(loss)
        self.count += 1
        if self.count > MEMORY and (self.count - MEMORY - 1) % STRIDE == 0:
            self.best = min(self.best, sum([*self.last][:MEMORY]) / MEMORY)

    def see(self, step: int, loss: float, last_good: Callable[[], int | None]) -> None:
        """Takes the loss of one step more."""
        self._note(loss)
        now = sum([*self.last][-MEMORY:]) / MEMORY
        runs_away = now > 1.5 * self.best and now > self.best + 1
        if not math.isfinite(loss):
            what = f"loss is {loss} at step {step}"
        elif self.count >= 2 * MEMORY and runs_away:
            what = (
                f"the loss runs away at step {step}: {now:.3f} over the last {MEMORY} "
                f"steps, {self.best:.3f} at its best"
            )
        else:
            return
        good = last_good()
        kept = f"the last good checkpoint is {good}" if good else "no checkpoint yet"
        raise Diverged(
            f"{what}; {kept}; try a smaller learning_rate, more warmup_steps_fraction, a "
            "lower gradient_clipping_threshold, or z_loss_multiplier=1e-4; with "
            "quantization, quantize_router_proj=false or another calibration."
        )


def describe(layout: Layout | None) -> str:
    """Says how many devices a run has, in words that go before their name."""
    if layout is None:
        return ""
    axes = ", ".join(f"{axis} {n}" for axis, n in layout.sizes.items() if n > 1)
    count = jax.process_count()
    hosts = f" in {count} processes" if count > 1 else ""
    return f"{layout.mesh.size} devices{hosts} ({axes or 'one of each'}) of "


def check_start(config: Config) -> None:
    """Refuses weights, or ranges, that this model cannot start from."""
    path = config.load_parameters_path
    if config.static == "calibrated":
        ranges.find(config)
    if not path:
        return
    checkpoint.require_same_model(config, path)
    require(
        not convert.is_quantized(path),
        f"load_parameters_path={path} is quantized: give the float one.",
    )


def start_model(config: Config, layout: Layout | None) -> nnx.Module:
    """Returns the model that a run starts from, quantized as the config says."""
    model = models.create(section(config, Model), config.seed, layout)
    if config.load_parameters_path:
        state = nnx.state(model, nnx.Param)
        nnx.update(model, checkpoint.load_weights(config.load_parameters_path, state))
    model = build.for_training(config, model)
    if config.static == "calibrated":
        ranges.load(config, model)
    return model


def settle(config: Config) -> Config:
    """Returns the config with a remat_policy in the place of `auto`: the one that the run was
    begun with, since another adds in another order, or the one that there is room for."""
    if config.remat_policy != "auto":
        return config
    begun = folder_of(config) / "config.yml"
    if begun.exists() and not config.overwrite:
        before = _begun(begun).remat_policy
        config = dataclasses.replace(config, remat_policy=before)
    # The devices of several processes may have unequal room, and run one program.
    policies = list(get_args(get_type_hints(Config)["remat_policy"]))
    policy = processes.agree(policies.index(room.settle(config).remat_policy))
    return dataclasses.replace(config, remat_policy=policies[policy])


def train(config: Config, terminal: Terminal | None = None) -> Result:
    """Runs, or goes on with, the run that `config` describes."""
    terminal = terminal or Terminal(quiet=not processes.is_first())
    layout = layout_of(config)
    # This refuses what cannot be quantized, before anything is written.
    coverage = build.coverage(config)
    check_start(config)
    asked, config = config, settle(config)
    room.require_room(config)
    splits = data.splits(config)
    codec = data.tokenizer(config) if config.dataset_type != "synthetic" else None
    folder = folder_of(config)
    if processes.is_first():
        prepare_folder(config, splits.about)
        about = json.dumps(splits.about, indent=1)
        _write(folder / "data.json", lambda path: path.write_text(about))
        (folder / "coverage.txt").write_text(f"{build.mode(config)}\n\n{coverage}\n")
    processes.together("the folder is there")
    terminal.config(settings.changed(asked), folder)
    if asked != config:
        terminal.say(f"remat_policy=auto: {config.remat_policy}")
    terminal.data(config.dataset_type, splits.about)
    terminal.coverage(build.mode(config), build.summary(coverage), coverage.totals)
    model = start_model(config, layout)
    terminal.say(
        f"{models.parameters(model):,} parameters on {describe(layout)}"
        f"{jax.devices()[0].device_kind}"
    )
    pruning = build.pruning(config, coverage)
    loop = Loop(config, model, splits, folder, pruning, terminal, layout)
    try:
        eval_loss = loop.run()
    finally:
        loop.close()
    if config.static == "measure":
        ranges.save(folder, loop.state.kept)
    sample = ""
    if not processes.is_first():
        return Result(folder, eval_loss, config.steps, sample)
    if codec is not None and jax.process_count() > 1:
        terminal.say("no sample: the weights are spread over several processes")
    elif codec is not None:
        float_model = models.create(section(config, Model), config.seed)
        nnx.update(float_model, jax.device_put(loop.weights(), jax.devices()[0]))
        sample = generate(float_model, codec, config).texts[0]
        (folder / "sample.txt").write_text(sample)
        terminal.sample(sample)
    from midtread.report import run as report

    page = report.write(report.read_runs([folder]), folder / "report.html")
    terminal.say(f"report: {page}")
    return Result(folder, eval_loss, config.steps, sample)


class Loop:
    """The steps of a run."""

    def __init__(self, config, model, splits, folder, pruning, terminal, layout=None):
        self.config, self.terminal, self.layout = config, terminal, layout
        m, t = section(config, Model), section(config, Training)
        self.state, parts = step.initial(model, t, pruning, layout)
        self.step = step.make_step(m, t, parts, config.seed, pruning, layout)
        why_stacked = stacks.why_stacked(
            m, t, is_pruned=pruning is not None, is_on_mesh=layout is not None,
            room=room.bytes_here(), state=self.state,
        )  # fmt: skip
        self.evaluate = step.make_eval(parts, layout)
        self.judged_by = [
            self._placed(batch) for batch in data.held_out(splits.held_out, config)
        ]
        self.batches = data.batches(splits.train, config)
        self.seconds, self.reached = 0.0, None
        self.flops, device = roofline.model_flops(config), roofline.device_here()
        self.peak = device and device.flops["bf16"] * jax.device_count()
        self.checkpoints = None
        if config.enable_checkpointing:
            self.checkpoints = checkpoint.Checkpoints(
                folder / "checkpoints", config, terminal.say
            )
            self._resume()
        if why_stacked is None:
            self.state = stacks.apart(self.state)
        first = int(self.state.step)
        self.metrics = Metrics(folder, first, config.enable_tensorboard)
        self.watch = Watch(x["loss"] for x in self.metrics.past)

    def _placed(self, batch: data.Batch) -> dict[str, Any]:
        return self.layout.place_batch(batch) if self.layout else batch

    def _resume(self) -> None:
        got = self.checkpoints.restore(self.state)
        if got is None:
            return
        self.state, meta = got
        self.seconds, self.reached = meta["seconds"], meta["reached"]
        self.batches.set_state(_from_json(meta["data"]))
        self.terminal.say(f"resumed at step {int(self.state.step)}")

    def run(self) -> float:
        config, first = self.config, int(self.state.step)
        eval_loss, ahead = math.nan, None
        with self.terminal.progress(first, config.steps) as show:
            for number in range(first, config.steps):
                started = time.perf_counter()
                batch = ahead or self._placed(next(self.batches))
                self.state, metrics = self.step(self.state, batch)
                done = number + 1 == config.steps
                saves = done or (number + 1) % config.checkpoint_period == 0
                # While the device works, the next batch is made; not before a checkpoint,
                # which notes where the data stands.
                is_last = done or (self.checkpoints and saves)
                ahead = None if is_last else self._placed(next(self.batches))
                line = {"step": number, **{k: float(v) for k, v in metrics.items()}}
                took = time.perf_counter() - started
                if number > first:  # the first step compiles
                    self.seconds += took
                tokens = batch["inputs"].size
                line |= {"step_seconds": took, "tokens_per_second": tokens / took}
                if self.peak:
                    line["utilization"] = self.flops / took / self.peak
                due = config.eval_interval and (number + 1) % config.eval_interval == 0
                if done or due:
                    line["eval_loss"] = eval_loss = self._evaluate(number)
                self.metrics.write(line)
                self.watch.see(number, line["loss"], self._last_good)
                show(line)
                if self.checkpoints and saves:
                    self._save()
        if first >= config.steps:
            eval_loss = self._evaluate(first - 1)
        return eval_loss

    def _evaluate(self, number: int) -> float:
        pruned = step.prune(self.state.learned, self.state.masks)
        loss = step.mean_loss(self.evaluate, pruned, self.state.kept, self.judged_by)
        target = self.config.target_loss
        if target and loss <= target and self.reached is None:
            self.reached = {"steps": number + 1, "seconds": self.seconds}
            self.terminal.say(
                f"target_loss={target:g} reached after {number + 1} steps, "
                f"{self.seconds:.1f} s"
            )
        return loss

    def _last_good(self) -> int | None:
        return self.checkpoints.latest() if self.checkpoints else None

    def _save(self) -> None:
        meta = {
            "data": self.batches.get_state(),
            "seconds": self.seconds,
            "reached": self.reached,
        }
        self.checkpoints.save(stacks.together(self.state), meta)

    def weights(self) -> nnx.State:
        learned = step.prune(stacks.together(self.state.learned), self.state.masks)
        return nnx.filter_state(learned, nnx.Param)

    def close(self) -> None:
        self.metrics.close()
        if self.checkpoints:
            self.checkpoints.close()


def _from_json(state: Any) -> Any:
    """Turns lists into tuples: grain's state has tuples, and JSON has only lists."""
    if isinstance(state, dict):
        return {k: _from_json(v) for k, v in state.items()}
    return tuple(map(_from_json, state)) if isinstance(state, list) else state
