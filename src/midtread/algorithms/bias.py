"""Bias: the mean error of a layer's output, made up for by the bias that is there anyway.

Codes Q in place of W move the output for input x by x (Q - W). The mean of that over the data
is a number per output, and a bias can take it back (Nagel et al. 2019, section 4.2):

    bias + E[x] (W - Q)

Which parameter is a layer's bias is read off the traced program: what is added to the
contraction's output, is a parameter, and is used nowhere else.
"""

from typing import Any

import jax
import jax.numpy as jnp

from midtread.algorithms.flow import Flow
from midtread.algorithms.program import ONE_TO_ONE, Program, is_literal, origin
from midtread.algorithms.weight import MATRIX, Axes, as_matrices
from midtread.numerics.qarray import QArray, dequantize


def shift(w: jax.Array, q: QArray, mean: jax.Array, axes: Axes = MATRIX) -> jax.Array:
    """What a layer's bias should grow by, one number per output.

    >>> from midtread.numerics.qarray import quantize
    >>> w = jnp.array([[1.0], [0.4]])
    >>> q = quantize(w, "int4", channelwise_axes=[1])
    >>> shift(w, q, jnp.array([[1.0, 2.0]])).shape
    (1,)

    Args:
        w: the float weight.
        q: its codes.
        mean: [E, K], the mean of every input.
        axes: which axes of `w` are summed, kept and batched.
    """
    error = w.astype(jnp.float32) - dequantize(q, jnp.float32).reshape(w.shape)
    return jnp.einsum("ek,ekn->en", mean, as_matrices(error, axes)).reshape(-1)


def find(program: Program, number: int) -> tuple[tuple, tuple] | None:
    """(path, layer) of the bias of a site, None if there is none that may be changed.

    It is one number per output of a contraction with one axis of outputs, and its own.
    """
    axes, shape = program.sites[number].axes, program.sites[number].stored_shape
    if axes.batch or len(axes.kept) != 1:
        return None
    users: dict[Any, list[Any]] = {}
    for eqn in program.eqns:
        for v in eqn.invars:
            if not is_literal(v):
                users.setdefault(v, []).append(eqn)
    variable = program.eqns[program.marks[number]["output"]].outvars[0]
    while len(after := users.get(variable, [])) == 1:
        (eqn,) = after
        if eqn.primitive.name == "add":
            break
        if eqn.primitive.name not in ONE_TO_ONE:
            return None
        variable = eqn.outvars[0]
    else:
        return None
    made_by = {v: e for e in program.eqns for v in e.outvars}
    (other,) = [v for v in eqn.invars if v is not variable] or [None]
    if other is None or is_literal(other):
        return None
    source = origin(other, made_by, program.params, (*ONE_TO_ONE, "broadcast_in_dim"))
    if source is None:
        return None
    path, layer = source
    whole = program.params[path]
    outputs = shape[axes.kept[0]]
    is_own = Flow(program).is_own(path, layer)
    return source if is_own and whole.aval.shape[len(layer) :] == (outputs,) else None
