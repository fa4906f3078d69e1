"""Which format runs how, on which device: docs/matrix.md, made from the tables that choose.

python benchmarks/matrix.py [--write]
"""

import argparse
import pathlib

import jax.numpy as jnp

from midtread.kernels.decode_attention.triton import FORMATS as CACHE_KERNELS
from midtread.kernels.scaled_matmul import FLOAT8
from midtread.kernels.weight_matmul import HOPPER, TRITON
from midtread.lm.cache import FORMATS as CACHE_FORMATS
from midtread.numerics.formats import FORMATS, Format, dtype_bits

PAGE = pathlib.Path(__file__).parents[1] / "docs" / "matrix.md"
HEAD = """# What runs how

Made by `python benchmarks/matrix.py --write`; a test keeps it current.

**kernel**: ours ([how](how-a-quantized-matmul-runs.md)). **XLA**: a matmul in this format,
by XLA. **wider**: XLA multiplies in the type named, which holds every code exactly; fewer
bits are stored, none are saved in arithmetic. Weight-only means 16-bit activations, up to 64
rows; more rows have a kernel on Hopper, in bfloat16, for what is called "kernel" here, zero points
of groups included. **not yet timed**: a Triton kernel whose numbers are right on an H200, and whose
time is not yet measured; other zero points take one too. Experts are `ragged_dot` with both
operands in the format, 64 rows a group or more; a KV cache is that of `midtread generate`,
one token at a time.

| format | bits | weight-only: NVIDIA | weight-only: elsewhere | both operands, more rows: Hopper | both operands: elsewhere | experts: Hopper | KV cache: NVIDIA |
|---|---|---|---|---|---|---|---|
"""


def _weight_only(fmt: Format) -> str:
    if fmt.name in HOPPER:
        return "kernel"
    if fmt.name in TRITON:
        return "kernel, not yet timed"
    return "decoded to the activations' type"


def _elsewhere(fmt: Format) -> str:
    return "decoded, on a CPU in blocks"


def _both(fmt: Format, hopper: bool) -> str:
    if fmt.table is not None:
        return "decoded first"
    name = fmt.dtype.name
    if hopper and (name == "int8" or name in FLOAT8) and fmt.tile is None:
        blocks = "; 128-tiles too" if name in FLOAT8 else ""
        return f"kernel{blocks}"
    if name == "int16":
        return "wider: float32"
    if jnp.issubdtype(fmt.dtype, jnp.integer):
        wide = "int32" if name == "uint8" else "int8"
        return "XLA" if name == "int8" else f"wider: {wide}"
    return "XLA" if dtype_bits(fmt.dtype) == 8 else "wider: float8_e4m3fn"


def _experts(fmt: Format) -> str:
    """As for plain matmuls of codes, but with scales on kept axes alone."""
    return _both(fmt, hopper=True).split(";")[0]


def _cache(fmt: Format) -> str:
    if fmt.name not in CACHE_FORMATS.values():
        return "not offered"
    if fmt.name not in CACHE_KERNELS:
        return "XLA"
    return "kernel" if dtype_bits(fmt.dtype) == 8 else "kernel, not yet timed"


def page() -> str:
    rows = [
        f"| {f.name} | {f.bits} | {_weight_only(f)} | {_elsewhere(f)} | "
        f"{_both(f, hopper=True)} | {_both(f, hopper=False)} | {_experts(f)} | {_cache(f)} |"
        for f in FORMATS.values()
    ]
    return HEAD + "\n".join(rows) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true")
    if parser.parse_args().write:
        PAGE.write_text(page())
    else:
        print(page())


if __name__ == "__main__":
    main()
