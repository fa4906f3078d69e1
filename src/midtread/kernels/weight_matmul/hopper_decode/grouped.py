"""Few rows for each expert against stored weights on Hopper.

    out_RN  =  sum_t s_gtN  sum_{k in t} x_Rk value(code_gkN)         g = group of row R, Mosaic

The rows of a group are cut into blocks that start at a multiple of 8, because the copy engine
moves 8 rows at a time; rows of a neighbouring group are computed with them and not written. A
block of rows times 256 columns of its group's weight is an item. The weights of all items, end to
end, are one long sequence of blocks, which is cut into equal spans, one for each multiprocessor.
A program reads its span through the rings of pipeline.py and never stops fetching; where an item
ends, its warpgroups add up their sums and write them.

So an item may be cut between programs, and its sum then has several parts. Each part has a slot
of the result, slots without a part are written as zeros, and XLA adds up the slots, always in the
same order. Rows beyond all groups have no blocks, and XLA makes them zero.

Only the device knows the sizes of the groups. Every program adds them up for itself, which takes
less time than launching another kernel. From them it chooses how many rows a block has: of two
`Cut`s, it takes the one whose blocks cost less for these groups.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from midtread.kernels.hopper.lanes import COLUMNS, SWIZZLED
from midtread.kernels.hopper.ring import References, named
from midtread.kernels.pallas_compat import (
    alike,
    interpreter,
    lane_params,
    num_cores,
    pl,
    plgpu,
)
from midtread.kernels.weight_matmul.hopper_decode import exchange, pipeline
from midtread.kernels.weight_matmul.hopper_decode.kernel import by_columns
from midtread.kernels.weight_matmul.hopper_decode.pipeline import (
    DecodeBlocks,
    Plan,
    Warpgroup,
)
from midtread.numerics.formats import Format, dtype_bits

MOST_SLOTS = 4
STRIP = 8  # rows of the copy engine's pattern


@dataclasses.dataclass(frozen=True)
class Cut:
    """One way to cut groups into blocks of rows."""

    rows: int  # of a block, a multiple of STRIP
    cost: int  # of a block, to be compared with that of other cuts
    blocks: DecodeBlocks  # `split` and `cluster` are 1


@dataclasses.dataclass(frozen=True)
class Walk:
    """How programs go through all items. A unit is one block of the weight for each ring."""

    number: int  # of the cut
    rows: int
    num_groups: int
    tiles: int  # of 256 columns
    units: int  # of an item
    programs: int
    slots: int


class GroupStarts(NamedTuple):
    """The first row of each group, and for each cut its first block, with one more entry for
    what follows the last group. It lies in shared memory, or, made by XLA, in global memory."""

    rows: Any  # [G + 1]
    blocks: Any  # [cuts, G + 1]

    def fill(self, sizes, num_rows: int, walks: list[Walk]) -> list:
        """Fills itself from the sizes; returns [rows in groups, blocks by each cut]."""

        def put(g, firsts):
            self.rows[g] = firsts[0]
            for walk, block in zip(walks, firsts[1:]):
                self.blocks[walk.number, g] = block

        def one(g, firsts):
            put(g, firsts)
            return _after(firsts, sizes[g], num_rows, walks)

        num_groups, zero = sizes.shape[0], jnp.int32(0)
        firsts = lax.fori_loop(0, num_groups, one, [zero] * (1 + len(walks)))
        put(num_groups, firsts)
        return firsts

    def find(self, walk: Walk, item) -> tuple:
        """(group, first row, tile of columns) of an item."""
        block = lax.div(item, walk.tiles)
        group, step = jnp.int32(0), 1 << (walk.num_groups - 1).bit_length()
        while (
            step > 1
        ):  # bisects for the last group that does not start after this block
            step //= 2
            later = jnp.minimum(group + step, walk.num_groups)
            group = jnp.where(self.blocks[walk.number, later] <= block, later, group)
        strip = lax.div(self.rows[group], STRIP)
        row = (block - self.blocks[walk.number, group]) * walk.rows + strip * STRIP
        return group, row, item - block * walk.tiles


def _after(firsts: list, size, num_rows: int, walks: list[Walk]) -> list:
    """The first row and the first blocks of the group that follows a group of `size` rows."""
    start, *blocks = firsts
    end = jnp.minimum(start + size, num_rows)
    num_rows_of_blocks = jnp.where(end > start, end - lax.div(start, STRIP) * STRIP, 0)
    return [
        end,
        *(b + _over(num_rows_of_blocks, w.rows) for b, w in zip(blocks, walks)),
    ]


def by_xla(sizes_G: jax.Array, num_rows: int, walks: list[Walk]) -> GroupStarts:
    """The same by XLA, for the interpreter: it sometimes halts where warpgroups fill them."""
    step = lambda firsts, size: (_after(firsts, size, num_rows, walks), firsts)
    zero, sizes = jnp.int32(0), jnp.append(sizes_G, 0).astype(jnp.int32)
    _, (rows, *blocks) = lax.scan(step, [zero] * (1 + len(walks)), sizes)
    return GroupStarts(rows, jnp.stack(blocks))


def _over(a, b):
    return -(-a // b) if isinstance(a, int) else lax.div(a + b - 1, b)


class Way(NamedTuple):
    """A cut, with the plan, the walk and the shared memory that follow from it."""

    plan: Plan
    walk: Walk
    cost: int
    buffers: dict  # in shared memory, by their names in References


def _body(*given, ways: list[Way], operands: tuple[str, ...], num_rows: int):
    walks = [way.walk for way in ways]
    if ways[0].plan.native:
        *given, sizes, out, inside, rows, blocks = given
        groups = GroupStarts(rows, blocks)
        inside[0], *counts = groups.fill(sizes, num_rows, walks)
    else:
        *given, rows, blocks, out, inside = given
        groups, num_groups = GroupStarts(rows, blocks), walks[0].num_groups
        inside[0], *counts = rows[num_groups], blocks[0, num_groups]

    def run(way: Way, count):
        def scoped(*buffers):
            refs = named((*operands, "out", *way.buffers), [*given, out, *buffers])
            _over_items(way.plan, way.walk, refs, groups, count)

        pl.run_scoped(scoped, *way.buffers.values(), collective_axes="wg")

    first, *more = [functools.partial(run, *pair) for pair in zip(ways, counts)]
    if more:
        is_first = counts[0] * ways[0].cost <= counts[1] * ways[1].cost
        lax.cond(is_first, first, *more)
    else:
        first()


def _over_items(
    plan: Plan, walk: Walk, refs: References, groups: GroupStarts, num_blocks
):
    """Reads this program's span of all items and writes the sums of each."""
    units, deep = walk.units, plan.division.deep
    total = num_blocks * walk.tiles * units
    each = jnp.maximum(_over(total, walk.programs), _over(units, walk.slots - 1))
    start = jnp.minimum(lax.axis_index("program") * each, total)
    stop = jnp.minimum(start + each, total)

    def address(ring, i):
        item = lax.div(start + i, units)
        group, row, tile = groups.find(walk, item)
        chunk = (start + i - item * units) * deep + ring
        first = (group * plan.num_chunks + chunk) * plan.blocks.k
        row = pl.multiple_of(row, STRIP)
        return pipeline.BlockAddress(first, tile, row, chunk * plan.blocks.k)

    me = pipeline.this_warpgroup(plan, lambda ring: stop - start, address)
    pipeline.fill(plan, refs, me)

    def one(item, _):
        begin = jnp.maximum(item * units, start)
        end = jnp.minimum((item + 1) * units, stop)
        span = begin - start, end - start
        sums = pipeline.sums(plan, refs, me._replace(span=span))
        slot, is_last = _over(begin - item * units, each), end == (item + 1) * units
        written = [(slot == s) | ((slot < s) & is_last) for s in range(walk.slots)]
        group, row, tile = groups.find(walk, item)
        low = jnp.maximum(groups.rows[group] - row, 0)
        high = jnp.minimum(groups.rows[group + 1] - row, walk.rows)
        write = _write if plan.native else _write_interpreted
        write(plan, refs, me, sums, (group, row, tile), (low, high), slot, written)

    lax.fori_loop(lax.div(start, units), _over(stop, units), one, None)


