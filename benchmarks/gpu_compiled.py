"""Which kernels XLA makes of a program for an H200, compiled where there is none.

It needs JAX's plugin for CUDA (`pip install "jax[cuda12]"`, on Linux), and neither a GPU nor its
driver. XLA does not try out kernels, so those that it picks by time, such as cuBLAS's, may differ.

    python benchmarks/gpu_compiled.py stack w8 w8a8 fp8 --batch 1 16
    python benchmarks/gpu_compiled.py step int4w --batch 32

With MOSAIC_GPU_DUMP_TO=FOLDER and MOSAIC_GPU_DUMP_SASS_CTRL=1, and nvdisasm on the path, the folder
gets the instructions of the kernels in Mosaic, with the cycles that each is stalled for.
"""

import os

os.environ["JAX_PLATFORMS"] = (
    "cpu"  # nothing is run on a GPU, and nobody asks for its driver
)
os.environ["XLA_FLAGS"] = "--xla_gpu_autotune_level=0 " + os.environ.get(
    "XLA_FLAGS", ""
)

import argparse
import re

import jax
import jax.numpy as jnp
import numpy as np
from gpu_generate import ROWS
from gpu_serving import SERVING, Stack
from gpu_timing import KEY, D
from jax.experimental import topologies
from jax.sharding import (
    AbstractDevice,
    AbstractMesh,
    AxisType,
    Mesh,
    NamedSharding,
    PartitionSpec,
    use_abstract_mesh,
)

import midtread as mt
from midtread.kernels.environment import pretended
from midtread.lm import convert, decode, generate, model, settings
from midtread.lm.config import Model, section

H200 = """
platform_name: "CUDA"
device_description_str: "NVIDIA H200"
dnn_version_info { major: 9 minor: 8 }
gpu_device_info {
  cuda_compute_capability { major: 9 feature_extension: ACCELERATED_FEATURES }
  core_count: 132  fpus_per_core: 128  clock_rate_ghz: 1.98
  threads_per_warp: 32  threads_per_block_limit: 1024  threads_per_core_limit: 2048
  registers_per_core_limit: 65536  registers_per_block_limit: 65536
  shared_memory_per_block: 49152  shared_memory_per_core: 233472
  shared_memory_per_block_optin: 232448
  block_dim_limit_x: 2147483647  block_dim_limit_y: 65535  block_dim_limit_z: 65535
  memory_bandwidth: 4800000000000  l2_cache_size: 62914560  device_memory_size: 150000000000
}
"""
HERE = AbstractMesh(
    (1,), ("x",), (AxisType.Auto,),
    abstract_device=AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu"),
)  # fmt: skip
INSTRUCTION = re.compile(
    r"\s*(?:ROOT )?%?(\S+) = (\(.*?\)|\S+) (fusion|custom-call|copy)\("
)


def device():
    options = {"topology": "1x1x1", "target_config": H200}
    return topologies.get_topology_desc("h200", "cuda", **options).devices[0]


def compiled(program, arguments, on) -> str:
    """The text of a jitted function, compiled for arrays like these."""
    mesh = Mesh(np.array([on]), ("x",), axis_types=(AxisType.Auto,))
    where = NamedSharding(mesh, PartitionSpec())

    def shape(a):
        is_array = hasattr(a, "shape")
        return jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=where) if is_array else a

    with pretended("h200"), use_abstract_mesh(HERE):
        traced = program.trace(*jax.tree.map(shape, arguments))
        return traced.lower(lowering_platforms=("cuda",)).compile().as_text()


def stack(name: str, rows: int, layers: int):
    x, net = jax.ShapeDtypeStruct((rows, D), jnp.bfloat16), Stack(layers, gated=True)
    if name != "bf16":
        rule = mt.QuantizationRule(module_path=".*", **SERVING[name][0])
        net = mt.quantize_model(net, mt.PtqProvider([rule]))
    return jax.jit(net.apply), (jax.eval_shape(net.init, KEY, x), x)


def step(name: str, batch: int, layers: int):
    words = ["llama3-8b", f"num_decoder_layers={layers}", "weight_dtype=bfloat16"]
    config = settings.load([*words, "vocab_size=2048", *ROWS[name]])
    m = section(config, Model)
    with pretended("h200"):
        net = decode.prepare(convert.in_memory(config, model.create(m)))
        options = {"slots": batch, "length": 320}
        options["cache_format"] = generate.cache_format(config)
        server = decode.Server(net, m, **options)
    return server._program.go_on, (server._weights, server._slots, server._seed, 4)


def listing(text: str) -> list[str]:
    """The kernels of the part of a program that has most of them: a loop's body, if it has one."""
    parts = re.split(r"\n(?=%|ENTRY)", text)
    found = [
        m for m in map(INSTRUCTION.match, max(parts, key=_weight).splitlines()) if m
    ]
    return [f"{name:36} {shape[:90]}" for name, shape, _ in (m.groups() for m in found)]


def _weight(part: str) -> int:
    return sum(bool(INSTRUCTION.match(line)) for line in part.splitlines())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("step", "stack"))
    parser.add_argument("formats", nargs="+")
    parser.add_argument("--batch", type=int, nargs="*", default=[32])
    parser.add_argument("--layers", type=int, default=2)
    args = parser.parse_args()
    make, on = {"step": step, "stack": stack}[args.what], device()
    for name in args.formats:
        for batch in args.batch:
            kernels = listing(compiled(*make(name, batch, args.layers), on))
            print(
                f"## {name}, {batch} rows, {args.layers} layers: {len(kernels)} kernels"
            )
            print(*kernels, sep="\n", flush=True)


if __name__ == "__main__":
    main()
