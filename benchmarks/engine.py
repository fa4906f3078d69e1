"""What quantizing costs before anything runs: trace, compile, bytes kept for the backward.

A stack of matmuls in bfloat16 and nothing else, forward and backward, in plain JAX, under
our recipes and under Qwix (when installed), in one process. Ratios are to plain JAX. The
residual column is what jax.vjp holds between the two passes, before XLA drops anything.

    python benchmarks/engine.py [--layers 32] [--width 512] [--tokens 2048] [--write]
"""

import argparse
import datetime
import pathlib
import platform
import time

import jax
import jax.numpy as jnp

import midtread as mt

NUMBERS = (((1,), (0,)), ((), ()))


def plain():
    return lambda x, w: jax.lax.dot_general(x, w, NUMBERS)


def ours(name):
    ops = mt.learn(mt.recipe(name), key=jax.random.key(0))
    return lambda x, w: ops.dot_general(x, w, NUMBERS)


def qwix(act, grad):
    from qwix._src.core import dot_general_qt as qt

    config = qt.DotGeneralQtConfig(
        lhs_qtype=act, rhs_qtype=act, dlhs_grad_qtype=grad, drhs_grad_qtype=grad
    )
    return lambda x, w: qt.dot_general_qt(x, w, NUMBERS, config)


ROWS = {
    "bfloat16, JAX": plain,
    "int8, Qwix": lambda: qwix(jnp.int8, jnp.int8),
    "int8, ours": lambda: ours("qwix_int8"),
    "fp8, Qwix": lambda: qwix(jnp.float8_e4m3fn, jnp.float8_e5m2),
    "fp8, ours": lambda: ours("qwix_fp8_full"),
    "fp8 per tensor, ours": lambda: ours("te_fp8_current"),
    "fp8 blocks, ours": lambda: ours("deepseek_fp8"),
}


def measure(dot, layers, width, tokens):
    def loss(x, weights):
        for w in weights:
            x = dot(x, w)
        return jnp.sum(x.astype(jnp.float32) ** 2)

    x = jax.ShapeDtypeStruct((tokens, width), jnp.bfloat16)
    weights = [jax.ShapeDtypeStruct((width, width), jnp.bfloat16)] * layers
    start = time.perf_counter()
    traced = jax.jit(jax.value_and_grad(loss, (0, 1))).trace(x, weights)
    traced_at = time.perf_counter()
    compiled = traced.lower().compile()
    compiled_at = time.perf_counter()
    vjp = jax.eval_shape(lambda *a: jax.vjp(loss, *a)[1], x, weights)
    kept = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(vjp))
    temp = compiled.memory_analysis().temp_size_in_bytes
    return traced_at - start, compiled_at - traced_at, kept, temp


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument(
        "--write", action="store_true", help="append to benchmarks/results"
    )
    args = parser.parse_args()
    sizes = args.layers, args.width, args.tokens
    measure(plain(), 2, 64, 64)  # the first trace pays for imports
    device = f"{jax.devices()[0].device_kind} ({platform.machine()})"
    flags = f"--layers {args.layers} --width {args.width} --tokens {args.tokens}"
    today = datetime.date.today()
    lines = [
        f"## {args.layers} layers of {args.width}, {args.tokens} tokens",
        f"{device}, jax {jax.__version__}, {today}, `python benchmarks/engine.py {flags}`\n",
        "| | trace s | compile s | residual MB | temp MB |",
        "|---|---|---|---|---|",
    ]
    base = None
    for name, build in ROWS.items():
        try:
            seen = measure(build(), *sizes)
        except ImportError:
            lines.append(f"| {name} | not installed | | | |")
            continue
        base = base or seen
        units = (1, 1, 1e6, 1e6)
        cells = [f"{v / u:.2f} ({v / b:.2f}x)" for v, b, u in zip(seen, base, units)]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    text = "\n".join(lines)
    print(text)
    if args.write:
        device = jax.devices()[0].device_kind.lower().replace(" ", "-")
        folder = pathlib.Path(__file__).parent / "results"
        with open(folder / f"{device}-{datetime.date.today()}.md", "a") as file:
            file.write(text + "\n\n")


if __name__ == "__main__":
    main()
