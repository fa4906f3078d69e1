"""The PTX that decodes weights, run word by word: a machine of a dozen instructions."""

import functools
import itertools
import re

import jax.numpy as jnp
import numpy as np
import pytest

from midtread.kernels.hopper import decoding
from midtread.numerics.formats import as_format, dtype_bits

MASK = (1 << 32) - 1


def number(text):
    return int(re.sub("^0f", "0x", text), 0) & MASK


def of_floats(fn):
    """An instruction on float32, whose registers hold floats, or words where they were moved."""
    wide = lambda v: v if isinstance(v, float) else float(np.uint32(v).view(np.float32))

    @np.errstate(over="ignore")  # a GPU overflows to infinity as well
    def instruction(*values):
        return float(np.float32(fn(*map(wide, values))))

    return instruction


def halves(word, dtype):
    return np.array([word], np.uint32).view(dtype).astype(np.float32)


def packed(values, dtype):
    return int(np.array(values, np.float32).astype(dtype).view(np.uint32)[0])


def prmt(a, b, select):
    data = (b << 32 | a).to_bytes(8, "little")
    picks = [select >> 4 * i & 15 for i in range(4)]
    signs = [255 * (data[p & 7] >> 7) if p & 8 else data[p & 7] for p in picks]
    return int.from_bytes(bytes(signs), "little")


def lop3(a, b, c, table):
    out = 0
    for bit in range(32):
        index = (a >> bit & 1) << 2 | (b >> bit & 1) << 1 | c >> bit & 1
        out |= (table >> index & 1) << bit
    return out


def e4m3(pair):
    values = np.array([pair], np.uint16).view(jnp.float8_e4m3fn).astype(np.float32)
    return packed(values, np.float16)


def cvt16(word):
    return float(np.array([word], np.uint16).view(np.float16)[0])


def fma(a, b, c, dtype):
    a, b, c = (halves(word, dtype) for word in (a, b, c))
    return packed(a * b + c, dtype)


INSTRUCTIONS = {
    "mov.b32": lambda a: a,
    "and.b32": lambda a, b: a & b,
    "shr.u32": lambda a, b: a >> b,
    "shl.b32": lambda a, b: a << b & MASK,
    "mul.lo.u32": lambda a, b: a * b & MASK,
    "mad.lo.u32": lambda a, b, c: a * b + c & MASK,
    "prmt.b32": prmt,
    "lop3.b32": lop3,
    "or.b32": lambda a, b: a | b,
    "fma.rn.bf16x2": functools.partial(fma, dtype=jnp.bfloat16),
    "fma.rn.f16x2": functools.partial(fma, dtype=np.float16),
    "cvt.f32.f16": cvt16,
    "cvt.rn.f16x2.e4m3x2": e4m3,
    "cvt.rn.bf16x2.f32": lambda high, low: packed([low, high], jnp.bfloat16),
    "mul.f32": of_floats(lambda a, b: a * b),
    "add.f32": of_floats(lambda a, b: a + b),
    "fma.rn.f32": of_floats(lambda a, b, c: a * b + c),
    "ex2.approx.f32": of_floats(np.exp2),
    "rcp.approx.f32": of_floats(lambda a: 1 / a),
}


def run(code, memory, **inputs):
    """Registers after the instructions of `code`."""
    registers = dict(inputs)
    for line in code.strip("{}\n ").split(";"):
        name, _, rest = line.strip().partition(" ")
        if not name or name == ".reg":
            continue
        unpacked = re.match(r"{(\w), (\w)}, (\w)", rest)
        if unpacked:
            low, high, word = unpacked.groups()
            registers[low], registers[high] = (
                registers[word] & 0xFFFF,
                registers[word] >> 16,
            )
            continue
        target, *sources = [part.strip() for part in rest.split(",")]
        if name == "ld.shared.b32":
            registers[target] = memory[registers[sources[0].strip("[]")]]
            continue
        values = [registers[s] if s in registers else number(s) for s in sources]
        registers[target] = INSTRUCTIONS[name](*values)
    return registers


