"""Grids of choices, and the limits of their numbers."""

from __future__ import annotations

import dataclasses
import math
from itertools import product
from typing import Any

import numpy as np
import pytest

from perturbkv.cli.options import RunOptions
from perturbkv.configs import option as numbers
from perturbkv.configs.entry_counts import Budget
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.option import Option
from perturbkv.configs.resources import parse_size
from perturbkv.configs.run import Settings
from perturbkv.datasets.dataset_registry import DatasetOptions
from perturbkv.errors import BudgetError, ConfigError, PerturbkvError
from perturbkv.selection.grid import FIELDS, ORDER, configuration, grid
from perturbkv.selection.policies import registry

V2 = {"score": "pooled", "epsilon": 1e-4, "granularity": "kv"}


@pytest.mark.slow
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
                            configuration(
                                budget,
                                policy=policy,
                                selection=selection,
                                window=window,
                                alpha=alpha,
                                kernel=kernel,
                                **preset,
                            )  # fmt: skip
                        )
    assert found == tuple(expected)
    assert len(found) == 2**7


def test_every_choice_of_a_configuration_is_one_of_the_grid() -> None:
    assert sorted(FIELDS) == sorted(["preset", *(field.name for field in dataclasses.fields(EvictionConfig))])
    assert set(FIELDS) <= set(ORDER)


