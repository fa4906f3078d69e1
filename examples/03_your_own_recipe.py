"""A recipe is six operands. Write one, and look at what reaches the compiler."""

import re

import jax
import jax.numpy as jnp

import midtread as mt

row = mt.per_channel("int8")
noisy = mt.per_channel("e5m2", rounding="stochastic")

mine = mt.Recipe(
    fwd=mt.Fwd(lhs=row, rhs=row),  # out  = lhs . rhs, int8
    dlhs=mt.Dlhs(g=noisy, rhs=mt.per_channel("e4m3")),  # g . rhs, both quantized anew
    drhs=mt.Drhs(lhs=None, g=None),  # lhs . g, left in float
)
ops = mt.learn(mine, key=jax.random.key(0))


def step(x, w, g):
    out, vjp = jax.vjp(ops.dot, x, w)
    return out, vjp(g)


x = jnp.ones((256, 256), jnp.bfloat16)
text = jax.jit(step).lower(x, x, x).as_text()
found = re.findall(r"dot_general.*: \((\S+), (\S+)\) -> (\S+)", text)
for name, (lhs, rhs, out) in zip(("out", "dlhs", "drhs"), found):
    print(f"{name:5} {lhs} x {rhs} -> {out}")

# An option is honoured or refused by name.
try:
    mt.Recipe(mt.Fwd(mt.per_channel("int8", 128), row), drhs=mt.Drhs(mt.REUSE, row))
except ValueError as error:
    print("refused:", error)
