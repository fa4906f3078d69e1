"""Fewer bits, less time? Ours beside bfloat16 (XLA) in one process, on an NVIDIA GPU.

    JAX_PLATFORMS=cuda,cpu python benchmarks/gpu.py [row ...] [--results FOLDER] [--peers]

Rows: train, gemm, quantize, prefill, decode, sweep, grouped, experts, attention; none named:
all. Each prints a table of its cases and appends it to the results. --peers times the same
cases by other libraries, once per device and version (gpu_peers.py). Llama-8B layers: d 4096,
ff 14336, 32 and 8 heads; 16,384 tokens. Decoding runs a stack of 8 MLP layers, larger than L2
(gpu_serving.py), in steps of one program; else times are the best of three runs of
back-to-back calls. `bound` is what the roofline would allow.
"""

import argparse
import datetime
import functools
import os
import pathlib
import subprocess

import gpu_experts
import gpu_peers
import gpu_serving
import jax
import jax.numpy as jnp
from flax import linen as nn
from gpu_timing import (
    BF16,
    EIGHT,
    FF,
    HEADS,
    KEY,
    KV_HEADS,
    TOKENS,
    D,
    attempt,
    measure,
)
from jax import lax

import midtread as mt
from midtread.kernels import choose
from midtread.kernels.environment import implementation

