"""tpu-inference's own test of its Qwix rules, with Midtread in Qwix's place.

Its wheel holds the test; docs/from-qwix.md says how to get it. vLLM and the rest of the package
are mocks here, under which four of the 36 tests fail on Qwix too.
"""

import json
import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
WHEEL = os.environ.get("TPU_INFERENCE_WHEEL")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not WHEEL, reason="TPU_INFERENCE_WHEEL is not set: see docs/from-qwix.md"),
]  # fmt: skip


def run(options):
    program = ROOT / "tests/clients/tpu_inference_program.py"
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, *options, str(program), str(WHEEL)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_what_passes_on_qwix_passes_here():
    theirs, ours = run([]), run(["-m", "midtread.interop.qwix"])
    passed = [name for name, outcome in theirs.items() if outcome == "passed"]
    assert len(passed) >= 32
    assert not {name: ours[name] for name in passed if ours[name] != "passed"}
