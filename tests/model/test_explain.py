"""Every contraction once, with its true FLOPs; and for those left alone the reason."""

import pathlib
import re
import time
import types
import unittest.mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from jax.sharding import Mesh, PartitionSpec

import midtread as mt
from midtread.model import operands
from tests.model import transformers as t

GOLDEN = pathlib.Path(__file__).parents[1] / "golden"
TOKENS = jax.ShapeDtypeStruct((t.BATCH, t.TOKENS), jnp.int32)
QT = [
    mt.QtRule(module_path="head"),
    mt.QtRule(
        module_path="layers/(q|k|v|experts|routed)|",
        weight_qtype="int8",
        act_qtype="int8",
        bwd_qtype="fp8",
    ),
]
PTQ = [mt.QuantizationRule(weight_qtype="int4", tile_size=8)]
PROVIDERS = {"qt": mt.QtProvider(QT), "ptq": mt.PtqProvider(PTQ)}
MODELS = {
    "linen": t.LinenTransformer,
    "nnx": lambda: nnx.eval_shape(lambda: t.Transformer(nnx.Rngs(0))),
}


@pytest.fixture(scope="module")
def coverage():
    made = {}

    def get(kind, provider):
        if (kind, provider) not in made:
            model = MODELS[kind]()
            made[kind, provider] = mt.explain(model, PROVIDERS[provider], TOKENS)
        return made[kind, provider]

    return get


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("kind", MODELS)
def test_the_table(kind, provider, coverage):
    """Linen and NNX say the same of the same transformer."""
    expected = (GOLDEN / f"explain_{provider}.txt").read_text()
    assert f"{coverage(kind, provider)}\n" == expected


@pytest.mark.parametrize("kind", MODELS)
def test_flops_and_totals(kind, coverage):
    """Against arithmetic: under scan, vmap and both."""
    found = coverage(kind, "qt")
    rows = {(r.path, r.op): r for r in found.rows}
    tokens, w, layers = t.BATCH * t.TOKENS, t.WIDTH, t.LAYERS
    projection = 2 * tokens * w * w * layers
    scores = 2 * t.BATCH * t.TOKENS**2 * w * layers
    expected = {
        ("layers/q", "dot_general0"): projection,
        ("layers/experts", "dot_general0"): projection * t.EXPERTS,
        ("layers/routed", "ragged_dot0"): projection,
        ("layers", "einsum0"): scores,
        ("layers", "einsum1"): scores,
        ("head", "dot_general0"): 2 * tokens * w * t.VOCAB,
        ("", "dot_general0"): 2 * t.TOKENS**3,
    }
    assert {k: rows[k].flops for k in expected} == expected
    low = projection * (3 + t.EXPERTS + 1)
    whole = low + 2 * scores + 2 * tokens * w * t.VOCAB + 2 * t.TOKENS**3
    total = found.totals
    assert (total.quantized_flops, total.flops) == (low, whole)
    assert (total.quantized_backward_flops, total.backward_flops) == (
        2 * low,
        2 * whole,
    )
    weights = 4 * (3 * layers * w * w + 2 * layers * t.EXPERTS * w * w)
    others = 4 * (2 * t.VOCAB * w + t.VOCAB + layers * (t.EXPERTS + 2) * w)
    assert total.quantized_weight_bytes == weights
    assert total.weight_bytes == weights + others


def test_formats_of_all_three_passes(coverage):
    row = next(r for r in coverage("nnx", "qt").rows if r.path == "layers/q")
    assert (row.fwd, row.dlhs, row.drhs) == (
        ("int8", "int8"),
        ("e4m3", "int8"),
        ("int8", "e4m3"),
    )


def test_the_kernel_is_named_and_opaque(coverage):
    (row,) = (r for r in coverage("linen", "qt").rows if r.is_opaque)
    assert "doubling_kernel" in row.reason and row.flops == 0


