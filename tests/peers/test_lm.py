"""The language model under MaxText's flags, against Qwix 0.1.8 and Flax's fp8 op on the same
model, weights and batch: losses of several steps of training. Float32, quant_reach=maxtext."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.linen import fp8_ops

from midtread.lm import build, quantization
from midtread.model import intercept
from midtread.model.quantize import quantize_model
from midtread.numerics.formats import as_format
from midtread.providers import delayed
from tests.lm.curves import curve
from tests.peers import peer

pytest.importorskip("omegaconf", reason="needs the extra train")

(qwix,) = peer.load("qwix", "0.1.8", "qwix")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

SMALL = ["quant_reach=maxtext", "scan_layers=false"]
DENSE = [*SMALL, "num_decoder_layers=1"]
EXPERTS = [
    *SMALL,
    "num_decoder_layers=1",
    "num_experts=2",
    "num_experts_per_tok=2",
    "moe_mlp_dim=32",
]
FIXED = ["act_quantization_calibration_method=fixed,-8,8",
         "weight_quantization_calibration_method=fixed,-2,2"]  # fmt: skip
QWIX = "use_qwix_quantization=true"

#  name: words, tolerance. A rounding that falls the other way moves a loss by more than a sum
#  in another order does; in 4 bits it moves it further.
CASES = {
    "int8": ([*DENSE, QWIX, "quantization=int8"], 2e-4),
    "int8, 2 shards": ([*DENSE, QWIX, "quantization=int8", "quantization_local_shard_count=2"], 1e-3),
    "int4": ([*DENSE, QWIX, "quantization=int4"], 2e-3),
    "fp4": ([*DENSE, QWIX, "quantization=fp4"], 2e-3),
    "fp8": ([*DENSE, QWIX, "quantization=fp8"], 5e-4),
    "fp8_e5m2": ([*DENSE, QWIX, "quantization=fp8_e5m2"], 1e-3),
    "fp8_full": ([*EXPERTS, QWIX, "quantization=fp8_full"], 5e-4),
    "fp8_full, fixed": ([*EXPERTS, QWIX, "quantization=fp8_full", *FIXED], 5e-4),
}  # fmt: skip
ORDINARY = {"int8"}


def under_qwix(config, model):
    """The same rules, given to Qwix."""
    fields = ("module_path", "op_names", "bwd_weight_grad_tile_size", "additional_qt_config",
              "weight_calibration_method", "act_calibration_method", "bwd_calibration_method")  # fmt: skip
    rules = [
        qwix.QtRule(
            **{f: getattr(r, f) for f in fields},
            **{
                f"{k}_qtype": as_format(getattr(r, f"{k}_qtype")).dtype
                for k in ("weight", "act", "bwd")
            },
        )
        for r in quantization.rules(config)
    ]
    tokens = jnp.zeros((1, config.max_target_length), jnp.int32)
    return qwix.quantize_model(model, qwix.QtProvider(rules), tokens)


@pytest.mark.parametrize(
    "case",
    [pytest.param(c, marks=() if c in ORDINARY else pytest.mark.slow) for c in CASES],
)
def test_losses_are_those_of_qwix(case):
    words, rtol = CASES[case]
    with peer.manners():
        ours = curve(words, steps=6)
        theirs = curve(words, under_qwix, steps=6)
    np.testing.assert_allclose(ours, theirs, rtol=rtol)


class FlaxFp8(delayed.DelayedFp8Provider):
    """Our provider's state, Flax's arithmetic."""

    def _train(self, rule, op_id, c, lhs, rhs):
        module = intercept.current_module()
        state = delayed._variables(module, op_id, self._length)
        numbers = (((lhs.ndim - 1,), (0,)), ((), ()))
        parts = {
            f"{side}_{part}": state[f"{name}_{part}"]
            for side, name in (
                ("lhs", "input"),
                ("rhs", "kernel"),
                ("grad", "output_grad"),
            )
            for part in ("scale", "amax_history")
        }  # inside a handler nothing is intercepted
        return fp8_ops.fp8_scaled_dot_general(
            lhs, rhs, numbers, preferred_element_type=lhs.dtype, **parts
        )


@pytest.mark.slow
def test_losses_of_delayed_fp8_are_those_of_flax():
    def under_flax(config, model):
        provider = FlaxFp8(quantization.rules(config))
        return quantize_model(model, provider, build.some_tokens(config), donate=True)

    words = [*DENSE, QWIX, "quantization=fp8_gpu"]
    with peer.manners():
        ours = curve(words, steps=6)
        theirs = curve(words, under_flax, steps=6)
    np.testing.assert_allclose(ours, theirs, rtol=2e-4)
    assert jax.devices()[0].platform == "cpu"
