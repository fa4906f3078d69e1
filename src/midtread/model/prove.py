"""Prove: what the compiled program multiplies, and what it sends, and in which dtypes.

`explain` says what a provider means to do; XLA has the last word. A matmul of fp8 may be
computed in float32 because a shape is not aligned, a cast may have been left in by
mistake, weights may be gathered in bfloat16 before they are quantized. All of it can be
read in the optimised HLO. For every contraction there:

    ran       the dtypes that are multiplied
    asked     the dtypes of the same op, known by its name, before optimisation
    cast_from the narrowest dtype its operands were cast from
    stored    the same, if they were scaled on the way too (dequantized)

and these give the verdict:

    low           multiplied in 8 bits or fewer, both of them
    widened       asked for in low bits, but XLA computes it in more
    upcast        the program casts low bits up itself, and multiplies those
    dequantized   one side or both are stored in low bits, and scaled before the matmul
    wide          no low bits in sight
    kernel        a custom call (Pallas, Triton): judged by what goes in

FLOPs are of one device's program. A kernel's are estimated: |lhs| |rhs| |out| of a matmul
is the square of its number of products.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Collection
from typing import Any

from midtread.model import hlo
from midtread.model.coverage import human, share, table
from midtread.model.hlo import Module, Origin, Visit, is_low
from midtread.model.jaxprs import may_multiply

VERDICTS = ("low", "widened", "upcast", "dequantized", "wide", "kernel")
SHORT = {
    "s2": "int2", "s4": "int4", "s8": "int8", "s16": "int16", "s32": "int32", "s64": "int64",
    "u2": "uint2", "u4": "uint4", "u8": "uint8", "u32": "uint32",
    "f8e4m3fn": "e4m3", "f8e5m2": "e5m2", "f4e2m1fn": "e2m1",
}  # fmt: skip
COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all",
               "collective-permute", "collective-broadcast", "ragged-all-to-all")  # fmt: skip
# The targets of custom calls that contract, and what these are.
CALLS = {
    r"__cublas\$lt\$matmul\$f8": "gemm",
    r"__cublas\$|__cublaslt|__onednn\$matmul": "gemm",
    r"__cudnn\$conv": "convolution",
    r"triton|mosaic_gpu|tpu_custom_call|pallas": "kernel",
}


def _short(dtype: str) -> str:
    return SHORT.get(dtype, dtype)


@dataclasses.dataclass(frozen=True)
class Executed:
    """One contraction of the compiled program."""

    name: str  # as JAX names it: jit(step)/jvp(M)/M/up/dot_general
    kind: str  # dot, convolution, gemm or kernel
    ran: tuple[str, str]
    asked: tuple[str, str] | None
    cast_from: tuple[str, str]
    stored: tuple[str, str]
    out: str
    shapes: tuple[tuple[int, ...], ...]
    times: int
    flops: int
    target: str = ""

    @functools.cached_property
    def verdict(self) -> str:
        low = lambda pair: pair is not None and all(map(is_low, pair))
        if self.kind == "kernel":  # which may read codes in words of 16 bits
            reads_codes = any(is_low(dtype) or dtype == "s16" for dtype in self.ran)
            return "kernel" if reads_codes else "wide"
        if low(self.ran):
            return "low"
        if low(self.asked):
            return "widened"
        if low(self.cast_from):
            return "upcast"
        return "dequantized" if any(map(is_low, self.stored)) else "wide"


@dataclasses.dataclass(frozen=True)
class Collective:
    """One transfer between devices."""

    name: str
    kind: str
    dtype: str  # the dtype of what is sent
    cast_from: str  # the narrowest dtype it was cast from
    dims: tuple[int, ...]
    times: int
    nbytes: int  # the bytes of the result, all times together

    @property
    def is_wide(self) -> bool:
        """Whether it copies in 16 bits or more. What is reduced has to be wide, and does not
        count."""
        return self.kind in ("all-gather", "all-to-all", "ragged-all-to-all") and (
            self.cast_from[0] in "fb" and hlo.bits(self.cast_from) >= 16
        )


@dataclasses.dataclass(frozen=True)
class Proof:
    """The contractions and collectives of a compiled program, to be printed."""

    contractions: tuple[Executed, ...]
    collectives: tuple[Collective, ...]

    @property
    def flops(self) -> int:
        return sum(e.flops for e in self.contractions)

    def flops_share(self, *verdicts: str) -> float:
        """Returns the share of FLOPs with one of these verdicts; low and kernel by default."""
        wanted = verdicts or ("low", "kernel")
        _check_verdicts(wanted)
        low = sum(e.flops for e in self.contractions if e.verdict in wanted)
        return share(low, self.flops)

    @property
    def wide_gather_bytes(self) -> int:
        return sum(c.nbytes for c in self.collectives if c.is_wide)

    @property
    def flagged(self) -> tuple[Executed | Collective, ...]:
        """What fell back to more bits: widened and upcast contractions, and gathers of wide
        floats."""
        bad = [e for e in self.contractions if e.verdict in ("widened", "upcast")]
        return (*bad, *(c for c in self.collectives if c.is_wide))

    def __str__(self) -> str:
        lines = [
            ["name", "kind", "operands", "ran", "from", "times", "FLOP", "verdict"]
        ]
        for e in self.contractions:
            source = "" if e.stored == e.ran else _pair(e.stored)
            shapes = " x ".join(f"[{','.join(map(str, s))}]" for s in e.shapes)
            lines.append(
                [
                    e.name, e.kind, shapes, _pair(e.ran), source, str(e.times),
                    human(e.flops, ""), e.verdict,
                ]
            )  # fmt: skip
        sent = [
            ["name", "collective", "array", "sent", "from", "times", "bytes", "verdict"]
        ]
        for c in self.collectives:
            array = f"[{','.join(map(str, c.dims))}]"
            source = "" if c.cast_from == c.dtype else _short(c.cast_from)
            sent.append(
                [
                    c.name, c.kind, array, _short(c.dtype), source, str(c.times),
                    human(c.nbytes, "B"), "wide" if c.is_wide else "",
                ]
            )  # fmt: skip
        parts = [table(lines, {5, 6})]
        if self.collectives:
            parts.append(table(sent, {5, 6}))
        return "\n\n".join([*parts, self.summary])

    __repr__ = __str__

    @property
    def summary(self) -> str:
        shares = [
            f"{100 * self.flops_share(v):.1f}% {v}"
            for v in VERDICTS
            if any(e.verdict == v for e in self.contractions)
        ]
        text = f"{human(self.flops, 'FLOP')}: {', '.join(shares) or 'none'}"
        if self.wide_gather_bytes:
            text += f"; {human(self.wide_gather_bytes, 'B')} gathered in wide floats"
        return text


def _pair(pair: tuple[str, str]) -> str:
    return " x ".join(map(_short, pair))


def _check_verdicts(names: Collection[str]) -> None:
    for name in names:
        if name not in VERDICTS:
            raise ValueError(
                f"unknown verdict {name!r}. There are: {', '.join(VERDICTS)}."
            )


def prove(jitted: Any, *args: Any, **kwargs: Any) -> Proof:
    """Compiles a jitted function for these arguments, arrays or shapes, and reads the result.

    >>> import jax, jax.numpy as jnp
    >>> x = jax.ShapeDtypeStruct((64, 64), jnp.int8)
    >>> dot = jax.jit(lambda x: jnp.dot(x, x, preferred_element_type=jnp.int32))
    >>> prove(dot, x).contractions[0].verdict
    'low'

    Args:
        jitted: a function that jax.jit returned.
        args, kwargs: what it would be called with.

    Returns:
        A Proof: each contraction of the compiled program with the dtypes it runs in.

    Raises:
        TypeError: A function that jax.jit did not return.
    """
    if not hasattr(jitted, "lower"):
        raise TypeError(
            f"prove takes a jitted function, not a {type(jitted).__name__}: write "
            "prove(jax.jit(f), ...); of a module, jax.jit(lambda x: model(x))."
        )
    lowered = jitted.lower(*args, **kwargs)
    asked = _asked(hlo.parse(lowered.as_text("hlo", debug_info=True)))
    return read(lowered.compile().as_text(), asked)


def assert_quantized(
    jitted: Any,
    *args: Any,
    min_flops: float = 0.95,
    accept: Collection[str] = ("low", "kernel"),
    max_wide_gather_bytes: int | None = None,
    **kwargs: Any,
) -> Proof:
    """Raises an AssertionError unless enough of the compiled program runs in low bits.

    >>> import jax, jax.numpy as jnp
    >>> x = jax.ShapeDtypeStruct((64, 64), jnp.int8)
    >>> dot = jax.jit(lambda x: jnp.dot(x, x, preferred_element_type=jnp.int32))
    >>> len(assert_quantized(dot, x).contractions)
    1

    Args:
        jitted: a function that jax.jit returned.
        args, kwargs: what it would be called with.
        min_flops: the share of FLOPs that must have one of the verdicts in `accept`.
        accept: verdicts that count as quantized. On a backend without fp8 matmuls, such as
            a CPU, add "widened"; for weights served in low bits add "dequantized".
        max_wide_gather_bytes: most that all-gathers and all-to-alls may move in 16-bit
            floats or wider; None for any.

    Returns:
        The Proof.

    Raises:
        AssertionError: Too little of it is quantized; the message names what fell back.
        ValueError: An unknown verdict, or a share that is not between 0 and 1.
        TypeError: A function that jax.jit did not return.
    """
    if not 0 <= min_flops <= 1:
        raise ValueError(f"min_flops is a share between 0 and 1, not {min_flops}.")
    _check_verdicts(accept)
    proof = prove(jitted, *args, **kwargs)
    if not proof.flops:
        raise AssertionError("the compiled program has no contraction in it.")
    reached = proof.flops_share(*accept)
    problems = []
    if reached < min_flops:
        others = [e for e in proof.contractions if e.verdict not in accept]
        worst = sorted(others, key=lambda e: -e.flops)[:5]
        problems.append(
            f"{100 * reached:.1f}% of FLOPs are {' or '.join(accept)}, less than "
            f"{100 * min_flops:.1f}%. Largest of the others: "
            + "; ".join(
                f"{e.name} ({_pair(e.ran)}, {e.verdict}, {human(e.flops, 'FLOP')})"
                for e in worst
            )
        )
    limit = max_wide_gather_bytes
    if limit is not None and proof.wide_gather_bytes > limit:
        wide = [c for c in proof.collectives if c.is_wide]
        problems.append(
            f"{human(proof.wide_gather_bytes, 'B')} are gathered in wide floats, more than "
            f"{human(limit, 'B')}: "
            + "; ".join(
                f"{c.name} ({_short(c.cast_from)}, {human(c.nbytes, 'B')})"
                for c in wide[:5]
            )
        )
    if problems:
        raise AssertionError("\n".join(problems))
    return proof


# --- reading ----------------------------------------------------------------------------------

Asked = dict[str, list[tuple[tuple[str, str], tuple[int, ...]]]]


def _asked(module: Module) -> Asked:
    """Returns {name: [(dtypes of the operands, shape of the result)]} before optimisation."""
    requested: Asked = {}
    for visit in hlo.walk(module):
        ins = visit.value.instruction
        if ins.opcode in ("dot", "convolution", "ragged-dot"):
            lhs, rhs = (v.instruction.shape.dtype for v in visit.value.operands[:2])
            entry = (lhs, rhs), ins.shape.dims
            requested.setdefault(visit.op_name, []).append(entry)
    return requested


def read(text: str, asked: Asked | None = None) -> Proof:
    """Reads optimised HLO, given what was asked for."""
    module = hlo.parse(text)
    contractions, collectives = [], []
    for visit in hlo.walk(module):
        kind = _kind(visit.value.instruction)
        operands = [v.instruction.shape for v in visit.value.operands]
        if kind == "kernel" and not _multiplies(operands, visit.value.instruction):
            continue  # it quantizes, or sorts, or does something else
        if kind is not None and len(operands) > 1:
            contractions.append(_executed(module, visit, kind, asked or {}))
        elif visit.value.instruction.opcode.removesuffix("-start") in COLLECTIVES:
            collectives.append(_collective(module, visit))
    return Proof(tuple(contractions), tuple(collectives))


def _multiplies(operands: list[hlo.Shape], kernel: hlo.Instruction) -> bool:
    sized = lambda shapes: [(s.dims, hlo.bits(s.dtype)) for s in shapes]
    return may_multiply(sized(operands), sized(kernel.shapes))


def _kind(ins: hlo.Instruction) -> str | None:
    if ins.opcode in ("dot", "convolution", "ragged-dot"):
        return ins.opcode
    if ins.opcode != "custom-call":
        return None
    target = _target(ins)
    return next((kind for key, kind in CALLS.items() if re.search(key, target)), None)


def _target(ins: hlo.Instruction) -> str:
    match = re.search(r'custom_call_target="([^"]*)"', ins.attributes)
    return match.group(1) if match else ""


def _executed(module: Module, visit: Visit, kind: str, asked: Asked) -> Executed:
    ins = visit.value.instruction
    operands = visit.value.operands
    if kind == "kernel":  # its two largest operands are the matrices
        operands = sorted(operands, key=lambda v: -v.instruction.shape.size)
    lhs, rhs = operands[:2]
    shapes = lhs.instruction.shape, rhs.instruction.shape
    origins = hlo.origin(module, lhs), hlo.origin(module, rhs)
    pair = lambda field: tuple(getattr(o, field) for o in origins)
    return Executed(
        name=visit.op_name or ins.name,
        kind=kind,
        ran=(shapes[0].dtype, shapes[1].dtype),
        asked=_what_was_asked(asked.get(visit.op_name, []), ins.shape.dims, origins),
        cast_from=pair("cast_from"),
        stored=pair("stored"),
        out=ins.shape.dtype,
        shapes=(shapes[0].dims, shapes[1].dims),
        times=visit.times,
        flops=visit.times * _flops(ins, kind, *shapes),
        target=_target(ins),
    )


def _what_was_asked(
    entries: list, dims: tuple[int, ...], origins: tuple[Origin, Origin]
) -> tuple[str, str] | None:
    """Returns the dtypes of the ops of this name and size if they agree, or else those that
    the operands were cast from."""
    sizes = lambda dims: sorted(n for n in dims if n != 1)
    alike = [pair for pair, shape in entries if sizes(shape) == sizes(dims)]
    pairs = set(alike or [pair for pair, _ in entries])
    if len(pairs) == 1:
        return pairs.pop()
    cast_from = tuple(o.cast_from for o in origins)
    return cast_from if cast_from in pairs else None


def _flops(ins: hlo.Instruction, kind: str, lhs: hlo.Shape, rhs: hlo.Shape) -> int:
    if kind == "convolution":
        return hlo.flops_of_convolution(ins, rhs)
    if kind == "ragged-dot":
        return hlo.flops_of_ragged(ins, lhs, rhs)
    if kind == "dot":
        return hlo.flops_of_dot(ins, lhs)
    if kind == "gemm":
        match = re.search(
            r'"lhs_contracting_dimensions":\s*\[([^\]]*)\]', ins.attributes
        )
        if match:
            axes = [int(a) for a in re.findall(r"\d+", match.group(1))]
            return hlo.flops_of_dot(ins, lhs, axes)
    shapes = lhs, rhs, ins.shape
    # If just one of the three is a stack, it is one of experts.
    stacks = [s.dims[0] for s in shapes if len(s.dims) == 3]
    groups = stacks[0] if len(stacks) == 1 else 1
    return 2 * math.isqrt(math.prod(s.size for s in shapes) // groups)


def _collective(module: Module, visit: Visit) -> Collective:
    ins = visit.value.instruction
    operand = visit.value.operand(0)
    cast_from = hlo.origin(module, operand).cast_from if operand else ins.shape.dtype
    return Collective(
        name=visit.op_name or ins.name,
        kind=ins.opcode.removesuffix("-start"),
        dtype=ins.shape.dtype,
        cast_from=cast_from,
        dims=ins.shape.dims,
        times=visit.times,
        nbytes=visit.times * ins.shape.nbytes,
    )
