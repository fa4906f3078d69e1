"""GPTQ: codes whose error costs the layer's output least.

Rounding a weight W [K, N] to Q moves the output for input x by x (Q - W), so over all data

    cost(Q) = tr (Q - W)^T H (Q - W)        H = sum of x x^T over tokens, K x K

Rounding to nearest minimises that only where H is diagonal. Frantar et al. 2022 round one
row after another and let the rows that are still to come make up for each row's error:
with U upper triangular, U^T U = H^-1,

    e = (w_k - q_k) / U_kk            w_j -= U_kj e      for all j > k

A block of rows is worked off inside itself, and its errors reach the rest as one matmul.
Three things are added to the paper, each by itself worth as much as the feedback:

    scales    are searched under the diagonal of H first (clip.py), and are those of the
              float weight ("static groups"), so that any order of rows may follow; the
              paper's, of a tile as it stands when its turn comes, are static_groups=False
    order     rows whose inputs are largest go first, while all others can make up for them
    descent   afterwards every code is set to the best for all others as they are now, and
              every scale to the best for its codes: neither can raise the cost

Nothing here is about integers: a row is rounded by its format's own rounding, so floats,
MX and lookup formats, zero points and any sharing of scales go the same way.

H may come in parts: [E, G, K, K] is one matrix for each of G equal runs of the outputs,
such as the heads of an attention's values, whose errors reach the loss by other tokens.
"""

import dataclasses
import functools
import math
import numbers
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from midtread.algorithms import clip
from midtread.algorithms.stages import SEARCH_LESS
from midtread.algorithms.weight import (
    MATRIX,
    Axes,
    Grid,
    as_matrices,
    as_weight,
    encode,
    over_inputs,
    spread,
)
from midtread.numerics import views
from midtread.numerics.qarray import QArray, calibrate, dequantize, scales_of
from midtread.numerics.scales import Scales
from midtread.numerics.spec import Spec


@dataclasses.dataclass(frozen=True)
class GptqOptions:
    """How GPTQ is done.

    Args:
        damping: share of H's mean diagonal that is added to it: trust in the data.
        order: "activation", largest inputs first; "given", as they are stored.
        scales: "searched" under H's diagonal, or "spec" for the Spec's own calibration.
        rounds: of descent on scales and codes after the feedback; 0 is the paper's GPTQ.
        block: rows that are worked off before the others hear of it.
        static_groups: scales are those of the float weight. False: those of a tile are found
            when its turn comes, of its rows as they have been moved by then, which is the
            paper's way; rows then go in the given order. "block": those of all tiles of a block
            are found when its turn comes, as the paper's own code does, and Qwix's.
    """

    damping: float = 0.01
    order: str = "activation"
    scales: str = "searched"
    rounds: int = 2
    block: int = 64
    static_groups: bool | str = True

    def __post_init__(self):
        for name, known in (
            ("order", ("activation", "given")),
            ("scales", ("searched", "spec")),
            ("static_groups", (True, False, "block")),
        ):
            if getattr(self, name) not in known:
                raise ValueError(
                    f"gptq: {name}={getattr(self, name)!r} should be one of {known}."
                )
        for name, least in (("rounds", 0), ("block", 1)):
            value = getattr(self, name)
            if not isinstance(value, numbers.Integral) or value < least:
                raise ValueError(
                    f"gptq: {name}={value!r} should be a whole number from {least} on."
                )
        if not 0 < self.damping < math.inf:
            raise ValueError(
                f"gptq: damping={self.damping!r} should be a number above 0."
            )
        if self.static_groups is not True and self.order == "activation":
            raise ValueError(
                "gptq: scales that are found tile by tile need rows tile by tile: write "
                f"GptqOptions(static_groups={self.static_groups!r}, order='given')."
            )


DEFAULT = GptqOptions()


class Solved(NamedTuple):
    array: QArray
    cost: jax.Array  # of the codes, relative to that of all zeros
    rounded: jax.Array  # the same for rounding to nearest under the Spec's calibration


