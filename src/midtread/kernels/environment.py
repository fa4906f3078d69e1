"""Environment: where what is being traced will run, and which implementation was asked for.

Only `here()` looks these up. It returns a frozen record, `Env`, by which kernels are chosen
(choose.py), and which is part of the key of a trace that depends on it.

`implementation(name)` asks for an implementation of all that is traced within it:

    None          whatever is fastest; never fails
    "xla"         no kernels of ours
    "gpu"         our GPU kernel, or an error that says why not
    "interpret"   our GPU kernels, interpreted on any device: for tests; slow

`pretended(device)` makes choices as if for a device that is not there: a laptop can say what would
be chosen on an H200, and lower it (`pallas_compat.pretend_gpu`), but not run it.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
from jax.sharding import AxisType

from midtread.numerics import platforms

NEEDS = ("any", "cpu", "nvidia", "hopper")  # devices that a kernel may need
IMPLEMENTATIONS = (None, "xla", "gpu", "interpret")


class Device(NamedTuple):
    """What choices need to know of the device that is compiled for."""

    kind: str  # the name it gives itself
    platform: str
    capability: tuple[int, int] | None  # (9, 0) for Hopper; None if not NVIDIA's
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


def device_named(name: str) -> Device:
    """Returns the device of this name among those that can be pretended."""
    if name not in DEVICES:
        known = ", ".join(DEVICES)
        raise ValueError(f"unknown device {name!r}. There are: {known}.")
    return DEVICES[name]


@dataclasses.dataclass(frozen=True)
class Env:
    """The device, the implementation that was asked for, and whether others share the work.

    Attributes:
        asked: the name that `implementation` was given.
        is_split: whether XLA may divide what is traced over several devices. Inside
            shard_map it does not: what a device sees there is all there is.
        watch: a function that is called for every choice, see `watched`.
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
        """Whether arrays are whole here: there is one device, or this is inside shard_map, or
        kernels are interpreted."""
        return not self.is_split or self.is_interpreted

    @functools.cached_property
    def is_interpreted(self) -> bool:
        return self.asked == "interpret"

    @functools.cached_property
    def reasons(self) -> dict[str, str | None]:
        """The answers of `why_not` for everything that a kernel may need."""
        return {needs: self.why_not(needs) for needs in NEEDS}

    def why_not(self, needs: str) -> str | None:
        """Says why a kernel that needs such a device, of NEEDS, cannot run here; None if it
        can."""
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
    """What the contexts below ask for. It is part of jit's cache key."""

    implementation: str | None = None
    device: Device | None = None
    watch: Callable | None = None


_asked = jax.make_user_context(default_value=_Asked())


@contextlib.contextmanager
def implementation(name: str | None) -> Iterator[None]:
    """Makes the contractions that are traced inside run as `name` says.

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
    """Makes choices inside as if for one device of this name, a key of DEVICES.

    >>> with pretended("h200"):
    ...     here().device.kind
    'NVIDIA H200'
    """
    device = device_named(name)
    with _asked(_asked.value._replace(device=device)), platforms.pretended(device.platform):  # fmt: skip
        yield


@contextlib.contextmanager
def watched(watch: Callable) -> Iterator[None]:
    """Calls `watch(operation, operands, choice)` for every choice made inside."""
    with _asked(_asked.value._replace(watch=watch)):
        yield


def here() -> Env:
    """Returns the environment of what is being traced now."""
    mesh = jax.sharding.get_abstract_mesh()
    default = jax.config.jax_default_device
    return _resolved(_asked.value, default, mesh, jax.device_count())


@functools.lru_cache(maxsize=1024)
def _resolved(asked: _Asked, default: Any, mesh: Any, num_devices: int) -> Env:
    is_manual = AxisType.Manual in mesh.axis_types
    is_split = asked.device is None and num_devices > 1 and not is_manual
    device = asked.device or _device(default)
    abstract = mesh.abstract_device
    if abstract is not None and asked.device is None:  # the mesh names the device
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
    cores = getattr(default, "core_count", None) or 2  # a few, for interpreted kernels
    return Device(default.device_kind, default.platform, capability, cores)
