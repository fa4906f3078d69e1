"""Training: the only custom_vjp of a matmul, for every op and every recipe.

    train(c, recipe, lhs, rhs)
    serve(c, fwd, lhs, rhs)

Forward, both operands are quantized and contracted. Backward, dlhs and drhs are
contractions again: of g with what was kept of the other operand. `Recipe` says in which
formats, and what is kept. Where nobody takes a gradient, `contract` is all that runs, of
operands that were quantized first: so a model is served, whose gradients, if they are taken,
go straight through what was quantized.

For remat policies (jax.checkpoint_policies) four things have names. OUT is the result, which
policies for dots would miss where a kernel computes it, and keep in float32 where XLA does.
KEPT is what the backward keeps of the left operand (as a rule an activation) if that is
codes: they take a byte an element, and need not be quantized again. WEIGHT is the same of
the right operand. SEEN is what delayed scaling notes of an operand (providers/delayed.py), a
few kilobytes that take a read of the whole operand to find again.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from midtread.kernels import choose, pending
from midtread.kernels.environment import Env, here
from midtread.numerics import calibration, hadamard, views
from midtread.numerics.calibration import Range
from midtread.numerics.dtypes import is_wide
from midtread.numerics.platforms import explicit_sharding
from midtread.numerics.qarray import QArray, calibrate, is_float
from midtread.numerics.spec import Spec
from midtread.ops import witness
from midtread.ops.context import untouched
from midtread.ops.contraction import Contraction
from midtread.ops.engine import (
    Operand,
    codes_of,
    contract,
    is_code,
    turned_inputs,
    varies_only_where_kept,
)
from midtread.ops.recipe import REUSE, Dlhs, Drhs, Fwd, Recipe

OUT, KEPT, WEIGHT = "quantized_out", "quantized_lhs", "quantized_rhs"
SEEN = "amax_seen"
NO_FORWARD_MODE = (
    "a quantized matmul has a gradient and no forward-mode derivative (jax.jvp, "
    "jax.jacfwd): write jax.vjp, jax.grad or jax.jacrev, or take the float model."
)


class Ranges(NamedTuple):
    """Static or delayed ranges of the three operands.

    Args:
        lhs, rhs, g: {"absmax": array} or {"min": array, "max": array}, shaped as the scale;
            None to measure the data at hand.
    """

    lhs: Range | None = None
    rhs: Range | None = None
    g: Range | None = None


def train(
    c: Contraction,
    recipe: Recipe,
    lhs: Operand,
    rhs: Operand,
    ranges: Ranges | None = None,
    key: jax.Array | None = None,
    site: str = "",
) -> jax.Array:
    """Quantizes both operands and contracts them, with the recipe's gradients.

    Operands that are QArrays already, or not float, are used as they are and get no
    gradient. The cotangent of `ranges.g`, where it is given, is max |g| of this step.
    """
    return _train_by(_train_once, c, recipe, lhs, rhs, ranges, key, site)


def train_inline(
    c: Contraction,
    recipe: Recipe,
    lhs: Operand,
    rhs: Operand,
    ranges: Ranges | None = None,
    key: jax.Array | None = None,
) -> jax.Array:
    """Trains as `train` does. In a jaxpr its matmuls stand by themselves, where `train` has
    a jit with them inside, which layers that look alike share."""
    return _train_by(_train_inline, c, recipe, lhs, rhs, ranges, key, "")


def _train_by(once, c, recipe, lhs, rhs, ranges, key, site) -> jax.Array:
    if 0 in (*lhs.shape, *rhs.shape):  # There is no value to quantize: no range either.
        recipe, ranges = Recipe(Fwd(accumulate=recipe.fwd.accumulate)), None
    if recipe.sparsity is not None and not isinstance(rhs, QArray):
        rhs = recipe.sparsity.apply(rhs)
    # Layers that look alike share one trace, gradient included. Only where there is noise
    # does the site matter.
    static = _Static(recipe, site if recipe.is_random else "", here())

    def run() -> jax.Array:
        # Inputs are turned and scaled as a stored weight asks before they are quantized.
        operands = turned_inputs(c, lhs, rhs)
        arguments = (static, c, *operands, ranges or Ranges(), key)
        if pending.is_wanted():  # a decoding step has no gradient
            return _train(*arguments)
        try:
            return once(*arguments)
        except TypeError as error:
            if "forward-mode" not in str(error):
                raise
            raise TypeError(NO_FORWARD_MODE) from None

    return witness.contraction(c, recipe, lhs, rhs, run)


def serve(
    c: Contraction, fwd: Fwd, lhs: Operand, rhs: Operand, ranges: Ranges | None = None
) -> jax.Array:
    """Quantizes the operands that are still float and for which `fwd` has a Spec, and
    contracts them. Gradients go straight through, also where a value was clipped."""
    return train(c, _serving(fwd), lhs, rhs, ranges)


@functools.cache
def _serving(fwd: Fwd) -> Recipe:
    return Recipe(fwd, mask_clipped=False)


class _Static(NamedTuple):
    """What a trace depends on besides its arguments."""

    recipe: Recipe
    site: str
    env: Env


@untouched
def _train(static, c, lhs, rhs, ranges, key):
    """Computes the product where nobody takes a gradient: nothing is kept."""
    operands = []
    for side, x, spec, range_ in _sides(static.recipe, c, lhs, rhs, ranges):
        if spec is not None and is_float(x):
            x, _ = choose.quantize(
                x, spec, range_, key, (static.site, side),
                summed=c.summed_axes(side), env=static.env,
            )  # fmt: skip
        operands.append(x)
    return _contract(static, c, (lhs, rhs), operands)


def _sides(recipe: Recipe, c: Contraction, lhs, rhs, ranges: Ranges):
    """Returns (side, operand, its Spec with numbered axes or None, its range) of both."""
    number = lambda side, x: c.number_axes(getattr(recipe.fwd, side), side, x.shape)
    return (
        ("lhs", lhs, number("lhs", lhs), ranges.lhs),
        ("rhs", rhs, number("rhs", rhs), ranges.rhs),
    )


def _contract(static, c: Contraction, given, operands) -> jax.Array:
    """Contracts operands, of which those that were `given` as codes are stored weights."""
    stored = [s for s, x in zip(("lhs", "rhs"), given) if isinstance(x, QArray)]
    of = dataclasses.replace(c, stored=tuple(stored))
    lhs, rhs = operands
    return contract(of, lhs, rhs, static.recipe.fwd.accumulate, static.env)


class _Residual(NamedTuple):
    """What the backward keeps of one operand."""

    value: Operand  # codes, or the float operand
    mask: jax.Array | None  # packed bits, set inside the calibrated window
    like: jax.Array  # has no elements, and a float dtype if a gradient is wanted


@untouched
def _forward(static, c, lhs, rhs, ranges, key):
    recipe = static.recipe
    slots = recipe.drhs.lhs, recipe.dlhs.rhs
    operands, kept = [], []
    sides = _sides(recipe, c, lhs, rhs, ranges)
    for (name, x, spec, range_), slot in zip(sides, slots):
        x = _first_order_only(x)
        used = again = x
        mask = None
        if spec is not None and is_float(x):
            if spec.calibration.clips and recipe.mask_clipped:
                range_ = calibrate(x, spec) if range_ is None else range_
                mask = jnp.packbits(is_inside(x, range_), axis=-1)
            twice = None
            if range_ is None and isinstance(slot, Spec):
                twice = _also_for_backward(c, static, name, x, spec)
            used, again = twice or choose.quantize(
                x, spec, range_, key, (static.site, name),
                summed=c.summed_axes(name), both=slot is REUSE, env=static.env,
            )  # fmt: skip
            again = again if twice or slot is REUSE else x
            if isinstance(again, QArray):
                label = KEPT if name == "lhs" else WEIGHT
                again = again.map(lambda part, to=label: checkpoint_name(part, to))
        operands.append(used)
        dtype = x.dtype if is_float(x) else jnp.int8
        kept.append(_Residual(again, mask, jnp.zeros((0,), dtype)))
    out = checkpoint_name(_contract(static, c, (lhs, rhs), operands), OUT)
    return out, (c, *kept, ranges.g, key)


def _also_for_backward(c, static: _Static, side: str, x: jax.Array, spec: Spec):
    """Returns the codes of x for the forward and those for the backward, or None if no kernel
    makes both from one read. Codes for the backward take half the bytes of x."""
    recipe = static.recipe
    back, slot = (
        (c.drhs, recipe.drhs.lhs) if side == "lhs" else (c.dlhs, recipe.dlhs.rhs)
    )
    again = back.number_axes(slot, side, x.shape)
    if again == spec or (side == "lhs" and recipe.drhs.hadamard):
        return None
    summed = c.summed_axes(side), back.summed_axes(side)
    pair = choose.quantize_twice(x, (spec, again), summed, env=static.env)
    return None if pair is None else pair[:2]


@untouched
def _backward(static, residuals, g):
    c, lhs, rhs, g_range, key = residuals
    recipe, g = static.recipe, _first_order_only(g)
    noise = key, static.site
    of = {"lhs": (recipe.dlhs, lhs, rhs), "rhs": (recipe.drhs, rhs, lhs)}
    ways = {
        side: _way(c, side, gemm, mine, theirs, g, noise)
        for side, (gemm, mine, theirs) in of.items()
        if is_wide(mine.like.dtype)
    }
    codes, size = _codes_of_g(ways, g_range, noise, static.env)
    grads = {
        side: _gradient(way, codes[side], noise, static.env)
        for side, way in ways.items()
    }
    seen = None
    if g_range is not None:
        specs = [s for s in (recipe.dlhs.g, recipe.drhs.g) if s is not None]
        spec = next((s for s in specs if s.method != "fixed"), None)
        size = largest(g, spec) if size is None else size
        seen = {k: jnp.full_like(v, size.reshape(())) for k, v in g_range.items()}
    return None, grads.get("lhs"), grads.get("rhs"), Ranges(None, None, seen), None


def largest(x: jax.Array, spec: Spec | None) -> jax.Array:
    """Returns max |x| over all of x, or what the spec's calibration has instead of it."""
    if spec is None or spec.method in ("delayed", "fixed"):
        return calibration.largest(jnp.abs(x))
    return calibrate(x, spec)["absmax"]


