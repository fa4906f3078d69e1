"""Ledger: what a witness has seen and what the jaxpr has, put together as rows.

`Witness` numbers every module, op and contraction that runs, and marks the equations with
the numbers; `Ledger` finds the marks in the jaxpr. See model/explain.py.
"""

import contextlib
import dataclasses
import math
from collections.abc import Callable
from typing import Any

import flax
import jax
from flax import linen as nn
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from midtread.kernels import environment, measured
from midtread.model import caught, flaxlib, intercept, jaxprs, operands, running
from midtread.model.boxes import WithAux
from midtread.model.chosen import Kernel, kernels_of
from midtread.model.coverage import Coverage, Param, Row, dtype_text
from midtread.model.moves import trail
from midtread.model.rules import recipe_of
from midtread.model.weights import (
    ADAPTERS,
    codes_among,
    codes_in,
    find_param,
    find_part,
    origin_is_hidden,
)
from midtread.numerics.formats import dtype_bits
from midtread.numerics.qarray import QArray, is_float
from midtread.ops.recipe import Recipe
from midtread.ops.witness import PREFIX

LOOKUP = "take"
ADAPTER = "adapter, in float"


@dataclasses.dataclass
class _Op:
    """An op that a provider was given."""

    name: str
    weights: list[str]
    op_id: str = ""
    rule: int | None = None


@dataclasses.dataclass
class _Contraction:
    """What the engine was asked to compute, and in which op."""

    op: _Op | None
    c: Any
    recipe: Recipe | None
    operands: tuple[Any, Any]  # arrays or QArrays, as tracers
    weights: tuple[str | None, str | None]
    out: Any = None


class Witness:
    """Numbers what runs, and marks the equations with the numbers (ops/witness.py)."""

    def __init__(self):
        self.entries: list[Any] = []  # each is a path, an _Op or a _Contraction
        self.known: dict[int, str] = {}  # id of codes -> the parameter they are
        self._op: _Op | None = None

    def _scope(self, entry: Any) -> contextlib.AbstractContextManager:
        self.entries.append(entry)
        return jax.named_scope(f"{PREFIX}{len(self.entries) - 1}")

    def inside(self, path: str) -> contextlib.AbstractContextManager:
        return self._scope(path)

    def handle(self, name: str, handler: Callable, args: tuple, kwargs: dict) -> Any:
        if name not in (*caught.CONTRACTIONS, LOOKUP):
            return handler(*args, **kwargs)
        weights = [_weight_of(a, self.known) for a in args if hasattr(a, "shape")]
        op = _Op(name, [w for w in weights if w])
        before, self._op = self._op, op
        try:
            with self._scope(op):
                return handler(*args, **kwargs)
        finally:
            self._op = before

    def rule(self, index: int | None, op_id: str | None) -> None:
        if self._op is not None and not self._op.op_id:
            self._op.rule, self._op.op_id = index, op_id or ""

    def range(self, name: str, x: Any, range_: Any) -> None:
        """Does nothing: model/clipping.py runs the model to count what ranges cut off."""

    def contraction(self, c, recipe, lhs, rhs, run) -> Any:
        weights = _weight_of(lhs, self.known), _weight_of(rhs, self.known)
        entry = _Contraction(self._op, c, recipe, (lhs, rhs), weights)
        with self._scope(entry):
            number = len(self.entries) - 1
            out = run()
        entry.out = jax.typeof(out)
        return checkpoint_name(out, f"{PREFIX}{number}")


def _weight_of(x: Any, known: dict[int, str]) -> str | None:
    """Returns the name of the parameter that an operand is, or None."""
    if isinstance(x, QArray) and id(x.qvalue) in known:
        return known[id(x.qvalue)]
    try:
        module = intercept.current_module()
    except ValueError:
        return None
    x = flaxlib.unbox(x)
    x = x.array if isinstance(x, WithAux) else x
    if not isinstance(x, QArray):
        name = _float_weight_of(module, x) if hasattr(x, "dtype") else None
        return name and name.removesuffix("[i]")
    own = codes_in(module)
    near = {id(intercept.unwrap(q.qvalue)): name for name, q in own.items()}
    last = x.qvalue
    for last, _ in trail(x.qvalue):
        if id(last) in near:
            return near[id(last)]
    far = {id(intercept.unwrap(q.qvalue)): name for name, q in _codes_of_model()}
    if id(last) in far:
        return far[id(last)]
    if not origin_is_hidden(last, {k: q.qvalue for k, q in own.items()}):
        return None
    alike = [k for k, q in own.items() if sorted(q.shape) == sorted(x.shape)]
    return (alike or list(own) or [None])[0]


