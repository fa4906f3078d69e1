"""Caught: the functions of JAX and Flax that reach providers while a quantized model runs.

    OPS       one row each: where it is kept, and what kind of function it is
    COPIES    functions that copy or cast an array
    VIEWS     functions that take parts of an array, or lay it out otherwise

Those of the first table are caught in intercept.py, those of the others in eager.py. Providers
for fixed-point files see every op (everyop.py).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax


class Op(NamedTuple):
    """A function that reaches providers while a model runs."""

    path: str  # where JAX or Flax keeps it
    kind: str
    # For another spelling of a matmul: from the two ranks to dot_general's dimension numbers.
    numbers: Callable[[int, int], Any] | None = None


CONTRACTION = "a contraction: providers handle it under its own name"
SPELLING = "another spelling of a matmul: it becomes a dot_general"
BEHIND_JIT = "the same behind a jit, which is left out while a model runs"
LOOK_UP = "takes rows of a table"
CAST = "by which a layer casts a parameter before it multiplies"
PARAM = "by which a layer asks for a parameter"
RULE = "by which a kernel asks for its rule"

_ROWS_BY_COLUMNS = lambda a, b: (((a - 1,), (max(b - 2, 0),)), ((), ()))
# The keys are the names under which providers handle these functions.
OPS = {
    "dot_general": Op("jax.lax.dot_general", CONTRACTION),
    "einsum": Op("jax.numpy.einsum", CONTRACTION),
    "conv_general_dilated": Op("jax.lax.conv_general_dilated", CONTRACTION),
    "ragged_dot": Op("jax.lax.ragged_dot", CONTRACTION),
    "ragged_dot_general": Op("jax.lax.ragged_dot_general", CONTRACTION),
    "lax_dot": Op("jax.lax.dot", SPELLING, lambda a, b: (((a - 1,), (0,)), ((), ()))),
    "tensordot": Op("jax.numpy.tensordot", SPELLING),
    "dot": Op("jax.numpy.dot", BEHIND_JIT, _ROWS_BY_COLUMNS),
    "matmul": Op("jax.numpy.matmul", BEHIND_JIT, _ROWS_BY_COLUMNS),
    "inner": Op("jax.numpy.inner", BEHIND_JIT, lambda a, b: (((a - 1,), (b - 1,)), ((), ()))),
    "vdot": Op("jax.numpy.vdot", BEHIND_JIT),
    "vecdot": Op("jax.numpy.vecdot", BEHIND_JIT),
    "convolve": Op("jax.numpy.convolve", BEHIND_JIT),
    "take": Op("jax.numpy.take", LOOK_UP),
    "asarray": Op("jax.numpy.asarray", CAST),
    "promote_dtype": Op("flax.linen.dtypes.promote_dtype", CAST),
    "promote_dtype_nnx": Op("flax.nnx.nn.dtypes.promote_dtype", CAST),
    "param": Op("flax.linen.Module.param", PARAM),
    "current_rule": Op("qwix._src.qconfig.get_current_rule", RULE),
}  # fmt: skip


def of_kind(*kinds: str) -> tuple[str, ...]:
    """Returns the names of the ops of these kinds."""
    return tuple(name for name, op in OPS.items() if op.kind in kinds)


CONTRACTIONS = of_kind(CONTRACTION)
JITTED = of_kind(BEHIND_JIT)

# Functions that move an array's values and compute nothing: a box goes through them.
COPIES = ((jnp, "astype"), (jnp, "copy"), (jnp, "array"), (lax, "convert_element_type"))

# Functions that take parts of an array, or lay it out otherwise: codes may follow them.
VIEWS = {
    jnp: """split array_split hsplit vsplit dsplit unstack repeat flip flipud fliplr
        negative squeeze expand_dims broadcast_to""",
    lax: """slice slice_in_dim index_in_dim dynamic_slice dynamic_slice_in_dim split
        dynamic_index_in_dim squeeze expand_dims rev neg broadcast_in_dim""",
}
