"""Quantizing a large NNX model: the most memory held, against the float model's bytes.

A child process builds an MLP of `gigabytes` of float32 weights, quantizes it under
PtqProvider and reports its peak resident size over what it was before the model existed
(Linux). `donate` uses the float model up; `keep` leaves it usable, so both are held at the
end, and that is the least it can take.

    python benchmarks/memory.py [gigabytes, default 2] [formats, default int8,int4]
"""

import datetime
import gc
import os
import pathlib
import platform
import resource
import subprocess
import sys

WIDTH = 4096


def child(how: str, weight: str, layers: int) -> None:
    os.environ["JAX_PLATFORMS"] = "cpu"
    import jax
    import jax.numpy as jnp
    from flax import nnx

    import midtread as mt

    class Mlp(nnx.Module):
        def __init__(self, layers):
            init = nnx.initializers.constant(
                0.01
            )  # no random bits: they take memory too
            make = lambda: nnx.Linear(
                WIDTH, WIDTH, use_bias=False, kernel_init=init, rngs=nnx.Rngs(0)
            )
            self.layers = nnx.List([make() for _ in range(layers)])

        def __call__(self, x):
            for layer in self.layers:
                x = layer(x)
            return x

    def quantize(model):
        provider = mt.PtqProvider([mt.QuantizationRule(weight_qtype=weight)])
        x = jax.ShapeDtypeStruct((1, WIDTH), jnp.float32)
        return mt.quantize_model(model, provider, x, donate=how == "donate")

    jax.block_until_ready(nnx.state(quantize(Mlp(1))))  # compiled before we look
    gc.collect()
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
    before = pages * resource.getpagesize()
    model = Mlp(layers)
    jax.block_until_ready(nnx.state(model))
    quantized = quantize(model)
    jax.block_until_ready(nnx.state(quantized))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    whole = layers * WIDTH * WIDTH * 4
    held = sum(layer.kernel.value.array.nbytes for layer in quantized.layers)
    print((peak - before) / whole, held / whole)


def main(gigabytes="2", weights="int8,int4"):
    layers = max(round(float(gigabytes) * 2**30 / (WIDTH * WIDTH * 4)), 1)
    print(
        f"{platform.machine()}, {datetime.date.today()}, {layers} layers, {gigabytes} GB"
    )
    for weight in weights.split(","):
        for how in ("donate", "keep"):
            command = [sys.executable, __file__, "child", how, weight, str(layers)]
            out = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            peak, held = map(float, out.stdout.split())
            print(f"{weight} {how:>6}: peak {peak:.3f}x float; codes {held:.3f}x")


if __name__ == "__main__":
    if sys.argv[1:2] == ["child"]:
        child(sys.argv[2], sys.argv[3], int(sys.argv[4]))
    else:
        main(*sys.argv[1:])
