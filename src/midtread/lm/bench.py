"""Bench: a training step of this config, and decoding with it, beside the same in float.

Of training: the median time of a step on a random batch, FLOP/s that the model needs
(`roofline.model_flops`) and their share of the device's bfloat16 peak, where that is known,
compile seconds, bytes at the peak (as the compiled program says).

Of decoding: the median time of a step, one token of every sequence, for each number of
sequences (`batches=`), length of the cache (`lengths=`) and format of weights (`formats=`,
values of `quantization`). A step reads every weight and the whole cache once, so beside it stand
the share of its time that these bytes take at the device's bandwidth, FLOP/s that the model needs,
and bytes at the peak. Caches are full of zeros: what a step costs does not depend on what was said.
`time=train` and `time=decode` ask for one of the two alone.
"""

import dataclasses
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from flax import nnx

from midtread.lm import (
    build,
    convert,
    data,
    decode,
    quantization,
    roofline,
    room,
    stacks,
    step,
    transfers,
)
from midtread.lm import cache as kv
from midtread.lm import model as models
from midtread.lm.config import Config, Model, Training, keys, section
from midtread.lm.contradictions import READS
from midtread.lm.generate import cache_format
from midtread.lm.mesh import layout_of
from midtread.lm.usage import UsageError, first_line, require
from midtread.model.coverage import human
from midtread.model.rules import did_you_mean

STEPS = 10  # of training that are timed
CALLS = 3  # of a server that are timed


class Timed(NamedTuple):
    name: str
    step_seconds: float
    tokens_per_second: float
    compile_seconds: float
    peak_bytes: int
    flops: float = 0.0  # a second
    share: float | None = None  # of the peak
    remat: str = ""  # the policy, `auto` settled
    gathered: str = ""  # a table of all-gathers of weights, on a mesh that cuts them


