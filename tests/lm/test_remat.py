"""Remat: what each policy keeps of a layer, and that numbers do not depend on it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from midtread.lm import memory, settings
from midtread.lm import model as models
from midtread.lm.config import Model, UsageError, section
from tests.lm.curves import curve

WIDE = ["tiny", "emb_dim=64", "mlp_dim=256", "head_dim=32", "batch_size=1"]
DELAYED = ["quantization=te_fp8_delayedscaling"]


def of_a_layer(words) -> float:
    """Bytes a token that a layer keeps for the backward."""
    one, two = (
        memory._of_a_row(settings.load([*WIDE, *words, f"num_decoder_layers={n}"]))
        for n in (1, 2)
    )
    return (two - one) / 32


def test_codes_are_a_byte_an_element():
    """D = 64, F = 256: the stream in bfloat16, then a byte for each input of a matmul."""
    codes = of_a_layer([*DELAYED, "remat_policy=quantized"])
    assert codes == 2 * 64 + 3 * 64 + 64 + 2 * 64 + 256
    outs = of_a_layer([*DELAYED, "remat_policy=minimal"])
    assert outs == of_a_layer(["remat_policy=minimal"])  # no float32 sums among them
    assert codes < 0.6 * outs
    anew = of_a_layer(["quantization=aqt_fp8", "remat_policy=quantized"])
    assert anew == 2 * 64  # AQT's backward quantizes anew: the stream alone is kept


@pytest.mark.parametrize(
    "policy", [pytest.param("minimal", marks=pytest.mark.slow), "quantized"]
)
def test_numbers_do_not_depend_on_it(policy):
    words = [*DELAYED, "num_decoder_layers=1"]
    plain = curve(words, steps=3)
    np.testing.assert_allclose(
        curve([*words, f"remat_policy={policy}"], steps=3), plain, rtol=2e-6
    )


def test_nothing_quantized_keeps_no_codes():
    with pytest.raises(UsageError, match="nothing is quantized"):
        settings.load(["tiny", "remat_policy=quantized"])


def test_unrolled_layers_are_scanned_ones():
    """The same losses, and no loop left in the program."""
    words = ["num_decoder_layers=2", "scan_unroll=2"]
    want = curve(["num_decoder_layers=2"], steps=3)
    np.testing.assert_allclose(curve(words, steps=3), want, rtol=2e-6)
    m = section(settings.load(["tiny", *words]), Model)
    graph, state = nnx.split(models.create(m))
    run = jax.jit(lambda state, tokens: nnx.merge(graph, state)(tokens).logits)
    text = run.lower(state, jnp.zeros((1, 32), jnp.int32)).as_text()
    assert "stablehlo.while" not in text
