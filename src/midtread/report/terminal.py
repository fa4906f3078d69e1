"""Terminal: what a run prints while it works: a live line on a screen, plain lines in a log."""

import contextlib
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table


class Terminal:
    """Prints what a run has to say; each method is one thing that it says."""

    def __init__(self, console: Console | None = None, quiet: bool = False):
        self.console = console or Console(highlight=False, quiet=quiet)

    def say(self, text: str) -> None:
        self.console.print(text, markup=False, emoji=False, soft_wrap=True)

    def stream(self, text: str) -> None:
        """Prints a piece of a text as it is, where rich would expand tabs."""
        if not self.console.quiet:
            self.console.file.write(text)
            self.console.file.flush()

    def config(self, changed: dict[str, Any], folder: pathlib.Path) -> None:
        self.say(" ".join(f"{k}={v}" for k, v in changed.items()) or "all at defaults")
        self.say(f"every key and value: {folder / 'config.yml'}")

    def data(self, kind: str, about: dict[str, Any]) -> None:
        words = ", ".join(f"{k} {v:,}" if isinstance(v, int) else f"{k} {v}"
                          for k, v in about.items())  # fmt: skip
        self.say(f"data: {kind}: {words}")

    def coverage(self, mode: str, lines: list, totals: Any) -> None:
        self.say(f"quantization: {mode}")
        table = Table(box=None)
        for heading in ("where", "times", "forward", "dlhs", "drhs", "of FLOPs"):
            is_number = heading in ("times", "of FLOPs")
            table.add_column(heading, overflow="fold", no_wrap=is_number)
        for line in lines:
            share = f"{100 * line.share:.1f}%"
            table.add_row(
                line.where, str(line.sites), line.forward, line.dlhs, line.drhs, share
            )
        self.console.print(table)
        self.say(str(totals).splitlines()[1])

    @contextlib.contextmanager
    def progress(self, first: int, last: int) -> Iterator[Callable[[dict], None]]:
        if not self.console.is_terminal:
            yield self._lines(first, last)
            return
        columns = (
            TextColumn("step {task.completed}/{task.total}"),
            BarColumn(),
            TextColumn("{task.fields[now]}"),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=self.console) as bar:
            task = bar.add_task("train", completed=first, total=last, now="compiling")

            def show(line: dict[str, Any]) -> None:
                bar.update(task, completed=line["step"] + 1, now=_now(line))

            yield show

    def _lines(self, first: int, last: int) -> Callable[[dict], None]:
        every = max((last - first) // 20, 1)

        def show(line: dict[str, Any]) -> None:
            number = line["step"] + 1
            if number % every == 0 or number == last or "eval_loss" in line:
                left = line["step_seconds"] * (last - number)
                self.say(f"step {number}/{last}  {_now(line)}  {left:.0f} s left")

        return show

    def sample(self, text: str) -> None:
        self.say("sample:")
        self.say(text)

    def table(self, *columns: str, rows: list[list[str]]) -> None:
        table = Table(*columns, box=None)
        for row in rows:
            table.add_row(*map(escape, row))
        # A number that is cut short is lost, so a wide table runs over the edge instead.
        wide = self.console.options.update(max_width=1000)
        table.width = self.console.measure(table, options=wide).maximum
        self.console.print(table, crop=False, soft_wrap=True)


def _now(line: dict[str, Any]) -> str:
    text = (
        f"loss {line['loss']:.4f}  {line['tokens_per_second']:,.0f} tok/s  "
        f"{1000 * line['step_seconds']:.0f} ms/step"
    )
    if "utilization" in line:
        text += f"  {100 * line['utilization']:.1f}% of peak"
    return text + (f"  eval {line['eval_loss']:.4f}" if "eval_loss" in line else "")
