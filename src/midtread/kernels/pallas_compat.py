"""Pallas, as our kernels write it, on every JAX from 0.10.2 to 0.12.

Pallas is JAX's kernel language and its least stable corner: names move between minor
versions. All such differences are told here, and kernels read as if there were one Pallas.

    Triton        any NVIDIA GPU; interpreted on a CPU (pallas_call's interpret=True)
    Mosaic GPU    wgmma and TMA, Hopper only; interpreted from jax 0.12 on
"""

import contextlib
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


def _lanes(bits: int):
    """(column in 256, byte in its row, c, j) of this thread: stream_gpu's table."""
    i32 = ir.IntegerType.get_signless(32)
    const = lambda v: mgpu.c(v, i32)
    thread = mgpu.thread_idx()
    part = lambda shift, mask: arith.andi(
        arith.shrui(thread, const(shift)), const(mask)
    )
    times = lambda v, by: arith.muli(v, const(by))
    c, g, w, j = part(0, 3), part(2, 7), part(5, 3), part(7, 3)
    word = arith.addi(times(w, 32), times(g, 4))  # 32 lanes along 128 bytes
    if bits == 4:
        column = arith.addi(times(word, 2), times(j, 2))
        return column, word, c, j
    high, low = arith.shrui(j, const(1)), arith.andi(j, const(1))
    column = arith.addi(arith.addi(word, times(low, 2)), times(high, 128))
    return column, arith.addi(word, times(high, 128)), c, low


def _address(ref, offset):
    i8 = ir.IntegerType.get_signless(8)
    return mgpu.utils.getelementptr(mgpu.utils.memref_ptr(ref), [offset], i8)


def fragments(
    ref: Any, code: str, first: int, bits: int, table: Any = None
) -> jax.Array:
    """The left operand of a wgmma, [64, rows] in bfloat16, from bytes [rows, width] in
    shared memory: `code` is PTX that makes two registers of the words of two rows.

    Args:
        first: the permute that selects the first bytes of a word.
        table: [.., 32] words in shared memory, a column per lane; `code` gets its address.
    """
    rows, width = ref.shape
    tiled = (plgpu.TilingTransform((8, 128)), plgpu.SwizzleTransform(128))
    result = plgpu.ShapeDtypeStruct(
        (64, rows), jax.numpy.bfloat16, layout=plgpu.Layout.WGMMA
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
        _, byte, c, j = _lanes(bits)
        step = (0x1111 if bits == 4 else 0x2222) if not table else 1
        select = [arith.addi(arith.muli(j, const(step)), const(first))]
        if table:
            lane = arith.andi(mgpu.thread_idx(), const(31))
            start = _address(table[0], arith.muli(lane, const(4)))
            select.append(llvm.ptrtoint(i32, start))
        # a tile of 8 rows and 128 bytes is 1024 bytes; units of 16 trade places by row
        box = arith.muli(arith.shrui(byte, const(7)), const(1024))
        within = arith.andi(byte, const(127))
        starts = []
        for odd in (0, 1):
            row = arith.addi(arith.muli(c, const(2)), const(odd))
            moved = arith.xori(within, arith.muli(row, const(16)))
            place = arith.addi(arith.addi(box, moved), arith.muli(row, const(128)))
            starts.append(_address(ref, place))
        registers = []
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
            given = [*words, *select]
            made = llvm.inline_asm(
                both, given, code, "=r,=r" + ",r" * len(given), asm_dialect=0
            )
            registers += [
                mgpu.utils.bitcast(llvm.extractvalue(i32, made, [h]), pair)
                for h in (0, 1)
            ]
        shape = mgpu.WGMMA_LAYOUT.registers_shape((64, rows))
        return mgpu.FragmentedArray(
            _registers=np.array(registers, dtype=object).reshape(shape),
            _layout=mgpu.WGMMA_LAYOUT,
            _is_signed=None,
        )

    return decode(*refs)


def row_pairs(ref: Any, bits: int) -> jax.Array:
    """Of 256 numbers in shared memory the 64 that `fragments` has as rows, in float32."""
    result = plgpu.ShapeDtypeStruct(
        (64,), jax.numpy.float32, layout=plgpu.Layout.WGMMA.reduce(1)
    )
    size = jax.numpy.dtype(ref.dtype).itemsize

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=result)
    def load(ctx, ref):
        del ctx
        i32, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
        column, *_ = _lanes(bits)
        start = _address(ref, arith.muli(column, mgpu.c(size, i32)))
        if size == 2:  # bfloat16 is the upper half of a float32
            both = llvm.load(i32, start)
            words = [
                arith.shli(both, mgpu.c(16, i32)),
                arith.andi(both, mgpu.c(-65536, i32)),
            ]
        else:
            words = [
                llvm.load(i32, mgpu.utils.getelementptr(start, [h], i32))
                for h in (0, 1)
            ]
        vector = ir.VectorType.get((1,), f32)
        registers = [mgpu.utils.bitcast(word, vector) for word in words]
        shape = mgpu.WGMMA_ROW_LAYOUT.registers_shape((64,))
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
        column, _, c, _ = _lanes(bits)
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
