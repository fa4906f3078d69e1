"""Correct: targets that make up for the errors of the layers before.

The inputs X of a layer in the quantized model are not the inputs X' of the float one. The
weight that gives the float layer's output from what now comes in, in the least squares, is

    W + (H + damping)^-1 C W        H = X^T X,  C = X^T (X' - X)

and quantizing that instead of W corrects the layers before (QEP, Arai & Ichikawa 2025;
GPTAQ, Li et al. 2025, feeds the same term back row by row). A part of the way is often
better than all of it: C is known from few tokens, and the correction is fitted to them.
"""

import functools

import jax
import jax.numpy as jnp

from midtread.algorithms.weight import MATRIX, Axes, as_matrices, as_weight


@functools.partial(jax.jit, static_argnames=("axes", "damping", "strength"))
def target(
    w: jax.Array,
    H: jax.Array,
    C: jax.Array,
    axes: Axes = MATRIX,
    damping: float = 0.01,
    strength: float = 0.5,
) -> jax.Array:
    """What to quantize instead of `w`, so that the layer's output is the float model's.

    Args:
        w: a weight.
        H: second moments of its inputs in the quantized model, [E, G, K, K].
        C: their cross moments with what is missing to the float model's, of the same shape.
        strength: 1 corrects all, 0 nothing.

    Returns:
        An array of w's shape and dtype.
    """
    W = as_matrices(w.astype(jnp.float32), axes)
    E, K, N = W.shape
    G = H.shape[1]
    parts = W.reshape(E, K, G, -1).transpose(0, 2, 1, 3)
    mean = jnp.mean(jnp.diagonal(H, axis1=-2, axis2=-1), axis=-1)[..., None, None]
    damped = H + jnp.eye(K) * jnp.where(mean > 0, damping * mean, 1.0)
    factor = jnp.linalg.cholesky(damped)
    missing = jax.scipy.linalg.cho_solve((factor, True), C @ parts)
    corrected = parts + strength * missing
    corrected = corrected.transpose(0, 2, 1, 3).reshape(E, K, N)
    return as_weight(corrected, axes, w.shape).astype(w.dtype)
