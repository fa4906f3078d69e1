"""AQT 0.9.0: MaxText's five ways to use it, against the recipes of the same name.

AQT clips to +-127 and we to -128, so on random data a code may differ by one. `planted` data avoids both: scales are powers of two and everything is comparable bit for
bit. Both sides are jitted, for XLA keeps more bits of a bfloat16 sum when it may.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import peer
import pytest
from peer import data, planted
from tolerances import ROWS, assert_codes, assert_values

import midtread as mt
from midtread.ops.recipe import aqt_fp8_full, aqt_int8

config, calibration, quantizer = peer.load(
    "aqtp",
    "0.9.0",
    "aqt.jax.v2.config",
    "aqt.jax.v2.calibration",
    "aqt.jax.v2.aqt_quantizer",
)

F32, BF16 = "float32", "bfloat16"
NO_BATCH = ((), ())
DOTS = [
    #  lhs           rhs           dimension numbers
    ((16, 32),      (32, 8),      (((1,), (0,)), NO_BATCH)),
    ((4, 16, 32),   (32, 8),      (((2,), (0,)), NO_BATCH)),
    ((2, 16, 32),   (2, 32, 8),   (((2,), (1,)), ((0,), (0,)))),
]  # fmt: skip


def int8_config(local_shards):
    """MaxText's `quantization=int8`, without the noise."""
    local = config.LocalAqt(contraction_axis_shard_count=local_shards)
    cfg = config.config_v3(
        fwd_bits=8,
        dlhs_bits=8,
        drhs_bits=8 if local_shards else None,
        drhs_local_aqt=local if local_shards else None,
        drhs_accumulator_dtype=jnp.int32 if local_shards else None,
    )
    config.set_stochastic_rounding(cfg, False, False, "jax.uniform")
    return cfg


def fp8_config():
    """MaxText's `aqt_fp8`."""
    return config.config_v4(
        fwd_bits="e4m3",
        dlhs_bits=None,
        drhs_bits=None,
        fwd_accumulator_dtype=jnp.bfloat16,
    )


def fp8_full_config(bounds=None):
    """MaxText's `aqt_fp8_full`, with `constant_bound_config`."""
    bf16 = jnp.bfloat16
    cfg = config.config_v4(
        fwd_bits="e4m3",
        dlhs_bits="e5m2",
        drhs_bits="e5m2",
        fwd_accumulator_dtype=bf16,
        dlhs_accumulator_dtype=bf16,
        drhs_accumulator_dtype=bf16,
        dlhs_use_fwd_quant=False,
        drhs_use_fwd_quant=False,
    )
    config.set_stochastic_rounding(cfg, False, False, "jax.uniform")
    sides = [side for raw in (cfg.fwd, cfg.dlhs, cfg.drhs) for side in (raw.dg_quantizer.lhs, raw.dg_quantizer.rhs)]  # fmt: skip
    for side, bound in zip(sides, bounds or [None] * 6):
        side.calib_shared_axes = "per_tensor"
        if bound is not None:
            side.calibration = functools.partial(
                calibration.ConstantCalibration, bound=bound
            )
    return cfg


def step(run, lhs, rhs, g=None):
    out, pull = jax.vjp(run, lhs, rhs)
    g = planted(3, out.shape) if g is None else g
    return out, *pull(g.astype(out.dtype))


def both(recipe, cfg, geometry, lhs, rhs, g=None):
    """((ours, theirs) for out, dlhs, drhs)."""
    numbers = geometry[2]
    ops = mt.learn(recipe)
    mine = lambda x, y: step(lambda x, y: ops.dot_general(x, y, numbers), x, y, g)
    yours = lambda x, y: step(lambda x, y: cfg(x, y, numbers), x, y, g)
    ours = jax.jit(mine)(lhs, rhs)
    with peer.manners():
        theirs = jax.jit(yours)(lhs, rhs)
    return list(zip(("out", "dlhs", "drhs"), ours, theirs))


def names(geometry):
    return "x".join(map(str, geometry[0]))


