"""QArray: views, padding, pytrees, shardings and refusals."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from midtread.numerics import views
from midtread.numerics.qarray import QArray, dequantize, quantize, validate
from midtread.numerics.spec import Spec
from tests.support import f64, mesh, quantize_in_jit


@pytest.fixture
def x(key):
    return jax.random.normal(key, (4, 6, 8))


LAYOUTS = {
    "tensor": {},
    "channel": {"channelwise_axes": [2]},
    "channels": {"channelwise_axes": [0, 1]},
    "tile": {"channelwise_axes": [0], "tiled_axes": {2: 4}},
    "blocks": {"tiled_axes": {1: 3, 2: 4}},
}
every_layout = pytest.mark.parametrize("layout", LAYOUTS)
ALWAYS_WHOLE = {  # views that tear no tile, whatever the layout
    "transpose": lambda a: a.transpose(2, 0, 1),
    "transpose list": lambda a: a.transpose([-1, 0, 1]),
    "transpose all": lambda a: a.transpose(),
    "swapaxes": lambda a: a.swapaxes(0, -1),
    "T": lambda a: a.T,
    "mT": lambda a: a.mT,
    "int": lambda a: a[1],
    "negative int": lambda a: a[:, -1],
    "last int": lambda a: a[..., 5],
    "every int": lambda a: a[1, 2, 3],
    "none": lambda a: a[None],
    "none inside": lambda a: a[:, None, :, None],
    "ellipsis": lambda a: a[..., None],
    "slice of the first": lambda a: a[1:3],
    "stride": lambda a: a[::2],
    "tiles": lambda a: a[..., 4:8],
    "tiles of two axes": lambda a: a[:, 3:, :4],
    "index array": lambda a: a[jnp.array([2, 0])],
    "index list": lambda a: a[[2, 0]],
    "traced scalar": lambda a: a[jnp.int32(1)],
    "2-D index array": lambda a: a[jnp.array([[2, 0], [1, 1]])],
    "mask": lambda a: a[np.array([True, False, True, True])],
    "one more axis": lambda a: a.reshape(4, 6, 1, 8),
    "same shape": lambda a: a.reshape(4, 6, -1),
}


@every_layout
@pytest.mark.parametrize("view", ALWAYS_WHOLE)
def test_views_commute_with_dequantize(layout, view, x):
    q, view = quantize(x, "int8", **LAYOUTS[layout]), ALWAYS_WHOLE[view]
    got, want = dequantize(view(q)), view(np.asarray(dequantize(q)))
    assert view(q).shape == want.shape
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(
    "index",
    [
        (jnp.array([1, 0]), jnp.array([3, 5])),
        (0, slice(None), jnp.array([1, 7])),
        (jnp.array([1, 0]), slice(None), jnp.array([1, 7])),
        (slice(None), np.array([[0, 1], [2, 3]])),
        (np.ones((4, 6), bool),),
    ],
    ids=["pointwise", "apart", "arrays apart", "2-D", "2-D mask"],
)
@pytest.mark.parametrize("layout", ["tensor", "channel", "channels"])
def test_index_arrays_move_every_part_alike(layout, index, x):
    q = quantize(x, "int8", **LAYOUTS[layout])
    np.testing.assert_array_equal(dequantize(q[index]), dequantize(q)[index])


def test_zero_points_follow_views(x):
    q = quantize(x, "int8", channelwise_axes=[2], calibration_method="minmax")
    for view in (lambda a: a.T, lambda a: a[1:3, 2], lambda a: a.reshape(24, 8)):
        np.testing.assert_array_equal(dequantize(view(q)), view(dequantize(q)))


@pytest.mark.parametrize(
    "view, want",
    [
        (lambda q: q.reshape(4, 1, 3, 2), (2, 1, 3, 1)),
        (lambda q: q.reshape((1, 4, 6)), (1, 2, 3)),
        (lambda q: q[..., 1], (2, 1)),
        (lambda q: q[0], (1, 3)),
        (lambda q: q[None], (1, 2, 1, 3)),
        (lambda q: q.mT, (2, 3, 1)),
        (lambda q: q[..., 2:6], (2, 1, 2)),
        (lambda q: q.reshape(2, 2, 3, -1), (2, 1, 3, 1)),
    ],
)
def test_scale_shapes_of_views(view, want, key):
    q = quantize(
        jax.random.normal(key, (2, 2, 6)),
        "int8",
        channelwise_axes=[0],
        tiled_axes={2: 2},
    )
    assert q.scale.shape == (2, 1, 3)
    assert view(q).scale.shape == want
    np.testing.assert_array_equal(dequantize(view(q)), view(dequantize(q)))


@pytest.mark.parametrize(
    "view, advice",
    [
        (lambda q: q[..., 1:5], "tiles of 4. Take whole tiles"),
        (lambda q: q[..., ::2], "Take whole tiles"),
        (lambda q: q[..., jnp.array([0, 4])], "or dequantize"),
        (lambda q: q.reshape(4, 48), "torn apart"),
        (lambda q: q.reshape(6, 4, 8), "torn apart"),
        (lambda q: q.reshape(5, 5), "sizes differ"),
        (lambda q: q.reshape(-1, -1, 192), "only one -1"),
        (lambda q: q.transpose(0, 1), "each axis once"),
        (lambda q: q.transpose(0, 1, 1), "each axis once"),
        (lambda q: q.transpose(0, 1, 5), "out of bounds"),
        (lambda q: q.swapaxes(0, 3), "out of bounds"),
    ],
)
def test_views_that_would_tear_a_tile_are_refused(view, advice, x):
    q = quantize(x, "int8", channelwise_axes=[0], tiled_axes={2: 4})
    with pytest.raises(ValueError, match=advice):
        view(q)


def test_too_many_indices(x):
    with pytest.raises(IndexError, match="too many indices: 4"):
        quantize(x, "int8")[0, 0, 0, 0]


# --- padding to whole tiles -------------------------------------------------------------------


@pytest.fixture
def padded(key):
    return quantize(jax.random.normal(key, (3, 10)), "int8", tiled_axes={-1: 4, 0: 2})


def test_padding_is_not_seen_from_outside(padded):
    assert padded.shape == (3, 10) == dequantize(padded).shape
    assert padded.qvalue.shape == (4, 12) and padded.scale.shape == (2, 3)
    assert padded.size == 30
    assert padded.T.shape == (10, 3) == dequantize(padded.T).shape
    np.testing.assert_array_equal(dequantize(padded.T), dequantize(padded).T)
    np.testing.assert_array_equal(dequantize(padded[None]), dequantize(padded)[None])


def test_padding_changes_no_value(key):
    x = jax.random.normal(key, (3, 10))
    whole = quantize(x[:, :8], "int8", channelwise_axes=[0], tiled_axes={1: 4})
    ragged = quantize(x, "int8", channelwise_axes=[0], tiled_axes={1: 4})
    np.testing.assert_array_equal(dequantize(ragged)[:, :8], dequantize(whole))
    last = quantize(x[:, 8:], "int8", channelwise_axes=[0])
    np.testing.assert_array_equal(dequantize(ragged)[:, 8:], dequantize(last))


def test_a_single_short_tile_is_not_padded(key):
    q = quantize(jax.random.normal(key, (10,)), "mxfp8", tiled_axes={0: 32})
    assert q.qvalue.shape == (10,) and q.logical is None


@pytest.mark.parametrize(
    "view", [lambda q: q[:, 2:4], lambda q: q[0], lambda q: q.reshape(-1)]
)
def test_a_padded_axis_cannot_be_cut(view, padded):
    with pytest.raises(ValueError, match="padded.*[Dd]equantize"):
        view(padded)


def test_scan_and_vmap_over_stacked_padded_arrays(key):
    x = jax.random.normal(key, (5, 3, 10))
    spec = {"channelwise_axes": [0], "tiled_axes": {2: 4}}
    stacked = quantize(x, "int8", **spec)
    assert stacked.shape == (5, 3, 10)
    _, scanned = jax.lax.scan(lambda c, q: (c, dequantize(q)), 0, stacked)
    mapped = jax.vmap(dequantize)(stacked)
    np.testing.assert_array_equal(scanned, dequantize(stacked))
    np.testing.assert_array_equal(mapped, dequantize(stacked))
    built = jax.vmap(lambda x: quantize(x, "int8", tiled_axes={1: 4}))(x)
    assert built.shape == (5, 3, 10)
    np.testing.assert_array_equal(dequantize(built), dequantize(stacked))


# --- layouts ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "how, same",
    [
        ({"channelwise_axes": [-1]}, {"channelwise_axes": [2]}),
        ({"tiled_axes": {-2: 3}}, {"tiled_axes": {1: 3}}),
        ({"tiled_axes": {2: 1}}, {"channelwise_axes": [2]}),
        ({"tiled_axes": {2: 1.0}}, {}),
        ({"tiled_axes": {2: 1 / 4}}, {"tiled_axes": {2: 2}}),
    ],
)
def test_ways_to_say_the_same_layout(how, same, x):
    got, want = quantize(x, "int8", **how), quantize(x, "int8", **same)
    assert got.scale.shape == want.scale.shape
    np.testing.assert_array_equal(dequantize(got), dequantize(want))


@pytest.mark.parametrize(
    "how, advice",
    [
        ({"channelwise_axes": [3]}, "axis 3 is out of range"),
        ({"channelwise_axes": [1], "tiled_axes": {-2: 3}}, "both channelwise and tiled"),
        ({"tiled_axes": {1: 3, -2: 3}}, "tiled twice"),
        ({"tiled_axes": {1: 0}}, "must be above 0"),
        ({"channelwise_axes": ["rows"]}, "unknown axis 'rows'"),
        ({"rounding": "up"}, "unknown rounding 'up'"),
        ({"scale_rule": "pow3"}, "unknown scale_rule 'pow3'"),
    ],
)  # fmt: skip
def test_bad_layouts_are_refused(how, advice, x):
    with pytest.raises(ValueError, match=advice):
        quantize(x, "int8", **how)


def test_formats_with_a_tile_insist_on_it():
    with pytest.raises(ValueError, match="mxfp8 requires `tiled_axes`"):
        Spec("mxfp8")
    with pytest.raises(
        ValueError, match="mxfp8 requires a tile size of 32, but axis 1 got 64"
    ):
        Spec("mxfp8", tiled_axes={1: 64})


# --- pytree -----------------------------------------------------------------------------------


def test_leaves_and_their_paths(x):
    q = quantize(x, "int8", calibration_method="minmax")
    leaves, treedef = jax.tree_util.tree_flatten_with_path(q)
    names = [jax.tree_util.keystr(path) for path, _ in leaves]
    assert names == [".qvalue", ".scale", ".zero_point"]
    again = jax.tree_util.tree_unflatten(treedef, [leaf for _, leaf in leaves])
    assert again.qtype == q.qtype and again.logical == q.logical
    np.testing.assert_array_equal(dequantize(again), dequantize(q))


@pytest.mark.parametrize("same", [jnp.int8, np.dtype("int8"), "INT8"], ids=repr)
def test_a_format_has_one_treedef_however_it_was_named(same, x):
    a, b = quantize(x, "int8"), quantize(x, same)
    assert jax.tree.structure(a) == jax.tree.structure(b)
    assert a.qtype == jnp.int8 and a.qtype == "int8"
    assert jax.tree.structure(QArray(a.qvalue, a.scale)) == jax.tree.structure(a)


def test_int4_and_int3_share_a_container_not_a_treedef(x):
    assert jax.tree.structure(quantize(x, "int3")) != jax.tree.structure(
        quantize(x, "int4")
    )


def test_placeholders_need_no_validation():
    shape = jax.ShapeDtypeStruct((4, 8), jnp.int8)
    abstract = QArray(shape, jax.ShapeDtypeStruct((1, 8), jnp.float32))
    assert abstract.shape == (4, 8) and abstract.qtype == jnp.int8
    assert abstract.dtype == jnp.float32
    strings = QArray("codes", "scales", qtype="nf4")
    assert jax.tree.leaves(strings) == ["codes", "scales"]
    assert "codes" in repr(strings) and "(4, 8)" in repr(abstract)
    validate(strings)
    assert jax.tree.map(lambda _: None, abstract).qtype == jnp.int8


def test_eval_shape_agrees_with_running(x):
    how = {"channelwise_axes": [0], "tiled_axes": {2: 3}}
    q = quantize_in_jit(x, "int4", **how)
    abstract = jax.eval_shape(lambda x: quantize(x, "int4", **how), x)
    assert jax.tree.structure(abstract) == jax.tree.structure(q)
    assert abstract.shape == q.shape and abstract.dtype == q.dtype


# --- dtype, printing, sharding ----------------------------------------------------------------


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_looks_like_an_array_of_the_scales_dtype(dtype, x):
    q = quantize(x.astype(dtype), "int8")
    assert q.dtype == dtype == dequantize(q).dtype
    assert dequantize(q, jnp.float32).dtype == jnp.float32
    as_half = q.astype(jnp.bfloat16)
    assert as_half.dtype == jnp.bfloat16 == as_half.scale.dtype
    np.testing.assert_array_equal(as_half.qvalue, q.qvalue)


def test_scale_dtype_is_applied_after_quantizing(x):
    q, half = (quantize(x, "int8", scale_dtype=d) for d in (None, jnp.bfloat16))
    np.testing.assert_array_equal(half.qvalue, q.qvalue)
    np.testing.assert_array_equal(f64(half.scale), f64(q.scale.astype(jnp.bfloat16)))


def test_printing(x):
    assert repr(quantize(x, "int8")).startswith("QArray(int8 [4, 6, 8] 196 B (was 768")
    assert repr(quantize(x, "nf4", tiled_axes={2: 4})).startswith("QArray(nf4/")
    seen = []
    jax.jit(lambda q: seen.append(repr(q)))(quantize(x, "int8"))
    assert seen == ["QArray(int8 [4, 6, 8])"]


def test_scales_are_sharded_where_they_can_be(key):
    x = jax.random.normal(key, (16, 64))
    q = quantize(x, "int8", channelwise_axes=[1], tiled_axes={0: 4})
    whole = NamedSharding(mesh(2, 4), PartitionSpec("model", "data"))
    assert q.shardings(whole).scale.spec == PartitionSpec("model", "data")
    per_tensor = quantize(x, "int8").shardings(whole)
    assert per_tensor.qvalue.spec == PartitionSpec("model", "data")
    assert per_tensor.scale.spec == PartitionSpec(None, None)
    placed = jax.device_put(q, q.shardings(whole))
    assert placed.scale.sharding.shard_shape(placed.scale.shape) == (1, 32)
    np.testing.assert_array_equal(dequantize(placed), dequantize(q))


def test_pre_scale_multiplies_and_follows_views(x):
    plain = quantize(x, "int8", channelwise_axes=[2])
    factors = jnp.linspace(0.5, 2, 6).reshape(1, 6, 1)
    q = plain.replace(pre_scale=factors)
    np.testing.assert_allclose(dequantize(q), dequantize(plain) * factors, rtol=1e-6)
    np.testing.assert_array_equal(dequantize(q.T[:, 2:4]), dequantize(q).T[:, 2:4])


# --- refusals and poison ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "change, advice",
    [
        ({"scale": jnp.ones(8)}, "same rank"),
        ({"scale": jnp.ones((4, 6, 3))}, "every extent must divide"),
        ({"zero_point": jnp.zeros((1, 1, 5), jnp.int8)}, "every extent must divide"),
        ({"zero_point": jnp.zeros((1, 1, 1), jnp.int4)}, "same dtype as qvalue"),
        ({"scale": jnp.ones((1, 1, 1), jnp.int8)}, "not a valid type for scale"),
        ({"qtype": "int4"}, "not a valid type for qvalue of int4"),
        ({"pre_scale": jnp.ones(2)}, "pre_scale.*same rank"),
    ],
)
def test_parts_that_do_not_belong_together(change, advice, x):
    q = quantize(x, "int8").replace(**change)
    with pytest.raises(ValueError, match=advice):
        dequantize(q)


@pytest.mark.parametrize(
    "bad, advice",
    [
        (np.ones((2, 2), np.int32), "Refuse to quantize: int32"),
        (np.ones((2, 2), bool), "Refuse to quantize: bool"),
        (jnp.ones((2, 2), jnp.float8_e4m3fn), "Refuse to quantize: float8_e4m3fn"),
        (np.ones((2, 0), np.float32), r"empty array: its shape is \(2, 0\)"),
        ([1.0, 2.0], "Refuse to quantize: list"),
    ],
    ids=["int", "bool", "float8", "empty", "list"],
)
def test_what_cannot_be_quantized(bad, advice):
    with pytest.raises(ValueError, match=advice):
        quantize(bad, "int8")


def test_a_quantized_array_is_not_quantized_again(x):
    with pytest.raises(TypeError, match="quantized already"):
        quantize(quantize(x, "int8"), "int4")


def test_numpy_and_scalars_are_welcome():
    assert quantize(np.ones((2, 2), np.float32), "int8").shape == (2, 2)
    assert dequantize(quantize(jnp.float32(3), "nf4")) == 3


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(
    "qtype", ["int8", "int1", "nf4", "float8_e5m2", "float4_e2m1fn", "mxfp8", "nvfp4"]
)
def test_poison_stays_in_its_tile(qtype, bad, key):
    """A tile that holds NaN or inf is lost throughout, and no other is: NaN for NaN, and
    for inf NaN too (0 * inf), or inf where the format has codes other than 0 left."""
    tile = 32 if qtype != "nvfp4" else 16
    x = jax.random.normal(key, (4, 64)).at[1, 3].set(bad)
    q = quantize_in_jit(x, qtype, channelwise_axes=[0], tiled_axes={1: tile})
    got = np.asarray(dequantize(q))
    lost = np.isnan(got) if np.isnan(bad) else ~np.isfinite(got)
    assert lost[1, :tile].all() and lost.sum() == tile


@pytest.mark.parametrize("method", ["rms,3", "percentile,90", "mse", "minmax"])
@pytest.mark.parametrize("width", [64, 40], ids=["whole", "ragged"])
def test_nan_is_never_calibrated_away(method, width, key):
    x = jax.random.normal(key, (2, width)).at[1, -1].set(np.nan)
    how = {"channelwise_axes": [0], "tiled_axes": {1: 32}, "calibration_method": method}
    got = np.isnan(dequantize(quantize_in_jit(x, "int8", **how)))
    assert got[1, 32:].all() and got.sum() == width - 32


@pytest.mark.parametrize("method", ["absmax", "minmax", "mse,2"])
def test_nan_is_kept_at_any_size(method, key):
    """XLA's maximum drops it on a CPU from 64 x 64 on, along rows and columns."""

    @jax.jit
    def lost(x):
        makes = [{}, {"channelwise_axes": [0]}, {"channelwise_axes": [1]}]
        makes += [{"tiled_axes": {0: 64, 1: 64}}, {"tiled_axes": {1: 64}}]
        make = lambda shared: quantize(x, "int8", calibration_method=method, **shared)
        return [jnp.sum(jnp.isnan(dequantize(make(shared)))) for shared in makes]

    for dtype in (jnp.float32, jnp.bfloat16):
        x = jax.random.normal(key, (128, 128), dtype).at[3, 5].set(np.nan)
        assert lost(x) == [128 * 128, 128, 128, 64 * 64, 128 * 64]


