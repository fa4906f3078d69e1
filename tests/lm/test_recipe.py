"""The DeepSeek-V3 FP8 recipe: what it quantizes, what it sends, and what it computes."""

import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from midtread.lm import build, model, quantization, ranges, settings, transfers
from midtread.lm.config import Model, section
from midtread.lm.train import train
from midtread.lm.usage import UsageError
from midtread.model import prove
from midtread.model.flaxlib import QuantStat, read
from midtread.model.quantize import quantize_model
from tests.lm.test_mesh import SPARSE, TOLERANCE, trained

RECIPE = ("deepseek-v3-fp8", "dataset_type=synthetic", "batch_size=8",
          "max_target_length=16", "warmup_steps_fraction=0")  # fmt: skip
DEEPSEEK = (*RECIPE, "model_name=tiny-deepseek", "num_decoder_layers=2")
# latent attention and a dense MLP: quick to compile
LATENT = (*RECIPE, "emb_dim=32", "num_decoder_layers=1", "num_query_heads=2",
          "num_kv_heads=2", "mlp_dim=64", "attention_type=mla", "q_lora_rank=16",
          "kv_lora_rank=16", "qk_nope_head_dim=16", "qk_rope_head_dim=8",
          "v_head_dim=16")  # fmt: skip


def test_every_site_is_as_the_recipe_says():
    config = settings.load(DEEPSEEK)
    found = build.coverage(config)
    sites = [r for r in found.rows if "layers/" in r.path and r.weight]
    names = {r.path.split("layers/")[1] for r in sites}
    assert {
        f"self_attention/{n}" for n in ("wq_a", "wq_b", "wkv_a", "wkv_b", "out")
    } < names
    assert {"MoeBlock_0", "MoeBlock_0/gate", "shared_experts/wo", "mlp/wo"} < names
    for row in sites:
        assert row.fwd == ("e4m3", "e4m3"), row
        assert row.dlhs == ("e5m2", "e4m3") and row.drhs == ("e4m3", "e5m2"), row
    (rule,) = quantization.rules(config)
    assert rule.op_names == ("dot_general", "ragged_dot")
    assert (
        rule.weight_calibration_method
        == rule.act_calibration_method
        == "fixed,-224,224"
    )
    assert rule.bwd_calibration_method == "absmax" and not rule.bwd_stochastic_rounding
    said = build.mode(config)
    assert "weight fixed,-224,224: one constant scale per tensor" in said
    assert "act fixed,-224,224: one constant scale per tensor" in said
    assert "bwd absmax" in said and "per row and per column" in said


# --- by hand, in float64 ----------------------------------------------------------------------


def by_constant(x):
    """e4m3 with a scale of 224 / 448."""
    return (
        np.clip(x * 2, -448, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float64) / 2
    )


def by_range(g, axis):
    """e5m2, the largest |g| along `axis` at its largest number."""
    scale = np.abs(g).max(axis=axis, keepdims=True) / 57344
    return (g / scale).astype(ml_dtypes.float8_e5m2).astype(np.float64) * scale


def dot(x, w):
    """x w and its two gradients, as functions of what comes back."""
    qx, qw = by_constant(x), by_constant(w)
    return qx @ qw, lambda g: (by_range(g, 1) @ qw.T, qx.T @ by_range(g, 0))


def grouped(x, w, sizes):
    qx, qw = by_constant(x), by_constant(w)
    ends = np.cumsum(sizes)
    spans = [slice(b - n, b) for b, n in zip(ends, sizes)]
    out = np.concatenate([qx[s] @ qw[e] for e, s in enumerate(spans)])

    def back(g):
        rows, columns = by_range(g, 1), by_range(g, 0)
        dx = np.concatenate([rows[s] @ qw[e].T for e, s in enumerate(spans)])
        return dx, np.stack([qx[s].T @ columns[s] for s in spans])

    return out, back


class Block(nnx.Module):
    def __init__(self, w, experts):
        self.w, self.experts = nnx.Param(w), nnx.Param(experts)

    def __call__(self, x, sizes):
        x = jax.lax.dot_general(x, self.w[...], (((1,), (0,)), ((), ())))
        return jax.lax.ragged_dot(x, self.experts[...], sizes)


class Decoder(nnx.Module):
    def __init__(self, block):
        self.layers = block

    def __call__(self, x, sizes):
        return self.layers(x, sizes)


