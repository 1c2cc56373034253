"""Short names for configurations that are shown side by side: only what tells them apart."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence


def counted(number: int, word: str, many: str = "") -> str:
    """'1 sample', '8 samples', or with `many` '8 batches'."""
    return f"{number:,} {word if number == 1 else many or f'{word}s'}"


def setting(label: str) -> str:
    """A configuration's label without policy and selection: what the sides of a comparison share."""
    return label.partition(" ")[2]


def selection(label: str) -> str:
    """The selection that a configuration's label names."""
    return label.partition(" ")[0].partition(":")[2]


def budget(label: str) -> str:
    """The budget that a configuration's label names."""
    return next(part.removeprefix("b=") for part in label.split() if part.startswith("b="))


def budgets(settings: Sequence[str]) -> list[str]:
    """Each setting's budget, and behind it what else tells the settings apart."""
    others = short([without_budget(one) for one in settings])
    return [f"{budget(one)} {other}".strip() for one, other in zip(settings, others, strict=True)]


def without_budget(label: str) -> str:
    """A label without its budget."""
    return " ".join(part for part in label.split() if not part.startswith("b="))


def common(labels: Sequence[str]) -> str:
    """The words that all labels share; a policy and its selection are two words."""
    words = [_words(label) for label in labels] or [[]]
    shared = set(words[0]).intersection(*words[1:])
    return " ".join(word for word in words[0] if word in shared)


def short(labels: Sequence[str]) -> list[str]:
    """Each label without the words that all of them share; empty where there is but one."""
    shared = set(common(labels).split())
    return [" ".join(word for word in _words(label) if word not in shared) for label in labels]


def _words(label: str) -> list[str]:
    return label.replace(":", " ", 1).split()


def folded(name: str, width: int = 16) -> str:
    """A long name on several lines, broken between its words."""
    return "\n".join(textwrap.wrap(name, width, break_long_words=False, break_on_hyphens=False))