@pytest.mark.parametrize(
    "rules, text",
    [
        ([mt.QtRule(module_path="haed", weight_qtype="int8")], r"near it: \['head'"),
        ([{}, {"module_path": "head"}], "rule 1.*rule 0 comes first"),
        ([{"module_path": "head", "op_names": ("einsum",)}], "op_names=.'einsum'"),
    ],
)
def test_a_rule_that_matches_nothing_is_an_error(rules, text):
    with pytest.raises(ValueError, match=text):
        mt.explain(t.LinenTransformer(), mt.QtProvider(rules), TOKENS)


class Odd(nn.Module):
    @nn.compact
    def __call__(self, x):
        w = self.param("w", nn.initializers.ones, (4, 4))
        with_jit = jax.jit(lambda x: x @ jnp.ones((4, 4)))
        x = with_jit(with_jit(x))
        x = mt.disable_interceptions(lambda x: x @ jnp.ones((4, 4)))(x)
        x = jax.lax.cond(x[0, 0] > 0, lambda x: x @ w, lambda x: x, x)
        return jax.lax.while_loop(lambda x: x[0, 0] < 0, lambda x: x @ w, x)


def test_reasons_and_odd_places():
    rules = [mt.QtRule(weight_qtype="int8")]
    found = mt.explain(Odd(), mt.QtProvider(rules), jnp.ones((3, 4)))
    said = [(r.times, r.flops, r.reason.split(":")[0], r.note) for r in found.rows]
    assert said == [
        (2, 192, "rule 0 quantizes weights, and neither operand is one", ""),
        (1, 96, "not intercepted", ""),
        (1, 96, "", "in a branch, counted as if taken"),
        (1, 96, "", "in a loop of unknown length: one turn counted"),
    ]


LINALG = {
    "matmul": lambda x, w: jnp.linalg.matmul(x, w),
    "tensordot": lambda x, w: jnp.linalg.tensordot(x, w, axes=1),
    "multi_dot": lambda x, w: jnp.linalg.multi_dot([x, w]),
    "vecdot": lambda x, w: jnp.linalg.vecdot(x[:, None], w.T),
}


@pytest.mark.parametrize("multiply", LINALG.values(), ids=LINALG)
def test_linear_algebra_multiplies_codes(multiply):
    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x):
            return multiply(x, self.param("w", nn.initializers.normal(), (8, 8)))

    x = jax.random.normal(jax.random.key(0), (4, 8))
    provider = mt.PtqProvider([mt.QuantizationRule(weight_qtype="int8")])
    (row,) = mt.explain(Layer(), provider, x).rows
    assert row.fwd == ("f32", "int8") and not row.reason
    variables = Layer().init(jax.random.key(0), x)
    served, codes = mt.quantize_variables(Layer(), provider, variables, x)
    exact = multiply(x, mt.dequantize(codes["params"]["w"].array))
    np.testing.assert_allclose(served.apply(codes, x), exact, rtol=1e-5)


def test_providers_of_all_kinds():
    class Own(mt.QtProvider):
        def dot_general(self, *args, **kwargs):
            self._get_current_rule_and_op_id("dot_general")
            return jax.lax.dot_general(*args, **kwargs) / 2

    x = jnp.ones((8, 16))
    int8 = {"weight_qtype": "int8"}
    explain = lambda provider: mt.explain(nn.Dense(4), provider, x).rows
    (row,) = explain(Own([int8]))
    assert row.reason == "rule 0 matches, but Own ran it in its own way"
    (row,) = explain(
        mt.DelayedFp8Provider([{"weight_qtype": "fp8", "act_qtype": "fp8"}])
    )
    assert row.fwd == ("e4m3", "e4m3") and row.dlhs == ("e5m2", "e4m3")
    lora = explain(mt.LoraProvider(rank=2, alpha=1.0, weight_qtype="nf4"))
    assert [r.fwd for r in lora] == [("f32", "nf4"), *[("f32", "f32")] * 2]
    recipe = mt.recipe("deepseek_fp8")
    (row,) = explain(mt.QtProvider([{"recipe": recipe}]))
    assert row.fwd == ("e4m3/128", "e4m3/128x128") and row.dlhs[0] == "e4m3/128"


