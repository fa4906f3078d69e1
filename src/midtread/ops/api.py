"""The ops: JAX's contractions, taking QArrays where JAX takes arrays.

Each method reads JAX's arguments into Contractions and hands them to one of two
executors: `contract` for the functions at the end of this file, `train` for those of
`learn(recipe)`, which quantize their operands and have quantized gradients.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from midtread.numerics.qarray import QArray
from midtread.ops import einsum as einsum_
from midtread.ops.contraction import Contraction
from midtread.ops.contraction import dot as dot_contraction
from midtread.ops.conv import conv as conv_contraction
from midtread.ops.engine import Operand, contract
from midtread.ops.ragged import ragged as ragged_contraction
from midtread.ops.recipe import Recipe
from midtread.ops.training import Ranges, train

_MASK = jnp.dtype(jnp.bool_)


def _with_codes_of_masks(
    execute: Callable[..., jax.Array], c: Contraction, lhs: Operand, rhs: Operand
) -> jax.Array:
    """Executes with masks taken as codes, 0 and 1. Two masks give a mask, as in JAX."""
    is_mask = [not isinstance(x, QArray) and x.dtype == _MASK for x in (lhs, rhs)]
    if not any(is_mask):
        return execute(c, lhs, rhs)
    lhs, rhs = (
        lax.convert_element_type(x, jnp.int8) if mask else x
        for x, mask in zip((lhs, rhs), is_mask)
    )
    out = execute(c, lhs, rhs)
    return out != 0 if all(is_mask) and c.preferred is None else out


class Ops:
    """JAX's six contractions, with JAX's signatures, over one executor.

    `learn(recipe)` makes one; its methods are named and called as the functions of this
    module.
    """

    def __init__(self, execute: Callable[..., jax.Array]):
        self._execute = functools.partial(_with_codes_of_masks, execute)

    def dot_general(
        self,
        lhs: Operand,
        rhs: Operand,
        dimension_numbers: Any,
        precision: Any = None,
        preferred_element_type: Any = None,
        *,
        out_sharding: Any = None,
    ) -> jax.Array:
        """Multiplies as `lax.dot_general` does, arrays or QArrays.

        >>> import midtread as mt
        >>> w = mt.quantize(jnp.ones((8, 4)), "int8", channelwise_axes=[1])
        >>> mt.dot_general(jnp.ones((2, 8)), w, (((1,), (0,)), ((), ()))).shape
        (2, 4)

        Args:
            lhs, rhs: arrays or QArrays.
            dimension_numbers: ((axes summed of lhs, of rhs), (batch axes of lhs, of rhs)).
            precision, preferred_element_type, out_sharding: as JAX takes them.

        Returns:
            A float array. Scales are applied to the sum in float32, which is cast once.

        Raises:
            TypeError: Two axes that are paired differ in extent.
            ValueError: The dimension numbers do not fit the operands.
        """
        lhs, rhs = _arrays(lhs, rhs)
        options = _options(precision, preferred_element_type, out_sharding)
        c = dot_contraction(dimension_numbers, lhs.ndim, rhs.ndim, **options)
        _check_extents(c, lhs, rhs)
        return self._execute(c, lhs, rhs)

    def dot(
        self,
        a: Operand,
        b: Operand,
        *,
        precision: Any = None,
        preferred_element_type: Any = None,
        out_sharding: Any = None,
    ) -> jax.Array:
        """Multiplies as `jnp.dot` does, arrays or QArrays.

        >>> import midtread as mt
        >>> w = mt.quantize(jnp.ones((8, 4)), "int4", channelwise_axes=[1])
        >>> mt.dot(jnp.ones((2, 8)), w).shape
        (2, 4)

        Args:
            a, b: arrays or QArrays; the last axis of a is summed with the last but one of b.
            precision, preferred_element_type, out_sharding: as JAX takes them.

        Returns:
            A float array.

        Raises:
            TypeError: The summed axes differ in extent.
        """
        a, b = _arrays(a, b)
        if a.ndim == 0 or b.ndim == 0:
            numbers = (((), ()), ((), ()))
        else:
            numbers = (((a.ndim - 1,), (max(b.ndim - 2, 0),)), ((), ()))
        return self.dot_general(
            a,
            b,
            numbers,
            precision=precision,
            preferred_element_type=preferred_element_type,
            out_sharding=out_sharding,
        )

    def einsum(
        self,
        subscripts: Any,
        /,
        *operands: Any,
        out: None = None,
        optimize: Any = "auto",
        precision: Any = None,
        preferred_element_type: Any = None,
        out_sharding: Any = None,
    ) -> jax.Array:
        """Multiplies as `jnp.einsum` does, any number of arrays or QArrays.

        >>> import midtread as mt
        >>> w = mt.quantize(jnp.ones((8, 2, 4)), "int8", channelwise_axes=[1, 2])
        >>> mt.einsum("btd,dnh->btnh", jnp.ones((1, 3, 8)), w).shape
        (1, 3, 2, 4)

        Args:
            subscripts: "btd,dnh->btnh", or the other spelling that jnp.einsum takes.
            operands: arrays or QArrays.
            out: not taken; it is there because JAX's signature has it.
            optimize: the order of pairs, as JAX takes it.
            precision, preferred_element_type, out_sharding: as JAX takes them.

        Returns:
            A float array.

        Raises:
            NotImplementedError: `out` is given: JAX arrays are immutable.
            ValueError: The subscripts do not fit the operands.
        """
        if out is not None:
            raise NotImplementedError(
                "einsum cannot write into `out`: JAX arrays are immutable."
            )
        options = _options(precision, preferred_element_type, out_sharding)
        return einsum_.einsum(self._execute, subscripts, operands, optimize, options)

    def conv_general_dilated(
        self,
        lhs: Operand,
        rhs: Operand,
        window_strides: Sequence[int],
        padding: Any,
        lhs_dilation: Sequence[int] | None = None,
        rhs_dilation: Sequence[int] | None = None,
        dimension_numbers: Any = None,
        feature_group_count: int = 1,
        batch_group_count: int = 1,
        precision: Any = None,
        preferred_element_type: Any = None,
        out_sharding: Any = None,
    ) -> jax.Array:
        """Convolves as `lax.conv_general_dilated` does, arrays or QArrays.

        >>> import midtread as mt
        >>> w = mt.quantize(jnp.ones((3, 3, 2, 4)), "int8", channelwise_axes=[3])
        >>> names = ("NHWC", "HWIO", "NHWC")
        >>> x = jnp.ones((1, 5, 5, 2))
        >>> mt.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=names).shape
        (1, 5, 5, 4)

        Args:
            lhs, rhs: arrays or QArrays. Scales may vary along batch and features, not
                along the window or the summed features.
            window_strides, padding, lhs_dilation, rhs_dilation, dimension_numbers,
                feature_group_count, batch_group_count: as JAX takes them.
            precision, preferred_element_type, out_sharding: as JAX takes them.

        Returns:
            A float array.

        Raises:
            ValueError: A scale varies along an axis that a convolution cannot tile.
        """
        lhs, rhs = _arrays(lhs, rhs)
        options = _options(precision, preferred_element_type, out_sharding)
        c = conv_contraction(
            lhs.shape,
            rhs.shape,
            window_strides,
            padding,
            lhs_dilation,
            rhs_dilation,
            dimension_numbers,
            feature_group_count,
            batch_group_count,
            **options,
        )
        return self._execute(c, lhs, rhs)

    def ragged_dot(
        self,
        lhs: Operand,
        rhs: Operand,
        group_sizes: jax.Array,
        precision: Any = None,
        preferred_element_type: Any = None,
        group_offset: jax.Array | None = None,
        out_sharding: Any = None,
    ) -> jax.Array:
        """Multiplies rows in groups as `lax.ragged_dot` does: [m, k] x [g, k, n] -> [m, n].

        >>> import midtread as mt
        >>> w = mt.quantize(jnp.ones((2, 8, 4)), "int8", channelwise_axes=[0, 2])
        >>> mt.ragged_dot(jnp.ones((5, 8)), w, jnp.array([3, 2])).shape
        (5, 4)

        Args:
            lhs, rhs: arrays or QArrays.
            group_sizes: [g], how many of the m rows belong to each matrix of rhs, in order.
            precision, preferred_element_type, out_sharding: as JAX takes them.
            group_offset: not taken; it is there because JAX's signature has it.

        Returns:
            A float array.

        Raises:
            NotImplementedError: `group_offset` is given.
        """
        numbers = lax.RaggedDotDimensionNumbers(
            dot_dimension_numbers=(((1,), (1,)), ((), ())),
            lhs_ragged_dimensions=[0],
            rhs_group_dimensions=[0],
        )
        return self.ragged_dot_general(
            lhs, rhs, group_sizes, numbers, precision, preferred_element_type, group_offset,
            out_sharding,
        )  # fmt: skip

    def ragged_dot_general(
        self,
        lhs: Operand,
        rhs: Operand,
        group_sizes: jax.Array,
        ragged_dot_dimension_numbers: lax.RaggedDotDimensionNumbers,
        precision: Any = None,
        preferred_element_type: Any = None,
        group_offset: jax.Array | None = None,
        out_sharding: Any = None,
    ) -> jax.Array:
        """Multiplies rows in groups as `lax.ragged_dot_general` does, arrays or QArrays.

        >>> numbers = lax.RaggedDotDimensionNumbers((((1,), (1,)), ((), ())), [0], [0])
        >>> import midtread as mt
        >>> x, w = jnp.ones((5, 8)), mt.quantize(jnp.ones((2, 8, 4)), "int8")
        >>> mt.ragged_dot_general(x, w, jnp.array([3, 2]), numbers).shape
        (5, 4)

        Args:
            lhs, rhs: arrays or QArrays.
            group_sizes: how many rows belong to each group, in order.
            ragged_dot_dimension_numbers: which axes are summed, batched, ragged and grouped.
            precision, preferred_element_type, out_sharding: as JAX takes them.
            group_offset: not taken; it is there because JAX's signature has it.

        Returns:
            A float array.

        Raises:
            NotImplementedError: `group_offset` is given.
        """
        if group_offset is not None:
            raise NotImplementedError(
                "group_offset is not implemented, in JAX neither: slice rhs and group_sizes."
            )
        lhs, rhs = _arrays(lhs, rhs)
        options = _options(precision, preferred_element_type, out_sharding)
        c = ragged_contraction(
            ragged_dot_dimension_numbers, lhs.shape, rhs.shape, group_sizes, **options
        )
        _check_extents(c, lhs, rhs)
        return self._execute(c, lhs, rhs)


def _options(precision, preferred, out_sharding) -> dict[str, Any]:
    """Names the options that every contraction has."""
    preferred = None if preferred is None else jnp.dtype(preferred)
    return {
        "precision": precision,
        "preferred": preferred,
        "out_sharding": out_sharding,
    }


def _arrays(*operands: Any) -> list[Operand]:
    return [
        x if isinstance(x, QArray | jax.Array) else jnp.asarray(x) for x in operands
    ]


def _check_extents(c, lhs: Operand, rhs: Operand) -> None:
    left, right = dict(zip(c.lhs, lhs.shape)), dict(zip(c.rhs, rhs.shape))
    for label in left.keys() & right.keys():
        if left[label] != right[label]:
            raise TypeError(
                f"{c.name}: axis {c.lhs.index(label)} of lhs {lhs.shape} has extent "
                f"{left[label]}, axis {c.rhs.index(label)} of rhs {rhs.shape} has {right[label]}."
            )


_serve = Ops(contract)

dot_general = _serve.dot_general
dot = _serve.dot
einsum = _serve.einsum
conv_general_dilated = _serve.conv_general_dilated
ragged_dot = _serve.ragged_dot
ragged_dot_general = _serve.ragged_dot_general


def learn(
    recipe: Recipe,
    *,
    key: jax.Array | None = None,
    ranges: Ranges | None = None,
    site: str = "",
) -> Ops:
    """Makes the ops of a training recipe: drop-in replacements with quantized gradients.

    >>> from midtread.ops.recipe import recipe
    >>> ops = learn(recipe("qwix_int8"))
    >>> x, w = jnp.ones((2, 4)), jnp.ones((4, 3))
    >>> jax.grad(lambda w: ops.dot(x, w).sum())(w).shape
    (4, 3)

    Args:
        recipe: how the six operands of the three matmuls are quantized.
        key: for stochastic rounding and rotations; fold the training step into it.
        ranges: static or delayed ranges of lhs, rhs and g.
        site: a name that sets this op's random numbers apart from another's.

    Returns:
        An object with the methods dot_general, dot, einsum, conv_general_dilated,
        ragged_dot and ragged_dot_general.

    Raises:
        ValueError: When an op runs: the recipe is random and no key was given, or it
            tiles an axis that the op cannot tile.
    """
    return Ops(lambda c, lhs, rhs: train(c, recipe, lhs, rhs, ranges, key, site))
