"""Numbers of cache entries, given as entries or as a fraction: budgets and always-kept entries."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any, Self

from perturbkv.configs.option import LARGEST
from perturbkv.errors import BudgetError


@dataclass(frozen=True, order=True)
class Budget:
    """A number of entries kept per head, window included: an int is entries, a float a fraction of the prompt.

    Raises BudgetError where it is not positive, infinite, or a fraction above 1.
    """

    value: int | float

    def __post_init__(self) -> None:
        if not self.value > 0:
            raise BudgetError(f"a budget must be positive, got {self.value}; give tokens (128) or a fraction (0.05)")
        if self.value == math.inf:
            raise BudgetError(f"a budget must be finite, got {self.value}; give tokens (128) or a fraction (0.05)")
        if isinstance(self.value, float) and self.value > 1:
            tokens = f"; for tokens write {self.value:.0f}" if self.value <= LARGEST else ""
            raise BudgetError(f"a fractional budget must be at most 1, got {self.value}{tokens}")
        if self.value > LARGEST:
            raise BudgetError(
                f"a budget must be at most {LARGEST:,} entries, got {self.value:.3g}; 1.0 keeps everything"
            )

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the budget written as text: `128` is entries, `0.05` a fraction of the prompt. Raises BudgetError."""
        several = [part.strip() for part in text.split(",")]
        if len(several) > 1 and all(re.fullmatch(r"[1-9]\d*|0?\.\d+", part) for part in several):
            raise BudgetError(
                f"expected one budget, got '{text}'; repeat --budget: --budget {' --budget '.join(several)}"
            )
        return cls(parse_entries("a budget", text))

    def tokens(self, prompt_tokens: int) -> int:
        """Return the budget in entries for a prompt of n tokens: ⌊fraction · n⌋, or the absolute number of entries."""
        return entry_count(self.value, prompt_tokens)

    @property
    def unit(self) -> str:
        """Unit of `value`, as text."""
        return "entries" if isinstance(self.value, int) else "share of the prompt"

    def __str__(self) -> str:
        return str(self.value)


def as_budget(value: Budget | float | str) -> Budget:
    """Return a budget, unchanged or made from a number or a text. Raises BudgetError."""
    if isinstance(value, Budget):
        return value
    return Budget.parse(value) if isinstance(value, str) else Budget(value)


def parse_entries(what: str, text: str) -> int | float:
    """Return the number written as text: an int for `128` (entries), a float for `0.05` (a fraction).

    Raises BudgetError for any other text; `what` names the value in its message.
    """
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    raise BudgetError(f"{what} is tokens (128) or a fraction (0.05), got '{text}'")


def entry_count(value: int | float, total: int) -> int:
    """Return a number of entries: an int unchanged, a float as a share of `total` entries, rounded down."""
    if isinstance(value, int):
        return value
    return int(round_down_entries(value * total))


def round_down_entries(shares: Any) -> Any:
    """Return shares of entries, numbers or tensors, rounded down: ⌊0.29 · 100⌋ is 29, though 28.999… in binary."""
    return (shares + 1e-9) // 1
