"""Moments: what an optimizer remembers of the gradients, in few bits.

    code = round(x^power / scale),  scale = max of x^power over a tile of neighbours / levels

A first moment has a sign and is kept as it is. A second moment is a mean of squares: within
a tile its elements differ by many orders of magnitude, and one that becomes 0 would let its
parameter take any step. Its root is kept instead: the fourth root in unsigned bytes, which
tells apart 4e9 : 1 with steps of 1.6% at the top, or the square root in e4m3, 5e10 : 1 in
steps of 12%; what is not 0 is never rounded to 0. The largest of a tile is always exact.

Rounding is by chance, up or down with a mean that is x: an average that moves by less than
half a step a time would otherwise never move. The random bits are a hash of the seed, the
step, the parameter's name and the element's index (numerics/rounding.py): the same on any
mesh, and after a restart.

Tensors of fewer than SMALL elements, and those whose axes no tile of LEAST or more divides,
are kept in float32, and so are embeddings (`is_embedding`), whose rows see a gradient once
in a while.
"""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from midtread.numerics import formats, rounding, views
from midtread.numerics.platforms import explicit_sharding
from midtread.numerics.qarray import QArray, dequantize

SMALL = 4096
TILES = (256, 128, 64, 32)
LEAST = TILES[-1]
TINY = float(jnp.finfo(jnp.float32).tiny)


class Moment(NamedTuple):
    """How one kind of moment is kept."""

    format: str
    power: float = 1.0  # x^power is kept
    tile: int = 256  # at most so many neighbours share a scale


class States(NamedTuple):
    """How an optimizer's two moments are kept; None keeps one in float32."""

    first: Moment | None
    second: Moment | None


ROOT = Moment("uint8", 0.25)
STATES = {
    "float32": States(None, None),
    "int8": States(Moment("int8"), ROOT),
    "fp8": States(Moment("float8_e4m3fn"), Moment("float8_e4m3fn", 0.5)),
    "int4": States(Moment("int4", tile=64), ROOT),
}


def states_of(name: str) -> States:
    if name not in STATES:
        raise ValueError(f"states={name!r}: there are {', '.join(STATES)}.")
    return STATES[name]


def is_embedding(path: str) -> bool:
    """Whether a parameter's path has "embed" in it, in any case."""
    return "embed" in path.lower()


def tile_of(shape: tuple[int, ...], largest: int) -> tuple[int, int] | None:
    """Returns an axis and the size of its tiles: the last axis that the largest of TILES
    divides, or else that another number does.

    >>> tile_of((512, 1000), 256), tile_of((300, 1000), 256), tile_of((7, 1009), 256)
    ((0, 256), (1, 250), None)
    """
    for tile in (*TILES, *range(max(TILES), LEAST, -1)):
        for axis in reversed(range(len(shape))):
            if tile <= largest and shape[axis] % tile == 0 and shape[axis]:
                return axis, tile
    return None


