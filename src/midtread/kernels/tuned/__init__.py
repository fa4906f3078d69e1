"""Tuned: block sizes per device and shape class, measured; another device takes the H200's.

`<device>.json` holds what the sweeps behind docs/log.md found best:

    scaled     8-bit matmuls of many rows
    weights    few rows against a stored weight: the first entry with these bits, at least
               so many rows and at most so many bytes ("columns") in a row of the weight
    stream     the same on Hopper: the first entry with these bits and at least so many rows
               that divides the weight, perhaps of one format alone or for groups of so many
               or more, with the largest cluster that is worth it; and how many clusters of 1,
               2 .. programs run at once
    groups     the same for each expert: entries with these bits and at least so many rows, and
               what a block of them costs, of 4 bits as they were decoded before
    mixed      many rows against a stored weight on Hopper, by the bits of rows: what a
               block costs, from which its rows and the number of programs that share a sum
               follow, fitted before integers were decoded as they are; for codes half of it
    experts    a few rows for each expert, by bits

A shape that a block does not divide gets a smaller one (`fit`).
"""

import dataclasses
import functools
import json
import pathlib

import jax
import jax.numpy as jnp

from midtread.kernels.decode_gpu import Blocks as WeightBlocks
from midtread.kernels.grouped_decode import Blocks as ExpertBlocks
from midtread.kernels.lanes_gpu import COLUMNS
from midtread.kernels.matmul_gpu import Blocks
from midtread.kernels.mixed_sums_gpu import COLUMNS as MIXED_COLUMNS
from midtread.kernels.mixed_sums_gpu import SHARED, inner, step
from midtread.kernels.mixed_sums_gpu import Blocks as MixedBlocks
from midtread.kernels.pallas_compat import num_cores
from midtread.kernels.stream_groups_gpu import Choice
from midtread.kernels.stream_sums_gpu import Blocks as StreamBlocks
from midtread.numerics.formats import Format, dtype_bits

HERE = pathlib.Path(__file__).parent
DEFAULT = "nvidia-h200"
HELD = 4096  # bytes of shared memory for the first rows and blocks of groups


