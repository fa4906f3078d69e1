"""Offload: where activations lie between the stages of a calibration.

False           on the device
True, "host"    in host memory
"disk"          in files of a temporary folder, read as they are used, gone at the end
"""

import pathlib
import tempfile
from typing import Any

import jax
import numpy as np


class Store:
    """Keeps what a stage gives until later ones take it."""

    def __init__(self, where: bool | str):
        self.where = where
        self._folder: tempfile.TemporaryDirectory | None = None
        self._files: dict[int, pathlib.Path] = {}  # of an array, by its id
        self._count = 0

    def keep(self, arrays: list[Any]) -> list[Any]:
        """The same arrays, where they are to lie."""
        if not self.where:
            return arrays
        arrays = jax.device_get(arrays)
        return [self._write(x) for x in arrays] if self.where == "disk" else arrays

    def _write(self, x: np.ndarray) -> np.ndarray:
        x = np.asarray(x)
        if not x.size:
            return x
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="midtread-calibrate-")
        file = pathlib.Path(self._folder.name) / f"{self._count}.raw"
        self._count += 1
        np.ascontiguousarray(x).tofile(file)
        # Raw bytes, since NumPy's own files do not know bfloat16.
        kept = np.memmap(file, dtype=np.uint8, mode="r").view(x.dtype).reshape(x.shape)
        self._files[id(kept)] = file
        return kept

    def drop(self, x: Any) -> None:
        """Forgets an array that nobody needs any more."""
        file = self._files.pop(id(x), None)
        if file is not None:
            file.unlink()

    def clear(self) -> None:
        """Removes all files."""
        self._files.clear()
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None
