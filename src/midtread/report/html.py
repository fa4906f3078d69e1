"""Html: one page that holds all it shows, pictures included, and links to nothing."""

import pathlib
from typing import Any, NamedTuple

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{{ title }}</title><style>
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
h1 { font-size: 1.5rem } h2 { font-size: 1.1rem; margin-top: 2rem }
table { border-collapse: collapse } td, th { padding: .25rem .8rem; border-bottom: 1px solid #ddd; text-align: left }
td.number { text-align: right; font-variant-numeric: tabular-nums }
pre { background: #f6f6f6; padding: 1rem; overflow-x: auto; font-size: 13px; line-height: 1.35 }
svg { width: 100%; height: auto }
</style></head><body>
<h1>{{ title }}</h1>
{% for section in sections %}
<h2>{{ section.title }}</h2>
{% if section.text %}<p>{{ section.text }}</p>{% endif %}
{% if section.picture %}{{ section.picture | safe }}{% endif %}
{% if section.rows %}<table><tr>{% for c in section.columns %}<th>{{ c }}</th>{% endfor %}</tr>
{% for row in section.rows %}<tr>{% for c in row %}<td{% if loop.index0 %} class="number"{% endif %}>{{ c }}</td>{% endfor %}</tr>
{% endfor %}</table>{% endif %}
{% if section.code %}<pre>{{ section.code }}</pre>{% endif %}
{% endfor %}
</body></html>
"""


class Section(NamedTuple):
    """A part of a page: words, a picture (svg), a table, preformatted text."""

    title: str
    text: str = ""
    picture: str = ""
    columns: tuple[str, ...] = ()
    rows: tuple[tuple[Any, ...], ...] = ()
    code: str = ""


def write(path: pathlib.Path, title: str, sections: list[Section]) -> pathlib.Path:
    from jinja2 import Environment

    page = Environment(autoescape=True).from_string(PAGE)
    path.write_text(page.render(title=title, sections=sections))
    return path
