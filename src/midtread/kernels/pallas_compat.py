"""Pallas, as our kernels write it, on every JAX from 0.10.2 to 0.12.

Pallas is JAX's kernel language and its least stable corner: names move between minor
versions. All such differences are told here, and kernels read as if there were one Pallas.

    Triton        any NVIDIA GPU; interpreted on a CPU (pallas_call's interpret=True)
    Mosaic GPU    wgmma and TMA, Hopper only; interpreted from jax 0.12 on
"""

import contextlib
import functools
import warnings
from typing import Any

import jax
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.experimental.pallas import triton as pltriton
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, use_abstract_mesh
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

# jax 0.12 announces the end of Triton in Pallas at every lowering; docs/log.md says what
# would take its place.
warnings.filterwarnings("ignore", message="The Pallas Triton backend is deprecated")

VERSION = tuple(int(part) for part in jax.__version__.split(".")[:2])

# wgmma of e4m3 by e5m2: refused by Pallas before jax 0.11, though the hardware has it.
MIXES_FLOAT8 = VERSION >= (0, 11)

# Public from jax 0.12; None elsewhere, and Mosaic kernels are then only lowered in tests.
InterpretGPUParams = getattr(plgpu, "InterpretGPUParams", None)

__all__ = ["pl", "plgpu", "pltriton"]


def triton_params(num_warps: int, num_stages: int):
    return pltriton.CompilerParams(num_warps=num_warps, num_stages=num_stages)


def transposed(ref: Any) -> Any:
    """[K, N] view of a [N, K] block in shared memory."""
    if VERSION < (0, 11):
        return plgpu.transpose_ref(ref, (1, 0))
    return ref.transpose((1, 0))


def is_manual() -> bool:
    """Inside shard_map, where what a device sees is all there is."""
    kinds = getattr(jax.sharding.get_abstract_mesh(), "axis_types", ())
    return any(kind == AxisType.Manual for kind in kinds)


def alike(*inputs: jax.Array) -> list[jax.Array]:
    """Inputs that all vary over the same mesh axes: inside shard_map a kernel wants that."""
    if not is_manual():
        return list(inputs)
    axes = set().union(*(jax.typeof(x).mat.varying for x in inputs))
    missing = [tuple(axes - jax.typeof(x).mat.varying) for x in inputs]
    return [
        jax.lax.pcast(x, names, to="varying") if names else x
        for x, names in zip(inputs, missing)
    ]


def marked(out: jax.Array, like: jax.Array) -> jax.Array:
    """`out`, varying over the mesh axes that `like` does: Mosaic's results do not say."""
    if not is_manual():
        return out
    names = tuple(jax.typeof(like).mat.varying - jax.typeof(out).mat.varying)
    return jax.lax.pcast(out, names, to="varying") if names else out


def result(shape, dtype, like: jax.Array) -> jax.ShapeDtypeStruct:
    """The type of a kernel's result, which varies over mesh axes as `like` does."""
    extra: dict[str, Any] = {}
    if is_manual():
        extra["manual_axis_type"] = jax.typeof(like).mat
    return jax.ShapeDtypeStruct(shape, dtype, **extra)


def load_slice(ref: Any, start: Any, size: int, layout: Any) -> jax.Array:
    """`size` elements of global memory, in registers laid out as `layout`."""
    index = pl.ds(start, size)
    if VERSION < (0, 11):
        return plgpu.load(ref, (index,), layout=layout, optimized=False)
    read: Any = plgpu.load  # as it is from jax 0.11 on
    return read(ref.at[index], layout=layout, optimized=False)


def interpreter() -> dict[str, Any]:
    """The arguments that have a Mosaic kernel interpreted."""
    if InterpretGPUParams is None:
        raise NotImplementedError(
            f"jax {jax.__version__} cannot interpret Mosaic GPU kernels: jax 0.12 can."
        )
    return {"interpret": InterpretGPUParams()}


def warpgroup_params():
    """Layouts of registers are inferred, as in JAX's own Hopper kernels."""
    return plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup)


def lane_params():
    """Layouts of registers are told, as code for single threads wants it."""
    return plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane)


# --- code for single threads ------------------------------------------------------------------
# Pallas has no word for "this register of this thread": inline_mgpu takes functions that build
# Mosaic's own arrays, from MLIR. That is as private as jaxlib's MLIR is.


def _lanes(bits: int, wide: int = 0, part: int = 0):
    """(first column, c) of this thread, whose second column is the next one.

    Args:
        wide: 0 for columns as in stream_gpu's table; else each warpgroup has `64 wide` of
            its own, of which `part` is meant, as mixed_gpu has them.
    """
    i32 = ir.IntegerType.get_signless(32)
    const = lambda v: mgpu.c(v, i32)
    thread = mgpu.thread_idx()
    part_of = lambda shift, mask: arith.andi(
        arith.shrui(thread, const(shift)), const(mask)
    )
    times = lambda v, by: arith.muli(v, const(by))
    add = lambda first, *rest: functools.reduce(arith.addi, rest, first)
    c, g, w, j = part_of(0, 3), part_of(2, 7), part_of(5, 3), part_of(7, 3)
    if wide:
        return add(times(j, 64 * wide), times(w, 16), times(g, 2), const(64 * part)), c
    word = add(times(w, 32), times(g, 4))  # 32 lanes along 128 bytes
    if bits == 4:
        return add(times(word, 2), times(j, 2)), c
    high, low = arith.shrui(j, const(1)), arith.andi(j, const(1))
    return add(word, times(low, 2), times(high, 128)), c


