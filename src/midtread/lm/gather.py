"""Gather: weights that travel between devices as codes of 8 bits.

Under fsdp a device holds a part of every weight and needs all of it for a moment. What it
multiplies by are e4m3 codes, so those are what is sent, at half the bytes of bfloat16:

    here        codes = round(clip(w / scale))      of the part that lies here
    all-gather  the codes, as uint8                 one byte per element on every backend
    everywhere  w = codes * scale

The scale must be known without looking at the other parts: a constant of the config
(`weight_quantization_calibration_method=fixed,-a,a`). The matmul quantizes what arrives
with the same constant, and gets the same codes back: quantizing twice is quantizing once.
So a run computes the same numbers with codes on the wire as without.

The partitioner would be free to move the cast past the collective (XLA on CPUs does), so
the gather is written in shard_map, and the codes are sent as integers: a CPU widens fp8
collectives to float16. Backward, a gradient is summed and cut like its weight; elements
that the window clipped get none.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from midtread.lm import mesh as meshes
from midtread.lm.mesh import Layout
from midtread.numerics.qarray import calibrate, dequantize, quantize_to_range
from midtread.ops.training import is_inside


def gather(layout: Layout, cut: P, dtype: Any, w: jax.Array) -> jax.Array:
    """`w`, cut along fsdp, whole along it and in `dtype`: what its codes stand for."""
    return _gather(layout, cut, jnp.dtype(dtype), w)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _gather(layout, cut, dtype, w):
    return _forward(layout, cut, dtype, w)[0]


def _forward(layout, cut, dtype, w):
    spec = layout.codes
    assert spec is not None and "fsdp" in cut
    axis = tuple(cut).index("fsdp")
    whole = P(*(None if part == "fsdp" else part for part in cut))

    def here(w):
        w = w.astype(dtype)
        window = calibrate(w, spec)
        q = quantize_to_range(w, spec, window)
        codes = jax.lax.bitcast_convert_type(q.qvalue, jnp.uint8)
        codes = jax.lax.all_gather(codes, "fsdp", axis=axis, tiled=True)
        codes = jax.lax.bitcast_convert_type(codes, q.qvalue.dtype)
        return dequantize(q.replace(qvalue=codes), dtype), is_inside(w, window)

    run = jax.shard_map(
        here, mesh=layout.mesh, in_specs=cut, out_specs=(whole, cut), check_vma=False
    )
    out, inside = run(w)
    return out, (inside, jnp.zeros((0,), w.dtype))


def _backward(layout, cut, dtype, kept, g):
    inside, like = kept
    g = jax.lax.with_sharding_constraint(g, NamedSharding(layout.mesh, cut))
    return (jnp.where(inside, g, jnp.zeros_like(g)).astype(like.dtype),)


_gather.defvjp(_forward, _backward)


def travels_as_codes(layout: Layout, path: tuple, names: Any, shape: tuple) -> P | None:
    """How a weight is cut, if it is cut along fsdp and quantized; else None."""
    if layout.codes is None or any(str(part) in layout.wide for part in path):
        return None
    cut = meshes.spec(layout.sizes, names, shape)
    return cut if "fsdp" in cut else None


def with_weights(run, inside: str = "layers"):
    """`run(module, ...)` with the module's weights gathered first, where they are to
    travel as codes. What the module keeps besides weights is written back."""

    @functools.wraps(run)
    def near(module: nnx.Module, *args: Any) -> Any:
        layout = meshes.current()
        if layout is None or layout.codes is None or inside in layout.wide:
            return run(module, *args)
        graph, params, rest = nnx.split(module, nnx.Param, ...)
        copy = nnx.merge(graph, _gathered(layout, params), rest)
        out = run(copy, *args)
        nnx.update(module, nnx.state(copy, nnx.Not(nnx.Param)))
        return out

    return near


def _gathered(layout: Layout, params: nnx.State) -> nnx.State:
    def one(path: tuple, var: nnx.Variable) -> nnx.Variable:
        names, w = var.get_metadata().get("out_sharding"), var[...]
        cut = travels_as_codes(layout, path, names, w.shape)
        return var if cut is None else var.replace(gather(layout, cut, layout.dtype, w))

    return nnx.map_state(one, params)
