"""What a token costs from start to end: a language model served through `lm/decode.py`.

Llama-3-8B's shapes with random weights, or any shipped config. Each row is one format of
weights and cache at one number of sequences: milliseconds a token on the device (64 tokens in
one call), tokens a second through `Server.step` as `midtread generate` calls it, and the
milliseconds that its bytes of weights and cache would take at the device's bandwidth.

    python benchmarks/gpu_generate.py                        # all rows
    python benchmarks/gpu_generate.py bf16 int4w --batch 1 32 --layers 8
"""

import argparse
import time

import jax
import numpy as np
from flax import nnx

from midtread.lm import cache as kv
from midtread.lm import convert, decode, model, roofline, settings
from midtread.lm.config import Model, section
from midtread.lm.generate import cache_format

ROWS = {
    "bf16": [],
    "int8w": ["quantization=int8w"],
    "int4w": ["quantization=int4w"],
    "int8": ["quantization=int8", "use_qwix_quantization=true"],
    "fp8": ["quantization=fp8_full", "use_qwix_quantization=true"],
    "int8w+kv8": ["quantization=int8w", "quantize_kvcache=true"],
}
COUNT = 64


def measure(name, words, batches, length, is_stacked):
    config = settings.load([*words, *ROWS[name], "weight_dtype=bfloat16"])
    m = section(config, Model)
    started = time.perf_counter()
    net = convert.in_memory(config, model.create(m))
    if not is_stacked:
        net = decode.prepare(net)
    weights = convert.nbytes(jax.tree.leaves(nnx.state(net, nnx.Param)))
    weights -= net.token_embedder.embedding.nbytes if not m.logits_via_embedding else 0
    print(f"# {name}: {weights / 1e9:.2f} GB read a token, made in {time.perf_counter() - started:.0f} s", flush=True)  # fmt: skip
    device = roofline.device_here()
    bandwidth = device and device.memory
    for batch in batches:
        options = {
            "slots": batch,
            "length": length,
            "cache_format": cache_format(config),
        }
        server = decode.Server(net, m, **options)
        started = time.perf_counter()
        server.warm(COUNT)
        server.warm()
        compiled = time.perf_counter() - started
        prompts = {i: list(range(1, 129)) for i in range(batch)}
        server.prefill(prompts, length - 128)
        server.step(COUNT)
        seconds = []
        for _ in range(3):
            started = time.perf_counter()
            server.step(COUNT)
            seconds.append((time.perf_counter() - started) / COUNT)
        started = time.perf_counter()
        for _ in range(8):
            server.step()
        rate = batch * 8 * decode.COUNT / (time.perf_counter() - started)
        cache = kv.nbytes(server._slots.cache)
        bound = f"{1e3 * (weights + cache) / bandwidth:6.2f}" if bandwidth else "     -"
        print(
            f"| {name:10} | {batch:4} | {1e3 * np.median(seconds):7.3f} | {bound} "
            f"| {rate:9,.0f} | {100 * rate * np.median(seconds) / batch:4.0f}% | {compiled:4.0f} |",
            flush=True,
        )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rows", nargs="*", default=[], help=f"of {', '.join(ROWS)}")
    parser.add_argument("--model", default="llama3-8b")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--batch", type=int, nargs="*", default=[1, 32])
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--stacked", action="store_true", help="layers under a scan")
    args = parser.parse_args()
    unknown = [row for row in args.rows if row not in ROWS]
    if unknown:
        parser.error(f"no row is called {unknown[0]}: there are {', '.join(ROWS)}.")
    words = [args.model]
    words += [f"num_decoder_layers={args.layers}"] if args.layers else []
    print(f"# {jax.devices()[0].device_kind}, jax {jax.__version__}, {' '.join(words)}, cache of {args.length}")  # fmt: skip
    print("| weights | sequences | ms a token | its bytes, ms | tokens/s by step() | of 1/ms | compile s |")  # fmt: skip
    print("|---|---|---|---|---|---|---|", flush=True)
    for name in args.rows or ROWS:
        try:
            measure(name, words, args.batch, args.length, args.stacked)
        except Exception as error:  # noqa: BLE001  one row must not cost the others
            print(
                f"| {name} | {type(error).__name__}: {str(error)[:300]} |", flush=True
            )


if __name__ == "__main__":
    main()
