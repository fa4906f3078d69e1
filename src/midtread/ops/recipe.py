"""Recipes: how the three matmuls of a training step are quantized.

    out  = lhs . rhs        fwd(lhs, rhs)
    dlhs = g . rhs          dlhs(g, rhs)
    drhs = lhs . g          drhs(lhs, g)

Six operands, and for each: a Spec (quantize it so), None (leave it in float), or, for
the two that the backward takes from the forward, REUSE (the forward's own codes). That
slot is also the residual policy, since it decides what is kept until the backward:

    REUSE    the codes: half the bytes of bfloat16 or fewer. The backward sums over axes
             that the forward's scale varies along, so that scale is folded into g first:
             (g . s) @ codes == g @ (s . codes). A tile of the forward's summed axis
             cannot be folded; 2-D blocks can, being the same from both sides
    None     the float operand, and an exact straight-through gradient: this is QAT
    Spec     the float operand, quantized again along the backward's own axes; or the
             codes that this gives, where a kernel makes both at once

AQT writes drhs as (g, lhs): its `drhs.lhs` is our `drhs.g`, its `drhs.rhs` our
`drhs.lhs`. TE and AQT differ from Qwix only in these six slots; see RECIPES.
"""

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp

from midtread.numerics.formats import as_format
from midtread.numerics.sparsity import Sparsity
from midtread.numerics.spec import Spec


class _Reuse:
    def __repr__(self):
        return "REUSE"


REUSE = _Reuse()
Slot = Spec | _Reuse | None


@dataclasses.dataclass(frozen=True)
class Fwd:
    """The two operands of out = lhs . rhs.

    Args:
        lhs: a Spec, or None for float.
        rhs: a Spec, or None for float.
        accumulate: dtype of the sum; None is int32 for integers, else float32.
    """

    lhs: Spec | None = None
    rhs: Spec | None = None
    accumulate: Any = None


@dataclasses.dataclass(frozen=True)
class Dlhs:
    """The two operands of dlhs = g . rhs, the gradient of lhs.

    Args:
        g: a Spec of the incoming gradient, or None for float.
        rhs: a Spec, None for float, or REUSE for the codes of the forward.
        accumulate: dtype of the sum; None is int32 for integers, else float32.
    """

    g: Spec | None = None
    rhs: Slot = None
    accumulate: Any = None


@dataclasses.dataclass(frozen=True)
class Drhs:
    """The two operands of drhs = lhs . g, the gradient of rhs.

    Args:
        lhs: a Spec, None for float, or REUSE for the codes of the forward.
        g: a Spec of the incoming gradient, or None for float.
        accumulate: dtype of the sum; None is int32 for integers, else float32.
        hadamard: rotates both operands along the sum, in runs of this many elements.
    """

    lhs: Slot = None
    g: Spec | None = None
    accumulate: Any = None
    hadamard: int | None = None


@dataclasses.dataclass(frozen=True)
class Recipe:
    """The six operands of a training step. The default quantizes nothing.

    >>> int8 = per_channel("int8")
    >>> Recipe(Fwd(int8, int8), Dlhs(int8, REUSE), Drhs(REUSE, int8)).is_random
    False

    Args:
        fwd: operands of the forward matmul.
        dlhs: operands of the matmul that gives the gradient of lhs.
        drhs: operands of the matmul that gives the gradient of rhs.
        mask_clipped: gives no gradient where the calibration clipped.
        sparsity: prunes rhs before anything else.

    Raises:
        ValueError: REUSE of an operand that the forward tiles along its own summed axis,
            or rotates; `hadamard` that is no power of two.
    """

    fwd: Fwd = Fwd()
    dlhs: Dlhs = Dlhs()
    drhs: Drhs = Drhs()
    mask_clipped: bool = True
    sparsity: Sparsity | None = None

    def __post_init__(self):
        for name, slot, spec in (
            ("dlhs.rhs", self.dlhs.rhs, self.fwd.rhs),
            ("drhs.lhs", self.drhs.lhs, self.fwd.lhs),
        ):
            if slot is REUSE and spec is not None and _is_one_way(spec):
                raise ValueError(
                    f"{name}=REUSE, but the forward tiles that operand along its own summed "
                    f"axis ({spec.tiles}), which the backward keeps. Write a Spec there to "
                    "quantize it again, or None to keep it in float."
                )
        size = self.drhs.hadamard
        if size and (size < 0 or size & (size - 1)):
            raise ValueError(f"hadamard={size} must be a power of two.")
        if self.drhs.hadamard and self.drhs.lhs is REUSE and self.fwd.lhs is not None:
            raise ValueError(
                "drhs.hadamard rotates the operand before it is quantized, but "
                "drhs.lhs=REUSE keeps its codes. Write a Spec there, or None."
            )

    @property
    def slots(self) -> dict[str, Slot]:
        """The six operands by name."""
        return {
            "fwd.lhs": self.fwd.lhs, "fwd.rhs": self.fwd.rhs,
            "dlhs.g": self.dlhs.g, "dlhs.rhs": self.dlhs.rhs,
            "drhs.lhs": self.drhs.lhs, "drhs.g": self.drhs.g,
        }  # fmt: skip

    def __hash__(self) -> int:
        return self._hash  # asked for at every matmul that is traced

    @functools.cached_property
    def _hash(self) -> int:
        return hash((self.fwd, self.dlhs, self.drhs, self.mask_clipped, self.sparsity))

    @functools.cached_property
    def is_random(self) -> bool:
        """Whether it rounds or rotates by chance, and so needs a key."""
        specs = [slot for slot in self.slots.values() if isinstance(slot, Spec)]
        return bool(self.drhs.hadamard) or any(s.rounding != "nearest" for s in specs)


