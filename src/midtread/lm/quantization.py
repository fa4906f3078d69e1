"""Quantization: what each value of `quantization=` means, one row each.

A value names a recipe (or Qwix's rule fields), on one of four routes:

    qwix     use_qwix_quantization=true: the backward reuses the forward's codes
    aqt      use_qwix_quantization=false: fresh quantization in every matmul, or Flax's fp8
    te       TransformerEngine's recipes, without TransformerEngine
    serve    weights stored in few bits; training keeps float gradients

`quant_reach` says where. MaxText's reach: every projection and the router of `decoder/
.*layers.*`, and experts for fp8_full alone. `all`, the default, adds the experts' grouped
matmuls, forward and both gradients, to every value. The attention's own matmuls,
embeddings and norms are float in both; the head and the MTP block are asked for by name.

A key that a value does not use is refused by name.
"""

import dataclasses
import functools
import json
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import jax

from midtread.lm.config import Config, Quantization, keys
from midtread.lm.usage import UsageError, require
from midtread.model.provider import QuantizationProvider
from midtread.model.rules import QtRule, QuantizationRule, as_rules, did_you_mean
from midtread.numerics import calibration
from midtread.numerics.sparsity import Sparsity
from midtread.ops import recipe as recipes
from midtread.ops.recipe import Fwd, Recipe, per_channel, per_tensor
from midtread.providers.delayed import DelayedFp8Provider
from midtread.providers.ptq import PtqProvider
from midtread.providers.qt import QtProvider
from midtread.providers.static import StaticProvider

HEADROOM = (
    "absmax,2"  # headroom of static ranges; a power of two costs floats no precision
)
LAYERS = r"decoder/.*layers.*"
MTP = r"mtp_block.*"
HEAD = r"decoder/logits_dense"
MIXES = pathlib.Path(__file__).parent / "configs" / "quantization"

CALIBRATIONS = tuple(
    name for name in keys() if name.endswith("quantization_calibration_method")
)


@dataclasses.dataclass(frozen=True)
class Value:
    """What a value of `quantization=` means on one route."""

    route: str
    fields: Callable[[Config], Mapping[str, Any]]  # fields of its QtRule
    mode: str  # says in words where ranges come from
    provider: Callable[..., QtProvider] = QtProvider
    uses: tuple[str, ...] = ()  # keys that it honours beside the common ones
    experts: bool = False  # whether MaxText's reach has them too
    # Formats of weights and activations in a checkpoint; FORWARD means those of the recipe.
    serves: tuple[Any, Any] | str | None = None


FORWARD = "forward"


# --- Qwix -------------------------------------------------------------------------------------


def _calibrations(config: Config) -> dict[str, Any]:
    """Returns the fields of a rule that the five keys of calibration stand for."""
    both = config.quantization_calibration_method
    both = both or (HEADROOM if config.static else "absmax")
    fields: dict[str, Any] = {
        "weight_calibration_method": config.weight_quantization_calibration_method
        or both,
        "act_calibration_method": config.act_quantization_calibration_method or both,
        "bwd_calibration_method": config.bwd_quantization_calibration_method
        or "absmax",
    }
    drhs = config.drhs_grad_quantization_calibration_method
    if drhs:
        fields["additional_qt_config"] = {"drhs_grad_calibration_method": drhs}
    return fields


def _qwix(
    weight: str, bwd: str | None = None, grad_tiles: bool = True, **more
) -> Value:
    """Returns the value on Qwix's route that has these formats."""
    formats = {"weight_qtype": weight, "act_qtype": weight, "bwd_qtype": bwd or weight}

    def fields(config: Config) -> dict[str, Any]:
        rule_fields = {**formats, **_calibrations(config)}
        shards = _shards(config)
        if grad_tiles and shards != 1:
            require(
                shards != 0,
                "quantization_local_shard_count=0 leaves the weight gradient in float on "
                "the AQT route; with use_qwix_quantization=true write 1 or more.",
            )
            rule_fields["bwd_weight_grad_tile_size"] = 1 / shards
        return rule_fields

    uses = (*CALIBRATIONS, *(("quantization_local_shard_count",) if grad_tiles else ()))
    mode = "scales from the data, per row and per column, each step"
    uses = (*uses, *more.pop("uses", ()))
    return Value("qwix", fields, mode, uses=uses, serves=(weight, weight), **more)


def _shards(config: Config) -> int:
    """Returns how many ranges a weight gradient has."""
    count = config.quantization_local_shard_count
    return jax.local_device_count() if count == -1 else count


# --- AQT, Flax's fp8 and TransformerEngine ----------------------------------------------------


