"""Program: a model as a straight line of equations, with its weights and inputs marked.

A model is traced once, on shapes, under a provider that changes nothing and marks, at every
contraction with a parameter, the weight, the input and the output. Calls inside the trace
are then inlined and scans over layers unrolled, so that what is left is one list of
equations in which every layer stands by itself. From there on it does not matter whether
the model was written in Linen or NNX, as a loop, a scan or a jitted function.

    trace(...)       the list, and the `Site` of every mark
    origin(...)      which parameter, or which layer of it, a marked weight is
    levels(...)      how many inputs of sites lie on the way to each variable

Sites whose inputs need no other site's output in between have one level (query, key and
value; gate and up), which is their stage: stages.py runs the list stage by stage, and the
sites of a stage are settled together.
"""

import dataclasses
import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import flax
import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from midtread.algorithms.weight import Axes
from midtread.model import donation, flaxlib, intercept
from midtread.model.function import quantize_function
from midtread.model.provider import QuantizationProvider
from midtread.model.quantize import quantize_model, split_arrays
from midtread.model.rules import QuantizationRule
from midtread.model.weights import find_param, turn_of
from midtread.numerics.qarray import QArray, is_float
from midtread.ops.api import Ops
from midtread.ops.contraction import Contraction
from midtread.ops.einsum import in_jax_order
from midtread.ops.engine import contract

MARK = re.compile(r"midtread-(weight|input|output|sizes)-(\d+)")


@dataclasses.dataclass(frozen=True)
class Site:
    """A contraction with a parameter, at one layer."""

    path: tuple[Any, ...]  # of the parameter in the tree of parameters
    layer: tuple[int, ...]  # indices into it, where layers are stacked in one parameter
    op: str
    c: Contraction
    side: str  # of the contraction that the weight is on
    labels: tuple[str, ...]  # of the weight's axes, as it is stored (one layer of it)
    turn: tuple[int, ...]  # axis i of the operand is axis turn[i] of the stored weight
    shape: tuple[int, ...]  # of the operand
    module: str = ""  # the path of the module, or the scope, that it happens in
    stage: int = 0

    @property
    def name(self) -> str:
        """'decoder/layers/mlp/wi_0/kernel[3]'."""
        return "/".join(map(str, self.path)) + "".join(f"[{i}]" for i in self.layer)

    @property
    def alike(self) -> "Site":
        """The same for all layers that do the same: what a compiled function depends on."""
        return dataclasses.replace(self, path=(), layer=(), module="", stage=0)

    @property
    def inputs(self) -> tuple[str, ...]:
        """Labels of the other operand."""
        return self.c.rhs if self.side == "lhs" else self.c.lhs

    @property
    def groups(self) -> tuple[str, ...]:
        return self.c.groups(self.side)

    @property
    def axes(self) -> Axes:
        """Of the stored weight: which are batched, summed and kept."""
        if self.c.name == "conv_general_dilated":
            kept = ("o",)
            batch: tuple[str, ...] = ()
        else:
            kept = tuple(x for x in self.labels if x not in self.inputs)
            kept = tuple(x for x in kept if x not in self.groups)
            batch = tuple(
                x for x in self.labels if x in self.inputs and x in self.c.out
            )
            batch = (*self.groups, *batch)
        summed = [x for x in self.labels if x not in (*kept, *batch)]
        at = lambda labels: tuple(self.labels.index(x) for x in labels)
        return Axes(at(batch), at(summed), at(kept))

    @property
    def windows(self) -> tuple[int, ...]:
        """Summed axes along which a convolution meets the same input again."""
        return tuple(a for a in self.axes.summed if self.labels[a] not in self.inputs)

    @property
    def stored_shape(self) -> tuple[int, ...]:
        return tuple(self.shape[self.turn.index(a)] for a in range(len(self.shape)))

    def as_operand(self, stored: jax.Array) -> jax.Array:
        """A weight as it is stored, turned as the contraction takes it."""
        return stored.transpose(self.turn)

    def path_in(self, params: Mapping[tuple, Any]) -> tuple:
        """Of its parameter: numbers in a path may be text in one place and not in another."""
        wanted = tuple(map(str, self.path))
        return next(path for path in params if tuple(map(str, path)) == wanted)

    def weight_in(self, params: Mapping[tuple, Any]) -> jax.Array:
        """Its weight, as it is stored, of all parameters by path."""
        w = params[self.path if self.path in params else self.path_in(params)]
        return w[self.layer].reshape(self.stored_shape)


