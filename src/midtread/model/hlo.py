"""HLO: a program's text, read back.

XLA prints a module as computations, each a list of instructions:

    %fused (p: s8[4,8]) -> s32[4,2] {
      ROOT %dot.1 = s32[4,2]{1,0} dot(%p, %q), lhs_contracting_dims={1}, ..., metadata={op_name="..."}
    }

`parse` makes records of them, for the text before optimization and after. `walk` visits
all that runs, with the number of times (trip counts of loops that XLA knows). A value is
an instruction in a frame, and a frame says which call, fusion or loop of which caller it is
in, so that `origin` can follow an operand through all of these to where its bits come from.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Iterator
from typing import Any

BITS = {"pred": 1, "token": 0, "opaque": 0}


def bits(dtype: str) -> int:
    """Returns the bits of one element: 8 for 's8' and 'f8e4m3fn', 16 for 'bf16'."""
    if dtype in BITS:
        return BITS[dtype]
    digits = re.search(r"\d+", dtype)
    return int(digits.group()) if digits else 0


def is_low(dtype: str) -> bool:
    """Whether it is a number of eight bits or fewer; masks are not."""
    return dtype[0] in "suf" and bits(dtype) <= 8


@dataclasses.dataclass(frozen=True)
class Shape:
    """The dtype and extents of an array."""

    dtype: str
    dims: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.dims)

    @property
    def nbytes(self) -> int:
        return math.ceil(self.size * bits(self.dtype) / 8)


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation."""

    name: str
    opcode: str
    shapes: tuple[Shape, ...]  # one shape, or those of a tuple
    operands: tuple[str, ...]
    attributes: str

    @property
    def shape(self) -> Shape:
        if self.opcode == "custom-call" and self.shapes:
            return self.shapes[0]  # the others are a library's workspace
        return max(self.shapes, key=lambda s: s.nbytes, default=Shape("token", ()))

    @functools.cached_property
    def op_name(self) -> str:
        match = re.search(r'op_name="([^"]*)"', self.attributes)
        return match.group(1) if match else ""

    def called(self, *keys: str) -> list[str]:
        """Returns the names of the computations under these attributes."""
        names = []
        for key in keys:
            for text in re.findall(
                rf"\b{key}=(\{{[^}}]*\}}|%?[^\s,]+)", self.attributes
            ):
                names += re.findall(r"[\w.\-<>$]+", text.replace("%", ""))
        return names

    def dims(self, key: str) -> tuple[int, ...]:
        match = re.search(rf"\b{key}=\{{([\d,]*)\}}", self.attributes)
        return tuple(map(int, filter(None, match.group(1).split(",")))) if match else ()


@dataclasses.dataclass(frozen=True)
class Computation:
    """A list of instructions, the result of which is `root`."""

    name: str
    instructions: dict[str, Instruction]
    root: str

    @functools.cached_property
    def parameters(self) -> dict[str, int]:
        parameters = (i for i in self.instructions.values() if i.opcode == "parameter")
        return {i.name: int(i.operands[0]) for i in parameters}


@dataclasses.dataclass(frozen=True)
class Module:
    """A program: its computations, and the name of the first."""

    computations: dict[str, Computation]
    entry: str


_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-<>$]+)( \(.*)?\s*\{\s*$")
_SHAPE = re.compile(r"([a-z]\w*)\[([\d,<=]*)\]")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-<>$]+) = ")


def parse(text: str) -> Module:
    """Reads the text of a module."""
    computations, entry, name, instructions, root = {}, "", None, {}, ""
    for line in text.splitlines():
        header = _HEADER.match(line)
        if header and " = " not in line:
            name, instructions, root = header.group(2), {}, ""
            entry = name if header.group(1) else entry
        elif line.startswith("}") and name is not None:
            computations[name] = Computation(name, instructions, root)
            name = None
        elif name is not None and (start := _INSTRUCTION.match(line)):
            instruction = _instruction(start.group(2), line[start.end() :])
            instructions[instruction.name] = instruction
            root = instruction.name if start.group(1) else root or instruction.name
    if not entry:
        raise ValueError("this is not the text of an HLO module: it has no ENTRY.")
    return Module(computations, entry)