def zeros(moment: Moment | None, path: str, p: Any, is_wide: Callable) -> Any:
    """Makes the moment of a parameter that has seen no gradient."""
    size = math.prod(p.shape)
    tiling = None if moment is None else tile_of(p.shape, moment.tile)
    if moment is None or tiling is None or size < SMALL or is_wide(path):
        return _zeros_beside(p, p.shape, jnp.float32)
    axis, tile = tiling
    counts = tuple(n // tile if a == axis else n for a, n in enumerate(p.shape))
    fmt = formats.as_format(moment.format)
    codes = _zeros_beside(p, p.shape, fmt.dtype)
    return QArray(codes, _zeros_beside(p, counts, jnp.float32), None, fmt.qtype)


def _zeros_beside(p: Any, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Returns zeros that lie on a mesh as the parameter does, as far as it divides them."""
    is_traced = isinstance(p, jax.core.Tracer)
    where = explicit_sharding(p) if is_traced else getattr(p, "sharding", None)
    if not isinstance(where, NamedSharding):
        return jnp.zeros(shape, dtype)
    return jnp.zeros(shape, dtype, device=views.part_sharding(where, shape))


def whole(kept: Any) -> Any:
    """Returns a moment as it was made. `nnx.Optimizer` gives back the parts of a QArray by
    their names."""
    return QArray(**kept) if isinstance(kept, Mapping) else kept


def read(kept: Any, moment: Moment | None) -> jax.Array:
    """Returns a moment as float32."""
    if not isinstance(kept, QArray):
        return kept
    assert moment is not None
    powers = {1.0: lambda x: x, 0.5: jnp.square, 0.25: lambda x: jnp.square(x**2)}
    value = lambda kept: powers[moment.power](dequantize(kept))
    return _left_to_xla(value, kept.qvalue, kept)


def write(x: jax.Array, like: Any, moment: Moment | None, bits: jax.Array) -> Any:
    """Keeps `x` as `like` is kept.

    Args:
        bits: 8 random bits for every element, uint32.
    """
    if not isinstance(like, QArray):
        return x
    assert moment is not None
    codes = functools.partial(_codes, like, moment)
    qvalue, scale = _left_to_xla(codes, (like.qvalue, like.scale), x, bits)
    return like.replace(qvalue=qvalue, scale=scale)


def _codes(like: QArray, moment: Moment, x: jax.Array, bits: jax.Array):
    """Returns codes and scales of `x`."""
    root = {1.0: jnp.abs, 0.5: jnp.sqrt, 0.25: lambda x: jnp.sqrt(jnp.sqrt(x))}
    fmt, split, axis = like.format, *_split(like)
    tiles = x.reshape(split)
    # A root grows with its argument, so the root of a tile's largest is its largest root.
    absmax = root[moment.power](jnp.max(jnp.abs(tiles), axis=axis, keepdims=True))
    top = fmt.codes[1] if fmt.codes else fmt.bound
    # Below this 1 / scale is no number, and a tile is one of zeros.
    largest = jnp.where(absmax < top * TINY, 1, absmax)
    # Without the barrier XLA divides once for every element rather than once for a tile.
    scale, times = jax.lax.optimization_barrier((largest / top, top / largest))
    units = (tiles if moment.power == 1 else root[moment.power](tiles)) * times
    chance = (bits.reshape(split).astype(jnp.float32) + 0.5) / 256
    codes = rounding.by_chance(units, fmt, chance)
    if moment.power != 1:  # a second moment
        least = fmt.grid.step(jnp.float32(0)) if fmt.grid else 1
        codes = jnp.where((units > 0) & (codes == 0), jnp.asarray(least, fmt.dtype), codes)  # fmt: skip
    return codes.reshape(x.shape), scale.reshape(like.scale.shape)


def _left_to_xla(run: Callable, like: Any, *args: Any) -> Any:
    """Returns `run(*args)`, which lies on a mesh as `like` does. Where shardings are part of
    types, XLA chooses those of what is in between: tiles may straddle shards."""
    lie = [explicit_sharding(x) for x in jax.tree.leaves(like)]
    if None in lie:
        return run(*args)
    specs = jax.tree.unflatten(jax.tree.structure(like), [s.spec for s in lie])
    with jax.sharding.use_abstract_mesh(lie[0].mesh):
        return jax.sharding.auto_axes(run, out_sharding=specs)(*args)


def _split(q: QArray) -> tuple[tuple[int, ...], int]:
    """Returns the shape with its tiled axis as (tiles, tile), and which axis the tile is then."""
    shape, counts = q.qvalue.shape, q.scale.shape
    axis = next(a for a, (n, c) in enumerate(zip(shape, counts)) if n != c)
    split = (*shape[:axis], counts[axis], shape[axis] // counts[axis])
    return (*split, *shape[axis + 1 :]), axis + 1


def nbytes(state: Any) -> int:
    """Counts the bytes of an optimizer's state, at the bits its formats have.

    >>> nbytes({"m": jnp.zeros(8), "count": jnp.zeros((), jnp.int32)})
    36
    """
    bits = (x.size * formats.dtype_bits(x.dtype) for x in jax.tree.leaves(state))
    return math.ceil(sum(bits) / 8)
