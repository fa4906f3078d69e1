"""Learn: codes and scales of all weights together, by gradients of how far outputs move.

Every other algorithm looks at one layer. What the outputs feel is all of them at once, and a
code that is second best for its layer may undo what another layer did. So codes are given
a place to move in, and are moved by gradients (Cheng et al. 2023, SignRound; Nagel et al. 2020,
AdaRound): a weight's latent u, in units of its scale, stands for the code it rounds to,

    value = round(u) * scale        d/du = scale * d/dvalue        as if rounding were not there

It starts inside the cell of the code that was solved for, on the float weight's side, so that
codes which hardly matter stay where they are, and those whose gradient keeps its sign cross
over to the neighbour. Scales move too, by factors exp(c), where the format leaves them free
(not those of MX and nvfp4, which are numbers of a format themselves). Steps are Adam's: where
gradients of different batches disagree, little moves.

    start(w, q)                  where the latents of one weight begin
    step(state, q, g, ...)       one step along the gradient by the weight's values
    codes(state, q)              the QArray that the latents stand for

How far the outputs are from the float model's is one of DISTANCES. What is learned is fitted
to the batches it is learned from: give it more of them than there are steps' worth of ideas.
The float model has an answer to any input, so tokens need not be those of the batches: with
`mix`, every step sees the beginning of some rows, up to a random position, and the end of
others, and no row twice.
"""

import dataclasses
import functools
import numbers
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from midtread.algorithms.chain import Chain
from midtread.algorithms.program import Program
from midtread.numerics import hadamard, rounding, views
from midtread.numerics.qarray import QArray, dequantize
from midtread.numerics.spec import Spec


@dataclasses.dataclass(frozen=True)
class LearnOptions:
    """How codes are learned.

    Args:
        steps: of gradient, a batch each.
        rate: how far a latent moves in the first steps, in units of its scale; the rate falls
            to 0 on a straight line. 0: codes stay as they are.
        scale_rate: the same for the logarithm of a scale.
        distance: between the outputs and the float model's, by name: see DISTANCES.
        start: how much of the way from its code to the float weight, or to the border of the
            code's cell, a latent begins with. On the border it would cross on the first noise.
        mix: of inputs that are integers [rows, tokens], every step sees the beginning of some
            rows and the end of others, so that less is fitted to the batches as they are.
    """

    steps: int = 200
    rate: float = 0.01
    scale_rate: float = 0.001
    distance: str = "squares"
    start: float = 0.5
    mix: bool = False

    def __post_init__(self):
        if self.distance not in DISTANCES:
            raise ValueError(
                f"learn: distance={self.distance!r} should be one of {tuple(DISTANCES)}."
            )
        is_whole = isinstance(self.steps, numbers.Integral) and self.steps > 0
        if not is_whole or not self.rate >= 0 or not self.scale_rate >= 0:
            raise ValueError(
                "learn: steps lie above 0 and are whole, rate and scale_rate are not below "
                f"0, in {self}."
            )
        if not 0 <= self.start < 1:
            raise ValueError(f"learn: start={self.start} lies between 0 and 1.")


# --- distances --------------------------------------------------------------------------------


def squares(outs: Sequence[jax.Array], wanted: Sequence[jax.Array]) -> jax.Array:
    """Squared errors of all outputs together, relative to what is wanted."""
    size = lambda arrays: sum((jnp.sum(jnp.square(x)) for x in arrays), jnp.float32(0))
    error = size([a - b for a, b in zip(outs, wanted)])
    return error / jnp.maximum(size(wanted), 1e-30)


def divergence(outs: Sequence[jax.Array], wanted: Sequence[jax.Array]) -> jax.Array:
    """KL from the wanted distribution, outputs being logits along their last axis, in nats
    per token."""
    total = jnp.float32(0)
    for a, b in zip(outs, wanted):
        if a.ndim > 1:  # a number beside the logits, a loss say, is none
            a, b = jax.nn.log_softmax(a), jax.nn.log_softmax(b)
            # What cannot happen, a logit of -inf, adds nothing: 0 * (-inf + inf) would be nan.
            gap = jnp.where(jnp.isneginf(b), 0.0, b - a)
            total += jnp.mean(jnp.sum(jnp.exp(b) * gap, axis=-1))
    return total


DISTANCES: dict[str, Callable] = {"squares": squares, "divergence": divergence}


DEFAULT = LearnOptions()


def distance(name: str, outs: Sequence[Any], wanted: Sequence[Any]) -> jax.Array:
    """DISTANCES[name] of those outputs that are floats, in float32."""
    floats = [
        (a.astype(jnp.float32), b.astype(jnp.float32))
        for a, b in zip(outs, wanted)
        if jnp.issubdtype(jnp.result_type(a), jnp.floating)
    ]
    return DISTANCES[name]([a for a, _ in floats], [b for _, b in floats])


