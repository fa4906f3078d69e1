"""What quantizing a whole model adds to tracing it.

A stack of MLP blocks under QtProvider and PtqProvider, against the float model and against
Qwix when it is installed, Linen and NNX, in one process. They take turns, and the best turn
of each counts, in seconds of a core: others' work on the machine weighs little then.

    python benchmarks/trace.py [--layers 64] [--turns 9]
"""

import argparse
import datetime
import time
import warnings

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx

import midtread as mt

INT8 = {"weight_qtype": "int8", "act_qtype": "int8"}


class Linen(nn.Module):
    layers: int

    @nn.compact
    def __call__(self, x):
        for _ in range(self.layers):
            x = x + nn.Dense(64)(nn.relu(nn.Dense(128)(x)))
        return x


class Block(nnx.Module):
    def __init__(self, rngs):
        self.up, self.down = (
            nnx.Linear(64, 128, rngs=rngs),
            nnx.Linear(128, 64, rngs=rngs),
        )

    def __call__(self, x):
        return x + self.down(nnx.relu(self.up(x)))


class Nnx(nnx.Module):
    def __init__(self, layers, rngs):
        self.blocks = nnx.List([Block(rngs) for _ in range(layers)])

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def seconds(cases, turns):
    """Of tracing each of [(function, arguments)]; every turn is with a function that jit
    has not seen."""
    best = [float("inf")] * len(cases)
    for _ in range(turns):
        for i, (fn, args) in enumerate(cases):
            fresh = lambda *a, fn=fn: fn(*a)
            start = time.process_time()
            jax.jit(fresh).trace(*args)
            best[i] = min(best[i], time.process_time() - start)
    return best


def linen_case(library, kind, layers, x):
    model = Linen(layers)
    variables = jax.eval_shape(model.init, jax.random.key(0), x)
    if library is not None:
        rule = library.QuantizationRule(**INT8)
        model = library.quantize_model(model, getattr(library, kind)([rule]))
        if kind == "PtqProvider":
            variables = jax.eval_shape(model.init, jax.random.key(0), x)
    return (lambda v, x: model.apply(v, x)), (variables, x)


def nnx_case(library, kind, layers, x):
    model = Nnx(layers, nnx.Rngs(0))
    if library is not None:
        rule = library.QuantizationRule(**INT8)
        model = library.quantize_model(
            model, getattr(library, kind)([rule]), jnp.ones(x.shape)
        )
    graph, state = nnx.split(model)
    return (lambda s, x: nnx.merge(graph, s)(x)), (state, x)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=64)
    parser.add_argument("--turns", type=int, default=9)
    args = parser.parse_args()
    warnings.simplefilter("ignore")  # Qwix uses names that Flax has deprecated
    libraries = {"ours": mt}
    try:
        import qwix

        libraries["Qwix"] = qwix
    except ImportError:
        print("Qwix is not installed: no row for it")
    x = jax.ShapeDtypeStruct((8, 64), jnp.float32)
    print(
        f"jax {jax.__version__}, {datetime.date.today()}, {args.layers} layers; trace seconds"
    )
    print("| | float | " + " | ".join(f"{n} QT | {n} PTQ" for n in libraries) + " |")
    print("|---" * (2 + 2 * len(libraries)) + "|")
    kinds = [(x, kind) for x in libraries.values() for kind in ("QtProvider", "PtqProvider")]  # fmt: skip
    for name, case in (("Linen", linen_case), ("NNX", nnx_case)):
        cases = [case(*of, args.layers, x) for of in [(None, None), *kinds]]
        base, *took = seconds(cases, args.turns)
        cells = [f"{base:.3f}", *(f"{t:.3f} ({t / base:.2f}x)" for t in took)]
        print(f"| {name} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
