"""Run: the report of one run, or of several side by side.

The page begins with what a reader compares. What is long, or the same for all runs, comes last
and folded:

    Runs           a row for each: losses, speed and bytes
    Differences    the keys of the configs that are not the same in all runs
    Gap            what each run loses more than the float run, step by step
    Loss, Size     curves, and the bytes of the weights
    Text           what each one writes, side by side
    ...            what quantizing it cost, for each that is quantized (quantized.py)
    ...            what was quantized, data and config of each, folded

A run has one held-out loss. It is that of the checkpoint as it is served, where somebody
measured it (`Served`), else the last one of the training.
"""

import json
import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from midtread.report import html, plot

NAMES = ("run_name",)  # keys of a config that name the run


class Served(NamedTuple):
    """What a checkpoint is as it is served."""

    weights: str  # their format
    loss: float  # held out, nats per token
    bits_per_byte: float
    weight_bytes: int


class Run(NamedTuple):
    """All that a page says of one run."""

    name: str
    lines: list[dict[str, Any]]  # of its metrics
    text: str = ""  # that it wrote
    folded: tuple[tuple[str, str], ...] = ()  # (title, text), long
    config: Mapping[str, Any] = {}
    served: Served | None = None
    parts: tuple[html.Section, ...] = ()  # what quantizing it cost


def read(path: pathlib.Path) -> list[dict[str, Any]]:
    """Reads the lines of a metrics file, without a last line that was cut short by a kill."""
    lines = []
    for text in path.read_text().splitlines() if path.exists() else ():
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError:
            break
    return lines


def read_runs(folders: Sequence[pathlib.Path]) -> list[Run]:
    """Reads what is in the folders of runs. They are named by the last part of their path, or
    in full where two have the same."""
    last = [f.resolve().name for f in folders]
    return [
        _read_run(f, n if last.count(n) == 1 else str(f)) for f, n in zip(folders, last)
    ]


def _read_run(folder: pathlib.Path, name: str) -> Run:
    def text_of(file: str) -> str:
        path = folder / file
        return path.read_text() if path.exists() else ""

    files = {
        "What was quantized": "coverage.txt",
        "Data": "data.json",
        "Config": "config.yml",
    }
    folded = tuple((title, text_of(file)) for title, file in files.items())
    folded = tuple((title, text) for title, text in folded if text)
    return Run(name, read(folder / "metrics.jsonl"), text_of("sample.txt"), folded)


def write(runs: Sequence[Run], path: pathlib.Path) -> pathlib.Path:
    """Writes a self-contained page to `path`, and the loss curves to loss.png beside it."""
    curves = {run.name: run.lines for run in runs if run.lines}
    columns, rows = _table(runs)
    sections = [html.Section("Runs", _about(runs), columns=columns, rows=rows)]
    if different := _differences(runs):
        heading = ("key", *(run.name for run in runs))
        sections.append(html.Section("Differences", columns=heading, rows=different))
    if curves:
        table = (columns, rows) if len(runs) > 1 else None
        plot.png(curves, path.parent / "loss.png", table)
        sections += _gap(runs, curves)
        sections.append(html.Section("Loss", picture=plot.loss(curves)))
    sizes = {run.name: run.served.weight_bytes for run in runs if run.served}
    if len(sizes) > 1:
        sections.append(html.Section("Size of the weights", picture=plot.sizes(sizes)))
    texts = tuple((run.name, run.text) for run in runs if run.text)
    if texts:
        sections.append(html.Section("Text", cards=texts))
    for run in runs:
        sections += run.parts
    for run in runs:
        of = f" of {run.name}" if len(runs) > 1 else ""
        sections += [
            html.Section(title + of, code=text, is_folded=True)
            for title, text in run.folded
        ]
    title = " · ".join(run.name for run in runs)
    return html.write(path, f"Midtread: {title}", sections)


def _about(runs: Sequence[Run]) -> str:
    if not any(run.served for run in runs):
        return ""
    return (
        "Held-out loss is that of each checkpoint as it is served, in nats per token, on "
        "the first run's text that it was not trained on."
    )


def _table(runs: Sequence[Run]) -> tuple[tuple[str, ...], tuple[tuple[str, ...], ...]]:
    """Returns (headings, rows), without the columns that no run has something in."""
    base = _held_out(runs[0])
    every = [_row(run, base) for run in runs]
    names = [n for n in every[0] if n != "vs first" or len(runs) > 1]
    names = [n for n in names if any(row[n] for row in every)]
    return tuple(names), tuple(tuple(row[n] for n in names) for row in every)


def _held_out(run: Run) -> float:
    """Returns the one held-out loss of a run; nan if nobody measured it."""
    if run.served is not None:
        return run.served.loss
    return next(
        (x["eval_loss"] for x in reversed(run.lines) if "eval_loss" in x), math.nan
    )


def _row(run: Run, base: float) -> dict[str, str]:
    """Returns the cells of a run by their headings; '' where nothing is known."""
    lines, served, loss = run.lines, run.served, _held_out(run)
    known = lambda value, text: "" if math.isnan(value) else text.format(value)
    middle = lambda values: sorted(values)[len(values) // 2] if values else math.nan
    rate = middle([x["tokens_per_second"] for x in lines])
    share = middle([100 * x["utilization"] for x in lines if "utilization" in x])
    return {
        "run": run.name,
        "weights": served.weights if served else "",
        "held-out loss": known(loss, "{:.4f}"),
        "vs first": known(100 * (loss / base - 1), "{:+.2f}%"),
        "perplexity": f"{math.exp(loss):.3f}" if loss < 50 else "",
        "bits/byte": f"{served.bits_per_byte:.4f}" if served else "",
        "bytes": f"{served.weight_bytes:,}" if served else "",
        "steps": f"{lines[-1]['step'] + 1:,}" if lines else "",
        "training loss": f"{lines[-1]['loss']:.4f}" if lines else "",
        "tokens/s": known(rate, "{:,.0f}"),
        "of peak": known(share, "{:.1f}%"),
    }


def _differences(runs: Sequence[Run]) -> tuple[tuple[str, ...], ...]:
    """Returns rows (key, its value in each run) of the keys that are not the same in all."""
    keys = dict.fromkeys(key for run in runs for key in run.config if key not in NAMES)
    rows = ((key, *(_shown(run.config.get(key, "")) for run in runs)) for key in keys)
    return tuple(row for row in rows if len(set(row[1:])) > 1)


def _shown(value: Any) -> str:
    return "-" if value in ("", None, [], ()) else str(value)


def _gap(runs: Sequence[Run], curves: plot.Curves) -> list[html.Section]:
    """Returns what the other curves lose more than that of the float run, or of the first."""
    if len(curves) < 2:
        return []
    floats = [run.name for run in runs if run.name in curves and _is_float(run)]
    base = floats[0] if floats else next(iter(curves))
    text = f"Training loss minus that of {base}, step by step; dots: held out."
    return [html.Section("Gap", text, picture=plot.gap(curves, base))]


def _is_float(run: Run) -> bool:
    return bool(run.config) and not (run.config["quantization"] or run.config["quant"])
