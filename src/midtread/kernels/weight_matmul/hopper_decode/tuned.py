"""Block sizes of few rows against stored weights on Hopper.

The table, <device>.json, has two entries:

    few_rows      `blocks` is a list. The first of it is taken that is for these bits and for at
                  least so many rows, that divides the weight, and whose `format` and least
                  `group`, where it names them, are met. `cluster` is the largest cluster that
                  pays. `resident` says how many clusters of 1, 2, .. programs run at once.
    few_groups    The same for rows in groups, with what a block costs. Costs of 4 bits were
                  measured with the decoding before the present one.
"""

import dataclasses

from midtread.kernels.hopper.lanes import COLUMNS
from midtread.kernels.hopper.shared_memory import SHARED
from midtread.kernels.pallas_compat import num_cores
from midtread.kernels.tuned import has_own_table, table
from midtread.kernels.weight_matmul.hopper_decode.grouped import Cut
from midtread.kernels.weight_matmul.hopper_decode.pipeline import DecodeBlocks
from midtread.numerics.formats import Format, dtype_bits

HELD = 4096  # bytes of shared memory for the first rows and blocks of groups


def decode_blocks(
    fmt: Format, rows: int, shape: tuple[int, int], group: int | None
) -> DecodeBlocks | None:
    """The blocks for `rows` rows by a weight [K, N]; None if none divides the weight."""
    (num_k, num_n), best = shape, table(__file__)["few_rows"]
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
    """`blocks`, with as many programs as can share the sum of `chunks` blocks of each tile of
    columns. They form clusters of at most `largest`, which write the result, if these keep
    three quarters of the multiprocessors busy; otherwise as many pairs as there is room for."""
    most = max(1, min(num_cores() // tiles, chunks // 2))
    sizes = enumerate(_resident()[: min(most, largest)], 1)
    cluster = max((size for size, count in sizes if tiles <= count), default=1)
    if 4 * cluster >= 3 * most:
        return dataclasses.replace(blocks, split=cluster, cluster=cluster)
    return dataclasses.replace(blocks, split=most - most % 2, cluster=2)


def _resident() -> list[int]:
    """How many clusters of 1, 2, .. programs run at once. For a device that was not measured
    only those of 1 and 2 are counted."""
    if has_own_table(__file__):
        return table(__file__)["few_rows"]["resident"]
    return [num_cores(), num_cores() // 2]


def grouped_cuts(
    fmt: Format, rows: float, shape: tuple[int, int], group: int | None
) -> tuple[Cut, ...]:
    """The cuts for `rows` rows a group on average by weights [K, N]: one for so many rows
    and one for more. It is empty if none divides the weights."""
    cuts = []
    for entry in table(__file__)["few_groups"]:
        if entry["bits"] != dtype_bits(fmt.dtype) or entry["rows"] < rows:
            continue
        best, each = DecodeBlocks(**entry["blocks"]), entry["rows"]
        for blocks in (best, dataclasses.replace(best, wide=1, deep=1)):
            spare = blocks.exchanged(each) + HELD
            blocks = _fitted(blocks, fmt, each, shape, group, spare)
            if blocks is not None and shape[0] % (blocks.k * blocks.deep) == 0:
                cuts.append(Cut(each, entry["cost"], blocks))
                break
    return tuple(cuts[:2])


def _fitted(
    blocks: DecodeBlocks, fmt: Format, rows: int, shape, group: int | None, spare=0
) -> DecodeBlocks | None:
    """`blocks` with as many stages as fit into shared memory beside `spare` bytes; None if not
    even two do, or if the blocks do not divide the weight or its groups."""
    (num_k, num_n), least = shape, blocks.k
    fits = not group or group % least == 0 or (group >= 16 and least % group == 0)
    if num_k % blocks.k or num_n % COLUMNS or not fits:
        return None
    most = SHARED - spare
    while blocks.num_bytes(fmt, rows, group) > most and blocks.stages > 2:
        blocks = dataclasses.replace(blocks, stages=blocks.stages - 1)
    return blocks if blocks.num_bytes(fmt, rows, group) <= most else None
