"""RULER's metrics by lm-eval's own functions: the share of the accepted answers that stand in the text, in any case."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from perturbkv.datasets.external_code import run_file
from perturbkv.datasets.ruler import tasks

_LENGTH = 4096
"""lm-eval files a score under its prompt's length; any will do."""


def grader(task: str) -> tuple[str, Callable[[str, Sequence[str]], float]]:
    """The metric's name, and what gives text of an answer and accepted answers their score, 0 to 1.

    Raises DatasetError where lm-eval is missing or is another than ours.
    """
    worded = tasks.read(task)
    function = _functions()[worded.grader]

    def grade(text: str, answers: Sequence[str]) -> float:
        for end in worded.until:
            text = text.split(end)[0]
        row = {"outputs": list(answers), "max_length": _LENGTH}
        return float(function(row, [text])[str(_LENGTH)])

    return worded.metric, grade


@functools.cache
def _functions() -> dict[str, Any]:
    """lm-eval's functions, without transformers' tokenizers, which they do not need."""
    unused = SimpleNamespace(AutoTokenizer=None)
    return run_file(tasks.folder() / "common_utils.py", lambda name: unused if name == "transformers" else None)
