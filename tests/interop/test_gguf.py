"""GGUF: what llama.cpp's package wrote, read without it; damaged files refused by name."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import midtread as mt
from midtread.interop import gguf, gguf_blocks, gguf_models
from midtread.numerics.qarray import QArray

FIXTURES = pathlib.Path(__file__).parent / "fixtures"


@pytest.fixture(scope="module")
def file():
    return gguf.GGUF(FIXTURES / "kinds.gguf")


@pytest.mark.parametrize("kind", list(gguf_blocks.BLOCKS))
def test_every_kind_of_block_is_read(file, kind):
    with np.load(FIXTURES / "kinds.npz") as arrays:
        want = arrays[kind]
    np.testing.assert_array_equal(file.floats(kind), want)
    q, block = file[kind], gguf_blocks.BLOCKS[kind]
    assert isinstance(q, QArray) and q.format.name == block.qtype
    assert q.shape == (2, 256) and q.scale.shape == (2, 256 // block.tile)
    got = np.asarray(mt.dequantize(q.map(jnp.asarray)))
    if q.zero_point is None:
        np.testing.assert_array_equal(got, want)
    else:  # the zero point is a rounded quotient
        np.testing.assert_allclose(got, want, atol=3e-7 * np.abs(want).max())


def test_numbers_and_keys_are_read(file):
    np.testing.assert_array_equal(file["F16"], np.arange(6.0).reshape(2, 3))
    assert file["F32"].dtype == np.float32
    assert file.metadata["general.architecture"] == "llama"
    assert file.metadata["tokenizer.ggml.tokens"] == ["a", "b", "ab"]
    assert file.metadata["tokenizer.ggml.add_bos_token"] is True


def test_a_tile_of_scale_zero_keeps_its_offset():
    raw = np.zeros((1, 20), np.uint8)
    raw[0, 2:4] = np.array([-1.5], "<f2").view(np.uint8)
    raw[0, 4:] = 0x57
    block = gguf_blocks.BLOCKS["Q4_1"]
    q = gguf_blocks.to_qarray(block, block.read(raw), (1, 32))
    np.testing.assert_array_equal(mt.dequantize(q.map(jnp.asarray)), -1.5)


def test_matmuls_take_fractional_zero_points(file):
    """Against codes as activations too, whose sums are integers."""
    w = file["Q4_K"].map(jnp.asarray).T
    x = jnp.asarray(np.random.default_rng(1).normal(size=(3, 256)), jnp.float32)
    values = np.asarray(mt.dequantize(w), np.float64)
    np.testing.assert_allclose(mt.dot(x, w), x @ values, rtol=1e-4, atol=1e-3)
    coded = mt.quantize(x, "int8", channelwise_axes=[0])
    want = np.asarray(mt.dequantize(coded), np.float64) @ values
    np.testing.assert_allclose(mt.dot(coded, w), want, rtol=1e-4, atol=1e-3)


def test_mutated_files_are_refused_or_read(file, tmp_path):
    """Bytes of the header, changed at random: a ValueError, or a file that still reads."""
    original = pathlib.Path(file.path).read_bytes()
    header = min(t.begin for t in file.tensors.values())
    rng = np.random.default_rng(0)
    refused = 0
    for case in range(150):
        data = bytearray(original)
        for at in rng.integers(0, header, rng.integers(1, 4)):
            data[at] = rng.integers(0, 256)
        if case % 10 == 0:
            del data[int(rng.integers(0, len(data))) :]
        path = tmp_path / "mutated.gguf"
        path.write_bytes(data)
        try:
            read = gguf.GGUF(path)
            for name in read:
                assert read.floats(name).shape == read.tensors[name].shape
        except ValueError as error:
            assert str(path) in str(error)
            refused += 1
    assert refused > 50


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: b"GGML" + d[4:], "begins with b'GGML'"),
        (lambda d: d[:4] + b"\x01\0\0\0" + d[8:], "version 1"),
        (lambda d: d[:4] + b"\0\0\0\x03" + d[8:], "big-endian"),
        (lambda d: d[:8] + b"\xff" * 8 + d[16:], "do not fit"),
        (lambda d: d[:10], "10 bytes"),
        (lambda d: d[:-40], "ends at byte"),
    ],
)
def test_damage_is_named(file, tmp_path, change, message):
    path = tmp_path / "damaged.gguf"
    path.write_bytes(change(pathlib.Path(file.path).read_bytes()))
    with pytest.raises(ValueError, match=message):
        gguf.GGUF(path)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [("rope.dimension_count", "x", "rope.dimension_count is 'x'"),
     ("attention.key_length", [1, 2], r"attention.key_length is \[1, 2\]"),
     ("attention.head_count", 0, "attention.head_count is 0"),
     ("token_embd.weight", (), r"token_embd.weight has shape \[\]"),
     ("rope_freqs.weight", (), r"rope_freqs.weight has shape \[\]")],
)  # fmt: skip
def test_what_a_model_lacks_is_named(tmp_path, key, value, message):
    keys = {"context_length": 8, "embedding_length": 4, "block_count": 1,
            "feed_forward_length": 4, "attention.head_count": 2,
            "attention.layer_norm_rms_epsilon": 1e-5}  # fmt: skip
    kinds = {"token_embd.weight": ("F32", (8, 4))}
    if isinstance(value, tuple):
        kinds[key] = ("F32", value)
    else:
        keys[key] = value
    metadata = {"general.architecture": "llama"}
    metadata |= {f"llama.{name}": number for name, number in keys.items()}
    data = gguf.header(metadata, kinds)
    for kind, shape in kinds.values():
        data += bytes(-(-gguf.nbytes(kind, shape) // 32) * 32)
    path = tmp_path / "a.gguf"
    path.write_bytes(data)
    with pytest.raises(ValueError, match=message):
        gguf_models.GGUFModel(path)


WRITTEN = [name for name, block in gguf_blocks.BLOCKS.items() if block.encode]


def test_what_is_written_is_read(tmp_path, key):
    """Metadata, floats and every kind of block that we write, from floats."""
    x = np.asarray(jax.random.normal(key, (4, 256)), np.float32)
    raw = {k: gguf_blocks.BLOCKS[k].encode(x.reshape(-1, gguf_blocks.BLOCKS[k].size))
           for k in WRITTEN}  # fmt: skip
    metadata = {"general.architecture": "llama", "llama.block_count": 3, "a.b": 0.5,
                "a.c": True, "a.d": ["x", "é"], "a.e": [1, -2]}  # fmt: skip
    kinds = {k: (k, x.shape) for k in WRITTEN} | {"plain": ("F32", x.shape)}
    path = tmp_path / "w.gguf"
    with open(path, "wb") as out:
        out.write(gguf.header(metadata, kinds))
        for (kind, shape), array in zip(kinds.values(), [*raw.values(), x]):
            assert array.nbytes == gguf.nbytes(kind, shape)
            out.write(array.tobytes() + bytes(-array.nbytes % 32))
    file = gguf.GGUF(path)
    assert file.metadata == metadata
    np.testing.assert_array_equal(file["plain"], x)
    # relative error of normal numbers; K-quants do better than their plain relatives
    most = {"Q4_0": 0.095, "Q4_1": 0.085, "Q5_0": 0.048, "Q5_1": 0.042, "Q8_0": 0.006,
            "Q4_K": 0.08, "Q5_K": 0.04, "Q6_K": 0.02, "MXFP4": 0.13}  # fmt: skip
    for kind in WRITTEN:
        loss = np.linalg.norm(file.floats(kind) - x) / np.linalg.norm(x)
        assert loss < most[kind], kind


@pytest.mark.parametrize(
    ("qtype", "method", "kind"),
    [("int4", "absmax", "Q4_0"), ("int4", "minmax", "Q4_1"), ("int5", "absmax", "Q5_0"),
     ("int8", "absmax", "Q8_0"), ("mxfp4", "absmax", "MXFP4")],
)  # fmt: skip
def test_codes_are_written_as_they_are(key, qtype, method, kind):
    x = jax.random.normal(key, (4, 64))
    q = mt.quantize(x, qtype, channelwise_axes=[0], tiled_axes={1: 32},
                    calibration_method=method)  # fmt: skip
    q = q.map(np.asarray)
    assert gguf_blocks.kind_of(q) == kind
    block = gguf_blocks.BLOCKS[kind]
    again = gguf_blocks.to_qarray(
        block, block.read(gguf_blocks.write_codes(q)), q.shape
    )
    np.testing.assert_array_equal(
        again.qvalue.astype(np.float32), q.qvalue.astype(np.float32)
    )
    np.testing.assert_allclose(again.scale, q.scale, rtol=2**-11)
    np.testing.assert_allclose(
        mt.dequantize(again.map(jnp.asarray)), mt.dequantize(q.map(jnp.asarray)),
        rtol=2**-8, atol=2e-3,
    )  # fmt: skip
