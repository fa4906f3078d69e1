"""Layers: the parts that a decoder is made of, each with names for its axes.

Weights are kept in `weight_dtype` and cast to `dtype` where they are used. Every weight
carries logical axis names as sharding metadata ("embed", "heads", "mlp", "vocab",
"experts", "layers"), for whoever has a mesh.
"""

import contextlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from midtread.kernels import choose
from midtread.kernels.add_norm import Sum
from midtread.kernels.environment import here
from midtread.kernels.gates import GATES, unwoven
from midtread.kernels.pending import Forms, Pending, collect, is_wanted
from midtread.lm.config import Model
from midtread.lm.mesh import keep_rows

INIT = nnx.initializers.variance_scaling(1.0, "fan_in", "normal")


def named(init, *names: str | None):
    """Wraps an initializer so that its array names its axes; it needs no mesh to run."""
    return nnx.with_partitioning(init, names, eager_sharding=False)


def vector(m: Model, width: int | tuple[int, ...], *names: str | None) -> nnx.Param:
    """Returns a parameter of zeros: a bias, or attention sinks."""
    init = named(nnx.initializers.zeros_init(), *names)
    shape = width if isinstance(width, tuple) else (width,)
    return nnx.Param(init(jax.random.key(0), shape, jnp.dtype(m.weight_dtype)))


class Linear(nnx.Module):
    """x @ kernel + bias, computed in `dtype` whatever dtype the weights are kept in."""

    def __init__(
        self,
        m: Model,
        din: int,
        dout: int,
        names: tuple,
        rngs: nnx.Rngs,
        bias: bool = False,
    ):
        init = named(INIT, *names)
        self.kernel = nnx.Param(
            init(rngs.params(), (din, dout), jnp.dtype(m.weight_dtype))
        )
        if bias:
            self.bias = vector(m, dout, names[-1])
        self.dtype, self.has_bias = jnp.dtype(m.dtype), bias
        # Of the weights that lm/join.py made one, and whether their columns lie by turns
        # (kernels/gates.py).
        self.widths: tuple[int, ...] | None = None
        self.is_woven = False

    def __call__(self, x: jax.Array) -> jax.Array:
        kernel = jnp.asarray(self.kernel[...], self.dtype)
        sums = (((x.ndim - 1,), (0,)), ((), ()))
        out = jax.lax.dot_general(x, kernel, sums, preferred_element_type=self.dtype)
        return out + self.bias[...].astype(self.dtype) if self.has_bias else out


def side_by_side(x: jax.Array, *row: Linear) -> list[jax.Array]:
    """Multiplies x by several weights: by each, or all at once where they are joined
    (`lm/join.py`)."""
    if row[0].widths is None:
        return [linear(x) for linear in row]
    out = row[0](x)
    return list(unwoven(out)) if row[0].is_woven else cut(out, row[0].widths)


def gated(x: jax.Array, wi_0: Linear, wi_1: Linear, activation: str) -> jax.Array:
    """Multiplies x by the two sides of an MLP, and gates one by the other: in one kernel, within a
    step, where they are woven."""
    if wi_0.is_woven and is_wanted():
        with collect(gate=activation) as forms:
            both = wi_0(x)
        out = forms.of(both).gated
        if out is not None:
            return out.reshape(*both.shape[:-1], -1)
        return GATES[activation].formula(*unwoven(both))
    return GATES[activation].formula(*side_by_side(x, wi_0, wi_1))


def cut(x: jax.Array, widths: Sequence[int]) -> list[jax.Array]:
    """Cuts the last axis of x into parts of these widths."""
    return jnp.split(x, np.cumsum(widths)[:-1].tolist(), axis=-1)


class Embed(nnx.Embed):
    """Looks up rows of a table. Their gradients are summed in float32: a bfloat16 sum of
    the many uses of a frequent token loses most of them, and a GPU has no fast atomic
    addition for bfloat16."""

    def __call__(self, tokens: jax.Array) -> jax.Array:
        table = self.embedding[...].astype(jnp.float32)
        return jnp.take(table, tokens, axis=0).astype(self.dtype)


def norm(m: Model, width: int, rngs: nnx.Rngs, name: str | None = None) -> nnx.Module:
    """Returns the RMSNorm that the config asks for."""
    if m.norm_scale_offset:
        return OffsetNorm(m, width, name)
    return nnx.RMSNorm(
        width,
        epsilon=m.normalization_layer_epsilon,
        dtype=jnp.dtype(m.dtype),
        param_dtype=jnp.dtype(m.weight_dtype),
        scale_init=named(nnx.initializers.ones_init(), name),
        rngs=rngs,
    )


class OffsetNorm(nnx.Module):
    """RMSNorm whose scale is stored as its distance from 1, where bfloat16 is finest
    (Gemma)."""

    def __init__(self, m: Model, width: int, name: str | None):
        self.scale = vector(m, width, name)
        self.epsilon, self.dtype = m.normalization_layer_epsilon, jnp.dtype(m.dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        mean = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
        out = wide * jax.lax.rsqrt(mean + self.epsilon)
        return (out * (1 + self.scale[...].astype(jnp.float32))).astype(self.dtype)


class Open(NamedTuple):
    """A stream, and what is still to be added to it: the next norm adds it on its way."""

    x: jax.Array
    more: jax.Array
    left: Pending | None = None  # what `more` is to be computed from, if that is known


def collect_in_a_step(x: jax.Array | Open, cache: Any):
    """Collects what matmuls leave to the kernel that comes next, in a step of one token a
    sequence where there are such kernels. There is no gradient in it."""
    tokens = (x.x if isinstance(x, Open) else x).shape[1]
    is_step = cache is not None and tokens == 1 and here().why_not("hopper") is None
    return collect() if is_step else contextlib.nullcontext(Forms())


def close(stream: jax.Array | Open) -> jax.Array:
    """Returns the stream with everything added."""
    return keep_rows(stream.x + stream.more) if isinstance(stream, Open) else stream


def enter(
    stream: jax.Array | Open, norm: nnx.Module | None
) -> tuple[jax.Array, jax.Array]:
    """Returns the stream with everything added, and what a layer computes with: its norm, or
    the stream itself without one. Where a kernel adds and norms at once, it does."""
    if isinstance(stream, Open) and norm is not None:
        is_offset = isinstance(norm, OffsetNorm)
        normed = choose.add_norm(
            Sum(
                stream.x,
                stream.more,
                norm.scale[...],
                epsilon=norm.epsilon,
                scale_dtype=jnp.dtype(jnp.float32) if is_offset else norm.dtype,
                dtype=norm.dtype,
                offset=float(is_offset),
                left=stream.left,
            )
        )
        if normed is not None:
            return normed
    x = close(stream)
    return x, x if norm is None else norm(x)
