"""`train` against a by-hand computation of what its recipe says."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import midtread as mt
from midtread.model.rules import recipe_of
from midtread.numerics.qarray import quantize_by_spec
from midtread.ops import contraction
from midtread.ops.engine import contract
from midtread.ops.recipe import (
    RECIPES,
    Fwd,
    aqt_fp8_full,
    aqt_int8,
    qat,
    qt,
    te_nvfp4,
)
from midtread.ops.training import serve

CHANNEL = mt.per_channel("int8")


@pytest.fixture
def batch(key):
    x = jax.random.normal(key, (32, 256))
    w = jax.random.normal(jax.random.fold_in(key, 1), (256, 48))
    g = jax.random.normal(jax.random.fold_in(key, 2), (32, 48))
    return x, w, g


def ranges_of(name):
    if "delayed" not in name:
        return None
    constant = lambda a: {"absmax": jnp.full((1, 1), a)}
    return mt.Ranges(constant(4.5), constant(4.5), constant(4.5))


def step(recipe, x, w, g, **options):
    out, vjp = jax.vjp(mt.learn(recipe, **options).dot, x, w)
    return out, *vjp(g.astype(out.dtype))


def error(ours, theirs):
    return float(jnp.linalg.norm(ours - theirs) / jnp.linalg.norm(theirs))


# How far a recipe may be from the float step, forward / backward: its formats' own noise.
NOISE = {
    "int8": 0.02,
    "fp8": 0.08,
    "fp4": 0.25,
    "int4": 0.25,
    "mxfp8": 0.08,
    "nvfp4": 0.25,
}


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_is_close_to_float(name, batch, key):
    x, w, g = batch
    limit = max(v for k, v in NOISE.items() if k in name)
    out, dx, dw = step(mt.recipe(name), x, w, g, key=key, ranges=ranges_of(name))
    for ours, theirs in ((out, x @ w), (dx, g @ w.T), (dw, x.T @ g)):
        assert 0 < error(ours, theirs) < limit or (
            ours is not out and error(ours, theirs) < 1e-6
        )


def test_qat_gradients_are_straight_through(batch):
    x, w, g = batch
    _, dx, dw = step(qat("int8", "int8"), x, w, g)
    np.testing.assert_array_equal(dx, g @ w.T)
    np.testing.assert_array_equal(dw, jnp.einsum("mk,mn->kn", x, g))


def test_served_is_contracted_and_straight_through(batch):
    """The bits of `contract` on operands quantized by hand, clipped values too; the gradient
    of an activation that of what the weight's codes stand for, and no mask."""
    x, w, g = batch
    clips = mt.per_channel("int8", calibration="absmax,0.5")
    codes = mt.quantize(w, "int8", channelwise_axes=(1,))
    c = contraction.dot((((1,), (0,)), ((), ())), 2, 2)
    run = lambda x: serve(c, Fwd(lhs=clips), x, codes)
    out, vjp = jax.vjp(run, x)
    by_hand = quantize_by_spec(x, c.number_axes(clips, "lhs", x.shape))
    assert jnp.any(jnp.abs(by_hand.qvalue) == 127)
    np.testing.assert_array_equal(run(x), contract(c, by_hand, codes))
    np.testing.assert_array_equal(out, run(x))
    np.testing.assert_allclose(
        vjp(g)[0], g @ mt.dequantize(codes).T, rtol=1e-5, atol=1e-4
    )


def test_reuse_folds_the_scale_into_g(batch):
    x, w, g = batch
    out, dx, dw = step(qt("int8", "int8", "int8"), x, w, g)
    qx = mt.quantize(x, "int8", channelwise_axes=[0])
    qw = mt.quantize(w, "int8", channelwise_axes=[1])
    np.testing.assert_array_equal(out, mt.dot(qx, qw))
    gw = mt.quantize(g * qw.scale, "int8", channelwise_axes=[0])
    np.testing.assert_array_equal(dx, mt.dot(gw, qw.T.qvalue))
    gx = mt.quantize(g * qx.scale, "int8", channelwise_axes=[1])
    np.testing.assert_array_equal(dw, mt.einsum("mk,mn->kn", qx.qvalue, gx))


