"""Numbers that a user gives are finite and countable, and what is refused is not suggested."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from perturbkv.configs import option as numbers
from perturbkv.configs.entry_counts import Budget
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.option import Option
from perturbkv.configs.resources import parse_size
from perturbkv.configs.run import RunConfig
from perturbkv.datasets.dataset_registry import DatasetOptions
from perturbkv.errors import BudgetError, ConfigError
from perturbkv.selection.grid import grid
from perturbkv.selection.policies import registry

NO_NUMBERS = [math.nan, math.inf, -math.inf, 1e300, 10**20, -(10**20)]


@pytest.mark.parametrize("value", NO_NUMBERS)
def test_what_cannot_be_counted_is_refused_wherever_it_is_given(value: Any) -> None:
    one = (EvictionConfig(128),)
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
        *(lambda field=field: RunConfig("m", "d", one, **{field: value})
          for field in ("samples", "seed", "steps", "max_tokens", "generate")),
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
    options = registry.info(name).options()
    for option, known in options.items():
        if isinstance(known.default, int | float) and not isinstance(known.default, bool):
            for value in ("nan", "inf", "1e999", 10**20):
                with pytest.raises(ConfigError):
                    grid(128, policy=f"{name}({option}={value})", selection=registry.info(name).selections[0])


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
