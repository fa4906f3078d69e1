"""What JAX and Flax would let pass, or refuse in words of their own, is answered."""

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen as nn
from flax import nnx

import midtread as mt

X = jnp.ones((2, 8))
INT8 = mt.QtRule(weight_qtype="int8")


@pytest.fixture(scope="module")
def served():
    model = nnx.Linear(8, 4, rngs=nnx.Rngs(0))
    return mt.quantize_model(model, mt.PtqProvider([INT8]), X)


def test_codes_are_not_trained(served):
    with pytest.raises(ValueError, match=r"int8 \[8, 4\].*wrt=nnx.LoRAParam"):
        nnx.Optimizer(served, optax.adam(1e-3), wrt=nnx.Param)
    with pytest.raises(TypeError, match="int8.*codes of a quantized model.*LoRAParam"):
        nnx.grad(lambda model: model(X).sum())(served)


def test_adapters_and_floats_are_trained(served):
    adapted = mt.apply_lora_to_model(
        nnx.Linear(8, 4, rngs=nnx.Rngs(0)),
        mt.LoraProvider(rank=2, alpha=4.0, weight_qtype="int8"),
        X,
        rngs=nnx.Rngs(0),
    )
    nnx.Optimizer(adapted, optax.adam(1e-3), wrt=nnx.LoRAParam)
    wanted = nnx.DiffState(0, nnx.LoRAParam)
    grads = nnx.grad(lambda model: model(X).sum(), argnums=wanted)(adapted)
    assert len(jax.tree.leaves(grads)) == 2
    assert jax.grad(lambda x: served(x).sum())(X).shape == X.shape


def test_forward_mode_is_answered(served):
    ways = [
        lambda f: jax.jvp(f, (X,), (X,)),
        lambda f: jax.jvp(jax.jit(f), (X,), (X,)),
        lambda f: jax.jit(lambda x: jax.jvp(f, (x,), (x,)))(X),
        lambda f: jax.jacfwd(f)(X),
        lambda f: jax.jacfwd(jax.jit(f))(X),
    ]
    for way in ways:
        with pytest.raises(TypeError, match="no forward-mode derivative .*jax.jacrev"):
            way(lambda x: served(x))
    with pytest.raises(TypeError, match="custom_vjp") as theirs:
        jax.jvp(jax.jit(_with_its_own_gradient), (X,), (X,))
    assert "quantized" not in str(theirs.value)


@jax.custom_vjp
def _with_its_own_gradient(x):
    return x


_with_its_own_gradient.defvjp(lambda x: (x, None), lambda _, g: (g,))


def test_missing_statistics_and_scales_are_named():
    static = mt.QtRule(weight_qtype="int8", act_qtype="int8", act_static_scale=True)
    dense = nn.Dense(4)
    variables = dense.init(jax.random.key(0), X)
    model = mt.quantize_model(dense, mt.QtProvider([static]))
    with pytest.raises(
        ValueError, match="no 'dot_general0_lhs' in 'quant_stats'.*mutable"
    ):
        model.apply(variables, X)
    _, codes = mt.quantize_variables(dense, mt.PtqProvider([INT8]), variables, X)
    model = mt.quantize_model(dense, mt.PtqProvider([static]))
    with pytest.raises(ValueError, match="lack 'dot_general0_lhs_scale'.*quant_stats"):
        model.apply(codes, X)


@pytest.mark.parametrize(
    "mistake, words",
    [
        (lambda: mt.PtqProvider(["int8"]), "'int8' is not a rule: write mt.Q"),
        (lambda: mt.quantize_model(nn.Dense(4), [INT8]), "not a list: write .*PtqProv"),
        (lambda: mt.quantize_model(nn.Dense(4), mt.PtqProvider), "not the class Ptq"),
        (
            lambda: mt.quantize(X, "int8", tiled_axes=[4]),
            r"not a mapping: write \{0: 128",
        ),
        (
            lambda: mt.apply_lora_to_model(nn.Dense(4), mt.PtqProvider([INT8])),
            "not a PtqProvider's: write mt.LoraProvider",
        ),
    ],
)
def test_a_thing_of_another_kind_is_named(mistake, words):
    with pytest.raises(TypeError, match=words):
        mistake()


def test_a_provider_shows_its_rules():
    assert "weight_qtype='int8'" in repr(mt.PtqProvider([INT8]))


@jax.custom_jvp
def squashed(x, w):
    return jnp.tanh(x @ w)


@squashed.defjvp
def _(primals, tangents):
    (x, w), (dx, dw) = primals, tangents
    y = jnp.tanh(x @ w)
    return y, (1 - y**2) * (dx @ w + x @ dw)


def test_a_quantized_matmul_in_the_rule_of_a_custom_jvp_is_refused():
    def gradient(fn):
        int8 = mt.QtRule(weight_qtype="int8", act_qtype="int8")
        model = mt.quantize_function(
            lambda w, x: jnp.sum(fn(x, w)), mt.QtProvider([int8])
        )
        return jax.grad(model)(jnp.ones((8, 4)), jnp.ones((2, 8)))

    with pytest.raises(NotImplementedError, match="write that as a jax.custom_vjp"):
        gradient(squashed)
    with pytest.warns(UserWarning, match="matched nothing"):
        assert gradient(mt.disable_interceptions(squashed)).shape == (8, 4)
    f = jax.custom_vjp(lambda x: 2 * x)  # one of somebody else's
    f.defvjp(lambda x: (f(x), None), lambda _, g: (2 * g,))
    with pytest.raises(NotImplementedError, match="not implemented") as error:
        jax.linear_transpose(f, 1.0)(1.0)
    assert "quantized" not in str(error.value)
