"""Tuned: block sizes per device and shape, measured; a rule of thumb elsewhere.

`<device>.json` holds what `benchmarks/gpu.py` found best. A miss is no error: the rules
here were read off the same measurements.
"""

import functools
import json
import pathlib

import jax
import jax.numpy as jnp

from midtread.kernels.matmul_gpu import Blocks


def device_kind() -> str:
    """Of the device being compiled for: 'nvidia-h200'."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    kind = device.device_kind if device else jax.devices()[0].device_kind
    return kind.lower().replace(" ", "-")


@functools.cache
def table(device: str) -> dict:
    path = pathlib.Path(__file__).parent / f"{device}.json"
    return json.loads(path.read_text()) if path.exists() else {}


def scaled_blocks(dtype, out_dtype, shape: tuple[int, int, int]) -> Blocks:
    """Of the scaled matmul of [m, k] by [n, k]; `shape` is (m, n, k)."""
    m, n, _ = shape
    stages = 4 if jnp.dtype(out_dtype).itemsize == 2 else 3
    key = "scaled 8-bit" if min(m, n) >= 512 else "scaled 8-bit, few rows"
    found = table(device_kind()).get(key)
    blocks = Blocks(**found) if found else Blocks(64, 256, 128, split="m", minor=0)
    if m < 256 or n < 256:
        blocks = Blocks(64, 128, 128, split="m")
    return Blocks(**{**vars(blocks), "stages": stages})
