"""Boxes: a quantized parameter in a model's parameter tree.

`WithAux(array, how)` holds a QArray and the Spec that made it, so that a tree of shapes
alone says how every parameter is to be quantized (`quantize_params`). In NNX its leaves are
Variables. It looks enough like a parameter to pass through a layer's own code on the way
to the matmul, where the provider takes it out.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx, serialization

from midtread.model import flaxlib, intercept, running
from midtread.numerics.qarray import QArray, dequantize
from midtread.numerics.spec import Spec
from midtread.ops.api import dot, einsum
from midtread.ops.lookup import look_up


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["array"], meta_fields=["how"]
)
@dataclasses.dataclass(frozen=True, eq=False)
class WithAux:
    """A quantized parameter in a model's parameter tree, with the Spec that made it.

    >>> from midtread.numerics.qarray import quantize
    >>> WithAux(quantize(jnp.ones((4, 2)), "int8"), Spec("int8")).shape
    (4, 2)

    Args:
        array: a QArray, or the scale of an activation. In NNX its leaves are Variables.
        how: the Spec.
    """

    array: Any
    how: Spec

    is_boxed = True  # model/intercept.py looks for it among operands

    def __repr__(self) -> str:
        return f"WithAux(array={self.array!r})"

    @property
    def value(self) -> "WithAux":
        array = flaxlib.unbox(self.array)
        return self if array is self.array else self.replace(array=array)

    @property
    def shape(self) -> tuple[int, ...]:
        return flaxlib.unbox(self.array).shape

    @property
    def ndim(self) -> int:
        return flaxlib.unbox(self.array).ndim

    @property
    def dtype(self):
        return flaxlib.unbox(self.array).dtype

    def replace(self, **changes) -> "WithAux":
        return dataclasses.replace(self, **changes)

    def astype(self, dtype, copy: bool = False, device: Any = None) -> Any:
        if device is not None:
            return self.__jax_array__().astype(dtype, copy=copy, device=device)
        cast = flaxlib.unbox(self.array).astype(dtype)
        return self.replace(array=flaxlib.like(self.array, cast))

    def reshape(self, *shape) -> "WithAux":
        shape = (
            tuple(shape[0])
            if len(shape) == 1 and not isinstance(shape[0], int)
            else shape
        )
        known = [n for n in shape if n != -1]
        if len(shape) == self.ndim and all(
            n in (-1, m) for n, m in zip(shape, self.shape)
        ):
            return self
        if math.prod(known) == 0 or self.size % math.prod(known):
            raise ValueError(
                "PTQ weights should already have the target shape: this one has "
                f"{self.shape}, and {shape} is requested."
            )
        try:
            return self._moved(lambda codes: codes.reshape(shape))
        except ValueError:  # its tiles do not allow that: then the values
            return self.__jax_array__().reshape(shape)

    def _moved(self, move: Callable[[Any], Any]) -> "WithAux":
        """Its codes, arranged otherwise: still a box, whose values can be asked for."""
        return self.value.replace(array=move(flaxlib.unbox(self.array)))

    def squeeze(self, axis: Any = None) -> Any:
        np.squeeze(np.broadcast_to(0, self.shape), axis)  # refuses what cannot be
        axes = range(self.ndim) if axis is None else np.atleast_1d(axis) % self.ndim
        gone = [a for a in axes if self.shape[a] == 1]
        return self[tuple(0 if i in gone else slice(None) for i in range(self.ndim))]

    def ravel(self) -> Any:
        return self.reshape(-1)

    def __getitem__(self, index: Any) -> Any:
        if index is Ellipsis:
            return self.value
        ids = intercept.row_indices(index)
        if ids is not None:  # a look-up: rows, no longer a parameter
            array = flaxlib.unbox(self.array)
            ids = jnp.where(ids < 0, ids + array.shape[0], ids)
            return look_up(array, ids, mode="clip")
        try:
            return self._moved(lambda codes: codes[index])
        except (ValueError, TypeError):  # what codes and scales cannot follow
            return self.__jax_array__()[index]

    # `how` stays that of the parameter as it is stored.
    def transpose(self, *axes) -> "WithAux":
        return self._moved(lambda codes: codes.transpose(*axes))

    def swapaxes(self, axis1: int, axis2: int) -> "WithAux":
        return self._moved(lambda codes: codes.swapaxes(axis1, axis2))

    T = property(lambda self: self._moved(lambda codes: codes.T))
    mT = property(lambda self: self._moved(lambda codes: codes.mT))

    def __iter__(self) -> Any:
        return (self[i] for i in range(self.shape[0]))

    def __len__(self) -> int:
        return self.shape[0]

    def get_value(self) -> "WithAux":
        return self.value

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def __getattr__(self, name: str) -> Any:
        """What else an array has, `w.sum()` or `w.at`: of its values, while a model runs."""
        if name.startswith("_") or not hasattr(jax.Array, name) or not _serving():
            raise AttributeError(f"a WithAux has no attribute {name!r}.")
        return getattr(self.__jax_array__(), name)

    def __eq__(self, other: object) -> Any:
        """Compares values while a model runs, as arrays do; else what the boxes hold."""
        if _serving():
            return self.__jax_array__() == other
        if not isinstance(other, WithAux):
            return NotImplemented
        return (self.array, self.how) == (other.array, other.how)

    def __ne__(self, other: object) -> Any:
        return self.__jax_array__() != other if _serving() else not self == other

    __hash__ = object.__hash__  # arrays have none of their own

    def __jax_array__(self) -> jax.Array:
        """Its values, for what is no matmul in a model under a provider that serves: there
        functions of a parameter are computed."""
        serving = _serving()
        if not serving:
            self.__array__()
        array = flaxlib.unbox(self.array)
        values = dequantize(array) if isinstance(array, QArray) else array
        inner = intercept.unwrap(values)
        intercept.remember(inner)
        for call in serving:  # a matmul of a part of these takes that part of the codes
            call.notes.setdefault("opened", {})[id(inner)] = inner, self
        return values

    def __array__(self, *_, **__):
        raise TypeError(
            f"a parameter is quantized ({self.how.format.name} {list(self.shape)}) and got where "
            "an array is wanted: run the model under mt.PtqProvider, with methods=(...) of "
            "mt.quantize_model for another than __call__, or mt.dequantize it."
        )

    def __rmatmul__(self, other: Any) -> Any:
        return jnp.matmul(other, self)

    def __matmul__(self, other: Any) -> Any:
        return jnp.matmul(self, other)


def _serving() -> list[running.Call]:
    """Returns the calls at work whose provider serves boxes."""
    return [a for a in running.here.active if "asarray" in a.handlers]


def _product(a: Any, b: Any) -> Any:
    """Computes `a @ b` where one is a QArray: by the provider while a model runs, else by
    the op."""
    if running.any_enabled():
        return jnp.matmul(a, b)
    if a.ndim == 0 or b.ndim == 0:
        raise ValueError("a scalar has no axis for @ to sum over: write mt.dot or *.")
    if b.ndim <= 2:
        return dot(a, b)
    left = "i" if a.ndim > 1 else ""
    return einsum(f"...{left}j,...jk->...{left}k", a, b)


# Here and not in numerics/qarray.py, which knows neither ops nor models.
QArray.__matmul__ = _product  # pyright: ignore[reportAttributeAccessIssue]
QArray.__rmatmul__ = lambda self, other: _product(other, self)  # pyright: ignore


def _of_values(name: str) -> Callable:
    """Returns an operator of arrays, on the values of a box."""

    def method(self: WithAux, *others: Any) -> Any:
        return getattr(self.__jax_array__(), name)(*others)

    return method


for _name in ("neg", "pos", "abs", "add", "sub", "mul", "truediv", "floordiv", "mod",
              "pow", "radd", "rsub", "rmul", "rtruediv", "rfloordiv", "rmod", "rpow", "divmod",
              "rdivmod", "lt", "le", "gt", "ge"):  # fmt: skip
    setattr(WithAux, f"__{_name}__", _of_values(f"__{_name}__"))

nnx.register_data_type(WithAux)


# flax.serialization: the arrays by name; what they mean is known from the target.


def _as_bytes(part: Any) -> Any:
    """MessagePack knows NumPy's own dtypes and bfloat16; others of a byte go as uint8.

    Flax also asks for a state dict inside traces: there a part has no bytes yet.
    """
    has_bytes = isinstance(part, jax.Array | np.ndarray)
    has_bytes = has_bytes and not isinstance(part, jax.core.Tracer)
    return np.asarray(part).view(np.uint8) if has_bytes and _is_foreign(part) else part


def _is_foreign(part: Any) -> bool:
    dtype = np.dtype(part.dtype)
    return dtype.itemsize == 1 and dtype.name not in ("int8", "uint8", "bool")


def _parts_of(q: QArray) -> dict[str, Any]:
    names = [
        f.name for f in dataclasses.fields(q) if f.name not in ("qtype", "logical")
    ]
    return {n: getattr(q, n) for n in names if getattr(q, n) is not None}


def _restored(target: QArray, state: dict[str, Any]) -> QArray:
    parts = _parts_of(target)
    if state.keys() != parts.keys():
        raise ValueError(
            f"a QArray of {sorted(parts)} is to be restored from {sorted(state)}: was it "
            "saved in another format?"
        )
    return target.replace(
        **{name: _from_bytes(state[name], part) for name, part in parts.items()}
    )


def _from_bytes(stored: Any, part: Any) -> Any:
    """Returns what `_as_bytes` stored, in the dtype of the part that it goes to."""
    is_bytes = _is_foreign(part) and stored.dtype == np.uint8
    return np.asarray(stored).view(part.dtype) if is_bytes else stored


serialization.register_serialization_state(
    QArray,
    lambda q: {name: _as_bytes(part) for name, part in _parts_of(q).items()},
    _restored,
)
serialization.register_serialization_state(
    WithAux,
    lambda box: serialization.to_state_dict(box.array),
    lambda box, state: box.replace(
        array=serialization.from_state_dict(box.array, state)
    ),
)
