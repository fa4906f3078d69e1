"""LiteRT files: from a Flax model to a `.tflite` that a phone runs in integers.

    export(model, variables, inputs, path)               trained or calibrated already
    calibrate_and_export(model, variables, data, path)   from a float model and data

The way there: the float model under OdmlConversionProvider, whose every edge carries its
grid; jax.export to StableHLO; litert-converter to a flatbuffer. No TensorFlow. The file is
written whole or not at all. What stayed in float, and why, is stored in it, for
`midtread.report.tflite.describe`.

Needs `pip install '.[litert]'` in Midtread's folder.
"""

import contextlib
import importlib
import itertools
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax import nnx

from midtread.interop import safetensors, tflite
from midtread.model import adopt, flaxlib
from midtread.model.quantize import quantize_model
from midtread.model.rules import QuantizationRule
from midtread.providers.litert import OdmlQatProvider
from midtread.providers.litert_convert import OdmlConversionProvider

INPUTS = ("float32", "int32", "int8", "uint8", "int16", "bool")
METADATA = "midtread"
# Ranges of whole batches: means over examples, as for training, would cut more off.
EVERYTHING_INT8 = (
    QuantizationRule(weight_qtype="int8", act_qtype="int8", act_batch_axes=()),
)


def export(
    model: Any,
    variables: Any,
    inputs: Any,
    path: str | os.PathLike,
    *,
    method: str = "__call__",
    quant_stats: Any = None,
    **call: Any,
) -> tflite.File:
    """Writes a model that was trained or calibrated under OdmlQatProvider.

    Args:
        model: what quantize_model returned.
        variables: Linen's variables, `params` and `quant_stats` among them; None for NNX.
        inputs: an array, or a tuple of them; shapes are enough. The file takes these
            shapes and no others.
        path: the file, which is replaced once the new one is whole.
        method: the method of a Linen model that is called.
        quant_stats: ranges from elsewhere, in place of those in the variables.
        call: keyword arguments of the model, such as train=False.

    Returns:
        What the file says of itself, as `midtread.report.tflite` reads it.

    Raises:
        ValueError: A model of another provider; inputs or outputs of a dtype that LiteRT
            has not; an input that reaches no output; an op that cannot be converted.
        ImportError: litert-converter is not installed.
    """
    trained = flaxlib.provider_of(model)
    if not isinstance(trained, OdmlQatProvider):
        raise ValueError(  # noqa: TRY004
            "this model was not quantized under OdmlQatProvider. Train or calibrate "
            "mt.quantize_model(model, mt.OdmlQatProvider(rules)), or give the float "
            "model and data to calibrate_and_export."
        )
    inputs = inputs if isinstance(inputs, tuple) else (inputs,)
    shapes = [_as_input(i, x) for i, x in enumerate(inputs)]
    tflite.require("litert_converter")
    provider, run = _annotated(model, trained, variables, quant_stats, method, call)
    exported = jax.export.export(jax.jit(run))(*shapes)
    for i in range(len(shapes)):
        if i not in exported.module_kept_var_idx:
            raise ValueError(f"input {i} does not reach any output: leave it out.")
    for i, out in enumerate(exported.out_avals):
        if out.dtype.name not in INPUTS:
            raise ValueError(
                f"output {i} is {out.dtype}: LiteRT computes in float32. Build the model "
                "with dtype=jnp.float32."
            )
    content = _convert(exported.mlir_module(), len(shapes), len(exported.out_avals))
    notes = [
        {"path": path, "op": op, "why": why}
        for (path, op), why in provider.left_float.items()
    ]
    with safetensors.replacing(os.fspath(path)) as file:
        file.write(_finished(content, {"left_float": notes}))
    return tflite.read(path)


