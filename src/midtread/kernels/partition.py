"""Partition: makes a kernel a function of JAX that can be differentiated, mapped and sharded.

grad         is the gradient of the same contraction in plain JAX
vmap         calls the kernel for one element after another
jit          of a sharded model runs the kernel on each device, on its part of the rows and
             columns (custom_partitioning); a summed axis that is sharded is gathered
shard_map    calls the kernel as it is: what a device sees is all there is
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec

from midtread.kernels.environment import here
from midtread.kernels.pallas_compat import alike, marked


def as_function(
    kernel: Callable,
    plain: Callable,
    axes: str,
    replicated: tuple[str, ...] = (),
    can_partition: bool = True,
) -> Callable:
    """Gives `kernel` the gradients of `plain`, a loop under vmap, and a sharding.

    Args:
        axes: the axes of the arguments and of the one result, as einops writes them.
        replicated: names among them along which a device needs everything.
        can_partition: False for interpreted Mosaic kernels, which custom_partitioning does
            not take; they run on one device.
    """
    kernel = jax.jit(kernel)  # it is lowered once for all layers that look alike
    placed = _partitioned(kernel, axes, replicated)

    @custom_vmap
    def mapped(*args):
        if can_partition and here().is_split:
            return placed(*args)
        args = alike(*args)
        return marked(kernel(*args), args[0])

    @mapped.def_vmap
    def _(axis_size, is_batched, *args):
        def one(batched):
            parts = iter(batched)
            return mapped(*(next(parts) if b else a for a, b in zip(args, is_batched)))

        return lax.map(one, [a for a, b in zip(args, is_batched) if b]), True

    return with_gradients(mapped, plain)


def with_gradients(kernel: Callable, plain: Callable) -> Callable:
    """Gives `kernel` the gradients of `plain`, a function of the same arguments."""
    call = jax.custom_vjp(kernel)

    def forward(*args):
        return kernel(*args), args

    def backward(args, g):
        floats = [
            jnp.issubdtype(a.dtype, jnp.floating) and a.dtype.itemsize > 1 for a in args
        ]

        def of_floats(*chosen):
            parts = iter(chosen)
            return plain(*(next(parts) if f else a for a, f in zip(args, floats)))

        chosen = [a for a, f in zip(args, floats) if f]
        grads = iter(jax.vjp(of_floats, *chosen)[1](g))
        return tuple(next(grads) if f else None for f in floats)

    call.defvjp(forward, backward)
    return call


def _partitioned(kernel: Callable, axes: str, replicated: tuple[str, ...]) -> Callable:
    inputs, output = (side.split(",") for side in axes.split("->"))
    inputs, output = [i.split() for i in inputs], output[0].split()

    @custom_partitioning
    def placed(*args):
        return kernel(*args)

    def shardings(mesh, arg_shapes):
        cuts = {}
        for names, shape in zip(inputs, arg_shapes):
            spec = getattr(shape.sharding, "spec", ()) if shape.sharding else ()
            for name, axis in zip(names, (*spec, *[None] * len(names))):
                if axis is not None and name not in replicated:
                    cuts.setdefault(name, axis)
        used, kept = set(), {}
        for name, axis in cuts.items():  # a mesh axis cuts one axis of the result
            parts = set(axis) if isinstance(axis, tuple) else {axis}
            if not parts & used:
                kept[name] = axis
                used |= parts
        sharding_of = lambda names: NamedSharding(
            mesh, PartitionSpec(*(kept.get(name) for name in names))
        )
        return [sharding_of(names) for names in inputs], sharding_of(output)

    def infer(mesh, arg_shapes, result_shape):
        return shardings(mesh, arg_shapes)[1]

    def partition(mesh, arg_shapes, result_shape):
        given, result = shardings(mesh, arg_shapes)
        return mesh, kernel, result, tuple(given)

    placed.def_partition(
        partition=partition,
        infer_sharding_from_operands=infer,
        sharding_rule=axes,
        need_replication_factors=replicated,
    )
    return placed
