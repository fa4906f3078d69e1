"""Many tokens a call, slots that are used again, prompts in chunks: the same tokens."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import midtread as mt
from midtread.kernels.environment import pretended
from midtread.kernels.pallas_compat import pretend_gpu
from midtread.lm import convert, data, decode, model, room, settings
from midtread.lm import generate as generating
from midtread.lm.config import Model, section
from midtread.lm.usage import UsageError

WORDS = ["tiny", "dtype=float32", "num_decoder_layers=2", "max_new_tokens=6"]
PROMPTS = [[1, 2, 3, 4, 5, 6, 7, 8, 9], [10], [11, 12, 13]]


@pytest.fixture(scope="module")
def config():
    return settings.load(WORDS)


@pytest.fixture(scope="module")
def net(config):
    return model.create(section(config, Model))


def served(net, config, slots=3, **options):
    return decode.Server(net, section(config, Model), slots=slots, length=32, **options)


@nnx.jit
def logits(net, tokens):
    return net(tokens).logits


def plainly(net, prompt, count):
    """The likeliest tokens with no cache and no loop: all is computed anew for each."""
    tokens = list(prompt)
    for _ in range(count):
        row = jnp.asarray([tokens + [0] * (16 - len(tokens))])
        tokens.append(int(jnp.argmax(logits(net, row)[0, len(tokens) - 1])))
    return tokens[len(prompt) :]


def test_tokens_are_those_of_the_model_without_cache_or_loop(net, config):
    made = decode.complete(served(net, config), PROMPTS, 6)
    assert made == [plainly(net, p, 6) for p in PROMPTS]


@pytest.mark.parametrize("sampling", [(0.0,), (1.0, 20, 0.9)], ids=["greedy", "drawn"])
def test_one_token_a_call_and_many_are_the_same(net, config, sampling):
    options = {"sampling": decode.Sampling(*sampling), "seed": 3}
    once = [
        decode.complete(served(net, config, **options), PROMPTS, 6, count=count)
        for count in (1, 4, 11)
    ]
    assert once[0] == once[1] == once[2]


@pytest.mark.parametrize("count", [16, 12, 13])
def test_the_host_is_asked_once_a_round(net, config, count):
    """The loop that the host has to ask about holds one of a length that is known."""
    server = served(net, config)
    arguments = (server._weights, server._slots, server._seed, count)
    jaxpr = str(server._program.go_on.trace(*arguments).jaxpr)
    assert jaxpr.count("while[") == 1
    length = {16: 8, 12: 6, 13: 1}[count]
    assert f"length={length}\n" in jaxpr


def test_a_slot_takes_the_next_prompt_and_neighbours_change_nothing(net, config):
    options = {"sampling": decode.Sampling(1.0), "seed": 5}
    together = decode.complete(served(net, config, **options), PROMPTS, 6)
    in_turn = decode.complete(served(net, config, slots=1, **options), PROMPTS, 6)
    assert together == in_turn


@pytest.mark.parametrize("rule", [{"weight_qtype": "int4"}, {"act_qtype": "int8"}])
def test_neighbours_change_nothing_in_few_bits(rule):
    """In another slot, beside others: the same tokens, bit for bit."""
    rule = {"weight_qtype": "int8", **rule, "op_names": ("dot_general",)}
    config = settings.load([*WORDS[:2], "num_decoder_layers=1"])
    config = dataclasses.replace(config, quant=(rule,))
    net = convert.in_memory(config, model.create(section(config, Model)))
    server = served(decode.prepare(net), config, cache_format=("int8", "dkv"))
    one, *others = PROMPTS
    first = decode.complete(server, [one, *others], 6)[0]
    assert decode.complete(server, [[14, 15], [16] * 8, one], 6)[2] == first


def test_a_prompt_is_read_in_chunks(net, config, monkeypatch):
    """All at once, by four tokens, and one by one."""
    whole = decode.complete(served(net, config), PROMPTS, 6)
    for chunk in (4, 1):
        monkeypatch.setattr(decode, "CHUNK", chunk)
        assert decode.complete(served(net, config), PROMPTS, 6) == whole


def test_few_programs_read_any_number_of_prompts(net, config, monkeypatch):
    """Three prompts are read in four rows, and the fourth row changes no slot."""
    sizes = []

    class Counted(decode.Program):
        def _read(self, weights, slots, rows, *rest):
            sizes.append(len(rows))
            return super()._read(weights, slots, rows, *rest)

    monkeypatch.setattr(decode, "_program", Counted)
    monkeypatch.setattr(decode, "CHUNK", 4)
    server = served(net, config, slots=6)
    for counts in ((1, 2, 3), (3, 3), (1, 5), (4, 2), (6,)):
        made = {}
        for count in counts:
            prompts = {slot: [slot + 1] * (slot + 3) for slot in server.free[-count:]}
            made |= {s: [t] for s, t in server.prefill(prompts, 3).items()}
        for slot, tokens in server.step(3).items():
            assert made[slot] + tokens == plainly(net, [slot + 1] * (slot + 3), 3)
    assert sorted(sizes) == [1, 2, 4, 6]


def test_a_stop_token_ends_its_sequence_alone(net, config):
    free = decode.complete(served(net, config), PROMPTS, 6)
    stop = free[0][2]
    cut = [t[: t.index(stop) + 1] if stop in t else t for t in free]
    assert decode.complete(served(net, config, stops=[stop]), PROMPTS, 6) == cut


@pytest.mark.parametrize("value", ["", "int4w", "int8"])
def test_unstacked_layers_are_the_same_model(config, value):
    words = [*WORDS, f"quantization={value}", "quantize_kvcache=true"]
    config = settings.load(words)
    net = convert.in_memory(config, model.create(section(config, Model)))
    codec, prompts = data.tokenizer(config), ["a longer prompt", "x"]
    stacked = generating.generate(net, codec, config, prompts)
    apart = generating.generate(decode.unstack(net), codec, config, prompts)
    assert not net.decoder.scanned
    np.testing.assert_array_equal(stacked.tokens, apart.tokens)


def test_no_weight_is_copied_in_a_step(config):
    """Each layer's matmuls read an argument of the program, not a slice of one."""
    net = decode.unstack(model.create(section(config, Model)))
    server = served(net, config)
    arguments = (server._weights, server._slots, server._seed, 4)
    text = server._program.go_on.lower(*arguments).as_text()
    weights = {tuple(x.shape) for x in server._weights if x.ndim == 2}
    shapes = ["x".join(map(str, s)) for s in weights]
    sliced = [
        line
        for line in text.splitlines()
        if "dynamic_slice" in line and any(f"x{s}x" in line for s in shapes)
    ]
    assert not sliced


