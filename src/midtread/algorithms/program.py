"""Program: a model as a straight line of equations, with its weights and inputs marked.

A model is traced once, on shapes, under a provider that changes nothing and marks, at every
contraction with a parameter, the weight, the input and the output. Calls inside the trace
are then inlined and scans over layers unrolled, so that what is left is one list of
equations in which every layer stands by itself. From there on it does not matter whether
the model was written in Linen or NNX, as a loop, a scan or a jitted function.

    trace(...)       the list, and the `Site` of every mark
    stages(...)      the list cut where inputs of sites come out: stage s may be run when
                     every weight that stages before it use is settled
    origin(...)      which parameter, or which layer of it, a marked weight is

Sites whose inputs need no other site's output in between have one stage (query, key and
value; gate and up); the sites of a stage are settled together.
"""

import dataclasses
import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

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
    def stored_shape(self) -> tuple[int, ...]:
        return tuple(self.shape[self.turn.index(a)] for a in range(len(self.shape)))

    def as_operand(self, stored: jax.Array) -> jax.Array:
        """A weight as it is stored, turned as the contraction takes it."""
        return stored.transpose(self.turn)

    def path_in(self, params: Mapping[tuple, Any]) -> tuple:
        """Of its parameter: numbers in a path may be text in one place and not in another."""
        own = tuple(map(str, self.path))
        return next(path for path in params if tuple(map(str, path)) == own)

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
        module = intercept.current_module()
        name = find_param(module, x)
        return None if name is None else turn_of(module, name, x)

    def _mark(self, op: str, weights: dict, c: Contraction, lhs, rhs) -> jax.Array:
        sides = {"lhs": lhs, "rhs": rhs}
        own = [side for side, x in sides.items() if weights.get(id(x)) is not None]
        if len(own) != 1:
            return contract(c, lhs, rhs)
        (side,) = own
        turn = weights[id(sides[side])]
        number = len(self.seen)
        if hasattr(c, "sizes"):
            sizes = checkpoint_name(c.sizes, f"midtread-sizes-{number}")
            c = dataclasses.replace(c, sizes=sizes)
        for each, x in tuple(sides.items()):
            kind = "weight" if each == side else "input"
            sides[each] = checkpoint_name(x, f"midtread-{kind}-{number}")
        still = dataclasses.replace(c, sizes=None) if hasattr(c, "sizes") else c
        labels = c.labels(side)
        self.seen.append(
            {
                "op": op,
                "c": still,
                "side": side,
                "turn": turn,
                "labels": tuple(labels[turn.index(a)] for a in range(len(turn))),
                "shape": tuple(sides[side].shape),
                "module": flaxlib.path_of(intercept.current_module()),
            }
        )
        out = contract(c, sides["lhs"], sides["rhs"])
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


def trace(
    model: Any, batch: Any, *, params: Any = None, method: str = "__call__"
) -> tuple[Program, dict[tuple, jax.Array]]:
    """The program of a model, and its parameters by path.

    Args:
        model: an NNX module, a Linen one with its `params`, or a function of its `params`.
        batch: what the method is called with: an array, a tuple, or a dict of keywords.

    Raises:
        ValueError: a weight is used inside a while loop, a branch or a shard_map.
    """
    args, kwargs = as_call(batch)
    arrays, rebuild = split_arrays(args, kwargs)
    marker = Marker()
    if isinstance(model, nnx.Module):
        graph, learned, rest = nnx.split(model, nnx.Param, ...)
        flat = {path: flaxlib.unbox(leaf) for path, leaf in nnx.to_flat_state(learned)}

        def run(flat, arrays) -> Any:
            boxes = dict(nnx.to_flat_state(learned))
            state = nnx.from_flat_state(
                {path: boxes[path].replace(value) for path, value in flat.items()}
            )
            merged = donation.rebind(model, nnx.merge(graph, state, rest))
            marked = quantize_model(
                merged, marker, *args, donate=True,
                methods=(method,), skip_nnx_init=True, **kwargs,
            )  # fmt: skip
            again, named = rebuild(arrays)
            return getattr(marked, method)(*again, **named)

    elif isinstance(model, nn.Module):
        import flax

        tree = flax.core.unfreeze(flaxlib.unbox(params["params"]))
        others = {k: v for k, v in params.items() if k != "params"}
        flat = flax.traverse_util.flatten_dict(tree)

        def run(flat, arrays) -> Any:
            marked = quantize_model(model, marker, methods=(method,))
            again, named = rebuild(arrays)
            variables = {"params": flax.traverse_util.unflatten_dict(flat), **others}
            return marked.apply(variables, *again, method=method, **named)

    elif callable(model):
        if method != "__call__":
            raise ValueError(f"a function has no method {method!r}: leave it out.")
        if params is None:
            raise ValueError(
                "a function needs its parameters: params=a tree of arrays."
            )
        flat, put_back = open_params(params)
        unknown = [path for path, leaf in flat.items() if isinstance(leaf, QArray)]
        if unknown:
            raise ValueError(f"{'/'.join(unknown[0])} is quantized already.")

        def run(flat, arrays) -> Any:
            again, named = rebuild(arrays)
            return quantize_function(model, marker)(put_back(flat), *again, **named)

    else:
        raise TypeError(
            "calibration takes flax.linen and flax.nnx modules, and functions of their "
            f"parameters, not a {type(model).__name__}."
        )
    return _program(run, flat, arrays, marker), flat


