"""How sums become rows in hopper_decode: all threads of all programs of a cluster, one after
another, by the functions that build their code, on numbers instead of MLIR."""

import collections
import functools
import itertools
import types
from typing import Any

import pytest

from midtread.kernels.hopper import lanes
from midtread.kernels.weight_matmul.hopper_decode import exchange

Names = types.SimpleNamespace


class Ref(Names):
    """Of shared memory, as a program sees it."""

    name: str
    type: Any


class Machine:
    """What is in shared memory, {(program, name): {offset: two numbers}}, who runs now, and
    how many bytes came to each program."""

    def __init__(self, monkeypatch):
        self.memory = collections.defaultdict(dict)
        self.rank = self.thread = 0
        self.received = collections.Counter()
        self.is_sending = True
        arith = {
            "minui": min,
            "remui": lambda a, b: a % b,
            "divui": lambda a, b: a // b,
        }
        llvm = {
            "ptrtoint": lambda _, address: address,
            "mlir_undef": lambda _: [],
            "insertelement": lambda vector, word, _: [*vector, word],
            "store": lambda pair, at: self.here(at[0]).update({at[1]: pair}),
        }
        nothing = Names(get=lambda *_: None)
        changes = {
            "arith": Names(**arith, addf=lambda a, b: a + b),
            "llvm": Names(**llvm),
            "ir": Names(VectorType=nothing, F32Type=nothing),
            "value": lambda v: v,
            "word_type": lambda: None,
            "address_of": lambda ref, offset: (ref.name, offset),
            "asm": self.run,
            "_word": lambda ref: ref,
            "_rank": lambda: self.rank,
            "_pair": lambda at: self.here(at[0]).get(at[1], [0.0, 0.0]),
        }
        for name, change in changes.items():
            monkeypatch.setattr(exchange, name, change)
        monkeypatch.setattr(lanes.mgpu, "thread_idx", lambda: self.thread)

    def here(self, name):
        return self.memory[self.rank, name]

    def run(self, results, code, given, kinds):
        """Of the instructions, the one that sends."""
        del results, kinds
        if code != exchange._SEND or not self.is_sending:
            return
        (name, offset), _, to, *pair, row, limit = given
        if row < limit:
            assert offset not in self.memory[to, name]
            self.memory[to, name][offset] = pair
            self.received[to] += 8


def term(program, part):
    return 2.0 ** (15 + 4 * program + part)  # every sum tells whose terms it has


CASES = [  # bits, wide and deep, rows, programs
    ((4, 4, 4), 1, 1),
    ((4, 4, 4), 13, 1),
    ((8, 2, 2), 64, 1),
    ((4, 4, 4), 16, 2),
    ((8, 1, 1), 64, 2),
    ((4, 4, 4), 5, 3),
    ((4, 4, 3), 16, 6),
    ((4, 2, 1), 64, 2),
    ((8, 2, 1), 1, 6),
    ((8, 2, 1), 24, 6),
    ((8, 2, 1), 9, 8),
]


@pytest.mark.parametrize("num_halves", [1, 2])
@pytest.mark.parametrize(("division", "m", "cluster"), CASES)
def test_rows_are_written_once_with_what_all_have(
    division, m, cluster, num_halves, monkeypatch
):
    machine, division = Machine(monkeypatch), lanes.Division(*division)
    padded = -(-m // 8) * 8
    everyone = [(r, t) for r in range(cluster) for t in range(128 * division.groups)]
    ring, signal = Ref(name="ring"), Ref(name="signal")
    received = Ref(
        name="received", type=Names(shape=exchange.received_shape(cluster, m))
    )

    for machine.rank, machine.thread in everyone:
        own = term(machine.rank, machine.thread // 128 // division.across)
        for j in division.accumulators():
            column = division.location(j)[0]
            words = [
                own + (8 * t + 2 * (machine.thread % 4) + odd) * 256 + column + h
                for t in range(padded // 8)
                for h in (0, 1)
                for odd in (0, 1)
            ]
            exchange._put(ring, division, j, words, padded)

    total = functools.partial(exchange._total, ring, division, rows=padded)
    ends = division.groups, padded, num_halves
    finish = functools.partial(exchange._alone, total, *ends)
    if cluster > 1:
        ends = division.groups, m, num_halves, received, signal
        finish = functools.partial(exchange._in_cluster, total, *ends)
        for machine.rank, machine.thread in everyone:
            finish()
        for rank in range(cluster):
            expected = exchange._expected(cluster, m, rank)
            assert machine.received[rank] == expected
        machine.is_sending = False  # all of it has come: now as those who waited

    out = {}
    for machine.rank, machine.thread in everyone:
        for row, column, halves in finish():
            assert len(halves) == num_halves and column < 256 // num_halves
            for half, h in itertools.product(range(num_halves), (0, 1)):
                at = row, column + 128 * half + h
                assert at not in out
                out |= {at: halves[half][h]} if row < m else {}
    terms = [term(r, part) for r in range(cluster) for part in range(division.deep)]
    want = {
        (row, column): (row * 256 + column) * len(terms) + sum(terms)
        for row in range(m)
        for column in range(256)
    }
    assert out == want