def test_the_command_line_nests_preset_budget_alpha_selection() -> None:
    asked = RunOptions(preset=["paper", "paper-v2"], budget=["0.5", "64"], alpha=[0.5, 0.25], window=8, seed=3)
    found = asked.configs(["two-stage", "streaming-llm", "h2o:attention"])
    expected = [
        configuration(budget, policy=policy, selection=selection, window=8, alpha=alpha, **{**preset, **own})
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
    assert grid(budget) == (configuration(128),)


def test_none_is_what_preset_and_policy_choose() -> None:
    found = grid(64, policy=["snapkv", "tova"], window=[None, 4], selection="attention")
    assert [(config.policy.name, config.window, config.policy["pool"]) for config in found] == [
        ("snapkv", 32, "max"),
        ("tova", 1, "none"),
        ("snapkv", 4, "max"),
        ("tova", 4, "none"),
    ]


def test_equal_configurations_stand_once_where_the_first_stood() -> None:
    found = grid([64, 128, "64"], policy=["snapkv", "adakv"], selection=["value", "snapkv:value"])
    assert [(config.budget.value, config.policy.name) for config in found] == [
        (64, "snapkv"),
        (64, "adakv"),
        (128, "snapkv"),
        (128, "adakv"),
    ]


def test_the_width_of_a_pooling_that_is_not_done_makes_no_second_configuration() -> None:
    found = grid(64, pool=["max", "none"], kernel=[5, 7])
    assert [str(config.policy) for config in found] == ["snapkv(kernel=5)", "snapkv", "snapkv(pool=none)"]
    assert grid(64, policy="snapkv(pool=none)") == grid(64, policy='snapkv(pool="none")') == found[2:]


def test_an_option_goes_to_those_who_have_it_and_makes_no_second_configuration_of_the_others() -> None:
    found = grid(128, policy=("snapkv", "adakv"), floor=(0.1, 0.2), selection=("two-stage", "random"))
    assert [f"{config.policy}:{config.selection}" for config in found] == [
        "snapkv:two-stage", "snapkv:random", "adakv(floor=0.1):two-stage", "adakv(floor=0.1):random",
        "adakv:two-stage", "adakv:random",
    ]  # fmt: skip
    assert len(grid(64, preset=("paper", "released-v2"), selection="random", granularity="kv", alpha=0.25)) == 2


def test_an_option_that_stands_in_a_choice_is_left_out_where_it_makes_no_difference() -> None:
    found = grid(64, policy="snapkv(pool=none)", selection=("attention", "random"))
    assert [f"{config.policy}:{config.selection}" for config in found] == [
        "snapkv(pool=none):attention",
        "snapkv:random",
    ]
    grouped = grid(64, granularity="kv(product=mean-of-products)", selection=("attention", "two-stage"))
    assert [str(config.granularity) for config in grouped] == ["kv", "kv(product=mean-of-products)"]


def test_the_order_of_options_does_not_hang_on_how_they_are_written() -> None:
    first = grid(64, policy="adakv", floor=(0.1, 0.3), safeguard=("mixture", "guaranteed"))
    assert first == grid(64, policy="adakv", safeguard=("mixture", "guaranteed"), floor=(0.1, 0.3))


def test_a_mean_of_means_is_the_same_whatever_the_product() -> None:
    with pytest.raises(ConfigError, match="product of granularity 'kv' has no effect here: it needs the value norms"):
        grid(64, selection="two-stage-uniform", granularity="kv(product=mean-of-products)")
    assert grid(64, selection="two-stage-uniform(score=pooled)", granularity="kv(product=mean-of-products)")


@pytest.mark.parametrize(
    ("choices", "words"),
    [
        ({"floor": 0.1}, "floor has no effect here: it needs policy adakv or policy lava; leave it out"),
        ({"selection": "value", "kernel": 5}, "kernel has no effect here: it needs a selection or policy that looks"),
        ({"pool": "none", "kernel": 5}, "kernel has no effect here: it needs a pool other than none"),
        ({"reduce": "max"}, "reduce has no effect here: it needs granularity kv"),
        ({"selection": "attention", "granularity": "kv(product=mean-of-products)"}, "product of granularity 'kv'"),
        ({"policy": "snapkv(pool=average)", "selection": "random"}, "pool of policy 'snapkv' has no effect here"),
    ],
)  # fmt: skip
def test_an_option_without_effect_is_refused(choices: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        grid(128, **choices)
    assert words in str(refused.value)


def test_random_alone_is_the_selection_and_a_policy_alone_its_first_selection() -> None:
    found = grid(64, selection=["random", "streaming-llm", "adakv", "random:value"])
    assert [(config.policy.name, config.selection.name) for config in found] == [
        ("snapkv", "random"),
        ("streaming-llm", "position"),
        ("adakv", "attention"),
        ("random", "value"),
    ]


def test_what_is_protected_is_entries_or_a_share_of_the_budget() -> None:
    (found,) = grid(64, protect_first="4", protect_recent="0.6")
    assert (found.protect_first, found.protect_recent) == (4, 0.6)
    assert found.protected_counts(64) == (4, 38)
    assert found.protected_counts(50) == (4, 32), "the window of 32 always stays"
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
        ({"widnow": 8}, PerturbkvError, "unknown choice 'widnow'; nearest of .* known: window"),
        ({"alpha": []}, ConfigError, "alpha or a list of them, got an empty list"),
        ({"alpha": [0.25, 2]}, ConfigError, "alpha of selection 'two-stage' must lie in"),
        ({"budget": "many"}, BudgetError, "got 'many'"),
        ({"budget": 128.0}, BudgetError, "at most 1, got 128.0"),
        ({"budget": [64, 32]}, BudgetError, "no more than the window of 32"),
        ({"protect_first": "4x"}, BudgetError, "protect_first is tokens .* got '4x'"),
        ({"protect_first": -1}, BudgetError, "protect_first is a number of entries .* got -1"),
        ({"protect_recent": 1.0}, BudgetError, "protect_recent is a number of entries .* got 1.0"),
        ({"protect_first": 32}, BudgetError, "no more than the 64 that always stay: the first 32 and the last 32"),
        ({"protect_first": "0.5", "protect_recent": "0.5"}, BudgetError, "the first 32 and the last 32; raise the bud"),
        (
            {"safeguard": "none", "policy": "adakv"},
            PerturbkvError,
            "unknown safeguard 'none'; known: mixture",
        ),
        (
            {"line": "straight", "policy": "pyramidkv"},
            PerturbkvError,
            "unknown line 'straight'; known: prefix",
        ),
        ({"preset": "papr"}, PerturbkvError, "unknown preset"),
        ({"policy": ["snapkv", "streaming-llm"]}, ConfigError, "does not combine with selection 'two-stage'"),
        (
            {"policy": "pyramidkv(by=tova)", "selection": "random"},
            ConfigError,
            "by of policy 'pyramidkv' has no effect",
        ),
        ({"policy": "adakv", "cache": "rectangular"}, ConfigError, "a rectangular cache cannot hold"),
    ],
)
def test_refused(choices: dict[str, Any], kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        grid(**{"budget": 64, **choices})


def test_a_score_whose_first_entries_stay_has_an_effect_on_selections_that_look_at_nothing() -> None:
    (found,) = grid(64, policy="pyramidkv(by=expected-attention)", selection="random")
    assert found.label().startswith("pyramidkv(by=expected-attention())")


NO_NUMBERS = [math.nan, math.inf, -math.inf, 1e300, 10**20, -(10**20)]


@pytest.mark.parametrize("value", NO_NUMBERS)
def test_what_cannot_be_counted_is_refused_wherever_it_is_given(value: Any) -> None:
    makers: list[Any] = [
        lambda: numbers.check_number("n", value),
        lambda: Budget(value),
        lambda: Budget.parse(str(value)),
        lambda: EvictionConfig(128, window=value),
        lambda: EvictionConfig(128, protect_first=value),
        lambda: EvictionConfig(128, protect_recent=str(value)),
        lambda: Option(1, "").convert(value, "n"),
        lambda: Option(1.0, "").convert(value, "n"),
        lambda: DatasetOptions(value),
        lambda: DatasetOptions(1, seed=value),
        lambda: DatasetOptions(1, lengths=(value,)),
        lambda: DatasetOptions(1, depths=(value,)),
        *(lambda field=field: Settings(**{field: value}) for field in ("steps", "generate", "compress_every")),
    ]  # fmt: skip
    for make in makers:
        with pytest.raises(ConfigError):
            make()


@pytest.mark.parametrize("value", [2.5, 8.0, True, "8", None])
def test_what_is_counted_is_a_whole_number(value: Any) -> None:
    makers: list[Any] = [
        lambda: DatasetOptions(value),
        lambda: DatasetOptions(1, seed=value),
        lambda: EvictionConfig(128, window=value),
        lambda: grid(128, window=value or False),
    ]
    for make in makers:
        with pytest.raises(ConfigError, match=r"(samples|seed|window) \(--\w+\) must be a whole number, got "):
            make()


def test_a_whole_number_of_numpy_is_one() -> None:
    assert EvictionConfig(128, window=np.int64(8)) == EvictionConfig(128, window=8)
    assert DatasetOptions(np.int32(3)).samples == 3


@pytest.mark.parametrize("name", registry.names())
def test_no_policy_takes_a_number_that_is_none(name: str) -> None:
    options = registry.policy_class(name).options()
    for option, known in options.items():
        if isinstance(known.default, int | float) and not isinstance(known.default, bool):
            for value in ("nan", "inf", "1e999", 10**20):
                with pytest.raises(ConfigError):
                    grid(128, policy=f"{name}({option}={value})", selection=registry.policy_class(name).selections[0])


def test_the_odd_number_that_is_suggested_is_taken() -> None:
    for option, even, odd in ((Option(7, "", low=1, odd=True), 6, 7), (Option(7, "", 1, high=9, odd=True), 8, 9)):
        with pytest.raises(ConfigError, match=f"try {odd}$"):
            option.convert(even, "kernel")
        assert option.convert(odd, "kernel") == odd


def test_tokens_are_suggested_only_where_they_are_a_budget() -> None:
    with pytest.raises(BudgetError, match="for tokens write 128"):
        Budget(128.0)
    with pytest.raises(BudgetError) as raised:
        Budget(1e300)
    assert "write" not in str(raised.value)


@pytest.mark.parametrize("text", ["9" * 400, "9" * 30 + "GiB", "1" + "0" * 12 + "TiB", "nan", "inf", "1e3", "-1MiB"])
def test_a_size_beyond_all_memory_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--max-memory"):
        parse_size("--max-memory", text)


def test_a_sweep_of_more_than_ten_thousand_configurations_is_refused_with_their_count() -> None:
    with pytest.raises(ConfigError, match="at most 10,000 configurations in a run, got 20,301"):
        grid(range(40, 241), alpha=[place / 100 for place in range(101)])


def test_as_many_samples_as_nobody_measures_are_refused() -> None:
    DatasetOptions(numbers.MOST_SAMPLES, lengths=(numbers.LONGEST_PROMPT,))
    for options in ({"samples": numbers.MOST_SAMPLES + 1}, {"samples": 1, "lengths": (numbers.LONGEST_PROMPT + 1,)}):
        with pytest.raises(ConfigError, match="at most"):
            DatasetOptions(**options)  # type: ignore[arg-type]
