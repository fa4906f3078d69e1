"""One program written for Qwix, to be run on Qwix and on Midtread.

    python dropin_script.py out.npz              on whatever `import qwix` finds
    python -m midtread.interop.qwix dropin_script.py out.npz

Every case returns a tree of arrays, numbers and strings; `test_qwix_dropin.py` runs both
and compares. `SAME` cases must agree bit for bit, the others to float32 rounding. Cases
run as one jit each where they can: a compilation per operation takes minutes.
"""

import contextlib
import dataclasses
import functools
import importlib
import inspect
import json
import os
import sys
import typing
import warnings

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import qwix
import qwix.pallas as qpl
from flax import nnx
from jax.experimental import pallas as pl
from qwix import version
from qwix._src import aux_data, averaging, interception, model, qconfig
from qwix._src.core import (
    conv_general,
    conv_general_qt,
    dot,
    dot_general,
    dot_general_qt,
    einsum,
    einsum_info,
    mxfp_dot,
    numerics,
    pallas,
    qarray,
    ragged_dot,
    ragged_dot_qt,
    sparsity,
    stochastic_rounding,
)
from qwix._src.providers import lora, ptq, qt
from qwix._src.utils import checkpoint_util, flax_util
from qwix.contrib.sparsity import sparsity_module

CASES, SAME, EAGER = {}, set(), set()
ONE = [1.0]  # an argument of the case's jit, so that nothing is constant
MATMUL = (((1,), (0,)), ((), ()))


def case(fn):
    CASES[fn.__name__] = fn
    return fn


def same(fn):
    SAME.add(fn.__name__)
    return case(fn)


def eager(fn):
    """A case that looks at values."""
    EAGER.add(fn.__name__)
    return fn


def planted(seed, shape, bound=127.5, every=4):
    """Scales are powers of two and no code is near a tie: see peer.planted."""
    rng = np.random.default_rng(seed)
    x = rng.uniform(-0.99, 0.99, shape) * bound
    places = np.indices(shape).sum(0) % every == 0
    x = np.where(places, bound, x) / 2.0 ** rng.integers(4, 8)
    return jnp.asarray(x, jnp.float32) * ONE[0]


def error_of(fn, *args, **kwargs):
    """The name of what is raised."""
    try:
        fn(*args, **kwargs)
    except Exception as error:  # noqa: BLE001
        return type(error).__name__
    return "nothing"


# --- arrays -----------------------------------------------------------------------------------


@same
def quantize():
    out = {}
    for name, bound in {"int8": 127.5, "int4": 7.5, "int3": 3.5, "int6": 31.5, "nf4": 1.0,
                        "float8_e4m3fn": 448.0, "float8_e5m2": 57344.0, "mxfp8": 448.0,
                        "mxfp4": 6.0}.items():  # fmt: skip
        x = planted(1, (8, 64), bound)
        axes = [{"channelwise_axes": [0]}, {"tiled_axes": {1: 32}}, {}]
        for i, how in enumerate(axes if not name.startswith("mx") else axes[1:2]):
            q = qwix.quantize(x, name, **how)
            out[f"{name}{i}"] = q, qwix.dequantize(q), str(q.qvalue.dtype)
    x = planted(2, (8, 64))
    q = qwix.quantize(
        x, jnp.int8, calibration_method="fixed,-8,8", scale_dtype="bfloat16"
    )
    out["fixed"] = q, str(q.dtype), q.shape, q.ndim, str(q.scale.dtype)
    out["absmax"] = qwix.quantize(x, "int8", calibration_method="absmax,0.5")
    ramp = jnp.arange(256) / 255.0
    out["minmax"] = qwix.quantize(ramp, jnp.int8, calibration_method="minmax")
    out["fraction"] = qwix.quantize(x, "int8", tiled_axes={1: 1 / 4}).scale
    return out


@same
def views():
    q = qwix.quantize(
        planted(3, (2, 2, 6)), jnp.int8, channelwise_axes=[0], tiled_axes={2: 2}
    )
    views = {
        "T": q.T, "mT": q.mT, "transpose": q.transpose(1, 2, 0), "swap": q.swapaxes(1, 2),
        "reshape": q.reshape(4, 1, 3, 2), "merge": q.reshape((1, 4, 6)), "item": q[..., 1],
        "new": q[None], "slices": q[0:1, 1:2, 4], "astype": q.astype(jnp.bfloat16),
        "replace": q.replace(scale=q.scale * 2),
        "dataclass": dataclasses.replace(q, scale=q.scale * 2),
        "leaf": qarray.reshape(q, 4, 6), "take": qarray.rewriting_take(q, 0),
    }  # fmt: skip
    tiles = q.scale_tile_shape, q.zero_point_tile_shape, qarray.get_tiled_axes(q)
    fields = [f.name for f in dataclasses.fields(q)][:4]
    return (
        views,
        tiles,
        fields,
        len(jax.tree.leaves(q)),
        str(jnp.dtype(q.qtype)),
        qarray.validate_qarray(q),
    )


@same
def sixteen_bits():
    """Quotients of bfloat16 are rounded to bfloat16 before they are rounded to codes."""
    x, out = jax.random.normal(jax.random.key(0), (10, 256, 16), jnp.bfloat16), {}
    for method in ("absmax", "minmax", "fixed,3"):
        for tiles in ({}, {1: 32}):
            how = qarray.HowToQuantize(
                qtype=jnp.int8,
                channelwise_axes=[0],
                tiled_axes={} if method == "fixed,3" else tiles,
                calibration_method=method,
            )
            out[f"{method}{len(tiles)}"] = qarray.quantize(x + 1, how)
    return out


