"""Choose: for each operation, which implementations there are, and the first that can run.

    scaled(matmul, env)           codes x codes, scaled; rows may come in groups
    weight(matmul, env)           float x codes of a stored weight; rows may come in groups
    attend(cached)                one token a sequence against a cache
    plan_attend_ranges(..)        many tokens, each over a range of keys
    write(token)                  one token a sequence, turned and written into a cache
    add_norm(sum)                 a stream, what is added to it, and the norm of the sum
    quantize(x, spec, ...)        a float operand to codes, in the order its matmuls want
    quantize_twice(x, specs, ..)  the same for two matmuls from one read

All but `quantize` return None where no kernel can run, and their callers go on without one. The
tables below are all there is to choose from; each candidate says what it takes and why not
(candidates.py). A choice changes the time, never the meaning: what a kernel does not take (zero
points, odd layouts, sharded arrays) is left to XLA. The user may overrule it with
`implementation` (environment.py).
"""

from typing import Any

import jax

from midtread.kernels import pending
from midtread.kernels.add_norm import Normed, Sum
from midtread.kernels.attention import Ranged
from midtread.kernels.candidates import Candidate, Chosen, first
from midtread.kernels.decode_attention import Cached
from midtread.kernels.environment import Env, here
from midtread.kernels.layout import Matmul, weight_matmul, why_not_weight
from midtread.kernels.quantize.operand import Operand, Quantized, Twice
from midtread.kernels.write_cache import Token, Written
from midtread.numerics.calibration import Range
from midtread.numerics.qarray import QArray
from midtread.numerics.spec import Spec

_HERE = "midtread.kernels"

# Rows of floats by a stored weight: few on any NVIDIA GPU, many on Hopper, or on a CPU.
FEW_ROWS = (
    Candidate("hopper_decode", "hopper", f"{_HERE}.weight_matmul.few_rows:plan_hopper", False),
    Candidate("triton", "nvidia", f"{_HERE}.weight_matmul.few_rows:plan_triton"),
)  # fmt: skip
WEIGHT = (
    *FEW_ROWS,
    Candidate("hopper_prefill", "hopper", f"{_HERE}.weight_matmul.many_rows:plan", False),
    Candidate("cpu", "cpu", f"{_HERE}.cpu:plan"),
)  # fmt: skip
GROUPED_WEIGHT = (
    Candidate("hopper_decode", "hopper", f"{_HERE}.weight_matmul.few_groups:plan_hopper", False),
    Candidate("triton_grouped", "nvidia", f"{_HERE}.weight_matmul.few_groups:plan_triton"),
)  # fmt: skip

# Codes by codes.
SCALED = (
    Candidate("few_codes", "nvidia", f"{_HERE}.weight_matmul.few_codes:plan"),
    Candidate("hopper_tiled", "hopper", f"{_HERE}.scaled_matmul.adapter:plan_tiled"),
    Candidate("hopper_prefill", "hopper", f"{_HERE}.scaled_matmul.adapter:plan_columns"),
    Candidate("hopper", "hopper", f"{_HERE}.scaled_matmul.adapter:plan"),
)  # fmt: skip
GROUPED_SCALED = (
    Candidate("few_codes", "nvidia", f"{_HERE}.weight_matmul.few_codes:plan"),
    Candidate("hopper_grouped", "hopper", f"{_HERE}.scaled_matmul.grouped_adapter:plan"),
)  # fmt: skip

QUANTIZE = (
    Candidate("triton", "nvidia", f"{_HERE}.quantize.adapter:plan"),
    Candidate("xla_one_read", "nvidia", f"{_HERE}.quantize.operand:plan_one_read"),
    Candidate("xla", "any", f"{_HERE}.quantize.operand:plan_plain"),
)
# Within a decoding step, where kernels of ours stand before and behind.
QUANTIZE_IN_STEP = (
    Candidate("triton_few", "nvidia", f"{_HERE}.quantize.adapter:plan_few"),
    *QUANTIZE,
)
QUANTIZE_TWICE = (
    Candidate("triton", "nvidia", f"{_HERE}.quantize.adapter:plan_twice"),
)
ATTEND = (Candidate("triton", "nvidia", f"{_HERE}.decode_attention.triton:plan"),)
ATTEND_RANGES = (Candidate("triton", "hopper", f"{_HERE}.attention.triton:plan"),)
WRITE = (Candidate("triton", "nvidia", f"{_HERE}.write_cache.triton:plan"),)
ADD_NORM = (Candidate("triton", "nvidia", f"{_HERE}.add_norm.triton:plan"),)


