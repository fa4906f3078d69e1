"""Pallas, as our kernels write it, on every JAX from 0.10.2 to 0.12.

Pallas is JAX's kernel language and its least stable corner: names move between minor
versions. All such differences are handled here, and kernels read as if there were one Pallas.

    Triton        any NVIDIA GPU; interpreted on a CPU (pallas_call's interpret=True)
    Mosaic GPU    wgmma and TMA, Hopper only; interpreted from jax 0.12 on
"""

import contextlib
import warnings
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.experimental.pallas import triton as pltriton
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, use_abstract_mesh
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from midtread.kernels.environment import here

# jax 0.12 announces the end of Triton in Pallas at every lowering; docs/log.md says what
# would replace it.
warnings.filterwarnings("ignore", message="The Pallas Triton backend is deprecated")

VERSION = tuple(int(part) for part in jax.__version__.split(".")[:2])

# Pallas refuses wgmma of e4m3 by e5m2 before jax 0.11, though the hardware has it.
MIXES_FLOAT8 = VERSION >= (0, 11)

# This is public from jax 0.12 on. Before, Mosaic kernels are only lowered in tests.
InterpretGPUParams = getattr(plgpu, "InterpretGPUParams", None)

# hopper/threads.py and its users write MLIR for single threads. It is private in jaxlib.
__all__ = ["arith", "ir", "llvm", "mgpu", "pl", "plgpu", "pltriton"]


def triton_params(num_warps: int, num_stages: int):
    return pltriton.CompilerParams(num_warps=num_warps, num_stages=num_stages)


def transposed(ref: Any) -> Any:
    """Views a [N, K] block in shared memory as [K, N]."""
    if VERSION < (0, 11):
        return plgpu.transpose_ref(ref, (1, 0))
    return ref.transpose((1, 0))


def is_manual() -> bool:
    """Whether this is inside shard_map, where what a device sees is all there is."""
    return AxisType.Manual in jax.sharding.get_abstract_mesh().axis_types


def alike(*inputs: jax.Array) -> list[jax.Array]:
    """Makes all inputs vary over the same mesh axes, as a kernel wants it inside shard_map."""
    if not is_manual():
        return list(inputs)
    axes = set().union(*(jax.typeof(x).mat.varying for x in inputs))
    missing = [tuple(axes - jax.typeof(x).mat.varying) for x in inputs]
    return [
        jax.lax.pcast(x, names, to="varying") if names else x
        for x, names in zip(inputs, missing)
    ]


def marked(out: jax.Array, like: jax.Array) -> jax.Array:
    """Makes `out` vary over the mesh axes that `like` does, which Mosaic's results do not say."""
    if not is_manual():
        return out
    names = tuple(jax.typeof(like).mat.varying - jax.typeof(out).mat.varying)
    return jax.lax.pcast(out, names, to="varying") if names else out


def result(shape, dtype, like: jax.Array) -> jax.ShapeDtypeStruct:
    """Returns the type of a kernel's result, which varies over mesh axes as `like` does."""
    extra: dict[str, Any] = {}
    if is_manual():
        extra["manual_axis_type"] = jax.typeof(like).mat
    return jax.ShapeDtypeStruct(shape, dtype, **extra)


def load_slice(ref: Any, start: Any, size: int, layout: Any) -> jax.Array:
    """Loads `size` elements of global memory into registers laid out as `layout`."""
    index = pl.ds(start, size)
    if VERSION < (0, 11):
        return plgpu.load(ref, (index,), layout=layout, optimized=False)
    read: Any = plgpu.load  # its signature from jax 0.11 on
    return read(ref.at[index], layout=layout, optimized=False)


def consumed(ring: Any) -> Any:
    """Returns, from the allocations of emit_pipeline_warp_specialized, the barriers (one for
    each buffer) at which those who multiply say that it may be filled again."""
    (barriers,) = ring["flat_consumed_barrier_refs"]  # its name from jax 0.10 to 0.12
    return barriers


def interpreter() -> dict[str, Any]:
    """Returns the arguments that make a Mosaic kernel interpreted."""
    if InterpretGPUParams is None:
        raise NotImplementedError(
            f"jax {jax.__version__} cannot interpret Mosaic GPU kernels: jax 0.12 can."
        )
    return {"interpret": InterpretGPUParams()}


def warpgroup_params():
    """Returns parameters under which layouts of registers are inferred, as in JAX's own
    Hopper kernels."""
    return plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup)


def lane_params(barriers: bool = True):
    """Returns parameters under which layouts of registers are given, for code for single
    threads.

    Args:
        barriers: whether a warpgroup meets before every copy and around other uses of shared
            memory.
    """
    lane = plgpu.LoweringSemantics.Lane
    return plgpu.CompilerParams(
        lowering_semantics=lane, unsafe_no_auto_barriers=not barriers
    )


@contextlib.contextmanager
def pretend_gpu():
    """Lets kernels be lowered for an H200 that is not there.

    with pretend_gpu(): jax.jit(f).trace(x).lower(lowering_platforms=("cuda",))
    """
    h200 = {"device_kind": "NVIDIA H200", "num_cores": 132}
    try:
        device = AbstractDevice(**h200, platform="gpu")
    except TypeError:  # before jax 0.12 a device had no platform
        device = AbstractDevice(**h200)  # pyright: ignore[reportCallIssue]
    mesh = AbstractMesh((1,), ("x",), (AxisType.Explicit,), abstract_device=device)
    with use_abstract_mesh(mesh):
        yield


def num_cores() -> int:
    """Returns how many multiprocessors the GPU that is compiled for has."""
    return here().device.cores
