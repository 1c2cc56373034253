"""Pages that are read, from the command line: compared with each other and with evictions, said as what they are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from perturbkv.storage.trace.trace_file import read_trace
from tests.support.screens import Ran

Run = Callable[..., Ran]
READ = "quest: nothing is evicted; the cache share is what each head reads at a step"
QUEST = "quest(page=4)"


def words(text: str) -> str:
    """Without the places where lines end."""
    return " ".join(text.split())


def test_quest_s_own_choice_is_compared_with_the_criterion_s(perturbkv: Run, tiny: list[object]) -> None:
    ran = perturbkv("heads", *tiny, "--compare", f"{QUEST}:attention,{QUEST}:two-stage(alpha=0)", "-o", "out")
    assert ran.code == 0, ran.err
    assert READ in words(ran.out)
    assert len(list(Path("out").glob("*.png"))) == 1
    found = read_trace(Path("out/trace.h5"))
    assert [config.label().split(" ")[0] for config in found.run.configs] == [
        "quest(page=4):attention", "quest(page=4):two-stage(alpha=0.0)",
    ]  # fmt: skip
    read = [config.kept_entries(182) for config in found.run.configs]
    assert read == [22, 22]  # a tail of 10, the window of 8 in it, and three pages
    assert found.arrays["held_share"] == pytest.approx(2 * 22 / 182)


@pytest.mark.slow
@pytest.mark.parametrize("command", ["bound-tightness", "assumption"])
def test_other_analyses_say_what_is_read(command: str, perturbkv: Run, tiny: list[object]) -> None:
    compared = [] if command == "assumption" else ["--compare", "attention,two-stage"]
    ran = perturbkv(*command.split(), *tiny, "--policy", QUEST, *compared, "-o", "out")
    assert ran.code == 0, ran.err
    assert READ in words(ran.out)


@pytest.mark.slow
def test_pages_and_evictions_are_sides_of_one_comparison(perturbkv: Run, tiny: list[object]) -> None:
    sides = f"snapkv:attention,{QUEST}:attention,{QUEST}:random"
    ran = perturbkv("heads", *tiny, "--compare", sides, "-o", "o", "--json")
    assert ran.code == 0, ran.err
    found = ran.json()["comparisons"]
    assert [one["treatment"]["policy"] for one in found] == ["quest(page=4)"] * 2
    assert {one["baseline"]["policy"] for one in found} == {"snapkv"}
    without = perturbkv("heads", *tiny, "--compare", "snapkv:attention,snapkv:two-stage", "-o", "p")
    assert "quest" not in without.out


@pytest.mark.slow
def test_a_multi_step_trace_of_pages_is_followed(perturbkv: Run, tiny: list[object]) -> None:
    ran = perturbkv("horizon", *tiny, "--steps", 4, "--compare", f"{QUEST}:attention,{QUEST}:random", "-o", "out")
    assert ran.code == 0, ran.err
    mass = read_trace(Path("out/trace.h5")).arrays["retained_mass"][:, 0]
    assert (mass.max(axis=1) - mass.min(axis=1)).max() > 0, "every step reads anew"


def test_answers_are_read_page_by_page(perturbkv: Run, tiny: list[object]) -> None:
    ran = perturbkv("generate", *tiny, "--policy", QUEST, "--selection", "attention", "--selection", "hindsight",
                    "--max-new-tokens", 4, "-o", "out")  # fmt: skip
    assert ran.code == 0, ran.err
    assert READ in words(ran.out)


def test_options_of_quest_are_listed(perturbkv: Run) -> None:
    ran = perturbkv("list", "policies", "quest")
    assert ran.code == 0 and "page" in ran.out and "16" in ran.out and "2406.10774" in ran.out