def _recipe(route: str, make: Callable[[Config], Recipe], mode: str, **more) -> Value:
    """Returns the value whose recipe `make` builds from a config."""
    return Value(route, lambda config: {"recipe": make(config)}, mode, **more)


def _named(route: str, name: str, mode: str, **more) -> Value:
    """Returns the value with the recipe of this name."""
    return _recipe(route, lambda config: recipes.recipe(name), mode, **more)


def _delayed(route: str, fnuz: bool = False) -> Value:
    """Returns the value for fp8 with delayed scaling."""
    fmt = "float8_e4m3fnuz" if fnuz else "float8_e4m3fn"
    make = lambda rules: DelayedFp8Provider(rules, fnuz=fnuz)
    formats = {"weight_qtype": fmt, "act_qtype": fmt}
    fields = lambda config: {**formats, **_calibrations(config)}
    mode = "one delayed scale per tensor, from the last 1024 steps"
    uses = CALIBRATIONS if route == "qwix" else ()
    return Value(route, fields, mode, make, uses, serves=(fmt, fmt))


def _bounds(config: Config) -> Recipe:
    """Returns AQT's fp8 recipe, with the constant bounds of the config if it has some."""
    text = config.constant_bound_config
    if not text:
        return recipes.aqt_fp8_full()
    words = text.split(",")
    try:
        bounds = tuple(float(w) for w in words)
    except ValueError:
        bounds = ()
    require(
        len(bounds) == 6 and all(b > 0 for b in bounds),
        f"constant_bound_config={text}: six numbers above 0, comma-separated: fwd lhs, "
        "fwd rhs, dlhs lhs, dlhs rhs, drhs lhs, drhs rhs.",
    )
    return recipes.aqt_fp8_full(bounds)


def _serve_fp8(config: Config) -> Recipe:
    """Returns the recipe of serve_fp8_weight."""
    act = config.act_quantization_calibration_method or "absmax"
    spec = per_tensor if calibration.parse(act).method == "fixed" else per_channel
    return Recipe(Fwd(spec("e4m3", calibration=act), per_tensor("e4m3")))


PER_STEP = "scales from the data, each step"
SHARDS = ("quantization_local_shard_count",)
#  value                     on each route that has it
VALUES: dict[str, tuple[Value, ...]] = {
    "int4":                  (_qwix("int4"),),
    "int8":                  (_qwix("int8"),
                              _recipe("aqt", lambda c: recipes.aqt_int8(_shards(c)),
                                      PER_STEP + "; gradients rounded stochastically",
                                      uses=SHARDS, serves=("int8", "int8"))),
    "fp4":                   (_qwix("float4_e2m1fn"),),
    "fp8":                   (_qwix("float8_e4m3fn"), _delayed("aqt")),
    "fp8_e4m3":              (_qwix("float8_e4m3fn"),),
    "fp8_e5m2":              (_qwix("float8_e5m2"),),
    "fp8_full":              (_qwix("float8_e4m3fn", "float8_e5m2", grad_tiles=False,
                                    experts=True, uses=("static", "weight_sparsity_n", "weight_sparsity_m",
                                    "weight_sparsity_start_step", "weight_sparsity_update_step")),),
    "fp8_gpu":               (_delayed("qwix"),),
    "fp8_nanoo":             (_delayed("qwix", fnuz=True),),
    "int8w":                 (_named("aqt", "aqt_int8w", PER_STEP, serves=("int8", None)),),
    "int4w":                 (_named("aqt", "aqt_int4w", PER_STEP, serves=("int4", None)),),
    "intmp":                 (Value("aqt", lambda c: {}, PER_STEP, uses=("quant_cfg_path",)),),
    "nanoo_fp8":             (_delayed("aqt", fnuz=True),),
    "aqt_fp8":               (_named("aqt", "aqt_fp8", PER_STEP, serves=("e4m3", "e4m3")),),
    "aqt_fp8_full":          (_recipe("aqt", _bounds, PER_STEP + ", per tensor, or constant",
                                      uses=("constant_bound_config",), serves=("e4m3", "e4m3")),),
    "te_fp8_delayedscaling": (_delayed("te"),),
    "te_fp8_currentscaling": (_named("te", "te_fp8_current", PER_STEP + ", per tensor"),),
    "te_mxfp8":              (_named("te", "te_mxfp8", PER_STEP + ", per 32, powers of two"),),
    "te_nvfp4":              (_named("te", "te_nvfp4", PER_STEP + ", per 16; gradients rounded "
                                     "stochastically, and rotated for the weights"),),
    "te_nvfp4_no_rht":       (_named("te", "te_nvfp4_no_rht", PER_STEP + ", per 16; gradients "
                                     "rounded stochastically"),),
    "te_no_quant":           (Value("te", lambda c: {}, "nothing is quantized"),),
    "serve_fp8_weight":      (_recipe("serve", _serve_fp8, PER_STEP + "; activations per token, or "
                                      "constant; gradients in float",
                                      uses=("act_quantization_calibration_method",),
                                      serves=FORWARD),),
}  # fmt: skip


