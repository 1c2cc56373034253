"""CONTRIBUTING's table of sizes: every file has a feature, and the page's total is not stale."""

from __future__ import annotations

import ast
import re

from tests.support.scripts import functions

sizes = functions("code_sizes")


def total(text: str) -> int:
    (found,) = re.findall(r"Studies and benchmarks apart: ([\d,]+) statements", text)
    return int(found.replace(",", ""))


def test_every_file_counts_for_a_feature() -> None:
    paths = list(sizes["files"]())
    assert {path.partition("/")[0] for path in paths} >= {"perturbkv", "analyses", "figures", "cli", "studies", "tests"}
    assert {sizes["feature_of"](path) for path in paths} == set(sizes["FEATURES"])


def test_imports_and_docstrings_are_no_statements() -> None:
    tree = ast.parse('"""A."""\nimport os\n\ndef f():\n    """B."""\n    if os:\n        return 1\n    return 2\n')
    assert sizes["statements"](tree) == 4


def test_the_pages_total_is_at_most_five_per_cent_off() -> None:
    assert abs(total(sizes["PAGE"].read_text()) / total(sizes["table"]()) - 1) <= 0.05
