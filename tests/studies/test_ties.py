"""studies/ties.py by hand: two rules of heads, one trace exact and one rounded, two prompts of four heads."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

import perturbkv as pk
from tests.support.measured import config, hand_made
from tests.support.scripts import STUDIES, functions

TIES = functions("ties", STUDIES)
CONFIGS = (config("attention"), config("two-stage"))
FIVES = [[5.0] * 4] * 2


def made(treatment: list[list[float]], floor: float, tokens: tuple[int, int] = (7, 7)) -> pk.Trace:
    """The treatment's perturbation, (sample, head), beside a baseline's of 5; both kinds alike, no kept sets equal."""
    both = np.stack([FIVES, treatment], axis=1)[:, :, None]
    floors = np.full((2, 1, 4), floor)
    arrays: dict[str, Any] = {
        **{f"perturbation_{kind}": both for kind in ("isolated", "propagated")},
        **dict.fromkeys(("noise_floor_isolated", "noise_floor"), floors),
    }
    trace = hand_made(CONFIGS, arrays, heads=4)
    return dataclasses.replace(trace, arrays={**trace.arrays, "token_id": np.array(tokens)[:, None]})


EXACT = made([[4, 6, 5, 4], [4, 6, 5, 4]], 1e-9)


def rows(rounded: pk.Trace) -> list[list[str]]:
    """The numbers of isolated and of propagated, without the columns of the run's names."""
    found = list(TIES["agreement_rows"](EXACT, rounded))
    assert [row[2] for row in found] == ["isolated L1", "propagated L1"]
    assert {len(row) for row in found} == {len(TIES["HEADS"])}
    return [row[3:] for row in found]


def test_decided_heads_agree_oppose_or_are_tied_in_float32() -> None:
    """Decided: heads 1, 2 and 3 of the first prompt, of which one is float32's; 1, 2 and 4 of the second, all its."""
    isolated, propagated = rows(made([[4, 4, 4, 4.9], [4, 6, 5, 4]], 0.1))
    samples, decided, share, opposite, tied = isolated
    assert isolated == propagated
    assert (samples, decided) == ("2", "6 of 8")
    assert share.startswith("66.7 % [33.3, 100.0]; ")
    assert (opposite, tied) == ("1; 1", "1; 1")


def test_the_other_rule_looks_at_each_value_alone() -> None:
    decided, share, opposite = rows(made([[5.15, 6, 5, 4], [4, 6, 5, 4]], 0.1))[0][1:4]
    assert (decided, share.partition("; ")[0].split()[0], opposite) == ("5 of 8", "100.0", "0; 1")
    assert share.endswith("83.3 %")  # five of six
    assert rows(made([[5.15, 6, 5, 4], [4, 6, 5, 4]], 2.1))[0][1:3] == ["0 of 8", f"–; {TIES['OTHER_RULE']}: –"]


def test_a_sample_that_decodes_another_token_is_counted_and_left_out() -> None:
    samples, decided, *_ = rows(made([[6, 4, 4, 6], [4, 6, 5, 4]], 0.1, (8, 7)))[0]
    assert (samples, decided) == ("1 (+ 1 with another token)", "3 of 4")
    with pytest.raises(pk.PerturbkvError, match="got none"):
        rows(made(FIVES, 0.1, (8, 8)))


def test_equal_kept_sets_tie_by_both_rules() -> None:
    rounded = made([[4, 4, 4, 4]] * 2, 0.1)
    places = np.array(rounded.arrays["kept_offset"])
    places[0, 1, 0, 2:] = places[0, 0, 0, 2:]
    same = dataclasses.replace(rounded, arrays={**rounded.arrays, "kept_offset": places})
    _, decided, share, *_ = rows(same)[0]
    assert decided == "6 of 8"
    assert share.partition(": ")[2] == "50.0 %"  # the six others: heads 1, 2 and 1, 2, 3, 4; float32 says so of three


def test_traces_of_other_prompts_are_refused() -> None:
    with pytest.raises(pk.PerturbkvError, match="expected one run's samples"):
        list(TIES["agreement_rows"](EXACT, dataclasses.replace(EXACT, sample_ids=("a", "b"))))
    with pytest.raises(pk.PerturbkvError, match="expected a float32 trace"):
        list(TIES["match_dtypes"]([dataclasses.replace(EXACT, run=dataclasses.replace(EXACT.run, dtype="bfloat16"))]))
