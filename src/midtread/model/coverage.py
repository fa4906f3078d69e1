"""Coverage: the answer of `mt.explain`, as rows and totals, and as a table.

Rows that differ in a number of their path alone (layers/0, layers/1, ...) are printed as
one; `rows` has them all. Shares of FLOPs are of the forward pass, and of both backward
matmuls where a recipe quantizes those. A weight counts as quantized if every contraction
that it enters, and every look-up that a rule is about, takes it in low bits. Adapters are
not weights of the model: their rows are counted apart.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from midtread.model.chosen import Kernel
from midtread.numerics.formats import Format

SHORT = {
    "bfloat16": "bf16", "float16": "f16", "float32": "f32", "float64": "f64",
    "float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2", "float4_e2m1fn": "e2m1",
}  # fmt: skip


def dtype_text(dtype: Any) -> str:
    name = np.dtype(dtype).name
    return SHORT.get(name, name)


def format_text(fmt: Format, tile: Sequence[int] = ()) -> str:
    """Writes a format with how many elements share a scale along each axis: 'int8',
    'int4/128', 'int4/32x128'.

    >>> from midtread.numerics.formats import as_format
    >>> format_text(as_format("fp8"), (1, 128, 128))
    'e4m3/128x128'
    """
    name = SHORT.get(fmt.name, fmt.name)
    shared = "x".join(f"{t:g}" for t in tile if t != 1) or "1"
    return f"{name}/{shared}" if tile else name


@dataclasses.dataclass(frozen=True)
class Param:
    """A parameter of the float model, and what it takes once quantized."""

    shape: tuple[int, ...]
    nbytes: int
    stored: int


@dataclasses.dataclass(frozen=True)
class Row:
    """A contraction, kernel or lookup, with all the times that this line of code runs it."""

    path: str
    op: str
    shapes: tuple[tuple[int, ...], ...]
    rule: int | None = None
    fwd: tuple[str, str] | None = None  # formats of lhs and rhs
    dlhs: tuple[str, str] | None = None  # formats of g and rhs
    drhs: tuple[str, str] | None = None  # formats of lhs and g
    runs_as: str = ""  # the dtypes that are multiplied on this platform
    times: int = 1
    flops: int = 0  # those of the forward, all times together
    bytes: int = 0  # those of both operands in these formats
    weight: str = ""
    weight_bytes: int = 0  # what it takes in the float model
    reason: str = ""  # why it is left alone
    note: str = ""
    quantized: tuple[bool, bool, bool] = (False, False, False)  # fwd, dlhs, drhs
    is_opaque: bool = False
    is_emulated: bool = False  # both operands are codes, multiplied in a wider dtype
    is_adapter: bool = False  # a product with LoRA's A or B
    kernels: tuple[Kernel, ...] = ()  # the kernels of its matmuls, if asked for
    measured: str = (
        ""  # of a served weight: what was faster, float rows or quantized ones
    )

    @property
    def is_quantized(self) -> bool:
        return self.quantized[0]

    @property
    def why(self) -> str:
        return "; ".join(part for part in (self.reason, self.note) if part)

    def __add__(self, other: "Row") -> "Row":
        both = {
            k: getattr(self, k) + getattr(other, k) for k in ("times", "flops", "bytes")
        }
        return dataclasses.replace(self, **both)


@dataclasses.dataclass(frozen=True)
class Totals:
    """Sums over the rows of a model."""

    contractions: int
    left_alone: int
    adapters: int
    opaque: int
    flops: int
    quantized_flops: int
    backward_flops: int  # 0 if no recipe quantizes a backward
    quantized_backward_flops: int
    weight_bytes: int
    quantized_weight_bytes: int
    stored_weight_bytes: int
    outside_bytes: int  # those of parameters that no row names
    emulated: int

    @property
    def flops_share(self) -> float:
        return share(self.quantized_flops, self.flops)

    @property
    def weight_share(self) -> float:
        return share(self.quantized_weight_bytes, self.weight_bytes)

    def __str__(self) -> str:
        first = [_count(self.contractions, "contraction")]
        first.append(f"{self.left_alone} left alone")
        if self.adapters:
            first.append(f"{self.adapters} of adapters")
        if self.opaque:
            first.append(_count(self.opaque, "opaque kernel"))
        lines = [
            ", ".join(first),
            (
                f"{100 * self.flops_share:.1f}% of {human(self.flops, 'FLOP')}, "
                f"{100 * self.weight_share:.1f}% of {human(self.weight_bytes, 'B')} of "
                "weights quantized"
            ),
        ]
        if self.backward_flops:
            part = 100 * share(self.quantized_backward_flops, self.backward_flops)
            lines.append(
                f"{part:.1f}% of {human(self.backward_flops, 'FLOP')} quantized in the backward"
            )
        if self.emulated:
            lines.append(
                f"* {_count(self.emulated, 'contraction')} emulated: this platform does not "
                "multiply the format itself, and gains no speed from it"
            )
        if self.outside_bytes:
            lines.append(
                f"{human(self.outside_bytes, 'B')} of biases, norms and the like meet no "
                "contraction"
            )
        if self.stored_weight_bytes != self.weight_bytes:
            lines.append(
                f"weights take {human(self.stored_weight_bytes, 'B')} instead of "
                f"{human(self.weight_bytes, 'B')}"
            )
        return "\n".join(lines)


@dataclasses.dataclass(frozen=True)
class Coverage:
    """The rows of a model and its parameters, to be printed."""

    rows: tuple[Row, ...]
    params: dict[str, Param]
    # "encoder/dot_general0_lhs" -> the share of the data that its static range clips
    clipped: dict[str, float] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def totals(self) -> Totals:
        real = [r for r in self.rows if r.flops]
        trains = any(any(r.quantized[1:]) for r in real)
        named = {r.weight for r in self.rows}
        backward = lambda rows: sum(
            r.flops * sum(r.quantized[1:]) for r in rows if trains
        )
        return Totals(
            contractions=len(real),
            left_alone=sum(not r.is_quantized and not r.is_adapter for r in real),
            adapters=sum(r.is_adapter for r in real),
            opaque=sum(r.is_opaque for r in self.rows),
            flops=sum(r.flops for r in real),
            quantized_flops=sum(r.flops for r in real if r.is_quantized),
            backward_flops=2 * sum(r.flops for r in real) if trains else 0,
            quantized_backward_flops=backward(real),
            weight_bytes=sum(p.nbytes for p in self.params.values()),
            quantized_weight_bytes=sum(
                p.nbytes for k, p in self.params.items() if k in self._quantized_weights
            ),
            stored_weight_bytes=sum(p.stored for p in self.params.values()),
            emulated=sum(r.is_emulated for r in real),
            outside_bytes=sum(
                p.nbytes for k, p in self.params.items() if k not in named
            ),
        )

    @functools.cached_property
    def _quantized_weights(self) -> set[str]:
        met = [r for r in self.rows if r.fwd and r.weight]
        return {r.weight for r in met} - {r.weight for r in met if not r.is_quantized}

    @property
    def left_alone(self) -> tuple[Row, ...]:
        """Contractions, kernels and lookups that are not quantized; each has a reason."""
        return tuple(r for r in self.rows if not (r.is_quantized or r.is_adapter))

    def __str__(self) -> str:
        trains = self.totals.backward_flops > 0
        columns = {
            k: v for k, v in COLUMNS.items() if trains or k not in ("dlhs", "drhs")
        }
        lines = [list(columns)]
        for group in _groups(self.rows):
            lines.append([column(group) for column in columns.values()])
        numbers = {i for i, k in enumerate(columns) if k in ("times", "FLOP", "bytes")}
        return "\n".join(
            [
                table(lines, numbers),
                *self._kernels(),
                *self._clipped(),
                "",
                str(self.totals),
            ]
        )

    def _kernels(self) -> list[str]:
        """Says which kernels run, row by row, and why those before them refused."""
        lines = []
        for group in _groups(self.rows):
            row = group[0]
            if row.kernels:
                lines += ["", f"{_path(group)} {row.op}", *map(str, row.kernels)]
                lines += [f"  measured  {row.measured}"] if row.measured else []
        return lines

    def _clipped(self) -> list[str]:
        """Returns what static ranges cut off of the data, the most first."""
        if not self.clipped:
            return []
        worst = sorted(self.clipped.items(), key=lambda item: -item[1])
        lines = [["static range of", "clips"]]
        lines += [[name, f"{100 * part:.3g}%"] for name, part in worst]
        return ["", table(lines, {1})]

    __repr__ = __str__


def table(lines: list[list[str]], numbers: set[int]) -> str:
    """Aligns cells in columns, those of the columns in `numbers` to the right."""
    widths = [max(map(len, cells)) for cells in zip(*lines)]
    pad = lambda i, s: s.rjust(widths[i]) if i in numbers else s.ljust(widths[i])
    return "\n".join(
        "  ".join(pad(i, s) for i, s in enumerate(row)).rstrip() for row in lines
    )


def _groups(rows: tuple[Row, ...]) -> list[list[Row]]:
    """Groups rows that differ only in numbers of their path."""
    groups: dict[Any, list[Row]] = {}
    for row in rows:
        anywhere = lambda text: re.sub(r"(?<![^/])\d+(?![^/])", "*", text)
        path, weight = anywhere(row.path), anywhere(row.weight)
        key = dataclasses.replace(row, path=path, weight=weight)
        groups.setdefault(key, []).append(row)
    return list(groups.values())


def _path(rows: list[Row]) -> str:
    """Writes the paths of a group as one: 'layers/{0..3}/mlp', 'blocks/{0,2}'."""
    parts = []
    for part in zip(*(r.path.split("/") for r in rows)):
        seen = list(dict.fromkeys(part))
        if len(seen) == 1:
            parts.append(seen[0])
            continue
        numbers = sorted(map(int, seen))
        run = numbers == list(range(numbers[0], numbers[-1] + 1))
        listed = f"{numbers[0]}..{numbers[-1]}" if run else ",".join(map(str, numbers))
        parts.append(f"{{{listed}}}")
    return "/".join(parts) or "(root)"


def _shapes(rows: list[Row]) -> str:
    return " x ".join(f"[{','.join(map(str, s))}]" for s in rows[0].shapes)


def _pair(name: str):
    def text(rows: list[Row]) -> str:
        pair = getattr(rows[0], name)
        return " x ".join(pair) if pair else "-"

    return text


def _weight(rows: list[Row]) -> str:
    if not rows[0].weight:
        return ""
    name = rows[0].weight.rpartition("/")[2]
    return f"{name} {human(sum(r.weight_bytes for r in rows), 'B')}"


# The headings, and what a group of rows shows under each.
COLUMNS = {
    "path": _path,
    "op": lambda rows: rows[0].op,
    "operands": _shapes,
    "times": lambda rows: str(sum(r.times for r in rows)),
    "rule": lambda rows: "-" if rows[0].rule is None else str(rows[0].rule),
    "forward": _pair("fwd"),
    "dlhs": _pair("dlhs"),
    "drhs": _pair("drhs"),
    "runs as": lambda rows: (rows[0].runs_as or "-") + "*" * rows[0].is_emulated,
    "FLOP": lambda rows: human(sum(r.flops for r in rows), ""),
    "bytes": lambda rows: human(sum(r.bytes for r in rows), "B"),
    "weight": _weight,
    "left alone because": lambda rows: rows[0].why,
}


def share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


def _count(n: int, what: str) -> str:
    return f"{n} {what}" + ("" if n == 1 else "s")


def human(n: float, unit: str) -> str:
    for power, prefix in ((15, "P"), (12, "T"), (9, "G"), (6, "M"), (3, "k")):
        if n >= 10**power:
            digits = n / 10**power
            return f"{digits:.{max(0, 2 - int(math.log10(digits)))}f} {prefix}{unit}"
    return f"{n:g} {unit}".rstrip()
