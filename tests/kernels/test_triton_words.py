"""The assembly that decodes words of codes, run by a small interpreter of PTX on a CPU."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from midtread.kernels import triton_words
from midtread.numerics.formats import as_format

LOP3 = {0x6A: lambda a, b, c: (a & b) ^ c, 0xEA: lambda a, b, c: (a & b) | c}
FLOAT8 = {"e4m3x2": jnp.float8_e4m3fn, "e5m2x2": jnp.float8_e5m2}


def halves(x):
    return np.ascontiguousarray(x).view(np.float16).reshape(-1, 2)


def whole(x):
    return np.ascontiguousarray(x.astype(np.float16)).view(np.uint32).reshape(-1)


def pick(a, b, selector):
    pool = np.concatenate([x.view(np.uint8).reshape(-1, 4) for x in (a, b)], axis=1)
    chosen = [(int(selector[0]) >> 4 * i) & 7 for i in range(4)]
    return np.ascontiguousarray(pool[:, chosen]).view(np.uint32).reshape(-1)


def convert(x, kind):
    codes = np.ascontiguousarray((x & 0xFFFF).astype(np.uint16)).view(np.uint8)
    values = np.asarray(codes.view(jnp.dtype(FLOAT8[kind])).astype(np.float16))
    return whole(values.reshape(-1, 2))


OPS = {
    "mov.b32": lambda a: a,
    "xor.b32": lambda a, b: a ^ b,
    "and.b32": lambda a, b: a & b,
    "shr.u32": lambda a, b: a >> b,
    "shl.b32": lambda a, b: a << b,
    "prmt.b32": pick,
    "lop3.b32": lambda a, b, c, table: LOP3[int(table[0])](a, b, c),
    "sub.f16x2": lambda a, b: whole(halves(a) - halves(b)),
    "fma.rn.f16x2": lambda a, b, c: whole(
        halves(a).astype(np.float64) * halves(b) + halves(c)
    ),
}


def run(text: str, words: np.ndarray) -> np.ndarray:
    """The value of $0, for two words in every element of $1."""
    values = {"$1": words}
    for line in filter(None, (part.strip() for part in text.split(";"))):
        if line.startswith(".reg"):
            continue
        op, target, *args = re.split(r",?\s+", line.replace("{", "").replace("}", ""))
        if op == "mov.b32" and len(args) == 2:  # two halves of a register
            values[target], values[args[0]] = values[args[1]], values[args[1]] >> 16
            continue
        given = [
            values[a] if a in values else np.full_like(words, int(a, 0)) for a in args
        ]
        if op.startswith("cvt"):
            values[target] = convert(given[0], op.split(".")[-1])
        else:
            values[target] = OPS[op](*given)
    return values["$0"]


@pytest.mark.parametrize("name", triton_words.FORMATS)
def test_the_assembly_decodes_every_word(name):
    fmt = as_format(name)
    words = np.arange(2**16, dtype=np.uint16)
    pairs = np.stack([words, words[::-1]], axis=1).reshape(-1)
    with jax.numpy_dtype_promotion("standard"):
        want = triton_words.planes(jnp.asarray(pairs.view(np.int16)), fmt, native=False)
    for plane, values in enumerate(want):
        got = run(triton_words.assembly(fmt, plane), pairs.view(np.uint32))
        got = halves(got).reshape(-1)
        np.testing.assert_array_equal(got, np.asarray(values))
