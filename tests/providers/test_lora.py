"""LoraProvider: adapters beside frozen weights, float or quantized, and what becomes of
them afterwards."""

import flax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from jax.nn import initializers
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from midtread.model.boxes import WithAux
from midtread.model.quantize import quantize_model
from midtread.model.rules import QuantizationRule
from midtread.providers.adapters import (
    load_lora,
    lora_params,
    merge_lora,
    save_lora,
    unmerge_lora,
    with_lora,
)
from midtread.providers.lora import LoraProvider, LoraRule, apply_lora_to_model
from midtread.providers.params import quantize_params
from midtread.providers.ptq import PtqProvider
from tests.support import mesh, shared_variables

NOT_ZERO = {"lora_b_initializer": initializers.normal(0.5)}  # so that B does something
QTYPES = [None, "int8", "nf4", "int4", "float8_e4m3fn"]


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.gelu(nn.DenseGeneral((4, 8))(x))
        x = nn.Einsum((4, 8, 16), "...nh,nhd->...d", use_bias=False)(x)
        return nn.Dense(6, name="head")(x)


class Nnx(nnx.Module):
    def __init__(self, rngs):
        self.proj = nnx.LinearGeneral(16, (4, 8), rngs=rngs)
        self.layers = nnx.List([nnx.Einsum("bnh,nhd->bd", (4, 8, 16), rngs=rngs)])
        self.head = nnx.Linear(16, 6, rngs=rngs)

    def __call__(self, x):
        return self.head(self.layers[0](nnx.gelu(self.proj(x))))


def data(seed=1, shape=(5, 16)):
    return jax.random.normal(jax.random.key(seed), shape)


def linen(**fields):
    provider = LoraProvider(rank=3, alpha=6.0, **{**NOT_ZERO, **fields})
    model = apply_lora_to_model(Linen(), provider)
    return model, provider, jax.jit(model.init)(jax.random.key(0), data())["params"]


def lora_nnx(model=None, x=None, **fields):
    provider = LoraProvider(**{"rank": 3, "alpha": 6.0, **NOT_ZERO, **fields})
    model = model or Nnx(nnx.Rngs(0))
    x = data() if x is None else x
    return apply_lora_to_model(model, provider, x, rngs=nnx.Rngs(1)), provider


def shapes(tree):
    return jax.tree.map(jnp.shape, tree)


def assert_close(a, b, tol=2e-6):
    np.testing.assert_allclose(a, b, rtol=0, atol=tol * float(jnp.abs(b).max()))


# --- what there is ----------------------------------------------------------------------------

SHAPES = {
    "DenseGeneral_0": {"kernel_lora_a": (16, 3), "kernel_lora_b": (3, 32)},
    "Einsum_0": {"kernel_lora_a": (4, 8, 3), "kernel_lora_b": (3, 16)},
    "head": {"kernel_lora_a": (16, 3), "kernel_lora_b": (3, 6)},
}


@pytest.mark.parametrize("qtype", QTYPES)
def test_linen_adapters_lie_beside_their_weights(qtype):
    model, _, params = linen(weight_qtype=qtype)
    assert shapes(lora_params(params)) == SHAPES
    boxed = isinstance(params["head"]["kernel"], WithAux)
    assert boxed == (qtype is not None)
    assert_close(
        jax.jit(model.apply)({"params": params}, data()),
        model.apply({"params": params}, data()),
    )


@pytest.mark.parametrize("qtype", QTYPES)
def test_nnx_adapters_lie_beside_their_weights(qtype):
    float_model = Nnx(nnx.Rngs(0))
    model, _ = lora_nnx(float_model, weight_qtype=qtype)
    found = shapes(nnx.to_pure_dict(nnx.state(model, nnx.LoRAParam)))
    assert found["layers"][0] == SHAPES["Einsum_0"]
    assert found["proj"] == SHAPES["DenseGeneral_0"]
    assert isinstance(model.head.kernel_lora_a, nnx.LoRAParam)
    assert model.layers[0].kernel_lora_einsum_str == "bnh,nhr,rd->bd"
    assert isinstance(model.head.kernel, WithAux) == (qtype is not None)
    assert not hasattr(float_model.head, "kernel_lora_a")
    assert_close(nnx.jit(lambda m, x: m(x))(model, data()), model(data()))