@same
def qarray_functions():
    x = planted(4, (4, 64))
    how = qarray.HowToQuantize(qtype="int8", channelwise_axes=[0], tiled_axes={1: 16})
    seen = qarray.calibrate(x, how)
    scale, zero = qarray.compute_scale_zero_point(seen, how.qtype)
    q = qarray.quantize_with_scale_zero_point(x, how.qtype, scale, zero)
    clipped = qarray.clip_to_calibration(x * 2, seen, how.tiled_axes)
    g = qarray.clip_gradient_to_calibration(x, x * 2, seen, "absmax,0.5")
    return {
        "steps": (seen, scale, zero, q, qarray.quantize(x, how), qarray.quantize_api(x, "int8")),
        "shape": qarray.get_scale_shape(x.shape, how),
        "split": qarray.split_axis(x, {1: 16, 0: 0.5}),
        "broadcast": qarray.broadcast_to(jnp.arange(4.0), (3, 8)),
        "generic": qarray.call_with_generic_broadcast(jnp.add, x, scale),
        "transpose": qarray.transpose_array(jnp.ones((4, 1, 3)), [2, None, 0]),
        "clip": (clipped, g, qarray.clip_gradient_to_calibration(x, x, seen, "absmax")),
        "types": [str(jnp.dtype(t)) for t in qarray.get_accumulator_and_result_type(
            q, x, preferred_element_type=None)],
        "ints": [str(jnp.dtype(t)) for t in qarray.get_accumulator_and_result_type(
            q, q, preferred_element_type=jnp.bfloat16)],
        "is": isinstance(q, qarray.MaybeQArray),
        "dequantize": qarray.dequantize(q),
        "sparsify": qarray.sparsify(x, sparsity.SparsityRule(weight_sparsity_n=2, weight_sparsity_m=4)),
        "aliases": [hasattr(qarray, n) for n in ("ShapeT", "USE_RECIPROCAL_FOR_QUANTIZATION")],
    }  # fmt: skip


@same
def numerics_functions():
    x = jnp.array([1.2, 3.5, -127.5, 129.0, -1300.0, 0.5, 1.5])
    types = ["int8", "int4", "int3", jnp.uint8, jnp.float8_e4m3fn, "nf4", "mxfp4"]
    return {
        "to": [numerics.convert_to(x, t) for t in types],
        "from": numerics.convert_from(jnp.array([0, 7, 15], jnp.uint4), "nf4"),
        "noise": numerics.convert_to(x, jnp.int8, lambda shape: jnp.full(shape, 0.4)),
        "symmetric": [numerics.get_symmetric_bound(t) for t in types],
        "asymmetric": [numerics.get_asymmetric_bound(t) for t in ("int8", jnp.int4)],
        "should": [numerics.should_quantize(t) for t in (jnp.bfloat16, "float32", jnp.int8)],
        "can": [numerics.can_dequant_on_output(t) for t in ("nf4", "int8", jnp.bfloat16)],
        "wide": [numerics.convert_from(numerics.convert_to(x, t), t).astype(jnp.float32)
                 for t in (jnp.bfloat16, jnp.float32)],
        "nf4": (numerics.get_nf4_buckets(), numerics.fp_to_nf4(x / 200),
                numerics.nf4_to_fp(jnp.array([1, 2], jnp.uint4))),
        "alias": hasattr(numerics, "NoiseFn"),
    }  # fmt: skip


@same
def noise():
    key = jax.random.key(7)
    fn = stochastic_rounding.get_noise_fn("uniform", key, (0,))
    low = stochastic_rounding.NoiseFn(
        key=key, method="low_bit_uniform", channelwise_noise_axes=(1,)
    )
    return (
        fn((4, 3)), low((4, 3)), stochastic_rounding.uniform_noise(key, (3, 2)),
        stochastic_rounding.low_bit_uniform_noise(key, (3, 2)), len(jax.tree.leaves(fn)),
    )  # fmt: skip


@same
def sparsity_functions():
    x = planted(5, (8, 16))
    mask = sparsity.get_sparsity_mask(x, 2, 4)
    module = sparsity_module.SparsityModule(
        (8, 16), None,
        sparsity.SparsityRule(
            weight_sparsity_n=2, weight_sparsity_m=4, weight_sparsity_start_step=1,
            weight_sparsity_update_step=2, activation_sparsity_n=1, activation_sparsity_m=2,
        ),
    )  # fmt: skip
    steps = [module(x * (i + 1) % 3, x + i) for i in range(4)]
    return {
        "masks": [sparsity.get_sparsity_mask(x, 1, 4, order=o, block_size=b, offset=d)
                  for o, b, d in (("R", 0, 0), ("C", 0, 0), ("R", 2, 0), ("R", 0, 2))],
        "apply": (sparsity.apply_sparsity(x, mask), sparsity.apply_sparsity(x, mask, pruned_value=jnp.float32(0.5)),
                  sparsity.apply_sparsity(x, mask[:1], is_channelwise=True)),
        "unstructured": sparsity.get_sparsity_mask_unstructured(x, mask, 40.0),
        "prune": sparsity.prune_inputs_n_m(x, n=1, m=2),
        "module": (steps, module.step.value, module.mask.value),
    }  # fmt: skip


# --- ops --------------------------------------------------------------------------------------


def pair(tile=None, m=8, k=256, n=16):
    tiles = {"tiled_axes": {1: tile}} if tile else {}
    x = qwix.quantize(planted(6, (m, k)), jnp.int8, channelwise_axes=[0], **tiles)
    tiles = {"tiled_axes": {0: tile}} if tile else {}
    w = qwix.quantize(planted(7, (k, n)), jnp.int8, channelwise_axes=[1], **tiles)
    return x, w


