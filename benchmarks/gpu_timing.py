"""What the rows of benchmarks/gpu.py share: sizes, ceilings, and how a time is taken."""

import time

import jax
from jax import lax

D, FF, HEADS, KV_HEADS, TOKENS, LAYERS = 4096, 14336, 32, 8, 16384, 8
BANDWIDTH, BF16, EIGHT = 4.8e12, 989e12, 1979e12  # of an H200, by its datasheet
KEY = jax.random.key(0)


def measure(fn, *args, calls=20):
    """(seconds a call, seconds to compile, the compiled program)."""
    start = time.perf_counter()
    compiled = jax.jit(fn).lower(*args).compile()
    took = time.perf_counter() - start
    jax.block_until_ready([compiled(*args) for _ in range(3)])
    return seconds(compiled, args, calls), took, compiled


def seconds(program, args, calls: int) -> float:
    """Seconds of one call of a compiled program, the best of three runs of `calls`."""
    best = float("inf")
    for _ in range(3):
        start = time.perf_counter()
        for _ in range(calls):
            out = program(*args)
        jax.block_until_ready(out)
        best = min(best, (time.perf_counter() - start) / calls)
    return best


def measure_steps(fn, variables, x, steps=20):
    """`measure` of one of many steps in one program, each from the last one's result, as text
    is made. Called one by one, steps of a few hundred us wait for the host, which hands the
    buffers of every call to a graph."""

    def run(variables, x):
        return lax.fori_loop(0, steps, lambda _, x: fn(variables, x), x)

    seconds, *rest = measure(run, variables, x, calls=3)
    return seconds / steps, *rest


def attempt(fn):
    try:
        return fn()
    except Exception as error:  # noqa: BLE001  a row that fails is a result
        return f"failed: {type(error).__name__}: {str(error)[:120]!r}".replace("|", "/")
