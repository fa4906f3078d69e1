"""Does the FP8 recipe converge as bfloat16 does? A study in miniature, on one GPU.

    python benchmarks/convergence.py [--seeds 0,1] [--out FOLDER] [key=value ...]

The model is DeepSeek-V3's in small: latent attention, shared and routed experts. The recipe
is the shipped `deepseek-v3-fp8`, on one device. All on the embedded corpus:

    bf16       |-------- 1,200 steps --------|-- 400 more --|
    resumed                 its state        '-- 400 in fp8-|      weights and moments
    scratch    |------------- 1,600 steps in fp8 -----------|

The schedule, the data and their order are the same at every step, so a gap is the format's:

    (fp8 - bf16) / bf16        of held-out losses at the end, at most 0.5% in both

Time to target is that of training steps until the held-out loss is within 2% of where bf16
ends; compiling and judging are not counted. convergence-<seed>.json is written after
every run, then convergence.md and convergence.svg of all seeds in the folder.
"""

import argparse
import json
import pathlib
import statistics

import jax
import loop
import numpy as np

from midtread.lm import data, step
from midtread.lm.config import Config

MODEL = {
    **loop.shipped("tiny-deepseek"),
    "emb_dim": 512, "num_decoder_layers": 4, "num_query_heads": 8, "num_kv_heads": 8,
    "mlp_dim": 1536, "q_lora_rank": 256, "kv_lora_rank": 128, "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32, "v_head_dim": 64, "num_experts": 8, "num_experts_per_tok": 2,
    "moe_mlp_dim": 512, "mtp_num_layers": 0, "max_target_length": 256, "batch_size": 32,
    "learning_rate": 6e-4, "eval_steps": 16,
}  # fmt: skip
NOT_ALONE = {"mesh", "fp8_weight_gather"}  # a single device gathers nothing
RECIPE = {
    k: v for k, v in loop.shipped("deepseek-v3-fp8").items() if k not in NOT_ALONE
}
LIMIT, NEAR = 0.005, 1.02
GAPS = ("resumed", "scratch")


class Study:
    """The runs of one seed, of which those that are in its book are done."""

    def __init__(self, args: argparse.Namespace, sizes: dict, seed: int, splits):
        what = {**sizes, "pretrain": args.pretrain}
        self.seed, self.args, self.sizes, self.splits = seed, args, sizes, splits
        self.book = loop.Book(args.out / f"convergence-{seed}.json", what, splits.about)
        self.state = args.out / f"pretrained-{seed}.npz"

    def _go(self, name: str, by: loop.Trainer, start: step.State, stop: int):
        every = loop.AT_ONCE
        state, run = loop.train(by, name, start, self.seed, stop, every)
        self.book.keep(name, run)
        return state

    def bf16(self, by: loop.Trainer) -> None:
        """Pretraining, whose state is kept, and the rest."""
        if not {"pretrain", "bf16"} - set(self.book.runs):
            return
        state = self._go("pretrain", by, by.start(self.seed), self.args.pretrain)
        np.savez(self.state, *jax.tree.leaves(state))
        self._go("bf16", by, state, self.args.steps)

    def fp8(self, by: loop.Trainer) -> None:
        fresh = by.start(self.seed)
        if "resumed" not in self.book.runs:
            held = np.load(self.state)
            leaves, structure = jax.tree.flatten(fresh)
            assert [x.shape for x in leaves] == [held[n].shape for n in held.files]
            state = jax.tree.unflatten(structure, [held[n] for n in held.files])
            self._go("resumed", by, jax.device_put(state), self.args.steps)
        if "scratch" not in self.book.runs:
            self._go("scratch", by, fresh, self.args.steps)


