"""A prefill along lines, from the command line: its own choice against the criterion's, its cost, what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from perturbkv.storage.trace.trace_file import read_trace
from tests.support.screens import Ran

Run = Callable[..., Ran]
LINED = (
    "vertical-slash: nothing is evicted; the cache share is that of the pairs of query and entry that its own prefill"
)
SLASH = "vertical-slash(last=20)"
SIDES = f"{SLASH}:attention,{SLASH}:two-stage(alpha=0)"


def words(text: str) -> str:
    """Without the places where lines end."""
    return " ".join(text.split())


@pytest.mark.slow
def test_its_own_choice_is_compared_with_the_criterion_s(perturbkv: Run, tiny: list[object]) -> None:
    ran = perturbkv("heads", *tiny, "--compare", SIDES, "-o", "out", "--explain")
    assert ran.code == 0, ran.err
    assert LINED in words(ran.out)
    assert "masks dense: attention" in words(ran.out)
    assert len(list(Path("out").glob("*.png"))) == 1
    found = read_trace(Path("out/trace.h5"))
    assert [config.label().split(" ")[0] for config in found.run.configs] == [
        f"{SLASH}:attention", f"{SLASH}:two-stage(alpha=0.0)",
    ]  # fmt: skip
    assert (found.arrays["held_share"] < 1).all() and (found.arrays["held_share"] > 0).all()
    assert (found.arrays["prefill_seconds"] > 0).all() and (found.arrays["prefill_seconds_full"] > 0).all()
    assert "prefill_seconds" not in perturbkv("heads", *tiny, "-o", "other").out


@pytest.mark.slow
def test_cost_and_share_stand_in_json(perturbkv: Run, tiny: list[object]) -> None:
    sides = f"snapkv:attention,{SLASH}:attention,vertical-slash:random"
    ran = perturbkv("heads", *tiny, "--compare", sides, "-o", "out", "--json")
    assert ran.code == 0, ran.err
    trace, found = read_trace(Path("out/trace.h5")), ran.json()["comparisons"]
    for one in found:
        assert one["baseline"]["policy"] == "snapkv" and one["prefill_seconds_baseline"] is None
        place = trace.config_index(next(label for label in trace.run.labels() if one["treatment"]["selection"] in label
                                        and "slash" in label))  # fmt: skip
        assert one["prefill_seconds_treatment"] == pytest.approx(trace.arrays["prefill_seconds"][:, place].mean())
        assert one["prefill_seconds_full"] == pytest.approx(trace.arrays["prefill_seconds_full"].mean())
        assert one["held_over_full_treatment"] == pytest.approx(trace.arrays["held_share"][:, place].mean())
    assert np.isnan(trace.arrays["prefill_seconds"][:, 0]).all()


@pytest.mark.slow
@pytest.mark.parametrize("command", ["layers"])
def test_other_analyses_say_what_is_looked_at(command: str, perturbkv: Run, tiny: list[object]) -> None:
    compared = [] if command == "assumption" else ["--compare", "attention,two-stage"]
    ran = perturbkv(*command.split(), *tiny, "--policy", SLASH, *compared, "-o", "out")
    assert ran.code == 0, ran.err
    assert LINED in words(ran.out)


@pytest.mark.slow
def test_a_trace_goes_on_with_lines_beside_what_it_has(perturbkv: Run, tiny: list[object]) -> None:
    asked = [*tiny, "--selection", "attention", "-o", "out"]
    for policies in (["snapkv"], ["snapkv", SLASH]):
        ran = perturbkv("trace", *asked, *(word for name in policies for word in ("--policy", name)))
        assert ran.code == 0, ran.err
    found = read_trace(Path("out/trace.h5")).arrays
    assert np.isnan(found["prefill_seconds"][:, 0]).all() and (found["prefill_seconds"][:, 1] > 0).all()
    assert (found["prefill_seconds_full"] > 0).all() and (found["held_share"][:, 1] < 1).all()


def test_its_options_are_listed(perturbkv: Run) -> None:
    ran = perturbkv("list", "policies", "vertical-slash")
    assert ran.code == 0 and "2407.02490" in ran.out
    assert all(option in ran.out for option in ("vertical", "last", "first", "seed", "64", "0.5"))
