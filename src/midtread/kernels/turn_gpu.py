"""How the sums of stream_gpu become its result: they change hands twice, in shared memory.

    between sets of warpgroups     each takes one accumulator and adds up what all have of it
    between programs of a cluster  each takes a share of the rows, adds up what all have of
                                   it, scales it by columns, casts and writes it

Accumulators are [columns, rows] and lie in threads as wgmma leaves them; in between they are
turned into rows of 256 columns, which is how memory wants them.
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
    modulo,
    plus,
    shifted,
    times,
    two_of,
    value,
    word_type,
)
from midtread.kernels.pallas_compat import arith, ir, llvm, mgpu, plgpu

PITCH = COLUMNS + 2  # words between rows in shared memory: lanes meet no bank


class Slots(NamedTuple):
    """For a result [slots, m, 256]: the one that it goes to, the first row that is written,
    and how many rows of each slot are; the others get zeros."""

    own: Any
    first: Any
    counts: list[Any]


def finish(
    out: Any, ring: Any, aside: Any, sums: list[jax.Array], scale: Any,
    division: Division, programs: int, slots: Slots | None = None,
) -> None:  # fmt: skip
    """Adds up what warpgroups and programs of a cluster have, and writes rows [1, m, 256].

    Args:
        ring: bytes in shared memory that nobody needs any more, for sums to change hands in.
        aside: [rows, PITCH] float32 in shared memory.
        scale: of columns, [1, 256] in memory, float32 or bfloat16; None for none.
        programs: of a cluster.
        slots: where there are several; and it may be called again.
    """
    refs = [out, ring, aside] + ([] if scale is None else [scale])
    (num_slots, m, _), padded = out.shape, aside.shape[0]
    strides = math.prod(out.ref.shape[1:]), out.ref.shape[-1]
    size = jnp.dtype(out.dtype).itemsize
    scale_size = 0 if scale is None else jnp.dtype(scale.dtype).itemsize
    types: list[Any] = [plgpu.RefType() for _ in refs]
    types[1] = plgpu.RefType(SWIZZLED)
    types += [plgpu.Layout.WGMMA] * len(sums)
    known = [] if slots is None else [slots.own, slots.first, *slots.counts]
    types += [plgpu.Layout.WG_SPLAT(())] * len(known)
    total = padded * (COLUMNS // 2)  # pairs of neighbours
    share = -(-total // programs)

    @plgpu.inline_mgpu(arg_types=types)
    def run(ctx, out, ring, aside, *rest):
        del ctx
        rest = list(rest)
        scale = [rest.pop(0) for _ in refs[3:]]
        owned = [(j, _words(rest.pop(0))) for j in division.mine()]
        own, first, *counts = [v.registers.flat[0] for v in rest] or [0, 0, m]
        if division.deep > 1:
            needed = division.deep * COLUMNS * padded * 4
            assert math.prod(ring.type.shape) >= needed, (ring.type, needed)
            owned = [_exchange(ring, owned, division)]
        for j, words in owned:
            _put(aside, division.place(j)[0], words, padded)
        (rank,) = asm([word_type()], "mov.u32 $0, %cluster_ctarank;", [], "=r")
        start = times(rank, share)
        found = []
        for ahead in range(0, share, division.groups * 128):
            e = plus(mgpu.thread_idx(), ahead)
            pair = arith.minui(plus(start, e), value(total - 1))
            row, column, offset = _element(pair, padded)
            factors = None
            if scale:  # asked for before the others are waited for
                both = two_of(
                    address_of(scale[0], times(column, scale_size)), scale_size
                )
                factors = [mgpu.utils.bitcast(w, ir.F32Type.get()) for w in both]
            found.append((e, row, column, offset, factors))
        _meet()
        for e, row, column, offset, factors in found:
            both = _gather(aside, offset, programs)
            if factors:
                both = [arith.mulf(v, f) for v, f in zip(both, factors)]
            place = plus(times(row, strides[1]), column)
            row = plus(row, times(first, -1))
            for s in range(num_slots):
                address = address_of(out, times(plus(place, s * strides[0]), size))
                within = (row, counts[s]), (e, share), (plus(start, e), total)
                _write(address, _chosen(both, own, s), within, size)
        if programs > 1 or known:
            _meet()  # nobody leaves while others read its shared memory

    run(*refs, *sums, *known)


def _chosen(both, own, s: int):
    """What is written to slot s: the result, or zeros."""
    if isinstance(own, int):
        return both
    is_own = arith.cmpi(arith.CmpIPredicate.eq, own, value(s))
    zero = mgpu.c(0.0, ir.F32Type.get())
    return [arith.select(is_own, v, zero) for v in both]


def _words(array):
    """What a thread holds of [64, M]: [M / 8, columns, rows], 2 of both."""
    return [
        llvm.extractelement(r, value(h)) for r in array.registers.flat for h in (0, 1)
    ]


def _meet():
    """All threads of all programs of the cluster."""
    asm([], "barrier.cluster.arrive.release.aligned;", [], "")
    asm([], "barrier.cluster.wait.acquire.aligned;", [], "")


def _exchange(ring, owned, division: Division):
    """Each warpgroup gives the accumulators that are not its own away and adds up the one
    that is: of `wide` that a set of warpgroups has in common, the one of its own number."""
    assert division.deep == division.wide
    f32, (wide, across) = ir.F32Type.get(), (division.wide, division.across)
    thread = mgpu.thread_idx()
    wg, lane = shifted(thread, 7), modulo(thread, 128)
    mine, q = value(shifted(wg, across.bit_length() - 1)), modulo(wg, across)
    count = len(owned[0][1])

    def address(giver, a, i):  # four words of every thread side by side
        block = plus(times(plus(times(giver, wide), a), across), q)
        unit = plus(times(block, count // 4), i)
        return address_of(ring, times(plus(times(unit, 128), lane), 16))

    quad = ir.VectorType.get((4,), f32)
    asm([], "barrier.sync 0;", [], "")
    for a, (_, words) in enumerate(owned):
        for i in range(count // 4):
            packed = llvm.mlir_undef(quad)
            for h in range(4):
                packed = llvm.insertelement(packed, words[4 * i + h], value(h))
            llvm.store(packed, address(mine, a, i))
    asm([], "barrier.sync 0;", [], "")
    total: list[Any] = [None] * count
    for giver in range(division.deep):
        for i in range(count // 4):
            packed = llvm.load(quad, address(giver, mine, i))
            for h in range(4):
                word = llvm.extractelement(packed, value(h))
                t = 4 * i + h
                total[t] = word if giver == 0 else arith.addf(total[t], word)
    return plus(times(q, wide), mine), total


def _put(aside, column, words, padded: int):
    """Writes an accumulator's words turned. A thread has rows 8 t + 2 c + odd of two columns
    side by side; even rows lie before odd ones, so that lanes meet no bank."""
    pair = ir.VectorType.get((2,), ir.F32Type.get())
    c = modulo(mgpu.thread_idx(), 4)
    for t in range(padded // 8):
        for odd in (0, 1):
            packed = llvm.mlir_undef(pair)
            for h in (0, 1):
                word = words[4 * t + 2 * h + odd]
                packed = llvm.insertelement(packed, word, value(h))
            row = plus(c, odd * padded // 2 + 4 * t)
            offset = plus(times(row, PITCH), column)
            llvm.store(packed, address_of(aside, times(offset, 4)))


def _element(pair, padded: int):
    """(row, column, byte in `aside`) of a pair of neighbours in the result."""
    each, half = COLUMNS // 2, padded // 2
    place = shifted(pair, each.bit_length() - 1)
    column = times(modulo(pair, each), 2)
    odd = arith.extui(
        word_type(), arith.cmpi(arith.CmpIPredicate.uge, place, value(half))
    )
    row = plus(times(plus(place, times(odd, -half)), 2), odd)
    return row, column, times(plus(times(place, PITCH), column), 4)


_FETCH = """{ .reg .b32 a; mapa.shared::cluster.u32 a, $2, $3;
    ld.shared::cluster.v2.f32 {$0, $1}, [a]; }"""


def _gather(aside, offset, programs: int):
    """Two neighbours, added up over the programs of a cluster."""
    f32 = ir.F32Type.get()
    local = llvm.ptrtoint(word_type(), address_of(aside, offset))
    total = None
    for rank in range(programs):
        found = asm([f32, f32], _FETCH, [local, value(rank)], "=f,=f,r,r")
        total = found if total is None else [arith.addf(*v) for v in zip(total, found)]
    return total


_STORE = {
    4: "@p st.global.v2.f32 [$0], {$1, $2};",
    2: ".reg .b32 v; cvt.rn.bf16x2.f32 v, $2, $1; @p st.global.b32 [$0], v;",
}


def _write(address, both, limits, size: int):
    """Two neighbours in float32 or bfloat16, if every number, unsigned, is below its limit."""
    code = f"""{{ .reg .pred p; setp.lt.u32 p, $3, $4;
        setp.lt.and.u32 p, $5, $6, p; setp.lt.and.u32 p, $7, $8, p;
        {_STORE[size]} }}"""
    given = [address, *both, *(value(v) for pair in limits for v in pair)]
    asm([], code, given, "l,f,f" + ",r" * 6)