def test_tiled_forward_still_has_a_quantized_backward(batch):
    """Qwix multiplies floats here. Both operands are quantized again, along the new sum."""
    x, w, g = batch
    _, dx, dw = step(qt("int8", "int8", "int8", tile=128), x, w, g)
    gq = mt.quantize(g, "int8", channelwise_axes=[0], tiled_axes={1: 128})
    wq = mt.quantize(w, "int8", channelwise_axes=[0], tiled_axes={1: 128})
    np.testing.assert_array_equal(dx, mt.einsum("mn,kn->mk", gq, wq))
    gq = mt.quantize(g, "int8", channelwise_axes=[1], tiled_axes={0: 128})
    xq = mt.quantize(x, "int8", channelwise_axes=[1], tiled_axes={0: 128})
    np.testing.assert_array_equal(dw, mt.einsum("mk,mn->kn", xq, gq))


def test_blocks_are_reused_from_both_sides(batch):
    x, w, g = batch
    _, dx, _ = step(mt.recipe("deepseek_fp8"), x, w, g)
    gq = mt.quantize(g, "e4m3", channelwise_axes=[0], tiled_axes={1: 128})
    wq = mt.quantize(w, "e4m3", tiled_axes={0: 128, 1: 128})
    np.testing.assert_allclose(dx, mt.dot(gq, wq.T), rtol=1e-5, atol=1e-4)


def test_a_zero_point_survives_the_backward(batch):
    x, w, g = batch
    recipe = qt("int8", "int8", "int8")
    minmax = mt.per_channel("int8", calibration="minmax")
    recipe = dataclasses.replace(recipe, fwd=mt.Fwd(minmax, CHANNEL))
    _, dx, dw = step(recipe, x + 2, w, g)
    assert error(dw, (x + 2).T @ g) < 0.02 and error(dx, g @ w.T) < 0.02


@pytest.mark.parametrize("reuse", [True, False])
@pytest.mark.parametrize(
    "method", ["absmax,0.5", "rms,1", "fixed,-1,1", "fixed,-1,2", "percentile,90"]
)
def test_no_gradient_where_the_window_clipped(method, reuse, batch):
    x, w, g = batch
    clipped = mt.per_channel("int8", calibration=method)
    recipe = mt.Recipe(mt.Fwd(clipped, CHANNEL))
    if reuse:
        recipe = dataclasses.replace(
            recipe, dlhs=mt.Dlhs(CHANNEL, mt.REUSE), drhs=mt.Drhs(mt.REUSE, CHANNEL)
        )
    _, dx, dw = step(recipe, x, w, g)
    range_ = mt.numerics.qarray.calibrate(
        x, mt.Spec("int8", channelwise_axes=(0,), calibration=method)
    )
    high = range_.get("max", range_.get("absmax"))
    low = range_.get("min", -high)
    inside = (x >= low) & (x <= high)
    assert 0 < inside.mean() < 1
    np.testing.assert_array_equal(dx == 0, ~inside)
    assert not (dw == 0).any()
    _, dx, _ = step(dataclasses.replace(recipe, mask_clipped=False), x, w, g)
    assert not (dx == 0).any()


def test_static_ranges_are_used(batch):
    x, w, g = batch
    wide = mt.Ranges(lhs={"absmax": jnp.full((1, 1), 100.0)})
    out, *_ = step(qt("int8", "int8", "int8"), x, w, g, ranges=wide)
    coarse = mt.quantize(x, "int8", calibration_method="fixed,100")
    np.testing.assert_array_equal(
        out, mt.dot(coarse, mt.quantize(w, "int8", channelwise_axes=[1]))
    )