def solve(
    w: jax.Array,
    spec: Spec,
    H: jax.Array,
    axes: Axes = MATRIX,
    options: GptqOptions = DEFAULT,
    target: jax.Array | None = None,
) -> Solved:
    """Quantizes `w` so that the output of its layer changes least.

    w [K, N] and H [K, K] for a matrix; [E, K, K] or [E, G, K, K] for stacks of them.

    >>> x = jax.random.normal(jax.random.key(0), (256, 16)) @ jnp.tri(16)
    >>> w = jax.random.normal(jax.random.key(1), (16, 8))
    >>> solved = solve(w, Spec("int4", channelwise_axes=(1,)), x.T @ x)
    >>> bool(solved.cost < solved.rounded / 2)
    True

    Args:
        w: a weight.
        spec: how it is to be quantized.
        H: second moments of the layer's inputs: see collect.py.
        axes: which axes of `w` are summed, kept and batched.
        options: how it is done.
        target: what the codes should stand for, where that is not `w`: see correct.py.

    Returns:
        The QArray, and what it costs beside rounding to nearest. It is rounding to nearest
        itself where that is cheaper.

    Raises:
        ValueError: H does not fit, or is not finite.
    """
    targets = None if target is None else [target]
    (solved,) = solve_together([w], spec, H, axes, options, targets)
    return solved


def solve_together(
    ws: Sequence[jax.Array],
    spec: Spec,
    H: jax.Array,
    axes: Axes = MATRIX,
    options: GptqOptions = DEFAULT,
    targets: Sequence[jax.Array] | None = None,
) -> list[Solved]:
    """`solve` of weights that have their inputs in common, query and key say: columns know
    nothing of each other, so they are worked off side by side."""
    for w in ws:
        H = _checked(H, w, axes)
    targets = ws if targets is None else targets
    is_traced = any(isinstance(x, jax.core.Tracer) for x in (*ws, *targets, H))
    run = _solve if is_traced else _solve_once
    return run(tuple(ws), tuple(targets), H, spec, axes, options)


def _checked(H: jax.Array, w: jax.Array, axes: Axes) -> jax.Array:
    E, K, N = axes.extents(w.shape)
    H = H.astype(jnp.float32)
    if H.ndim == 2:
        H = H[None]
    if H.ndim == 3:
        H = H[:, None]
    G = H.shape[1] if H.ndim == 4 else 0
    if not G or H.shape != (E, G, K, K) or N % G:
        raise ValueError(
            f"second moments {H.shape} do not fit a weight {w.shape} that sums "
            f"{axes.summed}: give [{E}, G, {K}, {K}], where G divides {N}."
        )
    if not isinstance(H, jax.core.Tracer) and not bool(jnp.isfinite(H).all()):
        raise ValueError("second moments are not finite: were there NaNs in the data?")
    return H


class _Start(NamedTuple):
    """One weight before it is solved."""

    padded: tuple[int, ...]
    W: jax.Array  # [E, G, K, n]
    nearest: Scales  # of the Spec's own calibration
    scales: Scales
    grid: Grid  # the scales, one for every element of W


