"""Rounding: from a real number to the code nearest to it, or to one of its two neighbours by chance.

    nearest          ties to even; every format
    stochastic       up with probability (x - below) / (above - below), so the mean is x; every format
    uniform          round(x + n), n ~ U(-1/2, 1/2): Qwix's noise, one value per `noise_axes` row
    low_bit_uniform  the same from 8 random bits

Chance comes from a counter: a hash of (key, site, position), where position is the element's index along each axis of
the whole array. Nothing depends on how the array is laid out over devices, on jit, or on remat: the same key gives the
same codes on any mesh. Inside shard_map only the caller knows where its block starts: pass that as `origin`.
"""

import zlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from midtread.numerics.formats import Format, dtype_bits
from midtread.numerics.platforms import is_explicit, platform

FEW = 2**20  # values whose codes a kernel may as well compute again where it reads them
ROUNDINGS = ("nearest", "stochastic", "uniform", "low_bit_uniform")

# A function from the shape of x to the noise to round x with, which broadcasts to that shape.
Noise = Callable[[tuple[int, ...]], jax.Array]


def encode(
    x: jax.Array, fmt: Format, rounding: str = "nearest", noise: Noise | None = None
) -> jax.Array:
    """Returns the codes of `x`, which is in units of the scale. It saturates; NaN becomes code 0, or NaN if there is one."""
    x = x.astype(jnp.float32)
    if fmt.grid is not None:
        return _encode_float(x, fmt, rounding, noise)
    if fmt.table is not None:
        return _encode_table(x, fmt, rounding, noise)
    assert fmt.codes is not None
    low, high = fmt.codes
    if rounding == "stochastic":
        # This changes no code. Without it a GPU compiler fuses the product by 1 / scale with
        # the subtraction of its floor, unrounded, and a few codes differ from other backends'.
        x = jnp.clip(x, low - 1, high + 1)
    return jnp.clip(_round(x, rounding, noise), low, high).astype(fmt.dtype)


def decode(codes: jax.Array, fmt: Format) -> jax.Array:
    """Returns the exact value of each code: the code itself where it is the value, else float32."""
    codes = unpacked(codes)
    if fmt.table is None:
        return codes
    return jnp.asarray(fmt.table, jnp.float32)[codes.astype(jnp.int32)]


def nearest_value(x: jax.Array, fmt: Format) -> jax.Array:
    """Returns decode(encode(x)) in float32, without a code in between where there need be none.

    >>> from midtread.numerics.formats import as_format
    >>> nearest_value(jnp.array([2.6, 7.2, -0.2]), as_format("e2m1")).tolist()
    [3.0, 6.0, -0.0]
    """
    if fmt.grid is None and fmt.codes is not None:
        low, high = fmt.codes
        x = jnp.clip(jnp.round(x), low, high)
        return jnp.where(jnp.isnan(x), 0.0, x)
    if fmt.grid is None:
        return decode(encode(x, fmt), fmt).astype(jnp.float32)
    return _nearest_float(_within(x, fmt), fmt)


def unpacked(codes: jax.Array) -> jax.Array:
    """Returns codes of 2 bits, and of 4 where rows are no whole words, as bytes where a GPU is to
    read them; others as they are.

    XLA reads such rows wrongly in a matmul (NVIDIA H200, jax 0.11.2: int2 [256, 130] by one row,
    int4 [256, 130] by three and more). So it is given the bytes that they lie in, and shifts.
    """
    size, bits = codes.size, dtype_bits(codes.dtype)
    if (
        platform() != "gpu"
        or not jnp.issubdtype(codes.dtype, jnp.integer)
        or not codes.ndim
    ):
        return codes
    if not isinstance(size, int) or not size or is_explicit(codes):  # or symbolic
        return codes
    if bits != 2 and (bits != 4 or codes.shape[-1] % 8 == 0):
        return codes
    is_signed = jnp.issubdtype(codes.dtype, jnp.signedinteger)
    shape, kind = codes.shape, jnp.int8 if is_signed else jnp.uint8
    lead, count = shape[:-1], 8 // bits  # codes of a byte
    if shape[-1] % count:  # rows end within a byte: they are read as one
        codes, lead = jnp.pad(codes.reshape(-1), (0, -size % count)), ()
    packed = jax.lax.bitcast_convert_type(codes.reshape(*lead, -1, count), kind)
    shift = jnp.arange(8 - bits, -1, -bits).astype(kind)  # to the top of a byte
    top = jnp.left_shift(packed[..., None], shift)
    wide = jnp.right_shift(top, jnp.asarray(8 - bits, kind)).reshape(*lead, -1)
    return wide.reshape(shape) if lead else wide[:size].reshape(shape)


