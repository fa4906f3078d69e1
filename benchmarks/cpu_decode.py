"""Decoding on a CPU: what a quantized weight costs at 1 to 8 rows, against float32.

Prints time / time of float32 for x[m, n] times w[n, n], stored [K, N] and [N, K], through
the public API, and the same arrays through Qwix where that is installed. Fastest of
several interleaved turns, so that a busy moment hits every row alike.

    python benchmarks/cpu_decode.py [sizes, default 1024,4096] [rows, default 1,2,4,8]
"""

import datetime
import os
import platform
import sys
import time

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp

import midtread as mt

try:
    import qwix
except ImportError:
    qwix = None

#        name      weight            tile  activations
CASES = [
    ("w8a8",   "int8",          None, "int8"),
    ("w4a8",   "int4",          None, "int8"),
    ("w8",     "int8",          None, None),
    ("w4",     "int4",          None, None),
    ("w4/128", "int4",          128,  None),
    ("fp8",    "float8_e4m3fn", None, None),
    ("nf4",    "nf4",           None, None),
]  # fmt: skip


def case(library, x, w, stored, weight, tile, activations):
    """A compiled call and its arguments."""
    k, n = stored.index("k"), stored.index("n")
    tiles = {k: tile} if tile else None
    q = library.quantize(w, weight, channelwise_axes=[n], tiled_axes=tiles)

    def run(x, q):
        if activations:
            x = library.quantize(x, activations, channelwise_axes=[0])
        return library.einsum(f"mk,{stored}->mn", x, q)

    return jax.jit(run).lower(x, q).compile(), (x, q)


def fastest(calls, turns=5, seconds=0.03):
    best = dict.fromkeys(calls, float("inf"))
    for _ in range(turns):
        for name, (call, args) in calls.items():
            end = time.perf_counter() + seconds
            while (start := time.perf_counter()) < end:
                jax.block_until_ready(call(*args))
                best[name] = min(best[name], time.perf_counter() - start)
    return best


def measure(size, rows, stored, key):
    x, w = jax.random.normal(key, (rows, size)), jax.random.normal(key, (size, size))
    plain = jax.jit(lambda x, w: jnp.einsum(f"mk,{stored}->mn", x, w))
    calls = {"f32": (plain.lower(x, w).compile(), (x, w))}
    for name, *how in CASES:
        calls[name] = case(mt, x, w, stored, *how)
        if qwix is not None:
            calls[f"qwix {name}"] = case(qwix, x, w, stored, *how)
    return fastest(calls)


def main(sizes="1024,4096", rows="1,2,4,8"):
    device = f"{platform.machine()}, {os.cpu_count()} cores"
    peer = "" if qwix is None else "; in brackets: qwix"
    print(f"{device}, {datetime.date.today()}, jax {jax.__version__}{peer}")
    print("size  m stored   f32 ms ", *(f"{name:>12}" for name, *_ in CASES))
    for size in map(int, sizes.split(",")):
        for m in map(int, rows.split(",")):
            for stored in ("kn", "nk"):
                best = measure(size, m, stored, jax.random.key(0))
                f32 = best["f32"]
                cells = []
                for name, *_ in CASES:
                    peer = best.get(f"qwix {name}")
                    shown = f"{best[name] / f32:.2f}"
                    shown += f" ({peer / f32:.1f})" if peer else ""
                    cells.append(f"{shown:>12}")
                print(
                    f"{size} {m:>2} {stored}     {f32 * 1e3:7.3f} ", *cells, flush=True
                )


if __name__ == "__main__":
    main(*sys.argv[1:])
