"""Matmuls: Qwix's ops and training ops, on the one engine.

The three Qt configs name the parts of a `model.rules.Step` as Qwix does, and hold the
callables that Qwix keeps in them: functions that turn the current range of an operand into
the one to use, and the noise of gradients.
"""

import dataclasses
import functools
import string
import types
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from midtread.interop.qwix.arrays import HowToQuantize, NoiseFn, how_of
from midtread.model.rules import PARTS, Step
from midtread.numerics.dtypes import is_wide
from midtread.numerics.platforms import platform
from midtread.numerics.qarray import QArray, calibrate
from midtread.numerics.spec import Spec
from midtread.ops import api, engine, unrolled
from midtread.ops import einsum as einsum_
from midtread.ops.api import Ops
from midtread.ops.contraction import Contraction
from midtread.ops.contraction import dot as dot_contraction
from midtread.ops.engine import Operand
from midtread.ops.recipe import Recipe
from midtread.ops.training import Ranges, train_inline

Collect = Callable[[Any], Any]


def replace_min_tile(value: int | None) -> None:
    engine.MIN_TILE = 128 if value is None else value


# --- ops --------------------------------------------------------------------------------------


def dot(
    a: Operand,
    b: Operand,
    precision: Any = None,
    preferred_element_type: Any = None,
    out_sharding: Any = None,
    *,
    _qwix_dot_general: Callable[..., jax.Array] = api.dot_general,
) -> jax.Array:
    """jnp.dot of arrays or QArrays, through a dot_general of one's own if given."""
    ops: Any = types.SimpleNamespace(dot_general=_qwix_dot_general)
    how = {
        "preferred_element_type": preferred_element_type,
        "out_sharding": out_sharding,
    }
    return Ops.dot(ops, a, b, precision=precision, **how)


def einsum(
    *args: Any,
    _qwix_dot_general: Callable[..., jax.Array] = api.dot_general,
    preferred_element_type: Any = None,
    **options: Any,
) -> jax.Array:
    """jnp.einsum of arrays or QArrays, through a dot_general of one's own if given."""
    options["preferred_element_type"] = preferred_element_type
    if _qwix_dot_general is api.dot_general:
        return api.einsum(*args, **options)

    def execute(c, lhs, rhs):
        numbers, order = c.dimension_numbers
        preferred = c.preferred or engine.result_dtype(lhs, rhs)
        how = {"precision": c.precision, "out_sharding": c.out_sharding}
        how = {k: v for k, v in how.items() if v is not None}
        out = _qwix_dot_general(
            lhs, rhs, numbers, preferred_element_type=preferred, **how
        )
        return out.transpose(order)

    return Ops(execute).einsum(*args, **options)


def loop_dot_general(
    lhs: Operand,
    rhs: Operand,
    dimension_numbers: Any,
    preferred_element_type: Any = None,
    **options: Any,
) -> jax.Array:
    """dot_general inside a Pallas kernel."""
    options["preferred_element_type"] = preferred_element_type
    return unrolled.dot_general(lhs, rhs, dimension_numbers, **options)


loop_dot = functools.partial(dot, _qwix_dot_general=loop_dot_general)
loop_einsum = functools.partial(einsum, _qwix_dot_general=loop_dot_general)


def ragged_dot_general(
    lhs: Operand,
    rhs: Operand,
    group_sizes: jax.Array,
    dimension_numbers: jax.lax.RaggedDotDimensionNumbers,
    precision: Any = None,
    preferred_element_type: Any = None,
    group_offset: jax.Array | None = None,
) -> jax.Array:
    return api.ragged_dot_general(
        lhs, rhs, group_sizes, dimension_numbers, precision, preferred_element_type,
        group_offset,
    )  # fmt: skip


# --- how an operand of an op is quantized -----------------------------------------------------


def _how(c: Contraction, for_lhs: bool, tile_size: Any, fields: dict) -> HowToQuantize:
    tiles = tile_size if isinstance(tile_size, dict) else {"summed_last": tile_size}
    tiles = tiles if tile_size else {}
    method = fields.get("calibration_method", "absmax")
    spec = Spec(fields["qtype"], ("kept",), tiles, method)
    return how_of(c.number_axes(spec, "lhs" if for_lhs else "rhs", ()), **fields)


