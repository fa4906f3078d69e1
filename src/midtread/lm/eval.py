"""Eval: what checkpoints lose on text they were not trained on, side by side.

A run of ours is judged by the part of its data that it was not trained on. A published model
(a Hugging Face folder, a .gguf file, an imported run) has no such part: it is judged by all
of the text (of files that are streamed, by what a run would hold out), cut into windows of
max_target_length tokens that do not overlap. Every window is a text of its own, with what the
tokenizer puts before texts, and every token of it but the first (or with that, every one) is
predicted from those before it. Shorter windows give higher numbers, so the window is stated
with them.
"""

import dataclasses
import math
import pathlib
from typing import NamedTuple

import jax
from flax import nnx

from midtread.lm import (
    checkpoint,
    codes,
    compare,
    convert,
    data,
    decode,
    huggingface,
    settings,
    step,
)
from midtread.lm.config import Config
from midtread.lm.generate import generate
from midtread.lm.tokenizer import Tokenizer, digest_of
from midtread.lm.usage import require
from midtread.report.run import Run, Served, read, read_runs


class Judged(NamedTuple):
    """A checkpoint, and what it loses."""

    name: str
    quantization: str
    loss: float  # nats per token
    perplexity: float
    bits_per_byte: float
    weight_bytes: int
    window: int = 0  # tokens that are seen at once
    tokens: int = 0  # that were predicted
    steps_to_target: int | None = None  # target_loss, from the run's own metrics
    seconds_to_target: float | None = None


def evaluate(checkpoints: list[tuple[str, Config]]) -> list[Judged]:
    """Judges every checkpoint by the held-out split of the first one's data."""
    first = checkpoints[0][1]
    if any(huggingface.folder_in(path) for path, _ in checkpoints):
        batches, bytes_per_token = data.windows(first)
    else:
        splits = data.splits(first)
        batches = data.held_out(splits.held_out, first)
        bytes_per_token = splits.about["bytes_per_token"]
    out = []
    for path, config in checkpoints:
        for name in ("vocab_size", "tokenizer_type", "tokenizer_path"):
            here, there = getattr(first, name), getattr(config, name)
            require(
                here == there or (name == "tokenizer_path" and _same_file(here, there)),
                f"{path} cannot be judged by the same text: {name}={there}, but "
                f"{checkpoints[0][0]} has {name}={here}.",
            )
        if first.dataset_type != "synthetic":
            checkpoint.require_same_tokenizer(path, data.tokenizer(config))
        out.append(_judge(path, config, batches, bytes_per_token))
    return out


def _same_file(here: str, there: str) -> bool:
    """Returns whether two paths lead to the same tokenizer, since an imported run has a
    copy."""
    return bool(here and there) and digest_of(here) == digest_of(there)


def _judge(path: str, config: Config, batches: list, bytes_per_token: float) -> Judged:
    model = convert.load(config, path)
    quantized = config.quantization or ("quant" if config.quant else "")
    what = quantized or ", ".join(codes.formats(model)) or "float"
    parts = step.take_apart(model)
    loss = step.mean_loss(step.make_eval(parts), parts.learned, parts.kept, batches)
    bits = loss / math.log(2) / bytes_per_token
    weights = convert.nbytes(
        jax.tree.leaves(nnx.filter_state(parts.learned, nnx.Param))
    )
    name = pathlib.Path(path).resolve().name
    name = config.run_name if name.isdigit() else name
    judged = Judged(name, what, loss, math.exp(min(loss, 700)), bits, weights)
    judged = judged._replace(
        window=config.max_target_length,
        tokens=int(sum(batch["mask"].sum() for batch in batches)),
    )
    return judged._replace(**_to_target(path, config.target_loss))


def _to_target(path: str, target: float) -> dict:
    """Returns the steps and seconds until a run's held-out loss was `target_loss`."""
    metrics = pathlib.Path(path) / "metrics.jsonl"
    if not target or not metrics.is_file():
        return {}
    seconds = 0.0
    for number, line in enumerate(read(metrics)):
        seconds += line["step_seconds"] if number else 0.0  # the first step compiles
        if line.get("eval_loss", math.inf) <= target:
            return {"steps_to_target": line["step"] + 1, "seconds_to_target": seconds}
    return {}


# What a text depends on besides the weights.
ASKED = ("prompt", "use_chat_template", "max_new_tokens", "temperature", "top_k", "top_p",
         "stop", "seed")  # fmt: skip


def reported(checkpoints: list[tuple[str, Config]]) -> list[Run]:
    """Returns all that a report says of checkpoints: their runs, what they lose, and what each
    writes after the first one's prompt, chosen from the same random numbers."""
    runs = read_runs([pathlib.Path(path) for path, _ in checkpoints])
    first = checkpoints[0][1]
    codec = None if first.dataset_type == "synthetic" else data.tokenizer(first)
    out = []
    for run, (path, config), x in zip(runs, checkpoints, evaluate(checkpoints)):
        served = Served(x.quantization, x.loss, x.bits_per_byte, x.weight_bytes)
        text = run.text if codec is None else _text(path, config, codec, first)
        asked = pathlib.Path(path) / "config.yml"  # as the run was, not as it is served
        was = settings.load([str(asked)]) if asked.is_file() else config
        run = run._replace(config=settings.plain(was), served=served, text=text)
        out.append(run._replace(parts=tuple(compare.sections(path, config))))
    return out


def _text(path: str, config: Config, codec: Tokenizer, first: Config) -> str:
    """Returns what a checkpoint writes after the first one's prompt, as that one asks."""
    model = convert.load(config, path)
    model = model if config.mesh else decode.unstack(model)
    asked = {name: getattr(first, name) for name in ASKED}
    return generate(model, codec, dataclasses.replace(config, **asked)).texts[0]


COLUMNS = (
    "checkpoint",
    "weights",
    "window",
    "loss",
    "perplexity",
    "bits/byte",
    "vs first",
    "bytes",
)


def rows(judged: list[Judged]) -> list[list[str]]:
    """Returns a row of COLUMNS for each checkpoint."""
    base = judged[0].loss
    return [
        [
            x.name,
            x.quantization,
            f"{x.window:,}",
            f"{x.loss:.4f}",
            f"{x.perplexity:.3f}",
            f"{x.bits_per_byte:.4f}",
            f"{100 * (x.loss / base - 1):+.2f}%",
            f"{x.weight_bytes:,}",
        ]
        for x in judged
    ]