def test_codes_that_are_floats_map_and_trace():
    """Averages of codes, or what gradients look like, are no codes but travel as such."""
    q = jax.tree.map(
        lambda part: part.astype(jnp.float32), quantize(jnp.ones(4), "int8")
    )
    made = QArray(q.qvalue, q.scale)
    assert made.qtype == jnp.float32 and "float32" in repr(made)
    doubled = jax.jit(lambda q: jax.tree.map(lambda part: 2 * part, q))(made)
    np.testing.assert_array_equal(doubled.qvalue, 2 * q.qvalue)
    with pytest.raises(ValueError, match="not a format"):
        dequantize(made)


def test_compared_and_taken_back_as_arrays_are(x):
    q, again = quantize(x, "int8"), quantize(x, "int8")
    assert (q == again).shape == x.shape and (q == again).all()
    assert not (q == x).all() and (q == dequantize(q)).all()
    np.testing.assert_array_equal(q.dequantize(), dequantize(q))
    shapes = jax.eval_shape(lambda: q)
    assert shapes == jax.eval_shape(lambda: again) and shapes != jax.eval_shape(
        lambda: q.T
    )
    with pytest.raises(
        TypeError, match="a quantized parameter, not an array of float32"
    ):
        dequantize(x)


def test_small_arrays_are_measured_in_bytes():
    assert (
        repr(quantize(jnp.ones((4, 4)), "int8")) == "QArray(int8 [4, 4] 20 B (was 64))"
    )


