"""Exporting a folder larger than memory: resident bytes, and MB/s beside copying.

python benchmarks/stream.py [--gigabytes 4] [--format w4a16]

Shards of random bfloat16 matrices are made, then copied, then exported, in a folder that is
removed afterwards. Each runs in a process of its own, whose most resident memory is read.
"""

import argparse
import multiprocessing
import pathlib
import resource
import shutil
import tempfile
import time

import ml_dtypes
import numpy as np

SHAPE = (4096, 4096)
CONFIG = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}


def make(folder: pathlib.Path, gigabytes: float) -> None:
    """Shards of half a gigabyte; each matrix is another piece of the same random one."""
    from midtread.interop.huggingface import Tensor, write_tensors

    count = max(round(gigabytes * 1e9 / (2 * SHAPE[0] * SHAPE[1])), 1)
    rng = np.random.default_rng(0)
    whole = rng.standard_normal((SHAPE[0] + count, SHAPE[1]), np.float32)
    whole = whole.astype(ml_dtypes.bfloat16)

    class Tensors(dict):
        def about(self, name):
            return Tensor(SHAPE, whole.dtype)

        def __getitem__(self, name):
            i = int(name.split(".")[2])
            return whole[i : i + SHAPE[0]]

    names = [f"model.layers.{i}.mlp.up_proj.weight" for i in range(count)]
    write_tensors(
        folder, Tensors(dict.fromkeys(names)), CONFIG, shard_bytes=500_000_000
    )


def copy(source: pathlib.Path, path: pathlib.Path, format: str) -> None:
    shutil.copytree(source, path)


def export(source: pathlib.Path, path: pathlib.Path, format: str) -> None:
    from midtread.interop import export as others
    from midtread.interop.huggingface import Folder

    others.export(Folder(source), path, format)


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
    found = results.get()
    process.join()
    return found


def run(gigabytes: float, format: str) -> dict[str, tuple[float, int]]:
    """Seconds and resident bytes of copying and of exporting."""
    with tempfile.TemporaryDirectory() as place:
        root = pathlib.Path(place)
        measure(make, root / "float", gigabytes)
        return {
            work.__name__: measure(work, root / "float", root / work.__name__, format)
            for work in (copy, export)
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
