"""Measured: how fast a weight is served in each format, with float rows or quantized ones.

Few rows are bound by the bytes of the weight, and quantizing them first costs a launch for
nothing; many rows are bound by multiplying, which is twice as fast in 8 bits. Where one turns
into the other depends on the device, so it is a table of measurements: time of bfloat16 over
time of the format, by the rows of the matmul. `mt.explain(..., kernels=True)` reads it; the
choice between the two stays the user's, since they give other numbers. `mt.allocate(...,
milliseconds=)` reads it too.

Adding a device is adding a row to MEASURED, from `benchmarks/gpu.py decode` and `sweep`.
"""

import math
from typing import NamedTuple

FLOAT = "float"  # rows that are not quantized


class Measured(NamedTuple):
    """What was timed on one device."""

    device: str
    date: str
    what: str
    rows: tuple[int, ...]
    # (weight, rows' format) -> how many times faster than bfloat16, by the rows
    speeds: dict[tuple[str, str], tuple[float, ...]]

    def nearest(self, rows: int) -> tuple[int, dict[tuple[str, str], float]]:
        """Returns the nearest number of rows that was timed, and the speeds with so many."""
        timed = min(self.rows, key=lambda n: abs(math.log(n / rows)))
        index = self.rows.index(timed)
        return timed, {k: x[index] for k, x in self.speeds.items() if index < len(x)}


MEASURED = (
    Measured(
        "NVIDIA H200", "2026-11-16", "an MLP of Llama-3-8B",
        #                    1    16    64   128   256   512  1024  2048  4096  8192 rows
        (                    1,   16,   64,  128,  256,  512, 1024, 2048, 4096, 8192),
        {
            ("int8", FLOAT):  (1.69, 1.61, 1.54, 1.29, 0.99, 0.92, 0.99, 0.98, 0.99, 1.00),
            ("int8", "int8"): (1.43, 1.33, 1.33, 1.25, 1.28, 1.40, 1.51, 1.54, 1.57, 1.75),
            ("e4m3", FLOAT):  (1.70, 1.59, 1.51),
            ("e4m3", "e4m3"): (1.34, 1.26, 1.25, 1.33, 1.29, 1.39, 1.55, 1.49, 1.71, 1.72),
            ("int4", FLOAT):  (2.53, 2.18, 1.84, 1.30, 1.05, 0.94, 1.00, 0.98, 1.02, 1.01),
            ("int4", "int8"): (2.32, 2.04, 1.72),
            ("nf4", FLOAT):   (2.05, 1.75, 1.49),
        },
    ),
)  # fmt: skip


# Bytes per second of a device's memory, by its data sheet.
BANDWIDTHS = {"NVIDIA H200": 4.8e12, "NVIDIA H100": 3.35e12}


def _known(device: str) -> Measured | None:
    return next((m for m in MEASURED if device.startswith(m.device)), None)


def milliseconds(device: str, weight: str, size: int, rows: int = 1) -> float:
    """How long a step of decoding takes for a weight, by what was measured: the time that it
    takes to read as bfloat16, over how many times faster the format was.

    >>> round(milliseconds("NVIDIA H200", "int4", 4096 * 14336), 4)
    0.0097

    Args:
        device: its kind, as JAX has it.
        weight: its format, by its short name; "bfloat16" too.
        size: how many elements it has.
        rows: of the matmul, all in float; the nearest number that was timed counts.

    Raises:
        ValueError: nothing was measured for the device, or for the format on it.
    """
    known = _known(device)
    if known is None:
        raise ValueError(
            f"nothing was measured on {device}, only on "
            f"{', '.join(m.device for m in MEASURED)}: give one of them as device=..., or a "
            "budget in bytes."
        )
    timed, speeds = known.nearest(rows)
    speeds = {name: x for (name, act), x in speeds.items() if act == FLOAT}
    speeds["bfloat16"] = 1.0
    if weight not in speeds:
        raise ValueError(
            f"no times of {weight} weights were measured on {known.device} with {timed} rows, "
            f"only of {', '.join(sorted(speeds))}: leave it out, or give a budget in bytes."
        )
    seconds = 2 * size / BANDWIDTHS[known.device] / speeds[weight]
    return 1000 * seconds


def compare(device: str, weight: str, act: str, rows: int) -> str:
    """Says whether rows in float or quantized ones would be faster, and what was measured.

    >>> compare("NVIDIA H200", "int8", "int8", 16)
    'faster with float rows: 1.61x of bfloat16, as it is 1.33x (16 rows of an MLP of \
Llama-3-8B, NVIDIA H200, 2026-11-16)'
    >>> compare("NVIDIA L4", "int8", "int8", 16)
    'nothing on NVIDIA L4'

    Args:
        device: its kind, as JAX has it.
        weight: the format of the weight, by its short name.
        act: that of the rows, or FLOAT.
        rows: of the matmul; the nearest number that was timed counts.

    Returns:
        A clause for `explain`.
    """
    known = _known(device)
    if known is None:
        return f"nothing on {device}"
    timed, speeds = known.nearest(rows)
    speeds = {of_rows: x for (name, of_rows), x in speeds.items() if name == weight}
    if act not in speeds or rows > 2 * known.rows[-1]:
        what = f"{weight} weights and {rows:,} {act} rows"
        return f"nothing for {what} on {known.device}"
    best = max(speeds, key=speeds.__getitem__)
    of_best = "as it is" if best == act else f"with {best} rows"
    others = [
        f"{'as it is' if other == act else f'with {other} rows'} {x:.2f}x"
        for other, x in speeds.items()
        if other != best
    ]
    said = ", ".join([f"{speeds[best]:.2f}x of bfloat16", *others])
    about = f"{timed:,} row{'s' * (timed > 1)} of {known.what}, {known.device}, {known.date}"
    return f"{'faster ' if others else ''}{of_best}: {said} ({about})"
