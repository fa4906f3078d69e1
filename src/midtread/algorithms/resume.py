"""Resume: solved weights in a folder, so that a killed calibration goes on after the last.

    calibration.json    digests of what the weights depend on: the model's weights and what it
                        does with them, data, loss, rules, options
    0.npz 1.npz ...     one weight each, whole or not there

A folder of another calibration is refused. What comes after all weights are solved, learning
say, is done again from them: it has no chance in it, and so ends with the same bits.
"""

import dataclasses
import enum
import functools
import hashlib
import inspect
import json
import pathlib
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from midtread.algorithms.program import is_literal
from midtread.algorithms.report import Row
from midtread.algorithms.task import Task
from midtread.numerics.qarray import QArray

META = ("qtype", "logical")  # of a QArray: what is no array


class Kept:
    """Solved weights in a folder: one file each, whole or not there."""

    def __init__(self, folder, task: Task, loss, targets):
        self.folder = None if folder is None else pathlib.Path(folder)
        self.task = task
        if self.folder is None:
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(
                f"folder={str(folder)!r}: {error.strerror}. Give another folder for solved "
                "weights."
            ) from None
        mine = _fingerprint(task, loss, targets)
        file = self.folder / "calibration.json"
        if (
            file.is_file()
            and _whole(file, lambda: json.loads(file.read_text())) != mine
        ):
            raise ValueError(
                f"{self.folder} holds weights of another calibration (model, data, loss, "
                "rules or options differ): give another folder, or empty it."
            )
        partial = file.with_suffix(".partial")
        partial.write_text(json.dumps(mine))
        partial.rename(file)

    def _file(self, number: int) -> pathlib.Path:
        assert self.folder is not None
        return self.folder / f"{number}.npz"

    @property
    def is_whole(self) -> bool:
        return self.folder is not None and all(
            self._file(n).is_file() for n in self.task.chosen
        )

    def read(self, number: int) -> tuple[QArray, Row, jax.Array | None] | None:
        """Codes, their row of the report, and what the bias grew by, if it did."""
        if self.folder is None or not self._file(number).is_file():
            return None
        return _whole(self._file(number), lambda: self._read(number))

    def _read(self, number: int) -> tuple[QArray, Row, jax.Array | None]:
        with np.load(self._file(number)) as file:
            about = json.loads(str(file["about"]))
            part = lambda name: jnp.asarray(
                file[name]
                .view(jnp.dtype(about["dtypes"][name]))
                .reshape(about["shapes"][name])
            )
            parts = {name: part(name) for name in about["dtypes"]}
        shift = parts.pop("shift", None)
        logical = about["logical"] and tuple(about["logical"])
        q = QArray(**parts, qtype=about["qtype"], logical=logical)
        return q, Row(**about["row"]), shift

    def write(self, number: int, q: QArray, row: Row, shift: Any = None) -> None:
        if self.folder is None:
            return
        names = [f.name for f in dataclasses.fields(q) if f.name not in META]
        parts = {
            n: np.asarray(getattr(q, n)) for n in names if getattr(q, n) is not None
        }
        if shift is not None:
            parts["shift"] = np.asarray(shift)
        about = {
            "dtypes": {n: p.dtype.name for n, p in parts.items()},
            "shapes": {n: p.shape for n, p in parts.items()},
            "qtype": q.format.name,
            "logical": q.logical,
            "row": dataclasses.asdict(row),
        }
        raw = {n: np.frombuffer(p.tobytes(), np.uint8) for n, p in parts.items()}
        partial = self._file(number).with_suffix(".partial")
        with partial.open("wb") as out:
            np.savez(out, about=json.dumps(about), **raw)
        partial.rename(self._file(number))


def _whole(file: pathlib.Path, read: Callable[[], Any]) -> Any:
    """Reads a file, which a machine that lost its power may have left damaged."""
    try:
        return read()
    except (ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error):
        raise ValueError(
            f"{file} is damaged: delete it, and what it had is found again."
        ) from None


def _fingerprint(task: Task, loss, targets) -> dict[str, str]:
    """Returns digests of what a calibration's weights depend on."""
    sites = [f"{s.name} {task.boxes[s.path].how}" for s in task.chosen.values()]
    online = [task.chosen[n].name for n in task.turns.online]
    return {
        "weights": _digest(task.floats[path] for path in sorted(task.floats)),
        "constants": _digest(task.program.constants.values()),
        "equations": hashlib.sha256(
            "\n".join(_equations(task.program.eqns)).encode()
        ).hexdigest(),
        "rotated at run time": ",".join(online),
        "batches": _digest(x for b in task.batches for x in task.program.arrays(b)),
        "sites": hashlib.sha256("\n".join(sites).encode()).hexdigest(),
        "algorithms": ",".join(task.plan.names),
        "options": str(task.options),
        "loss": _described(loss),
        "targets": "" if loss is None else _digest(jax.tree.leaves(targets)),
    }


def _equations(eqns: Iterable[Any]) -> Iterator[str]:
    """What equations do, as far as it is the same in every process: objects are left out."""
    for eqn in eqns:
        operands = [str(v.val if is_literal(v) else v.aval) for v in eqn.invars]
        params = [f"{name}={_setting(x)}" for name, x in sorted(eqn.params.items())]
        yield f"{eqn.primitive.name} {operands} {params}"
        for value in eqn.params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                if hasattr(inner, "eqns"):
                    yield from _equations(inner.eqns)


def _setting(value: Any) -> str:
    """Returns a parameter of an equation as text: a power, axes, a direction, a dtype."""
    if isinstance(value, tuple | list):
        return f"({', '.join(map(_setting, value))})"
    is_text = value is None or isinstance(value, bool | int | float | str | np.dtype)
    return str(value) if is_text or isinstance(value, enum.Enum) else ""


def _plain_array(x: Any) -> Any:
    is_key = jnp.issubdtype(jnp.result_type(x), jax.dtypes.prng_key)
    return jax.random.key_data(x) if is_key else x


def _described(loss: Any) -> str:
    """Returns the name of a loss and a digest of what it does, as far as its code says so:
    lambdas are all called the same, and others differ by a number that they were made with."""
    if isinstance(loss, functools.partial):
        given = _plain((*loss.args, *loss.keywords, *loss.keywords.values()))
        return f"{_described(loss.func)} {given}"
    inner = inspect.unwrap(loss) if callable(loss) else loss
    name = getattr(inner, "__qualname__", str(loss))
    code = getattr(inner, "__code__", None)
    if code is None:
        return name
    closed = [cell.cell_contents for cell in inner.__closure__ or ()]
    used = (*code.co_names, *code.co_consts, *(inner.__defaults__ or ()), *closed)
    return f"{name} {hashlib.sha256(code.co_code + _plain(used).encode()).hexdigest()}"


def _plain(values: tuple) -> str:
    """Returns the numbers and the text among values, written out, and digests of arrays."""
    listed = [v for v in values if isinstance(v, int | float | str | None)]
    arrays = [v for v in values if isinstance(v, np.ndarray | jax.Array)]
    return repr([*listed, *(f"{x.dtype}{x.shape} {_digest([x])}" for x in arrays)])


def _digest(arrays: Iterable[Any]) -> str:
    contents = (np.ascontiguousarray(_plain_array(x)).tobytes() for x in arrays)
    return hashlib.sha256(b"".join(contents)).hexdigest()
