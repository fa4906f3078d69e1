"""Platforms: what kind of device a computation is being traced for, and how arrays lie there."""

from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding

# The platform of a device that is not there and is only pretended
# (kernels/environment.py). It is part of jit's cache key.
pretended = jax.make_user_context(default_value=None)


def platform() -> str:
    """Says where the computation being traced will run: 'cpu', 'gpu' or 'tpu'."""
    if pretended.value is not None:
        return pretended.value
    device = jax.config.jax_default_device
    if device is not None:
        return device if isinstance(device, str) else device.platform
    return jax.default_backend()


def is_explicit(*arrays: jax.Array | jax.ShapeDtypeStruct) -> bool:
    """Whether an array is laid out over mesh axes that are part of its type."""
    for x in arrays:
        if explicit_sharding(x) is not None:
            return True
    return False


def explicit_sharding(x: Any) -> NamedSharding | None:
    """Returns the sharding of an array where it is part of its type, else None."""
    if not isinstance(x, jax.Array):  # NumPy's, and a shape, have no layout
        return None
    sharding = jax.typeof(x).sharding
    return sharding if AxisType.Explicit in sharding.mesh.axis_types else None
