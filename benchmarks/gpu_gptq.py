"""How long does GPTQ take for one layer of Llama-8B, given the moments of its inputs?

    python benchmarks/gpu_gptq.py [layers=3] [--qwix [limit=120]]

The seven matrices of a layer (4096 wide, 14336 inside) are solved to int4 in groups of 128
from second moments of random inputs that have much in common: query, key, value, gate and
up together, since their inputs are the same, then out, then down. Compiling is timed apart;
beside the time stands the error of the layer's outputs and that of rounding. At most 2 s are
asked for on an H200.

With --qwix one matrix [4096, 4096] more is solved by the GPTQ of Qwix 0.1.8 (its Python loop
over columns), in a process that is ended after `limit` seconds. `scale=8` divides all
extents, to see the script work on a CPU.
"""

import multiprocessing
import os
import sys
import time

# Two processes share the device where Qwix runs too.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp

from midtread.algorithms import gptq
from midtread.numerics.spec import Spec

WIDTH, INSIDE, KEYS, GROUP = 4096, 14336, 1024, 128


def moments(key: jax.Array, K: int) -> jax.Array:
    """Of 4 K inputs that share a few directions, some of them large."""
    x, mix, size = jax.random.split(key, 3)
    shared = jax.random.normal(mix, (64, K)) / 4
    scale = jnp.exp(jax.random.normal(size, (K,)))

    def more(i, H):
        a, b = jax.random.split(jax.random.fold_in(x, i))
        X = jax.random.normal(a, (K, K)) + jax.random.normal(b, (K, 64)) @ shared
        return H + (X * scale).T @ (X * scale)

    return jax.jit(lambda: jax.lax.fori_loop(0, 4, more, jnp.zeros((K, K))))()


def layer(key: jax.Array, scale: int):
    """[(names, weights, moments)] of what shares its inputs."""
    D, F, N = WIDTH // scale, INSIDE // scale, KEYS // scale
    shapes = {
        "query key value": [(D, D), (D, N), (D, N)],
        "out": [(D, D)],
        "gate up": [(D, F), (D, F)],
        "down": [(F, D)],
    }
    for number, (names, listed) in enumerate(shapes.items()):
        own = jax.random.fold_in(key, number)
        ws = [
            jax.random.normal(jax.random.fold_in(own, i), shape) * 0.02
            for i, shape in enumerate(listed)
        ]
        yield names, ws, moments(own, listed[0][0])


def ours(number: int, scale: int) -> None:
    spec = Spec("int4", (1,), {0: GROUP})
    print("| layer | matrices | seconds | error | rounded |\n|---|---|---|---|---|")
    for turn in range(number):
        total, cost, rounded = 0.0, 0.0, 0.0
        for names, ws, H in layer(jax.random.key(turn), scale):
            jax.block_until_ready((ws, H))
            began = time.time()
            solved = gptq.solve_together(ws, spec, H)
            jax.block_until_ready(solved)
            seconds = time.time() - began
            total += seconds
            cost += sum(float(s.cost) for s in solved) / 7
            rounded += sum(float(s.rounded) for s in solved) / 7
            means = [sum(float(getattr(s, k)) for s in solved) / len(solved) for k in ("cost", "rounded")]  # fmt: skip
            print(f"| | {names} | {seconds:.3f} | {means[0]:.3g} | {means[1]:.3g} |")
        name = "first, with compiling" if turn == 0 else f"{turn + 1}"
        print(
            f"| {name} | all seven | {total:.3f} | {cost:.3g} | {rounded:.3g} |",
            flush=True,
        )


def _qwix(scale: int, queue) -> None:
    from qwix._src.core import qarray
    from qwix.contrib import gptq_core

    D = WIDTH // scale
    how = qarray.HowToQuantize(
        qtype="int4", channelwise_axes=(0,), tiled_axes={1: GROUP}
    )
    w = jax.random.normal(jax.random.key(0), (D, D)) * 0.02
    H = moments(jax.random.key(1), D)
    for _ in range(2):
        began = time.time()
        jax.block_until_ready(gptq_core.quantize_weight(w, H, how))
        queue.put(time.time() - began)


def qwix(limit: float, scale: int) -> None:
    """One row: a matrix [4096, 4096] by Qwix, in at most `limit` seconds a try."""
    process = multiprocessing.get_context("spawn")
    queue = process.Queue()
    worker = process.Process(target=_qwix, args=(scale, queue))
    worker.start()
    text = f"not done after {limit:.0f} s"
    end = time.time() + limit
    while worker.is_alive() and time.time() < end and text:
        worker.join(1)
    seen = []
    while not queue.empty():
        seen.append(f"{queue.get():.1f}")
    if worker.is_alive():
        worker.terminate()
    elif worker.exitcode:
        text = f"failed with exit code {worker.exitcode}"
    print(f"| Qwix 0.1.8 | query alone | {', '.join(seen) or text} | | |", flush=True)


def main(words: list[str]) -> None:
    settings = dict(w.split("=") for w in words if "=" in w)
    scale = int(settings.pop("scale", 1))
    number, limit = int(settings.pop("layers", 3)), float(settings.pop("limit", 120))
    others = [w for w in words if "=" not in w and w != "--qwix"]
    if settings or others:
        raise SystemExit(f"unknown words {[*settings, *others]}.")
    print(f"{jax.devices()[0].device_kind}, {time.strftime('%Y-%m-%d')}")
    ours(number, scale)
    if "--qwix" in words:
        qwix(limit, scale)


if __name__ == "__main__":
    main(sys.argv[1:])
