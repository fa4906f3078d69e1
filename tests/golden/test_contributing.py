"""A format and a recipe are added as CONTRIBUTING.md says: a row each, and nothing else."""

import os
import pathlib
import re
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[2]
TABLES = {  # file -> the line that a table begins with
    "numerics/formats.py": "ROWS = [\n",
    "ops/recipe.py": "RECIPES = {\n",
}
USE = """
import jax, jax.numpy as jnp, midtread as mt
x = jax.random.normal(jax.random.key(0), (16, 32))
w = jax.random.normal(jax.random.key(1), (32, 8))
q = mt.quantize(w, "int12", channelwise_axes=[1])
error = jnp.abs(mt.dequantize(q) - w).max() / jnp.abs(w).max()
assert q.qvalue.dtype == jnp.int16 and error < 2**-11, error
assert jnp.abs(mt.dot(x, q) - x @ w).max() < 2e-2
rule = mt.QtRule(weight_qtype="int12", act_qtype="int12")
from flax import linen as nn
print(mt.explain(nn.Dense(8), mt.QtProvider([rule]), x))
recipe = mt.recipe("e5m2_gradients")
grad = jax.grad(lambda w: mt.learn(recipe).dot(x, w).sum())(w)
assert recipe.dlhs.g.format.name == "float8_e5m2" and jnp.isfinite(grad).all()
"""


def test_a_format_and_a_recipe_are_a_row_each(tmp_path):
    page = (ROOT / "CONTRIBUTING.md").read_text()
    rows = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    shutil.copytree(ROOT / "src", tmp_path / "src")
    for row, (file, head) in zip(rows, TABLES.items(), strict=True):
        path = tmp_path / "src" / "midtread" / file
        text = path.read_text()
        assert text.count(head) == 1
        path.write_text(text.replace(head, f"{head}    {row}"))
    env = {**os.environ, "PYTHONPATH": str(tmp_path / "src")}
    ran = subprocess.run(
        [sys.executable, "-c", USE],
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert "int12" in ran.stdout


def test_answers_are_short():
    """An answer to "How do I add ..." names one place in at most ten lines."""
    page = (ROOT / "CONTRIBUTING.md").read_text().partition("## How do I add ...")[2]
    answers = re.split(r"^\*\*(?=an? )", page, flags=re.MULTILINE)[1:]
    asked = (
        "format",
        "calibration",
        "recipe",
        "op",
        "kernel",
        "provider",
        "key",
        "value",
    )
    for name, answer in zip(asked, answers, strict=True):
        assert re.match(rf"an? {name}\b", answer), answer
        lines = [line for line in answer.splitlines() if line.strip()]
        assert len(lines) <= 10 and "`" in answer, answer
