"""Donation: a model whose Variables another one took over says so when it is used.

`quantize_model(model, ..., donate=True)` builds new modules around the Variables of `model`.
Nothing is copied, and nothing may look as if there were still two models: the old modules give
up what they hold, so that a float weight is freed when its codes are there, and every attribute
of theirs, hence every call, `nnx.split` and reading of a parameter, raises ValueError. Where
quantizing fails before a weight was turned, the old modules get back what they held.
"""

import functools
import operator
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from flax import nnx


class _Old(NamedTuple):
    """A module that was used up."""

    module: nnx.Module
    cls: type  # what it was
    rest: dict[str, Any]  # its attributes but those that hold Variables or arrays
    names: tuple[str, ...]  # of all its attributes


class Donation:
    """New modules around the Variables of `model`, whose own modules are used up.

    model: the new model.
    """

    def __init__(self, model: nnx.Module):
        old = dict(nnx.iter_modules(model))
        self.model = rebind(model, nnx.merge(*nnx.split(model)))
        self._new = dict(nnx.iter_modules(self.model))
        self._kinds = {path: _kinds(module) for path, module in self._new.items()}
        used_up: dict[type, type] = {}
        self._old: dict[tuple, _Old] = {}
        for path, module in old.items():
            cls, attributes = type(module), vars(module)
            rest = {k: v for k, v in attributes.items() if not _holds_arrays(v)}
            self._old[path] = _Old(module, cls, rest, tuple(attributes))
            if cls not in used_up:
                used_up[cls] = _used_up(cls)
            attributes.clear()
            object.__setattr__(module, "__class__", used_up[cls])

    def take_back(self) -> None:
        """Gives the old modules back what they held, unless some of it is codes by now."""
        for path, module in self._new.items():
            if not self._kinds[path].items() <= _kinds(module).items():
                return
        for path, (module, cls, rest, names) in self._old.items():
            object.__setattr__(module, "__class__", cls)
            new = vars(self._new[path])
            vars(module).update({k: rest[k] if k in rest else new[k] for k in names})


def copy(model: nnx.Module) -> nnx.Module:
    """Returns a model with Variables of its own over the same arrays."""
    return rebind(model, nnx.clone(model))


def rebind(old: nnx.Module, new: nnx.Module) -> nnx.Module:
    """Has methods, partials and functions among the attributes of `new`, a rebuilt `old`, call
    modules of `new`: Flax keeps them as they are when it rebuilds a model."""
    rebuilt = dict(nnx.iter_modules(new))
    twins = {id(m): rebuilt[path] for path, m in nnx.iter_modules(old)}
    for module in rebuilt.values():
        for name, value in vars(module).items():
            if (bound := _rebound(value, twins)) is not value:
                object.__setattr__(module, name, bound)
    return new


def _kinds(module: nnx.Module) -> dict[str, type]:
    """Returns the class of each attribute that holds Variables or arrays, by name."""
    return {k: type(v) for k, v in vars(module).items() if _holds_arrays(v)}


def _holds_arrays(value: Any) -> bool:
    """Whether an attribute holds Variables or arrays, and no modules."""
    is_leaf = lambda x: isinstance(x, nnx.Variable | nnx.Pytree)
    leaves = jax.tree.leaves(value, is_leaf=is_leaf)
    arrays = (nnx.Variable, jax.Array, jax.ShapeDtypeStruct)
    are_arrays = [isinstance(leaf, arrays) for leaf in leaves]
    others = (x for x, is_array in zip(leaves, are_arrays) if not is_array)
    return any(are_arrays) and not any(isinstance(x, nnx.Pytree) for x in others)


def _rebound(value: Any, twins: dict[int, nnx.Module], inside: tuple = ()) -> Any:
    """Returns `value` with the twin of each old module that is reached through it."""
    if id(value) in twins:
        return twins[id(value)]
    if id(value) in inside:  # a function that calls itself
        return value
    parts, build = _apart(value)
    again = [_rebound(part, twins, (*inside, id(value))) for part in parts]
    return value if all(map(operator.is_, again, parts)) else build(again)


def _apart(value: Any) -> tuple[list, Callable[[list], Any]]:
    """Returns (what a method, a partial, a function or a container holds, a function that makes
    the like of it from others)."""
    if isinstance(value, types.MethodType):
        return [value.__self__], lambda parts: types.MethodType(value.__func__, *parts)
    if isinstance(value, functools.partial):
        names, num_args = list(value.keywords), len(value.args)

        def call(parts):
            func, args, named = parts[0], parts[1 : 1 + num_args], parts[1 + num_args :]
            return functools.partial(func, *args, **dict(zip(names, named)))

        return [value.func, *value.args, *value.keywords.values()], call
    if isinstance(value, types.FunctionType) and value.__closure__:
        return _closed_over(value)
    if type(value) in (list, tuple):
        return list(value), type(value)
    if type(value) is dict:
        return list(value.values()), lambda parts: dict(zip(value, parts))
    return [], lambda parts: value


def _closed_over(function: types.FunctionType) -> tuple[list, Callable[[list], Any]]:
    """Returns what `_apart` does, of the variables around a lambda or an inner function."""
    cells = function.__closure__ or ()
    full = [cell for cell in cells if cell != types.CellType()]
    contents = [cell.cell_contents for cell in full]

    def build(parts):
        changed = {
            id(cell): types.CellType(new)
            for cell, was, new in zip(full, contents, parts)
            if new is not was
        }
        again = types.FunctionType(
            function.__code__,
            function.__globals__,
            function.__name__,
            function.__defaults__,
            tuple(changed.get(id(cell), cell) for cell in cells),
        )
        again.__kwdefaults__ = function.__kwdefaults__
        functools.update_wrapper(again, function)
        del again.__wrapped__  # it would keep the old model
        return again

    return contents, build


def _used_up(cls: type) -> type:
    """Returns a class for modules of `cls` that were used up."""
    message = (
        f"this {cls.__name__} was given to quantize_model(..., donate=True), which used it up: "
        "its parameters are the quantized model's now. Use what quantize_model returned, "
        "model = mt.quantize_model(model, provider, x, donate=True), or leave donate out to "
        "keep both."
    )

    def refuse(self, *args, **kwargs):
        raise ValueError(message)

    def __getattribute__(self, name):
        if name == "__class__":  # isinstance asks for it
            return type(self)
        raise ValueError(message)

    fields: dict[str, Any] = dict.fromkeys(("__call__", "__setattr__"), refuse)
    fields |= {"__delattr__": refuse, "__getattribute__": __getattribute__}
    shown = lambda self: f"<{cls.__name__}, used up by donate=True>"
    fields |= {"__repr__": shown, "__str__": shown}
    fields |= {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
    return type(cls.__name__, (cls,), fields)
