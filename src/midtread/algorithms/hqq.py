"""HQQ: scales and zero points without data, robust to a few large weights.

Badri & Shaji 2023 choose them by  sum |w - rounded(w)|^p  with p < 1: such a norm lets a few
large errors be, where squares would widen the window for them, and so most weights are
rounded more finely. They solve it by half-quadratic turns over real zero points. QArrays
keep zero points as integers of the format, so here it is solved by the search of clip.py,
over windows of both ends, under the same norm.
"""

import jax

from midtread.algorithms import clip
from midtread.algorithms.weight import encode
from midtread.numerics import views
from midtread.numerics.qarray import QArray
from midtread.numerics.spec import Spec


def solve(w: jax.Array, spec: Spec, norm: float = 0.7) -> QArray:
    """`w` under the scales and zero points with the least |error|^norm.

    >>> w = jax.random.normal(jax.random.key(0), (64, 8)).at[3].set(9.0)
    >>> solve(w, Spec("uint4", (1,), {0: 32}, calibration="minmax")).zero_point.shape
    (2, 8)

    Args:
        w: a weight.
        spec: how it is quantized; calibration="minmax" for zero points.
        norm: below 1, the smaller the less large errors count.

    Returns:
        A QArray under `spec`.
    """
    scales = clip.search(w, spec, norm=norm)
    padded, _ = spec.layout(w.shape)
    return encode(views.pad_to(w, padded), spec, scales, w.shape)
