"""Fit a small network three times: in float, in int8, and in fp8. Same data, same seed.

`learn(recipe)` gives drop-in ops whose forward and both gradients are quantized.
"""

import jax
import jax.numpy as jnp

import midtread as mt

key = jax.random.key(0)
x = jax.random.normal(key, (512, 64))
teacher = jax.random.normal(jax.random.fold_in(key, 1), (64, 8))
y = jnp.tanh(x @ teacher / 8)


def fit(dot, steps=300, rate=0.3):
    shapes = [(64, 128), (128, 8)]
    keys = jax.random.split(jax.random.key(7), len(shapes))
    weights = [jax.random.normal(k, s) / s[0] ** 0.5 for k, s in zip(keys, shapes)]

    def loss(weights):
        hidden = jnp.tanh(dot(x, weights[0]))
        return jnp.mean((dot(hidden, weights[1]) - y) ** 2)

    @jax.jit
    def step(weights):
        value, grads = jax.value_and_grad(loss)(weights)
        return [w - rate * g for w, g in zip(weights, grads)], value

    for _ in range(steps):
        weights, value = step(weights)
    return float(value)


print(f"float     {fit(jnp.dot):.5f}")
for name in ("qwix_int8", "qwix_fp8_full", "te_fp8_current", "deepseek_fp8"):
    print(f"{name:15} {fit(mt.learn(mt.recipe(name)).dot):.5f}")
