"""Every spelling of a contraction reaches the provider, wherever it is called from."""

import functools
import inspect
import sys
import threading
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from jax import lax
from jax.experimental import pallas as pl

import midtread as mt
from midtread.model import caught, flaxlib, intercept, moves

W = jax.random.normal(jax.random.key(1), (8, 8))
X = jax.random.normal(jax.random.key(0), (4, 8))
NUMBERS = (((1,), (0,)), ((), ()))
INT8 = mt.QtRule(weight_qtype="int8", act_qtype="int8")
# as `from jax.numpy import dot` has them, above all of ours
early = types.SimpleNamespace(dot=jnp.dot, matmul=jnp.matmul, inner=jnp.inner)


class Seen(mt.QtProvider):
    """Remembers what reached it."""

    def __init__(self, rules=(INT8,), **options):
        super().__init__(rules, **options)
        self.calls = []

    def _get_current_rule_and_op_id(self, name, **options):
        found = super()._get_current_rule_and_op_id(name, **options)
        self.calls.append(
            (mt.model.flaxlib.path_of(intercept.current_module()), found[1])
        )
        return found


class Wrap(nn.Module):
    """A Linen module whose body is any function of (x, w)."""

    fn: object

    @nn.compact
    def __call__(self, x):
        return self.fn(x, self.param("w", lambda _: W))


class WrapNnx(nnx.Module):
    def __init__(self, fn):
        self.fn = fn
        self.w = nnx.Param(W)

    def __call__(module, x):  # the receiver may have any name
        return module.fn(x, module.w[...])


def run(kind, fn, provider):
    if kind == "linen":
        model = mt.quantize_model(Wrap(fn), provider)
        return model.apply(Wrap(fn).init(jax.random.key(0), X), X)
    return mt.quantize_model(WrapNnx(fn), provider, X)(X)


def quantized(x=X, w=W):
    return mt.learn(mt.recipe("qat_int8")).dot(x, w)


@jax.custom_vjp
def with_own_gradient(x, w):
    return x @ w


with_own_gradient.defvjp(
    lambda x, w: (x @ w, (x, w)), lambda res, g: (g @ res[1].T, res[0].T @ g)
)

SPELLINGS = {
    "dot_general": lambda x, w: lax.dot_general(x, w, NUMBERS),
    "lax.dot": lambda x, w: lax.dot(x, w),
    "jnp.dot": lambda x, w: jnp.dot(x, w),
    "method dot": lambda x, w: x.dot(w),
    "matmul": lambda x, w: jnp.matmul(x, w),
    "@": lambda x, w: x @ w,
    "tensordot": lambda x, w: jnp.tensordot(x, w, axes=1),
    "inner": lambda x, w: jnp.inner(x, w.T),
    "einsum": lambda x, w: jnp.einsum("mk,kn->mn", x, w),
    "alias taken earlier": functools.partial(
        lambda f, x, w: f(x, w, NUMBERS), lax.dot_general
    ),
    "cast weight": lambda x, w: x @ w.astype(jnp.float32).reshape(8, 8),
    "nested jit": jax.jit(lambda x, w: x @ w),
    "vmap": lambda x, w: jax.vmap(lambda row: row @ w)(x),
    "checkpoint": jax.checkpoint(lambda x, w: x @ w),
    "scan": lambda x, w: lax.scan(lambda c, row: (c, row[None] @ w), 0, x)[1][:, 0],
    "cond": lambda x, w: lax.cond(True, lambda: x @ w, lambda: x @ w),
    "while": lambda x, w: lax.while_loop(
        lambda c: c[0] < 1, lambda c: (c[0] + 1, x @ w), (0, x)
    )[1],
    "custom_vjp": with_own_gradient,
}


@pytest.mark.parametrize("kind", ["linen", "nnx"])
@pytest.mark.parametrize("name", SPELLINGS)
def test_every_spelling_is_quantized(name, kind):
    provider = Seen()
    out = run(kind, SPELLINGS[name], provider)
    np.testing.assert_allclose(out, quantized(), atol=1e-5)
    assert not np.allclose(out, X @ W, atol=1e-5)
    ops = {op.rstrip("0123456789") for _, op in provider.calls}
    assert ops == {"einsum" if name == "einsum" else "dot_general"}