def test_delayed_ranges_report_what_was_seen(batch):
    x, w, g = batch
    recipe = mt.recipe("te_fp8_delayed")

    def loss(ranges):
        return jnp.sum(mt.learn(recipe, ranges=ranges).dot(x, w) * g)

    seen = jax.grad(loss)(ranges_of("delayed"))
    np.testing.assert_allclose(seen.g["absmax"], jnp.max(jnp.abs(g)).reshape(1, 1))
    with pytest.raises(ValueError, match="takes its range from earlier steps"):
        mt.learn(recipe).dot(x, w)


def test_delayed_margin_leaves_headroom(batch):
    x, w, g = batch
    delayed = lambda text: mt.Recipe(mt.Fwd(mt.per_tensor("e4m3", calibration=text)))
    ranges = mt.Ranges(lhs={"absmax": jnp.full((1, 1), 4.0)})
    wide = mt.Ranges(lhs={"absmax": jnp.full((1, 1), 16.0)})
    ours = step(delayed("delayed,2"), x, w, g, ranges=ranges)[0]
    np.testing.assert_array_equal(
        ours, step(delayed("delayed"), x, w, g, ranges=wide)[0]
    )


def test_stochastic_gradients_are_unbiased_and_need_a_key(batch, key):
    x, w, g = batch
    recipe = qt("int8", "int8", "int4", rounding="stochastic")
    with pytest.raises(ValueError, match="needs a random key"):
        step(recipe, x, w, g)
    grads = jax.jit(jax.vmap(lambda k: step(recipe, x, w, g, key=k)[1]))(
        jax.random.split(key, 400)
    )
    qw = mt.dequantize(mt.quantize(w, "int8", channelwise_axes=[1]))
    assert error(grads.mean(0), g @ qw.T) < 0.2 * error(grads[0], g @ qw.T)
    other = step(recipe, x, w, g, key=key, ), step(recipe, x, w, g, key=key, site="elsewhere")  # fmt: skip
    assert (other[0][1] != other[1][1]).any()


def test_rotation_changes_rounding_only(batch, key):
    x, w, g = batch
    x = x.at[3].multiply(50)  # one outlier token
    exact = x.T @ g
    plain = step(te_nvfp4(None), x, w, g, key=key)[2]
    rotated = step(te_nvfp4(), x, w, g, key=key)[2]
    assert error(rotated, exact) < 0.25 and error(plain, exact) < 0.25
    assert (rotated != plain).any()
    with pytest.raises(ValueError, match="rotation needs a key|needs a random key"):
        step(te_nvfp4(), x, w, g)


def test_frozen_and_integer_operands_get_no_gradient(batch):
    x, w, g = batch
    frozen = mt.quantize(w, "nf4", channelwise_axes=[1])
    ops = mt.learn(qat(act="int8"))
    dx = jax.grad(lambda x: jnp.sum(ops.dot(x, frozen) * g))(x)
    np.testing.assert_allclose(dx, g @ mt.dequantize(frozen).T, atol=1e-4)
    codes = jnp.ones((32, 256), jnp.int8)
    dw = jax.grad(lambda w: jnp.sum(ops.dot(codes, w) * g))(w)
    np.testing.assert_allclose(dw, codes.astype(jnp.float32).T @ g, atol=1e-4)


def test_sparsity_comes_first(batch):
    x, w, g = batch
    recipe = dataclasses.replace(qt("int8", "int8", "int8"), sparsity=mt.Sparsity(2, 4))
    out, _, dw = step(recipe, x, w, g)
    pruned = mt.Sparsity(2, 4).apply(w)
    np.testing.assert_array_equal(
        out, step(qt("int8", "int8", "int8"), x, pruned, g)[0]
    )
    np.testing.assert_array_equal(dw == 0, pruned == 0)


def test_forward_mode_is_refused_with_what_to_write(batch):
    x, w, _ = batch
    dot = lambda x: mt.learn(mt.recipe("qwix_int8")).dot(x, w)
    with pytest.raises(TypeError, match="write jax.vjp, jax.grad or jax.jacrev"):
        jax.jvp(dot, (x,), (x,))


