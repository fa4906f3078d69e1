"""Chain: a whole program, and its gradients, run stage by stage.

Thirty layers in one compiled function are thirty times the compiling, forward and back. The
stages of a program (program.py) share theirs wherever layers do the same, so here a model is
run as their chain, and differentiated by the chain rule:

    outputs = s_n(... s_2(s_1(inputs)))          every stage's inputs are kept
    g_i = (ds_i / d inputs)^T g_(i+1)            a stage is run again as it is differentiated

Only what depends on a weight is followed back.
"""

from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp

from midtread.algorithms.program import Program, is_literal
from midtread.algorithms.stages import Stage, compiled, evaluate, stages


class Chain:
    """A program with its parameters, some of whose weights are given at every run.

    Args:
        program: the model.
        params: path -> parameter.
        moving: numbers of the sites whose weights are given; others have their own.
    """

    def __init__(
        self, program: Program, params: dict[tuple, Any], moving: Iterable[int]
    ):
        self.program, self.stages = program, stages(program)
        of = lambda n: program.eqns[program.marks[n]["weight"]].outvars[0]
        self.weights = {n: of(n) for n in moving}
        self.fixed = dict(program.constants)
        self.fixed |= {v: params[path] for path, v in program.params.items()}
        for n, site in enumerate(program.sites):
            if n not in self.weights:
                w = site.as_operand(site.weight_in(params))
                self.fixed[of(n)] = w.astype(of(n).aval.dtype)
        followed = set(self.weights.values())
        for stage in self.stages:
            for eqn in stage.eqns:
                if any(not is_literal(v) and v in followed for v in eqn.invars):
                    followed |= {v for v in eqn.outvars if _is_float(v)}
        self._back = [_backward(stage, followed) for stage in self.stages]

    def outputs(self, operands: dict, arrays: list, biases: dict) -> list:
        """What the model gives: those of its outputs that are floats.

        Args:
            operands: number of a site -> its weight as the contraction takes it.
            arrays: of one batch.
            biases: path -> what stands for that parameter.
        """
        return self._forward(operands, arrays, biases, [])

    def slopes(
        self, operands: dict, arrays: list, biases: dict, far: Callable
    ) -> tuple[jax.Array, dict[int, jax.Array]]:
        """(far(outputs), {number of a site: the gradient by its operand}), where `far` gives a
        number and its gradients by all outputs."""
        taken: list[list[Any]] = []
        value, grads = far(self._forward(operands, arrays, biases, taken))
        back: dict[Any, jax.Array] = {}
        zeros = lambda v: jnp.zeros(v.aval.shape, v.aval.dtype)

        def add(variables, grads) -> None:
            for v, g in zip(variables, grads, strict=True):
                back[v] = back[v] + g if v in back else g

        add(self._floats, grads)
        for stage, (which, gives, pull) in zip(self.stages[::-1], self._back[::-1]):
            values = taken.pop()
            if which and gives:
                own = [back.pop(v) if v in back else zeros(v) for v in gives]
                add([stage.takes[i] for i in which], pull((values, own)))
        # No float output may depend on a weight: on a head that feeds only argmax, say.
        grad = lambda v: back[v] if v in back else zeros(v)
        return value, {n: grad(v) for n, v in self.weights.items()}

    @property
    def _floats(self) -> list[Any]:
        """The outputs that are floats, and depend on anything."""
        outs = self.program.outputs
        return [v for v in outs if not is_literal(v) and _is_float(v)]

    def _forward(self, operands, arrays, biases, taken: list) -> list:
        program = self.program
        env = self.fixed | {program.params[path]: b for path, b in biases.items()}
        env |= {v: operands[n] for n, v in self.weights.items()}
        env |= dict(zip(program.inputs, arrays))
        for stage in self.stages:
            values = [env[v] for v in stage.takes]
            taken.append(values)
            env.update(zip(stage.gives, stage.run(values)))
        return [env[v] for v in self._floats]


def _is_float(v: Any) -> bool:
    return jnp.issubdtype(v.aval.dtype, jnp.floating)


def _backward(stage: Stage, moving: set) -> tuple[tuple[int, ...], list, Callable]:
    """(which of its inputs are followed back, the outputs whose gradients it takes, a compiled
    function of (values, those gradients) to the inputs' gradients)."""
    which = tuple(i for i, v in enumerate(stage.takes) if v in moving)
    gives = [v for v in stage.gives if v in moving]

    def pull(both: tuple[list, list]) -> list:
        values, own = both

        def run(some: list) -> list:
            env = dict(zip(stage.takes, values))
            env.update(zip((stage.takes[i] for i in which), some))
            evaluate(stage.eqns, env)
            return [env[v] for v in gives]

        return jax.vjp(run, [values[i] for i in which])[1](own)[0]

    key = f"backward {which}"
    return which, gives, compiled(stage.eqns, stage.takes, tuple(gives), pull, key)
