"""What must reach the compiler: low-precision operands in all three matmuls."""

import re

import jax
import jax.numpy as jnp
import pytest

import midtread as mt

GOLDEN = {
    "qwix_int8": ["i8,i8->i32"] * 3,
    "qwix_int4": ["i8,i8->i32"]
    * 3,  # four bits are multiplied as eight, see kernels/xla.py
    "qwix_fp8": ["f8E4M3FN,f8E4M3FN->f32"] * 3,
    "qwix_fp8_full": [
        "f8E4M3FN,f8E4M3FN->f32",
        "f8E5M2,f8E4M3FN->f32",
        "f8E4M3FN,f8E5M2->f32",
    ],
    "qwix_fp4": ["f8E4M3FN,f8E4M3FN->f32"] * 3,
    "qat_int8": ["i8,i8->i32", "bf16,bf16->bf16", "bf16,bf16->bf16"],
    "aqt_int8": ["i8,i8->i32"] * 3,
    "aqt_fp8_full": ["f8E4M3FN,f8E4M3FN->bf16", "f8E5M2,f8E5M2->bf16"],
    "te_fp8_current": [
        "f8E4M3FN,f8E4M3FN->f32",
        "f8E5M2,f8E4M3FN->f32",
        "f8E4M3FN,f8E5M2->f32",
    ],
    "deepseek_fp8": ["f8E4M3FN,f8E4M3FN->f32"] * 3,
}


def matmuls(text: str) -> list[str]:
    """'lhs,rhs->out' element types of every dot in StableHLO text."""
    pattern = r"dot_general.*: \(tensor<(\S+?)>, tensor<(\S+?)>\) -> tensor<(\S+?)>"
    element = lambda shape: shape.split("x")[-1]
    return ["{},{}->{}".format(*map(element, m)) for m in re.findall(pattern, text)]


@pytest.mark.parametrize("name", GOLDEN)
def test_all_three_matmuls(name, key):
    ops = mt.learn(mt.recipe(name), key=key)

    def step(x, w, g):
        out, vjp = jax.vjp(ops.dot, x, w)
        return out, vjp(g)

    shapes = ((256, 256), (256, 256), (256, 256))
    arrays = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in shapes]
    seen = matmuls(jax.jit(step).lower(*arrays).as_text())
    assert sorted(set(seen)) == sorted(set(GOLDEN[name]))
    assert len(seen) >= 3


PUBLIC = [
    "Dlhs",
    "Drhs",
    "FORMATS",
    "Format",
    "Fwd",
    "QArray",
    "REUSE",
    "Ranges",
    "Recipe",
    "Sparsity",
    "Spec",
    "as_format",
    "blocks",
    "conv_general_dilated",
    "dequantize",
    "assert_quantized",
    "explain",
    "implementation",
    "process_prequantized_params",
    "restore_quantization_rules",
    "prove",
    "dot",
    "dot_general",
    "einsum",
    "learn",
    "per_channel",
    "per_tensor",
    "quantize",
    "ragged_dot",
    "ragged_dot_general",
    "recipe",
    "PtqProvider",
    "QtProvider",
    "QtRule",
    "QuantStat",
    "QuantizationProvider",
    "QuantizationRule",
    "WithAux",
    "disable_interceptions",
    "get_current_rule",
    "load_rules",
    "quantize_model",
    "quantize_params",
    "quantize_variables",
    "DelayedFp8Provider",
    "LoraProvider",
    "LoraRule",
    "OdmlConversionProvider",
    "OdmlQatProvider",
    "QuantizedDotGeneral",
    "QuantizedEinsum",
    "accumulate_gradients",
    "apply_lora_to_model",
    "load_lora",
    "lora_params",
    "merge_lora",
    "overwrite_with_gradient",
    "quantize_function",
    "remove_float_params",
    "save_lora",
    "unmerge_lora",
    "with_lora",
    "Calibrated",
    "CalibrationOptions",
    "calibrate",
    "allocate",
    "bisect",
    "sensitivity",
]


def test_public_names():
    import types

    names = [
        n
        for n, v in vars(mt).items()
        if n[0] != "_" and not isinstance(v, types.ModuleType)
    ]
    assert sorted(names) == sorted(PUBLIC)
    assert len(names) <= 68
