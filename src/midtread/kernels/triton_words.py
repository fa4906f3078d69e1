"""Words: codes of 8 or 4 bits that Triton reads 16 bits at a time and decodes to float16.

A tensor core needs neighbours along the sum in one register, and a weight or a cache often has
neighbours along another axis in memory. The GPU's shared memory can transpose blocks of 16-bit
elements, but smaller elements go one by one, and that decides the time. So two codes of 8 bits, or
four of 4, are one word; words are transposed, and each word gives one value to each of several
planes:

    [k, n / 2] words  ->  2 planes [k, n / 2]: the even and the odd columns of [k, n]

float16 holds every code exactly. The rows that are multiplied by it must fit into float16 too, so
`fitted` divides them by a power of two.
"""

import jax
import jax.numpy as jnp
from jax import lax

from midtread.kernels import decoding
from midtread.kernels.pallas_compat import pltriton
from midtread.numerics.formats import Format, dtype_bits

FORMATS = decoding.formats("words")


def num_planes(fmt: Format) -> int:
    """Returns how many codes are in a word."""
    return 16 // dtype_bits(fmt.dtype)


def as_words(codes: jax.Array, fmt: Format) -> jax.Array:
    """Sees the bytes of codes [.., n] as int16 [.., n / planes]."""
    planes = num_planes(fmt)
    split = codes.reshape(*codes.shape[:-1], codes.shape[-1] // planes, planes)
    return lax.bitcast_convert_type(split, jnp.int16)


def fitted(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns (x / s in float16, s), where s is a power of two for each row, so that only what
    lies 2^24 below the row's largest is rounded. Infinities and NaN stay what they are."""
    x = x.astype(jnp.float32)
    largest = jnp.max(jnp.abs(x), axis=-1, keepdims=True)
    _, exponent = jnp.frexp(jnp.where(jnp.isfinite(largest), largest, 1.0))
    exponent = jnp.clip(exponent, -100, 120)
    return jnp.ldexp(x, -exponent).astype(jnp.float16), jnp.ldexp(1.0, exponent)


def assembly(fmt: Format, plane: int) -> str:
    """Returns PTX that turns two words, $1, into the float16 values of one plane, $0."""
    row = decoding.decoder(fmt)
    assert row is not None and row.words is not None, fmt
    return row.words(plane)


def planes(words: jax.Array, fmt: Format, native: bool) -> list[jax.Array]:
    """Decodes a block of words to the float16 values of each plane."""
    count = num_planes(fmt)
    if not native:
        pair = lax.bitcast_convert_type(words, jnp.int8)
        halves = [decoding.planes(pair[..., h], fmt, jnp.float16) for h in (0, 1)]
        return [*halves[0], *halves[1]]
    shape = jax.ShapeDtypeStruct(words.shape, jnp.float16)
    return [
        pltriton.elementwise_inline_asm(
            "{" + assembly(fmt, plane) + "}",
            args=[words],
            constraints="=r,r",
            pack=2,
            result_shape_dtypes=[shape],
        )[0]
        for plane in range(count)
    ]
