"""How fast does the trainer train? Steps of `midtread train` on one NVIDIA GPU.

    JAX_PLATFORMS=cuda,cpu python benchmarks/gpu_train.py [row ...] [--attention NAME]
        [--results FILE] [--seconds N] [--tiny] [--cache FOLDER] [--compile]

Rows, in this order; none named: all.
    bf16 int8 fp8_full delayed current   4 layers of Llama-8B, 4 x 4,096 tokens, documents
                                         packed, vocabulary 32,000, remat minimal; quantized
                                         ones keep their codes (minimal_with_quantization)
    int8-minimal delayed-minimal         the same, codes made again for the backward
    bf16-none int8-none delayed-none     the same, nothing computed again
    fp8_full-none current-none
    bf16-auto int8-auto delayed-auto     the same with no remat policy set: what `auto` takes
    fp8_full-auto current-auto           on this device, which the row says
    cudnn blockwise                      the same in bf16 with that attention
    codes                                int8 with remat_policy=quantized
    unscanned unscanned-int8             the same with scan_layers=false
    update                               the optimizer's update alone, against optax's
    head                                 head and loss alone, vocabulary 128,256, 4 x 4,096
                                         tokens, in 4, 16 and 64 blocks, with gradients
    long long-int8                       2 x 8,192 tokens
    llama3-8b llama3-8b-codes            all of it: delayed fp8, 8-bit AdamW, bf16 weights
    llama3-8b-unrolled                   the same with scan_unroll=32
    eight eight-scanned                  8 layers of it, one by one, and under a scan
    eight-scanned-int8                   the latter in int8
    eight-scanned-fused                  both as XLA compiles them when it is given no options
    eight-scanned-int8-fused             (lm/program.py)

A row prints as soon as it is done and is appended to the results; one that fails says why and
the next goes on; none begins after --seconds. --tiny: the same rows, small, on any device.
--compile compiles, from shapes, and does not run; with the same --cache another command then
need not compile.
TFLOP/s count what the model needs (lm/roofline.py: model_flops), not what is computed again.
"x bf16" is against the row bf16 of the same run, that of an -auto row against bf16-auto.
"""

import argparse
import functools
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from midtread import optim
from midtread.lm import attend, build, roofline, room, settings, stacks, step
from midtread.lm import loss as losses
from midtread.lm import model as models
from midtread.lm.config import Config, Model, Training, section
from midtread.lm.rows import Rows, stack
from midtread.optim import slices

LLAMA = ["model_name=llama3-8b", "dataset_type=synthetic"]
AUTO = [*LLAMA, "num_decoder_layers=4", "vocab_size=32000", "batch_size=4"]
FOUR = [*AUTO, "remat_policy=minimal"]
LONG = [*FOUR, "max_target_length=8192", "batch_size=2"]
SMALL_STATES = ["optimizer_states=int8", "weight_dtype=bfloat16"]
SMALL_STATES += ["weight_rounding=stochastic"]
KEEP = ["remat_policy=minimal_with_quantization"]
DELAYED = ["quantization=te_fp8_delayedscaling"]
ALL = [*LLAMA, "batch_size=4", *DELAYED, *SMALL_STATES]
EIGHT = [*ALL, "num_decoder_layers=8", "vocab_size=32000", "remat_policy=minimal"]
INT8 = ["quantization=int8", "use_qwix_quantization=true"]
FP8 = ["quantization=fp8_full", "use_qwix_quantization=true"]
CURRENT = ["quantization=te_fp8_currentscaling"]