@pytest.mark.parametrize("kind", ["linen", "nnx"])
@pytest.mark.parametrize("name", SPELLINGS)
def test_every_spelling_serves_a_quantized_weight(name, kind):
    """Under PTQ the weight is in a box by the time it is multiplied."""
    provider = mt.PtqProvider([mt.QuantizationRule(weight_qtype="int8")])
    exact = X @ mt.dequantize(mt.quantize(W, "int8", channelwise_axes=[1]))
    if name in ():
        pytest.skip("something else meets the box before a matmul does")
    if kind == "linen":
        model = mt.quantize_model(Wrap(SPELLINGS[name]), provider)
        variables = model.init(jax.random.key(0), X)
        assert variables["params"]["w"].array.qtype == "int8"
        out = jax.jit(model.apply)(variables, X)
    else:
        model = mt.quantize_model(WrapNnx(SPELLINGS[name]), provider, X)
        assert isinstance(model.w, mt.WithAux)
        out = model(X)
    np.testing.assert_allclose(out, exact, atol=1e-5)


@pytest.mark.parametrize("name", SPELLINGS)
def test_under_jit_and_grad(name):
    model = mt.quantize_model(Wrap(SPELLINGS[name]), Seen())
    params = Wrap(jnp.dot).init(jax.random.key(0), X)
    loss = lambda p: jnp.sum(model.apply(p, X) ** 2)
    if name == "while":
        np.testing.assert_allclose(
            jax.jit(loss)(params), jnp.sum(quantized() ** 2), rtol=1e-5
        )
        return
    value, grad = jax.jit(jax.value_and_grad(loss))(params)
    np.testing.assert_allclose(value, jnp.sum(quantized() ** 2), rtol=1e-5)
    exact = jax.grad(lambda w: jnp.sum(quantized(w=w) ** 2))(W)
    np.testing.assert_allclose(grad["params"]["w"], exact, rtol=1e-4, atol=1e-4)


def test_a_jit_cache_never_serves_the_other_model():
    shared = jax.jit(lambda x, w: jnp.matmul(x, w))
    for order in (("float", "quantized"), ("quantized", "float")):
        shared.clear_cache()
        outs = {}
        for which in order:
            outs[which] = (
                run("linen", shared, Seen()) if which == "quantized" else shared(X, W)
            )
        np.testing.assert_array_equal(outs["float"], X @ W)
        np.testing.assert_allclose(outs["quantized"], quantized(), atol=1e-5)


def test_modules_with_other_rules_do_not_share_a_trace():
    shared = jax.jit(lambda x, w: x @ w)

    class Two(nn.Module):
        @nn.compact
        def __call__(self, x):
            return Wrap(shared, name="low")(x), Wrap(shared, name="high")(x)

    provider = Seen(
        [mt.QtRule(module_path="low", weight_qtype="int8", act_qtype="int8")]
    )
    model = mt.quantize_model(Two(), provider)
    low, high = model.apply(Two().init(jax.random.key(0), X), X)
    np.testing.assert_allclose(low, quantized(), atol=1e-5)
    np.testing.assert_array_equal(high, X @ W)


def test_threads_do_not_see_each_other():
    barrier = threading.Barrier(3)
    results = {}

    def work(name, rules):
        def fn(x, w):
            barrier.wait(30)
            return x @ w

        results[name] = run("linen", fn, Seen(rules))

    four = mt.QtRule(weight_qtype="int4", act_qtype="int4")
    threads = [
        threading.Thread(target=work, args=args)
        for args in (("int8", [INT8]), ("int4", [four]))
    ]
    for thread in threads:
        thread.start()
    barrier.wait(30)  # init of both floats
    plain = X @ W
    barrier.wait(30)
    for thread in threads:
        thread.join(60)
    np.testing.assert_array_equal(plain, jnp.matmul(X, W))
    np.testing.assert_allclose(results["int8"], quantized(), atol=1e-5)
    assert jnp.abs(results["int4"] - results["int8"]).max() > 0.01


