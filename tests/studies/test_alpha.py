"""α chosen on some samples and judged on others: planted optima, planted noise, and every sum by loops."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import perturbkv as pk
from tests.support.measured import config, hand_made
from tests.support.scripts import STUDIES, functions

alpha = SimpleNamespace(**functions("alpha", STUDIES))
ALPHAS = (0.0, 0.25, 0.5, 1.0)
CONFIGS = [config("attention", 128), *(config(f"two-stage(alpha={one})", 128) for one in ALPHAS)]
BEST = np.array([[0.0, 0.0, 1.0], [0.5, 0.5, 0.5]])
"""(layer, head) where a head loses least. Σ |α − best| is 1, 1.25, 1.5, 2 in layer 0, and 1.5, 0.75, 0, 1.5 in 1."""
LAYERS, HEADS = BEST.shape


def trace_of(moved: Any, configs: Any = CONFIGS, **more: Any) -> pk.Trace:
    """`moved`: (sample, config, layer, head) isolated L1; twice as much propagated."""
    samples, count = moved.shape[:2]
    floor = np.full((samples, LAYERS, moved.shape[-1]), 1e-9)
    arrays = {
        "perturbation_isolated": moved,
        "perturbation_propagated": 2 * moved,
        "noise_floor": floor,
        "noise_floor_isolated": floor,
        "hidden_drift_l1": moved.sum(axis=-1),
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


class Found:
    """What the study finds in a trace, before any fold is run."""

    def __init__(self, trace: pk.Trace, folder: Path, folds: int | None = None) -> None:
        self.sweep = alpha.read_sweep(trace)
        self.folds = alpha.split_folds(self.sweep, folds, folder)
        self.whole = alpha.choose(self.sweep, np.ones(len(self.sweep.samples), dtype=bool))
        self.rows = {(row["name"], row["chosen_on"]): row for row in alpha.rows_of(self.sweep, self.folds, self.whole)}

    def shares(self, level: str) -> list[Any]:
        chosen: list[Any] = self.sweep.alphas[self.whole[level]].tolist()
        return chosen


def test_each_level_chooses_what_was_planted_and_gains_it_on_other_samples(tmp_path: Path) -> None:
    """Of 6 heads: 6 + 1.25 + 0.75 = 8 at 0.25, 7.5 at 0.5, 6 + 1 + 0 with an α per layer, 6 with one per head."""
    found = Found(trace_of(planted()), tmp_path)
    assert found.shares("head") == BEST.tolist()
    assert found.shares("layer") == [[0.0] * 3, [0.5] * 3]
    assert found.shares("global") == [[0.5] * 3] * 2
    assert found.rows["attention", ""]["over_paper"]["sum_ratio"] == pytest.approx(18 / 8)
    for name, summed in (("one for all heads", 7.5), ("per layer", 7), ("per head", 6)):
        for on in ("others", "same"):
            assert found.rows[name, on]["over_paper"]["sum_ratio"] == pytest.approx(summed / 8)
    points = alpha.curve_of(found.sweep, found.whole)
    for key in ("ratio", "propagated"):
        assert [point[key] for point in points] == pytest.approx([8.5 / 8, 1, 7.5 / 8, 9.5 / 8])
    assert [point["layers"] for point in points] == [0.5, 0, 0.5, 0]
    assert [point["heads"] for point in points] == pytest.approx([2 / 6, 0, 3 / 6, 1 / 6])


def test_ties_go_to_the_alpha_nearest_the_papers(tmp_path: Path) -> None:
    moved = planted()
    moved[:, 1:] = moved[:, 1:2]
    assert {*np.ravel(Found(trace_of(moved), tmp_path).shares("head"))} == {0.25}


def by_loops(moved: Any, folds: int) -> dict[str, Any]:
    """Level -> (sample, layer, head) judged isolated L1: sums, comparisons, and nothing of the study's."""
    judged = {name: np.zeros((len(moved), LAYERS, HEADS)) for name in ("global", "layer", "head")}
    near = sorted(range(len(ALPHAS)), key=lambda place: (abs(ALPHAS[place] - 0.25), ALPHAS[place]))
    everywhere = list(itertools.product(range(LAYERS), range(HEADS)))
    for sample, name, (layer, head) in itertools.product(range(len(moved)), judged, everywhere):
        others = [other for other in range(len(moved)) if other % folds != sample % folds]
        where = {"global": everywhere, "layer": [(layer, one) for one in range(HEADS)], "head": [(layer, head)]}[name]
        sums = {place: sum(float(moved[other][1 + place][at]) for other in others for at in where) for place in near}
        judged[name][sample, layer, head] = moved[sample][1 + min(near, key=sums.__getitem__)][layer][head]
    return judged


@pytest.mark.parametrize(("samples", "folds", "used"), [(16, None, 4), (8, 2, 2), (5, None, 5), (4, None, 4)])
def test_judged_sums_equal_loops(samples: int, folds: int | None, used: int, tmp_path: Path) -> None:
    moved = noise(seed=samples, samples=samples)
    found = Found(trace_of(moved), tmp_path, folds)
    assert len(found.folds) == used
    expected, paper = by_loops(moved, used), moved[:, 2].sum()
    for level, name in alpha.LEVELS.items():
        row = found.rows[name, "others"]
        assert row["over_paper"]["sum_ratio"] == pytest.approx(expected[level].sum() / paper)
        assert row["over_fixed"]["sum_ratio"] == pytest.approx(expected[level].sum() / expected["global"].sum())
        assert row["over_paper"]["better_share"] == pytest.approx((expected[level] < moved[:, 2] - 2e-9).mean())
        median = np.median(expected[level].mean(axis=0) / moved[:, 2].mean(axis=0))
        assert row["over_paper"]["median_ratio"] == pytest.approx(median)