def how_in_dot_general(
    *,
    dimension_numbers: Any,
    ndims: tuple[int, int],
    for_lhs: bool,
    tile_size: Any,
    **fields: Any,
) -> HowToQuantize:
    return _how(dot_contraction(dimension_numbers, *ndims), for_lhs, tile_size, fields)


def how_in_einsum(
    *, einsum_str: str, ndims: tuple[int, int], for_lhs: bool, tile_size: Any, **fields
) -> HowToQuantize:
    info = EinsumInfo.parse(einsum_str, ndims)
    return _how(info.contraction, for_lhs, tile_size, fields)


def how_in_conv(
    *, dimension_numbers: jax.lax.ConvDimensionNumbers, for_lhs: bool, **fields: Any
) -> HowToQuantize:
    """Per image for lhs, per output feature for rhs."""
    of = dimension_numbers.lhs_spec if for_lhs else dimension_numbers.rhs_spec
    return HowToQuantize(channelwise_axes=[of[0]], tiled_axes={}, **fields)


@dataclasses.dataclass
class EinsumInfo:
    """An einsum of two operands: one letter per axis."""

    lhs: str
    rhs: str
    out: str

    @classmethod
    def parse(cls, einsum_str: str, ndims: Sequence[int] | None = None) -> "EinsumInfo":
        """With `ndims` the string may have an ellipsis or no output."""
        if ndims is None:
            ranks = [len(t.strip()) for t in einsum_str.partition("->")[0].split(",")]
            plain = einsum_str.replace(" ", "").replace("->", "").replace(",", "")
            if len(ranks) != 2 or "->" not in einsum_str or not plain.isalpha():
                raise NotImplementedError(
                    f'Unsupported einsum string: "{einsum_str}". Two operands and an '
                    'output, as in "abc,bcd->acd"; pass ndims for anything shorter.'
                )
        else:
            ranks = list(ndims)
        shapes = [jax.ShapeDtypeStruct((1,) * n, jnp.float32) for n in ranks]
        try:
            terms, out, _ = einsum_.parse(einsum_str, shapes)
        except ValueError as error:
            raise NotImplementedError(str(error)) from None
        if len(terms) != 2:
            raise NotImplementedError(
                f'"{einsum_str}" has {len(terms)} operands, not 2.'
            )
        new = _letters_of_dots((*terms, out), einsum_str, ranks)
        return cls(*(term.translate(new) for term in (*terms, out)))

    @property
    def contraction(self):
        return einsum_.binary(self.lhs, self.rhs, self.out, {})

    @property
    def batch_chars(self) -> list[str]:
        return sorted({*self.lhs} & {*self.rhs} & {*self.out})

    @property
    def contract_chars(self) -> list[str]:
        return sorted({*self.lhs} & {*self.rhs} - {*self.out})

    @property
    def dimension_numbers(self):
        axes = lambda term, chars: tuple(term.index(x) for x in chars)
        summed, batch = self.contract_chars, self.batch_chars
        return (
            (axes(self.lhs, summed), axes(self.rhs, summed)),
            (axes(self.lhs, batch), axes(self.rhs, batch)),
        )

    @property
    def output_perm(self) -> tuple[int, ...] | None:
        """The transpose after lax.dot_general; None for none."""
        batch = self.batch_chars
        alone = [x for x in self.lhs + self.rhs if x in self.out and x not in batch]
        got = [*batch, *alone]
        order = tuple(got.index(x) for x in self.out)
        return None if order == tuple(range(len(order))) else order


def _letters_of_dots(
    terms: Sequence[str], einsum_str: str, ranks: Sequence[int]
) -> dict[int, str]:
    """For each label that was made for an ellipsis the one that Qwix has, by opt_einsum: of
    as many unused letters as an operand has axes the last."""
    made = sorted({*"".join(terms)} - {*einsum_str})
    unused = [x for x in string.ascii_letters if x not in einsum_str][: max(ranks)]
    return dict(zip(map(ord, made), unused[len(unused) - len(made) :]))