def test_second_order_is_refused(batch):
    x, w, _ = batch
    loss = lambda x: jnp.sum(mt.learn(mt.recipe("qwix_int8")).dot(x, w) ** 2)
    for second in (jax.hessian(loss), jax.grad(lambda x: jnp.sum(jax.grad(loss)(x)))):
        with pytest.raises(NotImplementedError, match="has no derivative"):
            second(x[:1])


# What is kept between forward and backward, against bfloat16. One 16-bit copy where an
# operand is quantized again along another axis, codes where it is not.
RESIDUALS = {
    "qwix_int8": 0.6, "qwix_fp8": 0.6, "qwix_fp8_full": 0.6, "te_fp8_current": 0.6,
    "te_mxfp8": 1.05, "te_nvfp4": 1.05, "deepseek_fp8": 1.05, "aqt_int8": 1.05,
    "aqt_fp8_full": 1.05, "qat_int8": 1.05, "qat_fp8": 1.05,
}  # fmt: skip


def residual_bytes(op):
    def stack(x, weights):
        for w in weights:
            x = op(x, w)
        return x

    x = jax.ShapeDtypeStruct((512, 256), jnp.bfloat16)
    weights = [
        jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((256, 512), (512, 256)) * 2
    ]
    vjp = jax.eval_shape(lambda *a: jax.vjp(stack, *a)[1], x, weights)
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(vjp))


@pytest.mark.parametrize("name", RESIDUALS)
def test_residual_bytes(name, key):
    ours = residual_bytes(mt.learn(mt.recipe(name), key=key).dot)
    assert ours <= RESIDUALS[name] * residual_bytes(jnp.dot)


def test_clip_masks_are_packed():
    clipped = mt.per_channel("int8", calibration="absmax,0.9")
    recipe = dataclasses.replace(
        qt("int8", "int8", "int8"), fwd=mt.Fwd(clipped, clipped)
    )
    assert residual_bytes(mt.learn(recipe).dot) <= 0.6 * residual_bytes(jnp.dot)


@pytest.mark.parametrize(
    "build, message",
    [
        (lambda: mt.Recipe(mt.Fwd(mt.per_channel("int8", 128), CHANNEL), drhs=mt.Drhs(mt.REUSE, CHANNEL)),
         "drhs.lhs=REUSE, but the forward tiles"),
        (lambda: mt.Recipe(mt.Fwd(rhs=mt.per_channel("mxfp8")), dlhs=mt.Dlhs(CHANNEL, mt.REUSE)),
         "dlhs.rhs=REUSE, but the forward tiles"),
        (lambda: mt.Recipe(drhs=mt.Drhs(hadamard=12)), "power of two"),
        (lambda: mt.Recipe(mt.Fwd(CHANNEL, CHANNEL), drhs=mt.Drhs(mt.REUSE, CHANNEL, hadamard=16)), "hadamard rotates"),
        (lambda: mt.recipe("int7_magic"), "unknown recipe 'int7_magic'. There are: qwix_int8"),
        (lambda: aqt_fp8_full((1.0, 2.0)), "come in six"),
        (lambda: mt.per_channel("int8", calibration="maxabs"), "unknown calibration 'maxabs'"),
        (lambda: mt.per_channel("int8", rounding="up"), "unknown rounding 'up'"),
    ],
)  # fmt: skip
def test_bad_recipes_are_refused(build, message):
    with pytest.raises(ValueError, match=message):
        build()


def test_conv_refuses_tiles(key):
    x, w = jax.random.normal(key, (2, 4, 8, 8)), jax.random.normal(key, (6, 4, 3, 3))
    ops = mt.learn(qt("int8", "int8", "int8", tile=32))
    with pytest.raises(
        ValueError, match="conv_general_dilated has no 'summed' axis to tile"
    ):
        ops.conv_general_dilated(x, w, (1, 1), "SAME")


