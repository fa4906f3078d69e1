"""How sums in registers become rows of the result.

    in a program    every set of warpgroups writes its sums to the shared memory of the rings,
                    as rows of 256 columns; then each thread reads its columns of every set
                    and adds them up
    in a cluster    program i of c is responsible for rows i, i + c, ..: the other programs
                    send it their sums of these rows, and it adds up, scales, casts and writes

A sender tells the receiver's barrier how many bytes have arrived (st.async). On an H200 this is
1 us faster at 16 rows, and 3 us at 64, than sending registers as they are with a barrier of the
whole cluster after them.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from midtread.kernels.gates import GATES
from midtread.kernels.hopper.lanes import COLUMNS, Division
from midtread.kernels.hopper.threads import (
    address_of,
    array,
    asm,
    by_threads,
    flipped,
    load_pair,
    modulo,
    plus,
    pure,
    shifted,
    times,
    value,
    word_type,
    words_of,
)
from midtread.kernels.pallas_compat import arith, ir, llvm, mgpu, plgpu

SIGNAL = (
    2,
)  # the shape, in words, of the barrier that counts the bytes of other programs

# Two numbers for each thread of a warpgroup.
_PAIRS = plgpu.Layout.WG_STRIDED((COLUMNS,), vec_size=2)

_PREPARE = """{ .reg .pred p; setp.eq.u32 p, $1, 0;
    @p mbarrier.init.shared::cta.b64 [$0], 1;
    @p mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], $2;
    @p fence.mbarrier_init.release.cluster;
    barrier.cluster.arrive.relaxed.aligned; }"""


def received_shape(cluster: int, rows: int) -> tuple[int, int, int]:
    """The shape of the sums that arrive: [other programs, rows, columns]."""
    return cluster - 1, -(-rows // cluster), COLUMNS


def prepare(signal: Any, cluster: int, rows: int) -> None:
    """Tells the other programs of a cluster that this one can receive sums."""

    @by_threads([plgpu.RefType()])
    def tell(signal):
        given = [_word(signal), mgpu.thread_idx(), _expected(cluster, rows, _rank())]
        asm([], _PREPARE, given, "r,r,r")

    tell(signal)


def _expected(cluster: int, rows: int, rank):
    """How many bytes a program receives from all others for its rows."""
    mine = arith.divui(plus(rows + cluster - 1, times(rank, -1)), value(cluster))
    return times(mine, (cluster - 1) * COLUMNS * 4)


def _rank():
    """This program's number in its cluster."""
    return asm([word_type()], "mov.u32 $0, %cluster_ctarank;", [], "=r")[0]