def scaled(a: Matmul, env: Env) -> jax.Array | None:
    """Multiplies codes by codes and scales the sums, in `a.dtype`; None if no kernel can."""
    if a.groups is None:
        choice = first("scaled matmul", SCALED, a, env, "this matmul of codes")
    else:
        what = "this grouped matmul of codes"
        choice = first("grouped scaled matmul", GROUPED_SCALED, a, env, what)
    return _run(choice, a)


def weight(a: Matmul, env: Env) -> jax.Array | None:
    """Multiplies a float operand by a QArray, in `a.dtype`, or in float32 where rows come in
    groups. It is None if no kernel can, and also, before any candidate is asked, if `a` is not
    such a matmul."""
    operands: Any = a
    if a.groups is None:
        operation, candidates, what = "weight matmul", WEIGHT, "these rows by a weight"
        operands = weight_matmul(a)
    else:
        operation, candidates = "grouped weight matmul", GROUPED_WEIGHT
        what = "these rows by grouped weights"
        operands = why_not_weight(a.lhs, a.rhs) or a
    if isinstance(operands, str):
        if env.watch is not None:
            env.watch(operation, a, Chosen(None, None, (("any", operands),)))
        return None
    fmt = (a.lhs if isinstance(a.lhs, QArray) else a.rhs).format
    choice = first(operation, candidates, operands, env, f"{what} of {fmt.name}")
    return _run(choice, operands)


def _run(choice: Chosen, operands: Any) -> Any:
    return None if choice.plan is None else choice.plan.run(operands)


def quantize(
    x: jax.Array,
    spec: Spec,
    range_: Range | None = None,
    key: jax.Array | None = None,
    site: tuple = (),
    *,
    summed: tuple[int, ...],
    both: bool = False,
    factor: jax.Array | None = None,
    env: Env | None = None,
) -> tuple[QArray, QArray]:
    """Quantizes `x * factor` for a matmul that sums over `summed`, and, if `both`, once more
    for one that sums over the other axes. `Operand` explains the arguments."""
    operand = Operand(x, spec, range_, key, site, summed, both, factor)
    candidates = QUANTIZE_IN_STEP if pending.is_wanted() else QUANTIZE
    choice = first("quantize", candidates, operand, env or here())
    return choice.plan.run(operand)[:2]


def quantize_twice(
    x: jax.Array,
    specs: tuple[Spec, Spec],
    summed: tuple[tuple[int, ...], tuple[int, ...]],
    range_: Range | None = None,
    largest: bool = False,
    env: Env | None = None,
) -> Quantized | None:
    """Quantizes x for two matmuls, each under its own Spec, from one read, and returns max |x|
    too if it is wanted and the kernel has it. It is None if no kernel does that; then `quantize`
    has to be called twice."""
    operands = Twice(x, specs, summed, range_, largest)
    choice = first("quantize twice", QUANTIZE_TWICE, operands, env or here())
    return _run(choice, operands)


def attend(operands: Cached) -> jax.Array | None:
    """Computes softmax(gain q k / sqrt(h)) v of one token a sequence against its cache; None if
    no kernel can."""
    choice = first("attend", ATTEND, operands, here(), "attention over this cache")
    return _run(choice, operands)


def plan_attend(operands: Cached, env: Env) -> Chosen:
    """Chooses what `attend` would run, or says why nothing does, and runs nothing."""
    return first("attend", ATTEND, operands, env)


def plan_attend_ranges(operands: Ranged, env: Env) -> Chosen:
    """Chooses what computes softmax(scale q k) v of many tokens, each over its range of keys,
    or says why nothing does, and runs nothing."""
    return first("attend ranges", ATTEND_RANGES, operands, env)


def write(token: Token) -> Written | None:
    """Turns queries and keys by their positions and writes keys and values into the cache, which
    is used up; None if no kernel can."""
    return _run(first("write", WRITE, token, here()), token)


def add_norm(operands: Sum) -> Normed | None:
    """Adds to a stream and norms the sum; None if no kernel can."""
    return _run(first("add and norm", ADD_NORM, operands, here()), operands)
