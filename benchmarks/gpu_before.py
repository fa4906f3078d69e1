"""Is this tree as fast as another one? Rows of benchmarks/gpu.py for both, on the same machine.

    JAX_PLATFORMS=cuda,cpu python benchmarks/gpu_before.py OTHER [row ...]

OTHER is a folder with `src` and `benchmarks` of another commit (`git archive COMMIT src benchmarks |
tar -x -C OTHER`). Each tree has a process for each row, which imports that tree alone. They compile
at once, on all cores; only when all have are their programs timed, one at a time, and the trees
take turns, so that what changes within a minute changes for both. Each number is the best of
TURNS. bfloat16's rows, which neither tree has a part in, show how far two numbers of the same
program lie apart; what XLA searches for may differ between two compilations, which
XLA_FLAGS=--xla_gpu_autotune_level=0 leaves out.

A row that fails says so, and the others go on. The row `tiny` needs no GPU: it tries this program.
"""

import argparse
import contextlib
import multiprocessing
import os
import pathlib
import sys
import time
from multiprocessing.connection import Connection

ROWS = ["train:int8", "train:fp8-delayed", "prefill",
        *(f"decode:w8:w4-g128:{rows}" for rows in (1, 16, 64))]  # fmt: skip
TURNS = 4
NEAR = 0.03
HERE = pathlib.Path(__file__).resolve().parents[1]


def work(tree: pathlib.Path, row: str, parent: Connection) -> None:
    """Compiles a row of a tree, sends its labels, then times the one whose number is sent."""
    try:
        programs = prepared(tree, row)
    except Exception as error:  # noqa: BLE001  a row that fails is a result
        parent.send(f"{type(error).__name__}: {str(error)[:300]}")
        return
    parent.send([*programs])
    with contextlib.suppress(EOFError):
        while True:
            parent.send(seconds(*programs[parent.recv()]))


def prepared(tree: pathlib.Path, row: str) -> dict[str, tuple]:
    """{label: (compiled program, arguments, calls)} of a row's cases.

    Its function asks gpu_timing for the time of one case after another, and makes a line of each.
    Here it is told nothing but that it is compiled.
    """
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    sys.path[:0] = [str(tree / "src"), str(tree / "benchmarks")]
    import gpu_timing
    import jax

    import midtread

    if tree not in pathlib.Path(midtread.__file__).parents:
        raise ImportError(f"{midtread.__file__} is not of {tree}")
    cases = []

    def measure(fn, *args, calls=20):
        cases.append(None)  # which it remains if this fails
        program = jax.jit(fn).lower(*args).compile()
        jax.block_until_ready(program(*args))
        cases[-1] = program, args, calls
        return float("nan"), 1.0, program

    gpu_timing.measure = measure
    name, *options = row.split(":")
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        if name == "tiny":
            lines = tiny(measure)
        else:
            import gpu  # which takes `measure` from gpu_timing

            lines = gpu.ROWS[name](*options)[2:]  # below a table's head
    cells = 2 if name in ("decode", "prefill") else 1  # of a line, that name its case
    programs = {}
    for line, case in zip(lines, cases, strict=True):
        words = [cell.strip() for cell in line.split("|")[1:]]
        if case is None:
            raise RuntimeError(f"{' '.join(words[: cells + 1])}")
        programs[" ".join([row.partition(":")[0], *words[:cells]])] = case
    return programs


def tiny(measure) -> list[str]:
    """A row that any device can run."""
    import jax.numpy as jnp

    import midtread as mt

    w = mt.quantize(jnp.ones((256, 128)), "int8", channelwise_axes=[1])
    measure(mt.dot, jnp.ones((64, 256)), w)
    return ["| int8 |"]


def seconds(program, args, calls: int) -> float:
    """Seconds of a call, after one that is not counted."""
    import jax

    jax.block_until_ready(program(*args))
    start = time.perf_counter()
    out = [program(*args) for _ in range(calls)][-1]
    jax.block_until_ready(out)
    return (time.perf_counter() - start) / calls


class Row:
    """The process of one row of one tree."""

    def __init__(self, tree: pathlib.Path, row: str):
        spawn = multiprocessing.get_context("spawn")
        self._end, theirs = spawn.Pipe()
        self._process = spawn.Process(target=work, args=(tree, row, theirs), daemon=True)  # fmt: skip
        self._process.start()
        theirs.close()
        self.labels, self.failure = [], None

    def wait(self, until: float) -> None:
        """Waits for the row's labels, or for the reason why there are none."""
        answer = self._answer(until)
        if isinstance(answer, list):
            self.labels = answer
        else:
            self.failure = answer

    def time(self, label: str) -> float:
        self._end.send(label)
        answer = self._answer(time.monotonic() + 60)
        if isinstance(answer, float):
            return answer
        raise RuntimeError(answer)

    def end(self) -> None:
        self._process.terminate()

    def _answer(self, until: float):
        if not self._end.poll(max(0, until - time.monotonic())):
            return "it took too long"
        try:
            return self._end.recv()
        except EOFError:
            self._process.join()
            return f"its process ended with {self._process.exitcode}"


def compare(row: str, before: Row, now: Row) -> None:
    """Prints a line for each case of a row, or why there is none."""
    for name, tree in (("before", before), ("now", now)):
        if tree.failure:
            print(f"| {row} | {name} failed: {tree.failure.replace('|', '/')} | | | |")
    for label in sorted({*before.labels} ^ {*now.labels}):
        print(f"| {label} | in one tree only | | | |")
    for label in [label for label in before.labels if label in now.labels]:
        try:
            turns = [(before.time(label), now.time(label)) for _ in range(TURNS)]
        except (RuntimeError, OSError) as error:
            print(f"| {label} | failed: {error} | | | |", flush=True)
            continue
        old, new = (min(times) for times in zip(*turns))
        verdict = "yes" if abs(new / old - 1) <= NEAR else "faster" if new < old else "NO"  # fmt: skip
        print(
            f"| {label} | {old * 1e3:.3f} | {new * 1e3:.3f} | {new / old:.3f} | {verdict} |",
            flush=True,
        )


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("other", type=pathlib.Path, help="a folder of another commit")
    parser.add_argument("rows", nargs="*", default=ROWS)
    parser.add_argument("--compile-seconds", type=float, default=240)
    args = parser.parse_args()
    start = time.monotonic()
    trees = args.other.resolve(), HERE
    pairs = {row: [Row(tree, row) for tree in trees] for row in args.rows}
    every = [row for pair in pairs.values() for row in pair]
    for row in every:
        row.wait(start + args.compile_seconds)
    for row in every:
        if row.failure:  # also of one that is still compiling, which would use the GPU
            row.end()
    print(f"compiled in {time.monotonic() - start:.0f} s\n")
    print(f"| | before ms | now ms | now / before | within {NEAR:.0%} |")
    print("|---" * 5 + "|", flush=True)
    for row, pair in pairs.items():
        compare(row, *pair)
        for tree in pair:
            tree.end()
    print(f"\nended after {time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main()
