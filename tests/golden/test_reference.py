"""Every public name is in the reference, and its docstring says what a stranger needs."""

import inspect
import pathlib
import re

import pytest

import midtread as mt

PAGES = pathlib.Path(__file__).parents[2] / "docs" / "reference"
NAMES = sorted(
    name
    for name in vars(mt)
    if not name.startswith("_") and not inspect.ismodule(getattr(mt, name))
)
CALLABLE = [name for name in NAMES if callable(getattr(mt, name))]
# Their examples need more than a few lines; the guides have them, and run.
SHOWN_ELSEWHERE = {
    "OdmlQatProvider", "OdmlConversionProvider",  # docs/litert.md
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


@pytest.mark.parametrize("name", CALLABLE)
def test_docstring_is_whole(name):
    thing = getattr(mt, name)
    text = inspect.getdoc(thing) or ""
    summary = text.split("\n\n")[0]
    assert summary.endswith(".") and len(summary.split()) > 2, "no summary sentence"
    documented = _arguments(text)
    for parameter in _parameters(thing):
        assert parameter in documented, f"{parameter} is not under Args"
    if not inspect.isclass(thing):
        annotated = inspect.signature(thing).return_annotation
        assert annotated is not inspect.Signature.empty, "no return type"
        assert "Returns:" in text or annotated in (None, "None"), "no Returns"
    assert ">>>" in text or name in SHOWN_ELSEWHERE, "no example"


def _arguments(text: str) -> set[str]:
    """The names before the colons of the section Args."""
    section = re.search(r"^Args:\n((?:    .*\n?|\n)*)", text, re.MULTILINE)
    if section is None:
        return set()
    heads = re.findall(r"^    (\w[\w, \n]*?):", section[1], re.MULTILINE)
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
