"""The largest window that leaves room beside itself at the smallest budget, when the user chose none."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from perturbkv.configs.entry_counts import Budget
from perturbkv.errors import BudgetError

if TYPE_CHECKING:
    from perturbkv.datasets.encode import Prompt

WINDOWS = (32, 16, 8, 4, 2, 1)
_NAMED = 5
_DIGITS = 10_000
"""A share that is named is rounded up to one of so many."""


def widest_window(budgets: Sequence[Budget], prompts: Sequence[Prompt], scenario: str = "regular") -> tuple[int, str]:
    """One window for all budgets and prompts, and how it was found, in words.

    It leaves at least as many free entries as itself at the smallest budget of the shortest prompt: a window that
    shrank with the budget would be one more thing that differs. Raises BudgetError where not even one entry and a free
    one fit, which names the prompts and the smallest budget that fits them.
    """
    kept = {prompt.sample_id: _least(budgets, len(prompt.parts(scenario)[0])) for prompt in prompts}
    fewest = min(entries for entries, _ in kept.values())
    found = next((window for window in WINDOWS if fewest >= 2 * window), None)
    if found is None:
        raise BudgetError(_unfit(kept, of_shares=isinstance(budgets[0].value, float)))
    entries, tokens = min(kept.values())
    return found, (
        f"window {found} for all budgets, the largest of {', '.join(map(str, WINDOWS))} that leaves as many free "
        f"entries as itself: the smallest budget keeps {entries} of the {tokens:,} of the shortest prompt"
    )


def _least(budgets: Sequence[Budget], tokens: int) -> tuple[int, int]:
    """Entries that the smallest budget keeps of a prompt, and the prompt's."""
    return min(min(budget.tokens(tokens), tokens) for budget in budgets), tokens


def _unfit(kept: dict[str, tuple[int, int]], of_shares: bool) -> str:
    """The prompts in which nothing fits, and what to do."""
    short = [(name, tokens) for name, (entries, tokens) in kept.items() if entries < 2]
    named = ", ".join(f"{name} ({tokens:,} tokens)" for name, tokens in short[:_NAMED])
    more = f" and {len(short) - _NAMED} more" if len(short) > _NAMED else ""
    least = math.ceil(_DIGITS * 2 / min(tokens for _, tokens in short)) / _DIGITS if of_shares else 2
    return (
        f"the smallest budget leaves no entry beside a window of one in {named}{more}; give --budget from {least:g} "
        "on, or longer prompts"
    )