class Marker(QuantizationProvider):
    """Changes nothing; marks the weight, input and output of contractions."""

    def __init__(self):
        super().__init__([QuantizationRule()])
        self.seen: list[dict[str, Any]] = []

    def _run(self, name: str, plain: Callable, args: tuple, kwargs: dict) -> Any:
        self._get_current_rule_and_op_id(name)
        if name == "einsum":
            args = in_jax_order(*args)
        weights = {id(a): self._turn(a) for a in args if is_float(a)}
        if not any(weights.values()):
            return plain(*args, **kwargs)
        kwargs.pop("_dot_general", None)
        mark = functools.partial(self._mark, name, weights)
        return getattr(Ops(mark), name)(*args, **kwargs)

    def _turn(self, x: jax.Array) -> tuple[int, ...] | None:
        """For a parameter: axis i of x is the parameter's axis [i]. None for others."""
        owner = intercept.current_module()
        name = find_param(owner, x)
        if name is None:  # it may be another module's, or lie in a list
            owner, name, moves = self.find_part(owner, x) or (owner, None, [])
            name = name if all(m.name == "transpose" for m in moves) else None
        return None if name is None else turn_of(owner, name, x)

    def _mark(self, op: str, weights: dict, c: Contraction, lhs, rhs) -> jax.Array:
        operands = {"lhs": lhs, "rhs": rhs}
        sides = [s for s, x in operands.items() if weights.get(id(x)) is not None]
        if len(sides) != 1:
            return contract(c, lhs, rhs)
        (weight_side,) = sides
        turn = weights[id(operands[weight_side])]
        number = len(self.seen)
        without_sizes = c
        if hasattr(c, "sizes"):
            sizes = checkpoint_name(c.sizes, f"midtread-sizes-{number}")
            without_sizes = dataclasses.replace(c, sizes=None)
            c = dataclasses.replace(c, sizes=sizes)
        for side, x in tuple(operands.items()):
            kind = "weight" if side == weight_side else "input"
            operands[side] = checkpoint_name(x, f"midtread-{kind}-{number}")
        labels = c.labels(weight_side)
        self.seen.append(
            {
                "op": op,
                "c": without_sizes,
                "side": weight_side,
                "turn": turn,
                "labels": tuple(labels[turn.index(a)] for a in range(len(turn))),
                "shape": tuple(operands[weight_side].shape),
                "module": flaxlib.path_of(intercept.current_module()),
            }
        )
        out = contract(c, operands["lhs"], operands["rhs"])
        return checkpoint_name(out, f"midtread-output-{number}")


@dataclasses.dataclass(frozen=True)
class Program:
    """A model's equations: `eqns` from `params` and `inputs` to `outputs`."""

    eqns: tuple[Any, ...]
    constants: dict[Any, Any]  # variable -> array
    params: dict[tuple, Any]  # path -> variable
    inputs: tuple[Any, ...]  # variables
    outputs: tuple[Any, ...]  # variables or literals
    sites: tuple[Site, ...]
    # number of a site -> {"weight" | "input" | "output" | "sizes": index of the mark}
    marks: tuple[dict[str, int], ...]
    result: Any  # the tree of the outputs
    arrays: Callable[[Any], list]  # a batch -> the arrays that `inputs` stand for

    def sums_alike(self, number: int) -> bool:
        """Whether all that use a site's weight sum the same of its axes: what is done to the
        inputs of one can then be done to those of all. A table and its transpose do not."""
        of = lambda site: (tuple(map(str, site.path)), site.layer)
        mine = self.sites[number]
        axes = {site.axes[:2] for site in self.sites if of(site) == of(mine)}
        return len(axes) == 1


