"""Add and norm on a GPU: one kernel where XLA has two, for few rows, Triton.

    s = x + y        out = s / sqrt(mean(s^2) + epsilon) * (offset + scale)

XLA makes one kernel of the sum and its squares and another of what is made with their mean, and
each takes two or three microseconds whatever it does (NVIDIA H200, 32 rows of 4096). Here a
program reads a row once. The sum is rounded to the stream's dtype before it is squared, as it is
where it is written; all else is float32.
"""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from midtread.kernels.add_norm import Normed, Sum
from midtread.kernels.candidates import Refusal
from midtread.kernels.environment import Env
from midtread.kernels.pallas_compat import alike, pl, pltriton, result, triton_params
from midtread.kernels.partition import with_gradients

MAX_ROWS = 64  # for more rows XLA's two kernels take as long as their bytes
MAX_COLUMNS = 2**14  # a program holds a row in registers
FLOATS = ("bfloat16", "float16", "float32")


def _body(
    x_ref, y_ref, scale_ref, sum_ref, out_ref,
    *, columns: int, epsilon: float, offset: float, scale_dtype,
):  # fmt: skip
    """One row [1, n], in blocks whose extent is the next power of two."""
    mask = other = None
    if x_ref.shape[1] != columns:
        mask, other = lax.broadcasted_iota(jnp.int32, x_ref.shape, 1) < columns, 0
    read = lambda ref: pltriton.load(ref.at[:, :], mask=mask, other=other)
    wide = lambda x: x.astype(jnp.float32)
    total = (wide(read(x_ref)) + wide(read(y_ref))).astype(sum_ref.dtype)
    pltriton.store(sum_ref.at[:, :], total, mask=mask)
    total = wide(total)
    mean = jnp.sum(total * total, axis=1) * np.float32(1 / columns)
    scale = wide(read(scale_ref).astype(scale_dtype)) + np.float32(offset)
    gain = lax.rsqrt(mean + np.float32(epsilon))[:, None] * scale
    pltriton.store(out_ref.at[:, :], (total * gain).astype(out_ref.dtype), mask=mask)


def add_norm(
    x: jax.Array,
    y: jax.Array,
    scale: jax.Array,
    *,
    epsilon: float,
    scale_dtype,
    dtype,
    offset: float = 0.0,
    interpret: bool = False,
) -> Normed:
    """Returns x + y [M, n] and its norm; scale is [n]."""
    x, y, scale = alike(x, y, scale[None])
    m, n = x.shape
    padded = 1 << (n - 1).bit_length()
    row = pl.BlockSpec((1, padded), lambda i: (i, 0))
    shared = pl.BlockSpec((1, padded), lambda i: (0, 0))
    options = {"epsilon": epsilon, "offset": offset, "scale_dtype": scale_dtype}
    out = pl.pallas_call(
        functools.partial(_body, columns=n, **options),
        name="add_norm",
        grid=(m,),
        in_specs=[row, row, shared],
        out_specs=[row, row],
        out_shape=[result((m, n), x.dtype, x), result((m, n), dtype, x)],
        compiler_params=triton_params(num_warps=min(8, max(1, padded // 256)), num_stages=1),
        interpret=interpret,
    )(x, y, scale)  # fmt: skip
    return Normed(*out)


class Triton(NamedTuple):
    is_interpreted: bool

    def run(self, a: Sum) -> Normed:
        call = _call(a.epsilon, a.offset, a.scale_dtype, a.dtype, self.is_interpreted)
        rows = (math.prod(a.x.shape[:-1]), a.x.shape[-1])
        total, out = call(a.x.reshape(rows), a.y.reshape(rows), a.scale)
        return Normed(total.reshape(a.x.shape), out.reshape(a.x.shape))


def plan(a: Sum, env: Env) -> Triton | Refusal:
    rows, columns = math.prod(a.x.shape[:-1]), a.x.shape[-1]
    if not env.is_alone:
        return Refusal(
            "over several devices XLA adds and norms, which can partition it"
        )
    if a.x.shape != a.y.shape or a.x.dtype != a.y.dtype:
        return Refusal("what is added has another shape or dtype")
    if not 0 < rows <= MAX_ROWS:
        return Refusal(f"{rows} rows: the kernel is for 1 to {MAX_ROWS}")
    if columns > MAX_COLUMNS:
        return Refusal(f"rows of {columns}: up to {MAX_COLUMNS} have a kernel")
    if a.x.dtype.name not in FLOATS or np.dtype(a.dtype).name not in FLOATS:
        return Refusal(f"{a.x.dtype} has no kernel: {', '.join(FLOATS)} have")
    return Triton(env.is_interpreted)


@functools.cache
def _call(epsilon: float, offset: float, scale_dtype, dtype, interpret: bool) -> Callable:  # fmt: skip
    """The kernel as a function of x, y and scale."""

    def plain(x, y, scale):
        total = x + y
        wide = total.astype(jnp.float32)
        mean = jnp.mean(wide * wide, axis=-1, keepdims=True)
        gain = scale.astype(scale_dtype).astype(jnp.float32) + np.float32(offset)
        out = wide * (lax.rsqrt(mean + np.float32(epsilon)) * gain)
        return Normed(total, out.astype(dtype))

    kernel = functools.partial(
        add_norm, epsilon=epsilon, offset=offset, scale_dtype=scale_dtype,
        dtype=dtype, interpret=interpret,
    )  # fmt: skip
    return with_gradients(jax.jit(kernel), plain)
