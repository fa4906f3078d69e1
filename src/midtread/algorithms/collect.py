"""Collect: what the algorithms know of the data that a layer sees.

    second moments   H = sum over tokens of weight * x x^T     [E, G, K, K]
    cross moments    C = sum of weight * x (x' - x)^T          x' of the float model
    largest inputs   max |x_k|                                 [E, K]
    sums             of x_k, but not of experts                [E, K]
    sizes            how many |x| lie below every power of root 2, where asked for

For a layer by itself every token has the weight 1, and the error that H measures is that of
the layer's output. What matters is what the error does further on. To first order a change
d of an output changes the loss by g . d, where g is the loss's gradient there; in the mean
square over tokens that is d^T (g g^T) d, and a token should count by its |g|^2 (averaged
over each of G equal runs of outputs: Kim et al. 2025, "GuidedQuant"). A first token whose
inputs are huge, and which nobody attends to, then no longer owns the moments of the values.
But squares of gradients have long tails: a few tokens that the model gets wrong would own
everything, and codes be fitted to them. So the weight is |g| itself, the root of the mean
square: tokens that reach nothing still count for nothing, and no few count for all.
Gradients are those of the float model, found once; inputs are those that the quantized
layers before give.

Without a loss a random sign on every output takes its place: then what counts is how far
an error moves the outputs, whatever they are for.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from midtread.algorithms.program import Program, Site, bind, is_literal
from midtread.numerics import hadamard


def token_labels(site: Site) -> tuple[str, ...]:
    """Labels of the output that run over tokens."""
    if site.c.name == "conv_general_dilated":
        return tuple(x for x in site.c.out if x != "o")
    own = (*site.labels, *site.groups)
    return tuple(x for x in site.c.out if x not in own)


def batch_labels(site: Site) -> tuple[str, ...]:
    """Labels that input, weight and output share: E, where it is no expert's."""
    return tuple(
        site.labels[a] for a in site.axes.batch if site.labels[a] in site.c.out
    )


def why_not(site: Site) -> str | None:
    """Why second moments of a site's inputs are not known, if they are not."""
    if site.c.name != "conv_general_dilated":
        return None
    c: Any = site.c
    if c.feature_groups * c.batch_groups > 1:
        return "a convolution in groups has other inputs for every group of outputs"
    return None


def rows(site: Site, x: jax.Array) -> jax.Array:
    """The inputs of a site as [B, T, K]: K as the stored weight's summed axes go."""
    if site.c.name == "conv_general_dilated":
        return _patches(site, x)
    batch, tokens = batch_labels(site), token_labels(site)
    summed = tuple(site.labels[a] for a in site.axes.summed)
    order = [site.inputs.index(label) for label in (*batch, *tokens, *summed)]
    x = x.transpose(order)
    b, t = len(batch), len(batch) + len(tokens)
    cut = [x.shape[:b], x.shape[b:t], x.shape[t:]]
    return x.reshape([math.prod(part) for part in cut]).astype(jnp.float32)


def _patches(site: Site, x: jax.Array) -> jax.Array:
    """What every output position of a convolution sees, [1, T, window * channels]."""
    c: Any = site.c
    numbers = c.numbers
    window = [c.rhs_shape[a] for a in numbers.rhs_spec[2:]]
    seen = jax.lax.conv_general_dilated_patches(
        x.astype(jnp.float32), window, c.strides, c.padding, c.lhs_dilation,
        c.rhs_dilation, dimension_numbers=numbers,
    )  # fmt: skip
    channels = x.shape[numbers.lhs_spec[1]]
    seen = jnp.moveaxis(seen, numbers.out_spec[1], -1)
    seen = seen.reshape(-1, channels, *window)  # channels first, then the window
    # labels of the weight: "c" for channels, others for the window in the order of rhs_spec
    spatial = [site.c.rhs[a] for a in numbers.rhs_spec[2:]]
    stored = [site.labels[a] for a in site.axes.summed]
    order = [0] + [1 + ["c", *spatial].index(label) for label in stored]
    return seen.transpose(order).reshape(1, len(seen), -1)


