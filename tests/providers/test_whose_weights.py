"""A weight is quantized wherever it is multiplied, whoever holds it; one that stays float
although a rule is about it is told of, by name."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from jax.sharding import PartitionSpec as P

import midtread as mt

X = jax.random.normal(jax.random.key(1), (2, 8))
RULE = mt.QuantizationRule(weight_qtype="int8")


def weight(seed, shape=(8, 8)):
    return nnx.Param(jax.random.normal(jax.random.key(seed), shape))


class Elsewhere(nnx.Module):
    """Multiplies by what a child, a list and a dict hold."""

    def __init__(self):
        self.emb = nnx.Embed(16, 8, rngs=nnx.Rngs(0))
        self.several = nnx.List([weight(2), weight(3)])
        self.named = nnx.Dict(gate=weight(4))

    def __call__(self, x):
        x = x + self.emb(jnp.arange(2))
        for w in self.several:
            x = x @ w[...]
        table = self.emb.embedding[...].T
        return (x @ self.named["gate"]) @ table + x @ table


class Experts(nnx.Module):
    """Holds the weights of all experts, as Gemma 4's mixture does, and multiplies by none."""

    def __init__(self):
        self.up, self.down = weight(5, (3, 8, 6)), weight(6, (3, 6, 8))


class Mixture(nnx.Module):
    """Multiplies by what its child holds."""

    def __init__(self):
        self.experts = Experts()

    def __call__(self, x):
        h = jnp.einsum("td,edf->tef", x, jnp.astype(self.experts.up[...], x.dtype))
        return jnp.einsum("tef,efd->td", jax.nn.gelu(h), self.experts.down[...])


class Tied(nn.Module):
    @nn.compact
    def __call__(self, x):
        emb = nn.Embed(16, 8, name="emb")
        return (x + emb(jnp.arange(2))) @ emb.embedding.T


class Multiplies(nn.Module):
    @nn.compact
    def __call__(self, x, w):
        return x @ w


class Gives(nn.Module):
    """Multiplies by its weight in one child, and by the weight of another."""

    @nn.compact
    def __call__(self, x):
        w = self.param("w", nn.initializers.normal(1.0), (8, 8))
        return Multiplies()(x, w) @ nn.Embed(8, 8).embedding.T


class Stacked(nn.Module):
    @nn.compact
    def __call__(self, x):
        axes = {"params": 0, "quant_stats": 0}
        scan = nn.scan(
            lambda self, x, _: (Gives()(x), None),
            variable_axes=axes,
            split_rngs={"params": True},
            length=2,
        )
        return scan(self, x, None)[0]


class Passed(nnx.Module):
    """Passes a child's weight to a shard_map."""

    def __init__(self):
        self.up, self.down = (nnx.Linear(8, 8, rngs=nnx.Rngs(i)) for i in (0, 1))

    def __call__(self, x):
        auto = (jax.sharding.AxisType.Auto,)
        mesh = jax.make_mesh((2,), ("x",), axis_types=auto)
        specs = {"in_specs": (P(), P(None, "x")), "out_specs": P(None, "x")}
        product = jax.shard_map(lambda x, w: x @ w, mesh=mesh, **specs)
        return self.down(product(x, self.up.kernel[...]))


class Looks(nnx.Module):
    """Looks up in an array that has the shape of a parameter."""

    def __init__(self):
        self.table = weight(0, (16, 8))

    def __call__(self, ids):
        return angles(ids) @ self.table[...].T


def angles(ids):
    return jnp.take(jnp.arange(128.0).reshape(16, 8), ids, axis=0)


def assert_near(out, wanted):
    assert np.abs(out - wanted).max() < 0.05 * np.abs(wanted).max()


def test_nnx_weights_of_children_lists_and_dicts():
    model = Elsewhere()
    served = mt.quantize_model(model, mt.PtqProvider([RULE], strict=True), X)
    held = served.emb.embedding, *served.several, served.named["gate"]
    assert all(isinstance(w, mt.WithAux) for w in held)
    assert_near(served(X), model(X))