def test_kernels_are_opaque():
    def kernel(x_ref, w_ref, out_ref):
        out_ref[...] = jnp.dot(x_ref[...], w_ref[...])

    def fn(x, w):
        shape = jax.ShapeDtypeStruct((4, 8), jnp.float32)
        return pl.pallas_call(kernel, out_shape=shape, interpret=True)(x, w)

    provider = Seen()
    with pytest.warns(UserWarning, match="rules that matched nothing"):
        np.testing.assert_allclose(run("linen", fn, provider), X @ W, atol=1e-5)
    assert not provider.calls


def test_backward_bodies_are_not_touched():
    provider = Seen()
    model = mt.quantize_model(Wrap(with_own_gradient), provider)
    params = Wrap(jnp.dot).init(jax.random.key(0), X)
    grad = jax.grad(lambda p: jnp.sum(model.apply(p, X)))(params)
    np.testing.assert_allclose(grad["params"]["w"], X.T @ jnp.ones((4, 8)), atol=1e-5)


def test_disable_interceptions():
    fn = mt.disable_interceptions(lambda x, w: x @ w)
    with pytest.warns(UserWarning, match="rules that matched nothing"):
        np.testing.assert_array_equal(run("linen", fn, Seen()), X @ W)


def test_providers_are_an_extension_point():
    class Doubles(mt.QtProvider):
        def dot_general(self, *args, **kwargs):
            _, op_id = self._get_current_rule_and_op_id("dot_general")
            assert op_id == "dot_general0"
            return 2 * lax.dot_general(*args, **kwargs)  # inside a handler: JAX's own

    np.testing.assert_allclose(
        run("linen", jnp.dot, Doubles([INT8])), 2 * X @ W, rtol=1e-6
    )


def test_kernels_may_ask_for_their_rule():
    asked = []

    def fn(x, w):
        asked.append(mt.get_current_rule("gmm"))
        return x

    run("linen", fn, Seen([mt.QtRule(op_names=("gmm",), weight_qtype="fp8")]))
    assert asked[-1].weight_qtype == "fp8" and mt.get_current_rule("gmm") is None


def test_signatures_and_floats_stay_as_they_were():
    """What interception changes for good must not be seen from outside."""
    import inspect

    assert list(inspect.signature(lax.dot_general).parameters)[:3] == [
        "lhs",
        "rhs",
        "dimension_numbers",
    ]
    np.testing.assert_allclose(
        jnp.dot(X, W), jax.jit(lambda x, w: x @ w)(X, W), rtol=1e-6
    )
    assert jnp.matmul.__doc__ and lax.dot_general.__name__ == "dot_general"


def test_private_names_are_still_there():
    """Fails clearly when JAX moves what model/intercept.py relies on."""
    from jax._src.array import ArrayImpl
    from jax._src.core import EvalTrace

    assert isinstance(X, ArrayImpl) and "__matmul__" in vars(ArrayImpl)
    assert "process_primitive" in vars(EvalTrace)

    def body(x):
        y = x.astype(jnp.bfloat16).reshape(-1)
        made_from = [array for array, _ in moves.ancestors(y)]
        assert any(a is x for a in made_from), made_from
        return y

    jax.jit(body)(X)


def test_functions_that_others_wrapped_are_caught(monkeypatch):
    """Gemma's library comes with a wrapped flax.linen.Module.param, for one."""
    factor = 2
    outer = types.SimpleNamespace(double=lambda x: factor * x)
    monkeypatch.setitem(sys.modules, "outer", outer)
    name = intercept.watch("outer.double")
    with intercept.active(mt.QtProvider([]), {name: lambda x: x + 1}):
        assert outer.double(5) == 6
    assert outer.double(5) == 10


def test_what_qwix_does_not_count_is_numbered_after_what_it_does():
    def both(x, w):
        return lax.dot(x, w) + lax.dot_general(x, w, NUMBERS) + lax.dot(x, w)

    provider = Seen()
    run("linen", both, provider)
    assert [op for _, op in provider.calls] == [
        "dot_general100",
        "dot_general0",
        "dot_general101",
    ]


