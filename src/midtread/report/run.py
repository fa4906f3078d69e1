"""Run: the report of one run, or of several side by side."""

import json
import math
import pathlib
from typing import Any

from midtread.report import html, plot


def _lines(folder: pathlib.Path) -> list[dict[str, Any]]:
    path = folder / "metrics.jsonl"
    text = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in text]


def _of(folder: pathlib.Path, name: str) -> str:
    path = folder / name
    return path.read_text() if path.exists() else ""


def _row(folder: pathlib.Path, lines: list[dict[str, Any]]) -> tuple[str, ...]:
    judged = [x["eval_loss"] for x in lines if "eval_loss" in x]
    loss = judged[-1] if judged else math.nan
    rates = sorted(x["tokens_per_second"] for x in lines)
    median = rates[len(rates) // 2] if rates else math.nan
    return (
        folder.name,
        f"{lines[-1]['step'] + 1}" if lines else "-",
        f"{lines[-1]['loss']:.4f}" if lines else "-",
        f"{loss:.4f}",
        f"{math.exp(loss):.3f}" if loss < 50 else "-",
        f"{median:,.0f}",
    )


def of_runs(
    folders: list[pathlib.Path],
    path: pathlib.Path,
    extra: tuple[html.Section, ...] = (),
) -> pathlib.Path:
    """A self-contained page at `path`, and the loss curves as loss.png beside it."""
    curves = {f.name: _lines(f) for f in folders}
    curves = {name: lines for name, lines in curves.items() if lines}
    sections = []
    if curves:
        below = next(((x.columns, x.rows) for x in extra if x.rows), None)
        plot.png(curves, path.parent / "loss.png", below)
        columns = ("run", "steps", "loss", "held-out loss", "perplexity", "tokens/s")
        rows = tuple(_row(f, curves[f.name]) for f in folders if f.name in curves)
        sections.append(html.Section("Loss", picture=plot.svg(curves)))
        sections.append(html.Section("Runs", columns=columns, rows=rows))
    sections += extra
    for folder in folders:
        name = f" of {folder.name}" if len(folders) > 1 else ""
        for title, file in (
            ("Text" + name, "sample.txt"),
            ("What was quantized" + name, "coverage.txt"),
            ("Data" + name, "data.json"),
            ("Config" + name, "config.yml"),
        ):
            if text := _of(folder, file):
                sections.append(html.Section(title, code=text))
    title = " · ".join(f.name for f in folders)
    return html.write(path, f"Midtread: {title}", sections)