def _solve(ws, targets, H, spec: Spec, axes: Axes, options: GptqOptions):
    shape = spec.layout(ws[0].shape)[0]
    E, K, _ = axes.extents(shape)
    G = H.shape[1]
    if K != axes.extents(ws[0].shape)[1]:
        H = _pad_inputs(H, ws[0].shape, shape, axes)
    # An input that is always 0: its row costs nothing, and may become anything.
    moments, diagonal = H, jnp.diagonal(H, axis1=-2, axis2=-1)
    H = jnp.where(jnp.eye(K, dtype=bool) & (diagonal == 0)[..., None], 1.0, H)
    mean = jnp.mean(diagonal, axis=-1)[..., None, None]
    damped = H + jnp.eye(K) * options.damping * jnp.where(mean > 0, mean, 1.0)
    weights = jnp.mean(diagonal, axis=1) + options.damping * mean[..., 0].mean(1)

    parts = lambda m: m.reshape(E, K, G, -1).transpose(0, 2, 1, 3)  # [E, G, K, n]
    joined = lambda m: m.transpose(0, 2, 1, 3).reshape(E, K, -1)
    lay = lambda x, padded: parts(as_matrices(views.pad_to(x, padded), axes))
    lay_scales = lambda scales, padded: jax.tree.map(
        parts, spread(scales, spec, axes, padded)
    )

    def start(w, target) -> _Start:
        padded, _ = spec.layout(w.shape)
        nearest = scales_of(calibrate(w, spec), spec)
        nearest = nearest._replace(scale=nearest.scale.astype(w.dtype))
        scales = nearest
        if options.scales == "searched":
            over = jnp.broadcast_to(over_inputs(weights, axes, padded), padded)
            scales = clip.search(target, spec, views.crop_to(over, w.shape))
        W = lay(target.astype(jnp.float32), padded)
        return _Start(padded, W, nearest, scales, lay_scales(scales, padded))

    starts = [start(w, target) for w, target in zip(ws, targets)]
    beside = lambda *arrays: jnp.concatenate(arrays, axis=-1)
    W = beside(*(s.W for s in starts))
    grid = jax.tree.map(beside, *(s.grid for s in starts))
    each = _over_stacks(E * G)
    tile = _tile(spec, axes, shape)
    moves = options.static_groups is not True and tile != K
    if moves:
        if not has_own_scales(spec, axes, shape):
            raise ValueError(
                f"gptq: static_groups={options.static_groups!r} needs a scale of its own for "
                f"every run of inputs, and {spec} has none, one above them all, or a fixed one."
            )
        feed = functools.partial(_feed_back_by_tile, spec=spec, tile=tile, options=options)  # fmt: skip
        Q, grid = each(feed)(W, damped, grid)
    else:
        Q = each(functools.partial(_feed_back, options=options))(W, damped, grid)
    is_refit = bool(tile and options.rounds)
    if is_refit:
        free = spec.format.scale is None and spec.scale_rule is None
        refit = functools.partial(
            _descend,
            options=options,
            tile=tile,
            is_free=free and spec.method != "fixed",
        )
        Q, grid = each(refit)(W, Q, damped, grid)

    def finish(w, target, start: _Start, Q, found: Grid) -> Solved:
        padded, scales, grid = start.padded, start.scales, start.grid
        gathered = lambda part: _gathered(joined(part), spec, axes, padded)
        if is_refit or moves:
            scales = scales._replace(scale=gathered(found.scale).astype(w.dtype))
            if scales.zero_point is not None:
                zero = gathered(found.zero_point).astype(scales.zero_point.dtype)
                scales = scales._replace(zero_point=zero)
            grid = lay_scales(scales, padded)
        values = as_weight(joined(grid.nearest(Q)), axes, padded)
        codes = encode(values, spec, scales, w.shape)
        plain = encode(views.pad_to(target, padded), spec, start.nearest, w.shape)
        value = lambda q: lay(dequantize(q).astype(jnp.float32), padded)
        errors = [value(q) - start.W for q in (codes, plain)]
        listed = [start.W, *errors]
        moved = jnp.split(_matmul(moments, beside(*listed)), 3, axis=-1)
        whole, *sizes = [jnp.sum(a * b) for a, b in zip(listed, moved)]
        # A weight of zeros is exact: its costs are 0 of 0.
        costs = [size / jnp.where(whole > 0, whole, 1.0) for size in sizes]
        best = jax.tree.map(
            lambda a, b: jnp.where(costs[0] <= costs[1], a, b), codes, plain
        )
        return Solved(best, jnp.minimum(*costs), costs[1])

    ends = np.cumsum([s.W.shape[-1] for s in starts])[:-1].tolist()
    cut = lambda x: jnp.split(x, ends, axis=-1)
    zeros = None if grid.zero_point is None else cut(grid.zero_point)
    grids = [
        Grid(grid.format, scale, None if zeros is None else zeros[i])
        for i, scale in enumerate(cut(grid.scale))
    ]
    return [finish(*one) for one in zip(ws, targets, starts, cut(Q), grids)]


_solve_once = jax.jit(
    _solve, static_argnames=("spec", "axes", "options"), compiler_options=SEARCH_LESS
)