def whole(runs: dict[str, dict]) -> dict[str, dict]:
    """The curves from their first step: bf16's begins with pretraining."""
    before, after = runs["pretrain"], runs["bf16"]
    spent = before["judged"][-1][1]
    later = [(at, spent + s, loss) for at, s, loss in after["judged"]]
    joined = {
        **after,
        "first": 0,
        "losses": before["losses"] + after["losses"],
        "judged": [*before["judged"], *later],
    }
    return {"bf16": joined, **{name: runs[name] for name in GAPS if name in runs}}


def time_to(target: float, run: dict) -> float | None:
    return next((s for _, s, loss in run["judged"] if loss <= target), None)


def _times(books: list[dict], pick) -> str:
    """Seconds to target of a run of each seed."""
    found = [
        time_to(NEAR * b["runs"]["bf16"]["eval_loss"], pick(b["runs"])) for b in books
    ]
    return ", ".join("-" if t is None else f"{t:.1f}" for t in found)


def table(books: list[dict]) -> str:
    what = books[0]["what"]
    count = {"bf16": what["steps"], "scratch": what["steps"]}
    count["resumed"] = what["steps"] - what["pretrain"]
    seeds = [whole(b["runs"]) for b in books]
    mean = lambda name: statistics.mean(s[name]["eval_loss"] for s in seeds)
    lines = [
        f"{loop.title(books[0])} Seeds: {len(books)}.",
        "",
        "| run | steps | held-out loss, mean | each seed | gap to bf16 | s to target | ms per step | compiling, s |",
        "|---" * 8 + "|",
    ]
    for name in (n for n in count if all(n in s for s in seeds)):
        gap = mean(name) / mean("bf16") - 1
        verdict = "" if name == "bf16" else " ok" if gap <= LIMIT else " MISSED"
        each = ", ".join(f"{s[name]['eval_loss']:.4f}" for s in seeds)
        when = _times(books, lambda runs, name=name: whole(runs)[name])
        if name == "resumed":
            when += f" (bf16 from there: {_times(books, lambda runs: runs['bf16'])})"
        speed = statistics.median(s[name]["ms_per_step"] for s in seeds)
        wait = statistics.median(s[name]["compile_seconds"] for s in seeds)
        lines.append(
            f"| {name} | {count[name]} | {mean(name):.4f} | {each} | "
            f"{100 * gap:+.2f}%{verdict} | {when} | {speed:.1f} | {wait:.0f} |"
        )
    return "\n".join(lines) + "\n"


def report(out: pathlib.Path) -> None:
    held = [json.loads(f.read_text()) for f in sorted(out.glob("convergence-*.json"))]
    held = [b for b in held if "bf16" in b["runs"]]
    text = table(held)
    (out / "convergence.md").write_text(text)
    seeds = [whole(b["runs"]) for b in held]
    names = [n for n in ("bf16", *GAPS) if all(n in s for s in seeds)]
    loop.draw({n: [s[n] for s in seeds] for n in names}, out / "convergence.svg")
    print(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", default="0,1")
    parser.add_argument("--steps", type=int, default=1600)
    parser.add_argument("--pretrain", type=int, default=1200)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("."))
    parser.add_argument("keys", nargs="*", help="sizes, e.g. emb_dim=64")
    args = parser.parse_args()
    sizes = {**MODEL, "steps": args.steps, **loop.read_words(args.keys)}
    plain, low = Config(**sizes), Config(**sizes, **RECIPE)
    if args.pretrain % loop.at_once(plain.steps):
        raise SystemExit(f"--pretrain: a multiple of {loop.at_once(plain.steps)}.")
    splits = data.splits(plain)
    studies = [Study(args, sizes, int(s), splits) for s in args.seeds.split(",")]
    studies = [s for s in studies if {"pretrain", "bf16", *GAPS} - set(s.book.runs)]
    by = loop.trainers({"bf16": plain, "fp8": low} if studies else {}, splits)
    for study in studies:  # seed by seed: what is there when killed can be compared
        study.bf16(by["bf16"])
        study.fp8(by["fp8"])
    report(args.out)


if __name__ == "__main__":
    main()
