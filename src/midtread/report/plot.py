"""Plot: loss curves, as a picture."""

import io
import itertools
import pathlib
from typing import Any

Curves = dict[str, list[dict[str, Any]]]  # run -> lines of its metrics


Table = tuple[tuple[str, ...], tuple[tuple[str, ...], ...]]  # headings, rows


def _figure(curves: Curves, table: Table | None = None) -> Any:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 6 if table else 4.5), layout="constrained")
    if table:
        axes, below = figure.subplots(2, height_ratios=(4, 1))
        below.axis("off")
        headings, rows = table
        drawn = below.table(rows, colLabels=headings, loc="center", edges="horizontal")
        drawn.auto_set_font_size(False)
        drawn.set_fontsize(9)
    else:
        axes = figure.subplots()
    styles = itertools.cycle(("-", "--", "-.", ":"))  # curves may lie on each other
    for (name, lines), style in zip(curves.items(), styles):
        steps = [x["step"] + 1 for x in lines]
        (drawn,) = axes.plot(
            steps, smooth([x["loss"] for x in lines]), style, label=name, lw=1.8
        )
        judged = [x for x in lines if "eval_loss" in x]
        axes.plot(
            [x["step"] + 1 for x in judged],
            [x["eval_loss"] for x in judged],
            "o",
            color=drawn.get_color(),
            ms=4,
        )
    axes.set(xlabel="step", ylabel="loss (nats per token); dots: held out")
    axes.grid(alpha=0.3)
    axes.legend()
    return figure


def smooth(values: list[float], keep: float = 0.8) -> list[float]:
    """Returns a running mean that starts at the first value."""
    out: list[float] = []
    for value in values:
        out.append(value if not out else keep * out[-1] + (1 - keep) * value)
    return out


def png(curves: Curves, path: pathlib.Path, table: Table | None = None) -> pathlib.Path:
    """Draws curves, and a table under them, into a file."""
    _figure(curves, table).savefig(path, dpi=120)
    return path


def svg(curves: Curves) -> str:
    """Returns the picture as text, to be put into a page."""
    buffer = io.StringIO()
    _figure(curves).savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]
