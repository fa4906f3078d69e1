"""Flaxlib: Linen and NNX behind the same few functions.

    path_of(module)          its path, "encoder/layers/0"; "" for the root
    params_of(module)        {name: array or boxed array} of the module itself
    variable(...)            a variable of the module, made if it is not there
    can_update(module)       whether statistics may be written now
    make_rng(module, name)   a key of a random stream

Which of the two libraries a module is of matters here and in adopt.py, and nowhere else.
"""

import dataclasses
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import flax
import jax
import numpy as np
from flax import linen as nn
from flax import nnx

from midtread.model import running
from midtread.model.running import path_of
from midtread.numerics.qarray import QArray

nnx.register_data_type(QArray)

RNGS = "qwix_rngs"  # where users put nnx.Rngs for stochastic rounding and dropout


class QuantStat(nnx.Variable):
    """The variable of an NNX model that holds statistics for static ranges.

    Its value is a running sum and a count of the batches seen. In Linen the same lies in the
    collection 'quant_stats'.
    """


try:
    nnx.register_variable_name("quant_stats", QuantStat)
except ValueError:  # Qwix, imported beside us, has taken the name
    pass


_VARIABLES = {"quant_stats": QuantStat, "params": nnx.Param}


def unbox(x: Any) -> Any:
    """Takes an array out of metadata boxes and variables, without applying constraints."""
    sort = _sorts[type(x)]
    if sort == "array":
        return x
    if sort == "tracer":
        is_box = type(x.aval) is not jax.core.ShapedArray and _is_box(x)
        return unbox(x.get_raw_value()) if is_box else x
    if sort in ("param", "variable"):
        return unbox(x.get_raw_value())
    if sort == "partitioned":
        return unbox(x.unbox(apply_constraint=False))
    if sort == "metadata":
        return unbox(x.unbox())
    if sort == "codes":  # whose parts are boxed alike
        return x.map(unbox) if _is_box(x.qvalue) or _is_box(x.scale) else x
    leaves, tree = jax.tree.flatten(x, is_leaf=_is_box)
    if not any(map(_is_box, leaves)):
        return x
    return jax.tree.unflatten(tree, map(unbox, leaves))


def _is_box(x: Any) -> bool:
    sort = _sorts[type(x)]
    if sort == "tracer":
        return _is_traced(x, nnx.Variable)
    return sort in ("param", "variable", "partitioned", "metadata")


def _is_traced(x: jax.core.Tracer, kind: type) -> bool:
    """Whether a tracer stands for a variable of Flax's."""
    return type(x.aval) is not jax.core.ShapedArray and isinstance(x, kind)


class _Sorts(dict):
    """Says what sort of thing instances of a class are: the first of these, or "node", which may
    hold modules. It is kept by class, for to ask `isinstance(x, nnx.Variable)` is slow, and
    tracing a model asks for every attribute of every module."""

    BASES = (
        ("tracer", jax.core.Tracer),
        ("param", nnx.Param),
        ("variable", nnx.Variable),
        ("array", jax.Array),
        ("partitioned", nn.Partitioned),
        ("metadata", nn.meta.AxisMetadata),
        ("codes", QArray),
        ("plain", (np.dtype, str, int, float, type, type(None), types.FunctionType)),
    )

    def __missing__(self, kind: type) -> str:
        sorts = (name for name, base in self.BASES if issubclass(kind, base))
        self[kind] = next(sorts, "node")
        return self[kind]


_sorts = _Sorts()


def value_at(obj: Any, path: tuple) -> Any:
    """Returns what is at a path of a tree or a model, None for nothing."""
    for key in path:
        if obj is None:
            return None
        if isinstance(obj, Mapping):
            obj = obj.get(key)
        elif isinstance(obj, list | tuple | nnx.List) and isinstance(key, int):
            obj = obj[key] if 0 <= key < len(obj) else None
        else:
            obj = getattr(obj, key, None)
    return obj


