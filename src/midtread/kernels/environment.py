"""Environment: where what is being traced will run, and which implementation was asked for.

`here()` is the one place that looks. It returns a frozen record, `Env`, which those who choose
a kernel (choose.py) are given, and which is part of the key of a trace that depends on it.

`implementation(name)` asks, for all that is traced within it:

    None          whatever is fastest; never fails
    "xla"         no kernels of ours
    "gpu"         our GPU kernel, or an error that says why not
    "interpret"   our GPU kernels, interpreted on any device: for tests; slow

`pretended(device)` answers for a device that is not there: what would be chosen on an H200 can
be asked on a laptop, and lowered there (`pallas_compat.pretend_gpu`), but not run.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
from jax.sharding import AxisType

from midtread.numerics import platforms

NEEDS = ("any", "cpu", "nvidia", "hopper")  # devices that a kernel may be for
IMPLEMENTATIONS = (None, "xla", "gpu", "interpret")


class Device(NamedTuple):
    """What a choice depends on of the device that is compiled for."""

    kind: str  # as it calls itself
    platform: str
    capability: tuple[int, int] | None  # of an NVIDIA GPU, (9, 0) for Hopper
    cores: int  # multiprocessors


# Devices that can be pretended.
DEVICES = {
    "h200": Device("NVIDIA H200", "gpu", (9, 0), 132),
    "h100": Device("NVIDIA H100 80GB HBM3", "gpu", (9, 0), 132),
    "b200": Device("NVIDIA B200", "gpu", (10, 0), 148),
    "l40s": Device("NVIDIA L40S", "gpu", (8, 9), 142),
    "l4": Device("NVIDIA L4", "gpu", (8, 9), 58),
    "a100": Device("NVIDIA A100-SXM4-80GB", "gpu", (8, 0), 108),
    "cpu": Device("cpu", "cpu", None, 2),
}


@dataclasses.dataclass(frozen=True)
class Env:
    """The device, what was asked for, and whether others share the work.

    Attributes:
        asked: the name that `implementation` was given.
        is_split: whether XLA may divide what is traced over several devices. Inside
            shard_map it does not: what a device sees there is all there is.
        watch: told of every choice, see `watched`.
    """

    device: Device
    asked: str | None = None
    is_split: bool = False
    watch: Callable | None = None

    @property
    def platform(self) -> str:
        return self.device.platform

    @functools.cached_property
    def is_alone(self) -> bool:
        """One device, or inside shard_map, or interpreted: what is seen here is all."""
        return not self.is_split or self.is_interpreted

    @functools.cached_property
    def is_interpreted(self) -> bool:
        return self.asked == "interpret"

    def why_not(self, needs: str) -> str | None:
        """Why a kernel that needs this device cannot run here; None if it can.

        Args:
            needs: "any", "cpu", "nvidia" or "hopper".
        """
        return self.reasons[needs]

    @functools.cached_property
    def reasons(self) -> dict[str, str | None]:
        """`why_not` of everything that a kernel may need."""
        return {needs: self._why_not(needs) for needs in NEEDS}

    def _why_not(self, needs: str) -> str | None:
        if needs == "any":
            return None
        if needs == "cpu":
            if self.asked is not None:
                return f"implementation={self.asked!r} was asked for"
            is_cpu = self.platform == "cpu"
            return None if is_cpu else f"the device is {self.device.kind}, not a CPU"
        if self.is_interpreted:
            return None
        if self.asked == "xla":
            return "implementation='xla' was asked for"
        if self.device.capability is None:
            return f"the device is {self.device.kind}, not an NVIDIA GPU"
        if needs == "hopper" and self.device.capability[0] != 9:
            return f"it needs wgmma, and {self.device.kind} is not a Hopper GPU"
        return None


class _Asked(NamedTuple):
    """What the caller said, for all that is traced: part of jit's cache key."""

    implementation: str | None = None
    device: Device | None = None
    watch: Callable | None = None


_asked = jax.make_user_context(default_value=_Asked())


@contextlib.contextmanager
def implementation(name: str | None) -> Iterator[None]:
    """Within it, quantized contractions are computed as `name` says.

    A choice changes the time that something takes, never what it means. The default, None,
    takes the fastest implementation that can run; the other names are there to compare, to
    insist and to test.

    >>> with implementation("xla"):
    ...     here().asked
    'xla'

    Args:
        name: None, "xla", "gpu" or "interpret": the table at the top of this module.

    Returns:
        A context manager.

    Raises:
        ValueError: if there is no such implementation; and, within `implementation("gpu")`,
            if a contraction has no GPU kernel, with the reason.
    """
    if name not in IMPLEMENTATIONS:
        known = ", ".join(map(repr, IMPLEMENTATIONS))
        raise ValueError(f"unknown implementation {name!r}. There are: {known}.")
    with _asked(_asked.value._replace(implementation=name)):
        yield


@contextlib.contextmanager
def pretended(name: str) -> Iterator[None]:
    """Within it, choices are made as if for one device of this name, a key of DEVICES.

    >>> with pretended("h200"):
    ...     here().device.kind
    'NVIDIA H200'
    """
    if name not in DEVICES:
        known = ", ".join(DEVICES)
        raise ValueError(f"unknown device {name!r}. There are: {known}.")
    device = DEVICES[name]
    with _asked(_asked.value._replace(device=device)), platforms.pretended(device.platform):  # fmt: skip
        yield


@contextlib.contextmanager
def watched(watch: Callable) -> Iterator[None]:
    """`watch(operation, operands, choice)` is called for every choice made within it."""
    with _asked(_asked.value._replace(watch=watch)):
        yield


def here() -> Env:
    """The environment of what is being traced now."""
    mesh = jax.sharding.get_abstract_mesh()
    default = jax.config.jax_default_device
    return _resolved(_asked.value, default, mesh, jax.device_count())


@functools.lru_cache(maxsize=1024)
def _resolved(asked: _Asked, default: Any, mesh: Any, num_devices: int) -> Env:
    is_manual = AxisType.Manual in getattr(mesh, "axis_types", ())
    is_split = asked.device is None and num_devices > 1 and not is_manual
    device = asked.device or _device(default)
    abstract = getattr(mesh, "abstract_device", None)
    if abstract is not None and asked.device is None:  # that is compiled for
        cores = abstract.num_cores or device.cores
        device = device._replace(kind=abstract.device_kind, cores=cores)
    return Env(device, asked.implementation, is_split, asked.watch)


@functools.cache
def _device(default: Any) -> Device:
    if default is None or isinstance(default, str):
        default = jax.devices(default)[0]
    capability = None
    if default.platform == "gpu" and "NVIDIA" in default.device_kind:
        major, minor = str(default.compute_capability).split(".")
        capability = int(major), int(minor)
    cores = getattr(default, "core_count", None) or 2  # interpreted: a few
    return Device(default.device_kind, default.platform, capability, cores)