def _is_one_way(spec: Spec) -> bool:
    """Whether it is tiled along the summed axis and differently along the kept ones."""
    tiles = spec.tiles
    if not tiles:
        return False
    return (
        "kept" in spec.channelwise_axes
        or len(set(tiles.values())) > 1
        or len(tiles) == 1
    )


# --- granularities, by the shape of the scale of lhs [M, K] -----------------------------------


def per_tensor(qtype: Any, **fields: Any) -> Spec:
    """Returns a Spec with one scale for the whole operand: [1, 1].

    >>> per_tensor("fp8").channelwise_axes
    ()

    Args:
        qtype: a format, by any name that `as_format` takes.
        fields: further fields of the Spec, such as rounding="stochastic".

    Returns:
        A Spec.

    Raises:
        ValueError: An unknown format, or a field's value that Spec refuses.
        TypeError: A field that Spec has not.
    """
    return Spec(qtype, **fields)


def per_channel(qtype: Any, tile: float | None = None, **fields: Any) -> Spec:
    """Returns a Spec with one scale per row, [M, 1]; with a tile one per tile of the row,
    [M, K / tile].

    Formats that come in tiles (mxfp8, nvfp4) get theirs without asking.

    >>> per_channel("int4", tile=128).tiles
    {'summed': 128}

    Args:
        qtype: a format, by any name that `as_format` takes.
        tile: how many elements of the summed axis share a scale; None for all of them.
        fields: further fields of the Spec, such as rounding="stochastic".

    Returns:
        A Spec.

    Raises:
        ValueError: An unknown format, or a field's value that Spec refuses.
        TypeError: A field that Spec has not.
    """
    tile = tile or as_format(qtype).tile
    tiles = {"summed": tile} if tile else {}
    return Spec(qtype, channelwise_axes=("kept",), tiled_axes=tiles, **fields)


def blocks(qtype: Any, size: int, **fields: Any) -> Spec:
    """Returns a Spec with one scale per square block: [M / size, K / size].

    >>> blocks("e4m3", 128).tiles
    {'kept': 128, 'summed': 128}

    Args:
        qtype: a format, by any name that `as_format` takes.
        size: the side of a block.
        fields: further fields of the Spec, such as rounding="stochastic".

    Returns:
        A Spec.

    Raises:
        ValueError: An unknown format, or a field's value that Spec refuses.
        TypeError: A field that Spec has not.
    """
    return Spec(qtype, tiled_axes={"summed": size, "kept": size}, **fields)


# --- named recipes ----------------------------------------------------------------------------


def qat(weight=None, act=None, *, tile=None, **fields) -> Recipe:
    """Returns a recipe for quantization-aware training: low bits forward, exact
    straight-through backward."""
    fwd = Fwd(
        act and per_channel(act, tile, **fields),
        weight and per_channel(weight, tile, **fields),
    )
    return Recipe(fwd=fwd)


def qt(
    weight, act, grad, *, tile=None, weight_grad_tile=None, rounding="nearest"
) -> Recipe:
    """Returns a recipe for quantized training as Qwix does it: all three matmuls in low bits.

    Untiled, the backward reuses the forward's codes. Tiled or microscaled it quantizes
    both operands again along its own sums, where Qwix goes back to float.
    """
    fwd = Fwd(per_channel(act, tile), per_channel(weight, tile))
    grad_spec = per_channel(grad, tile, rounding=rounding)
    if not fwd.lhs.tiles and not fwd.rhs.tiles:
        drhs_g = per_channel(grad, weight_grad_tile, rounding=rounding)
        return Recipe(fwd, Dlhs(grad_spec, REUSE), Drhs(REUSE, drhs_g))
    return Recipe(
        fwd,
        Dlhs(grad_spec, per_channel(weight, tile)),
        Drhs(per_channel(act, tile), grad_spec),
    )


def aqt_int8(local_shards: int = 1, rounding: str = "stochastic") -> Recipe:
    """Returns AQT's config_v3, MaxText's `quantization=int8`: every backward operand is
    quantized anew. The weight gradient has `local_shards` separate ranges; 0 leaves it in
    float."""
    row = per_channel("int8")
    noisy = per_channel("int8", rounding=rounding)
    drhs = Drhs()
    if local_shards:
        shards = {"summed_first": 1.0 / local_shards} if local_shards > 1 else {}
        local = dataclasses.replace(row, tiled_axes=shards)
        drhs = Drhs(local, dataclasses.replace(noisy, tiled_axes=shards))
    return Recipe(Fwd(row, row), Dlhs(noisy, row), drhs)


