"""Rows of benchmarks/gpu.py: experts and attention over a quantized cache.

    grouped      many rows for each of 8 experts, codes by codes, and a training step
    experts      16 rows for each of 8 experts, weights alone quantized
    attention    one token for each of 8 sequences of 32,768

lax.ragged_dot in bfloat16 is XLA's; "one by one" is a batched matmul, which could only be
used if all groups were equally long, and is the fastest bfloat16 there is.
"""

import functools

import jax
import jax.numpy as jnp
from gpu_timing import BANDWIDTH, HEADS, KEY, KV_HEADS, D, attempt, measure
from jax import lax

import midtread as mt
from midtread.kernels import choose
from midtread.kernels.decode_attention import Cached
from midtread.kernels.decode_attention import triton as attention_triton
from midtread.kernels.environment import implementation

EXPERTS, WIDTH = 8, 7168
BATCH, CONTEXT = 8, 32768


def _operands(rows: int):
    x = jax.random.normal(KEY, (EXPERTS * rows, D), jnp.bfloat16)
    w = jax.random.normal(jax.random.key(1), (EXPERTS, D, WIDTH), jnp.bfloat16)
    return x, w, jnp.full((EXPERTS,), rows, jnp.int32)


def _one_by_one(x, w, sizes):
    return jnp.einsum("gmk,gkn->gmn", x.reshape(EXPERTS, -1, D), w).reshape(-1, WIDTH)


def _step(fn):
    """Forward and both gradients of a matmul of groups."""

    def run(x, w, sizes, g):
        out, vjp = jax.vjp(lambda x, w: fn(x, w, sizes), x, w)
        return out, *vjp(g)

    return run


def _lines(title: str, cases: dict, bases: tuple[str, str], size, unit: str):
    """A table: seconds, a rate, and times as fast as either base."""
    lines = [f"| {title} | ms | {unit} | x {bases[0]} | x {bases[1]} |", "|---" * 5 + "|"]  # fmt: skip
    for name, took in cases.items():
        if isinstance(took, str):
            lines.append(f"| {name} | {took} | | | |")
            continue
        rate = size(name) / took / 1e12
        known = [cases[base] for base in bases]
        ratios = " | ".join("" if isinstance(b, str) else f"{b / took:.2f}" for b in known)  # fmt: skip
        lines.append(f"| {name} | {took * 1e3:.3f} | {rate:.2f} | {ratios} |")
    return lines


def _time(fn, *args, calls=10):
    found = attempt(lambda: measure(fn, *args, calls=calls))
    return found if isinstance(found, str) else found[0]


_TURNED = lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((1,), (2,)), ((), ())),
    lhs_ragged_dimensions=[0],
    rhs_group_dimensions=[0],
)


def grouped():
    x, w, sizes = _operands(4096)
    flops = 2 * x.shape[0] * D * WIDTH
    bases = "bf16 ragged_dot", "bf16 one by one"
    cases = {
        bases[0]: _time(lax.ragged_dot, x, w, sizes, calls=3),
        bases[1]: _time(_one_by_one, x, w, sizes),
    }
    turned = functools.partial(mt.ragged_dot_general, ragged_dot_dimension_numbers=_TURNED)  # fmt: skip
    for name in ("e4m3", "int8"):
        q = mt.quantize(x, name, channelwise_axes=[0])
        stored = mt.quantize(w, name, channelwise_axes=[0, 2])
        cases[f"{name}, weights [g, k, n]"] = _time(mt.ragged_dot, q, stored, sizes)
        stored = mt.quantize(w.swapaxes(1, 2), name, channelwise_axes=[0, 1])
        cases[f"{name}, weights [g, n, k]"] = _time(turned, q, stored, sizes)
        uneven = sizes + jnp.array([-95, 94, -191, 192, 1, -1, -97, 97], jnp.int32)
        cases[f"{name}, uneven groups"] = _time(turned, q, stored, uneven)
    del stored
    lines = _lines("8 experts x 4096 rows, 4096 x 7168", cases, bases, lambda _: flops, "TFLOP/s")  # fmt: skip
    g = jax.random.normal(KEY, (x.shape[0], WIDTH), jnp.bfloat16)
    cases = {
        bases[0]: _time(_step(lax.ragged_dot), x, w, sizes, g, calls=1),
        bases[1]: _time(_step(_one_by_one), x, w, sizes, g, calls=5),
    }
    for name in ("qwix_fp8_full", "te_fp8_current", "qwix_int8"):
        run = _step(mt.learn(mt.recipe(name)).ragged_dot)
        cases[name] = _time(run, x, w, sizes, g, calls=5)
    steps = _lines("forward and both gradients, quantizing included", cases, bases, lambda _: 3 * flops, "TFLOP/s")  # fmt: skip
    return [*lines, "", *steps]


