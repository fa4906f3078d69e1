"""Bytes of a step, beside what was compiled."""

import pytest

from midtread import cli
from midtread.lm import memory, mesh, settings
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
    assert cli.main(["explain", *words[:-1], "mesh=fsdp:-1"]) == 2
    assert "write a number for fsdp" in capsys.readouterr().err


def test_codes_halve_what_is_gathered():
    fixed = "weight_quantization_calibration_method=fixed,-224,224"
    words = ["tiny-deepseek", "mesh=fsdp:4,expert:2", "batch_size=8"]
    on, found = mesh.sizes("fsdp:4,expert:2"), memory.weights_of(settings.load(words))
    inside = [(path, var) for path, var in found if "layers" in path[1]]

    def weight(*more):
        config = settings.load([*words, *more])
        return sum(memory._Weight(config, on, *x).arriving for x in inside)

    coded = weight("quantization=fp8_full", "fp8_weight_gather=true", fixed)
    assert coded * 2 == weight()
