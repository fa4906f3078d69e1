"""The compiled program, read back: what ran in which dtype, and what fell back."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import midtread as mt
from midtread.model.prove import read
from tests.model import transformers as t

X = jax.ShapeDtypeStruct((64, 128), jnp.bfloat16)


class MLP(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Dense(256, name="up", dtype=jnp.bfloat16)(x))
        return nn.Dense(128, name="down", dtype=jnp.bfloat16)(x)


def training_step(provider):
    model = mt.quantize_model(MLP(), provider)
    params = jax.eval_shape(model.init, jax.random.key(0), X)
    loss = lambda v, x: jnp.sum(model.apply(v, x).astype(jnp.float32) ** 2)
    return jax.jit(jax.grad(loss)), params, X


@functools.cache
def proof(qtype):
    rule = mt.QtRule(weight_qtype=qtype, act_qtype=qtype, bwd_qtype=qtype)
    return mt.prove(*training_step(mt.QtProvider([rule])))


@pytest.mark.parametrize("qtype, dtype", [("int8", "s8"), ("fp8", "f8e4m3fn")])
def test_a_quantized_step(qtype, dtype):
    """Five matmuls: the first layer's input gets no gradient."""
    found = proof(qtype)
    assert len(found.contractions) == 5 and not found.collectives
    assert {e.asked for e in found.contractions} == {(dtype, dtype)}
    assert found.flops == 5 * 2 * 64 * 128 * 256
    assert found.flops_share("low", "widened") == 1
    forward = [e for e in found.contractions if "transpose" not in e.name]
    assert {e.stored for e in forward} == {(dtype, dtype)}
    assert any("/up/" in e.name for e in forward)


def test_what_xla_widened_is_flagged():
    """A CPU has int8 matmuls, but not for every layout, and none of fp8."""
    by_name = {e.name: e for e in proof("int8").contractions}
    up = by_name["jit(<lambda>)/jvp(MLP)/MLP/up/jit(_train)/dot_general"]
    assert (up.verdict, up.ran, up.out) == ("low", ("s8", "s8"), "s32")
    widened = [e for e in proof("int8").contractions if e.verdict == "widened"]
    assert {e.ran for e in widened} == {("s32", "s32")}
    assert set(widened) == set(proof("int8").flagged)
    assert {e.verdict for e in proof("fp8").contractions} == {"widened"}
    assert "100.0% widened" in str(proof("fp8"))


def test_a_planted_upcast_is_caught():
    def upcast(x, w):
        q = mt.quantize(x, "int8"), mt.quantize(w, "int8")
        codes = (jax.lax.optimization_barrier(a.qvalue) for a in q)
        low, high = (c.astype(jnp.float32) for c in codes)
        return low @ high * q[0].scale * q[1].scale

    arrays = [jax.ShapeDtypeStruct((64, 64), jnp.float32)] * 2
    (one,) = mt.prove(jax.jit(upcast), *arrays).contractions
    assert (one.verdict, one.ran, one.cast_from) == (
        "upcast",
        ("f32",) * 2,
        ("s8",) * 2,
    )
    with pytest.raises(AssertionError, match=r"0.0% of FLOPs.*\(f32 x f32, upcast"):
        mt.assert_quantized(jax.jit(upcast), *arrays)


def test_a_planted_fallback_is_caught():
    class Sloppy(mt.QtProvider):  # says yes to every rule, and forgets one layer
        def dot_general(self, *args, **kwargs):
            if args[0].shape[-1] == 256:
                self._get_current_rule_and_op_id("dot_general")
                return jax.lax.dot_general(*args, **kwargs)
            return super().dot_general(*args, **kwargs)

    rule = mt.QtRule(weight_qtype="int8", act_qtype="int8", bwd_qtype="int8")
    accept = ("low", "widened")
    step = training_step(mt.QtProvider([rule]))
    mt.assert_quantized(*step, min_flops=1.0, accept=accept)
    with pytest.raises(
        AssertionError, match=r"40.0% of FLOPs.*/down/dot_general.*wide"
    ):
        mt.assert_quantized(*training_step(Sloppy([rule])), accept=accept)


def test_weights_in_low_bits_are_told_from_matmuls_in_low_bits():
    rule = mt.QuantizationRule(weight_qtype="int4", tile_size=32)
    model = mt.quantize_model(MLP(), mt.PtqProvider([rule]))
    params = jax.eval_shape(model.init, jax.random.key(0), X)
    found = mt.prove(jax.jit(model.apply), params, X)
    assert {(e.verdict, e.stored[1]) for e in found.contractions} == {
        ("dequantized", "s4")
    }


