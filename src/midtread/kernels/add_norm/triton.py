"""Add and norm on a GPU: one kernel where XLA has two, for few rows, Triton.

    s = x + y        out = s / sqrt(mean(s^2) + epsilon) * (offset + scale)

XLA makes one kernel of the sum and its squares and another of what is made with their mean, and
each takes two or three microseconds whatever it does (NVIDIA H200, 32 rows of 4096). Here a
program reads a row once. What a matmul left of y (pending.py) is summed and scaled first, by as
many warps as there can be, since each part is one more load to wait for. The sum is rounded to
the stream's dtype before it is squared, as it is where it is written; all else is float32.
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
from midtread.kernels.pending import Pending

MAX_ROWS = 64  # for more rows XLA's two kernels take as long as their bytes
MAX_COLUMNS = 2**14  # a program holds a row in registers
FLOATS = ("bfloat16", "float16", "float32")


def _body(
    x_ref, *refs,
    columns: int, epsilon: float, offset: float, scale_dtype, of: Pending | None,
):  # fmt: skip
    """Computes one row [1, n], in blocks whose extent is the next power of two. `of` has
    True for what is left of y, in place of the arrays, and then None for what is not."""
    *of_y, scale_ref, sum_ref, out_ref = refs
    mask = other = None
    if x_ref.shape[1] != columns:
        mask, other = lax.broadcasted_iota(jnp.int32, x_ref.shape, 1) < columns, 0
    read = lambda ref: pltriton.load(ref, mask=mask, other=other).astype(jnp.float32)
    if of is None:
        y = read(of_y[0].at[:, :])
    else:
        parts, *factors = of_y
        y = sum(read(parts.at[pl.ds(p, 1), :]) for p in range(parts.shape[0]))
        y = y if of.columns is None else y * read(factors[0].at[:, :])
        y = y if of.rows is None else y * factors[-1][:][:, None]
        y = y.astype(sum_ref.dtype).astype(jnp.float32)
    total = (read(x_ref.at[:, :]) + y).astype(sum_ref.dtype)
    pltriton.store(sum_ref.at[:, :], total, mask=mask)
    total = total.astype(jnp.float32)
    mean = jnp.sum(total * total, axis=1) * np.float32(1 / columns)
    scale = read(scale_ref.at[:, :]).astype(scale_dtype).astype(jnp.float32)
    scale = scale + np.float32(offset)
    gain = lax.rsqrt(mean + np.float32(epsilon))[:, None] * scale
    pltriton.store(out_ref.at[:, :], (total * gain).astype(out_ref.dtype), mask=mask)


def add_norm(
    x: jax.Array,
    y: jax.Array | Pending,
    scale: jax.Array,
    *,
    epsilon: float,
    scale_dtype,
    dtype,
    offset: float = 0.0,
    interpret: bool = False,
) -> Normed:
    """Returns x + y [M, n] and its norm; scale is [n]."""
    m, n = x.shape
    padded = 1 << (n - 1).bit_length()
    row = pl.BlockSpec((1, padded), lambda i: (i, 0))
    shared = pl.BlockSpec((1, padded), lambda i: (0, 0))
    if isinstance(y, Pending):
        num = y.parts.shape[0]
        args, specs = (
            [y.parts],
            [pl.BlockSpec((num, None, padded), lambda i: (0, i, 0))],
        )
        if y.columns is not None:
            args, specs = [*args, y.columns[None]], [*specs, shared]
        if y.rows is not None:
            args, specs = [*args, y.rows], [*specs, pl.BlockSpec((1,), lambda i: (i,))]
        of = Pending(*(None if part is None else True for part in y))  # pyright: ignore[reportArgumentType]
    else:
        args, specs, of = [y], [row], None
    x, *args = alike(x, *args, scale[None])
    options = {"epsilon": epsilon, "offset": offset, "scale_dtype": scale_dtype}
    warps = max(1, min(16, padded // 256) if of is None else min(32, padded // 128))
    out = pl.pallas_call(
        functools.partial(_body, columns=n, of=of, **options),
        name="add_norm",
        grid=(m,),
        in_specs=[row, *specs, shared],
        out_specs=[row, row],
        out_shape=[result((m, n), x.dtype, x), result((m, n), dtype, x)],
        compiler_params=triton_params(warps, 1),
        interpret=interpret,
    )(x, *args)  # fmt: skip
    return Normed(*out)


class Triton(NamedTuple):
    is_interpreted: bool

    def run(self, a: Sum) -> Normed:
        formula = a.epsilon, a.offset, a.scale_dtype, a.dtype
        call = _call(*formula, a.left is not None, self.is_interpreted)
        rows = (math.prod(a.x.shape[:-1]), a.x.shape[-1])
        y = a.y.reshape(rows) if a.left is None else a.left
        total, out = call(a.x.reshape(rows), y, a.scale)
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
def _call(
    epsilon: float, offset: float, scale_dtype, dtype, is_left: bool, interpret: bool
) -> Callable:
    """Returns the kernel as a function of x, y and scale, with gradients if y is an array."""

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
    return jax.jit(kernel) if is_left else with_gradients(jax.jit(kernel), plain)
