"""Who holds which column in stream_gpu, told by numbers instead of threads."""

import functools
from typing import Any

import numpy as np
import pytest

from midtread.kernels import lanes_gpu, stream_sums_gpu, turn_gpu


@pytest.fixture
def stand(monkeypatch):
    """To be a thread, whose number is known."""
    return lambda thread: monkeypatch.setattr(
        lanes_gpu.mgpu, "thread_idx", lambda: thread
    )


DIVISIONS = [(4, 4, 4), (4, 4, 8), (4, 1, 1), (8, 2, 1), (8, 1, 1), (8, 2, 2)]


@pytest.mark.parametrize("bits", [4, 8])
def test_lanes_hold_what_the_interpreter_is_told(bits, stand):
    extents, axes = stream_sums_gpu.order(bits)
    columns = np.arange(256).reshape(extents).transpose(axes).reshape(4, 64)
    for thread in range(128):
        stand(thread)
        row = 16 * (thread // 32) + thread // 4 % 8
        for j in range(4):
            first: Any = lanes_gpu.Division(bits, 4).place(j)[0]
            assert columns[j, [row, row + 8]].tolist() == [first, first + 1]


@pytest.mark.parametrize(("bits", "wide", "deep"), DIVISIONS)
def test_sums_change_hands(bits, wide, deep, stand, monkeypatch):
    """Each is put where it is looked for, and 16 lanes that write meet no bank."""
    rows, division = 16, lanes_gpu.Division(bits, wide, deep)
    monkeypatch.setattr(turn_gpu, "address_of", lambda ref, offset: offset)
    place: Any = functools.partial(turn_gpu._place, None, division, rows=rows)
    every = [
        place(part, row, column)
        for part in range(deep)
        for row in range(rows)
        for column in range(0, 256, 2)
    ]
    assert sorted(every) == list(range(0, deep * rows * 1024, 8))
    for thread in range(0, division.groups * 128, 16):
        found = []
        for lane in range(16):
            stand(thread + lane)
            column = division.place(division.mine()[0])[0]
            found.append(place(0, 2 * (lane % 4), column) // 4 % 32)
        assert sorted(found) == list(range(0, 32, 2))
