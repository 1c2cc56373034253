"""Methods are ranked by what they perturb, each beside random entries that protect what it protects."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

from perturbkv.analyses.ablation.methods import control, methods, protection, settings
from perturbkv.analyses.heads.heads import compare_heads
from perturbkv.analyses.identity import identity
from perturbkv.analyses.verdicts import EQUIVALENT, FEW, LESS, MORE, UNDECIDED
from perturbkv.errors import ConfigError, TraceError
from perturbkv.selection.policies.registry import all_policies, normalise
from perturbkv.trace import Trace
from tests.support.measured import config, one_head

KV = {"granularity": "kv"}
SNAPKV = config("attention", 128, **KV)
H2O = config("h2o:attention", 128, **KV)
TOVA = config("tova:attention", 128, **KV)
STAGED = config("two-stage", 128, **KV)
CONTROLS = [normalise(control(SNAPKV, one, name)) for one in (SNAPKV, H2O, TOVA) for name in ("random", "attention")]
L1 = {SNAPKV: 10.0, H2O: 12.0, TOVA: 9.0, STAGED: 8.0}
BY_CHANCE = {CONTROLS[0]: 40.0, CONTROLS[2]: 6.0, CONTROLS[3]: 8.0, CONTROLS[4]: 90.0, CONTROLS[5]: 18.0}


def test_protection_is_read_from_options_of_policy_and_score() -> None:
    assert protection(H2O) == (0, 0.5)
    assert protection(SNAPKV) == (0, 0)
    assert protection(config("streaming-llm:position", 128)) == (4, 0)
    assert protection(config("attention", 128, policy="value-norm(sinks=3)")) == (3, 0)
    assert protection(config("attention", 128, policy="adakv(value-norm(sinks=3))")) == (3, 0)
    assert protection(config("attention", 128, protect_first=9, protect_recent=0.5)) == (9, 0.5)


def test_a_control_is_snapkvs_with_the_methods_own_window_and_ends() -> None:
    found = normalise(control(SNAPKV, TOVA, "random"))
    assert (found.policy.name, found.selection.name, found.window) == ("snapkv", "random", 1)
    assert normalise(control(SNAPKV, H2O, "attention")).protect_recent == 0.5
    assert normalise(control(SNAPKV, SNAPKV, "attention")) == SNAPKV


def test_a_share_and_a_number_protect_what_is_more() -> None:
    assert protection(config("attention", 64, policy="expected-attention", protect_first=0.5, window=8)) == (32, 0)
    assert protection(config("h2o:attention", 64, protect_recent=0.8, window=8)) == (0, 0.8)
    assert protection(config("h2o:attention", 64, protect_recent=50, window=8)) == (0, 50)
    assert protection(config("attention", 0.2, policy="value-norm", protect_first=0.5)) is None


def test_controls_pool_as_the_baseline_does() -> None:
    base = config("attention", 128, preset="released-v2")
    own = config("caote:attention", 128, preset="released-v2")
    assert normalise(control(base, own, "attention")) == base
    assert normalise(control(base, own, "random")).policy.options == {}


def test_rows_of_one_name_say_in_what_they_differ() -> None:
    other = config("h2o:attention", 128, protect_first=4, **KV)
    (found,) = settings(one_head({**L1, other: 11.0}))
    assert [row.name for row in found.rows] == ["snapkv:two-stage", "tova", "h2o protect-first=4", "h2o"]


def test_where_everything_is_protected_the_baseline_is_too() -> None:
    both = [config(name, 128, protect_first=4) for name in ("attention", "caote:attention")]
    (found,) = settings(one_head(dict.fromkeys(both, 2.0)))
    assert (found.baseline, [row.name for row in found.rows]) == (both[0], ["caote"])


def test_rows_are_ordered_by_what_they_perturb_and_held_against_both_controls() -> None:
    (found,) = settings(one_head({**L1, **BY_CHANCE}))
    assert found.baseline == SNAPKV
    assert [row.name for row in found.rows] == ["snapkv:two-stage", "tova", "h2o"]
    assert [row.propagated.sum_ratio for row in found.rows] == pytest.approx([0.8, 0.9, 1.2])
    assert [row.drift_ratio for row in found.rows] == pytest.approx([0.64, 0.81, 1.44])
    assert found.kl_median == pytest.approx(0.35)
    staged, tova, h2o = found.rows
    assert h2o.controls["random"].propagated.sum_ratio == pytest.approx(2.0)
    assert h2o.controls["attention"].propagated.sum_ratio == pytest.approx(1.5)
    assert tova.controls["random"].propagated.sum_ratio == pytest.approx(0.1)
    assert staged.controls["random"].propagated.sum_ratio == pytest.approx(0.2)
    assert staged.controls["attention"].propagated.sum_ratio == pytest.approx(0.8)
    assert found.controls["random"].propagated.sum_ratio == pytest.approx(0.25)
    json.dumps(found.to_dict(), allow_nan=False)


def test_the_conclusion_counts_verdicts_and_names_the_least_and_the_largest() -> None:
    result = methods(one_head({**L1, **BY_CHANCE}))
    assert [row.propagated.case().verdict for row in result.settings[0].rows] == [LESS, LESS, MORE]
    assert result.conclusion() == (
        "A method perturbs less than snapkv in 2 of 3 cases (more: 1): 20 % [20, 20] less at snapkv:two-stage to 20 "
        "% [20, 20] more at h2o; a method perturbs less than random at equal protection in 2 of 3 cases (more: 1): 90 "
        "% [90, 90] less at tova to 100 % [100, 100] more at h2o; a method perturbs less than attention at equal "
        "protection in 2 of 3 cases (more: 1): 50 % [50, 50] less at tova to 50 % [50, 50] more at h2o (propagated, "
        "all heads; n = 6 samples)."
    )


def test_a_policy_alone_is_ranked_with_its_own_selection() -> None:
    trace = one_head({**L1, config("h2o:two-stage", 128, **KV): 7.0})
    for name in ("h2o", "h2o:two-stage", "snapkv:two-stage"):
        assert [row.name for row in methods(trace, only=[name]).settings[0].rows] == [name]
    with pytest.raises(TraceError, match="expected two-stage among the trace's methods, .*h2o:two-stage"):
        methods(trace, only=["two-stage"])


def test_the_selection_of_a_policy_alone_is_its_first() -> None:
    for policy in all_policies():
        assert policy.selections[0] in ("attention", "position", "given")


def test_a_line_shows_the_ratios_over_both_controls_and_the_verdicts() -> None:
    rows = {row[0]: row[3:] for row in methods(one_head({**L1, **BY_CHANCE})).table().rows}
    assert rows == {
        "snapkv (= 1)": ["0.25 [0.25, 0.25]\nbetter", "–"],
        "snapkv:two-stage": ["0.20 [0.20, 0.20]\nbetter", "0.80 [0.80, 0.80]\nbetter"],
        "tova": ["0.10 [0.10, 0.10]\nbetter", "0.50 [0.50, 0.50]\nbetter"],
        "h2o": ["2.00 [2.00, 2.00]\nworse", "1.50 [1.50, 1.50]\nworse"],
    }
    headings = methods(one_head({SNAPKV: 5.0, H2O: 12.0})).table().columns
    assert [one.partition("\n")[0] for one in headings] == ["method", "#cache", "#propagated"]


def noisy(ratio: float, spread: float, samples: int = 8) -> Trace:
    """SnapKV, its random control, and two stages that perturb `ratio` times as much, more or less."""
    found = one_head({SNAPKV: 10.0, CONTROLS[0]: 40.0, STAGED: 10.0 * ratio}, samples)
    arrays = {name: values.copy() for name, values in found.arrays.items()}
    for name in ("perturbation_propagated", "perturbation_isolated"):
        arrays[name][:, 2] *= np.exp(spread * np.resize([1.0, -1.0], samples))[:, None, None, None]
    return dataclasses.replace(found, arrays=arrays)


@pytest.mark.parametrize(
    ("ratio", "spread", "margin", "words"),
    [
        (0.5, 0.05, 0.05, "better"),
        (1.4, 0.05, 0.05, "worse"),
        (0.98, 1e-3, 0.05, "better by < 5 %"),
        (1.02, 1e-3, 0.05, "worse by < 5 %"),
        (1.02, 1e-3, 0.01, "worse"),
        (1.0, 1e-2, 0.05, "within 5 %"),
        (1.0, 1e-2, 0.025, "within 2.5 %"),
        (1.0, 0.1, 0.05, "undecided, n ≈ "),
        (1.0, 0.03, 0.2, "within 20 %"),
    ],
)
def test_a_verdict_is_told_in_words(ratio: float, spread: float, margin: float, words: str) -> None:
    result = methods(noisy(ratio, spread), margin=margin)
    cell = result.table().rows[1][4].partition("\n")[2]
    assert cell == words or (words.endswith("≈ ") and cell.startswith(words) and int(cell[len(words) :]) > 8)
    against = next(row for row in result.records() if row["kind"] == "isolated")
    assert against["against_attention"] == words.partition(" ")[0].strip(",").replace("within", "equivalent")
    assert result.to_dict()["margin"] == margin


def test_the_conclusion_counts_verdicts_at_equal_protection() -> None:
    _, random, attention = methods(noisy(1.0, 1e-2)).claims()
    assert [case.verdict for claim in (random, attention) for case in claim.cases] == [LESS, EQUIVALENT]
    assert attention.clause().startswith(
        "snapkv:two-stage perturbs as much as attention at equal protection within 5 %: 0 % ["
    )
    _, _, attention = methods(noisy(1.0, 0.1)).claims()
    assert [case.verdict for case in attention.cases] == [UNDECIDED]
    (few,) = methods(noisy(1.0, 0.1, samples=4)).claims()
    assert [case.verdict for case in few.cases] == [FEW]


def test_sets_that_keep_the_same_are_equivalent_and_few_samples_decide_nothing() -> None:
    found = methods(noisy(1.0, 0.0)).settings[0].rows[0].controls["attention"]
    assert (found.propagated_verdict.verdict, found.propagated_verdict.within_margin) == ("equivalent", True)
    found = methods(noisy(0.5, 0.0, samples=4)).settings[0].rows[0].controls["attention"]
    assert found.propagated_verdict.verdict == "undecided"
    assert found.propagated_verdict.samples_to_decide is None


@pytest.mark.parametrize("margin", [0, 1, -0.1, 5, float("nan")])
def test_a_margin_is_a_share(margin: float) -> None:
    with pytest.raises(ConfigError, match="expected margin between 0 and 1, the difference that counts as none, got"):
        methods(noisy(1.0, 0.1), margin=margin)


def test_budgets_and_granularities_stand_apart() -> None:
    other = {config("attention", 64): 4.0, config("tova:attention", 64): 3.0}
    found = settings(one_head({**L1, **other}))
    assert [(one.setting, len(one.rows)) for one in found] == [("b=64 query", 1), ("b=128 kv", 3)]


def test_verdicts_over_several_budgets_count_comparisons_and_not_methods() -> None:
    other = {config(name, 64, **KV): number for name, number in (("attention", 4.0), ("tova:attention", 3.0))}
    snapkv = methods(one_head({**L1, **other})).claims()[0]
    assert sorted(case.verdict for case in snapkv.cases) == [LESS] * 3 + [MORE]
    assert [case.name for case in snapkv.cases][0] == "b=64 tova"


def test_a_budget_at_which_nothing_is_evicted_is_said() -> None:
    whole = [config(name, 1.0, **KV) for name in ("attention", "tova:attention")]
    found = one_head({**L1, **dict.fromkeys(whole, 1.0)})
    note = "Nothing is evicted at b=1.0 in 6 of 6 samples."
    assert note not in methods(found).notes()
    for config_ in whole:
        found.arrays["evicted"][:, found.run.configs.index(config_)] = 0
    assert note in methods(found).notes()
    found.arrays["evicted"][2:, -1] = 1
    assert note.replace("6 of 6", "2 of 6") in methods(found).notes()


def test_a_trace_of_one_method_says_what_it_needs() -> None:
    with pytest.raises(TraceError, match="methods needs snapkv:attention and another policy at the same budget; got"):
        methods(one_head({SNAPKV: 1.0, CONTROLS[0]: 2.0}))


def test_tables_fit_80_columns_and_figures_are_drawn() -> None:
    for samples in (1, 3, 6):
        result = methods(one_head({**L1, **BY_CHANCE}, samples))
        assert max(map(len, repr(result).splitlines())) <= 80
        panel = result.plot().axes[0]
        assert len(panel.get_yticklabels()) == 3
        (band,) = (patch for patch in panel.patches if patch.get_gid() == "margin")
        assert band.get_extents().transformed(panel.transData.inverted()).intervalx == pytest.approx([1 / 1.05, 1.05])
    assert {row["name"] for row in result.records()} == {"snapkv:two-stage", "tova", "h2o"}


def test_a_curve_per_method_over_the_budgets_holds_the_outputs_relative_movement() -> None:
    other = {config(name, 64, **KV): number for name, number in (("attention", 4.0), ("tova:attention", 3.0))}
    found = one_head({**L1, **other})
    result = methods(found)
    norm = found.arrays["output_norm"][:, 0].sum()
    configs = found.run.configs
    curves = {line.get_gid(): line.get_ydata() for line in result.plot_budgets().axes[0].get_lines() if line.get_gid()}
    assert set(curves) == {"snapkv", "snapkv:two-stage", "tova", "h2o"}
    for name, label in (("snapkv", "snapkv:attention"), ("tova", "tova:attention")):
        own = [one for one in configs if one.label().startswith(f"{label} ")]
        at = sorted((one.budget.value, configs.index(one)) for one in own)
        moved = [found.arrays["perturbation_propagated"][:, index, 0].sum() / norm for _, index in at]
        np.testing.assert_allclose(curves[name], [100 * share for share in moved], err_msg=name)
    ends = result.settings[0].relative_interval
    assert ends is not None and ends.low <= result.settings[0].relative <= ends.high


def test_words_of_two_stages_stand_only_where_there_are_stages() -> None:
    plain, staged = ({one: number for one, number in L1.items() if one.is_staged <= with_it} for with_it in (0, 1))
    for traced, has in ((one_head(plain), False), (one_head(staged), True)):
        foot = identity(traced, traced.run.configs).lines()[1]
        assert ("a=0.25" in foot) == has
        sigma = np.full_like(traced.arrays["sigma_stage1"], 0.3)
        weak = dataclasses.replace(traced, arrays={**traced.arrays, "sigma_stage1": sigma})
        treatments = "two-stage" if has else "tova:attention"
        said = compare_heads(weak, "snapkv:attention", treatments).notes()
        assert ("Theorem 3" in said) == has
