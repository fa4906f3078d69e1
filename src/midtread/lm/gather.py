"""Gather: weights that travel between devices as codes of 8 bits.

Under fsdp a device holds a part of every weight and needs all of it for a moment. What it
multiplies by are e4m3 codes, so those are what is sent, at half the bytes of bfloat16:

    here        codes = round(clip(w / scale))      of the part that lies here
    all-gather  the codes, as uint8                 one byte per element on every backend
    everywhere  w = codes * scale

The scale must be known without looking at the other parts: a constant of the config
(`weight_quantization_calibration_method=fixed,-a,a`), or one per output channel that a
calibration run has noted (`static=calibrated`), which lies where its channels lie and is
gathered with them. The matmul quantizes what arrives with the same scale, and gets the same
codes back: quantizing twice is quantizing once. So a run computes the same numbers with
codes on the wire as without.

The partitioner would be free to move the cast past the collective (XLA on CPUs does), so
the gather is written in shard_map, and the codes are sent as integers: a CPU widens fp8
collectives to float16. Backward, a gradient is summed and cut like its weight; elements
that the window clipped get none.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from midtread.lm import mesh as meshes
from midtread.lm.mesh import Layout
from midtread.model.flaxlib import read
from midtread.numerics.qarray import (
    calibrate,
    dequantize,
    quantize_to_range,
    scales_of,
    settled,
)
from midtread.ops.training import is_inside
from midtread.providers.static import SUFFIX


def gather(
    layout: Layout, names: Any, dtype: Any, w: jax.Array, noted: jax.Array | None = None
) -> tuple[jax.Array, jax.Array | None]:
    """Gathers `w`, which is cut along fsdp, as codes. Returns the values of the codes in
    `dtype`, whole along fsdp, and the ranges, whole too.

    Args:
        noted: the range of each output channel, cut as `w` is; None for a constant.
    """
    return _gather(_Transfer(layout, tuple(names), jnp.dtype(dtype)), w, noted)


class _Transfer(NamedTuple):
    """How one weight is cut, and the dtype that it is multiplied in."""

    layout: Layout
    names: tuple
    dtype: Any

    def cut(self, x: jax.Array) -> P:
        return meshes.spec(self.layout.sizes, self.names, x.shape)

    def whole(self, x: jax.Array) -> P:
        return P(*(None if part == "fsdp" else part for part in self.cut(x)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gather(transfer, w, noted):
    return _forward(transfer, w, noted)[0]


def _forward(transfer, w, noted):
    spec, cut = transfer.layout.codes, transfer.cut(w)
    assert spec is not None and "fsdp" in cut
    given = () if noted is None else (noted,)

    def here(w, *given):
        w = w.astype(transfer.dtype)
        window = (
            {"absmax": given[0].astype(transfer.dtype)} if given else calibrate(w, spec)
        )
        q = quantize_to_range(w, spec, window)
        codes = jax.lax.bitcast_convert_type(q.qvalue, jnp.uint8)
        codes = _together(codes, cut)
        codes = jax.lax.bitcast_convert_type(codes, q.qvalue.dtype)
        scale, ranges = q.scale, [_together(x, transfer.cut(noted)) for x in given]
        if ranges:
            everywhere = {"absmax": ranges[0].astype(transfer.dtype)}
            scale = settled(scales_of(everywhere, spec).scale.astype(transfer.dtype))
        out = dequantize(q.replace(qvalue=codes, scale=scale), transfer.dtype)
        return out, is_inside(w, window), *ranges

    run = jax.shard_map(
        here,
        mesh=transfer.layout.mesh,
        in_specs=(cut, *map(transfer.cut, given)),
        out_specs=(transfer.whole(w), cut, *map(transfer.whole, given)),
        check_vma=False,
    )
    out, inside, *ranges = run(w, *given)
    # A constant range clips on purpose, so what it clipped gets no gradient. A noted range
    # saturates, as it does in the matmul.
    kept = inside if spec.calibration.clips else None
    return (out, ranges[0] if ranges else None), (kept, jnp.zeros((0,), w.dtype))


def _together(x: jax.Array, cut: P) -> jax.Array:
    """Gathers `x` along fsdp if it is cut there."""
    if "fsdp" not in cut:
        return x
    return jax.lax.all_gather(x, "fsdp", axis=tuple(cut).index("fsdp"), tiled=True)


def _backward(transfer, kept, gs):
    (inside, like), (g, _) = kept, gs
    where = NamedSharding(transfer.layout.mesh, transfer.cut(g))
    g = jax.lax.with_sharding_constraint(g, where)
    g = g if inside is None else jnp.where(inside, g, jnp.zeros_like(g))
    return g.astype(like.dtype), None


_gather.defvjp(_forward, _backward)


def travels_as_codes(layout: Layout, path: tuple, names: Any, shape: tuple) -> bool:
    """Returns whether a weight is cut along fsdp, and quantized."""
    if layout.codes is None or any(str(part) in layout.wide for part in path):
        return False
    return "fsdp" in meshes.spec(layout.sizes, names, shape)


def with_weights(run, name: str, inside: str = "layers"):
    """Wraps `run(module, ...)` so that the weights that travel as codes are gathered first,
    in scopes that begin with `name`. What the module keeps besides weights is written
    back."""

    @functools.wraps(run)
    def near(module: nnx.Module, *args: Any) -> Any:
        layout = meshes.current()
        if layout is None or layout.codes is None or inside in layout.wide:
            return run(module, *args)
        graph, params, rest = nnx.split(module, nnx.Param, ...)
        with jax.named_scope(name):
            copy = nnx.merge(graph, *_gathered(layout, params, rest))
        out = run(copy, *args)
        nnx.update(module, nnx.state(copy, nnx.Not(nnx.Param)))
        return out

    return near


def _gathered(layout: Layout, params: nnx.State, rest: nnx.State):
    """Returns the weights and all other variables, with the weights that travel gathered,
    and their ranges too."""
    weights, others = dict(nnx.to_flat_state(params)), dict(nnx.to_flat_state(rest))
    for path, var in weights.items():
        names, w = var.get_metadata().get("out_sharding"), var[...]
        if not travels_as_codes(layout, path, names, w.shape):
            continue
        beside = (*path[:-1], f"{path[-1]}{SUFFIX}")
        ranges = read(others[beside]) if beside in others else {}
        # mt.prove looks for the weight's name.
        with jax.named_scope("/".join(map(str, path))):
            w, noted = gather(layout, names, layout.dtype, w, ranges.get("absmax"))
        weights[path] = var.replace(w)
        if ranges:
            others[beside] = others[beside].replace({**ranges, "absmax": noted})
    return nnx.from_flat_state(weights), nnx.from_flat_state(others)
