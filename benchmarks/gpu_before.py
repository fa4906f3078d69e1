"""Is this tree as fast as another one? Rows of benchmarks/gpu.py for both, in one hour.

    python benchmarks/gpu_before.py OTHER [row ...]

OTHER is a folder with `src` and `benchmarks` of another commit (`git archive COMMIT src benchmarks |
tar -x -C OTHER`). A process for each tree compiles all programs, a thread for each row; then
the two take turns on the GPU, program by program, so that what changes within the hour changes
for both. Each number is the best of ROUNDS turns; bfloat16's rows, which neither tree has a part
in, show how far two numbers of the same program lie apart.
"""

import concurrent.futures
import json
import os
import pathlib
import subprocess
import sys
import threading

from jax import block_until_ready

ROWS = ["train:int8", "train:fp8", "train:fp8-delayed", "decode:w8:w4-g128", "decode:w8a8:fp8", "prefill"]  # fmt: skip
ROUNDS = 2
HERE = pathlib.Path(__file__).resolve().parents[1]


class Later:
    """A program that is being compiled by another thread; its users wait for it.

    Programs run one at a time: cuDNN records a graph when an attention is first called, and fails
    ("capturing stream has unjoined work") if another thread uses the GPU meanwhile.
    """

    _turn = threading.Lock()

    def __init__(self, program):
        self._program = program

    def compiled(self):
        return self._program.result()

    def __call__(self, *args):
        program = self.compiled()
        with self._turn:
            return block_until_ready(program(*args))

    def memory_analysis(self):
        return self.compiled().memory_analysis()


def work(tree: pathlib.Path, rows: list[str]) -> None:
    """Compiles a tree's rows, prints their labels, then times the one that stdin names."""
    import gpu_timing  # this tree's, by which both are timed
    import jax

    sys.path.insert(0, str(tree / "benchmarks"))

    row_of, pool = threading.local(), concurrent.futures.ThreadPoolExecutor(8)

    def measure(fn, *args, calls=20):
        lowered = jax.jit(fn).lower(*args)
        program = Later(pool.submit(lowered.compile))
        row_of.programs.append((program, args, calls))
        return float("nan"), 1.0, program

    gpu_timing.measure = measure
    import gpu

    def prepared(row: str) -> dict[str, tuple]:
        """Returns {label: (program, arguments, calls)} of a row's cases."""
        row_of.programs, (name, *options) = [], row.split(":")
        lines = gpu.ROWS[name](*options)[2:]  # below a table's head
        cells = [line.split("|")[1:3] for line in lines if "failed:" not in line]
        named = [[cell.strip() for cell in pair if "nan" not in cell] for pair in cells]
        labels = [" ".join([name, *words]) for words in named]
        for program, args, _ in row_of.programs:
            program(*args)
        compiled = [(program.compiled(), *call) for program, *call in row_of.programs]
        return dict(zip(labels, compiled, strict=True))

    programs = {}
    with concurrent.futures.ThreadPoolExecutor(len(rows)) as threads:
        for cases in threads.map(prepared, rows):
            programs |= cases
    print(json.dumps([*programs]), flush=True)
    for label in sys.stdin:
        print(json.dumps(gpu_timing.seconds(*programs[label.strip("\n")])), flush=True)


class Tree:
    """The process of one tree."""

    def __init__(self, tree: pathlib.Path, rows: list[str]):
        path = [str(tree / "src"), os.environ.get("PYTHONPATH", "")]
        command = [sys.executable, __file__, "--of", str(tree), *rows]
        self._process = subprocess.Popen(
            command,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def read(self):
        """The next line of JSON; a row may print its own lines before."""
        for line in self._process.stdout:
            if line.startswith("[") or line[0].isdigit():
                return json.loads(line)
        raise RuntimeError(f"{self._process.args} ended: {self._process.wait()}")

    def time(self, label: str) -> float:
        print(label, file=self._process.stdin, flush=True)
        return self.read()


def main():
    other, *rows = sys.argv[1:]
    rows = rows or ROWS
    trees = [Tree(pathlib.Path(other).resolve(), rows), Tree(HERE, rows)]
    labels, here = (tree.read() for tree in trees)
    print(f"not in both trees: {sorted(set(labels) ^ set(here)) or 'none'}\n")
    print("| row | before ms | now ms | now / before |\n" + "|---" * 4 + "|")
    for label in [label for label in labels if label in here]:
        turns = [[tree.time(label) for tree in trees] for _ in range(ROUNDS)]
        before, now = (min(times) for times in zip(*turns))
        print(
            f"| {label} | {before * 1e3:.3f} | {now * 1e3:.3f} | {now / before:.3f} |",
            flush=True,
        )


if __name__ == "__main__":
    if sys.argv[1] == "--of":
        work(pathlib.Path(sys.argv[2]), sys.argv[3:])
    else:
        main()
