"""α chosen on some samples and judged on others: planted optima, planted noise, and every number by loops."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from perturbkv.analyses.questions.alpha.alpha import Alpha, alpha
from perturbkv.analyses.questions.alpha.alpha_choice import check_folds
from perturbkv.analyses.text import FEW, LESS
from perturbkv.errors import ConfigError, TraceError
from perturbkv.trace import Trace
from tests.support.measured import config, hand_made

ALPHAS = (0.0, 0.25, 0.5, 1.0)
CONFIGS = [config("attention", 128), *(config(f"two-stage(alpha={one})", 128) for one in ALPHAS)]
BEST = np.array([[0.0, 0.0, 1.0], [0.5, 0.5, 0.5]])
"""(layer, head) where a head loses least. Σ |α − best| is 1, 1.25, 1.5, 2 in layer 0, and 1.5, 0.75, 0, 1.5 in 1."""
LAYERS, HEADS = BEST.shape


def trace_of(moved: Any, configs: Any = CONFIGS, **more: Any) -> Trace:
    """`moved`: (sample, config, layer, head) isolated L1; twice as much propagated."""
    samples, count = moved.shape[:2]
    floor = np.full((samples, LAYERS, moved.shape[-1]), 1e-9)
    arrays = {
        "perturbation_isolated": moved,
        "perturbation_propagated": 2 * moved,
        "noise_floor": floor,
        "noise_floor_isolated": floor,
        "hidden_drift_l1": moved.sum(axis=-1),
        "hidden_noise_floor": floor[:, :, 0],
        "logit_kl": moved.sum(axis=(2, 3)) / 100,
        "sigma_stage1": np.full((samples, count, LAYERS, moved.shape[-1]), 0.9),
    }
    return hand_made(configs, {**arrays, **more}, LAYERS, moved.shape[-1])


def planted(samples: int = 8) -> Any:
    """(sample, config, layer, head): sample i loses (i + 1)(1 + |α − best|) in each head, by attention 3 (i + 1)."""
    off = np.abs(np.array(ALPHAS)[:, None, None] - BEST)
    scale = (1 + np.arange(samples))[:, None, None, None]
    return scale * np.concatenate([np.full((1, LAYERS, HEADS), 3.0), 1 + off])


def noise(seed: int, samples: int = 16) -> Any:
    """Every α loses the same in truth: what differs is drawn anew for each sample, α and head."""
    return np.random.default_rng(seed).lognormal(sigma=0.5, size=(samples, len(CONFIGS), LAYERS, HEADS))


@pytest.fixture(scope="module")
def found() -> Alpha:
    return alpha(trace_of(planted()))


def test_each_level_chooses_what_was_planted(found: Alpha) -> None:
    assert found.shares["head"].shares == tuple(map(tuple, BEST))
    assert found.shares["layer"].shares == ((0.0,), (0.5,))
    assert found.shares["global"].shares == ((0.5,),)
    assert [table.name for table in found.shares.values()] == [
        "alpha-global.json",
        "alpha-layer.json",
        "alpha-head.json",
    ]
    assert found.unstable == {"global": 0, "layer": 0, "head": 0}


def test_what_is_planted_is_gained_on_other_samples_too(found: Alpha) -> None:
    """Of 6 heads: 6 + 1.25 + 0.75 = 8 at 0.25, 7.5 at 0.5, 6 + 1 + 0 with an α per layer, 6 with one per head."""
    rows = {(row.name, row.chosen_on): row.over_paper.sum_ratio for row in found.rows}
    assert rows["attention", ""] == pytest.approx(18 / 8)
    for name, summed in (("one for all heads", 7.5), ("per layer", 7), ("per head", 6)):
        assert rows[name, "others"] == rows[name, "same"] == pytest.approx(summed / 8)
    assert [point.ratio for point in found.curve] == pytest.approx([8.5 / 8, 1, 7.5 / 8, 9.5 / 8])
    assert [point.layers for point in found.curve] == [0.5, 0, 0.5, 0]
    assert [point.heads for point in found.curve] == pytest.approx([2 / 6, 0, 3 / 6, 1 / 6])


def test_ties_go_to_the_alpha_nearest_the_papers() -> None:
    moved = planted()
    moved[:, 1:] = moved[:, 1:2]
    assert set(itertools.chain(*alpha(trace_of(moved)).shares["head"].shares)) == {0.25}


def by_loops(moved: Any, folds: int) -> dict[str, list[list[list[float]]]]:
    """Level -> sample -> (layer, head) judged isolated L1: sums, comparisons, and nothing of the library's."""
    samples, judged = len(moved), {name: [None] * len(moved) for name in ("global", "layer", "head")}
    near = sorted(range(len(ALPHAS)), key=lambda place: (abs(ALPHAS[place] - 0.25), ALPHAS[place]))
    everywhere = list(itertools.product(range(LAYERS), range(HEADS)))
    for sample in range(samples):
        others = [other for other in range(samples) if other % folds != sample % folds]

        def loss(place: int, where: Any, others: list[int] = others) -> float:
            return sum(float(moved[other][1 + place][layer][head]) for other in others for layer, head in where)

        for name in judged:
            rows = [[0.0] * HEADS for _ in range(LAYERS)]
            for layer, head in everywhere:
                of_layer = [(layer, one) for one in range(HEADS)]
                where = {"global": everywhere, "layer": of_layer, "head": [(layer, head)]}[name]
                best = min(near, key=lambda place: loss(place, where))  # noqa: B023
                rows[layer][head] = float(moved[sample][1 + best][layer][head])
            judged[name][sample] = rows  # type: ignore[call-overload]
    return judged  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("samples", "folds", "used"), [(16, None, 4), (8, 2, 2), (8, 8, 8), (5, None, 5), (4, None, 4)]
)
def test_judged_sums_equal_loops(samples: int, folds: int | None, used: int) -> None:
    moved = noise(seed=samples, samples=samples)
    result = alpha(trace_of(moved), folds)
    assert len(result.folds) == used
    expected, paper = by_loops(moved, used), moved[:, 2].sum()
    for by, name in (("global", "one for all heads"), ("layer", "per layer"), ("head", "per head")):
        (row,) = (row for row in result.rows if (row.name, row.chosen_on) == (name, "others"))
        assert row.over_paper.sum_ratio == pytest.approx(np.sum(expected[by]) / paper)
        assert row.over_fixed.sum_ratio == pytest.approx(np.sum(expected[by]) / np.sum(expected["global"]))