def _round(x: jax.Array, rounding: str, noise: Noise | None) -> jax.Array:
    """Rounds to an integer, which stays in float32."""
    if rounding == "nearest":
        return jnp.round(x)
    assert noise is not None, rounding
    if rounding == "stochastic":
        below = jnp.floor(x)
        up = noise(x.shape) < x - below  # exact, where floor(x + u) would round the sum
        return below + up.astype(x.dtype)
    return jnp.round(x + noise(x.shape))


def _within(x: jax.Array, fmt: Format) -> jax.Array:
    """Saturates; NaN stays where the format has one, and becomes 0 elsewhere, since backends differ
    in what they would cast to."""
    x = x if fmt.has_nan else jnp.where(jnp.isnan(x), 0.0, x)
    return jnp.clip(x, -fmt.grid.largest, fmt.grid.largest)


def _nearest_float(x: jax.Array, fmt: Format) -> jax.Array:
    """Rounds to the nearest float of a format, which stays in float32."""
    grid = fmt.grid
    lowest = 2.0**grid.min_exponent  # below there are subnormals, in equal steps
    step = lowest * 2.0**-grid.mantissa
    normal = jax.lax.reduce_precision(x, 8, grid.mantissa)
    x = jnp.where(jnp.abs(x) < lowest, jnp.round(x / step) * step, normal)
    return jnp.clip(x, -grid.largest, grid.largest)


def _encode_float(x, fmt, rounding, noise):
    grid, x = fmt.grid, _within(x, fmt)
    if rounding == "nearest" and fmt.is_linear:
        # The backend's own cast rounds to nearest even, but XLA undoes it where a cast back follows
        # (excess precision; seen on an H200). A GPU is given few values that are rounded before,
        # so that it may; elsewhere a barrier keeps it from that.
        if platform() == "gpu" and isinstance(x.size, int) and x.size <= FEW:
            return _nearest_float(x, fmt).astype(fmt.dtype)
        return jax.lax.optimization_barrier(x.astype(fmt.dtype))
    step = grid.step(x)
    x = jnp.clip(_round(x / step, rounding, noise) * step, -grid.largest, grid.largest)
    if fmt.is_linear:
        return x.astype(fmt.dtype)  # exact by now
    # There is no dtype to cast to, so this computes exponent and mantissa. The implicit bit carries into the exponent, so
    # that code = (binades above the lowest) * 2^mantissa + (|x| in steps) holds for subnormals and normals alike.
    binade = grid.exponent(x) - grid.min_exponent
    steps = (jnp.abs(x) / grid.step(x)).astype(jnp.int32)
    code = binade * 2**grid.mantissa + steps
    sign = jnp.signbit(x).astype(jnp.int32) << (fmt.bits - 1)
    return (code + sign).astype(fmt.dtype)


def _encode_table(x, fmt, rounding, noise):
    table = jnp.asarray(fmt.table, jnp.float32)
    x = jnp.clip(x, table[0], table[-1])
    if rounding == "nearest":
        # The code is the number of midpoints below x. A tie goes to the lower code, as argmin would have it.
        return _count(x, (x > edge for edge in _edges(fmt.table))).astype(fmt.dtype)
    below = _count(x, (x >= level for level in fmt.table[1:-1]))
    low, high = table[below], table[below + 1]
    code = below + _round((x - low) / (high - low), rounding, noise).astype(jnp.int32)
    return jnp.clip(code, 0, len(fmt.table) - 1).astype(fmt.dtype)


def _edges(table):
    """Returns midpoints rounded down to float32. A float32 lies above one if and only if it lies above the exact one."""
    middles = (np.array(table[1:]) + np.array(table[:-1])) / 2
    edges = middles.astype(np.float32)
    return np.where(edges > middles, np.nextafter(edges, np.float32(-np.inf)), edges)


def _count(x, claims):
    """Counts how many of the claims hold for each element of `x`."""
    return sum(
        (claim.astype(jnp.int32) for claim in claims), jnp.zeros(x.shape, jnp.int32)
    )


# --- by chance, from bits that the caller has ---------------------------------------------------


def by_chance(x: jax.Array, fmt: Format, chance: jax.Array) -> jax.Array:
    """Returns codes of `x`, which is in units of the scale: the one above with probability (x - below) / step.

    This is `encode` with rounding="stochastic" in fewer operations, for formats whose codes are their values, but
    subnormals of a float format go to the nearest.

    Args:
        chance: numbers in (0, 1), of x's shape.
    """
    if fmt.codes is not None:
        low, high = fmt.codes
        return jnp.clip(jnp.floor(x + chance), low, high).astype(fmt.dtype)
    assert fmt.grid is not None and fmt.is_linear, fmt
    kept = _cut_mantissa(x, fmt.grid.mantissa, (chance * 2.0**23).astype(jnp.uint32))
    return jnp.clip(kept, -fmt.grid.largest, fmt.grid.largest).astype(fmt.dtype)