def _write(
    plan: Plan, refs: References, me: Warpgroup, sums, item, limits, slot, written
):
    del me
    (group, row, tile), (low, high) = item, limits
    columns = pl.ds(tile * COLUMNS, COLUMNS)
    out = refs.out.at[:, pl.ds(row, refs.x_ring.shape[1]), columns]
    scale = refs.column_scales
    scale = [] if scale is None else exchange.factors(scale.at[group, columns])
    counts = [jnp.where(is_written, high - low, 0) for is_written in written]
    slots = exchange.Slots(slot, low, counts)
    spare = refs.exchange, SWIZZLED
    exchange.finish(out, spare, sums, scale, plan.division, slots=slots)


def _write_interpreted(plan: Plan, refs: References, me: Warpgroup, sums, item, limits, slot, written):  # fmt: skip
    """Writes whole blocks, separately for each group; XLA moves their rows to where they belong."""
    del limits
    group, row, tile = item
    if refs.column_scales is not None:
        scale = refs.column_scales.at[group, pl.ds(tile * COLUMNS, COLUMNS)]
        scale = scale[...].astype(jnp.float32)[None]
        factors = plan.division.interpreted(scale, me.number)
        sums = [one * factor for one, factor in zip(sums, factors)]
    for s, is_written in enumerate(written):

        @pl.when(is_written)
        def _(s=s):
            for a, one in enumerate(sums):
                rows, j = pl.ds(row, one.shape[1]), me.within * plan.blocks.wide + a
                part = jnp.where(slot == s, one, 0.0)
                refs.out[s, group, me.ring, tile, j, :, rows] = part


