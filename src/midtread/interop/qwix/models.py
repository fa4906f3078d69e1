"""Models: what Qwix's providers and `flax_util` do in the module that is running.

The current module is the one that a quantized model has entered. Outside of one it is the
innermost Linen module, or the NNX module that the calling code calls `self`.
"""

import collections.abc
import contextlib
import dataclasses
import functools
import inspect
import threading
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from flax import linen as nn
from flax import nnx
from jax.sharding import PartitionSpec

from midtread.interop.qwix.arrays import HowToQuantize
from midtread.interop.qwix.matmuls import QwixStep, is_whole_tile
from midtread.model import flaxlib, intercept, running, weights
from midtread.model.boxes import WithAux
from midtread.model.provider import QuantizationProvider
from midtread.model.quantize import quantize_model
from midtread.model.rules import QtRule, Step, recipe_of
from midtread.numerics.calibration import Average
from midtread.numerics.qarray import QArray, quantize_by_spec, quantize_to_range
from midtread.ops.context import here
from midtread.ops.recipe import Recipe
from midtread.providers import params as params_
from midtread.providers.ptq import PtqProvider, Source, static_range
from midtread.providers.qt import QtProvider

ModelType = nn.Module | nnx.Module
QuantStat = dict[str, jax.Array]
Calibration = dict[str, jax.Array]

_spec = lambda how: how.spec if isinstance(how, HowToQuantize) else how


def __getattr__(name: str) -> Any:
    if name == "qarray":  # outside code reaches `ptq.qarray.HowToQuantize`
        import importlib

        return importlib.import_module("qwix._src.core.qarray")
    raise AttributeError(name)


# --- the current module -----------------------------------------------------------------------


def get_current_module() -> Any:
    try:
        return intercept.current_module()
    except ValueError:
        frame = inspect.currentframe()
        while frame is not None:
            if isinstance(frame.f_locals.get("self"), nnx.Module):
                return frame.f_locals["self"]
            frame = frame.f_back
        raise


def get_current_module_path() -> tuple[Any, ...]:
    module = get_current_module()
    return module.path if isinstance(module, nn.Module) else module.qwix_path


@contextlib.contextmanager
def _here() -> Iterator[Any]:
    """The current module, as our own functions know it."""
    module = get_current_module()
    with running.entered(module):
        yield module


def should_update_quant_stats() -> bool:
    return flaxlib.can_update(get_current_module())


def get_or_create_variable(
    collection: str, name: str, init_fn: Callable[[], Any]
) -> Any:
    return flaxlib.variable(get_current_module(), collection, name, init_fn)


def get_and_delete_variable(collection: str, name: str) -> Any:
    """The variable's value, taken out of the module; None if there is none."""
    return flaxlib.take_variable(get_current_module(), collection, name)


def get_or_create_param(
    name: str,
    init_fn: Callable[..., Any],
    *,
    nnx_param_type: type = nnx.Param,
    need_rng: bool = False,
) -> Any:
    module = get_current_module()
    linen = isinstance(module, nn.Module)
    if linen and need_rng:
        return module.scope.param(name, init_fn)

    def init(key: Any = None):
        if not need_rng:
            return init_fn()
        return init_fn(flaxlib.make_rng(module, "params") if key is None else key)

    if not linen and hasattr(module, name):
        flaxlib.check_shapes(module, name, lambda: init(jax.random.key(0)))
    return flaxlib.unbox(flaxlib.param(module, name, init, nnx_param_type))


def make_rng(rng_stream: str) -> jax.Array:
    return flaxlib.make_rng(get_current_module(), rng_stream)


# --- which operand is a parameter -------------------------------------------------------------


def find_param(x: Any, ptq_array_type: Any = None) -> str | None:
    """The name of the parameter that `x` is, in the current module.

    Boxed parameters are always found: `ptq_array_type` has nothing to add.
    """
    del ptq_array_type
    array = x.array if isinstance(x, WithAux) else x
    return weights.find_param(get_current_module(), array)


_find_param = QuantizationProvider.find_param


def replace_find_param(finder: Callable[..., Any] | None) -> None:
    """Lets `finder(x)` answer every provider from now on; None undoes it."""
    answer = _find_param
    if finder is not None and finder is not find_param:
        answer = lambda self, module, x: finder(x)
    QuantizationProvider.find_param = answer


