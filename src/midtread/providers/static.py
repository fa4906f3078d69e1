"""StaticProvider: quantized training with ranges that an earlier run has measured.

    StaticProvider(rules, measuring=True)     trains as QtProvider does, with the data's own
                                              ranges, and notes the largest of every axis
    StaticProvider(rules, measuring=False)    uses what was noted, and measures nothing

A weight has a range per output channel, `<weight>_range`, which lies on the devices that the
weight lies on. An activation has one per position: per index of each axis that the matmul
keeps and that is not the batch (axis 0). Rows of a grouped matmul have no fixed meaning, so
they share one. The largest |x| counts, not a mean: a weight that saturates stays where it
is. Headroom for what is to come is the factor of the rule's method, "absmax,2".
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from midtread.model import flaxlib, intercept
from midtread.model.rules import QtRule, field_names
from midtread.model.weights import turn_of
from midtread.numerics import calibration
from midtread.numerics.qarray import QArray, calibrate
from midtread.numerics.spec import Spec
from midtread.providers.qt import QtProvider

SUFFIX = "_range"  # added to a weight's name


class StaticProvider(QtProvider):
    """Trains under rules with ranges per axis that were measured once.

    Args:
        measuring: note the ranges seen, and use those of the data at hand.
    """

    honours = field_names(QtRule) - {"act_static_scale", "act_batch_axes"}
    refusal = (
        "ranges that were measured are static by themselves, and shared along axis 0 alone: "
        "leave {field} out, or use mt.QtProvider"
    )

    def __init__(self, rules, *, measuring: bool, **options):
        self._measuring = measuring
        super().__init__(rules, **options)

    def _init_rule(self, rule) -> QtRule:
        rule = super()._init_rule(rule)
        for name in ("weight_calibration_method", "act_calibration_method"):
            method = getattr(rule, name)
            if method and calibration.parse(method).method != "absmax":
                raise ValueError(
                    f"rule {rule.module_path!r}: {name}={method!r}, but static ranges are "
                    "the largest |x| seen: write 'absmax' or 'absmax,<headroom>'."
                )
        return rule

    def _keeps_ranges(self, rule: QtRule) -> bool:
        return True

    def _weight_of(self, module, x: Any) -> str | None:
        """Takes a part of a parameter for an activation: ranges are kept for whole ones."""
        return None if isinstance(x, QArray) else self.find_param(module, x)

    def _range(self, rule, op_id, c, side, spec, x, weight) -> Any:
        module, spec = intercept.current_module(), c.number_axes(spec, side, x.shape)
        if not weight:
            return self._noted(f"{op_id}_{side}", spec, x, (0,), None)
        axes = turn_of(module, weight, x)
        if axes is None:
            raise ValueError(
                f"{flaxlib.path_of(module)}/{op_id}: a reshape of a transpose of "
                f"{weight!r} has no axis of its own to keep a static range for."
            )
        return self._noted(f"{weight}{SUFFIX}", spec, x, (), axes)

    def _noted(self, name: str, spec: Spec, x: jax.Array, shared: tuple, axes):
        """Returns the range that is kept for `x`, or notes one and returns None. It is shared
        along the axes `shared`, and stored in the weight's own order of axes."""
        module = intercept.current_module()
        _, counts = spec.layout(x.shape)
        shape = tuple(1 if a in shared else n for a, n in enumerate(counts))
        turn = tuple(axes) if axes is not None else tuple(range(x.ndim))
        back = tuple(turn.index(a) for a in range(x.ndim))
        stat = flaxlib.variable(
            module, "quant_stats", name, lambda: nothing([shape[a] for a in back])
        )
        state = flaxlib.read(stat)
        if not self._measuring:
            return {"absmax": state["absmax"].transpose(turn).astype(x.dtype)}
        seen = calibrate(jax.lax.stop_gradient(x), spec)["absmax"].astype(jnp.float32)
        seen = calibration.largest(seen, shared).transpose(back)
        if flaxlib.can_update(module):
            absmax = jnp.maximum(state["absmax"], seen)
            flaxlib.write(stat, {"count": state["count"] + 1, "absmax": absmax})
        return None  # the data at hand is measured

    def prepare_nnx(self, model: nnx.Module, method, inputs, kwargs, rngs) -> None:
        super().prepare_nnx(model, method, inputs, kwargs, rngs)
        for _, module in nnx.iter_modules(model):
            for name, var in list(vars(module).items()):
                if isinstance(var, flaxlib.QuantStat) and name.endswith(SUFFIX):
                    weight = getattr(module, name.removesuffix(SUFFIX))
                    names = weight.get_metadata().get("out_sharding")
                    if names:
                        var.set_metadata(out_sharding=names, eager_sharding=False)


def nothing(shape) -> dict[str, jax.Array]:
    """Returns a range of which nothing was seen yet."""
    return {"count": jnp.zeros((), jnp.int32), "absmax": jnp.zeros(shape, jnp.float32)}
