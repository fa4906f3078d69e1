"""quantize_model: paths, op ids, weights, life cycles and errors."""

import pickle
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx, serialization

import midtread as mt
from tests.support import shared_variables

X = jax.random.normal(jax.random.key(0), (4, 8))
INT8 = {"weight_qtype": "int8", "act_qtype": "int8"}


class Paths(mt.QtProvider):
    def __init__(self):
        super().__init__([mt.QtRule(**INT8)])
        self.seen = []

    def _get_current_rule_and_op_id(self, name, **options):
        found = super()._get_current_rule_and_op_id(name, **options)
        module = mt.model.intercept.current_module()
        self.seen.append((mt.model.flaxlib.path_of(module), found[1]))
        return found


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _=None):
        return x + nn.Dense(8, use_bias=False, name="mlp")(nn.relu(x)), None


class LinenNet(nn.Module):
    scan: bool = True

    @nn.compact
    def __call__(self, x):
        dense = nn.Dense(8, name="stem")
        x = dense(dense(x))
        if self.scan:
            layers = nn.scan(
                nn.remat(Block), {"params": 0}, split_rngs={"params": True}, length=3
            )
            x, _ = layers(name="layers")(x, None)
        return jnp.einsum(
            "bi,ij->bj", x, self.param("head", nn.initializers.lecun_normal(), (8, 8))
        )


class NnxBlock(nnx.Module):
    def __init__(self, rngs):
        self.mlp = nnx.Linear(8, 8, use_bias=False, rngs=rngs)

    def __call__(self, x):
        return x + self.mlp(nnx.relu(x))


class NnxNet(nnx.Module):
    def __init__(self, rngs):
        self.blocks = nnx.List([NnxBlock(rngs) for _ in range(2)])
        self.stacked = nnx.vmap(NnxBlock, in_axes=0)(nnx.Rngs(7).split(3))
        self.head = nnx.Param(jax.random.normal(rngs.params(), (8, 8)))

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        x = nnx.scan(
            nnx.remat(lambda x, block: block(x)),
            in_axes=(nnx.Carry, 0),
            out_axes=nnx.Carry,
        )(x, self.stacked)
        return x @ self.head


def test_linen_paths_and_op_ids():
    provider = Paths()
    model = mt.quantize_model(LinenNet(), provider)
    model.init(jax.random.key(0), X)
    assert list(dict.fromkeys(provider.seen)) == [
        ("stem", "dot_general0"),  # called twice: a compact method starts counting anew
        ("layers/mlp", "dot_general0"),
        ("", "einsum0"),
    ]


def test_nnx_paths_and_op_ids():
    provider = Paths()
    model = mt.quantize_model(NnxNet(nnx.Rngs(0)), provider, X)
    assert list(dict.fromkeys(provider.seen)) == [
        ("blocks/0/mlp", "dot_general0"),
        ("blocks/1/mlp", "dot_general0"),
        ("stacked/mlp", "dot_general0"),
        ("", "dot_general0"),
    ]
    provider.seen.clear()
    nnx.jit(lambda m, x: m(x))(model, X)
    assert ("stacked/mlp", "dot_general0") in provider.seen


def test_the_model_passed_in_is_untouched():
    float_net = NnxNet(nnx.Rngs(0))
    before = float_net(X)
    quantized = mt.quantize_model(
        float_net, mt.PtqProvider([mt.QuantizationRule(**INT8)]), X
    )
    np.testing.assert_array_equal(float_net(X), before)
    assert type(float_net) is NnxNet and isinstance(float_net.head, nnx.Param)
    assert (
        isinstance(quantized.head, mt.WithAux) and type(quantized).__name__ == "NnxNet"
    )


