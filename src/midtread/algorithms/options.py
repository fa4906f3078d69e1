"""Options: what a calibration is asked for, and which of that has a meaning.

Algorithms act on a weight in the order of this table, whatever is left out:

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
import math
import numbers
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from midtread.algorithms import learn, rotate
from midtread.algorithms.gptq import DEFAULT, GptqOptions
from midtread.algorithms.learn import LearnOptions
from midtread.algorithms.program import as_call
from midtread.algorithms.rotate import RotateOptions
from midtread.model.quantize import split_arrays
from midtread.model.rules import did_you_mean
from midtread.providers.ptq import PtqProvider

BEFORE = ("rotate", "correct", "smooth", "awq")
ROUNDINGS = ("round", "clip", "hqq", "gptq")
AFTER = ("bias", "learn")
LOOKS = ("correct", "smooth", "awq", "clip", "gptq", "bias")  # at a weight's inputs
BY_GRADIENT = ("gradient", "both")  # values of `weigh`
# Numbers that one algorithm alone looks at. How others are done is said by records, which one
# CalibrationOptions may hold for several calibrations.
ABOUT = {"correction": "correct", "alpha": "smooth"}


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

    Raises:
        ValueError: A choice that there is not, or a number outside of its range.
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
        if not isinstance(self.runs, numbers.Integral) or self.runs < 1:
            raise ValueError(
                f"calibrate: runs is at least 1 and a whole number, not {self.runs!r}."
            )
        if not 0 <= self.min_tokens < math.inf:
            raise ValueError(
                f"calibrate: min_tokens={self.min_tokens!r} should be a number from 0 on."
            )


class Plan(NamedTuple):
    """Algorithms by name, and when they act."""

    before: tuple[str, ...]  # on the float weight
    rounding: str
    after: tuple[str, ...]  # on the codes

    @property
    def names(self) -> tuple[str, ...]:
        """All of them, in order; the way of rounding too, where none was given."""
        return (*self.before, self.rounding, *self.after)

    @property
    def looks(self) -> tuple[str, ...]:
        """Those that look at the inputs of a weight."""
        return tuple(name for name in self.names if name in LOOKS)

    @property
    def scales_inputs(self) -> bool:
        return bool({"smooth", "awq"} & set(self.before))

    @property
    def needs_moments(self) -> bool:
        return bool(self.looks)


def plan(algorithms: Sequence[str]) -> Plan:
    """What `algorithms` mean together.

    >>> plan(["correct", "gptq", "learn"])
    Plan(before=('correct',), rounding='gptq', after=('learn',))

    Raises:
        ValueError: one that is unknown, out of order, or contradicts another.
    """
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
    if {"smooth", "awq"} <= set(algorithms):
        raise ValueError(
            "smooth and awq both choose one factor per input: keep smooth where inputs are "
            "quantized, awq where they are not."
        )
    if places != sorted(set(places)):
        raise ValueError(
            f"algorithms={list(algorithms)} have no meaning in this order: write "
            f"{[n for n in known if n in algorithms]}."
        )
    before = tuple(name for name in algorithms if name in BEFORE)
    after = tuple(name for name in algorithms if name in AFTER)
    return Plan(before, rounds[0] if rounds else "round", after)


def check_options(options: CalibrationOptions, plan: Plan) -> None:
    """Refuses options that the algorithms of a plan would not look at."""
    names, usual = plan.names, CalibrationOptions()
    for field, about in ABOUT.items():
        value = getattr(options, field)
        if value != getattr(usual, field) and about not in names:
            raise ValueError(
                f"calibrate: {field}={value!r} is an option of {about!r}, which is not among "
                f"algorithms={list(names)}: leave out the option, or add the algorithm."
            )
    if options.inputs == "float" and "correct" in plan.before:
        raise ValueError(
            "correct makes up for errors in a layer's inputs, and inputs='float' have none: "
            "leave out 'correct', or write CalibrationOptions(inputs='quantized')."
        )
    looks = [f"weigh={options.weigh!r}"] * (options.weigh in BY_GRADIENT)
    looks += ["histograms=True"] * options.histograms
    if looks and not plan.needs_moments:
        raise ValueError(
            f"calibrate: {looks[0]} is about a weight's inputs, and algorithms={list(names)} "
            "look at none: leave it out, or use clip or gptq."
        )


def check_static(provider: PtqProvider, before: tuple[str, ...]) -> None:
    """Refuses ranges of inputs that are found before the inputs are changed."""
    changes = [name for name in before if name in ("rotate", "smooth", "awq")]
    static = getattr(provider, "_rules", ())
    if changes and any(rule.act_static_scale for rule in static):
        raise ValueError(
            f"{changes[0]} changes what a weight's inputs are, and act_static_scale has their "
            "ranges from before: leave one of them out."
        )


def weighed(
    options: CalibrationOptions, plan: Plan, loss, targets
) -> CalibrationOptions:
    """Options that say how inputs are weighed; a loss or targets for nothing are refused."""
    if loss is not None and not plan.needs_moments:
        raise ValueError(
            f"a loss weighs a weight's inputs, and {plan.rounding!r} looks at none: leave out "
            "the loss, or use clip or gptq."
        )
    weigh = options.weigh or ("attention" if loss is None else "gradient")
    if loss is not None and weigh not in BY_GRADIENT:
        raise ValueError(
            f"a loss weighs tokens by its gradients, but weigh={weigh!r} takes none: leave "
            "out the loss, or write CalibrationOptions(weigh='gradient')."
        )
    if options.runs > 1 and weigh not in BY_GRADIENT:
        raise ValueError(
            f"calibrate: runs={options.runs} are runs of outputs with gradients of their own, "
            f"and weigh={weigh!r} takes none: leave it out, or write "
            "CalibrationOptions(weigh='gradient', ...)."
        )
    if targets is not None and loss is None:
        raise ValueError("targets are for a loss: give loss=..., or leave them out.")
    return dataclasses.replace(options, weigh=weigh)


def check_batches(batches: Any, shapes_vary: bool = False) -> list[Any]:
    """All batches as a list; data that says nothing, or nothing sound, is refused."""
    if isinstance(batches, Mapping | str) or not isinstance(batches, Iterable):
        raise TypeError(
            f"batches are a list of inputs, or a generator of them, not a "
            f"{type(batches).__name__}: write [batch] for one."
        )
    batches = list(batches)
    if not batches:
        raise ValueError("there are no batches: give some inputs of the model.")
    for number, batch in enumerate(batches):
        _check_batch(number, batch)
        if not shapes_vary and _shapes(batch) != _shapes(batches[0]):
            raise ValueError(
                f"batch {number} has the shapes {_shapes(batch)}, the first one "
                f"{_shapes(batches[0])}: drop the last batch if it is shorter."
            )
    return batches


def _check_batch(number: int, batch: Any) -> None:
    """Refuses a batch that is empty, or holds numbers that are none."""
    arrays = _arrays(batch)
    if not arrays or any(0 in np.shape(x) for x in arrays):
        raise ValueError(
            f"batch {number} is empty: {_shapes(batch) or 'it holds no arrays'}."
        )
    for x in arrays:
        if jnp.issubdtype(jnp.result_type(x), jnp.floating) and not bool(
            jnp.isfinite(x).all()
        ):
            raise ValueError(f"batch {number} holds numbers that are not finite.")


def _arrays(batch: Any) -> list[Any]:
    return [x for x in split_arrays(*as_call(batch))[0] if x is not None]


def _shapes(batch: Any) -> list[tuple[int, ...]]:
    return [np.shape(x) for x in _arrays(batch)]
