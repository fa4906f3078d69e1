"""Does the FP8 recipe converge as bfloat16 does? A study in miniature, on one GPU.

    python benchmarks/convergence.py [folder, default runs/convergence] [--quick]

As the published study does it: pretrain in bfloat16, go on from that checkpoint in
bfloat16 and in the recipe, and train both from scratch besides, all on the embedded corpus;
judge by the loss on the held-out split, and by the time until a target loss. The model is
DeepSeek-V3's in small: latent attention, shared and routed experts. The gap is

    (fp8 - bf16) / bf16        of held-out losses, at most 0.5% in both

Planned for six minutes on an H200: 4,000 steps of 32 x 256 tokens in all. A table is
printed and kept in <folder>/convergence.md. `--quick` runs a few steps, to see that it runs.
"""

import dataclasses
import json
import pathlib
import sys
import time

import jax

from midtread.lm import settings
from midtread.lm.config import Config
from midtread.lm.train import read, train

MODEL = ["tiny-deepseek", "emb_dim=512", "num_decoder_layers=4", "num_query_heads=8",
         "num_kv_heads=8", "mlp_dim=1536", "q_lora_rank=256", "kv_lora_rank=128",
         "qk_nope_head_dim=64", "qk_rope_head_dim=32", "v_head_dim=64",
         "num_experts=8", "num_experts_per_tok=2", "moe_mlp_dim=512",
         "mtp_num_layers=0", "max_target_length=256", "batch_size=32",
         "learning_rate=6e-4", "eval_interval=50", "eval_steps=16",
         "checkpoint_period=1000000", "max_num_checkpoints_to_keep=1"]  # fmt: skip
RECIPE = {
    "quantization": "fp8_full",
    "use_qwix_quantization": "true",
    "weight_quantization_calibration_method": "fixed,-224,224",
    "act_quantization_calibration_method": "fixed,-224,224",
    "bwd_quantization_calibration_method": "absmax",
}
PRETRAIN, RESUME, SCRATCH = 600, 400, 1200
LIMIT = 0.005


@dataclasses.dataclass(frozen=True)
class Row:
    name: str
    steps: int
    eval_loss: float
    seconds: float
    curve: tuple[tuple[float, float], ...]  # (seconds, held-out loss)

    def time_to(self, target: float) -> float | None:
        return next((s for s, loss in self.curve if loss <= target), None)


def config(folder: pathlib.Path, name: str, steps: int, **words: str) -> Config:
    """The model, with what is given in place of its own words."""
    own = dict(word.split("=", 1) for word in MODEL[1:])
    own |= {"base_output_directory": str(folder), "run_name": name, "steps": str(steps)}
    own |= {"overwrite": "true", **words}
    return settings.load([MODEL[0], *(f"{k}={v}" for k, v in own.items())])


def run(folder: pathlib.Path, name: str, steps: int, **words: str) -> Row:
    done = train(config(folder, name, steps, **words))
    seconds, curve = 0.0, []
    for line in read(done.folder / "metrics.jsonl")[1:]:  # the first step compiles
        seconds += line["step_seconds"]
        if "eval_loss" in line:
            curve.append((seconds, line["eval_loss"]))
    return Row(name, steps, done.eval_loss, seconds, tuple(curve))


def study(folder: pathlib.Path, scale: float) -> list[tuple[Row, Row]]:
    count = lambda steps: max(int(steps * scale), 4)
    run(folder, "pretrain", count(PRETRAIN))
    start = {"load_parameters_path": str(folder / "pretrain"), "learning_rate": "2e-4"}
    pairs = []
    for name, steps, words in (("resumed", RESUME, start), ("scratch", SCRATCH, {})):
        plain = run(folder, f"{name}-bf16", count(steps), **words)
        low = run(folder, f"{name}-fp8", count(steps), **words, **RECIPE)
        pairs.append((plain, low))
    return pairs


def table(pairs: list[tuple[Row, Row]]) -> str:
    lines = [
        "| run | steps | held-out loss | gap | s | s to target |",
        "|---" * 6 + "|",
    ]
    for plain, low in pairs:
        target = 1.02 * plain.eval_loss
        for row in (plain, low):
            gap = row.eval_loss / plain.eval_loss - 1
            reached = row.time_to(target)
            when = "-" if reached is None else f"{reached:.1f}"
            lines.append(
                f"| {row.name} | {row.steps} | {row.eval_loss:.4f} | {100 * gap:+.2f}% "
                f"| {row.seconds:.1f} | {when} (to {target:.3f}) |"
            )
    return "\n".join(lines)


def main(words: list[str]) -> int:
    folder = pathlib.Path(next((w for w in words if w[0] != "-"), "runs/convergence"))
    started = time.perf_counter()
    pairs = study(folder, 0.01 if "--quick" in words else 1.0)
    took = time.perf_counter() - started
    device = jax.devices()[0].device_kind
    text = f"{device}, jax {jax.__version__}, {took:.0f} s in all\n\n{table(pairs)}\n"
    print(text)
    (folder / "convergence.md").write_text(text)
    curves = {row.name: row.curve for pair in pairs for row in pair}
    (folder / "convergence.json").write_text(json.dumps(curves))
    gaps = [low.eval_loss / plain.eval_loss - 1 for plain, low in pairs]
    return 0 if "--quick" in words or max(gaps) <= LIMIT else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
