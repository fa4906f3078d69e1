"""Flow: who makes and who uses a program's variables, and which of them are parameters.

What may be folded into what (fold.py, stream.py) is read off the program: a parameter may be
changed where nothing else uses it, and a vector of them that is spread over an input's
channels, a norm's scale say, may take a factor per channel.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from midtread.algorithms.program import Program, Site, is_literal
from midtread.algorithms.reach import SAME


class Vector(NamedTuple):
    """A parameter, or one layer of it, along the last axis: its values plus `offset`."""

    path: tuple[Any, ...]
    layer: tuple[int, ...]
    offset: float

    @property
    def name(self) -> str:
        return "/".join(map(str, self.path)) + "".join(f"[{i}]" for i in self.layer)


class Flow:
    """Makers and users of a program's variables."""

    def __init__(self, program: Program):
        self.program = program
        self.made_by = {v: eqn for eqn in program.eqns for v in eqn.outvars}
        self.users: dict[Any, list[int]] = {}  # numbers of equations
        for index, eqn in enumerate(program.eqns):
            for v in {v for v in eqn.invars if not is_literal(v)}:
                self.users.setdefault(v, []).append(index)
        self.outputs = {v for v in program.outputs if not is_literal(v)}
        self.paths = {v: path for path, v in program.params.items()}
        self.inputs: dict[Any, list[int]] = {}  # variable -> sites that it is input of
        for number, mark in enumerate(program.marks):
            v = program.eqns[mark["input"]].invars[0]
            self.inputs.setdefault(v, []).append(number)

    def is_own(self, path: tuple, layer: tuple[int, ...]) -> bool:
        """Whether a parameter, or a layer of it, is used in one place of the program."""
        by_name = {tuple(map(str, p)): v for p, v in self.program.params.items()}
        v = by_name[tuple(map(str, path))]
        if v in self.outputs:
            return False
        uses = [self.program.eqns[i] for i in self.users.get(v, [])]
        if layer:
            uses = [e for e in uses if _start(e) in (None, layer[0])]
        return len(uses) == 1

    def is_used_once(self, v: Any) -> bool:
        return len(self.users.get(v, [])) == 1 and v not in self.outputs

    def vector(self, v: Any, width: int) -> Vector | None:
        """The parameter that `v` is along its last axis, and the same along all others."""
        source = self.table(v, width)
        if source is None:
            return None
        whole = self.program.params[source.path].aval.shape
        return source if whole[len(source.layer) :] == (width,) else None

    def scale(self, v: Any, width: int) -> Vector | None:
        """The same, where `v` may be the parameter times what is constant along the axis."""
        while not is_literal(v) and v not in self.paths and self.is_used_once(v):
            eqn = self.made_by.get(v)
            if eqn is None or eqn.primitive.name != "mul":
                break
            even = [is_constant_along_last(self, u) for u in eqn.invars]
            if sum(even) != 1:
                return None
            v = eqn.invars[even.index(False)]
        return None if is_literal(v) else self.vector(v, width)

    def table(self, v: Any, width: int) -> Vector | None:
        """The parameter whose last axis is that of `v`; None if something else uses it."""
        layer: tuple[int, ...] = ()
        offset = 0.0
        while v not in self.paths:
            eqn = self.made_by.get(v)
            if eqn is None or v.aval.shape[-1:] != (width,) or not self.is_used_once(v):
                return None
            name = eqn.primitive.name
            if name == "add" and any(map(is_literal, eqn.invars)):
                (number,) = [x.val for x in eqn.invars if is_literal(x)]
                offset += float(number)
                (v,) = [x for x in eqn.invars if not is_literal(x)]
                continue
            if len(eqn.invars) != 1:
                return None
            if name == "broadcast_in_dim":
                dims = eqn.params["broadcast_dimensions"]
                if not dims or dims[-1] != v.aval.ndim - 1:
                    return None
            elif (start := _start(eqn)) is not None:
                layer = (start, *layer)
            elif name not in (*SAME, "reshape", "squeeze"):
                return None
            v = eqn.invars[0]
        path = self.paths[v]
        whole = v.aval.shape
        if whole[-1:] != (width,) or not self.is_own(path, layer):
            return None
        return Vector(path, layer, offset)


def _start(eqn: Any) -> int | None:
    """The layer that an equation takes from a stack of them."""
    if eqn.primitive.name != "slice":
        return None
    before, after = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    is_one = after[:1] == (1,) and before[1:] == after[1:]
    return eqn.params["start_indices"][0] if is_one else None


def is_constant_along_last(flow: Flow, v: Any) -> bool:
    """Whether a variable has one value along its last axis."""
    while not is_literal(v):
        if not v.aval.shape or v.aval.shape[-1] == 1:
            return True
        eqn = flow.made_by.get(v)
        if eqn is None:
            return False
        if eqn.primitive.name == "broadcast_in_dim":
            dims, source = eqn.params["broadcast_dimensions"], eqn.invars[0]
            last = v.aval.ndim - 1
            return last not in dims or source.aval.shape[dims.index(last)] == 1
        if eqn.primitive.name not in SAME:
            return False
        v = eqn.invars[0]
    return True


def is_zero(flow: Flow, v: Any) -> bool:
    """Whether a variable is 0 all over, as the mean in a norm that has none."""
    while not is_literal(v):
        eqn = flow.made_by.get(v)
        passing = (*SAME, "broadcast_in_dim", "reshape", "squeeze")
        if eqn is None or eqn.primitive.name not in passing:
            return False
        v = eqn.invars[0]
    return not np.any(np.asarray(v.val))


def ends(site: Site) -> bool:
    """Whether a site sums the last axes of its input, in the order of its weight's rows."""
    if site.c.name == "conv_general_dilated":
        return False
    summed = tuple(site.labels[a] for a in site.axes.summed)
    shared = [site.labels[a] for a in site.axes.batch if site.labels[a] in site.inputs]
    return site.inputs[-len(summed) :] == summed and not shared


def owns_weight(flow: Flow, sites: Sequence[int]) -> bool:
    """Whether nothing but these sites, each by itself, uses their weights."""
    listed = [flow.program.sites[n] for n in sites]
    return all(flow.is_own(site.path, site.layer) for site in listed)
