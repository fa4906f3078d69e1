"""Views: rearranging an array together with the scales that describe it.

Two arrays of one rank "broadcast by tiles" when on every axis one extent divides the
other: the shorter one repeats each element over a whole tile, where plain broadcasting
repeats over the whole axis only. Both are done by splitting an axis into (tiles, tile).
"""

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from numpy.lib.array_utils import normalize_axis_index

from midtread.numerics import hadamard

if TYPE_CHECKING:
    from midtread.numerics.qarray import QArray


def split(shape: Sequence[int], counts: Sequence[int]):
    """Returns (shape with each tiled axis as (count, tile), the axes to reduce within tiles).

    >>> split((6, 8, 5), (1, 4, 5))
    ((6, 4, 2, 5), (0, 2))
    """
    parts, reduced = [], []
    for extent, count in zip(shape, counts):
        if count == extent:
            parts.append(extent)
            continue
        if count != 1:
            parts.append(count)
        reduced.append(len(parts))
        parts.append(extent // count)
    return tuple(parts), tuple(reduced)


def broadcast_with(op: Callable, x: jax.Array, y: jax.Array) -> jax.Array:
    """Applies `op` element by element, broadcasting by tiles."""
    if x.ndim != y.ndim:
        raise ValueError(f"{x.shape} and {y.shape} should have the same rank.")
    x_parts, y_parts, out = [], [], []
    for n, m in zip(x.shape, y.shape):
        if n == m or m == 1:  # an extent may be symbolic (jax.export), which has no max
            out.append(n)
        else:
            out.append(m if n == 1 else max(n, m) if n and m else 0)
        if n == m or 1 in (n, m):
            x_parts.append(n)
            y_parts.append(m)
        elif n % m == 0:
            x_parts += [m, n // m]
            y_parts += [m, 1]
        elif m % n == 0:
            x_parts += [n, 1]
            y_parts += [n, m // n]
        else:
            raise ValueError(
                f"Cannot broadcast {x.shape} and {y.shape}: of {n} and {m} neither is a "
                "multiple of the other."
            )
    return op(x.reshape(x_parts), y.reshape(y_parts)).reshape(out)


def expand(x: jax.Array, shape: Sequence[int]) -> jax.Array:
    """Repeats `x` by tiles to `shape`."""
    return broadcast_with(
        lambda a, _: jnp.broadcast_to(a, _.shape), x, jnp.zeros(shape, bool)
    )


def pad_to(x: jax.Array, shape: Sequence[int], value: Any = 0) -> jax.Array:
    """Pads `x` with `value` at the end of each axis."""
    if tuple(shape) == x.shape:
        return x
    widths = [(0, m - n) for n, m in zip(x.shape, shape)]
    return jnp.pad(x, widths, constant_values=value)


def crop_to(x: jax.Array, shape: Sequence[int]) -> jax.Array:
    """Cuts `x` off at the end of each axis."""
    if tuple(shape) == x.shape:
        return x
    return x[tuple(slice(n) for n in shape)]


def lay_over(x: jax.Array, labels: Sequence[str], out: Sequence[str]) -> jax.Array:
    """Arranges `x`, whose axes have these labels, so that it broadcasts over axes `out`.

    >>> lay_over(jnp.ones((2, 1, 3)), "akb", "bca").shape
    (3, 1, 2)
    """
    extent = dict(zip(labels, x.shape))
    assert all(n == 1 or label in out for label, n in extent.items()), (labels, x, out)
    shape = [extent.get(label, 1) for label in out]
    wide = [out.index(label) for label, n in extent.items() if n != 1]
    if wide == sorted(wide):  # inside a kernel not every transpose is possible
        return x.reshape(shape)
    position = lambda axis: out.index(labels[axis]) if labels[axis] in out else -1
    return x.transpose(sorted(range(x.ndim), key=position)).reshape(shape)


def tiled_axes(q: "QArray") -> dict[int, int]:
    """Returns {axis: tile} of the axes where some neighbours share a scale, but not all.

    >>> from midtread.numerics.qarray import quantize
    >>> tiled_axes(quantize(jnp.ones((4, 8)), "int8", tiled_axes={1: 2}))
    {1: 2}
    """
    extents = zip(q.qvalue.shape, q.scale.shape)
    return {axis: n // s for axis, (n, s) in enumerate(extents) if s not in (1, n)}


def part_sharding(sharding: NamedSharding, shape: Sequence[int]) -> NamedSharding:
    """Returns the values' sharding without the mesh axes that do not divide this part."""
    spec = (*sharding.spec, *[None] * len(shape))[: len(shape)]
    sizes = sharding.mesh.shape

    def fits(extent, names):
        if names is None:
            return None
        names_ = names if isinstance(names, tuple) else (names,)
        return None if extent % math.prod(sizes[n] for n in names_) else names

    return NamedSharding(sharding.mesh, PartitionSpec(*map(fits, shape, spec)))


def transpose(q: "QArray", axes: Sequence) -> "QArray":
    if len(axes) == 1 and not isinstance(axes[0], int):
        axes = axes[0]
    order = [normalize_axis_index(a, q.ndim) for a in axes or range(q.ndim)[::-1]]
    if sorted(order) != list(range(q.ndim)):
        raise ValueError(f"cannot transpose {q.shape} by {axes}: name each axis once.")
    if q.pre_rotation is not None:
        signs = q.pre_rotation.shape
        behind = hadamard.axis_of([signs[a] for a in order])
        if behind is not None and order[behind] != hadamard.axis_of(signs):
            raise ValueError(
                f"cannot transpose {q.shape} by {order}: the axes of a stack stay before "
                "the one along which inputs are rotated. Dequantize first."
            )
    logical = None if q.logical is None else tuple(_logical(q)[a] for a in order)
    return q.map(lambda x: x.transpose(order), logical=logical)


def swapaxes(q: "QArray", axis1: int, axis2: int) -> "QArray":
    a, b = (normalize_axis_index(axis, q.ndim) for axis in (axis1, axis2))
    order = list(range(q.ndim))
    order[a], order[b] = b, a
    return transpose(q, order)


def _logical(q: "QArray") -> tuple[int | None, ...]:
    """Returns `q.logical` with one entry for each axis that q has now."""
    return ((None,) * q.ndim + (q.logical or ()))[-q.ndim :] if q.ndim else ()


def reshape(q: "QArray", shape: Sequence) -> "QArray":
    """Merges and splits axes where every tile stays whole, and raises elsewhere."""
    if len(shape) == 1 and not isinstance(shape[0], int):
        shape = tuple(shape[0])
    shape = _fill_unknown(q.shape, tuple(shape))
    if q.logical is not None:
        raise ValueError(
            f"cannot reshape {q.shape} to {shape}: the array is padded to whole tiles, "
            f"{q.qvalue.shape}. Dequantize it first."
        )
    groups = _matching_groups(q.shape, shape)
    if q.pre_rotation is not None:
        _check_rotated(q, groups, shape)

    def reshape_part(part):
        target, start = [], 0
        for old, new in groups:
            extents = part.shape[start : start + len(old)]
            start += len(old)
            target += _reshaped_extents(extents, old, new, q.shape, shape)
        return part.reshape(target)

    return q.map(reshape_part)


def _check_rotated(q: "QArray", groups: Sequence, shape: Sequence[int]) -> None:
    """Refuses to cut or merge the axis along which inputs are rotated."""
    start = 0
    for old, new in groups:
        signs = q.pre_rotation.shape[start : start + len(old)]
        start += len(old)
        if max(signs, default=1) > 1 and old != new:
            raise ValueError(
                f"cannot reshape {q.shape} to {tuple(shape)}: inputs are rotated along "
                f"axes {old}. Dequantize it first."
            )


def _reshaped_extents(extents, old, new, old_shape, new_shape) -> list[int]:
    if extents == old:
        return list(new)
    if math.prod(extents) == 1:
        return [1] * len(new)
    # One scale per index or tile of the outermost axis survives if that stays outermost.
    if math.prod(extents) == extents[0] and new and new[0] % extents[0] == 0:
        return [extents[0]] + [1] * (len(new) - 1)
    raise ValueError(
        f"cannot reshape {old_shape} to {new_shape}: a scale of extents {extents} over "
        f"axes {old} would be torn apart. Reshape before quantizing, or dequantize."
    )


def _fill_unknown(old: tuple[int, ...], new: tuple[int, ...]) -> tuple[int, ...]:
    if new.count(-1) > 1:
        raise ValueError(
            f"cannot reshape {old} to {new}: only one -1 can be filled in."
        )
    if new.count(-1) == 1:
        known = -math.prod(new)
        new = tuple(math.prod(old) // max(known, 1) if n == -1 else n for n in new)
    if math.prod(old) != math.prod(new):
        raise ValueError(f"cannot reshape {old} to {new}: the sizes differ.")
    return new


def is_regrouped(old: Sequence[int], new: Sequence[int]) -> bool:
    """Whether axes are only merged or split, as from (8, 32, 64) to (256, 64). It is not so
    from (100, 128) to (128, 100), nor if the number of elements changes."""
    if math.prod(old) != math.prod(new):
        return False
    many = lambda axes: sum(n != 1 for n in axes) > 1
    return not any(many(a) and many(b) for a, b in _matching_groups(old, new))


def _matching_groups(old: Sequence[int], new: Sequence[int]):
    """Pairs the shortest runs of axes that have equal products: (2, 2, 6) -> (4, 1, 3, 2)
    gives [((2, 2), (4,)), ((), (1,)), ((6,), (3, 2))]."""
    groups, i, j = [], 0, 0
    while i < len(old) or j < len(new):
        left, right = [], []
        if j >= len(new) or (i < len(old) and old[i] <= new[j]):
            left, i = [old[i]], i + 1
        else:
            right, j = [new[j]], j + 1
        while math.prod(left) != math.prod(right):
            if math.prod(left) < math.prod(right):
                left, i = [*left, old[i]], i + 1
            else:
                right, j = [*right, new[j]], j + 1
        groups.append((tuple(left), tuple(right)))
    return groups


def take(q: "QArray", index: Any) -> "QArray":
    """Returns `q[index]` for indices and slices; on a tiled axis, slices of whole tiles."""
    index = _plain_indices(index if isinstance(index, tuple) else (index,))
    used = sum(i is not None and i is not Ellipsis for i in index)
    if used > q.ndim:
        raise IndexError(f"too many indices: {used} for an array of shape {q.shape}.")
    fill = [slice(None)] * (q.ndim - used)
    dots = [n for n, i in enumerate(index) if i is Ellipsis]
    if dots:
        index[dots[0] : dots[0] + 1] = fill
    else:
        index += fill

    logical, padded = [], _logical(q)
    axis = 0
    for i in index:
        if i is None:
            logical.append(None)
            continue
        if _turns(q, axis) and not _is_whole(i):
            raise ValueError(
                f"cannot index axis {axis} with {i!r}: inputs are rotated along it. "
                "Dequantize first."
            )
        if padded[axis] is not None and not _is_whole(i):
            raise ValueError(
                f"cannot index axis {axis} with {i!r}: it is padded from {padded[axis]} to "
                f"{q.qvalue.shape[axis]}. Dequantize first."
            )
        if _is_whole(i):
            logical.append(padded[axis])
        elif not _is_scalar(i):
            logical.append(None)
        axis += 1

    # Arrays of indices move and merge axes, unless there is only one and it has one axis.
    arrays = [i for i in index if i is not None and not isinstance(i, slice)]
    is_alone = len(arrays) == 1 and getattr(arrays[0], "ndim", 0) == 1

    def take_part(part):
        own, axis = [], 0
        for i in index:
            own.append(i if i is None else _part_index(i, q, part, axis, is_alone))
            axis += i is not None
        return part[tuple(own)]

    kept = tuple(logical) if any(n is not None for n in logical) else None
    return q.map(take_part, logical=kept)


def _turns(q: "QArray", axis: int) -> bool:
    return q.pre_rotation is not None and axis == hadamard.axis_of(q.pre_rotation.shape)


def _plain_indices(index: tuple) -> list:
    """Turns lists into arrays, and masks into the positions where they are True."""
    plain = []
    for i in index:
        i = np.asarray(i) if isinstance(i, list) else i
        is_mask = getattr(i, "dtype", None) == bool
        plain += np.nonzero(i) if is_mask else [i]
    return plain


def _is_scalar(index: Any) -> bool:
    return isinstance(index, int) or getattr(index, "ndim", None) == 0


def _part_index(
    index: Any, q: "QArray", part: jax.Array, axis: int, is_alone: bool
) -> Any:
    """Translates `index` on the values' axis to a part with fewer elements there."""
    extent, count = q.qvalue.shape[axis], part.shape[axis]
    if count == extent or _is_whole(index):
        return index
    is_scalar = _is_scalar(index)
    if count == 1:
        if is_scalar or isinstance(index, slice):
            return 0 if is_scalar else slice(None)
        return slice(None) if is_alone else jnp.zeros_like(index)
    tile = extent // count
    if is_scalar:
        return index // tile
    if isinstance(index, slice):
        start, stop, step = index.indices(extent)
        if step == 1 and start % tile == 0 and stop % tile == 0 and start < stop:
            return slice(start // tile, stop // tile)
    raise ValueError(
        f"cannot take {index!r} on axis {axis} of {q.shape}: its scales are shared by "
        f"tiles of {tile}. Take whole tiles (slices at multiples of {tile}), or dequantize."
    )


def _is_whole(index: Any) -> bool:
    return isinstance(index, slice) and index == slice(None)