ROWS = {
    "bf16": FOUR,
    "int8": [*FOUR, *INT8, *KEEP],
    "delayed": [*FOUR, *DELAYED, *KEEP],
    "fp8_full": [*FOUR, *FP8, *KEEP],
    "current": [*FOUR, *CURRENT, *KEEP],
    "int8-minimal": [*FOUR, *INT8],
    "delayed-minimal": [*FOUR, *DELAYED],
    "bf16-none": [*FOUR, "remat_policy=none"],
    "int8-none": [*FOUR, *INT8, "remat_policy=none"],
    "delayed-none": [*FOUR, *DELAYED, "remat_policy=none"],
    "fp8_full-none": [*FOUR, *FP8, "remat_policy=none"],
    "current-none": [*FOUR, *CURRENT, "remat_policy=none"],
    "bf16-auto": AUTO,
    "int8-auto": [*AUTO, *INT8],
    "delayed-auto": [*AUTO, *DELAYED],
    "fp8_full-auto": [*AUTO, *FP8],
    "current-auto": [*AUTO, *CURRENT],
    "cudnn": [*FOUR, "attention=cudnn"],
    "llama3-8b": [*ALL, "remat_policy=minimal"],
    "llama3-8b-unrolled": [*ALL, "remat_policy=minimal", "scan_unroll=32"],
    "eight": [*EIGHT, "scan_unroll=8"],
    "eight-scanned": [*EIGHT, "scan_unroll=1"],
    "eight-scanned-int8": [*EIGHT, *INT8, "scan_unroll=1"],
    "eight-scanned-fused": [*EIGHT, "scan_unroll=1"],
    "eight-scanned-int8-fused": [*EIGHT, *INT8, "scan_unroll=1"],
    "unscanned": [*FOUR, "scan_layers=false"],
    "unscanned-int8": [*FOUR, *INT8, "scan_layers=false"],
    "codes": [*FOUR, *INT8, "remat_policy=quantized"],
    "update": None,
    "head": None,
    "long": LONG,
    "long-int8": [*LONG, *INT8],
    "llama3-8b-codes": [*ALL, "remat_policy=quantized", "batch_size=6"],
    "blockwise": [*FOUR, "attention=blockwise"],
}
TINY = ["emb_dim=64", "num_decoder_layers=2", "num_query_heads=4", "num_kv_heads=2"]
TINY += ["head_dim=16", "mlp_dim=256", "vocab_size=512", "max_target_length=64"]


def config_of(words: list[str], attention: str, is_tiny: bool) -> Config:
    words = [*words, *(TINY if is_tiny else [])]
    named = {w.partition("=")[0]: w for w in words}  # the last of two of a name
    named.setdefault("attention", f"attention={attention}")
    return room.settle(settings.load(list(named.values())))


def base_of(name: str) -> str | None:
    """The row that a row is compared with, if any."""
    if name.endswith("-auto"):
        return "bf16-auto"
    return "bf16" if ROWS[name][: len(FOUR)] == FOUR else None


