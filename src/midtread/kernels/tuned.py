"""Tuned block sizes: a table per device beside each family of kernels, measured.

A folder of kernels has `<device>.json` with the best sizes of the sweeps behind docs/log.md, and
a module that reads it. A device without a table takes the H200's.
"""

import functools
import json
import pathlib

from midtread.kernels.environment import here

DEFAULT = "nvidia-h200"


def device_kind() -> str:
    """Names the device being compiled for as its table is named: 'nvidia-h200'."""
    return here().device.kind.lower().replace(" ", "-")


def has_own_table(module: str) -> bool:
    """Whether the device being compiled for was measured for the kernels of `module`."""
    return _path(module, device_kind()).exists()


def table(module: str) -> dict:
    """Reads the table beside `module`, a path, for the device being compiled for."""
    return _table(module, device_kind())


@functools.cache
def _table(module: str, device: str) -> dict:
    path = _path(module, device)
    return json.loads((path if path.exists() else _path(module, DEFAULT)).read_text())


def _path(module: str, device: str) -> pathlib.Path:
    return pathlib.Path(module).parent / f"{device}.json"
