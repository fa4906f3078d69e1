"""Boxes: a quantized parameter in a model's parameter tree.

`WithAux(array, how)` holds a QArray and the Spec that made it, so that a tree of shapes
alone says how every parameter is to be quantized (`quantize_params`). In NNX its leaves are
Variables. It looks enough like a parameter to pass through a layer's own code on the way
to the matmul, where the provider takes it out.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from midtread.model import flaxlib, intercept
from midtread.numerics.spec import Spec
from midtread.ops.lookup import look_up


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["array"], meta_fields=["how"]
)
@dataclasses.dataclass(frozen=True)
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

    is_boxed = True  # model/intercept.py routes matmuls of boxed operands

    @property
    def value(self) -> "WithAux":
        return flaxlib.unbox(self)

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

    def astype(self, dtype) -> "WithAux":
        cast = flaxlib.unbox(self.array).astype(dtype)
        return self.replace(array=flaxlib.like(self.array, cast))

    def reshape(self, *shape) -> "WithAux":
        shape = (
            tuple(shape[0])
            if len(shape) == 1 and not isinstance(shape[0], int)
            else shape
        )
        if tuple(self.shape) != tuple(shape):
            raise ValueError(
                "PTQ weights should already have the target shape: this one has "
                f"{self.shape}, and {shape} is requested."
            )
        return self

    def __getitem__(self, index: Any) -> Any:
        if index is Ellipsis:
            return self.value
        ids = intercept.row_indices(index)
        if ids is not None:  # a look-up: rows, no longer a parameter
            array = flaxlib.unbox(self.array)
            ids = jnp.where(ids < 0, ids + array.shape[0], ids)
            return look_up(array, ids, mode="clip")
        return self.value.replace(array=flaxlib.unbox(self.array)[index])

    # Turned around, the codes alone go on: `how` is about the parameter as it is stored.
    def transpose(self, *axes) -> Any:
        return flaxlib.unbox(self.array).transpose(*axes)

    def swapaxes(self, axis1: int, axis2: int) -> Any:
        return flaxlib.unbox(self.array).swapaxes(axis1, axis2)

    T = property(lambda self: flaxlib.unbox(self.array).T)
    mT = property(lambda self: flaxlib.unbox(self.array).mT)

    def __array__(self, *_, **__):
        raise TypeError(
            f"a parameter is quantized ({self.how.format.name} {list(self.shape)}) and got where "
            "an array is wanted: run the model under mt.PtqProvider, or mt.dequantize it."
        )

    def __rmatmul__(self, other: Any) -> Any:
        return jnp.matmul(other, self)

    def __matmul__(self, other: Any) -> Any:
        return jnp.matmul(self, other)


nnx.register_data_type(WithAux)