def aqt_fp8_full(bounds: tuple[float, ...] | None = None) -> Recipe:
    """Returns AQT's fp8 training: e4m3 forward, e5m2 for both operands of both backwards,
    one scale per tensor, bfloat16 accumulators, and gradients of clipped values pass.

    `bounds` are MaxText's `constant_bound_config`: fwd lhs, fwd rhs, dlhs lhs, dlhs rhs,
    drhs lhs, drhs rhs, in AQT's order where a backward's lhs is the gradient.
    """
    if bounds is not None and len(bounds) != 6:
        raise ValueError(
            f"constant bounds come in six, in AQT's order; got {len(bounds)}."
        )
    methods = [f"fixed,{b}" for b in bounds] if bounds else ["absmax"] * 6
    kinds = ["e4m3"] * 2 + ["e5m2"] * 4
    x, w, g_dlhs, w_again, g_drhs, x_again = (
        per_tensor(kind, calibration=method) for kind, method in zip(kinds, methods)
    )
    bf16 = jnp.bfloat16
    return Recipe(
        Fwd(x, w, bf16),
        Dlhs(g_dlhs, w_again, bf16),
        Drhs(x_again, g_drhs, bf16),
        mask_clipped=False,
    )


def aqt_weights(bits: str) -> Recipe:
    """Returns AQT's weight-only dot_general_make: dlhs uses the forward's codes of the
    weight."""
    return Recipe(Fwd(None, per_channel(bits)), Dlhs(None, REUSE))


def te_fp8(calibration: str = "absmax") -> Recipe:
    """Returns TransformerEngine's per-tensor fp8: e4m3 forward, e5m2 gradients. With
    'absmax' scaling is current; with 'delayed' the ranges are given, and come from the
    history."""
    fwd = per_tensor("e4m3", calibration=calibration)
    g = per_tensor("e5m2", calibration=calibration)
    return Recipe(Fwd(fwd, fwd), Dlhs(g, REUSE), Drhs(REUSE, g))


def te_nvfp4(hadamard: int | None = 16) -> Recipe:
    """Returns NVIDIA's NVFP4 training (arXiv 2509.25149): 2-D weight blocks seen alike from
    both sides, stochastic gradients, and a random Hadamard rotation of both wgrad operands."""
    row = per_channel("nvfp4")
    noisy = per_channel("nvfp4", rounding="stochastic")
    return Recipe(
        Fwd(row, blocks("nvfp4", 16)),
        Dlhs(noisy, REUSE),
        Drhs(row, noisy, hadamard=hadamard),
    )


def deepseek_fp8() -> Recipe:
    """Returns the recipe of DeepSeek-V3 (arXiv 2412.19437): 1x128 tiles of activations and
    gradients, 128x128 blocks of weights, e4m3 throughout."""
    row = per_channel("e4m3", 128)
    return Recipe(Fwd(row, blocks("e4m3", 128)), Dlhs(row, REUSE), Drhs(row, row))


RECIPES = {
    #                                     residuals kept for lhs, rhs
    "qwix_int8": qt("int8", "int8", "int8"),  # int8, int8
    "qwix_int4": qt("int4", "int4", "int4"),
    "qwix_fp4": qt("fp4", "fp4", "fp4"),
    "qwix_fp8": qt("e4m3", "e4m3", "e4m3"),
    "qwix_fp8_full": qt("e4m3", "e4m3", "e5m2"),
    "qat_int8": qat("int8", "int8"),  # float, float
    "qat_int4": qat("int4", "int4"),
    "qat_fp4": qat("fp4", "fp4"),
    "qat_fp8": qat("e4m3", "e4m3"),
    "aqt_int8": aqt_int8(),  # float, float
    "aqt_int8w": aqt_weights("int8"),  # float, int8
    "aqt_int4w": aqt_weights("int4"),
    "aqt_fp8": Recipe(Fwd(per_channel("e4m3"), per_channel("e4m3"), jnp.bfloat16)),
    "aqt_fp8_full": aqt_fp8_full(),
    "te_fp8_current": te_fp8(),  # fp8, fp8
    "te_fp8_delayed": te_fp8("delayed"),
    "te_mxfp8": qt("mxfp8", "mxfp8", "mxfp8"),  # float, float
    "te_nvfp4": te_nvfp4(),  # float, fp4
    "te_nvfp4_no_rht": te_nvfp4(None),
    "deepseek_fp8": deepseek_fp8(),  # float, fp8
}


def recipe(name: str) -> Recipe:
    """Returns a recipe by its name.

    >>> recipe("qwix_int8").fwd.rhs.format.name
    'int8'

    Args:
        name: one of `RECIPES`; docs/recipes.md has a table of them.

    Returns:
        A Recipe.

    Raises:
        ValueError: No recipe is called so; the message lists those there are.
    """
    if name not in RECIPES:
        raise ValueError(f"unknown recipe {name!r}. There are: {', '.join(RECIPES)}.")
    return RECIPES[name]
