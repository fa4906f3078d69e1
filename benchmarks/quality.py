"""Quality: does training in few bits end where bf16 does?

One small model, the embedded corpus, the same steps, data and seeds for every format; the
held-out loss of each beside bf16's. Three seeds say what chance does.

    python benchmarks/quality.py [--steps 1000] [--out FOLDER] [key=value ...]

Needs jax and flax alone (plots if matplotlib is there). Writes quality.json after every
run, so that a killed one goes on, then quality.md and quality.svg.
"""

import argparse
import dataclasses
import functools
import json
import pathlib
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import midtread as mt
from midtread.lm import build, data, model, step
from midtread.lm.config import Config, Model, Training, section

# name: (what to set, how far its held-out loss may lie from bf16's)
FORMATS = {
    "bf16": ({}, None),
    "int8": ({"quantization": "int8", "use_qwix_quantization": True}, 0.005),
    "fp8": ({"quantization": "fp8_full"}, 0.005),
    "nvfp4": ({"quantization": "te_nvfp4"}, 0.02),
    "mxfp4": ({"mxfp4": True}, 0.02),
}
MODEL = {
    "emb_dim": 256, "num_decoder_layers": 4, "num_query_heads": 4, "num_kv_heads": 4,
    "head_dim": 64, "mlp_dim": 768, "max_target_length": 256, "batch_size": 32,
    "learning_rate": 2e-3,
}  # fmt: skip
CHUNK = 50  # steps in one call: the host is out of the way


def mxfp4_rules():
    """MXFP4 in all three matmuls: 32 to a tile, gradients rounded stochastically."""
    rows = mt.per_channel("mxfp4")
    noisy = mt.per_channel("mxfp4", rounding="stochastic")
    recipe = mt.Recipe(mt.Fwd(rows, rows), mt.Dlhs(noisy, rows), mt.Drhs(rows, noisy))
    return ({"module_path": "decoder/.*layers.*", "op_names": ("dot_general",), "recipe": recipe},)  # fmt: skip


def configure(fields: dict, steps: int, seed: int, extra: dict) -> Config:
    fields = dict(fields)
    if fields.pop("mxfp4", False):
        fields["quant"] = mxfp4_rules()
    base = {**MODEL, "steps": steps, "seed": seed, "eval_steps": 16, **extra}
    return Config(**{**base, **fields})


@functools.partial(jax.jit, static_argnums=0)
def chunk(how: step.How, state: step.State, random, batches):
    one = lambda state, batch: step.run(how, state, random, batch)
    return jax.lax.scan(one, state, batches)


def train_once(config: Config, net: nnx.Module, splits: data.Splits) -> dict:
    """Losses of a run, and its held-out loss at the end. `net` is what every seed of a
    format shares, so that it is compiled once; its weights are made anew."""
    m, t = section(config, Model), section(config, Training)
    nnx.update(net, nnx.state(model.create(m, config.seed), nnx.Param))
    state, parts = step.initial(net, t)
    how = step.How(m, t, parts.graph, 0, None)
    order = np.random.default_rng(config.seed).permutation(len(splits.train))
    losses, seconds = [], 0.0
    for first in range(0, config.steps, CHUNK):
        count = min(CHUNK, config.steps - first)
        start = first * config.batch_size
        rows = [
            order[(start + i) % len(order)] for i in range(count * config.batch_size)
        ]
        flat = data.stack([splits.train[r] for r in rows])
        shape = (count, config.batch_size, config.max_target_length)
        batches = {k: jnp.asarray(v.reshape(shape)) for k, v in flat.items()}
        started = time.perf_counter()
        state, metrics = chunk(how, state, parts.random, batches)
        losses += np.asarray(metrics["loss"]).tolist()
        seconds += (time.perf_counter() - started) * (first > 0)
    judged = step.mean_loss(
        step.make_eval(parts),
        state.learned,
        state.kept,
        data.held_out(splits.held_out, config),
    )
    per_step = seconds / max(config.steps - CHUNK, 1)
    return {"losses": losses, "eval_loss": judged, "ms_per_step": 1000 * per_step}


def table(done: dict, steps: int, about: dict, seeds: int) -> str:
    mean = lambda name: statistics.mean(r["eval_loss"] for r in done[name])
    lines = [
        (
            f"{jax.devices()[0].device_kind}, jax {jax.__version__}, {steps} steps, {seeds} "
            f"seeds; corpus of {about['bytes']:,} bytes, sha256 {about['sha256'][:12]}."
        ),
        "",
        "| format | held-out loss, mean of seeds | each seed | gap to bf16 | allowed | ms per step |",
        "|---|---|---|---|---|---|",
    ]
    for name, runs in done.items():
        gap = mean(name) / mean("bf16") - 1
        bound = FORMATS[name][1]
        allowed = "" if bound is None else f"{100 * bound:.1f}%"
        verdict = "" if bound is None else (" ok" if gap <= bound else " MISSED")
        each = ", ".join(f"{r['eval_loss']:.4f}" for r in runs)
        speed = statistics.mean(r["ms_per_step"] for r in runs)
        lines.append(
            f"| {name} | {mean(name):.4f} | {each} | {100 * gap:+.2f}%{verdict} | "
            f"{allowed} | {speed:.1f} |"
        )
    return "\n".join(lines) + "\n"


def draw(done: dict, path: pathlib.Path) -> None:
    try:
        from midtread.report import plot
    except ImportError:
        return
    curves = {
        name: [
            {"step": i, "loss": statistics.mean(r["losses"][i] for r in runs)}
            for i in range(len(runs[0]["losses"]))
        ]
        for name, runs in done.items()
    }
    for name, lines in curves.items():
        lines[-1]["eval_loss"] = statistics.mean(r["eval_loss"] for r in done[name])
    try:
        path.write_text(plot.svg(curves))
    except ImportError:
        print("no matplotlib: no picture")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--formats", default=",".join(FORMATS))
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("."))
    parser.add_argument("keys", nargs="*", help="sizes, e.g. emb_dim=64")
    args = parser.parse_args()
    kinds = {f.name: type(f.default) for f in dataclasses.fields(Config)}
    extra = {k: kinds[k](v) for k, v in (word.split("=") for word in args.keys)}
    args.out.mkdir(parents=True, exist_ok=True)
    file = args.out / "quality.json"
    what = {"steps": args.steps, **MODEL, **extra}
    held = json.loads(file.read_text()) if file.exists() else {"what": what, "runs": {}}
    if held["what"] != what:
        raise SystemExit(f"{file} is of other sizes: choose another --out.")
    splits = data.splits(configure({}, args.steps, 0, extra))
    for name in args.formats.split(","):
        runs = held["runs"].setdefault(name, [])
        first = configure(FORMATS[name][0], args.steps, 0, extra)
        net = build.for_training(first, model.create(section(first, Model)))
        for seed in range(len(runs), args.seeds):
            started = time.perf_counter()
            config = dataclasses.replace(first, seed=seed)
            runs.append(train_once(config, net, splits))
            took = time.perf_counter() - started
            loss = runs[-1]["eval_loss"]
            print(f"{name}, seed {seed}: {loss:.4f} in {took:.0f} s", flush=True)
            file.write_text(json.dumps(held))
    text = table(held["runs"], args.steps, splits.about, args.seeds)
    (args.out / "quality.md").write_text(text)
    draw(held["runs"], args.out / "quality.svg")
    print(text)


if __name__ == "__main__":
    main()