# --- one weight -------------------------------------------------------------------------------

DECAYS = 0.9, 0.99  # of Adam's mean and mean square


class State(NamedTuple):
    """Latents of one weight, and Adam's moments of their gradients."""

    units: jax.Array  # padded to whole tiles
    gain: jax.Array  # log of what scales are multiplied by
    moments: tuple[Any, Any]  # (mean, mean square), each of (units, gain)


def start(w: jax.Array, q: QArray, share: float = 0.5) -> State:
    """Latents that round to the codes of `q`, and lie `share` of the way to `w`.

    >>> from midtread.numerics.qarray import quantize
    >>> w = jnp.array([0.9, -0.5, 0.12, 0.01])
    >>> q = quantize(w, "int4")
    >>> [round(u, 2) for u in start(w, q, 0.8).units.tolist()]
    [7.4, -4.13, 1.0, 0.07]

    Args:
        w: the float weight.
        q: its codes, which need not be the nearest.
        share: of the way to `w`, or to the border of the code's cell if `w` lies beyond.
    """
    scale, zero = _scale(q), _zero(q)
    w = w.astype(jnp.float32)
    if q.pre_rotation is not None:
        w = hadamard.turn(w, q.pre_rotation)
    w = views.pad_to(w, q.qvalue.shape)
    if q.pre_scale is not None:
        w = w / q.pre_scale
    aim = _within(w / scale + zero, q)
    code = rounding.decode(q.qvalue, q.format).astype(jnp.float32)

    def halve(_, ends):  # `near` rounds to the code, `far` does not
        near, far = ends
        middle = (near + far) / 2
        stays = _rounded(middle, q) == code
        return jnp.where(stays, middle, near), jnp.where(stays, far, middle)

    edge, _ = jax.lax.fori_loop(0, 8, halve, (code, aim))
    edge = jnp.where(_rounded(aim, q) == code, aim, edge)
    units = code + share * (edge - code)
    gain = jnp.zeros(q.scale.shape)
    zeros = lambda: (jnp.zeros_like(units), jnp.zeros_like(gain))
    return State(units, gain, (zeros(), zeros()))


def step(
    state: State, q: QArray, g: jax.Array, number: Any, rates: tuple[Any, Any]
) -> State:
    """One step of Adam.

    Args:
        state: the latents.
        q: the codes that they started from.
        g: the gradient by the weight's values, of its shape.
        number: of this step, from 1.
        rates: of latents and of scales.
    """
    g = g.astype(jnp.float32)
    if q.pre_rotation is not None:
        g = hadamard.turn(g, q.pre_rotation)
    g = views.pad_to(g, q.qvalue.shape)
    if q.pre_scale is not None:
        g = g * q.pre_scale
    by_units = g * _scale(q)
    split, inside = views.split(q.qvalue.shape, q.scale.shape)
    by_gain = by_units * (_rounded(state.units, q) - _zero(q))
    by_gain = jnp.sum(by_gain.reshape(split), inside).reshape(q.scale.shape)
    grads = by_units, by_gain
    blend = lambda decay, old, new: decay * old + (1 - decay) * new
    means, sizes = state.moments
    means = jax.tree.map(functools.partial(blend, DECAYS[0]), means, grads)
    sizes = jax.tree.map(
        lambda old, new: blend(DECAYS[1], old, new * new), sizes, grads
    )

    def move(x, mean, size, rate):
        mean, size = mean / (1 - DECAYS[0] ** number), size / (1 - DECAYS[1] ** number)
        return x - rate * mean / jnp.sqrt(jnp.maximum(size, 1e-30))

    units = _within(move(state.units, means[0], sizes[0], rates[0]), q)
    gain = move(state.gain, means[1], sizes[1], rates[1])
    return State(units, gain, (means, sizes))


def codes(state: State, q: QArray) -> QArray:
    """What the latents stand for, with all else as in `q`."""
    scale = (q.scale.astype(jnp.float32) * jnp.exp(state.gain)).astype(q.scale.dtype)
    return q.replace(qvalue=rounding.encode(state.units, q.format), scale=scale)


def is_free(spec: Spec) -> bool:
    """Whether scales may be any numbers."""
    fixed = spec.format.scale or spec.scale_rule or spec.scale_dtype
    return not fixed and spec.method != "fixed"


def _scale(q: QArray) -> jax.Array:
    scale = q.scale.astype(jnp.float32)
    if q.global_scale is not None:
        scale = scale * q.global_scale
    return views.expand(scale, q.qvalue.shape)