def test_local_shards_have_their_own_range(batch):
    x, w, g = batch
    x = x * jnp.repeat(jnp.array([1.0, 100.0]), 16)[:, None]
    dw = lambda n: step(aqt_int8(n, "nearest"), x, w, g)[2]
    assert error(dw(2), x.T @ g) != error(dw(1), x.T @ g)
    half = lambda s: mt.einsum(
        "mk,mn->kn", *(mt.quantize(a[s], "int8", channelwise_axes=[1]) for a in (x, g))
    )
    np.testing.assert_allclose(
        dw(2), half(slice(16)) + half(slice(16, None)), rtol=1e-5, atol=1e-3
    )
    np.testing.assert_array_equal(dw(0), jnp.einsum("mk,mn->kn", x, g))


def test_a_weight_shared_inside_shard_map_gets_the_sum_of_gradients(key):
    mesh = jax.make_mesh((4,), ("x",), (jax.sharding.AxisType.Auto,))
    split, whole = jax.sharding.PartitionSpec("x"), jax.sharding.PartitionSpec()
    x, w = jax.random.normal(key, (64, 32)), jax.random.normal(key, (32, 16))
    ops = mt.learn(mt.recipe("qwix_int8"))
    loss = lambda x, w: jnp.sum(jnp.sin(ops.dot(x, w)))
    grads = lambda x, w: jax.grad(loss, (0, 1))(x, w)
    shards = jax.shard_map(
        grads, mesh=mesh, in_specs=(split, whole), out_specs=(split, whole)
    )
    dx, dw = jax.jit(shards)(x, w)
    want_dx, want_dw = jax.jit(grads)(x, w)
    np.testing.assert_array_equal(dx, want_dx)
    # each device quantizes its own rows of g, under its own ranges
    assert jnp.linalg.norm(dw - want_dw) < 0.02 * jnp.linalg.norm(want_dw)


@pytest.mark.parametrize("fmt", ["mxfp8", "nvfp4", "int8"])
@pytest.mark.parametrize(
    "term", ["k,kn->n", "mk,k->m", "k,k->", "m,n->mn"], ids=lambda t: t[:-2]
)
def test_a_tile_along_an_axis_that_an_operand_lacks_is_all_of_it(fmt, term, key):
    # The gradient of a vector's weight sums nothing, and a vector keeps nothing.
    sizes = {"k": 64, "n": 40, "m": 24}
    shapes = [[sizes[x] for x in part] for part in term.split("->")[0].split(",")]
    operands = [jax.random.normal(k, s) for k, s in zip(jax.random.split(key), shapes)]
    rule = mt.QtRule(
        weight_qtype=fmt, act_qtype=fmt, bwd_qtype=fmt,
        tile_size=16 if fmt == "int8" else None,
    )  # fmt: skip
    ops = mt.learn(recipe_of(rule, False, True))
    out, want = (jax.vjp(f, *operands)[1] for f in (
        functools.partial(ops.einsum, term), functools.partial(jnp.einsum, term)
    ))  # fmt: skip
    g = jax.random.normal(key, [sizes[x] for x in term.split("->")[1]])
    for got, exact in zip(out(g), want(g)):
        assert jnp.linalg.norm(got - exact) < 0.25 * jnp.linalg.norm(exact)


@pytest.mark.parametrize("name", ["qwix_int8", "deepseek_fp8", "aqt_int8"])
def test_an_empty_batch_has_an_empty_product_and_no_gradient(name, batch):
    _, w, _ = batch
    x, ops = jnp.zeros((0, 256)), mt.learn(mt.recipe(name))
    out, vjp = jax.vjp(ops.dot, x, w)
    dx, dw = vjp(out)
    assert (out.shape, dx.shape, out.dtype) == ((0, 48), (0, 256), w.dtype)
    np.testing.assert_array_equal(dw, jnp.zeros_like(w))
