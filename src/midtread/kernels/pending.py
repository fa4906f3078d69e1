"""Pending: other forms of an array, noted where it is made in a step, for the kernel that comes next.

A kernel for few rows may leave parts of a sum, and scales of rows or columns. XLA applies them in
whatever it does next; but a kernel of ours is nothing that XLA can put them into, so it would start
another one for them. The kernels that follow a matmul in a decoding step (add_norm/, write_cache/)
take parts and scales themselves:

    y_MN  =  rows_M columns_N sum_p parts_pMN

Between the two kernels are layers that know nothing of either. So whoever makes an array notes what
other forms of it there are, and whoever takes it asks for the form that it wants:

    with collect() as forms:
        y = x @ w            whatever happens to the call on its way
    forms.of(y).pending      Pending, if y is what the matmul returned and nothing was done to it

XLA computes no form that nobody uses. Beside `pending` there are two more. Codes of rows have the same
codes in bfloat16, as the kernels for few rows want them (`wide`). And where columns gate each other
(gates.py), a matmul has them gated (`gated`), if it is told by which gate: `collect(gate="silu")`.
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

    def with_rows(self, factor: jax.Array) -> "Pending | None":
        """Returns the same with scales of rows, one or as many as there are rows; None if these
        cannot be left."""
        m = self.parts.shape[1]
        if self.rows is not None or factor.size not in (1, m):
            return None
        rows = jnp.broadcast_to(factor.reshape(-1), (m,)).astype(jnp.float32)
        return self._replace(rows=rows)


class Form(NamedTuple):
    """Other forms of an array; None is none."""

    pending: Pending | None = None
    gated: jax.Array | None = None  # [M, N / 2]
    wide: jax.Array | None = None


class Forms:
    """The forms of arrays, which are told apart by being the same object."""

    def __init__(self, gate: str | None = None):
        self.gate = gate
        # The array is kept too, since another one might get the id of one that is gone.
        self._noted: dict[int, tuple[Any, Form]] = {}

    def of(self, x: Any) -> Form:
        return self._noted[id(x)][1] if id(x) in self._noted else Form()

    def note(self, x: Any, form: Form) -> None:
        self._noted[id(x)] = x, form


_forms: contextvars.ContextVar[Forms | None] = contextvars.ContextVar(
    "forms", default=None
)


@contextlib.contextmanager
def collect(gate: str | None = None) -> Iterator[Forms]:
    """Collects the forms of all arrays that are made inside.

    Args:
        gate: by which the columns of the matmuls inside gate each other, a name in
            `gates.GATES`.
    """
    forms = Forms(gate)
    token = _forms.set(forms)
    try:
        yield forms
    finally:
        _forms.reset(token)


def is_wanted() -> bool:
    return _forms.get() is not None


def gate_wanted() -> str | None:
    """Returns the name of the gate that follows the matmul, if one does."""
    forms = _forms.get()
    return None if forms is None else forms.gate


def note(x: jax.Array, **forms: Any) -> None:
    """Notes other forms of an array, by the names of `Form`."""
    collected = _forms.get()
    if collected is not None:
        collected.note(x, Form(**forms))


def form_of(x: jax.Array) -> Form:
    """Returns what was noted of an array."""
    forms = _forms.get()
    return Form() if forms is None else forms.of(x)
