"""Quantized: what quantizing a checkpoint cost, as parts of a page.

    held out      perplexity beside the float model's, and KL from it
    size          bytes of weights, before and after
    speed         tokens per second of `midtread generate`, for each device that it ran on
    weights       the error of every layer's output, beside that of rounding
    worst         those with the largest errors, and how their codes are used
    fell back     what was not done as asked, and why

What calibration knew is in calibration.json, which `write` left with the checkpoint; a
checkpoint that was rounded to nearest has none, and says so.
"""

import contextlib
import dataclasses
import json
import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from midtread.algorithms.report import Report, Row
from midtread.report.html import Section

FILE = "calibration.json"
SPEED = "speed.json"
WORST = 5
WIDTH, HEIGHT = 640, 90  # of a histogram, in the picture's own units


def write(folder: pathlib.Path, report: Report) -> None:
    """Keeps what calibration did to every weight."""
    (folder / FILE).write_text(json.dumps(dataclasses.asdict(report), indent=1))


def read(folder: pathlib.Path) -> Report | None:
    """Returns what `write` kept; None for a checkpoint that was not calibrated."""
    file = folder / FILE
    if not file.is_file():
        return None
    fields = json.loads(file.read_text())
    rows = tuple(Row(**row) for row in fields.pop("rows"))
    lists = {k: tuple(v) for k, v in fields.items() if isinstance(v, list)}
    return Report(rows, **{**fields, **lists})


def note_speed(folder: pathlib.Path, device: str, rate: float, prompts: int) -> None:
    """Keeps how fast a checkpoint generated, last, on a device. A folder that cannot be written
    to goes without."""
    file = folder / SPEED
    known = {**_speeds(file), device: {"tokens_per_second": rate, "prompts": prompts}}
    with contextlib.suppress(OSError):
        file.write_text(json.dumps(known, indent=1))


def _speeds(file: pathlib.Path) -> dict[str, dict]:
    """By device; none where nothing was noted, or nothing that can be read."""
    try:
        return json.loads(file.read_text())
    except (OSError, ValueError):
        return {}


def sections(
    folder: pathlib.Path,
    sizes: Mapping[str, Any],
    compared: Any,
    codes: Mapping[str, Sequence[int]],
) -> list[Section]:
    """Returns the parts of a page about one quantized checkpoint.

    Args:
        folder: of the checkpoint.
        sizes: its sizes.json.
        compared: losses and divergence beside the float model (lm/compare.py), or None.
        codes: name of a weight -> how often its codes are used.
    """
    name, report = folder.resolve().name, read(folder)
    speed = _speed(name, folder / SPEED)
    parts = [_held_out(name, compared, sizes), _size(name, sizes), speed]
    if report is None:
        text = "Every weight was rounded to nearest: no data was looked at."
        return [*parts, Section(f"Weights of {name}", text)]
    rows = tuple(_cells(row) for row in report.rows)
    last = str(report).partition("\n\n")[2]
    columns = ("weight", "format", "tokens", "error", "if rounded")
    title = f"Weights of {name}"
    parts.append(Section(title, last, columns=columns, rows=rows, is_folded=True))
    for row in report.worst[:WORST]:
        bars = codes.get(row.name.partition("[")[0])
        picture = "" if bars is None else histogram(bars)
        text = (
            f"{row.format}: {row.cost:.3g} of its layer's output, {row.rounded:.3g} if "
            "rounded. How often each code is used, the lowest first:"
        )
        parts.append(Section(f"Among the worst: {row.name}", text, picture))
    notes = tuple((row.name, row.note) for row in report.rows if row.note)
    notes += tuple((name, "rounded: it meets no contraction") for name in report.unseen)
    text = "" if notes else "Nothing: every weight was solved as asked."
    columns = ("weight", "why") if notes else ()
    parts.append(
        Section(f"What fell back in {name}", text, columns=columns, rows=notes)
    )
    return parts


def _held_out(name: str, compared: Any, sizes: Mapping[str, Any]) -> Section:
    title = f"{name} beside float"
    if compared is None:
        return Section(title, f"The float checkpoint {sizes['source']} is gone.")
    text = (
        f"On {compared.tokens:,} held-out tokens, beside {compared.source}. KL is that of "
        "the float model's next-token distribution from the quantized one's."
    )
    columns = ("", "loss", "perplexity", "KL, nats per token")
    rows = (
        ("float", *_losses(compared.float_loss), "0"),
        (name, *_losses(compared.loss), f"{compared.divergence:.4f}"),
    )
    return Section(title, text, columns=columns, rows=rows)


def _losses(loss: float) -> tuple[str, str]:
    return f"{loss:.4f}", f"{math.exp(loss):.3f}" if loss < 50 else "-"


def _size(name: str, sizes: Mapping[str, Any]) -> Section:
    rows = tuple(
        (label, f"{sizes[key]:,}")
        for label, key in (
            ("weights in float", "float_bytes"),
            ("weights, quantized", "bytes"),
            ("files", "bytes_on_disk"),
        )
        if key in sizes
    )
    return Section(f"Size of {name}", columns=("", "bytes"), rows=rows)


def _speed(name: str, file: pathlib.Path) -> Section:
    title = f"Speed of {name}"
    speeds = _speeds(file)
    if not speeds:
        return Section(title, "Not measured: `midtread generate` notes it here.")
    rows = tuple(
        (device, str(x["prompts"]), f"{x['tokens_per_second']:,.1f}")
        for device, x in sorted(speeds.items())
    )
    text = "Of `midtread generate`, when it last ran there."
    columns = ("device", "prompts", "tokens per second")
    return Section(title, text, columns=columns, rows=rows)


def _cells(row: Row) -> tuple[str, ...]:
    return (
        row.name, row.format, f"{row.tokens:,}", f"{row.cost:.3g}", f"{row.rounded:.3g}",
    )  # fmt: skip


def histogram(counts: Sequence[int]) -> str:
    """Bars as an svg: no library is needed for rectangles.

    >>> histogram([1, 2]).count("<rect")
    2
    """
    step = WIDTH / len(counts)
    most = max(max(counts), 1)
    bars = []
    for i, count in enumerate(counts):
        height = HEIGHT * int(count) / most
        bars.append(
            f'<rect x="{i * step + 1:.1f}" y="{HEIGHT - height:.1f}" '
            f'width="{step - 2:.1f}" height="{height:.1f}" fill="#4a7ab5">'
            f"<title>{int(count):,}</title></rect>"
        )
    body = "".join(bars)
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">{body}</svg>'
