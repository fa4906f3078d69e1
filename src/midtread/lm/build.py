"""Build: a model as a config describes it, quantized as it says, and what that reached."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from midtread.lm import model as models
from midtread.lm import quantization
from midtread.lm.config import Config, Model, UsageError, section
from midtread.lm.step import Pruning
from midtread.model.coverage import Coverage
from midtread.model.explain import explain
from midtread.model.quantize import quantize_model
from midtread.providers.qt import QtProvider

# what `static` says about ranges: in place of {mode}, that of the value
STATIC = {
    "": "{mode}",
    "measure": "{mode}; the largest are noted for static=calibrated",
    "calibrated": "weights and activations static, per axis (a weight's output channels, an "
    "activation's positions; rows of experts share one), noted by {path}; gradients: {mode}",
}


def some_tokens(config: Config, rows: int = 1) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((rows, config.max_target_length), jnp.int32)


def coverage(config: Config, serve: bool = False, **options: Any) -> Coverage:
    """What a config quantizes, from shapes alone; `options` are those of `explain`."""
    make = quantization.serving if serve else quantization.provider
    provider = make(config) or QtProvider([])
    model = models.abstract(section(config, Model))
    try:
        tokens = some_tokens(config, config.batch_size)
        return explain(model, provider, tokens, **options)
    except ValueError as error:
        raise UsageError(str(error).splitlines()[0]) from None


def for_training(config: Config, model: nnx.Module) -> nnx.Module:
    """`model` under the config's quantization; the model itself in float."""
    provider = quantization.provider(config)
    if provider is None:
        return model
    rngs = nnx.Rngs(stochastic_rounding=0) if provider.needs_rngs() else None
    return quantize_model(model, provider, some_tokens(config), rngs=rngs, donate=True)


def pruning(config: Config, coverage: Coverage) -> Pruning | None:
    """Which weights are pruned: those that the rules quantize."""
    sparsity = quantization.sparsity(config)
    if sparsity is None:
        return None
    paths = dict.fromkeys(
        r.weight for r in coverage.rows if r.is_quantized and r.weight
    )
    return Pruning(sparsity, tuple(paths))


class Line(NamedTuple):
    """Sites that are treated alike, for a table at start-up."""

    where: str
    sites: int
    forward: str
    dlhs: str
    drhs: str
    share: float  # of forward FLOPs


def summary(coverage: Coverage) -> list[Line]:
    """A few lines out of many: what was quantized by format, what was left alone."""
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
    """The route and how ranges are found, in words."""
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
