"""Wanted: which implementation was asked for, and what can run where a model is traced.

    None          whatever is fastest; never fails
    "xla"         no kernels of ours
    "gpu"         our GPU kernel, or an error that says why not
    "interpret"   our GPU kernels, interpreted on any device: for tests; slow

`implementation` asks, for all that is traced within it. Whoever chooses (choose.py,
choose_weights.py) collects a reason why a kernel cannot run: the device (`why_no_gpu`), how
operands are laid out (`why_not_here`), then what the kernel itself says. `taken` settles it:
no reason, and it is taken; a reason, and XLA does it, unless "gpu" was insisted on.
"""

import contextlib
import functools
from collections.abc import Iterator

import jax
from jax.sharding import AxisType

IMPLEMENTATIONS = (None, "xla", "gpu", "interpret")

SYMBOLIC = "an extent is not known: jax.export with symbolic shapes is left to XLA"

_wanted = jax.make_user_context(default_value=None)  # part of jit's cache key


@contextlib.contextmanager
def implementation(name: str | None) -> Iterator[None]:
    """Within it, quantized contractions run as `name` says.

    >>> with implementation("xla"):
    ...     name()
    'xla'
    """
    if name not in IMPLEMENTATIONS:
        known = ", ".join(map(repr, IMPLEMENTATIONS))
        raise ValueError(f"unknown implementation {name!r}. There are: {known}.")
    with _wanted(name):
        yield


def name() -> str | None:
    return _wanted.value


@functools.cache
def _capability(device) -> tuple[int, int] | None:
    """Of an NVIDIA GPU, (9, 0) for Hopper; None of any other device."""
    if device.platform != "gpu" or "NVIDIA" not in device.device_kind:
        return None
    major, minor = str(device.compute_capability).split(".")
    return int(major), int(minor)


def why_no_gpu(hopper: bool) -> str | None:
    """Why our kernels cannot run where this is being traced for; None if they can."""
    if name() == "interpret":
        return None
    if name() == "xla":
        return "implementation='xla' was asked for"
    device = jax.config.jax_default_device
    if device is None or isinstance(device, str):
        device = jax.devices(device)[0]
    capability = _capability(device)
    if capability is None:
        return f"the device is {device.device_kind}, not an NVIDIA GPU"
    if hopper and capability[0] != 9:
        return f"it needs wgmma, and {device.device_kind} is not a Hopper GPU"
    return None


def taken(reason: str | None, what: str) -> bool:
    """Whether to take a kernel; an explicit wish that cannot be met is an error."""
    if reason is not None and name() == "gpu":
        raise ValueError(
            f"implementation='gpu' cannot run {what}: {reason}. "
            "Write implementation(None) to leave the choice to Midtread."
        )
    return reason is None


def why_not_here(*operands) -> str | None:
    """Why kernels cannot take operands that are laid out as these are."""
    parts = [p for x in operands for p in jax.tree.leaves(x)]
    if is_explicit(*parts):
        return "its operands are laid out over a mesh with explicit axes"
    return None if is_static(*parts) else SYMBOLIC


def is_static(*arrays) -> bool:
    return all(isinstance(n, int) for x in arrays for n in x.shape)


def is_explicit(*arrays) -> bool:
    """Laid out over mesh axes that are part of the type, which kernels do not follow."""
    meshes = [jax.typeof(x).sharding.mesh for x in arrays]
    return any(AxisType.Explicit in getattr(m, "axis_types", ()) for m in meshes)


def is_alone() -> bool:
    """One device, or inside shard_map: what is seen here is all there is."""
    mesh = jax.sharding.get_abstract_mesh()
    is_manual = AxisType.Manual in getattr(mesh, "axis_types", ())
    return is_manual or jax.device_count() == 1 or name() == "interpret"


def is_interpreted() -> bool:
    return name() == "interpret"
