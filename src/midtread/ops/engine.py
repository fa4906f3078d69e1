"""Serve: one contraction of two operands, quantized or not.

    contract(c, lhs, rhs)

Operands are arrays and QArrays in any mixture. It multiplies codes when both sides
are codes, and moves every scale that it can out of the sum:

    sum_k (l_mk sl_m) (r_kn sr_n)  =  sl_m sr_n  sum_k l_mk r_kn

Scales tiled along k are constant within a tile, so tiles are visited one at a time and
added up in float32: [tiles, M, N] never exists. A zero point leaves the sum too, against
the plain sum of the other operand:

    sum_k (l_mk - zl_m) r_kn  =  sum_k l_mk r_kn  -  zl_m sum_k r_kn

What cannot leave the sum (lookups, tiles too small to be worth a matmul each, a float
partner for a tiled weight) is dequantized first. Sums are int32 or float32, scales are
applied in float32, and the result is cast once.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from midtread.kernels import choose, pending, xla
from midtread.kernels.environment import Env, here
from midtread.kernels.layout import Groups, Matmul, codes_of
from midtread.numerics import formats, hadamard, views
from midtread.numerics.dtypes import is_wide, wide_dtype
from midtread.numerics.qarray import QArray, dequantize, validate
from midtread.ops import witness
from midtread.ops.context import is_running, untouched
from midtread.ops.contraction import Contraction

# Below this many products per scale, visiting tiles costs more than dequantizing them.
MIN_TILE = 128

Operand = jax.Array | QArray


def contract(
    c: Contraction,
    lhs: Operand,
    rhs: Operand,
    accumulate: Any = None,
    env: Env | None = None,
) -> jax.Array:
    """Contracts two operands, quantized or not, in the dtype that the caller expects.

    Args:
        accumulate: the type of the sum; None for the engine's choice.
        env: where it will run; None for this thread's environment.
    """
    env = env or here()
    if is_running():  # inside `train`, which has reported this contraction already
        return _contract(c, lhs, rhs, accumulate, env)
    run = lambda: _contract(c, lhs, rhs, accumulate, env)
    return witness.contraction(c, None, lhs, rhs, run)


@untouched
def _contract(
    c: Contraction, lhs: Operand, rhs: Operand, accumulate: Any, env: Env
) -> jax.Array:
    if accumulate is None and not (_is_low_bit(lhs) or _is_low_bit(rhs)):
        return c.run(lhs, rhs, by=xla)
    for operand in (lhs, rhs):
        if isinstance(operand, QArray):
            validate(operand)
    result = c.preferred or result_dtype(lhs, rhs)
    shape = _kept_extents(c, lhs, rhs)
    lhs, rhs = turned_inputs(c, lhs, rhs)
    lhs, rhs = _match_padding(c, lhs, rhs)
    tiles = _loop_plan(c, lhs, rhs)
    out = None
    if c.is_matmul and c.out_sharding is None and accumulate is None:
        out = _by_kernel(c, lhs, rhs, tiles, np.dtype(result), env)
    if out is None and tiles is None:
        out = _sum_values(c, lhs, rhs, accumulate)
    elif out is None:
        out = _sum_codes(c, lhs, rhs, tiles, accumulate)
    if shape:
        whole = [shape.get(label, n) for label, n in zip(c.out, out.shape)]
        return views.crop_to(out, whole).astype(result)
    form, out = pending.form_of(out), out.astype(result)
    pending.note(out, **form._asdict())
    return out


def _by_kernel(c, lhs, rhs, tiles, dtype, env: Env) -> jax.Array | None:
    """Contracts, scales included, by a kernel of ours, or returns None where there is none.
    It multiplies codes by codes, or floats by codes if `tiles` is None."""
    labels = c.lhs, c.rhs, c.out
    groups = None if c.grouping is None else Groups(*c.grouping)
    is_plain = is_wide(dtype) and dtype != np.float64
    if tiles is None:
        dtype = dtype if is_plain else np.dtype(np.float32)
        a = Matmul(labels, lhs, rhs, dtype, precision=c.precision, groups=groups)
        return choose.weight(a, env)
    if not is_plain:
        return None
    return choose.scaled(Matmul(labels, lhs, rhs, dtype, tiles, c.stored, groups=groups), env)  # fmt: skip


def result_dtype(*operands: Operand) -> np.dtype:
    """Promotes the dtypes that the operands stand for. Bare codes count as bfloat16 or int32;
    8-bit scales count only if there is nothing else, and then as float32."""
    dtypes = []
    for x in operands:
        if isinstance(x, QArray) and not is_wide(x.scale.dtype):
            continue
        narrow = jnp.int32 if jnp.issubdtype(x.dtype, jnp.integer) else jnp.bfloat16
        dtypes.append(narrow if formats.dtype_bits(x.dtype) <= 8 else x.dtype)
    with jax.numpy_dtype_promotion("standard"):
        return jnp.result_type(*dtypes) if dtypes else jnp.dtype("float32")


def _is_low_bit(x: Operand) -> bool:
    return isinstance(x, QArray) or is_code(x)


@functools.cache
def _is_linear(qtype: Any) -> bool:
    return formats.as_format(qtype).is_linear


def is_code(x: Operand) -> bool:
    """Whether it can be multiplied as it is: codes of a linear format, bare or scaled."""
    if isinstance(x, QArray):
        has_factor = any(
            part is not None for part in (x.pre_scale, x.pre_rotation, x.global_scale)
        )
        return _is_linear(x.qtype) and not has_factor
    return not is_wide(x.dtype) and x.dtype != jnp.bool_


@untouched
def turned_inputs(
    c: Contraction, lhs: Operand, rhs: Operand
) -> tuple[Operand, Operand]:
    """Returns the operands, with what a stored weight asks of its inputs done to the other
    one, if that is still in float: it is rotated, then multiplied by the pre-scale."""
    for side, other in (("lhs", "rhs"), ("rhs", "lhs")):
        mine, theirs = (lhs, rhs) if side == "lhs" else (rhs, lhs)
        if not isinstance(mine, QArray):
            continue
        if mine.pre_scale is None and mine.pre_rotation is None:
            continue
        if isinstance(theirs, QArray) or not is_wide(theirs.dtype):
            continue  # dequantizing applies them
        validate(mine)
        if mine.pre_rotation is not None:
            signs = _over_inputs(c, mine, "pre_rotation", side, other)
            theirs = hadamard.turn(theirs, signs)
        if mine.pre_scale is not None:
            factors = _over_inputs(c, mine, "pre_scale", side, other)
            shape = [min(n, m) for n, m in zip(factors.shape, theirs.shape)]
            factors = views.crop_to(factors, shape)  # there may be some of padding
            factors = factors.astype(theirs.dtype)
            theirs = views.broadcast_with(jnp.multiply, theirs, factors)
        mine = mine.replace(pre_scale=None, pre_rotation=None)
        lhs, rhs = (mine, theirs) if side == "lhs" else (theirs, mine)
    return lhs, rhs


def _over_inputs(c, mine: QArray, name: str, side, other):
    """A part of one operand, laid over the other: experts' factors over their own rows."""
    part = getattr(mine, name)
    known = (*c.labels(other), *c.groups(side))
    if any(n != 1 and x not in known for x, n in zip(c.labels(side), part.shape)):
        raise ValueError(
            f"{name} {part.shape} varies along an axis that {c.name} keeps; it may vary "
            "along axes that the other operand has as well."
        )
    return c.lay(part, side, c.labels(other))


