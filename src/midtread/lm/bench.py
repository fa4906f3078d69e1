"""Bench: a training step of this config beside the same in float.

Compile seconds, bytes at the peak (as the compiled program says), and the median time of a
step on a random batch.
"""

import dataclasses
import time
from typing import NamedTuple

import jax

from midtread.lm import build, data, step, transfers
from midtread.lm import model as models
from midtread.lm.config import (
    READS,
    Config,
    Model,
    Quantization,
    Training,
    keys,
    section,
)
from midtread.lm.mesh import layout_of

STEPS = 10


class Timed(NamedTuple):
    name: str
    step_seconds: float
    tokens_per_second: float
    compile_seconds: float
    peak_bytes: int
    gathered: str = ""  # a table of all-gathers of weights, on a mesh that cuts them


def in_float(config: Config) -> Config:
    """The same without quantization."""
    plain = {k: f.default for k, f in keys(Quantization).items()}
    sent = {"ring_fp8": "ring"}.get(config.expert_dispatch, config.expert_dispatch)
    return dataclasses.replace(
        config, **plain, fp8_weight_gather=False, expert_dispatch=sent
    )


def measure(config: Config, name: str) -> Timed:
    m, t = section(config, Model), section(config, Training)
    plain = {name: keys()[name].default for name in READS}
    config = dataclasses.replace(config, **plain, dataset_type="synthetic")
    layout = layout_of(config)
    batch = next(data.batches(data.splits(config).train, config))
    batch = layout.place_batch(batch) if layout else jax.device_put(batch)
    model = build.for_training(config, models.create(m, config.seed, layout))
    pruning = build.pruning(config, build.coverage(config))
    state, parts = step.initial(model, t, pruning, layout)
    how = step.How(m, t, parts.graph, config.seed, pruning, layout)
    started = time.perf_counter()
    compiled = step.run.lower(how, state, parts.random, batch).compile()
    compile_seconds = time.perf_counter() - started
    memory = compiled.memory_analysis()
    peak = memory.argument_size_in_bytes + memory.temp_size_in_bytes
    peak += memory.output_size_in_bytes - memory.alias_size_in_bytes
    times = []
    for _ in range(STEPS + 1):
        started = time.perf_counter()
        state, metrics = compiled(state, parts.random, batch)
        jax.block_until_ready(metrics)
        times.append(time.perf_counter() - started)
    median = sorted(times[1:])[STEPS // 2]
    tokens = batch["inputs"].size
    table = ""
    if layout and layout.sizes["fsdp"] > 1:
        found = transfers.weights(config, layout.sizes, compiled.as_text())
        table = transfers.describe(found)
    return Timed(name, median, tokens / median, compile_seconds, peak, table)


def bench(config: Config) -> list[Timed]:
    """This config, and itself in float if it is quantized."""
    plain = in_float(config)
    timed = [measure(plain, plain.dtype)]
    if plain != config:
        timed.append(measure(config, config.quantization or "quant"))
    return timed


COLUMNS = ("", "step", "tokens/s", "speed", "compile", "peak bytes")


def rows(timed: list[Timed]) -> list[list[str]]:
    return [
        [
            x.name,
            f"{1000 * x.step_seconds:.1f} ms",
            f"{x.tokens_per_second:,.0f}",
            f"{timed[0].step_seconds / x.step_seconds:.2f}x",
            f"{x.compile_seconds:.1f} s",
            f"{x.peak_bytes:,}",
        ]
        for x in timed
    ]
