"""Rotate: a turn between two weights that the model does not notice, and rounding does.

Where the way from a weight's output to the next weight's input is linear and leaves some
outputs alone (reach.py), those may be turned by any orthogonal R and turned back by the rows
of the next weight,

    y = x W1        z = A y        out = z W2
    y R             z R            (z R) (R^T W2) = out

at no cost when the model runs: R is folded into both weights (and the first one's bias).
With the R of Hadamard and random signs an outlier of one output is spread over all of a
head, so that no code's step is owed to it (Ashkboos et al. 2024, QuaRot; their R2). Turns of
the whole residual stream, or of what lies behind a nonlinearity, would need the norms folded
or a turn of the inputs at run time, and are not made.

Widths that are no power of two are turned in blocks of the largest one that divides them.
"""

import math
from collections.abc import Collection
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from midtread.algorithms import bias, reach
from midtread.algorithms.program import Program, Site
from midtread.algorithms.weight import as_matrices, as_weight


class Pair(NamedTuple):
    """Sites between whose weights a rotation fits."""

    first: int
    seconds: tuple[int, ...]  # all that read what the first one leads to
    width: int  # of the outputs, and of runs of the next inputs, that are turned
    bias: tuple[tuple, tuple] | None  # (path, layer) of the first one's


def hadamard(n: int) -> jax.Array:
    """The n x n Hadamard matrix of Sylvester: R R^T = n.

    >>> hadamard(2).tolist()
    [[1.0, 1.0], [1.0, -1.0]]
    """
    R = jnp.ones((1, 1))
    while len(R) < n:
        R = jnp.block([[R, R], [R, -R]])
    return R


def rotation(width: int, key: jax.Array) -> jax.Array:
    """An orthogonal [width, width]: Hadamard's, of random signs, in blocks if need be."""
    block = width & -width  # the largest power of two that divides it
    R = jnp.kron(jnp.eye(width // block), hadamard(block) / math.sqrt(block))
    return jax.random.rademacher(key, (width, 1), R.dtype) * R


def pairs(program: Program, chosen: Collection[int]) -> list[Pair]:
    """All pairs of chosen sites; none of their weights is used anywhere else."""
    of = lambda site: (site.path, site.layer)
    uses = [of(site) for site in program.sites]
    inputs = [program.eqns[mark["input"]].invars[0] for mark in program.marks]
    listed = []
    for number in chosen:
        way = reach.way_of(program, number)
        if way is None or way.width % 2:
            continue
        seconds = tuple(n for n, v in enumerate(inputs) if v is way.end)
        both = (number, *seconds)
        if any(n not in chosen or uses.count(uses[n]) > 1 for n in both):
            continue
        kinds = [kind for _, kind in way.after]
        inner = kinds[len(kinds) - kinds.count("free") :]
        if set(inner) != {"free"} or not all(_ends(program.sites[n]) for n in seconds):
            continue
        shifts = sum(eqn.primitive.name in ("add", "sub") for eqn in way.eqns)
        own = bias.find(program, number) if shifts == 1 else None
        if shifts and own is None:
            continue
        listed.append(Pair(number, seconds, way.width, own))
    return listed


def _ends(site: Site) -> bool:
    """Whether a site sums the last axes of its input, in the order of its weight's rows."""
    summed = tuple(site.labels[a] for a in site.axes.summed)
    return site.inputs[-len(summed) :] == summed and not site.axes.batch


def fold(
    program: Program, params: dict[tuple, jax.Array], turns: list[Pair], seed: int = 0
) -> dict[tuple, jax.Array]:
    """Parameters of a model that computes the same, with every pair turned."""
    params = dict(params)
    by_name = {tuple(map(str, path)): path for path in params}
    for pair in turns:
        R = rotation(pair.width, jax.random.fold_in(jax.random.key(seed), pair.first))

        def columns(m, R=R):  # [..., N]: heads, then what is inside of one
            return (m.reshape(*m.shape[:-1], -1, len(R)) @ R).reshape(m.shape)

        def rows(m, columns=columns):  # [E, K, N]
            return columns(m.swapaxes(-1, -2)).swapaxes(-1, -2)

        for number, turn in ((pair.first, columns), *((n, rows) for n in pair.seconds)):
            site = program.sites[number]
            path = by_name[tuple(map(str, site.path))]
            w = params[path][site.layer].reshape(site.stored_shape)
            m = turn(as_matrices(w.astype(jnp.float32), site.axes))
            w = as_weight(m, site.axes, site.stored_shape)
            params[path] = _put(params[path], site.layer, w)
        if pair.bias is not None:
            path, layer = pair.bias
            turned = columns(params[path][layer].astype(jnp.float32))
            params[path] = _put(params[path], layer, turned)
    return params


def _put(whole: jax.Array, layer: tuple, value: Any) -> jax.Array:
    part = value.reshape(whole.shape[len(layer) :]).astype(whole.dtype)
    return whole.at[layer].set(part) if layer else part
