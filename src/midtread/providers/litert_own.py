"""Ops of your own under the LiteRT providers.

A provider's `_ops` maps the dotted path of a function to what makes its handler, under the
names that Qwix has for them. Before the model is quantized, a function becomes one op by

    provider._ops["mine.l2_norm"] = provider._ops["jax.numpy.tanh"]    # as that op is
    provider._ops["mine.l2_norm"] = functools.partial(QuantizedOp, input_idx=[0])

with the same line for the provider that converts. A class below is a kind of
providers/litert_kinds.py; a subclass of one may have a `__call__` of its own, made of the
four methods with an underscore.

    QuantizedOp    each input and the output have a range of their own
    OnlyInputOp    the output has the input's range
    OnlyOutputOp   only the result counts
    NoQuantOp      there is no integer kernel: inputs arrive quantized, the result is float
"""

import enum
import functools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import jax

from midtread.model import intercept
from midtread.providers.litert_ops import FUNCTIONS, Row

GetRuleAndOpIdFn = Callable[[str], tuple[Any, str]]
FakeQuantFn = Callable[[jax.Array, Any, str | None], jax.Array]

NotAnActivationError = ValueError(
    "an array does not come from the model's inputs by any op that was seen: pass "
    "strict=False to the provider to leave it in float."
)


class AuxDataKey(str, enum.Enum):
    """What Qwix notes of an array; here that is an `Edge` of providers/litert_ops.py."""

    FQ_RULE = "fq_rule"
    FQ_ARRAY = "fq_array"
    ALLOW_FUSION = "allow_fusion"
    IS_ACTIVATION = "is_activation"
    WEIGHT_NAME = "weight_name"
    FIXED_RANGE = "fixed_range"


class QuantizedOp:
    """The handler of one function: each input and the output have a range of their own.

    Args:
        op_full_name: the dotted path of the function.
        get_rule_and_op_id_fn: the provider's `_get_current_rule_and_op_id`.
        fake_quant_fn: taken because Qwix has it; ranges are the provider's.
        op_name: what rules call it and its statistics are stored under; the last part of
            the path if not given.
        changes: other values for `input_idx`, the positions of its operands, and
            `fixed_range_for_output`, (low, high) of the result if that is known.

    Raises:
        AttributeError: a change of something else.
    """

    kind: ClassVar[str] = "both"
    input_idx: Sequence[int] = ()
    fixed_range_for_output: Any = None

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        own = [n for n in vars(cls) if n in vars(QuantizedOp) and n.startswith("_")]
        for name in own:
            if not name.endswith("__"):
                raise TypeError(
                    f"{cls.__name__} overrides {name}, which is never called here: write "
                    "a __call__, which may use it."
                )

    def __init__(
        self,
        *,
        op_full_name: str,
        get_rule_and_op_id_fn: Any,
        fake_quant_fn: Any,
        op_name: str | None = None,
        **changes: Any,
    ):
        del fake_quant_fn
        self._op_full_name = op_full_name
        self._op_name = op_name or op_full_name.rpartition(".")[2].replace("__", "")
        self._get_rule_and_op_id_fn = get_rule_and_op_id_fn
        self._provider = get_rule_and_op_id_fn.__self__
        for name, value in changes.items():
            if name not in ("input_idx", "fixed_range_for_output"):
                raise AttributeError(f"Unsupported keyword argument {name}.")
            setattr(self, name, value)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.input_idx:
            raise ValueError(f"input_idx is not set for op {self._op_name}.")
        row = self._row()
        run = functools.partial(self._provider._function, row, self._call_original_op)
        out = run(*args, **kwargs)
        return self._call_original_op(*args, **kwargs) if out is NotImplemented else out

    def _row(self) -> Row:
        fixed = self.fixed_range_for_output
        return Row(self._op_name, self.kind, tuple(self.input_idx), fixed)

    def _inputs_have_activations(self, args: Sequence[Any]) -> bool:
        return self._provider._is_about(self._row(), args)

    def _call_original_op(self, *args: Any, **kwargs: Any) -> Any:
        return getattr(*intercept.resolve(self._op_full_name))(*args, **kwargs)

    def _fake_quant_inputs(self, args: Sequence[Any], rule: Any, op_id: str) -> list:
        return self._provider._inputs(self._row(), args, rule, op_id)

    def _maybe_fake_quant(self, array: jax.Array, rule: Any, name: str) -> jax.Array:
        return self._provider._quantized(array, rule, name)

    def _fake_quant_output(self, outputs: Any, rule: Any) -> Any:
        return self._provider._output(outputs, rule, self.fixed_range_for_output)


