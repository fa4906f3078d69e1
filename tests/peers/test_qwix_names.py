"""Every public name of the installed Qwix, module by module, is one of ours or said not to be.

Its modules are read, not imported: a gap shows by itself, whatever imports them.
"""

import ast
import importlib.util
import pathlib

import pytest

from midtread.interop.qwix.table import MODULES

spec = importlib.util.find_spec("qwix")
if spec is None or not spec.submodule_search_locations:
    pytest.skip("qwix is not installed", allow_module_level=True)
ROOT = pathlib.Path(next(iter(spec.submodule_search_locations)))

# Kernels for TPUs alone, and an experiment that the newer JAX does not run.
NOT_OURS = ("qwix.contrib.kernels", "qwix.contrib.hijax")


def names(path: pathlib.Path) -> set[str]:
    """What a module defines, and what a package's own takes from others."""
    found: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Assign):
            found |= {t.id for t in node.targets if isinstance(t, ast.Name)}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.add(node.target.id)
        elif isinstance(node, ast.ImportFrom) and path.name == "__init__.py":
            found |= {alias.asname or alias.name for alias in node.names}
    return {name for name in found if not name.startswith("_")}


def modules():
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT.parent).with_suffix("").parts
        name = ".".join(parts).removesuffix(".__init__")
        if not name.startswith(NOT_OURS):
            yield name, path


def test_no_name_is_missing():
    gaps = {}
    for module, path in modules():
        below = {
            m.rpartition(".")[2] for m in MODULES if m.rpartition(".")[0] == module
        }
        gap = names(path) - set(MODULES.get(module, {})) - below
        if gap:
            gaps[module] = sorted(gap)
    assert not gaps
