"""A table at start-up that narrow screens and logs can show."""

import io

import pytest
from rich.console import Console

from midtread.lm.build import Line
from midtread.report.terminal import Terminal

LINES = [
    Line("mlp/up, mlp/down, attention/q", 14, *["mxfp8/32 x mxfp8/32"] * 3, 0.6),
    Line("layers/0/attention", 5, "bf16 x bf16", "-", "-", 0.4),
]


# An emoji's name, a tab, a mark of rich's, a backslash before what may be one, a wide line.
TEXT = "{a:b:c} :x:\n\tif [bold]x[/bold]:\r\n" + "w " * 60 + "\\"


def test_a_text_is_printed_as_it_is():
    out = io.StringIO()
    terminal = Terminal(Console(file=out, width=40, highlight=False))
    terminal.stream(TEXT)
    assert out.getvalue() == TEXT
    terminal.say("runs/a:b:c [x] \\")
    assert out.getvalue() == TEXT + "runs/a:b:c [x] \\\n"
    Terminal(Console(file=out, quiet=True)).stream("more")
    assert "more" not in out.getvalue()


@pytest.mark.parametrize("width", [160, 80, 60])
def test_no_column_is_lost(width):
    out = io.StringIO()
    terminal = Terminal(Console(file=out, width=width, highlight=False))
    terminal.coverage("te route", LINES, "2 contractions\n60.0% of 1 FLOP")
    text = out.getvalue()
    for word in ("where", "times", "forward", "dlhs", "drhs", "of FLOPs", "mlp/up,"):
        assert word in text
    assert text.count("mxfp8/32") == 6 and "60.0%" in text
    assert max(map(len, text.splitlines())) <= width
