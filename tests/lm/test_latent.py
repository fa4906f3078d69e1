"""Steps in the latent space: the outputs of the wide form, and no array that is wide."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.extend.core import jaxprs_in_params

import midtread as mt
from midtread.lm import cache
from midtread.lm.config import Model
from midtread.lm.latent import LatentAttention
from midtread.lm.seen import Place

# No two of heads, ranks, widths and the cache's length are alike.
M = Model(attention_type="mla", num_query_heads=3, num_kv_heads=3, emb_dim=24,
          kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=10, v_head_dim=12,
          dtype="float32", num_decoder_layers=1)  # fmt: skip
LENGTH = 7  # of the cache
X = jax.random.normal(jax.random.key(0), (2, LENGTH, 24))
PLACE = Place(jnp.broadcast_to(jnp.arange(LENGTH), (2, LENGTH)))


def made(rule=None, m=M):
    net = LatentAttention(m, nnx.Rngs(0))
    if rule is None:
        return net
    return mt.quantize_model(net, mt.PtqProvider([rule]), X, PLACE, None)


def begun(net, cache_format):
    """The cache after all tokens but the last."""
    empty = cache.make(M, 2, LENGTH, cache_format, stacked=False)["layers"][0]
    return net(X[:, :-1], Place(PLACE.positions[:, :-1]), empty)[1]


def step(net, before):
    return net(X[:, -1:], Place(PLACE.positions[:, -1:]), before)[0]


@functools.partial(nnx.jit, static_argnums=1)
def both_forms(net, cache_format=None):
    """What the last token gets in the latent space, and wide."""
    before = begun(net, cache_format)
    return step(net, before), _wide(step, net, before)


def _wide(run, net, *args):
    net.implementation = "blockwise"  # knows keys and values alone
    out = run(net, *args)
    net.implementation = "auto"
    return out


WEIGHTS = [
    None,
    {"weight_qtype": "int8"},
    {"weight_qtype": "int4", "tile_size": 8},
    {"weight_qtype": "mxfp4"},
    {"weight_qtype": "uint4", "weight_calibration_method": "minmax"},
]


@pytest.mark.parametrize("rule", WEIGHTS, ids=str)
def test_a_step_is_the_wide_one(rule):
    narrow, wide = both_forms(made(rule))
    np.testing.assert_allclose(narrow, wide, atol=2e-5)


@pytest.mark.parametrize("fmt", ["int8", "fp8", "int4"])
def test_a_cache_of_codes_is_read_as_it_is(fmt):
    narrow, wide = both_forms(made(), (fmt, "dkv"))
    np.testing.assert_allclose(narrow, wide, atol=2e-5)


def test_quantized_activations_cost_no_more_than_wide():
    """They are others (queries and attended latents for latents), so numbers differ."""
    exact, _ = both_forms(made())
    rule = {"weight_qtype": "int8", "act_qtype": "int8", "op_names": ("dot_general",)}
    narrow, wide = both_forms(made(rule))
    error = lambda x: float(jnp.sqrt(jnp.mean((x - exact) ** 2)))
    assert 0 < error(narrow) < 1.5 * error(wide)


def shapes(run, *args):
    """Of every array that is computed, those of inner programs too."""
    return _shapes(jax.make_jaxpr(run)(*args).jaxpr)


def _shapes(jaxpr):
    for eqn in jaxpr.eqns:
        yield from (v.aval.shape for v in eqn.outvars)
        for inner in jaxprs_in_params(eqn.params):
            yield from _shapes(inner)


@pytest.mark.parametrize("rule", WEIGHTS[:2], ids=str)
def test_no_key_or_value_of_a_head_is_made(rule):
    """Nothing has a number for every slot and head but logits, [2, 3, 1, 7]."""
    net = made(rule)
    before = cache.make(M, 2, LENGTH, stacked=False)["layers"][0]
    computed = lambda net, before: [*shapes(lambda x: step(net, x), before)]
    is_wide = lambda s: {LENGTH, 3} <= set(s) and np.prod(s) > 2 * 3 * LENGTH
    assert not list(filter(is_wide, computed(net, before)))
    assert list(filter(is_wide, _wide(computed, net, before)))


def test_what_is_about_the_wide_form_gets_it():
    """Adapters, static ranges, an implementation that knows keys and values alone."""
    rule = {"weight_qtype": "int8"}
    assert made(rule).can_be_narrow
    adapters = mt.LoraProvider(module_path=".*wkv_b", rank=2, alpha=2.0)
    adapted = mt.apply_lora_to_model(
        made(rule), adapters, X, PLACE, None, rngs=nnx.Rngs(0)
    )
    assert not adapted.can_be_narrow
    static = {"act_static_scale": True, "act_calibration_method": "fixed,-4,4"}
    assert not made({**rule, "act_qtype": "int8", **static}).can_be_narrow
    asked = Model(**{**vars(M), "attention": "blockwise"})
    assert not made(m=asked).can_be_narrow
