"""What is chosen, on which device, and what those before it said: from shapes alone."""

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn

import midtread as mt
from midtread import cli
from midtread.kernels import choose, environment
from midtread.kernels.candidates import Candidate, Refusal, first
from midtread.kernels.environment import here, pretended, watched
from midtread.kernels.layout import weight_matmul
from midtread.kernels.quantize.operand import Operand, Twice
from tests.kernels.plans import (
    ADA,
    CPU,
    GROUPED,
    H200,
    INTERPRETED,
    coded,
    floats,
    matmul,
)

SIZES = jax.ShapeDtypeStruct((4,), jnp.int32)
NK = ("m", "k"), ("n", "k"), ("m", "n")
int4 = coded("int4", (512, 768), (1,), {0: 128})
int8 = coded("int8", (512, 768), (1,))
fp8_tiles = coded("e4m3", (512, 768), (), {0: 128, 1: 128})
head = coded("int8", (768, 512), (0,))
experts = coded("int8", (4, 256, 512), (0, 2))


def rows(name, num, tile=None):
    return coded(name, (num, 512), (0,), {1: tile} if tile else {})


# operands, then for H200, Ada and CPU what is chosen: None for XLA
WEIGHTS = {
    "few": (matmul(floats(8, 512), int4), "hopper_decode", "triton", "cpu"),
    "many": (matmul(floats(100, 512), int4), "hopper_prefill", None, "cpu"),
    "float16": (matmul(floats(8, 512, dtype=jnp.float16), int4), "triton", "triton", "cpu"),
    "float32": (matmul(floats(8, 512, dtype=jnp.float32), int4), None, None, "cpu"),
    "a tied head": (matmul(floats(8, 512), head, NK), "triton", "triton", "cpu"),
    "int2": (matmul(floats(8, 512), coded("int2", (512, 768), (1,))), "hopper_decode", "triton", "cpu"),
    "float6": (matmul(floats(8, 512), coded("fp6", (512, 768), (1,))), None, None, None),
    "a narrow one": (matmul(floats(8, 512), coded("int8", (512, 96), (1,))), "triton", "triton", None),
}  # fmt: skip
SCALED = {
    "few": (matmul(rows("int8", 8), int8), "few_codes", "few_codes", None),
    "stored": (matmul(rows("int8", 256), int8, stored=("lhs", "rhs")), "hopper_prefill", None, None),
    "written": (matmul(rows("int8", 256), int8), "hopper", None, None),
    "tiled": (matmul(rows("e4m3", 256, 128), fp8_tiles, tiles={"k": 4}), "hopper_tiled", None, None),
    "mixed": (matmul(rows("int8", 256), fp8_tiles), None, None, None),
}  # fmt: skip
GROUPS = {
    "few": (matmul(floats(40, 256), experts, GROUPED, sizes=SIZES), "hopper_decode", "triton_grouped", None),
    "many": (matmul(floats(1024, 256), experts, GROUPED, sizes=SIZES), None, None, None),
}  # fmt: skip


def chosen(table, a, env):
    return first("", table, a, env).name


@pytest.mark.parametrize("name", WEIGHTS)
def test_a_weight(name):
    a, *names = WEIGHTS[name]
    found = weight_matmul(a)
    assert [chosen(choose.WEIGHT, found, env) for env in (H200, ADA, CPU)] == names


@pytest.mark.parametrize("name", SCALED)
def test_codes_by_codes(name):
    a, *names = SCALED[name]
    assert [chosen(choose.SCALED, a, env) for env in (H200, ADA, CPU)] == names


@pytest.mark.parametrize("name", GROUPS)
def test_rows_in_groups(name):
    a, *names = GROUPS[name]
    got = [chosen(choose.GROUPED_WEIGHT, a, env) for env in (H200, ADA, CPU)]
    assert got == names
    codes = coded("int8", a.lhs.shape, (0,))
    both = matmul(codes, experts, GROUPED, sizes=SIZES)
    name = (
        "hopper_grouped" if len(a.lhs.shape) and a.lhs.shape[0] > 256 else "few_codes"
    )
    assert chosen(choose.GROUPED_SCALED, both, H200) == name


def test_quantizing():
    row, column = mt.Spec("int8", (0,)), mt.Spec("int8", (1,))
    tiles = mt.Spec("int8", (0,), {1: 128})
    x, few = floats(256, 512), floats(8, 512)
    choice = lambda x, spec, env, **how: str(
        first("", choose.QUANTIZE, Operand(x, spec, summed=(1,), **how), env)
    )
    assert choice(x, row, H200) == choice(x, row, ADA) == "triton (rows)"
    assert choice(x, column, H200) == "triton (cast)"
    assert choice(x, mt.Spec("e4m3", (0,), {1: 128}), H200) == "triton (tiles)"
    assert choice(few, row, H200) == choice(x, row, CPU) == "xla"
    assert choice(few, tiles, H200) == "xla_one_read"
    assert choice(x, mt.Spec("int8", (0,), calibration="minmax"), H200) == "xla"
    several = environment.Env(H200.device, is_split=True)
    assert choice(x, row, several) == "xla"  # which can partition it
    both = lambda a, b: str(first("", choose.QUANTIZE_TWICE, Twice(x, (a, b), ((1,), (0,))), H200))  # fmt: skip
    assert both(mt.Spec("e4m3"), mt.Spec("e4m3")) == "triton (cast)"
    assert both(row, mt.Spec("e4m3")) == "XLA"


