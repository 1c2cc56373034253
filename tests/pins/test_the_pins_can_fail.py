from __future__ import annotations

from tests.pins.comparing import GONE, NEW, compared, differences, line, renamed

BEFORE = {"needle/heads/code": 0, "needle/heads/ratio": 0.1, "needle/heads/name": "heads", "same": None}


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


def test_no_more_than_twenty_are_shown() -> None:
    shown = line("many", {str(place): place for place in range(50)}, {}).splitlines()
    assert len(shown) == 22
    assert shown[-1] == "  and 30 more"


def test_what_is_renamed_on_purpose_is_no_difference() -> None:
    before = {"link/analysis": "link", "link/figures/0": "out/link.svg", "link/a/keys": "b stands", "link/a/stands": 1}
    after = {
        "link/analysis": "correlation",
        "link/figures/0": "out/correlation.svg",
        "link/a/keys": "b significant",
        "link/a/significant": 1,
    }
    assert differences(renamed(before), after) == []
    assert len(differences(before, after)) == 5


def test_what_went_and_came_on_purpose_is_no_difference_of_its_recorder_alone() -> None:
    gone, new = GONE["names"].copy().pop(), NEW["names"].copy().pop()
    before, after = {"A/fields": ["b: int", f"{gone}: str"], f"A/default of {gone}": 1}, {"A/fields": ["b: int"]}
    assert compared("names", before, {**after, f"A.{new}/parameters": []}) == []
    assert compared("names", before, {"A/fields": []})
    assert compared("files", before, after)


def test_words_may_change_beside_numbers_that_may_not() -> None:
    title = {"heads/figure/heads.svg/axes 0/title": ["b=64"], "heads/figure/heads.svg/axes 0/Line2D 0": "abc"}
    other = {**title, "heads/figure/heads.svg/axes 0/title": ["budget 64"]}
    assert differences(title, other) == []
    assert differences(title, {**other, "heads/figure/heads.svg/axes 0/Line2D 0": "abd"})
