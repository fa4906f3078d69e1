"""Tests on a real GPU: JAX_PLATFORMS=cuda,cpu python -m pytest -m gpu tests/device"""

import pathlib

import jax
import pytest


def pytest_collection_modifyitems(items):
    """Of this folder alone, though the hook is given all that was collected."""
    for item in items:
        if item.path.is_relative_to(pathlib.Path(__file__).parent):
            ignore = "ignore:The Pallas Triton backend"
            item.add_marker(pytest.mark.filterwarnings(ignore))


@pytest.fixture(scope="module", autouse=True)
def gpu():
    """The GPU, as the default device of every test here; without one they are skipped."""
    try:
        device = jax.devices("cuda")[0]
    except RuntimeError as error:
        pytest.skip(f"needs a CUDA device and JAX_PLATFORMS=cuda,cpu: {error}")
    with jax.default_device(device):
        yield device