def process_model_inputs(
    self: QuantizationProvider | None, model: Any, model_args: Any, model_kwargs: Any
) -> tuple[Any, Any, Any]:
    """Qwix's is also called without a provider: then all that are at work count the ops of
    an NNX model anew."""
    if self is None:
        for call in here.active:
            for _, module in nnx.iter_modules(model):
                call.counters.pop(id(module), None)
    return model, model_args, model_kwargs


def recipe_for(
    self: QtProvider, rule: QtRule, op: str, lhs_is_weight: bool, rhs_is_weight: bool
) -> Recipe:
    """Without bwd_qtype Qwix takes float operands for the gradient of a dot, and quantized
    ones for that of a convolution or a ragged_dot."""
    if op != "dot_general" and rule.recipe is None and rule.bwd_qtype is None:
        own = rule.additional_qt_config or {}
        changes = {"use_original_residuals": False, **own}
        rule = dataclasses.replace(rule, additional_qt_config=changes)
    return recipe_of(rule, lhs_is_weight, rhs_is_weight)


_train = QtProvider._train


def train(self: QtProvider, rule: QtRule, op_id: str, c: Any, lhs: Any, rhs: Any):
    """One tile that is as long as the sum is none to Qwix."""
    if is_whole_tile(rule.tile_size, c, lhs, rhs):
        rule = dataclasses.replace(rule, tile_size=None)
    return _train(self, rule, op_id, c, lhs, rhs)


_source, _note_computed = PtqProvider._source, PtqProvider._note_computed


def find_part(self: QuantizationProvider, module: Any, x: jax.Array) -> None:
    """Qwix knows the parameters of the module that multiplies, whole, and no others."""
    del self, module, x


def source(self: PtqProvider, x: jax.Array, elsewhere: bool = True) -> Source | None:
    """Qwix does not know a parameter again that was transposed: `Embed.attend` of a `.*`
    rule stays float, and so does `x @ w.T`."""
    param = _source(self, x, elsewhere)
    is_turned = param is not None and any(m.name == "transpose" for m in param.moves)
    return None if is_turned else param


def note_computed(self: PtqProvider, operands: list[jax.Array]) -> None:
    """Qwix says nothing of weights that it leaves float because they are transposed."""
    _note_computed(self, [x for x in operands if _source(self, x) is None])


# (class, method, what it is while Qwix's name is ours, what it is otherwise)
_HOOKS: list[tuple[type, str, Any, Any]] = [
    (QuantizationProvider, "process_model_inputs", process_model_inputs,
     QuantizationProvider.process_model_inputs),
    (QtProvider, "recipe_for", recipe_for, QtProvider.recipe_for),
    (QtProvider, "_train", train, _train),
    (Step, "tiled_sum", QwixStep.tiled_sum, Step.tiled_sum),
    (Step, "quantizes_tiles_again", QwixStep.quantizes_tiles_again,
     Step.quantizes_tiles_again),
    (PtqProvider, "_source", source, _source),
    (QuantizationProvider, "find_part", find_part, QuantizationProvider.find_part),
    (PtqProvider, "_note_computed", note_computed, _note_computed),
]  # fmt: skip


def hook(is_installed: bool = True) -> None:
    """Gives our providers what only Qwix's have, or takes it back."""
    running.forget_shared()
    for cls, name, theirs, ours in _HOOKS:
        setattr(cls, name, theirs if is_installed else ours)


# --- sharding metadata ------------------------------------------------------------------------


def update_sharding(
    spec: Any,
    *,
    shape: Sequence[int] | None = None,
    split: Collection[int] | None = None,
    merge: Collection[int] | None = None,
    transpose: Sequence[int | None] | None = None,
) -> Any:
    """Axis names after axes are split in two, put together again, or moved."""
    if sum(map(bool, (split, merge, transpose))) > 1:
        raise ValueError("only one of split, merge and transpose can be given.")
    names = list(spec)
    if split:
        pairs = [[n, None] if i in split else [n] for i, n in enumerate(names)]
        names = [n for pair in pairs for n in pair]
    for axis in merge or ():
        del names[axis + 1]
    if transpose:
        names = [None if a is None else names[a] for a in transpose]
    if shape:
        if len(shape) != len(names):
            raise ValueError(f"{len(names)} names, {names}, for a shape of {shape}.")
        names = [None if n == 1 else name for n, name in zip(shape, names)]
    return PartitionSpec(*names) if isinstance(spec, PartitionSpec) else tuple(names)


