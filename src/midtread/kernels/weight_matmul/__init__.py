"""Float rows times the codes of a stored weight.

few_rows.py          up to MAX_ROWS rows: a plan for one of two kernels, or why not
few_groups.py        the same for a few rows of each group
few_codes.py         few rows of codes, as floats by the kernels above
many_rows.py         more rows
hopper_decode/       the kernel for few rows on Hopper
hopper_prefill/      the kernel for many rows on Hopper
triton.py            few rows on any NVIDIA GPU
triton_grouped.py    few rows of each group on any NVIDIA GPU
triton_tuned.py      their block sizes, from <device>.json
"""

import jax
import jax.numpy as jnp

from midtread.kernels import decoding
from midtread.numerics import views
from midtread.numerics.formats import Format
from midtread.numerics.rounding import decode, unpacked

HOPPER = decoding.formats("rows")  # what Hopper's kernels decode, and Triton's
TRITON = decoding.formats("bytes")
MAX_ROWS = 64  # how many rows are few; of a group, on average


def why_not_format(fmt: Format, taken: tuple[str, ...]) -> str | None:
    """Says why a kernel that takes some formats does not decode this one; None if it does."""
    if fmt.name in taken:
        return None
    return f"it does not decode {fmt.name}"


def values_of(
    codes: jax.Array,
    fmt: Format,
    scale: jax.Array | None = None,
    zero: jax.Array | None = None,
) -> jax.Array:
    """Returns (value - zero) * scale in float32, in plain JAX: what gradients are taken of. A
    zero point is a code or a float."""
    values = decode(codes, fmt).astype(jnp.float32)
    for op, part in ((jnp.subtract, zero), (jnp.multiply, scale)):
        if part is not None:
            part = unpacked(part).astype(jnp.float32)
            values = views.broadcast_with(op, values, part)
    return values