def trace(
    model: Any, batch: Any, *, params: Any = None, method: str = "__call__"
) -> tuple[Program, dict[tuple, jax.Array]]:
    """Returns the program of a model, and its parameters by path.

    Args:
        model: an NNX module, a Linen one with its `params`, or a function of its `params`.
        batch: what the method is called with: an array, a tuple, or a dict of keywords.

    Raises:
        ValueError: a weight is used inside a while loop, a branch or a shard_map.
    """
    call = as_call(batch)
    arrays, rebuild = split_arrays(*call)
    check_method(model, method)
    marker = Marker()
    if isinstance(model, nnx.Module):
        if params is not None:
            raise ValueError(
                "an NNX module holds its parameters: leave out params, or put them into the "
                "module with nnx.update."
            )
        run, flat = _nnx_run(model, marker, method, call)
    elif isinstance(model, nn.Module):
        run, flat = _linen_run(model, marker, method, params)
    elif callable(model):
        run, flat = _function_run(model, marker, params)
    else:
        raise TypeError(
            "calibration takes flax.linen and flax.nnx modules, and functions of their "
            f"parameters, not a {type(model).__name__}."
        )

    def run_on_arrays(flat: dict, arrays: list) -> Any:
        args, kwargs = rebuild(arrays)
        return run(flat, *args, **kwargs)

    return _program(run_on_arrays, flat, arrays, marker), flat


def check_method(model: Any, method: str) -> None:
    """Refuses a method that a model does not have."""
    is_module = isinstance(model, nnx.Module | nn.Module)
    if is_module and not callable(getattr(model, method, None)):
        raise ValueError(f"{type(model).__name__} has no method {method!r}.")
    if not is_module and method != "__call__":
        raise ValueError(f"a function has no method {method!r}: leave it out.")


# The three below return (a function of the parameters by path and a call's arguments that runs
# the model under the marker, the parameters by path).


def _nnx_run(model: nnx.Module, marker: Marker, method: str, call: tuple):
    graph, learned, rest = nnx.split(model, nnx.Param, ...)
    boxes = dict(nnx.to_flat_state(learned))
    inputs, named_inputs = call

    def run(flat: dict, /, *args, **kwargs) -> Any:
        state = nnx.from_flat_state(
            {path: boxes[path].replace(value) for path, value in flat.items()}
        )
        merged = donation.rebind(model, nnx.merge(graph, state, rest))
        marked = quantize_model(
            merged, marker, *inputs, donate=True,
            methods=(method,), skip_nnx_init=True, **named_inputs,
        )  # fmt: skip
        return getattr(marked, method)(*args, **kwargs)

    return run, {path: flaxlib.unbox(leaf) for path, leaf in boxes.items()}


def _linen_run(model: nn.Module, marker: Marker, method: str, variables: Any):
    tree = flax.core.unfreeze(flaxlib.unbox(variables["params"]))
    others = {k: v for k, v in variables.items() if k != "params"}

    def run(flat: dict, /, *args, **kwargs) -> Any:
        marked = quantize_model(model, marker, methods=(method,))
        params = flax.traverse_util.unflatten_dict(flat)
        return marked.apply(
            {"params": params, **others}, *args, method=method, **kwargs
        )

    return run, flax.traverse_util.flatten_dict(tree)


def _function_run(model: Callable, marker: Marker, params: Any):
    if params is None:
        raise ValueError("a function needs its parameters: params=a tree of arrays.")
    flat, put_back = open_params(params)
    quantized = [path for path, leaf in flat.items() if isinstance(leaf, QArray)]
    if quantized:
        raise ValueError(f"{'/'.join(quantized[0])} is quantized already.")

    def run(flat: dict, /, *args, **kwargs) -> Any:
        return quantize_function(model, marker)(put_back(flat), *args, **kwargs)

    return run, flat


