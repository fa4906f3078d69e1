"""Does training with moments in few bits end where 32 bits do?

    python benchmarks/optimizers.py [--steps 1000] [--seeds 16] [--cases "a;b"]
        [--results FILE] [key=value ...]

The model of `make demo` on the standard library's source, AdamW with each of
`optimizer_states`, embeddings in 8 bits too, and bfloat16 weights that move by chance. Every
case of a seed sees the same data in the same order from the same weights, so cases are
compared seed by seed, by the loss on all held-out text after the last step (half a million
tokens of it at most). A case with 8-bit moments is allowed 0.2% of float32's loss, either way.

How far apart do two runs end that differ by nothing that matters? `float32 again` says so:
its weights begin a millionth away. Its gaps are those of chance, and what chance alone does
to a mean over three seeds is printed below the table.

All seeds of a case are one program (vmap), so more of them cost little: 16 seeds of all cases
took 2 minutes on an H200. `benchmarks/loop.py` says what is needed.
"""

import argparse
import concurrent.futures
import dataclasses
import functools
import itertools
import pathlib
import statistics
import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import loop
import numpy as np
from flax import nnx

from midtread.lm import build, data, model, step
from midtread.lm.config import Config, Model, Training, section

SMALL = {"weight_dtype": "bfloat16", "weight_rounding": "stochastic"}
AGAIN = "float32 again"
#   name: (what to set, how far its held-out loss may lie from float32's)
CASES = {
    "float32": ({}, None),
    AGAIN: ({}, None),
    "int8": ({"optimizer_states": "int8"}, 0.002),
    "fp8": ({"optimizer_states": "fp8"}, 0.002),
    "int8, embeddings too": (
        {"optimizer_states": "int8", "quantize_embedding_states": True}, 0.002,
    ),
    "int4 first moments": ({"optimizer_states": "int4"}, None),
    "int8, bf16 weights by chance": ({"optimizer_states": "int8", **SMALL}, None),
}  # fmt: skip
HELD_OUT = 2**19  # tokens at most, spread over the held-out text


class Study:
    """One case: all its seeds side by side."""

    def __init__(self, name: str, config: Config, seeds: Sequence[int], batches: dict):
        m, t = section(config, Model), section(config, Training)
        states = []
        for seed in seeds:
            net = build.for_training(config, model.create(m, seed))
            # Weights that are made in bfloat16 would be others than those of float32.
            same = model.create(dataclasses.replace(m, weight_dtype="float32"), seed)
            cast = lambda x, like: x.astype(like.dtype)
            weights = nnx.state(net, nnx.Param)
            nnx.update(net, jax.tree.map(cast, nnx.state(same, nnx.Param), weights))
            state, self.parts = step.initial(net, t)
            states.append(_moved(state, seed) if name == AGAIN else state)
        self.name, self.config, self.seeds = name, config, seeds
        self.state = jax.tree.map(lambda *xs: jnp.stack(xs), *states)
        self.setup = step.Setup(m, t, self.parts.graph, 0)
        self.lowered = _steps.lower(self.setup, self.state, self.parts.random, batches)

    def compile(self) -> None:
        started = time.perf_counter()
        self.run = self.lowered.compile()
        loop.say(f"{self.name}: compiled in {time.perf_counter() - started:.0f} s")

    def train(self, calls: Sequence[dict]) -> None:
        """Takes all steps, so many of them in a call as its batches are."""
        started, losses = time.perf_counter(), []
        for batches in calls:
            self.state, more = self.run(self.state, self.parts.random, batches)
            losses.append(more)
        self.losses = np.concatenate(jax.device_get(losses))
        took = time.perf_counter() - started
        self.ms = 1e3 * took / len(self.losses)

    def judge(self, held_out: Sequence[dict]) -> list[float]:
        """Returns the held-out loss of every seed."""
        ask = functools.partial(_judge, self.parts.graph, self.parts.random)
        sums = [ask(self.state.learned, self.state.kept, b) for b in held_out]
        losses, tokens = (sum(part) for part in zip(*sums))
        return np.asarray(losses / tokens).tolist()


def _moved(state: step.State, seed: int) -> step.State:
    """The same weights, a millionth away."""
    rng = np.random.default_rng(seed)
    move = lambda x: x * (1 + 1e-6 * rng.standard_normal(x.shape)).astype(x.dtype)
    return state._replace(learned=jax.tree.map(move, state.learned))


@functools.partial(jax.jit, static_argnums=0)
def _steps(setup: step.Setup, state: step.State, random, batches):
    one = jax.vmap(functools.partial(step.run, setup), in_axes=(0, None, 0))

    def body(state, batch):
        state, metrics = one(state, random, batch)
        return state, metrics["loss"]

    return jax.lax.scan(body, state, batches)