def unbox(maybe_boxed: Any) -> Any:
    return flaxlib.unbox(maybe_boxed)


def update_boxed(
    boxed: Any,
    *,
    value: Any = None,
    split: Collection[int] | None = None,
    merge: Collection[int] | None = None,
    transpose: Sequence[int | None] | None = None,
) -> Any:
    """Another value in the same kind of box, its axis names moved along."""
    if not isinstance(boxed, nn.meta.AxisMetadata | nnx.Variable | jax.Array):
        raise ValueError(f"Unsupported type: {type(boxed)}")  # noqa: TRY004
    value = flaxlib.unbox(boxed) if value is None else value
    moves = {"split": split, "merge": merge, "transpose": transpose}
    held = flaxlib.unbox(boxed).shape if transpose else value.shape
    shape = [1 if a is None else held[a] for a in transpose] if transpose else held
    if value.ndim == len(shape):
        shape = value.shape
    change = functools.partial(update_sharding, shape=shape, **moves)
    return flaxlib.like(boxed, value, change)


# --- quantizing in place ----------------------------------------------------------------------


def create_quantized_param(name: str, value: jax.Array, how: Any) -> WithAux:
    """A parameter of the current module, quantized; the module keeps it in a box."""
    module = get_current_module()
    if isinstance(module, nn.Module) and not module.is_initializing():
        raise ValueError(
            "It seems you're feeding an unquantized param to a quantized model: "
            f"{flaxlib.path_of(module)}/{name}. Pass it through quantize_params first."
        )
    box = WithAux(quantize_by_spec(value, _spec(how)), _spec(how))
    flaxlib.replace_param(module, name, box)
    return box


def quantize_act(array: jax.Array, how: Any, rule: Any, act_name: str) -> QArray:
    """An activation, with the static scale that the current module keeps if the rule asks."""
    spec = _spec(how)
    if not rule.act_static_scale:
        return quantize_by_spec(array, spec)
    with _here():
        return quantize_to_range(array, spec, static_range(rule, act_name, spec, array))


def quantize_linen_model(
    model: nn.Module, provider: Any, methods: Collection[str]
) -> nn.Module:
    return quantize_model(model, provider, methods=methods)


def quantize_nnx_model(
    model: nnx.Module,
    provider: Any,
    *model_inputs: Any,
    call_method: str = "__call__",
    **model_inputs_kwargs: Any,
) -> nnx.Module:
    return quantize_model(
        model, provider, *model_inputs, methods=(call_method,), **model_inputs_kwargs
    )


class SimpleMovingAverage:
    """The mean of every range seen."""

    def __init__(self, bootstrap_steps: int = 0):
        self._average = Average(bootstrap_steps)

    def init(self, calibration: Mapping[str, jax.Array]) -> QuantStat:
        return self._average.init(calibration)

    def update(self, quant_stat: Mapping, calibration: Mapping) -> QuantStat:
        return self._average.update(quant_stat, calibration)

    def get_calibration(
        self, quant_stat: Mapping, default_calibration: Mapping | None = None
    ) -> Calibration:
        return self._average.range(quant_stat, default_calibration)


# --- what is known of an object --------------------------------------------------------------

_known: dict[int, tuple[weakref.ref, dict[str, Any]]] = {}  # by id


def set_aux(obj: Any, key: str, value: Any) -> None:
    """Notes something of an object that takes no attributes, for as long as it lives."""
    number = id(obj)
    known = _known.get(number)
    if known is None or known[0]() is not obj:
        ref = weakref.ref(obj, lambda _: _known.pop(number, None))
        known = _known[number] = (ref, {})
    known[1][key] = value


_NOTHING = object()


def get_aux(obj: Any, key: str, default: Any = _NOTHING) -> Any:
    known = _known.get(id(obj))
    if known is not None and known[0]() is obj and key in known[1]:
        return known[1][key]
    if default is _NOTHING:
        raise KeyError(f"nothing is known of {obj!r} under {key!r}.")
    return default


def clear_aux(obj: Any) -> None:
    _known.pop(id(obj), None)


ArrayTypeVar = TypeVar("ArrayTypeVar", jax.Array, QArray)


