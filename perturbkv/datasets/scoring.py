"""How right is a generated number? Exactly, or as far as its leading digits go."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence

_NUMBER = re.compile(r"\d[\d,]*")


def exact_number(text: str, answers: Sequence[str]) -> float:
    """1 where the first number in the text, its thousands' commas left out, is one of the answers, else 0.

    NaN where no answer is a number: how right a text is, this cannot tell.
    """
    wanted = _numbers(answers)
    return float(_first_number(text) in wanted) if wanted else math.nan


def leading_digits(text: str, answers: Sequence[str]) -> float:
    """The share, in [0, 1], of an answer's digits that the text's first number begins with; of the best answer.

    NaN where no answer is a number.
    """
    found = _first_number(text)
    shares = [len(os.path.commonprefix([found, number])) / len(number) for number in _numbers(answers)]
    return max(shares, default=math.nan)


def _numbers(answers: Sequence[str]) -> list[str]:
    """Those answers that are nothing but a number, without commas."""
    return [answer.replace(",", "") for answer in answers if _NUMBER.fullmatch(answer)]


def _first_number(text: str) -> str:
    """Empty where there is none."""
    found = _NUMBER.search(text)
    return found[0].replace(",", "") if found else ""