def _match_padding(c: Contraction, lhs: Operand, rhs: Operand):
    """Pads a side where the other was padded to whole tiles of a summed axis."""
    if not (getattr(lhs, "logical", None) or getattr(rhs, "logical", None)):
        return lhs, rhs
    left, right = _extents(c, lhs, "lhs"), _extents(c, rhs, "rhs")
    target = {x: max(left[x], right[x]) for x in c.summed}

    def pad(x, extents):
        shape = tuple(target.get(label, n) for label, n in extents.items())
        if shape == codes_of(x).shape:
            return x
        if not isinstance(x, QArray):
            return views.pad_to(x, shape)
        if x.format.is_linear and not views.tiled_axes(x):
            # Any code will do here, since the padded side has zeros there.
            return x.replace(qvalue=views.pad_to(x.qvalue, shape), logical=None)
        return views.pad_to(dequantize(x), shape)

    return pad(lhs, left), pad(rhs, right)


def _extents(c: Contraction, x: Operand, side: str) -> dict[str, int]:
    return dict(zip(c.labels(side), codes_of(x).shape))


def _kept_extents(c: Contraction, lhs: Operand, rhs: Operand) -> dict[str, int]:
    """Returns the logical extents of the labels that come from a padded operand."""
    extents = {}
    for labels, x in ((c.lhs, lhs), (c.rhs, rhs)):
        if isinstance(x, QArray) and x.logical is not None:
            extents |= dict(zip(labels, x.shape))
    return extents


