"""Quantized folders of others: codes stay codes, and mean what their makers mean.

The folders in fixtures/ were written by those makers (fixtures/make_layouts.py).
"""

import json
import pathlib
import runpy
import shutil

import jax.numpy as jnp
import numpy as np
import pytest

import midtread as mt
from midtread.interop import huggingface, quantized, safetensors
from midtread.numerics.qarray import QArray

FIXTURES = pathlib.Path(__file__).parent / "fixtures"
FOLDERS = sorted(p.name for p in FIXTURES.iterdir() if (p / "config.json").is_file())


def values(q: QArray) -> np.ndarray:
    return np.asarray(mt.dequantize(q.map(jnp.asarray), jnp.float32))


def test_every_layout_has_a_folder():
    methods = set()
    for name in FOLDERS:
        config = json.loads((FIXTURES / name / "config.json").read_text())
        methods.add(config.get("quantization_config", {}).get("quant_method", ""))
    assert methods == {row.method for row in quantized.ROWS}


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_is_read(name):
    source = quantized.open_model(FIXTURES / name)
    want = np.load(FIXTURES / name / "expected.npy")
    assert set(source.tensors) == {"a.weight", "norm.weight"}
    q = source.read("a.weight")
    assert isinstance(q, QArray)
    assert q.shape == source.tensors["a.weight"].shape == want.shape
    row = next(r for r in quantized.ROWS if name.startswith(r.name.split()[0].lower()))
    assert q.format.name in row.formats
    got = values(q)
    if "NVFP4" in name:  # compressed-tensors unpacks them to bfloat16
        got = got.astype(jnp.bfloat16).astype(np.float32)
    is_exact = name.startswith(("compressed", "gptq", "awq", "deepseek", "gpt-oss"))
    tolerance = 0 if is_exact else 3e-7 * np.abs(want).max()
    np.testing.assert_allclose(got, want, rtol=0, atol=tolerance)


def test_scattered_groups_are_told():
    """A scale for every column takes more memory than the codes."""
    source = quantized.open_model(FIXTURES / "gptq-desc_act")
    assert "every weight has a scale of its own" in source.notes[0]
    q = source.read("a.weight")
    assert q.scale.shape == q.shape and q.scale.dtype == np.float16
    assert not quantized.open_model(FIXTURES / "gptq").notes


def test_read_takes_codes_where_a_table_says_arrays():
    """Transposed, and stacked with their scales, as a float folder's arrays are."""
    source = quantized.open_model(FIXTURES / "compressed-tensors-W4A16")
    table = [
        huggingface.Row("{m}.weight", "layers/kernel", {"m": range(1)}, turned=True)
    ]
    source.tensors = {"0.weight": source.tensors["a.weight"]}
    source.weights["0.weight"] = source.weights.pop("a.weight")
    q = huggingface.read(source, table)["layers/kernel"]
    assert isinstance(q, QArray) and q.shape == (1, 64, 32)
    assert q.scale.shape == (1, 2, 32)


def mutations(folder: pathlib.Path, rng: np.random.Generator, path: pathlib.Path):
    """One change of a header, of a config, or of the length, written to `path`."""
    shutil.copytree(folder, path, dirs_exist_ok=True)
    file, config = path / "model.safetensors", path / "config.json"
    which = rng.integers(0, 4)
    if which == 0:  # a byte of the header
        data = bytearray(file.read_bytes())
        length = int.from_bytes(data[:8], "little")
        data[int(rng.integers(0, 8 + length))] = int(rng.integers(0, 256))
        file.write_bytes(data)
    elif which == 1:
        data = file.read_bytes()
        file.write_bytes(data[: int(rng.integers(0, len(data)))])
    elif which == 2:  # a value of the config
        about = json.loads(config.read_text())
        inner = about.get("quantization_config") or about["quantization"]
        key = sorted(inner)[int(rng.integers(0, len(inner)))]
        inner[key] = [None, -1, 0, 7, "x", [], {}, True, 1e9][int(rng.integers(0, 9))]
        config.write_text(json.dumps(about))
    else:  # a number of a header, in its own digits
        data = file.read_bytes()
        digits = [i for i, c in enumerate(data[:400]) if chr(c).isdigit() and i > 8]
        at = digits[int(rng.integers(0, len(digits)))]
        new = str(int(rng.integers(0, 10))).encode()
        file.write_bytes(data[:at] + new + data[at + 1 :])