def test_convolutions_and_functions():
    conv = nn.Conv(6, (3, 3), feature_group_count=2, strides=2)
    rules = [{"weight_qtype": "int8", "act_qtype": "int8"}]
    (row,) = mt.explain(conv, mt.QtProvider(rules), jnp.ones((2, 8, 8, 4))).rows
    assert row.is_quantized and row.flops == 2 * (2 * 4 * 4 * 6) * 3 * 3 * 2

    def model(params, x):
        with jax.named_scope("mlp"):
            return x @ params["w"] @ params["codes"]

    params = {"w": jnp.ones((4, 4)), "codes": mt.quantize(jnp.ones((4, 4)), "int8")}
    found = mt.explain(model, mt.QtProvider(rules), params, jnp.ones((2, 4)))
    assert [(r.path, r.weight) for r in found.rows] == [
        ("mlp", "['w']"),
        ("mlp", "['codes']"),
    ]
    assert found.totals.weight_share == 1


DOT, CONV = nn.Dense(128), nn.Conv(16, (3, 3))


@pytest.mark.parametrize(
    "layer, qtype",
    [
        *((DOT, qtype) for qtype in ("int8", "fp8", "e5m2", "int4", "nf4")),
        *((CONV, qtype) for qtype in ("fp8", "e5m2")),
    ],
)
def test_it_runs_as_the_compiled_program_does(layer, qtype):
    """What a CPU emulates has a star, and the dtypes that `prove` reads in the HLO."""
    x = jnp.ones((2, 8, 8, 256))
    provider = mt.QtProvider([{"weight_qtype": qtype, "act_qtype": qtype}])
    found = mt.explain(layer, provider, x)
    model = mt.quantize_model(layer, provider)
    params = jax.eval_shape(model.init, jax.random.key(0), x)
    (ran,) = {e.ran for e in mt.prove(jax.jit(model.apply), params, x).contractions}
    (row,) = found.rows
    assert row.runs_as.replace("int", "s") == " x ".join(ran)
    emulated = ran != ("s8", "s8") or qtype == "int4"
    assert row.is_emulated == emulated
    assert ("* 1 contraction emulated" in str(found)) == emulated


@pytest.mark.parametrize(
    "platform, capability, runs",
    [
        ("gpu", "8.0", "f16 x f16"),
        ("gpu", "8.9", "e4m3 x e4m3"),
        ("gpu", "10.0", "e4m3 x e4m3"),
        ("gpu", "gfx942", "e4m3 x e4m3"),
        ("tpu", None, "e4m3 x e4m3"),
    ],
)
def test_fp8_is_emulated_before_ada(platform, capability, runs):
    device = types.SimpleNamespace(platform=platform, compute_capability=capability)
    fp8 = [{"weight_qtype": "fp8", "act_qtype": "fp8"}]
    with unittest.mock.patch.object(operands, "_device", lambda: device):
        (row,) = mt.explain(nn.Dense(8), mt.QtProvider(fp8), jnp.ones((4, 8))).rows
    assert (row.runs_as, row.is_emulated) == (runs, runs == "f16 x f16")


@pytest.mark.parametrize("rules", [mt.QtProvider, mt.PtqProvider])
@pytest.mark.parametrize("size, text", [(256, "int4/2x128"), (64, "int4/64")])
def test_a_tile_is_a_run_of_all_summed_axes(rules, size, text):
    layer, x = nn.DenseGeneral(6, axis=(-2, -1)), jnp.ones((8, 32, 128))
    provider = rules([{"weight_qtype": "int4", "tile_size": size}])
    (row,) = mt.explain(layer, provider, x).rows
    assert row.fwd == ("f32", text)


def test_tiles_of_all_three_passes():
    """Each along what its own matmul sums."""
    rule = mt.QtRule(
        weight_qtype="int4", act_qtype="int8", bwd_qtype="int8", tile_size=64
    )
    layer = nn.DenseGeneral(256, axis=(-2, -1))
    (row,) = mt.explain(layer, mt.QtProvider([rule]), jnp.ones((128, 32, 128))).rows
    assert row.fwd == ("int8/64", "int4/64")
    assert row.dlhs == ("int8/64", "int4/64")
    assert row.drhs == ("int8/64", "int8/64")


