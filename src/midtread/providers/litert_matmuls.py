"""Matmuls and convolutions of LiteRT, whether a provider trains or converts.

    activation x activation    both on grids of their own
    activation x weight        the weight has a scale per output channel, where the kernel
                               wants one; a bias is a whole number of input scale x weight
                               scale, so the output's edge remembers that unit
    weight x weight            a constant: JAX computes it

What a weight's grid is made of is for the provider (`_multiply`, `_unit`, `_dynamic`).
"""

import functools
import itertools
from typing import Any

import jax

from midtread.kernels import xla
from midtread.model import flaxlib
from midtread.model.weights import origin_is_hidden
from midtread.numerics.formats import as_format
from midtread.numerics.spec import Spec
from midtread.ops.api import Ops
from midtread.ops.conv import Conv
from midtread.providers import litert_ops as table


class Matmuls:
    """The handlers of contractions; a provider inherits them."""

    def _run(self, name: str, plain, args, kwargs) -> jax.Array:
        kwargs.pop("_dot_general", None)
        rule, op_id = self._get_current_rule_and_op_id(name)
        # Sides are named as the caller orders the operands, and so are Qwix's statistics.
        ids = (f"{op_id}_{i}" if i else op_id for i in itertools.count())
        execute = lambda c, lhs, rhs: self._contract(rule, next(ids), c, lhs, rhs)
        return getattr(Ops(execute), name)(*args, **kwargs)

    def _contract(self, rule, op_id: str, c, lhs, rhs) -> jax.Array:
        is_act = [self._edges[x].is_activation for x in (lhs, rhs)]
        if not any(is_act):
            self._check_seen(op_id, lhs, rhs)
            out = c.run(lhs, rhs, by=xla)
            self._carry_constant(c, (lhs, rhs), None, out)
            return out
        if all(is_act):
            lhs = self._quantized(lhs, rule, f"{op_id}_lhs")
            rhs = self._quantized(rhs, rule, f"{op_id}_rhs")
            scales = [table.scale_of(self._edges[x]) for x in (lhs, rhs)]
            sums = None if any(s is None for s in scales) else scales
            return self._output(c.run(lhs, rhs, by=xla), rule, sums=sums)
        side = ("lhs", "rhs")[is_act[0]]  # of the weight
        x, w = (lhs, rhs) if side == "rhs" else (rhs, lhs)
        x = self._matmul_input(rule, op_id, c, x, "lhs" if side == "rhs" else "rhs")
        multiply = functools.partial(self._multiply, rule, c, x, w, side)
        self._check_weight(rule, c)
        channels = len(self._channels(c, side))
        in_order = c.out[len(c.out) - channels :] == c.kept(side)
        return self._output(
            multiply(),
            rule,
            fuses=channels if in_order else 0,
            unit=self._unit(rule, c, x, w, side) if in_order else None,
            scaled=multiply if in_order and channels == 1 else None,
        )

    def _matmul_input(self, rule, op_id: str, c, x, side: str):
        if rule is None or rule.act_qtype is None or rule.act_static_scale:
            return self._quantized(x, rule, f"{op_id}_{side}")
        x = self._quantized(x, None, f"{op_id}_{side}")
        spec = Spec(
            rule.act_qtype,
            channelwise_axes=("kept",),
            calibration=rule.act_calibration_method,
        )
        return self._dynamic(x, c.number_axes(spec, side, x.shape))

    def _channels(self, c, side: str) -> tuple[int, ...]:
        """Returns the axes of a weight with a scale per index; a batch axis rules them out."""
        other = c.labels("lhs" if side == "rhs" else "rhs")
        kept = c.kept(side)
        if any(x in other for x in kept):
            return ()
        return tuple(c.labels(side).index(x) for x in kept)

    def _check_weight(self, rule, c) -> None:
        """Refuses weights that LiteRT 2.3 does not run, or not rightly."""
        if rule is None or rule.weight_qtype is None or not isinstance(c, Conv):
            return
        fmt, act = as_format(rule.weight_qtype), rule.act_qtype
        dynamic = act is not None and not rule.act_static_scale
        wide = act is not None and as_format(act).name == "int16"
        what = None
        if fmt.bits < 4 and act is not None:
            what = f"{fmt.name} weights"
        elif fmt.bits < 8 and (dynamic and c.feature_groups > 1 or wide):
            what = (
                f"{fmt.name} weights with {'int16' if wide else 'dynamic'} activations"
            )
        if what:
            path = flaxlib.path_of(self._module())
            raise ValueError(
                f"{path!r}: LiteRT has no convolution of {what}. Put a rule for it first: "
                "QuantizationRule(op_names=('conv_general_dilated',), weight_qtype="
                "'int8', ...)."
            )

    def _check_seen(self, op_id: str, *operands: Any) -> None:
        params = flaxlib.params_of(self._module())
        if self.strict_ops and any(origin_is_hidden(x, params) for x in operands):
            path = flaxlib.path_of(self._module())
            raise ValueError(
                f"{path!r}: {op_id} runs inside a remat, a custom gradient or a loop, "
                "where nothing is known of its operands. Take that wrapping off the "
                "model, or pass strict=False to leave it in float."
            )