@pytest.mark.parametrize("seed", range(6))
def test_noise_is_not_worth_a_choice_on_other_samples(seed: int) -> None:
    """On the same samples it looks as if it were: that is what cross-fitting is for."""
    result = alpha(trace_of(noise(seed)))
    judged, same = result.row("head").over_fixed, result.row("head", "same").over_fixed
    assert judged.sum_ratio_interval is not None and same.sum_ratio_interval is not None
    assert judged.sum_ratio_interval.high > 1
    assert same.sum_ratio < judged.sum_ratio - 0.05
    assert result.unstable["head"] > 0.3


def test_no_judged_sample_is_looked_at() -> None:
    """Whatever a fold's own samples show, its choice stays."""
    first, moved = alpha(trace_of(noise(1))), noise(1)
    moved[3::4] = moved[3::4, ::-1] * 50
    other = alpha(trace_of(moved))
    for by, places in first.folds[3].chosen.items():
        assert (other.folds[3].chosen[by] == places).all()
    assert any((other.chosen[by] != places).any() for by, places in first.chosen.items())


def test_heads_that_share_a_kept_set_choose_together() -> None:
    """Of two heads a set, by the larger of their sums: head 0 prefers 0 by 1, head 1 prefers 1 by 3."""
    kv = [config("attention", 128, granularity="kv"),
          *(config(f"two-stage(alpha={one})", 128, granularity="kv") for one in ALPHAS)]  # fmt: skip
    moved = np.full((4, 5, 2, 4), 5.0)
    moved[:, 1, :, 0], moved[:, 4, :, 1], moved[:, 2, :, 2] = 4.0, 2.0, 1.0
    offset = np.tile(3 * np.repeat(np.arange(2), 2), (4, 5, 2, 1)) + 6 * np.arange(2)[:, None]
    result = alpha(trace_of(moved, kv, kept_offset=offset))
    assert result.sweep.heads_per_set == 2
    assert result.shares["head"].shares == ((1.0, 1.0, 0.25, 0.25),) * 2
    layer = [config(one.selection, 128, granularity="layer") for one in kv]
    assert [*alpha(trace_of(moved, layer)).chosen] == ["global", "layer"]
    for name in ("head", "model"):
        shared = [config(one.selection, 128, granularity=name) for one in kv]
        with pytest.raises(TraceError, match=f"granularity '{name}' has one set for all layers; choose query, kv or"):
            alpha(trace_of(moved, shared))


def fold_traces(found: Alpha, moved: Any) -> list[Trace]:
    """Of each fold's samples what its configurations lose: attention 3, paper 2, then 1 for all, 0.9 and 0.6 of it."""
    loses = {"attention": 3.0, "paper": 2.0, "global": 1.0, "layer": 0.9, "head": 0.6}
    each = []
    for fold in found.folds:
        of = {one: loses[role] for role, one in fold.configs.items()}
        shown = np.stack([moved[:, 1] * of[one] for one in fold.distinct], axis=1)
        each.append(trace_of(shown, list(fold.distinct)).sel(sample=fold.samples))
    return each


