"""Every public name is in the reference, and its docstring says what a stranger needs."""

import ast
import importlib
import inspect
import pathlib
import re
import textwrap
from collections.abc import Callable, Iterator

import pytest

import midtread as mt

PAGES = pathlib.Path(__file__).parents[2] / "docs" / "reference"
NAMES = sorted(
    name
    for name in vars(mt)
    if not name.startswith("_") and not inspect.ismodule(getattr(mt, name))
)
CALLABLE = [name for name in NAMES if callable(getattr(mt, name))]
MODULES = (
    "safetensors",
    "orbax",
    "litert",
)  # of interop, whose pages are whole modules
WITHIN = {
    f"{name}.{key}": value
    for name in MODULES
    for module in [importlib.import_module(f"midtread.interop.{name}")]
    for key, value in vars(module).items()
    if not key.startswith("_") and getattr(value, "__module__", "") == module.__name__
}
THINGS = {name: getattr(mt, name) for name in CALLABLE} | WITHIN
# Their examples need more than a few lines; the guides have them, and run.
SHOWN_ELSEWHERE = {
    "OdmlQatProvider", "OdmlConversionProvider",  # docs/litert.md
    "litert.export", "litert.calibrate_and_export",  # docs/litert.md
    "process_prequantized_params", "restore_quantization_rules",  # docs/checkpoints.md
    "load_lora", "QuantStat",  # save_lora's example, docs/static-ranges.md
    "Calibrated", "CalibrationOptions",  # docs/four-bits.md
    "QuantizationProvider", "Ranges", "Fwd", "Dlhs", "Drhs",  # docs/recipes.md
}  # fmt: skip


def directives() -> list[str]:
    text = "\n".join(page.read_text() for page in sorted(PAGES.glob("*.md")))
    named = re.findall(r"^::: midtread\.(\S+)$", text, re.MULTILINE)
    return [name.removeprefix("ops.api.Ops.") for name in named]


def test_reference_has_every_public_name_once():
    listed = [name for name in directives() if "." not in name]
    assert sorted(listed) == NAMES


@pytest.mark.parametrize("name", THINGS)
def test_docstring_is_whole(name):
    thing = THINGS[name]
    text = inspect.getdoc(thing) or ""
    summary = text.split("\n\n")[0]
    assert summary.endswith(".") and len(summary.split()) > 2, "no summary sentence"
    documented = _heads(text, "Args")
    for parameter in _parameters(thing):
        assert parameter in documented, f"{parameter} is not under Args"
    for parameter in inspect.signature(thing).parameters.values():
        is_star = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        is_typed = parameter.annotation is not parameter.empty
        assert is_typed or is_star, f"{parameter} has no type"
    if not inspect.isclass(thing):
        annotated = inspect.signature(thing).return_annotation
        assert annotated is not inspect.Signature.empty, "no return type"
        assert "Returns:" in text or annotated in (None, "None"), "no Returns"
    assert ">>>" in text or name in SHOWN_ELSEWHERE, "no example"


@pytest.mark.parametrize("name", THINGS)
def test_docstring_says_what_is_raised(name):
    """What its own lines raise, by type; and that something is, where its checks do."""
    thing = THINGS[name]
    told = _heads(inspect.getdoc(thing) or "", "Raises")
    begins = ("__init__", "__post_init__")
    own = (
        [vars(thing).get(key) for key in begins] if inspect.isclass(thing) else [thing]
    )
    own = [inspect.unwrap(fn) for fn in own if inspect.isfunction(fn)]
    own = [fn for fn in own if fn.__code__.co_filename != "<string>"]  # a dataclass's
    raised = {error for fn in own for error in _raised(fn)}
    assert raised <= told
    by_checks = {e for fn in own for called in _called(fn) for e in _raised(called)}
    assert told or not by_checks, f"{by_checks} may be raised"


def _tree(fn: Callable) -> ast.AST:
    return ast.parse(textwrap.dedent(inspect.getsource(fn)))


def _raised(fn: Callable) -> set[str]:
    """The types of errors that a function's own lines raise."""
    raised = [x.exc for x in ast.walk(_tree(fn)) if isinstance(x, ast.Raise) and x.exc]
    names = {ast.unparse(x.func if isinstance(x, ast.Call) else x) for x in raised}
    return {name for name in names if name.endswith("Error")}


def _called(fn: Callable) -> Iterator[Callable]:
    """The functions of the package that a function calls by their names."""
    for node in ast.walk(_tree(fn)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            called = inspect.unwrap(fn.__globals__.get(node.func.id) or print)
            if inspect.isfunction(called) and called.__module__.startswith("midtread"):
                yield called


def _heads(text: str, section: str) -> set[str]:
    """The names before the colons of a section."""
    found = re.search(rf"^{section}:\n((?:    .*\n?|\n)*)", text, re.MULTILINE)
    if found is None:
        return set()
    heads = re.findall(r"^    (\w[\w, \n]*?):", found[1], re.MULTILINE)
    return {word.strip() for head in heads for word in head.split(",")}


def _parameters(thing) -> list[str]:
    """What a caller writes; a rule's or module's inherited fields are documented there."""
    inherited: set[str] = set()
    if inspect.isclass(thing):
        for base in thing.__mro__[1:-1]:
            inherited |= set(getattr(base, "__dataclass_fields__", ()))
    try:
        names = list(inspect.signature(thing).parameters)
    except ValueError:
        return []
    skipped = {"args", "kwargs", "parent", "name"} if inherited else {"args", "kwargs"}
    return [n for n in names if n not in inherited | skipped]
