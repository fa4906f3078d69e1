"""Attention in blocks is attention: values and gradients, on random packings."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import midtread as mt
from midtread import cli
from midtread.kernels import environment
from midtread.lm import blockwise, settings
from midtread.lm import cache as kv
from midtread.lm import model as models
from midtread.lm.attend import Call, _kept, attend, choose_for
from midtread.lm.config import Model, section
from midtread.lm.seen import Place, document_starts, seen_by
from midtread.lm.usage import UsageError

#        B, T, S, H, K, h, w, and what else
SHAPES = {
    "grouped": (2, 70, 70, 4, 2, 16, 16, {}),
    "latent": (1, 40, 40, 3, 3, 24, 16, {}),
    "all": (2, 50, 50, 4, 2, 8, 8, {"window": 20, "softcap": 2.0, "sinks": True}),
}
CASES = [("grouped", jnp.bfloat16, 2e-2), ("latent", jnp.float32, 1e-5)]
CASES += [("all", jnp.float32, 1e-5)]


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(blockwise, "BLOCK", 16)


def packing(key, B, T):
    """Documents of random lengths, padding after the last."""
    begins = jax.random.bernoulli(key, 0.1, (B, T))
    segments = 1 + jnp.cumsum(begins, axis=1)
    return jnp.where(jnp.arange(T) >= T - 3, 0, segments)


def example(key, name, dtype=jnp.float32):
    B, T, S, H, K, h, w, how = SHAPES[name]
    keys = jax.random.split(key, 6)
    shapes = ((B, T, H, h), (B, S, K, h), (B, S, K, w), (B, T, H, w))
    arrays = [jax.random.normal(k, s, dtype) for k, s in zip(keys, shapes)]
    starts = document_starts(packing(keys[4], B, T))
    seen = seen_by(Place(starts, starts), window=how.get("window"))
    sinks = jax.random.normal(keys[5], (H,)) if how.get("sinks") else None
    return arrays, seen, {"softcap": how.get("softcap"), "sinks": sinks}


def results(implementation, arrays, seen, how):
    """The output and every gradient."""

    @jax.jit
    def run(q, k, v, g, sinks):
        def out(q, k, v, sinks):
            what = {**how, "sinks": sinks, "implementation": implementation}
            return attend(q, k, v, seen, **what)

        value, vjp = jax.vjp(out, q, k, v, sinks)
        return value, vjp(g)

    return run(*arrays, how["sinks"])


@pytest.mark.parametrize("name,dtype,atol", CASES)
def test_blocks_are_the_formula(key, name, dtype, atol, small_blocks):
    arrays, seen, how = example(key, name, dtype)
    blocks, plain = (
        jax.tree.leaves(results(x, arrays, seen, how)) for x in ("blockwise", "plain")
    )
    for got, want in zip(blocks, plain, strict=True):
        got, want = np.asarray(got, np.float32), np.asarray(want, np.float32)
        largest = max(np.abs(want).max(), 1)
        np.testing.assert_allclose(got, want, atol=atol * largest, rtol=0)


def test_the_formula_is_the_formula(key):
    """Against JAX's own, with documents and a window as a mask."""
    (q, k, v, _), seen, _ = example(key, "all")
    mask = seen.mask(k.shape[1])[:, None]
    want = jax.nn.dot_product_attention(q, k, v, mask=mask, implementation="xla")
    np.testing.assert_allclose(attend(q, k, v, seen), want, atol=1e-5)


def test_a_chunk_that_ends_behind_its_cache_reads_the_cache_alone(key):
    """Its last queries fill up a prompt: what they see ends where the cache does."""
    q, k, v = (jax.random.normal(x, (1, n, 1, 16), jnp.bfloat16) for x, n in
               zip(jax.random.split(key, 3), (128, 70, 70)))  # fmt: skip
    place = Place(jnp.arange(128)[None])
    cache = kv.Cache({"k": k, "v": v})
    seen = seen_by(place, cache, window=100)
    with environment.implementation("interpret"):
        got = attend(q, k, v, seen, implementation="flash")
    want = attend(q, k, v, seen, implementation="plain")
    np.testing.assert_allclose(
        np.asarray(got, np.float32), np.asarray(want, np.float32), atol=0.02
    )


def test_documents_do_not_see_each_other(key, small_blocks):
    """What stands in one document changes nothing in the next."""
    (q, k, v, _), _, _ = example(key, "grouped")
    segments = jnp.where(jnp.arange(70) < 33, 1, 2)[None].repeat(2, 0)
    seen = seen_by(Place(segments, document_starts(segments)))
    run = lambda v: attend(q, k, v, seen, implementation="blockwise")
    there = jnp.arange(70)[:, None, None] < 33
    np.testing.assert_array_equal(run(v)[:, 33:], run(jnp.where(there, 9, v))[:, 33:])