def narrowed(x: jax.Array, dtype: Any, bits: jax.Array) -> jax.Array:
    """Rounds `x` (float32) to bfloat16 or float16, up or down by chance, so that its mean is x.

    >>> third = narrowed(jnp.full(4096, 1 / 3), jnp.bfloat16, jax.random.bits(jax.random.key(0), (4096,), jnp.uint32))
    >>> bool(abs(third.astype(jnp.float32).mean() - 1 / 3) < 1e-4)
    True

    Args:
        bits: random uint32 of x's shape.
    """
    return _cut_mantissa(x, jnp.finfo(dtype).nmant, bits >> 9).astype(dtype)


def _cut_mantissa(x: jax.Array, mantissa: int, noise: jax.Array) -> jax.Array:
    """Cuts `x` (float32) to that many bits of mantissa. What is cut off may carry, by chance.

    Args:
        noise: 23 random bits, uint32.
    """
    cut = 23 - mantissa
    word = jax.lax.bitcast_convert_type(x, jnp.uint32) + (noise >> mantissa)
    word &= jnp.uint32(0xFFFFFFFF << cut & 0xFFFFFFFF)
    return jnp.where(
        jnp.isfinite(x), jax.lax.bitcast_convert_type(word, jnp.float32), x
    )


# --- noise ------------------------------------------------------------------------------------


def make_noise(
    rounding: str, key: Any, site: Sequence[Any] = (), origin=None, noise_axes=(0,)
) -> Noise | None:
    """Returns the noise function of a rounding method, None for nearest."""
    if rounding not in ROUNDINGS:
        raise ValueError(
            f"unknown rounding {rounding!r}. There are: {', '.join(ROUNDINGS)}."
        )
    if rounding == "nearest":
        return None
    if key is None:
        raise ValueError(
            f"rounding={rounding!r} needs a random key: pass key=jax.random.key(seed), folded with the step."
        )
    if rounding == "stochastic":
        return lambda shape: uniform(key, shape, site, origin)

    def per_row(shape):
        own = [axis % len(shape) for axis in noise_axes]
        rows = tuple(n if axis in own else 1 for axis, n in enumerate(shape))
        if rounding == "uniform":
            return jax.random.uniform(key, rows, jnp.float32, -0.5, 0.5)
        bits = jax.random.bits(key, rows, jnp.uint8).astype(jnp.float32)
        return (bits + 0.5) / 256 - 0.5

    return per_row


def uniform(
    key: Any,
    shape: tuple[int, ...],
    site: Sequence[Any] = (),
    origin: Sequence[Any] | None = None,
):
    """Returns numbers in [0, 1) with 24 random bits, each a function of (key, site, global index) alone.

    >>> key = jax.random.key(0)
    >>> whole = uniform(key, (4, 6))
    >>> bool((uniform(key, (2, 6), origin=(2, 0)) == whole[2:]).all())
    True
    """
    state = hashed(seed(key, site), shape, origin)
    return as_uniform(jnp.broadcast_to(state, shape))


def seed(key: Any, site: Sequence[Any] = ()) -> jax.Array:
    """Hashes a key and a site. `hashed` goes on from there with positions."""
    state = jnp.uint32(0)
    for word in (
        *jax.random.key_data(key).ravel().astype(jnp.uint32),
        *map(_word, site),
    ):
        state = mix(state ^ word)
    return state


def hashed(state: jax.Array, shape: Sequence[int], origin=None) -> jax.Array:
    """Mixes `state` with the index along each axis, one axis after another."""
    for axis, size in enumerate(shape):
        index = jax.lax.broadcasted_iota(
            jnp.uint32, (1,) * axis + (size,) + (1,) * (len(shape) - axis - 1), axis
        )
        start = _word(origin[axis]) if origin is not None else jnp.uint32(0)
        state = mix(
            jnp.broadcast_to(state, jnp.broadcast_shapes(state.shape, index.shape))
            ^ mix(index + start)
        )
    return state


def as_uniform(state: jax.Array) -> jax.Array:
    """Turns the upper 24 bits of a hash into a number in [0, 1)."""
    upper = (state >> 8).astype(
        jnp.int32
    )  # from int32 a GPU converts exactly, and fast
    return upper.astype(jnp.float32) * jnp.float32(2.0**-24)


def _word(part: Any) -> jax.Array:
    if isinstance(part, str):
        return jnp.uint32(zlib.crc32(part.encode()))
    return jnp.asarray(part).astype(jnp.uint32)


def mix(h: jax.Array) -> jax.Array:
    """Permutes 32-bit numbers with low bias, in two multiply-xorshift rounds (constants by C. Wellons, 2018)."""
    h = h + jnp.uint32(0x9E3779B9)
    h = (h ^ (h >> 16)) * jnp.uint32(0x21F0AAAD)
    h = (h ^ (h >> 15)) * jnp.uint32(0xD35A2D97)
    return h ^ (h >> 15)
