"""Algorithms in a chain: each one starts from the weights as those before it left them.

In 8 bits whatever is composed gives nearly the float model. An algorithm that looked up a
weight as it was before, unrotated or without another's factors, gives something else.
"""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import midtread as mt
from midtread.algorithms.calibrate import CalibrationOptions, calibrate
from midtread.algorithms.learn import LearnOptions
from midtread.algorithms.rotate import RotateOptions
from tests.algorithms.test_fold import Layers
from tests.algorithms.test_reach import D, T
from tests.algorithms.test_rotate import Decoder

F = 24
LEARN = LearnOptions(steps=2, rate=1e-4, scale_rate=1e-5)
CHAINS = (
    ("rotate", "correct", "gptq", "bias"),
    ("rotate", "awq", "clip", "bias"),
    ("rotate", "smooth", "gptq"),
    ("rotate", "correct", "awq", "gptq", "learn"),
    ("correct", "smooth", "round", "bias", "learn"),
)


class Every(nnx.Module):
    """Every contraction between norms on a residual stream, and weights that are shared: one
    by two layers, one by a matmul and by its transpose."""

    def __init__(self):
        rngs = nnx.Rngs(5)
        normal = lambda *shape: nnx.Param(0.3 * jax.random.normal(rngs.params(), shape))
        self.table = nnx.Embed(11, D, rngs=rngs)
        norm = lambda: nnx.RMSNorm(D, rngs=rngs)
        self.norms = nnx.List([norm() for _ in range(7)])
        for n, each in enumerate(self.norms):
            each.scale[...] = jnp.linspace(0.5 + n / 9, 2, D)
        self.heads, self.joined = normal(3, D, 4), normal(3, 4, D)
        self.up, self.down = normal(2, D, F), normal(2, F, D)
        self.mixed, self.apart = normal(2, D, D), normal(2, D, D)
        self.twice = nnx.Linear(D, D, rngs=rngs)
        self.tied = normal(D, F)
        self.conv = nnx.Conv(D, D, (3,), rngs=rngs)
        self.last = nnx.Linear(D, 11, rngs=rngs)

    def __call__(self, tokens):
        x = self.table(tokens)
        norms = iter(self.norms)
        y = jnp.einsum("btd,hde->bthe", next(norms)(x), self.heads[...])
        x = x + jnp.einsum("bthe,hed->btd", jax.nn.silu(y), self.joined[...])
        y = next(norms)(x).reshape(-1, D)
        sizes = jnp.array([len(y) // 3, len(y) - len(y) // 3], jnp.int32)
        y = jax.nn.silu(jax.lax.ragged_dot(y, self.up[...], sizes))
        x = x + jax.lax.ragged_dot(y, self.down[...], sizes).reshape(x.shape)
        y = jnp.stack([next(norms)(x)] * 2) * jnp.array([1, 0.1])[:, None, None, None]
        x = x + jnp.einsum("ebtd,edf->btf", y, self.mixed[...])
        y = jnp.einsum("ebtd,edf->ebtf", y, self.apart[...])
        x = x + y[0] * y[1]
        x = x + jnp.tanh(self.twice(next(norms)(x)))
        x = x + self.twice(next(norms)(x))
        x = x + jax.nn.silu(next(norms)(x) @ self.tied[...]) @ self.tied[...].T
        x = x + self.conv(next(norms)(x))
        return self.last(x)


class Twice(nnx.Module):
    """A stack of layers that is gone through two times."""

    def __init__(self):
        self.table = nnx.Embed(11, D, rngs=nnx.Rngs(1))
        self.stack = Layers()
        self.last = nnx.Linear(D, 11, rngs=nnx.Rngs(2))

    def __call__(self, tokens):
        return self.last(self.stack(self.stack(self.table(tokens))))


class Once(Twice):
    def __call__(self, tokens):
        return self.last(self.stack(self.table(tokens)))


# A model, and where it can be turned: a stack that is run twice has norms that two layers use.
KINDS = {
    "every": (Every, ("online",)),
    "decoder": (Decoder, ("stream", "heads", "online")),
    "stacked": (Once, ("stream", "heads", "online")),
    "stacked, twice": (Twice, ("online",)),
}


def test_a_bias_that_is_added_twice_is_left_alone():
    tokens = jax.random.randint(jax.random.key(0), (16, T), 0, 11)
    for make, corrected in ((Once, True), (Twice, False)):
        provider = mt.PtqProvider([mt.QuantizationRule(weight_qtype="int4")])
        made = calibrate(make(), provider, [tokens], algorithms=["gptq", "bias"])
        row = next(r for r in made.report.rows if "up/kernel[0]" in r.name)
        assert ("no bias to correct" not in row.note) == corrected
        moved = made.model.stack.layers.up.bias[...] != make().stack.layers.up.bias[...]
        assert bool(moved.any()) == corrected


def test_a_table_and_its_transpose_take_no_factors():
    tokens = jax.random.randint(jax.random.key(0), (16, T), 0, 11)
    provider = mt.PtqProvider([mt.QuantizationRule(weight_qtype="int4")])
    made = calibrate(Every(), provider, [tokens], algorithms=["awq", "gptq"])
    notes = {row.name: row.note for row in made.report.rows}
    assert notes.pop("tied") == "used along other axes too: no factors"
    assert not any("factors" in note for note in notes.values())
    assert made.model.tied.array.pre_scale is None
    for experts in (made.model.up, made.model.apart):
        assert experts.array.pre_scale.shape == (2, D, 1)
    assert made.model.conv.kernel.array.pre_scale.shape == (1, D, 1)


@pytest.mark.parametrize("names", CHAINS, ids="+".join)
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_composed_is_the_float_model(kind, names):
    make, places = KINDS[kind]
    model = make()
    tokens = jax.random.randint(jax.random.key(0), (16, T), 0, 11)
    act = {"act_qtype": "int8"} if "smooth" in names else {}
    provider = mt.PtqProvider([mt.QuantizationRule(weight_qtype="int8", **act)])
    options = CalibrationOptions(
        min_tokens=0.05, learn=LEARN, rotate=RotateOptions(places=places)
    )
    made = calibrate(model, provider, [tokens], algorithms=names, options=options)
    want, got = model(tokens), made.model(tokens)
    far = float(jnp.linalg.norm(got - want) / jnp.linalg.norm(want))
    assert far < 0.03
