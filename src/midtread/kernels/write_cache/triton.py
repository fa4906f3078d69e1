"""Writing a token into a cache on a GPU: one kernel where XLA has four to twelve, Triton.

    q, k  =  turned by cos and sin        cache[b, position_b]  =  k, v, as floats or as codes

A step of one token a sequence writes little, so its time is that of starting kernels: with an int8
cache XLA starts ten, 24 us a layer (NVIDIA H200, 32 sequences of 8 heads of 128). Here a program
takes a head of the cache with the query heads that read it, or, where all heads of a token share a
scale, all heads. The cache is written in place: its arrays are arguments and results of the kernel.

The numbers are those of lm/cache.py: keys are rounded to the dtype of the activations when they
are turned, then quantized in float32 (quantize/triton.py has the formulas). Codes of 4 bits are two
to a byte, so every other column of a head is computed apart (a plane).

B sequences, H query heads, K heads of the cache, g = H / K, S slots, h numbers a head.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from midtread.kernels.candidates import Refusal
from midtread.kernels.environment import Env
from midtread.kernels.pallas_compat import pl, pltriton, result, triton_params
from midtread.kernels.pending import Pending
from midtread.kernels.quantize.triton import codes_of, integers, magnitude, scale_of
from midtread.kernels.write_cache import Token, Written
from midtread.numerics.formats import Format, dtype_bits
from midtread.numerics.qarray import QArray

FORMATS = ("int8", "float8_e4m3fn", "float8_e5m2", "int4")  # of a cache of codes
FLOATS = ("bfloat16", "float16", "float32")
MAX_WIDTH = 512  # numbers of a head


class Piece(NamedTuple):
    """Neighbouring columns of some heads [r, c]: one array a plane, where they go, in bytes or
    numbers, and which are there."""

    planes: list[jax.Array]
    columns: jax.Array
    inside: jax.Array


class Heads(NamedTuple):
    """The heads of a token: an array [H + 2 K, h], or parts of it [P, H + 2 K, h] and factors."""

    ref: Any
    columns_ref: Any
    rows_ref: Any
    dtype: Any

    @property
    def width(self) -> int:
        return self.ref.shape[-1]

    def read(self, row: jax.Array, column: jax.Array, inside: jax.Array) -> jax.Array:
        """Reads some elements, in the dtype of activations."""
        load = lambda ref, *at: pltriton.load(ref.at[at], mask=inside, other=0)
        if len(self.ref.shape) == 2:
            return load(self.ref, row, column)
        wide = lambda x: x.astype(jnp.float32)
        parts = range(self.ref.shape[0])
        x = sum(wide(load(self.ref, jnp.full(row.shape, p), row, column)) for p in parts)  # fmt: skip
        if self.columns_ref is not None:
            x = x * wide(load(self.columns_ref, row, column))
        x = x if self.rows_ref is None else x * self.rows_ref[0]
        return x.astype(self.dtype)


class Rows(NamedTuple):
    """The heads `start` to before `start + count` of a token."""

    start: jax.Array | int
    count: int

    @property
    def padded(self) -> int:
        return 1 << (self.count - 1).bit_length()


def _grid(rows: Rows, count: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Indices of rows and of `count` columns [r, c], and which are there."""
    shape = rows.padded, 1 << (count - 1).bit_length()
    row, column = (lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (0, 1))
    return row, column, (row < rows.count) & (column < count)


