"""How far it is from a model to its kernels: Python calls and changes of file while tracing.

A Dense layer under QtProvider, forward and backward, and under PtqProvider with int4 weights and
8 rows, traced for an H200 that need not be there. Only functions of Midtread's own files count,
each time that they are entered (so a generator counts for every element); a switch is a call in
another file than the call before. Modules are imported and caches emptied first.

    python benchmarks/hops.py [--by-file]
"""

import argparse
import collections
import datetime
import pathlib
import sys
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import linen as nn

import midtread as mt
from midtread.kernels.environment import pretended

HOME = str(pathlib.Path(mt.__file__).parent)


def count(fn: Callable, *args) -> tuple[collections.Counter, int]:
    """(calls by file, switches) of tracing `fn`."""
    calls, switches, last = collections.Counter(), 0, None

    def entered(frame, event, _):
        nonlocal switches, last
        file = frame.f_code.co_filename
        if event == "call" and file.startswith(HOME):
            calls[file.removeprefix(HOME + "/")] += 1
            switches += file != last
            last = file

    for trace in (lambda: None, lambda: sys.setprofile(entered)):
        jax.clear_caches()
        trace()
        try:
            jax.make_jaxpr(fn)(*args)
        finally:
            sys.setprofile(None)
    return calls, switches


def dense(provider: mt.QuantizationProvider, rows: int, width: int = 1024):
    """(a function of variables and inputs, both as shapes)."""
    layer = nn.Dense(width, dtype=jnp.bfloat16)
    model = mt.quantize_model(layer, provider)
    x = jax.ShapeDtypeStruct((rows, width), jnp.bfloat16)
    variables = jax.eval_shape(model.init, jax.random.key(0), x)
    return model.apply, variables, x


def training():
    rule = mt.QtRule(weight_qtype="int8", act_qtype="int8", bwd_qtype="int8")
    apply, variables, x = dense(mt.QtProvider([rule]), rows=1024)
    loss = lambda v, x: jnp.sum(apply(v, x).astype(jnp.float32))
    return jax.grad(loss, (0, 1)), variables, x


def serving():
    rule = mt.QuantizationRule(weight_qtype="int4", tile_size=128)
    return dense(mt.PtqProvider([rule]), rows=8)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--by-file", action="store_true")
    by_file = parser.parse_args().by_file
    print(f"jax {jax.__version__}, {datetime.date.today()}, for an H200")
    print("| | calls | files | switches |\n|---|---|---|---|")
    with pretended("h200"):
        for name, case in (("QT int8, both ways", training), ("PTQ int4, 8 rows", serving)):  # fmt: skip
            calls, switches = count(*case())
            print(f"| {name} | {calls.total():,} | {len(calls)} | {switches:,} |")
            if by_file:
                for file, num in calls.most_common():
                    print(f"    {num:5} {file}")


if __name__ == "__main__":
    main()
