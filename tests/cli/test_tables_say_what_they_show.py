"""Words under and in the tables of results: n, levels, floors, what is compared with what."""

from __future__ import annotations

import io
from collections.abc import Callable
from unittest import mock

import numpy as np
import pytest

from perturbkv.analyses import text
from perturbkv.analyses.ablation import ablation
from perturbkv.analyses.heads import heads
from perturbkv.analyses.horizon import horizon
from perturbkv.analyses.layers import budget_curves, layers
from perturbkv.analyses.needle import needle
from perturbkv.analyses.result import Result
from perturbkv.analyses.stats.permutation import sign_flip_tests
from perturbkv.cli import console
from perturbkv.configs.choice import Choice
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.display import Table, as_text
from tests.analyses.test_needle_and_horizon_by_hand import MOVED, SCORES, growing, ranked
from tests.figures.test_odd_data_give_a_figure import made
from tests.support.measured import config, hand_made


def said(shown: Callable[..., None], *results: object) -> str:
    """What is printed, its white space as single blanks."""
    out = io.StringIO()
    with mock.patch.object(console, "out", console.Console(file=out, width=200)):
        shown(*results)
    return " ".join(out.getvalue().split())


def told_by(result: Result) -> str:
    """All that a result says of itself, likewise."""
    return " ".join(as_text([result.conclusion(), *result.body(), result.notes()], width=200).split())


def test_ranks_of_methods_stand_beside_their_cache_shares() -> None:
    trace = ranked(SCORES, [1] * 4, MOVED)
    trace.arrays["held_share"] = np.tile([0.48, 0.48, 0.51], (4, 1))  # type: ignore[index]
    ranks = [part for part in needle.needle(trace).details() if isinstance(part, Table) and part.columns[0] == "budget"]
    assert [[row[0] for row in table.rows][:3] for table in ranks] == [["64", "cache 0.48 to 0.51", ""]] * 2


def test_screens_of_heads_say_options_that_one_side_alone_has_though_all_rows_share_them() -> None:
    by = [config("attention", budget, policy=policy) for budget in (64, 128) for policy in ("snapkv", "adakv(caote)")]
    trace = hand_made(by, {"perturbation_isolated": np.ones((5, 4, 1, 1))})
    result = heads.compare_heads(trace, "snapkv:attention", "adakv:attention")
    for screen in (result, result[:1]):
        assert "adakv(by=caote())" in screen.conclusion()
        assert "adakv(by=caote())" in screen.title()
    plugin = Choice("mine.py:Peak", {"tau": 2.0}, frozenset())
    ours = [EvictionConfig(budget, plugin, name) for budget in (64, 128) for name in ("attention", "two-stage")]
    random = [config("attention", budget, policy="random") for budget in (64, 128)]
    trace = hand_made([*ours, *random], {"perturbation_isolated": np.ones((5, 6, 1, 1))})
    table = heads.compare_heads(trace, "attention", ["two-stage", "random:attention"]).table()
    assert "tau=2.0" in table.title + " ".join(row[0] for row in table.rows)


@pytest.mark.parametrize("name", ["short", "a method of a longer name", "two-stage-uniform α=0.25"])
@pytest.mark.parametrize("count", range(1, 5))
def test_intervals_stay_whole_in_80_columns(name: str, count: int) -> None:
    """A line breaks before an interval and not inside, whatever else has to give way."""
    numbers = ["0.64 [0.52, 0.77]", "1.25 [0.01, 34.38]", "12 % [−4, 28]", "0.91 (0.85 … 1.02)"][:count]
    headings = ["isolated\nsum", "propagated\nsum", "propagated\nmedian head", "heads better\nthan attention"][:count]
    table = Table("", ["method", "#cache\nshare", *(f"#{one}" for one in headings)], [[name, "0.31", *numbers]] * 2)
    lines = as_text([table]).splitlines()
    for interval in ("[0.52, 0.77]", "[0.01, 34.38]", "[−4, 28]", "(0.85 … 1.02)")[:count]:
        assert sum(interval in line for line in lines) == 2
    assert max(map(len, lines)) <= 80


