"""Block sizes of many rows against a stored weight on Hopper.

The table, <device>.json, says under "cost", by the bits of the rows, how many ns a block takes. How
many rows a block has and how many programs share a sum follow from that. The numbers were fitted
with the decoding of integers before the present one; those of codes are half of them.
"""

import dataclasses

from midtread.kernels.pallas_compat import num_cores
from midtread.kernels.tuned import table
from midtread.kernels.weight_matmul.hopper_prefill.pipeline import (
    COLUMNS as MIXED_COLUMNS,
)
from midtread.kernels.weight_matmul.hopper_prefill.pipeline import (
    PrefillBlocks,
    inner,
    step,
)
from midtread.numerics.formats import Format, dtype_bits


def prefill_blocks(
    fmt: Format, rows: int, shape: tuple[int, int], group: int | None, dtypes
) -> PrefillBlocks | None:
    """Returns the blocks for `rows` rows by a weight [K, N]; None if none divides the weight.

    Args:
        dtypes: of the rows, bfloat16 or that of codes, and of the result.
    """
    num_k, num_n = shape
    piece, whole = inner(dtypes[0]), step(dtypes[0])
    if num_k % whole or num_n % MIXED_COLUMNS:
        return None
    if group and group % piece and group not in (16, 32):
        return None
    cost = table(__file__)["cost"][str(dtype_bits(dtypes[0]))]
    most = min(256, -(-rows // 32) * 32)
    candidates = [
        prefill_time(PrefillBlocks(rows=each, split=split), rows, shape, cost)
        for each in range(min(64, most), most + 1, 32)
        for split in range(1, 9)
        if num_k % (whole * split) == 0
    ]
    _, blocks = min(candidates, key=lambda pair: pair[0])
    is_deep = blocks.rows <= 128 and (
        not group or group % whole == 0 or whole % group == 0
    )
    blocks = dataclasses.replace(blocks, k=whole if is_deep else piece)
    return dataclasses.replace(blocks, stages=blocks.most_stages(fmt, group, dtypes))


def prefill_time(
    blocks: PrefillBlocks, rows: int, shape: tuple[int, int], cost: dict[str, float]
) -> tuple[float, PrefillBlocks]:
    """Returns (about how many ns a matmul takes, `blocks` with `pair` and `halves` chosen)."""
    num_k, num_n = shape
    each = lambda rows: (
        cost["block"] + cost["row"] * rows
    )  # ns for each row of the weight
    pairs = num_n // MIXED_COLUMNS * -(-rows // blocks.rows) * blocks.split
    is_paired = num_n % (2 * MIXED_COLUMNS) == 0 and pairs >= cost["pair"] * num_cores()
    blocks = dataclasses.replace(blocks, pair=is_paired)
    count, programs = pairs // (2 if is_paired else 1), blocks.programs()
    rounds, last = divmod(count, programs)
    halves = rounds > 0 and 0 < 2 * last <= programs and blocks.rows % 64 == 0
    time = rounds * each(blocks.rows)
    time += each(blocks.rows // 2) if halves else each(blocks.rows) if last else 0
    parts = 0 if blocks.split == 1 else blocks.split * rows * num_n * 4 * 2
    time = time * num_k / blocks.split + parts / cost["bandwidth"]
    return time, dataclasses.replace(blocks, halves=halves)