def _address(ref, offset):
    i8 = ir.IntegerType.get_signless(8)
    return mgpu.utils.getelementptr(mgpu.utils.memref_ptr(ref), [offset], i8)


def fragments(
    ref: Any, code: str, first: int, bits: int, table: Any = None, wide: int = 0
) -> jax.Array:
    """The left operand of a wgmma, [64, rows] in bfloat16 ([64 wide, rows] if `wide`), from
    bytes [rows, width] in shared memory: `code` is PTX that makes two registers of the
    words of two rows.

    Args:
        first: the permute that selects the first bytes of a word.
        table: [.., 32] words in shared memory, a column per lane; `code` gets its address.
        wide: whose columns, see `_lanes`.
    """
    rows, width = ref.shape
    line = min(128, width)  # bytes in a row of the pattern
    tiled = (plgpu.TilingTransform((8, line)), plgpu.SwizzleTransform(line))
    parts = max(1, wide)
    result = plgpu.ShapeDtypeStruct(
        (64 * parts, rows), jax.numpy.bfloat16, layout=plgpu.Layout.WGMMA
    )

    refs = [ref] if table is None else [ref, table]
    types = (plgpu.RefType(tiled), plgpu.RefType())[: len(refs)]

    @plgpu.inline_mgpu(arg_types=types, return_type=result)
    def decode(ctx, ref, *table):
        del ctx
        i32 = ir.IntegerType.get_signless(32)
        const = lambda v: mgpu.c(v, i32)
        pair = ir.VectorType.get((2,), ir.BF16Type.get())
        both = llvm.StructType.get_literal([i32, i32])
        extra = []
        if table:
            lane = arith.andi(mgpu.thread_idx(), const(31))
            start = _address(table[0], arith.muli(lane, const(4)))
            extra.append(llvm.ptrtoint(i32, start))

        def registers(part):
            column, c = _lanes(bits, wide, part)
            byte = column if bits == 8 else arith.shrui(column, const(1))
            which = arith.andi(byte, const(3))  # of the bytes of a word
            step = 1 if table else 0x1111
            select = arith.addi(arith.muli(which, const(step)), const(first))
            byte = arith.xori(byte, which)
            # a tile is 8 rows of 128 or 64 bytes; units of 16 trade places by row
            box = arith.muli(arith.divui(byte, const(line)), const(8 * line))
            within = arith.andi(byte, const(line - 1))
            starts = []
            for odd in (0, 1):
                row = arith.addi(arith.muli(c, const(2)), const(odd))
                unit = row if line == 128 else c
                moved = arith.xori(within, arith.muli(unit, const(16)))
                place = arith.addi(arith.addi(box, moved), arith.muli(row, const(line)))
                starts.append(_address(ref, place))
            for tile in range(rows // 8):
                words = [
                    llvm.load(
                        i32,
                        mgpu.utils.getelementptr(
                            start, [tile * 8 * width], ir.IntegerType.get_signless(8)
                        ),
                    )
                    for start in starts
                ]
                given = [*words, select, *extra]
                made = llvm.inline_asm(
                    both, given, code, "=r,=r" + ",r" * len(given), asm_dialect=0
                )
                for h in (0, 1):
                    yield mgpu.utils.bitcast(llvm.extractvalue(i32, made, [h]), pair)

        made = [r for part in range(parts) for r in registers(part)]
        shape = mgpu.WGMMA_LAYOUT.registers_shape((64 * parts, rows))
        return mgpu.FragmentedArray(
            _registers=np.array(made, dtype=object).reshape(shape),
            _layout=mgpu.WGMMA_LAYOUT,
            _is_signed=None,
        )

    return decode(*refs)


def row_pairs(ref: Any, bits: int, wide: int = 0) -> jax.Array:
    """Of a program's numbers, one for each column, in memory: those that `fragments` has as
    rows, in float32."""
    parts = max(1, wide)
    result = plgpu.ShapeDtypeStruct(
        (64 * parts,), jax.numpy.float32, layout=plgpu.Layout.WGMMA.reduce(1)
    )
    size = jax.numpy.dtype(ref.dtype).itemsize

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=result)
    def load(ctx, ref):
        del ctx
        i32, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
        words = []
        for part in range(parts):
            column, _ = _lanes(bits, wide, part)
            start = _address(ref, arith.muli(column, mgpu.c(size, i32)))
            if size == 2:  # bfloat16 is the upper half of a float32
                both = llvm.load(i32, start)
                words.append(arith.shli(both, mgpu.c(16, i32)))
                words.append(arith.andi(both, mgpu.c(-65536, i32)))
            else:
                place = lambda h, start=start: mgpu.utils.getelementptr(start, [h], i32)
                words += [llvm.load(i32, place(h)) for h in (0, 1)]
        vector = ir.VectorType.get((1,), f32)
        registers = [mgpu.utils.bitcast(word, vector) for word in words]
        shape = mgpu.WGMMA_ROW_LAYOUT.registers_shape((64 * parts,))
        return mgpu.FragmentedArray(
            _registers=np.array(registers, dtype=object).reshape(shape),
            _layout=mgpu.WGMMA_ROW_LAYOUT,
            _is_signed=None,
        )

    run: Any = load  # its first argument comes from Pallas
    return run(ref)