@pytest.mark.parametrize("name", ["int2", "uint2", "int1"])
def test_codes_of_two_bits_are_joined(name):
    """XLA has no concatenation of them on a CPU."""
    rule = {"weight_qtype": name, "tile_size": 16, "op_names": ("dot_general",)}
    if name == "uint2":
        rule["weight_calibration_method"] = "minmax"
    config = dataclasses.replace(settings.load(WORDS), quant=(rule,))
    net = convert.in_memory(config, model.create(section(config, Model)))
    apart = decode.complete(served(nnx.clone(net), config), PROMPTS, 6)
    net = decode.prepare(net)
    assert getattr(net.decoder.layers, "0").self_attention.query.widths
    assert decode.complete(served(net, config), PROMPTS, 6) == apart


# What may be done to a whole weight: handing it on, seeing its bytes, multiplying.
HARMLESS = {
    "while",
    "return",
    "reshape",
    "bitcast_convert",
    "custom_call",
    "dot_general",
}
BY_KERNELS = ["tiny", "emb_dim=256", "mlp_dim=512", "head_dim=64", "num_query_heads=4"]
BY_KERNELS += ["num_kv_heads=4", "num_decoder_layers=2"]
BY_KERNELS += ["dtype=bfloat16", "weight_dtype=bfloat16"]


