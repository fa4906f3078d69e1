"""Calibrate: a float model and some data in, a quantized model out.

    result = mt.calibrate(model, mt.PtqProvider(rules), batches, algorithms=["gptq"])
    result.model(x);  print(result.report)

What is quantized, and to which formats, is said by the provider's rules, as in
`quantize_model`; which codes stand for a weight is found by the algorithms, from data:

    1. the model is traced (program.py) and cut into stages between layers
    2. what the next layer will see of an output is found for values (reach.py), or how much
       every token counts at every layer from the gradients of a loss (collect.py)
    3. stage by stage, batches run to the inputs of the next layers, statistics of those are
       gathered, and every weight there is solved for. What runs on to the next stage are the
       codes, so that later layers see, and make up for, what earlier ones did

At any time there are one stage's statistics, and of every batch the arrays that later stages
still need. With a `folder`, every solved weight is written there: a run that was killed goes
on after the last of them, and ends with the same bits. Nothing is returned unless all is
solved, and the model that was given stays as it was.

Algorithms are named in the order in which they act, which options.py tells. Here is the loop
over stages; task.py has what runs, statistics.py what is known of inputs, solver.py the codes
of one weight.
"""

import dataclasses
import pathlib
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
from flax import nnx

from midtread.algorithms import bias, collect, fold, learn, rotate, served
from midtread.algorithms import options as asked
from midtread.algorithms.options import CalibrationOptions
from midtread.algorithms.program import trace
from midtread.algorithms.report import Report, Row
from midtread.algorithms.resume import Kept
from midtread.algorithms.solver import Solver
from midtread.algorithms.stages import stages
from midtread.algorithms.statistics import Statistics
from midtread.algorithms.task import Running, Task
from midtread.model.coverage import format_text
from midtread.numerics.qarray import QArray
from midtread.providers.ptq import PtqProvider

_DEFAULT = CalibrationOptions()


class Calibrated(NamedTuple):
    """What `calibrate` returns; docs/four-bits.md has an example.

    Args:
        model: the model under the provider, of NNX with its parameters in it.
        params: of Linen, the variables to call it with; of a function, its parameters, some
            of them QArrays; of NNX, None.
        report: what was done to each weight, and what it cost.
    """

    model: Any
    params: Any
    report: Report