def test_sizes_are_in_a_unit_that_tells_them_apart():
    assert "60.1 kB (was 240.0)" in repr(quantize(jnp.ones((3000, 20)), "int8", channelwise_axes=[1]))  # fmt: skip
    assert "1.1 MB (was 4.2)" in repr(quantize(jnp.ones((1024, 1024)), "int8", channelwise_axes=[1]))  # fmt: skip


def test_a_format_that_is_nearly_right():
    with pytest.raises(ValueError, match="Did you mean 'int8'"):
        quantize(jnp.ones(4), "int_8")


@pytest.mark.parametrize(
    "fn", [jnp.sum, jnp.abs, lambda q: jnp.dot(jnp.ones((2, 4)), q)]
)
def test_jax_functions_are_answered_with_what_to_write(fn):
    q = quantize(jnp.ones((4, 4)), "int8")
    with pytest.raises(
        TypeError, match=r"mt\.dot, .* and mt\.dequantize makes an array"
    ):
        fn(q)


def test_tiles_that_straddle_shards_are_answered_with_what_to_write():
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,))
    tiled = {"channelwise_axes": [1], "tiled_axes": {0: 4}}
    with jax.set_mesh(mesh):
        rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x", None))
        w = jax.device_put(jnp.ones((12, 8)), rows)
        with pytest.raises(ValueError, match="tiles of 4 straddle the 2 .* divides 6"):
            quantize(w, "int4", **tiled)
        w = jax.device_put(jnp.ones((16, 8)), rows)
        assert quantize(w, "int4", **tiled).scale.shape == (4, 8)


def test_extents_of_which_neither_divides_the_other_are_named():
    with pytest.raises(ValueError, match=r"Cannot broadcast .*: of 3 and 4 neither"):
        views.broadcast_with(jnp.add, jnp.ones((2, 3)), jnp.ones((2, 4)))
