"""The table: every name of Qwix 0.1.8 that resolves here, and what it is.

A row is `their name: "module:name"`, below `midtread`. To take in another name, add its row.
"""

_A, _M, _F, _S, _P, _C, _Q, _O = (
    f"interop.qwix.{m}"
    for m in (
        "arrays", "matmuls", "models", "sparse", "passes", "contrib", "qep", "solvers"
    )
)  # fmt: skip

_QARRAY = {
    "QArray": "numerics.qarray:QArray",
    "HowToQuantize": f"{_A}:HowToQuantize",
    "MaybeQArray": "ops.engine:Operand",
    "ShapeT": f"{_A}:ShapeT",
    "USE_RECIPROCAL_FOR_QUANTIZATION": f"{_A}:USE_RECIPROCAL_FOR_QUANTIZATION",
    "quantize": f"{_A}:quantize",
    "quantize_api": "numerics.qarray:quantize",
    "dequantize": "numerics.qarray:dequantize",
    "calibrate": f"{_A}:calibrate",
    "compute_scale_zero_point": f"{_A}:compute_scale_zero_point",
    "quantize_with_scale_zero_point": f"{_A}:quantize_with_scale_zero_point",
    "get_scale_shape": f"{_A}:get_scale_shape",
    "get_tiled_axes": f"{_A}:get_tiled_axes",
    "split_axis": f"{_A}:split_axis",
    "call_with_generic_broadcast": "numerics.views:broadcast_with",
    "broadcast_to": f"{_A}:broadcast_to",
    "transpose_array": f"{_A}:transpose_array",
    "reshape": f"{_A}:reshape",
    "rewriting_take": f"{_A}:rewriting_take",
    "validate_qarray": f"{_A}:validate_qarray",
    "sparsify": f"{_S}:sparsify",
    "clip_to_calibration": f"{_A}:clip_to_calibration",
    "clip_gradient_to_calibration": f"{_A}:clip_gradient_to_calibration",
    "get_accumulator_and_result_type": f"{_A}:get_accumulator_and_result_type",
}  # fmt: skip

_NUMERICS = {
    "NoiseFn": "numerics.rounding:Noise",
    "should_quantize": "numerics.dtypes:is_wide",
    "can_dequant_on_output": f"{_A}:can_dequant_on_output",
    "get_asymmetric_bound": f"{_A}:get_asymmetric_bound",
    "get_symmetric_bound": f"{_A}:get_symmetric_bound",
    "convert_to": f"{_A}:convert_to",
    "convert_from": f"{_A}:convert_from",
    "get_nf4_buckets": f"{_A}:get_nf4_buckets",
    "fp_to_nf4": f"{_A}:fp_to_nf4",
    "nf4_to_fp": f"{_A}:nf4_to_fp",
}

_SPARSITY = {
    name: f"{_S}:{name}"
    for name in (
        "SparsityRule", "apply_sparsity", "get_sparsity_mask",
        "get_sparsity_mask_unstructured", "prune_inputs_n_m",
    )
}  # fmt: skip

_PTQ = {
    "WithAux": "model.boxes:WithAux",
    "PtqProvider": "providers.ptq:PtqProvider",
    "quantize_params": "interop.qwix.models:quantize_params",
    "quantize_act": f"{_F}:quantize_act",
    "create_quantized_param": f"{_F}:create_quantized_param",
    "qarray": f"{_F}:qarray",
    "ArrayTypeVar": f"{_F}:ArrayTypeVar",
}

_FLAX_UTIL = {
    "QuantStat": "model.flaxlib:QuantStat",
    "unbox": f"{_F}:unbox",
    "get_value_from_path": "model.flaxlib:value_at",
    **{
        name: f"{_F}:{name}"
        for name in (
            "should_update_quant_stats", "get_current_module", "get_current_module_path",
            "get_or_create_variable", "get_and_delete_variable", "get_or_create_param",
            "find_param", "update_sharding", "update_boxed", "make_rng",
        )
    },
}  # fmt: skip

_CHECKPOINTS = {
    "process_prequantized_params": "providers.prequantized:process_prequantized_params",
    "restore_quantization_rules": "providers.prequantized:restore_quantization_rules",
}

_ODML = {
    "OdmlQatProvider": ":OdmlQatProvider",
    "OdmlConversionProvider": ":OdmlConversionProvider",
}