def _float_weight_of(module: Any, x: Any) -> str | None:
    """Returns the name of the float parameter that an operand is, or is a part of; with its
    path in the model if another module holds it."""
    name = find_param(module, x)
    if name is not None or not running.here.active:
        return name
    part = find_part(running.here.active[0], module, x)
    if part is None:
        return None
    owner, name, _ = part
    return name if owner is module else f"{flaxlib.path_of(owner)}/{name}"


def _codes_of_model() -> list[tuple[str, QArray]]:
    """Returns (path, codes) of every quantized parameter of the model that runs."""
    model = running.here.active[0].model if running.here.active else None
    if isinstance(model, nn.Module):
        params = flax.core.unfreeze(model.variables.get("params", {}))
        is_leaf = lambda _, value: isinstance(value, WithAux)
        flat = flax.traverse_util.flatten_dict(params, sep="/", is_leaf=is_leaf)
        return list(codes_among(flat).items())
    if not isinstance(model, nnx.Module):
        return []
    return [
        ("/".join(map(str, (*path, name))), q)
        for path, module in nnx.iter_modules(model)
        for name, q in codes_in(module).items()
    ]


# --- rows -------------------------------------------------------------------------------------


def _sized(variables: Any) -> list[jaxprs.Sized]:
    return [(v.aval.shape, 8 * v.aval.dtype.itemsize) for v in variables]


