"""Gates in a kernel: the PTX against the formula, and matmuls whose columns gate each other."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import midtread as mt
from midtread.kernels import choose, pending
from midtread.kernels.environment import implementation, pretended
from midtread.kernels.gates import GATES, STRIP, unwoven, woven
from tests.kernels import test_decoding as ptx
from tests.kernels.plans import error, needs_interpreter, random, wide

WITH_CODE = [name for name, gate in GATES.items() if gate.code is not None]


@pytest.mark.parametrize("name", WITH_CODE)
def test_code_is_the_formula(name):
    """Of numbers that a bfloat16 holds; others are rounded to it first."""
    gates = np.concatenate([np.linspace(-30, 30, 61), [-200, 0.01, 100, 1.003]])
    with jax.enable_x64(True):
        for gate in gates.astype(np.float32):
            up = np.float32(1.37 - gate / 7)
            rounded = [np.float64(np.array(v).astype(jnp.bfloat16)) for v in (gate, up)]
            want = float(GATES[name].formula(*map(jnp.asarray, rounded)))
            given = {"$1": float(gate), "$2": float(up)}
            got = ptx.run(GATES[name].code, {}, **given)["$0"]
            np.testing.assert_allclose(got, want, rtol=2e-6, atol=1e-12)


def test_strips_are_woven_and_taken_apart():
    a, b = random(1, 3, 4 * STRIP), random(2, 3, 4 * STRIP)
    both = woven(a, b)
    np.testing.assert_array_equal(wide(both[:, STRIP : 2 * STRIP]), wide(b[:, :STRIP]))
    for part, whole in zip(unwoven(both), (a, b)):
        np.testing.assert_array_equal(wide(part), wide(whole))


def by_gate(name, x, w):
    """(the result of the matmul, what its kernel made of it)."""
    with pending.collect(gate=name) as forms:
        y = mt.dot(x, w)
        return y, forms.of(y).gated, forms.of(y + 1).gated


# number of columns and what of the sum a program has: all, as one of a cluster, a part of it
SIZES = [((256, 28672), True), ((1024, 16384), True), ((1024, 512), False)]


@pytest.mark.parametrize(("shape", "is_gated"), SIZES, ids=str)
@pytest.mark.parametrize("rows", [1, 32])
def test_a_kernel_gates_where_it_has_the_whole_sum(shape, is_gated, rows):
    quantize = functools.partial(mt.quantize, qtype="int8", channelwise_axes=[1])
    w = jax.eval_shape(quantize, jax.ShapeDtypeStruct(shape, jnp.bfloat16))
    x = jax.ShapeDtypeStruct((rows, 1, shape[0]), jnp.bfloat16)
    with pretended("h200"):
        y, gated, other = jax.eval_shape(functools.partial(by_gate, "silu"), x, w)
    assert other is None  # something was done to it
    if is_gated or rows == 1:
        assert gated.shape == (rows, y.shape[-1] // 2)
        assert gated.dtype == y.dtype
    else:
        assert gated is None


@needs_interpreter
@pytest.mark.parametrize("name", WITH_CODE)
@pytest.mark.parametrize(
    ("fmt", "tiles"), [("int8", {}), ("int4", {0: 64}), ("nf4", {0: 64})]
)
def test_interpreted(name, fmt, tiles, monkeypatch):
    kernel = choose.FEW_ROWS[0]._replace(is_interpreted=True)
    monkeypatch.setattr(choose, "WEIGHT", (kernel,))
    a, b = (random(i, 256, 256) for i in (1, 2))
    w = mt.quantize(woven(a, b), fmt, channelwise_axes=[1], tiled_axes=tiles)
    x = random(3, 5, 256)
    with implementation("interpret"):
        y, gated, _ = jax.jit(functools.partial(by_gate, name))(x, w)
    exact = wide(x) @ wide(mt.dequantize(w, jnp.float32))
    want = GATES[name].formula(*unwoven(jnp.asarray(exact)))
    assert error(y, exact) < 4e-3
    assert gated is not None and error(gated, wide(want)) < 8e-3
