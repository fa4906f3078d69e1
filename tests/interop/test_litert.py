"""LiteRT files: written by the converter, run by the interpreter, compared with JAX.

Half of the models take their time: `pytest -m slow tests/interop/test_litert.py`.
"""

import os

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from flax import nnx

import midtread as mt
from midtread.interop import litert, tflite
from midtread.report.tflite import describe

pytest.importorskip("litert_converter", reason="needs the extra litert")
pytest.importorskip("ai_edge_litert", reason="needs the extra litert")

INT8 = {"weight_qtype": "int8", "act_qtype": "int8"}


@pytest.fixture(autouse=True)
def standard():
    """flax's avg_pool divides by a NumPy integer, which strict promotion refuses."""
    with jax.numpy_dtype_promotion("standard"):
        yield


class Of(nn.Module):
    fn: object

    @nn.compact
    def __call__(self, x):
        return self.fn(x)


@pytest.fixture(scope="module")
def x():
    return jax.random.normal(jax.random.key(0), (4, 8, 8, 4))


def trip(fn, x, path, rule=INT8, **options):
    """A function of flax layers, calibrated on x: its file, and parity on x."""
    model = Of(fn)
    provider = mt.OdmlQatProvider([mt.QuantizationRule(**rule)], **options)
    quantized = mt.quantize_model(model, provider)
    variables = jax.jit(model.init)(jax.random.key(1), x)
    kept = ["quant_stats", "batch_stats"]
    run = jax.jit(lambda v, x: quantized.apply(v, x, mutable=kept))
    _, stats = run(variables, x)
    variables = {**variables, **stats}
    file = litert.export(quantized, variables, x, path)
    again = jax.jit(lambda x: quantized.apply(variables, x))
    (parity,) = tflite.parity(path, again, x)
    return file, parity


def attention(x):
    x = nn.LayerNorm()(x.reshape(4, 8, -1))
    return x + nn.MultiHeadDotProductAttention(num_heads=2)(x)


def cnn(x):
    x = nn.relu(nn.BatchNorm(use_running_average=True)(nn.Conv(8, (3, 3))(x)))
    x = nn.avg_pool(x, (2, 2), (2, 2))
    x = nn.relu6(nn.Conv(8, (3, 3), feature_group_count=8)(x))
    x = nn.max_pool(x, (2, 2), (2, 2)).reshape(4, -1)
    return nn.BatchNorm(use_running_average=True)(nn.Dense(6)(x))


# everything in one model each, since a conversion costs a second: ops and least SQNR
MODELS = {
    "cnn": (cnn, 40),
    "attention": (attention, 40),
    "arithmetic": (
        lambda x: (-x * 2.0 + jnp.abs(x) / 3.0) - jnp.maximum(x, 0.5) * jnp.tanh(x), 30,
    ),
    "activations": (
        lambda x: nn.silu(nn.gelu(x)) + nn.hard_swish(nn.leaky_relu(x)) * nn.sigmoid(x), 30,
    ),
    "functions": (lambda x: jnp.sqrt(jnp.exp(nn.Dense(4)(x)) + jnp.square(x)), 30),
    "reductions": (lambda x: jnp.mean(x, (1, 2)) + jnp.sum(x * x, 2)[:, 0] + jnp.max(x, (1, 2)), 30),
    "moves": (
        lambda x: jnp.pad(nn.relu(nn.Conv(4, (3, 3))(x)), ((0, 0), (1, 1), (1, 1), (0, 0)))
        .transpose(0, 3, 1, 2)[:, 1:].reshape(4, -1), 40,
    ),
    "concatenate": (
        lambda x: jnp.concatenate([nn.relu(nn.Conv(4, (3, 3))(x)), nn.Conv(4, (1, 1))(x)], -1), 35,
    ),
    "norms": (lambda x: nn.GroupNorm(2)(nn.RMSNorm()(x)), 30),
    "resize": (lambda x: jax.image.resize(nn.Dense(4)(x), (4, 16, 16, 4), "bilinear"), 35),
    "softmax": (lambda x: nn.softmax(nn.Dense(8)(x), axis=1), 40),
    "einsum": (
        lambda x: jnp.einsum("bhwc,cd->bdwh", x, jnp.arange(12.0).reshape(4, 3) / 12), 40,
    ),
    "heads": (lambda x: nn.DenseGeneral(5, axis=(-2, -1))(nn.DenseGeneral((2, 3))(x)), 40),
    "padded": (lambda x: nn.avg_pool(nn.Conv(4, (3, 3))(x), (3, 3), (2, 2), "SAME"), 40),
}  # fmt: skip