def _turned(
    heads: Heads, tables, rows: Rows, num_planes: int, is_interleaved: bool
) -> list[Piece]:
    """Returns some heads with their pairs rotated, and what lies behind these as it is."""
    width, pairs = heads.width, tables[0].shape[0]
    row, column, inside = _grid(rows, pairs // num_planes)
    first, second = [], []
    for plane in range(num_planes):
        pair = column * num_planes + plane
        at = (2 * pair, 2 * pair + 1) if is_interleaved else (pair, pair + pairs)
        wide = lambda x: x.astype(jnp.float32)
        a, b = (wide(heads.read(rows.start + row, i, inside)) for i in at)
        cos, sin = (pltriton.load(ref.at[pair], mask=inside, other=0) for ref in tables)
        rounded = lambda x: x.astype(heads.dtype)
        first.append(rounded(a * cos - b * sin))
        second.append(rounded(b * cos + a * sin))
    pieces = [
        Piece(first, column, inside),
        Piece(second, column + pairs // num_planes, inside),
    ]
    if width > 2 * pairs:
        pieces.append(_as_is(heads, rows, num_planes, 2 * pairs))
    return pieces


def _as_is(heads: Heads, rows: Rows, num_planes: int, start: int = 0) -> Piece:
    """Returns the columns from `start` on of some heads."""
    row, column, inside = _grid(rows, (heads.width - start) // num_planes)
    at = lambda plane: start + column * num_planes + plane
    planes = [
        heads.read(rows.start + row, at(plane), inside) for plane in range(num_planes)
    ]
    return Piece(planes, column + start // num_planes, inside)


def _write(pieces: list[Piece], position, codes_ref, scale_ref, fmt, native: bool):
    """Writes pieces of heads [r, ..] to a slot of the cache [S, r, ..]."""
    exists = (position >= 0) & (position < codes_ref.shape[0])
    inverse = scale = None
    if fmt is not None:
        wide = lambda x: x.astype(jnp.float32)
        tops = [jnp.max(magnitude(wide(x)), axis=1) for p in pieces for x in p.planes]
        largest = functools.reduce(jnp.maximum, tops)
        if scale_ref.shape[1] == 1:  # all heads share it
            largest = jnp.broadcast_to(jnp.max(largest), largest.shape)
        scale = scale_of(largest, jnp.float32, fmt)
        inverse = (1 / scale)[:, None]
    for piece in pieces:
        row = lax.broadcasted_iota(jnp.int32, piece.columns.shape, 0)
        if fmt is None:
            stored = piece.planes[0].astype(codes_ref.dtype)
        elif len(piece.planes) == 1:
            stored = codes_of(piece.planes[0], inverse, fmt, native)
        else:
            low, high = (integers(x, inverse, fmt, native) for x in piece.planes)
            stored = ((low & 15) | (high << 4)).astype(codes_ref.dtype)
        at = jnp.full(row.shape, position), row, piece.columns
        pltriton.store(codes_ref.at[at], stored, mask=piece.inside & exists)
    if scale is not None:
        row = lax.broadcasted_iota(jnp.int32, scale.shape, 0)
        at = jnp.full(row.shape, position), row
        inside = (row < scale_ref.shape[1]) & exists
        pltriton.store(scale_ref.at[at], scale, mask=inside)


def _body(
    position_ref, cos_ref, sin_ref, heads_ref, *refs,
    num_queries: int, num_kv: int, per: int, fmt: Format | None, num_planes: int,
    is_interleaved: bool, native: bool, dtype, has: tuple[bool, bool],
):  # fmt: skip
    """Writes a token: heads [H + 2 K, h], of which this program writes `per` to the cache.
    References to the cache come twice, as arguments and as results, which are the same
    memory. `has` says whether columns and rows of the heads have factors."""
    rest = iter(refs)
    columns_ref, rows_ref = (next(rest) if there else None for there in has)
    heads = Heads(heads_ref, columns_ref, rows_ref, dtype)
    refs = [*rest]
    q_ref, *cache = refs[(len(refs) - 1) // 2 :]
    (k_ref, v_ref), (ks_ref, vs_ref) = cache[:2], cache[2:] or (None, None)
    begin, group = pl.program_id(1) * per, num_queries // num_kv
    turned = functools.partial(
        _turned, heads, (cos_ref, sin_ref), is_interleaved=is_interleaved
    )
    for piece in turned(Rows(begin * group, per * group), 1):
        row = lax.broadcasted_iota(jnp.int32, piece.columns.shape, 0)
        pltriton.store(q_ref.at[row, piece.columns], piece.planes[0], mask=piece.inside)
    position = position_ref[0]
    k = turned(Rows(num_queries + begin, per), num_planes)
    _write(k, position, k_ref, ks_ref, fmt, native)
    values = Rows(num_queries + num_kv + begin, per)
    v = [_as_is(heads, values, num_planes)]
    _write(v, position, v_ref, vs_ref, fmt, native)


def write_cache(
    heads: jax.Array | Pending,
    cos: jax.Array,
    sin: jax.Array,
    positions: jax.Array,
    *cache: jax.Array,
    dtype=None,
    fmt: Format | None = None,
    is_interleaved: bool = False,
    interpret: bool = False,
) -> list[jax.Array]:
    """Returns turned queries [B, H, h], and the cache.

    Args:
        heads: [B, H + 2 K, h], or what a matmul left of rows of so many numbers.
        cos, sin: [B, n] in float32.
        positions: [B]; one that is no slot of the cache writes nothing.
        cache: keys and values [B, S, K, h] in floats, or codes, and then their scales
            [B, S, K or 1] in float32 after them; codes of 4 bits are bytes [B, S, K, h / 2].
        dtype: of the heads; None: that of the array.
    """
    batch, slots, num_kv, stored = cache[0].shape
    planes = 2 if fmt is not None and dtype_bits(fmt.dtype) == 4 else 1
    width = stored * planes
    of = lambda *block: pl.BlockSpec((None, *block), lambda b, j: (b, *[0] * len(block)))  # fmt: skip
    args, specs, has = [heads], [], (False, False)
    if isinstance(heads, Pending):
        by_head = lambda x, *lead: x.reshape(*lead, -1, width)
        num = heads.parts.shape[0]
        args = [by_head(heads.parts, num, batch)]
        total = args[0].shape[2]
        specs = [pl.BlockSpec((num, None, total, width), lambda b, j: (0, b, 0, 0))]
        has = heads.columns is not None, heads.rows is not None
        if heads.columns is not None:
            args.append(by_head(heads.columns))
            specs.append(pl.BlockSpec((total, width), lambda b, j: (0, 0)))
        if heads.rows is not None:
            args.append(heads.rows)
            specs.append(pl.BlockSpec((1,), lambda b, j: (b,)))
    else:
        dtype, total = dtype or heads.dtype, heads.shape[1]
        specs = [of(total, width)]
    num_queries = total - 2 * num_kv
    is_shared = len(cache) > 2 and cache[2].shape[2] == 1
    per = num_kv if is_shared else 1  # heads of the cache that a program writes
    codes = pl.BlockSpec((None, slots, per, stored), lambda b, j: (b, 0, j, 0))
    scales = pl.BlockSpec((None, slots, 1), lambda b, j: (b, 0, j))
    of_cache = [codes, codes, scales, scales][: len(cache)]
    queries = pl.BlockSpec((None, per * num_queries // num_kv, width), lambda b, j: (b, j, 0))  # fmt: skip
    options = {
        "num_queries": num_queries, "num_kv": num_kv, "per": per, "fmt": fmt,
        "num_planes": planes, "is_interleaved": is_interleaved,
        "native": not interpret, "dtype": dtype, "has": has,
    }  # fmt: skip
    before = 3 + len(args)
    return pl.pallas_call(
        functools.partial(_body, **options),
        name="write_cache",
        grid=(batch, num_kv // per),
        in_specs=[
            pl.BlockSpec((1,), lambda b, j: (b,)),
            of(cos.shape[1]),
            of(cos.shape[1]),
            *specs,
            *of_cache,
        ],
        out_specs=[queries, *of_cache],
        out_shape=[
            result((batch, num_queries, width), dtype, args[0]),
            *(result(x.shape, x.dtype, args[0]) for x in cache),
        ],
        input_output_aliases={before + i: 1 + i for i in range(len(cache))},
        compiler_params=triton_params(num_warps=8 if per > 1 else 2, num_stages=1),
        interpret=interpret,
    )(positions, cos, sin, *args, *cache)


# --- from a model's arrays to a plan, or the reason why not -----------------------------------


class Triton(NamedTuple):
    fmt: Format | None
    is_interpreted: bool

    def run(self, a: Token) -> Written:
        parts = [a.k, a.v]
        if self.fmt is not None:
            parts = [_bytes(x.qvalue) for x in (a.k, a.v)]
            parts += [x.scale[..., 0] for x in (a.k, a.v)]
        call = _call(a.heads.dtype, self.fmt, a.is_interleaved, self.is_interpreted)
        heads = a.heads if a.left is None else a.left
        q, k, v, *scales = call(heads, a.cos, a.sin, a.positions, *parts)
        if self.fmt is not None:
            k, v = (
                dataclasses.replace(
                    old, qvalue=_codes(new, old.qvalue), scale=scale[..., None]
                )
                for old, new, scale in ((a.k, k, scales[0]), (a.v, v, scales[1]))
            )
        return Written(q, k, v)


def _bytes(codes: jax.Array) -> jax.Array:
    """Sees codes of 4 bits as bytes; others are what they are."""
    if dtype_bits(codes.dtype) == 8:
        return codes
    pairs = codes.reshape(*codes.shape[:-1], codes.shape[-1] // 2, 2)
    return lax.bitcast_convert_type(pairs, jnp.int8)


def _codes(stored: jax.Array, like: jax.Array) -> jax.Array:
    """Undoes `_bytes`."""
    if stored.dtype == like.dtype:
        return stored
    return lax.bitcast_convert_type(stored, like.dtype).reshape(like.shape)


def plan(a: Token, env: Env) -> Triton | Refusal:
    if not env.is_alone:
        return Refusal(
            "over several devices XLA writes the cache, which can partition it"
        )
    if type(a.k) is not type(a.v) or a.k.shape != a.v.shape:
        return Refusal("keys and values differ in width or format")
    width, pairs = a.heads.shape[2], a.cos.shape[1]
    fmt = a.k.format if isinstance(a.k, QArray) else None
    if width > MAX_WIDTH or a.heads.dtype.name not in FLOATS:
        what = f"heads of {width} in {a.heads.dtype}"
        return Refusal(
            f"{what}: up to {MAX_WIDTH} in {', '.join(FLOATS)} have a kernel"
        )
    if pairs < 1 or a.num_queries % a.k.shape[2]:
        return Refusal("no pair is turned, or query heads are not shared evenly")
    for x in (a.k, a.v):
        if reason := _why_not_cache(x, fmt):
            return Refusal(reason)
    if fmt is not None and dtype_bits(fmt.dtype) == 4 and (pairs % 2 or width % 2):
        return Refusal(f"{pairs} pairs are not whole bytes of {fmt.name}")
    return Triton(fmt, env.is_interpreted)


def _why_not_cache(x: jax.Array | QArray, fmt: Format | None) -> str | None:
    if not isinstance(x, QArray):
        is_known = x.dtype.name in FLOATS
        return None if is_known else f"{x.dtype} caches have no kernel"
    if x.format != fmt or x.format.name not in FORMATS:
        return f"{x.format.name} caches have no kernel: {', '.join(FORMATS)} have"
    if x.zero_point is not None or x.global_scale is not None:
        return "its cache has zero points or scales of two levels"
    heads = x.shape[2]
    lead = (*x.shape[:2], heads), (*x.shape[:2], 1)
    if x.scale.shape[:3] not in lead or x.scale.shape[3] != 1 or x.scale.dtype != jnp.float32:  # fmt: skip
        return f"scales {x.scale.shape} in {x.scale.dtype} are not one per token, or per head of it, in float32"  # fmt: skip
    return None


@functools.cache
def _call(dtype, fmt: Format | None, is_interleaved: bool, interpret: bool) -> Callable:
    """Returns the kernel as a function of arrays, which is lowered once for layers that look
    alike."""
    return jax.jit(
        functools.partial(
            write_cache,
            dtype=dtype,
            fmt=fmt,
            is_interleaved=is_interleaved,
            interpret=interpret,
        )
    )