def terms(code, scales):
    """Slopes and starts as the threads make them, in bfloat16."""
    values = [np.float32(v) * s for line, s in zip(code.lines, scales) for v in line]
    return [packed([v, v], jnp.bfloat16) for v in values]


ENDS = 1.05e12, 4.2e-25  # of the scales that slopes have room for
FORMATS = ("int4", "int8", "e4m3", "e5m2", "nf4", "int3", "int6", "uint4", "uint8", "int2", "uint2", "mxfp4")  # fmt: skip
CASES = [
    *itertools.product(FORMATS, [None]),
    *itertools.product(("int4", "int8", "mxfp4", "int2"), [(0.0107, 3.3), ENDS]),
]


def by_codes(row, fmt):
    """What the codes of a row of bytes stand for, in order of memory."""
    bits = dtype_bits(fmt.dtype)
    if fmt.table is not None:
        return np.asarray(fmt.table, np.float32)[np.stack([row & 15, row >> 4], 1)].ravel()  # fmt: skip
    if bits == 8:
        return row.view(fmt.dtype).astype(np.float32)
    parts = np.stack([row >> at & (1 << bits) - 1 for at in range(0, 8, bits)], 1)
    narrow = parts.astype(np.uint8).view(np.int8).ravel()
    return narrow.astype(fmt.dtype).astype(np.float32) if np.issubdtype(fmt.dtype, np.integer) else narrow.view(fmt.dtype).astype(np.float32)  # fmt: skip


@pytest.mark.parametrize(("name", "scales"), CASES)
def test_every_byte(name, scales):
    """All bytes of a row, beside others of the next, as every warpgroup takes them."""
    fmt = as_format(name)
    code = decoding.code(fmt, scales is not None)
    factors = np.array(scales or (1, 1), np.float32).astype(jnp.bfloat16)
    factors = factors.astype(np.float32)
    unit = np.float32(2.0 ** decoding.power(fmt, scales is not None))
    memory = {}
    if fmt.table is not None:
        memory = {i * 128: int(w) & MASK for i, w in enumerate(decoding.pairs(fmt.table)[:, 0])}  # fmt: skip
    rows = np.arange(256, dtype=np.uint8), np.arange(256, dtype=np.uint8)[::-1].copy()
    values = [by_codes(r, fmt).reshape(64, -1, 2) for r in rows]  # pairs of a word
    words = [r.view(np.uint32) for r in rows]
    for at, j in itertools.product(range(64), range(values[0].shape[1])):
        two = [int(w[at]) for w in words]
        given = [*two, 0x4440 + j, 0]
        if fmt.table is None:  # 16 bits of both rows in one word
            low, high = (w >> 2 * code.bits * j & 0xFFFF for w in two)
            given = [low | high << 16, *terms(code, factors)]
        out = run(code.text, memory, **{f"${2 + i}": w for i, w in enumerate(given)})
        for h in (0, 1):
            got = halves(out[f"${h}"], jnp.bfloat16) * unit
            want = [v[at, j, h] * factors[h] for v in values]
            want = np.asarray(want, np.float32).astype(jnp.bfloat16)
            np.testing.assert_array_equal(got, want.astype(np.float32))


@pytest.mark.parametrize("name", ["int4", "uint4", "uint8", "int2"])
def test_starts_of_zero_points(name):
    """A start is -(offset + zero point) of the values' own unit, exactly."""
    fmt = as_format(name)
    code, bits = decoding.code(fmt), dtype_bits(fmt.dtype)
    for word in range(1 << bits):
        zero = by_codes(np.array([word], np.uint8), fmt)[0]
        given = (word ^ code.offset) * 0x10001
        start = fma(given, packed([-code.unit] * 2, jnp.bfloat16), 0x80008000, jnp.bfloat16)  # fmt: skip
        want = -(code.offset + zero) * 2.0 ** -decoding.power(fmt, False)
        np.testing.assert_array_equal(halves(start, jnp.bfloat16), [want, want])
