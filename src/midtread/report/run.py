"""Run: the report of one run, or of several side by side."""

import json
import math
import pathlib
from typing import Any

from midtread.report import html, plot


def read(path: pathlib.Path) -> list[dict[str, Any]]:
    """Reads the lines of a metrics file, without a last line that was cut short by a kill."""
    lines = []
    for text in path.read_text().splitlines() if path.exists() else ():
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError:
            break
    return lines


def _of(folder: pathlib.Path, name: str) -> str:
    path = folder / name
    return path.read_text() if path.exists() else ""


def _names(folders: list[pathlib.Path]) -> dict[pathlib.Path, str]:
    """Names folders by the last part of their path, or in full where two have the same."""
    last = [f.resolve().name for f in folders]
    return {f: n if last.count(n) == 1 else str(f) for f, n in zip(folders, last)}


def _row(name: str, lines: list[dict[str, Any]]) -> tuple[str, ...]:
    judged = [x["eval_loss"] for x in lines if "eval_loss" in x]
    loss = judged[-1] if judged else math.nan
    middle = lambda values: sorted(values)[len(values) // 2] if values else math.nan
    rate = middle([x["tokens_per_second"] for x in lines])
    share = middle([x["utilization"] for x in lines if "utilization" in x])
    return (
        name,
        f"{lines[-1]['step'] + 1}" if lines else "-",
        f"{lines[-1]['loss']:.4f}" if lines else "-",
        f"{loss:.4f}",
        f"{math.exp(loss):.3f}" if loss < 50 else "-",
        f"{rate:,.0f}",
        "-" if math.isnan(share) else f"{100 * share:.1f}%",
    )


def of_runs(
    folders: list[pathlib.Path],
    path: pathlib.Path,
    extra: tuple[html.Section, ...] = (),
) -> pathlib.Path:
    """Writes a self-contained page to `path`, and the loss curves to loss.png beside it."""
    names = _names(folders)
    curves = {name: read(f / "metrics.jsonl") for f, name in names.items()}
    curves = {name: lines for name, lines in curves.items() if lines}
    sections = []
    if curves:
        below = next(((x.columns, x.rows) for x in extra if x.rows), None)
        plot.png(curves, path.parent / "loss.png", below)
        columns = ("run", "steps", "loss", "held-out loss", "perplexity", "tokens/s",
                   "of peak")  # fmt: skip
        rows = tuple(_row(name, lines) for name, lines in curves.items())
        sections.append(html.Section("Loss", picture=plot.svg(curves)))
        sections.append(html.Section("Runs", columns=columns, rows=rows))
    sections += extra
    for folder, name in names.items():
        name = f" of {name}" if len(names) > 1 else ""
        for title, file in (
            ("Text" + name, "sample.txt"),
            ("What was quantized" + name, "coverage.txt"),
            ("Data" + name, "data.json"),
            ("Config" + name, "config.yml"),
        ):
            if text := _of(folder, file):
                sections.append(html.Section(title, code=text))
    title = " · ".join(names.values())
    return html.write(path, f"Midtread: {title}", sections)
