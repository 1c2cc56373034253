from __future__ import annotations

from typing import Any

import pytest

from tests.pins import comparing, running
from tests.pins.comparing import compared, differences, line

BEFORE = {"needle/heads/code": 0, "needle/heads/ratio": 0.1, "needle/heads/name": "heads", "same": None}
GONE = {"question alpha": "studies/alpha.py", "budget --by": "gone", "pk.alpha": "gone", "twin": "gone"}


@pytest.fixture(autouse=True)
def changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparing, "GOES", GONE)
    monkeypatch.setattr(comparing, "RENAMED", {"question patching": "patching"})
    monkeypatch.setattr(comparing, "NEW", ("pk.shapes",))
    monkeypatch.setattr(comparing, "WORDS", (r"/axes \d+/title$",))


def test_what_is_equal_is_counted() -> None:
    assert line("needle", BEFORE, dict(BEFORE)) == "needle: 4 values equal"


def test_every_way_to_differ_is_named() -> None:
    after = {**BEFORE, "needle/heads/code": False, "needle/heads/ratio": 0.1 + 2e-17 + 1e-16, "new": "x" * 100}
    del after["same"]
    found = differences(BEFORE, after)
    assert [one.partition(":")[0] for one in found] == ["needle/heads/code", "needle/heads/ratio", "new", "same"]
    assert found[3] == "same: before null … after nothing"
    assert len(found[2]) < 100
    assert line("needle", BEFORE, after).startswith("needle: 4 of 5 differ:\n  needle/heads/code: before 0 … after f")


@pytest.mark.parametrize(
    ("before", "after"),
    [(0, -0.0), (1, 1.0), (1, True), (0.0, -0.0), (None, float("nan")), (["a", "b"], ["b", "a"]), ("1", 1), ([], None)],
)
def test_values_differ_bit_for_bit(before: Any, after: Any) -> None:
    assert compared({"a": before}, {"a": after})


def test_no_more_than_twenty_are_shown() -> None:
    shown = line("many", {str(place): place for place in range(50)}, {}).splitlines()
    assert len(shown) == 22
    assert shown[-1] == "  and 30 more"


@pytest.mark.parametrize(
    "pin",
    ["question alpha/code", "question alpha of a trace/files/alpha.json", "help/question alpha",
     "refused/budget --by x", "pk.alpha(compare)/default", "heads/pairs/0/twin"],
)  # fmt: skip
def test_what_goes_may_be_missing_and_may_not_differ(pin: str) -> None:
    assert compared({pin: 1}, {}) == []
    assert line("alone", {**BEFORE, pin: 1}, dict(BEFORE)) == "alone: 4 values equal, 1 went on purpose"
    assert compared({pin: 1}, {pin: 2})
    assert compared({}, {pin: 1})


@pytest.mark.parametrize("pin", ["question alphabet/code", "budget --bytes/code", "pk.alpha_table", "budget/code"])
def test_what_is_only_called_alike_may_not_be_missing(pin: str) -> None:
    assert compared({pin: 1}, {})


def test_what_goes_may_be_missing_from_lists_alone() -> None:
    before = {"names": ["pk.alpha", "pk.audit", "pk.merge"], "help/budget": ["budget --by", "budget --kl"]}
    assert compared(before, {"names": ["pk.audit", "pk.merge"], "help/budget": ["budget --kl"]}) == []
    assert compared(before, before) == []
    assert len(compared(before, {"names": ["pk.audit"], "help/budget": ["budget --by"]})) == 2
    assert compared(before, {**before, "names": [*before["names"], "pk.more"]})


def test_a_text_that_names_what_goes_may_change_and_no_other() -> None:
    before = {"a/message": "perturbkv question alpha writes them", "b/message": "no alpha", "c/message": "no twin"}
    after = {name: "studies/alpha.py writes them" for name in before}
    assert [one.partition(":")[0] for one in compared(before, after)] == ["b/message", "c/message"]


def test_what_comes_may_be_new_and_may_not_be_missing() -> None:
    before = {"names": ["pk.audit"], "pk.audit/parameters": []}
    after = {**before, "names": ["pk.audit", "pk.shapes"], "pk.shapes/parameters": []}
    assert compared(before, after) == []
    assert len(compared(after, before)) == 2


def test_what_is_renamed_is_no_difference() -> None:
    before = {"a/analysis": "question patching", "help/question patching": ["question patching --by"], "b": "alpha"}
    after = {"a/analysis": "patching", "help/patching": ["patching --by"], "b": "alpha"}
    assert compared(before, after) == []
    assert compared(before, before) == []
    assert len(compared(before, {**after, "a/analysis": "repatching", "help/patching": ["patching -by"]})) == 2


def test_words_may_change_beside_numbers_that_may_not() -> None:
    title = {"heads/figure/heads.svg/axes 0/title": ["b=64"], "heads/figure/heads.svg/axes 0/Line2D 0": "abc"}
    other = {**title, "heads/figure/heads.svg/axes 0/title": ["budget 64"]}
    assert compared(title, other) == []
    assert compared(title, {**other, "heads/figure/heads.svg/axes 0/Line2D 0": "abd"})


def test_a_command_is_asked_where_it_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    assert running.known("heads --compare")
    assert not running.known("heads --nothing")
    assert not running.known("nothing")
    monkeypatch.setattr(running, "RENAMED", {"list": "lists", "heads": "list policies"})
    assert running.run("lists", "policies", "--json").document() == running.run("list", "policies", "--json").document()