@case
def ops():
    out = {}
    for tile in (None, 128, 32):
        x, w = pair(tile)
        float_x = qwix.dequantize(x)
        out[f"dot_general{tile}"] = (
            qwix.dot_general(x, w, MATMUL),
            qwix.dot_general(float_x, w, MATMUL),
        )
        out[f"loop{tile}"] = (
            dot_general.loop_dot_general(x, w, MATMUL),
            qpl.dot(x, w),
            qpl.einsum("ab,bc->ca", x, w),
        )
        out[f"einsum{tile}"] = qwix.einsum("ab,bc->ca", x, w)
        out[f"dot{tile}"] = (
            qwix.dot(x, w),
            dot.dot(x, w, None, jnp.bfloat16).astype(jnp.float32),
        )
    x, w = pair()
    out["three"] = qwix.einsum("ab,bc,cd->ad", x, w, jnp.ones((16, 4)))
    out["implicit"] = einsum.einsum("ab,...b", x, jnp.ones((3, 256)))
    out["own"] = qwix.einsum(
        "ab,bc->ac",
        x,
        w,
        _qwix_dot_general=lambda l, r, d, **k: qwix.dot_general(l, r, d, **k) * 2,
    )
    image = qwix.quantize(planted(8, (2, 8, 8, 4)), jnp.int8, channelwise_axes=[0])
    kernel = qwix.quantize(planted(9, (3, 3, 4, 8)), jnp.int8, channelwise_axes=[3])
    numbers = ("NHWC", "HWIO", "NHWC")
    out["conv"] = qwix.conv_general_dilated(
        image, kernel, (1, 1), "SAME", dimension_numbers=numbers
    )
    rows = qwix.quantize(planted(10, (16, 128)), jnp.int8, channelwise_axes=[0])
    experts = qwix.quantize(planted(11, (3, 128, 8)), jnp.int8, channelwise_axes=[0, 2])
    sizes = jnp.array([4, 7, 5], jnp.int32)
    out["ragged"] = qwix.ragged_dot(rows, experts, sizes)
    ragged = jax.lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((1,), (1,)), ((), ())), lhs_ragged_dimensions=[0],
        rhs_group_dimensions=[0],
    )  # fmt: skip
    out["general"] = ragged_dot.ragged_dot_general(
        rows, experts, sizes, dimension_numbers=ragged
    )
    zero = qwix.quantize(
        planted(12, (8, 256)) + 1, jnp.int8, calibration_method="minmax"
    )
    out["zero"] = qwix.dot_general(
        qarray.QArray(zero.qvalue, zero.scale, zero.zero_point), w, MATMUL
    )
    return out


@same
def how_to_quantize():
    hows = [
        dot_general.get_how_to_quantize(
            dimension_numbers=(((2, 1), (0, 1)), ((0,), (2,))), ndims=(4, 4), for_lhs=side,
            tile_size=tile, qtype="int8",
        ) for side in (True, False) for tile in (None, 32)
    ] + [
        einsum.get_how_to_quantize(
            einsum_str="btd,dnh->btnh", ndims=(3, 3), for_lhs=side, tile_size=8,
            qtype="int4", calibration_method="absmax,0.9",
        ) for side in (True, False)
    ] + [
        conv_general.get_how_to_quantize(
            dimension_numbers=jax.lax.conv_dimension_numbers((1, 8, 8, 4), (3, 3, 4, 2), ("NHWC", "HWIO", "NHWC")),
            for_lhs=side, qtype=jnp.int8,
        ) for side in (True, False)
    ]  # fmt: skip
    info = einsum_info.EinsumInfo.parse("abc,bcd->acd")
    dotted = [
        einsum_info.EinsumInfo.parse(text, ndims=ndims) for text, ndims in [
            ("...d,dn", (3, 2)), ("...a,ab->...b", (4, 2)), ("ab,...b->...a", (2, 2)),
            ("...ab,...bc->...ac", (4, 3)), ("b...c,c...d->b...d", (4, 4)), ("...,a->...a", (1, 1)),
        ]
    ]  # fmt: skip
    return [
        (list(h.channelwise_axes), dict(h.tiled_axes), h.calibration_method, str(jnp.dtype(h.qtype)))
        for h in hows
    ], (info.lhs, info.rhs, info.out, info.batch_chars, info.contract_chars,
        info.dimension_numbers, info.output_perm, [repr(i) for i in dotted]), dot_general.MIN_TILE_SIZE_TO_DEQUANT_ON_OUTPUT  # fmt: skip


@case
def training_ops():
    x, w = planted(13, (8, 32)), planted(14, (32, 16))
    out = {}
    for name, fields in {
        "int8": {"lhs_qtype": "int8", "rhs_qtype": "int8", "dlhs_grad_qtype": "int8", "drhs_grad_qtype": "int8"},
        "qat": {"lhs_qtype": "int8", "rhs_qtype": "int8", "use_original_residuals": True},
        "clip": {"lhs_qtype": "int8", "lhs_calibration_method": "absmax,0.5", "use_original_residuals": True},
        "sparse": {"rhs_qtype": "int8", "sparsity_rule": sparsity.SparsityRule(weight_sparsity_n=2, weight_sparsity_m=4)},
        "whole": {"lhs_qtype": "int8", "rhs_qtype": "int8", "lhs_disable_channelwise_axes": True},
        "static": {"lhs_qtype": "int8", "lhs_collect_quant_stat": lambda c: {k: v * 2 for k, v in c.items()}},
    }.items():  # fmt: skip
        config = dot_general_qt.DotGeneralQtConfig(**fields)
        loss = lambda x, w, c=config: jnp.sum(
            jnp.sin(dot_general_qt.dot_general_qt(x, w, MATMUL, c))
        )
        out[name] = jax.value_and_grad(loss, (0, 1))(x, w)
    heads, out_kernel = planted(63, (64, 2, 64)), planted(64, (2, 64, 32))
    numbers = (((1, 2), (0, 1)), ((), ()))
    operands, grads = ("lhs_qtype", "rhs_qtype"), ("dlhs_grad_qtype", "drhs_grad_qtype")
    all_four = lambda qtype: dict.fromkeys((*operands, *grads), qtype)
    tiles = dict.fromkeys(("tile_size", "dlhs_tile_size", "drhs_tile_size"), 32)
    for name, fields in {
        "tiles": {**all_four("int8"), "tile_size": 32},
        "one tile": {**all_four("int8"), "tile_size": 64},
        "mx": {**all_four("mxfp8"), **tiles},
        "mx of floats": {**all_four("mxfp8"), **tiles, "use_original_residuals": True},
        "mx again": {**all_four("mxfp8"), **tiles, "dlhs_residual_qtype": "mxfp8", "drhs_residual_qtype": "mxfp8"},
    }.items():  # fmt: skip
        config = dot_general_qt.DotGeneralQtConfig(**fields)
        loss = lambda x, w, c=config: jnp.sum(
            jnp.sin(dot_general_qt.dot_general_qt(x, w, numbers, c))
        )
        out[name] = jax.value_and_grad(loss, (0, 1))(heads, out_kernel)
    image, kernel = planted(15, (2, 6, 6, 4)), planted(16, (3, 3, 4, 8))
    config = conv_general_qt.ConvGeneralQtConfig(
        lhs_qtype="int8",
        rhs_qtype="int8",
        dlhs_grad_qtype="int8",
        drhs_grad_qtype="int8",
    )
    numbers = ("NHWC", "HWIO", "NHWC")
    conv = lambda x, w: jnp.sum(
        conv_general_qt.conv_general_qt(
            x, w, config, (1, 1), "SAME", None, None, numbers
        )
    )
    out["conv"] = jax.value_and_grad(conv, (0, 1))(image, kernel)
    experts, sizes = planted(17, (3, 32, 8)), jnp.array([2, 3, 3], jnp.int32)
    config = ragged_dot_qt.RaggedDotQtConfig(
        lhs_qtype="int8", rhs_qtype="int8", drhs_grad_qtype="int8"
    )
    ragged = lambda x, w: jnp.sum(ragged_dot_qt.ragged_dot_qt(x, w, sizes, config))
    out["ragged"] = jax.value_and_grad(ragged, (0, 1))(x, experts)
    return out


