"""How the sums of stream_gpu become its result: through shared memory, and back as rows.

    in a program    every set of warpgroups puts its sums into the memory of the rings, as
                    rows of 256 columns, which is how memory wants them; then each thread
                    adds up what the sets have of its columns
    in a pair       the first program takes even rows and the second odd ones: either sends
                    the other its sums, and adds up, scales, casts and writes

Sums are sent with a count of bytes that the receiver waits for (st.async), and in the order
of rows. Sent as they lie in registers, with a barrier of the cluster and its fence after
them, they took 1 us more on an H200 at 16 rows and 3 at 64.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from midtread.kernels.lanes_gpu import (
    COLUMNS,
    SWIZZLED,
    Division,
    address_of,
    asm,
    flipped,
    modulo,
    plus,
    shifted,
    times,
    two_of,
    value,
    word_type,
    words_of,
)
from midtread.kernels.pallas_compat import arith, ir, llvm, mgpu, plgpu

SIGNAL = (2,)  # words of the barrier at which another program's sums are waited for

_PREPARE = """{ .reg .pred p; setp.eq.u32 p, $1, 0;
    @p mbarrier.init.shared::cta.b64 [$0], 1;
    @p mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], $2;
    @p fence.mbarrier_init.release.cluster;
    barrier.cluster.arrive.relaxed.aligned; }"""


def prepare(received: Any, signal: Any) -> None:
    """Tells the other program of a pair that its sums may come, once both are here."""

    @plgpu.inline_mgpu(arg_types=[plgpu.RefType(), plgpu.RefType()])
    def tell(ctx, received, signal):
        del ctx
        num_bytes = value(math.prod(received.type.shape) * 4)
        asm([], _PREPARE, [_word(signal), mgpu.thread_idx(), num_bytes], "r,r,r")

    run: Any = tell  # its first argument comes from Pallas
    run(received, signal)


class Slots(NamedTuple):
    """For a result [slots, m, 256]: the one that it goes to, the first row that is written,
    and how many rows of each slot are; the others get zeros."""

    own: Any
    first: Any
    counts: list[Any]


def finish(
    out: Any, ring: Any, sums: list[jax.Array], scale: Any, division: Division,
    pair: tuple | None = None, slots: Slots | None = None,
) -> None:  # fmt: skip
    """Adds up what warpgroups and both programs of a pair have, and writes rows [1, m, 256].

    Args:
        ring: bytes in shared memory that nobody needs any more, for sums to change hands in.
        scale: of columns, [1, 256] in memory, float32 or bfloat16; None for none.
        pair: of two programs that share a sum: [rows / 2, 256] float32 in shared memory, for
            those of the other, and the barrier that says they have come.
        slots: where there are several; and it may be called again.
    """
    refs = [out, ring, *(pair or ()), *([] if scale is None else [scale])]
    (num_slots, m, _), half = out.shape, sums[0].shape[1] // 2
    strides = math.prod(out.ref.shape[1:]), out.ref.shape[-1]
    size = jnp.dtype(out.dtype).itemsize
    scale_size = 0 if scale is None else jnp.dtype(scale.dtype).itemsize
    types: list[Any] = [plgpu.RefType() for _ in refs]
    types[1] = plgpu.RefType(SWIZZLED)
    types += [plgpu.Layout.WGMMA] * len(sums)
    known = [] if slots is None else [slots.own, slots.first, *slots.counts]
    types += [plgpu.Layout.WG_SPLAT(())] * len(known)

    @plgpu.inline_mgpu(arg_types=types)
    def run(ctx, out, ring, *rest):
        del ctx
        rest = list(rest)
        received, signal = (rest.pop(0), rest.pop(0)) if pair else (None, None)
        factors = None if scale is None else rest.pop(0)
        needed = division.deep * 2 * half * COLUMNS * 4
        assert math.prod(ring.type.shape) >= needed, (ring.type, needed)
        asm([], "barrier.sync 0;", [], "")
        for j in division.mine():
            _put(ring, division, j, words_of(rest.pop(0)), half)
        asm([], "barrier.sync 0;", [], "")
        own, first, *counts = [v.registers.flat[0] for v in rest] or [0, 0, m]
        found = _totals(ring, division, half, received, signal)
        for row, column, both in found:
            if scale is not None:
                start = address_of(factors, times(column, scale_size))
                words = two_of(start, scale_size)
                words = [mgpu.utils.bitcast(w, ir.F32Type.get()) for w in words]
                both = [arith.mulf(v, f) for v, f in zip(both, words)]
            place = plus(times(row, strides[1]), column)
            row = plus(row, times(first, -1))
            for s in range(num_slots):
                address = address_of(out, times(plus(place, s * strides[0]), size))
                _write(address, _chosen(both, own, s), row, counts[s], size)

    run(*refs, *sums, *known)


def _totals(ring, division: Division, half: int, received, signal) -> list:
    """(row, column, two neighbours) of what this thread writes, added up over all."""
    pairs = []  # this thread's, or some of the last row again
    for ahead in range(0, half, division.groups):
        e = plus(mgpu.thread_idx(), ahead * 128)
        row = arith.minui(shifted(e, 7), value(half - 1))
        pairs.append((e, row, times(modulo(e, 128), 2)))
    total = lambda odd, row, column: _total(ring, division, odd, row, column, half)
    line = lambda row, odd: plus(times(row, 2), odd)
    if received is None:
        return [
            (line(row, odd), column, total(odd, row, column))
            for odd in (0, 1)
            for _, row, column in pairs
        ]
    (rank,) = asm([word_type()], "mov.u32 $0, %cluster_ctarank;", [], "=r")
    other = flipped(rank, 1)
    asm([], "barrier.cluster.wait.acquire.aligned;", [], "")
    for e, row, column in pairs:
        place = llvm.ptrtoint(word_type(), address_of(received, _offset(row, column)))
        given = [place, _word(signal), other, *total(other, row, column)]
        asm([], _SEND, [*given, e, value(half * 128)], "r,r,r,f,f,r,r")
    own = [total(rank, row, column) for _, row, column in pairs]
    asm([], _WAIT, [_word(signal)], "r")
    found = []
    for (_, row, column), both in zip(pairs, own):
        more = _pair(address_of(received, _offset(row, column)))
        both = [arith.addf(*v) for v in zip(both, more)]
        found.append((line(row, rank), column, both))
    return found


def _chosen(both, own, s: int):
    """What is written to slot s: the result, or zeros."""
    if isinstance(own, int):
        return both
    is_own = arith.cmpi(arith.CmpIPredicate.eq, own, value(s))
    zero = mgpu.c(0.0, ir.F32Type.get())
    return [arith.select(is_own, v, zero) for v in both]


def _word(ref):
    """The address of a ref in shared memory."""
    return llvm.ptrtoint(word_type(), address_of(ref, 0))


def _offset(row, column):
    return times(plus(times(row, COLUMNS), column), 4)


def _place(ring, division: Division, part, odd, row, column, half: int):
    """Where a set's sums of row 2 `row` + `odd` lie. Columns trade places by row, so that
    lanes meet no bank when they write."""
    near, far = (2, 16) if division.bits == 4 else (8, 16)
    spread = plus(times(modulo(row, 2), near), times(modulo(shifted(row, 1), 2), far))
    row = plus(times(plus(times(part, 2), odd), half), row)
    return address_of(ring, _offset(row, flipped(column, spread)))


def _put(ring, division: Division, j, words, half: int):
    """Writes an accumulator's words. A thread has rows 8 t + 2 c + odd of two columns."""
    pair = ir.VectorType.get((2,), ir.F32Type.get())
    thread = mgpu.thread_idx()
    across = division.across.bit_length() - 1
    part = 0 if division.deep == 1 else shifted(thread, 7 + across)
    column = division.place(j)[0]
    for t in range(half // 4):
        for odd in (0, 1):
            packed = llvm.mlir_undef(pair)
            for h in (0, 1):
                word = words[4 * t + 2 * h + odd]
                packed = llvm.insertelement(packed, word, value(h))
            row = plus(modulo(thread, 4), 4 * t)
            llvm.store(packed, _place(ring, division, part, odd, row, column, half))


def _pair(address):
    packed = llvm.load(ir.VectorType.get((2,), ir.F32Type.get()), address)
    return [llvm.extractelement(packed, value(h)) for h in (0, 1)]


def _total(ring, division: Division, odd, row, column, half: int):
    """Two neighbours, added up over the sets of warpgroups."""
    parts = [
        _pair(_place(ring, division, part, odd, row, column, half))
        for part in range(division.deep)
    ]
    total = parts[0]
    for part in parts[1:]:
        total = [arith.addf(*v) for v in zip(total, part)]
    return total


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
    """Two neighbours in float32 or bfloat16, if the row, unsigned, is below its limit."""
    code = f"{{ .reg .pred p; setp.lt.u32 p, $3, $4; {_STORE[size]} }}"
    asm([], code, [address, *both, row, value(limit)], "l,f,f,r,r")
