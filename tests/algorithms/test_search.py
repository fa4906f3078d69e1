"""Which weight hurts, and which format each should have."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import midtread as mt
from midtread.algorithms.program import trace


class Model(nnx.Module):
    """`rough` has one huge weight, which costs all others their resolution."""

    def __init__(self):
        self.fine = nnx.Linear(16, 16, rngs=nnx.Rngs(0))
        self.rough = nnx.Linear(16, 16, rngs=nnx.Rngs(1))
        self.last = nnx.Linear(16, 4, rngs=nnx.Rngs(2))
        kernel = self.rough.kernel
        kernel[...] = kernel[...].at[0].set(9.0)

    def __call__(self, x):
        return self.last(nnx.tanh(self.rough(nnx.tanh(self.fine(x)))))


@pytest.fixture(scope="module")
def judged():
    model, x = Model(), jax.random.normal(jax.random.key(0), (64, 16))
    return model, [x]


def test_the_weight_that_hurts_is_named(judged, tmp_path):
    model, batches = judged
    found = mt.sensitivity(model, batches, "int4")
    assert found.choices[0].weight == "rough/kernel"
    rule = mt.PtqProvider(
        [mt.QuantizationRule(module_path="rough", weight_qtype="int4")]
    )
    alone = mt.quantize_model(model, rule, batches[0])
    gap = np.asarray(alone(batches[0]) - model(batches[0]))
    whole = np.asarray(model(batches[0]))
    np.testing.assert_allclose(
        found.choices[0].error, np.sum(gap**2) / np.sum(whole**2), rtol=1e-3
    )
    (tmp_path / "rules.yml").write_text(found.to_yaml())
    loaded = mt.load_rules(str(tmp_path / "rules.yml"))
    assert [r.module_path for r in loaded] == [r.module_path for r in found.rules]
    assert "rough/kernel" in str(found)


def test_bisect_leaves_the_culprit_in_float(judged):
    model, batches = judged
    found = mt.bisect(model, batches, "int4", share=0.3)
    assert [c.weight for c in found.choices] == ["rough/kernel"]
    rest = mt.QuantizationRule(weight_qtype="int4")
    mended = mt.quantize_model(model, mt.PtqProvider([*found.rules, rest]), batches[0])
    broken = mt.quantize_model(model, mt.PtqProvider([rest]), batches[0])
    error = lambda m: float(np.sum(np.square(m(batches[0]) - model(batches[0]))))
    assert error(mended) <= 0.71 * error(broken)


def test_bisect_finds_what_sets_two_models_apart(judged):
    model, batches = judged
    other = nnx.clone(model)
    other.fine.kernel[...] = other.fine.kernel[...] * 1.5
    other.last.kernel[...] = other.last.kernel[...] * 1.0001
    quantized = mt.quantize_model(
        other,
        mt.PtqProvider([mt.QuantizationRule(module_path="last", weight_qtype="int8")]),
        batches[0],
    )
    for changed in (other, quantized):
        table = mt.bisect(model, batches, other=changed, share=0.9)
        assert [c.weight for c in table.choices] == ["fine/kernel"]
    with pytest.raises(ValueError, match="another model or with a format"):
        mt.bisect(model, batches, "int4", other=other)
    with pytest.raises(ValueError, match="not of one structure"):
        mt.bisect(model, batches, other=nnx.Linear(16, 4, rngs=nnx.Rngs(0)))


def test_bytes_are_a_budget_too(judged):
    model, batches = judged
    table = mt.allocate(model, batches, ["int4", "int8"], nbytes=600)
    assert table.bits * sum(c.size for c in table.choices) <= 600 * 8
    assert {c.format for c in table.choices} == {"int4", "int8"}
    with pytest.raises(ValueError, match="nbytes=100 are too few"):
        mt.allocate(model, batches, ["int4", "int8"], nbytes=100)
    with pytest.raises(ValueError, match="needs one budget"):
        mt.allocate(model, batches, bits=5, nbytes=900)


def test_milliseconds_are_a_budget_by_what_was_measured(judged):
    model, batches = judged
    on = {"device": "NVIDIA H200", "rows": 16}
    speeds = {"int4": 2.18, "int8": 1.61}  # x bfloat16, 16 rows: kernels/measured.py
    time = lambda name, size: 1000 * 2 * size / 4.8e12 / speeds[name]
    sizes = [256, 256, 64]
    least, most = (sum(time(name, n) for n in sizes) for name in speeds)
    table = mt.allocate(
        model,
        batches,
        ["int4", "int8"],
        milliseconds=least + 0.5 * (most - least),
        **on,
    )
    spent = sum(time(c.format, c.size) for c in table.choices)
    assert least < spent <= least + 0.5 * (most - least)
    by_name = {c.weight: c.format for c in table.choices}
    assert by_name["rough/kernel"] == "int8" and "int4" in by_name.values()
    assert "ms a step of NVIDIA H200 with 16 rows" in str(table)
    for asked, message in (
        ({"milliseconds": least / 2, **on}, "milliseconds=.* are too few"),
        ({"milliseconds": 1}, "nothing was measured on cpu, only on NVIDIA H200"),
        ({"bits": 5, "device": "NVIDIA H200"}, "is for a budget in milliseconds"),
    ):
        with pytest.raises(ValueError, match=message):
            mt.allocate(model, batches, ["int4", "int8"], **asked)
    with pytest.raises(ValueError, match="no times of int3 weights were measured"):
        mt.allocate(model, batches, ["int3"], milliseconds=1, **on)


def test_bits_go_where_they_help_most(judged):
    model, batches = judged
    few = mt.allocate(model, batches, ["int4", "int8"], bits=8.1)
    assert few.bits <= 8.1
    by_name = {c.weight: c.format for c in few.choices}
    assert by_name["rough/kernel"] == "int8" and "int4" in by_name.values()
    with pytest.raises(
        ValueError, match=r"bits=3 are too few: the smallest of .* take"
    ):
        mt.allocate(model, batches, ["int4", "int8"], bits=3)
    mt.quantize_model(model, mt.PtqProvider(few.rules), batches[0])


def two_scopes(params, x):
    with jax.named_scope("mlp"):
        x = jnp.tanh(x @ params["fine"])
        x = jnp.tanh(x @ params["rough"])
    with jax.named_scope("head"):
        return x @ params["last"]


@pytest.fixture(scope="module")
def scopes(judged):
    model, batches = judged
    names = ("fine", "rough", "last")
    return {name: getattr(model, name).kernel[...] for name in names}, batches


def test_rules_name_the_scopes_of_a_function(scopes):
    """Rules know where a weight is used, not where it lies in the tree of parameters."""
    params, batches = scopes
    table = mt.sensitivity(two_scopes, batches, "int4", params=params)
    assert {rule.module_path for rule in table.rules} == {"mlp", "head"}
    made = mt.calibrate(
        two_scopes, mt.PtqProvider(table.rules), batches, algorithms=["round"], params=params
    )  # fmt: skip
    assert {row.name for row in made.report.rows} == set(params)


def test_what_rules_do_not_tell_apart_has_one_format(scopes):
    params, batches = scopes
    for bits in (6.1, 8, 11):
        table = mt.allocate(
            two_scopes, batches, ["int4", "int8"], bits=bits, params=params
        )
        said = {c.weight: c.format for c in table.choices}
        assert said["fine"] == said["rough"] and table.bits <= bits
        made = mt.calibrate(
            two_scopes, mt.PtqProvider(table.rules), batches, algorithms=["round"], params=params
        )  # fmt: skip
        assert {row.name: row.format for row in made.report.rows} == said
    found = mt.bisect(two_scopes, batches, "int4", share=0.3, params=params)
    assert {c.weight for c in found.choices} == {"fine", "rough"}
    assert "2 of 3 weights" in found.says


def test_bisect_of_functions_and_linen_models(scopes):
    params, batches = scopes
    changed = {**params, "last": params["last"] * 1.5}
    named = {"params": params, "other_params": changed}
    found = mt.bisect(two_scopes, batches, other=two_scopes, share=0.9, **named)
    assert [c.weight for c in found.choices] == ["last"]
    made = mt.calibrate(
        two_scopes,
        mt.PtqProvider([mt.QuantizationRule(module_path="head", weight_qtype="int3")]),
        batches,
        algorithms=["round"],
        params=params,
    )
    found = mt.bisect(
        two_scopes, batches, other=made.model, params=params, other_params=made.params
    )
    assert [c.weight for c in found.choices] == ["last"]
    model = nn.Dense(4)
    variables = model.init(jax.random.key(0), batches[0])
    with pytest.raises(ValueError, match="give other_params"):
        mt.bisect(model, batches, other=model, params=variables)


def test_weights_inside_loops_of_unknown_length_are_refused():
    class Looped(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(np.eye(4, dtype=np.float32))

        def __call__(self, x):
            w = self.w[...]
            return jax.lax.while_loop(lambda x: x.sum() < 9, lambda x: x @ w + 1, x)

    with pytest.raises(ValueError, match="inside of 'while'"):
        trace(Looped(), np.ones((2, 4), np.float32))


@pytest.mark.filterwarnings("ignore:rules that matched nothing")
def test_what_cannot_be_searched_is_refused(judged):
    model, batches = judged
    for budget in (float("nan"), "4"):
        with pytest.raises(ValueError, match="is no budget: give a number"):
            mt.allocate(model, batches, ["int4", "int8"], bits=budget)
    with pytest.raises(ValueError, match="batch 1 holds numbers that are not finite"):
        mt.sensitivity(model, [*batches, batches[0].at[0].set(np.nan)])
    with pytest.raises(ValueError, match="batch 0 is empty"):
        mt.bisect(model, [batches[0][:0]])
    for formats in ("int4", []):
        with pytest.raises(ValueError, match="give a list to choose from"):
            mt.allocate(model, batches, formats, bits=4)
    for search in (mt.sensitivity, mt.bisect):
        with pytest.raises(ValueError, match="tile 0 of axis summed must be above 0"):
            search(model, batches, "int4", 0)
    with pytest.raises(ValueError, match="tile 0 of axis summed must be above 0"):
        mt.allocate(model, batches, [("int4", 0)], bits=8)
    with pytest.raises(ValueError, match="a Linen model needs its variables"):
        mt.sensitivity(nn.Dense(4), batches)
    with pytest.raises(ValueError, match="no weight of this model meets a matmul"):
        mt.bisect(lambda p, x: p["scale"] * x, batches, params={"scale": np.ones(16)})