class _Way(NamedTuple):
    """How the gradient of one operand is computed: from g and what was kept of the other.

    dlhs = back(g, rhs) and drhs = back(lhs, g), so g is on the side of the operand.
    """

    side: str
    back: Contraction
    gemm: Dlhs | Drhs
    mine: _Residual
    g: jax.Array
    spec: Spec | None  # how g is quantized
    factor: jax.Array | None  # what g is multiplied by first
    y: Operand  # what was kept of the other operand

    @property
    def summed(self) -> tuple[int, ...]:
        """The axes of g that are summed."""
        return self.back.summed_axes(self.side)


def _way(c, side, gemm, mine, theirs, g, noise) -> _Way:
    back = dataclasses.replace(
        c.dlhs if side == "lhs" else c.drhs,
        out_sharding=explicit_sharding(codes_of(mine.value)),
        stored=(),
    )
    y, factor, spec = theirs.value, None, back.number_axes(gemm.g, side, g.shape)
    if side == "rhs" and gemm.hadamard and not isinstance(y, QArray):
        g, y = _rotate(back, gemm.hadamard, g, y, *noise)
    if spec is not None:
        factor, y = _fold(c, "rhs" if side == "lhs" else "lhs", g, y)
    return _Way(side, back, gemm, mine, g, spec, factor, y)


