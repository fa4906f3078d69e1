"""Calibrate: a run's float weights become codes that its own text says are best.

`midtread quantize runs/a quantization=int4w algorithm=gptq` takes `calibration_batches`
batches from the training split of the data that the config names (the held-out split judges
the result), and solves layer by layer. Solved weights lie in a folder beside the one that
is made, until it is made: a command that was killed and is given again goes on where it was.
"""

import dataclasses
import itertools
import pathlib
from collections.abc import Callable

import jax.numpy as jnp
from flax import nnx

from midtread.algorithms import calibrate as algorithms
from midtread.algorithms import learn
from midtread.algorithms.report import Report
from midtread.lm import data, quantization
from midtread.lm.config import Config
from midtread.lm.usage import UsageError, first_line


def calibrated(
    config: Config, model: nnx.Module, folder: pathlib.Path, say: Callable[[str], None]
) -> tuple[nnx.Module, Report]:
    """Quantizes a float model by `algorithm` as the config says, and reports what that was
    worth.

    Raises:
        UsageError: algorithms, rules or data that do not go together.
    """
    names = [name.strip() for name in config.algorithm.split(",")]
    batches = _batches(config, say)
    inputs = [tuple(jnp.asarray(b[k]) for k in INPUTS) for b in batches]
    provider = quantization.serving(config)
    assert provider is not None  # `convert.quantize` has checked
    try:
        result = algorithms.calibrate(
            model,
            provider,
            inputs,
            algorithms=names,
            options=OPTIONS,
            folder=folder,
            progress=say,
        )
    except ValueError as error:
        raise UsageError(first_line(error)) from None
    return result.model, result.report


def _batches(config: Config, say: Callable[[str], None]) -> list[data.Batch]:
    """Returns the batches to calibrate on, none of them twice."""
    rows, count = data.splits(config).train, config.calibration_batches
    if isinstance(rows, data.Rows):  # whose number is known; a stream's is not
        there_are = max(len(rows) // config.batch_size, 1)
        if there_are < count:
            say(
                f"the training split has {there_are} batches of batch_size="
                f"{config.batch_size}, not calibration_batches={count}: all are seen, once"
            )
        count = min(count, there_are)
    return list(itertools.islice(iter(data.batches(rows, config)), count))


INPUTS = ("inputs", "positions", "segments")
# What is learned from outputs that are logits is their distribution.
OPTIONS = algorithms.CalibrationOptions(
    learn=dataclasses.replace(learn.DEFAULT, distance="divergence")
)
