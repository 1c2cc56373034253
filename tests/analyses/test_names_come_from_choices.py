"""Names of configurations come from what they chose, and tell it."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest
from scipy import stats

from perturbkv.analyses.correlation.correlation import Correlation, correlation
from perturbkv.analyses.identity import MOST_NAMED, identity
from perturbkv.analyses.json_values import config_object, run_object, setting_object
from perturbkv.analyses.names import (
    budget_names,
    common_text,
    distinct_choices,
    fold,
    setting_name,
    short_names,
    side_names,
)
from perturbkv.configs.choice import Choice
from perturbkv.configs.entry_counts import Budget
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.run import RunConfig
from perturbkv.selection.grid import configuration
from tests.analyses.test_correlation_by_hand import (
    CONFIGS,
    DRAW,
    FULL,
    HELD,
    LOST,
    MOVED,
    OTHER,
    SCORES,
    areas,
    correlations,
)
from tests.support.linked import answered, methods
from tests.support.measured import config
from tests.support.traces import run_config, sample_trace, trace

ODD = configuration(0.05, policy="adakv(pool=none, floor=0.3)", protect_first=0.1)


def test_a_name_says_what_differs_and_a_setting_what_is_shared() -> None:
    configs = [config("attention"), config("two-stage"), config("two-stage", alpha=0.5, score="pooled")]
    assert short_names(configs) == ["attention", "two-stage", "two-stage(alpha=0.5, score=pooled)"]
    assert short_names(configs, "selection") == ["", "", "two-stage(alpha=0.5, score=pooled)"]
    assert common_text(configs) == "snapkv b=64 w=32 max7 query"
    assert distinct_choices(configs)[2] == {"selection": "two-stage", "alpha": "a=0.5", "score": "score=pooled"}
    assert setting_name(configs[2], "budget") == "a=0.5 w=32 max7 query score=pooled"
    assert short_names(configs[:1]) == [""]
    assert (short_names([]), common_text([])) == ([], "")


def test_a_selection_and_a_policy_of_one_name_are_told_apart() -> None:
    configs = [configuration(64, policy=policy, selection="random") for policy in ("snapkv", "random")]
    assert short_names(configs) == ["snapkv", "random"]
    assert common_text(configs).startswith("random ")


def test_sides_are_told_by_what_they_differ_in() -> None:
    baseline, treatment, other = config("attention"), config("two-stage"), config("two-stage", policy="adakv")
    assert side_names(baseline, treatment) == ("attention", "two-stage")
    assert side_names(treatment, other) == ("snapkv", "adakv")
    assert side_names(baseline, other) == ("snapkv:attention", "adakv:two-stage")
    inside = configuration(64, policy="streaming-llm(positions=in-cache)", selection="position")
    assert side_names(treatment, inside) == ("snapkv:two-stage", "streaming-llm(positions=in-cache):position")


def test_sides_say_the_options_that_tell_them_apart() -> None:
    usual, by = config("attention", policy="adakv"), config("attention", policy="adakv(caote(pool=max))")
    assert side_names(config("attention"), by) == ("snapkv", "adakv(by=caote(pool=max))")
    assert side_names(usual, by) == ("adakv", "adakv(by=caote(pool=max))")
    assert side_names(by, config("two-stage", policy="adakv(caote(pool=max))")) == ("attention", "two-stage")
    unpooled = config("attention", policy="snapkv(pool=average, kernel=5)")
    assert side_names(config("attention"), unpooled) == ("snapkv", "snapkv(pool=average, kernel=5)")
    assert side_names(config("two-stage"), config("two-stage", alpha=0.5)) == ("two-stage", "two-stage(alpha=0.5)")
    plugin = EvictionConfig(64, Choice("mine.py:Peak", {"tau": 2.0}, frozenset()), "attention")
    assert side_names(plugin, config("attention", policy="random")) == ("mine.py:Peak(tau=2.0)", "random")


def test_a_long_word_is_folded_behind_its_signs_and_a_short_one_is_not() -> None:
    assert fold("snapkv two-stage-uniform") == "snapkv\ntwo-stage-uniform"
    press = "kvpress:CriticalKVPress(SnapKVPress(window_size=64)) given"
    assert fold(press, 30) == "kvpress:CriticalKVPress(\nSnapKVPress(window_size=64))\ngiven"
    assert fold(press, 52) == press.replace(" ", "\n")
    assert fold("adakv(floor=0.1):two-stage", 40) == "adakv(floor=0.1):two-stage"


def test_what_one_protects_and_the_other_does_not_is_no_common_choice() -> None:
    configs = [config("two-stage"), config("two-stage", protect_first=4)]
    assert short_names(configs) == ["", "protect-first=4"]
    assert "protect" not in common_text(configs)


def test_a_policys_option_is_not_shared_with_a_policy_that_lacks_it() -> None:
    configs = [config("two-stage"), config("two-stage", policy="adakv(floor=0.1)")]
    assert short_names(configs) == ["snapkv", "adakv(floor=0.1)"]
    assert "floor" not in common_text(configs)


def test_budgets_of_two_policies_have_two_names() -> None:
    configs = [configuration(budget, policy=policy) for budget in (64, 0.1) for policy in ("snapkv", "adakv")]
    assert budget_names(configs) == [["64", "snapkv"], ["64", "adakv"], ["0.1", "snapkv"], ["0.1", "adakv"]]
    assert budget_names(configs, "policy") == [["64"], ["64"], ["0.1"], ["0.1"]]
    assert [one.budget.unit for one in configs[1:3]] == ["entries", "share of the prompt"]
    assert Budget(1e-5).unit == "share of the prompt"


def test_an_unpooled_configuration_says_nothing_of_a_width() -> None:
    assert setting_name(ODD) == "b=0.05 a=0.25 w=32 unpooled query floor=0.3 protect-first=0.1"
    assert short_names([ODD, configuration(0.05, policy="adakv")]) == [
        "adakv(floor=0.3, pool=none) protect-first=0.1",
        "adakv",
    ]


@pytest.mark.parametrize(
    "made", [ODD, config("attention"), configuration(128, preset="kvpress", policy="h2o")], ids=str
)
def test_a_configuration_is_the_one_that_its_object_says(made: EvictionConfig) -> None:
    document = json.loads(json.dumps(config_object(made)))
    assert document.pop("label") == made.label()
    assert EvictionConfig.from_document(document) == made
    assert type(document["window"]) is int
    assert type(document["selection_options"]["alpha"]) is float
    assert document["policy_options"] == dict(made.policy.options)
    assert type(document["budget"]) is type(made.budget.value)
    assert type(document["protect_first"]) is type(made.protect_first)


def test_a_setting_is_what_all_share() -> None:
    shared = setting_object([config("attention"), config("two-stage", alpha=0.5)])
    assert {"label", "selection", "selection_options"}.isdisjoint(shared)
    assert (shared["budget"], shared["policy"], shared["policy_options"]["kernel"]) == (64, "snapkv", 7)


def test_a_run_is_the_stored_one_with_labels() -> None:
    run = run_config(random_weights=True, seed=7)
    document = json.loads(json.dumps(run_object(run)))
    assert (document["seed"], document["random_weights"]) == (7, True)
    assert [one.pop("label") for one in document["configs"]] == run.labels()
    assert RunConfig.from_json(json.dumps(document)) == run


def foot(configs: list[EvictionConfig]) -> str:
    made = trace(sample_trace(configs=len(configs)), configs=tuple(configs))
    return identity(made, configs).lines()[1]


def test_a_foot_names_sides_and_settings_where_every_pair_is_there() -> None:
    grid = [config(name, budget) for budget in (64, 128) for name in ("attention", "two-stage")]
    assert foot(grid) == "snapkv a=0.25 w=32 max7 query · attention | two-stage · b=64 | b=128"
    assert foot(grid[:3]) == "snapkv a=0.25 w=32 max7 query · attention b=64 | two-stage b=64 | attention b=128"
    many = [config("attention", budget) for budget in range(64, 64 + MOST_NAMED + 1)]
    assert foot(many).endswith(f" · {len(many)} configurations")


@pytest.fixture(scope="module")
def found() -> Correlation:
    return correlation(answered(methods(CONFIGS), SCORES, FULL, {"propagated": MOVED, "isolated": OTHER}))


def test_a_methods_name_tells_what_other_prompts_perturbation_tells(found: Correlation) -> None:
    others = [
        stats.spearmanr(MOVED[other], SCORES[place]).statistic
        for place, other in itertools.permutations(HELD, 2)
        if len(set(SCORES[place])) > 1
    ]
    own = correlations(stats.spearmanr, MOVED)
    names = found.settings[0].identity_baselines("propagated").rho
    assert names.others.value == pytest.approx(np.mean(others))
    assert names.beyond.value == pytest.approx(np.mean(own) - np.mean(others))
    assert names.others.prompts == names.beyond.prompts == len(own)


def test_a_methods_name_tells_lost_answers_as_other_prompts_perturbation_does(found: Correlation) -> None:
    moved = {place: MOVED[place] for place in HELD}
    others = [
        np.mean([
            0.5 + 0.5 * np.sign(moved[other][a] - moved[other][b])
            for a in range(CONFIGS) for b in range(CONFIGS) if LOST[place, a] and not LOST[place, b]
        ])
        for place, other in itertools.permutations(HELD, 2) if 0 < LOST[place].sum() < CONFIGS
    ]  # fmt: skip
    own, names = areas(MOVED, LOST), found.settings[0].identity_baselines("propagated").auc
    assert names.others.value == pytest.approx(np.mean(others))
    assert names.beyond.value == pytest.approx(np.mean(own) - np.mean(others))
    assert names.others.prompts == names.beyond.prompts == len(own)


def test_few_prompts_measures_are_dealt_out_in_all_ways() -> None:
    scores, moved = np.array([[1, 0, 0.5], [0, 1, 1], [0.2, 0.1, 1], [1, 0, 0]]), DRAW.lognormal(size=(4, 3))
    names = (
        correlation(answered(methods(3), scores, np.ones(4), {"propagated": moved}))
        .settings[0]
        .identity_baselines("propagated")
        .rho
    )
    means = [
        np.mean([stats.spearmanr(moved[other], row).statistic for other, row in zip(order, scores, strict=True)])
        for order in itertools.permutations(range(4))
    ]
    far = np.abs(np.array(means) - np.mean(means))
    assert (names.exchanged.exact, names.exchanged.permutations) == (True, 24)
    assert names.exchanged.p == pytest.approx(np.mean(far >= far[0] - 1e-9))
    assert (names.exchanged.low, names.exchanged.high) == pytest.approx(tuple(np.quantile(means, (0.025, 0.975))))


def test_over_budgets_a_prompts_own_less_others_is_its_mean_over_them() -> None:
    configs = [*methods(3, 64), *methods(3, 128)]
    scores, moved = DRAW.integers(0, 2, (7, 6)), DRAW.lognormal(size=(7, 6))
    found = (
        correlation(answered(configs, scores, np.ones(7), {"propagated": moved}))
        .overall[0]
        .identity_baselines("propagated")
        .rho
    )
    each: dict[int, list[float]] = {}
    for place, part in itertools.product(range(7), (slice(0, 3), slice(3, 6))):
        if len(set(scores[place, part])) > 1:
            rhos = [stats.spearmanr(one[part], scores[place, part]).statistic for one in moved]
            each.setdefault(place, []).append(rhos[place] - np.mean(np.delete(rhos, place)))
    assert found.beyond.value == pytest.approx(np.mean([np.mean(one) for one in each.values()]))
    assert found.beyond.prompts == len(each)