def params_of(module: Any) -> dict[str, Any]:
    """Returns {name: array or boxed array} of the module's own parameters."""
    if isinstance(module, nn.Module):
        if module.scope is None or "params" not in module.variables:
            return {}
        return {k: unbox(v) for k, v in module.variables["params"].items()}
    if hasattr(module, "_params_here"):  # a plain function's scope
        return module._params_here
    return {
        name: unbox(value)
        for name, value in vars(module).items()
        if (sort := _sorts[type(value)]) == "param"
        or (sort == "tracer" and _is_traced(value, nnx.Param))
    }


def params_in_containers(module: nnx.Module) -> dict[str, Any]:
    """Returns {"experts/0": array} of the parameters in dicts, lists and tuples of Python's that
    a module holds."""
    is_leaf = lambda x: isinstance(x, nnx.Variable | nnx.Pytree)
    out = {}
    for name, value in vars(module).items():
        if type(value) not in (dict, list, tuple):
            continue
        for path, leaf in jax.tree_util.tree_leaves_with_path(value, is_leaf=is_leaf):
            if isinstance(leaf, nnx.Param):
                inner = jax.tree_util.keystr(path, simple=True, separator="/")
                out[f"{name}/{inner}"] = unbox(leaf)
    return out


def all_params(model: Any) -> list[tuple[tuple, Any]]:
    """Returns (path, array) of every parameter that a model has now."""
    if isinstance(model, nn.Module):
        tree = flax.core.unfreeze(model.variables.get("params", {}))
        flat = flax.traverse_util.flatten_dict(unbox(tree))
        return [(path, v) for path, v in flat.items() if hasattr(v, "dtype")]
    if not isinstance(model, nnx.Module):
        return []
    return [
        ((*path, name), value)
        for path, module in nnx.iter_modules(model)
        for name, value in params_of(module).items()
        if hasattr(value, "dtype")
    ]


def modules_in(model: nnx.Module) -> Iterator[nnx.Module]:
    """Yields an NNX module and all modules inside it, each once. It does what
    `nnx.iter_modules` does without telling paths, in a tenth of the time: tracing a model
    asks for them."""
    seen, waiting = set(), [model]
    while waiting:
        node = waiting.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        if not isinstance(node, nnx.Pytree):
            inside = jax.tree.leaves(node, is_leaf=lambda x: isinstance(x, nnx.Pytree))
            waiting += [x for x in inside if isinstance(x, nnx.Pytree)]
            continue
        if isinstance(node, nnx.Module):
            yield node
        waiting += [
            value
            for name, value in vars(node).items()
            if _sorts[type(value)] == "node" and not name.startswith("_pytree__")
        ]


def read(var: Any) -> Any:
    """Returns the value of a Linen or NNX variable."""
    return var.get_value() if isinstance(var, nnx.Variable) else var.value


def write(var: Any, value: Any) -> None:
    """Sets the value of a Linen or NNX variable."""
    if isinstance(var, nnx.Variable):
        var.set_value(value)
    else:
        var.value = value


def like(box: Any, value: Any, axes: Any = None) -> Any:
    """Puts `value` in the same kind of box as `box`, with sharding names where extents allow.

    Args:
        axes: for each axis of `value` the axis of `box` whose name it takes, or None for no
            name; or a function of the names. If it is not given, names stay in order.
    """
    was = getattr(unbox(box), "shape", ())
    if isinstance(box, nn.meta.AxisMetadata):
        box = box.replace_boxed(value)
        for field in ("names", "mesh_axes"):
            names = getattr(box, field, None)
            if isinstance(names, tuple | list | jax.sharding.PartitionSpec):
                box = dataclasses.replace(
                    box, **{field: _names(names, value.shape, axes, was)}
                )
        return box
    if isinstance(box, nnx.Variable):
        box = box.replace(value)
        metadata = box.get_metadata()
        field = "out_sharding" if "out_sharding" in metadata else "sharding_names"
        names = metadata.get(field)
        if isinstance(names, tuple | list | jax.sharding.PartitionSpec):
            box.set_metadata(field, _names(names, value.shape, axes, was))
        return box
    return value


