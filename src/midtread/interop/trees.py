"""Trees: named entries in what users hold, and the way back.

A Linen variable dict, an NNX model or any pytree is opened into entries by name: arrays,
QArrays, and boxes (`WithAux`). Names are paths joined by slashes. Metadata around the arrays
(nn.Partitioned, nnx.Variable) is no part of an entry; `rebuild` puts new arrays into the
same boxes, so that a tree comes back as it was.

    open_tree(tree)            -> Tree: entries, and how to put others in their place
    parts(entry)               the arrays of an entry
    fill(file, arrays, tree)   float arrays of any writer, in a tree that trains on them
"""

import dataclasses
import difflib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx

from midtread.model import flaxlib
from midtread.model.boxes import WithAux
from midtread.numerics.qarray import QArray

PARTS = ("qvalue", "scale", "zero_point", "global_scale", "pre_scale", "pre_rotation")


@dataclasses.dataclass(frozen=True)
class Tree:
    """Entries by name, and how to put others in their place.

    Args:
        entries: arrays (or shapes), QArrays and WithAux, without variables around them.
        rebuild: a tree of the same kind from {name of entry: {part: array}}.
        optional: names of quantization state that a float checkpoint does not have.
    """

    entries: dict[str, Any]
    rebuild: Callable[[dict[str, dict[str, Any]]], Any]
    optional: frozenset[str] = frozenset()


_STATE = ("quant_stats", "_overwrite_with_gradient")  # collections, and names of types


def open_tree(tree: Any) -> Tree:
    """Returns the entries of a Linen variable dict, an NNX model or another pytree."""
    if isinstance(tree, nn.Module):
        raise TypeError(
            "a Linen module holds no arrays: pass its variables, or for a target what "
            "jax.eval_shape(model.init, key, x) gives."
        )
    if isinstance(tree, nnx.State):
        raise TypeError(
            "an nnx.State does not know the formats of its arrays: pass the model itself."
        )
    return _open_nnx(tree) if isinstance(tree, nnx.Module) else _open_pytree(tree)


def _is_entry(x: Any) -> bool:
    return isinstance(x, QArray | WithAux)


def _open_pytree(tree: Any) -> Tree:
    is_box = lambda x: isinstance(x, nn.meta.AxisMetadata)
    boxed, structure = jax.tree.flatten(tree, is_leaf=is_box)
    plain = flaxlib.unbox(tree)
    entries = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(plain, is_leaf=_is_entry):
        _put(entries, [_key(k) for k in path], leaf)
    order = []  # of the arrays, as in `boxed`
    for name, entry in entries.items():
        order += [(name, part) for part in parts(entry)]
    if len(order) != len(boxed):
        raise TypeError("a box around a whole QArray cannot be saved: box its arrays.")

    def rebuild(arrays):
        new = [arrays[name][part] for name, part in order]
        new = [b.replace_boxed(v) if is_box(b) else v for b, v in zip(boxed, new)]
        return jax.tree.unflatten(structure, new)

    optional = frozenset(n for n in entries if n.split("/")[0] in _STATE)
    return Tree(entries, rebuild, optional)


def _key(key: Any) -> str:
    for field in ("key", "idx", "name"):
        if hasattr(key, field):
            return str(getattr(key, field))
    raise TypeError(f"a pytree with keys like {key!r} cannot be saved.")


def _put(entries: dict, path: Sequence[Any], leaf: Any) -> None:
    name = "/".join(map(str, path))
    if any("/" in str(p) or not str(p) for p in path) or name in entries:
        raise ValueError(
            f"{name!r}: a key of this tree is empty, has a slash in it, or leads to the "
            "same name as another. Rename it."
        )
    entries[name] = leaf