def value_of(config: Config) -> Value | None:
    """Returns the row that a config asks for, or None in float."""
    name, qwix = config.quantization, config.use_qwix_quantization
    if not name:
        return None
    routes = {value.route: value for value in VALUES[name]}
    if qwix is None:
        return routes.get("aqt", next(iter(routes.values())))
    if qwix:
        require(
            "qwix" in routes,
            f"quantization={name} is not one of Qwix's: drop use_qwix_quantization=true.",
        )
        return routes["qwix"]
    require(
        set(routes) != {"qwix"},
        f"quantization={name} is Qwix's alone: write use_qwix_quantization=true.",
    )
    return next(value for route, value in routes.items() if route != "qwix")


# --- what is asked for, and what can be had ---------------------------------------------------

PARTICULAR = (
    *CALIBRATIONS, "static", "quantization_local_shard_count", "constant_bound_config",
    "quant_cfg_path", "weight_sparsity_n", "weight_sparsity_m",
    "weight_sparsity_start_step", "weight_sparsity_update_step",
)  # fmt: skip


def check(config: Config) -> None:
    """Refuses keys that the value would otherwise ignore."""
    value = value_of(config)
    uses = value.uses if value else ()
    what = f"quantization={config.quantization or repr('')}"
    if value and len(VALUES[config.quantization]) > 1:
        what += f" on the {value.route} route"
    for name in PARTICULAR:
        asked = getattr(config, name)
        if asked != keys()[name].default and name not in uses:
            raise UsageError(f"{name}={asked} means nothing with {what}: drop one.")
    for name in CALIBRATIONS:
        if text := getattr(config, name):
            try:
                calibration.parse(text)
            except ValueError as error:
                raise UsageError(f"{name}: {error}") from None
    if config.static:
        _check_static(config)
    pruned = config.weight_sparsity_n is not None
    for name in ("weight_sparsity_start_step", "weight_sparsity_update_step"):
        require(
            pruned or getattr(config, name) == keys()[name].default,
            f"{name} without weight_sparsity_n and weight_sparsity_m: give all three.",
        )
    _check_reach(config, value, what)


def _check_static(config: Config) -> None:
    """Refuses keys that static ranges cannot honour."""
    asked = f"static={config.static}"
    for name in (
        *CALIBRATIONS[:1],
        *(f"{x}_{CALIBRATIONS[0]}" for x in ("weight", "act")),
    ):
        text = getattr(config, name)
        require(
            not text or calibration.parse(text).method == "absmax",
            f"{asked} with {name}={text}: static ranges are the largest |x| seen. Write "
            f"{name}=absmax,<headroom>, or drop it.",
        )
    require(
        config.quant_reach == "all" or config.num_experts == 1,
        f"{asked} with quant_reach=maxtext: experts have no static ranges there. Write "
        "quant_reach=all.",
    )


def _check_reach(config: Config, value: Value | None, what: str) -> None:
    """Refuses sites beyond the layers that the config or the value does not have."""
    beyond = {
        "quantize_logits_proj": (
            not config.logits_via_embedding,
            "logits_via_embedding=true: the head is the embedding",
        ),
        "quantize_mtp": (config.mtp_num_layers > 0, "mtp_num_layers=0: there is none"),
    }
    for name, (possible, otherwise) in beyond.items():
        if not getattr(config, name):
            continue
        require(value, f"{name}=true, but nothing is quantized: set quantization.")
        require(possible, f"{name}=true, but {otherwise}.")
        require(
            config.quant_reach == "all" or config.quantization == "fp8_full",
            f"{name}=true with {what} and quant_reach=maxtext: MaxText has it for "
            "fp8_full alone. Write quant_reach=all.",
        )
    if value and "quantization_local_shard_count" in value.uses and _shards(config) > 1:
        require(
            config.num_experts == 1 or config.quant_reach == "maxtext",
            f"quantization_local_shard_count={config.quantization_local_shard_count} with "
            "num_experts and quant_reach=all: the rows of an expert cannot be cut into "
            "equal parts. Write quant_reach=maxtext, or a count of 1.",
        )


# --- rules ------------------------------------------------------------------------------------


