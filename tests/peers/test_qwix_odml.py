"""LiteRT annotations against Qwix 0.1.8's ODML providers: statistics and attributes.

Where we differ on purpose the cases below stay away, and tests at the end pin it: codes
-127..127 for weights while training (Qwix's file has them, its training -128), pooled
averages and biases rounded as the kernels do, an inner range for every step of a norm.
What Qwix cannot convert is pinned as well.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

import midtread as mt

pytestmark = pytest.mark.filterwarnings("ignore:'VariableState'")  # Qwix's own
qwix = pytest.importorskip("qwix")
odml = pytest.importorskip("qwix._src.providers.odml")


@pytest.fixture(autouse=True)
def standard():
    with jax.numpy_dtype_promotion("standard"):
        yield


class Of(nn.Module):
    fn: object

    @nn.compact
    def __call__(self, x):
        return self.fn(x)


class Turned(nn.Module):
    @nn.compact
    def __call__(self, x):
        kernel = self.param("kernel", nn.initializers.lecun_normal(), (x.shape[-1], 5))
        return jnp.einsum("btd,dh->hbt", x, kernel)


def cnn(x):
    x = nn.relu(nn.Conv(8, (3, 3), use_bias=False)(x))
    x = nn.max_pool(x, (2, 2), (2, 2))
    x = nn.relu6(nn.Conv(8, (3, 3), feature_group_count=8, use_bias=False)(x))
    x = x + nn.Conv(8, (1, 1), use_bias=False)(x)
    return nn.Dense(5, use_bias=False)(jnp.mean(x, (1, 2)))


def activations(x):
    x = nn.Dense(8, use_bias=False)(x)
    x = nn.softmax(x) * jnp.tanh(x) + nn.gelu(x) - nn.silu(x)
    return nn.leaky_relu(x)


def moves(x):
    x = nn.Dense(8, use_bias=False)(x).reshape(4, 64, 8).transpose(0, 2, 1)
    x = jnp.concatenate([x[:, :4], x[:, 4:]], -1)
    return nn.Dense(3, use_bias=False)(x)


def attention(x):
    x = x.reshape(4, 8, 32)
    q, k, v = (nn.Dense(8, use_bias=False)(x) for _ in range(3))
    p = nn.softmax(jnp.einsum("bqd,bkd->bqk", q, k))
    return jnp.einsum("bqk,bkd->bqd", p, v)


def orders(x):
    """Einsums that JAX multiplies the other way round: one of activations, one by a weight."""
    x = x.reshape(4, 8, 32)
    p = nn.softmax(jnp.mean(x, -1, keepdims=True) * jnp.ones(8)).reshape(4, 1, 8, 8)
    x = jnp.einsum("bhqk,bkhd->bqhd", p, x[:, :, None]).reshape(4, 8, 32)
    return Turned()(x)


def quotients(x):
    """Divisions and other primitives that Qwix leaves in float and has no ranges of."""
    x = nn.Dense(8, use_bias=False)(x)
    x = x / (1.5 + jnp.tanh(x))
    x = x * jnp.reciprocal(3 + jnp.tanh(x)) + jnp.exp(-jnp.square(x))
    return nn.Dense(5, use_bias=False)(x)


MODELS = {
    "cnn": cnn,
    "orders": orders,
    "activations": activations,
    "moves": moves,
    "attention": attention,
}
RULE = {"weight_qtype": jnp.int8, "act_qtype": jnp.int8}


def rules(library, **fields):
    return [library.QuantizationRule(**{**RULE, **fields})]


def narrow(params):
    """Kernels whose largest weight is positive: only -absmax has the code Qwix's training
    uses and its file does not."""
    turn = lambda w: jnp.clip(w, -0.99 * jnp.max(w, tuple(range(w.ndim - 1))), None)
    return jax.tree.map(turn, params)


def gathered(library, provider, model, params, x):
    quantized = library.quantize_model(model, provider)
    run = jax.jit(lambda p, x: quantized.apply({"params": p}, x, mutable="quant_stats"))
    out, stats = run(params, x)
    return np.asarray(out), stats["quant_stats"]


def annotations(library, provider, model, params, x):
    """The attributes of every quant.fake_quant in the lowered model, in order."""
    quantized = library.quantize_model(model, provider)
    run = jax.jit(lambda x: quantized.apply({"params": params}, x))
    text = run.lower(x).as_text()
    found = re.findall(
        r'stablehlo.composite "quant.fake_quant" .*?composite_attributes = \{(.*?)\}, decomp',
        text,
    )
    return [_attributes(line) for line in found]


def _attributes(text):
    numbers = lambda key: [
        float(n)
        for n in re.findall(
            r"-?\d[\d.e+-]*",
            (re.search(rf"{key} = dense<(.*?)>", text) or [0, ""])[1],
        )
    ]
    word = lambda key: (re.search(rf"{key} = ([^,]*)", text) or [0, None])[1]
    return {
        "scale": numbers("scale"),
        "zero_point": numbers("zero_point"),
        "dtype": word("dtype"),
        "narrow": word("narrow_range"),
        "axis": word("quantization_dimension"),
    }


def by_scale(found):
    """A multiset: the two libraries emit edges in another order, and a hex blob for long
    lists, which stands for itself."""
    key = lambda a: (
        a["dtype"],
        a["narrow"],
        a["axis"] or "",
        np.round(a["scale"], 7).tolist(),
        a["zero_point"],
    )
    return sorted(map(key, found), key=str)


@pytest.fixture(scope="module")
def x():
    return jax.random.normal(jax.random.key(0), (4, 8, 8, 4))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=pytest.mark.slow if n == "activations" else ())
        for n in MODELS
    ],
)
def test_statistics_and_annotations(name, x):
    model = Of(MODELS[name])
    params = narrow(jax.jit(model.init)(jax.random.key(1), x)["params"])
    out, stats = gathered(mt, mt.OdmlQatProvider(rules(mt)), model, params, x)
    theirs, wanted = gathered(qwix, odml.OdmlQatProvider(rules(qwix)), model, params, x)
    assert jax.tree.structure(stats) == jax.tree.structure(wanted)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-2, atol=2e-2),
        stats, wanted,
    )  # fmt: skip
    step = (out.max() - out.min()) / 255
    assert np.mean(np.abs(out - theirs) < 1.5 * step) > 0.98

    # the same statistics for both, so that scales are comparable to the last digit
    ours = annotations(
        mt, mt.OdmlConversionProvider(rules(mt), params, wanted), model, params, x
    )
    peers = annotations(
        qwix, odml.OdmlConversionProvider(rules(qwix), params, wanted), model, params, x
    )
    assert by_scale(ours) == by_scale(peers)


def l2_norm(x):
    return x / jnp.maximum(jnp.linalg.norm(x, axis=-1, keepdims=True), 1e-6)


def test_a_function_registered_as_an_op(x):
    model = Of(lambda x: l2_norm(nn.Dense(8, use_bias=False)(x)))
    params = narrow(jax.jit(model.init)(jax.random.key(1), x)["params"])
    found = []
    for library, make in ((mt, mt.OdmlQatProvider), (qwix, odml.OdmlQatProvider)):
        provider = make(rules(library))
        provider._ops[f"{__name__}.l2_norm"] = provider._ops["jax.numpy.tanh"]
        found.append(gathered(library, provider, model, params, x))
    (out, stats), (theirs, wanted) = found
    assert jax.tree.structure(stats) == jax.tree.structure(wanted)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-2, atol=2e-2),
        stats, wanted,
    )  # fmt: skip
    assert np.mean(np.abs(out - theirs) < 1.5 / 128) > 0.98


@pytest.mark.parametrize(
    "fields, options",
    [
        ({}, {"disable_per_channel_weights": True}),
        ({}, {"fixed_range_for_inputs": (-4, 4), "fixed_range_for_outputs": (-2, 2)}),
        ({"act_qtype": None}, {}),
        ({"act_static_scale": False}, {}),
        ({"act_calibration_method": "absmax"}, {}),
    ],
)
def test_options(fields, options, x):
    model = Of(
        lambda x: nn.Dense(3, use_bias=False)(nn.relu(nn.Dense(8, use_bias=False)(x)))
    )
    params = narrow(jax.jit(model.init)(jax.random.key(1), x)["params"])
    found = []
    for library, qat, convert in (
        (mt, mt.OdmlQatProvider, mt.OdmlConversionProvider),
        (qwix, odml.OdmlQatProvider, odml.OdmlConversionProvider),
    ):
        quantized = library.quantize_model(
            model, qat(rules(library, **fields), **options)
        )
        run = jax.jit(
            lambda p, x, m=quantized: m.apply({"params": p}, x, mutable="quant_stats")
        )
        out, stats = run(params, x)
        stats = stats.get("quant_stats", {})
        provider = convert(rules(library, **fields), params, stats, **options)
        found.append(
            (np.asarray(out), stats, annotations(library, provider, model, params, x))
        )
    (out, stats, ours), (theirs, wanted, peers) = found
    assert jax.tree.structure(stats) == jax.tree.structure(wanted)
    step = (theirs.max() - theirs.min()) / 255
    assert np.mean(np.abs(out - theirs) < 1.5 * step) > 0.99
    in_order = lambda found: sorted(found, key=lambda a: (str(a["axis"]), a["scale"]))
    assert len(ours) == len(peers)
    for a, b in zip(in_order(ours), in_order(peers)):
        assert a["axis"] == b["axis"]
        np.testing.assert_allclose(a["scale"], b["scale"], rtol=1e-3, atol=1e-6)
        assert a["zero_point"] == b["zero_point"]


@pytest.mark.parametrize(
    "fields", [{"weight_qtype": "int4"}, {"weight_qtype": "int8", "act_qtype": "int16"}]
)
def test_what_qwix_does_not_convert(fields, x):
    """Its provider refuses every format but int8; ours annotates int4, int2 and int16."""
    model = Of(lambda x: nn.Dense(3)(x))
    params = jax.jit(model.init)(jax.random.key(1), x)["params"]
    _, stats = gathered(
        mt,
        mt.OdmlQatProvider([mt.QuantizationRule(**{"act_qtype": "int8", **fields})]),
        model,
        params,
        x,
    )
    ours = mt.OdmlConversionProvider(
        [mt.QuantizationRule(**{"act_qtype": "int8", **fields})], params, stats
    )
    assert len(annotations(mt, ours, model, params, x)) == 3
    theirs = {k: jnp.dtype(v) for k, v in {"act_qtype": "int8", **fields}.items()}
    provider = odml.OdmlConversionProvider(
        [qwix.QuantizationRule(**theirs)], params, stats
    )
    with pytest.raises(ValueError, match="Unsupported dtype|Cannot use int16"):
        annotations(qwix, provider, model, params, x)


def test_qwix_cannot_flatten_an_einsum_with_two_kept_axes(x):
    class Heads(nn.Module):
        @nn.compact
        def __call__(self, x):
            w = self.param("w", nn.initializers.normal(), (4, 2, 3))
            return jnp.einsum("bhwc,cde->bhwde", x, w)

    params = jax.jit(Heads().init)(jax.random.key(1), x)["params"]
    _, stats = gathered(mt, mt.OdmlQatProvider(rules(mt)), Heads(), params, x)
    ours = mt.OdmlConversionProvider(rules(mt), params, stats)
    assert len(annotations(mt, ours, Heads(), params, x)) == 3
    theirs = odml.OdmlConversionProvider(rules(qwix), params, stats)
    with pytest.raises(ValueError, match="Cannot flatten scale"):
        annotations(qwix, theirs, Heads(), params, x)


def test_qwix_takes_no_numpy_input(x):
    model = Of(lambda x: nn.Dense(3)(x))
    variables = jax.jit(model.init)(jax.random.key(1), x)
    ours = mt.quantize_model(model, mt.OdmlQatProvider(rules(mt)))
    run = lambda m: m.apply(variables, np.asarray(x), mutable="quant_stats")
    assert run(ours)[0].shape == (4, 8, 8, 3)
    theirs = qwix.quantize_model(model, odml.OdmlQatProvider(rules(qwix)))
    with pytest.raises(ValueError, match="expected to be an activation"):
        run(theirs)


def test_statistics_that_qwix_gathered_convert(x):
    """Also where we would quantize more than it does: that stays float."""
    model = Of(quotients)
    params = narrow(jax.jit(model.init)(jax.random.key(1), x)["params"])
    wanted, _ = gathered(mt, mt.OdmlQatProvider(rules(mt)), model, params, x)
    _, stats = gathered(qwix, odml.OdmlQatProvider(rules(qwix)), model, params, x)
    provider = mt.OdmlConversionProvider(rules(mt), params, stats)
    out = jax.jit(mt.quantize_model(model, provider).apply)({"params": params}, x)
    assert np.abs(out - wanted).mean() < 0.05 * np.abs(wanted).mean()
    assert {"truediv", "exp", "integer_pow"} <= {op for _, op in provider.left_float}
