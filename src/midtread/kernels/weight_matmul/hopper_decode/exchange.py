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

from midtread.kernels.hopper.lanes import COLUMNS, Division
from midtread.kernels.hopper.threads import (
    address_of,
    asm,
    flipped,
    load_pair,
    modulo,
    plus,
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

    @plgpu.inline_mgpu(arg_types=[plgpu.RefType()])
    def tell(ctx, signal):
        del ctx
        given = [_word(signal), mgpu.thread_idx(), _expected(cluster, rows, _rank())]
        asm([], _PREPARE, given, "r,r,r")

    run: Any = tell  # its first argument comes from Pallas
    run(signal)


def _expected(cluster: int, rows: int, rank):
    """How many bytes a program receives from all others for its rows."""
    mine = arith.divui(plus(rows + cluster - 1, times(rank, -1)), value(cluster))
    return times(mine, (cluster - 1) * COLUMNS * 4)


def _rank():
    """This program's number in its cluster."""
    return asm([word_type()], "mov.u32 $0, %cluster_ctarank;", [], "=r")[0]


class Slots(NamedTuple):
    """Which part of a result [slots, m, 256] is written: the slot that gets the sums (the others
    get zeros), the first row, and how many rows of each slot."""

    own: Any
    first: Any
    counts: list[Any]


def finish(
    out: Any, spare: tuple[Any, Any], sums: list[jax.Array], scale: Any, division: Division,
    others: tuple | None = None, slots: Slots | None = None,
) -> None:  # fmt: skip
    """Adds up the sums of warpgroups and of a cluster's programs, and writes rows [1, m, 256].

    Args:
        spare: shared memory that nobody needs any more, for sums to change hands in, and its
            transforms.
        scale: of columns, [1, 256] in memory, float32 or bfloat16; None for none.
        others: where a cluster shares a sum: memory of `received_shape`, float32, for those
            of the others, and the barrier that says they have come.
        slots: which of several slots to write; then this may be called repeatedly.
    """
    ring, order = spare
    refs = [out, ring, *(others or ()), *([] if scale is None else [scale])]
    (num_slots, m, _), rows = out.shape, sums[0].shape[1]
    strides = math.prod(out.ref.shape[1:]), out.ref.shape[-1]
    size = jnp.dtype(out.dtype).itemsize
    scale_size = 0 if scale is None else jnp.dtype(scale.dtype).itemsize
    types: list[Any] = [plgpu.RefType() for _ in refs]
    types[1] = plgpu.RefType(order)
    types += [plgpu.Layout.WGMMA] * len(sums)
    known = [] if slots is None else [slots.own, slots.first, *slots.counts]
    types += [plgpu.Layout.WG_SPLAT(())] * len(known)

    @plgpu.inline_mgpu(arg_types=types)
    def run(ctx, out, ring, *rest):
        del ctx
        rest = list(rest)
        sent = (rest.pop(0), rest.pop(0)) if others else None
        factors = None if scale is None else rest.pop(0)
        needed = division.deep * rows * COLUMNS * 4
        room = math.prod(ring.type.shape) * ring.type.element_type.width // 8
        assert room >= needed, (ring.type, needed)
        asm([], "barrier.sync 0;", [], "")
        for j in division.accumulators():
            _put(ring, division, j, words_of(rest.pop(0)), rows)
        asm([], "barrier.sync 0;", [], "")
        own, first, *counts = [v.registers.flat[0] for v in rest] or [0, 0, m]
        total = functools.partial(_total, ring, division, rows=rows)
        groups = division.groups
        results = (
            _in_cluster(total, groups, m, *sent)
            if sent
            else _alone(total, groups, rows)
        )
        for row, column, both in results:
            if scale is not None:
                start = address_of(factors, times(column, scale_size))
                words = load_pair(start, scale_size)
                words = [mgpu.utils.bitcast(w, ir.F32Type.get()) for w in words]
                both = [arith.mulf(v, f) for v, f in zip(both, words)]
            element = plus(times(row, strides[1]), column)
            row = plus(row, times(first, -1))
            for s in range(num_slots):
                address = address_of(out, times(plus(element, s * strides[0]), size))
                _write(address, _chosen(both, own, s), row, counts[s], size)

    run(*refs, *sums, *known)


def _positions(groups: int, count: int) -> list:
    """The (row, column) pairs that this thread is responsible for, of at least `count` rows of
    256 columns. A warpgroup takes one row at a time, and a thread two columns of it."""
    threads = [plus(mgpu.thread_idx(), i * 128) for i in range(0, count, groups)]
    return [(shifted(e, 7), times(modulo(e, 128), 2)) for e in threads]


def _alone(total: Callable, groups: int, rows: int) -> list:
    """(row, column, the sums of two neighbouring columns) of all that this thread writes, added
    up over the sets of warpgroups."""
    return [
        (row, column, total(arith.minui(row, value(rows - 1)), column))
        for row, column in _positions(groups, rows)
    ]


def _in_cluster(total: Callable, groups: int, m: int, received, signal) -> list:
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
    rows = [plus(times(i, cluster), rank) for i, _ in positions]
    own = [total(last(row), column) for row, (_, column) in zip(rows, positions)]
    asm([], _WAIT, [_word(signal)], "r")
    results = []
    for row, (i, column), both in zip(rows, positions, own):
        given = [address_of(received, _offset(slot(d, i), column)) for d in range(away)]
        results.append((row, column, _added([both, *map(_pair, given)])))
    return results


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
