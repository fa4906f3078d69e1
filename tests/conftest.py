"""Every test runs on eight virtual CPU devices, under strict dtype promotion.

Most of a test's time is XLA compiling programs that run once, so LLVM does not optimize
them: 27% to 47% less of a core in the folders timed. XLA_FLAGS=--xla_backend_optimization_level=3
tests what users run.

With --old-emitters, which the Makefile gives where it may, a run also leaves out the
emitters that go through MLIR, where jaxlib still has those before them: programs compile in a
third to a half less time (a training step of one layer in 2.3 s of a core instead of 5.7).
Those round to fnuz formats and to floats of four bits wrongly, so tests of that have the
others.

JAX_PLATFORMS=cuda in the environment lets the tests marked `gpu` have theirs. No process takes
a GPU's memory beforehand, so that many share one.
"""

import importlib.metadata
import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_ENABLE_COMPILATION_CACHE", "0")  # what one test compiled
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # read with the backend


def _set_flag(name: str, value: object) -> None:
    """Sets a flag that jax reads when it starts its backend, unless it is set already."""
    given = os.environ.get("XLA_FLAGS", "")
    if name not in given:
        os.environ["XLA_FLAGS"] = f"{given} --{name}={value}"


_set_flag("xla_force_host_platform_device_count", 8)
if os.environ["JAX_PLATFORMS"] == "cpu":
    _set_flag("xla_backend_optimization_level", 0)


def pytest_addoption(parser):
    parser.addoption(
        "--old-emitters",
        action="store_true",
        help="compile quicker, and round to floats of four bits wrongly",
    )


def pytest_configure(config):
    has_both = importlib.metadata.version("jaxlib").startswith("0.10.")
    is_asked = (
        config.getoption("--old-emitters") and os.environ["JAX_PLATFORMS"] == "cpu"
    )
    if is_asked and has_both:
        _set_flag("xla_cpu_use_fusion_emitters", "false")


import jax
import pytest

jax.config.update("jax_numpy_dtype_promotion", "strict")


@pytest.fixture
def key():
    return jax.random.key(0)
