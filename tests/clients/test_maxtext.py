"""MaxText and Tokamax, as published, with Midtread in Qwix's place.

They want packages and a Python of their own: docs/maxtext.md makes the environment, and its
commands are the ones run here.
"""

import json
import os
import pathlib
import re
import subprocess

import pytest

ROOT = pathlib.Path(__file__).parents[2]
PYTHON = os.environ.get("MAXTEXT_PYTHON")
TRAIN = "maxtext.trainers.pre_train.train"
FLAGS = dict(re.findall(r'^(\w+)="(.*)"$', (ROOT / "docs/maxtext.md").read_text(), re.MULTILINE))  # fmt: skip
RUNS = [
    (m, q) for m in ("DENSE", "MOE", "DEEPSEEK") for q in ("int8", "fp8", "fp8_full")
]
RUNS += [("MEGABLOX", "fp8_full")]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON, reason="MAXTEXT_PYTHON is not set: see docs/maxtext.md"),
]  # fmt: skip


def run(arguments, on_midtread):
    how = ["-m", "midtread.interop.qwix"] if on_midtread else []
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "DECOUPLE_GCLOUD": "TRUE",
           "PYTHONPATH": str(ROOT / "src"), "XLA_FLAGS": ""}  # fmt: skip
    command = [str(PYTHON), *how, *arguments]
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize(("model", "quantization"), RUNS)
def test_trains_as_on_qwix(model, quantization, tmp_path):
    losses = {}
    for on_midtread in (False, True):
        metrics = tmp_path / f"{on_midtread}.jsonl"
        flags = [
            *FLAGS["TINY"].split(),
            *FLAGS[model].split(),
            f"metrics_file={metrics}",
        ]
        flags += ["use_qwix_quantization=true", f"quantization={quantization}"]
        run(["-m", TRAIN, *flags], on_midtread)
        steps = [json.loads(line) for line in metrics.read_text().splitlines()]
        losses[on_midtread] = [step["learning/loss"] for step in steps]
    ours, theirs = losses[True], losses[False]
    assert len(ours) == 3 and ours[2] < ours[0]
    assert abs(ours[0] - theirs[0]) <= 5e-6 * theirs[0], (ours, theirs)
    for a, b in zip(ours, theirs):
        assert abs(a - b) <= 1e-4 * b, (ours, theirs)


TOKAMAX = """
import jax, jax.numpy as jnp, qwix, tokamax
x, w = (jax.random.normal(jax.random.key(i), s) for i, s in enumerate([(16, 128), (4, 128, 64)]))
sizes = jnp.array([3, 5, 0, 8], jnp.int32)
qx, qw = qwix.quantize(x, jnp.int8, channelwise_axes=[0]), qwix.quantize(w, jnp.int8, channelwise_axes=[0, 2])
q, k, v = (jax.random.normal(jax.random.key(i), (2, 16, 4, 32)) for i in range(3))
qk, qv = (qwix.quantize(t, jnp.int8, channelwise_axes=[0, 1, 2]) for t in (k, v))
ragged = lambda x, w: tokamax.ragged_dot(x, w, sizes, implementation="xla")
outs = [ragged(x, qw), ragged(qx, qw), jax.grad(lambda x: ragged(x, qw).sum())(x)]
outs += [tokamax.dot_product_attention(q, qk, qv, implementation="xla")]
print([float(jnp.sum(jnp.abs(o))) for o in outs], qwix.QArray.__module__)
"""


def test_tokamax_takes_our_arrays(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(TOKAMAX)
    theirs, ours = (run([str(program)], on_midtread) for on_midtread in (False, True))
    assert "midtread.numerics.qarray" in ours
    numbers = lambda text: json.loads(text[: text.index("]") + 1])
    assert numbers(ours) == pytest.approx(numbers(theirs), rel=1e-5)