@pytest.mark.parametrize(
    "words",
    [
        ["quantization="],
        ["quantization=", "scan_layers=false"],
        ["quantization=int8w"],
        ["quantization=int4w"],
        ["quant=[{weight_qtype: e4m3}]"],
        ["quant=[{weight_qtype: nf4, tile_size: 64}]"],
        ["quant=[{weight_qtype: mxfp4}]", "scan_layers=false"],
    ],
    ids=str,
)
def test_a_step_for_cuda_reads_weights_as_they_lie(words):
    """No whole weight of a layer is sliced, cast, transposed or decoded by XLA."""
    config = settings.load([*BY_KERNELS, *words])
    m = section(config, Model)
    with pretended("h200"):
        net = decode.prepare(convert.in_memory(config, model.create(m)))
        server = decode.Server(net, m, slots=2, length=32)
        arguments = (server._weights, server._slots, server._seed, 4)
        traced = server._program.go_on.trace(*arguments)
        with pretend_gpu():
            text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "gpu.triton" in text  # attention at least
    assert ("mosaic_gpu" in text or "weight" in text) or words[0] == "quantization="
    for line in text.splitlines():
        op = re.search(r"stablehlo\.(\w+)", line)
        if op and re.search(r"[<x](256x768|256x1024|512x256|256x256)x", line):
            assert op[1] in HARMLESS, line[:300]


@pytest.mark.parametrize("value", ["int8w", "int8"])
def test_a_step_for_cuda_hands_over_what_its_matmuls_leave(value):
    """At 32 rows Hopper's kernels leave two parts of a sum, int8's scales of rows too: they go
    to the kernels that come next, and XLA adds up nothing of that size. The sides of the MLP are
    whole sums, which gate each other where no scales of rows are to come; what is not used has
    no effect, so that XLA takes it out."""
    words = [
        "tiny",
        "emb_dim=1024",
        "mlp_dim=8192",
        "head_dim=128",
        "num_query_heads=4",
    ]
    words += ["num_kv_heads=2", "num_decoder_layers=1", "dtype=bfloat16"]
    words += ["weight_dtype=bfloat16", f"quantization={value}"]
    words += ["use_qwix_quantization=true"] if value == "int8" else []
    config = settings.load(words)
    m = section(config, Model)
    with pretended("h200"):
        net = decode.prepare(convert.in_memory(config, model.create(m)))
        server = decode.Server(net, m, slots=32, length=32)
        arguments = (server._weights, server._slots, server._seed, 4)
        traced = server._program.go_on.trace(*arguments)
        with pretend_gpu():
            text = traced.lower(lowering_platforms=("cuda",)).as_text()
    calls = [line for line in text.splitlines() if "gpu.triton" in line]
    takes = lambda name, shape: any(f'name = "{name}"' in x and shape in x for x in calls)  # fmt: skip
    assert takes("add_norm", "16x32x1024xf32")
    matmuls = [x for x in text.splitlines() if "@mosaic_gpu" in x]
    gated = [x for x in matmuls if x.endswith("-> tensor<1x32x8192xbf16>")]
    assert len(gated) == (value == "int8w")
    assert not any("has_side_effect = true" in x for x in matmuls)
    assert takes("write_cache", "2x32x8x128xf32")


def test_narrow_scales_are_widened_once_for_hopper(key):
    """nvfp4 with scales in e4m3, as files hold them: cast when a model is prepared."""
    config = settings.load(
        [*WORDS, "quant=[{weight_qtype: nvfp4}]", "scan_layers=false"]
    )
    m = section(config, Model)
    net = convert.in_memory(config, model.create(m))
    e4m3 = lambda path, x: path[-2:] == ("array", "scale")
    scales = [
        (path, x.replace(x[...].astype(jnp.float8_e4m3fn)))
        for path, x in nnx.to_flat_state(nnx.state(net, nnx.Param))
        if e4m3(path, x)
    ]
    nnx.update(net, nnx.from_flat_state(scales))
    tokens = jax.random.randint(key, (2, 8), 0, 256)
    want = logits(net, tokens)
    with pretended("h200"):
        net = decode.prepare(net)
    kinds = {
        x.dtype.name
        for path, x in nnx.to_flat_state(nnx.state(net, nnx.Param))
        if e4m3(path, x)
    }
    assert kinds == {"bfloat16"}
    np.testing.assert_allclose(logits(net, tokens), want, atol=1e-5)


