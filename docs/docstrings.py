"""How our docstrings become pages: examples are code, and arguments that share a line get one each.

mkdocstrings reads Google's style, where an example stands under a heading. Ours stand where
they help, as `>>>` lines that the tests run; here they are fenced. And `lhs, rhs: arrays` is
two arguments with one sentence.
"""

import re

from griffe import Extension

EXAMPLE = re.compile(r"^>>> .*(?:\n.+)*", re.MULTILINE)
SHARED = re.compile(
    r"^    (\w+(?:, \w+|,\n\s+\w+)+):((?: .*)?(?:\n {8}.*)*)$", re.MULTILINE
)


class Docstrings(Extension):
    """Rewrites every docstring before it is parsed."""

    def on_object(self, *, obj, **options) -> None:
        if obj.docstring is not None:
            text = EXAMPLE.sub(r"```pycon\n\g<0>\n```", obj.docstring.value)
            obj.docstring.value = SHARED.sub(_apart, text)


def _apart(match: re.Match) -> str:
    names = re.split(r",\s+", match[1])
    return "\n".join(f"    {name}:{match[2]}" for name in names)