def _open_nnx(model: nnx.Module) -> Tree:
    graph, state = nnx.split(model)
    boxes = {p: n for p, n in nnx.iter_graph(model) if isinstance(n, WithAux)}
    flat = nnx.to_flat_state(state)
    entries, places, optional = {}, [], set()
    for path, box in boxes.items():
        _put(entries, path, flaxlib.unbox(box))
    for path, variable in flat:
        box = next((p for p in boxes if path[: len(p)] == p), None)
        if box is not None:
            part = path[-1] if path[-1] in PARTS else ""
            places.append((path, [("/".join(map(str, box)), part)], None))
            continue
        if isinstance(variable, nnx.RngState):  # a key is made, not stored
            places.append((path, None, None))
            continue
        value = flaxlib.unbox(variable)
        names = []
        leaves = jax.tree_util.tree_leaves_with_path(value, is_leaf=_is_entry)
        for inner, leaf in leaves:
            full = [*path, *(_key(k) for k in inner)]
            _put(entries, full, leaf)
            names += [("/".join(map(str, full)), part) for part in parts(leaf)]
        places.append((path, names, jax.tree.structure(value)))
        kinds = [c.__name__ for c in type(variable).__mro__]
        if "QuantStat" in kinds or "OverwriteWithGradient" in kinds:
            optional |= {name for name, _ in names}

    def rebuild(arrays):
        new = []
        for (path, names, structure), (_, variable) in zip(places, flat):
            if names is not None:
                parts = [arrays[name][part] for name, part in names]
                value = (
                    parts[0]
                    if structure is None
                    else jax.tree.unflatten(structure, parts)
                )
                variable = variable.replace(value)
            new.append((path, variable))
        return nnx.merge(graph, nnx.from_flat_state(new), copy=True)

    return Tree(entries, rebuild, frozenset(optional))


def parts(entry: Any) -> dict[str, Any]:
    """Returns the arrays of an entry by part; '' for one that is an array itself."""
    inner = entry.array if isinstance(entry, WithAux) else entry
    if not isinstance(inner, QArray):
        return {"": inner}
    return {p: getattr(inner, p) for p in PARTS if getattr(inner, p) is not None}


def nest(entries: Mapping[str, Any]) -> dict[str, Any]:
    """Returns nested dicts from names with slashes."""
    tree: dict[str, Any] = {}
    for name, entry in entries.items():
        *path, last = name.split("/")
        inner = tree
        for key in path:
            inner = inner.setdefault(key, {})
        inner[last] = entry
    return tree


def place(array: Any, like: Any) -> jax.Array:
    """Returns an array on the devices where the target has it."""
    return jax.device_put(array, sharding_of(like))


def sharding_of(like: Any) -> jax.sharding.Sharding | None:
    """Returns where the target has an array; None where it does not say."""
    sharding = getattr(like, "sharding", None)
    return sharding if isinstance(sharding, jax.sharding.Sharding) else None


def fill(file: str, arrays: Mapping[str, Any], target: Tree) -> Any:
    """Returns a tree of float arrays, as any writer names them, in a target that trains on them.

    Names may be joined by dots or slashes, and end in 'value' as nnx.State's do. State that
    only quantization has stays as the target has it, or begins as a new model's does.
    """
    stored = {}
    for name, array in arrays.items():
        path = name.replace(".", "/").split("/")
        stored["/".join(path[:-1] if path[-1] == "value" else path)] = array
    if not stored.keys() & target.entries.keys() and all(
        n.startswith("params/") for n in target.entries if n not in target.optional
    ):
        stored = {f"params/{k}": v for k, v in stored.items()}  # params saved alone
    new: dict[str, dict[str, Any]] = {}
    for name, entry in target.entries.items():
        if _is_entry(entry):
            raise ValueError(
                f"{file} is a float checkpoint, but {name!r} is quantized in the target. "
                "Load it into the float model, then use quantize_params or quantize_model."
            )
        if name not in stored and name in target.optional:
            # scales of delayed fp8 begin at 1, all else at 0
            first = jnp.full(entry.shape, name.endswith("_scale"), entry.dtype)
            value = entry if isinstance(entry, jax.Array) else first
        elif name not in stored:
            raise ValueError(
                f"{file} has no tensor {name!r}, which the target has. {near(name, stored)}"
            )
        else:
            value = _same(file, name, stored.pop(name), entry)
        new[name] = {"": value}
    if stored:
        extra = min(stored)
        raise ValueError(
            f"{file} holds tensor {extra!r}, which the target does not have. "
            f"{near(extra, target.entries)}"
        )
    return target.rebuild(new)


def _same(file: str, name: str, array: Any, like: Any) -> jax.Array:
    if tuple(array.shape) != tuple(like.shape) or array.dtype != like.dtype:
        raise ValueError(
            f"{file}: tensor {name!r} is {array.dtype}{list(array.shape)}, but the target "
            f"has {like.dtype}{list(like.shape)}."
        )
    return place(array, like)


def near(name: str, names: Mapping[str, Any]) -> str:
    near = difflib.get_close_matches(name, list(names), 3, 0.3)
    return f"Names near it: {near}."
