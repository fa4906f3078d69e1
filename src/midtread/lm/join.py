"""Join: weights that multiply the same rows become one weight, for a model that decodes.

    q, k, v  = x @ query, x @ key, x @ value     three matmuls, each a kernel to start
    q, k, v  = split(x @ [query | key | value])  one

A step of one token starts some hundreds of kernels, each of which takes a few microseconds
whatever it does, so fewer and wider matmuls are faster: query, key and value, and the two
sides of a gated MLP. Columns are computed as they were, by the same codes and scales. Those of an
MLP lie woven (kernels/gates.py) where Hopper's kernel for few rows may gate them itself.

The joined weight lies in the first module of its row, and so does the rule that it runs under.
Modules stay apart where that would change what is computed: other rules, formats, groups or
scales, adapters or statistics of their own.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from midtread.kernels.environment import here
from midtread.kernels.gates import GATES, STRIP, woven
from midtread.lm.layers import Linear
from midtread.model import flaxlib
from midtread.numerics.formats import dtype_bits
from midtread.numerics.rounding import unpacked

# Attributes of a module that multiply the same rows.
TOGETHER = (("query", "key", "value"), ("wi_0", "wi_1"))


def join(model: nnx.Module) -> nnx.Module:
    """Joins the weights of every layer that can be; the model itself is changed.

    Args:
        model: with layers that are not stacked (`decode.unstack`), on one device.

    Returns:
        The model.
    """
    provider = flaxlib.provider_of(model)
    for _, module in list(nnx.iter_modules(model)):
        for names in TOGETHER:
            row = [getattr(module, name, None) for name in names]
            if all(isinstance(x, Linear) for x in row) and _share_a_rule(provider, row):
                _join(row, getattr(module, "activation", None))
    return model


def _share_a_rule(provider: Any, row: Sequence[Linear]) -> bool:
    if provider is None:
        return True
    return len({provider.rule_at(flaxlib.path_of(x), "dot_general") for x in row}) == 1


def _join(row: Sequence[Linear], activation: str | None) -> None:
    first, *others = row
    names = ("kernel", "bias") if first.has_bias else ("kernel",)
    if any(_parameters(x) != set(names) for x in row):
        return
    values = {name: [flaxlib.unbox(getattr(x, name)) for x in row] for name in names}
    if not all(map(_fit, values.values())):
        return
    is_variable = lambda x: isinstance(x, nnx.Variable)
    first.is_woven = activation is not None and _can_weave(row, values["kernel"], activation)  # fmt: skip
    for name, parts in values.items():
        beside = woven if first.is_woven else lambda *xs: jnp.concatenate(xs, -1)
        joined = jax.tree.map(functools.partial(_laid, beside), *parts)
        box = getattr(first, name)
        setattr(
            first, name, jax.tree.map(flaxlib.like, box, joined, is_leaf=is_variable)
        )
    first.widths = tuple(x.shape[-1] for x in values["kernel"])
    for other in others:
        for name in names:
            delattr(other, name)


def _laid(lay: Callable[..., jax.Array], *parts: jax.Array) -> jax.Array:
    """Returns lay(*parts); codes of 2 bits are bytes on the way, since XLA ends the process where
    it is to concatenate them on a CPU (jaxlib 0.10.2)."""
    dtype = parts[0].dtype
    if dtype_bits(dtype) >= 4:
        return lay(*parts)
    is_signed = jnp.issubdtype(dtype, jnp.signedinteger)
    kind = jnp.int8 if is_signed else jnp.uint8
    return lay(*(unpacked(x).astype(kind) for x in parts)).astype(dtype)


def _can_weave(row: Sequence[Linear], weights: Sequence[Any], activation: str) -> bool:
    """Whether a kernel may gate the columns of these weights, which are codes then."""
    is_codes = len(jax.tree.leaves(weights[0])) > 1
    is_whole = {x.shape[-1] % STRIP for x in weights} == {0}
    has_code = GATES[activation].code is not None and not row[0].has_bias
    return is_codes and is_whole and has_code and here().why_not("hopper") is None


def _parameters(linear: Linear) -> set[str]:
    """Returns the names of all variables of a module, statistics among them."""
    state = nnx.state(linear, nnx.Not(nnx.RngState))
    return {str(path[0]) for path, _ in nnx.to_flat_state(state)}


def _fit(parts: Sequence[Any]) -> bool:
    """Whether arrays or codes can stand side by side, with everything that belongs to a
    column beside it."""
    if len({jax.tree.structure(x) for x in parts}) > 1:  # formats and Specs too
        return False
    for leaves in zip(*map(jax.tree.leaves, parts)):
        if len({(x.dtype, x.shape[:-1]) for x in leaves}) > 1:
            return False
        if any(x.shape[-1:] != part.shape[-1:] for x, part in zip(leaves, parts)):
            return False
        if any(len(x.devices()) > 1 for x in leaves if isinstance(x, jax.Array)):
            return False
    return True