def calibrate_and_export(
    model: Any,
    variables: Any,
    data: Iterable[Any],
    path: str | os.PathLike,
    *,
    rules: Sequence[Any] = EVERYTHING_INT8,
    inputs: Any = None,
    method: str = "__call__",
    strict: bool = True,
    disable_per_channel_weights: bool = False,
    fixed_range_for_inputs: tuple[float, float] | None = None,
    fixed_range_for_outputs: tuple[float, float] | None = None,
    **call: Any,
) -> tflite.File:
    """Makes a file from a float model and data, whose ranges are those of the data.

    Args:
        model: a float model of Linen or NNX.
        variables: Linen's variables; None for NNX.
        data: batches, each an array or a tuple of them. A few hundred examples do.
        path: the file, which is replaced once the new one is whole.
        rules: which ops compute in which formats.
        inputs: shapes that the file takes; those of the first batch if not given.
        method: the method of a Linen model that is called.
        strict: an op that cannot be integer, and is not known to be float, is an error.
        disable_per_channel_weights: one scale for all of a weight.
        fixed_range_for_inputs: the (low, high) of all inputs, in place of what `data` has.
        fixed_range_for_outputs: that of all outputs.
        call: keyword arguments of the model, such as train=False.

    Returns:
        What the file says of itself, as `midtread.report.tflite` reads it.

    Raises:
        ValueError: No batch in `data`, and all that `export` refuses.
        ImportError: litert-converter is not installed.
    """
    provider = OdmlQatProvider(
        rules,
        strict=strict,
        disable_per_channel_weights=disable_per_channel_weights,
        fixed_range_for_inputs=fixed_range_for_inputs,
        fixed_range_for_outputs=fixed_range_for_outputs,
    )
    batches = iter(data)
    first = next(batches, None)
    if first is None:
        raise ValueError("no statistics: `data` holds no batch to calibrate with.")
    as_tuple = lambda x: x if isinstance(x, tuple) else (x,)
    batches = map(as_tuple, itertools.chain([first], batches))
    run = _calibrate_linen if isinstance(model, nn.Module) else _calibrate_nnx
    model, variables = run(model, provider, variables, batches, method, call)
    return export(
        model,
        variables,
        as_tuple(first) if inputs is None else inputs,
        path,
        method=method,
        **call,
    )


def _calibrate_linen(model, provider, variables, batches, method, call):
    model = quantize_model(model, provider, methods=(method,))

    @jax.jit
    def step(variables, batch):
        _, seen = model.apply(
            variables, *batch, method=method, mutable="quant_stats", **call
        )
        return {**variables, **seen}

    variables = {k: v for k, v in variables.items() if k != "quant_stats"}
    for batch in batches:
        variables = step(variables, jax.tree.map(jnp.asarray, batch))
    return model, variables


def _calibrate_nnx(model, provider, variables, batches, method, call):
    first = next(batches)
    model = quantize_model(model, provider, *first, methods=(method,), **call)
    step = nnx.jit(lambda model, batch: getattr(model, method)(*batch, **call))
    for batch in itertools.chain([first], batches):
        step(model, jax.tree.map(jnp.asarray, batch))
    return model, None


# --- the annotated model ----------------------------------------------------------------------


def _annotated(model, trained: OdmlQatProvider, variables, quant_stats, method, call):
    """Returns the conversion provider, and the model under it as a function of its inputs."""
    options = {
        "strict": trained.strict_ops,
        "disable_per_channel_weights": not trained.per_channel,
        "fixed_range_for_inputs": trained.fixed_inputs,
        "fixed_range_for_outputs": trained.fixed_outputs,
    }
    if isinstance(model, nn.Module):
        if not isinstance(variables, Mapping):
            raise TypeError(
                "variables should be Linen's: a dict of collections ('params', "
                f"'quant_stats', ...), not a {type(variables).__name__}."
            )
        stats = variables.get("quant_stats", {}) if quant_stats is None else quant_stats
        provider = OdmlConversionProvider(
            trained.given, variables.get("params", {}), stats, **options
        )
        provider._ops = trained._ops
        twin = quantize_model(model, provider, methods=(method,))
        kept = {k: v for k, v in variables.items() if k != "quant_stats"}
        return provider, lambda *x: twin.apply(kept, *x, method=method, **call)
    if variables is not None:
        raise ValueError("an NNX model holds its variables: pass variables=None.")
    stats = nnx.state(model, flaxlib.QuantStat) if quant_stats is None else quant_stats
    params = nnx.state(model, nnx.Param)
    provider = OdmlConversionProvider(trained.given, params, stats, **options)
    provider._ops = trained._ops
    twin = adopt.adopt_nnx(nnx.clone(model), provider, method)
    return provider, lambda *x: getattr(twin, method)(*x, **call)


