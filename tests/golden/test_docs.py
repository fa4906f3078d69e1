"""Code in the docs runs, top to bottom."""

import pathlib
import re

import jax
import pytest

ROOT = pathlib.Path(__file__).parents[2]
ELSEWHERE = (
    "docs/explain.md"  # tests/model/test_explain.py runs it and reads its tables
)
PAGES = [
    page
    for page in ("README.md", *sorted(f"docs/{p.name}" for p in ROOT.glob("docs/*.md")))
    if "```python" in (ROOT / page).read_text() and page != ELSEWHERE
]
NEEDS = {"docs/litert.md": "ai_edge_litert"}  # what a page cannot do without


@pytest.mark.parametrize("page", PAGES)
def test_code_blocks_run(page, tmp_path, monkeypatch):
    if page in NEEDS:
        pytest.importorskip(NEEDS[page], reason=f"{page} is about it")
    monkeypatch.chdir(tmp_path)
    text = (ROOT / page).read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    scope: dict = {}
    with jax.numpy_dtype_promotion("standard"):  # as readers have it
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
