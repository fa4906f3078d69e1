"""What the kernels between the matmuls of a decoding step take, and attention by its options.

Llama-3-8B's shapes. Each row is the time of one kernel, as the mean of 32 in one program, which
a GPU starts as one graph; what starts the program is in it too.

    python benchmarks/gpu_step.py                       # all rows
    python benchmarks/gpu_step.py attention --seen 250 1000
"""

import argparse
import functools
import itertools
import time

import jax
import jax.numpy as jnp
import numpy as np

from midtread.kernels import choose
from midtread.kernels.add_norm import Sum
from midtread.kernels.decode_attention import triton as attention
from midtread.kernels.environment import implementation
from midtread.kernels.write_cache import Token
from midtread.lm import cache as kv
from midtread.numerics.formats import as_format

HEADS, KV, WIDTH, EMB, SLOTS, TIMES = 32, 8, 128, 4096, 1024, 32


def measure(step, state, *given):
    """Microseconds of one `step(state, *given) -> state`."""

    @functools.partial(jax.jit, donate_argnums=0)
    def run(state):
        for _ in range(TIMES):
            state = step(state, *given)
        return state

    state = jax.tree.map(jnp.copy, state)  # the program uses it up
    state, seconds = jax.block_until_ready(run(state)), []
    for _ in range(9):
        started = time.perf_counter()
        state = jax.block_until_ready(run(state))
        seconds.append(time.perf_counter() - started)
    return 1e6 * np.median(seconds) / TIMES


def random(seed, *shape, dtype=jnp.bfloat16):
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def norms(batch, _):
    y, scale = random(2, batch, EMB), random(3, EMB)
    bf16 = jnp.dtype(jnp.bfloat16)

    def step(x, y, scale):
        out = choose.add_norm(Sum(x, y, scale, 1e-5, bf16, bf16))
        if out is None:
            total = x + y
            wide = total.astype(jnp.float32)
            mean = jnp.mean(wide * wide, -1, keepdims=True)
            out = total, (wide * jax.lax.rsqrt(mean + 1e-5) * scale).astype(bf16)
        return out[1] + 0 * out[0]  # one more kernel in both

    yield "sum and norm, and a sum", measure(step, random(1, batch, EMB), y, scale)


def writes(batch, _):
    heads = random(1, batch, HEADS + 2 * KV, WIDTH)
    table = jnp.ones((batch, WIDTH // 2), jnp.float32)
    positions = jnp.arange(batch, dtype=jnp.int32)
    for cache_format in (None, ("int8", "dkv"), ("int8", "heads_and_dkv"), ("int4", "dkv")):  # fmt: skip
        rows = [random(i, batch, SLOTS, KV, WIDTH) for i in (2, 3)]
        if cache_format:
            rows = [jax.jit(functools.partial(kv._quantize, cache_format=cache_format))(x) for x in rows]  # fmt: skip

        def step(rows, heads, cache_format=cache_format):
            out = choose.write(Token(heads, table, table, positions, *rows))
            if out is not None:
                return [out.k, out.v]
            at = positions[:, None]
            cache = kv.Cache(dict(zip("kv", rows)), cache_format)
            k, v = heads[:, None, HEADS:-KV], heads[:, None, -KV:]
            return list(cache.write(at, k=k, v=v).rows.values())

        yield f"write {cache_format}", measure(step, rows, heads)


def attentions(batch, seen):
    first = jnp.zeros(batch, jnp.int32)
    for name, filled in itertools.product((None, "int8"), seen):
        fmt, stop = name and as_format(name), jnp.full(batch, filled, jnp.int32)
        shape = batch, SLOTS, KV, WIDTH
        k = random(1, *shape), None
        if fmt:
            k = jnp.ones(shape, jnp.int8), jnp.ones(shape[:3], jnp.float32)
        q = random(2, batch, KV, HEADS // KV, WIDTH)
        options = [{}]
        alone = ((32, 1, 3), (32, 2, 3), (64, 1, 3), (64, 2, 3), (64, 2, 4), (64, 4, 2), (64, 4, 4), (64, 8, 3), (128, 4, 2), (128, 8, 2), (128, 8, 3))  # fmt: skip
        options += [{"parts": 1, "block": b, "warps": w, "stages": s} for b, w, s in alone]  # fmt: skip
        options += [{"parts": p, "block": b} for p, b in ((2, 64), (4, 32), (4, 64), (8, 32), (16, 32))]  # fmt: skip
        for each in options:
            step = lambda q, k, fmt=fmt, stop=stop, each=each: attention.decode_attention(q, k, k, first, stop, fmt=fmt, dtype=q.dtype, **each)  # fmt: skip
            try:
                took = measure(step, q, k)
            except Exception as error:  # noqa: BLE001  one row must not cost the others
                print(f"# {each}: {str(error)[:200]}", flush=True)
                continue
            size = 2 * batch * filled * KV * WIDTH * (1 if fmt else 2)
            yield f"attention {name or 'bf16'} {filled} of {SLOTS} {each} ({size / took / 1e6:.2f} TB/s)", took  # fmt: skip


ROWS = {"norm": norms, "write": writes, "attention": attentions}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rows", nargs="*", default=[], help=f"of {', '.join(ROWS)}")
    parser.add_argument("--batch", type=int, nargs="*", default=[1, 32])
    parser.add_argument("--seen", type=int, nargs="*", default=[256, 1024])
    args = parser.parse_args()
    unknown = [row for row in args.rows if row not in ROWS]
    if unknown:
        parser.error(f"no row is called {unknown[0]}: there are {', '.join(ROWS)}.")
    print(f"# {jax.devices()[0].device_kind}, jax {jax.__version__}")
    print("| what | sequences | us | us by XLA |\n|---|---|---|---|", flush=True)
    for row, batch in itertools.product(args.rows or ROWS, args.batch):
        by_xla = {}
        if row != "attention":
            with implementation("xla"):
                by_xla = dict(ROWS[row](batch, args.seen))
        for what, took in ROWS[row](batch, args.seen):
            print(f"| {what} | {batch} | {took:.2f} | {by_xla.get(what, float('nan')):.2f} |", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
