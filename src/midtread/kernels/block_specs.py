"""Blocks: QArrays as arguments of a Pallas kernel.

A kernel sees blocks of its arguments, and a BlockSpec says which. For a QArray the user
writes the one that the float array would have; the scale's follows from it. Along an axis
of extent V with blocks of B, a scale of extent S has blocks of S / (V / B), and one that
never moves if S is 1.

Mosaic for TPUs wants the last two extents of a block to be multiples of 8 and 128, or the
array's own. A scale whose blocks are not so is arranged otherwise outside the kernel, and its
blocks are put back inside:

    transposed    the longest axis last:  [256, 1] in blocks of [128, 1]  ->  blocks of [1, 128]
    flattened     one row per block:      [32, 32] in blocks of [8, 8]    ->  [4, 4, 1, 64]

On a GPU every block is taken as it is.
"""

import copy
import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from midtread.kernels import xla
from midtread.numerics.qarray import QArray

_LANES, _SUBLANES = 128, 8


def pallas_call(
    kernel: Callable[..., None],
    out_shape: Any,
    *,
    grid_spec: Any = None,
    grid: Any = (),
    in_specs: Any = pl.no_block_spec,
    out_specs: Any = pl.no_block_spec,
    scratch_shapes: Any = (),
    compiler_params: Any = None,
    **options: Any,
) -> Callable[..., Any]:
    """Does what pl.pallas_call does; arguments may be QArrays, and the kernel sees them so.

    Args:
        in_specs: for a QArray, the BlockSpec of the array that it stands for.
    """
    if grid_spec is None:
        grid_spec = pl.GridSpec(grid, in_specs, out_specs, scratch_shapes)
    if compiler_params is not None:
        options["compiler_params"] = compiler_params
    count = getattr(grid_spec, "num_scalar_prefetch", 0)

    def call(*args):
        prefetched, arrays = args[:count], args[count:]
        if grid_spec.in_specs is pl.no_block_spec:  # whole arrays, part by part
            return pl.pallas_call(kernel, out_shape, grid_spec=grid_spec, **options)(
                *args
            )
        specs = specs_of_parts(grid_spec.in_specs, arrays)
        restore = lambda blocks: blocks
        if _is_for_tpu(compiler_params):
            specs, arrays, restore = fit_tpu(specs, arrays)
        changed = copy.copy(grid_spec)
        changed.in_specs = specs

        def restored(*refs):
            blocks = restore(refs[count : len(args)])
            return kernel(*refs[:count], *blocks, *refs[len(args) :])

        make = pl.pallas_call(restored, out_shape, grid_spec=changed, **options)
        return make(*prefetched, *arrays)

    return call


def _is_for_tpu(compiler_params: Any) -> bool:
    """Whether Mosaic for TPUs compiles it, by the module of its parameters if there are any,
    else by the platform."""
    home = type(compiler_params).__module__
    if "triton" in home or "mosaic_gpu" in home:
        return False
    return "tpu" in home or xla.platform() not in ("gpu", "cuda", "rocm")


def specs_of_parts(block_specs: Any, args: Any) -> Any:
    """Returns a BlockSpec for each array, and a QArray of them for a QArray."""
    is_spec = lambda x: isinstance(x, pl.BlockSpec)
    return jax.tree.map(_spec_of_parts, block_specs, args, is_leaf=is_spec)


def _spec_of_parts(spec: pl.BlockSpec, arg: Any) -> Any:
    if not isinstance(arg, QArray):
        return spec
    if arg.logical is not None:
        raise ValueError(
            f"a kernel cannot take {arg!r}: it is padded to whole tiles. Pad the array "
            "before quantizing it, or choose a tile that divides its axes."
        )
    if arg.pre_rotation is not None:
        raise ValueError(
            f"a kernel cannot take {arg!r}: it rotates its inputs. Dequantize it first."
        )
    parts = {"scale": arg.scale, "zero_point": arg.zero_point,
             "global_scale": arg.global_scale, "pre_scale": arg.pre_scale}  # fmt: skip
    own = {
        name: _part_spec(spec, arg.qvalue.shape, part.shape, name)
        for name, part in parts.items()
        if part is not None
    }
    return arg.replace(qvalue=spec, **own)


