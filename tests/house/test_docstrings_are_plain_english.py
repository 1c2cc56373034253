"""A function's docstring begins with an imperative verb, a class's with a noun phrase; ruff's D401 knows the verbs.

D401 lets through what it has no word for: symbols, questions and prepositions, which this test refuses.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("perturbkv", "analyses", "figures", "cli", "studies", "docs/scripts")
NO_VERB = frozenset(
    "A An The This These That One Two Three Every Each Any All Both No Not Some Where What Which Whether Who Whose How "
    "When Why If Of For From In On At By To With Without Between As It Its Means Mean Median Ratio".split()
)
NO_NOUN = frozenset("Of For What Which Whether Who Whose How Where When Why If Return Raise Draw Write Print".split())


def odd_beginnings(source: str) -> Iterator[str]:
    """Yield the first lines of docstrings that begin otherwise; a property is a noun."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            continue
        line = (ast.get_docstring(node) or "").partition("\n")[0]
        word = re.match(r"[A-Z][a-z]+\b", line)
        if isinstance(node, ast.ClassDef):
            odd = word is not None and word[0] in NO_NOUN
        elif any(re.search("property|derived|setter", ast.unparse(one)) for one in node.decorator_list):
            continue
        else:
            odd = bool(line) and (word is None or word[0] in NO_VERB)
        if odd:
            yield line


@pytest.mark.parametrize("folder", FOLDERS)
def test_docstrings_begin_with_a_verb_or_a_noun(folder: str) -> None:
    assert [
        f"{path.relative_to(ROOT)}: {line}"
        for path in sorted((ROOT / folder).rglob("*.py"))
        for line in odd_beginnings(path.read_text())
    ] == []


def test_a_docstring_that_is_no_sentence_is_found() -> None:
    planted = (
        'def f():\n    """ρ with its interval."""\nclass C:\n    """Of a sample, of one step."""\n'
        'def g():\n    """Return ρ."""\n@property\ndef h():\n    """The rows."""\nclass D:\n    """A sample."""\n'
        'def i():\n    """Whether it is so."""\n'
    )
    assert [*odd_beginnings(planted)] == ["ρ with its interval.", "Of a sample, of one step.", "Whether it is so."]