def factors(scales: Any, gate: str | None = None) -> list[jax.Array]:
    """Loads the scales of a program's columns, [256] in memory, for `finish`: those of the columns
    that a thread writes. A kernel that does so before it sums need not wait for memory after it."""
    halves, size = range(1 if gate is None else 2), jnp.dtype(scales.dtype).itemsize
    one = plgpu.ShapeDtypeStruct((COLUMNS,), jnp.float32, layout=_PAIRS)

    @by_threads([plgpu.RefType()], [one] * len(halves))
    def load(scales):
        pair, out = ir.VectorType.get((2,), ir.F32Type.get()), []
        for half in halves:
            column = plus(_positions(1, 1, len(halves))[0][1], half * COLUMNS // 2)
            words = load_pair(address_of(scales, times(column, size)), size)
            packed = llvm.mlir_undef(pair)
            for h, word in enumerate(words):
                wide = mgpu.utils.bitcast(word, ir.F32Type.get())
                packed = llvm.insertelement(packed, wide, value(h))
            out.append(
                array([packed], (COLUMNS,), mgpu.WGStridedFragLayout((COLUMNS,), 2))
            )
        return out

    return load(scales)


class Slots(NamedTuple):
    """Which part of a result [slots, m, 256] is written: the slot that gets the sums (the others
    get zeros), the first row, and how many rows of each slot."""

    own: Any
    first: Any
    counts: list[Any]


def finish(
    out: Any, spare: tuple[Any, Any], sums: list[jax.Array], scale: list, division: Division,
    others: tuple | None = None, slots: Slots | None = None, gate: str | None = None,
) -> None:  # fmt: skip
    """Adds up the sums of warpgroups and of a cluster's programs, and writes rows [1, m, 256], or
    [1, m, 128] where the first half of the columns gates the second.

    Args:
        spare: shared memory that nobody needs any more, for sums to change hands in, and its
            transforms.
        scale: of columns, by `factors`; none of them if there are none.
        others: where a cluster shares a sum: memory of `received_shape`, float32, for those
            of the others, and the barrier that says they have come.
        slots: which of several slots to write; then this may be called repeatedly.
        gate: a name in `gates.GATES` that has PTX.
    """
    ring, order = spare
    refs = [out, ring, *(others or ())]
    (num_slots, m, _), rows = out.shape, sums[0].shape[1]
    strides = math.prod(out.ref.shape[1:]), out.ref.shape[-1]
    size = jnp.dtype(out.dtype).itemsize
    types: list[Any] = [plgpu.RefType() for _ in refs]
    types[1] = plgpu.RefType(order)
    types += [_PAIRS] * len(scale)
    types += [plgpu.Layout.WGMMA] * len(sums)
    known = [] if slots is None else [slots.own, slots.first, *slots.counts]
    types += [plgpu.Layout.WG_SPLAT(())] * len(known)

    @by_threads(types)
    def run(out, ring, *rest):
        rest = list(rest)
        sent = (rest.pop(0), rest.pop(0)) if others else None
        scaling = [rest.pop(0).registers.flat[0] for _ in scale]
        needed = division.deep * rows * COLUMNS * 4
        room = math.prod(ring.type.shape) * ring.type.element_type.width // 8
        assert room >= needed, (ring.type, needed)
        asm([], "barrier.sync 0;", [], "")
        for j in division.accumulators():
            _put(ring, division, j, words_of(rest.pop(0)), rows)
        asm([], "barrier.sync 0;", [], "")
        own, first, *counts = [v.registers.flat[0] for v in rest] or [0, 0, m]
        total = functools.partial(_total, ring, division, rows=rows)
        groups, num_halves = division.groups, 1 if gate is None else 2
        results = (
            _in_cluster(total, groups, m, num_halves, *sent)
            if sent
            else _alone(total, groups, rows, num_halves)
        )
        for row, column, halves in results:
            for h, pair in enumerate(scaling):  # the same columns in every row
                each = [llvm.extractelement(pair, value(i)) for i in (0, 1)]
                halves[h] = [arith.mulf(v, f) for v, f in zip(halves[h], each)]
            both = halves[0] if gate is None else _gated(gate, *halves)
            element = plus(times(row, strides[1]), column)
            row = plus(row, times(first, -1))
            for s in range(num_slots):
                address = address_of(out, times(plus(element, s * strides[0]), size))
                _write(address, _chosen(both, own, s), row, counts[s], size)

    run(*refs, *scale, *sums, *known)


def _positions(groups: int, count: int, num_halves: int = 1) -> list:
    """The (row, column) pairs that this thread is responsible for, of at least `count` rows of
    256 columns, or of half of them. A thread takes two columns, the same of each of its rows, and
    a warpgroup one row at a time, or two halves."""
    shift = 8 - num_halves  # so many bits number the pairs of columns
    steps = range(0, -(-count // num_halves), groups)
    threads = [plus(mgpu.thread_idx(), i * 128) for i in steps]
    return [(shifted(e, shift), times(modulo(e, 1 << shift), 2)) for e in threads]


def _halves(sum_at: Callable, row, column, num_halves: int) -> list:
    """What `sum_at` says of two columns of a row, and of the two that lie half the columns on."""
    columns = [plus(column, h * COLUMNS // 2) for h in range(num_halves)]
    return [sum_at(row, each) for each in columns]


def _alone(total: Callable, groups: int, rows: int, num_halves: int) -> list:
    """(row, column, the sums of two neighbouring columns of each half) of all that this thread
    writes, added up over the sets of warpgroups."""
    last = lambda row: arith.minui(row, value(rows - 1))
    return [
        (row, column, _halves(total, last(row), column, num_halves))
        for row, column in _positions(groups, rows, num_halves)
    ]


def _in_cluster(total: Callable, groups: int, m: int, num_halves: int, received, signal) -> list:  # fmt: skip
    """The same, added up over all programs of a cluster, which share m rows."""
    away, share, _ = received.type.shape
    cluster, rank = away + 1, _rank()
    positions = _positions(groups, share)
    last = lambda row: arith.minui(row, value(m - 1))
    slot = lambda d, i: plus(d * share, arith.minui(i, value(share - 1)))
    asm([], "barrier.cluster.wait.acquire.aligned;", [], "")
    for d in range(
        away
    ):  # this one goes to the program whose number is larger by d + 1
        to = arith.remui(plus(rank, d + 1), value(cluster))
        for i, column in positions:
            row = plus(times(i, cluster), to)
            target = address_of(received, _offset(slot(d, i), column))
            given = [llvm.ptrtoint(word_type(), target), _word(signal), to]
            given += [*total(last(row), column), row, value(m)]
            asm([], _SEND, given, "r,r,r,f,f,r,r")
    positions = _positions(groups, share, num_halves)
    rows = [plus(times(i, cluster), rank) for i, _ in positions]
    own = [_halves(total, last(row), column, num_halves) for row, (_, column) in zip(rows, positions)]  # fmt: skip
    asm([], _WAIT, [_word(signal)], "r")

    def arrived(i, column) -> list:
        given = [address_of(received, _offset(slot(d, i), column)) for d in range(away)]
        return _added([*map(_pair, given)])

    results = []
    for row, (i, column), halves in zip(rows, positions, own):
        more = _halves(arrived, i, column, num_halves)
        results.append((row, column, [_added(pairs) for pairs in zip(halves, more)]))
    return results


def _gated(gate: str, gates: list, values: list) -> list:
    code = GATES[gate].code
    return [pure(code, [ir.F32Type.get()], [a, b])[0] for a, b in zip(gates, values)]


def _chosen(both, own, s: int):
    """What slot s gets: the sums if it is the own slot, else zeros."""
    if isinstance(own, int):
        return both
    is_own = arith.cmpi(arith.CmpIPredicate.eq, own, value(s))
    zero = mgpu.c(0.0, ir.F32Type.get())
    return [arith.select(is_own, v, zero) for v in both]


def _word(ref):
    """The address of a reference in shared memory, as a word."""
    return llvm.ptrtoint(word_type(), address_of(ref, 0))


def _offset(row, column):
    return times(plus(times(row, COLUMNS), column), 4)


# Bits of a column that do not tell the lanes of a half warp apart, by the bits of a code.
SPREAD = {2: (2, 4), 4: (2, 16), 8: (8, 16)}


def _address(ring, division: Division, part, row, column, rows: int):
    """The address of a set's sum of a row and column. Even rows come first, and columns are
    permuted by row, so that no two lanes write to the same bank."""
    near, far = SPREAD[division.bits]
    two = shifted(row, 1)
    spread = plus(times(modulo(two, 2), near), times(modulo(shifted(two, 1), 2), far))
    slot = plus(times(part, rows), times(modulo(row, 2), rows // 2), two)
    return address_of(ring, _offset(slot, flipped(column, spread)))


def _put(ring, division: Division, j, words, rows: int):
    """Writes the words of an accumulator: a thread has rows 8 t + 2 c + odd of two columns."""
    pair = ir.VectorType.get((2,), ir.F32Type.get())
    thread = mgpu.thread_idx()
    across = division.across.bit_length() - 1
    part = 0 if division.deep == 1 else shifted(thread, 7 + across)
    column = division.location(j)[0]
    for t in range(rows // 8):
        for odd in (0, 1):
            packed = llvm.mlir_undef(pair)
            for h in (0, 1):
                word = words[4 * t + 2 * h + odd]
                packed = llvm.insertelement(packed, word, value(h))
            row = plus(times(modulo(thread, 4), 2), 8 * t + odd)
            llvm.store(packed, _address(ring, division, part, row, column, rows))


def _pair(address):
    packed = llvm.load(ir.VectorType.get((2,), ir.F32Type.get()), address)
    return [llvm.extractelement(packed, value(h)) for h in (0, 1)]


def _total(ring, division: Division, row, column, rows: int) -> list:
    """The sums of two neighbouring columns, added up over the sets of warpgroups."""
    address = functools.partial(_address, ring, division)
    return _added(
        [_pair(address(part, row, column, rows)) for part in range(division.deep)]
    )


def _added(pairs: list) -> list:
    return functools.reduce(lambda a, b: [arith.addf(*v) for v in zip(a, b)], pairs)


_SEND = """{ .reg .b32 a, b; .reg .pred p; setp.lt.u32 p, $5, $6;
    mapa.shared::cluster.u32 a, $0, $2;
    mapa.shared::cluster.u32 b, $1, $2;
    @p st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [a], {$3, $4}, [b]; }"""

_WAIT = """{ .reg .pred p;
    again: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [$0], 0;
    @!p bra again; }"""


_STORE = {
    4: "@p st.global.v2.f32 [$0], {$1, $2};",
    2: ".reg .b32 v; cvt.rn.bf16x2.f32 v, $2, $1; @p st.global.b32 [$0], v;",
}


def _write(address, both, row, limit, size: int):
    """Writes two neighbours in float32 or bfloat16, if the row, as an unsigned number, is below
    the limit."""
    code = f"{{ .reg .pred p; setp.lt.u32 p, $3, $4; {_STORE[size]} }}"
    asm([], code, [address, *both, row, value(limit)], "l,f,f,r,r")
