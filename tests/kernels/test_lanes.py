"""Who holds which column in hopper_decode and hopper_prefill, told by numbers instead of threads."""

import functools
import itertools
from typing import Any

import numpy as np
import pytest

from midtread.kernels.hopper import lanes, threads
from midtread.kernels.weight_matmul.hopper_decode import exchange
from midtread.kernels.weight_matmul.hopper_prefill import registers


@pytest.fixture
def stand(monkeypatch):
    """To be a thread, whose number is known."""
    return lambda thread: monkeypatch.setattr(lanes.mgpu, "thread_idx", lambda: thread)


DIVISIONS = [
    (2, 4, 4),
    (2, 2, 1),
    (4, 4, 4),
    (4, 4, 3),
    (4, 2, 1),
    (4, 1, 1),
    (8, 2, 1),
    (8, 1, 1),
    (8, 2, 2),
]


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_lanes_hold_what_the_interpreter_is_told(bits, stand):
    extents, axes = lanes.order(bits)
    columns = np.arange(256).reshape(extents).transpose(axes).reshape(4, 64)
    for thread in range(128):
        stand(thread)
        row = 16 * (thread // 32) + thread // 4 % 8
        for j in range(4):
            first: Any = lanes.Division(bits, 4).location(j)[0]
            assert columns[j, [row, row + 8]].tolist() == [first, first + 1]


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_lanes_of_many_rows_hold_what_they_read(bits, stand):
    """Every column once, and of bytes 2g and 2g + 1 of a strip the one that is decoded."""
    lanes, found = registers.Lanes(bits), []
    for thread in range(0, 256, 4):  # one of the four that hold the same columns
        stand(thread)
        place: Any = lanes.location(*lanes.accumulators())
        column, strip, pair = place
        bit = 8 * (strip + 2 * (thread // 4 % 8)) + 2 * bits * pair
        assert column * bits == bit and strip % 16 == 0
        found += [column, column + 1]
        assert column // 64 == thread // 128
    assert sorted(found) == list(range(128))


@pytest.mark.parametrize("length", [32, 64, 128])
def test_lines_are_where_the_copy_engine_puts_them(length, stand, monkeypatch):
    """Units of 16 bytes, as CUDA swizzles them: bits 7 and up of an address turn 4 and up."""
    monkeypatch.setattr(threads, "address_of", lambda ref, offset: offset)
    monkeypatch.setattr(threads.llvm, "ptrtoint", lambda kind, address: address)
    monkeypatch.setattr(threads, "word_type", lambda: None)
    for row, unit in itertools.product(range(8), range(length // 16)):
        stand(row)
        plain = row * length + unit * 16
        turned = plain ^ (plain >> 7) % (length // 16) * 16
        assert threads.unit_address(None, unit, length) == turned


@pytest.mark.parametrize(("bits", "wide", "deep"), DIVISIONS)
def test_sums_change_hands(bits, wide, deep, stand, monkeypatch):
    """Each is put where it is looked for, and 16 lanes that write meet no bank."""
    rows, division = 16, lanes.Division(bits, wide, deep)
    monkeypatch.setattr(exchange, "address_of", lambda ref, offset: offset)
    place: Any = functools.partial(exchange._address, None, division, rows=rows)
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
            column = division.location(division.accumulators()[0])[0]
            found.append(place(0, 2 * (lane % 4), column) // 4 % 32)
        assert sorted(found) == list(range(0, 32, 2))
