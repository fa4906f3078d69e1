"""The report of a LiteRT file: what is in it, and how far it is from the model in JAX."""

import os
from collections.abc import Callable
from typing import Any

from midtread.interop import tflite


def describe(
    path: str | os.PathLike, fn: Callable | None = None, inputs: Any = None
) -> str:
    """Says which ops, types and bytes a file has, what stayed float, and why.

    Args:
        fn: the model in JAX, for the parity of every output.
        inputs: what to compare on: an array, or a tuple of them.
    """
    text = str(tflite.read(path))
    if fn is None:
        return text
    inputs = inputs if isinstance(inputs, tuple) else (inputs,)
    lines = [f"  {parity}" for parity in tflite.parity(path, fn, *inputs)]
    return "\n".join([text, "against JAX:", *lines])
