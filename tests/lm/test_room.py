"""A run that does not fit is refused before it takes anything, and told what would."""

import dataclasses
import math

import pytest

from midtread import cli
from midtread.lm import memory, mesh, roofline, room, settings
from midtread.lm.usage import UsageError

ONE = mesh.sizes("")


def test_what_does_not_fit_is_refused_with_what_would_help():
    config = settings.load(["llama3-8b", "remat_policy=minimal"])
    with pytest.raises(UsageError) as error:
        room.require_room(config, limit=24 * 2**30)
    said = str(error.value)
    assert "a step needs 128 GB" in said and "has 25.8 GB" in said, said
    assert "optimizer_states=int8 (-" in said and "weight_dtype=bfloat16" in said
    assert "optimizer_states=int8 quantize_embedding_states=true (-" in said
    free = settings.load(["llama3-8b", "check_memory=false"])
    room.require_room(free, limit=24 * 2**30)


def test_bytes_of_moments_with_a_large_vocabulary():
    """The embedding of Llama 3 8B is 7% of it, and in float32 unless a key says otherwise."""
    words = ["llama3-8b", "optimizer_states=int8"]
    assert 2.4 < memory.optimizer_bytes(settings.load(words)) < 2.5
    words += ["quantize_embedding_states=true"]
    assert memory.optimizer_bytes(settings.load(words)) < 2.1


def test_a_doubt_is_settled_by_counting():
    """Between what is there at any batch and a bound that is easily found."""
    config = settings.load(["tiny"])
    need = memory.model(config, ONE).total
    assert room._static(config, ONE) < need
    assert need <= room._static(config, ONE) + room._at_most(config, ONE)
    room.require_room(config, limit=need)
    with pytest.raises(UsageError, match="for activations"):
        room.require_room(config, limit=need - 1)


def test_the_command_line_says_so_in_one_line(capsys, monkeypatch):
    monkeypatch.setattr(room, "bytes_here", lambda: 2**30)
    assert cli.main(["bench", "llama3-8b"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: a step needs") and len(said.splitlines()) == 1


POLICIES = {
    "": ["none", "minimal", "full"],
    "quantization=fp8_full": ["none", "minimal_with_quantization", "minimal", "full"],
}


@pytest.mark.parametrize("words", POLICIES)
def test_auto_recomputes_as_little_as_there_is_room_for(words):
    """Each policy is taken with just the room for it, and the next with a byte less."""
    config = settings.load(["tiny", "batch_size=64", *words.split()])
    order = POLICIES[words]
    each = [dataclasses.replace(config, remat_policy=x) for x in order]
    need = [memory.model(x, ONE).total for x in each]
    assert need == sorted(need, reverse=True) and len(set(need)) == len(need), need
    for i, policy in enumerate(order[:-1]):
        limit = math.ceil(need[i] / room.SHARE)
        assert room.settle(config, limit) == each[i], policy
        assert room.settle(config, math.ceil((need[i] - 1) / room.SHARE) - 1) != each[i]
    assert (
        room.settle(config, need[-1]) == each[-1]
    )  # and require_room has the last word
    assert room.settle(each[-1], 2**50) == each[-1]  # what was asked for stays


def test_auto_on_known_devices(monkeypatch):
    """What runs keep on an H200, and where nothing is known."""
    words = ["llama3-8b", "batch_size=4", "quantization=te_fp8_delayedscaling"]
    words += ["optimizer_states=int8", "weight_dtype=bfloat16"]
    words += ["weight_rounding=stochastic", "quantize_embedding_states=true"]
    h200, config = 138 * 10**9, settings.load(words)
    assert room.settle(config, h200).remat_policy == "minimal"
    two = dataclasses.replace(config, batch_size=2)
    assert room.settle(two, h200).remat_policy == "minimal_with_quantization"
    four = settings.load(["llama3-8b", "num_decoder_layers=4", "batch_size=4"])
    assert room.settle(four, h200).remat_policy == "none"
    monkeypatch.setattr(room, "bytes_here", lambda: None)
    assert room.settle(four).remat_policy == "minimal"


def test_auto_in_float32_is_refused_where_even_full_does_not_fit():
    config = room.settle(settings.load(["llama3-8b", "batch_size=4"]), 138 * 10**9)
    assert config.remat_policy == "full"
    with pytest.raises(UsageError, match="a step needs 140 GB") as error:
        room.require_room(config, 138 * 10**9)
    assert "remat_policy" not in str(error.value)


def test_explain_says_what_auto_is(capsys):
    assert cli.main(["explain", "tiny"]) == 0
    assert "remat_policy=auto: none on this machine" in capsys.readouterr().out
    assert cli.main(["explain", "tiny", "remat_policy=full"]) == 0
    assert "auto" not in capsys.readouterr().out


def test_flops_of_a_llama():
    """6 N a token, and 3.5 x 4 B T^2 D / 2 a layer for attention."""
    config = settings.load(["llama3-8b", "batch_size=4"])
    weights = 8_030_261_248 - 128_256 * 4096 - 65 * 4096  # without table and norms
    want = 6 * weights * 4 * 4096 + 3.5 * 4 * 4 * 4096**2 * 4096 / 2 * 32
    assert abs(roofline.model_flops(config) / want - 1) < 1e-6
    # Decoding: 2 N a token, and 4 D a token of the cache.
    want = 8 * (2 * weights + 4 * 1000 * 4096 * 32)
    assert abs(roofline.decoding_flops(config, 8, 1000) / want - 1) < 1e-6
