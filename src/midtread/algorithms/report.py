"""Report: what calibration did to every weight, and what it was worth."""

import dataclasses

from midtread.model.coverage import table


@dataclasses.dataclass(frozen=True)
class Row:
    """One weight. Costs are squared errors of its layer's output, relative to the output."""

    name: str
    op: str
    format: str
    tokens: int
    cost: float
    rounded: float  # of rounding to nearest
    note: str = ""
    outliers: float | None = None  # the largest input over what 99.9% lie below


@dataclasses.dataclass(frozen=True)
class Report:
    """All weights in the order in which the model uses them; `print` it."""

    rows: tuple[Row, ...]
    algorithms: tuple[str, ...]
    inputs: str  # whose inputs the layers saw: "quantized" or "float"
    weighed: str
    seconds: float
    # of the outputs from the float model's, before and after "learn"
    distances: tuple[float, float] | None = None
    turns: str = ""  # what was rotated
    factors: str = ""  # where factors of inputs went
    unseen: tuple[str, ...] = ()  # weights in codes that meet no contraction

    @property
    def worst(self) -> tuple[Row, ...]:
        """Rows by what is left of their error, the largest first."""
        return tuple(sorted(self.rows, key=lambda row: -row.cost))

    def __str__(self) -> str:
        counted = any(row.outliers is not None for row in self.rows)
        head = ["weight", "format", "tokens", "error", "if rounded"]
        lines = [[*head, *["outliers"][:counted], "note"]]
        for row in self.rows:
            numbers = [f"{row.tokens:,}", f"{row.cost:.3g}", f"{row.rounded:.3g}"]
            if counted:
                numbers.append("" if row.outliers is None else f"{row.outliers:.3g}x")
            lines.append([row.name, row.format, *numbers, row.note])
        total = sum(r.cost for r in self.rows) / max(
            sum(r.rounded for r in self.rows), 1e-30
        )
        last = (
            f"{len(self.rows)} weights by {' + '.join(self.algorithms)}, inputs of "
            f"{self.inputs} layers, {self.weighed}: {100 * total:.0f}% of the error of "
            f"rounding, in {self.seconds:.0f} s"
        )
        learned = ()
        for more in (self.turns, self.factors):
            last += f"; {more}" if more else ""
        if self.distances is not None:
            before, after = self.distances
            learned = (
                f"learning took the outputs' distance from {before:.3g} to {after:.3g}",
            )
        if self.unseen:
            last += f"; rounded to nearest, since they meet no contraction: {', '.join(self.unseen)}"
        return "\n".join(
            [table(lines, {2, 3, 4, 5} if counted else {2, 3, 4}), "", last, *learned]
        )
