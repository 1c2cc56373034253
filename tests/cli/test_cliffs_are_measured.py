"""`perturbkv budget --cliff`: what it makes, chooses, refuses and says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from perturbkv.cli.commands.budget import widest_window
from perturbkv.configs.entry_counts import Budget
from perturbkv.datasets.encode import Prompt
from perturbkv.errors import BudgetError
from tests.support.models import token_ids

Run = Callable[..., Any]
SHARES = ("0.05", "0.1", "0.2", "0.4")


@pytest.fixture
def plain(model: Path, data: Path) -> list[object]:
    """Two prompts of 182 tokens; neither budget nor window."""
    return ["--model", model, "--dataset", data, "--samples", 2]


def budgets(*shares: object) -> list[object]:
    return [word for share in shares for word in ("--budget", share)]


def prompts(*lengths: int) -> list[Prompt]:
    return [Prompt(f"p{place}", token_ids(length), 0) for place, length in enumerate(lengths)]


@pytest.mark.parametrize(
    ("lengths", "shares", "window"),
    [
        ((1000,), (0.064, 0.2), 32),  # 64 entries: as many free
        ((1000,), (0.063, 0.2), 16),
        ((1000, 400), (0.005, 0.1), 1),  # 2 entries of the shorter
        ((1000,), (0.005, 0.1), 2),
        ((1000, 400), (9, 90), 4),
    ],
)
def test_the_window_leaves_as_many_free_entries_as_itself(
    lengths: tuple[int, ...], shares: tuple[float, ...], window: int
) -> None:
    found, said = widest_window([Budget(one) for one in shares], prompts(*lengths))
    assert found == window
    assert str(window) in said and f"{min(lengths):,}" in said


def test_prompts_for_which_nothing_fits_are_named_with_what_to_do() -> None:
    with pytest.raises(BudgetError, match=r"in p1 \(182 tokens\); give --budget from 0\.011 on, or longer prompts"):
        widest_window([Budget(0.005), Budget(0.1)], prompts(1000, 182))
    assert widest_window([Budget(0.011)], prompts(1000, 182))[0] == 1
    with pytest.raises(BudgetError, match="give --budget from 2 on"):
        widest_window([Budget(1)], prompts(1000))


@pytest.mark.parametrize(("typed", "told"), [([], True), (["--window", 8], False)])
def test_a_window_is_found_unless_one_is_given(
    perturbkv: Run, plain: list[object], typed: list[object], told: bool
) -> None:
    """9 of 182 entries are kept: four of them free."""
    ran = perturbkv("budget", "--cliff", *plain, *budgets(*SHARES), *typed, "--dry-run")
    assert (ran.code, "window 4" in ran.err) == (0, told), ran.err
