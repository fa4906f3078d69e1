"""Rotations between weights: the float model stays what it is, and rounding gains."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import midtread as mt
from midtread.algorithms import program, rotate
from midtread.algorithms.calibrate import calibrate
from tests.algorithms.test_calibrate import FLAT
from tests.algorithms.test_reach import Attention, D, Gated, T, W


@pytest.mark.parametrize("width", [2, 6, 8])
def test_a_rotation_is_orthogonal_and_spreads(width, key):
    R = np.asarray(rotate.rotation(width, key))
    np.testing.assert_allclose(R @ R.T, np.eye(width), atol=1e-6)
    block = width & -width
    assert np.abs(R).max() <= 1 / np.sqrt(block) + 1e-6


@pytest.mark.parametrize("style", ["repeated", "grouped"])
def test_a_rotated_float_model_is_the_float_model(style, key):
    model, x = Attention(style), jax.random.normal(key, (3, T, D))
    traced, floats = program.trace(model, x)
    names = [site.name for site in traced.sites]
    (pair,) = rotate.pairs(traced, range(len(names)))
    assert names[pair.first] == "v/kernel" and pair.width == W
    assert [names[n] for n in pair.seconds] == ["out/kernel"]
    turned = rotate.fold(traced, floats, [pair])
    for path in (("v", "kernel"), ("v", "bias"), ("out", "kernel")):
        assert float(jnp.abs(turned[path] - floats[path]).max()) > 0.01
    arrays = traced.arrays(x)
    np.testing.assert_allclose(
        program.outputs(traced, turned, arrays)[0],
        program.outputs(traced, floats, arrays)[0],
        rtol=1e-5, atol=1e-5,
    )  # fmt: skip


class Layers(nnx.Module):
    """Attention in a scan: pairs are those of every layer."""

    def __init__(self):
        self.layers = nnx.vmap(lambda _: Attention("grouped"))(jnp.arange(2))

    def __call__(self, x):
        scan = nnx.scan(
            lambda x, layer: x + layer(x),
            in_axes=(nnx.Carry, 0),
            out_axes=nnx.Carry,
        )
        return scan(x, self.layers)


@pytest.mark.parametrize("kind", [lambda: Attention("repeated"), Layers])
def test_outliers_of_rows_cost_less(kind, key):
    model, x = kind(), jax.random.normal(key, (8, T, D))
    inner = model if kind is not Layers else model.layers
    # One row of every head is much larger than the others, and meets small values.
    small = jnp.where(jnp.arange(inner.v.kernel.shape[-1]) % W == 0, 1 / 12, 1.0)
    inner.v.kernel[...] = inner.v.kernel[...] * small
    inner.v.bias[...] = jnp.zeros_like(inner.v.bias[...])
    rows = jnp.where(jnp.arange(inner.out.kernel.shape[-2]) % W == 0, 12.0, 1.0)
    inner.out.kernel[...] = inner.out.kernel[...] * rows[:, None]
    rule = mt.QuantizationRule(weight_qtype="int8", module_path=".*(v|out)")
    provider = lambda: mt.PtqProvider([rule])
    far = {}
    for names in (["round"], ["rotate", "round"]):
        made = calibrate(model, provider(), [x], algorithms=names, options=FLAT)
        far[len(names)] = float(jnp.mean(jnp.square(made.model(x) - model(x))))
    assert far[2] < far[1]
    assert f"{2 if kind is Layers else 1} pairs of weights rotated" in str(made.report)


def test_rotate_composes_and_is_refused_where_it_has_no_meaning(key):
    model, x = Attention("repeated"), jax.random.normal(key, (8, T, D))
    provider = lambda: mt.PtqProvider([mt.QuantizationRule(weight_qtype="int4")])
    made = calibrate(model, provider(), [x], algorithms=["rotate", "awq", "gptq"])
    plain = mt.quantize_model(model, provider(), x)
    far = lambda net: float(jnp.mean(jnp.square(net(x) - model(x))))
    assert far(made.model) < far(plain)
    with pytest.raises(ValueError, match=r"write \['rotate', 'gptq'\]"):
        calibrate(model, provider(), [x], algorithms=["gptq", "rotate"])
    with pytest.raises(ValueError, match="from no quantized weight here"):
        calibrate(Gated(), provider(), [x[0]], algorithms=["rotate", "gptq"])