def test_nnx_does_not_run_the_model():
    class Loud(nnx.Module):
        def __init__(self):
            self.linear = nnx.Linear(16, 4, rngs=nnx.Rngs(0))

        def __call__(self, x):
            assert isinstance(x, jax.core.Tracer)
            return self.linear(x)

    model, _ = lora_nnx(Loud(), jax.ShapeDtypeStruct((2, 16), jnp.float32))
    assert isinstance(model.linear.kernel_lora_b[...], jax.Array)


def test_with_b_at_zero_nothing_changes():
    provider = LoraProvider(rank=2, alpha=1.0)
    model = apply_lora_to_model(Linen(), provider)
    params = model.init(jax.random.key(0), data())["params"]
    plain = {
        k: {n: w for n, w in d.items() if "lora" not in n} for k, d in params.items()
    }
    out = model.apply({"params": params}, data())
    np.testing.assert_array_equal(out, Linen().apply({"params": plain}, data()))


def test_rank_letter_is_free():
    class Model(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(data(0, (16, 4)))

        def __call__(self, x):
            return jnp.einsum("br,rd->bd", x, self.w[...])

    model, _ = lora_nnx(Model())
    assert model.w_lora_einsum_str == "br,rA,Ad->bd"


def test_only_weights_on_the_right_of_matched_ops():
    class Attend(nn.Module):
        @nn.compact
        def __call__(self, x):
            q, k = nn.Dense(8, name="q")(x), nn.Dense(8, name="k")(x)
            left = self.param("left", initializers.ones, (5, 5))
            return jnp.einsum("td,td->td", left @ q, k) + jnp.einsum("td,sd->td", q, k)

    provider = LoraProvider(
        [QuantizationRule(module_path="k", weight_qtype="int8"),
         LoraRule(rank=2, alpha=1.0)]
    )  # fmt: skip
    params = jax.jit(apply_lora_to_model(Attend(), provider).init)(
        jax.random.key(0), data()
    )["params"]
    assert set(lora_params(params)) == {"q"}
    assert isinstance(params["k"]["kernel"], WithAux)


@pytest.mark.parametrize("qtype", [None, "int8"])
def test_convolution(qtype):
    class Conv(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Conv(7, (3, 3), strides=2)(x)

    provider = LoraProvider(
        rank=3, alpha=6.0, weight_qtype=qtype, act_qtype=qtype, **NOT_ZERO
    )
    model = apply_lora_to_model(Conv(), provider)
    x = data(shape=(2, 8, 8, 5))
    params = model.init(jax.random.key(0), x)["params"]
    found = lora_params(params)["Conv_0"]
    assert shapes(found) == {"kernel_lora_a": (3, 3, 5, 3), "kernel_lora_b": (3, 7)}
    merged = Conv().apply({"params": merge_lora(params, provider)}, x)
    assert_close(model.apply({"params": params}, x), merged, 0.02 if qtype else 2e-6)


def test_a_grouped_convolution_cannot_be_merged():
    class Conv(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Conv(8, (3,), feature_group_count=2)(x)

    provider = LoraProvider(rank=2, alpha=1.0)
    model = apply_lora_to_model(Conv(), provider)
    params = model.init(jax.random.key(0), data(shape=(2, 9, 4)))["params"]
    with pytest.raises(ValueError, match="Conv_0/kernel.*grouped"):
        merge_lora(params, provider)


def test_activations_with_a_weights_or_an_adapters_shape():
    model, _, params = linen(weight_qtype="int8", act_qtype="int8")
    for rows in (16, 3):
        x = data(shape=(rows, 16))
        assert model.apply({"params": params}, x).shape == (rows, 6)
    square = apply_lora_to_model(
        nn.Dense(16), LoraProvider(rank=4, alpha=1.0, weight_qtype="int8", act_qtype="int8")
    )  # fmt: skip
    for rows in (16, 4):
        x = data(shape=(rows, 16))
        variables = square.init(jax.random.key(0), x)
        assert square.apply(variables, x.T if rows == 16 else x).shape == (rows, 16)


def test_output_keeps_the_layers_dtype():
    dense = nn.Dense(4, dtype=jnp.bfloat16)
    model = apply_lora_to_model(dense, LoraProvider(rank=2, alpha=1.0, **NOT_ZERO))
    variables = model.init(jax.random.key(0), data())
    assert variables["params"]["kernel_lora_a"].dtype == jnp.float32
    assert model.apply(variables, data()).dtype == jnp.bfloat16


def test_sharding_names_follow_the_weights():
    init = nn.with_partitioning(initializers.normal(), ("in", "out"))
    model = apply_lora_to_model(
        nn.Dense(8, kernel_init=init), LoraProvider(rank=2, alpha=1.0)
    )
    params = model.init(jax.random.key(0), data())["params"]
    assert params["kernel_lora_a"].names == ("in", None)
    assert params["kernel_lora_b"].names == (None, "out")


def test_arrays_are_sharded_like_the_weights():
    placed = NamedSharding(mesh(2, 4), P("data", "model"))
    linear = nnx.Linear(16, 8, rngs=nnx.Rngs(0))
    linear.kernel[...] = jax.device_put(linear.kernel[...], placed)
    model, _ = lora_nnx(linear)
    assert model.kernel_lora_a[...].sharding.spec == P("data", None)
    assert model.kernel_lora_b[...].sharding.spec == P(None, "model")


# --- transforms -------------------------------------------------------------------------------


@pytest.mark.parametrize("qtype", [None, "int8"])
def test_linen_scan_and_remat(qtype):
    class Block(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return nn.tanh(nn.Dense(16)(x)), None

    class Stack(nn.Module):
        @nn.compact
        def __call__(self, x):
            scan = nn.scan(
                nn.remat(Block), {"params": 0}, split_rngs={"params": True}, length=3
            )
            return scan(name="stack")(x, None)[0]

    provider = LoraProvider(rank=2, alpha=1.0, weight_qtype=qtype, **NOT_ZERO)
    model = apply_lora_to_model(Stack(), provider)
    params = jax.jit(model.init)(jax.random.key(0), data())["params"]
    found = lora_params(params)["stack"]["Dense_0"]
    assert shapes(found) == {"kernel_lora_a": (3, 16, 2), "kernel_lora_b": (3, 2, 16)}
    grads = jax.jit(jax.grad(lambda a: jnp.sum(model.apply(
        {"params": with_lora(params, a)}, data()) ** 2)))(lora_params(params))  # fmt: skip
    assert all(jnp.abs(g).max() > 0 for g in jax.tree.leaves(grads))
    merged = Stack().apply({"params": merge_lora(params, provider)}, data())
    assert_close(merged, model.apply({"params": params}, data()), 1e-5)


@pytest.mark.parametrize("qtype", [None, "int8"])
def test_nnx_scan_and_remat(qtype):
    class Stack(nnx.Module):
        def __init__(self):
            make = nnx.vmap(lambda key: nnx.Linear(16, 16, rngs=nnx.Rngs(key)))
            self.layers = make(jax.random.split(jax.random.key(0), 3))

        def __call__(self, x):
            @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
            @nnx.remat
            def layer(linear, x):
                return nnx.tanh(linear(x))

            return layer(self.layers, x)

    model, provider = lora_nnx(Stack(), weight_qtype=qtype)
    assert model.layers.kernel_lora_a.shape == (3, 16, 3)
    a = model.layers.kernel_lora_a[...]
    assert jnp.abs(a[0] - a[1]).max() > 0.01  # a key each
    bound = np.sqrt(6 / 16)  # he_uniform of one layer
    assert 0.8 * bound < jnp.abs(a).max() <= bound
    grads = nnx.grad(
        lambda m: jnp.sum(m(data()) ** 2), argnums=nnx.DiffState(0, nnx.LoRAParam)
    )(model)
    assert all(jnp.abs(g).max() > 0 for g in jax.tree.leaves(grads))
    assert_close(merge_lora(model, provider)(data()), model(data()), 1e-5)


def test_under_a_nested_jit():
    class Jitted(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(data(0, (16, 4)))

        def __call__(self, x):
            return jax.jit(lambda x, w: x @ w)(x, self.w[...])

    model, provider = lora_nnx(Jitted())
    assert_close(merge_lora(model, provider)(data()), model(data()))


# --- gradients and training -------------------------------------------------------------------


@pytest.mark.parametrize("act", [None, "int8"])
def test_gradients_reach_adapters_and_inputs_but_not_the_base(act):
    model, _, params = linen(act_qtype=act)
    loss = lambda p, x: jnp.sum(model.apply({"params": p}, x) ** 2)
    grads, dx = jax.grad(loss, (0, 1))(params, data())
    assert all(jnp.abs(g).max() > 0 for g in jax.tree.leaves(lora_params(grads)))
    assert jnp.mean(dx == 0) < 0.01
    for layer in grads.values():
        assert jnp.abs(layer["kernel"]).max() == 0


@pytest.mark.parametrize("qtype", ["nf4", "int4", "int8"])
def test_qlora_learns_while_the_base_stays(qtype):
    x, base = data(shape=(64, 16)), Nnx(nnx.Rngs(0))
    target = Nnx(nnx.Rngs(0))
    target.head.kernel[...] += 0.3 * data(7, (16, 1)) * data(8, (1, 6))
    y = target(x)
    provider = LoraProvider(rank=4, alpha=4.0, weight_qtype=qtype)
    model = apply_lora_to_model(base, provider, x, rngs=nnx.Rngs(1))
    graph, lora, rest = nnx.split(model, nnx.LoRAParam, ...)
    loss = lambda lora: jnp.mean((nnx.merge(graph, lora, rest)(x) - y) ** 2)

    @jax.jit
    def step(lora, m):
        value, g = jax.value_and_grad(loss)(lora)
        m = jax.tree.map(lambda m, g: 0.9 * m + g, m, g)
        return jax.tree.map(lambda p, m: p - 0.01 * m, lora, m), m, value

    before, m, values = (
        jax.tree.map(np.array, rest),
        jax.tree.map(jnp.zeros_like, lora),
        [],
    )
    for _ in range(150):
        lora, m, value = step(lora, m)
        values.append(float(value))
    assert values[-1] < 0.05 * values[0]
    nnx.update(model, lora)
    after = nnx.split(model, nnx.LoRAParam, ...)[2]
    jax.tree.map(np.testing.assert_array_equal, before, jax.tree.map(np.array, after))


# --- dropout ----------------------------------------------------------------------------------


def test_linen_dropout():
    model, _, params = linen(dropout=0.5)  # init needs no stream of its own
    run = lambda seed: model.apply(
        {"params": params}, data(), rngs={"dropout": jax.random.key(seed)}
    )
    np.testing.assert_array_equal(run(0), run(0))
    assert jnp.abs(run(0) - run(1)).max() > 0.01
    with pytest.raises(Exception, match="dropout"):
        model.apply({"params": params}, data())
    means = jax.vmap(lambda key: run_head(params, key))
    mean = jnp.mean(means(jax.random.split(jax.random.key(0), 2000)), 0)
    assert_close(mean, run_head(params, None), 0.1)


def run_head(params, key):
    """The last layer alone, with or without dropout."""
    provider = LoraProvider(rank=3, alpha=6.0, dropout=0.0 if key is None else 0.5)
    model = apply_lora_to_model(nn.Dense(6), provider)
    rngs = {} if key is None else {"dropout": key}
    return model.apply({"params": params["head"]}, data(), rngs=rngs)


def test_all_dropped():
    """Qwix takes 1.0 as well: then the correction is nothing, and no NaN either."""
    model, _, params = linen(dropout=1.0)
    params = jax.tree.map(lambda p: p + 0.1, params)
    rngs = {"dropout": jax.random.key(0)}
    out = model.apply({"params": params}, data(), rngs=rngs)
    alone = {
        k: v
        for k, v in flax.traverse_util.flatten_dict(params).items()
        if "lora" not in k[-1]
    }
    alone = flax.traverse_util.unflatten_dict(alone)
    assert_close(out, Linen().apply({"params": alone}, data()))


def test_nnx_dropout():
    model, _ = lora_nnx(dropout=0.5)
    with pytest.raises(ValueError, match="no random stream 'dropout'"):
        model(data())
    model.set_attributes(qwix_rngs=nnx.Rngs(dropout=0))
    assert jnp.abs(model(data()) - model(data())).max() > 0.01
    model.eval()
    off, _ = lora_nnx()
    np.testing.assert_array_equal(model(data()), off(data()))


# --- quantize twice ---------------------------------------------------------------------------


def test_nnx_adapters_on_a_quantized_model():
    ptq = PtqProvider([QuantizationRule(weight_qtype="int4")])
    served = quantize_model(Nnx(nnx.Rngs(0)), ptq, data())
    model, provider = lora_nnx(served, weight_qtype="int8")
    assert model.head.kernel.array.qvalue is not None
    jax.tree.map(
        np.testing.assert_array_equal,
        jax.tree.map(np.array, nnx.state(served.head.kernel)),
        jax.tree.map(np.array, nnx.state(model.head.kernel)),
    )
    assert model.head.kernel.how.format.name == "int4"
    assert_close(merge_lora(model, provider)(data()), model(data()))


def test_nnx_applying_adapters_again_keeps_them():
    model, provider = lora_nnx()
    again = apply_lora_to_model(model, provider, data(), rngs=nnx.Rngs(5))
    np.testing.assert_array_equal(again(data()), model(data()))
    with pytest.raises(ValueError, match=r"kernel_lora_a has shape \(16, 3\).*rank 4"):
        lora_nnx(model, rank=4)


def test_linen_adapters_on_quantized_params():
    ptq = quantize_model(Linen(), PtqProvider([QuantizationRule(weight_qtype="int8")]))
    params = Linen().init(jax.random.key(3), data())["params"]
    shapes_ = jax.eval_shape(ptq.init, jax.random.key(0), data())["params"]
    quantized = quantize_params(params, shapes_)
    model, provider, fresh = linen()
    both = with_lora(quantized, lora_params(fresh))
    merged = Linen().apply({"params": merge_lora(both, provider)}, data())
    assert_close(model.apply({"params": both}, data()), merged)


# --- merge, save, load ------------------------------------------------------------------------


@pytest.mark.parametrize("qtype", QTYPES)
def test_merged_linen_gives_the_same_output(qtype):
    model, provider, params = linen(weight_qtype=qtype)
    out = model.apply({"params": params}, data())
    merged = merge_lora(params, provider)
    assert shapes(merged) == shapes(Linen().init(jax.random.key(0), data())["params"])
    assert_close(Linen().apply({"params": merged}, data()), out)
    variables = merge_lora({"params": params}, provider)
    jax.tree.map(np.testing.assert_array_equal, variables, {"params": merged})


@pytest.mark.parametrize("qtype", QTYPES)
def test_merged_nnx_gives_the_same_output(qtype):
    model, provider = lora_nnx(weight_qtype=qtype)
    merged = merge_lora(model, provider)
    assert type(merged) is Nnx
    assert not shared_variables(merged, model)
    assert not lora_params(merged)
    assert_close(merged(data()), model(data()))


@pytest.mark.parametrize("qtype", ["int8", "float8_e4m3fn"])
def test_requantized(qtype):
    model, provider = lora_nnx(weight_qtype=qtype)
    merged = merge_lora(model, provider, requantize=True)
    assert merged.head.kernel.how == model.head.kernel.how
    assert_close(merged(data()), model(data()), 0.1)
    model, provider, params = linen(weight_qtype=qtype)
    merged = merge_lora(params, provider, requantize=True)
    served = quantize_model(Linen(), PtqProvider([]))
    out = model.apply({"params": params}, data())
    assert_close(served.apply({"params": merged}, data()), out, 0.1)


def test_unmerge_undoes_merge():
    model, provider, params = linen()
    adapters = lora_params(params)
    back = unmerge_lora(merge_lora(params, provider), adapters, provider)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), back, params)
    model, provider = lora_nnx()
    back = unmerge_lora(merge_lora(model, provider), lora_params(model), provider)
    assert_close(back(data()), model(data()))


def test_what_merge_refuses():
    _, provider, params = linen()
    with pytest.raises(ValueError, match="has not seen the model"):
        merge_lora(params, LoraProvider(rank=3, alpha=6.0))
    with pytest.raises(ValueError, match="no weight with adapters is quantized"):
        merge_lora(params, provider, requantize=True)
    del params["head"]["kernel_lora_b"]
    with pytest.raises(
        ValueError, match="head/kernel_lora_a has no head/kernel_lora_b"
    ):
        merge_lora(params, provider)
    _, provider, params = linen(weight_qtype="int8")
    merged = merge_lora(params, provider, requantize=True)
    with pytest.raises(ValueError, match="kernel is quantized"):
        unmerge_lora(merged, lora_params(params), provider)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_saved_and_loaded(tmp_path, dtype):
    path = tmp_path / "adapters.npz"
    _, provider, params = linen()
    params = jax.tree.map(lambda x: x.astype(dtype), params)
    save_lora(path, params, provider)
    other = jax.tree.map(jnp.zeros_like, params)
    loaded = load_lora(path, other, provider)
    same = lambda a, b: np.testing.assert_array_equal(np.array(a), np.array(b))
    jax.tree.map(same, lora_params(loaded), lora_params(params))
    assert jnp.all(loaded["head"]["kernel"] == 0)


def test_saved_and_loaded_nnx(tmp_path):
    path = tmp_path / "adapters"
    model, provider = lora_nnx(weight_qtype="nf4")
    save_lora(path, model, provider)
    fresh = apply_lora_to_model(Nnx(nnx.Rngs(0)), provider, data(), rngs=nnx.Rngs(9))
    loaded = load_lora(path, fresh, provider)
    np.testing.assert_array_equal(loaded(data()), model(data()))
    assert isinstance(loaded.head.kernel_lora_a, nnx.LoRAParam)
    assert jnp.abs(fresh(data()) - model(data())).max() > 0.01


def test_what_load_refuses(tmp_path):
    path = tmp_path / "adapters.npz"
    _, provider, params = linen()
    save_lora(path, params, provider)
    wider = {**params, "head": {**params["head"], "kernel_lora_b": jnp.ones((3, 7))}}
    with pytest.raises(ValueError, match=r"head/kernel_lora_b has shape \(3, 7\)"):
        load_lora(path, wider, provider)
    fewer = {k: v for k, v in params.items() if k != "head"}
    with pytest.raises(
        ValueError, match="head/kernel_lora_a is in .*npz, but not in the m"
    ):
        load_lora(path, fewer, provider)
    with pytest.raises(ValueError, match="more/w_lora_a is in the model, but not in"):
        load_lora(path, {**params, "more": {"w_lora_a": jnp.ones(3)}}, provider)
    model, other = apply_lora_to_model(Linen(), p := LoraProvider(rank=3, alpha=1.0)), p
    model.init(jax.random.key(0), data())
    with pytest.raises(
        ValueError, match="kernel.*alpha / rank 2.0, the rule's is 0.33"
    ):
        load_lora(path, params, other)
    for bad in (b"", b"not a zip", b"PK\x03\x04"):
        path.write_bytes(bad)
        with pytest.raises(ValueError, match="is not a file of adapters"):
            load_lora(path, params, provider)
    np.savez(path, something=np.ones(3))
    with pytest.raises(ValueError, match="is not a file of adapters"):
        load_lora(path, params, provider)


def test_what_with_lora_refuses():
    _, _, params = linen()
    with pytest.raises(ValueError, match=r"head/kernel_lora_a has shape \(16, 3\)"):
        with_lora(params, {"head": {"kernel_lora_a": jnp.ones((16, 4))}})
    for name in ("tail/kernel_lora_a", "head/kernel"):
        layer, leaf = name.split("/")
        with pytest.raises(ValueError, match=f"{name} is not an adapter"):
            with_lora(params, {layer: {leaf: jnp.ones(3)}})


# --- bad input --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"rank": 0}, "rank should be a positive integer, not 0"),
        ({"rank": 2.5}, "rank should be a positive integer, not 2.5"),
        ({"rank": True}, "rank should be a positive integer"),
        ({"rank": "4"}, "rank should be a positive integer, not '4'"),
        ({"alpha": "x"}, "alpha should be a number, not 'x'"),
        ({"alpha": float("nan")}, "alpha should be a number"),
        ({"dropout": 1.1}, r"dropout should be in \[0, 1\], not 1.1"),
        ({"dropout": -0.1}, "dropout should be in"),
        ({"op_names": ("ragged_dot",)}, "ragged_dot gets no adapters"),
        ({"ranks": 4}, "unknown field 'ranks'. Did you mean 'rank'"),
    ],
)
def test_rules_are_checked_when_built(fields, message):
    with pytest.raises(ValueError, match=message):
        LoraProvider(**{"rank": 4, "alpha": 1.0, **fields})


def test_rank_and_alpha_are_required():
    with pytest.raises(TypeError, match="alpha"):
        LoraRule(rank=4)
    with pytest.raises(TypeError, match="rank"):
        LoraProvider(alpha=4.0)
    with pytest.raises(ValueError, match="Only one of rules"):
        LoraProvider([LoraRule(rank=4, alpha=1.0)], rank=4)


def test_missing_rngs():
    provider = LoraProvider(rank=4, alpha=1.0)
    with pytest.warns(UserWarning, match="rngs must be provided"):
        first = apply_lora_to_model(Nnx(nnx.Rngs(0)), provider, data())
    second = apply_lora_to_model(
        Nnx(nnx.Rngs(0)), provider, data(), rngs=nnx.Rngs(10003)
    )
    jax.tree.map(np.testing.assert_array_equal, lora_params(first), lora_params(second))
    with pytest.raises(
        ValueError, match="no random numbers to make proj/kernel_lora_a"
    ):
        quantize_model(Nnx(nnx.Rngs(0)), provider, data())


def test_three_operands_are_refused():
    class Triple(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(data(0, (16, 4)))

        def __call__(self, x):
            return jnp.einsum("bd,d,df->bf", x, x[0], self.w[...])

    with pytest.raises(
        ValueError, match="an einsum of two operands, not 'bd,d,df->bf'"
    ):
        lora_nnx(Triple())


def test_channels_first_is_refused():
    class First(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(data(0, (4, 3, 3, 3)))

        def __call__(self, x):
            return jax.lax.conv_general_dilated(x, self.w[...], (1, 1), "SAME")

    with pytest.raises(ValueError, match="output channels come last"):
        lora_nnx(First(), data(shape=(2, 3, 8, 8)))


def test_other_rank_in_linen():
    _, _, params = linen()
    model = apply_lora_to_model(Linen(), LoraProvider(rank=5, alpha=1.0))
    with pytest.raises(ValueError, match=r"kernel_lora_a has shape \(16, 3\).*rank 5"):
        model.apply({"params": params}, data())


class Turned(nn.Module):
    """Stores its weight as [out, in]."""

    @nn.compact
    def __call__(self, x):
        w = self.param("w", initializers.lecun_normal(), (6, 8))
        return x @ w.T


TWO_FORMS = {
    "transposed": ((12, 8), lambda w: w.T),
    "square": ((8, 8), lambda w: w.T),
    "reshaped": ((4, 16), lambda w: w.reshape(8, 8)),
}


class TwoForms(nnx.Module):
    """Multiplies by one weight twice, the first time in another form."""

    def __init__(self, name):
        shape, self.form = TWO_FORMS[name]
        self.w = nnx.Param(jax.random.normal(jax.random.key(0), shape))

    def __call__(self, x):
        y = x @ self.form(self.w[...])
        return y + jnp.sum(jnp.ones((1, self.w.shape[0])) @ self.w[...])


@pytest.mark.parametrize("qtype", [None, "int8"])
@pytest.mark.parametrize("name", TWO_FORMS)
def test_a_weight_in_two_forms_has_one_correction(name, qtype):
    x = jax.random.normal(jax.random.key(1), (2, 8))
    provider = LoraProvider(rank=2, alpha=2.0, weight_qtype=qtype)
    model = apply_lora_to_model(TwoForms(name), provider, x, rngs=nnx.Rngs(0))
    model.w_lora_b[...] = jnp.ones(model.w_lora_b.shape)
    merged = merge_lora(model, provider)
    np.testing.assert_allclose(merged(x), model(x), rtol=1e-4, atol=1e-4)


def test_a_function_of_a_weight_gets_no_adapters():
    class Rounds(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(jnp.full((8, 8), 1.5))

        def __call__(self, x):
            return x @ self.w[...].astype(int).astype(float)

    x, provider = jnp.ones((2, 8)), LoraProvider(rank=2, alpha=2.0)
    model = apply_lora_to_model(Rounds(), provider, x, rngs=nnx.Rngs(0))
    assert not hasattr(model, "w_lora_a") and model(x)[0, 0] == 8


def test_adapters_go_beside_the_weights_of_a_checkpoint():
    x, layer = jnp.ones((2, 8)), nn.Dense(4)
    params = layer.init(jax.random.key(0), x)["params"]
    model = apply_lora_to_model(layer, LoraProvider(rank=2, alpha=2.0))
    with pytest.raises(ValueError, match="no kernel_lora_a. `init` of .*mt.with_lora"):
        model.apply({"params": params}, x)
    made = model.init(jax.random.key(1), x)["params"]
    tuned = with_lora(params, lora_params(made))
    out = model.apply({"params": tuned}, x)
    np.testing.assert_allclose(out, layer.apply({"params": params}, x), rtol=1e-6)


def test_two_forms_that_cannot_be_told_are_refused():
    TWO_FORMS["unknown"] = (4, 16), lambda w: w.T.reshape(8, 8)
    x, provider = jnp.ones((2, 8)), LoraProvider(rank=2, alpha=2.0)
    try:
        with pytest.raises(ValueError, match="w is multiplied by in two forms"):
            apply_lora_to_model(TwoForms("unknown"), provider, x, rngs=nnx.Rngs(0))
    finally:
        del TWO_FORMS["unknown"]


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("qtype", [None, "nf4"])
def test_a_transposed_weight(qtype, jit):
    wrap = jax.jit if jit else lambda f: f
    x = jax.random.normal(jax.random.key(1), (4, 8))
    provider = LoraProvider(rank=2, alpha=4.0, weight_qtype=qtype, **NOT_ZERO)
    model = apply_lora_to_model(Turned(), provider)
    params = wrap(model.init)(jax.random.key(0), x)["params"]
    assert params["w_lora_a"].shape == (8, 2) and params["w_lora_b"].shape == (2, 6)
    out = wrap(model.apply)({"params": params}, x)
    merged = merge_lora(params, provider)
    assert merged["w"].shape == (6, 8)
    whole = Turned().apply({"params": merged}, x)
    np.testing.assert_allclose(out, whole, atol=1e-5)
    alone = np.asarray(params["w"]) if qtype is None else None
    if alone is not None:
        assert not np.allclose(out, x @ alone.T, atol=1e-2)


class Body(nn.Module):
    """A Linen module whose body is any function of (x, w)."""

    fn: object
    shape: tuple = (8, 4)

    @nn.compact
    def __call__(self, x):
        return self.fn(x, self.param("w", nn.initializers.normal(1.0), self.shape))


X = jax.random.normal(jax.random.key(3), (3, 8))


@pytest.mark.parametrize("shape", [(2, 8, 4), (3, 2, 8, 4)], ids=str)
def test_codes_with_batch_axes_have_the_adapters_of_floats(shape):
    model, x = Body(lambda x, w: x @ w, shape), X[:2, None]
    adapters = {}
    for qtype in (None, "int8"):
        provider = LoraProvider(rank=2, alpha=2.0, weight_qtype=qtype)
        lora = apply_lora_to_model(model, provider)
        params = lora.init(jax.random.key(0), x)["params"]
        assert lora.apply({"params": params}, x).shape == (*shape[:-3], 2, 1, 4)
        adapters[qtype] = jax.tree.map(jnp.shape, lora_params(params))
    assert adapters[None] == adapters["int8"]


def test_an_einsum_of_one_operand_is_no_product():
    model = apply_lora_to_model(
        Body(lambda x, w: x @ jnp.einsum("ij->ji", w).T),
        LoraProvider(rank=2, alpha=2.0),
    )
    model.init(jax.random.key(0), X)


def test_an_adapter_that_could_not_leave_a_jit_is_refused():
    model = Body(lambda x, w: jax.jit(jnp.dot)(x, w))
    lora = apply_lora_to_model(model, LoraProvider(rank=2, alpha=2.0))
    with pytest.raises(ValueError, match="'': w is multiplied by inside a jax.jit"):
        lora.init(jax.random.key(0), X)


def test_groups_that_do_not_divide_the_rank_are_refused():
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Conv(8, (3,), feature_group_count=4, name="conv")(x)

    lora = apply_lora_to_model(Net(), LoraProvider(rank=2, alpha=2.0))
    with pytest.raises(ValueError, match="'conv': a convolution of 4 groups .* rank=4"):
        lora.init(jax.random.key(0), jnp.ones((1, 5, 8)))


def test_merging_a_table_that_is_looked_up_warns():
    class Tied(nn.Module):
        @nn.compact
        def __call__(self, ids):
            table = nn.Embed(8, 4, name="table")
            return table.attend(table(ids))

    provider = LoraProvider(rank=2, alpha=2.0)
    params = apply_lora_to_model(Tied(), provider).init(
        jax.random.key(0), jnp.arange(3)
    )
    with pytest.warns(UserWarning, match="table/embedding: adapters correct"):
        merge_lora(params, provider)
