"""Pending: what a matmul's kernel leaves to be done, for a kernel that does it on its way.

A kernel for few rows may leave parts of a sum, and scales of rows or columns. XLA applies them in
whatever it does next; but a kernel of ours is nothing that XLA can put them into, so it would start
another one for them. The kernels that follow a matmul in a decoding step (add_norm/, write_cache/)
take parts and scales themselves:

    y_MN  =  rows_M columns_N sum_p parts_pMN

    with collect() as left:
        y = x @ w           whatever happens to the call on its way
    left.of(y)              Pending, if y is that and nothing else was done to it; else None

If all that uses y takes the Pending instead, XLA does not compute y.

Before a matmul it is the same the other way round: the kernel that quantizes rows can write their
codes in bfloat16 too, as the kernels for few rows want them (`note_codes`). And a kernel may do more
than its matmul, if it is told what follows:

    with collect(gate="silu") as left:
        y = x @ w               columns that gate each other, woven (gates.py)
    left.gated(y)               what y becomes if its kernel has gated it; else None

Again XLA computes no y that nobody uses.
"""

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class Pending(NamedTuple):
    """A matrix that is not summed up and scaled yet."""

    parts: jax.Array  # [P, M, N] in float32, or one part that needs no more
    columns: jax.Array | None = None  # [N]
    rows: jax.Array | None = None  # [M]

    def total(self) -> jax.Array:
        """[M, N], summed and scaled: in float32, or as it is if nothing is left to do."""
        out = self.parts[0] if len(self.parts) == 1 else jnp.sum(self.parts, 0)
        if self.columns is not None:
            out = out * self.columns.astype(jnp.float32)
        return out if self.rows is None else out * self.rows[:, None]


class Left:
    """What the last matmul within `collect` left, and the array that it is."""

    def __init__(self, gate: str | None = None):
        self.gate = gate
        self._pending: Pending | None = None
        self._gated: jax.Array | None = None
        self._result: Any = None
        self._codes: tuple[Any, Any] = (None, None)

    def of(self, y: jax.Array) -> Pending | None:
        return self._pending if self._result is y else None

    def gated(self, y: jax.Array) -> jax.Array | None:
        if self._gated is None or self._result is not y:
            return None
        return self._gated.reshape(*y.shape[:-1], -1)


_left: contextvars.ContextVar[Left | None] = contextvars.ContextVar(
    "left", default=None
)


@contextlib.contextmanager
def collect(gate: str | None = None) -> Iterator[Left]:
    """Notes what the matmuls inside leave, or make of it under a gate."""
    left = Left(gate)
    token = _left.set(left)
    try:
        yield left
    finally:
        _left.reset(token)


def is_wanted() -> bool:
    return _left.get() is not None


def begin() -> None:
    """Forgets what an earlier matmul left: another one begins."""
    left = _left.get()
    if left is not None:
        left._pending = left._gated = left._result = None


def note(pending: Pending | None) -> None:
    """Notes what the kernel of a matmul leaves."""
    left = _left.get()
    if left is not None:
        left._pending, left._result = pending, None


def gate_wanted() -> str | None:
    """Returns the name of the gate that follows the matmul, if one does."""
    left = _left.get()
    return None if left is None else left.gate


def note_gated(out: jax.Array) -> None:
    """Notes what the kernel of a matmul made of its result, a matrix."""
    left = _left.get()
    if left is not None:
        left._gated = out


def note_rows(factor: jax.Array) -> None:
    """Notes scales of the rows of the result, one or as many as there are rows."""
    left = _left.get()
    if left is None or left._pending is None:
        return
    pending = left._pending
    m = pending.parts.shape[1]
    if pending.rows is not None or factor.size not in (1, m):
        return note(None)
    rows = jnp.broadcast_to(factor.reshape(-1), (m,)).astype(jnp.float32)
    note(pending._replace(rows=rows))


def note_result(out: jax.Array) -> None:
    """Notes which array the matmul returned."""
    left = _left.get()
    if left is not None:
        left._result = out


def note_codes(qvalue: jax.Array, wide: jax.Array) -> None:
    """Notes the same codes in bfloat16."""
    left = _left.get()
    if left is not None:
        left._codes = qvalue, wide


def in_bfloat16(qvalue: jax.Array) -> jax.Array:
    """Returns codes of 8 bits in bfloat16: as they were noted, or cast."""
    left = _left.get()
    if left is not None and left._codes[0] is qvalue:
        return left._codes[1]
    return qvalue.astype(jnp.bfloat16)