def test_what_comes_out_is_that_of_each_folds_own_run(found: Alpha) -> None:
    traces = fold_traces(found, planted())
    result = alpha(trace_of(planted()), of_folds=traces[::-1])
    assert result.measured is not None
    assert [one.name for one in result.measured.outcomes] == [
        "attention", "α = 0.25", "one for all heads", "per layer", "per head"
    ]  # fmt: skip
    for one, loses in zip(result.measured.outcomes, (3.0, 2.0, 1.0, 0.9, 0.6), strict=True):
        assert (one.kl, one.drift, one.propagated) == pytest.approx((loses / 2,) * 3)
        assert one.kl_over_fixed == pytest.approx(loses)
        assert one.kl_lower == float(loses < 2)
    assert result.measured.samples == 8
    json.dumps(result.to_dict(), allow_nan=False)


def test_composed_and_measured_perturbation_are_held_together(found: Alpha) -> None:
    moved, traces = planted(), []
    for fold in found.folds:
        places = [1 + ALPHAS.index(one.alpha) if isinstance(one.alpha, float) else 0 for one in fold.distinct]
        shown = moved[:, places]
        for by in ("layer", "head"):
            table = np.take_along_axis(moved[:, 1:], fold.chosen[by][None, None], axis=1)[:, 0]
            shown[:, fold.distinct.index(fold.configs[by])] = table
        traces.append(trace_of(shown, list(fold.distinct)).sel(sample=fold.samples))
    assert alpha(trace_of(moved), of_folds=traces).measured.composition_error == 0  # type: ignore[union-attr]
    assert alpha(trace_of(moved), of_folds=fold_traces(found, moved)).measured.composition_error > 0.1  # type: ignore[union-attr]


@pytest.mark.parametrize("samples", [4, 8])
def test_screens_and_figures_show_it(samples: int) -> None:
    moved = planted(samples)
    found = alpha(trace_of(moved))
    result = alpha(trace_of(moved), of_folds=fold_traces(found, moved))
    assert max(map(len, repr(result).splitlines())) <= 80
    verdict = result.row("head").over_fixed.case().verdict
    assert verdict == (FEW if samples == 4 else LESS)
    assert "; the KL of α chosen per head is lower than that of α = 0.25 in 100 % [" in result.conclusion()
    rows = result.records()
    assert len(rows) == len(ALPHAS) * LAYERS * HEADS and sum(row["chosen"] for row in rows) == LAYERS * HEADS
    for width in (84, 174):
        axes = result.plot(width).axes
        drawn = {line.get_gid(): line for line in axes[0].get_lines()}
        assert list(drawn["curve"].get_ydata()) == pytest.approx([one.ratio for one in result.curve])
        assert drawn["head"].get_ydata()[0] == pytest.approx(result.row("head").over_paper.sum_ratio)  # type: ignore[index]
        (shown,) = (one for one in axes[1].collections if one.get_gid() == "map")
        assert np.asarray(shown.get_array()).reshape(LAYERS, HEADS).tolist() == BEST.tolist()


def test_what_cannot_be_composed_or_judged_is_refused() -> None:
    moved = planted()
    with pytest.raises(TraceError, match="it needs 4 complete ones, got 3"):
        alpha(trace_of(moved[:3]))
    with pytest.raises(TraceError, match=r"expected configurations to compare .*alpha=0.25"):
        alpha(trace_of(moved[:, [0, 1, 3]], [CONFIGS[place] for place in (0, 1, 3)]))
    with pytest.raises(TraceError, match="needs two-stage at several alpha, got .* alone"):
        alpha(trace_of(moved[:, [0, 2]], [CONFIGS[place] for place in (0, 2)]))
    other = [replace(one, window=16) for one in CONFIGS]
    with pytest.raises(TraceError, match="one policy, budget, granularity and correction, got .*w=32.*; .*w=16"):
        alpha(trace_of(np.concatenate([moved, moved], axis=1), [*CONFIGS, *other]))
    with pytest.raises(TraceError, match="policy 'snapkv' gives heads other budgets at another alpha"):
        counts = np.full(moved.shape, 3)
        counts[:, -1, 0, 0] = 2
        alpha(trace_of(moved, kept_count=counts))
    for count in (1, 9, 0):
        with pytest.raises(ConfigError, match="expected 2 to 8 folds of 8 samples"):
            alpha(trace_of(moved), count)
    for count, samples in ((None, 3), (1, 8), (9, 8)):
        with pytest.raises(ConfigError):
            check_folds(count, samples)


def test_traces_of_other_folds_are_refused(found: Alpha) -> None:
    traces = fold_traces(found, planted())
    for wrong in (traces[:3], [*traces, traces[0]]):
        with pytest.raises(TraceError, match="expected one trace of fold .: the samples s"):
            alpha(trace_of(planted()), of_folds=wrong)
    with pytest.raises(TraceError, match="expected one trace of fold"):
        alpha(trace_of(planted()), folds=2, of_folds=traces)