def _zero(q: QArray) -> Any:
    if q.zero_point is None:
        return 0.0
    return views.expand(q.zero_point.astype(jnp.float32), q.qvalue.shape)


def _within(units: jax.Array, q: QArray) -> jax.Array:
    """Latents no further out than where the outermost codes would have their borders."""
    low, high = q.format.codes or (-q.format.bound, q.format.bound)
    return jnp.clip(units, low - 0.5, high + 0.5)


def _rounded(units: jax.Array, q: QArray) -> jax.Array:
    coded = rounding.encode(units, q.format)
    return rounding.decode(coded, q.format).astype(jnp.float32)


# --- all weights ------------------------------------------------------------------------------


def solve(
    program: Program,
    params: dict[tuple, jax.Array],
    solved: dict[int, QArray],
    users: dict[int, int],
    weights: dict[int, jax.Array],
    specs: dict[int, Spec],
    batches: Sequence[list[Any]],
    options: LearnOptions,
    say: Callable[[str], None],
    biases: dict[tuple, jax.Array] | None = None,
) -> tuple[dict[int, QArray], tuple[float, float]]:
    """Better codes for all weights of a program.

    Args:
        program: the model.
        params: its parameters.
        solved: number of a site -> the codes of its weight.
        users: number of any site -> that of the one whose weight it uses.
        weights: number of a site -> its float weight.
        specs: number of a site -> what its weight is quantized to.
        batches: the arrays of every batch.
        options: how it is done.
        say: told how far it is.
        biases: path -> what the quantized model has instead of that parameter.

    Returns:
        Codes, and the distance over all batches before and after. Where that did not fall,
        the codes are those that were given.
    """
    if options.mix:
        _check_mix(batches)
    chain = Chain(program, params, users)
    own = dict(biases or {})
    apart = jax.jit(functools.partial(distance, options.distance))
    far = jax.jit(jax.value_and_grad(functools.partial(distance, options.distance)))
    floats: dict[int, jax.Array] = {}  # number of any site -> its weight as an operand
    values: dict[int, jax.Array] = {}
    groups = _groups(program, solved, users, specs)
    states, codes_of = [], []
    for group in groups:
        ws, qs = ([of[n] for n in group.numbers] for of in (weights, solved))
        state, q, *both = _begin(group.uses, options.start, ws, qs)
        states.append(state)
        codes_of.append(q)
        for kept, operands in zip((floats, values), both):
            kept.update(zip(group.sites, operands))
    wanted = lambda batch: chain.outputs(floats, batch, {})

    def mean() -> float:
        out = lambda batch: chain.outputs(values, batch, own)
        parts = [float(apart(out(batch), wanted(batch))) for batch in batches]
        return sum(parts) / len(parts)

    before = mean()
    if not np.isfinite(before):
        raise ValueError(
            f"learn: the outputs are {before} from the float model's by distance="
            f"{options.distance!r}: some are not finite. Leave out 'learn', or take another "
            "distance."
        )
    for number in range(options.steps):
        turn, at = divmod(number, len(batches))
        if at == 0:
            key = jax.random.fold_in(jax.random.key(0), turn)
            order = jax.random.permutation(key, len(batches)).tolist()
        batch = batches[order[at]]
        if options.mix:
            other = batches[order[(at + 1) % len(batches)]]
            batch = mixed(batch, other, jax.random.fold_in(jax.random.key(1), number))
        aim = wanted(batch)
        towards = lambda outs, aim=aim: far(outs, aim)
        now, slopes = chain.slopes(values, batch, own, towards)
        left = 1 - number / options.steps
        for i, group in enumerate(groups):
            scale_rate = options.scale_rate if group.is_free else 0.0
            rates = jnp.array([options.rate * left, scale_rate * left])
            grads = [slopes.pop(n) for n in group.sites]
            states[i], operands = _move(
                group.uses,
                states[i],
                codes_of[i],
                grads,
                jnp.float32(number + 1),
                rates,
            )
            values.update(zip(group.sites, operands))
        if (number + 1) % 20 == 0 or number + 1 == options.steps:
            say(f"learn: step {number + 1} of {options.steps}, distance {now:.4g}")
    after = mean()
    say(f"learn: distance {before:.4g} before, {after:.4g} after")
    if not after < before:  # nor if a rate was so large that it is nan
        return solved, (before, before)
    learned = {}
    for group, state, q in zip(groups, states, codes_of):
        learned.update(zip(group.numbers, _end(state, q)))
    return learned, (before, after)


