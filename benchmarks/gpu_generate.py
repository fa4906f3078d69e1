"""What a token costs from start to end: a language model served through `lm/decode.py`.

Llama-3-8B's shapes with random weights, or any shipped config. Each row is one format of
weights and cache at one number of sequences and of tokens that each has seen:

    ms a token     on the device: what a call of LONG tokens takes longer than one of decode.COUNT
    its bytes      weights once, and what the sequences have seen, at the device's bandwidth
    tokens/s       through `Server.step`, decode.COUNT tokens a call
    generate()     tokens/s of `lm/generate.py`, which is what `midtread generate` does once a
                   checkpoint is read: as many prompts of 128 tokens, 256 new ones each

    python benchmarks/gpu_generate.py                        # all rows
    python benchmarks/gpu_generate.py bf16 int4w --batch 1 32 --seen 256 4096 --layers 8
"""

import argparse
import dataclasses
import itertools
import time

import jax
import numpy as np
from flax import nnx

from midtread.lm import cache as kv
from midtread.lm import convert, decode, generate, model, roofline, settings
from midtread.lm.config import Model, section
from midtread.lm.tokenizer import tokenizer

ROWS = {
    "bf16": [],
    "int8w": ["quantization=int8w"],
    "int4w": ["quantization=int4w"],
    "int8": ["quantization=int8", "use_qwix_quantization=true"],
    "fp8": ["quantization=fp8_full", "use_qwix_quantization=true"],
    "int8w+kv8": ["quantization=int8w", "quantize_kvcache=true"],
    "int4w+kv8": ["quantization=int4w", "quantize_kvcache=true"],
    "int4w+head": ["quantization=int4w", "quantize_logits_proj=true"],
    "int8w+kv8+head": [
        "quantization=int8w",
        "quantize_kvcache=true",
        "quantize_logits_proj=true",
    ],
    "int4w+kv8+head": [
        "quantization=int4w",
        "quantize_kvcache=true",
        "quantize_logits_proj=true",
    ],
}
LONG = 96


def seconds(server: decode.Server, seen: int, count: int) -> float:
    """The median of three calls, by one program, in which `count` tokens may come."""
    took = []
    for _ in range(4):
        server.pretend(seen, count)
        started = time.perf_counter()
        server.step(LONG)
        took.append(time.perf_counter() - started)
    return float(np.median(took[1:]))


def by_generate(net, config, batch: int) -> float:
    config = dataclasses.replace(config, decode_slots=batch, max_new_tokens=256)
    prompts = ["".join(chr(97 + (i + j) % 26) for j in range(128)) for i in range(batch)]  # fmt: skip
    return generate.generate(
        net, tokenizer(config), config, prompts, on_text=lambda piece: None
    ).tokens_per_second


def measure(name, words, batches, lengths, is_stacked, runs_generate):
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
    for batch, seen in itertools.product(batches, lengths):
        length = seen + 2 * LONG
        options = {"slots": batch, "length": length}
        options["cache_format"] = generate.cache_format(config)
        server = decode.Server(net, m, **options)
        started = time.perf_counter()
        server.warm(LONG)
        compiled = time.perf_counter() - started
        short, long = (seconds(server, seen, count) for count in (decode.COUNT, LONG))
        ms = 1e3 * (long - short) / (LONG - decode.COUNT)
        read = kv.nbytes(server._slots.cache) * (seen + LONG / 2) / length
        bound = f"{1e3 * (weights + read) / bandwidth:6.2f}" if bandwidth else "     -"
        rate = batch * decode.COUNT / short
        del server
        whole = ""
        if runs_generate and seen == lengths[0]:
            whole = by_generate(net, config, batch)
            whole = f"{whole:9,.0f} ({100 * whole * ms / 1e3 / batch:.0f}%)"
        print(
            f"| {name:10} | {batch:4} | {seen:5} | {ms:7.3f} | {bound} | {rate:9,.0f} "
            f"({100 * rate * ms / 1e3 / batch:.0f}%) | {whole} | {compiled:4.0f} |",
            flush=True,
        )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rows", nargs="*", default=[], help=f"of {', '.join(ROWS)}")
    parser.add_argument("--model", default="llama3-8b")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--batch", type=int, nargs="*", default=[1, 32])
    parser.add_argument("--seen", type=int, nargs="*", default=[256])
    parser.add_argument("--stacked", action="store_true", help="layers under a scan")
    parser.add_argument("--generate", action="store_true", help="lm/generate.py too")
    args = parser.parse_args()
    unknown = [row for row in args.rows if row not in ROWS]
    if unknown:
        parser.error(f"no row is called {unknown[0]}: there are {', '.join(ROWS)}.")
    words = [args.model]
    words += [f"num_decoder_layers={args.layers}"] if args.layers else []
    print(f"# {jax.devices()[0].device_kind}, jax {jax.__version__}, {' '.join(words)}")
    print("| weights | sequences | seen | ms a token | its bytes, ms | tokens/s by step() (of 1/ms) | by generate() | compile s |")  # fmt: skip
    print("|---" * 8 + "|", flush=True)
    for name in args.rows or ROWS:
        try:
            measure(name, words, args.batch, args.seen, args.stacked, args.generate)
        except Exception as error:  # noqa: BLE001  one row must not cost the others
            print(
                f"| {name} | {type(error).__name__}: {str(error)[:300]} |", flush=True
            )


if __name__ == "__main__":
    main()
