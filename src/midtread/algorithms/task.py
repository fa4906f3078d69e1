"""Task: one calibration as it was asked for, and batches on their way through the model.

Batches go through the program stage by stage (program.py), all through one stage before the
next begins: at any time there is, of every batch, what later stages still need, and no more.
What runs are the codes of all weights that are solved, and float weights where none are yet;
beside it, where an algorithm compares the two, the float model.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from midtread.algorithms import rotate
from midtread.algorithms.offload import Store
from midtread.algorithms.options import CalibrationOptions, Plan
from midtread.algorithms.program import Program, Site
from midtread.algorithms.stages import Stage
from midtread.numerics.qarray import QArray, dequantize
from midtread.numerics.spec import Spec


@dataclasses.dataclass(frozen=True)
class Task:
    """What is to be done.

    Args:
        program: the model.
        floats: path -> parameter, rotated already where that is asked for.
        boxes: path -> box of a weight that is quantized.
        chosen: number of a site -> site, of the weights to solve for.
        batches: inputs of the model.
        plan: algorithms.
        options: how it is done.
        turns: what was rotated.
    """

    program: Program
    floats: dict[tuple, jax.Array]
    boxes: dict[tuple, Any]
    chosen: dict[int, Site]
    batches: list[Any]
    plan: Plan
    options: CalibrationOptions
    turns: rotate.Plan

    def spec(self, number: int) -> Spec:
        """What the weight of a chosen site is quantized to."""
        return self.boxes[self.chosen[number].path].how

    @property
    def specs(self) -> dict[int, Spec]:
        return {n: self.spec(n) for n in self.chosen}

    def weight(self, site: Site) -> jax.Array:
        """The float weight of a site, as it is stored."""
        return site.weight_in(self.floats)

    @property
    def users(self) -> dict[int, int]:
        """Number of a site -> that of the one at which its weight is solved for."""
        of = lambda site: (tuple(map(str, site.path)), site.layer)
        solved_at = {of(site): n for n, site in self.chosen.items()}
        return {
            n: solved_at[of(site)]
            for n, site in enumerate(self.program.sites)
            if of(site) in solved_at
        }


class Running:
    """All batches, after the stages that have run so far.

    `envs` are those of the model that is being quantized, `floats` those of the float one;
    each is {variable: array} of one batch.
    """

    def __init__(self, task: Task):
        program = task.program
        self.task, self.store = task, Store(task.options.offload)
        self.shared = dict(program.constants)
        self.shared |= {v: task.floats[path] for path, v in program.params.items()}
        self.envs = [
            dict(zip(program.inputs, program.arrays(batch)))
            for batch in task.batches
            if task.plan.needs_moments  # else nothing has to run
        ]
        compares = "correct" in task.plan.before
        self.floats = [dict(env) for env in self.envs] if compares else []
        self.solved: dict[int, QArray] = {}
        self.biases: dict[tuple, jax.Array] = {}  # path -> the corrected one
        self._users = task.users
        # variable -> number of the site whose weight it is
        self.given = {
            program.eqns[mark["weight"]].outvars[0]: n
            for n, mark in enumerate(program.marks)
        }
        self._operands: dict[tuple[int, bool], jax.Array] = {}  # of one stage

    def advance(self, stage: Stage) -> None:
        """Runs a stage on all batches."""
        self._operands.clear()
        for envs, is_float in ((self.envs, False), (self.floats, True)):
            for env in envs:
                outs = stage.run(self.values(stage.takes, env, is_float))
                env.update(zip(stage.gives, self.store.keep(outs)))

    def leave(self, stage: Stage) -> None:
        """Forgets what no later stage needs."""
        for env in (*self.envs, *self.floats):
            for v in stage.drops:
                self.store.drop(env.pop(v, None))

    def values(self, takes: tuple, env: Mapping, is_float: bool) -> list[jax.Array]:
        """What a stage takes, on one batch."""
        corrected = {self.task.program.params[p]: b for p, b in self.biases.items()}
        values = []
        for v in takes:
            if v in self.given:
                values.append(self._operand(self.given[v], is_float))
            else:
                known = env if v in env else self.shared
                if not is_float and v in corrected:
                    known = corrected
                values.append(jnp.asarray(known[v]))
        return values

    def _operand(self, number: int, is_float: bool) -> jax.Array:
        """The weight as the contraction takes it; a float one while it is not solved."""
        program, codes = self.task.program, self.solved.get(self._users.get(number, -1))
        site = program.sites[number]
        is_float = is_float or codes is None or self.task.options.inputs == "float"
        if (number, is_float) not in self._operands:
            w = self.task.weight(site) if is_float else codes
            mark = program.eqns[program.marks[number]["weight"]]
            dtype = mark.outvars[0].aval.dtype
            self._operands[number, is_float] = _as_operand(site.alike, dtype, w)
        return self._operands[number, is_float]

    def shift(self, path: tuple, layer: tuple, by: jax.Array) -> None:
        """Adds to a bias of the quantized model."""
        value = self.biases.get(path, self.task.floats[path])
        self.biases[path] = value.at[layer].add(by.astype(value.dtype))


@functools.partial(jax.jit, static_argnums=(0, 1))
def _as_operand(site: Site, dtype, w: jax.Array | QArray) -> jax.Array:
    w = dequantize(w) if isinstance(w, QArray) else w
    return site.as_operand(w.reshape(site.stored_shape)).astype(dtype)