_ODML_OPS = {
    name: f"providers.litert_own:{name}"
    for name in (
        "AuxDataKey", "BatchNorm", "Concatenate", "CustomJvpCall", "DotEinsumConv",
        "Dropout", "FakeQuantFn", "FinalOutput", "GetRuleAndOpIdFn", "ModelInput",
        "NoQuantOp", "NotAnActivationError", "OnlyInputOp", "OnlyOutputOp",
        "PrimitiveBindOp", "QuantizedOp", "Silu", "Softmax", "Take", "Tanh", "UfuncCall",
        "get_all_ops",
    )
}  # fmt: skip

_LORA = {
    "LoraProvider": "providers.lora:LoraProvider",
    "LoraRule": "providers.lora:LoraRule",
    "apply_lora_to_model": "providers.lora:apply_lora_to_model",
}

_OPS = {
    "dot": f"{_M}:dot",
    "dot_general": "ops.api:dot_general",
    "einsum": f"{_M}:einsum",
    "conv_general_dilated": "ops.api:conv_general_dilated",
    "ragged_dot": "ops.api:ragged_dot",
    "ragged_dot_general": f"{_M}:ragged_dot_general",
}

MODULES: dict[str, dict[str, str]] = {
    "qwix": {
        **_OPS,
        **_LORA,
        **_ODML,
        **_CHECKPOINTS,
        "QArray": "numerics.qarray:QArray",
        "quantize": "numerics.qarray:quantize",
        "dequantize": "numerics.qarray:dequantize",
        "quantize_model": "model.quantize:quantize_model",
        "quantize_params": "interop.qwix.models:quantize_params",
        "PtqProvider": "providers.ptq:PtqProvider",
        "BoxedParamProvider": "providers.ptq:PtqProvider",
        "QtProvider": "providers.qt:QtProvider",
        "QtRule": "model.rules:QtRule",
        "QuantizationProvider": "model.provider:QuantizationProvider",
        "QuantizationRule": "model.rules:QuantizationRule",
        "QuantStat": "model.flaxlib:QuantStat",
    },
    "qwix.pallas": {
        **{name: f"pallas:{name}" for name in (
            "QArray", "quantize", "dequantize", "get_current_rule", "pallas_call", "__all__"
        )},
        "dot_general": f"{_M}:loop_dot_general",
        "dot": f"{_M}:loop_dot",
        "einsum": f"{_M}:loop_einsum",
    },
    "qwix.version": {"__version__": "interop.qwix:VERSION"},
    "qwix.contrib": {},
    "qwix.contrib.calibration": {
        **{
            name: f"{_C}:{name}"
            for name in ("CalibrationProvider", "SinglePassCalibrationProvider")
        },
        **{
            name: f"{_O}:{name}"
            for name in (
                "normalize_weight", "CalibratedQuantContext",
                "extract_calibrated_quant_context", "quantize_params_with_calibration",
            )
        },
    },
    "qwix.contrib.gptq_core": {
        "cholesky_inverse": f"{_O}:cholesky_inverse",
        "find_params": f"{_O}:find_params",
        "quantize": f"{_O}:quantize_column",
        "quantize_weight": f"{_O}:gptq_quantize_weight",
        "compute_hessian": f"{_O}:compute_hessian",
    },
    "qwix.contrib.awq_core": {
        "compute_act_scale": f"{_O}:compute_act_scale",
        "search_optimal_scales": f"{_O}:search_optimal_scales",
        "quantize_weight": f"{_O}:awq_quantize_weight",
    },
    "qwix.contrib.qep_core": {
        name: f"{_O}:{name}" for name in ("compute_qep_stats", "weight_correct")
    },
    "qwix.contrib.gptq": {
        "GptqRule": f"{_C}:GptqRule",
        "GptqCalibrationProvider": f"{_C}:GptqCalibrationProvider",
        "quantize_params": f"{_C}:gptq_quantize_params",
    },
    "qwix.contrib.awq": {
        "AwqRule": f"{_C}:AwqRule",
        "AwqCalibrationProvider": f"{_C}:AwqCalibrationProvider",
        "AwqInferenceProvider": "providers.ptq:PtqProvider",
        "WithAwqScale": "model.boxes:WithAux",
        "quantize_params": f"{_C}:awq_quantize_params",
    },
    "qwix.contrib.smooth_quant": {
        "SqRule": f"{_C}:SqRule",
        "SqCalibrationProvider": f"{_C}:SqCalibrationProvider",
        "SqInferenceProvider": "providers.ptq:PtqProvider",
        "WithSqScale": "model.boxes:WithAux",
        "quantize_params": f"{_C}:sq_quantize_params",
        "compute_scales_ratio": f"{_O}:compute_scales_ratio",
    },
    "qwix.contrib.qep": {
        **{
            name: f"{_Q}:{name}"
            for name in ("QepRule", "QepStage", "QepResult", "quantize")
        },
        "quantize_params": f"{_O}:qep_quantize_params",
    },
    "qwix.contrib.hadamard_rot": {
        "hadamard_rotate_inputs": f"{_Q}:hadamard_rotate_inputs",
    },
    "qwix.contrib.padded_ptq": {  # every QArray is padded to whole tiles where it must be
        "PaddedPtqProvider": "providers.ptq:PtqProvider",
        "PaddedQArray": "numerics.qarray:QArray",
        "PtqProvider": "providers.ptq:PtqProvider",
        "HowToQuantize": f"{_A}:HowToQuantize",
        "QARRAY_KEEP_PADDED_SHAPE": f"{_O}:QARRAY_KEEP_PADDED_SHAPE",
        "MaybeQArray": f"{_O}:MaybeQArray",
        "calibrate": f"{_A}:calibrate",
        "pad_to_shape": f"{_O}:pad_to_shape",
        "get_padded_shape": f"{_O}:get_padded_shape",
        "quantize": f"{_A}:quantize",
        "dequantize": "numerics.qarray:dequantize",
        "dot_general": _OPS["dot_general"],
        "einsum": _OPS["einsum"],
        "quantize_act": f"{_F}:quantize_act",
        "create_quantized_param": f"{_F}:create_quantized_param",
        "quantize_params": f"{_F}:quantize_params",
    },
    "qwix.contrib.sparsity": {},
    "qwix.contrib.sparsity.sparsity_module": {"SparsityModule": f"{_S}:SparsityModule"},
    "qwix._src": {},
    "qwix._src.core": {},
    "qwix._src.core.numerics": _NUMERICS,
    "qwix._src.core.qarray": _QARRAY,
    "qwix._src.core.dot": {"dot": _OPS["dot"]},
    "qwix._src.core.dot_general": {
        "dot_general": _OPS["dot_general"],
        "loop_dot_general": f"{_M}:loop_dot_general",
        "get_how_to_quantize": f"{_M}:how_in_dot_general",
        "MIN_TILE_SIZE_TO_DEQUANT_ON_OUTPUT": "ops.engine:MIN_TILE",
    },
    "qwix._src.core.dot_general_qt": {
        "DotGeneralQtConfig": f"{_M}:DotGeneralQtConfig",
        "dot_general_qt": f"{_M}:dot_general_qt",
        "dot_general_qt_fwd": f"{_P}:dot_general_qt_fwd",
        "dot_general_qt_bwd": f"{_P}:dot_general_qt_bwd",
        "dot_general_qt_fwd_bwd": f"{_P}:dot_general_qt_fwd_bwd",
    },
    "qwix._src.core.einsum": {
        "einsum": _OPS["einsum"],
        "get_how_to_quantize": f"{_M}:how_in_einsum",
    },
    "qwix._src.core.einsum_info": {
        name: f"{_M}:{name}" for name in ("EinsumInfo", "broadcast_operands", "sanitize_shape")
    },
    "qwix._src.core.mxfp_dot": {"mxfp_dot_general": f"{_M}:mxfp_dot_general"},
    "qwix._src.aux_data": {name: f"{_F}:{name}_aux" for name in ("get", "set", "clear")},
    "qwix._src.core.conv_general": {
        "conv_general_dilated": _OPS["conv_general_dilated"],
        "get_how_to_quantize": f"{_M}:how_in_conv",
        "get_transpose": f"{_M}:get_transpose",
    },
    "qwix._src.core.conv_general_qt": {
        "ConvGeneralQtConfig": f"{_M}:ConvGeneralQtConfig",
        "conv_general_qt": f"{_M}:conv_general_qt",
        "conv_general_qt_fwd": f"{_P}:conv_general_qt_fwd",
        "conv_general_qt_bwd": f"{_P}:conv_general_qt_bwd",
    },
    "qwix._src.core.ragged_dot": {
        "ragged_dot": _OPS["ragged_dot"],
        "ragged_dot_general": _OPS["ragged_dot_general"],
    },
    "qwix._src.core.ragged_dot_qt": {
        "RaggedDotQtConfig": f"{_M}:RaggedDotQtConfig",
        "ragged_dot_qt": f"{_M}:ragged_dot_qt",
        "ragged_dot_qt_fwd": f"{_P}:ragged_dot_qt_fwd",
        "ragged_dot_qt_bwd": f"{_P}:ragged_dot_qt_bwd",
    },
    "qwix._src.core.sparsity": _SPARSITY,
    "qwix._src.core.stochastic_rounding": {
        name: f"{_A}:{name}"
        for name in ("uniform_noise", "low_bit_uniform_noise", "NoiseFn", "get_noise_fn")
    },
    "qwix._src.core.pallas": {
        "pallas_call": "kernels.block_specs:pallas_call",
        "update_block_specs_for_qarray": "kernels.block_specs:specs_of_parts",
        "transform_block_specs_for_tpu": "kernels.block_specs:fit_tpu",
    },
    "qwix._src.interception": {
        "disable_interceptions": "model.running:disable_interceptions",
        "Interceptor": f"{_F}:Interceptor",
        "Function": f"{_F}:Function",
        "PRIMITIVE_BIND_KEY": f"{_F}:PRIMITIVE_BIND_KEY",
        "interception_manager": f"{_F}:interception_manager",
        "wrap_func_intercepted": f"{_F}:wrap_func_intercepted",
        "get_attribute": f"{_F}:get_attribute",
        "has_attribute": f"{_F}:has_attribute",
    },
    "qwix._src.qconfig": {
        "QuantizationRule": "model.rules:QuantizationRule",
        "QuantizationProvider": "model.provider:QuantizationProvider",
        "get_current_rule": "model.provider:get_current_rule",
    },
    "qwix._src.model": {
        "ModelType": f"{_F}:ModelType",
        "quantize_model": "model.quantize:quantize_model",
        "quantize_linen_model": f"{_F}:quantize_linen_model",
        "quantize_nnx_model": f"{_F}:quantize_nnx_model",
    },
    "qwix._src.averaging": {
        name: f"{_F}:{name}" for name in ("SimpleMovingAverage", "QuantStat", "Calibration")
    },
    "qwix._src.providers": {},
    "qwix._src.providers.ptq": _PTQ,
    "qwix._src.providers.boxed_param": {
        **_PTQ, "BoxedParamProvider": "providers.ptq:PtqProvider"
    },
    "qwix._src.providers.qt": {
        "QtRule": "model.rules:QtRule", "QtProvider": "providers.qt:QtProvider"
    },
    "qwix._src.providers.lora": _LORA,
    "qwix._src.providers.odml": _ODML,
    "qwix._src.providers.odml_ops": _ODML_OPS,
    "qwix._src.utils": {},
    "qwix._src.utils.flax_util": _FLAX_UTIL,
    "qwix._src.utils.checkpoint_util": _CHECKPOINTS,
    "qwix._src.flax_util": _FLAX_UTIL,  # where it was before 0.1.7
}  # fmt: skip

# replacing the name tells this function, with None when the replacement is taken back
LINKS = {
    "qwix._src.utils.flax_util.find_param": f"{_F}:replace_find_param",
    "qwix._src.flax_util.find_param": f"{_F}:replace_find_param",
    "qwix._src.core.dot_general.MIN_TILE_SIZE_TO_DEQUANT_ON_OUTPUT": f"{_M}:replace_min_tile",
    "qwix._src.core.qarray.USE_RECIPROCAL_FOR_QUANTIZATION": f"{_A}:replace_reciprocal",
    "qwix.contrib.padded_ptq.QARRAY_KEEP_PADDED_SHAPE": f"{_O}:replace_keep_padded",
}

# names that `qwix._src.core.qarray.quantize` looks up when it is called
PATCHABLE = {
    f"qwix._src.core.qarray.{name}"
    for name in (
        "calibrate",
        "compute_scale_zero_point",
        "quantize_with_scale_zero_point",
    )
}
