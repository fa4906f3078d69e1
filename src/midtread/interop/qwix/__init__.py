"""Qwix's place: `import qwix`, and everything below it, means Midtread.

    from midtread.interop.qwix import install

    install()        # before anything imports qwix
    import qwix      # Midtread, under Qwix 0.1.8's names

or, for a program that is not yours to edit:

    python -m midtread.interop.qwix -m their.program --its options

`table.py` says for each of Qwix's modules and names what it is here: most often the very
object that `import midtread` gives, else a few lines that call it with arguments in Qwix's
order. A name that is not in the table raises AttributeError with the nearest one that is.

    arrays.py    quantized arrays, and how one is quantized
    matmuls.py   contractions, and the config of a training step
    passes.py    the forward and the backward pass of a training op, each by itself
    models.py    models, modules, parameters and providers
    sparse.py    pruned weights
    contrib.py   calibrated quantization in two passes, with
    solvers.py     what is done to one weight, and
    qep.py         error propagation and rotations

Outside code also replaces names in Qwix's modules. Where that has a meaning here (`LINKS`
in the table) it reaches our engine; elsewhere a warning says that it does not.
"""

import difflib
import importlib
import importlib.abc
import importlib.machinery
import sys
import types
import warnings
from collections.abc import Sequence
from typing import Any

from midtread.interop.qwix.table import LINKS, MODULES, PATCHABLE

VERSION = "0.1.8"


class QwixModule(types.ModuleType):
    """A module of Qwix's, whose names are rows of the table."""

    def __getattr__(self, name: str) -> Any:
        rows = MODULES.get(self.__name__, {})
        if name in rows:
            value = _ours(rows[name], f"{self.__name__}.{name}")
            types.ModuleType.__setattr__(self, name, value)
            return value
        if f"{self.__name__}.{name}" in MODULES:
            return importlib.import_module(f"{self.__name__}.{name}")
        if name.startswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        raise AttributeError(f"{self.__name__} has no {name!r} here.{self._near(name)}")

    def _near(self, name: str) -> str:
        known = [n for n in dir(self) if not n.startswith("__")]
        if near := difflib.get_close_matches(name, known, 1, 0.5):
            return f" The nearest is {near[0]!r}."
        elsewhere = {n: path for path, rows in MODULES.items() for n in rows}
        if near := difflib.get_close_matches(name, list(elsewhere), 1, 0.7):
            return f" The nearest is {elsewhere[near[0]]}.{near[0]}."
        return f" There are: {', '.join(known)}." if known else ""

    def __dir__(self):
        below = [path.rpartition(".") for path in MODULES]
        own = [name for parent, _, name in below if parent == self.__name__]
        return sorted({*vars(self), *MODULES.get(self.__name__, {}), *own})

    def __setattr__(self, name: str, value: Any) -> None:
        """Somebody replaces one of Qwix's functions."""
        self._tell(name, value)
        types.ModuleType.__setattr__(self, name, value)

    def __delattr__(self, name: str) -> None:
        self._tell(name, None)
        types.ModuleType.__delattr__(self, name)

    def _tell(self, name: str, value: Any) -> None:
        path = f"{self.__name__}.{name}"
        if path in LINKS:
            _ours(LINKS[path], path)(value)
        elif name in MODULES.get(self.__name__, {}) and path not in PATCHABLE:
            warnings.warn(
                f"{path} is replaced, but Midtread's engine does not ask for it: only "
                "code that looks it up there sees the replacement.",
                stacklevel=3,
            )


def _ours(row: str, theirs: str) -> Any:
    """The object of a row, "module:name" below midtread; dotted for an attribute."""
    module, _, name = row.partition(":")
    found = importlib.import_module(f"midtread.{module}".rstrip("."))
    try:
        for part in name.split("."):
            found = getattr(found, part)
    except AttributeError:
        raise AttributeError(
            f"{theirs} is not in this version of Midtread, where it would be "
            f"midtread.{row.replace(':', '.').lstrip('.')}."
        ) from None
    return found


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds Qwix's modules in the table, ahead of an installed Qwix."""

    def find_spec(self, fullname: str, path: Any, target: Any = None):
        if fullname.partition(".")[0] != "qwix":
            return None
        if fullname not in MODULES:
            near = difflib.get_close_matches(fullname, list(MODULES), 1, 0.5)
            hint = f" The nearest is {near[0]}." if near else ""
            # without `name=`: then `from qwix... import x` shows this, not its own words
            raise ModuleNotFoundError(
                f"No module named {fullname!r} in Midtread's place of Qwix.{hint}"
            )
        is_package = any(name.startswith(f"{fullname}.") for name in MODULES)
        return importlib.machinery.ModuleSpec(fullname, self, is_package=is_package)

    def create_module(self, spec):
        return QwixModule(spec.name, f"{spec.name}, as Midtread has it.")

    def exec_module(self, module):
        if module.__name__ == "qwix":
            vars(module)["__version__"] = VERSION


_finder = _Finder()


def install() -> None:
    """Makes `import qwix` and its submodules resolve to Midtread, in this process.

    Calling it again changes nothing. It says so if the real Qwix was imported already:
    whoever imported it would go on using it beside us.
    """
    held: types.ModuleType | None = sys.modules.get("qwix")
    if held is not None and not isinstance(held, QwixModule):
        where = getattr(held, "__file__", None) or "somewhere"
        raise RuntimeError(
            f"the real qwix was imported already, from {where}: call "
            "midtread.interop.qwix.install() before the first `import qwix`, or start "
            "the program with `python -m midtread.interop.qwix -m <module>`."
        )
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
    importlib.import_module("midtread.interop.qwix.models").hook()


def run(arguments: Sequence[str]) -> None:
    """Installs, then runs a module or a script as python itself would."""
    import runpy

    install()
    if len(arguments) > 1 and arguments[0] == "-m":
        sys.argv = list(arguments[1:])
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    elif arguments and not arguments[0].startswith("-"):
        sys.argv = list(arguments)
        runpy.run_path(arguments[0], run_name="__main__")
    else:
        raise SystemExit(
            "usage: python -m midtread.interop.qwix (-m module | script.py) [options]"
        )
