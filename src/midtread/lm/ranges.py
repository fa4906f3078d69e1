"""Ranges: what a calibration run has noted, in a file beside it.

    midtread train deepseek-v3-fp8-static static=measure run_name=cal ...
    midtread train deepseek-v3-fp8-static load_parameters_path=runs/cal ...

`<run>/static.npz` has two arrays for every weight and activation that is quantized:
`<module>/<weight>_range/absmax` and `.../count`, the largest |x| per axis (times the
headroom of the calibration method) and how many steps it was taken over.
"""

import pathlib
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from midtread.lm import processes
from midtread.lm.config import Config
from midtread.lm.usage import UsageError, require
from midtread.model.flaxlib import QuantStat, read

FILE = "static.npz"


def save(folder: pathlib.Path, kept: nnx.State) -> None:
    """Writes the ranges in `kept`; every process calls this, and one writes."""
    arrays = {
        f"{'/'.join(map(str, path))}/{part}": _whole(x)
        for path, var in nnx.to_flat_state(kept)
        for part, x in read(var).items()
    }
    if processes.is_first():
        partly = folder / f"partly-{FILE}"
        np.savez(partly, **arrays)  # pyright: ignore[reportArgumentType]
        partly.rename(folder / FILE)


def _whole(x: jax.Array) -> np.ndarray:
    """Returns all of an array that may be spread over processes."""
    if not x.is_fully_addressable:
        everywhere = NamedSharding(x.sharding.mesh, P())  # pyright: ignore[reportAttributeAccessIssue]
        x = jax.jit(lambda a: a, out_shardings=everywhere)(x).addressable_data(0)
    return np.asarray(x)


def find(config: Config) -> pathlib.Path:
    """Returns the file that `static=calibrated` reads."""
    path = config.load_parameters_path
    what = "static=calibrated"
    if config.fp8_weight_gather:
        what += " fp8_weight_gather=true"
    require(
        path,
        f"{what} needs the ranges of a calibration run: write load_parameters_path=<a run "
        "made with static=measure>.",
    )
    root = pathlib.Path(path).resolve()
    for above in (root, *root.parents[:2]):
        if (above / FILE).is_file():
            return above / FILE
    raise UsageError(
        f"{what}: load_parameters_path={path} has no {FILE}; a run made with "
        "static=measure has one when it is done."
    )


def load(config: Config, model: nnx.Module) -> None:
    """Puts the ranges of a calibration run into `model`."""
    file = find(config)
    with np.load(file) as archive:
        noted: dict[str, np.ndarray] = dict(archive)
    state = nnx.state(model, QuantStat)
    for path, var in nnx.to_flat_state(state):
        name = "/".join(map(str, path))
        wanted: dict[str, Any] = read(var)
        for part, x in wanted.items():
            got = noted.get(f"{name}/{part}")
            shape = None if got is None else got.shape
            require(
                shape == x.shape,
                f"static=calibrated: load_parameters_path={config.load_parameters_path} "
                f"has {'nothing' if got is None else shape} for {name}, which is "
                f"{x.shape} here: max_target_length, the model and what is quantized must "
                "be those of the calibration run.",
            )
        require(
            np.all(noted[f"{name}/count"] > 0),
            f"static=calibrated: load_parameters_path={config.load_parameters_path} has "
            f"seen nothing of {name}: let it run a step or more.",
        )
        var.set_value({part: jax.numpy.asarray(noted[f"{name}/{part}"]) for part in wanted})  # fmt: skip
    nnx.update(model, state)