def _part_spec(spec: pl.BlockSpec, shape, part_shape, name: str) -> pl.BlockSpec:
    if spec.block_shape is None:
        return spec
    block = []
    for extent, size, count in zip(shape, spec.block_shape, part_shape):
        if size is None or count == 1:
            block.append(size if size is None else 1)
            continue
        if not isinstance(size, int):
            raise NotImplementedError(
                f"a block of {spec.block_shape}: for a QArray write extents as integers."
            )
        blocks = extent // size
        if extent % size or count % blocks:
            raise ValueError(
                f"blocks of {size} along an axis of {extent} cut through the tiles of "
                f"its {name}, of which there are {count}."
            )
        block.append(count // blocks)

    where: Any = spec.index_map

    def index_map(*args):
        indices = where(*args)
        return tuple(i if n > 1 else 0 for i, n in zip(indices, part_shape))

    return dataclasses.replace(spec, block_shape=tuple(block), index_map=index_map)


# --- what Mosaic for TPUs can load ------------------------------------------------------------


def fit_tpu(block_specs: Any, args: Any):
    """Returns (specs, arguments, restore): what is to be passed instead, and a function that
    gives the kernel's references the blocks they were meant to have."""
    is_spec = lambda x: isinstance(x, pl.BlockSpec)
    flat, tree = jax.tree.flatten(block_specs, is_leaf=is_spec)
    pairs = [_fit(spec, x) for spec, x in zip(flat, tree.flatten_up_to(args))]
    fitted, arrays, undo = zip(*pairs) if pairs else ((), (), ())

    def restore(refs):
        given = tree.flatten_up_to(refs)
        return tree.unflatten([u(r) if u else r for u, r in zip(undo, given)])

    return tree.unflatten(fitted), tree.unflatten(arrays), restore


def _fit(spec: pl.BlockSpec, x: jax.Array):
    """Returns (spec, array, a function that undoes the change on a reference, or None)."""
    block = spec.block_shape
    if block is None or len(block) < 2 or not all(_is_plain(n) for n in block):
        return spec, x, None
    if is_best_for_tpu(block, x.shape):
        return spec, x, None
    order = np.argsort([n or 1 for n in block], kind="stable")
    turned = tuple(block[a] for a in order)
    if fits_tpu(turned, [x.shape[a] for a in order]):
        return _transposed(spec, x, order, turned)
    return _flattened(spec, x)


def _is_plain(extent: Any) -> bool:
    return extent is None or isinstance(extent, int)


def fits_tpu(block, shape) -> bool:
    """Whether Mosaic for TPUs can load this block."""
    last, second = (n or 1 for n in (block[-1], block[-2]))
    return (last % _LANES == 0 or last == shape[-1]) and (
        second % _SUBLANES == 0 or second == shape[-2]
    )


def is_best_for_tpu(block, shape) -> bool:
    """Whether it fits, and a transpose would not waste less of the 8 x 128 registers."""
    block = [n or 1 for n in block]
    whole = block[-1] % _LANES == 0 and block[-2] % _SUBLANES == 0
    return fits_tpu(block, shape) and (whole or block == sorted(block))


def _transposed(spec, x, order, block):
    index_map = lambda *args: tuple(spec.index_map(*args)[a] for a in order)
    kept = [a for a in order if spec.block_shape[a] is not None]
    back = tuple(kept.index(a) for a in sorted(kept))
    shape = [n for n in spec.block_shape if n is not None]

    def undo(ref):
        value = ref[...]
        wide = [a for a, n in zip(kept, value.shape) if n > 1]
        if wide == sorted(wide):  # only axes of extent 1 moved
            return value.reshape(shape)
        return value.transpose(back)

    changed = dataclasses.replace(spec, block_shape=block, index_map=index_map)
    return changed, x.transpose(order), undo


def _flattened(spec, x):
    block = [n or 1 for n in spec.block_shape]
    counts = [extent // n for extent, n in zip(x.shape, block)]
    split = [m for pair in zip(counts, block) for m in pair]
    axes = range(x.ndim)
    order = [2 * a for a in axes] + [2 * a + 1 for a in axes]
    size = math.prod(block)
    rows = x.reshape(split).transpose(order).reshape(*counts, 1, size)
    shape = [n for n in spec.block_shape if n is not None]
    changed = dataclasses.replace(
        spec,
        block_shape=(*[1] * x.ndim, 1, size),
        index_map=lambda *args: (*spec.index_map(*args), 0, 0),
    )
    return changed, rows, lambda ref: jnp.reshape(ref[...], shape)