def test_a_planted_wide_gather_is_caught():
    mesh = Mesh(np.array(jax.devices()), ("data",))
    shard = lambda *spec: NamedSharding(mesh, PartitionSpec(*spec))
    whole = lambda x: jax.lax.with_sharding_constraint(x, shard())
    shape = lambda *s, dtype: jax.ShapeDtypeStruct(s, dtype, sharding=shard("data"))
    x = shape(64, 512, dtype=jnp.bfloat16)
    w, codes = shape(512, 256, dtype=jnp.bfloat16), shape(512, 256, dtype=jnp.int8)
    int8 = functools.partial(mt.quantize, qtype="int8")

    @jax.jit
    def late(x, w):  # gathers the weights, then quantizes them
        return mt.dot(int8(x, channelwise_axes=[0]), int8(whole(w)))

    @jax.jit
    def early(x, codes):  # gathers codes
        w = mt.QArray(whole(codes), jnp.ones((1, 1), jnp.bfloat16))
        return mt.dot(int8(x, channelwise_axes=[0]), w)

    (gather,) = (c for c in mt.prove(late, x, w).collectives if c.kind == "all-gather")
    assert gather.is_wide and gather.cast_from == "bf16" and gather.dims == (512, 256)
    with pytest.raises(AssertionError, match=r"gathered in wide floats.*bf16"):
        mt.assert_quantized(late, x, w, max_wide_gather_bytes=0)
    good = mt.assert_quantized(early, x, codes, max_wide_gather_bytes=0)
    (gather,) = (c for c in good.collectives if c.kind == "all-gather")
    assert (gather.dtype, gather.nbytes, gather.is_wide) == ("s8", 512 * 256, False)
    assert not good.flagged


def test_loops_count_as_often_as_they_turn():
    """The compiled program and `explain` agree on the FLOPs of a scan."""

    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return nn.tanh(nn.Dense(16)(x)), None

    class Stack(nn.Module):
        @nn.compact
        def __call__(self, x):
            how = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
            return nn.scan(Layer, length=7, **how)(name="layers")(x, None)

    x = jax.ShapeDtypeStruct((4, 8, 16), jnp.float32)
    provider = mt.QtProvider([{"weight_qtype": "int8", "act_qtype": "int8"}])
    model = mt.quantize_model(Stack(), provider)
    params = jax.eval_shape(model.init, jax.random.key(0), x)
    found = mt.prove(jax.jit(model.apply), params, x)
    assert found.flops == mt.explain(Stack(), provider, x).totals.flops
    assert [e.times for e in found.contractions] == [7]


def test_under_scan_remat_and_vmap():
    """What was asked is found again inside loops, where XLA renames and fuses."""
    tokens = jnp.zeros((t.BATCH, t.TOKENS), jnp.int32)
    provider = mt.QtProvider([{"weight_qtype": "int8", "act_qtype": "int8"}])
    model = mt.quantize_model(t.LinenTransformer(), provider)
    params = jax.eval_shape(model.init, jax.random.key(0), tokens)
    found = mt.prove(jax.jit(model.apply), params, tokens)
    low = [e for e in found.contractions if e.verdict == "low"]
    assert {e.asked for e in low} == {("s8", "s8")} and {e.times for e in low} == {1, 3}
    assert any("/layers/" in e.name and "experts" in e.name for e in low)
    wide = [e for e in found.contractions if e.verdict != "low"]
    assert {e.ran for e in wide} == {("s32", "s32"), ("f32", "f32")}  # ints, the kernel


