"""Numbers of entries that a user gives as entries or as a share: budgets, and what always stays of them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Self

from perturbkv.configs.option import LARGEST
from perturbkv.errors import BudgetError


@dataclass(frozen=True, order=True)
class Budget:
    """Entries kept per head, the window included: an int is tokens, a float a fraction of the prompt.

    Raises BudgetError where it is not positive, infinite, or a fraction above 1.
    """

    value: int | float

    def __post_init__(self) -> None:
        if not self.value > 0:
            msg = f"a budget must be positive, got {self.value}; give tokens (128) or a fraction (0.05)"
            raise BudgetError(msg)
        if self.value == math.inf:
            msg = f"a budget must be finite, got {self.value}; give tokens (128) or a fraction (0.05)"
            raise BudgetError(msg)
        if isinstance(self.value, float) and self.value > 1:
            tokens = f"; for tokens write {self.value:.0f}" if self.value <= LARGEST else ""
            msg = f"a fractional budget must be at most 1, got {self.value}{tokens}"
            raise BudgetError(msg)
        if self.value > LARGEST:
            msg = f"a budget must be at most {LARGEST:,} entries, got {self.value:.3g}; 1.0 keeps everything"
            raise BudgetError(msg)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read '128' as tokens and '0.05' as a fraction of the prompt's length."""
        return cls(parse_entries("a budget", text))

    def tokens(self, prompt_tokens: int) -> int:
        """The budget of a prompt of `prompt_tokens` entries: ⌊fraction · n⌋, unchanged where given in tokens."""
        return entries(self.value, prompt_tokens)

    @property
    def unit(self) -> str:
        """What the number counts."""
        return "entries" if isinstance(self.value, int) else "share of the prompt"

    def __str__(self) -> str:
        return str(self.value)


def parse_entries(what: str, text: str) -> int | float:
    """An int for '128', a float for '0.05'. Raises BudgetError where `text` is neither; `what` names it."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    msg = f"{what} is tokens (128) or a fraction (0.05), got '{text}'"
    raise BudgetError(msg)


def entries(value: int | float, of: int) -> int:
    """How many entries a share (float) of `of` entries is, rounded down; an int is entries already."""
    if isinstance(value, int):
        return value
    return int(whole_entries(value * of))


def whole_entries(shares: Any) -> Any:
    """Shares of entries rounded down, numbers and tensors alike: ⌊0.29 · 100⌋ is 29, though 28.999… in binary."""
    return (shares + 1e-9) // 1