def rules(config: Config) -> list[QtRule]:
    """Returns the rules that a config stands for; the first match wins."""
    check(config)
    if config.quant:
        try:
            return as_rules(config.quant, QtRule)
        except (ValueError, TypeError) as error:
            raise UsageError(f"quant: {error}") from None
    value = value_of(config)
    if value is None or config.quantization == "te_no_quant":
        return []
    where = f"({LAYERS}|{MTP})" if config.quantize_mtp else LAYERS
    ops: tuple[str, ...] = ("dot_general",)
    if config.num_experts > 1 and (config.quant_reach == "all" or value.experts):
        ops = ("dot_general", "ragged_dot")
    if config.quantize_logits_proj:
        where = f"({where}|{HEAD})"
    rules_asked = _mixed(config, where, ops) if config.quantization == "intmp" else [
        QtRule(module_path=where, op_names=ops, **value.fields(config))
    ]  # fmt: skip
    if config.num_experts > 1 and config.quant_reach == "maxtext" and value.experts:
        rules_asked = _as_qwix_has_experts(rules_asked)
    if config.num_experts > 1 and not config.quantize_router_proj:
        rules_asked = [QtRule(module_path=r".*/gate"), *rules_asked]
    return rules_asked


def _as_qwix_has_experts(rules: list[QtRule]) -> list[QtRule]:
    """Gives experts absmax whatever the flags say, since Qwix 0.1.8 has no calibration of a
    ragged_dot."""
    absmax = {
        f"{name}_calibration_method": "absmax" for name in ("weight", "act", "bwd")
    }
    experts = [
        dataclasses.replace(
            r, op_names=("ragged_dot",), additional_qt_config=None, **absmax
        )
        for r in rules
    ]
    return [
        *(dataclasses.replace(r, op_names=("dot_general",)) for r in rules),
        *experts,
    ]


def provider(config: Config) -> QuantizationProvider | None:
    """Returns the provider to train under, or None in float."""
    require(
        not config.replicate_quant_scale,
        "replicate_quant_scale=true is about the scales of stored weights; training makes "
        "its own in every step. Drop it; generate and eval take it, with mesh.",
    )
    require(
        not config.group_size,
        f"group_size={config.group_size} is about stored weights: training takes it from "
        "rules, quant=[{weight_qtype: int4, tile_size: 32}] say. Drop it; quantize, "
        "generate, eval and export take it.",
    )
    rules_asked = rules(config)
    if not rules_asked:
        return None
    value = value_of(config)
    make = value.provider if value else QtProvider
    if config.static:
        measuring = config.static == "measure"
        make = functools.partial(StaticProvider, measuring=measuring)
    try:
        return make(rules_asked)
    except ValueError as error:
        raise UsageError(f"quant: {error}") from None


def serving(config: Config) -> PtqProvider | None:
    """Returns the provider that quantizes and serves a checkpoint, or None in float."""
    require(
        not config.static,
        f"static={config.static} is for training: a checkpoint's weights are quantized "
        "with ranges of their own. Drop it.",
    )
    rules_asked = rules(config)
    if not rules_asked:
        require(
            not config.group_size,
            f"group_size={config.group_size} says nothing of float weights: write "
            "quantization=int4w beside it, or drop it.",
        )
        return None
    for i, rule in enumerate(rules_asked):
        require(
            not rule.act_static_scale,
            f"quant: rule {i} ({rule.module_path!r}) has act_static_scale, and a served "
            "model quantizes activations as they come: drop it.",
        )
    value = value_of(config)
    if config.quantization == "intmp" or value is None:
        require(
            not config.group_size,
            f"group_size={config.group_size}: rules of your own, and those of intmp, have "
            "tile_size for that. Drop it.",
        )
        return PtqProvider(rules_asked)
    require(
        value.serves,
        f"quantization={config.quantization} is for training. A checkpoint can be: "
        f"{', '.join(k for k, v in VALUES.items() if any(x.serves for x in v))}, intmp.",
    )
    if value.serves == FORWARD:
        require(
            not config.group_size,
            f"group_size={config.group_size}: quantization={config.quantization} has one "
            "scale for a weight. Drop it, or write int4w, int8w, int8, fp8 ...",
        )
        return PtqProvider(rules_asked)
    weight, act = value.serves or (None, None)
    plain = {
        "weight_qtype": weight,
        "act_qtype": act,
        "act_static_scale": None,
        "tile_size": config.group_size or None,
    }
    base = [
        QuantizationRule(module_path=r.module_path)
        if r.leaves_alone
        else QuantizationRule(
            module_path=r.module_path,
            op_names=r.op_names,
            weight_calibration_method=r.weight_calibration_method,
            act_calibration_method=r.act_calibration_method
            or config.act_quantization_calibration_method
            or None,
            **plain,
        )
        for r in rules_asked
    ]
    return PtqProvider(base)