def _loop_plan(c: Contraction, lhs: Operand, rhs: Operand) -> dict[str, int] | None:
    """Returns {summed label: number of tiles} to visit, or None if codes cannot be multiplied."""
    if not is_code(lhs) or not is_code(rhs):
        return None
    counts = tile_counts(c, lhs, rhs)
    if counts is None:
        return None
    codes = codes_of(lhs), codes_of(rhs)
    extents = dict(zip((*c.lhs, *c.rhs), (*codes[0].shape, *codes[1].shape)))
    terms = math.prod(map(extents.__getitem__, c.summed))
    if counts and terms // math.prod(counts.values()) < MIN_TILE:
        return None
    return counts | _overflow_tiles(c, counts, extents, *codes)


def tile_counts(c: Contraction, lhs: Operand, rhs: Operand) -> dict[str, int] | None:
    """Returns {summed label: number of tiles} along which scales and zero points vary, or None
    if they vary where tiles cannot be visited one at a time."""
    counts = {}
    for side, labels, x in (("lhs", c.lhs, lhs), ("rhs", c.rhs, rhs)):
        if not isinstance(x, QArray):
            continue
        movable = (*c.kept(side), *c.groups(side))
        for part in (x.scale, x.zero_point):
            if part is None:
                continue
            for label, extent, count in zip(labels, x.qvalue.shape, part.shape):
                if count == 1 or label in movable:
                    continue
                if label not in c.looped:
                    return None
                if counts.setdefault(label, count) != count:
                    raise ValueError(
                        f"Contracting axes must be tiled with the same tile size: {c.name} "
                        f"meets tiles of {extent // count} and of {extent // counts[label]}. "
                        "A weight that is multiplied by along two of its axes has tiles along "
                        "one: leave out tile_size or act_qtype there."
                    )
    return counts


