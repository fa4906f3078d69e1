"""Html: one page that holds all it shows, pictures included, and links to nothing.

It is read on a screen and on a phone: a table wider than the screen scrolls by itself, texts
stand side by side where there is room and below each other where there is none.
"""

import pathlib
from typing import Any, NamedTuple

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{{ title }}</title>
<meta name="viewport" content="width=device-width, initial-scale=1"><style>
* { box-sizing: border-box }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 75rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
h1 { font-size: 1.5rem; overflow-wrap: anywhere } h2, summary { font-size: 1.1rem; font-weight: bold }
h2, details { margin: 2rem 0 .5rem } details + details { margin-top: .5rem } summary { cursor: pointer }
.wide { overflow-x: auto }
table { border-collapse: collapse } td, th { padding: .25rem .8rem; border-bottom: 1px solid #ddd; text-align: left }
.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap }
th:first-child, td:first-child { padding-left: 0; min-width: 7rem; overflow-wrap: anywhere }
pre { background: #f6f6f6; padding: 1rem; overflow-x: auto; font-size: 13px; line-height: 1.35; margin: .5rem 0 }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(20rem, 100%), 1fr)); gap: 0 1rem }
.cards h3 { font-size: 1rem; margin: .5rem 0 0; overflow-wrap: anywhere } .cards pre { white-space: pre-wrap; overflow-wrap: anywhere }
svg { width: 100%; max-width: 40rem; height: auto; display: block }
</style></head><body>
<h1>{{ title }}</h1>
{% for section in sections %}
{% if section.is_folded %}<details><summary>{{ section.title }}</summary>{% else %}<h2>{{ section.title }}</h2>{% endif %}
{% if section.text %}<p>{{ section.text }}</p>{% endif %}
{% if section.picture %}{{ section.picture | safe }}{% endif %}
{% if section.rows %}<div class="wide"><table><tr>{% for c in section.columns %}<th{% if loop.index0 %} class="number"{% endif %}>{{ c }}</th>{% endfor %}</tr>
{% for row in section.rows %}<tr>{% for c in row %}<td{% if loop.index0 %} class="number"{% endif %}>{{ c }}</td>{% endfor %}</tr>
{% endfor %}</table></div>{% endif %}
{% if section.cards %}<div class="cards">{% for name, text in section.cards %}<div><h3>{{ name }}</h3><pre>{{ text }}</pre></div>{% endfor %}</div>{% endif %}
{% if section.code %}<pre>{{ section.code }}</pre>{% endif %}
{% if section.is_folded %}</details>{% endif %}
{% endfor %}
</body></html>
"""


class Section(NamedTuple):
    """A part of a page: words, a picture (svg), a table, texts beside each other, and
    preformatted text. What is folded shows its title until it is clicked."""

    title: str
    text: str = ""
    picture: str = ""
    columns: tuple[str, ...] = ()
    rows: tuple[tuple[Any, ...], ...] = ()
    cards: tuple[tuple[str, str], ...] = ()
    code: str = ""
    is_folded: bool = False


def write(path: pathlib.Path, title: str, sections: list[Section]) -> pathlib.Path:
    from jinja2 import Environment

    page = Environment(autoescape=True).from_string(PAGE)
    path.write_text(page.render(title=title, sections=sections))
    return path
