"""A program of other people's code, run by their interpreter with us in Qwix's place or not."""

import json
import os
import pathlib
import subprocess
from typing import Any

import pytest

ROOT = pathlib.Path(__file__).parents[2]
WITH_US = ("-m", "midtread.interop.qwix")


def needs(variable: str) -> list[Any]:
    """Marks tests that want an environment variable, whose value docs/from-qwix.md explains."""
    reason = f"{variable} is not set: see docs/from-qwix.md"
    is_set = bool(os.environ.get(variable))
    return [pytest.mark.slow, pytest.mark.skipif(not is_set, reason=reason)]


def run(python: Any, options, name: str, *words: str, xla_flags: str = "") -> Any:
    """Returns what tests/clients/<name> prints as JSON in its last line."""
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT / "src"),
           "XLA_FLAGS": xla_flags}  # fmt: skip
    command = [str(python), *options, str(ROOT / "tests/clients" / name), *words]
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])