def _codes_of_g(ways: dict[str, _Way], g_range, noise, env: Env):
    """Returns g as each of its matmuls wants it, and max |g| where a kernel saw all of g."""
    key, site = noise
    # A fixed range is a constant, which the ranges of earlier steps do not change.
    known = lambda way: None if way.spec.method == "fixed" else g_range
    if len(ways) == 2:
        one, two = ways.values()
        alike = one.g is two.g and one.factor is None and two.factor is None
        if alike and one.spec is not None and two.spec is not None:
            pair = choose.quantize_twice(
                one.g, (one.spec, two.spec), (one.summed, two.summed), known(one),
                largest=one.spec.method == "delayed", env=env,
            )  # fmt: skip
            if pair is not None:
                return dict(zip(ways, pair)), pair[2]
    codes = {}
    for side, way in ways.items():
        codes[side] = way.g
        if way.spec is not None:
            codes[side], _ = choose.quantize(
                way.g, way.spec, known(way), key, (site, "g", side),
                summed=way.summed, factor=way.factor, env=env,
            )  # fmt: skip
    return codes, None


def _gradient(way: _Way, g: Operand, noise, env: Env) -> jax.Array:
    key, site = noise
    other = "rhs" if way.side == "lhs" else "lhs"
    slot, y = getattr(way.gemm, other), way.y
    if isinstance(slot, Spec) and is_float(y):
        spec = way.back.number_axes(slot, other, y.shape)
        summed = way.back.summed_axes(other)
        y, _ = choose.quantize(
            y, spec, None, key, (site, other, way.side), summed=summed, env=env
        )
    pair = (g, y) if way.side == "lhs" else (y, g)
    return _finish(contract(way.back, *pair, way.gemm.accumulate, env), way.mine)


