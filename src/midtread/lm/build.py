"""Build: a model as a config describes it, quantized as it says, and what that reached."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from midtread.lm import model as models
from midtread.lm import quantization
from midtread.lm.config import Config, Model, section
from midtread.lm.step import Pruning
from midtread.lm.usage import UsageError, first_line
from midtread.model.coverage import Coverage
from midtread.model.explain import explain
from midtread.model.quantize import quantize_model
from midtread.providers.qt import QtProvider

# What is printed about ranges for each value of `static`; {mode} is the mode of the value
# of `quantization`.
STATIC = {
    "": "{mode}",
    "measure": "{mode}; the largest are noted for static=calibrated",
    "calibrated": "weights and activations static, per axis (a weight's output channels, an "
    "activation's positions; rows of experts share one), noted by {path}; gradients: {mode}",
}


def some_tokens(config: Config, rows: int = 1) -> jax.ShapeDtypeStruct:
    """Returns the shape of `rows` rows of tokens, to trace a model with."""
    return jax.ShapeDtypeStruct((rows, config.max_target_length), jnp.int32)


def coverage(
    config: Config, serve: bool = False, rows: int | None = None, **options: Any
) -> Coverage:
    """Explains what a config quantizes, from shapes alone.

    Args:
        serve: as a checkpoint that is served, or as it is trained.
        rows: sequences of one token each; None: a batch as it is trained on.
        options: those of `explain`.
    """
    make = quantization.serving if serve else quantization.provider
    provider = make(config) or QtProvider([])
    model = models.abstract(section(config, Model))
    tokens = some_tokens(config, config.batch_size)
    if rows is not None:
        tokens = jax.ShapeDtypeStruct((rows, 1), jnp.int32)
    try:
        return explain(model, provider, tokens, **options)
    except ValueError as error:
        raise UsageError(first_line(error)) from None


def for_training(config: Config, model: nnx.Module) -> nnx.Module:
    """Returns `model` with the config's quantization, or `model` itself if the config is
    float."""
    provider = quantization.provider(config)
    if provider is None:
        return model
    rngs = nnx.Rngs(stochastic_rounding=0) if provider.needs_rngs() else None
    return quantize_model(model, provider, some_tokens(config), rngs=rngs, donate=True)


def pruning(config: Config, coverage: Coverage) -> Pruning | None:
    """Returns what is pruned, the weights that the rules quantize; None if nothing is."""
    sparsity = quantization.sparsity(config)
    if sparsity is None:
        return None
    paths = dict.fromkeys(
        r.weight for r in coverage.rows if r.is_quantized and r.weight
    )
    return Pruning(sparsity, tuple(paths))


class Line(NamedTuple):
    """Sites that are treated alike: one line of the table at start-up."""

    where: str
    sites: int
    forward: str
    dlhs: str
    drhs: str
    share: float  # of forward FLOPs


def summary(coverage: Coverage) -> list[Line]:
    """Groups sites by their formats, the quantized ones first."""
    groups: dict[Any, list] = {}
    pair = lambda p: " x ".join(p) if p else "-"
    for row in coverage.rows:
        if not row.flops:
            continue
        last = "/".join(row.path.split("/")[-2:]) if row.is_quantized else row.path
        formats = (pair(row.fwd), pair(row.dlhs), pair(row.drhs))
        groups.setdefault((row.is_quantized, formats), []).append((last, row))
    lines = []
    whole = max(coverage.totals.flops, 1)
    for (quantized, formats), rows in sorted(groups.items(), key=lambda g: not g[0][0]):
        names = list(dict.fromkeys(last for last, _ in rows))
        where = ", ".join(names[:4]) + (
            f" and {len(names) - 4} more" if names[4:] else ""
        )
        share = sum(r.flops for _, r in rows) / whole
        forward, dlhs, drhs = formats
        times = sum(r.times for _, r in rows)
        lines.append(Line(where, times, forward, dlhs, drhs, share))
    return lines


def mode(config: Config, serve: bool = False) -> str:
    """Says in words which route is taken and where ranges come from."""
    if serve and not (config.quantization or config.quant):
        return "nothing is quantized"
    if serve:
        return f"{config.quantization or 'rules of your own'}: weights once, for good"
    if config.quant:
        return f"{len(config.quant)} rule{'s' * (len(config.quant) > 1)} of your own"
    value = quantization.value_of(config)
    if value is None:
        return "nothing is quantized"
    fixed = [
        f"{name.removesuffix('_quantization_calibration_method')} "
        f"{getattr(config, name)}"
        for name in quantization.CALIBRATIONS
        if getattr(config, name)
    ]
    fixed = [
        f"{x}: one constant scale per tensor" if " fixed" in x else x for x in fixed
    ]
    note = f" ({'; '.join(fixed)})" if fixed else ""
    shards = config.quantization_local_shard_count
    if shards == -1:
        note += (
            f"; {jax.local_device_count()} ranges per weight gradient, one per device: "
            "numbers depend on the mesh"
        )
    path = config.load_parameters_path or "load_parameters_path"
    ranges = STATIC[config.static].format(mode=value.mode, path=path)
    return f"{value.route} route, reach {config.quant_reach}: {ranges}{note}"
