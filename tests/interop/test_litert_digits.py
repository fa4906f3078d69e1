"""Digits, all the way to the interpreter: accuracy, integers and size of the file.

The transformer takes minutes: `pytest -m slow tests/interop/test_litert_digits.py`.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

import midtread as mt
from midtread.interop import litert, tflite

pytest.importorskip("litert_converter", reason="needs the extra litert")
pytest.importorskip("ai_edge_litert", reason="needs the extra litert")
optax = pytest.importorskip("optax")
datasets = pytest.importorskip("sklearn.datasets", reason="needs scikit-learn")

RULES = [mt.QuantizationRule(weight_qtype="int8", act_qtype="int8")]


@pytest.fixture(autouse=True)
def standard():
    with jax.numpy_dtype_promotion("standard"):  # flax's avg_pool needs it
        yield


class CNN(nn.Module):
    """conv, depthwise conv, batch norm, both poolings, dense."""

    @nn.compact
    def __call__(self, x, train=False):
        norm = functools.partial(nn.BatchNorm, not train, momentum=0.9)
        x = nn.relu(norm()(nn.Conv(16, (3, 3))(x)))
        x = nn.max_pool(x, (2, 2), (2, 2))
        x = nn.relu(norm()(nn.Conv(16, (3, 3), feature_group_count=16)(x)))
        x = nn.relu(norm()(nn.Conv(64, (1, 1))(x)))
        x = nn.avg_pool(x, (2, 2), (2, 2)).reshape(x.shape[0], -1)
        return nn.Dense(10)(nn.relu(nn.Dense(256)(x)))


class Encoder(nn.Module):
    """A token per row of the image; attention, layer norms, gelu, residuals."""

    blocks: int = 2
    width: int = 160  # narrower, and op descriptions outweigh the weights

    @nn.compact
    def __call__(self, x, train=False):
        x = nn.Dense(self.width)(x.reshape(x.shape[0], 8, 8))
        x = x + self.param("position", nn.initializers.normal(0.5), (8, self.width))
        for _ in range(self.blocks):
            x = x + nn.MultiHeadDotProductAttention(2)(nn.LayerNorm()(x))
            inner = nn.gelu(nn.Dense(2 * self.width)(nn.LayerNorm()(x)))
            x = x + nn.Dense(self.width)(inner)
        return nn.Dense(10)(jnp.mean(nn.LayerNorm()(x), 1))


@functools.cache
def digits():
    data = datasets.load_digits()
    order = np.random.default_rng(0).permutation(len(data.target))
    x = (data.images[order] / 16).astype(np.float32)[..., None]
    return (x[:1397], data.target[order][:1397]), (x[1397:], data.target[order][1397:])


def train(model, variables, steps, rate):
    (x, y), _ = digits()
    tx = optax.adam(optax.cosine_decay_schedule(rate, steps))
    rest = {k: v for k, v in variables.items() if k != "params"}
    names = [*rest, "quant_stats"]

    def loss(params, rest, xb, yb):
        out, new = model.apply(
            {"params": params, **rest}, xb, train=True, mutable=names
        )
        losses = optax.softmax_cross_entropy_with_integer_labels(out, yb)
        return losses.mean(), {**rest, **new}

    @jax.jit
    def step(params, rest, state, xb, yb):
        grads, rest = jax.grad(loss, has_aux=True)(params, rest, xb, yb)
        updates, state = tx.update(grads, state)
        return optax.apply_updates(params, updates), rest, state

    params, state = variables["params"], tx.init(variables["params"])
    rng = np.random.default_rng(1)
    for _ in range(steps):
        batch = rng.integers(0, len(x), 64)
        params, rest, state = step(params, rest, state, x[batch], y[batch])
    return {"params": params, **rest}


def percent(out):
    _, (_, y) = digits()
    return 100 * np.mean(np.argmax(np.asarray(out), -1) == y)


def check(model, steps, path, size):
    """The whole path, and what the file must hold. Accuracies in percent."""
    (x, _), (held_out, _) = digits()
    floats = train(model, jax.jit(model.init)(jax.random.key(0), x[:1]), steps, 4e-3)
    apply = jax.jit(model.apply)
    in_float = percent(apply(floats, held_out))

    qat = mt.quantize_model(model, mt.OdmlQatProvider(RULES))
    gather = jax.jit(lambda v, x: qat.apply(v, x, mutable="quant_stats"))
    _, stats = gather(floats, x[:64])
    trained = train(qat, {**floats, **stats}, steps // 3, 1e-3)
    run = jax.jit(lambda x: qat.apply(trained, x))
    file = litert.export(qat, trained, held_out, path)
    in_file = percent(tflite.run(path, held_out)[0])
    (parity,) = tflite.parity(path, run, held_out)
    print(f"float {in_float:.2f}, fake-quant {percent(run(held_out)):.2f}, file "
          f"{in_file:.2f}; {file.bytes:,} bytes; {parity}")  # fmt: skip
    assert file.is_full_integer, str(file)
    assert abs(in_file - percent(run(held_out))) <= 0.5
    assert in_file >= in_float - 1
    assert parity.within_step >= 0.99, str(parity)

    batches = [x[i : i + 100] for i in range(0, 400, 100)]
    ptq = litert.calibrate_and_export(model, floats, batches, path, inputs=held_out)
    after = percent(tflite.run(path, held_out)[0])
    print(f"without training {after:.2f}")
    assert ptq.is_full_integer
    assert after >= in_float - 1.5

    plain = jax.export.export(jax.jit(lambda x: model.apply(floats, x)))(held_out)
    float_bytes = len(litert._convert(plain.mlir_module(), 1, 1))
    print(f"{file.bytes / float_bytes:.2f} of the float file")
    assert file.bytes < size * float_bytes


def test_a_convolutional_network(tmp_path):
    check(CNN(), 90, tmp_path / "cnn.tflite", size=0.32)


@pytest.mark.slow
def test_a_transformer(tmp_path):
    check(Encoder(), 300, tmp_path / "encoder.tflite", size=0.34)