# What is asked for -> whether query, key and value, and both sides of the MLP, become one.
JOINED = {
    "quantization=": (True, True),
    "quantization=int4w": (True, True),
    "attention_bias=qkv": (True, True),
    "quant=[{module_path: .*value, weight_qtype: int8}, {weight_qtype: int4}]": (False, True),
    "quant=[{module_path: .*wi_0, weight_qtype: int8, act_qtype: int8}, {weight_qtype: int8}]": (True, False),
}  # fmt: skip


@pytest.mark.parametrize("words", JOINED)
def test_weights_of_the_same_rows_are_joined_unless_that_changes_something(words, key):
    config = settings.load([*WORDS, words])
    net = convert.in_memory(config, model.create(section(config, Model), seed=1))
    apart = decode.unstack(net)
    tokens = jax.random.randint(key, (2, 8), 0, 256)
    want = logits(apart, tokens)
    joined = decode.prepare(apart)
    first = getattr(joined.decoder.layers, "0")
    rows = first.self_attention.query, first.mlp.wi_0
    assert tuple(x.widths is not None for x in rows) == JOINED[words]
    # A sum that is rounded otherwise may move an activation's code by 1.
    near = 2e-2 if "act_qtype" in words else 1e-5
    np.testing.assert_allclose(logits(joined, tokens), want, atol=near)


@pytest.mark.parametrize(
    ("words", "is_woven"),
    [
        (["quantization=int4w"], True),
        (["quantization=int8", "use_qwix_quantization=true"], True),
        (["quantization="], False),  # XLA multiplies
        (["quantization=int8w", "mlp_activation=clipped_silu"], False),  # no PTX
        (["quantization=int8w", "mlp_bias=true"], False),
    ],
    ids=str,
)
def test_sides_of_an_mlp_are_woven_for_a_kernel_that_gates(words, is_woven, key):
    config = settings.load([*WORDS, "mlp_dim=384", *words])
    net = convert.in_memory(config, model.create(section(config, Model), seed=1))
    apart = decode.unstack(net)
    tokens = jax.random.randint(key, (2, 8), 0, 256)
    want = logits(apart, tokens)
    with pretended("h200"):
        joined = decode.prepare(apart)
    assert getattr(joined.decoder.layers, "0").mlp.wi_0.is_woven == is_woven
    np.testing.assert_allclose(logits(joined, tokens), want, atol=2e-2)


def test_a_model_under_rules_of_the_users_own(net, config, key):
    """A QuantizationRule has no recipe, which attention asks the rule of its matmuls for."""
    tokens = jax.random.randint(key, (2, 4), 0, 256)
    provider = mt.PtqProvider([mt.QuantizationRule(weight_qtype="int8")])
    served_net = mt.quantize_model(nnx.clone(net), provider, tokens)
    assert decode.complete(served(served_net, config), [[1, 2, 3]], 2)


MISTAKES = {
    "too long": (lambda s: s.prefill({0: [1] * 30}, 8), "do not fit a cache of 32"),
    "empty": (lambda s: s.prefill({0: []}, 8), "prompt is empty"),
    "no such slot": (lambda s: s.prefill({7: [1]}, 8), "slot 7 is not free"),
    "no token": (lambda s: s.prefill({0: [1, 999]}, 8), "token \\[999\\] of a prompt"),
    "no whole token": (
        lambda s: s.prefill({0: [1.5]}, 8),
        "token \\[1.5\\] of a prompt",
    ),
    "nothing": (lambda s: s.prefill({0: [1]}, 0), "prefill makes the first token"),
    "half a token": (lambda s: s.prefill({0: [1]}, 2.5), "prefill makes the first"),
    "a text": (
        lambda s: s.prefill({0: "abc"}, 8),
        "'abc' is no list of tokens: encode",
    ),
    "two lists": (lambda s: s.prefill({0: [[1], [2]]}, 8), "is no list of tokens"),
    "no step": (lambda s: s.step(0), "a step makes one token at least"),
    "half a step": (lambda s: s.step(1.5), "a step makes one token at least"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes(net, config, mistake):
    act, message = MISTAKES[mistake]
    with pytest.raises(UsageError, match=message):
        act(served(net, config))


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        ((-1.0,), "temperature=-1.0: 0 or a number above"),
        ((float("nan"),), "temperature=nan"),
        ((1.0, -3), "top_k=-3: a whole number, 0 for all tokens"),
        ((1.0, 2.5), "top_k=2.5"),
        ((1.0, 0, 0.0), "top_p=0.0: a number above 0 and at most 1"),
        ((1.0, 0, 1.5), "top_p=1.5"),
        ((0.0, 5), "top_k=5 means nothing at temperature=0"),
        ((0.0, 0, 0.5), "top_p=0.5 means nothing at temperature=0"),
    ],
)
def test_no_way_to_draw(net, config, sampling, message):
    with pytest.raises(UsageError, match=message):
        served(net, config, sampling=decode.Sampling(*sampling))


