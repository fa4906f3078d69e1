"""Imports go one way, and private names stay where they are allowed."""

import ast
import pathlib
import re
import subprocess
import sys

import midtread

ROOT = pathlib.Path(midtread.__file__).parent
LAYERS = ["numerics", "optim", "kernels", "ops", "model", "providers", "algorithms"]
LAYERS += ["interop", "report", "lm", "cli"]  # the first two at the side: lm may call
FLAX = ("model", "providers", "algorithms", "interop", "lm")
MAY_BE_PRIVATE = {"intercept.py", "flaxlib.py", "pallas_compat.py"}


def imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


def test_imports_go_one_way():
    for path in ROOT.glob("*/**/*.py"):
        layer = path.relative_to(ROOT).parts[0]
        for name in imports(path):
            parts = name.split(".")
            if parts[0] == "midtread" and len(parts) > 1:
                assert LAYERS.index(parts[1]) <= LAYERS.index(layer), (path, name)
            if parts[0] == "flax":
                assert layer in FLAX, (path, name)


def test_every_folder_has_a_map():
    """The docstring of a folder names each file in it; that of the package is a tour."""
    for init in ROOT.glob("*/**/__init__.py"):
        text = ast.get_docstring(ast.parse(init.read_text())) or ""
        files = {path.stem for path in init.parent.glob("*.py")}
        folders = {path.parent.name for path in init.parent.glob("*/__init__.py")}
        lacking = [
            name
            for name in files - {"__init__", "__main__"}
            if f"{name}.py" not in text
        ]
        lacking += [name for name in folders if not re.search(rf"\b{name}\b", text)]
        assert not lacking, init


def test_private_names_stay_put():
    for path in ROOT.glob("**/*.py"):
        for name in imports(path):
            private = any(
                part.startswith("_") and part != "__future__"
                for part in name.split(".")
            )
            assert not private or path.name in MAY_BE_PRIVATE, (path, name)


EXTRAS = "print(sorted({'orbax', 'optax', 'yaml', 'matplotlib'} & set(sys.modules)))"
INITIALIZED = (
    "from jax._src import xla_bridge; print(xla_bridge.backends_are_initialized())"
)


def test_importing_touches_no_device_and_no_extra():
    def run(*lines):
        command = [sys.executable, "-c", "\n".join(("import sys", *lines))]
        return subprocess.run(
            command, capture_output=True, text=True, check=True
        ).stdout

    flax = "import flax.linen, flax.nnx"
    assert run(flax, "import midtread", EXTRAS) == run(flax, EXTRAS)
    assert run("import midtread", INITIALIZED) == "False\n"
