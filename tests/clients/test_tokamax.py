"""Tokamax's own tests that meet Qwix's arrays, with Midtread in Qwix's place, on a CPU.

Its wheel holds them; docs/from-qwix.md says how to get it. Those of its kernels need a GPU or a
TPU, and are skipped or fail on Qwix too: what passes there must pass here.
"""

import os
import pathlib
import subprocess
import xml.etree.ElementTree

from tests.clients.programs import ROOT, WITH_US, needs

PYTHON = os.environ.get("TOKAMAX_PYTHON")
FILES = [
    "numerics_test.py",
    "ops/attention/base_test.py",
    "ops/attention/jax_nn_test.py",
    "ops/attention/xla_chunked_test.py",
    "ops/attention/api_test.py",
    "ops/flex_attention/base_test.py",
    "ops/ragged_dot/api_test.py",
    "ops/ragged_dot/base_test.py",
]
# Of the 480 cases of a quantized ragged_dot, a tenth.
NAMES = "qarray or quantized_int or quantized2 or basic_api or as_array"
# It asks for `q.qtype is jnp.int8`, which here is the equal jnp.dtype(jnp.int8).
IDENTITY = "test_random_initialize_qarray"

pytestmark = needs("TOKAMAX_PYTHON")


def run(options, folder):
    """{test: how it ended}"""
    find = "import importlib.util as u; print(u.find_spec('tokamax').origin)"
    found = subprocess.run(
        [str(PYTHON), "-c", find], check=True, capture_output=True, text=True
    )
    source = pathlib.Path(found.stdout.strip()).parent / "_src"
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT / "src"),
           "XLA_FLAGS": "--xla_backend_optimization_level=0"}  # fmt: skip
    out = folder / "out.xml"
    command = [str(PYTHON), *options, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += [f"--junitxml={out}", "-k", NAMES, *(str(source / f) for f in FILES)]
    out.unlink(missing_ok=True)  # of the run before
    done = subprocess.run(
        command, check=False, capture_output=True, text=True, env=env, cwd=folder
    )
    assert out.exists(), done.stdout[-3000:] + done.stderr[-3000:]
    cases = xml.etree.ElementTree.parse(out).iter("testcase")
    return {
        f"{case.get('classname')}.{case.get('name')}": next(
            (part.tag for part in case if part.tag in ("failure", "error", "skipped")),
            "passed",
        )
        for case in cases
    }


def test_what_passes_on_qwix_passes_here(tmp_path):
    theirs, ours = run([], tmp_path), run(WITH_US, tmp_path)
    passed = [name for name, outcome in theirs.items() if outcome == "passed"]
    assert len(passed) >= 60
    failed = {name: ours[name] for name in passed if ours[name] != "passed"}
    assert all(IDENTITY in name for name in failed), failed
