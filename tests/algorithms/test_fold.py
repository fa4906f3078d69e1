"""Factors of inputs, given to whatever comes before: found from the program, and exact."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import midtread as mt
from midtread.algorithms import fold, program, served, smooth, stages
from midtread.algorithms.calibrate import CalibrationOptions, calibrate
from midtread.algorithms.weight import MATRIX
from midtread.model import flaxlib
from midtread.numerics.qarray import dequantize, quantize_by_spec
from midtread.numerics.spec import Spec
from tests.algorithms.test_reach import KV, Attention, D, T, W

F = 24


class Block(nnx.Module):
    """A norm, attention, another norm and a gated MLP; what is gated has a bias."""

    def __init__(self, norm=nnx.RMSNorm):
        rngs = nnx.Rngs(7)
        self.one, self.two = norm(D, rngs=rngs), norm(D, rngs=rngs)
        self.attention = Attention("grouped")
        linear = lambda n, m: nnx.Linear(n, m, rngs=rngs)
        self.gate, self.up, self.down = linear(D, F), linear(D, F), linear(F, D)
        self.up.bias[...] = jnp.linspace(-1, 1, F)
        for each in (self.one, self.two):
            each.scale[...] = jnp.linspace(0.5, 2, D)
            if getattr(each, "bias", None) is not None:
                each.bias[...] = jnp.linspace(-1, 1, D)

    def __call__(self, x):
        x = x + self.attention(self.one(x))
        y = self.two(x)
        return x + self.down(jax.nn.silu(self.gate(y)) * self.up(y))


class Layers(nnx.Module):
    """Two blocks in a scan."""

    def __init__(self):
        self.layers = nnx.vmap(lambda _: Block())(jnp.arange(2))

    def __call__(self, x):
        scan = nnx.scan(
            lambda x, layer: layer(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry
        )
        return scan(x, self.layers)


def provider(**fields):
    rule = {"weight_qtype": "int4", "tile_size": 8, **fields}
    return mt.PtqProvider([mt.QuantizationRule(**rule)])


def planned(model, x, rules=None):
    """(the program, its parameters, chosen sites, specs, folds)."""
    traced, floats = program.trace(model, x)
    _, boxes = served.quantize(model, rules or provider(), x, None, "__call__")
    chosen = served.chosen_sites(traced, boxes, "round", ())
    specs = {n: boxes[site.path].how for n, site in chosen.items()}
    return traced, floats, chosen, specs, fold.find(traced, chosen, specs)


def test_places_are_read_off_the_program(key):
    x = jax.random.normal(key, (2, T, D))
    for norm in (nnx.RMSNorm, nnx.LayerNorm):
        traced, _, _, _, folds = planned(Block(norm), x)
        names = [site.name.removesuffix("/kernel") for site in traced.sites]
        found = {tuple(names[n] for n in f.sites): f for f in folds}
        assert {sites: f.name(traced) for sites, f in found.items()} == {
            ("attention/k", "attention/v", "attention/q"): "one/scale",
            ("attention/out",): "attention/v/kernel",
            ("gate", "up"): "two/scale",
            ("down",): "up/kernel",
        }
        shift = found["gate", "up"].shift
        assert (shift is not None) == (norm is nnx.LayerNorm)
        # Two query heads share the values of one: their inputs come from the same outputs.
        columns = np.asarray(found["attention/out",].columns).reshape(KV, -1, W)
        assert (columns == np.arange(KV * W).reshape(KV, 1, W)).all()
        assert found["down",].bias == (("up", "bias"), ())


class Elsewhere(nnx.Module):
    """What the norm gives is used by something else too, or comes from a nonlinearity."""

    def __init__(self):
        self.norm = nnx.RMSNorm(D, rngs=nnx.Rngs(0))
        self.a, self.b = (nnx.Linear(D, D, rngs=nnx.Rngs(n)) for n in (1, 2))

    def __call__(self, x):
        y = self.norm(x)
        return self.b(jnp.tanh(self.a(y))) + y


def test_what_is_used_elsewhere_is_left_alone(key):
    x = jax.random.normal(key, (64, D))
    assert planned(Elsewhere(), x)[-1] == []
    made = calibrate(Elsewhere(), provider(), [x], algorithms=["awq", "round"])
    assert flaxlib.unbox(made.model.a.kernel).array.pre_scale.shape == (D, 1)
    assert "factors of 0 weights folded, of 2 kept as pre_scale" in str(made.report)
    # Scales of blocks that are numbers of a format take no factor.
    folds = planned(Block(), jnp.ones((2, T, D)), provider(weight_qtype="mxfp4", tile_size=32))  # fmt: skip
    assert len(folds[-1]) == 2


@pytest.mark.parametrize("kind", [Block, lambda: Block(nnx.LayerNorm), Layers])
def test_folding_changes_nothing(kind, key):
    model, x = kind(), jax.random.normal(key, (2, T, D))
    traced, floats, chosen, specs, folds = planned(model, x)
    assert len(folds) == (8 if kind is Layers else 4)
    draw = np.random.default_rng(0)
    solved = {}
    for n, site in chosen.items():
        w = floats[site.path][site.layer].reshape(site.stored_shape)
        solved[n] = quantize_by_spec(w, specs[n])
    for one in folds:
        width = solved[one.sites[0]].shape[0]
        p = draw.uniform(0.3, 3, width).astype(np.float32)
        if one.columns is not None:
            p = p[np.asarray(one.columns)]
        for n in one.sites:
            w = dequantize(solved[n])
            wide = Spec("int16", specs[n].channelwise_axes)
            solved[n] = quantize_by_spec(w / p[:, None], wide).replace(
                pre_scale=jnp.asarray(p)[:, None]
            )
    moved, changed = fold.move(traced, folds, solved, floats)
    assert all(moved[n].pre_scale is None for one in folds for n in one.sites)

    def run(codes, params):
        given = {}
        for n, q in codes.items():
            v = traced.eqns[traced.marks[n]["weight"]].outvars[0]
            given[v] = traced.sites[n].as_operand(dequantize(q))
        return stages.outputs(traced, params, traced.arrays(x), given)[0]

    before, after = run(solved, floats), run(moved, {**floats, **changed})
    np.testing.assert_allclose(after, before, rtol=1e-5, atol=1e-5)


def test_awq_is_folded_where_the_program_allows_it(key):
    model = Block()
    x = jax.random.normal(key, (8, T, D)) * jnp.exp2(jnp.arange(D) % 5)
    made = calibrate(model, provider(), [x], algorithms=["awq", "round"])
    plain = mt.quantize_model(model, provider(), x)
    assert "factors of 7 weights folded, of 0 kept" in str(made.report)
    boxes = [b for _, b in nnx.iter_graph(made.model) if isinstance(b, mt.WithAux)]
    assert len(boxes) == 7
    assert all(flaxlib.unbox(b).array.pre_scale is None for b in boxes)
    assert float(jnp.abs(made.model.one.scale[...] - model.one.scale[...]).max()) > 0.01
    far = lambda net: float(jnp.mean(jnp.square(net(x) - model(x))))
    assert far(made.model) < far(plain)


def test_factors_of_weights_that_share_inputs(key):
    """Ranges of all of them, errors of all of them, and one factor for what is tied."""
    # Positive, since the largest of a column lies on a tie if it is negative.
    weights = [jnp.abs(jax.random.normal(k, (8, n))) for k, n in zip(jax.random.split(key), (3, 5))]  # fmt: skip
    largest = np.linspace(0.5, 4, 8).astype(np.float32)
    ties = np.array([0, 1, 2, 3, 0, 1, 2, 3])
    got = smooth.smooth_together(weights, largest[None], (MATRIX,) * 2, 0.5, jnp.asarray(ties))[0]  # fmt: skip
    rows = np.abs(np.concatenate(weights, axis=1)).max(1)
    pool = lambda v: np.maximum(v[:4], v[4:])[ties]
    np.testing.assert_allclose(got, np.sqrt(pool(rows) / pool(largest)), rtol=1e-5)

    x = np.asarray(jax.random.normal(key, (50, 8))) * np.linspace(0.2, 5, 8)
    H, spec = x.T @ x, Spec("int3", (1,))
    got = smooth.awq_together(
        weights, (spec,) * 2, [jnp.asarray(H, jnp.float32)[None, None]] * 2,
        (MATRIX,) * 2, 20, jnp.asarray(ties),
    )[0]  # fmt: skip
    size = np.sqrt(pool(np.diag(H))).astype(np.float32)
    best = np.inf, None
    for ratio in np.arange(20) / 20:
        p = size ** np.float32(-ratio)
        p = p / np.sqrt(p.max() * p.min())
        cost = 0.0
        for w in map(np.asarray, weights):
            scaled = w / p[:, None]
            scale = np.abs(scaled).max(0) / np.float32(3.5)
            codes = np.clip(np.round(scaled * (1 / scale)), -4, 3)
            rounded = codes * scale * p[:, None]
            cost += np.sum((rounded - w) * (H @ (rounded - w)))
        best = min(best, (cost, tuple(p)))
    np.testing.assert_allclose(got, best[1], rtol=1e-5)


def test_inputs_are_smoothed_before_they_are_quantized(key):
    """Kept as pre_scale, SmoothQuant's factors reach the inputs before int8 does."""

    class Two(nnx.Module):
        def __init__(self):
            self.a = nnx.Linear(D, D, use_bias=False, rngs=nnx.Rngs(0))

        def __call__(self, x):
            return self.a(x)

    model = Two()
    # Positive, since the largest of a row lies on a tie if it is negative.
    x = jnp.abs(jax.random.normal(key, (64, D)).at[:, 3].mul(100.0))
    model.a.kernel[...] = jnp.abs(model.a.kernel[...])
    rules = lambda: provider(weight_qtype="int8", tile_size=None, act_qtype="int8")
    made = calibrate(model, rules(), [x], algorithms=["smooth", "round"])
    w = np.asarray(model.a.kernel[...])
    s = np.sqrt(np.abs(x).max(0) / np.abs(w).max(1))
    smoothed, weight = np.asarray(x) / s, w * s[:, None]
    rounded = lambda v, axis: np.clip(np.round(v / (scale := np.abs(v).max(axis, keepdims=True) / 127.5)), -128, 127) * scale  # fmt: skip
    wanted = rounded(smoothed, 1) @ rounded(weight, 0)
    far = lambda out: float(np.mean(np.square(out - np.asarray(model(x)))))
    np.testing.assert_allclose(made.model(x), wanted, rtol=1e-3, atol=2e-2)
    assert far(made.model(x)) < 0.6 * far(mt.quantize_model(model, rules(), x)(x))


def test_a_killed_calibration_folds_the_same(key, tmp_path):
    x = jax.random.normal(key, (8, T, D))
    named = {
        "algorithms": ["awq", "round"],
        "options": CalibrationOptions(weigh="none"),
    }
    whole = calibrate(Block(), provider(), [x], **named)

    class Killed(Exception):
        pass

    def kill(line):
        if line.startswith("gate"):
            raise Killed

    with pytest.raises(Killed):
        calibrate(Block(), provider(), [x], folder=tmp_path, progress=kill, **named)
    again = calibrate(Block(), provider(), [x], folder=tmp_path, **named)
    same = jax.tree.map(
        lambda a, b: bool((a == b).all()),
        nnx.state(whole.model),
        nnx.state(again.model),
    )
    assert all(jax.tree.leaves(same))
