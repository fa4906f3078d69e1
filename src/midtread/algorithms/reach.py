"""Reach: what a layer's error does on its way to the next layer.

Second moments of a layer's inputs measure the error of its output. For the values of an
attention that is the wrong place: the next layer does not see values but sums of them, and
a first token with huge inputs, which owns the moments, may have next to no say in any sum.
Wherever the way from a layer's output y = x W to the next layer's input z is linear in y
and treats some outputs alike,

    z[t, head, d] = sum over s of A[t, head, s] y[s, head, d]

it may change places with the weight, z = (A x) W, and the error at z is exactly quadratic
with the moments of A x, one matrix for every head:

    H_head = sum over t of (sum_s A[t, s] x_s) (sum_s A[t, s] x_s)^T

Whether there is such a way is read off the traced program, not off names of layers: from
the output mark on, every equation must be linear in y. Axes are followed as runs of
factors, cut where a reshape cuts them. A factor of the outputs along which something else
varies counts heads; one that nothing touches is free (the head's width), and a way that
leaves none is none. To find A x, the way itself is run on pieces of x in the free factors'
place, so nothing need be known of how A comes about.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from midtread.algorithms import collect
from midtread.algorithms.program import Program, Site, is_literal
from midtread.algorithms.stages import compiled, evaluate

Axes = list[tuple[int, ...]]  # of one variable: factors, the slowest first

SAME = ("convert_element_type", "copy", "copy_p", "name", "sharding_constraint", "reduce_precision")  # fmt: skip


class Factors:
    """What axes are made of. A factor is "token", "head" or "free"."""

    def __init__(self):
        self.sizes: list[int] = []
        self.kinds: list[str] = []
        self.cuts: dict[int, tuple[int, int]] = {}

    def new(self, size: int, kind: str) -> int:
        self.sizes.append(size)
        self.kinds.append(kind)
        return len(self.sizes) - 1

    def whole(self, axis: Sequence[int]) -> tuple[int, ...]:
        """The same axis after all cuts so far."""
        parts = [
            self.whole(self.cuts[f]) if f in self.cuts else (f,)
            for f in axis
            if self.sizes[f] != 1
        ]
        return tuple(f for part in parts for f in part)

    def touch(self, axis: Sequence[int]) -> None:
        """Something else varies along this axis: what was free counts heads."""
        for f in self.whole(axis):
            if self.kinds[f] == "free":
                self.kinds[f] = "head"

    def reshape(self, axes: Axes, shape: Sequence[int]) -> Axes | None:
        """The axes of a reshape to `shape`; None if it does not follow factors."""
        rest = [f for axis in axes for f in self.whole(axis)]
        axes_after: Axes = []
        for n in shape:
            axis: list[int] = []
            while n > 1:
                f = rest.pop(0)
                size = self.sizes[f]
                if n % size and size % n:
                    return None
                if size > n:
                    parts = (
                        self.new(n, self.kinds[f]),
                        self.new(size // n, self.kinds[f]),
                    )
                    self.cuts[f] = parts
                    rest.insert(0, parts[1])
                    f, size = parts[0], n
                axis.append(f)
                n //= size
            axes_after.append(tuple(axis))
        return axes_after


# --- linear equations: the axes of what they give, None if they are no part of a way ----------


def _reshape(factors: Factors, eqn: Any, axes: Axes, _: int) -> Axes | None:
    return factors.reshape(axes, eqn.outvars[0].aval.shape)


def _transpose(factors: Factors, eqn: Any, axes: Axes, _: int) -> Axes | None:
    return [axes[a] for a in eqn.params["permutation"]]


def _broadcast(factors: Factors, eqn: Any, axes: Axes, _: int) -> Axes | None:
    sources = {to: at for at, to in enumerate(eqn.params["broadcast_dimensions"])}
    before = eqn.invars[0].aval.shape
    return [
        axes[sources[a]]
        if a in sources and before[sources[a]] == n
        else (factors.new(n, "token"),)
        for a, n in enumerate(eqn.outvars[0].aval.shape)
    ]


def _shift(factors: Factors, eqn: Any, axes: Axes, which: int) -> Axes | None:
    """y + b: errors pass as they are."""
    is_whole = eqn.invars[which].aval.shape == eqn.outvars[0].aval.shape
    return axes if is_whole else None


def _scale(factors: Factors, eqn: Any, axes: Axes, which: int) -> Axes | None:
    """y * b, or y / b."""
    if eqn.primitive.name == "div" and which == 1:
        return None
    if eqn.invars[which].aval.shape != eqn.outvars[0].aval.shape:
        return None
    for axis, n in zip(axes, eqn.invars[1 - which].aval.shape):
        if n > 1:
            factors.touch(axis)
    return axes


def _dot(factors: Factors, eqn: Any, axes: Axes, which: int) -> Axes | None:
    contracted, batched = eqn.params["dimension_numbers"]
    own, other = contracted[which], contracted[1 - which]
    if any(factors.kinds[f] != "token" for a in own for f in factors.whole(axes[a])):
        return None  # outputs are mixed with each other
    for a in batched[which]:
        factors.touch(axes[a])
    rest = [axis for a, axis in enumerate(axes) if a not in (*own, *batched[which])]
    new: Axes = [
        (factors.new(n, "token"),)
        for a, n in enumerate(eqn.invars[1 - which].aval.shape)
        if a not in (*other, *batched[1 - which])
    ]
    first, last = (rest, new) if which == 0 else (new, rest)
    return [*(axes[a] for a in batched[which]), *first, *last]


RULES: dict[str, Callable[[Factors, Any, Axes, int], Axes | None]] = {
    **dict.fromkeys(SAME, lambda factors, eqn, axes, which: axes),
    **dict.fromkeys(("reshape", "squeeze", "expand_dims"), _reshape),
    **dict.fromkeys(("add", "sub"), _shift),
    **dict.fromkeys(("mul", "div"), _scale),
    "transpose": _transpose,
    "broadcast_in_dim": _broadcast,
    "dot_general": _dot,
}


class Way(NamedTuple):
    """From a site's output to the next site's input, linear all along.

    `before` and `after` are the factors of both ends, as (size, kind) from slow to fast, and
    `names` say which of both are the same.
    """

    eqns: tuple[Any, ...]
    start: Any
    end: Any
    before: tuple[tuple[int, str], ...]
    after: tuple[tuple[int, str], ...]
    names: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
    sums: bool = True  # over tokens, somewhere

    def columns(self, last: int) -> np.ndarray | None:
        """For each of the `last` numbers of a token at the end, the output that it comes
        from; None if outputs are not among them."""
        size, start = 1, len(self.after)
        while size < last and start:
            start -= 1
            size *= self.after[start][0]
        if size != last:
            return None
        sizes = [n for n, _ in self.after[start:]]
        digits = np.unravel_index(np.arange(last), sizes) if sizes else ()
        by_name = dict(zip(self.names[1][start:], digits))
        own = [
            (n, name)
            for (n, kind), name in zip(self.before, self.names[0])
            if kind != "token"
        ]
        if any(name not in by_name for _, name in own):
            return None
        return np.ravel_multi_index(
            [by_name[name] for _, name in own], [n for n, _ in own]
        )

    @property
    def heads(self) -> int:
        return math.prod(n for n, kind in self.before if kind == "head")

    @property
    def width(self) -> int:
        return math.prod(n for n, kind in self.before if kind == "free")


def way_of(program: Program, number: int) -> Way | None:
    """The linear way from a site's output, through at least one sum over tokens, that
    leaves some outputs alone."""
    way = follow(program, number)
    if way is None or not way.sums or way.width == 1:
        return None
    own = [kind for _, kind in way.before if kind != "token"]
    # Heads are runs of the outputs: they come before what is inside of one.
    return way if own == sorted(own, reverse=True) else None


def follow(program: Program, number: int) -> Way | None:
    """The linear way from a site's output to the next site's input, which mixes no outputs
    with each other."""
    site, at = program.sites[number], program.marks[number]["output"]
    if site.c.name == "conv_general_dilated" or site.groups or site.axes.batch:
        return None
    kept = [site.labels[a] for a in site.axes.kept]
    if [x for x in site.c.out if x in kept] != kept:
        return None
    factors, start = Factors(), program.eqns[at].outvars[0]
    kind = lambda label: "free" if label in kept else "token"
    first: Axes = [
        (factors.new(n, kind(label)),)
        for label, n in zip(site.c.out, start.aval.shape, strict=True)
    ]
    axes, end, sums, eqns = {start: first}, None, False, []
    inputs = {mark["input"] for mark in program.marks}
    for index in range(at + 1, len(program.eqns)):
        eqn = program.eqns[index]
        own = [i for i, v in enumerate(eqn.invars) if not is_literal(v) and v in axes]
        if not own:
            continue
        if index in inputs and end in (None, eqn.invars[0]):
            end = eqn.invars[0]
            continue
        name = eqn.primitive.name
        if len(own) != 1 or name not in RULES or index in inputs:
            return None
        after = RULES[name](factors, eqn, axes[eqn.invars[own[0]]], own[0])
        if after is None:
            return None
        axes[eqn.outvars[0]] = after
        sums = sums or (name == "dot_general" and bool(eqn.params["dimension_numbers"][0][own[0]]))  # fmt: skip
        eqns.append(eqn)
    if end is None or any(v in axes for v in program.outputs if not is_literal(v)):
        return None
    listed = lambda axes: tuple(
        (factors.sizes[f], factors.kinds[f])
        for axis in axes
        for f in factors.whole(axis)
    )
    named = lambda axes: tuple(f for axis in axes for f in factors.whole(axis))
    names = named(first), named(axes[end])
    return Way(
        tuple(eqns), start, end, listed(first), listed(axes[end]), names, sums
    )  # fmt: skip


def attended(site: Site, way: Way, x: jax.Array, env: dict[Any, Any]) -> jax.Array:
    """A x of every head, [G, T, K]; `env` holds what the way takes beside the output."""
    K, D = math.prod(site.stored_shape[a] for a in site.axes.summed), way.width
    pieces = -(-K // D)
    X = collect.rows(site, x).reshape(-1, K)
    X = jnp.pad(X, ((0, 0), (0, pieces * D - K))).reshape(len(X), pieces, D)
    kinds = [kind for _, kind in way.before]
    sizes = [1 if kind == "head" else n for n, kind in way.before]
    of = lambda kind: [a for a, k in enumerate(kinds) if k == kind]
    order = [*of("token"), *of("free"), *of("head")]
    X = X.transpose(1, 0, 2).reshape(pieces, *(sizes[a] for a in order))
    X = X.transpose(0, *(1 + order.index(a) for a in range(len(order))))
    X = jnp.broadcast_to(X, (pieces, *(n for n, _ in way.before)))
    X = X.reshape(pieces, *way.start.aval.shape).astype(way.start.aval.dtype)

    def run(y):
        values = {**env, way.start: y}
        evaluate(way.eqns, values)
        return values[way.end]

    push = lambda y: jax.jvp(run, (jnp.zeros_like(y),), (y,))[1]
    z = jax.vmap(push)(X).astype(jnp.float32)
    z = z.reshape(pieces, *(n for n, _ in way.after))
    of = lambda kind: [1 + a for a, (_, k) in enumerate(way.after) if k == kind]
    z = z.transpose(*of("head"), *of("token"), 0, *of("free"))
    return z.reshape(way.heads, -1, pieces * D)[..., :K]


@dataclasses.dataclass(frozen=True)
class Probe:
    """`run` of the values of `takes` is `attended`."""

    takes: tuple[Any, ...]
    run: Callable[[list[Any]], jax.Array]


def probe(program: Program, number: int, way: Way, known: set[Any]) -> Probe:
    """What finds A x of a site from variables that are known while it is settled."""
    site = program.sites[number]
    x = program.eqns[program.marks[number]["input"]].invars[0]
    inside = {v for eqn in way.eqns for v in eqn.outvars} | {way.start}
    read = lambda eqns: {v for e in eqns for v in e.invars if not is_literal(v)}
    needed = read(way.eqns) - inside - known
    before: list[Any] = []
    for eqn in reversed(program.eqns):
        if not needed.isdisjoint(eqn.outvars):
            before.insert(0, eqn)
            needed |= read([eqn]) - known
    eqns = (*before, *way.eqns)
    inside = {v for e in eqns for v in e.outvars} | {way.start}
    takes = tuple(
        dict.fromkeys(
            [x, *(v for e in eqns for v in e.invars if not is_literal(v) and v not in inside)]
        )
    )  # fmt: skip

    def run(values: list[Any]) -> jax.Array:
        env = dict(zip(takes, values))
        evaluate(before, env)
        return attended(site, way, env[x], env)

    key = f"{site.alike} {way.before} {way.after}"
    return Probe(takes, compiled(eqns, takes, (way.end,), run, key))
