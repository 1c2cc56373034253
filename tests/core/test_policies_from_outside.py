"""Policies of others: loaded, checked, and refused in a line."""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import perturbkv as pk
from perturbkv.analyses import sides
from perturbkv.analyses.heads.heads import compare_heads
from perturbkv.auditing import loss
from perturbkv.configs.choice import Choice, parse, split_policy_and_selection
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.run import RunConfig
from perturbkv.errors import ConfigError, PluginError, TraceError, UnknownNameError
from perturbkv.selection import compatibility
from perturbkv.selection.grid import configuration
from perturbkv.selection.policies import checked, registry
from perturbkv.selection.policies import kvpress as presses
from perturbkv.selection.policies.base import Policy
from tests.support.models import tiny_adapter, token_ids
from tests.support.traces import sample_trace, trace

INNER = Choice("SnapKVPress", {"window_size": 32, "kernel_size": 5}, frozenset({"kernel_size"}))
PRESS = Choice("kvpress:AdaKVPress", {"press": INNER, "use_vnorm": True}, frozenset({"use_vnorm"}))
STORED = EvictionConfig(24, PRESS, "given", 0, "kv")


@pytest.mark.parametrize(
    ("side", "parts"),
    [
        ("two-stage", ["two-stage"]),
        ("adakv:two-stage(alpha=0.5)", ["adakv", "two-stage(alpha=0.5)"]),
        ("kvpress:SnapKVPress", ["kvpress:SnapKVPress"]),
        ("kvpress:A(B(x=1)):given", ["kvpress:A(B(x=1))", "given"]),
        ("given:mine:given", ["given:mine", "given"]),
        ("folder/my.py:Mine(tau=2)", ["folder/my.py:Mine(tau=2)"]),
        ("my.py:Mine:two-stage", ["my.py:Mine", "two-stage"]),
    ],
)
def test_the_colon_of_an_outside_name_is_part_of_it(side: str, parts: list[str]) -> None:
    assert split_policy_and_selection(side) == parts


def test_a_press_is_stored_with_all_of_its_parameters_and_read_without_kvpress() -> None:
    run = RunConfig("m", "d", (STORED, configuration(24, window=8, granularity="kv", selection="attention")))
    document = json.loads(run.to_json())["configs"][0]
    assert document["policy"] == "kvpress:AdaKVPress(press=SnapKVPress(window_size=32))"
    inner = {"choice": "SnapKVPress(window_size=32)", "options": {"kernel_size": 5, "window_size": 32}}
    assert document["policy_options"]["press"] == inner
    assert document["window"] == 0 and document["selection"] == "given"
    again = RunConfig.from_json(run.to_json())
    assert again == run and again.to_json() == run.to_json()
    assert again.labels()[0] == "kvpress:AdaKVPress(press=SnapKVPress(window_size=32)):given b=24 kv"
    assert again.configs[0].is_external and again.configs[0].alpha == 1


def test_choices_inside_a_choice_keep_the_order_in_which_they_are_shown() -> None:
    inner = Choice("SnapKVPress", {"window_size": 32, "kernel_size": 3}, frozenset())
    run = RunConfig(
        "m", "d", (EvictionConfig(24, Choice("kvpress:A", {"press": inner}, frozenset()), "given", 0, "kv"),)
    )
    assert run.labels() == ["kvpress:A(press=SnapKVPress(window_size=32, kernel_size=3)):given b=24 kv"]
    assert RunConfig.from_json(run.to_json()).labels() == run.labels()