def _as_input(i: int, x: Any) -> jax.ShapeDtypeStruct:
    shape, dtype = np.shape(x), np.dtype(getattr(x, "dtype", np.asarray(x).dtype))
    for axis, n in enumerate(shape):
        if not isinstance(n, int | np.integer):
            raise ValueError(  # noqa: TRY004
                f"input {i} has axis {axis} of unknown extent {n}, but a LiteRT file has "
                "fixed shapes. Give a number; write one file per shape you need."
            )
    if dtype.name not in INPUTS:
        raise ValueError(
            f"input {i} is {dtype}, which LiteRT does not take: {', '.join(INPUTS)}."
        )
    return jax.ShapeDtypeStruct(shape, dtype)


# --- converting -------------------------------------------------------------------------------


def _convert(stablehlo: str, num_inputs: int, num_outputs: int) -> bytes:
    mlir = tflite.require("litert_converter.mlir")
    ir = importlib.import_module(f"{mlir.__name__}.ir")
    passes = importlib.import_module(f"{mlir.__name__}.passmanager")
    # The package has no other entry: its `mlir` folder is the interface.
    api = importlib.import_module("litert_converter.mlir._mlir_libs.converter_api_ext")
    context = ir.Context()
    api.prepare_mlir_context(context)
    with context, ir.Location.unknown():
        with _refusal():
            module = ir.Module.parse(stablehlo)
        api.set_signature(
            module.operation,
            signature_name="serving_default",
            input_names=[f"input_{i}" for i in range(num_inputs)],
            output_names=[f"output_{i}" for i in range(num_outputs)],
        )
        config = api.ConvertToTFLConfig()
        config.model_origin_framework = "JAX"
        config.strict_qdq_mode = True  # integers where we say so and nowhere else
        with _refusal():
            api.run_convert_to_tfl_passes(module, passes.PassManager(), config)
        return api.export_flatbuffer_to_bytes(module.operation)


@contextlib.contextmanager
def _refusal() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        text = f"litert-converter refused the model: {str(error)[:2000]}"
        raise ValueError(text) from error


def _finished(content: bytes, notes: dict) -> bytes:
    """Returns the file with our notes in it, and one thing put right."""
    schema = tflite.schema()
    model = schema.ModelT.InitFromPackedBuf(content, 0)
    _widen_biases(model, schema)
    buffer, entry = schema.BufferT(), schema.MetadataT()
    buffer.data = np.frombuffer(json.dumps(notes).encode(), np.uint8)
    entry.name, entry.buffer = METADATA, len(model.buffers)
    model.buffers.append(buffer)
    model.metadata = [*(model.metadata or []), entry]
    builder = importlib.import_module("flatbuffers").Builder(len(content))
    builder.Finish(model.Pack(builder), file_identifier=b"TFL3")
    return bytes(builder.Output())


def _widen_biases(model: Any, schema: Any) -> None:
    """LiteRT's convolutions of int16 read 64-bit biases; converter 0.5.0 writes 32."""
    types, ops = schema.TensorType, schema.BuiltinOperator
    convolutions = (ops.CONV_2D, ops.DEPTHWISE_CONV_2D)
    for graph in model.subgraphs:
        for op in graph.operators:
            code = model.operatorCodes[op.opcodeIndex]
            if max(code.builtinCode, code.deprecatedBuiltinCode) not in convolutions:
                continue
            tensors = [graph.tensors[i] for i in op.inputs if i >= 0]
            if len(tensors) < 3 or tensors[0].type != types.INT16:
                continue
            bias = tensors[2]
            if bias.type == types.INT32:
                data = np.asarray(model.buffers[bias.buffer].data, np.uint8)
                buffer = schema.BufferT()
                wide = data.view(np.int32).astype(np.int64)
                buffer.data = wide.view(np.uint8)
                bias.type, bias.buffer = types.INT64, len(model.buffers)
                model.buffers.append(buffer)
