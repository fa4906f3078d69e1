"""Laws of quantized arrays: every format x every way to share a scale.

half a step    |x - deq(x)| is at most half the gap between the levels around x
monotone       x <= y in one tile  ->  deq(x) <= deq(y)
zero           0 is exactly 0, where the format has a 0
equivariance   deq(2^k x) = 2^k deq(x)
vmap           maps over arrays as a loop does
jit            gives eager's bits
shards         any mesh gives one device's bits
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from midtread.numerics.formats import FORMATS, Format
from midtread.numerics.qarray import dequantize, quantize_by_spec
from midtread.numerics.spec import Spec
from midtread.numerics.views import expand
from tests.support import f64, levels, mesh, quantize_in_jit

LAYOUTS = {  # t stands for the tile that the format asks for, or 16
    "tensor": lambda t: ((), {}),
    "channel": lambda t: ((0,), {}),
    "tile": lambda t: ((0,), {1: t}),
    "blocks": lambda t: ((), {0: t, 1: t}),
    "ragged": lambda t: ((0,), {1: t}),
}


def case(fmt, layout):
    """(spec, shape) of a pair, or None: mx formats have tiles or nothing."""
    if fmt.tile and layout in ("tensor", "channel"):
        return None
    channels, tiles = LAYOUTS[layout](fmt.tile or 16)
    return Spec(fmt, channels, tiles), (16, 56 if layout == "ragged" else 64)


CASES = {
    f"{fmt.name}-{layout}": case(fmt, layout)
    for fmt in FORMATS.values()
    for layout in LAYOUTS
    if case(fmt, layout)
}


def data(key, shape):
    """Unlike scales in every row and column, and some zeros."""
    key, rows, columns = jax.random.split(key, 3)
    x = jax.random.normal(key, shape)
    x = x * jnp.exp(jax.random.normal(rows, (shape[0], 1)))
    x = x * jnp.exp(jax.random.normal(columns, (1, shape[1])))
    return x.at[:, 5].set(0)


@functools.cache
def program(spec):
    """x -> (QArray, dequantized, the scale of each element), compiled once per shape."""

    def run(x):
        q = quantize_by_spec(x, spec)
        whole = expand(q.scale, q.qvalue.shape)
        return q, dequantize(q), whole[tuple(slice(n) for n in q.shape)]

    return jax.jit(run)


def assert_same_bits(tree, other):
    for one, two in zip(jax.tree.leaves(tree), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(f64(one), f64(two))


# --- laws of the numbers ----------------------------------------------------------------------


class Run(NamedTuple):
    """What a law may look at, in float64."""

    fmt: Format
    x: np.ndarray
    deq: np.ndarray
    scale: np.ndarray
    program: object


def half_a_step(r: Run):
    values, units = levels(r.fmt).values, r.x / r.scale
    kept = np.clip(units, values[0], values[-1])
    above = np.clip(np.searchsorted(values, kept), 1, len(values) - 1)
    half = (values[above] - values[above - 1]) / 2
    assert (np.abs(r.deq / r.scale - kept) <= half + 1e-5 * np.abs(units) + 1e-7).all()
    if values[0] < 0 and r.fmt.statistic == "absmax":  # what saturates lies at the edge
        slack = (
            1 / 16 if r.fmt.scale == "two_level" else 1e-6
        )  # e4m3 rounds scales down
        assert (np.abs(units) <= r.fmt.bound * (1 + slack)).all()


def monotone(r: Run):
    """Sorted by (scale, x), deq never falls where the scale stays."""
    order = np.lexsort((r.x.ravel(), r.scale.ravel()))
    same = np.diff(r.scale.ravel()[order]) == 0
    assert same.any()
    assert (np.diff(r.deq.ravel()[order])[same] >= 0).all()


def zero_is_zero(r: Run):
    if 0 in levels(r.fmt).values:
        assert (r.deq[r.x == 0] == 0).all()


def equivariant(r: Run):
    for power in (2.0**-7, 2.0**9):
        _, deq, _ = r.program(jnp.asarray(r.x * power, jnp.float32))
        np.testing.assert_array_equal(f64(deq), r.deq * power)


@pytest.mark.parametrize("spec, shape", CASES.values(), ids=CASES)
def test_numbers(spec, shape, key):
    x, run = data(key, shape), program(spec)
    _, deq, scale = run(x)
    assert deq.shape == shape
    for law in (half_a_step, monotone, zero_is_zero, equivariant):
        law(Run(spec.format, f64(x), f64(deq), f64(scale), run))


# --- laws of the machinery: one format per way to encode is enough ----------------------------

few_cases = pytest.mark.parametrize(
    "spec, shape",
    [
        pytest.param(*CASES[name], id=name)
        for name in CASES
        if name.split("-")[0]
        in ("int8", "float8_e4m3fn", "float6_e3m2fn", "nf4", "nvfp4")
    ],
)


@few_cases
def test_jit_gives_eager_bits(spec, shape, key):
    x = data(key, shape)
    eager = quantize_by_spec(x, spec)
    q, deq, _ = program(spec)(x)
    assert_same_bits((q, deq), (eager, dequantize(eager)))


@few_cases
def test_vmap_is_a_loop(spec, shape, key):
    x = jnp.stack([data(k, shape) for k in jax.random.split(key, 2)])
    mapped = jax.vmap(program(spec))(x)
    loop = [program(spec)(one) for one in x]
    assert_same_bits(mapped, jax.tree.map(lambda *parts: jnp.stack(parts), *loop))


@few_cases
def test_shards_give_one_devices_bits(spec, shape, key):
    x = data(key, shape)
    split = NamedSharding(mesh(2, 4), PartitionSpec("data", "model"))
    assert_same_bits(program(spec)(jax.device_put(x, split)), program(spec)(x))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("qtype", ["int8", "float8_e5m2", "nf4"])
def test_16_bit_arrays_keep_the_codes_of_their_float32_copy(qtype, dtype, key):
    """Up to the rounding of the scale: at most one level apart."""
    x = data(key, (16, 64)).astype(dtype)
    half = quantize_in_jit(x, qtype, channelwise_axes=[0])
    wide = quantize_in_jit(x.astype(jnp.float32), qtype, channelwise_axes=[0])
    values = levels(FORMATS[qtype]).values
    if qtype != "nf4":
        one, other = (np.searchsorted(values, f64(q.qvalue)) for q in (half, wide))
    else:
        one, other = f64(half.qvalue), f64(wide.qvalue)
    assert np.abs(one - other).max() <= 1
    assert (one != other).mean() < 0.1
