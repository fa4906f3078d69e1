"""Conv: lax.conv_general_dilated, with strides, dilations, padding and groups.

Labels: n batch, c input channels, o output channels, s/w/p positions in the input, the
window and the output. n and o are kept; c is summed together with the window, so no
tile fits it and one scale per image and per output channel is the finest there is.

The gradients are convolutions again. With L, R, G the spatial extents of lhs, rhs and
out after dilation and lo the padding before:

    dlhs = conv(g dilated by the strides, window reversed)  pad (R-1-lo, L+lo-G)
    drhs = conv(lhs, g dilated by the strides)              pad (lo, G+R-1-L-lo)

Channel groups of the forward are batch groups of drhs and the reverse; for dlhs the
groups move from the window's output channels to its input channels.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from midtread.ops.contraction import META, Contraction

_GEOMETRY = (
    "numbers", "strides", "padding", "lhs_dilation", "rhs_dilation", "feature_groups",
    "batch_groups", "lhs_shape", "rhs_shape", "window_groups", "out_groups", "reverse",
)  # fmt: skip


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=[], meta_fields=[*META, *_GEOMETRY]
)
@dataclasses.dataclass(frozen=True)
class Conv(Contraction):
    """A convolution, with lax.conv_general_dilated's arguments, or a transposed one."""

    numbers: Any = None  # lax.ConvDimensionNumbers
    strides: tuple[int, ...] = ()
    padding: tuple[tuple[int, int], ...] = ()
    lhs_dilation: tuple[int, ...] = ()
    rhs_dilation: tuple[int, ...] = ()
    feature_groups: int = 1
    batch_groups: int = 1
    lhs_shape: tuple[int, ...] = ()
    rhs_shape: tuple[int, ...] = ()
    # Only a transposed convolution has these:
    window_groups: int = 1  # groups to move from the window's first to its second axis
    out_groups: int = 1  # groups to move from the output's channels to its batch
    reverse: bool = False  # the window runs backwards

    name = "conv_general_dilated"
    can_tile = False

    def ones(self, operand, side):
        if self.feature_groups * self.batch_groups > 1:
            return jnp.ones(operand.shape, operand.dtype)
        return super().ones(operand, side)

    def run(self, lhs, rhs, accumulate=None, by: Any = lax):
        out_axis, in_axis, *window = self.numbers.rhs_spec
        if self.window_groups > 1:
            # The window is stored as (o, c / groups), and its spec is already swapped.
            rhs = _move_groups(rhs, in_axis, out_axis, self.window_groups)
        if self.reverse:
            rhs = lax.rev(rhs, window)
        out = by.conv_general_dilated(
            lhs,
            rhs,
            self.strides,
            self.padding,
            self.lhs_dilation,
            self.rhs_dilation,
            self.numbers,
            self.feature_groups,
            self.batch_groups,
            precision=self.precision,
            preferred_element_type=accumulate or self.preferred,
            out_sharding=self.out_sharding,
        )
        if self.out_groups > 1:
            batch, channels, *_ = self.numbers.out_spec
            out = _move_groups(out, channels, batch, self.out_groups)
        return out

    def _extents(self):
        """Returns the dilated spatial extents of lhs, rhs and out."""
        of = lambda shape, spec: [shape[a] for a in spec[2:]]
        dilate = lambda sizes, by: [(n - 1) * d + 1 for n, d in zip(sizes, by)]
        lhs = dilate(of(self.lhs_shape, self.numbers.lhs_spec), self.lhs_dilation)
        rhs = dilate(of(self.rhs_shape, self.numbers.rhs_spec), self.rhs_dilation)
        padded = (n + lo + hi for n, (lo, hi) in zip(lhs, self.padding))
        sizes = [(n - r) // s + 1 for n, r, s in zip(padded, rhs, self.strides)]
        return lhs, rhs, dilate(sizes, self.strides)

    @property
    def dlhs(self) -> "Conv":
        lhs_spec, rhs_spec, out_spec = self.numbers
        extents = zip(*self._extents(), self.padding)
        groups = max(self.feature_groups, self.batch_groups)
        stuck = self.stuck | ({"c"} if groups > 1 else set())
        return self.transposed(
            self.out,
            self.rhs,
            self.lhs,
            (),
            stuck=frozenset(stuck),
            numbers=lax.ConvDimensionNumbers(out_spec, _swap(rhs_spec), lhs_spec),
            strides=self.lhs_dilation,
            padding=tuple((r - 1 - lo, n + lo - g) for n, r, g, (lo, _) in extents),
            lhs_dilation=self.strides,
            rhs_dilation=self.rhs_dilation,
            feature_groups=groups,
            window_groups=groups,
            out_groups=self.batch_groups,
            reverse=True,
        )

    @property
    def drhs(self) -> "Conv":
        lhs_spec, rhs_spec, out_spec = map(_swap, self.numbers)
        extents = zip(*self._extents(), self.padding)
        grouped = self.feature_groups > 1 or self.batch_groups > 1
        stuck = self.stuck | ({"c"} if grouped else set())
        return self.transposed(
            self.lhs,
            self.out,
            self.rhs,
            (),
            stuck=frozenset(stuck),
            numbers=lax.ConvDimensionNumbers(lhs_spec, out_spec, rhs_spec),
            strides=self.rhs_dilation,
            padding=tuple((lo, g + r - 1 - n - lo) for n, r, g, (lo, _) in extents),
            lhs_dilation=self.lhs_dilation,
            rhs_dilation=self.strides,
            feature_groups=self.batch_groups,
            batch_groups=self.feature_groups,
        )


def _swap(spec):
    return (spec[1], spec[0], *spec[2:])


def _move_groups(x: jax.Array, source: int, target: int, groups: int) -> jax.Array:
    """Splits `groups` off the front of one axis and puts them before another."""
    shape = list(x.shape)
    shape[source : source + 1] = [groups, shape[source] // groups]
    x = jnp.moveaxis(jnp.moveaxis(x.reshape(shape), source, -1), -1, target)
    shape = list(x.shape)
    shape[target : target + 2] = [groups * shape[target + 1]]
    return x.reshape(shape)


def conv(lhs_shape, rhs_shape, strides, padding, lhs_dilation, rhs_dilation, numbers,
         feature_groups, batch_groups, **options) -> Conv:  # fmt: skip
    """Builds the contraction that lax.conv_general_dilated's arguments describe."""
    numbers = lax.conv_dimension_numbers(lhs_shape, rhs_shape, numbers)
    rank = len(lhs_shape) - 2
    ones = (1,) * rank
    lhs_dilation = tuple(lhs_dilation or ones)
    rhs_dilation = tuple(rhs_dilation or ones)
    if isinstance(padding, str):
        if any(d > 1 for d in lhs_dilation):
            raise ValueError(
                f"padding={padding!r} has no meaning with lhs_dilation={lhs_dilation}: "
                "give (before, after) for each spatial axis."
            )
        window = [rhs_shape[a] for a in numbers.rhs_spec[2:]]
        window = [(n - 1) * d + 1 for n, d in zip(window, rhs_dilation)]
        image = [lhs_shape[a] for a in numbers.lhs_spec[2:]]
        padding = lax.padtype_to_pads(image, window, strides, padding)

    def labels(spec, first, second, position):
        named = {spec[0]: first, spec[1]: second}
        named |= {a: f"{position}{i}" for i, a in enumerate(spec[2:])}
        return tuple(named[a] for a in range(rank + 2))

    return Conv(
        labels(numbers.lhs_spec, "n", "c", "s"),
        labels(numbers.rhs_spec, "o", "c", "w"),
        labels(numbers.out_spec, "n", "o", "p"),
        stuck=frozenset({"n"} if batch_groups > 1 else ()),
        numbers=numbers,
        strides=tuple(strides),
        padding=tuple((int(lo), int(hi)) for lo, hi in padding),
        lhs_dilation=lhs_dilation,
        rhs_dilation=rhs_dilation,
        feature_groups=feature_groups,
        batch_groups=batch_groups,
        lhs_shape=tuple(lhs_shape),
        rhs_shape=tuple(rhs_shape),
        **options,
    )
