"""quantize_function: makes a plain JAX function run under a provider.

This is for models that are functions of their parameters (Equinox, Haiku, or no library at
all). Scopes take the part of modules: inside `with jax.named_scope("mlp")` the module path
is "mlp", and rules match it as they match a Flax path.

Every scope, wherever and whenever it was made, is entered through one class of JAX's,
`jax.extend.source_info_util.extend_name_stack`, which is changed to call us as well. JAX's
own name stack would not do: it starts anew inside each jit and scan, and is no part of
jit's cache key, so that one trace would serve scopes that match different rules.

Which operand is a weight is decided by the parameters, one argument of the function: a
matmul's operand that is one of its leaves, or was made from one by casts and reshapes.
Where that cannot be seen (eager casts, arguments of a nested jit or scan) an operand
shaped like a leaf, or like one index of a leaf of three axes or more (layers that a
scan goes over), counts as a weight.
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.extend import source_info_util

from midtread.model import intercept, running
from midtread.model.provider import QuantizationProvider, check_provider
from midtread.numerics.qarray import QArray
from midtread.ops import witness
from midtread.ops.context import here


def quantize_function(
    fn: Callable,
    provider: QuantizationProvider,
    *,
    params_argnum: int = 0,
    rngs: Mapping[str, jax.Array] | None = None,
) -> Callable:
    """Makes a function run under a provider, with `jax.named_scope` names as module paths.

    A function keeps no state: rules that need some (`act_static_scale`, delayed scaling,
    float weights under PtqProvider) are refused. Weights that are QArrays already are used
    as they are.

    >>> import jax.numpy as jnp
    >>> from midtread.model.rules import QtRule
    >>> from midtread.providers.qt import QtProvider
    >>> def model(params, x):
    ...     with jax.named_scope("mlp"):
    ...         return x @ params["w"]
    >>> rule = QtRule(module_path="mlp", weight_qtype="int4", act_qtype="int8")
    >>> quantized = quantize_function(model, QtProvider([rule]))
    >>> quantized({"w": jnp.eye(4) * 0.3}, jnp.ones((1, 4))).shape
    (1, 4)

    Args:
        fn: any function of arrays.
        provider: what happens at the matmuls that its rules match.
        params_argnum: the argument, a pytree given by position, whose leaves are weights.
        rngs: a key per random stream ('stochastic_rounding'). Call quantize_function
            inside the training step, with that step's key. Layers of one scan share noise.

    Returns:
        A function with the signature of `fn`.

    Raises:
        ValueError: A rule needs state that a function does not keep.
        TypeError: A function or a provider that is none.
    """
    check_provider(provider, "mt.quantize_function(fn, {})")
    if not callable(fn):
        raise TypeError(f"fn should be a function, not {fn!r}.")

    @functools.wraps(fn)
    def quantized(*args, **kwargs):
        if running.is_active(provider):
            return fn(*args, **kwargs)
        if not -len(args) <= params_argnum < len(args):
            raise ValueError(
                f"argument {params_argnum} of {_name(fn)} holds the parameters, and "
                f"must be given by position; got {len(args)} positional arguments."
            )
        _follow_scopes()
        root = Scope((), _weights(args[params_argnum]), dict(rngs or {}), {})
        handlers = provider.handlers()
        with intercept.active(provider, handlers, root), running.entered(root):
            _, args, kwargs = provider.process_model_inputs(root, args, kwargs)
            out = fn(*args, **kwargs)
            return provider.process_model_output(_name(fn), out)

    return quantized


def _name(fn: Callable) -> str:
    return getattr(fn, "__name__", type(fn).__name__)


class Scope:
    """Takes the part of a module: it has a path, the parameters and random streams."""

    def __init__(self, path: tuple[str, ...], params: dict, rngs: dict, known: dict):
        self._path, self._path_text = path, "/".join(path)
        self._params_here = params  # those of the whole function; a scope owns none
        self._rngs = rngs
        self._known = known  # path -> Scope; a path has one, so that ops count on

    def inside(self, name: str) -> "Scope":
        """Returns the scope of that name inside this one."""
        path = (*self._path, name)
        if path not in self._known:
            self._known[path] = Scope(path, self._params_here, self._rngs, self._known)
        return self._known[path]

    def make_rng(self, name: str) -> jax.Array:
        if name not in self._rngs:
            raise ValueError(
                f"no random stream {name!r}: pass quantize_function(fn, provider, "
                f"rngs={{{name!r}: key}}), with a new key every step."
            )
        return self._rngs[name]

    def __getattr__(self, name: str) -> Any:
        # A provider looks up a name on a module in order to store something there.
        if name.startswith("__"):
            raise AttributeError(name)
        name = name.partition("~")[0]  # a leaf's name, and how deep it was wrapped
        raise ValueError(
            f"{'/'.join(self._path)!r}: the provider wants to keep {name!r} in the "
            "model, but a plain function has no place for it. Weights for serving: "
            "quantize them first (mt.quantize) and pass the QArrays in the parameters. "
            "Statistics of activations: drop act_static_scale, or use a Flax module and "
            "quantize_model."
        )


def _weights(params: Any) -> dict[str, Any]:
    """Returns {path: leaf}, and beside a leaf that may be a stack of layers the shape of one."""
    is_quantized = lambda x: isinstance(x, QArray)
    leaves = jax.tree_util.tree_leaves_with_path(params, is_leaf=is_quantized)
    weights = {}
    for path, leaf in leaves:
        name = jax.tree_util.keystr(path)
        if not hasattr(leaf, "shape") or is_quantized(leaf):
            continue
        weights[name] = leaf
        if len(leaf.shape) > 2:
            weights[f"{name}[i]"] = jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype)
    return weights


# --- scopes -----------------------------------------------------------------------------------


_lock = threading.Lock()
_followed: list[type] = []


def _follow_scopes() -> None:
    """Changes the class behind `jax.named_scope`, once and for good, to call us too."""
    with _lock:
        if _followed:
            return
        cls = source_info_util.extend_name_stack
        enter, leave = cls.__enter__, cls.__exit__

        @functools.wraps(enter)
        def __enter__(self):
            out = enter(self)
            here.scopes.append(_entered(self.name))
            return out

        @functools.wraps(leave)
        def __exit__(self, *error):
            inner = here.scopes.pop() if here.scopes else None
            if inner is not None:
                inner.close()
            return leave(self, *error)

        cls.__enter__, cls.__exit__ = __enter__, __exit__
        _followed.append(cls)


def _entered(name: str) -> contextlib.ExitStack | None:
    """Enters the scope `name` of the function that runs; None if something else runs."""
    module = here.modules[-1] if here.modules else None
    if not isinstance(module, Scope) or name.startswith(witness.PREFIX):
        return None
    stack = contextlib.ExitStack()
    for part in name.split("/"):
        stack.enter_context(running.entered(module := module.inside(part)))
    return stack
