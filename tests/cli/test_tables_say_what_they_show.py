"""Words under and in the tables of results: n, levels, floors, what is compared with what."""

from __future__ import annotations

import io
from collections.abc import Callable
from unittest import mock

import numpy as np

from perturbkv.analyses import bound_tightness, layers, rank_agreement, retrieval
from perturbkv.cli import bound_tightness as bounds_command
from perturbkv.cli import console, numbers
from perturbkv.cli import layers as layers_command
from perturbkv.cli import needle as needle_command
from tests.analyses.test_bounds_by_hand import one_config
from tests.analyses.test_bounds_by_hand import ranked as bounded
from tests.analyses.test_needle_and_horizon_by_hand import MOVED, SCORES, ranked
from tests.figures.test_odd_data_give_a_figure import CONFIGS, made


def said(shown: Callable[..., None], *results: object) -> str:
    """What is printed, its white space as single blanks."""
    out = io.StringIO()
    with mock.patch.object(console, "out", console.Console(file=out, width=200)):
        shown(*results)
    return " ".join(out.getvalue().split())


def test_ranks_of_methods_say_what_their_caches_hold() -> None:
    trace = ranked(SCORES, [1] * 4, MOVED)
    trace.arrays["held_share"] = np.tile([0.48, 0.48, 0.51], (4, 1))  # type: ignore[index]
    told = said(needle_command._print_link, retrieval.summarise(trace))
    assert told.count("held 0.48 to 0.51") == 2  # the circular ones apart
    assert "Only methods of one budget, one granularity and one protection are ranked together" in told


def test_a_rank_correlation_of_fewer_than_five_samples_is_a_dash_beside_its_n() -> None:
    def shown(flagged: int) -> dict[str, list[str]]:
        sigma = [[0.9] * 3] * (6 - flagged) + [[0.4] * 3] * flagged
        (found,) = rank_agreement.summarise(bounded([[1, 2, 3]] * 6, [[10, 30, 20]] * 6, sigma))
        return {row[1]: row[2:] for row in bounds_command._agreement_rows("64", found)}

    assert shown(1)["ρ where σ > 0.5"][0].startswith("0.50 [")
    assert shown(1)["ρ where σ > 0.5"][0].endswith("\nn = 5 in 5")
    assert shown(2)["ρ where σ > 0.5"] == ["–\nn = 4 in 4"] * 3
    assert shown(2)["vs attention"] == ["–\nn = 4 in 4"] * 3
    assert shown(2)["ρ"][1] == "–"  # θ̂ has no ρ of all heads


def test_the_share_of_heads_with_evidence_has_its_interval_both_ways() -> None:
    (found,) = bound_tightness.summarise(one_config()).configs  # no head flagged in s0, one of two in s1
    shares = [row[2] for row in bounds_command._rows("64", found)]
    assert shares == ["75 %\n(50 … 100)", "25 %\n(0 … 50)"]


def test_intervals_of_medians_say_their_own_level() -> None:
    pair = (CONFIGS[0].label(), CONFIGS[2].label())
    told = layers_command._caption(layers.summarise(made(samples=8), *pair), exact=False)
    assert "95 % intervals over samples (medians: 93 %)" in told
    assert "medians:" not in layers_command._caption(layers.summarise(made(samples=4), *pair), exact=False)
    assert "medians:" not in numbers.about_intervals(8)
