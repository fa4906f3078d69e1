"""Bench: what is timed, what is named and not timed, and the bound beside it."""

import pytest
from flax import nnx

from midtread import cli
from midtread.lm import bench, convert, roofline, room, settings
from midtread.lm.config import Model, section

TINY = ["tiny", "num_decoder_layers=1", "emb_dim=16"]


@pytest.mark.slow
def test_bench_compares_with_float(capsys):
    small = ["quantization=int8w", "batches=1", "lengths=16"]
    assert cli.main(["bench", *TINY, *small]) == 0
    out = capsys.readouterr().out
    assert "bfloat16" in out and "int8w" in out and "peak bytes" in out
    assert "TFLOP/s" in out and "decoding" in out
    assert out.splitlines()[0].split()[-1] == "remat"
    assert all(line.split()[-1] == "none" for line in out.splitlines()[1:3])


def test_decoding_from_the_command_line(capsys):
    words = ["time=decode", "batches=2", "lengths=16", "formats=int8w,te_nvfp4"]
    assert cli.main(["bench", *TINY, *words]) == 0
    out = capsys.readouterr().out
    assert "training" not in out.split("not timed")[0]
    float_row, int8_row = (line.split() for line in out.splitlines()[1:3])
    assert float_row[0] == "bfloat16" and float_row[5] == "1.00x"
    assert int8_row[:3] == ["int8w", "2", "16"] and float(int8_row[3]) > 0
    read = [int(row[6].replace(",", "")) for row in (float_row, int8_row)]
    assert read[1] < read[0]
    assert float(float_row[8]) > 0 and float_row[9] == "-"  # a CPU's peak is not known
    assert int(float_row[10].replace(",", "")) > read[0]
    assert "not timed: te_nvfp4, 2 x 16: quantization=te_nvfp4 is for training" in out
    assert "no bound: the bandwidth of cpu is not known here." in out


def test_what_does_not_fit_is_named(monkeypatch):
    config, asked = settings.load(TINY), bench.Asked(batches=(1, 128), lengths=(64,))
    monkeypatch.setattr(room, "bytes_here", lambda: 200_000)
    monkeypatch.setattr(bench, "_seconds", lambda *args: (0.001, 7))
    fits, large = bench.decoding(config, asked)
    assert fits.seconds == 0.001 and large.seconds is None
    assert bench.decoding_rows([fits, large])[1][3:6] == ["-", "-", "-"]
    assert bench.decoding_notes([fits, large])[0] == (
        "not timed: bfloat16, 128 x 64: weights and cache need 542 kB, and the device has "
        "200 kB"
    )
    monkeypatch.setattr(room, "bytes_here", lambda: 1000)
    assert all(
        "its float weights need" in x.why_not for x in bench.decoding(config, asked)
    )


def test_every_format_is_timed_once():
    words = [*TINY, "quant=[{weight_qtype: nf4}]", "weight_dtype=bfloat16"]
    config = settings.load([*words, "dtype=float32", "weight_rounding=stochastic"])
    names = [name for name, _ in bench._formats(config, ["int8w", "int8w"])]
    assert names == ["float32", "int8w", "quant"]


def test_the_bound_is_bytes_over_bandwidth(monkeypatch):
    monkeypatch.setattr(roofline, "device_here", lambda: roofline.DEVICES[0])
    plain = bench.Decoded("bfloat16", 8, 1024, seconds=0.010, bytes_read=24_000_000_000,
                          flops=98.9e9, peak_bytes=9)  # fmt: skip
    fast = plain._replace(name="int8w", seconds=0.005, bytes_read=12_000_000_000)
    rows = bench.decoding_rows([plain, fast])
    assert [row[4:] for row in rows] == [
        ["800.0", "1.00x", "24,000,000,000", "50%", "9.89", "1.0%", "9"],
        ["1,600.0", "2.00x", "12,000,000,000", "50%", "19.8", "2.0%", "9"],
    ]
    (note,) = bench.decoding_notes([plain, fast])
    assert note == (
        "bound: bytes read, weights and cache, at 4.8 TB/s of NVIDIA H200 by its data "
        "sheet."
    )


def test_experts_that_nobody_chose_are_not_read():
    config = settings.load(["tiny-deepseek", "quantization=int8w"])
    net, m = convert.abstract(config), section(config, Model)
    read = [bench._weights_read(net, m, sequences) for sequences in (1, 2, 1000)]
    of = lambda part: convert.nbytes(nnx.state(part, nnx.Param))
    assert read[2] == of(net) - of(net.token_embedder) - of(net.mtp_block)
    experts = 2 * 3 * 4 * 32 * 32  # layers, weights, experts, in 8 bits
    assert [read[2] - x for x in read[:2]] == [experts / 2, experts / 4]  # two of four


MISTAKES = {
    "formats=int9": "no value of quantization is called 'int9'",
    "batches=0": "batches=0: whole numbers of at least 1, as in batches=1,8,32,128",
    "lengths=4,x": "lengths=4,x: whole numbers of at least 8, as in lengths=512,4096.",
    "time=train": "is given twice on the command line",
    "time=nothing": "time=nothing: train, decode or all",
}


@pytest.mark.parametrize("word", MISTAKES)
def test_mistakes(word, capsys):
    asked = [word] if word == "time=nothing" else ["time=decode", word]
    assert cli.main(["bench", *TINY, *asked]) == 2
    assert MISTAKES[word] in capsys.readouterr().err


def test_decoding_is_not_asked_of_training(capsys):
    assert cli.main(["bench", *TINY, "time=train", "batches=4"]) == 2
    assert "batches: of decoding, which time=train" in capsys.readouterr().err


def test_decoding_is_of_one_device(capsys):
    assert cli.main(["bench", *TINY, "time=decode", "mesh=fsdp:2"]) == 2
    assert "drop the mesh" in capsys.readouterr().err
