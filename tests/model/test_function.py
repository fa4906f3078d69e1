"""quantize_function: scopes as module paths, parameters by identity."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jax.extend import source_info_util

import midtread as mt
from midtread.model.function import quantize_function

INT8 = {"weight_qtype": "int8", "act_qtype": "int8"}


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Dense(16, use_bias=False, name="up")(x))
        return nn.Dense(8, use_bias=False, name="down")(x)


def net(params, x):
    for name, then in (("up", nn.relu), ("down", lambda x: x)):
        with jax.named_scope(name):
            x = then(jnp.dot(x, params[name]["kernel"]))
    return x


@pytest.fixture
def case(key):
    x = jax.random.normal(key, (8, 8))  # of a weight's shape, nearly
    return Net().init(key, x)["params"], x


@pytest.mark.parametrize("bwd", [None, "int8"])
def test_numbers_are_those_of_a_linen_model(case, bwd):
    """QAT and QT; rules see the same paths, and operands have the same roles."""
    params, x = case
    rules = [
        mt.QtRule(
            module_path="up", weight_qtype="int4", act_qtype="int8", bwd_qtype=bwd
        )
    ]
    linen = mt.quantize_model(Net(), mt.QtProvider(rules))
    plain = quantize_function(net, mt.QtProvider(rules))
    theirs = jax.value_and_grad(lambda p: (linen.apply({"params": p}, x) ** 2).sum())
    ours = jax.value_and_grad(lambda p: (plain(p, x) ** 2).sum())
    for run in (lambda f: f, jax.jit):
        jax.tree.map(
            np.testing.assert_array_equal, run(ours)(params), run(theirs)(params)
        )
    assert not np.array_equal(plain(params, x), net(params, x))


class Seen(mt.QtProvider):
    """Notes where ops are and which operands are weights."""

    def dot_general(self, lhs, rhs, *args, **kwargs):
        from midtread.model import flaxlib, intercept
        from midtread.model.weights import find_param

        module = intercept.current_module()
        _, op_id = self._get_current_rule_and_op_id("dot_general")
        roles = tuple(bool(find_param(module, v)) for v in (lhs, rhs))
        self.sites.append((flaxlib.path_of(module), op_id, roles))
        return jax.lax.dot_general(lhs, rhs, *args, **kwargs)


@jax.named_scope("decorated")  # made before anything of ours ran
def attend(q, k):
    return q @ k.T


@jax.jit
def shared(x, w):
    return x @ w


def everything(params, x):
    with jax.named_scope("outer"):
        x = attend(x @ params["square"], x)
        with jax.named_scope("a/b"):
            x = shared(x, params["square"].astype(jnp.bfloat16).astype(jnp.float32))
    x = x @ params["square"]

    def layer(x, w):
        with jax.named_scope("layer"):
            return x @ w, None

    with jax.named_scope("scan"):
        return jax.lax.scan(jax.checkpoint(layer), x, params["stack"])[0]


def test_paths_ids_and_roles(key):
    """Nested scopes, decorators, jit, scan, remat; activations shaped like weights."""
    provider = Seen([mt.QtRule(**INT8)])
    provider.sites = []
    params = {"square": jnp.eye(8), "stack": jnp.ones((3, 8, 4)) @ jnp.ones((4, 8))}
    fn = quantize_function(everything, provider)
    jax.jit(jax.grad(lambda p: fn(p, jnp.eye(8)).sum()))(params)
    assert list(dict.fromkeys(provider.sites)) == [
        ("outer", "dot_general0", (False, True)),
        ("outer/decorated", "dot_general0", (False, False)),
        ("outer/a/b", "dot_general0", (True, True)),  # inside a jit: told by shape
        ("", "dot_general0", (False, True)),
        ("scan/layer", "dot_general0", (True, True)),
    ]


def test_a_shared_jit_follows_the_rules_of_each_scope(case):
    """One jitted function in two scopes: each call is traced under its own rule."""
    params, _ = case
    w = params["up"]["kernel"]

    def fn(w, x):
        with jax.named_scope("quantized"):
            a = shared(x, w)
        with jax.named_scope("float"):
            return a, shared(x, w)

    x = jnp.linspace(-1, 1, 16).reshape(2, 8)
    provider = mt.QtProvider([mt.QtRule(module_path="quantized", **INT8)])
    a, b = quantize_function(fn, provider)(w, x)
    np.testing.assert_array_equal(b, shared(x, w))
    assert not np.array_equal(a, b)


def test_stochastic_rounding_takes_its_key_from_rngs(case, key):
    params, x = case
    rule = mt.QtRule(**INT8, bwd_qtype="int8", bwd_stochastic_rounding="stochastic")

    def grad(**how):
        fn = quantize_function(net, mt.QtProvider([rule]), **how)
        return jax.grad(lambda p: (fn(p, x) ** 2).sum())(params)["up"]["kernel"]

    streams = [{"stochastic_rounding": k} for k in jax.random.split(key)]
    assert not np.array_equal(grad(rngs=streams[0]), grad(rngs=streams[1]))
    with pytest.raises(ValueError, match="rngs="):
        grad()


def test_ptq_takes_quantized_weights_and_refuses_float_ones(case):
    params, x = case
    provider = mt.PtqProvider([mt.QuantizationRule(module_path="up", **INT8)])
    fn = quantize_function(net, provider)
    with pytest.raises(ValueError, match="pass the QArrays"):
        fn(params, x)
    quantized = jax.tree.map(
        lambda w: mt.quantize(w, "int8", channelwise_axes=(1,)), params
    )
    ours = jax.jit(fn)(quantized, x)
    ops = mt.learn(mt.Recipe(mt.Fwd(mt.per_channel("int8"))))
    h = nn.relu(ops.dot(x, quantized["up"]["kernel"]))
    theirs = mt.dot(h, quantized["down"]["kernel"])  # no rule there: float activations
    np.testing.assert_allclose(ours, theirs, rtol=1e-6)


def test_refusals(case):
    params, x = case
    static = mt.QtProvider([mt.QtRule(**INT8, act_static_scale=True)])
    with pytest.raises(ValueError, match="drop act_static_scale"):
        quantize_function(net, static)(params, x)
    fn = quantize_function(net, mt.QtProvider([mt.QtRule(**INT8)]))
    with pytest.raises(ValueError, match="by position"):
        fn(params=params, x=x)
    with pytest.raises(TypeError, match="QuantizationProvider"):
        quantize_function(net, "int8")


def test_jax_still_enters_scopes_through_the_class_we_follow():
    """If this fails, JAX has moved what model/function.py listens to."""
    assert isinstance(jax.named_scope("x"), source_info_util.extend_name_stack)
    quantize_function(lambda p: p, mt.QtProvider([mt.QtRule(**INT8)]))
    with jax.named_scope("x"):
        assert str(source_info_util.current_name_stack()) == "x"
