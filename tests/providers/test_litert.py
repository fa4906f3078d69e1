"""LiteRT providers without LiteRT: which edges are quantized, and how."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import midtread as mt
from midtread.model import everyop, running
from midtread.providers import litert_own

INT8 = [mt.QuantizationRule(weight_qtype="int8", act_qtype="int8")]


class Of(nn.Module):
    """A module that runs a function."""

    fn: object

    @nn.compact
    def __call__(self, x):
        return self.fn(x)


def seen(fn, x, rules=INT8, **options):
    """(output, quant_stats, provider) of a Linen function under QAT."""
    provider = mt.OdmlQatProvider(rules, **options)
    model = mt.quantize_model(Of(fn), provider)
    run = jax.jit(lambda key, x: model.init_with_output(key, x))
    out, variables = run(jax.random.key(0), x)
    return out, variables.get("quant_stats", {}), provider


def names(stats, path=()):
    if "count" in stats:
        return ["/".join(path)]
    return sorted(n for k, v in stats.items() for n in names(v, (*path, k)))


@pytest.fixture
def x(key):
    return jax.random.normal(key, (2, 8, 8, 4))


def test_matmul_bias_and_relu_stay_together(x):
    fn = lambda x: nn.Dense(3)(nn.relu(nn.Conv(4, (3, 3))(x)))
    assert names(seen(fn, x)[1]) == [
        "Conv_0/conv_general_dilated0_lhs",
        "Dense_0/dot_general0_lhs",
        "final_output0",
    ]


def test_gradients_go_straight_through_dynamic_ranges(key):
    """At both ends of a row's range too, which are its largest and its least element."""
    dense, x = nn.Dense(8), jax.random.normal(key, (4, 8))
    params = dense.init(key, x)
    rule = mt.QuantizationRule(
        weight_qtype="int8", act_qtype="int8", act_static_scale=False
    )
    trained = mt.quantize_model(dense, mt.OdmlQatProvider([rule]))
    grad = lambda model: jax.grad(lambda x: jnp.sum(model.apply(params, x) ** 2))(x)
    np.testing.assert_allclose(grad(trained), grad(dense), rtol=0.1, atol=0.1)


def test_embeddings_are_trained_outside_of_jit(key):
    ids = jnp.arange(6).reshape(2, 3)
    model = mt.quantize_model(nn.Embed(10, 8), mt.OdmlQatProvider(INT8))
    variables = model.init(key, ids)
    _, stats = model.apply(variables, ids, mutable=["quant_stats"])
    loss = lambda p: jnp.sum(model.apply({"params": p, **stats}, ids) ** 2)
    params = variables["params"]
    grads = jax.grad(loss)(params), jax.jit(jax.grad(loss))(params)
    np.testing.assert_allclose(*(g["embedding"] for g in grads), rtol=1e-5)


def l2_norm(x):
    return x / jnp.maximum(jnp.linalg.norm(x, axis=-1, keepdims=True), 1e-6)


class Twice(litert_own.QuantizedOp):
    """A handler with a `__call__` of its own."""

    input_idx = (0,)

    def __call__(self, x):
        if not self._inputs_have_activations([x]):
            return self._call_original_op(x)
        rule, op_id = self._get_rule_and_op_id_fn("twice")
        x = self._maybe_fake_quant(x, rule, op_id)
        return self._fake_quant_output(self._call_original_op(x), rule)


@pytest.mark.parametrize("op, name", [
    (litert_own.get_all_ops()["jax.numpy.tanh"], "l2_norm0"),
    (functools.partial(litert_own.QuantizedOp, input_idx=[0], op_name="unit"), "unit0"),
    (Twice, "twice0"),
], ids=["as tanh", "generic", "own"])  # fmt: skip
def test_a_function_of_ones_own_becomes_one_op(x, op, name):
    fn = lambda x: l2_norm(nn.Dense(4)(x))
    assert "maximum0_lhs" in names(seen(fn, x)[1])
    provider = mt.OdmlQatProvider(INT8)
    provider._ops[f"{__name__}.l2_norm"] = op
    model = mt.quantize_model(Of(fn), provider)
    stats = jax.eval_shape(model.init, jax.random.key(0), x)["quant_stats"]
    found = names(stats)
    assert found == sorted(["Dense_0/dot_general0_lhs", name, "final_output0"])


