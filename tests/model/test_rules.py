"""Rules: what they match, and what they refuse."""

import copy
import pickle

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from flax import nnx

import midtread as mt
from midtread.model.rules import as_rules, recipe_of

FIRST = [
    mt.QtRule(
        module_path="decoder/.*layers.*",
        op_names=("dot_general", "gmm"),
        weight_qtype="int8",
    ),
    mt.QtRule(module_path="decoder/.*", weight_qtype="fp8"),
]


@pytest.mark.parametrize(
    "path, op, expected",
    [
        ("decoder/layers/mlp", "dot_general", 0),
        ("decoder/layers/mlp", "einsum", 1),
        ("decoder/layers/mlp", "gmm", 0),
        ("decoder", "dot_general", None),  # the whole path must match
        ("xdecoder/layers", "dot_general", None),
    ],
)
def test_first_match_wins(path, op, expected):
    found = next((i for i, rule in enumerate(FIRST) if rule.matches(path, op)), None)
    assert found == expected


@pytest.mark.parametrize(
    "build, message",
    [
        (
            lambda: mt.QuantizationRule(module_path="layers/(.*"),
            "not a regular expression",
        ),
        (lambda: mt.QuantizationRule(weight_qtype="int9"), "'int9' is not a format"),
        (lambda: mt.QtRule(bwd_qtype="bfloat16"), "'bfloat16' is not a format"),
        (
            lambda: mt.QuantizationRule(act_calibration_method="max"),
            "unknown calibration 'max'",
        ),
        (
            lambda: mt.QtRule(bwd_stochastic_rounding="dither"),
            "unknown bwd_stochastic_rounding",
        ),
        (
            lambda: mt.QtProvider([mt.QuantizationRule(act_static_scale=False)]),
            "act_qtype is None",
        ),
        (
            lambda: as_rules([{"weight_qtyp": "int8"}]),
            "rule 0 .*Did you mean 'weight_qtype'",
        ),
        (
            lambda: mt.QtProvider([{"weight_qtype": "int8", "speed": 9}]),
            "unknown field 'speed'",
        ),
        (lambda: mt.QuantizationRule(tile_size=64.0), "write 64 for so many"),
        (lambda: mt.QuantizationRule(tile_size={0: -1}), "below 0"),
        (lambda: mt.QuantizationRule(tile_size=0), "leave tile_size out"),
        (lambda: mt.QtRule(bwd_weight_grad_tile_size=0), "leave bwd_weight_grad"),
        (
            lambda: mt.QtRule(additional_qt_config={"dlhs_gradqtype": "int8"}),
            "Did you mean 'dlhs_grad_qtype'",
        ),
        (
            lambda: mt.QtRule(recipe="qwix_int8", weight_qtype="int8"),
            "leave out weight_qtype",
        ),
        (lambda: mt.QtRule(recipe="int8"), "unknown recipe 'int8'"),
        (
            lambda: recipe_of(
                mt.QtRule(weight_qtype="mxfp4", tile_size=64), False, True
            ),
            "mxfp4 requires a tile size of 32",
        ),
    ],
)
def test_bad_rules_are_named(build, message):
    with pytest.raises(ValueError, match=message):
        build()
    with pytest.raises(TypeError, match="write tile_size=128"):
        mt.QuantizationRule(tile_size="128")
    for rules in ("int8", mt.QtRule(), {"weight_qtype": "int8"}):
        with pytest.raises(TypeError, match="rules are a list, not a"):
            mt.QtProvider(rules)
    with pytest.raises(TypeError, match=r"several axes: write \[1\]"):
        mt.quantize(jnp.ones((2, 2)), "int8", channelwise_axes=1)