def open_params(params: Any) -> tuple[dict[tuple, Any], Callable[[dict], Any]]:
    """Returns {path: leaf} of a tree of parameters, and a function that puts it back."""
    is_leaf = lambda x: isinstance(x, QArray)
    leaves, structure = jax.tree_util.tree_flatten_with_path(params, is_leaf=is_leaf)
    text = lambda key: str(
        next(getattr(key, f) for f in ("key", "idx", "name") if hasattr(key, f))
    )
    paths = [tuple(map(text, path)) for path, _ in leaves]
    flat = dict(zip(paths, (leaf for _, leaf in leaves)))
    if len(flat) != len(leaves):
        raise ValueError("two parameters have one path: rename the keys of the tree.")
    return flat, lambda flat: jax.tree.unflatten(structure, [flat[p] for p in paths])


def as_call(batch: Any) -> tuple[tuple, dict[str, Any]]:
    """Returns the arguments and the keywords that a batch stands for."""
    if isinstance(batch, dict):
        return (), batch
    return (tuple(batch) if isinstance(batch, tuple | list) else (batch,)), {}


def _program(run: Callable, flat: dict, arrays: list, marker: Marker) -> Program:
    closed, shape = jax.make_jaxpr(run, return_shape=True)(flat, arrays)
    avals = [v.aval for v in closed.jaxpr.invars]
    straight = jax.make_jaxpr(
        lambda *values: _inline(closed.jaxpr, closed.consts, values)
    )(*(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals))
    jaxpr = straight.jaxpr
    paths = sorted(flat)  # as jax flattens a dict
    params = dict(zip(paths, jaxpr.invars[: len(paths)]))
    made_by = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
    marks: list[dict[str, int]] = []
    sites: list[Site] = []
    opened: dict[int, dict[str, int]] = {}
    for index, eqn in enumerate(jaxpr.eqns):
        if eqn.primitive.name != "name" or not (m := MARK.match(eqn.params["name"])):
            continue
        kind, number = m[1], int(m[2])
        opened.setdefault(number, {})[kind] = index
        if kind == "output":  # the last one, of every layer
            mark, seen = opened.pop(number), marker.seen[number]
            source = origin(jaxpr.eqns[mark["weight"]].invars[0], made_by, params)
            if source is not None:
                sites.append(Site(*source, **seen))
                marks.append(mark)
    level = levels(jaxpr.eqns, marks)
    sites = [
        dataclasses.replace(
            site, stage=level.get(jaxpr.eqns[mark["input"]].invars[0], 0)
        )
        for site, mark in zip(sites, marks)
    ]
    return Program(
        tuple(jaxpr.eqns),
        dict(zip(jaxpr.constvars, straight.consts)),
        params,
        tuple(jaxpr.invars[len(paths) :]),
        tuple(jaxpr.outvars),
        tuple(sites),
        tuple(marks),
        jax.tree.structure(shape),
        lambda batch: jax.tree.leaves(split_arrays(*as_call(batch))[0]),
    )


# --- one straight line ------------------------------------------------------------------------

JITTED = ("jit", "pjit")
INLINED = (*JITTED, "closed_call", "core_call", "checkpoint", "remat2", "remat", "custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr")  # fmt: skip


def _inline(jaxpr: Any, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    """Evaluates a jaxpr; what is jitted or holds marks is not called but written out."""
    env = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args)))
    read = lambda v: v.val if is_literal(v) else env[v]
    for eqn in jaxpr.eqns:
        values = [read(v) for v in eqn.invars]
        name = eqn.primitive.name
        inner = eqn.params["jaxpr"] if name in JITTED else _marked_body(eqn)
        if inner is None:
            outs = bind(eqn, values)
        elif name == "scan":
            outs = _unroll(eqn, inner, values)
        elif name in INLINED:
            body = getattr(inner, "jaxpr", inner)
            outs = _inline(body, getattr(inner, "consts", ()), values)
        else:
            raise ValueError(
                f"a weight is used inside of {name!r}, where calibration cannot follow. "
                "Run layers in a Python loop or a scan to calibrate the model."
            )
        env.update(zip(eqn.outvars, outs))
    return [read(v) for v in jaxpr.outvars]