def _overflow_tiles(c, counts, extents, lhs, rhs) -> dict[str, int]:
    """Returns extra tiles to visit where a whole sum of codes would not fit in int32."""
    left, right = lhs.dtype, rhs.dtype
    integers = jnp.issubdtype(left, jnp.integer) and jnp.issubdtype(right, jnp.integer)
    if not integers or xla.is_int16(left, right):
        return {}
    terms = math.prod(map(extents.__getitem__, c.summed)) // math.prod(counts.values())
    product = 2 ** (formats.dtype_bits(left) + formats.dtype_bits(right) - 2)
    needed = -(-terms * product // (2**31 - 1))
    if needed <= 1:
        return {}
    free = [x for x in c.looped if x not in counts]
    for label in sorted(free, key=extents.get, reverse=True):
        for count in range(needed, min(extents[label], 64 * needed) + 1):
            if extents[label] % count == 0:
                return {label: count}
    return {}


def _sum_values(c, lhs, rhs, accumulate) -> jax.Array:
    """Multiplies where at least one side has to be float by the time of the sum."""
    common = result_dtype(lhs, rhs)
    left, lhs_scale = _as_value(c, lhs, "lhs", common)
    right, rhs_scale = _as_value(c, rhs, "rhs", common)
    wide = wide_dtype(common)
    out = c.run(left, right, accumulate or wide, xla)
    return apply_scales(c, out, wide, lhs_scale, rhs_scale)


def _as_value(c: Contraction, x: Operand, side: str, dtype):
    """Returns (what to multiply, the scale that is left for the output)."""
    if not isinstance(x, QArray):
        return x, None
    if is_code(x) and x.zero_point is None and varies_only_where_kept(c, x, side):
        return x.qvalue, x.scale
    return views.pad_to(dequantize(x, dtype), x.qvalue.shape), None


def varies_only_where_kept(c: Contraction, x: QArray, side: str) -> bool:
    """Whether the scale varies only along axes that let it move to the output."""
    movable = (*c.kept(side), *c.groups(side))
    return all(
        n == 1 or label in movable for label, n in zip(c.labels(side), x.scale.shape)
    )


def _sum_codes(c, lhs, rhs, tiles: dict[str, int], accumulate) -> jax.Array:
    """Multiplies codes by codes, one tile of the summed axes after another."""
    wide = wide_dtype(result_dtype(lhs, rhs))
    if not tiles:
        return _scaled_sum(c, lhs, rhs, accumulate, wide)

    labels, counts = tuple(tiles), tuple(tiles.values())

    def tile_of(x, side, index):
        take = functools.partial(
            take_tile, labels=c.labels(side), index=index, tiles=tiles
        )
        return x.map(take, logical=None) if isinstance(x, QArray) else take(x)

    def add(total, flat):
        index = dict(zip(labels, jnp.unravel_index(flat, counts)))
        tile = tile_of(lhs, "lhs", index), tile_of(rhs, "rhs", index)
        return total + _scaled_sum(c, *tile, accumulate, wide), None

    first = jax.eval_shape(lambda: add(jnp.zeros((), wide), jnp.int32(0))[0])
    start = add(jnp.zeros(first.shape, wide), jnp.int32(0))[0]
    return lax.scan(add, start, jnp.arange(1, math.prod(counts), dtype=jnp.int32))[0]


def take_tile(x: jax.Array, labels, index, tiles) -> jax.Array:
    """Returns the part of an operand that belongs to one tile of the summed axes."""
    for axis, label in enumerate(labels):
        if label in tiles and x.shape[axis] != 1:
            size = x.shape[axis] // tiles[label]
            start = index[label] * size
            if isinstance(start, int):
                x = lax.slice_in_dim(x, start, start + size, axis=axis)
            else:
                x = lax.dynamic_slice_in_dim(x, start, size, axis)
    return x


def _scaled_sum(c, lhs, rhs, accumulate, wide) -> jax.Array:
    """Returns sum (l - zl)(r - zr) times both scales, none of which varies along a sum."""
    left, right = codes_of(lhs), codes_of(rhs)
    if accumulate is None:
        integer = all(jnp.issubdtype(v.dtype, jnp.integer) for v in (left, right))
        accumulate = jnp.int32 if integer else wide
    out = c.run(left, right, accumulate, xla)
    zeros = [x.zero_point if isinstance(x, QArray) else None for x in (lhs, rhs)]
    if any(z is not None and is_wide(z.dtype) for z in zeros):  # they are fractions
        out = out.astype(wide)
    zeros = [
        None if z is None else c.align(z, s).astype(out.dtype)
        for z, s in zip(zeros, ("lhs", "rhs"))
    ]
    zl, zr = (_expand_tiles(z, out.shape) for z in zeros)
    total = lambda x, y: c.run(x, y, accumulate, xla).astype(out.dtype)
    if zl is not None:
        out = out - zl * total(c.ones(left, "lhs"), right)
    if zr is not None:
        out = out - zr * total(left, c.ones(right, "rhs"))
    if zl is not None and zr is not None:
        out = out + zl * zr * total(c.ones(left, "lhs"), c.ones(right, "rhs"))
    scales = [x.scale if isinstance(x, QArray) else None for x in (lhs, rhs)]
    return apply_scales(c, out, wide, *scales)


def _expand_tiles(part, shape):
    """Repeats a part along the kept axes that it tiles; broadcasting does the rest."""
    if part is None or all(n in (1, m) for n, m in zip(part.shape, shape)):
        return part
    return views.expand(part, [m if n != 1 else 1 for n, m in zip(part.shape, shape)])


def apply_scales(c: Contraction, out, wide, lhs_scale, rhs_scale) -> jax.Array:
    """Multiplies a sum of codes by the scales of both operands; None is no scale."""
    out = out.astype(wide)
    for scale, side in ((lhs_scale, "lhs"), (rhs_scale, "rhs")):
        if scale is not None:
            laid = c.align(scale.astype(wide), side)
            out = views.broadcast_with(jnp.multiply, out, laid)
    return out