def in_float(config: Config) -> Config:
    """Returns the same config without quantization."""
    plain = {k: f.default for k, f in keys(Quantization).items()}
    without = {"ring_fp8": "ring", "minimal_with_quantization": "minimal"}
    without |= {"quantized": "minimal"}  # policies that keep codes
    changed = {"expert_dispatch": config.expert_dispatch}
    changed |= {"remat_policy": config.remat_policy}
    changed = {name: without.get(value, value) for name, value in changed.items()}
    return dataclasses.replace(config, **plain, fp8_weight_gather=False, **changed)


# --- intmp ------------------------------------------------------------------------------------

# AQT's float gradients are those of the quantized operands, clipped or not.
AQT_GRADIENTS = {"use_original_residuals": False, "disable_gradient_clipping": True}
MIX = {"w_bits": None, "a_bits": None, "w_scale": 1.0, "a_scale": 1.0, "tile_size": -1}


def _mixed(config: Config, where: str, ops: tuple[str, ...]) -> list[QtRule]:
    """Returns the rules of MaxText's JSON, {regular expression: settings}. There the last
    match wins, so their order is reversed here."""
    entries = _read_mix(config.quant_cfg_path)
    default = {**MIX, **entries.get("__default__", {})}
    mixed_rules = []
    for pattern, settings in reversed(entries.items()):
        if pattern != "__default__":
            mixed_rules.append(
                _mixed_rule({**default, **settings}, where, pattern, ops)
            )
    if "__default__" in entries:
        mixed_rules.append(_mixed_rule(default, where, ".*", ops))
    return mixed_rules


def _mixed_rule(settings: dict, where: str, pattern: str, ops) -> QtRule:
    """Returns the rule for one regular expression and its settings."""
    path = f"(?={where}$)(?:{pattern})"
    tile = settings["tile_size"] if settings["tile_size"] != -1 else None

    formats, methods = {}, {}
    for letter, operand in (("w", "weight"), ("a", "act")):
        bits, scale = settings[f"{letter}_bits"], settings[f"{letter}_scale"]
        if bits is not None:
            formats[f"{operand}_qtype"] = f"int{bits}"
            method = f"absmax,{scale}" if scale < 1 else "absmax"
            methods[f"{operand}_calibration_method"] = method
    if not formats:
        return QtRule(module_path=path)
    return QtRule(
        module_path=path,
        op_names=ops,
        tile_size=tile,
        additional_qt_config=AQT_GRADIENTS,
        **formats,
        **methods,
    )


def _read_mix(name: str) -> dict[str, dict]:
    """Reads and checks the JSON file of intmp."""
    shipped = sorted(p.stem for p in MIXES.glob("*.json"))
    require(
        name,
        "quantization=intmp needs quant_cfg_path: a JSON file, or one of "
        f"{', '.join(shipped)}.",
    )
    path = MIXES / f"{name}.json" if name in shipped else pathlib.Path(name)
    require(path.is_file(), f"quant_cfg_path={name}: no such file.")
    try:
        entries = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise UsageError(
            f"quant_cfg_path={name} does not read as JSON: {error}."
        ) from None
    require(
        isinstance(entries, dict)
        and all(isinstance(e, dict) for e in entries.values()),
        f"quant_cfg_path={name}: an object of {{regular expression: settings}}.",
    )
    for pattern, settings in entries.items():
        for field, given in settings.items():
            require(
                field in MIX,
                f"quant_cfg_path={name}, {pattern!r}: unknown setting {field!r}. "
                f"{did_you_mean(field, MIX, str)}",
            )
            require(
                not field.endswith("_bits") or given in (None, *range(2, 9)),
                f"quant_cfg_path={name}, {pattern!r}: {field}={given}: 2 to 8, or null.",
            )
    return entries


# --- sparsity ---------------------------------------------------------------------------------


def sparsity(config: Config) -> Sparsity | None:
    """Returns which weights to keep and when that is decided, or None to keep all."""
    if config.weight_sparsity_n is None:
        return None
    try:
        return Sparsity(
            config.weight_sparsity_n,
            config.weight_sparsity_m,
            start_step=config.weight_sparsity_start_step,
            update_step=config.weight_sparsity_update_step,
        )
    except ValueError as error:
        raise UsageError(f"weight_sparsity_n, weight_sparsity_m: {error}") from None
