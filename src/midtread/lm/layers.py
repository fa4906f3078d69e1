"""Layers: the parts that a decoder is made of, each with names for its axes.

Weights are kept in `weight_dtype` and cast to `dtype` where they are used. Every weight
carries logical axis names as sharding metadata ("embed", "heads", "mlp", "vocab",
"experts", "layers"), for whoever has a mesh.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from midtread.lm.config import Model

INIT = nnx.initializers.variance_scaling(1.0, "fan_in", "normal")


def named(init, *names: str | None):
    """An initializer whose array knows its axes; no mesh is asked for to make it."""
    return nnx.with_partitioning(init, names, eager_sharding=False)


class Linear(nnx.Module):
    """x @ kernel, in the compute dtype whatever the kernel is kept in."""

    def __init__(self, m: Model, din: int, dout: int, names: tuple, rngs: nnx.Rngs):
        init = named(INIT, *names)
        self.kernel = nnx.Param(
            init(rngs.params(), (din, dout), jnp.dtype(m.weight_dtype))
        )
        self.dtype = jnp.dtype(m.dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        kernel = jnp.asarray(self.kernel[...], self.dtype)
        sums = (((x.ndim - 1,), (0,)), ((), ()))
        return jax.lax.dot_general(x, kernel, sums, preferred_element_type=self.dtype)


class Embed(nnx.Embed):
    """Rows of a table. Their gradients are summed in the table's dtype: a bfloat16 sum of
    the many uses of a frequent token loses most of them, and no GPU adds bfloat16 to
    memory that others are adding to without trying again and again."""

    def __call__(self, tokens: jax.Array) -> jax.Array:
        rows = jnp.take(self.embedding[...], tokens, axis=0)
        return rows.astype(self.dtype)


def norm(m: Model, width: int, rngs: nnx.Rngs, name: str | None = None) -> nnx.RMSNorm:
    return nnx.RMSNorm(
        width,
        epsilon=m.normalization_layer_epsilon,
        dtype=jnp.dtype(m.dtype),
        param_dtype=jnp.dtype(m.weight_dtype),
        scale_init=named(nnx.initializers.ones_init(), name),
        rngs=rngs,
    )
