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
    with pytest.raises(TypeError, match="int8.*codes are not trained"):
        nnx.grad(lambda model: model(X).sum())(served)
    dense = nn.Dense(4)
    variables = dense.init(jax.random.key(0), X)
    codes, variables = mt.quantize_variables(
        dense, mt.PtqProvider([INT8]), variables, X
    )
    loss = lambda params: codes.apply({"params": params}, X).sum()
    for transform in (jax.grad, jax.value_and_grad):
        with pytest.raises(TypeError, match=r"int8 \[8, 4\].*codes are not trained"):
            transform(loss)(variables["params"])


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
    both = jax.grad(lambda x, y: (x * y).sum(), (0, 1))(X, X)
    assert [g.shape for g in both] == [X.shape, X.shape]


def test_forward_mode_is_answered_inside_and_outside_of_jit(served):
    f = lambda x: served(x)
    ways = (
        lambda: jax.jvp(f, (X,), (X,)),
        lambda: jax.jvp(jax.jit(f), (X,), (X,)),
        lambda: jax.jit(lambda x: jax.jvp(f, (x,), (x,)))(X),
        lambda: jax.jacfwd(jax.jit(f))(X),
        lambda: jax.jit(jax.jacfwd(f))(X),
    )
    for way in ways:
        with pytest.raises(TypeError, match="no forward-mode derivative .*jax.jacrev"):
            way()


def test_forward_mode_of_others_passes():
    assert jax.jit(lambda x: jax.jvp(jnp.sin, (x,), (x,)))(X)[0].shape == X.shape
    assert jax.jacfwd(jnp.sin)(1.0) == jnp.cos(1.0)
    alone = jax.custom_vjp(jnp.sin)
    alone.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (g,))
    with pytest.raises(TypeError, match="custom_vjp"):
        jax.jvp(alone, (1.0,), (1.0,))


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