def test_what_cannot_be_registered_is_refused():
    ops = litert_own.get_all_ops()
    for change, said in (
        (ops | {"jax.lax.dot_general": litert_own.NoQuantOp}, "handles it itself"),
        ({k: v for k, v in ops.items() if k != "jax.numpy.sin"}, "put NoQuantOp there"),
    ):
        with pytest.raises(ValueError, match=said):
            litert_own.handlers(mt.OdmlQatProvider(INT8), change)
    with pytest.raises(TypeError, match="which is never called here"):
        type("Late", (litert_own.QuantizedOp,), {"_fake_quant_inputs": None})


def test_only_a_bias_is_one(x):
    table = jnp.arange(64.0).reshape(8, 8, 1) / 64
    fused = seen(lambda x: nn.Dense(4)(x) + jnp.ones(4), x)[1]
    apart = seen(lambda x: nn.Dense(4)(x) + table, x)[1]
    assert "add0_lhs" not in fused
    assert {"add0_lhs", "add0_rhs"} <= set(apart)


def test_moving_values_keeps_what_is_known(x):
    """A reshape of a softmax still has its fixed range; one edge, quantized once."""
    fn = lambda x: nn.softmax(x).transpose(0, 2, 1, 3).reshape(2, -1)
    out, stats, _ = seen(fn, x)
    assert names(stats) == ["final_output0", "softmax0"]
    codes = np.asarray(out) * 256
    np.testing.assert_allclose(codes, np.round(codes), atol=1e-4)


@pytest.mark.parametrize(
    "fn, low, step", [(nn.softmax, 0, 1 / 256), (nn.sigmoid, 0, 1 / 256), (jnp.tanh, -1, 1 / 128)]
)  # fmt: skip
def test_fixed_ranges(fn, low, step, x):
    out, _, _ = seen(fn, x * 5)
    codes = (np.asarray(out) - low) / step
    np.testing.assert_allclose(codes, np.round(codes), atol=1e-3)
    assert codes.min() >= 0 and codes.max() <= 255


def test_a_twin_is_made_once(x):
    """Three consumers of one tensor share its range."""

    def fn(x):
        y = nn.relu(nn.Dense(4)(x))
        return y * y + y

    stats = seen(fn, x)[1]
    assert [n for n in names(stats) if n.startswith("mul")] == ["multiply0_lhs"]
    assert "add0_rhs" not in stats


def test_the_producer_decides(x):
    """act_qtype is about an op's output: conv's is quantized though dense is left alone."""
    rules = [mt.QuantizationRule(module_path="Dense_0"), *INT8]
    fn = lambda x: nn.Dense(3)(nn.Conv(4, (3, 3))(x))
    out, stats, _ = seen(fn, x, rules)
    assert names(stats) == [
        "Conv_0/conv_general_dilated0_lhs",
        "Dense_0/dot_general0_lhs",
    ]
    assert len(np.unique(np.asarray(out))) > 256


def test_an_op_in_no_table(x):
    fn = lambda x: jax.scipy.special.i0(nn.Dense(3, name="up")(x))
    with pytest.raises(ValueError, match=r"'': .* is not among the ops .*strict=False"):
        seen(fn, x)
    out, _, provider = seen(fn, x, strict=False)
    assert out.shape == (2, 8, 8, 3)
    assert any("not in the table" in why for why in provider.left_float.values())
    assert all(path == "" for path, _ in provider.left_float)


def test_float_ops_are_noted(x):
    _, _, provider = seen(lambda x: jnp.sin(nn.Dense(3)(x)), x)
    assert provider.left_float == {("", "sin"): "LiteRT has no integer kernel for it"}


def test_weights_only_leave_every_op_alone(x):
    rules = [mt.QuantizationRule(weight_qtype="int4")]
    out, stats, _ = seen(lambda x: jax.scipy.special.i0(nn.Dense(3)(x)), x, rules)
    assert names(stats) == [] and out.shape == (2, 8, 8, 3)


