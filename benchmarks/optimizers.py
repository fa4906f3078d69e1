"""Does training with moments in few bits end where 32 bits do?

    python benchmarks/optimizers.py [steps] [seeds]

A small model on the standard library's source, AdamW in float32 and each of `optimizer_states`,
and bfloat16 weights that move by chance; the mean of the last tenth of the losses, over the
seeds, and how far seeds differ. Every run of a seed sees the same data from the same weights.
"""

import statistics
import sys

from midtread.lm import data, settings, step
from midtread.lm import model as models
from midtread.lm.config import Model, Training, section

BASE = [
    "tiny",
    "dtype=float32",
    "emb_dim=64",
    "mlp_dim=256",
    "head_dim=32",
    "batch_size=8",
]
BASE += ["learning_rate=0.003", "max_target_length=64"]
CASES = {
    "float32": [],
    "int8": ["optimizer_states=int8"],
    "fp8": ["optimizer_states=fp8"],
    "int4": ["optimizer_states=int4"],
    "int8, bf16 weights by chance": [
        "optimizer_states=int8", "weight_dtype=bfloat16", "weight_rounding=stochastic",
    ],
}  # fmt: skip


def final_loss(words: list[str], steps: int, seed: int) -> float:
    config = settings.load([*BASE, *words, f"steps={steps}", f"seed={seed}"])
    m, t = section(config, Model), section(config, Training)
    state, parts = step.initial(models.create(m, seed), t)
    run = step.make_step(m, t, parts, seed)
    batches, losses = data.batches(data.splits(config).train, config), []
    for _ in range(steps):
        state, metrics = run(state, next(batches))
        losses.append(float(metrics["loss"]))
    return statistics.mean(losses[-max(steps // 10, 1) :])


def main() -> None:
    steps, seeds = (
        int(x) for x in (*sys.argv[1:], *("1000", "3")[len(sys.argv) - 1 :])
    )
    base = None
    for name, words in CASES.items():
        found = [final_loss(words, steps, seed) for seed in range(seeds)]
        base = base or found
        mean = statistics.mean(found)
        apart = 100 * (mean / statistics.mean(base) - 1)
        spread = 100 * (max(found) - min(found)) / mean
        each = " ".join(f"{x:.4f}" for x in found)
        print(f"{name}: {mean:.4f} ({each}), {apart:+.2f}% of float32, seeds within {spread:.2f}%", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
