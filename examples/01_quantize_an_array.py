"""Quantize a weight in several formats, and see what each keeps and costs."""

import jax
import jax.numpy as jnp

import midtread as mt

w = jax.random.normal(jax.random.key(0), (1024, 1024), jnp.bfloat16)

print(f"{'format':10} {'error':>7}  what is held")
for name, tile in [
    ("int8", None),
    ("int4", 128),
    ("nf4", 64),
    ("fp8", None),
    ("mxfp4", 32),
    ("nvfp4", 16),
]:
    tiles = {0: tile} if tile else {}
    q = mt.quantize(w, name, channelwise_axes=[1], tiled_axes=tiles)
    lost = mt.dequantize(q).astype(jnp.float32) - w.astype(jnp.float32)
    error = jnp.linalg.norm(lost) / jnp.linalg.norm(w.astype(jnp.float32))
    print(f"{name:10} {error:7.2%}  {q}")

# A quantized array multiplies like an array.
x = jax.random.normal(jax.random.key(1), (4, 1024), jnp.bfloat16)
q = mt.quantize(w, "int4", channelwise_axes=[1], tiled_axes={0: 128})
print("x @ q:", mt.dot(x, q).shape, mt.dot(x, q).dtype)
