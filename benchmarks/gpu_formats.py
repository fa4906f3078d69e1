"""Formats whose kernels were written without a GPU: right on the device, and how fast.

    values   each kernel for few rows against float64: formats x groups x rows x extents; experts;
             attention over int4 and int8 caches
    times    a gated MLP stack (benchmarks/gpu_serving.py), us a layer beside bfloat16's

python benchmarks/gpu_formats.py [values] [times] [--quick]
"""

import argparse
import itertools

import jax
import jax.numpy as jnp
import numpy as np
from gpu_serving import HEAD, Stack, serve
from gpu_timing import attempt

import midtread as mt
from midtread.kernels import choose
from midtread.kernels.decode_attention import Cached

MINMAX = {"calibration_method": "minmax"}  # with zero points
GROUPS = (32, 64, 128)
WEIGHTS = [
    *((name, group, MINMAX) for name in ("uint4", "int4", "uint2", "uint8") for group in GROUPS),
    *((name, group, {}) for name in ("int2", "int3", "int6", "int1", "nf4") for group in GROUPS),
    ("uint4", None, MINMAX),
    ("int2", None, {}),
    ("mxfp4", 32, {}),
    ("mxfp4", 32, {"scale_dtype": "e8m0"}),
    ("nvfp4", 16, {}),
    ("nvfp4", 16, {"scale_dtype": "e4m3"}),
    ("mxfp8", 32, {}),
    *((name, group, {"wide": True}) for name, group in (("mxfp4", 32), ("nvfp4", 16), ("int4", 16), ("int2", 64))),
    ("uint4", 64, {**MINMAX, "wide": True}),
    ("int4", 16, {}),
]  # "wide": scales in float32  # fmt: skip
ROWS = (1, 3, 16, 17, 64, 65, 512)
# By Hopper's kernels, by Triton's, by XLA.
EXTENTS = ((4096, 14336), (512, 1024), (384, 192), (256, 130))
ROUNDING = 2e-3  # a result in float32: nf4's table is rounded to bfloat16

TIMED = ("mxfp4", "nvfp4", "uint4-zero-g64", "int2-g64", "w8a8", "fp8")


def random(seed, *shape, dtype=jnp.bfloat16):
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def exact(x) -> np.ndarray:
    return np.asarray(x.astype(jnp.float32)).astype(np.float64)


def error(got, want) -> float:
    return float(np.linalg.norm(exact(got) - want) / np.linalg.norm(want))


def weights(extents, share: slice) -> list[str]:
    """A line for each weight that is wrong or does not run; the last one counts them all."""
    wrong, count = [], 0
    for (name, group, how), shape in itertools.product(WEIGHTS[share], extents):
        tiles = {0: group} if group else {}
        how, dtype = dict(how), jnp.float32 if "wide" in how else jnp.bfloat16
        how.pop("wide", None)
        w = mt.quantize(random(1, *shape, dtype=dtype), name, channelwise_axes=[1], tiled_axes=tiles, **how)  # fmt: skip
        values = exact(mt.dequantize(w, jnp.float32))
        for rows in ROWS:
            x = random(2, rows, shape[0])
            run = jax.jit(lambda x, w: mt.dot(x, w, preferred_element_type=jnp.float32))
            off = attempt(lambda: error(run(x, w), exact(x) @ values))  # noqa: B023
            count += 1
            if isinstance(off, str) or not off < ROUNDING:
                wrong.append(f"WRONG {name} {group} {how} {shape} {rows} rows: {off}")
    return [*wrong, f"{count} weights, {len(wrong)} wrong"]


def experts() -> list[str]:
    lines, sizes = [], np.array([17, 0, 20, 1])
    for name, tile, how in [("uint4", 64, MINMAX), ("mxfp4", 32, {}), ("int2", 64, {}), ("uint8", None, MINMAX)]:  # fmt: skip
        tiles = {1: tile} if tile else {}
        w = mt.quantize(random(1, 4, 512, 1024), name, channelwise_axes=[0, 2], tiled_axes=tiles, **how)  # fmt: skip
        x, values = random(2, 40, 512), exact(mt.dequantize(w, jnp.float32))
        want = np.zeros((40, 1024))
        for group, (start, size) in enumerate(zip(np.cumsum(sizes) - sizes, sizes)):
            want[start : start + size] = exact(x[start : start + size]) @ values[group]
        off = attempt(lambda: error(jax.jit(mt.ragged_dot)(x, w, jnp.asarray(sizes)), want))  # noqa: B023  # fmt: skip
        lines.append(f"experts {name} {tile}: {off}")
    return lines


def caches() -> list[str]:
    """Attention of one token over a cache, against the same in float64."""
    lines = []
    for name, axes in [("int8", (0, 1, 2)), ("int4", (0, 1, 2)), ("int4", (0, 1))]:
        k, v = (mt.quantize(random(i, 3, 1000, 8, 128, dtype=jnp.float32), name, channelwise_axes=axes) for i in (1, 2))  # fmt: skip
        q, lengths = random(3, 3, 1, 32, 128), jnp.array([1000, 70, 513])
        keys, values = (exact(mt.dequantize(x, jnp.float32)) for x in (k, v))
        logits = np.einsum("bkgh,bskh->bkgs", exact(q).reshape(3, 8, 4, 128), keys)
        logits = logits / np.sqrt(128)
        outside = np.arange(1000) >= np.asarray(lengths)[:, None]
        logits[np.broadcast_to(outside[:, None, None], logits.shape)] = -np.inf
        p = np.exp(logits - logits.max(-1, keepdims=True))
        want = np.einsum("bkgs,bskh->bkgh", p / p.sum(-1, keepdims=True), values)
        run = jax.jit(lambda q, k, v, n: choose.attend(Cached(q, k, v, 0 * n, n)))
        off = attempt(lambda: error(run(q, k, v, lengths), want.reshape(3, 1, 32, 128)))  # noqa: B023  # fmt: skip
        lines.append(f"cache {name} {axes}: {off}")
    return lines


def times(rows, formats) -> list[str]:
    return [*HEAD, *serve(tuple(rows), formats, Stack(gated=True))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", choices=["values", "times"])
    parser.add_argument("--quick", action="store_true", help="small extents alone")
    parser.add_argument("--share", default="0/1", help="of the weights, as 3/8")
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 16, 64, 512])
    parser.add_argument("--formats", nargs="*", default=TIMED)
    args = parser.parse_args()
    share = slice(*map(int, args.share.split("/")))
    share = slice(share.start, None, share.stop)
    parts = args.parts or ["values", "times"]
    if "values" in parts:
        extents = EXTENTS[1:3] if args.quick else EXTENTS
        others = (experts, caches) if share.start == 0 else ()
        for part in (*others, lambda: weights(extents, share)):
            print("\n".join(part()), flush=True)
    if "times" in parts:
        print("\n".join(times(args.rows, args.formats)), flush=True)


if __name__ == "__main__":
    main()