@pytest.mark.parametrize(
    "rule, message",
    [
        ({"weight_qtype": "fp8"}, "no weight_qtype float8_e4m3fn"),
        ({"act_qtype": "int4"}, "no act_qtype int4"),
        ({"weight_qtype": "int8", "tile_size": 32}, "tile_size=32"),
        ({"weight_qtype": "int8", "weight_calibration_method": "minmax"}, "no zero point"),
        ({"weight_qtype": "int8", "act_qtype": "int16", "act_calibration_method": "minmax"},
         "int16 has no zero point"),
        ({"weight_qtype": "int8", "act_qtype": "int16", "act_static_scale": False},
         "dynamic ranges of int16"),
        ({"weight_qtype": "int8", "act_qtype": "int8", "act_static_scale": False,
          "act_calibration_method": "absmax"}, "dynamic ranges from"),
        ({"act_qtype": "int16"}, "int16 activations without weight_qtype"),
    ],
)  # fmt: skip
def test_rules_that_litert_cannot_follow(rule, message):
    with pytest.raises(ValueError, match=message):
        mt.OdmlQatProvider([mt.QuantizationRule(**rule)])


def test_training_fields_are_refused():
    with pytest.raises(ValueError, match="bwd_qtype is for QtProvider"):
        mt.OdmlQatProvider([mt.QtRule(weight_qtype="int8", bwd_qtype="int8")])


def test_fixed_input_range_must_hold_zero():
    with pytest.raises(ValueError, match="must contain 0"):
        mt.OdmlQatProvider(INT8, fixed_range_for_inputs=(1, 2))


def test_fixed_ranges_of_inputs_and_outputs(x):
    _, stats, _ = seen(
        lambda x: nn.Dense(3)(x), x,
        fixed_range_for_inputs=(-4, 4), fixed_range_for_outputs=(0, 2),
    )  # fmt: skip
    assert set(stats["Dense_0"]["dot_general0_lhs"]) == {"count", "sum_of_absmax"}
    assert set(stats["final_output0"]) == {"count", "sum_of_min", "sum_of_max"}


def test_per_channel_weights_or_not(key):
    x, columns = jnp.ones((1, 4)), jnp.array([1.0, 100.0])

    def run(**options):
        model = mt.quantize_model(
            nn.Dense(2, use_bias=False),
            mt.OdmlQatProvider([mt.QuantizationRule(weight_qtype="int8")], **options),
        )
        return model.apply({"params": {"kernel": jnp.full((4, 2), 0.3) * columns}}, x)

    exact = 4 * 0.3 * columns
    per_channel, per_tensor = run(), run(disable_per_channel_weights=True)
    assert (
        jnp.abs(per_channel - exact)[0, 0] < 0.005 < jnp.abs(per_tensor - exact)[0, 0]
    )


