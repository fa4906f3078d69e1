"""From a float model to an integer LiteRT file. Needs: pip install '.[litert]'"""

import importlib.util
import os
import tempfile

import jax
import jax.numpy as jnp
from flax import linen as nn

from midtread.interop import litert
from midtread.report.tflite import describe


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Conv(16, (3, 3))(x))
        x = nn.max_pool(x, (2, 2), (2, 2))
        x = nn.relu(nn.Conv(16, (3, 3), feature_group_count=16)(x))
        return nn.Dense(10)(jnp.mean(x, (1, 2)))


def main():
    model = Net()
    images = jax.random.uniform(jax.random.key(0), (32, 16, 16, 3))
    variables = jax.jit(model.init)(jax.random.key(1), images)
    in_jax = lambda x: model.apply(variables, x)
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "net.tflite")
        litert.calibrate_and_export(model, variables, [images], path, inputs=images[:1])
        print(describe(path, in_jax, images[:1]))


if all(map(importlib.util.find_spec, ("litert_converter", "ai_edge_litert"))):
    main()
else:
    print("skipped: pip install '.[litert]'")