@pytest.mark.parametrize("seed", [1.5, "one", 2**63, -(2**63) - 1])
def test_no_seed(net, config, seed):
    with pytest.raises(UsageError, match=f"seed={seed}: a whole number of 64 bits"):
        served(net, config, seed=seed)


def test_nothing_is_begun_that_cannot_end(net, config):
    """Of several prompts one is too long, or a sequence is under way that is not theirs."""
    server, heard = served(net, config, slots=1), []
    hear = lambda number, tokens: heard.append(number)
    with pytest.raises(UsageError, match="40 tokens and 4 new ones do not fit"):
        decode.complete(server, [[1], [2] * 40], 4, hear)
    assert not heard and server.free == [0]
    with pytest.raises(UsageError, match="count=0: a step makes one token at least"):
        decode.complete(server, [[1]], 4, hear, count=0)
    assert not heard and server.free == [0]
    server.prefill({0: [1]}, 4)
    with pytest.raises(UsageError, match="sequences under way"):
        decode.complete(server, [[2]], 4, hear)
    assert not heard and len(server.step(4)[0]) == 3


def test_no_prompts_are_no_work_and_no_such_cache_is_refused(net, config):
    assert served(net, config).prefill({}, 8) == {}
    for cache_format in (("int2", "dkv"), ("int8", "d"), "int8"):
        with pytest.raises(UsageError, match="one of int8, int4, fp8, and what shares"):
            served(net, config, cache_format=cache_format)


def test_a_stop_that_is_no_token(net, config):
    for stop in (100000, -1, 1.5, "x"):
        with pytest.raises(UsageError, match=f"{stop} is none of the model's"):
            served(net, config, stops=[stop])
    bad = settings.load([*WORDS, "stop=[two words]"])
    codec = data.tokenizer(bad)
    with pytest.raises(UsageError, match=r"stop='two words' is 9 tokens.*stop=\['s'\]"):
        generating.stop_tokens(bad, codec)
    letter = dataclasses.replace(bad, stop=("\xe9",))  # two bytes, of which none is one
    with pytest.raises(UsageError, match="2 tokens of byte, and a stop is one\\.$"):
        generating.stop_tokens(letter, codec)
    with pytest.raises(UsageError, match="stop='' is no token of byte"):
        generating.stop_tokens(dataclasses.replace(bad, stop=("",)), codec)
    guesses = dataclasses.replace(
        codec, encode=lambda text: [0]
    )  # all is unknown to it
    with pytest.raises(UsageError, match="stop='two words' is no token of byte"):
        generating.stop_tokens(bad, guesses)


def test_no_room_for_a_cache(net, config, monkeypatch):
    """One layer has 2 x 32 numbers a token in float32, and there are two."""
    free = 512 * 100
    monkeypatch.setattr(room, "bytes_free", lambda: free)
    m = section(config, Model)
    make = lambda **options: decode.Server(net, m, **options)
    needs = 4 * 2 * 2 * m.num_kv_heads * m.head_dim
    tokens = free // needs
    with pytest.raises(UsageError) as error:
        make(slots=4, length=tokens // 2)
    assert f"decode_slots=2, or {tokens // 4:,} tokens each" in str(error.value)
    with pytest.raises(UsageError, match=f"What would fit: {tokens:,} tokens, prompt"):
        make(slots=1, length=tokens + 1)
    make(slots=1, length=tokens)
    make(slots=1, length=tokens + 1, check_memory=False)