def store_turned(ref: Any, value: jax.Array, bits: int) -> None:
    """Writes [64, M], whose rows are `fragments`' columns, into [M, 256] in memory."""
    stride = ref.ref.shape[-1]

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WGMMA))
    def store(ctx, ref, value):
        del ctx
        i32, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
        const = lambda v: mgpu.c(v, i32)
        both = ir.VectorType.get((2,), f32)
        column, c = _lanes(bits)
        # rows of the result are 8 t + 2 c + (0, 1); columns come in neighbouring pairs
        first = arith.addi(arith.muli(c, const(2 * stride)), column)
        registers = value.registers.reshape(-1, 2)  # [t, column]
        for t, pair in enumerate(registers):
            for odd in (0, 1):
                parts = [llvm.extractelement(v, const(odd)) for v in pair]
                packed = llvm.mlir_undef(both)
                for at, part in enumerate(parts):
                    packed = llvm.insertelement(packed, part, const(at))
                offset = arith.addi(first, const((8 * t + odd) * stride))
                start = mgpu.utils.getelementptr(
                    mgpu.utils.memref_ptr(ref), [offset], f32
                )
                llvm.store(packed, start)

    run: Any = store
    run(ref, value)


def lay_turned(ref: Any, value: jax.Array) -> None:
    """Writes [64, M], whose rows are the columns of one of a warpgroup's parts, into [M, 64]
    in shared memory, as the copy engine wants it; float32 or bfloat16."""
    size = jax.numpy.dtype(ref.dtype).itemsize
    line = 128 // size
    tiled = (plgpu.TilingTransform((8, line)), plgpu.SwizzleTransform(128))

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(tiled), plgpu.Layout.WGMMA))
    def store(ctx, ref, value):
        del ctx
        i32 = ir.IntegerType.get_signless(32)
        const = lambda v: mgpu.c(v, i32)
        both = ir.VectorType.get((2,), ir.F32Type.get())
        narrow = ir.VectorType.get((2,), ir.BF16Type.get())
        column, c = _lanes(8, 1)
        byte = arith.muli(arith.andi(column, const(63)), const(size))
        box = arith.muli(arith.shrui(byte, const(7)), const(1024))
        starts = []
        for odd in (0, 1):
            row = arith.addi(arith.muli(c, const(2)), const(odd))
            moved = arith.xori(
                arith.andi(byte, const(127)), arith.muli(row, const(16))
            )
            place = arith.addi(arith.addi(box, moved), arith.muli(row, const(128)))
            starts.append(_address(ref, place))
        i8 = ir.IntegerType.get_signless(8)
        for t, pair in enumerate(value.registers.reshape(-1, 2)):  # [8 rows, column]
            for odd, start in enumerate(starts):
                packed = llvm.mlir_undef(both)
                for at, register in enumerate(pair):
                    element = llvm.extractelement(register, const(odd))
                    packed = llvm.insertelement(packed, element, const(at))
                if size == 2:
                    packed = arith.truncf(narrow, packed)
                place = [t * 1024 * (64 // line)]
                llvm.store(packed, mgpu.utils.getelementptr(start, place, i8))

    run: Any = store
    run(ref, value)


@contextlib.contextmanager
def pretend_gpu(kind: str = "NVIDIA H200", num_cores: int = 132):
    """Lets kernels be lowered for a GPU that is not there.

    with pretend_gpu(): jax.jit(f).trace(x).lower(lowering_platforms=("cuda",))
    """
    try:
        device = AbstractDevice(device_kind=kind, num_cores=num_cores, platform="gpu")
    except TypeError:  # before jax 0.12 a device had no platform
        device = AbstractDevice(kind, num_cores)  # pyright: ignore[reportCallIssue]
    mesh = AbstractMesh((1,), ("x",), (AxisType.Explicit,), abstract_device=device)
    with use_abstract_mesh(mesh):
        yield


def num_cores() -> int:
    """Multiprocessors of the GPU that is being compiled for."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is not None and device.num_cores:
        return device.num_cores
    return getattr(jax.devices()[0], "core_count", None) or 2  # interpreted: a few
