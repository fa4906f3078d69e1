"""A Flax model, unedited: trained in int8, then served in int4. Three calls."""

import jax
import jax.numpy as jnp
from flax import linen as nn

import midtread as mt


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Dense(128, name="up")(x))
        return nn.Dense(4, name="out")(x)


key = jax.random.key(0)
x = jax.random.normal(key, (512, 32))
y = jnp.sin(x @ jax.random.normal(jax.random.fold_in(key, 1), (32, 4)) / 4)

# Train. The rule matches every module; all three matmuls of a step run in int8.
net = Net()
rule = mt.QtRule(weight_qtype="int8", act_qtype="int8", bwd_qtype="int8")
quantized = mt.quantize_model(net, mt.QtProvider([rule]))
params = net.init(key, x)["params"]


def loss(params, model):
    return jnp.mean((model.apply({"params": params}, x) - y) ** 2)


@jax.jit
def step(params):
    grads = jax.grad(loss)(params, quantized)
    return jax.tree.map(lambda p, g: p - 0.2 * g, params, grads)


for _ in range(300):
    params = step(params)
print(
    f"loss in int8 {loss(params, quantized):.4f}, the same weights in float {loss(params, net):.4f}"
)

# Serve. The tree of shapes says how each weight is quantized.
rules = [mt.QuantizationRule(weight_qtype="int4", tile_size=32)]
served = mt.quantize_model(net, mt.PtqProvider(rules))
shapes = jax.eval_shape(served.init, key, x)["params"]
small = mt.quantize_params(params, shapes)
print(f"loss in int4 {loss(small, served):.4f}; {small['up']['kernel'].array}")
