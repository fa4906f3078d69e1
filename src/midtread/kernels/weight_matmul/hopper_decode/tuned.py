"""Block sizes of few rows against stored weights on Hopper. The table's entries:

stream     the first entry with these bits and at least so many rows that divides the
           weight, perhaps of one format alone or for groups of so many or more, with the
           largest cluster that is worth it; and how many clusters of 1, 2 .. programs
           run at once
groups     the same for each expert: entries with these bits and at least so many rows, and
           what a block of them costs, of 4 bits as they were decoded before
"""

import dataclasses

from midtread.kernels.hopper.lanes import COLUMNS
from midtread.kernels.hopper.shared_memory import SHARED
from midtread.kernels.pallas_compat import num_cores
from midtread.kernels.tuned import has_own_table, table
from midtread.kernels.weight_matmul.hopper_decode.grouped import Choice
from midtread.kernels.weight_matmul.hopper_decode.pipeline import DecodeBlocks
from midtread.numerics.formats import Format, dtype_bits

HELD = 4096  # bytes of shared memory for the first rows and blocks of groups


def decode_blocks(
    fmt: Format, rows: int, shape: tuple[int, int], group: int | None
) -> DecodeBlocks | None:
    """Of `rows` rows by a weight [K, N] on Hopper; None if it does not divide."""
    (num_k, num_n), best = shape, table(__file__)["stream"]
    for entry in best["blocks"]:
        blocks = DecodeBlocks(**entry["blocks"])
        if entry["bits"] != dtype_bits(fmt.dtype) or rows > entry["rows"]:
            continue
        if entry.get("format", fmt.name) != fmt.name:
            continue
        if (group or num_k) < entry.get("group", 0):
            continue
        if num_k % blocks.k or num_n % COLUMNS:
            continue
        count = num_k // blocks.k, num_n // COLUMNS
        blocks = _shared(blocks, *count, entry["cluster"])
        spare = blocks.received(rows)
        blocks = _fitted(blocks, fmt, rows, shape, group, spare)
        if blocks is not None and blocks.is_ample(fmt, rows):
            return blocks
    return None


def _shared(
    blocks: DecodeBlocks, chunks: int, tiles: int, largest: int
) -> DecodeBlocks:
    """With programs to share the sum of `chunks` blocks: clusters of `largest` at most, which
    write the result, if three quarters as many run at once as there are multiprocessors; or
    else pairs, as many as there is room for."""
    most = max(1, min(num_cores() // tiles, chunks // 2))
    sizes = enumerate(_resident()[: min(most, largest)], 1)
    cluster = max((size for size, count in sizes if tiles <= count), default=1)
    if 4 * cluster >= 3 * most:
        return dataclasses.replace(blocks, split=cluster, cluster=cluster)
    return dataclasses.replace(blocks, split=most - most % 2, cluster=2)


def _resident() -> list[int]:
    """How many clusters of 1, 2 .. programs run at once: known where it was asked for."""
    if has_own_table(__file__):
        return table(__file__)["stream"]["resident"]
    return [num_cores(), num_cores() // 2]


def grouped_choices(
    fmt: Format, rows: float, shape: tuple[int, int], group: int | None
) -> tuple[Choice, ...]:
    """Of `rows` rows a group on average by weights [K, N] on Hopper: blocks for so many rows
    and for more; none if they do not divide."""
    choices = []
    for entry in table(__file__)["groups"]:
        if entry["bits"] != dtype_bits(fmt.dtype) or entry["rows"] < rows:
            continue
        best, each = DecodeBlocks(**entry["blocks"]), entry["rows"]
        for blocks in (best, dataclasses.replace(best, wide=1, deep=1)):
            spare = blocks.exchanged(each) + HELD
            blocks = _fitted(blocks, fmt, each, shape, group, spare)
            if blocks is not None and shape[0] % (blocks.k * blocks.deep) == 0:
                choices.append(Choice(each, entry["cost"], blocks))
                break
    return tuple(choices[:2])


def _fitted(
    blocks: DecodeBlocks, fmt: Format, rows: int, shape, group: int | None, spare=0
) -> DecodeBlocks | None:
    """`blocks` with as many stages as there is memory for, beside `spare` bytes."""
    (num_k, num_n), least = shape, blocks.k
    fits = not group or group % least == 0 or (group >= 32 and least % group == 0)
    if num_k % blocks.k or num_n % COLUMNS or not fits:
        return None
    most = SHARED - spare
    while blocks.num_bytes(fmt, rows, group) > most and blocks.stages > 2:
        blocks = dataclasses.replace(blocks, stages=blocks.stages - 1)
    return blocks if blocks.num_bytes(fmt, rows, group) <= most else None
