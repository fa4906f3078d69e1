"""Calibration of whole models: what is collected, what comes out, what is refused."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import midtread as mt
from midtread.algorithms import collect, correct, gptq, program, smooth, stages
from midtread.algorithms.calibrate import CalibrationOptions, calibrate
from midtread.algorithms.resume import _described
from midtread.algorithms.weight import Axes, over_inputs
from midtread.numerics.spec import Spec

D, F = 16, 24
FLAT = CalibrationOptions(weigh="none", min_tokens=0.1)


def rules(**fields):
    return mt.PtqProvider([mt.QuantizationRule(weight_qtype="int4", **fields)])


class Mixed(nnx.Module):
    """One of each contraction, a scan over layers, and a jit inside."""

    def __init__(self, rngs):
        self.conv = nnx.Conv(3, D, (3, 3), rngs=rngs)
        self.layers = nnx.vmap(lambda rngs: nnx.Linear(D, D, rngs=rngs))(rngs.split(3))
        self.heads = nnx.Param(jax.random.normal(rngs.params(), (2, D, 8)))
        self.experts = nnx.Param(jax.random.normal(rngs.params(), (3, D, F)))

    def __call__(self, x):
        x = self.conv(x).reshape(-1, D)
        x = nnx.scan(
            lambda x, layer: jnp.tanh(layer(x)),
            in_axes=(nnx.Carry, 0),
            out_axes=nnx.Carry,
        )(x, self.layers)
        y = jnp.einsum("td,hde->the", x, self.heads[...])
        sizes = jnp.array([7, 9, len(x) - 16], jnp.int32)
        z = jax.lax.ragged_dot(x, self.experts[...], sizes)
        return y.sum((1, 2)), z


@pytest.fixture(scope="module")
def mixed():
    model = Mixed(nnx.Rngs(0))
    batches = [jax.random.normal(jax.random.key(i), (1, 8, 8, 3)) for i in range(2)]
    return model, batches


def gathered(model, batches, groups=1, loss=None):
    """{name: (site, statistics, token weights of the last batch)}."""
    found, floats = program.trace(model, batches[0])
    inputs = {}
    run = collect.gradient_weights(
        found, dict.fromkeys(range(len(found.sites)), groups), loss
    )
    for batch in batches:
        env = dict(found.constants)
        env |= {v: floats[path] for path, v in found.params.items()}
        env |= dict(zip(found.inputs, found.arrays(batch)))
        stages.evaluate(found.eqns, env)
        weights = run(floats, found.arrays(batch), batch, jax.random.key(0))
        for n, (site, held) in enumerate(zip(found.sites, found.marks)):
            x = env[found.eqns[held["input"]].invars[0]]
            sizes = None
            if "sizes" in held:
                sizes = env[found.eqns[held["sizes"]].outvars[0]]
            stats = collect.moments(site, x, None, sizes)
            before = inputs[site.name][1] if site.name in inputs else None
            inputs[site.name] = (site, collect.add(before, stats), weights[n])
    return inputs


def test_every_contraction_is_found_and_its_inputs_gathered(mixed):
    model, batches = mixed
    found = gathered(model, batches)
    assert list(found) == [
        "conv/kernel", *(f"layers/kernel[{i}]" for i in range(3)), "heads", "experts",
    ]  # fmt: skip
    stages = [site.stage for site, _, _ in found.values()]
    assert stages == [0, 1, 2, 3, 4, 4]

    seen = {"conv": 0, "heads": 0, "experts": 0}
    kernel = np.asarray(model.conv.kernel[...])
    for x in map(np.asarray, batches):
        padded = np.pad(x[0], ((1, 1), (1, 1), (0, 0)))
        windows = [
            padded[i : i + 3, j : j + 3].ravel() for i in range(8) for j in range(8)
        ]
        windows = np.stack(windows)
        seen["conv"] += windows.T @ windows
        h = windows @ kernel.reshape(-1, D) + np.asarray(model.conv.bias[...])
        for i in range(3):
            layer = jax.tree.map(lambda a, i=i: np.asarray(a[i]), nnx.to_pure_dict(nnx.state(model.layers)))  # fmt: skip
            h = np.tanh(h @ layer["kernel"] + layer["bias"])
        seen["heads"] += h.T @ h
        parts = np.split(h, [7, 16])
        seen["experts"] += np.stack([p.T @ p for p in parts])
    tol = {"rtol": 2e-4, "atol": 2e-4}
    H = {name: np.asarray(stats["H"]) for name, (_, stats, _) in found.items()}
    np.testing.assert_allclose(H["conv/kernel"][0, 0], seen["conv"], **tol)
    np.testing.assert_allclose(H["heads"][0, 0], seen["heads"], **tol)
    np.testing.assert_allclose(H["experts"][:, 0], seen["experts"], **tol)
    np.testing.assert_array_equal(found["experts"][1]["count"], [14, 18, 96])


def test_tokens_count_by_the_gradient_that_reaches_them(key):
    model = nnx.Linear(4, 6, use_bias=False, rngs=nnx.Rngs(0))
    x = jax.random.normal(key, (5, 4))
    slope = jax.random.normal(key, (5, 6))
    loss = lambda out, batch: jnp.sum(out * slope) + 0 * jnp.sum(batch)
    (_, _, weights) = gathered(model, [x], groups=2, loss=loss)["kernel"]
    wanted = np.sqrt(np.square(np.asarray(slope)).reshape(5, 2, 3).mean(-1))
    np.testing.assert_allclose(weights[0], wanted, rtol=1e-5)


def outputs_error(model, quantized, batch):
    pairs = zip(jax.tree.leaves(model(batch)), jax.tree.leaves(quantized(batch)))
    return sum(float(jnp.mean(jnp.square(a - b)) / jnp.mean(a**2)) for a, b in pairs)


def test_calibrated_models_are_nearer_to_the_float_one(mixed):
    model, batches = mixed
    made = calibrate(model, rules(), batches, options=FLAT)
    plain = mt.quantize_model(model, rules(), batches[0])
    near, far = (outputs_error(model, m, batches[0]) for m in (made.model, plain))
    assert near < 0.6 * far
    assert len(made.report.rows) == 6
    assert "6 weights by gptq" in str(made.report)
    assert isinstance(model.heads, nnx.Param)  # what was given stays as it was


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(4, name="down")(nn.tanh(nn.Dense(F, name="up")(x)))


class Nnx(nnx.Module):
    def __init__(self):
        self.up = nnx.Linear(D, F, rngs=nnx.Rngs(0))
        self.down = nnx.Linear(F, 4, rngs=nnx.Rngs(1))

    def __call__(self, x):
        return self.down(nnx.tanh(self.up(x)))


def test_linen_and_nnx_give_the_same_codes(key):
    model = Nnx()
    params = {"params": nnx.to_pure_dict(nnx.state(model))}
    batches = [jax.random.normal(key, (40, D))]
    ours = calibrate(model, rules(), batches, algorithms=["correct", "awq", "gptq"])
    theirs = calibrate(
        Linen(), rules(), batches, algorithms=["correct", "awq", "gptq"], params=params
    )
    for name in ("up", "down"):
        one = getattr(ours.model, name).kernel.value.array
        other = theirs.params["params"][name]["kernel"].array
        np.testing.assert_array_equal(one.qvalue, other.qvalue)
        assert one.pre_scale.shape == (one.shape[0], 1)
    got = theirs.model.apply(theirs.params, batches[0])
    np.testing.assert_allclose(ours.model(batches[0]), got, rtol=1e-5, atol=1e-5)


class Killed(Exception):
    pass


def test_a_killed_calibration_ends_with_the_same_bits(key, tmp_path):
    model, batches = Nnx(), [jax.random.normal(key, (40, D))]
    whole = calibrate(model, rules(), batches, options=FLAT)
    lines = []

    def kill(line):
        lines.append(line)
        if line.startswith("up/kernel"):
            raise Killed

    with pytest.raises(Killed):
        calibrate(model, rules(), batches, options=FLAT, folder=tmp_path, progress=kill)
    assert len(list(tmp_path.glob("*.npz"))) == 1
    again = []
    rest = calibrate(
        model, rules(), batches, options=FLAT, folder=tmp_path, progress=again.append
    )
    assert "up/kernel: as solved before" in again
    same = jax.tree.map(
        lambda a, b: bool((a == b).all()), nnx.state(whole.model), nnx.state(rest.model)
    )
    assert all(jax.tree.leaves(same))
    assert whole.report.rows == rest.report.rows
    with pytest.raises(ValueError, match="another calibration"):
        calibrate(model, rules(), batches, algorithms=["clip"], folder=tmp_path)


@pytest.mark.parametrize("name", ["0.npz", "calibration.json"])
@pytest.mark.parametrize("left", [0, 100])
def test_a_damaged_file_of_a_calibration_is_named(key, tmp_path, name, left):
    model, batches = Nnx(), [jax.random.normal(key, (40, D))]
    whole = calibrate(model, rules(), batches, options=FLAT, folder=tmp_path)
    file = tmp_path / name
    file.write_bytes(file.read_bytes()[:left])
    with pytest.raises(ValueError, match=f"{name} is damaged: delete it"):
        calibrate(model, rules(), batches, options=FLAT, folder=tmp_path)
    file.unlink()
    again = calibrate(model, rules(), batches, options=FLAT, folder=tmp_path)
    np.testing.assert_array_equal(again.model(batches[0]), whole.model(batches[0]))


def test_a_model_that_computes_something_else_is_another_calibration(key, tmp_path):
    """Its parameters are the same; what it does with them, or a constant, is not."""
    x = jax.random.normal(key, (40, D))

    def model(act, shift):
        def run(params, x):
            return act(x @ params["up"] + shift) @ params["down"]

        return run

    params = {"up": jax.random.normal(key, (D, F)), "down": jnp.ones((F, 4))}
    table = jnp.arange(F) / F
    models = [model(jnp.tanh, 0), model(jnp.exp, 0), model(jnp.tanh, 1)]
    models += [model(jnp.tanh, table), model(jnp.tanh, 2 * table), model(nnx.relu, 0)]
    models += [model(nnx.relu6, 0)]
    for number, one in enumerate(models):
        folder = tmp_path / str(number)
        named = {"params": params, "options": FLAT, "folder": folder}
        calibrate(one, rules(), [x], **named)
        for other in models:
            if other is one:
                calibrate(other, rules(), [x], **named)
                continue
            with pytest.raises(ValueError, match="another calibration"):
                calibrate(other, rules(), [x], **named)


@pytest.mark.parametrize(
    "acts",
    [
        (lambda h: h**2, lambda h: h**3),
        (lambda h: jnp.cumsum(h, 0), lambda h: jax.lax.cumsum(h, 0, reverse=True)),
    ],
    ids=["power", "direction"],
)
def test_a_parameter_of_an_equation_belongs_to_a_calibration(key, tmp_path, acts):
    x = jax.random.normal(key, (40, D))
    params = {"up": jax.random.normal(key, (D, F)), "down": jnp.ones((F, 4))}
    named = {"params": params, "options": FLAT, "folder": tmp_path}
    one, other = (lambda p, x, act=act: act(x @ p["up"]) @ p["down"] for act in acts)
    calibrate(one, rules(), [x], **named)
    calibrate(one, rules(), [x], **named)
    with pytest.raises(ValueError, match="another calibration"):
        calibrate(other, rules(), [x], **named)


def test_a_loss_and_its_targets_belong_to_a_calibration(key, tmp_path):
    model, x = Nnx(), jax.random.normal(key, (40, D))

    def run(loss, target):
        calibrate(model, rules(), [x], loss=loss, targets=[target], folder=tmp_path)

    y = model(x)
    run(lambda out, target: jnp.mean((out - target) ** 2), y)
    run(lambda out, target: jnp.mean((out - target) ** 2), y)
    with pytest.raises(ValueError, match="another calibration"):
        run(lambda out, target: jnp.mean((out - target) ** 2), 2 * y)
    with pytest.raises(ValueError, match="another calibration"):
        run(lambda out, target: jnp.mean((out - target) ** 4), y)


def test_losses_are_told_apart():
    def power(n):
        return lambda out, target: jnp.mean((out - target) ** n)

    losses = [power(2), jax.jit(power(2)), power(4), jax.jit(power(4)), power]
    losses += [functools.partial(power(2), target=0), functools.partial(power, 2), None]
    said = [_described(loss) for loss in losses]
    assert said[0] == said[1] and said[2] == said[3] and len(set(said)) == 6
    assert said == [_described(loss) for loss in losses]
    assert "0x" not in "".join(said)


def test_losses_with_other_arrays_are_told_apart():
    def weighted(w):
        return lambda out, target: jnp.mean(w * (out - target) ** 2)

    arrays = [jnp.ones(4), jnp.arange(4.0), np.ones((2, 2)), jax.random.key(0)]
    said = [_described(weighted(w)) for w in arrays]
    said += [_described(functools.partial(jnp.dot, w)) for w in arrays]
    assert len(set(said)) == 8
    assert said[1] == _described(weighted(jnp.arange(4.0)))


def test_a_loss_that_nothing_looks_at_is_refused(key):
    x = jax.random.normal(key, (40, D))
    with pytest.raises(ValueError, match="'hqq' looks at none: leave out the loss"):
        calibrate(
            Nnx(), rules(), [x], algorithms=["hqq"], loss=lambda out, _: jnp.sum(out)
        )


@pytest.mark.parametrize("rounding", ["round", "clip", "hqq", "gptq"])
def test_a_weight_of_zeros_costs_nothing(rounding, key):
    model = Nnx()
    model.up.kernel[...] = jnp.zeros_like(model.up.kernel[...])
    x = jax.random.normal(key, (40, D))
    rows = calibrate(model, rules(), [x], algorithms=[rounding]).report.rows
    (row,) = [row for row in rows if "up/kernel" in row.name]
    assert row.cost == row.rounded == 0


@pytest.mark.parametrize(
    "asked, message",
    [
        (["gptqq"], "unknown algorithm 'gptqq'. Did you mean 'gptq'?"),
        (["gptq", "awq"], r"no meaning in this order: write \['awq', 'gptq'\]"),
        (["clip", "gptq"], "round twice"),
        (["smooth", "awq"], "both choose one factor per input"),
        (["awq", "smooth"], "both choose one factor per input"),
    ],
)
def test_algorithms_without_a_meaning_are_refused(asked, message):
    with pytest.raises(ValueError, match=message):
        calibrate(Nnx(), rules(), [jnp.ones((40, D))], algorithms=asked)


def test_data_that_says_nothing_is_refused():
    model, x = Nnx(), jnp.ones((40, D))
    for batches, message in (
        ([], "no batches"),
        ([None], "batch 0 is empty: it holds no arrays"),
        ([jnp.ones((0, D))], "batch 0 is empty"),
        ([x, x.at[3, 3].set(jnp.nan)], "batch 1 holds numbers that are not finite"),
        ([x, x[:5]], "batch 1 has the shapes"),
        ([x[:2]], "2 tokens are too few for 16 inputs. Give at least 4"),
    ):
        with pytest.raises(ValueError, match=message):
            calibrate(model, rules(), batches)
    for batches in ({"x": x}, "text", None):
        with pytest.raises(TypeError, match=r"batches are a list .* write \[batch\]"):
            calibrate(model, rules(), batches)


def test_batches_may_hold_what_is_no_array(key):
    """A word that a model is called with, say."""

    class Spoken(Nnx):
        def __call__(self, x, mode):
            return super().__call__(x if mode == "plain" else -x)

    batch = {"x": jax.random.normal(key, (40, D)), "mode": "plain"}
    made = calibrate(Spoken(), rules(), (batch for _ in range(2)), options=FLAT)
    assert made.report.rows[0].tokens == 80


def test_what_is_not_there_is_named(key, tmp_path):
    x = jax.random.normal(key, (40, D))
    with pytest.raises(ValueError, match="Nnx has no method 'encode'"):
        calibrate(Nnx(), rules(), [x], method="encode")
    with pytest.raises(ValueError, match="Nnx has no method 'encode'"):
        mt.sensitivity(Nnx(), [x], method="encode")
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="file'?: .*Give another folder"):
        calibrate(Nnx(), rules(), [x], folder=tmp_path / "file")


def test_one_algorithm_may_be_a_word(key):
    x = jax.random.normal(key, (40, D))
    report = calibrate(Nnx(), rules(), [x], algorithms="clip", options=FLAT).report
    assert "weights by clip," in str(report)
    report = calibrate(Nnx(), rules(), [x], algorithms=[]).report
    assert "weights by round," in str(report)


class Listed(nnx.Module):
    """Weights in a list, one of another layer, and a table that is only looked up."""

    def __init__(self):
        draw = nnx.Rngs(0)
        self.weights = nnx.List([nnx.Param(jax.random.normal(draw.params(), (D, D)) / 4) for _ in range(2)])  # fmt: skip
        self.last = nnx.Linear(D, F, rngs=draw)
        self.table = nnx.Embed(9, D, rngs=draw)

    def __call__(self, x):
        x = x + self.table(jnp.arange(9))[0]
        for w in self.weights:
            x = jnp.tanh(x @ w[...])
        return self.last(x) @ self.last.kernel[...].T


def test_weights_are_found_wherever_they_lie(key):
    x = jax.random.normal(key, (90, D))
    rule = mt.QuantizationRule(weight_qtype="int4", op_names=("dot_general", "take"))
    made = calibrate(Listed(), mt.PtqProvider([rule]), [x], options=FLAT)
    names = [row.name for row in made.report.rows]
    assert names == ["weights/0", "weights/1", "last/kernel"]
    assert made.report.unseen == ("table/embedding",)
    assert "since they meet no contraction: table/embedding" in str(made.report)
    found, _ = program.trace(Listed(), x)
    assert [site.name for site in found.sites].count("last/kernel") == 2
    plain = calibrate(Listed(), mt.PtqProvider([rule]), [x], algorithms=["round"])
    far = lambda m: float(jnp.sum((m(x) - Listed()(x)) ** 2))
    assert far(made.model) < 0.7 * far(plain.model)


def test_rules_that_cannot_be_followed_are_refused():
    model, x = Nnx(), jnp.ones((40, D))
    with (
        pytest.warns(UserWarning, match="matched nothing"),
        pytest.raises(ValueError, match="rules that matched nothing"),
    ):
        calibrate(model, rules(module_path="nothing"), [x])

    depthwise = nnx.Conv(4, 4, (3,), feature_group_count=4, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="gptq cannot take this conv_general_dilated"):
        calibrate(depthwise, rules(), [jnp.ones((2, 9, 4))])
    for names in (["clip"], ["bias"], ["correct", "hqq"]):
        with pytest.raises(ValueError, match=r"cannot take .* algorithms=\['hqq'\]"):
            calibrate(depthwise, rules(), [jnp.ones((2, 9, 4))], algorithms=names)
    made = calibrate(depthwise, rules(), [jnp.ones((2, 9, 4))], algorithms=["hqq"])
    assert made.report.rows[0].format == "int4"


@pytest.mark.parametrize(
    "asked, message",
    [
        ({"correction": 1.5}, "correction=1.5 should lie between 0 and 1"),
        ({"alpha": -0.1}, "alpha=-0.1 should lie between 0 and 1"),
        ({"weigh": "tokens"}, "weigh='tokens' should be one of"),
        ({"runs": 0}, "runs is at least 1"),
        ({"runs": 1.5}, "runs is at least 1 and a whole number, not 1.5"),
        ({"min_tokens": float("nan")}, "min_tokens=nan should be a number from 0"),
    ],
)
def test_options_out_of_range_are_refused(asked, message):
    with pytest.raises(ValueError, match=message):
        CalibrationOptions(**asked)


@pytest.mark.parametrize(
    "algorithms, asked, message",
    [
        (["gptq"], {"correction": 0.7}, "correction=0.7 is an option of 'correct'"),
        (["gptq"], {"alpha": 0.7}, "alpha=0.7 is an option of 'smooth'"),
        (["gptq"], {"runs": 2}, "runs of outputs with gradients of their own"),
        (["round"], {"histograms": True}, r"\['round'\] look at none"),
        (["hqq"], {"weigh": "gradient"}, "weigh='gradient' is about a weight's inputs"),
        (["correct", "gptq"], {"inputs": "float"}, "inputs='float' have none"),
    ],
)
def test_options_that_nothing_would_look_at_are_refused(algorithms, asked, message):
    options = CalibrationOptions(**asked)
    with pytest.raises(ValueError, match=message):
        calibrate(
            Nnx(), rules(), [jnp.ones((40, D))], algorithms=algorithms, options=options
        )


def test_a_loss_that_nothing_asks_for_is_refused():
    x = jnp.ones((40, D))
    loss = lambda out, batch: jnp.sum(out)
    with pytest.raises(ValueError, match="weigh='none' takes none"):
        calibrate(Nnx(), rules(), [x], loss=loss, options=FLAT)
    with pytest.raises(ValueError, match="targets are for a loss"):
        calibrate(Nnx(), rules(), [x], targets=[x])


@pytest.mark.parametrize("where", ["host", "disk"])
def test_activations_lie_where_they_are_asked_to(where, key, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    model, batches = Nnx(), [jax.random.normal(key, (40, D))]
    seen = []
    look = lambda line: seen.append(len(list(tmp_path.glob("*/*.raw"))))
    options = CalibrationOptions(weigh="none", offload=where, histograms=True)
    names = ["correct", "gptq"]
    made = calibrate(
        model, rules(), batches, algorithms=names, options=options, progress=look
    )
    plain = calibrate(model, rules(), batches, algorithms=names, options=FLAT)
    same = jax.tree.map(
        lambda a, b: bool((a == b).all()), nnx.state(made.model), nnx.state(plain.model)
    )
    assert all(jax.tree.leaves(same))
    assert (max(seen) > 0) == (where == "disk")
    assert not list(tmp_path.iterdir())  # nothing is left behind
    # The largest of 640 normal numbers is the 99.9% quantile, to half a power of two.
    assert made.report.rows[0].outliers == 1.0 and "outliers" in str(made.report)
    with pytest.raises(ValueError, match="offload='tape' should be one of"):
        CalibrationOptions(offload="tape")


def test_sizes_of_inputs_are_counted(key):
    x = jax.random.normal(key, (1, 500, 8)).at[0, 3, 3].set(1000.0)
    sizes = np.asarray(collect.sizes_below(x))
    ends = 2.0 ** (collect.LEAST + (1 + np.arange(collect.BINS)) / 2)
    wanted = [(np.abs(np.asarray(x)) < end).sum() for end in ends]
    np.testing.assert_array_equal(sizes[:-1], wanted)
    assert sizes[-1] == x.size
    assert 256 <= collect.outliers(sizes) <= 512


def test_experts_with_too_few_tokens_are_named(key):
    class Experts(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(jax.random.normal(jax.random.key(1), (3, D, F)))

        def __call__(self, x):
            return jax.lax.ragged_dot(x, self.w[...], jnp.array([30, 2, len(x) - 32]))

    x = jax.random.normal(key, (64, D))
    made = calibrate(Experts(), rules(), [x])
    assert made.report.rows[0].note == (
        "experts [1] saw fewer than 4 tokens: moments of all experts"
    )

    def agreeing(*inputs):
        H = jnp.stack([x.T @ x for x in inputs])[:, None]
        w, axes = Experts().w[...], Axes((0,), (1,), (2,))
        solved = gptq.solve(w, Spec("int4", (2,)), H, axes).array
        return np.mean(np.asarray(solved.qvalue == made.model.w.array.qvalue)[1])

    assert agreeing(x[:30], x, x[32:]) > 0.99 > agreeing(x[:30], x[30:32], x[32:])


@pytest.mark.parametrize("algorithm", ["correct", "smooth"])
def test_all_that_a_starved_expert_is_solved_by_comes_of_all_experts(key, algorithm):
    class Experts(nnx.Module):
        def __init__(self):
            self.up = nnx.Linear(D, D, use_bias=False, rngs=nnx.Rngs(0))
            self.w = nnx.Param(jax.random.normal(jax.random.key(1), (3, D, F)))

        def __call__(self, x):
            sizes = jnp.array([30, 2, len(x) - 32])
            return jax.lax.ragged_dot(self.up(x), self.w[...], sizes)

    x = jax.random.normal(key, (64, D))
    is_smooth = algorithm == "smooth"
    provider = rules(act_qtype="int8") if is_smooth else rules()
    algorithms, options = [algorithm, "round"], CalibrationOptions(weigh="none")
    made = calibrate(Experts(), provider, [x], algorithms=algorithms, options=options)
    assert "experts [1] saw fewer than 4 tokens" in made.report.rows[1].note
    w, axes, floats = Experts().w[...], Axes((0,), (1,), (2,)), Experts().up(x)
    runs = x @ mt.dequantize(made.model.up.kernel.array)

    def agreeing(*parts):
        if is_smooth:
            largest = jnp.stack([jnp.abs(runs[p]).max(0) for p in parts])
            goal = w / over_inputs(smooth.smooth(w, largest, axes), axes, w.shape)
        else:
            H = jnp.stack([runs[p].T @ runs[p] for p in parts])[:, None]
            C = jnp.stack([runs[p].T @ (floats - runs)[p] for p in parts])[:, None]
            goal = correct.target(w, H, C, axes)
        codes = mt.quantize(goal, "int4", channelwise_axes=(2,)).qvalue
        return np.mean(np.asarray(codes == made.model.w.array.qvalue)[1])

    first, own, last = slice(30), slice(30, 32), slice(32, None)
    assert agreeing(first, slice(None), last) > 0.98 > agreeing(first, own, last)


def test_static_ranges_do_not_know_factors(key):
    provider = rules(act_qtype="int8", act_static_scale=True)
    with pytest.raises(ValueError, match="awq changes what a weight's inputs are"):
        calibrate(Nnx(), provider, [jnp.ones((40, D))], algorithms=["awq", "round"])


SCRIPT = """
import sys, jax, jax.numpy as jnp, numpy as np
from flax import nnx
import midtread as mt
from tests.algorithms.test_fold import Block
from tests.algorithms.test_reach import D, T
folder, out = sys.argv[1:]
x = jax.random.normal(jax.random.key(0), (4, T, D))
rule = mt.QuantizationRule(weight_qtype="int4", tile_size=8)
made = mt.calibrate(Block(), mt.PtqProvider([rule]), [x, x + 1],
    algorithms=["correct", "awq", "gptq", "bias"], folder=folder)
np.savez(out, *(np.asarray(v).astype(np.float32) for v in jax.tree.leaves(nnx.state(made.model))))
"""


@pytest.mark.slow
def test_kill_9_at_any_moment_ends_with_the_same_bits(tmp_path):
    import signal
    import subprocess
    import sys
    import time

    def start(name):
        words = [sys.executable, "-c", SCRIPT, str(tmp_path / name), str(tmp_path / f"{name}.npz")]  # fmt: skip
        return subprocess.Popen(words)

    assert start("whole").wait(600) == 0
    kills = 0
    for wanted in range(1, 9):  # a kill after every solved weight
        run = start("killed")
        while run.poll() is None:
            if len(list((tmp_path / "killed").glob("[0-9]*.npz"))) >= wanted:
                run.send_signal(signal.SIGKILL)
                kills += run.wait() != 0
            time.sleep(0.02)
        if run.returncode == 0:
            break
    assert kills >= 3
    assert start("killed").wait(600) == 0
    with np.load(tmp_path / "whole.npz") as a, np.load(tmp_path / "killed.npz") as b:
        assert all((a[name] == b[name]).all() for name in a.files)
