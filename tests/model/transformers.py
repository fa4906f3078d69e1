"""One transformer, in Linen and in NNX: all that makes coverage hard to read off.

An embedding; layers under scan and remat with attention, experts under vmap and a
ragged_dot over experts; a Pallas kernel; a matmul of integers; a head.
"""

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx
from jax.experimental import pallas as pl

VOCAB, WIDTH, HIDDEN, LAYERS, EXPERTS, BATCH, TOKENS = 32, 16, 24, 3, 4, 2, 6


def double(x):
    """An opaque kernel that multiplies inside."""

    def doubling_kernel(x_ref, o_ref):
        o_ref[...] = jnp.dot(x_ref[...], 2 * jnp.eye(WIDTH, dtype=x_ref.dtype))

    rows = x.reshape(-1, WIDTH)
    shape = jax.ShapeDtypeStruct(rows.shape, rows.dtype)
    call = pl.pallas_call(doubling_kernel, out_shape=shape, interpret=True)
    return call(rows).reshape(x.shape)


def attend(q, k, v):
    weights = jax.nn.softmax(jnp.einsum("btd,bsd->bts", q, k))
    return jnp.einsum("bts,bsd->btd", weights, v)


def group_sizes():
    return jnp.full((EXPERTS,), BATCH * TOKENS // EXPERTS, jnp.int32)


def positions(x):
    """A matmul of integers, which no rule can quantize."""
    count = jnp.ones((TOKENS, TOKENS), jnp.int32)
    return (count @ count).sum().astype(x.dtype)


class LinenRouted(nn.Module):
    @nn.compact
    def __call__(self, x):
        shape = (EXPERTS, WIDTH, WIDTH)
        w = self.param("w", nn.initializers.normal(0.1), shape)
        return jax.lax.ragged_dot(x.reshape(-1, WIDTH), w, group_sizes()).reshape(
            x.shape
        )


class LinenLayer(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        q, k, v = (nn.Dense(WIDTH, use_bias=False, name=n)(x) for n in "qkv")
        x = x + attend(q, k, v)
        experts = nn.vmap(
            nn.Dense,
            in_axes=None,
            out_axes=0,
            axis_size=EXPERTS,
            variable_axes={"params": 0},
            split_rngs={"params": True},
        )
        x = x + experts(WIDTH, name="experts")(nn.LayerNorm(name="norm")(x)).sum(0)
        return x + LinenRouted(name="routed")(x), None


class LinenTransformer(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(VOCAB, WIDTH, name="embed")(tokens)
        layers = nn.scan(
            nn.remat(LinenLayer),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=LAYERS,
        )
        x, _ = layers(name="layers")(x, None)
        x = double(x) + positions(x)
        return nn.Dense(VOCAB, name="head")(x)


class Routed(nnx.Module):
    def __init__(self, rngs):
        self.w = nnx.Param(
            jax.random.normal(rngs.params(), (EXPERTS, WIDTH, WIDTH)) * 0.1
        )

    def __call__(self, x):
        out = jax.lax.ragged_dot(x.reshape(-1, WIDTH), self.w[...], group_sizes())
        return out.reshape(x.shape)


class Layer(nnx.Module):
    def __init__(self, rngs):
        for name in "qkv":
            setattr(self, name, nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=rngs))

        @nnx.vmap(in_axes=0, out_axes=0)
        def expert(rngs):
            return nnx.Linear(WIDTH, WIDTH, rngs=rngs)

        self.experts = expert(rngs.split(EXPERTS))
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.routed = Routed(rngs)

    def __call__(self, x):
        x = x + attend(self.q(x), self.k(x), self.v(x))
        each = nnx.vmap(lambda expert, x: expert(x), in_axes=(0, None))
        x = x + each(self.experts, self.norm(x)).sum(0)
        return x + self.routed(x)


class Transformer(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(VOCAB, WIDTH, rngs=rngs)

        @nnx.vmap(in_axes=0, out_axes=0)
        def layer(rngs):
            return Layer(rngs)

        self.layers = layer(rngs.split(LAYERS))
        self.head = nnx.Linear(WIDTH, VOCAB, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)

        @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        @nnx.remat
        def run(layer, x):
            return layer(x)

        x = run(self.layers, x)
        x = double(x) + positions(x)
        return self.head(x)
