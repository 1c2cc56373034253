"""The product of choices: its order, its doubles, what it refuses."""

from __future__ import annotations

import dataclasses
from itertools import product
from typing import Any

import pytest

from perturbkv.cli.options import RunOptions
from perturbkv.configs.budget import Budget
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.errors import BudgetError, ConfigError, PerturbkvError
from perturbkv.selection.grid import ORDER, grid

V2 = {"stage2_score": "pooled", "epsilon": 1e-4, "granularity": "kv"}


def test_the_order_is_preset_budget_alpha_the_other_choices_policy_selection() -> None:
    found = grid(
        selection=["attention", "two-stage"], policy=["snapkv", "adakv"], kernel=[5, 9], window=[8, 16],
        alpha=[0.0, 0.5], budget=[64, 0.1], preset=["paper", "paper-v2"],
    )  # fmt: skip
    expected = []
    for preset in ({}, V2):
        for budget in (Budget(64), Budget(0.1)):
            for alpha, window, kernel in product((0.0, 0.5), (8, 16), (5, 9)):
                for policy in ("snapkv", "adakv"):
                    for selection in ("attention", "two-stage"):
                        expected.append(
                            EvictionConfig(budget, policy, selection, window, alpha, kernel=kernel, **preset)  # type: ignore[arg-type]
                        )
    assert found == tuple(expected)
    assert len(found) == 2**7


def test_every_choice_of_a_configuration_is_one_of_the_grid() -> None:
    assert sorted(ORDER) == sorted(["preset", *(field.name for field in dataclasses.fields(EvictionConfig))])


def test_the_command_line_nests_preset_budget_alpha_selection() -> None:
    asked = RunOptions(preset=["paper", "paper-v2"], budget=["0.5", "64"], alpha=[0.5, 0.25], window=8, seed=3)
    found = asked.configs(["two-stage", "streaming-llm", "h2o:attention"])
    expected = [
        EvictionConfig(Budget(budget), policy, selection, 8, alpha, seed=3, **{**preset, **own})  # type: ignore[arg-type]
        for preset in ({}, V2)
        for budget in (0.5, 64)
        for alpha in (0.5, 0.25)
        for policy, selection, own in (
            ("snapkv", "two-stage", {}),
            ("streaming-llm", "position", {}),
            ("h2o", "attention", {"pool": "none"}),
        )
    ]
    assert found == tuple(expected)


@pytest.mark.parametrize("budget", [128, "128", Budget(128), [128], ("128",), range(128, 129)])
def test_a_budget_is_a_number_or_text_alone_or_in_any_series(budget: Any) -> None:
    assert grid(budget) == (EvictionConfig(Budget(128)),)


def test_none_is_what_preset_and_policy_choose() -> None:
    found = grid(64, policy=["snapkv", "tova"], window=[None, 4], selection="attention")
    assert [(config.policy, config.window, config.pool) for config in found] == [
        ("snapkv", 32, "max"),
        ("tova", 1, "none"),
        ("snapkv", 4, "max"),
        ("tova", 4, "none"),
    ]


def test_equal_configurations_stand_once_where_the_first_stood() -> None:
    found = grid([64, 128, "64"], policy=["snapkv", "adakv"], selection=["value", "snapkv:value"])
    assert [(config.budget.value, config.policy) for config in found] == [
        (64, "snapkv"),
        (64, "adakv"),
        (128, "snapkv"),
        (128, "adakv"),
    ]


def test_the_width_of_a_pooling_that_is_not_done_makes_no_second_configuration() -> None:
    found = grid(64, pool=["max", "none"], kernel=[5, 7])
    assert [(config.kernel, config.pool) for config in found] == [(5, "max"), (7, "max"), (5, "none")]


def test_random_alone_is_the_selection_and_a_policy_alone_its_first_selection() -> None:
    found = grid(64, selection=["random", "streaming-llm", "adakv", "random:value"])
    assert [(config.policy, config.selection) for config in found] == [
        ("snapkv", "random"),
        ("streaming-llm", "position"),
        ("adakv", "attention"),
        ("random", "value"),
    ]


def test_what_is_protected_is_entries_or_a_share_of_the_budget() -> None:
    (found,) = grid(64, protect_first="4", protect_recent="0.6")
    assert (found.protect_first, found.protect_recent) == (4, 0.6)
    assert found.protected(64) == (4, 38)
    assert found.protected(50) == (4, 32), "the window of 32 always stays"
    assert found.label().endswith(" protect-first=4 protect-recent=0.6")
    assert "protect" not in grid(64, protect_first="0", protect_recent=0)[0].label()


def test_protection_that_leaves_nothing_of_a_share_is_found_with_the_prompt() -> None:
    (found,) = grid(0.1, protect_first=20)
    assert found.kept_entries(600) == 60
    with pytest.raises(BudgetError, match="budget 0.1 of 500 tokens keeps 50 .* the first 20 and the last 32"):
        found.kept_entries(500)
    assert found.kept_entries(30) == 30, "a prompt inside the window stays whole"


@pytest.mark.parametrize(
    ("choices", "kind", "words"),
    [
        ({"widnow": 8}, PerturbkvError, "unknown choice 'widnow'; known: window"),
        ({"alpha": []}, ConfigError, "alpha or a list of them, got an empty list"),
        ({"alpha": [0.25, 2]}, ConfigError, "alpha must lie in"),
        ({"budget": "many"}, BudgetError, "got 'many'"),
        ({"budget": 128.0}, BudgetError, "at most 1, got 128.0"),
        ({"budget": [64, 32]}, BudgetError, "no more than the window of 32"),
        ({"protect_first": "4x"}, BudgetError, "--protect-first is tokens .* got '4x'"),
        ({"protect_first": -1}, BudgetError, "--protect-first is a number of entries .* got -1"),
        ({"protect_recent": 1.0}, BudgetError, "--protect-recent is a number of entries .* got 1.0"),
        ({"protect_first": 32}, BudgetError, "no more than the 64 that always stay: the first 32 and the last 32"),
        ({"protect_first": "0.5", "protect_recent": "0.5"}, BudgetError, "the first 32 and the last 32; raise the bud"),
        ({"safeguard": "none"}, PerturbkvError, "unknown safeguard 'none'; known: mixture, guaranteed"),
        ({"pyramid_line": "straight"}, PerturbkvError, "unknown pyramid-line 'straight'; known: prefix, total"),
        ({"preset": "papr"}, PerturbkvError, "unknown preset"),
        ({"policy": ["snapkv", "streaming-llm"]}, ConfigError, "does not combine with selection 'two-stage'"),
        ({"policy": "adakv", "cache": "rectangular"}, ConfigError, "a rectangular cache cannot hold"),
    ],
)
def test_refused(choices: dict[str, Any], kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        grid(**{"budget": 64, **choices})