@functools.partial(jax.jit, static_argnums=0)
def _judge(graph, random, learned, kept, batch):
    evaluate = step.make_eval(step.Parts(graph, None, None, random))
    return jax.vmap(evaluate, in_axes=(0, 0, None))(learned, kept, batch)


def row(name: str, held_out: Sequence[float], base: Sequence[float], ms: float) -> str:
    """One line of the table: losses, and the gaps to float32, seed by seed."""
    bound = CASES[name][1]
    gaps = [100 * (a / b - 1) for a, b in zip(held_out, base)]
    gap = statistics.mean(gaps)
    error = statistics.stdev(gaps) / len(gaps) ** 0.5 if len(gaps) > 1 else np.nan
    verdict = "" if bound is None else ("ok" if abs(gap) <= 100 * bound else "MISSED")
    return (
        f"| {name} | {statistics.mean(held_out):.4f} | {gap:+.3f}% ± {error:.3f} {verdict} | "
        f"{', '.join(f'{x:+.2f}' for x in gaps)} | {ms:.2f} |"
    )


def chance(held_out: Sequence[float], base: Sequence[float]) -> str:
    """What chance does to a mean over three seeds, from all threes of two equal cases."""
    gaps = [100 * (a / b - 1) for a, b in zip(held_out, base)]
    means = [abs(statistics.mean(three)) for three in itertools.combinations(gaps, 3)]
    over = sum(mean > 0.2 for mean in means) / len(means)
    return (
        f"Of all means over three seeds of '{AGAIN}', {100 * over:.0f}% lie more than 0.2% "
        f"from float32; the farthest {max(means):.2f}%."
    )


HEAD = """\
| moments | held-out loss | gap to float32, mean ± standard error | each seed, % | ms a step of all seeds |
|---|---|---|---|---|"""


def main() -> None:
    about = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=about)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seeds", type=int, default=16, help="how many")
    parser.add_argument("--cases", default=";".join(CASES))
    parser.add_argument("--results", type=pathlib.Path)
    parser.add_argument("keys", nargs="*", help="sizes, e.g. emb_dim=64")
    options = parser.parse_args()
    chosen = list(dict.fromkeys(["float32", *options.cases.split(";")]))
    if unknown := [name for name in chosen if name not in CASES]:
        parser.error(f"no case is called {unknown[0]!r}: {'; '.join(CASES)}")
    # Rows are short, and no kernel for attention need be ready for vmap.
    sizes = {"steps": options.steps, "attention": "plain"}
    sizes |= loop.read_words(options.keys)
    configs = {name: Config(**sizes, **CASES[name][0]) for name in chosen}
    plain, seeds = configs["float32"], range(options.seeds)
    splits = data.splits(plain)
    count = loop.at_once(options.steps)
    each = [
        [loop.batches(splits.train, plain, seed, first) for seed in seeds]
        for first in range(0, options.steps, count)
    ]
    side_by_side = lambda *xs: np.stack(xs, axis=1)  # [steps, seeds, rows, tokens]
    calls = jax.device_put([jax.tree.map(side_by_side, *call) for call in each])
    rows = plain.batch_size * plain.max_target_length
    judging = dataclasses.replace(plain, eval_steps=max(HELD_OUT // rows, 1))
    held_out = data.held_out(splits.held_out, judging)
    tokens = sum(int(batch["mask"].sum()) for batch in held_out)
    held_out = jax.device_put(held_out)
    loop.say(f"{len(calls)} calls of {count} steps; {tokens:,} held-out tokens")
    studies = [Study(name, c, seeds, calls[0]) for name, c in configs.items()]
    with concurrent.futures.ThreadPoolExecutor() as pool:
        compiling = [pool.submit(study.compile) for study in studies]
    for done in compiling:
        done.result()
    where = f"{jax.devices()[0].device_kind}, jax {jax.__version__}"
    what = f"{options.steps} steps, {options.seeds} seeds, {tokens:,} held-out tokens"
    lines = [f"{where}: {what}", HEAD]
    ended: dict[str, list[float]] = {}
    for study in studies:
        study.train(calls)
        ended[study.name] = study.judge(held_out)
        lines.append(row(study.name, ended[study.name], ended["float32"], study.ms))
        loop.say(lines[-1])
        study.state = None
    seeds_apart = 100 * (max(ended["float32"]) / min(ended["float32"]) - 1)
    lines.append(f"Seeds of float32 lie within {seeds_apart:.2f}% of each other.")
    if AGAIN in ended and options.seeds >= 3:
        lines.append(chance(ended[AGAIN], ended["float32"]))
    print("\n".join(lines))
    if options.results:
        options.results.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