def _instruction(name: str, text: str) -> Instruction:
    """Reads 'TYPE opcode(operands), attributes'."""
    end = _closing(text, 0) + 1 if text.startswith("(") else text.index(" ")
    shapes = tuple(
        Shape(dtype, tuple(int(n.strip("<=")) for n in dims.split(",") if n))
        for dtype, dims in _SHAPE.findall(text[:end])
    )
    rest = text[end:].lstrip()
    open_ = rest.index("(")
    close = _closing(rest, open_)
    inside = rest[open_ + 1 : close]
    parts = re.split(r",(?![^\[{(]*[\]})])", inside) if inside else []
    operands = tuple(p.split()[-1].lstrip("%") for p in parts if p.split())
    return Instruction(name, rest[:open_], shapes, operands, rest[close + 1 :])


def _closing(text: str, start: int) -> int:
    depth = 0
    for i in range(start, len(text)):
        depth += {"(": 1, ")": -1}.get(text[i], 0)
        if depth == 0:
            return i
    raise ValueError(f"unbalanced parentheses in HLO: {text[:80]!r}.")


# --- walking ----------------------------------------------------------------------------------

_BODIES = ("calls", "to_apply", "body", "branch_computations", "true_computation",
           "false_computation", "called_computations")  # fmt: skip
# The computations that these call combine two scalars, so there is nothing to visit.
_SCALAR = ("reduce", "all-reduce", "all-reduce-start", "reduce-scatter", "scatter", "sort",
           "reduce-window", "select-and-scatter", "map")  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Frame:
    """A computation as it is called by an instruction in another frame."""

    computation: Computation
    caller: Instruction | None = None
    outer: "Frame | None" = None

    def value(self, name: str) -> "Value | None":
        instruction = self.computation.instructions.get(name)
        return None if instruction is None else Value(instruction, self)


@dataclasses.dataclass(frozen=True)
class Value:
    """What an instruction computes in one frame."""

    instruction: Instruction
    frame: Frame

    def operand(self, i: int) -> "Value | None":
        names = self.instruction.operands
        return self.frame.value(names[i]) if i < len(names) else None

    @property
    def operands(self) -> list["Value"]:
        values = (self.operand(i) for i in range(len(self.instruction.operands)))
        return [v for v in values if v is not None]


@dataclasses.dataclass(frozen=True)
class Visit:
    """An instruction that runs, and how often."""

    value: Value
    times: int
    op_name: str  # including the names of the calls around it


def walk(module: Module) -> Iterator[Visit]:
    """Yields every instruction that runs, from the entry inwards."""
    yield from _walk(module, Frame(module.computations[module.entry]), 1, "")


def _walk(module: Module, frame: Frame, times: int, prefix: str) -> Iterator[Visit]:
    for instruction in frame.computation.instructions.values():
        name = instruction.op_name
        full = name if name.startswith(prefix) else f"{prefix}/{name}".strip("/")
        yield Visit(Value(instruction, frame), times, full)
        if instruction.opcode in _SCALAR:
            continue
        count = times * (trip_count(instruction) or 1)
        for called in instruction.called(*_BODIES):
            if called in module.computations:
                inner = Frame(module.computations[called], instruction, frame)
                yield from _walk(module, inner, count, full)


def trip_count(instruction: Instruction) -> int | None:
    """Returns how often a loop turns, None where XLA does not know."""
    match = re.search(
        r'known_trip_count"?:\s*\{"?n"?:\s*"?(\d+)', instruction.attributes
    )
    return int(match.group(1)) if match else None


# --- where a value comes from -----------------------------------------------------------------

