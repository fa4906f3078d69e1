"""What is in a LiteRT file: ops, types, what stayed float and why, bytes; and how far its
results are from the model's in JAX.

    read(path)                     the file, as records; str() of it is a report
    run(path, *inputs)             its outputs, from LiteRT's interpreter
    parity(path, fn, *inputs)      max error, share within one step, SQNR, per output

An op is integer if every number it computes with is: all float32 inputs and outputs count
against it. QUANTIZE and DEQUANTIZE, at the edges between the two worlds, are neither.
"""

import collections
import dataclasses
import importlib
import json
import os
from collections.abc import Callable
from typing import Any

import numpy as np

EDGES = ("QUANTIZE", "DEQUANTIZE")
FLOATS = ("FLOAT32", "FLOAT16", "BFLOAT16", "FLOAT64")
# ops that LiteRT has in float only, or that the converter leaves there
NO_KERNEL = (
    "SIN", "COS", "FLOOR", "CEIL", "ROUND", "DIV", "NEG", "POW", "ERF", "ELU",
    "LOG_SOFTMAX", "SIGN", "ARG_MAX", "ARG_MIN", "CUMSUM", "FLOOR_MOD", "FLOOR_DIV",
    "EQUAL", "NOT_EQUAL", "LESS", "LESS_EQUAL", "GREATER", "GREATER_EQUAL",
    "STABLEHLO_REDUCE_WINDOW",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Tensor:
    name: str
    shape: tuple[int, ...]
    type: str  # INT8, FLOAT32, ...
    scale: tuple[float, ...]
    zero_point: tuple[int, ...]
    axis: int  # of the channels, where there are several scales
    bytes: int  # stored in the file; 0 for what is computed


@dataclasses.dataclass(frozen=True)
class Op:
    name: str  # CONV_2D, ...
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    why_float: str | None

    @property
    def is_integer(self) -> bool:
        return self.why_float is None

    def __str__(self) -> str:
        list_ = lambda tensors: ", ".join(
            f"{t.type.lower()}{list(t.shape)}" for t in tensors
        )
        return f"{self.name}({list_(self.inputs)}) -> {list_(self.outputs)}"


@dataclasses.dataclass(frozen=True)
class File:
    path: str
    bytes: int
    ops: tuple[Op, ...]
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    constants: tuple[Tensor, ...]
    left_float: tuple[dict, ...]  # notes of the export: path, op, why

    @property
    def float_ops(self) -> tuple[Op, ...]:
        return tuple(op for op in self.ops if not op.is_integer)

    @property
    def is_full_integer(self) -> bool:
        """Every op that computes does so in integers."""
        return not self.float_ops

    def __str__(self) -> str:
        return _as_text(self)


@dataclasses.dataclass(frozen=True)
class Parity:
    """One output of the file against the same of a function."""

    name: str
    max_error: float
    step: float | None  # the output's scale
    within_step: float | None  # share of elements at most one step off
    sqnr_db: float

    def __str__(self) -> str:
        steps = ""
        if self.step is not None:
            steps = f", {self.within_step:.2%} within one step of {self.step:.3g}"
        return f"{self.name}: max error {self.max_error:.3g}, SQNR {self.sqnr_db:.1f} dB{steps}"


def schema() -> Any:
    """Returns the flatbuffer's classes."""
    return require("ai_edge_litert.schema_py_generated")


def require(name: str) -> Any:
    """Imports a module that reading or writing LiteRT files needs."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(
            f"{name.split('.')[0]} is not installed, which LiteRT files need: "
            "run `pip install '.[litert]'` in Midtread's folder (Linux x86-64 and macOS)."
        ) from error


def read(path: str | os.PathLike) -> File:
    """Reads a `.tflite` file."""
    with open(path, "rb") as file:
        content = file.read()
    if content[4:8] != b"TFL3":
        raise ValueError(f"{os.fspath(path)!r} is not a LiteRT file: no TFL3 in it.")
    try:
        return _file(os.fspath(path), content)
    except ImportError:
        raise
    except Exception as error:  # whatever offsets into nowhere make the reader raise
        raise ValueError(f"{os.fspath(path)!r} is damaged: {error}") from error


def _file(path: str, content: bytes) -> File:
    model = schema().ModelT.InitFromPackedBuf(content, 0)
    ops, inputs, outputs, constants = [], [], [], []
    for number, graph in enumerate(model.subgraphs):
        tensors = [_tensor(model, t) for t in graph.tensors]
        pick = lambda ids, tensors=tensors: tuple(tensors[i] for i in ids if i >= 0)
        ops += _ops(model, graph, pick)
        constants += [t for t in tensors if t.bytes]
        if number == 0:
            inputs, outputs = pick(graph.inputs), pick(graph.outputs)
    return File(
        path, len(content), tuple(ops), inputs, outputs, tuple(constants),
        tuple(_notes(model).get("left_float", ())),
    )  # fmt: skip


def _names(enum: Any) -> dict[int, str]:
    return {v: k for k, v in vars(enum).items() if isinstance(v, int)}


def _tensor(model: Any, t: Any) -> Tensor:
    numbers = lambda x: () if x is None else tuple(np.asarray(x).tolist())
    q, data = t.quantization, model.buffers[t.buffer].data
    return Tensor(
        (t.name or b"").decode(),
        numbers(t.shape),
        _names(schema().TensorType)[t.type],
        numbers(q.scale) if q else (),
        numbers(q.zeroPoint) if q else (),
        q.quantizedDimension if q else 0,
        0 if data is None else len(data),
    )


def _ops(model: Any, graph: Any, pick: Callable) -> list[Op]:
    names = _names(schema().BuiltinOperator)
    out = []
    dequantized = set()  # constants that a DEQUANTIZE makes float
    for op in graph.operators:
        code = model.operatorCodes[op.opcodeIndex]
        name = names[max(code.builtinCode, code.deprecatedBuiltinCode)]
        inputs, outputs = pick(op.inputs), pick(op.outputs)
        if name == "DEQUANTIZE" and inputs[0].bytes:
            dequantized.add(outputs[0].name)
        out.append(
            Op(name, inputs, outputs, _why_float(name, inputs, outputs, dequantized))
        )
    return out


def _why_float(name: str, inputs, outputs, dequantized: set[str]) -> str | None:
    floats = [t for t in (*inputs, *outputs) if t.type in FLOATS]
    if name in EDGES or not floats:
        return None
    if name in NO_KERNEL:
        return "LiteRT has no integer kernel for it"
    if any(t.name in dequantized for t in inputs):
        return "its weights are integer, its activations are not"
    if any(t.type in ("INT8", "INT4", "INT2") and t.bytes for t in inputs):
        return "dynamic range: float in and out, integer products"
    if all(t.type in FLOATS for t in outputs) and len(floats) == len(outputs):
        return "its output has no range: no rule quantizes it"
    return "no rule quantizes it, or an op beside it is float"


def _notes(model: Any) -> dict:
    for entry in model.metadata or ():
        if (entry.name or b"") == b"midtread":
            return json.loads(bytes(model.buffers[entry.buffer].data))
    return {}


def _as_text(file: File) -> str:
    count = collections.Counter((op.name, op.is_integer) for op in file.ops)
    computing = [op for op in file.ops if op.name not in EDGES]
    weights = collections.Counter()
    for t in file.constants:
        weights[t.type.lower()] += t.bytes
    kind = "full integer" if file.is_full_integer else "not full integer"
    integer = sum(op.is_integer for op in computing)
    share = f"{integer} of {len(computing)} ops compute in integers"
    lines = [
        f"{file.path}: {file.bytes:,} bytes, {kind}: {share}",
        "constants: " + ", ".join(f"{n:,} bytes {t}" for t, n in weights.most_common()),
        *(f"in:  {t.type.lower()}{list(t.shape)}" for t in file.inputs),
        *(f"out: {t.type.lower()}{list(t.shape)}" for t in file.outputs),
        "ops:",
        *(
            f"  {n:4} {name}{'' if is_int else '  (float)'}"
            for (name, is_int), n in sorted(count.items())
        ),
    ]
    if file.float_ops:
        lines += ["float:", *(f"  {op}: {op.why_float}" for op in file.float_ops)]
    if file.left_float:
        lines.append("left in float by the model:")
        lines += [
            f"  {note['path'] or '(root)'}: {note['op']}: {note['why']}"
            for note in file.left_float
        ]
    return "\n".join(lines)


# --- running it -------------------------------------------------------------------------------


def _interpreter(path: str | os.PathLike) -> Any:
    interpreter = require("ai_edge_litert.interpreter").Interpreter(
        model_path=os.fspath(path)
    )
    interpreter.allocate_tensors()
    return interpreter


def run(path: str | os.PathLike, *inputs: Any) -> tuple[np.ndarray, ...]:
    """Returns the file's outputs, in order."""
    interpreter = _interpreter(path)
    wanted = interpreter.get_input_details()
    if len(wanted) != len(inputs):
        raise ValueError(f"the file takes {len(wanted)} inputs, not {len(inputs)}.")
    for i, (details, x) in enumerate(zip(wanted, inputs)):
        shape = tuple(details["shape"].tolist())
        if shape != np.shape(x):
            raise ValueError(f"input {i} of the file is {shape}, not {np.shape(x)}.")
        interpreter.set_tensor(details["index"], np.asarray(x, details["dtype"]))
    interpreter.invoke()
    outputs = interpreter.get_output_details()
    return tuple(interpreter.get_tensor(details["index"]) for details in outputs)


def parity(path: str | os.PathLike, fn: Callable, *inputs: Any) -> tuple[Parity, ...]:
    """How far the file is from `fn` on these inputs."""
    import jax

    wanted = [np.asarray(y, np.float64) for y in jax.tree.leaves(fn(*inputs))]
    got = run(path, *inputs)
    if len(wanted) != len(got):
        raise ValueError(
            f"the file has {len(got)} outputs, the function {len(wanted)}."
        )
    steps = _steps(read(path))
    return tuple(
        _compared(f"output_{i}", np.asarray(a, np.float64), b, step)
        for i, (a, b, step) in enumerate(zip(got, wanted, steps))
    )


def _steps(file: File) -> list[float | None]:
    """Returns the scale of each output, seen through its DEQUANTIZE."""
    before = {
        op.outputs[0].name: op.inputs[0] for op in file.ops if op.name == "DEQUANTIZE"
    }
    scales = [before.get(t.name, t).scale for t in file.outputs]
    return [s[0] if len(s) == 1 else None for s in scales]


def _compared(name: str, got: np.ndarray, wanted: np.ndarray, step) -> Parity:
    error = np.abs(got - wanted)
    noise = np.sum(np.square(error))
    sqnr = 10 * np.log10(np.sum(np.square(wanted)) / noise) if noise else np.inf
    within = None if step is None else float(np.mean(error <= step * 1.001))
    return Parity(name, float(error.max(initial=0.0)), step, within, float(sqnr))