def _names(names: Any, shape: tuple[int, ...], axes: Any, was: tuple[int, ...]) -> Any:
    """Returns names for an array of `shape`. An axis that shrank to 1 cannot be sharded."""
    if callable(axes):
        return axes(names)
    is_spec = isinstance(names, jax.sharding.PartitionSpec)
    if axes is not None:
        known = dict(enumerate(names))  # there may be fewer names than axes
        names = tuple(known.get(a) for a in axes)
    before = was if axes is None else [dict(enumerate(was)).get(a) for a in axes]
    before = (*before, *[None] * (len(shape) - len(before)))
    kept = tuple(
        None if n == 1 and b != 1 else name for n, b, name in zip(shape, before, names)
    )
    return jax.sharding.PartitionSpec(*kept) if is_spec else kept


def variable(module: Any, collection: str, name: str, init: Callable[[], Any]) -> Any:
    """Returns a variable to `read` and `write`, made if it is not there. Its shape must be
    what `init` would give."""
    module, name = _keeper(module, name)
    if isinstance(module, nn.Module):
        try:
            var = module.scope.variable(collection, name, init)
        except (
            flax.errors.ScopeCollectionNotFound,
            flax.errors.ScopeVariableNotFoundError,
        ):
            raise ValueError(
                f"{path_of(module)!r}: the variables have no {name!r} in {collection!r}. Give "
                f"`apply` what `init` of this model makes, {{'params': ..., {collection!r}: "
                f"...}}, or mutable=[{collection!r}] to gather it now. Layers under nn.scan or "
                f"nn.vmap have it only with variable_axes={{..., {collection!r}: 0}}."
            ) from None
    elif hasattr(module, name):
        var = getattr(module, name)
    else:
        kind = _VARIABLES.get(collection) or nnx.variable_type_from_name(collection)
        var = kind(init())
        add(module, name, var)
    stored = _shapes(lambda: flax.core.unfreeze(read(var)))
    if stored != _shapes(init):
        raise ValueError(
            f"{path_of(module)!r}: {name} was gathered with shapes {stored}, but this call "
            f"has {_shapes(init)}. Name the axes that vary in act_batch_axes."
        )
    return var


def _keeper(module: Any, name: str) -> tuple[Any, str]:
    """Returns the module that keeps a variable of ours, and the name there: for a Linen module
    inside an NNX model the bridge, because Linen is given its own variables alone."""
    bridge = running.bridge() if isinstance(module, nn.Module) else None
    return (
        (module, name) if bridge is None else (bridge, "_".join((*module.path, name)))
    )


def _shapes(make: Callable[[], Any]) -> Any:
    return jax.tree.map(lambda a: a.shape, jax.eval_shape(lambda: unbox(make())))


def take_variable(module: Any, collection: str, name: str) -> Any:
    """Takes a variable out of the module and returns its value, None if there is none."""
    if isinstance(module, nn.Module):
        if not module.has_variable(collection, name):
            return None
        # This is private: Linen offers no public way to remove a variable.
        return module.scope._mutable_collection(collection).pop(name)
    value = getattr(module, name, None)
    if value is not None:
        delattr(module, name)
    return value


def param(
    module: Any, name: str, init: Callable[[], Any], kind: type = nnx.Param
) -> Any:
    """Returns a parameter of the module, made if it is not there."""
    module, name = _keeper(module, name)
    if isinstance(module, nn.Module):
        try:
            return module.scope.param(name, lambda _: init())
        except flax.errors.ScopeParamNotFoundError:
            raise ValueError(
                f"{path_of(module)!r}: the parameters lack {name!r}, which this provider "
                "adds: take them from `init` of this model, or from mt.quantize_variables "
                "(with the float model's quant_stats, for static scales)."
            ) from None
    if not hasattr(module, name):
        add(module, name, jax.tree.map(kind, init()))
    return getattr(module, name)


def add(module: nnx.Module, name: str, value: Any) -> None:
    """Adds an attribute to an NNX module, for what a provider keeps beside a weight."""
    try:
        setattr(module, name, value)
    except flax.errors.TraceContextError:
        raise ValueError(
            f"{path_of(module)!r}: {name} is to be kept beside a weight that is multiplied by "
            "inside a jax.jit (or vmap, scan or checkpoint) of the model's own, where a "
            "module cannot change. Use nnx.jit and its like there, and pass the module, or "
            "leave the layer out with a rule before: mt.QtRule(module_path=...)."
        ) from None