@pytest.mark.parametrize(
    ("side", "found"),
    [
        ("kvpress:AdaKVPress", True),
        ("kvpress:AdaKVPress:given", True),
        ("given", True),
        ("kvpress:AdaKVPress(SnapKVPress(window_size=32))", True),
        ("kvpress:AdaKVPress(press=SnapKVPress())", True),
        ("kvpress:AdaKVPress(SnapKVPress(window_size=64))", False),
        ("kvpress:AdaKVPress(KnormPress())", False),
        ("kvpress:SnapKVPress", False),
    ],
)
def test_a_side_of_a_comparison_names_a_press(side: str, found: bool) -> None:
    ours = configuration(24, window=8, granularity="kv", selection="attention")
    run = RunConfig("m", "d", (ours, configuration(24, window=8, granularity="kv", alpha=0.5), STORED))
    if not found:
        with pytest.raises(TraceError, match="expected configurations to compare"):
            sides.pairs(run, "snapkv:attention", side)
    else:
        assert sides.pairs(run, "snapkv:attention", side) == [(ours, STORED)]
        assert sides.pairs(run, side, "snapkv:attention") == [(STORED, ours)]


def test_a_trace_of_a_press_is_compared_and_shown() -> None:
    ours = configuration(24, window=8, granularity="kv", selection="attention")
    shown = trace(*(sample_trace(name, optional=True) for name in ("s0", "s1")), configs=(ours, STORED))
    compared = compare_heads(shown, "attention", "kvpress:AdaKVPress")
    assert STORED.label() in json.dumps(compared.to_dict(), default=str)
    assert all(part for part in (compared.conclusion(), compared.body(), repr(shown)))
    frame = shown.to_frame()
    assert set(frame["config"]) == set(shown.run.labels())
    assert set(frame["policy_use_vnorm"].dropna()) == {True}


def say_versions(transformers: str, kvpress: str | None) -> Callable[[str], str]:
    def version(name: str) -> str:
        if name == "kvpress" and kvpress is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return {"transformers": transformers, "kvpress": kvpress or ""}[name]

    return version


@pytest.mark.parametrize(
    ("transformers", "kvpress", "said"),
    [
        ("5.2.0", None, "kvpress is not installed, and transformers here is 5.2.0"),
        ("5.3.0", "0.5.5", "here are kvpress 0.5.5 and transformers 5.3.0"),
        ("5.23.0", "0.5.5", "here are kvpress 0.5.5 and transformers 5.23.0"),
        ("6.0.1", "0.5.5", "here are kvpress 0.5.5 and transformers 6.0.1"),
    ],
)
def test_where_kvpress_cannot_run_one_line_says_what_is_missing(
    transformers: str, kvpress: str | None, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.metadata, "version", say_versions(transformers, kvpress))
    presses.library.cache_clear()
    with pytest.raises(ConfigError, match=said) as caught:
        configuration(128, policy="kvpress:SnapKVPress")
    assert "pip install '.[kvpress]' in the checkout" in str(caught.value) and "\n" not in str(caught.value)


def test_a_trace_that_holds_a_press_is_not_measured_without_kvpress(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", say_versions("5.2.0", None))
    presses.library.cache_clear()
    assert registry.build(STORED.policy).budgets == "by head", "a trace is read"
    with pytest.raises(ConfigError, match="kvpress is not installed"):
        registry.normalise(EvictionConfig(24, parse("kvpress:SnapKVPress"), "given", 0, "kv"))


def test_given_kept_sets_have_a_name_and_nothing_else() -> None:
    config = loss.external_configuration("mine", 128)
    assert registry.normalise(config).label() == "given:mine:given b=128 kv"
    with pytest.raises(ConfigError, match="it takes no options"):
        registry.normalise(EvictionConfig(128, "given:mine(x=1)", "given", 0, "kv"))
    with pytest.raises(ConfigError, match="expected selection given, got two-stage"):
        registry.normalise(EvictionConfig(128, "given:mine"))
    with pytest.raises(ConfigError, match="the window must hold at least 1 query, got 0"):
        EvictionConfig(128, window=0)
    with pytest.raises(ConfigError, match="policy 'snapkv' does not combine with selection 'given'"):
        compatibility.check(configuration(128, selection="given"))
    with pytest.raises(UnknownNameError, match="unknown policy 'other:mine'"):
        registry.policy_class("other:mine")


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