def _fold(c: Contraction, side: str, g: jax.Array, y: Operand):
    """Moves a scale s that the backward sums over from the codes to g, because
    (g . s) @ codes == g @ (s . codes). Returns what g is to be multiplied by, or None, and
    the codes. Scales of 2-D blocks cannot be moved. One scale for all elements need not be,
    and stays, so that a range given for g is one of g itself."""
    if not isinstance(y, QArray) or y.scale.size == 1:
        return None, y
    movable = varies_only_where_kept(c, y, side) and not views.tiled_axes(y)
    if not movable or not is_code(y) or y.logical is not None:
        return None, y
    ones = jnp.ones((1,) * y.ndim, y.scale.dtype)
    return c.align(y.scale, side).astype(g.dtype), y.replace(scale=ones)


def _rotate(back: Contraction, size: int, g, y, key, site):
    """Rotates both operands along the sum by the same random rotation, which leaves the sum
    as it was."""
    if key is None:
        raise ValueError(
            "a random Hadamard rotation needs a key: pass key=jax.random.key(seed)."
        )
    rotate = functools.partial(
        hadamard.rotate, size=size, key=key, site=(site, "rotate")
    )
    label = back.tiled[0]
    return rotate(g, axis=back.rhs.index(label)), rotate(y, axis=back.lhs.index(label))


def _over_devices(grad: jax.Array, like: jax.Array) -> jax.Array:
    """Sums, inside shard_map, the gradients of an operand that all devices share."""
    seen, own = (
        jax.typeof(x).mat.varying for x in (grad, like)
    )  # over which mesh axes
    names = tuple(seen - own)
    return jax.lax.psum(grad, names) if names else grad


def _finish(grad: jax.Array, x: _Residual) -> jax.Array:
    grad = _over_devices(grad.astype(x.like.dtype), codes_of(x.value))
    if x.mask is None:
        return grad
    inside = jnp.unpackbits(x.mask, axis=-1, count=grad.shape[-1]).astype(bool)
    return jnp.where(inside, grad, jnp.zeros_like(grad))


def is_inside(x: jax.Array, range_: Range) -> jax.Array:
    """Marks the elements of `x` that lie in the range of their tile."""
    low, high = range_.get("min"), range_.get("max")
    if "absmax" in range_:
        low, high = -range_["absmax"], range_["absmax"]
    above = _compare(jnp.greater_equal, x, low)
    return above & _compare(jnp.less_equal, x, high)


def _compare(op, x, bound):
    if any(n % m for n, m in zip(x.shape, bound.shape)):  # the last tile is not whole
        tiles = [-(-n // m) for n, m in zip(x.shape, bound.shape)]
        bound = views.expand(bound, [m * t for m, t in zip(bound.shape, tiles)])
        return op(x, views.crop_to(bound, x.shape))
    return views.broadcast_with(op, x, bound.astype(x.dtype))


@jax.custom_jvp
def _first_order_only(g):
    return g


@_first_order_only.defjvp
def _no_second_order(primals, tangents):
    raise NotImplementedError(
        "the gradient of a quantized matmul is itself quantized and has no derivative: "
        "second-order methods need the float model, or jax.lax.stop_gradient around this one."
    )


_learned = jax.custom_vjp(_train, nondiff_argnums=(0,))
_learned.defvjp(_forward, _backward)
_train_once = jax.jit(_learned, static_argnums=0)
_train_inline = jax.jit(_learned, static_argnums=0, inline=True)