def test_functions_that_were_imported_before_take_boxes():
    class Net(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(jax.random.normal(jax.random.key(0), (8, 8)))

        def __call__(self, x):
            w = self.w[...]
            return early.dot(x, w) + early.matmul(x, w) + early.inner(x, w)

    x = jax.random.normal(jax.random.key(1), (2, 8))
    rules = [mt.QuantizationRule(weight_qtype="int8")]
    model = mt.quantize_model(Net(), mt.PtqProvider(rules), x)
    assert isinstance(model.w, mt.WithAux)
    out = nnx.jit(lambda model, x: model(x))(model, x)
    np.testing.assert_allclose(out, Net()(x), atol=0.1)


def test_functions_behind_jit_keep_its_methods():
    """As jnp.dot.lower, after a model was quantized too."""
    intercept.install()
    for name in caught.JITTED:
        held, was = getattr(jnp, name), getattr(jnp, name).__wrapped__
        missing = set(dir(was)) - set(dir(held))
        assert not {m for m in missing if not m.startswith("__")}
    x = jnp.ones((2, 2))
    assert "dot_general" in jnp.dot.lower(x, x).as_text()


@pytest.mark.parametrize("provider", [mt.QtProvider, mt.PtqProvider])
def test_an_array_that_asarray_is_given_by_name(provider):
    class Named(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(jnp.eye(8))

        def __call__(self, x):
            return jnp.dot(x, jnp.asarray(a=self.w[...]))

    x = jnp.ones((2, 8))
    rule = mt.QuantizationRule(weight_qtype="int8")
    model = mt.quantize_model(Named(), provider([rule]), x)
    np.testing.assert_allclose(model(x), x, rtol=0.01)


def test_modules_inside_a_partial_are_found():
    class Holder(nnx.Module):
        def __init__(self):
            part = jax.tree_util.Partial(lambda m, x: m(x), nnx.Linear(2, 2, rngs=nnx.Rngs(0)))  # fmt: skip
            self.part = nnx.data(part)

    kinds = {type(m).__name__ for m in flaxlib.modules_in(Holder())}
    assert kinds == {"Holder", "Linear"}


def test_a_function_that_is_changed_twice_has_its_signature_back():
    intercept.install()
    inner = inspect.unwrap(jnp.dot)
    before = inspect.signature(inner)
    intercept.swapped("twice.dot", inner)()
    assert inspect.signature(inner) == before
    assert list(before.parameters)[:2] == ["a", "b"]


INSIDE = {
    "jit": lambda w: jax.jit(lambda v: v @ w),
    "remat": lambda w: jax.checkpoint(lambda v: v @ w),
    "scan": lambda w: lambda v: lax.scan(lambda c, _: (c @ w, None), v, None, 1)[0],
    "cond": lambda w: lambda v: lax.cond(True, lambda v: v @ w, jnp.zeros_like, v),
    "conv": lambda w: jax.jit(lambda v: lax.conv(v.T[None], w[:, :, None], (1,), "SAME")),
}  # fmt: skip


@pytest.mark.parametrize("name", INSIDE)
def test_a_mapped_jit_is_intercepted_once(name):
    # vmap multiplies anew what was traced, when the operands are the engine's own.
    inside = INSIDE[name]
    rule = mt.QtRule(weight_qtype="int4", act_qtype="int8")
    provider = Seen([rule])
    model = mt.quantize_model(Wrap(lambda x, w: jax.vmap(inside(w))(x)), provider)
    one = mt.quantize_model(Wrap(lambda x, w: inside(w)(x)), mt.QtProvider([rule]))
    x = jnp.stack([X, X + 1])
    variables = {"params": {"w": W}}
    out = model.apply(variables, x)
    want = jnp.stack([one.apply(variables, row) for row in x])
    np.testing.assert_allclose(out, want, rtol=1e-6, atol=1e-6)
    assert len(provider.calls) == 1


SOLVERS = {
    "solve": lambda w: jnp.linalg.solve(w + 9 * jnp.eye(8), jnp.eye(8)),
    "inv": lambda w: jnp.linalg.inv(w + 9 * jnp.eye(8)),
    "norm": lambda w: w / jnp.linalg.norm(w, 2),
    "qr": lambda w: jnp.linalg.qr(w)[0],
    "eigh": lambda w: jnp.linalg.eigh(w @ w.T)[1],
}


@pytest.mark.parametrize("name", SOLVERS)
def test_linear_algebra_of_a_model_has_its_gradient(name):
    # What its solvers and rules multiply is left alone: they transpose it.
    solver = SOLVERS[name]
    model = Wrap(lambda x, w: x @ solver(w))
    qat = mt.QtProvider([mt.QtRule(weight_qtype="int8", act_qtype="int8")])
    loss = lambda model: (
        lambda w: jnp.sum(jnp.sin(model.apply({"params": {"w": w}}, X)))
    )
    got = jax.grad(loss(mt.quantize_model(model, qat)))(W)
    want = jax.grad(loss(model))(W)
    assert jnp.linalg.norm(got - want) < 0.2 * jnp.linalg.norm(want)


STACKED = [
    ((8,), (2, 8, 8)),
    ((4, 8), (2, 8, 8)),
    ((3, 1, 4, 8), (1, 2, 8, 8)),
    ((1, 1, 4, 8), (1, 2, 8, 8)),
    ((2, 4, 8), (3, 1, 8, 8)),
    ((1, 4, 8), (1, 8, 8)),
    ((2, 8), (1, 8, 8)),
]


@pytest.mark.parametrize("shapes", STACKED, ids=str)
def test_codes_with_batch_axes_multiply_as_floats_do(shapes):
    # By the same dot_general: the same rule, and the same names of static scales.
    shape, weight = shapes
    x, w = jax.random.normal(jax.random.key(2), shape), jnp.resize(W, weight) + 0.1
    rule = mt.QtRule(**vars(INT8) | {"op_names": ("dot_general",)})
    model = Stack(weight)
    qat = mt.quantize_model(model, mt.QtProvider([rule]))
    served, codes = mt.quantize_variables(
        model, mt.PtqProvider([rule]), {"params": {"w": w}}, x
    )
    provider = Seen([rule])
    mt.quantize_model(model, provider).apply({"params": {"w": w}}, x)
    out = served.apply(codes, x)
    np.testing.assert_allclose(out, qat.apply({"params": {"w": w}}, x), rtol=1e-6)
    assert out.shape == jnp.matmul(x, w).shape
    names = [op for op, _ in running_ops(served, codes, x)]
    assert names == ["dot_general"]


class Stack(nn.Module):
    shape: tuple

    @nn.compact
    def __call__(self, x):
        return x @ self.param("w", nn.initializers.normal(), self.shape)


def running_ops(model, variables, x):
    """Returns (op, path) of what reaches the provider of a model."""
    seen, provider = [], flaxlib.provider_of(model)
    match = provider.match
    provider.match = lambda path, op: (seen.append((op, path)), match(path, op))[1]
    try:
        model.apply(variables, x)
    finally:
        del provider.match
    return seen


def test_an_error_of_an_op_says_where():
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Conv(4, (3,), name="conv")(x)

    rule = mt.QtRule(weight_qtype="int4", tile_size=2)
    for provider in (mt.QtProvider([rule]), mt.PtqProvider([rule])):
        model = mt.quantize_model(Net(), provider)
        with pytest.raises(ValueError, match="^'conv', conv_general_dilated: .* tile"):
            model.init(jax.random.key(0), jnp.ones((1, 5, 8)))


def test_a_model_without_matmuls_says_so():
    model = mt.quantize_model(Wrap(lambda x, w: x * w[:4]), mt.QtProvider([INT8]))
    with pytest.warns(UserWarning, match="no op that a rule is about was run"):
        model.init(jax.random.key(0), X)


@pytest.mark.parametrize("axis", [-1, 0])
def test_vecdot_is_one_matmul(axis):
    provider = Seen()
    model = Wrap(lambda x, w: jnp.vecdot(x, w[:4], axis=axis))
    out = mt.quantize_model(model, provider).apply({"params": {"w": W}}, X)
    np.testing.assert_allclose(out, jnp.vecdot(X, W[:4], axis=axis), atol=0.1)
    assert len(provider.calls) == 1
