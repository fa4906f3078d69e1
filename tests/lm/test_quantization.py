"""What each value of `quantization=` reaches, honours, refuses and learns."""

import functools
import json
import re
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from midtread.lm import build, data, model, quantization, settings, step
from midtread.lm.config import QUANTIZATIONS, Model, Training, section
from midtread.lm.usage import UsageError
from midtread.model.rules import recipe_of
from midtread.providers.delayed import DelayedFp8Provider
from tests.lm.curves import CASES, PATH, curve

ORDINARY = {"int8 (qwix)", "fp8"}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=() if n in ORDINARY else pytest.mark.slow)
        for n in ["float", *CASES]
    ],
)
def test_golden_losses(name):
    """Written by `python -m tests.lm.curves`, one file per minor version of JAX."""
    if not PATH.exists():
        pytest.skip(f"no golden losses for this JAX: {PATH.name}")
    golden = json.loads(PATH.read_text())
    found = curve({"float": [], **CASES}[name])
    np.testing.assert_allclose(found, golden[name], rtol=1e-3)
    assert found[-1] < found[0] - 0.1


def test_every_value_has_a_row_and_a_curve():
    assert set(quantization.VALUES) == set(get_args(QUANTIZATIONS)) - {""}
    for path in PATH.parent.glob("jax-*.json"):
        assert set(json.loads(path.read_text())) == {"float", *CASES}


# --- reach ------------------------------------------------------------------------------------

DENSE = ["tiny"]
EXPERTS = ["tiny-deepseek"]


@functools.cache
def sites(*words):
    """Every contraction of the float model: (path, op)."""
    rows = build.coverage(settings.load(words)).rows
    return [(r.path, re.sub(r"\d+$", "", r.op)) for r in rows if r.flops]


def ruled(base, words):
    """Sites that the rules of a config reach, by last name; none is run."""
    rules = quantization.rules(settings.load([*base, *words]))
    out = set()
    for path, op in sites(*base):
        rule = next((r for r in rules if r.matches(path, op)), None)
        if rule is not None and not rule.leaves_alone:
            out.add(path.split("/")[-1] + ("" if op == "dot_general" else f":{op}"))
    return out


def reached(*words):
    """{last name of a site: formats of its three matmuls}, from a trace."""
    found = build.coverage(settings.load(words))
    ops = lambda r: (
        r.path.split("/")[-1] + (":ragged_dot" if r.op.startswith("ragged") else "")
    )
    return {ops(r): (r.fwd, r.dlhs, r.drhs) for r in found.rows if r.is_quantized}


PROJECTIONS = {"wq_a", "wq_b", "wkv_a", "wkv_b", "out", "wi_0", "wi_1", "wo", "gate"}
GROUPED = {"MoeBlock_0:ragged_dot"}


@pytest.mark.parametrize(
    "case", [c for c in CASES if c not in ("te_no_quant", "intmp")]
)
def test_reach(case):
    """The table in research on MaxText: projections and router always; experts for
    fp8_full alone, or with quant_reach=all; head, MTP and attention never unasked."""
    full = PROJECTIONS | GROUPED
    assert ruled(EXPERTS, CASES[case]) == full
    fp8_full = case.startswith("fp8_full")
    expected = full if fp8_full else PROJECTIONS
    assert ruled(EXPERTS, [*CASES[case], "quant_reach=maxtext"]) == expected


def test_formats_of_the_three_matmuls():
    two = lambda x: (x, x)
    formats = reached(*EXPERTS, "quantization=fp8_full")
    assert formats["wo"] == formats["MoeBlock_0:ragged_dot"] == (
        two("e4m3"), ("e5m2", "e4m3"), ("e4m3", "e5m2"))  # fmt: skip
    assert reached(*DENSE, "quantization=int4")["wo"] == (two("int4"),) * 3
    aqt = reached(*DENSE, "quantization=int8", "quantization_local_shard_count=0")["wo"]
    assert aqt[:2] == (two("int8"),) * 2 and "int8" not in aqt[2]
    w4 = reached(*DENSE, "quantization=int4w")["wo"]
    assert w4[0][1] == "int4" and w4[0][0] == "bf16"


def test_opt_outs_and_opt_ins():
    base = ["quantization=fp8_full"]
    assert "gate" not in ruled(EXPERTS, [*base, "quantize_router_proj=false"])
    assert "logits_dense" in ruled(EXPERTS, [*base, "quantize_logits_proj=true"])
    assert "projection" in ruled(EXPERTS, [*base, "quantize_mtp=true"])
    rules = quantization.rules(settings.load([*EXPERTS, *base, "quantize_mtp=true"]))
    assert rules[0].matches("mtp_block/transformer_layer/mlp/wo", "dot_general")