@pytest.mark.parametrize("local_shards", [0, 1, 2, 4])
@pytest.mark.parametrize("geometry", DOTS, ids=names)
def test_int8(geometry, local_shards):
    lhs, rhs = planted(1, geometry[0]), planted(2, geometry[1])
    recipe = aqt_int8(local_shards, rounding="nearest")
    cfg = int8_config(local_shards)
    for name, ours, theirs in both(recipe, cfg, geometry, lhs, rhs):
        exact = "bitwise" if name != "drhs" else "f32_sum"
        assert_values(ours, theirs, exact, (name, geometry, local_shards))


@pytest.mark.parametrize("local_shards", [0, 1, 4])
@pytest.mark.parametrize("geometry", DOTS, ids=names)
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_int8_on_random_data(geometry, local_shards, dtype):
    rng = np.random.default_rng(4)
    lhs, rhs = data(rng, geometry[0], dtype), data(rng, geometry[1], dtype)
    recipe = aqt_int8(local_shards, rounding="nearest")
    g = data(rng, jax.eval_shape(lambda: jax.lax.dot_general(lhs, rhs, geometry[2])).shape, dtype)  # fmt: skip
    row = "ties" if dtype == F32 else "aqt_bf16"
    for name, ours, theirs in both(
        recipe, int8_config(local_shards), geometry, lhs, rhs, g
    ):
        assert_values(ours, theirs, row, (name, geometry, local_shards))


def test_local_shards_change_the_ranges():
    """Rows of very different size: four ranges lose far less than one, in both libraries."""
    geometry = DOTS[0]
    lhs, rhs = planted(1, geometry[0]), planted(2, geometry[1])
    lhs = lhs * jnp.repeat(jnp.array([1.0, 2.0**-5, 2.0**-10, 2.0**-15]), 4)[:, None]
    drhs = {}
    for shards in (1, 4):
        recipe = aqt_int8(shards, rounding="nearest")
        *_, (_, ours, theirs) = both(recipe, int8_config(shards), geometry, lhs, rhs)
        assert_values(ours, theirs, "f32_sum", shards)
        drhs[shards] = ours
    assert not np.array_equal(drhs[1], drhs[4])


def test_summed_first_is_one_axis():
    """Shards follow lhs's first summed axis on both sides, in whatever order g comes."""
    recipe = aqt_int8(4, rounding="nearest")
    x, w = planted(1, (4, 16, 32)), planted(2, (32, 8))
    ops = mt.learn(recipe)
    _, _, straight = step(lambda x, w: ops.einsum("btd,df->btf", x, w), x, w)
    g = planted(3, (4, 16, 8)).transpose(1, 0, 2)
    _, _, turned = step(lambda x, w: ops.einsum("btd,df->tbf", x, w), x, w, g)
    assert_values(turned, straight, "f32_sum")


def test_int8_stochastic():
    """Noise by different generators: the same mean, which is the gradient without noise,
    and the same spread."""
    geometry, num = DOTS[0], 200
    lhs, rhs = planted(1, geometry[0]), planted(2, geometry[1])
    numbers = geometry[2]
    exact = step(lambda x, y: jax.lax.dot_general(x, y, numbers), lhs, rhs)
    cfg = int8_config(1)
    config.set_stochastic_rounding(cfg, True, False, "jax.uniform")

    @jax.vmap
    def ours(key):
        ops = mt.learn(aqt_int8(1), key=key)
        return step(lambda x, y: ops.dot_general(x, y, numbers), lhs, rhs)[1:]

    @jax.vmap
    def theirs(key):
        noisy = config.set_context(cfg, key, None)
        return step(lambda x, y: noisy(x, y, numbers), lhs, rhs)[1:]

    keys = jax.random.split(jax.random.key(0), num)
    with peer.manners():
        yours = theirs(keys)
    for a, b, c in zip(ours(keys), yours, exact[1:]):
        assert_values(a.mean(0), c, "chance")
        assert_values(b.mean(0), c, "chance")
        spread = float(jnp.mean(jnp.std(a, 0)) / jnp.mean(jnp.std(b, 0)))
        assert abs(spread - 1) < 0.1, spread


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("geometry", DOTS, ids=names)
def test_weight_only(bits, geometry):
    """MaxText's intmp {w_bits: 8 or 4}: dlhs meets the quantized weight."""
    top = 127.5 if bits == 8 else 7.5
    lhs, rhs = planted(1, geometry[0]), planted(2, geometry[1], top)
    cfg = config.dot_general_make(lhs_bits=None, rhs_bits=bits)
    recipe = mt.recipe(f"aqt_int{bits}w")
    for name, ours, theirs in both(recipe, cfg, geometry, lhs, rhs):
        assert_values(ours, theirs, "f32_sum", (name, bits))