class Ledger:
    """Turns what a witness has seen and what the jaxpr has into rows."""

    def __init__(self, provider, seen: Witness, params: dict[str, Param], on=()):
        """Takes `on`, a tuple of the device whose kernels rows should name; () for no
        kernels."""
        self.on = on
        self.rules = provider._rules
        self.provider = type(provider).__name__
        self.factors = getattr(provider, "_factors", {})  # LoRA's factors, by weight
        self.stays_float = provider.stays_float  # weight -> why
        self.entries, self.params = seen.entries, params
        self.contracted = {
            id(x.op) for x in self.entries if isinstance(x, _Contraction)
        }

    def coverage(self, jaxpr: Any) -> Coverage:
        # Equations without a scope ran before the model did, while it was prepared.
        equations = [f for f in jaxprs.walk(jaxpr) if f.scopes]
        runs = self._runs_as(equations)
        rows: dict[Any, Row] = {}
        for f in equations:
            row = self._row(f, runs)
            if row is not None:
                key = dataclasses.replace(row, times=0, flops=0, bytes=0)
                rows[key] = row if key not in rows else rows[key] + row
        unused = self._unused(list(rows.values()))
        return Coverage((*rows.values(), *unused), self.params)

    def _last(self, f: jaxprs.Equation, kind: type) -> tuple[Any, Any]:
        for number in reversed(f.scopes):
            if isinstance(self.entries[number], kind):
                return number, self.entries[number]
        return None, None

    def _path(self, f: jaxprs.Equation) -> str:
        return self._last(f, str)[1] or ""

    def _runs_as(self, equations: list[jaxprs.Equation]) -> dict[int, str]:
        """Returns, for every contraction of the engine, the dtypes of most of its products."""
        most: dict[int, jaxprs.Equation] = {}
        runs: dict[int, str] = {}
        for f in equations:
            number, entry = self._last(f, _Contraction)
            if entry is None:
                continue
            if f.name in jaxprs.OPAQUE:
                if jaxprs.may_multiply(_sized(f.eqn.invars), _sized(f.eqn.outvars)):
                    runs[number] = f"kernel {jaxprs.kernel_name(f.eqn)}"
            elif f.name in jaxprs.CONTRACTIONS:
                most[number] = max(f, most.get(number, f), key=lambda f: f.flops)
        for number, f in most.items():
            runs.setdefault(number, operands.multiplied(f))
        return runs

    def _row(self, f: jaxprs.Equation, runs: dict[int, str]) -> Row | None:
        if f.name == jaxprs.MARK:
            if not f.eqn.params["name"].startswith(PREFIX):
                return None
            number = int(f.eqn.params["name"].removeprefix(PREFIX))
            return self._engine_row(f, self.entries[number], runs.get(number, ""))
        if self._last(f, _Contraction)[1] is not None:
            return None
        if f.name in jaxprs.OPAQUE:
            return self._opaque_row(f)
        return self._lookup_row(f) if f.name == jaxprs.LOOKUP else self._plain_row(f)

    def _weight(self, path: str, name: str | None) -> tuple[str, int]:
        """Returns (full name, bytes in the float model)."""
        if name is None:
            return "", 0
        full = name if name in self.params else f"{path}/{name}".lstrip("/")
        param = self.params.get(full)
        return (full, param.nbytes) if param else (full, 0)

    def _engine_row(self, f: jaxprs.Equation, entry: _Contraction, runs: str) -> Row:
        path, (lhs, rhs) = self._path(f), entry.operands
        times = f.times * math.prod(f.out.shape) // max(math.prod(entry.out.shape), 1)
        c, recipe, tiled = entry.c, entry.recipe or Recipe(), self._tiles(entry.op)
        fwd = (
            operands.operand(
                lhs, recipe.fwd.lhs, c, "lhs", tiled and bool(entry.weights[0])
            ),
            operands.operand(
                rhs, recipe.fwd.rhs, c, "rhs", tiled and bool(entry.weights[1])
            ),
        )
        dlhs = drhs = None
        if entry.recipe is not None and self._trains(entry.op):
            if is_float(lhs):
                g = operands.operand(entry.out, recipe.dlhs.g, c.dlhs, "lhs")
                dlhs = g, operands.slot(rhs, recipe.dlhs.rhs, c.dlhs, "rhs", fwd[1])
            if is_float(rhs):
                g = operands.operand(entry.out, recipe.drhs.g, c.drhs, "rhs")
                drhs = operands.slot(lhs, recipe.drhs.lhs, c.drhs, "lhs", fwd[0]), g
        name = entry.weights[1] or entry.weights[0]
        weight, nbytes = self._weight(path, name)
        op = entry.op or _Op(entry.c.name, [])
        reason = "" if any(o.quantized for o in fwd) else self._why_not(op, entry)
        return Row(
            path=path,
            op=op.op_id or op.name,
            shapes=(tuple(lhs.shape), tuple(rhs.shape)),
            rule=op.rule,
            fwd=operands.texts(fwd),
            dlhs=operands.texts(dlhs),
            drhs=operands.texts(drhs),
            runs_as=runs,
            is_emulated=operands.is_emulated(fwd, runs),
            times=times,
            flops=times * _flops(entry),
            bytes=times * sum(o.nbytes for o in fwd),
            weight=weight,
            weight_bytes=nbytes,
            reason=reason,
            note=f.note,
            quantized=tuple(operands.any_quantized(p) for p in (fwd, dlhs, drhs)),
            kernels=self._kernels(entry),
            measured=self._measured(entry, fwd) if self.on else "",
        )

    def _kernels(self, entry: _Contraction) -> tuple[Kernel, ...]:
        trains = self._trains(entry.op)
        choices = [
            kernels_of(entry.c, entry.recipe, entry.operands, trains, device)
            for device in self.on
        ]
        return choices[0] if choices else ()

    def _measured(self, entry: _Contraction, fwd: tuple) -> str:
        """Says whether a stored weight is served faster with float rows or quantized ones."""
        c, (lhs, rhs) = entry.c, entry.operands
        sides = {"lhs": (lhs, fwd[0]), "rhs": (rhs, fwd[1])}
        stored = [side for side, (x, _) in sides.items() if isinstance(x, QArray)]
        if len(stored) != 1 or not c.is_matmul or c.grouping is not None:
            return ""
        (weight,) = stored
        act = "lhs" if weight == "rhs" else "rhs"
        x, operand = sides[act]
        extents = dict(zip(c.labels(act), x.shape))
        rows = math.prod(extents[label] for label in c.kept(act))
        short = lambda side: sides[side][1].text.split("/")[0]
        of_rows = short(act) if operand.quantized else measured.FLOAT
        (name,) = self.on
        device = environment.device_named(name) if name else environment.here().device
        return measured.compare(device.kind, short(weight), of_rows, rows)

    def _rule(self, op: _Op | None) -> Any:
        return None if op is None or op.rule is None else self.rules[op.rule]

    def _trains(self, op: _Op | None) -> bool:
        rule = self._rule(op)
        return rule is None or hasattr(rule, "bwd_qtype")

    def _tiles(self, op: _Op | None) -> bool:
        """Whether the rule of an op tiles weights. The scale of codes does not say so if their
        tile is the whole axis."""
        rule = self._rule(op)
        weight = None if rule is None else recipe_of(rule, False, True).fwd.rhs
        return weight is not None and bool(weight.tiles)

    def _why_not(self, op: _Op, entry: _Contraction) -> str:
        rule = self._rule(op)
        if rule is None:
            return "no rule matches" if entry.op else "float operands"
        kinds = [str(x.dtype) for x in entry.operands]
        if not all(is_float(x) for x in entry.operands):
            what = " x ".join(kinds)
            return f"rule {op.rule} matches, but {what} is not float: left alone"
        if recipe_of(rule, False, True).fwd.lhs is None and not any(entry.weights):
            return f"rule {op.rule} quantizes weights, and neither operand is one"
        return f"rule {op.rule} matches, but asks for neither operand"

    def _plain_row(self, f: jaxprs.Equation) -> Row:
        _, op = self._last(f, _Op)
        path, runs = self._path(f), operands.multiplied(f)
        op = op or _Op(f.name, [])
        weight, nbytes = self._weight(path, op.weights[0] if op.weights else None)
        texts = tuple(map(dtype_text, f.dtypes))
        bits = [math.prod(s) * dtype_bits(d) for s, d in zip(f.shapes, f.dtypes)]
        row = Row(
            path=path,
            op=op.op_id or op.name,
            shapes=f.shapes,
            rule=op.rule,
            fwd=texts,
            runs_as=runs,
            is_emulated=runs != " x ".join(texts),
            times=f.times,
            flops=f.flops,
            bytes=f.times * sum(bits) // 8,
            weight=weight,
            weight_bytes=nbytes,
            reason=self._why_plain(op),
            note=f.note,
        )
        adapter = self._adapter(f, op, weight)
        return self._adapter_row(row, adapter) if adapter else row

    def _adapter(self, f: jaxprs.Equation, op: _Op, weight: str) -> str:
        """Returns '_lora_a' or '_lora_b' if that is multiplied here beside a weight, else ''.
        A sum over the rank is B's. Of the other products the weight's own is the engine's, or,
        if it is left in float, has no operand of A's shape."""
        rule, factors = self._rule(op), self.factors.get(weight)
        is_apart = id(op) in self.contracted
        if not hasattr(rule, "rank") or not (is_apart or factors):
            return ""
        if f.flops == 2 * f.times * math.prod(f.out.shape) * rule.rank:
            return ADAPTERS[1]
        if is_apart:
            return ADAPTERS[0]
        a = tuple(factors.extents[x] for x in "".join(factors.a))
        return ADAPTERS[0] if any(s[-len(a) :] == a for s in f.shapes) else ""

    def _adapter_row(self, row: Row, adapter: str) -> Row:
        """Makes a row of A or B, which have the weight's dtype and as many layers."""
        factors, nbytes = self.factors.get(row.weight), 0
        if factors:
            axes = factors.a if adapter == ADAPTERS[0] else factors.b
            size = lambda axes: math.prod(factors.shape(axes))
            nbytes = row.weight_bytes * size(axes) // size(factors.weight)
        return dataclasses.replace(
            row,
            weight=row.weight + adapter,
            weight_bytes=nbytes,
            reason="",
            note="; ".join(x for x in (ADAPTER, row.note) if x),
            is_adapter=True,
        )

    def _why_plain(self, op: _Op) -> str:
        if not op.op_id:
            return "not intercepted: disable_interceptions, or a library's own"
        if op.rule is None:
            return "no rule matches"
        if self._rule(op).leaves_alone:
            return f"rule {op.rule} leaves it alone"
        return f"rule {op.rule} matches, but {self.provider} ran it in its own way"

    def _opaque_row(self, f: jaxprs.Equation) -> Row:
        name = jaxprs.kernel_name(f.eqn)
        shapes = tuple(tuple(v.aval.shape) for v in f.eqn.invars[:2])
        return Row(
            path=self._path(f),
            op=f.name,
            shapes=shapes,
            times=f.times,
            reason=f"opaque: the inside of kernel {name} is never touched",
            note=f.note,
            is_opaque=True,
        )

    def _lookup_row(self, f: jaxprs.Equation) -> Row | None:
        """Makes a row for a table of the model that is looked up, and none for other gathers."""
        path, shape = self._path(f), f.shapes[0]
        weight = self._table(path, shape)
        _, op = self._last(f, _Op)
        is_look_up = op is not None and op.name == LOOKUP
        if not weight or (is_look_up and not op.weights):  # another array of that shape
            return None
        op = op if is_look_up else _Op("gather", [])
        rule = self._rule(op)
        spec = None if rule is None else recipe_of(rule, False, True).fwd.rhs
        low = None if spec is None else spec.format.name
        return Row(
            path=path,
            op=op.op_id or op.name,
            shapes=(shape, f.shapes[1]),
            rule=op.rule,
            fwd=(low, dtype_text(f.dtypes[1])) if low else None,
            times=f.times,
            weight=weight,
            weight_bytes=self.params[weight].nbytes,
            reason="" if low else "a lookup: no rule with op_names=('take',) matches",
            note=f.note,
            quantized=(low is not None, False, False),
        )

    def _table(self, path: str, shape: tuple[int, ...]) -> str:
        """Names the parameter of a module, or of a stack of layers, that has this shape."""
        prefix = f"{path}/" if path else ""
        for name, param in self.params.items():
            here = name.startswith(prefix) and "/" not in name[len(prefix) :]
            if here and len(shape) > 1 and param.shape[-len(shape) :] == shape:
                return name
        return ""

    def _unused(self, rows: list[Row]) -> list[Row]:
        """Makes rows for large parameters that no contraction multiplies; the totals count the
        small ones."""
        used = {row.weight for row in rows}
        left = {k: p for k, p in self.params.items() if k not in used}
        total = sum(p.nbytes for p in self.params.values())
        large = {
            k: p
            for k, p in left.items()
            if 100 * p.nbytes >= total and len(p.shape) > 1
        }
        rows_of_unused = []
        for name, param in large.items():
            path, _, short = name.rpartition("/")
            reason = f"no contraction has {short} as an operand of its own"
            if name in self.stays_float:
                reason = f"stays float: what is multiplied {self.stays_float[name]} it"
            rows_of_unused.append(
                Row(
                    path=path,
                    op="-",
                    shapes=(param.shape,),
                    weight=name,
                    weight_bytes=param.nbytes,
                    reason=reason,
                )
            )
        return rows_of_unused


def _flops(entry: _Contraction) -> int:
    c, (lhs, rhs) = entry.c, entry.operands
    if c.name == "conv_general_dilated":
        features = rhs.shape[c.numbers.rhs_spec[0]]
        return 2 * math.prod(entry.out.shape) * math.prod(rhs.shape) // features
    extents = dict(zip((*c.lhs, *c.rhs), (*lhs.shape, *rhs.shape)))
    extents.pop(getattr(c, "group", None), None)  # a row is multiplied by one group
    return 2 * math.prod(extents.values())
