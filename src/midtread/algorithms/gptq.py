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
              float weight ("static groups"), so that any order of rows may follow:
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
from typing import NamedTuple

import jax
import jax.numpy as jnp

from midtread.algorithms import clip
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
from midtread.numerics.qarray import QArray, calibrate, scales_of
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
    """

    damping: float = 0.01
    order: str = "activation"
    scales: str = "searched"
    rounds: int = 2
    block: int = 128

    def __post_init__(self):
        for name, known in (
            ("order", ("activation", "given")),
            ("scales", ("searched", "spec")),
        ):
            if getattr(self, name) not in known:
                raise ValueError(
                    f"gptq: {name}={getattr(self, name)!r} should be one of {known}."
                )
        if self.damping <= 0 or self.block < 1 or self.rounds < 0:
            raise ValueError(f"gptq: damping and block lie above 0 in {self}.")


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
    H = _checked(H, w, axes)
    target = w if target is None else target
    return _solve(w, target, H, spec, axes, options)


def _checked(H: jax.Array, w: jax.Array, axes: Axes) -> jax.Array:
    E, K, N = axes.extents(w.shape)
    H = H.astype(jnp.float32)
    while H.ndim < 4:
        H = H[None]
    G = H.shape[1]
    if H.shape != (E, G, K, K) or N % G:
        raise ValueError(
            f"second moments {H.shape} do not fit a weight {w.shape} that sums "
            f"{axes.summed}: give [{E}, G, {K}, {K}], where G divides {N}."
        )
    if not isinstance(H, jax.core.Tracer) and not bool(jnp.isfinite(H).all()):
        raise ValueError("second moments are not finite: were there NaNs in the data?")
    return H


@functools.partial(jax.jit, static_argnames=("spec", "axes", "options"))
def _solve(w, target, H, spec: Spec, axes: Axes, options: GptqOptions) -> Solved:
    padded, _ = spec.layout(w.shape)
    E, K, _ = axes.extents(padded)
    G = H.shape[1]
    real = axes.extents(w.shape)[1]
    if K != real:
        H = _pad_inputs(H, w.shape, padded, axes)
    # An input that is always 0: its row costs nothing, and may become anything.
    diagonal = jnp.diagonal(H, axis1=-2, axis2=-1)
    H = jnp.where(jnp.eye(K, dtype=bool) & (diagonal == 0)[..., None], 1.0, H)
    mean = jnp.mean(diagonal, axis=-1)[..., None, None]
    damped = H + jnp.eye(K) * options.damping * jnp.where(mean > 0, mean, 1.0)

    weights = jnp.mean(diagonal, axis=1) + options.damping * mean[..., 0].mean(1)
    weights = over_inputs(weights, axes, padded)
    nearest = scales_of(calibrate(w, spec), spec)
    nearest = nearest._replace(scale=nearest.scale.astype(w.dtype))
    scales = nearest
    if options.scales == "searched":
        cut = views.crop_to(jnp.broadcast_to(weights, padded), w.shape)
        scales = clip.search(target, spec, cut)

    parts = lambda m: m.reshape(E, K, G, -1).transpose(0, 2, 1, 3)  # [E, G, K, n]
    whole = lambda m: m.transpose(0, 2, 1, 3).reshape(E, K, -1)
    lay = lambda x: parts(as_matrices(views.pad_to(x, padded), axes))
    W = lay(target.astype(jnp.float32))
    grid = jax.tree.map(parts, spread(scales, spec, axes, padded))
    each = lambda f: jax.vmap(jax.vmap(f))
    Q = each(functools.partial(_feed_back, options=options))(W, damped, grid)
    tile = _tile(spec, axes, padded)
    if tile and options.rounds:
        free = spec.format.scale is None and spec.scale_rule is None
        refit = functools.partial(
            _descend,
            options=options,
            tile=tile,
            is_free=free and spec.method != "fixed",
        )
        Q, grid = each(refit)(W, Q, damped, grid)
        scales = _gathered(whole(grid.scale), scales, spec, axes, padded, w.dtype)
        grid = jax.tree.map(parts, spread(scales, spec, axes, padded))
    codes = encode(
        as_weight(whole(grid.nearest(Q)), axes, padded), spec, scales, w.shape
    )
    plain = encode(views.pad_to(target, padded), spec, nearest, w.shape)

    def cost(q: QArray) -> jax.Array:
        from midtread.numerics.qarray import dequantize

        error = lay(dequantize(q).astype(jnp.float32)) - W
        return jnp.sum(error * (H @ error)) / jnp.sum(W * (H @ W))

    costs = cost(codes), cost(plain)
    best = jax.tree.map(
        lambda a, b: jnp.where(costs[0] <= costs[1], a, b), codes, plain
    )
    return Solved(best, jnp.minimum(*costs), costs[1])


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


def _gathered(spread_scale, scales: Scales, spec, axes, padded, dtype) -> Scales:
    """Scales of tiles from scales of elements."""
    _, counts = spec.layout(padded)
    split, inside = views.split(padded, counts)
    full = as_weight(spread_scale, axes, padded).reshape(split)
    first = jnp.max(full, axis=inside).reshape(counts)
    return scales._replace(scale=first.astype(dtype))


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
_put = functools.partial(jax.lax.dynamic_update_index_in_dim, axis=0)


def _feed_back(W: jax.Array, H: jax.Array, grid: Grid, *, options: GptqOptions):
    """Rounded rows, each row's error made up for by those after it. W [K, n]."""
    K, n = W.shape
    order = jnp.arange(K)
    if options.order == "activation":
        order = jnp.argsort(-jnp.diagonal(H), stable=True)
    U = _inverse_factor(H[order][:, order])
    count, block = _blocks(K, options.block)
    extra = count * block - K
    rows = lambda x, fill: jnp.pad(x[order], ((0, extra), (0, 0)), constant_values=fill)
    W, scale = rows(W, 0), rows(grid.scale, 1)
    zero = None if grid.zero_point is None else rows(grid.zero_point, 0)
    U = (
        jnp.pad(U, (0, extra))
        .at[jnp.arange(K, K + extra), jnp.arange(K, K + extra)]
        .set(1)
    )
    behind = jnp.arange(K + extra)

    def work_off(b, state):
        W, Q = state
        cut = lambda x: jax.lax.dynamic_slice_in_dim(x, b * block, block)
        own = jax.lax.dynamic_slice(U, (b * block, b * block), (block, block))
        here = Grid(grid.format, cut(scale), None if zero is None else cut(zero))

        def round_row(i, state):
            rows, done, errors = state
            row = jax.tree.map(lambda part: part[i], here)
            value = row.nearest(rows[i])
            error = (rows[i] - value) / own[i, i]
            later = jnp.where(jnp.arange(block) > i, own[i], 0.0)
            rows = rows - later[:, None] * error
            return rows, _put(done, value, i), _put(errors, error, i)

        start = cut(W)
        _, done, errors = jax.lax.fori_loop(
            0, block, round_row, (start, jnp.zeros_like(start), jnp.zeros_like(start))
        )
        after = jnp.where(behind >= (b + 1) * block, cut(U), 0.0)
        W = W - after.T @ errors
        return W, jax.lax.dynamic_update_slice_in_dim(Q, done, b * block, 0)

    _, Q = jax.lax.fori_loop(0, count, work_off, (W, jnp.zeros_like(W)))
    return jnp.zeros((K, n)).at[order].set(Q[:K])


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
    K = len(W)
    slope = H @ (Q - W)

    def fit(b, state):
        Q, scale, slope = state
        cut = lambda x: jax.lax.dynamic_slice_in_dim(x, b * tile, tile)
        V, own = cut(Q), jax.lax.dynamic_slice(H, (b * tile, b * tile), (tile, tile))
        bend = jnp.sum(V * (own @ V), axis=0)
        step = -jnp.sum(V * cut(slope), axis=0) / jnp.where(bend > 0, bend, 1.0)
        step = jnp.clip(jnp.where(bend > 0, step, 0.0), -0.5, 0.5)
        columns = jax.lax.dynamic_slice_in_dim(H, b * tile, tile, axis=1)
        paste = functools.partial(jax.lax.dynamic_update_slice_in_dim, axis=0)
        Q = paste(Q, V * (1 + step), b * tile)
        scale = paste(scale, cut(scale) * (1 + step), b * tile)
        return Q, scale, slope + columns @ (V * step)

    Q, scale, _ = jax.lax.fori_loop(0, K // tile, fit, (Q, scale, slope))
    return Q, scale


def _fit_codes(W, Q, H, grid: Grid, block: int):
    """Every row in turn is set to the values nearest to what is best, all others as they
    are: q_k - (H (Q - W))_k / H_kk."""
    K = len(W)
    count, block = _blocks(K, block)
    extra = count * block - K
    rows = lambda x, fill: jnp.pad(x, ((0, extra), (0, 0)), constant_values=fill)
    slope = rows(H @ (Q - W), 0)
    H = (
        jnp.pad(H, (0, extra))
        .at[jnp.arange(K, K + extra), jnp.arange(K, K + extra)]
        .set(1)
    )
    Q, scale = rows(Q, 0), rows(grid.scale, 1)
    zero = None if grid.zero_point is None else rows(grid.zero_point, 0)

    def work_off(b, state):
        Q, slope = state
        cut = lambda x: jax.lax.dynamic_slice_in_dim(x, b * block, block)
        own = jax.lax.dynamic_slice(H, (b * block, b * block), (block, block))
        here = Grid(grid.format, cut(scale), None if zero is None else cut(zero))

        def set_row(i, state):
            values, slopes = state
            row = jax.tree.map(lambda part: part[i], here)
            best = row.nearest(values[i] - slopes[i] / own[i, i])
            slopes = slopes + own[:, i][:, None] * (best - values[i])
            return _put(values, best, i), slopes

        before = cut(Q)
        values, _ = jax.lax.fori_loop(0, block, set_row, (before, cut(slope)))
        columns = jax.lax.dynamic_slice_in_dim(H, b * block, block, axis=1)
        slope = slope + columns @ (values - before)
        return jax.lax.dynamic_update_slice_in_dim(Q, values, b * block, 0), slope

    Q, _ = jax.lax.fori_loop(0, count, work_off, (Q, slope))
    return Q[:K]