# --- training ---------------------------------------------------------------------------------


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        dense = functools.partial(
            nn.Dense, use_bias=False, dtype=jnp.bfloat16, param_dtype=jnp.float32
        )
        batch, length, _ = x.shape
        heads = lambda y, n: y.reshape(batch, length, n, D // HEADS)
        h = nn.RMSNorm(dtype=jnp.bfloat16)(x)
        q = heads(dense(D, name="q")(h), HEADS)
        k = heads(dense(D * KV_HEADS // HEADS, name="k")(h), KV_HEADS)
        v = heads(dense(D * KV_HEADS // HEADS, name="v")(h), KV_HEADS)
        out = jax.nn.dot_product_attention(
            q, k, v, is_causal=True, implementation="cudnn"
        )
        x = x + dense(D, name="o")(out.reshape(batch, length, D))
        h = nn.RMSNorm(dtype=jnp.bfloat16)(x)
        h = nn.silu(dense(FF, name="gate")(h)) * dense(FF, name="up")(h)
        return x + dense(D, name="down")(h)


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        for i in range(2):
            x = Block(name=f"layer{i}")(x)
        return x


def _rule(**fields):
    return mt.QtProvider([mt.QtRule(module_path=".*", **fields)])


def _named(name):
    return lambda: _rule(recipe=mt.recipe(name))


FP8 = {
    "weight_qtype": "float8_e4m3fn",
    "act_qtype": "float8_e4m3fn",
    "bwd_qtype": "float8_e5m2",
}

TRAINING = {
    "int8": _named("qwix_int8"),
    "fp8": _named("qwix_fp8_full"),
    "fp8-tensor": _named("te_fp8_current"),
    "fp8-delayed": lambda: mt.DelayedFp8Provider([mt.QtRule(module_path=".*", **FP8)]),
    "fp8-blocks": _named("deepseek_fp8"),
}


def _step(provider, x):
    model = Net()
    if provider is not None:
        model = mt.quantize_model(model, provider)
    variables = jax.jit(model.init)(KEY, x[:1, :128])

    def loss(variables, x):
        return jnp.mean(jnp.square(model.apply(variables, x).astype(jnp.float32)))

    took, compiling, program = measure(
        jax.value_and_grad(loss, allow_int=True), variables, x, calls=5
    )
    value = float(program(variables, x)[0])
    return took, compiling, program.memory_analysis().temp_size_in_bytes, value


def _train(name, x):
    return _step(TRAINING[name](), x)


def _least(batch: int, length: int) -> float:
    """Seconds of two blocks, did nothing but tensor cores take time: linear layers in 8 bits,
    causal attention in bfloat16, backward passes twice and 2.5 times a forward one."""
    weights = 2 * D * D + 2 * D * D * KV_HEADS // HEADS + 3 * D * FF
    linear = 3 * 2 * batch * length * weights
    attention = 3.5 * 4 * batch * length**2 * D / 2
    return 2 * (linear / EIGHT + attention / BF16)


def train(*names):
    x = jax.random.normal(KEY, (8, TOKENS // 8, D), jnp.bfloat16)
    base = _step(None, x)
    bound = base[0] / _least(*x.shape[:2])
    lines = [
        f"| 2 blocks, fwd+bwd (bound {bound:.2f}x) | ms | x bf16 | compile s | temp GB | loss |",
        "|---" * 6 + "|",
    ]
    rows = {"bfloat16": base}
    for name in names or TRAINING:
        rows[name] = attempt(functools.partial(_train, name, x))
    for name, row in rows.items():
        if isinstance(row, str):
            lines.append(f"| {name} | {row} | | | | |")
            continue
        took, compiling, temp, value = row
        lines.append(
            f"| {name} | {took * 1e3:.1f} | {base[0] / took:.2f} | {compiling:.1f} "
            f"({compiling / base[1]:.1f}x) | {temp / 1e9:.2f} ({temp / base[2]:.2f}x) | {value:.5f} |"
        )
    return lines


# --- matmuls ----------------------------------------------------------------------------------


def gemm():
    n = 8192
    flops = 2 * n**3
    a, b = (jax.random.normal(jax.random.key(i), (n, n), jnp.bfloat16) for i in (0, 1))
    lines = ["| 8192^3 | TFLOP/s | of peak |", "|---" * 3 + "|"]
    took, *_ = measure(lambda a, b: a @ b.T, a, b)
    lines.append(
        f"| bfloat16 | {flops / took / 1e12:.0f} | {flops / took / BF16:.0%} |"
    )
    for name in ("int8", "e4m3"):
        x, y = (mt.quantize(v, name, channelwise_axes=[0]) for v in (a, b))
        took, *_ = measure(lambda x, y: mt.einsum("mk,nk->mn", x, y), x, y)
        lines.append(
            f"| {name}, scales included | {flops / took / 1e12:.0f} | {flops / took / EIGHT:.0%} |"
        )
    return lines


def _rows(name):
    place = mt.Spec(name, channelwise_axes=(0,))

    def run(x):
        q = choose.quantize(x, place, summed=(1,)).codes
        return q.qvalue, q.scale

    return run


def _both(name):
    place = mt.Spec(name, channelwise_axes=(0,))

    def run(x):
        q, again, _ = choose.quantize(x, place, summed=(1,), both=True)
        return q.qvalue, lax.optimization_barrier(again.qvalue.T), q.scale

    return run


def _columns(name):
    place = mt.Spec(name, channelwise_axes=(1,))

    def run(x):
        q = choose.quantize(x, place, summed=(0,)).codes
        return q.qvalue.T, q.scale

    return run


QUANTIZE = {  # bytes moved at the least, for a bfloat16 element
    "rows": (_rows, 3),
    "rows, and transposed": (_both, 4),
    "columns, transposed": (_columns, 3),
}


def quantize():
    lines = ["| 16384 x n | n | us | TB/s | us by XLA |", "|---" * 5 + "|"]
    for n in (D, FF):
        x = jax.random.normal(KEY, (TOKENS, n), jnp.bfloat16)
        for name in ("int8", "e4m3"):
            for title, (build, size) in QUANTIZE.items():
                took, *_ = measure(build(name), x)
                with implementation("xla"):
                    plain, *_ = measure(build(name), x)
                rate = size * x.size / took / 1e12
                lines.append(
                    f"| {name} {title} | {n} | {took * 1e6:.0f} | {rate:.2f} | {plain * 1e6:.0f} |"
                )
    return lines


ROWS = {
    "gemm": gemm,
    "quantize": quantize,
    "prefill": gpu_serving.prefill,
    "decode": gpu_serving.decode,
    "sweep": gpu_serving.sweep,
    "train": train,
    "grouped": gpu_experts.grouped,
    "experts": gpu_experts.experts,
    "attention": gpu_experts.attention,
}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "rows", nargs="*", help="gemm, decode:16, train:int8:fp8, sweep:gated:w8 ..."
    )
    folder = pathlib.Path(__file__).parent / "results"
    parser.add_argument("--results", default=folder, type=pathlib.Path)
    parser.add_argument("--peers", action="store_true", help="other libraries instead")
    args = parser.parse_args()
    rows = gpu_peers.ROWS if args.peers else ROWS
    unknown = [row for row in args.rows if row.split(":")[0] not in rows]
    if unknown:
        parser.error(
            f"no such rows: {', '.join(unknown)}. There are: {', '.join(rows)}."
        )
    device = jax.devices()[0].device_kind
    git = ["git", "-C", str(folder), "rev-parse", "--short", "HEAD"]
    # a copy of the tree without its history may say which commit it is
    commit = (
        os.environ.get("COMMIT")
        or subprocess.run(
            git, capture_output=True, text=True, check=False
        ).stdout.strip()
    )
    today = datetime.date.today()
    path = args.results / f"{device.lower().replace(' ', '-')}-{today}.md"
    # a format of the sweep at a time: no row takes more than four minutes
    apart = [
        f"{r}:{n}" for r in rows for n in (gpu_serving.SWEEP if r == "sweep" else [""])
    ]
    for row in args.rows or [r.removesuffix(":") for r in apart]:
        name, *options = row.split(":")
        title = f"{device}, jax {jax.__version__}, {today}, {commit or 'no commit'}"
        lines = rows[name](*options)
        text = "\n".join(
            [
                f"## {row}",
                "",
                f"{title}, `python benchmarks/gpu.py {row}{' --peers' if args.peers else ''}`",
                "",
                *lines,
            ]
        )
        print(text + "\n", flush=True)
        with open(path, "a") as file:
            file.write(text + "\n\n")


if __name__ == "__main__":
    main()