class Net(nnx.Module):
    def __init__(self, block):
        self.decoder = Decoder(block)

    def __call__(self, x, sizes):
        return self.decoder(x, sizes)


def test_forward_and_gradients_are_those_made_by_hand():
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32)
    x, w, experts, g = draw(24, 16), draw(16, 32), draw(3, 32, 8), draw(24, 8)
    sizes = np.array([5, 12, 7])
    net = Net(Block(jnp.asarray(w), jnp.asarray(experts)))
    shapes = jax.ShapeDtypeStruct(x.shape, jnp.float32), jnp.asarray(sizes, jnp.int32)
    net = quantize_model(net, quantization.provider(settings.load(DEEPSEEK)), *shapes)
    graph, params, rest = nnx.split(net, nnx.Param, ...)

    def run(params, x):
        return nnx.merge(graph, params, rest)(x, shapes[1])

    out, back = jax.vjp(run, params, jnp.asarray(x))
    grads, dx = back(jnp.asarray(g))
    hidden, back_1 = dot(np.float64(x), np.float64(w))
    wanted, back_2 = grouped(hidden.astype(np.float32).astype(np.float64), np.float64(experts), sizes)  # fmt: skip
    dhidden, dexperts = back_2(np.float64(g))
    dx_wanted, dw = back_1(dhidden.astype(np.float32).astype(np.float64))
    close = lambda a, b: np.testing.assert_allclose(
        np.float64(a), b, rtol=0, atol=1e-5 * np.abs(b).max()
    )
    close(out, wanted)
    block = grads["decoder"]["layers"]
    close(block["experts"][...], dexperts)
    close(block["w"][...], dw)
    close(dx, dx_wanted)


# --- on the wire ------------------------------------------------------------------------------


def gathers(run) -> list:
    found = prove.read(run.compiled.as_text())
    return [c for c in found.collectives if c.kind == "all-gather"]


def weights(run) -> dict[str, tuple]:
    """Whole weights in the layers, without the axis of layers."""
    flat = nnx.to_flat_state(run.start.learned["decoder"])
    return {
        "/".join(map(str, path)): tuple(var.shape[1:])
        for path, var in flat
        if "layers" in path[0] and len(var.shape) > 2
    }


def test_weights_are_gathered_in_bytes():
    run = trained(*LATENT, "mesh=fsdp:4,data:2")
    sent = gathers(run)
    coded = sorted(c.dims for c in sent if c.dtype == "u8")
    assert coded == sorted(weights(run).values())  # each once, and one byte an element
    assert all(c.nbytes == c.times * np.prod(c.dims) for c in sent if c.dtype == "u8")
    shapes = set(weights(run).values())
    assert not [c for c in sent if c.dtype != "u8" and c.dims in shapes]
    assert run.losses[1] < run.losses[0]
    found = transfers.weights(run.config, run.layout.sizes, run.compiled.as_text())
    inside = [g for g in found if "layers/" in g.weight]
    assert len(inside) == len(weights(run)) and all(g.is_coded for g in inside)
    assert all(g.nbytes == math.prod(g.shape) for g in inside)  # of one layer
    (wide,) = [g for g in found if not g.is_coded]  # by name, with its bytes
    assert wide.weight == "token_embedder/embedding"
    assert wide.sent == ("f32",) and wide.nbytes == 4 * wide.times * 264 * 32
    table = transfers.describe(found)
    assert f"{len(inside)} quantized weights" in table and wide.weight in table


# --- static ranges ----------------------------------------------------------------------------


def noted_at(folder, *words) -> str:
    """A file of ranges as a calibration run writes it, without the run."""
    config = settings.load([*words, "load_parameters_path=-"])
    net = build.for_training(config, model.create(section(config, Model)))
    kept = nnx.state(net, QuantStat)
    for number, (_, var) in enumerate(nnx.to_flat_state(kept)):
        held = read(var)
        wide = 4 + number + jnp.arange(held["absmax"].size).reshape(held["absmax"].shape) % 3  # fmt: skip
        var.set_value({"count": held["count"] + 1, "absmax": wide.astype(jnp.float32)})
    ranges.save(folder, kept)
    return f"load_parameters_path={folder}"


STATIC = ("deepseek-v3-fp8-static", *LATENT[1:])


