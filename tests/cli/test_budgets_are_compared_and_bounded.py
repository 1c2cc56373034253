"""perturbkv budget: exit codes, screens, files, what it refuses before any work, and the window of a cliff."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from perturbkv.cli.commands.budget import widest_window
from perturbkv.configs.entry_counts import Budget
from perturbkv.datasets.encode import Prompt
from perturbkv.errors import BudgetError
from tests.analyses.test_safe_budgets_by_hand import levels
from tests.support.asked import refused
from tests.support.models import token_ids
from tests.support.swept import swept

Run = Callable[..., Any]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Attention is safe from 0.4 on at a KL of 0.1, two-stage nowhere; 40 samples, with scores."""
    kl = np.stack([levels(0.5, 0.2, 0.03, 0.02, 0.01), levels(0.9, 0.8, 0.7, 0.6, 0.5)], axis=1)
    score = np.ones((40, 2, 5))
    score[:10, 0, 0] = 0
    return swept(kl, score=score).save(tmp_path / "t.h5")


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        (["--max-kl", 0.1, "--compare", "attention"], 0, "attention has a safe budget: 0.4 or more"),
        (["--max-kl", 0.1], 1, "two-stage has no safe budget: at 0.8, the largest, mean KL is 0.5"),
        (["--max-drop", 10], 0, "attention has a safe budget: 0.2 or more; two-stage has a safe budget: 0.1 or more"),
        (["--max-drop", 1], 2, "would do; too few samples to decide whether two-stage"),
        (["--max-drop", 1, "--max-kl", 0.1], 1, "mean KL ≤ 0.1 nat and mean drop of the score ≤ 1 points"),
    ],
)
def test_the_exit_code_says_whether_every_selection_has_a_safe_budget(
    perturbkv: Run, path: Path, options: list[object], code: int, said: str
) -> None:
    ran = perturbkv("budget", path, *options, "-o", "out", "--format", "png")
    assert ran.code == code, ran.err
    assert said in " ".join(ran.out.split())
    told = json.loads(Path("out/summary.json").read_text())["analyses"]["budget"]
    assert told["exit_code"] == code
    assert Path("out/budget.png").exists()


def test_selections_are_taken_with_commas_too(perturbkv: Run, path: Path) -> None:
    ran = perturbkv(
        "budget", path, "--max-drop", 10, "--compare", "attention,two-stage", "-o", "out", "--format", "png"
    )
    assert ran.code == 0, ran.err
    assert "attention has a safe budget: 0.2 or more; two-stage has a safe budget: 0.1" in " ".join(ran.out.split())
    refused(
        perturbkv("budget", path, "--max-drop", 10, "--compare", "attention,attention"),
        "expected different values for --compare, got attention twice",
    )


def test_another_limit_in_the_same_folder_is_refused_in_the_words_of_options(perturbkv: Run, path: Path) -> None:
    ask = ["budget", path, "-o", "out", "--format", "png"]
    assert perturbkv(*ask, "--max-kl", 0.1).code == 1
    ran = perturbkv(*ask, "--max-drop", 50)
    refused(
        ran, "holds budget with --max-kl 0.1, without --max-drop; this one is without --max-kl, with --max-drop 50.0"
    )
    assert "None" not in ran.err


def test_bytes_are_told_where_a_length_is_asked_for(perturbkv: Run, path: Path) -> None:
    asked = ["--max-drop", 10, "--for-length", 1_000_000, "--for-batch", 8]
    ran = perturbkv("budget", path, *asked, "-o", "out", "--format", "png")
    assert "1,000,000" in ran.out
    assert "0.715" in ran.out  # GiB of the full cache: 96 bytes an entry
    assert "0.143 /" in ran.out and "0.0715 /" in ran.out


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


def test_the_shortest_prompt_is_named_where_nothing_fits() -> None:
    with pytest.raises(BudgetError, match=r"in p1 \(182 tokens\); give larger ones, or longer prompts"):
        widest_window([Budget(0.005), Budget(0.1)], prompts(1000, 182))
    assert widest_window([Budget(0.011)], prompts(1000, 182))[0] == 1
    with pytest.raises(BudgetError, match="give larger ones"):
        widest_window([Budget(1)], prompts(1000))


@pytest.mark.parametrize(("typed", "told"), [([], True), (["--window", 8], False)])
def test_a_window_is_found_unless_one_is_given(
    perturbkv: Run, plain: list[object], typed: list[object], told: bool
) -> None:
    """9 of 182 entries are kept: four of them free."""
    ran = perturbkv("budget", "--cliff", *plain, *budgets(*SHARES), *typed, "--dry-run")
    assert (ran.code, "window 4" in ran.err) == (0, told), ran.err
