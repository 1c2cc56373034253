"""Policies that evict nothing, from the command line: what their cache share is of is said, beside evictions too."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from perturbkv.storage.trace.trace_file import read_trace
from tests.support.screens import Ran

Run = Callable[..., Ran]
QUEST, SLASH = "quest(page=4)", "vertical-slash(last=20)"
SAID = {
    QUEST: "quest: nothing is evicted; the cache share is what each head reads at a step",
    SLASH: "vertical-slash: nothing is evicted; the cache share is that of the pairs of query and entry that its own "
    "prefill",
}


def words(text: str) -> str:
    """Without the places where lines end."""
    return " ".join(text.split())


@pytest.mark.parametrize("policy", [QUEST, pytest.param(SLASH, marks=pytest.mark.slow)])
def test_its_own_choice_is_compared_with_the_criterion_s(perturbkv: Run, tiny: list[object], policy: str) -> None:
    sides = f"{policy}:attention,{policy}:two-stage(alpha=0)"
    ran = perturbkv("heads", *tiny, "--compare", sides, "-o", "out", "--explain")
    assert ran.code == 0, ran.err
    assert SAID[policy] in words(ran.out)
    assert ("masks dense: attention" in words(ran.out)) == (policy == SLASH)
    assert len(list(Path("out").glob("*.png"))) == 1
    found = read_trace(Path("out/trace.h5"))
    assert [config.label().split(" ")[0] for config in found.run.configs] == [
        f"{policy}:attention", f"{policy}:two-stage(alpha=0.0)",
    ]  # fmt: skip
    if policy == QUEST:  # a tail of 10, the window of 8 in it, and three pages
        assert [config.kept_entries(182) for config in found.run.configs] == [22, 22]
        assert found.arrays["held_share"] == pytest.approx(2 * 22 / 182)
    else:
        assert (found.arrays["held_share"] < 1).all() and (found.arrays["held_share"] > 0).all()
        assert (found.arrays["prefill_seconds"] > 0).all() and (found.arrays["prefill_seconds_full"] > 0).all()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "command"), [(QUEST, "bound-tightness"), (QUEST, "assumption"), (SLASH, "layers"), (QUEST, "generate")]
)
def test_every_command_says_it(perturbkv: Run, tiny: list[object], policy: str, command: str) -> None:
    more = {"assumption": [], "generate": ["--selection", "attention", "--max-new-tokens", 4]}
    compared = more.get(command, ["--compare", "attention,two-stage"])
    ran = perturbkv(command, *tiny, "--policy", policy, *compared, "-o", "out")
    assert ran.code == 0, ran.err
    assert SAID[policy] in words(ran.out)


@pytest.mark.slow
def test_evictions_and_others_are_sides_of_one_comparison(perturbkv: Run, tiny: list[object]) -> None:
    sides = f"snapkv:attention,{QUEST}:attention,{SLASH}:attention,vertical-slash:random"
    ran = perturbkv("heads", *tiny, "--compare", sides, "-o", "out", "--json")
    assert ran.code == 0, ran.err
    trace, found = read_trace(Path("out/trace.h5")), ran.json()["comparisons"]
    assert [one["treatment"]["policy"].partition("(")[0] for one in found] == ["quest", *["vertical-slash"] * 2]
    assert {one["baseline"]["policy"] for one in found} == {"snapkv"}
    assert np.isnan(trace.arrays["prefill_seconds"][:, :2]).all()
    for place, one in enumerate(found[1:], start=2):
        assert one["prefill_seconds_baseline"] is None
        assert one["prefill_seconds_treatment"] == pytest.approx(trace.arrays["prefill_seconds"][:, place].mean())
        assert one["prefill_seconds_full"] == pytest.approx(trace.arrays["prefill_seconds_full"].mean())
        assert one["held_over_full_treatment"] == pytest.approx(trace.arrays["held_share"][:, place].mean())


@pytest.mark.slow
def test_a_trace_goes_on_with_lines_beside_what_it_has(perturbkv: Run, tiny: list[object]) -> None:
    asked = [*tiny, "--selection", "attention", "-o", "out"]
    for policies in (["snapkv"], ["snapkv", SLASH]):
        ran = perturbkv("trace", *asked, *(word for name in policies for word in ("--policy", name)))
        assert ran.code == 0, ran.err
    found = read_trace(Path("out/trace.h5")).arrays
    assert np.isnan(found["prefill_seconds"][:, 0]).all() and (found["prefill_seconds"][:, 1] > 0).all()
    assert (found["prefill_seconds_full"] > 0).all() and (found["held_share"][:, 1] < 1).all()
