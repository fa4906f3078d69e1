"""How fast does the trainer's data come? Tokens a second of batches, against what a step eats.

    python benchmarks/loader.py [--megabytes 64] [--workers 0,2] [--seconds 5] [--step N]

Writes the embedded corpus, repeated, as text, jsonl and parquet into a temporary folder, and
draws batches of 4 x 4,096 tokens from each as `midtread train` does: files larger than
dataset_memory_mb (1 here) are streamed. Tokens are bytes, and those of a BPE tokenizer of 8,192
tokens that is trained on the corpus, where `tokenizers` is installed. --step: tokens a second
that a step eats; the default is 135,000, four layers of Llama-8B in int8 on an H200, ten times
what all of Llama-3-8B eats there.
"""

import argparse
import itertools
import json
import os
import pathlib
import resource
import tempfile
import time

from midtread.lm import data, settings


def write(folder: pathlib.Path, megabytes: int) -> None:
    """Writes the same documents as one file of each kind."""
    texts, size = [], 0
    for text in itertools.cycle(data.corpus().texts):
        texts.append(text)
        size += len(text)
        if size > megabytes * 2**20:
            break
    (folder / "a.txt").write_text("\n".join(texts))
    with (folder / "a.jsonl").open("w") as file:
        file.writelines(json.dumps({"text": t}) + "\n" for t in texts)
    try:
        import pyarrow
        import pyarrow.parquet

        table = pyarrow.table({"text": texts})
        pyarrow.parquet.write_table(table, folder / "a.parquet", row_group_size=256)
    except ImportError:
        print("no pyarrow: no parquet")


def bpe(folder: pathlib.Path) -> list[str]:
    """Trains a tokenizer, and returns the words that ask for it."""
    try:
        import tokenizers
    except ImportError:
        return []
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=8192, special_tokens=["</s>"], show_progress=False
    )
    made.train_from_iterator(data.corpus().texts[:400], trainer)
    file = folder / "tokenizer.json"
    made.save(str(file))
    return ["tokenizer_type=huggingface", f"tokenizer_path={file}", "vocab_size=8192"]


def rate(words: list[str], seconds: float) -> tuple[float, float]:
    """Tokens a second, without the first batches, and tokens a CPU second of this process."""
    config = settings.load(["dataset_memory_mb=1", "batch_size=4",
                            "max_target_length=4096", "eval_steps=1", *words])  # fmt: skip
    batches = data.batches(data.splits(config).train, config)
    for _ in range(8):  # what was made ahead
        next(batches)
    started, cpu, count = time.perf_counter(), time.process_time(), 0
    while time.perf_counter() - started < seconds:
        count += next(batches)["inputs"].size
    took = time.perf_counter() - started
    return count / took, count / (time.process_time() - cpu)


def main() -> None:
    about = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=about)
    parser.add_argument("--megabytes", type=int, default=64)
    parser.add_argument("--workers", default="0,2")
    parser.add_argument("--seconds", type=float, default=5)
    parser.add_argument("--step", type=float, default=135_000)
    options = parser.parse_args()
    print(f"{os.cpu_count()} cores, {options.megabytes} MB, batches of 4 x 4,096")
    print("| file | tokens | workers | tokens/s | tokens a CPU second | x a step |")
    print("|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        write(folder, options.megabytes)
        kinds = {"text": "txt", "jsonl": "jsonl", "parquet": "parquet"}
        for tokens, words in {"bytes": [], "BPE": bpe(folder)}.items():
            if tokens == "BPE" and not words:
                continue
            for kind, suffix in kinds.items():
                file = folder / f"a.{suffix}"
                for workers in map(int, options.workers.split(",")):
                    if not file.exists():
                        continue
                    asked = [f"dataset_type={kind}", f"dataset_path={file}", *words]
                    words_now = [*asked, f"grain_worker_count={workers}"]
                    found, per_cpu = rate(words_now, options.seconds)
                    own = f"{per_cpu:,.0f}" if not workers else "-"
                    print(f"| {kind} | {tokens} | {workers} | {found:,.0f} | {own} | "
                          f"{found / options.step:.1f} |", flush=True)  # fmt: skip
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
    print(f"resident at the peak: {peak:,.0f} MB")


if __name__ == "__main__":
    main()