def test_experts_held_by_another_module():
    """Served in codes, and trained as they are served."""
    model = Mixture()
    served = mt.quantize_model(model, mt.PtqProvider([RULE], strict=True), X)
    boxes = served.experts.up, served.experts.down
    assert [box.array.scale.shape for box in boxes] == [(3, 1, 6), (1, 1, 8)]
    assert_near(served(X), model(X))
    trained = mt.QtProvider([mt.QtRule(weight_qtype="int8")])
    np.testing.assert_allclose(
        mt.quantize_model(model, trained, X)(X), served(X), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("together", [jax.lax.optimization_barrier, jax.device_put])
def test_weights_that_go_through_one_equation_are_told_apart(together):
    class Both(nnx.Module):
        def __init__(self):
            self.one, self.two = weight(7), weight(8)

        def __call__(self, x):
            one, two = together((self.one[...], self.two[...]))
            return x @ one @ two

    model = Both()
    served = mt.quantize_model(model, mt.PtqProvider([RULE], strict=True), X)
    assert isinstance(served.one, mt.WithAux) and isinstance(served.two, mt.WithAux)
    assert_near(jax.jit(lambda x: served(x))(X), model(X))


def test_linen_weight_of_a_child():
    served = mt.quantize_model(Tied(), mt.PtqProvider([RULE], strict=True))
    params = Tied().init(jax.random.key(0), X)["params"]
    shapes = jax.eval_shape(served.init, jax.random.key(0), X)["params"]
    codes = mt.quantize_params(params, shapes)
    assert isinstance(codes["emb"]["embedding"], mt.WithAux)
    assert_near(served.apply({"params": codes}, X), Tied().apply({"params": params}, X))


@pytest.mark.parametrize("model", [Gives(), Stacked()], ids=["once", "scan"])
def test_linen_weights_of_others_are_trained_as_they_are_served(model):
    variables = model.init(jax.random.key(0), X)
    served, codes = mt.quantize_variables(
        model, mt.PtqProvider([RULE], strict=True), variables, X
    )
    trained = mt.QtProvider([mt.QtRule(weight_qtype="int8")])
    np.testing.assert_allclose(
        mt.quantize_model(model, trained).apply(variables, X),
        served.apply(codes, X),
        rtol=1e-5,
        atol=1e-5,
    )
    # Statistics are of activations alone, in both traces that nn.scan makes.
    rule = mt.QtRule(weight_qtype="int8", act_qtype="int8", act_static_scale=True)
    static = mt.quantize_model(model, mt.QtProvider([rule]))
    made = static.init(jax.random.key(0), X)
    assert "rhs" not in str(jax.tree.structure(made["quant_stats"]))
    static.apply(made, X)


def test_a_weight_of_unknown_origin_is_told_of():
    with pytest.warns(UserWarning, match="stay float: up/kernel.*close over"):
        mt.quantize_model(Passed(), mt.PtqProvider([RULE]), X)
    with pytest.raises(ValueError, match="stay float: up/kernel"):
        mt.quantize_model(Passed(), mt.PtqProvider([RULE], strict=True), X)
    rows = mt.explain(Passed(), mt.PtqProvider([RULE]), X).rows
    assert "neither operand is one" in rows[0].reason


@pytest.mark.parametrize("act_qtype", [None, "int8"])
def test_a_stack_that_a_scan_takes_apart_is_told_of(act_qtype):
    class Scans(nnx.Module):
        def __init__(self):
            self.first = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
            self.stack = nnx.Param(jax.random.normal(jax.random.key(0), (3, 8, 8)))

        def __call__(self, x):
            layer = lambda x, w: (jnp.tanh(x @ w), None)
            return jax.lax.scan(layer, self.first(x), self.stack[...])[0]

    rule = mt.QuantizationRule(weight_qtype="int8", act_qtype=act_qtype)
    with pytest.warns(UserWarning, match="stay float: stack, .*a jit, scan or"):
        mt.quantize_model(Scans(), mt.PtqProvider([rule]), jnp.ones((2, 8)))


def test_a_vector_that_a_weight_is_computed_from_is_told_of():
    class Diagonal(nnx.Module):
        def __init__(self):
            self.first = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
            self.scale = nnx.Param(jnp.ones(8))

        def __call__(self, x):
            return self.first(x) @ jnp.diag(self.scale[...])

    with pytest.warns(UserWarning, match="stay float: scale"):
        mt.quantize_model(Diagonal(), mt.PtqProvider([RULE]), jnp.ones((2, 8)))


def test_what_is_computed_from_parameters_is_an_input_beside_a_weight():
    class Latents(nnx.Module):
        """Multiplies what it learned itself, and ids that a trace knows, by its weight."""

        def __init__(self):
            self.latents = nnx.Param(jnp.ones((3, 8)))
            self.embed = nnx.Embed(4, 8, rngs=nnx.Rngs(0))
            self.norm = nnx.LayerNorm(8, rngs=nnx.Rngs(0))
            self.up = nnx.Linear(8, 8, rngs=nnx.Rngs(0))

        def __call__(self, x):
            ids = self.embed(jnp.arange(3)) + self.latents[...]
            return self.up(x), self.up(self.norm(ids))

    # A warning is an error here, and strict refuses what there would be one about.
    served = mt.quantize_model(Latents(), mt.PtqProvider([RULE], strict=True), X)
    assert isinstance(served.up.kernel, mt.WithAux)


@pytest.mark.parametrize("hold", [lambda w: {"out": w}, lambda w: [w], lambda w: (w,)])
def test_weights_in_containers_of_pythons_are_told_of(hold):
    class Net(nnx.Module):
        def __init__(self):
            self.up = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
            self.held = nnx.data(hold(nnx.Param(jnp.ones((8, 8)))))

        def __call__(self, x):
            (w,) = jax.tree.leaves(
                self.held, is_leaf=lambda x: isinstance(x, nnx.Param)
            )
            return self.up(x) @ w[...]

    words = r"stay float: held/(out|0)\. .* hold them in an nnx\.Dict or nnx\.List"
    with pytest.warns(UserWarning, match=words):
        quantized = mt.quantize_model(Net(), mt.PtqProvider([RULE]), X)
    assert isinstance(quantized.up.kernel, mt.WithAux)
    with pytest.raises(ValueError, match=words):
        mt.quantize_model(Net(), mt.PtqProvider([RULE], strict=True), X)


def test_a_weight_rule_that_quantizes_nothing_is_told_of():
    class Adds(nnx.Module):
        def __init__(self):
            self.a, self.b = weight(0), weight(1)

        def __call__(self, x):
            return x @ (self.a[...] + self.b[...])

    with pytest.warns(
        UserWarning, match="rule 0, .*quantized no weight.*Float are a, b"
    ):
        mt.quantize_model(Adds(), mt.PtqProvider([RULE]), X)


def test_explain_does_not_take_another_array_for_a_table():
    coverage = mt.explain(Looks(), mt.PtqProvider([RULE]), jnp.zeros((3,), int))
    assert [row.op for row in coverage.rows] == ["dot_general0"]
