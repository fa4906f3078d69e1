"""Tests on a real GPU: JAX_PLATFORMS=cuda,cpu python -m pytest -m gpu tests/device

All of them in some minutes, on 16 cores (what `-n` gives first ends last):

    python -m pytest -m gpu tests/device -n 15 --maxschedchunk 1

Processes share the GPU, for none of them takes its memory beforehand (tests/conftest.py); an
allocator counts what its own process was given, whatever the others have.
"""

import pathlib

import jax
import pytest

# Those that take longest, which begin before all others.
LONGEST = (
    "test_a_loop_writes_its_cache_in_place",
    "test_no_weight_is_copied_in_a_compiled_step",
    "test_aligned_steps_run_in_low_bits",
    "test_what_xla_widens_is_flagged",
    "test_training_through_groups",
    "test_bytes_held_are_what_the_format_promises",
    "test_rows_by_a_large_weight",
    "test_training",
    "test_codes_by_a_stored_weight",
    "test_any_number_of_rows_is_as_near_to_float64",
    "test_scaled_matmul",
    "test_few_rows_of_groups",
    "test_many_rows_in_pairs_and_halves",
    "test_attention_over_ranges",
    "test_training_steps",
    "test_few_rows",
    "test_many_rows",
    "test_rows_by_a_weight",
)


def _turn(item) -> int:
    name = item.name.partition("[")[0]
    return LONGEST.index(name) if name in LONGEST else len(LONGEST)


def pytest_collection_modifyitems(items):
    """Of this folder alone, though the hook is given all that was collected."""
    here = pathlib.Path(__file__).parent
    ours = [item for item in items if item.path.is_relative_to(here)]
    for item in ours:
        ignore = "ignore:The Pallas Triton backend"
        item.add_marker(pytest.mark.filterwarnings(ignore))
    others = [item for item in items if not item.path.is_relative_to(here)]
    items[:] = sorted(ours, key=_turn) + others


@pytest.fixture(scope="module", autouse=True)
def gpu():
    """The GPU, as the default device of every test here; without one they are skipped."""
    try:
        device = jax.devices("cuda")[0]
    except RuntimeError as error:
        pytest.skip(f"needs a CUDA device and JAX_PLATFORMS=cuda,cpu: {error}")
    with jax.default_device(device):
        yield device