def is_literal(v: Any) -> bool:
    """Whether an operand of an equation is a number, not a variable."""
    return hasattr(v, "val")


def bind(eqn: Any, values: Sequence[Any]) -> Sequence[Any]:
    """Returns the results of one equation."""
    params = eqn.primitive.get_bind_params(eqn.params)
    functions, params = params if isinstance(params, tuple) else ((), params)
    outs = eqn.primitive.bind(*functions, *values, **params)
    return outs if eqn.primitive.multiple_results else [outs]


def _marked_body(eqn: Any) -> Any:
    """Returns the jaxpr inside an equation that holds marks, or None."""
    for value in eqn.params.values():
        for inner in value if isinstance(value, tuple | list) else (value,):
            if hasattr(inner, "eqns") and _holds_marks(getattr(inner, "jaxpr", inner)):
                return inner
    return None


def _holds_marks(jaxpr: Any) -> bool:
    return any(
        (e.primitive.name == "name" and MARK.match(e.params["name"]))
        or _marked_body(e) is not None
        for e in jaxpr.eqns
    )


def _unroll(eqn: Any, inner: Any, values: Sequence[Any]) -> list[Any]:
    """Returns the results of a scan, whose body is written out for each index."""
    p = eqn.params
    fixed, carried = p["num_consts"], p["num_carry"]
    consts = values[:fixed]
    carry, stacked = values[fixed : fixed + carried], values[fixed + carried :]
    indices = list(range(p["length"]))
    results = []
    for i in indices[::-1] if p["reverse"] else indices:
        slices = [jax.lax.index_in_dim(x, i, 0, keepdims=False) for x in stacked]
        outs = _inline(inner.jaxpr, inner.consts, [*consts, *carry, *slices])
        carry, ys = outs[:carried], outs[carried:]
        results.append(ys)
    results = results[::-1] if p["reverse"] else results
    return [*carry, *(jnp.stack(ys) for ys in zip(*results))]


ONE_TO_ONE = ("convert_element_type", "reshape", "transpose", "copy", "copy_p", "sharding_constraint", "squeeze", "name", "optimization_barrier")  # fmt: skip


def origin(
    variable: Any, made_by: dict, params: dict, passing: tuple[str, ...] = ONE_TO_ONE
) -> tuple[tuple, tuple] | None:
    """Returns (path, layer) of the parameter that a variable is, None if it is none; `passing`
    are the operations on the way that leave it what it is."""
    paths = {v: path for path, v in params.items()}
    layer: tuple[int, ...] = ()
    while variable not in paths:
        eqn = made_by.get(variable)
        if eqn is None or len(eqn.invars) != 1:
            return None
        if eqn.primitive.name == "slice":  # one layer of a stack
            starts, before = eqn.params["start_indices"], eqn.invars[0].aval.shape
            after = eqn.outvars[0].aval.shape
            if before[1:] != after[1:] or after[0] != 1:
                return None
            layer = (starts[0], *layer)
        elif eqn.primitive.name not in passing:
            return None
        variable = eqn.invars[0]
    return paths[variable], layer


# --- levels -----------------------------------------------------------------------------------


def levels(eqns: Sequence[Any], marks: Sequence[dict[str, int]]) -> dict[Any, int]:
    """Returns the level of every variable: the number of inputs of sites on the way to it."""
    level: dict[Any, int] = {}
    inputs = {mark["input"] for mark in marks}
    for index, eqn in enumerate(eqns):
        known = (level.get(v, 0) for v in eqn.invars if not is_literal(v))
        after = max(known, default=0) + (index in inputs)
        level.update(dict.fromkeys(eqn.outvars, after))
    return level