@case
@eager
def kernels():
    x, w = pair(128, 16)

    def kernel(x, w, out):
        out[...] = qpl.dot_general(x[...], w[...], MATMUL)

    specs = [
        pl.BlockSpec((8, 256), lambda i: (i, 0)),
        pl.BlockSpec((256, 16), lambda i: (0, 0)),
    ]
    call = pallas.pallas_call(
        kernel, jax.ShapeDtypeStruct((16, 16), jnp.float32), grid=(2,), in_specs=specs,
        out_specs=pl.BlockSpec((8, 16), lambda i: (i, 0)), interpret=True,
    )  # fmt: skip
    spec = pallas.update_block_specs_for_qarray(specs[0], x)
    moved, turned, _ = pallas.transform_block_specs_for_tpu(
        pl.BlockSpec((128, 1), lambda i, j: (i, j)), jnp.zeros((256, 1))
    )
    whole = qpl.pallas_call(
        lambda q, out: out.__setitem__(..., qpl.dequantize(q[...])),
        jax.ShapeDtypeStruct((16, 256), jnp.float32), grid=(2,), in_specs=specs[:1],
        out_specs=specs[0], interpret=True,
    )(x)  # fmt: skip
    blocks = (
        spec.scale.block_shape,
        moved.block_shape,
        turned.shape,
        spec.scale.index_map(3),
    )
    return call(x, w), whole, blocks, qpl.get_current_rule("dot_general")


# --- models -----------------------------------------------------------------------------------


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Conv(4, (3, 3), name="conv")(x).reshape(x.shape[0], -1)
        x = nn.Dense(16, name="hidden")(x)
        return nn.DenseGeneral((2, 4), name="out")(nn.relu(x))


