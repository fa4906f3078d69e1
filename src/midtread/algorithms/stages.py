"""Stages: a program, cut where the inputs of its weights come out, and run.

A weight is solved for when its inputs are known, and these depend on the weights before it. So
the equations of a program (program.py) are cut into stages: stage s gives the inputs of its
sites, and may be run once every weight that earlier stages use is settled. Batches wait between
stages, each as the variables that later stages still need.

    stages(program)         the equations of each stage, compiled, and what it takes and gives
    outputs(program, ...)   the whole program at once
    evaluate(eqns, env)     some equations, one after the other
    compiled(eqns, ...)     the same as one function, which layers that are alike share
"""

import dataclasses
import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax

from midtread.algorithms.program import Program, bind, is_literal, levels


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
    """Returns the program cut into stages, to be run one after the other on every batch.

    Weights are not computed but given: a stage takes the variables after marks of weights.
    """
    eqns = program.eqns
    last = 1 + max((site.stage for site in program.sites), default=-1)
    wanted: list[list[Any]] = [[] for _ in range(last + 1)]  # of each stage
    for site, mark in zip(program.sites, program.marks):
        wanted[site.stage].append(eqns[mark["input"]].invars[0])
        if "sizes" in mark:
            wanted[site.stage].append(eqns[mark["sizes"]].outvars[0])
    wanted[last] += [v for v in program.outputs if not is_literal(v)]
    stage_of = _schedule(program, wanted)
    parts: list[list[Any]] = [[] for _ in range(last + 1)]
    computed_in: dict[Any, int] = {}  # variable -> stage
    for index in sorted(stage_of):
        parts[stage_of[index]].append(eqns[index])
        computed_in.update(dict.fromkeys(eqns[index].outvars, stage_of[index]))
    reads = [{v for e in part for v in e.invars if not is_literal(v)} for part in parts]
    order, cut = _order(eqns), []
    for s, part in enumerate(parts):
        computed = dict.fromkeys(v for e in part for v in e.outvars)
        takes = tuple(sorted(reads[s] - computed.keys(), key=order))
        later = set().union(*reads[s + 1 :], *map(set, wanted[s:]))
        gives = tuple(v for v in computed if v in later)
        needed_later = set().union(
            *reads[s + 1 :], *map(set, wanted[s + 1 :]), wanted[last]
        )
        drops = tuple(
            v for v, at in computed_in.items() if at <= s and v not in needed_later
        )
        sites = tuple(i for i, site in enumerate(program.sites) if site.stage == s)
        run = compiled(tuple(part), takes, gives)
        cut.append(Stage(run, tuple(part), takes, gives, sites, drops))
    return cut


def _schedule(program: Program, wanted: Sequence[Sequence[Any]]) -> dict[int, int]:
    """Returns {index of an equation: its stage}, of the equations that have to run.

    An equation runs as soon as its operands are there. What needs no layer's output, masks and
    tables of positions say, runs where it is first used: kept from the start, those of all
    layers would fill the memory.
    """
    eqns, last = program.eqns, len(wanted) - 1
    level = levels(eqns, program.marks)
    given = {eqns[mark["weight"]].outvars[0] for mark in program.marks}
    needed = _needed(eqns, given, [v for variables in wanted for v in variables])
    first_use = {v: s for s in reversed(range(last + 1)) for v in wanted[s]}
    stage_of: dict[int, int] = {}
    for index in reversed(range(len(eqns))):
        outs = [v for v in eqns[index].outvars if v in needed and v not in given]
        if not outs:
            continue
        ready = min(max(level.get(v, 0) for v in eqns[index].outvars), last)
        stage = ready or min(first_use.get(v, last) for v in outs)
        stage_of[index] = stage
        for v in eqns[index].invars:
            if not is_literal(v):
                first_use[v] = min(first_use.get(v, last), stage)
    return stage_of


def _order(eqns: Sequence[Any]) -> Callable[[Any], int]:
    """Returns the key that sorts variables as the program first reads them."""
    position: dict[Any, int] = {}
    for eqn in eqns:
        for v in eqn.invars:
            if not is_literal(v):
                position.setdefault(v, len(position))
    return lambda v: position.get(v, len(position))


def _needed(eqns: Sequence[Any], given: set, wanted: Sequence[Any]) -> set:
    """Returns the variables that have to be known for those that are wanted."""
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
    """Returns what the model gives for the arrays of a batch. Variables that are `given` are not
    computed."""
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
    """Returns one compiled function for all layers that do the same.

    Args:
        run: what is compiled, of a list of the values of `takes`; None: the equations, to
            the values of `gives`.
        key: what `run` depends on beside the equations.
    """
    number: dict[Any, int] = {}
    show = lambda v: (
        f"{v.val!r}" if is_literal(v) else f"{number.setdefault(v, len(number))}"
    )
    lines = [key, " ".join(f"{show(v)}:{v.aval}" for v in takes)]
    for eqn in eqns:
        params = {k: v for k, v in eqn.params.items() if k != "name"}
        lines.append(f"{eqn.primitive.name} {params} {[show(v) for v in eqn.invars]}")
        lines.append(f"{[show(v) for v in eqn.outvars]}")
    lines.append(" ".join(map(show, gives)))
    text = re.sub(r"0x[0-9a-f]+|midtread-\w+-\d+", "", "\n".join(lines))

    def evaluated(values: list[Any]) -> list[Any]:
        env = dict(zip(takes, values))
        evaluate(eqns, env)
        return [env[v] for v in gives]

    known = _compiled_by_text()
    return known.setdefault(
        text, jax.jit(run or evaluated, compiler_options=SEARCH_LESS)
    )