@pytest.mark.parametrize("qtype", ["int4", None])
@pytest.mark.parametrize("kind", MODELS)
def test_adapters_are_not_the_weight(kind, qtype):
    """Their rows are theirs, under scan and vmap too, and the weight below stays what it is."""
    provider = mt.LoraProvider(rank=2, alpha=8.0, weight_qtype=qtype)
    found = mt.explain(MODELS[kind](), provider, TOKENS)
    adapters = [r for r in found.rows if r.is_adapter]
    w, layers = t.WIDTH, t.LAYERS
    sizes = {r.weight: r.weight_bytes for r in adapters}
    stack = 4 * layers * w * 2
    assert sizes == {
        **{f"layers/{x}/kernel_lora_{y}": stack for x in "qkv" for y in "ab"},
        "layers/experts/kernel_lora_a": stack * t.EXPERTS,
        "layers/experts/kernel_lora_b": stack * t.EXPERTS,
        "head/kernel_lora_a": 4 * w * 2,
        "head/kernel_lora_b": 4 * 2 * t.VOCAB,
    }
    assert all(r.note == "adapter, in float" and not r.reason for r in adapters)
    assert not set(adapters) & set(found.left_alone)
    base = mt.explain(
        MODELS[kind](), mt.PtqProvider([{"weight_qtype": qtype}]), TOKENS
    ).totals
    total = found.totals
    assert total.weight_share == base.weight_share and (qtype is None) == (
        base.weight_share == 0
    )
    assert (total.adapters, total.left_alone) == (len(adapters), base.left_alone)
    assert f"{base.left_alone} left alone, 10 of adapters" in str(found)


