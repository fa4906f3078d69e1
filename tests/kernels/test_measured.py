"""The table of what was timed: whole, and read by `explain`."""

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn

import midtread as mt
from midtread.kernels import measured


@pytest.mark.parametrize("known", measured.MEASURED, ids=lambda m: m.device)
def test_the_table_is_whole(known):
    assert list(known.rows) == sorted(set(known.rows))
    for (_, act), speeds in known.speeds.items():
        assert 0 < len(speeds) <= len(known.rows) and all(x > 0 for x in speeds)
        assert act == measured.FLOAT or len(act) < 6


CASES = {
    ("int8", "float", 1): "faster as it is: 1.69x of bfloat16, with int8 rows 1.43x (1 ",
    ("int8", "float", 2500): "faster with int8 rows: 1.54x of bfloat16, as it is 0.98x (2,048 ",
    ("int4", "float", 100): "as it is: 1.30x of bfloat16 (128 ",
    ("int4", "int8", 3): "faster with float rows: 2.53x of bfloat16, as it is 2.32x (1 ",
    ("int4", "int8", 500): "nothing for int4 weights and 500 int8 rows on NVIDIA H200",
    ("int8", "int8", 20_000): "nothing for int8 weights and 20,000 int8 rows",
    ("int3", "float", 1): "nothing for int3 weights",
}  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=str)
def test_which_is_faster(case):
    assert measured.compare("NVIDIA H200", *case).startswith(CASES[case])


def test_explain_says_it_of_stored_weights():
    x = jax.ShapeDtypeStruct((16, 256), jnp.bfloat16)
    dense = nn.Dense(512, dtype=jnp.bfloat16)
    rule = {"weight_qtype": "int8", "act_qtype": "int8"}
    said = lambda provider, device: str(
        mt.explain(dense, provider, x, kernels=True, device=device)
    )
    served = said(mt.PtqProvider([rule]), "h200")
    assert "  measured  faster with float rows: 1.61x" in served
    assert "16 rows of an MLP of Llama-3-8B, NVIDIA H200, 2026-11-16)" in served
    assert "  measured  nothing on NVIDIA L4" in said(mt.PtqProvider([rule]), "l4")
    assert "measured" not in said(mt.QtProvider([rule]), "h200")
    assert "measured" not in str(mt.explain(dense, mt.PtqProvider([rule]), x))
