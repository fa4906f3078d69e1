"""What MkDocs does beyond its own: pages that link out of `docs/` find their targets in the site.

A guide may link to a measured result (`../benchmarks/results/*.md`) or to a source file
(`../src/midtread/numerics/formats.py`). Such a file becomes a page of the site, Markdown as
it is and anything else as a block of code, and the link leads there.
"""

import pathlib
import posixpath
import re

from mkdocs.structure.files import File, InclusionLevel

ROOT = pathlib.Path(__file__).parents[1]
LINK = re.compile(r"\]\((\.\./[^)#\s]+)((?:#[^)]*)?)\)")


def on_files(files, config):
    """Adds every file outside `docs/` that a page links to."""
    targets: set[pathlib.Path | None] = set()
    for page in list(files.documentation_pages()):
        targets |= {_target(page, link) for link, _ in LINK.findall(_text(page))}
    for target in sorted(t for t in targets if t is not None):
        page = File.generated(config, _address(target), content=_page(target))
        page.inclusion = InclusionLevel.NOT_IN_NAV
        files.append(page)
    return files


def on_page_markdown(markdown, page, config, files):
    """Turns links out of `docs/` into links to the pages that `on_files` added."""

    def replaced(match):
        target = _target(page.file, match[1])
        if target is None:
            return match[0]
        here = posixpath.dirname(page.file.src_uri)
        return f"]({posixpath.relpath(_address(target), here)}{match[2]})"

    return LINK.sub(replaced, markdown)


def _target(page: File, link: str) -> pathlib.Path | None:
    """The file of the repository that a link leads to, or None if it is inside `docs/`."""
    path = (ROOT / "docs" / page.src_uri).parent / link
    path = path.resolve()
    inside = path.is_relative_to(ROOT / "docs") or not path.is_relative_to(ROOT)
    if inside or not path.is_file():
        return None
    return path.relative_to(ROOT)


def _address(target: pathlib.Path) -> str:
    return f"files/{target}" if target.suffix == ".md" else f"files/{target}.md"


def _page(target: pathlib.Path) -> str:
    text = (ROOT / target).read_text()
    if target.suffix == ".md":
        return text
    return f"# {target.name}\n\n`{target}`\n\n```{target.suffix[1:]}\n{text}\n```\n"


def _text(page: File) -> str:
    return (
        page.content_string
        if page.generated_by
        else pathlib.Path(page.abs_src_path).read_text()
    )
