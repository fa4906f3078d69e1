"""A run that does not fit is refused before it takes anything, and told what would."""

import pytest

from midtread import cli
from midtread.lm import memory, mesh, roofline, room, settings
from midtread.lm.config import UsageError

ONE = mesh.sizes("")


def test_what_does_not_fit_is_refused_with_what_would_help():
    config = settings.load(["llama3-8b"])
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


def test_flops_of_a_llama():
    """6 N a token, and 3.5 x 4 B T^2 D / 2 a layer for attention."""
    config = settings.load(["llama3-8b", "batch_size=4"])
    weights = 8_030_261_248 - 128_256 * 4096 - 65 * 4096  # without table and norms
    want = 6 * weights * 4 * 4096 + 3.5 * 4 * 4 * 4096**2 * 4096 / 2 * 32
    assert abs(roofline.model_flops(config) / want - 1) < 1e-6
    # Decoding: 2 N a token, and 4 D a token of the cache.
    want = 8 * (2 * weights + 4 * 1000 * 4096 * 32)
    assert abs(roofline.decoding_flops(config, 8, 1000) / want - 1) < 1e-6
