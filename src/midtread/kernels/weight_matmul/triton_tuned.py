"""Block sizes of Triton's kernels for stored weights.

The table, <device>.json, has two entries:

    weights    Few rows against a stored weight. The first entry is taken that is for these
               bits, for at least so many rows, and for at least so many bytes ("columns") in a
               row of the weight.
    experts    A few rows for each expert, by bits.

A shape that a block does not divide gets a smaller block (`fit`).
"""

import dataclasses

from midtread.kernels.tuned import table
from midtread.kernels.weight_matmul.triton import TritonBlocks
from midtread.kernels.weight_matmul.triton_grouped import ExpertBlocks
from midtread.numerics.formats import Format, dtype_bits


def weight_blocks(
    fmt: Format, rows: int, shape: tuple[int, int], group: int | None
) -> TritonBlocks | None:
    """Returns the blocks for `rows` rows by a weight of `shape` bytes; None if none fits."""
    bits = dtype_bits(fmt.dtype)
    for entry in table(__file__)["weights"]:
        matches = entry["bits"] == bits and entry["columns"] <= shape[1]
        if matches and rows <= entry["rows"]:
            blocks = fit(TritonBlocks(**entry["blocks"]), shape, group)
            if blocks is not None:
                return blocks
    return None


def expert_blocks(
    fmt: Format, rows: float, shape: tuple[int, int], tile: int
) -> ExpertBlocks | None:
    """The blocks for `rows` rows a group by weights of `shape` words; None if none fits."""
    (num_k, num_b), best = shape, table(__file__)["experts"]
    blocks = ExpertBlocks(**best[str(dtype_bits(fmt.dtype))])
    n, k, split = blocks.n, min(blocks.k, tile), blocks.split
    while num_b % n and n > 16:
        n //= 2
    while num_k % (split * k) and split > 1:
        split //= 2
    m = 16 if rows <= 16 else 32 if rows <= 32 else 64
    if num_b % n or num_k % (split * k) or tile % k or k < 16 or k & (k - 1):
        return None
    return dataclasses.replace(blocks, m=m, n=n, k=k, split=split)


def fit(
    blocks: TritonBlocks, shape: tuple[int, int], group: int | None
) -> TritonBlocks | None:
    """`blocks`, smaller where they do not divide the weight or its groups; None if none does."""
    num_k, num_b = shape
    k, loads, split, n = blocks.k, blocks.loads, blocks.split, blocks.n
    while num_b % n and n > 32:
        n //= 2
    if blocks.multiply == "dot":
        if group and group < k:  # as many codes at once, in more loads
            k, loads = group, loads * (k // group)
    elif group and (k * loads) % group:
        return None
    while num_k % (k * loads) and loads > 1 and blocks.multiply == "dot":
        loads //= 2
    unit = max(k * loads, group or 1)
    while num_k % (split * unit) and split > 1:
        split //= 2
    if num_b % n or num_k % (split * unit) or (group or k) % k:
        return None
    if k & (k - 1) or k < (16 if blocks.multiply == "dot" else 1):
        return None
    return dataclasses.replace(blocks, n=n, k=k, loads=loads, split=split)