@pytest.mark.parametrize(
    "provider, rule, message",
    [
        (mt.PtqProvider, mt.LoraRule(rank=2, alpha=1.0), "rank=2, .*mt.LoraProvider"),
        (mt.QtProvider, mt.LoraRule(rank=2, alpha=1.0), "rank=2, .*mt.LoraProvider"),
        (mt.OdmlQatProvider, mt.QtRule(bwd_qtype="int8"), "bwd_qtype is for QtProvider"),
        (
            mt.DelayedFp8Provider,
            mt.QtRule(weight_qtype="e4m3", act_qtype="e4m3", tile_size=8),
            "Drop tile_size",
        ),
        (
            mt.PtqProvider,
            mt.QtRule(weight_qtype="int8", additional_qt_config={"sparsity_rule": mt.Sparsity(2, 4)}),
            "prunes weights",
        ),
    ],
)  # fmt: skip
def test_fields_that_a_provider_does_not_honour_are_refused(provider, rule, message):
    with pytest.raises(ValueError, match=message):
        provider([rule])


def test_a_weight_in_another_format_than_its_rule_is_refused():
    x, rules = jnp.ones((2, 8)), lambda fmt: [mt.QuantizationRule(weight_qtype=fmt)]
    served = mt.quantize_model(
        nnx.Linear(8, 4, rngs=nnx.Rngs(0)), mt.PtqProvider(rules("int8")), x
    )
    assert mt.quantize_model(served, mt.PtqProvider(rules("int8")), x)(x).shape
    with pytest.raises(ValueError, match="holds a weight in int8, .* asks for int4"):
        mt.quantize_model(served, mt.PtqProvider(rules("int4")), x)


def test_static_scales_need_statistics():
    x, key = jnp.ones((2, 8)), jax.random.key(0)
    rule = mt.QuantizationRule(
        weight_qtype="int8", act_qtype="int8", act_static_scale=True
    )
    model = mt.quantize_model(nn.Dense(4), mt.PtqProvider([rule]))
    shapes = jax.eval_shape(model.init, key, x)["params"]
    with pytest.raises(ValueError, match="pass quant_stats=variables"):
        mt.quantize_params(nn.Dense(4).init(key, x)["params"], shapes)


def test_a_recipe_by_its_name():
    assert mt.QtRule(recipe="qwix_int8") == mt.QtRule(recipe=mt.recipe("qwix_int8"))


def test_rules_from_yaml(tmp_path):
    path = tmp_path / "rules.yml"
    path.write_text(
        "- module_path: mlp/.*\n  weight_qtype: int8\n  bwd_qtype: fp8\n- {}\n"
    )
    rules = mt.load_rules(str(path))
    assert rules == mt.load_rules(str(path), mt.QtRule)
    assert rules[0] == mt.QtRule(
        module_path="mlp/.*", weight_qtype="int8", bwd_qtype="fp8"
    )
    path.write_text("- weight_qtype: int8\n")
    assert type(mt.load_rules(str(path))[0]) is mt.QuantizationRule
    path.write_text("module_path: mlp")
    with pytest.raises(TypeError, match="should hold a list of rules"):
        mt.load_rules(str(path))


def test_one_op_may_be_named_without_a_tuple():
    rule = mt.QuantizationRule(op_names="einsum", weight_qtype="int8")
    assert rule.op_names == ("einsum",) and rule.matches("a", "einsum")
    assert not rule.matches("a", "ein")


def test_a_field_of_another_rule_is_said_to_be_one():
    with pytest.raises(TypeError, match="'bwd_qtype'. mt.QtRule has it: write that"):
        mt.QuantizationRule(weight_qtype="int8", bwd_qtype="int8")


@pytest.mark.parametrize("kind", [mt.QuantizationRule, mt.QtRule, mt.LoraRule])
def test_a_field_that_does_not_exist_is_named_with_the_nearest(kind):
    with pytest.raises(
        TypeError, match="no field 'group_size'. Did you mean 'tile_size'"
    ):
        kind(group_size=32)
    rule = mt.QtRule(weight_qtype="int8")
    assert copy.copy(rule) == pickle.loads(pickle.dumps(rule)) == rule
