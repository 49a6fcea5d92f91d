"""Words that are not terms of the field: the number of their occurrences must not increase."""

import ast
import re
from collections import Counter
from pathlib import Path

import pytest

import gp_orff

IN_NAMES = {  # of functions, classes, arguments, variables and attributes
    "again": 3,
    "apart": 7,
    "beside": 5,
    "few": 31,
    "found": 37,
    "held": 21,
    "kept": 36,
    "known": 49,
    "mended": 1,
    "own": 74,
    "told": 3,
    "whole": 21,
}
IN_DOCSTRINGS = {
    "apart": 0,
    "beside": 0,
    "doubted": 0,
    "hold": 1,
    "holds": 1,
    "own": 15,
    "readings": 3,
    "spoiled": 0,
    "tell": 0,
    "tells": 0,
    "told": 1,
}
IN_NO_MESSAGE = ["anew", "beside", "doubted", "reading", "readings", "spoiled", "told", "whoever"]
IN_PAGES = [
    "anew",
    "apart",
    "beside",
    "doubted",
    "hardly",
    "hold",
    "holds",
    "mostly",
    "own",
    "reading",
    "readings",
    "seldom",
    "spoiled",
    "tell",
    "tells",
    "told",
    "whoever",
]
PLAIN = [
    "index",
    "start",
    "tasks",
    "fields",
    "noise",
    "likelihoods",
    "trust",
    "kernels",
    "scale",
    "when_not",
    "frequencies",
    "coming_from",
    "command_line",
    "compatibility",
    "mathematics",
    "papers",
    "measurements",
    "install",
    "citing",
    "guide",
    "reference",
    "gpytorch",
    "botorch",
]
MOST_WORDS = 25  # of a sentence, as CONTRIBUTING asks
ROOT = Path(__file__).parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "CHANGELOG.md")),
    *(ROOT / "docs" / f"{name}.md" for name in PLAIN),
]
TREES = [ast.parse(path.read_text()) for path in Path(gp_orff.__file__).parent.rglob("*.py")]


def names(node):
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    if isinstance(node, ast.arg):
        return [node.arg]
    if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
        return [getattr(node, "id", None) or node.attr]
    return []


def messages(tree):
    """Texts of several words that are no docstrings: errors, warnings and reports."""
    documented = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        text = node.value if isinstance(node, ast.Constant) else None
        if isinstance(text, str) and " " in text.strip() and id(node) not in documented:
            yield text.replace("labelled.readings", "")


def docstring(node):
    has = isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module)
    text = (ast.get_docstring(node) or "") if has else ""
    return re.sub(r"`(gp_orff\.)?(labelled\.)?readings`|labelled\.readings", "", text)


def counted(texts):
    return Counter(word for text in texts for word in re.findall("[a-z]+", text.lower()))


def prose(page):
    """Without code, comments and targets of links, and without the verb "to hold out"."""
    text = re.sub(r"```.*?```|<!--.*?-->|\]\([^)]*\)", " ", page.read_text(), flags=re.S)
    return re.sub(r"`[^`\n]*`|\bholds? out\b|\byour own\b", " ", text.lower())


def test_names_are_nouns_of_the_field():
    found = counted(
        re.sub("([a-z])([A-Z])", r"\1_\2", name).replace("_", " ")
        for tree in TREES
        for node in ast.walk(tree)
        for name in names(node)
    )
    assert {word: found[word] for word in IN_NAMES} == IN_NAMES  # lower the number of a word here


def test_docstrings_use_terms_of_the_field():
    """Intervals cover, they do not hold; results show, they do not tell; observations, not
    readings; separately, not apart."""
    found = counted(docstring(node) for tree in TREES for node in ast.walk(tree))
    assert not {word: found[word] for word, most in IN_DOCSTRINGS.items() if found[word] > most}


def test_messages_use_terms_of_the_field():
    found = counted(text for tree in TREES for text in messages(tree))
    assert not {word: found[word] for word in IN_NO_MESSAGE if found[word]}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_pages_use_terms_of_the_field(page):
    """CONTRIBUTING has the term for each of these words."""
    found = counted([prose(page)])
    assert not {word: found[word] for word in IN_PAGES if found[word]}


def sentences(page):
    """Of paragraphs and items of lists, without code, tables, images, formulas and commands."""
    parts = r"```.*?```|<!--.*?-->|^\|.*?$|^!\[.*?$|^\*`python.*?$|\$\$.*?\$\$"
    text = re.sub(parts, "\n\n", page.read_text(), flags=re.S | re.M)
    text = re.sub(r"\]\([^)]*\)", "]", text)
    text = re.sub(r"`[^`\n]*`|\$[^$]*\$", "X", text)
    for block in re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )", text):
        yield from re.split(r"(?<=[.?!:])\s+", " ".join(block.split()))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_sentences_are_short(page):
    words = {one: len(re.findall(r"\S*[A-Za-z]\S*", one)) for one in sentences(page)}
    assert not {one: count for one, count in words.items() if count > MOST_WORDS}


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120
