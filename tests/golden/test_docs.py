"""Code in the docs runs, top to bottom."""

import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[2]
PAGES = ["README.md", "docs/everything.md", "docs/recipes.md", "docs/checkpoints.md"]


@pytest.mark.parametrize("page", PAGES)
def test_code_blocks_run(page):
    text = (ROOT / page).read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert blocks
    scope: dict = {}
    for block in blocks:
        exec(compile(block, page, "exec"), scope)  # noqa: S102


@pytest.mark.parametrize(
    "path", sorted((ROOT / "examples").glob("[0-9]*.py")), ids=lambda p: p.name
)
def test_examples_run(path, capsys):
    exec(compile(path.read_text(), str(path), "exec"), {"__name__": "__main__"})  # noqa: S102
    assert capsys.readouterr().out


def test_links_lead_somewhere():
    for page in [ROOT / "README.md", *ROOT.glob("docs/**/*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / target).exists(), (page.name, target)
