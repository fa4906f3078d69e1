"""Bytes of a step, beside what was compiled."""

import pytest

from midtread import cli
from midtread.lm import build, memory, mesh, roofline, settings
from tests.lm.test_mesh import Trained

SMALL = ["dataset_type=synthetic", "dtype=float32", "emb_dim=64", "num_kv_heads=4",
         "num_decoder_layers=2", "max_target_length=64", "mlp_dim=192"]  # fmt: skip
# A CPU computes bfloat16 in float32, so float32 is what can be compared here.
CONFIGS = {
    "fsdp": ("mesh=fsdp:8",),
    "remat": ("mesh=data:8", "remat_policy=full"),
    "tensor": ("mesh=fsdp:4,tensor:2", "quantization=int8"),
}


@pytest.mark.parametrize("name", [
    pytest.param(n, marks=() if n == "fsdp" else pytest.mark.slow) for n in CONFIGS
])  # fmt: skip
def test_the_model_agrees_with_the_compiler(name):
    words = [*SMALL, *CONFIGS[name]]
    run = Trained(*words, steps=0)
    found = run.compiled.memory_analysis()
    used = found.argument_size_in_bytes + found.temp_size_in_bytes
    used += found.output_size_in_bytes - found.alias_size_in_bytes
    said = memory.model(settings.load(words), run.layout.sizes)
    assert abs(said.total / used - 1) < 0.15, (said, used)
    arguments = said.parameters + said.optimizer
    assert abs(arguments / found.argument_size_in_bytes - 1) < 0.05


def test_explain_says_what_a_mesh_holds(capsys):
    words = ["tiny", "num_kv_heads=2", "batch_size=8", "mesh=fsdp:8"]
    assert cli.main(["explain", *words]) == 0
    said = capsys.readouterr().out
    assert "fsdp 8" in said and "gathered in a step" in said
    assert "a step takes at least" in said and "peaks of NVIDIA H200" in said
    assert cli.main(["explain", *words[:-1], "mesh=fsdp:-1"]) == 2
    assert "write a number for fsdp" in capsys.readouterr().err


def test_a_step_takes_at_least_what_its_flops_and_bytes_take():
    words = ["tiny", "num_kv_heads=2", "batch_size=8", "mesh=fsdp:8", "dtype=bfloat16"]
    config, on = settings.load(words), mesh.sizes("fsdp:8")
    found = roofline.bound(config, on)
    flops = build.coverage(config).totals.flops
    h200 = found.device
    assert h200.name == "NVIDIA H200"  # what is assumed where there is none
    assert found.arithmetic == {"bf16 x bf16": pytest.approx(3 * flops / 8 / 989e12)}
    held = memory.model(config, on)
    weights = held.gathered * 7 / 8 / h200.inside
    assert found.transfers == {
        "weights": pytest.approx(weights),
        "gradients of weights": pytest.approx(weights),  # in the dtype they are used in
    }
    assert found.hidden < found.in_turn
    low = roofline.bound(settings.load([*words, "quantization=fp8_full"]), on)
    assert low.hidden <= found.hidden
    assert sum(low.arithmetic.values()) < sum(found.arithmetic.values())
    across = mesh.sizes("fsdp:16")
    config = settings.load([*words[:2], "batch_size=16", "mesh=fsdp:16"])
    sent = roofline.transfers(config, across, h200)["weights"]
    assert sent == pytest.approx(memory.model(config, across).gathered * 15 / 16 / 50e9)


def test_codes_halve_what_is_gathered():
    fixed = "weight_quantization_calibration_method=fixed,-224,224"
    words = ["tiny-deepseek", "mesh=fsdp:4,expert:2", "batch_size=8"]
    on, found = mesh.sizes("fsdp:4,expert:2"), memory.weights_of(settings.load(words))
    inside = [(path, var) for path, var in found if "layers" in path[1]]

    def weight(*more):
        config = settings.load([*words, *more])
        return sum(memory.Weight(config, on, *x).arriving for x in inside)

    coded = weight("quantization=fp8_full", "fp8_weight_gather=true", fixed)
    assert coded * 2 == weight()
