"""Tolerances: how far from each peer we may be, and why.

One row per reason. `rtol` bounds max |ours - theirs| / max |theirs|; None asks for the
same bits. `share` bounds the part of the codes that differ, `steps` by how much.
"""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class Row:
    rtol: float | None  # of values; None: bit for bit
    share: float  # of codes that may differ
    steps: int  # by how many
    why: str


ROWS = {
    #                     rtol  share steps
    "bitwise":       Row(None,   0.0, 0, "same operations in the same order"),
    "f32_sum":       Row(4e-6,   0.0, 0, "float32 sums of up to 2,048 products in another order: operands swapped, tiles added one by one"),
    "scale_16":      Row(2**-8,  0.0, 0, "a 16-bit scale by reciprocal and by division: an ulp of 8 bits"),
    "bf16_quotient": Row(None,   0.2, 1, "Qwix divides in bfloat16, we in float32: its quotients have 8 bits and so ties of their own"),
    "f16_quotient":  Row(None,  0.05, 1, "Qwix divides in float16, we in float32: its quotients have 11 bits"),
    "bf16_rms":      Row(2**-6,  0.6, 3, "Qwix squares and takes the root in bfloat16, we in float32: scales an ulp or two apart"),
    "zero_point":    Row(None,   1.0, 2, "Qwix rounds a 16-bit zero point, we a float32 one: all codes of a tile move by one"),
    "nf4_table":     Row(2**-7,  0.0, 0, "Qwix rounds the NF4 levels to the array's dtype before scaling, we after"),
    "exp2_scale":    Row(2e-6,   0.0, 0, "Qwix takes powers of two through exp2 in float32, we from the exponent bits"),
    "bf16_result":   Row(2**-7,  0.0, 0, "ours against float64: dequantized operands and the result rounded to bfloat16, nothing in between"),
    "f16_result":    Row(2**-10, 0.0, 0, "the same in float16"),
    "bf16_epilogue": Row(2**-5,  0.0, 0, "Qwix sums and applies every scale in bfloat16 (2e-2 from float64 on jax 0.12), we in float32"),
    "f16_epilogue":  Row(2**-9,  0.0, 0, "the same in float16"),
    "bf16_training": Row(2**-3,  0.0, 0, "both of the above, through codes that already differ at ties"),
    "reciprocal":    Row(3e-7,  2e-3, 1, "we multiply by reciprocals, as XLA does under jit; the peer divides: an ulp, and codes at ties"),
    "ties":          Row(2**-4,  0.0, 0, "a code of each operand that fell to the other side of a tie, seen through a matmul"),
    "ties_4_bits":   Row(2**-3,  0.0, 0, "the same with codes of 4 bits, whose steps are larger"),
    "minus_128":     Row(None,  0.02, 1, "AQT clips to +-127, we keep -128 for exactly -absmax (as Qwix does): one code per group"),
    "aqt_bf16":      Row(2**-6,  0.0, 0, "AQT takes scales, reciprocals and the epilogue in bfloat16"),
    "chance":        Row(0.05,   1.0, 0, "means over stochastic roundings of different generators"),
}  # fmt: skip


def assert_values(ours, theirs, row: str, context="") -> None:
    """Floats within the row's tolerance; same dtype and shape."""
    assert ours.dtype == theirs.dtype, (context, ours.dtype, theirs.dtype)
    assert ours.shape == theirs.shape, (context, ours.shape, theirs.shape)
    ours, theirs = np.asarray(ours, np.float32), np.asarray(theirs, np.float32)
    rtol = ROWS[row].rtol
    if rtol is None:
        np.testing.assert_array_equal(ours, theirs, err_msg=str(context))
        return
    largest = np.max(np.abs(theirs), initial=0.0)
    worst = np.max(np.abs(ours - theirs), initial=0.0)
    assert worst <= rtol * largest, f"{context}: {worst / largest:.3g} > {row} {rtol}"


def assert_codes(ours, theirs, row: str, levels, context="", extremes=0.0) -> float:
    """Codes equal but for the row's share, and those near. Returns the share.

    `levels` are the values a code may have, sorted; a step is from one to the next.
    `extremes` is the share of elements that set a scale: -absmax is a tie by itself.
    """
    assert ours.shape == theirs.shape, (context, ours.shape, theirs.shape)
    place = lambda codes: np.searchsorted(levels, np.asarray(codes, np.float32))
    apart = np.abs(place(ours) - place(theirs))
    steps = ROWS[row].steps
    assert apart.max(initial=0) <= steps, f"{context}: codes {apart.max()} steps apart"
    share = float(np.mean(apart > 0))
    assert share <= ROWS[row].share + extremes, (
        f"{context}: {share:.3g} of codes differ > {row}"
    )
    return share