def device_kind() -> str:
    """Of the device being compiled for: 'nvidia-h200'."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    kind = device.device_kind if device else jax.devices()[0].device_kind
    return kind.lower().replace(" ", "-")


@functools.cache
def table(device: str) -> dict:
    path = HERE / f"{device}.json"
    return json.loads((path if path.exists() else HERE / f"{DEFAULT}.json").read_text())


def scaled_blocks(out_dtype, shape: tuple[int, int]) -> Blocks:
    """Of the scaled matmul with a result of `shape`."""
    if min(shape) < 256:
        blocks = Blocks(64, 128, 128, split="m")
    else:
        blocks = Blocks(**table(device_kind())["scaled"])
    stages = 4 if jnp.dtype(out_dtype).itemsize == 2 else 3  # shared memory is 227 kB
    pair = blocks.pair and shape[0] % (2 * blocks.cta[0]) == 0
    return dataclasses.replace(blocks, stages=stages, pair=pair)


def grouped_blocks(out_dtype, per_group: int, columns: int) -> Blocks:
    """Of the grouped matmul, for so many rows in a group on average."""
    blocks = scaled_blocks(out_dtype, (per_group, columns))
    pair = table(device_kind())["scaled"].get("pair", False) and per_group >= 1024
    return dataclasses.replace(blocks, pair=pair)


def weight_blocks(
    fmt: Format, rows: int, shape: tuple[int, int], group: int | None
) -> WeightBlocks | None:
    """Of `rows` rows by a weight of `shape` bytes; None if nothing fits."""
    bits = dtype_bits(fmt.dtype)
    for entry in table(device_kind())["weights"]:
        matches = entry["bits"] == bits and entry["columns"] <= shape[1]
        if matches and rows <= entry["rows"]:
            blocks = fit(WeightBlocks(**entry["blocks"]), shape, group)
            if blocks is not None:
                return blocks
    return None


def stream_blocks(
    fmt: Format, rows: int, shape: tuple[int, int], group: int | None
) -> StreamBlocks | None:
    """Of `rows` rows by a weight [K, N] on Hopper; None if it does not divide."""
    (num_k, num_n), best = shape, table(device_kind())["stream"]
    for entry in best["blocks"]:
        blocks = StreamBlocks(**entry["blocks"])
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
        blocks = _stream_fit(blocks, fmt, rows, shape, group, spare)
        if blocks is not None and blocks.is_ample(fmt, rows):
            return blocks
    return None


def _shared(
    blocks: StreamBlocks, chunks: int, tiles: int, largest: int
) -> StreamBlocks:
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
    if (HERE / f"{device_kind()}.json").exists():
        return table(device_kind())["stream"]["resident"]
    return [num_cores(), num_cores() // 2]


def stream_choices(
    fmt: Format, rows: float, shape: tuple[int, int], group: int | None
) -> tuple[Choice, ...]:
    """Of `rows` rows a group on average by weights [K, N] on Hopper: blocks for so many rows
    and for more; none if they do not divide."""
    found = []
    for entry in table(device_kind())["groups"]:
        if entry["bits"] != dtype_bits(fmt.dtype) or entry["rows"] < rows:
            continue
        best, each = StreamBlocks(**entry["blocks"]), entry["rows"]
        for blocks in (best, dataclasses.replace(best, wide=1, deep=1)):
            spare = blocks.exchanged(each) + HELD
            blocks = _stream_fit(blocks, fmt, each, shape, group, spare)
            if blocks is not None and shape[0] % (blocks.k * blocks.deep) == 0:
                found.append(Choice(each, entry["cost"], blocks))
                break
    return tuple(found[:2])


def _stream_fit(
    blocks: StreamBlocks, fmt: Format, rows: int, shape, group: int | None, spare=0
) -> StreamBlocks | None:
    """`blocks` with as many stages as there is memory for, beside `spare` bytes."""
    (num_k, num_n), least = shape, blocks.k
    fits = not group or group % least == 0 or (group >= 32 and least % group == 0)
    if num_k % blocks.k or num_n % COLUMNS or not fits:
        return None
    most = SHARED - spare
    while blocks.num_bytes(fmt, rows, group) > most and blocks.stages > 2:
        blocks = dataclasses.replace(blocks, stages=blocks.stages - 1)
    return blocks if blocks.num_bytes(fmt, rows, group) <= most else None


def mixed_blocks(
    fmt: Format, rows: int, shape: tuple[int, int], group: int | None, dtypes
) -> MixedBlocks | None:
    """Of many rows by a weight [K, N] on Hopper; None if it does not divide.

    Args:
        dtypes: of the rows, bfloat16 or that of codes, and of the result.
    """
    num_k, num_n = shape
    piece, whole = inner(dtypes[0]), step(dtypes[0])
    if num_k % whole or num_n % MIXED_COLUMNS:
        return None
    if group and group % piece and group != 32:
        return None
    cost = table(device_kind())["mixed"][str(dtype_bits(dtypes[0]))]
    most = min(256, -(-rows // 32) * 32)
    found = [
        mixed_time(MixedBlocks(rows=each, split=split), rows, shape, cost)
        for each in range(min(64, most), most + 1, 32)
        for split in range(1, 9)
        if num_k % (whole * split) == 0
    ]
    _, blocks = min(found, key=lambda pair: pair[0])
    is_deep = blocks.rows <= 128 and (
        not group or group % whole == 0 or whole % group == 0
    )
    blocks = dataclasses.replace(blocks, k=whole if is_deep else piece)
    return dataclasses.replace(blocks, stages=blocks.most_stages(fmt, group, dtypes))


def mixed_time(
    blocks: MixedBlocks, rows: int, shape: tuple[int, int], cost: dict[str, float]
) -> tuple[float, MixedBlocks]:
    """About how many ns it takes, and the blocks with the last round as it should be."""
    num_k, num_n = shape
    each = lambda rows: cost["block"] + cost["row"] * rows  # ns, for each of k
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


def expert_blocks(
    fmt: Format, rows: float, shape: tuple[int, int], tile: int
) -> ExpertBlocks | None:
    """Of a few rows a group by weights of `shape` words; None if nothing fits."""
    (num_k, num_b), best = shape, table(device_kind())["experts"]
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
    blocks: WeightBlocks, shape: tuple[int, int], group: int | None
) -> WeightBlocks | None:
    """`blocks`, made smaller where they do not divide the weight or its groups."""
    num_k, num_b = shape
    k, loads, split, n = blocks.k, blocks.loads, blocks.split, blocks.n
    while num_b % n and n > 32:
        n //= 2
    if blocks.how == "dot":
        k = min(k, group or k)
    elif group and (k * loads) % group:
        return None
    unit = max(k * loads, group or 1)
    while num_k % (split * unit) and split > 1:
        split //= 2
    if num_b % n or num_k % (split * unit) or k < (16 if blocks.how == "dot" else 1):
        return None
    return dataclasses.replace(blocks, n=n, k=k, split=split)
