"""Gates: how an MLP combines its gate with the values that are gated.

    out  =  gate(a) * b        a = x @ wi_0, b = x @ wi_1

Each is a function of JAX, and some are PTX too, for a kernel that has both halves in registers. There
a and b are rounded to bfloat16 first, as they are where they are written between two kernels; all
else is float32.

Two matrices whose columns are gated lie woven: a strip of STRIP columns of the one, then the same
strip of the other, so that a kernel's columns hold both.
"""

import struct
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

STRIP = 128


def _number(x: float) -> str:
    """Returns a float32 as PTX writes it."""
    return f"0f{struct.unpack('<I', struct.pack('<f', x))[0]:08X}"


LOG2E = 1.4426950408889634
# $0 = a b / (1 + 2**e) for an exponent e of a, with $1 = a and $2 = b rounded to bfloat16.
_SIGMOID = f"""{{ .reg .b32 v; .reg .f32 a, b, e;
    cvt.rn.bf16x2.f32 v, $2, $1; shl.b32 v, v, 16; mov.b32 a, v;
    cvt.rn.bf16x2.f32 v, $2, $1; and.b32 v, v, 0xffff0000; mov.b32 b, v;
    %s
    ex2.approx.f32 e, e; add.f32 e, e, {_number(1)}; rcp.approx.f32 e, e;
    mul.f32 e, e, a; mul.f32 $0, e, b; }}"""
_SILU = f"mul.f32 e, a, {_number(-LOG2E)};"
# (1 + tanh t) / 2 is 1 / (1 + exp(-2 t)), and t = sqrt(2 / pi) (a + 0.044715 a^3)
_CUBIC = -2 * LOG2E * (2 / 3.141592653589793) ** 0.5
_GELU = f"""mul.f32 e, a, a; fma.rn.f32 e, e, {_number(0.044715 * _CUBIC)}, {_number(_CUBIC)};
    mul.f32 e, e, a;"""


class Gate(NamedTuple):
    formula: Callable[[jax.Array, jax.Array], jax.Array]
    code: str | None = None  # PTX


def _clipped_silu(gate: jax.Array, up: jax.Array) -> jax.Array:
    """Gates as gpt-oss does: (up + 1) gate sigmoid(1.702 gate), with gate at most 7 and up
    within 7."""
    gate, up = jnp.minimum(gate, 7), jnp.clip(up, -7, 7)
    return (up + 1) * gate * jax.nn.sigmoid(1.702 * gate)


GATES = {
    "silu": Gate(lambda a, b: jax.nn.silu(a) * b, _SIGMOID % _SILU),
    "gelu": Gate(lambda a, b: jax.nn.gelu(a, approximate=True) * b, _SIGMOID % _GELU),
    "clipped_silu": Gate(_clipped_silu),
}


def woven(a: jax.Array, b: jax.Array) -> jax.Array:
    """Returns the strips of two arrays [.., N] by turns, [.., 2 N]."""
    strips = [x.reshape(*x.shape[:-1], -1, 1, STRIP) for x in (a, b)]
    return jnp.concatenate(strips, -2).reshape(*a.shape[:-1], -1)


def unwoven(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Undoes `woven`."""
    strips = x.reshape(*x.shape[:-1], -1, 2, STRIP)
    a, b = (strips[..., i, :].reshape(*x.shape[:-1], -1) for i in (0, 1))
    return a, b