def sanitize_shape(shape: Sequence[Any]) -> tuple[int, ...]:
    """Extents that are not known count as 1."""
    return tuple(n if isinstance(n, int) else 1 for n in shape)


def broadcast_operands(
    operands: Sequence[Operand], operand_subs_list: Sequence[str]
) -> list[Operand]:
    """Repeats an operand whose extent is 1, or divides the others', on a shared label."""
    return list(einsum_.broadcast(operand_subs_list, operands))


def get_transpose(
    dimension_numbers: jax.lax.ConvDimensionNumbers, for_lhs: bool
) -> list[int | None]:
    """For each axis of a convolution's result the operand's that a scale may be along."""
    numbers = dimension_numbers
    found: list[int | None] = [None] * len(numbers.out_spec)
    if for_lhs:
        found[numbers.out_spec[0]] = numbers.lhs_spec[0]
    else:
        found[numbers.out_spec[1]] = numbers.rhs_spec[0]
    return found


def mxfp_dot_general(
    lhs: Operand,
    rhs: Operand,
    dimension_numbers: Any,
    preferred_element_type: Any = None,
) -> jax.Array | None:
    """dot_general of two MX operands on a GPU; None elsewhere, as Qwix has it."""
    is_mx = [isinstance(x, QArray) and x.format.scale is not None for x in (lhs, rhs)]
    if platform() != "gpu" or not all(is_mx):
        return None
    dtype = preferred_element_type or jnp.float32
    return api.dot_general(lhs, rhs, dimension_numbers, preferred_element_type=dtype)


# --- training ---------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class QtConfig:
    """A training step in Qwix's words: every part of a Step under its name in PARTS."""

    lhs_qtype: Any = None
    rhs_qtype: Any = None
    tile_size: Any = None
    lhs_calibration_method: str = "absmax"
    rhs_calibration_method: str = "absmax"
    lhs_disable_channelwise_axes: bool = False
    rhs_disable_channelwise_axes: bool = False

    dlhs_grad_qtype: Any = None
    dlhs_grad_calibration_method: str = "absmax"
    dlhs_tile_size: int | float | None = None
    dlhs_grad_disable_channelwise_axes: bool = False
    drhs_grad_qtype: Any = None
    drhs_grad_calibration_method: str = "absmax"
    drhs_tile_size: int | float | None = None
    drhs_grad_disable_channelwise_axes: bool = False

    disable_gradient_clipping: bool = False
    use_original_residuals: bool = False
    dlhs_residual_qtype: Any = None
    dlhs_residual_calibration_method: str = "absmax"
    dlhs_residual_disable_channelwise_axes: bool = False
    drhs_residual_qtype: Any = None
    drhs_residual_calibration_method: str = "absmax"
    drhs_residual_disable_channelwise_axes: bool = False

    sparsity_rule: Any = None
    rounding: str = "nearest"  # of gradients
    noise_axes: tuple[int, ...] = (0,)

    def recipe(self) -> Recipe:
        return (
            QwixStep().changed({name: getattr(self, name) for name in PARTS}).recipe()
        )


class QwixStep(Step):
    """A step as Qwix has it: tiles are those of the last summed axis, the others sharing a
    scale, and the backward of a tiled operand takes it in float."""

    tiled_sum = "summed_last"
    quantizes_tiles_again = False