WEIGHTS = {"w8": ("int8", None), "fp8w": ("e4m3", None), "w4-g128": ("int4", 128)}


def experts():
    x, w, sizes = _operands(16)
    bits = {"w8": 8, "fp8w": 8, "w4-g128": 4.125}
    bases = "bf16 ragged_dot", "bf16 one by one"
    cases = {
        bases[0]: _time(lax.ragged_dot, x, w, sizes, calls=20),
        bases[1]: _time(_one_by_one, x, w, sizes, calls=20),
    }
    for name, (qtype, tile) in WEIGHTS.items():
        tiles = {1: tile} if tile else {}
        q = mt.quantize(w, qtype, channelwise_axes=[0, 2], tiled_axes=tiles)
        cases[name] = _time(mt.ragged_dot, x, q, sizes, calls=20)
        with implementation("gpu"):
            kernel = lambda x, q, sizes: mt.ragged_dot(x, q, sizes)
            cases[f"{name}, our kernel"] = _time(kernel, x, q, sizes, calls=20)
    size = lambda name: w.size * bits.get(name.split(",")[0], 16) / 8
    best = size("bf16") / BANDWIDTH * 1e6
    title = f"8 experts x 16 rows, 4096 x 7168 (bf16 at 4.8 TB/s: {best:.0f} us)"
    return _lines(title, cases, bases, size, "TB/s of weights")


def attention():
    head = D // HEADS
    key = lambda i: jax.random.key(i)
    q = jax.random.normal(key(1), (BATCH, 1, HEADS, head), jnp.bfloat16)
    shape = (BATCH, CONTEXT, KV_HEADS, head)
    k, v = (jax.random.normal(key(i), shape, jnp.bfloat16) for i in (2, 3))
    lengths = jnp.full((BATCH,), CONTEXT, jnp.int32)
    cudnn = functools.partial(jax.nn.dot_product_attention, implementation="cudnn")
    bases = "bf16, cuDNN", "bf16, our kernel"

    def plain(q, k, v):
        return jax.nn.dot_product_attention(q, k, v, implementation="xla")

    def ours(q, k, v, lengths):
        rows = q.reshape(BATCH, KV_HEADS, -1, head)
        options = {"block": 128, "programs": 512, "stages": 2}
        run = functools.partial(attention_triton.decode_attention, fmt=None, **options)
        return run(rows, (k, None), (v, None), 0 * lengths, lengths)

    cases = {
        "bf16, XLA": _time(plain, q, k, v),
        bases[0]: _time(cudnn, q, k, v, calls=20),
        bases[1]: _time(ours, q, k, v, lengths, calls=20),
    }
    for name in ("int8", "e4m3"):
        for title, axes in (("per head", (0, 1, 2)), ("per token", (0, 1))):
            codes = [mt.quantize(x.astype(jnp.float32), name, channelwise_axes=axes) for x in (k, v)]  # fmt: skip
            run = lambda q, k, v, n: choose.attend(Cached(q, k, v, 0 * n, n))
            cases[f"{name}, scales {title}"] = _time(run, q, *codes, lengths, calls=20)
    size = lambda name: 2 * k.size * (2 if "bf16" in name else 1)
    return _lines("8 x 32,768 slots, 32 / 8 heads of 128", cases, bases, size, "TB/s of codes")  # fmt: skip