def _over_stacks(size: int):
    """f of matrices as one of stacks [E, G, ...]; of one matrix alone it is not batched,
    which a CPU's matmuls are slower for."""
    if size > 1:
        return lambda f: jax.vmap(jax.vmap(f))

    def alone(f):
        def run(*stacks):
            parts = jax.tree.map(lambda x: x[0, 0], stacks)
            return jax.tree.map(lambda x: x[None, None], f(*parts))

        return run

    return alone


def _pad_inputs(H, shape, padded, axes: Axes):
    """Moments of padding: it is always 0."""
    old, new = ([s[a] for a in axes.summed] for s in (shape, padded))
    E, G = H.shape[:2]
    H = views.pad_to(H.reshape(E, G, *old, *old), (E, G, *new, *new))
    K = axes.extents(padded)[1]
    return H.reshape(E, G, K, K)


def _tile(spec: Spec, axes: Axes, padded) -> int:
    """Rows of the matrix that share their columns' scales; 0 where columns share too."""
    _, counts = spec.layout(padded)
    if any(counts[a] != padded[a] for a in (*axes.batch, *axes.kept)):
        return 0
    cut = [i for i, a in enumerate(axes.summed) if counts[a] != padded[a]]
    if cut and any(counts[a] != 1 for a in axes.summed[cut[0] + 1 :]):
        return 0  # not a run of neighbours
    return axes.extents(padded)[1] // math.prod(counts[a] for a in axes.summed)


def _gathered(spread_part, spec, axes, padded) -> jax.Array:
    """Scales of tiles from scales of elements, or zero points."""
    _, counts = spec.layout(padded)
    split, inside = views.split(padded, counts)
    full = as_weight(spread_part, axes, padded).reshape(split)
    return jnp.max(full, axis=inside).reshape(counts)


def _inverse_factor(H: jax.Array) -> jax.Array:
    """U, upper triangular, with U^T U = H^-1. By the factor of H turned around, so that H
    itself is never inverted."""
    lower = jnp.linalg.cholesky(H[::-1, ::-1])
    return jax.scipy.linalg.solve_triangular(
        lower[::-1, ::-1], jnp.eye(len(H)), lower=False
    )


