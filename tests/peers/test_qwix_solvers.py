"""Qwix's contrib for one weight, beside what takes its place here."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

pytest.importorskip("qwix", reason="the peer of this folder")

import qwix
from qwix._src.core import qarray as theirs
from qwix.contrib import awq_core, calibration, gptq_core, qep_core, smooth_quant

import midtread as mt
from midtread.interop.qwix import arrays, contrib, solvers
from midtread.numerics.qarray import dequantize


@pytest.fixture(scope="module")
def layer():
    """A weight [6, 16] whose rows' largest is positive, and inputs [16, 200]."""
    rng = np.random.default_rng(0)
    x = (rng.normal(size=(200, 16)) @ (np.tri(16) * 0.2 + np.eye(16))).T
    w = rng.normal(size=(6, 16))
    w[:, 0] = np.abs(w).max(1) + 0.1
    return jnp.asarray(w, jnp.float32), jnp.asarray(x, jnp.float32)


def how(module, **fields):
    given = {"qtype": jnp.int4, "channelwise_axes": [0], **fields}
    return module.HowToQuantize(**given, calibration_method="absmax")


def test_gptq_core(layer):
    w, x = layer
    H = solvers.compute_hessian(x)
    np.testing.assert_allclose(H, gptq_core.compute_hessian(x), rtol=1e-5)
    ours, our_losses = solvers.gptq_quantize_weight(w, H, how(arrays), blocksize=8)
    q, losses = gptq_core.quantize_weight(w, H, how(theirs), blocksize=8)
    same = np.asarray(ours.qvalue) == np.asarray(q.qvalue)
    assert same.mean() > 0.97  # a tie that breaks the other way changes all after it
    rows = same.all(1)
    np.testing.assert_allclose(our_losses[rows], losses[rows], rtol=2e-2, atol=1e-4)
    L = jnp.linalg.cholesky(H + jnp.eye(16))
    np.testing.assert_allclose(
        solvers.cholesky_inverse(L), gptq_core.cholesky_inverse(L), rtol=1e-4, atol=1e-6
    )
    scale, zero = solvers.find_params(w, how(arrays))
    their_scale, their_zero = gptq_core.find_params(w, how(theirs))
    np.testing.assert_array_equal(scale, their_scale)
    assert zero is None and their_zero is None
    column = w[:, 3:4]
    for a, b in zip(
        solvers.quantize_column(column, jnp.int4, scale, None),
        gptq_core.quantize(column, jnp.int4, scale, None),
    ):
        np.testing.assert_allclose(a.astype(jnp.float32), b.astype(jnp.float32), rtol=1e-6)  # fmt: skip


@pytest.mark.parametrize("block", [8, 16, 64])
@pytest.mark.parametrize("tile", [None, 8, 32])
def test_gptq_core_by_groups(block, tile):
    """Scales are of a group as it stands when its block begins; inputs that are always 0 have
    codes of 0."""
    rng = np.random.default_rng(1)
    x = (rng.normal(size=(300, 64)) @ (np.tri(64) * 0.1 + np.eye(64))).T
    x[[5, 40]] = 0
    w, x = (jnp.asarray(a, jnp.float32) for a in (rng.normal(size=(6, 64)), x))
    tiles = {"tiled_axes": {} if tile is None else {1: tile}}
    H = solvers.compute_hessian(x)
    ours, our_losses = solvers.gptq_quantize_weight(w, H, how(arrays, **tiles), block)
    q, losses = gptq_core.quantize_weight(w, H, how(theirs, **tiles), block)
    np.testing.assert_array_equal(ours.qvalue, q.qvalue)
    np.testing.assert_allclose(ours.scale, q.scale, rtol=1e-5)
    np.testing.assert_allclose(our_losses, losses, rtol=1e-2, atol=1e-4)


def test_awq_and_smooth_core(layer):
    w, x = layer
    size = solvers.compute_act_scale(x, axis=1)
    np.testing.assert_array_equal(size, awq_core.compute_act_scale(x, axis=1))
    ours, scales = solvers.awq_quantize_weight(w, size, how(arrays))
    q, theirs_ = awq_core.quantize_weight(w, size, how(theirs))
    np.testing.assert_allclose(scales, theirs_, rtol=1e-5)
    np.testing.assert_allclose(dequantize(ours), theirs.dequantize(q), rtol=1e-5)
    act, weight = jnp.max(jnp.abs(x), axis=1), jnp.max(jnp.abs(w), axis=0)
    np.testing.assert_array_equal(
        solvers.compute_scales_ratio(act, weight, 0.6),
        smooth_quant.compute_scales_ratio(act, weight, 0.6),
    )


