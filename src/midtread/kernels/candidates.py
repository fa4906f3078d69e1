"""Candidates: the implementations of an operation, in order, and the first that can run.

    env = environment.here()                                # once per operation
    choice = first("attend", CANDIDATES, operands, env)     # plan(operands, env) of each in turn
    out = choice.plan.run(operands) if choice.plan else ...     # else the plain path

`operands` is one record with all arrays and options. `plan` looks at shapes, dtypes and the
environment alone: it emits no operations, and returns a Plan, a record of what it has worked out
(block sizes, which axes are a matrix's rows), or a Refusal with the reason as text. `run` uses the
Plan and does not work it out again. Reasons are data: `mt.explain(..., kernels=True)` prints them,
also for devices that are not there.

If the operands have an attribute `why_not_here` that is not None, every candidate that needs a GPU
is refused with that text, because arrays laid out so suit none of our kernels.
"""

import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from midtread.kernels.environment import Env


class Refusal(NamedTuple):
    """The reason why a candidate does not take some operands, as a clause about them."""

    reason: str


class Plan(Protocol):
    """What was worked out in order to choose. It has facts, and no arrays.

    A plan may have an attribute `detail`, which `explain` prints after its candidate's name.
    """

    def run(self, operands: Any) -> Any:
        """Computes the result, by the facts of this plan."""
        ...


class Candidate(NamedTuple):
    """One implementation of an operation.

    Attributes:
        name: what `explain` calls it.
        needs: the device that it needs, as in `Env.why_not`.
        plan: `plan(operands, env) -> Plan | Refusal`, or "module:name" of that function.
            The module is imported only when the device has what the candidate needs,
            because Pallas is large.
        is_interpreted: whether it is taken under implementation("interpret") too.
    """

    name: str
    needs: str
    plan: Callable[[Any, Env], Plan | Refusal] | str
    is_interpreted: bool = True


class Chosen(NamedTuple):
    """The first candidate that has a plan (None if all refused), and why those before refused."""

    name: str | None
    plan: Any
    refused: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        """Writes 'hopper', 'triton (rows)', or 'XLA' where every candidate refused."""
        detail = getattr(self.plan, "detail", None)
        return f"{self.name} ({detail})" if detail else self.name or "XLA"


def first(
    operation: str,
    candidates: Sequence[Candidate],
    operands: Any,
    env: Env,
    what: str | None = None,
) -> Chosen:
    """Chooses the first of the candidates that takes these operands here.

    Args:
        operation: its name, which `environment.watched` passes on.
        what: the operands in words. If it is given and all candidates refuse, then under
            implementation("gpu") a ValueError says why.
    """
    refused, choice = [], None
    for candidate in candidates:
        plan = _plan(candidate, operands, env)
        if not isinstance(plan, Refusal):
            choice = Chosen(candidate.name, plan, tuple(refused))
            break
        refused.append((candidate.name, plan.reason))
    choice = choice or Chosen(None, None, tuple(refused))
    if env.watch is not None:
        env.watch(operation, operands, choice)
    if choice.plan is None and what is not None and env.asked == "gpu":
        asked = [c.name for c in candidates if c.needs != "cpu"]
        reasons = dict.fromkeys(reason for name, reason in refused if name in asked)
        raise ValueError(
            f"implementation='gpu' cannot run {what}: {'; '.join(reasons)}. "
            "Write implementation(None) to leave the choice to Midtread."
        )
    return choice


def _plan(candidate: Candidate, operands: Any, env: Env) -> Any:
    reason = env.reasons[candidate.needs]
    if reason is None and candidate.needs in ("nvidia", "hopper"):
        reason = getattr(operands, "why_not_here", None)
    if reason is not None:
        return Refusal(reason)
    if env.is_interpreted and not candidate.is_interpreted:
        return Refusal("it is not interpreted")
    plan = candidate.plan
    return (_imported(plan) if isinstance(plan, str) else plan)(operands, env)


@functools.cache
def _imported(name: str) -> Callable:
    module, function = name.split(":")
    return getattr(importlib.import_module(module), function)
