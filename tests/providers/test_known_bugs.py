"""What goes wrong in Qwix 0.1.8 and must not here, one test each.

Those about numbers alone (float16, int1, nvfp4, two zero points) are in
tests/peers/test_qwix_differences.py, those about spellings in tests/model/test_intercept.py.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from jax import lax
from jax.experimental import pallas as pl
from jax.sharding import AxisType, PartitionSpec

import midtread as mt

X = jax.random.normal(jax.random.key(0), (4, 8))
INT8 = {"weight_qtype": "int8", "act_qtype": "int8"}


class Net(nnx.Module):
    def __init__(self):
        w = jax.random.normal(jax.random.key(1), (2, 8, 8))
        self.w, self.v = nnx.Param(w[0]), nnx.Param(w[1])
        self.experts = nnx.Param(w)

    def __call__(self, x):
        return x @ self.w


class Experts(Net):
    def __call__(self, x):
        return lax.ragged_dot(x, self.experts[...], jnp.array([1, 3]))


def norm(x):
    return float(jnp.linalg.norm(x))


@pytest.mark.parametrize("first", ["float", "quantized"])
def test_a_warm_jit_cache_serves_its_own_model_only(first):
    fn = jax.jit(lambda x, w: x @ w)

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            return fn(x, self.param("w", nn.initializers.normal(), (8, 8)))

    params = Model().init(jax.random.key(0), X)
    plain = X @ params["params"]["w"]
    quantized = mt.quantize_model(Model(), mt.QtProvider([mt.QtRule(**INT8)]))
    order = [Model(), quantized] if first == "float" else [quantized, Model()]
    for model in order * 2:
        same = np.array_equal(model.apply(params, X), plain)
        assert same == (model is not quantized)


def test_int16_sums_do_not_overflow():
    x, w = jnp.ones((2, 512)), jnp.ones((512, 3))
    q = [mt.quantize(v, "int16", channelwise_axes=[]) for v in (x, w)]
    np.testing.assert_allclose(mt.dot(*q), 512.0, rtol=1e-3)


def test_gradients_pass_through_ptq():
    model = mt.quantize_model(
        nn.Dense(8), mt.PtqProvider([mt.QuantizationRule(**INT8)])
    )
    params = model.init(jax.random.key(0), X)
    g = jax.grad(lambda x: jnp.sum(model.apply(params, x)))(X)
    kernel = mt.dequantize(params["params"]["kernel"].array)
    exact = jnp.broadcast_to(kernel.sum(1), X.shape)
    np.testing.assert_allclose(g, exact, atol=1e-5)


def test_two_parameters_of_one_shape_are_told_apart():
    class Both(Net):
        def __call__(self, x):
            return (x @ self.v) @ self.w

    model = mt.quantize_model(
        Both(), mt.PtqProvider([mt.QuantizationRule(weight_qtype="int8")]), X
    )
    net = Both()
    for name in ("w", "v"):
        held = getattr(net, name)[...]
        exact = mt.dequantize(mt.quantize(held, "int8", channelwise_axes=[1]))
        np.testing.assert_array_equal(
            mt.dequantize(getattr(model, name).value.array), exact
        )


def test_a_sharded_convolution_lands_where_it_was_told_to():
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Explicit,))
    rule = mt.recipe("qwix_int8")
    with jax.set_mesh(mesh):
        x = jax.sharding.reshard(jnp.ones((2, 6, 6, 4)), PartitionSpec("data"))
        out = mt.learn(rule).conv_general_dilated(
            x, jnp.ones((3, 3, 4, 8)), (1, 1), "SAME",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
            out_sharding=PartitionSpec("data", None, None, None),
        )  # fmt: skip
        assert jax.typeof(out).sharding.spec == PartitionSpec("data", None, None, None)


@pytest.mark.parametrize("fields", [{"weight_qtype": "int8"}, INT8], ids=str)
def test_ragged_dot_trains_with_weights_alone_in_int8(fields):
    model = mt.quantize_model(Experts(), mt.QtProvider([mt.QtRule(**fields)]), X)
    grads = nnx.grad(lambda m: jnp.sum(m(X) ** 2))(model)
    exact = nnx.grad(lambda m: jnp.sum(m(X) ** 2))(Experts())
    a, b = (g["experts"].get_value() for g in (grads, exact))
    assert 0 < norm(a - b) < 0.05 * norm(b)


@pytest.mark.parametrize("cls", [Net, Experts])
@pytest.mark.parametrize("jit", [False, True])
def test_ptq_of_an_nnx_weight_that_is_used_bare(cls, jit):
    rules = [mt.QuantizationRule(weight_qtype="int8")]
    model = mt.quantize_model(cls(), mt.PtqProvider(rules), X)
    assert isinstance(model.w if cls is Net else model.experts, mt.WithAux)
    out = nnx.jit(model)(X) if jit else model(X)
    exact = cls()(X)
    assert 0 < norm(out - exact) < 0.02 * norm(exact)


def test_an_nnx_param_goes_into_an_einsum_as_it_is():
    class Bare(Net):
        def __call__(self, x):
            return jnp.einsum("bd,df->bf", x, self.w)

    for provider in (
        mt.QtProvider([mt.QtRule(**INT8)]),
        mt.PtqProvider([mt.QuantizationRule(**INT8)]),
    ):
        out = mt.quantize_model(Bare(), provider, X)(X)
        assert 0 < norm(out - Bare()(X)) < 0.05 * norm(out)


def test_negative_axes():
    a, b = (mt.quantize(X, "int8", channelwise_axes=[axis]) for axis in (1, -1))
    np.testing.assert_array_equal(a.qvalue, b.qvalue)
    assert b.scale.shape == (1, 8)


@pytest.mark.parametrize("fields", [
    {"weight_qtype": "int8", "act_qtype": "int8", "tile_size": 4},
    {"weight_qtype": "mxfp8", "act_qtype": "mxfp8"},
], ids=str)  # fmt: skip
def test_the_backward_of_tiles_and_mx_is_quantized_too(fields):
    x = jax.random.normal(jax.random.key(0), (32, 32))
    params = nn.Dense(32).init(jax.random.key(1), x)
    grads = []
    for bwd in (None, "int8" if "tile_size" in fields else "fp8"):
        rule = mt.QtRule(**fields, bwd_qtype=bwd)
        model = mt.quantize_model(nn.Dense(32), mt.QtProvider([rule]))
        loss = lambda p, m=model: jnp.sum(m.apply(p, x) ** 2)
        grads.append(jax.grad(loss)(params)["params"]["kernel"])
    assert 0 < norm(grads[0] - grads[1]) < 0.1 * norm(grads[0])


def test_preferred_element_type_is_honoured_in_training():
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            w = self.param("w", nn.initializers.normal(), (8, 8), jnp.bfloat16)
            numbers = (((1,), (0,)), ((), ()))
            return lax.dot_general(
                x.astype(jnp.bfloat16), w, numbers, preferred_element_type=jnp.float32
            )

    model = mt.quantize_model(Model(), mt.QtProvider([mt.QtRule(**INT8)]))
    assert model.apply(model.init(jax.random.key(0), X), X).dtype == jnp.float32


def test_nothing_inside_a_kernel_is_touched():
    def kernel(x, w, out):
        out[...] = jnp.dot(x[...], w[...])

    class Model(Net):
        def __call__(self, x):
            shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
            return pl.pallas_call(kernel, out_shape=shape, interpret=True)(
                x, self.w[...]
            )

    provider = mt.QtProvider([mt.QtRule(**INT8)])
    with pytest.warns(UserWarning, match="matched nothing"):
        out = mt.quantize_model(Model(), provider, X)(X)
    np.testing.assert_allclose(out, Net()(X), rtol=1e-5, atol=1e-5)


def test_a_tile_need_not_divide_the_axis():
    rules = [mt.QuantizationRule(weight_qtype="int4", tile_size=3)]
    model = mt.quantize_model(Net(), mt.PtqProvider(rules), X)
    exact = Net()(X)
    assert 0 < norm(model(X) - exact) < 0.2 * norm(exact)
