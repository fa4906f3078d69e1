"""Ring: tokens travel to the experts, by hand (`expert_dispatch=ring`).

Along the mesh axis "expert" every device has some experts and some tokens. In shard_map:

    all-gather     the tokens of all devices along the axis, and which experts they chose
    experts        each device multiplies the pairs that chose its own, however many
    reduce-scatter the weighted sums go back to where the tokens came from

No token is dropped, whatever the load, and no buffer is sized for a guess. Left to itself
(`expert_dispatch=xla`), the partitioner gathers tokens along every axis of the batch.
`ring_fp8` sends tokens as e4m3 codes, a byte an element and one float32 scale a token;
their gradients come back in the compute dtype.

Inside, a device sees its own rows and experts: ranges found in the data are its own.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P

from midtread.lm import mesh as meshes
from midtread.numerics.formats import as_format
from midtread.numerics.qarray import dequantize, quantize_by_spec
from midtread.numerics.spec import Spec

PER_TOKEN = Spec(as_format("float8_e4m3fn"), channelwise_axes=(0,))


def is_on() -> bool:
    """Returns whether the current layout sends tokens to experts by hand."""
    layout = meshes.current()
    return (
        layout is not None and layout.dispatch != "xla" and layout.sizes["expert"] > 1
    )


def through_experts(moe: Any, x_ND, weights_Nk, chosen_Nk) -> jax.Array:
    """Calls `moe.experts` for tokens and experts that are spread over the mesh."""
    layout = meshes.current()
    assert layout is not None
    graph, state = nnx.split(moe)
    on = {
        axis: n if axis in ("expert", "tensor") else 1
        for axis, n in layout.sizes.items()
    }
    leaves, structure = jax.tree.flatten(state)
    cuts = [meshes.spec(on, n, x.shape) for n, x in zip(meshes.names_of(state), leaves)]
    gather = functools.partial(
        jax.lax.all_gather, axis_name="expert", axis=0, tiled=True
    )
    gather_tokens = _gather_codes if layout.dispatch == "ring_fp8" else gather

    def here(leaves, x_ND, weights_Nk, chosen_Nk):
        mine = nnx.merge(graph, jax.tree.unflatten(structure, leaves))
        count = mine.wi_0.shape[0]
        first = jax.lax.axis_index("expert") * count
        y_ND = mine.experts(
            gather_tokens(x_ND), gather(weights_Nk), gather(chosen_Nk), first
        )
        # Each device has a part of the sum over the inner width.
        if layout.sizes["tensor"] > 1:
            y_ND = jax.lax.psum(y_ND, "tensor")
        return _scatter(y_ND)

    rows = P(meshes.BATCH, None)
    run = jax.shard_map(
        here,
        mesh=layout.mesh,
        in_specs=(cuts, rows, rows, rows),
        out_specs=rows,
        check_vma=False,
    )
    return run(leaves, x_ND, weights_Nk, chosen_Nk)


def _scatter(y: jax.Array) -> jax.Array:
    """Sums `y` over the expert axis and leaves each device its own rows."""
    return jax.lax.psum_scatter(y, "expert", scatter_dimension=0, tiled=True)


@jax.custom_vjp
def _gather_codes(x: jax.Array) -> jax.Array:
    """Gathers tokens along the expert axis as e4m3 codes."""
    q = quantize_by_spec(x, PER_TOKEN)
    gather = lambda a: jax.lax.all_gather(a, "expert", axis=0, tiled=True)
    codes = gather(jax.lax.bitcast_convert_type(q.qvalue, jnp.uint8))
    codes = jax.lax.bitcast_convert_type(codes, q.qvalue.dtype)
    return dequantize(q.replace(qvalue=codes, scale=gather(q.scale)), x.dtype)


_gather_codes.defvjp(lambda x: (_gather_codes(x), None), lambda _, g: (_scatter(g),))
