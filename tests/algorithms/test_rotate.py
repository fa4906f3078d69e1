"""Rotations between weights: the float model stays what it is, and rounding gains."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import midtread as mt
from midtread.algorithms import program, rotate, stages, stream
from midtread.algorithms.calibrate import CalibrationOptions, calibrate
from midtread.algorithms.rotate import RotateOptions
from midtread.model import flaxlib
from midtread.numerics.spec import Spec
from tests.algorithms.test_calibrate import FLAT
from tests.algorithms.test_fold import Block
from tests.algorithms.test_fold import Layers as Stack
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
        stages.outputs(traced, turned, arrays)[0],
        stages.outputs(traced, floats, arrays)[0],
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
    assert f"{2 if kind is Layers else 1} pairs of weights" in str(made.report)


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


# --- the residual stream ----------------------------------------------------------------------


class Decoder(nnx.Module):
    """A table, positions, blocks, a last norm and logits."""

    def __init__(self, norm=nnx.RMSNorm):
        rngs = nnx.Rngs(3)
        self.table = nnx.Embed(11, D, rngs=rngs)
        self.positions = nnx.Param(jax.random.normal(rngs.params(), (T, D)))
        self.blocks = nnx.List([Block(norm) for _ in range(2)])
        self.last = norm(D, rngs=rngs)
        self.last.scale[...] = jnp.linspace(2, 0.5, D)
        self.logits = nnx.Linear(D, 11, use_bias=False, rngs=rngs)

    def __call__(self, tokens):
        x = self.table(tokens) + self.positions[...]
        for block in self.blocks:
            x = block(x)
        return self.logits(self.last(x))


@pytest.fixture(scope="module")
def tokens():
    return jax.random.randint(jax.random.key(0), (6, T), 0, 11)


@pytest.mark.parametrize("kind", rotate.KINDS)
def test_a_turned_stream_is_the_float_model(kind, tokens):
    model = Decoder()
    traced, floats = program.trace(model, tokens)
    (one,), _ = stream.find(traced)
    assert one.width == D and len(one.rows) == 11 and len(one.columns) == 4
    names = [v.name for v in one.tables]
    assert names[:2] == ["table/embedding", "positions"] and len(names) == 6
    specs = {n: Spec("int4", (1,), {0: 8}) for n in range(len(traced.sites))}
    options = RotateOptions(kind=kind, steps=6)
    plan = rotate.plan(traced, specs, specs, options)
    said = []
    turned = rotate.fold(traced, floats, plan, options, specs, said.append)
    assert len(said) == (3 if kind == "learned" else 0)  # the stream and two values
    arrays = traced.arrays(tokens)
    np.testing.assert_allclose(
        stages.outputs(traced, turned, arrays)[0],
        stages.outputs(traced, floats, arrays)[0],
        rtol=1e-5, atol=1e-5,
    )  # fmt: skip
    assert float(jnp.abs(turned["last", "scale"] - 1).max()) == 0
    gone = jnp.abs(turned["table", "embedding"] - floats["table", "embedding"])
    assert float(gone.max()) > 0.1


def test_learned_rotations_cost_less_and_are_rotations(key):
    w = jax.random.normal(key, (16, 12)) * jnp.exp2(jnp.arange(16) % 4)[:, None]
    cost = lambda R: rotate.rounding_cost(R.T @ w, Spec("int4", (1,), {0: 8}))
    R = rotate.rotation(16, key)
    new = rotate.learn(R, cost, 20)
    assert cost(new) < 0.95 * cost(R)
    np.testing.assert_allclose(new @ new.T, np.eye(16), atol=1e-5)
    np.testing.assert_array_equal(new, rotate.learn(R, cost, 20))
    # One of Cayley's steps, in plain NumPy.
    G = np.asarray(jax.grad(cost)(R), np.float64)
    A = G @ np.asarray(R).T - np.asarray(R) @ G.T
    A /= np.linalg.norm(A)
    step = lambda t: (
        np.linalg.inv(np.eye(16) + t / 2 * A) @ (np.eye(16) - t / 2 * A) @ R
    )
    lengths = [0.5 / 2**n for n in range(8)]
    first = next(step(t) for t in lengths if cost(jnp.asarray(step(t))) < cost(R))
    np.testing.assert_allclose(rotate.learn(R, cost, 1), first, atol=1e-5)


def test_streams_that_cannot_be_turned_are_named(tokens):
    traced, _ = program.trace(Decoder(nnx.LayerNorm), tokens)
    streams, reasons = stream.find(traced)
    assert streams == []
    assert "summed over its channels (the mean of a LayerNorm)" in next(iter(reasons.values()))  # fmt: skip

    class Tied(Decoder):
        def __call__(self, tokens):
            x = self.blocks[0](self.table(tokens))
            return self.table.attend(self.last(x))

    streams, reasons = stream.find(program.trace(Tied(), tokens)[0])
    assert streams == [] and "used elsewhere too" in next(iter(reasons.values()))
    for asked, message in (
        ({"kind": "random"}, "kind='random' should be one of"),
        ({"places": ("everywhere",)}, "should be some of"),
        ({"places": "heads"}, "should be some of"),
        ({"steps": 0}, "steps=0 should be at least 1"),
    ):
        with pytest.raises(ValueError, match=message):
            RotateOptions(**asked)


@pytest.mark.parametrize("places", [("stream", "heads"), ("stream", "heads", "online")])
def test_a_rotated_model_is_served(places, tokens):
    """Codes of wide integers show that nothing but rounding has changed."""
    model = Decoder()
    rule = mt.QuantizationRule(module_path="blocks/.*", weight_qtype="int16")
    options = CalibrationOptions(rotate=RotateOptions(places=places))
    made = calibrate(
        model, mt.PtqProvider([rule]), [tokens], algorithms=["rotate", "round"],
        options=options,
    )  # fmt: skip
    np.testing.assert_allclose(made.model(tokens), model(tokens), atol=2e-3)
    q = flaxlib.unbox(made.model.blocks[0].down.kernel).array
    assert (q.pre_rotation is not None) == ("online" in places)
    assert flaxlib.unbox(made.model.blocks[0].up.kernel).array.pre_rotation is None
    assert "1 streams" in str(made.report)
    if "online" in places:
        assert q.pre_rotation.shape == (8, 1)
        assert "2 inputs at run time" in str(made.report)


def test_inputs_turned_online_spread_outliers(key):
    """Behind a nonlinearity, where only they can: with awq, corrections and learning too."""
    model, x = Gated(), jax.random.normal(key, (64, D))
    model.down.kernel[...] = model.down.kernel[...].at[2].mul(9.0)
    model.up.kernel[...] = model.up.kernel[...].at[:, 2].mul(1 / 9)
    rule = mt.QuantizationRule(
        module_path="down", weight_qtype="int4", act_qtype="int8"
    )
    provider = lambda: mt.PtqProvider([rule])
    online = RotateOptions(places=("online",))
    options = CalibrationOptions(rotate=online, weigh="none")
    far = lambda net: float(jnp.mean(jnp.square(net(x) - model(x))))
    plain = calibrate(model, provider(), [x], algorithms=["round"])
    turned = calibrate(model, provider(), [x], algorithms=["rotate", "round"], options=options)  # fmt: skip
    assert far(turned.model) < 0.7 * far(plain.model)
    names = ["rotate", "correct", "awq", "gptq", "learn"]
    best = calibrate(model, provider(), [x], algorithms=names, options=options)
    assert far(best.model) < far(turned.model)
    # Without being asked for where inputs are quantized, and only there.
    asked = calibrate(model, provider(), [x], algorithms=["rotate", "round"])
    assert far(asked.model) == far(turned.model)
    alone = mt.PtqProvider([mt.QuantizationRule(weight_qtype="int4")])
    with pytest.raises(ValueError, match=r"places=\('online',\)"):
        calibrate(model, alone, [x], algorithms=["rotate", "round"])


def test_values_may_be_turned_online_too(key):
    """Moments as attention sees them are turned with the inputs."""
    model, x = Attention("grouped"), jax.random.normal(key, (8, T, D))
    rule = mt.QuantizationRule(module_path="v", weight_qtype="int3")
    rows = {}
    for names in (["gptq"], ["rotate", "gptq"]):
        made = calibrate(
            model, mt.PtqProvider([rule]), [x], algorithms=names,
            options=CalibrationOptions(rotate=RotateOptions(places=("online",))),
        )  # fmt: skip
        (rows[len(names)],) = made.report.rows
        far = float(jnp.mean(jnp.square(made.model(x) - model(x))))
    assert rows[2].cost < rows[2].rounded and rows[2].cost < 2 * rows[1].cost
    plain = mt.quantize_model(model, mt.PtqProvider([rule]), x)
    assert far < float(jnp.mean(jnp.square(plain(x) - model(x))))


def test_streams_go_through_scans(key):
    class Scanned(nnx.Module):
        def __init__(self):
            self.first = nnx.Linear(D, D, rngs=nnx.Rngs(0))
            self.inner = Stack()
            self.norm = nnx.RMSNorm(D, rngs=nnx.Rngs(1))
            self.last = nnx.Linear(D, 3, rngs=nnx.Rngs(2))

        def __call__(self, x):
            return self.last(self.norm(self.inner(self.first(x))))

    model, x = Scanned(), jax.random.normal(key, (2, T, D))
    traced, floats = program.trace(model, x)
    (one,), _ = stream.find(traced)
    assert (len(one.rows), len(one.columns), len(one.tables)) == (11, 5, 5)
    turned = stream.turned(traced, floats, one, rotate.rotation(D, key))
    arrays = traced.arrays(x)
    np.testing.assert_allclose(
        stages.outputs(traced, turned, arrays)[0],
        stages.outputs(traced, floats, arrays)[0],
        rtol=1e-5, atol=1e-5,
    )  # fmt: skip
