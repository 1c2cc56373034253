"""Is a generated answer right? One function per way to score; each gives 1 for right and 0 for wrong."""

from __future__ import annotations

import re
from collections.abc import Sequence

_NUMBER = re.compile(r"\d[\d,]*")


def exact_number(text: str, answers: Sequence[str]) -> int:
    """Whether the first number in the text, its thousands' commas left out, is one of the answers."""
    found = _NUMBER.search(text)
    return int(found is not None and found[0].replace(",", "") in answers)