@jax.jit
def mixed(batch: list[Any], other: list[Any], key: jax.Array) -> list[jax.Array]:
    """Rows that begin as those of `other`, each as its neighbour there does, and from a random
    position on are those of `batch`.

    >>> rows = lambda first: [jnp.array([[first] * 2, [first + 1] * 2])]
    >>> mixed(rows(1), rows(5), jax.random.key(0))[0].tolist()
    [[6, 1], [5, 2]]
    """
    at = jax.random.randint(key, (), 1, batch[0].shape[1])

    def one(x, y):
        is_before = jnp.arange(x.shape[1]) < at
        is_before = is_before.reshape(1, -1, *[1] * (x.ndim - 2))
        return jnp.where(is_before, jnp.roll(y, 1, axis=0), x)

    return [one(jnp.asarray(x), jnp.asarray(y)) for x, y in zip(batch, other)]


def _check_mix(batches: Sequence[list[Any]]) -> None:
    """Refuses inputs that are no tokens, or so few that there is nothing to mix."""
    arrays = [x for x in batches[0] if x is not None]
    are_tokens = all(
        x.ndim >= 2 and jnp.issubdtype(x.dtype, jnp.integer) and x.shape[1] > 1
        for x in arrays
    )
    if not are_tokens or len({x.shape[:2] for x in arrays}) != 1:
        raise ValueError(
            "learn: mix=True recombines inputs that are integers [rows, tokens], and these are "
            f"{[(str(x.dtype), x.shape) for x in arrays]}: leave it out."
        )
    if len(batches) * arrays[0].shape[0] < 2:
        raise ValueError("learn: mix=True recombines rows, and there is one: leave it out.")  # fmt: skip


class _Group(NamedTuple):
    """Weights that are moved in one call, stacked: those of all layers that do the same."""

    numbers: list[int]  # at which they were solved for
    # of every weight: how each contraction with it turns it, and the dtype that it takes
    uses: tuple[tuple[tuple[tuple[int, ...], Any], ...], ...]
    sites: list[int]  # of those contractions, one weight's after the other's
    is_free: bool


def _groups(program: Program, solved, users, specs) -> list[_Group]:
    sites: dict[int, list[int]] = {}
    for n, first in users.items():
        sites.setdefault(first, []).append(n)
    dtype = lambda n: program.eqns[program.marks[n]["weight"]].outvars[0].aval.dtype
    alike: dict[Any, list[int]] = {}
    for n, q in solved.items():
        uses = tuple((program.sites[m].turn, dtype(m)) for m in sites[n])
        kind = jax.tree.structure(q), tuple(x.shape for x in jax.tree.leaves(q))
        alike.setdefault((uses, kind, is_free(specs[n])), []).append(n)
    return [
        _Group(
            numbers,
            (uses,) * len(numbers),
            [m for n in numbers for m in sites[n]],
            free,
        )
        for (uses, _, free), numbers in alike.items()
    ]


def _stacked(trees: Sequence[Any]) -> Any:
    return jax.tree.map(lambda *parts: jnp.stack(parts), *trees)


def _operands(uses, ws: jax.Array | Sequence[jax.Array]) -> list[jax.Array]:
    """Weights as their contractions take them."""
    return [w.transpose(t).astype(d) for own, w in zip(uses, ws) for t, d in own]


@functools.partial(jax.jit, static_argnums=(0, 1))
def _begin(uses, share: float, ws: list[jax.Array], qs: list[QArray]):
    """(states, codes, operands in float, operands of the codes) of a group."""
    w, q = _stacked(ws), _stacked(qs)
    state = jax.vmap(functools.partial(start, share=share))(w, q)
    return state, q, _operands(uses, ws), _operands(uses, jax.vmap(_values)(q, w))


@functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
def _move(uses, state: State, q: QArray, grads: list[jax.Array], number, rates):
    """A step of a group, and the operands that its weights then are."""
    grads, by_weight = list(grads), []
    for own in uses:
        parts = [grads.pop(0).transpose(np.argsort(turn)) for turn, _ in own]
        by_weight.append(sum(parts[1:], parts[0]))
    g = jnp.stack(by_weight)
    one = lambda state, q, g: step(state, q, g, number, (rates[0], rates[1]))
    state = jax.vmap(one)(state, q, g)
    moved = jax.vmap(_values)(jax.vmap(codes)(state, q), g)
    return state, _operands(uses, moved)


@jax.jit
def _end(state: State, q: QArray) -> list[QArray]:
    """The codes of every weight of a group."""
    stack = jax.vmap(codes)(state, q)
    each = range(len(state.units))
    return [jax.tree.map(lambda x, i=i: x[i], stack) for i in each]


def _values(q: QArray, like: jax.Array) -> jax.Array:
    return dequantize(q).reshape(like.shape)