@pytest.mark.parametrize("quantized", [False, True])
def test_a_cache_is_read_in_blocks(key, quantized, small_blocks):
    """Twenty tokens after thirty others, against a cache of a hundred slots."""
    m = Model(num_kv_heads=2, head_dim=16, num_query_heads=4, num_decoder_layers=1)
    how = ("int8", "dkv") if quantized else None
    held = jax.tree.map(lambda a: a[0], kv.make(m, 2, 100, how)["layers"])
    new = jax.random.normal(key, (2, 2, 50, 2, 16), jnp.bfloat16)
    slots = jnp.broadcast_to(jnp.arange(50), (2, 50))
    held = held.write(slots, k=new[0], v=new[1])
    q = jax.random.normal(key, (2, 20, 4, 16), jnp.bfloat16)
    seen = seen_by(Place(slots[:, 30:]), held, window=25)
    run = functools.partial(attend, q, held.rows["k"], held.rows["v"], seen)
    got, want = (run(implementation=x) for x in ("blockwise", "plain"))
    np.testing.assert_allclose(
        np.asarray(got, np.float32), np.asarray(want, np.float32), atol=0.02
    )


def test_logits_are_not_in_memory():
    """One head of 4,096 tokens: its logits would be 64 MiB."""
    x = jax.ShapeDtypeStruct((1, 4096, 1, 8), jnp.float32)
    seen = seen_by(Place(jnp.arange(4096)[None]))
    loss = lambda q, k, v: jnp.sum(attend(q, k, v, seen) ** 2)
    compiled = jax.jit(jax.grad(loss, (0, 1, 2))).lower(x, x, x).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 12 * 2**20


def test_a_layer_keeps_the_output_and_runs_once():
    """With remat_policy=minimal the backward does not run attention's forward again."""
    x = jax.ShapeDtypeStruct((1, 1024, 1, 8), jnp.float32)
    seen = seen_by(Place(jnp.arange(1024)[None]))
    run = lambda q: jnp.sum(attend(q, q, q, seen))

    def loops(policy):
        text = str(jax.make_jaxpr(jax.grad(jax.checkpoint(run, policy=policy)))(x))
        return text.count(" while[")

    assert loops(models.POLICIES["minimal"]) < loops(None)


def test_a_librarys_kernel_runs_once(key):
    """Its residuals have names: values and gradients are the same, the forward is not run
    again under remat_policy=minimal."""

    def of_jax(call):
        mask = call.seen.mask(call.k.shape[1])[:, None]
        return jax.nn.dot_product_attention(call.q, call.k, call.v, mask=mask)

    (q, k, v, g), seen, _ = example(key, "all")
    policy = models.POLICIES["minimal"]

    def gradients(run):
        of = lambda q, k, v: jnp.sum(run(Call(q, k, v, seen, 8**-0.5)) * g)
        return jax.grad(jax.checkpoint(of, policy=policy), (0, 1, 2))

    plain, kept = gradients(of_jax), gradients(_kept(of_jax))
    for a, b in zip(jax.jit(plain)(q, k, v), jax.jit(kept)(q, k, v), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)
    dots = lambda fn: str(jax.make_jaxpr(fn)(q, k, v)).count(" dot_general[")
    assert dots(kept) < dots(plain)


def call(key, T, dtype=jnp.bfloat16, **how):
    q = jnp.ones((1, T, 2, 64), dtype)
    seen = seen_by(Place(jnp.arange(T)[None]), window=how.pop("window", None))
    return Call(q, q, q, seen, 1.0, **how)


def test_the_first_that_can_is_taken(key):
    choice = choose_for(call(key, 128))
    assert choice.name == "plain"
    assert "not an NVIDIA GPU" in dict(choice.refused)["cudnn"]
    choice = choose_for(call(key, 1024))
    assert choice.name == "blockwise"
    assert "1024 x 1024" in dict(choice.refused)["plain"]


def test_explain_says_which(capsys):
    assert cli.main(["explain", "tiny", "max_target_length=1024"]) == 0
    said = capsys.readouterr().out.splitlines()[-1]
    assert said.startswith("attention: blockwise (decode: it is for one query")
    assert "cudnn: the device is" in said and "plain: logits of 1024 x 1024" in said


def test_a_length_that_kernels_cannot_take_goes_to_the_next(capsys):
    words = ["explain", "tiny", "max_target_length=100", "kernels=h200"]
    assert cli.main(words) == 0
    *_, layers, said = capsys.readouterr().out.splitlines()
    assert layers.startswith("layers: each one's weights")
    assert said.startswith("attention: plain (decode: it is for one query")
    assert "cudnn: 100 queries do not fill a block of 128" in said


def test_a_wish_that_cannot_be_met_says_why(key):
    c = call(key, 256)
    with pytest.raises(UsageError, match="attention=cudnn cannot run: the device is"):
        attend(c.q, c.k, c.v, c.seen, implementation="cudnn")


def test_a_rule_for_the_logits_is_honoured(key):
    """A rule that quantizes einsums of activations reaches attention at any length."""
    words = ["tiny", "max_target_length=1024", "num_decoder_layers=1", "batch_size=1"]
    m = section(settings.load(words), Model)
    net = models.create(m)
    tokens = jax.ShapeDtypeStruct((1, 1024), jnp.int32)
    rule = {"module_path": ".*self_attention", "op_names": ("einsum",)}
    provider = mt.QtProvider([mt.QtRule(**rule, weight_qtype="int8", act_qtype="int8")])
    graph, state = nnx.split(mt.quantize_model(net, provider, tokens))
    run = lambda state, tokens: nnx.merge(graph, state)(tokens).logits
    text = str(jax.make_jaxpr(run)(state, tokens))
    assert "i32[1,1,2,1024,1024]" in text.replace(" ", "")


def test_words_that_mean_nothing_are_refused():
    with pytest.raises(UsageError, match="attention=fast is not one of its values"):
        settings.load(["tiny", "attention=fast"])