def check_shapes(module: Any, name: str, init: Callable[[], Any]) -> None:
    """Refuses a parameter whose shapes are not those that `init` would give."""
    stored, fresh = _shapes(lambda: getattr(module, name)), _shapes(init)
    if stored != fresh:
        raise ValueError(
            f"{path_of(module)!r}: {name} has shapes {stored}, but {fresh} are asked for."
        )


def replace_param(module: Any, name: str, tree: Any) -> None:
    """Replaces a parameter by a tree, each leaf in the parameter's kind of box."""
    if isinstance(module, nn.Module):
        box = module.get_variable("params", name)
        module.put_variable("params", name, jax.tree.map(lambda v: like(box, v), tree))
    else:
        box = getattr(module, name)
        setattr(module, name, jax.tree.map(lambda v: like(box, v), tree))


def set_on_all(model: nnx.Module, **attributes: Any) -> None:
    """Sets attributes on a module and all modules inside it."""
    for _, module in nnx.iter_modules(model):
        for name, value in attributes.items():
            if value is not None or name in vars(module):  # the class has None already
                _set_data(module, name, value)


def _set_data(module: nnx.Module, name: str, value: Any) -> None:
    """Sets an attribute of a module, unless it only wraps a Linen module's variables."""
    if not isinstance(module, nnx.bridge.ToNNX):
        setattr(module, name, nnx.data(value))


def can_update(module: Any) -> bool:
    """Whether statistics may be written now."""
    module, _ = _keeper(module, "")
    if isinstance(module, nn.Module):
        if module.is_initializing():
            return False
        return module.is_mutable_collection("quant_stats")
    return not getattr(module, "disable_quant_stats_update", False)


def make_rng(module: Any, name: str) -> jax.Array:
    """Returns a key of the random stream `name`."""
    if isinstance(module, nn.Module) or hasattr(module, "_params_here"):
        return module.make_rng(name)
    rngs = getattr(module, RNGS, None)
    if not isinstance(rngs, nnx.Rngs):
        raise ValueError(  # noqa: TRY004
            f"no random stream {name!r}: set one with "
            f"model.set_attributes({RNGS}=nnx.Rngs({name}=0))."
        )
    if name not in rngs and "default" not in rngs:
        raise ValueError(
            f"rngs has no stream {name!r}: write nnx.Rngs({name}=0), or nnx.Rngs(0) for all."
        )
    return rngs[name]()


def provider_of(model: Any) -> Any:
    """Returns the provider that a model was quantized with, or None."""
    return getattr(type(model), "_provider", None)


def stacked_by(root: nnx.Module, module: nnx.Module) -> tuple[int, ...]:
    """Returns the extents of the stack of layers that `module`, which ran in `root`, is one
    layer of."""
    stored = {path: params_of(m) for path, m in nnx.iter_modules(root)}
    depth = len(module._path)
    paths = [module._path]
    if not params_of(module):  # then the modules inside it tell
        paths = [p for p in stored if p[:depth] == module._path]
    inside = dict(nnx.iter_modules(module))
    for path in paths:
        inner = params_of(inside.get(path[depth:], module))
        for name, param in stored[path].items():
            extra = param.ndim - inner[name].ndim if name in inner else 0
            if extra and param.shape[extra:] != inner[name].shape:
                raise ValueError(
                    f"{'/'.join(map(str, path))} is stacked along an axis other than the "
                    "first, where stochastic rounding finds no stream for each layer."
                )
            if extra:
                return tuple(param.shape[:extra])
    return ()


def stack_rngs(model: nnx.Module, stacks: dict[tuple, tuple[int, ...]]) -> None:
    """Gives stacked modules a stack of random streams, and none to those that want none."""
    stacked: dict[tuple, nnx.Rngs] = {}
    for path, module in nnx.iter_modules(model):
        rngs, extents = getattr(module, RNGS, None), stacks.get(path)
        if extents is None:
            _set_data(module, RNGS, None)
        elif extents and isinstance(rngs, nnx.Rngs):
            counts = jax.tree.leaves(nnx.state(rngs, nnx.RngCount))
            if all(count.ndim == 0 for count in counts):
                if extents not in stacked:
                    stacked[extents] = rngs.split(extents)
                setattr(module, RNGS, nnx.data(stacked[extents]))
