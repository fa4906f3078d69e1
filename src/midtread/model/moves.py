"""Moves: how the operand of a matmul was made from a parameter, and how codes follow.

Between a parameter `w` and `x @ f(w)` a trace records equations. Those that arrange
elements anew, or negate them, can be done to codes and scales just as well, and then the
parameter is stored in codes though `f` stands before the matmul:

    trail(x)               what x was made from, each with the moves that lead from it to x
    ancestors(x)           those of them that have x's elements: cast, reshaped or transposed
    stored(spec, ...)      the parameter's shape and Spec, for a Spec of the operand
    follow(q, moves)       the moves, of codes and scales

What made an array is recorded by jit, or outside of jit by eager.py, and is read with
`intercept.made_by`. Three things stop a parameter from being stored so: a move that is none of ACTS; a slice
that cuts a tile; a reshape that tears scales apart. `trail` ends at the first, and the
others are told by None. An axis from which one index is taken, a stack of layers say, has a
scale for each index.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.extend
import jax.numpy as jnp

from midtread.model import intercept
from midtread.model.intercept import Equation
from midtread.numerics import views
from midtread.numerics.dtypes import is_wide
from midtread.numerics.qarray import QArray
from midtread.numerics.spec import Spec

# Primitives whose result is their operand: cast, reshaped, or laid out otherwise.
PLAIN = (
    "convert_element_type", "reshape", "copy", "name", "stop_gradient",
    "optimization_barrier", "sharding_constraint", "device_put",
    "reshard", "mesh_cast", "pvary", "pcast",
)  # fmt: skip


class Move(NamedTuple):
    """One equation between a parameter and an operand."""

    name: str  # of the primitive
    params: dict[str, Any]
    index: int  # which of its results goes on
    before: tuple[int, ...]  # shapes
    after: tuple[int, ...]
    starts: Sequence[Any] | None = None  # of a dynamic_slice, where they are known


class Axis(NamedTuple):
    """An axis of the operand."""

    source: int | None  # the parameter's axis that it is, None for a new one
    grain: int = 0  # it was cut at multiples of this; 0: it is whole
    repeats: int = 1  # each element stands there so often


# --- what an operand was made from ------------------------------------------------------------


def trail(x: Any) -> Iterator[tuple[Any, list[Move]]]:
    """Yields (ancestor, moves from it to x), x itself first, as far back as codes can follow."""
    moves: list[Move] = []
    while x is not None:
        inner = intercept.unwrap(x)
        for outer in intercept.mapped(x) if inner is not x else ():
            # vmap takes one of many
            sizes = {"dimensions": (outer.batch_dim,)}
            before = tuple(outer.val.shape)
            moves = [Move("vmap", sizes, 0, before, tuple(outer.shape)), *moves]
        x = inner
        yield x, moves
        equation = intercept.made_by(x)
        step = None if equation is None else _moves(equation, tuple(x.shape))
        if step is None:
            return
        more, x = step
        moves = [*more, *moves]


def ancestors(x: Any) -> Iterator[tuple[Any, tuple[int, ...] | None]]:
    """Yields `x`, and what it was made from by casts, reshapes, transposes and sharding
    constraints: the result holds the same values, so that rules for the one are rules for the
    other. Each comes with axes: axis i of `x` is axis axes[i] of what the layer reshaped the
    ancestor to, if it did; axes are None where transposes and reshapes mix."""
    same = tuple(range(getattr(x, "ndim", 0)))
    for array, moves in trail(x):
        axes, is_reshaped = same, False
        for move in reversed(moves):
            if move.name == "transpose":
                order = move.params["permutation"]
                axes = None if is_reshaped else axes and tuple(order[a] for a in axes)
            elif move.name not in (*PLAIN, "vmap") or not _keeps_values(move):
                return
            elif move.name != "vmap" and move.before != move.after:
                is_reshaped = True
        yield array, axes


def as_seen(param: Any, x: Any, moves: list[Move]) -> list[Move] | None:
    """Returns the moves to `x` as a module sees them whose parameter has an axis that vmap
    hides; None where the moves are of that axis too."""
    if not list(intercept.mapped(param)):
        return moves
    if not all(move.name in (*PLAIN, "vmap") for move in moves):
        return None
    if param.shape == x.shape:
        return []
    return [Move("reshape", {}, 0, tuple(param.shape), tuple(x.shape))]


def _moves(equation: Equation, after: tuple[int, ...]) -> tuple[list[Move], Any] | None:
    """Returns (the moves of an equation, what it moves); None for one that computes something."""
    if equation.primitive in ("jit", "pjit"):
        return _moves_inside(equation)
    if equation.primitive not in ACTS:
        return None
    operand, *starts = equation.operands
    if equation.primitive in PLAIN and starts:  # of several arrays, each is a result
        operand, starts = equation.operands[equation.index], []
    array = getattr(operand, "aval", operand)  # of a variable inside a jit
    if not hasattr(array, "shape"):
        return None
    before = tuple(array.shape)
    move = Move(
        equation.primitive,
        equation.params,
        equation.index,
        before,
        after,
        starts or None,
    )
    return [move], operand


def _moves_inside(call: Equation) -> tuple[list[Move], Any] | None:
    """Returns what `_moves` does, of a jitted function: from its result back to an argument."""
    closed, moves = call.params["jaxpr"], []
    jaxpr = closed.jaxpr
    var = jaxpr.outvars[call.index]
    for eqn in reversed(jaxpr.eqns):
        index = next((i for i, v in enumerate(eqn.outvars) if v is var), None)
        if index is None:
            continue
        inner = Equation(eqn.primitive.name, eqn.params, list(eqn.invars), index)
        step = _moves(inner, tuple(var.aval.shape))
        if step is None:
            return None
        more, var = step
        moves = [*(_with_starts(m, closed, call.operands) for m in more), *moves]
    argument = next((i for i, v in enumerate(jaxpr.invars) if v is var), None)
    return None if argument is None else (moves, call.operands[argument])


def _with_starts(move: Move, closed: Any, operands: list) -> Move:
    """Gives a dynamic_slice inside a jit the values that its starts have outside of it."""
    if move.starts is None or any(not hasattr(x, "shape") for x in operands):
        return move._replace(starts=None)
    fn = jax.extend.core.jaxpr_as_fun(
        closed.replace(jaxpr=closed.jaxpr.replace(outvars=list(move.starts)))
    )
    return move._replace(starts=lambda: fn(*operands))  # pyright: ignore


# --- the Spec of the parameter ----------------------------------------------------------------


def stored(
    spec: Spec, shape: Sequence[int], moves: list[Move]
) -> tuple[tuple[int, ...], Spec, list[Move]] | None:
    """Returns (the shape to store a parameter of `shape` in, its Spec, the moves from there), for
    `spec` of the operand that the moves make of it; None where codes cannot follow."""
    first = next((i for i, m in enumerate(moves) if not _regroups(m)), len(moves))
    regrouped = [m for m in moves[:first] if m.after != m.before]
    if not all(map(_keeps_values, moves[:first])):
        return None
    if regrouped and not views.is_regrouped(shape, regrouped[-1].after):
        return None
    shape = regrouped[-1].after if regrouped else tuple(shape)
    moves = moves[first:]
    axes: list[Axis] | None = [Axis(i) for i in range(len(shape))]
    for move in moves:
        axes = ACTS[move.name].axes(axes, move)
        if axes is None:
            return None
    channelwise = {a % len(axes) for a in spec.channelwise_axes}
    tiles = {a % len(axes): tile for a, tile in spec.tiled_axes}
    picked = set(range(len(shape))) - {axis.source for axis in axes}
    kept, kept_tiles = set(picked), {}
    for i, axis in enumerate(axes):
        if axis.source is None:
            continue
        if i in channelwise:
            kept.add(axis.source)
        if i in tiles:
            tile = _tile(tiles[i], axis, shape[axis.source])
            if tile is None:
                return None
            kept_tiles[axis.source] = tile
    if spec.format.tile and not kept_tiles:
        return None
    changes = {"channelwise_axes": tuple(sorted(kept)), "tiled_axes": kept_tiles}
    return shape, dataclasses.replace(spec, **changes), moves


def _regroups(move: Move) -> bool:
    """Whether it is a cast or a reshape. If it is done before all else, the parameter is stored
    in the shape that comes of it."""
    return move.name in PLAIN


def _tile(tile: Any, axis: Axis, extent: int) -> Any:
    """Returns the tile of the parameter's axis, None where the operand's would be cut."""
    if axis.grain == 0 and axis.repeats == 1:
        return tile
    if isinstance(tile, float) or tile % axis.repeats:
        return None
    tile //= axis.repeats
    is_whole = axis.grain == 0 or (axis.grain % tile == 0 and extent % tile == 0)
    return tile if is_whole else None


# --- codes and scales -------------------------------------------------------------------------


def follow(q: QArray, moves: list[Move]) -> QArray | None:
    """Does the moves to codes and scales; returns None where these cannot follow."""
    for move, after in zip(moves, [*moves[1:], None]):
        if move.name == "reshape" and after is not None and after.name == "reshape":
            continue  # only what comes of both counts
        try:
            moved = ACTS[move.name].codes(q, move)
        except ValueError:  # a tile would be cut, or scales torn apart
            return None
        if moved is None:
            return None
        q = moved
    return q


# --- the acts: what each does to axes, and to codes and scales --------------------------------


def _same(axes: list[Axis], _: Move) -> list[Axis]:
    return axes


def _keeps_values(move: Move) -> bool:
    """Whether it is no cast that rounds: what comes of that is a function of its operand."""
    return is_wide(move.params.get("new_dtype", jnp.float32))


def _cast_axes(axes: list[Axis], move: Move) -> list[Axis] | None:
    return axes if _keeps_values(move) else None


def _cast(q: QArray, move: Move) -> QArray | None:
    dtype = move.params.get("new_dtype", q.dtype)
    return q.astype(dtype) if is_wide(dtype) else None


def _negated(q: QArray, _: Move) -> QArray | None:
    is_signed = q.scale.dtype != jnp.float8_e8m0fnu
    return q.replace(scale=-q.scale) if is_signed else None


def _turned_axes(axes: list[Axis], move: Move) -> list[Axis]:
    return [axes[a] for a in move.params["permutation"]]


def _turned(q: QArray, move: Move) -> QArray:
    return q.transpose(tuple(move.params["permutation"]))


def _reshaped_axes(axes: list[Axis], move: Move) -> list[Axis] | None:
    """Axes of extent 1 come and go; a new axis merges with the one before it, which then
    repeats its elements."""
    left = [(axis, n) for axis, n in zip(axes, move.before) if n != 1]
    after: list[Axis] = []
    for extent in move.after:
        if extent == 1:
            after.append(Axis(None))
            continue
        if not left:
            return None
        axis, n = left.pop(0)
        while n < extent and left and left[0][0].source is None:
            n *= left[0][1]
            axis = axis._replace(repeats=axis.repeats * left.pop(0)[1])
        if n != extent:
            return None
        after.append(axis)
    return None if left else after


def _reshaped(q: QArray, move: Move) -> QArray:
    return q.reshape(move.after)


def _squeezed_axes(axes: list[Axis], move: Move) -> list[Axis]:
    gone = [a % len(axes) for a in move.params["dimensions"]]
    return [axis for i, axis in enumerate(axes) if i not in gone]


def _squeezed(q: QArray, move: Move) -> QArray:
    gone = [a % q.ndim for a in move.params["dimensions"]]
    return q[tuple(0 if i in gone else slice(None) for i in range(q.ndim))]


def _broadcast_axes(axes: list[Axis], move: Move) -> list[Axis]:
    came = dict(zip(move.params["broadcast_dimensions"], range(len(axes))))
    is_kept = lambda i: i in came and move.before[came[i]] == move.after[i]
    return [axes[came[i]] if is_kept(i) else Axis(None) for i in range(len(move.after))]


def _broadcast(q: QArray, move: Move) -> QArray | None:
    if q.logical is not None:
        return None
    places = move.params["broadcast_dimensions"]

    def spread(part: jax.Array, shape: Sequence[int]) -> jax.Array:
        return jax.lax.broadcast_in_dim(part, shape, places)

    def extents(part: jax.Array) -> list[int]:
        known = dict(zip(places, part.shape))
        return [known.get(i, 1) for i in range(len(move.after))]

    moved = q.map(lambda part: spread(part, extents(part)))
    return moved.replace(qvalue=jnp.broadcast_to(moved.qvalue, move.after))


def _sliced(q: QArray, move: Move) -> QArray:
    return q[tuple(_whole(s, n) for s, n in zip(_slices(move), q.shape))]


def _sliced_axes(axes: list[Axis], move: Move) -> list[Axis] | None:
    cut = []
    for axis, span, extent in zip(axes, _slices(move), move.before):
        if _whole(span, extent) == slice(None):
            cut.append(axis)
            continue
        if axis.repeats != 1:
            return None
        end = span.stop if span.stop != extent else 0
        grain = math.gcd(axis.grain, span.start, end) if span.step == 1 else 1
        cut.append(axis._replace(grain=grain or extent))
    return cut


def _whole(span: slice, extent: int) -> slice:
    return slice(None) if span == slice(0, extent, 1) else span


def _slices(move: Move) -> list[slice]:
    """Returns the static slices that a slice or a split takes, one of each axis."""
    params = move.params
    if move.name == "slice":
        steps = params["strides"] or (1,) * len(move.before)
        return list(map(slice, params["start_indices"], params["limit_indices"], steps))
    spans = [slice(0, n, 1) for n in move.before]
    sizes = [int(n) for n in params["sizes"]]
    start = sum(sizes[: move.index])
    spans[params["axis"]] = slice(start, start + sizes[move.index], 1)
    return spans


def _unstacked_axes(axes: list[Axis], move: Move) -> list[Axis]:
    return [axis for i, axis in enumerate(axes) if i != move.params["axis"]]


def _unstacked(q: QArray, move: Move) -> QArray:
    axis = move.params["axis"]
    return q[tuple(move.index if i == axis else slice(None) for i in range(q.ndim))]


def _taken_axes(axes: list[Axis], move: Move) -> list[Axis] | None:
    sizes = move.params["slice_sizes"]
    is_cut = [size != n for size, n in zip(sizes, move.before)]
    if any(cut and axis.repeats != 1 for cut, axis in zip(is_cut, axes)):
        return None
    return [
        axis
        if not cut
        else axis._replace(grain=1, source=None if size == 1 else axis.source)
        for axis, cut, size in zip(axes, is_cut, sizes)
    ]


def _taken(q: QArray, move: Move) -> QArray | None:
    starts = move.starts() if callable(move.starts) else move.starts
    if starts is None or q.logical is not None:
        return None
    sizes = move.params["slice_sizes"]
    spans = list(zip(starts, sizes, move.before))

    def take(part: jax.Array) -> jax.Array:
        for axis, (start, size, extent) in enumerate(spans):
            if size == extent or part.shape[axis] == 1:
                continue
            start = jnp.clip(start, 0, extent - size)
            if size != 1 and part.shape[axis] != extent:
                raise ValueError("a slice from a traced index may cut a tile.")
            start = start // (extent // part.shape[axis])
            part = jax.lax.dynamic_slice_in_dim(part, start, size, axis)
        return part

    return q.map(take)


def _reversed_axes(axes: list[Axis], move: Move) -> list[Axis]:
    return [
        a._replace(grain=math.gcd(a.grain, n)) if i in move.params["dimensions"] else a
        for i, (a, n) in enumerate(zip(axes, move.before))
    ]


def _reversed(q: QArray, move: Move) -> QArray | None:
    if q.logical is not None:
        return None
    return q.map(lambda part: jax.lax.rev(part, move.params["dimensions"]))


class Act(NamedTuple):
    """A primitive that codes can follow."""

    axes: Callable[[Any, Move], list[Axis] | None]
    codes: Callable[[QArray, Move], QArray | None]


ACTS = {
    **dict.fromkeys(PLAIN, Act(_cast_axes, _cast)),
    "reshape": Act(_reshaped_axes, _reshaped),
    "transpose": Act(_turned_axes, _turned),
    "squeeze": Act(_squeezed_axes, _squeezed),
    "broadcast_in_dim": Act(_broadcast_axes, _broadcast),
    "slice": Act(_sliced_axes, _sliced),
    "split": Act(_sliced_axes, _sliced),
    "unstack": Act(_unstacked_axes, _unstacked),
    "dynamic_slice": Act(_taken_axes, _taken),
    "rev": Act(_reversed_axes, _reversed),
    "neg": Act(_same, _negated),
    # One of many, and nobody knows which.
    "vmap": Act(_squeezed_axes, lambda q, move: None),
}
