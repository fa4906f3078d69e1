"""What tests on a GPU run, in as few programs as they can.

Compiling is what these tests spend their time on, so that a test puts all of its cases into one
program (`each`) and then names those that are wrong (`assert_near`). What is not tested is not
compiled for the GPU: inputs are NumPy's, and what a QArray stands for is computed on the CPU.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np

import midtread as mt
from midtread.kernels.environment import implementation
from tests.kernels.plans import error, wide

INT8_DOT = r"dot.*\(tensor<[\dx]*xi8>, tensor<[\dx]*xi8>"


def compiled(name, fn, *args):
    """Without XLA's search for the fastest matmul, for nothing is timed here; but without it
    XLA's own int8 x int8 gives twice the sum (jax 0.11.2, H200)."""
    with implementation(name):
        lowered = jax.jit(fn).lower(*args)
    is_searched = re.search(INT8_DOT, lowered.as_text())
    options = {} if is_searched else {"xla_gpu_autotune_level": 0}
    return lowered.compile(compiler_options=options)


def by_kernel(fn, *args):
    """`fn` through our kernels; an error if one does not take it."""
    return compiled("gpu", fn, *args)(*args)


def by_xla(fn, *args):
    return compiled("xla", fn, *args)(*args)


def by_choice(fn, *args):
    """`fn` as a user runs it: the fastest implementation that there is."""
    return compiled(None, fn, *args)(*args)


def each(fn):
    """A function of {case: arguments} that gives {case: fn(*arguments)}, in one program."""

    def run(cases):
        results = {}
        for case, args in cases.items():
            try:
                results[case] = fn(*args)
            except ValueError as refused:
                refused.add_note(f"The case is {case}.")
                raise
        return results

    return run


def assert_near(got, want, limit):
    """Every result of {case: result} is that near to what it should be."""
    assert got.keys() == want.keys()
    errors = {case: error(got[case], want[case]) for case in got}
    wrong = {case: f"{e:.1e}" for case, e in errors.items() if not e < limit}
    assert not wrong, f"beyond {limit}: {wrong}"


def quantize_each(cases):
    """{case: mt.quantize(x, name, **options)} of {case: (x, name, options)}, in one program."""

    def run(arrays):
        return {
            case: mt.quantize(arrays[case], name, **options)
            for case, (_, name, options) in cases.items()
        }

    return by_choice(run, {case: x for case, (x, *_) in cases.items()})


def quantize(x, name, **options):
    return quantize_each({"": (x, name, options)})[""]


@jax.jit
def _dequantized(q):
    return mt.dequantize(q, jnp.float32)


def values(q):
    """What a QArray stands for, in float32."""
    return wide(_dequantized(jax.device_put(q, jax.devices("cpu")[0])))


def dot(x, w):
    """By NumPy."""
    return wide(x) @ values(w)


def exactly(x, w):
    """In float64."""
    return wide(x).astype(np.float64) @ values(w).astype(np.float64)
