"""Jaxprs: every contraction of a traced program, and how often it runs.

`walk` goes into jit, scan, remat, cond, while, shard_map and custom derivatives, and
yields the equations that matter here with the product of all trip counts around them.
What vmap did is in their shapes already. Two bodies have no count: that of a while loop
counts once, and every branch counts though only one runs; a note says so.

The scopes that a witness opened (ops/witness.py) are in the equations' name stacks. A jitted
function that is called twice is traced once, so a stack has only what was opened inside of
the innermost trace, and `walk` puts the stacks of the calls around it before it.
"""

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

from jax.extend import core

from midtread.ops.witness import PREFIX

CONTRACTIONS = (
    "dot_general",
    "conv_general_dilated",
    "ragged_dot_general",
    "ragged_dot",
)
OPAQUE = ("pallas_call", "core_map", "ffi_call", "custom_call", "tpu_custom_call")
LOOKUP, MARK = "gather", "name"

UNKNOWN_LOOP = "in a loop of unknown length: one turn counted"
BRANCH = "in a branch, counted as if taken"


@dataclasses.dataclass(frozen=True)
class Equation:
    """An equation, the witness's scopes around it, and how often it runs."""

    eqn: Any
    scopes: tuple[int, ...]
    times: int
    note: str

    @property
    def name(self) -> str:
        return self.eqn.primitive.name

    @property
    def shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return tuple(self.eqn.invars[0].aval.shape), tuple(
            self.eqn.invars[1].aval.shape
        )

    @property
    def dtypes(self) -> tuple[Any, Any]:
        return self.eqn.invars[0].aval.dtype, self.eqn.invars[1].aval.dtype

    @property
    def out(self) -> Any:
        return self.eqn.outvars[0].aval

    @functools.cached_property
    def flops(self) -> int:
        return self.times * FLOPS[self.name](self.eqn)


def walk(
    jaxpr: Any, scopes: tuple[int, ...] = (), times: int = 1, note: str = ""
) -> Iterator[Equation]:
    """Yields the contractions, kernels, lookups and marks of a jaxpr and all inside it."""
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        here = scopes + _scopes(str(eqn.source_info.name_stack))
        if name in (*CONTRACTIONS, *OPAQUE, LOOKUP, MARK):
            yield Equation(eqn, here, times, note)
            continue
        for body, count, why in _bodies(eqn):
            yield from walk(body, here, times * count, why or note)


@functools.lru_cache(maxsize=65536)
def _scopes(stack: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(rf"{PREFIX}(\d+)", stack)))


def _bodies(eqn: Any) -> Iterator[tuple[Any, int, str]]:
    name, params = eqn.primitive.name, eqn.params
    count, why = 1, ""
    if name == "scan":
        count = params["length"]
    elif name == "while":
        why = UNKNOWN_LOOP
    elif name == "cond":
        why = BRANCH
    elif name == "shard_map":  # shapes inside are those of one shard
        mesh = params["mesh"]
        manual = params.get("manual_axes", mesh.axis_names)
        count = math.prod(mesh.shape[axis] for axis in manual)
    for value in params.values():
        for inner in value if isinstance(value, tuple | list) else (value,):
            if isinstance(inner, core.ClosedJaxpr):
                yield inner.jaxpr, count, why
            elif isinstance(inner, core.Jaxpr):
                yield inner, count, why


def kernel_name(eqn: Any) -> str:
    """Returns the name that an opaque call is known by."""
    for key in ("name", "target_name", "call_target_name"):
        if eqn.params.get(key):
            return str(eqn.params[key])
    body = eqn.params.get("jaxpr")
    source = getattr(getattr(body, "debug_info", None), "func_src_info", None)
    return source.split(" at ")[0] if source else eqn.primitive.name


Sized = tuple[tuple[int, ...], int]  # an array's shape, and the bits of an element


def may_multiply(operands: Sequence[Sized], results: Sequence[Sized]) -> bool:
    """Whether a kernel can be a matmul: two of its operands are matrices that have an extent
    in common. A kernel that quantizes may have such operands too, because of its scales, but
    it returns as many elements as its largest operand has, in fewer bits, at most eight."""
    shape, bits = max(operands, key=lambda a: math.prod(a[0]), default=((), 0))
    codes = (
        math.prod(result) for result, width in results if width <= min(8, bits - 1)
    )
    if math.prod(shape) in codes:
        return False
    matrices = [{n for n in shape if n > 1} for shape, _ in operands if len(shape) > 1]
    return any(a & b for a, b in itertools.combinations(matrices, 2))


# --- floating-point operations: a multiplication and an addition per product ------------------


def _dot(eqn: Any) -> int:
    (lhs_sum, _), _ = eqn.params["dimension_numbers"]
    lhs, out = eqn.invars[0].aval, eqn.outvars[0].aval
    return 2 * math.prod(out.shape) * math.prod(lhs.shape[a] for a in lhs_sum)


def _conv(eqn: Any) -> int:
    rhs, out = eqn.invars[1].aval, eqn.outvars[0].aval
    features = rhs.shape[eqn.params["dimension_numbers"].rhs_spec[0]]
    return 2 * math.prod(out.shape) * math.prod(rhs.shape) // features


def _ragged(eqn: Any) -> int:
    """Counts products; a row is multiplied by the matrix of its own group only."""
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    (_, rhs_sum), (_, rhs_batch) = numbers.dot_dimension_numbers
    known = (*rhs_sum, *rhs_batch, *numbers.rhs_group_dimensions)
    lhs, rhs = eqn.invars[0].aval, eqn.invars[1].aval
    free = (n for a, n in enumerate(rhs.shape) if a not in known)
    return 2 * math.prod(lhs.shape) * math.prod(free)


FLOPS = {
    "dot_general": _dot,
    "conv_general_dilated": _conv,
    "ragged_dot_general": _ragged,
    "ragged_dot": _ragged,
}
