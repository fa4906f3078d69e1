"""Loop: short trainings beside each other, for quality.py and convergence.py.

    net, steps, data and seeds alike; what differs is the format

Fifty steps are one call, so that the host is out of the way, and compiling is timed apart
from them. jax, flax, optax and pyyaml are enough. A `Book` is a JSON file that is written
after every run: a study that was killed goes on where it stopped, and its table can be made
on another machine than the one that computed.
"""

import concurrent.futures
import dataclasses
import functools
import json
import math
import pathlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import yaml
from flax import nnx

from midtread.lm import build, data, model, settings, step
from midtread.lm.config import Config, Model, Training, section

AT_ONCE = 50  # steps in one call


def shipped(name: str) -> dict[str, Any]:
    """The keys of a config that comes with the package."""
    return yaml.safe_load((settings.SHIPPED / f"{name}.yml").read_text())


def read_words(words: Sequence[str]) -> dict[str, Any]:
    """`["emb_dim=64"]` as keys of a Config."""
    kinds = {f.name: type(f.default) for f in dataclasses.fields(Config)}
    return {k: kinds[k](v) for k, v in (word.split("=", 1) for word in words)}


# --- results, as they come --------------------------------------------------------------------


class Book:
    """What was run: `{"what": sizes, "where": device, "data": corpus, "runs": {...}}`."""

    def __init__(self, path: pathlib.Path, what: dict, about: dict):
        self.path, what = path, json.loads(json.dumps(what))
        device = jax.devices()[0].device_kind
        where = {"device": device, "jax": jax.__version__, "date": time.strftime("%F")}
        new = {"what": what, "where": where, "data": about, "runs": {}}
        self.held = json.loads(path.read_text()) if path.exists() else new
        if self.held["what"] != what:
            raise SystemExit(f"{path} is of other sizes: choose another --out.")
        path.parent.mkdir(parents=True, exist_ok=True)

    @property
    def runs(self) -> dict[str, dict]:
        return self.held["runs"]

    def keep(self, name: str, run: dict) -> None:
        self.runs[name] = run
        self.path.write_text(json.dumps(self.held))


def title(held: Mapping[str, Any]) -> str:
    """Where and on what a book's runs were made."""
    where, about = held["where"], held["data"]
    return (
        f"{where['device']}, jax {where['jax']}, {where['date']}; corpus of "
        f"{about['bytes']:,} bytes, sha256 {about['sha256'][:12]}."
    )


# --- training ---------------------------------------------------------------------------------


@functools.partial(jax.jit, static_argnums=0)
def _steps(how: step.Setup, state: step.State, random, batches):
    one = lambda state, batch: step.run(how, state, random, batch)
    return jax.lax.scan(one, state, batches)


class Trainer(NamedTuple):
    """A model in a format, compiled; every seed uses the same."""

    config: Config
    parts: step.Parts
    run: Callable  # state, random, batches -> state, metrics
    compile_seconds: float
    splits: data.Splits
    judged_by: list[dict]

    def start(self, seed: int) -> step.State:
        """Weights of their own for a seed, moments of zero."""
        net = self.parts.whole()
        fresh = model.create(section(self.config, Model), seed)
        nnx.update(net, nnx.state(fresh, nnx.Param))
        return step.initial(net, section(self.config, Training))[0]

    def judge(self, state: step.State) -> float:
        evaluate = step.make_eval(self.parts)
        return step.mean_loss(evaluate, state.learned, state.kept, self.judged_by)


def trainers(configs: Mapping[str, Config], splits: data.Splits) -> dict[str, Trainer]:
    """One for each config; they compile at the same time."""
    with concurrent.futures.ThreadPoolExecutor() as pool:
        waiting = {name: _begin(pool, c, splits) for name, c in configs.items()}
        made = {}
        for name, finish in waiting.items():
            made[name] = finish()
            say(f"{name}: compiled in {made[name].compile_seconds:.0f} s")
    return made


def _begin(pool, config: Config, splits: data.Splits) -> Callable[[], Trainer]:
    m, t = section(config, Model), section(config, Training)
    net = build.for_training(config, model.create(m))
    state, parts = step.initial(net, t)
    how = step.Setup(m, t, parts.graph, 0, None)
    lowered = _steps.lower(
        how, state, parts.random, batches(splits.train, config, seed=0, first=0)
    )
    judged_by = jax.device_put(data.held_out(splits.held_out, config))

    def compile_():
        started = time.perf_counter()
        return lowered.compile(), time.perf_counter() - started

    coming = pool.submit(compile_)
    return lambda: Trainer(config, parts, *coming.result(), splits, judged_by)


def at_once(steps: int) -> int:
    return math.gcd(AT_ONCE, steps)


def batches(rows: data.Rows, config: Config, seed: int, first: int) -> dict:
    """Those of a call that begins with step `first`, in the order of a seed."""
    count, size = at_once(config.steps), config.batch_size
    order = np.random.default_rng(seed).permutation(len(rows))
    chosen = order[np.arange(first * size, (first + count) * size) % len(order)]
    flat = data.stack([rows[r] for r in chosen])
    return {k: v.reshape(count, size, -1) for k, v in flat.items()}


def train(
    by: Trainer, name: str, state: step.State, seed: int, stop: int, every: int
) -> tuple[step.State, dict]:
    """Goes on from `state` until step `stop`; judged every so many steps, and at the end.

    The record has the loss of each step, and (step, seconds of training, held-out loss).
    """
    first, losses, judged, seconds = int(state.step), [], [], 0.0
    for begin in range(first, stop, at_once(by.config.steps)):
        now = jax.device_put(batches(by.splits.train, by.config, seed, begin))
        jax.block_until_ready(now)
        started = time.perf_counter()
        state, metrics = by.run(state, by.parts.random, now)
        losses += np.asarray(metrics["loss"]).tolist()
        seconds += time.perf_counter() - started
        done = begin + at_once(by.config.steps)
        if done == stop or done % every == 0:
            judged.append((done, seconds, by.judge(state)))
            say(f"{name}, seed {seed}: step {done} of {stop}, loss {losses[-1]:.4f}, "
                f"held out {judged[-1][2]:.4f}, {seconds:.1f} s")  # fmt: skip
    record = {
        "first": first,
        "losses": losses,
        "judged": judged,
        "eval_loss": judged[-1][2],
        "ms_per_step": 1000 * seconds / (stop - first),
        "compile_seconds": by.compile_seconds,
    }
    return state, record


def say(text: str) -> None:
    print(f"{time.strftime('%T')} {text}", flush=True)


# --- a picture --------------------------------------------------------------------------------


def draw(curves: Mapping[str, Sequence[dict]], path: pathlib.Path) -> None:
    """Loss curves, each the mean of its runs and of ten steps, if matplotlib is there."""
    mean = lambda values: sum(values) / len(values)
    lines = {}
    for name, runs in curves.items():
        first, every = runs[0]["first"], min(10, at_once(len(runs[0]["losses"])))
        loss = lambda i, runs=runs, n=every: mean(
            [mean(r["losses"][i - n : i]) for r in runs]
        )
        made = {
            first + i: {"step": first + i - 1, "loss": loss(i)}
            for i in range(every, len(runs[0]["losses"]) + 1, every)
        }
        for i, (at, _, _) in enumerate(runs[0]["judged"]):
            made[at]["eval_loss"] = mean([r["judged"][i][2] for r in runs])
        lines[name] = list(made.values())
    try:
        from midtread.report import plot

        path.write_text(plot.loss(lines))
    except ImportError:
        print("no matplotlib: no picture")