def token_weights(site: Site, g: jax.Array, groups: int) -> jax.Array:
    """[B, T, G]: the root mean square of a gradient, per token and run of outputs."""
    batch, tokens = batch_labels(site), token_labels(site)
    kept = [x for x in site.labels if x not in batch and x in site.c.out]
    if site.c.name == "conv_general_dilated":
        kept = ["o"]
    order = [site.c.out.index(label) for label in (*batch, *tokens, *kept)]
    g = g.transpose(order)
    b, t = len(batch), len(batch) + len(tokens)
    cut = [math.prod(part) for part in (g.shape[:b], g.shape[b:t], g.shape[t:])]
    g = g.reshape(cut[0], cut[1], groups, -1).astype(jnp.float32)
    return jnp.sqrt(jnp.mean(jnp.square(g), axis=-1))


def moments(
    site: Site,
    x: jax.Array,
    weights: jax.Array | None,
    sizes: jax.Array | None,
    other: jax.Array | None = None,
    signs: jax.Array | None = None,
    histograms: bool = False,
) -> dict[str, jax.Array]:
    """The statistics of one batch; those of all batches are their sums.

    Args:
        site: where.
        x: the contraction's input.
        weights: [B, T, G] of the tokens; None: 1 for all.
        sizes: rows of every expert, of a ragged_dot.
        other: the input in the float model, for cross moments.
        signs: of a rotation that the inputs go through first.
        histograms: whether sizes are counted.

    Returns:
        "H" [E, G, K, K], "count" [E], "largest" [E, K] (a maximum, not a sum), "sum" [E, K],
        "C", "sizes" [BINS].
    """
    turned = lambda X: X if signs is None else hadamard.turn(X, signs.reshape(1, 1, -1))
    X = turned(rows(site, x))
    is_even = weights is None
    weights = jnp.ones((*X.shape[:2], 1)) if weights is None else weights
    gap = None if other is None else turned(rows(site, other)) - X
    if sizes is None:
        weigh = lambda Y: jnp.einsum("btg,btk,btl->bgkl", weights, X, Y)
        if is_even:
            weigh = lambda Y: (
                squares(X) if Y is X else jnp.einsum("btk,btl->bkl", X, Y)
            )[:, None]
        largest = jnp.max(jnp.abs(X), axis=1)
        count = jnp.full(len(X), X.shape[1], jnp.float32)
    else:  # rows of X are sorted by expert
        ends = jnp.cumsum(sizes)
        row = jnp.arange(X.shape[1], dtype=ends.dtype)
        own = (row >= (ends - sizes)[:, None]) & (row < ends[:, None])  # [E, T]

        def weigh(Y):
            one = lambda mine: jnp.einsum(
                "tg,tk,tl->gkl", weights[0] * mine[:, None], X[0], Y[0]
            )
            return jax.lax.map(one, own.astype(jnp.float32))

        largest = jax.lax.map(
            lambda mine: jnp.max(jnp.abs(X[0]) * mine[:, None], axis=0),
            own.astype(jnp.float32),
        )
        count = sizes.astype(jnp.float32)
    stats = {"H": weigh(X), "count": count, "largest": largest}
    if sizes is None:
        stats["sum"] = jnp.sum(X, axis=1)
    if histograms:
        stats["sizes"] = sizes_below(X)
    return stats if gap is None else {**stats, "C": weigh(gap)}


LEAST, BINS = -24, 96  # bins begin at 2^-24 and are half a power of two wide


def sizes_below(X: jax.Array) -> jax.Array:
    """[BINS + 1]: how many |x| lie below each bin's upper end, and how many there are.

    >>> sizes_below(jnp.array([0.0, 1.0, 8.0]))[jnp.array([0, 52, -1])].tolist()
    [1.0, 2.0, 3.0]
    """
    magnitude = jnp.abs(X)
    ends = 2.0 ** (LEAST + (1 + jnp.arange(BINS)) / 2)
    below = jax.lax.map(lambda end: jnp.sum(magnitude < end), ends)
    return jnp.append(below, X.size).astype(jnp.float32)


def outliers(sizes: jax.Array, share: float = 0.999) -> float:
    """How many times larger than `share` of all inputs the largest is, to half a power of
    two."""
    below, count = sizes[:-1], sizes[-1]
    most = jnp.argmax(below >= count) if bool(below[-1] >= count) else BINS
    return float(2.0 ** ((most - jnp.argmax(below >= share * count)) / 2))