def _blocks(K: int, block: int) -> tuple[int, int]:
    """(blocks, rows of each): of even size, not above `block`."""
    count = -(-K // min(block, K))
    return count, -(-K // count)


# Unlike x.at[i].set(row), which is a scatter, this is written in place.
_paste = functools.partial(jax.lax.dynamic_update_slice_in_dim, axis=0)
# Rows of a block that are written out: on a GPU a loop of single rows is all launches, and
# between written-out rows only numbers pass. They take longer to compile, which pays for wide
# weights alone, and on a CPU never.
UNROLLED, WIDE = {"gpu": 8}, 4096


def _matmul(a: jax.Array, b: jax.Array) -> jax.Array:
    """In float32: errors of a lesser precision would be fed back as well."""
    return jnp.matmul(a, b, precision="highest")


def _rows_in_turn(start, own, grid: Grid, finish):
    """Rounds the rows of a block one after another, each moved by those before it.

        row_i = start_i - sum over j < i of own_ij done_j     done_i = finish(i, row, value)

    What came before the rows that are written out together reaches them by a matmul.

    Args:
        start: [block, n], where rows stand when those of the block have done nothing.
        own: [block, block], below the diagonal.

    Returns:
        (values, done), [block, n] both.
    """
    rows, columns = start.shape
    most = UNROLLED.get(jax.default_backend(), 1) if columns >= WIDE else 1
    size = math.gcd(rows, most)

    def few(turn, state):
        values, done = state
        at = turn * size
        cut = lambda x: jax.lax.dynamic_slice_in_dim(x, at, size)
        mine = cut(own)
        rows = cut(start) - _matmul(mine, done)
        near = jax.lax.dynamic_slice_in_dim(mine, at, size, axis=1)
        here = jax.tree.map(cut, grid)
        new: list[jax.Array] = []
        listed = []
        for i in range(size):
            row = rows[i]
            for j, other in enumerate(new):
                row = row - near[i, j] * other
            value = jax.tree.map(lambda part, i=i: part[i], here).nearest(row)
            listed.append(value)
            new.append(finish(at + i, row, value))
        return _paste(values, jnp.stack(listed), at), _paste(done, jnp.stack(new), at)

    zeros = jnp.zeros_like(start)
    return jax.lax.fori_loop(0, len(start) // size, few, (zeros, zeros))


def _padded(K: int, block: int, *arrays):
    """(blocks, rows of each, arrays with as many rows as those have)."""
    count, block = _blocks(K, block)
    extra = ((0, count * block - K), (0, 0))
    return count, block, [jnp.pad(x, extra) for x in arrays]


def _square(M: jax.Array, rows: int) -> jax.Array:
    """M with rows of the identity below it, and columns of zeros beside it."""
    K = len(M)
    return jnp.pad(M, (0, rows - K)) + jnp.diag((jnp.arange(rows) >= K).astype(M.dtype))


def _rows_of(grid: Grid, rows: int, order: jax.Array | None = None) -> Grid:
    """The grid's rows in that order, and as many more as are missing, of scale 1."""
    extra = ((0, rows - len(grid.scale)), (0, 0))
    put = lambda x, fill: jnp.pad(
        x if order is None else x[order], extra, constant_values=fill
    )
    zero = None if grid.zero_point is None else put(grid.zero_point, 0)
    return dataclasses.replace(grid, scale=put(grid.scale, 1), zero_point=zero)


def _feed_back(W: jax.Array, H: jax.Array, grid: Grid, *, options: GptqOptions):
    """Rounded rows, each row's error made up for by those after it. W [K, n]."""
    K, n = W.shape
    order = jnp.arange(K)
    if options.order == "activation":
        order = jnp.argsort(-jnp.diagonal(H), stable=True)
    U = _inverse_factor(H[order][:, order])
    count, block, (W,) = _padded(K, options.block, W[order])
    down = _square(U, len(W)).T
    diagonal = jnp.diagonal(down)
    grid = _rows_of(grid, len(W), order)

    def work_off(b, state):
        Q, errors = state
        at = b * block
        cut = lambda x: jax.lax.dynamic_slice_in_dim(x, at, block)
        mine = cut(down)
        own = jnp.tril(jax.lax.dynamic_slice_in_dim(mine, at, block, axis=1), -1)
        start = cut(W) - _matmul(mine, errors)
        finish = lambda i, row, value: (row - value) / diagonal[at + i]
        values, new = _rows_in_turn(start, own, jax.tree.map(cut, grid), finish)
        return _paste(Q, values, at), _paste(errors, new, at)

    zeros = jnp.zeros_like(W)
    Q, _ = jax.lax.fori_loop(0, count, work_off, (zeros, zeros))
    return jnp.zeros((K, n)).at[order].set(Q[:K])


def has_own_scales(spec: Spec, axes: Axes, shape: Sequence[int]) -> bool:
    """Whether every run of inputs, for every output, has a scale that is found for it alone."""
    padded, _ = spec.layout(tuple(shape))
    is_above = (spec.scale_rule or spec.format.scale) == "two_level"
    is_own = not is_above and spec.method != "fixed"
    return is_own and _tile(spec, axes, padded) != 0


def _feed_back_by_tile(
    W: jax.Array, H: jax.Array, grid: Grid, *, spec: Spec, tile: int, options
):
    """(rounded rows, the grid they lie on): a tile's scales are of its rows as they stand when
    all before them, or before their block, are rounded. W [K, n]."""
    of_tile = dataclasses.replace(spec, channelwise_axes=(1,), tiled_axes={0: tile})
    K = len(W)
    tiles = min(options.block, K) // tile if options.static_groups == "block" else 1
    block = tile * max(1, tiles)
    count = -(-K // block)
    W = jnp.pad(W, ((0, count * block - K), (0, 0)))
    down, grid = _square(_inverse_factor(H), len(W)).T, _rows_of(grid, len(W))
    weights = jnp.diagonal(_square(H, len(W)))[:, None]

    def work_off(b, state):
        Q, errors, grid = state
        at = b * block
        cut = lambda x: jax.lax.dynamic_slice_in_dim(x, at, block)
        mine = cut(down)
        own = jnp.tril(jax.lax.dynamic_slice_in_dim(mine, at, block, axis=1), -1)
        start = cut(W) - _matmul(mine, errors)
        if options.scales == "searched":
            scales = clip.search(start, of_tile, cut(weights))
        else:
            scales = scales_of(calibrate(start, of_tile), of_tile)
        here = spread(scales, of_tile, MATRIX, start.shape)
        here = jax.tree.map(lambda x: x[0], here)
        diagonal = jnp.diagonal(jax.lax.dynamic_slice_in_dim(mine, at, block, axis=1))
        finish = lambda i, row, value: (row - value) / diagonal[i]
        values, new = _rows_in_turn(start, own, here, finish)
        grid = jax.tree.map(lambda x, part: _paste(x, part, at), grid, here)
        return _paste(Q, values, at), _paste(errors, new, at), grid

    zeros = jnp.zeros_like(W)
    Q, _, grid = jax.lax.fori_loop(0, count, work_off, (zeros, zeros, grid))
    return Q[:K], jax.tree.map(lambda x: x[:K], grid)


def _descend(W, Q, H, grid: Grid, *, options: GptqOptions, tile: int, is_free: bool):
    """Turns of best scales for the codes, and best codes for the scales. W, Q [K, n]."""

    def turn(_, state):
        Q, scale = state
        if is_free:
            Q, scale = _fit_scales(W, Q, H, scale, tile)
        grid_ = dataclasses.replace(grid, scale=scale)
        return _fit_codes(W, Q, H, grid_, options.block), scale

    Q, scale = jax.lax.fori_loop(0, options.rounds, turn, (Q, grid.scale))
    return Q, dataclasses.replace(grid, scale=scale)


def _fit_scales(W, Q, H, scale, tile: int):
    """For every tile of every column the factor of its values that costs least, all others
    as they are: d/df of cost(Q + f V) is 0 at f = -(V . H(Q - W)) / (V . H V)."""

    def fit(b, state):
        Q, scale = state
        cut = lambda x: jax.lax.dynamic_slice_in_dim(x, b * tile, tile)
        V, mine = cut(Q), cut(H)
        own = jax.lax.dynamic_slice_in_dim(mine, b * tile, tile, axis=1)
        slope = _matmul(mine, Q - W)
        bend = jnp.sum(V * _matmul(own, V), axis=0)
        step = -jnp.sum(V * slope, axis=0) / jnp.where(bend > 0, bend, 1.0)
        step = jnp.clip(jnp.where(bend > 0, step, 0.0), -0.5, 0.5)
        Q = _paste(Q, V * (1 + step), b * tile)
        return Q, _paste(scale, cut(scale) * (1 + step), b * tile)

    return jax.lax.fori_loop(0, len(W) // tile, fit, (Q, scale))


def _fit_codes(W, Q, H, grid: Grid, block: int):
    """Every row in turn is set to the values nearest to what is best, all others as they
    are: q_k - (H (Q - W))_k / H_kk."""
    K = len(W)
    count, block, (W, Q) = _padded(K, block, W, Q)
    share = _square(H, len(W))
    share = share / jnp.diagonal(share)[:, None]
    grid = _rows_of(grid, len(W))

    def work_off(b, state):
        Q, error = state
        at = b * block
        cut = lambda x: jax.lax.dynamic_slice_in_dim(x, at, block)
        mine, before = cut(share), cut(Q)
        own = jnp.tril(jax.lax.dynamic_slice_in_dim(mine, at, block, axis=1), -1)
        start = before - _matmul(mine, error)
        finish = lambda i, row, value: value - before[i]
        values, moved = _rows_in_turn(start, own, jax.tree.map(cut, grid), finish)
        return _paste(Q, values, at), _paste(error, cut(error) + moved, at)

    Q, _ = jax.lax.fori_loop(0, count, work_off, (Q, Q - W))
    return Q[:K]