def test_codes_travel_with_their_scales(tmp_path):
    path = noted_at(tmp_path, *STATIC)
    run = trained(*STATIC, path, "mesh=fsdp:4,data:2")
    sent = [c for c in gathers(run) if "shard_map" in c.name]
    coded = sorted(c.dims for c in sent if c.dtype == "u8")
    assert coded == sorted(weights(run).values())  # each once, a byte an element
    # scales along the axis that is cut: of the two weights whose output is the stream
    assert [(c.dtype, c.dims) for c in sent if c.dtype != "u8"] == [
        ("f32", (1, 32))
    ] * 2
    shapes = set(weights(run).values())
    assert not [c for c in gathers(run) if c.dtype != "u8" and c.dims in shapes]
    stat = run.state.kept["decoder"]["layers"]["mlp"]["wo"]["kernel_range"]
    assert read(stat)["absmax"].sharding.spec == P(None, None, "fsdp")


def test_explain_says_static_per_axis():
    said = build.mode(settings.load([*STATIC, "load_parameters_path=runs/cal"]))
    assert "weights and activations static, per axis" in said and "runs/cal" in said
    assert "gradients: scales from the data, per row and per column" in said


@pytest.mark.slow
def test_static_ranges_on_a_mesh(tmp_path):
    words = ("deepseek-v3-fp8-static", *DEEPSEEK[1:])
    path, grid = noted_at(tmp_path, *words), "mesh=fsdp:4,data:2"
    coded, wide = (
        trained(*words, path, grid, f"fp8_weight_gather={x}") for x in ("true", "false")
    )
    assert coded.losses == wide.losses  # to the bit
    alone = trained(*words, path, "mesh=", "fp8_weight_gather=false")
    np.testing.assert_allclose(coded.losses, alone.losses, rtol=TOLERANCE)
    ring = trained(*words, path, "mesh=fsdp:2,expert:4", "expert_dispatch=ring")
    np.testing.assert_allclose(ring.losses, alone.losses, rtol=TOLERANCE)


@pytest.mark.slow
def test_a_calibration_run_and_the_run_that_uses_it(tmp_path):
    words = [*STATIC, "steps=3", "mesh=", "fp8_weight_gather=false",
             "eval_steps=1", f"base_output_directory={tmp_path}"]  # fmt: skip
    plain = train(settings.load([*words, "run_name=plain", "static="]))
    measured = train(settings.load([*words, "run_name=cal", "static=measure"]))
    assert measured.eval_loss == plain.eval_loss  # to note is not to change
    path = f"load_parameters_path={measured.folder}"
    used = train(settings.load([*words, "run_name=used", path]))
    assert used.eval_loss < plain.eval_loss
    with pytest.raises(UsageError, match="max_target_length"):
        train(settings.load([*words[:-1], path, "max_target_length=8"]))


@pytest.mark.slow
def test_the_recipe_on_a_tiny_deepseek():
    grid = "mesh=fsdp:4,data:2"
    run = trained(*DEEPSEEK, grid)
    coded = [c for c in gathers(run) if c.dtype == "u8"]
    assert {c.dims for c in coded} == set(weights(run).values())
    wide = trained(*DEEPSEEK, grid, "fp8_weight_gather=false")
    assert run.losses == wide.losses  # the same numbers, at half the bytes
    alone = trained(*DEEPSEEK, "mesh=", "fp8_weight_gather=false")
    np.testing.assert_allclose(run.losses, alone.losses, rtol=TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("more", [(), ("quantization=", "fp8_weight_gather=false",
    "weight_quantization_calibration_method=", "act_quantization_calibration_method=",
    "bwd_quantization_calibration_method=", "use_qwix_quantization=null")])  # fmt: skip
def test_a_batch_in_parts_has_the_same_loss(more):
    words = (*DEEPSEEK, *more, "batch_size=16", "mesh=fsdp:4,data:2")
    words = tuple(w for w in words if w != "batch_size=8")
    whole, parts = trained(*words), trained(*words, "batch_split_factor=2")
    np.testing.assert_allclose(parts.losses[0], whole.losses[0], rtol=TOLERANCE)
    # after an update: e5m2 gradients have other ranges in parts, and Adam's first step
    # takes little but their signs
    np.testing.assert_allclose(parts.losses[1], whole.losses[1], rtol=5e-3)


def test_a_batch_in_parts_on_one_device():
    whole, parts = trained(*SPARSE), trained(*SPARSE, "batch_split_factor=2")
    np.testing.assert_allclose(parts.losses, whole.losses, rtol=TOLERANCE)
    text = parts.compiled.as_text()
    assert text.count("opt-barrier") > 0 or "optimization_barrier" in text
