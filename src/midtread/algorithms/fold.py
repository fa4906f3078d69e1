"""Fold: factors of a layer's inputs, given to whatever comes before it.

    (x * p) (W / p) = x W          the codes are those of W / p; somebody multiplies x by p

Kept as the QArray's pre_scale, p costs a multiplication at every call. Where the program lets
it, p is moved instead, and costs nothing:

    a norm's scale       x = n * s            s * p       and its shift, where it has one
    a linear way         x = A (y W1 + b)     W1 * p      along W1's outputs, and b
                                                          (values -> out, up * gate -> down)

All weights that read x must then have the same p, which is chosen for them together, and where
several inputs come from one output (heads that share their values), these have one factor.
W1's codes stay what they are: their scales take the factor, so these must be free numbers,
one for every output at least. What does not fit is left as it is, in `pre_scale`.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from midtread.algorithms import bias, learn, reach
from midtread.algorithms.flow import Flow, Vector, ends, owns_weight
from midtread.algorithms.program import Program, Site, is_literal
from midtread.algorithms.weight import as_matrices, as_weight
from midtread.numerics.qarray import QArray
from midtread.numerics.spec import Spec


class Fold(NamedTuple):
    """Where factors of the input that some sites share can go."""

    sites: tuple[int, ...]
    scale: Vector | None = None  # of a norm
    shift: Vector | None = None
    first: int | None = None  # a site, whose outputs take them
    bias: tuple[tuple, tuple] | None = None  # (path, layer) of the first one's
    columns: tuple[int, ...] | None = None  # the output that every input comes from

    def name(self, program: Program) -> str:
        if self.scale is not None:
            return self.scale.name
        assert self.first is not None
        return program.sites[self.first].name


def find(
    program: Program, chosen: Mapping[int, Site], specs: Mapping[int, Spec]
) -> list[Fold]:
    """All folds of a program, read off its equations.

    Args:
        chosen: the sites whose weights are quantized.
        specs: number of a chosen site -> how its weight is.
    """
    flow = Flow(program)
    ways = {n: reach.follow(program, n) for n in range(len(program.sites))}
    listed = []
    for x, sites in flow.inputs.items():
        if not all(n in chosen and ends(program.sites[n]) for n in sites):
            continue
        if any(program.sites[n].axes.batch for n in sites):
            continue  # experts have factors of their own
        if len(flow.users[x]) != len(sites) or x in flow.outputs:
            continue
        if not owns_weight(flow, sites):
            continue
        fold = _into_norm(flow, x, tuple(sites))
        for n, way in ways.items():
            if fold is None and way is not None and way.end is x:
                fold = _into_weight(flow, n, way, tuple(sites), specs)
        listed += [] if fold is None else [fold]
    return listed


def _inputs(program: Program, site: int) -> int:
    own = program.sites[site]
    return own.axes.extents(own.stored_shape)[1]


def _into_norm(flow: Flow, x: Any, sites: tuple[int, ...]) -> Fold | None:
    width = _inputs(flow.program, sites[0])
    v, shift = x, None
    if v.aval.shape[-1:] != (width,):
        return None
    while (eqn := flow.made_by.get(v)) is not None:
        name = eqn.primitive.name
        if name in reach.SAME:
            v = eqn.invars[0]
        elif name in ("add", "mul"):
            look = flow.scale if name == "mul" else flow.vector
            vectors = [None if is_literal(u) else look(u, width) for u in eqn.invars]
            if sum(u is not None for u in vectors) != 1:
                return None
            index = int(vectors[0] is None)
            if name == "mul":
                return Fold(sites, vectors[index], shift)
            if shift is not None:
                return None
            shift, v = vectors[index], eqn.invars[1 - index]
        else:
            return None
        if not flow.is_used_once(v):
            return None
    return None


def _into_weight(
    flow: Flow, first: int, way: reach.Way, sites: tuple[int, ...], specs
) -> Fold | None:
    program = flow.program
    columns = way.columns(_inputs(program, sites[0]))
    if columns is None or not owns_weight(flow, [first]):
        return None
    shifts = sum(eqn.primitive.name in ("add", "sub") for eqn in way.eqns)
    own = bias.find(program, first) if shifts == 1 else None
    if shifts and own is None:
        return None
    site = program.sites[first]
    if first in specs and not _takes_factors(specs[first], site):
        return None
    return Fold(sites, first=first, bias=own, columns=tuple(map(int, columns)))


def _takes_factors(spec: Spec, site: Site) -> bool:
    """Whether every output has scales of its own, and they may be any numbers."""
    padded, counts = spec.layout(site.stored_shape)
    kept = site.axes.kept
    own = all(counts[a] == padded[a] == site.stored_shape[a] for a in kept)
    return own and learn.is_free(spec)


def move(
    program: Program,
    folds: list[Fold],
    solved: Mapping[int, QArray],
    params: Mapping[tuple, jax.Array],
) -> tuple[dict[int, QArray], dict[tuple, jax.Array]]:
    """Codes without the factors that have gone elsewhere, and the parameters that took them.

    Args:
        solved: number of a site -> codes with `pre_scale`, the same for all of a fold.
        params: path -> parameter, as the model has it.

    Returns:
        All codes, and {path: parameter} of those that changed. What the model computes stays
        the same.
    """
    solved, changed = dict(solved), {}
    by_name = {tuple(map(str, path)): path for path in params}

    def change(path: tuple, layer: tuple, factor: jax.Array, offset: float = 0.0):
        path = by_name[tuple(map(str, path))]
        whole = changed.get(path, params[path])
        value = (whole[layer].astype(jnp.float32) + offset) * factor - offset
        changed[path] = (
            whole.at[layer].set(value.astype(whole.dtype))
            if layer
            else value.astype(whole.dtype)
        )

    for fold in folds:
        site = program.sites[fold.sites[0]]
        q = solved[fold.sites[0]]
        if q.pre_scale is None:
            continue
        factors = factors_of(q, site)
        for n in fold.sites:
            solved[n] = solved[n].replace(pre_scale=None)
        if fold.scale is not None:
            change(*fold.scale[:2], factors, fold.scale.offset)
            if fold.shift is not None:
                change(*fold.shift[:2], factors, fold.shift.offset)
            continue
        assert fold.first is not None and fold.columns is not None
        before = program.sites[fold.first]
        outputs = before.axes.extents(before.stored_shape)[2]
        spread = jnp.ones(outputs).at[np.array(fold.columns)].set(factors)
        over = over_outputs(spread, before)
        if fold.first in solved:
            first = solved[fold.first]
            scale = first.scale.astype(jnp.float32) * over
            solved[fold.first] = first.replace(scale=scale.astype(first.scale.dtype))
        else:
            path = by_name[tuple(map(str, before.path))]
            shape = params[path].shape[len(before.layer) :]
            full = jnp.broadcast_to(over, before.stored_shape).reshape(shape)
            change(path, before.layer, full)
        if fold.bias is not None:
            change(*fold.bias, spread)
    return solved, changed


def factors_of(q: QArray, site: Site) -> jax.Array:
    """[K] of a QArray's pre_scale, without those of padding."""
    assert q.pre_scale is not None
    kept = [1 if a in site.axes.kept else n for a, n in enumerate(site.stored_shape)]
    part = q.pre_scale[tuple(slice(n) for n in kept)]
    return as_matrices(part.astype(jnp.float32), site.axes).reshape(-1)


def over_outputs(v: jax.Array, site: Site) -> jax.Array:
    """`v` [N], one number per output, as an array that broadcasts over the weight."""
    kept = site.axes.kept
    full = [n if a in kept else 1 for a, n in enumerate(site.stored_shape)]
    return as_weight(v[None, None], site.axes, tuple(full))
