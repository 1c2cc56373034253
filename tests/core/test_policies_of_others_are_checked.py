"""A policy that is not ours may fail or give anything: each is one line that says what was expected."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

import perturbkv as pk
from perturbkv.errors import PluginError
from perturbkv.selection.policies import checked, registry
from perturbkv.selection.policies.base import Policy
from tests.support.models import tiny_adapter, token_ids


@dataclass(frozen=True)
class Odd(Policy):
    """A policy whose parts are replaced."""

    name = "odd"
    summary = "odd"


def exits(*_: Any) -> Any:
    raise SystemExit(0)


def measure(monkeypatch: pytest.MonkeyPatch, part: str, value: Any) -> None:
    """Measure a prompt with the policy after one of its parts was replaced by a method that gives `value`."""
    found = value if callable(value) or isinstance(value, property) else lambda self, *_: value
    monkeypatch.setattr(Odd, part, found)
    monkeypatch.setitem(registry._POLICIES.registered, "odd", Odd)
    config = pk.EvictionConfig(16, "odd", "attention", window=4)
    pk.measure(tiny_adapter(), [pk.Prompt("p", token_ids(40), 0)], [config], progress=False)


@pytest.mark.parametrize("part", ["recent_entries", "first_entries", "least_stage1"])
@pytest.mark.parametrize("value", [None, 2.5, -1, True, float("nan"), "5", exits])
def test_numbers_of_entries_are_whole(monkeypatch: pytest.MonkeyPatch, part: str, value: Any) -> None:
    expected = (
        f"policy 'odd': {part} raised SystemExit" if value is exits else f"expected {part} to give a whole number"
    )
    with pytest.raises(PluginError) as raised:
        measure(monkeypatch, part, value)
        checked.count(Odd(), part, pk.EvictionConfig(16, "odd"), 16, *([4] if part == "least_stage1" else []))
    assert expected in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "value",
    [None, 5, torch.tensor(5), torch.tensor([5]), torch.full((4,), 10**6), torch.full((4,), -1), torch.full((4,), 5.0),
     [5] * 4, exits],
)  # fmt: skip
def test_budgets_are_numbers_of_entries_that_exist(monkeypatch: pytest.MonkeyPatch, value: Any) -> None:
    with pytest.raises(PluginError, match=r"policy 'odd': (expected allocate to give a tensor of|allocate raised)"):
        measure(monkeypatch, "allocate", value)


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("score", property(lambda self: None)),
        ("score", property(exits)),
        ("mixes", lambda self: False),
        ("mixes", property(lambda self: 1)),
    ],
)
def test_properties_have_their_types(monkeypatch: pytest.MonkeyPatch, part: str, value: Any) -> None:
    with pytest.raises(PluginError, match=f"policy 'odd': (expected {part} to give|{part} raised)"):
        measure(monkeypatch, part, value)


def test_a_policy_that_gives_what_is_asked_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    measure(monkeypatch, "recent_entries", 6)