@pytest.mark.parametrize("geometry", DOTS, ids=names)
def test_fp8(geometry):
    lhs, rhs = planted(1, geometry[0], 448.0), planted(2, geometry[1], 448.0)
    for name, ours, theirs in both(mt.recipe("aqt_fp8"), fp8_config(), geometry, lhs, rhs):  # fmt: skip
        row = "bitwise" if name == "out" else "f32_sum"
        assert_values(ours, theirs, row, (name, geometry))


# Six bounds, all different, all below the data, each a power of two times its format's own.
BOUNDS = (0.875, 1.75, 3.5, 0.4375, 7.0, 0.21875)


def fp8_full(bounds, geometry=DOTS[0], swapped=None):
    rng = np.random.default_rng(5)
    lhs, rhs = data(rng, geometry[0], F32, 4), data(rng, geometry[1], F32, 4)
    g = data(rng, (*geometry[0][:-1], geometry[1][-1]), F32, 4)
    return both(aqt_fp8_full(swapped or bounds), fp8_full_config(bounds), geometry, lhs, rhs, g)  # fmt: skip


@pytest.mark.parametrize("geometry", DOTS, ids=names)
def test_fp8_full_with_bounds(geometry):
    for name, ours, theirs in fp8_full(BOUNDS, geometry):
        assert_values(ours, theirs, "bitwise", (name, geometry))


@pytest.mark.parametrize("pair", list(itertools.combinations(range(6), 2)), ids=str)
def test_fp8_full_bounds_have_their_places(pair):
    """Our drhs.g is AQT's drhs.lhs. Any two bounds exchanged, something else comes out."""
    swapped = list(BOUNDS)
    swapped[pair[0]], swapped[pair[1]] = swapped[pair[1]], swapped[pair[0]]
    touched = {("out", "dlhs", "drhs")[i // 2] for i in pair}
    for name, ours, theirs in fp8_full(BOUNDS, swapped=tuple(swapped)):
        assert np.array_equal(ours, theirs) == (name not in touched), name


@pytest.mark.parametrize("geometry", DOTS, ids=names)
def test_fp8_full(geometry):
    """Dynamic ranges. The largest element is a power of two times both bounds, 7 * 2^n."""
    lhs, rhs = planted(1, geometry[0], 448.0), planted(2, geometry[1], 448.0)
    g = planted(3, (*geometry[0][:-1], geometry[1][-1]), 448.0)
    for name, ours, theirs in both(aqt_fp8_full(), fp8_full_config(), geometry, lhs, rhs, g):  # fmt: skip
        assert_values(ours, theirs, "bitwise", (name, geometry))


@pytest.mark.parametrize("bits", [8, 4])
def test_codes(bits):
    """Random data: equal but for ties of the reciprocal and the one code -128."""
    fmt = mt.as_format(f"int{bits}")
    x = data(np.random.default_rng(6), (256, 512), F32)
    ours = mt.quantize(x, fmt, channelwise_axes=[0])
    with peer.manners():
        theirs, _ = quantizer.quantizer_make(bits).quant(x, calibration_axes=[1])
    assert_values(ours.scale, theirs.scale[0], "reciprocal")
    levels = np.arange(fmt.codes[0], fmt.codes[1] + 1)
    clipped = jnp.maximum(ours.qvalue.astype(jnp.int32), -fmt.codes[1])
    assert_codes(clipped, theirs.qvalue, "reciprocal", levels)
    share = assert_codes(ours.qvalue, theirs.qvalue, "minus_128", levels)
    assert 0 < share < ROWS["minus_128"].share