def calibrate(
    model: Any,
    provider: PtqProvider,
    batches: Iterable[Any],
    *,
    algorithms: Sequence[str] = ("gptq",),
    loss: Callable[[Any, Any], jax.Array] | None = None,
    targets: Iterable[Any] | None = None,
    params: Any = None,
    method: str = "__call__",
    options: CalibrationOptions = _DEFAULT,
    folder: str | pathlib.Path | None = None,
    progress: Callable[[str], None] | None = None,
) -> Calibrated:
    """Quantizes a model for serving, with codes that data says are best.

    >>> import jax.numpy as jnp
    >>> from flax import nnx
    >>> from midtread.model.rules import QuantizationRule
    >>> model = nnx.Linear(16, 8, rngs=nnx.Rngs(0))
    >>> x = jax.random.normal(jax.random.key(0), (64, 16)) @ jnp.tri(16)
    >>> provider = PtqProvider([QuantizationRule(weight_qtype="int4")])
    >>> result = calibrate(model, provider, [x])
    >>> result.model.kernel.array.qvalue.dtype
    dtype(int4)
    >>> bool(result.report.rows[0].cost < result.report.rows[0].rounded)
    True

    Args:
        model: an NNX module, a Linen one with its variables in `params`, or a function of
            (a tree of parameters, inputs) with that tree in `params`.
        provider: says where and to which formats.
        batches: inputs as the method takes them, each an array, a tuple of arguments or a
            dict of keywords, all of the same shapes. All of them are kept.
        algorithms: by name, in the order in which they act: see the first lines of
            algorithms/options.py.
        loss: of (the model's outputs, a target), to weigh tokens by its gradients. None: no
            gradients are taken, or with weigh="gradient" those of random signs on the
            outputs: how far they move counts, whatever they are for.
        targets: one for each batch, for the loss; None: the batches themselves.
        params: of a Linen model: its variables, {"params": ...}; of a function: its
            parameters.
        method: the method that is calibrated, and runs quantized.
        options: how it is done.
        folder: where solved weights are kept, for a run that goes on where it was killed.
        progress: told, line by line, what is being done; `print`, say.

    Returns:
        The quantized model, its parameters if it is of Linen or a function, and a report.

    Raises:
        ValueError: no batches, or NaNs in them; too few tokens; rules that match nothing; an
            algorithm that is unknown, out of order, or cannot take a contraction.
    """
    say = progress or (lambda line: None)
    started = time.time()
    plan = asked.plan(algorithms)
    batches = asked.check_batches(batches)
    asked.check_options(options, plan)
    asked.check_static(provider, plan.before)
    options = asked.weighed(options, plan, loss, targets)
    targets = batches if targets is None else list(targets)
    if len(targets) != len(batches):
        raise ValueError(f"{len(targets)} targets for {len(batches)} batches.")
    quantized, boxes = served.quantize(model, provider, batches[0], params, method)
    program, given = trace(model, batches[0], params=params, method=method)
    chosen = served.chosen_sites(program, boxes, plan.rounding, plan.before, plan.after)
    say(f"{len(chosen)} weights in {1 + max(s.stage for s in chosen.values())} stages")
    task = Task(program, given, boxes, chosen, batches, plan, options, rotate.Plan())
    if "rotate" in plan.before:
        task = _turned(task, served.with_quantized_inputs(provider, chosen), say)
    work = _Work(task, Kept(folder, task, loss, targets), say)
    is_weighed = plan.needs_moments and options.weigh in asked.BY_GRADIENT
    if is_weighed and not work.kept.is_whole:
        work.statistics.weigh_tokens(loss, targets, say)
    solved, changed = work.run()
    changed |= {
        path: w
        for path, w in task.floats.items()
        if w is not given[path] and path not in changed
    }
    by_name = {tuple(map(str, path)): path for path in boxes}
    for path, value in changed.items():
        path = by_name.get(tuple(map(str, path)), path)
        if path not in solved:
            quantized = served.put_param(quantized, path, value, boxes)
    for path, arrays in solved.items():
        quantized = served.put(quantized, path, arrays, boxes[path])
    report = work.report(time.time() - started)
    if isinstance(quantized, nnx.Module):
        return Calibrated(quantized, None, report)
    return Calibrated(quantized[0], quantized[1], report)


def _turned(task: Task, with_inputs: set[int], say) -> Task:
    """The task with rotations folded into its weights."""
    options, specs = task.options.rotate, task.specs
    turns = rotate.plan(task.program, task.chosen, specs, options, with_inputs)
    floats = rotate.fold(task.program, task.floats, turns, options, specs, say)
    return dataclasses.replace(task, floats=floats, turns=turns)


