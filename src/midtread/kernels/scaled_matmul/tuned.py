"""Block sizes of the scaled matmuls, from the entry "scaled" of <device>.json."""

import dataclasses

import jax.numpy as jnp

from midtread.kernels.scaled_matmul.hopper import ScaledBlocks
from midtread.kernels.tuned import table


def scaled_blocks(out_dtype, shape: tuple[int, int]) -> ScaledBlocks:
    """Returns the blocks of a scaled matmul whose result has this shape."""
    if min(shape) < 256:
        blocks = ScaledBlocks(64, 128, 128, split="m")
    else:
        blocks = ScaledBlocks(**table(__file__)["scaled"])
    stages = 4 if jnp.dtype(out_dtype).itemsize == 2 else 3  # shared memory is 227 kB
    pair = blocks.pair and shape[0] % (2 * blocks.cta[0]) == 0
    return dataclasses.replace(blocks, stages=stages, pair=pair)


def grouped_blocks(out_dtype, per_group: int, columns: int) -> ScaledBlocks:
    """Returns the blocks of a grouped matmul, for `per_group` rows in a group on average."""
    blocks = scaled_blocks(out_dtype, (per_group, columns))
    pair = table(__file__)["scaled"].get("pair", False) and per_group >= 1024
    return dataclasses.replace(blocks, pair=pair)
