"""Platforms: what kind of device a computation is being traced for."""

import jax


def platform() -> str:
    """Where the computation being traced will run: 'cpu', 'gpu' or 'tpu'."""
    device = jax.config.jax_default_device
    if device is not None:
        return device if isinstance(device, str) else device.platform
    return jax.default_backend()
