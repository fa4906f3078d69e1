"""Solver: the codes of one weight, by the algorithms of a plan, from its statistics.

    goal       what the codes are to stand for: the weight, or a corrected one  (correct.py)
    factors    of its inputs, shared by weights whose factors can be folded     (smooth.py)
    codes      by the plan's way of rounding                      (gptq, clip, hqq, or nearest)

GPTQ solves weights that share their inputs, query and key say, at once.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

from midtread.algorithms import clip, correct, fold, gptq, hqq, smooth
from midtread.algorithms.program import Site
from midtread.algorithms.statistics import Statistics
from midtread.algorithms.task import Task
from midtread.algorithms.weight import Axes, as_matrices, over_inputs
from midtread.numerics import hadamard, views
from midtread.numerics.qarray import QArray, dequantize, quantize_by_spec
from midtread.numerics.spec import Spec

Stats = dict[str, jax.Array]


class Solver:
    """Solves the weights of a task, one after another."""

    def __init__(self, task: Task, statistics: Statistics):
        self.task, self.statistics = task, statistics
        self.folds: list[fold.Fold] = []  # where factors of inputs go
        self.takes_factors: set[int] = set()
        if task.plan.scales_inputs:
            self.takes_factors = set(filter(task.program.sums_alike, task.chosen))
            # Inputs that are turned at run time are multiplied after that, not before.
            still = {n: s for n, s in task.chosen.items() if n not in task.turns.online}
            self.folds = fold.find(task.program, still, task.specs)
        self.fold_of = {n: f for f in self.folds for n in f.sites}
        # of folds whose first weight is solved, by its number
        self.factors: dict[int, jax.Array] = {}
        self._ahead: dict[int, gptq.Solved] = {}  # solved with a mate

    def forget(self) -> None:
        """Drops what was solved with a mate and not asked for, when a stage begins."""
        self._ahead.clear()

    def weight(self, number: int) -> jax.Array:
        """The float weight, in turned coordinates where its inputs are turned as it runs."""
        w, signs = self.task.weight(self.task.chosen[number]), self.signs(number)
        return w if signs is None else hadamard.turn(w, signs)

    def signs(self, number: int) -> jax.Array | None:
        """Of the rotation that the weight's inputs go through."""
        return self.task.turns.online.get(number)

    def remember(self, number: int, q: QArray) -> None:
        """Takes factors from codes that were solved for by a run before."""
        if number in self.fold_of:
            first = self.fold_of[number].sites[0]
            site = self.task.chosen[number]
            self.factors.setdefault(first, fold.factors_of(q, site)[None])

    def solve(self, number: int, stats: Stats | None) -> tuple[QArray, float, float]:
        """(codes, what they cost, what rounding would), in turned coordinates."""
        w, spec = self.weight(number), self.task.spec(number)
        site = self.task.chosen[number]
        axes, windows = site.axes, site.windows
        factors = self._factors(number, w, stats)
        if self.task.plan.rounding == "gptq" and factors is None:
            if number not in self._ahead:
                self._solve_mates(number, w, stats)
            return _numbers(self._ahead.pop(number))
        goal = self._goal(w, axes, stats)
        if factors is None:
            return _numbers(self._rounded(goal, spec, stats, axes))
        # codes of w / factors; inputs are multiplied by them
        assert stats is not None
        spreads = over_inputs(factors, axes, w.shape)
        spreads = views.crop_to(
            spreads, [1 if a in windows else n for a, n in enumerate(spreads.shape)]
        )
        goal = (goal / spreads).astype(w.dtype)
        H = stats["H"] * factors[:, None, :, None] * factors[:, None, None, :]
        solved = self._rounded(goal, spec, {**stats, "H": H}, axes)
        shape = solved.array.qvalue.shape
        full = [1 if a in (*axes.kept, *windows) else n for a, n in enumerate(shape)]
        q = solved.array.replace(pre_scale=views.pad_to(spreads, full, 1))
        return _numbers(solved._replace(array=q))

    def _goal(self, w: jax.Array, axes: Axes, stats: Stats | None) -> jax.Array:
        """What the codes are to stand for."""
        if "correct" not in self.task.plan.before:
            return w
        assert stats is not None
        damping, strength = self.task.options.gptq.damping, self.task.options.correction
        return correct.target(w, stats["H"], stats["C"], axes, damping, strength)

    def _rounded(
        self, goal, spec: Spec, stats: Stats | None, axes: Axes
    ) -> gptq.Solved:
        rounding = self.task.plan.rounding
        if rounding == "gptq":
            assert stats is not None
            return gptq.solve(goal, spec, stats["H"], axes, self.task.options.gptq)
        if rounding == "clip":
            assert stats is not None
            diagonal = jnp.diagonal(stats["H"], axis1=-2, axis2=-1).mean(1)
            q = clip.solve(goal, spec, diagonal, axes)
        else:
            q = (hqq.solve if rounding == "hqq" else quantize_by_spec)(goal, spec)
        nearest = quantize_by_spec(goal, spec)
        cost = lambda q: _cost(q, goal, stats, axes)
        return gptq.Solved(q, cost(q), cost(nearest))

    def _solve_mates(self, number: int, w: jax.Array, stats: Stats | None) -> None:
        """GPTQ of a weight, and of those that can be worked off in the same loop."""
        assert stats is not None
        mates, axes = self._mates(number), self.task.chosen[number].axes
        ws = [w if n == number else self.weight(n) for n in mates]
        goals = [self._goal(w, axes, stats) for w in ws]
        solved = gptq.solve_together(
            goals, self.task.spec(number), stats["H"], axes, self.task.options.gptq
        )
        self._ahead |= dict(zip(mates, solved))

    def _mates(self, number: int) -> list[int]:
        """Weights of the same inputs and format."""
        chosen, statistics = self.task.chosen, self.statistics
        if number in statistics.ways:
            return [number]
        kind = lambda n: (statistics.source(n), self.task.spec(n), chosen[n].axes)
        stage = chosen[number].stage
        others = [n for n, site in chosen.items() if site.stage == stage]
        return [
            n for n in others if n not in statistics.ways and kind(n) == kind(number)
        ]

    def _factors(
        self, number: int, w: jax.Array, stats: Stats | None
    ) -> jax.Array | None:
        """[E, K], what inputs are multiplied by, None where not all that use the weight could
        be. Weights that read the same input share factors if these can be folded."""
        if number not in self.takes_factors:
            return None
        target, chosen = self.fold_of.get(number), self.task.chosen
        if target is None:
            assert stats is not None
            ties = _windows(chosen[number])
            sites, weights, moments = [number], [w], [stats]
        else:
            if target.sites[0] in self.factors:
                return self.factors[target.sites[0]]
            sites = list(target.sites)
            weights = [self.task.weight(chosen[n]) for n in sites]
            moments = [self.statistics.moments(n) for n in sites]
            ties = None if target.columns is None else jnp.array(target.columns)
        axes = tuple(chosen[n].axes for n in sites)
        if "smooth" in self.task.plan.before:
            largest, alpha = moments[0]["largest"], self.task.options.alpha
            factors = smooth.smooth_together(weights, largest, axes, alpha, ties)
        else:
            specs = tuple(self.task.spec(n) for n in sites)
            each = [one["H"] for one in moments]
            factors = smooth.awq_together(weights, specs, each, axes, ties=ties)
        if target is not None:
            self.factors[target.sites[0]] = factors
        return factors


def _windows(site: Site) -> jax.Array | None:
    """[K], the channel of every input of a convolution: it has one factor all over a window."""
    if not site.windows:
        return None
    shape, summed = site.stored_shape, site.axes.summed
    own = [1 if a in site.windows else shape[a] for a in summed]
    channels = np.arange(math.prod(own)).reshape(own)
    return jnp.asarray(
        np.broadcast_to(channels, [shape[a] for a in summed]).reshape(-1)
    )


def _numbers(solved: gptq.Solved) -> tuple[QArray, float, float]:
    return solved.array, float(solved.cost), float(solved.rounded)


def _cost(q: QArray, w: jax.Array, stats: Stats | None, axes: Axes) -> jax.Array:
    """The error of a layer's output, relative to the output; of the weight, without data."""
    error = as_matrices((dequantize(q) - w).astype(jnp.float32), axes)
    W = as_matrices(w.astype(jnp.float32), axes)
    moved = (lambda x: x) if stats is None else (lambda x: stats["H"].mean(1) @ x)
    size, whole = jnp.sum(error * moved(error)), jnp.sum(W * moved(W))
    return size / jnp.where(whole > 0, whole, 1.0)  # a weight of zeros is exact