SLOW = ("concatenate", "functions", "heads", "norms", "padded", "softmax", "moves")


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.slow if n in SLOW else ()) for n in MODELS],
)
def test_every_op_is_integer_and_right(name, x, tmp_path):
    fn, least = MODELS[name]
    file, parity = trip(fn, x, tmp_path / "m.tflite")
    assert file.is_full_integer, str(file)
    assert parity.within_step >= 0.99 and parity.sqnr_db > least, str(parity)


@pytest.mark.parametrize(
    "rule, op, types, least",
    [
        ({"weight_qtype": "int4", "act_qtype": "int8"}, "FULLY_CONNECTED", "INT8 INT4", 40),
        ({"weight_qtype": "int2", "act_qtype": "int8"}, "FULLY_CONNECTED", "INT8 INT2", 40),
        ({"weight_qtype": "int8", "act_qtype": "int16"}, "FULLY_CONNECTED", "INT16 INT8", 80),
        ({"weight_qtype": "int8"}, "DEQUANTIZE", "INT8", 100),
        ({"weight_qtype": "int4"}, "DEQUANTIZE", "INT4", 100),
        ({"weight_qtype": "int2"}, "DEQUANTIZE", "INT2", 100),
        ({**INT8, "act_static_scale": False}, "FULLY_CONNECTED", "FLOAT32 INT8", 100),
        ({"weight_qtype": "int4", "act_qtype": "int8", "act_static_scale": False},
         "FULLY_CONNECTED", "FLOAT32 INT4", 100),
    ],
)  # fmt: skip
def test_modes_that_qwix_does_not_offer(rule, op, types, least, x, tmp_path):
    fn = lambda x: nn.relu(nn.Dense(3)(x.reshape(4, 64, 4)))
    file, parity = trip(fn, x, tmp_path / "m.tflite", rule)
    (found,) = [o for o in file.ops if o.name == op and o.inputs[0].type in types][:1]
    assert [t.type for t in found.inputs][: len(types.split())] == types.split()
    assert parity.sqnr_db > least, str(parity)
    static = rule.get("act_qtype") and rule.get("act_static_scale", True)
    assert file.is_full_integer == bool(static)


def test_int16_convolutions(x, tmp_path):
    """Their biases are widened after the converter: without, results are noise."""
    rule = {"weight_qtype": "int8", "act_qtype": "int16"}
    fn = lambda x: nn.relu(
        nn.Conv(4, (3, 3), feature_group_count=4)(nn.Conv(4, (3, 3))(x))
    )
    file, parity = trip(fn, x, tmp_path / "m.tflite", rule)
    assert file.is_full_integer and parity.sqnr_db > 70, str(parity)


def test_float_ops_are_reported(x, tmp_path):
    file, parity = trip(lambda x: jnp.sin(nn.Dense(3)(x)) / jnp.exp(x[..., :3]), x, tmp_path / "m.tflite")  # fmt: skip
    assert {op.name for op in file.float_ops} == {"SIN", "DIV"}
    text = str(file)
    assert "not full integer" in text
    assert (
        "SIN(float32[4, 8, 8, 3]) -> float32[4, 8, 8, 3]: LiteRT has no integer" in text
    )
    assert "(root): truediv: LiteRT has no integer division: 1/x is float" in text
    assert parity.sqnr_db > 30


def test_an_unknown_op_stays_float_and_the_report_says_so(x, tmp_path):
    fn = lambda x: nn.Dense(2)(jnp.prod(nn.Dense(3)(x), -1, keepdims=True))
    file, _ = trip(fn, x, tmp_path / "m.tflite", strict=False)
    assert any("not in the table" in note["why"] for note in file.left_float)
    assert "left in float by the model:" in describe(tmp_path / "m.tflite")
    assert [op.name for op in file.ops].count("FULLY_CONNECTED") == 2
    dense = [op for op in file.ops if op.name == "FULLY_CONNECTED"]
    assert all(op.is_integer for op in dense)


def test_embeddings(tmp_path):
    ids = jnp.arange(12).reshape(3, 4) % 7
    fn = lambda i: nn.Dense(4)(nn.Embed(7, 8)(i))
    file, parity = trip(fn, ids, tmp_path / "m.tflite")
    assert file.is_full_integer and parity.within_step == 1
    assert file.inputs[0].type == "INT32"


