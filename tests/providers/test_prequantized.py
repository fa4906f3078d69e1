"""Parameters that someone else quantized, and the rules they were made by."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import midtread as mt

X = jnp.ones((2, 16))


class Net(nnx.Module):
    def __init__(self, rngs=None, mesh_axes=None):
        rngs = rngs or nnx.Rngs(0)
        init = nnx.initializers.lecun_normal()
        if mesh_axes:
            init = nnx.with_partitioning(init, mesh_axes)
        self.layers = nnx.List([nnx.Linear(16, 8, rngs=rngs, kernel_init=init)])

    def __call__(self, x):
        return self.layers[0](x)


def rules(**fields):
    return [mt.QuantizationRule(weight_qtype="int8", tile_size=4, **fields)]


def abstract(**fields):
    provider = mt.PtqProvider(rules(**fields))
    return nnx.eval_shape(lambda: mt.quantize_model(Net(), provider, X))


def payload(**fields):
    """A checkpoint in numpy, as orbax would give it."""
    params = nnx.to_pure_dict(nnx.state(Net(), nnx.Param))
    made = mt.quantize_params(params, abstract(**fields))
    return jax.tree.map(np.asarray, made)


def kernel(tree):
    return tree["layers"][0]["kernel"]["array"]


@pytest.mark.parametrize("method", ["absmax", "minmax"])
def test_into_a_quantized_model(method):
    given = payload(weight_calibration_method=method)
    model = abstract(weight_calibration_method=method)
    loaded = mt.process_prequantized_params(given, model)
    jax.tree.map(np.testing.assert_array_equal, loaded, given)
    nnx.update(model, loaded)
    direct = mt.quantize_model(Net(), mt.PtqProvider(rules(weight_calibration_method=method)), X)  # fmt: skip
    np.testing.assert_array_equal(model(X), direct(X))


def test_into_a_float_model():
    given = payload()
    loaded = mt.process_prequantized_params(given, Net())
    parts = kernel(given)
    expected = mt.dequantize(mt.QArray(*(jnp.asarray(parts[k]) for k in ("qvalue", "scale"))))  # fmt: skip
    np.testing.assert_array_equal(loaded["layers"][0]["kernel"], expected)
    np.testing.assert_array_equal(
        loaded["layers"][0]["bias"], given["layers"][0]["bias"]
    )


def test_scales_of_larger_tiles_are_repeated():
    given = payload()
    kernel(given)["scale"] = np.full((1, 8), 0.5, np.float32)
    loaded = mt.process_prequantized_params(given, abstract())
    np.testing.assert_array_equal(kernel(loaded)["scale"], np.full((4, 8), 0.5))


def test_containers_that_hold_the_same_codes():
    given = payload()
    kernel(given)["qvalue"] = kernel(given)["qvalue"].astype(np.int32)
    loaded = mt.process_prequantized_params(given, abstract())
    assert kernel(loaded)["qvalue"].dtype == jnp.int8


def test_shardings_come_from_the_model_or_the_checkpoint():
    mesh = jax.make_mesh(
        (2, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2
    )
    with jax.set_mesh(mesh):
        provider = mt.PtqProvider(rules())
        model = nnx.eval_shape(
            lambda: mt.quantize_model(Net(mesh_axes=("a", "b")), provider, X)
        )
        target = model.layers[0].kernel.array.qvalue
        named = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("a", "b"))
        target.set_value(jax.ShapeDtypeStruct(target.shape, jnp.int8, sharding=named))
        loaded = mt.process_prequantized_params(payload(), model)
        assert kernel(loaded)["qvalue"].sharding.spec == named.spec
        given = jax.tree.map(jnp.asarray, payload())
        kept = mt.process_prequantized_params(
            given, model, use_checkpoint_sharding=True
        )
        assert kernel(kept)["qvalue"].sharding == kernel(given)["qvalue"].sharding


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        (lambda p: kernel(p).pop("scale"), ValueError, "layers/0/kernel/array is missing its scale"),
        (lambda p: kernel(p).update(what=1), ValueError, r"unsupported parts \['what'\]"),
        (lambda p: kernel(p).update(zero_point=kernel(p)["qvalue"]), ValueError, "unexpected zero_point"),
        (lambda p: kernel(p).update(qvalue=kernel(p)["qvalue"][:-1]), ValueError, r"shape \(15, 8\), the model"),
        (lambda p: kernel(p).update(scale=np.ones((3, 8), np.float32)), ValueError, r"scale has shape \(3, 8\)"),
        (lambda p: kernel(p).update(qvalue=np.full((16, 8), 300)), ValueError, "codes in int32 that do not fit"),
        (lambda p: p["layers"][0].update(kernel=np.ones((16, 8), np.float32)), ValueError, "Unhandled or invalid"),
        (lambda p: p.update(more=np.ones(3, np.float32)), ValueError, "extra parameters.*more"),
    ],
)  # fmt: skip
def test_what_is_refused(change, error, said):
    given = payload()
    change(given)
    with pytest.raises(error, match=said):
        mt.process_prequantized_params(given, abstract())


def test_only_nnx_models_and_only_what_they_have():
    with pytest.raises(TypeError, match="NNX PTQ/QT models"):
        mt.process_prequantized_params({}, {})
    extra = {"more": np.ones(3, np.float32)}
    assert mt.process_prequantized_params(extra, Net(), allow_extra_params=True) == {}


def test_rules_from_a_checkpoint():
    (rule,) = mt.restore_quantization_rules(payload(), mt.QtRule, tile_size=4, bwd_qtype="int8")  # fmt: skip
    assert rule.module_path == "layers/[^/]+" and rule.tile_size == 4
    assert rule.weight_qtype == rule.act_qtype == "int8" and rule.bwd_qtype == "int8"
    (rule,) = mt.restore_quantization_rules(
        payload(weight_calibration_method="minmax"), mt.QuantizationRule, tile_size=None,
        act_qtype=None,
    )  # fmt: skip
    assert rule.act_qtype is None and rule.weight_calibration_method == "minmax"
    two = {"a": {"w": {"qvalue": jnp.ones(2, jnp.int8), "scale": jnp.ones(1)},
                 "v": {"qvalue": jnp.ones(2, jnp.int4), "scale": jnp.ones(1)}}}  # fmt: skip
    with pytest.warns(UserWarning, match="different rules"):
        mt.restore_quantization_rules(two, mt.QtRule, tile_size=4)
