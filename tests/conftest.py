"""Every test runs on eight virtual CPU devices, under strict dtype promotion.

Most of a test's time is XLA compiling programs that run once, so it optimizes little: LLVM
not at all (27% to 47% less of a core in the folders timed), and fusions by the emitters
that came first, not by those that go through MLIR (a training step of one layer compiles in
2.3 s of a core instead of 5.7), where jaxlib still has both. To test what users run:
XLA_FLAGS="--xla_backend_optimization_level=3 --xla_cpu_use_fusion_emitters=true".

JAX_PLATFORMS=cuda in the environment lets the tests marked `gpu` have theirs.
"""

import importlib.metadata
import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_ENABLE_COMPILATION_CACHE", "0")  # what one test compiled
_FLAGS = {"xla_force_host_platform_device_count": "8"}
if os.environ["JAX_PLATFORMS"] == "cpu":
    _FLAGS["xla_backend_optimization_level"] = "0"
    if importlib.metadata.version("jaxlib").startswith("0.10."):
        _FLAGS["xla_cpu_use_fusion_emitters"] = "false"
for _name, _value in _FLAGS.items():  # read when jax starts its backend
    if _name not in os.environ.get("XLA_FLAGS", ""):
        _rest = os.environ.get("XLA_FLAGS", "")
        os.environ["XLA_FLAGS"] = f"{_rest} --{_name}={_value}"

import jax
import pytest

jax.config.update("jax_numpy_dtype_promotion", "strict")


@pytest.fixture
def key():
    return jax.random.key(0)
