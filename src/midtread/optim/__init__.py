"""Optimizers whose states take few bits, for anyone who uses optax.

    adamw, lion, adafactor     as optax's, with `states` in 8 or 4 bits
    momentum                   a first moment in few bits, to chain with anything
    stochastic_rounding        the last of a chain: bfloat16 parameters without a float32 copy

    optimizers.py   the functions above
    moments.py      how a moment is kept in few bits
    slices.py       a stack of weights as arrays of their own, each updated in one pass

A moment is a QArray (`optim/moments.py`), so it shards, prints and is kept in checkpoints as
any other array. AdamW takes 8 bytes a parameter in float32, 2.03 here, 1.55 with 4-bit first
moments.

>>> import jax.numpy as jnp, optax
>>> from midtread import optim
>>> params = {"w": jnp.ones((64, 256))}
>>> tx = optim.adamw(1e-3, states="int8")
>>> state = tx.init(params)
>>> updates, state = tx.update({"w": jnp.ones((64, 256))}, state, params)
>>> round(float(optax.apply_updates(params, updates)["w"][0, 0]), 4)
0.999
"""

from midtread.optim.moments import STATES as STATES
from midtread.optim.moments import nbytes as nbytes
from midtread.optim.optimizers import adafactor as adafactor
from midtread.optim.optimizers import adamw as adamw
from midtread.optim.optimizers import lion as lion
from midtread.optim.optimizers import momentum as momentum
from midtread.optim.optimizers import stochastic_rounding as stochastic_rounding
