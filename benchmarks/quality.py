"""Quality: does training in few bits end where bf16 does?

One small model, the embedded corpus, the same steps, data and seeds for every format; the
held-out loss of each beside bf16's. Three seeds say what chance does.

    python benchmarks/quality.py [--steps 1000] [--seeds 0,1,2] [--out FOLDER] [key=value ...]

Each seed has a file of its own, quality-<seed>.json, so that seeds may run at the same time
(`--seeds 0 & --seeds 1 & ...`, one folder). Whoever ends writes the table, quality.md, and
the picture, quality.svg, of what the folder holds by then. `benchmarks/loop.py` says what is
needed.
"""

import argparse
import json
import pathlib
import statistics

import loop

import midtread as mt
from midtread.lm import data
from midtread.lm.config import Config

# name: (what to set, or rules, and how far its held-out loss may lie from bf16's)
FORMATS = {
    "bf16": ({}, None),
    "int8": ({"quantization": "int8", "use_qwix_quantization": True}, 0.005),
    "int8-aqt": ({"quantization": "int8"}, 0.005),  # gradients rounded stochastically
    "fp8": ({"quantization": "fp8_full"}, 0.005),
    # all three matmuls of all layers
    "nvfp4": ({"quantization": "te_nvfp4"}, 0.02),
    "mxfp4": (lambda: in_layers(four_bits("mxfp4")), 0.02),
    # of MLPs, with attention's projections in fp8; activations in mxfp8
    "nvfp4 in MLPs": (lambda: in_mlps(four_bits("nvfp4")), 0.02),
    "mxfp4 in MLPs, a8": (lambda: in_mlps(four_bits("mxfp4", x="mxfp8")), 0.02),
    # both backward matmuls of all layers, forward in fp8 (arXiv 2502.20586)
    "mxfp4 backward": (lambda: in_layers(four_bits("mxfp4", fwd="e4m3")), 0.02),
}
MODEL = {
    "emb_dim": 256, "num_decoder_layers": 4, "num_query_heads": 4, "num_kv_heads": 4,
    "head_dim": 64, "mlp_dim": 768, "max_target_length": 256, "batch_size": 32,
    "learning_rate": 2e-3, "eval_steps": 16,
}  # fmt: skip


def four_bits(qtype: str, x: str | None = None, fwd: str | None = None) -> mt.Recipe:
    """Tiles along every sum, gradients rounded stochastically; `x`: another format for
    activations, `fwd`: another for the forward pass."""
    row = mt.per_channel(qtype)
    noisy = mt.per_channel(qtype, rounding="stochastic")
    acts = mt.per_channel(x or qtype)
    forward = mt.Fwd(*[mt.per_channel(fwd)] * 2) if fwd else mt.Fwd(acts, row)
    return mt.Recipe(forward, mt.Dlhs(noisy, row), mt.Drhs(acts, noisy))


def in_layers(recipe: mt.Recipe, within: str = "") -> tuple[dict, ...]:
    path = f"decoder/.*layers.*{within}"
    return ({"module_path": path, "op_names": ("dot_general",), "recipe": recipe},)


def in_mlps(recipe: mt.Recipe) -> tuple[dict, ...]:
    """Attention's projections are half of the damage and a third of the weights: in fp8."""
    return in_layers(recipe, "mlp.*") + in_layers(mt.recipe("qwix_fp8_full"))


def configure(name: str, sizes: dict) -> Config:
    fields = FORMATS[name][0]
    return Config(**sizes, **({"quant": fields()} if callable(fields) else fields))


def table(books: list[dict]) -> str:
    found = lambda name: [b["runs"][name] for b in books if name in b["runs"]]
    mean = lambda name: statistics.mean(r["eval_loss"] for r in found(name))
    lines = [
        f"{loop.title(books[0])} {books[0]['what']['steps']} steps, {len(books)} seeds.",
        "",
        "| format | held-out loss, mean of seeds | each seed | gap to bf16 | allowed | ms per step | compiling, s |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, (_, bound) in FORMATS.items():
        if not found(name) or not found("bf16"):
            continue
        gap = mean(name) / mean("bf16") - 1
        allowed = "" if bound is None else f"{100 * bound:.1f}%"
        verdict = "" if bound is None else (" ok" if gap <= bound else " MISSED")
        each = ", ".join(f"{r['eval_loss']:.4f}" for r in found(name))
        speed, wait = (
            statistics.median(r[key] for r in found(name))
            for key in ("ms_per_step", "compile_seconds")
        )
        lines.append(
            f"| {name} | {mean(name):.4f} | {each} | {100 * gap:+.2f}%{verdict} | "
            f"{allowed} | {speed:.1f} | {wait:.0f} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--formats", default=";".join(FORMATS), help="a;b;...")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("."))
    parser.add_argument("keys", nargs="*", help="sizes, e.g. emb_dim=64")
    args = parser.parse_args()
    sizes = {**MODEL, "steps": args.steps, **loop.read_words(args.keys)}
    splits = data.splits(configure("bf16", sizes))
    books = {
        int(seed): loop.Book(args.out / f"quality-{seed}.json", sizes, splits.about)
        for seed in args.seeds.split(",")
    }
    formats = args.formats.split(";")
    missing = [(s, n) for s, b in books.items() for n in formats if n not in b.runs]
    configs = {n: configure(n, sizes) for n in dict.fromkeys(n for _, n in missing)}
    by = loop.trainers(configs, splits)
    for seed, name in missing:
        start = by[name].start(seed)
        _, run = loop.train(by[name], name, start, seed, args.steps, every=200)
        books[seed].keep(name, run)
    files = sorted(args.out.glob("quality-*.json"))
    held = [json.loads(file.read_text()) for file in files]
    text = table(held)
    (args.out / "quality.md").write_text(text)
    curves = {n: [b["runs"][n] for b in held if n in b["runs"]] for n in FORMATS}
    loop.draw({n: runs for n, runs in curves.items() if runs}, args.out / "quality.svg")
    print(text)


if __name__ == "__main__":
    main()