def _kind(name: str, kind: str, inputs: Sequence[int] = (0,), fixed: Any = None) -> Any:
    fields = {"kind": kind, "input_idx": inputs, "fixed_range_for_output": fixed}
    doc = f"An op of kind {kind!r}: see providers/litert_kinds.py."
    return type(name, (QuantizedOp,), {**fields, "__doc__": doc})


OnlyInputOp = _kind("OnlyInputOp", "input")
OnlyOutputOp = _kind("OnlyOutputOp", "output")
NoQuantOp = _kind("NoQuantOp", "float")
Softmax = _kind("Softmax", "softmax", fixed="unit")
Tanh = _kind("Tanh", "both", fixed="signed")
Concatenate = _kind("Concatenate", "concatenate")
Take = _kind("Take", "take")
Silu = _kind("Silu", "silu")


class _Built(QuantizedOp):
    """An op that the provider handles where it is, and that is no pattern for others."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise ValueError(
            f"{self._op_full_name}: {type(self).__name__} is the provider's own, and for "
            "JAX's or Flax's function alone. Register functools.partial(QuantizedOp, "
            "input_idx=[...]), OnlyInputOp, OnlyOutputOp or NoQuantOp."
        )


_BUILT = [
    type(name, (_Built,), {"__doc__": _Built.__doc__})
    for name in (
        "BatchNorm", "Dropout", "Norm", "UfuncCall", "CustomJvpCall", "DotEinsumConv",
        "ModelInput", "FinalOutput", "PrimitiveBindOp",
    )
]  # fmt: skip
BatchNorm, Dropout, _Norm, UfuncCall, CustomJvpCall, DotEinsumConv = _BUILT[:6]
ModelInput, FinalOutput, PrimitiveBindOp = _BUILT[6:]


@functools.cache
def _defaults() -> dict[str, Any]:
    both = lambda *inputs, **k: functools.partial(QuantizedOp, input_idx=inputs, **k)
    one = both(0)
    return {
        "flax.linen.BatchNorm.__call__": BatchNorm,
        "flax.linen.Dropout.__call__": Dropout,
        "flax.linen.GroupNorm.__call__": _Norm,
        "flax.linen.LayerNorm.__call__": _Norm,
        "flax.linen.avg_pool": OnlyInputOp,
        "flax.linen.max_pool": OnlyInputOp,
        "flax.nnx.BatchNorm.__call__": BatchNorm,
        "jax._src.numpy.indexing.rewriting_take": Take,
        "jax.custom_jvp.__call__": CustomJvpCall,
        "jax.image.resize": one,
        "jax.lax.conv_general_dilated": DotEinsumConv,
        "jax.lax.dot_general": DotEinsumConv,
        "jax.nn.gelu": one,
        "jax.nn.leaky_relu": one,
        "jax.nn.silu": Silu,
        "jax.nn.softmax": Softmax,
        "jax.numpy.clip": OnlyOutputOp,
        "jax.numpy.concatenate": Concatenate,
        "jax.numpy.cos": NoQuantOp,
        "jax.numpy.dot": DotEinsumConv,
        "jax.numpy.einsum": DotEinsumConv,
        "jax.numpy.equal": functools.partial(NoQuantOp, input_idx=(0, 1)),
        "jax.numpy.floor": OnlyOutputOp,
        "jax.numpy.mean": one,
        "jax.numpy.pad": OnlyOutputOp,
        "jax.numpy.repeat": one,
        "jax.numpy.sin": NoQuantOp,
        "jax.numpy.sum": one,
        "jax.numpy.take": Take,
        "jax.numpy.tanh": Tanh,
        "jax.numpy.true_divide": both(0, 1, op_name="truediv"),
        "jax.numpy.ufunc.__call__": UfuncCall,
    }


def get_all_ops() -> dict[str, Any]:
    """Returns a new dict {dotted path of a function: what makes its handler}."""
    return dict(_defaults())


def handlers(provider: Any, ops: dict[str, Any]) -> dict[str, Callable]:
    """Returns the handlers of what was added to `ops`, or replaced in it.

    Raises:
        ValueError: an entry is gone, or one is replaced that the provider handles itself.
    """
    known = _defaults()
    if gone := sorted(known.keys() - ops.keys()):
        raise ValueError(
            f"_ops has no {gone[0]!r} any more: put NoQuantOp there for one that stays float."
        )
    by_name = {}
    for path, make in ops.items():
        before = known.get(path)
        if make is before:
            continue
        if before in _BUILT:
            raise ValueError(
                f"_ops[{path!r}] is replaced, but the provider handles it itself: override "
                "get_intercept_map."
            )
        name = path.rpartition(".")[2]
        is_ours = before is not None and name in FUNCTIONS
        by_name[name if is_ours else intercept.watch(path)] = make(
            op_full_name=path,
            get_rule_and_op_id_fn=provider._get_current_rule_and_op_id,
            fake_quant_fn=None,
        )
    return by_name
