"""A quantized weight meets ordinary array code on the way to its matmul.

Codes follow what moves values; what computes something of a weight is computed, from the
weight as it is, which stays float with a warning. Never an exception, and no function of a
parameter is taken for the parameter. All of them are layers of one model, compiled once.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from jax import lax

import midtread as mt

split = jnp.split  # imported by name, before any model is quantized

SQUARE, STACK = (8, 8), (3, 8, 8)
ONE = lambda: jnp.argmax(jnp.arange(2))
MOVED = {
    "astype": (lambda w: jnp.astype(w, jnp.float32), SQUARE),
    "narrow": (lambda w: jnp.astype(w, jnp.bfloat16).astype(jnp.float32), SQUARE),
    "convert": (lambda w: lax.convert_element_type(w, jnp.float32), SQUARE),
    "array": (jnp.array, SQUARE),
    "copy": (jnp.copy, SQUARE),
    "copied": (lambda w: w.copy(), SQUARE),
    "cast_and_copied": (lambda w: w.astype(jnp.float32, copy=True), SQUARE),
    "flatten": (lambda w: w.flatten().reshape(SQUARE), SQUARE),
    "repeated": (lambda w: w.repeat(2, axis=1), (8, 4)),
    "reshape": (lambda w: jnp.reshape(w, SQUARE), (64,)),
    "ravel": (lambda w: jnp.ravel(w).reshape(SQUARE), SQUARE),
    "moveaxis": (lambda w: jnp.moveaxis(w, 0, 1), SQUARE),
    "permute_dims": (lambda w: jnp.permute_dims(w, (1, 0)), SQUARE),
    "matrix_transpose": (jnp.matrix_transpose, SQUARE),
    "lax_transpose": (lambda w: lax.transpose(w, (1, 0)), SQUARE),
    "swapaxes": (lambda w: jnp.swapaxes(w, 0, 1), SQUARE),
    "T": (lambda w: w.T, SQUARE),
    "flip": (jnp.flip, SQUARE),
    "negative": (lambda w: -w, SQUARE),
    "jnp_negative": (lambda w: jnp.negative(w), SQUARE),
    "slice": (lambda w: w[:8], (16, 8)),
    "columns": (lambda w: w[:, 8:], (8, 16)),
    "lax_slice": (lambda w: lax.slice_in_dim(w, 8, 16), (16, 8)),
    "split": (lambda w: jnp.split(w, 2)[1], (16, 8)),
    "split_alias": (lambda w: split(w, 2)[1], (16, 8)),
    "split_turned": (lambda w: -jnp.split(w.T, 2, -1)[0], (16, 8)),
    "repeat": (lambda w: jnp.repeat(w, 2, 0), (4, 8)),
    "repeat_columns": (lambda w: jnp.repeat(w, 2, -1), (8, 4)),
    "unstack": (lambda w: jnp.unstack(w)[1], STACK),
    "unpack": (lambda w: list(w)[2], STACK),
    "index": (lambda w: w[1], STACK),
    "index_reshaped": (lambda w: w.reshape(8, 3, 8)[:, 1], (8, 24)),
    "traced_index": (lambda w: w[ONE()], STACK),
    "dynamic_index": (lambda w: lax.dynamic_index_in_dim(w, ONE(), 0, False), STACK),
    "dynamic_slice": (lambda w: lax.dynamic_slice_in_dim(w, ONE(), 8, 1), (8, 12)),
    "squeeze": (lambda w: jnp.squeeze(w, 0), (1, 8, 8)),
    "squeezed": (lambda w: w.squeeze(0), (1, 8, 8)),
    "expand": (lambda w: jnp.expand_dims(w, 0)[0], SQUARE),
    "axis": (lambda w: w[None][0], SQUARE),
}
# what is rounded before it is trained, has scales of more than the part, or codes of -128
OTHER_SCALES = ("narrow", "slice", "lax_slice", "split", "split_alias", "split_turned",
                "negative", "jnp_negative")  # fmt: skip
# what multiplies parameters by parameters, with an int8 matmul of their own
PRODUCTS = {
    "squared": (lambda w: w @ w, SQUARE),
    "gram": (lambda w: w.T @ w, SQUARE),
    "also_tanh": (lambda w: w + jnp.tanh(w.T) @ w, SQUARE),
}
COMPUTED = {
    "roll": (lambda w: jnp.roll(w, 1, 0), SQUARE),
    "triu": (jnp.triu, SQUARE),
    "tanh": (jnp.tanh, SQUARE),
    "tanh_T": (lambda w: jnp.tanh(w.T), SQUARE),
    "abs": (jnp.abs, SQUARE),
    "square": (lambda w: w**2, SQUARE),
    "twice": (lambda w: 2.0 * w, SQUARE),
    "with_itself": (lambda w: jnp.concatenate([w, w])[4:12], SQUARE),
    "masked": (lambda w: jnp.where(jnp.eye(8) > 0, w, 0), SQUARE),
    "reshape_across": (lambda w: jnp.reshape(w, SQUARE), (4, 16)),
    "reshape_of_slice": (lambda w: jnp.reshape(w[:4], SQUARE), (5, 16)),
    "integers": (lambda w: jnp.astype(w, int).astype(w.dtype), SQUARE),
}
CASES = MOVED | PRODUCTS | COMPUTED
# what is not seen outside of jit: an alias of JAX's function, and look-ups that vmap makes
NOT_SEEN = {
    "plain": ["flip"],
    "vmap": ["traced_index", "dynamic_index", "dynamic_slice"],
}
X = jax.random.normal(jax.random.key(1), (2, 8))


class Nnx(nnx.Module):
    def __init__(self):
        keys = jax.random.split(jax.random.key(0), len(CASES))
        for key, (name, (_, shape)) in zip(keys, CASES.items()):
            setattr(self, name, nnx.Param(jax.random.normal(key, shape)))

    def __call__(self, x):
        return {name: x @ fn(self.read(name)) for name, (fn, _) in CASES.items()}

    def read(self, name):
        held = getattr(self, name)
        return held.get_value() if name in ("astype", "tanh", "T") else held[...]


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x):
        make = nn.initializers.normal(1.0)
        held = {k: self.param(k, make, shape) for k, (_, shape) in CASES.items()}
        return {name: x @ fn(held[name]) for name, (fn, _) in CASES.items()}


def check(out, wanted, boxed):
    for name in CASES:
        error = np.abs(out[name] - wanted[name]).max() / np.abs(wanted[name]).max()
        assert error < 0.05, (name, error)
        assert boxed(name) == (name not in COMPUTED), name
        if name in COMPUTED:
            np.testing.assert_allclose(out[name], wanted[name], rtol=1e-5, atol=1e-5)


def check_trained(out, served):
    """QAT takes the same parts of parameters for weights, and so computes what is served."""
    for name in MOVED:
        loose = 0.02 * np.abs(served[name]).max() if name in OTHER_SCALES else 1e-5
        np.testing.assert_allclose(
            out[name], served[name], rtol=1e-4, atol=loose, err_msg=name
        )


@pytest.mark.parametrize("tile", [None, 4])
def test_nnx(tile):
    rule = mt.QuantizationRule(weight_qtype="int8", tile_size=tile)
    model = Nnx()
    with pytest.warns(UserWarning, match="weights that stay float: .*tanh") as caught:
        served = mt.quantize_model(model, mt.PtqProvider([rule]), X)
    text = str(caught[0].message)
    assert not any(f" {name}," in text for name in MOVED)
    run = nnx.jit(lambda model, x: model(x))
    out = run(served, X)
    boxed = lambda name: isinstance(getattr(served, name), mt.WithAux)
    check(out, run(model, X), boxed)
    rule = mt.QtRule(weight_qtype="int8", tile_size=tile)
    check_trained(run(mt.quantize_model(model, mt.QtProvider([rule]), X), X), out)


def test_linen():
    rule = mt.QuantizationRule(weight_qtype="int8")
    model, served = Linen(), mt.quantize_model(Linen(), mt.PtqProvider([rule]))
    params = jax.jit(model.init)(jax.random.key(0), X)["params"]
    with pytest.warns(UserWarning, match="weights that stay float: "):
        shapes = jax.eval_shape(served.init, jax.random.key(0), X)["params"]
    codes = mt.quantize_params(params, shapes)
    out = jax.jit(served.apply)({"params": codes}, X)
    boxed = lambda name: isinstance(codes[name], mt.WithAux)
    check(out, jax.jit(model.apply)({"params": params}, X), boxed)
    rule = mt.QtRule(weight_qtype="int8")
    trained = mt.quantize_model(model, mt.QtProvider([rule]))
    check_trained(jax.jit(trained.apply)({"params": params}, X), out)


@pytest.mark.parametrize("kind", ["linen", "nnx"])
def test_outside_of_jit_the_same_is_trained(kind):
    """The tracers of grad and vmap wrap concrete arrays there, and nothing records what is
    done to those."""
    provider = mt.QtProvider([mt.QtRule(weight_qtype="int8")])
    if kind == "linen":
        model = mt.quantize_model(Linen(), provider)
        params = Linen().init(jax.random.key(0), X)
        call = model.apply
    else:
        graph, params = nnx.split(mt.quantize_model(Nnx(), provider, X))
        call = lambda params, x: nnx.merge(graph, params)(x)

    def loss(params):
        out = call(params, X)
        return sum(map(jnp.sum, jax.tree.leaves(out))), out

    wanted, alone = jax.jit(call)(params, X), jax.tree.map(lambda a: a[None], params)
    outs = {
        "plain": call(params, X),
        "grad": jax.grad(loss, has_aux=True)(params)[1],
        "vmap": jax.tree.map(lambda a: a[0], jax.vmap(call, (0, None))(alone, X)),
    }
    for way, out in outs.items():
        for name in set(CASES) - set(NOT_SEEN.get(way, ())):
            np.testing.assert_allclose(
                out[name], wanted[name], rtol=1e-4, atol=1e-4, err_msg=f"{way} {name}"
            )


def test_strict_is_an_error():
    rule = mt.QuantizationRule(weight_qtype="int8")
    with pytest.raises(ValueError, match="weights that stay float: "):
        mt.quantize_model(Nnx(), mt.PtqProvider([rule], strict=True), X)


def test_adapters_stand_beside_whole_parameters_and_parts_are_served():
    provider = mt.LoraProvider(rank=2, alpha=4.0, weight_qtype="int8")
    model = Nnx()
    with pytest.warns(UserWarning, match="weights that stay float: "):
        adapted = mt.apply_lora_to_model(model, provider, X, rngs=nnx.Rngs(0))
    boxed = lambda name: isinstance(getattr(adapted, name), mt.WithAux)
    run = nnx.jit(lambda model, x: model(x))
    check(run(adapted, X), run(model, X), boxed)
    assert hasattr(adapted, "T_lora_a") and not hasattr(adapted, "squeezed_lora_a")


# What reads values of a weight that is also multiplied by, and so is in codes.
READ = {
    "sum": lambda w: w.sum(0),
    "largest": lambda w: w.max(0),
    "positive": lambda w: jnp.where(w > 0, w, 0)[0],
    "zero": lambda w: jnp.where(w == 0, 1.0, 0.0),
    "not zero": lambda w: jnp.where(w != 0, 1.0, 0.0),
    "at": lambda w: w.at[0].set(1.0)[0],
    "take": lambda w: w.take(jnp.arange(8), axis=1)[0],
    "mod": lambda w: (2.0 % (w + 9.0))[0] + (2.0 // (w + 9.0))[0],
    "clip": lambda w: w.clip(-1, 1)[0],
    "dot": lambda w: w.dot(w)[0],
    "norm": lambda w: jnp.linalg.norm(w, axis=0),
}


class Reads(nnx.Module):
    def __init__(self):
        self.w = nnx.Param(jax.random.normal(jax.random.key(3), SQUARE))

    def __call__(self, x):
        return x @ self.w[...], {k: read(self.w[...]) for k, read in READ.items()}


def test_values_of_a_weight_in_codes_are_those_of_an_array():
    rule = mt.QuantizationRule(weight_qtype="int8")
    served = mt.quantize_model(Reads(), mt.PtqProvider([rule]), X)
    assert isinstance(served.w, mt.WithAux)
    codes = mt.dequantize(served.w.value.array)
    for run in (served, lambda x: nnx.jit(lambda m, x: m(x))(served, x)):
        _, out = run(X)
        for name, read in READ.items():
            np.testing.assert_allclose(
                out[name], read(codes), rtol=1e-5, atol=0.05, err_msg=name
            )
    assert not hasattr(served.w, "sum")  # outside of a model


@jax.jit
def multiply(x, w):
    return x @ w


def of_itself(x, w):
    return multiply(multiply(x, w), jnp.tanh(w)) + x @ w


JITTED = {"of itself": of_itself, "matvec": lambda x, w: jnp.matvec(w, x),
          "vecdot": lambda x, w: jnp.vecdot(x[:, None], w)}  # fmt: skip


@pytest.mark.parametrize("product", JITTED.values(), ids=JITTED)
def test_a_jit_that_is_called_in_every_run_keeps_no_weight(product):
    class Module(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(jax.random.normal(jax.random.key(3), SQUARE))

        def __call__(self, x):
            return product(x, self.w[...])

    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x):
            return product(x, self.param("w", nn.initializers.normal(1.0), SQUARE))

    provider = mt.PtqProvider([mt.QuantizationRule(weight_qtype="int8")])
    served = mt.quantize_model(Module(), provider, X)
    assert isinstance(served.w, mt.WithAux)
    np.testing.assert_allclose(served(X), Module()(X), atol=0.2)
    variables = Layer().init(jax.random.key(0), X)
    served, codes = mt.quantize_variables(Layer(), provider, variables, X)
    served.init(jax.random.key(1), X)  # other weights
    wanted = Layer().apply(variables, X)
    np.testing.assert_allclose(served.apply(codes, X), wanted, atol=0.2)


def test_a_jit_that_is_called_in_every_run_keeps_no_adapters():
    class Module(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(jax.random.normal(jax.random.key(3), SQUARE))

        def __call__(self, x):
            return multiply(x, self.w[...])

    provider = mt.LoraProvider(rank=2, alpha=2.0)
    model = mt.apply_lora_to_model(Module(), provider, X, rngs=nnx.Rngs(0))
    before = model(X)
    model.w_lora_b[...] = jnp.ones((2, 8))
    wanted = before + X @ model.w_lora_a[...] @ model.w_lora_b[...]
    np.testing.assert_allclose(model(X), wanted, rtol=1e-5, atol=1e-5)