def test_calibration_keys():
    words = [*DENSE, "quantization=fp8_full", "quantization_calibration_method=absmax,0.9",
             "act_quantization_calibration_method=fixed,-224,224",
             "bwd_quantization_calibration_method=rms,7",
             "drhs_grad_quantization_calibration_method=absmax"]  # fmt: skip
    config = settings.load(words)
    (rule,) = quantization.rules(config)
    assert rule.weight_calibration_method == "absmax,0.9"
    assert rule.act_calibration_method == "fixed,-224,224"
    assert rule.bwd_calibration_method == "rms,7"
    assert rule.additional_qt_config == {"drhs_grad_calibration_method": "absmax"}
    assert "act fixed,-224,224" in build.mode(config)
    experts = settings.load([*EXPERTS, *words[1:], "quant_reach=maxtext"])
    dense, grouped = quantization.rules(experts)
    assert grouped.op_names == ("ragged_dot",)
    assert grouped.act_calibration_method == "absmax"  # as Qwix 0.1.8 has it
    assert dense.act_calibration_method == "fixed,-224,224"


@pytest.mark.parametrize("value", ["fp8_gpu", "fp8_nanoo"])
def test_delayed_scaling_honours_them_too(value):
    config = settings.load(
        [*DENSE, f"quantization={value}", "quantization_calibration_method=rms,7",
         "act_quantization_calibration_method=fixed,-224,224",
         "bwd_quantization_calibration_method=absmax,0.9"])  # fmt: skip
    (rule,) = quantization.rules(config)
    assert rule.weight_calibration_method == "rms,7"
    assert rule.act_calibration_method == "fixed,-224,224"
    assert rule.bwd_calibration_method == "absmax,0.9"
    assert "act fixed,-224,224: one constant scale" in build.mode(config)
    assert isinstance(quantization.provider(config), DelayedFp8Provider)


def test_local_shards_cut_the_weight_gradient():
    (rule,) = quantization.rules(
        settings.load([*DENSE, "quantization=int8", "use_qwix_quantization=true",
                       "quantization_local_shard_count=2"]))  # fmt: skip
    assert rule.bwd_weight_grad_tile_size == 0.5
    config = settings.load(
        [*DENSE, "quantization=int8", "quantization_local_shard_count=-1"]
    )
    (rule,) = quantization.rules(config)
    tiles = dict(rule.recipe.drhs.g.tiled_axes)
    assert tiles == {"summed_first": 1 / jax.local_device_count()}
    assert "numbers depend on the mesh" in build.mode(config)


def test_constant_bounds():
    (rule,) = quantization.rules(
        settings.load(
            [*DENSE, "quantization=aqt_fp8_full", "constant_bound_config=1,2,3,4,5,6"]
        )
    )
    assert str(rule.recipe.fwd.lhs.calibration) == "fixed,1"
    assert str(rule.recipe.drhs.g.calibration) == "fixed,5"


