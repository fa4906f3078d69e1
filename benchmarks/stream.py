"""Importing and quantizing a folder larger than memory: resident bytes, and MB/s beside
copying.

python benchmarks/stream.py [--gigabytes 4] [--format w4a16]

Shards of a Llama with random bfloat16 weights are made, then copied, then imported by
`midtread import`, then quantized by `midtread export`, in a folder that is removed
afterwards. Each runs in a process of its own, whose most resident memory is read.
"""

import argparse
import multiprocessing
import os
import pathlib
import resource
import shutil
import tempfile
import time

import ml_dtypes
import numpy as np

WIDTH, INNER, WORDS = 2048, 8192, 32000
CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": WIDTH,
    "intermediate_size": INNER, "num_attention_heads": 16, "num_key_value_heads": 16,
    "vocab_size": WORDS, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
    "max_position_embeddings": 2048, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip
LAYER = {
    "input_layernorm": (WIDTH,), "post_attention_layernorm": (WIDTH,),
    "self_attn.q_proj": (WIDTH, WIDTH), "self_attn.k_proj": (WIDTH, WIDTH),
    "self_attn.v_proj": (WIDTH, WIDTH), "self_attn.o_proj": (WIDTH, WIDTH),
    "mlp.gate_proj": (INNER, WIDTH), "mlp.up_proj": (INNER, WIDTH),
    "mlp.down_proj": (WIDTH, INNER),
}  # fmt: skip
ENDS = {"model.embed_tokens": (WORDS, WIDTH), "model.norm": (WIDTH,), "lm_head": (WORDS, WIDTH)}  # fmt: skip


def make(root: pathlib.Path, gigabytes: float, format: str) -> None:
    """Shards of half a gigabyte; each tensor is another piece of the same random numbers."""
    from midtread.interop.huggingface import Tensor, write_tensors

    size = lambda shapes: 2 * sum(int(np.prod(shape)) for shape in shapes.values())
    layers = max(round((gigabytes * 1e9 - size(ENDS)) / size(LAYER)), 1)
    shapes = {f"{name}.weight": shape for name, shape in ENDS.items()}
    for n in range(layers):
        shapes |= {f"model.layers.{n}.{k}.weight": shape for k, shape in LAYER.items()}
    rng = np.random.default_rng(0)
    numbers = rng.standard_normal(WORDS * WIDTH + 2 * len(shapes), np.float32)
    numbers = numbers.astype(ml_dtypes.bfloat16)

    class Tensors(dict):
        def about(self, name):
            return Tensor(shapes[name], numbers.dtype)

        def __getitem__(self, name):
            first = 2 * list(shapes).index(name)
            size = int(np.prod(shapes[name]))
            return numbers[first : first + size].reshape(shapes[name])

    config = {**CONFIG, "num_hidden_layers": layers}
    write_tensors(
        root / "float", Tensors(dict.fromkeys(shapes)), config, shard_bytes=500_000_000
    )


def copy(root: pathlib.Path, gigabytes: float, format: str) -> None:
    shutil.copytree(root / "float", root / "copied")


def imported(root: pathlib.Path, gigabytes: float, format: str) -> None:
    _midtread(root, "import", "float", "run_name=made")


def quantized(root: pathlib.Path, gigabytes: float, format: str) -> None:
    _midtread(root, "export", "runs/made", f"format={format}")


def _midtread(root: pathlib.Path, *words: str) -> None:
    from midtread import cli

    os.chdir(root)
    if cli.main(list(words)):
        raise SystemExit(f"midtread {' '.join(words)} failed")


def _measured(results, work, *args) -> None:
    start = time.perf_counter()
    work(*args)
    seconds = time.perf_counter() - start
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    results.put((seconds, most))


def measure(work, *args) -> tuple[float, int]:
    """Seconds and most resident bytes of some work, in a process of its own."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    process = context.Process(target=_measured, args=(results, work, *args))
    process.start()
    process.join()
    if process.exitcode:
        raise RuntimeError(f"{work.__name__} ended with {process.exitcode}")
    return results.get()


def run(gigabytes: float, format: str) -> dict[str, tuple[float, int]]:
    """Seconds and resident bytes of copying, importing and quantizing."""
    with tempfile.TemporaryDirectory() as place:
        given = pathlib.Path(place), gigabytes, format
        measure(make, *given)
        return {
            work.__name__: measure(work, *given) for work in (copy, imported, quantized)
        }


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=4.0)
    parser.add_argument("--format", default="w4a16")
    asked = parser.parse_args()
    print(f"{asked.gigabytes} GB of bfloat16, format={asked.format}")
    for name, (seconds, most) in run(asked.gigabytes, asked.format).items():
        rate = asked.gigabytes * 1e3 / seconds
        print(f"{name:<8} {rate:8,.0f} MB/s   {most / 1e9:.2f} GB resident at most")


if __name__ == "__main__":
    main()