def test_numbers_that_do_not_fit_are_still_all_shown() -> None:
    cell = "1.53 [0.0012345, 98765.43]"
    shown = as_text([Table("", ["method", *["#sum"] * 4], [["name", *[cell] * 4]])], width=50)
    assert [shown.count(digit) for digit in "0123456789"] == [4 * cell.count(digit) for digit in "0123456789"]


def test_intervals_of_medians_say_their_own_level() -> None:
    assert layers.layer_drift(made(samples=8)).interval_note() == text.intervals_note(8, medians=True)
    assert "93 %" in text.intervals_note(8, medians=True)
    assert "medians:" not in layers.layer_drift(made(samples=4)).interval_note()
    assert "medians:" not in text.intervals_note(8)


def test_every_screen_explains_its_noise_floor() -> None:
    trace = made(samples=5, hidden_noise_floor=3e-4, noise_floor=2e-3, noise_floor_isolated=1e-3)
    trace.arrays["logit_kl_noise_floor"][:] = 7e-9  # type: ignore[index]
    assert any("7.0e-09 nat" in str(line) for line in budget_curves.summarise(trace, ["attention"]).details())
    drifts = layers.layer_drift(trace)
    assert any("3.0e-04" in str(line) for line in drifts.details())
    assert not drifts.caveats()
    assert any("2.0e-04 of" in str(line) for line in ablation.ablation(trace).details())
    steps = horizon.horizon(growing(7), ["attention"])
    assert any("1.0e-02 of Σ" in str(line) for line in steps.details())


def test_layers_and_samples_say_what_their_caches_hold_and_in_how_many_of_them_drift_is_less() -> None:
    trace = made(samples=5)
    trace.arrays["held_share"] = np.tile([0.2, 0.2, 0.25, 0.4, 0.4, 0.4], (5, 1))  # type: ignore[index]
    pairs = [layers.layer_drift(trace), layers.last_layer(trace)]
    for result, counts in zip(pairs, ("layer_counts", "sample_counts"), strict=True):
        table = result.table()
        cells = [dict(zip(result.SHOWN, row[1:], strict=True)) for row in table.rows]
        assert [row["cache_share"] for row in cells] == ["0.25", "0.40"]
        numbers = [line.records[-1 if counts == "sample_counts" else 0] for line in result.lines()]
        assert [row[counts] for row in cells] == [getattr(record, counts) for record in numbers]


def test_several_results_of_one_command_say_once_how_many_samples_there_are() -> None:
    for samples, note in ((7, "n = 7 samples; in brackets"), (3, "n = 3 samples, too few for intervals")):
        trace = made(samples=samples)
        results = [layers.layer_drift(trace), layers.last_layer(trace), budget_curves.budget_curves(trace)]
        shown = said(console.print_results, results, "title")
        assert shown.count(note) == 1
        whole = max((result.interval_note() for result in results), key=len)
        assert " ".join(whole.split()) in shown


def test_the_ablation_has_intervals_everywhere() -> None:
    result = ablation.ablation(made(samples=5))
    results, told = result.settings, told_by(result)
    for kind in (results[0].rows[0].propagated,):
        assert kind.median_ratio_interval is not None
        assert f"[{kind.median_ratio_interval.low:.2f}, {kind.median_ratio_interval.high:.2f}]" in told
        assert text.percent(kind.better_share, kind.better_share_interval).partition("[")[2] in told


def test_few_heads_by_chance_are_told_with_a_decimal() -> None:
    some = sign_flip_tests(np.random.default_rng(0).normal(size=(6, 8)))
    assert 0 < some.chance_mean < 0.5
    result = heads.compare_heads(made(samples=7))
    chance = result[0].propagated.sign_flips.chance_mean
    assert any(f"p ≤ 0.05 in {chance:.1f} heads" in str(line) for line in result.details())