def measure(config: Config, name: str) -> Timed:
    m, t = section(config, Model), section(config, Training)
    plain = {name: keys()[name].default for name in READS}
    config = dataclasses.replace(config, **plain, dataset_type="synthetic")
    layout = layout_of(config)
    batch = next(data.batches(data.splits(config).train, config))
    batch = layout.place_batch(batch) if layout else jax.device_put(batch)
    model = build.for_training(config, models.create(m, config.seed, layout))
    pruning = build.pruning(config, build.coverage(config))
    state, parts = step.initial(model, t, pruning, layout)
    setup = step.Setup(m, t, parts.graph, config.seed, pruning, layout)
    why_stacked = stacks.why_stacked(
        m, t, is_pruned=pruning is not None, is_on_mesh=layout is not None,
        room=room.bytes_here(), state=state,
    )  # fmt: skip
    if why_stacked is None:
        state = stacks.apart(state)
    started = time.perf_counter()
    compiled = step.run.lower(setup, state, parts.random, batch).compile()
    compile_seconds = time.perf_counter() - started
    memory = compiled.memory_analysis()
    peak = memory.argument_size_in_bytes + memory.temp_size_in_bytes
    peak += memory.output_size_in_bytes - memory.alias_size_in_bytes
    times = []
    for _ in range(STEPS + 1):
        started = time.perf_counter()
        state, metrics = compiled(state, parts.random, batch)
        jax.block_until_ready(metrics)
        times.append(time.perf_counter() - started)
    median = sorted(times[1:])[STEPS // 2]
    tokens = batch["inputs"].size
    table = ""
    if layout and layout.sizes["fsdp"] > 1:
        gathered = transfers.weights(config, layout.sizes, compiled.as_text())
        table = transfers.describe(gathered)
    flops, device = roofline.model_flops(config) / median, roofline.device_here()
    share = flops / (device.flops["bf16"] * jax.device_count()) if device else None
    return Timed(
        name, median, tokens / median, compile_seconds, peak, flops, share,
        config.remat_policy, table,
    )  # fmt: skip


def bench(config: Config) -> list[Timed]:
    """This config, and itself in float if it is quantized."""
    plain = quantization.in_float(config)
    plain, config = room.settle(plain), room.settle(config)
    for each in (plain, config):
        room.require_room(each)
    timed = [measure(plain, plain.dtype)]
    if plain != config:
        timed.append(measure(config, config.quantization or "quant"))
    return timed


COLUMNS = ("training", "step", "tokens/s", "TFLOP/s", "of peak", "speed", "compile",
           "peak bytes", "remat")  # fmt: skip


def rows(timed: list[Timed]) -> list[list[str]]:
    return [
        [
            x.name,
            f"{1000 * x.step_seconds:.1f} ms",
            f"{x.tokens_per_second:,.0f}",
            f"{x.flops / 1e12:.3g}",
            "-" if x.share is None else f"{100 * x.share:.1f}%",
            f"{timed[0].step_seconds / x.step_seconds:.2f}x",
            f"{x.compile_seconds:.1f} s",
            f"{x.peak_bytes:,}",
            x.remat,
        ]
        for x in timed
    ]


# --- decoding ---------------------------------------------------------------------------------


class Asked(NamedTuple):
    """What is timed: words of `midtread bench` besides the keys of a config."""

    time: str = "all"  # or train, or decode
    batches: tuple[int, ...] = (1, 8, 32, 128)  # sequences at once
    lengths: tuple[int, ...] = ()  # of the cache; none: 1 and 4 times max_target_length
    formats: tuple[str, ...] = ()  # of weights, beside float and the config's own


# The least number of each list, and an example of it.
LISTS = {"batches": (1, "1,8,32,128"), "lengths": (8, "512,4096")}


def asked_for(words: Sequence[str]) -> tuple[Asked, list[str]]:
    """Returns what the words ask to time, and the other words.

    >>> asked_for(["tiny", "time=decode", "batches=1,8"])
    (Asked(time='decode', batches=(1, 8), lengths=(), formats=()), ['tiny'])
    """
    pairs = [w.partition("=")[::2] for w in words]
    own = {name: text for name, text in pairs if name in Asked._fields}
    others = [w for w, (name, _) in zip(words, pairs) if name not in own]
    require(
        len(own) + len(others) == len(words),
        "one of time, batches, lengths and formats is given twice on the command line.",
    )
    require(
        own.get("time", "all") in ("all", "train", "decode"),
        f"time={own.get('time')}: train, decode or all.",
    )
    decoding = ", ".join(name for name in own if name != "time")
    require(
        own.get("time") != "train" or not decoding,
        f"{decoding}: of decoding, which time=train leaves out. Drop one.",
    )
    fields: dict[str, Any] = {
        name: tuple(text.split(",")) for name, text in own.items()
    }
    fields |= {k: own[k] for k in ("time",) if k in own}
    for name, (least, example) in LISTS.items():
        if name in own:
            numbers = tuple(int(x) for x in fields[name] if x.isdecimal())
            require(
                len(numbers) == len(fields[name]) and min(numbers) >= least,
                f"{name}={own[name]}: whole numbers of at least {least}, as in "
                f"{name}={example}.",
            )
            fields[name] = numbers
    for value in fields.get("formats", ()):
        known = quantization.VALUES
        require(
            value in known,
            f"formats={own['formats']}: no value of quantization is called {value!r}. "
            f"{did_you_mean(value, known, str)}",
        )
    return Asked(**fields), others


class Decoded(NamedTuple):
    """Steps of one format, with so many sequences and a cache of so many tokens each."""

    name: str
    sequences: int
    length: int
    seconds: float | None = None  # of a step, one token of every sequence
    bytes_read: int = 0  # weights that a step multiplies by, and the cache
    flops: float = 0.0  # of a step
    peak_bytes: int = 0  # of weights, cache and what a step computes
    why_not: str = ""  # it was not timed

    @property
    def tokens_per_second(self) -> float:
        return self.sequences / self.seconds if self.seconds else 0.0


def decoding(config: Config, asked: Asked) -> list[Decoded]:
    """Times the steps of a server: the config in float, each of `asked.formats`, and the
    config as it is, for every number of sequences and length of the cache. What does not fit
    the device, or is for training alone, is named and not timed."""
    require(
        not config.mesh,
        f"decoding is timed on one device, and mesh={config.mesh}: drop the mesh, or "
        "write time=train.",
    )
    lengths = asked.lengths or tuple(n * config.max_target_length for n in (1, 4))
    sizes = [(n, length) for length in lengths for n in asked.batches]
    return [
        row
        for name, each in _formats(config, asked.formats)
        for row in _decode(each, [Decoded(name, *size) for size in sizes])
    ]


def _formats(config: Config, values: Sequence[str]) -> list[tuple[str, Config]]:
    """Returns what is timed, by name. Weights are kept in the compute dtype, as one serves
    them."""
    config = dataclasses.replace(
        config, weight_dtype=config.dtype, weight_rounding="nearest"
    )
    others = [
        dataclasses.replace(config, quantization=value, quant=()) for value in values
    ]
    each: list[Config] = []
    for one in (quantization.in_float(config), *others, config):
        if one not in each:  # a config with rules of one's own has no hash
            each.append(one)
    return [(_name(one), one) for one in each]


def _name(config: Config) -> str:
    weights = config.quantization or ("quant" if config.quant else config.dtype)
    cached = f", {config.kv_quant_dtype} cache" if config.quantize_kvcache else ""
    return f"{weights}{cached}"


def _decode(config: Config, rows: list[Decoded]) -> list[Decoded]:
    m, limit = section(config, Model), _limit(config)
    try:
        provider = quantization.serving(config)
    except UsageError as error:
        return [row._replace(why_not=str(error)) for row in rows]
    float_bytes = convert.nbytes(nnx.state(models.abstract(m), nnx.Param))
    if why_not := _why_no_room(float_bytes, limit):
        return [row._replace(why_not=f"its float weights {why_not}") for row in rows]
    model = models.create(m, config.seed)
    model = decode.prepare(convert.in_memory(config, model) if provider else model)
    weights = convert.nbytes(nnx.state(model, nnx.Param))
    return [_timed(config, model, weights, row, limit) for row in rows]


def _limit(config: Config) -> int | None:
    return room.bytes_here() if config.check_memory else None


def _why_no_room(needed: int, limit: int | None) -> str:
    if limit is None or needed <= limit:
        return ""
    return f"need {human(needed, 'B')}, and the device has {human(limit, 'B')}"


def _timed(
    config: Config, model: models.Transformer, weights: int, row: Decoded, limit
) -> Decoded:
    m, fmt = section(config, Model), cache_format(config)
    cache = kv.nbytes(
        jax.eval_shape(lambda: kv.make(m, row.sequences, row.length, fmt))
    )
    read = _weights_read(model, m, row.sequences) + cache
    flops = roofline.decoding_flops(config, row.sequences, row.length)
    row = row._replace(bytes_read=read, flops=flops)
    if why_not := _why_no_room(weights + cache, limit):
        return row._replace(why_not=f"weights and cache {why_not}")
    try:
        seconds, peak = _seconds(model, m, row, fmt, config.check_memory)
        return row._replace(seconds=seconds, peak_bytes=peak)
    except (UsageError, jax.errors.JaxRuntimeError) as error:
        if not isinstance(error, UsageError) and "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return row._replace(why_not=first_line(error))


def _seconds(
    model: models.Transformer, m: Model, row: Decoded, fmt, check_memory: bool
):
    """Returns the median time of a step of sequences that come near the cache's end, and the
    bytes that it needs."""
    server = decode.Server(
        model,
        m,
        slots=row.sequences,
        length=row.length,
        cache_format=fmt,
        check_memory=check_memory,
    )
    count = max(1, min(decode.COUNT, row.length // (CALLS + 2)))
    peak = server.peak_bytes(count)
    server.pretend(row.length - (CALLS + 1) * count)
    times = []
    for _ in range(CALLS + 1):  # the first one compiles
        started = time.perf_counter()
        server.step(count)
        times.append((time.perf_counter() - started) / count)
    return sorted(times[1:])[CALLS // 2], peak


def _weights_read(model: models.Transformer, m: Model, sequences: int) -> int:
    """Returns the bytes of the weights that a step multiplies by: not a table that is looked
    up, not the heads for tokens further ahead, and of the experts as many as so many
    sequences choose by chance."""
    missed = (1 - m.num_experts_per_tok / m.num_experts) ** sequences
    total = 0.0
    for path, param in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        is_table = path[0] == "token_embedder" and not m.logits_via_embedding
        if is_table or str(path[0]).startswith("mtp_block"):
            continue
        names = param.get_metadata().get("out_sharding") or ()
        total += convert.nbytes(param) * (1 - missed if "experts" in names else 1)
    return int(total)


DECODING = ("decoding", "sequences", "cache", "ms a step", "tokens/s", "speed",
            "bytes read", "of bound", "TFLOP/s", "of peak", "peak bytes")  # fmt: skip


def decoding_rows(decoded: list[Decoded]) -> list[list[str]]:
    device = roofline.device_here()
    base = {
        (x.sequences, x.length): x for x in reversed(decoded)
    }  # the first: in float
    return [
        [
            x.name,
            f"{x.sequences:,}",
            f"{x.length:,}",
            f"{1000 * x.seconds:.3f}" if x.seconds else "-",
            f"{x.tokens_per_second:,.1f}" if x.seconds else "-",
            _ratio(base[x.sequences, x.length].seconds, x.seconds),
            f"{x.bytes_read:,}" if x.bytes_read else "-",
            f"{100 * x.bytes_read / device.memory / x.seconds:.0f}%"
            if device and x.seconds
            else "-",
            f"{x.flops / x.seconds / 1e12:.3g}" if x.seconds else "-",
            f"{100 * x.flops / x.seconds / device.flops['bf16']:.1f}%"
            if device and x.seconds
            else "-",
            f"{x.peak_bytes:,}" if x.peak_bytes else "-",
        ]
        for x in decoded
    ]


def _ratio(base: float | None, seconds: float | None) -> str:
    return f"{base / seconds:.2f}x" if base and seconds else "-"


def decoding_notes(decoded: list[Decoded]) -> list[str]:
    """Returns what was not timed and why, and what the bound is."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for x in decoded:
        if x.why_not:
            size = f"{x.sequences} x {x.length:,}"
            reasons.setdefault((x.name, x.why_not), []).append(size)
    notes = [
        f"not timed: {name}, {', '.join(sizes)}: {why_not}"
        for (name, why_not), sizes in reasons.items()
    ]
    device = roofline.device_here()
    if device is None:
        kind = jax.devices()[0].device_kind
        return [*notes, f"no bound: the bandwidth of {kind} is not known here."]
    rate = f"{device.memory / 1e12:g} TB/s of {device.name} by its data sheet"
    return [*notes, f"bound: bytes read, weights and cache, at {rate}."]