class Pair(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List(
            [nnx.Linear(32, 16, rngs=rngs), nnx.Linear(16, 8, rngs=rngs)]
        )

    def __call__(self, x):
        return self.layers[1](jnp.tanh(self.layers[0](x)))


def normal(seed, shape):
    x = np.random.default_rng(seed).normal(size=shape)
    return jnp.asarray(x, jnp.float32) * ONE[0]


def boxes(tree):
    """WithAux as its arrays: `how` is said in other words."""
    is_box = lambda x: isinstance(x, ptq.WithAux)
    return jax.tree.map(lambda x: x.array if is_box(x) else x, tree, is_leaf=is_box)


@case
@eager
def linen_ptq():
    rules = [
        qwix.QuantizationRule(
            module_path="conv", weight_qtype=jnp.int8, act_qtype=jnp.int8
        ),
        qwix.QuantizationRule(module_path="hidden", weight_qtype="int8", tile_size=16),
        qwix.QuantizationRule(
            weight_qtype="int8", act_qtype="int8", act_static_scale=True
        ),
        qwix.QuantizationRule(module_path="nowhere", weight_qtype="int8"),
    ]
    x = normal(20, (2, 4, 4, 3))
    params = Net().init(jax.random.key(0), x)["params"]
    provider = qwix.PtqProvider(rules)
    net = qwix.quantize_model(Net(), provider)
    abstract = jax.eval_shape(net.init, jax.random.key(0), x)["params"]
    trained = qwix.quantize_model(Net(), qwix.QtProvider(rules[2:3]))
    variables = trained.init(jax.random.key(0), x)
    _, new = trained.apply({"params": params, **variables}, x, mutable="quant_stats")
    stats = {"out": new["quant_stats"]["out"]}
    quantized = qwix.quantize_params(params, abstract, stats)
    extra = qwix.quantize_params(
        {**params, "more": x}, abstract, stats, allow_extra_params=True
    )
    return {
        "params": boxes(quantized), "out": net.apply({"params": quantized}, x),
        "init": boxes(net.init(jax.random.key(0), x)["params"]["hidden"]),
        "stats": new["quant_stats"], "unused": [r.module_path for r in provider.get_unused_rules()],
        "extra": sorted(extra), "float": error_of(net.apply, {"params": params}, x),
        "missing": error_of(qwix.quantize_params, {"more": x}, abstract),
        "kind": type(quantized["hidden"]["kernel"]).__name__, "class": type(net).__name__,
        "linen": type(model.quantize_linen_model(Net(), provider, ("__call__",))).__name__,
    }  # fmt: skip


@case
def linen_training():
    x = normal(21, (2, 4, 4, 3))
    params = Net().init(jax.random.key(0), x)["params"]
    out = {}
    rule = functools.partial(qwix.QtRule, weight_qtype="int8", act_qtype="int8")
    for name, rules in {
        "qat": [rule()],
        "qt": [rule(bwd_qtype="int8", bwd_weight_grad_tile_size=1.0)],
        "skip": [qwix.QtRule(module_path="conv"), rule(disable_channelwise_axes=True)],
        # four tiles of the sum in "hidden", one in "out"
        "tiles": [
            qwix.QtRule(module_path="conv"),
            rule(bwd_qtype="int8", tile_size=16),
        ],
    }.items():
        net = qwix.quantize_model(Net(), qt.QtProvider(rules))
        loss = lambda p, net=net: jnp.sum(net.apply({"params": p}, x) ** 2)
        out[name] = jax.jit(jax.value_and_grad(loss))(params)
    return out


@case
@eager
def nnx_models():
    net, x = Pair(nnx.Rngs(0)), normal(22, (4, 32))
    rule = qwix.QuantizationRule(
        module_path="layers/0", weight_qtype="int8", act_qtype="int8"
    )
    served = qwix.quantize_model(net, ptq.PtqProvider([rule]), x)
    abstract = nnx.eval_shape(
        lambda: model.quantize_nnx_model(net, ptq.PtqProvider([rule]), x)
    )
    params = nnx.to_pure_dict(nnx.state(net, nnx.Param))
    quantized = ptq.quantize_params(params, abstract)
    nnx.update(abstract, quantized)
    static = qwix.QtRule(weight_qtype="int8", act_qtype="int8", act_static_scale=True)
    trained = qwix.quantize_model(net, qwix.QtProvider([static]), x)
    loss = lambda m: jnp.sum(m(x) ** 2)
    before = trained(x)
    grads = nnx.to_pure_dict(nnx.grad(loss)(trained))
    kept = nnx.to_pure_dict(nnx.state(trained, qwix.QuantStat))
    trained.set_attributes(disable_quant_stats_update=True, raise_if_not_found=False)
    trained(x)
    return {
        "served": served(x), "abstract": abstract(x), "quantized": quantized,
        "trained": before, "grads": grads, "stats": kept,
        "frozen": nnx.to_pure_dict(nnx.state(trained, flax_util.QuantStat)),
        "paths": [m.qwix_path for _, m in trained.iter_modules() if hasattr(m, "qwix_path")][-1],
        "float": net(x),
    }  # fmt: skip


@case
@eager
def adapters():
    x = normal(23, (2, 4, 4, 3))
    base = qwix.quantize_model(Net(), qwix.QtProvider([])).init(jax.random.key(0), x)[
        "params"
    ]
    provider = lora.LoraProvider(
        [
            lora.LoraRule(
                module_path="hidden|out", rank=2, alpha=4.0, weight_qtype="int8"
            )
        ]
    )
    net = qwix.apply_lora_to_model(Net(), provider)
    params = net.init(jax.random.key(1), x)["params"]
    hidden = {k: v for k, v in params["hidden"].items() if k != "kernel"}
    tuned = {
        **params,
        "hidden": {**params["hidden"], "kernel_lora_b": hidden["kernel_lora_b"] + 0.1},
    }
    short = qwix.LoraProvider(module_path="hidden", rank=2, alpha=1.0)
    shapes = jax.tree.map(
        jnp.shape,
        {k: {n: v for n, v in d.items() if "lora" in n} for k, d in params.items()},
    )
    return (
        net.apply({"params": tuned}, x),
        sorted(hidden),
        str(shapes),
        short._rules[0].rank,
        base["hidden"]["bias"],
    )


@case
@eager
def checkpoints():
    net, x = Pair(nnx.Rngs(0)), normal(24, (4, 32))
    rules = [qwix.QuantizationRule(weight_qtype=jnp.int8, tile_size=8)]
    abstract = nnx.eval_shape(
        lambda: qwix.quantize_model(net, qwix.PtqProvider(rules), x)
    )
    params = qwix.quantize_params(nnx.to_pure_dict(nnx.state(net, nnx.Param)), abstract)
    plain = jax.tree.map(np.asarray, params)
    loaded = qwix.process_prequantized_params(plain, abstract)
    back = checkpoint_util.process_prequantized_params(plain, net)
    restored = qwix.restore_quantization_rules(
        plain, qwix.QtRule, tile_size=8, bwd_qtype="int8"
    )
    weights = checkpoint_util.restore_quantization_rules(
        plain, qwix.QuantizationRule, tile_size=8, act_qtype=None
    )
    nnx.update(abstract, loaded)
    kernel = plain["layers"][0]["kernel"]["array"]
    wrong = lambda **part: {"layers": {0: {"kernel": {"array": {**kernel, **part}}}}}
    process = qwix.process_prequantized_params
    return {
        "loaded": loaded, "float": back, "out": abstract(x),
        "rules": [(r.module_path, str(jnp.dtype(r.weight_qtype)), str(jnp.dtype(r.act_qtype)), r.tile_size,
                   r.weight_calibration_method, r.bwd_qtype) for r in restored],
        "weights": [r.act_qtype for r in weights],
        "errors": [
            error_of(process, {}, {}), error_of(process, {"more": plain["layers"][0]["bias"]}, abstract),
            error_of(process, wrong(qvalue=kernel["qvalue"][:-1]), abstract),
            error_of(process, wrong(what=kernel["scale"]), abstract),
            error_of(process, wrong(zero_point=kernel["qvalue"]), abstract),
            error_of(process, {"layers": {0: {"kernel": net.layers[0].kernel.value}}}, abstract),
        ],
        "extra": process({"more": plain["layers"][0]["bias"]}, abstract, allow_extra_params=True),
    }  # fmt: skip


@same
@eager
def averages():
    mean = averaging.SimpleMovingAverage(bootstrap_steps=1)
    seen = {"absmax": jnp.array([[2.0]])}
    stat = mean.init(seen)
    start = mean.get_calibration(stat, seen)
    for _ in range(3):
        stat = mean.update(stat, seen)
    shape = error_of(mean.update, stat, {"absmax": jnp.ones((2, 2))})
    aliases = [hasattr(averaging, n) for n in ("QuantStat", "Calibration")]
    return start, stat, mean.get_calibration(stat), shape, aliases


@case
@eager
def modules():
    """flax_util and ptq's functions, called from within modules."""
    seen = {}

    class Linen(nn.Module):
        @nn.compact
        def __call__(self, x):
            w = self.param("w", nn.initializers.ones, (4, 5), jnp.float32)
            stat = flax_util.get_or_create_variable(
                "quant_stats", "stat", lambda: jnp.ones(3)
            )
            extra = flax_util.get_or_create_param("extra", lambda: jnp.ones(2))
            seen["linen"] = (
                flax_util.get_current_module() is self,
                flax_util.get_current_module_path(),
                flax_util.should_update_quant_stats(),
                flax_util.find_param(w),
                flax_util.find_param(x),
                stat.value,
                extra,
                flax_util.make_rng("noise").shape,
                qwix.QuantizationProvider([])._get_current_rule_and_op_id("dot")[1],
            )
            if self.is_initializing():
                how = qarray.HowToQuantize(qtype="int8", channelwise_axes=[1])
                made = ptq.create_quantized_param("w", w, how)
                seen["made"] = made.array, made.shape, str(made.dtype), made.ndim
                rule = qwix.QuantizationRule(act_qtype="int8", act_static_scale=True)
                act = qarray.HowToQuantize(qtype="int8")
                seen["act"] = ptq.quantize_act(x, act, rule, "act")
                seen["dynamic"] = ptq.quantize_act(
                    x, act, qwix.QtRule(act_static_scale=False), "b"
                )
            return x @ w

    class Nnx(nnx.Module):
        def __init__(self):
            self.qwix_rngs = nnx.Rngs(0)
            self.w = nnx.Param(jnp.ones((4, 5)))

        def __call__(self):
            flax_util.get_or_create_variable("quant_stats", "stat", lambda: jnp.ones(3))
            flax_util.get_or_create_param("w", lambda: jnp.zeros((4, 5)))
            flax_util.get_or_create_param(
                "b",
                lambda key: jnp.zeros(2),
                nnx_param_type=nnx.LoRAParam,
                need_rng=True,
            )
            return (
                flax_util.find_param(self.w.get_value()), flax_util.get_current_module() is self,
                flax_util.get_and_delete_variable("quant_stats", "stat").get_value(),
                flax_util.make_rng("noise").shape, hasattr(self, "stat"),
                type(self.b).__name__,
            )  # fmt: skip

    keys = {"params": jax.random.key(0), "noise": jax.random.key(1)}
    variables = Linen().init(keys, planted(25, (2, 4)))
    boxed = nn.Partitioned(jnp.ones((4, 8)), names=("a", "b"))
    split = flax_util.update_boxed(boxed, value=jnp.ones((2, 2, 8)), split=[0])
    mesh = jax.make_mesh(
        (1, 1), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2
    )
    with jax.set_mesh(mesh):
        param = nnx.Param(jnp.ones((4, 8)), out_sharding=("a", "b"))
        turned = flax_util.update_boxed(param, transpose=[1, 0])
    return {
        **seen, "nnx": Nnx()(), "tree": sorted(variables["params"]),
        "unbox": flax_util.unbox({"x": boxed}), "split": (split.names, split.value.shape),
        "turned": turned.get_metadata().get("sharding_names", turned.get_metadata().get("out_sharding")),
        "sharding": [flax_util.update_sharding(("a", None, "b"), merge=[0]),
                     flax_util.update_sharding(("a", "b"), split=[1]),
                     flax_util.update_sharding(("a", "b"), transpose=[1, None, 0]),
                     flax_util.update_sharding(("a", "b"), shape=(1, 4))],
        "path": flax_util.get_value_from_path({"a": [1, {"b": 2}]}, ("a", 1, "b")),
        "outside": error_of(flax_util.get_current_module),
    }  # fmt: skip


@case
def passes_apart():
    """Forward and backward as functions of their own; parts that ops are made of."""
    x, w, g = (planted(seed, (8, 8)) for seed in (71, 72, 73))
    bits = {"lhs_qtype": "int8", "rhs_qtype": "int8"}
    grads = {"dlhs_grad_qtype": "int8", "drhs_grad_qtype": "int8"}
    config = dot_general_qt.DotGeneralQtConfig(**bits, **grads)
    dense, kept = dot_general_qt.dot_general_qt_fwd(x, w, None, None, MATMUL, config)
    back = dot_general_qt.dot_general_qt_bwd(MATMUL, kept, g)[:2]
    both = dot_general_qt.dot_general_qt_fwd_bwd(x, w, None, None, MATMUL, config)
    image, kernel = x.reshape(1, 4, 4, 4), w.reshape(2, 2, 4, 4)
    names = jax.lax.conv_dimension_numbers(
        image.shape, kernel.shape, ("NHWC", "HWIO", "NHWC")
    )
    options = ((1, 1), "SAME", None, None, names, 1, 1)
    settings = conv_general_qt.ConvGeneralQtConfig(**bits)
    conv, saved = conv_general_qt.conv_general_qt_fwd(image, kernel, settings, *options)
    bent = conv_general_qt.conv_general_qt_bwd(
        settings, *options, None, saved, jnp.ones_like(conv)
    )
    sizes, groups = jnp.array([3, 5]), jnp.stack([w, w])
    ragged = ragged_dot_qt.RaggedDotQtConfig(**bits)
    rows, held = ragged_dot_qt.ragged_dot_qt_fwd(x, groups, sizes, ragged)
    torn = ragged_dot_qt.ragged_dot_qt_bwd(ragged, None, None, None, held, g)[:2]
    return {
        "dense": (dense, back, both),
        "conv": (conv, bent),
        "ragged": (rows, torn),
        "turned": [conv_general.get_transpose(names, side) for side in (True, False)],
        "operands": einsum_info.broadcast_operands([x[:1], w], ["ab", "ac"]),
        "shape": einsum_info.sanitize_shape((2, 3)),
    }


@eager
@case
def parts_of_the_package():
    x, w = planted(81, (4, 32)), planted(82, (32, 4))
    sides = [
        qarray.quantize(a, qarray.HowToQuantize(qtype="mxfp8", tiled_axes={axis: 32}))
        for a, axis in ((x, 1), (w, 0))
    ]
    out = mxfp_dot.mxfp_dot_general(*sides, MATMUL)
    aux_data.set(x, "a", 1)
    aux_data.clear(x)
    manager = interception.interception_manager
    sine = interception.Interceptor(mapping={"jax.numpy.sin": lambda x: x + 1}, id=9)
    manager.activate_interceptor(sine)
    swapped = float(jnp.sin(jnp.array(1.0)))
    manager.deactivate_interceptor(sine)
    return {
        "mxfp": "none" if out is None else out,
        "cleared": error_of(aux_data.get, x, "a"),
        "sine": (swapped, float(jnp.sin(jnp.array(0.0)))),
        "version": version.__version__,
        "names": [
            str(interception.PRIMITIVE_BIND_KEY),
            str(interception.Function.__origin__),
            type(ptq.ArrayTypeVar).__name__,
        ],
    }


@same
@eager
def boxes_as_arrays():
    """What jnp.asarray makes of a box under PTQ, and what a box makes of itself."""

    class Asks(nnx.Module):
        def __call__(self, x, dtype=None):
            return jnp.asarray(x, dtype=dtype)

    provider = ptq.PtqProvider([qwix.QuantizationRule(weight_qtype="int8")])
    net = qwix.quantize_model(Asks(), provider, jnp.ones((2, 2)))
    q = qwix.QArray(jnp.ones((2, 2), jnp.int8), jnp.ones((1, 1)))
    box = ptq.WithAux(jnp.ones((2, 2)), "int8")
    parts = {"qvalue": q.qvalue, "scale": q.scale, "zero_point": q.qvalue[:1, :1]}
    state = nnx.State(
        {"array": nnx.State({k: nnx.Variable(v) for k, v in parts.items()})}
    )
    named = nn.Partitioned(jnp.ones((2, 2)), names=("a", "b"))
    cast = ptq.WithAux(named, "int8").astype(jnp.float16)
    return {
        "same": jax.tree.map(id, net(box)) == jax.tree.map(id, box),
        "dtypes": [str(net(x, dtype=jnp.float16).dtype) for x in (box, q)],
        "kinds": [type(net(x)).__name__ for x in (box, q, state, nnx.Param(box))],
        "inside": type(net(ptq.WithAux([1.0, 2.0], "int8")).array).__name__,
        "zero": net(state).zero_point, "cast": (str(cast.dtype), cast.array.names),
        "box": (box.shape, box.ndim, box.reshape(2, 2).shape, box[0]),
        "torn": error_of(box.reshape, 3),
    }  # fmt: skip


@case
@eager
def interceptions():
    ten = lambda: interception.Interceptor(
        mapping={"jax.numpy.sin": lambda x: jnp.sin(x) + 10}, id=1
    )
    two = lambda: interception.Interceptor(
        mapping={"jax.numpy.sin": lambda x: jnp.sin(x) * 2}, id=2
    )
    wrap = functools.partial(interception.wrap_func_intercepted, disable_jit=False)
    plain = lambda x: jnp.sin(x)
    once = wrap(plain, ten, output_transform=lambda x: x + 100)
    twice = wrap(wrap(plain, ten), ten)
    both = wrap(wrap(plain, ten), two)
    off = wrap(interception.disable_interceptions(plain), ten)
    # replacing find_param reaches the providers
    original, asked = flax_util.find_param, []
    flax_util.find_param = lambda x, kind=None: (
        asked.append(x.shape) or original(x, kind)
    )
    net, x = (
        qwix.quantize_model(
            Net(),
            qwix.QtProvider([qwix.QtRule(module_path="out", weight_qtype="int8")]),
        ),
        normal(26, (2, 4, 4, 3)),
    )
    net.init(jax.random.key(0), x)
    flax_util.find_param = original
    qwix.QtProvider.process_model_inputs(None, Pair(nnx.Rngs(0)), None, None)
    return {
        "once": once(0.0), "twice": twice(0.0), "both": both(0.5), "off": off(0.0), "after": plain(0.0),
        "len": len(ten()), "hash": hash(ten()), "keys": list(ten()),
        "has": [interception.has_attribute(n) for n in ("jax.numpy.sin", "jax.no.sin", "no.sin")],
        "get": interception.get_attribute("jax.numpy.pi"), "asked": (8, 16) in asked or (16, 8) in asked or len(asked) > 0,
        "rule": qconfig.get_current_rule("dot_general"),
    }  # fmt: skip


@same
def subclasses():
    """A provider of one's own, with its handler and the rule it asks for."""
    seen = []

    class Own(qwix.QuantizationProvider):
        def dot_general(self, *args, **kwargs):
            seen.append(self._get_current_rule_and_op_id("dot_general"))
            return jax.lax.dot_general(*args, **kwargs)

        def get_intercept_map(self):
            own = {"jax.lax.dot_general": self.dot_general}
            return super().get_intercept_map() | own

    class Asking(nn.Module):
        @nn.compact
        def __call__(self, x):
            seen.append(qconfig.get_current_rule("gmm"))
            return nn.Dense(4)(nn.Dense(4, name="first")(x))

    net = qwix.quantize_model(
        Asking(),
        Own([qwix.QtRule(module_path="first"), qwix.QtRule(op_names=("gmm",))]),
    )
    net.init(jax.random.key(0), jnp.ones((2, 3)))
    return [
        (s[0] and s[0].module_path, s[1]) if isinstance(s, tuple) else s.op_names
        for s in seen
    ]


@same
@eager
def errors():
    x, linen = planted(30, (4, 48)), nn.Dense(3)
    rule, provider = qwix.QuantizationRule, qwix.PtqProvider([])
    q = qwix.quantize(x, "int8", tiled_axes={1: 16})
    bad = qwix.QArray(jnp.ones((10, 10), jnp.int8), jnp.ones((10, 3)))
    return {
        "no type": error_of(qwix.quantize, x, "bfloat16"),
        "integers": error_of(qwix.quantize, jnp.ones((4, 4), jnp.int32), "int8"),
        "both": error_of(qwix.quantize, x, "int8", channelwise_axes=[1], tiled_axes={1: 4}),
        "method": error_of(qwix.quantize, x, "int8", calibration_method="what"),
        "rms": error_of(qwix.quantize, x, "int8", calibration_method="rms"),
        "window": error_of(qwix.quantize, x, "int8", calibration_method="fixed,1,2"),
        "asymmetric": error_of(qwix.quantize, x, "float8_e4m3fn", calibration_method="minmax"),
        "mx": error_of(qarray.HowToQuantize, qtype="mxfp8"),
        "mx tile": error_of(qarray.HowToQuantize, qtype="mxfp4", tiled_axes={0: 64}),
        "reshape": error_of(q.reshape, 16, 12), "index": error_of(lambda: q[:, 1:3]),
        "validate": error_of(qarray.validate_qarray, bad), "dequantize": error_of(qwix.dequantize, bad),
        "tiles": error_of(qwix.dot_general, *[
            qwix.quantize(jnp.ones((4, 512)), "int8", tiled_axes={1: t}) for t in (128, 256)
        ], (((1,), (1,)), ((), ()))),
        "diagonal": error_of(qwix.einsum, "ii,ij->ij", jnp.ones((3, 3)), jnp.ones((3, 3))),
        "static": error_of(qwix.PtqProvider, [rule(act_static_scale=True)]),
        "early": error_of(provider.get_unused_rules),
        "inputs": error_of(qwix.quantize_model, linen, provider, x),
        "no inputs": error_of(qwix.quantize_model, Pair(nnx.Rngs(0)), provider),
        "methods": error_of(qwix.quantize_model, Pair(nnx.Rngs(0)), provider, x, methods=("a", "b")),
        "model": error_of(qwix.quantize_model, lambda x: x, provider),
        "params": error_of(qwix.quantize_params, {"a": np.ones(3)}, {}),
        "lora": error_of(qwix.LoraProvider, [], rank=1), "rank": error_of(qwix.LoraRule),
        "bound": error_of(numerics.get_asymmetric_bound, "nf4"),
        "noise": error_of(stochastic_rounding.get_noise_fn("what", jax.random.key(0)), (2,)),
        "order": error_of(sparsity.get_sparsity_mask, x, 1, 4, order="Z"),
        "transpose": error_of(qarray.transpose_array, x, [0, None]),
        "zero shape": error_of(qarray.quantize_with_scale_zero_point, x, "int8", jnp.ones((1, 1)), jnp.ones((4, 1), jnp.int8)),
        "codes of integers": error_of(qarray.quantize_with_scale_zero_point, jnp.ones((4, 8), jnp.int32), "int8", jnp.ones((4, 1)), None),
        "scales": error_of(qarray.get_scale_shape, (4, 64), qarray.HowToQuantize(qtype="int8", tiled_axes={1: 7})),
        "no range": [error_of(qarray.clip_gradient_to_calibration, x, x, {}, m) for m in ("absmax", "rms,2")],
        "einsum": error_of(einsum_info.EinsumInfo.parse, "ab->a"),
        "sharding": error_of(flax_util.update_boxed, "text"),
    }  # fmt: skip


# --- running ----------------------------------------------------------------------------------


def signatures(names):
    """{name: [(parameter, kind, default)]} of everything callable but annotations."""
    out = {}
    for name in names:
        parent, _, attribute = name.rpartition(".")
        found = getattr(importlib.import_module(parent), attribute, None)
        if typing.get_origin(found) is not None:
            continue
        with contextlib.suppress(TypeError, ValueError):
            parameters = inspect.signature(found).parameters.values()
            out[name] = [
                (
                    p.name,
                    p.kind.name,
                    "" if p.default is p.empty else _default(p.default),
                )
                for p in parameters
            ]
    return out


def _default(value):
    plain = value is None or isinstance(value, str | int | float | bool)
    return repr(value) if plain else "something"


def run(fn):
    """{path: (dtype, array)} of a case's arrays, {path: ("", text)} of what is none."""
    if fn.__name__ in EAGER:
        return flatten(fn())
    plain = {}

    def arrays(one):
        ONE[0] = one
        flat = jax.tree_util.tree_flatten_with_path(fn())[0]
        named = {jax.tree_util.keystr(path): leaf for path, leaf in flat}
        is_array = lambda x: hasattr(x, "dtype")
        plain.update({k: v for k, v in named.items() if not is_array(v)})
        return {k: v for k, v in named.items() if is_array(v)}

    try:
        found = jax.jit(arrays)(1.0)
    finally:
        ONE[0] = 1.0
    texts = {k: ("", np.asarray(json.dumps(v))) for k, v in plain.items()}
    values = {k: (str(v.dtype), np.asarray(v, np.float32)) for k, v in found.items()}
    return {**texts, **values}


def flatten(tree):
    out = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        key = jax.tree_util.keystr(path)
        if hasattr(leaf, "dtype"):
            out[key] = str(leaf.dtype), np.asarray(leaf, np.float32)
        else:
            out[key] = "", np.asarray(json.dumps(leaf))
    return out


def main(path, names=""):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        results = {}
        for name, fn in CASES.items():
            for key, (dtype, value) in run(fn).items():
                results[f"{name}|{key}|{dtype}"] = value
    results["signatures"] = np.asarray(
        json.dumps(signatures(filter(None, names.split(","))))
    )
    np.savez(path, **results)


if __name__ == "__main__":
    main(*sys.argv[1:])
