"""Stream: where a model's residual stream may be turned, and the model stay what it is.

A stream x of width D that is only ever added to, divided by its own length, and read by
weights may be turned by any orthogonal R: what is added to it is turned as it is made, and
what reads it turns it back,

    x = table[t] + y W + b         table R,  W R,  b R
    x / |x| * s  ->  W'            |x R| = |x|;  s into W' first, then R^T (s W')

at no cost when the model runs (Ashkboos et al. 2024, QuaRot, after SliceGPT's "computational
invariance"). A norm's scale does not change places with R, so it is multiplied into the rows
of all weights that read it, and becomes 1.

Which variables are one stream is read off the traced program: spaces are born at the outputs
of weights and at look-ups of tables, joined where variables are added, and spoiled by
anything that does not commute with a turn (a mean that is subtracted, a nonlinearity, an
output of the model), which is then said.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from midtread.algorithms.flow import (
    Flow,
    Vector,
    ends,
    is_constant_along_last,
    is_zero,
)
from midtread.algorithms.program import Program, is_literal
from midtread.algorithms.reach import SAME
from midtread.algorithms.weight import as_matrices, as_weight


@dataclasses.dataclass(frozen=True)
class Stream:
    """What is turned together."""

    width: int
    tables: tuple[Vector, ...]  # parameters whose last axis goes into the stream
    columns: tuple[int, ...]  # sites whose outputs do
    rows: tuple[
        tuple[int, Vector | None], ...
    ]  # sites that read it, behind which scale


class State(NamedTuple):
    """What a variable is."""

    space: int
    scale: Vector | None = None  # it has been multiplied by this norm's scale
    is_squared: bool = False


class Spaces:
    """Sets of variables that must be turned together, joined as the program is read."""

    def __init__(self, program: Program):
        self.program, self.flow = program, Flow(program)
        self.parent: list[int] = []
        self.width: list[int] = []
        self.tables: dict[int, list[Vector]] = {}
        self.columns: dict[int, list[int]] = {}
        self.rows: dict[int, list[tuple[int, Vector | None]]] = {}
        self.spoiled: dict[int, str] = {}  # the first reason
        self.state: dict[Any, State] = {}

    def new(self, width: int) -> int:
        self.parent.append(len(self.parent))
        self.width.append(width)
        return len(self.parent) - 1

    def root(self, space: int) -> int:
        while self.parent[space] != space:
            space = self.parent[space]
        return space

    def join(self, a: int, b: int) -> int:
        a, b = sorted((self.root(a), self.root(b)))
        if a != b:
            self.parent[b] = a
            for kept in (self.tables, self.columns, self.rows):
                kept.setdefault(a, []).extend(kept.pop(b, []))
            if b in self.spoiled:
                self.spoiled.setdefault(a, self.spoiled.pop(b))
        return a

    def add(self, kept: dict, space: int, what: Any) -> None:
        kept.setdefault(self.root(space), []).append(what)

    def spoil(self, space: int, why: str) -> None:
        self.spoiled.setdefault(self.root(space), why)


# --- equations: the state of what they give, None if the stream ends here, a str says why not -


def _pass(spaces: Spaces, eqn: Any, states: list) -> State | str | None:
    """An equation that rearranges all but the last axis."""
    (state,) = [s for s in states if s is not None]
    before, after = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    if before[-1:] != after[-1:]:
        return "its channels are rearranged"
    name, params = eqn.primitive.name, eqn.params
    if name == "transpose" and params["permutation"][-1] != len(before) - 1:
        return "its channels are rearranged"
    if name == "broadcast_in_dim":
        dims = params["broadcast_dimensions"]
        if not dims or dims[-1] != len(after) - 1:
            return "its channels are rearranged"
    return state


def _add(spaces: Spaces, eqn: Any, states: list) -> State | str | None:
    flow = spaces.flow
    if any(s is not None and (s.scale or s.is_squared) for s in states):
        return f"{eqn.primitive.name!r} behind a norm's scale"
    if all(s is not None for s in states):
        if eqn.primitive.name == "sub" and eqn.invars[0] is eqn.invars[1]:
            return "it is subtracted from itself"
        return State(spaces.join(states[0].space, states[1].space))
    which = int(states[0] is None)
    state, other = states[which], eqn.invars[1 - which]
    if eqn.invars[which].aval.shape == eqn.outvars[0].aval.shape and is_zero(
        flow, other
    ):
        return state
    source = None
    if not is_literal(other):
        source = flow.table(other, spaces.width[state.space])
    if source is None or source.offset:
        return f"something else is {'added' if eqn.primitive.name == 'add' else 'subtracted'}"
    spaces.add(spaces.tables, state.space, source)
    return state


def _multiply(spaces: Spaces, eqn: Any, states: list) -> State | str | None:
    flow = spaces.flow
    if all(s is not None for s in states):
        same = eqn.primitive.name == "mul" and eqn.invars[0] is eqn.invars[1]
        if same and states[0].scale is None and not states[0].is_squared:
            return states[0]._replace(is_squared=True)
        return "it is multiplied with itself"
    which = int(states[0] is None)
    state, other = states[which], eqn.invars[1 - which]
    if eqn.primitive.name == "div" and which == 1:
        return "something is divided by it"
    if is_constant_along_last(flow, other):
        return state
    vector = flow.scale(other, spaces.width[state.space])
    if vector is None or eqn.primitive.name == "div" or state.is_squared:
        return "its channels are multiplied by something else than a norm's own scale"
    if state.scale is not None:
        return "two scales follow each other"
    return state._replace(scale=vector)


def _square(spaces: Spaces, eqn: Any, states: list) -> State | str | None:
    (state,) = states
    is_square = eqn.primitive.name == "square" or eqn.params.get("y") == 2
    if not is_square or state.scale is not None or state.is_squared:
        return f"{eqn.primitive.name!r} is applied to it"
    return state._replace(is_squared=True)


def _sum(spaces: Spaces, eqn: Any, states: list) -> State | str | None:
    (state,) = states
    if state.is_squared and eqn.invars[0].aval.ndim - 1 in eqn.params["axes"]:
        return None
    return "it is summed over its channels (the mean of a LayerNorm)"


def _concatenate(spaces: Spaces, eqn: Any, states: list) -> State | str | None:
    if any(s is None or s.scale or s.is_squared for s in states):
        return "it is joined with something else"
    if eqn.params["dimension"] == eqn.invars[0].aval.ndim - 1:
        return "its channels are rearranged"
    space = states[0].space
    for state in states[1:]:
        space = spaces.join(space, state.space)
    return State(space)


RULES: dict[str, Callable[[Spaces, Any, list], State | str | None]] = {
    **dict.fromkeys(
        (*SAME, "reshape", "squeeze", "transpose", "broadcast_in_dim", "slice",
         "optimization_barrier", "expand_dims"), _pass,
    ),
    **dict.fromkeys(("add", "sub"), _add),
    **dict.fromkeys(("mul", "div"), _multiply),
    **dict.fromkeys(("integer_pow", "square"), _square),
    "reduce_sum": _sum,
    "concatenate": _concatenate,
}  # fmt: skip


def find(program: Program) -> tuple[list[Stream], dict[int, str]]:
    """The streams of a program that can be turned; and for others that some weights read,
    {number of the first such site: why not}, the one that most weights read first."""
    spaces = Spaces(program)
    state = spaces.state
    roles = {
        mark[kind]: (kind, n)
        for n, mark in enumerate(program.marks)
        for kind in ("weight", "input", "output")
    }
    for index, eqn in enumerate(program.eqns):
        kind, number = roles.get(index, ("", -1))
        if kind == "output":
            _born(spaces, eqn.outvars[0], number)
            continue
        if kind == "input":
            _read(spaces, state.get(eqn.invars[0]), number)
            continue
        states = [None if is_literal(v) else state.get(v) for v in eqn.invars]
        if all(s is None for s in states):
            _look_up(spaces, eqn)
            continue
        rule = RULES.get(eqn.primitive.name)
        out = rule(spaces, eqn, states) if rule else f"{eqn.primitive.name!r} is applied to it"  # fmt: skip
        if isinstance(out, str):
            for s in states:
                if s is None:
                    continue
                spaces.spoil(s.space, out)
                # Who reads what comes of it is found all the same, to be told why not.
                if eqn.outvars[0].aval.shape[-1:] == (spaces.width[s.space],):
                    state[eqn.outvars[0]] = State(s.space)
        elif out is not None:
            state[eqn.outvars[0]] = out
    for v in program.outputs:
        if not is_literal(v) and v in state:
            spaces.spoil(state[v].space, "it is an output of the model")
    return _gathered(spaces)


def _born(spaces: Spaces, v: Any, number: int) -> None:
    """The output of a weight with one axis of outputs, the last."""
    site = spaces.program.sites[number]
    if site.c.name == "conv_general_dilated" or site.axes.batch and not site.groups:
        return
    kept = tuple(site.labels[a] for a in site.axes.kept)
    if len(kept) == 1 and site.c.out[-1:] == kept:
        space = spaces.new(v.aval.shape[-1])
        spaces.state[v] = State(space)
        spaces.add(spaces.columns, space, number)


def _look_up(spaces: Spaces, eqn: Any) -> None:
    """Rows of a table of parameters."""
    if eqn.primitive.name != "gather":
        return
    (out,) = eqn.outvars
    width = eqn.invars[0].aval.shape[-1]
    dims, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    is_row = sizes == (1, width) and dims.offset_dims == (out.aval.ndim - 1,)
    table = spaces.flow.table(eqn.invars[0], width) if is_row else None
    if table is None or table.offset:
        # A table that is used elsewhere too begins a stream that cannot be turned.
        if is_row:
            space = spaces.new(width)
            spaces.state[out] = State(space)
            spaces.spoil(
                space, "the table that it is looked up in is used elsewhere too"
            )
        return
    space = spaces.new(width)
    spaces.state[out] = State(space)
    spaces.add(spaces.tables, space, table)


def _read(spaces: Spaces, state: State | None, number: int) -> None:
    if state is None:
        return
    site = spaces.program.sites[number]
    if state.is_squared or not ends(site) or len(site.axes.summed) != 1:
        spaces.spoil(
            state.space, f"{site.name} reads it in another way than by its rows"
        )
    else:
        spaces.add(spaces.rows, state.space, (number, state.scale))


def _gathered(spaces: Spaces) -> tuple[list[Stream], dict[int, str]]:
    flow, streams, reasons = spaces.flow, [], {}
    sites = spaces.program.sites
    for space, rows in sorted(spaces.rows.items()):
        if not rows:
            continue
        why = spaces.spoiled.get(space)
        columns = tuple(spaces.columns.get(space, ()))
        tables = tuple(spaces.tables.get(space, ()))
        weights = [sites[n] for n in (*columns, *(n for n, _ in rows))]
        shared = [s.name for s in weights if not flow.is_own(s.path, s.layer)]
        if why is None and shared:
            why = f"{shared[0]} is used elsewhere too"
        if why is None and spaces.width[space] % 2:
            why = f"its width is {spaces.width[space]}"
        # One layer's output that one other reads is a stream too, but its own.
        if why is None:
            stream = Stream(spaces.width[space], tables, columns, tuple(rows))
            streams.append(stream)
        else:
            reasons[rows[0][0]] = len(rows), why
    by_readers = sorted(reasons.items(), key=lambda item: -item[1][0])
    return streams, {number: why for number, (_, why) in by_readers}


def turned(
    program: Program,
    params: dict[tuple, jax.Array],
    stream: Stream,
    R: jax.Array,
) -> dict[tuple, jax.Array]:
    """Parameters of a model that computes the same, its stream turned by R."""
    params = without_scales(program, params, stream)
    by_name = {tuple(map(str, path)): path for path in params}
    for vector in stream.tables:
        path = by_name[tuple(map(str, vector.path))]
        value = params[path][vector.layer].astype(jnp.float32) @ R
        params[path] = put(params[path], vector.layer, value)
    for number in stream.columns:
        change_weight(program, params, number, lambda m: m @ R)
    for number, _ in stream.rows:
        change_weight(program, params, number, lambda m: R.T @ m)
    return params


def without_scales(
    program: Program, params: dict[tuple, jax.Array], stream: Stream
) -> dict[tuple, jax.Array]:
    """Parameters with norms' scales multiplied into the weights that read them."""
    params = dict(params)
    by_name = {tuple(map(str, path)): path for path in params}
    values: dict[Vector, jax.Array] = {}
    for _, scale in stream.rows:
        if scale is not None and scale not in values:
            path = by_name[tuple(map(str, scale.path))]
            own = params[path][scale.layer].astype(jnp.float32)
            values[scale] = own + scale.offset
            one = jnp.full_like(own, 1 - scale.offset)
            params[path] = put(params[path], scale.layer, one)
    for number, scale in stream.rows:
        if scale is not None:
            s = values[scale][:, None]
            change_weight(program, params, number, lambda m, s=s: s * m)
    return params


def weight_of(program: Program, params: dict, number: int) -> jax.Array:
    """The weight of a site as matrices [E, K, N], in float32."""
    site = program.sites[number]
    return as_matrices(site.weight_in(params).astype(jnp.float32), site.axes)


def change_weight(
    program: Program, params: dict, number: int, change: Callable
) -> None:
    """Puts `change` of a site's matrices into `params`."""
    site = program.sites[number]
    path = site.path_in(params)
    m = change(weight_of(program, params, number))
    w = as_weight(m, site.axes, site.stored_shape)
    params[path] = put(params[path], site.layer, w)


def put(whole: jax.Array, layer: tuple, value: Any) -> jax.Array:
    """A stack with one layer replaced, or the value where there is no stack."""
    part = value.reshape(whole.shape[len(layer) :]).astype(whole.dtype)
    return whole.at[layer].set(part) if layer else part
