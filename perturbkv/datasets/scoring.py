"""How right is a generated number? Exactly, or as far as its leading digits go."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

_NUMBER = re.compile(r"\d[\d,]*")


def exact_number(text: str, answers: Sequence[str]) -> float:
    """1 where the first number in the text, its thousands' commas left out, is one of the answers, else 0."""
    return float(_first_number(text) in answers)


def leading_digits(text: str, answers: Sequence[str]) -> float:
    """The share, in [0, 1], of an answer's digits that the text's first number begins with; of the best answer."""
    found = _first_number(text)
    return max((len(os.path.commonprefix([found, answer])) / len(answer) for answer in answers if answer), default=0.0)


def _first_number(text: str) -> str:
    """Empty where there is none."""
    found = _NUMBER.search(text)
    return found[0].replace(",", "") if found else ""
