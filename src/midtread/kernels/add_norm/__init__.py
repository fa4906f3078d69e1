"""A stream, what is added to it, and the RMSNorm of the sum, for few rows.

triton.py    the kernel, and from a model's arrays to a plan for it, or why not
"""

import dataclasses
from typing import NamedTuple

import jax
import numpy as np

from midtread.kernels.layout import why_not_here
from midtread.kernels.pending import Pending


@dataclasses.dataclass(frozen=True, eq=False)
class Sum:
    """s = x + y [.., n] in x's dtype, and s / sqrt(mean(s^2) + epsilon) * (offset + scale)."""

    x: jax.Array
    y: jax.Array
    scale: jax.Array  # [n]
    epsilon: float
    scale_dtype: np.dtype  # the scale is rounded to this before it multiplies
    dtype: np.dtype  # of the normed rows
    offset: float = 0.0  # 1 where a scale is stored as its distance from 1
    left: Pending | None = None  # what y is to be computed from, if it is not yet

    @property
    def why_not_here(self) -> str | None:
        return why_not_here(self.x, self.y, self.scale)


class Normed(NamedTuple):
    """The sum, and its norm."""

    sum: jax.Array
    rows: jax.Array