GPU = """HloModule jit_step, is_scheduled=true

%gemm_fusion_dot_computation (p.0: s8[64,128], p.1: s8[128,32]) -> s32[64,32] {
  %p.0 = s8[64,128]{1,0} parameter(0)
  %p.1 = s8[128,32]{1,0} parameter(1)
  ROOT %dot.1 = s32[64,32]{1,0} dot(%p.0, %p.1), lhs_contracting_dims={1}, rhs_contracting_dims={0}, metadata={op_name="jit(step)/int8/dot_general"}
}

ENTRY %main (a: f8e4m3fn[64,128], b: f8e4m3fn[32,128], c: s8[64,128], d: s8[128,32], e: u8[128,16], s: f32[], groups: s32[4], stack: s8[4,128,32], scales: f32[64,1]) -> bf16[64,32] {
  %a = f8e4m3fn[64,128]{1,0} parameter(0)
  %b = f8e4m3fn[32,128]{1,0} parameter(1)
  %c = s8[64,128]{1,0} parameter(2)
  %d = s8[128,32]{1,0} parameter(3)
  %e = u8[128,16]{1,0} parameter(4)
  %s = f32[] parameter(5)
  %cublas = (bf16[64,32]{1,0}, s8[33554432]{0}) custom-call(%a, %b, %s, %s), custom_call_target="__cublas$lt$matmul$f8", metadata={op_name="jit(step)/fp8/dot_general"}, backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["1"]}}}
  %triton = s32[64,32]{1,0} fusion(%c, %d), kind=kCustom, calls=%gemm_fusion_dot_computation, backend_config={"fusion_backend_config":{"kind":"__triton_gemm"}}
  %up = f16[64,128]{1,0} convert(%a)
  %up.1 = f16[32,128]{1,0} convert(%b)
  %slow = f16[64,32]{1,0} custom-call(%up, %up.1), custom_call_target="__cublas$gemm", metadata={op_name="jit(step)/odd/dot_general"}, backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["1"]}}}
  %ours = bf16[64,32]{1,0} custom-call(%up, %e), custom_call_target="__gpu$xla.gpu.triton", metadata={op_name="jit(step)/w4_kernel"}
  %groups = s32[4]{0} parameter(6)
  %stack = s8[4,128,32]{2,1,0} parameter(7)
  %ragged = s32[64,32]{1,0} ragged-dot(%c, %stack, %groups), lhs_contracting_dims={1}, rhs_contracting_dims={1}, lhs_ragged_dims={0}, rhs_group_dims={0}, metadata={op_name="jit(step)/experts/ragged_dot"}
  %scales = f32[64,1]{1,0} parameter(8)
  %quantized = (s8[64,128]{1,0}, s8[128,64]{1,0}) custom-call(%up, %scales), custom_call_target="__gpu$xla.gpu.triton", metadata={op_name="jit(step)/quantize_kernel"}
  %words = s16[4,128,16]{2,1,0} bitcast-convert(%stack)
  %few = f32[64,32]{1,0} custom-call(%up, %words), custom_call_target="__gpu$xla.gpu.triton", metadata={op_name="jit(step)/experts_kernel"}
  %start = (bf16[8,32]{1,0}, bf16[64,32]{1,0}) all-gather-start(%ours), dimensions={0}, metadata={op_name="jit(step)/gather"}
  ROOT %done = bf16[64,32]{1,0} all-gather-done(%start)
}
"""


def test_gpu_programs_are_read():
    """Library calls, Triton fusions, our kernels and asynchronous collectives."""
    asked = {"jit(step)/odd/dot_general": [(("f8e4m3fn", "f8e4m3fn"), (64, 32))]}
    found = read(GPU, asked)
    got = {e.name.split("/")[1]: (e.kind, e.verdict) for e in found.contractions}
    assert got == {
        "fp8": ("gemm", "low"),
        "int8": ("dot", "low"),
        "odd": ("gemm", "widened"),
        "experts": ("ragged-dot", "low"),
        "w4_kernel": ("kernel", "kernel"),
        "experts_kernel": ("kernel", "kernel"),
    }
    matmul = 2 * 64 * 128 * 32
    flops = {e.name.split("/")[1]: e.flops for e in found.contractions}
    assert [flops[k] for k in ("fp8", "int8", "odd", "experts")] == [matmul] * 4
    assert flops["w4_kernel"] == 2 * math.isqrt(64 * 128 * 128 * 16 * 64 * 32)
    assert flops["experts_kernel"] == flops["w4_kernel"]  # a row meets one expert
    (gather,) = found.collectives
    assert gather.is_wide and gather.dims == (64, 32)


def test_bad_input():
    with pytest.raises(TypeError, match=r"write prove\(jax.jit\(f\)"):
        mt.prove(lambda x: x, X)
    with pytest.raises(ValueError, match="unknown verdict 'fast'"):
        mt.assert_quantized(jax.jit(jnp.dot), X, X, accept=("fast",))
    with pytest.raises(ValueError, match="between 0 and 1, not 95"):
        mt.assert_quantized(jax.jit(jnp.dot), X, X, min_flops=95)
    with pytest.raises(AssertionError, match="no contraction"):
        mt.assert_quantized(jax.jit(jnp.sin), X)
    with pytest.raises(ValueError, match="no ENTRY"):
        read("not HLO")
