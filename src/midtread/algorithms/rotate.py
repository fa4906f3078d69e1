"""Rotate: turns of what weights hand to each other, that the model does not notice.

An outlier among a weight's rows, or among its inputs, costs all codes that share its scale
their resolution. Turned by an orthogonal R, it is spread over all of them (Ashkboos et al.
2024, QuaRot; Liu et al. 2024, SpinQuant). There are three places:

    stream    the residual stream, norms' scales folded into the next weights first, R into
              all weights and tables around it (stream.py)
    heads     where the way from a weight's output to the next weight's input is linear and
              leaves some outputs alone (reach.py), as from an attention's values to the
              weight after it:
                  y = x W1        z = A y        out = z W2
                  y R             z R            (z R) (R^T W2) = out
    online    what lies behind a nonlinearity: inputs are turned when the model runs, and the
              weight's rows once; the QArray keeps the signs as `pre_rotation`

The first two cost nothing at run time. R is Hadamard's with random signs, or begins there and
is learned: Cayley steps down the gradient of

    sum over weights and their tiles of  elements * max|w|^2 / |W|^2

which is what rounding with absmax scales costs, up to a factor: a uniform error has a twelfth
of its step's square. Steps that do not lower it are halved until they do, so that a learned R
is never worse than Hadamard's by this measure, and the same each time.

Widths that are no power of two have Hadamard's matrix of the largest one that divides them, and
a random orthogonal matrix of the rest.
"""

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from midtread.algorithms import bias, reach, stream
from midtread.algorithms.flow import ends
from midtread.algorithms.program import Program, Site
from midtread.algorithms.stream import Stream, change_weight, put, weight_of
from midtread.algorithms.weight import as_weight
from midtread.numerics import hadamard, views
from midtread.numerics.spec import Spec

PLACES = ("stream", "heads", "online")
KINDS = ("hadamard", "learned")


@dataclasses.dataclass(frozen=True)
class RotateOptions:
    """How weights are rotated.

    Args:
        kind: "hadamard", fixed; "learned", from there down the gradient of what rounding costs.
        places: some of "stream", "heads" and "online". The last turns inputs at every call.
            None: the first two, and online the inputs of weights that neither reaches, where
            inputs are quantized too.
        steps: of learning, at most.
        seed: of the random signs.
    """

    kind: str = "hadamard"
    places: tuple[str, ...] | None = None
    steps: int = 24
    seed: int = 0

    def __post_init__(self):
        if self.kind not in KINDS:
            raise ValueError(f"rotate: kind={self.kind!r} should be one of {KINDS}.")
        places = PLACES if self.places is None else self.places
        if not places or isinstance(places, str) or not set(places) <= set(PLACES):
            raise ValueError(
                f"rotate: places={self.places!r} should be some of {PLACES}."
            )
        if self.steps < 1:
            raise ValueError(f"rotate: steps={self.steps} should be at least 1.")


DEFAULT = RotateOptions()


