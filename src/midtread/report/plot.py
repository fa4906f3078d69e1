"""Plot: loss curves, the gap between them, and sizes, as pictures.

Pictures in a page are small and scale with it, so that their letters can be read at any width.
"""

import io
import itertools
import pathlib
from collections.abc import Callable
from typing import Any

Curves = dict[str, list[dict[str, Any]]]  # run -> lines of its metrics
Table = tuple[tuple[str, ...], tuple[tuple[str, ...], ...]]  # headings, rows
WIDTH = 5.4  # inches
UNITS = (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1, "bytes")


def png(curves: Curves, path: pathlib.Path, table: Table | None = None) -> pathlib.Path:
    """Draws curves, and a table under them, into a file."""
    figure = _figure(8, 6 if table else 4.5)
    if table:
        axes, below = figure.subplots(2, height_ratios=(4, 1))
        below.axis("off")
        headings, rows = table
        drawn = below.table(rows, colLabels=headings, loc="center", edges="horizontal")
        drawn.auto_set_font_size(False)
        drawn.set_fontsize(9 if len(headings) < 9 else 6)
    else:
        axes = figure.subplots()
    _draw_loss(axes, curves)
    figure.savefig(path, dpi=120)
    return path


def loss(curves: Curves) -> str:
    """Returns the curves of loss as svg, to be put into a page."""
    return _svg(3.3, lambda axes: _draw_loss(axes, curves))


def gap(curves: Curves, base: str) -> str:
    """Returns, as svg, how much more each run loses than the run `base`, at steps of both."""

    def draw(axes: Any) -> None:
        axes.axhline(0, color="0.5", lw=1)
        axes.plot(
            [], []
        )  # `base` has its color in the other picture, if it is the first
        for name, lines in curves.items():
            if name != base:
                _draw_curve(axes, name, _less(lines, curves[base]), "-")
        axes.set(xlabel="step", ylabel=f"loss - loss of {base}")
        axes.grid(alpha=0.3)
        axes.legend()

    return _svg(2.6, draw)


def sizes(of: dict[str, int]) -> str:
    """Returns bars of bytes as svg, each with its share of the largest."""

    def draw(axes: Any) -> None:
        largest, names = max(of.values()), list(of)
        unit, word = next((n, w) for n, w in UNITS if largest >= n)
        bars = axes.barh(names, [size / unit for size in of.values()], height=0.6)
        labels = [
            f"{s / unit:.3g} {word}, {100 * s / largest:.0f}%" for s in of.values()
        ]
        axes.bar_label(bars, labels, padding=3)
        axes.set(xlabel=word, xlim=(0, 1.4 * largest / unit))
        axes.invert_yaxis()  # the first run on top

    return _svg(0.8 + 0.4 * len(of), draw)


def smooth(values: list[float], keep: float = 0.8) -> list[float]:
    """Returns a running mean that starts at the first value."""
    out: list[float] = []
    for value in values:
        out.append(value if not out else keep * out[-1] + (1 - keep) * value)
    return out


def _figure(width: float, height: float) -> Any:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _svg(height: float, draw: Callable[[Any], None]) -> str:
    figure, buffer = _figure(WIDTH, height), io.StringIO()
    draw(figure.subplots())
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def _draw_loss(axes: Any, curves: Curves) -> None:
    styles = itertools.cycle(("-", "--", "-.", ":"))  # curves may lie on each other
    for (name, lines), style in zip(curves.items(), styles):
        _draw_curve(axes, name, lines, style)
    axes.set(
        xlabel="step", ylabel="loss (nats per token, running mean); dots: held out"
    )
    axes.grid(alpha=0.3)
    axes.legend()


def _draw_curve(axes: Any, name: str, lines: list[dict[str, Any]], style: str) -> None:
    at = lambda some: [x["step"] + 1 for x in some]
    values = smooth([x["loss"] for x in lines])
    (drawn,) = axes.plot(at(lines), values, style, label=name, lw=1.8)
    judged = [x for x in lines if "eval_loss" in x]
    values = [x["eval_loss"] for x in judged]
    axes.plot(at(judged), values, "o", color=drawn.get_color(), ms=4)


def _less(lines: list[dict[str, Any]], base: list[dict[str, Any]]) -> list[dict]:
    """Returns the losses of `lines` minus those of `base`, at steps that both have."""
    known = {x["step"]: x for x in base}
    out = []
    for x in lines:
        other = known.get(x["step"], {})
        names = [n for n in ("loss", "eval_loss") if n in x and n in other]
        if "loss" in names:
            out.append({"step": x["step"], **{n: x[n] - other[n] for n in names}})
    return out
