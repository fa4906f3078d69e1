"""Flax's own fp8 ops: the same losses and the same state, slot by slot, step after
step.

Flax takes 1 / (448 / amax) for a scale and divides by it, we amax / 448 and multiply by
its reciprocal: an ulp each (2.4e-7 was seen after seven steps). A code at a tie could
fall to the other side and be seen in all later steps; in this run none does.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import peer
import pytest
from flax import linen as nn
from tolerances import assert_values

import midtread as mt
from midtread.providers.delayed import DelayedFp8Provider, overwrite_with_gradient

STATE = "_overwrite_with_gradient"
HISTORY, STEPS = 4, 7  # the history wraps around


class Mlp(nn.Module):
    dot_general_cls: object = None

    @nn.compact
    def __call__(self, x):
        dense = functools.partial(nn.Dense, dot_general_cls=self.dot_general_cls)
        return dense(8, name="down")(nn.relu(dense(32, name="up")(x)))


def run(model, variables, x, y):
    """Losses and states of a few steps."""
    tx = overwrite_with_gradient(optax.sgd(0.1, momentum=0.9))

    @jax.jit
    def step(variables, opt):
        loss = lambda v: jnp.mean((model.apply(v, x) - y) ** 2)
        loss, grads = jax.value_and_grad(loss)(variables)
        updates, opt = tx.update(grads, opt, variables)
        return optax.apply_updates(variables, updates), opt, loss

    opt, losses = tx.init(variables), []
    for _ in range(STEPS):
        variables, opt, loss = step(variables, opt)
        losses.append(loss)
    return np.array(losses), variables[STATE]


@pytest.mark.parametrize("fnuz", [False, True])
def test_training_keeps_the_state_of_flax(key, fnuz):
    x, y = (
        jax.random.normal(k, (16, n)) for k, n in zip(jax.random.split(key), (24, 8))
    )
    op = nn.NANOOFp8DotGeneralOp if fnuz else nn.Fp8DirectDotGeneralOp
    e4m3 = "float8_e4m3fnuz" if fnuz else "float8_e4m3fn"
    provider = DelayedFp8Provider(
        [{"weight_qtype": e4m3, "act_qtype": e4m3}], history=HISTORY, fnuz=fnuz
    )
    ours = mt.quantize_model(Mlp(), provider)
    variables = ours.init(key, x)
    our_losses, our_state = run(ours, variables, x, y)

    with peer.manners():
        theirs = Mlp(functools.partial(op, amax_history_length=HISTORY))
        fresh = {"params": variables["params"], STATE: theirs.init(key, x)[STATE]}
        losses, state = run(theirs, fresh, x, y)

    assert_values(our_losses, losses, "f32_sum", "loss")
    assert our_losses[-1] < our_losses[0]
    for layer in ("up", "down"):
        mine = our_state[layer]["dot_general0"]
        (other,) = state[layer].values()
        assert mine.keys() == other.keys()
        for name, value in other.items():  # slot by slot
            assert_values(mine[name], value, "f32_sum", name)
    seen = our_state["up"]["dot_general0"]["input_amax_history"]
    np.testing.assert_array_equal(seen, np.full(HISTORY, jnp.max(jnp.abs(x))))