@pytest.mark.filterwarnings("ignore:'VariableState'")  # Qwix's own
@pytest.mark.parametrize("alpha", [0.5, 0.8])
@pytest.mark.parametrize("act", ["int8", "int4"])
def test_statistics_of_smooth_quant(layer, alpha, act, key):
    x = layer[1].T
    params = nn.Dense(8).init(key, x)
    formats = {"weight_qtype": "int4", "act_qtype": act, "alpha": alpha}

    def statistics(library, module):
        provider = module.SqCalibrationProvider([module.SqRule(**formats)])
        seen = library.quantize_model(nn.Dense(8), provider)
        held = seen.apply(params, x, mutable=["quant_stats"])[1]
        return held["quant_stats"]["kernel_sq"]

    theirs, ours = statistics(qwix, smooth_quant), statistics(mt, contrib)
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        np.testing.assert_allclose(ours[name], value, rtol=1e-5)


def test_qep_core(layer):
    w, x = layer
    floats = x + 0.1 * jax.random.normal(jax.random.key(0), x.shape)
    ours, q = solvers.compute_qep_stats(x, floats), qep_core.compute_qep_stats(x, floats)  # fmt: skip
    assert ours.keys() == q.keys()
    for name in q:
        np.testing.assert_allclose(ours[name], q[name], rtol=1e-5, atol=1e-4)
    named = {"correction_factor": 0.7, "damping_factor": 0.02}
    np.testing.assert_allclose(
        solvers.weight_correct(w, ours["hessian"], ours["hessian_delta"], **named),
        qep_core.weight_correct(w, q["hessian"], q["hessian_delta"], **named),
        rtol=1e-4, atol=1e-5,
    )  # fmt: skip


def test_weights_are_laid_out_as_theirs():
    w = jnp.arange(24.0).reshape(2, 3, 4)
    for axis in range(3):
        ours, back = solvers.normalize_weight(w, axis)
        q, _ = calibration.normalize_weight(w, axis)
        np.testing.assert_array_equal(ours, q)
        np.testing.assert_array_equal(back(ours), w)
    from qwix.contrib import padded_ptq

    for tiles in ({0: 4}, {1: 0.5, 0: 2}):
        shape = (7, 10)
        assert solvers.get_padded_shape(shape, tiles) == padded_ptq.get_padded_shape(shape, tiles)  # fmt: skip
    with pytest.raises(ValueError, match="QARRAY_KEEP_PADDED_SHAPE=False"):
        solvers.replace_keep_padded(False)


def test_parameters_from_statistics_that_are_given(key):
    """qep.quantize_params: GPTQ of the corrected weight, where there are statistics."""
    from flax import linen as nn

    import midtread as mt
    from midtread.numerics.calibration import Average

    model, x = nn.Dense(6, use_bias=False), jax.random.normal(key, (50, 16))
    params = model.init(key, x)["params"]
    rule = mt.QuantizationRule(weight_qtype="int4")
    served = mt.quantize_model(model, mt.PtqProvider([rule]))
    shapes = jax.eval_shape(served.init, key, x)["params"]
    found = solvers.compute_qep_stats(x.T, 1.01 * x.T)
    stats = {"kernel_qep": Average().update(Average().init(found), found)}
    made = solvers.qep_quantize_params(params, shapes, stats)
    corrected = solvers.weight_correct(params["kernel"].T, *found.values())
    q, _ = solvers.gptq_quantize_weight(corrected, found["hessian"], how(arrays))
    np.testing.assert_array_equal(made["kernel"].array.qvalue, q.qvalue.T)
    plain = solvers.qep_quantize_params(params, shapes, {})
    np.testing.assert_array_equal(
        plain["kernel"].array.qvalue, mt.quantize_params(params, shapes)["kernel"].array.qvalue
    )  # fmt: skip