class Net(nnx.Module):
    def __init__(self, rngs):
        self.conv = nnx.Conv(4, 4, (3, 3), rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.blocks = nnx.List([nnx.Linear(4, 4, rngs=rngs) for _ in range(2)])

    def __call__(self, x):
        x = nnx.relu(self.norm(self.conv(x)))
        for block in self.blocks:
            x = x + block(x)
        return jnp.mean(x, (1, 2))


def test_nnx_from_float_model_and_data(x, tmp_path):
    net, path = Net(nnx.Rngs(0)), tmp_path / "m.tflite"
    net.eval()
    file = litert.calibrate_and_export(net, None, [x, x * 0.9], path)
    assert file.is_full_integer
    (parity,) = tflite.parity(path, nnx.jit(net), x)
    assert parity.sqnr_db > 25, str(parity)
    plain = tmp_path / "plain"
    plain.touch()
    assert path.stat().st_mode == plain.stat().st_mode  # it may be read as any new file


# --- bad input --------------------------------------------------------------------------------


def quantized_dense():
    return mt.quantize_model(
        nn.Dense(3), mt.OdmlQatProvider([mt.QuantizationRule(**INT8)])
    )


def variables_of(x):
    return nn.Dense(3).init(jax.random.key(0), x)


def fails(error, match, path, model, variables, inputs):
    with pytest.raises(error, match=match):
        litert.export(model, variables, inputs, path)
    assert os.listdir(path.parent) == []  # nothing, and no part of it


def test_no_statistics(x, tmp_path):
    path = tmp_path / "m.tflite"
    variables = variables_of(x)
    fails(ValueError, "no range was collected for 'dot_general0_lhs'", path,
          quantized_dense(), variables, x)  # fmt: skip
    unseen = jax.jit(quantized_dense().init)(jax.random.key(0), x)
    fails(ValueError, "no batch was seen there", path, quantized_dense(), unseen, x)
    with pytest.raises(ValueError, match="no batch to calibrate with"):
        litert.calibrate_and_export(nn.Dense(3), variables, [], path)


def test_shapes_and_dtypes(x, tmp_path):
    path, variables = tmp_path / "m.tflite", variables_of(x)
    (b,) = jax.export.symbolic_shape("b")
    fails(ValueError, "input 0 has axis 0 of unknown extent b", path, quantized_dense(),
          variables, jax.ShapeDtypeStruct((b, 4), jnp.float32))  # fmt: skip
    fails(ValueError, "input 0 is bfloat16", path, quantized_dense(), variables,
          jax.ShapeDtypeStruct((1, 4), jnp.bfloat16))  # fmt: skip


def test_models_of_other_providers(x, tmp_path):
    path = tmp_path / "m.tflite"
    other = mt.quantize_model(nn.Dense(3), mt.QtProvider([mt.QtRule()]))
    fails(ValueError, "not quantized under OdmlQatProvider", path, other, {}, x)
    fails(ValueError, "not quantized under OdmlQatProvider", path, nn.Dense(3), {}, x)
    fails(TypeError, "variables should be Linen's", path, quantized_dense(), None, x)


def test_the_converter_is_missing(x, tmp_path, monkeypatch):
    def nothing(name):
        raise ImportError(name)

    monkeypatch.setattr(litert.importlib, "import_module", nothing)
    fails(ImportError, r"`pip install '\.\[litert\]'` in Midtread's folder", tmp_path / "m.tflite",
          quantized_dense(), variables_of(x), x)  # fmt: skip
    with pytest.raises(
        ImportError, match=r"`pip install '\.\[litert\]'` in Midtread's folder"
    ):
        tflite.schema()


def test_what_the_converter_refuses():
    with pytest.raises(ValueError, match="litert-converter refused the model"):
        litert._convert("module { func.func @main() { foo.bar } }", 0, 0)


def test_a_transposed_convolution_is_refused(x, tmp_path):
    with pytest.raises(ValueError, match="a transposed convolution"):
        trip(lambda x: nn.ConvTranspose(3, (2, 2), (2, 2))(x), x, tmp_path / "m.tflite")
    assert os.listdir(tmp_path) == []


def test_batch_norm_in_training(x, tmp_path):
    with pytest.raises(ValueError, match="use_running_average=True"):
        trip(lambda x: nn.BatchNorm(use_running_average=False)(nn.Dense(3)(x)), x,
             tmp_path / "m.tflite")  # fmt: skip


def test_scanned_layers_are_refused(x, tmp_path):
    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return nn.Dense(4)(x), None

    axes = {"params": 0, "quant_stats": 0}
    layers = nn.scan(Layer, axes, split_rngs={"params": True}, length=2)
    with pytest.raises(ValueError, match="has a layer axis, from nn.scan"):
        trip(lambda x: layers(name="all")(x, None)[0], x, tmp_path / "m.tflite")


def test_a_damaged_file_is_named(tmp_path):
    path = tmp_path / "damaged.tflite"
    path.write_bytes(b"\0\0\0\0TFL3" + b"\xff" * 40)
    with pytest.raises(ValueError, match=r"damaged.tflite' is damaged: "):
        describe(path)


def test_not_a_litert_file(tmp_path):
    (tmp_path / "m.tflite").write_bytes(b"something else")
    with pytest.raises(ValueError, match="is not a LiteRT file"):
        describe(tmp_path / "m.tflite")
