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

Algorithms are named in the order in which they act on a weight:

    rotate     spread outliers over all that shares a scale             (rotate.py)
    correct    aim at the float layer's output, not the float weight    (correct.py)
    smooth     move range from inputs to weights, for 8-bit inputs      (smooth.py)
    awq        protect the rows that large inputs meet                  (smooth.py)
               both fold their factors into what comes before           (fold.py)
    then one of
    round      nearest, as `quantize_model` does
    clip       nearest, under scales searched by weighted error         (clip.py)
    hqq        nearest, under scales and zero points robust to outliers (hqq.py)
    gptq       error feedback and descent, under searched scales        (gptq.py)
    bias       then biases make up for the mean of each layer's error   (bias.py)
    and, when all weights are solved,
    learn      codes and scales of all of them, by gradients            (learn.py)
"""

import dataclasses
import pathlib
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from midtread.algorithms import (
    bias,
    clip,
    collect,
    correct,
    fold,
    gptq,
    hqq,
    learn,
    reach,
    rotate,
    served,
    smooth,
)
from midtread.algorithms.gptq import DEFAULT, GptqOptions
from midtread.algorithms.learn import LearnOptions
from midtread.algorithms.offload import Store
from midtread.algorithms.program import (
    SEARCH_LESS,
    Program,
    Site,
    Stage,
    as_call,
    stages,
    trace,
)
from midtread.algorithms.report import Report, Row
from midtread.algorithms.resume import Kept
from midtread.algorithms.rotate import RotateOptions
from midtread.algorithms.weight import as_matrices, over_inputs
from midtread.model.coverage import format_text
from midtread.model.rules import did_you_mean
from midtread.numerics import hadamard, views
from midtread.numerics.qarray import QArray, dequantize, quantize_by_spec
from midtread.numerics.spec import Spec
from midtread.providers.ptq import PtqProvider

BEFORE = ("rotate", "correct", "smooth", "awq")
ROUNDINGS = ("round", "clip", "hqq", "gptq")
AFTER = ("bias", "learn")
BY_GRADIENT = ("gradient", "both")  # values of `weigh`
ROWS = 32  # rows for every input are enough for moments of sums over tokens


class Calibrated(NamedTuple):
    """What `calibrate` returns; docs/four-bits.md has an example.

    Args:
        model: the model under the provider, of NNX with its parameters in it.
        params: of Linen, the variables to call it with; of a function, its parameters, some
            of them QArrays; of NNX, None.
        report: what was done to each weight, and what it cost.
    """

    model: Any  # under the provider; of NNX with its parameters in it
    params: Any  # of Linen: the variables to call it with
    report: Report


@dataclasses.dataclass(frozen=True)
class CalibrationOptions:
    """How `calibrate` goes about it.

    Args:
        weigh: "attention", inputs as the next layer sees them where that is known: for
            values, summed as attention does (reach.py), and all tokens the same elsewhere;
            "gradient", tokens by what reaches the loss; "both", values as the next layer
            sees them and all else by gradient; "none", all the same everywhere.
            None: "gradient" where `calibrate` is given a loss, "attention" where it is not.
        runs: into how many runs of outputs a layer is cut, each with weights and second
            moments of its own (the heads of values, say); a layer whose outputs it does
            not divide has one.
        inputs: "quantized", those that the quantized layers before give, or "float".
        correction: how much of the earlier layers' error "correct" makes up for, 0 to 1.
        min_tokens: a weight that fewer tokens than this, times its inputs, meet is refused;
            an expert of them takes the moments of all experts together.
        gptq: options of GPTQ.
        learn: options of learning.
        alpha: "smooth": how much of the inputs' range moves to the weights, 0 to 1.
        rotate: options of rotating.
        offload: where activations are kept between stages: False, on the device; True or
            "host", in host memory; "disk", in files of a temporary folder.
        histograms: count the sizes of every weight's inputs too: rows of the report then
            tell how far the largest lies above the rest.
    """

    weigh: str | None = None
    runs: int = 1
    inputs: str = "quantized"
    correction: float = 0.5
    min_tokens: float = 0.25
    gptq: GptqOptions = DEFAULT
    learn: LearnOptions = learn.DEFAULT
    alpha: float = 0.5
    rotate: RotateOptions = rotate.DEFAULT
    offload: bool | str = False
    histograms: bool = False

    def __post_init__(self):
        for name, known in (
            ("weigh", (None, "attention", "gradient", "both", "none")),
            ("inputs", ("quantized", "float")),
            ("offload", (False, True, "host", "disk")),
        ):
            if getattr(self, name) not in known:
                raise ValueError(
                    f"calibrate: {name}={getattr(self, name)!r} should be one of {known}."
                )
        for name in ("correction", "alpha"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(
                    f"calibrate: {name}={getattr(self, name)} should lie between 0 and 1."
                )
        if self.runs < 1 or self.min_tokens < 0:
            raise ValueError(f"calibrate: runs is at least 1, min_tokens 0, in {self}.")


_DEFAULT = CalibrationOptions()


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
            algorithms/calibrate.py.
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
    before, rounding, after = _plan(algorithms)
    batches = list(batches)
    _check(batches)
    options = _weighed(options, loss, targets)
    targets = batches if targets is None else list(targets)
    if len(targets) != len(batches):
        raise ValueError(f"{len(targets)} targets for {len(batches)} batches.")
    started = time.time()
    _check_static(provider, before)
    quantized, boxes = served.quantize(model, provider, batches[0], params, method)
    program, floats = trace(model, batches[0], params=params, method=method)
    chosen = served.chosen_sites(program, boxes, rounding, before)
    say(f"{len(chosen)} weights in {1 + max(s.stage for s in chosen.values())} stages")
    turns, given = rotate.Plan(), floats
    if "rotate" in before:
        specs = {n: boxes[site.path].how for n, site in chosen.items()}
        turns = rotate.plan(program, chosen, specs, options.rotate)
        floats = rotate.fold(program, floats, turns, options.rotate, specs, say)
    work = _Work(
        program, floats, boxes, chosen, batches, before, rounding, after, options, turns
    )
    kept = Kept(folder, work, algorithms, loss)
    if work.needs_moments and options.weigh in BY_GRADIENT and not kept.is_whole:
        work.weigh_tokens(loss, targets, say)
    solved = work.run(kept, say)
    turned = {path: w for path, w in floats.items() if w is not given[path]}
    by_name = {tuple(map(str, path)): path for path in boxes}
    for path, value in {**turned, **work.biases}.items():
        path = by_name.get(tuple(map(str, path)), path)
        if path not in solved:
            quantized = served.put_param(quantized, path, value, boxes)
    for path, arrays in solved.items():
        quantized = served.put(quantized, path, arrays, boxes[path])
    report = work.report(tuple(algorithms), time.time() - started)
    if isinstance(quantized, nnx.Module):
        return Calibrated(quantized, None, report)
    return Calibrated(quantized[0], quantized[1], report)


def _plan(algorithms: Sequence[str]) -> tuple[tuple[str, ...], str, tuple[str, ...]]:
    """(what acts on the float weight, how it is rounded, what acts on all codes)."""
    if isinstance(algorithms, str):
        algorithms = (algorithms,)
    known = (*BEFORE, *ROUNDINGS, *AFTER)
    for name in algorithms:
        if name not in known:
            raise ValueError(f"unknown algorithm {name!r}. {did_you_mean(name, known)}")
    rounds = [name for name in algorithms if name in ROUNDINGS]
    places = [known.index(name) for name in algorithms]
    if len(rounds) > 1:
        raise ValueError(
            f"algorithms={list(algorithms)} round twice: keep one of {rounds}. (gptq "
            "searches scales as clip does, by itself.)"
        )
    if places != sorted(set(places)):
        raise ValueError(
            f"algorithms={list(algorithms)} have no meaning in this order: write "
            f"{[n for n in known if n in algorithms]}."
        )
    if {"smooth", "awq"} <= set(algorithms):
        raise ValueError(
            "smooth and awq both choose one factor per input: keep smooth where inputs are "
            "quantized, awq where they are not."
        )
    before = tuple(name for name in algorithms if name in BEFORE)
    after = tuple(name for name in algorithms if name in AFTER)
    return before, rounds[0] if rounds else "round", after


def _check_static(provider: PtqProvider, before: tuple[str, ...]) -> None:
    """Refuses ranges of inputs that are found before the inputs are changed."""
    changes = [name for name in before if name in ("rotate", "smooth", "awq")]
    static = getattr(provider, "_rules", ())
    if changes and any(rule.act_static_scale for rule in static):
        raise ValueError(
            f"{changes[0]} changes what a weight's inputs are, and act_static_scale has their "
            "ranges from before: leave one of them out."
        )


def _weighed(options: CalibrationOptions, loss, targets) -> CalibrationOptions:
    """Options that say how inputs are weighed; a loss or targets for nothing are refused."""
    weigh = options.weigh or ("attention" if loss is None else "gradient")
    if loss is not None and weigh not in BY_GRADIENT:
        raise ValueError(
            f"a loss weighs tokens by its gradients, but weigh={weigh!r} takes none: leave "
            "out the loss, or write CalibrationOptions(weigh='gradient')."
        )
    if targets is not None and loss is None:
        raise ValueError("targets are for a loss: give loss=..., or leave them out.")
    return dataclasses.replace(options, weigh=weigh)


def _check(batches: list[Any]) -> None:
    if not batches:
        raise ValueError("calibrate got no batches: give some inputs of the model.")
    shapes = lambda batch: [np.shape(x) for x in jax.tree.leaves(as_call(batch))]
    for number, batch in enumerate(batches):
        leaves = jax.tree.leaves(as_call(batch))
        if not leaves or any(0 in np.shape(x) for x in leaves):
            raise ValueError(f"batch {number} is empty: {shapes(batch)}.")
        if shapes(batch) != shapes(batches[0]):
            raise ValueError(
                f"batch {number} has the shapes {shapes(batch)}, the first one "
                f"{shapes(batches[0])}: drop the last batch if it is shorter."
            )
        for x in leaves:
            if jnp.issubdtype(jnp.result_type(x), jnp.floating) and not bool(
                jnp.isfinite(x).all()
            ):
                raise ValueError(f"batch {number} holds numbers that are not finite.")


class _Work:
    """One calibration: what is known, and what is solved so far."""

    def __init__(
        self, program, floats, boxes, chosen, batches, before, rounding, after, options,
        turns,
    ):  # fmt: skip
        self.program: Program = program
        self.floats, self.boxes, self.chosen = floats, boxes, chosen
        self.batches, self.before, self.rounding = batches, before, rounding
        self.after, self.distances, self.turns = after, None, turns
        self.biases: dict[tuple, jax.Array] = {}  # path -> the corrected one
        self.folds: list[fold.Fold] = []  # where factors of inputs go
        if {"smooth", "awq"} & set(before):
            specs = {n: boxes[site.path].how for n, site in chosen.items()}
            # Inputs that are turned at run time are multiplied after that, not before.
            still = {n: s for n, s in chosen.items() if n not in turns.online}
            self.folds = fold.find(program, still, specs)
        self.fold_of = {n: f for f in self.folds for n in f.sites}
        # of folds whose first weight is solved, by its number
        self.factors: dict[int, jax.Array] = {}
        wants = chosen if "bias" in after else ()
        sources = {n: bias.find(program, n) for n in wants}
        self.bias_of = {n: source for n, source in sources.items() if source}
        self.options: CalibrationOptions = options
        self.weights: list[dict[int, jax.Array]] = []  # of tokens: per batch and site
        self.rows: dict[int, Row] = {}
        of = lambda site: (tuple(map(str, site.path)), site.layer)
        solved_at = {of(site): n for n, site in chosen.items()}
        # number of a site -> that at which its weight is solved for
        self.first = {
            n: solved_at[of(site)]
            for n, site in enumerate(program.sites)
            if of(site) in solved_at
        }
        eqns = program.eqns
        # variable -> number of the site whose weight it is
        self.given = {
            eqns[mark["weight"]].outvars[0]: n for n, mark in enumerate(program.marks)
        }
        self.ways: dict[int, reach.Way] = {}
        if options.weigh in ("attention", "both") and self.needs_moments:
            ways = {n: reach.way_of(program, n) for n in chosen}
            self.ways = {n: way for n, way in ways.items() if way is not None}
        self.store = Store(options.offload)
        self._operands: dict[tuple[int, bool], jax.Array] = {}  # of one stage
        self._stats: dict[Any, dict[str, jax.Array]] = {}  # of one stage
        self._ahead: dict[int, gptq.Solved] = {}  # solved with a mate: of one stage

    @property
    def needs_moments(self) -> bool:
        looks = self.rounding in ("gptq", "clip") or "bias" in self.after
        return looks or any(name != "rotate" for name in self.before)

    @property
    def needs_floats(self) -> bool:
        return "correct" in self.before

    def groups(self, site: Site) -> int:
        outputs = site.axes.extents(site.stored_shape)[2]
        return self.options.runs if outputs % self.options.runs == 0 else 1

    def weigh_tokens(self, loss, targets: list[Any], say) -> None:
        groups = {n: self.groups(site) for n, site in self.chosen.items()}
        run = collect.gradient_weights(self.program, groups, loss)
        for number, batch in enumerate(self.batches):
            key = jax.random.fold_in(jax.random.key(0), number)
            weights = run(self.floats, self.program.arrays(batch), targets[number], key)
            if not all(bool(jnp.isfinite(w).all()) for w in weights.values()):
                raise ValueError(
                    f"gradients of batch {number} are not finite: check the data and the "
                    "loss, or weigh all tokens the same with options=mt.CalibrationOptions(weigh='none')."
                )
            self.weights.append(weights)
            say(f"gradients: batch {number + 1} of {len(self.batches)}")
        # Only what tokens count relative to each other matters.
        for n in groups:
            mean = sum(float(w[n].mean()) for w in self.weights) / len(self.weights)
            for w in self.weights:
                w[n] = w[n] / mean if mean > 0 else jnp.ones_like(w[n])

    # What runs.

    def run(self, kept: Kept, say) -> dict[tuple, list[tuple[tuple, QArray]]]:
        """{path: [(layer, codes)]} of all weights."""
        solved: dict[int, QArray] = {}
        shared = dict(self.program.constants)
        for path, v in self.program.params.items():
            shared[v] = self.floats[path]
        envs = [
            dict(zip(self.program.inputs, self.program.arrays(batch)))
            for batch in self.batches
            if self.needs_moments  # else nothing has to run
        ]
        floats = [dict(env) for env in envs] if self.needs_floats else []
        # What comes after the last weight, a language model's logits say, is not run.
        last = max(site.stage for site in self.chosen.values())
        for stage in stages(self.program)[: last + 1]:
            self._operands.clear()
            self._stats.clear()
            self._ahead.clear()
            for env in envs:
                self._advance(stage, shared, env, solved)
            for env in floats:
                self._advance(stage, shared, env, None)
            # Values come after queries and keys: how those attend is then known.
            for number in sorted(stage.sites, key=lambda n: n in self.ways):
                if number not in self.chosen:
                    continue
                solved[number], self.rows[number] = self._settle(
                    number, kept, shared, envs, floats, solved, say
                )
            for env in (*envs, *floats):
                for v in stage.drops:
                    self.store.drop(env.pop(v, None))
        self.store.clear()
        if "learn" in self.after:
            solved = self._learn(solved, say)
        params = {**self.floats, **self.biases}
        solved, changed = fold.move(self.program, self.folds, solved, params)
        self.biases |= changed
        by_path: dict[tuple, list] = {}
        for number, q in solved.items():
            site = self.chosen[number]
            by_path.setdefault(site.path, []).append((site.layer, q))
        return by_path

    def _advance(self, stage: Stage, shared, env, solved) -> None:
        """Runs a stage on one batch: on the codes, or on floats if `solved` is None."""
        outs = stage.run(self._values(stage.takes, shared, env, solved))
        env.update(zip(stage.gives, self.store.keep(outs)))

    def _values(self, takes, shared, env, solved) -> list[jax.Array]:
        """What a stage takes, on one batch."""
        values = []
        for v in takes:
            if v in self.given:
                values.append(self._operand(self.given[v], solved))
            else:
                known = env if v in env else shared
                if solved is not None and v in self.corrected:
                    known = self.corrected
                values.append(jnp.asarray(known[v]))
        return values

    @property
    def corrected(self) -> dict[Any, jax.Array]:
        """Variable -> the corrected bias that stands for it in the quantized model."""
        return {self.program.params[path]: b for path, b in self.biases.items()}

    def _operand(self, number: int, solved) -> jax.Array:
        """The weight as the contraction takes it; a float one while it is not solved."""
        site = self.program.sites[number]
        codes = (solved or {}).get(self.first.get(number))
        is_float = codes is None or self.options.inputs == "float"
        if (number, is_float) not in self._operands:
            w = self._float(site) if is_float else dequantize(codes)
            dtype = self.program.eqns[self.program.marks[number]["weight"]].outvars[0].aval.dtype  # fmt: skip
            w = site.as_operand(w.reshape(site.stored_shape)).astype(dtype)
            self._operands[number, is_float] = w
        return self._operands[number, is_float]

    def _float(self, site: Site) -> jax.Array:
        by_name = {tuple(map(str, p)): w for p, w in self.floats.items()}
        w = by_name[tuple(map(str, site.path))]
        for i in site.layer:
            w = w[i]
        return w.reshape(site.stored_shape)

    def _learn(self, solved: dict[int, QArray], say) -> dict[int, QArray]:
        chosen = self.chosen.items()
        learned, self.distances = learn.solve(
            self.program,
            self.floats,
            solved,
            self.first,
            {n: self._float(site) for n, site in chosen},
            {n: self.boxes[site.path].how for n, site in chosen},
            [self.program.arrays(batch) for batch in self.batches],
            self.options.learn,
            say,
            self.biases,
        )
        return learned

    # One weight.

    def _settle(
        self, number, kept: Kept, shared, envs, floats, solved, say
    ) -> tuple[QArray, Row]:
        site = self.chosen[number]
        known = kept.read(number)
        if known is not None:
            say(f"{site.name}: as solved before")
            q, row, shift = known
            self._shift(number, shift)
            if number in self.fold_of:
                first = self.fold_of[number].sites[0]
                self.factors.setdefault(first, fold.factors_of(q, site)[None])
            return q, row
        spec, w = self.boxes[site.path].how, self._float(site)
        signs = self.turns.online.get(number)
        if signs is not None:  # from here on all is in turned coordinates
            w = hadamard.turn(w, signs)
        stats = None
        if self.needs_moments:
            stats = self._moments(number, envs, floats)
            if number in self.ways:
                stats = stats | self._attended(number, shared, envs, floats, solved)
        began = time.time()
        note = ""
        if stats is not None:
            stats, note = self._enough(site, stats)
        factors = self._factors(number, w, spec, stats, envs, floats)
        q, cost, rounded = self._solve(number, w, spec, stats, factors)
        tokens = 0 if stats is None else int(stats["count"].sum())
        text = format_text(spec.format, tuple(t for _, t in spec.tiled_axes))
        shift = self._bias_shift(number, q, w, stats)
        if "bias" in self.after and shift is None:
            note = f"{note}; no bias to correct".removeprefix("; ")
        if signs is not None:
            q = q.replace(pre_rotation=signs)
        outliers = None
        if stats is not None and "sizes" in stats:
            outliers = collect.outliers(stats["sizes"])
        row = Row(site.name, site.op, text, tokens, cost, rounded, note, outliers)
        kept.write(number, q, row, shift)
        self._shift(number, shift)
        say(
            f"{site.name}: error {cost:.3g}, rounded {rounded:.3g} ({time.time() - began:.1f} s)"
        )
        return q, row

    def _bias_shift(self, number: int, q, w, stats) -> jax.Array | None:
        """What the layer's bias is to grow by; None where it has none."""
        if number not in self.bias_of:
            return None
        mean = stats["sum"] / stats["count"][:, None]
        return bias.shift(w, q, mean, self.chosen[number].axes)

    def _shift(self, number: int, shift: jax.Array | None) -> None:
        if shift is not None:
            path, layer = self.bias_of[number]
            value = self.biases.get(path, self.floats[path])
            self.biases[path] = value.at[layer].add(shift.astype(value.dtype))

    def _inputs_of(self, number: int) -> tuple[Any, Any, Any]:
        """(input, sizes of groups, layout): sites of the same have the same moments."""
        site, mark = self.program.sites[number], self.program.marks[number]
        x = self.program.eqns[mark["input"]].invars[0]
        sizes = self.program.eqns[mark["sizes"]].outvars[0] if "sizes" in mark else None
        is_alone = bool(self.weights) or number in self.turns.online
        return x, sizes, number if is_alone else collect.layout(site)

    def _mates(self, number: int) -> list[int]:
        """Weights to solve for at once, in one loop over the inputs that they share."""
        if number in self.ways:
            return [number]
        kind = lambda n: (
            self._inputs_of(n), self.boxes[self.chosen[n].path].how, self.chosen[n].axes
        )  # fmt: skip
        others = [n for n in self.chosen if n not in self.ways]
        return [n for n in others if self.chosen[n].stage == self.chosen[number].stage and kind(n) == kind(number)]  # fmt: skip

    def _moments(self, number: int, envs, floats) -> dict[str, jax.Array]:
        site = self.program.sites[number]
        signs = self.turns.online.get(number)
        key = self._inputs_of(number)
        x, sizes, _ = key
        if key in self._stats:  # query, key and value share their inputs
            return self._stats[key]
        total = None
        for b, env in enumerate(envs):
            weights = self.weights[b][number] if self.weights else None
            other = floats[b][x] if floats else None
            total = collect.add(
                total,
                _moments_of(
                    site.alike, env[x], weights, sizes and env[sizes], other, signs,
                    self.options.histograms,
                ),
            )  # fmt: skip
        assert total is not None
        if not bool(jnp.isfinite(total["H"]).all()):
            raise ValueError(f"{site.name}: its inputs are not finite on this data.")
        self._stats[key] = total
        return total

    def _attended(self, number: int, shared, envs, floats, solved) -> dict:
        """Moments of inputs as the next layer sees them, from as many batches as it takes
        for ROWS times as many rows as inputs."""
        known = {*envs[0], *shared, *self.given}
        probe = reach.probe(self.program, number, self.ways[number], known)
        signs = self.turns.online.get(number)

        def run(env, codes) -> jax.Array:
            X = probe.run(self._values(probe.takes, shared, env, codes))
            return X if signs is None else hadamard.turn(X, signs.reshape(1, 1, -1))

        total = None
        seen = 0
        for b, env in enumerate(envs):
            X = run(env, solved)
            other = run(floats[b], None) if floats else None
            total = collect.add(total, _moments_of_heads(X, other))
            seen += X.shape[1]
            if seen >= ROWS * X.shape[2]:
                break
        assert total is not None
        return total

    def _enough(self, site: Site, stats: dict) -> tuple[dict, str]:
        """Statistics that can be trusted, or a refusal."""
        K = site.axes.extents(site.stored_shape)[1]
        least = self.options.min_tokens * K
        counts = np.asarray(stats["count"])
        if counts.sum() < least:
            raise ValueError(
                f"{site.name}: {int(counts.sum())} tokens are too few for {K} inputs. Give at "
                f"least {int(np.ceil(least))}, or set CalibrationOptions(min_tokens=...)."
            )
        few = (
            [int(e) for e in np.flatnonzero(counts < least)] if len(counts) > 1 else []
        )
        if not few:
            return stats, ""
        pooled = jnp.sum(stats["H"], axis=0, keepdims=True)
        H = stats["H"].at[jnp.array(few)].set(pooled[0])
        note = (
            f"experts {few} saw fewer than {int(least)} tokens: moments of all experts"
        )
        return {**stats, "H": H}, note

    def _goal(self, w, axes, stats) -> jax.Array:
        """What the codes are to stand for."""
        if "correct" not in self.before:
            return w
        damping, strength = self.options.gptq.damping, self.options.correction
        return correct.target(w, stats["H"], stats["C"], axes, damping, strength)

    def _solve_ahead(self, number: int, w, spec: Spec, stats) -> None:
        """GPTQ of a weight and its mates."""
        mates, axes = self._mates(number), self.chosen[number].axes
        ws = [w if n == number else self._float(self.chosen[n]) for n in mates]
        goals = [self._goal(w, axes, stats) for w in ws]
        solved = gptq.solve_together(goals, spec, stats["H"], axes, self.options.gptq)
        self._ahead |= dict(zip(mates, solved))

    def _factors(self, number: int, w, spec: Spec, stats, envs, floats):
        """[E, K], what inputs are multiplied by; None where no algorithm asks for it. Weights
        that read the same input share factors if these can be folded."""
        names = {"smooth", "awq"} & set(self.before)
        if not names:
            return None
        place = self.fold_of.get(number)
        if place is None:
            weights, specs, moments = [w], (spec,), [stats]
            axes, ties = (self.chosen[number].axes,), None
        else:
            first = place.sites[0]
            if first in self.factors:
                return self.factors[first]
            sites = [self.chosen[n] for n in place.sites]
            weights = [self._float(site) for site in sites]
            specs = tuple(self.boxes[site.path].how for site in sites)
            axes = tuple(site.axes for site in sites)
            moments = [self._moments(n, envs, floats) for n in place.sites]
            ties = None if place.columns is None else jnp.array(place.columns)
        if "smooth" in names:
            largest, alpha = moments[0]["largest"], self.options.alpha
            factors = smooth.smooth_together(weights, largest, axes, alpha, ties)
        else:
            each = [one["H"] for one in moments]
            factors = smooth.awq_together(weights, specs, each, axes, ties=ties)
        if place is not None:
            self.factors[place.sites[0]] = factors
        return factors

    def _solve(
        self, number: int, w, spec: Spec, stats, factors
    ) -> tuple[QArray, float, float]:
        axes, options = self.chosen[number].axes, self.options
        if self.rounding == "gptq" and factors is None:
            if number not in self._ahead:
                self._solve_ahead(number, w, spec, stats)
            q, cost, rounded = self._ahead.pop(number)
            return q, float(cost), float(rounded)
        goal = self._goal(w, axes, stats)
        if factors is not None:  # codes of w / factors; inputs are multiplied by them
            spreads = over_inputs(factors, axes, w.shape)
            goal = (goal / spreads).astype(w.dtype)
            H = stats["H"] * factors[:, None, :, None] * factors[:, None, None, :]
            stats = {**stats, "H": H}
        if self.rounding == "gptq":
            q, cost, rounded = gptq.solve(goal, spec, stats["H"], axes, options.gptq)
        else:
            if self.rounding == "clip":
                diagonal = jnp.diagonal(stats["H"], axis1=-2, axis2=-1).mean(1)
                q = clip.solve(goal, spec, diagonal, axes)
            elif self.rounding == "hqq":
                q = hqq.solve(goal, spec)
            else:
                q = quantize_by_spec(goal, spec)
            cost = _cost(q, goal, stats, axes)
            rounded = _cost(quantize_by_spec(goal, spec), goal, stats, axes)
        if factors is not None:
            spreads = over_inputs(factors, axes, w.shape)
            full = [1 if a in axes.kept else n for a, n in enumerate(q.qvalue.shape)]
            q = q.replace(pre_scale=views.pad_to(spreads, full, 1))
        return q, float(cost), float(rounded)

    def report(self, algorithms: tuple[str, ...], seconds: float) -> Report:
        rows = tuple(self.rows[n] for n in sorted(self.rows))
        weighed = "tokens by gradient" if self.weights else "all tokens the same"
        if self.ways:
            seen = f"{len(self.ways)} weights by what attention makes of their inputs"
            weighed = f"{seen}, {weighed} elsewhere"
        return Report(
            rows,
            algorithms,
            self.options.inputs,
            weighed,
            seconds,
            self.distances,
            self.turns.says,
            self._says_of_factors(),
        )

    def _says_of_factors(self) -> str:
        if not {"smooth", "awq"} & set(self.before):
            return ""
        kept = len(self.chosen) - len(self.fold_of)
        return f"factors of {len(self.fold_of)} weights folded, of {kept} kept as pre_scale"


def _cost(q: QArray, w, stats, axes) -> jax.Array:
    """The error of a layer's output, relative to the output; of the weight, without data."""
    error = as_matrices((dequantize(q) - w).astype(jnp.float32), axes)
    W = as_matrices(w.astype(jnp.float32), axes)
    if stats is None:
        return jnp.sum(jnp.square(error)) / jnp.sum(jnp.square(W))
    H = stats["H"].mean(1)
    return jnp.sum(error * (H @ error)) / jnp.sum(W * (H @ W))


_moments_of = jax.jit(
    collect.moments, static_argnums=(0, 6), compiler_options=SEARCH_LESS
)
_moments_of_heads = jax.jit(collect.moments_of_heads, compiler_options=SEARCH_LESS)