def test_adapters_of_einsums_and_convolutions():
    class Both(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.Conv(8, (3, 3), name="conv")(x)
            w = self.param("w", nn.initializers.ones, (8, 8))
            return jnp.einsum("...d,de->...e", x, w)

    for qtype in ("int8", None):
        provider = mt.LoraProvider(rank=4, alpha=8.0, weight_qtype=qtype)
        rows = mt.explain(Both(), provider, jnp.ones((2, 8, 8, 8))).rows
        assert [r.weight for r in rows] == [
            *("conv/kernel", "conv/kernel_lora_a", "conv/kernel_lora_b"),
            *("w", "w_lora_a", "w_lora_b"),
        ]


def test_a_trace_that_two_modules_share():
    """JAX traces `inner` once; each module has its own row, and its own weight."""
    inner = jax.jit(lambda x, w: x @ w)

    class Leaf(nn.Module):
        @nn.compact
        def __call__(self, x):
            return inner(x, self.param("w", nn.initializers.ones, (4, 4)))

    class Two(nn.Module):
        @nn.compact
        def __call__(self, x):
            return Leaf(name="b")(Leaf(name="a")(x))

    found = mt.explain(
        Two(), mt.QtProvider([{"weight_qtype": "int8"}]), jnp.ones((2, 4))
    )
    assert [(r.path, r.weight, r.times, r.flops) for r in found.rows] == [
        ("a", "a/w", 1, 64),
        ("b", "b/w", 1, 64),
    ]


def test_shapes_inside_shard_map_are_those_of_one_shard():
    mesh = Mesh(np.array(jax.devices()), ("data",))
    spec = PartitionSpec("data")

    def model(params, x):
        each = lambda x, w: x @ w
        return jax.shard_map(
            each, mesh=mesh, in_specs=(spec, PartitionSpec()), out_specs=spec
        )(x, params["w"])

    rules = [{"weight_qtype": "int8", "act_qtype": "int8"}]
    args = {"w": jnp.ones((4, 4))}, jnp.ones((16, 4))
    (row,) = mt.explain(model, mt.QtProvider(rules), *args).rows
    assert (row.times, row.flops) == (8, 2 * 16 * 4 * 4)


def test_a_table_that_is_looked_up():
    rules = [{"op_names": ("take",), "weight_qtype": "int4"}]
    ids = jnp.zeros((2, 3), jnp.int32)
    for provider in (mt.QtProvider, mt.PtqProvider):
        found = mt.explain(nn.Embed(8, 4), provider(rules), ids)
        (row,) = found.rows
        assert row.is_quantized and row.fwd[0] == "int4" and row.rule == 0
        assert found.totals.weight_share == 1


def test_the_model_is_left_as_it_was(coverage):
    """Explaining first changes nothing: not the provider, not jit's caches."""
    provider, x = mt.QtProvider([{"weight_qtype": "int8"}]), jnp.ones((2, 4))
    inner = jax.jit(lambda x, w: x @ w)

    class Nested(nn.Module):
        @nn.compact
        def __call__(self, x):
            return inner(x, self.param("w", nn.initializers.ones, (4, 4)))

    model = mt.quantize_model(Nested(), provider)
    before = str(jax.make_jaxpr(model.init)(jax.random.key(0), x))
    mt.explain(Nested(), provider, x)
    assert str(jax.make_jaxpr(model.init)(jax.random.key(0), x)) == before
    assert "midtread#" not in before


def test_671_billion_parameters_in_seconds():
    """DeepSeek-V3's shapes, unrolled, abstract: no array is made."""

    class Block(nnx.Module):
        def __init__(self, experts, rngs):
            linear = lambda i, o: nnx.Linear(
                i, o, use_bias=False, param_dtype=jnp.bfloat16, rngs=rngs
            )
            self.q, self.kv, self.out = (
                linear(7168, 24576),
                linear(7168, 576),
                linear(16384, 7168),
            )
            init = nnx.initializers.normal()
            shape = lambda *s: nnx.Param(init(rngs.params(), s, jnp.bfloat16))
            self.up, self.down = (
                shape(experts, 7168, 4096),
                shape(experts, 2048, 7168),
            )

        def __call__(self, x):
            x = x + self.out(self.q(x)[:, :16384]) + self.kv(x).sum(-1, keepdims=True)
            sizes = jnp.full((len(self.up[...]),), 1, jnp.int32)
            h = jax.lax.ragged_dot(x, self.up[...], sizes)[:, :2048]
            return x + jax.lax.ragged_dot(h, self.down[...], sizes)

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.layers = nnx.List([Block(256, rngs) for _ in range(58)])

        def __call__(self, x):
            for layer in self.layers:
                x = layer(x)
            return x

    model = nnx.eval_shape(lambda: Model(nnx.Rngs(0)))
    x = jax.ShapeDtypeStruct((4096, 7168), jnp.bfloat16)
    live = len(jax.live_arrays())
    start = time.monotonic()
    rules = [{"weight_qtype": "fp8", "act_qtype": "fp8", "bwd_qtype": "fp8"}]
    found = mt.explain(model, mt.QtProvider(rules), x)
    assert time.monotonic() - start < 30
    assert found.totals.weight_bytes > 1.2e12 and found.totals.flops_share == 1
    assert len(found.rows) == 58 * 5 and len(str(found).splitlines()) < 12
    assert len(jax.live_arrays()) <= live + 8


def test_the_page_about_it(capsys):
    """docs/explain.md: its code runs, and its table is what comes out."""
    text = (GOLDEN.parents[1] / "docs/explain.md").read_text()
    scope: dict = {}
    for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        with jax.numpy_dtype_promotion("standard"):  # Flax's norms mix dtypes
            exec(compile(block, "docs/explain.md", "exec"), scope)  # noqa: S102
    table, kernels = re.findall(r"```text\n(.*?)\n```", text, re.DOTALL)
    assert str(scope["found"]) == table
    assert kernels.removesuffix("...") in str(scope["on_h200"])
    assert (
        "paths near it: ['layers/mlp/gate', 'layers/mlp/up" in capsys.readouterr().out
    )


@pytest.mark.parametrize("provider", [mt.QtProvider, mt.PtqProvider])
def test_a_layer_of_a_stack_is_a_weight(provider):
    class Stack(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(jnp.ones((3, 8, 8)))

        def __call__(self, x):
            for i in range(3):
                x = x @ self.w[i]
            return x

    found = mt.explain(Stack(), provider([{"weight_qtype": "int8"}]), jnp.ones((2, 8)))
    assert [(row.weight, row.fwd[1]) for row in found.rows] == [("w", "int8")] * 3
