"""Quantized weights that others wrote, and weights of ours that others read.

The peers are the packages themselves on a CPU, in the versions of `VERSIONS`. Without one
its tests are skipped; what they wrote is also in tests/interop/fixtures, for everyone.
"""

import importlib.util
from importlib import metadata

import jax.numpy as jnp
import numpy as np
import pytest

import midtread as mt
from midtread.interop import (
    bitsandbytes,
    compressed_tensors,
    gguf_blocks,
    gptq,
    huggingface,
    mlx,
    quantized,
    safetensors,
    torchao,
)
from midtread.numerics.qarray import QArray
from tests.interop.fixtures import make_layouts as made
from tests.interop.fixtures.make_layouts import compressed, to_numpy
from tests.peers import peer

ROWS, COLUMNS = 64, 256
pytestmark = pytest.mark.filterwarnings("ignore")  # of others


VERSIONS = {
    "compressed-tensors": "0.20.0",
    "gguf": "0.19.0",
    "bitsandbytes": "0.50.2",
    "mlx": "0.32.4",
    "torchao": "0.18.0",
    "auto-gptq": "0.7.1",
    "autoawq": "0.2.9",
    "auto-round": "0.16.1",
}


def load(package, *modules):
    """Modules of a peer, in the version that is compared with; skipped without it."""
    found = peer.load(package, VERSIONS[package], *modules)
    return found[0] if len(found) == 1 else found


def weight(seed=0, shape=(ROWS, COLUMNS)):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def values(q: QArray) -> np.ndarray:
    return np.asarray(mt.dequantize(q.map(jnp.asarray)), np.float32)


class Shape:
    """What a header says of a tensor."""

    def __init__(self, array):
        self.shape, self.dtype = tuple(array.shape), array.dtype


def read_all(found, tensors):
    """Every weight that a layout found."""
    return {
        name: weight.read({role: tensors[n] for role, n in weight.tensors.items()})
        for name, weight in found.weights.items()
    }


# --- compressed-tensors ----------------------------------------------------------------------


def to_torch(array):
    import torch

    array = np.ascontiguousarray(array)
    if array.dtype.name == "float8_e4m3fn":
        return torch.from_numpy(array.view(np.uint8)).view(torch.float8_e4m3fn)
    return torch.from_numpy(array.copy())


def as_peer(preset, x):
    """Four bits of floats are unpacked to bfloat16 by compressed-tensors, always."""
    return x.astype(jnp.bfloat16).astype(np.float32) if "FP4" in preset else x


PRESETS = ["W4A16", "W4A16_ASYM", "W8A8", "W8A16", "W3A16", "FP8_DYNAMIC", "FP8_BLOCK",
           "NVFP4A16", "MXFP4A16", "W4A8"]  # fmt: skip


@pytest.mark.parametrize("preset", PRESETS)
def test_compressed_tensors_is_read(preset):
    load("compressed-tensors", "compressed_tensors")
    config, tensors, want = compressed(preset, weight(shape=(256, 256)))
    found = compressed_tensors.find({k: Shape(v) for k, v in tensors.items()}, config)
    assert found.weights["a.weight"].shape == (256, 256)
    q = read_all(found, tensors)["a.weight"]
    np.testing.assert_array_equal(as_peer(preset, values(q)), want)


OURS = {
    "W4A16": ("int4", {1: 32}, {}, False),
    "W4A16_asymmetric": ("int4", {1: 64}, {"calibration_method": "minmax"}, False),
    "W3A16": ("int3", {1: 32}, {}, False),
    "W8A8": ("int8", {}, {}, True),
    "W8A16": ("int8", {1: 64}, {}, False),
    "FP8": ("float8_e4m3fn", {}, {}, True),
    "FP8_BLOCK": ("float8_e4m3fn", {0: 32, 1: 128}, {}, True),
    "NVFP4": ("nvfp4", {1: 16}, {}, False),
    "MXFP4": ("mxfp4", {1: 32}, {}, True),
}


def ours(qtype, tiles, options, w=None) -> QArray:
    axes = [] if 0 in tiles else [0]
    x = jnp.asarray(weight() if w is None else w)
    q = mt.quantize(x, qtype, channelwise_axes=axes, tiled_axes=tiles, **options)
    return q.map(np.asarray)