def open_params(params: Any) -> tuple[dict[tuple, Any], Callable[[dict], Any]]:
    """({path: leaf} of a tree of parameters, and the way back)."""
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
    """(arguments, keywords) of a batch."""
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
    stage = _stages(jaxpr.eqns, marks)
    sites = [
        dataclasses.replace(
            site, stage=stage.get(jaxpr.eqns[mark["input"]].invars[0], 0)
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
            body, own = getattr(inner, "jaxpr", inner), getattr(inner, "consts", ())
            outs = _inline(body, own, values)
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
    """The results of one equation."""
    params = eqn.primitive.get_bind_params(eqn.params)
    functions, params = params if isinstance(params, tuple) else ((), params)
    outs = eqn.primitive.bind(*functions, *values, **params)
    return outs if eqn.primitive.multiple_results else [outs]


def _marked_body(eqn: Any) -> Any:
    """The jaxpr inside an equation that holds marks, or None."""
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
    p = eqn.params
    fixed, carried = p["num_consts"], p["num_carry"]
    consts = values[:fixed]
    carry, stacked = values[fixed : fixed + carried], values[fixed + carried :]
    turns = range(p["length"])
    turned = []
    for i in reversed(turns) if p["reverse"] else turns:
        here = [jax.lax.index_in_dim(x, i, 0, keepdims=False) for x in stacked]
        outs = _inline(inner.jaxpr, inner.consts, [*consts, *carry, *here])
        carry, ys = outs[:carried], outs[carried:]
        turned.append(ys)
    turned = turned[::-1] if p["reverse"] else turned
    return [*carry, *(jnp.stack(ys) for ys in zip(*turned))]


ONE_TO_ONE = ("convert_element_type", "reshape", "transpose", "copy", "copy_p", "sharding_constraint", "squeeze", "name", "optimization_barrier")  # fmt: skip


def origin(
    variable: Any, made_by: dict, params: dict, passing: tuple[str, ...] = ONE_TO_ONE
) -> tuple[tuple, tuple] | None:
    """(path, layer) of the parameter that a variable is, None if it is none; `passing` are
    the operations on the way that leave it what it is."""
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


# --- stages -----------------------------------------------------------------------------------


def _stages(eqns: Sequence[Any], marks: Sequence[dict[str, int]]) -> dict[Any, int]:
    """The stage of every variable: the number of inputs of sites on the way to it."""
    stage: dict[Any, int] = {}
    after = {mark["input"] for mark in marks}
    for index, eqn in enumerate(eqns):
        own = max((stage.get(v, 0) for v in eqn.invars if not is_literal(v)), default=0)
        for v in eqn.outvars:
            stage[v] = own + (index in after)
    return stage


@dataclasses.dataclass(frozen=True)
class Stage:
    """Equations that may run when all weights of stages before are settled."""

    run: Callable[[list[Any]], list[Any]]
    eqns: tuple[Any, ...]
    takes: tuple[Any, ...]  # variables
    gives: tuple[Any, ...]
    sites: tuple[int, ...]  # whose inputs are among what it gives
    drops: tuple[Any, ...]  # variables that nobody needs any more afterwards


def stages(program: Program) -> list[Stage]:
    """The program cut into stages, to be run one after the other on every batch.

    Weights are not computed but given: a stage takes the variables after marks of weights.
    """
    eqns = program.eqns
    level = _stages(eqns, program.marks)
    given = {eqns[mark["weight"]].outvars[0] for mark in program.marks}
    number = 1 + max((site.stage for site in program.sites), default=-1)
    wanted: list[list[Any]] = [[] for _ in range(number + 1)]
    for site, mark in zip(program.sites, program.marks):
        wanted[site.stage] += [eqns[mark[k]].invars[0] for k in ("input",)]
        if "sizes" in mark:
            wanted[site.stage].append(eqns[mark["sizes"]].outvars[0])
    wanted[number] += [v for v in program.outputs if not is_literal(v)]
    needed = _needed(eqns, given, [v for vs in wanted for v in vs])
    # An equation runs as soon as its operands are there. What needs no layer's output, masks
    # and tables of positions say, runs where it is first used: kept from the start, those of
    # all layers would fill the memory.
    first = {v: s for s in reversed(range(number + 1)) for v in wanted[s]}
    at: dict[int, int] = {}
    for index in reversed(range(len(eqns))):
        outs = [v for v in eqns[index].outvars if v in needed and v not in given]
        if not outs:
            continue
        own = min(max(level.get(v, 0) for v in eqns[index].outvars), number)
        at[index] = own or min(first.get(v, number) for v in outs)
        for v in eqns[index].invars:
            if not is_literal(v):
                first[v] = min(first.get(v, number), at[index])
    parts: list[list[Any]] = [[] for _ in range(number + 1)]
    where: dict[Any, int] = {}
    for index in sorted(at):
        parts[at[index]].append(eqns[index])
        where.update(dict.fromkeys(eqns[index].outvars, at[index]))
    reads = [{v for e in part for v in e.invars if not is_literal(v)} for part in parts]
    listed = []
    for s, part in enumerate(parts):
        inside = {v for e in part for v in e.outvars}
        takes = sorted(reads[s] - inside, key=_order(eqns))
        later = set().union(*reads[s + 1 :], *map(set, wanted[s:]))
        gives = [
            v for v in dict.fromkeys(v for e in part for v in e.outvars) if v in later
        ]
        still = set().union(*reads[s + 1 :], *map(set, wanted[s + 1 :]), wanted[number])
        drops = [v for v, at in where.items() if at <= s and v not in still]
        sites = tuple(i for i, site in enumerate(program.sites) if site.stage == s)
        run = compiled(tuple(part), tuple(takes), tuple(gives))
        listed.append(
            Stage(run, tuple(part), tuple(takes), tuple(gives), sites, tuple(drops))
        )
    return listed


def _order(eqns: Sequence[Any]) -> Callable[[Any], int]:
    """Variables in the order in which the program first reads them."""
    place: dict[Any, int] = {}
    for eqn in eqns:
        for v in eqn.invars:
            if not is_literal(v):
                place.setdefault(v, len(place))
    return lambda v: place.get(v, len(place))


def _needed(eqns: Sequence[Any], given: set, wanted: Sequence[Any]) -> set:
    needed = set(wanted)
    for eqn in reversed(eqns):
        if any(v in needed for v in eqn.outvars) and not given & set(eqn.outvars):
            needed |= {v for v in eqn.invars if not is_literal(v)}
    return needed


def evaluate(eqns: Sequence[Any], env: dict[Any, Any]) -> None:
    """Runs equations; `env` holds what they take, and afterwards what they gave."""
    for eqn in eqns:
        values = [v.val if is_literal(v) else env[v] for v in eqn.invars]
        env.update(zip(eqn.outvars, bind(eqn, values)))


def outputs(
    program: Program, params: dict, arrays: list, given: dict[Any, Any] | None = None
) -> list[Any]:
    """What the model gives for the arrays of a batch; `given` variables are not computed."""
    given = given or {}
    env = dict(program.constants)
    env |= {v: params[path] for path, v in program.params.items()}
    env |= dict(zip(program.inputs, arrays)) | given
    evaluate([e for e in program.eqns if not given.keys() & set(e.outvars)], env)
    return [v.val if is_literal(v) else env[v] for v in program.outputs]


# What runs a few times is not worth a search for the best of many kernels for each of its
# matmuls: on a GPU XLA then takes cuBLAS, and what cuBLAS takes. On others this says nothing.
SEARCH_LESS = {"xla_gpu_enable_triton_gemm": False, "xla_gpu_autotune_level": 0}


@functools.lru_cache(maxsize=1)
def _compiled_by_text() -> dict[str, Callable]:
    return {}


def compiled(
    eqns: tuple, takes: tuple, gives: tuple, run: Callable | None = None, key: str = ""
) -> Callable:
    """One compiled function for all layers that do the same.

    Args:
        run: what is compiled, of a list of the values of `takes`; None: the equations, to
            the values of `gives`.
        key: what `run` depends on beside the equations.
    """
    number: dict[Any, int] = {}
    of = lambda v: (
        f"{v.val!r}" if is_literal(v) else f"{number.setdefault(v, len(number))}"
    )
    lines = [key, " ".join(f"{of(v)}:{v.aval}" for v in takes)]
    for eqn in eqns:
        params = {k: v for k, v in eqn.params.items() if k != "name"}
        lines.append(f"{eqn.primitive.name} {params} {[of(v) for v in eqn.invars]}")
        lines.append(f"{[of(v) for v in eqn.outvars]}")
    lines.append(" ".join(map(of, gives)))
    text = re.sub(r"0x[0-9a-f]+|midtread-\w+-\d+", "", "\n".join(lines))

    def evaluated(values: list[Any]) -> list[Any]:
        env = dict(zip(takes, values))
        evaluate(eqns, env)
        return [env[v] for v in gives]

    known = _compiled_by_text()
    return known.setdefault(
        text, jax.jit(run or evaluated, compiler_options=SEARCH_LESS)
    )
