"""Delayed scaling: state that travels as a gradient, wherever gradients go."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

import midtread as mt
from midtread.providers import delayed
from midtread.providers.delayed import (
    DelayedFp8Provider,
    OverwriteWithGradient,
    accumulate_gradients,
    overwrite_with_gradient,
)

STATE = "_overwrite_with_gradient"
RULE = {"weight_qtype": "e4m3", "act_qtype": "e4m3"}
MOMENTUM = optax.chain(  # adam does not pass under strict promotion
    optax.clip_by_global_norm(1.0),
    optax.add_decayed_weights(1e-2),
    optax.sgd(0.1, momentum=0.9),
)


def provide(history=4, **how):
    return DelayedFp8Provider([RULE], history=history, **how)


def amax(x):
    return np.float32(jnp.max(jnp.abs(x)))


def dense(key, x, **how):
    model = mt.quantize_model(nn.Dense(8), provide(**how))
    return model, model.init(key, x)


def test_history_wraps_and_scale_follows():
    meta = delayed.initial(3)
    scales = []
    for value in (2.0, 8.0, 1.0, 1.0, 1.0, jnp.inf, 1.0):
        meta = delayed.advance(meta, jnp.asarray(value), bound=2.0)
        scales.append(float(meta["scale"][0]))
    #  nothing seen; 2; 8; 8; 8 has left; 1; inf: kept
    assert scales == [1.0, 1.0, 4.0, 4.0, 4.0, 0.5, 0.5]
    assert sorted(meta["amax_history"].tolist()) == [1.0, 1.0, float("inf")]


@pytest.mark.parametrize("value", [0.0, np.inf, np.nan])
def test_a_history_without_a_usable_maximum_keeps_the_scale(value):
    meta = {"amax_history": jnp.zeros(4), "scale": jnp.full(1, 2.5)}
    meta = delayed.advance(meta, jnp.full((1, 1), value, jnp.bfloat16), bound=2.0)
    assert delayed.advance(meta, jnp.ones(()), bound=2.0)["scale"].tolist() == [2.5]


def test_new_state_is_the_gradient_of_the_old(key):
    x = jax.random.normal(key, (4, 16))
    model, variables = dense(key, x)
    weights = jax.random.normal(key, (4, 8))
    loss = lambda v: (model.apply(v, x) * weights).sum()
    state = jax.grad(loss)(variables)[STATE]["dot_general0"]
    kernel = variables["params"]["kernel"]
    for name, value in (("input", x), ("kernel", kernel), ("output_grad", weights)):
        assert state[f"{name}_amax_history"].tolist() == [amax(value), 0, 0, 0]
        assert state[f"{name}_scale"].tolist() == [
            1.0
        ]  # of this step: nothing seen yet
    after = jax.grad(loss)({**variables, STATE: {"dot_general0": state}})
    after = after[STATE]["dot_general0"]
    np.testing.assert_allclose(after["input_scale"], amax(x) / 448, rtol=1e-6)
    np.testing.assert_allclose(
        after["output_grad_scale"], amax(weights) / 57344, rtol=1e-6
    )


WHAT_A_HISTORY_HOLDS = {
    "absmax,0.5": lambda x: 0.5 * amax(x),
    "rms,3": lambda x: 3 * np.sqrt(np.mean(np.square(x))),
}


@pytest.mark.parametrize("method", WHAT_A_HISTORY_HOLDS)
def test_a_history_is_of_what_the_calibration_sees(key, method):
    x = jax.random.normal(key, (4, 16))
    fields = (
        "weight_calibration_method",
        "act_calibration_method",
        "bwd_calibration_method",
    )
    rule = {**RULE, **dict.fromkeys(fields, method)}
    model = mt.quantize_model(nn.Dense(8), DelayedFp8Provider([rule], history=2))
    variables, weights = model.init(key, x), jax.random.normal(key, (4, 8))
    grads = jax.grad(lambda v: (model.apply(v, x) * weights).sum())(variables)
    state, kernel = grads[STATE]["dot_general0"], variables["params"]["kernel"]
    for name, value in (("input", x), ("kernel", kernel), ("output_grad", weights)):
        seen = WHAT_A_HISTORY_HOLDS[method](value)
        np.testing.assert_allclose(state[f"{name}_amax_history"], [seen, 0], rtol=1e-6)


def test_a_fixed_range_needs_no_history(key):
    """A constant scale from the first step, no gradient beyond it, state left alone."""
    x = 3 * jax.random.normal(key, (4, 16))
    rule = {**RULE, "act_calibration_method": "fixed,-2,2"}
    rule["additional_qt_config"] = {"drhs_grad_calibration_method": "fixed,16"}
    model = mt.quantize_model(nn.Dense(8), DelayedFp8Provider([rule], history=2))
    variables = model.init(key, x)
    loss = lambda v, x: model.apply(v, x).sum()
    grads, dx = jax.grad(loss, (0, 1))(variables, x)
    state = grads[STATE]["dot_general0"]
    assert state["input_scale"] == 1 and not state["input_amax_history"].any()
    assert state["kernel_amax_history"][0] > 0  # weights have one
    assert state["output_grad_amax_history"][0] == 1  # dlhs does, drhs does not
    assert (np.asarray(dx == 0) == np.asarray(jnp.abs(x) > 2)).all()
    seen = mt.dequantize(mt.quantize(x, "e4m3", calibration_method="fixed,2"))
    kernel = variables["params"]["kernel"]
    codes = kernel.astype(jnp.float8_e4m3fn).astype(jnp.float32)  # its scale is still 1
    np.testing.assert_allclose(model.apply(variables, x), seen @ codes, rtol=1e-5)
    dkernel = grads["params"]["kernel"]  # 1 is a code of a scale of 16 / 57344
    np.testing.assert_allclose(
        dkernel, seen.sum(0)[:, None] * np.ones((1, 8)), rtol=0.13
    )


@pytest.mark.parametrize(
    "fields,expected",
    [
        ({"act_calibration_method": "minmax"}, "around 0"),
        ({"weight_calibration_method": "fixed,-1,2"}, "around 0"),
        (
            {"additional_qt_config": {"drhs_grad_calibration_method": "rms,3"}},
            "one history",
        ),
        ({"additional_qt_config": {"lhs_qtype": "int8"}}, "lhs_qtype"),
    ],
)
def test_calibrations_that_have_no_history_are_refused(fields, expected):
    with pytest.raises(ValueError, match=expected):
        DelayedFp8Provider([{**RULE, **fields}])


@pytest.mark.parametrize("margin, rtol", [(0, 1e-6), (2, 2**-6)])
def test_scales_are_used_with_their_margin(key, margin, rtol):
    """When the last step saw what this one sees, it is te_fp8_current; but for the small
    numbers that a margin makes subnormal."""
    x = jax.random.normal(key, (4, 16)) * 100
    model, variables = dense(key, x, history=1, margin=margin)
    ops = mt.learn(mt.recipe("te_fp8_current"))
    for _ in range(3):
        grads = jax.grad(lambda v: (model.apply(v, x) ** 2).sum())(variables)
        variables = {**variables, STATE: grads[STATE]}
    theirs = jax.grad(lambda p: (ops.dot(x, p["kernel"]) ** 2).sum())
    theirs = theirs(variables["params"])["kernel"]
    scale = grads[STATE]["dot_general0"]["input_scale"]
    np.testing.assert_allclose(scale, amax(x) / 448 * 2**margin, rtol=1e-6)
    worst = amax(grads["params"]["kernel"] - theirs)
    assert worst <= rtol * amax(theirs)


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        y = nn.Dense(8, use_bias=False)(x)
        return x + jnp.einsum("bi,ij,bj->bj", y, jnp.eye(8), x), None


def stack(carried):
    axes = {"params": 0, STATE: 0} if carried else {"params": 0}
    return nn.scan(nn.remat(Layer), axes, split_rngs={"params": True}, length=3)()


def test_linen_scan_has_state_per_layer(key):
    x = jax.random.normal(key, (2, 8))
    model = mt.quantize_model(stack(True), provide())
    variables = model.init(key, x, None)
    grads = jax.jit(jax.grad(lambda v: model.apply(v, x, None)[0].sum()))(variables)
    state = grads[STATE]
    seen = state["Dense_0"]["dot_general0"]["kernel_amax_history"]
    kernel = variables["params"]["Dense_0"]["kernel"]
    np.testing.assert_array_equal(seen[:, 0], jnp.max(jnp.abs(kernel), axis=(1, 2)))
    assert set(state) == {
        "Dense_0",
        "einsum0",
        "einsum0_1",
    }  # two matmuls of one einsum
    with pytest.raises(ValueError, match="variable_axes"):
        mt.quantize_model(stack(False), provide()).apply(
            {"params": variables["params"]}, x, None
        )


class NnxNet(nnx.Module):
    def __init__(self):
        make = lambda rngs: nnx.Linear(8, 8, use_bias=False, rngs=rngs)
        self.stacked = nnx.vmap(make, in_axes=0)(nnx.Rngs(7).split(3))
        self.head = nnx.Linear(8, 4, rngs=nnx.Rngs(1))

    def __call__(self, x):
        body = lambda x, layer: x + layer(x)
        scan = nnx.scan(body, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        return self.head(scan(x, self.stacked))


def test_nnx_trains_under_an_optimizer(key):
    x = jax.random.normal(key, (2, 8))
    model = mt.quantize_model(NnxNet(), provide(), x)
    wrt = nnx.Any(nnx.Param, OverwriteWithGradient)
    tx = overwrite_with_gradient(MOMENTUM)
    optimizer = nnx.Optimizer(model, tx, wrt=wrt)

    @nnx.jit
    def step(model, optimizer):
        loss = lambda model: (model(x) ** 2).mean()
        loss, grads = nnx.value_and_grad(loss, argnums=nnx.DiffState(0, wrt))(model)
        optimizer.update(model, grads)
        return loss

    before = np.array(jnp.max(jnp.abs(model.stacked.kernel[...]), axis=(1, 2)))
    losses = [float(step(model, optimizer)) for _ in range(4)]
    assert losses[-1] < losses[0]
    held = model.stacked.dot_general0_overwrite_with_gradient.arrays()
    # four steps: the first one's is the oldest, in slot 1
    np.testing.assert_array_equal(held["kernel_amax_history"][:, 1], before)
    assert held["input_scale"].shape == (3, 1)

    grads = nnx.grad(lambda m: m(x).sum(), argnums=nnx.DiffState(0, wrt))(model)
    twice = accumulate_gradients(grads, grads)
    one, two = (nnx.to_pure_dict(g)["head"] for g in (grads, twice))
    np.testing.assert_array_equal(two["kernel"], 2 * one["kernel"])
    state = "dot_general0_overwrite_with_gradient"
    jax.tree.map(np.testing.assert_array_equal, two[state], one[state])


def test_the_optimizer_overwrites_bit_for_bit(key):
    """Adding differences would round 1e-9 away and keep an infinity for good."""
    variables = {"params": jnp.ones(3), STATE: jnp.array([1.0, jnp.inf, 1e3])}
    grads = {"params": jnp.ones(3), STATE: jnp.array([1e-9, 2.0, 1e-3])}
    tx = overwrite_with_gradient(MOMENTUM)
    opt = tx.init(variables)
    updates, _ = jax.jit(tx.update)(grads, opt, variables)
    new = jax.jit(optax.apply_updates)(variables, updates)
    np.testing.assert_array_equal(new[STATE], grads[STATE])
    ones = {"params": jnp.ones(3)}
    alone, _ = MOMENTUM.update(ones, MOMENTUM.init(ones), ones)
    np.testing.assert_allclose(new["params"], 1 + alone["params"], rtol=1e-6)
    assert [v.size for v in jax.tree.leaves(opt)] == [3]  # momentum of params only


def test_micro_batches(key):
    """Gradients are summed, histories maxed: as if it had been one batch."""
    x = jax.random.normal(key, (8, 16))
    model, variables = dense(key, x)
    variables[STATE] = jax.grad(lambda v: model.apply(v, x).sum())(variables)[STATE]
    grad = jax.grad(lambda v, x: (model.apply(v, x) ** 2).sum())
    whole = grad(variables, x)

    def add(total, part):
        return accumulate_gradients(total, grad(variables, part)), None

    zeros = jax.tree.map(jnp.zeros_like, variables)
    parts = jax.lax.scan(add, zeros, x.reshape(4, 2, 16))[0]
    jax.tree.map(np.testing.assert_array_equal, parts[STATE], whole[STATE])
    np.testing.assert_allclose(
        parts["params"]["kernel"], whole["params"]["kernel"], rtol=1e-4, atol=1e-4
    )
    half = accumulate_gradients(zeros, whole, weight=0.5)
    jax.tree.map(np.testing.assert_array_equal, half[STATE], whole[STATE])
    np.testing.assert_array_equal(half["params"]["bias"], whole["params"]["bias"] * 0.5)


class Others(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Conv(8, (3,), name="conv", dtype=jnp.bfloat16)(x)
        experts = self.param("experts", nn.initializers.lecun_normal(), (2, 8, 4))
        x = x.reshape(-1, 8).astype(jnp.float32)
        return jax.lax.ragged_dot(x, experts, jnp.array([3, 5], jnp.int32))


def test_convolutions_and_experts_too(key):
    x = jax.random.normal(key, (2, 4, 6))
    model = mt.quantize_model(Others(), provide())
    variables = model.init(key, x)
    grads = jax.jit(jax.grad(lambda v: (model.apply(v, x) ** 2).sum()))(variables)
    state = grads[STATE]
    experts = state["ragged_dot0"]["kernel_amax_history"]
    assert experts[0] == amax(variables["params"]["experts"])
    conv = state["conv"]["conv_general_dilated0"]
    assert conv["input_amax_history"][0] == amax(x.astype(jnp.bfloat16))
    assert conv["output_grad_amax_history"][0] > 0


def test_all_three_matmuls_multiply_fp8(key):
    x = jax.random.normal(key, (4, 16))
    model, variables = dense(key, x)
    loss = lambda v, x: (model.apply(v, x) ** 2).sum()
    text = str(jax.make_jaxpr(jax.grad(loss, argnums=(0, 1)))(variables, x))
    assert text.count("f8_e4m3fn[") > 0 and text.count("f8_e5m2[") > 0
    assert text.count("dot_general[") == 3


@pytest.mark.parametrize(
    "rules, how, message",
    [
        ([{"module_path": "a"}], {}, "no rule asks for anything"),
        ([{"weight_qtype": "int8", "act_qtype": "e4m3"}], {}, "weight_qtype=int8"),
        ([{"weight_qtype": "e4m3"}], {}, "act_qtype=None"),
        ([{**RULE, "bwd_qtype": "e4m3"}], {}, "bwd_qtype=e4m3"),
        ([RULE], {"fnuz": True}, "float8_e4m3fnuz"),
        ([{**RULE, "tile_size": 32}], {}, "tile_size=32"),
        ([{**RULE, "act_static_scale": True}], {}, "act_static_scale=True"),
        ([RULE], {"history": 0}, "history=0"),
    ],
)
def test_refusals(rules, how, message):
    with pytest.raises(ValueError, match=message):
        DelayedFp8Provider(rules, **how)


def test_missing_or_foreign_state_is_refused(key):
    x = jnp.ones((2, 4))
    model, variables = dense(key, x)
    with pytest.raises(ValueError, match="Pass what init gave"):
        model.apply({"params": variables["params"]}, x)
    longer = mt.quantize_model(nn.Dense(8), DelayedFp8Provider([RULE], history=9))
    with pytest.raises(ValueError, match="history=9"):
        longer.apply(variables, x)
