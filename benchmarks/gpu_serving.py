"""Rows of benchmarks/gpu.py that serve a stack of MLP layers: prefill, decode, sweep.

Two matrices and relu, which cuBLAS applies in bfloat16's matmul itself; or, with the option
`gated`, Llama's three, its norm and its residual, and silu(gate) * up, which is a kernel beside
the matmuls for all. Other options are numbers of rows and names of SERVING: `sweep:gated:w8:256:1024`.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from gpu_timing import (
    BANDWIDTH,
    BF16,
    EIGHT,
    FF,
    KEY,
    LAYERS,
    D,
    attempt,
    measure_steps,
)

import midtread as mt


class Stack(nn.Module):
    layers: int = LAYERS
    gated: bool = False

    @nn.compact
    def __call__(self, x):
        dense = functools.partial(
            nn.Dense, use_bias=False, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16
        )
        for i in range(self.layers):
            if not self.gated:
                x = dense(D, name=f"down{i}")(nn.relu(dense(FF, name=f"up{i}")(x)))
                continue
            # products of results, step after step, would vanish without a norm
            h = nn.RMSNorm(dtype=jnp.bfloat16, param_dtype=jnp.bfloat16)(x)
            h = nn.silu(dense(FF, name=f"gate{i}")(h)) * dense(FF, name=f"up{i}")(h)
            x = x + dense(D, name=f"down{i}")(h)
        return x

    @property
    def num_codes(self) -> int:
        return self.layers * (3 if self.gated else 2) * D * FF


SERVING = {
    "w8": ({"weight_qtype": "int8"}, 8),
    "fp8w": ({"weight_qtype": "e4m3"}, 8),
    "w4-g128": ({"weight_qtype": "int4", "tile_size": 128}, 4.125),
    "w4-g32": ({"weight_qtype": "int4", "tile_size": 32}, 4.5),
    "nf4-g64": ({"weight_qtype": "nf4", "tile_size": 64}, 4.25),
    "mxfp4": ({"weight_qtype": "mxfp4"}, 4.5),
    "nvfp4": ({"weight_qtype": "nvfp4"}, 5.0),
    "uint4-zero-g64": (
        {
            "weight_qtype": "uint4",
            "tile_size": 64,
            "weight_calibration_method": "minmax",
        },
        4.3125,
    ),
    "int2-g64": ({"weight_qtype": "int2", "tile_size": 64}, 2.25),
    "w4a8-g128": (
        {"weight_qtype": "int4", "act_qtype": "int8", "tile_size": 128},
        4.125,
    ),
    "w8a8": ({"weight_qtype": "int8", "act_qtype": "int8"}, 8),
    "fp8": ({"weight_qtype": "e4m3", "act_qtype": "e4m3"}, 8),
}


def serve(rows: tuple[int, ...], names, model: Stack) -> list[str]:
    layers = model.layers
    inputs = {m: jax.random.normal(KEY, (m, D), jnp.bfloat16) for m in rows}
    steps = {m: 20 if m < 1024 else 5 for m in rows}
    variables = jax.jit(model.init)(KEY, inputs[rows[0]])
    base = {
        m: measure_steps(model.apply, variables, x, steps[m])[0]
        for m, x in inputs.items()
    }
    lines = [
        f"| {m} | bfloat16 | {t / layers * 1e6:.1f} | 1.00 | "
        f"{model.num_codes * 2 / t / 1e12:.2f} | |"
        for m, t in base.items()
    ]
    for name in names:
        served, params = _quantized(model, variables, inputs[rows[0]], SERVING[name][0])
        for m, x in inputs.items():
            how = served.apply, {"params": params}, x, steps[m]
            found = attempt(functools.partial(measure_steps, *how))
            lines.append(_served_line(name, m, found, base[m], model))
            print(lines[-1], flush=True)
        del params
    return lines


def _quantized(model, variables, x, fields):
    provider = mt.PtqProvider([mt.QuantizationRule(module_path=".*", **fields)])
    served = mt.quantize_model(model, provider)
    shapes = jax.eval_shape(served.init, KEY, x)["params"]
    return served, mt.quantize_params(variables["params"], shapes)


def _served_line(name: str, rows: int, run, base: float, model: Stack) -> str:
    if isinstance(run, str):
        return f"| {rows} | {name} | {run} | | | |"
    took, bits, codes = run[0], SERVING[name][1], model.num_codes
    peak = EIGHT if "a8" in name or name == "fp8" else BF16
    bound = max(codes * bits / 8 / BANDWIDTH, 2 * rows * codes / peak)
    rate = codes * bits / 8 / took / 1e12
    return (
        f"| {rows} | {name} | {took / model.layers * 1e6:.1f} | {base / took:.2f} | "
        f"{rate:.2f} | {base / bound:.2f} |"
    )


HEAD = [
    "| rows | weights | us a layer | x bf16 | TB/s of weights | bound x |",
    "|---" * 6 + "|",
]


class _Asked(NamedTuple):
    """What a row's options say: `gated`, numbers of rows, names of SERVING."""

    rows: tuple[int, ...]
    names: tuple[str, ...]
    gated: bool


def _asked(options: tuple[str, ...], rows, names) -> _Asked:
    found = tuple(int(o) for o in options if o.isdigit())
    named = tuple(o for o in options if o in SERVING)
    unknown = [o for o in options if o not in (*named, "gated") and not o.isdigit()]
    if unknown:
        raise ValueError(
            f"{unknown} are neither 'gated', nor rows, nor of {[*SERVING]}"
        )
    return _Asked(found or rows, named or names, "gated" in options)


def decode(*options):
    asked = _asked(options, (1, 16, 64), tuple(SERVING))
    return HEAD + serve(asked.rows, asked.names, Stack(gated=asked.gated))


def prefill(*options):
    asked = _asked(options, (8192,), ("w8a8", "fp8"))
    return HEAD + serve(asked.rows, asked.names, Stack(2, asked.gated))


SWEEP = ("w8", "w4-g128", "w8a8", "fp8")


def sweep(*options):
    """Never slower than bfloat16? Two layers, still beyond L2."""
    asked = _asked(options, tuple(2**i for i in range(14)), SWEEP)  # 1 .. 8192
    return HEAD + serve(asked.rows, asked.names, Stack(2, asked.gated))