REFUSALS = {  # operands, device -> candidates and a part of what each says
    "many rows in float32": (
        choose.WEIGHT, weight_matmul(matmul(floats(100, 512, dtype=jnp.float32), int4)), H200,
        ["not bfloat16", "not bfloat16 or float16", "not bfloat16", "not a CPU"],
    ),
    "an Ada GPU": (
        choose.SCALED, SCALED["written"][0], ADA,
        ["more than 64 rows", "NVIDIA L40S is not a Hopper GPU", "not a Hopper", "not a Hopper"],
    ),
    "a CPU": (
        choose.SCALED, SCALED["few"][0], CPU, ["the device is cpu, not an NVIDIA GPU"] * 4,
    ),
    "mixed types": (
        choose.SCALED, SCALED["mixed"][0], H200,
        ["64 rows", "do not vary", "were written for this matmul", "int8 by float8_e4m3fn"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals_say_why(name):
    table, a, env, parts = REFUSALS[name]
    choice = first("", table, a, env)
    assert len(choice.refused) == len(parts)
    for (_, reason), part in zip(choice.refused, parts):
        assert part in reason


def test_interpreted_kernels():
    """Those that decode by PTX are not interpreted: Triton's are."""
    choice = first("", choose.WEIGHT, weight_matmul(WEIGHTS["few"][0]), INTERPRETED)
    assert choice.name == "triton"
    assert choice.refused == (("hopper_decode", "it is not interpreted"),)


def test_a_plan_holds_what_was_found_out():
    a = weight_matmul(WEIGHTS["few"][0])
    plan = first("", choose.WEIGHT, a, H200).plan
    rows, shape, blocks = plan.planned
    assert (rows, shape) == (8, (512, 768)) and 512 % blocks.k == 0
    assert plan == first("", choose.WEIGHT, a, H200).plan  # facts, no arrays
    assert hash(plan) == hash(first("", choose.WEIGHT, a, H200).plan)


def test_the_first_that_can_is_chosen_and_watched():
    seen = []
    plan = type("Plan", (), {"run": lambda self, x: x + 1, "detail": "by one"})()
    table = (
        Candidate("never", "any", lambda x, env: Refusal("it is shy")),
        Candidate("hopper", "hopper", "no.such.module:plan"),  # not imported here
        Candidate("always", "any", lambda x, env: plan),
        Candidate("too late", "any", lambda x, env: 1 / 0),
    )
    with watched(lambda *told: seen.append(told)):
        choice = first("adding", table, 1, here())
    assert choice.plan.run(1) == 2 and str(choice) == "always (by one)"
    assert seen == [("adding", 1, choice)]
    assert choice.refused[0] == ("never", "it is shy")
    insisting = environment.Env(H200.device, "gpu")
    with pytest.raises(ValueError, match="cannot run these numbers: it is shy"):
        first("adding", table[:1], 1, insisting, "these numbers")


def test_a_device_is_pretended():
    assert here().device.platform == jax.default_backend()
    with pretended("l40s"):
        assert here() == ADA and not here().is_split
    with pytest.raises(ValueError, match="unknown device 'h20'. There are: h200"):
        pretended("h20").__enter__()


def test_explain_tells_kernels_and_reasons(capsys):
    rule = mt.QtRule(weight_qtype="int8", act_qtype="int8", bwd_qtype="int8")
    x = jax.ShapeDtypeStruct((256, 512), jnp.bfloat16)
    dense = nn.Dense(256, dtype=jnp.bfloat16, use_bias=False)
    explain = lambda **how: mt.explain(dense, mt.QtProvider([rule]), x, **how)
    on_h200 = explain(kernels=True, device="h200")
    (row,) = on_h200.rows
    matmuls = [k for k in row.kernels if "matmul" in k.operation]
    assert [(k.phase, k.name) for k in matmuls] == [
        ("forward", "hopper"), ("backward", "hopper"), ("backward", "hopper")
    ]  # fmt: skip
    assert "not few_codes: both sides have more than 64 rows" in str(on_h200)
    assert {k.name for k in explain(kernels=True).rows[0].kernels} == {"XLA", "xla"}
    assert explain().rows[0].kernels == ()
    with pytest.raises(ValueError, match="unknown device 'h20'"):
        explain(kernels=True, device="h20")
    with pytest.raises(ValueError, match="is for kernels=True"):
        explain(device="h200")
    words = ["explain", "tiny", "quantization=int8", "batch_size=1", "kernels=h200"]
    with jax.numpy_dtype_promotion("standard"):  # Flax's norms want it
        assert cli.main(words) == 0
    assert "hopper" in capsys.readouterr().out
