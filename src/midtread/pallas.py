"""Quantized arrays in Pallas kernels.

Quantize outside the kernel, pass QArrays through `pallas_call`, and multiply them inside
with the three ops of this module (or `dequantize` a block). A kernel is opaque to every
provider; it asks `get_current_rule` what is wanted where it stands.

>>> import jax, jax.numpy as jnp, midtread as mt
>>> from jax.experimental import pallas as pl
>>> x = mt.quantize(jnp.ones((16, 256)), "int8", channelwise_axes=[0], tiled_axes={1: 128})
>>> w = mt.quantize(jnp.ones((256, 128)), "int8", channelwise_axes=[1], tiled_axes={0: 128})
>>> def kernel(x, w, out):
...     out[...] = dot_general(x[...], w[...], (((1,), (0,)), ((), ())))
>>> blocks = [pl.BlockSpec((8, 256), lambda i: (i, 0)), pl.BlockSpec((256, 128), lambda i: (0, 0))]
>>> rows = pl.BlockSpec((8, 128), lambda i: (i, 0))
>>> out = jax.ShapeDtypeStruct((16, 128), jnp.float32)
>>> run = pallas_call(kernel, out, grid=(2,), in_specs=blocks, out_specs=rows, interpret=True)
>>> bool(jnp.allclose(run(x, w), mt.dot(x, w)))
True
"""

from midtread.kernels.block_specs import pallas_call
from midtread.model.provider import get_current_rule
from midtread.numerics.qarray import QArray, dequantize, quantize
from midtread.ops.unrolled import dot, dot_general, einsum

__all__ = [
    "QArray", "dequantize", "dot", "dot_general", "einsum", "get_current_rule",
    "pallas_call", "quantize",
]  # fmt: skip
