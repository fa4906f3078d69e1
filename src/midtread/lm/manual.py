"""Manual: a tensor quantized by hand, as MaxText's batch-split code does it.

One constant scale, max / bound, whatever the data: "fixed,lo,hi". The scale is kept in a
tensor of the array's rank and dtype, so that it can be gathered and multiplied like any
other.
"""

from typing import Any

import jax
import jax.numpy as jnp

from midtread.numerics.formats import as_format
from midtread.numerics.qarray import QArray


def manual_quantize(
    tensor: jax.Array, calibration_method: str, dtype: Any = jnp.float8_e4m3fn
) -> QArray:
    """Quantizes `tensor` to `dtype` with the one scale that "fixed,lo,hi" stands for.

    >>> q = manual_quantize(jnp.array([1.0, 300.0]), "fixed,-224,224")
    >>> q.qvalue.tolist(), q.scale.tolist()
    ([2.0, 448.0], [0.5])
    """
    if calibration_method is None:
        raise ValueError(
            "calibration_method cannot be None for manual quantization: write "
            "'fixed,-224,224'."
        )
    words = calibration_method.split(",")
    if words[0] != "fixed":
        raise ValueError(
            "Only static weight/activation quantization is supported, but got "
            f"{calibration_method}: write 'fixed,<low>,<high>'."
        )
    if len(words) != 3:
        raise ValueError(
            f"Unexpected format for weight calibration method: {calibration_method}. "
            "Write 'fixed,<low>,<high>'."
        )
    fmt, largest = as_format(dtype), float(words[2])
    info = jnp.iinfo if jnp.issubdtype(fmt.dtype, jnp.integer) else jnp.finfo
    low, high = (float(x) for x in (info(fmt.dtype).min, info(fmt.dtype).max))
    scale = largest / high if largest else 1.0
    # MaxText divides by the scale rounded to bfloat16.
    divisor = jnp.asarray(scale, jnp.bfloat16).astype(tensor.dtype)
    codes = jnp.clip(tensor / divisor, low, high).astype(fmt.dtype)
    shape = (1,) * tensor.ndim
    return QArray(codes, jnp.full(shape, scale, tensor.dtype), None, fmt.name)
