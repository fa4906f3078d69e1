"""MaxText's rule functions and manual_quantize, as its documentation shows them, on Linen
models. `Config` stands for its config object and `qpl` for `qwix.pallas`."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jax.sharding import AxisType, PartitionSpec

import midtread as mt
import midtread as qpl
import midtread as qwix
from tests.model.test_seeds import NANOOFp8Provider, NvidaFp8Provider


@dataclasses.dataclass
class Config:
    quantization: str
    use_qwix_quantization: bool = True
    use_batch_split_schedule: bool = False
    quantization_local_shard_count: int = 2
    weight_quantization_calibration_method: str = "fixed,-224,224"
    act_quantization_calibration_method: str = "fixed,-224,224"
    bwd_quantization_calibration_method: str = "absmax"
    weight_sparsity_n: int | None = None
    weight_sparsity_m: int | None = None
    weight_sparsity_update_step: int = 10
    weight_sparsity_start_step: int = 50


def get_fp8_full_qwix_rule_w_sparsity(config):
    sparsity_rule = None
    if config.weight_sparsity_n and config.weight_sparsity_m:
        sparsity_rule = mt.Sparsity(
            n=config.weight_sparsity_n,
            m=config.weight_sparsity_m,
            update_step=config.weight_sparsity_update_step,
            start_step=config.weight_sparsity_start_step,
        )
    return [
        qwix.QtRule(
            module_path="decoder/.*layers.*",
            weight_qtype=jnp.float8_e4m3fn,
            act_qtype=jnp.float8_e4m3fn,
            bwd_qtype=jnp.float8_e5m2,
            weight_calibration_method=config.weight_quantization_calibration_method,
            act_calibration_method=config.act_quantization_calibration_method,
            bwd_calibration_method=config.bwd_quantization_calibration_method,
            additional_qt_config={"sparsity_rule": sparsity_rule},
            op_names=("dot_general", "gmm", "ragged_dot"),
        ),
    ]


def get_quantization_rule(config):
    if config.quantization == "fp8_full":
        return get_fp8_full_qwix_rule_w_sparsity(config)
    qtype = {"int4": jnp.int4, "int8": jnp.int8}
    qtype = qtype.get(config.quantization, jnp.float8_e4m3fn)
    return [
        qwix.QtRule(
            module_path="decoder/.*layers.*",
            weight_qtype=qtype,
            act_qtype=qtype,
            bwd_qtype=qtype,
            bwd_weight_grad_tile_size=1 / config.quantization_local_shard_count,
            op_names=("dot_general",),
        )
    ]


PROVIDERS = {
    "int8": qwix.QtProvider,
    "int4": qwix.QtProvider,
    "fp8": qwix.QtProvider,
    "fp8_full": qwix.QtProvider,
    "fp8_gpu": NvidaFp8Provider,
    "fp8_nanoo": NANOOFp8Provider,
}


def maybe_quantize_model(model, config):
    if config.use_qwix_quantization and not config.use_batch_split_schedule:
        provider = PROVIDERS[config.quantization](get_quantization_rule(config))
        model = qwix.quantize_model(model, provider)
    return model


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x):
        w = self.param("w", nn.initializers.lecun_normal(), (16, 16))
        return x + nn.relu(nn.Dense(16, name="mlp")(jnp.einsum("bd,df->bf", x, w)))


class Decoder(nn.Module):
    @nn.compact
    def __call__(self, x):
        for i in range(2):
            x = Layer(name=f"layers_{i}")(x)
        return nn.Dense(4, name="logits")(x)


class Lm(nn.Module):
    @nn.compact
    def __call__(self, x):
        return Decoder(name="decoder")(x)


@pytest.mark.parametrize("quantization", PROVIDERS)
def test_every_rule_trains_the_layers_and_nothing_else(quantization):
    x = jax.random.normal(jax.random.key(1), (8, 16))
    model = maybe_quantize_model(Lm(), Config(quantization))
    with jax.numpy_dtype_promotion("standard"):
        variables = model.init(jax.random.key(0), x)
        loss = lambda v, m=model: jnp.mean(m.apply(v, x) ** 2)
        value, grads = jax.jit(jax.value_and_grad(loss))(variables)
        exact, wanted = jax.value_and_grad(lambda v: loss(v, Lm()))(
            {"params": variables["params"]}
        )
    rough = {"int4": 0.3, "fp8_gpu": 0.5, "fp8_nanoo": 0.5}.get(quantization, 0.1)
    assert 0 < abs(value - exact) < rough * exact
    for name in ("layers_0", "layers_1"):
        got = np.asarray(grads["params"]["decoder"][name]["mlp"]["kernel"])
        want = np.asarray(wanted["params"]["decoder"][name]["mlp"]["kernel"])
        assert 0 < np.linalg.norm(got - want) < 2 * rough * np.linalg.norm(want)


def _cast_reduced_from(arr, reduced_arr):
    aval = jax.typeof(reduced_arr)
    if aval.sharding.mesh.axis_types[0] == jax.sharding.AxisType.Manual:
        for axis in aval.mat.reduced:
            arr = jax.lax.pcast(arr, axis, to="reduced")
        return arr
    return jax.sharding.reshard(arr, aval.sharding)


def _make_scale_tensor(scale, arr):
    return _cast_reduced_from(jnp.full_like(arr, scale, dtype=jnp.bfloat16), arr)


def manual_quantize(tensor, calibration_method, dtype=jnp.float8_e4m3fn):
    parts = calibration_method.split(",")
    dtype_max = jnp.finfo(dtype).max.astype(jnp.bfloat16)
    dtype_min = jnp.finfo(dtype).min.astype(jnp.bfloat16)
    scale = float(parts[2]) / dtype_max
    scale = jnp.where(scale == 0, 1.0, scale)
    scale_tensor = _make_scale_tensor(scale, tensor)
    min_bound = _make_scale_tensor(dtype_min, tensor)
    max_bound = _make_scale_tensor(dtype_max, tensor)
    q_tensor = jnp.clip(tensor / scale_tensor, min_bound, max_bound).astype(dtype)
    scale_shape = [1] * tensor.ndim
    scale_tensor_qpl = jnp.full(scale_shape, scale, dtype=tensor.dtype)
    return qpl.QArray(qvalue=q_tensor, scale=scale_tensor_qpl)


def test_manual_quantize_on_an_explicit_mesh():
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh), jax.numpy_dtype_promotion("standard"):
        x = jax.random.normal(jax.random.key(0), (8, 16), jnp.bfloat16)
        x = jax.sharding.reshard(x, PartitionSpec("data"))
        w = jax.random.normal(jax.random.key(1), (16, 4), jnp.bfloat16)
        q = manual_quantize(x, "fixed,-224,224")
        assert q.qtype == jnp.float8_e4m3fn and q.scale.shape == (1, 1)
        same = mt.quantize(x, "float8_e4m3fn", calibration_method="fixed,-224,224")
        np.testing.assert_array_equal(
            np.asarray(q.qvalue, np.float32), np.asarray(same.qvalue, np.float32)
        )
        out = mt.dot_general(
            q, manual_quantize(w, "fixed,-224,224"), (((1,), (0,)), ((), ()))
        )
        exact = np.float32(mt.dequantize(q)) @ np.float32(w)
    np.testing.assert_allclose(np.float32(out), exact, rtol=0.1, atol=0.3)
