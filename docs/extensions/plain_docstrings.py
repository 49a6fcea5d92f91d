"""Docstrings as they are written, plain English with formulas, made ready for reStructuredText.

Stars and bars of shapes and norms, `(*b, N, p)` and |k|, are characters; an indented paragraph is a
formula, set as it stands.
"""

import re

from sphinx.application import Sphinx
from sphinx.util.inspect import signature, stringify_signature

QUOTED = re.compile(r"(``.*?``|`[^`]*`)")
CHARACTERS = re.compile(r"\||(?<![*\w])\*(?=\w\b)|(?<=\w)\*(?=[\w(])|(?<=\w)_(?=[\s.,;:)]|$)")
SKIPPED = re.compile(r"set_(fit|partial_fit|score|predict)_request|forward")


def escaped(line: str) -> str:
    """The line with the characters of formulas escaped, outside of quotes."""
    parts = QUOTED.split(line)
    parts[::2] = [CHARACTERS.sub(r"\\\g<0>", part) for part in parts[::2]]
    return "".join(parts)


def prepared(lines: list[str]) -> list[str]:
    """The lines of a docstring with characters escaped and formulas as literal blocks."""
    result, formula, before = [], None, None  # indents of the text around, and of the last line
    example = False
    for line in lines:
        indent = len(line) - len(line.lstrip()) if line.strip() else None
        example = line.lstrip().startswith(">>>") or (example and indent is not None)
        if indent is not None and formula is not None and indent <= formula:
            formula = None
        if formula is None and not example and indent is not None:
            after_blank = len(result) > 1 and not result[-1].strip()
            if after_blank and before is not None and indent > before:
                formula = before
                result += [" " * before + "::", ""]
        result.append(line if formula is not None or example else escaped(line))
        before = before if indent is None else indent
    return result


def prepare(app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]):
    lines[:] = prepared(lines)


def sign(app: Sphinx, what: str, name: str, obj: object, options: object, arguments: str, _: str):
    """The arguments of `__init__`, where a metaclass of gpytorch's hides them."""
    if what == "class" and (arguments or "").startswith("(*args"):
        own = signature(obj.__init__, bound_method=True)
        return stringify_signature(own, unqualified_typehints=True), ""


def skip(app: Sphinx, what: str, name: str, obj: object, skipped: bool, options: object):
    """Leave out what scikit-learn adds to estimators, and gpytorch's `forward`."""
    return True if SKIPPED.fullmatch(name) else None


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("autodoc-process-docstring", prepare, priority=100)  # before napoleon
    app.connect("autodoc-process-signature", sign)
    app.connect("autodoc-skip-member", skip)
    return {"parallel_read_safe": True}