class WithState(nnx.Module):
    """Parameters, statistics and random streams: all that a call or a step may change."""

    def __init__(self, rngs):
        self.mlp = nnx.Linear(8, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.dropout(self.norm(self.mlp(x)))


@pytest.mark.parametrize(
    "provider",
    [
        mt.QtProvider([mt.QtRule(**INT8)]),
        mt.PtqProvider([mt.QuantizationRule(**INT8)]),
        mt.LoraProvider([mt.LoraRule(rank=2, alpha=2.0)]),
        mt.OdmlQatProvider([mt.QuantizationRule(**INT8)]),
    ],
    ids=lambda p: type(p).__name__,
)
def test_no_variable_is_shared_with_the_float_model(provider):
    """Neither a step of the optimizer nor a call may be seen from the other side."""
    model = WithState(nnx.Rngs(0))
    quantized = mt.quantize_model(model, provider, X, rngs=nnx.Rngs(1))
    assert not shared_variables(model, quantized)
    before = jax.tree.map(
        np.asarray, nnx.to_pure_dict(nnx.state(model, nnx.Not(nnx.RngKey)))
    )
    quantized(X)
    nnx.update(quantized, jax.tree.map(jnp.zeros_like, nnx.state(quantized, nnx.Param)))
    after = nnx.to_pure_dict(nnx.state(model, nnx.Not(nnx.RngKey)))
    jax.tree.map(np.testing.assert_array_equal, before, after)


@pytest.mark.parametrize("donate, most", [(False, 1.28), (True, 1.06)])
def test_peak_memory_of_quantizing(donate, most, monkeypatch):
    """Float and quantized and nothing more; with donation one parameter more than float."""

    class Deep(nnx.Module):
        def __init__(self, rngs):
            self.layers = nnx.List(
                [nnx.Linear(256, 256, use_bias=False, rngs=rngs) for _ in range(16)]
            )

        def __call__(self, x):
            for layer in self.layers:
                x = layer(x)
            return x

    held = lambda: sum(a.nbytes for a in jax.live_arrays() if a.size >= 256 * 256)
    before = held()
    model = Deep(nnx.Rngs(0))
    float_bytes, seen = held() - before, []
    from midtread.providers import params

    original = params._quantize_jit

    def watched(*args):
        out = original(*args)
        seen.append(held() - before)
        return out

    monkeypatch.setattr(params, "_quantize_jit", watched)
    x = jax.ShapeDtypeStruct((1, 256), jnp.float32)
    provider = mt.PtqProvider([mt.QuantizationRule(weight_qtype="int8")])
    quantized = mt.quantize_model(model, provider, x, donate=donate)
    assert len(seen) >= 16 and max(seen) <= most * float_bytes
    assert isinstance(quantized.layers[0].kernel, mt.WithAux)
    assert quantized is not model


def test_nnx_trains():
    model = mt.quantize_model(
        NnxNet(nnx.Rngs(0)), mt.QtProvider([mt.QtRule(**INT8, bwd_qtype="int8")]), X
    )

    @nnx.jit
    def step(model):
        loss, grads = nnx.value_and_grad(lambda m: jnp.mean(m(X) ** 2))(model)
        params = nnx.state(model, nnx.Param)
        nnx.update(
            model,
            jax.tree.map(
                lambda p, g: p - 0.002 * g, params, nnx.state(grads, nnx.Param)
            ),
        )
        return loss

    losses = [float(step(model)) for _ in range(20)]
    assert losses[-1] < 0.5 * losses[0]


def test_same_shaped_weights_are_told_apart():
    """Two weights of one shape and an activation of that shape, in one module."""

    class Twins(nn.Module):
        @nn.compact
        def __call__(self, x):
            a = self.param("a", nn.initializers.normal(), (8, 8))
            b = self.param("b", nn.initializers.normal(), (8, 8))
            x = x @ a
            return (x @ b) @ jnp.outer(x[0], x[1])

    params = Twins().init(jax.random.key(0), X)
    rule = mt.QtRule(weight_qtype="int4", act_qtype="int8")
    out = jax.jit(mt.quantize_model(Twins(), mt.QtProvider([rule])).apply)(params, X)
    weight = mt.learn(
        mt.Recipe(mt.Fwd(mt.per_channel("int8"), mt.per_channel("int4")))
    ).dot
    act = mt.learn(mt.recipe("qat_int8")).dot
    x = weight(X, params["params"]["a"])
    np.testing.assert_allclose(
        out,
        act(weight(x, params["params"]["b"]), jnp.outer(x[0], x[1])),
        rtol=1e-4,
        atol=1e-6,
    )
    ptq = mt.quantize_model(Twins(), mt.PtqProvider([rule]))
    shapes = jax.eval_shape(ptq.init, jax.random.key(0), X)["params"]
    assert isinstance(shapes["a"], mt.WithAux) and isinstance(shapes["b"], mt.WithAux)


SQUARE = jax.random.normal(jax.random.key(3), (8, 8))


@pytest.mark.parametrize(
    "wrap", [lambda f: f, jax.jit, jax.grad, lambda f: jax.jit(jax.grad(f))]
)
@pytest.mark.parametrize("dtype", [None, jnp.bfloat16])
def test_an_activation_of_the_weights_shape_is_no_weight(wrap, dtype):
    """A weight-only rule must leave x alone, however the model is run or casts."""
    dense = nn.Dense(8, use_bias=False, dtype=dtype)
    params = dense.init(jax.random.key(0), SQUARE)
    model = mt.quantize_model(dense, mt.QtProvider([mt.QtRule(weight_qtype="int4")]))
    kernel = params["params"]["kernel"].astype(dtype or jnp.float32)
    weight = mt.learn(mt.Recipe(mt.Fwd(rhs=mt.per_channel("int4")))).dot

    def ours(x):
        return jnp.sum(jnp.sin(model.apply(params, x)).astype(jnp.float32))

    def expected(x):
        return jnp.sum(
            jnp.sin(weight(x.astype(kernel.dtype), kernel)).astype(jnp.float32)
        )

    np.testing.assert_allclose(
        wrap(ours)(SQUARE), wrap(expected)(SQUARE), rtol=2e-2, atol=2e-2
    )
    nnx_dense = nnx.Linear(8, 8, use_bias=False, rngs=nnx.Rngs(0))
    q = mt.quantize_model(
        nnx_dense, mt.QtProvider([mt.QtRule(weight_qtype="int4")]), SQUARE
    )
    out = q(SQUARE)
    np.testing.assert_allclose(out, weight(SQUARE, nnx_dense.kernel[...]), atol=1e-5)


def test_weight_on_the_left():
    class Left(nn.Module):
        @nn.compact
        def __call__(self, x):
            return jnp.einsum(
                "oi,bi->bo", self.param("w", nn.initializers.normal(), (8, 8)), x
            )

    rule = mt.QuantizationRule(weight_qtype="int4")
    ptq = mt.quantize_model(Left(), mt.PtqProvider([rule]))
    params = ptq.init(jax.random.key(0), X)["params"]
    assert params["w"].array.qtype == "int4"
    exact = X @ mt.dequantize(params["w"].array).T
    np.testing.assert_allclose(ptq.apply({"params": params}, X), exact, atol=1e-5)


def test_activation_only_rules():
    model = mt.quantize_model(nn.Dense(8), mt.QtProvider([mt.QtRule(act_qtype="int8")]))
    params = nn.Dense(8).init(jax.random.key(0), X)
    xq = mt.dequantize(mt.quantize(X, "int8", channelwise_axes=[0]))
    np.testing.assert_allclose(
        model.apply(params, X), nn.Dense(8).apply(params, xq), atol=1e-5
    )


def test_preferred_element_type_is_honoured():
    class Wide(nn.Module):
        @nn.compact
        def __call__(self, x):
            w = self.param("w", nn.initializers.normal(), (8, 8), jnp.bfloat16)
            return jnp.einsum("bi,ij->bj", x, w, preferred_element_type=jnp.float32)

    x = X.astype(jnp.bfloat16)
    for provider in (mt.QtProvider, mt.PtqProvider):
        model = mt.quantize_model(Wide(), provider([mt.QuantizationRule(**INT8)]))
        out = model.apply(model.init(jax.random.key(0), x), x)
        assert out.dtype == jnp.float32


@pytest.mark.parametrize("provider", [mt.QtProvider, mt.PtqProvider])
def test_a_linen_model_can_be_pickled(provider):
    model = mt.quantize_model(LinenNet(), provider([mt.QtRule(**INT8)]))
    variables = model.init(jax.random.key(0), X)
    again = pickle.loads(pickle.dumps(model))
    out = again.apply(variables, X)
    np.testing.assert_array_equal(out, model.apply(variables, X))
    assert type(pickle.loads(pickle.dumps(again))).__name__ == "LinenNet"


@pytest.mark.parametrize("kind", ["linen", "nnx"])
@pytest.mark.parametrize("qtype", ["int8", "mxfp8"])
def test_a_served_layer_promotes_as_in_float(kind, qtype):
    """The weights are quantized in float32, and the layer computes in bfloat16."""
    provider = mt.PtqProvider([mt.QuantizationRule(weight_qtype=qtype)])
    x = jax.random.normal(jax.random.key(0), (4, 32))
    if kind == "linen":
        dense = nn.Dense(8, dtype=jnp.bfloat16)
        variables = dense.init(jax.random.key(0), x)
        served, codes = mt.quantize_variables(dense, provider, variables, x)
        expected, out = dense.apply(variables, x), served.apply(codes, x)
    else:
        dense = nnx.Linear(32, 8, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
        expected, served = dense(x), mt.quantize_model(dense, provider, x)
        out = served(x)
    assert out.dtype == expected.dtype == jnp.bfloat16
    out, expected = out.astype(jnp.float32), expected.astype(jnp.float32)
    np.testing.assert_allclose(out, expected, atol=0.02 if qtype == "int8" else 0.1)


@pytest.mark.parametrize("kind", ["linen", "nnx"])
def test_stacked_layers_are_quantized_one_by_one(kind):
    provider = mt.PtqProvider([mt.QuantizationRule(weight_qtype="int8", tile_size=4)])
    if kind == "linen":
        net = LinenNet()
        model = mt.quantize_model(net, provider)
        params = net.init(jax.random.key(0), X)["params"]
        abstract = jax.eval_shape(model.init, jax.random.key(0), X)["params"]
        kernel = mt.quantize_params(params, abstract)["layers"]["mlp"]["kernel"].array
        stack = params["layers"]["mlp"]["kernel"]
    else:
        net = NnxNet(nnx.Rngs(0))
        model = mt.quantize_model(net, provider, X)
        kernel = model.stacked.mlp.kernel[...].array
        stack = net.stacked.mlp.kernel[...]
    each = [
        mt.quantize(w, "int8", channelwise_axes=[1], tiled_axes={0: 4}) for w in stack
    ]
    np.testing.assert_array_equal(kernel.qvalue, jnp.stack([q.qvalue for q in each]))
    np.testing.assert_array_equal(kernel.scale, jnp.stack([q.scale for q in each]))


def test_gradients_flow_straight_through_ptq():
    model = mt.quantize_model(
        nn.Dense(8, use_bias=False), mt.PtqProvider([mt.QuantizationRule(**INT8)])
    )
    params = model.init(jax.random.key(0), X)
    dx = jax.grad(lambda x: jnp.sum(model.apply(params, x)))(X)
    kernel = mt.dequantize(params["params"]["kernel"].array)
    np.testing.assert_allclose(dx, jnp.ones((4, 8)) @ kernel.T, atol=1e-5)


def test_sharding_metadata_follows_the_weight():
    init = nn.with_partitioning(nn.initializers.normal(), ("in", "out"))
    model = mt.quantize_model(
        nn.Dense(8, kernel_init=init), mt.PtqProvider([mt.QuantizationRule(**INT8)])
    )
    kernel = jax.eval_shape(model.init, jax.random.key(0), X)["params"]["kernel"]
    assert kernel.array.qvalue.names == ("in", "out") and kernel.array.scale.names == (
        None,
        "out",
    )


def test_quantizing_twice_replaces_the_provider():
    once = mt.quantize_model(
        nn.Dense(8), mt.QtProvider([mt.QtRule(weight_qtype="int2")])
    )
    twice = mt.quantize_model(once, mt.QtProvider([mt.QtRule(**INT8)]))
    params = nn.Dense(8).init(jax.random.key(0), X)
    direct = mt.quantize_model(nn.Dense(8), mt.QtProvider([mt.QtRule(**INT8)]))
    np.testing.assert_array_equal(twice.apply(params, X), direct.apply(params, X))


def test_qat_then_ptq_on_nnx_keeps_the_statistics():
    rules = [mt.QuantizationRule(**INT8, act_static_scale=True)]
    qat = mt.quantize_model(NnxNet(nnx.Rngs(0)), mt.QtProvider(rules), X)
    for _ in range(2):
        trained = qat(X)
    ptq = mt.quantize_model(qat, mt.PtqProvider(rules), X)
    assert not hasattr(ptq.blocks[0].mlp, "dot_general0_lhs")
    assert isinstance(ptq.blocks[0].mlp.dot_general0_lhs_scale, mt.WithAux)
    np.testing.assert_allclose(ptq(X), trained, atol=1e-4)


def test_a_provider_of_ones_own_runs_an_nnx_model():
    class Doubled(mt.QuantizationProvider):
        def dot_general(self, *args, **kwargs):
            return 2 * super().dot_general(*args, **kwargs)

    model = nnx.Linear(X.shape[-1], 4, use_bias=False, rngs=nnx.Rngs(0))
    np.testing.assert_allclose(
        mt.quantize_model(model, Doubled([]), X)(X), 2 * model(X), rtol=1e-6
    )


def test_unused_rules_are_reported():
    rules = [mt.QtRule(module_path="Dense_O", **INT8), mt.QtRule(**INT8)]
    provider = mt.QtProvider(rules)

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(4)(x)

    # as Qwix has it, word for word, and a little more
    with pytest.raises(
        ValueError, match="not completed yet. Please call `quantize_model`"
    ):
        provider.get_unused_rules()
    with pytest.warns(
        UserWarning, match=r"module_path='Dense_O'; paths near it: \['Dense_0'\]"
    ):
        mt.quantize_model(Net(), provider).init(jax.random.key(0), X)
    assert [r.module_path for r in provider.get_unused_rules()] == ["Dense_O"]
    with pytest.raises(ValueError, match="rules that matched nothing"):
        mt.quantize_model(Net(), mt.QtProvider(rules, strict=True)).init(
            jax.random.key(0), X
        )


def test_a_rule_for_no_op_there_is_told_which_ops_there_are():
    rules = [
        mt.QuantizationRule(op_names=("dot_genral",), weight_qtype="int8"),
        mt.QuantizationRule(module_path="elsewhere", op_names=("einsum",)),
    ]
    model = mt.quantize_model(nn.Dense(4), mt.PtqProvider(rules))
    ops = r"op_names=\('dot_genral',\); ops there: dot_general; rule 1"
    with pytest.warns(UserWarning, match=rf"{ops}.* near it: \[''\] \(''"):
        model.init(jax.random.key(0), X)


@pytest.mark.parametrize(
    "call, error, message",
    [
        (
            lambda: mt.quantize_model(object(), mt.QtProvider([])),
            ValueError,
            "Unsupported model type",
        ),
        (
            lambda: mt.quantize_model(nn.Dense(4), "int8"),
            TypeError,
            "should be a QuantizationProvider",
        ),
        (
            lambda: mt.quantize_model(nn.Dense(4), [mt.QtRule()]),
            TypeError,
            r"write mt.quantize_model\(model, mt.PtqProvider\(rules\)",
        ),
        (
            lambda: mt.quantize_model(nn.Dense, mt.QtProvider([])),
            ValueError,
            "Dense is a class. Give an instance",
        ),
        (
            lambda: mt.quantize_params(
                {"w": mt.WithAux(mt.quantize(X, "int8"), mt.Spec("int8"))}, {}
            ),
            TypeError,
            "w is a WithAux. It is quantized already",
        ),
        (
            lambda: mt.quantize_model(nn.Dense(4), mt.QtProvider([]), X),
            ValueError,
            "must not be provided",
        ),
        (
            lambda: mt.quantize_model(NnxNet(nnx.Rngs(0)), mt.QtProvider([])),
            ValueError,
            "must be provided",
        ),
        (
            lambda: mt.quantize_model(
                nn.Dense(4), mt.QtProvider([]), methods=("encode",)
            ),
            ValueError,
            "no method 'encode'",
        ),
        (
            lambda: mt.quantize_params({"w": nnx.Param(X)}, {}),
            TypeError,
            "pure dict of arrays: w is a Param",
        ),
        (
            lambda: mt.quantize_params(nnx.state(NnxNet(nnx.Rngs(0))), {}),
            TypeError,
            "but a State: write nnx.to_pure_dict",
        ),
        (lambda: mt.quantize_params({"w": X}, {}), ValueError, "not found"),
    ],
)
def test_bad_input(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_float_params_in_a_ptq_model_are_refused():
    model = mt.quantize_model(
        nn.Dense(8), mt.PtqProvider([mt.QuantizationRule(**INT8)])
    )
    with pytest.raises(
        ValueError, match="feeding an unquantized param .*: kernel is float"
    ):
        model.apply(nn.Dense(8).init(jax.random.key(0), X), X)


def test_quantized_params_in_a_float_model_are_refused():
    model = mt.quantize_model(
        nn.Dense(8), mt.PtqProvider([mt.QuantizationRule(**INT8)])
    )
    quantized = model.init(jax.random.key(0), X)
    trained = mt.quantize_model(nn.Dense(8), mt.QtProvider([mt.QtRule(**INT8)]))
    for other in (nn.Dense(8), trained):
        with pytest.raises(TypeError, match=r"quantized \(int8 .*under mt.PtqProvider"):
            other.apply(quantized, X)


def test_params_that_do_not_fit_are_named():
    model = mt.quantize_model(
        nn.Dense(6), mt.PtqProvider([mt.QuantizationRule(**INT8)])
    )
    shapes = jax.eval_shape(model.init, jax.random.key(0), X)["params"]
    params = nn.Dense(6).init(jax.random.key(0), X)["params"]
    by_numpy = mt.quantize_params(jax.tree.map(np.asarray, params), shapes)
    assert jax.tree.all(
        jax.tree.map(lambda a, b: bool((a == b).all()), by_numpy, mt.quantize_params(params, shapes))
    )  # fmt: skip
    kernel, rows = params["kernel"], X.shape[-1]
    for bad in (kernel.T, kernel[:, :4]):
        with pytest.raises(ValueError, match=rf"kernel does not fit.*\[{rows}, 6\]"):
            mt.quantize_params(params | {"kernel": bad}, shapes)
    with pytest.raises(ValueError, match="bias does not fit: it has shape"):
        mt.quantize_params(params | {"bias": jnp.ones(7)}, shapes)
    with pytest.raises(ValueError, match=r"write variables\['quant_stats'\]"):
        mt.quantize_params(params, shapes, {"params": params})


def test_static_scales_of_nnx_need_data():
    rule = mt.QtRule(**INT8, act_static_scale=True)
    ptq = lambda model, x: mt.quantize_model(model, mt.PtqProvider([rule]), x)
    model = NnxNet(nnx.Rngs(0))
    with pytest.warns(UserWarning, match="come from the example input"):
        ptq(model, X)
    with pytest.raises(ValueError, match="give quantize_model arrays"):
        ptq(model, jax.ShapeDtypeStruct(X.shape, X.dtype))
    gathering = mt.quantize_model(model, mt.QtProvider([rule]), X)
    with pytest.raises(ValueError, match="quant_stats is not initialized for"):
        ptq(gathering, X)


def test_a_quantized_nnx_weight_prints_in_a_line():
    rule = mt.QuantizationRule(**INT8)
    model = mt.quantize_model(NnxNet(nnx.Rngs(0)), mt.PtqProvider([rule]), X)
    boxes = [v for _, m in nnx.iter_modules(model) for v in vars(m).values() if isinstance(v, mt.WithAux)]  # fmt: skip
    assert boxes and all("QArray(int8 [" in repr(b) and "\n" not in repr(b) for b in boxes)  # fmt: skip


def test_shape_drift_in_statistics_is_refused():
    rule = mt.QtRule(**INT8, act_static_scale=True)
    model = mt.quantize_model(nn.Dense(8), mt.QtProvider([rule]))
    variables = model.init(jax.random.key(0), X[None])
    with pytest.raises(ValueError, match="Name the axes that vary in act_batch_axes"):
        model.apply(variables, X[None, :2], mutable="quant_stats")
    empty = jax.eval_shape(
        mt.quantize_model(nn.Dense(8), mt.PtqProvider([rule])).init,
        jax.random.key(0),
        X,
    )
    stats = mt.quantize_model(nn.Dense(8), mt.QtProvider([rule])).init(
        jax.random.key(0), X
    )
    with pytest.raises(ValueError, match="quant_stats is not initialized"):
        mt.quantize_params(stats["params"], empty["params"], stats["quant_stats"])


class Twins(nnx.Module):
    """Two layers with the same weights, in a scan; each sees the same x."""

    def __init__(self, depth=2):
        make = nnx.vmap(
            lambda _: nnx.Linear(8, 8, rngs=nnx.Rngs(0)), in_axes=0, out_axes=0
        )
        self.layers = make(jnp.arange(depth))

    def __call__(self, x):
        run = nnx.scan(
            lambda x, layer: (x, layer(x)),
            in_axes=(nnx.Carry, 0),
            out_axes=(nnx.Carry, 0),
        )
        return run(x, self.layers)[1]


@pytest.mark.parametrize("rounding", [None, "uniform", "stochastic"])
@pytest.mark.parametrize("late", [False, True])
def test_layers_in_a_scan_have_their_own_noise(rounding, late):
    rule = mt.QtRule(
        weight_qtype="int8", act_qtype="int8", bwd_qtype="int8",
        bwd_stochastic_rounding=rounding,
    )  # fmt: skip
    x = jax.random.normal(jax.random.key(0), (16, 8))
    g = jax.random.normal(jax.random.key(1), (16, 8))
    rngs = {"rngs": nnx.Rngs(stochastic_rounding=0)} if rounding else {}
    model = mt.quantize_model(Twins(), mt.QtProvider([rule]), x, **rngs)
    if late and rounding:
        model.set_attributes(qwix_rngs=nnx.Rngs(stochastic_rounding=1))
    grads = nnx.grad(lambda m: jnp.sum(m(x) * g))(model)
    first, second = grads["layers"]["kernel"].get_value()
    assert bool(jnp.array_equal(first, second)) == (rounding is None)
    np.testing.assert_allclose(first, second, atol=0.5)


@pytest.mark.parametrize("sick", ["weight", "input"])
def test_nan_reaches_the_loss(sick):
    """As it does in float, however large the layer, and in every provider."""
    kernel = jax.random.normal(jax.random.key(0), (96, 96))
    x = jax.random.normal(jax.random.key(1), (96, 96))
    if sick == "weight":
        kernel = kernel.at[3, 5].set(jnp.nan)
    else:
        x = x.at[3, 5].set(jnp.nan)
    params = {"kernel": kernel, "bias": jnp.zeros(96)}
    train = mt.quantize_model(nn.Dense(96), mt.QtProvider([mt.QtRule(**INT8)]))
    serve = mt.quantize_model(nn.Dense(96), mt.PtqProvider([mt.QtRule(**INT8)]))

    @jax.jit
    def means(params, x):
        shapes = jax.eval_shape(serve.init, jax.random.key(0), x)["params"]
        codes = mt.quantize_params(params, shapes)
        models = [(train, params), (serve, codes)]
        return [jnp.mean(model.apply({"params": p}, x)) for model, p in models]

    assert np.isnan(means(params, x)).all()


def test_static_scales_inside_a_trace():
    """Statistics that are known are numbers in there too, and nothing is computed."""
    rule = {**INT8, "act_static_scale": True}
    model = mt.quantize_model(
        nnx.Linear(8, 8, rngs=nnx.Rngs(0)), mt.QtProvider([mt.QtRule(**rule)]), X
    )
    model(X)
    provider = mt.PtqProvider([mt.QuantizationRule(**rule)])
    shapes = nnx.eval_shape(lambda: mt.quantize_model(model, provider, X))
    assert shapes.dot_general0_lhs_scale.shape == (1, 1)
    assert isinstance(shapes.kernel.array.qvalue.get_value(), jax.ShapeDtypeStruct)


@pytest.mark.parametrize("kind", [mt.QtProvider, mt.PtqProvider])
def test_a_linen_module_bridged_to_nnx(kind):
    """ToNNX takes every attribute of itself for a variable: ours are the class's."""
    model = nnx.bridge.ToNNX(nn.Dense(4), rngs=nnx.Rngs(0)).lazy_init(X)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a weight that stays float
        quantized = mt.quantize_model(model, kind([kind.rule_type(**INT8)]), X)
        out = quantized(X)
    assert not np.array_equal(out, model(X))
    np.testing.assert_allclose(out, model(X), atol=0.1)


class Bridged(nnx.Module):
    """An NNX module that holds Linen modules."""

    def __init__(self):
        inner = nn.Sequential([nn.Dense(16), nn.relu, nn.Dense(8)])
        self.inner = nnx.bridge.ToNNX(inner, rngs=nnx.Rngs(0)).lazy_init(X)

    def __call__(self, x):
        return self.inner(x)


def test_linen_modules_inside_a_bridge_have_paths_and_weights():
    """Also after Qwix, if it was imported, has put its own class under our statistics' name."""

    class OfQwix(nnx.Variable):
        pass

    nnx.register_variable_name("quant_stats", OfQwix, overwrite=True)
    model, only = Bridged(), {"module_path": "inner/layers_2"}
    rows = mt.explain(
        model, mt.QtProvider([mt.QtRule(weight_qtype="int8", **only)]), X
    ).rows
    assert [(row.path, row.fwd[1]) for row in rows] == [
        ("inner/layers_0", "f32"), ("inner/layers_2", "int8")
    ]  # fmt: skip
    rule = mt.QtRule(**INT8, act_static_scale=True, bwd_qtype="int8")
    trained = mt.quantize_model(model, mt.QtProvider([rule]), X)
    grads = nnx.grad(lambda model: jnp.sum(model(X) ** 2))(trained)
    assert jnp.any(jax.tree.leaves(grads)[0])
    trained(X)
    stat = trained.inner.layers_0_dot_general0_lhs
    assert stat.get_value()["count"] == 2
    served = mt.PtqProvider([mt.QuantizationRule(weight_qtype="int8")])
    with pytest.warns(UserWarning, match="stay float: inner/layers_0/kernel.*bridged"):
        out = mt.quantize_model(model, served, X)(X)
    np.testing.assert_allclose(out, model(X), rtol=1e-6)


def test_shapes_of_all_collections_are_told_from_those_of_params():
    served = mt.quantize_model(nn.Dense(4), mt.PtqProvider([mt.QtRule(**INT8)]))
    shapes = jax.eval_shape(served.init, jax.random.key(0), X)
    variables = nn.Dense(4).init(jax.random.key(0), X)
    with pytest.raises(ValueError, match=r"write shapes\['params'\]"):
        mt.quantize_params(variables["params"], shapes)
    with pytest.raises(ValueError, match=r"write variables\['params'\]"):
        mt.quantize_params(variables, shapes["params"])


@pytest.mark.parametrize("qtype", ["int8", "int4", "fp8", "nf4", "mxfp4", "nvfp4"])
def test_flax_serialization(qtype):
    x = jax.random.normal(jax.random.key(0), (64, 32), jnp.bfloat16)
    tile = {"mxfp4": 32, "nvfp4": 16}.get(qtype)
    spec = mt.Spec(qtype, tiled_axes={0: tile} if tile else {})
    box = mt.WithAux(mt.quantize(x, qtype, tiled_axes=spec.tiles), spec)
    saved = serialization.to_bytes({"w": box})
    zeros = jax.tree.map(jnp.zeros_like, {"w": box})
    back = serialization.from_bytes(zeros, saved)["w"]
    assert jax.tree.structure(back) == jax.tree.structure(box)
    for ours, theirs in zip(jax.tree.leaves(back), jax.tree.leaves(box)):
        assert ours.dtype == theirs.dtype
        np.testing.assert_array_equal(ours, theirs)


class Rewritten(nn.Module):
    kind: type

    @nn.compact
    def __call__(self, x):
        options = {"update_stats": False} if self.kind is nn.SpectralNorm else {}
        return self.kind(nn.Dense(8))(x, **options)


@pytest.mark.parametrize("kind", [nn.WeightNorm, nn.SpectralNorm])
def test_a_weight_that_its_wrapper_rewrites_stays_float_and_is_named(kind):
    model, key = Rewritten(kind), jax.random.key(0)
    variables = model.init(key, X)
    provider = mt.PtqProvider([mt.QuantizationRule(weight_qtype="int8")])
    served = mt.quantize_model(model, provider)
    with pytest.warns(UserWarning, match="stay float: Dense_0/kernel"):
        shapes = jax.eval_shape(served.init, key, X)
    params = mt.quantize_params(variables["params"], shapes["params"])
    out = served.apply({**variables, "params": params}, X)
    np.testing.assert_array_equal(out, model.apply(variables, X))


class Draws(nnx.Module):
    def __init__(self):
        self.linear = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
        self.dropout = nnx.Dropout(0.5)

    def __call__(self, x, rngs):
        return self.dropout(self.linear(x), rngs=rngs)


@pytest.mark.parametrize("provider", [mt.PtqProvider, mt.QtProvider])
def test_rngs_reach_a_call_that_takes_them(provider):
    provider = provider([mt.QuantizationRule(weight_qtype="int8")])
    model = mt.quantize_model(Draws(), provider, X, rngs=nnx.Rngs(0))
    out, plain = model(X, nnx.Rngs(1)), Draws()(X, nnx.Rngs(1))
    np.testing.assert_array_equal(out == 0, plain == 0)
    np.testing.assert_allclose(out, plain, atol=0.1)


@pytest.mark.parametrize("provider", [
    mt.QtProvider([mt.QtRule(weight_qtype="int8", act_qtype="int8", act_static_scale=True)]),
    mt.PtqProvider([mt.QuantizationRule(weight_qtype="int8", act_qtype="int8", act_static_scale=True)]),
    mt.DelayedFp8Provider([mt.QtRule(weight_qtype="fp8", act_qtype="fp8", bwd_qtype="e5m2")]),
], ids=["statistics", "scale", "history"])  # fmt: skip
def test_nothing_is_kept_beside_a_weight_inside_a_jit(provider):
    multiply = jax.jit(jnp.matmul)

    class Jits(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(jnp.ones((8, 8)))

        def __call__(self, x):
            return multiply(x, self.w[...])

    with pytest.raises(ValueError, match="inside a jax.jit .*Use nnx.jit"):
        mt.quantize_model(Jits(), provider, jnp.ones((2, 8)))


def test_a_restored_array_is_compared_and_multiplied():
    q = mt.quantize(jax.random.normal(jax.random.key(0), (8, 8)), "int8")
    back = serialization.from_bytes(
        q, serialization.to_bytes(q)
    )  # NumPy's arrays in it
    assert (back == q).all() and (q == back).all()
    np.testing.assert_array_equal(jnp.ones((2, 8)) @ back, jnp.ones((2, 8)) @ q)