def test_mutated_folders_are_refused_or_read(tmp_path):
    """500 changes at random: a ValueError with the folder's name, or the same shapes."""
    rng = np.random.default_rng(0)
    refused = 0
    for case in range(500):
        name = FOLDERS[case % len(FOLDERS)]
        path = tmp_path / "mutated"
        shutil.rmtree(path, ignore_errors=True)
        mutations(FIXTURES / name, rng, path)
        try:
            source = quantized.open_model(path)
            for tensor, about in source.tensors.items():
                assert tuple(source.read(tensor).shape) == about.shape
        except ValueError as error:
            assert str(path) in str(error), error
            refused += 1
    assert refused > 200


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("awq", {"version": "gemv"}, "version='gemm'"),
        ("awq", {"bits": 3}, "bits is 3"),
        ("gptq", {"checkpoint_format": "marlin"}, "'marlin' is not read"),
        ("gptq", {"group_size": 16}, "should have 4 scales each, and have 2"),
        ("gptq", {"quant_method": "quip"}, "quant_method 'quip' is not read"),
        ("deepseek-fp8", {"weight_block_size": 128}, "not \\[rows, columns\\]"),
        ("compressed-tensors-W8A8", {"format": "marlin-24"}, "'marlin-24'"),
        ("compressed-tensors-W8A8", {"config_groups": {}}, "config_groups is missing"),
        ("mlx-4", {"mode": "turbo"}, "mode 'turbo' of MLX"),
    ],
)
def test_what_is_not_read_is_named(tmp_path, name, change, message):
    path = tmp_path / name
    shutil.copytree(FIXTURES / name, path)
    about = json.loads((path / "config.json").read_text())
    inner = about.get("quantization_config") or about["quantization"]
    inner |= change
    for group in inner.get("config_groups", {}).values():
        group.pop("format", None)
    (path / "config.json").write_text(json.dumps(about))
    with pytest.raises(ValueError, match=message) as raised:
        quantized.open_model(path)
    assert str(path) in str(raised.value)


def rewritten(path, change):
    """Changes the tensors of a folder's only file: a dict of arrays by name."""
    file = path / "model.safetensors"
    reader = safetensors.Reader.of(str(file))
    tensors = {k: np.array(reader.mapped(k)) for k in reader.tensors}
    change(tensors)
    listed = {k: huggingface.Tensor(v.shape, v.dtype) for k, v in tensors.items()}
    safetensors.write(file, listed, tensors.values(), reader.metadata)
    return path


@pytest.mark.parametrize("name", FOLDERS)
def test_parts_that_are_stored_as_something_else_are_named(tmp_path, name):
    """The same bits, or the same numbers, in a dtype that a layout does not have."""
    parts = quantized.open_model(FIXTURES / name).weights["a.weight"].tensors
    for part in parts.values():

        def bits(tensors, part=part):
            size = tensors[part].dtype.itemsize
            tensors[part] = tensors[part].view(
                {1: "?", 2: "u2", 4: "u4", 8: "u8"}[size]
            )
            if tensors[part].dtype == np.uint32 and "mlx" in name:
                tensors[part] = tensors[part].view("i4")

        def numbers(tensors, part=part):
            tensors[part] = tensors[part].astype(np.float32).astype(np.uint64)

        for i, change in enumerate((bits, numbers)):
            path = tmp_path / f"{part}{i}"
            shutil.copytree(FIXTURES / name, path)
            with pytest.raises(
                ValueError, match="should be|, not |not in e4m3"
            ) as raised:
                quantized.open_model(rewritten(path, change))
            assert str(path) in str(raised.value)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("gptq-desc_act", lambda t: t.pop("a.g_idx"), "no g_idx, though desc_act"),
        ("compressed-tensors-W4A16_ASYM", lambda t: t.pop("a.weight_zero_point"),
         "has no weight_zero_point"),
        ("compressed-tensors-W8A8",
         lambda t: t.update({"a.weight_scale": t["a.weight_scale"].reshape(1, -1)}),
         r"weight_scale is \(1, 32\), and should be \(32, 1\)"),
    ],
)  # fmt: skip
def test_what_a_scheme_speaks_of_is_there(tmp_path, name, change, message):
    path = tmp_path / name
    shutil.copytree(FIXTURES / name, path)
    with pytest.raises(ValueError, match=message):
        quantized.open_model(rewritten(path, change))


def described(path, change):
    """A folder of torchao whose metadata `change` has been at."""
    shutil.copytree(FIXTURES / "torchao-int8-dynamic", path)
    file = path / "model.safetensors"
    reader = safetensors.Reader.of(str(file))
    tensors = {k: reader.mapped(k).copy() for k in reader.tensors}
    about = json.loads(reader.metadata["a.weight"])
    change(about)
    metadata = {**reader.metadata, "a.weight": json.dumps(about)}
    listed = {k: huggingface.Tensor(v.shape, v.dtype) for k, v in tensors.items()}
    safetensors.write(file, listed, tensors.values(), metadata)
    return path


def test_torchao_says_what_is_quantized_besides(tmp_path):
    source = quantized.open_model(FIXTURES / "torchao-int8-dynamic")
    assert source.activations == {"a.weight": ("int8", None)} and not source.notes

    def asymmetric(about):
        given = about["_data"]["act_quant_kwargs"]["_data"]
        given["mapping_type"]["_data"] = "ASYMMETRIC"

    source = quantized.open_model(described(tmp_path / "zeros", asymmetric))
    assert not source.activations and "no zero points" in source.notes[0]

    packed = lambda about: about.update(_type="Int4TilePackedTo4dTensor")
    with pytest.raises(ValueError, match="int4_packing_format='plain'"):
        quantized.open_model(described(tmp_path / "packed", packed))


def test_the_table_of_the_docs_is_current():
    benchmarks = pathlib.Path(__file__).parents[2] / "benchmarks"
    made = runpy.run_path(str(benchmarks / "layouts.py"))
    assert made["page"]() == made["PAGE"].read_text(), "benchmarks/layouts.py --write"
