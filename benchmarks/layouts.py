"""Whose files are read, written and run how: the table of docs/formats-in-and-out.md.

python benchmarks/layouts.py [--write]
"""

import argparse
import pathlib

from midtread.interop import gguf_blocks, gguf_export, quantized, targets
from midtread.kernels import weight_matmul

PAGE = pathlib.Path(__file__).parents[1] / "docs" / "formats-in-and-out.md"
BEGIN, END = (
    "<!-- table: benchmarks/layouts.py --write -->\n",
    "<!-- end of table -->\n",
)
HEAD = """| whose | codes here | in | out: `format=` | kernel for the weight |
|---|---|---|---|---|
"""


def _kernel(qtype: str, has_zero: bool) -> str:
    """How few rows are multiplied by such weights on an NVIDIA GPU."""
    if qtype in weight_matmul.HOPPER and not has_zero:
        return "yes"
    return "yes, not yet timed" if qtype in weight_matmul.TRITON else "decoded first"


def _row(whose: str, qtype: str, out: list[str], has_zero: bool = False) -> str:
    names = ", ".join(f"`{name}`" for name in out) or "no"
    return f"| {whose} | {qtype} | yes | {names} | {_kernel(qtype, has_zero)} |"


def table() -> str:
    """The rows, from the tables that read and write."""
    rows = []
    for layout in quantized.ROWS:
        for qtype in layout.formats:
            out = [
                target.name
                for target in targets.ROWS
                if (target.layout, target.qtype) == (layout.name, qtype)
            ]
            rows.append(_row(layout.name, qtype, out))
    written = {kind: name for name, kind in gguf_export.KINDS.items()}
    offsets = ("Q4_1", "Q5_1", "Q2_K", "Q4_K", "Q5_K")
    for block in gguf_blocks.ROWS:
        out = [written[block.name]] if block.name in written else []
        whose = f"GGUF {block.name}"
        rows.append(_row(whose, block.qtype, out, block.name in offsets))
    return HEAD + "\n".join(rows) + "\n"


def page() -> str:
    """The page with a table that is current."""
    text = PAGE.read_text()
    before, after = text[: text.index(BEGIN)], text[text.index(END) :]
    return before + BEGIN + table() + after


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true")
    if parser.parse_args().write:
        PAGE.write_text(page())
    else:
        print(table())


if __name__ == "__main__":
    main()
