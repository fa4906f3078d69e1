"""Which kernels a decoding step is made of, and what each takes: from a profile of a few steps.

Kernels are timed by the device, so what lies between them is not in their sum: the rest of what
benchmarks/gpu_generate.py and gpu_formats.py measure.

    python benchmarks/gpu_profile.py step bf16 int8w+kv8 --batch 32 --seen 256 --layers 8
    python benchmarks/gpu_profile.py stack w8a8 fp8 nvfp4 --batch 1 16
"""

import argparse
import collections
import glob
import os
import tempfile

import jax
import jax.numpy as jnp
from gpu_generate import ROWS
from gpu_serving import SERVING, Stack, _quantized
from gpu_timing import KEY, D

from midtread.lm import convert, decode, generate, model, settings
from midtread.lm.config import Model, section

STEPS = 8


def kernels(run) -> list[tuple[str, float]]:
    """(name, microseconds) of every kernel that `run` starts, in order."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(run())
        (path,) = glob.glob(os.path.join(folder, "**/*.xplane.pb"), recursive=True)
        profile = jax.profiler.ProfileData.from_file(path)
        events = [
            (event.start_ns, event.name, event.duration_ns / 1e3)
            for plane in profile.planes
            if plane.name.startswith("/device:GPU")
            for line in plane.lines
            if line.name.startswith("Stream")
            for event in line.events
        ]
        names = [line.name for plane in profile.planes for line in plane.lines]
    assert events, f"no kernels among {names}"
    return [(name, us) for _, name, us in sorted(events)]


def table(title: str, found: list[tuple[str, float]], steps: int, layers: int) -> None:
    """Prints the kernels by name, those that take most first."""
    by_name: dict[str, list[float]] = collections.defaultdict(list)
    for name, us in found:
        by_name[name].append(us)
    total = sum(us for _, us in found)
    print(f"## {title}: {total / steps:.1f} us a step in kernels, {len(found) / steps:.1f} kernels a step")  # fmt: skip
    print("| us a step | us a layer | times a step | median us | kernel |\n|---|---|---|---|---|")  # fmt: skip
    for name, each in sorted(by_name.items(), key=lambda item: -sum(item[1])):
        if sum(each) / total < 0.003:
            continue
        median = sorted(each)[len(each) // 2]
        print(
            f"| {sum(each) / steps:.1f} | {sum(each) / steps / layers:.2f} | {len(each) / steps:.2f} | "
            f"{median:.2f} | {name[:90]} |"
        )
    print(flush=True)


def step(name: str, batch: int, seen: int, layers: int) -> None:
    words = ["llama3-8b", f"num_decoder_layers={layers}", "weight_dtype=bfloat16"]
    config = settings.load([*words, *ROWS[name]])
    m = section(config, Model)
    net = decode.prepare(convert.in_memory(config, model.create(m)))
    cache = generate.cache_format(config)
    server = decode.Server(net, m, slots=batch, length=seen + 64, cache_format=cache)
    server.warm(STEPS)
    server.pretend(seen)
    server.step(STEPS)
    found = kernels(lambda: server.step(STEPS))
    table(f"{name}, {batch} sequences of {seen}, {layers} layers", found, STEPS, layers)


def stack(name: str, rows: int, layers: int) -> None:
    net, x = Stack(layers, gated=True), jax.random.normal(KEY, (rows, D), jnp.bfloat16)
    variables = jax.jit(net.init)(KEY, x)
    apply = net.apply
    if name != "bf16":
        served, params = _quantized(net, variables, x, SERVING[name][0])
        apply, variables = served.apply, {"params": params}

    @jax.jit
    def run(variables, x):
        return jax.lax.fori_loop(0, STEPS, lambda _, x: apply(variables, x), x)

    jax.block_until_ready(run(variables, x))
    found = kernels(lambda: run(variables, x))
    table(f"gated stack, {name}, {rows} rows", found, STEPS, layers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("step", "stack"))
    parser.add_argument("formats", nargs="+")
    parser.add_argument("--batch", type=int, nargs="*", default=[32])
    parser.add_argument("--seen", type=int, nargs="*", default=[256])
    parser.add_argument("--layers", type=int, default=4)
    args = parser.parse_args()
    for name in args.formats:
        for batch in args.batch:
            if args.what == "stack":
                stack(name, batch, args.layers)
                continue
            for seen in args.seen:
                step(name, batch, seen, args.layers)


if __name__ == "__main__":
    main()
