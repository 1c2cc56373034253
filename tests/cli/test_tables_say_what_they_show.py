"""Words under and in the tables of results: n, levels, floors, what is compared with what."""

from __future__ import annotations

import io
from collections.abc import Callable
from unittest import mock

import numpy as np

from perturbkv.analyses import text
from perturbkv.analyses.ablation import ablation
from perturbkv.analyses.bounds import bound_tightness, rank_agreement
from perturbkv.analyses.bounds import bound_tightness as bound_tables
from perturbkv.analyses.heads import heads
from perturbkv.analyses.horizon import horizon
from perturbkv.analyses.layers import budget_curves, drift, layers
from perturbkv.analyses.needle import needle
from perturbkv.analyses.result import Result
from perturbkv.analyses.stats.permutation import decide
from perturbkv.cli import console
from perturbkv.configs.choice import Choice
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.display import as_text
from tests.analyses.test_bounds_by_hand import one_config
from tests.analyses.test_bounds_by_hand import ranked as bounded
from tests.analyses.test_needle_and_horizon_by_hand import MOVED, SCORES, growing, ranked
from tests.figures.test_odd_data_give_a_figure import CONFIGS, made
from tests.support.measured import config, hand_made


def said(shown: Callable[..., None], *results: object) -> str:
    """What is printed, its white space as single blanks."""
    out = io.StringIO()
    with mock.patch.object(console, "out", console.Console(file=out, width=200)):
        shown(*results)
    return " ".join(out.getvalue().split())


def told_by(result: Result) -> str:
    """All that a result says of itself, likewise."""
    return " ".join(as_text([result.conclusion(), *result.tables(), result.notes()], width=200).split())


def test_ranks_of_methods_say_what_their_caches_hold() -> None:
    trace = ranked(SCORES, [1] * 4, MOVED)
    trace.arrays["held_share"] = np.tile([0.48, 0.48, 0.51], (4, 1))  # type: ignore[index]
    told = told_by(needle.needle(trace))
    assert told.count("held 0.48 to 0.51") == 2  # the circular ones apart
    assert "Only methods of one budget, one granularity and one protection are ranked together" in told


def test_screens_of_heads_say_options_that_one_side_alone_has_though_all_rows_share_them() -> None:
    by = [config("attention", budget, policy=policy) for budget in (64, 128) for policy in ("snapkv", "adakv(caote)")]
    trace = hand_made(by, {"perturbation_isolated": np.ones((5, 4, 1, 1))})
    result = heads.compare_heads(trace, "snapkv:attention", "adakv:attention")
    for found in (result, result[:1]):
        assert "adakv(by=caote())" in found.conclusion()
        assert "adakv(by=caote())" in " ".join(as_text(found.tables(), width=200).split())
    plugin = Choice("mine.py:Peak", {"tau": 2.0}, frozenset())
    ours = [EvictionConfig(budget, plugin, name) for budget in (64, 128) for name in ("attention", "two-stage")]
    random = [config("attention", budget, policy="random") for budget in (64, 128)]
    trace = hand_made([*ours, *random], {"perturbation_isolated": np.ones((5, 6, 1, 1))})
    headline = heads.compare_heads(trace, "attention", ["two-stage", "random:attention"]).tables()[0]
    assert "tau=2.0" in headline


def test_a_rank_correlation_of_fewer_than_five_samples_is_a_dash_beside_its_n() -> None:
    def shown(flagged: int) -> dict[str, list[str]]:
        sigma = [[0.9] * 3] * (6 - flagged) + [[0.4] * 3] * flagged
        (found,) = rank_agreement.summarise(bounded([[1, 2, 3]] * 6, [[10, 30, 20]] * 6, sigma))
        return {row[1]: row[2:] for row in bound_tables.agreement_rows("64", found)}

    assert shown(1)["ρ where σ > 0.5"][0].startswith("0.50\n[")
    assert shown(1)["ρ where σ > 0.5"][0].endswith("\nn = 5 in 5")
    assert shown(2)["ρ where σ > 0.5"] == ["–\nn = 4 in 4"] * 3
    assert shown(2)["vs attention"] == ["–\nn = 4 in 4"] * 3
    assert shown(2)["ρ"][1] == "–"  # θ̂ has no ρ of all heads


def test_the_share_of_heads_with_evidence_has_its_interval_both_ways() -> None:
    (found,) = bound_tightness.bound_tightness(one_config()).configs  # no head flagged in s0, one of two in s1
    shares = [row[2] for row in bound_tables.ratio_rows("64", found)]
    assert shares == ["75 %\n(50 … 100)", "25 %\n(0 … 50)"]


def test_intervals_of_medians_say_their_own_level() -> None:
    pair = (CONFIGS[0], CONFIGS[2])
    told = layers.drift_notes(drift.summarise(made(samples=8), *pair))
    assert "95 % intervals over samples (medians: 93 %)" in told
    assert "medians:" not in layers.drift_notes(drift.summarise(made(samples=4), *pair))
    assert "medians:" not in text.about_intervals(8)


def test_every_caption_says_its_noise_floor() -> None:
    trace = made(samples=5, hidden_noise_floor=3e-4, noise_floor=2e-3, noise_floor_isolated=1e-3)
    trace.arrays["logit_kl_noise_floor"][:] = 7e-9  # type: ignore[index]
    pair = (CONFIGS[0], CONFIGS[2])
    assert "Noise floor of KL: 7.0e-09 nat (median)." in budget_curves.summarise(trace, ["attention"]).notes()
    told = layers.drift_notes(drift.summarise(trace, *pair))
    assert "Noise floor: 3.0e-04 after the last layer (mean)." in told
    assert "Noise floor: 2.0e-04 of ‖o_h‖ (median)." in told_by(ablation.ablation(trace))
    steps = horizon.horizon(growing(7), ["attention"])
    assert "Noise floor: 1.0e-02 of Σ ‖o_h‖₁" in steps.notes()


def test_samples_say_what_their_caches_hold_and_counts_of_layers_what_they_are() -> None:
    trace = made(samples=5)
    trace.arrays["held_share"] = np.tile([0.2, 0.2, 0.25, 0.4, 0.4, 0.4], (5, 1))  # type: ignore[index]
    pair = (CONFIGS[0], CONFIGS[2])
    assert "0.20 → 0.25" in as_text(layers.sample_tables([drift.summarise_last_layer(trace, *pair)]))
    told = layers.drift_notes(drift.summarise(trace, *pair))
    assert "Layers + / = / −: that drift less, tied, more than the baseline; the means over samples" in told
    assert "without a test" in told


def test_the_ablation_has_intervals_everywhere_and_a_half_per_setting() -> None:
    result = ablation.ablation(made(samples=5))
    results, told = result.settings, told_by(result)
    assert told.count("half of the baseline's Σ lies in") == len(results) == 2
    for kind in (results[0].rows[0].compared.isolated, results[0].rows[0].compared.propagated):
        assert kind.median_ratio_interval is not None
        assert f"[{kind.median_ratio_interval.low:.2f}, {kind.median_ratio_interval.high:.2f}]" in told
        assert text.percent(kind.better_share, kind.better_share_interval).partition("[")[2] in told


def test_few_heads_by_chance_are_told_with_a_decimal() -> None:
    some = decide(np.random.default_rng(0).normal(size=(6, 8)))
    assert 0 < some.chance_mean < 0.5
    assert f"by chance in {some.chance_mean:.1f} " in text.about_flips(some)
    many = decide(np.random.default_rng(0).normal(size=(8, 400)))
    assert many.chance_mean > 10
    assert f"by chance in {many.chance_mean:.0f} " in text.about_flips(many)
