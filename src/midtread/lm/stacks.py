"""Stacks: weights and moments of all layers in one array, or each layer's in its own.

A model has its layers stacked, and so have checkpoints. Where all layers are compiled one by
one (`scan_unroll`), a run keeps slices of these stacks in their place (optim/slices.py), so
that nothing is copied out of stacks or into them: `apart` makes slices, and `together` stacks.
"""

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from midtread.lm.config import Model, Training
from midtread.lm.model import abstract, is_unrolled
from midtread.lm.optimizer import optimizer
from midtread.optim import slices


def why_stacked(
    m: Model,
    t: Training,
    *,
    is_pruned: bool = False,
    is_on_mesh: bool = False,
    room: int | None = None,
    state: Any = None,
) -> str | None:
    """Returns why stacked weights are kept as stacks, or None if they are kept as slices.

    Args:
        room: the bytes of a device; None if it does not say.
        state: what is to be kept there.
    """
    if not is_unrolled(m):
        return "not all layers are compiled one by one (scan_unroll)"
    if is_on_mesh:
        return "a mesh cuts stacks"
    if t.opt_type == "adafactor":
        return "adafactor looks at all layers of a weight at once"
    if is_pruned:
        return "masks of pruned weights are stacks"
    if t.optimizer_states != "float32" and _has_tiles_of_layers(m, t):
        return "layers share the scales of a moment, as no other axis has tiles"
    needed = 2 * sum(x.nbytes for x in jax.tree.leaves(state)) if state else 0
    if room is not None and needed > room:
        return "a checkpoint needs them stacked, and there is no room for both"
    return None


def _has_tiles_of_layers(m: Model, t: Training) -> bool:
    """Returns whether some moment has tiles along the axis of layers."""
    params = nnx.state(abstract(m), nnx.Param)
    kept = jax.eval_shape(optimizer(t).init, params)
    stacked = filter(_is_stack, jax.tree.leaves(kept, is_leaf=_is_variable))
    return any(len({x.shape[0] for x in jax.tree.leaves(var)}) > 1 for var in stacked)


def describe(m: Model, t: Training, *, is_pruned: bool, is_on_mesh: bool) -> str:
    """Says how a training run keeps the weights of its layers, in a line for `explain`."""
    if not m.scan_layers:
        return "layers: a list of modules, each with weights of its own"
    why = why_stacked(m, t, is_pruned=is_pruned, is_on_mesh=is_on_mesh)
    apart = "each one's weights and moments are arrays of their own while a run lasts"
    return f"layers: {apart if why is None else f'stacked, since {why}'}"


def use_up(stacked: Any) -> slices.Slices:
    """Returns the slices of arrays, which are deleted."""
    cut = jax.block_until_ready(slices.cut(stacked))
    for array in jax.tree.leaves(stacked):
        array.delete()
    return cut


def apart(state: Any, cut: Callable[[Any], slices.Slices] = use_up) -> Any:
    """Returns the state with slices in the place of stacked weights and moments, which are
    cut one after the other."""

    def one(var):
        return var.replace(cut(var.get_raw_value())) if _is_stack(var) else var

    each = lambda tree: jax.tree.map(one, tree, is_leaf=_is_variable)
    return state._replace(learned=each(state.learned), optimizer=each(state.optimizer))


def together(tree: Any) -> Any:
    """Returns a tree, a state or a part of it, with stacks in the place of slices."""

    def one(var):
        value = var.get_raw_value() if _is_variable(var) else None
        return var.replace(slices.stack(value)) if _is_cut(value) else var

    return jax.tree.map(one, tree, is_leaf=_is_variable)


def _is_variable(x: Any) -> bool:
    return isinstance(x, nnx.Variable)


def _is_cut(value: Any) -> bool:
    return isinstance(value, slices.Slices)


def _is_stack(var: Any) -> bool:
    names = var.get_metadata().get("out_sharding") if _is_variable(var) else None
    return bool(names and names[0] == "layers" and jax.tree.leaves(var))
