"""QtConfig: a training step in Qwix's words, and the recipe it stands for.

The fields are those of Qwix's DotGeneralQtConfig, so that `additional_qt_config` and code
written against it keep their meaning. "dlhs" is the gradient of lhs: its matmul takes the
gradient ("grad") and the other forward operand ("residual").

One thing differs: where the forward is tiled or microscaled, Qwix falls back to float
residuals and multiplies floats. Here they are quantized again, along the new sum.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from midtread.numerics.formats import as_format
from midtread.numerics.sparsity import Sparsity
from midtread.numerics.spec import Spec
from midtread.ops.recipe import REUSE, Dlhs, Drhs, Fwd, Recipe


@dataclasses.dataclass(frozen=True, kw_only=True)
class QtConfig:
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

    def override(self, changes: Mapping[str, Any]) -> "QtConfig":
        known = [f.name for f in dataclasses.fields(self)]
        for name in changes:
            if name not in known:
                raise ValueError(
                    f"additional_qt_config has no field {name!r}. There are: {', '.join(known)}."
                )
        return dataclasses.replace(self, **changes)

    def recipe(self) -> Recipe:
        lhs, rhs = self._operand("lhs"), self._operand("rhs")
        return Recipe(
            fwd=Fwd(lhs, rhs),
            dlhs=Dlhs(self._gradient("dlhs", rhs), self._residual("dlhs", rhs)),
            drhs=Drhs(self._residual("drhs", lhs), self._gradient("drhs", lhs)),
            mask_clipped=not self.disable_gradient_clipping,
            sparsity=as_sparsity(self.sparsity_rule),
        )

    def _get(self, name: str) -> Any:
        return getattr(self, name)

    def _operand(self, side: str) -> Spec | None:
        return _spec(
            self._get(f"{side}_qtype"),
            self._get(f"{side}_calibration_method"),
            self.tile_size,
            self._get(f"{side}_disable_channelwise_axes"),
        )

    def _gradient(self, matmul: str, forward: Spec | None) -> Spec | None:
        return _spec(
            self._get(f"{matmul}_grad_qtype"),
            self._get(f"{matmul}_grad_calibration_method"),
            self._backward_tile(matmul, forward),
            self._get(f"{matmul}_grad_disable_channelwise_axes"),
            rounding=self.rounding,
            noise_axes=self.noise_axes,
        )

    def _residual(self, matmul: str, forward: Spec | None) -> Any:
        again = self._get(f"{matmul}_residual_qtype")
        tiled = forward is not None and bool(forward.tiles)
        if not (self.use_original_residuals or tiled or (again and forward is None)):
            return REUSE
        if again is None and tiled and self._get(f"{matmul}_grad_qtype") is not None:
            again = forward.format
        return _spec(
            again,
            self._get(f"{matmul}_residual_calibration_method"),
            self._backward_tile(matmul, forward),
            self._get(f"{matmul}_residual_disable_channelwise_axes"),
        )

    def _backward_tile(self, matmul: str, forward: Spec | None) -> Any:
        """Tiles of a backward sum: its own, else as large as the forward's."""
        own = self._get(f"{matmul}_tile_size")
        if own or forward is None or self.use_original_residuals:
            return own
        return next((t for axis, t in forward.tiled_axes if axis == "summed"), None)


def _spec(qtype, method, tile, per_tensor: bool, **fields) -> Spec | None:
    if qtype is None:
        return None
    fmt = as_format(qtype)
    if isinstance(tile, Mapping):
        tiles = dict(tile)
    else:
        tile = fmt.tile or tile
        is_whole = isinstance(tile, float) and tile == 1.0  # the axis is one tile
        tiles = {"summed": tile} if tile and not is_whole else {}
    return Spec(fmt, () if per_tensor else ("kept",), tiles, method, **fields)


def as_sparsity(rule: Any) -> Sparsity | None:
    """A Sparsity, or anything with Qwix's `weight_sparsity_*` fields."""
    if rule is None or isinstance(rule, Sparsity):
        return rule
    get = lambda name: getattr(rule, f"weight_sparsity_{name}")
    if not get("m"):
        return None
    names = ("n", "m", "order", "block_size", "offset", "start_step", "update_step")
    return Sparsity(**{name: get(name) for name in names})