_SAME = ("convert", "bitcast", "copy", "transpose", "reshape", "broadcast", "slice", "reverse",
         "dynamic-slice", "pad", "optimization-barrier", "copy-start", "copy-done",
         "all-gather", "all-gather-start", "all-gather-done", "reduce-precision")  # fmt: skip
_SCALING = ("multiply", "subtract", "divide")


@dataclasses.dataclass(frozen=True)
class Origin:
    """The narrowest dtype that an operand's values passed through on casts and copies
    alone (`cast_from`), and, if they were scaled on the way as well, before that (`stored`)."""

    cast_from: str
    stored: str


def origin(module: Module, value: Value) -> Origin:
    """Follows an operand to where its bits come from."""
    seen, end = _follow(module, value)
    cast_from = _narrowest(seen)
    stored = [cast_from]
    if not is_low(cast_from) and end is not None and end.instruction.opcode in _SCALING:
        for operand in end.operands:
            inner, _ = _follow(module, operand)
            stored.append(_narrowest(inner))
    return Origin(cast_from, _narrowest(stored))


def _narrowest(dtypes: list[str]) -> str:
    low = [d for d in dtypes if is_low(d)]
    return min(low or [d for d in dtypes if bits(d) > 1] or dtypes, key=bits)


def _follow(module: Module, value: Value | None) -> tuple[list[str], Value | None]:
    """Follows casts and copies back. Returns (dtypes on the way, the value where they end)."""
    seen: list[str] = []
    index: int | None = None  # which element of a tuple is wanted
    for _ in range(500):
        if value is None:
            break
        ins = value.instruction
        if index is None:
            seen.append(ins.shape.dtype)
        before = value
        value, index = _step(module, value, index)
        if value is None:
            return seen, before
    return seen or ["token"], value


def _step(module: Module, value: Value, index: int | None):
    ins, frame = value.instruction, value.frame
    if ins.opcode == "get-tuple-element":
        match = re.search(r"\bindex=(\d+)", ins.attributes)
        return value.operand(0), int(match.group(1)) if match else None
    if ins.opcode == "tuple":
        return value.operand(index or 0), None
    if ins.opcode in ("fusion", "call"):
        called = ins.called("calls", "to_apply")
        if called and called[0] in module.computations:
            inner = Frame(module.computations[called[0]], ins, frame)
            return inner.value(inner.computation.root), index
    if ins.opcode == "while":  # go on with what the loop began with
        return value.operand(0), index
    if ins.opcode == "parameter" and frame.caller is not None:
        number = frame.computation.parameters[ins.name]
        caller = Value(frame.caller, frame.outer)
        return caller.operand(0 if frame.caller.opcode == "while" else number), index
    if ins.opcode == "optimization-barrier" and index is not None:
        return value.operand(0), index
    if ins.opcode in _SAME:
        return value.operand(0), None
    return None, index


def flops_of_dot(ins: Instruction, lhs: Shape, contracting: Any = None) -> int:
    """Counts 2 for every product of a dot. `contracting` are the summed axes, where they are
    not among the attributes."""
    axes = ins.dims("lhs_contracting_dims") if contracting is None else contracting
    return 2 * ins.shape.size * math.prod(lhs.dims[a] for a in axes)


def flops_of_ragged(ins: Instruction, lhs: Shape, rhs: Shape) -> int:
    """Counts 2 for every product of a ragged dot, in which a row is multiplied by the matrix
    of its own group."""
    keys = ("rhs_contracting_dims", "rhs_batch_dims", "rhs_group_dims")
    known = {axis for key in keys for axis in ins.dims(key)}
    free = (n for axis, n in enumerate(rhs.dims) if axis not in known)
    return 2 * lhs.size * math.prod(free)


def flops_of_convolution(ins: Instruction, rhs: Shape) -> int:
    """Counts 2 for every product of a convolution, zeros of its padding included."""
    labels = re.search(r"dim_labels=\w+_(\w+)->", ins.attributes)
    features = rhs.dims[labels.group(1).index("o")] if labels else 1
    return 2 * ins.shape.size * rhs.size // features