def packed_batch(config: Config) -> dict:
    """Random tokens in documents of 32 to some thousand tokens."""
    rng = np.random.default_rng(0)
    count = config.batch_size * config.max_target_length + 1
    tokens = rng.integers(0, config.vocab_size, count).astype(np.int32)
    starts = np.cumsum(32 + rng.exponential(1000, count // 32).astype(int))
    starts = np.append(0, starts[starts < count])
    rows = Rows(tokens, starts, config.max_target_length, packed=True)
    return stack([rows[i] for i in range(config.batch_size)])


def shapes(net, t: Training) -> step.State:
    """The state that a run begins with, as shapes."""
    parts = step.take_apart(net)

    def begin(learned, kept):
        moments = step.optimizer(t).init(learned)
        return step.State(jnp.zeros((), jnp.int32), learned, kept, moments, {})

    return jax.eval_shape(begin, parts.learned, parts.kept)


def compile_row(config: Config, run=step.run) -> dict:
    """Seconds of compiling and bytes of a step; nothing is allocated."""
    m, t = section(config, Model), section(config, Training)
    net = build.for_training(config, models.abstract(m))
    parts, state = step.take_apart(net), shapes(net, t)
    if stacks.why_stacked(m, t) is None:
        state = stacks.apart(state, functools.partial(jax.eval_shape, slices.cut))
    setup = step.Setup(m, t, parts.graph, config.seed)
    like = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype)
    batch = jax.tree.map(like, packed_batch(config))
    started = time.perf_counter()
    compiled = run.lower(setup, state, parts.random, batch).compile()
    seconds = time.perf_counter() - started
    gib = peak_bytes(compiled) / 2**30
    return {"compile s": seconds, "GiB": gib, "remat": config.remat_policy}


def peak_bytes(compiled) -> int:
    memory = compiled.memory_analysis()
    peak = memory.argument_size_in_bytes + memory.temp_size_in_bytes
    return peak + memory.output_size_in_bytes - memory.alias_size_in_bytes


def train_row(config: Config, calls: int = 10, run=step.run) -> dict:
    """Seconds of a step and of compiling, tokens/s, TFLOP/s, share of the peak, bytes."""
    m, t = section(config, Model), section(config, Training)
    chosen = attend.describe(m, config.batch_size).split(" ")[1]
    net = build.for_training(config, models.create(m, config.seed))
    state, parts = step.initial(net, t)
    del net
    why_stacked = stacks.why_stacked(m, t)
    if why_stacked is None:
        state = stacks.apart(state)
    how = step.Setup(m, t, parts.graph, config.seed)
    parts = parts._replace(learned=None, kept=None)
    batch = jax.device_put(packed_batch(config))
    started = time.perf_counter()
    compiled = run.lower(how, state, parts.random, batch).compile()
    compile_seconds = time.perf_counter() - started
    for _ in range(2):
        state, metrics = compiled(state, parts.random, batch)
    first = float(metrics["loss"])
    best = float("inf")
    for _ in range(2):
        started = time.perf_counter()
        for _ in range(calls // 2):
            state, metrics = compiled(state, parts.random, batch)
        jax.block_until_ready(metrics)
        best = min(best, (time.perf_counter() - started) / (calls // 2))
    flops = roofline.model_flops(config) / best
    device = roofline.device_here()
    share = flops / device.flops["bf16"] if device else float("nan")
    return {
        "ms": 1e3 * best, "tokens/s": batch["inputs"].size / best, "TFLOP/s": flops / 1e12,
        "of bf16 peak": share, "GiB": peak_bytes(compiled) / 2**30, "compile s": compile_seconds,
        "loss": (first, float(metrics["loss"])), "attention": chosen,
        "weights": why_stacked or "a slice for each layer", "remat": config.remat_policy,
    }  # fmt: skip


def update_rows(is_tiny: bool) -> list[tuple[str, dict]]:
    """Milliseconds of one update of a billion weights, and bytes a weight."""
    shape = (4, 256, 256) if is_tiny else (16, 4096, 14336)
    made = {
        "optax.adamw": (optax.adamw(1e-4), jnp.float32),
        "int8": (optim.adamw(1e-4), jnp.float32),
        "fp8": (optim.adamw(1e-4, states="fp8"), jnp.float32),
        "int4": (optim.adamw(1e-4, states="int4"), jnp.float32),
        "lion int8": (optim.lion(1e-5), jnp.float32),
        "int8, bf16 weights by chance": (
            optax.chain(optim.adamw(1e-4), optim.stochastic_rounding()), jnp.bfloat16,
        ),
    }  # fmt: skip
    out = []
    for name, (tx, dtype) in made.items():

        @functools.partial(jax.jit, donate_argnums=(0, 1))
        def run(params, state, grads, tx=tx):
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        try:
            key = jax.random.key(0)
            params = {"w": jax.random.normal(key, shape, dtype)}
            grads = {"w": jax.random.normal(key, shape, dtype)}
            state = jax.jit(tx.init)(params)
            nbytes = optim.nbytes(state) / params["w"].size
            params, state = run(params, state, grads)
            jax.block_until_ready(params)
            started = time.perf_counter()
            for _ in range(10):
                params, state = run(params, state, grads)
            jax.block_until_ready(params)
            took = (time.perf_counter() - started) / 10
            out.append((name, {"ms": 1e3 * took, "bytes a weight": nbytes}))
        except Exception as error:  # noqa: BLE001  a row that fails is a result
            out.append((name, {"failed": f"{type(error).__name__}: {error}"[:300]}))
    return out


def head_rows(is_tiny: bool) -> list[tuple[str, dict]]:
    """Milliseconds of the head's logits, their loss and all gradients."""
    B, T, D, V = (2, 64, 32, 256) if is_tiny else (4, 4096, 4096, 128256)
    out = []
    for num_blocks in (4, 16, 64):

        @jax.jit
        def run(w, x, targets, n=num_blocks):
            graph, state = nnx.split(nnx.eval_shape(_head(D, V)))

            def loss(w, x):
                head = nnx.merge(graph, jax.tree.map(lambda _: w, state))
                goal = losses.Goal(targets, jnp.ones((B, T)), B * T)
                call = lambda head, x: head(x)
                return losses.in_blocks(head, call, n, x, goal).loss

            return jax.value_and_grad(loss, argnums=(0, 1))(w, x)

        try:
            keys = jax.random.split(jax.random.key(0), 3)
            w = jax.random.normal(keys[0], (D, V), jnp.bfloat16) / D**0.5
            x = jax.random.normal(keys[1], (B, T, D), jnp.bfloat16)
            targets = jax.random.randint(keys[2], (B, T), 0, V)
            compiled = run.lower(w, x, targets).compile()
            jax.block_until_ready(compiled(w, x, targets))
            started = time.perf_counter()
            for _ in range(5):
                result = compiled(w, x, targets)
            jax.block_until_ready(result)
            took = (time.perf_counter() - started) / 5
            row = {"ms": 1e3 * took, "TFLOP/s": 6 * B * T * D * V / took / 1e12}
            row["GiB"] = peak_bytes(compiled) / 2**30
            out.append((f"{num_blocks} blocks", row))
        except Exception as error:  # noqa: BLE001  a row that fails is a result
            failed = {"failed": f"{type(error).__name__}: {error}"[:300]}
            out.append((f"{num_blocks} blocks", failed))
    return out


def _head(D: int, V: int):
    options = {"use_bias": False, "dtype": jnp.bfloat16, "param_dtype": jnp.bfloat16}
    return lambda: nnx.Linear(D, V, rngs=nnx.Rngs(0), **options)


PARTS = {"update": update_rows, "head": head_rows}  # of a step


def show(value) -> str:
    if isinstance(value, tuple):
        return " -> ".join(map(show, value))
    return f"{value:,.4g}" if isinstance(value, float) else str(value)


def main() -> None:
    about = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=about)
    parser.add_argument("rows", nargs="*", metavar="row", choices=[[], *ROWS])
    parser.add_argument("--attention", default="auto")
    parser.add_argument("--results", default="gpu_train.txt")
    parser.add_argument("--seconds", type=float, default=430)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--cache", help="a folder of compiled programs")
    parser.add_argument("--compile", action="store_true")
    options = parser.parse_args()
    # Compile times are results, unless a folder is named.
    jax.config.update("jax_compilation_cache_dir", options.cache)
    started, times = time.perf_counter(), {}
    with open(options.results, "a") as results:

        def say(text: str) -> None:
            print(text, flush=True)
            print(text, file=results, flush=True)

        say(f"{jax.devices()[0].device_kind}, jax {jax.__version__}, {options}")
        for name in options.rows or ROWS:
            if time.perf_counter() - started > options.seconds:
                say(f"{name}: left out, {options.seconds:.0f} s are over")
                continue
            try:
                if name in PARTS and options.compile:
                    say(f"{name}: left out, it is no step to compile")
                    continue
                if name in PARTS:
                    for kind, row in PARTS[name](options.tiny):
                        text = ", ".join(f"{k} {show(v)}" for k, v in row.items())
                        say(f"{name} {kind}: {text}")
                    continue
                config = config_of(ROWS[name], options.attention, options.tiny)
                calls = 4 if name.startswith("llama3") else 10
                run = step.run.plain if name.endswith("-fused") else step.run
                if options.compile:
                    row = compile_row(config, run)
                else:
                    row = train_row(config, calls, run)
                    times[name] = row["ms"]
                    if base_of(name) in times:
                        row["x bf16"] = times[base_of(name)] / row["ms"]
                say(f"{name}: " + ", ".join(f"{k} {show(v)}" for k, v in row.items()))
            except Exception as error:  # noqa: BLE001  a row that fails is a result
                say(f"{name} failed: {type(error).__name__}: {error}"[:600])
            finally:
                jax.clear_caches()


if __name__ == "__main__":
    main()
