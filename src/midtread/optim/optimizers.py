"""Optimizers: AdamW, Lion and Adafactor with moments in few bits.

    adamw      m = b1 m + (1 - b1) g,  v = b2 v + (1 - b2) g^2
               p -= lr (m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps) + decay p)
    lion       p -= lr (sign(b1 m + (1 - b1) g) + decay p),  m = b2 m + (1 - b2) g
    adafactor  g over the root of an outer product of row and column means of g^2 (optax's),
               then a first moment of that

Each is optax's formula in float32; only what is remembered between steps is rounded
(`optim/moments.py`). With states="float32" adamw and lion are optax's, bit for bit.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from midtread.numerics import dtypes, rounding
from midtread.numerics.qarray import QArray
from midtread.optim import moments
from midtread.optim.slices import origin_of, without_slices

is_kept = lambda x: isinstance(x, QArray)


class Moments(NamedTuple):
    """What is remembered: the number of steps, and one tree for each moment."""

    count: jax.Array
    first: Any
    second: Any = None


def _name(path: tuple) -> str:
    path = without_slices(path)
    return jax.tree_util.keystr(path, simple=True, separator="/")


def _random(seed: int, count: jax.Array, path: tuple, shape: tuple) -> jax.Array:
    """Returns 32 random bits for every element of a parameter, in this step."""
    key = jax.random.fold_in(jax.random.key(seed), count)
    state = rounding.seed(key, (_name(path),))
    origin = origin_of(path, len(shape)) or (0,) * len(shape)
    if not shape:
        return rounding.hashed(state, shape)
    # The bits of rounding.hashed. The barrier has XLA mix rows and columns once for each,
    # not once for every element.
    rows = rounding.hashed(state, shape[:-1], origin[:-1])[..., None]
    columns = jax.lax.iota(jnp.uint32, shape[-1]) + jnp.uint32(origin[-1])
    rows, columns = jax.lax.optimization_barrier((rows, rounding.mix(columns)))
    return rounding.mix(rows ^ columns)


def _init(params: Any, moment: moments.Moment | None, is_wide: Callable) -> Any:
    def make(path: tuple, p: Any) -> Any:
        if not dtypes.is_wide(p.dtype):
            raise ValueError(_why_not_moved(_name(path), p.dtype))
        return moments.zeros(moment, _name(path), p, is_wide or moments.is_embedding)

    return jax.tree_util.tree_map_with_path(make, params)


def _why_not_moved(name: str, dtype: Any) -> str:
    """Says what to do with a parameter whose dtype is no float of 16 bits or more."""
    if dtype.itemsize > 1 or dtype == bool:
        return (
            f"{name} is {dtype.name}, which no optimizer here can move: keep it out of "
            "what is optimized (optax.masked, or optax.multi_transform)."
        )
    return (
        f"{name} holds codes ({dtype.name}), which no optimizer can move: train the float "
        "model under mt.QtProvider, or adapters over the codes (mt.apply_lora_to_model, and "
        "the optimizer over these alone)."
    )


def _each(fn: Callable, grads: Any, *trees: Any) -> list[Any]:
    """Calls `fn(path, g, ...)` for every parameter, which returns what is to replace its
    gradient, its moment ..., and returns a tree of each result."""
    flat, structure = jax.tree_util.tree_flatten_with_path(grads)
    others = [map(moments.whole, structure.flatten_up_to(tree)) for tree in trees]
    results = [fn(path, g, *parts) for (path, g), *parts in zip(flat, *others)]
    columns = list(zip(*results)) or [()] * (1 + len(trees))
    return [jax.tree.unflatten(structure, column) for column in columns]


def scale_by_adam(
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    states: str = "int8",
    is_wide: Callable[[str], bool] | None = None,
    seed: int = 0,
) -> Any:
    """optax.scale_by_adam with moments in few bits.

    Args:
        states: one of STATES.
        is_wide: whether the parameter of that path keeps float32 moments; None: where the
            path has "embed" in it.
        seed: of the rounding.
    """
    import optax

    kinds = moments.states_of(states)

    def init(params):
        both = (_init(params, kind, is_wide) for kind in kinds)
        return Moments(jnp.zeros((), jnp.int32), *both)

    def update(grads, state, params=None):
        del params
        count = optax.safe_int32_increment(state.count)
        t = count.astype(jnp.float32)
        grow = 1 / (1 - b1**t), 1 / (1 - b2**t)

        def one(path, g, m, v):
            g = g.astype(jnp.float32)
            new_m = b1 * moments.read(m, kinds.first) + (1 - b1) * g
            new_v = b2 * moments.read(v, kinds.second) + (1 - b2) * g**2
            u = grow[0] * new_m / (jnp.sqrt(grow[1] * new_v) + eps)
            if not is_kept(m) and not is_kept(v):
                return u, new_m, new_v
            bits = _random(seed, count, path, g.shape)
            m = moments.write(new_m, m, kinds.first, bits & 255)
            v = moments.write(new_v, v, kinds.second, bits >> 8 & 255)
            return u, m, v

        updates, first, second = _each(one, grads, state.first, state.second)
        return updates, Moments(count, first, second)

    return optax.GradientTransformation(init, update)


def scale_by_lion(
    b1: float = 0.9,
    b2: float = 0.99,
    states: str = "int8",
    is_wide: Callable[[str], bool] | None = None,
    seed: int = 0,
) -> Any:
    """optax.scale_by_lion with its moment in few bits; arguments as of scale_by_adam."""
    direction = lambda m, g: jnp.sign(b1 * m + (1 - b1) * g)
    return _by_first_moment(direction, b2, states, is_wide, seed)


def momentum(
    decay: float = 0.9,
    states: str = "int8",
    is_wide: Callable[[str], bool] | None = None,
    seed: int = 0,
) -> Any:
    """The mean of updates, m = decay m + (1 - decay) u, in few bits.

    A transformation to chain with others; arguments as of scale_by_adam.

    >>> import optax
    >>> tx = optax.chain(optax.scale_by_rms(), momentum(0.9), optax.scale(-1e-3))
    """
    mean = lambda m, g: decay * m + (1 - decay) * g
    return _by_first_moment(mean, decay, states, is_wide, seed)


def _by_first_moment(direction, decay, states, is_wide, seed) -> Any:
    """Steps along `direction(m, g)`, where m = decay m + (1 - decay) g."""
    import optax

    kind = moments.states_of(states).first

    def init(params):
        return Moments(jnp.zeros((), jnp.int32), _init(params, kind, is_wide))

    def update(grads, state, params=None):
        del params
        count = optax.safe_int32_increment(state.count)

        def one(path, g, m):
            g, old = g.astype(jnp.float32), moments.read(m, kind)
            new = decay * old + (1 - decay) * g
            if is_kept(m):
                bits = _random(seed, count, path, g.shape)
                new = moments.write(new, m, kind, bits & 255)
            return direction(old, g), new

        updates, first = _each(one, grads, state.first)
        return updates, Moments(count, first)

    return optax.GradientTransformation(init, update)


def adamw(
    learning_rate: Any,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 1e-4,
    mask: Any = None,
    *,
    states: str = "int8",
    is_wide: Callable[[str], bool] | None = None,
    seed: int = 0,
) -> Any:
    """optax.adamw with moments in few bits.

    Args:
        mask: which parameters decay, as optax has it.
        states: "int8", "fp8", "int4" (first moments; second ones 8 bits), or "float32".
        is_wide: whether the parameter of that path keeps float32 moments; None: where the
            path has "embed" in it.
        seed: of the rounding.

    Returns:
        An optax.GradientTransformation.

    Raises:
        ValueError: there are no such states.
    """
    import optax

    if states == "float32":
        return optax.adamw(learning_rate, b1, b2, eps, weight_decay=weight_decay, mask=mask)  # fmt: skip
    return optax.chain(
        scale_by_adam(b1, b2, eps, states, is_wide, seed),
        optax.add_decayed_weights(weight_decay, mask),
        optax.scale_by_learning_rate(learning_rate),
    )


def lion(
    learning_rate: Any,
    b1: float = 0.9,
    b2: float = 0.99,
    weight_decay: float = 1e-3,
    mask: Any = None,
    *,
    states: str = "int8",
    is_wide: Callable[[str], bool] | None = None,
    seed: int = 0,
) -> Any:
    """optax.lion with its moment in few bits; arguments as of `adamw`."""
    import optax

    if states == "float32":
        return optax.lion(learning_rate, b1, b2, weight_decay=weight_decay, mask=mask)
    return optax.chain(
        scale_by_lion(b1, b2, states, is_wide, seed),
        optax.add_decayed_weights(weight_decay, mask),
        optax.scale_by_learning_rate(learning_rate),
    )


def adafactor(
    learning_rate: Any,
    b1: float = 0.9,
    decay_rate: float = 0.8,
    weight_decay: float = 0.0,
    mask: Any = None,
    *,
    states: str = "int8",
    is_wide: Callable[[str], bool] | None = None,
    seed: int = 0,
) -> Any:
    """Adafactor (arXiv 1804.04235) with a first moment in few bits.

    Second moments are optax's, row and column means of squares: a few bytes a row. The
    learning rate is an absolute one, as AdamW's; updates are clipped to a root mean square
    of 1. The arguments are those of `adamw`; with b1 = 0 there is no first moment.
    """
    import optax

    moments.states_of(states)
    parts = [
        optax.scale_by_factored_rms(decay_rate=decay_rate),
        optax.clip_by_block_rms(1.0),
    ]
    if isinstance(b1, jax.Array) or b1:  # optax.inject_hyperparams makes it an array
        parts.append(momentum(b1, states, is_wide, seed))
    return optax.chain(
        *parts,
        optax.add_decayed_weights(weight_decay, mask),
        optax.scale_by_learning_rate(learning_rate),
    )


def stochastic_rounding(seed: int = 0) -> Any:
    """The last of a chain: parameters in bfloat16 or float16 move by chance, so that their
    mean moves as float32 ones would.

    A step of less than half of a parameter's last bit is lost when p + u is rounded to the
    nearest: in bfloat16 every step below 0.2% of p. Here p + u goes to one of its two
    neighbours, the nearer the likelier, and no float32 copy of p is needed
    (arXiv 2010.06192). Float32 parameters are left alone.

    Returns:
        A transformation whose float32 updates make `optax.apply_updates` arrive there.
    """
    import optax

    def init(params):
        del params
        return Moments(jnp.zeros((), jnp.int32), ())

    def update(updates, state, params=None):
        if params is None:
            raise ValueError("stochastic_rounding needs params: tx.update(g, state, params).")  # fmt: skip
        count = optax.safe_int32_increment(state.count)

        def one(path, u, p):
            if p.dtype not in (jnp.bfloat16, jnp.float16):
                return u, p
            wide = p.astype(jnp.float32)
            bits = _random(seed, count, path, p.shape)
            # The upper bits decide here; the lower ones have rounded the moments.
            target = rounding.narrowed(wide + u.astype(jnp.float32), p.dtype, bits)
            return target.astype(jnp.float32) - wide, p

        return _each(one, updates, params)[0], Moments(count, ())

    return optax.GradientTransformation(init, update)