class Net(nnx.Module):
    def __init__(self, rngs):
        self.conv = nnx.Conv(4, 4, (3, 3), rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.out = nnx.Linear(4, 3, rngs=rngs)

    def __call__(self, x):
        return self.out(jnp.mean(nnx.relu(self.norm(self.conv(x))), (1, 2)))


class LinenNet(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.BatchNorm(use_running_average=True, name="norm")(
            nn.Conv(4, (3, 3), name="conv")(x)
        )
        return nn.Dense(3, name="out")(jnp.mean(nn.relu(x), (1, 2)))  # fmt: skip


def test_nnx_does_what_linen_does(x):
    net = Net(nnx.Rngs(0))
    net.eval()
    quantized = mt.quantize_model(net, mt.OdmlQatProvider(INT8), x)
    out = nnx.jit(lambda m, x: m(x))(quantized, x)
    state = nnx.to_pure_dict(nnx.state(quantized, mt.QuantStat))
    params = nnx.to_pure_dict(nnx.state(net, nnx.Param))
    moments = nnx.to_pure_dict(nnx.state(net, nnx.BatchStat))
    linen = mt.quantize_model(LinenNet(), mt.OdmlQatProvider(INT8))
    variables = {"params": params, "batch_stats": moments}
    same, stats = jax.jit(lambda v, x: linen.apply(v, x, mutable="quant_stats"))(
        variables, x
    )
    assert names(state) == names(stats["quant_stats"])
    np.testing.assert_allclose(out, same, atol=1e-6)


def test_gradients_pass_where_values_are_kept(x):
    model = mt.quantize_model(nn.Dense(3), mt.OdmlQatProvider(INT8))
    variables = nn.Dense(3).init(jax.random.key(0), x)
    _, stats = model.apply(variables, x, mutable="quant_stats")
    run = lambda params, x: model.apply({**variables, **stats, "params": params}, x)
    grads, dx = jax.jit(jax.grad(lambda *a: run(*a).sum(), (0, 1)))(
        variables["params"], x
    )
    assert all(jnp.abs(g).max() > 0 for g in jax.tree.leaves(grads))
    kept = 0.3 < float(jnp.mean(dx != 0)) < 1.0  # beyond the range there is none
    assert kept


def test_jax_is_put_back(x):
    before = jax.nn.softmax.__code__, jnp.ufunc.__call__, jax.custom_jvp.__call__
    bind = jax.extend.core.Primitive.bind
    seen(nn.softmax, x)
    assert before == (
        jax.nn.softmax.__code__,
        jnp.ufunc.__call__,
        jax.custom_jvp.__call__,
    )
    assert jax.extend.core.Primitive.bind is bind
    assert everyop._running == 0
    assert float(jnp.sum(jax.jit(jax.nn.softmax)(x)[0, 0, 0])) == pytest.approx(1)


def test_a_float_trace_never_serves_the_quantized_model(x):
    fn = jax.jit(lambda x: nn.softmax(x) * 3.0)
    plain = fn(x)
    quantized, _, _ = seen(fn, x)
    assert jnp.any(plain != quantized)
    np.testing.assert_array_equal(fn(x), plain)


def test_other_providers_do_not_hear_of_it(x):
    """The ordinary providers' calls stay what they were: nothing is patched for them."""
    model = mt.quantize_model(nn.Dense(3), mt.QtProvider(INT8))

    class Watching(mt.QtProvider):
        def dot_general(self, *args, **kwargs):
            assert everyop._running == 0
            assert "bind" not in running.here.active[0].handlers
            return super().dot_general(*args, **kwargs)

    model = mt.quantize_model(nn.Dense(3), Watching(INT8))
    model.init(jax.random.key(0), x)


def test_remat_is_refused_by_name(x):
    class Inner(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(3)(x)

    with pytest.raises(ValueError, match=r"'': remat2 is not among the ops"):
        seen(lambda x: nn.remat(Inner)(name="inner")(x), x)


def test_int16_refuses_what_has_no_kernel(x):
    rules = [mt.QuantizationRule(weight_qtype="int8", act_qtype="int16")]
    with pytest.raises(ValueError, match="no int16 kernel for gelu"):
        seen(nn.gelu, x, rules)


def test_int4_tables_are_refused(key):
    rules = [mt.QuantizationRule(weight_qtype="int4", act_qtype="int8")]
    with pytest.raises(ValueError, match="'Embed_0': a look-up in a table of int4"):
        seen(lambda i: nn.Embed(5, 4)(i), jnp.arange(3), rules)


@pytest.mark.parametrize(
    "shape, subscripts", [((4, 2, 3), "btd,dnh->btnh"), ((3, 4, 5), "btd,tdh->bh")]
)
def test_one_scale_for_a_weight_of_three_axes(shape, subscripts):
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            kernel = self.param("kernel", nn.initializers.lecun_normal(), shape)
            return jnp.einsum(subscripts, x, kernel)

    x = jax.random.normal(jax.random.key(0), (2, 3, 4))
    rules = [mt.QuantizationRule(weight_qtype="int8", act_qtype="int8")]
    options = {"disable_per_channel_weights": True}
    params = jax.jit(Net().init)(jax.random.key(1), x)["params"]
    train = mt.quantize_model(Net(), mt.OdmlQatProvider(rules, **options))
    out, state = train.apply({"params": params}, x, mutable="quant_stats")
    provider = mt.OdmlConversionProvider(rules, params, state["quant_stats"], **options)
    got = mt.quantize_model(Net(), provider).apply({"params": params}, x)
    np.testing.assert_allclose(got, out, rtol=1e-5, atol=1e-5)
