"""Does training with moments in few bits end where 32 bits do?

    python benchmarks/optimizers.py [--steps 1000] [--seeds 0,1,2] [--cases "a;b"]
        [--results FILE] [key=value ...]

The model of `make demo` on the standard library's source, AdamW with each of
`optimizer_states`, embeddings in 8 bits too, and bfloat16 weights that move by chance. Every
case of a seed sees the same data from the same weights, so cases are compared seed by seed:
the held-out loss after the last step, and the mean of the last tenth of the training losses,
beside those of float32. A case with 8-bit moments is allowed 0.2%. `benchmarks/loop.py` says
what is needed; all of it takes 2 to 3 minutes on an H200.
"""

import argparse
import pathlib
import statistics

import jax
import loop

from midtread.lm import data
from midtread.lm.config import Config

SMALL = {"weight_dtype": "bfloat16", "weight_rounding": "stochastic"}
#   name: (what to set, how far its held-out loss may lie from float32's)
CASES = {
    "float32": ({}, None),
    "int8": ({"optimizer_states": "int8"}, 0.002),
    "fp8": ({"optimizer_states": "fp8"}, 0.002),
    "int8, embeddings too": (
        {"optimizer_states": "int8", "quantize_embedding_states": True}, 0.002,
    ),
    "int4 first moments": ({"optimizer_states": "int4"}, None),
    "int8, bf16 weights by chance": ({"optimizer_states": "int8", **SMALL}, None),
}  # fmt: skip


def tail(run: dict) -> float:
    """The mean of the last tenth of the training losses."""
    losses = run["losses"]
    return statistics.mean(losses[-max(len(losses) // 10, 1) :])


def row(name: str, runs: list[dict], base: list[dict]) -> str:
    """One line of the table: losses, and the mean over seeds of the gap to float32."""
    bound = CASES[name][1]
    held_out = [run["eval_loss"] for run in runs]
    gaps = [a["eval_loss"] / b["eval_loss"] - 1 for a, b in zip(runs, base)]
    train_gaps = [tail(a) / tail(b) - 1 for a, b in zip(runs, base)]
    gap = statistics.mean(gaps)
    verdict = "" if bound is None else (" ok" if abs(gap) <= bound else " MISSED")
    percent = lambda values: ", ".join(f"{100 * x:+.2f}%" for x in values)
    return (
        f"| {name} | {statistics.mean(held_out):.4f} | "
        f"{', '.join(f'{x:.4f}' for x in held_out)} | "
        f"{100 * gap:+.2f}%{verdict} | {percent(gaps)} | "
        f"{100 * statistics.mean(train_gaps):+.2f}% | "
        f"{statistics.median(run['ms_per_step'] for run in runs):.2f} |"
    )


HEAD = """\
| moments | held-out loss | each seed | gap to float32 | each seed | gap of training losses | ms a step |
|---|---|---|---|---|---|---|"""


def main() -> None:
    about = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=about)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--cases", default=";".join(CASES))
    parser.add_argument("--results", type=pathlib.Path)
    parser.add_argument("keys", nargs="*", help="sizes, e.g. emb_dim=64")
    options = parser.parse_args()
    chosen = list(dict.fromkeys(["float32", *options.cases.split(";")]))
    if unknown := [name for name in chosen if name not in CASES]:
        parser.error(f"no case is called {unknown[0]!r}: {'; '.join(CASES)}")
    sizes = {"steps": options.steps, **loop.read_words(options.keys)}
    configs = {name: Config(**sizes, **CASES[name][0]) for name in chosen}
    splits = data.splits(configs["float32"])
    seeds = [int(seed) for seed in options.seeds.split(",")]
    by, runs = loop.trainers(configs, splits), {}
    device = jax.devices()[0].device_kind
    where = f"{device}, jax {jax.__version__}"
    lines = [f"{where}: {options.steps} steps, seeds {options.seeds}", HEAD]
    for name in chosen:
        runs[name] = [
            loop.train(by[name], name, by[name].start(s), s, options.steps, 500)[1]
            for s in seeds
        ]
        lines.append(row(name, runs[name], runs["float32"]))
        loop.say(lines[-1])
    held_out = [run["eval_loss"] for run in runs["float32"]]
    apart = 100 * (max(held_out) / min(held_out) - 1)
    lines.append(f"Seeds of float32 lie within {apart:.2f}% of each other.")
    print("\n".join(lines))
    if options.results:
        options.results.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