REFUSED = {
    "not Qwix's": (["quantization=te_nvfp4", "use_qwix_quantization=true"], "not one of Qwix's"),
    "Qwix's alone": (["quantization=int4", "use_qwix_quantization=false"], "Qwix's alone"),
    "calibration elsewhere": (
        ["quantization=int8", "act_quantization_calibration_method=absmax"], "aqt route"),
    "calibration of nothing": (["bwd_quantization_calibration_method=absmax"], "drop one"),
    "a bad calibration": (
        ["quantization=fp8_full", "quantization_calibration_method=absmaxx"], "unknown calibration"),
    "delayed and asymmetric": (
        ["quantization=fp8_gpu", "weight_quantization_calibration_method=minmax"], "around 0"),
    "delayed elsewhere": (
        ["quantization=fp8", "weight_quantization_calibration_method=fixed,1"], "aqt route"),
    "no float gradient on Qwix's": (
        ["quantization=int8", "use_qwix_quantization=true", "quantization_local_shard_count=0"],
        "AQT route"),
    "shards of experts": (
        ["num_experts=2", "quantization=int8", "quantization_local_shard_count=2"], "quant_reach=maxtext"),
    "shards of nothing": (["quantization=fp8_full", "quantization_local_shard_count=2"], "drop one"),
    "five bounds": (["quantization=aqt_fp8_full", "constant_bound_config=1,2,3,4,5"], "six"),
    "bounds elsewhere": (["quantization=int8", "constant_bound_config=1,2,3,4,5,6"], "drop one"),
    "no mix": (["quantization=intmp"], "quant_cfg_path"),
    "no such mix": (["quantization=intmp", "quant_cfg_path=none.json"], "none.json"),
    "sparsity elsewhere": (
        ["quantization=int8", "weight_sparsity_n=2", "weight_sparsity_m=4"], "drop one"),
    "sparsity without numbers": (
        ["quantization=fp8_full", "weight_sparsity_start_step=3"], "weight_sparsity_n"),
    "a tied head": (["quantization=fp8_full", "quantize_logits_proj=true"], "logits_via_embedding"),
    "no MTP": (["quantization=fp8_full", "quantize_mtp=true"], "mtp_num_layers=0"),
    "a head beyond MaxText": (
        ["quantization=int8", "logits_via_embedding=false", "quantize_logits_proj=true",
         "quant_reach=maxtext"], "quant_reach=all"),
    "a head of nothing": (["logits_via_embedding=false", "quantize_logits_proj=true"], "set quantization"),
    "scales of training": (["quantization=int8", "replicate_quant_scale=true"], "generate and eval"),
    "a rule's field": (["quant=[{weight_qtipe: int8}]"], "weight_qtype"),
    "a rule that matches nothing": (["quant=[{module_path: nothing, weight_qtype: int8}]"], "nothing"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refused_by_name(case):
    words, expected = REFUSED[case]
    with pytest.raises(UsageError) as error:
        build.coverage(settings.load([*DENSE, *words]))
    assert expected in str(error.value) and "\n" not in str(error.value)


# --- mixed precision --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", sorted(p.stem for p in quantization.MIXES.glob("*.json"))
)
def test_shipped_mixes(name):
    formats = reached(*DENSE, "quantization=intmp", f"quant_cfg_path={name}")
    weight = lambda site: formats[site][0][1]
    if name.endswith("weight_only"):
        assert weight("wo") == name[:4] and formats["wo"][0][0] == "bf16"
        return
    assert weight("query").startswith("int4") and weight("wi_1") == "int8"
    rules = quantization.rules(
        settings.load([*DENSE, "quantization=intmp", f"quant_cfg_path={name}"])
    )
    calibrations = {str(recipe_of(r, False, True).fwd.rhs.calibration) for r in rules}
    assert ("absmax,0.8" in calibrations) == name.endswith("scale")
    if name.endswith("subchannel"):
        assert formats["wo"][0][0] == "int8"
        assert any(
            dict(recipe_of(r, False, True).fwd.rhs.tiled_axes).get("summed") == 128
            for r in rules
        )


def test_the_last_entry_that_matches_wins(tmp_path):
    path = tmp_path / "mix.json"
    path.write_text(json.dumps({
        "__default__": {"w_bits": 8}, ".*/mlp/.*": {"w_bits": 4}, ".*/wo": {"w_bits": 2}}))  # fmt: skip
    formats = reached(*DENSE, "quantization=intmp", f"quant_cfg_path={path}")
    assert [formats[s][0][1] for s in ("query", "wi_0", "wo")] == [
        "int8",
        "int4",
        "int2",
    ]
    path.write_text(json.dumps({"__default__": {"w_bitz": 8}}))
    with pytest.raises(UsageError, match="Did you mean w_bits"):
        reached(*DENSE, "quantization=intmp", f"quant_cfg_path={path}")


# --- sparsity ---------------------------------------------------------------------------------


def test_weights_are_pruned_on_schedule():
    config = settings.load([
        *DENSE, "dataset_type=synthetic", "num_decoder_layers=1", "quantization=fp8_full",
        "weight_sparsity_n=2", "weight_sparsity_m=4", "weight_sparsity_start_step=1",
        "weight_sparsity_update_step=2"])  # fmt: skip
    m, t = section(config, Model), section(config, Training)
    pruning = build.pruning(config, build.coverage(config))
    assert len(pruning.paths) == 7
    net = build.for_training(config, model.create(m))
    state, parts = step.initial(net, t, pruning)
    run = step.make_step(m, t, parts, 0, pruning)
    batch = data.held_out(data.splits(config).train, config)[0]
    kept = []
    for _ in range(4):
        state, _ = run(state, batch)
        kept.append(np.asarray(state.masks["decoder/layers/mlp/wo/kernel"]))
    assert kept[0].all()  # step 0: not yet
    assert (kept[1].reshape(-1, 4).sum(1) == 2).all()
    assert (kept[1] == kept[2]).all()  # kept for two steps
    pruned = step.prune(state.learned, state.masks)
    weight = pruned["decoder"]["layers"]["mlp"]["wo"]["kernel"][...]
    assert float(jnp.mean(weight == 0)) == 0.5


def test_manual_rules_from_yaml(tmp_path):
    path = tmp_path / "mine.yml"
    path.write_text(
        "model_name: tiny\n"
        "quant:\n"
        "  - {module_path: .*/wo}\n"
        "  - {module_path: decoder/.*, op_names: [dot_general], weight_qtype: int8,"
        " act_qtype: int8, bwd_qtype: int8}\n"
    )
    formats = reached(str(path))
    assert "wo" not in formats and formats["query"] == (("int8", "int8"),) * 3