class _Work:
    """One calibration under way."""

    def __init__(self, task: Task, kept: Kept, say: Callable[[str], None]):
        self.task, self.kept, self.say = task, kept, say
        self.running = Running(task)
        self.statistics = Statistics(task, self.running)
        self.solver = Solver(task, self.statistics)
        wants = task.chosen if "bias" in task.plan.after else ()
        sources = {n: bias.find(task.program, n) for n in wants}
        self.bias_of = {n: source for n, source in sources.items() if source}
        self.rows: dict[int, Row] = {}
        self.distances: tuple[float, float] | None = None

    def run(self) -> tuple[dict[tuple, list[tuple[tuple, QArray]]], dict]:
        """({path: [(layer, codes)]} of all weights, {path: what is changed beside them})."""
        task, running = self.task, self.running
        # What comes after the last weight, a language model's logits say, is not run.
        last = max(site.stage for site in task.chosen.values())
        for stage in stages(task.program)[: last + 1]:
            self.statistics.forget()
            self.solver.forget()
            running.advance(stage)
            # Values come after queries and keys: how those attend is then known.
            for number in sorted(stage.sites, key=lambda n: n in self.statistics.ways):
                if number in task.chosen:
                    self._settle(number)
            running.leave(stage)
        running.store.clear()
        solved = running.solved
        if "learn" in task.plan.after:
            solved, self.distances = learn.solve(
                task.program, task.floats, solved, task.users,
                {n: task.weight(site) for n, site in task.chosen.items()}, task.specs,
                [task.program.arrays(batch) for batch in task.batches],
                task.options.learn, self.say, running.biases,
            )  # fmt: skip
        params = {**task.floats, **running.biases}
        solved, changed = fold.move(task.program, self.solver.folds, solved, params)
        by_path: dict[tuple, list] = {}
        for number, q in solved.items():
            site = task.chosen[number]
            by_path.setdefault(site.path, []).append((site.layer, q))
        return by_path, running.biases | changed

    def _settle(self, number: int) -> None:
        """Finds the codes of one weight, or reads those of a run before."""
        site, solver = self.task.chosen[number], self.solver
        known = self.kept.read(number)
        if known is not None:
            self.say(f"{site.name}: as solved before")
            q, row, shift = known
            solver.remember(number, q)
        else:
            stats, note = self.statistics.of(number)
            began = time.time()
            q, cost, rounded = solver.solve(number, stats)
            shift = None
            if number in self.bias_of:
                assert stats is not None
                mean = stats["sum"] / stats["count"][:, None]
                shift = bias.shift(solver.weight(number), q, mean, site.axes)
            elif "bias" in self.task.plan.after:
                note = f"{note}; no bias to correct".removeprefix("; ")
            if self.task.plan.scales_inputs and number not in solver.takes_factors:
                note = f"{note}; used along other axes too: no factors"
                note = note.removeprefix("; ")
            if (signs := solver.signs(number)) is not None:
                q = q.replace(pre_rotation=signs)
            row = _row(site, self.task.spec(number), stats, cost, rounded, note)
            self.kept.write(number, q, row, shift)
            seconds = time.time() - began
            self.say(
                f"{site.name}: error {cost:.3g}, rounded {rounded:.3g} ({seconds:.1f} s)"
            )
        if shift is not None:
            self.running.shift(*self.bias_of[number], shift)
        self.running.solved[number], self.rows[number] = q, row

    def report(self, seconds: float) -> Report:
        known = {site.path for site in self.task.chosen.values()}
        unseen = ["/".join(map(str, path)) for path in self.task.boxes if path not in known]  # fmt: skip
        rows = tuple(self.rows[n] for n in sorted(self.rows))
        ways, folded = self.statistics.ways, len(self.solver.fold_of)
        weighed = (
            "tokens by gradient"
            if self.task.options.weigh in asked.BY_GRADIENT
            else "all tokens the same"
        )
        if ways:
            seen = f"{len(ways)} weights by what attention makes of their inputs"
            weighed = f"{seen}, {weighed} elsewhere"
        factors = ""
        if self.task.plan.scales_inputs:
            kept = len(self.solver.takes_factors) - folded
            factors = f"factors of {folded} weights folded, of {kept} kept as pre_scale"
        return Report(
            rows, self.task.plan.names, self.task.options.inputs, weighed, seconds,
            self.distances, self.task.turns.says, factors, tuple(sorted(unseen)),
        )  # fmt: skip


def _row(site, spec, stats: dict | None, cost: float, rounded: float, note: str) -> Row:
    text = format_text(spec.format, tuple(t for _, t in spec.tiled_axes))
    tokens = 0 if stats is None else int(stats["count"].sum())
    outliers = None
    if stats is not None and "sizes" in stats:
        outliers = collect.outliers(stats["sizes"])
    return Row(site.name, site.op, text, tokens, cost, rounded, note, outliers)