@pytest.mark.parametrize("seed", range(3))
def test_noise_is_not_worth_a_choice_on_other_samples(seed: int, tmp_path: Path) -> None:
    """On the same samples it looks as if it were: that is what judging on others is for."""
    rows = Found(trace_of(noise(seed)), tmp_path).rows
    judged, same = (rows["per head", on]["over_fixed"] for on in ("others", "same"))
    assert judged["sum_ratio_interval"].high > 1
    assert same["sum_ratio"] < judged["sum_ratio"] - 0.05


def test_no_judged_sample_is_looked_at(tmp_path: Path) -> None:
    """Whatever a fold's own samples show, its choice stays."""
    first, moved = Found(trace_of(noise(1)), tmp_path), noise(1)
    moved[3::4] = moved[3::4, ::-1] * 50
    other = Found(trace_of(moved), tmp_path)
    for level, places in first.folds[3].chosen.items():
        assert (other.folds[3].chosen[level] == places).all()
    assert any((other.whole[level] != places).any() for level, places in first.whole.items())


def test_heads_that_share_a_kept_set_choose_together(tmp_path: Path) -> None:
    """Of two heads a set, by the larger of their sums: head 0 prefers 0 by 1, head 1 prefers 1 by 3."""
    kv = [config(one.selection, 128, granularity="kv") for one in CONFIGS]
    moved = np.full((4, 5, 2, 4), 5.0)
    moved[:, 1, :, 0], moved[:, 4, :, 1], moved[:, 2, :, 2] = 4.0, 2.0, 1.0
    offset = np.tile(3 * np.repeat(np.arange(2), 2), (4, 5, 2, 1)) + 6 * np.arange(2)[:, None]
    found = Found(trace_of(moved, kv, kept_offset=offset), tmp_path)
    assert found.shares("head") == [[1.0, 1.0, 0.25, 0.25]] * 2
    layer = [config(one.selection, 128, granularity="layer") for one in CONFIGS]
    assert [*Found(trace_of(moved, layer), tmp_path).whole] == ["global", "layer"]


def test_folds_that_are_run_give_what_comes_out(tmp_path: Path) -> None:
    """Attention loses 3 times what is planted at α = 0, the paper's 2, then 1 for all, 0.9 per layer, 0.6 per head."""
    moved, loses = planted(), {"attention": 3.0, "paper": 2.0, "global": 1.0, "layer": 0.9, "head": 0.6}
    found, traces = Found(trace_of(moved), tmp_path), []
    for fold in found.folds:
        of = {one: loses[role] for role, one in fold.configs.items()}
        shown = np.stack([moved[:, 1] * of[one] for one in fold.distinct], axis=1)
        traces.append(trace_of(shown, fold.distinct).sel(sample=fold.samples))
    told = alpha.outcomes_of(found.sweep, found.folds, traces)
    for row, lost in zip(told["rows"], loses.values(), strict=True):
        assert (row["kl"], row["drift"], row["propagated"]) == pytest.approx((lost / 2,) * 3)
        assert row["kl_over_fixed"] == pytest.approx(lost)
        assert row["kl_lower"] == float(lost < 2)
    assert told["samples"] == 8
    assert told["composed_off"] > 0.1  # what is planted here is not what a fold's tables would lose


def test_a_table_that_is_left_is_read_again(tmp_path: Path) -> None:
    found = Found(trace_of(planted()), tmp_path)
    path = alpha.write_table(tmp_path / "alpha-head.json", found.sweep, "head", found.whole["head"])
    (read,) = pk.grid(128, selection=f"two-stage(alpha={path})")
    assert np.array(read.alpha.shares).tolist() == BEST.tolist()
    assert read.label().startswith("snapkv:two-stage(alpha=alpha-head.json@")


def test_what_cannot_be_composed_or_judged_is_refused(tmp_path: Path) -> None:
    moved = planted()
    counts = np.full(moved.shape, 3)
    counts[:, -1, 0, 0] = 2
    two = np.concatenate([moved, moved], axis=1), [*CONFIGS, *(replace(one, window=16) for one in CONFIGS)]
    whole = [config(one.selection, 128, granularity="head") for one in CONFIGS]
    for trace, said in (
        (trace_of(moved[:3]), "expected 4 samples, .* got 3"),
        (trace_of(moved[:, [0, 1, 3]], [CONFIGS[place] for place in (0, 1, 3)]), "at α = 0.25, got none"),
        (trace_of(moved[:, [0, 2]], [CONFIGS[place] for place in (0, 2)]), "two-stage at several α"),
        (trace_of(*two), "got .*w=32.*; .*w=16"),
        (trace_of(moved, whole), "expected kept sets of one layer"),
        (trace_of(moved, kept_count=counts), "policy 'snapkv' gives heads other budgets at another α"),
    ):
        with pytest.raises(pk.PerturbkvError, match=said):
            alpha.read_sweep(trace)
    for count in (1, 9):
        with pytest.raises(pk.PerturbkvError, match="expected 2 to 8 folds of 8 samples"):
            Found(trace_of(moved), tmp_path, count)
