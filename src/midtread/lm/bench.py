"""Bench: a training step of this config, and decoding with it, beside the same in float.

Of training: the median time of a step on a random batch, FLOP/s that the model needs
(`roofline.model_flops`) and their share of the device's bfloat16 peak, where that is known,
compile seconds, bytes at the peak (as the compiled program says). Of decoding: tokens a
second of `decode_slots` sequences, after the first one, and bytes of weights and cache.
"""

import dataclasses
import time
from typing import NamedTuple

import jax
import numpy as np
from flax import nnx

from midtread.lm import build, convert, data, decode, roofline, room, step, transfers
from midtread.lm import model as models
from midtread.lm.config import (
    READS,
    Config,
    Model,
    Quantization,
    Training,
    UsageError,
    keys,
    section,
)
from midtread.lm.generate import Clock, cache_format
from midtread.lm.mesh import layout_of

STEPS = 10
PROMPT = 64  # tokens of a prompt, and as many more are made


class Timed(NamedTuple):
    name: str
    step_seconds: float
    tokens_per_second: float
    compile_seconds: float
    peak_bytes: int
    flops: float = 0.0  # a second
    share: float | None = None  # of the peak
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
    how = step.Setup(m, t, parts.graph, config.seed, pruning, layout)
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
    flops, device = roofline.model_flops(config) / median, roofline.device_here()
    share = flops / (device.flops["bf16"] * jax.device_count()) if device else None
    return Timed(
        name, median, tokens / median, compile_seconds, peak, flops, share, table
    )


def bench(config: Config) -> list[Timed]:
    """This config, and itself in float if it is quantized."""
    plain = in_float(config)
    for each in (plain, config):
        room.require_room(each)
    timed = [measure(plain, plain.dtype)]
    if plain != config:
        timed.append(measure(config, config.quantization or "quant"))
    return timed


COLUMNS = ("training", "step", "tokens/s", "TFLOP/s", "of peak", "speed", "compile",
           "peak bytes")  # fmt: skip


def rows(timed: list[Timed]) -> list[list[str]]:
    return [
        [
            x.name,
            f"{1000 * x.step_seconds:.1f} ms",
            f"{x.tokens_per_second:,.0f}",
            f"{x.flops / 1e12:.3g}",
            "-" if x.share is None else f"{100 * x.share:.1f}%",
            f"{timed[0].step_seconds / x.step_seconds:.2f}x",
            f"{x.compile_seconds:.1f} s",
            f"{x.peak_bytes:,}",
        ]
        for x in timed
    ]


# --- decoding ---------------------------------------------------------------------------------


class Decoded(NamedTuple):
    name: str
    tokens_per_second: float
    weight_bytes: int
    cache_bytes: int


def decoding(config: Config) -> list[Decoded]:
    """Tokens a second of this config's model, served, and of itself in float."""
    plain = in_float(config)
    found = [_decode(plain, plain.dtype)]
    if plain != config:
        try:
            found.append(_decode(config, config.quantization or "quant"))
        except UsageError:
            pass  # a value that is for training alone
    return found


def _decode(config: Config, name: str) -> Decoded:
    m = section(config, Model)
    model = convert.in_memory(config, models.create(m, config.seed))
    nbytes = convert.nbytes(nnx.state(model, nnx.Not(nnx.RngState)))
    slots, allowed = config.decode_slots, min(config.max_new_tokens, PROMPT)
    server = decode.Server(
        decode.prepare(model), m,
        slots=slots, length=PROMPT + allowed,
        cache_format=cache_format(config),
    )  # fmt: skip
    server.warm()
    rng, clock = np.random.default_rng(config.seed), Clock()
    prompts = [rng.integers(0, m.vocab_size, PROMPT).tolist() for _ in range(slots)]
    decode.complete(server, prompts, allowed, lambda _, new: clock.count(len(new)))
    return Decoded(name, clock.rate, nbytes, server.cache_bytes)


DECODING = ("decoding", "tokens/s", "speed", "weight bytes", "cache bytes")


def decoding_rows(found: list[Decoded]) -> list[list[str]]:
    return [
        [
            x.name,
            f"{x.tokens_per_second:,.1f}",
            f"{x.tokens_per_second / found[0].tokens_per_second:.2f}x",
            f"{x.weight_bytes:,}",
            f"{x.cache_bytes:,}",
        ]
        for x in found
    ]