# --- interception -----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Interceptor(collections.abc.Mapping):
    """{dotted path: what to call instead}, known by its `id`."""

    mapping: dict[str, Callable]
    id: int

    def __getitem__(self, key: str) -> Callable:
        return self.mapping[key]

    def __iter__(self):
        return iter(self.mapping)

    def __len__(self) -> int:
        return len(self.mapping)

    def __hash__(self) -> int:
        return self.id


# a provider without rules for each id, as our engine knows interceptors by theirs
_identities: dict[int, QuantizationProvider] = collections.defaultdict(
    lambda: QuantizationProvider([])
)


def _handlers(interceptor: Interceptor) -> dict[str, Callable]:
    """The replacements by the names that our engine has for what they replace. Qwix also
    writes the path of a function's code, `jax.nn.silu._fun.__code__`: that is the function."""
    handlers, paths = {}, {}
    for path, fn in interceptor.items():
        path = path.removesuffix(".__code__").removesuffix("._fun")
        target = id(inspect.unwrap(get_attribute(path)))
        if target in paths:
            raise ValueError(
                f"{path} and {paths[target]} are one function, and each is replaced."
            )
        paths[target] = path
        handlers[intercept.watch(path)] = fn
    return handlers


Function = Callable[..., Any]
PRIMITIVE_BIND_KEY = "jax._src.core.Primitive.bind"


class InterceptionManager:
    """Which interceptors are at work on this thread; switches them by hand."""

    def __init__(self):
        self._here = threading.local()

    @property
    def _entered(self) -> dict[int, contextlib.ExitStack]:
        if not hasattr(self._here, "entered"):
            self._here.entered = {}
        return self._here.entered

    def is_active(self, interceptor: Interceptor) -> bool:
        return running.is_active(_identities[interceptor.id])

    def activate_interceptor(self, interceptor: Interceptor) -> None:
        if self.is_active(interceptor):
            raise ValueError(f"the interceptor {interceptor.id} is active already.")
        handlers = _handlers(interceptor)
        stack = contextlib.ExitStack()
        stack.enter_context(intercept.active(_identities[interceptor.id], handlers))
        self._entered[interceptor.id] = stack

    def deactivate_interceptor(self, interceptor: Interceptor) -> None:
        if interceptor.id not in self._entered:
            raise ValueError(f"the interceptor {interceptor.id} is not active.")
        self._entered.pop(interceptor.id).close()

    def disable_interception(self) -> contextlib.ExitStack:
        stack = contextlib.ExitStack()
        stack.enter_context(running.disabled())
        return stack

    def enable_interception(self, disabled: contextlib.ExitStack) -> None:
        disabled.close()


interception_manager = InterceptionManager()


def wrap_func_intercepted(
    func: Callable,
    get_interceptor: Callable[[], Interceptor],
    *,
    disable_jit: bool,
    input_transform: Callable = lambda *x: x,
    output_transform: Callable = lambda x: x,
    should_intercept: Callable[[], bool] = lambda: True,
) -> Callable:
    """`func`, during which calls of the functions mapped go to their handlers."""

    @functools.wraps(func)
    def wrapper(*args, **kwargs):
        interceptor = get_interceptor()
        identity = _identities[interceptor.id]
        if running.is_active(identity) or not should_intercept():
            return func(*args, **kwargs)
        args, kwargs = input_transform(args, kwargs)
        handlers = _handlers(interceptor)
        with contextlib.ExitStack() as stack:
            stack.enter_context(intercept.active(identity, handlers))
            if disable_jit:
                stack.enter_context(jax.disable_jit())
            output = func(*args, **kwargs)
        return output_transform(output)

    return wrapper


def get_attribute(name: str) -> Any:
    return getattr(*intercept.resolve(name))


def has_attribute(name: str) -> bool:
    try:
        intercept.resolve(name)
    except AttributeError:
        return False
    return True


def quantize_params(params: Any, *args: Any, **kwargs: Any) -> Any:
    """Qwix refuses NumPy's arrays, which ours takes."""
    for path, leaf in jax.tree.leaves_with_path(params):
        if isinstance(leaf, np.ndarray):
            raise TypeError(
                f"params is not a pure dict of jax.Array: {jax.tree_util.keystr(path)} is a "
                "ndarray."
            )
    return params_.quantize_params(params, *args, **kwargs)