def is_whole_tile(tile_size: Any, c: Contraction, lhs: Any, rhs: Any) -> bool:
    """Whether one tile is as long as the sum. Qwix reads tiles off the shape of a scale, so that
    to it such an operand has none, and the backward takes its codes."""
    sides = zip(c.tiled, (c.lhs, c.rhs), (lhs, rhs))
    return all(
        last is not None and x.shape[labels.index(last)] == tile_size
        for last, labels, x in sides
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Collecting(QtConfig):
    lhs_collect_quant_stat: Collect | None = None
    rhs_collect_quant_stat: Collect | None = None

    def execute(self, c: Contraction, lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        if is_whole_tile(self.tile_size, c, lhs, rhs):
            return dataclasses.replace(self, tile_size=None).execute(c, lhs, rhs)
        recipe = self.recipe()
        if recipe.sparsity is not None:  # before anything is measured
            rhs = recipe.sparsity.apply(rhs)
            recipe = dataclasses.replace(recipe, sparsity=None)
        seen = [
            None
            if collect is None or spec is None or not is_wide(x.dtype)
            else collect(
                calibrate(jax.lax.stop_gradient(x), c.number_axes(spec, side, x.shape))
            )
            for collect, spec, x, side in (
                (self.lhs_collect_quant_stat, recipe.fwd.lhs, lhs, "lhs"),
                (self.rhs_collect_quant_stat, recipe.fwd.rhs, rhs, "rhs"),
            )
        ]
        return train_inline(c, recipe, lhs, rhs, Ranges(*seen), self.key)

    @property
    def key(self) -> Any:
        return None


_NOISE = ("dlhs_stochastic_rounding_noise_fn", "drhs_stochastic_rounding_noise_fn")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DotGeneralQtConfig(_Collecting):
    """A training step of dot_general."""

    dlhs_stochastic_rounding_noise_fn: NoiseFn | None = None
    drhs_stochastic_rounding_noise_fn: NoiseFn | None = None

    def recipe(self):
        noise = self._noise()
        if noise is None:
            return super().recipe()
        axes = tuple(noise.channelwise_noise_axes)
        plain = dict.fromkeys(_NOISE)
        how = {"rounding": noise.method, "noise_axes": axes}
        return dataclasses.replace(self, **plain, **how).recipe()

    @property
    def key(self) -> Any:
        noise = self._noise()
        return None if noise is None else noise.key

    def _noise(self) -> NoiseFn | None:
        first, second = (getattr(self, name) for name in _NOISE)
        if first is None and second is None:
            return None
        if first is not second or not isinstance(first, NoiseFn):
            raise ValueError(
                "dlhs and drhs share one noise: pass the same "
                "stochastic_rounding.get_noise_fn(method, key, axes) to both "
                f"{_NOISE[0]} and {_NOISE[1]}."
            )
        return first


jax.tree_util.register_dataclass(
    DotGeneralQtConfig,
    data_fields=list(_NOISE),
    meta_fields=[
        f.name for f in dataclasses.fields(DotGeneralQtConfig) if f.name not in _NOISE
    ],
)


def dot_general_qt(
    lhs: jax.Array, rhs: jax.Array, dimension_numbers: Any, config: DotGeneralQtConfig
) -> jax.Array:
    return Ops(config.execute).dot_general(lhs, rhs, dimension_numbers)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConvGeneralQtConfig(_Collecting):
    """A training step of a convolution."""


def conv_general_qt(
    lhs: jax.Array,
    rhs: jax.Array,
    config: ConvGeneralQtConfig,
    window_strides: Sequence[int],
    padding: Any,
    lhs_dilation: Sequence[int] | None = None,
    rhs_dilation: Sequence[int] | None = None,
    dimension_numbers: Any = None,
    feature_group_count: int = 1,
    batch_group_count: int = 1,
    out_sharding: Any = None,
) -> jax.Array:
    return Ops(config.execute).conv_general_dilated(
        lhs, rhs, window_strides, padding, lhs_dilation, rhs_dilation, dimension_numbers,
        feature_group_count, batch_group_count, out_sharding=out_sharding,
    )  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class RaggedDotQtConfig:
    """A training step of ragged_dot."""

    lhs_qtype: Any
    rhs_qtype: Any
    dlhs_grad_qtype: Any = None
    drhs_grad_qtype: Any = None


def ragged_dot_qt(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    config: RaggedDotQtConfig,
    precision: Any = None,
    preferred_element_type: Any = None,
    group_offset: jax.Array | None = None,
) -> jax.Array:
    fields = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    ops = Ops(functools.partial(_Collecting.execute, _Collecting(**fields)))
    return ops.ragged_dot(
        lhs, rhs, group_sizes, precision, preferred_element_type, group_offset
    )