def moments_of_heads(X: jax.Array, other: jax.Array | None) -> dict[str, jax.Array]:
    """ "H" [1, G, K, K], and "C" with what comes from `other`, both [G, T, K]: reach.py."""
    stats = {"H": squares(X)[None]}
    if other is None:
        return stats
    return {**stats, "C": jnp.einsum("gtk,gtl->gkl", X, other - X)[None]}


def squares(X: jax.Array) -> jax.Array:
    """X^T X of every [T, K] of a stack. It is symmetric: of four quarters one is the
    transpose of another, and is not computed."""
    half = X.shape[-1] // 2
    if half < 128:
        return jnp.einsum("btk,btl->bkl", X, X)
    left, right = X[..., :half], X[..., half:]
    corner = jnp.einsum("btk,btl->bkl", left, right)
    above = jnp.concatenate([squares(left), corner], axis=-1)
    below = jnp.concatenate([corner.swapaxes(-1, -2), squares(right)], axis=-1)
    return jnp.concatenate([above, below], axis=-2)


def layout(site: Site) -> tuple[Any, ...]:
    """Sites of the same layout have the same `rows` of the same input."""
    if site.c.name == "conv_general_dilated":
        return (site,)
    summed = tuple(site.labels[a] for a in site.axes.summed)
    listed = (batch_labels(site), token_labels(site), summed)
    return tuple(tuple(map(site.inputs.index, labels)) for labels in listed)


def add(a: dict[str, jax.Array] | None, b: dict[str, jax.Array]) -> dict:
    """Statistics of two sets of batches together."""
    if a is None:
        return b
    join = {"largest": jnp.maximum}
    return {k: join.get(k, jnp.add)(a[k], b[k]) for k in b}


# --- what reaches the loss --------------------------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _tap(reduce: Callable, out: jax.Array, weights: jax.Array) -> jax.Array:
    """`out`; the gradient of `weights` is `reduce` of that of `out`."""
    del reduce, weights
    return out


def _tap_forward(reduce, out, weights):
    return _tap(reduce, out, weights), None


def _tap_backward(reduce, _, g):
    return g, reduce(g)


_tap.defvjp(_tap_forward, _tap_backward)


def gradient_weights(
    program: Program,
    chosen: dict[int, int],
    loss: Callable[[Any, Any], jax.Array] | None,
) -> Callable:
    """A compiled function (parameters, arrays, target, key) -> {site: [B, T, G] weights}.

    Args:
        chosen: number of a site -> G, into how many runs its outputs are cut.
        loss: of the model's outputs and a target; None: a random sign on every output.
    """
    taps = {program.marks[n]["output"]: n for n in chosen}

    def value(weights, params, arrays, target, key):
        env = dict(program.constants)
        env |= {v: params[path] for path, v in program.params.items()}
        env |= dict(zip(program.inputs, arrays))
        for index, eqn in enumerate(program.eqns):
            values = [v.val if is_literal(v) else env[v] for v in eqn.invars]
            if index in taps:
                n = taps[index]
                reduce = functools.partial(
                    token_weights, program.sites[n], groups=chosen[n]
                )
                outs = [_tap(reduce, values[0], weights[n])]
            else:
                outs = bind(eqn, values)
            env.update(zip(eqn.outvars, outs))
        outs = [v.val if is_literal(v) else env[v] for v in program.outputs]
        if loss is not None:
            return loss(jax.tree.unflatten(program.result, outs), target)
        floats = [x for x in outs if jnp.issubdtype(jnp.result_type(x), jnp.floating)]
        keys = jax.random.split(key, len(floats))
        signs = [
            jax.random.rademacher(k, x.shape, x.dtype) for k, x in zip(keys, floats)
        ]
        return sum(jnp.vdot(s, x) for s, x in zip(signs, floats))

    @jax.jit
    def run(params, arrays, target, key):
        zeros = {}
        for n, groups in chosen.items():
            out = program.eqns[program.marks[n]["output"]].outvars[0].aval
            site = program.sites[n]
            shape = jax.eval_shape(
                functools.partial(token_weights, site, groups=groups),
                jax.ShapeDtypeStruct(out.shape, out.dtype),
            )
            zeros[n] = jnp.zeros(shape.shape)
        return jax.grad(value)(zeros, params, arrays, target, key)

    return run