def grouped_matmul(
    x_RK: jax.Array,
    bytes_GKB: jax.Array,
    scale_GTN: jax.Array,
    sizes_G: jax.Array,
    *,
    fmt: Format,
    cuts: tuple[Cut, ...],
    interpret: bool = False,
) -> jax.Array:
    """[R, N] in float32: rows times the values of their group's codes, scaled for each of T
    tiles of the sum.

    Args:
        scale_GTN: in float32 or bfloat16.
        cuts: one or two, with as many warpgroups. Interpreted, the first: warpgroups that
            wait for each other in a branch keep the interpreter's threads.
    """
    cuts = cuts[:1] if interpret else cuts
    num_rows, (num_groups, _, num_n) = x_RK.shape[0], scale_GTN.shape
    ways = _ways(x_RK.shape, scale_GTN, fmt, cuts, not interpret)
    walks = [way.walk for way in ways]
    most = max(cut.rows for cut in cuts)
    padded = max(-(-num_rows // STRIP) * STRIP, most) + (most if interpret else 0)
    x = jnp.pad(x_RK, ((0, padded - num_rows), (0, 0)))
    operands, scratch = _operands(x, bytes_GKB, scale_GTN, ways[0].plan), []
    args = list(operands.values())
    out = (walks[0].slots, num_rows, num_n)
    if interpret:
        args += by_xla(sizes_G, num_rows, walks)
        out = out[0], num_groups, cuts[0].blocks.deep, walks[0].tiles, 4, 64, padded
    else:
        args.append(sizes_G.astype(jnp.int32))
        firsts = (num_groups + 1,), (len(cuts), num_groups + 1)
        scratch = [plgpu.SMEM(shape, jnp.int32) for shape in firsts]
    (num_threads,) = {way.plan.division.groups for way in ways}
    kernel = plgpu.kernel(
        functools.partial(
            _body, ways=ways, operands=tuple(operands), num_rows=num_rows
        ),
        out_type=(
            jax.ShapeDtypeStruct(out, jnp.float32),
            jax.ShapeDtypeStruct((1,), jnp.int32),
        ),
        grid=(walks[0].programs,),
        grid_names=("program",),
        num_threads=num_threads,
        thread_name="wg",
        scratch_types=scratch,
        compiler_params=lane_params(),
        **(interpreter() if interpret else {}),
    )
    out, inside = kernel(*alike(*args))
    out, row = jnp.sum(out, axis=0), jnp.arange(num_rows, dtype=jnp.int32)[:, None]
    if interpret:
        out = _put_in_place(out, sizes_G, row, dtype_bits(fmt.dtype))
    return jnp.where(row < inside, out, 0.0)


def _ways(shape, scale_GTN, fmt: Format, cuts, native: bool) -> list[Way]:
    (num_rows, k), (num_groups, num_tiles, num_n) = shape, scale_GTN.shape
    group = None if num_tiles == 1 else k // num_tiles
    tiles, programs = num_n // COLUMNS, num_cores()
    # As many slots as a sum can have parts if no group is empty: two if there are more items
    # than programs.
    slots = min(MOST_SLOTS, 1 + _over(programs, min(num_groups, num_rows) * tiles))
    ways = []
    for i, (rows, blocks) in enumerate((c.rows, c.blocks) for c in cuts):
        assert k % (blocks.k * blocks.deep) == 0 and rows % STRIP == 0, (k, cuts)
        chunks, units = k // blocks.k, k // (blocks.k * blocks.deep)
        plan = Plan(fmt, group, native, 0, blocks, chunks)
        walk = Walk(i, rows, num_groups, tiles, units, programs, slots)
        ways.append(Way(plan, walk, cuts[i].cost, _buffers(plan, rows, scale_GTN)))
    return ways


def _operands(x, bytes_GKB, scale_GTN, plan: Plan) -> dict:
    """What the kernel reads, by its name in References."""
    num_n, rows = scale_GTN.shape[2], bytes_GKB.shape[0] * bytes_GKB.shape[1]
    operands = {"x": x, "codes": bytes_GKB.reshape(rows, -1)}
    if plan.group:
        return operands | {"group_scales": scale_GTN.reshape(-1, num_n)} | plan.table_operand()  # fmt: skip
    return operands | plan.table_operand() | {"column_scales": scale_GTN[:, 0]}


def _put_in_place(out, sizes_G, row, bits: int) -> jax.Array:
    """[R, N], from the [groups, rings, ..] that the interpreted kernel writes."""
    in_order = functools.partial(by_columns, bits=bits)
    out = jax.vmap(in_order)(jnp.sum(out, axis=1))[:, : len(row)]
    end = jnp.cumsum(sizes_G)[:, None, None]
    is_own = (row < end) & (row >= end - sizes_G[:, None, None])
    return jnp.sum(jnp.where(is_own, out, 0.0), axis=0)


def _buffers(plan: Plan, rows: int, scale_GTN) -> dict:
    """The shared memory of one cut, by its names in References."""
    buffers = plan.buffers(rows, scale_GTN if plan.group else None)
    if not plan.native:
        return buffers | plan.interpreter_buffers()
    shape = plan.blocks.exchanged(rows) // 128, 128
    return buffers | {"exchange": plgpu.SMEM(shape, jnp.int8, transforms=SWIZZLED)}