@pytest.mark.parametrize("name", list(OURS))
def test_compressed_tensors_reads_ours(name):
    load("compressed-tensors", "compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    *what, activations = OURS[name]
    q = ours(*what)
    scheme, tensors = compressed_tensors.write(q, activations)
    config = compressed_tensors.config({"a": scheme}, ["lm_head"])
    read = QuantizationConfig.model_validate(config).config_groups["group_0"]
    compressor = BaseCompressor.get_value_from_registry(scheme.format)
    state = {k: to_torch(v) for k, v in tensors.items()}
    back = compressor.decompress(state, read)["weight"].float().numpy()
    np.testing.assert_array_equal(back, as_peer(name, values(q)))
    again = {f"a.{k}": v for k, v in tensors.items()}
    found = compressed_tensors.find({k: Shape(v) for k, v in again.items()}, config)
    mine = read_all(found, again)["a.weight"]
    np.testing.assert_allclose(values(mine), values(q), rtol=2e-7)


def test_awq_is_read_as_compressed_tensors_converts_it():
    load("compressed-tensors", "compressed_tensors")
    from compressed_tensors.entrypoints.convert.converters.autoawq import (
        AutoAWQConverter,
    )

    q = ours("int4", {1: 64}, {"calibration_method": "minmax"})
    q = q.replace(scale=q.scale.astype(np.float16))
    tensors = {f"a.{k}": v for k, v in gptq.write_awq(q).items()}
    config = gptq.awq_config(64)
    found = gptq.find_awq({k: Shape(v) for k, v in tensors.items()}, config)
    mine = read_all(found, tensors)["a.weight"]
    np.testing.assert_array_equal(values(mine), values(q))
    peer = AutoAWQConverter.from_autoawq_config(config)
    theirs = peer.process({k: to_torch(v) for k, v in tensors.items()})
    theirs = {k.removeprefix("a."): to_numpy(v) for k, v in theirs.items()}
    read = compressed_tensors.read_packed(theirs, 4)
    for part in ("qvalue", "scale", "zero_point"):
        np.testing.assert_array_equal(getattr(mine, part), getattr(read, part))


# --- GPTQ and AWQ, as their own packages pack them -------------------------------------------


def alone(package, end):
    """A file of a package as a module of its own: the rest of it needs old versions."""
    load(package)
    (file,) = [f for f in metadata.files(package) if str(f).endswith(end)]
    spec = importlib.util.spec_from_file_location(file.stem, file.locate())
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def linear_in_groups(bits, order=None):
    """A torch Linear whose weight is on a grid of groups of 64, with scales and zeros
    [out, groups] and the group of each column."""
    import torch

    order = np.arange(COLUMNS) if order is None else order
    codes, zeros, scales = made.unsigned_groups(weight(bits)[:, order], bits, 64)
    zeros = np.maximum(zeros, 1)  # version 1 stores them less one
    group_of = np.arange(COLUMNS) // 64
    values = (codes - zeros[group_of]).astype(np.float32) * scales[group_of]
    back = np.argsort(order)
    linear = torch.nn.Linear(COLUMNS, ROWS, bias=False)
    linear.weight.data = torch.from_numpy(np.ascontiguousarray(values[back].T))
    parts = [
        torch.from_numpy(np.ascontiguousarray(x.T)).float() for x in (scales, zeros)
    ]
    return linear, *parts, torch.from_numpy(group_of[back].astype(np.int32))


def read_packed_module(find, config, module):
    """The weight that we read of a packed module's buffers."""
    tensors = {f"a.{k}": v.numpy() for k, v in module.state_dict().items()}
    found = find({k: Shape(v) for k, v in tensors.items()}, config)
    q = read_all(found, tensors)["a.weight"]
    return values(q.replace(scale=q.scale.astype(np.float32)))


@pytest.mark.parametrize(
    ("bits", "desc_act"), [(2, False), (3, False), (4, False), (8, False), (4, True)]
)
def test_what_autogptq_packs_is_read(bits, desc_act):
    qlinear = alone("auto-gptq", "qlinear/qlinear_cuda.py")
    import torch

    order = np.random.default_rng(0).permutation(COLUMNS) if desc_act else None
    linear, scales, zeros, group_of = linear_in_groups(bits, order)
    packed = qlinear.QuantLinear(bits, 64, COLUMNS, ROWS, bias=False)
    packed.pack(linear, scales, zeros, group_of)
    packed.autogptq_cuda_available = False  # it unpacks in torch
    config = {"bits": bits, "group_size": 64, "desc_act": desc_act}
    got = read_packed_module(gptq.find_gptq, config, packed)
    np.testing.assert_array_equal(got, packed(torch.eye(COLUMNS)).T.float().numpy())


@pytest.mark.parametrize("version", ["gptq", "gptq_v2"])
def test_what_auto_round_packs_for_gptq_is_read(version):
    """Zeros stored less one, and as they are."""
    end = "torch/qlinear_torch_zp.py" if version == "gptq" else "torch/qlinear_torch.py"
    qlinear = alone("auto-round", end)
    import torch

    linear, scales, zeros, _ = linear_in_groups(4)
    packed = qlinear.QuantLinear(4, 64, COLUMNS, ROWS, bias=False)
    packed.device = "cpu"
    packed.pack(linear, scales, zeros, device="cpu")
    config = {"bits": 4, "group_size": 64, "checkpoint_format": version}
    got = read_packed_module(gptq.find_gptq, config, packed)
    packed.scales = packed.scales.float()  # so that it multiplies in float32
    np.testing.assert_array_equal(got, packed(torch.eye(COLUMNS)).T.numpy())


def test_what_autoawq_packs_is_read():
    gemm, packing = load(
        "autoawq", "awq.modules.linear.gemm", "awq.utils.packing_utils"
    )
    linear, scales, zeros, _ = linear_in_groups(4)
    packed = gemm.WQLinear_GEMM.from_linear(
        linear, 4, 64, scales=scales.T.contiguous(), zeros=zeros.T.contiguous()
    )
    config = {"bits": 4, "group_size": 64, "version": "gemm", "zero_point": True}
    got = read_packed_module(gptq.find_awq, config, packed)
    parts = packed.qweight, packed.qzeros, packed.scales.float()
    want = packing.dequantize_gemm(*parts, 4, 64).T.numpy()
    np.testing.assert_array_equal(got, want)


# --- gguf ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "MXFP4"])
def test_gguf_is_read(kind):
    gguf = load("gguf", "gguf")
    number = gguf.GGMLQuantizationType[kind]
    raw = gguf.quantize(weight(), number)
    block = gguf_blocks.BLOCKS[kind]
    parts = block.read(raw.reshape(-1, block.nbytes))
    np.testing.assert_array_equal(
        block.encode(weight().reshape(-1, block.size)).reshape(raw.shape), raw
    )
    want = gguf.dequantize(raw, number)
    np.testing.assert_array_equal(
        gguf_blocks.to_floats(parts).reshape(want.shape), want
    )
    got = values(gguf_blocks.to_qarray(block, parts, want.shape))
    np.testing.assert_allclose(got, want, atol=1e-6)


@pytest.mark.parametrize("kind", ["Q4_K", "Q5_K", "Q6_K"])
def test_gguf_reads_our_k_quants(kind):
    gguf = load("gguf", "gguf")
    block = gguf_blocks.BLOCKS[kind]
    raw = block.encode(weight().reshape(-1, block.size))
    got = gguf.dequantize(raw.reshape(ROWS, -1), gguf.GGMLQuantizationType[kind])
    mine = gguf_blocks.to_floats(block.read(raw)).reshape(ROWS, COLUMNS)
    np.testing.assert_array_equal(got, mine)


# --- mlx and bitsandbytes --------------------------------------------------------------------


@pytest.mark.parametrize("bits", mlx.BITS)
def test_mlx_is_read_and_reads_ours(bits):
    mx = load("mlx", "mlx.core")
    w = mx.array(weight())
    codes, scales, biases = mx.quantize(w, group_size=64, bits=bits)
    want = np.array(mx.dequantize(codes, scales, biases, group_size=64, bits=bits))
    arrays = {"weight": codes, "scales": scales, "biases": biases}
    tensors = {f"a.{k}": np.array(v) for k, v in arrays.items()}
    shapes = {k: Shape(v) for k, v in tensors.items()}
    found = mlx.find(shapes, {"group_size": 64, "bits": bits})
    q = read_all(found, tensors)["a.weight"]
    np.testing.assert_allclose(values(q), want, atol=2e-6)

    q = ours(f"int{bits}", {1: 64}, {})
    made = {k: mx.array(v) for k, v in mlx.write(q).items()}
    back = mx.dequantize(
        made["weight"], made["scales"], made["biases"], group_size=64, bits=bits
    )
    np.testing.assert_allclose(np.array(back), values(q), atol=1e-6)


@pytest.mark.parametrize("double", [False, True])
def test_nf4_of_bitsandbytes_is_read(double):
    functional, torch = load("bitsandbytes", "bitsandbytes.functional", "torch")

    raw, state = functional.quantize_4bit(
        torch.from_numpy(weight()), quant_type="nf4", compress_statistics=double
    )
    want = functional.dequantize_4bit(raw, state).numpy()
    tensors = {
        f"a.weight.{k}": v.numpy() for k, v in state.as_dict(packed=True).items()
    }
    tensors["a.weight"] = raw.numpy()
    shapes = {k: Shape(v) for k, v in tensors.items()}
    found = bitsandbytes.find(shapes, {}, tensors.get)
    np.testing.assert_allclose(
        values(read_all(found, tensors)["a.weight"]), want, rtol=2e-7, atol=0
    )


def test_int8_of_bitsandbytes_is_read():
    functional, torch = load("bitsandbytes", "bitsandbytes.functional", "torch")

    codes, largest, _ = functional.int8_vectorwise_quant(
        torch.from_numpy(weight()).half()
    )
    want = functional.int8_vectorwise_dequant(codes, largest).numpy()
    tensors = {"a.weight": codes.numpy(), "a.SCB": largest.numpy()}
    shapes = {k: Shape(v) for k, v in tensors.items()}
    found = bitsandbytes.find(shapes, {}, tensors.get)
    np.testing.assert_allclose(
        values(read_all(found, tensors)["a.weight"]), want, rtol=3e-7
    )


# --- torchao ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["int8", "int4", "int3-asymmetric", "float8", "mxfp8", "nvfp4"]
)
def test_torchao_is_read(name, tmp_path):
    """160 rows, so that scales in tiles of 128 rows are filled up."""
    load("torchao", "torchao")
    config = made.torchao_models()[name]
    about, tensors, want, metadata = made.torchao(config, (160, 192))
    listed = {k: huggingface.Tensor(v.shape, v.dtype) for k, v in tensors.items()}
    file = tmp_path / "model.safetensors"
    safetensors.write(file, listed, tensors.values(), metadata)
    huggingface.write_json(tmp_path / "config.json", {"quantization_config": about})
    q = quantized.open_model(tmp_path).read("a.weight")
    np.testing.assert_allclose(values(q), want, rtol=3e-7, atol=0)


@pytest.mark.parametrize("swizzled", [False, True])
def test_four_bits_of_torchao_are_read(swizzled):
    """MXTensor of e2m1, which no config makes on a CPU."""
    torch, tensor = load("torchao", "torch", "torchao.prototype.mx_formats.mx_tensor")
    x = torch.from_numpy(weight(shape=(160, 192))).bfloat16()
    mx = tensor.MXTensor.to_mx(
        x, torch.float4_e2m1fn_x2, 32, is_swizzled_scales=swizzled
    )
    arrays = {
        "qdata": mx.qdata.view(torch.uint8).numpy(),
        "scale": to_numpy(mx.scale),
    }
    about = {"block_size": 32, "is_swizzled_scales": swizzled}
    q = torchao.read_mx(arrays, about, "a.weight")
    assert q.format.name == "mxfp4"
    np.testing.assert_array_equal(values(q), mx.dequantize(torch.float32).numpy())
