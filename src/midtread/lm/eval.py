"""Eval: what checkpoints lose on text they were not trained on, side by side."""

import json
import math
import pathlib
from typing import NamedTuple

import jax
from flax import nnx

from midtread.lm import checkpoint, convert, data, step
from midtread.lm.config import Config, require
from midtread.report.run import read


class Judged(NamedTuple):
    name: str
    quantization: str
    loss: float  # nats per token
    perplexity: float
    bits_per_byte: float
    weight_bytes: int
    steps_to_target: int | None = None  # target_loss, from the run's own metrics
    seconds_to_target: float | None = None


def evaluate(found: list[tuple[str, Config]]) -> list[Judged]:
    """Every checkpoint on the held-out split of the first one's data."""
    first = found[0][1]
    splits = data.splits(first)
    batches = data.held_out(splits.held_out, first)
    out = []
    for path, config in found:
        for name in ("vocab_size", "tokenizer_type", "tokenizer_path"):
            here, there = getattr(first, name), getattr(config, name)
            require(
                here == there,
                f"{path} cannot be judged by the same text: {name}={there}, but "
                f"{found[0][0]} has {name}={here}.",
            )
        if first.dataset_type != "synthetic":
            checkpoint.require_same_tokenizer(path, data.tokenizer(config))
        out.append(_judge(path, config, batches, splits.about["bytes_per_token"]))
    return out


def _judge(path: str, config: Config, batches: list, bytes_per_token: float) -> Judged:
    parts = step.take_apart(convert.load(config, path))
    loss = step.mean_loss(step.make_eval(parts), parts.learned, parts.kept, batches)
    bits = loss / math.log(2) / bytes_per_token
    weights = convert.nbytes(
        jax.tree.leaves(nnx.filter_state(parts.learned, nnx.Param))
    )
    name = pathlib.Path(path).resolve().name
    name = config.run_name if name.isdigit() else name
    what = config.quantization or ("quant" if config.quant else "float")
    judged = Judged(name, what, loss, math.exp(min(loss, 700)), bits, weights)
    return judged._replace(**_to_target(path, config.target_loss))


def _to_target(path: str, target: float) -> dict:
    """Steps and seconds until a run's held-out loss was `target_loss`."""
    metrics = pathlib.Path(path) / "metrics.jsonl"
    if not target or not metrics.is_file():
        return {}
    seconds = 0.0
    for number, line in enumerate(read(metrics)):
        seconds += line["step_seconds"] if number else 0.0  # the first step compiles
        if line.get("eval_loss", math.inf) <= target:
            return {"steps_to_target": line["step"] + 1, "seconds_to_target": seconds}
    return {}


COLUMNS = (
    "checkpoint",
    "weights",
    "loss",
    "perplexity",
    "bits/byte",
    "vs first",
    "bytes",
)


def rows(judged: list[Judged]) -> list[list[str]]:
    base = judged[0].loss
    return [
        [
            x.name,
            x.quantization,
            f"{x.loss:.4f}",
            f"{x.perplexity:.3f}",
            f"{x.bits_per_byte:.4f}",
            f"{100 * (x.loss / base - 1):+.2f}%",
            f"{x.weight_bytes:,}",
        ]
        for x in judged
    ]


def save(judged: list[Judged], path: pathlib.Path) -> None:
    path.write_text(json.dumps([x._asdict() for x in judged], indent=1))
