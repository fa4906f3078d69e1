"""Adopt: a Flax model gets classes whose methods run under a provider.

Nothing in a model's code is edited. Its modules get subclasses of their own classes, made here,
with the same names; the methods of these say which module is running (`running.entered`) and
call the methods that they replace. The method that the user calls also makes the provider
active, so that ops reach it until the method returns.

    adopt_linen(model, ...)    a copy, of which the named methods run under the provider
    adopt_nnx(model, ...)      the model itself, of which one method does

A Linen module knows its path. An NNX module does not, and transforms rebuild modules, so
that objects cannot be told apart by identity: its path is an attribute of the class made for
it, which survives split and merge because the class does.
"""

import contextlib
import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
from flax import linen as nn
from flax import nnx

from midtread.model import intercept, running
from midtread.model.flaxlib import RNGS, QuantStat
from midtread.model.running import path_of
from midtread.ops.context import here


def adopt_linen(model: nn.Module, provider: Any, methods) -> nn.Module:
    """Copies a Linen module; the copy runs `methods` under the provider."""
    cls = getattr(type(model), "_unquantized_type", type(model))
    model = model.copy()
    adopted = _linen_class(cls, provider, tuple(methods))
    object.__setattr__(model, "__class__", adopted)
    return model


def _linen_class(cls: type, provider: Any, methods: tuple[str, ...]) -> type:
    """Makes a subclass of a Linen module's class, which runs `methods` under the provider."""
    fields: dict[str, Any] = {"_unquantized_type": cls, "_provider": provider}
    for name in methods:
        if not hasattr(cls, name):
            raise ValueError(f"{cls.__name__} has no method {name!r} to quantize.")
        fields[name] = _linen_method(cls, name, provider)
    # Pickle finds classes by their names, under which there is none of those made here.
    parts = lambda self: (_unpickled, (cls, provider, methods), self.__getstate__())
    fields["__reduce__"] = nn.nowrap(parts)
    return type(cls.__name__, (cls,), fields)


def _unpickled(*adopted: Any) -> nn.Module:
    """Makes an empty module, which pickle fills."""
    return object.__new__(_linen_class(*adopted))


def _linen_method(cls: type, name: str, provider: Any) -> Callable:
    original = getattr(cls, name)

    @functools.wraps(original)
    def method(self, *args, **kwargs):
        if self.scope is None or running.is_active(provider):
            return original(self, *args, **kwargs)
        return _run(original, name, provider, self, args, kwargs)

    # wraps() copied the marks of a compact method, which this one only calls.
    for mark in ("compact", "nowrap", "method_handler_wrapped", "__wrapped__"):
        method.__dict__.pop(mark, None)
    return method


def _run(original: Callable, name: str, provider: Any, model: Any, args, kwargs) -> Any:
    """Runs a method of a model under a provider."""
    handlers = provider.handlers()
    with intercept.active(provider, handlers, model), running.entered(model):
        provider.begin_call(model)
        model, args, kwargs = provider.process_model_inputs(model, args, kwargs)
        with nn.intercept_methods(_enter_linen):  # NNX may have bridges to Linen
            out = original(model, *args, **kwargs)
        return provider.process_model_output(name, out)


def _enter_linen(next_fn, args, kwargs, context):
    if context.method_name == "__call__" and "module" in here.names:
        out = running.offer("module", context.module, next_fn, args, kwargs)
        if out is not NotImplemented:
            return out
    with running.entered(context.module):
        return next_fn(*args, **kwargs)


def adopt_nnx(model: nnx.Module, provider: Any, method: str) -> nnx.Module:
    """Gives an NNX module classes that know paths and run under the provider."""
    for path, module in nnx.iter_modules(model):
        cls = getattr(type(module), "_unquantized_type", type(module))
        fields: dict[str, Any] = {"_unquantized_type": cls, "_path": path}
        fields["_path_text"] = "/".join(map(str, path))
        # Qwix has these attributes, for model.set_attributes and for code that reads them.
        fields |= {"qwix_path": path, "disable_quant_stats_update": False, RNGS: None}
        for name, original in _nnx_methods(cls):
            fields[name] = _nnx_method(original, name)
        if issubclass(cls, nnx.bridge.ToNNX):
            fields["__call__"] = _with_our_statistics(fields["__call__"])
        if path == ():
            fields["_provider"] = provider
            fields[method] = _nnx_root(getattr(cls, method), method, provider)
        module.__class__ = type(
            cls.__name__, (cls,), {**fields, "__module__": cls.__module__}
        )
    return model


def _nnx_methods(cls: type):
    for name in dir(cls):
        if name.startswith("_") and name != "__call__":
            continue
        original = inspect.getattr_static(cls, name)
        inherited = any(vars(base).get(name) is original for base in nnx.Module.__mro__)
        if inspect.isfunction(original) and not inherited:
            yield name, original


def _nnx_method(original: Callable, name: str) -> Callable:
    @functools.wraps(original)
    def method(self, *args, **kwargs):
        if name == "__call__" and "module" in here.names:
            run = functools.partial(original, self)
            out = running.offer("module", self, run, args, kwargs)
            if out is not NotImplemented:
                return out
        with _named(self), running.entered(self):
            return original(self, *args, **kwargs)

    return method


def _with_our_statistics(method: Callable) -> Callable:
    """A bridge finds a collection by the class that is registered under its name. Qwix, if it
    is imported after us, has put its own there."""

    @functools.wraps(method)
    def call(self, *args, **kwargs):
        nnx.register_variable_name("quant_stats", QuantStat, overwrite=True)
        return method(self, *args, **kwargs)

    return call


def _named(module: nnx.Module) -> contextlib.AbstractContextManager:
    """Opens a scope with the module's name, as Linen does, so that the names of JAX's
    equations have it: profiles and `mt.prove` show it."""
    name = _below(running.current_path(), path_of(module))
    return jax.named_scope(name) if name else contextlib.nullcontext()


@functools.lru_cache(maxsize=65536)
def _below(outer: str, path: str) -> str:
    return path.removeprefix(outer).strip("/")


def _nnx_root(original: Callable, name: str, provider: Any) -> Callable:
    @functools.wraps(original)
    def method(self, *args, **kwargs):
        if running.is_active(provider):
            with running.entered(self):
                return original(self, *args, **kwargs)
        return _run(original, name, provider, self, args, kwargs)

    return method
