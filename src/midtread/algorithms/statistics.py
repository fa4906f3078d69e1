"""Statistics: what is known of the inputs of a weight when its turn comes.

Moments (collect.py) are summed over all batches that are running (task.py), for values of an
attention as the next layer sees them (reach.py). Weights that read the same input share them.
A weight that met too few tokens is refused; an expert that did takes the moments of all
experts together, and the report says so.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from midtread.algorithms import collect, reach
from midtread.algorithms.program import Site
from midtread.algorithms.stages import SEARCH_LESS
from midtread.algorithms.task import Running, Task
from midtread.numerics import hadamard

ROWS = 32  # rows for every input are enough for moments of sums over tokens


class Statistics:
    """Of the weights of one stage, from batches that have run to their inputs."""

    def __init__(self, task: Task, running: Running):
        self.task, self.running = task, running
        self.weights: list[dict[int, jax.Array]] = []  # of tokens: per batch and site
        self.ways: dict[int, reach.Way] = {}
        if task.options.weigh in ("attention", "both") and task.plan.needs_moments:
            ways = {n: reach.way_of(task.program, n) for n in task.chosen}
            self.ways = {n: way for n, way in ways.items() if way is not None}
        self._known: dict[Any, dict[str, jax.Array]] = {}

    def forget(self) -> None:
        """Before another stage."""
        self._known.clear()

    def weigh_tokens(self, loss, targets: list[Any], say) -> None:
        """Finds how much every token counts at every weight, by gradients."""
        program, runs = self.task.program, self.task.options.runs
        outputs = lambda site: site.axes.extents(site.stored_shape)[2]
        groups = {
            n: 1 if outputs(site) % runs else runs
            for n, site in self.task.chosen.items()
        }
        run = collect.gradient_weights(program, groups, loss)
        batches = self.task.batches
        for number, batch in enumerate(batches):
            key = jax.random.fold_in(jax.random.key(0), number)
            weights = run(self.task.floats, program.arrays(batch), targets[number], key)
            if not all(bool(jnp.isfinite(w).all()) for w in weights.values()):
                raise ValueError(
                    f"gradients of batch {number} are not finite: check the data and the "
                    "loss, or weigh all tokens the same with options=mt.CalibrationOptions(weigh='none')."
                )
            self.weights.append(weights)
            say(f"gradients: batch {number + 1} of {len(batches)}")
        # Only what tokens count relative to each other matters.
        for n in groups:
            mean = sum(float(w[n].mean()) for w in self.weights) / len(self.weights)
            for w in self.weights:
                w[n] = w[n] / mean if mean > 0 else jnp.ones_like(w[n])

    def of(self, number: int) -> tuple[dict[str, jax.Array] | None, str]:
        """(what is known of a weight's inputs, and what was done where that is too little)."""
        if not self.task.plan.needs_moments:
            return None, ""
        stats = self.moments(number)
        if number in self.ways:
            stats = stats | self._attended(number)
        return _enough(self.task.chosen[number], stats, self.task.options.min_tokens)

    def source(self, number: int) -> tuple[Any, Any, Any]:
        """(input, sizes of groups, layout): sites of the same have the same moments."""
        program = self.task.program
        site, mark = program.sites[number], program.marks[number]
        x = program.eqns[mark["input"]].invars[0]
        sizes = program.eqns[mark["sizes"]].outvars[0] if "sizes" in mark else None
        is_alone = bool(self.weights) or number in self.task.turns.online
        return x, sizes, number if is_alone else collect.layout(site)

    def moments(self, number: int) -> dict[str, jax.Array]:
        """Sums over all batches, of the inputs themselves."""
        key = self.source(number)
        if key in self._known:  # query, key and value share their inputs
            return self._known[key]
        x, sizes, _ = key
        site, running = self.task.program.sites[number], self.running
        total = None
        for b, env in enumerate(running.envs):
            weights = self.weights[b][number] if self.weights else None
            other = running.floats[b][x] if running.floats else None
            total = _add_moments(
                total, site.alike, env[x], weights, sizes and env[sizes], other,
                self.task.turns.online.get(number), self.task.options.histograms,
            )  # fmt: skip
        assert total is not None
        if not bool(jnp.isfinite(total["H"]).all()):
            raise ValueError(f"{site.name}: its inputs are not finite on this data.")
        self._known[key] = total
        return total

    def _attended(self, number: int) -> dict[str, jax.Array]:
        """Moments of inputs as the next layer sees them, from as many batches as it takes
        for ROWS times as many rows as inputs."""
        running, signs = self.running, self.task.turns.online.get(number)
        known = {*running.envs[0], *running.shared, *running.given}
        probe = reach.probe(self.task.program, number, self.ways[number], known)

        def run(env, is_float: bool) -> jax.Array:
            X = probe.run(running.values(probe.takes, env, is_float))
            return X if signs is None else hadamard.turn(X, signs.reshape(1, 1, -1))

        total = None
        seen = 0
        for b, env in enumerate(running.envs):
            X = run(env, False)
            other = run(running.floats[b], True) if running.floats else None
            total = _add_moments_of_heads(total, X, other)
            seen += X.shape[1]
            if seen >= ROWS * X.shape[2]:
                break
        assert total is not None
        return total


def _enough(site: Site, stats: dict, share: float) -> tuple[dict, str]:
    """Statistics that can be trusted, or a refusal."""
    K = site.axes.extents(site.stored_shape)[1]
    least = share * K
    counts = np.asarray(stats["count"])
    if counts.sum() < least:
        raise ValueError(
            f"{site.name}: {int(counts.sum())} tokens are too few for {K} inputs. Give at "
            f"least {int(np.ceil(least))}, or set CalibrationOptions(min_tokens=...)."
        )
    few = [int(e) for e in np.flatnonzero(counts < least)] if len(counts) > 1 else []
    if not few:
        return stats, ""
    pool = {"H": jnp.sum, "C": jnp.sum, "largest": jnp.max}
    pooled = {
        name: stats[name].at[jnp.array(few)].set(of_all(stats[name], axis=0))
        for name, of_all in pool.items()
        if name in stats
    }
    note = f"experts {few} saw fewer than {int(least)} tokens: moments of all experts"
    return {**stats, **pooled}, note


@functools.partial(
    jax.jit, static_argnums=(1, 7), donate_argnums=0, compiler_options=SEARCH_LESS
)
def _add_moments(total: dict | None, site: Site, *args: Any) -> dict[str, jax.Array]:
    return collect.add(total, collect.moments(site, *args))


@functools.partial(jax.jit, donate_argnums=0, compiler_options=SEARCH_LESS)
def _add_moments_of_heads(total: dict | None, X, other) -> dict[str, jax.Array]:
    return collect.add(total, collect.moments_of_heads(X, other))