class Pair(NamedTuple):
    """Sites between whose weights a rotation fits."""

    first: int
    seconds: tuple[int, ...]  # all that read what the first one leads to
    width: int  # of the outputs, and of runs of the next inputs, that are turned
    bias: tuple[tuple, tuple] | None  # (path, layer) of the first one's


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is turned in a model."""

    pairs: tuple[Pair, ...] = ()
    streams: tuple[Stream, ...] = ()
    online: Mapping[int, jax.Array] = dataclasses.field(default_factory=dict)  # signs
    says: str = ""  # for the report


def rotation(width: int, key: jax.Array) -> jax.Array:
    """An orthogonal [width, width]: Hadamard's, of random signs, times what is left."""
    block = width & -width  # the largest power of two that divides it
    H = jnp.asarray(hadamard.matrix(block)) / math.sqrt(block)
    signs, rest = jax.random.split(key)
    normal = jax.random.normal(rest, (width // block,) * 2)
    Q, _ = jnp.linalg.qr(normal) if width > block else (jnp.ones((1, 1)), None)
    R = jnp.kron(Q, H)
    return jax.random.rademacher(signs, (width, 1), R.dtype) * R


def plan(
    program: Program,
    chosen: Collection[int],
    specs: Mapping[int, Spec],
    options: RotateOptions,
    with_inputs: Collection[int] = (),
) -> Plan:
    """What can be turned among the chosen sites.

    Args:
        program: the model.
        chosen: numbers of the sites whose weights are quantized.
        specs: number of a chosen site -> how its weight is.
        options: what is asked for.
        with_inputs: those of the chosen sites whose inputs are quantized too.

    Raises:
        ValueError: nothing can, with the reasons.
    """
    places = PLACES if options.places is None else options.places
    found_pairs = tuple(pairs(program, chosen)) if "heads" in places else ()
    streams: list[Stream] = []
    reasons: dict[int, str] = {}
    if "stream" in places:
        streams, reasons = stream.find(program)
        touches = lambda s: {*s.columns, *(n for n, _ in s.rows)} & set(chosen)
        streams = [s for s in streams if touches(s)]
    turned = {n for s in streams for n, _ in s.rows}
    turned |= {n for pair in found_pairs for n in pair.seconds}
    online = {}
    if "online" in places:
        key = jax.random.key(options.seed)
        listed = set(with_inputs if options.places is None else chosen) - turned
        for n in filter(program.sums_alike, listed):
            signs = _signs(program.sites[n], specs[n], jax.random.fold_in(key, n))
            online |= {} if signs is None else {n: signs}
    why = "; ".join(
        f"what {program.sites[n].name} reads cannot be turned: {reason}"
        for n, reason in list(reasons.items())[:1]
        if not streams
    )
    if not (found_pairs or streams or online):
        raise ValueError(
            "rotate: from no quantized weight here is there a linear way to another that a "
            f"rotation could pass{'; ' + why if why else ''}. Leave it out"
            + (
                "."
                if options.places is not None and "online" in options.places
                else ", or turn inputs when the model runs: CalibrationOptions(rotate="
                "RotateOptions(places=('online',)))."
            )
        )
    counts = {
        "pairs of weights": len(found_pairs),
        "streams": len(streams),
        "inputs at run time": len(online),
    }
    says = ", ".join(f"{n} {what}" for what, n in counts.items() if n)
    says = f"{says} rotated" + (f"; {why}" if why else "")
    return Plan(found_pairs, tuple(streams), dict(sorted(online.items())), says)


def _signs(site: Site, spec: Spec, key: jax.Array) -> jax.Array | None:
    """Signs of a rotation of the inputs, as many as the largest power of two that divides
    the last axis that is summed; None where there is none to speak of."""
    if site.c.name == "conv_general_dilated":
        return None
    axis = site.axes.summed[-1]
    padded, _ = spec.layout(site.stored_shape)
    common = math.gcd(site.stored_shape[axis], padded[axis])
    size = common & -common
    if size == 1:
        return None
    shape = [size if a == axis else 1 for a in range(len(site.stored_shape))]
    return jax.random.rademacher(key, shape, jnp.float32)


def pairs(program: Program, chosen: Collection[int]) -> list[Pair]:
    """All pairs of chosen sites; none of their weights is used anywhere else."""
    of = lambda site: (site.path, site.layer)
    uses = [of(site) for site in program.sites]
    inputs = [program.eqns[mark["input"]].invars[0] for mark in program.marks]
    listed = []
    for number in chosen:
        way = reach.way_of(program, number)
        if way is None or way.width % 2:
            continue
        seconds = tuple(n for n, v in enumerate(inputs) if v is way.end)
        both = (number, *seconds)
        if any(n not in chosen or uses.count(uses[n]) > 1 for n in both):
            continue
        kinds = [kind for _, kind in way.after]
        inner = kinds[len(kinds) - kinds.count("free") :]
        if set(inner) != {"free"} or not all(_whole(program.sites[n]) for n in seconds):
            continue
        shifts = sum(eqn.primitive.name in ("add", "sub") for eqn in way.eqns)
        own = bias.find(program, number) if shifts == 1 else None
        if shifts and own is None:
            continue
        listed.append(Pair(number, seconds, way.width, own))
    return listed


def _whole(site: Site) -> bool:
    return ends(site) and not site.axes.batch


def fold(
    program: Program,
    params: dict[tuple, jax.Array],
    turns: Plan | Sequence[Pair],
    options: RotateOptions = DEFAULT,
    specs: Mapping[int, Spec] | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> dict[tuple, jax.Array]:
    """Parameters of a model that computes the same, turned as planned. Inputs that are turned
    online are no part of it.

    Args:
        turns: a plan, or pairs alone.
        options: Hadamard's rotations, or learned ones.
        specs: number of a site -> how its weight will be quantized, for learning.
        say: told how far learning is.
    """
    turns = turns if isinstance(turns, Plan) else Plan(tuple(turns))
    params = dict(params)
    key = jax.random.key(options.seed)
    specs = specs or {}
    for one in turns.streams:
        params = stream.without_scales(program, params, one)
        R = rotation(one.width, jax.random.fold_in(key, one.rows[0][0]))
        if options.kind == "learned":
            turned = {n: (lambda m, R: m @ R) for n in one.columns}
            turned |= {n: (lambda m, R: R.T @ m) for n, _ in one.rows}
            what = f"stream of {one.width}"
            R = learn(
                R, _touched(program, params, turned, specs), options.steps, what, say
            )
        params = stream.turned(program, params, one, R)
    for pair in turns.pairs:
        R = rotation(pair.width, jax.random.fold_in(key, pair.first))
        turned = {pair.first: _columns, **dict.fromkeys(pair.seconds, _rows)}
        if options.kind == "learned":
            what = program.sites[pair.first].name
            R = learn(
                R, _touched(program, params, turned, specs), options.steps, what, say
            )
        for number, turn in turned.items():
            change_weight(program, params, number, lambda m, turn=turn, R=R: turn(m, R))
        if pair.bias is not None:
            path, layer = pair.bias
            value = _columns(params[path][layer].astype(jnp.float32), R)
            params[path] = put(params[path], layer, value)
    return params


def _columns(m: jax.Array, R: jax.Array) -> jax.Array:
    """[..., N] with every head, N / len(R) of them, turned."""
    return (m.reshape(*m.shape[:-1], -1, len(R)) @ R).reshape(m.shape)


def _rows(m: jax.Array, R: jax.Array) -> jax.Array:
    return _columns(m.swapaxes(-1, -2), R).swapaxes(-1, -2)


# --- learned ----------------------------------------------------------------------------------


def _touched(
    program: Program, params, turned: Mapping[int, Callable], specs
) -> Callable:
    """The cost of a rotation: what rounding the weights that it turns would."""
    pieces = [
        (weight_of(program, params, n), turn, specs[n], program.sites[n])
        for n, turn in turned.items()
        if n in specs
    ]

    def cost(R: jax.Array) -> jax.Array:
        total = jnp.float32(0)
        for m, turn, spec, site in pieces:
            w = as_weight(turn(m, R), site.axes, site.stored_shape)
            total += rounding_cost(w, spec)
        return total / max(len(pieces), 1)

    return cost


def rounding_cost(w: jax.Array, spec: Spec) -> jax.Array:
    """What rounding under absmax scales costs, in units of the weight and of codes:
    elements * max|w|^2 over all tiles, by |w|^2."""
    padded, counts = spec.layout(w.shape)
    split, inside = views.split(padded, counts)
    largest = jnp.max(jnp.abs(views.pad_to(w, padded)).reshape(split), axis=inside)
    elements = math.prod(padded) / math.prod(counts)
    return elements * jnp.sum(largest**2) / jnp.sum(w * w)


def learn(
    R: jax.Array,
    cost: Callable[[jax.Array], jax.Array],
    steps: int,
    what: str = "",
    say: Callable[[str], None] = lambda line: None,
) -> jax.Array:
    """A rotation with a lower cost, by steps that stay orthogonal (Cayley's transform).

    With G the gradient, A = G R^T - R G^T is skew, and (1 + tA/2)^-1 (1 - tA/2) R orthogonal
    for every t: a curve that starts at R and goes down.
    """
    slope, value = jax.jit(jax.value_and_grad(cost)), jax.jit(cost)
    eye, length = jnp.eye(len(R)), 0.5
    first = now = float(value(R))
    for _ in range(steps):
        _, G = slope(R)
        A = G @ R.T - R @ G.T
        size = jnp.linalg.norm(A)
        if float(size) == 0:
            break
        A = A / size
        for _ in range(8):
            half = length / 2 * A
            new = jnp.linalg.solve(eye + half, (eye - half) @ R)
            after = float(value(new))
            if after < now:
                break
            length /= 2
        else:
            break
        R, now, length = new, after, length * 1.5
    say(f"rotate: {what}: rounding costs {first:.4g} before, {now:.4g} after")
    Q, triangle = jnp.linalg.qr(R)  # exactly orthogonal again after many steps
    return Q * jnp.sign(jnp.diagonal(triangle))
